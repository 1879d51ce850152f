"""RowColumns: the columns of one segment's rows, and their notes, read when they are asked for.

A mask function gets one. A column is copied once, and kept as long as the object. Annotations are read once
for all segments of a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.lifetimes import cached_property
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.annotations import Annotations
from arrowcache.storage.note_lines import Rows
from arrowcache.storage.notes import VALUES

_AGE = "_age_seconds"
_COLUMNS = ("_seq", "_row", _AGE)


class SnapshotValues:
    """The annotations of a snapshot's rows, those of this process included. Read when they are asked for."""

    def __init__(self, annotations: Annotations, snapshot: Snapshot) -> None:
        self._annotations, self._rows = annotations, Rows.of_counts(snapshot.seqs, snapshot.segment_rows)
        self._known: dict[str, NDArray[np.float64]] = {}

    @cached_property
    def version(self) -> object:
        """A value that changes with each annotation."""
        self._annotations.flush_or_warn()
        return self._annotations.notes.version(VALUES)

    @cached_property
    def names(self) -> list[str]:
        assert self.version is not None
        return self._annotations.notes.names()

    def of(self, name: str) -> NDArray[np.float64]:
        """The values of a name: (rows,), NaN where none is."""
        if name not in self._known:
            self._known[name] = self._annotations.notes.values(self._rows, name)
        return self._known[name]


class RowColumns(Mapping[str, Any]):
    """Columns by name: as a batch has them with ids; annotations by their name, NaN where none is.

    Args:
        index: of the segment in the snapshot.

    Attributes:
        version: None where nothing that changes was read, else of the annotations; of ages one of its own.
    """

    def __init__(self, snapshot: Snapshot, index: int, values: SnapshotValues) -> None:
        self._snapshot, self._values = snapshot, values
        self._ids = np.arange(snapshot.rows_before(index), snapshot.rows_before(index + 1))
        self._known: dict[str, Any] = {}
        self.version: object = None

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            self._known[name] = self._read(name)
        return self._known[name]

    def _read(self, name: str) -> Any:
        if name in _COLUMNS:
            if name == _AGE:
                self.version = object()
            return self._snapshot.locate(self._ids)[name]
        if name in self._snapshot.columns:
            return self._snapshot.gather(self._ids, [name])[name]
        if name in self._names():
            return self._values.of(name)[self._ids[0] : self._ids[-1] + 1].copy()
        raise KeyError(
            f"rows have no column {name!r}, and cache.annotate() noted no value of that name: there are "
            f"{', '.join(self._names())}"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> list[str]:
        self.version = self.version or self._values.version
        return [*self._snapshot.columns, *_COLUMNS, *self._values.names]
