# SPDX-License-Identifier: Apache-2.0
"""The YAML edge: what is wrong is said in one sentence, with file, line, key and the nearest known name."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from puzzle import search_spaces
from puzzle.architecture import fingerprint
from puzzle.config import LayerRule, RunConfig, load_search_space, read_yaml, validate
from puzzle.errors import ConfigError

MINIMAL = """\
parent: models/llama
search_space:
  attention: [parent, kv2]
  ffn: [parent, 50%]
targets:
  - throughput>=1.5x
"""


def complaint(tmp_path: Path, text: str, model: type[Any] = RunConfig) -> str:
    """The sentence that a file gets, without the folder in front; line numbers follow the file's name."""
    file = tmp_path / "my.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        validate(model, read_yaml(file), file)
    message = str(caught.value)
    assert message.startswith(str(file))
    assert "\n" not in message
    return message.removeprefix(f"{tmp_path}/")


def leaves(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every key of the config."""
    found = []
    for name, field in model.model_fields.items():
        inner = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        found += leaves(field.annotation, (*prefix, name)) if inner else [(*prefix, name)]
    return found


def test_a_minimal_config_fills_in_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(MINIMAL)
    config = validate(RunConfig, read_yaml(tmp_path / "run.yaml"), "run.yaml")
    assert config.healing.kl_weight == 1.0
    assert config.search_space.serve_with == "transformers"
    again = validate(RunConfig, yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json"))), "dump")
    assert again == config


@pytest.mark.parametrize("path", leaves(RunConfig), ids=".".join)
def test_a_wrong_value_anywhere(path: tuple[str, ...], tmp_path: Path) -> None:
    """Each key refuses a value of another kind, and the sentence names its place and nothing of Python."""
    data = yaml.safe_load(MINIMAL)
    section = data
    for name in path[:-1]:
        section = section.setdefault(name, {})
    section[path[-1]] = {"x": [1]}
    text = yaml.safe_dump(data)
    message = complaint(tmp_path, text)
    line = next(i for i, content in enumerate(text.splitlines(), 1) if content.strip() == f"{path[-1]}:")
    assert message.startswith(f"my.yaml, line {line}, {'.'.join(path)}: "), message
    for word in ("literal[", "instance", "dict", "pydantic"):
        assert word not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MINIMAL + "sedd: 3\n", "line 7, sedd: unknown key 'sedd'; did you mean 'seed'?"),
        (MINIMAL + "zzz: 3\n", "line 7, zzz: unknown key 'zzz'"),
        (
            MINIMAL + "library:\n  bld:\n    learning_rte: 1\n",
            "line 9, library.bld.learning_rte: unknown key 'learning_rte'; did you mean 'learning_rate'?",
        ),
        (
            MINIMAL.replace("ffn:", "rules:\n    - layers: 0\n      atention: [no_op]\n  ffn:"),
            "line 6, search_space.rules.0.atention: unknown key 'atention'; did you mean 'attention'?",
        ),
        (MINIMAL.replace("  ffn: [parent, 50%]\n", ""), "line 2, search_space.ffn: the key 'ffn' is missing"),
        (MINIMAL.replace("parent: models/llama\n", ""), "parent: the key 'parent' is missing"),
        (MINIMAL + "data: 5\n", "line 7, data: a mapping of keys to values is expected (found 5)"),
        (
            MINIMAL + "  - memry<=2GiB\n",
            "line 7, targets.1: target 'memry<=2GiB': unknown measure 'memry'; did you mean 'memory'?",
        ),
        (MINIMAL + "seed: -1\n", "line 7, seed: input should be greater than or equal to 0 (found -1)"),
        (MINIMAL + f"seed: {2**32}\n", "line 7, seed: input should be less than 4294967296"),
        (MINIMAL + "healing: {warmup: 1.5}\n", "line 7, healing.warmup: input should be less than or equal to 1"),
        (MINIMAL + "healing: {temperature: .inf}\n", "line 7, healing.temperature: input should be a finite number"),
        (MINIMAL + "library: {ridge: [0.1, 0]}\n", "line 7, library.ridge.1: input should be greater than 0"),
        (MINIMAL + "compute_dtype: int8\n", "line 7, compute_dtype: input should be 'auto', 'float32', 'bfloat16' or"),
        (MINIMAL + "name: ../elsewhere\n", "line 7, name: string should match pattern"),
        (MINIMAL + "name: sweep\n", "line 7, name: 'sweep' is the name of another file in RUN/solutions"),
        (
            MINIMAL + "library: {bld: {tokens: 1000000}}\n",
            "library.bld.tokens (1000000) is more than data.training_tokens (131072)",
        ),
    ],
)
def test_what_is_wrong_is_said(text: str, expected: str, tmp_path: Path) -> None:
    assert expected in complaint(tmp_path, text)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a: [1,\nb: 2", "line 2: not valid YAML"),
        (b"a: 2024-13-45", "not valid YAML (month must be in 1..12)"),
        (b"\x00", "not valid YAML"),
        (b"\xff\xfe\xff", "not UTF-8 text"),
        (b"", "a mapping of keys to values is expected"),
        (b"- a", "a mapping of keys to values is expected"),
        (b"a: !!python/object/apply:os.system [x]", "line 1: not valid YAML"),
    ],
)
def test_files_that_are_no_mapping(content: bytes, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_yaml(file)
    assert expected in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for file, word in ((tmp_path / "absent.yaml", "No such file"), (tmp_path, "directory")):
        with pytest.raises(ConfigError, match=word):
            read_yaml(file)


def test_a_place_that_the_file_does_not_have(tmp_path: Path) -> None:
    """Values from the command line are merged into the file's: the sentence must not look for their lines in vain."""
    file = tmp_path / "my.yaml"
    file.write_text(MINIMAL)
    data = {**read_yaml(file), "targets": ["throughput>=1.5x", "latency>=1ms"]}
    with pytest.raises(ConfigError, match=r"my.yaml, line 5, targets.1: target 'latency>=1ms'"):
        validate(RunConfig, data, file)
    with pytest.raises(ConfigError, match=r"^command line, targets.1: "):
        validate(RunConfig, data, "command line")


@pytest.mark.parametrize(
    ("value", "layers"),
    [("0-3", [0, 1, 2, 3]), (" 2 - 4 ", [2, 3, 4]), ("5", [5]), (5, [5]), ([7, 1], [7, 1]), ("3-3", [3])],
)
def test_layer_ranges(value: Any, layers: list[int]) -> None:
    assert LayerRule(layers=value).layers == layers


@pytest.mark.parametrize("value", ["3-1", "3-", "-1", "a-b", "1-2-3", "", "1,2", [], ["1-2"], None, 1.5, "²"])
def test_wrong_layer_ranges(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^here, layers"):
        validate(LayerRule, {"layers": value}, "here")


def test_ranges_without_layers_say_so() -> None:
    with pytest.raises(ConfigError, match="the layer range '3-1' is empty"):
        validate(LayerRule, {"layers": "3-1"}, "here")


@given(st.integers(0, 300), st.integers(0, 40))
def test_layer_ranges_have_both_ends(first: int, more: int) -> None:
    assert LayerRule(layers=f"{first}-{first + more}").layers == list(range(first, first + more + 1))


def test_the_recipe_leaves_the_machine_out() -> None:
    data = yaml.safe_load(MINIMAL)
    one, four = (validate(RunConfig, {**data, "machine": {"threads": n}}, "here") for n in (1, 4))
    assert one != four
    assert one.recipe() == four.recipe()
    assert set(one.recipe()) == set(RunConfig.model_fields) - {"machine"}
    fingerprint(one.recipe())  # canonical JSON takes it


def test_the_workload_resolves_auto() -> None:
    data = {**yaml.safe_load(MINIMAL), "compute_dtype": "bfloat16", "device": "cpu"}
    assert validate(RunConfig, data, "here").workload.dtype == "bfloat16"
    data["scenario"] = {"dtype": "float32", "batch": 2, "prompt": 3, "generated": 4}
    workload = validate(RunConfig, data, "here").workload
    assert (workload.dtype, workload.batch, workload.length, workload.device) == ("float32", 2, 7, "cpu")


@pytest.mark.parametrize("name", search_spaces.names())
def test_presets_are_valid(name: str) -> None:
    space = load_search_space(search_spaces.path(name))
    assert "parent" in space.attention and "parent" in space.ffn


def test_presets_are_found_by_name_and_file(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("attention: [no_op]\nffn: [no_op]\n")
    assert search_spaces.path(str(own)) == own
    assert load_search_space(search_spaces.path("search_spaces/tiny.yaml")) == load_search_space(
        search_spaces.path("tiny")
    )
    with pytest.raises(ConfigError, match=r"did you mean 'tiny'.*presets: "):
        search_spaces.path("tinny")
