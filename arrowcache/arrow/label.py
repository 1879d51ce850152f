"""Label: physical columns shown as the logical types that other Arrow tools know. No copy."""

from __future__ import annotations

import pyarrow as pa

from arrowcache.arrow.dtype import dtype_of
from arrowcache.arrow.schema import FieldType, Schema, Tensor


def labelled(batch: pa.RecordBatch, schema: Schema) -> pa.RecordBatch:
    """The columns of a segment in the schema's own order, tensors as `arrow.fixed_shape_tensor`.

    Numbers stay as they are stored; complex ones are pairs in a trailing axis.
    """
    columns = [_labelled_column(batch.column(name), kind) for name, kind in schema.items()]
    fields = [
        pa.field(name, column.type, nullable=False) for name, column in zip(schema, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _labelled_column(column: pa.Array, kind: FieldType) -> pa.Array:
    if not (isinstance(kind, Tensor) and kind.is_list):
        return column
    pair = (2,) if dtype_of(kind.dtype).kind == "c" else ()
    storage = pa.FixedSizeListArray.from_arrays(column.values, kind.elements)
    tensor_type = pa.fixed_shape_tensor(column.type.value_type, (*kind.shape, *pair))
    return pa.ExtensionArray.from_storage(tensor_type, storage)
