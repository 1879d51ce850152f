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

from arrowcache.arrow.items import Leaf
from arrowcache.arrow.schema import FieldType
from arrowcache.errors import SchemaError
from arrowcache.reading.values import ColumnData, Values
from arrowcache.torch.tensors import to_tensor

_PLAIN = (bool, int, float, complex, str, bytes)
#: Modes of images whose pixels are all there is to them: a palette is more.
_MODES = ("1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "I;16", "F")


def require_restorable(leaf: Leaf) -> None:
    """Make sure that values of a leaf can be given back as they were.

    Raises: SchemaError: says how to give them instead.
    """
    if leaf.mode and leaf.mode not in _MODES:
        raise SchemaError(
            f"{leaf.name!r} is an image of mode {leaf.mode!r}, whose pixels are not all there is to it: "
            "give image.convert('RGB')"
        )
    known = (torch.Tensor, np.ndarray, list, dt.datetime, *_PLAIN)
    if leaf.mode or leaf.type in known or issubclass(leaf.type, np.generic):
        return
    instead = (
        "tensor.as_subclass(torch.Tensor)" if issubclass(leaf.type, torch.Tensor) else "np.asarray(value)"
    )
    raise SchemaError(
        f"{leaf.name!r} is a {leaf.type.__name__}, which is more than its numbers: give {instead}"
    )


def restored(leaf: Leaf, kind: FieldType, column: ColumnData) -> Sequence[Any]:
    """Return the values of a column, one a row, as the leaf's class: copies.

    Args:
        column: (n, *shape), n texts or bytes, or `Values` of n rows.
    """
    if isinstance(column, list):
        return column
    if isinstance(column, Values):
        return [*map(_of_ragged(leaf), _rows(column, kind, to_tensors=leaf.type is torch.Tensor))]
    if leaf.type is torch.Tensor:
        return [*map(torch.clone, to_tensor(column, kind).unbind())]
    if leaf.type in (bool, int, float, complex, list):
        return column.tolist()  # type: ignore[no-any-return]
    if leaf.type is dt.datetime:
        return column.astype("datetime64[us]").tolist()  # type: ignore[no-any-return]
    if leaf.mode:
        return [_image(leaf, row) for row in column]
    return [*map(np.copy, column)] if leaf.type is np.ndarray else [*column]


def _rows(column: Values, kind: FieldType, *, to_tensors: bool) -> Sequence[Any]:
    data = to_tensor(column.data, kind) if to_tensors else column.data
    copied = torch.clone if to_tensors else np.copy
    return [copied(data[start:stop]) for start, stop in itertools.pairwise(column.offsets.tolist())]


def _of_ragged(leaf: Leaf) -> Callable[[Any], Any]:
    if leaf.type is list:
        return lambda row: row.tolist()
    return (lambda row: _image(leaf, row)) if leaf.mode else lambda row: row


def _image(leaf: Leaf, row: Any) -> Any:
    from PIL import Image

    if leaf.mode == "1":
        row = row.astype(np.uint8) * 255
        return Image.fromarray(row).convert("1")
    height, width = row.shape[:2]
    return Image.frombytes(leaf.mode, (width, height), np.ascontiguousarray(row).tobytes())
