# SPDX-License-Identifier: Apache-2.0
"""The stages in order, for `compress` and `demo`: what each reads and writes, and running those that are stale.

Costs come before the library: they need no trained weights, so a target that nothing reaches is known before the
expensive work.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from puzzle import data
from puzzle.architecture import PARENT, Architecture
from puzzle.block_library import BlockLibrary
from puzzle.checkpoint import Checkpoint, find
from puzzle.child.assemble import assemble
from puzzle.config import RunConfig
from puzzle.costs import COST_COLUMNS, MODEL, CostModel, Solution, measure
from puzzle.devices import resolve_device, resolve_dtype, set_threads
from puzzle.errors import InfeasibleError, UnsupportedError
from puzzle.healing import trainer
from puzzle.healing.gkd import heal
from puzzle.library import build as library
from puzzle.modeling import DeciLMConfig
from puzzle.reports import build as reports
from puzzle.run import Progress, Run, Stage, read_json, write_json
from puzzle.scoring import score as scoring
from puzzle.scoring import whole
from puzzle.search import baselines, solve
from puzzle.search.mip import Program
from puzzle.search.pareto import sweep
from puzzle.search.refine import Round, refine
from puzzle.search.settle import Ask, settle
from puzzle.variants import expand

KEY = ["layer", "subblock", "variant"]


def resolve(config: RunConfig) -> RunConfig:
    """Fill in what `auto` means here, and check what can be checked without work.

    Raises:
        ConfigError, UnsupportedError: the parent, the search space, the device or a part of healing cannot be used.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.compute_dtype, device)
    expand(config.search_space, open_parent(config).shape)
    trainer.check(config.healing)
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


def check_targets(run: Run, progress: Progress) -> None:
    """Refuse targets that no architecture of the search space reaches.

    Raises:
        InfeasibleError: there is such a target.
    """
    costs = cost_table(run)
    unscored = costs.loc[costs.subblock != MODEL, KEY].assign(score=0.0)
    solve(unscored, costs, run.config.targets, run.config.workload)


def cost_table(run: Run) -> pd.DataFrame:
    """RUN/costs.parquet without the spread of the measurements, as the search takes it."""
    costs = pd.read_parquet(run.path / "costs.parquet")
    return costs[[c for c in costs.columns if c in KEY or c in COST_COLUMNS]]


def parent_costs(run: Run) -> dict[str, float]:
    """The parent's totals in RUN/costs.parquet."""
    return CostModel(cost_table(run), run.config.workload).parent()


def score_table(run: Run) -> pd.DataFrame:
    """RUN/scores.parquet as the search takes it."""
    return pd.read_parquet(run.path / "scores.parquet").rename(columns={"kl": "score"})[[*KEY, "score"]]


def score(run: Run, progress: Progress) -> None:
    """Score every variant, those that the targets make the search choose exactly."""

    def settle_targets(estimates: pd.DataFrame, ask: Ask) -> None:
        config = run.config
        program = Program.of(estimates, cost_table(run), config.targets, config.workload, solver=config.search.solver)
        exact = np.array([v.name == PARENT for v in program.problem.candidates])
        settle(program, program.problem.scores.copy(), exact, ask)

    scoring.score(run, settle_targets, progress)


def search(run: Run, progress: Progress) -> None:
    """Choose the architecture by the sum of scores, and trace the front of score against throughput."""
    config, options = run.config, run.config.search
    costs = cost_table(run)
    scores = score_table(run)
    progress("search", 0, 1)
    solution = solve(
        scores, costs, config.targets, config.workload, solver=options.solver, time_limit=options.time_limit
    )
    # the front that a report can show: a good way past the child, not up to an empty model
    share = measure("latency", solution.costs, config.workload) / measure("latency", parent_costs(run), config.workload)
    down_to = min(0.4, 0.8 * share)
    front = sweep(scores, costs, "throughput", options.points, config.workload, down_to=down_to)
    write_json(run.path / "solutions" / "sweep.json", [s.to_json() for s in front.solutions])
    write_json(run.path / "solutions" / "additive.json", solution.to_json())
    progress("search", 1, 1)


