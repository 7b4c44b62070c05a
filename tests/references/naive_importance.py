# SPDX-License-Identifier: Apache-2.0
"""Importance of FFN channels and KV heads, token by token and one at a time."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def last_matrices(model: PreTrainedModel) -> dict[str, tuple[nn.Linear, list[range]]]:
    """Per subblock: the matrix that writes its output, and the input features of each channel or KV head's group."""
    found = {}
    for i, layer in enumerate(model.model.layers):
        heads = model.config.num_key_value_heads
        group = layer.self_attn.o_proj.in_features // heads  # the query heads that read one KV head
        groups = [range(h * group, (h + 1) * group) for h in range(heads)]
        found[f"{i}.attention"] = (layer.self_attn.o_proj, groups)
        found[f"{i}.ffn"] = (layer.mlp.down_proj, [range(c, c + 1) for c in range(layer.mlp.down_proj.in_features)])
    return found


def _inputs(model: PreTrainedModel, sequence: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [seq, vocab] of one sequence, and what each last matrix reads, [1, seq, features]."""
    seen: dict[str, Tensor] = {}
    handles = []
    for key, (matrix, _) in last_matrices(model).items():
        handles.append(matrix.register_forward_pre_hook(lambda _, args, key=key: seen.update({key: args[0]})))
    logits = model(sequence[None], use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return logits, seen


def fisher(model: PreTrainedModel, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Mean over tokens of the squared first-order change of the log-likelihood of `labels` when a feature goes."""
    sums = {key: torch.zeros(len(groups), dtype=torch.float64) for key, (_, groups) in last_matrices(model).items()}
    for sequence, wanted in zip(tokens, labels, strict=True):
        logits, seen = _inputs(model, sequence)
        likelihood = sum(logits[t].log_softmax(-1)[label] for t, label in enumerate(wanted))
        gradients = dict(zip(seen, torch.autograd.grad(likelihood, list(seen.values())), strict=True))
        for key, (_, groups) in last_matrices(model).items():
            change = (seen[key] * gradients[key])[0].detach()
            for t in range(len(sequence)):
                for i, features in enumerate(groups):
                    sums[key][i] += change[t, features].sum() ** 2
    return {key: value / tokens.numel() for key, value in sums.items()}


@torch.no_grad()
def contribution(model: PreTrainedModel, tokens: Tensor) -> dict[str, Tensor]:
    """Mean over tokens of the norm by which the subblock's output moves when a feature is set to zero."""
    sums = {key: torch.zeros(len(groups), dtype=torch.float64) for key, (_, groups) in last_matrices(model).items()}
    for sequence in tokens:
        _, seen = _inputs(model, sequence)
        for key, (matrix, groups) in last_matrices(model).items():
            whole = matrix(seen[key])
            for i, features in enumerate(groups):
                without = seen[key].clone()
                without[..., features] = 0
                moved = whole - matrix(without)
                sums[key][i] += sum(moved[0, t].norm() for t in range(len(sequence)))
    return {key: value / tokens.numel() for key, value in sums.items()}
