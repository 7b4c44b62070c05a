# SPDX-License-Identifier: Apache-2.0
"""Writes the report of a run, the comparison of several, and a model card. No torch.

A report is a folder: `index.html` (self-contained: opens from disk, needs no network, readable without JavaScript),
`summary.json` for scripts, `figures/` (SVG and PNG) and `tables/` (CSV).
"""

import base64
import gzip
import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from puzzle.architecture import SUBBLOCKS
from puzzle.costs import measure
from puzzle.reports import figures, layers, words
from puzzle.reports.data import COSTS, ERRORS, MODELS, PHASES, RunData, read, summary
from puzzle.reports.front import Front
from puzzle.run import Progress, Run, atomic, silent

_TEMPLATES = Path(__file__).parent / "templates"
_ERRORS = {
    "perplexity": "perplexity_stderr",
    "kl": "kl_stderr",
    "prefill_ms": "prefill_iqr_ms",
    "decode_ms_per_token": "decode_iqr_ms",
}
_LABELS: dict[str, tuple[str, str, Callable[[float], str]]] = {
    "perplexity": ("Perplexity", "", words.number),
    "kl": ("KL from the parent", "nats per token", words.number),
    "top1_agreement": ("Same next token", "", words.percent),
    "prefill_ms": ("Prefill", "ms", words.number),
    "decode_ms_per_token": ("Decode", "ms per token", words.number),
    "throughput_tokens_per_s": ("Throughput", "tokens/s", words.number),
    "weight_bytes": ("Weights", "", words.size),
    "kv_bytes_per_token": ("KV cache", "per token", words.size),
    "memory": ("Memory in use", "weights and cache", words.size),
    "params": ("Parameters", "", words.count),
}


@dataclass(frozen=True)
class Drawing:
    """A figure of the page: how to draw it, and what it says to who cannot see it."""

    draw: figures.Draw
    label: str


def build(run: Run, progress: Progress = silent) -> None:
    """Write `RUN/report/`, whole or not at all, and its model card into the child.

    Raises:
        ConfigError: the run has not been evaluated yet, or one of its files is damaged.
        PuzzleError: the disk is full.
    """
    data = read(run)
    front = Front(relative=False)
    front.add(data)
    with atomic(run.path / "report") as folder:
        folder.mkdir()
        drawn = _write_figures(folder, _drawings(data, front), progress)
        _write_tables(folder, tables(data, front))
        (folder / "summary.json").write_text(json.dumps(summary(data), indent=1, allow_nan=False) + "\n", "utf-8")
        (folder / "index.html").write_text(_page("run.html.j2", _context(data, front, drawn)), "utf-8")
        (folder / "card.md").write_text(markdown(run), "utf-8")
    if run.child.is_dir():
        with atomic(run.child / "README.md") as card:
            shutil.copyfile(run.path / "report" / "card.md", card)


def compare(runs: list[Run], out: Path, progress: Progress = silent) -> None:
    """Write a report folder to `out` that overlays several runs; speeds are relative to each run's own parent.

    Raises:
        ConfigError: one of the runs has not been evaluated yet, or one of its files is damaged.
        PuzzleError: the disk is full.
    """
    read_runs = {str(run.path): read(run) for run in runs}
    front, colours = Front(relative=True), cycle(figures.SERIES)
    children = {name: front.add(data, name, next(colours)) for name, data in read_runs.items()}
    with atomic(out) as folder:
        folder.mkdir()
        drawn = _write_figures(folder, {"front": _front_drawing(front)}, progress)
        rows = {name: evaluation_rows(data, ("child",)) for name, data in read_runs.items()}
        _write_tables(folder, {"front": front.table(), "evaluation": _comparison_table(read_runs)})
        context = {"runs": read_runs, "rows": rows, "front": front, "children": children, "figures": drawn}
        context["headlines"] = {name: words.headline(data) for name, data in read_runs.items()}
        (folder / "index.html").write_text(_page("compare.html.j2", context), "utf-8")


def markdown(run: Run) -> str:
    """The result as the text of a model card, in Markdown with the hub's metadata in front.

    Raises:
        ConfigError: the run has not been evaluated yet, or one of its files is damaged.
    """
    data = read(run)
    context = {**_text_context(data), "metadata": _metadata(data)}
    return _environment(autoescape=False).get_template("card.md.j2").render(context)


def _metadata(data: RunData) -> str:
    """The YAML by which the hub files a model; name and licence of the parent where they are known."""
    from huggingface_hub import ModelCard, ModelCardData

    folder = Path(data.config.parent)
    card = folder / "README.md"
    parent = ModelCard.load(card, ignore_metadata_errors=True).data if card.is_file() else ModelCardData()
    return ModelCardData(
        license=parent.get("license"),
        license_name=parent.get("license_name"),
        license_link=parent.get("license_link"),
        language=parent.get("language"),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["puzzle", "compressed"],
        base_model=parent.get("base_model") if folder.is_dir() else _hub_name(data.config.parent),
    ).to_yaml()


