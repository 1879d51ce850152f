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


def mask_of(bits: bytes, rows: int) -> NDArray[np.bool_]:
    """The inverse of `bitmap`: the mask of so many rows, (rows,)."""
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=rows).view(np.bool_)


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
        self._seqs, self._rows = seqs, rows
        self._bitmaps = bitmaps and {seq: bitmaps[seq] for seq in seqs.tolist() if seq in bitmaps}
        self.are_all = not self._bitmaps

    @cached_property
    def size(self) -> int:
        """The number of selected rows."""
        return int(counts_of(self._seqs, self._rows, self._bitmaps).sum())

    def ids(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row ids (n,) of selected rows (n,) in a snapshot of these segments."""
        if self.are_all:
            return numbers
        starts, is_part, places, left_out = self._table
        lines = numbers
        if len(starts) > 1:
            runs = starts.searchsorted(numbers, side="right") - 1
            lines = numbers * is_part[runs] + places[runs]
        ids: NDArray[np.int64] = numbers + left_out[lines]
        return ids

    def numbers(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The inverse of `ids`: numbers of the row ids (n,) that are selected, and a mask (n,) of these."""
        if self.are_all:
            return ids, np.ones(len(ids), np.bool_)
        numbers = self._all_ids.searchsorted(ids)
        is_selected = np.append(self._all_ids, -1)[numbers] == ids
        return numbers[is_selected].astype(np.int64), is_selected

    @cached_property
    def _all_ids(self) -> NDArray[np.int64]:
        return self.ids(np.arange(self.size))

    @cached_property
    def _table(self) -> tuple[NDArray[Any], ...]:
        """The numbers that `ids` looks up.

        A table has the number of rows left out before each selected one. It has one line for all rows of a
        segment that is whole. Runs of segments that are read in part are as one. Of each run and each whole
        segment: the number of its first selected row; 1 if it is read in part; its first line, of a run less
        that number.
        """
        counts = counts_of(self._seqs, self._rows, self._bitmaps)
        firsts, before = starts_of(counts)[:-1].tolist(), starts_of(self._rows)[:-1].tolist()
        dtype = np.uint32 if self._rows.sum() < 1 << 32 else np.int64
        runs: list[tuple[int, int, int]] = []
        table, size = [np.empty(0, dtype)], 0
        for index, seq in enumerate(self._seqs.tolist()):
            bits, first = self._bitmaps.get(seq), firsts[index]
            if bits is None:
                runs.append((first, 0, size))
                left_out = np.zeros(1, np.int64)
            else:
                if not runs or not runs[-1][1]:
                    runs.append((first, 1, size - first))
                left_out = mask_of(bits, int(self._rows[index])).nonzero()[0]
                left_out -= np.arange(len(left_out))
            left_out += before[index] - first
            table.append(left_out.astype(dtype))
            size += len(left_out)
        starts, is_part, places = np.array(runs, np.int64).T
        return starts, is_part, places, np.concatenate(table)
