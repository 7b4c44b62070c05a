# SPDX-License-Identifier: Apache-2.0
"""Tokenizers in GGUF files: their fields, and the same tokens from llama.cpp as from transformers."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import gguf
import pytest
from llama_cpp_runtime import LlamaCpp
from tiny_models import make_parent
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from puzzle.child.gguf import export
from puzzle.child.gguf_tokenizer import NAMES
from puzzle.errors import ConfigError, UnsupportedError

TEXT = (
    "The quick brown fox jumps over 13 lazy dogs, 3.3 times in 1923 and 44444 more.\n\n\n"
    "  def f(x):\n\treturn x ** 2\r\n"
    " \n \t\t \t\n   I've been 'told he's there, 'RE you sure? WE'LL see!!!!!! ------===== ''''```\n    "
    "κόσμος нещо на Български 我想在apple工作1314天～ កាន់តែពិសេស 🚀 (normal) 😶\u200d🌫️ ½ Ⅷ ٣٤ ª\u00a0b naïve "
    "<end>x<|mark|>y "
)
TEXTS = [TEXT, *TEXT.split("\n"), "", "a", "\n", "<end>", "a<end> b"]
NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
BYTE_LEVEL = list(NAMES.items())


def byte_level(rules: tuple[str, ...], whole_words: bool) -> Tokenizer:
    """A byte-level BPE trained on TEXT, with the rules of a row of NAMES."""
    steps = []
    for rule in rules:
        if rule == "Digits":
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        elif rule.startswith("Split "):
            steps.append(pre_tokenizers.Split(Regex(rule.removeprefix("Split ")), "isolated"))
        else:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.endswith("words")))
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens(["<|mark|>", "<plain>"])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """A tokenizer as transformers makes it from SentencePiece's: merges are all pairs of tokens that make a token."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        [TEXT.encode("ascii", "ignore").decode()], trainers.BpeTrainer(vocab_size=400, show_progress=False)
    )
    learnt = json.loads(trained.to_str())["model"]
    words = list(dict.fromkeys("".join(pair) for pair in learnt["merges"]))
    letters = [letter for letter in learnt["vocab"] if letter not in words]
    ordered = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(ordered))}
    merges = [
        (word[:i], word[i:])
        for word in words
        for i in range(1, len(word))
        if word[:i] in vocabulary and word[i:] in vocabulary
    ]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    start = [("<s>", vocabulary["<s>"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=start)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **settings: Any) -> PreTrainedTokenizerFast:
    """A tiny parent with this tokenizer and a few tokens more than it."""
    parent = make_parent(folder, vocab_size=tokenizer.get_vocab_size() + 3, **NO_IDS)
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
    saved.save_pretrained(parent)
    return saved


def fields(folder: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(export(folder, folder / "model.gguf", "f32"))
    prefix = "tokenizer."
    return {n.removeprefix(prefix): f.contents() for n, f in reader.fields.items() if n.startswith(prefix)}


@pytest.mark.parametrize(("rules", "name"), BYTE_LEVEL, ids=NAMES.values())
def test_byte_level(tmp_path: Path, rules: tuple[tuple[str, ...], bool], name: str) -> None:
    tokenizer = byte_level(*rules)
    tokens = save(tokenizer, tmp_path, eos_token="<end>", chat_template="{{ messages }}")
    found = fields(tmp_path)
    model = json.loads(tokenizer.to_str())["model"]
    assert (found["ggml.model"], found["ggml.pre"]) == ("gpt2", name)
    assert found["ggml.tokens"][:-3] == [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    assert found["ggml.merges"] == [" ".join(pair) for pair in model["merges"]]
    kinds = {"<end>": gguf.TokenType.CONTROL, "<|mark|>": gguf.TokenType.CONTROL}
    kinds |= {"<plain>": gguf.TokenType.USER_DEFINED, "a": gguf.TokenType.NORMAL}
    for token, kind in kinds.items():
        assert found["ggml.token_type"][tokenizer.token_to_id(token)] == kind
    assert found["ggml.token_type"][-3:] == [gguf.TokenType.UNUSED] * 3
    assert len(set(found["ggml.tokens"])) == len(found["ggml.tokens"])
    assert found["ggml.eos_token_id"] == tokenizer.token_to_id("<end>")
    assert (found["ggml.add_bos_token"], found["ggml.add_eos_token"]) == (False, False)
    assert found["chat_template"] == "{{ messages }}"
    runtime = LlamaCpp(tmp_path / "model.gguf")
    for text in TEXTS:
        assert runtime.tokens(text) == tokens(text).input_ids


def test_sentencepiece(tmp_path: Path) -> None:
    tokens = save(sentencepiece(), tmp_path, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    found = fields(tmp_path)
    assert (found["ggml.model"], found["ggml.pre"]) == ("llama", "default")
    assert found["ggml.token_type"][3:259] == [gguf.TokenType.BYTE] * 256
    assert (found["ggml.bos_token_id"], found["ggml.eos_token_id"], found["ggml.unknown_token_id"]) == (1, 2, 0)
    assert (found["ggml.add_bos_token"], found["ggml.add_eos_token"]) == (True, False)
    assert found["ggml.add_space_prefix"] is True
    runtime = LlamaCpp(tmp_path / "model.gguf")
    for text in filter(None, chain(TEXTS, ["a</s>b", " leading", "<s>"])):
        assert runtime.tokens(text) == tokens(text).input_ids


def test_without_a_space_before_the_text(tmp_path: Path) -> None:
    tokenizer = sentencepiece()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokens = save(tokenizer, tmp_path, bos_token="<s>", eos_token="</s>")
    assert fields(tmp_path)["ggml.add_space_prefix"] is False
    runtime = LlamaCpp(tmp_path / "model.gguf")
    assert runtime.tokens("The quick fox") == tokens("The quick fox").input_ids


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_metaspace(tmp_path: Path, scheme: str) -> None:
    """As transformers builds the tokenizers of Llama 2."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokens = save(tokenizer, tmp_path, bos_token="<s>", eos_token="</s>")
    assert fields(tmp_path)["ggml.add_space_prefix"] is (scheme != "never")
    runtime = LlamaCpp(tmp_path / "model.gguf")
    assert runtime.tokens("The quick fox") == tokens("The quick fox").input_ids


def changed(tokenizer: Tokenizer, change: str) -> Tokenizer:
    spec = json.loads(tokenizer.to_str())
    if change == "a merge missing":
        spec["model"]["merges"].pop()
    elif change == "merges in another order":
        spec["model"]["merges"].reverse()
    elif change == "a byte missing":
        spec["model"]["vocab"]["other"] = spec["model"]["vocab"].pop("<0x0A>")
    else:
        last = "".join(spec["model"]["merges"][-1])
        spec["model"]["vocab"]["κλ"] = spec["model"]["vocab"].pop(last)  # llama.cpp would make it from two letters
        spec["model"]["merges"] = [pair for pair in spec["model"]["merges"] if "".join(pair) != last]
    return Tokenizer.from_str(json.dumps(spec))


@pytest.mark.parametrize("change", ["a merge missing", "merges in another order", "a byte missing", "a letter missing"])
def test_merges_that_are_not_sentencepiece(tmp_path: Path, change: str) -> None:
    save(changed(sentencepiece(), change), tmp_path, bos_token="<s>", eos_token="</s>")
    with pytest.raises(UnsupportedError, match="the merges are not SentencePiece's"):
        fields(tmp_path)


def test_unknown_rules_are_named(tmp_path: Path) -> None:
    tokenizer = byte_level(("ByteLevel words",), False)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    save(tokenizer, tmp_path, eos_token="<end>")
    with pytest.raises(UnsupportedError, match=r'found: \{"type": "Whitespace"\}, ignore_merges false; known: gpt-2,'):
        fields(tmp_path)
    assert not (tmp_path / "model.gguf").exists()


def test_other_normalisers_and_models(tmp_path: Path) -> None:
    tokenizer = byte_level(("ByteLevel words",), False)
    tokenizer.normalizer = normalizers.Lowercase()
    save(tokenizer, tmp_path / "lower", eos_token="<end>")
    with pytest.raises(UnsupportedError, match=r"has no normaliser .*Lowercase"):
        fields(tmp_path / "lower")
    tokenizer = sentencepiece()
    tokenizer.normalizer = normalizers.NFKC()
    save(tokenizer, tmp_path / "nfkc", eos_token="</s>", bos_token="<s>")
    with pytest.raises(UnsupportedError, match=r"has no such normaliser \(found: .*NFKC"):
        fields(tmp_path / "nfkc")
    save(Tokenizer(models.WordLevel({"a": 0, "<end>": 1}, "<end>")), tmp_path / "words", eos_token="<end>")
    with pytest.raises(UnsupportedError, match="the tokenizer is WordLevel; only plain BPE"):
        fields(tmp_path / "words")
    save(Tokenizer(models.BPE({"a": 0, "<end>": 1}, [], dropout=0.1)), tmp_path / "dropout", eos_token="<end>")
    with pytest.raises(UnsupportedError, match="the tokenizer is BPE with dropout"):
        fields(tmp_path / "dropout")


def test_special_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level(("ByteLevel words",), False)
    save(tokenizer, tmp_path / "none")
    with pytest.raises(ConfigError, match="neither tokenizer nor config name an end token"):
        fields(tmp_path / "none")
    config = json.loads((tmp_path / "none" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "none" / "config.json").write_text(json.dumps(config | {"eos_token_id": [7, 9]}), encoding="utf-8")
    assert fields(tmp_path / "none")["ggml.eos_token_id"] == 7
    both = [("<end>", 0)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<end> $A <end>", special_tokens=both)
    save(tokenizer, tmp_path / "both", bos_token="<end>", eos_token="<end>")
    found = fields(tmp_path / "both")
    assert (found["ggml.add_bos_token"], found["ggml.add_eos_token"]) == (True, True)
    tokenizer.post_processor = processors.TemplateProcessing(single="<end> <end> $A", special_tokens=both)
    save(tokenizer, tmp_path / "twice", bos_token="<end>", eos_token="<end>")
    with pytest.raises(UnsupportedError, match="puts other tokens around a text"):
        fields(tmp_path / "twice")


def test_several_chat_templates(tmp_path: Path) -> None:
    templates = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    save(byte_level(("ByteLevel words",), False), tmp_path, eos_token="<end>", chat_template=templates)
    found = fields(tmp_path)
    assert (found["chat_template"], found["chat_template.tools"]) == ("{{ messages }}", "{{ tools }}")
