# SPDX-License-Identifier: Apache-2.0
"""The library stage on a run directory: what it writes, resume after a kill, and what makes it work again."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_runs import SEQ, SPACE, in_bfloat16, tiny_config, tiny_run, write_split

from puzzle.architecture import SubblockVariant
from puzzle.block_library import BlockLibrary
from puzzle.checkpoint import Checkpoint
from puzzle.config import RunConfig
from puzzle.data import load_split
from puzzle.depth import Depth, apply
from puzzle.errors import ConfigError
from puzzle.library import build as library
from puzzle.library import importance
from puzzle.library.build import build
from puzzle.library.initialise import subblock_io
from puzzle.run import Run, silent
from puzzle.variants import subblock_config

STORED = ("attention.kv1", "attention.linear", "ffn.ffn32", "ffn.linear")  # of SPACE, in each layer


def contents(run: Run) -> dict[str, bytes]:
    """All files of the library, and the importance; not what a killed process was still writing."""
    files = [file for folder in ("library", "activations") for file in (run.path / folder).iterdir()]
    return {file.name: file.read_bytes() for file in files if not file.name.startswith(".")}


@pytest.fixture(scope="module")
def unbroken(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = tiny_run(tmp_path_factory.mktemp("runs") / "unbroken", tiny_config(parent))
    build(run, silent)
    return run


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the variants that are made, and "importance" where it is measured."""
    made: list[str] = []
    save, measure = BlockLibrary.save, importance.measure

    def noted_save(self: BlockLibrary, variant: SubblockVariant, *args: Any) -> None:
        made.append(variant.key)
        save(self, variant, *args)

    def noted_measure(*args: Any, **options: Any) -> importance.Importance:
        made.append("importance")
        return measure(*args, **options)

    monkeypatch.setattr(BlockLibrary, "save", noted_save)
    monkeypatch.setattr(importance, "measure", noted_measure)
    return made


def test_one_file_a_variant_with_the_replaced_weights_alone(unbroken: Run) -> None:
    keys = {f"{layer}.{name}" for layer in range(3) for name in STORED}
    files = {file.stem for file in (unbroken.path / "library").glob("*.safetensors")}
    assert files == keys
    kv1 = load_file(unbroken.path / "library" / "1.attention.kv1.safetensors")
    assert kv1.keys() == {f"self_attn.{p}_proj.weight" for p in "qkvo"}
    assert kv1["self_attn.k_proj.weight"].shape == (16, 64)
    assert load_file(unbroken.path / "library" / "1.ffn.linear.safetensors").keys() == {"mlp.linear_mlp.weight"}
    index = pd.read_parquet(unbroken.path / "library" / "index.parquet")
    assert {f"{r.layer}.{r.subblock}.{r.variant}" for r in index.itertuples()} == keys
    assert not list((unbroken.path / "library").glob(".*"))


def test_the_record_tells_the_truth(unbroken: Run) -> None:
    """Errors fall from start to closed form to distilled, and the last is that of the stored weights."""
    index = pd.read_parquet(unbroken.path / "library" / "index.parquet")
    assert (index.error_closed_form <= index.error_start).all()
    assert (index.error <= index.error_closed_form).all()
    assert (index.tokens == 12 * SEQ).all()
    assert set(index.state) <= {"start", "closed form", "distilled"}
    assert set(index.kind) == {"grouped_query", "ffn_width", "linear"}

    checkpoint = Checkpoint(Path(unbroken.config.parent))
    depth, store = Depth(checkpoint, "cpu"), BlockLibrary(unbroken.path / "library")
    context, states = depth.context(SEQ), depth.embed(load_split(unbroken.path / "data", "calibration"))
    with torch.no_grad():
        for i, layer in enumerate(depth.layers()):
            io = subblock_io(layer, states[:: library.HELD_OUT], context)
            for row in index[index.layer == i].itertuples():
                config = subblock_config(row.variant, row.subblock, checkpoint.shape)
                state = store.load(SubblockVariant(i, row.subblock, row.variant))
                module = checkpoint.subblock(row.subblock, config, state, "cpu", torch.float32)
                error = io[row.subblock].error(lambda x, m=module, r=row: apply(m, r.subblock, x, context), 2)
                assert row.error == pytest.approx(error, rel=1e-4)
            states = layer(states, **context)


