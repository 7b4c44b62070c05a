# SPDX-License-Identifier: Apache-2.0
"""The stages in order, for `compress` and `demo`: what each reads and writes, and running those that are stale.

Costs come before the library: they need no trained weights, so a target that nothing reaches is known before the
expensive work.
"""

from typing import Any

import pandas as pd

from puzzle import data
from puzzle.block_library import BlockLibrary
from puzzle.checkpoint import Checkpoint, find
from puzzle.child.assemble import assemble
from puzzle.config import RunConfig
from puzzle.costs import COST_COLUMNS, MODEL
from puzzle.devices import resolve_device, resolve_dtype, set_threads
from puzzle.errors import UnsupportedError
from puzzle.healing.gkd import heal
from puzzle.library import build as library
from puzzle.modeling import DeciLMConfig
from puzzle.reports import build as reports
from puzzle.run import Progress, Run, Stage, write_json
from puzzle.scoring import score as scoring
from puzzle.scoring import whole
from puzzle.search import solve
from puzzle.search.pareto import sweep
from puzzle.variants import expand

KEY = ["layer", "subblock", "variant"]


def resolve(config: RunConfig) -> RunConfig:
    """Fill in what `auto` means here, and check what can be checked without work.

    Raises:
        ConfigError, UnsupportedError: the parent, the search space or the device cannot be used.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.compute_dtype, device)
    expand(config.search_space, open_parent(config).shape)
    return config.model_copy(update={"device": device, "compute_dtype": dtype})


def open_parent(config: RunConfig) -> Checkpoint:
    """The parent's checkpoint.

    Raises:
        ConfigError: it is not a whole checkpoint.
        UnsupportedError: it is a child already, or of an unknown family.
    """
    checkpoint = Checkpoint(find(config.parent))
    if isinstance(checkpoint.config, DeciLMConfig):
        raise UnsupportedError(f"{config.parent}: is a child already; give its parent with another target instead")
    return checkpoint


def prepare_data(run: Run, progress: Progress) -> None:
    """Tokenise, pack and split the text."""
    tokenizer = open_parent(run.config).tokenizer()
    data.prepare(run.config.data, tokenizer, run.config.seed, run.path / "data", progress)


def measure_costs(run: Run, progress: Progress) -> None:
    """Measure, then refuse a target that no architecture of the search space reaches.

    Raises:
        InfeasibleError: there is such a target.
    """
    scoring.measure(run, progress)
    costs = cost_table(run)
    unscored = costs.loc[costs.subblock != MODEL, KEY].assign(score=0.0)
    solve(unscored, costs, run.config.targets, run.config.workload)


def cost_table(run: Run) -> pd.DataFrame:
    """RUN/costs.parquet without the spread of the measurements, as the search takes it."""
    costs = pd.read_parquet(run.path / "costs.parquet")
    return costs[[c for c in costs.columns if c in KEY or c in COST_COLUMNS]]


def search(run: Run, progress: Progress) -> None:
    """Choose the architecture, and trace the front of score against throughput."""
    config, options = run.config, run.config.search
    costs = cost_table(run)
    scores = pd.read_parquet(run.path / "scores.parquet").rename(columns={"kl": "score"})
    scores = scores[[*KEY, "score"]]
    progress("search", 0, 1)
    solution = solve(
        scores, costs, config.targets, config.workload, solver=options.solver, time_limit=options.time_limit
    )
    front = sweep(scores, costs, "throughput", options.points, config.workload).solutions if options.points else ()
    write_json(run.path / "solutions" / "sweep.json", [s.to_json() for s in front])
    write_json(run.path / "solutions" / f"{config.name}.json", solution.to_json())
    progress("search", 1, 1)


def assemble_child(run: Run, progress: Progress) -> None:
    """Write the chosen child, not yet healed."""
    progress("assemble", 0, 1)
    library = BlockLibrary(run.path / "library")
    recipe = run.config.recipe()
    assemble(open_parent(run.config), library, run.solution.architecture, run.unhealed, recipe)
    progress("assemble", 1, 1)


def heal_child(run: Run, progress: Progress) -> None:
    """Distil the parent into the child."""
    config = run.config
    set_threads(config.machine.threads)
    heal(
        find(config.parent),
        run.unhealed,
        run.child,
        data.load_split(run.path / "data", "training"),
        data.load_split(run.path / "data", "scoring"),
        config.healing,
        seed=config.seed,
        compute_dtype=config.compute_dtype,
        device=config.device,
        state=run.path / "healing",
        progress=progress,
    )


STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("data", prepare_data, 1, reads=("data", "seed"), writes=("data",)),
        Stage(
            "costs",
            measure_costs,
            scoring.COSTS_VERSION,
            reads=("search_space", "targets", "scenario", "measure", "device", "compute_dtype"),
            writes=("costs.parquet",),
        ),
        Stage(
            "library",
            library.build,
            library.VERSION,
            reads=("search_space", "library", "compute_dtype", "seed"),
            after=("data",),
            writes=("library/index.parquet",),
        ),
        Stage(
            "scores",
            scoring.score,
            scoring.SCORES_VERSION,
            reads=("search_space",),
            after=("data", "library"),
            writes=("scores.parquet",),
        ),
        Stage(
            "search",
            search,
            1,
            reads=("targets", "scenario", "search", "name"),
            after=("costs", "scores"),
            writes=("solutions/{name}.json", "solutions/sweep.json"),
        ),
        Stage("assemble", assemble_child, 1, after=("library", "search"), writes=("children/{name}.before-healing",)),
        Stage(
            "heal",
            heal_child,
            1,
            reads=("healing", "compute_dtype", "seed"),
            after=("data", "assemble"),
            writes=("children/{name}",),
        ),
        Stage(
            "evaluate",
            whole.evaluate_child,
            whole.VERSION,
            reads=("sample_prompt",),
            after=("data", "costs", "heal"),
            writes=("evaluation.json",),
        ),
        Stage("report", reports.build, 1, after=("evaluate",), writes=("report",)),
    )
}


def run_stages(run: Run, last: str, progress: Progress) -> list[str]:
    """Run what is stale of a stage and of those it depends on, in order.

    Returns:
        The names of the stages that ran.
    """
    parent = open_parent(run.config).fingerprint
    wanted = {last}
    for stage in reversed(STAGES.values()):
        if stage.name in wanted:
            wanted.update(stage.after)
    ran = []
    with run.lock():
        for stage in (s for s in STAGES.values() if s.name in wanted):
            if run.stale(stage, STAGES, parent):
                run.execute(stage, STAGES, parent, progress)
                ran.append(stage.name)
    return ran


def status(run: Run) -> list[dict[str, Any]]:
    """Per stage: `stage`, `state` (done or stale), `why`, `seconds`, `peak_bytes`."""
    parent, entries = open_parent(run.config).fingerprint, run.manifest["stages"]
    rows: list[dict[str, Any]] = []
    stale: dict[str, str] = {}
    for stage in STAGES.values():
        why = run.stale(stage, STAGES, parent)
        if why is None:
            why = next((f"{name} has to run first" for name in stage.after if name in stale), None)
        if why:
            stale[stage.name] = why
        figures = {k: entries.get(stage.name, {}).get(k) for k in ("seconds", "peak_bytes")}
        rows.append({"stage": stage.name, "state": "stale" if why else "done", "why": why or "", **figures})
    return rows
