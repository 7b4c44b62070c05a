# SPDX-License-Identifier: Apache-2.0
"""What every family of parents must keep, over the registry: counts, logits and configs as transformers has them."""

from pathlib import Path

import pytest
import torch
from tiny_models import VARIATIONS
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from puzzle.architecture import (
    AttentionConfig,
    FFNConfig,
    ModelShape,
    kv_values_per_token,
    outer_params,
    subblock_params,
)
from puzzle.checkpoint import Checkpoint
from puzzle.errors import UnsupportedError
from puzzle.families import FAMILIES, family_of
from puzzle.modeling import DeciLMConfig, DeciLMForCausalLM

TINY = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": VARIATIONS["llama3_rope"]["rope_parameters"],
}
PUBLISHED = {  # config, parameters, KV-cache bytes a token in 16 bit
    "Llama-3.1-8B": (
        {**LLAMA3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        8_030_261_248,
        131_072,
    ),
    "Llama-3.1-70B": (
        {**LLAMA3, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        70_553_706_496,
        327_680,
    ),
    "Llama-3.2-1B": (
        {
            **LLAMA3,
            **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
            **{"head_dim": 64, "tie_word_embeddings": True},
        },
        1_235_814_400,
        32_768,
    ),
    "Qwen2-7B": (
        {
            **{"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944},
            **{"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
        },
        7_615_616_512,
        57_344,
    ),
    "Mistral-7B": (
        {
            **{"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336},
            **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096},
        },
        7_241_732_096,
        131_072,
    ),
}
WINDOWED = {
    "mistral": {"sliding_window": 16},
    "qwen2": {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
}

each_family = pytest.mark.parametrize("model_type", FAMILIES)
each_variation = pytest.mark.parametrize("variation", VARIATIONS)


def config_of(model_type: str, variation: str) -> PretrainedConfig:
    """A tiny config of a family; families whose layers lack a setting ignore it."""
    return AutoConfig.for_model(model_type, **{**TINY, **VARIATIONS[variation]})


def random_model(model_type: str, variation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(model_type, variation)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def counted(shape: ModelShape) -> int:
    halves = AttentionConfig(shape.num_kv_heads), FFNConfig(shape.intermediate_size)
    return outer_params(shape) + shape.num_layers * sum(subblock_params(half, shape) for half in halves)


def real(config: PretrainedConfig) -> int:
    """Parameters of transformers' own model, tied ones once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@each_family
def test_the_registry_names_families_by_their_model_type(model_type: str) -> None:
    assert FAMILIES[model_type].model_type == model_type
    assert family_of(model_type, Path("here")) is FAMILIES[model_type]


def test_unknown_families() -> None:
    with pytest.raises(UnsupportedError, match=rf"^here: .*'gpt2'.*supported: {', '.join(sorted(FAMILIES))}"):
        family_of("gpt2", Path("here"))


@pytest.mark.parametrize("model_type", WINDOWED)
def test_windows_are_refused(model_type: str, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type, **{**TINY, **WINDOWED[model_type]}).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"sees the last 16 tokens only"):
        Checkpoint(tmp_path)


@each_family
@each_variation
def test_parameters_are_those_of_the_model(model_type: str, variation: str) -> None:
    config = config_of(model_type, variation)
    assert counted(FAMILIES[model_type].shape(config)) == real(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name: str) -> None:
    settings, params, kv_bytes = PUBLISHED[name]
    config = AutoConfig.for_model(**settings)
    shape = FAMILIES[settings["model_type"]].shape(config)
    assert counted(shape) == real(config) == params
    assert 2 * shape.num_layers * kv_values_per_token(AttentionConfig(shape.num_kv_heads), shape) == kv_bytes


@each_family
@each_variation
def test_the_childs_config_says_what_the_parents_says(model_type: str, variation: str) -> None:
    """All settings of a forward pass survive the way into a child's config and through its JSON."""
    config = config_of(model_type, variation)
    child = DeciLMConfig(**FAMILIES[model_type].child_settings(config))
    again = DeciLMConfig.from_dict({**child.to_dict()})
    both = AutoConfig.for_model(model_type).to_dict().keys() & DeciLMConfig().to_dict().keys()
    for name in both - {"model_type", "architectures", "transformers_version"}:
        assert getattr(child, name) == getattr(again, name) == getattr(config, name), name
    assert child.model_type == "nemotron-nas"


@each_family
@each_variation
def test_a_child_that_changes_nothing_is_the_parent(model_type: str, variation: str, tmp_path: Path) -> None:
    model = random_model(model_type, variation)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(60, (2, 9), generator=torch.Generator().manual_seed(0))
    child = DeciLMForCausalLM(Checkpoint(tmp_path).child_config).eval()
    child.load_state_dict(model.state_dict())

    def both(dtype: torch.dtype) -> list[Tensor]:
        with torch.no_grad():
            return [m.to(dtype)(tokens).logits for m in (child, model)]

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert torch.equal(*both(dtype))
