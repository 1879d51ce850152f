"""Noted: the notes on a snapshot's rows as columns: `_excluded`, `_reason`, `_tags`, and annotations.

Whoever looks sees every row, with its notes. A column is made when it is asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from arrowcache.arrow.schema import FieldType, Schema, String, Tensor
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.annotations import Annotations
from arrowcache.storage.note_lines import Rows
from arrowcache.storage.notes import MARKS, Notes
from arrowcache.storage.row_ids import ID_COLUMNS
from arrowcache.storage.store import Store

NOTE_KEY = b"arrowcache.note"  # of a field of a file that was exported: no column of the cache
EXCLUDED, REASON, TAGS = "_excluded", "_reason", "_tags"
_KINDS: dict[str, FieldType | None] = {EXCLUDED: Tensor("bool"), REASON: String(), TAGS: None}


class Noted:
    """The notes on the rows of one snapshot, those of this process' annotations included."""

    def __init__(self, store: Store, snapshot: Snapshot) -> None:
        self._notes = _notes(store)
        self._rows = Rows.of_counts(snapshot.seqs, snapshot.segment_rows)
        kinds = _KINDS | dict.fromkeys(self._notes.names(), Tensor("float64"))
        #: Type of each column that can be asked for, where no column of the cache has its name. None: lists.
        self.kinds = {name: kind for name, kind in kinds.items() if name not in store.settings.schema}
        #: Those that say something.
        self.names = [name for name in self.kinds if name not in _KINDS or self._notes.version(MARKS)]

    def arrow(self, name: str) -> pa.Array:
        """One column of all rows, with nulls for what is not said."""
        kind = self.kinds[name]
        arrow_type = pa.list_(pa.utf8()) if kind is None else kind.arrow_type
        if name == EXCLUDED:
            arrow_type = pa.bool_()
        return pa.array(self.column(name), arrow_type, from_pandas=True)

    def column(self, name: str) -> NDArray[Any]:
        """One column of all rows, (rows,): bool; texts, or None; lists of texts; or float64, NaN for none."""
        if name == EXCLUDED:
            return self._notes.excluded(self._rows)
        if name == REASON:
            return self._notes.reasons(self._rows)
        if name != TAGS:
            return self._notes.values(self._rows, name)
        tags = np.empty(self._rows.size, object)
        tags[:] = [[] for _ in range(len(tags))]
        for tag in self._notes.tags():
            for at in np.flatnonzero(self._notes.tagged(self._rows, tag)).tolist():
                tags[at].append(tag)
        return tags


def select_with_notes(schema: Schema, noted: Noted, columns: object) -> tuple[str, ...]:
    """As `Schema.select`, of at least one column. Ids and notes can be named, too. None: the cache's own."""
    if columns is None or isinstance(columns, str) or not hasattr(columns, "__iter__"):
        return schema.select(columns)  # or raises
    chosen: tuple[str, ...] = tuple(columns)
    others = [name for name in chosen if name in (*ID_COLUMNS, *noted.kinds)]
    own = [name for name in chosen if name not in others]
    schema.select(own, least=not others)
    if len(set(others)) != len(others):
        raise ValueError(f"columns {chosen} names a column twice")
    return chosen


def annotated(store: Store) -> Schema:
    """A cache's columns, and behind them its annotations, as `sql` has them."""
    return Schema({**store.settings.schema, **dict.fromkeys(_notes(store).names(), Tensor("float64"))})


def select(store: Store, columns: object) -> tuple[str, ...]:
    """As `Schema.select`, of at least one column. Raises: ValueError: as there; names annotations, too."""
    try:
        return store.settings.schema.select(columns, least=1)
    except ValueError as error:
        names = ", ".join(_notes(store).names())
        others = f"; sql and to_pandas have {names} as well" if names else ""
        raise ValueError(f"{error}{others}") from None


def _notes(store: Store) -> Notes:
    annotations = Annotations.of(store)
    annotations.flush_or_warn()
    return annotations.notes
