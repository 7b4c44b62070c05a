# SPDX-License-Identifier: Apache-2.0
"""Run directories, random libraries and layers for tiny parents."""

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from puzzle.architecture import Architecture, SubblockVariant
from puzzle.block_library import BlockLibrary, VariantRecord, has_weights
from puzzle.checkpoint import Checkpoint
from puzzle.config import RunConfig
from puzzle.data import SPLITS
from puzzle.modeling import DeciLMDecoderLayer
from puzzle.run import Run
from puzzle.variants import expand, subblock_config

SPACE = {"attention": ["kv1", "linear", "no_op"], "ffn": ["ffn32", "linear", "no_op"]}
MIXED = Architecture(("kv1", "linear", "no_op"), ("ffn32", "no_op", "linear"))
SEQ = 16


def tiny_config(parent: Path, **settings: Any) -> RunConfig:
    """A run's config with everything small, resolved for float32 on the CPU."""
    return RunConfig(
        **{
            "parent": str(parent),
            "search_space": SPACE,
            "targets": ["params<=0.9x"],
            "data": {"seq_length": SEQ, "training_tokens": 16 * SEQ},
            "library": {"bld": {"tokens": 12 * SEQ, "batch_tokens": 2 * SEQ}},
            "scenario": {"prompt": 8, "generated": 8},
            "measure": {"warmup": 0, "repeats": 2, "decode_steps": 2},
            "device": "cpu",
            "compute_dtype": "float32",
            "machine": {"threads": 1},
            **settings,
        }
    )


def tiny_run(folder: Path, config: RunConfig, sequences: int = 16, vocab: int = 257) -> Run:
    """A run directory with its data stage done: random tokens, [sequences, SEQ] in each split."""
    run = Run.create(folder, config, update=True)
    for seed, name in enumerate(SPLITS):
        if not (folder / "data" / f"{name}.parquet").exists():
            generator = torch.Generator().manual_seed(seed)
            write_split(folder / "data", name, torch.randint(vocab, (sequences, SEQ), generator=generator))
    return run


def write_split(folder: Path, name: str, tokens: Tensor) -> None:
    """Write tokens, [sequences, seq], as the data stage does."""
    folder.mkdir(exist_ok=True)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(tokens.flatten().numpy()), tokens.shape[1])
    pq.write_table(pa.table({"input_ids": rows}), folder / f"{name}.parquet")


def in_bfloat16(parent: Path, folder: Path) -> Path:
    """A copy of a parent with its weights in bfloat16."""
    shutil.copytree(parent, folder)
    LlamaForCausalLM.from_pretrained(parent, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def variants_of(checkpoint: Checkpoint, config: RunConfig) -> list[SubblockVariant]:
    return expand(config.search_space, checkpoint.shape)


def random_state(checkpoint: Checkpoint, variant: SubblockVariant, scale: float = 0.1) -> dict[str, Tensor]:
    """Random tensors of a variant's names and shapes, in the parent's dtype; the same for the same key."""
    config = subblock_config(variant.name, variant.subblock, checkpoint.shape)
    block = replace(checkpoint.parent_block, **{variant.subblock: config})
    with torch.device("meta"):
        layer = DeciLMDecoderLayer(checkpoint.child_config_with([block] * checkpoint.shape.num_layers), 0, 0)
    prefix = "self_attn." if variant.subblock == "attention" else "mlp."
    generator = torch.Generator().manual_seed(sum(variant.key.encode()))
    return {
        name: (scale * torch.randn(tensor.shape, generator=generator)).to(checkpoint.dtype)
        for name, tensor in layer.state_dict().items()
        if name.startswith(prefix)
    }


def random_library(checkpoint: Checkpoint, folder: Path, variants: Iterable[SubblockVariant]) -> BlockLibrary:
    """A library of random weights."""
    library = BlockLibrary(folder)
    for variant in variants:
        if has_weights(variant):
            record = VariantRecord("random", "random", 1.0, 1.0, 1.0, 0, "start")
            library.save(variant, random_state(checkpoint, variant), record)
    return library
