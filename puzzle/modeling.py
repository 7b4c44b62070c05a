# SPDX-License-Identifier: Apache-2.0
"""The child: a Llama whose layers differ. Needs torch and transformers only, since this file travels in each child.

Format: `model_type: nemotron-nas` with one entry of `block_configs` per layer, as in Llama-Nemotron (arXiv 2505.00949).
Everything but the choice of modules per layer is transformers' own Llama: attention, rotary embedding, masks, caches,
loss. Shapes in comments: B batch, S seq, H hidden.
"""

import copy

from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)


class DeciLMConfig(LlamaConfig):
    """A Llama config plus `block_configs`: per layer `{"attention": {...}, "ffn": {...}}`.

    attention: `n_heads_in_group` (query heads per KV head), or `no_op`, or `replace_with_linear`.
    ffn: `intermediate_size`, or `no_op`, or `replace_with_linear`.
    `qkv_bias`, where the config has it, says of q, k and v what `attention_bias` then says of the output alone.
    """

    model_type = "nemotron-nas"

    def __init__(self, block_configs: list[dict] | None = None, **kwargs):
        super().__init__(**kwargs)
        self.block_configs = block_configs or [{"attention": {}, "ffn": {}} for _ in range(self.num_hidden_layers)]
        if len(self.block_configs) != self.num_hidden_layers:
            raise ValueError(f"{len(self.block_configs)} block_configs for {self.num_hidden_layers} layers")
        if any(block["attention"].get("window_length") for block in self.block_configs):
            raise ValueError("attention windows (window_length) are not computed here")

    def layer_config(self, layer: int) -> LlamaConfig:
        """The config as a plain Llama would have it in one layer."""
        block = self.block_configs[layer]
        config = copy.copy(self)
        if group := block["attention"].get("n_heads_in_group"):
            config.num_key_value_heads = self.num_attention_heads // group
        if width := block["ffn"].get("intermediate_size"):
            config.intermediate_size = width
        return config


def attention(config: LlamaConfig, cache_index: int) -> LlamaAttention:
    """Llama's own attention; only `qkv_bias` is beyond what its config can say."""
    qkv_bias = getattr(config, "qkv_bias", config.attention_bias)
    if qkv_bias == config.attention_bias:
        return LlamaAttention(config, cache_index)
    biased = copy.copy(config)
    biased.attention_bias = qkv_bias
    module = LlamaAttention(biased, cache_index)
    output = module.o_proj
    module.o_proj = nn.Linear(output.in_features, output.out_features, bias=config.attention_bias)
    return module


class LinearAttn(nn.Module):
    """An attention subblock replaced by one matrix: token-wise, no cache.

    Not named `...Attention`: transformers would take it for an own attention that ignores `set_attn_implementation`.
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        self.linear_attn = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, **kwargs) -> tuple[Tensor, None]:  # [B, S, H] -> [B, S, H]
        return self.linear_attn(hidden_states), None


class LinearMLP(nn.Module):
    """An FFN subblock replaced by one matrix."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.linear_mlp = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:  # [B, S, H] -> [B, S, H]
        return self.linear_mlp(hidden_states)


class DeciLMDecoderLayer(GradientCheckpointingLayer):
    """One layer; a no-op subblock has neither module nor norm.

    `cache_index` is the layer's place in the KV cache. It counts only layers that use the cache, so that the cache's
    first layer, which transformers asks for the sequence length, is always in use.
    """

    def __init__(self, config: DeciLMConfig, layer_idx: int, cache_index: int):
        super().__init__()
        own, block = config.layer_config(layer_idx), config.block_configs[layer_idx]
        if not block["attention"].get("no_op"):
            self.input_layernorm = LlamaRMSNorm(own.hidden_size, eps=own.rms_norm_eps)
            linear = block["attention"].get("replace_with_linear")
            self.self_attn = LinearAttn(own.hidden_size) if linear else attention(own, cache_index)
            self.self_attn.config = config  # the model's: `set_attn_implementation` must reach masks and layers alike
        else:
            self.self_attn = None  # type: ignore[assignment]
        if not block["ffn"].get("no_op"):
            self.post_attention_layernorm = LlamaRMSNorm(own.hidden_size, eps=own.rms_norm_eps)
            linear = block["ffn"].get("replace_with_linear")
            self.mlp = LinearMLP(own.hidden_size) if linear else LlamaMLP(own)
        else:
            self.mlp = None  # type: ignore[assignment]

    def forward(self, hidden_states: Tensor, **kwargs) -> Tensor:  # [B, S, H] -> [B, S, H]
        if self.self_attn is not None:
            attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
            hidden_states = hidden_states + attended
        if self.mlp is not None:
            hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states


def uses_cache(block: dict) -> bool:
    """Whether a layer of this block config stores keys and values."""
    return not (block["attention"].get("no_op") or block["attention"].get("replace_with_linear"))


class DeciLMPreTrainedModel(LlamaPreTrainedModel):
    config_class = DeciLMConfig
    _no_split_modules = ["DeciLMDecoderLayer"]  # noqa: RUF012 (transformers' own form)
    _can_record_outputs = {"hidden_states": DeciLMDecoderLayer, "attentions": LlamaAttention}  # noqa: RUF012


class DeciLMModel(DeciLMPreTrainedModel, LlamaModel):
    """The decoder; its forward pass is LlamaModel's."""

    def __init__(self, config: DeciLMConfig):
        super(LlamaModel, self).__init__(config)  # not LlamaModel's own: it would build uniform layers first
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        cached = [uses_cache(block) for block in config.block_configs]
        self.layers = nn.ModuleList(
            DeciLMDecoderLayer(config, layer, sum(cached[:layer])) for layer in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class DeciLMForCausalLM(DeciLMPreTrainedModel, LlamaForCausalLM):
    """The child with its language-model head; loss, logits and generation are LlamaForCausalLM's."""

    def __init__(self, config: DeciLMConfig):
        super(LlamaForCausalLM, self).__init__(config)
        self.model = DeciLMModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


__all__ = ["DeciLMConfig", "DeciLMForCausalLM", "DeciLMModel"]
