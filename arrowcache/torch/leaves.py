"""Leaves: the values without parts that an item may have, and a column's values as such again.

The classes are exact: a subclass may have more to it than a column keeps. An error says what to give.
Each value owns its memory, as one that the dataset made: it keeps no column alive, and autograd sees no other
value change with it. That takes a copy a value. Pure.
"""

from __future__ import annotations

import array
import collections
import datetime as dt
import decimal
import enum
import fractions
import functools
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from arrowcache.arrow.convert import as_array, is_masked
from arrowcache.arrow.dtype import DTYPES, bits_of, dtype_of
from arrowcache.arrow.items import Leaf, with_article
from arrowcache.arrow.schema import FieldType, Ragged, Tensor
from arrowcache.errors import SchemaError
from arrowcache.reading.columns import ColumnData, Values
from arrowcache.torch.tensors import to_tensor

_NUMBERS = (bool, int, float, complex)
PLAIN = (*_NUMBERS, str, bytes, dt.datetime)
#: Letters of NumPy's classes that are equal to int64 or uint64, and not the same.
_LONG_LONG = "".join({*"qQ"} - {np.dtype(name).char for name in ("int64", "uint64")})
_KINDS_OF_NUMBERS = {"bool": "b", "int": "iu", "float": "f", "complex": "c"}


def leaf_of(name: str, value: Any) -> Leaf:
    """Describe a leaf. Raises: SchemaError: it has more to it than a column keeps."""
    kind = type(value)
    if kind is torch.Tensor:
        return _tensor(name, value)
    if kind is np.ndarray:
        return _array(name, value)
    if isinstance(value, np.generic) and value.dtype.type is kind:
        return Leaf(name, kind) if kind in (np.str_, np.bytes_) else _array(name, value)
    if kind is list:
        return Leaf(name, list, detail=f"of {' and '.join(sorted(_classes(value)))}")
    if kind is dt.datetime:
        return _moment(name, value)
    if kind is int and not -(2**63) <= value < 2**64:
        raise refusal(repr(name), "an int of more than 64 bits", "str(value)")
    if kind in PLAIN:
        return Leaf(name, kind)
    raise _unknown(name, value)


def _tensor(name: str, tensor: torch.Tensor) -> Leaf:
    leaf = Leaf(name, torch.Tensor, "", tensor.dtype)
    what, instead = _more_of_tensor(tensor) or ("", _instead_of_torch(tensor.dtype))
    if instead:
        raise refusal(repr(name), f"{leaf} {what}".rstrip(), instead)
    if 0 in tensor.shape:
        _require_inner_lengths(leaf, tensor.shape)
    order = _order_of(tensor)
    return leaf._replace(order=order) if order else leaf


def _array(name: str, array: Any) -> Leaf:
    leaf = Leaf(name, type(array), "", array.dtype)
    if array.dtype.metadata:
        instead = "value.astype(value.dtype.str)"
    elif leaf.type is np.ndarray and array.dtype.kind == "M":
        instead = "value.astype('datetime64[us]').astype('int64')"
    elif array.dtype.kind == "M" and np.datetime_data(array.dtype)[0] == "generic":  # such as a NaT
        instead = "value.astype('datetime64[us]')"
    else:
        instead = _instead_of_dtype(array.dtype)
    if instead:
        raise refusal(repr(name), str(leaf), instead)
    if 0 in array.shape:
        _require_inner_lengths(leaf, array.shape)
    if array.dtype.char in _LONG_LONG:
        leaf = leaf._replace(detail=f"as {array.dtype.type.__name__}")
    order = _order_of(array) if leaf.type is np.ndarray else ()
    return leaf._replace(order=order) if order else leaf


def _moment(name: str, moment: dt.datetime) -> Leaf:
    leaf = Leaf(name, dt.datetime)
    if moment.tzinfo is not None:
        instead = "value.astimezone(timezone.utc).replace(tzinfo=None)"
        raise refusal(repr(name), f"{leaf} with a time zone", instead)
    if moment.fold:
        raise refusal(repr(name), f"{leaf} with a fold", "value.replace(fold=0)")
    return leaf


