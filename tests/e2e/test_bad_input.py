# SPDX-License-Identifier: Apache-2.0
"""What a user can get wrong: one sentence, the right exit code, no traceback, nothing half-written."""

import json
from pathlib import Path

import pytest
from command_line import SMALL, puzzle
from tiny_models import make_parent
from transformers import GPT2Config, GPT2LMHeadModel

SPACE = "attention: [kv/2, no_op]\nffn: [50%, no_op]\nmultiple_of: 8\n"


def compress(parent: object, corpus: object, run: Path, *more: object, space: str = SPACE):
    file = run.parent / "space.yaml"
    file.write_text(space)
    return puzzle("compress", parent, "-s", file, "-d", corpus, "-t", "params<=0.8x", "-o", run, *SMALL, *more)


def check(result, code: int, *words: str) -> None:
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    message = " ".join(result.stderr.split())
    assert message.count("error:") == 1, message
    for word in words:
        assert word in message, message


def test_missing_parent(corpus: Path, tmp_path: Path) -> None:
    check(compress(tmp_path / "nowhere", corpus, tmp_path / "run"), 2, "nowhere")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["truncated", "no tensor", "no config", "json"])
def test_corrupted_parent(damage: str, corpus: Path, tmp_path: Path) -> None:
    folder = make_parent(tmp_path / "parent")
    weights = folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "no tensor":
        weights.unlink()
    elif damage == "no config":
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text("{")
    check(compress(folder, corpus, tmp_path / "run"), 2, str(folder))
    assert not (tmp_path / "run").exists()


def test_a_parent_that_is_not_llama_like(corpus: Path, tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=20))
    model.save_pretrained(tmp_path / "gpt2")
    check(compress(tmp_path / "gpt2", corpus, tmp_path / "run"), 2, "gpt2", "llama")


def test_unknown_key_of_the_search_space(parent: Path, corpus: Path, tmp_path: Path) -> None:
    result = compress(parent, corpus, tmp_path / "run", space=SPACE + "multipel_of: 8\n")
    check(result, 2, "space.yaml", "line 4", "multipel_of", "did you mean 'multiple_of'")


def test_a_variant_that_does_not_fit(parent: Path, corpus: Path, tmp_path: Path) -> None:
    result = compress(parent, corpus, tmp_path / "run", space=SPACE.replace("kv/2", "kv8"))
    check(result, 2, "search_space.attention.0", "8 KV heads", "2")


def test_a_target_out_of_reach(parent: Path, corpus: Path, tmp_path: Path) -> None:
    result = compress(parent, corpus, tmp_path / "run", "--set", "targets=[params<=0.01x]")
    check(result, 3, "params<=0.01x", "best")
    assert not (tmp_path / "run" / "library").exists()


def test_a_target_without_sense(parent: Path, corpus: Path, tmp_path: Path) -> None:
    check(compress(parent, corpus, tmp_path / "run", "-t", "thruput>=2x"), 2, "did you mean 'throughput'")
    check(compress(parent, corpus, tmp_path / "run", "-t", "memory<=6parsecs"), 2, "parsecs", "gib")


def test_empty_data(parent: Path, tmp_path: Path) -> None:
    for content in ("", json.dumps({"text": ""}) + "\n", json.dumps({"body": "x"}) + "\n"):
        (tmp_path / "empty.jsonl").write_text(content)
        check(compress(parent, tmp_path / "empty.jsonl", tmp_path / "run", "--update"), 2, "empty.jsonl")


def test_too_little_data(parent: Path, tmp_path: Path) -> None:
    (tmp_path / "short.jsonl").write_text(json.dumps({"text": "only this"}) + "\n")
    check(compress(parent, tmp_path / "short.jsonl", tmp_path / "run"), 2, "short.jsonl", "give more text")


def test_a_folder_that_is_not_a_run(parent: Path, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    check(compress(parent, corpus, tmp_path / "run"), 2, "not a run")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.txt"]
    check(puzzle("report", tmp_path / "run"), 2, "no run here")


def test_usage() -> None:
    assert puzzle("comprss").returncode == 2
    check(puzzle("compress", "x"), 2, "--out")
    check(puzzle("compress", "x", "--out", "y"), 2, "--search-space")
    check(puzzle("fetch", "smollm3", "--out", "y"), 2, "smollm2-135m")
