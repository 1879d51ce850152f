"""What of a file is in memory, for tests of what comes from the disk."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.usage import resident_bytes

__all__ = ["counts_pages", "drop_from_memory", "resident_bytes"]


def drop_from_memory(*paths: Path) -> None:
    """Have files on the disk only; skips where that cannot be, as on tmpfs."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if any(map(resident_bytes, paths)):
        pytest.skip("this file system keeps its files in memory")


def counts_pages(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test anew where it fails, twenty times at most: a busy kernel takes pages back at any time."""

    @functools.wraps(test)
    def anew(**given: Any) -> None:
        folder = given.get("tmp_path")
        for number in range(20):
            if folder:
                given["tmp_path"] = folder / str(number)
                given["tmp_path"].mkdir()
            try:
                test(**given)
                break
            except AssertionError:
                if number == 19:
                    raise

    return anew
