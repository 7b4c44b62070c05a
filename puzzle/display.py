# SPDX-License-Identifier: Apache-2.0
"""What the commands show: progress on stderr, tables of results on stdout."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from puzzle.errors import PuzzleError
from puzzle.run import Run, read_json

if TYPE_CHECKING:
    from puzzle.costs import Solution
    from puzzle.search import ParetoFront

out, err = Console(), Console(stderr=True)


class Interrupted(PuzzleError):
    """Ctrl-C; nothing on disk is lost."""

    exit_code = 130


@contextmanager
def progress(quiet: bool, run: Run | None = None) -> Iterator[Any]:
    """Bars with ETA on a terminal, a line per finished step elsewhere; both also go to RUN/log.txt."""
    log = logging.getLogger("puzzle")
    log.setLevel(logging.INFO)
    log.propagate = False
    if run is not None:
        handler = logging.FileHandler(run.path / "log.txt", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(handler)
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, console=err, disable=quiet or not err.is_terminal)
    tasks: dict[str, Any] = {}
    told: set[str] = set()

    def report(what: str, done: int, total: int) -> None:
        task = tasks.get(what)
        if task is None or (done < total and bars.tasks[task].finished):
            task = tasks[what] = bars.add_task(what, total=total)
            log.info("%s: started", what)
        over = bars.tasks[task].finished
        bars.update(task, completed=done, total=total)
        if done >= total and not over:
            log.info("%s: done", what)
            if not quiet and not err.is_terminal and what not in told:  # work that comes in rounds is told once
                told.add(what)
                err.print(f"{what}: done", highlight=False)

    try:
        with bars:
            yield report
    except KeyboardInterrupt:
        again = "; what is done is kept, run the same command again to continue" if run else ""
        raise Interrupted(f"stopped{again}") from None
    finally:
        for handler in list(log.handlers):
            log.removeHandler(handler)
            handler.close()


def show_run(run: Run, as_json: bool) -> None:
    """The end of a run: a small table, a sample, what was reached of each target, the report's path."""
    summary = read_json(run.path / "report" / "summary.json")
    if as_json:
        out.print_json(json.dumps(summary))
        return
    names = {"parent": "parent", "child_before_healing": "child before healing", "child": "child"}
    table = Table("", *names.values())
    rows = (
        ("throughput, tokens/s", "throughput_tokens_per_s", "{:,.1f}"),
        ("prefill, ms", "prefill_ms", "{:,.1f}"),
        ("decode, ms/token", "decode_ms_per_token", "{:,.2f}"),
        ("parameters, M", "params", "{:,.1f}"),
        ("weights, MiB", "weight_bytes", "{:,.1f}"),
        ("KV cache, KiB/token", "kv_bytes_per_token", "{:,.1f}"),
        ("perplexity", "perplexity", "{:,.2f}"),
        ("KL to the parent", "kl", "{:.4f}"),
        ("same top token, %", "top1_agreement", "{:.1f}"),
    )
    scale = {"params": 1e-6, "weight_bytes": 2**-20, "kv_bytes_per_token": 2**-10, "top1_agreement": 100}
    for title, key, form in rows:
        table.add_row(title, *(form.format(summary[name][key] * scale.get(key, 1)) for name in names))
    out.print(table)
    evaluation = read_json(run.path / "evaluation.json")
    for sample in evaluation["samples"]:
        out.print(f"prompt: {sample['prompt']}", markup=False, highlight=False)
        for name in ("parent", "child"):
            out.print(f"{name}: …{sample[name]}", markup=False, highlight=False)
    for target in evaluation["targets"]:
        verdict = "met" if target["met"] else f"missed by {abs(target['asked'] - target['reached']):.3g}"
        out.print(
            f"target {target['target']}: reached {target['reached']:.3g} ± {target['spread']:.2g}, {verdict}",
            markup=False, highlight=False,
        )  # fmt: skip
    out.print(f"child: {run.child}\nreport: {run.path / 'report' / 'index.html'}", markup=False, soft_wrap=True)


def _solution(solution: "Solution") -> dict[str, Any]:
    result = solution.to_json()
    return {"objective": result.pop("score"), "solver": result.pop("method"), **result}