def _hub_name(parent: str) -> str | None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(parent)
    except HFValidationError:
        return None
    return parent


def evaluation_rows(data: RunData, models: tuple[str, ...] = MODELS) -> list[dict[str, Any]]:
    """The evaluation table in words: a row a figure, with a value and its error for each model."""
    rows = []
    for key, (label, unit, form) in _LABELS.items():
        cells = {}
        for model in models:
            own = {**data.models[model], "memory": data.memory(data.models[model])}
            error = own.get(_ERRORS.get(key, ""), 0.0) / (2 if "_ms" in key else 1)
            if key == "throughput_tokens_per_s":
                error = data.throughput_spread(model)
            cells[model] = words.plus_minus(own[key], error) if error else (form(own[key]), "")
        row = {"key": key, "label": label, "unit": unit, "cells": cells}
        parent, child = (data.models[m] | {"memory": data.memory(data.models[m])} for m in ("parent", "child"))
        row["change"] = "" if key in ("kl", "top1_agreement") else words.change(child[key], parent[key])
        rows.append(row)
    return rows


def prediction_rows(data: RunData) -> list[dict[str, Any]]:
    """Predicted against measured costs in words: a row a cost, with `parent` and `child`."""
    predicted = {"parent": data.predicted_parent(), "child": data.predicted}
    rows = []
    for key in COSTS:
        label, unit, form = _LABELS[key]
        row: dict[str, Any] = {"label": label, "unit": unit}
        for model, costs in predicted.items():
            measured = data.models[model][key]
            row[model] = {
                "predicted": form(costs[key]),
                "measured": form(measured),
                "difference": words.change(costs[key], measured),
            }
        rows.append(row)
    return rows


def front_check(data: RunData) -> dict[str, Any]:
    """Predicted against measured times of the front: `rows` in words, and the median `error` of each phase."""
    rows = [
        {
            "changes": round(entry["changes"]),
            **{
                phase: {
                    "predicted": words.number(entry[f"{phase}_predicted"]),
                    "measured": words.number(entry[f"{phase}_measured"]),
                    "difference": words.change(entry[f"{phase}_predicted"], entry[f"{phase}_measured"]),
                }
                for phase in PHASES
            },
        }
        for entry in data.front_check
    ]
    return {"rows": rows, "error": data.front_errors()}


def method_rows(data: RunData) -> list[dict[str, Any]]:
    """Each way to choose an architecture in words, from the lowest measured loss up."""
    parent = data.predicted_parent()["throughput_tokens_per_s"]
    judged = [c for c in data.baselines if c.true]
    rows = []
    for candidate in sorted(judged, key=lambda c: c.true["kl"] if c.true else 0.0):
        solution, true = candidate.solution, candidate.true or {}
        rows.append(
            {
                "method": words.METHODS.get(solution.method, solution.method),
                "own": solution.method in ("refined", "additive"),
                "kl": words.plus_minus(true["kl"], true["kl_stderr"]),
                "perplexity": words.number(true["perplexity"]),
                "speed": words.number(measure("throughput", solution.costs, data.scenario) / parent),
            }
        )
    return rows


def round_rows(data: RunData) -> list[dict[str, Any]]:
    """Each round of refinement in words: what was tried, and the loss of the best so far on the scoring tokens."""
    return [
        {
            "number": r["number"],
            "tried": [
                {
                    "changes": t["radius"],
                    "predicted": words.number(t["predicted"]),
                    "score": words.number(t["score"]),
                }
                for t in r["trials"]
            ],
            "kl": words.number(r["solution"]["score"]),
        }
        for r in data.rounds
    ]


def local_errors(data: RunData) -> pd.DataFrame:
    """The median local errors over the layers, a row for each variant that has weights, labelled in words."""
    errors = {
        f"{words.SUBBLOCK_NAMES[subblock]}: {words.bar(name, subblock, data.shape)[2]}": own[ERRORS].median()
        for subblock in SUBBLOCKS
        for name in data.variants(subblock)
        if len(own := data.fitted[(data.fitted.subblock == subblock) & (data.fitted.variant == name)])
    }
    return pd.DataFrame(errors).T


