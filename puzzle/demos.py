# SPDX-License-Identifier: Apache-2.0
"""The two demonstrations: what `puzzle demo` compresses, with budgets that fit its promise of a few minutes."""

from collections.abc import Callable
from typing import Any

from puzzle import parents, search_spaces
from puzzle.config import RunConfig, load_search_space, validate
from puzzle.devices import resolve_device, resolve_dtype
from puzzle.errors import ConfigError, did_you_mean
from puzzle.run import Progress

_SMOLLM2: dict[str, Any] = {
    "search_space": "smollm2-quick",
    "targets": ["throughput>=1.3x"],
    "data": {
        "seq_length": 256,
        "calibration_tokens": 6_144,
        "training_tokens": 49_152,
        "scoring_tokens": 768,
        "validation_tokens": 8_192,
    },
    "library": {"bld": {"tokens": 4_096}, "ridge": [1e-3, 1e-2, 1e-1]},
    "search": {"refine": 1, "compare_tokens": 1_024},
    "scenario": {"batch": 1, "prompt": 128, "generated": 128},
}
_TINY: dict[str, Any] = {
    "search_space": "tiny",
    "targets": ["throughput>=1.5x"],
    "data": {
        "seq_length": 256,
        "calibration_tokens": 16_384,
        "training_tokens": 131_072,
        "scoring_tokens": 4_096,
        "validation_tokens": 16_384,
    },
    "library": {"bld": {"tokens": 16_384}},
    "scenario": {"batch": 1, "prompt": 128, "generated": 128},
    "healing": {"tokens": 131_072, "learning_rate": 1e-3},
}
DEMOS = {"smollm2-135m": _SMOLLM2, "tiny": _TINY}
# Healing of SmolLM2 takes a few minutes on two cores: about 330 tokens/s where they compute in bfloat16, else 110.
_HEALING_TOKENS = {"bfloat16": 32_768, "float32": 12_288}


def config(name: str, progress: Progress, note: Callable[[str], None]) -> RunConfig:
    """The config of a demonstration; its parent is fetched, or trained, and kept for the next time.

    Args:
        name: of the demonstration.
        progress: for the fetch or the training.
        note: takes a sentence about the parent for the user.

    Raises:
        ConfigError: no such demonstration.
        PuzzleError: the parent cannot be fetched; the message names the demonstration that needs no network.
    """
    if name not in DEMOS:
        raise ConfigError(f"--parent {name!r}{did_you_mean(name, DEMOS)} (there are: {', '.join(DEMOS)})")
    settings = dict(DEMOS[name])
    dtype = resolve_dtype("auto", resolve_device("auto"))
    if name == "tiny":
        trained = parents.tiny_parent(progress)
        settings["parent"] = str(trained.path)
        note(
            f"the tiny parent's held-out perplexity is {trained.perplexity:.1f}; "
            f"a bigram model's on the same text is {trained.bigram_perplexity:.1f}"
        )
    else:
        settings["parent"] = str(parents.cached(name, progress))
        settings["healing"] = {"tokens": _HEALING_TOKENS.get(dtype, _HEALING_TOKENS["bfloat16"])}
    path = search_spaces.path(settings["search_space"])
    settings["search_space"] = load_search_space(path).model_dump()
    return validate(RunConfig, settings, "demo")
