# SPDX-License-Identifier: Apache-2.0
"""`python-docs`, the corpus that needs no download: the docstrings of the installed Python packages."""

import ast
import gc
import importlib.util
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from puzzle.architecture import fingerprint
from puzzle.run import Progress, atomic, cache_folder, silent

_VERSION = 1  # raised when the rules below change, so that cached corpora are made again
_PACKAGES = ("numpy", "pandas", "torch", "transformers")
_SHORTEST, _LONGEST = 200, 4_000  # characters of a document
_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "idlelib", "test", "tests", "_tests", "testing", "_dynamo", "_inductor", "_vendor"
}  # fmt: skip
_SKIPPED_FILES = "modular_"  # transformers generates its modeling files from these: the same docstrings twice

Scope = ast.Module | ast.ClassDef


def python_docs(progress: Progress = silent) -> list[str]:
    """About 18 MB of prose on Python: the docstrings of its standard library, numpy, pandas, torch and transformers.

    A document is a module's or a class' docstring with those of its functions; long ones are cut between functions.
    The text depends on the installed versions. It is read from the source files once, without importing them, and
    kept in the cache.
    """
    versions = {name: metadata.version(name) for name in _PACKAGES if importlib.util.find_spec(name)}
    key = fingerprint({**versions, "python": platform.python_version(), "rules": _VERSION})
    cached = cache_folder() / f"python-docs-{key[:16]}.parquet"
    if not cached.exists():
        texts = docstrings(_source_files(versions), progress)
        with atomic(cached) as temporary:
            pq.write_table(pa.table({"text": texts}), temporary)
    return pq.read_table(cached).column("text").to_pylist()


def pieces(parts: Iterable[str], separator: str) -> Iterator[str]:
    """Join consecutive parts into documents; each ends with the part that brings it to 4,000 characters."""
    piece: list[str] = []
    size = 0
    for part in parts:
        piece.append(part)
        size += len(part) + len(separator)
        if size >= _LONGEST:
            yield separator.join(piece)
            piece, size = [], 0
    if piece:
        yield separator.join(piece)


def docstrings(files: list[Path], progress: Progress = silent) -> list[str]:
    """The distinct documents of at least 200 characters in Python source files, in the files' order."""
    texts: dict[str, None] = {}  # an ordered set: many classes repeat their neighbours' docstrings
    collecting = gc.isenabled()
    gc.disable()  # syntax trees have no cycles, and the collector would double the time
    try:
        for done, file in enumerate(files):
            if done % 100 == 0:
                progress("reading docstrings", done, len(files))
            for scope in _scopes(file):
                texts.update((text, None) for text in pieces(_members(scope), "\n\n") if len(text) >= _SHORTEST)
    finally:
        if collecting:
            gc.enable()
    progress("reading docstrings", len(files), len(files))
    return list(texts)


def _source_files(packages: Iterable[str]) -> list[Path]:
    roots = [Path(sysconfig.get_path("stdlib"))]
    for name in packages:
        specification = importlib.util.find_spec(name)  # finds a package without importing it
        roots += [Path(folder) for folder in specification.submodule_search_locations or ()]
    return [
        file
        for root in roots
        for file in sorted(root.rglob("*.py"))
        if not _SKIPPED_FOLDERS.intersection(file.relative_to(root).parts) and not file.name.startswith(_SKIPPED_FILES)
    ]


def _scopes(file: Path) -> Iterator[Scope]:
    """A module and its classes, outer before inner; nothing for a file of another Python version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            pending: list[Scope] = [ast.parse(file.read_bytes())]
    except (SyntaxError, ValueError, OSError):
        return
    while pending:
        scope = pending.pop(0)
        yield scope
        pending[:0] = [node for node in scope.body if isinstance(node, ast.ClassDef)]


def _members(scope: Scope) -> Iterator[str]:
    """The docstring of a module or class, then its functions' names and docstrings."""
    if text := ast.get_docstring(scope):
        yield _valid(text)
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            yield f"{node.name}\n{_valid(text)}"


def _valid(text: str) -> str:
    """Drop lone surrogates, which no UTF-8 file can hold."""
    return re.sub("[\ud800-\udfff]", "", text)
