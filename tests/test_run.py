# SPDX-License-Identifier: Apache-2.0
"""The run directory: writes that are whole or absent, fingerprints that know what depends on what, one owner."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from puzzle.architecture import fingerprint
from puzzle.config import RunConfig, validate
from puzzle.errors import ConfigError, OutputError, PuzzleError
from puzzle.run import Run, Stage, atomic, cache_folder, disk_error, read_json, silent, write_json

DATA = {"parent": "p", "search_space": {"attention": ["kv1"], "ffn": ["50%"]}, "targets": ["throughput>=1.5x"]}


def config(**changes: Any) -> RunConfig:
    return validate(RunConfig, {**DATA, **changes}, "here")


def content(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


# ------------------------------------------------------------------------------------------------------- atomic writes


@pytest.mark.parametrize("before", [None, "old"])
def test_a_file_is_written_whole(before: str | None, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file.txt"
    if before:
        target.parent.mkdir()
        target.write_text(before)
    with atomic(target) as temporary:
        temporary.write_text("new")
        assert (target.read_text() if target.exists() else None) == before
    assert content(tmp_path) == {"deep/file.txt": "new"}


def test_a_folder_is_swapped_whole(tmp_path: Path) -> None:
    target = tmp_path / "child"
    for files in ({"a": "1", "b": "2"}, {"b": "3"}):
        with atomic(target) as temporary:
            temporary.mkdir()
            for name, text in files.items():
                (temporary / name).write_text(text)
        assert content(target) == files
    assert [p.name for p in tmp_path.iterdir()] == ["child"]


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_what_was_there(kind: str, error: type[BaseException], tmp_path: Path) -> None:
    target = tmp_path / "out"
    if kind == "folder":
        target.mkdir()
    old = target / "weights" if kind == "folder" else target
    old.write_text("old")
    with pytest.raises(error):
        with atomic(target) as temporary:
            if kind == "folder":
                temporary.mkdir()
                temporary = temporary / "weights"
            temporary.write_text("ne")
            raise error
    assert old.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_nothing_written_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "weights").write_text("old")
    with pytest.raises(FileNotFoundError):
        with atomic(tmp_path / "out"):
            pass
    assert content(tmp_path) == {"out/weights": "old"}


WRITER = """
import sys, time
from pathlib import Path
from puzzle.run import atomic
with atomic(Path(sys.argv[1])) as temporary:
    if sys.argv[2] == "folder":
        temporary.mkdir()
        temporary = temporary / "weights"
    with temporary.open("w") as file:
        file.write("half")
        file.flush()
        print("writing", flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_kill_9_leaves_what_was_there(kind: str, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", config())
    target = run.path / "children" / "out"
    old = target / "weights" if kind == "folder" else target
    old.parent.mkdir(parents=True)
    old.write_text("old")
    writer = subprocess.Popen([sys.executable, "-c", WRITER, target, kind], stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"writing\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert old.read_text() == "old"
    assert "half" in content(tmp_path).values()  # what it left beside, until the next owner of the run clears it away
    with run.lock():
        assert set(content(run.path)) == {"run.yaml", ".lock", str(old.relative_to(run.path))}


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 64 KiB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True)
    if mount.returncode:
        pytest.skip("this user cannot mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill_text(path: Path) -> None:
    path.write_text("x" * 200_000)


def fill_safetensors(path: Path) -> None:
    save_file({"x": torch.zeros(50_000)}, path)


def fill_parquet(path: Path) -> None:
    import numpy as np
    import pandas as pd

    pd.DataFrame({"x": np.random.default_rng(0).random(50_000)}).to_parquet(path)


@pytest.mark.parametrize("fill", [fill_text, fill_safetensors, fill_parquet])
def test_a_full_disk(fill: Any, small_disk: Path) -> None:
    target = small_disk / "out"
    target.write_text("old")
    with pytest.raises(OutputError, match="out: the disk is full; free some space and run the same command again"):
        with atomic(target) as temporary:
            fill(temporary)
    assert content(small_disk) == {"out": "old"}


def test_a_full_disk_without_a_disk(tmp_path: Path) -> None:
    """The same where no file system can be mounted: each way in which libraries report it is recognised."""
    for error in (
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, "quota"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ):
        with pytest.raises(OutputError, match="the disk is full") as caught:
            with atomic(tmp_path / "out") as temporary:
                temporary.write_text("half")
                raise error
        assert caught.value.exit_code == 2
    assert not list(tmp_path.iterdir())
    assert disk_error(ValueError("something else"), tmp_path) is None


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, words in ((tmp_path / "file" / "run", "cannot be written"), (tmp_path / ("x" * 300) / "y", "too long")):
        with pytest.raises(OutputError, match=words):
            write_json(path, {})
    with pytest.raises(OutputError, match="cannot be written"):
        Run.create(tmp_path / "file" / "run", config())
    assert "Permission denied" in str(disk_error(PermissionError(errno.EACCES, "x"), tmp_path))


def test_json_round_trips_and_refuses_what_is_no_number(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_json(file, {"a": [1, 2.5, "ü"]})
    assert read_json(file) == {"a": [1, 2.5, "ü"]}
    with pytest.raises(ValueError):
        write_json(file, {"loss": float("nan")})
    assert read_json(file) == {"a": [1, 2.5, "ü"]}
    file.write_text("{")
    for bad in (file, tmp_path / "absent.json"):
        with pytest.raises(ConfigError, match=f"{bad.name}: cannot be read as JSON"):
            read_json(bad)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PUZZLE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "puzzle"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/puzzle")
    monkeypatch.setenv("PUZZLE_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"


# ---------------------------------------------------------------------------------------------------- the run's folder


def test_a_run_is_made_and_opened_again(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", config(seed=3, name="small"))
    assert Run.open(tmp_path / "run").config == run.config
    assert run.child == tmp_path / "run" / "children" / "small"
    assert run.unhealed.parent == run.child.parent != run.unhealed
    Run.create(tmp_path / "run", config(seed=3, name="small"))  # the same again continues


def test_another_config_is_refused_by_key(tmp_path: Path) -> None:
    Run.create(tmp_path / "run", config())
    for other, words in (
        (config(seed=7), "seed is 0 there and 7 here"),
        (config(healing={"tokens": 9}), "healing.tokens is 131072 there and 9 here"),
        (config(targets=["params<=0.5x"]), "targets is ['throughput>=1.5x'] there and ['params<=0.5x'] here"),
    ):
        with pytest.raises(ConfigError) as caught:
            Run.create(tmp_path / "run", other)
        assert words in str(caught.value) and "--update" in str(caught.value)
        assert Run.open(tmp_path / "run").config == config()
    Run.create(tmp_path / "run", config(seed=7), update=True)
    assert Run.open(tmp_path / "run").config.seed == 7


def test_another_machine_is_no_other_run(tmp_path: Path) -> None:
    Run.create(tmp_path / "run", config())
    Run.create(tmp_path / "run", config(machine={"threads": 1}))
    assert Run.open(tmp_path / "run").config.machine.threads == 1


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run here"):
        Run.open(tmp_path)
    (tmp_path / "thesis.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(ConfigError, match="exists and is not a run"):
            Run.create(path, config())
    assert content(tmp_path) == {"thesis.txt": "mine"}
    (tmp_path / "empty").mkdir()
    Run.create(tmp_path / "empty", config())
    (tmp_path / "empty" / "run.yaml").write_text("parent: p\nsedd: 1\n")
    with pytest.raises(ConfigError, match=r"run.yaml"):
        Run.open(tmp_path / "empty")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", config())
    program = (
        "import sys; from pathlib import Path; from puzzle.run import Run\n"
        "with Run.open(Path(sys.argv[1])).lock(): print('mine')"
    )
    with run.lock():
        second = subprocess.run([sys.executable, "-c", program, run.path], capture_output=True, text=True)
        assert "PuzzleError" in second.stderr and "another puzzle process is working on this run" in second.stderr
    third = subprocess.run([sys.executable, "-c", program, run.path], capture_output=True, text=True)
    assert third.stdout == "mine\n", third.stderr


def test_a_killed_owner_frees_the_run(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", config())
    program = (
        "import sys, time; from pathlib import Path; from puzzle.run import Run\n"
        "with Run.open(Path(sys.argv[1])).lock():\n"
        "    print('mine', flush=True)\n"
        "    time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program, run.path], stdout=subprocess.PIPE)
    assert owner.stdout.readline() == b"mine\n"
    with pytest.raises(PuzzleError), run.lock():
        pass
    owner.kill()
    owner.communicate()
    with run.lock():
        pass


# --------------------------------------------------------------------------------------------------------- the stages


def write(name: str) -> Any:
    def function(run: Run, progress: Any) -> None:
        write_json(run.path / name, name)

    return function


STAGES = {
    stage.name: stage
    for stage in (
        Stage("data", write("data"), 1, reads=("data", "seed"), writes=("data",)),
        Stage("costs", write("costs"), 1, reads=("scenario",), writes=("costs",)),
        Stage("library", write("library"), 1, reads=("library",), after=("data",), writes=("library",)),
        Stage("search", write("child.json"), 1, ("targets",), after=("costs", "library"), writes=("{name}.json",)),
        Stage("heal", write("healed"), 1, reads=("healing",), after=("search",), writes=("healed",)),
    )
}


def finished(tmp_path: Path) -> Run:
    run = Run.create(tmp_path / "run", config())
    for stage in STAGES.values():
        assert run.stale(stage, STAGES, "weights") == "not run yet"
        run.execute(stage, STAGES, "weights", silent)
    assert stale(run) == {}
    return run


def stale(run: Run, stages: dict[str, Stage] = STAGES, parent: str = "weights") -> dict[str, str]:
    found = {name: run.stale(stage, stages, parent) for name, stage in stages.items()}
    return {name: why for name, why in found.items() if why}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"seed": 1}, ["data", "library", "search", "heal"]),
        ({"data": {"seq_length": 128}}, ["data", "library", "search", "heal"]),
        ({"scenario": {"batch": 2}}, ["costs", "search", "heal"]),
        ({"library": {"importance": "contribution"}}, ["library", "search", "heal"]),
        ({"library": {"bld": {"warmup": 0.1}}}, ["library", "search", "heal"]),
        ({"targets": ["params<=0.5x"]}, ["search", "heal"]),
        ({"healing": {"tokens": 0}}, ["heal"]),
        ({"sample_prompt": "?"}, []),
        ({"machine": {"threads": 1}}, []),
    ],
)
def test_a_change_makes_exactly_the_stages_stale_that_depend_on_it(
    change: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    run = finished(tmp_path)
    changed = Run.create(run.path, config(**change), update=True)
    why = stale(changed)
    assert list(why) == expected
    if expected:
        (key,) = change
        assert why[expected[0]] == f"{key} changed"
        assert all(reason.startswith("stage ") for name, reason in why.items() if name != expected[0])
    for name in expected:
        changed.execute(STAGES[name], STAGES, "weights", silent)
    assert stale(changed) == {}
    assert list(stale(Run.create(run.path, config(), update=True))) == expected  # and back again


def test_a_key_that_older_runs_do_not_know_makes_nothing_stale_until_it_is_set(tmp_path: Path) -> None:
    run = finished(tmp_path)
    older = run.config.healing.model_dump(mode="json", exclude={"patience", "report_to"})
    manifest = run.manifest
    manifest["stages"]["heal"]["inputs"]["config.healing"] = fingerprint(older)
    write_json(run.path / "manifest.json", manifest)
    assert stale(run) == {}
    assert stale(Run.create(run.path, config(healing={"report_to": ["wandb"]}))) == {}
    assert list(stale(Run.create(run.path, config(healing={"patience": 2}), update=True))) == ["heal"]


def test_other_weights_and_other_code_make_stages_stale(tmp_path: Path) -> None:
    run = finished(tmp_path)
    assert list(stale(run, parent="other weights")) == list(STAGES)
    newer = {**STAGES, "library": replace(STAGES["library"], version=2)}
    assert stale(run, newer) == {
        "library": "version changed",
        "search": "stage library changed",
        "heal": "stage search changed",
    }


def test_a_missing_output_is_made_again(tmp_path: Path) -> None:
    run = finished(tmp_path)
    (run.path / "child.json").unlink()
    assert stale(run) == {"search": "child.json is missing"}


def test_a_stage_that_failed_is_stale(tmp_path: Path) -> None:
    run = finished(tmp_path)

    def fail(run: Run, progress: Any) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        run.execute(replace(STAGES["heal"], function=fail), STAGES, "weights", silent)
    assert stale(run) == {"heal": "was interrupted"}
    run.execute(STAGES["heal"], STAGES, "weights", silent)
    assert stale(run) == {}


def test_the_manifest_says_what_was_made(tmp_path: Path) -> None:
    run = finished(tmp_path)
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest == run.manifest
    entry = manifest["stages"]["search"]
    assert entry["state"] == "done"
    assert set(entry["inputs"]) == {"config.targets", "parent", "version", "stage.costs", "stage.library"}
    output = entry["outputs"]["child.json"]
    assert output["bytes"] == (run.path / "child.json").stat().st_size
    assert len(output["sha256"]) == 64
    assert {"python", "torch", "transformers", "puzzle-nas"} <= set(entry["versions"])
    assert entry["peak_bytes"] > 1_000_000 and entry["seconds"] >= 0


def test_the_peak_of_memory_is_seen(tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the kernel does not reset peaks")
    size = 100_000_000

    def allocate(run: Run, progress: Any) -> None:
        block = bytearray(size)
        block[::4096] = b"x" * len(block[::4096])

    run = Run.create(tmp_path / "run", config())
    for name, function in (("big", allocate), ("small", lambda run, progress: None)):
        stage = Stage(name, function, 1)
        run.execute(stage, {name: stage}, "weights", silent)
    peaks = {name: entry["peak_bytes"] for name, entry in run.manifest["stages"].items()}
    assert peaks["big"] > peaks["small"] + size // 2


def test_folders_are_hashed_by_names_and_contents(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", config())
    hashes = set()
    for files in ({"a": "1"}, {"a": "2"}, {"b": "1"}, {"a": "1", "b/c": ""}, {"a": "1"}):

        def fill(run: Run, progress: Any, files: dict[str, str] = files) -> None:
            with atomic(run.path / "out") as folder:
                for name, text in files.items():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_text(text)

        stage = Stage("fill", fill, 1, writes=("out",))
        run.execute(stage, {"fill": stage}, "weights", silent)
        output = run.manifest["stages"]["fill"]["outputs"]["out"]
        assert output["files"] == len(files)
        hashes.add(output["sha256"])
    assert len(hashes) == 4
