# SPDX-License-Identifier: Apache-2.0
"""A finished run, fresh for each test."""

from pathlib import Path

import pytest
from report_runs import write_run

from puzzle.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return write_run(tmp_path / "run")
