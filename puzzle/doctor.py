# SPDX-License-Identifier: Apache-2.0
"""What Puzzle finds on this machine: packages, devices, solvers, disk. `puzzle doctor`."""

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pulp
import torch
from huggingface_hub.constants import HF_HUB_CACHE

from puzzle.devices import resolve_dtype
from puzzle.scoring.whole import machine

ROOM = 10 * 2**30  # bytes; a run of a small model takes less

EXTRAS = {  # packages that Puzzle uses where they are, and for what
    "optuna": "Optuna among the baselines of the report",
    "xllamacpp": "running exported GGUF files in benchmarks and tests",
    "selenium": "testing the report in a browser",
    "vllm": "serving children",
}


@dataclass(frozen=True)
class Finding:
    """One line of the answer: `missing` of what Puzzle needs is a fault, `absent` of what it can do without is none."""

    what: str
    state: Literal["ok", "missing", "absent", "low"]
    detail: str


def examine(folder: Path) -> list[Finding]:
    """Look at this machine.

    Args:
        folder: where runs would be written.
    """
    return [*_packages(), *_extras(), *_devices(), *_solvers(), *_disk(folder)]


def _packages() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield Finding("puzzle-nas", "ok", metadata.version("puzzle-nas"))
    for requirement in metadata.requires("puzzle-nas") or []:
        if "extra ==" not in requirement:
            name = re.split(r"[^\w-]", requirement)[0]
            try:
                yield Finding(name, "ok", metadata.version(name))
            except metadata.PackageNotFoundError:
                yield Finding(name, "missing", f"pip install '{requirement}'")


def _extras() -> Iterator[Finding]:
    for name, use in EXTRAS.items():
        there = find_spec(name) is not None
        yield Finding(name, "ok" if there else "absent", metadata.version(name) if there else f"for {use}")
    tool = shutil.which("llama-quantize")
    yield Finding("llama-quantize", "ok" if tool else "absent", tool or "llama.cpp's tool, for `export --quant q4_k_m`")


def _devices() -> Iterator[Finding]:
    here = machine("cpu")
    memory = f", {here['memory_bytes'] / 2**30:.0f} GiB" if here["memory_bytes"] else ""
    detail = f"{here['cpu']}, {torch.get_num_threads()} threads{memory}; computes in {resolve_dtype('auto', 'cpu')}"
    yield Finding("cpu", "ok", detail)
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        dtype = resolve_dtype("auto", f"cuda:{index}")
        detail = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB; computes in {dtype}"
        yield Finding(f"cuda:{index}", "ok", detail)
    if not torch.cuda.is_available():
        yield Finding("cuda", "absent", "no GPU that this torch can use")


def _solvers() -> Iterator[Finding]:
    for name, solver in (("HiGHS", pulp.HiGHS(msg=False)), ("CBC", pulp.PULP_CBC_CMD(msg=False))):
        yield Finding(name, "ok" if solver.available() else "missing", "solves the mixed-integer programs")


def _disk(folder: Path) -> Iterator[Finding]:
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
        yield Finding("disk", "ok" if free > ROOM else "low", f"{free / 2**30:.0f} GiB free in {folder}")
    except OSError as error:
        yield Finding("disk", "missing", f"{folder} cannot be written: {error.strerror}")
    offline = " (HF_HUB_OFFLINE is set: nothing is fetched)" if os.environ.get("HF_HUB_OFFLINE") else ""
    yield Finding("hub cache", "ok", f"{HF_HUB_CACHE}{offline}")
