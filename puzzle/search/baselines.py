# SPDX-License-Identifier: Apache-2.0
"""What simpler methods find over the same tables. No torch.

Each function takes the tables, targets and scenario of `puzzle.search.solve` and returns a solution whose `method` is
the function's name. Each raises InfeasibleError where its kind of architecture does not meet the targets.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from puzzle.architecture import PARENT, SUBBLOCKS, Architecture, Subblock
from puzzle.costs import TOLERANCE, Scenario, Solution
from puzzle.errors import ConfigError, InfeasibleError, UnsupportedError
from puzzle.search.mip import Program, Targets
from puzzle.search.tables import Limit, Problem, read

if TYPE_CHECKING:
    import optuna

NO_OP = "no_op"


@dataclass(frozen=True, eq=False)
class _Task:
    """A problem with its limits as arrays: `weights[:, chosen].sum(1) <= room` where the targets are met."""

    problem: Problem
    limits: Sequence[Limit]
    weights: np.ndarray  # [limits, candidates], scaled
    room: np.ndarray  # [limits], scaled
    place: np.ndarray  # [candidates], the place of each
    began: float

    @classmethod
    def of(cls, scores: pd.DataFrame, costs: pd.DataFrame, targets: Targets, scenario: Scenario) -> "_Task":
        began = time.perf_counter()
        problem = read(scores, costs)
        limits = problem.limits(targets, scenario)
        weights = [limit.weights / limit.scale for limit in limits]
        room = [(limit.bound - limit.constant) / limit.scale for limit in limits]
        place = np.repeat(np.arange(len(problem.places)), [len(p) for p in problem.places])
        shape = (len(limits), len(problem.candidates))
        return cls(problem, limits, np.reshape(weights, shape), np.array(room), place, began)

    @property
    def parent(self) -> np.ndarray:
        return self.problem.index(Architecture.parent(len(self.problem.places) // 2))

    def overload(self, chosen: np.ndarray) -> np.ndarray:
        """By how much each limit is missed, shape [limits]; zero where it is met."""
        return _above_zero(self.weights[:, chosen].sum(1) - self.room)

    def relief(self, chosen: np.ndarray) -> np.ndarray:
        """By how much the summed overload falls when each candidate replaces its place's choice, shape [candidates]."""
        before = self.weights[:, chosen].sum(1) - self.room
        after = before[:, None] + self.weights - self.weights[:, chosen[self.place]]
        return np.asarray(_above_zero(before).sum() - _above_zero(after).sum(0))

    def finish(self, chosen: np.ndarray | None, method: str) -> Solution:
        """The solution, where the choice meets the targets."""
        if chosen is None or self.overload(chosen).any():
            targets = ", ".join(limit.text for limit in self.limits)
            raise InfeasibleError(f"{method}: finds no architecture that meets {targets}")
        return self.problem.solution(chosen, self.limits, method, time.perf_counter() - self.began)

    def best(self, options: Sequence[np.ndarray]) -> np.ndarray | None:
        """The lowest score of the choices that meet the targets."""
        met = [chosen for chosen in options if not self.overload(chosen).any()]
        return min(met, key=lambda chosen: float(self.problem.scores[chosen].sum()), default=None)


def _above_zero(values: np.ndarray) -> np.ndarray:
    """The values, zero where they are below or within rounding of it."""
    return np.where(values > TOLERANCE, values, 0.0)


def every(
    scores: pd.DataFrame,
    costs: pd.DataFrame,
    targets: Targets,
    scenario: Scenario,
    *,
    block_influence: pd.Series | Sequence[float],
    budget: int = 300,
    seed: int = 0,
) -> list[Solution]:
    """What each of these methods finds, without those that find nothing or need a package that is not installed."""
    methods: list[Callable[[], Solution]] = [
        partial(method, scores, costs, targets, scenario)
        for method in (uniform_ffn_width, uniform_gqa, greedy, paper_greedy, largest_that_fits, no_op_only)
    ]
    methods.append(partial(depth_pruning, scores, costs, targets, scenario, block_influence=block_influence))
    methods += [
        partial(method, scores, costs, targets, scenario, budget=budget, seed=seed)
        for method in (random_search, optuna_nsga2, optuna_tpe)
    ]
    found = []
    for method in methods:
        try:
            found.append(method())
        except (InfeasibleError, UnsupportedError):
            continue
    return found


