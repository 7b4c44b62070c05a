# SPDX-License-Identifier: Apache-2.0
"""Targets as users write them, and the additive cost model against plain sums."""

import itertools
import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puzzle.architecture import PARENT, Architecture
from puzzle.costs import COST_COLUMNS, MEASURES, CostModel, Scenario, Solution, Target, measure
from puzzle.errors import ConfigError

TIME = {"ms": 1, "s": 1_000, "us": 0.001}
BYTES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
UNITS = {  # of each measure: unit -> its size in the base unit
    "throughput": {"": 1, "tok/s": 1, "tokens/s": 1},
    **{name: TIME for name in ("latency", "prefill", "ttft", "decode")},
    **{name: BYTES for name in ("memory", "weights", "kv_cache")},
    "params": {"": 1, "k": 1e3, "M": 1e6, "B": 1e9},
    "energy": {"J": 1},
}
SCENARIO = Scenario(batch=3, prompt=100, generated=20)
measures = st.sampled_from(MEASURES)
values = st.floats(1e-3, 1e6).map(lambda x: float(f"{x:.6g}"))
costs = st.fixed_dictionaries({column: st.floats(0.1, 1e9) for column in COST_COLUMNS})


def sense(name: str) -> str:
    return ">=" if name == "throughput" else "<="


def test_every_measure_is_tested() -> None:
    assert set(UNITS) == set(MEASURES)


@given(measures, values, st.data())
def test_absolute_targets(name: str, value: float, data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from(sorted(UNITS[name])))
    text = f"{name}{data.draw(st.sampled_from(('', ' ')))}{sense(name)} {value!r}{unit}"
    target = Target.parse(text)
    assert (target.measure, target.sense, target.relative, target.text) == (name, sense(name), False, text)
    assert target.value == pytest.approx(value * UNITS[name][unit], rel=1e-12)
    assert Target.parse(text.replace(unit, unit.upper()) if unit else text).value == target.value


