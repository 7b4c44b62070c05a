# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests: tiny parents, made once per session."""

from pathlib import Path

import pytest
import torch
from tiny_models import PARENTS, make_parent

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parent(tmp_path_factory.mktemp("parent"))


@pytest.fixture(scope="session", params=PARENTS)
def any_parent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parent(tmp_path_factory.mktemp(request.param), **PARENTS[request.param])


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(256, (6, 32), generator=torch.Generator().manual_seed(1))
