"""Lengths: the length of each row of a snapshot, as one column tells it.

Each segment is read once: of a ragged column the offsets, which are 4 bytes a row, else the column itself.
The lengths of the last snapshot's segments are kept, 4 bytes a row. A row that is too long is an error that
names it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Ragged, Schema
from arrowcache.reading.budget import Budget
from arrowcache.reading.memory import output_arrays
from arrowcache.reading.snapshot import Snapshot

_ROWS_AT_ONCE = 1 << 20


class Lengths:
    """The lengths of the rows of one loader's snapshots. One thread at a time asks."""

    def __init__(self, schema: Schema, budget: Budget) -> None:
        self._schema, self._budget = schema, budget
        self._known: dict[int, NDArray[np.int32]] = {}  # by the segment's seq

    def of(self, snapshot: Snapshot) -> NDArray[np.int32]:
        """Return the lengths of a snapshot's rows: (rows,), at least 1: an empty row counts as 1.

        Blocks: while those of new segments come from the disk.
        Raises: ValueError: a row is longer than the budget, or its length is negative. As `Snapshot.gather`.
        """
        known = {seq: self._known[seq] for seq in snapshot.seqs.tolist() if seq in self._known}
        for segments in self._new(snapshot, known):
            first, last = snapshot.rows_before(segments.start), snapshot.rows_before(segments.stop)
            lengths = self._checked(snapshot, first, self._read(snapshot, first, last))
            for index in segments:
                start, stop = snapshot.rows_before(index) - first, snapshot.rows_before(index + 1) - first
                known[snapshot.segments[index].seq] = lengths[start:stop]
        self._known = known
        return np.concatenate([np.empty(0, np.int32), *[known[seq] for seq in snapshot.seqs.tolist()]])

    def _new(self, snapshot: Snapshot, known: dict[int, NDArray[np.int32]]) -> Iterator[range]:
        """Yield runs of segments whose lengths are not known, to be read at once."""
        first, rows = 0, 0
        for index, segment in enumerate(snapshot.segments):
            if segment.seq in known or rows >= _ROWS_AT_ONCE:
                if index > first:
                    yield range(first, index)
                first, rows = index + (segment.seq in known), 0
            rows += segment.rows
        if first < len(snapshot.segments):
            yield range(first, len(snapshot.segments))

    def _read(self, snapshot: Snapshot, first: int, last: int) -> NDArray[np.int64]:
        column = self._budget.column
        if isinstance(self._schema[column], Ragged):
            return snapshot.item_counts(first, last, column)
        arrays = output_arrays(self._schema, (column,), last - first, None)
        found = snapshot.gather_into(np.arange(first, last), (column,), arrays)[column]
        assert isinstance(found, np.ndarray)
        return found

    def _checked(self, snapshot: Snapshot, first: int, lengths: NDArray[np.int64]) -> NDArray[np.int32]:
        tokens, column = self._budget
        if (lengths < 0).any():
            where, length = self._named(snapshot, first, lengths, int(lengths.argmin()))
            raise ValueError(f"{where} has length {length} in {column!r}: a length is at least 0")
        if (lengths > tokens).any():
            where, length = self._named(snapshot, first, lengths, int(lengths.argmax()))
            raise ValueError(
                f"{where} has length {length} in {column!r}, more than batch_tokens={tokens}: raise "
                "batch_tokens, have samplers cut such rows, or leave the segment out with `where`"
            )
        return np.maximum(lengths, 1).astype(np.int32)

    def _named(
        self, snapshot: Snapshot, first: int, lengths: NDArray[np.int64], index: int
    ) -> tuple[str, int]:
        found = snapshot.locate(np.array([first + index]))
        seq, row = int(found["_seq"][0]), int(found["_row"][0])
        return f"row {row} of segment {seq}", int(lengths[index])