def uniform_ffn_width(scores: pd.DataFrame, costs: pd.DataFrame, targets: Targets, scenario: Scenario) -> Solution:
    """One FFN width (`ffn768`) for all layers, attention as in the parent."""
    task = _Task.of(scores, costs, targets, scenario)
    return task.finish(task.best(_uniform(task, "ffn", r"ffn\d+")), "uniform_ffn_width")


def uniform_gqa(scores: pd.DataFrame, costs: pd.DataFrame, targets: Targets, scenario: Scenario) -> Solution:
    """One number of KV heads (`kv2`) for all layers, FFN as in the parent."""
    task = _Task.of(scores, costs, targets, scenario)
    return task.finish(task.best(_uniform(task, "attention", r"kv\d+")), "uniform_gqa")


def _uniform(task: _Task, subblock: Subblock, kind: str) -> list[np.ndarray]:
    """The parent, and for each variant of the kind that every layer has, the choice of it everywhere."""
    own = SUBBLOCKS.index(subblock)
    named = [{task.problem.candidates[i].name: i for i in place} for place in task.problem.places[own::2]]
    options = [task.parent]
    for name in sorted(set(named[0]).intersection(*named[1:])):
        if re.fullmatch(kind, name):
            chosen = task.parent
            chosen[own::2] = [indices[name] for indices in named]
            options.append(chosen)
    return options


