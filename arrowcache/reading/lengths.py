"""Lengths: the length of each row of a snapshot, as one column tells it.

Each segment is read once: of a ragged column the offsets, which are 4 bytes a row, else the column itself.
The lengths of the last snapshot's segments are kept, 4 bytes a row. A row that is too long is an error that
names it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.budget import Budget
from arrowcache.reading.row_functions import unknown_runs
from arrowcache.reading.snapshot import Snapshot

_ROWS_AT_ONCE = 1 << 20
_MOST_LENGTH = (1 << 31) - 1  # what is longer is longer than any budget


class Lengths:
    """The lengths of the rows of one loader's snapshots. One thread at a time asks."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._known: dict[int, NDArray[np.int32]] = {}  # by the segment's seq

    def of(self, snapshot: Snapshot) -> NDArray[np.int32]:
        """Return the lengths of a snapshot's selected rows: (n,), at least 1: an empty row counts as 1.

        Blocks: while those of new segments come from the disk.
        Raises: ValueError: a row is longer than the budget, or its length is negative. As `Snapshot.gather`.
        """
        known = {seq: self._known[seq] for seq in snapshot.seqs.tolist() if seq in self._known}
        for segments in unknown_runs(snapshot, known, _ROWS_AT_ONCE):
            first, last = snapshot.rows_before(segments.start), snapshot.rows_before(segments.stop)
            read = snapshot.lengths(first, last, self._budget.column)
            lengths = read.clip(-_MOST_LENGTH, _MOST_LENGTH).astype(np.int32)
            for index in segments:
                start, stop = snapshot.rows_before(index) - first, snapshot.rows_before(index + 1) - first
                known[snapshot.segments[index].seq] = lengths[start:stop]
        self._known = known
        of_all = np.concatenate([np.empty(0, np.int32), *[known[seq] for seq in snapshot.seqs.tolist()]])
        selected = snapshot.selected
        lengths = of_all if selected.are_all else of_all[selected.ids(np.arange(selected.size))]
        self._require_fit(snapshot, lengths)
        return np.maximum(lengths, 1)

    def _require_fit(self, snapshot: Snapshot, lengths: NDArray[np.int32]) -> None:
        tokens, column = self._budget
        if lengths.min(initial=0) < 0:
            row = _named(snapshot, lengths.argmin())
            raise ValueError(f"{row} has length {lengths.min()} in {column!r}: a length is at least 0")
        if lengths.max(initial=0) > tokens:
            row = _named(snapshot, lengths.argmax())
            raise ValueError(
                f"{row} has length {lengths.max()} in {column!r}, more than batch_tokens={tokens}: raise "
                "batch_tokens, have samplers cut such rows, or leave the row out with cache.exclude()"
            )


def _named(snapshot: Snapshot, number: np.intp) -> str:
    found = snapshot.locate(snapshot.selected.ids(np.array([number])))
    return f"row {found['_row'][0]} of segment {found['_seq'][0]}"
