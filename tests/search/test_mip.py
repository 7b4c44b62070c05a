# SPDX-License-Identifier: Apache-2.0
import itertools
import subprocess
import sys

import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_instances import SCENARIO, exhaustive, frames, instances, random_tables

from puzzle.architecture import Architecture
from puzzle.costs import Constraint, CostModel, Scenario, Target
from puzzle.errors import ConfigError, InfeasibleError, PuzzleError
from puzzle.search import Workload, k_diverse, solve

TARGETS = ["throughput>=1.5x", "memory<=0.8x"]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(instances())
def test_equals_exhaustive_search(instance):
    scores, costs, targets = instance
    met = exhaustive(scores, costs, targets) if _all_positive(costs, targets) else None
    if met is None:
        with pytest.raises(ConfigError, match="zero"):
            solve(scores, costs, targets, SCENARIO)
    elif not met:
        with pytest.raises(InfeasibleError):
            solve(scores, costs, targets, SCENARIO)
    else:
        found = solve(scores, costs, targets, SCENARIO)
        assert found.score == pytest.approx(met[0][0], abs=1e-9)
        assert found.architecture in [architecture for _, architecture in met]
        assert found.status == "optimal" and found.gap == 0
        assert found.costs == pytest.approx(CostModel(costs, SCENARIO).predict(found.architecture))


def _all_positive(costs, targets):
    parent = CostModel(costs, SCENARIO).parent()
    parsed = [Target.parse(t) for t in targets]
    return all(t.constraint(SCENARIO, parent).bound > 0 for t in parsed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [{}, {"max_changes": 36}, {"homogeneous": True, "pinned": [0, 29]}])
def test_highs_and_cbc_find_the_same_objective(seed, options):
    scores, costs = random_tables(seed, layers=30)
    highs, cbc = (solve(scores, costs, TARGETS, SCENARIO, solver=s, **options) for s in ("highs", "cbc"))
    assert (highs.method, cbc.method) == ("highs", "cbc")
    assert highs.status == cbc.status == "optimal"
    assert highs.score == pytest.approx(cbc.score, rel=1e-9)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(seed, random):
    scores, costs = random_tables(seed)
    once = solve(scores, costs, TARGETS, SCENARIO)
    rows = [random.sample(range(len(t)), len(t)) for t in (scores, costs)]
    again = solve(scores.iloc[rows[0]], costs.iloc[rows[1]], TARGETS, SCENARIO)
    assert (once.architecture, once.score, once.costs) == (again.architecture, again.score, again.costs)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.lists(st.floats(0.5, 1.0), min_size=2, max_size=5))
def test_a_looser_target_is_never_worse(seed, factors):
    scores, costs = random_tables(seed, layers=4)
    found = [solve(scores, costs, [f"memory<={f}x", "throughput>=1.2x"], SCENARIO).score for f in sorted(factors)]
    assert all(tight >= loose - 1e-12 for tight, loose in itertools.pairwise(found))


def test_no_target_keeps_the_parent():
    scores, costs = random_tables(0)
    found = solve(scores, costs, [], SCENARIO)
    assert found.architecture == Architecture.parent(3) and found.score == 0


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize("short", [1e-7, 3e-9])
def test_a_target_missed_by_a_hair_is_missed(solver, short):
    scores, costs = random_tables(7)
    best = solve(scores, costs, TARGETS, SCENARIO)
    bound = best.costs["params"]
    at = solve(scores, costs, [*TARGETS, Constraint("at", {"params": 1.0}, bound)], SCENARIO, solver=solver)
    below = Constraint("below", {"params": 1.0}, bound * (1 - short))
    beyond = solve(scores, costs, [*TARGETS, below], SCENARIO, solver=solver)
    assert at.architecture == best.architecture
    assert beyond.costs["params"] <= below.bound * (1 + 1e-9) and beyond.score > best.score


def test_homogeneous_is_one_choice_for_all_layers_that_are_not_pinned():
    scores, costs = random_tables(1)
    same = lambda a: len(set(a.attention[1:])) == len(set(a.ffn[1:])) == 1 and a.attention[0] == a.ffn[0] == "parent"  # noqa: E731
    found = solve(scores, costs, ["memory<=0.8x"], SCENARIO, homogeneous=True, pinned=[0])
    assert found.score == pytest.approx(exhaustive(scores, costs, ["memory<=0.8x"], allowed=same)[0][0])
    assert same(found.architecture)


def test_homogeneous_leaves_out_what_a_layer_does_not_have():
    scores, costs = random_tables(1)
    scores = scores[~((scores.layer == 2) & (scores.variant == "ffn32"))]
    found = solve(scores, costs, ["params<=0.6x"], SCENARIO, homogeneous=True)
    assert "ffn32" not in found.architecture.ffn and len(set(found.architecture.ffn)) == 1


def test_pinned_layers_and_variants_stay():
    scores, costs = random_tables(2)
    keep = lambda a: a.attention[1] == a.ffn[1] == "parent" and a.ffn[2] == "ffn32"  # noqa: E731
    found = solve(scores, costs, ["memory<=0.8x"], SCENARIO, pinned=[1, "2.ffn.ffn32"])
    assert keep(found.architecture)
    assert found.score == pytest.approx(exhaustive(scores, costs, ["memory<=0.8x"], allowed=keep)[0][0])


@pytest.mark.parametrize("changes", [2, 3, 4])
def test_max_changes_counts_from_the_reference(changes):
    scores, costs = random_tables(3)
    reference = solve(scores, costs, ["memory<=0.7x"], SCENARIO).architecture
    near = lambda a: a.distance(reference) <= changes  # noqa: E731
    found = solve(scores, costs, ["decode<=0.75x"], SCENARIO, max_changes=changes, reference=reference)
    assert found.score == pytest.approx(exhaustive(scores, costs, ["decode<=0.75x"], allowed=near)[0][0])
    assert near(found.architecture)


