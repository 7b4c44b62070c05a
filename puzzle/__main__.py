# SPDX-License-Identifier: Apache-2.0
"""`python -m puzzle`: the command line."""

from puzzle.cli import main

main()
