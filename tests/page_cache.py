"""What of a file is in memory, for tests of what comes from the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.peers.page_cache import resident_bytes

__all__ = ["drop_from_memory", "resident_bytes"]


def drop_from_memory(*paths: Path) -> None:
    """Have files on the disk only; skips where that cannot be, as on tmpfs."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if any(map(resident_bytes, paths)):
        pytest.skip("this file system keeps its files in memory")
