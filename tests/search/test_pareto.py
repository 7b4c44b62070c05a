# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from search_instances import SCENARIO, exhaustive, random_tables

from puzzle.costs import MEASURES, Constraint, CostModel, measure
from puzzle.errors import ConfigError, InfeasibleError
from puzzle.search import ParetoFront, solve, sweep


@pytest.mark.parametrize("name", [m for m in MEASURES if m != "energy"])
def test_every_point_is_the_optimum_at_what_it_reaches(name):
    scores, costs = random_tables(1)
    front = sweep(scores, costs, name, 6, SCENARIO)
    sign = -1 if name == "throughput" else 1  # the lower, the better
    model = CostModel(costs, SCENARIO)
    points = [(score, sign * measure(name, model.predict(a), SCENARIO)) for score, a in exhaustive(scores, costs, [])]
    assert front.solutions[0].score == 0
    for solution in front.solutions:
        value = sign * measure(name, solution.costs, SCENARIO)
        assert solution.score == pytest.approx(min(s for s, v in points if v <= value + 1e-9 * abs(value)))
        assert solution.status == "optimal" and solution.gap == 0 and solution.seconds > 0
    assert value == pytest.approx(min(v for _, v in points))


def test_points_are_evenly_spaced_in_the_cost_and_none_is_dominated():
    scores, costs = random_tables(2, layers=12)
    front = sweep(scores, costs, "decode", 9, SCENARIO)
    assert len(front.solutions) == 9
    loads = [s.costs["decode_ms"] for s in front.solutions]
    parent = CostModel(costs, SCENARIO).parent()["decode_ms"]
    step = (parent - loads[-1]) / 8
    assert all(parent - (i + 1) * step < load <= parent - i * step + 1e-9 for i, load in enumerate(loads))
    ordered = [(s.score, -load) for s, load in zip(front.solutions, loads, strict=True)]
    assert ordered == sorted(set(ordered))


def test_points_are_those_of_separate_solves():
    scores, costs = random_tables(3, layers=12)
    front = sweep(scores, costs, "throughput", 5, SCENARIO, ["memory<=0.9x"])
    for solution in front.solutions:
        bound = solution.costs["prefill_ms"] + SCENARIO.generated * solution.costs["decode_ms"]
        time = Constraint("time", {"prefill_ms": 1.0, "decode_ms": SCENARIO.generated}, bound)
        assert solve(scores, costs, ["memory<=0.9x", time], SCENARIO).score == pytest.approx(solution.score, rel=1e-9)
        assert solution.targets[0].startswith("throughput>=") and solution.targets[1] == "memory<=0.9x"
        assert solve(scores, costs, solution.targets, SCENARIO).score <= solution.score + 1e-12


def test_the_front_does_not_depend_on_the_workers():
    scores, costs = random_tables(4, layers=10)
    fronts = [sweep(scores, costs, "memory", 8, SCENARIO, workers=w) for w in (1, 3)]
    assert len({tuple((s.architecture, s.score) for s in front.solutions) for front in fronts}) == 1


def test_dominated_points_are_left_out():
    scores, costs = random_tables(5, layers=1, attention=("parent", "no_op"), ffn=("parent",))
    front = sweep(scores, costs, "params", 7, SCENARIO)
    assert [s.architecture.attention for s in front.solutions] == [("parent",), ("no_op",)]


def test_options_reach_the_program():
    scores, costs = random_tables(6)
    front = sweep(scores, costs, "params", 5, SCENARIO, pinned=[1], solver="cbc")
    assert all(s.architecture.ffn[1] == "parent" and s.method == "cbc" for s in front.solutions)
    assert len(front.solutions) > 2


def test_it_survives_json():
    front = sweep(*random_tables(7), "throughput", 4, SCENARIO)
    assert ParetoFront.from_json(json.loads(json.dumps(front.to_json(), allow_nan=False))) == front


def test_further_targets_out_of_reach_are_named_alone():
    with pytest.raises(InfeasibleError, match=r"^no architecture meets memory<=0.01x \(best reachable: "):
        sweep(*random_tables(8), "throughput", 4, SCENARIO, ["memory<=0.01x"])


@pytest.mark.parametrize(
    ("name", "points", "options", "message"),
    [
        ("speed", 4, {}, "unknown measure 'speed'"),
        ("energy", 4, {}, "energy_j_per_token"),
        ("params", 1, {}, "2 points"),
        ("params", 4, {"workers": 0}, "1 worker"),
    ],
)
def test_wrong_arguments_are_refused(name, points, options, message):
    with pytest.raises(ConfigError, match=message):
        sweep(*random_tables(8), name, points, SCENARIO, **options)


def test_a_sweep_ends_where_it_is_told():
    scores, costs = random_tables(0, layers=6)
    whole, part = (sweep(scores, costs, "decode", 9, SCENARIO, down_to=share).solutions for share in (0.0, 0.6))
    parent = part[0].costs["decode_ms"]
    assert whole[-1].costs["decode_ms"] < 0.5 * parent
    assert all(s.costs["decode_ms"] >= 0.4 * parent for s in part) and part[-1].costs["decode_ms"] <= 0.6 * parent
