"""Output: the memory that a gather fills."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Schema
from arrowcache.native.library import address_of
from arrowcache.reading.memory import PAGE_BYTES, page_aligned


def output_arrays(
    schema: Schema, names: Sequence[str], rows: int, out: Mapping[str, NDArray[Any]] | None
) -> dict[str, NDArray[Any]]:
    """An array of `rows` rows for each fixed-width column: a user's own, where given, else a new one.

    Raises: TypeError: `out` is no mapping. ValueError: one in it is of a column not asked for, or cannot be
        filled; two of them overlap.
    """
    out = {} if out is None else out
    if not isinstance(out, Mapping):
        raise TypeError(f"out must be a dict of arrays by column, not {type(out).__name__}")
    for name in out:
        if name not in names or name not in schema.fixed:
            raise ValueError(f"out has {name!r}, which is not a fixed-width column asked for")
    arrays = {}
    for name in names:
        if name not in schema.fixed:
            continue
        kind = schema.fixed[name]
        shape, dtype = (rows, *kind.shape), kind.numpy_dtype
        array = out[name] if name in out else _new(shape, dtype)
        if not (
            isinstance(array, np.ndarray)
            and array.shape == shape
            and array.dtype == dtype
            and array.flags.c_contiguous
            and array.flags.writeable
        ):
            raise ValueError(
                f"out[{name!r}] must be a writeable, C-contiguous {dtype} array of shape {shape}, "
                f"not {getattr(array, 'dtype', type(array))} of {getattr(array, 'shape', '?')}"
            )
        arrays[name] = array
    places = sorted((address_of(array), array.nbytes, name) for name, array in out.items() if array.nbytes)
    for (start, nbytes, name), (following, _, other) in itertools.pairwise(places):
        if start + nbytes > following:
            raise ValueError(
                f"out[{name!r}] and out[{other!r}] overlap: give each column an array of its own, since the "
                "rows of one would overwrite those of the other"
            )
    return arrays


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """Memory for a copy: `page_aligned` where that matters."""
    return np.empty(nbytes, np.uint8) if nbytes < PAGE_BYTES else page_aligned(nbytes)


def _new(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return aligned(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