def depth_pruning(
    scores: pd.DataFrame,
    costs: pd.DataFrame,
    targets: Targets,
    scenario: Scenario,
    *,
    block_influence: pd.Series | Sequence[float],
) -> Solution:
    """Whole layers out, least influential first, until the targets are met (ShortGPT, arXiv 2403.03853).

    Args:
        scores: see `puzzle.search.tables`.
        costs: likewise.
        targets: as in `puzzle.search.solve`.
        scenario: the workload of `costs`.
        block_influence: of each layer, 1 - cosine similarity of its input and output: a series by layer, or in
            order. Layers without `no_op` for both subblocks stay.
    """
    task = _Task.of(scores, costs, targets, scenario)
    problem, chosen = task.problem, task.parent
    ordered = block_influence.sort_index() if isinstance(block_influence, pd.Series) else block_influence
    influence = np.asarray(ordered, dtype=float)
    if influence.shape != (len(problem.places) // 2,) or not np.isfinite(influence).all():
        raise ConfigError(f"block_influence: {len(problem.places) // 2} finite numbers are expected, one per layer")
    for layer in np.argsort(influence, kind="stable"):
        if not task.overload(chosen).any():
            break
        halves = [problem.places[2 * layer], problem.places[2 * layer + 1]]
        out = [i for half in halves for i in half if problem.candidates[i].name == NO_OP]
        if len(out) == len(halves):
            chosen[2 * layer : 2 * layer + 2] = out
    return task.finish(chosen, "depth_pruning")


def greedy(scores: pd.DataFrame, costs: pd.DataFrame, targets: Targets, scenario: Scenario) -> Solution:
    """From the parent, change after change the one that adds the least score per cost taken off what is over target."""
    task = _Task.of(scores, costs, targets, scenario)
    problem, chosen = task.problem, task.parent
    while task.overload(chosen).any():
        relief = task.relief(chosen)
        useful = np.flatnonzero(relief > TOLERANCE)
        if not useful.size:
            break
        added = problem.scores[useful] - problem.scores[chosen[task.place[useful]]]
        pick = useful[np.argmin(added / relief[useful])]
        chosen[task.place[pick]] = pick
    return task.finish(chosen, "greedy")


def paper_greedy(scores: pd.DataFrame, costs: pd.DataFrame, targets: Targets, scenario: Scenario) -> Solution:
    """The greedy that the Puzzle paper compares with (arXiv 2411.19146, F.2.2).

    Every budget is split equally over the layers. Layers are visited by ascending mean score of their blocks; each
    takes the block of the lowest score within its budget and hands on what it leaves. Where no block is within the
    budget, the layer takes the one that overdraws it least, and the next layer has less.
    """
    task = _Task.of(scores, costs, targets, scenario)
    problem, layers = task.problem, len(task.problem.places) // 2
    blocks = [
        np.array([(a, f) for a in problem.places[2 * layer] for f in problem.places[2 * layer + 1]])
        for layer in range(layers)
    ]
    chosen, left = task.parent, np.zeros(len(task.limits))
    for layer in sorted(range(layers), key=lambda i: float(problem.scores[blocks[i]].sum(1).mean())):
        pairs = blocks[layer]
        budget = left + task.room / layers
        loads = task.weights[:, pairs].sum(2)  # [limits, blocks]
        over = np.maximum(loads - budget[:, None] - TOLERANCE, 0).sum(0)
        pick = np.lexsort((problem.scores[pairs].sum(1), over))[0]
        chosen[2 * layer : 2 * layer + 2] = pairs[pick]
        left = budget - loads[:, pick]
    return task.finish(chosen, "paper_greedy")


def largest_that_fits(scores: pd.DataFrame, costs: pd.DataFrame, targets: Targets, scenario: Scenario) -> Solution:
    """The most parameters within the targets, whatever the scores ("max-params" of the Puzzle paper)."""
    task = _Task.of(scores, costs, targets, scenario)
    if "params" not in task.problem.costs:
        raise ConfigError("largest_that_fits needs the cost 'params', which the cost table does not have")
    optimum = Program(task.problem, task.limits).solve(objective=-task.problem.costs["params"])
    return task.finish(optimum.chosen if optimum else None, "largest_that_fits")


def no_op_only(scores: pd.DataFrame, costs: pd.DataFrame, targets: Targets, scenario: Scenario) -> Solution:
    """The exact optimum where a subblock can only stay or go."""
    task = _Task.of(scores, costs, targets, scenario)
    program = Program(task.problem, task.limits)
    program.restrict([i for i, v in enumerate(task.problem.candidates) if v.name in (PARENT, NO_OP)])
    optimum = program.solve()
    return task.finish(optimum.chosen if optimum else None, "no_op_only")


def random_search(
    scores: pd.DataFrame,
    costs: pd.DataFrame,
    targets: Targets,
    scenario: Scenario,
    *,
    budget: int = 1000,
    seed: int = 0,
) -> Solution:
    """The best of `budget` random architectures; one that misses a target gets random changes until it does not."""
    task = _Task.of(scores, costs, targets, scenario)
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(budget):
        chosen = np.array([rng.integers(place.start, place.stop) for place in task.problem.places])
        while task.overload(chosen).any():
            useful = np.flatnonzero(task.relief(chosen) > TOLERANCE)
            if not useful.size:
                break
            pick = rng.choice(useful)
            chosen[task.place[pick]] = pick
        drawn.append(chosen)
    return task.finish(task.best(drawn), "random_search")


def optuna_nsga2(
    scores: pd.DataFrame,
    costs: pd.DataFrame,
    targets: Targets,
    scenario: Scenario,
    *,
    budget: int = 1000,
    seed: int = 0,
) -> Solution:
    """Optuna's genetic algorithm with the targets as constraints; `budget` is the number of evaluations."""
    task = _Task.of(scores, costs, targets, scenario)
    return task.finish(_optuna(task, "NSGAIISampler", budget, seed), "optuna_nsga2")


def optuna_tpe(
    scores: pd.DataFrame,
    costs: pd.DataFrame,
    targets: Targets,
    scenario: Scenario,
    *,
    budget: int = 1000,
    seed: int = 0,
) -> Solution:
    """The same with Optuna's Bayesian sampler."""
    task = _Task.of(scores, costs, targets, scenario)
    return task.finish(_optuna(task, "TPESampler", budget, seed), "optuna_tpe")


def _optuna(task: _Task, sampler: str, budget: int, seed: int) -> np.ndarray | None:
    try:
        import optuna
    except ImportError:
        raise UnsupportedError('the Optuna baselines need: pip install "puzzle-nas[optuna]"') from None
    problem = task.problem
    drawn = []

    def objective(trial: "optuna.Trial") -> float:
        names = ("{0.layer}.{0.subblock}".format(problem.candidates[place.start]) for place in problem.places)
        chosen = np.array([trial.suggest_categorical(n, list(p)) for n, p in zip(names, problem.places, strict=True)])
        for i, missed in enumerate(task.overload(chosen)):
            trial.set_constraint(str(i), missed)
        drawn.append(chosen)
        return float(problem.scores[chosen].sum())

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(sampler=getattr(optuna.samplers, sampler)(seed=seed))
        study.optimize(objective, n_trials=budget)
    finally:
        optuna.logging.set_verbosity(verbosity)
    return task.best(drawn)
