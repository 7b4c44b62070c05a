# SPDX-License-Identifier: Apache-2.0
"""The families of parents Puzzle can compress: one file each."""

from transformers import PretrainedConfig

from puzzle.errors import UnsupportedError
from puzzle.families.base import Family
from puzzle.families.llama import FAMILY as LLAMA

FAMILIES = {family.model_type: family for family in (LLAMA,)}


def family_of(config: PretrainedConfig) -> Family:
    """The family of a parent's config.

    Raises:
        UnsupportedError: the parent is of a kind that Puzzle does not compress.
    """
    if config.model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedError(f"parents of model_type {config.model_type!r} are not supported (supported: {known})")
    return FAMILIES[config.model_type]