class Killed(Exception):
    pass


@pytest.mark.parametrize("saves", [0, 1, 3, 4, 6, 11])
def test_a_broken_run_continues_to_the_same_files(
    unbroken: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: int
) -> None:
    """Four variants a layer: killed before any, within a layer, and between layers."""
    run = tiny_run(tmp_path / "run", unbroken.config)
    save, done = BlockLibrary.save, []

    def killing_save(self: BlockLibrary, variant: SubblockVariant, *args: Any) -> None:
        if len(done) == saves:
            raise Killed
        done.append(variant.key)
        save(self, variant, *args)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(BlockLibrary, "save", killing_save)
        build(run, silent)
    made = watch(monkeypatch)
    build(run, silent)
    assert set(made).isdisjoint(done) and len(made) == 12 - saves  # what was there is not made again
    assert contents(run) == contents(unbroken)


KILLER = """
import os, signal, sys
from pathlib import Path
from safetensors import torch as st
from puzzle import block_library
from puzzle.library.build import build
from puzzle.run import Run, silent
write, left = block_library.save_file, int(sys.argv[2])
def dying(tensors, path, metadata=None):
    global left
    write(tensors, path, metadata)
    if left == 0:
        with open(path, "r+b") as file:
            file.truncate(os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
block_library.save_file = dying
build(Run.open(Path(sys.argv[1])), silent)
"""


