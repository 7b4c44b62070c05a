# SPDX-License-Identifier: Apache-2.0
"""GGUF files: read back by the gguf package, and run by llama.cpp where xllamacpp is installed."""

import math
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from llama_cpp_runtime import LlamaCpp
from tiny_models import VARIATIONS, byte_tokenizer, make_parent
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from puzzle.architecture import AttentionConfig, BlockConfig, FFNConfig
from puzzle.checkpoint import Checkpoint
from puzzle.child.gguf import export
from puzzle.errors import ConfigError, OutputError, PuzzleError, UnsupportedError
from puzzle.modeling import DeciLMConfig, DeciLMForCausalLM

NO_OP, LINEAR = {"no_op": True}, {"replace_with_linear": True}
MIXED = [
    (NO_OP, {"intermediate_size": 48}),  # layers 0 and last are special in llama.cpp
    (LINEAR, NO_OP),
    ({"n_heads_in_group": 4}, {"intermediate_size": 96}),
    (NO_OP, NO_OP),
    ({"n_heads_in_group": 1}, {"intermediate_size": 40}),  # 40 is no multiple of a block of 32
    ({"n_heads_in_group": 2}, NO_OP),
    (NO_OP, {"intermediate_size": 32}),
]
LINEAR_FIRST = [(LINEAR, {"intermediate_size": 48}), ({"n_heads_in_group": 2}, NO_OP), (LINEAR, NO_OP)]
EMPTY_FIRST = [(NO_OP, NO_OP), ({"n_heads_in_group": 4}, {"intermediate_size": 64})]
PROMPT = [72, 10, 200, 31, 4, 99, 150]


def make_child(folder: Path, blocks: list[tuple[dict, dict]], **settings: object) -> Path:
    """A child with random weights large enough to matter."""
    torch.manual_seed(0)
    config = DeciLMConfig(
        **{
            "vocab_size": 257,
            "hidden_size": 64,
            "num_hidden_layers": len(blocks),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.1,
            "eos_token_id": 256,
            **settings,
        },
        block_configs=[{"attention": attention, "ffn": ffn} for attention, ffn in blocks],
    )
    model = DeciLMForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_child(tmp_path_factory.mktemp("mixed"), MIXED)


def read(file: Path) -> tuple[dict[str, Any], dict[str, gguf.ReaderTensor]]:
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def values(tensor: gguf.ReaderTensor) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())


# -------------------------------------------------------------------------------------------------- shape and tensors


def test_child_arrays(mixed: Path, tmp_path: Path) -> None:
    fields, _ = read(export(mixed, tmp_path / "child.gguf", "f32"))
    assert fields["general.architecture"] == "deci"
    assert fields["deci.attention.head_count"] == [4, 4, 4, 0, 4, 4, 0]
    assert fields["deci.attention.head_count_kv"] == [0, 0, 1, 0, 4, 2, 0]
    assert fields["deci.feed_forward_length"] == [48, 32, 96, 32, 40, 32, 32]
    assert fields["deci.block_count"] == 7
    assert fields["deci.attention.key_length"] == fields["deci.attention.value_length"] == 16
    assert fields["deci.rope.dimension_count"] == 16
    assert fields["deci.context_length"] == 128
    assert fields["deci.vocab_size"] == 257


