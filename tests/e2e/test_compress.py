# SPDX-License-Identifier: Apache-2.0
"""`puzzle compress` from parent to report, on a tiny parent and real text, as a user runs it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from command_line import SMALL, puzzle
from safetensors.torch import load_file

from puzzle.architecture import Architecture
from puzzle.costs import Solution
from puzzle.devices import BYTES

TARGET = ["--target", "params<=0.8x"]
COSTS = {
    "prefill_ms",
    "decode_ms_per_token",
    "throughput_tokens_per_s",
    "weight_bytes",
    "kv_bytes_per_token",
    "params",
}


def arguments(parent: Path, corpus: Path, run: Path) -> list[object]:
    space = run.parent / "space.yaml"
    space.write_text("attention: [kv/2, linear, no_op]\nffn: [75%, 50%, linear, no_op]\nmultiple_of: 8\n")
    return ["compress", parent, "--search-space", space, "--data", corpus, *TARGET, "--out", run, *SMALL]


@pytest.fixture(scope="module")
def finished(parent: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    result = puzzle(*arguments(parent, corpus, run))
    assert result.returncode == 0, result.stderr
    assert "params<=0.8x" in result.stdout and "met" in result.stdout and "index.html" in result.stdout
    return run


def test_summary_says_what_scripts_need(finished: Path) -> None:
    summary = json.loads((finished / "report" / "summary.json").read_text())
    for model in ("parent", "child", "child_before_healing"):
        assert set(summary[model]) >= COSTS | {"perplexity", "kl", "top1_agreement"}
    assert set(summary["predicted"]) >= COSTS
    assert summary["targets"][0]["reached"] <= 0.8
    assert summary["child"]["params"] <= 0.8 * summary["parent"]["params"]
    for cost in ("weight_bytes", "kv_bytes_per_token", "params"):  # counted from the loaded model
        assert summary["child"][cost] == summary["predicted"][cost]
    assert summary["front_check"]["architectures"] >= 1
    assert all(error >= 0 for error in summary["front_check"]["median_error"].values())
    assert all(stage["seconds"] >= 0 and stage["peak_bytes"] > 0 for stage in summary["stages"].values())
    assert len(summary["architecture"]["attention"]) == 3


def test_child_loads_with_and_without_puzzle_and_generates_alike(finished: Path, tmp_path: Path) -> None:
    child = finished / "children" / "child"
    program = """
