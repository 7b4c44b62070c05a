# SPDX-License-Identifier: Apache-2.0
"""What a parent family must tell: its shape and how its config becomes a child's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from puzzle.architecture import ModelShape


@dataclass(frozen=True)
class Family:
    """One family of parents whose layers carry Llama's tensor names."""

    model_type: str
    shape: Callable[[PretrainedConfig], ModelShape]
    child_settings: Callable[[PretrainedConfig], dict[str, Any]]  # the child's config without `block_configs`
