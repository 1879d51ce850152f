"""Maps: read-only mappings of whole files, without a descriptor each. The face of maps.h.

Owns: what it maps, until `unmap`. Guarantees: no forked child inherits a mapping or counts one.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.lifetimes import at_fork
from arrowcache.native.library import address_of, declare, library, quick

_TOO_LONG, _WAITS = -1, -2  # MAPS_LENGTH and MAPS_WAITS of the header
PATH, FD, ADDRESS, NBYTES, DEVICE, INODE = range(6)  # words of a `maps_file`
WORDS = 6
_KEPT_GIL_BYTES, _KEPT_GIL_FILES = 8 << 20, 16  # unmapping so much takes some 0.1 ms
_WAITED_FILES = 16  # at once, where one is on the disk


class File(ctypes.Structure):
    """A file, which may be open, and may be mapped: a `maps_file`. Made by `files`, or `File.at`.

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
    device: int
    inode: int
    paths: object  # what keeps its path

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> File:
        """One file that is neither open nor mapped."""
        return cls(os.fsencode(path), -1)

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


class Kind:
    """Files that are alike: as long, and equal in some parts.

    Args:
        nbytes: of a file.
        parts: (where it begins in a file, its bytes), in rising order, without overlap.
    """

    def __init__(self, nbytes: int, parts: Sequence[tuple[int, bytes]]) -> None:
        self._bytes = np.frombuffer(b"".join(part for _, part in parts), np.uint8)
        lengths = [len(part) for _, part in parts]
        places = itertools.accumulate(lengths[:-1], initial=address_of(self._bytes))
        starts = [start for start, _ in parts]
        self._parts = np.array([*zip(starts, lengths, places, strict=True)], np.int64)
        self._words = np.array([nbytes, len(parts), address_of(self._parts)], np.int64)
        self.address = address_of(self._words)

    def has(self, file: File) -> bool:
        """Whether a file that is open is of this kind; False also where it cannot be read.

        Lets go of the GIL only where it waits for the disk.
        """
        alike = quick.maps_is_alike(file, self.address, False)
        return bool(library.maps_is_alike(file, self.address, True) if alike == _WAITS else alike)


class Files(Sequence[File]):
    """Some rows of a table of files. What is done to a file is done to its row.

    Args:
        words: (n, 6) int64, C-contiguous: what a `maps_file` holds: path, fd, address, nbytes, device, inode.
        rows: (m,) which; None: all.
        paths: what keeps the paths.
    """

    def __init__(
        self, words: NDArray[np.int64], rows: NDArray[np.int64] | None = None, paths: object = None
    ) -> None:
        self.words, self.paths = words, paths
        self._rows = np.arange(len(words)) if rows is None else rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        file = File.from_buffer(self.words.data, self.words.strides[0] * int(self._rows[index]))
        file.paths = self.paths
        return file

    @property
    def places(self) -> NDArray[np.int64]:
        """(m,) where each `maps_file` is."""
        return address_of(self.words) + self.words.strides[0] * self._rows

    @property
    def nbytes(self) -> int:
        """Of all, as far as they were opened."""
        return int(self.words[self._rows, NBYTES].sum())


def files(folder: str, names: Sequence[str]) -> Files:
    """Files that are neither open nor mapped.

    Args:
        folder: its absolute path.
        names: in it, of ASCII.
    """
    before = os.fsencode(f"\0{folder}/")
    text = np.frombuffer(before + before.join([name.encode() for name in names]) + b"\0", np.uint8)
    lengths = np.fromiter(map(len, names), np.int64, len(names)) + len(before)
    words = np.zeros((len(names), WORDS), np.int64)
    words[:, PATH] = address_of(text) + 1 + np.cumsum(lengths) - lengths
    words[:, FD] = -1
    return Files(words, paths=text)


def open_alike(files: Files, kind: Kind, most: int) -> NDArray[np.bool_]:
    """Map those files that are of a kind, as `File.open`, and leave none open.

    Keeps the GIL, some ten microseconds a file, unless it waits for the disk.
    Returns: (m,) False: it is of another kind, or cannot be opened, and is not mapped.
    """
    alike, places, done = np.zeros(len(files), np.bool_), files.places, 0
    one, count = quick, len(files)
    while done < len(files):
        waits = one is library
        where = address_of(places[done:]), min(count, len(files) - done), kind.address, most, waits
        done += one.maps_open_alike(*where, address_of(alike[done:]))
        one, count = (quick, len(files)) if waits else (library, _WAITED_FILES)
    return alike


def unmap(files: Sequence[File], touched_bytes: int | None = None) -> None:
    """Unmap files, and close what is open. Idempotent, and where it is interrupted, to be called again.

    Args:
        touched_bytes: of them, where that is known: those take the time.
    Raises: OSError: not all; their `address` says which are left.
    """
    if isinstance(files, Files):
        places, nbytes = files.places, files.nbytes
        where = address_of(places)
    else:
        pointers = (ctypes.c_void_p * len(files))(*map(ctypes.addressof, files))
        where, nbytes = ctypes.addressof(pointers), sum([file.nbytes for file in files])
    nbytes = nbytes if touched_bytes is None else touched_bytes
    one = quick if nbytes < _KEPT_GIL_BYTES and len(files) <= _KEPT_GIL_FILES else library
    if code := one.maps_unmap(where, len(files)):
        raise OSError(code, os.strerror(code))


def count() -> int:
    """The number of files that are mapped."""
    return int(quick.maps_count())


_file, _word = ctypes.POINTER(File), ctypes.c_int64
declare("maps_open", _word, _file, _word, _word)
declare("maps_open_alike", _word, ctypes.c_void_p, _word, ctypes.c_void_p, _word, _word, ctypes.c_void_p)
declare("maps_is_alike", _word, _file, ctypes.c_void_p, _word)
declare("maps_map", _word, _file)
declare("maps_close", None, _file)
declare("maps_unmap", _word, ctypes.c_void_p, _word)
declare("maps_count", _word)
declare("maps_forget", None)
at_fork(in_child=quick.maps_forget)
