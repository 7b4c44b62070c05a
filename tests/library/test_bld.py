# SPDX-License-Identifier: Apache-2.0
"""Local distillation: loss, gradients and optimiser against float64, and independence of the variants."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from references.naive_library import adamw, cosine, normalised_error
from tiny_models import make_parent
from tiny_runs import random_state
from torch import Tensor

from puzzle.architecture import Subblock, SubblockVariant
from puzzle.checkpoint import Checkpoint
from puzzle.config import BLDConfig
from puzzle.depth import Depth, apply
from puzzle.library import bld
from puzzle.library.bld import Stream, Trainee, cosine_with_warmup, distil, local_loss
from puzzle.library.initialise import SubblockIO, subblock_io
from puzzle.modeling import DeciLMDecoderLayer
from puzzle.variants import subblock_config

LAYER = 1
CONFIG = BLDConfig(learning_rate=3e-3, warmup=0.25, weight_decay=0.05)
NAMES = [("attention", "kv1"), ("attention", "linear"), ("ffn", "ffn64"), ("ffn", "ffn32"), ("ffn", "linear")]
VARIANTS = [SubblockVariant(LAYER, subblock, name) for subblock, name in NAMES]


class Place:
    """A layer of a parent with a stream of states before it."""

    def __init__(self, folder: Path, dtype: str = "float32"):
        self.checkpoint = Checkpoint(folder)
        self.layer: DeciLMDecoderLayer = self.checkpoint.layer(LAYER)
        depth = Depth(self.checkpoint, "cpu")
        tokens = torch.randint(257, (12, 16), generator=torch.Generator().manual_seed(0))
        context = depth.context(16)
        states = depth.embed(tokens)
        with torch.no_grad():
            states = self.checkpoint.layer(0)(states, **context)
            self.held_out = subblock_io(self.layer, states[:2], context)
        self.stream = Stream(states[2:], 2, context, "cpu", dtype)

    def module(self, variant: SubblockVariant) -> torch.nn.Module:
        config = subblock_config(variant.name, variant.subblock, self.checkpoint.shape)
        state = random_state(self.checkpoint, variant, scale=0.05)
        return self.checkpoint.subblock(variant.subblock, config, state, "cpu", torch.float32)

    def trainee(self, variant: SubblockVariant, error: float = float("inf"), config: BLDConfig = CONFIG) -> Trainee:
        return Trainee(variant, self.module(variant), error, config, self.stream)

    def io(self, subblock: Subblock) -> list[SubblockIO]:
        with torch.no_grad():
            return [subblock_io(self.layer, states, self.stream.context)[subblock] for states in self.stream]


def train(place: Place, variants: list[SubblockVariant]) -> dict[SubblockVariant, Trainee]:
    trainees = [place.trainee(v) for v in variants]
    distil(place.layer, trainees, place.stream, place.held_out)
    return {t.variant: t for t in trainees}


def test_the_loss_is_the_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    output, target = (torch.randn(3, 5, 8, generator=generator) for _ in range(2))
    assert float(local_loss(output, target)) == pytest.approx(normalised_error(output, target), rel=1e-6)
    assert float(local_loss(target, target)) == 0
    assert float(local_loss(torch.zeros_like(target), target)) == pytest.approx(1)
    assert local_loss(output.bfloat16(), target.bfloat16()).dtype == torch.float32


@given(steps=st.integers(1, 300), share=st.floats(0, 1))
def test_the_schedule(steps: int, share: float) -> None:
    warmup = max(1, round(share * steps))
    factor = cosine_with_warmup(warmup, steps)
    for step in range(steps):
        assert 0 < factor(step) <= 1
        if step < warmup or warmup < steps:
            assert factor(step) == pytest.approx(cosine(step, warmup, steps))
    assert factor(warmup - 1) == 1
    assert factor(steps) == pytest.approx(0) or warmup == steps


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.subblock}.{v.name}")
def test_gradients_equal_those_in_float64(any_parent: Path, variant: SubblockVariant) -> None:
    place = Place(any_parent)
    trainee = place.trainee(variant, config=CONFIG.model_copy(update={"learning_rate": 1e-12}))
    reference, io = copy.deepcopy(trainee.module).double(), place.io(variant.subblock)[0]
    trainee.step(io)
    angles = tuple(a.double() for a in place.stream.context["position_embeddings"])
    exact = {**place.stream.context, "position_embeddings": angles}
    missed = io.y.double() - apply(reference, variant.subblock, io.x.double(), exact)
    (missed.square().sum() / io.y.double().square().sum()).backward()
    wanted = dict(reference.named_parameters())
    for name, parameter in trainee.module.named_parameters():
        gradient = wanted[name].grad
        torch.testing.assert_close(
            parameter.grad.double(), gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max())
        )


def test_a_whole_training_equals_adamw_written_out_in_float64(parent: Path) -> None:
    place, variant = Place(parent), SubblockVariant(LAYER, "ffn", "linear")
    trainee, steps = place.trainee(variant), len(place.stream)
    weight = place.module(variant).linear_mlp.weight.detach().double().requires_grad_()
    batches = place.io("ffn")

    def loss(step: int) -> Tensor:
        x, y = batches[step].x.double(), batches[step].y.double()
        return (y - x @ weight.T).square().sum() / y.square().sum()

    rates = [CONFIG.learning_rate * cosine(step, round(CONFIG.warmup * steps), steps) for step in range(steps)]
    adamw([weight], loss, rates, CONFIG.weight_decay)
    distil(place.layer, [trainee], place.stream, place.held_out)
    found = trainee.module.linear_mlp.weight.detach().double()
    moved = (weight - place.module(variant).linear_mlp.weight.double()).detach().abs().max()
    torch.testing.assert_close(found, weight.detach(), rtol=0.0, atol=1e-4 * float(moved))
    assert trainee.tokens == 10 * 16


def test_training_helps(parent: Path) -> None:
    place = Place(parent)
    for variant, trainee in train(place, VARIANTS).items():
        untrained = place.module(variant)
        before = place.held_out[variant.subblock].error(
            lambda x, m=untrained, b=variant.subblock: apply(m, b, x, place.stream.context), 2
        )
        assert trainee.error < before


def test_together_as_alone_and_in_any_order(any_parent: Path) -> None:
    place = Place(any_parent)
    together, turned = train(place, VARIANTS), train(place, VARIANTS[::-1])
    for variant in VARIANTS:
        alone = train(Place(any_parent), [variant])[variant]
        for trainee in (together[variant], turned[variant]):
            assert trainee.error == alone.error
            for name, value in alone.best.items():
                assert torch.equal(trainee.best[name], value)


def test_training_leaves_shared_tensors_alone(parent: Path) -> None:
    """A GQA variant starts with the parent's own query matrix: it must train a copy."""
    place = Place(parent)
    before = {k: v.clone() for k, v in place.layer.state_dict().items()}
    variant = SubblockVariant(LAYER, "attention", "kv1")
    shared = {**{k: v for k, v in place.layer.state_dict().items() if k.startswith("self_attn.")}}
    pooled = {k: shared[f"self_attn.{k}_proj.weight"][:16] for k in "kv"}
    state = {**shared, **{f"self_attn.{k}_proj.weight": v for k, v in pooled.items()}}
    config = subblock_config("kv1", "attention", place.checkpoint.shape)
    module = place.checkpoint.subblock("attention", config, state, "cpu", torch.float32)
    trainee = Trainee(variant, module, 1.0, CONFIG, place.stream)
    distil(place.layer, [trainee], place.stream, place.held_out)
    assert not torch.equal(trainee.module.q_proj.weight, before["self_attn.q_proj.weight"])
    for name, value in place.layer.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_best_state_is_kept(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged after every step, the kept state is the one with the lowest held-out error, and not the last."""
    place, variant = Place(parent), SubblockVariant(LAYER, "ffn", "linear")
    monkeypatch.setattr(bld, "EVALUATIONS", len(place.stream))
    trainee = place.trainee(variant, config=CONFIG.model_copy(update={"learning_rate": 0.3, "warmup": 0.9}))
    seen = []

    def judge(held_out: SubblockIO) -> None:
        weight = trainee.module.linear_mlp.weight.detach().clone()
        seen.append((held_out.error(lambda x: x @ weight.T, 2), weight))
        Trainee.judge(trainee, held_out)

    monkeypatch.setattr(trainee, "judge", judge)
    distil(place.layer, [trainee], place.stream, place.held_out)
    assert len(seen) == len(place.stream)
    error, weight = min(seen, key=lambda pair: pair[0])
    assert error < seen[-1][0]
    assert trainee.error == pytest.approx(error, rel=1e-6)
    assert torch.equal(trainee.best["linear_mlp.weight"], weight)


def test_a_start_that_training_cannot_better_is_kept(parent: Path) -> None:
    place, variant = Place(parent), SubblockVariant(LAYER, "ffn", "ffn32")
    trainee = place.trainee(variant, error=0.0)
    distil(place.layer, [trainee], place.stream, place.held_out)
    start = place.module(variant).state_dict()
    assert trainee.error == 0.0
    assert all(torch.equal(value, start[name]) for name, value in trainee.best.items())


def test_a_loss_that_is_not_finite_stops_that_variant_alone(parent: Path) -> None:
    place = Place(parent)
    bad, good = VARIANTS[2], VARIANTS[3]
    trainees = [place.trainee(v) for v in (bad, good)]
    step, seen = trainees[0].step, []

    def poisoned(io: SubblockIO) -> None:
        seen.append(None)
        step(io if len(seen) <= 3 else replace(io, y=torch.full_like(io.y, float("nan"))))

    trainees[0].step = poisoned
    distil(place.layer, trainees, place.stream, place.held_out)
    assert trainees[0].stopped and not trainees[1].stopped
    assert trainees[0].tokens == 3 * 32
    assert all(torch.isfinite(value).all() for value in trainees[0].best.values())
    alone = train(Place(parent), [good])[good]
    assert all(torch.equal(trainees[1].best[name], value) for name, value in alone.best.items())


def test_weights_that_are_not_finite_are_never_the_best(parent: Path) -> None:
    place, variant = Place(parent), SubblockVariant(LAYER, "ffn", "ffn32")
    trainee = place.trainee(variant)
    trainee.judge(place.held_out["ffn"])
    error = trainee.error
    with torch.no_grad():
        trainee.module.up_proj.weight.fill_(float("inf"))
    trainee.judge(place.held_out["ffn"])
    assert trainee.error == error
    assert all(torch.isfinite(value).all() for value in trainee.best.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_keeps_float32_weights_and_comes_near(parent: Path, dtype: str) -> None:
    exact, mixed = (train(Place(parent, d), VARIANTS) for d in ("float32", dtype))
    for variant in VARIANTS:
        assert all(value.dtype == torch.float32 for value in mixed[variant].best.values())
        assert mixed[variant].error == pytest.approx(exact[variant].error, rel=0.02)
        assert mixed[variant].error != exact[variant].error


def test_float16_scales_its_loss(parent: Path) -> None:
    """With large targets the gradients at the output are below float16's smallest number, as in a large batch."""
    variant = SubblockVariant(LAYER, "ffn", "linear")
    weights = []
    for dtype in ("float32", "float16"):
        place = Place(parent, dtype)
        trainee, io = place.trainee(variant), place.io("ffn")[0]
        trainee.step(replace(io, y=1e6 * io.y))
        weights.append(trainee.module.linear_mlp.weight.detach() - place.module(variant).linear_mlp.weight)
    exact, mixed = weights
    assert torch.all(exact != 0)
    assert ((exact.sign() == mixed.sign()).float().mean()) > 0.99


def test_an_empty_stream_keeps_the_start(parent: Path) -> None:
    place, variant = Place(parent), SubblockVariant(LAYER, "ffn", "ffn32")
    place.stream = replace(place.stream, states=place.stream.states[:0])
    trainee = place.trainee(variant, error=0.5)
    distil(place.layer, [trainee], place.stream, place.held_out)
    assert (trainee.error, trainee.tokens, trainee.stopped) == (0.5, 0, False)


def test_dropout_of_the_parents_config_plays_no_part(tmp_path: Path, parent: Path) -> None:
    dropping = make_parent(tmp_path / "dropping", attention_dropout=0.5)
    variant = SubblockVariant(LAYER, "attention", "kv1")
    found, wanted = (train(Place(folder), [variant])[variant] for folder in (dropping, parent))
    assert all(torch.equal(found.best[name], value) for name, value in wanted.best.items())
