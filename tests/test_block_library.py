# SPDX-License-Identifier: Apache-2.0
"""The block library on disk: files are the truth, the index follows, damage is seen."""

from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from puzzle.architecture import PARENT, SubblockVariant
from puzzle.block_library import BlockLibrary, VariantRecord, has_weights
from puzzle.errors import PuzzleError

RECORD = VariantRecord("fingerprint", "ffn_width", 0.5, 0.25, 0.125, 64, "distilled")
NARROW, LINEAR = SubblockVariant(3, "ffn", "ffn24"), SubblockVariant(0, "attention", "linear")
STATE = {"mlp.up_proj.weight": torch.arange(12.0).reshape(4, 3), "mlp.down_proj.weight": torch.ones(3, 4).bfloat16()}


def test_weights_and_record_round_trip(tmp_path: Path) -> None:
    library = BlockLibrary(tmp_path / "library")
    assert library.record(NARROW) is None
    library.save(NARROW, {**STATE, "mlp.gate_proj.weight": torch.arange(12.0).reshape(3, 4).T}, RECORD)
    assert [p.name for p in (tmp_path / "library").iterdir()] == ["3.ffn.ffn24.safetensors"]
    assert library.record(NARROW) == RECORD
    found = library.load(NARROW)
    assert set(found) == {*STATE, "mlp.gate_proj.weight"}
    for name, tensor in STATE.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype


def test_what_needs_no_file(tmp_path: Path) -> None:
    for name in (PARENT, "no_op"):
        variant = SubblockVariant(0, "ffn", name)
        assert not has_weights(variant)
        assert BlockLibrary(tmp_path).load(variant) == {}


@pytest.mark.parametrize("damage", ["absent", "truncated", "empty", "no record", "other record"])
def test_damaged_files_have_no_record(damage: str, tmp_path: Path) -> None:
    library, file = BlockLibrary(tmp_path), tmp_path / f"{NARROW.key}.safetensors"
    library.save(NARROW, STATE, RECORD)
    if damage == "absent":
        file.unlink()
    elif damage in ("truncated", "empty"):
        file.write_bytes(file.read_bytes()[:-10] if damage == "truncated" else b"")
    else:
        save_file(STATE, file, {"record": '{"kind": 1}'} if damage == "other record" else None)
    assert library.record(NARROW) is None
    if damage in ("absent", "truncated", "empty"):
        with pytest.raises(PuzzleError, match=r"3.ffn.ffn24.safetensors: cannot be read .*`puzzle library`") as caught:
            library.load(NARROW)
        assert "\n" not in str(caught.value)


def test_the_index_is_made_from_the_files(tmp_path: Path) -> None:
    library = BlockLibrary(tmp_path)
    library.save(NARROW, STATE, RECORD)
    missing, free = SubblockVariant(1, "ffn", "ffn24"), SubblockVariant(0, "ffn", "no_op")
    library.save(LINEAR, {"self_attn.linear_attn.weight": torch.eye(3)}, RECORD)
    library.write_index([LINEAR, free, missing, NARROW])
    rows = pd.read_parquet(tmp_path / "index.parquet").to_dict("records")
    assert rows == [
        {"layer": v.layer, "subblock": v.subblock, "variant": v.name, **asdict(RECORD)} for v in (LINEAR, NARROW)
    ]
