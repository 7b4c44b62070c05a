# SPDX-License-Identifier: Apache-2.0
"""The block library on disk: one safetensors file a variant, holding only the replaced weights and its record."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from puzzle.architecture import PARENT, SubblockVariant
from puzzle.errors import PuzzleError
from puzzle.run import atomic


@dataclass(frozen=True)
class VariantRecord:
    """What is known of a variant's weights. Errors are held-out, ||y_parent - y||^2 / ||y_parent||^2."""

    fingerprint: str  # of everything the weights depend on
    kind: str
    error_start: float  # taken from the parent as in the paper
    error_closed_form: float  # after the closed-form refit
    error: float  # after local distillation
    tokens: int  # local distillation saw
    state: str  # "distilled", "closed form", "start", or "stopped" after a loss that was not finite


def has_weights(variant: SubblockVariant) -> bool:
    """Whether a variant is stored: the parent's own subblock and a no-op need no file."""
    return variant.name not in (PARENT, "no_op")


class BlockLibrary:
    """Variants' weights by key. Files are the truth; the index is made from them, so a kill loses nothing."""

    def __init__(self, folder: Path):
        self.folder = folder

    def _file(self, variant: SubblockVariant) -> Path:
        return self.folder / f"{variant.key}.safetensors"

    def save(self, variant: SubblockVariant, state: dict[str, Tensor], record: VariantRecord) -> None:
        """Write a variant; tensors are named as in a layer of the checkpoint."""
        with atomic(self._file(variant)) as temporary:
            tensors = {k: v.contiguous() for k, v in state.items()}
            save_file(tensors, temporary, metadata={"record": json.dumps(asdict(record))})

    def record(self, variant: SubblockVariant) -> VariantRecord | None:
        """A variant's record, or None when it is not there or not whole."""
        try:
            with safe_open(self._file(variant), "pt") as file:
                return VariantRecord(**json.loads(file.metadata()["record"]))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return None

    def load(self, variant: SubblockVariant) -> dict[str, Tensor]:
        """A variant's weights; empty for a no-op.

        Raises:
            PuzzleError: the file is missing or damaged.
        """
        if not has_weights(variant):
            return {}
        try:
            return load_file(self._file(variant))
        except (OSError, SafetensorError) as error:
            raise PuzzleError(
                f"{self._file(variant)}: cannot be read ({error}); `puzzle library` makes it anew"
            ) from None

    def write_index(self, variants: list[SubblockVariant]) -> None:
        """Write `index.parquet`: one row a stored variant."""
        rows = [
            {"layer": v.layer, "subblock": v.subblock, "variant": v.name, **asdict(record)}
            for v in variants
            if has_weights(v) and (record := self.record(v))
        ]
        with atomic(self.folder / "index.parquet") as temporary:
            pd.DataFrame(rows).to_parquet(temporary, index=False)
