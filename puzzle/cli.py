# SPDX-License-Identifier: Apache-2.0
"""The command line: parse, call one function, print. stdout carries results, stderr progress and errors.

Imports of torch, pydantic and the rooms are inside the functions: `--help` and `puzzle search` on tables stay fast.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from puzzle import __version__, search_spaces
from puzzle.display import err, out, progress, show_front, show_plan, show_run, show_solution, show_solutions
from puzzle.errors import ConfigError, InfeasibleError, PuzzleError
from puzzle.run import Run, disk_error

if TYPE_CHECKING:
    from puzzle.config import RunConfig

app = typer.Typer(
    name="puzzle",
    help="Compress a trained Llama-style model for the machine it will run on.",
    epilog="Any command takes --debug for a full traceback.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

RunArgument = Annotated[Path, typer.Argument(help="a run directory", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="no progress on stderr")]
Refine = Annotated[
    str | None, typer.Option("--refine", help="rounds of scoring again around the child: auto, none, or at most N")
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]


def main() -> None:
    """Run the command line; every expected error is one sentence and an exit code."""
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    for noise, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("TQDM_DISABLE", "1"),
    ):
        os.environ.setdefault(noise, value)
    try:
        app()
    except Exception as error:
        if debug:
            raise
        known = error if isinstance(error, PuzzleError) else disk_error(error, Path.cwd())
        if known is None:
            known = PuzzleError(f"{type(error).__name__}: {error} (run again with --debug for the traceback)")
        err.print(f"[bold red]error:[/] {_escape(known)}", soft_wrap=True, highlight=False)
        sys.exit(known.exit_code)


def _escape(value: object) -> str:
    return str(value).replace("[", r"\[")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        out.print(f"puzzle {__version__}", highlight=False)
        raise typer.Exit


@app.command()
def compress(
    parent: Annotated[str | None, typer.Argument(help="a Hugging Face folder or hub name", show_default=False)] = None,
    search_space: Annotated[
        str | None, typer.Option("--search-space", "-s", help="a preset's name or a YAML file")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help="a dataset's name, a local file, or python-docs")
    ] = None,
    target: Annotated[list[str] | None, typer.Option("--target", "-t", help="may be given several times")] = None,
    out_: Annotated[Path | None, typer.Option("--out", "-o", help="the run directory", show_default=False)] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="a YAML file with everything")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any key of the config: healing.tokens=65536")] = None,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, cuda:1; default: the first there is")
    ] = None,
    compute_dtype: Annotated[
        str | None, typer.Option("--compute-dtype", help="auto, float32, bfloat16, float16")
    ] = None,
    scores: Annotated[
        str | None, typer.Option("--scores", help="auto, exact, or fisher (from gradients alone)")
    ] = None,
    refine: Refine = None,
    update: Annotated[
        bool, typer.Option("--update", help="change an existing run's config and redo what it touches")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compress PARENT to the targets, heal the child, and report.

    Running the same command again continues an interrupted run.

    Example: `puzzle compress ./llama --search-space cpu-small --data my.jsonl --target "throughput>=1.5x" --out runs/a`
    """
    options = {"parent": parent, "search_space": search_space, "data.source": data, "targets": target or None,
               "seed": seed, "device": device, "compute_dtype": compute_dtype, "scoring.method": scores,
               "search.refine": _rounds(refine)}  # fmt: skip
    if out_ is None:
        raise ConfigError("--out is missing: name a folder for the run")
    _compress(compose(config, options, set_ or []), out_, update, quiet, as_json)


def _rounds(refine: str | None) -> int | None:
    """The number of rounds that `--refine` asks for; None where it is not given."""
    if refine is None or refine.isdecimal():
        return None if refine is None else int(refine)
    from puzzle.config import SearchConfig

    known = {"none": 0, "auto": SearchConfig().refine}
    if refine not in known:
        raise ConfigError(f"--refine {refine!r}: auto, none or a number of rounds is expected")
    return known[refine]


def _set(run: Run, settings: dict[str, Any]) -> None:
    """Change an existing run's config."""
    from puzzle.config import RunConfig, validate

    data = run.config.model_dump(mode="json")
    _put(data, settings)
    Run.create(run.path, validate(RunConfig, data, "command line"), update=True)


def _compress(config: "RunConfig", path: Path, update: bool, quiet: bool, as_json: bool) -> None:
    from puzzle import pipeline

    run = Run.create(path, pipeline.resolve(config), update)
    with progress(quiet, run) as report:
        pipeline.run_stages(run, "report", report)
    show_run(run, as_json)


