# SPDX-License-Identifier: Apache-2.0
"""The check: parent, child and some of the front measured as wholes, beside what the tables predicted.

It makes RUN/evaluation.json.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from puzzle.architecture import Architecture, plain
from puzzle.checkpoint import Checkpoint, find
from puzzle.costs import CostModel, Scenario, Solution, Target, measure
from puzzle.data import load_split
from puzzle.devices import set_threads
from puzzle.evaluate import BATCH_TOKENS, evaluate, load
from puzzle.run import Progress, Run, read_json, write_json
from puzzle.scoring.latency import PHASES, Stacks, Timing, forward, time_models
from puzzle.variants import block_configs

VERSION = 2
SAMPLE_TOKENS = 64
SIZES = ("weight_bytes", "kv_bytes_per_token", "params")


def evaluate_child(run: Run, progress: Progress) -> None:
    """Measure parent, child and unhealed child: quality on held-out text, latency in turns, sizes, a sample.

    A few architectures of the front are timed in the same turns, with weights that are all one number.
    """
    config, scenario = run.config, run.config.workload
    set_threads(config.machine.threads)
    checkpoint = Checkpoint(find(config.parent))
    models = {
        name: load(folder, "float32", config.device)
        for name, folder in (("parent", checkpoint.path), ("child_before_healing", run.unhealed), ("child", run.child))
    }
    tokens = load_split(run.path / "data", "validation")
    quality = evaluate(models, models["parent"], tokens, max(1, BATCH_TOKENS // config.data.seq_length), progress)
    tokenizer = checkpoint.tokenizer()
    samples = {name: continue_prompt(model, tokenizer, config.sample_prompt) for name, model in models.items()}

    for model in models.values():
        model.to(getattr(torch, scenario.dtype))
    front = spread_out(run, config.measure.front_checks)
    stacks = Stacks(checkpoint, scenario)
    checked = {i: stacks.add(block_configs(a, checkpoint.shape)) for i, a in enumerate(front)}
    timings = time_models(models | checked, scenario, checkpoint.shape.vocab_size, config.measure, progress)
    predictor = CostModel(pd.read_parquet(run.path / "costs.parquet"), scenario)
    predicted = predictor.predict(run.solution.architecture)
    measured = {
        name: {
            "prefill_ms": float(np.median(timings[name].prefill)),
            "decode_ms": float(np.median(timings[name].decode)),
            **sizes(model),
        }
        for name, model in models.items()
    }
    blocks = block_configs(run.solution.architecture, checkpoint.shape)
    evaluation = {
        "models": {
            name: quality[name] | whole_figures(measured[name], scenario) | spreads(timings[name]) for name in models
        },
        "predicted": whole_figures(predicted, scenario),
        "front_check": cost_check(predictor, dict(enumerate(front)), timings, timings["parent"]),
        "targets": [reached(Target.parse(t), timings, measured, scenario) for t in config.targets],
        "samples": [{"prompt": config.sample_prompt, **samples}],
        "scenario": asdict(scenario),
        "machine": machine(config.device),
        "shape": asdict(checkpoint.shape),
        "blocks": [{"attention": plain(b.attention), "ffn": plain(b.ffn)} for b in blocks],
    }
    write_json(run.path / "evaluation.json", evaluation)


def spread_out(run: Run, count: int) -> list[Architecture]:
    """So many changed architectures of the run's front, evenly from its one end to the other."""
    front = [Solution.from_json(s).architecture for s in read_json(run.path / "solutions" / "sweep.json")]
    changed = [architecture for architecture in front if architecture.changes]
    picked = np.linspace(0, len(changed) - 1, min(count, len(changed))).round().astype(int)
    return [changed[i] for i in picked]


def cost_check(
    costs: CostModel, architectures: Mapping[int, Architecture], timings: Mapping[Any, Timing], parent: Timing
) -> list[dict[str, float]]:
    """Times of whole models over the parent's, by the sum of the table and by the clock.

    Args:
        costs: predicts.
        architectures: by the name that `timings` has them under.
        timings: of the whole models.
        parent: timed in the same turns; each round is compared with the parent's.

    Returns:
        Per architecture: `changes`, and of each phase `..._predicted` and `..._measured`.
    """
    whole, rows = costs.parent(), []
    for name, architecture in architectures.items():
        predicted, row = costs.predict(architecture), {"changes": float(len(architecture.changes))}
        for phase in PHASES:
            rounds = getattr(timings[name], phase) / getattr(parent, phase)
            row[f"{phase}_predicted"] = predicted[f"{phase}_ms"] / whole[f"{phase}_ms"]
            row[f"{phase}_measured"] = float(np.median(rounds))
        rows.append(row)
    return rows


def sizes(model: PreTrainedModel) -> dict[str, float]:
    """Bytes of the weights as loaded, tied ones once; bytes that a token adds to the KV cache; parameters."""
    tokens = torch.zeros(1, 8, dtype=torch.long, device=model.device)
    stored = [t for layer in forward(model, [tokens]).layers for t in (layer.keys, layer.values) if t is not None]
    return {
        "weight_bytes": float(sum(p.nbytes for p in model.parameters())),
        "kv_bytes_per_token": sum(t.nbytes for t in stored) / tokens.numel(),
        "params": float(model.num_parameters()),
    }


@torch.no_grad()
def continue_prompt(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """Greedy continuation of a prompt, without the prompt."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    output = model.generate(
        **inputs, max_new_tokens=SAMPLE_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id or 0
    )
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def whole_figures(costs: dict[str, float], scenario: Scenario) -> dict[str, float]:
    """The figures of the report, from a whole model's costs by column."""
    return {
        "prefill_ms": costs["prefill_ms"],
        "decode_ms_per_token": costs["decode_ms"],
        "throughput_tokens_per_s": measure("throughput", costs, scenario),
        **{size: costs[size] for size in SIZES},
    }


def spreads(timing: Timing) -> dict[str, float]:
    """Interquartile ranges over the timing rounds, in ms."""
    return {"prefill_iqr_ms": iqr(timing.prefill), "decode_iqr_ms": iqr(timing.decode)}


def iqr(values: Sequence[float] | np.ndarray) -> float:
    low, high = np.percentile(values, [25, 75])
    return float(high - low)


def reached(
    target: Target, timings: dict[str, Timing], measured: dict[str, dict[str, float]], scenario: Scenario
) -> dict[str, Any]:
    """What the child reaches of a target; `spread` is half the interquartile range over the timing rounds.

    Rounds of parent and child follow each other, so a relative target compares neighbours.
    """
    child, parent = timings["child"], timings["parent"]
    rounds = [
        target.reached(
            measured["child"] | {"prefill_ms": child.prefill[i], "decode_ms": child.decode[i]},
            measured["parent"] | {"prefill_ms": parent.prefill[i], "decode_ms": parent.decode[i]},
            scenario,
        )
        for i in range(len(child.prefill))
    ]
    value, spread = float(np.median(rounds)), iqr(rounds) / 2
    met = target.met(value + spread if target.sense == ">=" else value - spread)
    return {"target": target.text, "asked": target.value, "reached": value, "spread": spread, "met": bool(met)}


def machine(device: str) -> dict[str, Any]:
    """The machine the figures were measured on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "os": platform.platform(),
    }
