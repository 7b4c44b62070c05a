# SPDX-License-Identifier: Apache-2.0
"""Latency measured on the device the child will run on, through the code path the child runs with.

A variant is timed inside a stack: a model of n layers that all hold the variant in one half and nothing in the other,
so that weights come from memory as in the whole model, with the real KV cache. The stack without any subblock
(embedding, norm, head) is subtracted. Rounds go around all stacks, so that drift of the machine meets all alike.
"""

import copy
import inspect
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaModel

from puzzle.architecture import PARENT, SUBBLOCKS, AttentionConfig, BlockConfig, FFNConfig, Subblock, SubblockVariant
from puzzle.checkpoint import Checkpoint, with_sdpa
from puzzle.config import MeasureConfig
from puzzle.costs import CONSTANT, MODEL, Scenario
from puzzle.modeling import DeciLMConfig, DeciLMDecoderLayer, DeciLMForCausalLM, uses_cache
from puzzle.run import Progress
from puzzle.scoring.memory import constant_sizes, subblock_sizes
from puzzle.variants import subblock_config

STACK_BYTES = 2**30  # at most, per stack: enough to leave every CPU cache
NOTHING = BlockConfig(AttentionConfig(no_op=True), FFNConfig(no_op=True))
PHASES = ("prefill", "decode")
Key = TypeVar("Key", bound=Hashable)
_CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


@dataclass(frozen=True)
class Timing:
    """Milliseconds of each round: of one prefill, and of one decode step."""

    prefill: np.ndarray
    decode: np.ndarray

    def __sub__(self, other: "Timing") -> "Timing":
        return Timing(self.prefill - other.prefill, self.decode - other.decode)

    def __truediv__(self, layers: int) -> "Timing":
        return Timing(self.prefill / layers, self.decode / layers)

    def row(self) -> dict[str, float]:
        """Median and interquartile range of both phases, as columns of a cost table; what noise takes below 0 is 0."""
        row: dict[str, float] = {}
        for phase in PHASES:
            low, median, high = np.percentile(getattr(self, phase), [25, 50, 75])
            row |= {f"{phase}_ms": max(0.0, float(median)), f"{phase}_iqr_ms": float(high - low)}
        return row


def time_models(
    models: Mapping[Key, PreTrainedModel | Callable[[], PreTrainedModel]],
    scenario: Scenario,
    vocab_size: int,
    config: MeasureConfig,
    progress: Progress,
) -> dict[Key, Timing]:
    """Time prefill and decode of several models in turns.

    Args:
        models: by name, a model or a function that makes one ready to run.
        scenario: batch, lengths, device.
        vocab_size: token ids are drawn below it.
        config: warm-up rounds, kept rounds, decode steps a round.
        progress: called after each model of each round.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (scenario.batch, scenario.prompt + scenario.generated // 2)
    tokens = torch.randint(vocab_size, shape, generator=generator).to(scenario.device)
    rounds: dict[Key, list[tuple[float, float]]] = {name: [] for name in models}
    caches: dict[Key, DynamicCache] = {}
    total = (config.warmup + config.repeats) * len(models)
    for done in range(total):
        progress("latency", done, total)
        name = list(models)[done % len(models)]
        given = models[name]
        model = given if isinstance(given, PreTrainedModel) else given()
        if name not in caches:  # the cache that decoding starts from
            caches[name] = forward(model, [tokens])
        prefill = partial(forward, model, [tokens[:, : scenario.prompt]])
        decode = partial(forward, model, [tokens[:, :1]] * config.decode_steps, copy.deepcopy(caches[name]))
        pair = _milliseconds(prefill, scenario.device), _milliseconds(decode, scenario.device) / config.decode_steps
        rounds[name].append(pair)
    progress("latency", total, total)
    kept = {name: np.array(pairs[config.warmup :]) for name, pairs in rounds.items()}
    return {name: Timing(pairs[:, 0], pairs[:, 1]) for name, pairs in kept.items()}


@torch.no_grad()
def forward(model: PreTrainedModel, steps: list[Tensor], cache: DynamicCache | None = None) -> DynamicCache:
    """Forward passes one after the other on one KV cache, logits of the last position only."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    for tokens in steps:
        model(input_ids=tokens, use_cache=True, logits_to_keep=1, **{_CACHE: cache})
    return cache


def _milliseconds(work: Callable[[], object], device: str) -> float:
    synchronise = partial(torch.cuda.synchronize, device) if device.startswith("cuda") else (lambda: None)
    synchronise()
    start = time.perf_counter()
    work()
    synchronise()
    return (time.perf_counter() - start) * 1e3


