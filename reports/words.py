# SPDX-License-Identifier: Apache-2.0
"""How the report says things: numbers with sensible digits and units, variants and results in plain English."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

from puzzle.architecture import PARENT, Architecture, ModelShape, Subblock
from puzzle.costs import Target
from puzzle.reports.data import RunData

Kind = Literal["parent", "narrow", "linear", "removed", "other"]

Bar = tuple[Kind, float, str]
"""How a variant is drawn: its kind, the share of the parent's width that it keeps, a short label."""

METHODS = {
    "refined": "Puzzle: scores in context",
    "additive": "Puzzle: sum of scores",
    "uniform_ffn_width": "one FFN width for all layers",
    "uniform_gqa": "one number of KV heads for all layers",
    "depth_pruning": "whole layers out (ShortGPT)",
    "greedy": "greedy by score per cost",
    "paper_greedy": "the Puzzle paper’s greedy",
    "largest_that_fits": "most parameters that fit",
    "no_op_only": "subblocks only left out",
    "random_search": "best of random ones",
    "optuna_nsga2": "Optuna NSGA-II",
    "optuna_tpe": "Optuna TPE",
}

SUBBLOCK_NAMES: dict[Subblock, str] = {"attention": "Attention", "ffn": "FFN"}


def number(value: float, digits: int = 3) -> str:
    """`value` with this many significant digits, never in scientific notation, with a real minus sign."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}".replace("-", "−")


def plus_minus(value: float, error: float) -> tuple[str, str]:
    """A value and its error, both to the second significant digit of the error."""
    if not error > 0:
        return number(value), ""
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:,.{decimals}f}".replace("-", "−"), f"{error:,.{decimals}f}"


def scaled(value: float, units: Sequence[str], base: float) -> str:
    """`value` in the largest of the units, each `base` times the one before, that leaves at least 1."""
    power = min(len(units) - 1, max(0, math.floor(math.log(value, base) + 1e-9))) if value >= 1 else 0
    value /= base**power
    text = f"{value:,.0f}" if float(value).is_integer() else number(value)
    return f"{text} {units[power]}".strip()


def size(value: float) -> str:
    return scaled(value, ("B", "KiB", "MiB", "GiB", "TiB"), 1024)


def count(value: float) -> str:
    return scaled(value, ("", "K", "M", "B"), 1000)


def percent(share: float) -> str:
    """A share as percent: one decimal below 10 %, and never a rounded-up 100 %."""
    value = 100 * share
    text = f"{value:.1f}" if abs(value) < 9.95 or 99.5 <= value < 100 else f"{value:.0f}"
    return f"{text}%".replace("-", "−")


def change(new: float, old: float) -> str:
    """The relative change from `old` to `new`, signed."""
    if not old:
        return ""
    text = percent(new / old - 1)
    return "0%" if text in ("0.0%", "−0.0%") else text if text.startswith("−") else f"+{text}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{number(seconds, 2)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def target_value(target: Target, value: float) -> str:
    """A value of a target's measure, with its unit."""
    if target.relative:
        return f"{value:g}×"
    if target.measure == "throughput":
        return f"{number(value)} tokens/s"
    if target.measure in ("latency", "prefill", "ttft", "decode"):
        return f"{number(value)} ms"
    if target.measure == "energy":
        return f"{number(value)} J per token"
    return count(value) if target.measure == "params" else size(value)


