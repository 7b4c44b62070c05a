# SPDX-License-Identifier: Apache-2.0
"""The two stages that write tables: what they write is what the search reads."""

from pathlib import Path

import numpy as np
import pandas as pd
from tiny_runs import MIXED, random_library, tiny_config, tiny_run

from puzzle.architecture import Architecture
from puzzle.checkpoint import Checkpoint
from puzzle.costs import COST_COLUMNS, CostModel
from puzzle.run import silent
from puzzle.scoring.score import measure, score
from puzzle.variants import expand


def unasked(estimates: pd.DataFrame, ask: object) -> None:
    raise AssertionError("only `auto` settles")


def test_both_tables(parent: Path, tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", tiny_config(parent, scoring={"method": "exact"}))
    checkpoint = Checkpoint(parent)
    variants = expand(run.config.search_space, checkpoint.shape)
    random_library(checkpoint, run.path / "library", variants)
    measure(run, silent)
    score(run, unasked, silent)

    costs, scores = (pd.read_parquet(run.path / f"{name}.parquet") for name in ("costs", "scores"))
    keys = {(v.layer, v.subblock, v.name) for v in variants}
    assert set(zip(scores.layer, scores.subblock, scores.variant, strict=True)) == keys
    assert set(zip(costs.layer, costs.subblock, costs.variant, strict=True)) == keys | {(-1, "model", "constant")}
    assert (scores.tokens == 16 * 16).all()
    assert (scores[scores.variant != "parent"].kl > 0).all()
    predictor = CostModel(costs, run.config.workload)
    assert set(predictor.columns) == set(COST_COLUMNS) - {"energy_j_per_token"}
    whole, mixed = predictor.predict(Architecture.parent(3)), predictor.predict(MIXED)
    for column in ("weight_bytes", "kv_bytes_per_token", "params"):
        assert mixed[column] < whole[column]
    assert np.isfinite(list(whole.values())).all()


def test_exact_scores_where_asked_for_and_calibrated_ones_elsewhere(parent: Path, tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", tiny_config(parent))
    checkpoint = Checkpoint(parent)
    variants = expand(run.config.search_space, checkpoint.shape)
    random_library(checkpoint, run.path / "library", variants)
    asked = [v for v in variants if v.name in ("kv1", "ffn32")]
    answers: list[float] = []

    tables = {}
    for method, settle in (
        ("exact", unasked),
        ("auto", lambda estimates, ask: answers.extend(ask(asked))),
        ("fisher", unasked),
    ):
        run.config = tiny_config(parent, scoring={"method": method})
        score(run, settle, silent)
        tables[method] = pd.read_parquet(run.path / "scores.parquet").set_index(["layer", "subblock", "variant"])

    exact, auto, fisher = tables.values()
    keys = [(v.layer, v.subblock, v.name) for v in asked]
    assert set(auto.index) == set(exact.index) == set(fisher.index)
    assert auto.kl.notna().all() and fisher.kl.notna().all()
    np.testing.assert_allclose(auto.kl[keys], exact.kl[keys], rtol=1e-5)
    np.testing.assert_array_equal(auto.kl[keys], answers)
    rest = auto[auto.method == "fisher"]
    assert set(auto.index) - set(rest.index) == {
        *keys,
        *((v.layer, v.subblock, v.name) for v in variants if v.name == "parent"),
    }
    for subblock, name in (("attention", "kv1"), ("ffn", "ffn32")):
        factor = (exact.kl / fisher.kl)[[k for k in keys if k[1:] == (subblock, name)]].median()
        assert factor > 0
    np.testing.assert_allclose(fisher.kl, fisher.estimate)