def compose(config: Path | None, options: dict[str, Any], settings: list[str]) -> "RunConfig":
    """The run's config from a YAML file, then the options, then `--set` pairs; later ones win.

    Raises:
        ConfigError: a key or value is wrong, or something is missing.
    """
    import yaml

    from puzzle.config import RunConfig, load_search_space, read_yaml, validate

    data = read_yaml(config) if config else {}
    given = {key: value for key, value in options.items() if value is not None}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise ConfigError(f"--set {setting!r}: a pair such as healing.tokens=65536 is expected")
        given[key.strip()] = yaml.safe_load(value)
    _put(data, given)
    if isinstance(data.get("search_space"), str):
        data["search_space"] = load_search_space(search_spaces.path(data["search_space"])).model_dump()
    for key, flag in (("parent", "PARENT"), ("search_space", "--search-space"), ("targets", "--target")):
        if key not in data:
            raise ConfigError(f"{flag} is missing (or {key!r} in a --config file)")
    return validate(RunConfig, data, config or "command line")


def _put(data: dict[str, Any], settings: dict[str, Any]) -> None:
    """Set keys such as `healing.tokens` in nested mappings."""
    for key, value in settings.items():
        *sections, last = key.split(".")
        section = data
        for name in sections:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{key}: {name!r} is not a section of the config")
        section[last] = value


@app.command()
def plan(
    parent: Annotated[
        str | None,
        typer.Argument(help="a folder with a config.json, a hub name, or such as Llama-3.1-8B", show_default=False),
    ] = None,
    search_space: Annotated[
        str | None, typer.Option("--search-space", "-s", help="a preset's name or a YAML file")
    ] = None,
    target: Annotated[list[str] | None, typer.Option("--target", "-t", help="may be given several times")] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="A100-80GB, H100-SXM, H200, L40S, RTX-4090, EPYC-2-cores, or your own"),
    ] = None,
    devices: Annotated[Path | None, typer.Option("--devices", help="a YAML file with devices of your own")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="a YAML file with everything")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any key of the config: healing.tokens=65536")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what `puzzle compress` would need and whether it can reach its targets, without weights and without running.

    Latencies are the best that the device's peak and bandwidth allow. The plan is printed whole where the targets are
    out of reach too; the exit code is then 3, as that of `puzzle compress` would be.

    Example: `puzzle plan Llama-3.1-8B --search-space gpu-default --target "throughput>=1.5x" --device H100-SXM`
    """
    settings = compose(config, {"parent": parent, "search_space": search_space, "targets": target or None}, set_ or [])
    from puzzle import planning
    from puzzle.plan import devices as table
    from puzzle.plan import parents

    chosen = table.named(device or table.DEFAULT, devices)
    found = planning.plan(settings, parents.read(settings.parent), chosen)
    show_plan(found.to_json(), as_json)
    if found.infeasible:
        raise InfeasibleError(found.infeasible)


@app.command()
def demo(
    parent: Annotated[
        str, typer.Option("--parent", help="smollm2-135m (fetched once) or tiny (no download)")
    ] = "smollm2-135m",
    out_: Annotated[
        Path | None, typer.Option("--out", "-o", help="the run directory; default: runs/demo-PARENT")
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compress a real model with nothing to prepare: SmolLM2-135M, or a tiny Llama trained here.

    Example: `puzzle demo --parent tiny`
    """
    from puzzle import demos

    with progress(quiet) as report:
        config = demos.config(parent, report, note=lambda text: err.print(text, highlight=False))
    _compress(config, out_ or Path("runs") / f"demo-{parent}", False, quiet, as_json)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="a name of the table: smollm2-135m", show_default=False)],
    out_: Annotated[Path, typer.Option("--out", "-o", help="the folder to make", show_default=False)],
    quiet: Quiet = False,
) -> None:
    """Fetch a real parent as a plain Hugging Face folder, checksum verified.

    Example: `puzzle fetch smollm2-135m --out smollm2`
    """
    from puzzle import parents

    with progress(quiet) as report:
        path = parents.fetch(name, out_, report)
    out.print(str(path), highlight=False, soft_wrap=True)


def _stage(run: Path, last: str, quiet: bool) -> Run:
    from puzzle import pipeline

    opened = Run.open(run)
    with progress(quiet, opened) as report:
        ran = pipeline.run_stages(opened, last, report)
    err.print(f"ran: {', '.join(ran)}" if ran else "everything is up to date", highlight=False)
    return opened


