# SPDX-License-Identifier: Apache-2.0
if (
    __name__ != "puzzle.scoring"
):  # the clone's root is on the path: this folder would load a second time as another module
    raise ImportError("import puzzle.scoring instead of scoring")
