"""View: a run of rows of one segment as arrays over a mapping of their own. Nothing is copied.

Each view maps its segment's file anew: privately, so that what is written into the arrays is
seen nowhere else, neither in the file nor in the next epoch; without reserving memory for such
writes; and never used again for another view. Mapping and lease end when the last array or tensor
over it dies. A view is dead in a forked child: touching it there is a segmentation fault.

Must never be asked for a file whose structure was not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Ragged, Schema
from arrowcache.reading.placement import Values, as_array
from arrowcache.storage.mapping import FileMapping, live_mappings, most_mappings, populate

_MOST_VIEWS = most_mappings() // 4  # arenas use half of them, the process' own threads need some

ViewColumn = NDArray[Any] | Values


def has_room() -> bool:
    """Whether one more file may be mapped: the kernel limits how many."""
    return live_mappings() < _MOST_VIEWS


def uncopied(schema: Schema, names: Sequence[str]) -> list[str]:
    """Which of some columns can be views: text and bytes become Python objects, which are copies."""
    return [name for name in names if name in schema.fixed or isinstance(schema[name], Ragged)]


def view_rows(
    path: str,
    schema: Schema,
    fixed_at: NDArray[np.int64],
    variable_at: NDArray[np.int64],
    names: Sequence[str],
    rows: range,
    end_lease: Callable[[], None],
) -> dict[str, ViewColumn]:
    """Map a segment's file and make arrays over some of its rows.

    Args:
        path: the file.
        fixed_at, variable_at: at which bytes of it its columns lie, as `Arena.columns_of` says.
        names: columns, of those `uncopied` gives.
        rows: contiguous rows of the segment, at least one.
        end_lease: called when the file is unmapped again; if this raises, by the caller.
    Returns: name -> (len(rows), *shape), writable; of a ragged column `Values(data, offsets)`, whose
        `data` is a view and whose offsets are made.
    Blocks: while the pages come from the disk.
    Raises: OSError: the file cannot be mapped.
    """
    file = FileMapping(path, end_lease, writable=True)
    fixed, variable = list(schema.fixed), list(schema.variable)
    columns: dict[str, ViewColumn] = {}
    for name in names:
        if name in schema.fixed:
            kind = schema.fixed[name]
            start = int(fixed_at[fixed.index(name)]) + rows.start * kind.row_bytes
            columns[name] = _array(file, start, kind.numpy_dtype, (len(rows), *kind.shape))
            continue
        ragged = schema.variable[name]
        assert isinstance(ragged, Ragged)
        offsets_at, values_at = variable_at[variable.index(name)].tolist()
        ends = _array(file, offsets_at + 4 * rows.start, np.dtype(np.int32), (len(rows) + 1,))
        entries = ends.astype(np.int64) // ragged.elements
        first, count = int(entries[0]), int(entries[-1] - entries[0])
        start = values_at + first * ragged.item_bytes
        data = _array(file, start, ragged.numpy_dtype, (count, *ragged.inner_shape))
        columns[name] = Values(data, entries - first)
    return columns


def _array(file: FileMapping, start: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    nbytes = dtype.itemsize * math.prod(shape)
    if not nbytes:
        return np.empty(shape, dtype)
    populate(file.address + start, nbytes)
    memory = as_array(file, file.address + start, nbytes, "|u1", writable=True)
    return memory.view(dtype).reshape(shape)
