# SPDX-License-Identifier: Apache-2.0
"""The block library from one shared stream of the parent's activations against one variant at a time.

    python benchmarks/bld.py [--parent PATH] [--rounds N]

Shared: the parent's depth is walked once and all variants of a layer train on the same batches. One at a time: each
variant has the parent run up to its layer, and trains there alone. Closed forms and local distillation are the same
code in both ways, and both must write the same files, bit for bit.
Without --parent it is a random Llama. Tokens are random: they do not change the time.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from puzzle.architecture import SubblockVariant
from puzzle.checkpoint import Checkpoint
from puzzle.config import RunConfig
from puzzle.data import SPLITS
from puzzle.library.build import Builder
from puzzle.run import Run, silent

SEQ, TOKENS = 128, 2_048
SPACE = {
    "attention": ["kv/2", "kv/4", "linear"],
    "ffn": ["87%", "75%", "50%", "25%", "20%", "10%", "linear"],
    "multiple_of": 8,
}


def random_parent(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def new_run(folder: Path, parent: Path) -> Run:
    config = RunConfig(
        parent=str(parent),
        search_space=SPACE,
        targets=["params<=0.5x"],
        data={"seq_length": SEQ, "training_tokens": TOKENS},
        library={"bld": {"tokens": TOKENS, "batch_tokens": 4 * SEQ}},
        device="cpu",
        compute_dtype="float32",
    )
    run = Run.create(folder, config)
    vocabulary = Checkpoint(parent).shape.vocab_size
    (folder / "data").mkdir()
    for seed, name in enumerate(SPLITS):
        tokens = torch.randint(vocabulary, (TOKENS,), generator=torch.Generator().manual_seed(seed))
        rows = pa.FixedSizeListArray.from_arrays(pa.array(tokens.numpy()), SEQ)
        pq.write_table(pa.table({"input_ids": rows}), folder / "data" / f"{name}.parquet")
    return run


def shared(builder: Builder, todo: dict[int, list[SubblockVariant]]) -> None:
    builder.make(todo)


def one_at_a_time(builder: Builder, todo: dict[int, list[SubblockVariant]]) -> None:
    for layer, variants in todo.items():
        for variant in variants:
            builder.make({layer: [variant]})


def compare(run: Run, rounds: int) -> tuple[dict[str, float], int]:
    """Median seconds of both ways, in turns, and the number of variants.

    Raises:
        SystemExit: they wrote different files.
    """
    seconds: dict[str, list[float]] = {}
    made: dict[str, dict[str, bytes]] = {}
    importance = Builder(run, silent).importance  # measured once, for either way
    for _ in range(rounds):
        for way in (shared, one_at_a_time):
            shutil.rmtree(run.path / "library", ignore_errors=True)
            builder = Builder(run, silent)
            builder.importance = importance
            start = time.perf_counter()
            way(builder, builder.missing())
            seconds.setdefault(way.__name__, []).append(time.perf_counter() - start)
            made[way.__name__] = {file.name: file.read_bytes() for file in builder.library.folder.iterdir()}
    if made["shared"] != made["one_at_a_time"]:
        raise SystemExit("the two ways wrote different files")
    return {way: statistics.median(values) for way, values in seconds.items()}, len(made["shared"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parent", type=Path, help="a checkpoint; default: a random Llama of 12 layers")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        parent = args.parent or random_parent(Path(scratch) / "parent")
        seconds, variants = compare(new_run(Path(scratch) / "run", parent), args.rounds)
        layers = Checkpoint(parent).shape.num_layers
    print(f"{variants} variants in {layers} layers, {TOKENS:,} training tokens each; the same files, bit for bit")
    print(f"{'way':<16} {'seconds':>8} {'s a variant':>12}")
    for way, value in seconds.items():
        print(f"{way:<16} {value:8.1f} {value / variants:12.3f}")
    ratio = seconds["one_at_a_time"] / seconds["shared"]
    figures = {f"{way}_s": round(value, 2) for way, value in seconds.items()}
    print(json.dumps({"ratio": round(ratio, 2), **figures, "variants": variants, "layers": layers}))


if __name__ == "__main__":
    main()
