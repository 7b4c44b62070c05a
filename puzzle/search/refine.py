# SPDX-License-Identifier: Apache-2.0
"""Search beyond additive scores: score again around the current child, solve within a trust region, repeat. No torch.

Replacement scores do not add up where many subblocks change. So each round takes the change of the whole model's score
for every single change of the current child, solves for at most d changes with a few d, and keeps the child whose true
score is the lowest. The scores come from a scorer that the caller hands in: cheap estimates of all single changes, and
exact values of those that a solution is made of.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
import pandas as pd

from puzzle.architecture import Architecture, SubblockVariant
from puzzle.costs import Scenario, Solution
from puzzle.errors import ConfigError, InfeasibleError, PuzzleError
from puzzle.search.mip import Program, SolverName, Targets
from puzzle.search.settle import settle
from puzzle.search.tables import KEY, Limit, Problem, read


class Scorer(Protocol):
    """What the search asks of a whole model; lower is better."""

    def true_score(self, child: Architecture) -> float:
        """The child's score."""

    def estimates(self, child: Architecture) -> pd.DataFrame:
        """By how much the score changes when one subblock is replaced: `layer, subblock, variant, score`.

        The child's own choices are 0 and may be left out; what else has no row is not considered.
        """

    def exact(self, child: Architecture, variants: Sequence[SubblockVariant]) -> Sequence[float]:
        """The same for some variants, exactly: the difference of two true scores."""


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
    starts: Sequence[Architecture],
    scorer: Scorer,
    *,
    radii: Sequence[int] = (4, 8, 16),
    rounds: int | None = None,
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
        starts: architectures that meet the targets, such as the optimum of the additive scores. The one with the lowest
            true score is where it begins: the further the child is from the parent, the less the sums can tell.
        scorer: judges children, always on the same tokens.
        radii: the numbers of changes to try. Where none lowers the true score, their halves down to 1 are tried.
        rounds: how many at most after round 0; default: no limit.
        min_gain: after a round that lowers the score by less, relative to the score before it, there is none.
        time_limit: seconds, earlier rounds included; no round starts after it.
        on_round: called after each round, to keep it.
        earlier: rounds of an interrupted call with the same arguments; it continues after them.
        solver: `"highs"` or `"cbc"`.

    Raises:
        InfeasibleError: a start misses a target.
        PuzzleError: a score is no finite number.
        ConfigError: a table, a target or an option is wrong, or there is no start.
    """
    targets = list(targets)
    if not starts:
        raise ConfigError("refine: there is no architecture to start from")
    if not radii or min(radii) < 1:
        raise ConfigError(f"refine: radii={tuple(radii)} are numbers of changes, at least 1")
    if rounds is not None and rounds < 0:
        raise ConfigError(f"refine: rounds={rounds} is a number of rounds, not below zero")
    done = list(earlier)

    def keep(new: Round) -> None:
        done.append(new)
        if on_round:
            on_round(new)

    if not done:
        keep(_round_zero(costs, targets, scenario, starts, scorer))
    while not _finished(done, rounds, min_gain, time_limit):
        began = time.perf_counter()
        child = done[-1].solution
        problem = read(scorer.estimates(child.architecture), costs, child.architecture)
        limits = problem.limits(targets, scenario)
        trials = _trials(problem, limits, child, radii, scorer, solver)
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
    starts: Sequence[Architecture],
    scorer: Scorer,
) -> Round:
    began = time.perf_counter()
    ready = []
    for start in dict.fromkeys(starts):
        problem = read(pd.DataFrame(columns=[*KEY, "score"]), costs, start)
        limits, chosen = problem.limits(targets, scenario), problem.index(start)
        missed = [limit for limit in limits if not limit.met(limit.load(chosen))]
        if missed:
            at = missed[0].describe(missed[0].load(chosen))
            raise InfeasibleError(f"refine: a start misses {missed[0].text} (it has {at})")
        ready.append((start, problem, limits))
    scores = [_true(scorer, start) for start, _, _ in ready]
    score = min(scores)
    start, problem, limits = ready[scores.index(score)]
    seconds = time.perf_counter() - began
    return Round(0, (), _solution(problem, limits, start, score, seconds), 0.0, seconds)


def _finished(done: Sequence[Round], rounds: int | None, min_gain: float, time_limit: float | None) -> bool:
    last = done[-1]
    if time_limit is not None and sum(r.seconds for r in done) >= time_limit:
        return True
    if rounds is not None and last.number >= rounds:
        return True
    if last.number == 0:
        return False
    before = last.solution.score + last.gain
    return last.gain == 0 or last.gain < min_gain * abs(before)


def _trials(
    problem: Problem,
    limits: Sequence[Limit],
    child: Solution,
    radii: Sequence[int],
    scorer: Scorer,
    solver: SolverName,
) -> tuple[Trial, ...]:
    """The optimum within each radius, once each, with its true score; the child itself is no trial."""
    own = problem.index(child.architecture)
    if problem.scores[own].any():
        raise ConfigError("estimates: a choice of the child itself has a score that is not 0")
    scores, exact = problem.scores.copy(), np.isin(np.arange(len(problem.scores)), own)
    trials: dict[Architecture, Trial] = {}

    def ask(variants: Sequence[SubblockVariant]) -> Sequence[float]:
        return scorer.exact(child.architecture, variants)

    for radius in [*sorted(set(radii)), *_halves(min(radii))]:
        if radius < min(radii) and any(t.score < child.score for t in trials.values()):
            break
        program = Program(problem, limits, solver=solver, max_changes=radius, reference=child.architecture)
        found = settle(program, scores, exact, ask)
        assert found is not None, "the child itself meets the targets"
        architecture = problem.architecture(found.chosen)
        if architecture not in trials and architecture != child.architecture:
            predicted = child.score + float(scores[found.chosen].sum())
            trials[architecture] = Trial(radius, architecture, predicted, _true(scorer, architecture))
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


def _true(scorer: Scorer, architecture: Architecture) -> float:
    score = float(scorer.true_score(architecture))
    if not math.isfinite(score):
        raise PuzzleError(f"refine: the true score of architecture {architecture.fingerprint[:8]} is {score}")
    return score
