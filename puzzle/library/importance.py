# SPDX-License-Identifier: Apache-2.0
"""Which FFN channels and which KV heads matter: one pass of the parent over the calibration tokens, all layers."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from puzzle.devices import autocast
from puzzle.run import Progress

Importance = dict[str, Tensor]  # "3.ffn" -> [channels], "3.attention" -> [KV heads]; float64 means over tokens


def measure(
    model: LlamaForCausalLM,
    tokens: Tensor,
    method: Literal["fisher", "contribution"],
    *,
    generator: torch.Generator,
    compute_dtype: str,
    batch: int,
    progress: Progress,
) -> Importance:
    """Rank channels and KV heads.

    `contribution` is the paper's (appendix A): the mean over tokens of the norm that a channel, or a KV head's group of
    query heads, adds to the subblock's output. `fisher` is ours: the mean squared first-order change of the
    log-likelihood when it is taken away, with labels sampled from the parent itself, so no text label is trusted.

    Args:
        model: the parent, whole, in float32.
        tokens: [sequences, seq].
        method: see above.
        generator: draws the labels.
        compute_dtype: arithmetic of the passes; sums within a pass are float32, over passes float64.
        batch: sequences per pass.
        progress: called after each pass.
    """
    sums: Importance = {}
    collect = _fisher if method == "fisher" else _contribution
    heads, handles = model.config.num_key_value_heads, []
    for i, layer in enumerate(model.model.layers):
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(collect(sums, f"{i}.attention", heads)))
        handles.append(layer.mlp.down_proj.register_forward_pre_hook(collect(sums, f"{i}.ffn", None)))
    model.requires_grad_(False)
    parts = tokens.split(batch)
    for done, part in enumerate(parts):
        progress("importance", done, len(parts))
        _pass(model, part.to(model.device), method, generator, compute_dtype)
    progress("importance", len(parts), len(parts))
    for handle in handles:
        handle.remove()
    return {key: value / tokens.numel() for key, value in sums.items()}


def _pass(model: LlamaForCausalLM, tokens: Tensor, method: str, generator: torch.Generator, compute_dtype: str) -> None:
    fisher = method == "fisher"
    embedded = model.get_input_embeddings()(tokens).requires_grad_(fisher)
    with autocast(model.device.type, compute_dtype), torch.set_grad_enabled(fisher):
        hidden = model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    if not fisher:
        return
    # the head is the widest matrix of the model: back-propagate it in chunks of tokens, then the layers once
    flat = hidden.detach().flatten(0, 1)
    gradient = torch.empty_like(flat)
    for start in range(0, len(flat), 256):
        leaf = flat[start : start + 256].requires_grad_()
        with autocast(model.device.type, compute_dtype), torch.enable_grad():
            log_probs = model.lm_head(leaf).float().log_softmax(-1)
        labels = _sample(log_probs.detach(), generator)
        (gradient[start : start + 256],) = torch.autograd.grad(log_probs.gather(1, labels).sum(), leaf)
    hidden.backward(gradient.view_as(hidden))


def _sample(log_probs: Tensor, generator: torch.Generator) -> Tensor:
    """One label per token from [tokens, vocab], by inverting the cumulative distribution: [tokens, 1]."""
    cumulative = log_probs.exp().cumsum(-1)
    uniform = torch.rand(len(log_probs), 1, generator=generator).to(log_probs.device)
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:]).clamp_max(log_probs.shape[-1] - 1)


Hook = Callable[[torch.nn.Module, tuple[Tensor, ...]], None]


def _add(sums: Importance, key: str, value: Tensor) -> None:
    value = value.cpu().double()
    sums[key] = sums[key] + value if key in sums else value


def _fisher(sums: Importance, key: str, heads: int | None) -> Hook:
    """Add up (x . dL/dx)^2 of the last matrix's input x, per channel or per KV head's group."""

    def hook(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0]

        def backward(gradient: Tensor) -> None:
            change = x.detach().float() * gradient.float()  # [batch, seq, features]
            if heads is not None:
                change = change.unflatten(-1, (heads, -1)).sum(-1)
            _add(sums, key, change.square().sum((0, 1)))

        x.register_hook(backward)

    return hook


def _contribution(sums: Importance, key: str, heads: int | None) -> Hook:
    """Add up the norm of what each channel, or each KV head's group, adds to the output."""

    def hook(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        x, weight = args[0].float(), module.weight.float()
        if heads is None:
            _add(sums, key, x.abs().sum((0, 1)) * weight.norm(dim=0))
            return
        parts = zip(x.chunk(heads, -1), weight.chunk(heads, 1), strict=True)
        _add(sums, key, torch.stack([(part @ w.T).norm(dim=-1).sum() for part, w in parts]))

    return hook
