# SPDX-License-Identifier: Apache-2.0
"""Search spaces become candidates for a parent; what does not fit is one sentence."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puzzle import search_spaces
from puzzle.architecture import PARENT, Architecture, AttentionConfig, FFNConfig, ModelShape, SubblockVariant
from puzzle.config import SearchSpace, load_search_space, search_space_schema, validate
from puzzle.errors import ConfigError
from puzzle.variants import KINDS, block_configs, expand, listing, size

SHAPE = ModelShape(4, 64, 8, 8, 16, 100, 257)


def space(**changes: Any) -> SearchSpace:
    return validate(SearchSpace, {"attention": ["kv/2", "no_op"], "ffn": ["50%", "linear"], **changes}, "space.yaml")


def allowed(found: list[SubblockVariant], layer: int, subblock: str) -> list[str]:
    return [v.name for v in found if (v.layer, v.subblock) == (layer, subblock)]


def test_every_layer_gets_the_general_list() -> None:
    found = expand(space(), SHAPE)
    assert found == sorted(found, key=lambda v: (v.layer, v.subblock))
    assert len(found) == len(set(found)) == 4 * 6
    for layer in range(4):
        assert allowed(found, layer, "attention") == [PARENT, "kv4", "no_op"]
        assert allowed(found, layer, "ffn") == [PARENT, "ffn64", "linear"]


def test_entries_for_one_variant_count_once() -> None:
    found = expand(space(attention=["kv4", "kv/2", "kv8", "parent"], ffn=["ffn64", "50%", "60%", "100%"]), SHAPE)
    assert allowed(found, 0, "attention") == [PARENT, "kv4"]
    assert allowed(found, 0, "ffn") == [PARENT, "ffn64"]


def test_later_rules_win_and_leave_the_other_half() -> None:
    rules = [{"layers": "1-2", "ffn": ["no_op"]}, {"layers": [2], "ffn": ["parent"], "attention": ["linear"]}]
    found = expand(space(rules=rules), SHAPE)
    assert [allowed(found, i, "ffn") for i in range(4)] == [
        [PARENT, "ffn64", "linear"],
        [PARENT, "no_op"],
        [PARENT],
        [PARENT, "ffn64", "linear"],
    ]
    assert [allowed(found, i, "attention") for i in (1, 2)] == [[PARENT, "kv4", "no_op"], [PARENT, "linear"]]


def test_runtimes_drop_what_they_cannot_load() -> None:
    everything = space(attention=["kv2", "linear", "no_op"], ffn=["50%", "linear", "no_op"], serve_with="vllm")
    found = expand(everything, SHAPE)
    assert allowed(found, 0, "attention") == [PARENT, "kv2"]  # vLLM's residual starts in layer 0's attention
    assert allowed(found, 1, "attention") == [PARENT, "kv2", "no_op"]
    assert allowed(found, 0, "ffn") == [PARENT, "ffn64", "no_op"]
    llama_cpp = expand(everything.model_copy(update={"serve_with": "llama.cpp"}), SHAPE)
    assert "linear" not in {v.name for v in llama_cpp}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention": ["kv2", "kv16"]}, "search_space.attention.1: 'kv16' asks for 16 KV heads, the parent has 8"),
        ({"attention": ["kv3"]}, "search_space.attention.0: 'kv3' does not divide the parent's 8 KV heads evenly"),
        ({"ffn": ["ffn101"]}, "search_space.ffn.0: 'ffn101' asks for 101 FFN channels, the parent has 100"),
        ({"ffn": ["120%"]}, "search_space.ffn.0: '120%' is not a share between 0 and 100 %"),
        ({"attention": ["50%"]}, "search_space.attention.0: unknown attention variant '50%'"),
        ({"ffn": ["kv2"]}, "search_space.ffn.0: unknown ffn variant 'kv2'"),
        ({"ffn": ["lineer"]}, "unknown ffn variant 'lineer'; did you mean 'linear'?"),
        ({"rules": [{"layers": 0, "ffn": ["ffn0"]}]}, "search_space.rules.0.ffn.0: 'ffn0' asks for 0 FFN channels"),
        (
            {"rules": [{"layers": "2-5", "ffn": ["no_op"]}]},
            "search_space.rules.0.layers: there is no layer 4; the parent has layers 0 to 3",
        ),
        ({"rules": [{"layers": -1, "ffn": ["no_op"]}]}, "there is no layer -1"),
    ],
)
def test_what_does_not_fit_is_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(space(**changes), SHAPE)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@given(st.integers(1, 4_000), st.floats(0.1, 100).map(lambda x: round(x, 1)), st.sampled_from((1, 8, 32, 256)))
def test_shares_of_the_width(parent: int, share: float, multiple: int) -> None:
    shape = ModelShape(1, 8, 1, 1, 8, parent, 9)
    name = KINDS["ffn_width"].expand(f"{share}%", shape, multiple)
    width = parent if name == PARENT else int(name.removeprefix("ffn"))
    assert 0 < width <= parent
    assert width == parent or width % multiple == 0
    assert abs(width - parent * share / 100) <= multiple  # the nearest multiple, the first at least, the parent at most
    assert (name == PARENT) == (width == parent)


@given(st.sampled_from((1, 2, 3, 6, 8, 12, 32)), st.integers(1, 40))
def test_shares_of_the_kv_heads(heads: int, share: int) -> None:
    shape = ModelShape(1, 8, heads * 2, heads, 4, 8, 9)
    name = KINDS["grouped_query"].expand(f"kv/{share}", shape, 1)
    kept = heads if name == PARENT else int(name.removeprefix("kv"))
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and n <= max(1, heads / share)]
    assert kept == max(fitting)


@pytest.mark.parametrize("name", search_spaces.names())
def test_presets_fit_small_parents(name: str) -> None:
    smollm2 = ModelShape(30, 576, 9, 3, 64, 1536, 49152, tied_embeddings=True)
    found = expand(load_search_space(search_spaces.path(name)), smollm2)
    assert {v.layer for v in found} == set(range(30))
    assert size(found) > 10


def test_the_paper_has_54_blocks_a_layer() -> None:
    """Arithmetic of the paper's section 2, on the shape of Llama-3.1-70B."""
    llama = ModelShape(80, 8192, 64, 8, 128, 28672, 128256)
    found = expand(load_search_space(search_spaces.path("paper")), llama)
    assert len(allowed(found, 0, "attention")) * len(allowed(found, 0, "ffn")) == 54
    assert size(found) == pytest.approx(80 * math.log10(54))


