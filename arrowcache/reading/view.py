"""View: a run of rows of one segment as arrays over a mapping of their own. Nothing is copied.

Each view maps its segment's file anew. The mapping is private, so that a write into the arrays is
seen nowhere else, neither in the file nor in the next epoch. It reserves no memory for such
writes, and is never used again for another view. Mapping and lease end when the last array or tensor
over it dies. A view is dead in a forked child: touching it there is a segmentation fault.

Must never be asked for a file whose structure was not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Ragged, Schema
from arrowcache.limits import Limits
from arrowcache.linux import most_mappings
from arrowcache.native import maps
from arrowcache.reading.values import Values
from arrowcache.storage.mapping import FileMapping, live_mappings, room_of_data

_QUARTER = most_mappings() // 4  # snapshots use half of all mappings, the process' own threads need some

ViewColumn = NDArray[Any] | Values


def has_room(nbytes: int) -> bool:
    """True if one more file may be mapped for a view: the kernel limits their number, perhaps their bytes.

    Where it limits addresses (RLIMIT_AS) or data (RLIMIT_DATA, in which writable mappings count), views and
    snapshots leave a quarter to all else.
    """
    most = Limits.current.mapped_views
    has_place = live_mappings() < (_QUARTER if most is None else most)
    return has_place and nbytes <= min(maps.room(3), room_of_data(3))


def uncopied(schema: Schema, names: Sequence[str]) -> list[str]:
    """Return the columns that can be views: text and bytes become Python objects, which are copies."""
    return [name for name in names if name in schema.fixed or isinstance(schema[name], Ragged)]


class Viewer:
    """Makes views of some columns of a cache's segments."""

    def __init__(self, schema: Schema, names: Sequence[str]) -> None:
        self.names = tuple(uncopied(schema, names))
        fixed, variable = list(schema.fixed), list(schema.variable)
        self._columns: list[_FixedView | _RaggedView] = []
        for name in self.names:
            if name in schema.fixed:
                kind, number = schema.fixed[name], fixed.index(name)
                self._columns.append(_FixedView(name, number, kind.numpy_dtype, kind.shape, kind.row_bytes))
            elif isinstance(ragged := schema[name], Ragged):
                number, sizes = len(fixed) + 2 * variable.index(name), (ragged.item_bytes, ragged.elements)
                self._columns.append(
                    _RaggedView(name, number, ragged.numpy_dtype, ragged.inner_shape, *sizes)
                )

    def view(
        self,
        path: str,
        nbytes: int,
        layout: Sequence[int],
        rows: range,
        end_lease: Callable[[], None],
        *,
        sparse: bool = False,
    ) -> dict[str, ViewColumn]:
        """Map a segment's file and make arrays over some of its rows.

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
        file = FileMapping(path, end_lease, least=max(1, nbytes), writable=True, sparse=sparse)
        memory = np.asarray(_MappedBytes(file))
        return {column.name: column.view(file, memory, layout, rows) for column in self._columns}


class _FixedView(NamedTuple):
    name: str
    number: int  # in the layout
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    row_bytes: int

    def view(
        self, file: FileMapping, memory: NDArray[np.uint8], layout: Sequence[int], rows: range
    ) -> NDArray[Any]:
        start = layout[self.number] + rows.start * self.row_bytes
        file.populate(start, len(rows) * self.row_bytes)
        return np.ndarray((len(rows), *self.shape), self.dtype, memory, start)


class _RaggedView(NamedTuple):
    name: str
    number: int  # in the layout: of its offsets; its values come next
    dtype: np.dtype[Any]
    inner_shape: tuple[int, ...]
    item_bytes: int
    elements: int

    def view(
        self, file: FileMapping, memory: NDArray[np.uint8], layout: Sequence[int], rows: range
    ) -> Values:
        offsets_at, values_at = layout[self.number], layout[self.number + 1]
        ends_at, count = offsets_at + 4 * rows.start, len(rows) + 1
        file.populate(ends_at, 4 * count)
        ends = np.ndarray((count,), np.int32, memory, ends_at).astype(np.int64) // self.elements
        first, items = int(ends[0]), int(ends[-1] - ends[0])
        start, shape = values_at + first * self.item_bytes, (items, *self.inner_shape)
        if not items:  # their offset may be beyond the file's end
            return Values(np.empty(shape, self.dtype), ends - first)
        file.populate(start, items * self.item_bytes)
        return Values(np.ndarray(shape, self.dtype, memory, start), ends - first)


class _MappedBytes:
    """NumPy's array interface over the bytes of a writable file mapping, which the array keeps."""

    def __init__(self, file: FileMapping) -> None:
        self._file = file
        shape, data = (file.nbytes,), (file.address, False)
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": "|u1", "data": data}
