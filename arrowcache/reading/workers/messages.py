"""Messages: what a loader's main process and its workers tell each other, in compact form.

An epoch's segments, once an epoch:

    int64       number of segments
    int64 each  seqs, rows, bytes, allocated bytes
    float64     when they were published
    text        tasks, one a line

Columns of a batch, as arrays that lie in slots:

    ndarray                 one array; no objects, no fields
    a number                one array of no dimension; also NumPy's scalars
    Values(data, offsets)   two
    list of str, of bytes   two: all their bytes side by side, and where each ends

Every other column is refused, since it would have to be pickled.

The first page of the shared memory has two words: ENDED, the last epoch that ended, written by the main
process; PROGRESS, the worker's stage and its start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from arrowcache.arrow.convert import require_unmasked
from arrowcache.reading.columns import Values, bytes_of
from arrowcache.storage.layout import SegmentInfo

ARRAY, VALUES, STR, BYTES = "array", "values", "str", "bytes"
SCALAR, NUMBER = "scalar", "number"  # NumPy's scalars, Python's numbers
STAGES_OF_WORKERS = ("", "gather", "transform")
ENDED, PROGRESS = 0, 1  # words of the shared memory

Place = tuple[str, list[int], int]
"""Of an array: dtype, shape, and where it lies: an address here, an offset elsewhere; 0: it has no bytes."""
Placed = tuple[str, str, list[Place]]
"""A column: name, kind, its arrays."""

_WAY_OUT = (
    "a worker process hands over ndarrays, numbers, Values(data, offsets), lists of str and lists of bytes: "
    "return one of these, or pass worker_type='thread'"
)


class Packed(NamedTuple):
    """One column of a batch as arrays."""

    name: str
    kind: str
    arrays: list[NDArray[Any]]


def pack_batch(batch: object) -> list[Packed]:
    """Return a batch's columns as arrays; ndarrays are not copied.

    Raises: TypeError: a column cannot be sent; the message says what to do.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"a transform must return a dict of columns in a worker process, not {_name(batch)}: {_WAY_OUT}"
        )
    if not batch:
        raise TypeError("a transform must return at least one column in a worker process, not an empty dict")
    return [_pack_column(name, value) for name, value in batch.items()]


def _pack_column(name: object, value: object) -> Packed:
    if not isinstance(name, str):
        raise TypeError(f"a transform's columns need names that are str, not {name!r}")
    if isinstance(value, Values):
        return Packed(name, VALUES, [_plain(name, value.data), _plain(name, value.offsets)])
    if isinstance(value, np.ndarray):
        return Packed(name, ARRAY, [_plain(name, value)])
    if isinstance(value, np.generic):
        return Packed(name, SCALAR, [_plain(name, np.asarray(value))])
    if type(value) in (bool, int, float):
        return Packed(name, NUMBER, [_plain(name, np.asarray(value))])
    if isinstance(value, list):
        if all(isinstance(item, str) for item in value):  # also of an empty list
            return _pack_items(name, STR, [item.encode(errors="surrogatepass") for item in value])
        if all(isinstance(item, bytes) for item in value):
            return _pack_items(name, BYTES, value)
        first = str if isinstance(value[0], str) else bytes
        odd = next(item for item in value if not isinstance(item, first))
        raise TypeError(f"column {name!r} is a list with {_name(odd)} in it: {_WAY_OUT}")
    raise TypeError(f"column {name!r} is {_name(value)}: {_WAY_OUT}")


def _pack_items(name: str, kind: str, items: Sequence[bytes]) -> Packed:
    lengths = np.fromiter(map(len, items), np.int64, len(items))
    return Packed(
        name, kind, [np.frombuffer(b"".join(items), np.uint8), np.concatenate(([0], np.cumsum(lengths)))]
    )


def _plain(name: str, values: ArrayLike) -> NDArray[Any]:
    require_unmasked(values, f"column {name!r} is", 0)
    array = np.asarray(values)
    if np.dtype(array.dtype.str) != array.dtype or array.dtype.hasobject:
        raise TypeError(
            f"column {name!r} has dtype {array.dtype}, whose items are objects, fields or foreign: {_WAY_OUT}"
        )
    return array


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def unpack_column(kind: str, arrays: Sequence[NDArray[Any]]) -> Any:
    """Return a column from its kind and arrays, as `pack` gave them. Arrays are not copied, text is."""
    if kind == ARRAY:
        return arrays[0]
    if kind == SCALAR:
        return arrays[0][()]
    if kind == NUMBER:
        return arrays[0].item()
    if kind == VALUES:
        return Values(arrays[0], arrays[1])
    items = bytes_of(Values(arrays[0], arrays[1]))
    return [item.decode(errors="surrogatepass") for item in items] if kind == STR else items


_NUMBERS = ("seq", "rows", "nbytes", "allocated_bytes")


def pack_segments(segments: Sequence[SegmentInfo]) -> bytes:
    """Return segments as bytes, for `unpack_segments`."""
    count = len(segments)
    numbers = [np.fromiter((getattr(s, name) for s in segments), np.int64, count) for name in _NUMBERS]
    published = np.fromiter((s.published for s in segments), np.float64, count)
    arrays = [np.array([count], np.int64), *numbers, published]
    return b"".join(array.tobytes() for array in arrays) + "\n".join(s.task for s in segments).encode()


def unpack_segments(data: bytes, known: Mapping[int, SegmentInfo]) -> list[SegmentInfo]:
    """Return segments from such bytes. Segments in `known`, by seq, are reused."""
    count = int(np.frombuffer(data, np.int64, 1)[0])
    columns = np.frombuffer(data, np.int64, 4 * count, 8).reshape(4, count).tolist()
    published = np.frombuffer(data, np.float64, count, 8 + 32 * count).tolist()
    tasks = data[8 + 40 * count :].decode().split("\n")
    return [
        known.get(seq) or SegmentInfo(seq, rows, task, nbytes, allocated, when)
        for seq, rows, nbytes, allocated, when, task in zip(*columns, published, tasks[:count], strict=True)
    ]