def show_solution(solution: "Solution", as_json: bool, batch: int | None = None) -> None:
    """One solution; `batch` where that was for the search to decide."""
    if as_json:
        out.print_json(json.dumps(_solution(solution) | ({} if batch is None else {"batch": batch})))
        return
    if batch is not None:
        out.print(f"batch: {batch}", highlight=False)
    out.print(
        f"score {solution.score:.6g}, {solution.status} (gap {solution.gap:.2g}), {solution.seconds:.2f} s",
        highlight=False,
    )
    for cost, value in solution.costs.items():
        out.print(f"{cost}: {value:,.6g}", highlight=False)
    table = Table("layer", "attention", "ffn")
    for i, (attention, ffn) in enumerate(zip(solution.architecture.attention, solution.architecture.ffn, strict=True)):
        table.add_row(str(i), attention, ffn)
    out.print(table)


def show_solutions(solutions: Sequence["Solution"], as_json: bool) -> None:
    """One solution, or several, the best first."""
    if len(solutions) == 1:
        show_solution(solutions[0], as_json)
        return
    if as_json:
        out.print_json(json.dumps([_solution(s) for s in solutions]))
        return
    table = Table("layer", *(f"score {s.score:.6g}" for s in solutions))
    for i in range(solutions[0].architecture.num_layers):
        halves = ((s.architecture.attention[i], s.architecture.ffn[i]) for s in solutions)
        table.add_row(str(i), *(f"{attention} {ffn}" for attention, ffn in halves))
    out.print(table)


def show_front(front: "ParetoFront", as_json: bool) -> None:
    if as_json:
        out.print_json(json.dumps(front.to_json()))
        return
    from puzzle.costs import measure

    table = Table(front.measure, "score", "changes", "gap", "seconds")
    for solution in front.solutions:
        value = measure(front.measure, solution.costs, front.scenario)
        changes = str(len(solution.architecture.changes))
        row = f"{value:,.6g}", f"{solution.score:.6g}", changes, f"{solution.gap:.2g}", f"{solution.seconds:.2f}"
        table.add_row(*row)
    out.print(table)


def show_plan(plan: dict[str, Any], as_json: bool) -> None:
    """What `puzzle.planning.Plan.to_json` says, for people."""
    if as_json:
        out.print_json(json.dumps(plan))
        return
    space, device, scenario = plan["search_space"], plan["device"], plan["scenario"]
    out.print(
        f"{plan['parent']['name']} on {device['name']}: {space['variants']:,} variants, "
        f"10^{space['log10_architectures']:.1f} architectures",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("stage", "tokens", "disk", "peak memory", "FLOPs", "device time")
    for row in plan["stages"]:
        table.add_row(row["stage"], *_needs(row, f"{row['tokens']:,}" if row["tokens"] else ""))
    table.add_section()
    total = plan["total"]
    table.add_row("all", *_needs(total, ""))
    out.print(table)
    if total["temporary_bytes"]:
        out.print(
            f"checkpoints while healing: {_bytes(total['temporary_bytes'])} of disk more",
            highlight=False,
            soft_wrap=True,
        )
    if not total["fits"]:
        there = _bytes(device["memory"])
        out.print(
            f"the memory marked ! is more than the {there} of one {device['name']}", highlight=False, soft_wrap=True
        )
    for name in ("parent", "child"):
        costs = plan[name]["costs"]
        out.print(
            f"{name}: {costs['params'] / 1e6:,.0f} M parameters, at best prefill {costs['prefill_ms']:.4g} ms, "
            f"decode {costs['decode_ms']:.4g} ms, {costs['throughput_tokens_per_s']:.4g} tokens/s "
            f"(batch {scenario['batch']}, {scenario['prompt']} + {scenario['generated']} tokens, {scenario['dtype']})",
            highlight=False,
            soft_wrap=True,
        )
    for target in plan["targets"]:
        verdict = "within reach" if target["reachable"] else "out of reach"
        span = f"{target['parent']} to {target['best']}"
        out.print(f"{target['target']}: {verdict} (parent to best: {span})", highlight=False, soft_wrap=True)


def _needs(row: dict[str, Any], tokens: str) -> tuple[str, ...]:
    mark = "" if row["fits"] else " !"
    peak = _bytes(row["peak_bytes"]) + mark if row["peak_bytes"] else ""
    disk = _bytes(row["disk_bytes"]) if row["disk_bytes"] else ""
    flops = f"{row['flops']:.2e}" if row["flops"] else ""
    return tokens, disk, peak, flops, _duration(row["seconds"]) if row["seconds"] else ""


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:,.0f} h"


def _bytes(number: float) -> str:
    """Three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} TB"
