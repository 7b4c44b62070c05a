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


def test_both_tables(parent: Path, tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", tiny_config(parent))
    checkpoint = Checkpoint(parent)
    variants = expand(run.config.search_space, checkpoint.shape)
    random_library(checkpoint, run.path / "library", variants)
    measure(run, silent)
    score(run, silent)

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