import sys, torch, json
if {blocked}:
    import importlib.abc
    class Blocker(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name.split(".")[0] == "puzzle":
                raise ImportError("puzzle is not installed here")
    sys.meta_path.insert(0, Blocker())
else:
    import puzzle
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code={blocked})
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code={blocked})
inputs = tokenizer("The", return_tensors="pt", return_token_type_ids=False)
both = [model.generate(**inputs, max_new_tokens=12, do_sample=False, use_cache=c)[0].tolist() for c in (True, False)]
print(json.dumps(both))
"""
    outputs = []
    for blocked in (False, True):
        command = [sys.executable, "-c", program.format(blocked=blocked), str(child)]
        environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        cached, uncached = json.loads(result.stdout)
        assert cached == uncached
        outputs.append(cached)
    assert outputs[0] == outputs[1]


def test_healing_lowers_the_held_out_kl(finished: Path) -> None:
    curve = json.loads((finished / "healing" / "curve.json").read_text())
    assert min(point["kl"] for point in curve[1:]) < curve[0]["kl"]


def test_the_same_command_again_has_nothing_to_do(finished: Path, parent: Path, corpus: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*.safetensors")}
    assert puzzle(*arguments(parent, corpus, finished)).returncode == 0
    assert {p: p.stat().st_mtime_ns for p in finished.rglob("*.safetensors")} == before


def test_stage_commands_status_eval_and_inspect(finished: Path, parent: Path, corpus: Path) -> None:
    for command in ("library", "score", "search", "heal", "report"):
        result = puzzle(command, finished)
        assert result.returncode == 0 and "up to date" in result.stderr, (command, result.stderr)
    rows = json.loads(puzzle("status", finished, "--json").stdout)
    assert {row["state"] for row in rows} == {"done"}
    child = finished / "children" / "child"
    options = ["--data", corpus, "--tokens", 2048, "--seq-length", 64, "--json"]
    judged = json.loads(puzzle("eval", child, "--parent", parent, *options).stdout)
    assert judged["kl"] > 0 and judged["perplexity"] > 1 and 0 < judged["top1_agreement"] <= 1
    alone = json.loads(puzzle("eval", parent, *options).stdout)
    assert "kl" not in alone and alone["perplexity"] > 1
    layers = json.loads(puzzle("inspect", child, "--json").stdout)
    summary = json.loads((finished / "report" / "summary.json").read_text())
    served = yaml.safe_load((finished / "run.yaml").read_text())["compute_dtype"]  # the checkpoint is float32
    scale = 4 / BYTES[served]
    assert sum(row["kv_bytes_per_token"] for row in layers) == scale * summary["child"]["kv_bytes_per_token"]


def test_reports_as_a_card_and_of_several_runs(finished: Path, tmp_path: Path) -> None:
    card = (finished / "children" / "child" / "README.md").read_text()
    assert card.startswith("---\n") and "## Architecture" in card
    assert puzzle("report", finished, "--format", "md").stdout == card
    other, page = tmp_path / "other", tmp_path / "both" / "index.html"
    shutil.copytree(finished, other)
    result = puzzle("report", finished, "--compare", other, "--out", page.parent)
    assert result.returncode == 0 and result.stdout.strip() == str(page), result.stderr
    assert "2 runs compared" in page.read_text()
    for wrong in (["--format", "pdf"], ["--out", tmp_path / "x"], ["--compare", other, "--json"]):
        result = puzzle("report", finished, *wrong)
        assert result.returncode == 2 and result.stderr.startswith("error: ") and not result.stdout
    result = puzzle("report", finished, "--compare", tmp_path / "nowhere")
    assert result.returncode == 2 and "no run here" in result.stderr


def test_search_of_a_run_traces_a_front_and_refines(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    front = json.loads(puzzle("search", run, "--sweep", "params", "--points", 4, "--json").stdout)
    totals = [s["costs"]["params"] for s in front["solutions"]]
    assert front["measure"] == "params" and len(totals) > 1 and totals == sorted(totals, reverse=True)
    chosen = (run / "solutions" / "child.json").read_bytes()
    few = json.loads(puzzle("search", run, "--target", "params<=0.9x", "--max-changes", 3, "--json").stdout)
    assert few["costs"]["params"] <= 0.9 * totals[0] and len(Architecture.from_json(few["architecture"]).changes) <= 3
    assert (run / "solutions" / "child.json").read_bytes() == chosen
    refined = Solution.from_json(json.loads((run / "solutions" / "child.json").read_text()))
    rounds = json.loads((run / "solutions" / "rounds.json").read_text())["rounds"]
    assert refined.method == "refine" and refined.score == rounds[-1]["solution"]["score"]
    methods = {b["method"] for b in json.loads((run / "solutions" / "baselines.json").read_text())}
    assert {"refined", "additive", "greedy", "random_search"} <= methods
    assert puzzle("search", run, "--refine", "none").returncode == 0
    plain = json.loads((run / "solutions" / "child.json").read_text())
    assert plain == json.loads((run / "solutions" / "additive.json").read_text())
    assert not (run / "solutions" / "rounds.json").exists()
    assert puzzle("search", run, "--refine", "many").returncode == 2


def test_search_space_show(parent: Path) -> None:
    shown = json.loads(puzzle("search-space", "show", "tiny", "--parent", parent, "--json").stdout)
    assert {row["subblock"] for row in shown["rows"]} == {"attention", "ffn"} and shown["log10_architectures"] > 1
    assert json.loads(puzzle("search-space", "schema").stdout)["title"] == "Puzzle search space"


def test_killed_at_any_moment_and_run_again_gives_the_same_child(
    finished: Path, parent: Path, corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "puzzle", *map(str, arguments(parent, corpus, run))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for seen in ("library/1.ffn.*.safetensors", "scores.parquet", "solutions/rounds.json", "healing/*"):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not list(run.glob(seen)):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert puzzle(*arguments(parent, corpus, run)).returncode == 0
    for kind in ("library", "children/child"):
        for file in sorted((finished / kind).glob("*.safetensors")):
            ours, theirs = load_file(run / kind / file.name), load_file(file)
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), file.name


def test_another_config_is_refused_and_update_redoes_what_it_touches(
    finished: Path, parent: Path, corpus: Path, tmp_path: Path
) -> None:
    other = [*arguments(parent, corpus, finished), "--set", "search.points=3"]
    refused = puzzle(*other)
    assert refused.returncode == 2 and "search.points" in refused.stderr and "Traceback" not in refused.stderr
    recipe = yaml.safe_load((finished / "run.yaml").read_text())
    assert recipe["search"]["points"] != 3
    library = {p: p.stat().st_mtime_ns for p in (finished / "library").glob("*.safetensors")}
    assert puzzle(*other, "--update").returncode == 0
    assert {p: p.stat().st_mtime_ns for p in (finished / "library").glob("*.safetensors")} == library


def test_an_architecture_of_parents_only_saves_a_plain_llama(parent: Path, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = puzzle(*arguments(parent, corpus, run), "--target", "params<=1x", "--set", "targets=[params<=1x]")
    assert result.returncode == 0, result.stderr
    config = json.loads((run / "children" / "child.before-healing" / "config.json").read_text())
    assert config["model_type"] == "llama" and "block_configs" not in config
    ours = load_file(run / "children" / "child.before-healing" / "model.safetensors")
    theirs = load_file(parent / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.slow
def test_parents_of_every_shape_go_through(any_parent: Path, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = puzzle(
        *arguments(any_parent, corpus, run), "--set", "library.bld.tokens=1024", "--set", "healing.tokens=1024"
    )
    assert result.returncode == 0, result.stderr
