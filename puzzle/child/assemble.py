# SPDX-License-Identifier: Apache-2.0
"""An architecture and a block library become a checkpoint, checked by a fresh process before it counts as written."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from torch import Tensor

import puzzle.modeling
from puzzle.architecture import (
    PARENT,
    SUBBLOCKS,
    Architecture,
    AttentionConfig,
    BlockConfig,
    FFNConfig,
    SubblockVariant,
)
from puzzle.block_library import BlockLibrary
from puzzle.checkpoint import EMBEDDING, HEAD, NORM, Checkpoint
from puzzle.depth import Depth, apply
from puzzle.errors import PuzzleError
from puzzle.modeling import DeciLMConfig
from puzzle.run import atomic, read_json, write_json
from puzzle.variants import block_configs, subblock_config

PREFIX = {"attention": "self_attn.", "ffn": "mlp."}
NORMS = {"attention": "input_layernorm.weight", "ffn": "post_attention_layernorm.weight"}
COMPANIONS = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*")
OWN = ("config.json", "*.safetensors.index.json")  # written for the child


def layer_state(
    checkpoint: Checkpoint, library: BlockLibrary, architecture: Architecture, layer: int
) -> dict[str, Tensor]:
    """The tensors of one layer of the child, by their names within the layer."""
    state = checkpoint.layer_state(layer)
    for subblock in SUBBLOCKS:
        variant = SubblockVariant(layer, subblock, architecture.name(layer, subblock))
        if variant.name == PARENT:
            continue
        state = {k: v for k, v in state.items() if not k.startswith(PREFIX[subblock])}
        state |= library.load(variant)
        if subblock_config(variant.name, subblock, checkpoint.shape).no_op:
            del state[NORMS[subblock]]
    return state


def child_tensors(
    checkpoint: Checkpoint, library: BlockLibrary, architecture: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the child under its checkpoint name, as stored in parent and library, a layer at a time."""
    yield EMBEDDING, checkpoint.tensor(EMBEDDING)
    for layer in range(architecture.num_layers):
        for name, tensor in sorted(layer_state(checkpoint, library, architecture, layer).items()):
            yield f"model.layers.{layer}.{name}", tensor
    yield NORM, checkpoint.tensor(NORM)
    if not checkpoint.shape.tied_embeddings:
        yield HEAD, checkpoint.tensor(HEAD)


def child_config(checkpoint: Checkpoint, blocks: list[BlockConfig]) -> dict[str, Any]:
    """The child's config.json: the parent's own, with other counts, where all layers are of one plain shape."""
    dtype = {"dtype": str(checkpoint.dtype).removeprefix("torch.")}
    heads, width = blocks[0].attention.num_kv_heads, blocks[0].ffn.intermediate_size
    if all(block == BlockConfig(AttentionConfig(heads), FFNConfig(width)) for block in blocks):
        parent = read_json(checkpoint.path / "config.json")
        kept = {k: v for k, v in parent.items() if k not in ("torch_dtype", "auto_map")}
        return kept | dtype | {"num_key_value_heads": heads, "intermediate_size": width}
    settings = checkpoint.child_config_with(blocks).to_diff_dict()
    names = {"AutoConfig": "DeciLMConfig", "AutoModelForCausalLM": "DeciLMForCausalLM"}
    return {
        **settings,
        **dtype,
        "model_type": DeciLMConfig.model_type,
        "architectures": ["DeciLMForCausalLM"],
        "auto_map": {auto: f"modeling.{name}" for auto, name in names.items()},
    }


def assemble(
    checkpoint: Checkpoint, library: BlockLibrary, architecture: Architecture, out: Path, recipe: dict[str, Any]
) -> None:
    """Write the child to `out`, whole or not at all.

    Raises:
        PuzzleError: the written child does not give the logits it should when a fresh process loads it.
    """
    with atomic(out) as folder:
        folder.mkdir()
        copy_companions(checkpoint.path, folder)
        config = child_config(checkpoint, block_configs(architecture, checkpoint.shape))
        write_json(folder / "config.json", config)
        if config["model_type"] == DeciLMConfig.model_type:
            shutil.copyfile(puzzle.modeling.__file__, folder / "modeling.py")
        write_json(folder / "puzzle_recipe.json", recipe | {"architecture": architecture.to_json()})
        save_sharded(dict(child_tensors(checkpoint, library, architecture)), folder)
        verify(folder, checkpoint, library, architecture)


