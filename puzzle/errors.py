# SPDX-License-Identifier: Apache-2.0
"""What can go wrong by the user's doing; each class carries the exit code of the command line."""

import difflib
from collections.abc import Iterable


class PuzzleError(Exception):
    """Base of all errors Puzzle raises on purpose; its text is one sentence for the user."""

    exit_code = 1


class ConfigError(PuzzleError):
    """A config, an argument or an input file is wrong."""

    exit_code = 2


class OutputError(PuzzleError):
    """What Puzzle makes cannot be written where the user wants it: a full disk, a folder without permission."""

    exit_code = 2


class UnsupportedError(PuzzleError):
    """The input is valid, but of a kind Puzzle does not handle."""

    exit_code = 2


class InfeasibleError(PuzzleError):
    """No architecture of the search space meets the targets."""

    exit_code = 3


def reason(error: BaseException) -> str:
    """Another library's error on one line, to be put in parentheses into a sentence of ours."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the known name nearest to `word`, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
