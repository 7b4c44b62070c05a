# SPDX-License-Identifier: Apache-2.0
"""Pareto sweeps: the best score at each of many values of one measure. No torch."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from puzzle.costs import Scenario, Solution, Target
from puzzle.errors import ConfigError, InfeasibleError
from puzzle.search.conflicts import explain
from puzzle.search.mip import Optimum, Program, Targets


@dataclass(frozen=True)
class ParetoFront:
    """Solutions of which none is better than another in both score and measure, from the lowest score up."""

    measure: str
    scenario: Scenario
    solutions: tuple[Solution, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "measure": self.measure,
            "scenario": vars(self.scenario),
            "solutions": [s.to_json() for s in self.solutions],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ParetoFront":
        solutions = tuple(Solution.from_json(s) for s in data["solutions"])
        return cls(data["measure"], Scenario(**data["scenario"]), solutions)


def sweep(
    scores: pd.DataFrame,
    costs: pd.DataFrame,
    measure: str,
    points: int,
    scenario: Scenario,
    targets: Targets = (),
    *,
    workers: int = 1,
    down_to: float = 0.0,
    **options: Any,
) -> ParetoFront:
    """Solve for `points` bounds on a measure, evenly spaced from the parent to the best reachable, or to `down_to`.

    Even in the cost: a sweep over throughput is even in the time, close at mild speedups and wide at extreme ones. It
    starts from the best score without a bound, which is the parent unless the further targets rule it out.

    Args:
        scores: see `puzzle.search.tables`.
        costs: likewise.
        measure: one of `puzzle.costs.MEASURES`.
        points: how many; dominated ones are left out of the front.
        scenario: the workload of `costs`.
        targets: further targets that every point meets.
        workers: threads; each builds one program and solves its share. The front does not depend on it.
        down_to: where to stop, as a share of the cost it starts from: 0.4 ends a sweep of throughput at 2.5x.
        options: those of `puzzle.search.solve`.

    Raises:
        InfeasibleError: the further targets cannot be met.
        ConfigError: a table, a target, the measure or an option is wrong.
    """
    if points < 2 or workers < 1:
        raise ConfigError(f"a sweep has 2 points and 1 worker at least, not points={points}, workers={workers}")
    swept = Target.parse(f"{measure}{'>=' if measure == 'throughput' else '<='}1x")
    targets = list(targets)

    def build() -> Program:
        return Program.of(scores, costs, [swept, *targets], scenario, **options)

    program = build()
    limit, others = program.limits[0], [x.bound for x in program.limits[1:]]
    free = program.solve(bounds=[math.inf, *others])
    if free is None:
        raise InfeasibleError(explain(program, among=range(1, len(program.limits))))
    least = program.solve(objective=limit.weights, bounds=[math.inf, *others])
    assert least is not None, "the further targets can be met"
    start = limit.load(free.chosen)
    bounds = np.linspace(start, max(limit.load(least.chosen), down_to * start), points).tolist()

    def share(worker: int) -> list[tuple[float, Optimum | None]]:
        own = program if worker == 0 else build()
        return [(bound, own.solve(bounds=[bound, *others])) for bound in bounds[1 + worker :: workers]]

    with ThreadPoolExecutor(workers) as pool:
        found = [(bounds[0], free), *(point for shares in pool.map(share, range(workers)) for point in shares)]
    solutions = []
    for bound, optimum in found:
        assert optimum is not None, "no bound is below the least"
        asked = f"{measure}{swept.sense}{limit.describe(bound)}"
        solution = replace(program.solution(optimum), targets=(asked, *(x.text for x in program.limits[1:])))
        solutions.append((solution.score, limit.load(optimum.chosen), solution))
    return ParetoFront(measure, scenario, _undominated(solutions))


def _undominated(points: Sequence[tuple[float, float, Solution]]) -> tuple[Solution, ...]:
    """Of (score, load, solution), those that no other one equals or beats in both; from the lowest score up."""
    kept: list[Solution] = []
    lowest = math.inf
    for _, load, solution in sorted(points, key=lambda p: p[:2]):
        if load < lowest:
            kept.append(solution)
            lowest = load
    return tuple(kept)
