# SPDX-License-Identifier: Apache-2.0
"""Search beyond additive scores: score again around the current child, solve within a trust region, repeat. No torch.

Replacement scores do not add up where many subblocks change. So each round takes the change of the whole model's score
for every single change of the current child, solves for at most d changes with a few d, and keeps the child whose true
score is the lowest. The scores come from two functions that the caller hands in.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import pandas as pd

from puzzle.architecture import Architecture
from puzzle.costs import Scenario, Solution
from puzzle.errors import ConfigError, InfeasibleError, PuzzleError
from puzzle.search.mip import Program, SolverName, Targets
from puzzle.search.tables import KEY, Limit, Problem, read


@dataclass(frozen=True)
class Trial:
    """The optimum within one radius."""

    radius: int  # at most so many subblocks differ from the round's child
    architecture: Architecture
    predicted: float  # the score as the sum of single changes predicts it
    score: float  # the true score

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "architecture": self.architecture.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Trial":
        return cls(**{**data, "architecture": Architecture.from_json(data["architecture"])})


@dataclass(frozen=True)
class Round:
    """One round; round 0 is the start with its true score."""

    number: int
    trials: tuple[Trial, ...]
    solution: Solution  # the best so far, its score the true one
    gain: float  # by how much the best score fell in this round
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "trials": [t.to_json() for t in self.trials],
            "solution": self.solution.to_json(),
            "gain": self.gain,
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Round":
        trials = tuple(Trial.from_json(t) for t in data["trials"])
        return cls(**{**data, "trials": trials, "solution": Solution.from_json(data["solution"])})


def refine(
    costs: pd.DataFrame,
    targets: Targets,
    scenario: Scenario,
    start: Architecture,
    context_scores: Callable[[Architecture], pd.DataFrame],
    true_score: Callable[[Architecture], float],
    *,
    radii: Sequence[int] = (4, 8, 16),
    rounds: int | Literal["auto"] = "auto",
    min_gain: float = 0.01,
    time_limit: float | None = None,
    on_round: Callable[[Round], None] | None = None,
    earlier: Sequence[Round] = (),
    solver: SolverName = "highs",
) -> list[Round]:
    """Lower the true score of an architecture that meets the targets; `rounds[-1].solution` is the answer.

    Args:
        costs: see `puzzle.search.tables`.
        targets: as in `puzzle.search.solve`.
        scenario: the workload of `costs`.
        start: an architecture that meets the targets, such as the optimum of the additive scores.
        context_scores: for a child, a table `layer, subblock, variant, score` with the change of the whole model's
            score when this one subblock of the child is replaced. The child's own choices are 0 and may be left out;
            what else has no row is not considered.
        true_score: the whole model's score of an architecture, on the same tokens.
        radii: the numbers of changes to try. Where none lowers the true score, their halves down to 1 are tried.
        rounds: how many at most after round 0; `"auto"` goes on while a round lowers the score by `min_gain`.
        min_gain: relative to the score before the round.
        time_limit: seconds, earlier rounds included; no round starts after it.
        on_round: called after each round, to keep it.
        earlier: rounds of an interrupted call with the same arguments; it continues after them.
        solver: `"highs"` or `"cbc"`.

    Raises:
        InfeasibleError: `start` misses a target.
        ConfigError: a table, a target or an option is wrong.
    """
    targets = list(targets)
    if not radii or min(radii) < 1:
        raise ConfigError(f"refine: radii={tuple(radii)} are numbers of changes, at least 1")
    if rounds != "auto" and rounds < 0:
        raise ConfigError(f"refine: rounds={rounds} is 'auto' or a number of rounds")
    done = list(earlier)

    def keep(new: Round) -> None:
        done.append(new)
        if on_round:
            on_round(new)

    if not done:
        keep(_round_zero(costs, targets, scenario, start, true_score))
    while not _finished(done, rounds, min_gain, time_limit):
        began = time.perf_counter()
        child = done[-1].solution
        problem = read(context_scores(child.architecture), costs, child.architecture)
        limits = problem.limits(targets, scenario)
        trials = _trials(problem, limits, child, radii, true_score, solver)
        best = min(trials, key=lambda t: t.score, default=None)
        seconds = time.perf_counter() - began
        if best is None or best.score >= child.score:
            keep(Round(len(done), trials, child, 0.0, seconds))
        else:
            solution = _solution(problem, limits, best.architecture, best.score, seconds)
            keep(Round(len(done), trials, solution, child.score - best.score, seconds))
    return done


def _round_zero(
    costs: pd.DataFrame,
    targets: Targets,
    scenario: Scenario,
    start: Architecture,
    true_score: Callable[[Architecture], float],
) -> Round:
    began = time.perf_counter()
    problem = read(pd.DataFrame(columns=[*KEY, "score"]), costs, start)
    limits = problem.limits(targets, scenario)
    chosen = problem.index(start)
    missed = [limit for limit in limits if not limit.met(limit.load(chosen))]
    if missed:
        at = missed[0].describe(missed[0].load(chosen))
        raise InfeasibleError(f"refine: the start misses {missed[0].text} (it has {at})")
    score = _finite(true_score, start)
    seconds = time.perf_counter() - began
    return Round(0, (), _solution(problem, limits, start, score, seconds), 0.0, seconds)


def _finished(done: Sequence[Round], rounds: int | Literal["auto"], min_gain: float, time_limit: float | None) -> bool:
    last = done[-1]
    if time_limit is not None and sum(r.seconds for r in done) >= time_limit:
        return True
    if rounds != "auto" and last.number >= rounds:
        return True
    if last.number == 0:
        return False
    before = last.solution.score + last.gain
    return last.gain == 0 or (rounds == "auto" and last.gain < min_gain * abs(before))


def _trials(
    problem: Problem,
    limits: Sequence[Limit],
    child: Solution,
    radii: Sequence[int],
    true_score: Callable[[Architecture], float],
    solver: SolverName,
) -> tuple[Trial, ...]:
    """The optimum within each radius, once each, with its true score; the child itself is no trial."""
    if problem.scores[problem.index(child.architecture)].any():
        raise ConfigError("context_scores: a choice of the child itself has a score that is not 0")
    trials: dict[Architecture, Trial] = {}
    for radius in [*sorted(set(radii)), *_halves(min(radii))]:
        if radius < min(radii) and any(t.score < child.score for t in trials.values()):
            break
        program = Program(problem, limits, solver=solver, max_changes=radius, reference=child.architecture)
        found = program.best()
        if found.architecture not in trials and found.architecture != child.architecture:
            score = _finite(true_score, found.architecture)
            trials[found.architecture] = Trial(radius, found.architecture, child.score + found.score, score)
    return tuple(trials.values())


def _halves(radius: int) -> Iterator[int]:
    while radius > 1:
        radius //= 2
        yield radius


def _solution(
    problem: Problem, limits: Sequence[Limit], architecture: Architecture, score: float, seconds: float
) -> Solution:
    """The true score has no proven bound, so the gap is that to zero."""
    found = problem.solution(problem.index(architecture), limits, "refine", seconds)
    return replace(found, score=score, gap=1.0 if score else 0.0)


def _finite(true_score: Callable[[Architecture], float], architecture: Architecture) -> float:
    score = float(true_score(architecture))
    if not math.isfinite(score):
        raise PuzzleError(f"refine: the true score of architecture {architecture.fingerprint[:8]} is {score}")
    return score
