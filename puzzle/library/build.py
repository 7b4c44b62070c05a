# SPDX-License-Identifier: Apache-2.0
"""The library stage: walk the parent's depth once, make every variant of each layer on the way."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from puzzle.architecture import Subblock, SubblockConfig, SubblockVariant, fingerprint
from puzzle.block_library import BlockLibrary, VariantRecord, has_weights
from puzzle.checkpoint import Checkpoint, find
from puzzle.data import load_split
from puzzle.depth import Depth, apply
from puzzle.devices import autocast, generator, set_threads
from puzzle.errors import ConfigError
from puzzle.library import importance
from puzzle.library.bld import Stream, Trainee, distil
from puzzle.library.initialise import SubblockIO, gather, initialise, subblock_io
from puzzle.modeling import DeciLMDecoderLayer
from puzzle.run import Progress, Run, atomic
from puzzle.variants import KINDS, expand, kind_of, subblock_config
from puzzle.variants.base import State

VERSION = 1
HELD_OUT = 5  # every fifth calibration sequence judges closed forms and local distillation
IMPORTANCE_TOKENS = 1_024  # per pass of the parent
PREFIX: dict[Subblock, str] = {"attention": "self_attn.", "ffn": "mlp."}


class Builder:
    """What making variants needs, for all layers.

    Raises:
        ConfigError: there are fewer than two calibration sequences.
    """

    def __init__(self, run: Run, progress: Progress):
        self.run, self.progress = run, progress
        self.config, self.device, self.dtype = run.config.library, run.config.device, run.config.compute_dtype
        self.checkpoint = Checkpoint(find(run.config.parent))
        self.library = BlockLibrary(run.path / "library")
        self.variants = [v for v in expand(run.config.search_space, self.checkpoint.shape) if has_weights(v)]
        seq = run.config.data.seq_length
        self.batch = max(1, self.config.bld.batch_tokens // seq)  # sequences
        self.calibration = load_split(run.path / "data", "calibration")
        self.training = load_split(run.path / "data", "training")[: -(-self.config.bld.tokens // seq)]
        if len(self.calibration) < 2:
            raise ConfigError(
                f"data.calibration_tokens: {seq} tokens are one sequence, and closed forms need one to fit and one to "
                f"judge by; give at least {2 * seq}"
            )
        self.depth = Depth(self.checkpoint, self.device)
        self.context = self.depth.context(seq)

    def _fingerprint(self, **more: object) -> str:
        """Of what both the importance and the variants depend on, and `more`."""
        common = {
            "version": VERSION,
            "parent": self.checkpoint.fingerprint,
            "calibration": _hash(self.calibration),
            "importance": self.config.importance,
            "seed": self.run.config.seed,
            "dtype": self.dtype,
        }
        return fingerprint(common | more)

    @cached_property
    def fingerprint(self) -> str:
        return self._fingerprint(training=_hash(self.training), library=self.config.model_dump(mode="json"))

    @cached_property
    def importance(self) -> importance.Importance:
        """Measured once for a parent and its calibration tokens, whatever else changes."""
        file = self.run.path / "activations" / f"importance-{self._fingerprint()[:16]}.safetensors"
        if not file.exists():
            model = LlamaForCausalLM.from_pretrained(self.checkpoint.path, dtype=torch.float32).to(self.device).eval()
            measured = importance.measure(
                model,
                self.calibration,
                self.config.importance,
                generator=generator(self.run.config.seed, "importance"),
                compute_dtype=self.dtype,
                batch=max(1, IMPORTANCE_TOKENS // self.calibration.shape[1]),
                progress=self.progress,
            )
            with atomic(file) as temporary:
                save_file(measured, temporary)
        return load_file(file)

    def missing(self) -> dict[int, list[SubblockVariant]]:
        """The variants that still have to be made, by layer."""
        by_layer = defaultdict(list)
        for variant in self.variants:
            record = self.library.record(variant)
            if record is None or record.fingerprint != self.fingerprint:
                by_layer[variant.layer].append(variant)
        return dict(by_layer)

    def make(self, todo: dict[int, list[SubblockVariant]]) -> None:
        """Walk the depth as far as it has to be, and make and save the given variants of each layer."""
        states, training = self.depth.embed(self.calibration), self.depth.embed(self.training)
        last = max(todo)
        for i, layer in enumerate(self.depth.layers()):
            self.progress("library", i, last + 1)
            if i in todo:
                self._make_layer(layer, todo[i], states, training)
            if i == last:
                break
            self._push(layer, states, "float32")
            self._push(layer, training, self.dtype)
        self.progress("library", last + 1, last + 1)

    @torch.no_grad()
    def _push(self, layer: DeciLMDecoderLayer, states: Tensor, dtype: str) -> None:
        """Replace the states before a layer by those after it. Training states may be in mixed precision."""
        for start in range(0, len(states), self.batch):
            part = states[start : start + self.batch]
            with autocast(self.device, dtype):
                part.copy_(layer(part, **self.context))

    def _make_layer(
        self, layer: DeciLMDecoderLayer, variants: list[SubblockVariant], states: Tensor, training: Tensor
    ) -> None:
        """The same for one layer, from the states before it."""
        held = torch.arange(len(states)) % HELD_OUT == 0
        with torch.no_grad():
            fit, held_out = (subblock_io(layer, part, self.context) for part in (states[~held], states[held]))
        stream = Stream(training, self.batch, self.context, self.device, self.dtype)
        trainees, records = [], {}
        for variant, state, record in self._initialised(layer, variants, fit, held_out):
            records[variant], module = record, self._module(variant, state)
            trainees.append(Trainee(variant, module, record.error, self.config.bld, stream))
        distil(layer, trainees, stream, held_out)
        for trainee in trainees:
            self._save(trainee, records[trainee.variant])

    def _initialised(
        self,
        layer: DeciLMDecoderLayer,
        variants: list[SubblockVariant],
        fit: dict[Subblock, SubblockIO],
        held_out: dict[Subblock, SubblockIO],
    ) -> Iterator[tuple[SubblockVariant, State, VariantRecord]]:
        """First weights of the variants of one layer."""
        for subblock, prefix in PREFIX.items():
            chosen = [v for v in variants if v.subblock == subblock]
            if not chosen:
                continue
            weight = self.importance[f"{chosen[0].layer}.{subblock}"]
            stats = gather(self.checkpoint, layer, subblock, fit[subblock], weight, self.context, self.batch)
            parent = {k: v for k, v in layer.state_dict().items() if k.startswith(prefix)}
            for variant in chosen:
                kind = kind_of(variant.name, subblock)
                error = partial(self._error, variant, held_out[subblock])
                first = initialise(kind, self._config(variant), parent, stats, error, self.config.ridge)
                refitted = first.error_closed_form < first.error_start
                yield (
                    variant,
                    first.state,
                    VariantRecord(
                        self.fingerprint,
                        kind=next(name for name, known in KINDS.items() if known is kind),
                        error_start=first.error_start,
                        error_closed_form=first.error_closed_form,
                        error=first.error_closed_form,
                        tokens=0,
                        state="closed form" if refitted else "start",
                    ),
                )

    def _error(self, variant: SubblockVariant, held_out: SubblockIO, state: State) -> float:
        module = self._module(variant, state)
        return held_out.error(lambda x: apply(module, variant.subblock, x, self.context), self.batch)

    def _config(self, variant: SubblockVariant) -> SubblockConfig:
        return subblock_config(variant.name, variant.subblock, self.checkpoint.shape)

    def _module(self, variant: SubblockVariant, state: State) -> nn.Module:
        module = self.checkpoint.subblock(variant.subblock, self._config(variant), state, self.device, torch.float32)
        assert module is not None
        return module

    def _save(self, trainee: Trainee, record: VariantRecord) -> None:
        prefix = PREFIX[trainee.variant.subblock]
        state = {prefix + k: v.to("cpu", self.checkpoint.dtype) for k, v in trainee.best.items()}
        if trainee.stopped:
            record = replace(record, state="stopped")
        elif trainee.error < record.error:
            record = replace(record, state="distilled")
        self.library.save(trainee.variant, state, replace(record, error=trainee.error, tokens=trainee.tokens))


def build(run: Run, progress: Progress) -> None:
    """Make the block library of a run: RUN/library/*.safetensors and index.parquet. Continues what is there.

    Raises:
        ConfigError: there are fewer than two calibration sequences.
    """
    set_threads(run.config.machine.threads)
    builder = Builder(run, progress)
    if todo := builder.missing():
        builder.make(todo)
    builder.library.write_index(builder.variants)


def _hash(tokens: Tensor) -> str:
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
