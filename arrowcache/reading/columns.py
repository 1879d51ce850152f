"""Columns: how the stored bytes of each column become the array, list or `Values` of a batch.

This is the seam between the gather of a column and the batch. All readers go through it: the gather into
slots, zero-copy views, worker processes, a snapshot's `gather`.

    kind of column                 gathered                        a batch gets
    FixedColumn: Tensor,           by the engine, straight into    the slot's array: the stored bytes, as
      Timestamp                    the slot                        shape and dtype of the type
    RaggedColumn: Ragged           values and their offsets        `Values(data, offsets)`
    TextColumn: String             values and their offsets        list of str
    BytesColumn: Binary            values and their offsets        list of bytes

A new kind of column is a class here and a line in `_KINDS`. Its `finish` casts, decodes or normalises the
gathered bytes. It may fill memory of the slot: that of an encoded image has the shape of the decoded one.

`ColumnFunctions` are a user's own, of `Loader(columns={...})`. They get a column as `finish` returned it.

Guarantees: rows of a FixedColumn pass no Python. A view of a column has the same content as its copy.

Each view maps its segment's file anew. The mapping is private, so that a write into the arrays is seen
nowhere else, neither in the file nor in the next epoch. It reserves no memory for such writes, and is never
used again for another view. Mapping and lease end when the last array or tensor over it dies. A view is dead
in a forked child: touching it there is a segmentation fault.

Must never view a file whose structure was not checked.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.convert import require_unmasked
from arrowcache.arrow.schema import Binary, FixedType, Ragged, Schema, String, Tensor, Timestamp
from arrowcache.arrow.segment import element_bytes
from arrowcache.errors import CorruptSegmentError, called
from arrowcache.lifetimes import cached_property
from arrowcache.limits import Limits
from arrowcache.linux import most_mappings
from arrowcache.native import maps
from arrowcache.native.engine import CopiedColumns
from arrowcache.storage.mapping import FileMapping, live_mappings, room_of_data
from arrowcache.units import format_count

_QUARTER = most_mappings() // 4  # snapshots use half of all mappings, the process' own threads need some

# data of a batch


class Values(NamedTuple):
    """Gathered values of a variable-length column: row i is data[offsets[i]:offsets[i + 1]].

    `offsets` counts entries along the ragged axis, (rows + 1,) int64; `data` is a copy:
    (entries, *inner_shape) for a ragged column, uint8 for text and bytes.
    """

    data: NDArray[Any]
    offsets: NDArray[np.int64]


#: One column of a batch.
ColumnData = NDArray[Any] | list[Any] | Values

RowMemory: TypeAlias = "tuple[tuple[int, ...], np.dtype[Any]]"
"""Shape and dtype of a row of an array in a slot."""


def column_bytes(values: ColumnData) -> int:
    """Return the bytes of the values of one column, without offsets."""
    if isinstance(values, Values):
        return values.data.nbytes
    if isinstance(values, np.ndarray):
        return values.nbytes
    return sum(map(len, values))


def rows_of(column: ColumnData, rows: slice) -> ColumnData:
    """Return some rows of a column. Arrays are not copied."""
    if not isinstance(column, Values):
        return column[rows]
    ends = column.offsets[rows.start : rows.stop + 1]
    return Values(column.data[ends[0] : ends[-1]], ends - ends[0])


def bytes_of(values: Values) -> list[bytes]:
    """Return each value of a one-dimensional column as bytes: copies."""
    data, ends = values.data.tobytes(), values.offsets.tolist()
    return [data[start:stop] for start, stop in itertools.pairwise(ends)]


# kinds of columns


class Column:
    """One column of a cache.

    Args:
        buffer: index of its first buffer in a segment.

    `memory` is the memory that it has in a slot; None if it has none.
    """

    memory: RowMemory | None = None
    can_be_view = False

    def __init__(self, name: str, buffer: int) -> None:
        self.name, self.buffer = name, buffer

    def view(self, file: MappedBytes, layout: Sequence[int], rows: range) -> ColumnData:
        """Return some rows of a mapped segment as arrays over its bytes; only if `can_be_view`.

        Args:
            layout: byte offsets of the segment's buffers in the file.
            rows: contiguous rows, at least one.
        """
        raise NotImplementedError(f"{type(self).__name__} has no views")


class FixedColumn(Column):
    """Rows of one width. The engine copies them into the slot, where they are the batch's array."""

    can_be_view = True

    def __init__(self, name: str, buffer: int, kind: FixedType) -> None:
        super().__init__(name, buffer)
        self.memory = self.shape, self.dtype = kind.shape, kind.numpy_dtype
        self.row_bytes = kind.row_bytes

    def view(self, file: MappedBytes, layout: Sequence[int], rows: range) -> NDArray[Any]:
        start = layout[self.buffer] + rows.start * self.row_bytes
        file.populate(start, len(rows) * self.row_bytes)
        return file.array((len(rows), *self.shape), self.dtype, start)


