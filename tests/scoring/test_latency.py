# SPDX-License-Identifier: Apache-2.0
"""How latencies are taken and what is made of them; the clock is a fake one, which work moves on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import MIXED, SPACE
from transformers import LlamaForCausalLM, PreTrainedModel

from puzzle.architecture import PARENT, SUBBLOCKS, Architecture
from puzzle.checkpoint import Checkpoint
from puzzle.config import MeasureConfig, SearchSpace
from puzzle.costs import CONSTANT, MODEL, CostModel, Scenario
from puzzle.run import silent
from puzzle.scoring import latency
from puzzle.scoring.latency import PHASES, Timing, measure_costs, time_models
from puzzle.variants import expand

SCENARIO = Scenario(batch=2, prompt=12, generated=8)
CONFIG = MeasureConfig(warmup=1, repeats=3, decode_steps=2)


class Clock:
    """Stands in for `time.perf_counter` and the work; `price(model, tokens)` is what a forward pass takes, in ms."""

    def __init__(self, price: Callable[[PreTrainedModel, int], float]):
        self.price, self.now = price, 0.0
        self.passes: list[tuple[PreTrainedModel, int]] = []  # (model, tokens) of each forward pass

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "Clock":
        monkeypatch.setattr(latency.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(latency, "forward", self.forward)
        return self

    def forward(self, model: PreTrainedModel, steps: list[torch.Tensor], cache: Any = None) -> Any:
        for tokens in steps:
            self.passes.append((model, tokens.numel()))
            self.now += self.price(model, tokens.numel()) / 1e3
        return ["cache"]


def price_of_parts(model: PreTrainedModel, tokens: int) -> float:
    """Five for the outer parts; each half has its price, and two whole halves in one layer disturb each other."""
    total = 5.0
    for layer in model.model.layers:
        heads = layer.self_attn.k_proj.out_features // 16 if hasattr(layer.self_attn, "k_proj") else 0
        width = layer.mlp.up_proj.out_features if hasattr(layer.mlp, "up_proj") else 0
        total += (2 * heads + 0.5 * hasattr(layer.self_attn, "linear_attn")) * tokens
        total += (width / 32 + 0.25 * hasattr(layer.mlp, "linear_mlp")) * tokens
        total += 1.5 * tokens * bool(heads and width)
    return total


def table(parent: Path, space: dict | None = None) -> tuple[Checkpoint, pd.DataFrame]:
    checkpoint = Checkpoint(parent)
    variants = expand(SearchSpace(**(space or SPACE)), checkpoint.shape)
    return checkpoint, measure_costs(checkpoint, variants, SCENARIO, CONFIG, silent)


def test_costs_are_the_prices_scaled_to_the_parents_layer(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(price_of_parts).install(monkeypatch)
    _, costs = table(parent)
    rows = costs.set_index(["layer", "subblock", "variant"])
    tokens = {"prefill": 2 * 12, "decode": 2}
    halves, whole = 2 * 2 + 3, 2 * 2 + 3 + 1.5
    prices = {
        "attention": {PARENT: 4, "kv1": 2, "linear": 0.5, "no_op": 0},
        "ffn": {PARENT: 3, "ffn32": 1, "linear": 0.25, "no_op": 0},
    }
    for phase in PHASES:
        assert rows.loc[-1, MODEL, CONSTANT][f"{phase}_ms"] == pytest.approx(5)
        for layer in range(3):
            for subblock, by_name in prices.items():
                for name, price in by_name.items():
                    found = rows.loc[layer, subblock, name]
                    assert found[f"{phase}_ms"] == pytest.approx(price * tokens[phase] * whole / halves)
                    assert found[f"{phase}_iqr_ms"] == pytest.approx(0, abs=1e-9)
    assert len(costs) == 1 + 3 * 8


def test_the_prediction_is_exact_for_the_parent(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(price_of_parts).install(monkeypatch)
    checkpoint, costs = table(parent)
    predictor = CostModel(costs, SCENARIO)
    model = LlamaForCausalLM.from_pretrained(parent)
    whole = time_models({"parent": model}, SCENARIO, 257, CONFIG, silent)["parent"]
    assert clock.passes[-1][0] is model
    found = predictor.predict(Architecture.parent(checkpoint.shape.num_layers))
    for phase in PHASES:
        assert found[f"{phase}_ms"] == pytest.approx(np.median(getattr(whole, phase)), rel=1e-9)


def test_a_drift_of_the_machine_cancels(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slows down by half over the run changes the costs by the drift within one round at most."""
    Clock(price_of_parts).install(monkeypatch)
    _, steady = table(parent)
    clock = Clock(lambda model, tokens: price_of_parts(model, tokens) * (1 + 0.5 * len(clock.passes) / 1000))
    clock.install(monkeypatch)
    _, drifting = table(parent)
    assert len(clock.passes) < 1000
    for phase in PHASES:
        parents = steady.variant == PARENT
        ratio = drifting[f"{phase}_ms"][parents] / steady[f"{phase}_ms"][parents]
        assert ratio.min() > 1.0 and ratio.max() < 1.1


