# SPDX-License-Identifier: Apache-2.0
"""What a kind of variant must tell, and the closed form that all of them share.

State dicts name tensors as a layer of the checkpoint does: `self_attn.q_proj.weight`, `mlp.down_proj.weight`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from puzzle.architecture import ModelShape, Subblock, SubblockConfig

State = dict[str, Tensor]
RUNTIMES = ("transformers", "vllm", "llama.cpp")


@dataclass(frozen=True)
class Moments:
    """Second moments over the calibration tokens, float64: of features f and of the output y they should give."""

    gram: Tensor  # sum f f^T: [features, features]
    cross: Tensor  # sum y f^T: [hidden, features]


@dataclass(frozen=True)
class SubblockStats:
    """What initialisation knows of the parent's subblock in one layer."""

    inputs: Moments  # features: the normed input [hidden]
    inner: Moments  # features: the input of the last matrix (FFN channels, or the heads' outputs)
    importance: Tensor  # [FFN channels] or [KV heads], float64
    inner_of: Callable[[SubblockConfig, State], Moments]  # the same as `inner` for a variant's own last matrix


class VariantKind(ABC):
    """One kind of variant, such as "an FFN of another width"."""

    subblocks: tuple[Subblock, ...]
    runtimes: tuple[str, ...]  # those that compute it correctly
    source: str

    @abstractmethod
    def expand(self, text: str, shape: ModelShape, multiple_of: int) -> str | None:
        """The variant's name for a search-space entry (`kv/4` -> `kv2`), or None when the entry is of another kind.

        Raises:
            ConfigError: the entry is of this kind but does not fit the parent.
        """

    @abstractmethod
    def config(self, name: str, subblock: Subblock) -> SubblockConfig | None:
        """The config of a variant's name, or None when the name is of another kind."""

    def starts(self, config: SubblockConfig, parent: Mapping[str, Tensor], stats: SubblockStats) -> list[State]:
        """Weights taken from the parent as the paper does, without data; several where a choice is to be made."""
        return [{}]

    def refit(self, config: SubblockConfig, start: State, stats: SubblockStats) -> tuple[str, Moments] | None:
        """The name of the weight that least squares can refit, with the moments to do so; None when there is none."""
        return None


def ridge(weight: Tensor, moments: Moments, strength: float) -> Tensor:
    """Least squares of the output on the features, pulled towards `weight`, in float64.

    Minimises ||Y - W F||^2 + s ||W - weight||^2 with s = strength * mean diagonal of F F^T. Ours; the paper uses
    the weights as they are. Moments that rounding left indefinite take as many times 10 the strength as they need.

    Args:
        weight: [hidden, features].
        moments: of the features and the outputs.
        strength: relative ridge strength, > 0.

    Returns:
        W: [hidden, features], in the dtype of `weight`.
    """
    start = weight.double()
    diagonal = moments.gram.diagonal()
    damped = moments.gram + torch.diag_embed((strength * diagonal.mean()).clamp_min(1e-30).expand_as(diagonal))
    residual = moments.cross - start @ moments.gram
    factor, failed = torch.linalg.cholesky_ex(damped)
    if failed:
        return weight if strength > 1 else ridge(weight, moments, 10 * strength)
    return (start + torch.cholesky_solve(residual.T, factor).T).to(weight.dtype)
