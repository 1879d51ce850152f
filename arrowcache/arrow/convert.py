"""Convert: turns a sample's values into what a column stores, exactly, or raises a SchemaError that says how.

A value that NumPy would have to round, wrap or guess is refused. Arrays and tensors must
satisfy `np.can_cast(src, dst, "safe")`; Python numbers and lists must be exactly
representable. Nothing here copies more than it must: an array of the right dtype passes as it is.
"""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.dtype import Bits, Dtype, bits_of, dtype_of
from arrowcache.arrow.schema import (
    Binary,
    FieldType,
    FixedType,
    Ragged,
    Schema,
    String,
    Tensor,
    Timestamp,
    VariableType,
)
from arrowcache.errors import SchemaError
from arrowcache.units import shortened

_MAX_DEPTH = 64  # of lists: NumPy makes no array of more dimensions


def infer_type(name: str, value: object) -> FieldType:
    """The logical type of one value.

    Raises: SchemaError: a value that no type holds.
    """
    if isinstance(value, str):
        return String()
    if isinstance(value, bytes | bytearray | memoryview):
        return Binary()
    if isinstance(value, dt.datetime | np.datetime64):
        return Timestamp()
    array, dtype = as_array(name, value)
    if _are_large_ints(value, array):
        raise _no_dtype(name, value)
    try:
        return Tensor(dtype, array.shape)
    except ValueError as error:
        raise SchemaError(f"field {name!r}: {error}") from None


def fixed_rows(name: str, kind: FixedType, values: object, rows: int | None) -> NDArray[Any]:
    """Convert one sample's value (rows=None) or that of many for a fixed-width column.

    Returns: shape (1, *shape) or (rows, *shape), dtype kind.numpy_dtype; a view where it can be.
    Raises: SchemaError: names the field, what was expected and what came.
    """
    expected = kind.shape if rows is None else (rows, *kind.shape)
    if type(values) is np.ndarray and values.dtype == kind.numpy_dtype and values.shape == expected:
        return values[None] if rows is None else values
    if rows == 0:
        return np.empty(expected, kind.numpy_dtype)
    if isinstance(kind, Timestamp):
        array = _timestamps(name, values)
    else:
        array = _exact(name, kind, values)
    if array.shape != expected:
        raise SchemaError(f"field {name!r}: expected shape {expected}, got {array.shape}")
    return array[None] if rows is None else array


def variable_row(name: str, kind: VariableType, value: object) -> tuple[memoryview, int]:
    """Convert one sample's value for a variable-length column.

    Returns: its bytes, and its length in stored elements.
    Raises: SchemaError: names the field, what was expected and what came.
    """
    if isinstance(kind, String):
        if not isinstance(value, str):
            raise SchemaError(f"field {name!r}: expected str, got {_describe(value)}")
        try:
            data = memoryview(value.encode())
        except UnicodeEncodeError as error:
            raise SchemaError(
                f"field {name!r}: {value!r} is not valid Unicode ({error}): give "
                "value.encode(errors='surrogatepass')"
            ) from None
        return data, data.nbytes
    if isinstance(kind, Binary):
        if not isinstance(value, bytes | bytearray | memoryview):
            raise SchemaError(f"field {name!r}: expected bytes, got {_describe(value)}")
        data = memoryview(value)
        data = data.cast("B") if data.c_contiguous else memoryview(data.tobytes())
        return data, data.nbytes
    array = _exact(name, kind, value)
    if array.shape == (0,):  # an empty list has no inner shape of its own
        array = array.reshape(0, *kind.inner_shape)
    if array.ndim == 0 or array.shape[1:] != kind.inner_shape:
        wanted = ", ".join(["any", *map(str, kind.inner_shape)])
        raise SchemaError(f"field {name!r}: expected shape ({wanted}), got {array.shape}")
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat.data, len(array) * kind.elements


