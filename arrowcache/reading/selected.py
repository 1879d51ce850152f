"""Selected: the rows of segments that an epoch reads, where it does not read all. Pure: no clock, no file.

Selected rows are numbered 0, 1, 2, ..., oldest segment first, as an order numbers rows. `Selected` turns
these numbers into row ids of a snapshot. What is selected is a bitmap for each segment of which some rows are
left out, by its number: so it can be stored, and fits whatever else is in a snapshot. Memory is 4 bytes for
each selected row of such segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.lifetimes import cached_property
from arrowcache.reading.shuffle import starts_of

Bitmaps = Mapping[int, bytes]
"""By the number of a segment: one bit a row, the first row's highest, 1 if it is selected."""

ALL: Bitmaps = {}


def bitmap(mask: NDArray[np.bool_]) -> bytes:
    """Return the bitmap of a segment's mask, (rows,)."""
    return np.packbits(mask).tobytes()


def padding(rows: int) -> int:
    """Return the bits of a bitmap of so many rows that are no row's: they are 0."""
    return (1 << -rows % 8) - 1


def counts_of(seqs: NDArray[np.int64], rows: NDArray[np.int64], bitmaps: Bitmaps) -> NDArray[np.int64]:
    """Return the number of selected rows of each segment: (n,)."""
    if not bitmaps:
        return rows
    counts = rows.copy()
    for index, seq in enumerate(seqs.tolist()):
        if (bits := bitmaps.get(seq)) is not None:
            counts[index] = int.from_bytes(bits, "big").bit_count()
    return counts


class Selected:
    """The selected rows of some segments, oldest first. Several threads may ask.

    Args:
        seqs: (n,) int64, numbers of the segments, ascending.
        rows: (n,) int64, rows of each.
    """

    def __init__(self, seqs: NDArray[np.int64], rows: NDArray[np.int64], bitmaps: Bitmaps = ALL) -> None:
        self._seqs, self._rows, self._bitmaps = seqs, rows, bitmaps
        self.are_all = not bitmaps

    @cached_property
    def size(self) -> int:
        """The number of selected rows."""
        return int(counts_of(self._seqs, self._rows, self._bitmaps).sum())

    def ids(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row ids (n,) of selected rows (n,) in a snapshot of these segments."""
        if self.are_all:
            return numbers
        starts, shifts, is_part, tables, skipped = self._table
        segments = starts.searchsorted(numbers, side="right") - 1
        ids: NDArray[np.int64] = numbers + shifts[segments]
        ids += skipped[numbers * is_part[segments] + tables[segments]]
        return ids

    @cached_property
    def _table(self) -> tuple[NDArray[Any], ...]:
        """The numbers that `ids` looks up.

        Of each segment: the number of its first selected row; the rows left out before it; 1 if it is
        selected in part; where it then begins in the table, less its first number. And the table: the rows of
        the same segment left out before each selected row, after a 0 for segments that are whole.
        """
        counts = counts_of(self._seqs, self._rows, self._bitmaps)
        starts = starts_of(counts)[:-1]
        is_part, tables = np.zeros((2, len(starts)), np.int64)
        skipped, size = [np.zeros(1, np.uint32)], 1
        for index, seq in enumerate(self._seqs.tolist()):
            if (bits := self._bitmaps.get(seq)) is None:
                continue
            mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=int(self._rows[index]))
            chosen = mask.nonzero()[0]
            skipped.append((chosen - np.arange(len(chosen))).astype(np.uint32))
            is_part[index], tables[index] = 1, size - starts[index]
            size += len(chosen)
        return starts, starts_of(self._rows)[:-1] - starts, is_part, tables, np.concatenate(skipped)
