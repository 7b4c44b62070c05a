# SPDX-License-Identifier: Apache-2.0
"""The losses of healing (2411.19146, section 4.3): KL(parent || child), cosine distance of hidden states, next token.

Logits of all tokens never exist at once: the head is applied to chunks of tokens, and each chunk is computed again in
the backward pass. Softmax and reductions are in float32 at least, whatever the arithmetic of the matrix products.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from puzzle.config import HealingConfig

CHUNK = 512  # tokens; one chunk of float32 logits over 128k tokens of vocabulary is 256 MiB
IGNORED = -100  # a target that does not count, as in torch's and transformers' cross entropy


def chunked_kl(
    child_hidden: Tensor,
    child_head: Tensor,
    parent_hidden: Tensor,
    parent_head: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> Tensor:
    """Mean token KL(parent || child) over the full vocabulary, in nats.

    Both distributions are softened by `temperature`, and the result is multiplied by its square, so that gradients keep
    their size whatever the temperature (Hinton et al., 1503.02531, section 2).

    Args:
        child_hidden: what the child's head gets, `[tokens, hidden]`; gradients flow here and into `child_head`.
        child_head: `[vocab, hidden]`.
        parent_hidden: `[tokens, parent hidden]`, constant.
        parent_head: `[vocab, parent hidden]`, constant.
        mask: `[tokens]`, true for tokens that count; default all.
        temperature: above zero.
        chunk: tokens whose logits exist at once.
    """
    return head_losses(child_hidden, child_head, parent_hidden, parent_head, None, mask, temperature, chunk)[0]


def head_losses(
    child_hidden: Tensor,
    child_head: Tensor,
    parent_hidden: Tensor,
    parent_head: Tensor,
    targets: Tensor | None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The losses that need logits, from the same chunks: `chunked_kl` and the mean next-token loss, both in nats.

    Args:
        child_hidden: as in `chunked_kl`, like the other arguments not named here.
        child_head: see there.
        parent_hidden: see there.
        parent_head: see there.
        targets: the tokens to predict, `[tokens]`, with `IGNORED` where there is none; None: the loss is zero.
        mask: see there; masked tokens count for neither loss.
        temperature: of the KL alone.
        chunk: see there.
    """
    if mask is not None:
        child_hidden, parent_hidden = child_hidden[mask], parent_hidden[mask]
        targets = None if targets is None else targets[mask]
    tokens = len(child_hidden)
    children, parents = child_hidden.split(chunk), parent_hidden.split(chunk)
    goals = [None] * len(children) if targets is None else targets.split(chunk)
    sums = [
        checkpoint(_chunk, child, child_head, parent, parent_head, goal, temperature, use_reentrant=False)
        for child, parent, goal in zip(children, parents, goals, strict=True)
    ]
    kl, lm = torch.stack(sums).sum(0).unbind()
    return kl / tokens, lm if targets is None else lm / (targets != IGNORED).sum().clamp(min=1)


def _chunk(
    child_hidden: Tensor,
    child_head: Tensor,
    parent_hidden: Tensor,
    parent_head: Tensor,
    targets: Tensor | None,
    temperature: float,
) -> Tensor:
    """Sums over one chunk: `[KL * temperature^2, next-token loss]`."""
    device = child_hidden.device.type
    # Without its cache, autocast casts the head anew in each chunk, and the chunks' gradients add up in float32.
    with torch.autocast(device, enabled=torch.is_autocast_enabled(device), cache_enabled=False):
        child_logits = at_least_float32(functional.linear(child_hidden, child_head))
        with torch.no_grad():
            parent_logits = at_least_float32(functional.linear(parent_hidden, parent_head))
    child_log, parent_log = (_softened(x, temperature).log_softmax(-1) for x in (child_logits, parent_logits))
    kl = functional.kl_div(child_log, parent_log, reduction="sum", log_target=True) * temperature**2
    if targets is None:
        return torch.stack([kl, torch.zeros_like(kl)])
    return torch.stack([kl, functional.cross_entropy(child_logits, targets, ignore_index=IGNORED, reduction="sum")])


def _softened(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits / temperature  # a copy of the logits saved


def hidden_cosine(
    child_states: Sequence[Tensor], parent_states: Sequence[Tensor], mask: Tensor | None = None
) -> Tensor:
    """Mean over layers and tokens of `1 - cos(child, parent)`.

    The paper sums over layers; the mean makes one weight mean the same at every depth.

    Args:
        child_states: one `[batch, seq, hidden]` a layer.
        parent_states: the parent's of the same layers, constant.
        mask: `[batch, seq]`, true for tokens that count; default all.
    """
    distances = []
    for child, parent in zip(child_states, parent_states, strict=True):
        distance = 1 - functional.cosine_similarity(at_least_float32(child), at_least_float32(parent), dim=-1)
        distances.append((distance if mask is None else distance[mask]).mean())
    return torch.stack(distances).mean()


def gkd_loss(
    child_states: Sequence[Tensor],
    child_head: Tensor,
    parent_states: Sequence[Tensor],
    parent_head: Tensor,
    input_ids: Tensor,
    config: HealingConfig,
    *,
    layers: Sequence[int] | None = None,
    mask: Tensor | None = None,
) -> dict[str, Tensor]:
    """The weighted sum under `loss`, and its terms `kl`, `cosine` and `lm`, without those of weight zero.

    Args:
        child_states: one `[batch, seq, hidden]` a layer; the last is what the head gets.
        child_head: `[vocab, hidden]`.
        parent_states: the parent's, constant.
        parent_head: `[vocab, hidden]`, constant.
        input_ids: `[batch, seq]`.
        config: weights and temperature.
        layers: the layers whose hidden states are compared; default all.
        mask: `[batch, seq]`, true for tokens that count; default all.
    """
    terms: dict[str, Tensor] = {}
    if config.kl_weight or config.lm_weight:
        kl, lm = head_losses(
            child_states[-1].flatten(0, 1),
            child_head,
            parent_states[-1].flatten(0, 1),
            parent_head,
            next_tokens(input_ids, mask).flatten() if config.lm_weight else None,
            None if mask is None else mask.flatten(),
            config.temperature,
        )
        terms |= {"kl": kl, "lm": lm}
    if config.cosine_weight:
        chosen = range(len(child_states)) if layers is None else layers
        terms["cosine"] = hidden_cosine([child_states[i] for i in chosen], [parent_states[i] for i in chosen], mask)
    weights = {"kl": config.kl_weight, "cosine": config.cosine_weight, "lm": config.lm_weight}
    terms = {name: term for name, term in terms.items() if weights[name]}
    return {"loss": torch.stack([weights[name] * term for name, term in terms.items()]).sum(), **terms}


def next_tokens(input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """What each position has to predict, `[batch, seq]`: `IGNORED` at the end and where the next token is masked."""
    targets = input_ids if mask is None else input_ids.masked_fill(~mask, IGNORED)
    return functional.pad(targets[:, 1:], (0, 1), value=IGNORED)


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
