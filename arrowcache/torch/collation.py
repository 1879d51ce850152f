"""Collation: items of a dataset as one batch, as torch's default_collate makes it of them.

Columns of a cache become the batch at once: a tensor of a leaf's values has the column's memory. A mapping of
another class than dict is a copy of the first item's, updated, so that its attributes are the first one's.
Whatever default_collate refuses comes as `Loader` gives it: moments as int64 microseconds, images as numbers,
values of varying length as nested tensors of jagged layout, dataclasses of tensors, ints of a uint64 column,
which int64 does not hold, as uint64.
Pure: no item is changed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from arrowcache.arrow.convert import fixed_rows, require_unmasked, variable_row
from arrowcache.arrow.items import Branch, Leaf, Part, Same, with_article
from arrowcache.arrow.schema import FieldType, FixedType, Ragged, String, Tensor
from arrowcache.errors import SchemaError
from arrowcache.reading.columns import ColumnData, Values
from arrowcache.torch.codecs import ExactForm, is_value, made_of, parts_of
from arrowcache.torch.tensors import to_tensor

_OF_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


def batch_of(form: ExactForm, columns: Mapping[str, ColumnData]) -> Any:
    """Return a batch of n items, of their columns, over the columns' memory.

    Args:
        columns: by the leaves' names: (n, *shape), n texts or bytes, or `Values` of n rows.
    Raises: SchemaError: a mapping shows other values than those that it holds.
    """

    @functools.cache
    def first_item() -> Any:
        return form.items({name: _first_of(column) for name, column in columns.items()})[0]

    return _batch_of_part(form.root, form, columns, first_item)


def _batch_of_part(
    part: Part, form: ExactForm, columns: Mapping[str, ColumnData], first: Callable[[], Any]
) -> Any:
    """Return the batch of a part. `first` gives that part of the first item.

    No function refers to itself here: it would keep the batch's memory until Python looks for cycles.
    """
    if isinstance(part, Leaf):
        return _leaf(part, form.schema[part.name], columns[part.name])
    assert isinstance(part, Branch)
    children: list[Any] = []
    for at, each in enumerate(part.parts):
        if isinstance(each, Same):
            children.append(None if each.at is None else children[each.at])
        else:
            first_part = lambda at=at: parts_of(first())[at]  # noqa: E731
            children.append(_batch_of_part(each, form, columns, first_part))
    return _batch_of_node(part, children, first)


def _first_of(column: ColumnData) -> ColumnData:
    if not isinstance(column, Values):
        return column[:1]
    return Values(column.data[: column.offsets[1]], column.offsets[:2])


def _batch_of_node(node: Branch, children: list[Any], first: Callable[[], Any]) -> Any:
    """Put a batch together of those of its parts, as default_collate does."""
    if is_value(node):
        return children[0]
    if issubclass(node.type, tuple | list):
        named = zip(node.parts, children, strict=True)
        children = [tuple(new) if _is_text(part) else new for part, new in named]
        return children if node.type in (tuple, list) else node.type(*children[: node.own])
    if not issubclass(node.type, Mapping):
        return made_of(node, children)
    own = dict(zip(node.keys[: node.own], children, strict=False))
    if node.type is dict:
        return own
    item = first()
    if not _shows_what_it_holds(node, parts_of(item)):
        raise SchemaError(
            f"{with_article(node.type.__name__)} shows other values than it holds, so that columns make no "
            "batch: pass collate_fn=torch.utils.data.default_collate"
        )
    try:
        changed = copy.copy(item)
        _set_all(changed, own)
    except TypeError:  # as default_collate
        return own
    return changed


def _set_all(mapping: Any, own: Mapping[str, Any]) -> None:
    try:
        mapping.update(own)
    except TypeError:
        raise
    except Exception:  # noqa: BLE001  # such as ModelOutput's, which refuses it
        for key, value in own.items():
            mapping[key] = value


def _shows_what_it_holds(node: Branch, parts: Sequence[Any]) -> bool:
    """True if a mapping's own code gives the values that are in it, whatever they are."""
    own = {key: object() for key in node.keys[: node.own]}
    try:
        shown = made_of(node, [*own.values(), *parts[node.own :]])
        return [*shown] == [*own] and all(shown[key] is value for key, value in own.items())
    except Exception:  # noqa: BLE001  # it does something to them
        return False


def _is_text(part: Part) -> bool:
    return isinstance(part, Leaf) and issubclass(part.type, str | bytes)


def _leaf(leaf: Leaf, kind: FieldType, column: ColumnData) -> Any:
    tensor = to_tensor(column, kind)
    if leaf.type in _OF_NUMBERS and tensor.dtype is not torch.uint64:  # the one dtype that would lose values
        return tensor.to(_OF_NUMBERS[leaf.type])
    if leaf.type is list and isinstance(kind, Tensor):
        return _by_position(tensor)
    if isinstance(column, list) and leaf.type not in (str, bytes):  # texts of NumPy
        return [*map(leaf.type, column)]
    return tensor


def _by_position(tensor: torch.Tensor) -> Any:
    """A batch of lists is a list of batches, one a position."""
    return tensor if tensor.ndim == 1 else [*map(_by_position, tensor.unbind(1))]


def columns_of(form: ExactForm, items: Sequence[Any], indices: NDArray[np.int64]) -> dict[str, ColumnData]:
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
    if isinstance(kind, Ragged):
        return data
    return data.tobytes().decode() if isinstance(kind, String) else data.tobytes()


def _column(kind: FieldType, values: list[Any]) -> ColumnData:
    if isinstance(kind, FixedType):
        out = np.empty((len(values), *kind.shape), kind.numpy_dtype)  # as it is stored: in C's order
        return np.concatenate(values, out=out)
    if not isinstance(kind, Ragged):
        return values
    data = np.frombuffer(bytearray(b"".join(values)), kind.numpy_dtype).reshape(-1, *kind.inner_shape)
    lengths = [each.nbytes // kind.item_bytes for each in values]
    return Values(data, np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))


def collated(items: Sequence[Any]) -> Any:
    """Return what torch's default_collate makes of items, in ordinary memory.

    In a DataLoader's worker that would put it into /dev/shm, which may be small.
    Raises: TypeError, RuntimeError: as default_collate. TypeError: an array is masked.
    """
    ours: dict[Any, Callable[..., Any]] = {torch.Tensor: _stacked, np.ndarray: _of_arrays}
    return collate(items, collate_fn_map=default_collate_fn_map | ours)


def _stacked(tensors: Sequence[torch.Tensor], *, collate_fn_map: object = None) -> torch.Tensor:  # noqa: ARG001
    return torch.stack([*tensors])


def _of_arrays(arrays: Sequence[NDArray[Any]], *, collate_fn_map: Any) -> Any:
    require_unmasked([*arrays], "an item has", 0)
    return default_collate_fn_map[np.ndarray](arrays, collate_fn_map=collate_fn_map)
