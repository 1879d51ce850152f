"""Snapshot: an ordered, leased, immutable list of segments: what one epoch reads.

It owns its lease and its claim on the arena, and lets go of them in that order reversed:
unmapped first, then unleased, all at once or oldest first. Rows are numbered 0..len-1, oldest
segment first. Segments are mapped and checked when their rows are first asked for, or all at
once by `map_all`.
"""

from __future__ import annotations

import datetime as dt
import itertools
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from arrowcache.arrow import segment as segment_file
from arrowcache.arrow.label import labelled
from arrowcache.arrow.schema import Ragged, String
from arrowcache.errors import CorruptSegmentError
from arrowcache.reading.arena import NO_CELL, Arena
from arrowcache.reading.pieces import pieces
from arrowcache.reading.placement import Placement, Values
from arrowcache.reading.ring import page_aligned
from arrowcache.reading.view import has_room, uncopied, view_rows
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.lease import Lease
from arrowcache.storage.mapping import PAGE_BYTES, FileMapping, populate, will_need
from arrowcache.storage.store import Store
from arrowcache.storage.verification import check_file, quarantine

if TYPE_CHECKING:
    from typing import Self

_NOT_MAPPED = -2
_TOUCH_BYTES = 8 << 20  # between two looks whether it is still wanted

Column = NDArray[Any] | list[Any] | Values


class _Placed(NamedTuple):
    """What can be read now: consistent, and replaced as a whole."""

    placement: Placement
    cells: NDArray[np.int64]
    complete: bool  # every segment has a cell