def test_killed_while_a_file_is_written(unbroken: Run, tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", unbroken.config)
    command = [sys.executable, "-c", KILLER, str(run.path), "5"]
    result = subprocess.run(command, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == -signal.SIGKILL, result.stderr.decode()
    assert len(list((run.path / "library").glob("*.safetensors"))) == 5
    build(run, silent)
    assert contents(run) == contents(unbroken)


def test_done_is_done(unbroken: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before, made = contents(unbroken), watch(monkeypatch)
    build(unbroken, silent)
    assert not made
    assert contents(unbroken) == before


@pytest.fixture
def copied(unbroken: Run, tmp_path: Path) -> Path:
    return shutil.copytree(unbroken.path, tmp_path / "copy")


def changed(config: RunConfig, **settings: Any) -> RunConfig:
    return RunConfig(**{**config.model_dump(), **settings})


def test_a_new_variant_is_made_and_the_others_are_not(
    unbroken: Run, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, made = contents(unbroken), watch(monkeypatch)
    wider = changed(unbroken.config, search_space={**SPACE, "ffn": [*SPACE["ffn"], "ffn64"]})
    run = tiny_run(copied, wider)
    build(run, silent)
    assert made == [f"{layer}.ffn.ffn64" for layer in range(3)]
    after = contents(run)
    assert {name: after[name] for name in before if name != "index.parquet"} == {
        name: data for name, data in before.items() if name != "index.parquet"
    }
    assert len(pd.read_parquet(run.path / "library" / "index.parquet")) == 15


def test_a_variant_does_not_depend_on_its_company(unbroken: Run, tmp_path: Path) -> None:
    """Made alone, in one layer, it is bit for bit the same."""
    rule = {"layers": [2], "attention": ["kv1"]}
    space = {"attention": ["parent"], "ffn": ["parent"], "rules": [rule]}
    run = tiny_run(tmp_path / "run", changed(unbroken.config, search_space=space))
    build(run, silent)
    name = "2.attention.kv1.safetensors"
    assert contents(run)[name] == contents(unbroken)[name]
    assert len(list((run.path / "library").glob("*.safetensors"))) == 1


CHANGES = {
    "seed": ({"seed": 1}, True),
    "compute_dtype": ({"compute_dtype": "bfloat16"}, True),
    "importance": ({"library": {"importance": "contribution", "bld": {"tokens": 192, "batch_tokens": 32}}}, True),
    "ridge": ({"library": {"ridge": [0.5], "bld": {"tokens": 192, "batch_tokens": 32}}}, False),
    "bld": ({"library": {"bld": {"tokens": 192, "batch_tokens": 32, "learning_rate": 0.002}}}, False),
}


@pytest.mark.parametrize("key", CHANGES)
def test_what_the_weights_depend_on_makes_them_anew(
    unbroken: Run, copied: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """And the importance only where it is touched itself."""
    settings, measured = CHANGES[key]
    made = watch(monkeypatch)
    build(tiny_run(copied, changed(unbroken.config, **settings)), silent)
    assert ("importance" in made) == measured
    assert len([key for key in made if key != "importance"]) == 12


UNTOUCHED = {
    "targets": {"targets": ["params<=0.5x"]},
    "healing": {"healing": {"tokens": 64}},
    "name": {"name": "other"},
}


@pytest.mark.parametrize("key", UNTOUCHED)
def test_what_they_do_not_depend_on_does_not(
    unbroken: Run, copied: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    made = watch(monkeypatch)
    build(tiny_run(copied, changed(unbroken.config, **UNTOUCHED[key])), silent)
    assert not made


@pytest.mark.parametrize(("split", "first", "makes"), [("training", 0, 12), ("training", 14, 0), ("scoring", 0, 0)])
def test_only_the_tokens_that_are_read_count(
    unbroken: Run, copied: Path, monkeypatch: pytest.MonkeyPatch, split: str, first: int, makes: int
) -> None:
    """Local distillation reads 12 of the 16 training sequences; healing may read more."""
    tokens = load_split(copied / "data", split)
    tokens[first, 0] = (tokens[first, 0] + 1) % 257
    write_split(copied / "data", split, tokens)
    made = watch(monkeypatch)
    build(tiny_run(copied, unbroken.config), silent)
    assert len(made) == makes


def test_a_damaged_file_is_made_again(unbroken: Run, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = copied / "library" / "1.ffn.ffn32.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    made = watch(monkeypatch)
    run = tiny_run(copied, unbroken.config)
    build(run, silent)
    assert made == ["1.ffn.ffn32"]
    assert contents(run) == contents(unbroken)


def test_closed_forms_alone(parent: Path, tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", tiny_config(parent, library={"bld": {"tokens": 0}}))
    build(run, silent)
    index = pd.read_parquet(run.path / "library" / "index.parquet")
    assert (index.tokens == 0).all()
    assert (index.error == index.error_closed_form).all()


def test_files_are_in_the_parents_dtype_and_carry_their_record(parent: Path, tmp_path: Path) -> None:
    folder = in_bfloat16(parent, tmp_path / "parent")
    run = tiny_run(tmp_path / "run", tiny_config(folder))
    build(run, silent)
    assert Checkpoint(folder).dtype == torch.bfloat16
    with safe_open(run.path / "library" / "0.ffn.ffn32.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
        record = json.loads(file.metadata()["record"])
    assert record["kind"] == "ffn_width"


def test_every_variation_of_a_parent(any_parent: Path, tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", tiny_config(any_parent))
    build(run, silent)
    index = pd.read_parquet(run.path / "library" / "index.parquet")
    assert len(index) == 12
    assert (index.error <= index.error_start).all()  # a linear one may find nothing better than zero
    assert (index.error < index.error_start)[index.variant != "linear"].all()


def test_one_calibration_sequence_is_too_few(parent: Path, tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", tiny_config(parent), sequences=1)
    with pytest.raises(ConfigError, match=r"data\.calibration_tokens: 16 tokens are one sequence.*at least 32"):
        build(run, silent)
    assert not (run.path / "library").exists()
