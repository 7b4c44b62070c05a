# SPDX-License-Identifier: Apache-2.0
"""Text in, packed token blocks out: documents, disjoint splits, one parquet file per split.

Documents come from a Hugging Face dataset, from local files, or from `python-docs`: the docstrings of the installed
Python packages, which need no download.
"""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Dataset

from puzzle.config import DataConfig
from puzzle.corpus import pieces, python_docs
from puzzle.errors import ConfigError
from puzzle.run import Progress, atomic, silent, write_json

PYTHON_DOCS = "python-docs"
SPLITS = ("calibration", "training", "scoring", "validation")
# Training is filled last, so that asking for more of it leaves the splits that judge as they are.
_FILL_ORDER = ("validation", "scoring", "calibration", "training")

_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_SUFFIXES = (".txt", *_LOADERS)


def documents(config: DataConfig, progress: Progress = silent) -> Dataset:
    """The documents of `config.source`, in the source's order, as a dataset with the one column `text`.

    `python-docs` depends on the versions of Python, numpy, pandas, torch and transformers that are installed;
    `prepare` records the hash of what it found.

    Raises:
        ConfigError: the source does not exist, cannot be read or reached, lacks the text column, or is empty.
    """
    with _quiet():
        found = _read(config, progress)
    if not any(text.strip() for batch in found.iter(1_000) for text in batch["text"] if text):
        raise ConfigError(f"{config.source}: the data is empty; it holds no text")
    return found


def _read(config: DataConfig, progress: Progress) -> Dataset:
    path = Path(config.source).expanduser()
    if config.source == PYTHON_DOCS:
        return _table(python_docs(progress))
    if path.exists():
        return _local(path, config.text_column)
    if path.suffix.lower() in _SUFFIXES or config.source.startswith((".", "/", "~")):
        raise ConfigError(f"{config.source}: no such file or folder")
    return _hub(config)


def _local(path: Path, column: str) -> Dataset:
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    known = [p for p in files if p.suffix.lower() in _SUFFIXES]
    if not known:
        raise ConfigError(f"{path}: a {', '.join(_SUFFIXES)} file or a folder of such files is expected")
    texts = [piece for p in known if p.suffix.lower() == ".txt" for piece in pieces(_read_text(p).splitlines(), "\n")]
    parts = [_table(texts)] if texts else []
    for suffix, loader in _LOADERS.items():
        if names := [str(p) for p in known if p.suffix.lower() == suffix and p.stat().st_size]:
            parts.append(_text_column(_load(path, loader, data_files=names, split="train"), column, path))
    return datasets.concatenate_datasets(parts) if parts else _table([])


def _hub(config: DataConfig) -> Dataset:
    try:
        found = _load(config.source, config.source, config.subset, split=config.split)
    except ConnectionError:
        raise ConfigError(
            f"{config.source}: no such file, and the Hugging Face hub cannot be reached to look for a dataset of that "
            f"name; give a local {', '.join(_SUFFIXES)} file, or {PYTHON_DOCS}, which needs no network"
        ) from None
    return _text_column(found, config.text_column, config.source)


def _load(source: str | Path, *args: Any, **options: Any) -> Dataset:
    """`datasets.load_dataset`, its errors in one sentence."""
    try:
        return datasets.load_dataset(*args, **options)
    except ConnectionError:
        raise
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(f"{source}: cannot be read as a dataset ({reason[:300]})") from None


def _text_column(found: Dataset, column: str, source: str | Path) -> Dataset:
    if column not in found.column_names:
        names = ", ".join(found.column_names) or "none"
        raise ConfigError(f"{source}: has no column {column!r} for the text (set text_column; its columns: {names})")
    dtype = getattr(found.features[column], "dtype", "nested")
    if dtype not in ("string", "large_string", "null"):
        raise ConfigError(f"{source}: the column {column!r} holds {dtype} values, not text")
    found = found.select_columns([column])
    if column != "text":
        found = found.rename_column(column, "text")
    return found.cast_column("text", datasets.Value("string"))


def _table(texts: list[str]) -> Dataset:
    return Dataset(pa.table({"text": pa.array(texts, pa.string())}))


@contextmanager
def _quiet() -> Iterator[None]:
    """Switch the progress bars of `datasets` and the hub's retry messages off for a while."""
    hub = logging.getLogger("huggingface_hub")
    level, silenced = hub.level, datasets.are_progress_bars_disabled()
    hub.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        hub.setLevel(level)
        if not silenced:
            datasets.enable_progress_bars()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None


@dataclass(frozen=True)
class Packed:
    """Token ids `[sequences, seq]` (int32) and what they were made of."""

    blocks: np.ndarray
    documents: int
    tokens_read: int  # tokens of those documents; what did not fit into the last sequence is dropped


def pack(encoded: Iterator[list[int]], seq_length: int, tokens: int) -> Packed:
    """Lay documents end to end and cut them into sequences: at least `tokens`, rounded up to whole sequences.

    Takes no more documents from `encoded` than it needs, and returns fewer sequences when they run out.
    """
    wanted = _whole(tokens, seq_length)
    parts: list[np.ndarray] = []
    read = 0
    while read < wanted and (ids := next(encoded, None)) is not None:
        parts.append(np.asarray(ids, dtype=np.int32))
        read += len(ids)
    stream = np.concatenate(parts) if parts else np.empty(0, np.int32)
    kept = min(read, wanted) // seq_length * seq_length
    return Packed(stream[:kept].reshape(-1, seq_length), len(parts), read)


