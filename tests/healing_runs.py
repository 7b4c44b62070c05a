# SPDX-License-Identifier: Apache-2.0
"""Healing of the tiny child of tests/healing/conftest.py, and what it leaves on disk."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from puzzle.config import HealingConfig
from puzzle.healing.gkd import heal

BATCH, SEQ = 4, 16
CONFIG = HealingConfig(tokens=30 * BATCH * SEQ, batch_tokens=BATCH * SEQ, learning_rate=1e-2, warmup=0.1)
POINTS = [0, 8, 15, 23, 30]  # CONFIG's 30 steps judged 4 times, and before the first


def run(models, tokens, root: Path, config: HealingConfig = CONFIG, child: str = "child", **changes) -> Path:
    settings = {"seed": 0, "compute_dtype": "float32", "device": "cpu", "state": root / "state", **changes}
    heal(models["parent"], models[child], root / "out", tokens["training"], tokens["held_out"], config, **settings)
    return root / "out"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def curve(root: Path) -> list[dict]:
    return json.loads((root / "state" / "curve.json").read_text())


def same_files(one: Path, two: Path) -> bool:
    files = [{p.relative_to(f): p.read_bytes() for p in f.rglob("*") if p.is_file()} for f in (one, two)]
    return files[0] == files[1]


class Stop(Exception):
    pass


def stop_at(step: int):
    def progress(what: str, done: int, total: int) -> None:
        if done == step:
            raise Stop

    return progress
