"""Restore: columns of a cache as the values that a dataset's items had.

Each value owns its memory, as one that the dataset made: it keeps no column alive, and autograd sees no other
value change with it. That takes a copy a value. Pure.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from arrowcache.arrow.dtype import bits_of, dtype_of
from arrowcache.arrow.items import Leaf
from arrowcache.arrow.schema import FieldType, Ragged, Tensor
from arrowcache.errors import SchemaError
from arrowcache.reading.values import ColumnData, Values
from arrowcache.torch.tensors import to_tensor

_PLAIN = (bool, int, float, complex, str, bytes, dt.datetime)
#: Modes of images whose pixels are all there is to them: a palette is more.
_MODES = ("1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "I;16", "F")
_DTYPES_OF_MODES = {"1": "bool", "I": "int32", "I;16": "uint16", "F": "float32"}  # of others uint8
_KINDS_OF_NUMBERS = {"bool": "b", "int": "iu", "float": "f", "complex": "c"}
#: How to give what has more to it than a column keeps, by the begin of a leaf's `detail`.
_INSTEAD = {
    "with a time zone": "value.astimezone(timezone.utc).replace(tzinfo=None)",
    "with a gradient": "tensor.detach()",
    "on ": "tensor.cpu()",
}


def require_restorable(leaf: Leaf, kind: FieldType) -> None:
    """Make sure that values of a leaf can be given back as they were, of a column of this type.

    Raises: SchemaError: says how to give them instead.
    """
    if leaf.mode and leaf.mode not in _MODES:
        raise SchemaError(
            f"{leaf.name!r} is an image of mode {leaf.mode!r}, whose pixels are not all there is to it: "
            "give image.convert('RGB')"
        )
    if instead := _instead(leaf):
        raise SchemaError(f"{leaf.name!r} is {leaf}, which is more than a column keeps: give {instead}")
    if isinstance(kind, Tensor | Ragged) and not _is_of(leaf, kind.dtype):
        raise SchemaError(
            f"{leaf.name!r} is {leaf}, which would come back of another dtype from {kind}: give the dtype "
            "that it has in schema, or convert it in the dataset"
        )


def _instead(leaf: Leaf) -> str:
    """Return what to give in place of a leaf. Empty: it can be given back."""
    for detail, instead in _INSTEAD.items():
        if leaf.detail.startswith(detail):
            return instead
    if leaf.type is list and " and " in leaf.detail:
        return "numbers of one class"
    if leaf.mode or leaf.type in (torch.Tensor, np.ndarray, list, *_PLAIN):
        return ""
    if issubclass(leaf.type, np.generic):
        return ""
    if issubclass(leaf.type, str | bytes):
        return "str(value)" if issubclass(leaf.type, str) else "bytes(value)"
    return "tensor.as_subclass(torch.Tensor)" if issubclass(leaf.type, torch.Tensor) else "np.asarray(value)"


def _is_of(leaf: Leaf, dtype: str) -> bool:
    """True if the values of a leaf have a dtype, or are Python's numbers of its kind."""
    if leaf.mode:
        return dtype == _DTYPES_OF_MODES.get(leaf.mode, "uint8")
    if leaf.dtype is not None:
        return dtype == getattr(leaf.dtype, "name", str(leaf.dtype).removeprefix("torch."))
    number = leaf.detail.removeprefix("of ") if leaf.type is list else leaf.type.__name__
    return bits_of(dtype) is None and dtype_of(dtype).kind in _KINDS_OF_NUMBERS.get(number, "")


def restored(leaf: Leaf, kind: FieldType, column: ColumnData) -> Sequence[Any]:
    """Return the values of a column, one a row, as the leaf's class: copies.

    Args:
        column: (n, *shape), n texts or bytes, or `Values` of n rows.
    """
    if isinstance(column, list):
        return column if leaf.type in _PLAIN else [*map(leaf.type, column)]  # texts of NumPy
    if isinstance(column, Values):
        made = _of_ragged(leaf, kind)
        data = to_tensor(column.data, kind) if leaf.type is torch.Tensor else column.data
        return [made(data[start:stop]) for start, stop in itertools.pairwise(column.offsets.tolist())]
    if leaf.type is torch.Tensor:
        return [*map(torch.clone, to_tensor(column, kind).unbind())]
    if leaf.type in (bool, int, float, complex, list):
        return column.tolist()  # type: ignore[no-any-return]
    if leaf.type is dt.datetime:
        return column.astype("datetime64[us]").tolist()  # type: ignore[no-any-return]
    if leaf.mode:
        return [_image(leaf, row) for row in column]
    if leaf.type is np.ndarray:
        return [*map(_array_of(leaf, kind), column)]
    return [*_array_of(leaf, kind)(column)]  # scalars of NumPy


def _of_ragged(leaf: Leaf, kind: FieldType) -> Callable[[Any], Any]:
    if leaf.type is list:
        return np.ndarray.tolist
    if leaf.mode:
        return lambda row: _image(leaf, row)
    return torch.clone if leaf.type is torch.Tensor else _array_of(leaf, kind)


def _array_of(leaf: Leaf, kind: FieldType) -> Callable[[Any], NDArray[Any]]:
    """Return a function that copies a row, or a column, as an array of the dtype that the leaf had."""
    if isinstance(kind, Tensor | Ragged) and bits_of(kind.dtype):
        return lambda row: np.array(row).view(leaf.dtype)
    return lambda row: np.array(row, leaf.dtype)


def _image(leaf: Leaf, row: Any) -> Any:
    from PIL import Image

    if leaf.mode == "1":
        row = row.astype(np.uint8) * 255
        return Image.fromarray(row).convert("1")
    height, width = row.shape[:2]
    return Image.frombytes(leaf.mode, (width, height), np.ascontiguousarray(row).tobytes())
