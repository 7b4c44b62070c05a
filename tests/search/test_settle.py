# SPDX-License-Identifier: Apache-2.0
"""Exact scores on demand, against exhaustive search."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_instances import SCENARIO, exhaustive, random_tables

from puzzle.errors import PuzzleError
from puzzle.search.mip import Program
from puzzle.search.settle import settle

TARGETS = ["decode<=0.7x"]


def program_of(seed, layers=3):
    scores, costs = random_tables(seed, layers=layers)
    program = Program.of(scores, costs, TARGETS, SCENARIO)
    return scores, costs, program, np.array([v.name == "parent" for v in program.problem.candidates])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_lower_bounds_lead_to_the_optimum_of_the_exact_scores(seed):
    scores, costs, program, exact = program_of(seed)
    true, asked = program.problem.scores, []
    low = true * np.where(exact, 1.0, np.random.default_rng(seed).uniform(0.0, 1.0, len(true)))

    def ask(variants):
        asked.extend(variants)
        return [true[program.problem.find(v)] for v in variants]

    optimum = settle(program, low, exact, ask)
    best = min(score for score, _ in exhaustive(scores, costs, TARGETS))
    assert true[optimum.chosen].sum() == pytest.approx(best, abs=1e-9)
    assert exact[optimum.chosen].all() and len(asked) == len(set(asked))
    np.testing.assert_array_equal(low[exact], true[exact])


def test_all_exact_asks_nothing():
    *_, program, exact = program_of(0)
    exact[:] = True
    found = settle(program, program.problem.scores.copy(), exact, lambda variants: pytest.fail("asked"))
    np.testing.assert_array_equal(found.chosen, program.solve().chosen)


def test_out_of_reach_is_none():
    scores, costs = random_tables(0, layers=3)
    program = Program.of(scores, costs, ["decode<=0.0001x"], SCENARIO)
    exact = np.zeros(len(program.problem.candidates), dtype=bool)
    assert settle(program, program.problem.scores.copy(), exact, lambda variants: [0.0] * len(variants)) is None


def test_a_score_that_is_no_number_is_named():
    *_, program, exact = program_of(0)
    with pytest.raises(PuzzleError, match="exact score is not a finite number"):
        settle(program, program.problem.scores.copy(), exact, lambda variants: [float("nan")] * len(variants))
