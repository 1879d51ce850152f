"""Foreign: columns of Arrow files that others wrote, as columns of a cache.

    numbers, bool                     Tensor(dtype)
    fixed_size_list<T>, nested        Tensor(dtype, its sizes); arrow.fixed_shape_tensor likewise
    list<T>, list<fixed_size_list>    Ragged(dtype, inner_shape); a Tensor where a schema says so; list views
    text, bytes, timestamps, dates    String(), Binary(), Timestamp()

A field's metadata says, as in a segment, which type it was; without it the type follows from Arrow's.
It must never round a value, nor make one up: what does not fit is a SchemaError that names the field.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from arrowcache.arrow.convert import exact_values
from arrowcache.arrow.dtype import dtype_of
from arrowcache.arrow.schema import (
    METADATA_KEY,
    Binary,
    FieldType,
    Ragged,
    Schema,
    String,
    Tensor,
    Timestamp,
    type_name,
)
from arrowcache.errors import SchemaError
from arrowcache.units import did_you_mean, format_count

_FORMATS = (  # first bytes, the format's name, what else to say of a file of it where another is wanted
    (b"\x1f\x8b\x08", "gzip", "it is compressed by gzip: decompress it"),
    (b"BZh", "bzip2", "it is compressed by bzip2: decompress it"),
    (b"\xfd7zXZ\0", "xz", "it is compressed by xz: decompress it"),
    (b"\x28\xb5\x2f\xfd", "zstd", "it is compressed by zstd: decompress it"),
    (b"\x04\x22\x4d\x18", "lz4", "it is compressed by lz4: decompress it"),
    (b"PK\3\4", "zip", "it is a zip archive: unpack it"),
    (b"7z\xbc\xaf\x27\x1c", "7z", "it is a 7z archive: unpack it"),
    (b"PAR1", "Parquet", "it is a Parquet file"),
    (b"\x89HDF\r\n\x1a\n", "HDF5", "it is an HDF5 file, which ArrayWindows reads if its name ends in .h5"),
    *((start, "netCDF-3", "it is a netCDF file of version 3, and no HDF5: convert it by nccopy -k netCDF-4")
      for start in (b"CDF\1", b"CDF\2", b"CDF\5")),
    (b"\x93NUMPY", "npy", "it is a .npy file"),
    (b"ARROW1", "Arrow", "it is an Arrow IPC file"),
    (b"version https://git-lfs", "LFS", "it is a pointer of Git LFS: get the file by git lfs pull"),
    *((start, "HTML", "it is a page of HTML or XML, such as a server answers for a file: get the file anew")
      for start in (b"<!DOCTYPE", b"<!doctype", b"<html", b"<HTML", b"<?xml")),
)  # fmt: skip
_TAR_AT = 257
_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64"}  # else the names are NumPy's


def other_format(head: bytes, wanted: str) -> str:
    """Say what a file is that is not of the wanted format, and what to do, by its first 512 bytes.

    Args:
        wanted: the format's name, such as "Parquet".
    Returns: a clause; empty: it is of that format, or of none that is known.
    """
    if head[_TAR_AT:].startswith(b"ustar"):
        return "" if wanted == "tar" else "it is a tar archive: unpack it"
    for magic, name, clause in _FORMATS:
        if head.startswith(magic):
            return "" if name == wanted else clause
    return ""


def kind_of(field: pa.Field) -> FieldType:
    """The type that holds what a field of a file has.

    Raises: SchemaError: no type does; says which Arrow type it is.
    """
    described = (field.metadata or {}).get(METADATA_KEY)
    if described is not None:
        try:
            entry = {**json.loads(described), "name": field.name}
        except (ValueError, TypeError) as error:
            raise SchemaError(f"field {field.name!r}: its metadata cannot be read: {error}") from None
        return Schema.from_json([entry])[field.name]
    kind = _kind_of_type(field.type)
    if kind is None:
        raise SchemaError(
            f"field {field.name!r} is {field.type}, which no column can hold: "
            "cast it, or leave it out with schema="
        )
    return kind


def _kind_of_type(found: pa.DataType) -> FieldType | None:
    if isinstance(found, pa.FixedShapeTensorType):
        shape = tuple(found.shape)
        in_order = found.permutation is None or list(found.permutation) == list(range(len(shape)))
        return _tensor(found.value_type, shape) if in_order else None
    found = plain_type(_stored(found))
    if pa.types.is_string(found) or pa.types.is_large_string(found):
        return String()
    if pa.types.is_binary(found) or pa.types.is_large_binary(found):
        return Binary()
    if pa.types.is_fixed_size_binary(found) and not pa.types.is_decimal(found):
        return Binary()
    if pa.types.is_timestamp(found) or pa.types.is_date(found):
        return Timestamp()
    if _is_list(found):
        value_type, shape = _value_type(found.value_type)
        entry = _tensor(value_type, shape)
        return None if entry is None else Ragged(entry.dtype, entry.shape)
    return _tensor(*_value_type(found))


def _stored(found: pa.DataType) -> pa.DataType:
    """The type of the values in an extension or a dictionary."""
    if isinstance(found, pa.BaseExtensionType):
        return _stored(found.storage_type)
    return found.value_type if pa.types.is_dictionary(found) else found


def plain_type(found: pa.DataType) -> pa.DataType:
    """The type that `plain` gives columns of this one."""
    if isinstance(found, pa.BaseExtensionType):
        found = found.storage_type
    if pa.types.is_string_view(found):
        return pa.large_utf8()
    if pa.types.is_binary_view(found):
        return pa.large_binary()
    if pa.types.is_list_view(found) or pa.types.is_large_list_view(found):
        return pa.large_list(found.value_field)
    return found


def _value_type(found: pa.DataType) -> tuple[pa.DataType, tuple[int, ...]]:
    """Elements and shape of nested lists of a fixed size."""
    sizes = []
    while pa.types.is_fixed_size_list(found):
        sizes.append(found.list_size)
        found = found.value_type
    return found, tuple(sizes)


def _tensor(value_type: pa.DataType, shape: tuple[int, ...]) -> Tensor | None:
    is_number = pa.types.is_integer(value_type) or pa.types.is_floating(value_type)
    if not (is_number or pa.types.is_boolean(value_type)) or 0 in shape:
        return None
    return Tensor(_DTYPES.get(str(value_type), str(value_type)), shape)


def require_fields(fields: pa.Schema, schema: Schema) -> None:
    """Make sure that a file has every field of a schema, of a type that may hold it.

    Raises: SchemaError: names the field, and those that come near one that is missing.
    """
    for name, kind in schema.items():
        if (count := fields.names.count(name)) != 1:
            hint = "" if count else did_you_mean(name, fields.names)
            what = "more than one field" if count else "no field"
            raise SchemaError(f"{what} {name!r}: {hint}it has {', '.join(fields.names)}")
        found = fields.field(name).type
        try:
            values_of(name, pa.array([], getattr(found, "storage_type", found)), kind)
        except pa.ArrowException as error:
            raise SchemaError(f"field {name!r}: {error}") from None


def plain(column: pa.Array) -> pa.Array:
    """A column of a file without its extension type or views: Arrow can take, filter and fill its rows."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    known = plain_type(column.type)
    if pa.types.is_list_view(column.type) or pa.types.is_large_list_view(column.type):
        return _list_of_views(column, known)
    return column if known == column.type else column.cast(known)


