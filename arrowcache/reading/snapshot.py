"""Snapshot: an ordered, leased, immutable list of segments. An epoch reads one.

It owns its lease and its hold on mapped segments. It releases them in reverse order: segments are
unmapped first, then unleased, all at once or oldest first. Rows are numbered 0..len-1, oldest segment first.
Segments are mapped and checked when their rows are first asked for, or all at once by `map_all`. Rows are
copied from memory or read from the disk, as the snapshot's `read_mode` says.
"""

from __future__ import annotations

import datetime as dt
import errno
import itertools
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from arrowcache.arrow import segment as segment_file
from arrowcache.arrow.convert import require_unmasked
from arrowcache.arrow.segment import labelled
from arrowcache.display import Card, Facts, Shown
from arrowcache.errors import CorruptSegmentError
from arrowcache.lifetimes import Closable, Mutex, Origin, cached_property, until_exit
from arrowcache.native.engine import SegmentRows
from arrowcache.proc import memory_bytes
from arrowcache.reading import gather
from arrowcache.reading.columns import (
    ColumnData,
    Columns,
    FixedColumn,
    RaggedColumn,
    VariableColumn,
    has_room_for_view,
)
from arrowcache.reading.gather import Parts, PendingRead, ReadMode, RowOutOfRangeError, unreadable
from arrowcache.reading.mapped import Hold, MappedSegments
from arrowcache.reading.row_filter import ALL, Bitmaps, Selected
from arrowcache.reading.slots import BatchMemory, GivenArrays, output_arrays
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.lease import Lease
from arrowcache.storage.mapping import FileMapping
from arrowcache.storage.overview import timeline
from arrowcache.storage.row_ids import NumberedRows, missing_rows_error
from arrowcache.storage.store import Leased, Store
from arrowcache.storage.verification import check_file, quarantine, unfit
from arrowcache.units import format_bytes, format_count, parse_count

if TYPE_CHECKING:
    from arrowcache.reading.row_weights import Weights

_MAPPED_FIRST, _MAPPED_AT_ONCE = 2, 2048  # segments; two of a layout make the layout known
_MEMORY_SHARE = 0.75  # of the memory: the part of a cache that fits into the page cache


