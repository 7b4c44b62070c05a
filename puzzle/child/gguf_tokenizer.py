# SPDX-License-Identifier: Apache-2.0
"""The tokenizer fields of a GGUF file, from the tokenizer that transformers uses for the checkpoint.

llama.cpp knows the two kinds that Llamas have: byte-level BPE, whose rules to split text into words go by a name, and
SentencePiece BPE. Its own converter finds the name by hashing the tokens of a test text; here it follows from the
rules themselves, so that another vocabulary under the same rules is known too.
"""

import json
from itertools import pairwise, product
from typing import Any

import gguf
from transformers import PreTrainedTokenizerBase

from puzzle.checkpoint import Checkpoint
from puzzle.errors import ConfigError, UnsupportedError

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How GPT-4 finds words; Llama 3 took it over, and Qwen2 with single digits."""
NAMES = {
    # rules, and whether a word that is a token is taken without merging -> llama.cpp's name
    (("ByteLevel words",), False): "gpt-2",
    (("Digits", "ByteLevel words"), False): "smollm",
    (("Split " + CL100K % "{1,3}", "ByteLevel"), True): "llama-bpe",
    (("Split " + CL100K % "{1,3}", "ByteLevel"), False): "smaug-bpe",
    (("Split " + CL100K % "", "ByteLevel"), False): "qwen2",
}
SPACE = "\u2581"  # SentencePiece's sign for a space
PREPEND = {"type": "Prepend", "prepend": SPACE}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
METASPACE = {"type": "Metaspace", "replacement": SPACE, "split": False}
BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Checkpoint) -> None:
    """Add vocabulary, merges or scores, special tokens and chat template.

    With a SentencePiece tokenizer, llama.cpp puts a space before the text and after every special token in it, as
    SentencePiece does. transformers may leave it out after special tokens and before a text that starts with a space.

    Raises:
        ConfigError: the checkpoint has no tokenizer that fits, or it names no end token.
        UnsupportedError: llama.cpp has no such tokenizer, or none whose name is known here.
    """
    tokenizer, path = checkpoint.tokenizer(), checkpoint.path
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedError(f"{path}: the tokenizer is not of the tokenizers library, which GGUF's is made from")
    spec = json.loads(backend.to_str())
    model = spec["model"]
    unwanted = [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    if model["type"] != "BPE" or unwanted:
        kind = f"{model['type']} with {unwanted[0]}" if unwanted else model["type"]
        raise UnsupportedError(f"{path}: the tokenizer is {kind}; only plain BPE is written as GGUF")
    tokens, types = _vocabulary(spec, checkpoint)
    if model["byte_fallback"]:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(_space_prefix(spec, checkpoint))
        writer.add_token_scores(_scores(model, types, checkpoint))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_name(spec, checkpoint))
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]] or [""])  # an empty list does not load
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    _add_special(writer, tokenizer, checkpoint)
    if template := tokenizer.chat_template:
        several = isinstance(template, dict)
        writer.add_chat_template([{"name": k, "template": v} for k, v in template.items()] if several else template)


def _vocabulary(spec: dict[str, Any], checkpoint: Checkpoint) -> tuple[list[str], list[int]]:
    """Text and type of each token; rows of the embedding that no token has are named and marked as unused."""
    size, model = checkpoint.shape.vocab_size, spec["model"]
    tokens, types = [f"[PAD{i}]" for i in range(size)], [int(gguf.TokenType.UNUSED)] * size

    def put(i: int, text: str, kind: gguf.TokenType) -> None:
        if i >= size:
            raise ConfigError(f"{checkpoint.path}: the token {text!r} has number {i}, the model only {size} tokens")
        tokens[i], types[i] = text, kind

    for text, i in model["vocab"].items():
        put(i, text, gguf.TokenType.BYTE if model["byte_fallback"] and text in BYTES else gguf.TokenType.NORMAL)
    for token in spec["added_tokens"]:
        text = token["content"]
        control = token["special"] or (text.startswith("<|") and text.endswith("|>"))
        kind = gguf.TokenType.CONTROL if control else gguf.TokenType.USER_DEFINED
        put(token["id"], text if control else text.replace(SPACE, " "), kind)
    return tokens, types


def _name(spec: dict[str, Any], checkpoint: Checkpoint) -> str:
    """llama.cpp's name for the rules that split a text into words."""
    if spec["normalizer"] not in (None, {"type": "NFC"}):  # llama.cpp skips NFC, which most text is in already
        raise UnsupportedError(f"{checkpoint.path}: llama.cpp has no normaliser {_rule(spec['normalizer'])}")
    rules = tuple(_rule(step) for step in _steps(spec["pre_tokenizer"], "pretokenizers"))
    whole = spec["model"]["ignore_merges"]
    if (rules, whole) not in NAMES:
        found = ", ".join(rules) or "none"
        raise UnsupportedError(
            f"{checkpoint.path}: llama.cpp's name for the pre-tokenizer is not known (found: {found}, "
            f"ignore_merges {str(whole).lower()}; known: {', '.join(NAMES.values())})"
        )
    return NAMES[rules, whole]


