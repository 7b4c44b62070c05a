# SPDX-License-Identifier: Apache-2.0
"""A real little corpus."""

import ast
import inspect
import json
from pathlib import Path

import pytest

MODULES = (
    "argparse",
    "collections",
    "decimal",
    "difflib",
    "email.message",
    "json",
    "logging",
    "pathlib",
    "subprocess",
    "typing",
)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Docstrings of some modules of the standard library, one document per line."""
    file = tmp_path_factory.mktemp("corpus") / "docs.jsonl"
    with file.open("w", encoding="utf-8") as handle:
        for name in MODULES:
            module = __import__(name, fromlist=["_"])
            tree = ast.parse(Path(inspect.getsourcefile(module)).read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                    handle.write(json.dumps({"text": text}) + "\n")
    return file
