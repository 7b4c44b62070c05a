# SPDX-License-Identifier: Apache-2.0
"""Llama 2, 3.x and every checkpoint of `model_type: llama` (SmolLM2, TinyLlama, ...)."""

from transformers import PretrainedConfig

from puzzle.architecture import ModelShape
from puzzle.families.base import Family, settings_of, shape_of


def shape(config: PretrainedConfig) -> ModelShape:
    """Of a child as well, whose config may say `qkv_bias` where q, k and v alone have biases."""
    return shape_of(
        config,
        attention_bias=getattr(config, "qkv_bias", config.attention_bias),
        attention_output_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


FAMILY = Family("llama", shape, settings_of)
