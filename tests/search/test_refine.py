# SPDX-License-Identifier: Apache-2.0
import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
from search_instances import SCENARIO, exhaustive, random_tables

from puzzle.architecture import SUBBLOCKS, Architecture, SubblockVariant
from puzzle.errors import ConfigError, InfeasibleError, PuzzleError
from puzzle.search import solve
from puzzle.search.refine import Round, refine

TARGETS = ["decode<=0.65x"]


class Whole:
    """A model whose score is no sum: attention replaced in several layers costs more than each alone, FFN less."""

    def __init__(self, seed, layers):
        self.scores, self.costs = random_tables(seed, layers=layers)
        self.own = {(r.layer, r.subblock, r.variant): r.score for r in self.scores.itertuples()}
        rng = np.random.default_rng(seed)
        self.pairs = rng.uniform(0.0, 3.0, (layers, layers))
        self.asked = []

    def true_score(self, architecture):
        attention, ffn = (
            [self.own[i, s, architecture.name(i, s)] for i in range(architecture.num_layers)] for s in SUBBLOCKS
        )
        together = np.sqrt(np.outer(attention, attention)) * self.pairs
        return sum(attention) + 0.7 * sum(ffn) + float(np.triu(together, 1).sum())

    def estimates(self, child):
        self.asked.append(child)
        base = self.true_score(child)
        rows = []
        for layer, subblock, name in self.own:
            changed = child.with_variant(SubblockVariant(layer, subblock, name))
            rows.append((layer, subblock, name, 0.0 if changed == child else self.true_score(changed) - base))
        return pd.DataFrame(rows, columns=["layer", "subblock", "variant", "score"])

    def exact(self, child, variants):
        return [self.true_score(child.with_variant(v)) - self.true_score(child) for v in variants]

    def additive(self):
        return solve(self.estimates(Architecture.parent(self.scores.layer.max() + 1)), self.costs, TARGETS, SCENARIO)

    def refine(self, start, **options):
        starts = [start] if isinstance(start, Architecture) else start
        return refine(self.costs, TARGETS, SCENARIO, starts, self, **options)


@pytest.mark.parametrize("seed", range(4))
def test_it_improves_on_the_additive_optimum(seed):
    model = Whole(seed, layers=12)
    start = model.additive().architecture
    rounds = model.refine(start)
    assert rounds[0].solution.architecture == start and rounds[0].solution.score == model.true_score(start)
    assert rounds[-1].solution.score < 0.97 * model.true_score(start)
    scores = [r.solution.score for r in rounds]
    assert scores == sorted(scores, reverse=True)
    for earlier, later in itertools.pairwise(rounds):
        assert later.gain == pytest.approx(earlier.solution.score - later.solution.score)
        for trial in later.trials:
            assert trial.architecture.distance(earlier.solution.architecture) <= trial.radius
            assert trial.score == model.true_score(trial.architecture)
    solution = rounds[-1].solution
    assert solution.score == model.true_score(solution.architecture)
    assert solution.costs["decode_ms"] <= 0.65 * _parent_decode(model) * (1 + 1e-9)
    assert (solution.method, solution.status, solution.targets) == ("refine", "feasible", tuple(TARGETS))


def _parent_decode(model):
    costs = model.costs
    return costs[(costs.variant == "parent") | (costs.subblock == "model")].decode_ms.sum()


def test_estimates_that_are_too_low_are_found_out():
    """The same end as with exact scores, since what is chosen is asked for."""
    model, other = Whole(1, layers=12), Whole(1, layers=12)
    start, full = model.additive().architecture, other.estimates
    share = dict(zip(other.own, np.random.default_rng(0).uniform(0.2, 1.0, len(other.own)), strict=True))

    def low(child):
        table = full(child)
        shares = np.array([share[key] for key in zip(table.layer, table.subblock, table.variant, strict=True)])
        return table.assign(score=np.where(table.score > 0, table.score * shares, table.score / shares))

    other.estimates = low
    assert low(start).score.lt(full(start).score).any()
    wanted, found = model.refine(start)[-1].solution, other.refine(start)[-1].solution
    assert (found.architecture, found.score) == (wanted.architecture, wanted.score)


def test_the_end_has_no_better_single_change():
    model = Whole(5, layers=4)
    end = model.refine(model.additive().architecture, min_gain=0.0)[-1].solution
    allowed = lambda a: a.distance(end.architecture) <= 1  # noqa: E731
    near = [a for _, a in exhaustive(model.scores, model.costs, TARGETS, allowed=allowed)]
    assert len(near) > 1 and min(map(model.true_score, near)) >= end.score - 1e-12


