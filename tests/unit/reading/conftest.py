"""What the tests of reading share."""

from __future__ import annotations

import os

import pytest

from arrowcache.native import maps


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's environment: what a loader's rank is, a test says."""
    for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cache(request, tmp_path, filled):
    """Segments of 16 rows, the last one may be short: ids 0 to 159, or as many as the module's ROWS says."""
    return filled(getattr(request.module, "ROWS", 160), tmp_path / "cache")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the segments whose files are checked completely, in turn: each is mapped for that."""
    found: list[int] = []
    mapping = maps.File.map

    def noted(file: maps.File) -> None:
        found.append(int(os.path.basename(file.path)[:20]))
        mapping(file)

    monkeypatch.setattr(maps.File, "map", noted)
    return found
