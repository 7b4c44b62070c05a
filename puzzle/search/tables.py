# SPDX-License-Identifier: Apache-2.0
"""The one place that reads, checks and orders score and cost tables. No torch.

scores: the columns `layer, subblock, variant, score`; lower is better. The parent's variant of a subblock is called
`parent`; without a row its score is 0. Other columns are ignored.

costs: `layer, subblock, variant` and any of `puzzle.costs.COST_COLUMNS`, whose names carry the unit. An empty `layer`
(or -1) means every layer; a row that names its layer goes before it. One row `subblock=model, variant=constant` holds
what lies outside the layers; without it that is 0. Columns that end in `_spread` (of a measurement) are ignored, and so
is a cost that no row has.
"""

import math
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from puzzle.architecture import PARENT, SUBBLOCKS, Architecture, SubblockVariant
from puzzle.costs import CONSTANT, COST_COLUMNS, MODEL, TOLERANCE, Constraint, Scenario, Solution, Target
from puzzle.errors import ConfigError, did_you_mean

KEY = ("layer", "subblock", "variant")
Places = dict[tuple[int | None, str, str], int]  # the row of each (layer, subblock, variant); None is every layer


@dataclass(frozen=True, eq=False)
class Limit:
    """A target over the candidates of a problem: constant plus weights of the chosen ones is at most the bound."""

    target: Target | Constraint
    weights: np.ndarray  # [candidates]
    constant: float
    bound: float

    @property
    def text(self) -> str:
        return self.target.text if isinstance(self.target, Target) else self.target.target

    @property
    def scale(self) -> float:
        """The size of the figures, for tolerances and for the solver."""
        return max(abs(self.bound), abs(self.constant), float(np.abs(self.weights).max()), 1e-300)

    def load(self, chosen: np.ndarray) -> float:
        return self.constant + float(self.weights[chosen].sum())

    def met(self, load: float) -> bool:
        return load <= self.bound + TOLERANCE * self.scale

    def describe(self, load: float) -> str:
        """The value of the measure at this load in the target's own unit, rounded so that it can be asked for."""
        if isinstance(self.target, Constraint):
            return _rounded(load, up=True)
        match = re.search(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z/]*)$", self.target.text)
        number, unit = match.groups() if match else (self.target.value, "x" if self.target.relative else "")
        if self.target.sense == ">=":
            return _rounded(float(number) * self.bound / load if load > 0 else math.inf, up=False) + unit
        return _rounded(float(number) * load / self.bound, up=True) + unit


def _rounded(value: float, up: bool) -> str:
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    step = 10.0 ** (math.floor(math.log10(abs(value))) - 3)
    return f"{(math.ceil if up else math.floor)(round(value / step, 6)) * step:.10g}"


