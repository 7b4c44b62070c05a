# SPDX-License-Identifier: Apache-2.0
"""Turns two tables and targets into architectures. No torch."""

from puzzle.search.mip import Workload, k_diverse, solve
from puzzle.search.pareto import ParetoFront, sweep
from puzzle.search.tables import read_table

__all__ = ["ParetoFront", "Workload", "k_diverse", "read_table", "solve", "sweep"]
