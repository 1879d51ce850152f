"""Placement: the rows of some mapped segments, and how the engine copies their columns.

Must never be asked for rows of a segment that its caller has not leased and mapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Schema
from arrowcache.native import engine
from arrowcache.native.rows import Rows
from arrowcache.reading.gather import Gather, OutsideError, ValuesGather
from arrowcache.reading.values import Column

_LEAST_ASKED_BYTES, _FEW_ROWS = 16 * 1024, 1024  # a disk reads pages, each for a microsecond of its own


class Placement:
    """The rows of a list of mapped segments, numbered one after another.

    Args:
        schema: the segments'.
        rows: where they are; their buffers are those of the fixed columns, then two of each variable one.
    """

    def __init__(self, schema: Schema, rows: Rows) -> None:
        self._schema, self._rows = schema, rows
        count = len(schema.fixed)
        self._buffer_of = {name: number for number, name in enumerate(schema.fixed)}
        self._width_of = {name: kind.row_bytes for name, kind in schema.fixed.items()}
        self._buffer_of |= {name: count + 2 * number for number, name in enumerate(schema.variable)}

    def segments_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index of each row's segment (n,), of rows (n,).

        Raises: OutsideError: a row is out of range.
        """
        segments = self._rows.segments_of(ids)
        if isinstance(segments, int):
            raise OutsideError(segments)
        return segments

    def begin(
        self,
        ids: NDArray[np.int64],
        names: Sequence[str],
        out: Mapping[str, int],
        keep: object,
        *,
        ask_ahead: bool,
    ) -> Gather:
        """Begin to copy columns of some rows.

        Args:
            ids: (n,) row numbers.
            names: of the columns.
            out: for each that has a fixed width, the address of (n, *shape) of its numpy_dtype, to be filled.
            keep: what keeps that memory.
            ask_ahead: have the disk read what is not in memory side by side, and not row after row.
        Raises: OutsideError: a row is out of range, or its segment not mapped; nothing is written then. What
            is small and in memory is checked when it is taken: see `engine.Copy`.
        """
        columns = [
            engine.Column(self._buffer_of[name], width, address)
            for name, address in out.items()
            if (width := self._width_of[name])
        ]
        if ask_ahead:
            asked = [c for c in columns if len(ids) <= _FEW_ROWS or c.row_bytes >= _LEAST_ASKED_BYTES]
            engine.ask_for_rows(self._rows, ids, asked)
        others = () if len(names) == len(out) else [name for name in names if name not in out]
        if not columns and not others:
            self.segments_of(ids)  # they are checked, whatever is asked of them
        fixed = engine.copy_rows(self._rows, ids, columns, keep) if columns else None
        return Gather(fixed, {name: self._begin_values(ids, name) for name in others})

    def _begin_values(self, ids: NDArray[np.int64], name: str) -> ValuesGather:
        return ValuesGather(self._rows, ids, self._buffer_of[name], self._schema.variable[name], name)

    def gather(
        self,
        ids: NDArray[np.int64],
        names: Sequence[str],
        arrays: Mapping[str, NDArray[Any]],
        *,
        ask_ahead: bool,
    ) -> dict[str, Column]:
        """Copy columns of some rows.

        Args:
            arrays: (n, *shape) for each that has a fixed width, C-contiguous, of its numpy_dtype: filled.
            ids, names, ask_ahead: as of `begin`.
        Blocks: while pages come from the disk.
        Raises: as `Gather.take`.
        """
        out = {name: array.ctypes.data for name, array in arrays.items()}
        gather = self.begin(ids, names, out, arrays, ask_ahead=ask_ahead)
        values = gather.wait().values()
        return {name: arrays[name] if name in arrays else values[name] for name in names}