def measure_costs(
    checkpoint: Checkpoint,
    variants: list[SubblockVariant],
    scenario: Scenario,
    config: MeasureConfig,
    progress: Progress,
) -> pd.DataFrame:
    """The cost table of a search space: each distinct variant is measured once, then repeated for its layers.

    Returns:
        Rows as `puzzle.costs` documents, with `prefill_iqr_ms` and `decode_iqr_ms`, interquartile ranges over rounds.
    """
    shape, stacks = checkpoint.shape, Stacks(checkpoint, scenario)
    distinct = sorted({(v.subblock, v.name) for v in variants} | {(s, PARENT) for s in SUBBLOCKS})
    blocks: dict[tuple[str, str], BlockConfig]
    blocks = {(s, n): _alone(s, n, checkpoint) for s, n in distinct if n != "no_op"}
    blocks |= {(MODEL, CONSTANT): NOTHING, (MODEL, PARENT): checkpoint.parent_block}
    models = {key: stacks.equal(block) for key, block in blocks.items()}
    times = time_models(models, scenario, shape.vocab_size, config, progress)
    nothing = times.pop((MODEL, CONSTANT))
    costs = _scaled({key: ((timing - nothing) / stacks.layers).row() for key, timing in times.items()})
    constant = {**nothing.row(), **constant_sizes(shape, scenario.dtype)}
    rows = [{"layer": -1, "subblock": MODEL, "variant": CONSTANT, **constant}]
    for v in variants:
        sizes = subblock_sizes(v.name, v.subblock, shape, scenario.dtype)
        rows.append({"layer": v.layer, "subblock": v.subblock, "variant": v.name, **costs[v.subblock, v.name], **sizes})
    return pd.DataFrame(rows)


def _scaled(costs: dict[tuple[str, str], dict[str, float]]) -> dict[tuple[str, str], dict[str, float]]:
    """Costs of subblocks measured alone, scaled so that the parent's two halves add up to its whole layer.

    Halves alone do not cost what they cost together (the working set is another); with this the prediction is exact for
    the parent. Where the clock cannot tell them from nothing, they stay as measured. A no-op takes no time.
    """
    scaled = {key: dict(row) for key, row in costs.items() if key[0] != MODEL}
    for phase in PHASES:
        whole, halves = costs[MODEL, PARENT][f"{phase}_ms"], sum(costs[s, PARENT][f"{phase}_ms"] for s in SUBBLOCKS)
        scale = whole / halves if whole > 0 and halves > 0 else 1.0
        for row in scaled.values():
            for column in (f"{phase}_ms", f"{phase}_iqr_ms"):
                row[column] *= scale
    nil = dict.fromkeys(next(iter(scaled.values())), 0.0)
    return scaled | {(subblock, "no_op"): nil for subblock in SUBBLOCKS}


def _alone(subblock: Subblock, name: str, checkpoint: Checkpoint) -> BlockConfig:
    return replace(NOTHING, **{subblock: subblock_config(name, subblock, checkpoint.shape)})


class Stacks:
    """Layers around one embedding and head. All weights are one number: it does not change the time."""

    def __init__(self, checkpoint: Checkpoint, scenario: Scenario):
        self.checkpoint, self.scenario = checkpoint, scenario
        sizes = (subblock_sizes(PARENT, s, checkpoint.shape, scenario.dtype) for s in SUBBLOCKS)
        fitting = STACK_BYTES // sum(size["weight_bytes"] for size in sizes)
        self.layers = max(1, min(checkpoint.shape.num_layers, fitting))  # of a stack of equal ones
        self.shell = (
            DeciLMForCausalLM(self._config([NOTHING])).to(scenario.device, getattr(torch, scenario.dtype)).eval()
        )

    def _config(self, blocks: Sequence[BlockConfig]) -> DeciLMConfig:
        rest = [NOTHING] * (self.checkpoint.shape.num_layers - len(blocks))
        config = with_sdpa(self.checkpoint.child_config_with([*blocks, *rest]))
        config.num_hidden_layers, config.block_configs = len(blocks), config.block_configs[: len(blocks)]
        return config

    def equal(self, block: BlockConfig) -> Callable[[], PreTrainedModel]:
        """A stack of equal layers, see `add`."""
        return self.add([block] * self.layers)

    def add(self, blocks: Sequence[BlockConfig]) -> Callable[[], PreTrainedModel]:
        """Make a stack; the function returned puts it into the shell and gives the whole."""
        config = self._config(blocks)
        cached = [uses_cache(block) for block in config.block_configs]
        with torch.device("meta"):  # random initialisation would take longer than the measurement
            layers = nn.ModuleList(DeciLMDecoderLayer(config, i, sum(cached[:i])) for i in range(len(blocks)))
        layers = layers.to(getattr(torch, self.scenario.dtype)).to_empty(device=self.scenario.device).eval()
        for parameter in layers.parameters():
            nn.init.constant_(parameter, 0.01)
        return partial(self._use, layers)

    def _use(self, layers: nn.ModuleList) -> PreTrainedModel:
        self.shell.model.layers = layers
        self.shell.config.num_hidden_layers = len(layers)
        return self.shell
