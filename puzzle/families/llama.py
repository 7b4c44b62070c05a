# SPDX-License-Identifier: Apache-2.0
"""Llama 2, 3.x and every checkpoint of `model_type: llama` (SmolLM2, TinyLlama, ...)."""

from typing import Any

from transformers import PretrainedConfig

from puzzle.architecture import ModelShape
from puzzle.families.base import Family


def shape(config: PretrainedConfig) -> ModelShape:
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        tied_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
        attention_output_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


def child_settings(config: PretrainedConfig) -> dict[str, Any]:
    dropped = ("model_type", "architectures", "_name_or_path", "transformers_version", "quantization_config")
    return {k: v for k, v in config.to_dict().items() if k not in dropped}


FAMILY = Family("llama", shape, child_settings)
