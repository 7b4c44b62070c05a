# SPDX-License-Identifier: Apache-2.0
if (
    __name__ != "puzzle.reports"
):  # the clone's root is on the path: this folder would load a second time as another module
    raise ImportError("import puzzle.reports instead of reports")
