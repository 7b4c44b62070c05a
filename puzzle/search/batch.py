# SPDX-License-Identifier: Apache-2.0
"""The batch size as a decision. No torch."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from puzzle.architecture import Architecture
from puzzle.costs import TOLERANCE, Constraint, Scenario, Solution, Target, measure
from puzzle.errors import ConfigError, InfeasibleError
from puzzle.search.mip import Program, Targets
from puzzle.search.tables import KEY, read

BATCH = "batch"  # the column of a cost table that was measured at several batch sizes


def by_batch(costs: pd.DataFrame, batch: int | None = None) -> dict[int, pd.DataFrame]:
    """Split a cost table by its column `batch`, if it has one; a row without a batch belongs to every one.

    Args:
        costs: see `puzzle.search.tables`.
        batch: take this one alone; a table without the column is taken to be measured at it (default 1).

    Raises:
        ConfigError: no rows at that batch, or a batch that is no number of sequences.
    """
    if BATCH not in costs.columns:
        return {batch or 1: costs}
    numbers = pd.to_numeric(costs[BATCH], errors="coerce")
    wrong = costs[BATCH].notna() & ~(numbers.ge(1) & numbers.mod(1).eq(0))
    if wrong.any():
        row = int(wrong.to_numpy().argmax())
        raise ConfigError(
            f"costs, row {row + 1}: column 'batch' is '{costs[BATCH].iloc[row]}', not a number of sequences"
        )
    found = {int(b) for b in numbers.dropna()}
    if not found:
        raise ConfigError("costs: the column 'batch' is empty")
    if batch is not None and batch not in found:
        raise ConfigError(f"--batch {batch}: the costs have the batches {', '.join(map(str, sorted(found)))}")
    wanted = sorted(found) if batch is None else [batch]
    return {b: costs[numbers.eq(b) | numbers.isna()].drop(columns=BATCH).reset_index(drop=True) for b in wanted}


def best_batch(
    scores: pd.DataFrame,
    costs: Mapping[int, pd.DataFrame],
    targets: Targets,
    scenario: Scenario,
    **options: Any,
) -> tuple[Scenario, Solution]:
    """Solve for each batch size and keep the best score; of equal ones the larger batch (Puzzle, appendix B).

    A relative throughput is of the parent at its own best batch: the one of its highest throughput among those in
    which it meets the memory targets, or among all where it meets them in none. Other relative targets are of the
    parent at the same batch.

    Args:
        scores: see `puzzle.search.tables`.
        costs: batch size -> cost table measured at it.
        targets: as in `puzzle.search.solve`.
        scenario: the workload; its batch is replaced.
        options: those of `puzzle.search.solve`.

    Returns:
        The scenario with the chosen batch, and the solution.

    Raises:
        InfeasibleError: the targets cannot be met at any batch; says why for each.
        ConfigError: no batch, or a table, target or option is wrong.
    """
    if not costs:
        raise ConfigError("best_batch: no batch size was given")
    parsed = [Target.parse(t) if isinstance(t, str) else t for t in targets]
    scenarios = {batch: replace(scenario, batch=batch) for batch in sorted(costs)}
    if any(isinstance(t, Target) and t.measure == "throughput" and t.relative for t in parsed):
        reference = _parent_throughput(scores, costs, parsed, scenarios)
        parsed = [_absolute(t, reference) for t in parsed]
    found: list[tuple[Scenario, Solution]] = []
    failures = []
    for batch, at in scenarios.items():
        try:
            found.append((at, Program.of(scores, costs[batch], parsed, at, **options).best()))
        except InfeasibleError as error:
            failures.append(f"at batch {batch} {error}")
    if not found:
        raise InfeasibleError("; ".join(failures))
    return min(found, key=lambda pair: (pair[1].score, -pair[0].batch))


def _parent_throughput(
    scores: pd.DataFrame,
    costs: Mapping[int, pd.DataFrame],
    targets: list[Target | Constraint],
    scenarios: Mapping[int, Scenario],
) -> float:
    """The parent's throughput in tokens/s at its best batch."""
    memory = [t for t in targets if isinstance(t, Target) and t.measure == "memory" and not t.relative]
    everywhere, fitting = [], []
    for batch, scenario in scenarios.items():
        problem = read(scores, costs[batch])
        if not {"prefill_ms", "decode_ms"} <= problem.parent.keys():
            raise ConfigError(f"batch {batch}: throughput needs the costs prefill_ms and decode_ms")
        everywhere.append(measure("throughput", problem.parent, scenario))
        parent = problem.index(Architecture.parent(len(problem.places) // 2))
        if all(limit.met(limit.load(parent)) for limit in problem.limits(memory, scenario)):
            fitting.append(everywhere[-1])
    return max(fitting or everywhere)


def _absolute(target: Target | Constraint, parent: float) -> Target | Constraint:
    if isinstance(target, Target) and target.measure == "throughput" and target.relative:
        return replace(target, value=target.value * parent, relative=False)
    return target


def max_batch(
    costs: pd.DataFrame,
    architecture: Architecture,
    target: str | Target,
    scenario: Scenario,
) -> int | None:
    """The largest batch whose weights and KV cache fit the memory target; None where the batch needs no memory.

    Args:
        costs: cost table with `weight_bytes` and `kv_bytes_per_token` (per sequence).
        architecture: the parent or a child.
        target: such as `"memory<=6GiB"`.
        scenario: its lengths count; its batch does not.

    Raises:
        InfeasibleError: a batch of one does not fit.
        ConfigError: no absolute memory target, or the table is wrong.
    """
    target = Target.parse(target) if isinstance(target, str) else target
    if target.measure != "memory" or target.relative:
        raise ConfigError(f"max_batch needs an absolute memory target such as 'memory<=6GiB', not {target.text!r}")
    problem = read(pd.DataFrame(columns=[*KEY, "score"]), costs, architecture)
    totals = problem.totals(problem.index(architecture))
    for column in ("weight_bytes", "kv_bytes_per_token"):
        if column not in totals:
            raise ConfigError(f"target {target.text!r} needs the cost {column!r}, which the cost table does not have")
    weights = totals["weight_bytes"]
    cache = measure("kv_cache", totals, replace(scenario, batch=1))
    left = target.value * (1 + TOLERANCE) - weights
    if left < cache or left < 0:
        raise InfeasibleError(
            f"no batch meets {target.text}: the weights take {weights:.0f} bytes and one sequence of "
            f"{scenario.length} tokens {cache:.0f} bytes"
        )
    return math.floor(left / cache) if cache > 0 else None
