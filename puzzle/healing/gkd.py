# SPDX-License-Identifier: Apache-2.0
"""Healing: global knowledge distillation of a whole child from its parent (2411.19146, section 4.3)."""

import gc
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from puzzle.config import HealingConfig
from puzzle.errors import ConfigError
from puzzle.healing.trainer import MARK, Healer, Job, NotFiniteError, training_arguments
from puzzle.run import Progress, atomic, read_json, silent

logger = logging.getLogger("puzzle.healing")


def heal(
    parent: Path,
    child: Path,
    out: Path,
    training: Tensor,
    held_out: Tensor,
    config: HealingConfig,
    *,
    seed: int,
    compute_dtype: str,
    device: str,
    state: Path,
    progress: Progress = silent,
) -> None:
    """Distil `parent` into `child` and write the best child seen, by held-out KL, to `out`.

    The unhealed child is a candidate too, so the held-out KL never gets worse; it is judged in float32 whatever the
    training arithmetic. `out` is the folder of `child` with other weights, in the same files and dtypes. Sequences are
    read in their order, again from the first when they run out. Killed and called again, healing continues from the
    last complete checkpoint in `state`, on a CPU with the same result as an unbroken run; a checkpoint made with other
    arguments is not used. Works in one process and, started by torchrun or `accelerate launch`, in several: by DDP, or
    by FSDP2 as in docs/fsdp2.yaml (there the child is judged in FSDP's mixed precision).

    Args:
        parent: a checkpoint; it is loaded whole, in `compute_dtype` while training.
        child: a checkpoint with the parent's vocabulary, hidden size and number of layers.
        out: the folder to write; may be `child`.
        training: tokens, `[sequences, seq]`.
        held_out: tokens to judge by, `[sequences, seq]`.
        config: losses, schedule, tokens (0: `out` is a copy of `child`).
        seed: of everything random in the training (Llama children without dropout have nothing random).
        compute_dtype: `float32`, `bfloat16`, or `float16` (not on a CPU).
        device: `cpu` or `cuda`.
        state: folder for `curve.json` (per evaluation: `step`, `tokens`, held-out `kl` and `lm_loss` in nats per token,
            means of `train_loss` and its terms since the evaluation before), `healing.log`, and, while running,
            checkpoints.
        progress: called after each step.

    Raises:
        ConfigError: the data or the config cannot be used.
        UnsupportedError: parent and child do not fit each other, or the device lacks the arithmetic.

    Warns:
        RuntimeWarning: a loss became NaN or infinite; training stopped there.
    """
    job = Job(parent, child, training, held_out, config, seed, compute_dtype, device, state, progress)
    best = None
    with _quiet():
        if config.tokens:
            job.check()
            state.mkdir(parents=True, exist_ok=True)
            with _log_to(state / "healing.log"):
                best = _train(job)
            gc.collect()  # Trainer holds its models in cycles
        processes = PartialState()
        with processes.main_process_first():
            if processes.is_main_process:
                _write(job, best, out)
                shutil.rmtree(job.checkpoints, ignore_errors=True)


def _train(job: Job) -> Path | None:
    """Train; return the checkpoint of the best child, or None when that is the unhealed one."""
    usable = [c for c in sorted(job.checkpoints.glob("checkpoint-*"), key=_step) if _usable(c, job.recipe)]
    args = training_arguments(job, resuming=bool(usable))
    if args.process_index == 0:
        for leftover in set(job.checkpoints.glob("*")) - set(usable):
            shutil.rmtree(leftover)
    child, parent = (_load(path, args.device) for path in (job.child, job.parent))
    healer = Healer(job, args, child, parent)
    fsdp = getattr(healer.accelerator.state, "fsdp_plugin", None)
    if fsdp and "FULL" not in str(fsdp.state_dict_type):
        raise ConfigError("healing by FSDP needs fsdp_state_dict_type: FULL_STATE_DICT in accelerate's config")
    if not healer.is_world_process_zero():
        logger.setLevel(logging.CRITICAL)
    logger.info("%s to step %d", f"from step {_step(usable[-1])}" if usable else "from the unhealed child", job.steps)
    try:
        healer.train(resume_from_checkpoint=str(usable[-1]) if usable else None)
    except NotFiniteError as error:
        text = (
            f"healing stopped at step {healer.state.global_step} of {job.steps}: {error}; the best child before is kept"
        )
        logger.warning(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    best = healer.state.best_global_step
    if not best:
        logger.info("no step lowered the held-out KL: the child stays as it was")
        return None
    logger.info("kept the child of step %d, held-out KL %.5f", best, healer.state.best_metric)
    return job.checkpoints / f"checkpoint-{best}"


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _usable(checkpoint: Path, recipe: str) -> bool:
    """Whether a checkpoint was written to its end, by this recipe."""
    return (checkpoint / MARK).is_file() and read_json(checkpoint / MARK)["recipe"] == recipe


def _load(path: Path, device: torch.device) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)  # transformers mistypes `to`
    return model.to(device)


def _write(job: Job, best: Path | None, out: Path) -> None:
    """Write the child with the weights of the checkpoint `best`, in the same files and dtypes, or as it is."""
    with atomic(out) as folder:
        shutil.copytree(job.child, folder, ignore=shutil.ignore_patterns("*.safetensors") if best else None)
        if best is None:
            return
        healed = _load(best, torch.device("cpu")).state_dict()
        for file in job.child.glob("*.safetensors"):
            with safe_open(file, "pt") as old:
                names, metadata = list(old.keys()), old.metadata()
            tensors = {name: healed[name].to(job.dtypes[name], copy=True) for name in names}  # tied ones share memory
            save_file(tensors, folder / file.name, metadata)


@contextmanager
def _log_to(file: Path) -> Iterator[None]:
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and warnings."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
