# SPDX-License-Identifier: Apache-2.0
"""The tiny parent: its baseline against a naive loop, its optimiser against an SVD, and that training teaches it."""

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from puzzle import parents, tiny
from puzzle.errors import ConfigError, PuzzleError

SMALL = tiny.Recipe(vocabulary=300, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64, sequence=32, steps=30)
SUBJECTS = ("the cat", "a dog", "one bird", "my friend")
VERBS = ("sees", "likes", "follows", "hears")
TEXTS = [f"{a} {v} {b} and {b} {w} {a}. " * 4 for a in SUBJECTS for b in SUBJECTS for v in VERBS for w in VERBS]


def naive_bigram_perplexity(training: list[list[int]], held_out: list[list[int]], vocabulary: int) -> float:
    tokens = [t for row in training for t in row]
    pairs = Counter(pair for row in training for pair in pairwise(row))
    losses = []
    for row in held_out:
        for before, after in pairwise(row):
            unigram = (tokens.count(after) + 1) / (len(tokens) + vocabulary)
            total = sum(n for (a, _), n in pairs.items() if a == before)
            kinds = sum(a == before for a, _ in pairs)
            chance = (pairs[before, after] + kinds * unigram) / (total + kinds) if total else unigram
            losses.append(-math.log(chance))
    return math.exp(sum(losses) / len(losses))


def rows(width: int) -> st.SearchStrategy:
    return st.lists(st.lists(st.integers(0, 6), min_size=width, max_size=width), min_size=1, max_size=6)


@given(rows(5), rows(4))
def test_bigram_perplexity_is_that_of_a_naive_loop(training: list[list[int]], held_out: list[list[int]]) -> None:
    found = tiny.bigram_perplexity(torch.tensor(training), torch.tensor(held_out), 7)
    assert math.isclose(found, naive_bigram_perplexity(training, held_out, 7), rel_tol=1e-9)


def test_bigram_chances_sum_to_one() -> None:
    training = torch.tensor([[0, 1, 2, 1], [3, 3, 0, 1]])
    for before in range(5):
        chances = [1 / tiny.bigram_perplexity(training, torch.tensor([[before, after]]), 5) for after in range(5)]
        assert math.isclose(sum(chances), 1.0, rel_tol=1e-9)


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 16, 40), (2, 40, 16)])
def test_orthogonalise_keeps_directions_and_levels_their_strength(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = tiny.orthogonalise(matrices)
    for before, after in zip(matrices.double(), found.double(), strict=True):
        left, _, right = torch.linalg.svd(before, full_matrices=False)
        core = left.mT @ after @ right.mT  # diagonal in the basis of the input
        assert (core - core.diag().diag()).abs().max() < 1e-4
        assert core.diag().min() > 0.3 and core.diag().max() < 1.3


def test_associations_bring_neighbours_together() -> None:
    pairs = torch.tensor([[2 * (i % 10), 2 * (i % 10) + 1] for i in range(400)])
    rows = torch.nn.functional.normalize(tiny.associations(pairs, 20, 12), dim=1)
    likeness = (rows @ rows.T).fill_diagonal_(-1)
    assert likeness.argmax(1).tolist() == [i ^ 1 for i in range(20)]


def test_training_lowers_the_loss_and_beats_the_bigram_model_repeatably() -> None:
    first, again = (tiny.train(TEXTS, SMALL, seed=1) for _ in range(2))
    losses = first.losses
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:3])
    assert first.perplexity < 0.7 * math.exp(losses[0])
    assert again.losses == losses and again.perplexity == first.perplexity
    assert again.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    assert tiny.train(TEXTS, SMALL, seed=2).losses != losses


def test_training_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    tiny.train(TEXTS, SMALL)
    assert torch.equal(torch.rand(3), wanted)


def test_too_little_text_is_one_sentence() -> None:
    with pytest.raises(PuzzleError, match=r"too short for the tiny parent: [0-9,]+ tokens are needed"):
        tiny.train(TEXTS[:40], SMALL)


def test_the_folder_is_a_whole_checkpoint_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUZZLE_CACHE", str(tmp_path))
    monkeypatch.setattr(parents, "python_docs", lambda progress: TEXTS)
    calls: list[tuple[str, int, int]] = []
    made = parents.tiny_parent(lambda *call: calls.append(call), recipe=SMALL)
    assert ("training the tiny parent", 30, 30) in calls and made.path.parent == tmp_path / "parents"
    assert json.loads((made.path / "training.json").read_text())["figures"]["perplexity"] == made.perplexity
    tokenizer, model = AutoTokenizer.from_pretrained(made.path), AutoModelForCausalLM.from_pretrained(made.path)
    fresh = tiny.train(TEXTS, SMALL)
    text = "the cat likes my friend\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text and tokenizer.eos_token == tiny.END
    tokens = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, fresh.model(tokens).logits)
    monkeypatch.setattr(tiny, "train", lambda *_: pytest.fail("trained again"))
    assert parents.tiny_parent(recipe=SMALL) == made


def test_a_folder_with_something_else_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parents, "python_docs", lambda progress: TEXTS)
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="give a new or empty folder"):
        parents.tiny_parent(out=tmp_path, recipe=SMALL)
