# SPDX-License-Identifier: Apache-2.0
"""The drawings: well-formed, themed, deterministic, and true to the data."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from report_runs import SHAPE

from puzzle.architecture import Architecture
from puzzle.reports import figures, layers
from puzzle.reports.figures import Point, Series

CHOSEN = Architecture(("parent", "kv1", "linear", "no_op"), ("ffn128", "parent", "no_op", "ffn64"))


def draw_architecture(width):
    return layers.architecture(CHOSEN, SHAPE, width)


def front(width, name="a $\\frac{1}$ <b>&\"'"):
    points = [Point(1.2, 0.3, 0, "x", 0.01, 0.02), Point(1.5, 0.8, 1, "y", estimated=True), Point(1.0, 0.0, 2, "z")]
    return figures.pareto([Series(name, points), Series("nothing to plot", [])], 1.0, "speed", width)


@pytest.mark.parametrize("draw", [draw_architecture, front])
def test_inline_svg_is_well_formed_and_follows_the_page(draw):
    svg = figures.inline_svg(draw, "name", 'a "label" <i>')
    wide, narrow = ElementTree.fromstring(f"<div>{svg}</div>")
    assert (wide.get("class"), narrow.get("class")) == ("wide", "narrow")
    assert wide.get("aria-label") == 'a "label" <i>'
    used = set(re.findall(r"#[0-9a-f]{6}\b", svg))
    assert not used & set(figures.COLOURS)  # each colour of the palette is a variable by now
    assert "var(--ink)" in svg or "var(--muted)" in svg


def test_names_from_files_stay_text():
    svg = figures.inline_svg(front, "front", "label")
    texts = [e.text for e in ElementTree.fromstring(f"<div>{svg}</div>").iter() if e.tag.endswith("text")]
    assert "a $\\frac{1}$ <b>&\"'" in texts


def test_the_loss_of_the_parent_is_no_point_of_a_logarithmic_axis():
    assert [p.label for p in Series("s", [Point(1, 0.0, 0, "parent"), Point(2, 1.0, 1, "child")]).plotted] == ["child"]


def test_each_point_links_to_its_panel():
    svg = figures.inline_svg(front, "front", "label")
    assert set(re.findall(r'xlink:href="#solution-(\d)"', svg)) == {"0", "1"}


def test_files_are_the_same_each_time():
    first, second = figures.files(front, "front"), figures.files(front, "front")
    assert first == second
    assert first["front.png"].startswith(b"\x89PNG")
    ElementTree.fromstring(first["front.svg"])


def test_silhouette_keeps_the_areas():
    paths = layers.silhouette(CHOSEN, SHAPE)

    def area(path):
        return sum(abs(float(v)) for v in re.findall(r"1v(-?[\d.]+)h", path))

    assert area(paths["kept"]) == 2  # attention of layer 0, FFN of layer 1
    assert area(paths["changed"]) == pytest.approx(0.25 + 0.5 + 0.25 + 0.06)  # kv1, ffn128, ffn64, linear
    assert area(paths["ghost"]) == 6


def test_heatmap_marks_the_chosen_variants(run):
    from puzzle.reports.data import read

    data = read(run)
    names = {subblock: data.variants(subblock) for subblock in ("attention", "ffn")}
    axes = layers.heatmap(data.scores, names, data.architecture, data.shape, figures.WIDE).axes[0]
    assert len(axes.lines) == len(data.architecture.changes)
    key = 40
    assert len(axes.patches) == len(data.scores) + key
