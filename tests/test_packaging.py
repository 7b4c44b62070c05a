# SPDX-License-Identifier: Apache-2.0
"""The package as it is installed: its list of packages, its data files, its version, its guarded folders."""

import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path, PurePath

import pytest

import puzzle

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
MAPPED = {folder: name for name, folder in SETUPTOOLS["package-dir"].items()}  # scoring -> puzzle.scoring


def folder_of(package: str) -> Path:
    return ROOT / SETUPTOOLS["package-dir"].get(package, package.replace(".", "/"))


def test_the_listed_packages_are_the_folders() -> None:
    inside = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "puzzle").rglob("*.py")}
    assert sorted(SETUPTOOLS["packages"]) == sorted(inside | set(MAPPED.values()))
    assert not [p for p in SETUPTOOLS["packages"] if not (folder_of(p) / "__init__.py").is_file()]
    for folder in MAPPED:  # no subpackage of theirs, which the list would leave out
        assert {p.parent for p in (ROOT / folder).rglob("*.py")} == {ROOT / folder}


@pytest.mark.parametrize("folder", sorted(MAPPED))
def test_bare_names_are_refused(folder: str) -> None:
    result = subprocess.run([sys.executable, "-c", f"import {folder}"], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1
    assert f"ImportError: import puzzle.{folder} instead of {folder}" in result.stderr
    assert import_module(MAPPED[folder]).__name__ == MAPPED[folder]


def test_data_files_are_declared() -> None:
    """Each file in a package's folder that is not Python travels in the wheel, and each pattern has files."""
    for package in SETUPTOOLS["packages"]:
        folder, patterns = folder_of(package), SETUPTOOLS["package-data"].get(package, [])
        for pattern in patterns:
            assert list(folder.glob(pattern)), f"{package}: no {pattern}"
        inner = [folder_of(p) for p in SETUPTOOLS["packages"] if p != package]
        skipped = [*inner, ROOT / "reports" / "examples"]
        for file in folder.rglob("*"):
            if file.is_dir() or file.suffix in (".py", ".pyc") or any(s in file.parents for s in skipped):
                continue
            name = PurePath(file.relative_to(folder))
            assert any(name.match(pattern) for pattern in patterns), f"{package}: {name} is not in package-data"


def test_version() -> None:
    assert puzzle.__version__ == PYPROJECT["project"]["version"] == metadata.version("puzzle-nas")


def test_the_command_exists() -> None:
    (command,) = PYPROJECT["project"]["scripts"].items()
    module, function = command[1].split(":")
    assert command[0] == "puzzle"
    assert callable(getattr(import_module(module), function))


def test_versions_seen_to_work_are_allowed() -> None:
    """constraints.txt must not contradict the ranges of pyproject.toml."""
    from packaging.requirements import Requirement

    allowed = {r.name: r.specifier for r in map(Requirement, PYPROJECT["project"]["dependencies"])}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for pin in (Requirement(line) for line in lines if line and not line.startswith("#")):
        (version,) = (s.version for s in pin.specifier)
        assert pin.name not in allowed or version in allowed[pin.name]
