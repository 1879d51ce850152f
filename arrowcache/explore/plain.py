"""Plain: a cache's columns in Arrow types that every reader of Parquet knows; arrow/foreign.py has them back.

    Tensor(dtype, shape)         the dtype's own type, or fixed_size_list<T>[elements of a row], in C order
    Ragged(dtype, inner_shape)   list<T>, or list<fixed_size_list<T>[elements of an entry]>
    bool, bfloat16               bool, float32; a complex number is two elements
    Timestamp()                  timestamp[us, UTC]

A field's metadata says, as in a segment, which type it was.
"""

from __future__ import annotations

import pyarrow as pa

from arrowcache.arrow.schema import FieldType, Ragged, Schema, Tensor, Timestamp
from arrowcache.explore.numbers import bfloat16_values

_UTC = pa.timestamp("us", "UTC")


def plain(column: pa.Array, kind: FieldType) -> pa.Array:
    """A column of a snapshot's record batch in plain types; a view, but for bool and bfloat16."""
    if isinstance(kind, Timestamp):
        return column.view(_UTC)
    if not isinstance(kind, Tensor | Ragged):
        return column
    values = column
    if isinstance(column, pa.ExtensionArray):
        values = column.storage.values
    elif isinstance(kind, Ragged):
        values = column.values
    if kind.dtype == "bool":
        values = values.cast(pa.bool_())
    elif kind.dtype == "bfloat16":
        values = pa.array(bfloat16_values(values.to_numpy()))
    if isinstance(kind, Tensor):
        return _fixed(values, kind.elements) if kind.is_list else values
    if kind.elements == 1:
        return pa.ListArray.from_arrays(column.offsets, values)
    offsets = column.offsets.to_numpy() // kind.elements
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), _fixed(values, kind.elements))


def plain_schema(batch: pa.RecordBatch, schema: Schema) -> pa.Schema:
    """The schema of plain columns, with what `kind_of` needs to have the types back."""
    kinds = schema.arrow
    return pa.schema(
        [
            pa.field(name, column.type, nullable=False, metadata=kinds.field(name).metadata)
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
    )


def _fixed(values: pa.Array, size: int) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(values, size)
