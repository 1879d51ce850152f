"""Placement: the rows of some mapped segments, and how the engine copies their columns.

Fixed-width columns go in one job. A variable-length one takes two: where its values are, and the values.
Must never be asked for rows of a segment that its caller has not leased and mapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Ragged, Schema, VariableType
from arrowcache.arrow.segment import element_bytes
from arrowcache.errors import CorruptSegmentError
from arrowcache.native import engine
from arrowcache.reading.output import aligned
from arrowcache.reading.values import Column, Values, to_column

_LEAST_ASKED_BYTES, _FEW_ROWS = 16 * 1024, 1024  # a disk reads pages, each for a microsecond of its own


class Placement:
    """The rows of a list of mapped segments, numbered one after another.

    Args:
        schema: the segments'.
        rows: where they are; their buffers are those of the fixed columns, then two of each variable one.
    """

    def __init__(self, schema: Schema, rows: engine.Rows) -> None:
        self._schema, self._rows = schema, rows
        count = len(schema.fixed)
        self._buffer_of = {name: number for number, name in enumerate(schema.fixed)}
        self._buffer_of |= {name: count + 2 * number for number, name in enumerate(schema.variable)}

    def segments_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index of each row's segment (n,), of rows (n,).

        Raises: OutsideError: a row is out of range.
        """
        segments = self._rows.segments_of(ids)
        if isinstance(segments, int):
            raise OutsideError(segments)
        return segments

    def release(self, first: int) -> None:
        """Refuse rows before this one from now on."""
        self._rows.release(first)

    def gather(
        self,
        ids: NDArray[np.int64],
        names: Sequence[str],
        arrays: Mapping[str, NDArray[Any]],
        *,
        is_warm: bool,
        ask_ahead: bool,
    ) -> dict[str, Column]:
        """Copy columns of some rows.

        Args:
            ids: (n,) row numbers.
            names: of the columns.
            arrays: (n, *shape) for each that has a fixed width, C-contiguous, of its numpy_dtype: filled.
            is_warm: their pages are in memory, as far as is known.
            ask_ahead: have the disk read what is not in memory side by side, and not row after row.
        Raises: OutsideError: a row is out of range, or its segment not mapped; nothing was written.
            CorruptSegmentError: a file has changed since it was checked.
        """
        fixed = [
            engine.Column(self._buffer_of[name], kind.row_bytes, arrays[name])
            for name in names
            if (kind := self._schema.fixed.get(name)) is not None and kind.row_bytes
        ]
        if ask_ahead and not is_warm:
            asked = [c for c in fixed if len(ids) <= _FEW_ROWS or c.row_bytes >= _LEAST_ASKED_BYTES]
            engine.ask_for_rows(self._rows, ids, asked)
        if fixed and (outside := engine.copy_rows(self._rows, ids, fixed, is_warm=is_warm)) >= 0:
            raise OutsideError(outside)
        return {
            name: arrays[name] if name in arrays else self._gather_values(name, ids, is_warm=is_warm)
            for name in names
        }

    def _gather_values(self, name: str, ids: NDArray[np.int64], *, is_warm: bool) -> Column:
        kind: VariableType = self._schema.variable[name]
        width, buffer = element_bytes(kind), self._buffer_of[name]
        found = engine.find_values(self._rows, ids, buffer, width, is_warm=is_warm)
        if isinstance(found, int):
            raise OutsideError(found)
        if found.damaged >= 0:
            raise CorruptSegmentError(
                f"the offsets of column {name!r} point out of their file, so its bytes were altered after it "
                "was opened: run cache.verify()"
            )
        data = aligned(int(found.offsets[-1]))
        engine.copy_values(found, data, is_warm=is_warm)
        if not isinstance(kind, Ragged):
            return to_column(kind, Values(data, found.offsets))
        items = data.view(kind.numpy_dtype).reshape(-1, *kind.inner_shape)
        return Values(items, found.offsets // kind.item_bytes)


class OutsideError(Exception):
    """A row is out of range: the index of its number among those that were given."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index
