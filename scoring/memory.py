# SPDX-License-Identifier: Apache-2.0
"""Exact sizes of variants, from their configs alone."""

from puzzle.architecture import (
    ModelShape,
    Subblock,
    kv_values_per_token,
    outer_params,
    subblock_params,
)
from puzzle.devices import BYTES
from puzzle.variants import subblock_config


def subblock_sizes(name: str, subblock: Subblock, shape: ModelShape, dtype: str) -> dict[str, int]:
    """Parameters, weight bytes and KV-cache bytes per token of one sequence, of one variant."""
    config = subblock_config(name, subblock, shape)
    params = subblock_params(config, shape)
    kv_bytes = kv_values_per_token(config, shape) * BYTES[dtype]
    return {"params": params, "weight_bytes": params * BYTES[dtype], "kv_bytes_per_token": kv_bytes}


def constant_sizes(shape: ModelShape, dtype: str) -> dict[str, int]:
    """The same for what lies outside the layers; tied embeddings count once."""
    params = outer_params(shape)
    return {"params": params, "weight_bytes": params * BYTES[dtype], "kv_bytes_per_token": 0}
