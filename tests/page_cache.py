"""What of a file is in memory, for tests of what comes from the disk."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest


def resident_bytes(path: Path) -> int:
    """How much of a file is in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapped:
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        memory = np.frombuffer(mapped, np.uint8)
        code = libc.mincore(*map(ctypes.c_size_t, (memory.ctypes.data, len(mapped), pages.ctypes.data)))
        del memory
        assert code == 0, os.strerror(ctypes.get_errno())
    return int((pages & 1).sum()) * mmap.PAGESIZE


def drop_from_memory(*paths: Path) -> None:
    """Have files on the disk only; skips where that cannot be, as on tmpfs."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if any(map(resident_bytes, paths)):
        pytest.skip("this file system keeps its files in memory")