def require_value(name: str, kind: FieldType, value: object) -> None:
    """Make sure that a field holds a value. Raises: SchemaError: names the field, and what came."""
    if isinstance(kind, FixedType):
        fixed_rows(name, kind, value, None)
    else:
        variable_row(name, kind, value)


def exact_values(name: str, kind: Tensor | Ragged, array: NDArray[Any]) -> NDArray[Any]:
    """Convert real numbers by their values, as those of Python: what they came in has this dtype alone.

    Returns: the same shape, in kind.numpy_dtype.
    Raises: SchemaError: one of them is not exactly of the column's dtype.
    """
    dtype = dtype_of(kind.dtype)
    if dtype.bits is not None:
        return _bits(name, dtype, dtype.bits, array, array.dtype.name, is_python=True)
    if array.dtype == kind.numpy_dtype:
        return array
    cast = _cast_exactly(array, kind.numpy_dtype)
    if cast is None:
        raise SchemaError(f"field {name!r}: expected {kind.dtype}, and {_shorten(array)} is not exactly that")
    return cast


def count_rows(name: str, values: Any) -> int:
    """Count the samples along a leading axis.

    Raises: SchemaError: no leading axis.
    """
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise SchemaError(
            f"field {name!r}: extend() takes many samples along a leading axis, "
            f"got {_describe(values)}; one sample: append()"
        )
    try:
        return len(values)
    except TypeError:  # a 0-d array
        raise SchemaError(
            f"field {name!r}: expected a leading axis, got {_describe(values)}; one sample: append()"
        ) from None


def are_many(schema: Schema, sample: Mapping[str, Any]) -> bool:
    """True if a value of a sample has the shape of many, along a leading axis."""
    for name, kind in schema.fixed.items():
        try:
            shape = np.shape(sample.get(name, 0))
        except (ValueError, TypeError):  # no array
            continue
        if len(shape) > len(kind.shape) and shape[1:] == kind.shape:
            return True
    return False


def is_masked(value: object) -> bool:
    """True if the value is a masked array, or a list that has one. NumPy would drop the mask.

    Does not import numpy.ma: a first batch would wait for it.
    """
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    return masked is not None and _has_a(masked, value)


def _has_a(masked: type, value: object, depth: int = _MAX_DEPTH) -> bool:
    if not isinstance(value, list | tuple):
        return isinstance(value, masked)
    kinds = {*map(type, value)}  # few, of many numbers
    if any(issubclass(kind, masked) for kind in kinds):
        return True
    has_lists = depth > 0 and any(issubclass(kind, list | tuple) for kind in kinds)  # a list may hold itself
    return has_lists and any(_has_a(masked, one, depth - 1) for one in value)


def require_unmasked(value: object, what: str, filler: object) -> None:
    """Make sure that a value has no mask. Raises: TypeError: it has, and so says nothing of some rows."""
    if is_masked(value):
        raise TypeError(
            f"{what} a masked array, whose mask would be lost: say what the missing values are, such as by "
            f".filled({filler})"
        )


def as_array(name: str, value: Any) -> tuple[NDArray[Any], str]:
    """Any array-like as ndarray, with its dtype's name; of a dtype that NumPy lacks, its bits."""
    is_torch = hasattr(value, "detach")
    if is_torch and (bits := bits_of(dtype := str(value.dtype).removeprefix("torch."))) is not None:
        return bits.from_float(value.float().numpy(force=True)), dtype
    if is_masked(value):
        raise _masked(name)
    try:  # NumPy takes no gradients, devices or lazy conjugates
        array = value.numpy(force=True) if is_torch else np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        hint = ": give lists of one length, such as by padding" if isinstance(value, list) else ""
        raise SchemaError(f"field {name!r}: {_describe(value)} is not an array: {error}{hint}") from None
    if _are_large_ints(value, array):
        ints = np.asarray(value, object)
        if all(0 <= each < 2**64 for each in ints.flat):  # NumPy 1 would wrap others around
            array = ints.astype(np.uint64)
        elif array.dtype.kind == "O":  # else floats may do
            raise _no_dtype(name, value)
    source = _name_of(array.dtype)
    if bits_of(source) is not None:  # ml_dtypes, which TensorFlow and JAX use
        return array.view(dtype_of(source).numpy), source
    if array.dtype.kind not in "biufcM":
        raise SchemaError(f"field {name!r}: expected numbers, got {_describe(value)}")
    return array, source


