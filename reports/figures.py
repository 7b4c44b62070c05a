# SPDX-License-Identifier: Apache-2.0
"""The figures, drawn by matplotlib: once for a page (an SVG that follows its colours), once as files. No torch.

Every function draws for a width in CSS pixels and returns a matplotlib `Figure` whose unit is that pixel, so that one
drawing serves a desktop and another, narrow one a phone, both with readable text.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from puzzle.reports.words import count, number

WIDE, NARROW = 820, 340  # CSS pixels
INK, MUTED, RULE, KEPT, GHOST, ACCENT, PAPER = COLOURS = (
    "#1d2125",
    "#666c72",
    "#dedfdb",
    "#a9aeb2",
    "#ecedea",
    "#0b6e6e",
    "#fdfdfc",
)
SERIES = ("#0b6e6e", "#b4552d", "#4b5fa8", "#8a6d1f", "#8a3d73", "#4c7a34")  # for runs that are compared
VARIABLES = dict(zip(COLOURS, ("ink", "muted", "rule", "kept", "ghost", "accent", "paper"), strict=True)) | {
    colour: f"series-{i}" for i, colour in enumerate(SERIES) if i
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names come from files, and a dollar sign is no formula
    "font.family": "sans-serif",
    "font.size": 11.5,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.linewidth": 1,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "lines.linewidth": 1.6,
}

_DASHED = (0, (4, 3))
_ON_PAPER: dict[str, Any] = {"facecolor": PAPER, "bbox_inches": "tight", "pad_inches": 16 / 72}

Draw = Callable[[int], Figure]


@dataclass(frozen=True)
class Point:
    """One architecture on the plot of loss against speed."""

    x: float
    y: float
    solution: int  # number of its panel on the page
    label: str
    x_error: float = 0.0
    y_error: float = 0.0
    estimated: bool = False  # the loss is the sum of replacement scores, not measured


@dataclass(frozen=True)
class Series:
    """Points that belong together; `marker` and `colour` in matplotlib's words."""

    name: str
    points: list[Point]
    marker: str = "o"
    colour: str = MUTED
    size: float = 6.0
    line: str = ""
    face: str = field(default="")  # another face colour, such as the paper's

    @property
    def plotted(self) -> list[Point]:
        """The points that a logarithmic axis can show, by speed."""
        return sorted((p for p in self.points if p.y > 0), key=lambda p: p.x)


def inline_svg(draw: Draw, name: str, label: str) -> Markup:
    """Both widths of a figure as inline SVG that takes its colours from CSS variables."""
    parts = []
    for width, kind in ((WIDE, "wide"), (NARROW, "narrow")):
        svg = _compact(_svg(draw, width, name))
        for colour, variable in VARIABLES.items():
            svg = svg.replace(colour, f"var(--{variable})")
        height = re.findall(r'viewBox="0 0 [\d.]+ ([\d.]+)"', svg)[0]
        opening = Markup('<svg xmlns:xlink="http://www.w3.org/1999/xlink" class="{}" viewBox="0 0 {} {}" {}>').format(
            kind, width, height, Markup('role="img" aria-label="{}"').format(label)
        )
        parts.append(opening + Markup(svg[svg.index(">") + 1 :]))  # noqa: S704 - matplotlib escapes the text it draws
    return Markup("").join(parts)


def _compact(svg: str) -> str:
    """The `<svg>` element of a file, with hundredths of a pixel, and without what a page has no use for."""
    svg = re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # ids that a page with several figures would repeat
    svg = re.sub(r' d="[^"]*"', lambda d: " ".join(re.sub(r"(\.\d\d)\d+", r"\1", d[0]).split("\n")), svg)
    svg = re.sub(r"<g>\s*(<path[^>]*/>)\s*</g>", r"\1", svg)
    return re.sub(r"\n\s+", "\n", svg)


def files(draw: Draw, name: str) -> dict[str, bytes]:
    """The wide figure as files to keep: `NAME.svg` and `NAME.png` (twice the resolution), on paper."""
    png = io.BytesIO()
    with mpl.rc_context(_STYLE):
        draw(WIDE).savefig(png, format="png", dpi=144, **_ON_PAPER)
    return {f"{name}.svg": _svg(draw, WIDE, name, **_ON_PAPER).encode(), f"{name}.png": png.getvalue()}


def _svg(draw: Draw, width: int, name: str, **options: Any) -> str:
    text = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": f"{name}-{width}"}):
        draw(width).savefig(text, format="svg", metadata={"Date": None}, **options)
    return text.getvalue()


