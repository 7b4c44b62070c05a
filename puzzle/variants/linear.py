# SPDX-License-Identifier: Apache-2.0
"""A subblock replaced by one matrix on its normed input."""

from collections.abc import Mapping

import torch
from torch import Tensor

from puzzle.architecture import AttentionConfig, FFNConfig, ModelShape, Subblock, SubblockConfig
from puzzle.variants.base import Moments, State, SubblockStats, VariantKind


class Linear(VariantKind):
    """`linear`, for both subblocks."""

    subblocks = ("attention", "ffn")
    runtimes = ("transformers",)
    source = "Puzzle (arXiv 2411.19146), appendix A; the ridge regression is ours"

    def expand(self, text: str, shape: ModelShape, multiple_of: int) -> str | None:
        return text if text == "linear" else None

    def config(self, name: str, subblock: Subblock) -> SubblockConfig | None:
        if name != "linear":
            return None
        return AttentionConfig(linear=True) if subblock == "attention" else FFNConfig(linear=True)

    def starts(self, config: SubblockConfig, parent: Mapping[str, Tensor], stats: SubblockStats) -> list[State]:
        """The product of the parent's matrices (each token attends to itself alone, or the FFN has no gate), and zero.

        The product may be worse than nothing; from zero, a strongly damped ridge is as good as a no-op at least.
        """
        name, product = self._product(config, parent, stats)
        return [{name: product}, {name: torch.zeros_like(product)}]

    @staticmethod
    def _product(config: SubblockConfig, parent: Mapping[str, Tensor], stats: SubblockStats) -> tuple[str, Tensor]:
        if isinstance(config, FFNConfig):
            product = parent["mlp.down_proj.weight"].float() @ parent["mlp.up_proj.weight"].float()
            return "mlp.linear_mlp.weight", product.to(parent["mlp.up_proj.weight"].dtype)
        value, output = parent["self_attn.v_proj.weight"], parent["self_attn.o_proj.weight"]
        heads = len(stats.importance)
        by_head = value.reshape(heads, -1, value.shape[1])
        repeats = output.shape[1] // value.shape[0]  # query heads per KV head
        product = output.float() @ by_head.repeat_interleave(repeats, dim=0).flatten(0, 1).float()
        return "self_attn.linear_attn.weight", product.to(value.dtype)

    def refit(self, config: SubblockConfig, start: State, stats: SubblockStats) -> tuple[str, Moments]:
        return next(iter(start)), stats.inputs
