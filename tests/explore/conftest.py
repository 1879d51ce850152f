"""A cache of every type."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from every_type import every_type
from helpers import EVERY_TYPE

import arrowcache as ac


@pytest.fixture(scope="session")
def varied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed cache of three segments of `every_type()`, to be copied."""
    path = tmp_path_factory.mktemp("every-type") / "varied"
    sizes = {"capacity": "4MiB", "segment_bytes": "256KiB", "segment_rows": 7}
    with ac.Cache.create(path, EVERY_TYPE, **sizes) as cache, cache.writer() as writer:
        writer.extend(every_type())
    return path


@pytest.fixture
def varied(tmp_path: Path, varied_folder: Path) -> Iterator[ac.Cache]:
    """A cache of three segments of `every_type()`: a test's own."""
    with ac.Cache.open(shutil.copytree(varied_folder, tmp_path / "varied")) as cache:
        yield cache
