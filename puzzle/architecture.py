# SPDX-License-Identifier: Apache-2.0
"""Plain data that every room speaks: shapes, variants, architectures. No torch."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Subblock = Literal["attention", "ffn"]
SUBBLOCKS: tuple[Subblock, Subblock] = ("attention", "ffn")
PARENT = "parent"


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a parent that variants, costs and plans are computed from."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    extra_attention_params: int = 0  # per layer, e.g. the q and k norms of Qwen3


@dataclass(frozen=True)
class AttentionConfig:
    """One attention subblock: `num_kv_heads` unless it is linear or a no-op."""

    num_kv_heads: int | None = None
    window: int | None = None
    sink_tokens: int | None = None
    linear: bool = False
    no_op: bool = False

    @property
    def name(self) -> str:
        """Its variant's name, `kv2` also where the parent itself has two KV heads."""
        return "no_op" if self.no_op else "linear" if self.linear else f"kv{self.num_kv_heads}"


@dataclass(frozen=True)
class FFNConfig:
    """One FFN subblock: `intermediate_size` unless it is linear or a no-op."""

    intermediate_size: int | None = None
    linear: bool = False
    no_op: bool = False

    @property
    def name(self) -> str:
        """Its variant's name, `ffn768` also where that is the parent's own width."""
        return "no_op" if self.no_op else "linear" if self.linear else f"ffn{self.intermediate_size}"


SubblockConfig = AttentionConfig | FFNConfig


@dataclass(frozen=True)
class BlockConfig:
    """One layer of a child."""

    attention: AttentionConfig
    ffn: FFNConfig


@dataclass(frozen=True, order=True)
class SubblockVariant:
    """One candidate for one place. `key` names its file, its table rows and its seed."""

    layer: int
    subblock: Subblock
    name: str

    @property
    def key(self) -> str:
        return f"{self.layer}.{self.subblock}.{self.name}"

    @classmethod
    def from_key(cls, key: str) -> "SubblockVariant":
        layer, subblock, name = key.split(".", 2)
        if subblock not in SUBBLOCKS:
            raise ValueError(f"{key!r} is not a variant key such as '12.ffn.ffn768'")
        return cls(int(layer), subblock, name)


@dataclass(frozen=True)
class Architecture:
    """One variant name per subblock per layer."""

    attention: tuple[str, ...]
    ffn: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.attention) != len(self.ffn):
            raise ValueError(f"{len(self.attention)} attention but {len(self.ffn)} ffn variants")

    @classmethod
    def parent(cls, num_layers: int) -> "Architecture":
        return cls((PARENT,) * num_layers, (PARENT,) * num_layers)

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    def name(self, layer: int, subblock: Subblock) -> str:
        return (self.attention if subblock == "attention" else self.ffn)[layer]

    @property
    def variants(self) -> Iterator[SubblockVariant]:
        """All chosen variants, in the order a forward pass meets them."""
        for layer in range(self.num_layers):
            for subblock in SUBBLOCKS:
                yield SubblockVariant(layer, subblock, self.name(layer, subblock))

    @property
    def changes(self) -> list[SubblockVariant]:
        """The chosen variants that are not the parent's."""
        return [v for v in self.variants if v.name != PARENT]

    def with_variant(self, variant: SubblockVariant) -> "Architecture":
        names = list(self.attention if variant.subblock == "attention" else self.ffn)
        names[variant.layer] = variant.name
        return replace(self, **{variant.subblock: tuple(names)})

    def distance(self, other: "Architecture") -> int:
        """The number of subblocks in which two architectures differ."""
        return sum(a != b for a, b in zip(self.variants, other.variants, strict=True))

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.to_json())

    def to_json(self) -> dict[str, list[str]]:
        return {"attention": list(self.attention), "ffn": list(self.ffn)}

    @classmethod
    def from_json(cls, data: dict[str, list[str]]) -> "Architecture":
        return cls(tuple(data["attention"]), tuple(data["ffn"]))


def fingerprint(value: Any) -> str:
    """Return the sha256 of a value's canonical JSON, as 64 hex digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def plain(value: Any) -> dict[str, Any]:
    """A dataclass as JSON-ready data, without the fields that are `None` or `False`."""
    return {k: v for k, v in asdict(value).items() if v is not None and v is not False}


def subblock_params(config: SubblockConfig, shape: ModelShape) -> int:
    """Parameters of one subblock with its norm; a no-op has none."""
    hidden = shape.hidden_size
    if config.no_op:
        return 0
    if config.linear:
        return hidden * hidden + hidden
    if isinstance(config, FFNConfig):
        assert config.intermediate_size is not None
        width = config.intermediate_size
        return 3 * hidden * width + (2 * width + hidden) * shape.mlp_bias + hidden
    assert config.num_kv_heads is not None
    query, kv = shape.num_heads * shape.head_dim, config.num_kv_heads * shape.head_dim
    weights = hidden * (query + 2 * kv) + query * hidden
    biases = (query + 2 * kv) * shape.attention_bias + hidden * shape.attention_output_bias
    return weights + biases + shape.extra_attention_params + hidden


def kv_values_per_token(config: SubblockConfig, shape: ModelShape) -> int:
    """Numbers the KV cache holds per token of one sequence, keys and values both."""
    if isinstance(config, FFNConfig) or config.linear or config.no_op:
        return 0
    assert config.num_kv_heads is not None
    return 2 * config.num_kv_heads * shape.head_dim


def outer_params(shape: ModelShape) -> int:
    """Parameters outside the layers: embedding, head (once where tied), final norm."""
    embedding = shape.vocab_size * shape.hidden_size
    return embedding * (1 if shape.tied_embeddings else 2) + shape.hidden_size
