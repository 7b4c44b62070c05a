# SPDX-License-Identifier: Apache-2.0
"""Gradients at subblocks' outputs inside a whole transformers Llama, by hooks and autograd."""

import torch
from references.naive_replacement import replaced
from torch import Tensor, nn
from transformers import PreTrainedModel

Changes = dict[tuple[int, str], dict[str, Tensor]]


def products(
    parent: PreTrainedModel,
    model: PreTrainedModel,
    tokens: Tensor,
    labels: Tensor,
    layer: int,
    subblock: str,
    tensors: dict[str, Tensor],
) -> Tensor:
    """Gradient times change at one subblock of a model, [1 + samples, sequences, seq].

    Args:
        parent: the teacher.
        model: the child at hand.
        tokens: [sequences, seq].
        labels: [samples, sequences, seq].
        layer: of the subblock.
        subblock: "attention" or "ffn".
        tensors: of the module that takes its place; empty for a no-op.
    """
    attention = subblock == "attention"
    changed = replaced(model, {(layer, subblock): tensors})
    place, other = (_module(m.model.layers[layer], attention) for m in (model, changed))
    seen: dict[str, Tensor] = {}

    def hook(module: nn.Module, args: tuple, kwargs: dict, output: Tensor | tuple) -> Tensor | tuple:
        own = output[0] if attention else output
        own = own if own.requires_grad else own.requires_grad_()  # a no-op's zeros
        seen["own"] = own
        with torch.no_grad():
            new = other(*args, **kwargs)
            seen["change"] = (new[0] if attention else new) - own
        return (own, None) if attention else own

    handle = place.register_forward_hook(hook, with_kwargs=True)
    inputs = model.get_input_embeddings()(tokens).detach().requires_grad_()
    log_q = model(inputs_embeds=inputs, use_cache=False).logits.log_softmax(-1)
    handle.remove()
    with torch.no_grad():
        log_p = parent(tokens, use_cache=False).logits.log_softmax(-1)
    totals = [(log_p.exp() * (log_p - log_q)).sum()]
    totals += [log_q.gather(-1, drawn[..., None]).sum() for drawn in labels]
    gradients = [torch.autograd.grad(t, seen["own"], retain_graph=True)[0] for t in totals]
    return torch.stack([(g * seen["change"]).sum(-1) for g in gradients])


def _module(layer: nn.Module, attention: bool) -> nn.Module:
    return layer.self_attn if attention else layer.mlp
