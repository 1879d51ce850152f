"""RowValues: the latest values of one name, kept for an epoch after the other.

Values of segments that stay are kept, and what was noted since is taken in. Only of segments that come all
notes are looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.storage.layout import MOST_SEQ, NoteFile
from arrowcache.storage.note_lines import VALUE, Rows
from arrowcache.storage.notes import VALUES, Notes


class _Known(NamedTuple):
    """The values of rows, and the files that they are of."""

    rows: Rows
    values: NDArray[np.float32]
    taken_in: frozenset[NoteFile]


class RowValues:
    """The values of a name. One thread at a time asks."""

    def __init__(self, notes: Notes, name: str) -> None:
        self._notes, self._name = notes, name
        self._known = _Known(Rows.of([]), np.empty(0, np.float32), frozenset())

    def of(self, rows: Rows) -> NDArray[np.float32]:
        """The value of each row, (rows,), NaN where none is. The next call writes to it."""
        values, first_came = self._moved_to(rows)
        parts = self._notes.parts(VALUES)
        files = {file: notes for name, notes in parts.items() if (file := NoteFile.parse(name))}
        firsts, lasts = ({getattr(file, name) for file in self._known.taken_in} for name in ("first", "last"))
        for file, notes in files.items():
            is_old = file.first in firsts and file.last in lasts  # or was merged of what is
            first = first_came if is_old else 0
            if file.newest >= first:
                for said in notes.since(first).of_rows(rows, VALUE, text=self._name):
                    with np.errstate(over="ignore"):
                        values[said.numbers] = said.values
        self._known = _Known(rows, values, frozenset(files))  # at once: Ctrl-C leaves what was known before
        return values

    def _moved_to(self, rows: Rows) -> tuple[NDArray[np.float32], int]:
        """The values of rows of segments that stay, and the oldest segment that comes."""
        old, known, _ = self._known
        if np.array_equal(rows.seqs, old.seqs):
            return known, MOST_SEQ + 1
        values = np.full(rows.size, np.nan, np.float32)
        stays = np.isin(rows.seqs, old.seqs)
        for at, before in zip(np.flatnonzero(stays), old.seqs.searchsorted(rows.seqs[stays]), strict=True):
            values[rows.starts[at] : rows.starts[at + 1]] = known[old.starts[before] : old.starts[before + 1]]
        return values, int(rows.seqs[~stays].min(initial=MOST_SEQ + 1))
