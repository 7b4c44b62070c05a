# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B and others of `model_type: mistral`: Llama's layers without biases; the first release had a window."""

from typing import Any

from transformers import PretrainedConfig

from puzzle.families import base


def child_settings(config: PretrainedConfig) -> dict[str, Any]:
    return base.settings(config, "sliding_window", "attention_bias", "mlp_bias")


FAMILY = base.Family("mistral", base.shape, child_settings, base.sliding_window)
