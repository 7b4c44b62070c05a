# SPDX-License-Identifier: Apache-2.0
"""The exact search: a mixed-integer program with one binary per candidate. The only file that knows PuLP. No torch.

Puzzle (arXiv 2411.19146, appendix B): minimise the sum of replacement scores, one variant per subblock per layer, every
target a linear row. Rows are scaled to their bound and solved to a gap of zero; what the solver returns is checked
again in plain arithmetic.
"""

import math
import re
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pulp

from puzzle.architecture import SUBBLOCKS, Architecture, SubblockVariant
from puzzle.costs import TOLERANCE, Constraint, Scenario, Solution, Target
from puzzle.errors import ConfigError, InfeasibleError, PuzzleError, did_you_mean
from puzzle.search.conflicts import explain
from puzzle.search.tables import Limit, Problem, read

SolverName = Literal["highs", "cbc"]
Targets = Iterable[str | Target | Constraint]
# Of rows and of integrality, relative; at their defaults the solvers take a choice that misses a target by 1e-7.
_PRECISION = TOLERANCE
_ONE_SEQUENCE = Scenario()


@dataclass(frozen=True)
class Workload:
    """A further scenario, with its own cost table and targets."""

    costs: pd.DataFrame
    targets: Sequence[str | Target | Constraint]
    scenario: Scenario


def solve(
    scores: pd.DataFrame,
    costs: pd.DataFrame,
    targets: Targets,
    scenario: Scenario = _ONE_SEQUENCE,
    *,
    also: Sequence[Workload] = (),
    solver: SolverName = "highs",
    time_limit: float = 60.0,
    homogeneous: bool = False,
    pinned: Sequence[int | str] = (),
    max_changes: int | None = None,
    reference: Architecture | None = None,
    exclude: tuple[Sequence[Architecture], int] | None = None,
) -> Solution:
    """The architecture with the lowest sum of scores among those that meet every target.

    Args:
        scores: table of replacement scores; `puzzle.search.tables` describes both tables.
        costs: table of costs, measured under `scenario`.
        targets: such as `"throughput>=1.8x"`, `"memory<=6GiB"`; a factor is of the parent's total, constant included.
        scenario: the workload of `costs`.
        also: further workloads, whose targets the same architecture has to meet.
        solver: `"highs"` or `"cbc"`; CBC stands in where highspy is not installed.
        time_limit: seconds; the best solution by then is returned with its proven gap.
        homogeneous: the same variants in all layers that are not pinned.
        pinned: layers that stay as in `reference` (`3`) and variants that are set (`"12.ffn.ffn768"`).
        max_changes: how many subblocks may differ from `reference`.
        reference: an architecture; default the parent.
        exclude: architectures, and in how many subblocks the solution has to differ from each of them at least.

    Raises:
        InfeasibleError: no architecture meets the targets; says which conflict and the best reachable value of each.
        ConfigError: a table, a target or an option is wrong.
        PuzzleError: the time limit ended before there was a solution.
    """
    return Program.of(
        scores,
        costs,
        targets,
        scenario,
        also=also,
        solver=solver,
        time_limit=time_limit,
        homogeneous=homogeneous,
        pinned=pinned,
        max_changes=max_changes,
        reference=reference,
        exclude=exclude,
    ).best()


def k_diverse(
    scores: pd.DataFrame,
    costs: pd.DataFrame,
    targets: Targets,
    scenario: Scenario = _ONE_SEQUENCE,
    *,
    k: int,
    min_distance: int,
    **options: Any,
) -> list[Solution]:
    """`k` solutions: the optimum, then each time the best that differs from all before it (Puzzle, appendix B).

    Args:
        k: how many.
        min_distance: in how many subblocks any two of them differ at least.
        options: those of `solve`, which also describes the other arguments.

    Raises:
        InfeasibleError: the targets cannot be met, or by fewer than `k` such solutions.
    """
    if k < 1 or min_distance < 1:
        raise ConfigError(f"k={k}, min_distance={min_distance}: both are at least 1")
    program = Program.of(scores, costs, targets, scenario, **options)
    found = [program.best()]
    while len(found) < k:
        program.exclude(found[-1].architecture, min_distance)
        optimum = program.solve()
        if optimum is None:
            raise InfeasibleError(f"only {len(found)} of {k} solutions differ in {min_distance} subblocks or more")
        found.append(program.solution(optimum))
    return found


