# SPDX-License-Identifier: Apache-2.0
"""The four floors, by reading the imports of every module; and what must stay without torch, by importing it."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAPPED = ("scoring", "reports", "search_spaces")  # top-level folders that are packages of puzzle

# What each floor holds; "/" ends a room, which is a folder. A room may use lower floors and itself.
FLOORS = {
    0: ("architecture", "config", "costs", "errors", "run", "search_spaces/"),
    1: (
        *("families/", "variants/", "modeling", "registration", "checkpoint", "depth", "block_library"),
        *("data", "corpus", "devices", "evaluate", "parents", "tiny"),
    ),
    2: ("library/", "scoring/", "search/", "child/", "healing/", "plan/", "reports/"),
    3: ("cli", "display", "pipeline", "planning", "demos", "doctor", "__main__"),
}
FLOOR = {room.rstrip("/"): floor for floor, rooms in FLOORS.items() for room in rooms}
SHARED_FLOORS = (0, 1, 3)  # files of these may use their neighbours; only the rooms of floor 2 must not
TORCH_FREE = ("search", "reports", "registration", *(room.rstrip("/") for room in FLOORS[0]))
ALLOWED = {  # a package, and the only modules that may import it
    "pulp": {"puzzle.search.mip", "puzzle.doctor"},
    "highspy": set(),
    "typer": {"puzzle.cli"},
    "rich": {"puzzle.cli", "puzzle.display"},
    "pydantic": {"puzzle.config"},
}


def modules() -> dict[str, Path]:
    """Every module but `puzzle` itself by its import name, the mapped folders as `puzzle.scoring` and so on."""
    files = [*(ROOT / "puzzle").rglob("*.py"), *(f for folder in MAPPED for f in (ROOT / folder).rglob("*.py"))]
    named = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        parts = parts if parts[0] == "puzzle" else ("puzzle", *parts)
        named[".".join(parts).removesuffix(".__init__")] = file
    del named["puzzle"]
    return named


@functools.cache
def imports(name: str, file: Path, late: bool = True) -> set[str]:
    """Modules that a file imports; `late=False` leaves out those inside functions and under TYPE_CHECKING."""
    found: set[str] = set()
    body: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while body:
        node = body.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative imports hide the floors"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif late or not (isinstance(node, ast.FunctionDef) or is_for_type_checkers(node)):
            body.extend(ast.iter_child_nodes(node))
    return found


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def room(name: str) -> str | None:
    """The room of an imported name (`puzzle.search.mip` -> `search`), None outside of puzzle and for its root."""
    parts = name.split(".")
    return parts[1] if parts[0] == "puzzle" and len(parts) > 1 and parts[1] in FLOOR else None


MODULES = modules()


def test_every_module_has_a_floor() -> None:
    homeless = [name for name in MODULES if name.split(".")[1] not in FLOOR]
    assert not homeless, f"not in the layout: {homeless}"
    assert set(FLOOR) == {name.split(".")[1] for name in MODULES}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_down(name: str) -> None:
    own = name.split(".")[1]
    for target in imports(name, MODULES[name]):
        other = room(target)
        if other is None or other == own:
            continue
        assert FLOOR[other] <= FLOOR[own], f"{name} (floor {FLOOR[own]}) imports {target} (floor {FLOOR[other]})"
        if FLOOR[other] == FLOOR[own]:
            assert FLOOR[own] in SHARED_FLOORS, f"{name} imports {target}, a room of its own floor"


def test_the_root_imports_nothing_but_the_registration() -> None:
    root = imports("puzzle", ROOT / "puzzle" / "__init__.py")
    assert root == {"puzzle.registration", "puzzle.registration.register"}


def test_no_cycles() -> None:
    """Floors whose files may use each other must still be layered: no import at load time leads back."""
    graph = {
        name: {target for target in imports(name, file, late=False) if target in MODULES}
        for name, file in MODULES.items()
    }
    state: dict[str, int] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert state.get(name) != 1, " -> ".join((*path, name))
        if name not in state:
            state[name] = 1
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            state[name] = 2

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_packages_stay_in_their_place(package: str) -> None:
    users = {n for n, f in MODULES.items() if any(t.split(".")[0] == package for t in imports(n, f))}
    assert users <= ALLOWED[package]


def test_modeling_needs_only_torch_and_transformers() -> None:
    roots = {target.split(".")[0] for target in imports("puzzle.modeling", MODULES["puzzle.modeling"])}
    assert roots <= {"torch", "transformers", *sys.stdlib_module_names}


def test_bare_names_are_not_used() -> None:
    for name, file in MODULES.items():
        assert not {target.split(".")[0] for target in imports(name, file)} & set(MAPPED), name


def test_rooms_without_torch() -> None:
    names = sorted(name for name in MODULES if room(name) in TORCH_FREE)
    program = (
        "import sys, importlib\n"
        f"for name in {['puzzle', *names]!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT.parent)
    assert result.returncode == 0, result.stderr
