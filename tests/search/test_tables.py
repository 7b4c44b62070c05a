# SPDX-License-Identifier: Apache-2.0
import io

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_instances import SCENARIO, every_architecture, random_tables

from puzzle.architecture import Architecture, SubblockVariant
from puzzle.costs import CostModel
from puzzle.errors import ConfigError
from puzzle.search import read_table, solve
from puzzle.search.tables import KEY, read

SCORES = """layer,subblock,variant,score
0,attention,kv2,0.25
0,ffn,ffn64,0.5
1,ffn,ffn64,0.75
"""
COSTS = """layer,subblock,variant,decode_ms,params
,model,constant,1,100
,attention,parent,4,40
,attention,kv2,2,20
,ffn,parent,8,80
,ffn,ffn64,4,50
1,ffn,ffn64,3,50
"""


def table(text):
    return pd.read_csv(io.StringIO(text))


def test_an_empty_layer_is_every_layer_and_a_named_one_goes_first():
    problem = read(table(SCORES), table(COSTS))
    assert problem.parent == {"decode_ms": 1 + 2 * (4 + 8), "params": 100 + 2 * 120}
    narrow = Architecture(("parent", "parent"), ("ffn64", "ffn64"))
    assert problem.totals(problem.index(narrow)) == {"decode_ms": 1 + 2 * 4 + 4 + 3, "params": 100 + 2 * 90}


def test_a_parent_without_a_row_scores_zero_and_is_a_candidate():
    problem = read(table(SCORES), table(COSTS))
    assert [v.key for v in problem.candidates] == [
        "0.attention.parent",
        "0.attention.kv2",
        "0.ffn.parent",
        "0.ffn.ffn64",
        "1.attention.parent",
        "1.ffn.parent",
        "1.ffn.ffn64",
    ]
    assert problem.scores.tolist() == [0, 0.25, 0, 0.5, 0, 0, 0.75]


def test_a_parent_with_a_row_keeps_its_score():
    scores = table(SCORES + "1,ffn,parent,0.125\n")
    assert read(scores, table(COSTS)).scores.tolist() == [0, 0.25, 0, 0.5, 0, 0.125, 0.75]


def test_scores_around_a_child_leave_out_what_has_no_row():
    child = Architecture(("parent", "kv2"), ("ffn64", "parent"))
    problem = read(table("layer,subblock,variant,score\n0,ffn,parent,-0.5\n1,ffn,ffn64,0.5"), table(COSTS), child)
    assert [v.key for v in problem.candidates] == [
        "0.attention.parent",
        "0.ffn.parent",
        "0.ffn.ffn64",
        "1.attention.kv2",
        "1.ffn.parent",
        "1.ffn.ffn64",
    ]
    assert problem.scores.tolist() == [0, -0.5, 0, 0, 0, 0.5]
    assert problem.parent["params"] == 100 + 2 * 120


def test_columns_that_are_no_costs_of_the_search_are_left_out():
    costs = table(COSTS).assign(decode_ms_spread=np.nan, energy_j_per_token=np.nan)
    assert list(read(table(SCORES), costs).costs) == ["decode_ms", "params"]


def test_without_a_constant_row_it_is_zero():
    costs = table(COSTS)
    assert read(table(SCORES), costs[costs.subblock != "model"]).constant == {"decode_ms": 0, "params": 0}


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 2**31))
def test_totals_are_those_of_the_cost_model(seed):
    scores, costs = random_tables(seed, layers=2, attention=("parent", "kv1"), ffn=("parent", "no_op"))
    problem, model = read(scores, costs), CostModel(costs, SCENARIO)
    assert problem.parent == pytest.approx(model.parent())
    for architecture in every_architecture(scores):
        chosen = problem.index(architecture)
        assert problem.architecture(chosen) == architecture
        assert problem.totals(chosen) == pytest.approx(model.predict(architecture))


