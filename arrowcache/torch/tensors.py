"""Tensors: an array, a column or a leaf of a batch as a torch tensor over the same host memory.

Numbers keep their values, or are refused. An array that a tensor cannot be over (a reversed, read-only or
unaligned array, one of foreign byte order) is copied; an array that would lose values (by a mask) is a
TypeError.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_convert
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # documented there

from arrowcache.arrow.convert import is_masked
from arrowcache.arrow.dtype import bits_of
from arrowcache.arrow.schema import FieldType, Ragged, Tensor, Timestamp
from arrowcache.reading.columns import Values

#: Dtypes of arrays that are tensors as they are: native, and never the bits of another dtype.
_PLAIN = frozenset(
    np.dtype(name).str for name in ["bool", "int8", "int32", "int64", "float32", "float64", "complex64"]
)


def tensor_over(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return an array's numbers as a tensor, over the same memory if possible.

    Raises: TypeError: torch has no such dtype, or the array is masked.
    """
    if is_masked(array):
        raise TypeError(
            "a masked array cannot become a tensor, which has no mask: pass its filled(value), "
            "or its data and mask as two arrays"
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.char == "Q":  # as NumPy makes of large ints: torch knows the other class of uint64
        array = array.view(np.uint64)
    width = max(1, array.itemsize)
    if not array.flags.behaved or any(stride < 0 or stride % width for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


def to_tensor(values: Any, kind: FieldType | None) -> Any:
    """Return a column of a batch as a tensor over the same memory; lists and tensors are returned unchanged.

    Raises: as `tensor_over`.
    """
    if isinstance(values, Values):
        data = _dense(values.data, kind)
        return torch.nested.nested_tensor_from_jagged(data, torch.from_numpy(values.offsets))
    return _dense(values, kind) if isinstance(values, np.ndarray) else values


def tensors_of(batch: Mapping[str, Any], schema: Mapping[str, FieldType]) -> dict[str, Any]:
    """Return the columns of a batch as tensors over the same memory, also those in dicts and lists.

    Text, and what torch's `default_convert` leaves as it is, stays.
    Raises: TypeError: a column that cannot become one, by its name.
    """
    tensors: dict[str, Any] = {}
    for name, values in batch.items():
        try:
            if type(values) is np.ndarray and values.dtype.str in _PLAIN and values.flags.carray:
                tensors[name] = torch.from_numpy(values)
            elif isinstance(values, np.ndarray | Values):
                tensors[name] = to_tensor(values, schema.get(name))
            elif isinstance(values, list) and values and isinstance(values[0], str | bytes):
                tensors[name] = values
            else:
                tensors[name] = default_convert(values)  # type: ignore[no-untyped-call]
        except TypeError as error:  # such as an array of Python objects
            raise TypeError(f"column {name!r} cannot become a tensor: {error}") from None
    return tensors


def import_nested(*, on_device: bool = False) -> None:
    """Import torch's nested tensors ahead, which takes most of a second, or seconds for those of a device."""
    bounds: dict[str, Any] = {"min_seqlen": 0, "max_seqlen": 0} if on_device else {}
    torch.nested.nested_tensor_from_jagged(torch.empty(0), torch.zeros(1, dtype=torch.int64), **bounds)


def source_of(leaf: Any) -> torch.Tensor | None:
    """Return a leaf of a batch as a plain host tensor, to be copied to a device byte by byte.

    Returns: the tensor, or None if the leaf has a `to` of its own, or does not move.
    Raises: TypeError: the leaf has no values, or would lose some.
    """
    # a subclass has more than its bytes
    if type(leaf) is torch.Tensor and leaf.is_cpu and leaf.layout is torch.strided:
        return None if leaf.requires_grad or leaf.is_nested or leaf.dtype in _odd_dtypes() else leaf
    if isinstance(leaf, np.ndarray):
        try:
            return tensor_over(leaf)
        except TypeError:  # text, dates, objects do not move
            if is_masked(leaf):
                raise
            return None
    if isinstance(leaf, torch.Tensor) and leaf.is_meta:
        raise TypeError(
            f"a meta tensor of shape {tuple(leaf.shape)} has no values that could be copied to a device: "
            "make the batch on the CPU"
        )
    return None


def move(leaf: Any, device: torch.device, *, waits: bool) -> Any:
    """Return a leaf on a device, by its own `to`; a leaf without one unchanged.

    Args:
        waits: wait for the copy. Otherwise wait only for leaves whose `to` has no non_blocking.
    """
    if not hasattr(leaf, "to"):
        return leaf
    if waits:
        return leaf.to(device)
    if isinstance(leaf, torch.Tensor) or _can_be_late(type(leaf)):  # type: ignore[arg-type]  # it is
        return leaf.to(device, non_blocking=True)
    return leaf.to(device)


def pinned(leaf: Any) -> Any:
    """Return a leaf in pinned memory, by its own `pin_memory`, or itself if this is impossible."""
    try:
        return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf
    except (RuntimeError, NotImplementedError):  # such as tensors of many layouts
        return leaf


@functools.cache
def _can_be_late(kind: Hashable) -> bool:
    """True if the `to` of a class takes `non_blocking`, and its `pin_memory` makes that safe."""
    if not hasattr(kind, "pin_memory"):
        return False
    try:
        parameters = inspect.signature(kind.to).parameters  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return False
    return "non_blocking" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _is_odd(dtype: torch.dtype) -> bool:
    """True if torch does not copy and lend this dtype as bytes: it is quantized, or less than a byte."""
    try:
        tensor = torch.zeros(16, dtype=torch.uint8, device="cpu").view(dtype)
        from_dlpack(to_dlpack(tensor)).copy_(tensor)
    except (RuntimeError, BufferError):
        return True
    return False


@functools.cache
def _odd_dtypes() -> frozenset[torch.dtype]:
    """Return all odd dtypes. Takes 2 ms the first time: not at import, as most loaders have no device."""
    dtypes = (each for each in vars(torch).values() if isinstance(each, torch.dtype))
    return frozenset(filter(_is_odd, dtypes))


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill one run of memory, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def strides_of_copy(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a copy without holes: the tensor's own, if it has none."""
    return torch.empty_like(tensor, device="meta").stride()


def _dense(array: np.ndarray[Any, Any], kind: FieldType | None) -> torch.Tensor:
    if isinstance(kind, Timestamp) and array.dtype.kind == "M":
        array = array.view(np.int64)
    tensor = tensor_over(array)
    if isinstance(kind, Tensor | Ragged) and bits_of(kind.dtype) and array.dtype == kind.numpy_dtype:
        return tensor.view(getattr(torch, kind.dtype))
    return tensor
