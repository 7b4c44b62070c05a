# SPDX-License-Identifier: Apache-2.0
"""Analytic latencies: what the hardware's peak and bandwidth allow at best (Williams et al., 2009). No torch.

A subblock takes max(FLOPs / peak, bytes / bandwidth); bytes are its weights and its part of the KV cache. Real kernels
and Python take longer, so the figures are lower bounds; their ratios to the parent's are what a plan is about.
"""

from collections.abc import Mapping

from puzzle.architecture import ModelShape, SubblockConfig
from puzzle.costs import Scenario
from puzzle.plan.devices import Device
from puzzle.plan.work import causal, forward_flops, head_flops


def subblock_times(
    config: SubblockConfig, sizes: Mapping[str, float], shape: ModelShape, scenario: Scenario, device: Device
) -> dict[str, float]:
    """`prefill_ms` and `decode_ms` of one subblock, as `puzzle.costs.Scenario` defines them.

    Args:
        config: the subblock.
        sizes: its `weight_bytes` and `kv_bytes_per_token` in the scenario's dtype.
        shape: of the parent.
        scenario: batch, lengths, dtype.
        device: its peaks count, its efficiencies do not.
    """
    batch, prompt = scenario.batch, scenario.prompt
    cached = prompt + scenario.generated // 2  # what a decode step finds in the cache; it adds its own token
    weights, kv = sizes["weight_bytes"], sizes["kv_bytes_per_token"] * batch
    prefill = forward_flops(config, shape, batch * prompt, causal(prompt)), weights + kv * prompt
    decode = forward_flops(config, shape, batch, cached + 1), weights + kv * (cached + 1)
    return _milliseconds(prefill, decode, scenario, device)


def outer_times(weight_bytes: float, shape: ModelShape, scenario: Scenario, device: Device) -> dict[str, float]:
    """The same of what lies outside the layers: the head on one token a sequence; of the embedding few rows are read.

    Args:
        weight_bytes: of the head alone.
        shape: of the parent.
        scenario: batch and dtype.
        device: as above.
    """
    head = head_flops(shape, scenario.batch), weight_bytes
    return _milliseconds(head, head, scenario, device)


def _milliseconds(
    prefill: tuple[float, float], decode: tuple[float, float], scenario: Scenario, device: Device
) -> dict[str, float]:
    peak = device.peak(scenario.dtype)
    times = {"prefill_ms": prefill, "decode_ms": decode}
    return {name: 1e3 * max(flops / peak, moved / device.bandwidth) for name, (flops, moved) in times.items()}
