# SPDX-License-Identifier: Apache-2.0
"""The rooms' three questions to a run: what each variant costs here, what the model loses by it, and by several."""

from collections.abc import Callable, Sequence

import pandas as pd

from puzzle.architecture import PARENT, Architecture, SubblockVariant
from puzzle.block_library import BlockLibrary
from puzzle.checkpoint import Checkpoint, find
from puzzle.data import load_split
from puzzle.depth import Depth
from puzzle.devices import set_threads
from puzzle.run import Progress, Run, atomic
from puzzle.scoring.blocks import Blocks
from puzzle.scoring.calibrate import calibrated
from puzzle.scoring.context import Context
from puzzle.scoring.latency import measure_costs
from puzzle.scoring.replacement import sweep
from puzzle.variants import expand

Ask = Callable[[Sequence[SubblockVariant]], list[float]]
COSTS_VERSION, SCORES_VERSION = 1, 2
BATCH_TOKENS = 2_048


def measure(run: Run, progress: Progress) -> None:
    """Measure every distinct variant of the search space under the run's scenario."""
    config = run.config
    set_threads(config.machine.threads)
    checkpoint = Checkpoint(find(config.parent))
    variants = expand(config.search_space, checkpoint.shape)
    costs = measure_costs(checkpoint, variants, config.workload, config.measure, progress)
    with atomic(run.path / "costs.parquet") as temporary:
        costs.to_parquet(temporary, index=False)


def context(run: Run, progress: Progress, split: str = "scoring", tokens: int | None = None) -> Context:
    """Scores around any architecture of the run's search space, on (the first so many tokens of) a split."""
    config = run.config
    set_threads(config.machine.threads)
    checkpoint, seq = Checkpoint(find(config.parent)), config.data.seq_length
    sequences = None if tokens is None else max(1, tokens // seq)
    return Context(
        Blocks(Depth(checkpoint, config.device), BlockLibrary(run.path / "library")),
        expand(config.search_space, checkpoint.shape),
        load_split(run.path / "data", split)[:sequences],
        samples=config.scoring.samples,
        seed=config.seed,
        batch=max(1, BATCH_TOKENS // seq),
        progress=progress,
    )


def score(run: Run, settle: Callable[[pd.DataFrame, Ask], object], progress: Progress) -> None:
    """Score every variant of the search space against the parent.

    Args:
        run: with its data and library made.
        settle: given estimates of all variants, asks for the exact scores of those that matter (method `auto`).
        progress: called after each layer.
    """
    around, method = context(run, progress), run.config.scoring.method

    def exact(variants: Sequence[SubblockVariant]) -> pd.DataFrame:
        return sweep(around.blocks, list(variants), around.tokens, around.batch, progress)

    if method == "exact":
        scores = exact(around.variants)
    else:
        tables = [exact([v for v in around.variants if v.name == PARENT])]

        def ask(variants: Sequence[SubblockVariant]) -> list[float]:
            tables.append(exact(variants))
            kl = tables[-1].set_index(["layer", "subblock", "variant"]).kl
            return [float(kl[v.layer, v.subblock, v.name]) for v in variants]

        estimates = around.estimates(Architecture.parent(around.blocks.depth.checkpoint.shape.num_layers))
        if method == "auto":
            settle(estimates, ask)
        scores = calibrated(estimates, pd.concat(tables, ignore_index=True))
    with atomic(run.path / "scores.parquet") as temporary:
        scores.to_parquet(temporary, index=False)