def _steps(spec: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    """The parts of a pre-tokenizer or normaliser that may be a sequence."""
    if spec is None:
        return []
    return spec[members] if spec["type"] == "Sequence" else [spec]


def _rule(step: dict[str, Any]) -> str:
    """A step in the words of `NAMES`, or as it is when it is of no known form."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": words}:
            return "ByteLevel words" if words else "ByteLevel"
        case {"type": "Digits", "individual_digits": True}:
            return "Digits"
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            return f"Split {pattern}"
    return json.dumps(step, ensure_ascii=False)


def _space_prefix(spec: dict[str, Any], checkpoint: Checkpoint) -> bool:
    """Whether a SentencePiece tokenizer puts a space before the text."""
    normalizer, rules = _steps(spec["normalizer"], "normalizers"), _steps(spec["pre_tokenizer"], "pretokenizers")
    if not rules and normalizer in ([REPLACE], [PREPEND, REPLACE]):
        return PREPEND in normalizer
    if not normalizer and len(rules) == 1 and METASPACE.items() <= rules[0].items():
        return rules[0]["prepend_scheme"] != "never"
    found = ", ".join(_rule(step) for step in [*normalizer, *rules]) or "none"
    raise UnsupportedError(f"{checkpoint.path}: llama.cpp's SentencePiece has no such normaliser (found: {found})")


def _scores(model: dict[str, Any], types: list[int], checkpoint: Checkpoint) -> list[float]:
    """Scores that make llama.cpp merge in the order of the merges.

    It merges any two neighbours that make a token, be they tokens or letters, the pair with the highest score first.
    That is the same where the merges are all such pairs, in the order of the tokens they make, as in SentencePiece.
    """
    vocabulary, merges = model["vocab"], [tuple(pair) for pair in model["merges"]]
    made, known = [vocabulary["".join(pair)] for pair in merges], set(merges)
    words = [text for text, i in vocabulary.items() if types[i] == gguf.TokenType.NORMAL]
    pairs = ((text[:i], text[i:]) for text in words for i in range(1, len(text)))
    missing = any(pair not in known and all(len(t) == 1 or t in vocabulary for t in pair) for pair in pairs)
    if missing or model["ignore_merges"] or not vocabulary.keys() >= BYTES or any(a > b for a, b in pairwise(made)):
        raise UnsupportedError(
            f"{checkpoint.path}: the merges are not SentencePiece's, which llama.cpp needs for this tokenizer"
        )
    return [float(-i) for i in range(len(types))]


def _add_special(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, checkpoint: Checkpoint) -> None:
    """The numbers of the special tokens, and which of them go around a text."""
    ids = {kind: getattr(tokenizer, f"{kind}_token_id") for kind in SPECIAL}
    for kind in ("bos", "eos"):
        if ids[kind] is None:
            named = getattr(checkpoint.config, f"{kind}_token_id", None)
            ids[kind] = named[0] if isinstance(named, list) else named
    if ids["eos"] is None:  # llama.cpp would take a fixed number
        raise ConfigError(f"{checkpoint.path}: neither tokenizer nor config name an end token (eos_token)")
    for kind, i in ids.items():
        if i is not None:
            getattr(writer, f"add_{kind}_token_id")(i)
    bare, found = tokenizer("a", add_special_tokens=False).input_ids, tokenizer("a").input_ids
    for bos, eos in product((False, True), repeat=2):
        if found == [ids["bos"]] * bos + bare + [ids["eos"]] * eos:
            writer.add_add_bos_token(bos)
            writer.add_add_eos_token(eos)
            return
    raise UnsupportedError(
        f"{checkpoint.path}: the tokenizer puts other tokens around a text than its bos_token and eos_token"
    )
