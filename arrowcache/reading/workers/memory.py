"""Memory without a name: anonymous files, and arrays over mappings of them.

Nothing here is in /dev/shm, and a kill leaves nothing behind.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache import linux


def anonymous_file() -> int:
    """A descriptor of an empty file without a name, which inherits to nobody by itself."""
    try:
        return linux.memory_file("arrowcache")
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # else: an old kernel, or a sandbox
        import tempfile

        with tempfile.TemporaryFile(prefix="arrowcache-") as file:
            return os.dup(file.fileno())


def file_of(data: bytes) -> int:
    """An anonymous file with these bytes; the caller closes it."""
    fd = anonymous_file()
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return fd


def bytes_of(fd: int) -> bytes:
    """What a file holds, whoever else reads it; leaves it open."""
    pieces, nbytes = [], 0
    while piece := os.pread(fd, 1 << 24, nbytes):
        pieces.append(piece)
        nbytes += len(piece)
    return b"".join(pieces)


def map_all(fd: int) -> mmap.mmap:
    """Map a whole shared file, for reading and writing."""
    return mmap.mmap(fd, os.fstat(fd).st_size)


def array_over(memory: mmap.mmap, offset: int, dtype: Any, shape: Sequence[int]) -> NDArray[Any]:
    """An array over a part of a mapping; it keeps nothing from being used again."""
    return np.ndarray(tuple(shape), np.dtype(dtype), buffer=memory, offset=offset)
