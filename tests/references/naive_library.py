# SPDX-License-Identifier: Apache-2.0
"""Closed forms and local distillation, written out in float64."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def normalised_error(outputs: Tensor, targets: Tensor) -> float:
    """||y_parent - y||^2 / ||y_parent||^2 over all tokens, [sequences, seq, hidden], one by one."""
    missed = total = 0.0
    for y, target in zip(outputs.flatten(0, 1).double(), targets.flatten(0, 1).double(), strict=True):
        missed += float((target - y) @ (target - y))
        total += float(target @ target)
    return missed / total


def second_moments(features: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over tokens of f f^T and of y f^T, for [tokens, n] and [tokens, hidden]."""
    gram = torch.zeros(features.shape[1], features.shape[1], dtype=torch.float64)
    cross = torch.zeros(outputs.shape[1], features.shape[1], dtype=torch.float64)
    for f, y in zip(features.double(), outputs.double(), strict=True):
        gram += torch.outer(f, f)
        cross += torch.outer(y, f)
    return gram, cross


def pulled_least_squares(features: Tensor, outputs: Tensor, start: Tensor, strength: float) -> Tensor:
    """The W that minimises ||Y - W F||^2 + s ||W - start||^2, by a QR of tokens and s as further rows of the system.

    s = strength * the mean of the features' squared norms, as the product's docstring says.
    """
    f, y = features.double(), outputs.double()
    s = strength * f.square().sum(0).mean()
    rows = torch.cat([f, s.sqrt() * torch.eye(f.shape[1], dtype=torch.float64)])
    wanted = torch.cat([y, s.sqrt() * start.double().T])
    return torch.linalg.lstsq(rows, wanted, driver="gels").solution.T


def cosine(step: int, warmup: int, steps: int) -> float:
    """Linear from 1/warmup to 1 over the warm-up, then half a cosine down to 0."""
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def adamw(
    parameters: list[Tensor],
    loss: Callable[[int], Tensor],
    rates: list[float],
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
) -> None:
    """Decoupled weight decay (arXiv 1711.05101, algorithm 2), a step per rate; `loss(step)` depends on `parameters`."""
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    for step, rate in enumerate(rates):
        gradients = torch.autograd.grad(loss(step), parameters)
        with torch.no_grad():
            for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
                m.mul_(betas[0]).add_((1 - betas[0]) * g)
                v.mul_(betas[1]).add_((1 - betas[1]) * g**2)
                unbiased = m / (1 - betas[0] ** (step + 1)), v / (1 - betas[1] ** (step + 1))
                p.sub_(rate * (unbiased[0] / (unbiased[1].sqrt() + epsilon) + weight_decay * p))