def copy_companions(source: Path, folder: Path) -> None:
    """Copy what belongs to a checkpoint besides weights and config: tokenizer, chat template, generation config."""
    for file in source.iterdir():
        if any(map(file.match, COMPANIONS)) and not any(map(file.match, OWN)):
            shutil.copyfile(file, folder / file.name)


def save_sharded(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write safetensors in the hub's shard size and naming, with an index where there are several."""
    split = split_torch_state_dict_into_shards(tensors)
    for file, names in split.filename_to_tensors.items():
        save_file({n: tensors[n].contiguous() for n in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        write_json(
            folder / "model.safetensors.index.json",
            {"metadata": split.metadata, "weight_map": split.tensor_to_filename},
        )


@torch.no_grad()
def expected_logits(
    checkpoint: Checkpoint, library: BlockLibrary, architecture: Architecture, tokens: Tensor
) -> Tensor:
    """The child's logits [batch, seq, vocab] in float32, from parent and library and not from the child's file."""
    depth = Depth(checkpoint, "cpu")
    context, states = depth.context(tokens.shape[1]), depth.embed(tokens)
    for i, layer in enumerate(depth.layers()):
        norms, modules = (layer.input_layernorm, layer.post_attention_layernorm), (layer.self_attn, layer.mlp)
        for subblock, norm, module in zip(SUBBLOCKS, norms, modules, strict=True):
            variant = SubblockVariant(i, subblock, architecture.name(i, subblock))
            if variant.name != PARENT:
                config = subblock_config(variant.name, subblock, checkpoint.shape)
                module = checkpoint.subblock(subblock, config, library.load(variant), "cpu", torch.float32)
            states = states + apply(module, subblock, norm(states), context)
    return depth.norm()(states) @ depth.head_weight().T


_PROBE = """
import sys
{prepare}
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, trust_remote_code={remote}).eval()
with torch.no_grad():
    save_file({{"logits": model(torch.tensor([[{tokens}]])).logits}}, sys.argv[2])
"""
_WITHOUT_PUZZLE = 'sys.modules["puzzle"] = None'  # from here on, importing it fails as where it is not installed


def verify(folder: Path, checkpoint: Checkpoint, library: BlockLibrary, architecture: Architecture) -> None:
    """Load the written child in a fresh process and compare its logits with those it must have.

    Raises:
        PuzzleError: it does not load, or its logits differ.
    """
    count = min(32, checkpoint.shape.vocab_size)
    tokens = torch.arange(count)[None] * (checkpoint.shape.vocab_size // count)
    wanted = expected_logits(checkpoint, library, architecture, tokens)
    found = fresh_logits(folder, tokens[0].tolist())
    difference = float((wanted - found).abs().max())
    if not difference <= 1e-3 * max(1.0, float(wanted.abs().max())):
        raise PuzzleError(f"{folder.name}: the written child's logits are off by {difference:.3g} when loaded afresh")


def fresh_logits(folder: Path, tokens: list[int], without_puzzle: bool = False) -> Tensor:
    """Logits [1, seq, vocab] of a checkpoint in float32, from a new process.

    Args:
        folder: the checkpoint.
        tokens: one sequence.
        without_puzzle: load it by its own remote code where puzzle cannot be imported, instead of by puzzle.

    Raises:
        PuzzleError: it does not load there.
    """
    prepare = _WITHOUT_PUZZLE if without_puzzle else "import puzzle"
    program = _PROBE.format(prepare=prepare, remote=without_puzzle, tokens=", ".join(map(str, tokens)))
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "logits.safetensors"
        command = [sys.executable, "-c", program, str(folder.resolve()), str(file)]
        environment = os.environ | {"HF_MODULES_CACHE": scratch}  # remote code is copied there
        result = subprocess.run(command, capture_output=True, text=True, cwd=scratch, env=environment)
        if result.returncode:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise PuzzleError(f"{folder.name}: the written child does not load in a fresh process ({last})")
        return load_file(file)["logits"]
