# SPDX-License-Identifier: Apache-2.0
"""What a plan needs of a parent: its shape and the dtype of its weights, from its config alone."""

from dataclasses import dataclass
from pathlib import Path

from puzzle.architecture import ModelShape
from puzzle.checkpoint import config_errors, read_config
from puzzle.devices import BYTES
from puzzle.errors import ConfigError, UnsupportedError, did_you_mean, reason
from puzzle.modeling import DeciLMConfig

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class PlannedParent:
    """A parent without its weights."""

    name: str
    shape: ModelShape
    dtype: str  # of the weights on disk, as the config has it; float32 where it has none


def names() -> list[str]:
    """The configs that come with Puzzle."""
    return sorted(folder.name for folder in CONFIGS.iterdir() if folder.is_dir())


def read(name: str) -> PlannedParent:
    """A parent by its folder (a config.json is enough), the name of a shipped config, or its hub name.

    Raises:
        ConfigError: there is no such config, or no model can be made from it.
        UnsupportedError: it is a child already, or of a family that Puzzle does not handle.
    """
    folder = _folder(name)
    family, config = read_config(folder)
    if isinstance(config, DeciLMConfig):
        raise UnsupportedError(f"{name}: is a child already; give its parent with another target instead")
    with config_errors(folder):
        shape = family.shape(config)
        _check(shape)
    dtype = str(config.dtype).removeprefix("torch.")
    return PlannedParent(name, shape, dtype if dtype in BYTES else "float32")


def _folder(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name in names():
        return CONFIGS / name
    if name.startswith((".", "/", "~")) or name.count("/") != 1:  # no hub name
        hint = did_you_mean(name, names())
        raise ConfigError(f"{name}: neither a folder nor a shipped config{hint} (shipped: {', '.join(names())})")
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, "config.json")).parent
    except Exception as error:  # the hub library has a dozen classes for "not there" and "not reachable"
        raise ConfigError(f"{name}: no such folder, and the hub does not give its config ({reason(error)})") from None


def _check(shape: ModelShape) -> None:
    """Raise ValueError for sizes that make no Llama; where there are weights, the checkpoint would say so."""
    for field in (
        "num_layers",
        "hidden_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
    ):
        value = getattr(shape, field)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{field} is {value!r}")
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"{shape.num_heads} heads are no multiple of {shape.num_kv_heads} KV heads")