@dataclass(frozen=True, eq=False)
class Problem:
    """Checked tables: every candidate of every place in one fixed order, whatever the order of the rows.

    Place `2 * layer` is the attention of a layer, `2 * layer + 1` its FFN. An architecture is a choice of one candidate
    per place: `chosen`, candidate indices of shape [places].
    """

    candidates: tuple[SubblockVariant, ...]
    places: tuple[range, ...]  # the candidates of each place
    scores: np.ndarray  # [candidates]
    costs: dict[str, np.ndarray]  # cost column -> [candidates]
    constant: dict[str, float]
    parent: dict[str, float]  # the parent's total of each cost column

    def index(self, architecture: Architecture) -> np.ndarray:
        """The candidates an architecture consists of.

        Raises:
            ConfigError: it has another number of layers, or a variant the tables do not have.
        """
        if 2 * architecture.num_layers != len(self.places):
            raise ConfigError(f"an architecture of {architecture.num_layers} layers, tables of {len(self.places) // 2}")
        return np.array([self.find(v) for v in architecture.variants])

    def find(self, variant: SubblockVariant) -> int:
        if not 0 <= variant.layer < len(self.places) // 2:
            raise ConfigError(f"{variant.key}: the tables have the layers 0 to {len(self.places) // 2 - 1}")
        place = self.places[2 * variant.layer + SUBBLOCKS.index(variant.subblock)]
        names = [self.candidates[i].name for i in place]
        if variant.name not in names:
            raise ConfigError(f"{variant.key}: no such variant in the scores{did_you_mean(variant.name, names)}")
        return place[names.index(variant.name)]

    def architecture(self, chosen: np.ndarray) -> Architecture:
        names = tuple(self.candidates[i].name for i in chosen)
        return Architecture(names[::2], names[1::2])

    def totals(self, chosen: np.ndarray) -> dict[str, float]:
        return {column: self.constant[column] + float(cost[chosen].sum()) for column, cost in self.costs.items()}

    def gap(self, score: float, bound: float = -math.inf) -> float:
        """Proven relative gap: to a lower bound, at least the sum of each place's lowest score."""
        bound = min(score, max(bound, sum(float(self.scores[place].min()) for place in self.places)))
        return (score - bound) / max(abs(score), abs(bound)) if score > bound else 0.0

    def limits(self, targets: Iterable[str | Target | Constraint], scenario: Scenario) -> list[Limit]:
        """What the targets ask of a choice of candidates.

        Raises:
            ConfigError: a target that cannot be read, that needs a cost the table does not have, or that is relative
                to a parent's total of zero.
        """
        return [self._limit(Target.parse(t) if isinstance(t, str) else t, scenario) for t in targets]

    def _limit(self, target: Target | Constraint, scenario: Scenario) -> Limit:
        constraint = target if isinstance(target, Constraint) else target.constraint(scenario, self.parent)
        unknown = [c for c in constraint.coefficients if c not in self.costs]
        if unknown:
            raise ConfigError(f"target {constraint.target!r} needs the cost {unknown[0]!r}, which the table lacks")
        if isinstance(target, Target) and not constraint.bound > 0:
            raise ConfigError(f"target {target.text!r} is relative to the parent's total, which is zero in the table")
        weights = sum((k * self.costs[c] for c, k in constraint.coefficients.items()), np.zeros(len(self.candidates)))
        outside = sum(k * self.constant[c] for c, k in constraint.coefficients.items())
        return Limit(target, weights, outside, constraint.bound)

    def solution(
        self,
        chosen: np.ndarray,
        limits: Sequence[Limit],
        method: str,
        seconds: float,
        *,
        optimal: bool = False,
        bound: float = -math.inf,
    ) -> Solution:
        """A choice with its figures; `bound` is what is proven of every choice's score."""
        score = float(self.scores[chosen].sum())
        status, texts = "optimal" if optimal else "feasible", tuple(limit.text for limit in limits)
        gap = self.gap(score, bound)
        return Solution(self.architecture(chosen), score, self.totals(chosen), status, gap, seconds, method, texts)


