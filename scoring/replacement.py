# SPDX-License-Identifier: Apache-2.0
"""Exact replacement scores: how much the whole model loses when one subblock is replaced (Puzzle, section 4.2).

One sweep of the depth: the parent's hidden states and those of every variant introduced so far are carried along; at
each layer all go through the parent's layer, and the layer's own variants start from the parent's state. Each layer is
loaded once and no prefix is computed twice, yet the figures are those of the naive loop over whole models.
"""

from collections import defaultdict
from functools import partial

import pandas as pd
import torch
from torch import Tensor, nn

from puzzle.architecture import PARENT, Subblock, SubblockVariant
from puzzle.block_library import BlockLibrary
from puzzle.depth import Depth, apply
from puzzle.evaluate import ParentLogits, TokenSums, compare_logits
from puzzle.modeling import DeciLMDecoderLayer
from puzzle.run import Progress
from puzzle.variants import subblock_config

HEAD_TOKENS = 256  # logits exist for this many tokens at a time


@torch.no_grad()
def sweep(
    depth: Depth, library: BlockLibrary, variants: list[SubblockVariant], tokens: Tensor, batch: int, progress: Progress
) -> pd.DataFrame:
    """Score variants one by one against the parent, in float32.

    Args:
        depth: the parent.
        library: the variants' weights.
        variants: those to score; the parent's own subblocks score 0 and are not run.
        tokens: [sequences, seq].
        batch: sequences at a time.
        progress: called after each layer.

    Returns:
        One row a variant: layer, subblock, variant, kl (nats per token), lm_loss_increase (nats per token),
        top1_agreement, tokens, stderr (of kl over tokens), method.
    """
    by_layer = defaultdict(list)
    for variant in variants:
        if variant.name != PARENT:
            by_layer[variant.layer].append(variant)
    context = depth.context(tokens.shape[1])
    parent, carried = depth.embed(tokens), {}
    layers = depth.checkpoint.shape.num_layers
    for i, layer in enumerate(depth.layers()):
        progress("replacement scores", i, layers)
        after = partial(_after, layer, context, batch)
        for variant, states in carried.items():
            carried[variant] = after("ffn", layer.mlp, after("attention", layer.self_attn, states))
        attended = after("attention", layer.self_attn, parent)
        for variant in by_layer[i]:
            module = _module(depth, library, variant)
            if variant.subblock == "attention":
                carried[variant] = after("ffn", layer.mlp, after("attention", module, parent))
            else:
                carried[variant] = after("ffn", module, attended)
        parent = after("ffn", layer.mlp, attended)
    progress("replacement scores", layers, layers)
    rows = [_parent_row(v, tokens.numel()) for v in variants if v.name == PARENT]
    return pd.DataFrame(rows + _judge(depth, parent, carried, tokens, progress)).sort_values(
        ["layer", "subblock", "variant"], ignore_index=True
    )


def _after(
    layer: DeciLMDecoderLayer, context: dict, batch: int, subblock: Subblock, module: nn.Module | None, states: Tensor
) -> Tensor:
    """The states [sequences, seq, hidden] after a subblock of this layer, were it this module."""
    norm = layer.input_layernorm if subblock == "attention" else layer.post_attention_layernorm
    return torch.cat([part + apply(module, subblock, norm(part), context) for part in states.split(batch)])


def _module(depth: Depth, library: BlockLibrary, variant: SubblockVariant) -> nn.Module | None:
    config = subblock_config(variant.name, variant.subblock, depth.checkpoint.shape)
    return depth.checkpoint.subblock(variant.subblock, config, library.load(variant), depth.device, depth.dtype)


def _judge(
    depth: Depth, parent: Tensor, carried: dict[SubblockVariant, Tensor], tokens: Tensor, progress: Progress
) -> list[dict]:
    """Compare final hidden states [sequences, seq, hidden] over the vocabulary, a few sequences at a time."""
    norm, head = depth.norm(), depth.head_weight()
    sums: dict[SubblockVariant, TokenSums] = {v: TokenSums() for v in carried}
    step = max(1, HEAD_TOKENS // tokens.shape[1])
    for start in range(0, len(tokens), step):
        progress("comparison", start, len(tokens))
        part = slice(start, start + step)
        reference = ParentLogits.of(norm(parent[part]) @ head.T, tokens[part].to(depth.device))
        for variant, states in carried.items():
            sums[variant].add(compare_logits(reference, norm(states[part]) @ head.T))
    progress("comparison", len(tokens), len(tokens))
    return [
        {
            "layer": v.layer,
            "subblock": v.subblock,
            "variant": v.name,
            "kl": s.kl,
            "lm_loss_increase": s.lm_loss - s.parent_lm_loss,
            "top1_agreement": s.top1_agreement,
            "tokens": s.tokens,
            "stderr": s.kl_stderr,
            "method": "exact",
        }
        for v, s in sums.items()
    ]


def _parent_row(variant: SubblockVariant, tokens: int) -> dict:
    exact = {"kl": 0.0, "lm_loss_increase": 0.0, "top1_agreement": 1.0, "tokens": tokens, "stderr": 0.0}
    return {"layer": variant.layer, "subblock": variant.subblock, "variant": PARENT, **exact, "method": "exact"}