def tables(data: RunData, front: Front) -> dict[str, pd.DataFrame]:
    """What goes to `tables/NAME.csv`: the unrounded figures behind the page."""
    predicted = {"parent": data.predicted_parent(), "child": data.predicted}
    found = {
        "front": front.table(),
        "architecture": pd.DataFrame(
            [(v.layer, v.subblock, v.name) for v in data.architecture.variants],
            columns=["layer", "subblock", "variant"],
        ),
        "scores": data.scores,
        "distillation": data.index,
        "costs": pd.DataFrame(
            [(m, k, predicted[m][k], data.models[m][k]) for m in predicted for k in COSTS],
            columns=["model", "cost", "predicted", "measured"],
        ),
        "evaluation": pd.DataFrame(data.models).rename_axis("figure").reset_index(),
        "stages": pd.DataFrame(
            [(name, s["seconds"], s["peak_bytes"]) for name, s in data.done_stages.items()],
            columns=["stage", "seconds", "peak_bytes"],
        ),
    }
    optional = {"healing": data.healing, "front_check": data.front_check}
    return found | {name: pd.DataFrame(rows) for name, rows in optional.items() if rows}


def _comparison_table(runs: dict[str, RunData]) -> pd.DataFrame:
    return pd.DataFrame({name: data.models["child"] for name, data in runs.items()}).rename_axis("figure").reset_index()


def _front_drawing(front: Front) -> Drawing:
    return Drawing(
        lambda width: figures.pareto(front.series, front.parent_x, front.x_label, width),
        "Loss of quality against speed for the architectures found",
    )


def _drawings(data: RunData, front: Front) -> dict[str, Drawing]:
    variants = {subblock: data.variants(subblock) for subblock in SUBBLOCKS}
    drawings = {
        "front": _front_drawing(front),
        "architecture": Drawing(
            lambda width: layers.architecture(data.architecture, data.shape, width),
            "The child layer by layer: how much of each attention and FFN is kept",
        ),
        "scores": Drawing(
            lambda width: layers.heatmap(data.scores, variants, data.architecture, data.shape, width),
            "Replacement score of each variant in each layer",
        ),
    }
    if len(data.fitted):
        drawings["distillation"] = Drawing(
            lambda width: figures.distillation(local_errors(data), width),
            "Median local error of each variant before and after training",
        )
    if data.healing:
        drawings["healing"] = Drawing(lambda width: figures.healing(data.healing, width), "Held-out KL during healing")
    return drawings


def _write_figures(folder: Path, drawings: dict[str, Drawing], progress: Progress) -> dict[str, Markup]:
    (folder / "figures").mkdir()
    inline = {}
    for i, (name, drawing) in enumerate(drawings.items()):
        progress("figures", i, len(drawings))
        for file, content in figures.files(drawing.draw, name).items():
            (folder / "figures" / file).write_bytes(content)
        inline[name] = figures.inline_svg(drawing.draw, name, drawing.label)
    progress("figures", len(drawings), len(drawings))
    return inline


def _write_tables(folder: Path, found: dict[str, pd.DataFrame]) -> None:
    (folder / "tables").mkdir()
    for name, table in found.items():
        table.to_csv(folder / "tables" / f"{name}.csv", index=False)


def _text_context(data: RunData) -> dict[str, Any]:
    """What the page and the model card share."""
    return {
        "data": data,
        "headline": words.headline(data),
        "targets": [words.target_words(entry) for entry in data.targets],
        "evaluation": evaluation_rows(data),
        "changes": words.changed_layers(data.architecture, data.shape),
        "snippet": words.load_snippet(data),
        "vllm": f"vllm serve {shlex.quote(str(data.child_path))} --trust-remote-code",
        "vllm_obstacle": words.vllm_obstacle(data.architecture),
        "run_yaml": yaml.safe_dump(data.config.model_dump(mode="json"), sort_keys=False),
        "repeat": shlex.join(
            ["puzzle", "compress", "--config", f"{data.path / 'run.yaml'}", "--out", f"{data.path}-again"]
        ),
    }


def _context(data: RunData, front: Front, drawn: dict[str, Markup]) -> dict[str, Any]:
    versions: dict[str, str] = {}
    for entry in data.done_stages.values():
        versions |= entry["versions"]
    return {
        **_text_context(data),
        "front": front,
        "figures": drawn,
        "predictions": prediction_rows(data),
        "check": front_check(data),
        "methods": method_rows(data),
        "rounds": round_rows(data),
        "agreement": data.estimate_agreement(),
        "local": data.fitted[ERRORS].median().dropna().to_dict(),
        "versions": versions,
    }


def _environment(autoescape: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=autoescape,  # noqa: S701 - off for Markdown only, which escapes by its own filter
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        name: getattr(words, name) for name in ("number", "size", "count", "percent", "duration", "change")
    }
    environment.globals["changes_sentence"] = words.changes_sentence
    return environment


def _page(template: str, context: dict[str, Any]) -> str:
    assets = {
        "style": Markup((_TEMPLATES / "style.css").read_text("utf-8")),  # noqa: S704 - our own file
        "script": Markup((_TEMPLATES / "front.js").read_text("utf-8")),  # noqa: S704 - our own file
        "plotly": base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode(),  # 2 MB instead of 5
    }
    return _environment(autoescape=True).get_template(template).render(**assets, **context)
