"""Numbers: what of a column counts as a number, and which columns have what is asked for.

Numbers are views of the mapped file, as far as they can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from arrowcache.arrow.schema import Binary, FieldType, Ragged, Schema, String, Tensor, Timestamp


def require_column(schema: Schema, name: str, fits: Callable[[FieldType], bool], wanted: str) -> FieldType:
    """The type of a column that `fits`.

    Args:
        wanted: says what for, and of what kind.
    Raises: ValueError: another column; names those that fit, too.
    """
    schema.select([name])
    if not fits(schema[name]):
        others = ", ".join(other for other, kind in schema.items() if fits(kind))
        raise ValueError(f"column {name!r} is {schema[name]!r}, and {wanted}: {others or 'no column'} can be")
    return schema[name]


def has_axes(kind: FieldType | None) -> bool:
    """Whether a row has many numbers, or none."""
    return isinstance(kind, Ragged) or (isinstance(kind, Tensor) and bool(kind.shape))


def elements(column: pa.Array, kind: Tensor | Ragged) -> pa.Array:
    """All elements of a segment's column, one row after another, as they are stored: a view."""
    stored = column.storage if isinstance(column, pa.ExtensionArray) else column
    return stored.values if isinstance(kind, Ragged) or kind.is_list else stored


def nested(values: pa.Array, column: pa.Array, kind: Tensor | Ragged, sizes: Sequence[int]) -> pa.Array:
    """Elements as the rows that they are of: lists of these sizes, those of a ragged column in lists."""
    for size in reversed(sizes):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    if isinstance(kind, Tensor):
        return values
    offsets = column.offsets
    if kind.elements > 1:
        offsets = pc.divide(offsets, pa.scalar(kind.elements, pa.int32()))
    return pa.ListArray.from_arrays(offsets, values)


def numbers(column: pa.Array, kind: FieldType) -> NDArray[Any]:
    """The same as an array of the type's numpy_dtype. Of text its lengths in characters, of bytes theirs."""
    if isinstance(kind, String | Binary):
        measure = pc.utf8_length if isinstance(kind, String) else pc.binary_length
        return np.asarray(measure(column).to_numpy())
    if isinstance(kind, Timestamp):
        return np.asarray(column.to_numpy(zero_copy_only=True))
    values = elements(column, kind).to_numpy(zero_copy_only=True)
    return np.asarray(values).view(kind.numpy_dtype)


def lengths(column: pa.Array, kind: Ragged) -> NDArray[np.int64]:
    """How many entries each row of a ragged column has."""
    stored = column.offsets.to_numpy(zero_copy_only=True)
    found: NDArray[np.int64] = np.diff(stored).astype(np.int64) // kind.elements
    return found


def real(values: NDArray[Any], kind: FieldType | None) -> NDArray[Any]:
    """Values that have an order: bfloat16's bits as numbers, complex ones' magnitudes, bool as 0 and 1."""
    if isinstance(kind, Tensor | Ragged) and kind.dtype == "bfloat16":
        return bfloat16_values(values)
    if values.dtype.kind == "c":
        return np.asarray(np.abs(values))
    return values.view(np.uint8) if values.dtype == bool else values


def floats(values: NDArray[Any], kind: FieldType | None = None) -> NDArray[np.float64]:
    """The same as float64, a copy: moments as microseconds since 1970, NaT as NaN."""
    if values.dtype.kind == "M":
        return np.where(np.isnat(values), np.nan, values.astype(np.int64).astype(np.float64))
    with np.errstate(invalid="ignore"):  # some bits are NaNs that warn
        return real(values, kind).astype(np.float64)


def bfloat16_values(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The numbers that bits of bfloat16 stand for: the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
