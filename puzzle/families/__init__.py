# SPDX-License-Identifier: Apache-2.0
"""The families of parents Puzzle can compress: one file each."""

from pathlib import Path

from puzzle.errors import UnsupportedError
from puzzle.families.base import Family
from puzzle.families.llama import FAMILY as LLAMA
from puzzle.families.mistral import FAMILY as MISTRAL
from puzzle.families.qwen2 import FAMILY as QWEN2

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2)}


def family_of(model_type: object, source: Path) -> Family:
    """The family of a parent's `model_type`, as read from `source`.

    Raises:
        UnsupportedError: the parent is of a kind that Puzzle does not compress.
    """
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedError(f"{source}: models of model_type {model_type!r} are not supported (supported: {known})")
    return FAMILIES[model_type]
