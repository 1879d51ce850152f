"""Maps: read-only mappings of whole files, without a descriptor each. The face of maps.h.

Owns: what it maps, until `unmap`. Guarantees: no forked child inherits a mapping or counts one.
"""

from __future__ import annotations

import ctypes
import os
import struct
from array import array
from collections.abc import Sequence

from arrowcache.native.library import declare, library, quick

_TOO_LONG = -1  # MAPS_LENGTH of the header
_WORDS = struct.Struct("@6q")  # of `maps_file`
_KEPT_GIL_BYTES = 8 << 20  # unmapping so much takes some 0.1 ms


class File(ctypes.Structure):
    """A file, which may be open, and may be mapped: a `maps_file`. Made by `file`.

    `address` is 0 where it is not mapped, `fd` is -1 where it is not open. Any thread may read them.
    """

    _fields_ = (
        ("path", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in ("fd", "address", "nbytes", "device", "inode")),
    )
    path: bytes
    fd: int
    address: int
    nbytes: int

    def words(self) -> tuple[int, ...]:
        """The addresses of its path and of the file, its length, device and inode; all as of now."""
        path, _, *rest = _WORDS.unpack(self)
        return (path, *rest)

    def open(self, limit: int, most: int) -> None:
        """Open it, and map it, if less than `most` files are mapped and there are addresses: see `address`.

        Keeps the GIL. Whoever opened it calls `close`; it stays mapped until `unmap`.
        Raises: OSError: it cannot be opened. ValueError: it has not 1 to `limit` bytes.
        """
        code = quick.maps_open(self, limit, most)
        if code == _TOO_LONG:
            name = os.path.basename(os.fsdecode(self.path))
            raise ValueError(f"{name} has {self.nbytes} bytes, a segment has 1 to {limit}")
        if code:
            raise OSError(code, os.strerror(code), os.fsdecode(self.path))

    def map(self) -> None:
        """Map it, which is open, however many are mapped. Raises: OSError: there are no addresses."""
        if code := quick.maps_map(self):
            raise OSError(code, os.strerror(code), os.fsdecode(self.path))

    def close(self) -> None:
        """Close it; it stays mapped. Idempotent."""
        quick.maps_close(self)


def file(path: bytes) -> File:
    """A file that is neither open nor mapped, by its absolute path."""
    return File(path, -1)


def unmap(files: Sequence[File]) -> None:
    """Unmap files, and close what is open. Idempotent, and where it is interrupted, to be called again.

    Raises: OSError: not all; their `address` says which are left.
    """
    words = array("Q", map(ctypes.addressof, files))
    one = quick if sum(file.nbytes for file in files) < _KEPT_GIL_BYTES else library
    if code := one.maps_unmap(words.buffer_info()[0], len(words)):
        raise OSError(code, os.strerror(code))


def count() -> int:
    """The number of files that are mapped."""
    return int(quick.maps_count())


_file, _word = ctypes.POINTER(File), ctypes.c_int64
declare("maps_open", _word, _file, _word, _word)
declare("maps_map", _word, _file)
declare("maps_close", None, _file)
declare("maps_unmap", _word, ctypes.c_void_p, _word)
declare("maps_count", _word)
declare("maps_forget", None)
os.register_at_fork(after_in_child=quick.maps_forget)
