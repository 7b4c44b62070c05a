# SPDX-License-Identifier: Apache-2.0
"""Walking a checkpoint's depth one layer at a time: embed, context of a layer, head.

Sequences are packed, of one length and without padding, so attention is plainly causal.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from puzzle.architecture import Subblock
from puzzle.checkpoint import EMBEDDING, HEAD, NORM, Checkpoint, load_frozen
from puzzle.modeling import DeciLMDecoderLayer


class Depth:
    """The outer parts of a checkpoint in float32, and the context its layers need."""

    def __init__(self, checkpoint: Checkpoint, device: str, dtype: torch.dtype = torch.float32):
        self.checkpoint, self.device, self.dtype = checkpoint, device, dtype
        self.rotary = LlamaRotaryEmbedding(checkpoint.child_config).to(device)
        self._contexts: dict[int, dict[str, Any]] = {}

    def embed(self, tokens: Tensor) -> Tensor:
        """[batch, seq] token ids -> [batch, seq, hidden]."""
        weight = self.checkpoint.tensor(EMBEDDING)
        return nn.functional.embedding(tokens, weight).to(self.device, self.dtype)

    def context(self, seq: int) -> dict[str, Any]:
        """What attention needs besides its input: rotary angles [1, seq, head_dim], and no mask but causality."""
        if seq not in self._contexts:
            positions = torch.arange(seq, device=self.device)[None]
            angles = self.rotary(torch.empty(0, device=self.device, dtype=self.dtype), positions)
            self._contexts[seq] = {"position_embeddings": angles, "attention_mask": None}
        return self._contexts[seq]

    def layers(self) -> Iterator[DeciLMDecoderLayer]:
        """The layers in order, each read when it is reached."""
        for layer in range(self.checkpoint.shape.num_layers):
            yield self.checkpoint.layer(layer, self.device, self.dtype)

    def norm(self) -> LlamaRMSNorm:
        norm = LlamaRMSNorm(self.checkpoint.shape.hidden_size, eps=self.checkpoint.config.rms_norm_eps)
        return load_frozen(norm, {"weight": self.checkpoint.tensor(NORM)}, self.device, self.dtype)

    def head_weight(self) -> Tensor:
        """[vocab, hidden]."""
        name = EMBEDDING if self.checkpoint.shape.tied_embeddings else HEAD
        return self.checkpoint.tensor(name).to(self.device, self.dtype)


def apply(module: nn.Module | None, subblock: Subblock, x: Tensor, context: dict[str, Any]) -> Tensor:
    """A subblock's output [batch, seq, hidden] for its normed input [batch, seq, hidden]; a no-op's is zero."""
    if module is None:
        return torch.zeros_like(x)
    return module(hidden_states=x, **context)[0] if subblock == "attention" else module(x)