@pytest.mark.parametrize("order", [1, -1])
def test_it_begins_at_the_truly_best_start(order):
    model = Whole(1, layers=12)
    additive, refined = model.additive().architecture, model.refine(model.additive().architecture)[-1].solution
    rounds = model.refine([additive, refined.architecture, additive][::order])
    assert (rounds[0].solution.architecture, rounds[0].solution.score) == (refined.architecture, refined.score)
    with pytest.raises(InfeasibleError, match="a start misses"):
        model.refine([additive, Architecture.parent(12)])
    with pytest.raises(ConfigError, match="no architecture to start from"):
        model.refine([])


def test_additive_scores_are_already_at_their_optimum():
    model = Whole(6, layers=6)
    model.pairs[:] = 0
    rounds = model.refine(model.additive().architecture)
    assert len(rounds) == 2 and rounds[1].gain == 0 and rounds[1].trials == ()


def test_an_interrupted_refinement_continues_to_the_same_end():
    model = Whole(1, layers=12)
    start = model.additive().architecture
    whole = model.refine(start, min_gain=0.0)
    assert len(whole) > 3
    kept = []
    with pytest.raises(KeyboardInterrupt):
        model.refine(
            start, min_gain=0.0, on_round=lambda r: (kept.append(json.dumps(r.to_json(), allow_nan=False)), _stop(r))[0]
        )
    earlier = [Round.from_json(json.loads(text)) for text in kept]
    assert len(earlier) == 2
    resumed = model.refine(start, min_gain=0.0, earlier=earlier)
    assert [r.solution.architecture for r in resumed] == [r.solution.architecture for r in whole]
    assert [r.trials for r in resumed] == [r.trials for r in whole]
    asked = len(model.asked)
    assert model.refine(start, min_gain=0.0, earlier=resumed) == resumed and len(model.asked) == asked


def _stop(done):
    if done.number == 1:
        raise KeyboardInterrupt


def test_rounds_survive_json():
    model = Whole(2, layers=6)
    for done in model.refine(model.additive().architecture):
        assert Round.from_json(json.loads(json.dumps(done.to_json(), allow_nan=False))) == done


@pytest.mark.parametrize(("options", "count"), [({"rounds": 0}, 1), ({"rounds": 1}, 2), ({"time_limit": 0.0}, 1)])
def test_it_stops_where_it_is_told(options, count):
    model = Whole(1, layers=12)
    start = model.additive().architecture
    model.asked.clear()
    assert len(model.refine(start, **options)) == count
    assert len(model.asked) == count - 1


def test_it_ends_with_the_first_round_of_little_gain():
    model = Whole(1, layers=12)
    rounds = model.refine(model.additive().architecture, min_gain=0.01)
    shares = [r.gain / (r.solution.score + r.gain) for r in rounds[1:]]
    assert all(s >= 0.01 for s in shares[:-1]) and shares[-1] < 0.01


def test_candidates_without_a_score_are_not_considered():
    model = Whole(3, layers=8)
    start = model.additive().architecture
    full = model.estimates
    model.estimates = lambda child: full(child).query("subblock == 'ffn'")
    rounds = model.refine(start)
    assert rounds[-1].gain >= 0 and all(r.solution.architecture.attention == start.attention for r in rounds)


def test_a_start_that_misses_a_target_is_refused():
    model = Whole(0, layers=3)
    with pytest.raises(InfeasibleError, match=r"a start misses decode<=0.65x \(it has 1x\)"):
        model.refine(Architecture.parent(3))


def test_scores_that_are_no_changes_are_refused():
    model = Whole(0, layers=3)
    start = model.additive().architecture
    full = model.estimates
    model.estimates = lambda child: full(child).assign(score=lambda t: t.score + 1)
    with pytest.raises(ConfigError, match="a choice of the child itself"):
        model.refine(start)


@pytest.mark.parametrize(
    ("options", "message"), [({"radii": ()}, "radii"), ({"radii": (4, 0)}, "radii"), ({"rounds": -1}, "rounds=-1")]
)
def test_wrong_options_are_refused(options, message):
    model = Whole(0, layers=3)
    with pytest.raises(ConfigError, match=message):
        model.refine(model.additive().architecture, **options)


def test_a_true_score_that_is_no_number_is_an_error():
    model = Whole(0, layers=3)
    start = model.additive().architecture
    model.true_score = lambda architecture: math.nan
    with pytest.raises(PuzzleError, match="is nan"):
        model.refine(start)
