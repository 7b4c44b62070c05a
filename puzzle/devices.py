# SPDX-License-Identifier: Apache-2.0
"""Where and in which arithmetic work is done, and seeds that depend on what is computed, not on the order."""

import hashlib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from puzzle.errors import ConfigError, UnsupportedError, reason

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def resolve_device(name: str) -> str:
    """`auto` becomes the first GPU, else the CPU.

    Raises:
        ConfigError: the device does not exist here.
        UnsupportedError: the device has no float64, which the closed forms need.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("mps"):
        raise UnsupportedError("device 'mps' has no float64, which the closed forms need; use cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used here: {reason(error)}") from None
    return name


def resolve_dtype(name: str, device: str) -> str:
    """`auto` becomes bfloat16 where the hardware computes in it, else float32."""
    if name != "auto":
        return name
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if device == "cpu" and _cpu_has_bf16() else "float32"


def _cpu_has_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def set_threads(threads: int | None) -> None:
    """Use so many CPU threads; None leaves torch's own choice: all cores this process may use, or OMP_NUM_THREADS."""
    if threads is not None:
        torch.set_num_threads(threads)


def autocast(device: str, dtype: str) -> AbstractContextManager:
    """Mixed precision for training; judging never uses it."""
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.split(":")[0], getattr(torch, dtype))


def generator(seed: int, key: str) -> torch.Generator:
    """A random stream that depends on the run's seed and on what it is for, on nothing else."""
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
