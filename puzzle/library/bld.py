# SPDX-License-Identifier: Apache-2.0
"""Blockwise local distillation (Puzzle, arXiv 2411.19146, section 3): variants learn to mimic their parent subblock.

All variants of a layer train on one stream of the parent's activations; the parent's subblocks run once a batch.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from puzzle.architecture import Subblock, SubblockVariant
from puzzle.config import BLDConfig
from puzzle.depth import apply
from puzzle.devices import autocast
from puzzle.library.initialise import TINY, SubblockIO, subblock_io
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
    return (output.float() - target.float()).square().sum() / target.float().square().sum().clamp_min(TINY)


@dataclass(frozen=True)
class Stream:
    """The parent's hidden states before a layer, read in order, a batch per step, and how to train on them."""

    states: Tensor  # [sequences, seq, hidden]
    batch: int  # sequences per step
    context: dict[str, Any]  # of the parent's attention
    device: str
    dtype: str  # arithmetic of forward and backward passes; weights, losses and judging are float32

    def __iter__(self) -> Iterator[Tensor]:
        return (self.states[start : start + self.batch] for start in range(0, len(self.states), self.batch))

    def __len__(self) -> int:
        return math.ceil(len(self.states) / self.batch)


class Trainee:
    """One variant in training: its module, optimiser, and best state so far by held-out error."""

    def __init__(self, variant: SubblockVariant, module: nn.Module, error: float, config: BLDConfig, stream: Stream):
        """Take a copy of `module`, which may share tensors with the parent and with other variants."""
        self.variant, self.stream = variant, stream
        self.module = copy.deepcopy(module).eval().requires_grad_(True)  # eval: no dropout
        self.optimiser = AdamW(self.module.parameters(), config.learning_rate, weight_decay=config.weight_decay)
        warmup = max(1, round(config.warmup * len(stream)))
        self.schedule = LambdaLR(self.optimiser, cosine_with_warmup(warmup, len(stream)))
        self.scaler = torch.amp.GradScaler(stream.device.split(":")[0], enabled=stream.dtype == "float16")
        self.error, self.best = error, self._copy()
        self.tokens, self.stopped = 0, False

    def _copy(self) -> dict[str, Tensor]:
        return {k: v.detach().clone() for k, v in self.module.state_dict().items()}

    def _output(self, x: Tensor) -> Tensor:
        return apply(self.module, self.variant.subblock, x, self.stream.context)

    def step(self, io: SubblockIO) -> None:
        """One optimiser step; a loss that is not finite stops this variant, its best state stays."""
        if self.stopped:
            return
        with autocast(self.stream.device, self.stream.dtype):
            output = self._output(io.x)
        loss = local_loss(output, io.y)
        if not torch.isfinite(loss):
            self.stopped = True
            return
        self.optimiser.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.schedule.step()
        self.tokens += io.x[..., 0].numel()

    def judge(self, held_out: SubblockIO) -> None:
        """Keep the present state if it is the best yet on the held-out tokens."""
        error = held_out.error(self._output, self.stream.batch)
        if error < self.error:
            self.error, self.best = error, self._copy()


def distil(
    layer: DeciLMDecoderLayer, trainees: list[Trainee], stream: Stream, held_out: dict[Subblock, SubblockIO]
) -> None:
    """Train all variants of one layer, in place. The parent's subblocks run once for all of them."""
    checks = {math.ceil(len(stream) * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
    for step, states in enumerate(stream, start=1):
        with torch.no_grad(), autocast(stream.device, stream.dtype):
            io = subblock_io(layer, states, stream.context)
        for trainee in trainees:
            trainee.step(io[trainee.variant.subblock])
            if step in checks:
                trainee.judge(held_out[trainee.variant.subblock])