def _figure(width: int, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
    return figure, figure.subplots()


def canvas(width: int, height: float) -> tuple[Figure, Axes]:
    """An empty sheet with pixel coordinates, the origin at the top left."""
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def write(
    axes: Axes, x: float, y: float, text: str, align: str = "left", colour: str = MUTED, size: float = 10.5, **more: Any
) -> None:
    axes.text(x, y, text, ha=align, va="center", color=colour, fontsize=size, **more)


def box(axes: Axes, x: float, y: float, width: float, height: float, colour: str, alpha: float = 1.0) -> None:
    look: dict[str, Any] = {"facecolor": colour, "alpha": alpha, "linewidth": 0, "antialiased": False, "clip_on": False}
    axes.add_patch(Rectangle((x, y), width, height, **look))


def pareto(series: Sequence[Series], parent_x: float, x_label: str, width: int) -> Figure:
    """Loss (log axis) against speed; the parent, whose loss is zero, is a vertical line."""
    plotted = [one for one in series if one.plotted]
    columns = 3 if width == WIDE else 1
    figure, axes = _figure(width, (400 if width == WIDE else 320) + 18 * -(-len(plotted) // columns))
    axes.axvline(parent_x, color=KEPT, linewidth=1, linestyle=_DASHED)
    top = (parent_x, 1)
    axes.annotate("parent (KL 0)", top, (5, -2), axes.get_xaxis_transform(), "offset points", color=MUTED, va="top")
    for one in plotted:
        _series(axes, one)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set(xlabel=x_label, ylabel="KL divergence from the parent (lower is better)")
    axes.xaxis.set_major_locator(MaxNLocator(4 if width == NARROW else 8, steps=[1, 2, 5, 10]))
    figure.legend(loc="outside lower left", ncols=columns, labelcolor=INK, fontsize=11)
    return figure


def _series(axes: Axes, one: Series) -> None:
    points = one.plotted
    x, y = [p.x for p in points], [p.y for p in points]
    faces = [PAPER if p.estimated else one.face or one.colour for p in points]
    if one.line:
        axes.plot(x, y, color=one.colour, linestyle=one.line, linewidth=1.4)
    x_errors, y_errors = [p.x_error for p in points], [p.y_error for p in points]
    axes.errorbar(x, y, y_errors, x_errors, fmt="none", ecolor=one.colour, elinewidth=1)
    look: dict[str, Any] = {"marker": one.marker, "edgecolors": one.colour, "linewidths": 1.3, "zorder": 3}
    marks = axes.scatter(x, y, one.size**2, faces, **look)
    marks.set_urls([f"#solution-{p.solution}" for p in points])
    (key,) = axes.plot([], [], one.marker, linestyle=one.line or "none", color=one.colour, label=one.name)
    key.set(markersize=one.size, markerfacecolor=faces[0])


def distillation(errors: pd.DataFrame, width: int) -> Figure:
    """Local error of each variant as it is cut out, after the closed form, after local distillation.

    `errors` has a row a variant, labelled by its index, and the columns `error_start, error_closed_form, error`.
    """
    columns = 3 if width == WIDE else 1
    figure, axes = _figure(width, 84 + 30 * len(errors) + (0 if width == WIDE else 30))
    places = range(len(errors))
    axes.hlines(places, errors.error, errors.error_start, color=RULE, linewidth=2)
    for name, values, face, edge in (
        ("as cut out of the parent", errors.error_start, PAPER, KEPT),
        ("after the closed form", errors.error_closed_form, KEPT, KEPT),
        ("after distillation", errors.error, ACCENT, ACCENT),
    ):
        look: dict[str, Any] = {
            "markersize": 8,
            "markerfacecolor": face,
            "markeredgecolor": edge,
            "markeredgewidth": 1.6,
        }
        axes.plot(values, places, "o", label=name, **look)
    axes.axvline(1, color=KEPT, linewidth=1, linestyle=_DASHED)
    axes.set_yticks(places, errors.index)
    axes.set(ylim=(len(errors) - 0.5, -0.5), xlabel="local error")
    axes.set_xlim(0, 1.05 * max(1.0, float(np.nanmax(errors.to_numpy()))))
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper left", ncols=columns, labelcolor=INK, fontsize=11, handletextpad=0.2)
    return figure


def healing(curve: Sequence[dict[str, float]], width: int) -> Figure:
    """Held-out KL against the tokens of healing; the first point is before it."""
    figure, axes = _figure(width, 300 if width == WIDE else 240)
    tokens, kl = [p["tokens"] for p in curve], [p["kl"] for p in curve]
    axes.axhline(kl[0], color=KEPT, linewidth=1, linestyle=_DASHED)
    axes.plot(tokens, kl, color=ACCENT, marker="o", markersize=6)
    for i, offset, align in ((0, (6, 6), "left"), (-1, (0, 9), "center")):
        axes.annotate(number(kl[i]), (tokens[i], kl[i]), offset, textcoords="offset points", ha=align)
    axes.set(ylim=(0, max(kl) * 1.15), xlabel="tokens of healing", ylabel="KL divergence from the parent")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
    return figure
