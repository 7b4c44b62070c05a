# SPDX-License-Identifier: Apache-2.0
"""Text to packed blocks: nothing lost, nothing shared between splits, and one sentence for whatever is wrong."""

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import byte_tokenizer

from puzzle import corpus, data
from puzzle.config import DataConfig
from puzzle.errors import ConfigError

END = 256


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUZZLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def small(source: object, **changes: object) -> DataConfig:
    tokens = {f"{name}_tokens": 40 for name in data.SPLITS}
    return DataConfig(**{"source": str(source), "seq_length": 16, **tokens, **changes})


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbered(path: Path, count: int = 60) -> Path:
    return write_jsonl(path, [{"text": f"document {i} " + "abc" * (i % 7)} for i in range(count)])


def texts_of(rows: torch.Tensor) -> list[str]:
    """The documents of a split; the last one may be cut."""
    return byte_tokenizer().decode(rows.flatten().tolist()).split("<end>")


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=12), st.integers(1, 7), st.integers(1, 60))
def test_packing_keeps_every_token_once_and_in_order(documents: list[list[int]], seq: int, tokens: int) -> None:
    rest = iter(documents)
    packed = data.pack(rest, seq, tokens)
    stream = list(chain.from_iterable(documents))
    wanted = next(n for n in range(tokens, tokens + seq) if n % seq == 0)
    kept = packed.blocks.flatten().tolist()
    assert kept == stream[: len(kept)]
    assert packed.blocks.shape[1] == seq
    assert len(kept) == (wanted if len(stream) >= wanted else len(stream) // seq * seq)
    assert list(rest) == documents[packed.documents :]
    assert packed.tokens_read == sum(map(len, documents[: packed.documents]))
    assert packed.tokens_read - len(documents[packed.documents - 1] if packed.documents else []) < wanted


def test_splits_hold_whole_sequences_of_disjoint_documents(tmp_path: Path) -> None:
    source = numbered(tmp_path / "a.jsonl")
    data.prepare(small(source, training_tokens=300), byte_tokenizer(), 0, tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "splits.json").read_text())
    known = set(json.loads(line)["text"] for line in source.read_text().splitlines())
    seen: set[str] = set()
    for name, sequences in (("calibration", 3), ("training", 19), ("scoring", 3), ("validation", 3)):
        rows = data.load_split(tmp_path / "out", name)
        assert rows.shape == (sequences, 16) and rows.dtype == torch.int64
        *whole, cut = texts_of(rows)
        assert set(whole) <= known and any(text.startswith(cut) for text in known - seen)
        assert not seen & set(whole)
        seen |= set(whole)
        assert summary[name]["tokens"] == sequences * 16 and summary[name]["sequences"] == sequences
        assert summary[name]["documents"] == len(whole) + (cut != "")
    assert summary["corpus"]["documents"] == 60 and summary["corpus"]["source"] == str(source)


def test_equal_and_blank_documents_count_once_and_not_at_all(tmp_path: Path) -> None:
    rows = [{"text": t} for t in ["same text here", "same text here", " \n", "", None] for _ in range(9)]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    block = data.blocks(small(source, seq_length=15), byte_tokenizer(), 15, 0)
    assert texts_of(block) == ["same text here", ""]
    with pytest.raises(ConfigError, match="15 tokens in 1 documents, but 16 are asked"):
        data.blocks(small(source, seq_length=8), byte_tokenizer(), 16, 0)


def test_the_order_depends_on_the_seed_and_the_text_alone(tmp_path: Path) -> None:
    first = numbered(tmp_path / "a.jsonl")
    second = tmp_path / "b.jsonl"
    second.write_text("".join(reversed(first.read_text().splitlines(keepends=True))))
    one, two = (data.blocks(small(source), byte_tokenizer(), 200, 3) for source in (first, second))
    other = data.blocks(small(first), byte_tokenizer(), 200, 4)
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_more_training_tokens_leave_the_other_splits_alone(tmp_path: Path) -> None:
    source = numbered(tmp_path / "a.jsonl")
    for tokens in (40, 400):
        data.prepare(small(source, training_tokens=tokens), byte_tokenizer(), 0, tmp_path / str(tokens))
    for name in ("calibration", "scoring", "validation"):
        assert torch.equal(data.load_split(tmp_path / "40", name), data.load_split(tmp_path / "400", name))
    few, many = (data.load_split(tmp_path / n, "training") for n in ("40", "400"))
    assert torch.equal(few, many[: len(few)])
    validation = data.load_split(tmp_path / "40", "validation")
    assert torch.equal(data.blocks(small(source), byte_tokenizer(), 40, 0), validation)