@given(measures, values, st.sampled_from("xX"))
def test_relative_targets(name: str, value: float, unit: str) -> None:
    target = Target.parse(f"  {name}{sense(name)}{value!r}{unit} ")
    assert (target.measure, target.value, target.relative) == (name, value, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is not of the form", "throughput>=1.5x"]),
        ("throughput=2x", ["is not of the form"]),
        ("throughput>2x", ["is not of the form"]),
        ("throughput>=-2x", ["is not of the form"]),
        ("throughput>=nan", ["is not of the form"]),
        ("throughput>=2x memory<=1GiB", ["is not of the form"]),
        ("thruput>=2x", ["unknown measure 'thruput'", "did you mean 'throughput'", "latency"]),
        ("throughput<=2x", ["throughput takes >=, not <="]),
        ("memory>=2GiB", ["memory takes <=, not >="]),
        ("memory<=6", ["memory needs a unit", "gib"]),
        ("memory<=6ms", ["unit 'ms' does not fit memory", "gib"]),
        ("latency<=6GiB", ["unit 'GiB' does not fit latency", "ms"]),
        ("energy<=6MJ", ["unit 'MJ' does not fit energy"]),
        ("latency<=1.2.3ms", ["'1.2.3' is not a number"]),
        ("latency<=.ms", ["'.' is not a number"]),
        ("latency<=0ms", ["above zero"]),
        ("latency<=1e999ms", ["finite"]),
        ("memory<=1e300TiB", ["finite"]),
        ("latency<=1e-999ms", ["above zero"]),
    ],
)
def test_wrong_targets(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Target.parse(text)
    message = str(caught.value)
    assert message.startswith(f"target {text!r}")
    assert "\n" not in message
    for word in words:
        assert word in message


@given(st.text(max_size=30) | st.from_regex(r"(throughput|memory)(>=|<=)[0-9.e+]{1,8}[a-zA-Z/]{0,4}", fullmatch=True))
def test_any_text_is_a_target_or_one_sentence(text: str) -> None:
    try:
        target = Target.parse(text)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert math.isfinite(target.value) and target.value > 0


def by_hand(name: str, c: dict[str, float], s: Scenario) -> float:
    """The measures as README and report explain them, without linear forms."""
    seconds = (c["prefill_ms"] + s.generated * c["decode_ms"]) / 1_000
    cache = c["kv_bytes_per_token"] * s.batch * (s.prompt + s.generated)
    return {
        "throughput": s.batch * s.generated / seconds,
        "latency": seconds * 1_000,
        "prefill": c["prefill_ms"],
        "ttft": c["prefill_ms"],
        "decode": c["decode_ms"],
        "memory": c["weight_bytes"] + cache,
        "weights": c["weight_bytes"],
        "kv_cache": cache,
        "params": c["params"],
        "energy": c["energy_j_per_token"],
    }[name]


@given(measures, costs)
def test_measures(name: str, c: dict[str, float]) -> None:
    assert measure(name, c, SCENARIO) == pytest.approx(by_hand(name, c, SCENARIO), rel=1e-12)


@given(measures, values, st.booleans(), costs, costs)
def test_the_constraint_says_what_the_target_says(
    name: str, value: float, relative: bool, own: dict[str, float], parent: dict[str, float]
) -> None:
    """`sum(coefficient * cost) <= bound` holds just where the measure, computed by hand, meets the target."""
    unit = "x" if relative else min(UNITS[name], key=len)
    target = Target.parse(f"{name}{sense(name)}{value!r}{unit}")
    constraint = target.constraint(SCENARIO, parent)
    left = sum(k * own[column] for column, k in constraint.coefficients.items())
    reached = by_hand(name, own, SCENARIO) / (by_hand(name, parent, SCENARIO) if relative else 1)
    assert target.reached(own, parent, SCENARIO) == pytest.approx(reached, rel=1e-9)
    if not math.isclose(left, constraint.bound, rel_tol=1e-8):
        assert (left <= constraint.bound) == target.met(reached)
        assert target.met(reached) == (reached >= target.value if sense(name) == ">=" else reached <= target.value)


def test_a_target_met_to_within_rounding_is_met() -> None:
    assert Target.parse("throughput>=1.5x").met(1.5 * (1 - 1e-12))
    assert not Target.parse("throughput>=1.5x").met(1.5 * (1 - 1e-6))
    assert Target.parse("params<=0.7x").met(0.7 * (1 + 1e-12))
    assert not Target.parse("params<=0.7x").met(0.7 * (1 + 1e-6))


def test_a_target_on_a_cost_that_was_not_measured() -> None:
    with pytest.raises(ConfigError, match="'energy<=2J' needs the cost 'energy_j_per_token'"):
        Target.parse("energy<=2J").constraint(SCENARIO, {"prefill_ms": 1.0})


NAMES = {"attention": (PARENT, "kv1", "no_op"), "ffn": (PARENT, "no_op")}


def table(layers: int = 2) -> pd.DataFrame:
    rows = [
        {"layer": layer, "subblock": subblock, "variant": name}
        for layer in range(layers)
        for subblock, names in NAMES.items()
        for name in names
    ]
    rows.append({"layer": -1, "subblock": "model", "variant": "constant"})
    for i, row in enumerate(rows):
        row |= {"prefill_ms": 1.0 + i, "decode_ms": 0.1 * i, "weight_bytes": 10 * i, "kv_bytes_per_token": i % 3}
        row |= {"params": 5 * i, "energy_j_per_token": None}
    return pd.DataFrame(rows)


def test_the_cost_model_adds_up() -> None:
    frame, scenario = table(), SCENARIO
    model = CostModel(frame, scenario)
    assert model.columns == [c for c in COST_COLUMNS if c != "energy_j_per_token"]
    for attention in itertools.product(NAMES["attention"], repeat=2):
        for ffn in itertools.product(NAMES["ffn"], repeat=2):
            chosen = [(i, "attention", a) for i, a in enumerate(attention)] + [(i, "ffn", f) for i, f in enumerate(ffn)]
            chosen.append((-1, "model", "constant"))
            rows = [r for r in frame.to_dict("records") if (r["layer"], r["subblock"], r["variant"]) in chosen]
            assert len(rows) == 5
            predicted = model.predict(Architecture(attention, ffn))
            assert predicted == {c: pytest.approx(sum(r[c] for r in rows)) for c in model.columns}
    assert model.parent() == model.predict(Architecture.parent(2))


def test_solutions_round_trip() -> None:
    architecture = Architecture(("kv1", PARENT), (PARENT, "no_op"))
    solution = Solution(architecture, 0.5, {"params": 3.0}, "optimal", 0.0, 1.5, "highs", ("params<=0.7x",))
    assert Solution.from_json(solution.to_json()) == solution
