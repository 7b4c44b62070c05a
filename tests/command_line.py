# SPDX-License-Identifier: Apache-2.0
"""The command line in a process of its own, and settings that make a run small."""

import os
import subprocess
import sys
from pathlib import Path


def puzzle(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Run the command line as a user does."""
    command = [sys.executable, "-m", "puzzle", *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200", **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=600)


SMALL = [
    f"--set={pair}"
    for pair in (
        "data.seq_length=64",
        "data.calibration_tokens=2048",
        "data.training_tokens=8192",
        "data.scoring_tokens=1024",
        "data.validation_tokens=2048",
        "library.bld.tokens=4096",
        "healing.tokens=16384",
        "healing.learning_rate=0.0003",
        "measure.repeats=3",
        "search.compare_tokens=512",
        "machine.threads=1",
        "sample_prompt=The",
    )
]
