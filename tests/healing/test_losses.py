# SPDX-License-Identifier: Apache-2.0
"""The losses against direct formulas in float64, and their numerics in half precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from puzzle.config import HealingConfig
from puzzle.healing.losses import IGNORED, chunked_kl, gkd_loss, head_losses, hidden_cosine, next_tokens

HIDDEN, PARENT_HIDDEN, VOCAB = 6, 10, 37


def inputs(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Child hidden and head (both with gradients), parent hidden and head."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, HIDDEN), (VOCAB, HIDDEN), (tokens, PARENT_HIDDEN), (VOCAB, PARENT_HIDDEN)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_(i < 2) for i, x in enumerate(made)]


def direct_kl(child, child_head, parent, parent_head, mask=None, temperature=1.0):
    """sum_v p (log p - log q), token by token, by the definition."""
    total, count = torch.zeros((), dtype=child.dtype), 0
    for t in range(len(child)):
        if mask is None or mask[t]:
            p = ((parent_head @ parent[t]) / temperature).softmax(0)
            q = ((child_head @ child[t]) / temperature).softmax(0)
            total = total + (p * (p.log() - q.log())).sum()
            count += 1
    return temperature**2 * total / count


@settings(deadline=None, max_examples=30)
@given(
    tokens=st.integers(1, 23),
    chunk=st.integers(1, 30),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_chunked_kl_and_its_gradient_equal_the_direct_formula(tokens, chunk, temperature, masked, seed):
    x = inputs(tokens, seed)
    mask = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) < 0.6 if masked else None
    if mask is not None:
        mask[0] = True
    ours = chunked_kl(*x, mask=mask, temperature=temperature, chunk=chunk)
    wanted = direct_kl(*x, mask=mask, temperature=temperature)
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(
        torch.autograd.grad(ours, x[:2]), torch.autograd.grad(wanted, x[:2]), rtol=1e-10, atol=1e-13
    )


def test_kl_is_zero_without_gradient_for_the_parent_itself():
    child, head, _, _ = inputs(9)
    kl = chunked_kl(child, head, child.detach(), head.detach(), chunk=4)
    assert abs(kl.item()) < 1e-14
    assert all(g.abs().max() < 1e-14 for g in torch.autograd.grad(kl, [child, head]))


def test_next_token_loss_comes_from_the_same_chunks():
    child, head, parent, parent_head = inputs(12)
    targets = torch.randint(VOCAB, (12,), generator=torch.Generator().manual_seed(1))
    targets[[3, 11]] = IGNORED
    kl, lm = head_losses(child, head, parent, parent_head, targets, temperature=2.0, chunk=5)
    wanted = functional.cross_entropy(child @ head.T, targets, ignore_index=IGNORED)
    torch.testing.assert_close(lm, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(kl, direct_kl(child, head, parent, parent_head, temperature=2.0), rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(lm, [child, head]), torch.autograd.grad(wanted, [child, head]))


def test_next_tokens_stop_at_the_end_and_at_masked_tokens():
    ids = torch.tensor([[5, 6, 7, 8]])
    assert next_tokens(ids).tolist() == [[6, 7, 8, IGNORED]]
    assert next_tokens(ids, torch.tensor([[True, True, False, True]])).tolist() == [[6, IGNORED, 8, IGNORED]]


def test_hidden_cosine_equals_a_loop():
    generator = torch.Generator().manual_seed(2)
    child, parent = (
        [torch.randn(2, 3, 5, generator=generator, dtype=torch.float64) for _ in range(4)] for _ in range(2)
    )
    mask = torch.tensor([[True, False, True], [True, True, False]])
    each = [
        1 - float(c[b, t] @ p[b, t] / (c[b, t].norm() * p[b, t].norm()))
        for c, p in zip(child, parent, strict=True)
        for b, t in mask.nonzero().tolist()
    ]
    assert hidden_cosine(child, parent, mask).item() == pytest.approx(sum(each) / len(each), rel=1e-12)
    assert hidden_cosine(child, child).item() == pytest.approx(0, abs=1e-14)
    assert hidden_cosine(child, [-p for p in child]).item() == pytest.approx(2, abs=1e-14)


def test_gkd_loss_is_the_weighted_sum_of_the_terms_in_use():
    generator = torch.Generator().manual_seed(3)
    child, parent = ([torch.randn(2, 5, 6, generator=generator, dtype=torch.float64) for _ in range(3)] for _ in "ab")
    heads = [torch.randn(VOCAB, 6, generator=generator, dtype=torch.float64) for _ in "ab"]
    ids = torch.randint(VOCAB, (2, 5), generator=generator)
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]])

    def terms(kl, cosine, lm, **kwargs):
        config = HealingConfig(kl_weight=kl, cosine_weight=cosine, lm_weight=lm, temperature=1.5)
        return gkd_loss(child, heads[0], parent, heads[1], ids, config, mask=mask, **kwargs)

    all_three = terms(2.0, 3.0, 0.5, layers=[0, 2])
    rows = mask.flatten()
    kl = direct_kl(child[-1].flatten(0, 1), heads[0], parent[-1].flatten(0, 1), heads[1], rows, 1.5)
    torch.testing.assert_close(all_three["kl"], kl)
    torch.testing.assert_close(all_three["cosine"], hidden_cosine(child[::2], parent[::2], mask))
    logits = child[-1] @ heads[0].T
    predicted = torch.cat([logits[0, :4], logits[1, :2]])
    following = torch.cat([ids[0, 1:], ids[1, 1:3]])
    torch.testing.assert_close(all_three["lm"], functional.cross_entropy(predicted, following))
    wanted = 2 * all_three["kl"] + 3 * all_three["cosine"] + 0.5 * all_three["lm"]
    torch.testing.assert_close(all_three["loss"], wanted)
    assert terms(1.0, 0.0, 0.0).keys() == {"loss", "kl"}
    assert terms(0.0, 1.0, 0.0).keys() == {"loss", "cosine"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_of_half_precision_states_is_computed_in_float32(dtype):
    x = inputs(16, dtype=dtype)
    exact = direct_kl(*[t.detach().double() for t in x])
    ours = chunked_kl(*x, chunk=5)
    assert ours.dtype == torch.float32
    # The logits are rounded once, to `dtype`; a softmax in `dtype` errs ten times as much.
    torch.testing.assert_close(ours.double(), exact, rtol=10 * torch.finfo(dtype).eps, atol=0)


def test_many_chunks_under_autocast_lose_no_gradient():
    """Gradients of the chunks add up in float32: the error does not grow with their number."""
    child, head, parent, parent_head = inputs(2048, dtype=torch.float32)
    exact = torch.autograd.grad(chunked_kl(child, head, parent, parent_head), head)[0]

    def error(chunk: int) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            kl = chunked_kl(child, head, parent, parent_head, chunk=chunk)
        gradient = torch.autograd.grad(kl, head)[0]
        return ((gradient - exact).norm() / exact.norm()).item()

    assert error(8) < 1.1 * error(2048)


def test_loss_scaling_keeps_gradients_that_float16_would_lose():
    """Unscaled, the gradients of a loss of small weight lie below float16's smallest number; scaled, they do not."""
    generator = torch.Generator().manual_seed(4)
    child, head = torch.randn(512, HIDDEN, generator=generator), 0.2 * torch.randn(2000, HIDDEN, generator=generator)
    parent_head = head + 0.3 * torch.randn(head.shape, generator=generator)

    def step(dtype: torch.dtype, scaler: torch.amp.GradScaler) -> torch.Tensor:
        """The change of the head by one step of gradient descent; float32 masters under autocast."""
        weight = head.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = 1e-4 * chunked_kl(child, weight, child, parent_head)
        scaler.scale(loss).backward()
        scaler.step(torch.optim.SGD([weight], lr=1e6))
        return weight.detach() - head

    exact = step(torch.float32, torch.amp.GradScaler("cpu", enabled=False))
    assert exact.abs().max() > 0.01
    assert not step(torch.float16, torch.amp.GradScaler("cpu", enabled=False)).any()
    scaled = step(torch.float16, torch.amp.GradScaler("cpu", init_scale=2.0**20))
    assert (scaled - exact).norm() < 0.01 * exact.norm()
