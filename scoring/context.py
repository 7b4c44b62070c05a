# SPDX-License-Identifier: Apache-2.0
"""Scores around an architecture: its own, and those of its single changes. What the search asks for when it refines."""

import itertools
from collections.abc import Iterable, Sequence

import pandas as pd
import torch
from torch import Tensor

from puzzle.architecture import Architecture, SubblockVariant
from puzzle.devices import generator
from puzzle.evaluate import TokenSums
from puzzle.run import Progress
from puzzle.scoring.blocks import Blocks
from puzzle.scoring.fisher import estimate, forwards, products
from puzzle.scoring.replacement import carry, judge


class Context:
    """Judges architectures by the KL divergence from the parent on one text, in nats per token.

    The parent runs over the text once, when this is made.
    """

    def __init__(
        self,
        blocks: Blocks,
        variants: list[SubblockVariant],
        tokens: Tensor,
        *,
        samples: int,
        seed: int,
        batch: int,
        progress: Progress,
    ):
        """Run the parent.

        Args:
            blocks: the parent and its library.
            variants: every candidate, the parent's subblocks among them.
            tokens: the text, [sequences, seq].
            samples: labels drawn per token for the gradient pass.
            seed: of the labels; the same labels in every call.
            batch: sequences at a time.
            progress: called after each layer.
        """
        self.blocks, self.variants, self.tokens = blocks, variants, tokens
        self.samples, self.seed, self.batch, self.progress = samples, seed, batch, progress
        self.parent = self._final(Architecture.parent(blocks.depth.checkpoint.shape.num_layers))

    def _final(self, architecture: Architecture) -> Tensor:
        return carry(self.blocks, architecture, [], self.tokens, self.batch, self.progress)[0]

    def judge(self, children: Iterable[Architecture]) -> dict[Architecture, TokenSums]:
        """The figures of whole models."""
        finals = {child: self._final(child) for child in children}
        return judge(self.blocks.depth, self.parent, finals, self.tokens, self.progress)

    def true_score(self, child: Architecture) -> float:
        """The KL divergence of the whole model."""
        return self.judge([child])[child].kl

    def exact(self, child: Architecture, variants: Sequence[SubblockVariant]) -> list[float]:
        """By how much the KL divergence changes with each of these variants, alone, in a child."""
        own, finals = carry(self.blocks, child, list(variants), self.tokens, self.batch, self.progress)
        sums = judge(self.blocks.depth, self.parent, {None: own, **finals}, self.tokens, self.progress)
        return [sums[v].kl - sums[None].kl for v in variants]

    def estimates(self, child: Architecture) -> pd.DataFrame:
        """The same for every candidate, estimated from gradients: layer, subblock, variant, score, stderr."""
        found = products(
            self.blocks,
            child,
            self.variants,
            self.tokens,
            self.parent,
            samples=self.samples,
            generator=generator(self.seed, "fisher"),
            batch=self.batch,
            progress=self.progress,
        )
        return estimate(found)

    @torch.no_grad()
    def block_influence(self) -> list[float]:
        """Of each layer of the parent, 1 - cosine similarity of its input and output (ShortGPT, arXiv 2403.03853)."""
        parent = Architecture.parent(self.blocks.depth.checkpoint.shape.num_layers)
        states = forwards(self.blocks, parent, self.tokens, self.batch)
        pairs = itertools.pairwise(states)
        return [1 - float(torch.cosine_similarity(before, after, -1).mean()) for before, after in pairs]