def _list_of_views(column: pa.Array, known: pa.DataType) -> pa.Array:
    """A column of list views as lists. pyarrow 26 casts it to lists with too few offsets."""
    missing = column.is_null().to_numpy(zero_copy_only=False)
    ends = np.cumsum([0, *np.where(missing, 0, column.sizes.to_numpy())], dtype=np.int64)
    mask = pa.array(missing) if missing.any() else None
    return pa.LargeListArray.from_arrays(pa.array(ends), column.flatten(), type=known, mask=mask)


def values_of(name: str, column: pa.Array, kind: FieldType) -> Any:
    """A column of a file as a writer's `extend` takes it; numbers are converted where that is exact.

    Raises: SchemaError: what does not fit; names the field.
    """
    column = plain(column)
    if isinstance(column, pa.DictionaryArray):
        column = plain(column.dictionary_decode())
    if not isinstance(kind, Tensor | Ragged) and type(_kind_of_type(column.type)) is not type(kind):
        raise _unfit(name, column, kind)
    if column.null_count:
        raise SchemaError(
            f"field {name!r} lacks {format_count(column.null_count, 'value')}, and columns have no missing "
            "ones: fill them"
        )
    try:
        if isinstance(kind, String | Binary):
            return column.cast(kind.arrow_type).to_pylist()
        if isinstance(kind, Timestamp):
            if pa.types.is_date(column.type):
                column = column.cast(pa.timestamp("ms"))
            zone = getattr(column.type, "tz", None)
            return column.cast(pa.timestamp("us", zone)).view(pa.int64()).to_numpy().view("datetime64[us]")
    except UnicodeDecodeError:
        raise SchemaError(f"field {name!r} has text that is not UTF-8: make it binary") from None
    except pa.ArrowException as error:
        raise SchemaError(
            f"field {name!r}: {error}; a column has whole microseconds in 64 bits: round the times"
        ) from None
    if isinstance(kind, Tensor):
        return _elements(name, column, kind).reshape(len(column), *kind.shape)
    return _ragged(name, column, kind)


