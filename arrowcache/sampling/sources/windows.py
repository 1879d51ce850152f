"""ArrayWindows: random windows of N-dimensional arrays on any store, several arrays cut at the same place.

An array is known by its name:

    *.npy                       NumPy's file, one array
    *.h5, *.hdf5, *.nc          HDF5 (hdf5.py): "run.h5#group/signal" names the dataset
    any other path              Zarr (zarr3.py): a folder; "run.zarr#signal" or "run.zarr/signal"
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Schema, Tensor
from arrowcache.arrow.segment import row_bytes
from arrowcache.errors import SchemaError
from arrowcache.sampling.reads import Read, Rows, at_once
from arrowcache.sampling.retries import Retries
from arrowcache.sampling.samples import Fault, made_or_fault
from arrowcache.sampling.sources.arrays import (
    Array,
    ArrayLayout,
    NpyArray,
    Pieces,
    Places,
    Window,
    grouped,
    unpacked_array,
    uses,
)
from arrowcache.sampling.sources.object_store import URI, Handles, ObjectStore, is_installed, locate
from arrowcache.sampling.sources.source import Choice, Source, parse_weights
from arrowcache.units import did_you_mean, format_count, parse_count

Arrays = URI | Mapping[str, URI]
Lengths = Sequence[int]

_MAX_OPEN = 64
_PLAN_BYTES = 64 << 20  # of the windows that are drawn at a time
_READ_BYTES = 4 << 20  # of the windows of a read
_FIELD = "data"
POSITION_FIELDS = ("recording", "position")
_HDF5 = (".h5", ".hdf5", ".hdf", ".he5", ".nc")
_FILE = re.compile(r"(.*\.(?:h5|hdf5|hdf|he5|nc|zarr))#(.+)")


class Address(NamedTuple):
    """The address of an array: a file or folder, and a name in it."""

    path: str
    inner: str


class _Recording(NamedTuple):
    """Arrays that are cut at the same place.

    `low` and `counts`: the first place along each axis that is cut, and the number of places from there on.
    """

    addresses: dict[str, Address]
    layouts: dict[str, ArrayLayout]
    windows: dict[str, Window]
    low: tuple[int, ...]
    counts: tuple[int, ...]


class ArrayWindows(Source):
    """Draws windows: every place where one fits is equally likely.

        ArrayWindows("s3://bucket/volume.zarr", window=(32, 64, 64))
        ArrayWindows({"signal": "run.h5#signal", "label": "run.h5#label"}, window=(256,))

    Args:
        arrays: the array, with "data" as its field; or field name -> array: all of them are cut at the
            same place. Or a list of either, as of several recordings: each window is of one of them.
            "x.npy", "x.h5#dataset", else a Zarr array, "x.zarr" or "x.zarr#signal".
        window: lengths along the first axes of an array, in cells; further axes are
            taken whole. A mapping field name -> window, if they differ: all begin at the same
            place, so `{"signal": (256,), "label": (1,)}` is 256 values and the label of the first.
        weights: relative frequency of each of `arrays`. None means in proportion to its places.
        decode: unpack the numbers of HDF5 and Zarr arrays (netCDF-4 too) by their attributes, as CF says:
            stored * scale_factor + add_offset; NaN for _FillValue and missing_value; unsigned by _Unsigned.
            The _FillValue that xarray writes into Zarr version 2 is the array's fill_value.
            The dtype is a float, chosen as xarray does: that of both attributes if they are alike (but
            float64 for integers of 4 bytes), or of a scale_factor alone, else float64; with missing values
            alone float32 for integers of 1 or 2 bytes, float64 for larger ones, and floats keep theirs.
            False: as stored. Times ("days since 1900-01-01") and flags are numbers in both cases.
        windows_per_chunk: number of windows, all different, of each chunk of the first array that is fetched:
            so each byte that is fetched is used about so many times its share. All of them, if a chunk has
            fewer. A chunk that is drawn again for a segment gives others, until it has given all. Each
            window that lies within a chunk is equally likely, as far as `weights` say nothing else; **one
            that crosses the border of a chunk never comes**. None means any window.
        where: axis -> the part of it that windows are drawn from, such as `{"time": slice(0, 2016)}`. An
            axis is its number or its name, if the store has names: Zarr's dimension_names, xarray's
            _ARRAY_DIMENSIONS, HDF5's dimension scales. Windows lie wholly in it; of an axis
            that is taken whole, it is what is taken. Begins and ends are as those of Python's slices.
        with_position: add "recording", the number in `arrays`, and "position", the window's begin
            along each axis that is cut.
        filesystem: of pyarrow.fs or fsspec; the URIs are paths on it. None means the URI's own.
        retries: number of further attempts at a read before its error is raised.
    Raises: FileNotFoundError, PermissionError, OSError: the store, or no such array; says which there are.
        ValueError: a window that is larger than the array: names array, axis and sizes; a weight that is not
        positive and finite; an HDF5 file or group without a dataset's name. SchemaError: arrays that differ
        from those before them, or whose axes differ where they are cut at the same place; an attribute that
        cannot be used to decode. SamplerError: a damaged file, one of another format, or a Zarr group.
        ModuleNotFoundError: says what to install.

    A pool draws the places of a segment's windows first, and fetches them in the order in which they lie in
    the store: each chunk once, and bytes that are near each other at once. So neighbours in a segment are
    neighbours in the array. A Loader's shuffle mixes them. HDF5 reads in one thread at a time of a process:
    more `workers` make it faster, and more `reads` do not. Numbers without chunks on a remote store are read
    past it, in any thread.
    """

    def __init__(
        self,
        arrays: Arrays | Sequence[Arrays],
        window: Lengths | Mapping[str, Lengths],
        *,
        weights: Sequence[float] | None = None,
        decode: bool = True,
        windows_per_chunk: int | None = None,
        where: Mapping[str | int, slice] | None = None,
        with_position: bool = False,
        filesystem: Any = None,
        retries: int | Retries = 4,
    ) -> None:
        given = [arrays] if isinstance(arrays, str | os.PathLike | Mapping) else list(arrays)
        sets = [dict(each) if isinstance(each, Mapping) else {_FIELD: each} for each in given]
        if not sets or not sets[0]:
            raise ValueError("there is no array: give at least one")
        self._windows = _windows(list(sets[0]), window)
        for number, fields in enumerate(sets):
            if list(fields) != list(self._windows):
                raise ValueError(
                    f"arrays[{number}] has {', '.join(fields)}, and the first {', '.join(self._windows)}: "
                    "name the same fields, in the same order"
                )
        if with_position and (taken := set(POSITION_FIELDS) & set(self._windows)):
            raise ValueError(f"with_position adds {', '.join(taken)}, which an array has as its name")
        if not isinstance(decode, bool):
            raise TypeError(f"decode must be True or False, not {decode!r}")
        self._with_position, self._decode = with_position, decode
        self._kept: Handles[Array] = Handles(_MAX_OPEN)
        split = [split_uri(os.fspath(uri)) for fields in sets for uri in fields.values()]
        self._store, paths = locate([address.path for address in split], filesystem, retries)
        addresses = [Address(path, address.inner) for path, address in zip(paths, split, strict=True)]
        self.hedge = not any(is_hdf5(address) for address in addresses)  # two reads of one: the second waits
        found = at_once(self._look, addresses)
        width, parts = len(self._windows), parse_where(where)
        self._recordings = []
        for at in range(0, len(found), width):
            named = dict(zip(self._windows, addresses[at : at + width], strict=True))
            layouts = dict(zip(self._windows, found[at : at + width], strict=True))
            self._recordings.append(self._recording(named, layouts, parts))
        self.schema = self._schema()
        self._low = np.array([recording.low for recording in self._recordings], np.int64)
        self._counts = np.array([recording.counts for recording in self._recordings], np.int64)
        chosen = None
        if weights is not None:
            chosen = parse_weights(list(weights), [f"arrays[{number}]" for number in range(len(sets))])
        self._in_chunks: _InChunks | None = None
        if windows_per_chunk is None:
            places = [float(math.prod(recording.counts)) for recording in self._recordings]
            self._choice = Choice(places if chosen is None else chosen)
        else:
            wanted = parse_count(windows_per_chunk, "windows_per_chunk")
            chunked = [self._chunks(recording) for recording in self._recordings]
            self._in_chunks = _InChunks(chunked, wanted, chosen)
            self.chunk_rows = self._in_chunks.most  # so that none is fetched for a part of its windows

    def __repr__(self) -> str:
        first = self._name(next(iter(self._recordings[0].addresses.values())))
        others = format_count(len(self._recordings) - 1, "other recording")
        return f"ArrayWindows({first!r} and {others}, {self._windows})"

    def __call__(self, rng: np.random.Generator) -> Iterator[Any]:
        while True:
            if self._in_chunks is not None:
                for read in self._plan(rng, self._in_chunks.most):
                    rows = made_or_fault(read)
                    yield from [rows] if isinstance(rows, Fault) else rows.split()
                continue
            number = self._choice.draw(rng)
            recording = self._recordings[number]
            start = [
                low + int(rng.integers(count))
                for low, count in zip(recording.low, recording.counts, strict=True)
            ]
            yield made_or_fault(partial(self._sample, number, start))

    def _sample(self, number: int, start: Sequence[int]) -> dict[str, Any]:
        recording = self._recordings[number]
        sample: dict[str, Any] = {}
        for field, address in recording.addresses.items():
            with self._opened(address) as array:
                sample[field] = array.read(recording.windows[field].box(start))
        if self._with_position:
            sample["recording"] = np.int64(number)
            sample["position"] = np.array(start, np.int64)
        return sample

    def plan_reads(self, rng: np.random.Generator, rows: int) -> Iterator[Read]:
        """Yield reads that give as many windows together, each chunk and range of bytes fetched once."""
        most = max(1, _PLAN_BYTES // row_bytes(self.schema))
        for first in range(0, rows, most):
            yield from self._plan(rng, min(most, rows - first))

    def _plan(self, rng: np.random.Generator, rows: int) -> Iterator[Callable[[], Rows]]:
        """Yield the reads of windows in the order of the store, from a random one on.

        So those that are left out where a segment is full before are of any place.
        """
        if self._in_chunks is None:
            numbers = self._choice.draw_many(rng, rows)
            starts = rng.integers(self._counts[numbers]) + self._low[numbers]
        else:
            numbers, starts = self._in_chunks.draw(rng, rows)
        pivot = int(rng.integers(rows))
        order = np.argsort(numbers, kind="stable")
        numbers, starts = numbers[order], starts[order]
        ends = np.append(np.flatnonzero(np.diff(numbers)) + 1, rows)
        at = int(np.searchsorted(ends, pivot, side="right"))
        parts = [(int(a), int(b)) for a, b in itertools.pairwise([0, *ends.tolist()])]
        first, last = parts[at]
        before, after = self._reads(int(numbers[first]), starts[first:last], pivot - first)
        yield from after
        for begin, end in parts[at + 1 :] + parts[:at]:
            yield from self._reads(int(numbers[begin]), starts[begin:end], 0)[1]
        yield from before

    def _reads(
        self, number: int, starts: Places, pivot: int
    ) -> tuple[Sequence[Callable[[], Rows]], Sequence[Callable[[], Rows]]]:
        """Return the reads of a recording's windows, before and from `pivot` on in the order of the store."""
        recording = self._recordings[number]
        lead = next(iter(recording.layouts))
        most = max(1, _READ_BYTES // row_bytes(self.schema))
        order, begins = grouped(recording.layouts[lead], recording.windows[lead], starts, most)
        begins[pivot] = True
        starts, groups = starts[order], np.cumsum(begins) - 1
        pieces = {
            field: Pieces(uses(layout, recording.windows[field], starts, groups))
            for field, layout in recording.layouts.items()
            if layout.chunks is not None
        }
        bounds = itertools.pairwise([*np.flatnonzero(begins).tolist(), len(starts)])
        reads = [partial(self._read, number, starts[first:last], pieces, first) for first, last in bounds]
        return reads[: groups[pivot]], reads[groups[pivot] :]

    def _read(self, number: int, starts: Places, pieces: Mapping[str, Pieces], group: int) -> Rows:
        recording = self._recordings[number]
        rows, needed = Rows(), {}
        for field, address in recording.addresses.items():
            with self._opened(address) as array:
                rows[field], needed[field] = array.cut(recording.windows[field], starts, pieces.get(field))
        for field, of_field in pieces.items():  # not before all of it is read: it may be tried again
            of_field.leave(needed[field], group)
        if self._with_position:
            rows["recording"], rows["position"] = np.full(len(starts), number, np.int64), starts
        return rows

    def close(self) -> None:
        self._kept.close()

    def _name(self, address: Address) -> str:
        return self._store.name(address.path) + (f"#{address.inner}" if address.inner else "")

    def _open(self, address: Address) -> Array:
        return open_array(self._store, address, self._decode)

    def _opened(self, address: Address) -> AbstractContextManager[Array]:
        return self._kept.use(address, lambda: self._open(address))

    def _look(self, address: Address) -> ArrayLayout:
        array = self._open(address)
        try:
            return array.layout
        finally:
            array.close()

    def _recording(
        self, addresses: dict[str, Address], layouts: dict[str, ArrayLayout], where: Mapping[str | int, slice]
    ) -> _Recording:
        """Return arrays that are cut at the same place, with the places.

        Raises: ValueError, SchemaError: there are none, or arrays do not fit each other.
        """
        names = {field: self._name(address) for field, address in addresses.items()}
        parts = parts_of(where, layouts, names)
        lows, counts = [], []
        for axis in range(max(map(len, self._windows.values()))):
            cut = {field: window[axis] for field, window in self._windows.items() if axis < len(window)}
            sizes: dict[str, int] = {}
            for field, length in cut.items():
                shape, name = layouts[field].shape, names[field]
                if axis >= len(shape):
                    raise ValueError(
                        f"{name}: the window of {field!r}, {self._windows[field]}, has more axes than the "
                        f"array, {shape}"
                    )
                if length > shape[axis]:
                    raise ValueError(
                        f"{name}: the window of {field!r} is {length} long on axis {axis}, and the array "
                        f"{shape[axis]}, its shape being {shape}: use a smaller window, or leave it out"
                    )
                sizes[field] = shape[axis]
                first = next(iter(sizes))
                if shape[axis] != sizes[first]:
                    raise SchemaError(
                        f"{name}: field {field!r} has {format_count(shape[axis], 'cell')} on axis {axis}, "
                        f"and {first!r} {sizes[first]}: arrays that are cut at the same place have the same "
                        "length there"
                    )
            low = max(parts[field][axis].start for field in cut)
            high = min(parts[field][axis].stop for field in cut)
            if high - low < max(cut.values()):
                raise ValueError(
                    f"{names[next(iter(cut))]}: where= has {format_count(max(0, high - low), 'cell')} of "
                    f"axis {axis}, {low} to {high}, and the window is {max(cut.values())} long there"
                )
            lows.append(low)
            counts.append(high - low - max(cut.values()) + 1)
        windows = {
            field: Window(lengths, tuple(parts[field][len(lengths) :]))
            for field, lengths in self._windows.items()
        }
        return _Recording(addresses, layouts, windows, tuple(lows), tuple(counts))

    def _chunks(self, recording: _Recording) -> list[NDArray[np.int64]]:
        """Return (chunks, 2) for each axis that is cut: the first window within each chunk, and their number.

        Raises: ValueError: the first array has no chunks, or none that holds a window.
        """
        field = next(iter(recording.layouts))
        layout, name = recording.layouts[field], self._name(recording.addresses[field])
        if layout.chunks is None:
            raise ValueError(
                f"{name}: windows_per_chunk is of arrays in chunks, of Zarr and HDF5, and this one has none"
            )
        lengths, axes = recording.windows[field].lengths, []
        for axis, (low, count) in enumerate(zip(recording.low, recording.counts, strict=True)):
            if axis >= len(lengths):
                axes.append(np.array([[low, count]]))
                continue
            size, length = layout.chunks[axis], lengths[axis]
            edges = np.arange(low // size, -(-(low + count - 1 + length) // size), dtype=np.int64) * size
            first = np.maximum(edges, low)
            last = np.minimum(edges + size - length, low + count - 1)
            within = np.stack([first, last - first + 1], axis=1)[last >= first]
            if not len(within):
                raise ValueError(
                    f"{name}: no chunk holds a window: it is {length} long on axis {axis}, and the chunks "
                    f"{size}: leave out windows_per_chunk, or take shorter windows"
                )
            axes.append(within)
        return axes

    def _schema(self) -> Schema:
        kinds: dict[str, Tensor] = {}
        first: dict[str, str] = {}
        for field, recording in ((f, each) for each in self._recordings for f in each.addresses):
            name = self._name(recording.addresses[field])
            try:
                kind = Tensor(recording.layouts[field].dtype.name, recording.windows[field].shape)
            except ValueError as error:
                raise SchemaError(f"{name}: field {field!r}: {error}") from None
            if kinds.setdefault(field, kind) != kind:
                raise SchemaError(
                    f"{name}: field {field!r} is {kind}, and {kinds[field]} in {first[field]}: arrays of one "
                    "field must agree; make a source of each, Map them alike, and Mix them"
                )
            first.setdefault(field, name)
        if self._with_position:
            axes = len(self._recordings[0].low)
            return Schema({**kinds, "recording": Tensor("int64"), "position": Tensor("int64", (axes,))})
        return Schema(kinds)


class _InChunks:
    """Windows that lie within chunks: so many of each chunk that is drawn.

    Chunks with the same numbers of windows along all axes are of one kind, of which an array has few.

    Args:
        recordings: of each the chunks along each axis, as (first window, number of windows).
        most: windows of a chunk. The attribute: of a chunk that has most.
        weights: of the recordings. None means the numbers of their windows.
    """

    def __init__(
        self, recordings: Sequence[list[NDArray[np.int64]]], most: int, weights: Sequence[float] | None
    ) -> None:
        self._kinds: list[_Kind] = []
        shares = []
        for number, axes in enumerate(recordings):
            total = math.prod(int(axis[:, 1].sum()) for axis in axes)
            weight = 1.0 if weights is None else weights[number] / total
            for counts in itertools.product(*(np.unique(axis[:, 1]).tolist() for axis in axes)):
                firsts = [axis[axis[:, 1] == count, 0] for axis, count in zip(axes, counts, strict=True)]
                kind = _Kind(number, counts, firsts, min(most, math.prod(counts)))
                self._kinds.append(kind)
                shares.append(weight * math.prod(counts) * math.prod(map(len, firsts)))
        self._taken = np.array([kind.taken for kind in self._kinds])
        self.most = int(self._taken.max())
        # A chunk is drawn the more often, the smaller the share of its windows that is taken each time.
        self._choice = Choice(np.array(shares) / self._taken)
        # The first as if the draws had gone on for ever before: the segment's end cuts the last one.
        self._first = Choice(shares)

    def draw(self, rng: np.random.Generator, rows: int) -> tuple[NDArray[np.int64], Places]:
        """Return windows: the recording of each, and where it begins."""
        chosen = self._first.draw_many(rng, 1)
        taken = self._taken[chosen]
        if len(set(self._taken.tolist())) > 1:
            taken = rng.integers(taken) + 1
        while (left := rows - int(taken.sum())) > 0:
            more = self._choice.draw_many(rng, -(-left // int(self._taken.max())))
            chosen, taken = np.append(chosen, more), np.append(taken, self._taken[more])
        taken[-1] += min(0, left)
        firsts = np.array([self._kinds[kind].draw(rng) for kind in chosen])
        # One that is drawn again goes on with windows that were not taken.
        keys = np.column_stack([chosen, firsts])
        chunks, of_draw = np.unique(keys, axis=0, return_inverse=True)
        of_row = np.repeat(of_draw.reshape(-1), taken)
        starts = np.empty((rows, firsts.shape[1]), np.int64)
        starts[np.argsort(of_row, kind="stable")] = np.concatenate(
            [
                self._kinds[kind].windows(rng, first, count)
                for (kind, *first), count in zip(chunks.tolist(), np.bincount(of_row).tolist(), strict=True)
            ]
        )
        return np.array([kind.recording for kind in self._kinds])[np.repeat(chosen, taken)], starts


class _Kind(NamedTuple):
    """Chunks of a recording with as many windows along each axis. `firsts`: of each axis, the first ones."""

    recording: int
    counts: tuple[int, ...]
    firsts: list[NDArray[np.int64]]
    taken: int

    def draw(self, rng: np.random.Generator) -> list[int]:
        """Return the first window of one of the chunks."""
        return [int(firsts[rng.integers(len(firsts))]) for firsts in self.firsts]

    def windows(self, rng: np.random.Generator, first: Sequence[int], count: int) -> Places:
        """Return so many windows of a chunk, at random: different ones, or each as often, up to one."""
        every = math.prod(self.counts)
        chosen = rng.choice(every, count % every, replace=False)
        if count >= every:
            chosen = rng.permutation(np.append(chosen, np.tile(np.arange(every), count // every)))
        return np.array(first) + np.stack(np.unravel_index(chosen, self.counts), axis=1)


def _windows(fields: Sequence[str], window: Lengths | Mapping[str, Lengths]) -> dict[str, tuple[int, ...]]:
    if not isinstance(window, Mapping):
        window = dict.fromkeys(fields, window)
    if set(window) != set(fields):
        raise ValueError(
            f"window is of {', '.join(window)}, and the arrays are {', '.join(fields)}: name these, such as "
            f"window={{{fields[0]!r}: (6, 8, 8)}}, or give window=(6, 8, 8) for each"
        )
    windows = {}
    for field in fields:
        lengths = window[field]
        if isinstance(lengths, str) or not isinstance(lengths, Sequence) or not lengths:
            raise ValueError(
                f"the window of {field!r} must be a tuple of lengths, such as (256,), not {lengths!r}"
            )
        windows[field] = tuple(
            parse_count(length, f"a length of the window of {field!r}") for length in lengths
        )
    return windows


def parse_where(where: Mapping[str | int, slice] | None) -> dict[str | int, slice]:
    """Check the parts of axes. Raises: TypeError, ValueError: no axis, or no range of it."""
    if where is None:
        return {}
    if not isinstance(where, Mapping):
        raise TypeError(f"where must be a mapping, such as {{'time': slice(0, 2016)}}, not {where!r}")
    for axis, part in where.items():
        if isinstance(axis, bool) or not isinstance(axis, str | int | np.integer):
            raise TypeError(f"where has an axis {axis!r}: give a number, or a name")
        if not isinstance(axis, str) and axis < 0:
            raise ValueError(f"where has an axis {axis}: axes are counted from 0 on")
        if not isinstance(part, slice):
            raise TypeError(f"where[{axis!r}] must be a slice, such as slice(0, 2016), not {part!r}")
        for end in (part.start, part.stop):
            if end is not None and (isinstance(end, bool) or not isinstance(end, int | np.integer)):
                raise TypeError(f"where[{axis!r}] is {part}: give numbers of cells, not {end!r}")
        if part.step not in (None, 1):
            raise ValueError(f"where[{axis!r}] is {part}: windows have no steps: leave out {part.step!r}")
    return {axis if isinstance(axis, str) else int(axis): part for axis, part in where.items()}


def parts_of(
    where: Mapping[str | int, slice], layouts: Mapping[str, ArrayLayout], names: Mapping[str, str]
) -> dict[str, list[slice]]:
    """Return the part of each axis of each field.

    Args:
        names: of the arrays, for messages.
    Raises: ValueError: no array has such an axis, or nothing is left of it.
    """
    parts = {field: [slice(0, size) for size in layout.shape] for field, layout in layouts.items()}
    used: dict[tuple[str, int], str | int] = {}
    for key, part in where.items():
        found = [
            (field, axis)
            for field, layout in layouts.items()
            for axis, name in enumerate(layout.names)
            if key in (axis, name)
        ]
        if not found:
            raise ValueError(f"{next(iter(names.values()))}: {_unknown(key, layouts.values())}")
        for field, axis in found:
            size = layouts[field].shape[axis]
            if (field, axis) in used:
                raise ValueError(
                    f"where has both {used[field, axis]!r} and {key!r}, which is the same axis: leave out one"
                )
            used[field, axis] = key
            start, stop, _ = part.indices(size)
            if start >= stop:
                raise ValueError(
                    f"{names[field]}: where[{key!r}] is {part}, which is none of the "
                    f"{format_count(size, 'cell')} there"
                )
            parts[field][axis] = slice(start, stop)
    return parts


def _unknown(key: str | int, layouts: Iterable[ArrayLayout]) -> str:
    axes = max(len(layout.shape) for layout in layouts)
    named = [*dict.fromkeys(name for layout in layouts for name in layout.names if name is not None)]
    has = f"{', '.join(map(repr, named))}, or by number" if named else "no names of axes, so give a number:"
    near = did_you_mean(key, named) if isinstance(key, str) else ""
    return f"where has an axis {key!r}, which is not there; {near}it has {has} 0 to {axes - 1}"


def split_uri(uri: str) -> Address:
    """Split a URI or path from the name after its #.

    In a local path, which may have a # itself, only after run.h5 or run.zarr, or if what is before it exists
    and the whole path does not.
    """
    if "://" in uri:
        before, _, inner = uri.partition("#")
        return Address(before, inner)
    if match := _FILE.fullmatch(uri):
        return Address(match[1], match[2])
    before, _, inner = uri.rpartition("#")
    if before and inner and os.path.exists(before) and not os.path.exists(uri):
        return Address(before, inner)
    return Address(uri, "")


def open_array(store: ObjectStore, address: Address, decode: bool) -> Array:
    """Open an array, and read its metadata.

    Args:
        decode: have its numbers unpacked, if its attributes say how.

    Raises: FileNotFoundError, PermissionError, OSError: errors of the store. SamplerError: not an array of
        that format, or a damaged one. ImportError: says what to install. ValueError: an HDF5 file or group
        without a dataset's name. SchemaError: an attribute of packed numbers that is none.
    """
    array = _open(
        store, address, name := store.name(address.path) + f"#{address.inner}" * bool(address.inner)
    )
    if not decode:
        return array
    try:
        return unpacked_array(array, name)
    except BaseException:
        array.close()
        raise


def _open(store: ObjectStore, address: Address, name: str) -> Array:
    path, inner = address
    if path.endswith(".npy"):
        if inner:
            raise ValueError(f"{name}: a .npy file has one array: leave out #{inner}")
        return NpyArray(store, path)
    if is_hdf5(address):
        _require("h5py", name)
        from arrowcache.sampling.sources.hdf5 import Hdf5Array

        return Hdf5Array(store, path, inner, name)
    _require("zarr", name)
    from arrowcache.sampling.sources.zarr3 import ZarrArray

    return ZarrArray(store, path, inner, name)


def is_hdf5(address: Address) -> bool:
    return address.path.endswith(_HDF5)


def _require(package: str, name: str) -> None:
    if not is_installed(package):
        raise ModuleNotFoundError(
            f"{name} needs {package}: pip install 'arrowcache[sources]'"
            + (", with Python 3.11 or newer" if package == "zarr" else ""),
            name=package,
        )
