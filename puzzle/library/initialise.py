# SPDX-License-Identifier: Apache-2.0
"""First weights of every variant of a layer: taken from the parent, then refitted in closed form."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from puzzle.architecture import Subblock, SubblockConfig
from puzzle.checkpoint import Checkpoint
from puzzle.depth import apply
from puzzle.modeling import DeciLMDecoderLayer
from puzzle.variants.base import Moments, State, SubblockStats, VariantKind, ridge

LAST = {"attention": "o_proj", "ffn": "down_proj"}  # the matrix that writes a subblock's output
TINY = 1e-30  # stands in for the norm of a parent's output that is zero throughout


@dataclass(frozen=True)
class SubblockIO:
    """A parent subblock's normed inputs and its outputs, [sequences, seq, hidden] each."""

    x: Tensor
    y: Tensor

    def error(self, output: Callable[[Tensor], Tensor], batch: int) -> float:
        """Normalised error of another output for the same inputs: 0 is perfect, 1 is as bad as zero."""
        with torch.no_grad():
            pairs = zip(self.x.split(batch), self.y.split(batch), strict=True)
            missed = sum(float((y - output(x).float()).square().sum(dtype=torch.float64)) for x, y in pairs)
        return missed / max(float(self.y.square().sum(dtype=torch.float64)), TINY)


def subblock_io(layer: DeciLMDecoderLayer, states: Tensor, context: dict[str, Any]) -> dict[Subblock, SubblockIO]:
    """Both subblocks' inputs and outputs in the parent, for hidden states [sequences, seq, hidden] before the layer."""
    x = layer.input_layernorm(states)
    y = apply(layer.self_attn, "attention", x, context)
    x2 = layer.post_attention_layernorm(states + y)
    return {"attention": SubblockIO(x, y), "ffn": SubblockIO(x2, apply(layer.mlp, "ffn", x2, context))}


@torch.no_grad()
def moments(features: Callable[[Tensor], Tensor], io: SubblockIO, offset: Tensor | None, batch: int) -> Moments:
    """Second moments of features and outputs. Products of a batch are float32, their sums over batches float64.

    Args:
        features: maps inputs [sequences, seq, hidden] to features [sequences, seq, n].
        io: of the parent's subblock.
        offset: an output bias that the features need not explain, [hidden].
        batch: sequences at a time.
    """
    gram = cross = 0.0
    for x, y in zip(io.x.split(batch), io.y.split(batch), strict=True):
        f, target = features(x).flatten(0, 1), (y if offset is None else y - offset).flatten(0, 1)
        gram, cross = gram + (f.T @ f).double(), cross + (target.T @ f).double()
    return Moments(gram, cross)


def last_input(module: torch.nn.Module, subblock: Subblock, x: Tensor, context: dict[str, Any]) -> Tensor:
    """The input of a subblock's last matrix, [batch, seq, features]."""
    seen: list[Tensor] = []
    last = getattr(module, LAST[subblock])
    handle = last.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    apply(module, subblock, x, context)
    handle.remove()
    return seen[0]


def gather(
    checkpoint: Checkpoint,
    layer: DeciLMDecoderLayer,
    subblock: Subblock,
    io: SubblockIO,
    importance: Tensor,
    context: dict[str, Any],
    batch: int,
) -> SubblockStats:
    """Statistics of one subblock of the parent over the calibration tokens."""
    parent = layer.self_attn if subblock == "attention" else layer.mlp

    def inner_of(config: SubblockConfig, state: State) -> Moments:
        module = checkpoint.subblock(subblock, config, state, str(io.x.device), io.x.dtype)
        assert module is not None
        return moments(
            lambda x: last_input(module, subblock, x, context), io, getattr(module, LAST[subblock]).bias, batch
        )

    return SubblockStats(
        inputs=moments(lambda x: x, io, None, batch),
        inner=moments(
            lambda x: last_input(parent, subblock, x, context), io, getattr(parent, LAST[subblock]).bias, batch
        ),
        importance=importance,
        inner_of=inner_of,
    )


@dataclass(frozen=True)
class Initialised:
    """A variant's first weights and their held-out errors."""

    state: State
    error_start: float
    error_closed_form: float


def initialise(
    kind: VariantKind,
    config: SubblockConfig,
    parent: Mapping[str, Tensor],
    stats: SubblockStats,
    error: Callable[[State], float],
    strengths: list[float],
) -> Initialised:
    """The best of all starts and ridge strengths by held-out error; a refit that does not help is not taken."""
    starts = [(error(state), state) for state in kind.starts(config, parent, stats)]
    best_start = min(starts, key=lambda pair: pair[0])
    best = best_start
    for _, start in starts:
        refit = kind.refit(config, start, stats)
        if refit is None:
            continue
        name, fitted = refit
        for strength in strengths:
            try:
                state = {**start, name: ridge(start[name], fitted, strength)}
            except torch.linalg.LinAlgError:  # fewer tokens than features, and too weak a ridge for the rounding
                continue
            best = min(best, (error(state), state), key=lambda pair: pair[0])
    return Initialised(best[1], best_start[0], best[0])
