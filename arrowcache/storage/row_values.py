"""RowValues: the latest values of one name, kept for an epoch after the other.

Values of the same rows are brought up to date by what was noted since; of others they are read anew.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arrowcache.storage.note_lines import VALUE, Rows
from arrowcache.storage.notes import VALUES, Notes


class RowValues:
    """The values of a name. One thread at a time asks."""

    def __init__(self, notes: Notes, name: str) -> None:
        self._notes, self._name = notes, name
        self._rows = Rows.of([])
        self._values = np.empty(0, np.float32)
        self._taken_in: set[str] = set()  # names of files

    def of(self, rows: Rows) -> NDArray[np.float32]:
        """The value of each row, (rows,), NaN where none is. The next call writes to it."""
        if not np.array_equal(rows.seqs, self._rows.seqs):
            self._rows, self._values, self._taken_in = rows, np.full(rows.size, np.nan, np.float32), set()
        parts = self._notes.parts(VALUES)
        for file, notes in parts.items():  # one that was merged of others says the latest of each row again
            if file not in self._taken_in:
                for said in notes.of_rows(rows, VALUE, text=self._name):
                    self._values[said.numbers] = said.values
        self._taken_in = {*parts}
        return self._values
