# SPDX-License-Identifier: Apache-2.0
"""Judging a whole model: perplexity, and KL and top-1 agreement against the parent. Always float32."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from puzzle.checkpoint import Checkpoint, find
from puzzle.config import DataConfig
from puzzle.data import blocks
from puzzle.devices import resolve_device
from puzzle.errors import ConfigError
from puzzle.run import Progress

CACHED_TOKENS = 64
BATCH_TOKENS = 1_024  # logits exist for this many tokens at a time


@dataclass(frozen=True)
class ParentLogits:
    """What other models are compared with, of a batch: computed once for all of them."""

    log_probs: Tensor  # [batch, seq, vocab], float32
    top: Tensor  # [batch, seq]
    labels: Tensor  # [batch, seq - 1]: each token is the label of the position before it
    loss: Tensor  # [batch, seq - 1]

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor) -> "ParentLogits":
        """From the parent's logits [batch, seq, vocab] and the tokens [batch, seq]."""
        log_probs = logits.float().log_softmax(-1)
        labels = tokens[:, 1:]
        return cls(log_probs, log_probs.argmax(-1), labels, _label_loss(log_probs, labels))


@dataclass(frozen=True)
class TokenFigures:
    """Figures of each token of a batch: [batch, seq], the losses [batch, seq - 1]."""

    kl: Tensor
    agrees: Tensor
    loss: Tensor
    parent_loss: Tensor


def compare_logits(parent: ParentLogits, logits: Tensor) -> TokenFigures:
    """KL(parent || model) over the full vocabulary, top-1 agreement and next-token loss of logits [batch, seq, vocab].

    Works on a few tokens at a time, so that what it computes on the way stays in the CPU's caches.
    """
    kl, top, loss = torch.empty(logits.shape[:2], device=logits.device), torch.empty_like(parent.top), []
    for row in range(len(logits)):
        for start in range(0, logits.shape[1], CACHED_TOKENS):
            part = slice(start, start + CACHED_TOKENS)
            log_probs, reference = logits[row, part].float().log_softmax(-1), parent.log_probs[row, part]
            labels = parent.labels[row, part]
            loss.append(_label_loss(log_probs, labels))
            top[row, part] = log_probs.argmax(-1)
            kl[row, part] = (reference.exp() * (reference - log_probs)).sum(-1)
    return TokenFigures(kl, top == parent.top, torch.cat(loss).view(parent.loss.shape), parent.loss)


def _label_loss(log_probs: Tensor, labels: Tensor) -> Tensor:
    """-log p of the labels; the positions beyond the last label have none."""
    return -log_probs[..., : labels.shape[-1], :].gather(-1, labels[..., None]).squeeze(-1)


class TokenSums:
    """Means and standard errors over tokens, summed in float64 a batch at a time."""

    def __init__(self) -> None:
        self.tokens = self.labels = 0
        self._sums = dict.fromkeys(("kl", "kl2", "agrees", "loss", "loss2", "parent_loss"), 0.0)

    def add(self, figures: TokenFigures) -> None:
        kl, loss = figures.kl.double(), figures.loss.double()
        self.tokens += kl.numel()
        self.labels += loss.numel()
        new = {
            "kl": kl.sum(),
            "kl2": kl.square().sum(),
            "agrees": figures.agrees.sum(),
            "loss": loss.sum(),
            "loss2": loss.square().sum(),
            "parent_loss": figures.parent_loss.double().sum(),
        }
        for key, value in new.items():
            self._sums[key] += float(value)

    @property
    def kl(self) -> float:
        """Nats per token."""
        return self._sums["kl"] / self.tokens

    @property
    def kl_stderr(self) -> float:
        return _stderr(self._sums["kl"], self._sums["kl2"], self.tokens)

    @property
    def top1_agreement(self) -> float:
        return self._sums["agrees"] / self.tokens

    @property
    def lm_loss(self) -> float:
        """Nats per token."""
        return self._sums["loss"] / self.labels

    @property
    def perplexity(self) -> float:
        return math.exp(self.lm_loss)

    @property
    def lm_loss_stderr(self) -> float:
        return _stderr(self._sums["loss"], self._sums["loss2"], self.labels)

    @property
    def parent_lm_loss(self) -> float:
        return self._sums["parent_loss"] / self.labels


def _stderr(total: float, squares: float, n: int) -> float:
    variance = max(0.0, squares / n - (total / n) ** 2)
    return math.sqrt(variance / n)


@torch.no_grad()
def evaluate(
    models: dict[str, PreTrainedModel], parent: PreTrainedModel, tokens: Tensor, batch: int, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Judge several models against one parent on the same text; the parent runs once a batch for all.

    Args:
        models: by name, in float32.
        parent: the teacher, in float32.
        tokens: [sequences, seq].
        batch: sequences at a time.
        progress: called after each batch.

    Returns:
        Per name: perplexity, perplexity_stderr, kl and kl_stderr (nats per token), top1_agreement, tokens.
    """
    sums = {name: TokenSums() for name in models}
    parts = tokens.split(batch)
    for done, part in enumerate(parts):
        progress("evaluation", done, len(parts))
        part = part.to(parent.device)
        logits = parent(part, use_cache=False).logits
        reference = ParentLogits.of(logits, part)
        for name, model in models.items():
            own = logits if model is parent else model(part, use_cache=False).logits
            sums[name].add(compare_logits(reference, own))
    progress("evaluation", len(parts), len(parts))
    return {name: _figures(s) for name, s in sums.items()}


def _figures(s: TokenSums) -> dict[str, Any]:
    return {
        "perplexity": s.perplexity,
        "perplexity_stderr": s.perplexity * s.lm_loss_stderr,
        "kl": s.kl,
        "kl_stderr": s.kl_stderr,
        "top1_agreement": s.top1_agreement,
        "tokens": s.tokens,
    }


def evaluate_checkpoint(
    checkpoint: str, parent: str | None, config: DataConfig, tokens: int, seed: int, device: str, progress: Progress
) -> dict[str, Any]:
    """Judge a checkpoint on text of a source; without a parent there is no KL and no agreement.

    Raises:
        ConfigError: a checkpoint or the text cannot be read, or the two models have other vocabularies.
    """
    folders = [find(name) for name in (checkpoint, parent) if name is not None]
    opened = [Checkpoint(folder) for folder in folders]
    if opened[0].shape.vocab_size != opened[-1].shape.vocab_size:
        sizes = [c.shape.vocab_size for c in opened]
        raise ConfigError(f"{checkpoint}: has {sizes[0]} tokens, {parent} has {sizes[1]}; they cannot be compared")
    text = blocks(config, opened[0].tokenizer(), tokens, seed, progress)
    device = resolve_device(device)
    models = [load(folder, "float32", device) for folder in folders]
    figures = evaluate({"checkpoint": models[0]}, models[-1], text, max(1, BATCH_TOKENS // text.shape[1]), progress)
    if parent is None:
        return {k: v for k, v in figures["checkpoint"].items() if k.startswith(("perplexity", "tokens"))}
    return figures["checkpoint"]


def load(folder: Path, dtype: str, device: str) -> PreTrainedModel:
    """A whole model, ready to be judged."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.to(device).eval()  # type: ignore[return-value]