def test_another_process_and_hash_seed_give_the_same_files(tmp_path: Path) -> None:
    source = numbered(tmp_path / "a.jsonl")
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from test_data import data, small, byte_tokenizer\n"
        "data.prepare(small(sys.argv[2]), byte_tokenizer(), 0, Path(sys.argv[3]))"
    )
    arguments = [sys.executable, "-c", code, str(Path(__file__).parent), str(source), str(tmp_path / "there")]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    subprocess.run(arguments, check=True, env=environment)
    data.prepare(small(source), byte_tokenizer(), 0, tmp_path / "here")
    one, two = ((tmp_path / name / "splits.json").read_text() for name in ("here", "there"))
    assert one == two


def test_tokens_that_the_tokenizer_adds_are_kept_and_the_end_is_not_doubled(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "ab"}, {"text": "cd"}])
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<end> $A <end>", special_tokens=[("<end>", END)]
    )
    ids = data.blocks(small(source, seq_length=8), tokenizer, 8, 0).flatten().tolist()
    assert [i == END for i in ids] == [True, False, False, True] * 2


def test_a_tokenizer_without_an_end_token_adds_nothing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "abcdefgh"}])
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    assert END not in data.blocks(small(source, seq_length=8), tokenizer, 8, 0)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv"])
def test_local_files_of_each_kind(tmp_path: Path, kind: str) -> None:
    file, rows = tmp_path / f"a.{kind}", [{"body": "one, two", "n": 1}, {"body": "three", "n": 2}]
    if kind == "jsonl":
        write_jsonl(file, rows)
    elif kind == "json":
        file.write_text(json.dumps(rows))
    elif kind == "parquet":
        pq.write_table(pa.table({"body": pa.array([r["body"] for r in rows], pa.large_string())}), file)
    else:
        file.write_text('body,n\n"one, two",1\nthree,2\n')
    found = data.documents(small(file, text_column="body"))
    assert found.column_names == ["text"] and list(found["text"]) == ["one, two", "three"]


def test_text_files_are_cut_into_documents_between_lines(tmp_path: Path) -> None:
    lines = [f"line {i} of many" for i in range(2_000)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    found = list(data.documents(small(tmp_path / "a.txt"))["text"])
    assert "\n".join(found).split("\n") == lines
    assert all(3_999 <= len(text) < 4_100 for text in found[:-1]) and len(found) > 5


def test_a_folder_of_files_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_text("from text")
    (tmp_path / "in" / "README.md").write_text("not data")
    write_jsonl(tmp_path / "in" / "deep" / "b.jsonl", [{"text": "from lines", "more": 1}])
    pq.write_table(pa.table({"text": ["from a table"]}), tmp_path / "in" / "c.parquet")
    assert sorted(data.documents(small(tmp_path / "in"))["text"]) == ["from a table", "from lines", "from text"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", None, "a.txt: no such file or folder"),
        ("a.txt", b"", "a.txt: the data is empty"),
        ("a.txt", b" \n\n \n", "a.txt: the data is empty"),
        ("a.txt", b"\xff\xfe", "a.txt: is not UTF-8 text"),
        ("a.jsonl", b"", "a.jsonl: the data is empty"),
        (
            "a.jsonl",
            b'{"body": "x", "id": 1}\n',
            "no column 'text' .*its columns: body, id",
        ),
        ("a.jsonl", b'{"text": 5}\n', "the column 'text' holds int64 values, not text"),
        ("a.jsonl", b'{"text": ["x"]}\n', "the column 'text' holds nested values, not text"),
        ("a.jsonl", b"{oops\n", r"a.jsonl: cannot be read as a dataset \("),
        ("a.csv", b"text\n", "a.csv: cannot be read as a dataset .*no data"),
        ("a.parquet", b"PAR1 or not", r"a.parquet: cannot be read as a dataset \("),
        ("a.docx", b"x", "a.docx: a .txt, .jsonl, .json, .parquet, .csv file or a folder of such files is expected"),
    ],
)
def test_wrong_files_get_one_sentence(tmp_path: Path, name: str, content: bytes | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=sentence) as error:
        data.prepare(small(tmp_path / name), byte_tokenizer(), 0, tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="or a folder of such files is expected"):
        data.documents(small(tmp_path))


