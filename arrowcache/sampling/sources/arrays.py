"""Arrays: N-dimensional arrays in files of a store. Metadata are read at once, cells when they are asked for.

An `Array` has a layout, reads boxes and many windows at once, and can be closed. Nothing here unpickles:
arrays of objects are refused. HDF5 and Zarr arrays have attributes: `UnpackedArray` says how some of them
change the stored numbers.

A plan draws the places of many windows first. Those near each other in the store are a group, which one read
cuts. Of an array in chunks a group has the windows of the same chunks; a chunk that several groups need is
kept from the first to the last of them. Of a file of plain cells a group has windows whose bytes are near
each other. All of it is arithmetic on whole columns of places, with no loop over windows.

A piece is the chunks of one place along the axes that are cut: along the others all that is taken.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from arrowcache.errors import SamplerError, SchemaError
from arrowcache.sampling.retries import Retries, mark_permanent, tally
from arrowcache.sampling.sources.object_store import ObjectStore, Once

_HEADER_BYTES = 4096  # 128 in an array of numbers
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
#: Of a header, by NumPy and so by Python's parser. Before Python 3.12 threads that parse at once disturb
#: each other, and one gets a SystemError (CPython's issue 106905).
_PARSES = Retries(8, first_seconds=0)

Places = NDArray[np.int64]  # (windows, axes): where each begins

_GAP_BYTES = 64 << 10  # between windows, that are fetched with them: a request more takes longer
_RANGE_BYTES = 1 << 20  # that are fetched at a time
_KEPT_BYTES = 128 << 20  # of the pieces of an array that later groups need; others are fetched again


class ArrayLayout(NamedTuple):
    """The form of an array in the store.

    Args:
        chunks: cells of a chunk along each axis. None: there are none.
        strides: bytes from a cell to the next one along each axis, where there are no chunks.
        names: of the axes, where the store names them.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] | None
    strides: tuple[int, ...]
    names: tuple[str | None, ...]


class Window(NamedTuple):
    """The cells that are taken of an array: lengths along the axes that are cut, and ranges of the others."""

    lengths: tuple[int, ...]
    rest: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.lengths, *(part.stop - part.start for part in self.rest))

    def box(self, start: Sequence[int]) -> list[slice]:
        cut = [slice(at, at + length) for at, length in zip(start, self.lengths, strict=False)]
        return [*cut, *self.rest]


def strides_of(shape: Sequence[int], itemsize: int, *, in_fortran_order: bool = False) -> tuple[int, ...]:
    strides, step = [], itemsize
    for size in shape if in_fortran_order else reversed(shape):
        strides.append(step)
        step *= size
    return tuple(strides if in_fortran_order else reversed(strides))


def extent(window: Window, strides: Sequence[int], itemsize: int) -> int:
    """The bytes from a window's first cell to the end of its last one."""
    return sum((size - 1) * step for size, step in zip(window.shape, strides, strict=True)) + itemsize


def grouped(
    layout: ArrayLayout, window: Window, starts: Places, most: int
) -> tuple[Places, NDArray[np.bool_]]:
    """Return an order of windows by their place in the store, and which of them, in it, begin a group.

    Args:
        most: windows of a group.
    """
    axes = len(window.lengths)
    if layout.chunks is None:
        offsets = starts[:, :axes] @ np.array(layout.strides[:axes], np.int64)
        order = np.argsort(offsets, kind="stable")
        begins = _ranges(offsets[order], extent(window, layout.strides, layout.dtype.itemsize))
    else:
        first, last = _chunks(layout.chunks, window, starts)
        keys = np.concatenate([first, last], axis=1)
        order = np.lexsort(keys.T[::-1])
        keys = keys[order]
        begins = np.append(True, (keys[1:] != keys[:-1]).any(axis=1))
    at = np.arange(len(order))
    begins |= (at - np.maximum.accumulate(np.where(begins, at, 0))) % most == 0
    return order, begins


