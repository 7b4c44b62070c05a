# SPDX-License-Identifier: Apache-2.0
"""A tiny parent, trained here in about three minutes: a byte-level BPE tokenizer and a Llama of 2 million parameters.

So little time is a few hundred thousand tokens, which AdamW from random weights spends on word frequencies. Two things
get further: embeddings that start as the factors of the training text's word associations (Levy and Goldberg 2014),
and Muon for the matrices of the layers (Jordan et al. 2024), in float32, since not every CPU computes in bfloat16.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from puzzle.errors import PuzzleError
from puzzle.run import Progress, silent

END = "<|endoftext|>"
PAD = "<|pad|>"


@dataclass(frozen=True)
class Recipe:
    """What a tiny parent depends on, besides its text and the seed."""

    vocabulary: int = 4_096
    hidden: int = 128
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 16
    ffn: int = 384
    sequence: int = 256  # tokens
    batch: int = 4  # sequences a step
    steps: int = 600
    held_out: int = 64  # sequences that judge
    muon_rate: float = 0.02
    adam_rate: float = 4e-3  # of embeddings and norms
    warmup: float = 0.05  # share of the steps


DEFAULT = Recipe()


@dataclass(frozen=True)
class Trained:
    """A tiny parent in memory, with its perplexity on held-out documents beside a bigram model's on the same tokens."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    losses: tuple[float, ...]  # nats per token, a step each
    perplexity: float
    bigram_perplexity: float


def train(texts: Sequence[str], recipe: Recipe, seed: int = 0, progress: Progress = silent) -> Trained:
    """Train a tokenizer and a model; the same seed and texts give the same model, to rounding.

    Raises:
        PuzzleError: the texts are too short for the recipe.
    """
    order = sorted(set(texts), key=lambda text: hashlib.sha256(f"{seed} {text}".encode()).digest())
    tokenizer = _tokenizer(order, recipe.vocabulary)
    encoded = _encoded(order, tokenizer)
    held_out = _rows(encoded, recipe.held_out, recipe.sequence)
    training = _rows(encoded, recipe.steps * recipe.batch, recipe.sequence)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(recipe, tokenizer)
        model.model.embed_tokens.weight.data = associations(training, recipe.vocabulary, recipe.hidden)
        losses = _optimise(model, training.view(recipe.steps, recipe.batch, -1), recipe, progress)
    model.eval()
    baseline = bigram_perplexity(training, held_out, recipe.vocabulary)
    return Trained(model, tokenizer, tuple(losses), _perplexity(model, held_out), baseline)


# --------------------------------------------------------------------------------------------------------------- text


