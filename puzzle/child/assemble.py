# SPDX-License-Identifier: Apache-2.0
"""An architecture and a block library become a checkpoint, checked by a fresh process before it counts as written."""

import json
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
from puzzle.architecture import SUBBLOCKS, Architecture, BlockConfig, SubblockVariant
from puzzle.block_library import BlockLibrary
from puzzle.checkpoint import EMBEDDING, HEAD, NORM, Checkpoint
from puzzle.depth import Depth, apply
from puzzle.errors import PuzzleError
from puzzle.run import atomic, write_json
from puzzle.variants import block_configs, subblock_config

PREFIX = {"attention": "self_attn.", "ffn": "mlp."}
NORMS = {"attention": "input_layernorm.weight", "ffn": "post_attention_layernorm.weight"}
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json", "*.bin", "*.gguf", "*.pt", "*.pth", "README.md")


def layer_state(
    checkpoint: Checkpoint, library: BlockLibrary, architecture: Architecture, layer: int
) -> dict[str, Tensor]:
    """The tensors of one layer of the child, by their names within the layer."""
    state = checkpoint.layer_state(layer)
    for subblock in SUBBLOCKS:
        variant = SubblockVariant(layer, subblock, architecture.name(layer, subblock))
        if variant.name == "parent":
            continue
        state = {k: v for k, v in state.items() if not k.startswith(PREFIX[subblock])}
        state |= library.load(variant)
        if subblock_config(variant.name, subblock, checkpoint.shape).no_op:
            del state[NORMS[subblock]]
    return state


def child_tensors(
    checkpoint: Checkpoint, library: BlockLibrary, architecture: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the child under its checkpoint name, in the parent's dtype, a layer at a time."""
    dtype = checkpoint.dtype
    yield EMBEDDING, checkpoint.tensor(EMBEDDING)
    for layer in range(architecture.num_layers):
        for name, tensor in sorted(layer_state(checkpoint, library, architecture, layer).items()):
            yield f"model.layers.{layer}.{name}", tensor.to(dtype)
    yield NORM, checkpoint.tensor(NORM)
    if not checkpoint.shape.tied_embeddings:
        yield HEAD, checkpoint.tensor(HEAD)


def child_config(checkpoint: Checkpoint, blocks: list[BlockConfig]) -> dict[str, Any]:
    """The child's config.json: a plain one of the parent's family where all layers are of one plain shape."""
    first = blocks[0]
    uniform = all(b == first for b in blocks) and first.attention.num_kv_heads and first.ffn.intermediate_size
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    if uniform:
        config = type(checkpoint.config)(
            **{
                **checkpoint.family.child_settings(checkpoint.config),
                "num_key_value_heads": first.attention.num_kv_heads,
                "intermediate_size": first.ffn.intermediate_size,
            }
        )
        config.architectures = checkpoint.config.architectures
    else:
        config = checkpoint.child_config_with(blocks)
        config.architectures = ["DeciLMForCausalLM"]
        config.auto_map = {"AutoConfig": "modeling.DeciLMConfig", "AutoModelForCausalLM": "modeling.DeciLMForCausalLM"}
    return {**json.loads(config.to_json_string(use_diff=False)), "dtype": dtype} | (
        {"model_type": config.model_type} if config.model_type else {}
    )


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
        if "auto_map" in config:
            shutil.copyfile(puzzle.modeling.__file__, folder / "modeling.py")
        write_json(folder / "puzzle_recipe.json", recipe | {"architecture": architecture.to_json()})
        save_sharded(dict(child_tensors(checkpoint, library, architecture)), folder)
        verify(folder, checkpoint, library, architecture)


def copy_companions(source: Path, folder: Path) -> None:
    """Copy what belongs to a checkpoint besides weights and config: tokenizer, chat template, generation config."""
    for file in source.iterdir():
        if file.is_file() and not any(file.match(pattern) for pattern in WEIGHTS):
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
    """The child's logits [batch, seq, vocab] in float32, computed from parent and library, not from the child's file."""
    depth = Depth(checkpoint, "cpu")
    context, states = depth.context(tokens.shape[1]), depth.embed(tokens)
    for i, layer in enumerate(depth.layers()):
        for subblock in SUBBLOCKS:
            variant = SubblockVariant(i, subblock, architecture.name(i, subblock))
            config = subblock_config(variant.name, subblock, checkpoint.shape)
            module, norm = (
                (layer.self_attn, layer.input_layernorm)
                if subblock == "attention"
                else (layer.mlp, layer.post_attention_layernorm)
            )
            if variant.name != "parent":
                module = checkpoint.subblock(subblock, config, library.load(variant), "cpu", torch.float32)
            states = states + apply(module, subblock, norm(states), context)
    return depth.norm()(states) @ depth.head_weight().T


_PROBE = """
import sys, torch
from safetensors.torch import save_file
{prepare}
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, trust_remote_code={remote}).eval()
with torch.no_grad():
    save_file({{"logits": model(torch.tensor([[{tokens}]])).logits}}, sys.argv[2])
"""


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
    """Logits [1, seq, vocab] of a checkpoint, float32, from a new process: by puzzle's registration or by remote code."""
    program = _PROBE.format(
        prepare="" if without_puzzle else "import puzzle", remote=without_puzzle, tokens=", ".join(map(str, tokens))
    )
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "logits.safetensors"
        command = [sys.executable, "-c", program, str(folder.resolve()), str(file)]
        result = subprocess.run(command, capture_output=True, text=True, cwd=scratch)
        if result.returncode:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise PuzzleError(f"{folder.name}: the written child does not load in a fresh process ({last})")
        return load_file(file)["logits"]