def test_too_little_text_says_how_much_there_is(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * 49 + str(i)} for i in range(4)])
    with pytest.raises(ConfigError, match="holds 204 tokens in 4 documents, but 592 are asked for in 4 splits"):
        data.prepare(small(source, training_tokens=439), byte_tokenizer(), 0, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unreachable_hub_names_the_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"hub cannot be reached.*give a local \.txt.*or python-docs"):
        data.documents(small("somebody/something"))


def test_a_hub_dataset_gets_subset_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: str, **options: str) -> datasets.Dataset:
        assert args == ("somebody/something", "en") and options == {"split": "test"}
        return datasets.Dataset.from_dict({"content": ["from the hub"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = data.documents(small("somebody/something", subset="en", split="test", text_column="content"))
    assert list(found["text"]) == ["from the hub"]


def test_progress_bars_of_datasets_are_left_as_they_were(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    datasets.enable_progress_bars()
    data.documents(small(numbered(tmp_path / "a.jsonl")))
    assert not datasets.are_progress_bars_disabled()
    assert capfd.readouterr().err == ""


def test_progress_counts_tokens_up_to_the_total(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    data.blocks(small(numbered(tmp_path / "a.jsonl")), byte_tokenizer(), 90, 0, lambda *call: calls.append(call))
    assert {(what, total) for what, _, total in calls} == {("tokenising", 96)}
    assert sorted(calls) == calls and calls[-1][1] == 96


@pytest.mark.parametrize(("content", "reason"), [(None, "it is missing"), (b"PAR1", "it is damaged")])
def test_a_split_that_cannot_be_read(tmp_path: Path, content: bytes | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "training.parquet").write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        data.load_split(tmp_path, "training")


def test_splits_survive_the_file_format(tmp_path: Path) -> None:
    data.prepare(small(numbered(tmp_path / "a.jsonl")), byte_tokenizer(), 0, tmp_path / "out")
    column = datasets.Dataset(pq.read_table(tmp_path / "out" / "training.parquet"))["input_ids"]
    assert np.array_equal(np.array(column[:]), data.load_split(tmp_path / "out", "training").numpy())


SOURCE = '''"""A module that has a docstring of its own. {pad}"""
def first():
    """Says what the first function does. {pad}"""
class Outer:
    """A class, which is a document. {pad}"""
    def method(self):
        """Says what the method does."""
    class Inner:
        """A class inside a class. {pad}"""
def second():
    return "no docstring"
class Short:
    """Too short."""
'''


def test_docstrings_make_a_document_per_module_and_class(tmp_path: Path) -> None:
    pad = "word " * 40
    (tmp_path / "a.py").write_text(SOURCE.format(pad=pad))
    (tmp_path / "b.py").write_text("def broken(:\n")
    (tmp_path / "c.py").write_text(SOURCE.format(pad=pad))
    found = corpus.docstrings(sorted(tmp_path.glob("*.py")))
    assert found == [
        f"A module that has a docstring of its own. {pad}\n\nfirst\nSays what the first function does. {pad}",
        f"A class, which is a document. {pad}\n\nmethod\nSays what the method does.",
        f"A class inside a class. {pad}",
    ]


def test_long_modules_are_cut_between_functions(tmp_path: Path) -> None:
    functions = "\n".join(f'def f{i}():\n    """{"word " * 300}{i}"""' for i in range(7))
    (tmp_path / "a.py").write_text(functions)
    found = corpus.docstrings([tmp_path / "a.py"])
    assert [text.count("word ") for text in found] == [900, 900, 300]
    assert [text.split("\n")[0] for text in found] == ["f0", "f3", "f6"]


def test_python_docs_are_read_once_and_then_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "lib"
    (library / "tests").mkdir(parents=True)
    (library / "a.py").write_text(SOURCE.format(pad="word " * 40))
    (library / "tests" / "b.py").write_text(f'"""{"not in the corpus " * 40}"""')
    monkeypatch.setattr(corpus, "_PACKAGES", ())
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(library))
    first = list(data.documents(small("python-docs"))["text"])
    assert len(first) == 3 and not any("not in the corpus" in text for text in first)
    (library / "a.py").unlink()
    assert list(data.documents(small("python-docs"))["text"]) == first
