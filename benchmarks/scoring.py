# SPDX-License-Identifier: Apache-2.0
"""Exact replacement scores: the sweep of the depth against the naive loop over whole models.

    python benchmarks/scoring.py [--parent PATH] [--tokens N] [--rounds N]

Naive: the parent stays in memory, and its logits too; for each variant its module is swapped in and the whole model
runs. Both ways start from the same files, compare logits with the same code, run in processes of their own, in turns,
and must give the same scores to 1e-5. Memory is the peak of a process above what it has before it starts. Without
--parent it is a random Llama of 16 layers. Variants are closed forms; tokens are random.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from puzzle.architecture import SubblockVariant
from puzzle.block_library import BlockLibrary
from puzzle.checkpoint import Checkpoint
from puzzle.config import RunConfig
from puzzle.data import SPLITS, load_split
from puzzle.depth import Depth
from puzzle.evaluate import ParentLogits, TokenSums, compare_logits
from puzzle.library.build import build
from puzzle.run import Run, peak_memory, reset_peak_memory, silent
from puzzle.scoring.blocks import Blocks
from puzzle.scoring.replacement import sweep
from puzzle.variants import expand, subblock_config

SEQ, BATCH = 128, 4
SPACE = {"attention": ["kv1", "no_op"], "ffn": ["50%", "25%", "no_op"], "multiple_of": 8}
WAYS = ("sweep", "naive")
TOLERANCE = 1e-5


def random_parent(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def new_run(folder: Path, parent: Path, tokens: int) -> Run:
    """A run directory with random tokens and a library of closed forms."""
    config = RunConfig(
        parent=str(parent),
        search_space=SPACE,
        targets=["params<=0.5x"],
        data={"seq_length": SEQ},
        library={"importance": "contribution", "ridge": [1e-2], "bld": {"tokens": 0}},
        device="cpu",
        compute_dtype="float32",
    )
    run = Run.create(folder, config)
    vocabulary = Checkpoint(parent).shape.vocab_size
    (folder / "data").mkdir()
    for seed, name in enumerate(SPLITS):
        drawn = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed))
        rows = pa.FixedSizeListArray.from_arrays(pa.array(drawn.numpy()), SEQ)
        pq.write_table(pa.table({"input_ids": rows}), folder / "data" / f"{name}.parquet")
    build(run, silent)
    return run


class Nothing(nn.Module):
    """A no-op in the place of a subblock."""

    def __init__(self, attention: bool):
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor | tuple[Tensor, None]:
        zero = torch.zeros_like(hidden_states)
        return (zero, None) if self.attention else zero


@torch.no_grad()
def naive(
    checkpoint: Checkpoint, library: BlockLibrary, variants: list[SubblockVariant], tokens: Tensor
) -> list[float]:
    """KL of each variant by a run of the whole model."""
    model = LlamaForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).eval()
    parts = tokens.split(BATCH)
    references = [ParentLogits.of(model(part, use_cache=False).logits, part) for part in parts]
    scores = []
    for variant in variants:
        attention = variant.subblock == "attention"
        layer, place = model.model.layers[variant.layer], "self_attn" if attention else "mlp"
        config = subblock_config(variant.name, variant.subblock, checkpoint.shape)
        module = checkpoint.subblock(variant.subblock, config, library.load(variant), "cpu", torch.float32)
        own = getattr(layer, place)
        setattr(layer, place, module or Nothing(attention))
        sums = TokenSums()
        for part, reference in zip(parts, references, strict=True):
            sums.add(compare_logits(reference, model(part, use_cache=False).logits))
        setattr(layer, place, own)
        scores.append(sums.kl)
    return scores


def by_sweep(
    checkpoint: Checkpoint, library: BlockLibrary, variants: list[SubblockVariant], tokens: Tensor
) -> list[float]:
    table = sweep(Blocks(Depth(checkpoint, "cpu"), library), variants, tokens, BATCH, silent)
    rows = table.set_index(["layer", "subblock", "variant"]).kl
    return [float(rows[v.layer, v.subblock, v.name]) for v in variants]


def measure(way: str, folder: Path) -> dict:
    """Seconds, peak MiB and scores of one way, in this process."""
    run = Run.open(folder)
    checkpoint, library = Checkpoint(Path(run.config.parent)), BlockLibrary(folder / "library")
    variants = [v for v in expand(run.config.search_space, checkpoint.shape) if v.name != "parent"]
    tokens = load_split(folder / "data", "scoring")
    reset_peak_memory()
    before, start = peak_memory(), time.perf_counter()
    scores = (by_sweep if way == "sweep" else naive)(checkpoint, library, variants, tokens)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "mib": (peak_memory() - before) / 2**20, "scores": scores}


def in_process(way: str, folder: Path) -> dict:
    command = [sys.executable, __file__, "--one", way, str(folder)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def compare(folder: Path, rounds: int) -> tuple[pd.DataFrame, np.ndarray, float]:
    """Medians of both ways, the scores, and their largest relative difference."""
    runs: dict[str, list[dict]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            runs[way].append(in_process(way, folder))
    medians = {
        way: {unit: statistics.median(r[unit] for r in results) for unit in ("seconds", "mib")}
        for way, results in runs.items()
    }
    found, wanted = (np.array(runs[way][0]["scores"]) for way in WAYS)
    return pd.DataFrame(medians).T, found, float(np.max(np.abs(found - wanted) / np.abs(wanted)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parent", type=Path, help="a checkpoint; default: a random Llama of 16 layers")
    parser.add_argument("--tokens", type=int, default=1024, help=f"a multiple of {SEQ}")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "RUN"), help="measure one way in this process")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], Path(args.one[1]))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        parent = args.parent or random_parent(Path(scratch) / "parent")
        run = new_run(Path(scratch) / "run", parent.resolve(), args.tokens)
        medians, scores, difference = compare(run.path, args.rounds)
    span = f"KL {scores.min():.2g} to {scores.max():.2g}"
    print(f"{len(scores)} scores ({span}, {args.tokens:,} tokens), largest relative difference {difference:.1e}")
    print(medians.round(1).to_string())
    if difference > TOLERANCE:
        raise SystemExit(f"the scores differ by more than {TOLERANCE}")
    (fast, fast_mib), (slow, slow_mib) = (medians.loc[way, ["seconds", "mib"]] for way in WAYS)
    figures = {"sweep_s": fast, "naive_s": slow, "sweep_mib": fast_mib, "naive_mib": slow_mib}
    rounded = {name: round(value, 2) for name, value in figures.items()}
    print(json.dumps({"ratio": round(slow / fast, 2), **rounded, "difference": difference, "scores": len(scores)}))


if __name__ == "__main__":
    main()
