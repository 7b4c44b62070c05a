# SPDX-License-Identifier: Apache-2.0
"""The depth sweep against a loop that swaps one module inside transformers' Llama and runs the whole model."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from references import naive_replacement
from tiny_runs import SPACE, in_bfloat16, random_library
from torch import Tensor
from transformers import AutoModelForCausalLM

from puzzle.architecture import PARENT, SubblockVariant
from puzzle.block_library import BlockLibrary
from puzzle.checkpoint import Checkpoint
from puzzle.config import SearchSpace
from puzzle.depth import Depth
from puzzle.errors import PuzzleError
from puzzle.run import silent
from puzzle.scoring import replacement
from puzzle.scoring.blocks import Blocks
from puzzle.scoring.replacement import sweep
from puzzle.variants import expand

FIGURES = ("kl", "stderr", "lm_loss_increase", "top1_agreement")


class Place:
    def __init__(self, parent: Path, folder: Path, space: dict | None = None):
        self.checkpoint = Checkpoint(parent)
        self.variants = expand(SearchSpace(**(space or SPACE)), self.checkpoint.shape)
        self.library = random_library(self.checkpoint, folder, self.variants)

    def sweep(self, tokens: Tensor, batch: int = 4) -> pd.DataFrame:
        blocks = Blocks(Depth(self.checkpoint, "cpu"), self.library)
        return sweep(blocks, self.variants, tokens, batch, silent)


def by_key(scores: pd.DataFrame) -> dict[str, dict]:
    return {f"{r['layer']}.{r['subblock']}.{r['variant']}": r for r in scores.to_dict("records")}


def assert_equal_to_naive(place: Place, scores: pd.DataFrame, tokens: Tensor) -> None:
    parent = AutoModelForCausalLM.from_pretrained(place.checkpoint.path, dtype=torch.float32).eval()
    found = by_key(scores)
    assert len(found) == len(scores) == len(place.variants)
    for variant in place.variants:
        row = found[variant.key]
        assert row["tokens"] == tokens.numel() and row["method"] == "exact"
        if variant.name == PARENT:
            assert [row[f] for f in FIGURES] == [0, 0, 0, 1]
            continue
        change = {(variant.layer, variant.subblock): place.library.load(variant)}
        wanted = naive_replacement.scores(parent, naive_replacement.replaced(parent, change), tokens)
        assert wanted["kl"] > 1e-3  # so that the comparison is one of numbers and not of rounding
        for figure in ("kl", "stderr"):
            assert row[figure] == pytest.approx(wanted[figure], rel=1e-5), (variant.key, figure)
        assert row["lm_loss_increase"] == pytest.approx(wanted["lm_loss_increase"], rel=1e-5, abs=1e-6)
        assert row["top1_agreement"] == wanted["top1_agreement"]


def test_equals_the_naive_loop(any_parent: Path, tmp_path: Path, tokens: Tensor) -> None:
    place = Place(any_parent, tmp_path)
    assert_equal_to_naive(place, place.sweep(tokens), tokens)


def test_a_bfloat16_parent_is_scored_in_float32(parent: Path, tmp_path: Path, tokens: Tensor) -> None:
    place = Place(
        in_bfloat16(parent, tmp_path / "parent"), tmp_path / "library", {"attention": ["kv1"], "ffn": ["ffn32"]}
    )
    assert_equal_to_naive(place, place.sweep(tokens), tokens)


def test_does_not_depend_on_batches(
    parent: Path, tmp_path: Path, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(parent, tmp_path)
    whole = place.sweep(tokens, batch=6)
    for head_tokens, batch in ((1, 1), (70, 4)):
        monkeypatch.setattr(replacement, "HEAD_TOKENS", head_tokens)
        pd.testing.assert_frame_equal(place.sweep(tokens, batch), whole, rtol=1e-5)


def test_a_variant_is_scored_the_same_in_any_company(parent: Path, tmp_path: Path, tokens: Tensor) -> None:
    place = Place(parent, tmp_path)
    together = by_key(place.sweep(tokens))
    place.variants = [v for v in place.variants if v.name in (PARENT, "kv1")][::-1]
    for key, row in by_key(place.sweep(tokens)).items():
        assert row == together[key]


def test_the_parents_own_weights_score_next_to_nothing(parent: Path, tmp_path: Path, tokens: Tensor) -> None:
    """A variant of the parent's shape with the parent's tensors: what is left is rounding."""
    place = Place(parent, tmp_path, {"attention": [PARENT], "ffn": ["linear"]})
    variant = SubblockVariant(1, "attention", "kv2")
    state = {k: v for k, v in place.checkpoint.layer_state(1).items() if k.startswith("self_attn.")}
    record = place.library.record(SubblockVariant(1, "ffn", "linear"))
    place.library.save(variant, state, record)
    place.variants = [variant]
    row = by_key(place.sweep(tokens))[variant.key]
    assert abs(row["kl"]) < 1e-7 and abs(row["lm_loss_increase"]) < 1e-7
    assert row["top1_agreement"] == 1


def test_the_library_stays_as_it_is(parent: Path, tmp_path: Path, tokens: Tensor) -> None:
    place = Place(parent, tmp_path)
    assert place.sweep(tokens).equals(place.sweep(tokens))


def test_a_missing_variant_is_named(parent: Path, tmp_path: Path, tokens: Tensor) -> None:
    place = Place(parent, tmp_path)
    place.library = BlockLibrary(tmp_path / "empty")
    with pytest.raises(PuzzleError, match=r"0\.attention\.kv1\.safetensors"):
        place.sweep(tokens)
