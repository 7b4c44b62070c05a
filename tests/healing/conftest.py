# SPDX-License-Identifier: Apache-2.0
"""A tiny parent and a heterogeneous child of it, on disk."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from puzzle.modeling import DeciLMConfig, DeciLMForCausalLM

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # far from uniform predictions, so that there is something to learn
    "tie_word_embeddings": True,
}
BLOCKS = [
    {"attention": {"n_heads_in_group": 2}, "ffn": {"intermediate_size": 16}},
    {"attention": {"no_op": True}, "ffn": {"intermediate_size": 32}},
    {"attention": {"no_op": True}, "ffn": {"no_op": True}},
    {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
]


def save_child(parent: LlamaForCausalLM, folder: Path, dtype: torch.dtype, **sharding: str) -> Path:
    """The parent with other blocks: what fits is copied, the rest is small and random."""
    torch.manual_seed(1)
    child = DeciLMForCausalLM(DeciLMConfig(block_configs=BLOCKS, **{**SHAPE, "initializer_range": 0.05}))
    own = child.state_dict()
    own.update({k: v for k, v in parent.state_dict().items() if k in own and own[k].shape == v.shape})
    child.load_state_dict(own)
    child.to(dtype).save_pretrained(folder, **sharding)
    (folder / "README.md").write_text("made by a test\n")
    (folder / "assets").mkdir()
    (folder / "assets" / "recipe.json").write_text(json.dumps({"seed": 1}))
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """`parent`; `child` in float32; `half`, the same in bfloat16 and several shards."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    parent = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    parent.save_pretrained(root / "parent")
    save_child(parent, root / "child", torch.float32)
    save_child(parent, root / "half", torch.bfloat16, max_shard_size="4KB")
    return {name: root / name for name in ("parent", "child", "half")}


@pytest.fixture(scope="session")
def tokens() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "training": torch.randint(SHAPE["vocab_size"], (24, 16), generator=generator),
        "held_out": torch.randint(SHAPE["vocab_size"], (6, 16), generator=generator),
    }
