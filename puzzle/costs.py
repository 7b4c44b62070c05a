# SPDX-License-Identifier: Apache-2.0
"""Costs, targets and the additive cost model: plain data and arithmetic. No torch.

A cost table is a pandas frame with the columns `layer, subblock, variant` and one column per cost with its unit in the
name. One row (`subblock="model", variant="constant"`) holds what lies outside the layers: embedding, head, final norm.
"""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pandas as pd

from puzzle.architecture import PARENT, Architecture
from puzzle.errors import ConfigError, did_you_mean

COST_COLUMNS = (
    "prefill_ms",
    "decode_ms",
    "weight_bytes",
    "kv_bytes_per_token",
    "params",
    "energy_j_per_token",
)
MODEL, CONSTANT = "model", "constant"
TOLERANCE = 1e-9  # relative: a target met to within rounding of the sums is met


@dataclass(frozen=True)
class Scenario:
    """The workload that costs are measured under; lengths in tokens per sequence.

    `prefill_ms` is one forward pass over `[batch, prompt]` tokens into an empty KV cache; `decode_ms` is one step of
    `[batch, 1]` tokens on a cache that holds the prompt and half of the generated tokens.
    """

    batch: int = 1
    prompt: int = 128
    generated: int = 128
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def length(self) -> int:
        return self.prompt + self.generated


@dataclass(frozen=True)
class Constraint:
    """What the solver gets: `sum(coefficient * cost) <= bound` over the whole model."""

    target: str
    coefficients: dict[str, float]
    bound: float


def latency_coefficients(s: Scenario) -> dict[str, float]:
    return {"prefill_ms": 1.0, "decode_ms": float(s.generated)}


def _memory(s: Scenario) -> dict[str, float]:
    return {"weight_bytes": 1.0, "kv_bytes_per_token": float(s.batch * s.length)}


