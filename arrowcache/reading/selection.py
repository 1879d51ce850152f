"""Selection: decides which rows of a snapshot an epoch reads: `rows=` of a loader, and what is excluded.

Excluded rows are left out whatever else is asked for, unless all rows are.

Must never: change the rows of an epoch that has begun.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from arrowcache.reading.segment_function import SegmentFunction
from arrowcache.reading.selected import Bitmaps, bitmap
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.annotations import Annotations
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.note_lines import Rows
from arrowcache.storage.notes import MARKS, NO_TAGS, require_tag
from arrowcache.storage.row_ids import is_row_id, row_ids
from arrowcache.storage.store import Store
from arrowcache.units import format_count

INCLUDED, ALL_ROWS = NO_TAGS

Mask = NDArray[np.bool_]


class Selection:
    """The choice of rows that one loader reads.

    Args:
        rows: as of `Loader`.
    """

    def __init__(self, store: Store, rows: object) -> None:
        self._rows, self._annotations = rows, Annotations.of(store)
        #: False: it leaves out only what is excluded.
        self.chooses = not (isinstance(rows, str) and rows == INCLUDED)
        self._notes = self._annotations.notes
        self._function = SegmentFunction(self._annotations, rows, _checked) if callable(rows) else None

    def of(self, snapshot: Snapshot) -> Bitmaps:
        """Return the selection of a snapshot, all of whose segments are mapped.

        Blocks: while the columns that a function asks for are read, of new segments.
        Raises: TypeError, ValueError: a function's result is no mask. Whatever it raises. CacheFormatError:
            damaged notes.
        """
        if (isinstance(self._rows, str) and self._rows == ALL_ROWS) or not len(snapshot):
            return {}
        rows = Rows.of_counts(snapshot.seqs, snapshot.segment_rows)
        mask = self._asked_for(snapshot, rows)
        if self._notes.version(MARKS):
            excluded = self._notes.excluded(rows)
            mask = ~excluded if mask is None else mask & ~excluded
        if mask is None:
            return {}
        starts = rows.starts
        kept = np.add.reduceat(mask, starts[:-1])
        return {
            int(rows.seqs[index]): bitmap(mask[starts[index] : starts[index + 1]])
            for index in np.flatnonzero(kept != np.diff(starts)).tolist()
        }

    def _asked_for(self, snapshot: Snapshot, rows: Rows) -> Mask | None:
        """The mask of a snapshot's rows, whatever is excluded. None: all."""
        if not self.chooses:
            return None
        if self._function is not None:
            return np.concatenate(self._function.of(snapshot))
        if isinstance(self._rows, str):
            return self._notes.tagged(rows, self._rows)
        mask = np.zeros(len(snapshot), np.bool_)
        mask[snapshot.positions(row_ids(self._rows), missing="skip")] = True
        return mask


def require_rows(rows: object) -> object:
    """Return the argument `rows` of a loader; ids as (n, 2) int64.

    Raises: TypeError, ValueError: it says no rows.
    """
    if callable(rows) or (isinstance(rows, str) and rows in NO_TAGS):
        return rows
    if isinstance(rows, str) and not is_row_id(rows):
        return require_tag(rows)
    try:
        return row_ids(rows)
    except TypeError as error:
        raise TypeError(
            f"rows must be 'included', 'all', a tag, row ids, or a function of a segment's columns: {error}"
        ) from None


def rows_term(rows: object) -> str:
    """Return a text of the argument `rows` that ranks compare. Functions are not told apart."""
    if isinstance(rows, str):
        return rows
    return xxhash.xxh3_64_hexdigest(rows.tobytes()) if isinstance(rows, np.ndarray) else "a function"


def _checked(result: object, segment: SegmentInfo) -> Mask:
    mask = np.array(result)  # a copy: the function may use its array again
    if mask.dtype != np.bool_ or mask.shape != (segment.rows,):
        raise TypeError(
            f"rows= gave {type(result).__name__} of dtype {mask.dtype} and shape {mask.shape} for the "
            f"{format_count(segment.rows, 'row')} of segment {segment.seq}: return a bool for each row, such "
            "as lambda columns: columns['label'] != 3"
        )
    return mask
