# SPDX-License-Identifier: Apache-2.0
"""A checkpoint becomes a GGUF file for llama.cpp, one tensor at a time.

A plain Llama is written as architecture `llama`, a child as `deci`, llama.cpp's name for nemotron-nas, with head counts
and FFN widths as arrays over the layers. The file holds what llama.cpp computes as the child does, so two kinds of
layers are written as something equal that its graph treats well:

- a no-op FFN as one of `ZERO_WIDTH` channels of zeros, since of a layer of width 0 the attention is left out too;
- a no-op attention in layer 0 as a linear one of zeros, since llama.cpp sizes all heads by the count of layer 0.
"""

import math
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from puzzle.architecture import BlockConfig
from puzzle.checkpoint import EMBEDDING, HEAD, NORM, Checkpoint
from puzzle.child.gguf_tokenizer import add_tokenizer
from puzzle.errors import ConfigError, OutputError, PuzzleError, UnsupportedError, did_you_mean
from puzzle.modeling import DeciLMConfig
from puzzle.run import Progress, atomic, silent

Quant = Literal["f32", "f16", "bf16", "q8_0", "q4_k_m"]
FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}
"""The formats that the `gguf` package can write; the others need llama.cpp's own tool."""
TOOL = "llama-quantize"
UNQUANTISED = {torch.float16: "f16", torch.bfloat16: "bf16"}  # what the tool starts from; f32 for all other dtypes
ARCHS = {
    DeciLMConfig.model_type: gguf.MODEL_ARCH.DECI,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
}
NEIGHBOURS = (gguf.MODEL_ARCH.DECI, gguf.MODEL_ARCH.LLAMA)  # rotate neighbouring channels, see `_stored`
ROPE_TYPES = ("default", "linear", "llama3")  # frequencies that no length of text changes
ZERO_WIDTH = 32


class Entry(NamedTuple):
    """One tensor of the file; with `rotary_heads`, rows to be reordered head by head as llama.cpp's rotation wants."""

    name: str
    tensor: Tensor
    rotary_heads: int = 0


def export(checkpoint: Path, out: Path, quant: Quant, progress: Progress = silent) -> Path:
    """Write a child, or a plain checkpoint of its parent's family, as a GGUF file, whole or not at all.

    Args:
        checkpoint: a Hugging Face folder.
        out: the file to write.
        quant: how the matrices are stored; norms and biases stay float32. A matrix whose rows are no multiple of the
            quantised block of 32 is stored in float16.
        progress: called after each tensor.

    Returns:
        `out`.

    Raises:
        ConfigError: the checkpoint cannot be read, or `out` is a folder.
        UnsupportedError: llama.cpp would compute something else, or has no such tokenizer, or lacks the tool.
        OutputError: the disk has no room.
        PuzzleError: a weight is beyond float16, or llama.cpp's tool failed.
    """
    if out.is_dir():
        raise ConfigError(f"{out}: is a folder; give the name of a file, such as {out / 'child.gguf'}")
    tool = _tool(quant)
    opened = Checkpoint(checkpoint)
    check_supported(opened)
    with atomic(out) as file:
        if tool is None:
            _write(opened, file, quant, progress)
        else:
            whole = file.with_name("unquantised.gguf")
            _write(opened, whole, UNQUANTISED.get(opened.dtype, "f32"), progress)
            _run(tool, whole, file, quant)
    return out


def _tool(quant: str) -> str | None:
    """The program that makes this format, None where none is needed."""
    if quant not in get_args(Quant):
        known = get_args(Quant)
        raise ConfigError(f"unknown GGUF format {quant!r}{did_you_mean(quant, known)} (known: {', '.join(known)})")
    if quant in FILE_TYPES:
        return None
    if path := shutil.which(TOOL):
        return path
    raise UnsupportedError(
        f"{quant} is made by llama.cpp's own {TOOL}, which is not on PATH; install llama.cpp, "
        f"or choose one of {', '.join(FILE_TYPES)}"
    )


