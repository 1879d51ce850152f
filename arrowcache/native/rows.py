"""Rows: the rows of several segments, numbered one after another, as the engine reads them.

It is a table of segments. It is filled in place, segment by segment, as their files are mapped. Meanwhile
threads copy rows of other segments.

Must never: have the address of a segment that is unmapped while its rows may still be asked for. The caller
keeps all memory whose addresses are in the table.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from arrowcache.native import maps
from arrowcache.native.library import address_of, declare, quick

_SEGMENT_WORDS = 7  # of `engine_segment`
_BASE, _NBYTES, _AT, _FIRST_ROW, _PATH, _DEVICE, _INODE = range(_SEGMENT_WORDS)
_FROM_WORDS = [_BASE, _NBYTES, _PATH, _DEVICE, _INODE]
_WORDS = [maps.ADDRESS, maps.NBYTES, maps.PATH, maps.DEVICE, maps.INODE]  # in the same order
_FIRST = 3  # of `engine_rows`
_BLOCKS_A_SEGMENT = 4


def entries_of(words: NDArray[np.int64], layouts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the entries of some files for `SegmentRows.put`: (n, words of an `engine_segment`).

    Args:
        words: (n, words of one) of `maps.Files`. Files without an address are read, not copied.
        layouts: (n,) addresses of int64 arrays with the begin of each buffer, in bytes of the file.
    """
    told = np.zeros((len(words), _SEGMENT_WORDS), np.int64)
    told[:, _FROM_WORDS] = words[:, _WORDS]
    told[:, _AT] = layouts
    return told


class SegmentRows:
    """Rows of segments, none of which is mapped at first.

    Args:
        starts: (n + 1,) int64 numbers of the segments' first rows, then the number of all rows.
    """

    def __init__(self, starts: NDArray[np.int64]) -> None:
        count, rows = len(starts) - 1, int(starts[-1])
        self._table = np.zeros((count + 1, _SEGMENT_WORDS), np.int64)
        self._table[:, _FIRST_ROW] = starts
        self._is_known = np.zeros(count, np.bool_)
        each = np.diff(starts)
        alike = count > 0 and bool((each[:-1] == each[0]).all()) and each[-1] <= each[0]
        rows_each, shift, self._blocks = int(each[0]) if alike else 0, 0, np.zeros(0, np.int64)
        if count and not alike:
            shift = max(0, (rows // (_BLOCKS_A_SEGMENT * count)).bit_length() - 1)
            firsts = np.arange(0, rows + (1 << shift), 1 << shift)
            self._blocks = starts.searchsorted(np.minimum(firsts, rows - 1), side="right") - 1
        words = (address_of(self._table), address_of(self._blocks), count, 0, rows, rows_each, shift)
        self._words = np.array(words, np.int64)
        self.address = address_of(self._words)

    def put(self, indices: ArrayLike, entries: ArrayLike) -> None:
        """Set the places of segments, from their files' `entries_of`. The indices rise."""
        at: Any = np.asarray(indices, np.int64)
        if len(at) and at[-1] - at[0] + 1 == len(at):
            at = slice(at[0], at[-1] + 1)  # a slice is faster
        told = np.asarray(entries, np.int64).reshape(-1, _SEGMENT_WORDS)
        self._table[at, _NBYTES:_FIRST_ROW] = told[:, _NBYTES:_FIRST_ROW]
        self._table[at, _PATH:] = told[:, _PATH:]
        self._table[at, _BASE] = told[:, _BASE]  # last, in one piece: threads may read it by now
        self._is_known[at] = True

    def release(self, first: int) -> None:
        """Refuse rows before this one from now on."""
        self._words[_FIRST] = first

    def segments_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64] | int:
        """Return the segment of each row (n,), or the index of a number that is out of range."""
        segments = np.empty(len(ids), np.int64)
        ids = np.ascontiguousarray(ids, np.int64)
        bad = quick.engine_segments(self.address, address_of(ids), len(ids), address_of(segments))
        return segments if bad < 0 else int(bad)

    @property
    def is_known(self) -> bool:
        """True if all segments were put."""
        return bool(self._is_known.all())

    def knows(self, segment: int) -> bool:
        """True if a segment was put, by its number."""
        return bool(self._is_known[segment])

    def unknown(self, segments: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Return the segments that were not put yet, each once and in order: of these, or of all."""
        is_unknown = ~self._is_known
        if segments is not None:
            is_asked = np.zeros(len(is_unknown), np.bool_)
            is_asked[segments] = True
            is_unknown &= is_asked
        return is_unknown.nonzero()[0]  # np.unique would import numpy.ma: 30 ms


declare("engine_segments", c_int64, c_void_p, c_void_p, c_int64, c_void_p)
