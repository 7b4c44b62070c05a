# SPDX-License-Identifier: Apache-2.0
"""How good the chosen architectures are before healing: refined, additive, and every baseline, by their true loss.

    python benchmarks/refine.py RUN [--target "throughput>=1.5x" ...] [--tokens N] [--out FILE]

RUN is a run whose library is made. For each target a copy of it (by hard links) goes through scoring, search, refining
and comparison; all methods choose from the same variants, costs and scores. The true loss is the KL divergence from
the parent on N held-out tokens that the search does not see. `ratio` is the loss of the additive optimum over that of
the refined child, at the last target.

Then the two tables that predict: random architectures that meet the target and differ from the refined child in at most
4, 8 or 16 subblocks are judged as well. `before` is the rank correlation of their true loss with the sum of replacement
scores, `after` that with the sum of scores in the child's context, both from the tokens that the search sees.
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from puzzle import pipeline
from puzzle.architecture import Architecture
from puzzle.costs import measure
from puzzle.run import Run, read_json, silent
from puzzle.scoring.score import context
from puzzle.search import solve

RADII = (4, 8, 16)


def at_target(source: Path, target: str, tokens: int, pairs: int, scratch: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Methods (KL, its standard error, perplexity, predicted speed over the parent's), and random architectures."""
    folder = scratch / "run"
    shutil.copytree(source, folder, copy_function=os.link, ignore=shutil.ignore_patterns("children", "report", ".lock"))
    old = Run.open(folder).config
    config = old.model_copy(
        update={"targets": [target], "search": old.search.model_copy(update={"compare_tokens": tokens})}
    )
    run = Run.create(folder, config, update=True)
    pipeline.run_stages(run, "compare", silent)
    parent = measure("throughput", pipeline.parent_costs(run), config.workload)
    rows = []
    for entry in read_json(folder / "solutions" / "baselines.json"):
        speed = measure("throughput", entry["costs"], config.workload) / parent
        rows.append({"target": target, "method": entry["method"], "speed": speed, **entry["true"]})
    around = predictions(run, tokens, pairs)
    shutil.rmtree(folder)
    return pd.DataFrame(rows).sort_values("kl", ignore_index=True), around.assign(target=target)


def predictions(run: Run, tokens: int, count: int) -> pd.DataFrame:
    """Random architectures near the run's child: `radius`, the sums of scores `before` and `after`, true `kl`."""
    config, costs, additive, child = run.config, pipeline.cost_table(run), pipeline.score_table(run), run.solution
    in_context = context(run, silent).estimates(child.architecture)
    rng, drawn = np.random.default_rng(0), {}
    for i in range(count):  # the optimum of random scores is a random trade that meets the target
        scores = additive.assign(score=rng.standard_normal(len(additive)))
        found = solve(
            scores, costs, config.targets, config.workload,
            max_changes=RADII[i % len(RADII)], reference=child.architecture,
        )  # fmt: skip
        drawn[found.architecture] = RADII[i % len(RADII)]
    judged = context(run, silent, "validation", tokens).judge(drawn)
    tables = {"before": additive, "after": in_context}
    sums = {name: table.set_index(pipeline.KEY).score.to_dict() for name, table in tables.items()}
    return pd.DataFrame(
        {"radius": radius, **{name: total(scores, a) for name, scores in sums.items()}, "kl": judged[a].kl}
        for a, radius in drawn.items()
    )


def total(scores: dict[tuple[int, str, str], float], architecture: Architecture) -> float:
    return sum(scores.get((v.layer, v.subblock, v.name), 0.0) for v in architecture.variants)


def rank_correlation(table: pd.DataFrame) -> dict[str, float]:
    """Spearman's, of both predictions with the truth."""
    ranks = table[["before", "after", "kl"]].rank().corr().kl
    return {name: round(float(ranks[name]), 3) for name in ("before", "after")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--target", action="append", help="may be given several times; default: 1.25x, 2x, 1.5x")
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--random", type=int, default=24, help="random architectures for the rank correlation")
    parser.add_argument("--out", type=Path, help="also write the table of methods there, as CSV")
    args = parser.parse_args()
    targets = args.target or ["throughput>=1.25x", "throughput>=2x", "throughput>=1.5x"]
    with tempfile.TemporaryDirectory(dir=args.run.resolve().parent) as scratch:
        found = [at_target(args.run, target, args.tokens, args.random, Path(scratch)) for target in targets]
    tables = [table for table, _ in found]
    for table, around in found:
        print(table.round(4).to_string(index=False), f"\nrank correlation: {rank_correlation(around)}\n")
    if args.out:
        pd.concat(tables).to_csv(args.out, index=False)
    last = tables[-1].set_index("method").kl
    figures = {method: round(float(kl), 4) for method, kl in last.items()}
    ratio = round(float(last["additive"] / last["refined"]), 3)
    print(json.dumps({"ratio": ratio, "target": targets[-1], **rank_correlation(found[-1][1]), **figures}))


if __name__ == "__main__":
    main()
