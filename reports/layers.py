# SPDX-License-Identifier: Apache-2.0
"""The figures with one row or column a layer: an architecture, its small silhouette, the scores. No torch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from puzzle.architecture import PARENT, SUBBLOCKS, Architecture, ModelShape, Subblock
from puzzle.reports.figures import ACCENT, GHOST, INK, KEPT, MUTED, PAPER, WIDE, box, canvas, write
from puzzle.reports.words import SUBBLOCK_NAMES, Bar, bar


def architecture(architecture: Architecture, shape: ModelShape, width: int) -> Figure:
    """Layer by layer, attention to the left and FFN to the right; the length of a bar is the width that is kept."""
    row, top = (22, 44) if width == WIDE else (19, 44)
    height = top + row * architecture.num_layers + 56
    figure, axes = canvas(width, height)
    gutter = 44 if width == WIDE else 34
    full = (width - gutter) / 2 - 1
    left, right = (width - gutter) / 2, (width + gutter) / 2
    heads = f"full: {shape.num_kv_heads} KV head{'s' if shape.num_kv_heads > 1 else ''}"
    for x, align, name, scale in (
        (left, "right", "Attention", heads),
        (right, "left", "FFN", f"full: width {shape.intermediate_size:,}"),
    ):
        write(axes, x, 14, name, align, INK, 12.5, fontweight="bold")
        write(axes, x, 31, scale, align)
    write(axes, width / 2, 31, "layer", "center")
    for layer in range(architecture.num_layers):
        y = top + layer * row
        changed = any(architecture.name(layer, s) != PARENT for s in SUBBLOCKS)
        write(axes, width / 2, y + row / 2 - 1, str(layer), "center", INK if changed else MUTED)
        for subblock, start, sign in zip(SUBBLOCKS, (left, right), (-1, 1), strict=True):
            _subblock(axes, bar(architecture.name(layer, subblock), subblock, shape), start, y, sign * full, row - 4)
    _architecture_key(axes, width, height)
    return figure


def _subblock(axes: Axes, drawn: Bar, start: float, y: float, full: float, height: float) -> None:
    """One bar from `start`, `full` pixels long at the parent's width (negative: to the left)."""
    kind, share, label = drawn
    if kind == "parent":
        box(axes, start, y, full, height, KEPT)
        return
    box(axes, start, y, full, height, GHOST)
    box(axes, start, y, full * share, height, ACCENT)
    if kind == "linear":
        axes.plot([start, start + full], [y + height - 1, y + height - 1], color=ACCENT, linewidth=2)
    outwards, inwards = ("left", "right") if full > 0 else ("right", "left")
    end, gap, middle = start + full * share, 6 if full > 0 else -6, y + height / 2 + 0.5
    if share > 0.55:  # no room beside the bar
        write(axes, end - gap, middle, label, inwards, PAPER, 10)
    else:
        write(axes, end + gap, middle, label, outwards, MUTED, 10)


def _architecture_key(axes: Axes, width: int, height: float) -> None:
    entries = ("as in the parent", "narrowed", "one linear layer", "removed")
    columns = 4 if width == WIDE else 2
    for i, text in enumerate(entries):
        x, y = (i % columns) * width / columns, height - 36 + 20 * (i // columns)
        box(axes, x, y, 22, 12, (KEPT, ACCENT, GHOST, GHOST)[i])
        if i == 2:
            axes.plot([x, x + 22], [y + 11, y + 11], color=ACCENT, linewidth=2)
        write(axes, x + 30, y + 6.5, text, size=11)


def heatmap(
    scores: pd.DataFrame, names: dict[Subblock, list[str]], chosen: Architecture, shape: ModelShape, width: int
) -> Figure:
    """Layer by variant: the darker, the more the whole model loses by this one replacement; a dot marks the choice."""
    cell = 24 if width == WIDE else 20
    margin = 110 if width == WIDE else 84
    height = 74 + sum(30 + cell * len(v) for v in names.values())
    figure, axes = canvas(width, height)
    step = (width - margin) / chosen.num_layers
    dot: dict[str, Any] = {"markersize": min(8, max(4.5, step * 0.4)), "markeredgewidth": min(1, step / 20)}
    rows = scores[["layer", "subblock", "variant", "kl"]].itertuples(index=False, name=None)
    found = {(layer, subblock, name): max(kl, 1e-12) for layer, subblock, name, kl in rows}
    low, high = _decades([v for k, v in found.items() if k[2] != PARENT])
    y = 0.0
    for subblock, variants in names.items():
        write(axes, 0, y + 16, SUBBLOCK_NAMES[subblock], colour=INK, size=12, fontweight="bold")
        y += 30
        for name in variants:
            write(axes, margin - 8, y + cell / 2, bar(name, subblock, shape)[2], "right")
            for layer in range(chosen.num_layers):
                x, value = margin + layer * step, found.get((layer, subblock, name))
                if value is not None:
                    box(axes, x, y, step - 1, cell - 1, ACCENT, _shade(value, low, high))
                if chosen.name(layer, subblock) == name:
                    axes.plot(x + (step - 1) / 2, y + (cell - 1) / 2, "o", color=INK, markeredgecolor=PAPER, **dot)
            y += cell
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100) if chosen.num_layers / n * 26 <= width - margin)
    for layer in range(0, chosen.num_layers, every):
        write(axes, margin + (layer + 0.5) * step, y + 10, str(layer), "center", size=10)
    write(axes, margin - 8, y + 10, "layer", "right")
    _heatmap_key(axes, margin, y + 34, low, high, width)
    return figure


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """The range of a logarithmic colour scale: four decades at most, one at least."""
    high = float(np.log10(max(values)))
    return max(high - 4, min(high - 1, float(np.log10(min(values))))), high


def _shade(value: float, low: float, high: float) -> float:
    return float(0.05 + 0.95 * np.clip((np.log10(value) - low) / (high - low), 0, 1))


def _heatmap_key(axes: Axes, x: float, y: float, low: float, high: float, width: int) -> None:
    steps = 40
    step = min(6, (width - x - 30) // steps)  # whole pixels, so that the steps neither overlap nor gape
    length = steps * step
    for i in range(steps):
        box(axes, x + i * step, y, step, 9, ACCENT, 0.05 + 0.95 * i / (steps - 1))
    write(axes, x - 8, y + 4.5, "KL", "right")
    for power in range(int(np.ceil(low)), int(np.floor(high)) + 1):
        place = x + length * (power - low) / (high - low)
        write(axes, place, y + 21, f"{10.0**power:g}", "center", size=10)


def silhouette(architecture: Architecture, shape: ModelShape) -> dict[str, str]:
    """An architecture as three SVG paths, a column a layer, attention above the middle line and FFN below.

    The sheet is `num_layers` wide and 2 high; keys: `ghost` (what went), `kept` (as in the parent), `changed`.
    """
    paths: dict[str, list[str]] = {"ghost": [], "kept": [], "changed": []}
    for layer in range(architecture.num_layers):
        for subblock, sign in zip(SUBBLOCKS, ("-", ""), strict=True):
            kind, share, _ = bar(architecture.name(layer, subblock), subblock, shape)
            share = 0.06 if kind == "linear" else share
            if kind != "parent":
                paths["ghost"].append(f"M{layer}.06 1v{sign}1h.88V1z")
            if share:
                paths["kept" if kind == "parent" else "changed"].append(f"M{layer}.06 1v{sign}{share:.3g}h.88V1z")
    return {name: "".join(parts) for name, parts in paths.items()}
