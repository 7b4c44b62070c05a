# SPDX-License-Identifier: Apache-2.0
"""`puzzle search` on tables of the user's own."""

import json
import subprocess
import sys

import pandas as pd
import pytest
from search_instances import exhaustive, frames, random_tables
from typer.testing import CliRunner

from puzzle.architecture import Architecture
from puzzle.cli import app
from puzzle.costs import Scenario
from puzzle.errors import ConfigError, PuzzleError

SCENARIO = Scenario(1, 16, 32)
WORKLOAD = ("--prompt", "16", "--generated", "32")


@pytest.fixture
def tables(tmp_path):
    return write(tmp_path, *random_tables(5))


def write(folder, scores, costs):
    scores.to_csv(folder / "scores.csv", index=False)
    costs.to_csv(folder / "costs.csv", index=False)
    return ["--scores", str(folder / "scores.csv"), "--costs", str(folder / "costs.csv")]


def search(*arguments):
    """The JSON that the command prints; its errors as they are raised."""
    result = CliRunner().invoke(app, ["search", *arguments, "--json"])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_answer_is_that_of_trying_everything(tables):
    found = search(*tables, "--target", "throughput>=1.6x", "--target", "memory<=0.9x", *WORKLOAD)
    score, best = exhaustive(*random_tables(5), ["throughput>=1.6x", "memory<=0.9x"], SCENARIO)[0]
    assert found["objective"] == pytest.approx(score)
    assert Architecture.from_json(found["architecture"]) == best
    assert found["status"] == "optimal" and found["gap"] == 0
    assert {"objective", "gap", "seconds", "solver", "architecture", "costs"} <= found.keys()


def test_a_row_without_a_layer_stands_for_every_layer(tmp_path, tables):
    scores, costs = random_tables(5)
    shared = costs[costs.layer == 1].assign(layer=None)
    everywhere = pd.concat([shared, costs[costs.subblock == "model"].assign(layer=None)])
    (tmp_path / "short").mkdir()
    short = search(*write(tmp_path / "short", scores, everywhere), "--target", "decode<=0.6x")
    copies = [shared.assign(layer=layer) for layer in range(3)]
    (tmp_path / "long").mkdir()
    whole = search(
        *write(tmp_path / "long", scores, pd.concat([*copies, costs[costs.subblock == "model"]])),
        "--target",
        "decode<=0.6x",
    )
    assert short["architecture"] == whole["architecture"]
    assert short["costs"] == pytest.approx(whole["costs"])


def test_conditions(tables):
    target = ("--target", "params<=0.7x")
    same = Architecture.from_json(search(*tables, *target, "--homogeneous")["architecture"])
    assert len(set(same.attention)) == len(set(same.ffn)) == 1
    few = Architecture.from_json(search(*tables, *target, "--max-changes", "3")["architecture"])
    assert len(few.changes) <= 3
    pinned = search(*tables, *target, "--pin", "0", "--pin", "2.ffn.ffn64")
    architecture = Architecture.from_json(pinned["architecture"])
    assert (architecture.attention[0], architecture.ffn[0], architecture.ffn[2]) == ("parent", "parent", "ffn64")
    several = search(*tables, *target, "--solutions", "3", "--distance", "2")
    found = [Architecture.from_json(s["architecture"]) for s in several]
    assert len(found) == 3 and all(a.distance(b) >= 2 for a in found for b in found if a is not b)
    assert [s["objective"] for s in several] == sorted(s["objective"] for s in several)


def test_a_front(tables):
    front = search(*tables, "--sweep", "memory", "--points", "6", "--target", "decode<=0.8x")
    assert 2 <= len(front["solutions"]) <= 6


