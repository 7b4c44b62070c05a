# SPDX-License-Identifier: Apache-2.0
"""Perplexity, KL and top-1 agreement against naive loops over tokens in float64."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_parent
from torch import Tensor

from puzzle.config import DataConfig
from puzzle.errors import ConfigError
from puzzle.evaluate import ParentLogits, TokenSums, compare_logits, evaluate, evaluate_checkpoint, load
from puzzle.run import silent


def log_softmax(logits: list[float]) -> list[float]:
    highest = max(logits)
    total = math.log(sum(math.exp(x - highest) for x in logits)) + highest
    return [x - total for x in logits]


def naive(parent: Tensor, child: Tensor, tokens: Tensor) -> dict[str, list[float]]:
    """Per-token values from logits [batch, seq, vocab], one probability at a time."""
    found: dict[str, list[float]] = {"kl": [], "agrees": [], "loss": [], "parent_loss": []}
    for row in range(tokens.shape[0]):
        for i in range(tokens.shape[1]):
            p, q = (log_softmax(logits[row, i].double().tolist()) for logits in (parent, child))
            found["kl"].append(sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
            found["agrees"].append(float(p.index(max(p)) == q.index(max(q))))
            if i + 1 < tokens.shape[1]:
                label = int(tokens[row, i + 1])
                found["loss"].append(-q[label])
                found["parent_loss"].append(-p[label])
    return found


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def stderr(values: list[float]) -> float:
    return math.sqrt(mean([(x - mean(values)) ** 2 for x in values]) / len(values))


def random_logits(seed: int, scale: float, shape: tuple[int, ...] = (3, 5, 11)) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 10_000), st.sampled_from((0.1, 1.0, 10.0, 60.0)))
def test_figures_of_naive_loops(seed: int, scale: float) -> None:
    parent, child = random_logits(seed, scale), random_logits(seed + 1, scale)
    tokens = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(seed))
    figures = compare_logits(ParentLogits.of(parent, tokens), child)
    wanted = naive(parent, child, tokens)
    assert figures.kl.shape == figures.agrees.shape == (3, 5)
    assert figures.loss.shape == figures.parent_loss.shape == (3, 4)
    for name, values in wanted.items():
        torch.testing.assert_close(
            getattr(figures, name).flatten().double(), torch.tensor(values).double(), rtol=1e-4, atol=1e-5
        )
    sums = TokenSums()
    for part in (slice(0, 1), slice(1, 3)):
        sums.add(compare_logits(ParentLogits.of(parent[part], tokens[part]), child[part]))
    assert (sums.tokens, sums.labels) == (15, 12)
    assert sums.kl == pytest.approx(mean(wanted["kl"]), rel=1e-4, abs=1e-5)
    assert sums.kl_stderr == pytest.approx(stderr(wanted["kl"]), rel=1e-3, abs=1e-5)
    assert sums.top1_agreement == mean(wanted["agrees"])
    assert sums.lm_loss == pytest.approx(mean(wanted["loss"]), rel=1e-5)
    assert sums.lm_loss_stderr == pytest.approx(stderr(wanted["loss"]), rel=1e-3, abs=1e-5)
    assert sums.parent_lm_loss == pytest.approx(mean(wanted["parent_loss"]), rel=1e-5)


@given(st.integers(0, 10_000), st.floats(0.1, 50.0))
def test_a_model_equals_itself(seed: int, scale: float) -> None:
    logits = random_logits(seed, scale)
    figures = compare_logits(ParentLogits.of(logits, torch.zeros(3, 5, dtype=torch.long)), logits)
    assert torch.equal(figures.kl, torch.zeros(3, 5))
    assert bool(figures.agrees.all())
    assert torch.equal(figures.loss, figures.parent_loss)


def test_logits_of_other_dtypes_are_judged_in_float32() -> None:
    parent, child = random_logits(0, 3.0), random_logits(1, 3.0).bfloat16()
    tokens = torch.zeros(3, 5, dtype=torch.long)
    figures = compare_logits(ParentLogits.of(parent, tokens), child)
    assert figures.kl.dtype == figures.loss.dtype == torch.float32
    torch.testing.assert_close(figures.kl, compare_logits(ParentLogits.of(parent, tokens), child.float()).kl)


@torch.no_grad()
def test_whole_models(parent: Path, tokens: Tensor, tmp_path: Path) -> None:
    """Two models in one pass; batches do not matter, and the figures are those of the loops."""
    teacher = load(parent, "float32", "cpu")
    students = {"same": teacher, "other": load(make_parent(tmp_path, initializer_range=0.12), "float32", "cpu")}
    steps: list[tuple[int, int]] = []
    runs: list[int] = []
    handle = teacher.register_forward_pre_hook(lambda *_: runs.append(1))
    found = evaluate(students, teacher, tokens, 4, lambda what, done, total: steps.append((done, total)))
    handle.remove()
    assert steps == [(0, 2), (1, 2), (2, 2)] and len(runs) == 2
    assert found["same"]["kl"] == 0 and found["same"]["top1_agreement"] == 1 and found["same"]["tokens"] == 192
    wanted = naive(teacher(tokens).logits, students["other"](tokens).logits, tokens)
    other = found["other"]
    assert other["kl"] == pytest.approx(mean(wanted["kl"]), rel=1e-4)
    assert other["kl_stderr"] == pytest.approx(stderr(wanted["kl"]), rel=1e-4)
    assert other["top1_agreement"] == pytest.approx(mean(wanted["agrees"]))
    assert other["perplexity"] == pytest.approx(math.exp(mean(wanted["loss"])), rel=1e-4)
    assert other["perplexity_stderr"] == pytest.approx(
        math.exp(mean(wanted["loss"])) * stderr(wanted["loss"]), rel=1e-3
    )
    loss = float(teacher(tokens, labels=tokens).loss)  # transformers' own
    assert found["same"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    for batch in (1, 6, 100):
        again = evaluate(students, teacher, tokens, batch, silent)["other"]
        assert again == {key: pytest.approx(value, rel=1e-5) for key, value in other.items()}


@pytest.fixture
def text(tmp_path: Path) -> DataConfig:
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"Paragraph {i}: the quick brown fox jumps over {i} lazy dogs." * 8 for i in range(60)))
    return DataConfig(source=str(file), seq_length=32)


def test_checkpoints(parent: Path, tmp_path: Path, text: DataConfig) -> None:
    other = make_parent(tmp_path / "other", initializer_range=0.12)
    options = {"config": text, "tokens": 256, "seed": 0, "device": "cpu", "progress": silent}
    both = evaluate_checkpoint(str(other), str(parent), **options)
    assert both["kl"] > 0 and both["tokens"] == 256
    alone = evaluate_checkpoint(str(other), None, **options)
    assert set(alone) == {"perplexity", "perplexity_stderr", "tokens"}
    assert alone["perplexity"] == both["perplexity"]


def test_models_of_other_vocabularies(parent: Path, tmp_path: Path, text: DataConfig) -> None:
    larger = make_parent(tmp_path / "larger", vocab_size=300)
    with pytest.raises(ConfigError, match=r"has 300 tokens, .* has 257; they cannot be compared"):
        evaluate_checkpoint(str(larger), str(parent), text, 256, 0, "cpu", silent)
