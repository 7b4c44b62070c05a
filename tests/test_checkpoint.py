# SPDX-License-Identifier: Apache-2.0
"""Checkpoints from disk: the same logits as transformers layer by layer, and one sentence for whatever is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import byte_tokenizer, make_parent
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from puzzle.architecture import AttentionConfig, BlockConfig, FFNConfig
from puzzle.checkpoint import Checkpoint, block_entry, find, read_entry
from puzzle.depth import Depth, apply
from puzzle.errors import ConfigError, PuzzleError, UnsupportedError
from puzzle.modeling import DeciLMConfig, DeciLMForCausalLM

BLOCKS = [  # every form a subblock can have
    BlockConfig(AttentionConfig(num_kv_heads=1), FFNConfig(no_op=True)),
    BlockConfig(AttentionConfig(no_op=True), FFNConfig(intermediate_size=32)),
    BlockConfig(AttentionConfig(linear=True), FFNConfig(linear=True)),
]


@torch.no_grad()
def walk(checkpoint: Checkpoint, tokens: Tensor) -> Tensor:
    """Logits [batch, seq, vocab] by walking the depth, both halves of each layer apart."""
    depth = Depth(checkpoint, "cpu")
    states, context = depth.embed(tokens), depth.context(tokens.shape[1])
    for layer in depth.layers():
        for subblock, module, norm in (
            ("attention", layer.self_attn, "input_layernorm"),
            ("ffn", layer.mlp, "post_attention_layernorm"),
        ):
            normed = getattr(layer, norm)(states) if module is not None else states
            states = states + apply(module, subblock, normed, context)
    return depth.norm()(states) @ depth.head_weight().T


@torch.no_grad()
def whole(folder: Path, tokens: Tensor) -> Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits


def make_child(folder: Path, parent: Path) -> Path:
    torch.manual_seed(0)
    DeciLMForCausalLM(Checkpoint(parent).child_config_with(BLOCKS)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------------------------- reading


def test_the_depth_walk_is_the_model_to_the_bit(any_parent: Path, tokens: Tensor) -> None:
    assert torch.equal(walk(Checkpoint(any_parent), tokens), whole(any_parent, tokens))


@pytest.mark.parametrize("seq", [1, 32])
def test_contexts_of_several_lengths(parent: Path, tokens: Tensor, seq: int) -> None:
    depth = Depth(Checkpoint(parent), "cpu")
    depth.context(16)
    cos, sin = depth.context(seq)["position_embeddings"]
    assert cos.shape == sin.shape == (1, seq, 16)
    assert torch.equal(walk(Checkpoint(parent), tokens[:, :seq]), whole(parent, tokens[:, :seq]))


def test_whole_layers(any_parent: Path, tokens: Tensor) -> None:
    """A layer as a module gives the hidden states that transformers records after it."""
    model = AutoModelForCausalLM.from_pretrained(any_parent, dtype=torch.float32)
    wanted = model(tokens, output_hidden_states=True).hidden_states
    depth = Depth(Checkpoint(any_parent), "cpu")
    states = depth.embed(tokens)
    for i, layer in enumerate(depth.layers()):
        assert torch.equal(states, wanted[i])
        assert not any(parameter.requires_grad for parameter in layer.parameters()) and not layer.training
        states = layer(states, **depth.context(tokens.shape[1]))
    assert torch.equal(depth.norm()(states), wanted[-1])


def test_a_child_is_read_as_well(parent: Path, tokens: Tensor, tmp_path: Path) -> None:
    folder = make_child(tmp_path, parent)
    checkpoint = Checkpoint(folder)
    assert checkpoint.blocks == BLOCKS
    model = DeciLMForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(walk(checkpoint, tokens), model(tokens).logits)
    assert len(checkpoint.tokenizer()) == 257


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_sharded(name: str, tokens: Tensor, tmp_path: Path) -> None:
    single = make_parent(tmp_path / "single", tie_word_embeddings=name == "tied")
    model = LlamaForCausalLM.from_pretrained(single)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert not (tmp_path / "sharded" / "model.safetensors").exists()
    assert torch.equal(walk(Checkpoint(tmp_path / "sharded"), tokens), whole(single, tokens))
    assert Checkpoint(tmp_path / "sharded").fingerprint != Checkpoint(single).fingerprint


def test_bfloat16(parent: Path, tokens: Tensor, tmp_path: Path) -> None:
    LlamaForCausalLM.from_pretrained(parent).bfloat16().save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.layer(0).self_attn.q_proj.weight.dtype == torch.float32
    assert checkpoint.layer(0, dtype=torch.bfloat16).self_attn.q_proj.weight.dtype == torch.bfloat16
    assert torch.equal(walk(checkpoint, tokens), whole(tmp_path, tokens))


def test_a_resized_vocabulary(parent: Path, tokens: Tensor, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(parent)
    model.resize_token_embeddings(320)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.shape.vocab_size == 320
    assert len(checkpoint.tokenizer()) == 257
    assert torch.equal(walk(checkpoint, tokens), whole(tmp_path, tokens))


def test_old_rotary_tables_and_repeated_heads_are_skipped(tokens: Tensor, tmp_path: Path) -> None:
    """Llama 2 checkpoints carry `inv_freq`; some tied ones repeat the embedding as head."""
    folder = make_parent(tmp_path, tie_word_embeddings=True)
    wanted = whole(folder, tokens)
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint(folder)
    assert torch.equal(walk(checkpoint, tokens), wanted)
    assert set(checkpoint.layer_state(0)) == set(checkpoint.layer(0).state_dict())


def test_fingerprints_follow_the_content(tmp_path: Path) -> None:
    folder = make_parent(tmp_path)
    first = Checkpoint(folder).fingerprint
    assert Checkpoint(folder).fingerprint == first
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"][3] += 1
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    second = Checkpoint(folder).fingerprint
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert len({first, second, Checkpoint(folder).fingerprint}) == 3


def test_block_entries_round_trip(parent: Path) -> None:
    shape = Checkpoint(parent).shape
    windowed = BlockConfig(AttentionConfig(2, window=64, sink_tokens=4), FFNConfig(intermediate_size=96))
    for block in (*BLOCKS, windowed, Checkpoint(parent).parent_block):
        entry = block_entry(block, shape.num_heads)
        assert read_entry(json.loads(json.dumps(entry)), shape) == block
    assert block_entry(BLOCKS[2], 4) == {
        "attention": {"replace_with_linear": True},
        "ffn": {"replace_with_linear": True},
    }
    assert block_entry(windowed, 4)["attention"] == {"n_heads_in_group": 2, "window_length": 64, "num_sink_tokens": 4}
    assert read_entry({"attention": {}, "ffn": {}}, shape) == Checkpoint(parent).parent_block


# -------------------------------------------------------------------------------------------------------- what is wrong


def edit_config(**changes: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return damage


def edit_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", {"format": "pt"})

    return damage


def write(name: str, content: str | bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def index(weight_map: object) -> Callable[[Path], None]:
    return write("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


def shorten(share: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])

    return damage


def only_pickles(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


UP, BIAS = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"
ENTRY = {"attention": {}, "ffn": {}}
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "not a checkpoint (it has no config.json)"),
    "empty config": (write("config.json", ""), "config.json: no model can be made from it"),
    "broken config": (write("config.json", '{"model_type": "llama",'), "config.json: no model can be made from it"),
    "a config of bytes": (write("config.json", b"\xff\xfe\x00"), "config.json: no model can be made from it"),
    "a list for a config": (write("config.json", "[]"), "config.json: no model can be made from it"),
    "text for a number": (edit_config(hidden_size="64"), "config.json: no model can be made from it"),
    "no heads": (edit_config(num_attention_heads=0), "config.json: no model can be made from it"),
    "no KV heads": (edit_config(num_key_value_heads=0), "config.json: no model can be made from it"),
    "no layers": (edit_config(num_hidden_layers=-1), "config.json: no model can be made from it"),
    "heads that do not fit": (edit_config(num_attention_heads=3), "parent"),  # the words depend on transformers
    "unknown activation": (edit_config(hidden_act="x"), "config.json: no model can be made from it ('x')"),
    "unknown rope": (edit_config(rope_parameters={"rope_type": "x"}), "no model can be made from it ('x')"),
    "fewer layers": (edit_config(num_hidden_layers=2), "'model.layers.2.input_layernorm.weight' has no place"),
    "more layers": (edit_config(num_hidden_layers=4), "'model.layers.3.input_layernorm.weight' is missing"),
    "wrong vocabulary": (edit_config(vocab_size=300), "has shape [257, 64], the config says [300, 64]"),
    "bias said": (edit_config(attention_bias=True), f"'{BIAS}' is missing"),
    "bias not said": (edit_tensors(lambda s: s.update({BIAS: torch.ones(64)})), f"'{BIAS}' has no place"),
    "blocks missing": (edit_config(model_type="nemotron-nas", block_configs=[ENTRY]), "1 block_configs for 3 layers"),
    "blocks empty": (edit_config(model_type="nemotron-nas", block_configs=[{}] * 3), "no model can be made from it"),
    "tied by mistake": (edit_config(tie_word_embeddings=True), "ties 'lm_head.weight' to 'model.embed_tokens.weight'"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors here"),
    "pickles": (only_pickles, "no model.safetensors here (pickled weights are not read)"),
    "truncated": (shorten(0.9), "the weights cannot be read"),
    "truncated header": (shorten(0.001), "the weights cannot be read"),
    "empty weights": (write("model.safetensors", b""), "the weights cannot be read"),
    "missing tensor": (edit_tensors(lambda s: s.pop(UP)), f"the tensor '{UP}' is missing"),
    "wrong shape": (edit_tensors(lambda s: s.update({UP: torch.zeros(95, 64)})), f"'{UP}' has shape [95, 64], the"),
    "broken index": (write("model.safetensors.index.json", "{"), "the weights cannot be read"),
    "index without map": (write("model.safetensors.index.json", "{}"), "the weights cannot be read"),
    "index of a list": (index(["x"]), "the weights cannot be read"),
    "index of numbers": (index({UP: 3}), "the weights cannot be read"),
    "outside": (index({UP: "../x.safetensors"}), "the shard '../x.safetensors' lies outside the checkpoint"),
    "outside from the root": (index({UP: "/etc/passwd"}), "the shard '/etc/passwd' lies outside the checkpoint"),
    "missing shard": (index({UP: "model-1.safetensors"}), "is missing"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_one_sentence(damage: str, tmp_path: Path) -> None:
    change, words = DAMAGE[damage]
    folder = make_parent(tmp_path / "parent")
    change(folder)
    with pytest.raises(ConfigError) as caught:
        Checkpoint(folder)
    message = str(caught.value)
    assert words in message and str(folder) in message
    assert "\n" not in message and len(message) < 400


def test_a_shard_that_is_missing_or_lacks_a_tensor(parent: Path, tmp_path: Path) -> None:
    LlamaForCausalLM.from_pretrained(parent).save_pretrained(tmp_path, max_shard_size="60KB")
    file = tmp_path / "model.safetensors.index.json"
    names = json.loads(file.read_text())["weight_map"]
    other = next(shard for shard in names.values() if shard != names[UP])
    file.write_text(json.dumps({"weight_map": {**names, UP: other}}))
    with pytest.raises(ConfigError, match=f"{other}: the tensor '{UP}' cannot be read"):
        Checkpoint(tmp_path)
    file.write_text(json.dumps({"weight_map": names}))
    (tmp_path / other).unlink()
    with pytest.raises(ConfigError, match="the weights cannot be read"):
        Checkpoint(tmp_path)


def test_quantised_weights_are_not_read_as_if_they_were_not(tmp_path: Path) -> None:
    folder = make_parent(tmp_path)
    edit_tensors(lambda s: s.update({UP: s[UP].to(torch.float8_e4m3fn)}))(folder)
    with pytest.raises(UnsupportedError, match=f"'{UP}' is F8_E4M3; quantised weights are not read"):
        Checkpoint(folder)


@pytest.mark.parametrize("kind", ["gemma3", "no such type", None])
def test_other_model_types(kind: str | None, tmp_path: Path) -> None:
    folder = make_parent(tmp_path)
    edit_config(model_type=kind)(folder)
    with pytest.raises(
        UnsupportedError, match=rf"model_type {kind!r} are not supported \(supported: llama, mistral, qwen2\)"
    ) as caught:
        Checkpoint(folder)
    assert str(folder) in str(caught.value)


def test_a_real_checkpoint_of_another_family(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=20)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="'gpt2'"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("damage", ["absent", "empty", "broken"])
def test_tokenizers_that_cannot_be_loaded(damage: str, tmp_path: Path) -> None:
    folder = make_parent(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = folder / name
        file.unlink() if damage == "absent" else file.write_text("" if damage == "empty" else "{")
    checkpoint = Checkpoint(folder)
    with pytest.raises(ConfigError, match="the tokenizer cannot be loaded") as caught:
        checkpoint.tokenizer()
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_a_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    folder = make_parent(tmp_path, vocab_size=300)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<{i}>" for i in range(50)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match="the tokenizer has 307 tokens, the model 300"):
        Checkpoint(folder).tokenizer()


# ------------------------------------------------------------------------------------------------------------- finding


def test_local_folders(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(str(parent)) == parent
    monkeypatch.chdir(parent.parent)
    assert find(parent.name) == Path(parent.name)
    (tmp_path / "file").write_text("")
    for name in (str(tmp_path / "nowhere"), "./nowhere", "~/nowhere", "a/b/c", str(tmp_path / "file")):
        with pytest.raises(ConfigError, match="no checkpoint folder there"):
            find(name)


@pytest.mark.parametrize("name", ["someone/llama-1b", "llama-1b", "not a name!"])
def test_hub_names_without_a_network(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PuzzleError, match="no such folder, and the hub does not give it") as caught:
        find(name)
    assert str(caught.value).startswith(name) and "\n" not in str(caught.value)


def test_a_config_of_a_child_with_defaults(parent: Path) -> None:
    """`child_config` names each layer's shape, so that it says the same without the parent."""
    config = Checkpoint(parent).child_config
    assert isinstance(config, DeciLMConfig)
    assert config.block_configs == [{"attention": {"n_heads_in_group": 2}, "ffn": {"intermediate_size": 96}}] * 3