def _ragged(name: str, column: pa.Array, kind: Ragged) -> list[NDArray[Any]]:
    if not _is_list(column.type):
        raise _unfit(name, column, kind)
    ends = column.offsets.to_numpy()
    entries = column.values.slice(ends[0], ends[-1] - ends[0])
    data = _elements(name, entries, Tensor(kind.dtype, kind.inner_shape))
    rows = data.reshape(len(entries), *kind.inner_shape)
    return [rows[start:stop] for start, stop in itertools.pairwise((ends - ends[0]).tolist())]


def _elements(name: str, column: pa.Array, kind: Tensor) -> NDArray[Any]:
    """All numbers of a column of tensors, one after another, in the type's numpy_dtype."""
    values = column
    if _is_list(column.type) and ((lengths := np.diff(column.offsets.to_numpy())) != kind.elements).any():
        raise _unfit(name, column, kind, f" with lists of {lengths.min()} to {lengths.max()} values")
    if pa.types.is_fixed_size_list(values.type):
        value_type, sizes = _value_type(values.type)
        if not _is_list(value_type) and math.prod(sizes) != kind.elements:  # also of no row
            raise _unfit(name, column, kind)
    while _is_list(values.type) or pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
    if values.null_count:
        raise SchemaError(f"field {name!r} lacks values within its lists, and columns have no missing ones")
    is_number = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
    if not (is_number or pa.types.is_boolean(values.type)) or len(values) != len(column) * kind.elements:
        raise _unfit(name, column, kind)
    array: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    if (dtype := dtype_of(kind.dtype)).kind == "c":
        part = Tensor(dtype.stored.name)
        return np.ascontiguousarray(exact_values(name, part, array)).view(kind.numpy_dtype)
    return exact_values(name, kind, array)


def _is_list(found: pa.DataType) -> bool:
    return bool(pa.types.is_list(found) or pa.types.is_large_list(found))


def _unfit(name: str, column: pa.Array, kind: FieldType, more: str = "") -> SchemaError:
    return SchemaError(f"field {name!r} is {column.type}{more}, and its column {type_name(kind)}")
