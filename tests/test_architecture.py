# SPDX-License-Identifier: Apache-2.0
"""Plain data: keys, architectures, fingerprints. Parameter counts are judged in contracts/ against transformers."""

import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puzzle.architecture import (
    PARENT,
    SUBBLOCKS,
    Architecture,
    AttentionConfig,
    FFNConfig,
    SubblockVariant,
    fingerprint,
    plain,
)

names = st.sampled_from((PARENT, "kv1", "kv2", "linear", "no_op", "ffn768"))
variants = st.builds(SubblockVariant, st.integers(0, 200), st.sampled_from(SUBBLOCKS), names)


@st.composite
def architectures(draw: st.DrawFn, layers: int | None = None) -> Architecture:
    n = layers or draw(st.integers(1, 6))
    half = st.lists(names, min_size=n, max_size=n).map(tuple)
    return Architecture(draw(half), draw(half))


@given(variants)
def test_variant_keys_round_trip(variant: SubblockVariant) -> None:
    assert SubblockVariant.from_key(variant.key) == variant


@pytest.mark.parametrize("key", ["", "12.ffn", "x.ffn.no_op", "1.mlp.no_op", "ffn"])
def test_bad_variant_keys(key: str) -> None:
    with pytest.raises(ValueError):
        SubblockVariant.from_key(key)


@given(architectures())
def test_architectures_round_trip(architecture: Architecture) -> None:
    again = Architecture.from_json(json.loads(json.dumps(architecture.to_json())))
    assert again == architecture
    assert again.fingerprint == architecture.fingerprint
    assert hash(again) == hash(architecture)


@given(architectures(4), architectures(4))
def test_fingerprints_tell_architectures_apart(a: Architecture, b: Architecture) -> None:
    assert (a.fingerprint == b.fingerprint) == (a == b)


@given(architectures())
def test_variants_in_order_of_the_forward_pass(architecture: Architecture) -> None:
    expected = []
    for layer, (attention, ffn) in enumerate(zip(architecture.attention, architecture.ffn, strict=True)):
        expected += [SubblockVariant(layer, "attention", attention), SubblockVariant(layer, "ffn", ffn)]
    assert list(architecture.variants) == expected
    assert architecture.changes == [v for v in expected if v.name != PARENT]


@given(architectures(), st.data())
def test_replacing_one_variant(architecture: Architecture, data: st.DataObject) -> None:
    layer = data.draw(st.integers(0, architecture.num_layers - 1))
    variant = SubblockVariant(layer, data.draw(st.sampled_from(SUBBLOCKS)), data.draw(names))
    other = architecture.with_variant(variant)
    assert other.name(layer, variant.subblock) == variant.name
    changed = [(a, b) for a, b in zip(architecture.variants, other.variants, strict=True) if a != b]
    assert len(changed) == architecture.distance(other) == (architecture.name(layer, variant.subblock) != variant.name)
    assert all(b == variant for _, b in changed)


@given(architectures(3), architectures(3), architectures(3))
def test_distance_is_a_metric(a: Architecture, b: Architecture, c: Architecture) -> None:
    assert a.distance(b) == b.distance(a)
    assert (a.distance(b) == 0) == (a == b)
    assert a.distance(c) <= a.distance(b) + b.distance(c)


def test_the_parent_has_no_changes() -> None:
    parent = Architecture.parent(3)
    assert parent.num_layers == 3
    assert parent.changes == []


def test_halves_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 attention but 1 ffn"):
        Architecture((PARENT, PARENT), (PARENT,))


def test_plain_leaves_out_what_is_not_set() -> None:
    assert plain(AttentionConfig(num_kv_heads=2)) == {"num_kv_heads": 2}
    assert plain(FFNConfig(linear=True)) == {"linear": True}
    assert plain(AttentionConfig(num_kv_heads=0)) == {"num_kv_heads": 0}


@given(st.dictionaries(st.text(max_size=3), st.integers() | st.floats(-1e3, 1e3), max_size=3))
def test_fingerprints_ignore_the_order_of_keys(data: dict) -> None:
    assert fingerprint(data) == fingerprint(dict(reversed(data.items())))


def test_what_is_no_number_has_no_fingerprint() -> None:
    for value in (float("inf"), float("nan")):
        with pytest.raises(ValueError):
            fingerprint({"loss": value})


def test_fingerprints_are_the_same_in_every_process() -> None:
    program = "from puzzle.architecture import Architecture as A; print(A.parent(2).fingerprint)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONHASHSEED": "7"})
    assert out.stdout.strip() == Architecture.parent(2).fingerprint
    assert len(out.stdout.strip()) == 64


def test_values_are_frozen() -> None:
    for value, field in ((Architecture.parent(1), "ffn"), (AttentionConfig(1), "linear"), (FFNConfig(1), "no_op")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, None)
