# SPDX-License-Identifier: Apache-2.0
"""The plot of loss against speed as data: series to draw, a panel for each architecture. No torch."""

from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import pandas as pd
from markupsafe import escape

from puzzle.architecture import Architecture
from puzzle.costs import measure
from puzzle.reports import figures
from puzzle.reports.data import Candidate, RunData
from puzzle.reports.figures import Point, Series
from puzzle.reports.layers import silhouette
from puzzle.reports.words import METHODS, changed_layers, changes_sentence, number, plus_minus

_MARKERS = {"s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down", "P": "cross", "X": "x"}
_SYMBOLS = {**_MARKERS, "o": "circle", "*": "star"}
_DASHES = {"-": "solid", "--": "dash", ":": "dot"}


@dataclass
class Front:
    """Loss against speed of one run or several.

    Attributes:
        relative: Speeds are given in multiples of the parent's; otherwise in tokens/s.
        parent_x: The parent's speed.
        series: What is plotted.
        panels: For each architecture, what a click shows; `Point.solution` is its place in this list.
    """

    relative: bool
    parent_x: float = 1.0
    series: list[Series] = field(default_factory=list)
    panels: list[dict[str, Any]] = field(default_factory=list)

    @property
    def x_label(self) -> str:
        return "speed (parent = 1)" if self.relative else "throughput in tokens/s (more is better)"

    def add(self, data: RunData, name: str = "", colour: str = figures.ACCENT) -> dict[str, Any]:
        """Add a run: its sweep, its baselines, its child before and after healing; returns the child's panel.

        A run with a `name` is one of several, and comes without its baselines.
        """
        reader = _Reader(self, data, name)
        prefix = f"{name}: " if name else ""
        sweep = [reader.candidate(c, "best found for this speed", estimate=True) for c in data.sweep]
        self.series.append(Series(f"{prefix}best found, loss estimated", sweep, colour=colour, line=":", size=5.5))
        true = [reader.candidate(c, "best found for this speed") for c in data.sweep if c.true]
        self.series.append(Series(f"{prefix}best found, loss measured", true, colour=colour, line="-", size=5.5))
        if not name:
            others = [c for c in data.baselines if c.solution.method != "refined"]  # it is the child before healing
            self.series += reader.baselines(others)
        before, after = reader.model("child_before_healing"), reader.model("child")
        self.series.append(Series(f"{prefix}child before healing", [before], "o", colour, 9.0, face=figures.GHOST))
        self.series.append(Series(f"{prefix}child", [after], "*", colour, 15.0))
        if not self.relative:
            self.parent_x = data.models["parent"]["throughput_tokens_per_s"]
        self.series = [s for s in self.series if s.points]
        return self.panels[after.solution]

    def table(self) -> pd.DataFrame:
        """All points, a row each."""
        rows = [
            (
                s.name,
                p.x,
                p.y,
                p.y_error,
                "estimated" if p.estimated else "measured",
                self.panels[p.solution]["changes"],
            )
            for s in self.series
            for p in s.points
        ]
        return pd.DataFrame(rows, columns=["series", self.x_label, "kl", "kl_stderr", "kl_is", "changes"])

    def payload(self) -> dict[str, Any]:
        """What the page's script hands to Plotly. Texts are HTML-escaped, since Plotly reads them as HTML."""
        return {
            "parent": self.parent_x,
            "x": self.x_label,
            "series": [
                {
                    "name": str(escape(s.name)),
                    "colour": figures.VARIABLES[s.colour],
                    "face": figures.VARIABLES[s.face or s.colour],
                    "symbol": _SYMBOLS[s.marker],
                    "dash": _DASHES.get(s.line),
                    "size": s.size,
                    "points": [
                        {
                            "x": p.x,
                            "y": p.y,
                            "dx": p.x_error,
                            "dy": p.y_error,
                            "estimated": p.estimated,
                            "solution": p.solution,
                            "text": self._hover(p),
                        }
                        for p in s.plotted
                    ],
                }
                for s in self.series
            ],
        }

    def _hover(self, point: Point) -> str:
        panel = self.panels[point.solution]
        lines = [*panel["facts"], *(f"{c['half']}, {c['what']}: {c['count']}" for c in panel["layers"])]
        return "<br>".join([f"<b>{escape(point.label)}</b>", *(str(escape(line)) for line in lines)])


@dataclass
class _Reader:
    """Turns candidates and measured models of one run into points, and notes their architectures as panels."""

    front: Front
    data: RunData
    name: str

    def candidate(self, candidate: Candidate, label: str, estimate: bool = False) -> Point:
        solution, true = candidate.solution, None if estimate else candidate.true
        parent = self.data.predicted_parent()["throughput_tokens_per_s"]
        throughput = measure("throughput", solution.costs, self.data.scenario)
        kl, error = (true["kl"], true.get("kl_stderr") or 0.0) if true else (solution.score, 0.0)
        facts = [
            f"{number(throughput)} tokens/s predicted ({number(throughput / parent)}× the parent)",
            _kl_words(kl, error, estimated=not true),
        ]
        panel = self._panel(solution.architecture, label, facts)
        return Point(
            throughput / (parent if self.front.relative else 1.0), kl, panel, label, y_error=error, estimated=not true
        )

    def baselines(self, candidates: list[Candidate]) -> list[Series]:
        """A series, with its own marker, for each method."""
        methods = dict.fromkeys(c.solution.method for c in candidates)
        found = []
        for method, marker in zip(methods, cycle(_MARKERS)):
            label = METHODS.get(method, f"baseline: {method}")
            points = [self.candidate(c, label) for c in candidates if c.solution.method == method]
            found.append(Series(label, points, marker))
        return found

    def model(self, name: str) -> Point:
        own, parent = self.data.models[name], self.data.models["parent"]["throughput_tokens_per_s"]
        throughput, spread = own["throughput_tokens_per_s"], self.data.throughput_spread(name)
        label = {"child": "the child", "child_before_healing": "the child before healing"}[name]
        facts = [
            f"{number(throughput)} tokens/s measured ({number(throughput / parent)}× the parent)",
            _kl_words(own["kl"], own["kl_stderr"], estimated=False),
        ]
        panel = self._panel(self.data.architecture, label, facts)
        unit = parent if self.front.relative else 1.0
        return Point(throughput / unit, own["kl"], panel, label, spread / unit, own["kl_stderr"])

    def _panel(self, architecture: Architecture, label: str, facts: list[str]) -> int:
        panels = self.front.panels
        panels.append(
            {
                "title": f"{self.name}: {label}" if self.name else label[0].upper() + label[1:],
                "facts": facts,
                "changes": changes_sentence(architecture),
                "layers": changed_layers(architecture, self.data.shape),
                "count": architecture.num_layers,
                "paths": silhouette(architecture, self.data.shape),
            }
        )
        return len(panels) - 1


def _kl_words(kl: float, error: float, estimated: bool) -> str:
    value, spread = plus_minus(kl, error)
    text = f"KL {value} ± {spread}" if spread else f"KL {value}"
    return f"{text} (sum of replacement scores)" if estimated else f"{text} measured"
