# SPDX-License-Identifier: Apache-2.0
"""How good the chosen architectures are before healing: refined, additive, and every baseline, by their true loss.

    python benchmarks/refine.py RUN [--target "throughput>=1.5x" ...] [--tokens N] [--out FILE]

RUN is a run whose library is made. For each target a copy of it (by hard links) goes through scoring, search, refining
and comparison; all methods choose from the same variants, costs and scores. The true loss is the KL divergence from
the parent on N held-out tokens that the search does not see. `ratio` is the loss of the additive optimum over that of
the refined child, at the last target.
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

import pandas as pd

from puzzle import pipeline
from puzzle.costs import measure
from puzzle.run import Run, read_json, silent


def at_target(source: Path, target: str, tokens: int, scratch: Path) -> pd.DataFrame:
    """One row a method: KL, its standard error, perplexity, predicted speed over the parent's."""
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
    shutil.rmtree(folder)
    return pd.DataFrame(rows).sort_values("kl", ignore_index=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--target", action="append", help="may be given several times; default: 1.25x, 2x, 1.5x")
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--out", type=Path, help="also write the table there, as CSV")
    args = parser.parse_args()
    targets = args.target or ["throughput>=1.25x", "throughput>=2x", "throughput>=1.5x"]
    with tempfile.TemporaryDirectory(dir=args.run.resolve().parent) as scratch:
        tables = [at_target(args.run, target, args.tokens, Path(scratch)) for target in targets]
    for table in tables:
        print(table.round(4).to_string(index=False), "\n")
    if args.out:
        pd.concat(tables).to_csv(args.out, index=False)
    last = tables[-1].set_index("method").kl
    figures = {method: round(float(kl), 4) for method, kl in last.items()}
    print(json.dumps({"ratio": round(float(last["additive"] / last["refined"]), 3), "target": targets[-1], **figures}))


if __name__ == "__main__":
    main()
