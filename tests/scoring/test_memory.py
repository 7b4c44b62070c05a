# SPDX-License-Identifier: Apache-2.0
"""Counted sizes against modules on the meta device and against a KV cache that was really filled."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_runs import MIXED, SPACE, random_library
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from puzzle.architecture import SUBBLOCKS, Architecture, Subblock
from puzzle.checkpoint import Checkpoint
from puzzle.child.assemble import layer_state
from puzzle.families.llama import shape
from puzzle.modeling import DeciLMDecoderLayer, DeciLMForCausalLM
from puzzle.scoring.memory import constant_sizes, subblock_sizes
from puzzle.variants import block_configs, subblock_config

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
HALVES = {"attention": ("self_attn.", "input_layernorm."), "ffn": ("mlp.", "post_attention_layernorm.")}
REAL = {
    "Llama-3.1-8B": dict(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32
    ),
    "Llama-3.1-70B": dict(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
    ),
    "Llama-3.2-1B": dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        tie_word_embeddings=True,
    ),
}  # fmt: skip
PARAMS = {"Llama-3.1-8B": 8_030_261_248, "Llama-3.1-70B": 70_553_706_496, "Llama-3.2-1B": 1_235_814_400}  # published


def nbytes(module: torch.nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())  # a tensor used twice is listed once


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("subblock", SUBBLOCKS)
def test_a_subblock_is_as_large_as_its_module(any_parent: Path, subblock: Subblock, dtype: str) -> None:
    checkpoint = Checkpoint(any_parent)
    for name in ("parent", *SPACE[subblock]):
        config = subblock_config(name, subblock, checkpoint.shape)
        block = replace(checkpoint.parent_block, **{subblock: config})
        with torch.device("meta"):
            layer = DeciLMDecoderLayer(checkpoint.child_config_with([block] * 3), 0, 0).to(getattr(torch, dtype))
        tensors = [t for key, t in layer.state_dict().items() if key.startswith(HALVES[subblock])]
        found = subblock_sizes(name, subblock, checkpoint.shape, dtype)
        assert found["weight_bytes"] == sum(t.nbytes for t in tensors)
        assert found["params"] == sum(t.numel() for t in tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_child_is_the_sum_of_its_parts(any_parent: Path, dtype: str) -> None:
    checkpoint = Checkpoint(any_parent)
    for architecture in (MIXED, Architecture.parent(3)):
        blocks = block_configs(architecture, checkpoint.shape)
        with torch.device("meta"):
            model = DeciLMForCausalLM(checkpoint.child_config_with(blocks)).to(getattr(torch, dtype))
        parts = [subblock_sizes(v.name, v.subblock, checkpoint.shape, dtype) for v in architecture.variants]
        parts.append(constant_sizes(checkpoint.shape, dtype))
        assert sum(p["weight_bytes"] for p in parts) == nbytes(model)
        assert sum(p["params"] for p in parts) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kv_cache_is_as_large_as_a_real_one(
    any_parent: Path, tmp_path: Path, tokens: torch.Tensor, dtype: str
) -> None:
    checkpoint = Checkpoint(any_parent)
    library = random_library(checkpoint, tmp_path, MIXED.changes)
    for architecture in (MIXED, Architecture.parent(3)):
        blocks = block_configs(architecture, checkpoint.shape)
        model = DeciLMForCausalLM(checkpoint.child_config_with(blocks))
        for i, layer in enumerate(model.model.layers):
            layer.load_state_dict(layer_state(checkpoint, library, architecture, i))
        model = model.to(getattr(torch, dtype)).eval()
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens, past_key_values=cache, use_cache=True)
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.keys is not None)
        counted = [subblock_sizes(v.name, v.subblock, checkpoint.shape, dtype) for v in architecture.variants]
        assert held == sum(c["kv_bytes_per_token"] for c in counted) * tokens.numel()
    assert constant_sizes(checkpoint.shape, dtype)["kv_bytes_per_token"] == 0


@pytest.mark.parametrize("name", REAL)
def test_real_models(name: str) -> None:
    config = LlamaConfig(num_key_value_heads=8, **REAL[name])
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    layers, own = config.num_hidden_layers, shape(config)
    parts = [subblock_sizes("parent", s, own, "bfloat16") for s in SUBBLOCKS] * layers
    parts.append(constant_sizes(own, "bfloat16"))
    assert sum(p["params"] for p in parts) == PARAMS[name] == sum(p.numel() for p in model.parameters())
    assert sum(p["weight_bytes"] for p in parts) == nbytes(model)
    per_token = layers * 2 * 8 * config.head_dim * 2  # keys and values of 8 heads, 2 bytes each
    assert sum(p["kv_bytes_per_token"] for p in parts) == per_token
