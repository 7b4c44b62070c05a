# SPDX-License-Identifier: Apache-2.0
"""What `puzzle doctor` finds, and what it says of what is not there."""

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
from command_line import puzzle

from puzzle import doctor


def found(folder: Path) -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in doctor.examine(folder)}


def test_all_is_well_where_the_tests_run(tmp_path: Path) -> None:
    findings = found(tmp_path)
    assert findings["torch"].detail == torch.__version__
    assert {f.what for f in findings.values() if f.state == "missing"} == set()
    assert findings["cpu"].detail.endswith(("computes in float32", "computes in bfloat16"))
    result = puzzle("doctor", "--json")
    assert result.returncode == 0
    assert {f["what"] for f in json.loads(result.stdout)} == set(findings)


def test_a_missing_package_is_named_with_its_requirement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = metadata.version

    def version(name: str) -> str:
        if name == "plotly":
            raise metadata.PackageNotFoundError
        return there(name)

    monkeypatch.setattr(metadata, "version", version)
    assert found(tmp_path)["plotly"] == doctor.Finding("plotly", "missing", "pip install 'plotly>=6'")


def test_what_puzzle_can_do_without_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXTRAS", {"no_such_package": "nothing"})
    assert found(tmp_path)["no_such_package"] == doctor.Finding("no_such_package", "absent", "for nothing")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    disk = found(tmp_path / "nowhere")["disk"]
    assert disk.state == "missing" and str(tmp_path / "nowhere") in disk.detail


def test_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ROOM", 2**60)
    assert found(tmp_path)["disk"].state == "low"
