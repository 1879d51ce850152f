"""RowValues: the latest values of one name, kept for an epoch after the other.

Values of segments that stay are kept, and what was noted since is taken in. Only of segments that come all
notes are looked at.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arrowcache.storage.layout import MOST_SEQ, NoteFile
from arrowcache.storage.note_lines import VALUE, Rows
from arrowcache.storage.notes import VALUES, Notes


class RowValues:
    """The values of a name. One thread at a time asks."""

    def __init__(self, notes: Notes, name: str) -> None:
        self._notes, self._name = notes, name
        self._rows = Rows.of([])
        self._values = np.empty(0, np.float32)
        self._taken_in: set[NoteFile] = set()

    def of(self, rows: Rows) -> NDArray[np.float32]:
        """The value of each row, (rows,), NaN where none is. The next call writes to it."""
        first_came = self._move_to(rows)
        parts = self._notes.parts(VALUES)
        files = {file: notes for name, notes in parts.items() if (file := NoteFile.parse(name))}
        firsts, lasts = ({getattr(file, name) for file in self._taken_in} for name in ("first", "last"))
        for file, notes in files.items():
            is_old = file.first in firsts and file.last in lasts  # or was merged of what is
            first = first_came if is_old else 0
            if file.newest >= first:
                for said in notes.since(first).of_rows(rows, VALUE, text=self._name):
                    self._values[said.numbers] = said.values
        self._taken_in = {*files}
        return self._values

    def _move_to(self, rows: Rows) -> int:
        """Keep the values of rows of segments that stay. Returns: the oldest segment that comes."""
        old, values = self._rows, self._values
        if np.array_equal(rows.seqs, old.seqs):
            return MOST_SEQ + 1
        self._rows, self._values = rows, np.full(rows.size, np.nan, np.float32)
        stays = np.isin(rows.seqs, old.seqs)
        for at, before in zip(np.flatnonzero(stays), old.seqs.searchsorted(rows.seqs[stays]), strict=True):
            kept = values[old.starts[before] : old.starts[before + 1]]
            self._values[rows.starts[at] : rows.starts[at + 1]] = kept
        return int(rows.seqs[~stays].min(initial=MOST_SEQ + 1))
