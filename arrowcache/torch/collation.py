"""Collation: items of a dataset as one batch, as torch's default_collate makes it of them.

Columns of a cache become the batch at once: a tensor of a leaf's values has the column's memory. Whatever
default_collate refuses comes as `Loader` gives it: moments as int64 microseconds, images as numbers, values
of varying length as nested tensors of jagged layout, dataclasses of tensors.
Pure: no item is changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from arrowcache.arrow.convert import fixed_rows, variable_row
from arrowcache.arrow.items import ItemForm, Leaf
from arrowcache.arrow.schema import FieldType, FixedType, Ragged, Tensor
from arrowcache.errors import SchemaError
from arrowcache.reading.values import ColumnData, Values
from arrowcache.torch.tensors import to_tensor

_OF_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


def batch_of(form: ItemForm, columns: Mapping[str, ColumnData]) -> Any:
    """Return a batch of n items, of their columns, over the columns' memory.

    Args:
        columns: by the leaves' names: (n, *shape), n texts or bytes, or `Values` of n rows.
    """
    leaves = (_leaf(leaf, form.schema[leaf.name], columns[leaf.name]) for leaf in form.leaves)
    return form.batch(leaves)


def _leaf(leaf: Leaf, kind: FieldType, column: ColumnData) -> Any:
    tensor = to_tensor(column, kind)
    if leaf.type in _OF_NUMBERS:
        return tensor.to(_OF_NUMBERS[leaf.type])
    if leaf.type is list and isinstance(kind, Tensor):
        return _by_position(tensor)
    return tensor


def _by_position(tensor: torch.Tensor) -> Any:
    """A batch of lists is a list of batches, one a position."""
    return tensor if tensor.ndim == 1 else [*map(_by_position, tensor.unbind(1))]


def columns_of(form: ItemForm, items: Sequence[Any], indices: NDArray[np.int64]) -> dict[str, ColumnData]:
    """Return the columns that a cache would give of items (n,), as copies.

    Args:
        indices: of the items (n,), for the error.
    Raises: SchemaError: an item does not fit the columns of the first.
    """
    values: dict[str, list[Any]] = {name: [] for name in form.schema}
    for index, item in zip(indices.tolist(), items, strict=True):
        try:
            row = form.row_of_chosen(item)
            for name, kind in form.schema.items():
                values[name].append(_value(name, kind, row[name]))
        except SchemaError as error:
            raise SchemaError(f"item {index}: {error}") from None
    return {name: _column(kind, values[name]) for name, kind in form.schema.items()}


def _value(name: str, kind: FieldType, value: Any) -> Any:
    if isinstance(kind, FixedType):
        return fixed_rows(name, kind, value, None)
    data, _ = variable_row(name, kind, value)
    return data if isinstance(kind, Ragged) else value


def _column(kind: FieldType, values: list[Any]) -> ColumnData:
    if isinstance(kind, FixedType):
        return np.concatenate(values)
    if not isinstance(kind, Ragged):
        return values
    data = np.frombuffer(bytearray(b"".join(values)), kind.numpy_dtype).reshape(-1, *kind.inner_shape)
    lengths = [each.nbytes // kind.item_bytes for each in values]
    return Values(data, np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))


def collated(items: Sequence[Any]) -> Any:
    """Return what torch's default_collate makes of items, in ordinary memory.

    In a DataLoader's worker that would put it into /dev/shm, which may be small.
    Raises: TypeError, RuntimeError: as default_collate.
    """
    return collate(items, collate_fn_map=default_collate_fn_map | {torch.Tensor: _stacked})


def _stacked(tensors: Sequence[torch.Tensor], *, collate_fn_map: object = None) -> torch.Tensor:  # noqa: ARG001
    return torch.stack([*tensors])
