"""Gather: copies columns of chosen rows out of segments, by jobs of the engine.

Fixed-width columns are one job of the engine, all together. A variable-length column takes two: one finds its
values, one copies them. `PendingRead` is rows on their way: its `result` waits for them, and has columns.py
make the batch's columns of the gathered bytes.

Rows are numbered one after another, over a list of segments (`SegmentRows`): each has a buffer for each fixed
column, then two for each variable one. A function that begins a read is given a reader, which the read ends,
also where the function raises.

`ReadMode` tells how rows are read. Warm is faster for rows that are in memory: they are copied from their
mapping. Cold is faster for other rows: they are read from their files, many at a time. Only the kernel knows
which rows are in memory, so each job counts the rows or pages that it missed there, and the next jobs go by
that count. No clock is looked at. A reader begins cold, since asking costs little.

Guarantees: a gather that has ended, in whatever way, touches nothing; an error of reading names the segment.

Must never be asked for rows of a segment that its caller has not leased.
"""

from __future__ import annotations

import _thread
import os
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import CorruptSegmentError
from arrowcache.lifetimes import until_exit
from arrowcache.limits import Limits
from arrowcache.native import engine
from arrowcache.native.engine import SegmentRows
from arrowcache.native.library import address_of
from arrowcache.os_errors import explained
from arrowcache.reading.columns import ColumnData, Columns, FixedColumn, RaggedColumn, VariableColumn
from arrowcache.reading.slots import BatchMemory, aligned
from arrowcache.storage.verification import unfit

_STEP_SECONDS = 0.05  # between two looks for Ctrl-C, in a long copy
_OFFSET_BYTES = 4  # of a row of a variable-length column
_MOMENT_SECONDS = 0.01  # work in memory has ended by then
_ROWS_A_MISS = 256
_MAX_MISSES = 64  # pages, while warm: the disk reads them in some 10 ms
_MIN_FOUND_ROWS, _MAX_FOUND_ROWS = 256, 1 << 14
_LONG_LIFE = 16  # times the rows that it took to get warm
_MAX_WARM = 8  # batches under way


