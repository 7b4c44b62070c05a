# SPDX-License-Identifier: Apache-2.0
"""A run directory as the other stages leave it, with made-up but consistent figures: test data, nothing else."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from puzzle.architecture import PARENT, Architecture, ModelShape, SubblockVariant
from puzzle.config import RunConfig
from puzzle.costs import CONSTANT, MODEL, CostModel, Scenario, Solution, Target, latency_coefficients, measure
from puzzle.run import Run

SHAPE = ModelShape(6, 96, 8, 4, 12, 256, 1000, tied_embeddings=True)
CONFIGS = {
    "attention": {
        PARENT: {"num_kv_heads": 4},
        "kv2": {"num_kv_heads": 2},
        "kv1": {"num_kv_heads": 1},
        "linear": {"linear": True},
        "no_op": {"no_op": True},
    },
    "ffn": {
        PARENT: {"intermediate_size": 256},
        "ffn128": {"intermediate_size": 128},
        "ffn64": {"intermediate_size": 64},
        "no_op": {"no_op": True},
    },
}
VARIANTS = {subblock: list(configs) for subblock, configs in CONFIGS.items()}
SHARE = {"kv2": 0.9, "kv1": 0.85, "linear": 0.3, "no_op": 0.0, "ffn128": 0.5, "ffn64": 0.25, PARENT: 1.0}
KV = {"kv2": 0.5, "kv1": 0.25, PARENT: 1.0}
SCENARIO = Scenario(batch=2, prompt=64, generated=32)
COSTS = ["prefill_ms", "decode_ms", "weight_bytes", "kv_bytes_per_token", "params"]


def cost_table(layers: int) -> pd.DataFrame:
    params = {"attention": 2 * 96 * 96 + 2 * 96 * 48, "ffn": 3 * 96 * 256}
    rows = [[-1, MODEL, CONSTANT, 2.0, 0.5, 384_000.0, 0.0, 96_000.0, 0.05, 0.01]]
    for layer in range(layers):
        for subblock, names in VARIANTS.items():
            for name in names:
                share, n = SHARE[name], params[subblock] * SHARE[name]
                kv = 2 * 48 * 4 * KV.get(name, 0.0) if subblock == "attention" else 0.0
                rows.append([layer, subblock, name, 3.0 * share, 0.4 * share, 4 * n, kv, n, 0.1 * share, 0.02 * share])
    return pd.DataFrame(rows, columns=["layer", "subblock", "variant", *COSTS, "prefill_iqr_ms", "decode_iqr_ms"])


def score_table(layers: int, rng: np.random.Generator) -> pd.DataFrame:
    rows = []
    for layer in range(layers):
        edge = 1 + 6 * np.exp(-layer) + 3 * np.exp(layer - layers + 1)
        for subblock, names in VARIANTS.items():
            for name in names[1:]:
                kl = float(0.08 * (1 - SHARE[name]) ** 1.5 * edge * rng.lognormal(0, 0.5))
                rows.append([layer, subblock, name, kl, 0.9 * kl, 1 / (1 + kl), 2048, 0.05 * kl, "replace-1"])
    columns = ["layer", "subblock", "variant", "kl", "lm_loss_increase", "top1_agreement", "tokens", "stderr", "method"]
    return pd.DataFrame(rows, columns=columns)


def index_table(layers: int, rng: np.random.Generator) -> pd.DataFrame:
    rows = []
    for layer in range(layers):
        for subblock, names in VARIANTS.items():
            for name in names[1:]:
                start = 1.0 if name == "no_op" else float((1 - SHARE[name]) * rng.uniform(0.4, 1.1))
                trained = name != "no_op"
                closed = start * 0.7 if trained else None
                final = start * 0.55 if trained else start
                tokens = 16_384 if trained else 0
                rows.append([layer, subblock, name, name.rstrip("0123456789"), start, closed, final, tokens, "done"])
    columns = ["layer", "subblock", "variant", "kind", "error_start", "error_closed_form", "error", "tokens", "state"]
    return pd.DataFrame(rows, columns=columns)


class Maker:
    """Searches greedily over the made-up tables and writes what the stages would."""

    def __init__(self, layers: int):
        self.rng = np.random.default_rng(0)
        self.costs, self.scores, self.index = (
            cost_table(layers),
            score_table(layers, self.rng),
            index_table(layers, self.rng),
        )
        self.model = CostModel(self.costs, SCENARIO)
        self.layers = layers

    def solution(self, speedup: float, method: str, order: list[int]) -> Solution:
        """Take changes in the given order of rows of the score table until the speed-up is reached."""
        architecture, taken = Architecture.parent(self.layers), {}
        goal = measure("latency", self.model.parent(), SCENARIO) / speedup
        for row in self.scores.iloc[order].itertuples():
            if measure("latency", self.model.predict(architecture), SCENARIO) <= goal:
                break
            if SHARE[row.variant] < SHARE[architecture.name(row.layer, row.subblock)]:
                architecture = architecture.with_variant(SubblockVariant(row.layer, row.subblock, row.variant))
                taken[row.layer, row.subblock] = row.kl
        costs = self.model.predict(architecture)
        return Solution(
            architecture, sum(taken.values()), costs, "optimal", 0.0, 0.1, method, (f"throughput>={speedup}x",)
        )

    def solutions(self) -> tuple[Solution, list[dict], list[dict]]:
        saved = [3.1 - 3.0 * SHARE[name] for name in self.scores.variant]
        best = list(np.argsort(self.scores.kl.to_numpy() / saved))
        sweep = [self.solution(x, "highs", best).to_json() for x in (1.1, 1.2, 1.3, 1.5, 1.8, 2.2)]
        for point in sweep[:3]:
            point["true"] = {"kl": point["score"] * 1.1, "kl_stderr": point["score"] * 0.05, "perplexity": 18.0}
        others = []
        for method in ("random", "uniform_width", "depth"):
            for x in (1.2, 1.5):
                others.append(self.solution(x, method, list(self.rng.permutation(len(best)))).to_json())
        others[0]["true"] = {"kl": 2.5, "kl_stderr": 0.1, "perplexity": 99.0}
        return self.solution(1.3, "highs", best), sweep, others

    def figures(self, costs: dict[str, float], noise: float, **quality: float) -> dict[str, float]:
        prefill, decode = costs["prefill_ms"] * noise, costs["decode_ms"] * noise
        latency = prefill + latency_coefficients(SCENARIO)["decode_ms"] * decode
        return {
            **quality,
            "prefill_ms": prefill,
            "prefill_iqr_ms": 0.03 * prefill,
            "decode_ms_per_token": decode,
            "decode_iqr_ms": 0.02 * decode,
            "throughput_tokens_per_s": SCENARIO.batch * SCENARIO.generated * 1e3 / latency,
            **{c: costs[c] for c in ("weight_bytes", "kv_bytes_per_token", "params")},
        }


def evaluation(maker: Maker, solution: Solution) -> dict:
    parent = maker.figures(
        maker.model.parent(), 1.03, perplexity=17.31, perplexity_stderr=0.21, kl=0.0, kl_stderr=0.0, top1_agreement=1.0
    )
    quality = {"perplexity": 24.92, "perplexity_stderr": 0.34, "kl": 0.412, "kl_stderr": 0.011, "top1_agreement": 0.683}
    before = maker.figures(solution.costs, 1.05, **quality)
    quality = {"perplexity": 20.05, "perplexity_stderr": 0.26, "kl": 0.187, "kl_stderr": 0.006, "top1_agreement": 0.792}
    child = maker.figures(solution.costs, 1.04, **quality)
    predicted = maker.figures(solution.costs, 1.0)
    reached = child["throughput_tokens_per_s"] / parent["throughput_tokens_per_s"]
    target = Target.parse("throughput>=1.3x")
    chosen = solution.architecture
    blocks = [
        {"attention": CONFIGS["attention"][a], "ffn": CONFIGS["ffn"][f]}
        for a, f in zip(chosen.attention, chosen.ffn, strict=True)
    ]
    return {
        "models": {"parent": parent, "child_before_healing": before, "child": child},
        "predicted": {k: v for k, v in predicted.items() if "iqr" not in k},
        "targets": [
            {"target": target.text, "asked": 1.3, "reached": reached, "spread": 0.02, "met": target.met(reached)}
        ],
        "front_check": [
            {
                "changes": 3.0,
                "prefill_predicted": 0.9,
                "prefill_measured": 0.9,
                "decode_predicted": 0.8,
                "decode_measured": 0.88,
            },
            {
                "changes": 7.0,
                "prefill_predicted": 0.6,
                "prefill_measured": 0.5,
                "decode_predicted": 0.7,
                "decode_measured": 0.7,
            },
            {
                "changes": 9.0,
                "prefill_predicted": 0.5,
                "prefill_measured": 0.48,
                "decode_predicted": 0.5,
                "decode_measured": 0.52,
            },
        ],
        "samples": [
            {
                "prompt": "The difference between a list and a tuple is",
                "parent": " that a tuple cannot be changed once it has been made.\n\nA list can: it grows and shrinks.",
                "child_before_healing": " a tuple of the tuple of the list, of the list.",
                "child": " that a list can be changed, while a tuple is fixed once it is created.",
            }
        ],
        "machine": {"cpu": "Example CPU 9000", "cores": 2, "memory_bytes": 16 * 2**30, "device": "cpu", "os": "Linux"},
        "shape": {**asdict(SHAPE), "num_layers": maker.layers},
        "blocks": blocks,
    }


def write_run(path: Path, layers: int = 6, parent: str = "models/toy-llama", name: str = "child") -> Run:
    """Write a finished run of a toy parent with made-up figures."""
    config = RunConfig(
        parent=parent,
        search_space={"attention": VARIANTS["attention"], "ffn": VARIANTS["ffn"]},
        targets=["throughput>=1.3x"],
        scenario={"batch": SCENARIO.batch, "prompt": SCENARIO.prompt, "generated": SCENARIO.generated},
        name=name,
    )
    run, maker = Run.create(path, config), Maker(layers)
    solution, sweep, baselines = maker.solutions()
    for folder in ("data", "library", "solutions", "healing"):
        (path / folder).mkdir()
    maker.index.to_parquet(path / "library" / "index.parquet")
    maker.scores.to_parquet(path / "scores.parquet")
    maker.costs.to_parquet(path / "costs.parquet")
    split = {"tokens": 16_384, "sequences": 64, "documents": 31, "sha256": "ab12" * 16}
    curve = [{"tokens": t, "kl": kl} for t, kl in ((0, 0.412), (32_768, 0.26), (65_536, 0.21), (131_072, 0.187))]
    stages = ("data", "library", "score", "search", "assemble", "heal", "evaluate")
    entry = {"state": "done", "inputs": {"version": "1"}, "started": "2026-01-01T12:00:00+00:00"}
    entry["outputs"] = {"some/output.json": {"bytes": 7, "sha256": "cd34" * 16}}
    entry["versions"] = {"python": "3.11.2", "puzzle-nas": "0.1.0", "torch": "2.9.0"}
    files = {
        "data/splits.json": {"calibration": split, "training": split, "scoring": split, "validation": split},
        f"solutions/{name}.json": solution.to_json(),
        "solutions/front.json": sweep,
        "solutions/baselines.json": baselines,
        "healing/curve.json": curve,
        "evaluation.json": evaluation(maker, solution),
        "manifest.json": {
            "stages": {
                s: {**entry, "seconds": 4.0 * i + 1.5, "peak_bytes": (i + 1) * 2**28} for i, s in enumerate(stages)
            }
            | {"report": {"state": "running", "inputs": {}, "started": "2026-01-01T12:09:00+00:00"}}
        },
    }
    for file, data in files.items():
        (path / file).write_text(json.dumps(data), encoding="utf-8")
    return run
