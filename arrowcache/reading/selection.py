"""Selection: decides which rows of a snapshot an epoch reads: `rows=` of a loader, and what is excluded.

Excluded rows are left out whatever else is asked for, unless all rows are.

Must never: change the rows of an epoch that has begun.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from arrowcache.arrow.convert import require_unmasked
from arrowcache.arrow.expression import mentions, shown
from arrowcache.reading.row_functions import (
    PythonFunction,
    RowFunction,
    StoredFunction,
    is_expression,
    require_expression,
    table_function,
)
from arrowcache.reading.selected import Bitmaps, bitmap, mask_of
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.annotations import Annotations
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.note_lines import Rows
from arrowcache.storage.notes import MARKS, NO_TAGS, require_tag
from arrowcache.storage.row_ids import is_row_id, row_ids
from arrowcache.storage.store import Store
from arrowcache.units import did_you_mean, format_count, require_text

INCLUDED, ALL_ROWS = NO_TAGS
_WORD = re.compile(r"[^\W\d]\w*")

Mask = NDArray[np.bool_]


class Selection:
    """The choice of rows that one loader reads.

    Args:
        rows, expect: as of `Loader`, after `require_rows` and `require_expected`.
    Raises: ValueError: a tag that no row has, or an expression that does not fit.
    """

    def __init__(self, store: Store, rows: Any, expect: Sequence[str] = ()) -> None:
        self._rows, self._annotations = rows, Annotations.of(store)
        #: False: it leaves out only what is excluded.
        self.chooses = not (isinstance(rows, str) and rows == INCLUDED)
        self._notes = self._annotations.notes
        #: None: neither a function nor an expression is asked.
        self.function: RowFunction[Mask] | None = None
        schema = store.settings.schema
        if isinstance(rows, str) and rows not in NO_TAGS:
            self._notes.require_known_tag(rows, expect)
        elif is_expression(rows):
            used, kind = require_expression(rows, "rows", schema, self._annotations.names(expect))
            if not pa.types.is_boolean(kind):
                raise ValueError(
                    f"rows={shown(rows)} gives {kind}, not a bool for each row: compare it, "
                    "such as pyarrow.compute.field('label') != 3"
                )
            function = table_function(rows, schema)
            self.function = StoredFunction(
                self._annotations, schema, used, function, _without_nulls, f"rows={shown(rows)}"
            )
        elif callable(rows):
            self.function = PythonFunction(self._annotations, rows, _checked, expect, "rows=")

    def of(self, snapshot: Snapshot) -> Bitmaps:
        """Return the selection of a snapshot, all of whose segments are mapped.

        Blocks: while the columns that a function asks for are read.
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
        parts = zip(rows.seqs.tolist(), np.split(mask, rows.starts[1:-1]), strict=True)
        return {seq: bitmap(part) for seq, part in parts if not part.all()}

    def _asked_for(self, snapshot: Snapshot, rows: Rows) -> Mask | None:
        """The mask of a snapshot's rows, whatever is excluded. None: all."""
        if not self.chooses:
            return None
        if self.function is not None:
            return np.concatenate(self.function.of(snapshot))
        if isinstance(self._rows, str):
            return self._notes.tagged(rows, self._rows)
        mask = np.zeros(len(snapshot), np.bool_)
        mask[snapshot.positions(row_ids(self._rows), missing="skip")] = True
        return mask


def select_for_export(snapshot: Snapshot, store: Store, rows: object) -> None:
    """Have a snapshot's selection be the rows that an export writes, those of a Loader with these `rows`.

    Raises: ValueError: it chooses none of some rows. Others as of `Selection` and its `of`.
    """
    snapshot.bitmaps = Selection(store, rows).of(snapshot)
    if not len(snapshot) or snapshot.selected.size:
        return
    held = format_count(len(snapshot), "row")
    if isinstance(rows, str) and rows == INCLUDED:
        raise ValueError(f"all {held} are excluded: rows='all' exports them, with their marks")
    raise ValueError(f"rows={repr(rows) if isinstance(rows, str) else ''} chooses none of the {held}")


def chosen_of(snapshot: Snapshot, segment: SegmentInfo) -> Mask | None:
    """The mask of a segment's rows that a snapshot's selection has: (rows,). None: all."""
    bits = snapshot.bitmaps.get(segment.seq)
    return None if bits is None else mask_of(bits, segment.rows)


def require_rows(rows: object) -> object:
    """Return the argument `rows` of a loader; ids as (n, 2) int64.

    Raises: TypeError, ValueError: it says no rows.
    """
    if callable(rows) or is_expression(rows) or (isinstance(rows, str) and rows in NO_TAGS):
        return rows
    if isinstance(rows, str) and not is_row_id(rows):
        return require_tag(rows)
    try:
        return row_ids(rows)
    except TypeError as error:
        raise TypeError(
            "rows must be 'included', 'all', a tag, row ids, a function of a segment's columns, or an "
            f"expression such as pyarrow.compute.field('label') != 3: {error}"
        ) from None


def require_expected(expect: object, rows: object, weights: object) -> tuple[str, ...]:
    """Return the argument `expect` of a loader.

    Raises: TypeError, ValueError: no names, or one that nothing asks for. A function may ask for any.
    """
    names = (expect,) if isinstance(expect, str) else tuple(expect) if isinstance(expect, Sequence) else None
    if names is None:
        raise TypeError(f"expect must be names of tags and annotations that are to come, not {expect!r}")
    for name in names:
        require_text(name, "a name of expect")
    if callable(rows) or callable(weights):
        return names
    tags = () if isinstance(rows, str) and rows in NO_TAGS else (rows,)
    asked = [each for each in (*tags, weights) if isinstance(each, str)]
    expressions = [each for each in (rows, weights) if is_expression(each)]
    for name in names:
        if name not in asked and not any(mentions(each, name) for each in expressions):
            words = [*asked, *(word for each in expressions for word in _WORD.findall(str(each)))]
            raise ValueError(
                f"expect={expect!r} says that {name!r} is to come, and neither rows= nor weights= asks for "
                f"it: {did_you_mean(name, words)}leave it out"
            )
    return names


def rows_term(rows: Any) -> str:
    """Return a text of the argument `rows` or `weights` that ranks compare. Functions are not told apart."""
    if isinstance(rows, str):
        return rows
    if is_expression(rows):
        _, (content,) = rows.__reduce__()
        return f"{shown(rows)} ({xxhash.xxh3_64_hexdigest(content)})"
    return xxhash.xxh3_64_hexdigest(rows.tobytes()) if isinstance(rows, np.ndarray) else "a function"


def _without_nulls(found: pa.Array, segment: SegmentInfo) -> Mask:  # noqa: ARG001
    mask: Mask = np.asarray(found.fill_null(False).to_numpy(zero_copy_only=False))
    return mask


def _checked(result: object, segment: SegmentInfo) -> Mask:
    require_unmasked(result, f"rows= gave for segment {segment.seq}", False)
    mask = np.array(result)  # a copy: the function may use its array again
    if mask.dtype != np.bool_ or mask.shape != (segment.rows,):
        raise TypeError(
            f"rows= gave {type(result).__name__} of dtype {mask.dtype} and shape {mask.shape} for the "
            f"{format_count(segment.rows, 'row')} of segment {segment.seq}: return a bool for each row, such "
            "as lambda columns: columns['label'] != 3"
        )
    return mask