@app.command()
def library(run: RunArgument, quiet: Quiet = False) -> None:
    """Make the block library of RUN: every variant's weights."""
    opened = _stage(run, "library", quiet)
    out.print(str(opened.path / "library"), highlight=False, soft_wrap=True)


@app.command()
def score(run: RunArgument, quiet: Quiet = False) -> None:
    """Measure what each variant of RUN costs and loses."""
    _stage(run, "costs", quiet)
    opened = _stage(run, "scores", quiet)
    out.print(f"{opened.path / 'costs.parquet'}\n{opened.path / 'scores.parquet'}", highlight=False, soft_wrap=True)


@app.command()
def heal(run: RunArgument, quiet: Quiet = False) -> None:
    """Assemble and heal the child of RUN."""
    opened = _stage(run, "heal", quiet)
    out.print(str(opened.child), highlight=False, soft_wrap=True)


@app.command()
def report(
    run: RunArgument,
    compare: Annotated[
        list[Path] | None, typer.Option("--compare", help="another finished run to overlay; several allowed")
    ] = None,
    out_: Annotated[
        Path | None, typer.Option("--out", "-o", help="where the comparison goes", show_default="RUN/comparison")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="html, or md: print the model card")] = "html",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate the child of RUN and write its report.

    Example: `puzzle report runs/a --compare runs/b --compare runs/c`

    Example: `puzzle report runs/a --format md > card.md`
    """
    if format_ not in ("html", "md"):
        raise ConfigError(f"--format {format_!r}: html or md is expected")
    if compare and (format_ == "md" or as_json):
        raise ConfigError("--compare makes a page; it goes with neither --format md nor --json")
    if out_ and not compare:
        raise ConfigError("--out goes with --compare; the report of one run is in RUN/report")
    from puzzle.reports.build import compare as overlay
    from puzzle.reports.build import markdown

    others = [Run.open(path) for path in compare or []]
    opened = _stage(run, "report", quiet)
    if format_ == "md":
        print(markdown(opened), end="")
    elif compare:
        folder = out_ or run / "comparison"
        with progress(quiet) as report:
            overlay([opened, *others], folder, report)
        out.print(str(folder / "index.html"), highlight=False, soft_wrap=True)
    else:
        show_run(opened, as_json)


@app.command()
def status(run: RunArgument, as_json: AsJson = False) -> None:
    """Say which stages of RUN are done, which would run again, and why."""
    from puzzle import pipeline

    rows = pipeline.status(Run.open(run))
    if as_json:
        out.print_json(json.dumps(rows))
        return
    table = Table("stage", "state", "why", "seconds", "peak MiB")
    for row in rows:
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.1f}"
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f}"
        table.add_row(row["stage"], row["state"], row["why"], seconds, peak)
    out.print(table)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show what Puzzle finds here: packages, devices, solvers, disk; exit code 1 where it lacks something it needs."""
    from puzzle.doctor import examine

    findings = examine(Path.cwd())
    if as_json:
        out.print_json(json.dumps([asdict(f) for f in findings]))
    else:
        table = Table(show_header=False, box=None)
        for f in findings:
            table.add_row(_escape(f.what), f.state, _escape(f.detail))
        out.print(table)
    if any(f.state == "missing" for f in findings):
        raise typer.Exit(1)


