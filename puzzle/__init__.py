# SPDX-License-Identifier: Apache-2.0
"""Puzzle: compress a trained Llama-style model for the machine it will run on.

`import puzzle` lets transformers' Auto classes load the children (`model_type: nemotron-nas`); it costs nothing until
transformers is imported.
"""

from puzzle.registration import register

__version__ = "0.1.0"
register()