# Each measure a user can set a target on: the linear form over cost columns, and the unit kind of its value.
# Throughput is the one that is better when higher: generated tokens per second, prefill included in the time.
_MEASURES: dict[str, tuple[Callable[[Scenario], dict[str, float]], str]] = {
    "throughput": (latency_coefficients, "rate"),
    "latency": (latency_coefficients, "time"),
    "prefill": (lambda s: {"prefill_ms": 1.0}, "time"),
    "ttft": (lambda s: {"prefill_ms": 1.0}, "time"),  # time to first token, as serving tools call the same
    "decode": (lambda s: {"decode_ms": 1.0}, "time"),
    "memory": (_memory, "bytes"),
    "weights": (lambda s: {"weight_bytes": 1.0}, "bytes"),
    "kv_cache": (lambda s: {"kv_bytes_per_token": float(s.batch * s.length)}, "bytes"),
    "params": (lambda s: {"params": 1.0}, "count"),
    "energy": (lambda s: {"energy_j_per_token": 1.0}, "energy"),
}
MEASURES = tuple(_MEASURES)
_UNITS: dict[str, dict[str, float]] = {
    "rate": {"": 1.0, "tok/s": 1.0, "tokens/s": 1.0},
    "time": {"ms": 1.0, "s": 1e3, "us": 1e-3},
    "bytes": {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
    "count": {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9},
    "energy": {"j": 1.0},
}
_TARGET = re.compile(r"\s*([a-z_]+)\s*(>=|<=)\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")


@dataclass(frozen=True)
class Target:
    """What the user asks of the child, such as `throughput>=1.8x` or `memory<=6GiB`."""

    measure: str
    sense: Literal[">=", "<="]
    value: float  # in the measure's base unit (tokens/s, ms, bytes, count, J per token), or a factor when relative
    relative: bool
    text: str

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Read a target.

        Raises:
            ConfigError: unknown measure, wrong sense for it, or a value without a fitting unit.
        """
        match = _TARGET.fullmatch(text)
        if not match:
            raise ConfigError(f"target {text!r} is not of the form 'throughput>=1.5x' or 'memory<=6GiB'")
        measure, sense, number, unit = match.groups()
        if measure not in _MEASURES:
            hint = did_you_mean(measure, _MEASURES)
            raise ConfigError(f"target {text!r}: unknown measure {measure!r}{hint} (known: {', '.join(_MEASURES)})")
        wanted: Literal[">=", "<="] = ">=" if measure == "throughput" else "<="
        if sense != wanted:
            raise ConfigError(f"target {text!r}: {measure} takes {wanted}, not {sense}")
        units = {**_UNITS[_MEASURES[measure][1]], "x": 1.0}
        if unit.lower() not in units:
            complaint = f"unit {unit!r} does not fit {measure}" if unit else f"{measure} needs a unit"
            raise ConfigError(f"target {text!r}: {complaint} (known: {', '.join(u for u in units if u)})")
        try:
            value = float(number) * units[unit.lower()]
        except ValueError:
            raise ConfigError(f"target {text!r}: {number!r} is not a number") from None
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"target {text!r}: the value must be finite and above zero")
        return cls(measure, wanted, value, unit.lower() == "x", text.strip())

    def constraint(self, scenario: Scenario, parent: dict[str, float]) -> Constraint:
        """The linear constraint over the whole model; `parent` holds the parent's total of each cost column.

        Raises:
            ConfigError: the cost table lacks a column this target needs.
        """
        coefficients = _MEASURES[self.measure][0](scenario)
        missing = [c for c in coefficients if c not in parent]
        if missing:
            raise ConfigError(f"target {self.text!r} needs the cost {missing[0]!r}, which the cost table does not have")
        total = sum(k * parent[c] for c, k in coefficients.items())
        if self.measure == "throughput":
            bound = total / self.value if self.relative else scenario.batch * scenario.generated * 1e3 / self.value
        else:
            bound = total * self.value if self.relative else self.value
        return Constraint(self.text, coefficients, bound)

    def reached(self, costs: dict[str, float], parent: dict[str, float], scenario: Scenario) -> float:
        """The value this measure has for `costs`, in the unit of `value` (a factor of the parent's when relative)."""
        own, of_parent = measure(self.measure, costs, scenario), measure(self.measure, parent, scenario)
        return own / of_parent if self.relative else own

    def met(self, reached: float) -> bool:
        slack = TOLERANCE * self.value
        return reached >= self.value - slack if self.sense == ">=" else reached <= self.value + slack


def measure(name: str, costs: dict[str, float], scenario: Scenario) -> float:
    """A measure of a whole model from its total costs: throughput in tokens/s, times in ms, sizes in bytes."""
    total = sum(k * costs[c] for c, k in _MEASURES[name][0](scenario).items())
    return scenario.batch * scenario.generated * 1e3 / total if name == "throughput" else total


class CostModel:
    """The additive predictor: constant plus the sum over subblocks of each cost column."""

    def __init__(self, table: pd.DataFrame, scenario: Scenario):
        self.table, self.scenario = table, scenario
        self.columns = [c for c in COST_COLUMNS if c in table.columns and table[c].notna().all()]
        constant = table[(table.subblock == MODEL) & (table.variant == CONSTANT)]
        self.constant = {c: float(constant[c].sum()) for c in self.columns}
        rows = table[table.subblock != MODEL]
        self._rows = {
            (layer, subblock, variant): dict(zip(self.columns, values, strict=True))
            for layer, subblock, variant, *values in rows[["layer", "subblock", "variant", *self.columns]].itertuples(
                index=False, name=None
            )
        }

    def predict(self, architecture: Architecture) -> dict[str, float]:
        """Total costs of an architecture, keyed by cost column."""
        total = dict(self.constant)
        for v in architecture.variants:
            for column, value in self._rows[v.layer, v.subblock, v.name].items():
                total[column] += value
        return total

    def parent(self) -> dict[str, float]:
        layers = 1 + max(layer for layer, _, name in self._rows if name == PARENT)
        return self.predict(Architecture.parent(layers))


@dataclass(frozen=True)
class Solution:
    """An architecture with what the search knows of it."""

    architecture: Architecture
    score: float  # the objective: sum of replacement scores
    costs: dict[str, float]  # predicted totals by cost column
    status: str  # "optimal" or "feasible"
    gap: float  # proven relative gap of the objective
    seconds: float
    method: str  # solver or baseline
    targets: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "architecture": self.architecture.to_json(), "targets": list(self.targets)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Solution":
        return cls(
            **{
                **data,
                "architecture": Architecture.from_json(data["architecture"]),
                "targets": tuple(data["targets"]),
            }
        )
