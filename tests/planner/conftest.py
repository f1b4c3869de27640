"""Shapes are kept for one session only, and never among a user's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zerosim.planner import shape_cache


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv(shape_cache.FOLDER, str(tmp_path_factory.mktemp("shapes")))
    yield
    patch.undo()