def _require_inner_lengths(leaf: Leaf, shape: Sequence[int]) -> None:
    """Raises: SchemaError: the length of a dimension is 0, but for the first."""
    if 0 in shape[1:]:
        raise SchemaError(
            f"{leaf.name!r} is {leaf} of shape {tuple(shape)}, without values, which no column holds: leave "
            "it out, or give its shape, such as value.shape[0]"
        )


@functools.cache
def _name_of(dtype: Any) -> str:
    """Return the name of a dtype of NumPy or torch. Empty: no column has it."""
    name = getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    return name if name in DTYPES else ""


def _more_of_tensor(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return what a tensor has beside its values, and what to give instead. None: nothing."""
    if tensor.is_meta:
        return "on meta, without values", "a tensor of the CPU"
    if tensor.requires_grad or (tensor.grad is not None):
        return "with a gradient", "tensor.detach()"
    if tensor.is_nested:
        return "that is nested", "[*tensor.unbind()]"
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}", "tensor.to_dense()"
    if tensor.is_quantized:
        return "that is quantized", "tensor.dequantize()"
    if not tensor.is_cpu:
        return f"on {tensor.device}", "tensor.cpu()"
    if getattr(tensor, "has_names", bool)():  # torch 2.13 has none any more
        return "with named dimensions", "tensor.rename(None)"
    if own := vars(tensor):
        return f"with the attribute {next(iter(own))}", "tensor.detach(), and the attribute as another value"
    return None


@functools.cache
def _instead_of_torch(dtype: torch.dtype) -> str:
    """Return what to give in place of a tensor of a dtype. Empty: columns may hold it."""
    if _name_of(dtype):
        return ""
    if dtype.is_complex:
        return "tensor.to(torch.complex64)"
    try:
        torch.empty(1, dtype=dtype).float()
    except RuntimeError:  # it has no numbers, such as bits8
        return f"tensor.view(torch.{'uint8' if dtype.itemsize == 1 else 'int16'})"
    return "tensor.float()"


@functools.cache
def _instead_of_dtype(dtype: np.dtype[Any]) -> str:
    """Return what to give in place of an array of a dtype. Empty: columns may hold it."""
    if dtype.names:
        return "{name: value[name] for name in value.dtype.names}"
    if dtype.kind == "m":
        return "value.astype('int64')"
    if dtype.kind in "OSUT":
        return "value.tolist()"
    if dtype.kind == "M" or _name_of(dtype):
        return ""
    if issubclass(dtype.type, np.void):
        return "value.tobytes()"
    return f"value.astype('{'complex128' if dtype.kind == 'c' else 'float64'}')"


def _order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return dimensions from the outermost in memory to the innermost. Empty: in C's order."""
    if not all(strides) or 0 in shape:
        return ()
    order = tuple(sorted(range(len(shape)), key=lambda at: -abs(strides[at])))
    return () if order == tuple(range(len(shape))) else order


def _order_of(value: torch.Tensor | NDArray[Any]) -> tuple[int, ...]:
    if isinstance(value, torch.Tensor):
        return () if value.is_contiguous() else _order(value.shape, value.stride())
    return () if value.flags.c_contiguous else _order(value.shape, value.strides)


def lies_in(order: tuple[int, ...], own: tuple[int, ...], value: Any) -> bool:
    """True if an array or a tensor may be said to lie in an order: dimensions of length 1 lie in any."""
    if own == order:
        return True
    shape = value.shape
    strides = value.stride() if isinstance(value, torch.Tensor) else value.strides
    if 0 in shape:
        return True
    if not all(strides):
        return not order
    long = [abs(strides[at]) for at in order or range(len(shape)) if shape[at] > 1]
    return all(one >= other for one, other in itertools.pairwise(long))


def _classes(values: list[Any]) -> set[str]:
    """The names of the classes of a nested list's numbers."""
    classes = {*map(type, values)}
    if list not in classes:
        return {each.__name__ for each in classes}
    return set().union(*(_classes(each) if type(each) is list else {type(each).__name__} for each in values))


def is_numbers(values: list[Any]) -> bool:
    return all(type(each) in _NUMBERS or (type(each) is list and is_numbers(each)) for each in values)


def require_dtype(leaf: Leaf, kind: FieldType) -> None:
    """Make sure that a column of this type gives values of a leaf's dtype. Raises: SchemaError."""
    if leaf.type is list and " and " in leaf.detail:
        raise refusal(repr(leaf.name), str(leaf), "numbers of one class")
    if isinstance(kind, Tensor | Ragged) and not _is_of(leaf, kind.dtype):
        raise SchemaError(
            f"{leaf.name!r} is {leaf}, which would come back of another dtype from {kind}: give the dtype "
            "that it has in schema, or convert it in the dataset"
        )


def _is_of(leaf: Leaf, dtype: str) -> bool:
    """True if the values of a leaf have a dtype, or are Python's numbers of its kind."""
    if leaf.dtype is not None:
        return dtype == _name_of(leaf.dtype)
    number = leaf.detail.removeprefix("of ") if leaf.type is list else leaf.type.__name__
    return bits_of(dtype) is None and dtype_of(dtype).kind in _KINDS_OF_NUMBERS.get(number, "")


# what is refused


def refusal(shown_name: str, what: str, instead: str) -> SchemaError:
    return SchemaError(f"{shown_name} is {what}, which is more than a column keeps: give {instead}")


def _unknown(name: str, value: Any) -> SchemaError:
    """Return the error for a value of a class that has no codec, with what to give in its place."""
    kind, instead = type(value), _instead_of(value)
    if isinstance(value, torch.Tensor | np.ndarray | str | bytes | dt.datetime | int | float | complex):
        dtype = f" of {value.dtype}" if hasattr(value, "dtype") else ""
        return refusal(repr(name), f"{with_article(kind.__name__)}{dtype}", instead)
    if isinstance(value, tuple | list):
        return SchemaError(
            f"{name!r} is a {kind.__module__}.{kind.__name__}, which is more than its values: give {instead}"
        )
    return SchemaError(
        f"field {name!r}: expected numbers, text, arrays, tensors, images, or parts of such, got "
        f"{with_article(kind.__name__)}: give {instead}"
    )


#: What to give in place of a value, by its class; the first that fits.
_INSTEAD: list[tuple[Any, str]] = [
    (enum.Enum, "value.value"),
    (str, "str(value)"),
    ((bytes, bytearray, memoryview), "bytes(value)"),
    (bool, "bool(value)"),
    (int, "int(value)"),
    (float, "float(value)"),
    (complex, "complex(value)"),
    (dt.date, "datetime.combine(value, time())"),
    (dt.timedelta, "value.total_seconds()"),
    ((decimal.Decimal, fractions.Fraction), "float(value)"),
    ((set, frozenset), "sorted(value)"),
    ((list, collections.deque, collections.UserList, range, array.array), "list(value)"),
    (tuple, "tuple(value)"),
    ((collections.UserString, torch.device, torch.dtype, np.dtype), "str(value)"),
    (torch.nn.Parameter, "tensor.detach()"),
]


def _instead_of(value: Any) -> str:
    if isinstance(value, dt.datetime):
        return _instead_of_moment(value)
    if isinstance(value, torch.Tensor) and value.is_nested:
        return "[*tensor.unbind()]"
    for kind, instead in _INSTEAD:
        if isinstance(value, kind):
            return instead
    if isinstance(value, torch.Tensor):
        return "tensor.as_subclass(torch.Tensor)"
    if is_masked(value):
        return "value.filled()"
    if isinstance(value, np.ndarray):
        return _instead_of_dtype(value.dtype) or "np.asarray(value)"
    return _instead_of_object(value)


def _instead_of_moment(value: Any) -> str:
    if getattr(value, "nanosecond", 0) > 0:  # NaN of pandas' NaT
        return "value.value, its nanoseconds since 1970"
    zone = value.tzinfo is not None
    if hasattr(value, "to_datetime64"):  # NaT, too: a column may have both
        return f"value{'.tz_convert(None)' * zone}.to_datetime64().astype('datetime64[us]')"
    naive = f"value{'.astimezone(timezone.utc)' * zone}"
    return f"datetime.combine({naive}.date(), {naive}.time())"


def _instead_of_object(value: Any) -> str:
    kind = type(value)
    image = getattr(sys.modules.get("PIL.Image"), "Image", None)
    if image is not None and isinstance(value, image):
        return "image.copy()"
    if isinstance(value, type) or callable(value):
        return "its name, or nothing"
    if hasattr(kind, "to_dict") and isinstance(value, Mapping):  # TensorDict
        return "value.to_dict()"
    if isinstance(value, Mapping):
        return "dict(value)"
    if hasattr(kind, "iterrows"):  # a table of pandas
        return "{name: value[name].to_numpy() for name in value}"
    if hasattr(kind, "to_numpy"):
        return "value.to_numpy()"
    if hasattr(kind, "__array__"):
        return "np.asarray(value)"
    if kind.__name__ == "NAType":  # pandas'
        return "float('nan'), or what stands for it among the other values"
    if getattr(value, "__dict__", None):
        return "a dict of its values, such as vars(value)"
    if any("__str__" in vars(each) or "__fspath__" in vars(each) for each in kind.__mro__[:-1]):
        return "str(value)"
    return "a number, a text or an array in its place"


# columns as values


def restored(leaf: Leaf, kind: FieldType, column: ColumnData) -> Sequence[Any]:
    """Return the values of a column, one a row, as the leaf's class: copies.

    Args:
        column: (n, *shape), n texts or bytes, or `Values` of n rows.
    """
    if isinstance(column, list):
        return column if leaf.type in PLAIN else [*map(leaf.type, column)]  # texts of NumPy
    if isinstance(column, Values):
        data = to_tensor(column.data, kind) if leaf.type is torch.Tensor else column.data
        made = np.ndarray.tolist if leaf.type is list else _copier(leaf, kind)
        return [made(data[start:stop]) for start, stop in itertools.pairwise(column.offsets.tolist())]
    if leaf.type is torch.Tensor:
        return [*map(_copier(leaf, kind), to_tensor(column, kind).unbind())]
    if leaf.type in (*_NUMBERS, list):
        return column.tolist()  # type: ignore[no-any-return]
    if leaf.type is dt.datetime:
        return column.astype("datetime64[us]").tolist()  # type: ignore[no-any-return]
    if leaf.type is np.ndarray:
        return [*map(_copier(leaf, kind), column)]
    return [*_array_of(leaf, kind)(column)]  # scalars of NumPy


def _copier(leaf: Leaf, kind: FieldType) -> Callable[[Any], Any]:
    """Return a function that copies a row of a column, in the leaf's order of dimensions."""
    order = leaf.order
    if leaf.type is not torch.Tensor:
        copied = _array_of(leaf, kind)
        inverse = tuple(np.argsort(order).tolist())
        return (lambda row: copied(row.transpose(order)).transpose(inverse)) if order else copied
    if not order:
        return lambda row: row.clone(memory_format=torch.contiguous_format)
    inverse = tuple(np.argsort(order).tolist())
    return lambda row: row.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


def _array_of(leaf: Leaf, kind: FieldType) -> Callable[[Any], NDArray[Any]]:
    """Return a function that copies a row, or a column, as an array of the dtype that the leaf had."""
    if isinstance(kind, Tensor | Ragged) and bits_of(kind.dtype):
        return lambda row: np.array(row, order="C").view(leaf.dtype)
    if not leaf.detail:
        return lambda row: np.array(row, leaf.dtype, order="C")
    # by name: it pickles as the dtype that is equal, and NumPy casts to no equal one
    own = np.dtype(leaf.detail.removeprefix("as ")).newbyteorder(leaf.dtype.byteorder)
    return lambda row: np.array(row, leaf.dtype, order="C").view(own)


# the net


def is_same(one: Any, other: Any) -> bool:
    """True if two leaves are of one class, and the same bytes in the same order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor | np.ndarray):
        mine, its = as_array("", one)[0], as_array("", other)[0]
        return (
            (one.dtype, one.shape) == (other.dtype, other.shape)
            and getattr(one.dtype, "char", "") == getattr(other.dtype, "char", "")
            and _order_of(one) == _order_of(other)
            and mine.tobytes() == its.tobytes()
        )
    if isinstance(one, np.generic):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    return repr(one) == repr(other)  # the same for all NaN, another for -0.0