def _are_large_ints(value: object, array: NDArray[Any]) -> bool:
    """True if NumPy made floats or objects of a list of ints alone, as it does from 2**63 on."""
    if not isinstance(value, list | tuple) or array.dtype.kind not in ("f", "O"):
        return False
    if array.dtype.kind == "f" and not np.any(array >= 2**63):
        return False
    return all(isinstance(each, int) for each in np.asarray(value, object).flat)


def _no_dtype(name: str, value: object) -> SchemaError:
    return SchemaError(
        f"field {name!r}: {_describe(value)} has ints that no dtype holds: "
        "give json.dumps(value) in all items"
    )


@cache
def _name_of(dtype: np.dtype[Any]) -> str:
    """Return a dtype's name, which NumPy makes anew each time, in Python."""
    return dtype.name


def _exact(name: str, kind: Tensor | Ragged, value: object) -> NDArray[Any]:
    dtype = dtype_of(kind.dtype)
    array, source = as_array(name, value)
    is_python = isinstance(value, bool | int | float | complex | Sequence)
    if dtype.bits is not None:
        return _bits(name, dtype, dtype.bits, array, source, is_python)
    if source == dtype.name and not _lost_digits(value, array):
        return array.astype(dtype.numpy, copy=False)  # a foreign byte order has the same name
    is_number = bits_of(source) is None
    if is_number and is_python:
        if (array.dtype.kind != "c" or dtype.kind == "c") and not _lost_digits(value, array):
            cast = _cast_exactly(array, dtype.numpy)
            if cast is not None:
                return cast
        if dtype.kind in "biu" and _are_large_ints(value, array):
            raise _no_dtype(name, value)
        way_out = f"round it yourself with np.asarray(value).astype({dtype.name!r})"
        if array.dtype.kind in "iu" and dtype.kind in "biu":  # which would wrap around
            shape = kind.inner_shape if isinstance(kind, Ragged) else kind.shape
            wider = f"{type(kind).__name__}({source!r}, {shape})"
            way_out = (
                f"give the field a type that holds all of its values, such as schema={{{name!r}: {wider}}}"
            )
        raise SchemaError(
            f"field {name!r}: expected {dtype.name}, and {_shorten(value)} is not exactly one: {way_out}"
        )
    if is_number and np.can_cast(array.dtype, dtype.numpy, "safe"):
        return array.astype(dtype.numpy)
    raise SchemaError(
        f"field {name!r}: expected {dtype.name}, got {source}, which {dtype.name} cannot hold exactly: "
        f"write .astype({dtype.name!r}) if that is meant"
    )


def _cast_exactly(array: NDArray[Any], target: np.dtype[Any]) -> NDArray[Any] | None:
    """The same values in another dtype, or None if it lacks one of them."""
    with np.errstate(all="ignore"):
        cast = array.astype(target, casting="unsafe")
        return cast if _is_exact(array, cast) else None


def _is_exact(array: NDArray[Any], cast: NDArray[Any]) -> bool:
    """True if a cast of Python numbers kept every value.

    The way back alone does not tell: integers wrap around both ways, and a float out of an
    integer's range becomes whatever the processor likes.
    """
    if cast.dtype.kind == "c" and array.dtype.kind != "c":
        cast = cast.real
    for floats, integers in ((array, cast), (cast, array)):
        if floats.dtype.kind == "f" and integers.dtype.kind in "iu":
            limits, numbers = np.iinfo(integers.dtype), floats.astype(np.float64)
            if not np.all((numbers >= float(limits.min)) & (numbers < float(limits.max) + 1)):
                return False
    if array.dtype.kind in "iu" and not np.array_equal(array < 0, cast < 0):
        return False
    return np.array_equal(cast.astype(array.dtype), array, equal_nan=array.dtype.kind in "fc")


