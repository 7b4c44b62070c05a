# SPDX-License-Identifier: Apache-2.0
"""The additive cost model against the clock: predicted and measured latency of random architectures.

    python benchmarks/cost_model.py PARENT [--search-space NAME] [--architectures N] [--dtype float32]

Costs are measured as a run does. Then the parent and random architectures, which change a sixth to all of their
subblocks, are timed as wholes in turns. Compared is each architecture's time over the parent's: predicted over
predicted, measured over measured. Weights do not matter for the time; all are one number.
"""

import argparse
import json

import numpy as np
import pandas as pd

from puzzle import search_spaces
from puzzle.architecture import PARENT, Architecture, SubblockVariant
from puzzle.checkpoint import Checkpoint, find
from puzzle.config import MeasureConfig, load_search_space
from puzzle.costs import CostModel, Scenario
from puzzle.devices import resolve_dtype
from puzzle.run import silent
from puzzle.scoring.latency import PHASES, Stacks, measure_costs, time_models
from puzzle.scoring.whole import cost_check
from puzzle.variants import block_configs, expand


def random_architectures(variants: list[SubblockVariant], count: int) -> list[Architecture]:
    """From few changes to changes everywhere."""
    rng = np.random.default_rng(0)
    parent = Architecture.parent(1 + max(v.layer for v in variants))
    found = []
    for share in np.linspace(1 / 6, 1, count):
        child = parent
        for place in parent.variants:
            options = [v for v in variants if (v.layer, v.subblock) == (place.layer, place.subblock)]
            others = [v for v in options if v.name != PARENT]
            if others and rng.random() < share:
                child = child.with_variant(others[rng.integers(len(others))])
        found.append(child)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parent", help="a checkpoint")
    parser.add_argument("--search-space", default="smollm2-quick")
    parser.add_argument("--architectures", type=int, default=10)
    parser.add_argument("--dtype", default=resolve_dtype("auto", "cpu"))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--generated", type=int, default=128)
    args = parser.parse_args()
    checkpoint = Checkpoint(find(args.parent))
    scenario = Scenario(1, args.prompt, args.generated, args.dtype, "cpu")
    variants = expand(load_search_space(search_spaces.path(args.search_space)), checkpoint.shape)
    config = MeasureConfig()
    predictor = CostModel(measure_costs(checkpoint, variants, scenario, config, silent), scenario)
    architectures = random_architectures(variants, args.architectures)
    stacks = Stacks(checkpoint, scenario)
    models = {
        name: stacks.add(block_configs(architecture, checkpoint.shape))
        for name, architecture in [(-1, Architecture.parent(checkpoint.shape.num_layers)), *enumerate(architectures)]
    }
    times = time_models(models, scenario, checkpoint.shape.vocab_size, config, silent)
    table = pd.DataFrame(cost_check(predictor, dict(enumerate(architectures)), times, times[-1]))
    for phase in PHASES:
        table[f"{phase}_off"] = table[f"{phase}_predicted"] / table[f"{phase}_measured"] - 1
    print(table.round(3).to_string())
    errors = {f"{p}_error": float(table[f"{p}_off"].abs().median()) for p in PHASES}
    parent_ms = {f"parent_{p}_ms": float(np.median(getattr(times[-1], p))) for p in PHASES}
    off = {f"parent_{p}_predicted_ms": predictor.parent()[f"{p}_ms"] for p in PHASES}
    figures = {k: round(v, 4) for k, v in {**errors, **parent_ms, **off}.items()}
    print(json.dumps({"ratio": round(1 + max(errors.values()), 4), **figures}))


if __name__ == "__main__":
    main()