class Snapshot:
    """Rows of the segments that were published at one moment. A context manager.

    Made by `Cache.snapshot()` and by loaders. Safe to use from several threads; dead in a forked
    child. While it is open, none of its segments is evicted.
    """

    def __init__(self, store: Store, segments: Sequence[SegmentInfo], lease: Lease | None) -> None:
        self._store = store
        self._arena = Arena.of(store)
        self._folder = os.fspath(store.folder.segments)
        self._lease = lease
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may close it
        self._mapping = threading.Lock()
        self._readers = 0
        self._closed = True  # until it has acquired what it will release: Ctrl-C may come in between
        self._released = 0  # so many of the oldest segments were given up
        self._suspect_below = store.suspect_below()
        self._set_segments(segments)
        self._arena.acquire(self._segments)
        self._closed = False

    @classmethod
    def take(
        cls, store: Store, where: Callable[[SegmentInfo], bool] | None = None, *, headroom: bool = True
    ) -> Snapshot:
        """Lease what is published now, but for the headroom's oldest segments (unless told not to)."""
        segments, lease = store.lease(where, headroom=headroom)
        return cls(store, segments, lease)

    def _set_segments(self, segments: Sequence[SegmentInfo], cells: NDArray[np.int64] | None = None) -> None:
        self._segments = tuple(segments)
        rows = np.fromiter((segment.rows for segment in segments), np.int64, len(segments))
        self._starts = np.concatenate(([0], np.cumsum(rows)))
        self._rows = int(self._starts[-1])
        self._cells = np.full(len(segments), _NOT_MAPPED, np.int64) if cells is None else cells
        self._placed: _Placed | None = None
        self._seqs = np.fromiter((segment.seq for segment in segments), np.int64, len(segments))
        self._published = np.fromiter((s.published for s in segments), np.float64, len(segments))

    @property
    def segments(self) -> tuple[SegmentInfo, ...]:
        """What it reads, oldest first."""
        return self._segments

    @property
    def segment_rows(self) -> NDArray[np.int64]:
        """Rows of each segment, oldest first."""
        return np.diff(self._starts)

    @property
    def nbytes(self) -> int:
        """Bytes of its segments' files."""
        return sum(segment.nbytes for segment in self._segments)

    @property
    def row_bytes(self) -> int:
        """Bytes that a row takes in the files, on average; at least 1."""
        return max(1, self.nbytes // max(1, len(self)))

    def __len__(self) -> int:
        return self._rows

    def gather(
        self,
        row_ids: ArrayLike,
        columns: Sequence[str] | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> dict[str, Column]:
        """Copy rows into one array a column; never a view of the cache.

        Args:
            row_ids: (n,) integers in [0, len(self)), any order, repeats allowed.
            columns: which; None for all.
            out: for fixed-width columns, C-contiguous arrays of shape (n, *shape) and the column's
                dtype, which are filled and returned; what is absent is allocated.
        Returns: name -> (n, *shape), row i being row_ids[i]; a list of str or bytes for a String or
            Binary column; `Values(data, offsets)` for a Ragged one.
        Blocks: while pages come from the disk.
        Raises: IndexError: a row outside the snapshot; nothing was written. ValueError: an unknown
            column, an unfit `out`, a closed snapshot. CorruptSegmentError: a damaged segment, which
            was quarantined; the other segments' rows can still be read.
        """
        ids = np.asarray(row_ids)
        if ids.dtype != np.int64 or ids.ndim != 1:
            if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
                raise TypeError(f"row_ids must be a 1-D integer array, not {ids.dtype} of shape {ids.shape}")
            ids = ids.astype(np.int64)
        if ids.size and ids.view(np.uint64).max() >= self._rows:  # a negative one is huge
            raise IndexError(f"row ids {ids.min()} to {ids.max()} are outside [0, {len(self)})")
        if ids.size and self._released and ids.min() < self._starts[self._released]:
            raise IndexError(f"rows before {self._starts[self._released]} were released: the epoch moved on")
        names = self._store.settings.schema.select(columns)
        arrays = self._prepare_out(names, len(ids), out or {})
        return self.gather_into(ids, names, arrays)

    def gather_into(
        self, ids: NDArray[np.int64], names: Sequence[str], arrays: Mapping[str, NDArray[Any]]
    ) -> dict[str, Column]:
        """`gather` for callers that checked everything: loaders. `arrays` has the fixed columns."""
        self._begin_read()
        try:
            placed = self._placed or self._place()
            segments = placed.placement.segments_of(ids)
            if not placed.complete:
                missing = segments[placed.cells[segments] == _NOT_MAPPED]
                if len(missing):
                    placed = self._map_some(np.unique(missing).tolist())
                if (placed.cells[segments] == NO_CELL).any():
                    return self._gather_spilled(ids, segments, names, arrays)
            return {n: self._gather_column(placed.placement, n, ids, segments, arrays) for n in names}
        finally:
            self._end_read()

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows as a pyarrow.Table over the mapped files, without a copy.

        Tensor columns show as `arrow.fixed_shape_tensor` (a re-labelling), bool as uint8, bfloat16
        as uint16, complex numbers as pairs. The table keeps its segments mapped and leased, also
        after this snapshot is closed.
        """
        names = self._store.settings.schema.select(columns)
        self._begin_read()
        try:
            batches = [self._batch(segment).select(names) for segment in self._segments]
        finally:
            self._end_read()
        if batches:
            return pa.Table.from_batches(batches)
        schema = self._store.settings.schema
        columns_of_no_row = [pa.array([], field.type) for field in schema.arrow]
        empty = pa.RecordBatch.from_arrays(columns_of_no_row, schema=schema.arrow)
        return pa.Table.from_batches([labelled(empty, schema).select(names)])

    def locate(self, ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Where rows come from: `_seq`, `_row` (int64) and `_age_seconds` (float64) of each."""
        segments = self._starts.searchsorted(ids, side="right") - 1
        now = dt.datetime.now(dt.timezone.utc).timestamp()
        return {
            "_seq": self._seqs[segments],
            "_row": ids - self._starts[segments],
            "_age_seconds": now - self._published[segments],
        }

    def published(self, ids: NDArray[np.int64]) -> float:
        """When rows were published, on average, in seconds since 1970."""
        return float(self._published[self._starts.searchsorted(ids, side="right") - 1].mean())

    def view(self, ids: NDArray[np.int64], names: Sequence[str]) -> dict[str, Column] | None:
        """Rows as arrays over a mapping of their own, without a copy; see view.py.

        Args:
            ids: (n,) rows, checked by the caller.
            names: columns, of those that `uncopied` gives.
        Returns: None: not contiguous rows of one segment, or the process has too many mappings.
        """
        count = len(ids)
        if not count or ids[-1] - ids[0] != count - 1 or not self._lease:
            return None
        index = int(self._starts.searchsorted(ids[0], side="right")) - 1
        if ids[-1] >= self._starts[index + 1] or not _is_run(ids) or not has_room():
            return None
        self._begin_read()
        try:
            if self._cells[index] == _NOT_MAPPED:
                self._map_some([index])
            segment = self._segments[index]
            columns = self._arena.columns_of(segment)
            if columns is None:
                return None
            schema, path = self._store.settings.schema, f"{self._folder}/{segment.name}"
            first = int(ids[0] - self._starts[index])
            end_lease = self._lease.share(segment.seq)
            try:
                rows = range(first, first + count)
                return dict(view_rows(path, schema, *columns, names, rows, end_lease))
            except OSError:  # no address space or file descriptor is left
                end_lease()
                return None
        finally:
            self._end_read()

    def views(
        self, batch_rows: int | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[dict[str, Column]]:
        """All rows, oldest first, as zero-copy views: arrays over mappings of their own.

        What is written into a view is seen nowhere else. A view keeps its segment mapped and
        leased, also after this snapshot is closed; it is dead in a forked child.

        Args:
            batch_rows: rows of a view; None: one view a segment.
            columns: which; None for all. Text and bytes cannot be views.
        Yields: name -> (rows, *shape); `Values(data, offsets)` for a ragged column, whose offsets are
            made and whose data are a view.
        Blocks: while pages come from the disk.
        Raises: ValueError: where a copy would happen: a column of text or bytes, `batch_rows` rows
            that lie in two segments, more views alive than the kernel allows mappings.
        """
        schema = self._store.settings.schema
        names = schema.select(columns)
        if copied := [name for name in names if name not in uncopied(schema, names)]:
            raise ValueError(f"columns {copied} are made of Python objects, which are copies: leave them out")
        if batch_rows is not None and (not isinstance(batch_rows, int) or batch_rows < 1):
            raise ValueError(f"batch_rows={batch_rows!r} must be a positive int, or None for whole segments")
        return self._views(batch_rows, names)

    def _views(self, batch_rows: int | None, names: Sequence[str]) -> Iterator[dict[str, Column]]:
        starts = self._starts if batch_rows is None else np.arange(0, len(self), batch_rows)
        for start, stop in itertools.pairwise([*starts.tolist(), len(self)]):
            if start == stop:
                continue
            view = self.view(np.arange(start, stop), names)
            if view is None:
                raise ValueError(
                    f"rows {start} to {stop - 1} cannot be a view: they lie in several segments (choose "
                    "batch_rows to divide the segments' rows, or None), or too many views are alive"
                )
            yield view

    def warm(self, index: int, is_wanted: Callable[[], bool]) -> None:
        """Have a mapped segment's pages in memory and in the page tables, ahead of their use.

        Blocks: while the disk reads; ends early when `is_wanted` says no more, or the snapshot is closed.
        """
        address, nbytes = self._arena.memory_of(self._segments[index])
        for start in range(0, nbytes, _TOUCH_BYTES):
            if not is_wanted() or self._closed or index < self._released:
                return
            populate(address + start, min(_TOUCH_BYTES, nbytes - start))

    def announce(self, index: int) -> None:
        """Have the disk begin to read a mapped segment."""
        address, nbytes = self._arena.memory_of(self._segments[index])
        if nbytes and index >= self._released:
            will_need(address, nbytes)

    def release_oldest(self, count: int) -> None:
        """Unmap and unlease the first `count` segments, whose rows nobody may ask for any more."""
        with self._lock:
            if self._closed or count <= self._released:
                return
            gone = self._segments[self._released : count]
            self._released = count
        assert self._lease is not None
        lease, last = self._lease, self._segments[-1].seq
        first = self._segments[count].seq if count < len(self._segments) else last + 1
        self._arena.release(gone, lambda: lease.narrow(first, last))

    def map_all(self) -> int:
        """Map every segment now; damaged ones are quarantined and leave the snapshot.

        Returns: how many rows remain.
        """
        self._begin_read()
        try:
            damaged: list[int] = []
            self._map_some(range(len(self._segments)), damaged)
        finally:
            self._end_read()
        if damaged:
            gone = [self._segments[i] for i in damaged]
            left = [s for i, s in enumerate(self._segments) if i not in set(damaged)]
            self._set_segments(left, np.delete(self._cells, damaged))
            self._arena.release(gone)
        return len(self)

    def close(self) -> None:
        """Unmap and unlease. Idempotent; a gather in another thread ends first, undisturbed."""
        with self._lock:
            last = not self._closed and not self._readers
            self._closed = True
        if last:
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()  # first: a warning may be an error
            if self._lease is not None:
                warnings.warn("a snapshot was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self)} rows in {len(self._segments)} segments"
        return f"<Snapshot: {state}>"

    def _begin_read(self) -> None:
        with self._lock:
            if self._closed:
                raise ValueError("the snapshot is closed: take a new one with cache.snapshot()")
            if self._pid != os.getpid():
                raise ValueError("the snapshot belongs to the process that forked this one: take a new one")
            self._readers += 1

    def _end_read(self) -> None:
        with self._lock:
            self._readers -= 1
            last = self._closed and not self._readers
        if last:
            self._let_go()

    def _let_go(self) -> None:
        unlease = self._lease.close if self._lease is not None else _nothing
        if self._pid == os.getpid():
            self._arena.release(self._segments[self._released :], unlease)
        else:
            unlease()

    def on_contention(self, let_go: Callable[[], None]) -> None:
        """Have `let_go` called when a writer of this process waits for this snapshot's lease."""
        if self._lease is not None:
            self._lease.on_contention = let_go

    def _place(self) -> _Placed:
        with self._mapping:
            return self._publish_placement()

    def _publish_placement(self) -> _Placed:
        """Make what is mapped now readable, in one assignment; under `_mapping`."""
        cells = self._cells.copy()
        complete = bool((cells >= 0).all())
        self._placed = _Placed(self._arena.place(cells, self._starts), cells, complete)
        return self._placed

    def _map_some(self, indices: Iterable[int], damaged: list[int] | None = None) -> _Placed:
        """Map and check segments; a damaged one is noted in `damaged`, or raises."""
        with self._mapping:
            try:
                for index in indices:
                    if self._cells[index] == _NOT_MAPPED:
                        try:
                            self._cells[index] = self._map(self._segments[index])
                        except CorruptSegmentError:
                            if damaged is None:
                                raise
                            damaged.append(index)
            finally:
                placed = self._publish_placement()
        return placed

    def _map(self, segment: SegmentInfo) -> int:
        check = segment.seq < self._suspect_below
        try:
            cell = self._arena.map(segment, check_bytes=check)
            if cell == NO_CELL:
                with self._alone(segment, check_bytes=check):
                    pass  # checked once, like all others
        except CorruptSegmentError as error:
            self._condemn(segment, error)
        return cell

    def _condemn(self, segment: SegmentInfo, error: CorruptSegmentError) -> NoReturn:
        """Quarantine a segment, which is no longer mapped here, and raise with its name."""
        if self._lease is not None:
            self._lease.give_up(segment.seq)
        quarantine(self._store, segment, str(error))
        raise CorruptSegmentError(f"segment {segment.name}: {error}") from None

    def _gather_column(
        self,
        placement: Placement,
        name: str,
        ids: NDArray[np.int64],
        segments: NDArray[np.int64],
        arrays: Mapping[str, NDArray[Any]],
    ) -> Column:
        if name in arrays:
            placement.gather(name, ids, segments, arrays[name])
            return arrays[name]
        return _to_python(self._store.settings.schema[name], placement.gather_values(name, ids, segments))

    def _gather_spilled(
        self,
        ids: NDArray[np.int64],
        segments: NDArray[np.int64],
        names: Sequence[str],
        arrays: Mapping[str, NDArray[Any]],
    ) -> dict[str, Column]:
        """Gather when not every segment found a cell: one after another, through a cell of its own."""
        parts: list[tuple[NDArray[np.intp], dict[str, Column]]] = []
        for index in np.unique(segments):
            chosen = np.flatnonzero(segments == index)
            rows = ids[chosen] - self._starts[index]
            temporary = {name: np.empty_like(array[chosen]) for name, array in arrays.items()}
            part = self._gather_alone(self._segments[index], rows, names, temporary)
            for name, array in arrays.items():
                array[chosen] = temporary[name]
            parts.append((chosen, part))
        return {
            name: arrays[name] if name in arrays else _interleave(len(ids), [(c, p[name]) for c, p in parts])
            for name in names
        }

    def _gather_alone(
        self,
        segment: SegmentInfo,
        rows: NDArray[np.int64],
        names: Sequence[str],
        arrays: Mapping[str, NDArray[Any]],
    ) -> dict[str, Column]:
        with self._alone(segment, check_bytes=False) as placement:
            first = np.zeros(len(rows), np.int64)
            return {n: self._gather_column(placement, n, rows, first, arrays) for n in names}

    @contextmanager
    def _alone(self, segment: SegmentInfo, *, check_bytes: bool) -> Iterator[Placement]:
        """Map one segment for a moment, in an arena of its own."""
        arena = self._arena.one_cell()
        arena.acquire([segment])
        try:
            cell = arena.map(segment, check_bytes=check_bytes)
            if cell == NO_CELL:
                raise MemoryError("no address space is left to map one segment: raise ulimit -v")
            yield arena.place(np.array([cell]), np.array([0, segment.rows]))
        finally:
            arena.release([segment])

    def _prepare_out(
        self, names: Sequence[str], count: int, out: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        fixed = self._store.settings.schema.fixed
        for name in out:
            if name not in names or name not in fixed:
                raise ValueError(f"out has {name!r}, which is not a fixed-width column asked for")
        arrays = {}
        for name in names:
            if name not in fixed:
                continue
            kind, shape = fixed[name], (count, *fixed[name].shape)
            array = out.get(name)
            if array is None:
                array = _empty(shape, kind.numpy_dtype)
            elif not (
                isinstance(array, np.ndarray)
                and array.shape == shape
                and array.dtype == kind.numpy_dtype
                and array.flags.c_contiguous
                and array.flags.writeable
            ):
                raise ValueError(
                    f"out[{name!r}] must be a writeable, C-contiguous {kind.numpy_dtype} array of "
                    f"shape {shape}, not {getattr(array, 'dtype', type(array))} of "
                    f"{getattr(array, 'shape', '?')}"
                )
            arrays[name] = array
        return arrays

    def _batch(self, segment: SegmentInfo) -> pa.RecordBatch:
        schema = self._store.settings.schema
        assert self._lease is not None  # there is a segment
        end_lease = self._lease.share(segment.seq)
        try:
            file = FileMapping(self._store.path_of(segment), on_unmap=end_lease).buffer()
        except BaseException:
            end_lease()
            raise
        try:
            check_file(file, self._store, segment, check_bytes=segment.seq < self._suspect_below)
        except CorruptSegmentError as error:
            del file  # unmaps it
            self._condemn(segment, error)
        return labelled(segment_file.open_batch(file, schema), schema)


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < PAGE_BYTES:
        return np.empty(shape, dtype)
    return page_aligned(nbytes).view(dtype).reshape(shape)


def _nothing() -> None:
    pass


def _is_run(ids: NDArray[np.int64]) -> bool:
    """Whether rows follow one another."""
    first = ids[0]
    return all((ids[p] == np.arange(first + p.start, first + p.stop)).all() for p in pieces(len(ids)))


def _to_python(kind: object, values: Values) -> Column:
    """Text and bytes as lists; ragged values stay arrays."""
    if isinstance(kind, Ragged):
        return values
    data, ends = values.data.tobytes(), values.offsets.tolist()
    pieces = [data[start:stop] for start, stop in itertools.pairwise(ends)]
    if not isinstance(kind, String):
        return pieces
    try:
        return [piece.decode() for piece in pieces]
    except UnicodeDecodeError as error:
        raise CorruptSegmentError(
            f"a text is not valid UTF-8, so its bytes were altered ({error}): run cache.verify()"
        ) from None


def _interleave(count: int, parts: list[tuple[NDArray[np.intp], Column]]) -> Column:
    """Put variable-length parts back in the order that was asked for."""
    if not isinstance(parts[0][1], Values):
        items: list[Any] = [None] * count
        for chosen, part in parts:
            for place, item in zip(chosen, part, strict=True):
                items[place] = item
        return items
    rows: list[Any] = [None] * count
    for chosen, part in parts:
        assert isinstance(part, Values)
        for i, place in enumerate(chosen):
            rows[place] = part.data[part.offsets[i] : part.offsets[i + 1]]
    ends = np.cumsum([0, *(len(row) for row in rows)])
    return Values(np.concatenate(rows), ends.astype(np.int64))
