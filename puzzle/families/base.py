# SPDX-License-Identifier: Apache-2.0
"""What a parent family must tell: its shape and how its config becomes a child's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from puzzle.architecture import ModelShape


@dataclass(frozen=True)
class Family:
    """One family of parents whose layers carry Llama's tensor names."""

    model_type: str
    shape: Callable[[PretrainedConfig], ModelShape]
    child_settings: Callable[[PretrainedConfig], dict[str, Any]]  # the child's config without `block_configs`
    refuses: Callable[[PretrainedConfig], str | None] = lambda config: None  # what a child could not compute


def shape_of(config: PretrainedConfig, **biases: bool) -> ModelShape:
    """The shape as Llama-like configs name it; `biases` are those of ModelShape."""
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        tied_embeddings=config.tie_word_embeddings,
        **biases,
    )


def settings_of(config: PretrainedConfig, *dropped: str) -> dict[str, Any]:
    """A parent's config without what belongs to its own class, and without `dropped`."""
    own = ("model_type", "architectures", "_name_or_path", "transformers_version", "quantization_config")
    return {k: v for k, v in config.to_dict().items() if k not in (*own, *dropped)}


def window_complaint(config: PretrainedConfig) -> str | None:
    """The complaint about a window that is shorter than the texts the model is made for."""
    window = getattr(config, "sliding_window", None)
    if window is None or window >= config.max_position_embeddings:
        return None
    return f"its attention sees the last {window} tokens only, which a child cannot do"
