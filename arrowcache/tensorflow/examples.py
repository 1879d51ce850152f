"""Examples: one sample as a tf.train.Example, in both directions. Pure: no files, no processes.

    scalar integers, bool, Timestamp     int64_list of one value; not uint64
    String(), Binary()                   bytes_list of one
    everything else                      bytes_list of one: the little-endian bytes, in C order

`encode_rows` writes this form and `example_parser` reads it. `decode` also takes other writers' forms:
numbers of a field as an int64_list or float_list, and an empty feature as a ragged field of no entries.
It must never round: a value is exactly what the column stores, or a SchemaError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from arrowcache.arrow.convert import exact_values
from arrowcache.arrow.dtype import dtype_of
from arrowcache.arrow.schema import Binary, FieldType, Ragged, Schema, String, Tensor, Timestamp
from arrowcache.errors import SchemaError
from arrowcache.reading.columns import ColumnData, Values
from arrowcache.tensorflow.columns import columns_of
from arrowcache.units import format_count

EXCLUDED_FEATURE = "_excluded"  # of a sample among which some are excluded; no column of the cache
_LACKED = {tf.uint32: tf.int32, tf.uint64: tf.int64}  # by decode_raw, with the dtypes in their place


def encode_rows(
    schema: Schema, columns: Mapping[str, ColumnData], rows: int, excluded: NDArray[np.bool_] | None = None
) -> Iterator[bytes]:
    """Yield rows as serialized tf.train.Example, each with its mark if it is told which are excluded."""
    encoders = {name: _encoder(schema[name], column) for name, column in columns.items()}
    if excluded is not None:
        encoders[EXCLUDED_FEATURE] = _encoder(Tensor("bool"), excluded)
    for row in range(rows):
        features = tf.train.Features(feature={name: encode(row) for name, encode in encoders.items()})
        yield tf.train.Example(features=features).SerializeToString()


def decode(serialized: bytes, schema: Schema) -> dict[str, Any]:
    """Decode a serialized Example into arrays, str and bytes. Features that the schema lacks are left out.

    Raises: SchemaError: not an Example; or names the field, the expected and the actual value.
    """
    try:
        features = tf.train.Example.FromString(serialized).features.feature
    except DecodeError:
        raise SchemaError(f"these {len(serialized)} bytes are no tf.train.Example") from None
    sample = {}
    for name, kind in schema.items():
        if name not in features:  # features[name] would make one
            there = ", ".join(map(repr, sorted(features))) or "none"
            raise SchemaError(f"field {name!r}: there is no such feature, there are {there}")
        sample[name] = _value(name, kind, features[name])
    return sample


def example_parser(
    schema: Schema | Mapping[str, FieldType], columns: Sequence[str] | None = None
) -> Callable[[Any], dict[str, Any]]:
    """Return a function for `tf.data.TFRecordDataset(files).map(...)`, on files of `to_tfrecords`.

    It turns one serialized Example into a dict of tensors, of the dtypes and shapes that `dataset` has
    for one row: (*shape); a ragged column is its values, (None, *inner_shape).

    Raises: SchemaError: a column that TensorFlow cannot hold. ValueError: an unknown column.
    """
    schema = Schema(schema)
    names = schema.select(columns, least=1)
    columns_of(schema, names, None, with_ids=False)  # raises for columns that TensorFlow cannot hold
    kinds = {name: schema[name] for name in names}
    features = {
        name: tf.io.FixedLenFeature((), tf.int64 if _is_integer(kind) else tf.string)
        for name, kind in kinds.items()
    }

    def parse(serialized: Any) -> dict[str, Any]:
        parsed = tf.io.parse_single_example(serialized, features)
        return {name: _tensor(kind, parsed[name]) for name, kind in kinds.items()}

    return parse


def _is_integer(kind: FieldType) -> bool:
    """True if a field is written as an int64_list."""
    if isinstance(kind, Tensor):
        return kind.shape == () and dtype_of(kind.dtype).kind in "biu" and kind.dtype != "uint64"
    return isinstance(kind, Timestamp)


def _encoder(kind: FieldType, column: ColumnData) -> Callable[[int], Any]:
    if isinstance(column, list):
        return lambda row: _of_bytes(column[row].encode() if isinstance(column[row], str) else column[row])
    if isinstance(column, Values):
        data, ends = _little_endian(column.data), column.offsets.tolist()
        return lambda row: _of_bytes(data[ends[row] : ends[row + 1]].tobytes())
    if _is_integer(kind):
        numbers = column.astype(np.int64, copy=False).tolist()
        return lambda row: tf.train.Feature(int64_list=tf.train.Int64List(value=[numbers[row]]))
    rows = _little_endian(column)
    return lambda row: _of_bytes(rows[row].tobytes())


def _of_bytes(data: bytes) -> Any:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[data]))


def _little_endian(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _tensor(kind: FieldType, value: Any) -> Any:
    """Convert a parsed feature to the form in `dataset` of one row; in a graph."""
    if isinstance(kind, String | Binary | Timestamp):
        return value
    dtype = tf.as_dtype(kind.dtype)
    if _is_integer(kind):
        return tf.cast(value, dtype)
    read = tf.as_dtype(kind.numpy_dtype)
    flat = tf.io.decode_raw(value, _LACKED.get(read, read))
    if flat.dtype != dtype:
        flat = tf.bitcast(flat, dtype)
    return tf.reshape(flat, (-1, *kind.inner_shape) if isinstance(kind, Ragged) else kind.shape)


def _value(name: str, kind: FieldType, feature: Any) -> Any:
    """Convert a feature to a value for the builder, without another conversion."""
    form = feature.WhichOneof("kind")
    values = getattr(feature, form).value if form else ()
    if isinstance(kind, Ragged) and not values:  # an empty list has no dtype
        return np.empty((0, *kind.inner_shape), kind.numpy_dtype)
    if form is None:
        raise SchemaError(f"field {name!r}: its feature is empty: neither bytes, floats nor integers")
    if isinstance(kind, String | Binary):
        data = _only_item(name, kind, form, values)
        return _text(name, data) if isinstance(kind, String) else data
    if form == "bytes_list":
        return _raw(name, kind, _only_item(name, kind, form, values))
    if form == "int64_list":
        array: NDArray[Any] = np.array(values, np.int64)
    else:
        array = np.array(values, np.float32)
        if isinstance(kind, Timestamp) or dtype_of(kind.dtype).kind in "biu":
            raise SchemaError(
                f"field {name!r}: expected {kind!r}, got a float_list, and floats do not become integers: "
                "write an int64_list, or declare a float"
            )
    if isinstance(kind, Timestamp):
        return _shaped(name, kind, array).view(kind.numpy_dtype)
    return exact_values(name, kind, _shaped(name, kind, array))


def _only_item(name: str, kind: FieldType, form: str, values: Sequence[Any]) -> bytes:
    if form != "bytes_list" or len(values) != 1:
        raise SchemaError(
            f"field {name!r}: expected {kind!r} as one bytes value, got {len(values)} in a {form}"
        )
    data: bytes = values[0]
    return data


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SchemaError(f"field {name!r}: its text is not UTF-8 ({error}): declare it Binary()") from None


def _raw(name: str, kind: Tensor | Ragged | Timestamp, data: bytes) -> NDArray[Any]:
    """Return little-endian bytes as an array over them."""
    size = kind.item_bytes if isinstance(kind, Ragged) else kind.row_bytes
    if len(data) % size if isinstance(kind, Ragged) else len(data) != size:
        wanted = f"a multiple of {size}" if isinstance(kind, Ragged) else size
        raise SchemaError(
            f"field {name!r}: expected {kind!r}, so {wanted} bytes, got {len(data)}: "
            "what is encoded, such as JPEG, is a Binary() field"
        )
    if kind.numpy_dtype.kind == "b" and np.frombuffer(data, np.uint8).max(initial=0) > 1:
        raise SchemaError(f"field {name!r}: expected bool, got bytes other than 0 and 1")
    array = np.frombuffer(data, kind.numpy_dtype.newbyteorder("<")).astype(kind.numpy_dtype, copy=False)
    return _shaped(name, kind, array)


def _shaped(name: str, kind: Tensor | Ragged | Timestamp, array: NDArray[Any]) -> NDArray[Any]:
    if isinstance(kind, Ragged):
        inner = math.prod(kind.inner_shape)
        if len(array) % inner == 0:
            return array.reshape(-1, *kind.inner_shape)
        raise SchemaError(
            f"field {name!r}: expected {kind!r}, so a multiple of {format_count(inner, 'value')}, got "
            f"{len(array)}"
        )
    if len(array) != math.prod(kind.shape):
        raise SchemaError(
            f"field {name!r}: expected {kind!r}, so {format_count(math.prod(kind.shape), 'value')}, got "
            f"{len(array)}"
        )
    return array.reshape(kind.shape)