def _tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:4_000], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def _encoded(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> Iterator[list[int]]:
    for first in range(0, len(texts), 64):
        for ids in tokenizer(texts[first : first + 64], verbose=False)["input_ids"]:
            yield [*ids, tokenizer.eos_token_id]


def _rows(encoded: Iterator[list[int]], rows: int, sequence: int) -> Tensor:
    """The next documents end to end, as int64 `[rows, sequence]`; the rest of the last document is dropped."""
    ids: list[int] = []
    while len(ids) < rows * sequence:
        document = next(encoded, None)
        if document is None:
            raise PuzzleError(f"the text is too short for the tiny parent: {rows * sequence:,} tokens are needed")
        ids += document
    return torch.tensor(ids[: rows * sequence]).view(rows, sequence)


# -------------------------------------------------------------------------------------------------------------- model


def _model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.ffn,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=4 * recipe.sequence,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:  # every subblock starts as a no-op
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def associations(tokens: Tensor, vocabulary: int, width: int) -> Tensor:
    """Embeddings `[vocabulary, width]` whose products follow the pointwise mutual information of neighbours.

    The smoothed information is made symmetric, weighted by the tokens' frequencies, and factored; rows get one norm.
    """
    pairs = torch.bincount((tokens[:, :-1] * vocabulary + tokens[:, 1:]).flatten(), minlength=vocabulary**2)
    counts = pairs.view(vocabulary, vocabulary).float()
    frequency = torch.bincount(tokens.flatten(), minlength=vocabulary) + 1.0
    frequency /= frequency.sum()
    information = ((counts + 5 * frequency) / (counts.sum(1, keepdim=True) + 5)).log() - frequency.log()
    weight = frequency.sqrt()[:, None]
    matrix = (information + information.T) / 2 * weight * weight.T
    basis, _, _ = torch.svd_lowrank(matrix, q=min(2 * width, vocabulary))
    values, vectors = torch.linalg.eigh(basis.T @ matrix @ basis)  # ascending; products need the positive ones
    rows = basis @ vectors[:, -width:] * values[-width:].clamp(min=0).sqrt() / weight
    return 0.1 * math.sqrt(width) * nn.functional.normalize(rows, dim=1)


# ----------------------------------------------------------------------------------------------------------- training


def _optimise(model: LlamaForCausalLM, batches: Tensor, recipe: Recipe, progress: Progress) -> list[float]:
    layers = [p for p in model.model.layers.parameters() if p.ndim == 2]
    ours = {id(p) for p in layers}
    rest = [p for p in model.parameters() if id(p) not in ours]
    optimisers = [Muon(layers, recipe.muon_rate), torch.optim.AdamW(rest, recipe.adam_rate, (0.9, 0.95), fused=True)]
    warm, steps = max(1, round(recipe.warmup * recipe.steps)), recipe.steps
    rate = [
        min((i + 1) / warm, (1 + math.cos(math.pi * max(0, i - warm) / max(1, steps - warm))) / 2) for i in range(steps)
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: rate[min(i, steps - 1)]) for o in optimisers]
    model.train()
    losses = []
    for done, batch in enumerate(batches):
        progress("training the tiny parent", done, steps)
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for step in (*optimisers, *schedules):
            step.step()
        model.zero_grad()
        losses.append(loss.item())
    progress("training the tiny parent", steps, steps)
    return losses


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest orthogonal matrix by Newton-Schulz iterations; equal shapes go through together."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95):
        shapes = sorted({tuple(p.shape) for p in parameters})
        groups = [{"params": [p for p in parameters if tuple(p.shape) == shape]} for shape in shapes]
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            gradient = torch.stack([p.grad for p in group["params"]])
            state = self.state[group["params"][0]]
            average = state.setdefault("average", torch.zeros_like(gradient))
            average.lerp_(gradient, 1 - group["momentum"])
            update = orthogonalise(gradient.lerp(average, group["momentum"]))
            rows, columns = update.shape[1:]
            torch._foreach_add_(group["params"], update.unbind(), alpha=-group["lr"] * max(1, rows / columns) ** 0.5)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Bring all singular values of `[n, rows, columns]` near 1, five steps of Jordan et al.'s quintic iteration."""
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = wide @ wide.mT
        wide = 3.4445 * wide + (2.0315 * gram @ gram - 4.7750 * gram) @ wide
    return wide if matrices.shape[1] <= matrices.shape[2] else wide.mT


# ------------------------------------------------------------------------------------------------------------ judging


@torch.no_grad()
def _perplexity(model: LlamaForCausalLM, rows: Tensor) -> float:
    losses = [model(part, labels=part, use_cache=False).loss.item() * len(part) for part in rows.split(4)]
    return math.exp(sum(losses) / len(rows))


def bigram_perplexity(training: Tensor, held_out: Tensor, vocabulary: int) -> float:
    """Perplexity of a bigram model on `[rows, seq]` tokens, trained on others.

    Witten-Bell smoothing (Chen and Goodman 1999, section 2.5): interpolated with the unigrams, which are smoothed by
    one, with as much weight as the token before has had different followers. The first token of a row is not counted.
    """
    train, test = training.numpy(), held_out.numpy()
    unigram = np.bincount(train.ravel(), minlength=vocabulary) + 1.0
    unigram /= unigram.sum()
    pairs, counts = np.unique(train[:, :-1] * vocabulary + train[:, 1:], return_counts=True)
    followed = np.bincount(pairs // vocabulary, weights=counts, minlength=vocabulary)
    followers = np.bincount(pairs // vocabulary, minlength=vocabulary)
    before, after = test[:, :-1].ravel(), test[:, 1:].ravel()
    wanted = before * vocabulary + after
    places = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
    seen = np.where(pairs[places] == wanted, counts[places], 0)
    mass = followed[before] + followers[before]
    chance = np.where(mass > 0, (seen + followers[before] * unigram[after]) / np.maximum(mass, 1), unigram[after])
    return float(np.exp(-np.log(chance).mean()))
