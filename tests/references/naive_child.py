# SPDX-License-Identifier: Apache-2.0
"""A heterogeneous Llama in plain loops and float64, from nothing but tensors and config: what a child must compute."""

import math
from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding of one head, [seq, head_dim]: pair (i, i + half) turns by position * theta ** (-2 i / dim)."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for position in range(x.shape[0]):
        for i in range(half):
            angle = position * theta ** (-2 * i / x.shape[-1])
            a, b = x[position, i], x[position, i + half]
            out[position, i] = a * math.cos(angle) - b * math.sin(angle)
            out[position, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def linear(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ state[f"{name}.weight"].T
    return y + state[f"{name}.bias"] if f"{name}.bias" in state else y


def attention(state: dict[str, Tensor], config: Any, kv_heads: int, x: Tensor) -> Tensor:
    """Causal attention, one query head at a time: [seq, hidden] -> [seq, hidden]."""
    theta, dim = config.rope_parameters["rope_theta"], config.head_dim
    q, k, v = (linear(state, f"self_attn.{name}_proj", x).split(dim, dim=-1) for name in "qkv")
    group = config.num_attention_heads // kv_heads
    assert len(k) == kv_heads
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    outputs = []
    for head in range(config.num_attention_heads):
        scores = rotate(q[head], theta) @ rotate(k[head // group], theta).T / math.sqrt(dim)
        outputs.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[head // group])
    return linear(state, "self_attn.o_proj", torch.cat(outputs, dim=-1))


def ffn(state: dict[str, Tensor], x: Tensor) -> Tensor:
    gate = linear(state, "mlp.gate_proj", x)
    return linear(state, "mlp.down_proj", gate * torch.sigmoid(gate) * linear(state, "mlp.up_proj", x))


def logits(state: dict[str, Tensor], config: Any, tokens: Tensor) -> Tensor:
    """[seq] token ids -> [seq, vocab]; `config` is the child's, with default rotary embedding."""
    state = {name: tensor.double() for name, tensor in state.items()}
    x = state["model.embed_tokens.weight"][tokens]
    for i, block in enumerate(config.block_configs):
        prefix = f"model.layers.{i}."
        layer = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
        own = block["attention"]
        if not own.get("no_op"):
            normed = rms_norm(x, layer["input_layernorm.weight"], config.rms_norm_eps)
            if own.get("replace_with_linear"):
                x = x + linear(layer, "self_attn.linear_attn", normed)
            else:
                group = own.get("n_heads_in_group")
                kv_heads = config.num_attention_heads // group if group else config.num_key_value_heads
                x = x + attention(layer, config, kv_heads, normed)
        own = block["ffn"]
        if not own.get("no_op"):
            normed = rms_norm(x, layer["post_attention_layernorm.weight"], config.rms_norm_eps)
            x = x + (linear(layer, "mlp.linear_mlp", normed) if own.get("replace_with_linear") else ffn(layer, normed))
    x = rms_norm(x, state["model.norm.weight"], config.rms_norm_eps)
    head = state["model.embed_tokens.weight"] if config.tie_word_embeddings else state["lm_head.weight"]
    return x @ head.T
