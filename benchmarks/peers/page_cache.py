"""Cold files: what is written goes to the disk and leaves the page cache, and that it did is looked up."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)


def drop(folder: Path) -> None:
    """Have no file of a folder in the page cache.

    Raises: RuntimeError: a twentieth of them or more still is.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    total = sum(path.stat().st_size for path in files)
    if (resident := sum(map(resident_bytes, files))) > total / 20:
        raise RuntimeError(f"{resident} of {total} bytes stayed in the page cache: some process maps them")


def resident_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache, in whole pages."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        status = _LIBC.mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        )
        del view
    if status:
        raise OSError(ctypes.get_errno(), "mincore")
    return int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE
