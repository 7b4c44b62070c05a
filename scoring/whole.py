# SPDX-License-Identifier: Apache-2.0
"""The check: parent and child measured as wholes, beside what the tables predicted. RUN/evaluation.json."""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from puzzle.architecture import plain
from puzzle.checkpoint import Checkpoint, find
from puzzle.costs import CostModel, Scenario, Target, measure
from puzzle.data import load_split
from puzzle.devices import set_threads
from puzzle.evaluate import BATCH_TOKENS, evaluate, load
from puzzle.run import Progress, Run, write_json
from puzzle.scoring.latency import Timing, time_models
from puzzle.variants import block_configs

VERSION = 1
SAMPLE_TOKENS = 64
SIZES = ("weight_bytes", "kv_bytes_per_token", "params")


def evaluate_child(run: Run, progress: Progress) -> None:
    """Measure parent, child and unhealed child: quality on held-out text, latency in turns, sizes, a sample."""
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
    timings = time_models(models, scenario, checkpoint.shape.vocab_size, config.measure, progress)
    predictor = CostModel(pd.read_parquet(run.path / "costs.parquet"), scenario)
    predicted = predictor.predict(run.solution.architecture)
    counted = {"parent": predictor.parent(), "child_before_healing": predicted, "child": predicted}
    measured = {
        name: {
            "prefill_ms": float(np.median(timing.prefill)),
            "decode_ms": float(np.median(timing.decode)),
            **{size: counted[name][size] for size in SIZES},
        }
        for name, timing in timings.items()
    }
    blocks = block_configs(run.solution.architecture, checkpoint.shape)
    evaluation = {
        "models": {
            name: quality[name] | whole_figures(measured[name], scenario) | spreads(timings[name]) for name in models
        },
        "predicted": whole_figures(predicted, scenario),
        "targets": [reached(Target.parse(t), timings, measured, scenario) for t in config.targets],
        "samples": [{"prompt": config.sample_prompt, **samples}],
        "scenario": asdict(scenario),
        "machine": machine(config.device),
        "shape": asdict(checkpoint.shape),
        "blocks": [{"attention": plain(b.attention), "ffn": plain(b.ffn)} for b in blocks],
    }
    write_json(run.path / "evaluation.json", evaluation)


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
