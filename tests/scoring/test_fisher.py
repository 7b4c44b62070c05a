# SPDX-License-Identifier: Apache-2.0
"""Gradient scores against autograd through transformers' Llama, against exact scores, and against the algebra."""

from pathlib import Path

import pytest
import torch
from references import naive_gradients, naive_replacement
from tiny_runs import MIXED, SPACE, random_library
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from puzzle.architecture import Architecture, SubblockVariant
from puzzle.block_library import BlockLibrary, VariantRecord
from puzzle.checkpoint import Checkpoint
from puzzle.config import SearchSpace
from puzzle.depth import Depth
from puzzle.devices import generator
from puzzle.run import silent
from puzzle.scoring import fisher
from puzzle.scoring.blocks import Blocks
from puzzle.scoring.context import Context
from puzzle.scoring.fisher import WINDOW, estimate, products
from puzzle.scoring.replacement import carry, sweep
from puzzle.variants import expand

SAMPLES = 3
PARENT = Architecture.parent(3)


class Place:
    def __init__(self, parent: Path, folder: Path):
        self.checkpoint = Checkpoint(parent)
        self.variants = expand(SearchSpace(**SPACE), self.checkpoint.shape)
        self.library = random_library(self.checkpoint, folder, self.variants)
        self.blocks = Blocks(Depth(self.checkpoint, "cpu"), self.library)

    def products(self, architecture: Architecture, tokens: Tensor, samples: int = SAMPLES, batch: int = 4) -> dict:
        final, _ = carry(self.blocks, PARENT, [], tokens, 4, silent)
        options = {"samples": samples, "generator": generator(0, "test"), "batch": batch, "progress": silent}
        return products(self.blocks, architecture, self.variants, tokens, final, **options)

    def context(self, tokens: Tensor, samples: int = SAMPLES) -> Context:
        return Context(self.blocks, self.variants, tokens, samples=samples, seed=0, batch=4, progress=silent)

    def save(self, variant: SubblockVariant, state: dict[str, Tensor]) -> None:
        self.library.save(variant, state, VariantRecord("own", "own", 1.0, 1.0, 1.0, 0, "start"))


def models(place: Place, architecture: Architecture) -> tuple[PreTrainedModel, PreTrainedModel]:
    parent = AutoModelForCausalLM.from_pretrained(place.checkpoint.path, dtype=torch.float32).eval()
    changes = {(v.layer, v.subblock): place.library.load(v) for v in architecture.changes}
    return parent, naive_replacement.replaced(parent, changes)


def tensors_of(place: Place, variant: SubblockVariant) -> dict[str, Tensor]:
    if variant.name != "parent":
        return place.library.load(variant)
    prefix = "self_attn." if variant.subblock == "attention" else "mlp."
    return {k: v for k, v in place.checkpoint.layer_state(variant.layer).items() if k.startswith(prefix)}


@pytest.mark.parametrize("architecture", [PARENT, MIXED], ids=["parent", "mixed"])
def test_products_are_those_of_autograd(
    any_parent: Path, tmp_path: Path, tokens: Tensor, architecture: Architecture
) -> None:
    place = Place(any_parent, tmp_path)
    found = place.products(architecture, tokens)
    parent, child = models(place, architecture)
    q = child(tokens, use_cache=False).logits.softmax(-1).flatten(0, 1)
    assert len(q) <= fisher.HEAD_TOKENS  # so that the labels are drawn in one go, as here
    labels = torch.multinomial(q, SAMPLES, replacement=True, generator=generator(0, "test")).T
    labels = labels.unflatten(1, tokens.shape)
    assert set(found) == set(place.variants)
    for variant in place.variants:
        wanted = naive_gradients.products(
            parent, child, tokens, labels, variant.layer, variant.subblock, tensors_of(place, variant)
        )
        scale = float(wanted.abs().max())
        assert float((found[variant] - wanted).abs().max()) <= 2e-4 * max(scale, 1e-2), variant.key


def test_does_not_depend_on_batches(parent: Path, tmp_path: Path, tokens: Tensor) -> None:
    place = Place(parent, tmp_path)
    whole, cut = (place.products(MIXED, tokens, batch=batch) for batch in (6, 1))
    for variant in place.variants:
        torch.testing.assert_close(cut[variant], whole[variant], rtol=1e-3, atol=1e-4)