def batches_ahead(rows: int, nbytes: int) -> int:
    """Return the number of batches of this size to be asked of the disk at a time."""
    return max(2, min(-(-Limits.current.ahead_rows // rows), Limits.current.ahead_bytes // nbytes))


class ReadMode:
    """The mode in which one reader reads.

    Both ways are bearable while less than one in 256 rows is missed: each miss is weighed against 256 rows
    that were found. The mode turns cold when a balance of 64 misses is left: a bad page or two are no reason.
    It turns warm when a balance of enough rows is left: 256 at first, and twice as many after each warm time
    that was short. So the mode does not go back and forth where a part of the rows is always missing, nor
    stay cold for a few.

    `is_cold`: the next rows are to be asked of the disk. `missed`: rows or pages that were not in memory.
    """

    def __init__(self) -> None:
        self.is_cold = True
        self.missed = 0
        self._needed_rows = _MIN_FOUND_ROWS
        self._rows = 0  # rows since it turned warm
        self._balance = 0  # while cold: rows found beyond the limit; while warm: rows found short of it

    def batches_ahead(self, rows: int, nbytes: int) -> int:
        """Return the number of batches of this size to have under way: at least two."""
        if self.is_cold:
            return batches_ahead(rows, nbytes)
        return max(2, min(_MAX_WARM, Limits.current.warm_bytes // nbytes))

    def note(self, rows: int, missed: int) -> None:
        """Count rows that were read as `is_cold` says, and the rows or pages that were missed."""
        self.missed += missed
        found = rows - missed * _ROWS_A_MISS
        if self.is_cold:
            self._balance = max(0, self._balance + found)
            if self._balance >= self._needed_rows:
                self.is_cold, self._rows, self._balance = False, 0, 0
            return
        self._rows += rows
        self._balance = max(0, self._balance - found)
        if self._balance >= _MAX_MISSES * _ROWS_A_MISS:
            if self._rows >= _LONG_LIFE * self._needed_rows:
                self._needed_rows = _MIN_FOUND_ROWS
            else:
                self._needed_rows = min(2 * self._needed_rows, _MAX_FOUND_ROWS)
            self.is_cold, self._balance = True, 0


class Reader(Protocol):
    """One read of a snapshot, which stays open until the read has ended."""

    @property
    def read_mode(self) -> ReadMode:
        """The mode in which rows are read now; it learns how many were not in memory."""

    @property
    def drops(self) -> bool:
        """True if rows that are read from the disk should leave the page cache again."""

    def doubt(self, row: int) -> str:
        """Note that a row could not be read. Returns: the name of its segment."""

    def end(self) -> None:
        """End the read. Idempotent."""


class Parts(NamedTuple):
    """Parts of the values of some rows, one behind another.

    `ids` (n,): the row of each. `places` (n,): where it begins in its file, in bytes. `offsets` (n + 1,): the
    bytes of the parts before it, and of all.
    """

    ids: NDArray[np.int64]
    places: NDArray[np.int64]
    offsets: NDArray[np.int64]


class RowOutOfRangeError(Exception):
    """A row is out of range: the index of its number among the given ones."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


def segments_of(rows: SegmentRows, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of each row's segment (n,), of rows (n,).

    Raises: RowOutOfRangeError: a row is out of range.
    """
    segments = rows.segments_of(ids)
    if isinstance(segments, int):
        raise RowOutOfRangeError(segments)
    return segments


def copy(rows: SegmentRows, ids: NDArray[np.int64], columns: Columns, memory: BatchMemory) -> int | None:
    """Copy the fixed columns of a few rows, here and now.

    Args: as of `read`; the files stay mapped meanwhile.
    Returns: pages that were not in memory, or None if nothing was done: rows are many, or not all mapped.
    Raises: RowOutOfRangeError: as `read`.
    """
    copied = columns.copied_to(memory.addresses)
    done = engine.copy_now(rows, ids, copied) if copied is not None else None
    if done is None:
        return None
    refused, missed = done
    if refused >= 0:
        raise RowOutOfRangeError(refused)
    return missed


def read(
    rows: SegmentRows, ids: NDArray[np.int64], columns: Columns, memory: BatchMemory, reader: Reader
) -> PendingRead:
    """Begin to gather columns of some rows.

    Args:
        memory: of the batch; it and the reader are kept as long as anything may touch them.
    Raises: RowOutOfRangeError: a row is out of range, or its segment not known; nothing is written. A
        small warm job raises this when it is taken: see `engine.Job`.
    """
    is_cold, keep = reader.read_mode.is_cold, (memory, reader)
    drops = is_cold and reader.drops
    pending = PendingRead(reader, ids, memory, columns)
    try:
        copied = columns.copied_to(memory.addresses)
        if copied is not None and is_cold:
            pending.add(engine.read_rows(rows, ids, copied, keep, drops=drops))
        elif copied is not None:
            pending.add(engine.copy_rows(rows, ids, copied, keep))
        elif columns.are_fixed:  # there is none
            segments_of(rows, ids)  # checked, whichever columns are asked for
        for column in columns.variable:
            found = _find(rows, ids, column, keep, is_cold=is_cold)
            pending.add(PendingValues(found, column, is_cold=is_cold, drops=drops))
        pending.is_in_parts = is_cold or not columns.are_fixed
        if not columns.are_fixed:
            pending.advance()
    except BaseException:
        abandon(pending)
        raise
    return pending


def lengths(
    rows: SegmentRows, ids: NDArray[np.int64], column: FixedColumn | RaggedColumn, reader: Reader
) -> NDArray[np.integer[Any]]:
    """Return the lengths (n,) of a run of rows, all of known segments, as `Snapshot.lengths`.

    The disk reads them in large pieces, whatever the mode. Blocks, raises: as `PendingRead.take`.
    """
    width = column.row_bytes if isinstance(column, FixedColumn) else _OFFSET_BYTES
    table, pending = engine.CopiedColumns([(column.buffer, width, 0)]), PendingRead(reader, ids)
    pending.add(engine.fetch_rows(rows, int(ids[0]), int(ids[-1]) + 1, table, reader))
    if isinstance(column, FixedColumn):
        values = np.empty(len(ids), column.dtype)
        table = table.at([address_of(values)])
        pending.add(engine.copy_rows(rows, ids, table, (reader, values)))
        pending.wait()
        return values
    found = _find(rows, ids, column, reader, is_cold=False)
    pending.add(found)
    pending.wait()
    require_sound(found, column.name)
    return np.diff(found.offsets) // column.item_bytes


def find(
    rows: SegmentRows, ids: NDArray[np.int64], column: VariableColumn, reader: Reader
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the values of a variable-length column, and copy none. Returns, blocks: as `Snapshot.find`.

    Raises: RowOutOfRangeError: as `read`. As `PendingRead.take`.
    """
    pending = PendingRead(reader, ids)
    try:
        found = _find(rows, ids, column, reader, is_cold=reader.read_mode.is_cold)
        pending.add(found)
    except BaseException:
        abandon(pending)
        raise
    pending.wait()
    require_sound(found, column.name)
    return np.diff(found.offsets), found.source


def read_parts(
    rows: SegmentRows, parts: Parts, out: NDArray[np.uint8], memory: BatchMemory, reader: Reader
) -> PendingRead:
    """Begin to copy parts of values, which `find` has found, one behind another.

    Args:
        out: as many bytes as the parts have, of this memory.
    """
    is_cold, keep = reader.read_mode.is_cold, (memory, reader)
    pending = PendingRead(reader, parts.ids, memory)
    try:
        places = engine.PartCopies(rows, parts.ids, parts.places, parts.offsets)
        if is_cold:
            pending.add(engine.read_values(places, out, keep, drops=reader.drops))
        else:
            pending.add(engine.copy_values(places, out, keep))
        pending.is_in_parts = is_cold
    except BaseException:
        abandon(pending)
        raise
    return pending


def fetch(rows: SegmentRows, first: int, last: int, columns: Columns, reader: Reader) -> PendingRead:
    """Ask the disk for columns of rows first..last-1: a hint, which ends if it is dropped."""
    fetch = PendingRead(reader, np.array([first, last], np.int64))
    try:
        if (copied := columns.copied_to()) is not None:
            fetch.add(engine.fetch_rows(rows, first, last, copied, reader))
        for column in columns.variable:
            where = first, last, column.buffer, column.element_bytes
            fetch.add(engine.fetch_values(rows, *where, reader))
    except BaseException:
        abandon(fetch)
        raise
    return fetch


def _find(
    rows: SegmentRows, ids: NDArray[np.int64], column: VariableColumn, keep: object, *, is_cold: bool
) -> engine.Found:
    width = column.element_bytes
    return engine.find_values(rows, ids, column.buffer, width, keep, on_disk=is_cold)


class PendingRead:
    """Rows that are on their way. Its owner calls `take` until True, or `result`, or `cancel`.

    It keeps its snapshot open until it has ended.

    Args:
        reader: is ended with it, in whatever way it ends.
        ids: the rows, (n,).
        memory: of the batch; the columns of fixed width are gathered into it.
        columns: the columns of the batch, in order. None: all that the memory has.

    `published`: the mean time at which its rows were published, in seconds since 1970. 0: not asked for.
    """

    is_in_parts = False  # some have a second part, which `advance` begins
    missed = 0  # rows or pages that were not in memory: valid once it has ended
    published = 0.0
    _has_ended = False

    def __init__(
        self,
        reader: Reader,
        ids: NDArray[np.int64],
        memory: BatchMemory | None = None,
        columns: Columns | None = None,
    ) -> None:
        self._reader, self._ids, self._memory, self.columns = reader, ids, memory, columns
        self.rows = len(ids)
        self._parts: list[_Part] = []

    def add(self, part: _Part) -> None:
        """Add a part, begun already, that gathers columns. Raises: RowOutOfRangeError: it was refused."""
        self._parts.append(part)
        if part.refused >= 0:
            raise RowOutOfRangeError(part.refused)

    def take(self, seconds: float) -> bool:
        """Help copying, then wait. Returns: True if it has ended.

        Blocks: as `engine.Job.take`.
        Raises: RowOutOfRangeError: as `read`; CorruptSegmentError: a file has changed since it was
            checked, or cannot be read; OSError: this process has too many files open, or no right to read
            it; RuntimeError: this process was forked from the one that copies.
        """
        for part in self._parts:
            if not part.take(seconds):
                return False
            if part.refused >= 0:
                raise RowOutOfRangeError(part.refused)
        self.missed = sum([part.missed for part in self._parts])
        self._end()
        for part in self._parts:
            if (failure := part.failure) is not None:
                name = self._reader.doubt(int(self._ids[failure.index]))
                error = OSError(failure.error, os.strerror(failure.error), name)
                if failure.error and unfit(error) is None:
                    raise explained(error)
                why = os.strerror(failure.error) if failure.error else "its file was truncated"
                raise unreadable(name, why)
        return True

    def advance(self) -> None:
        """Begin second parts whose first part has ended."""
        for part in self._parts:
            part.advance()

    def wait(self) -> None:
        """Wait for its end. Blocks, raises: as `take`; Ctrl-C ends it."""
        try:
            while not self.take(_STEP_SECONDS):
                pass
        except BaseException:
            abandon(self)
            raise

    def result(self) -> dict[str, ColumnData]:
        """Return the columns of the batch: name -> (n, *shape), a list, or `Values`. Once.

        Blocks: while rows come from the disk.
        Raises: as `take`, and as `VariableColumn.finish`.
        """
        self.wait()
        self._reader.read_mode.note(len(self._ids), self.missed)
        assert self._memory is not None
        arrays, columns = self._memory.arrays(), self.columns
        if columns is None:
            return {**arrays}
        found: dict[str, ColumnData] = {}
        if columns.variable:
            for part in self._parts:
                if isinstance(part, PendingValues):
                    found[part.column.name] = part.finish(arrays.get(part.column.name))
        return {name: found[name] if name in found else arrays[name] for name in columns.names}

    def cancel(self, seconds: float | None = None) -> bool:
        """End it. Returns: False: the kernel holds a thread, so memory and files must stay. Idempotent.

        Blocks, raises: as `engine.Job.cancel`. Where that leaves a thread behind, the reader does not end.
        """
        for part in self._parts:
            part.cancel(0)  # all of them first: no thread begins one while another is waited for
        has_ended = True
        for part in self._parts:
            has_ended &= part.cancel(seconds)
        if has_ended:
            self._end()
        return has_ended

    def _end(self) -> None:
        if not self._has_ended:
            self._reader.end()
            self._has_ended = True  # last: called again if Ctrl-C comes before

    @until_exit
    def __del__(self) -> None:
        if not self._has_ended and hasattr(self, "_parts"):  # else it was never made
            try:
                self.cancel()
            except BaseException:  # noqa: BLE001  # nobody would get it, and its parts end by themselves
                pass


class PendingValues:
    """A column of variable length that is being gathered: its values are first found, then copied."""

    _copy: engine.Job | engine.Read | None = None
    _is_over = False

    def __init__(
        self, found: engine.Found, column: VariableColumn, *, is_cold: bool, drops: bool = False
    ) -> None:
        self.found, self.column = found, column
        self._is_cold, self._drops = is_cold, drops

    @property
    def refused(self) -> int:
        """Index of an id that is out of range, or -1."""
        return self.found.refused

    def advance(self) -> None:
        """Begin to copy the values, if they are found."""
        found = self.found
        if self._copy is not None:
            self._copy.advance()
        elif not self._is_over and found.has_ended() and found.refused < 0 and found.damaged < 0:
            self._begin_copy()

    def take(self, seconds: float) -> bool:
        """Wait for the values. Returns: True: the column is complete."""
        if self._copy is None and not self._is_over:
            if not self.found.take(seconds):
                return False
            self._begin_copy()
        return self._copy is None or self._copy.take(seconds)

    def _begin_copy(self) -> None:
        if self.refused >= 0:
            raise RowOutOfRangeError(self.refused)
        if self.found.failure is not None:  # which `PendingRead` reports
            self._is_over = True
            return
        require_sound(self.found, self.column.name)
        self._data = aligned(int(self.found.offsets[-1]))
        if self._is_cold:
            self._copy = engine.read_values(self.found, self._data, drops=self._drops)
        else:
            self._copy = engine.copy_values(self.found, self._data)

    def cancel(self, seconds: float | None = None) -> bool:
        """Cancel both of its jobs. Returns: True: no thread touches the column any more."""
        self._is_over = True  # first: its offsets may be half found
        return (self._copy is None or self._copy.cancel(seconds)) & self.found.cancel(seconds)

    @property
    def missed(self) -> int:
        """Rows, or pages of them, that were not in memory."""
        return self.found.missed + (0 if self._copy is None else self._copy.missed)

    @property
    def failure(self) -> engine.Failure | None:
        return self.found.failure or (None if self._copy is None else self._copy.failure)

    def finish(self, out: NDArray[Any] | None) -> ColumnData:
        """Return the column of the batch, once all is copied. `out`: as of `VariableColumn.finish`."""
        return self.column.finish(self._data, self.found.offsets, out)


_Part: TypeAlias = "engine.Job | engine.Read | PendingValues"
"""Some columns on their way."""


def require_sound(found: engine.Found, column: str) -> None:
    """Raises: CorruptSegmentError: offsets were altered since their segment was checked."""
    if found.damaged >= 0:
        raise CorruptSegmentError(
            f"the offsets of column {column!r} point out of their file, so its bytes were altered "
            "after it was opened: run cache.verify()"
        )


def unreadable(name: str, why: str) -> CorruptSegmentError:
    """Return the error of a segment that was checked, and whose file can't be read any more."""
    return CorruptSegmentError(
        f"segment {name} can't be read any more ({why}): run cache.verify(), and look at the disk"
    )


class Cancellable(Protocol):
    """Work that can be ended, as `PendingRead.cancel` ends."""

    def cancel(self, seconds: float | None = None) -> bool: ...


def abandon(begun: Cancellable) -> None:
    """Cancel work without waiting: reads that the disk holds for longer than a moment end by themselves.

    Nobody may ask it for anything afterwards. Blocks: for a moment; as `cancel`, if no thread can be started.
    """
    if begun.cancel(_MOMENT_SECONDS):
        return
    try:
        _thread.start_new_thread(begun.cancel, ())
    except RuntimeError:
        begun.cancel()
