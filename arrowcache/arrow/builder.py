"""SegmentBuilder: collects samples into the columns of one segment. Pure memory, no I/O.

It owns one buffer a column, allocated once and reused for every segment; `encode()` refers to
them, so what it returns is to be written before `clear()`. `convert` checks a whole sample
before anything is taken: a bad one changes nothing. `rows` alone says what is taken, and is set
last: what an interrupted `take` or `clear` left behind is in no row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow import convert, segment
from arrowcache.arrow.segment import Column, EncodedSegment, Form, VariableColumn
from arrowcache.errors import SchemaError
from arrowcache.limits import Limits
from arrowcache.units import format_bytes

#: Ways out for a row that is larger than a segment.
LARGER_SEGMENTS = "create the cache with a larger segment_bytes"
LARGER_SEGMENTS_OF_ITEMS = "in a new folder, a larger capacity or a larger first item gives larger segments"

_NO_SIZES: NDArray[np.int64] = np.zeros(0, np.int64)


def _names(fields: Iterable[object]) -> str:
    return ", ".join(map(str, fields)) or "no field"


class RowTooLargeError(ValueError):
    """A row is larger than a segment."""


@dataclass(frozen=True, slots=True)
class ConvertedRows:
    """Checked samples, column by column: arrays with a leading axis, and (bytes, elements) a value."""

    count: int
    fixed: dict[str, NDArray[Any]]
    variable: dict[str, list[tuple[memoryview, int]]]
    variable_bytes: NDArray[np.int64]  # (count,): of each row; empty without variable columns

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.fixed.values()) + int(self.variable_bytes.sum())


class SegmentBuilder:
    """Rows on their way into one segment of a form.

    Args:
        way_out: ends the error of a row that is larger than a segment.
    """

    def __init__(self, form: Form, way_out: str = LARGER_SEGMENTS) -> None:
        self._way_out = way_out
        schema, full_rows = form.schema, form.full_rows
        self.form, self._schema = form, schema
        self._empty_bytes = segment.encoded_bytes_bound(schema, 0)
        self._row_bytes = segment.row_bytes(schema)
        self._fixed = {n: np.empty((full_rows, *t.shape), t.numpy_dtype) for n, t in schema.fixed.items()}
        self._offsets = {n: np.zeros(full_rows + 1, np.int32) for n in schema.variable}
        self._element_bytes = {name: segment.element_bytes(kind) for name, kind in schema.variable.items()}
        self.clear()

    def clear(self, most_rows: int | None = None, most_bytes: int | None = None) -> None:
        """Forget the rows; buffers of variable length are made anew, the others reused.

        Args:
            most_rows: of the segment that begins now, where it is not to be a full one.
            most_bytes: likewise, of its rows together; its first row is taken anyway.
        """
        self._most_rows = self.form.full_rows if most_rows is None else min(most_rows, self.form.full_rows)
        self._most_bytes = self.form.segment_bytes if most_bytes is None else most_bytes
        self.rows = 0
        self._data = {name: bytearray() for name in self._schema.variable}

    @property
    def is_full(self) -> bool:
        return self.rows == self._most_rows

    @property
    def expected_rows(self) -> int:
        """Rows that the segment in progress will have, if the next ones are like those that it has."""
        nbytes = self._row_bytes * self.rows + sum(self._used_bytes().values())
        if not self._schema.variable or not nbytes:
            return self._most_rows
        return max(self.rows, min(self._most_rows, self._most_bytes * self.rows // nbytes))

    def convert(self, sample: Mapping[str, Any], *, many: bool) -> ConvertedRows:
        """Check one sample, or many along a leading axis, and convert it to rows.

        Raises: SchemaError: names the field, what was expected and what came. RowTooLargeError: a
            row larger than a segment.
        """
        if missing := [name for name in self._schema if name not in sample]:
            raise SchemaError(f"sample lacks {', '.join(map(repr, missing))}: it has {_names(sample)}")
        if extra := [name for name in sample if name not in self._schema]:
            raise SchemaError(
                f"sample has {', '.join(map(repr, extra))}, which the schema lacks: "
                f"it has {_names(self._schema)}"
            )
        count = None
        if many:
            counts = {n: convert.count_rows(n, sample[n]) for n in self._schema}
            if len(set(counts.values())) != 1:
                raise SchemaError(f"fields have different numbers of samples: {counts}")
            count = next(iter(counts.values()))
        fixed = {
            name: convert.fixed_rows(name, kind, sample[name], count)
            for name, kind in self._schema.fixed.items()
        }
        variable = {
            name: [
                convert.variable_row(name, kind, value)
                for value in (sample[name] if many else [sample[name]])
            ]
            for name, kind in self._schema.variable.items()
        }
        if not variable:
            return ConvertedRows(1 if count is None else count, fixed, variable, _NO_SIZES)
        sizes = np.zeros(1 if count is None else count, np.int64)
        for values in variable.values():
            sizes += np.fromiter((data.nbytes for data, _ in values), np.int64, len(values))
        rows = ConvertedRows(len(sizes), fixed, variable, sizes)
        widest = int(sizes.max(initial=0))
        if widest > Limits.current.list_elements:
            raise RowTooLargeError(
                f"a row has {format_bytes(widest)} of variable length, and Arrow's offsets end at "
                f"{format_bytes(Limits.current.list_elements)}: split it"
            )
        largest = self._empty_bytes + self._row_bytes + widest
        if largest > self.form.segment_bytes:
            raise RowTooLargeError(
                f"a row needs a segment of up to {format_bytes(largest)}, and the cache's have at most "
                f"{format_bytes(self.form.segment_bytes)}: {self._way_out}"
            )
        return rows

    def take(self, rows: ConvertedRows, start: int) -> int:
        """Copy rows[start:] in, as many as fit; returns how many, 0 when the segment is full."""
        count = min(rows.count - start, self._most_rows - self.rows)
        used = self._used_bytes()
        if rows.variable:
            room = min(self._most_bytes, self.form.segment_bytes - self._empty_bytes)
            room -= self._row_bytes * self.rows
            variable_bytes = sum(used.values())
            added = np.cumsum(rows.variable_bytes[start : start + count])
            needed = added + self._row_bytes * np.arange(1, count + 1)
            most = Limits.current.list_elements
            fits = (needed <= room - variable_bytes) & (added <= most - variable_bytes)
            is_first = self.rows == 0 and count > 0  # `convert` saw to it that any one row fits a segment
            count = max(int(np.count_nonzero(fits)), int(is_first))  # sizes only rise
        stop = self.rows + count
        for name, array in rows.fixed.items():
            self._fixed[name][self.rows : stop] = array[start : start + count]
        for name, values in rows.variable.items():
            if len(self._data[name]) != used[name]:
                self._data[name] = self._data[name][: used[name]]
            taken = values[start : start + count]
            for data, _ in taken:
                self._append(name, data)
            elements = np.fromiter((n for _, n in taken), np.int64, count)
            offsets = self._offsets[name]
            offsets[self.rows + 1 : stop + 1] = offsets[self.rows] + np.cumsum(elements)
        self.rows = stop
        return count

    def encode(self, skipped: int = 0) -> EncodedSegment:
        """The rows as a segment; it refers to this builder's memory until `clear()`. `skipped`: see there."""
        columns: dict[str, Column] = {n: buffer[: self.rows] for n, buffer in self._fixed.items()}
        for name, used in self._used_bytes().items():
            columns[name] = VariableColumn(
                self._offsets[name][: self.rows + 1], memoryview(self._data[name])[:used]
            )
        return self.form.encode(columns, skipped)

    def _used_bytes(self) -> dict[str, int]:
        return {name: int(self._offsets[name][self.rows]) * n for name, n in self._element_bytes.items()}

    def _append(self, name: str, data: memoryview) -> None:
        try:
            self._data[name] += data
        except BufferError:  # an encoded segment refers to it still: an error that somebody kept has it
            self._data[name] = self._data[name] + data