def test_small_changes_come_out_as_the_exact_scores(parent: Path, tmp_path: Path, tokens: Tensor) -> None:
    """The last FFN works on each token alone, so that nothing but the third order and sampling is left out."""
    place = Place(parent, tmp_path)
    variant, full = SubblockVariant(2, "ffn", "ffn96"), SubblockVariant(2, "ffn", "parent")
    own = tensors_of(place, full)
    noise = torch.Generator().manual_seed(0)
    place.save(variant, {k: v + 0.003 * torch.randn(v.shape, generator=noise) for k, v in own.items()})
    place.variants = [variant]
    score = float(estimate(place.products(PARENT, tokens, samples=400)).score[0])
    exact = float(sweep(place.blocks, [variant], tokens, 4, silent).kl[0])
    assert exact > 1e-5
    assert score == pytest.approx(exact, rel=0.05)


def test_first_order_around_a_child(parent: Path, tmp_path: Path, tokens: Tensor) -> None:
    """Around a child, half the difference of two opposite steps is gradient times change."""
    place = Place(parent, tmp_path)
    child = Architecture(("parent", "no_op", "parent"), ("parent", "parent", "parent"))
    variant, own = SubblockVariant(0, "ffn", "ffn96"), tensors_of(place, SubblockVariant(0, "ffn", "parent"))
    noise = 2e-3 * torch.randn(own["mlp.down_proj.weight"].shape, generator=torch.Generator().manual_seed(1))
    place.variants = [variant]
    exact, firsts = [], []
    for sign in (1, -1):
        place.save(variant, {**own, "mlp.down_proj.weight": own["mlp.down_proj.weight"] + sign * noise})
        exact.append(place.context(tokens).true_score(child.with_variant(variant)))
        firsts.append(float(place.products(child, tokens)[variant][0].mean()))
    assert abs(exact[0] - exact[1]) > 1e-4
    assert firsts[0] == pytest.approx(-firsts[1], rel=1e-2)
    assert firsts[0] == pytest.approx((exact[0] - exact[1]) / 2, rel=0.02)


def test_true_score_and_own_choices(parent: Path, tmp_path: Path, tokens: Tensor) -> None:
    place = Place(parent, tmp_path)
    around = place.context(tokens)
    teacher, child = models(place, MIXED)
    assert around.true_score(MIXED) == pytest.approx(naive_replacement.scores(teacher, child, tokens)["kl"], rel=1e-5)
    assert abs(around.true_score(PARENT)) < 1e-7
    one, other = SubblockVariant(0, "attention", "parent"), SubblockVariant(2, "ffn", "no_op")
    for variant, change in zip((one, other), around.exact(MIXED, [one, other]), strict=True):
        wanted = around.true_score(MIXED.with_variant(variant)) - around.true_score(MIXED)
        assert change == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    table = around.estimates(MIXED).set_index(["layer", "subblock", "variant"])
    for variant in MIXED.variants:
        assert table.score[variant.layer, variant.subblock, variant.name] == 0


def test_estimate_adds_up_neighbours(parent: Path) -> None:
    """Against the sum over all windows, written out."""
    drawn = torch.randn(1 + SAMPLES, 2, 7, generator=torch.Generator().manual_seed(0))
    total = drawn[0].sum().item()
    for sample in drawn[1:]:
        for sequence in sample.tolist():
            for end in range(7 + WINDOW - 1):
                window = [sequence[t] for t in range(end - WINDOW + 1, end + 1) if 0 <= t < 7]
                total += sum(window) ** 2 / WINDOW / 2 / SAMPLES
    row = estimate({SubblockVariant(0, "ffn", "no_op"): drawn}).iloc[0]
    assert row.score == pytest.approx(total / 14, rel=1e-5)


def test_a_missing_library_is_an_error(parent: Path, tmp_path: Path, tokens: Tensor) -> None:
    place = Place(parent, tmp_path)
    place.blocks = Blocks(place.blocks.depth, BlockLibrary(tmp_path / "empty"))
    with pytest.raises(Exception, match="cannot be read"):
        place.context(tokens).estimates(PARENT)
