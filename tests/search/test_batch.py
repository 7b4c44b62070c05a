# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
from search_instances import SCENARIO, frames, random_tables

from puzzle.architecture import Architecture
from puzzle.costs import CostModel, measure
from puzzle.errors import ConfigError, InfeasibleError
from puzzle.search import solve
from puzzle.search.batch import best_batch, max_batch


def tables_by_batch(batches=(1, 2, 4, 8)):
    """Scores, and costs whose decode step grows by far less than the batch."""
    scores, costs = random_tables(3)
    return scores, {
        b: costs.assign(prefill_ms=costs.prefill_ms * b, decode_ms=costs.decode_ms * (1 + b / 8)) for b in batches
    }


def test_the_batch_of_the_best_score_is_kept():
    scores, costs = tables_by_batch()
    targets = ["throughput>=120tok/s", "memory<=0.9x"]
    by_batch = {}
    for batch, table in costs.items():
        try:
            by_batch[batch] = solve(scores, table, targets, replace(SCENARIO, batch=batch)).score
        except InfeasibleError:
            continue
    scenario, found = best_batch(scores, costs, targets, SCENARIO)
    assert len(by_batch) > 1 and scenario.batch == min(by_batch, key=lambda b: (by_batch[b], -b))
    assert found.score == by_batch[scenario.batch]
    assert measure("throughput", found.costs, scenario) >= 120


def test_memory_bounds_the_batch():
    scores, costs = tables_by_batch()
    kv = CostModel(costs[1], SCENARIO).parent()["kv_bytes_per_token"]
    weights = CostModel(costs[1], SCENARIO).parent()["weight_bytes"]
    limit = weights + 5 * kv * SCENARIO.length
    scenario, found = best_batch(scores, costs, [f"memory<={limit}B"], SCENARIO)
    assert (found.score, scenario.batch) == (0, 4)
    assert measure("memory", found.costs, scenario) <= limit


def test_a_relative_throughput_is_of_the_parent_at_its_own_best_batch():
    scores, costs = tables_by_batch()
    parent = {b: CostModel(t, replace(SCENARIO, batch=b)).parent() for b, t in costs.items()}
    rate = {b: measure("throughput", parent[b], replace(SCENARIO, batch=b)) for b in costs}
    scenario, found = best_batch(scores, costs, ["throughput>=1.2x"], SCENARIO)
    assert measure("throughput", found.costs, scenario) >= 1.2 * max(rate.values()) * (1 - 1e-9)
    assert found.targets == ("throughput>=1.2x",)
    memory = f"memory<={measure('memory', parent[2], replace(SCENARIO, batch=2))}B"  # the parent fits up to batch 2
    scenario, found = best_batch(scores, costs, ["throughput>=1.2x", memory], SCENARIO)
    assert measure("throughput", found.costs, scenario) >= 1.2 * max(rate[1], rate[2]) * (1 - 1e-9)
    cheaper = solve(scores, costs[2], ["throughput>=1.2x", memory], replace(SCENARIO, batch=2))
    assert found.score <= cheaper.score


def test_every_batch_says_why_it_is_out():
    scores, costs = tables_by_batch((1, 4))
    with pytest.raises(InfeasibleError, match=r"at batch 1 no architecture .*; at batch 4 no architecture"):
        best_batch(scores, costs, ["throughput>=50x"], SCENARIO)
    with pytest.raises(ConfigError, match="no batch size"):
        best_batch(scores, {}, [], SCENARIO)
    with pytest.raises(ConfigError, match="decode_ms"):
        best_batch(scores, {1: costs[1].drop(columns="decode_ms")}, ["throughput>=2x"], SCENARIO)


@pytest.mark.parametrize("limit", [30_000, 45_000, 100_000, 1_000_000])
def test_max_batch_is_the_largest_that_fits(limit):
    _, costs = random_tables(4)
    child = Architecture(("kv1", "parent", "no_op"), ("ffn64", "parent", "parent"))
    total = CostModel(costs, SCENARIO).predict(child)
    fits = [b for b in range(1, 2000) if measure("memory", total, replace(SCENARIO, batch=b)) <= limit]
    assert max_batch(costs, child, f"memory<={limit}B", SCENARIO) == max(fits)


def test_max_batch_without_a_cache_has_no_end_and_too_large_weights_no_start():
    cost_of = {(0, "attention", "no_op"): [10, 0], (0, "ffn", "parent"): [50, 0], (0, "attention", "parent"): [20, 1]}
    _, costs = frames({}, cost_of, [5, 0], ["weight_bytes", "kv_bytes_per_token"])
    bare, parent = Architecture(("no_op",), ("parent",)), Architecture.parent(1)
    assert max_batch(costs, bare, "memory<=65B", SCENARIO) is None
    assert max_batch(costs, parent, "memory<=83B", SCENARIO) == 1
    for architecture, target in ((bare, "memory<=64B"), (parent, "memory<=82B")):
        with pytest.raises(InfeasibleError, match="no batch meets"):
            max_batch(costs, architecture, target, SCENARIO)
    for target in ("memory<=0.5x", "params<=7"):
        with pytest.raises(ConfigError, match="absolute memory target"):
            max_batch(costs, parent, target, SCENARIO)
    with pytest.raises(ConfigError, match="kv_bytes_per_token"):
        max_batch(costs.drop(columns="kv_bytes_per_token"), parent, "memory<=83B", SCENARIO)
