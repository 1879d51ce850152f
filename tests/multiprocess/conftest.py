"""What several tests of processes need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from helpers import make_cache, publish

if TYPE_CHECKING:
    from pathlib import Path

    import arrowcache as ac


@pytest.fixture
def cache(tmp_path: Path) -> ac.Cache:
    """Twenty segments of 16 rows, ids 0 to 319."""
    cache = make_cache(tmp_path / "cache")
    publish(cache, 20)
    return cache
