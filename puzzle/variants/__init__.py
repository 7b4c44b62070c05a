# SPDX-License-Identifier: Apache-2.0
"""The kinds of variants, one file each, and how a search space becomes candidates for a parent."""

import math
from itertools import groupby
from typing import Any

from puzzle.architecture import (
    PARENT,
    SUBBLOCKS,
    Architecture,
    AttentionConfig,
    BlockConfig,
    FFNConfig,
    ModelShape,
    Subblock,
    SubblockConfig,
    SubblockVariant,
    kv_values_per_token,
    subblock_params,
)
from puzzle.config import SearchSpace
from puzzle.errors import ConfigError, did_you_mean
from puzzle.variants.base import VariantKind
from puzzle.variants.ffn_width import FFNWidth
from puzzle.variants.grouped_query import GroupedQuery
from puzzle.variants.linear import Linear
from puzzle.variants.no_op import NoOp

KINDS: dict[str, VariantKind] = {
    "grouped_query": GroupedQuery(),
    "ffn_width": FFNWidth(),
    "linear": Linear(),
    "no_op": NoOp(),
}


def kind_of(name: str, subblock: Subblock) -> VariantKind:
    """The kind a variant's name belongs to (not for `parent`).

    Raises:
        ConfigError: no kind has such a name.
    """
    for kind in KINDS.values():
        if subblock in kind.subblocks and kind.config(name, subblock) is not None:
            return kind
    raise ConfigError(f"there is no {subblock} variant {name!r}")


def subblock_config(name: str, subblock: Subblock, shape: ModelShape) -> SubblockConfig:
    """The config of a variant's name in a child of this parent."""
    if name == PARENT:
        parent: SubblockConfig = FFNConfig(intermediate_size=shape.intermediate_size)
        return AttentionConfig(num_kv_heads=shape.num_kv_heads) if subblock == "attention" else parent
    config = kind_of(name, subblock).config(name, subblock)
    assert config is not None
    return config


def block_configs(architecture: Architecture, shape: ModelShape) -> list[BlockConfig]:
    """The child's layers."""
    pairs = zip(architecture.attention, architecture.ffn, strict=True)
    return [
        BlockConfig(subblock_config(a, "attention", shape), subblock_config(f, "ffn", shape))  # type: ignore[arg-type]
        for a, f in pairs
    ]


def expand(space: SearchSpace, shape: ModelShape) -> list[SubblockVariant]:
    """Every candidate of a search space for a parent, `parent` included, in the order of layers.

    Raises:
        ConfigError: an entry is unknown or does not fit the parent, or a rule names a layer it does not have.
    """
    allowed: dict[tuple[int, Subblock], list[str]] = {}
    for subblock in SUBBLOCKS:
        names = _names(getattr(space, subblock), subblock, shape, space, f"search_space.{subblock}")
        allowed.update({(layer, subblock): names for layer in range(shape.num_layers)})
    for i, rule in enumerate(space.rules):
        outside = [layer for layer in rule.layers if not 0 <= layer < shape.num_layers]
        if outside:
            raise ConfigError(
                f"search_space.rules.{i}.layers: there is no layer {outside[0]}; "
                f"the parent has layers 0 to {shape.num_layers - 1}"
            )
        for subblock in SUBBLOCKS:
            entries = getattr(rule, subblock)
            if entries is not None:
                names = _names(entries, subblock, shape, space, f"search_space.rules.{i}.{subblock}")
                allowed.update({(layer, subblock): names for layer in rule.layers})
    if space.serve_with == "vllm":  # its first layer needs attention: the residual stream starts there
        allowed[0, "attention"] = [n for n in allowed[0, "attention"] if n != "no_op"]
    return [SubblockVariant(layer, subblock, n) for (layer, subblock), names in sorted(allowed.items()) for n in names]


def _names(entries: list[str], subblock: Subblock, shape: ModelShape, space: SearchSpace, where: str) -> list[str]:
    """Canonical names of a list of entries, the parent first, without doubles and what the runtime cannot load."""
    names = [PARENT]
    for i, entry in enumerate(entries):
        try:
            name, kind = _expand_entry(entry, subblock, shape, space.multiple_of)
        except ConfigError as error:
            raise ConfigError(f"{where}.{i}: {error}") from None
        if name not in names and (kind is None or space.serve_with in kind.runtimes):
            names.append(name)
    return names


def _expand_entry(
    entry: str, subblock: Subblock, shape: ModelShape, multiple_of: int
) -> tuple[str, VariantKind | None]:
    if entry == PARENT:
        return PARENT, None
    for kind in KINDS.values():
        if subblock in kind.subblocks and (name := kind.expand(entry, shape, multiple_of)):
            return name, kind
    examples = {"attention": ["parent", "kv2", "kv/4", "linear", "no_op"], "ffn": ["parent", "50%", "linear", "no_op"]}
    known = examples[subblock]
    raise ConfigError(f"unknown {subblock} variant {entry!r}{did_you_mean(entry, known)} (known: {', '.join(known)})")


def listing(variants: list[SubblockVariant], shape: ModelShape, itemsize: int) -> list[dict[str, Any]]:
    """What `puzzle search-space show` shows: neighbouring layers of equal choice together.

    Args:
        variants: the candidates.
        shape: of the parent.
        itemsize: bytes per number of the KV cache.

    Returns:
        Rows of `layers` ("0-29"), `subblock`, `variant`, `params`, `kv_bytes_per_token`.
    """
    names: dict[int, dict[Subblock, list[str]]] = {}
    for v in variants:
        names.setdefault(v.layer, {s: [] for s in SUBBLOCKS})[v.subblock].append(v.name)
    rows = []
    for _, run in groupby(names.items(), key=lambda item: item[1]):
        layers = [(layer, allowed) for layer, allowed in run]
        first, last = layers[0][0], layers[-1][0]
        for subblock, allowed in layers[0][1].items():
            for name in allowed:
                config = subblock_config(name, subblock, shape)
                rows.append(
                    {
                        "layers": str(first) if first == last else f"{first}-{last}",
                        "subblock": subblock,
                        "variant": name,
                        "params": subblock_params(config, shape),
                        "kv_bytes_per_token": kv_values_per_token(config, shape) * itemsize,
                    }
                )
    return rows


def size(variants: list[SubblockVariant]) -> float:
    """The base-10 logarithm of the number of architectures that these candidates make."""
    counts: dict[tuple[int, Subblock], int] = {}
    for v in variants:
        counts[v.layer, v.subblock] = counts.get((v.layer, v.subblock), 0) + 1
    return sum(math.log10(c) for c in counts.values())
