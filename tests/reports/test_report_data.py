# SPDX-License-Identifier: Apache-2.0
"""Reading a run, and `summary.json`."""

import json

import numpy as np
import pytest
from report_runs import SCENARIO

from puzzle.errors import ConfigError
from puzzle.reports.data import read, summary
from puzzle.run import Run


def test_summary_has_what_scripts_expect(run):
    said = json.loads(json.dumps(summary(read(run)), allow_nan=False))
    costs = {"prefill_ms", "decode_ms_per_token", "throughput_tokens_per_s", "weight_bytes", "kv_bytes_per_token"}
    costs.add("params")
    for model in ("parent", "child", "child_before_healing"):
        assert set(said[model]) == costs | {"perplexity", "kl", "top1_agreement"}
    assert set(said["predicted"]) == costs
    assert said["targets"][0]["asked"] == 1.3 and "reached" in said["targets"][0]
    assert set(said["stages"]["heal"]) == {"seconds", "peak_bytes"}
    assert "report" not in said["stages"]  # it is not finished while it writes
    assert len(said["architecture"]["attention"]) == len(said["architecture"]["blocks"]) == 6
    stored = json.loads((run.path / "evaluation.json").read_text())["models"]["child"]
    assert all(said["child"][key] == stored[key] for key in said["child"])


def test_prediction_of_the_parent_is_the_sum_of_its_rows(run):
    data = read(run)
    rows = data.costs.table[data.costs.table.variant.isin(["parent", "constant"])]
    predicted = data.predicted_parent()
    assert predicted["prefill_ms"] == pytest.approx(rows.prefill_ms.sum())
    assert predicted["decode_ms_per_token"] == pytest.approx(rows.decode_ms.sum())
    seconds = (rows.prefill_ms.sum() + SCENARIO.generated * rows.decode_ms.sum()) / 1e3
    assert predicted["throughput_tokens_per_s"] == pytest.approx(SCENARIO.batch * SCENARIO.generated / seconds)


def test_spread_of_throughput_follows_that_of_its_times(run):
    """Against the derivative: a job slower by both half ranges, to first order."""
    data = read(run)
    own, step = data.models["child"], 1e-6

    def throughput(slower):
        prefill = own["prefill_ms"] + slower * own["prefill_iqr_ms"] / 2
        decode = own["decode_ms_per_token"] + slower * own["decode_iqr_ms"] / 2
        return SCENARIO.batch * SCENARIO.generated * 1e3 / (prefill + SCENARIO.generated * decode)

    slope = (throughput(-step) - throughput(step)) / (2 * step)
    assert data.throughput_spread("child") == pytest.approx(slope, rel=1e-6)


def test_errors_of_the_front_are_medians_of_relative_differences(run):
    """By hand: prefill 0, 0.1 / 0.5, 0.02 / 0.48; decode 0.08 / 0.88, 0, 0.02 / 0.52."""
    assert read(run).front_errors() == pytest.approx({"prefill": 0.02 / 0.48, "decode": 0.02 / 0.52})
    assert summary(read(run))["front_check"]["architectures"] == 3


def test_memory_counts_the_full_cache(run):
    data = read(run)
    child = data.models["child"]
    tokens = SCENARIO.batch * (SCENARIO.prompt + SCENARIO.generated)
    assert data.memory(child) == child["weight_bytes"] + tokens * child["kv_bytes_per_token"]


def test_variants_are_ordered_by_what_they_lose(run):
    data = read(run)
    names = data.variants("attention")
    medians = [
        np.median(data.scores[data.scores.variant.eq(n) & data.scores.subblock.eq("attention")].kl) for n in names
    ]
    assert set(names) == {"kv1", "kv2", "linear", "no_op"} and medians == sorted(medians)


@pytest.mark.parametrize("missing", ["evaluation.json", "scores.parquet", "solutions/child.json", "data/splits.json"])
def test_an_unfinished_run_is_one_sentence(run, missing):
    (run.path / missing).unlink()
    with pytest.raises(ConfigError, match=f"{missing}: missing"):
        read(run)


@pytest.mark.parametrize("damaged", ["evaluation.json", "costs.parquet", "solutions/front.json"])
def test_a_damaged_file_is_named(run, damaged):
    (run.path / damaged).write_text("{")
    with pytest.raises(ConfigError, match=f"{damaged}: cannot be read"):
        read(run)


def test_reading_needs_only_the_folder(run):
    assert summary(read(Run.open(run.path))) == summary(read(run))
