# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face checkpoint read one layer at a time, and one written shard by shard.

Weights stay in the memory-mapped files until a layer is asked for.
"""

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from puzzle.architecture import (
    AttentionConfig,
    BlockConfig,
    FFNConfig,
    ModelShape,
    Subblock,
    SubblockConfig,
    plain,
)
from puzzle.errors import ConfigError, PuzzleError, UnsupportedError, reason
from puzzle.families import LLAMA, family_of
from puzzle.families.base import Family
from puzzle.modeling import DeciLMConfig, DeciLMDecoderLayer, DeciLMForCausalLM

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them


def find(name: str) -> Path:
    """The folder of a checkpoint: a local path, or a hub name, fetched once into the hub's cache.

    Raises:
        ConfigError: neither a folder here nor a model the hub gives.
    """
    path = Path(name).expanduser()
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        if not path.is_dir():
            raise ConfigError(f"{name}: no checkpoint folder there")
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    except Exception as error:  # the hub library has a dozen classes for "not there" and "not reachable"
        raise ConfigError(f"{name}: no such folder, and the hub does not give it ({reason(error)})") from None


@contextmanager
def config_errors(path: Path) -> Iterator[None]:
    """Turn what a config without sense raises into one sentence; transformers and torch have many classes for that."""
    try:
        yield
    except PuzzleError:
        raise
    except Exception as error:
        raise ConfigError(f"{path / 'config.json'}: no model can be made from it ({reason(error)})") from None


def read_config(path: Path) -> tuple[Family, PretrainedConfig]:
    """The family and config of a checkpoint's folder, which needs no weights for that.

    Raises:
        ConfigError: there is no config, or no model can be made from it.
        UnsupportedError: the model is of a family that Puzzle does not handle.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path}: not a checkpoint (it has no config.json)")
    with config_errors(path):
        kind = json.loads(file.read_text(encoding="utf-8")).get("model_type")
        child = kind == DeciLMConfig.model_type
        family = LLAMA if child else family_of(kind, path)
        config = (DeciLMConfig if child else AutoConfig).from_pretrained(path)
        if complaint := family.refuses(config):
            raise UnsupportedError(f"{path}: {complaint}")
    return family, config