def test_child_tensors(mixed: Path, tmp_path: Path) -> None:
    _, tensors = read(export(mixed, tmp_path / "child.gguf", "f32"))
    checkpoint = Checkpoint(mixed)
    of_layer = {i: {n.split(".", 2)[2] for n in tensors if n.startswith(f"blk.{i}.")} for i in range(7)}
    attention = {f"attn_{n}.weight" for n in ("norm", "q", "k", "v", "output")}
    linear = {"attn_norm.weight", "attn_output.weight"}
    ffn = {f"ffn_{n}.weight" for n in ("norm", "gate", "up", "down")}
    assert of_layer == dict(enumerate([linear | ffn] * 2 + [attention | ffn, ffn] + [attention | ffn] * 2 + [ffn]))
    assert torch.equal(values(tensors["token_embd.weight"]), checkpoint.tensor("model.embed_tokens.weight"))
    assert torch.equal(values(tensors["output.weight"]), checkpoint.tensor("lm_head.weight"))
    assert torch.equal(values(tensors["output_norm.weight"]), checkpoint.tensor("model.norm.weight"))
    names = {"attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj"}
    names |= {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm"}
    for ours, theirs in names.items():
        wanted = checkpoint.tensor(f"model.layers.4.{theirs}.weight")
        assert torch.equal(values(tensors[f"blk.4.{ours}.weight"]), wanted)
    matrix = checkpoint.tensor("model.layers.1.self_attn.linear_attn.weight")
    assert torch.equal(values(tensors["blk.1.attn_output.weight"]), matrix)
    for absent in ("blk.0.attn_output.weight", "blk.1.ffn_down.weight", "blk.3.ffn_up.weight", "blk.5.ffn_gate.weight"):
        assert not values(tensors[absent]).any()


def test_plain_checkpoints(any_parent: Path, tmp_path: Path) -> None:
    fields, tensors = read(export(any_parent, tmp_path / "parent.gguf", "f32"))
    checkpoint = Checkpoint(any_parent)
    arch = "qwen2" if checkpoint.config.model_type == "qwen2" else "llama"
    assert fields["general.architecture"] == arch
    assert (fields[f"{arch}.attention.head_count"], fields[f"{arch}.attention.head_count_kv"]) == (4, 2)
    assert fields[f"{arch}.feed_forward_length"] == 96
    assert ("output.weight" in tensors) != checkpoint.shape.tied_embeddings
    stored = sum(math.prod(tensor.shape) for name, tensor in tensors.items() if name != "rope_freqs.weight")
    model = AutoModelForCausalLM.from_pretrained(any_parent)
    assert stored == sum(parameter.numel() for parameter in model.parameters())


def test_rotating_as_llama_cpp_gives_the_same_attention_scores(any_parent: Path, tmp_path: Path) -> None:
    """Queries and keys of the file, rotated pair by pair as llama.cpp does it for its family, in float64 loops."""
    _, tensors = read(export(any_parent, tmp_path / "parent.gguf", "f32"))
    checkpoint = Checkpoint(any_parent)
    size, base = checkpoint.shape.head_dim, checkpoint.config.rope_parameters["rope_theta"]
    halves = checkpoint.config.model_type == "qwen2"  # pairs half a head apart; of a Llama, neighbours
    factors = values(tensors["rope_freqs.weight"]) if "rope_freqs.weight" in tensors else torch.ones(size // 2)
    x = torch.randn(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def project(name: str) -> torch.Tensor:  # [seq, head_dim] of the last head
        bias = values(tensors[f"blk.1.{name}.bias"]) if f"blk.1.{name}.bias" in tensors else 0
        return (x @ values(tensors[f"blk.1.{name}.weight"]).double().T + bias)[:, -size:]

    def rotate(vectors: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(vectors)
        for position in range(len(vectors)):
            for pair in range(size // 2):
                angle = position * base ** (-2 * pair / size) / float(factors[pair])
                first, second = (pair, pair + size // 2) if halves else (2 * pair, 2 * pair + 1)
                a, b = float(vectors[position, first]), float(vectors[position, second])
                out[position, first] = a * math.cos(angle) - b * math.sin(angle)
                out[position, second] = a * math.sin(angle) + b * math.cos(angle)
        return out

    attention = checkpoint.layer(1, dtype=torch.float64).self_attn
    cos, sin = LlamaRotaryEmbedding(checkpoint.config)(x, torch.arange(5)[None])
    query, key = (projection(x)[None, :, -size:].unsqueeze(1) for projection in (attention.q_proj, attention.k_proj))
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    wanted = query[0, 0] @ key[0, 0].T
    torch.testing.assert_close(rotate(project("attn_q")) @ rotate(project("attn_k")).T, wanted, rtol=1e-5, atol=1e-5)


def test_llama3_factors(tmp_path: Path) -> None:
    """The frequencies' divisors by the rule of Llama 3.1: long waves by 8, short ones not, a ramp between."""
    parent = make_parent(tmp_path / "parent", **VARIATIONS["llama3_rope"])
    _, tensors = read(export(parent, tmp_path / "parent.gguf", "f32"))
    wanted = []
    for pair in range(8):
        wave = 2 * math.pi * 500000.0 ** (2 * pair / 16)
        share = min(1.0, max(0.0, (64 / wave - 1) / (4 - 1)))
        wanted.append(1 / ((1 - share) / 8 + share))
    assert 1.0 in wanted
    assert 8.0 in wanted
    torch.testing.assert_close(values(tensors["rope_freqs.weight"]), torch.tensor(wanted), rtol=1e-5, atol=0)


def test_linear_rope_and_default(parent: Path, tmp_path: Path) -> None:
    assert "rope_freqs.weight" not in read(export(parent, tmp_path / "default.gguf", "f32"))[1]
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    scaled = make_parent(tmp_path / "scaled", rope_parameters=rope)
    _, tensors = read(export(scaled, tmp_path / "scaled.gguf", "f32"))
    torch.testing.assert_close(values(tensors["rope_freqs.weight"]), torch.full((8,), 4.0))


# --------------------------------------------------------------------------------------------------------- quantising


@pytest.mark.parametrize("quant", ["f32", "f16", "bf16", "q8_0"])
def test_formats(mixed: Path, tmp_path: Path, quant: str) -> None:
    fields, tensors = read(export(mixed, tmp_path / "child.gguf", quant))
    assert fields["general.file_type"] == {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}[quant]
    checkpoint = Checkpoint(mixed)
    for ours, theirs in (("ffn_up", "up_proj"), ("ffn_down", "down_proj")):
        wanted, found = checkpoint.tensor(f"model.layers.4.mlp.{theirs}.weight"), tensors[f"blk.4.{ours}.weight"]
        fits = wanted.shape[1] % 32 == 0
        assert found.tensor_type.name == (quant.upper() if fits or quant != "q8_0" else "F16")
        step = {"f32": 0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 250}[quant]
        assert (values(found) - wanted).abs().max() <= step * wanted.abs().max()
    assert {t.tensor_type.name for name, t in tensors.items() if name.endswith("norm.weight")} == {"F32"}


def test_bfloat16_is_kept_bit_by_bit(tmp_path: Path) -> None:
    parent = make_parent(tmp_path / "parent")
    AutoModelForCausalLM.from_pretrained(parent, dtype=torch.bfloat16).save_pretrained(parent)
    _, tensors = read(export(parent, tmp_path / "parent.gguf", "bf16"))
    wanted = Checkpoint(parent).tensor("model.layers.0.mlp.up_proj.weight")
    assert wanted.dtype == torch.bfloat16
    assert np.array_equal(tensors["blk.0.ffn_up.weight"].data.view(np.int16), wanted.view(torch.int16).numpy())


def test_values_beyond_float16(tmp_path: Path) -> None:
    parent = make_parent(tmp_path / "parent")
    model = AutoModelForCausalLM.from_pretrained(parent, dtype=torch.float32)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = 1e5
    model.save_pretrained(parent)
    with pytest.raises(PuzzleError, match=r"blk\.1\.ffn_up\.weight has values beyond float16; choose bf16 or f32"):
        export(parent, tmp_path / "parent.gguf", "f16")
    assert not (tmp_path / "parent.gguf").exists()
    export(parent, tmp_path / "parent.gguf", "bf16")


def test_progress_and_overwriting(parent: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    out = tmp_path / "new" / "parent.gguf"
    export(parent, out, "f32", lambda what, done, total: seen.append((done, total)))
    assert seen == [(i, len(seen) - 1) for i in range(len(seen))]
    assert export(parent, out, "q8_0") == out
    assert [file.name for file in out.parent.iterdir()] == [out.name]
    assert read(out)[0]["general.file_type"] == 7


def test_licence_and_base_model_come_from_the_card(tmp_path: Path) -> None:
    child = make_child(tmp_path / "Tiny-child", MIXED)
    card = "---\nlicense: apache-2.0\nbase_model: someone/Tiny\nlanguage: [en]\n---\n# Tiny child\n"
    (child / "README.md").write_text(card, encoding="utf-8")
    fields, _ = read(export(child, tmp_path / "child.gguf", "f32"))
    assert fields["general.license"] == "apache-2.0"
    assert fields["general.base_model.0.repo_url"].endswith("someone/Tiny")
    assert fields["general.type"] == "model"
    assert fields["general.size_label"].endswith("K")


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("blocks", "settings", "sentence"),
    [
        ([({"n_heads_in_group": 2}, NO_OP), ({"n_heads_in_group": 2}, LINEAR)], {}, "layer 1 has a linear FFN"),
        ([(LINEAR, {"intermediate_size": 32})], {}, "cannot run a model without any attention"),
        (MIXED, {"hidden_act": "gelu"}, "FFN uses silu, the model 'gelu'"),
        (
            MIXED,
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "rotary embeddings of type 'yarn'",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    tmp_path: Path, blocks: list, settings: dict, sentence: str
) -> None:
    child = make_child(tmp_path / "child", blocks, **settings)
    with pytest.raises(UnsupportedError, match=sentence):
        export(child, tmp_path / "out" / "child.gguf", "f32")
    assert not (tmp_path / "out").exists()


def test_windows_are_refused(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [BlockConfig(AttentionConfig(2, window=16), FFNConfig(32))]
    monkeypatch.setattr(Checkpoint, "blocks", property(lambda self: blocks))
    with pytest.raises(UnsupportedError, match="layer 0 attends to a window of 16 tokens"):
        export(mixed, tmp_path / "child.gguf", "f32")


def test_unknown_format_and_folder(parent: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown GGUF format 'q8'; did you mean 'q8_0'"):
        export(parent, tmp_path / "x.gguf", "q8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"is a folder; give the name of a file, such as .*child\.gguf"):
        export(parent, tmp_path, "f32")
    with pytest.raises(ConfigError, match="not a checkpoint"):
        export(tmp_path, tmp_path / "x.gguf", "f32")


def test_too_little_disk(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(OutputError, match=r"parent\.gguf: needs [0-9,]+ bytes, the disk has 1,000 left"):
        export(parent, tmp_path / "parent.gguf", "f32")
    assert not list(tmp_path.iterdir())


def test_without_the_tool(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"q4_k_m is made by .* llama-quantize, which is not on PATH"):
        export(parent, tmp_path / "parent.gguf", "q4_k_m")


def test_a_failing_tool(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "llama-quantize"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho broken: $3 >&2\nexit 3\n", encoding="utf-8")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    with pytest.raises(PuzzleError, match=r"failed with exit code 3 \(broken: Q4_K_M\)"):
        export(parent, tmp_path / "out" / "parent.gguf", "q4_k_m")
    assert not list((tmp_path / "out").iterdir())


# ---------------------------------------------------------------------------------------------------------- llama.cpp


def compare(checkpoint: Path, file: Path) -> tuple[bool, float]:
    """Whether llama.cpp goes on with the same eight tokens as transformers, and how far its log-probabilities are."""
    runtime = LlamaCpp(file)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    prompt = torch.tensor([PROMPT])
    with torch.no_grad():
        wanted = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, len(PROMPT) :]
        log_probs = model(prompt).logits[0, -1].log_softmax(-1)
    found = runtime.log_probs(PROMPT, len(log_probs), printable=64)
    return runtime.continuation(PROMPT, 8) == wanted.tolist(), float((found - log_probs).abs().max())


@pytest.mark.parametrize("settings", [*VARIATIONS.values(), {"qkv_bias": True}], ids=[*VARIATIONS, "qkv_bias"])
def test_llama_cpp_computes_the_same(tmp_path: Path, settings: dict) -> None:
    child = make_child(tmp_path / "child", MIXED, **settings)
    same, difference = compare(child, export(child, tmp_path / "child.gguf", "f32"))
    assert same
    assert difference < 1e-4


@pytest.mark.parametrize("blocks", [LINEAR_FIRST, EMPTY_FIRST], ids=["linear_first", "empty_first"])
def test_llama_cpp_with_other_first_layers(tmp_path: Path, blocks: list) -> None:
    child = make_child(tmp_path / "child", blocks)
    same, difference = compare(child, export(child, tmp_path / "child.gguf", "f32"))
    assert same
    assert difference < 1e-4


def test_llama_cpp_runs_plain_checkpoints(any_parent: Path, tmp_path: Path) -> None:
    same, difference = compare(any_parent, export(any_parent, tmp_path / "parent.gguf", "f32"))
    assert same
    assert difference < 1e-4


@pytest.mark.parametrize(("quant", "bound"), [("f16", 0.01), ("bf16", 0.1), ("q8_0", 0.3)])
def test_llama_cpp_runs_other_formats(mixed: Path, tmp_path: Path, quant: str, bound: float) -> None:
    """llama.cpp rounds the activations too; the bounds are several times what is seen."""
    _, difference = compare(mixed, export(mixed, tmp_path / "child.gguf", quant))  # type: ignore[arg-type]
    assert 0 < difference < bound


@pytest.mark.skipif(shutil.which("llama-quantize") is None, reason="llama.cpp's llama-quantize is not on PATH")
def test_llama_cpp_runs_what_its_tool_made(mixed: Path, tmp_path: Path) -> None:
    file = export(mixed, tmp_path / "child.gguf", "q4_k_m")
    assert read(file)[0]["general.file_type"] == 15
    assert [found.name for found in tmp_path.iterdir()] == ["child.gguf"]
    _, difference = compare(mixed, file)
    assert 0 < difference < 1