class VariableColumn(Column, ABC):
    """Rows of any length: a buffer of offsets, then one of values.

    `element_bytes` is the unit of the offsets.
    """

    def __init__(self, name: str, buffer: int, kind: Ragged | String | Binary) -> None:
        super().__init__(name, buffer)
        self.element_bytes = element_bytes(kind)

    @abstractmethod
    def finish(
        self, data: NDArray[np.uint8], ends: NDArray[np.int64], out: NDArray[Any] | None
    ) -> ColumnData:
        """Make the batch's column of the gathered bytes, in the thread that takes the batch.

        Args:
            data: (bytes,) values of all rows, one behind another: memory that nobody else uses.
            ends: (rows + 1,) places of the rows in `data`, in bytes.
            out: the slot's array for the column, (rows, *shape), to be filled and returned; None without
                `memory`.
        Raises: CorruptSegmentError: the bytes were altered.
        """


class RaggedColumn(VariableColumn):
    """Tensors whose first axis differs from row to row."""

    can_be_view = True

    def __init__(self, name: str, buffer: int, kind: Ragged) -> None:
        super().__init__(name, buffer, kind)
        self.dtype, self.inner_shape = kind.numpy_dtype, kind.inner_shape
        self.item_bytes, self._elements = kind.item_bytes, kind.elements

    def finish(self, data: NDArray[np.uint8], ends: NDArray[np.int64], out: NDArray[Any] | None) -> Values:  # noqa: ARG002
        return Values(data.view(self.dtype).reshape(-1, *self.inner_shape), ends // self.item_bytes)

    def view(self, file: MappedBytes, layout: Sequence[int], rows: range) -> Values:
        offsets_at, values_at = layout[self.buffer], layout[self.buffer + 1]
        ends_at, count = offsets_at + 4 * rows.start, len(rows) + 1
        file.populate(ends_at, 4 * count)
        ends = file.array((count,), np.dtype(np.int32), ends_at).astype(np.int64) // self._elements
        first, items = int(ends[0]), int(ends[-1] - ends[0])
        start, shape = values_at + first * self.item_bytes, (items, *self.inner_shape)
        if not items:  # their offset may be beyond the file's end
            return Values(np.empty(shape, self.dtype), ends - first)
        file.populate(start, items * self.item_bytes)
        return Values(file.array(shape, self.dtype, start), ends - first)


class BytesColumn(VariableColumn):
    """Bytes of any length, as Python objects: copies."""

    def finish(
        self,
        data: NDArray[np.uint8],
        ends: NDArray[np.int64],
        out: NDArray[Any] | None,  # noqa: ARG002
    ) -> list[Any]:
        return bytes_of(Values(data, ends))


class TextColumn(BytesColumn):
    """Texts, stored as UTF-8."""

    def finish(self, data: NDArray[np.uint8], ends: NDArray[np.int64], out: NDArray[Any] | None) -> list[Any]:
        try:
            return [piece.decode() for piece in super().finish(data, ends, out)]
        except UnicodeDecodeError as error:
            raise CorruptSegmentError(
                f"a text is not valid UTF-8, so its bytes were altered ({error}): run cache.verify()"
            ) from None


_KINDS: dict[type[Any], Callable[[str, int, Any], FixedColumn | VariableColumn]] = {
    Tensor: FixedColumn,
    Timestamp: FixedColumn,
    Ragged: RaggedColumn,
    String: TextColumn,
    Binary: BytesColumn,
}
"""The class that reads a logical type."""


class Columns:
    """The columns of a batch, in order. Immutable; it knows no snapshot.

    `memory`: name -> shape and dtype of a row, of those that have memory in a slot. `row_bytes`: of a row in
    a slot. `are_fixed`: all go straight into the slot.
    """

    def __init__(self, columns: Iterable[FixedColumn | VariableColumn]) -> None:
        self._all = tuple(columns)
        self.names = tuple(column.name for column in self._all)
        self.fixed = [column for column in self._all if isinstance(column, FixedColumn)]
        self.variable = [column for column in self._all if isinstance(column, VariableColumn)]
        self.are_fixed = not self.variable
        self.memory = {column.name: column.memory for column in self._all if column.memory is not None}
        self.row_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.memory.values())
        self._fixed_names = [column.name for column in self.fixed]
        self._table = CopiedColumns([(column.buffer, column.row_bytes, 0) for column in self.fixed])

    @classmethod
    def of(cls, schema: Schema, names: Sequence[str]) -> Columns:
        """Return the columns of these names, all of which the schema has."""
        buffers = {name: number for number, name in enumerate(schema.fixed)}
        buffers |= {name: len(schema.fixed) + 2 * number for number, name in enumerate(schema.variable)}
        return cls(_KINDS[type(schema[name])](name, buffers[name], schema[name]) for name in names)

    def __getitem__(self, name: str) -> FixedColumn | VariableColumn:
        return self._all[self.names.index(name)]

    def copied_to(self, addresses: Mapping[str, int] | None = None) -> CopiedColumns | None:
        """Return the table of the fixed columns for the engine, which go to these addresses; None: no column.

        Args:
            addresses: where the rows go, by name. None: nowhere.
        """
        if not self.fixed:
            return None
        if addresses is None:
            return self._table
        return self._table.at(map(addresses.__getitem__, self._fixed_names))

    @cached_property
    def viewed(self) -> Columns:
        """Those that can be views."""
        return Columns(column for column in self._all if column.can_be_view)

    @cached_property
    def copied(self) -> Columns:
        """Those that cannot be views: Python objects are copies."""
        return Columns(column for column in self._all if not column.can_be_view)

    def view(
        self,
        path: str,
        nbytes: int,
        layout: Sequence[int],
        rows: range,
        end_lease: Callable[[], None],
        *,
        sparse: bool = False,
    ) -> dict[str, ColumnData]:
        """Map a segment's file and make arrays over some of its rows, of the columns that can be views.

        Args:
            layout: byte offsets of its columns in the file, as in `Layout.buffers`.
            rows: contiguous rows of the segment, at least one.
            end_lease: called when the file is unmapped again. If `view` raises, the caller must end the
                lease.
            sparse: as of `FileMapping`: for rows already asked of the disk.
        Returns: name -> (len(rows), *shape), writable; of a ragged column `Values(data, offsets)`,
            whose `data` is a view and whose offsets are new.
        Blocks: while the pages come from the disk.
        Raises: OSError: the file cannot be mapped.
        """
        mapping = FileMapping(path, end_lease, least=max(1, nbytes), writable=True, sparse=sparse)
        file = MappedBytes(mapping)
        return {column.name: column.view(file, layout, rows) for column in self._all if column.can_be_view}