def test_the_batch_is_decided_where_the_costs_know_several(tmp_path):
    scores, costs = random_tables(5)
    at = [costs.assign(batch=b, decode_ms=costs.decode_ms * (1 + b / 8)) for b in (1, 4)]
    tables = write(tmp_path, scores, pd.concat(at))
    fast = search(*tables, "--target", "throughput>=130tok/s", *WORKLOAD)
    assert fast["batch"] == 4
    alone = search(*tables, "--target", "decode<=0.8x", "--batch", "4", *WORKLOAD)
    assert alone["costs"]["decode_ms"] <= 0.8 * parent_decode(at[1]) * (1 + 1e-9)
    with pytest.raises(ConfigError, match="--batch 3: the costs have the batches 1, 4"):
        search(*tables, "--target", "decode<=0.8x", "--batch", "3")
    with pytest.raises(ConfigError, match="one --batch of those in the costs: 1, 4"):
        search(*tables, "--sweep", "decode")
    bad = write(tmp_path, scores, pd.concat(at).assign(batch=1.5))
    with pytest.raises(ConfigError, match=r"costs, row 1: column 'batch' is '1.5', not a number of sequences"):
        search(*bad, "--target", "decode<=0.8x")


def parent_decode(costs):
    return costs[(costs.variant == "parent") | (costs.subblock == "model")].decode_ms.sum()


def without(frame, column):
    return frame.drop(columns=column)


@pytest.mark.parametrize(
    ("change", "target", "sentence"),
    [
        (lambda s, c: (s, without(c, "decode_ms")), "decode<=0.6x", "target 'decode<=0.6x' needs the cost 'decode_ms'"),
        (
            lambda s, c: (s.assign(score=s.score.where(s.index != 4)), c),
            "decode<=0.6x",
            "scores, row 5 (layer 0, ffn, parent): column 'score' is empty or NaN",
        ),
        (
            lambda s, c: (s[s.layer != 1], c),
            "decode<=0.6x",
            "scores: layer 1 has no variants; a `parent` row of score 0 keeps it",
        ),
        (
            lambda s, c: (pd.concat([s, s.tail(1)]), c),
            "decode<=0.6x",
            "scores, row 25 (layer 2, ffn, no_op): the same as row 24",
        ),
        (
            lambda s, c: (s, c.rename(columns={"decode_ms": "decode_us"})),
            "decode<=0.6x",
            "costs: the column 'decode_us' is no known cost with its unit; did you mean 'decode_ms'?",
        ),
        (
            lambda s, c: (s, c),
            "decode<=6parsec",
            "target 'decode<=6parsec': unit 'parsec' does not fit decode",
        ),
        (
            lambda s, c: (s, c[c.variant != "ffn64"]),
            "decode<=0.6x",
            "costs: no row for layer 0, ffn, variant 'ffn64', needed by its row in the scores",
        ),
    ],
)
def test_bad_tables_get_one_sentence(change, target, sentence, tmp_path):
    tables = write(tmp_path, *change(*random_tables(5)))
    with pytest.raises(ConfigError) as error:
        search(*tables, "--target", target)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_what_does_not_go_together(tables, tmp_path):
    for arguments in (
        ("--target", "decode<=0.6x"),
        (*tables[:2], "--target", "decode<=0.6x"),
        tables,
        (*tables, "--target", "decode<=0.6x", "--refine", "2"),
        (str(tmp_path), *tables),
        (str(tmp_path), "--target", "decode<=0.6x"),
    ):
        with pytest.raises(PuzzleError):
            search(*arguments)


def test_no_torch_is_imported(tmp_path):
    scores, costs = frames({(0, "ffn", "no_op"): 1.0, (0, "attention", "parent"): 0.0}, {}, [1.0] * 5)
    rows = [(0, h, v, *[float(v == "parent")] * 5) for h in ("attention", "ffn") for v in ("parent", "no_op")]
    costs = pd.concat([costs, pd.DataFrame(rows, columns=costs.columns)])
    command = [sys.executable, "-X", "importtime", "-m", "puzzle", "search", *write(tmp_path, scores, costs)]
    done = subprocess.run([*command, "--target", "params<=0.9x", "--json"], capture_output=True, text=True, check=True)
    modules = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert json.loads(done.stdout)["architecture"]["ffn"] == ["no_op"]
    assert {"pandas", "pulp", "puzzle.search.mip"} <= modules
    assert not {"torch", "transformers", "optuna"} & modules
