# SPDX-License-Identifier: Apache-2.0
import sys

import numpy as np
import pandas as pd
import pytest
from search_instances import SCENARIO, exhaustive, frames, random_tables

from puzzle.architecture import Architecture
from puzzle.costs import CostModel, Target
from puzzle.errors import ConfigError, InfeasibleError, UnsupportedError
from puzzle.search import baselines, solve
from puzzle.search.mip import Program

SEEDED = {"budget": 40, "seed": 1}
ALL = {
    "uniform_ffn_width": {},
    "uniform_gqa": {},
    "depth_pruning": {"block_influence": [0.3, 0.1, 0.4, 0.2]},
    "greedy": {},
    "paper_greedy": {},
    "largest_that_fits": {},
    "no_op_only": {},
    "random_search": SEEDED,
    "optuna_nsga2": SEEDED,
    "optuna_tpe": SEEDED,
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("targets", [["throughput>=1.1x"], ["memory<=0.75x", "latency<=0.8x"], ["params<=0.5x"]])
def test_they_meet_the_targets_and_never_beat_the_optimum(name, targets):
    found = 0
    for seed in range(4):
        scores, costs = random_tables(seed, layers=4)
        optimum = solve(scores, costs, targets, SCENARIO)
        try:
            solution = getattr(baselines, name)(scores, costs, targets, SCENARIO, **ALL[name])
        except InfeasibleError:
            continue
        found += 1
        total, parent = CostModel(costs, SCENARIO).predict(solution.architecture), CostModel(costs, SCENARIO).parent()
        parsed = [Target.parse(t) for t in targets]
        assert all(t.met(t.reached(total, parent, SCENARIO)) for t in parsed)
        assert solution.score >= optimum.score - 1e-12
        assert (solution.method, solution.status, solution.targets) == (name, "feasible", tuple(targets))
    assert found or name in ("uniform_gqa", "uniform_ffn_width")


@pytest.mark.parametrize("name", ALL)
def test_out_of_reach_is_infeasible(name):
    with pytest.raises(InfeasibleError):
        getattr(baselines, name)(*random_tables(0, layers=4), ["memory<=0.01x"], SCENARIO, **ALL[name])


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        (
            "uniform_ffn_width",
            lambda a: set(a.attention) == {"parent"} and len(set(a.ffn)) == 1 and "no_op" not in a.ffn,
        ),
        (
            "uniform_gqa",
            lambda a: set(a.ffn) == {"parent"} and len(set(a.attention)) == 1 and "no_op" not in a.attention,
        ),
        ("no_op_only", lambda a: {*a.attention, *a.ffn} <= {"parent", "no_op"}),
    ],
)
@pytest.mark.parametrize("target", ["params<=0.95x", "params<=0.8x", "kv_cache<=0.7x"])
def test_the_best_of_its_kind(name, allowed, target):
    scores, costs = random_tables(11)
    met = exhaustive(scores, costs, [target], allowed=allowed)
    if met:
        assert getattr(baselines, name)(scores, costs, [target], SCENARIO).score == pytest.approx(met[0][0])
    else:
        with pytest.raises(InfeasibleError, match=name):
            getattr(baselines, name)(scores, costs, [target], SCENARIO)


def test_depth_pruning_takes_the_least_influential_layers_first():
    scores, costs = random_tables(12, layers=5)
    influence = pd.Series([0.1, 0.5, 0.2, 0.4, 0.3])
    parent = CostModel(costs, SCENARIO).parent()["params"]
    out = []
    for layer in influence.sort_values().index:
        out.append(layer)
        names = tuple("no_op" if i in out else "parent" for i in range(5))
        params = CostModel(costs, SCENARIO).predict(Architecture(names, names))["params"]
        target = f"params<={params / parent * (1 + 1e-12)!r}x"
        by_rank = influence.sort_values()  # a series is read by its index
        found = baselines.depth_pruning(scores, costs, [target], SCENARIO, block_influence=by_rank)
        assert found.architecture == Architecture(names, names)


def test_depth_pruning_passes_over_layers_that_have_to_stay():
    scores, costs = random_tables(12)
    scores = scores[~((scores.layer == 0) & (scores.subblock == "ffn") & (scores.variant == "no_op"))]
    found = baselines.depth_pruning(scores, costs, ["params<=0.9x"], SCENARIO, block_influence=[0, 2, 1])
    assert found.architecture.attention == found.architecture.ffn == ("parent", "parent", "no_op")


@pytest.mark.parametrize("influence", [[0.1, 0.2], [0.1, 0.2, float("nan")]])
def test_depth_pruning_needs_a_number_per_layer(influence):
    with pytest.raises(ConfigError, match="3 finite numbers"):
        baselines.depth_pruning(*random_tables(0), ["params<=0.8x"], SCENARIO, block_influence=influence)