# functions of a user


class ColumnFunctions:
    """A transform of batches: functions of single columns, then a function of the batch.

    Args:
        functions: by name of the column, whose place the result takes.
        transform: called with the batch after them. None: nothing more.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[[Any], Any]],
        transform: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        self._functions, self._transform = dict(functions), transform

    def __call__(self, batch: dict[str, Any]) -> Any:
        """Call them.

        Raises: as they do, with the column's name in a note. TypeError, ValueError: not an array, or one of
            other rows or with a mask. RuntimeError: one raised StopIteration.
        """
        for name, function in self._functions.items():
            column = batch[name]
            rows = len(column.offsets) - 1 if isinstance(column, Values) else len(column)
            result = called(f"the function of column {name!r}", function, column)
            batch[name] = _require_rows(name, result, rows)
        return batch if self._transform is None else self._transform(batch)

    def __repr__(self) -> str:
        functions = f"columns={self._functions!r}"
        return functions if self._transform is None else f"{self._transform!r} after {functions}"


def _require_rows(name: str, result: object, rows: int) -> NDArray[Any]:
    if not isinstance(result, np.ndarray):
        raise TypeError(
            f"the function of column {name!r} returned {type(result).__name__}, not an array: return an "
            f"ndarray of {format_count(rows, 'row')}, such as np.stack(rows)"
        )
    require_unmasked(result, f"the function of column {name!r} returned", 0)
    if result.shape[:1] != (rows,):
        raise ValueError(
            f"the function of column {name!r} returned an array of shape {result.shape}, and the batch has "
            f"{format_count(rows, 'row')}: return one entry of the first axis for each row"
        )
    return result


# views


def has_room_for_view(nbytes: int) -> bool:
    """True if one more file may be mapped for a view: the kernel limits their number, perhaps their bytes.

    Where it limits addresses (RLIMIT_AS) or data (RLIMIT_DATA, in which writable mappings count), views and
    snapshots leave a quarter to all else.
    """
    most = Limits.current.mapped_views
    has_place = live_mappings() < (_QUARTER if most is None else most)
    return has_place and nbytes <= min(maps.room(3), room_of_data(3))


class MappedBytes:
    """The bytes of a writable file mapping, by NumPy's array interface. Arrays over them keep the mapping."""

    def __init__(self, mapping: FileMapping) -> None:
        self._mapping, self.populate = mapping, mapping.populate
        shape, data = (mapping.nbytes,), (mapping.address, False)
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": "|u1", "data": data}

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], start: int) -> NDArray[Any]:
        """Return an array that begins at an offset in the file."""
        return np.ndarray(shape, dtype, np.asarray(self), start)
