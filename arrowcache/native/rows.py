"""Rows: segments' files and the rows in them, numbered one after another, as the engine reads them.

Begins with no file known; each is put there when it is. Whoever has it keeps what it was given where it is.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from arrowcache.native.library import address_of, declare, quick

_SEGMENT_WORDS = 7  # of `engine_segment`
_FIRST = 3  # of `engine_rows`
_BLOCKS_A_SEGMENT = 4


class Rows:
    """A table that C reads.

    Args:
        starts: (n + 1,) int64 numbers of the segments' first rows, and how many rows there are.
    """

    def __init__(self, starts: NDArray[np.int64]) -> None:
        count, rows = len(starts) - 1, int(starts[-1])
        self._table = np.zeros((count + 1, _SEGMENT_WORDS), np.int64)
        self._table[:, 3] = starts
        each = np.diff(starts)
        alike = count > 0 and bool((each[:-1] == each[0]).all()) and each[-1] <= each[0]
        rows_each, shift, blocks = int(each[0]) if alike else 0, 0, np.zeros(0, np.int64)
        if count and not alike:
            shift = max(0, (rows // (_BLOCKS_A_SEGMENT * count)).bit_length() - 1)
            firsts = np.arange(0, rows + (1 << shift), 1 << shift)
            blocks = starts.searchsorted(np.minimum(firsts, rows - 1), side="right") - 1
        self._blocks = blocks
        words = (address_of(self._table), address_of(blocks), count, 0, rows, rows_each, shift)
        self._words = np.array(words, np.int64)
        self.address = address_of(self._words)

    def put(
        self, index: int, base: int, nbytes: int, layout: int, path: int, device: int, inode: int
    ) -> None:
        """Make a segment's file known.

        Args:
            index: of the segment.
            base: address of the file where it is mapped; 0: it is not, and its rows are read.
            nbytes: of the file.
            layout: address of int64 numbers that say where each buffer begins, in bytes of the file.
            path: address of its path, which ends with a zero byte; 0: it is mapped, and is not read.
            device, inode: of the file.
        """
        self._table[index, 1], self._table[index, 2] = nbytes, layout
        self._table[index, 4:] = path, _word(device).value, _word(inode).value  # which may be from 2**63 on
        self._table[index, 0] = base  # last: it may be looked at meanwhile

    def release(self, first: int) -> None:
        """Refuse rows before this one from now on."""
        self._words[_FIRST] = first

    def segments_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64] | int:
        """The segment of each row (n,); or the index of a number that is out of range."""
        segments = np.empty(len(ids), np.int64)
        ids = np.ascontiguousarray(ids, np.int64)
        bad = quick.engine_segments(self.address, address_of(ids), len(ids), address_of(segments))
        return segments if bad < 0 else int(bad)


_pointer, _word = ctypes.c_void_p, ctypes.c_int64
declare("engine_segments", _word, _pointer, _pointer, _word, _pointer)
