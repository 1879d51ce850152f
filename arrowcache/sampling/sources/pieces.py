"""Pieces: parts of a stored array that a plan of windows needs, each fetched once, and windows cut of them.

A plan draws the places of many windows first. Those near each other in the store are a group, which one read
cuts. Of an array in chunks a group has the windows of the same chunks; a chunk that several groups need is
kept from the first to the last of them. Of a file of plain cells a group has windows whose bytes are near
each other. All of it is arithmetic on whole columns of places, with no loop over windows.

A piece is the chunks of one place along the axes that are cut: along the others all that is taken.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.sampling.counts import tally
from arrowcache.sampling.sources.handles import Once

Places = NDArray[np.int64]  # (windows, axes): where each begins

_GAP_BYTES = 64 << 10  # between windows, that are fetched with them: a request more takes longer
_RANGE_BYTES = 1 << 20  # that are fetched at a time
_KEPT_BYTES = 128 << 20  # of the pieces of an array that later groups need; others are fetched again


class Layout(NamedTuple):
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


def grouped(layout: Layout, window: Window, starts: Places, most: int) -> tuple[Places, NDArray[np.bool_]]:
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


def _numbers(layout: Layout, window: Window) -> tuple[int, ...]:
    """The number of pieces along each axis that is cut."""
    assert layout.chunks is not None
    axes = range(len(window.lengths))
    return tuple(-(-layout.shape[axis] // layout.chunks[axis]) for axis in axes)


def uses(layout: Layout, window: Window, starts: Places, groups: NDArray[np.int64]) -> dict[int, int]:
    """Return how many groups need each piece, of those that several need.

    Args:
        groups: of each window.
    """
    assert layout.chunks is not None
    first, last = _chunks(layout.chunks, window, starts)
    numbers, are_needed = np.zeros((len(starts), 1), np.int64), np.ones((len(starts), 1), np.bool_)
    for axis, count in enumerate(counts := _numbers(layout, window)):
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
    layout: Layout, window: Window, starts: Places, read: Callable[[int, int], bytes]
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


def from_pieces(
    layout: Layout,
    window: Window,
    starts: Places,
    read: Callable[[Sequence[slice]], NDArray[Any]],
    pieces: Pieces | None,
) -> tuple[NDArray[Any], set[int]]:
    """Return windows of an array in chunks, (windows, *shape), and the numbers of the pieces they needed.

    Args:
        read: called with a box, of whole chunks along the axes that are cut.
    """
    assert layout.chunks is not None
    first, last = _chunks(layout.chunks, window, starts)
    counts, axes = _numbers(layout, window), len(window.lengths)
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
        tally.fetched_bytes += cells.nbytes
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


def _piece(layout: Layout, place: Sequence[int]) -> list[slice]:
    """The cells of a piece along the axes that are cut."""
    assert layout.chunks is not None
    return [
        slice(at * size, min((at + 1) * size, length))
        for at, size, length in zip(place, layout.chunks, layout.shape, strict=False)
    ]


def _joined(
    layout: Layout,
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
