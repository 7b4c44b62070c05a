# SPDX-License-Identifier: Apache-2.0
"""Qwen2, Qwen2.5 and others of `model_type: qwen2`: Llama's layers with biases on q, k and v alone."""

from typing import Any

from transformers import PretrainedConfig

from puzzle.architecture import ModelShape
from puzzle.families.base import Family, settings_of, shape_of, window_complaint


def shape(config: PretrainedConfig) -> ModelShape:
    return shape_of(config, attention_bias=True)


def child_settings(config: PretrainedConfig) -> dict[str, Any]:
    """`qkv_bias` beside `attention_bias: false` is what vLLM reads for biases on q, k and v alone."""
    dropped = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "mlp_bias")
    return settings_of(config, *dropped) | {"attention_bias": False, "qkv_bias": True}


def refuses(config: PretrainedConfig) -> str | None:
    return window_complaint(config) if "sliding_attention" in config.layer_types else None


FAMILY = Family("qwen2", shape, child_settings, refuses)
