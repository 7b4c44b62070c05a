# SPDX-License-Identifier: Apache-2.0
"""Counting work: FLOPs of subblocks, bytes moved, and the time both take on a device. No torch.

A multiply and an add are two FLOPs. Norms, activations and rotary angles are not counted: they are few FLOPs, and the
time they take is part of a device's `compute_efficiency`.
"""

from dataclasses import dataclass, replace

from puzzle.architecture import FFNConfig, ModelShape, SubblockConfig, subblock_params
from puzzle.plan.devices import Device


@dataclass(frozen=True)
class Work:
    """Work of one kind, which takes as long as the slowest of its three sides."""

    what: str
    dtype: str  # of the arithmetic
    flops: float = 0.0
    bytes: float = 0.0  # between memory and processor
    calls: float = 0.0  # subblocks started from Python

    def seconds(self, device: Device) -> float:
        compute = self.flops / (device.peak(self.dtype) * device.compute_efficiency)
        memory = self.bytes / (device.bandwidth * device.memory_efficiency)
        return max(compute, memory, self.calls * device.call_us * 1e-6)


def matrix_weights(config: SubblockConfig, shape: ModelShape) -> int:
    """Parameters of a subblock's matrices, without norms and biases: each takes part in one product a token."""
    if config.no_op:
        return 0
    plain = replace(shape, attention_bias=False, attention_output_bias=False, mlp_bias=False, extra_attention_params=0)
    return subblock_params(config, plain) - shape.hidden_size


def causal(seq: int) -> float:
    """Keys that a query of a sequence sees on average, itself included."""
    return (seq + 1) / 2


def forward_flops(config: SubblockConfig, shape: ModelShape, tokens: float, keys: float) -> float:
    """Of one forward pass.

    Args:
        config: the subblock.
        shape: of the parent.
        tokens: all of them, over sequences.
        keys: that each token attends to, on average.
    """
    return 2 * tokens * matrix_weights(config, shape) + _scores(config, shape, tokens, keys)


def distillation_flops(config: SubblockConfig, shape: ModelShape, tokens: float, keys: float) -> float:
    """Of forward and backward passes of a subblock alone, whose input needs no gradient.

    Every matrix gets a gradient; only the last one (and attention itself) passes one on to what is before it.
    """
    last = 0 if config.linear or config.no_op else shape.hidden_size * last_features(config, shape)
    passed_on = 2 * tokens * last + 2 * _scores(config, shape, tokens, keys)
    return forward_flops(config, shape, tokens, keys) + 2 * tokens * matrix_weights(config, shape) + passed_on


def last_features(config: SubblockConfig, shape: ModelShape) -> int:
    """Inputs of a subblock's last matrix, which the closed forms refit; of its only one where it is linear."""
    if config.no_op:
        return 0
    if config.linear:
        return shape.hidden_size
    if isinstance(config, FFNConfig):
        assert config.intermediate_size is not None
        return config.intermediate_size
    return shape.num_heads * shape.head_dim


def _scores(config: SubblockConfig, shape: ModelShape, tokens: float, keys: float) -> float:
    """The products of queries with keys and of their weights with values."""
    if isinstance(config, FFNConfig) or config.linear or config.no_op:
        return 0.0
    return 4 * tokens * keys * shape.num_heads * shape.head_dim


def head_flops(shape: ModelShape, tokens: float) -> float:
    """Of the logits, forward."""
    return 2.0 * tokens * shape.hidden_size * shape.vocab_size