def read_table(path: Path) -> pd.DataFrame:
    """Read a CSV or parquet table.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        return pd.read_csv(path, keep_default_na=False, na_values=["", "nan", "NaN"])
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise ConfigError(f"{path}: cannot be read as a table ({reason})") from None


def read(scores: pd.DataFrame, costs: pd.DataFrame, current: Architecture | None = None) -> Problem:
    """Check two tables and bring them into one order.

    Args:
        scores: one row per variant, see the module's text.
        costs: see the module's text; rows of variants without a score are not used.
        current: the architecture that the scores are changes from; a choice of it without a row scores 0, and what
            else has no row, the parent's variant included, is no candidate. Default: the parent.

    Raises:
        ConfigError: one sentence with the table, row and column at fault.
    """
    score_of = _scores(scores, current)
    places = _keys(costs, "costs")
    columns = _cost_columns(costs)
    candidates = sorted(score_of, key=lambda v: (v.layer, v.subblock, v.name != PARENT, v.name))
    parents = list(Architecture.parent(1 + candidates[-1].layer).variants)
    rows = _cost_rows(candidates, places)
    values = {c: _numbers(costs, "costs", c) for c in columns}
    constant_row = places.get((None, MODEL, CONSTANT))
    constant = {c: 0.0 if constant_row is None else float(v[constant_row]) for c, v in values.items()}
    parent_rows = _cost_rows(parents, places)
    starts = [i for i, v in enumerate(candidates) if i == 0 or _place(v) != _place(candidates[i - 1])]
    return Problem(
        candidates=tuple(candidates),
        places=tuple(range(a, b) for a, b in zip(starts, [*starts[1:], len(candidates)], strict=True)),
        scores=np.array([score_of[v] for v in candidates]),
        costs={c: v[rows] for c, v in values.items()},
        constant=constant,
        parent={c: constant[c] + float(v[parent_rows].sum()) for c, v in values.items()},
    )


def _place(variant: SubblockVariant) -> tuple[int, str]:
    return variant.layer, variant.subblock


def _scores(table: pd.DataFrame, current: Architecture | None) -> dict[SubblockVariant, float]:
    """The score of every candidate; every place has one at least."""
    keys = _keys(table, "scores")
    numbers = _numbers(table, "scores", "score")
    found: dict[SubblockVariant, float] = {}
    for (layer, subblock, name), row in keys.items():
        if subblock == MODEL:
            raise ConfigError(f"{_row(table, 'scores', row)}: subblock 'model' has costs, but no score")
        if layer is None:
            raise ConfigError(f"{_row(table, 'scores', row)}: column 'layer' is empty; a score belongs to one layer")
        found[SubblockVariant(layer, subblock, name)] = float(numbers[row])  # type: ignore[arg-type]
    layers = {v.layer for v in found}
    if current is None:
        if not layers:
            raise ConfigError("scores: the table has no rows")
        missing = sorted(set(range(max(layers) + 1)) - layers)
        if missing:
            raise ConfigError(f"scores: layer {missing[0]} has no variants; a `parent` row of score 0 keeps it")
        current = Architecture.parent(len(layers))
    elif layers and max(layers) >= current.num_layers:
        raise ConfigError(f"scores: layer {max(layers)} is none of the architecture's {current.num_layers} layers")
    return {**{v: 0.0 for v in current.variants}, **found}


def _cost_columns(table: pd.DataFrame) -> list[str]:
    named = [str(c) for c in table.columns if c not in KEY and not str(c).endswith("_spread")]
    for column in named:
        if column not in COST_COLUMNS:
            hint = did_you_mean(column, COST_COLUMNS) or f" (known: {', '.join(COST_COLUMNS)})"
            raise ConfigError(f"costs: the column {column!r} is no known cost with its unit{hint}")
    filled = [c for c in named if table[c].notna().any()]
    if not filled:
        raise ConfigError(f"costs: the table has no cost column (known: {', '.join(COST_COLUMNS)})")
    return filled


def _cost_rows(variants: Sequence[SubblockVariant], places: Places) -> list[int]:
    """The row of each variant in the cost table."""
    rows = []
    for v in variants:
        row = places.get((v.layer, v.subblock, v.name), places.get((None, v.subblock, v.name)))
        if row is None:
            why = "the parent's total" if v.name == PARENT else "its row in the scores"
            raise ConfigError(f"costs: no row for layer {v.layer}, {v.subblock}, variant {v.name!r}, needed by {why}")
        rows.append(row)
    return rows


def _keys(table: pd.DataFrame, name: str) -> Places:
    """The rows by key, checked: known subblocks, whole layers, no row twice."""
    for column in KEY:
        if column not in table.columns:
            near = did_you_mean(column, map(str, table.columns))
            raise ConfigError(f"{name}: the column {column!r} is missing{near}")
    places: Places = {}
    for row, (layer, subblock, variant) in enumerate(zip(*(table[c] for c in KEY), strict=True)):
        if subblock not in (*SUBBLOCKS, MODEL):
            hint = did_you_mean(str(subblock), (*SUBBLOCKS, MODEL)) or " (known: attention, ffn, model)"
            raise ConfigError(f"{_row(table, name, row)}: unknown subblock {subblock!r}{hint}")
        if subblock == MODEL and variant != CONSTANT:
            raise ConfigError(f"{_row(table, name, row)}: the variant of subblock 'model' is 'constant'")
        if not isinstance(variant, str) or not variant:
            raise ConfigError(f"{_row(table, name, row)}: column 'variant' is empty or not text")
        key = (None if subblock == MODEL else _layer(table, name, row, layer), subblock, variant)
        if key in places:
            raise ConfigError(f"{_row(table, name, row)}: the same as row {places[key] + 1}")
        places[key] = row
    return places


def _layer(table: pd.DataFrame, name: str, row: int, value: Any) -> int | None:
    if pd.isna(value) or value in (-1, "", "-1"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not number.is_integer() or number < 0:
        raise ConfigError(f"{_row(table, name, row)}: column 'layer' is {str(value)!r}, not a layer's number")
    return int(number)


def _numbers(table: pd.DataFrame, name: str, column: Hashable) -> np.ndarray:
    """A column as finite float64 numbers of shape [rows]."""
    if column not in table.columns:
        near = did_you_mean(str(column), map(str, table.columns))
        raise ConfigError(f"{name}: the column {column!r} is missing{near}")
    numbers = pd.to_numeric(table[column], errors="coerce").to_numpy(dtype=float, na_value=math.nan)
    bad = np.flatnonzero(~np.isfinite(numbers))
    if bad.size:
        value = table[column].iloc[bad[0]]
        found = "is empty or NaN" if pd.isna(value) else f"is {str(value)!r}, not a finite number"
        raise ConfigError(f"{_row(table, name, int(bad[0]))}: column {column!r} {found}")
    return numbers


def _row(table: pd.DataFrame, name: str, row: int) -> str:
    """`scores, row 7 (layer 3, ffn, ffn768)`; rows count from 1, without the header."""
    layer, subblock, variant = (table[c].iloc[row] for c in KEY)
    text = "any layer" if pd.isna(layer) else f"layer {layer:g}" if isinstance(layer, float) else f"layer {layer}"
    return f"{name}, row {row + 1} ({text}, {subblock}, {variant})"