def _ranges(offsets: NDArray[np.int64], nbytes: int) -> NDArray[np.bool_]:
    """True where windows at sorted offsets are not fetched with the one before them."""
    begins = np.append(True, np.diff(offsets) > nbytes + _GAP_BYTES)
    number = (offsets - offsets[begins][np.cumsum(begins) - 1]) // _RANGE_BYTES
    begins[1:] |= np.diff(number) != 0
    return begins


def _chunks(chunks: Sequence[int], window: Window, starts: Places) -> tuple[Places, Places]:
    """The first and the last chunk of each window along each axis that is cut."""
    sizes = np.array(chunks[: len(window.lengths)], np.int64)
    starts = starts[:, : len(sizes)]
    return starts // sizes, (starts + np.array(window.lengths, np.int64) - 1) // sizes


def _piece_counts(layout: ArrayLayout, window: Window) -> tuple[int, ...]:
    """The number of pieces along each axis that is cut."""
    assert layout.chunks is not None
    axes = range(len(window.lengths))
    return tuple(-(-layout.shape[axis] // layout.chunks[axis]) for axis in axes)


def uses(layout: ArrayLayout, window: Window, starts: Places, groups: NDArray[np.int64]) -> dict[int, int]:
    """Return how many groups need each piece, of those that several need.

    Args:
        groups: of each window.
    """
    assert layout.chunks is not None
    first, last = _chunks(layout.chunks, window, starts)
    numbers, are_needed = np.zeros((len(starts), 1), np.int64), np.ones((len(starts), 1), np.bool_)
    for axis, count in enumerate(counts := _piece_counts(layout, window)):
        one = first[:, axis, None] + np.arange(int((last - first)[:, axis].max()) + 1)
        numbers = (numbers[:, :, None] * count + one[:, None, :]).reshape(len(starts), -1)
        is_one = one <= last[:, axis, None]
        are_needed = (are_needed[:, :, None] & is_one[:, None, :]).reshape(len(starts), -1)
    every = math.prod(counts)
    needed = np.unique((groups[:, None] * every + numbers)[are_needed]) % every
    pieces, times = np.unique(needed, return_counts=True)
    several = times > 1
    return dict(zip(pieces[several].tolist(), times[several].tolist(), strict=True))


class Pieces:
    """The pieces of an array that several groups of a plan need."""

    def __init__(self, uses: dict[int, int]) -> None:
        self._uses, self._nbytes = uses, 0
        self._kept: dict[int, Once[NDArray[Any]]] = {}
        self._left: set[int] = set()  # groups
        self._lock = threading.Lock()

    def get(self, number: int, fetch: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Return the cells of a piece. Blocks: while another thread fetches it. Raises: as `fetch`."""
        with self._lock:
            piece = self._kept.setdefault(number, Once()) if number in self._uses else None

        def keeps(cells: NDArray[Any]) -> bool:
            with self._lock:
                is_kept = number in self._kept and self._nbytes + cells.nbytes <= _KEPT_BYTES
                self._nbytes += cells.nbytes * is_kept
            return is_kept

        return fetch() if piece is None else piece.get(fetch, keeps)

    def is_busy(self, number: int) -> bool:
        """True if another thread fetches a piece."""
        piece = self._kept.get(number)
        return piece is not None and piece.is_busy

    def leave(self, numbers: set[int], group: int) -> None:
        """Note that a group needs these pieces no more; those that none needs are forgotten. Idempotent."""
        with self._lock:
            if group in self._left:
                return
            self._left.add(group)
            for number in numbers & self._uses.keys():
                self._uses[number] -= 1
                if not self._uses[number]:
                    del self._uses[number]
                    piece = self._kept.pop(number, None)
                    if piece is not None and piece.thing is not None:
                        self._nbytes -= piece.thing.nbytes


def from_bytes(
    layout: ArrayLayout, window: Window, starts: Places, read: Callable[[int, int], bytes]
) -> NDArray[Any]:
    """Return windows of a file of plain cells: (windows, *shape). Windows near each other are read at once.

    Args:
        read: called with the first byte of a range, and its length.
    """
    axes, itemsize, shape = len(window.lengths), layout.dtype.itemsize, window.shape
    cells = np.empty((len(starts), *shape), layout.dtype)
    if not cells.size:
        return cells
    offsets = starts[:, :axes] @ np.array(layout.strides[:axes], np.int64)
    offsets += sum(part.start * step for part, step in zip(window.rest, layout.strides[axes:], strict=True))
    nbytes = extent(window, layout.strides, itemsize)
    if len(starts) == 1:
        data = read(int(offsets[0]), nbytes)
        tally.fetched_bytes += len(data)
        cells[0] = np.ndarray(shape, layout.dtype, data, strides=layout.strides)
        return cells
    order = np.argsort(offsets, kind="stable")
    for rows in np.split(order, np.flatnonzero(_ranges(offsets[order], nbytes))[1:]):
        first, last = int(offsets[rows[0]]), int(offsets[rows[-1]])
        data = read(first, last - first + nbytes)
        tally.fetched_bytes += len(data)
        count = (last - first) // itemsize + 1
        every: NDArray[Any] = np.ndarray(
            (count, *shape), layout.dtype, data, strides=(itemsize, *layout.strides)
        )
        cells[rows] = every[(offsets[rows] - first) // itemsize]
    return cells


def box_from_bytes(
    layout: ArrayLayout, box: Sequence[slice], read: Callable[[int, int], bytes]
) -> NDArray[Any]:
    """Return the cells of a box of a file of plain cells. `read`: as of `from_bytes`."""
    one = np.array([[part.start for part in box]], np.int64)
    lengths = tuple(part.stop - part.start for part in box)
    cells: NDArray[Any] = from_bytes(layout, Window(lengths, ()), one, read)[0]
    return cells


def from_pieces(
    layout: ArrayLayout,
    window: Window,
    starts: Places,
    read: Callable[[Sequence[slice]], NDArray[Any]],
    pieces: Pieces | None,
    *,
    is_tallied: bool = False,
) -> tuple[NDArray[Any], set[int]]:
    """Return windows of an array in chunks, (windows, *shape), and the numbers of the pieces they needed.

    Args:
        read: called with a box, of whole chunks along the axes that are cut.
        is_tallied: `read` notes the bytes that it fetches.
    """
    assert layout.chunks is not None
    first, last = _chunks(layout.chunks, window, starts)
    counts, axes = _piece_counts(layout, window), len(window.lengths)
    needed: dict[int, tuple[int, ...]] = {}  # number -> place
    alike: dict[tuple[int, ...], list[int]] = {}  # windows of the same pieces
    for row, key in enumerate(np.concatenate([first, last], axis=1).tolist()):
        alike.setdefault(tuple(key), []).append(row)
    for key in alike:
        for place in itertools.product(*map(_between, key[:axes], key[axes:])):
            number = 0
            for at, count in zip(place, counts, strict=True):
                number = number * count + at
            needed[number] = place

    def fetch(place: tuple[int, ...]) -> NDArray[Any]:
        cells = read([*_piece(layout, place), *window.rest])
        tally.fetched_bytes += 0 if is_tallied else cells.nbytes
        return cells

    found: dict[tuple[int, ...], NDArray[Any]] = {}
    waiting = list(needed.items())
    if pieces is not None:  # what another thread is at is taken last
        waiting.sort(key=lambda each: pieces.is_busy(each[0]))
    for number, place in waiting:
        found[place] = (
            fetch(place) if pieces is None else pieces.get(number, lambda place=place: fetch(place))  # type: ignore[misc]  # mypy cannot infer lambdas with defaults
        )
    cells = np.empty((len(starts), *window.shape), next(iter(found.values())).dtype)
    for key, rows in alike.items():
        places = starts[rows, :axes]
        low = places.min(axis=0)
        high = places.max(axis=0) + np.array(window.lengths)
        block = _joined(layout, found, key, low.tolist(), high.tolist())
        cells[rows] = _cut(block, places - low, window.lengths)
    return cells, set(needed)


def _between(first: int, last: int) -> range:
    return range(first, last + 1)


def _piece(layout: ArrayLayout, place: Sequence[int]) -> list[slice]:
    """The cells of a piece along the axes that are cut."""
    assert layout.chunks is not None
    return [
        slice(at * size, min((at + 1) * size, length))
        for at, size, length in zip(place, layout.chunks, layout.shape, strict=False)
    ]


def _joined(
    layout: ArrayLayout,
    found: dict[tuple[int, ...], NDArray[Any]],
    key: tuple[int, ...],
    low: Sequence[int],
    high: Sequence[int],
) -> NDArray[Any]:
    """The cells from `low` to `high`, of the pieces from the first to the last of `key`."""
    axes = len(low)
    if key[:axes] == key[axes:]:
        piece = _piece(layout, key[:axes])
        return found[key[:axes]][
            tuple(slice(a - p.start, b - p.start) for a, b, p in zip(low, high, piece, strict=True))
        ]
    block: NDArray[Any] | None = None
    for place in itertools.product(*map(_between, key[:axes], key[axes:])):
        cells = found[place]
        if block is None:
            block = np.empty(
                (*(b - a for a, b in zip(low, high, strict=True)), *cells.shape[axes:]), cells.dtype
            )
        into, of = [], []
        for a, b, part in zip(low, high, _piece(layout, place), strict=True):
            begin, end = max(a, part.start), min(b, part.stop)
            into.append(slice(begin - a, end - a))
            of.append(slice(begin - part.start, end - part.start))
        block[tuple(into)] = cells[tuple(of)]
    assert block is not None
    return block


def _cut(block: NDArray[Any], places: Places, lengths: Sequence[int]) -> NDArray[Any]:
    """Windows of a block, by where they begin in it."""
    axes = len(lengths)
    spots = tuple(size - length + 1 for size, length in zip(block.shape, lengths, strict=False))
    every = np.lib.stride_tricks.as_strided(
        block,
        (*spots, *lengths, *block.shape[axes:]),
        (*block.strides[:axes], *block.strides[:axes], *block.strides[axes:]),
        writeable=False,
    )
    cut: NDArray[Any] = every[tuple(places.T)]
    return cut


class Array(Protocol):
    """One open array. Thread-safe."""

    layout: ArrayLayout

    def read(self, box: Sequence[slice]) -> NDArray[Any]:
        """Return the cells of a box, with a slice for each axis: a new array, of this dtype.

        Raises: OSError: an error of the store, after retries. SamplerError: damaged.
        """

    def cut(self, window: Window, starts: Places, pieces: Pieces | None) -> tuple[NDArray[Any], set[int]]:
        """Return windows by where they begin, (windows, *shape), and the numbers of the pieces they needed.

        Args:
            pieces: those that other windows need, too.
        Raises: as `read`.
        """

    def attribute(self, name: str) -> Any:
        """Return an attribute as the file has it. None: there is none. Raises: as `read`."""

    def close(self) -> None: ...


def _header(head: bytes) -> tuple[tuple[tuple[int, ...], bool, np.dtype[Any]], int]:
    """Return an array's shape, order and dtype, and where in the file its cells begin."""
    file = io.BytesIO(head)
    found = _HEADERS[npy.read_magic(file)](file)
    return found, file.tell()


def _is_disturbed(error: Exception) -> bool:
    return isinstance(error, SystemError)


class NpyArray:
    """A .npy file. A box is read in one piece, from its first cell in the file to its last.

    So cells between are read, too: few, if the box is cut along the first axis of an
    array in C order, else up to the whole file.
    """

    def __init__(self, store: ObjectStore, path: str) -> None:
        self._store, self._path = store, path
        self._file = store.run(lambda: store.open(path), path)
        try:
            head = store.run(lambda: self._file.read_at(_HEADER_BYTES, 0), path)
            nbytes = store.run(self._file.size, path)
            try:
                found = _PARSES.call(partial(_header, head), passes=_is_disturbed)
            except (ValueError, KeyError) as error:
                raise self._damaged(f"its header cannot be read: {error}") from None
            (shape, in_fortran_order, dtype), self._start = found
            if dtype.hasobject:
                raise self._damaged("it holds Python objects, which are pickled, and never read here")
            strides = strides_of(shape, dtype.itemsize, in_fortran_order=in_fortran_order)
            self.layout = ArrayLayout(shape, dtype, None, strides, (None,) * len(shape))
            if nbytes < (expected := self._start + dtype.itemsize * math.prod(shape)):
                raise self._damaged(f"it has {nbytes} bytes, and should have {expected}")
        except BaseException:
            self.close()
            raise

    def read(self, box: Sequence[slice]) -> NDArray[Any]:
        return box_from_bytes(self.layout, box, self._bytes)

    def cut(
        self,
        window: Window,
        starts: Places,
        pieces: Pieces | None,  # noqa: ARG002  # there are none
    ) -> tuple[NDArray[Any], set[int]]:
        return from_bytes(self.layout, window, starts, self._bytes), set()

    def attribute(self, name: str) -> None:  # noqa: ARG002  # a .npy has none
        return None

    def close(self) -> None:
        self._file.close()

    def _bytes(self, first: int, nbytes: int) -> bytes:
        return self._store.read(self._file, nbytes, self._start + first, self._path)

    def _damaged(self, why: str) -> SamplerError:
        why = self._store.other_format(self._path, "npy") or why
        wrong = SamplerError(f"{self._store.name(self._path)}: cannot be read as .npy: {why}")
        return mark_permanent(wrong, is_fault=True)


class UnpackedArray:
    """An array whose numbers are unpacked as they are read: stored * scale + offset, NaN for a missing value.

    The attributes are `scale_factor`, `add_offset`, `_FillValue`, `missing_value`, and netCDF's `_Unsigned`,
    as in xarray and the Climate and Forecast (CF) Metadata Conventions 1.11, sections 2.5.1 and 8.1.
    `valid_range` is not used, nor Zarr's and HDF5's own fill value: that is the value of unwritten cells. In
    Zarr version 2 it is `_FillValue`, too, where `_ARRAY_DIMENSIONS` shows that xarray wrote the array.

    Args:
        dtype: of the unpacked numbers.
        stored: what the stored numbers are taken for: unsigned, perhaps, where the file has signed ones.
        missing: stored numbers that stand for a missing value.
    """

    def __init__(
        self,
        array: Array,
        dtype: np.dtype[Any],
        stored: np.dtype[Any],
        missing: tuple[Any, ...] = (),
        scale: float | None = None,
        offset: float | None = None,
    ) -> None:
        self._array, self._stored, self._missing = array, stored, missing
        self._scale, self._offset = scale, offset
        self.layout = array.layout._replace(dtype=dtype)
        self.attribute, self.close = array.attribute, array.close

    def read(self, box: Sequence[slice]) -> NDArray[Any]:
        return self._unpack(self._array.read(box))

    def cut(self, window: Window, starts: Places, pieces: Pieces | None) -> tuple[NDArray[Any], set[int]]:
        cells, needed = self._array.cut(window, starts, pieces)
        return self._unpack(cells), needed

    def _unpack(self, cells: NDArray[Any]) -> NDArray[Any]:
        cells = cells.astype(self._stored, copy=False)
        unpacked = cells.astype(self.layout.dtype)
        if self._scale is not None:
            unpacked *= self._scale
        if self._offset is not None:
            unpacked += self._offset
        for value in self._missing:
            unpacked[cells == value] = np.nan
        return unpacked


def unpacked_array(array: Array, name: str) -> Array:
    """Return an array whose numbers are unpacked, or the array itself: they are as they are stored.

    Args:
        name: the array's, for messages.
    Raises: SchemaError: an attribute that is no number, or none that fits.
    """
    attribute, dtype = array.attribute, array.layout.dtype

    def numbers(which: str) -> NDArray[Any] | None:
        value = attribute(which)
        try:
            return None if value is None else _numbers(value, dtype)
        except (ValueError, TypeError):
            raise _unusable(name, which, value, "numbers") from None

    scale, offset = numbers("scale_factor"), numbers("add_offset")
    for which, factor in (("scale_factor", scale), ("add_offset", offset)):
        if factor is not None and (factor.size != 1 or factor.dtype.kind not in "iuf"):
            raise _unusable(name, which, attribute(which), "one real number")
    stored = _stored_as(dtype, attribute("_Unsigned"))
    given = [values for which in ("_FillValue", "missing_value") if (values := numbers(which)) is not None]
    found = dict.fromkeys(value for values in given for value in values.ravel().tolist())
    missing = tuple(_as_stored(value, stored) for value in found if value == value)  # NaN is NaN anyway
    if scale is not None or offset is not None:
        unpacked = _float_of(stored, scale, offset)
    elif missing and stored.kind in "biu":
        unpacked = np.dtype(np.float32 if stored.itemsize <= 2 else np.float64)
    elif stored.kind in "iu" and _text(attribute("dtype")) == "bool":  # as xarray writes it into netCDF
        unpacked = np.dtype(np.bool_)
    else:
        unpacked = stored
    if not missing and unpacked == dtype and scale is offset is None:
        return array
    return UnpackedArray(
        array,
        unpacked,
        stored,
        missing,
        None if scale is None else scale.item(),
        None if offset is None else offset.item(),
    )


def _float_of(
    stored: np.dtype[Any], scale: NDArray[Any] | None, offset: NDArray[Any] | None
) -> np.dtype[Any]:
    """The dtype of unpacked numbers, as xarray has it: float32 if the attributes are, else float64.

    It is float64, too, if there is an offset alone, and for integers of 4 bytes with both.
    """
    is_short = scale is not None and scale.dtype.type is np.float32
    if is_short and offset is not None:
        is_short = offset.dtype.type is np.float32 and not (stored.kind in "iu" and stored.itemsize == 4)
    chosen: np.dtype[Any] = np.dtype(np.float32 if is_short else np.float64)
    return np.result_type(chosen, stored) if stored.kind == "c" else chosen


def _stored_as(dtype: np.dtype[Any], unsigned: Any) -> np.dtype[Any]:
    """Return the dtype of stored integers by netCDF's `_Unsigned`: netCDF-3 has only signed ones."""
    says = _text(unsigned)
    if dtype.kind == "i" and says == "true":
        return np.dtype(f"u{dtype.itemsize}")
    if dtype.kind == "u" and says == "false":
        return np.dtype(f"i{dtype.itemsize}")
    return dtype


def _as_stored(value: Any, stored: np.dtype[Any]) -> Any:
    """A missing value of an integer array as its numbers are taken: -1 is 255 of unsigned bytes."""
    if stored.kind not in "iu" or value != int(value):
        return value
    bits = 8 * stored.itemsize
    least = 0 if stored.kind == "u" else -(1 << (bits - 1))
    turned = (int(value) - least) % (1 << bits) + least
    return turned if abs(int(value)) < 1 << bits else value


def _numbers(value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The numbers of an attribute. xarray writes a float into Zarr as base64 of 8 bytes: JSON has no NaN."""
    if dtype.kind == "c" and isinstance(value, list) and len(value) == 2:  # as xarray writes a complex one
        return np.array(complex(*(_numbers(part, np.dtype(np.float64)).item() for part in value)))
    array = np.asarray(value)
    if array.dtype.kind in "SUOT":
        array = np.array([_number(text) for text in array.ravel().tolist()])
    if array.dtype.kind not in "biufc":
        raise ValueError(f"{value!r} is no number")
    return array


def _number(text: Any) -> float:
    if not isinstance(text, str | bytes):
        raise TypeError(f"{text!r} is no number")
    try:
        return float(text)
    except ValueError:
        return float(np.frombuffer(base64.b64decode(text, validate=True), "<f8").item())


def _text(value: Any) -> str:
    """An attribute of text or a truth value, in lower case; empty if there is none."""
    found = np.asarray("" if value is None else value)
    word = found.item() if found.size == 1 else ""
    return (word.decode(errors="replace") if isinstance(word, bytes) else str(word)).lower()


def _unusable(name: str, attribute: str, value: Any, wanted: str) -> SchemaError:
    return SchemaError(
        f"{name}: its attribute {attribute} is {value!r}, which should be {wanted}: pass decode=False to "
        "have the numbers as they are stored"
    )
