# SPDX-License-Identifier: Apache-2.0
"""The page as a whole: complete, self-contained, safe, whole or absent."""

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import yaml
from report_runs import write_run

from puzzle.errors import PuzzleError
from puzzle.reports import build as module
from puzzle.reports.build import build, compare, markdown
from puzzle.reports.data import read, summary

SECTIONS = [
    "pareto",
    "architecture",
    "scores",
    "costs",
    "distillation",
    "healing",
    "evaluation",
    "samples",
    "use",
    "provenance",
    "glossary",
]


class Page(HTMLParser):
    """A parsed page: its elements, links, ids, and the text a reader sees."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags, self.links, self.ids, self.text, self.attributes = [], [], [], "", set()
        self._script = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._script = tag in ("script", "style")
        for name, value in attrs:
            self.attributes.add(name)
            if name in ("href", "src", "xlink:href"):
                self.links.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_endtag(self, tag):
        self._script = False

    def handle_data(self, data):
        self.text += "" if self._script else data


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    run = write_run(tmp_path_factory.mktemp("run") / "run")
    build(run)
    return run


def test_sections_come_in_order_and_state_the_result(built):
    page = Page(built.path / "report" / "index.html")
    assert [i for i in page.ids if i in SECTIONS] == SECTIONS
    child, parent = (read(built).models[m] for m in ("child", "parent"))
    speed = child["throughput_tokens_per_s"] / parent["throughput_tokens_per_s"]
    assert f"generates text {speed:.2f}× as fast" in page.text
    assert "perplexity rises from 17.3 to 20.1" in page.text
    assert "20.05± 0.26" in page.text  # a standard error stands beside its value
    assert "that a list can be changed, while a tuple is fixed" in page.text
    assert "The median difference is 4.2% for prefill and 3.8% for decode" in page.text.replace("\u202f", "")


def test_one_file_under_six_megabytes_that_needs_no_network(built):
    file = built.path / "report" / "index.html"
    assert file.stat().st_size < 3e6
    page = Page(file)
    assert page.tags.count("script") == 3
    for link in page.links:
        if link.startswith("#"):
            assert link.removeprefix("#") in page.ids or re.fullmatch(r"#m[0-9a-f]+|#p[0-9a-f]+", link)
        elif link != "data:,":
            assert (built.path / "report" / link).is_file()
    style = re.search(r"<style>(.*?)</style>", file.read_text(), re.S)[1]
    assert "url(" not in style and "@import" not in style


@pytest.mark.slow
def test_a_deep_parent_still_fits(tmp_path):
    run = write_run(tmp_path / "deep", layers=126)
    build(run)
    assert (run.path / "report" / "index.html").stat().st_size < 6e6


def test_ids_are_unique(built):
    ids = Page(built.path / "report" / "index.html").ids
    figures_own = [i for i in ids if not re.fullmatch(r"[mpCh][0-9a-f_]+", i)]
    assert len(figures_own) == len(set(figures_own))


def test_files_beside_the_page_hold_the_figures(built):
    report, data = built.path / "report", read(built)
    assert json.loads((report / "summary.json").read_text()) == summary(data)
    pd.testing.assert_frame_equal(
        pd.read_csv(report / "tables" / "scores.csv"), data.scores, check_dtype=False, check_exact=False
    )
    costs = pd.read_csv(report / "tables" / "costs.csv").set_index(["model", "cost"])
    assert costs.measured["child", "prefill_ms"] == pytest.approx(data.models["child"]["prefill_ms"])
    assert pd.read_csv(report / "tables" / "front_check.csv").to_dict("records") == data.front_check
    chosen = pd.read_csv(report / "tables" / "architecture.csv")
    assert list(chosen[chosen.subblock == "ffn"].variant) == list(data.architecture.ffn)
    drawn = {"front", "architecture", "scores", "distillation", "healing"}
    assert {f.stem for f in (report / "figures").iterdir()} == drawn
    front = pd.read_csv(report / "tables" / "front.csv")
    assert len(front) == 6 + 3 + 6 + 2  # sweep estimated, sweep measured, baselines, child twice


HOSTILE = "<script>alert(1)</script>"


def hostile_run(path):
    run = write_run(path, parent='models\\"><img src=x onerror=alert(1)> <script>')
    evaluation = json.loads((path / "evaluation.json").read_text())
    evaluation["machine"] = dict.fromkeys(("cpu", "device", "os"), HOSTILE) | {"cores": 2, "memory_bytes": 1}
    evaluation["samples"] = [dict.fromkeys(("prompt", "parent", "child", "child_before_healing"), HOSTILE)]
    (path / "evaluation.json").write_text(json.dumps(evaluation))
    baselines = json.loads((path / "solutions" / "baselines.json").read_text())
    for baseline in baselines:
        baseline["method"] = HOSTILE
    (path / "solutions" / "baselines.json").write_text(json.dumps(baselines))
    manifest = json.loads((path / "manifest.json").read_text())
    for entry in manifest["stages"].values():
        entry.setdefault("versions", {})[HOSTILE] = HOSTILE
        entry.setdefault("outputs", {})[HOSTILE] = {"sha256": HOSTILE}
    manifest["stages"][HOSTILE] = manifest["stages"]["data"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    return run


def test_everything_from_files_stays_text(built, tmp_path):
    run = hostile_run(tmp_path / "hostile")
    build(run)
    page, plain = (Page(r.path / "report" / "index.html") for r in (run, built))
    assert page.tags.count("script") == plain.tags.count("script")
    assert page.tags.count("img") == 0 and "onerror" not in page.attributes
    assert page.text.count(HOSTILE) > 10
    assert "<script> generates text" in page.text
    source = (run.path / "report" / "index.html").read_text()
    payload = re.search(r'id="front-data">(.*?)</script>', source, re.S)[1]
    assert "<" not in payload
    names = [series["name"] for series in json.loads(payload)["series"]]
    assert "baseline: &lt;script&gt;alert(1)&lt;/script&gt;" in names  # Plotly reads names as HTML
    assert "<script>" not in markdown(run)


def test_plotly_is_packed_whole(built):
    source = (built.path / "report" / "index.html").read_text()
    packed = re.search(r'id="plotly-gzip">([A-Za-z0-9+/=]*)</script>', source)[1]
    assert gzip.decompress(base64.b64decode(packed)).decode() == module.get_plotlyjs()


def test_a_run_without_sweep_baselines_healing_and_closed_forms(tmp_path):
    run = write_run(tmp_path / "run")
    for absent in ("solutions/front.json", "solutions/baselines.json", "healing/curve.json"):
        (run.path / absent).unlink()
    index = pd.read_parquet(run.path / "library" / "index.parquet")
    index.assign(error_closed_form=None).to_parquet(run.path / "library" / "index.parquet")
    build(run)
    page = Page(run.path / "report" / "index.html")
    assert [i for i in page.ids if i in SECTIONS] == SECTIONS
    assert "did no healing" in page.text
    assert "grey marks" not in page.text and "The line joins" not in page.text
    assert "after solving" not in page.text and "stand-ins that have weights" in page.text
    assert not (run.path / "report" / "figures" / "healing.svg").exists()


def test_a_library_of_removals_alone(tmp_path):
    run = write_run(tmp_path / "run")
    index = pd.read_parquet(run.path / "library" / "index.parquet")
    index[index.variant == "no_op"].to_parquet(run.path / "library" / "index.parquet")
    calls = []
    build(run, lambda *call: calls.append(call))
    assert "nothing to fit" in Page(run.path / "report" / "index.html").text
    assert calls[0] == ("figures", 0, 4) and calls[-1] == ("figures", 4, 4)


def test_a_report_is_replaced_whole_or_not_at_all(built, monkeypatch):
    def contents():
        return {p: p.read_bytes() for p in built.path.rglob("*") if p.is_file()}

    def full(*_):
        raise OSError(28, "No space left on device")

    before = contents()
    monkeypatch.setattr(module, "_write_tables", full)
    with pytest.raises(PuzzleError, match="disk is full"):
        build(built)
    assert contents() == before
    monkeypatch.undo()
    build(built)
    assert contents() == before  # the same run gives the same bytes


def test_comparison_overlays_runs_relative_to_their_parents(built, tmp_path):
    other = write_run(tmp_path / "other", layers=8)
    compare([built, other], tmp_path / "both")
    page = Page(tmp_path / "both" / "index.html")
    assert "2 runs compared" in page.text and str(other.path) in page.text
    front = pd.read_csv(tmp_path / "both" / "tables" / "front.csv")
    own = front[front.series == f"{built.path}: child"]["speed (parent = 1)"].item()
    child, parent = (read(built).models[m] for m in ("child", "parent"))
    assert own == pytest.approx(child["throughput_tokens_per_s"] / parent["throughput_tokens_per_s"])
    assert set(front.series.str.rsplit(": ", n=1).str[0]) == {str(built.path), str(other.path)}


def test_the_card_keeps_the_parents_licence_and_goes_into_the_child(tmp_path):
    parent = tmp_path / "parent"
    parent.mkdir()
    (parent / "README.md").write_text("---\nlicense: llama3.1\nlanguage: [en, de]\nother: 1\n---\n# Text\n")
    run = write_run(tmp_path / "run", parent=str(parent))
    run.child.mkdir(parents=True)
    build(run)
    card = (run.child / "README.md").read_text()
    assert card == (run.path / "report" / "card.md").read_text() == markdown(run)
    found = yaml.safe_load(card.split("---")[1])
    assert (found["license"], found["language"]) == ("llama3.1", ["en", "de"])
    assert "base_model" not in found


def test_model_card(built):
    card = markdown(built)
    metadata, text = re.fullmatch("---\n(.*?)\n---\n\n(.*)", card, re.DOTALL).groups()
    assert text.startswith("# toy-llama, compressed by Puzzle\n")
    assert yaml.safe_load(metadata)["pipeline_tag"] == "text-generation"
    assert yaml.safe_load(metadata)["base_model"] == "models/toy-llama"  # no such folder: a name on the hub
    assert "- Target: " in text and "16,384 tokens to train with" in text
    rows = [line for line in card.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 10 and {row.count("|") for row in rows} == {5}
    assert "| Perplexity | 17.31 ± 0.21 | 24.92 ± 0.34 | 20.05 ± 0.26 |" in rows
    assert f"path = {str(built.path / 'children' / 'child')!r}" in card
