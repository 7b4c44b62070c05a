# SPDX-License-Identifier: Apache-2.0
"""Numbers, units and variants in words."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import SHAPE

from puzzle.architecture import Architecture
from puzzle.reports import words


@given(st.floats(1e-9, 1e12), st.integers(1, 5))
def test_number_keeps_its_significant_digits(value, digits):
    read = float(words.number(value, digits).replace(",", ""))
    assert abs(read - value) <= 0.5001 * 10 ** (math.floor(math.log10(value)) - digits + 1)


@given(st.floats(1, 1e15))
def test_size_reads_back(value):
    text, unit = words.size(value).split()
    power = ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    assert float(text.replace(",", "")) * 1024**power == pytest.approx(value, rel=0.006)


@given(st.sets(st.integers(0, 200), min_size=1))
def test_layer_ranges_name_each_layer_once(layers):
    named = []
    for part in words.layer_ranges(list(layers)).split(", "):
        first, _, last = part.partition("–")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(layers)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (words.number(0), "0"),
        (words.number(-1234.5), "−1,234"),
        (words.percent(0.0212), "2.1%"),
        (words.percent(0.79), "79%"),
        (words.percent(0.9991), "99.9%"),
        (words.percent(1.0), "100%"),
        (words.change(95, 100), "−5.0%"),
        (words.change(100.001, 100), "0%"),
        (words.change(99.999, 100), "0%"),
        (words.change(130, 100), "+30%"),
        (words.count(134_515_008), "135 M"),
        (words.count(40_000), "40 K"),
        (words.count(5e12), "5,000 B"),
        (words.size(512), "512 B"),
        (words.size(1.5 * 2**30), "1.50 GiB"),
        (words.duration(4.25), "4.2 s"),
        (words.duration(59.99), "60 s"),
        (words.duration(61), "1 min 01 s"),
        (words.duration(7_320), "2 h 02 min"),
    ],
)
def test_examples(text, wanted):
    assert text == wanted


def test_an_error_sets_the_digits_of_its_value():
    assert words.plus_minus(17.3149, 0.2149) == ("17.31", "0.21")
    assert words.plus_minus(1234.6, 25.4) == ("1,235", "25")
    assert words.plus_minus(0.18704, 0.00623) == ("0.1870", "0.0062")
    assert words.plus_minus(3.0, 0.0) == ("3.00", "")


@pytest.mark.parametrize(
    ("target", "reached", "spread", "wanted", "words_of_it"),
    [
        ("throughput>=1.3x", 1.31, 0.02, "throughput ≥ 1.3×", "1.310× ± 0.020"),
        ("memory<=6GiB", 5.5 * 2**30, 0.0, "memory ≤ 6 GiB", "5.50 GiB"),
        ("latency<=1.5s", 1400.0, 20.0, "latency ≤ 1,500 ms", "1,400 ms ± 20.0 ms"),
        ("kv_cache<=0.5x", 0.25, 0.0, "KV cache ≤ 0.5×", "0.250×"),
        ("params<=100M", 9.5e7, 0.0, "params ≤ 100 M", "95 M"),
        ("throughput>=80", 83.2, 0.9, "throughput ≥ 80.0 tokens/s", "83.2 tokens/s ± 0.900 tokens/s"),
        ("energy<=2J", 1.5, 0.0, "energy ≤ 2.00 J per token", "1.50 J per token"),
    ],
)
def test_targets(target, reached, spread, wanted, words_of_it):
    said = words.target_words({"target": target, "reached": reached, "spread": spread, "met": True})
    assert said == {"wanted": wanted, "reached": words_of_it, "met": True}


@pytest.mark.parametrize(
    ("name", "subblock", "drawn"),
    [
        ("parent", "ffn", ("parent", 1.0, "as in the parent")),
        ("kv1", "attention", ("narrow", 0.25, "1 KV head")),
        ("kv2", "attention", ("narrow", 0.5, "2 KV heads")),
        ("ffn64", "ffn", ("narrow", 0.25, "width 64")),
        ("linear", "attention", ("linear", 0.0, "linear")),
        ("no_op", "ffn", ("removed", 0.0, "removed")),
        ("window1024", "attention", ("other", 1.0, "window1024")),
    ],
)
def test_bars(name, subblock, drawn):
    assert words.bar(name, subblock, SHAPE) == drawn


def test_changed_layers_name_every_change_once():
    chosen = Architecture(("parent", "kv1", "kv1", "no_op"), ("ffn64", "parent", "ffn64", "parent"))
    assert words.changed_layers(chosen, SHAPE) == [
        {"half": "Attention", "what": "1 KV head", "layers": "1–2", "count": "2"},
        {"half": "Attention", "what": "removed", "layers": "3", "count": "1"},
        {"half": "FFN", "what": "width 64", "layers": "0, 2", "count": "2"},
    ]


@pytest.mark.parametrize(
    ("attention", "servable"),
    [
        (("parent", "kv1"), True),
        (("parent", "no_op"), True),
        (("no_op", "parent"), False),
        (("parent", "linear"), False),
        (("parent", "window64"), False),
    ],
)
def test_what_vllm_serves(attention, servable):
    assert (words.vllm_obstacle(Architecture(attention, ("parent", "parent"))) is None) == servable
