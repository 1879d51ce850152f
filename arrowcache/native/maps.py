"""Maps: read-only mappings of whole files, without a descriptor each. The face of maps.h.

Owns: its mappings, until `unmap`. Guarantees: no forked child inherits a mapping or counts one.
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
_KEPT_GIL_BYTES, _KEPT_GIL_FILES = 8 << 20, 16  # unmapping up to these takes some 0.1 ms
_WAITED_FILES = 16  # at once, if one is on the disk


class File(ctypes.Structure):
    """A file, which may be open, and may be mapped: a `maps_file`. Made by `files`, or `File.at`.

    `address` is 0 if it is not mapped, `fd` is -1 if it is not open. Any thread may read them.
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
    paths: object  # owner of its path

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> File:
        return cls(os.fsencode(path), -1)

    def open(self, limit: int, most: int) -> None:
        """Open it, and map it if fewer than `most` files are mapped and there is `room`: see `address`.

        Keeps the GIL. The caller must call `close`; the file stays mapped until `unmap`.
        Raises: OSError: the file cannot be opened. ValueError: it has not 1 to `limit` bytes.
        """
        code = quick.maps_open(self, limit, most)
        if code == _TOO_LONG:
            name = os.path.basename(os.fsdecode(self.path))
            raise ValueError(f"{name} has {self.nbytes} bytes, a segment has 1 to {limit}")
        if code:
            raise OSError(code, os.strerror(code), os.fsdecode(self.path))

    def map(self) -> None:
        """Map an open file, however many are mapped. Raises: OSError: no addresses are left."""
        if code := quick.maps_map(self):
            raise OSError(code, os.strerror(code), os.fsdecode(self.path))

    def close(self) -> None:
        """Close it; it stays mapped. Idempotent."""
        quick.maps_close(self)


class FileKind:
    """A kind of files: of the same length, and equal in some parts.

    Args:
        nbytes: length of a file.
        parts: (its begin in a file, its bytes), in rising order, without overlap.
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
        """True if an open file is of this kind; False also if it cannot be read.

        Releases the GIL only while it waits for the disk.
        """
        alike = quick.maps_is_alike(file, self.address, False)
        return bool(library.maps_is_alike(file, self.address, True) if alike == _WAITS else alike)


class Files(Sequence[File]):
    """Some rows of a table of files. A change of a file changes its row.

    Args:
        words: (n, 6) int64, C-contiguous, the words of a `maps_file`: path, fd, address, nbytes, device,
            inode.
        rows: (m,) indices of the rows. None means all.
        paths: owner of the paths.
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
        """The address of each `maps_file`, (m,)."""
        return address_of(self.words) + self.words.strides[0] * self._rows

    @property
    def nbytes(self) -> int:
        return int(self.words[self._rows, NBYTES].sum())


def files(folder: str, names: Sequence[str]) -> Files:
    """Return files of a folder, given by its absolute path, that are neither open nor mapped."""
    before = os.fsencode(f"\0{folder}/")
    text = np.frombuffer(before + before.join([name.encode() for name in names]) + b"\0", np.uint8)
    lengths = np.fromiter(map(len, names), np.int64, len(names)) + len(before)
    words = np.zeros((len(names), WORDS), np.int64)
    words[:, PATH] = address_of(text) + 1 + np.cumsum(lengths) - lengths
    words[:, FD] = -1
    return Files(words, paths=text)


def open_alike(files: Files, kind: FileKind, most: int) -> NDArray[np.bool_]:
    """Map the files that are of a kind, as `File.open`, and leave none open.

    Keeps the GIL, some ten microseconds a file, unless it waits for the disk.
    Returns: (m,) True for mapped files. False: of another kind, or it cannot be opened.
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
    """Unmap files, and close open ones. Idempotent; call it again after an interrupt.

    Args:
        touched_bytes: bytes of them that were touched, if known: unmapping takes time for these.
    Raises: OSError: some are left; their `address` shows which.
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


def room(quarters: int = 2) -> int:
    """Return how many bytes of files may be mapped still; 2**63 - 1 where addresses are not limited.

    They leave the process a share for all else of the addresses that it may have (RLIMIT_AS): see maps.h.
    Args:
        quarters: the share of files: 2, of segments, is half.
    """
    return int(quick.maps_room(quarters))


def count() -> int:
    """Return the number of mapped files."""
    return int(quick.maps_count())


_file, _word = ctypes.POINTER(File), ctypes.c_int64
declare("maps_open", _word, _file, _word, _word)
declare("maps_open_alike", _word, ctypes.c_void_p, _word, ctypes.c_void_p, _word, _word, ctypes.c_void_p)
declare("maps_is_alike", _word, _file, ctypes.c_void_p, _word)
declare("maps_map", _word, _file)
declare("maps_close", None, _file)
declare("maps_unmap", _word, ctypes.c_void_p, _word)
declare("maps_room", _word, _word)
declare("maps_count", _word)
declare("maps_forget", None)
at_fork(in_child=quick.maps_forget)
