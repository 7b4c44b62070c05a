# SPDX-License-Identifier: Apache-2.0
"""Reads a finished run directory into plain data, and derives `summary.json` from it. No torch."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from puzzle.architecture import Architecture, ModelShape, Subblock
from puzzle.config import RunConfig
from puzzle.costs import CostModel, Scenario, Solution, measure
from puzzle.errors import ConfigError
from puzzle.run import Run, read_json

COSTS = (
    "prefill_ms",
    "decode_ms_per_token",
    "throughput_tokens_per_s",
    "weight_bytes",
    "kv_bytes_per_token",
    "params",
)
FIGURES = ("perplexity", "kl", "top1_agreement", *COSTS)
ERRORS = ["error_start", "error_closed_form", "error"]
PHASES = ("prefill", "decode")
MODELS = ("parent", "child", "child_before_healing")

Figures = dict[str, float]
"""What `evaluation.json` says of one model: `FIGURES` in their units, standard errors, interquartile ranges."""


@dataclass(frozen=True)
class Candidate:
    """A solution of the search, with the loss measured on the assembled child where that was done."""

    solution: Solution
    true: dict[str, float] | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Candidate":
        known = {f.name for f in fields(Solution)}
        return cls(Solution.from_json({k: v for k, v in data.items() if k in known}), data.get("true"))


@dataclass(frozen=True)
class RunData:
    """Everything a report says of one run, as read from its files."""

    path: Path
    config: RunConfig
    scenario: Scenario
    shape: ModelShape
    solution: Solution
    sweep: list[Candidate]
    baselines: list[Candidate]
    rounds: list[dict[str, Any]]
    models: dict[str, Figures]
    predicted: Figures
    targets: list[dict[str, Any]]
    front_check: list[dict[str, float]]
    samples: list[dict[str, str]]
    blocks: list[dict[str, Any]]
    machine: dict[str, Any]
    index: pd.DataFrame
    scores: pd.DataFrame
    costs: CostModel
    splits: dict[str, Any]
    healing: list[dict[str, float]]
    stages: dict[str, dict[str, Any]]

    @property
    def parent_name(self) -> str:
        return self.config.parent.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]

    @property
    def child_path(self) -> Path:
        return self.path / "children" / self.config.name

    @property
    def architecture(self) -> Architecture:
        return self.solution.architecture

    @property
    def done_stages(self) -> dict[str, dict[str, Any]]:
        """The finished stages; the one that writes the report is not among them."""
        return {name: entry for name, entry in self.stages.items() if entry["state"] == "done"}

    def variants(self, subblock: Subblock) -> list[str]:
        """The replacements that were scored for this half anywhere, from the mildest to the strongest on average."""
        rows = self.scores[(self.scores.subblock == subblock) & (self.scores.variant != "parent")]
        return list(rows.groupby("variant").kl.median().sort_values().index)

    def estimate_agreement(self) -> tuple[int, float] | None:
        """How many replacements have both an estimate and an exact score, and their rank correlation."""
        if "estimate" not in self.scores:
            return None
        both = self.scores[(self.scores.variant != "parent") & (self.scores.method == "exact")]
        return (len(both), both.estimate.rank().corr(both.kl.rank())) if len(both) > 2 else None

    @property
    def fitted(self) -> pd.DataFrame:
        """The rows of the library's index whose variants have weights."""
        return self.index[self.index.variant != "no_op"].astype({column: float for column in ERRORS})

    def memory(self, costs: Figures) -> float:
        """Bytes of weights and of a full KV cache in this run's scenario."""
        return measure("memory", costs, self.scenario)

    def throughput_spread(self, model: str) -> float:
        """Half the interquartile range of a measured throughput, in tokens/s (prefill and decode spread added up)."""
        own = self.models[model]
        latency = own["prefill_ms"] + self.scenario.generated * own["decode_ms_per_token"]
        spread = (own["prefill_iqr_ms"] + self.scenario.generated * own["decode_iqr_ms"]) / 2
        return own["throughput_tokens_per_s"] * spread / latency

    def front_errors(self) -> Figures:
        """Of each phase, the median over the front's timed architectures of |predicted / measured - 1|."""
        table = pd.DataFrame(self.front_check)
        return {
            phase: float((table[f"{phase}_predicted"] / table[f"{phase}_measured"] - 1).abs().median())
            for phase in (PHASES if len(table) else ())
        }

    def predicted_parent(self) -> Figures:
        """What the additive cost model says of the parent, under the names of `COSTS`."""
        costs = self.costs.parent()
        throughput = measure("throughput", costs, self.scenario)
        return {**costs, "decode_ms_per_token": costs["decode_ms"], "throughput_tokens_per_s": throughput}


def read(run: Run) -> RunData:
    """Read a run whose child has been evaluated.

    Raises:
        ConfigError: a file that the report cannot do without is missing or damaged.
    """
    path, config = run.path, run.config
    evaluation = _json(path / "evaluation.json")
    return RunData(
        path=path,
        config=config,
        scenario=config.workload,
        shape=ModelShape(**evaluation["shape"]),
        solution=Candidate.from_json(_json(path / "solutions" / f"{config.name}.json")).solution,
        sweep=[Candidate.from_json(c) for c in _json(path / "solutions" / "front.json", optional=True)],
        baselines=[Candidate.from_json(c) for c in _json(path / "solutions" / "baselines.json", optional=True)],
        rounds=(_json(path / "solutions" / "rounds.json", optional=True) or {"rounds": []})["rounds"],
        models={name: evaluation["models"][name] for name in MODELS},
        **{key: evaluation[key] for key in ("predicted", "targets", "front_check", "samples", "blocks", "machine")},
        index=_table(path / "library" / "index.parquet"),
        scores=_table(path / "scores.parquet"),
        costs=CostModel(_table(path / "costs.parquet"), config.workload),
        splits={k: v for k, v in _json(path / "data" / "splits.json").items() if k != "corpus"},
        healing=_json(path / "healing" / "curve.json", optional=True),
        stages=run.manifest["stages"],
    )


def summary(data: RunData) -> dict[str, Any]:
    """The contents of `summary.json`, for scripts."""
    return {
        **{name: {key: data.models[name][key] for key in FIGURES} for name in MODELS},
        "predicted": {key: data.predicted[key] for key in COSTS},
        "front_check": {"architectures": len(data.front_check), "median_error": data.front_errors()},
        "targets": data.targets,
        "stages": {
            name: {"seconds": entry["seconds"], "peak_bytes": entry["peak_bytes"]}
            for name, entry in data.done_stages.items()
        },
        "architecture": {**data.architecture.to_json(), "blocks": data.blocks},
    }


def _json(path: Path, optional: bool = False) -> Any:
    if optional and not path.exists():
        return []
    _must_exist(path)
    return read_json(path)


def _table(path: Path) -> pd.DataFrame:
    _must_exist(path)
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a parquet table ({error})") from None


def _must_exist(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"{path}: missing, so there is nothing to report yet; let `puzzle compress` finish this run")
