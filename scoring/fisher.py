# SPDX-License-Identifier: Apache-2.0
"""Estimated scores of every single change of a model, from one gradient pass (ours; not in the paper).

To second order, the KL divergence from the parent changes by `g . d + (f . d)^2 / 2` when a subblock's output changes
by d: g is the gradient of the KL divergence at that output, zero where the model is the parent itself, and f the
gradient of the log-likelihood of labels drawn from the model (the mean of its outer product is the Fisher matrix, the
curvature of the KL divergence). One walk forwards and one backwards over the depth give g and f at every output; then
a variant costs one run of its own subblock.
"""

from collections import defaultdict

import pandas as pd
import torch
from torch import Tensor, nn

from puzzle.architecture import Architecture, Subblock, SubblockVariant
from puzzle.run import Progress
from puzzle.scoring.blocks import Blocks, Half, after

HEAD_TOKENS = 256  # logits exist for this many tokens at a time
WINDOW = 4  # tokens; of 1 to 256, the best rank correlation with exact scores on SmolLM2-135M
Products = dict[SubblockVariant, Tensor]  # [1 + samples, sequences, seq]: g . d, then f . d of each sample


@torch.no_grad()
def products(
    blocks: Blocks,
    architecture: Architecture,
    variants: list[SubblockVariant],
    tokens: Tensor,
    parent: Tensor,
    *,
    samples: int,
    generator: torch.Generator,
    batch: int,
    progress: Progress,
) -> Products:
    """The products of gradients and changes at each token.

    Args:
        blocks: the parent and its library.
        architecture: the model that is changed.
        variants: the changes, each alone; those the architecture has already come out as zero.
        tokens: [sequences, seq].
        parent: the parent's states after the last layer, [sequences, seq, hidden].
        samples: labels drawn per token.
        generator: draws them.
        batch: sequences at a time.
        progress: called after each layer.
    """
    by_layer = defaultdict(list)
    for variant in variants:
        by_layer[variant.layer].append(variant)
    seq, depth = tokens.shape[1], blocks.depth
    states = forwards(blocks, architecture, tokens, batch)
    gradients = _at_last_layer(blocks, parent, states.pop(), samples, generator)
    found: Products = {}
    layers = depth.checkpoint.shape.num_layers
    for done, index in enumerate(reversed(range(layers))):
        progress("gradient scores", done, layers)
        layer, before = depth.checkpoint.layer(index, depth.device, depth.dtype), states.pop()
        halves = blocks.halves(architecture, index, layer, seq)
        changed = [(v, blocks.half(v, layer, seq)) for v in by_layer[index]]
        parts = []
        for start in range(0, len(before), batch):
            part = slice(start, start + batch)
            parts.append(_through_layer(halves, changed, before[part], gradients[:, part]))
        found |= {v: torch.cat([p[v] for p in parts], 1) for v in by_layer[index]}
    progress("gradient scores", layers, layers)
    return found


def forwards(blocks: Blocks, architecture: Architecture, tokens: Tensor, batch: int) -> list[Tensor]:
    """The states [sequences, seq, hidden] before each layer, and after the last."""
    states = [blocks.depth.embed(tokens)]
    for index, layer in enumerate(blocks.depth.layers()):
        attention, ffn = blocks.halves(architecture, index, layer, tokens.shape[1])
        states.append(after(ffn, after(attention, states[-1], batch), batch))
    return states


def _at_last_layer(blocks: Blocks, parent: Tensor, final: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """The gradients at the output of the last layer, [1 + samples, sequences, seq, hidden]."""
    norm, head = blocks.depth.norm(), blocks.depth.head_weight()
    parts = []
    for reference, own in zip(*(s.flatten(0, 1).split(HEAD_TOKENS) for s in (parent, final)), strict=True):
        p, q = (((norm(states)) @ head.T).softmax(-1) for states in (reference, own))
        labels = torch.multinomial(q.cpu(), samples, replacement=True, generator=generator).T.to(q.device)
        expected = q @ head
        after_norm = torch.cat([(expected - p @ head)[None], head[labels] - expected])
        parts.append(_pull(norm, own, after_norm))
    return torch.cat(parts, 1).unflatten(1, final.shape[:2])


def _pull(function: nn.Module | Half, states: Tensor, gradients: Tensor) -> Tensor:
    """Gradients at a function's output, [gradients, *states], carried to its input."""
    leaf = states.detach().requires_grad_()
    with torch.enable_grad():
        output = function(leaf)
        return torch.stack([torch.autograd.grad(output, leaf, g, retain_graph=True)[0] for g in gradients])


def _through_layer(
    halves: list[Half], changed: list[tuple[SubblockVariant, Half]], before: Tensor, gradients: Tensor
) -> Products:
    """The products of one layer's variants; `gradients` are replaced by those before the layer.

    Args:
        halves: the layer as it is.
        changed: its variants.
        before: states before it, [sequences, seq, hidden].
        gradients: at its output, [1 + samples, sequences, seq, hidden].
    """
    attention, ffn = halves
    attended = attention(before)
    inputs: dict[Subblock, Tensor] = {"attention": before, "ffn": before + attended}
    outputs: dict[Subblock, Tensor] = {"attention": attended, "ffn": ffn(inputs["ffn"])}
    found: Products = {}
    for half in reversed(halves):
        for variant, other in changed:
            if variant.subblock == half.subblock:
                change = other(inputs[half.subblock]) - outputs[half.subblock]
                found[variant] = (gradients * change).sum(-1)
        if half.module is not None:
            gradients += _pull(half, inputs[half.subblock], gradients)
    return found


def estimate(found: Products) -> pd.DataFrame:
    """The change of the KL divergence, one row a variant: layer, subblock, variant, score and stderr (nats per token).

    What a change does at one token meets what it does at the next ones: f . d is added up over a few neighbours before
    it is squared (every window that a token lies in counts alike). Wider windows leave out less and are noisier.
    The standard error is over tokens.
    """
    rows = []
    for variant, product in found.items():
        padded = nn.functional.pad(product[1:], (WINDOW - 1, WINDOW - 1))
        squares = padded.unfold(-1, WINDOW, 1).sum(-1).square().mean(0) / WINDOW
        change = product[0].double()
        change += squares[:, : change.shape[1]] / 2
        change[:, -1] += squares[:, change.shape[1] :].sum(-1) / 2  # windows that end beyond the last token
        rows.append(
            {
                "layer": variant.layer,
                "subblock": variant.subblock,
                "variant": variant.name,
                "score": float(change.mean()),
                "stderr": float(change.std() / change.numel() ** 0.5),
            }
        )
    return pd.DataFrame(rows)