def test_the_shipped_schema_is_the_present_one() -> None:
    file = search_spaces.path("tiny").with_name("search_space.schema.json")
    assert json.loads(file.read_text()) == search_space_schema()
    layers = search_space_schema()["$defs"]["LayerRule"]["properties"]["layers"]
    assert {kind["type"] for kind in layers["anyOf"]} == {"integer", "string", "array"}


@pytest.mark.parametrize("name", search_spaces.names())
def test_presets_name_the_schema_and_say_when_to_use_them(name: str) -> None:
    lines = search_spaces.path(name).read_text().splitlines()
    assert lines[0] == "# yaml-language-server: $schema=search_space.schema.json"
    assert lines[1].startswith("# ")


def test_a_listing_joins_equal_neighbours() -> None:
    rows = listing(expand(space(rules=[{"layers": "1-2", "ffn": ["no_op"]}]), SHAPE), SHAPE, 2)
    assert list(dict.fromkeys(r["layers"] for r in rows)) == ["0", "1-2", "3"]
    assert [r["variant"] for r in rows if r["layers"] == "1-2"] == [PARENT, "kv4", "no_op", PARENT, "no_op"]
    kv4 = next(r for r in rows if r["variant"] == "kv4")
    assert kv4["kv_bytes_per_token"] == 2 * 4 * 16 * 2
    assert kv4["params"] == 64 * (8 * 16 + 2 * 4 * 16) + 8 * 16 * 64 + 64


def test_the_size_of_a_space() -> None:
    assert size(expand(space(), SHAPE)) == pytest.approx(math.log10(3**8))
    assert size(expand(space(attention=["parent"], ffn=["parent"]), SHAPE)) == 0


def test_block_configs_of_an_architecture() -> None:
    blocks = block_configs(Architecture((PARENT, "kv2", "no_op"), ("linear", "ffn64", PARENT)), SHAPE)
    assert [(b.attention, b.ffn) for b in blocks] == [
        (AttentionConfig(8), FFNConfig(linear=True)),
        (AttentionConfig(2), FFNConfig(64)),
        (AttentionConfig(no_op=True), FFNConfig(100)),
    ]
    with pytest.raises(ConfigError, match="there is no ffn variant 'ffnx'"):
        block_configs(Architecture((PARENT,), ("ffnx",)), SHAPE)
