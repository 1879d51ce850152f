"""Columns: the TensorFlow form of each column of a batch, and the arrays that carry it.

One or two arrays carry a column: its parts. A backend hands them over as they are
or as Arrow lists of them; `TensorColumn.assemble` turns the parts' tensors into the user's tensor.

    Tensor(dtype, shape)    (batch, *shape), of that dtype
    Timestamp()             (batch,) int64, microseconds since 1970: TensorFlow has no dates
    Ragged(dtype, inner)    tf.RaggedTensor, (batch, None, *inner), of values and row splits
    String(), Binary()      (batch,) tf.string
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from arrowcache.arrow.schema import FieldType, Ragged, Schema, Tensor, Timestamp
from arrowcache.errors import SchemaError

_MAX_DIMENSIONS = 254
_IDS = {"_seq": tf.int64, "_row": tf.int64, "_age_seconds": tf.float64}


class TensorPart(NamedTuple):
    """One array of a column: its dtype in TensorFlow, and its shape, None where it varies."""

    dtype: Any
    shape: tuple[int | None, ...]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.dtype(self.dtype.as_numpy_dtype)
        return dtype


class TensorColumn(NamedTuple):
    """One column of every batch: `spec` of the user's tensor, `parts` that carry it."""

    name: str
    spec: Any
    parts: tuple[TensorPart, ...]

    def disassemble(self, values: Any) -> list[NDArray[Any]]:
        """Return the parts of a batch's column, without a copy, except of text and bytes."""
        if isinstance(values, list):
            items = [
                item.encode(errors="surrogatepass") if isinstance(item, str) else item for item in values
            ]
            packed = np.empty(len(items), object)
            packed[:] = items
            return [packed]
        if len(self.parts) == 2:
            return [values.data.view(self.parts[0].numpy_dtype), values.offsets.astype(np.int64, copy=False)]
        return [values.view(self.parts[0].numpy_dtype)]

    def assemble(self, parts: Sequence[Any]) -> Any:
        """Return a column of tensors from its parts."""
        if len(self.parts) == 2:
            return tf.RaggedTensor.from_row_splits(*parts, validate=False)
        return parts[0]


def columns_of(
    schema: Schema, names: Sequence[str], rows: int | None, *, with_ids: bool
) -> list[TensorColumn]:
    """Return the columns of a batch of this number of rows. None means that it varies.

    Raises: SchemaError: TensorFlow cannot hold a column.
    """
    columns = []
    for name in names:
        try:
            column = _column(name, schema[name], rows)
            if len(column.spec.shape) > _MAX_DIMENSIONS:
                raise ValueError(f"{len(column.spec.shape)} dimensions, the most are {_MAX_DIMENSIONS}")
            columns.append(column)
        except (TypeError, ValueError) as error:
            raise SchemaError(
                f"TensorFlow cannot hold column {name!r}, {schema[name]!r} ({error}): "
                "leave it out with columns="
            ) from error
    if with_ids:
        columns += [_plain(name, dtype, (rows,)) for name, dtype in _IDS.items()]
    return columns


def _column(name: str, kind: FieldType, rows: int | None) -> TensorColumn:
    if isinstance(kind, Ragged):
        dtype, inner = tf.as_dtype(kind.dtype), kind.inner_shape
        spec = tf.RaggedTensorSpec((rows, None, *inner), dtype, ragged_rank=1, row_splits_dtype=tf.int64)
        splits = None if rows is None else rows + 1
        return TensorColumn(name, spec, (TensorPart(dtype, (None, *inner)), TensorPart(tf.int64, (splits,))))
    if isinstance(kind, Tensor):
        return _plain(name, tf.as_dtype(kind.dtype), (rows, *kind.shape))
    return _plain(name, tf.int64 if isinstance(kind, Timestamp) else tf.string, (rows,))


def _plain(name: str, dtype: Any, shape: tuple[int | None, ...]) -> TensorColumn:
    return TensorColumn(name, tf.TensorSpec(shape, dtype), (TensorPart(dtype, shape),))
