# SPDX-License-Identifier: Apache-2.0
"""Why no architecture meets the targets: those that conflict, and the best reachable value of each. No torch."""

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from puzzle.search.mip import Program


def explain(program: "Program", among: Sequence[int] | None = None) -> str:
    """One sentence on an infeasible program, or on those of its limits that are `among`.

    Targets that cannot be met even alone are named, if there are any; else a smallest set of targets that conflict,
    found by leaving out one after the other (the deletion filter of Chinneck and Dravnieks, 1991).
    """
    everything = range(len(program.limits)) if among is None else among
    if not _feasible(program, ()):
        return "no architecture fits the options (pinned, homogeneous, max_changes, exclude), whatever the targets"
    alone = {i: _best(program, i, ()) for i in everything}
    beyond = [i for i in everything if not program.limits[i].met(alone[i])]
    conflict = beyond or _smallest_conflict(program, everything)
    if beyond or len(conflict) == 1:
        return "no architecture meets " + " or ".join(
            f"{program.limits[i].text} (best reachable: {program.limits[i].describe(alone[i])})" for i in conflict
        )
    texts = [program.limits[i].text for i in conflict]
    best = [program.limits[i].describe(_best(program, i, [j for j in conflict if j != i])) for i in conflict]
    reachable = ", ".join(f"{value} for {text}" for value, text in zip(best, texts, strict=True))
    return (
        f"no architecture meets {', '.join(texts[:-1])} and {texts[-1]} together; "
        f"given the other{'s' if len(texts) > 2 else ''}, the best reachable is {reachable}"
    )


def _smallest_conflict(program: "Program", limits: Sequence[int]) -> list[int]:
    """Limits that cannot hold together, while any of them left out the rest can."""
    conflict = list(limits)
    for i in limits:
        others = [j for j in conflict if j != i]
        if not _feasible(program, others):
            conflict = others
    return conflict


def _bounds(program: "Program", kept: Collection[int]) -> list[float]:
    return [limit.bound if i in kept else math.inf for i, limit in enumerate(program.limits)]


def _feasible(program: "Program", kept: Collection[int]) -> bool:
    return program.solve(bounds=_bounds(program, kept)) is not None


def _best(program: "Program", i: int, kept: Collection[int]) -> float:
    """The lowest load of one target where the kept ones hold."""
    optimum = program.solve(objective=program.limits[i].weights, bounds=_bounds(program, kept))
    assert optimum is not None, "the kept targets can be met"
    return program.limits[i].load(optimum.chosen)
