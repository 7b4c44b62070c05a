# SPDX-License-Identifier: Apache-2.0
"""Devices, arithmetic and random streams."""

from pathlib import Path

import pytest
import torch

from puzzle import devices
from puzzle.devices import autocast, generator, resolve_device, resolve_dtype, set_threads
from puzzle.errors import ConfigError, did_you_mean, reason


def test_devices_that_exist() -> None:
    assert resolve_device("cpu") == "cpu"
    assert resolve_device(resolve_device("auto")) == resolve_device("auto")


@pytest.mark.parametrize("name", ["cuda:99", "gpu", "", "cpu:x"])
def test_devices_that_do_not_exist(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^device '{name}' cannot be used here: ") as caught:
        resolve_device(name)
    assert "\n" not in str(caught.value)


def test_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("float32", "bfloat16", "float16"):
        assert resolve_dtype(name, "cpu") == name
    for flags, wanted in (("fpu avx512_bf16 sse", "bfloat16"), ("amx_bf16", "bfloat16"), ("avx2 sse", "float32")):
        monkeypatch.setattr(Path, "read_text", lambda self, flags=flags: f"processor: 0\nflags\t\t: {flags}\n")
        assert resolve_dtype("auto", "cpu") == wanted
    monkeypatch.setattr(devices, "_cpu_has_bf16", lambda: True)
    assert resolve_dtype("auto", "mps") == "float32"


def test_autocast() -> None:
    weight = torch.ones(4, 4)
    with autocast("cpu", "float32"):
        assert (weight @ weight).dtype == torch.float32
    with autocast("cpu", "bfloat16"):
        assert (weight @ weight).dtype == torch.bfloat16


def test_threads() -> None:
    before = torch.get_num_threads()
    try:
        set_threads(2)
        assert torch.get_num_threads() == 2
        set_threads(None)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_streams_depend_on_seed_and_key_alone() -> None:
    def draw(seed: int, key: str) -> list[int]:
        return torch.randint(1 << 30, (4,), generator=generator(seed, key)).tolist()

    first = draw(0, "3.ffn.ffn24")
    torch.manual_seed(1)
    torch.rand(10)
    assert draw(0, "3.ffn.ffn24") == first
    others = [draw(1, "3.ffn.ffn24"), draw(0, "3.ffn.ffn25"), draw(0, "")]
    assert len({tuple(x) for x in (first, *others)}) == 4


def test_words_of_errors() -> None:
    assert did_you_mean("latncy", ["latency", "memory"]) == "; did you mean 'latency'?"
    assert did_you_mean("zzz", ["latency", "memory"]) == ""
    assert reason(ValueError("one\n  two")) == "one two"
    assert reason(ValueError()) == "ValueError"
    assert len(reason(ValueError("x" * 1_000))) == 200
