# SPDX-License-Identifier: Apache-2.0
"""Two stages: RUN/costs.parquet (what each variant costs here) and RUN/scores.parquet (what the model loses by it)."""

from puzzle.block_library import BlockLibrary
from puzzle.checkpoint import Checkpoint, find
from puzzle.data import load_split
from puzzle.depth import Depth
from puzzle.devices import set_threads
from puzzle.run import Progress, Run, atomic
from puzzle.scoring.latency import measure_costs
from puzzle.scoring.replacement import sweep
from puzzle.variants import expand

COSTS_VERSION = SCORES_VERSION = 1
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


def score(run: Run, progress: Progress) -> None:
    """Score every variant of the search space against the parent."""
    config = run.config
    set_threads(config.machine.threads)
    checkpoint = Checkpoint(find(config.parent))
    variants = expand(config.search_space, checkpoint.shape)
    library = BlockLibrary(run.path / "library")
    tokens = load_split(run.path / "data", "scoring")
    batch = max(1, BATCH_TOKENS // config.data.seq_length)
    scores = sweep(Depth(checkpoint, config.device), library, variants, tokens, batch, progress)
    with atomic(run.path / "scores.parquet") as temporary:
        scores.to_parquet(temporary, index=False)