def _whole(tokens: int, seq_length: int) -> int:
    return -(-tokens // seq_length) * seq_length


def prepare(config: DataConfig, tokenizer: Any, seed: int, folder: Path, progress: Progress = silent) -> None:
    """Write `folder/NAME.parquet` (column `input_ids`) for each of `SPLITS`, and `folder/splits.json`.

    Equal documents are kept once. The order of the documents is that of a hash of seed and text, so it depends on
    nothing else; whole documents go to one split each, as they come. They are tokenised only until the splits are
    full. `splits.json` has per split `tokens`, `sequences`, `documents` and `sha256` (of the ids as little-endian
    int32), and under `corpus` the source with its number of documents and their hash, whatever their order.

    Raises:
        ConfigError: as `documents`, or there is not enough text for the splits.
    """
    tokens = {name: getattr(config, f"{name}_tokens") for name in _FILL_ORDER}
    packed, corpus = _fill(config, tokenizer, tokens, seed, progress)
    for name in SPLITS:
        with atomic(folder / f"{name}.parquet") as temporary:
            flat = pa.array(packed[name].blocks.reshape(-1))
            rows = pa.FixedSizeListArray.from_arrays(flat, config.seq_length)
            pq.write_table(pa.table({"input_ids": rows}), temporary)
    summary = {name: _summary(packed[name]) for name in SPLITS}
    write_json(folder / "splits.json", {"corpus": {"source": config.source, **corpus}, **summary})


def blocks(config: DataConfig, tokenizer: Any, tokens: int, seed: int, progress: Progress = silent) -> torch.Tensor:
    """The first `tokens` of the shuffled text as int64 `[sequences, seq]`, rounded up to whole sequences.

    With a run's seed and `validation_tokens` this is that run's validation split.

    Raises:
        ConfigError: as `prepare`.
    """
    packed, _ = _fill(config, tokenizer, {"text": tokens}, seed, progress)
    return torch.from_numpy(packed["text"].blocks.astype(np.int64))


def _fill(
    config: DataConfig, tokenizer: Any, tokens: dict[str, int], seed: int, progress: Progress
) -> tuple[dict[str, Packed], dict[str, Any]]:
    """Pack the shuffled documents for one purpose after the other; also the identity of the corpus."""
    found = documents(config, progress)
    order, corpus = _shuffled(found, seed)
    asked = sum(_whole(n, config.seq_length) for n in tokens.values())
    encoded = _counted(_encoded(found.select(order), tokenizer), asked, progress)
    packed = {name: pack(encoded, config.seq_length, n) for name, n in tokens.items()}
    if any(packed[name].blocks.size < n for name, n in tokens.items()):
        there, used = (sum(getattr(p, field) for p in packed.values()) for field in ("tokens_read", "documents"))
        raise ConfigError(
            f"{config.source}: holds {there:,} tokens in {used:,} documents, but {asked:,} are asked for in "
            f"{len(tokens)} splits that share no document; give more text or ask for fewer tokens"
        )
    return packed, corpus


def _counted(encoded: Iterator[list[int]], total: int, progress: Progress) -> Iterator[list[int]]:
    done = 0
    for ids in encoded:
        done += len(ids)
        progress("tokenising", min(done, total), total)
        yield ids


def load_split(folder: Path, name: str) -> torch.Tensor:
    """The token ids of a split that `prepare` wrote, as int64 `[sequences, seq]`.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    file = folder / f"{name}.parquet"
    try:
        rows = pq.read_table(file).column("input_ids").combine_chunks()
    except (OSError, KeyError, pa.ArrowException) as error:
        reason = "it is missing" if isinstance(error, FileNotFoundError) else "it is damaged"
        raise ConfigError(f"{file}: the split cannot be read, {reason}; prepare the data again") from None
    return torch.from_numpy(rows.flatten().to_numpy().astype(np.int64)).view(len(rows), -1)


def _shuffled(found: Dataset, seed: int) -> tuple[list[int], dict[str, Any]]:
    """Row numbers of the distinct documents that are not blank, in the order of the seed; and the corpus' identity."""
    rows: dict[bytes, int] = {}
    texts = (text for batch in found.iter(1_000) for text in batch["text"])
    for row, text in enumerate(texts):
        if text and text.strip():
            rows.setdefault(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), row)
    order = sorted(rows, key=lambda digest: hashlib.sha256(f"{seed} ".encode() + digest).digest())
    identity = hashlib.sha256(b"".join(sorted(rows))).hexdigest()
    return [rows[digest] for digest in order], {"documents": len(rows), "sha256": identity}


def _encoded(found: Dataset, tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of each document, lazily, with what the tokenizer itself adds (BOS) and an EOS at the end."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = tokenizer(batch["text"], return_attention_mask=False, verbose=False)["input_ids"]
        return {"input_ids": [row if row[-1:] == end else row + end for row in ids]}

    lazy = found.to_iterable_dataset().map(encode, batched=True, batch_size=64, remove_columns=["text"])
    return (row["input_ids"] for row in lazy)


def _summary(packed: Packed) -> dict[str, Any]:
    return {
        "tokens": packed.blocks.size,
        "sequences": len(packed.blocks),
        "documents": packed.documents,
        "sha256": hashlib.sha256(packed.blocks.astype("<i4").tobytes()).hexdigest(),
    }
