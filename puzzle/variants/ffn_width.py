# SPDX-License-Identifier: Apache-2.0
"""An FFN with fewer channels."""

import re
from collections.abc import Mapping

from torch import Tensor

from puzzle.architecture import FFNConfig, ModelShape, Subblock, SubblockConfig
from puzzle.errors import ConfigError
from puzzle.variants.base import RUNTIMES, Moments, State, SubblockStats, VariantKind


class FFNWidth(VariantKind):
    """`ffn768`: 768 channels; `50%` in a search space: half of the parent's, rounded to `multiple_of`."""

    subblocks = ("ffn",)
    runtimes = RUNTIMES
    source = "Puzzle (arXiv 2411.19146), appendix A; the refit of the last matrix is ours"

    def expand(self, text: str, shape: ModelShape, multiple_of: int) -> str | None:
        parent = shape.intermediate_size
        if match := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", text):
            share = float(match[1]) / 100
            if not 0 < share <= 1:
                raise ConfigError(f"{text!r} is not a share between 0 and 100 %")
            rounded = max(1, round(parent * share / multiple_of)) * multiple_of
            width = parent if share == 1 else min(parent, rounded)
        elif match := re.fullmatch(r"ffn([0-9]+)", text):
            width = int(match[1])
        else:
            return None
        if not 0 < width <= parent:
            raise ConfigError(f"{text!r} asks for {width} FFN channels, the parent has {parent}")
        return "parent" if width == parent else f"ffn{width}"

    def config(self, name: str, subblock: Subblock) -> FFNConfig | None:
        match = re.fullmatch(r"ffn([0-9]+)", name)
        return FFNConfig(intermediate_size=int(match[1])) if match else None

    def starts(self, config: SubblockConfig, parent: Mapping[str, Tensor], stats: SubblockStats) -> list[State]:
        kept = self._channels(config, stats)
        rows = ("gate_proj.weight", "up_proj.weight", "gate_proj.bias", "up_proj.bias")
        state = {f"mlp.{n}": parent[f"mlp.{n}"][kept].clone() for n in rows if f"mlp.{n}" in parent}
        state["mlp.down_proj.weight"] = parent["mlp.down_proj.weight"][:, kept].clone()
        if "mlp.down_proj.bias" in parent:
            state["mlp.down_proj.bias"] = parent["mlp.down_proj.bias"].clone()
        return [state]

    def refit(self, config: SubblockConfig, start: State, stats: SubblockStats) -> tuple[str, Moments]:
        kept = self._channels(config, stats)
        inner = stats.inner
        return "mlp.down_proj.weight", Moments(inner.gram[kept][:, kept], inner.cross[:, kept])

    @staticmethod
    def _channels(config: SubblockConfig, stats: SubblockStats) -> Tensor:
        """The most important channels, in the parent's order."""
        assert isinstance(config, FFNConfig) and config.intermediate_size
        order = stats.importance.argsort(descending=True, stable=True)
        return order[: config.intermediate_size].sort().values
