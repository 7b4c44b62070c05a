# SPDX-License-Identifier: Apache-2.0
"""One table from estimates of all variants and exact scores of some."""

import pandas as pd

from puzzle.architecture import PARENT
from puzzle.variants import KINDS, kind_of

KEY = ["layer", "subblock", "variant"]
ENOUGH = 3  # exact scores of a kind that give it a factor of its own


def calibrated(estimates: pd.DataFrame, exact: pd.DataFrame) -> pd.DataFrame:
    """Exact scores where there are some; elsewhere the estimate times what its kind is off by.

    Estimates rank variants of one kind well but are low by a tenth to a third, each kind by another factor, since they
    leave out what tokens do together; where both stand in one table they have to be on one scale.

    Args:
        estimates: layer, subblock, variant, score, stderr.
        exact: rows of `puzzle.scoring.replacement.sweep`, the parent's among them.

    Returns:
        One row a variant: the columns of `exact`, what only exact scores have empty elsewhere, `method` ("exact"
        or "fisher"), and `estimate`, the uncalibrated one.
    """
    table = estimates.rename(columns={"score": "estimate", "stderr": "estimate_stderr"}).merge(exact, "left", on=KEY)
    table["kind"] = [_kind(s, v) for s, v in zip(table.subblock, table.variant, strict=True)]
    both = table[table.kl.notna() & (table.variant != PARENT)]
    ratios = (both.kl / both.estimate.clip(lower=1e-30)).groupby(both.kind)
    factors = ratios.median()[ratios.size() >= ENOUGH]
    factor = table.kind.map(factors).fillna((both.kl / both.estimate).median() if len(both) else 1.0)
    missing = table.kl.isna()
    table.loc[missing, "kl"] = (table.estimate * factor)[missing]
    table.loc[missing, "stderr"] = (table.estimate_stderr * factor)[missing]
    table.loc[missing, "method"] = "fisher"
    table = table[[*exact.columns, "estimate"]]
    return table.sort_values(KEY, ignore_index=True)


def _kind(subblock: str, variant: str) -> str:
    if variant == PARENT:
        return PARENT
    kind = kind_of(variant, subblock)  # type: ignore[arg-type]
    return f"{subblock} {next(name for name, known in KINDS.items() if known is kind)}"
