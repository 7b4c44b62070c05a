# SPDX-License-Identifier: Apache-2.0
import re

import pytest
from search_instances import SCENARIO, every_architecture, frames, random_tables

from puzzle.costs import Constraint, CostModel, Target
from puzzle.errors import InfeasibleError
from puzzle.search import solve


def message(scores, costs, targets, **options):
    with pytest.raises(InfeasibleError) as error:
        solve(scores, costs, targets, SCENARIO, **options)
    return str(error.value)


def reach(scores, costs, target, given=()):
    """The best value of a target by trying everything, where the given targets hold."""
    model = CostModel(costs, SCENARIO)
    parent, target, given = model.parent(), Target.parse(target), [Target.parse(t) for t in given]
    totals = [model.predict(a) for a in every_architecture(scores)]
    values = [
        target.reached(t, parent, SCENARIO) for t in totals if all(g.met(g.reached(t, parent, SCENARIO)) for g in given)
    ]
    return max(values) if target.sense == ">=" else min(values)


@pytest.mark.parametrize(
    "target", ["throughput>=9x", "throughput>=1000tok/s", "memory<=0.1x", "memory<=6KiB", "latency<=9ms", "params<=3k"]
)
@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_a_target_out_of_reach_is_named_with_the_best_value(target, solver):
    scores, costs = random_tables(0)
    text = message(scores, costs, [target, "decode<=0.9x"], solver=solver)
    start, unit = re.fullmatch(r"(.*?=)[0-9.]+(.*)", target).groups()
    best = re.fullmatch(rf"no architecture meets {re.escape(target)} \(best reachable: ([0-9.]+){unit}\)", text)[1]
    asked = Target.parse(f"{start}{best}{unit}")
    assert asked.value == pytest.approx(reach(scores, costs, target), rel=2e-3)
    assert asked.met(reach(scores, costs, target))
    assert solve(scores, costs, [asked], SCENARIO).status == "optimal"


def test_all_targets_out_of_reach_are_named():
    scores, costs = random_tables(0)
    text = message(scores, costs, ["throughput>=9x", "params<=0.9x", "memory<=0.01x"])
    assert "throughput>=9x (best" in text and " or memory<=0.01x (best" in text and "params" not in text


def opposed():
    """One layer in which each FFN is good for one cost alone."""
    places = {("attention", "parent"): (0, 0, 0), ("ffn", "parent"): (10, 10, 10)}
    places |= {("ffn", "fast"): (2, 10, 10), ("ffn", "small"): (10, 2, 10), ("ffn", "even"): (6, 6, 2)}
    score_of = {(0, s, v): float(v != "parent") for s, v in places}
    cost_of = {(0, s, v): list(c) for (s, v), c in places.items()}
    return frames(score_of, cost_of, [0, 0, 0], ["decode_ms", "params", "weight_bytes"])


def test_two_targets_that_conflict_are_named_with_what_each_leaves_the_other():
    text = message(*opposed(), ["weights<=100B", "decode<=0.3x", "params<=0.4x"])
    assert text == (
        "no architecture meets decode<=0.3x and params<=0.4x together; given the other, the best reachable is "
        "1x for decode<=0.3x, 1x for params<=0.4x"
    )


def test_three_targets_that_conflict_only_together():
    scores, costs = opposed()
    costs = costs.assign(prefill_ms=[0, 10, 2, 2, 10, 0][: len(costs)])
    targets = ["decode<=0.6x", "params<=0.6x", "prefill<=2ms"]
    text = message(scores, costs, targets)
    assert text.startswith(
        "no architecture meets decode<=0.6x, params<=0.6x and prefill<=2ms together; given the others"
    )
    assert text.endswith("1x for decode<=0.6x, 1x for params<=0.6x, 10ms for prefill<=2ms")


def test_a_linear_constraint_is_named_by_its_own_text():
    scores, costs = random_tables(0)
    text = message(
        scores, costs, [Constraint("half of decode and prefill", {"decode_ms": 0.5, "prefill_ms": 0.5}, 0.1)]
    )
    assert text.startswith("no architecture meets half of decode and prefill (best reachable: ")


@pytest.mark.parametrize("options", [{"pinned": ["0.ffn.ffn64"], "max_changes": 0}, {"pinned": ["0.ffn.ffn64", 0]}])
def test_options_that_leave_nothing_are_told_from_targets(options):
    scores, costs = random_tables(0)
    assert "fits the options" in message(scores, costs, ["throughput>=1x"], **options)


def test_options_count_in_what_is_reachable():
    scores, costs = random_tables(0)
    free, bound = (message(scores, costs, ["memory<=0.01x"], **o) for o in ({}, {"max_changes": 1}))
    value = lambda text: float(re.search(r"([0-9.]+)x\)", text)[1])  # noqa: E731
    assert value(free) < value(bound) < 1
