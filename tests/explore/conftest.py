"""A cache of every type."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from every_type import every_type
from helpers import EVERY_TYPE

import arrowcache as ac


@pytest.fixture
def varied(tmp_path: Path) -> Iterator[ac.Cache]:
    """A cache of three segments of `every_type()`."""
    with ac.Cache.create(
        tmp_path / "varied", EVERY_TYPE, capacity="4MiB", segment_bytes="256KiB", segment_rows=7
    ) as cache:
        with cache.writer() as writer:
            writer.extend(every_type())
        yield cache
