# SPDX-License-Identifier: Apache-2.0
"""Small tables, and the search by trying everything."""

import itertools

import numpy as np
import pandas as pd
from hypothesis import strategies as st

from puzzle.architecture import Architecture
from puzzle.costs import CostModel, Scenario, Target

ATTENTION = ("parent", "kv2", "kv1", "no_op")
FFN = ("parent", "ffn64", "ffn32", "no_op")
COSTS = ("prefill_ms", "decode_ms", "weight_bytes", "kv_bytes_per_token", "params")
SCENARIO = Scenario(batch=2, prompt=3, generated=5)


def frames(score_of, cost_of, constant, columns=COSTS):
    """Two tables from `{(layer, subblock, variant): score}` and `{...: costs in the order of columns}`."""
    scores = pd.DataFrame([(*key, s) for key, s in score_of.items()], columns=["layer", "subblock", "variant", "score"])
    rows = [*((*key, *values) for key, values in cost_of.items()), (-1, "model", "constant", *constant)]
    return scores, pd.DataFrame(rows, columns=["layer", "subblock", "variant", *columns])


def random_tables(seed, layers=3, attention=ATTENTION, ffn=FFN):
    """Tables in which smaller variants cost less and lose more, all figures different."""
    rng = np.random.default_rng(seed)
    score_of, cost_of = {}, {}
    for layer in range(layers):
        for subblock, names in (("attention", attention), ("ffn", ffn)):
            weight = rng.lognormal(-3, 1)
            for i, name in enumerate(names):
                size = 1 - i / len(names)
                score_of[layer, subblock, name] = weight * (1 - size) ** 1.5 * rng.lognormal(0, 0.3)
                cost_of[layer, subblock, name] = (
                    size * np.array([8, 1, 4000, 64, 2000]) * rng.lognormal(0, 0.1, 5)
                ).tolist()
    return frames(score_of, cost_of, [3.0, 0.5, 5000.0, 0.0, 2500.0])


@st.composite
def instances(draw):
    """Tables of small whole numbers, in which ties, equal costs and exactly met bounds are common; and targets."""
    whole = st.integers(0, 6)
    layers = draw(st.integers(1, 3))
    score_of, cost_of = {}, {}
    for layer, (subblock, names) in itertools.product(range(layers), (("attention", ATTENTION), ("ffn", FFN))):
        for name in names[: draw(st.integers(1, 3))]:
            score_of[layer, subblock, name] = 0.0 if name == "parent" else draw(st.integers(-2, 9)) / 8
            cost_of[layer, subblock, name] = [draw(whole) + (name == "parent") for _ in COSTS]
    tables = frames(score_of, cost_of, [draw(whole) for _ in COSTS])
    factor = st.sampled_from([0.3, 0.5, 0.7, 0.75, 0.9, 1.0])
    relative = st.builds("{}<={}x".format, st.sampled_from(["decode", "memory", "params", "kv_cache"]), factor)
    faster = st.builds("throughput>={}x".format, st.sampled_from([1, 1.25, 1.5, 2, 3]))
    absolute = st.builds("params<={}".format, st.integers(1, 40))
    targets = draw(st.lists(st.one_of(relative, faster, absolute), max_size=3))
    return *tables, targets


def every_architecture(scores):
    """All architectures of a score table that has a row for every candidate."""
    layers = 1 + scores.layer.max()
    names = scores.groupby(["layer", "subblock"]).variant.apply(list)
    of = [[names[layer, subblock] for layer in range(layers)] for subblock in ("attention", "ffn")]
    for attention in itertools.product(*of[0]):
        for ffn in itertools.product(*of[1]):
            yield Architecture(attention, ffn)


def exhaustive(scores, costs, targets, scenario=SCENARIO, allowed=lambda architecture: True):
    """`[(score, architecture), ...]` of all that meet the targets, best first, by the cost model and `Target.met`."""
    model = CostModel(costs, scenario)
    parent = model.parent()
    score_of = {(layer, subblock, name): s for layer, subblock, name, s in scores.itertuples(index=False)}
    met = []
    for architecture in filter(allowed, every_architecture(scores)):
        total = model.predict(architecture)
        parsed = [Target.parse(t) for t in targets]
        if all(t.met(t.reached(total, parent, scenario)) for t in parsed):
            score = sum(score_of[v.layer, v.subblock, v.name] for v in architecture.variants)
            met.append((score, architecture))
    return sorted(met, key=lambda pair: pair[0])
