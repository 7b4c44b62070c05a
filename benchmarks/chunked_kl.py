# SPDX-License-Identifier: Apache-2.0
"""Peak memory and CPU time of the chunked KL against the direct one, forward and backward.

    python benchmarks/chunked_kl.py

Every figure comes from a process of its own: peak resident memory above what the inputs take, and CPU seconds. Both
ways must give the same loss and gradients. `ratio` is direct over chunked memory at the largest size.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch
from torch import Tensor

from puzzle.healing.losses import chunked_kl
from puzzle.run import peak_memory, reset_peak_memory

HIDDEN = 256
WAYS = ("direct", "chunked")


def direct_kl(child: Tensor, child_head: Tensor, parent: Tensor, parent_head: Tensor) -> Tensor:
    """KL(parent || child) from the logits of all tokens at once, `[tokens, vocab]`."""
    child_log = (child @ child_head.T).log_softmax(-1)
    with torch.no_grad():
        parent_log = (parent @ parent_head.T).log_softmax(-1)
    return torch.nn.functional.kl_div(child_log, parent_log, reduction="batchmean", log_target=True)


def measure(way: str, tokens: int, vocab: int) -> dict[str, float]:
    """One forward and backward pass in this process."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, HIDDEN), (vocab, HIDDEN)] * 2
    inputs = [0.3 * torch.randn(shape, generator=generator) for shape in shapes]
    child, head = (x.requires_grad_() for x in inputs[:2])
    function = direct_kl if way == "direct" else chunked_kl
    function(child[:8], head, inputs[2][:8], inputs[3]).backward()  # warm-up; the gradients' memory counts as input
    child.grad, head.grad = None, head.grad.zero_()
    reset_peak_memory()
    before, start = peak_memory(), time.process_time()
    loss = function(*inputs)
    loss.backward()
    seconds = time.process_time() - start
    return {
        "mib": (peak_memory() - before) / 2**20,
        "seconds": seconds,
        "loss": loss.item(),
        "gradient": float(head.grad.double().norm() + child.grad.double().norm()),
    }


def in_process(way: str, tokens: int, vocab: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", way, str(tokens), str(vocab)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare(tokens: int, vocab: int, repeats: int) -> dict[str, float]:
    """Medians of both ways, their processes interleaved."""
    runs = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            runs[way].append(in_process(way, tokens, vocab))
    row: dict[str, float] = {"tokens": tokens, "vocab": vocab}
    for way in WAYS:
        row |= {f"{way}_{unit}": statistics.median(r[unit] for r in runs[way]) for unit in ("mib", "seconds")}
    for figure in ("loss", "gradient"):
        torch.testing.assert_close(runs["chunked"][0][figure], runs["direct"][0][figure], rtol=1e-4, atol=0)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=3, metavar=("WAY", "TOKENS", "VOCAB"), help="measure one way in this process")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), int(args.one[2]))))
        return
    sizes = [(1024, 16_384), (2048, 16_384), (4096, 16_384), (4096, 8_192)]
    print(f"{'tokens':>7} {'vocab':>7} {'direct MiB':>11} {'chunked MiB':>12} {'direct s':>9} {'chunked s':>10}")
    rows = []
    for tokens, vocab in sizes:
        row = compare(tokens, vocab, args.repeats)
        rows.append(row)
        print(
            f"{tokens:7d} {vocab:7d} {row['direct_mib']:11.0f} {row['chunked_mib']:12.0f} "
            f"{row['direct_seconds']:9.2f} {row['chunked_seconds']:10.2f}"
        )
    largest = max(rows, key=lambda r: r["tokens"] * r["vocab"])
    ratio = largest["direct_mib"] / largest["chunked_mib"]
    slower = largest["chunked_seconds"] / largest["direct_seconds"]
    print(json.dumps({"ratio": round(ratio, 2), "time_ratio": round(slower, 2), "rows": rows}))


if __name__ == "__main__":
    main()