TIMES = st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3).map(np.array)


@settings(max_examples=25)
@given(data=st.data())
def test_noise_never_makes_a_cost_negative(parent_checkpoint: Checkpoint, data: st.DataObject) -> None:
    """Whatever the clock says, each cost is at least 0, the total above 0, and exact for the parent if it can be."""

    times = {}

    def any_times(models: dict, *args: Any) -> dict:
        times.update({key: Timing(data.draw(TIMES), data.draw(TIMES)) for key in models})
        return dict(times)

    variants = expand(SearchSpace(**SPACE), parent_checkpoint.shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency, "time_models", any_times)
        costs = measure_costs(parent_checkpoint, variants, SCENARIO, CONFIG, silent)
    predictor = CostModel(costs, SCENARIO)
    nothing = Architecture(("no_op",) * 3, ("no_op",) * 3)
    for phase in PHASES:
        assert (costs[f"{phase}_ms"] >= 0).all() and np.isfinite(costs[f"{phase}_ms"]).all()
        assert (costs[f"{phase}_iqr_ms"] >= 0).all()
        no_ops = costs[costs.variant == "no_op"]
        assert (no_ops[f"{phase}_ms"] == 0).all()
        least = predictor.predict(nothing)[f"{phase}_ms"]
        assert 0 < least <= predictor.predict(MIXED)[f"{phase}_ms"]
        alone = {key: getattr(t, phase) - getattr(times[MODEL, CONSTANT], phase) for key, t in times.items()}
        whole, halves = np.median(alone[MODEL, PARENT]), [np.median(alone[s, PARENT]) for s in SUBBLOCKS]
        if whole > 0 and max(halves) > 0:
            assert predictor.predict(Architecture.parent(3))[f"{phase}_ms"] == pytest.approx(least + whole)


@pytest.fixture(scope="module")
def parent_checkpoint(parent: Path) -> Checkpoint:
    return Checkpoint(parent)


