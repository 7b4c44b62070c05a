# SPDX-License-Identifier: Apache-2.0
"""Exact replacement scores: how much the whole model loses when one subblock is replaced (Puzzle, section 4.2).

One sweep of the depth: the model's hidden states and those of every variant introduced so far are carried along; at
each layer all go through the model's layer, and the layer's own variants start from the model's state. Each layer is
loaded once and no prefix is computed twice, yet the figures are those of the naive loop over whole models.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import TypeVar

import pandas as pd
import torch
from torch import Tensor

from puzzle.architecture import PARENT, Architecture, SubblockVariant
from puzzle.depth import Depth
from puzzle.evaluate import ParentLogits, TokenSums, compare_logits
from puzzle.run import Progress
from puzzle.scoring.blocks import Blocks, after

HEAD_TOKENS = 256  # logits exist for this many tokens at a time
Key = TypeVar("Key", bound=Hashable)


@torch.no_grad()
def sweep(
    blocks: Blocks, variants: list[SubblockVariant], tokens: Tensor, batch: int, progress: Progress
) -> pd.DataFrame:
    """Score variants one by one against the parent, in float32.

    Args:
        blocks: the parent and the variants' weights.
        variants: those to score; the parent's own subblocks score 0 and are not run.
        tokens: [sequences, seq].
        batch: sequences at a time.
        progress: called after each layer.

    Returns:
        One row a variant: layer, subblock, variant, kl (nats per token), lm_loss_increase (nats per token),
        top1_agreement, tokens, stderr (of kl over tokens), method.
    """
    changed = [v for v in variants if v.name != PARENT]
    parent, finals = carry(
        blocks, Architecture.parent(blocks.depth.checkpoint.shape.num_layers), changed, tokens, batch, progress
    )
    rows = [_parent_row(v, tokens.numel()) for v in variants if v.name == PARENT]
    rows += [_row(v, sums) for v, sums in judge(blocks.depth, parent, finals, tokens, progress).items()]
    return pd.DataFrame(rows).sort_values(["layer", "subblock", "variant"], ignore_index=True)


@torch.no_grad()
def carry(
    blocks: Blocks,
    architecture: Architecture,
    variants: list[SubblockVariant],
    tokens: Tensor,
    batch: int,
    progress: Progress,
) -> tuple[Tensor, dict[SubblockVariant, Tensor]]:
    """The states [sequences, seq, hidden] after the last layer: of an architecture, and of it with one change each."""
    by_layer = defaultdict(list)
    for variant in variants:
        by_layer[variant.layer].append(variant)
    seq, depth = tokens.shape[1], blocks.depth
    states, carried = depth.embed(tokens), {}
    layers = depth.checkpoint.shape.num_layers
    for i, layer in enumerate(depth.layers()):
        progress("replacement scores", i, layers)
        attention, ffn = blocks.halves(architecture, i, layer, seq)
        for variant in carried:
            carried[variant] = after(ffn, after(attention, carried[variant], batch), batch)
        attended = after(attention, states, batch)
        for variant in by_layer[i]:
            before = states if variant.subblock == "attention" else attended
            changed = after(blocks.half(variant, layer, seq), before, batch)
            carried[variant] = after(ffn, changed, batch) if variant.subblock == "attention" else changed
        states = after(ffn, attended, batch)
    progress("replacement scores", layers, layers)
    return states, carried


@torch.no_grad()
def judge(
    depth: Depth, parent: Tensor, finals: Mapping[Key, Tensor], tokens: Tensor, progress: Progress
) -> dict[Key, TokenSums]:
    """Compare states after the last layer [sequences, seq, hidden] over the vocabulary, a few sequences at a time."""
    norm, head = depth.norm(), depth.head_weight()
    sums = {key: TokenSums() for key in finals}
    step = max(1, HEAD_TOKENS // tokens.shape[1])
    for start in range(0, len(tokens), step):
        progress("comparison", start, len(tokens))
        part = slice(start, start + step)
        reference = ParentLogits.of(norm(parent[part]) @ head.T, tokens[part].to(depth.device))
        for key, states in finals.items():
            sums[key].add(compare_logits(reference, norm(states[part]) @ head.T))
    progress("comparison", len(tokens), len(tokens))
    return sums


def _row(variant: SubblockVariant, sums: TokenSums) -> dict:
    return {
        "layer": variant.layer,
        "subblock": variant.subblock,
        "variant": variant.name,
        "kl": sums.kl,
        "lm_loss_increase": sums.lm_loss - sums.parent_lm_loss,
        "top1_agreement": sums.top1_agreement,
        "tokens": sums.tokens,
        "stderr": sums.kl_stderr,
        "method": "exact",
    }


def _parent_row(variant: SubblockVariant, tokens: int) -> dict:
    exact = {"kl": 0.0, "lm_loss_increase": 0.0, "top1_agreement": 1.0, "tokens": tokens, "stderr": 0.0}
    return {"layer": variant.layer, "subblock": variant.subblock, "variant": PARENT, **exact, "method": "exact"}
