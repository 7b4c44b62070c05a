# SPDX-License-Identifier: Apache-2.0
"""A subblock left out."""

from puzzle.architecture import AttentionConfig, FFNConfig, ModelShape, Subblock, SubblockConfig
from puzzle.variants.base import RUNTIMES, VariantKind


class NoOp(VariantKind):
    """`no_op`, for both subblocks: nothing is added to the residual stream."""

    subblocks = ("attention", "ffn")
    runtimes = RUNTIMES
    source = "Puzzle (arXiv 2411.19146), section 2"

    def expand(self, text: str, shape: ModelShape, multiple_of: int) -> str | None:
        return text if text == "no_op" else None

    def config(self, name: str, subblock: Subblock) -> SubblockConfig | None:
        if name != "no_op":
            return None
        return AttentionConfig(no_op=True) if subblock == "attention" else FFNConfig(no_op=True)