def target_words(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of `targets` in words: `wanted`, `reached`, `met`."""
    target = Target.parse(entry["target"])
    reached, spread = entry["reached"], entry["spread"] or 0.0
    if target.relative:
        value, error = plus_minus(reached, spread)
        text = f"{value}× ± {error}" if error else f"{value}×"
    else:
        text = target_value(target, reached) + (f" ± {target_value(target, spread)}" if spread else "")
    sign = "≥" if target.sense == ">=" else "≤"
    measure = target.measure.replace("_", " ").replace("kv", "KV")
    return {
        "wanted": f"{measure} {sign} {target_value(target, target.value)}",
        "reached": text,
        "met": bool(entry["met"]),
    }


def bar(name: str, subblock: Subblock, shape: ModelShape) -> Bar:
    full = shape.num_kv_heads if subblock == "attention" else shape.intermediate_size
    if name == PARENT:
        return "parent", 1.0, "as in the parent"
    if name == "no_op":
        return "removed", 0.0, "removed"
    if name == "linear":
        return "linear", 0.0, "linear"
    prefix, digits = ("kv", name.removeprefix("kv")) if subblock == "attention" else ("ffn", name.removeprefix("ffn"))
    if not name.startswith(prefix) or not digits.isdigit():
        return "other", 1.0, name.replace("_", " ")
    width = int(digits)
    if subblock == "ffn":
        return "narrow", width / full, f"width {width:,}"
    return "narrow", width / full, f"{width} KV head{'s' if width > 1 else ''}"


def layer_ranges(layers: Sequence[int]) -> str:
    """`[1, 2, 3, 7]` as `1–3, 7`."""
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(sorted(layers)), lambda p: p[1] - p[0])]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def changed_layers(architecture: Architecture, shape: ModelShape) -> list[dict[str, str]]:
    """What an architecture changes: one entry per half and variant, with its layers."""
    found: dict[tuple[Subblock, str], list[int]] = {}
    for variant in architecture.changes:
        found.setdefault((variant.subblock, variant.name), []).append(variant.layer)
    return [
        {
            "half": SUBBLOCK_NAMES[subblock],
            "what": bar(name, subblock, shape)[2],
            "layers": layer_ranges(layers),
            "count": str(len(layers)),
        }
        for (subblock, name), layers in sorted(found.items(), key=lambda item: (item[0][0], -len(item[1])))
    ]


def changes_sentence(architecture: Architecture) -> str:
    return f"{len(architecture.changes)} of {2 * architecture.num_layers} subblocks changed"


def headline(data: RunData) -> tuple[str, str]:
    """The result: one sentence on speed and memory, then what it cost in quality and whether the targets are met."""
    parent, child = data.models["parent"], data.models["child"]
    speed = child["throughput_tokens_per_s"] / parent["throughput_tokens_per_s"]
    saved = 1 - data.memory(child) / data.memory(parent)
    memory = f"{percent(abs(saved))} {'less' if saved >= 0 else 'more'} memory"
    verb = "rises" if child["perplexity"] > parent["perplexity"] else "goes"
    return (
        f"The child of {data.parent_name} generates text {number(speed)}× as fast as its parent and needs {memory}.",
        f"It picks the parent’s next token {percent(child['top1_agreement'])} of the time, and its perplexity {verb} "
        f"from {number(parent['perplexity'])} to {number(child['perplexity'])}. {_verdict(data)}",
    )


def _verdict(data: RunData) -> str:
    targets = [target_words(entry) for entry in data.targets]
    missed = [t for t in targets if not t["met"]]
    if len(targets) == 1:
        verb = "misses" if missed else "meets"
        return f"It {verb} the target, {targets[0]['wanted']}, with {targets[0]['reached']}."
    if not missed:
        return f"It meets all {len(targets)} targets."
    return f"It misses {len(missed)} of {len(targets)} targets."


def load_snippet(data: RunData) -> str:
    """Python that loads the child and continues the sample prompt."""
    return f"""\
import puzzle  # teaches transformers to load the child
from transformers import AutoModelForCausalLM, AutoTokenizer

path = {str(data.child_path)!r}
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")

inputs = tokenizer({data.config.sample_prompt!r}, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
print(tokenizer.decode(output[0], skip_special_tokens=True))
"""


def vllm_obstacle(architecture: Architecture) -> str | None:
    """Why vLLM's `nemotron_nas` cannot serve this architecture, or None where it can."""
    names = {v.name for v in architecture.variants}
    if "linear" in names:
        return "vLLM cannot serve this child: it has no linear subblocks."
    if architecture.attention[0] == "no_op":
        return "vLLM cannot serve this child: it needs the attention of layer 0, which was removed here."
    if any(name.startswith("window") for name in names):
        return "vLLM cannot serve this child: it would silently ignore the attention windows."
    return None