def test_layers_that_take_no_time_cost_nothing(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(lambda model, tokens: 5.0).install(monkeypatch)
    _, costs = table(parent)
    for phase in PHASES:
        assert costs[f"{phase}_ms"].tolist() == pytest.approx([5.0] + [0.0] * 24)


def test_rounds_go_around_all_models(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round: one prefill and some decode steps of each model in turn; warm-up rounds are thrown away."""
    models = {name: LlamaForCausalLM.from_pretrained(parent) for name in "abc"}
    names = {model: name for name, model in models.items()}
    clock = Clock(lambda model, tokens: len(clock.passes)).install(monkeypatch)
    times = time_models(models, SCENARIO, 257, CONFIG, silent)
    one = [24, 2, 2]  # [2, 12] tokens, then twice [2, 1]
    wanted = [
        (n, k) for n in "abc" for k in [32, *one]
    ]  # before: prompt and half of the generated tokens, for the cache
    wanted += [(n, k) for _ in range(3) for n in "abc" for k in one]
    assert [(names[model], tokens) for model, tokens in clock.passes] == wanted
    starts = [12 + 9 * r + 3 * m for m in range(3) for r in range(3)]  # passes before each kept prefill
    assert np.concatenate([times[n].prefill for n in "abc"]).tolist() == pytest.approx([s + 1 for s in starts])
    assert np.concatenate([times[n].decode for n in "abc"]).tolist() == pytest.approx([s + 2.5 for s in starts])


def test_each_decode_starts_from_the_same_cache(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, forward = [], latency.forward

    def noted(model: PreTrainedModel, steps: list[torch.Tensor], cache: Any = None) -> Any:
        before = 0 if cache is None else cache.get_seq_length()
        after = forward(model, steps, cache)
        lengths.append((before, after.get_seq_length()))
        return after

    monkeypatch.setattr(latency, "forward", noted)
    time_models({"parent": LlamaForCausalLM.from_pretrained(parent)}, SCENARIO, 257, CONFIG, silent)
    assert lengths == [(0, 16)] + [(0, 12), (16, 18)] * 4


def test_variants_share_a_measurement(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that is allowed in one layer alone is measured as any other, and once."""
    Clock(price_of_parts).install(monkeypatch)
    seen = []
    time = latency.time_models
    monkeypatch.setattr(latency, "time_models", lambda models, *args: seen.extend(models) or time(models, *args))
    space = {"attention": [PARENT, "no_op"], "ffn": ["ffn32"], "rules": [{"layers": [1], "attention": ["kv1"]}]}
    _, costs = table(parent, space)
    halves = [("attention", PARENT), ("attention", "kv1"), ("ffn", PARENT), ("ffn", "ffn32")]
    assert sorted(seen) == sorted([*halves, (MODEL, CONSTANT), (MODEL, PARENT)])
    assert len(costs[costs.variant == "kv1"]) == 1
    assert len(costs[costs.variant == "ffn32"]) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_measurements_have_the_tables_form(parent: Path, dtype: str) -> None:
    """Nothing is said of how long they take."""
    checkpoint = Checkpoint(parent)
    variants = expand(SearchSpace(**SPACE), checkpoint.shape)
    calls = []
    scenario = Scenario(batch=2, prompt=12, generated=8, dtype=dtype)
    costs = measure_costs(checkpoint, variants, scenario, CONFIG, lambda *args: calls.append(args))
    assert calls[-1] == ("latency", 32, 32)  # 8 models, 4 rounds
    keys = list(zip(costs.layer, costs.subblock, costs.variant, strict=True))
    assert keys == [(-1, MODEL, CONSTANT)] + [(v.layer, v.subblock, v.name) for v in variants]
    columns = [f"{phase}_{what}_ms".replace("__", "_") for phase in PHASES for what in ("", "iqr")]
    assert set(columns) <= set(costs.columns)
    assert np.isfinite(costs[columns].to_numpy(float)).all() and (costs[columns] >= 0).all(axis=None)
    assert (costs.loc[0, ["prefill_ms", "decode_ms"]] > 0).all()


def test_the_stack_of_a_large_parent_has_fewer_layers(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(parent)
    sizes = [latency.subblock_sizes(PARENT, s, checkpoint.shape, "float32")["weight_bytes"] for s in SUBBLOCKS]
    for room, layers in ((sum(sizes) - 1, 1), (2 * sum(sizes), 2), (100 * sum(sizes), 3)):
        monkeypatch.setattr(latency, "STACK_BYTES", room)
        stacks = latency.Stacks(checkpoint, SCENARIO)
        assert stacks.layers == layers
        assert len(stacks.equal(checkpoint.parent_block)().model.layers) == layers
    Clock(price_of_parts).install(monkeypatch)
    _, deep = table(parent)
    monkeypatch.setattr(latency, "STACK_BYTES", 0)
    _, shallow = table(parent)
    pd.testing.assert_frame_equal(deep, shallow)  # per layer it is the same
