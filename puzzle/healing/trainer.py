# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Trainer, taught to distil: the parent beside the child, and a held-out KL as its evaluation.

Trainer brings AdamW, the cosine schedule with warm-up, float32 master weights under autocast, loss scaling for float16,
checkpoints, several processes. The papers publish neither optimiser nor learning rate; ours are Trainer's AdamW (betas
0.9 and 0.999, gradients clipped at norm 1) and what `HealingConfig` says.
"""

import hashlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback, get_available_reporting_integrations
from transformers.trainer_callback import DefaultFlowCallback

from puzzle.architecture import fingerprint
from puzzle.checkpoint import Checkpoint
from puzzle.config import HealingConfig
from puzzle.errors import ConfigError, UnsupportedError
from puzzle.healing.losses import gkd_loss
from puzzle.run import Progress, write_json

logger = logging.getLogger("puzzle.healing")
JUDGING = HealingConfig(kl_weight=1, cosine_weight=0, lm_weight=1, temperature=1)  # the terms of an evaluation
LOGGED = 100  # points of the training loss that a tracker gets, about
MARK = "complete.json"  # written last into a checkpoint


def check(config: HealingConfig) -> None:
    """Find what can be wrong with a config alone, before anything is computed.

    Raises:
        ConfigError: no loss has a weight, or a package is missing.
    """
    if not (config.kl_weight or config.cosine_weight or config.lm_weight):
        raise ConfigError("healing: kl_weight, cosine_weight and lm_weight are all 0; at least one must be above")
    if missing := sorted(set(config.report_to) - set(get_available_reporting_integrations())):
        raise ConfigError(f"healing.report_to: {missing[0]} is not installed; pip install {missing[0]}")


@dataclass(frozen=True)
class Job:
    """The arguments of `heal` and the numbers that follow from them."""

    parent: Path
    child: Path
    training: Tensor
    held_out: Tensor
    config: HealingConfig
    seed: int
    dtype: str
    device: str
    state: Path
    progress: Progress

    def check(self) -> None:
        """Find the user's mistakes before anything is loaded; raises as `heal`."""
        for name, tokens in (("training", self.training), ("held-out", self.held_out)):
            if tokens.ndim != 2 or not tokens.numel():
                raise ConfigError(f"healing needs {name} tokens as [sequences, seq], not {list(tokens.shape)}")
        config, where = self.config, torch.device(self.device)
        check(config)
        if self.batch % self.parts:
            raise ConfigError(
                f"healing: a step has {self.batch} sequences (batch_tokens {config.batch_tokens}), which "
                f"{self.processes} processes x gradient_accumulation {config.gradient_accumulation} do not divide"
            )
        if self.dtype == "float16" and where.type == "cpu":
            raise UnsupportedError("healing in float16 needs a GPU; on a CPU use compute_dtype bfloat16 or float32")
        if where.index:
            raise UnsupportedError(
                f"healing takes the first GPU it sees; instead of {where}, set CUDA_VISIBLE_DEVICES={where.index}"
            )
        _ = self.layers

    @property
    def checkpoints(self) -> Path:
        return self.state / "checkpoints"

    @property
    def batch(self) -> int:
        """Sequences a step."""
        return max(1, self.config.batch_tokens // self.training.shape[1])

    @property
    def steps(self) -> int:
        return math.ceil(self.config.tokens / (self.batch * self.training.shape[1]))

    @property
    def processes(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun and accelerate launch

    @property
    def parts(self) -> int:
        """The pieces a step is cut into, over processes and one after another."""
        return self.processes * self.config.gradient_accumulation

    @property
    def points(self) -> frozenset[int]:
        """The steps after which the child is judged and a checkpoint is written."""
        n = self.config.evaluations
        return frozenset(math.ceil(i * self.steps / n) for i in range(1, n + 1))

    @cached_property
    def layers(self) -> list[int]:
        """The layers whose hidden states are compared: all but those of which the child has nothing.

        Raises:
            UnsupportedError: the models do not fit each other.
        """
        child, parent = Checkpoint(self.child), Checkpoint(self.parent)
        for field in ("vocab_size", "hidden_size", "num_layers"):
            own, wanted = getattr(child.shape, field), getattr(parent.shape, field)
            if own != wanted:
                raise UnsupportedError(f"healing: {self.child} has {field} {own}, its parent {wanted}")
        return [i for i, b in enumerate(child.blocks) if not (b.attention.no_op and b.ffn.no_op)]

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor in the child's files."""
        found: dict[str, torch.dtype] = {}
        for path in self.child.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                found |= {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
        return found

    @cached_property
    def recipe(self) -> str:
        """A hash of what the result depends on."""
        files = sorted(self.child.glob("*.safetensors"))
        return fingerprint(
            {
                "config": self.config.model_dump(mode="json", exclude={"report_to"}),
                "models": [Checkpoint(path).fingerprint for path in (self.parent, self.child)],
                "written": [file.stat().st_mtime_ns for file in files],  # that hash looks into parts of the files only
                "data": [
                    hashlib.sha256(x.contiguous().numpy().data).hexdigest() for x in (self.training, self.held_out)
                ],
                "seed": self.seed,
                "dtype": self.dtype,
            }
        )


def training_arguments(job: Job, resuming: bool) -> TrainingArguments:
    config, kind = job.config, torch.device(job.device).type
    renamed = "activation_checkpointing" in TrainingArguments.__dataclass_fields__  # in later transformers
    saving: dict[str, Any] = {f"{'activation' if renamed else 'gradient'}_checkpointing": config.gradient_checkpointing}
    args = TrainingArguments(
        output_dir=str(job.checkpoints),
        max_steps=job.steps,
        per_device_train_batch_size=job.batch // job.parts,
        gradient_accumulation_steps=config.gradient_accumulation,
        **saving,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(config.warmup * job.steps),
        weight_decay=config.weight_decay,
        bf16=job.dtype == "bfloat16",
        fp16=job.dtype == "float16",
        use_cpu=kind == "cpu",
        seed=job.seed,
        eval_on_start=not resuming,
        save_strategy="steps",
        save_total_limit=2,
        metric_for_best_model="kl",
        greater_is_better=False,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to=list(config.report_to) or "none",
        remove_unused_columns=False,
        ddp_find_unused_parameters=not (config.kl_weight or config.lm_weight),  # an untied head, without these
        dataloader_pin_memory=kind == "cuda",
    )
    args._n_gpu = min(args.n_gpu, 1)  # several GPUs are used through torchrun, never through DataParallel
    return args


class NotFiniteError(Exception):
    """A loss is NaN or infinite."""


class _Sequences(Dataset):
    """`count` sequences of `tokens`, in order, from the first again after the last."""

    def __init__(self, tokens: Tensor, count: int):
        self.tokens, self.count = tokens, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[i % len(self.tokens)]}


def curve(state: TrainerState) -> list[dict[str, float]]:
    """The log's entries of evaluations."""
    return [entry for entry in state.log_history if "eval_kl" in entry]


class _Flow(TrainerCallback):
    """When to judge, save and stop; in place of Trainer's own, which knows only fixed intervals."""

    def __init__(self, job: Job):
        self.job = job

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        step, job = state.global_step, self.job
        job.progress("healing", step, job.steps)
        control.should_evaluate = control.should_save = step in job.points
        control.should_log = bool(job.config.report_to) and step % max(1, job.steps // LOGGED) == 0
        control.should_training_stop = step >= job.steps or self._hopeless(state)
        return control

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        control.should_training_stop |= self._hopeless(state)
        return control

    def _hopeless(self, state: TrainerState) -> bool:
        """Whether `patience` is at its end. transformers' EarlyStoppingCallback counts the unhealed child as a miss.

        Read off the curve, which checkpoints carry: killed between the last one and its end, healing makes one step
        more, which nobody judges, and stops.
        """
        kls = [point["eval_kl"] for point in curve(state)]
        patience = self.job.config.patience
        return patience is not None and bool(kls) and len(kls) - 1 - kls.index(min(kls)) >= patience

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            checkpoint = self.job.checkpoints / f"checkpoint-{state.global_step}"
            write_json(checkpoint / MARK, {"recipe": self.job.recipe})


class Healer(Trainer):
    """Trainer with the parent beside the child, and with a held-out KL in place of its evaluation loop."""

    def __init__(self, job: Job, args: TrainingArguments, child: PreTrainedModel, parent: PreTrainedModel):
        self.job, self.parent = job, parent.eval().requires_grad_(False)
        micro = args.per_device_train_batch_size
        with torch.no_grad():  # before the parent leaves float32
            self.judges = [(ids, _states(parent, ids.to(args.device))[-1].cpu()) for ids in job.held_out.split(micro)]
        self.judge_head = parent.lm_head.weight.detach()
        parent.to(getattr(torch, job.dtype))
        # DDP, FSDP and autocast wrap the forward call of the whole model, so all of the child's work has to be in it.
        child.forward = partial(_losses, child, job.config, job.layers)
        self.sequences = _Sequences(job.training, job.steps * job.batch)
        super().__init__(model=child, args=args, train_dataset=self.sequences, callbacks=[_Flow(job)])
        self.pop_callback(DefaultFlowCallback)
        self.pop_callback(PrinterCallback)
        for callback in self.callback_handler.callbacks:
            if isinstance(
                callback, TensorBoardCallback
            ):  # by default it writes among the checkpoints, which are removed
                callback.logging_dir = callback.logging_dir or str(job.state / "tensorboard")
        self.sums: dict[str, Tensor] = {}
        self.summed = 0

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> SequentialSampler:
        return SequentialSampler(self.sequences)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        with torch.no_grad():
            states = _states(self.parent, inputs["input_ids"])
        losses = model(inputs["input_ids"], states, self.parent.lm_head.weight)
        if not self.accelerator.gather(losses["loss"].detach()).isfinite().all():
            raise NotFiniteError(f"the loss is {losses['loss'].item()}")
        self.sums = {name: self.sums.get(name, 0) + value.detach() for name, value in losses.items()}
        self.summed += 1
        return losses["loss"]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Judge the child on the held-out tokens, add a point to the curve."""
        model, device = self.model_wrapped.eval(), self.args.device
        kl = lm = 0.0
        with torch.no_grad(), _rounded(self.model, self.job.dtypes):
            for ids, hidden in self.judges:
                losses = model(ids.to(device), (hidden.to(device),), self.judge_head, judging=True)
                kl += losses["kl"] * len(ids) / len(self.job.held_out)
                lm += losses["lm"] * len(ids) / len(self.job.held_out)
        if not math.isfinite(kl):
            raise NotFiniteError(f"the held-out KL is {kl}")
        if not self.state.global_step:
            self.state.best_metric = kl
        self._add_point(kl, lm)
        metrics = {"eval_kl": kl}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _add_point(self, kl: float, lm: float) -> None:
        step = self.state.global_step
        means = {f"train_{k}": self.accelerator.reduce(v / self.summed, "mean").item() for k, v in self.sums.items()}
        self.sums, self.summed = {}, 0
        tokens = step * self.job.batch * self.job.training.shape[1]
        self.log({"step": step, "tokens": tokens, "eval_kl": kl, "eval_lm_loss": lm, **means})  # as trackers know them
        logger.info("step %d, %d tokens: held-out KL %.5f, next-token loss %.5f", step, tokens, kl, lm)
        if self.is_world_process_zero():
            points = [{k.removeprefix("eval_"): v for k, v in e.items() if k != "epoch"} for e in curve(self.state)]
            write_json(self.job.state / "curve.json", points)


def _states(model: PreTrainedModel, input_ids: Tensor) -> tuple[Tensor, ...]:
    """The hidden states after each layer, `[batch, seq, hidden]`; the last one normed, as the head gets it."""
    return model.model(input_ids=input_ids, output_hidden_states=True, use_cache=False).hidden_states[1:]


@contextmanager
def _rounded(model: Any, dtypes: dict[str, torch.dtype]) -> Iterator[None]:
    """The weights as the child's files will hold them, for a while: what is judged is what is written."""
    changed = [(p, dtypes[n]) for n, p in model.named_parameters() if dtypes.get(n, p.dtype) != p.dtype]
    masters = [p.clone() for p, _ in changed]
    for p, dtype in changed:
        p.copy_(p.to(dtype))
    try:
        yield
    finally:
        for (p, _), master in zip(changed, masters, strict=True):
            p.copy_(master)


def _losses(
    child: PreTrainedModel,
    config: HealingConfig,
    layers: Sequence[int],
    input_ids: Tensor,
    parent_states: tuple[Tensor, ...],
    parent_head: Tensor,
    judging: bool = False,
) -> dict[str, Any]:
    """The child's forward call while healing: the terms of `config`; or, without autocast, those of `JUDGING`."""
    exact = torch.autocast(input_ids.device.type, enabled=False) if judging else nullcontext()
    with exact:
        states, head = _states(child, input_ids), child.lm_head.weight
        terms = JUDGING if judging else config
        losses = gkd_loss(states, head, parent_states, parent_head, input_ids, terms, layers=layers)
    # Numbers, since FSDP rounds the tensors that a forward call returns to its own dtype.
    return {name: value.item() for name, value in losses.items()} if judging else losses
