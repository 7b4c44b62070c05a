# SPDX-License-Identifier: Apache-2.0
"""Turns two tables and targets into architectures. No torch."""

from puzzle.costs import Scenario
from puzzle.search.batch import best_batch, by_batch
from puzzle.search.mip import Workload, k_diverse, solve
from puzzle.search.pareto import ParetoFront, sweep
from puzzle.search.tables import read_table

__all__ = ["ParetoFront", "Scenario", "Workload", "best_batch", "by_batch", "k_diverse", "read_table", "solve", "sweep"]