def refine_choice(run: Run, progress: Progress) -> None:
    """Better the chosen architecture by scores in its own context; rounds are kept, and continued after a kill.

    What greedy choices give is another start: where the child is far from its parent, it can be the better one.
    """
    config, options = run.config, run.config.search
    start = Solution.from_json(read_json(run.path / "solutions" / "additive.json"))
    solution, rounds_file = start, run.path / "solutions" / "rounds.json"
    if options.refine:
        inputs, rounds = run.manifest["stages"]["refine"]["inputs"], []
        if rounds_file.exists() and (kept := read_json(rounds_file))["inputs"] == inputs:
            rounds = [Round.from_json(r) for r in kept["rounds"]]
        around = scoring.context(run, progress)

        def keep(new: Round) -> None:
            rounds.append(new)
            write_json(rounds_file, {"inputs": inputs, "rounds": [r.to_json() for r in rounds]})

        solution = refine(
            cost_table(run),
            config.targets,
            config.workload,
            [start.architecture, *_greedy(run)],
            around,
            radii=options.radii,
            rounds=options.refine,
            time_limit=options.refine_seconds,
            on_round=keep,
            earlier=list(rounds),
            solver=options.solver,
        )[-1].solution
    else:
        rounds_file.unlink(missing_ok=True)
    write_json(run.path / "solutions" / f"{config.name}.json", solution.to_json())


def _greedy(run: Run) -> list[Architecture]:
    try:
        return [
            baselines.greedy(score_table(run), cost_table(run), run.config.targets, run.config.workload).architecture
        ]
    except InfeasibleError:  # it can miss targets that the program meets
        return []


def compare(run: Run, progress: Progress) -> None:
    """Judge the front, and what simpler methods find for the same targets, on held-out text."""
    config, solutions = run.config, run.path / "solutions"
    front = [Solution.from_json(s) for s in read_json(solutions / "sweep.json")]
    others: list[Solution] = []
    true: dict[Architecture, dict[str, float]] = {}
    if config.search.compare_tokens:
        around = scoring.context(run, progress, "validation", config.search.compare_tokens)
        additive = Solution.from_json(read_json(solutions / "additive.json"))
        others = [replace(run.solution, method="refined"), replace(additive, method="additive")]
        others += baselines.every(
            score_table(run),
            cost_table(run),
            config.targets,
            config.workload,
            block_influence=around.block_influence(),
            seed=config.seed,
        )
        judged = around.judge({s.architecture for s in [*front, *others]})
        true = {a: {"kl": j.kl, "kl_stderr": j.kl_stderr, "perplexity": j.perplexity} for a, j in judged.items()}
    for name, found in (("front", front), ("baselines", others)):
        rows = [s.to_json() | {"true": true.get(s.architecture)} for s in found]
        write_json(solutions / f"{name}.json", rows)


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
            scoring.measure,
            scoring.COSTS_VERSION,
            reads=("search_space", "scenario", "measure", "device", "compute_dtype"),
            writes=("costs.parquet",),
        ),
        Stage("targets", check_targets, 1, reads=("targets", "scenario"), after=("costs",)),
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
            score,
            scoring.SCORES_VERSION,
            reads=("search_space", "scoring", "seed", "targets", "scenario"),
            after=("data", "targets", "library"),
            writes=("scores.parquet",),
        ),
        Stage(
            "search",
            search,
            1,
            reads=("targets", "scenario", "search"),
            after=("targets", "scores"),
            writes=("solutions/additive.json", "solutions/sweep.json"),
        ),
        Stage(
            "refine",
            refine_choice,
            2,
            reads=("name",),
            after=("search",),
            writes=("solutions/{name}.json",),
        ),
        Stage(
            "compare",
            compare,
            1,
            reads=("seed",),
            after=("refine",),
            writes=("solutions/front.json", "solutions/baselines.json"),
        ),
        Stage("assemble", assemble_child, 1, after=("refine",), writes=("children/{name}.before-healing",)),
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
            reads=("sample_prompt", "measure"),
            after=("data", "costs", "search", "heal"),
            writes=("evaluation.json",),
        ),
        Stage("report", reports.build, 1, after=("compare", "evaluate"), writes=("report",)),
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
