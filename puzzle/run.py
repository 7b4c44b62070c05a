# SPDX-License-Identifier: Apache-2.0
"""A run directory: the resolved config, the manifest of stages, and writes that are whole or absent. No torch."""

import errno
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from puzzle.architecture import fingerprint
from puzzle.costs import Solution
from puzzle.errors import ConfigError, OutputError, PuzzleError, reason

if TYPE_CHECKING:
    from puzzle.config import RunConfig

_SCRATCH = ".writing-"  # prefix of the folders in which outputs grow until they are whole

Progress = Callable[[str, int, int], None]
"""Called as `progress(what, done, total)`; the command line draws it, libraries may pass a no-op."""


def silent(what: str, done: int, total: int) -> None:
    """The progress callback that shows nothing."""


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it there when the block ends well, else remove it.

    Works for files and for folders. An existing folder is swapped out, never half replaced.

    Raises:
        OutputError: the disk is full, or the folder cannot be written.
    """
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=path.parent))
        temporary = scratch / path.name
        yield temporary
        for file in [temporary] if temporary.is_file() else temporary.rglob("*"):
            if file.is_file():
                _sync(file)
        _put(temporary, path, scratch / "old")
    except Exception as error:  # safetensors has its own class for a full disk
        if known := disk_error(error, path):
            raise known from None
        raise
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _put(new: Path, path: Path, old: Path) -> None:
    """Rename `new` to `path`; a folder that is there goes to `old`, and comes back if that fails."""
    if path.is_dir():
        path.rename(old)
    try:
        os.replace(new, path)
    except OSError:
        if old.exists():
            old.rename(path)
        raise


def _sync(file: Path) -> None:
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


def disk_error(error: BaseException, path: Path) -> OutputError | None:
    """One sentence for a full disk or a folder that cannot be written, or None for another error."""
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in str(error):
        return OutputError(f"{path}: the disk is full; free some space and run the same command again to continue")
    if number in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG):
        return OutputError(f"{path}: cannot be written ({os.strerror(number)})")
    return None


def cache_folder() -> Path:
    """Where inputs are kept for the next time: `$PUZZLE_CACHE`, else `puzzle` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("PUZZLE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "puzzle"


def write_json(path: Path, data: Any) -> None:
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({reason(error)})") from None


@dataclass(frozen=True)
class Stage:
    """One step of the pipeline: which config it reads, which stages' outputs it reads, what it writes."""

    name: str
    function: Callable[["Run", Progress], None]
    version: int  # raised when the stage's algorithm changes, so that old outputs count as stale
    reads: tuple[str, ...] = ()  # fields of the config
    after: tuple[str, ...] = ()  # stages whose outputs it reads
    writes: tuple[str, ...] = ()  # paths inside the run directory; `{name}` is the child's


class Run:
    """A run directory and its manifest."""

    def __init__(self, path: Path, config: "RunConfig"):
        self.path, self.config = path, config

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Open an existing run.

        Raises:
            ConfigError: the folder holds no run.
        """
        from puzzle.config import RunConfig, read_yaml, validate  # pydantic: `puzzle search` on tables starts without

        file = path / "run.yaml"
        if not file.is_file():
            raise ConfigError(f"{path}: no run here (it has no run.yaml); `puzzle compress ... --out {path}` makes one")
        return cls(path, validate(RunConfig, read_yaml(file), file))

    @classmethod
    def create(cls, path: Path, config: "RunConfig", update: bool = False) -> "Run":
        """Make the run directory, or continue one of the same recipe.

        Raises:
            ConfigError: the folder holds a run of another recipe (and not `update`), or something else.
        """
        import yaml

        if (path / "run.yaml").exists():
            old = cls.open(path)
            changed = _differences(old.config.recipe(), config.recipe())
            if changed and not update:
                raise ConfigError(
                    f"{path}: holds a run with another config ({changed[0]}); use another --out, "
                    "or --update to redo here what the change touches"
                )
        elif path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path}: exists and is not a run; give --out a new or empty folder")
        run = cls(path, config)
        with atomic(path / "run.yaml") as temporary:
            temporary.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
        return run

    @property
    def child(self) -> Path:
        """Where the child goes."""
        return self.path / "children" / self.config.name

    @property
    def unhealed(self) -> Path:
        """Where the child is before healing."""
        return self.path / "children" / f"{self.config.name}.before-healing"

    @property
    def solution(self) -> Solution:
        """The chosen architecture, once the search stage is done."""
        return Solution.from_json(read_json(self.path / "solutions" / f"{self.config.name}.json"))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process, and clear away what killed ones left half written.

        Raises:
            PuzzleError: another process holds it.
        """
        from filelock import FileLock, Timeout

        try:
            with FileLock(self.path / ".lock", timeout=0):
                for scratch in list(self.path.rglob(f"{_SCRATCH}*")):
                    shutil.rmtree(scratch, ignore_errors=True)
                yield
        except Timeout:
            raise PuzzleError(f"{self.path}: another puzzle process is working on this run") from None

    def outputs(self, stage: Stage) -> list[Path]:
        return [self.path / name.format(name=self.config.name) for name in stage.writes]

    @property
    def manifest(self) -> dict[str, Any]:
        path = self.path / "manifest.json"
        return read_json(path) if path.exists() else {"stages": {}}

    def expected(self, stage: Stage, stages: dict[str, Stage], parent: str) -> dict[str, str]:
        """The hashes this stage depends on: its config fields, the parent's weights, the stages before it."""
        recipe = self.config.identity()
        inputs = {f"config.{field}": fingerprint(recipe[field]) for field in stage.reads}
        inputs["parent"] = parent
        inputs["version"] = str(stage.version)
        for name in stage.after:
            inputs[f"stage.{name}"] = fingerprint(self.expected(stages[name], stages, parent))
        return inputs

    def stale(self, stage: Stage, stages: dict[str, Stage], parent: str) -> str | None:
        """Why a stage has to run, or None when its outputs are up to date."""
        entry = self.manifest["stages"].get(stage.name)
        if entry is None:
            return "not run yet"
        if entry["state"] != "done":
            return "was interrupted"
        wanted = self.expected(stage, stages, parent)
        changed = [k for k, v in wanted.items() if entry["inputs"].get(k) != v]
        if changed:
            return f"{changed[0].removeprefix('config.').replace('stage.', 'stage ')} changed"
        missing = [p.name for p in self.outputs(stage) if not p.exists()]
        return f"{missing[0]} is missing" if missing else None

    def execute(self, stage: Stage, stages: dict[str, Stage], parent: str, progress: Progress) -> None:
        """Run one stage and record it."""
        inputs = self.expected(stage, stages, parent)
        entry: dict[str, Any] = {"state": "running", "inputs": inputs, "started": _now()}
        self._record(stage.name, entry)
        reset_peak_memory()
        start = time.perf_counter()
        stage.function(self, progress)
        seconds = time.perf_counter() - start
        done = {
            "state": "done",
            "seconds": round(seconds, 3),
            "peak_bytes": peak_memory(),
            "outputs": {str(p.relative_to(self.path)): _describe(p) for p in self.outputs(stage)},
            "versions": versions(),
        }
        self._record(stage.name, {**entry, **done})

    def _record(self, name: str, entry: dict[str, Any]) -> None:
        manifest = self.manifest
        manifest["stages"][name] = entry
        write_json(self.path / "manifest.json", manifest)


def _differences(old: Any, new: Any, key: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [d for k in {**old, **new} for d in _differences(old.get(k), new.get(k), f"{key}.{k}".strip("."))]
    return [] if old == new else [f"{key} is {old!r} there and {new!r} here"]


def _describe(path: Path) -> dict[str, Any]:
    """Size and hash of an output; folders are hashed over their files' names and hashes."""
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
        return {
            "files": len(files),
            "bytes": sum(p.stat().st_size for p in files),
            "sha256": fingerprint([[str(p.relative_to(path)), _sha256(p)] for p in files]),
        }
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(handle)


def _digest(handle: Any) -> str:  # Python 3.10 has no hashlib.file_digest
    digest = hashlib.sha256()
    while block := handle.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of what the results depend on."""
    names = ("puzzle-nas", "torch", "transformers", "datasets", "accelerate", "pulp", "highspy", "pandas")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def reset_peak_memory() -> None:
    """Start the peak memory of this process afresh, where the kernel can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def peak_memory() -> int:
    """Peak resident memory of this process in bytes, since the last reset where that works."""
    try:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if platform.system() == "Darwin" else peak * 1024


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