@pytest.mark.parametrize("distance", [1, 3])
def test_k_diverse_is_each_time_the_best_that_differs_enough(distance):
    scores, costs = random_tables(4)
    found = k_diverse(scores, costs, TARGETS, SCENARIO, k=4, min_distance=distance)
    before = []
    for solution in found:
        differs = lambda a: all(a.distance(b) >= distance for b in before)  # noqa: E731
        assert differs(solution.architecture)
        assert solution.score == pytest.approx(exhaustive(scores, costs, TARGETS, allowed=differs)[0][0])
        before.append(solution.architecture)
    other = solve(scores, costs, TARGETS, SCENARIO, exclude=(before[:3], distance))
    assert other.score == pytest.approx(found[3].score)


def test_k_diverse_says_how_many_there_are():
    scores, costs = random_tables(4, layers=1, attention=("parent", "kv1"), ffn=("parent",))
    with pytest.raises(InfeasibleError, match="only 2 of 3 solutions"):
        k_diverse(scores, costs, [], SCENARIO, k=3, min_distance=1)


def test_several_workloads_hold_at_once():
    scores, short = random_tables(5)
    _, long = random_tables(6)
    scenario = Scenario(batch=1, prompt=100, generated=10)
    found = solve(scores, short, ["decode<=0.8x"], SCENARIO, also=[Workload(long, ["latency<=0.75x"], scenario)])
    first = exhaustive(scores, short, ["decode<=0.8x"])
    second = {architecture for _, architecture in exhaustive(scores, long, ["latency<=0.75x"], scenario)}
    assert found.score == pytest.approx(next(score for score, a in first if a in second))
    assert found.targets == ("decode<=0.8x", "latency<=0.75x")


def test_cbc_stands_in_where_highspy_is_missing(monkeypatch):
    scores, costs = random_tables(0)
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    assert solve(scores, costs, TARGETS, SCENARIO).method == "cbc"


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_a_time_limit_gives_a_feasible_solution_with_a_gap_or_an_error(solver):
    scores, costs = _hard_tables()
    optimum = solve(scores, costs, ["decode<=0.5x"], SCENARIO, solver="highs")
    for seconds in (1e-6, 0.02, 0.05):
        try:
            found = solve(scores, costs, ["decode<=0.5x"], SCENARIO, solver=solver, time_limit=seconds)
        except PuzzleError as error:
            assert not isinstance(error, InfeasibleError) and "time limit" in str(error)
        else:
            assert found.costs["decode_ms"] <= 0.5 * CostModel(costs, SCENARIO).parent()["decode_ms"] * (1 + 1e-9)
            assert found.score * (1 - found.gap) <= optimum.score * (1 + 1e-9) <= found.score * (1 + 2e-9)


def _hard_tables():
    return random_tables(0, layers=100)


def test_the_same_call_gives_the_same_solution():
    scores, costs = random_tables(8, layers=20)
    one, two = (solve(scores, costs, TARGETS, SCENARIO) for _ in range(2))
    assert one.architecture == two.architecture and one.score == two.score


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "hihgs"}, "did you mean 'highs'"),
        ({"time_limit": 0}, "time_limit"),
        ({"max_changes": -1}, "max_changes"),
        ({"pinned": [3]}, "the layers are 0 to 2"),
        ({"pinned": ["1.ffn"]}, "'12.ffn.ffn768'"),
        ({"pinned": ["1.ffn.ffn63"]}, "did you mean 'ffn64'"),
        ({"pinned": ["5.ffn.ffn64"]}, "layers 0 to 2"),
        ({"max_changes": 1, "reference": Architecture.parent(2)}, "2 layers"),
    ],
)
def test_wrong_options_are_refused(options, message):
    scores, costs = random_tables(0)
    with pytest.raises(ConfigError, match=message):
        solve(scores, costs, TARGETS, SCENARIO, **options)


def test_targets_that_do_not_fit_the_table_are_refused():
    scores, costs = frames({(0, "ffn", "ffn8"): 1.0}, {(0, s, v): [1.0] for s, v in _PLACES}, [0.0], ["params"])
    for target, message in (("decode<=1ms", "decode_ms"), ("params<=", "not of the form"), ("parms<=1", "'params'")):
        with pytest.raises(ConfigError, match=message):
            solve(scores, costs, [target])
    with pytest.raises(ConfigError, match="energy_j"):
        solve(scores, costs, [Constraint("own", {"energy_j_per_token": 1.0}, 1.0)])


_PLACES = (("attention", "parent"), ("ffn", "parent"), ("ffn", "ffn8"))


def test_figures_of_any_size_are_solved():
    scores, costs = random_tables(9)
    tiny = scores.assign(score=scores.score * 1e-12)
    huge = costs.assign(weight_bytes=costs.weight_bytes * 1e12)
    found = solve(tiny, huge, ["weights<=0.7x"], SCENARIO)
    assert found.architecture == exhaustive(scores, costs, ["weights<=0.7x"])[0][1]
    assert found.score == pytest.approx(exhaustive(tiny, huge, ["weights<=0.7x"])[0][0], rel=1e-9, abs=0)


def test_search_imports_no_torch():
    code = (
        "import sys, puzzle.search, puzzle.search.baselines, puzzle.search.refine, puzzle.search.batch; "
        "print([m for m in ('torch', 'transformers', 'optuna', 'pyarrow.parquet', 'matplotlib') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_numpy_integers_are_layers_too():
    scores, costs = random_tables(0)
    found = solve(scores, costs, ["memory<=0.9x"], SCENARIO, pinned=np.arange(2))
    assert set(found.architecture.attention[:2]) == {"parent"}
