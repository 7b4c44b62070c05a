# SPDX-License-Identifier: Apache-2.0
"""Search over 80 layers x (6 attention + 9 FFN variants): a sweep of 20 points against 20 separate solves.

    python benchmarks/search.py

Checks that both reach the same scores, that HiGHS and CBC agree, and shows how far simpler methods are from the
optimum. The figures of the tables are drawn at random, in the proportions of a 70B model.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from puzzle.costs import Constraint, Scenario
from puzzle.errors import InfeasibleError
from puzzle.search import baselines, solve, sweep

LAYERS, POINTS, WORKERS, ROUNDS = 80, 20, 2, 3
SCENARIO = Scenario(batch=16, prompt=2048, generated=512)
TARGETS = ["throughput>=1.8x", "memory<=0.7x"]
# Each variant's share of the parent's subblock: time and weights, KV cache, loss.
ATTENTION = {
    "parent": (1.0, 1.0, 0.0),
    "kv4": (0.8, 0.5, 0.2),
    "kv2": (0.7, 0.25, 0.4),
    "kv1": (0.65, 0.125, 0.7),
    "linear": (0.25, 0.0, 1.3),
    "no_op": (0.0, 0.0, 1.8),
}
WIDTHS = {"parent": 28672, "ffn24832": 24832, "ffn21504": 21504, "ffn14336": 14336, "ffn7168": 7168, "ffn5632": 5632}
FFN = {name: (w / 28672, 0.0, (1 - w / 28672) ** 1.5) for name, w in {**WIDTHS, "ffn2816": 2816}.items()}
FFN |= {"linear": (0.1, 0.0, 1.1), "no_op": (0.0, 0.0, 1.3)}


def tables(seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Score table and cost table; costs are the same in all layers, as where identical variants are measured once."""
    rng = np.random.default_rng(seed)
    scores, costs = [], [(None, "model", "constant", 8.0, 2.0, 4e9, 0.0, 2e9)]
    for subblock, variants, ms, weight in (("attention", ATTENTION, 0.3, 1.5e8), ("ffn", FFN, 0.7, 7e8)):
        for name, (size, kv, _) in variants.items():
            noise = size * (1 + 0.01 * rng.normal())
            bytes_ = 2 * weight * size
            costs.append((None, subblock, name, 60 * ms * noise, ms * noise, bytes_, 4096 * kv, weight * size))
        for layer in range(LAYERS):
            base = rng.lognormal(-4, 1) * (1 + 3 * (layer < 3) + 2 * (layer > LAYERS - 3))
            scores += [
                (layer, subblock, name, loss * base * rng.lognormal(0, 0.25)) for name, (_, _, loss) in variants.items()
            ]
    columns = ["prefill_ms", "decode_ms", "weight_bytes", "kv_bytes_per_token", "params"]
    return (
        pd.DataFrame(scores, columns=["layer", "subblock", "variant", "score"]),
        pd.DataFrame(costs, columns=["layer", "subblock", "variant", *columns]),
    )


def solvers() -> dict[str, float]:
    """Median seconds of one solve with each solver, tables read included."""
    seconds: dict[str, list[float]] = {"highs": [], "cbc": []}
    for seed in range(5):
        scores, costs = tables(seed)
        found = {}
        for solver in seconds:
            start = time.perf_counter()
            found[solver] = solve(scores, costs, TARGETS, SCENARIO, solver=solver).score
            seconds[solver].append(time.perf_counter() - start)
        if abs(found["highs"] - found["cbc"]) > 1e-9 * found["cbc"]:
            raise SystemExit(f"the solvers disagree on tables {seed}: {found}")
    return {solver: statistics.median(values) for solver, values in seconds.items()}