def _lost_digits(value: object, array: NDArray[Any]) -> bool:
    """True if NumPy rounded a large integer when it made one array of a list of mixed numbers."""
    if not isinstance(value, list | tuple) or array.dtype.kind not in "fc":
        return False
    if not np.any(np.abs(array) >= 2**53):
        return False
    numbers = np.asarray(value, object)
    return bool(np.any((numbers != array) & (array == array)))  # but for NaN


def _bits(
    name: str, dtype: Dtype, bits: Bits, array: NDArray[Any], source: str, is_python: bool
) -> NDArray[Any]:
    if source == dtype.name or (source == dtype.numpy.name and not is_python):
        return array.astype(dtype.numpy, copy=False)
    is_real = array.dtype.kind != "c" and bits_of(source) is None  # no bits of another dtype
    if (is_python and is_real) or source in bits.exact_from:
        with np.errstate(all="ignore"):
            single = array.astype(np.float32)
        found = bits.from_float(np.where(np.isnan(single), np.float32(np.nan), single))  # without a payload
        if np.array_equal(bits.to_float(found), array, equal_nan=array.dtype.kind == "f"):
            return found
    raise SchemaError(
        f"field {name!r}: expected {dtype.name}, got {source}, which {dtype.name} cannot hold exactly: "
        f"give a torch or ml_dtypes {dtype.name} array, or the bits as {dtype.numpy.name}"
    )


def _timestamps(name: str, value: Any) -> NDArray[Any]:
    items = value if isinstance(value, list | tuple) else [value]
    if items and all(isinstance(item, dt.datetime) for item in items):
        if any(getattr(item, "nanosecond", 0) > 0 for item in items):  # pandas', whose NaT has NaN
            raise SchemaError(
                f"field {name!r}: {_shorten(value)} has nanoseconds, which datetime64[us] cannot hold: "
                "write value.floor('us') if that is meant"
            )
        array = np.array([_in_utc(item) for item in items], dtype="datetime64[us]")
        return array if isinstance(value, list | tuple) else array[0:1].reshape(())
    if is_masked(value):
        raise _masked(name)
    array = np.asarray(value)
    if array.dtype.kind != "M" or not np.can_cast(array.dtype, "datetime64[us]", "safe"):
        way = ".astype('datetime64[us]')" if array.dtype.kind == "M" else "numpy.datetime64(value, 'us')"
        raise SchemaError(
            f"field {name!r}: expected datetime or datetime64[us], got {_describe(value)}: "
            f"write {way} if that is meant"
        )
    exact = array.astype("datetime64[us]", copy=False)
    is_same = exact is array or np.array_equal(exact.astype(array.dtype), array, equal_nan=True)
    if not is_same:  # it wrapped around
        raise SchemaError(
            f"field {name!r}: {_describe(value)} is outside what datetime64[us] holds: give its number, "
            "such as value.astype('int64')"
        )
    return exact


def _in_utc(moment: dt.datetime) -> dt.datetime | np.datetime64:
    if moment != moment:  # pandas' NaT
        return np.datetime64("NaT")
    return moment.astimezone(dt.timezone.utc).replace(tzinfo=None) if moment.tzinfo else moment


def _masked(name: str) -> SchemaError:
    return SchemaError(f"field {name!r}: columns have no missing values: fill the masked array first")


def _describe(value: object) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} array of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {_shorten(value)}"


def _shorten(value: object) -> str:
    return shortened(repr(value), 60)