def _run(tool: str, source: Path, target: Path, quant: str) -> None:
    result = subprocess.run([tool, str(source), str(target), quant.upper()], capture_output=True, text=True)
    if result.returncode or not target.is_file():
        lines = (result.stderr + result.stdout).strip().splitlines() or ["no message"]
        raise PuzzleError(f"{tool} failed with exit code {result.returncode} ({lines[-1][:200]})")


def check_supported(checkpoint: Checkpoint) -> None:
    """Refuse what llama.cpp would load and compute otherwise, or not load.

    Raises:
        UnsupportedError: says which layer or setting it is.
    """
    path, config = checkpoint.path, checkpoint.config
    if config.model_type not in ARCHS:
        raise UnsupportedError(f"{path}: models of model_type {config.model_type!r} are not written as GGUF")
    if config.hidden_act != "silu":
        raise UnsupportedError(f"{path}: llama.cpp's FFN uses silu, the model {config.hidden_act!r}")
    rope = _rope(checkpoint)["rope_type"]
    if rope not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise UnsupportedError(f"{path}: rotary embeddings of type {rope!r} are not written as GGUF (known: {known})")
    blocks = checkpoint.blocks
    if not any(_kv_heads(block) for block in blocks):
        raise UnsupportedError(f"{path}: llama.cpp cannot run a model without any attention")
    for i, block in enumerate(blocks):
        if block.attention.window is not None:
            raise UnsupportedError(
                f"{path}: layer {i} attends to a window of {block.attention.window} tokens, "
                "which llama.cpp would ignore in this architecture"
            )
        if block.ffn.linear:
            raise UnsupportedError(f"{path}: layer {i} has a linear FFN, which llama.cpp does not know")


def _write(checkpoint: Checkpoint, file: Path, quant: str, progress: Progress) -> None:
    arch = ARCHS[checkpoint.config.model_type]
    entries = list(_entries(checkpoint, arch))
    with closing(gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])) as writer:
        _add_description(writer, checkpoint, sum(entry.tensor.numel() for entry in entries))
        _add_shape(writer, checkpoint)
        add_tokenizer(writer, checkpoint)
        writer.add_file_type(FILE_TYPES[quant])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        total = 0
        for entry in entries:
            stored = _format(entry, quant)
            shape = gguf.quant_shape_to_byte_shape(entry.tensor.shape, stored)
            writer.add_tensor_info(entry.name, shape, np.dtype(np.uint8), math.prod(shape), stored)
            total += math.prod(shape)
        if (free := shutil.disk_usage(file.parent).free) < total:
            raise OutputError(f"{file.name}: needs {total:,} bytes, the disk has {free:,} left")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, entry in enumerate(entries):
            progress("GGUF", done, len(entries))
            writer.write_tensor_data(_stored(entry, quant))
        progress("GGUF", len(entries), len(entries))


def _add_description(writer: gguf.GGUFWriter, checkpoint: Checkpoint, parameters: int) -> None:
    """What the model card and the generation config say: licence, base model, languages, sampling."""
    writer.add_type(gguf.GGUFType.MODEL)
    metadata = gguf.Metadata.load(None, checkpoint.path, None, parameters)
    metadata.size_label = metadata.size_label or gguf.size_label(parameters, parameters, 0, 0)
    metadata.set_gguf_meta_model(writer)


def _add_shape(writer: gguf.GGUFWriter, checkpoint: Checkpoint) -> None:
    config, shape, blocks = checkpoint.config, checkpoint.shape, checkpoint.blocks
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(_rope(checkpoint)["rope_theta"])
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    if isinstance(config, DeciLMConfig):
        writer.add_head_count([0 if i and b.attention.no_op else shape.num_heads for i, b in enumerate(blocks)])
        writer.add_head_count_kv([_kv_heads(block) for block in blocks])
        writer.add_feed_forward_length([ZERO_WIDTH if b.ffn.no_op else b.ffn.intermediate_size or 0 for b in blocks])
    else:
        writer.add_head_count(shape.num_heads)
        writer.add_head_count_kv(shape.num_kv_heads)
        writer.add_feed_forward_length(shape.intermediate_size)


