# SPDX-License-Identifier: Apache-2.0
"""`puzzle plan`: what a run would cost, and whether it can reach its targets, without weights and without running.

Latencies are a roofline's; sizes are exact. Peak memory is what the tensors take; allocators and fragments come on top.
The later stages are counted for a child that keeps as many parameters as the targets allow; where they cannot be met,
for the parent.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from puzzle.architecture import PARENT, Architecture, ModelShape, SubblockVariant
from puzzle.config import RunConfig
from puzzle.costs import CONSTANT, MODEL, CostModel, Scenario, measure
from puzzle.devices import BYTES
from puzzle.errors import InfeasibleError
from puzzle.plan.devices import Device
from puzzle.plan.parents import PlannedParent
from puzzle.plan.roofline import outer_times, subblock_times
from puzzle.plan.stages import Setting, StageEstimate, estimate
from puzzle.scoring.memory import constant_sizes, subblock_sizes
from puzzle.search import solve
from puzzle.search.mip import Program
from puzzle.variants import block_configs, expand, size, subblock_config

KEY = ["layer", "subblock", "variant"]
SOLVER_SECONDS = 10.0  # the child of a plan need not be proven the best


@dataclass(frozen=True)
class Reach:
    """A target's range over the search space, by the analytic costs, each value in the target's own unit."""

    target: str
    parent: str
    best: str  # reachable where this target is alone
    reachable: bool


@dataclass(frozen=True)
class Plan:
    """The answer."""

    parent: PlannedParent
    device: Device
    scenario: Scenario
    parent_costs: dict[str, float]  # totals by cost column
    child_costs: dict[str, float]  # of the child that is counted with
    variants: int
    log10_architectures: float
    reach: tuple[Reach, ...]
    infeasible: str | None  # why the targets cannot be met together
    stages: tuple[StageEstimate, ...]

    @property
    def seconds(self) -> float:
        return sum(s.seconds(self.device) for s in self.stages)

    @property
    def peak_bytes(self) -> int:
        return max(s.peak_bytes for s in self.stages)

    def to_json(self) -> dict[str, Any]:
        stages = [self._stage(s) for s in self.stages]
        summed = ("disk_bytes", "flops", "seconds", "device_hours")
        total = {key: sum(row[key] for row in stages) for key in summed}
        total |= {key: max(row[key] for row in stages) for key in ("temporary_bytes", "peak_bytes")}
        return {
            "parent": asdict(self.parent) | {"costs": self._whole(self.parent_costs)},
            "child": {"costs": self._whole(self.child_costs)},
            "device": asdict(self.device),
            "scenario": asdict(self.scenario),
            "search_space": {"variants": self.variants, "log10_architectures": self.log10_architectures},
            "targets": [asdict(r) for r in self.reach],
            "feasible": self.infeasible is None,
            "why": self.infeasible,
            "stages": stages,
            "total": total | {"fits": total["peak_bytes"] <= self.device.memory},
        }

    def _whole(self, costs: dict[str, float]) -> dict[str, float]:
        return costs | {"throughput_tokens_per_s": measure("throughput", costs, self.scenario)}

    def _stage(self, stage: StageEstimate) -> dict[str, Any]:
        figures = {k: getattr(stage, k) for k in ("stage", "tokens", "disk_bytes", "temporary_bytes", "peak_bytes")}
        seconds = stage.seconds(self.device)
        figures |= {"flops": stage.flops, "seconds": seconds, "device_hours": seconds / 3600}
        return figures | {"fits": stage.peak_bytes <= self.device.memory}


def plan(config: RunConfig, parent: PlannedParent, device: Device) -> Plan:
    """Estimate a run.

    Args:
        config: of the run; its `device` is not used, and `compute_dtype: auto` is what `device` computes in.
        parent: its shape and dtype.
        device: of the table.

    Raises:
        ConfigError: the search space or a target does not fit the parent.
    """
    dtype = device.compute_dtype if config.compute_dtype == "auto" else config.compute_dtype
    config = config.model_copy(update={"device": device.kind, "compute_dtype": dtype})
    scenario, shape = config.workload, parent.shape
    variants = expand(config.search_space, shape)
    costs = cost_table(variants, shape, scenario, device)
    model, whole = CostModel(costs, scenario), Architecture.parent(shape.num_layers)
    reach = reachable(costs, config.targets, scenario, whole)
    child, infeasible = whole, None
    try:
        child = solve(stand_in_scores(costs), costs, config.targets, scenario, time_limit=SOLVER_SECONDS).architecture
    except InfeasibleError as error:
        infeasible = str(error)
    setting = Setting(
        config, shape, parent.dtype, tuple(variants), tuple(block_configs(child, shape)), config.search.points
    )
    return Plan(
        parent,
        device,
        scenario,
        model.parent(),
        model.predict(child),
        len(variants),
        size(variants),
        reach,
        infeasible,
        tuple(estimate(setting)),
    )


def cost_table(variants: list[SubblockVariant], shape: ModelShape, scenario: Scenario, device: Device) -> pd.DataFrame:
    """A search space with analytic latencies, in the columns that the search takes of RUN/costs.parquet."""
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for subblock, name in sorted({(v.subblock, v.name) for v in variants}):
        sizes = subblock_sizes(name, subblock, shape, scenario.dtype)
        config = subblock_config(name, subblock, shape)
        rows[subblock, name] = subblock_times(config, sizes, shape, scenario, device) | sizes
    head = shape.vocab_size * shape.hidden_size * BYTES[scenario.dtype]
    constant = outer_times(head, shape, scenario, device) | constant_sizes(shape, scenario.dtype)
    table = [{"layer": -1, "subblock": MODEL, "variant": CONSTANT, **constant}]
    table += [
        {"layer": v.layer, "subblock": v.subblock, "variant": v.name, **rows[v.subblock, v.name]} for v in variants
    ]
    return pd.DataFrame(table)


def stand_in_scores(costs: pd.DataFrame) -> pd.DataFrame:
    """Scores before there are scores: the parameters that a variant lacks, dearer the larger its share of them.

    So the search keeps as many parameters as the targets allow, and trims many subblocks before it drops one.
    """
    rows = costs[costs.subblock != MODEL]
    parents = rows[rows.variant == PARENT].set_index(["layer", "subblock"]).params
    own = parents.reindex(pd.MultiIndex.from_frame(rows[["layer", "subblock"]])).to_numpy()
    removed = own - rows.params.to_numpy()
    return rows[KEY].assign(score=(removed / own) ** 1.5 * own / parents.sum())


def reachable(costs: pd.DataFrame, targets: list[str], scenario: Scenario, parent: Architecture) -> tuple[Reach, ...]:
    """Of each target alone: what the parent has, and the best of the search space."""
    program = Program.of(stand_in_scores(costs), costs, targets, scenario)
    free = [np.inf] * len(program.limits)
    found = []
    for limit in program.limits:
        least = program.solve(objective=limit.weights, bounds=free)
        assert least is not None, "every place has a variant"
        load = limit.load(least.chosen)
        own = limit.describe(limit.load(program.problem.index(parent)))
        found.append(Reach(limit.text, own, limit.describe(load), limit.met(load)))
    return tuple(found)
