# SPDX-License-Identifier: Apache-2.0
"""Importance against loops over tokens, channels and head groups in float64."""

from pathlib import Path

import pytest
import torch
from references import naive_importance
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from puzzle.devices import generator
from puzzle.library import importance
from puzzle.run import silent


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def measure(folder: Path, tokens: Tensor, method: str, **options: object) -> importance.Importance:
    settings = {"generator": generator(0, "labels"), "compute_dtype": "float32", "batch": 2, "progress": silent}
    return importance.measure(load(folder), tokens, method, **{**settings, **options})


def assert_near(found: importance.Importance, wanted: dict[str, Tensor], rtol: float) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == torch.float64
        torch.testing.assert_close(found[key], value, rtol=rtol, atol=0.0)


def test_fisher_equals_the_loop_over_tokens(any_parent: Path, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens[:3, :12]
    labels = torch.randint(257, tokens.shape, generator=torch.Generator().manual_seed(3))
    waiting = iter(labels.flatten().tolist())

    def given(log_probs: Tensor, generator: torch.Generator) -> Tensor:
        return torch.tensor([[next(waiting)] for _ in log_probs])

    monkeypatch.setattr(importance, "_sample", given)
    found = measure(any_parent, tokens, "fisher")
    assert next(waiting, None) is None
    assert_near(found, naive_importance.fisher(load(any_parent, torch.float64), tokens, labels), rtol=1e-3)


def test_contribution_equals_removing_one_at_a_time(any_parent: Path, tokens: Tensor) -> None:
    tokens = tokens[:3, :12]
    found = measure(any_parent, tokens, "contribution")
    assert_near(found, naive_importance.contribution(load(any_parent, torch.float64), tokens), rtol=1e-5)


@pytest.mark.parametrize("method", ["fisher", "contribution"])
def test_does_not_depend_on_the_batch(parent: Path, tokens: Tensor, method: str) -> None:
    assert_near(measure(parent, tokens, method, batch=4), measure(parent, tokens, method, batch=1), rtol=1e-4)


def test_labels_are_cut_into_pieces_without_a_change(parent: Path, tokens: Tensor) -> None:
    """More tokens in a pass than the head takes at once."""
    many = tokens.repeat(3, 1)  # 576 tokens
    assert_near(measure(parent, many, "fisher", batch=18), measure(parent, many, "fisher", batch=1), rtol=1e-4)


def test_labels_depend_on_the_seed_alone(parent: Path, tokens: Tensor) -> None:
    first, again, other = (
        measure(parent, tokens, "fisher", generator=generator(seed, "labels"))["1.ffn"] for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_labels_follow_the_parents_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.25, 0.125, 0.125])
    draws = 20_000
    labels = importance._sample(probabilities.log().expand(draws, -1), torch.Generator().manual_seed(0))
    assert labels.shape == (draws, 1)
    shares = labels.flatten().bincount(minlength=5) / draws
    assert shares[1] == 0
    deviation = (probabilities * (1 - probabilities) / draws).sqrt()
    assert torch.all((shares - probabilities).abs() <= 4 * deviation)


def test_mixed_precision_ranks_alike(parent: Path, tokens: Tensor) -> None:
    exact, mixed = (measure(parent, tokens, "contribution", compute_dtype=d) for d in ("float32", "bfloat16"))
    for key, value in exact.items():
        torch.testing.assert_close(mixed[key], value, rtol=0.05, atol=0.0)


def test_leaves_no_hook_behind(parent: Path, tokens: Tensor) -> None:
    model = load(parent)
    importance.measure(
        model, tokens, "fisher", generator=generator(0, ""), compute_dtype="float32", batch=2, progress=silent
    )
    assert not any(module._forward_pre_hooks for module in model.modules())
