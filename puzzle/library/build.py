# SPDX-License-Identifier: Apache-2.0
"""The library stage: walk the parent's depth once, make every variant of each layer on the way."""

from collections import defaultdict

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from puzzle.architecture import Subblock, SubblockVariant, fingerprint
from puzzle.block_library import BlockLibrary, VariantRecord, has_weights
from puzzle.checkpoint import Checkpoint, find
from puzzle.data import load_split
from puzzle.depth import Depth, apply
from puzzle.devices import autocast, generator, set_threads
from puzzle.library import importance
from puzzle.library.bld import Stream, Trainee, distil
from puzzle.library.initialise import SubblockIO, gather, initialise, subblock_io
from puzzle.modeling import DeciLMDecoderLayer
from puzzle.run import Progress, Run, atomic, read_json
from puzzle.variants import KINDS, expand, kind_of, subblock_config
from puzzle.variants.base import State

VERSION = 1
HELD_OUT = 5  # every fifth calibration sequence judges closed forms and local distillation


class Builder:
    """What making variants needs, for all layers."""

    def __init__(self, run: Run, progress: Progress):
        self.config, self.progress = run.config.library, progress
        self.device, self.dtype = run.config.device, run.config.compute_dtype
        set_threads(run.config.machine.threads)
        self.checkpoint = Checkpoint(find(run.config.parent))
        self.library = BlockLibrary(run.path / "library")
        self.variants = [v for v in expand(run.config.search_space, self.checkpoint.shape) if has_weights(v)]
        self.fingerprint = fingerprint(
            {
                "version": VERSION,
                "parent": self.checkpoint.fingerprint,
                "data": read_json(run.path / "data" / "splits.json"),
                "library": self.config.model_dump(mode="json"),
                "seed": run.config.seed,
                "dtype": self.dtype,
            }
        )
        seq = run.config.data.seq_length
        self.batch = max(1, self.config.bld.batch_tokens // seq)  # sequences
        self.depth = Depth(self.checkpoint, self.device)
        self.context = self.depth.context(seq)
        self.importance = self._importance(run)

    def _importance(self, run: Run) -> importance.Importance:
        file = run.path / "activations" / f"importance-{self.fingerprint[:16]}.safetensors"
        if not file.exists():
            model = LlamaForCausalLM.from_pretrained(self.checkpoint.path, dtype=torch.float32).to(self.device).eval()
            measured = importance.measure(
                model,
                load_split(run.path / "data", "calibration"),
                self.config.importance,
                generator=generator(run.config.seed, "importance"),
                compute_dtype=self.dtype,
                batch=self.batch,
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

    def layer(
        self, layer: DeciLMDecoderLayer, variants: list[SubblockVariant], states: Tensor, training: Tensor
    ) -> None:
        """Make and save the given variants of one layer from the states before it."""
        held = torch.arange(len(states)) % HELD_OUT == 0
        with torch.no_grad():
            fit, held_out = (subblock_io(layer, part, self.context) for part in (states[~held], states[held]))
        stream = Stream(training, self.batch)
        trainees, records = [], {}
        for variant, state, record in self._initialised(layer, variants, fit, held_out):
            records[variant] = record
            module = self._module(variant, state)
            trainees.append(Trainee(variant, module, record.error, self.config.bld, max(1, len(stream))))
        distil(layer, trainees, stream, held_out, self.context, self.device, self.dtype)
        for trainee in trainees:
            self._save(trainee, records[trainee.variant], training.shape[0] * training.shape[1])

    def _initialised(
        self,
        layer: DeciLMDecoderLayer,
        variants: list[SubblockVariant],
        fit: dict[Subblock, SubblockIO],
        held_out: dict[Subblock, SubblockIO],
    ) -> list[tuple[SubblockVariant, State, VariantRecord]]:
        made = []
        parent = {k: v.float() for k, v in layer.state_dict().items()}
        for subblock in sorted({v.subblock for v in variants}):
            weight = self.importance[f"{variants[0].layer}.{subblock}"]
            stats = gather(self.checkpoint, layer, subblock, fit[subblock], weight, self.context, self.batch)
            own = {k: v for k, v in parent.items() if k.startswith(("self_attn.", "mlp.")[subblock == "ffn"])}
            for variant in (v for v in variants if v.subblock == subblock):
                kind, config = (
                    kind_of(variant.name, subblock),
                    subblock_config(variant.name, subblock, self.checkpoint.shape),
                )

                def error(state: State, variant: SubblockVariant = variant) -> float:
                    module = self._module(variant, state)
                    return held_out[variant.subblock].error(
                        lambda x: apply(module, variant.subblock, x, self.context), self.batch
                    )

                first = initialise(kind, config, own, stats, error, self.config.ridge)
                name = next(name for name, known in KINDS.items() if known is kind)
                record = VariantRecord(
                    self.fingerprint,
                    name,
                    first.error_start,
                    first.error_closed_form,
                    first.error_closed_form,
                    tokens=0,
                    state="closed form" if first.error_closed_form < first.error_start else "start",
                )
                made.append((variant, first.state, record))
        return made

    def _module(self, variant: SubblockVariant, state: State) -> torch.nn.Module:
        config = subblock_config(variant.name, variant.subblock, self.checkpoint.shape)
        module = self.checkpoint.subblock(variant.subblock, config, state, self.device, torch.float32)
        assert module is not None
        return module

    def _save(self, trainee: Trainee, record: VariantRecord, tokens: int) -> None:
        prefix = "self_attn." if trainee.variant.subblock == "attention" else "mlp."
        dtype = self.checkpoint.dtype
        state = {prefix + k: v.to("cpu", dtype) for k, v in trainee.best.items()}
        changes = {"tokens": tokens, "error": trainee.error}
        if trainee.stopped:
            changes["state"] = "stopped"
        elif trainee.error < record.error:
            changes["state"] = "distilled"
        self.library.save(trainee.variant, state, VariantRecord(**{**record.__dict__, **changes}))


def build(run: Run, progress: Progress) -> None:
    """Make the block library of a run: RUN/library/*.safetensors and index.parquet. Continues what is there."""
    builder = Builder(run, progress)
    todo = builder.missing()
    layers = builder.checkpoint.shape.num_layers
    if todo:
        data = run.path / "data"
        states = builder.depth.embed(load_split(data, "calibration"))
        sequences = -(-run.config.library.bld.tokens // run.config.data.seq_length)
        training = builder.depth.embed(load_split(data, "training")[:sequences])
        for i, layer in enumerate(builder.depth.layers()):
            progress("library", i, layers)
            if i > max(todo):
                break
            if i in todo:
                builder.layer(layer, todo[i], states, training)
            with torch.no_grad():
                _push(layer, states, builder, "float32")
                _push(layer, training, builder, builder.dtype)
    progress("library", layers, layers)
    builder.library.write_index(builder.variants)


def _push(layer: DeciLMDecoderLayer, states: Tensor, builder: Builder, dtype: str) -> None:
    """Replace the states before a layer by those after it. Training states may be in mixed precision."""
    for part in states.split(builder.batch):
        with autocast(builder.device, dtype):
            part.copy_(layer(part, **builder.context))