@app.command("eval")
def eval_(
    checkpoint: Annotated[
        str, typer.Argument(help="a folder or hub name: a child, or any causal model", show_default=False)
    ],
    data: Annotated[
        str, typer.Option("--data", "-d", help="a dataset's name, a local file, or python-docs")
    ] = "python-docs",
    parent: Annotated[
        str | None, typer.Option("--parent", help="also KL and top-1 agreement against this model")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="how many tokens to judge by")] = 16_384,
    seq_length: Annotated[int, typer.Option("--seq-length", min=8)] = 256,
    text_column: Annotated[str, typer.Option("--text-column")] = "text",
    seed: Annotated[int, typer.Option("--seed", help="which documents are taken")] = 0,
    device: Annotated[str, typer.Option("--device")] = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Judge CHECKPOINT on text: perplexity, and KL and top-1 agreement against --parent.

    Example: `puzzle eval runs/a/children/child --parent ./llama --data my.jsonl`
    """
    from puzzle.config import DataConfig, validate
    from puzzle.evaluate import evaluate_checkpoint

    config = validate(
        DataConfig, {"source": data, "seq_length": seq_length, "text_column": text_column}, "command line"
    )
    with progress(quiet) as report:
        figures = evaluate_checkpoint(checkpoint, parent, config, tokens, seed, device, report)
    if as_json:
        out.print_json(json.dumps(figures))
        return
    for key, value in figures.items():
        out.print(f"{key}: {value:.6g}" if isinstance(value, float) else f"{key}: {value}", highlight=False)


@app.command()
def inspect(
    checkpoint: Annotated[str, typer.Argument(help="a parent or child", show_default=False)], as_json: AsJson = False
) -> None:
    """Show CHECKPOINT layer by layer: both halves, parameters, KV-cache bytes a token."""
    from puzzle.architecture import kv_values_per_token, subblock_params
    from puzzle.checkpoint import Checkpoint, find

    found = Checkpoint(find(checkpoint))
    rows = [
        {
            "layer": i,
            "attention": block.attention.name,
            "ffn": block.ffn.name,
            "params": sum(subblock_params(half, found.shape) for half in (block.attention, block.ffn)),
            "kv_bytes_per_token": kv_values_per_token(block.attention, found.shape) * found.dtype.itemsize,
        }
        for i, block in enumerate(found.blocks)
    ]
    if as_json:
        out.print_json(json.dumps(rows))
        return
    table = Table("layer", "attention", "ffn", "parameters", "KV bytes/token")
    for row in rows:
        table.add_row(
            str(row["layer"]), row["attention"], row["ffn"], f"{row['params']:,}", f"{row['kv_bytes_per_token']:,}"
        )
    table.add_section()
    total = [sum(row[key] for row in rows) for key in ("params", "kv_bytes_per_token")]
    table.add_row("all", "", "", f"{total[0]:,}", f"{total[1]:,}")
    out.print(table)


@app.command()
def export(
    child: Annotated[str, typer.Argument(help="a child or parent", show_default=False)],
    out_: Annotated[Path, typer.Option("--out", "-o", help="the file to write", show_default=False)],
    to: Annotated[str, typer.Option("--to", help="gguf, for llama.cpp")] = "gguf",
    quant: Annotated[str, typer.Option("--quant", help="f32, f16, bf16, q8_0; q4_k_m needs llama-quantize")] = "f16",
    quiet: Quiet = False,
) -> None:
    """Write CHILD in the format of another runtime.

    Example: `puzzle export runs/a/children/child --to gguf --quant q8_0 --out child.gguf`
    """
    if to != "gguf":
        raise ConfigError(f"--to {to!r}: the only format is gguf")
    from puzzle.checkpoint import find
    from puzzle.child import gguf

    with progress(quiet) as report:
        written = gguf.export(find(child), out_, quant, report)
    out.print(str(written), highlight=False, soft_wrap=True)


space_app = typer.Typer(help="Search spaces: what they mean for a parent, and their JSON Schema.", no_args_is_help=True)
app.add_typer(space_app, name="search-space")


@space_app.command("show")
def show_space(
    space: Annotated[str, typer.Argument(help="a preset's name or a YAML file", show_default=False)],
    parent: Annotated[str, typer.Option("--parent", help="the checkpoint it is for", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """List what SPACE allows in each layer of a parent, with parameters and KV-cache bytes a token.

    Example: `puzzle search-space show cpu-small --parent ./llama`
    """
    from puzzle.checkpoint import Checkpoint, find
    from puzzle.config import load_search_space
    from puzzle.variants import expand, listing, size

    checkpoint = Checkpoint(find(parent))
    variants = expand(load_search_space(search_spaces.path(space)), checkpoint.shape)
    rows = listing(variants, checkpoint.shape, checkpoint.dtype.itemsize)
    exponent = size(variants)
    if as_json:
        out.print_json(json.dumps({"rows": rows, "log10_architectures": exponent}))
        return
    table = Table("layers", "subblock", "variant", "parameters", "KV bytes/token")
    for row in rows:
        figures = (f"{row[key]:,}" for key in ("params", "kv_bytes_per_token"))
        table.add_row(row["layers"], row["subblock"], row["variant"], *figures)
    out.print(table)
    out.print(f"{len(variants):,} variants, 10^{exponent:.1f} architectures", highlight=False)


@space_app.command("schema")
def print_schema() -> None:
    """Print the JSON Schema of search spaces, for editors that complete and check YAML."""
    from puzzle.config import search_space_schema

    out.print_json(json.dumps(search_space_schema()))


@app.command()
def search(
    run: Annotated[Path | None, typer.Argument(help="a run directory", show_default=False)] = None,
    scores: Annotated[Path | None, typer.Option("--scores", help="own table: layer,subblock,variant,score")] = None,
    costs: Annotated[Path | None, typer.Option("--costs", help="own table: layer,subblock,variant, then costs")] = None,
    target: Annotated[list[str] | None, typer.Option("--target", "-t", help="several allowed")] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="sequences at once, with own tables", show_default="1")
    ] = None,
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="prompt tokens, with own tables")] = 128,
    generated: Annotated[int, typer.Option("--generated", min=1, help="generated tokens, with own tables")] = 128,
    sweep: Annotated[
        str | None, typer.Option("--sweep", help="trace the front of score against a measure: throughput, memory, ...")
    ] = None,
    points: Annotated[int, typer.Option("--points", min=2, help="of the front")] = 20,
    homogeneous: Annotated[bool, typer.Option("--homogeneous", help="the same variants in every layer")] = False,
    pin: Annotated[
        list[str] | None, typer.Option("--pin", help="a layer that stays (3) or a variant that is set (12.ffn.ffn768)")
    ] = None,
    max_changes: Annotated[int | None, typer.Option("--max-changes", min=0, help="of the parent's subblocks")] = None,
    solutions: Annotated[int, typer.Option("--solutions", min=1, help="the best so many, as different as...")] = 1,
    distance: Annotated[int, typer.Option("--distance", min=1, help="...so many subblocks")] = 4,
    refine: Refine = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Choose the architecture for RUN, or for your own tables of scores and costs (CSV or parquet).

    With --target, --sweep or other conditions, RUN's tables answer the question and RUN stays as it is.

    Example: `puzzle search runs/a --target "memory<=200MiB" --max-changes 10`

    Example: `puzzle search runs/a --sweep throughput --points 20`

    Example: `puzzle search --scores scores.csv --costs costs.csv --target "decode<=0.6x" --json`
    """
    options = _conditions(homogeneous, pin, max_changes)
    question = bool(target or sweep or options or solutions > 1)
    if (run is None) == (scores is None and costs is None):
        raise ConfigError("give a run directory, or --scores, --costs and --target, not both")
    if refine is not None and (run is None or question):
        raise ConfigError("--refine goes with a run directory alone: it scores the run's own model around the child")
    if run is not None and not question:
        if refine is not None:
            _set(Run.open(run), {"search.refine": _rounds(refine)})
        show_solution(_stage(run, "refine", quiet).solution, as_json)
        return
    from puzzle import search as room

    if run is not None:
        score_table, by_batch, scenario, own_targets = _tables_of(run, quiet)
    elif scores and costs and (target or sweep):
        score_table, by_batch = room.read_table(scores), room.by_batch(room.read_table(costs), batch)
        scenario, own_targets = room.Scenario(min(by_batch), prompt, generated), []
    else:
        raise ConfigError("own tables need all of --scores, --costs and --target (or --sweep)")
    targets = target or ([] if sweep else own_targets)
    if len(by_batch) > 1 and (sweep or solutions > 1):
        known = ", ".join(map(str, by_batch))
        raise ConfigError(f"--sweep and --solutions need one --batch of those in the costs: {known}")
    costs_there = by_batch[scenario.batch]
    if sweep:
        show_front(room.sweep(score_table, costs_there, sweep, points, scenario, targets, **options), as_json)
    elif len(by_batch) > 1:
        scenario, solution = room.best_batch(score_table, by_batch, targets, scenario, **options)
        show_solution(solution, as_json, batch=scenario.batch)
    else:
        options |= {"k": solutions, "min_distance": distance}
        show_solutions(room.k_diverse(score_table, costs_there, targets, scenario, **options), as_json)


def _tables_of(run: Path, quiet: bool) -> tuple[Any, dict[int, Any], Any, list[str]]:
    """A run's scores, its costs by batch, its scenario and its targets."""
    from puzzle import pipeline

    opened = _stage(run, "scores", quiet)
    scenario = opened.config.workload
    return pipeline.score_table(opened), {scenario.batch: pipeline.cost_table(opened)}, scenario, opened.config.targets


def _conditions(homogeneous: bool, pin: list[str] | None, max_changes: int | None) -> dict[str, Any]:
    """The options of `puzzle.search.solve` that were given."""
    pinned = [int(p) if p.isdecimal() else p for p in pin or []]
    given = {"homogeneous": homogeneous, "pinned": pinned, "max_changes": max_changes}
    return {key: value for key, value in given.items() if value is not None and value is not False and value != []}
