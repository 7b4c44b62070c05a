# SPDX-License-Identifier: Apache-2.0
"""The written child against transformers' Llama with its modules swapped by hand."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from references.naive_replacement import replaced
from safetensors.torch import load_file, save_file
from tiny_models import VARIATIONS, make_parent
from tiny_runs import MIXED, in_bfloat16, random_library
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from puzzle.architecture import Architecture
from puzzle.block_library import BlockLibrary
from puzzle.checkpoint import Checkpoint
from puzzle.child import assemble as module
from puzzle.child.assemble import assemble, fresh_logits
from puzzle.errors import PuzzleError

TOKENS = list(range(1, 250, 11))
NARROW = Architecture(("kv1",) * 3, ("ffn32",) * 3)
WHOLE = Architecture.parent(3)
RECIPE = {"seed": 7}


class Place:
    """A parent with a random library, and where its child goes."""

    def __init__(self, parent: Path, folder: Path):
        self.parent, self.out = parent, folder / "children" / "child"
        self.checkpoint = Checkpoint(parent)
        self.library = random_library(self.checkpoint, folder / "library", {*MIXED.changes, *NARROW.changes})

    def write(self, architecture: Architecture) -> Path:
        assemble(self.checkpoint, self.library, architecture, self.out, RECIPE)
        return self.out

    def by_hand(self, architecture: Architecture) -> PreTrainedModel:
        return replaced(load(self.parent), {(v.layer, v.subblock): self.library.load(v) for v in architecture.changes})


def load(folder: Path, dtype: torch.dtype | str = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(torch.tensor([TOKENS])).logits


@pytest.fixture(scope="module")
def mixed(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A child of all kinds of variants, written with its check in a fresh process."""
    complete = tmp_path_factory.mktemp("complete") / "parent"
    shutil.copytree(parent, complete)
    (complete / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (complete / "LICENSE").write_text("free")
    (complete / "README.md").write_text("of the parent")
    (complete / "old.bin").write_bytes(b"a pickle")
    (complete / "notes").mkdir()
    place = Place(complete, tmp_path_factory.mktemp("mixed"))
    place.write(MIXED)
    return place


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the written child for its check in this process, which saves seconds."""

    def loaded_here(folder: Path, tokens: list[int]) -> Tensor:
        with torch.no_grad():
            return load(folder)(torch.tensor([tokens])).logits

    monkeypatch.setattr(module, "fresh_logits", loaded_here)


def test_tensors_are_the_parents_and_the_librarys(mixed: Place) -> None:
    found, parent = load_file(mixed.out / "model.safetensors"), load_file(mixed.parent / "model.safetensors")
    own = {f"model.layers.{v.layer}.{k}": t for v in MIXED.changes for k, t in mixed.library.load(v).items()}
    replaced_names = [f"model.layers.{v.layer}.{'mlp' if v.subblock == 'ffn' else 'self_attn'}." for v in MIXED.changes]
    norms = {"model.layers.2.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight"}  # of the no-ops
    kept = {k: t for k, t in parent.items() if not k.startswith(tuple(replaced_names)) and k not in norms}
    assert found.keys() == own.keys() | kept.keys()
    for name, tensor in (own | kept).items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype


def test_logits_are_those_of_swapped_modules_in_a_fresh_process(mixed: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """By remote code and where puzzle cannot be imported; with puzzle, writing it has compared them already."""
    monkeypatch.chdir(mixed.out.parent)  # a relative path is followed though the new process works elsewhere
    wanted = logits(mixed.by_hand(MIXED))
    torch.testing.assert_close(fresh_logits(Path(mixed.out.name), TOKENS, without_puzzle=True), wanted)
    torch.testing.assert_close(logits(load(mixed.out)), wanted)


def test_without_puzzle_means_without(mixed: Place, tmp_path: Path) -> None:
    """Without its own code the child must not load there: nothing else may know of it."""
    bare = shutil.copytree(mixed.out, tmp_path / "bare")
    (bare / "modeling.py").unlink()
    config = json.loads((bare / "config.json").read_text())
    del config["auto_map"]
    (bare / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits(load(bare)), logits(load(mixed.out)))
    with pytest.raises(PuzzleError, match="bare: the written child does not load in a fresh process"):
        fresh_logits(bare, TOKENS, without_puzzle=True)


def test_the_config_is_that_of_the_format(mixed: Place) -> None:
    config = json.loads((mixed.out / "config.json").read_text())
    assert config["model_type"] == "nemotron-nas"
    assert config["architectures"] == ["DeciLMForCausalLM"]
    assert config["dtype"] == "float32"
    assert config["block_configs"] == [
        {"attention": {"n_heads_in_group": 4}, "ffn": {"intermediate_size": 32}},
        {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
        {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
    ]
    assert str(mixed.parent) not in (mixed.out / "config.json").read_text()


def test_companions_come_along_and_nothing_else(mixed: Place) -> None:
    companions = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "LICENSE"}
    for name in companions:
        assert (mixed.out / name).read_bytes() == (mixed.parent / name).read_bytes()
    own = {"config.json", "model.safetensors", "modeling.py", "puzzle_recipe.json"}
    assert {file.name for file in mixed.out.iterdir()} == companions | own
    assert [file.name for file in mixed.out.parent.iterdir()] == ["child"]
    assert json.loads((mixed.out / "puzzle_recipe.json").read_text()) == {**RECIPE, "architecture": MIXED.to_json()}
    text = "the same, with the same tokens"
    assert AutoTokenizer.from_pretrained(mixed.out)(text) == AutoTokenizer.from_pretrained(mixed.parent)(text)


def test_generation_with_a_cache_equals_that_without(mixed: Place, tmp_path: Path) -> None:
    """Also where the first layer with a cache is not the first layer."""
    late = Architecture(("no_op", "linear", "kv1"), ("linear", "ffn32", "parent"))
    library = random_library(mixed.checkpoint, tmp_path, late.changes)
    for model in (load(mixed.out), model_of(mixed.checkpoint, library, late)):
        settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 256, "eos_token_id": None}
        prompt = torch.tensor([TOKENS, TOKENS[::-1]])
        cached, whole = (model.generate(prompt, use_cache=use, **settings) for use in (True, False))
        assert cached.shape == (2, len(TOKENS) + 24)
        assert torch.equal(cached, whole)


def model_of(checkpoint: Checkpoint, library: BlockLibrary, architecture: Architecture) -> PreTrainedModel:
    config = checkpoint.child_config_with(module.block_configs(architecture, checkpoint.shape))
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(dict(module.child_tensors(checkpoint, library, architecture)))
    return model


@pytest.mark.usefixtures("near")
def test_every_variation_of_a_parent(any_parent: Path, tmp_path: Path) -> None:
    place = Place(any_parent, tmp_path)
    child = load(place.write(MIXED))
    torch.testing.assert_close(logits(child), logits(place.by_hand(MIXED)))


@pytest.mark.usefixtures("near")
def test_a_child_of_parent_variants_is_the_parent(any_parent: Path, tmp_path: Path) -> None:
    """A plain checkpoint of the parent's family with bit-identical tensors and logits, and the parent's own config."""
    place = Place(any_parent, tmp_path)
    out = place.write(WHOLE)
    assert json.loads((out / "config.json").read_text()) == json.loads((any_parent / "config.json").read_text())
    found, parent = load_file(out / "model.safetensors"), load_file(any_parent / "model.safetensors")
    assert found.keys() == parent.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in parent.items())
    child, parent = load(out), load(any_parent)
    assert type(child) is type(parent)
    assert torch.equal(logits(child), logits(parent))
    assert not (out / "modeling.py").exists()


@pytest.mark.usefixtures("near")
def test_a_uniform_narrower_child_is_of_the_parents_family(any_parent: Path, tmp_path: Path) -> None:
    place = Place(any_parent, tmp_path)
    out = place.write(NARROW)
    parent = json.loads((any_parent / "config.json").read_text())
    config = json.loads((out / "config.json").read_text())
    assert config == parent | {"num_key_value_heads": 1, "intermediate_size": 32}
    child = load(out)
    assert type(child) is type(load(any_parent))
    torch.testing.assert_close(logits(child), logits(place.by_hand(NARROW)))


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("same", ["linear", "no_op"])
def test_a_uniform_child_that_no_llama_can_be_is_not_plain(parent: Path, tmp_path: Path, same: str) -> None:
    place = Place(parent, tmp_path)
    architecture = Architecture((same,) * 3, ("ffn32",) * 3)
    place.library = random_library(place.checkpoint, tmp_path / "more", architecture.changes)
    out = place.write(architecture)
    assert json.loads((out / "config.json").read_text())["model_type"] == "nemotron-nas"
    torch.testing.assert_close(logits(load(out)), logits(place.by_hand(architecture)))


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("architecture", [MIXED, NARROW])
def test_bfloat16_stays_bfloat16(parent: Path, tmp_path: Path, architecture: Architecture) -> None:
    place = Place(in_bfloat16(parent, tmp_path / "parent"), tmp_path)
    out = place.write(architecture)
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert load(out, "auto").dtype == torch.bfloat16
    torch.testing.assert_close(logits(load(out)), logits(place.by_hand(architecture)))


@pytest.mark.usefixtures("near")
def test_tied_embeddings_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    place = Place(make_parent(tmp_path / "parent", **VARIATIONS["tied"]), tmp_path)
    for architecture in (MIXED, NARROW):
        out = place.write(architecture)
        assert "lm_head.weight" not in load_file(out / "model.safetensors")
        child = load(out)
        assert child.lm_head.weight is child.model.embed_tokens.weight


@pytest.mark.usefixtures("near")
def test_a_large_child_is_sharded(mixed: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = partial(module.split_torch_state_dict_into_shards, max_shard_size=100_000)
    monkeypatch.setattr(module, "split_torch_state_dict_into_shards", split)
    place = Place(mixed.parent, tmp_path)
    out = place.write(MIXED)
    shards = sorted(file.name for file in out.glob("*.safetensors"))
    assert len(shards) > 1 and not (out / "model.safetensors").exists()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == shards
    assert torch.equal(logits(load(out)), logits(load(mixed.out)))
    assert Checkpoint(out).blocks == module.block_configs(MIXED, place.checkpoint.shape)


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def not_a_number(file: Path) -> None:
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[3] = float("nan")
    save_file(tensors, file)


DAMAGES = {
    "missing": (Path.unlink, r"0\.ffn\.ffn32\.safetensors: cannot be read"),
    "truncated": (truncated, r"0\.ffn\.ffn32\.safetensors: cannot be read"),
    "not_a_number": (not_a_number, "logits are off by nan"),
}


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_leaves_nothing_behind(parent: Path, tmp_path: Path, damage: str) -> None:
    place = Place(parent, tmp_path)
    harm, message = DAMAGES[damage]
    harm(tmp_path / "library" / "0.ffn.ffn32.safetensors")
    with pytest.raises(PuzzleError, match=message):
        place.write(MIXED)
    assert list(place.out.parent.iterdir()) == []


@pytest.mark.usefixtures("near")
def test_a_child_written_wrongly_is_not_kept(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the child that was there before stays."""
    place = Place(parent, tmp_path)
    before = (place.write(NARROW) / "model.safetensors").read_bytes()
    save = module.save_sharded

    def wrong(tensors: dict[str, Tensor], folder: Path) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        save({**tensors, name: 1.1 * tensors[name]}, folder)

    monkeypatch.setattr(module, "save_sharded", wrong)
    with pytest.raises(PuzzleError, match=r"child: the written child's logits are off by \d"):
        place.write(MIXED)
    assert (place.out / "model.safetensors").read_bytes() == before
    assert [file.name for file in place.out.parent.iterdir()] == ["child"]