@dataclass(frozen=True, eq=False)
class Optimum:
    """What the solver found."""

    chosen: np.ndarray  # candidate indices [places]
    optimal: bool
    bound: float  # what is proven of the objective: no choice has less
    seconds: float


class Program:
    """The mixed-integer program of a problem: built once, solved for any bounds and objectives."""

    def __init__(
        self,
        problem: Problem,
        limits: Sequence[Limit],
        *,
        solver: SolverName = "highs",
        time_limit: float = 60.0,
        homogeneous: bool = False,
        pinned: Sequence[int | str] = (),
        max_changes: int | None = None,
        reference: Architecture | None = None,
        exclude: tuple[Sequence[Architecture], int] | None = None,
    ):
        """The arguments are those of `solve`."""
        if not time_limit > 0:
            raise ConfigError(f"time_limit={time_limit}: the seconds for the solver are above zero")
        self.problem, self.limits = problem, tuple(limits)
        self.solver, self.time_limit = _available(solver), time_limit
        self._reference = reference or Architecture.parent(len(problem.places) // 2)
        self._lp = pulp.LpProblem("puzzle", pulp.LpMinimize)
        self._x = [pulp.LpVariable(f"x{i}", cat=pulp.LpBinary) for i in range(len(problem.candidates))]
        for place in problem.places:
            self._lp += self._sum(place) == 1
        self._rows = []
        for limit in self.limits:
            self._rows.append(self._weighted(limit.weights / limit.scale) <= 1)
            self._lp += self._rows[-1]
        pins = self._pin(pinned)
        if homogeneous:
            self._tie([place for place in problem.places if not pins.intersection(place)])
        if max_changes is not None:
            if max_changes < 0:
                raise ConfigError(f"max_changes={max_changes}: the number of changes is not below zero")
            self._lp += self._sum(problem.index(self._reference)) >= len(problem.places) - max_changes
        if exclude is not None:
            for architecture in exclude[0]:
                self.exclude(architecture, exclude[1])

    @classmethod
    def of(
        cls,
        scores: pd.DataFrame,
        costs: pd.DataFrame,
        targets: Targets,
        scenario: Scenario,
        *,
        also: Sequence[Workload] = (),
        **options: Any,
    ) -> "Program":
        """Read the tables of `solve` and build its program."""
        problem = read(scores, costs)
        limits = problem.limits(targets, scenario)
        for workload in also:
            limits += read(scores, workload.costs).limits(workload.targets, workload.scenario)
        return cls(problem, limits, **options)

    def exclude(self, architecture: Architecture, min_distance: int) -> None:
        """From now on, only choices that differ from this one in at least so many subblocks."""
        self._lp += self._sum(self.problem.index(architecture)) <= len(self.problem.places) - min_distance

    def restrict(self, allowed: Iterable[int]) -> None:
        """From now on, only these candidates."""
        self._lp += self._sum(set(range(len(self._x))).difference(allowed)) == 0

    def best(self) -> Solution:
        """The solution of the lowest score.

        Raises:
            InfeasibleError: there is none.
        """
        optimum = self.solve()
        if optimum is None:
            raise InfeasibleError(explain(self))
        return self.solution(optimum)

    def solution(self, optimum: Optimum) -> Solution:
        """An optimum of the scores with its figures."""
        return self.problem.solution(
            optimum.chosen,
            self.limits,
            self.solver,
            optimum.seconds,
            optimal=optimum.optimal,
            bound=optimum.bound,
        )

    def solve(self, *, objective: np.ndarray | None = None, bounds: Sequence[float] | None = None) -> Optimum | None:
        """Minimise a sum over the chosen candidates; None where no choice is within the bounds.

        Args:
            objective: value of each candidate, shape [candidates]; default the scores.
            bounds: one per limit, instead of its own; infinite for a limit that does not count.

        Raises:
            PuzzleError: the time limit ended before there was a solution.
        """
        objective = self.problem.scores if objective is None else objective
        bounds = [limit.bound for limit in self.limits] if bounds is None else bounds
        size = float(np.abs(objective).max()) or 1.0
        self._lp.setObjective(self._weighted(objective / size))
        for row, limit, bound in zip(self._rows, self.limits, bounds, strict=True):
            most = sum(limit.weights[place].max() for place in self.problem.places)
            row.changeRHS((most if math.isinf(bound) else bound - limit.constant) / limit.scale)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "cbc.log"
            self._lp.solve(_make_solver(self.solver, self.time_limit, log))
            seconds = time.perf_counter() - start
            # CBC may call a program infeasible that it had no time for
            if self._lp.status == pulp.LpStatusInfeasible and seconds < self.time_limit:
                return None
            if self._lp.status != pulp.LpStatusOptimal:
                raise PuzzleError(f"no solution within the time limit of {self.time_limit:g} s; give it more time")
            values = [x.varValue for x in self._x]
            chosen = np.array([max(place, key=values.__getitem__) for place in self.problem.places])
            optimal = self._lp.sol_status == pulp.LpSolutionOptimal
            bound = float(objective[chosen].sum()) if optimal else size * self._proven(log)
        return Optimum(chosen, optimal, bound, seconds)

    def _proven(self, log: Path) -> float:
        """The lower bound of an objective that the time limit left open."""
        if self.solver == "highs":
            return float(self._lp.solverModel.getInfo().mip_dual_bound)
        line = re.search(r"^Lower bound:\s*(\S+)", log.read_text(encoding="utf-8"), re.MULTILINE)
        return float(line[1]) if line else -math.inf

    def _sum(self, indices: Iterable[int]) -> pulp.LpAffineExpression:
        return pulp.LpAffineExpression([(self._x[i], 1) for i in indices])

    def _weighted(self, weights: np.ndarray) -> pulp.LpAffineExpression:
        return pulp.LpAffineExpression(zip(self._x, weights.tolist(), strict=True))

    def _pin(self, pinned: Sequence[int | str]) -> set[int]:
        """Fix layers and variants; returns the fixed candidates."""
        fixed: set[int] = set()
        for pin in pinned:
            if isinstance(pin, str):
                try:
                    variants = [SubblockVariant.from_key(pin)]
                except ValueError:
                    raise ConfigError(f"pinned {pin!r} is no variant such as '12.ffn.ffn768'") from None
            else:
                variants = [v for v in self._reference.variants if v.layer == pin]
                if not variants:
                    raise ConfigError(f"pinned layer {pin}: the layers are 0 to {self._reference.num_layers - 1}")
            fixed.update(self.problem.find(v) for v in variants)
        for i in fixed:
            self._lp += self._sum([i]) == 1
        return fixed

    def _tie(self, places: Sequence[range]) -> None:
        """One choice for all these places of a subblock; a variant that one of them lacks is out."""
        candidates = self.problem.candidates
        for subblock in SUBBLOCKS:
            named = [{candidates[i].name: i for i in p} for p in places if candidates[p[0]].subblock == subblock]
            shared = set(named[0]).intersection(*named[1:]) if named else set()
            for here in named:
                for name, i in here.items():
                    self._lp += self._sum([i]) == (self._sum([named[0][name]]) if name in shared else 0)


def _available(solver: str) -> SolverName:
    """The solver to use: the one asked for, or CBC where highspy is missing."""
    if solver not in ("highs", "cbc"):
        raise ConfigError(f"unknown solver {solver!r}{did_you_mean(solver, ('highs', 'cbc'))} (known: highs, cbc)")
    return "highs" if solver == "highs" and pulp.HiGHS().available() else "cbc"


def _make_solver(solver: SolverName, time_limit: float, log: Path) -> pulp.LpSolver:
    """A solver with tight tolerances and one thread, so that the result depends on the tables alone."""
    if solver == "highs":
        return pulp.HiGHS(
            msg=False,
            threads=1,
            timeLimit=time_limit,
            gapRel=0.0,
            gapAbs=0.0,
            primal_feasibility_tolerance=_PRECISION,
            mip_feasibility_tolerance=_PRECISION,
        )
    return pulp.COIN_CMD(
        path=pulp.PULP_CBC_CMD.pulp_cbc_path,
        msg=False,
        timeLimit=time_limit,
        gapRel=0.0,
        gapAbs=0.0,
        logPath=str(log),
        # the increment is by how much a solution has to beat the one before; 1e-5 by default
        options=[f"primalTolerance {_PRECISION}", f"integerTolerance {_PRECISION}", "increment 1e-12"],
    )