class Checkpoint:
    """A parent or child on disk.

    Raises:
        ConfigError: the folder is not a whole checkpoint; says which file or tensor is wrong.
        UnsupportedError: the model is of a family that Puzzle does not handle.
    """

    def __init__(self, path: Path):
        self.path = path
        self.family, self.config = read_config(path)
        with config_errors(path):
            self.shape: ModelShape = self.family.shape(self.config)
            wanted = self._shapes()
        self._files = self._locate()
        self._check(wanted)
        self._keep(wanted)

    def _locate(self) -> dict[str, Path]:
        """Tensor name -> file."""
        index, single = self.path / "model.safetensors.index.json", self.path / "model.safetensors"
        try:
            if index.is_file():
                names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                outside = [f for f in names.values() if Path(f).name != f]
                if outside:
                    raise ConfigError(f"{index}: the shard {outside[0]!r} lies outside the checkpoint")
                return {name: self.path / file for name, file in names.items()}
            if single.is_file():
                with safe_open(single, "pt") as file:
                    return dict.fromkeys(file.keys(), single)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self.path}: the weights cannot be read ({reason(error)})") from None
        raise ConfigError(f"{self.path}: no model.safetensors here (pickled weights are not read)")

    def _shapes(self) -> dict[str, list[int]]:
        """The names and shapes of the weights as the config has them."""
        with torch.device("meta"):
            model = DeciLMForCausalLM(self.child_config)
        shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        if self.shape.tied_embeddings:
            del shapes[HEAD]
        return shapes

    def _check(self, wanted: dict[str, list[int]]) -> None:
        """Compare names, shapes and dtypes in the files' headers with what the config says, before any work."""
        for name, shape in wanted.items():
            if name not in self._files:
                raise ConfigError(f"{self.path}: the tensor {name!r} is missing")
            header = self._slice(name)
            if (dtype := header.get_dtype()) not in DTYPES:
                raise UnsupportedError(f"{self.path}: the tensor {name!r} is {dtype}; quantised weights are not read")
            if (found := header.get_shape()) != shape:
                raise ConfigError(f"{self.path}: the tensor {name!r} has shape {found}, the config says {shape}")

    def _keep(self, wanted: Iterable[str]) -> None:
        """Forget old rotary tables and a head that repeats the embedding; refuse other tensors the config has not."""
        for name in sorted(self._files.keys() - wanted):
            if name.startswith("model.layers.") and not name.endswith(".inv_freq"):
                raise ConfigError(f"{self.path}: the tensor {name!r} has no place in the config's model")
            if name == HEAD and not torch.equal(self.tensor(HEAD), self.tensor(EMBEDDING)):
                raise ConfigError(f"{self.path}: the config ties {HEAD!r} to {EMBEDDING!r}, but their values differ")
        self._files = {name: self._files[name] for name in wanted}

    @cached_property
    def _open(self) -> dict[Path, Any]:
        try:
            return {file: safe_open(file, "pt") for file in sorted(set(self._files.values()))}
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{self.path}: the weights cannot be read ({reason(error)})") from None

    def _slice(self, name: str) -> Any:
        try:
            return self._open[self._files[name]].get_slice(name)
        except SafetensorError as error:
            raise ConfigError(f"{self._files[name]}: the tensor {name!r} cannot be read ({reason(error)})") from None

    def tensor(self, name: str) -> Tensor:
        """One tensor, in the file's dtype."""
        return self._open[self._files[name]].get_tensor(name)

    def layer_state(self, layer: int) -> dict[str, Tensor]:
        """The tensors of one layer by their names within it, such as `mlp.up_proj.weight`."""
        prefix = f"model.layers.{layer}."
        return {name.removeprefix(prefix): self.tensor(name) for name in self._files if name.startswith(prefix)}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights on disk."""
        return self.tensor(NORM).dtype

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the config, of the weight files' headers and sizes, and of the first and last MiB of each file."""
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for file in sorted(set(self._files.values())):
            size = file.stat().st_size
            with file.open("rb") as handle:
                header = int.from_bytes(handle.read(8), "little")
                digest.update(f"{file.name} {size}".encode() + handle.read(header + (1 << 20)))
                handle.seek(max(0, size - (1 << 20)))
                digest.update(handle.read())
        return digest.hexdigest()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer.

        Raises:
            ConfigError: there is none, it has no vocabulary, or it knows more tokens than the model.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path)
        except Exception as error:  # transformers raises many classes here
            raise ConfigError(f"{self.path}: the tokenizer cannot be loaded ({reason(error)})") from None
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers 5.0 makes one of nothing but these
            raise ConfigError(f"{self.path}: the tokenizer cannot be loaded (it has no vocabulary)")
        if len(tokenizer) > self.shape.vocab_size:
            raise ConfigError(
                f"{self.path}: the tokenizer has {len(tokenizer)} tokens, the model {self.shape.vocab_size}"
            )
        return tokenizer

    @cached_property
    def child_config(self) -> DeciLMConfig:
        """The config in the child's format, all layers as they are."""
        if isinstance(self.config, DeciLMConfig):
            return self.config
        return self.child_config_with([self.parent_block] * self.shape.num_layers)

    def child_config_with(self, blocks: list[BlockConfig]) -> DeciLMConfig:
        """The config of a child of this parent."""
        entries = [block_entry(block, self.shape.num_heads) for block in blocks]
        return DeciLMConfig(**self.family.child_settings(self.config), block_configs=entries)

    @property
    def parent_block(self) -> BlockConfig:
        shape = self.shape
        return BlockConfig(AttentionConfig(shape.num_kv_heads), FFNConfig(shape.intermediate_size))

    @property
    def blocks(self) -> list[BlockConfig]:
        """What each layer is made of."""
        return [read_entry(entry, self.shape) for entry in self.child_config.block_configs]

    def _empty_layer(self, layer: int) -> DeciLMDecoderLayer:
        return DeciLMDecoderLayer(with_sdpa(self.child_config), layer, 0)

    def layer(self, layer: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> DeciLMDecoderLayer:
        """One layer with its weights, frozen."""
        with torch.device("meta"):
            module = self._empty_layer(layer)
        return load_frozen(module, self.layer_state(layer), device, dtype)

    def subblock(
        self, subblock: Subblock, config: SubblockConfig, state: Mapping[str, Tensor], device: str, dtype: torch.dtype
    ) -> nn.Module | None:
        """The module of a variant in a child of this parent, with its weights, without its norm; None for a no-op."""
        if config.no_op:
            return None
        parent = self.parent_block
        block = replace(parent, **{subblock: config})  # type: ignore[arg-type]
        single = copy.copy(with_sdpa(self.child_config))
        single.block_configs = [block_entry(block, self.shape.num_heads)]
        with torch.device("meta"):
            layer = DeciLMDecoderLayer(single, 0, 0)
        module, prefix = (layer.self_attn, "self_attn.") if subblock == "attention" else (layer.mlp, "mlp.")
        return load_frozen(module, {k.removeprefix(prefix): v for k, v in state.items()}, device, dtype)


def with_sdpa(config: DeciLMConfig) -> DeciLMConfig:
    config._attn_implementation = "sdpa"  # layers built alone miss what PreTrainedModel sets
    return config


def load_frozen(module: nn.Module, state: Mapping[str, Tensor], device: str, dtype: torch.dtype) -> Any:
    """Fill a module made on the meta device."""
    module.load_state_dict({k: v.to(device, dtype) for k, v in state.items()}, assign=True)
    return module.eval().requires_grad_(False)


def block_entry(block: BlockConfig, num_heads: int) -> dict[str, dict[str, Any]]:
    """An entry of the checkpoint's `block_configs`, in the words of the nemotron-nas format."""
    attention, ffn = plain(block.attention), plain(block.ffn)
    if "num_kv_heads" in attention:
        attention["n_heads_in_group"] = num_heads // attention.pop("num_kv_heads")
    words = {"linear": "replace_with_linear", "window": "window_length", "sink_tokens": "num_sink_tokens"}
    entry = {"attention": attention, "ffn": ffn}
    return {half: {words.get(key, key): value for key, value in part.items()} for half, part in entry.items()}


def read_entry(entry: dict[str, dict[str, Any]], shape: ModelShape) -> BlockConfig:
    """The reverse of `block_entry`."""
    attention, ffn = entry["attention"], entry["ffn"]
    linear, no_op = bool(attention.get("replace_with_linear")), bool(attention.get("no_op"))
    group = attention.get("n_heads_in_group")
    heads = shape.num_heads // group if group else None if linear or no_op else shape.num_kv_heads
    skipped = ffn.get("replace_with_linear") or ffn.get("no_op")
    width = ffn.get("intermediate_size") or (None if skipped else shape.intermediate_size)
    return BlockConfig(
        AttentionConfig(heads, attention.get("window_length"), attention.get("num_sink_tokens"), linear, no_op),
        FFNConfig(width, bool(ffn.get("replace_with_linear")), bool(ffn.get("no_op"))),
    )
