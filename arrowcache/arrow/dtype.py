"""Dtype: a kind of number: its name, how Arrow stores it, what NumPy readers see, what the bits stand for.

A new one is an entry of `_ALL`. Where NumPy lacks a dtype, its readers see bits. PyTorch and TensorFlow call
each dtype by the name that it has here: nothing of theirs is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Bits:
    """Conversion between numbers and the bits of a dtype that NumPy lacks.

    Args:
        to_float: bits to their numbers, exactly.
        from_float: float32 to the bits of the nearest number towards zero.
        exact_from: NumPy dtypes all of whose numbers it has.
    """

    to_float: Callable[[NDArray[Any]], NDArray[np.float32]]
    from_float: Callable[[NDArray[np.float32]], NDArray[Any]]
    exact_from: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dtype:
    """A kind of number.

    Args:
        name: as users and frameworks write it.
        kind: NumPy's letter: "b", "i", "u", "f" or "c".
        numpy: what NumPy readers see.
        stored: an element in a segment; two are a complex number.
        bits: None if NumPy has this dtype.
    """

    name: str
    kind: str
    numpy: np.dtype[Any]
    stored: np.dtype[Any]
    bits: Bits | None = None

    @property
    def elements(self) -> int:
        """Stored elements of one number."""
        return self.numpy.itemsize // self.stored.itemsize

    @property
    def arrow_type(self) -> pa.DataType:
        return pa.from_numpy_dtype(self.stored)


def _plain(name: str, stored: str | None = None) -> Dtype:
    return Dtype(name, np.dtype(name).kind, np.dtype(name), np.dtype(stored or name))


def _of_bits(name: str, seen_as: str, bits: Bits) -> Dtype:
    return Dtype(name, "f", np.dtype(seen_as), np.dtype(seen_as), bits)


_BFLOAT16 = Bits(  # the upper half of a float32
    to_float=lambda bits: (bits.astype(np.uint32) << np.uint32(16)).view(np.float32),
    from_float=lambda numbers: (np.asarray(numbers).view(np.uint32) >> 16).astype(np.uint16),
    exact_from=("bool", "int8", "uint8"),
)
_ALL = (
    _plain("bool", "uint8"),
    *(_plain(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    _plain("float16"),
    _of_bits("bfloat16", "uint16", _BFLOAT16),
    _plain("float32"),
    _plain("float64"),
    _plain("complex64", "float32"),
    _plain("complex128", "float64"),
)
_BY_NAME = {dtype.name: dtype for dtype in _ALL}
DTYPES = tuple(_BY_NAME)


def dtype_of(name: str) -> Dtype:
    """Return a dtype by its name. Raises: KeyError."""
    return _BY_NAME[name]


def bits_of(name: str) -> Bits | None:
    """The conversion of a dtype's bits. None if NumPy has the dtype, or no column holds it."""
    return _BY_NAME[name].bits if name in _BY_NAME else None


def dtype_name(dtype: object) -> str:
    """Name a dtype given as text, NumPy dtype, Python type or torch/TensorFlow dtype.

    Raises: ValueError: a dtype that a column cannot hold.
    """
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    if name not in DTYPES and dtype is not None:  # which NumPy takes for float64
        try:
            name = np.dtype(dtype).name  # type: ignore[call-overload]  # anything NumPy knows
        except TypeError:
            pass
    if name not in DTYPES:
        raise ValueError(f"dtype {dtype!r} cannot be stored: use one of {', '.join(DTYPES)}")
    return name
