# SPDX-License-Identifier: Apache-2.0
"""Attention with fewer KV heads."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from puzzle.architecture import AttentionConfig, ModelShape, Subblock, SubblockConfig
from puzzle.errors import ConfigError
from puzzle.variants.base import RUNTIMES, Moments, State, SubblockStats, VariantKind


class GroupedQuery(VariantKind):
    """`kv2`: two KV heads; `kv/4` in a search space: a quarter of the parent's, at least one."""

    subblocks = ("attention",)
    runtimes = RUNTIMES
    source = "Puzzle (arXiv 2411.19146), appendix A; mean-pooling: GQA (arXiv 2305.13245)"

    def expand(self, text: str, shape: ModelShape, multiple_of: int) -> str | None:
        match = re.fullmatch(r"kv(/?)([0-9]+)", text)
        if not match:
            return None
        parent, number = shape.num_kv_heads, int(match[2])
        if number == 0:
            raise ConfigError(f"{text!r} leaves no KV head; use no_op to drop attention")
        if match[1]:  # the largest count within the share that divides the parent's heads evenly
            number = next(n for n in range(max(1, parent // number), 0, -1) if parent % n == 0)
        if number > parent:
            raise ConfigError(f"{text!r} asks for {number} KV heads, the parent has {parent}")
        if parent % number:
            raise ConfigError(f"{text!r} does not divide the parent's {parent} KV heads evenly")
        return "parent" if number == parent else f"kv{number}"

    def config(self, name: str, subblock: Subblock) -> AttentionConfig | None:
        match = re.fullmatch(r"kv([0-9]+)", name)
        return AttentionConfig(num_kv_heads=int(match[1])) if match else None

    def starts(self, config: SubblockConfig, parent: Mapping[str, Tensor], stats: SubblockStats) -> list[State]:
        """Each group's mean head, and each group's most important head. Whole heads only: rotary pairs stay together.

        The i-th KV head of the child takes the place of `group` neighbouring heads of the parent, so the query heads
        that read it are the ones that read those.
        """
        assert isinstance(config, AttentionConfig) and config.num_kv_heads
        kept, heads = config.num_kv_heads, len(stats.importance)
        group = heads // kept
        best = stats.importance.view(kept, group).argmax(dim=1) + torch.arange(kept) * group
        pooled, chosen = dict(parent), dict(parent)
        for name in ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"):
            key = f"self_attn.{name}"
            if key in parent:
                by_head = parent[key].reshape(heads, -1, *parent[key].shape[1:])
                pooled[key] = by_head.unflatten(0, (kept, group)).float().mean(1).to(by_head.dtype).flatten(0, 1)
                chosen[key] = by_head[best].flatten(0, 1)
        return [pooled, chosen]

    def refit(self, config: SubblockConfig, start: State, stats: SubblockStats) -> tuple[str, Moments]:
        return "self_attn.o_proj.weight", stats.inner_of(config, start)