class Snapshot(Shown, Closable):
    """Rows of the segments that were published at one moment. A context manager.

    Made by `Cache.snapshot()` and by loaders. Safe to use from several threads; dead in a forked
    child. While it is open, none of its segments is evicted.
    """

    def __init__(
        self,
        store: Store,
        segments: Sequence[SegmentInfo],
        lease: Lease | None,
        *,
        next_seq: int = 0,
        left_out_rows: int = 0,
        bitmaps: Bitmaps = ALL,
        weights: Weights | None = None,
    ) -> None:
        self._store = store
        self.bitmaps, self.weights = bitmaps, weights  # of the rows that a loader reads
        self.next_seq = next_seq  # seq of the next segment to be published
        self.left_out_rows = left_out_rows  # rows of the oldest segments that a loader left to writers
        self._mapped = MappedSegments.of(store)
        self._lease = lease
        self._origin = Origin()
        self._lock = threading.RLock()  # a signal handler may close the snapshot
        self._mapping = Mutex("the mapping of segments")
        self._readers = 0
        self._closed = True  # until it owns something
        self._released = 0  # number of the oldest segments that were given up
        self.read_mode = ReadMode()  # of its rows; a loader has one for all its epochs
        self._columns: dict[tuple[str, ...], Columns] = {}
        self._suspect_below = store.suspect_below()
        self._set_segments(segments)
        self._hold = Hold(self._seqs)
        self._closed = False
        try:
            self._mapped.acquire(self._hold)
        except BaseException:  # Ctrl-C
            self.close()
            raise

    @classmethod
    def take(
        cls,
        store: Store,
        where: Callable[[SegmentInfo], bool] | None = None,
        *,
        yields_since: float | None = None,
    ) -> Snapshot:
        """Lease the segments that are published now, for the package's own use.

        With `yields_since`, a loader may leave some out.

        Args:
            where: as of `Store.lease`.
            yields_since: as of `Store.lease`.
        """
        return cls.of(store, store.lease(where, yields_since=yields_since))

    @classmethod
    def of(cls, store: Store, leased: Leased) -> Snapshot:
        """Make a snapshot that owns a lease."""
        segments, lease, next_seq, left_out_rows = leased
        try:
            return cls(store, segments, lease, next_seq=next_seq, left_out_rows=left_out_rows)
        except BaseException:
            if lease is not None:
                lease.close()
            raise

    def _set_segments(self, segments: Sequence[SegmentInfo]) -> None:
        arrays = self._mapped.arrays_of(segments)
        self._segments, self._seqs, self._published = arrays.segments, arrays.seqs, arrays.published
        self._selected: tuple[Bitmaps, Selected] | None = None  # made when it is asked for
        self._starts = np.concatenate(([0], np.cumsum(arrays.rows)))
        self._length = int(self._starts[-1])
        self._nbytes = int(arrays.nbytes.sum())
        self._rows = SegmentRows(self._starts)

    @property
    def segments(self) -> tuple[SegmentInfo, ...]:
        """The segments of this snapshot, oldest first."""
        return self._segments

    @property
    def seqs(self) -> NDArray[np.int64]:
        """Numbers of its segments, ascending; read-only."""
        return self._seqs

    @property
    def segment_rows(self) -> NDArray[np.int64]:
        """Rows of each segment, oldest first."""
        return np.diff(self._starts)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of its columns."""
        return tuple(self._store.settings.schema)

    @property
    def selected(self) -> Selected:
        """The rows that a loader reads."""
        known = self._selected
        if known is None or known[0] is not self.bitmaps:
            known = self._selected = self.bitmaps, Selected(self._seqs, self.segment_rows, self.bitmaps)
        return known[1]

    @property
    def nbytes(self) -> int:
        """Bytes of its segments' files."""
        return self._nbytes

    @property
    def row_bytes(self) -> int:
        """Mean bytes of a row in the files; at least 1."""
        return max(1, self.nbytes // max(1, len(self)))

    def __len__(self) -> int:
        return self._length

    def gather(
        self,
        row_ids: ArrayLike,
        columns: Sequence[str] | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> dict[str, ColumnData]:
        """Copy rows into one array a column; never a view of the cache.

        Args:
            row_ids: (n,) integers in [0, len(self)), any order, repeats allowed.
            columns: names of the columns. None means all.
            out: for fixed-width columns, C-contiguous arrays of shape (n, *shape) and the column's
                dtype, which share no memory; they are filled and returned. Others are allocated.
        Returns: name -> (n, *shape), row i being row_ids[i]; a list of str or bytes for a String or
            Binary column; `Values(data, offsets)` for a Ragged one.
        Blocks: while rows come from the disk.
        Raises: IndexError: a row outside the snapshot; nothing was written. ValueError: an unknown
            column, an unfit `out`, a closed snapshot. CorruptSegmentError: a damaged segment, which
            was quarantined, or a segment whose file cannot be read any more; the other segments' rows can
            still be read.
        """
        require_unmasked(row_ids, "row_ids are", -1)
        given = np.asarray(row_ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise TypeError(f"row_ids must be a 1-D integer array, not {given.dtype} of shape {given.shape}")
        ids = given.astype(np.int64)  # a copy: nobody changes it while rows are copied
        chosen = self.columns_of(self._store.settings.schema.select(columns))
        arrays = output_arrays(chosen.memory, len(ids), out)
        try:
            return self.gather_into(ids, chosen, GivenArrays(arrays))
        except RowOutOfRangeError as error:
            raise self._outside(int(given[error.index])) from None

    def _outside(self, row: int) -> IndexError:
        first = int(self._starts[self._released])
        if 0 <= row < first:
            return IndexError(f"row {row} was released, as all before {first}: the epoch moved on")
        return IndexError(f"row {row} is outside [0, {len(self)})")

    def columns_of(self, names: Sequence[str]) -> Columns:
        """Return the columns of these names."""
        key = tuple(names)
        found = self._columns.get(key)
        if found is None:
            found = self._columns[key] = Columns.of(self._store.settings.schema, key)
        return found

    def gather_into(
        self, ids: NDArray[np.int64], columns: Columns, memory: BatchMemory
    ) -> dict[str, ColumnData]:
        """`gather` for loaders, which have checked all arguments. `memory` has the fixed columns.

        Raises: RowOutOfRangeError: a row is outside the snapshot.
        """
        reader = _Reader(self)
        try:
            try:
                return self._gathered(ids, columns, memory, reader)
            except RowOutOfRangeError:
                self._map_segments_of(ids)
            return self._gathered(ids, columns, memory, reader)
        finally:
            reader.end()

    def _gathered(
        self, ids: NDArray[np.int64], columns: Columns, memory: BatchMemory, reader: _Reader
    ) -> dict[str, ColumnData]:
        """`gather_into`; rows of an unknown segment also raise RowOutOfRangeError."""
        is_simple = columns.are_fixed and not self.read_mode.is_cold
        missed = gather.copy(self._rows, ids, columns, memory) if is_simple else None
        if missed is None:
            return gather.read(self._rows, ids, columns, memory, _Reader(self, reader)).result()
        self.read_mode.note(len(ids), missed)
        arrays = memory.arrays()
        return {name: arrays[name] for name in columns.names}

    def read(self, ids: NDArray[np.int64], columns: Columns, slot: BatchMemory) -> PendingRead:
        """Begin to read rows into a slot, as `gather_into`. The snapshot stays open until the read ends."""
        return gather.read(self._rows, ids, columns, slot, self._reader_of(ids))

    def lengths(self, first: int, last: int, name: str) -> NDArray[np.integer[Any]]:
        """Return the lengths of rows first..last-1, as one column tells them.

        Args:
            name: a ragged column, whose length is its number of items, none of which is read; or a column
                of integers, which are the lengths.
        Blocks: while they come from the disk. Raises: CorruptSegmentError: as `gather`.
        """
        column, ids = self.columns_of([name])[name], np.arange(first, last)
        assert isinstance(column, FixedColumn | RaggedColumn)
        return gather.lengths(self._rows, ids, column, self._reader_of(ids))

    def find(self, ids: NDArray[np.int64], name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find the values of a variable-length column of rows (n,), and copy none.

        Returns: the bytes of each row's values (n,), and where they begin in their file (n,), in bytes, for
            `read_parts`.
        Blocks: while offsets come from the disk.
        Raises: as `gather_into`.
        """
        column = self.columns_of([name])[name]
        assert isinstance(column, VariableColumn)
        return gather.find(self._rows, ids, column, self._reader_of(ids))

    def read_parts(self, parts: Parts, out: NDArray[np.uint8], slot: BatchMemory) -> PendingRead:
        """Begin to read parts of values that `find` has found. The snapshot stays open until the read ends.

        Args:
            out: memory of the slot for all parts, in bytes.
        """
        return gather.read_parts(self._rows, parts, out, slot, _Reader(self))

    def _reader_of(self, ids: NDArray[np.int64]) -> _Reader:
        """Return a reader of rows, whose segments are mapped."""
        reader = _Reader(self)
        if not self._rows.is_known:
            try:
                self._map_segments_of(ids)
            except BaseException:
                reader.end()
                raise
        return reader

    def _map_segments_of(self, ids: NDArray[np.int64]) -> None:
        """Map the segments of rows, if they are not. Raises: RowOutOfRangeError: a row is out of range."""
        self._map_some(self._rows.unknown(gather.segments_of(self._rows, ids)))

    def _doubt(self, row: int) -> str:
        """Return the name of the segment of a row that could not be read; the next `map` checks it anew."""
        index = int(self._starts.searchsorted(row, side="right")) - 1
        self._mapped.doubt(int(self._seqs[index]))
        return self._segments[index].name

    @cached_property
    def _is_larger_than_memory(self) -> bool:
        return self.nbytes > memory_bytes() * _MEMORY_SHARE

    def fetch(self, first: int, last: int, names: Sequence[str]) -> PendingRead:
        """Ask the disk for columns of rows first..last-1, before they are gathered.

        A hint, which ends when it is dropped; the snapshot stays open until then. Rows of segments that were
        not checked yet are left out.
        """
        return gather.fetch(self._rows, first, last, self.columns_of(names), _Reader(self))

    def rows_before(self, index: int) -> int:
        """Rows of the segments before one."""
        return int(self._starts[index])

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows as a pyarrow.Table over the mapped files, without a copy.

        Tensor columns show as `arrow.fixed_shape_tensor` (a re-labelling), bool as uint8, bfloat16
        as uint16, complex numbers as pairs. The table keeps its segments mapped and leased, also
        after this snapshot is closed.
        """
        names = self._store.settings.schema.select(columns)
        with _Reader(self):
            batches = [self._batch(segment).select(names) for segment in self._segments]
        if batches:
            return pa.Table.from_batches(batches)
        schema = self._store.settings.schema
        columns_of_no_row = [pa.array([], field.type) for field in schema.arrow]
        empty = pa.RecordBatch.from_arrays(columns_of_no_row, schema=schema.arrow)
        return pa.Table.from_batches([labelled(empty, schema).select(names)])

    def record_batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of `table`, one record batch a segment, oldest first; each segment is mapped in its turn.

        A record batch keeps its segment mapped and leased while it lives, also after `release_oldest`.
        The mapping is sparse: `will_need` and `will_read_on` of mapping.py say what is to be read from the
        disk otherwise than page by page.
        """
        names = self._store.settings.schema.select(columns)
        _Reader(self).end()  # raises if it is closed
        return (self._read_batch(segment, names) for segment in self._segments)

    def _read_batch(self, segment: SegmentInfo, names: tuple[str, ...]) -> pa.RecordBatch:
        with _Reader(self):
            return self._batch(segment, sparse=True).select(names)

    def locate(self, ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the origin of rows: `_seq`, `_row` (int64) and `_age_seconds` (float64) of each."""
        segments = self._starts.searchsorted(ids, side="right") - 1
        now = dt.datetime.now(dt.timezone.utc).timestamp()
        return {
            "_seq": self._seqs[segments],
            "_row": ids - self._starts[segments],
            "_age_seconds": now - self._published[segments],
        }

    def positions(self, ids: NDArray[np.int64], missing: str = "raise") -> NDArray[np.int64]:
        """Return the positions of rows (n, 2) that are named by `_seq` and `_row`; `locate` is the other way.

        Args:
            missing: of rows whose segments are not in the snapshot, "raise" or "skip", which leaves them out.
        Raises: MissingSegmentsError: a row's segment is not there. IndexError: a row that never was.
        """
        if missing not in ("raise", "skip"):
            raise ValueError(f"missing={missing!r} must be 'raise' or 'skip'")
        positions, is_there = NumberedRows(self._seqs, self._starts).numbers(ids, self.next_seq)
        if missing == "raise" and not is_there.all():
            raise missing_rows_error(ids, is_there, self._segments)
        return positions

    def published(self, ids: NDArray[np.int64]) -> float:
        """Return the mean time at which rows were published, in seconds since 1970."""
        return float(self._published[self._starts.searchsorted(ids, side="right") - 1].mean())

    def view(
        self, first: int, count: int, columns: Columns, *, is_fetched: bool = False
    ) -> dict[str, ColumnData] | None:
        """Rows first..first+count-1 as arrays over a mapping of their own, without a copy: see columns.py.

        Args:
            is_fetched: the disk was asked for the rows: it need not read around them.
        Returns: the columns that can be views, or None if rows lie in several segments, or the process has
            too many mappings.
        Raises: CorruptSegmentError: the file was truncated, or the disk does not give its bytes.
        """
        index = int(self._starts.searchsorted(first, side="right")) - 1
        lease = self._lease
        if lease is None or first + count > self._starts[index + 1]:
            return None
        if not has_room_for_view(self._segments[index].nbytes):
            return None
        with _Reader(self):
            self._map(index)
            segment = self._segments[index]
            start = first - int(self._starts[index])
            end_lease = lease.share(segment.seq)
            try:
                folder, (name,) = self._store.files_of((segment,))  # no Path, for each batch
                path, rows = f"{folder}/{name}", range(start, start + count)
                layout = self._mapped.layout_of(segment.seq).buffers
                return columns.view(path, segment.nbytes, layout, rows, end_lease, sparse=is_fetched)
            except OSError as error:
                end_lease()
                if error.errno == errno.EIO:
                    why = "its file was truncated, or the disk does not give its bytes"
                    raise unreadable(self._doubt(first), why) from None
                return None  # no address space or file descriptor is left

    def views(
        self, batch_rows: int | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[dict[str, ColumnData]]:
        """Yield all rows, oldest first, as zero-copy views: arrays over mappings of their own.

        A write into a view is seen nowhere else. A view keeps its segment mapped and
        leased, also after this snapshot is closed; it is dead in a forked child.

        Args:
            batch_rows: rows of a view. None means one view a segment.
            columns: names of the columns. None means all. Text and bytes cannot be views.
        Yields: name -> (rows, *shape); `Values(data, offsets)` for a ragged column, with new offsets
            and a view as data.
        Blocks: while pages come from the disk.
        Raises: ValueError: a copy would be needed: a column of text or bytes, `batch_rows` rows
            that lie in two segments, more views alive than the kernel allows mappings.
        """
        chosen = self.columns_of(self._store.settings.schema.select(columns, least=1))
        if copied := [*chosen.copied.names]:
            raise ValueError(f"columns {copied} are made of Python objects, which are copies: leave them out")
        size = None if batch_rows is None else parse_count(batch_rows, "batch_rows")
        _Reader(self).end()  # raises if it is closed
        return self._views(size, chosen)

    def _views(self, batch_rows: int | None, columns: Columns) -> Iterator[dict[str, ColumnData]]:
        starts = self._starts if batch_rows is None else np.arange(0, len(self), batch_rows)
        for start, stop in itertools.pairwise([*starts.tolist(), len(self)]):
            if start == stop:
                continue
            view = self.view(start, stop - start, columns)
            if view is None:
                raise ValueError(
                    f"rows {start} to {stop - 1} cannot be a view: they lie in several segments (choose "
                    "batch_rows to divide the segments' rows, or None), or too many views are alive, or the "
                    "process has no memory mapping, addresses (ulimit -v, ulimit -d) or file descriptor left "
                    "for one more (ulimit -n)"
                )
            yield view

    def release_oldest(self, count: int) -> bool:
        """Unmap and unlease the first `count` segments, whose rows nobody may ask for any more.

        Returns: False: they were released before, or the snapshot is closed.
        """
        with self._lock:
            if self._closed or count <= self._released:
                return False
            self._released = count
            self._rows.release(int(self._starts[count]))
        assert self._lease is not None
        lease, last = self._lease, self._segments[-1].seq
        first = self._segments[count].seq if count < len(self._segments) else last + 1
        self._mapped.release(self._hold, count, lambda: lease.narrow(first, last))
        return True

    def map_all(self) -> int:
        """Map every segment now; damaged ones are quarantined and leave the snapshot.

        Returns: the number of rows that remain.
        Raises: CorruptSegmentError: one of a frozen cache is damaged.
        """
        with _Reader(self):
            damaged: list[int] = []
            leaves = None if self._store.is_frozen else damaged
            self._map_some(np.arange(self._released, len(self._segments)), leaves)
            if damaged:
                kept = [index for index in range(len(self._segments)) if index not in set(damaged)]
                self._set_segments([self._segments[index] for index in kept])
                self._put_known(np.arange(len(kept)))
                before, self._hold = self._hold, Hold(self._seqs)
                self._mapped.acquire(self._hold)
                self._mapped.release(before, len(before.seqs))
        return len(self)

    def map_ahead(self) -> None:
        """Map all segments that can be mapped: the folder is not needed then. Errors come with their rows."""
        with _Reader(self), self._mapping.held():
            for index in self._put_alike(self._rows.unknown()):
                with suppress(CorruptSegmentError, OSError):
                    self._open(index)

    def close(self) -> None:
        """Unmap and unlease. Idempotent; a gather in another thread ends first, undisturbed."""
        if not self._origin.is_here:  # the lock may be held for ever
            self._closed = True
            self._release()
            return
        with self._lock:
            if self._lease is not None and not self._closed:
                self._lease.is_ending = True
            self._closed = True
            is_idle = not self._readers
        if is_idle:
            self._release()

    @until_exit
    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()  # first: a warning may be an error
            is_ours = self._origin.is_here  # a child does not close inherited snapshots
            has_order = not sys.is_finalizing()  # at exit a loader's snapshot may come before its loader
            if self._lease is not None and is_ours and has_order:
                warnings.warn("a snapshot was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._closed
            else f"{format_count(len(self), 'row')} in {format_count(len(self._segments), 'segment')}"
        )
        return f"<Snapshot: {state}>"

    def _card(self) -> Card:
        if self._closed:
            return Card("Snapshot", "closed")
        contents = f"{format_count(len(self), 'row')} in {format_count(len(self._segments), 'segment')}"
        leased = [segment for segment in self._segments if self.covers(segment.seq)]
        nbytes = format_bytes(sum(segment.allocated_bytes for segment in leased))
        facts = [
            ("contents", f"{contents}, {format_bytes(self.nbytes)}"),
            ("leased", f"{format_count(len(leased), 'segment')}, {nbytes}, by this process"),
        ]
        shown = timeline(self._segments, time.time())
        return Card("Snapshot", f"of {self._store.folder.path}", [Facts(facts), *shown])

    def _begin_read(self, beside: _Reader | None) -> None:
        self._origin.require("the snapshot", "take a new one")  # first: the lock may be held for ever
        with self._lock:
            if self._closed and (beside is None or beside.has_ended):
                raise ValueError("the snapshot is closed: take a new one with cache.snapshot()")
            self._readers += 1

    def _end_read(self, reader: _Reader) -> None:
        if not self._origin.is_here:  # the lock may be held for ever
            reader.has_ended = True
            return
        with self._lock:
            self._readers, reader.has_ended = self._readers - (not reader.has_ended), True
            last = self._closed and not self._readers
        if last:
            self._release()

    def _release(self) -> None:
        unlease = self._lease.close if self._lease is not None else lambda: None
        if self._origin.is_here:
            self._mapped.release(self._hold, len(self._hold.seqs), unlease)
        else:
            unlease()

    def covers(self, seq: int) -> bool:
        """True if its lease covers the segment of this number."""
        lease = self._lease
        return lease is not None and lease.covers(seq)

    def on_contention(self, release: Callable[[], None]) -> None:
        """Call `release` when a writer of this process waits for this snapshot's lease."""
        if self._lease is not None:
            self._lease.on_contention = release

    def _map_some(self, indices: NDArray[np.int64], damaged: list[int] | None = None) -> None:
        """Map and check segments; a damaged one is added to `damaged` if given, or else raises."""
        with self._mapping.held():
            for index in self._put_alike(indices):
                try:
                    self._map(index)
                except CorruptSegmentError:
                    if damaged is None:
                        raise
                    damaged.append(index)

    def _put_alike(self, indices: NDArray[np.int64]) -> Iterator[int]:
        """Map segments whose layout is known. Yields: each of the others, in its turn.

        It yields a few first, which may make the layout of the rest known.
        """
        left, count = self._put_known(indices), _MAPPED_FIRST
        while len(left):
            some, left = left[:_MAPPED_AT_ONCE], left[_MAPPED_AT_ONCE:]
            trusted = some[self._seqs[some] >= self._suspect_below].tolist()
            self._mapped.map_alike([self._segments[index] for index in trusted], self._store)
            some = self._put_known(some)
            yield from some[:count].tolist()
            left, count = np.concatenate((some[count:], left)), min(2 * count, _MAPPED_AT_ONCE)

    def _put_known(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Put segments that are known by now into `_rows`. Returns: the others."""
        is_known, entries = self._mapped.known(self._seqs[indices], check_bytes_below=self._suspect_below)
        self._rows.put(indices[is_known], entries)
        return indices[~is_known]

    def _map(self, index: int) -> None:
        try:
            if not self._rows.knows(index):
                self._open(index)
        except CorruptSegmentError as error:
            self._condemn(self._segments[index], error)

    def _open(self, index: int) -> None:
        segment = self._segments[index]
        check = segment.seq < self._suspect_below
        self._rows.put([index], self._mapped.map(segment, self._store, check_bytes=check))

    def _condemn(self, segment: SegmentInfo, error: CorruptSegmentError) -> NoReturn:
        """Quarantine a segment, which is no longer mapped here, and raise with its name."""
        if self._lease is not None:
            self._lease.give_up(segment.seq)
        quarantine(self._store, segment, error)
        raise CorruptSegmentError(f"segment {segment.name}: {error}") from None

    def _batch(self, segment: SegmentInfo, *, sparse: bool = False) -> pa.RecordBatch:
        schema = self._store.settings.schema
        assert self._lease is not None  # there is a segment
        end_lease = self._lease.share(segment.seq)
        try:
            path, limit = self._store.path_of(segment), self._store.settings.segment_bytes
            file = FileMapping(path, end_lease, limit=limit, sparse=sparse).buffer()
        except BaseException as error:
            end_lease()
            if (reason := unfit(error)) is not None:
                self._condemn(segment, reason)
            raise
        try:
            check_file(file, self._store, segment, check_bytes=segment.seq < self._suspect_below)
        except CorruptSegmentError as error:
            del file  # unmaps it
            self._condemn(segment, error)
        return labelled(segment_file.open_batch(file, schema), schema)


class _Reader:
    """Keeps a snapshot open until the reader has ended: a context manager.

    Dropping it also ends it, where Ctrl-C interrupted its end. Beside another reader that has not ended, it
    may also begin after the snapshot was closed.
    Raises: ValueError: the snapshot is closed, or another process'.
    """

    has_ended = True

    def __init__(self, snapshot: Snapshot, beside: _Reader | None = None) -> None:
        self._snapshot = snapshot
        snapshot._begin_read(beside)
        self.has_ended = False

    def end(self) -> None:
        """End it. Idempotent; call it again after an interrupt."""
        self._snapshot._end_read(self)

    @property
    def read_mode(self) -> ReadMode:
        return self._snapshot.read_mode

    @property
    def drops(self) -> bool:
        return self._snapshot._is_larger_than_memory

    def doubt(self, row: int) -> str:
        return self._snapshot._doubt(row)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()

    @until_exit
    def __del__(self) -> None:
        if not self.has_ended:
            self.end()