def two_layers():
    """Layer 0 hurts less than layer 1; attention is never in the way."""
    score_of = {(0, "ffn", "ffn4"): 1.0, (0, "ffn", "ffn2"): 2.0, (1, "ffn", "ffn4"): 3.0, (1, "ffn", "ffn2"): 9.0}
    cost_of = {(i, "ffn", n): [c] for i in (0, 1) for n, c in (("parent", 10), ("ffn4", 6), ("ffn2", 3))}
    cost_of |= {(i, "attention", "parent"): [0] for i in (0, 1)}
    return frames(score_of, cost_of, [2], ["params"])


def test_greedy_takes_the_least_score_per_cost():
    # 22 -> 15: the parent's layer 0 costs 1/4 per unit as ffn4, 2/7 as ffn2; then 1/3 (to ffn2), 3/3 for the last 3
    found = baselines.greedy(*two_layers(), ["params<=15"], SCENARIO)
    assert found.architecture.ffn == ("ffn2", "parent") and found.score == 2
    found = baselines.greedy(*two_layers(), ["params<=11"], SCENARIO)
    assert found.architecture.ffn == ("ffn2", "ffn4") and found.score == 5


def test_paper_greedy_splits_the_budget_equally_and_hands_on_what_is_left():
    # 7.5 each of 17 - 2: layer 0 first (lower mean), ffn4 leaves 1.5, so layer 1 has 9 and takes ffn4
    found = baselines.paper_greedy(*two_layers(), ["params<=17"], SCENARIO)
    assert found.architecture.ffn == ("ffn4", "ffn4")
    # 8.5 each of 19 - 2: layer 0 leaves 2.5, so layer 1 has 11 and stays
    assert baselines.paper_greedy(*two_layers(), ["params<=19"], SCENARIO).architecture.ffn == ("ffn4", "parent")
    # 2.5 each: nothing is that small, ffn2 overdraws least
    with pytest.raises(InfeasibleError, match="paper_greedy: finds no architecture that meets params<=7"):
        baselines.paper_greedy(*two_layers(), ["params<=7"], SCENARIO)


def test_largest_that_fits_has_the_most_parameters():
    scores, costs = random_tables(13)
    model = CostModel(costs, SCENARIO)
    most = max(model.predict(a)["params"] for _, a in exhaustive(scores, costs, ["latency<=0.7x"]))
    found = baselines.largest_that_fits(scores, costs, ["latency<=0.7x"], SCENARIO)
    assert found.costs["params"] == pytest.approx(most)
    with pytest.raises(ConfigError, match="'params'"):
        baselines.largest_that_fits(scores, costs.drop(columns="params"), ["latency<=0.7x"], SCENARIO)


@pytest.mark.parametrize("name", ["random_search", "optuna_nsga2", "optuna_tpe"])
def test_seeded_searches_repeat_and_more_evaluations_are_no_worse(name):
    scores, costs = random_tables(14, layers=4)
    run = lambda **k: getattr(baselines, name)(scores, costs, ["memory<=0.8x"], SCENARIO, **k)  # noqa: E731
    assert run(budget=20, seed=5).architecture == run(budget=20, seed=5).architecture
    assert run(budget=40, seed=5).score <= run(budget=20, seed=5).score


def test_optuna_is_asked_for_exactly_the_budget(monkeypatch):
    import optuna

    asked = []
    ask = optuna.Trial.suggest_categorical
    monkeypatch.setattr(optuna.Trial, "suggest_categorical", lambda t, *a: (asked.append(t.number), ask(t, *a))[1])
    baselines.optuna_tpe(*random_tables(0), ["memory<=0.9x"], SCENARIO, budget=15)
    assert sorted(set(asked)) == list(range(15))


@pytest.mark.parametrize("name", ["optuna_nsga2", "optuna_tpe"])
def test_without_optuna_the_extra_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UnsupportedError, match=r'pip install "puzzle-nas\[optuna\]"'):
        getattr(baselines, name)(*random_tables(0), ["memory<=0.9x"], SCENARIO)


def test_greedy_is_close_to_the_optimum_on_many_layers():
    gaps = []
    for seed in range(3):
        scores, costs = random_tables(seed, layers=40)
        optimum = solve(scores, costs, ["latency<=0.7x"], SCENARIO)
        gaps.append(baselines.greedy(scores, costs, ["latency<=0.7x"], SCENARIO).score / optimum.score - 1)
    assert np.mean(gaps) < 0.02


def test_restricting_a_program_leaves_the_other_candidates_out():
    scores, costs = random_tables(0)
    program = Program.of(scores, costs, ["memory<=0.9x"], SCENARIO)
    keep = [i for i, v in enumerate(program.problem.candidates) if v.name in ("parent", "kv1", "ffn32")]
    program.restrict(keep)
    assert set(program.solve().chosen) <= set(keep)
