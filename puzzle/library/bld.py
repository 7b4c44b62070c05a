# SPDX-License-Identifier: Apache-2.0
"""Blockwise local distillation (Puzzle, arXiv 2411.19146, section 3): variants learn to mimic their parent subblock.

All variants of a layer train on one stream of the parent's activations; the parent's subblocks run once a batch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from puzzle.architecture import SubblockVariant
from puzzle.config import BLDConfig
from puzzle.depth import apply
from puzzle.devices import autocast
from puzzle.library.initialise import SubblockIO, subblock_io
from puzzle.modeling import DeciLMDecoderLayer

EVALUATIONS = 2  # of the held-out error, evenly spread; the best state is kept


def cosine_with_warmup(warmup: int, steps: int) -> Any:
    """The schedule's factor of the peak learning rate at a step."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return factor


def local_loss(output: Tensor, target: Tensor) -> Tensor:
    """||y_parent - y_child||^2 / ||y_parent||^2 over a batch [sequences, seq, hidden], in float32."""
    return (output.float() - target.float()).square().sum() / target.float().square().sum()


class Trainee:
    """One variant in training: its module, optimiser, and best state so far by held-out error."""

    def __init__(self, variant: SubblockVariant, module: nn.Module, error: float, config: BLDConfig, steps: int):
        self.variant, self.module = variant, module.train().requires_grad_(True)
        self.optimiser = AdamW(module.parameters(), config.learning_rate, weight_decay=config.weight_decay)
        schedule = cosine_with_warmup(max(1, round(config.warmup * steps)), steps)
        self.schedule = LambdaLR(self.optimiser, schedule)
        self.error, self.best = error, self._copy()
        self.stopped = False

    def _copy(self) -> dict[str, Tensor]:
        return {k: v.detach().clone() for k, v in self.module.state_dict().items()}

    def step(self, io: SubblockIO, context: dict[str, Any], device: str, dtype: str) -> None:
        """One optimiser step; a loss that is not finite stops this variant, its best state stays."""
        if self.stopped:
            return
        with autocast(device, dtype):
            output = apply(self.module, self.variant.subblock, io.x, context)
        loss = local_loss(output, io.y)
        if not torch.isfinite(loss):
            self.stopped = True
            return
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.optimiser.step()
        self.schedule.step()

    def judge(self, held_out: SubblockIO, context: dict[str, Any], batch: int) -> None:
        """Keep the present state if it is the best yet on the held-out tokens (float32 arithmetic)."""
        error = held_out.error(lambda x: apply(self.module, self.variant.subblock, x, context), batch)
        if error < self.error:
            self.error, self.best = error, self._copy()


@dataclass(frozen=True)
class Stream:
    """The parent's hidden states before a layer, read in order, a batch per step."""

    states: Tensor  # [sequences, seq, hidden]
    batch: int  # sequences per step

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.states.split(self.batch) if len(self.states) else ())

    def __len__(self) -> int:
        return math.ceil(len(self.states) / self.batch)


def distil(
    layer: DeciLMDecoderLayer,
    trainees: list[Trainee],
    stream: Stream,
    held_out: dict[str, SubblockIO],
    context: dict[str, Any],
    device: str,
    dtype: str,
) -> None:
    """Train all variants of one layer, in place. The parent's subblocks run once for all of them."""
    checks = {math.ceil(len(stream) * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
    for step, states in enumerate(stream, start=1):
        with torch.no_grad(), autocast(device, dtype):
            io = subblock_io(layer, states, context)
        for trainee in trainees:
            trainee.step(io[trainee.variant.subblock], context, device, dtype)
            if step in checks:
                trainee.judge(held_out[trainee.variant.subblock], context, stream.batch)
