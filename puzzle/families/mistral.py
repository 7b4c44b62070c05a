# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B and others of `model_type: mistral`: Llama's layers without biases; the first release had a window."""

from typing import Any

from transformers import PretrainedConfig

from puzzle.families.base import Family, settings_of, shape_of, window_complaint


def child_settings(config: PretrainedConfig) -> dict[str, Any]:
    return settings_of(config, "sliding_window", "attention_bias", "mlp_bias")


FAMILY = Family("mistral", shape_of, child_settings, window_complaint)
