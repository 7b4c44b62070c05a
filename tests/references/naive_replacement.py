# SPDX-License-Identifier: Apache-2.0
"""Replacing subblocks by hand inside transformers' own model, and scoring each by a run of the whole model."""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class Nothing(nn.Module):
    """Adds zero to the residual stream."""

    def __init__(self, attention: bool):
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor | tuple[Tensor, None]:
        zero = torch.zeros_like(hidden_states)
        return (zero, None) if self.attention else zero


class OneMatrix(nn.Module):
    """Multiplies each token with one matrix."""

    def __init__(self, attention: bool, weight: Tensor):
        super().__init__()
        self.attention, self.weight = attention, nn.Parameter(weight)

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor | tuple[Tensor, None]:
        output = hidden_states @ self.weight.T
        return (output, None) if self.attention else output


def replacement(model: PreTrainedModel, layer: int, attention: bool, tensors: dict[str, Tensor]) -> nn.Module:
    """The module that these tensors of a layer describe; no tensors: a no-op."""
    if not tensors:
        return Nothing(attention)
    tensors = {name.split(".", 1)[1]: tensor.float() for name, tensor in tensors.items()}
    for name in ("linear_attn.weight", "linear_mlp.weight"):
        if name in tensors:
            return OneMatrix(attention, tensors[name])
    config = copy.deepcopy(model.config)
    if attention:
        head_dim = tensors["q_proj.weight"].shape[0] // config.num_attention_heads
        config.num_key_value_heads = tensors["k_proj.weight"].shape[0] // head_dim
    else:
        config.intermediate_size = tensors["down_proj.weight"].shape[1]
    resized = type(model)(config).model.layers[layer]
    module = resized.self_attn if attention else resized.mlp
    module.load_state_dict(tensors)
    return module


def replaced(model: PreTrainedModel, changes: dict[tuple[int, str], dict[str, Tensor]]) -> PreTrainedModel:
    """A copy of a model with some subblocks replaced; `changes` maps (layer, "attention" or "ffn") to tensors."""
    changed = copy.deepcopy(model)
    for (layer, subblock), tensors in changes.items():
        attention = subblock == "attention"
        module = replacement(model, layer, attention, tensors).eval()
        setattr(changed.model.layers[layer], "self_attn" if attention else "mlp", module)
    return changed


@torch.no_grad()
def scores(parent: PreTrainedModel, child: PreTrainedModel, tokens: Tensor) -> dict[str, float]:
    """What the whole model loses, in float64 from the two models' logits; token by token."""
    kl, agrees, loss, parent_loss = [], [], [], []
    for sequence in tokens:
        p = parent(sequence[None], use_cache=False).logits[0].double().log_softmax(-1)
        q = child(sequence[None], use_cache=False).logits[0].double().log_softmax(-1)
        for t in range(len(sequence)):
            kl.append(float((p[t].exp() * (p[t] - q[t])).sum()))
            agrees.append(float(p[t].argmax() == q[t].argmax()))
            if t + 1 < len(sequence):
                loss.append(-float(q[t, sequence[t + 1]]))
                parent_loss.append(-float(p[t, sequence[t + 1]]))
    mean = sum(kl) / len(kl)
    variance = sum((x - mean) ** 2 for x in kl) / len(kl)
    return {
        "kl": mean,
        "stderr": (variance / len(kl)) ** 0.5,
        "lm_loss_increase": sum(loss) / len(loss) - sum(parent_loss) / len(parent_loss),
        "top1_agreement": sum(agrees) / len(agrees),
    }
