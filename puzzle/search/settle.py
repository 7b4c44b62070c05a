# SPDX-License-Identifier: Apache-2.0
"""The optimum of estimated scores, with exact ones only where they matter. No torch."""

from collections.abc import Callable, Sequence

import numpy as np

from puzzle.architecture import SubblockVariant
from puzzle.errors import PuzzleError
from puzzle.search.mip import Optimum, Program

Ask = Callable[[Sequence[SubblockVariant]], Sequence[float]]


def settle(program: Program, scores: np.ndarray, exact: np.ndarray, ask: Ask) -> Optimum | None:
    """Solve, ask for the exact scores of what was chosen, and solve again until all that is chosen is exact.

    An estimate that is too low is found out as soon as it is chosen; one that is too high may hide a better choice.

    Args:
        program: the constraints.
        scores: of each candidate, shape [candidates]; estimates are replaced by what is asked for.
        exact: which of them are exact, bool of shape [candidates]; kept up to date likewise.
        ask: gives the exact scores of variants, in their order.

    Returns:
        The optimum; None where no choice meets the constraints.

    Raises:
        PuzzleError: an exact score is no finite number, or the time limit ended before there was a solution.
    """
    while (optimum := program.solve(objective=scores)) is not None:
        guessed = optimum.chosen[~exact[optimum.chosen]]
        if not guessed.size:
            return optimum
        variants = [program.problem.candidates[i] for i in guessed]
        found = np.asarray(ask(variants), dtype=float)
        if not np.isfinite(found).all():
            bad = variants[int(np.flatnonzero(~np.isfinite(found))[0])]
            raise PuzzleError(f"{bad.key}: its exact score is not a finite number")
        scores[guessed], exact[guessed] = found, True
    return None
