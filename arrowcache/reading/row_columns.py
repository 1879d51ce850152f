"""RowColumns: the columns of one segment's rows, and their notes, read when they are asked for.

A mask function gets one. A column is copied once, and kept as long as the object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.note_lines import Rows
from arrowcache.storage.notes import Notes
from arrowcache.storage.row_ids import ID_COLUMNS


class RowColumns(Mapping[str, Any]):
    """Columns by name: as a batch has them; `_seq` and `_row`; annotations by their name, NaN where none is.

    Args:
        index: of the segment in the snapshot.
    """

    def __init__(self, snapshot: Snapshot, index: int, notes: Notes) -> None:
        self._snapshot, self._notes = snapshot, notes
        self._segment = snapshot.segments[index]
        self._ids = np.arange(snapshot.rows_before(index), snapshot.rows_before(index + 1))
        self._known: dict[str, Any] = {}
        self.has_read_notes = False

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            self._known[name] = self._read(name)
        return self._known[name]

    def _read(self, name: str) -> Any:
        if name in ID_COLUMNS:
            return self._snapshot.locate(self._ids)[name]
        if name in self._snapshot.columns:
            return self._snapshot.gather(self._ids, [name])[name]
        self.has_read_notes = True
        if name in self._notes.names():
            return self._notes.values(Rows.of([self._segment]), name)
        raise KeyError(
            f"rows have no column {name!r}, and cache.annotate() noted no value of that name: there are "
            f"{', '.join(self._names())}"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> list[str]:
        self.has_read_notes = True
        return [*self._snapshot.columns, *ID_COLUMNS, *self._notes.names()]