def sweeps() -> dict[str, float]:
    """Median seconds of a sweep and of separate solves for the same bounds on the time, in turns."""
    scores, costs = tables(0)
    form = {"prefill_ms": 1.0, "decode_ms": float(SCENARIO.generated)}
    seconds: dict[str, list[float]] = {"sweep_s": [], "separate_s": []}
    for _ in range(ROUNDS):
        start = time.perf_counter()
        front = sweep(scores, costs, "throughput", POINTS, SCENARIO, workers=WORKERS).solutions
        seconds["sweep_s"].append(time.perf_counter() - start)
        first, last = (sum(k * s.costs[c] for c, k in form.items()) for s in (front[0], front[-1]))
        limits = [Constraint("time", form, bound) for bound in np.linspace(first, last, POINTS)]
        start = time.perf_counter()
        alone = [solve(scores, costs, [limit], SCENARIO).score for limit in limits]
        seconds["separate_s"].append(time.perf_counter() - start)
        if not np.allclose(alone, [s.score for s in front], rtol=1e-9, atol=1e-12):
            raise SystemExit("the sweep and the separate solves disagree")
    return {name: statistics.median(values) for name, values in seconds.items()}


def startup() -> dict[str, float]:
    """Median seconds of a fresh `puzzle search` on four layers, from its start to its answer, and of bare imports."""
    scores, costs = tables(0)
    with tempfile.TemporaryDirectory() as folder:
        scores[scores.layer < 4].to_csv(Path(folder, "scores.csv"), index=False)
        costs.to_csv(Path(folder, "costs.csv"), index=False)
        command = "puzzle search --scores scores.csv --costs costs.csv --target decode<=0.6x --json"
        commands = {
            "start_s": [sys.executable, "-m", *command.split()],
            "imports_s": [sys.executable, "-c", "import pandas, pulp"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(10):
            for name, words in commands.items():
                start = time.perf_counter()
                subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def simpler_methods() -> dict[str, float]:
    """Score of each baseline over that of the optimum; infinite where it does not meet the targets."""
    scores, costs = tables(0)
    optimum = solve(scores, costs, TARGETS, SCENARIO).score
    influence = scores[scores.variant == "no_op"].groupby("layer").score.sum()
    ratios = {}
    for method, options in (
        (baselines.greedy, {}),
        (baselines.paper_greedy, {}),
        (baselines.no_op_only, {}),
        (baselines.depth_pruning, {"block_influence": influence}),
        (baselines.uniform_ffn_width, {}),
        (baselines.uniform_gqa, {}),
        (baselines.random_search, {"budget": 1000}),
        (baselines.largest_that_fits, {}),
    ):
        try:
            ratios[method.__name__] = method(scores, costs, TARGETS, SCENARIO, **options).score / optimum
        except InfeasibleError:
            ratios[method.__name__] = float("inf")
    return ratios


def main() -> None:
    begin, one, many, others = startup(), solvers(), sweeps(), simpler_methods()
    print(f"a fresh `puzzle search` {begin['start_s']:.2f} s, bare `import pandas, pulp` {begin['imports_s']:.2f} s")
    print(f"one solve, {', '.join(TARGETS)}: HiGHS {one['highs']:.2f} s, CBC {one['cbc']:.2f} s, same objective")
    print(
        f"{POINTS} points: sweep with {WORKERS} threads {many['sweep_s']:.2f} s, "
        f"separate solves {many['separate_s']:.2f} s, same scores"
    )
    print("score over the optimum's:")
    for name, ratio in others.items():
        print(f"  {name:20s} {'targets missed' if ratio == float('inf') else f'{ratio:.4f}'}")
    print(
        json.dumps(
            {
                "ratio": round(many["separate_s"] / many["sweep_s"], 3),
                "highs_s": round(one["highs"], 3),
                "cbc_s": round(one["cbc"], 3),
                **{name: round(value, 3) for name, value in (many | begin).items()},
                "start_over_imports": round(begin["start_s"] / begin["imports_s"], 3),
                "greedy_over_optimum": round(others["greedy"], 5),
            }
        )
    )


if __name__ == "__main__":
    main()
