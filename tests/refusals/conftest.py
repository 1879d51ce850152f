"""What refusals share."""

from __future__ import annotations

import pytest
from helpers import make_cache, publish

import arrowcache as ac


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> ac.Cache:
    """A cache like `cache`, for all tests of a module: each asserts that it leaves it as it was."""
    cache = make_cache(tmp_path_factory.mktemp("unchanged") / "cache")
    publish(cache, 10)
    return cache
