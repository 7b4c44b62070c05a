# SPDX-License-Identifier: Apache-2.0
"""The modules of any architecture over a parent and its library, on the residual stream."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from puzzle.architecture import PARENT, SUBBLOCKS, Architecture, Subblock, SubblockVariant
from puzzle.block_library import BlockLibrary
from puzzle.depth import Depth, apply
from puzzle.modeling import DeciLMDecoderLayer
from puzzle.variants import subblock_config


@dataclass(frozen=True)
class Half:
    """One subblock with its norm."""

    subblock: Subblock
    norm: nn.Module
    module: nn.Module | None
    context: dict[str, Any]

    def __call__(self, states: Tensor) -> Tensor:
        """What it adds to the states [sequences, seq, hidden]."""
        return apply(self.module, self.subblock, self.norm(states), self.context)


class Blocks:
    """A parent and its library, read a layer at a time, in float32."""

    def __init__(self, depth: Depth, library: BlockLibrary):
        self.depth, self.library = depth, library

    def half(self, variant: SubblockVariant, layer: DeciLMDecoderLayer, seq: int) -> Half:
        """A variant in place; `layer` is the parent's layer of its index."""
        attention, depth = variant.subblock == "attention", self.depth
        if variant.name == PARENT:
            module = layer.self_attn if attention else layer.mlp
        else:
            config = subblock_config(variant.name, variant.subblock, depth.checkpoint.shape)
            state = self.library.load(variant)
            module = depth.checkpoint.subblock(variant.subblock, config, state, depth.device, depth.dtype)
        norm = layer.input_layernorm if attention else layer.post_attention_layernorm
        return Half(variant.subblock, norm, module, depth.context(seq))

    def halves(self, architecture: Architecture, index: int, layer: DeciLMDecoderLayer, seq: int) -> list[Half]:
        """Both subblocks of one layer of an architecture, attention first."""
        return [self.half(SubblockVariant(index, s, architecture.name(index, s)), layer, seq) for s in SUBBLOCKS]


def after(half: Half, states: Tensor, batch: int) -> Tensor:
    """The states [sequences, seq, hidden] after a subblock, computed `batch` sequences at a time."""
    return torch.cat([part + half(part) for part in states.split(batch)])