def _kv_heads(block: BlockConfig) -> int:
    return 0 if block.attention.no_op or block.attention.linear else block.attention.num_kv_heads or 0


def _rope(checkpoint: Checkpoint) -> dict[str, Any]:
    return dict(checkpoint.config.rope_parameters or {})


def _entries(checkpoint: Checkpoint, arch: gguf.MODEL_ARCH) -> Iterator[Entry]:
    """All tensors of the file, in the model's order; nothing is read from disk before a value is looked at."""
    names = gguf.get_tensor_name_map(arch, checkpoint.shape.num_layers)

    def entry(name: str, tensor: Tensor, rotary_heads: int = 0) -> Entry:
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise UnsupportedError(f"{checkpoint.path}: llama.cpp has no place for the tensor {name!r}")
        return Entry(known, tensor, rotary_heads)

    yield entry(EMBEDDING, checkpoint.tensor(EMBEDDING))
    for layer, block in enumerate(checkpoint.blocks):
        rotary_heads = {"self_attn.q_proj": checkpoint.shape.num_heads, "self_attn.k_proj": _kv_heads(block)}
        state = checkpoint.layer_state(layer) | _zeros(layer, block, checkpoint.shape.hidden_size)
        for name, tensor in state.items():
            heads = rotary_heads.get(name.rpartition(".")[0], 0) if arch in NEIGHBOURS else 0
            yield entry(f"model.layers.{layer}.{name}", tensor, heads)
    yield entry(NORM, checkpoint.tensor(NORM))
    if not checkpoint.shape.tied_embeddings:
        yield entry(HEAD, checkpoint.tensor(HEAD))
    if _rope(checkpoint)["rope_type"] != "default":
        yield Entry("rope_freqs.weight", _rope_factors(checkpoint))


def _zeros(layer: int, block: BlockConfig, hidden: int) -> dict[str, Tensor]:
    """What stands in a layer for no-op subblocks that llama.cpp would treat wrongly, by the names of a checkpoint."""
    zero, ones = torch.zeros(1), torch.ones(hidden)
    state: dict[str, Tensor] = {}
    if block.attention.no_op and layer == 0:
        state |= {"input_layernorm.weight": ones, "self_attn.linear_attn.weight": zero.expand(hidden, hidden)}
    if block.ffn.no_op:
        wide, tall = zero.expand(ZERO_WIDTH, hidden), zero.expand(hidden, ZERO_WIDTH)
        state |= {"post_attention_layernorm.weight": ones, "mlp.gate_proj.weight": wide, "mlp.up_proj.weight": wide}
        state |= {"mlp.down_proj.weight": tall}
    return state


def _rope_factors(checkpoint: Checkpoint) -> Tensor:
    """What llama.cpp divides the rotary frequencies by, from transformers' own: [head_dim / 2]."""
    size = checkpoint.shape.head_dim
    plain = _rope(checkpoint)["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    return plain / LlamaRotaryEmbedding(checkpoint.config).inv_freq


def _format(entry: Entry, quant: str) -> gguf.GGMLQuantizationType:
    """How a tensor is stored."""
    stored = gguf.GGMLQuantizationType[quant.upper()]
    block, _ = gguf.GGML_QUANT_SIZES[stored]
    if entry.tensor.dim() == 1:
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType.F16 if entry.tensor.shape[-1] % block else stored


def _stored(entry: Entry, quant: str) -> np.ndarray:
    """The bytes of a tensor.

    transformers rotates the first half of a head's channels with the second half, llama.cpp in most architectures
    neighbours: so rows i and i + head_dim / 2 of a head become neighbours.
    """
    tensor = entry.tensor.float()
    if entry.rotary_heads:
        tensor = tensor.unflatten(0, (entry.rotary_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    stored = _format(entry, quant)
    if stored == gguf.GGMLQuantizationType.F16 and not tensor.half().isfinite().all():
        raise PuzzleError(f"{entry.name} has values beyond float16; choose bf16 or f32")
    return gguf.quantize(tensor.contiguous().numpy(), stored)
