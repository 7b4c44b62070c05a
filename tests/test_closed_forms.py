# SPDX-License-Identifier: Apache-2.0
"""Weights taken from the parent against naive loops, and the ridge regression against numpy's least squares."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from puzzle.architecture import AttentionConfig, FFNConfig
from puzzle.variants import KINDS
from puzzle.variants.base import Moments, SubblockStats, ridge

NOTHING = Moments(torch.empty(0), torch.empty(0))


def stats(importance: list[float]) -> SubblockStats:
    weight = torch.tensor(importance, dtype=torch.float64)
    return SubblockStats(NOTHING, NOTHING, weight, lambda config, state: NOTHING)


def random_state(seed: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_kv_heads_are_pooled_and_chosen_by_group() -> None:
    """6 heads of 4 become 2: each takes the place of three neighbours, whole heads only."""
    heads, dim, hidden, kept = 6, 4, 5, 2
    names = [f"self_attn.{n}_proj.{part}" for n in "kv" for part in ("weight", "bias")]
    shapes = {n: (heads * dim, hidden) if n.endswith("weight") else (heads * dim,) for n in names}
    others = {"self_attn.q_proj.weight": (heads * dim, hidden), "self_attn.o_proj.weight": (hidden, heads * dim)}
    parent = random_state(0, {**shapes, **others})
    importance = [0.1, 0.3, 0.2, 0.5, 0.9, 0.9]
    pooled, chosen = KINDS["grouped_query"].starts(AttentionConfig(kept), parent, stats(importance))
    for name in shapes:
        wanted_pooled, wanted_chosen = [], []
        for group in range(kept):
            members = [group * 3 + i for i in range(3)]
            best = max(members, key=lambda head: importance[head])
            for row in range(dim):
                wanted_pooled.append(sum(parent[name][head * dim + row] for head in members) / 3)
                wanted_chosen.append(parent[name][best * dim + row])
        torch.testing.assert_close(pooled[name], torch.stack(wanted_pooled))
        assert torch.equal(chosen[name], torch.stack(wanted_chosen))
    for name in others:
        assert torch.equal(pooled[name], parent[name]) and torch.equal(chosen[name], parent[name])


def test_the_most_important_channels_are_kept_in_order() -> None:
    rows = ("gate_proj.weight", "up_proj.weight", "gate_proj.bias", "up_proj.bias")
    shapes: dict[str, tuple[int, ...]] = {f"mlp.{n}": (6, 3) if n.endswith("weight") else (6,) for n in rows}
    parent = random_state(1, {**shapes, "mlp.down_proj.weight": (3, 6), "mlp.down_proj.bias": (3,)})
    kind, config = KINDS["ffn_width"], FFNConfig(intermediate_size=3)
    known = stats([0.5, 0.1, 0.9, 0.2, 0.5, 0.5])
    (start,) = kind.starts(config, parent, known)
    kept = [0, 2, 4]  # of the three equal ones the first two
    for name in rows:
        assert torch.equal(start[f"mlp.{name}"], torch.stack([parent[f"mlp.{name}"][i] for i in kept]))
    assert torch.equal(
        start["mlp.down_proj.weight"], torch.stack([parent["mlp.down_proj.weight"][:, i] for i in kept], 1)
    )
    assert torch.equal(start["mlp.down_proj.bias"], parent["mlp.down_proj.bias"])
    gram, cross = (torch.arange(n * 6.0).double().reshape(n, 6) for n in (6, 3))
    known = SubblockStats(NOTHING, Moments(gram, cross), known.importance, known.inner_of)
    name, moments = kind.refit(config, start, known)
    assert name == "mlp.down_proj.weight"
    assert moments.gram.tolist() == [[gram[i, j].item() for j in kept] for i in kept]
    assert moments.cross.tolist() == [[cross[i, j].item() for j in kept] for i in range(3)]


def test_linear_starts_are_products_and_zero() -> None:
    """Attention to oneself alone: each query head passes on its KV head's value; an FFN without its gate."""
    query_heads, kv_heads, dim, hidden = 6, 2, 4, 5
    sizes = {"v": (kv_heads * dim, hidden), "o": (hidden, query_heads * dim)}
    parent = random_state(2, {f"self_attn.{name}_proj.weight": size for name, size in sizes.items()})
    starts = KINDS["linear"].starts(AttentionConfig(linear=True), parent, stats([1.0] * kv_heads))
    product, zero = (start["self_attn.linear_attn.weight"] for start in starts)
    wanted = torch.zeros(hidden, hidden)
    for head in range(query_heads):
        shared = head // (query_heads // kv_heads)
        value = parent["self_attn.v_proj.weight"][shared * dim : (shared + 1) * dim]
        wanted += parent["self_attn.o_proj.weight"][:, head * dim : (head + 1) * dim] @ value
    torch.testing.assert_close(product, wanted)
    assert torch.equal(zero, torch.zeros(hidden, hidden))
    parent = random_state(3, {"mlp.up_proj.weight": (7, 5), "mlp.down_proj.weight": (5, 7)})
    starts = KINDS["linear"].starts(FFNConfig(linear=True), parent, stats([1.0] * 7))
    product, zero = (start["mlp.linear_mlp.weight"] for start in starts)
    expected = parent["mlp.down_proj.weight"].numpy() @ parent["mlp.up_proj.weight"].numpy()
    np.testing.assert_allclose(product.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(zero, torch.zeros(5, 5))


# --------------------------------------------------------------------------------------------------------------- ridge


def problem(seed: int, tokens: int, features: int, hidden: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features [tokens, features], outputs [tokens, hidden], a weight [hidden, features] to be pulled towards."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(s) for s in ((tokens, features), (tokens, hidden), (hidden, features)))


def moments(f: np.ndarray, y: np.ndarray) -> Moments:
    return Moments(torch.from_numpy(f.T @ f), torch.from_numpy(y.T @ f))


@given(st.integers(0, 1_000), st.integers(1, 30), st.integers(1, 8), st.sampled_from((1e-6, 1e-3, 1e-1, 10.0)))
def test_ridge_is_least_squares_of_the_augmented_system(seed: int, tokens: int, features: int, strength: float) -> None:
    """min ||Y - F W'||^2 + s ||W - W0||^2 is the plain problem with sqrt(s) (I, W0') below (F, Y)."""
    f, y, start = problem(seed, tokens, features, 3)
    damping = math.sqrt(strength * np.mean(np.sum(f * f, axis=0)))
    augmented = np.vstack([f, damping * np.eye(features)]), np.vstack([y, damping * start.T])
    wanted = np.linalg.lstsq(*augmented, rcond=None)[0].T
    found = ridge(torch.from_numpy(start), moments(f, y), strength).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@given(st.integers(0, 1_000))
def test_a_weak_ridge_recovers_a_linear_map(seed: int) -> None:
    f, _, start = problem(seed, 64, 6, 3)
    exact = np.random.default_rng(seed + 1).standard_normal((3, 6))
    found = ridge(torch.from_numpy(start), moments(f, f @ exact.T), 1e-12).numpy()
    np.testing.assert_allclose(found, exact, rtol=1e-7, atol=1e-7)


def test_a_strong_ridge_keeps_the_start() -> None:
    f, y, start = problem(0, 64, 6, 3)
    found = ridge(torch.from_numpy(start), moments(f, y), 1e9).numpy()
    np.testing.assert_allclose(found, start, atol=1e-7)


def test_features_that_never_fire_keep_the_start() -> None:
    f, y, start = problem(0, 64, 6, 3)
    f[:, 2] = 0
    found = ridge(torch.from_numpy(start), moments(f, y), 1e-6).numpy()
    np.testing.assert_allclose(found[:, 2], start[:, 2])
    silent = ridge(torch.from_numpy(start), moments(0 * f, y), 1e-6).numpy()
    np.testing.assert_allclose(silent, start)


def test_the_dtype_is_the_starts() -> None:
    f, y, start = problem(0, 64, 6, 3)
    for dtype in (torch.float32, torch.bfloat16):
        assert ridge(torch.from_numpy(start).to(dtype), moments(f, y), 1e-3).dtype == dtype


@pytest.mark.parametrize("rank", [1, 10])
def test_moments_that_rounding_left_indefinite(rank: int) -> None:
    """Products of a batch are float32; where few directions carry all, the smallest eigenvalues fall below zero."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -4, 256)
    f = torch.randn(4096, rank, generator=generator) @ torch.randn(rank, 256, generator=generator) * scales
    exact = torch.randn(8, 256, generator=generator)
    gram = sum((part.T @ part).double() for part in f.split(512))
    y = f @ exact.T
    assert torch.linalg.eigvalsh(gram)[0] < 0
    found = ridge(torch.zeros(8, 256), Moments(gram, (y.T @ f).double()), 1e-9)
    assert torch.isfinite(found).all()
    assert (f @ found.T - y).square().sum() < 1e-4 * y.square().sum()


def test_moments_that_are_no_numbers_keep_the_start() -> None:
    f, y, start = problem(0, 64, 6, 3)
    f[0, 0] = math.nan
    weight = torch.from_numpy(start)
    assert torch.equal(ridge(weight, moments(f, y), 1e-3), weight)