@pytest.mark.parametrize(
    ("scores", "costs", "message"),
    [
        (SCORES.replace("score\n", "scor\n"), COSTS, r"scores: the column 'score' is missing; did you mean 'scor'\?"),
        (SCORES.replace("0.5", ""), COSTS, r"scores, row 2 \(layer 0, ffn, ffn64\): column 'score' is empty or NaN"),
        (SCORES.replace("0.5", "inf"), COSTS, r"scores, row 2 .*: column 'score' is 'inf', not a finite number"),
        (SCORES.replace("0.5", "low"), COSTS, r"scores, row 2 .*: column 'score' is 'low', not a finite number"),
        (SCORES + "0,ffn,ffn64,0.5\n", COSTS, r"scores, row 4 \(layer 0, ffn, ffn64\): the same as row 2"),
        (SCORES.replace("1,ffn", "2,ffn"), COSTS, r"scores: layer 1 has no variants"),
        (SCORES.replace("1,ffn", "1.5,ffn"), COSTS, r"scores, row 3 .*: column 'layer' is '1.5', not a layer's number"),
        (SCORES.replace("1,ffn", "one,ffn"), COSTS, r"scores, row 3 .*: column 'layer' is 'one', not a layer's number"),
        (SCORES.replace("1,ffn", "-2,ffn"), COSTS, r"scores, row 3 .*: column 'layer' is '-2', not a layer's number"),
        (SCORES.replace("1,ffn", ",ffn"), COSTS, r"scores, row 3 \(any layer, ffn, ffn64\): column 'layer' is empty"),
        (SCORES.replace("1,ffn", "1,fnn"), COSTS, r"scores, row 3 .*: unknown subblock 'fnn'; did you mean 'ffn'\?"),
        (SCORES.replace("1,ffn", "1,mlp"), COSTS, r"scores, row 3 .*: unknown subblock 'mlp' \(known: attention, ffn"),
        (SCORES.replace("0,ffn,ffn64", "0,ffn,"), COSTS, r"scores, row 2 .*: column 'variant' is empty or not text"),
        (SCORES + ",model,constant,0\n", COSTS, r"scores, row 4 .*: .* has costs, but no score"),
        ("layer,subblock,variant,score\n", COSTS, r"scores: the table has no rows"),
        (SCORES, COSTS.replace(",attention,kv2", ",attention,kv1"), r"no row for layer 0, attention, variant 'kv2'"),
        (SCORES, COSTS.replace(",ffn,parent", ",ffn,ffn9"), r"no row for .* 'parent', needed by the parent's total"),
        (
            SCORES,
            COSTS.replace("2,20", ",20"),
            r"costs, row 3 \(any layer, attention, kv2\): column 'decode_ms' is empty",
        ),
        (SCORES, COSTS.replace("decode_ms", "decode_s"), r"column 'decode_s' is no known cost.*mean 'decode_ms'\?"),
        (SCORES, COSTS.replace("decode_ms", "size_gb"), r"column 'size_gb' is no known cost.*known: prefill_ms, "),
        (SCORES, COSTS + ",ffn,ffn64,3,50\n", r"costs, row 7 \(any layer, ffn, ffn64\): the same as row 5"),
        (SCORES, COSTS.replace("constant", "head"), r"costs, row 1 .*: the variant of subblock 'model' is 'constant'"),
        (SCORES, COSTS.replace("variant", "kind"), r"costs: the column 'variant' is missing"),
        (SCORES, "layer,subblock,variant\n,ffn,parent\n", r"costs: the table has no cost column"),
    ],
)
def test_bad_tables_get_one_sentence(scores, costs, message):
    with pytest.raises(ConfigError, match=message) as error:
        solve(table(scores), table(costs), [])
    assert "\n" not in str(error.value)


def test_scores_around_a_child_know_its_layers():
    with pytest.raises(ConfigError, match="layer 2 is none of the architecture's 2 layers"):
        read(table(SCORES + "2,ffn,ffn64,1\n"), table(COSTS), Architecture.parent(2))


def test_a_variant_that_is_not_there_is_named():
    problem = read(table(SCORES), table(COSTS))
    with pytest.raises(ConfigError, match=r"1\.ffn\.ffn63: no such variant in the scores; did you mean 'ffn64'\?"):
        problem.find(SubblockVariant(1, "ffn", "ffn63"))


def test_tables_are_read_from_csv_and_parquet(tmp_path):
    scores = table(SCORES.replace("kv2", "null"))
    (tmp_path / "scores.csv").write_text(SCORES.replace("kv2", "null"))
    scores.assign(variant=["null", "ffn64", "ffn64"]).to_parquet(tmp_path / "scores.parquet")
    for name in ("scores.csv", "scores.parquet"):
        found = read_table(tmp_path / name)
        assert found.variant.tolist() == ["null", "ffn64", "ffn64"] and found.score.tolist() == [0.25, 0.5, 0.75]


@pytest.mark.parametrize(("name", "content"), [("none.csv", None), ("bad.parquet", "text"), ("empty.csv", "")])
def test_a_file_that_is_no_table_is_named(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=f"{name}: cannot be read as a table"):
        read_table(tmp_path / name)


def test_no_rows_and_a_child_leave_the_child_alone():
    child = Architecture(("kv2", "parent"), ("parent", "ffn64"))
    problem = read(pd.DataFrame(columns=[*KEY, "score"]), table(COSTS), child)
    assert problem.architecture(np.arange(len(problem.candidates))) == child


def test_the_gap_is_to_the_proven_bound_or_to_the_lowest_score_of_each_place():
    problem = read(table(SCORES.replace("0.25", "-0.25")), table(COSTS))
    assert problem.gap(2.0, 1.5) == 0.25
    assert problem.gap(1.0) == problem.gap(1.0, -9.0) == 1.25
    assert problem.gap(-0.25) == problem.gap(0.5, 0.5 + 1e-12) == 0
