"""Gather: copies columns of chosen rows out of segments, by jobs of the engine.

Fixed-width columns are one job of the engine, all together. A variable-length column takes two: one finds its
values, one copies them. Rows are copied from mapped memory, or asked of the disk and read. Guarantees: a
gather that has ended, in whatever way, touches nothing; an error of reading names the segment.
"""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Ragged, Schema, VariableType
from arrowcache.arrow.segment import element_bytes
from arrowcache.errors import CorruptSegmentError
from arrowcache.lifetimes import until_exit
from arrowcache.native import engine
from arrowcache.native.library import address_of
from arrowcache.native.rows import SegmentRows
from arrowcache.os_errors import explained
from arrowcache.reading.memory import aligned
from arrowcache.reading.values import ColumnData, Values, to_column
from arrowcache.storage.verification import unfit

_STEP_SECONDS = 0.05  # between two looks for Ctrl-C, in a long copy
_OFFSET_BYTES = 4  # of a row of a variable-length column
_MOMENT_SECONDS = 0.01  # work in memory has ended by then

Named = Callable[[int], str]
"""Told that a row could not be read, by its index among those that were asked for: its segment's name."""


GatherPart: TypeAlias = "engine.Job | engine.Read | ValuesGather"
"""Some columns on their way."""


class Parts(NamedTuple):
    """Parts of the values of some rows, one behind another.

    `ids` (n,): the row of each. `places` (n,): where it begins in its file, in bytes. `offsets` (n + 1,): the
    bytes of the parts before it, and of all.
    """

    ids: NDArray[np.int64]
    places: NDArray[np.int64]
    offsets: NDArray[np.int64]


class OutsideError(Exception):
    """A row is out of range: the index of its number among the given ones."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class Gatherer:
    """Begins gathers of columns of a list of segments, whose rows are numbered one after another.

    Args:
        rows: places of the rows. Each segment has a buffer for each fixed column, then two for each variable
            one.

    Must never be asked for rows of a segment that its caller has not leased.
    """

    def __init__(self, schema: Schema, rows: SegmentRows) -> None:
        self._schema, self._rows = schema, rows
        count = len(schema.fixed)
        #: Buffer and width of each column of fixed width.
        self._fixed = {
            name: (number, kind.row_bytes) for number, (name, kind) in enumerate(schema.fixed.items())
        }
        self._buffer_of = {name: count + 2 * number for number, name in enumerate(schema.variable)}
        self._tables: dict[tuple[str, ...], engine.CopiedColumns] = {}  # by the columns' names

    def segments_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of each row's segment (n,), of rows (n,).

        Raises: OutsideError: a row is out of range.
        """
        segments = self._rows.segments_of(ids)
        if isinstance(segments, int):
            raise OutsideError(segments)
        return segments

    def copy(self, ids: NDArray[np.int64], out: Mapping[str, int]) -> int | None:
        """Copy columns of a few rows, here and now.

        Args: as of `begin`; the files stay mapped meanwhile.
        Returns: pages that were not in memory, or None if nothing was done: rows are many, or not all mapped.
        Raises: OutsideError: as `begin`.
        """
        columns = self._columns(out)
        done = engine.copy_now(self._rows, ids, columns) if columns else None
        if done is None:
            return None
        refused, missed = done
        if refused >= 0:
            raise OutsideError(refused)
        return missed

    def begin(
        self,
        ids: NDArray[np.int64],
        names: Sequence[str],
        out: Mapping[str, int],
        keep: object,
        named: Named,
        then: Callable[[], None] | None = None,
        *,
        is_cold: bool,
        drops: bool = False,
    ) -> Gather:
        """Begin to gather columns of some rows.

        Args:
            out: addresses to be filled, of each fixed-width column: (n, *shape) of its numpy_dtype.
            keep: owner of that memory and of the mappings; kept as long as anything may touch them.
            then: as of `Gather`; also where this raises.
            is_cold: rows may be on the disk: have it read them side by side.
            drops: rows that are read from the disk leave the page cache again.
        Raises: OutsideError: a row is out of range, or its segment not known; nothing is written then. A
            small warm job raises this when it is taken: see `engine.Job`.
        """
        columns = self._columns(out)
        others = () if len(names) == len(out) else [name for name in names if name not in out]
        if not columns and not others:
            self.segments_of(ids)  # checked, whichever columns are asked for
        gather = Gather(named, then)
        try:
            if columns and is_cold:
                gather.add(engine.read_rows(self._rows, ids, columns, keep, drops=drops))
            elif columns:
                gather.add(engine.copy_rows(self._rows, ids, columns, keep))
            for name in others:
                buffer, kind = self._buffer_of[name], self._schema.variable[name]
                width = element_bytes(kind)
                found = engine.find_values(self._rows, ids, buffer, width, keep, on_disk=is_cold)
                gather.add(ValuesGather(found, kind, name, is_cold=is_cold, drops=drops))
            gather.is_in_parts = is_cold or bool(others)
            if others:
                gather.go_on()
        except BaseException:
            abandon(gather)
            raise
        return gather

    def lengths(
        self, ids: NDArray[np.int64], name: str, keep: object, named: Named
    ) -> NDArray[np.integer[Any]]:
        """Return the lengths (n,) of a run of rows, all of known segments, as `Snapshot.lengths`.

        The disk reads them in large pieces, whatever the temperature. Blocks, raises: as `Gather.take`.
        """
        is_ragged = name in self._buffer_of
        buffer, width = (self._buffer_of[name], _OFFSET_BYTES) if is_ragged else self._fixed[name]
        column, gather = engine.CopiedColumns([(buffer, width, 0)]), Gather(named)
        gather.add(engine.fetch_rows(self._rows, int(ids[0]), int(ids[-1]) + 1, column, keep))
        if not is_ragged:
            values = np.empty(len(ids), self._schema.fixed[name].numpy_dtype)
            column = column.at([address_of(values)])
            gather.add(engine.copy_rows(self._rows, ids, column, (keep, values)))
            gather.wait()
            return values
        kind = self._schema.variable[name]
        assert isinstance(kind, Ragged)
        found = engine.find_values(self._rows, ids, buffer, element_bytes(kind), keep)
        gather.add(found)
        gather.wait()
        require_sound(found, name)
        return np.diff(found.offsets) // kind.item_bytes

    def find(
        self,
        ids: NDArray[np.int64],
        name: str,
        keep: object,
        named: Named,
        then: Callable[[], None],
        *,
        is_cold: bool,
    ) -> tuple[Gather, engine.Found]:
        """Begin to find the values of a variable-length column, and copy none.

        Args: as of `begin`.
        Returns: the gather, and what it has found once it has ended and `require_sound` passes it.
        Raises: OutsideError: as `begin`.
        """
        gather = Gather(named, then)
        try:
            width = element_bytes(self._schema.variable[name])
            found = engine.find_values(self._rows, ids, self._buffer_of[name], width, keep, on_disk=is_cold)
            gather.add(found)
        except BaseException:
            abandon(gather)
            raise
        return gather, found

    def begin_parts(
        self,
        parts: Parts,
        out: NDArray[np.uint8],
        keep: object,
        named: Named,
        then: Callable[[], None],
        *,
        is_cold: bool,
        drops: bool,
    ) -> Gather:
        """Begin to copy parts of values, which `find` has found, one behind another.

        Args:
            out: as many bytes as the parts have.
            keep, named, then, is_cold, drops: as of `begin`.
        """
        gather = Gather(named, then)
        try:
            places = engine.Parts(self._rows, parts.ids, parts.places, parts.offsets)
            if is_cold:
                gather.add(engine.read_values(places, out, keep, drops=drops))
            else:
                gather.add(engine.copy_values(places, out, keep))
            gather.is_in_parts = is_cold
        except BaseException:
            abandon(gather)
            raise
        return gather

    def fetch(self, first: int, last: int, names: Sequence[str], keep: object) -> Gather:
        """Ask the disk for columns of rows first..last-1: a hint, which ends if it is dropped."""
        fetch = Gather()
        if columns := self._columns(dict.fromkeys(names, 0)):
            fetch.add(engine.fetch_rows(self._rows, first, last, columns, keep))
        for name in names:
            if (buffer := self._buffer_of.get(name)) is not None:
                width = element_bytes(self._schema.variable[name])
                fetch.add(engine.fetch_values(self._rows, first, last, buffer, width, keep))
        return fetch

    def _columns(self, out: Mapping[str, int]) -> engine.CopiedColumns | None:
        """Return the fixed-width columns that go to these addresses, or None if there are none."""
        names = tuple(filter(self._fixed.__contains__, out))
        if not names:
            return None
        table = self._tables.get(names)
        if table is None:
            table = self._tables[names] = engine.CopiedColumns([(*self._fixed[name], 0) for name in names])
        return table.at(map(out.__getitem__, names))


class Gather:
    """Columns of some rows that are being gathered. Its owner calls `take` until True, or `cancel`.

    Args:
        named: returns the name of a row's segment.
        then: called once it has ended, in whatever way; idempotent.
    """

    is_in_parts = False  # some have a second part, which `go_on` begins
    missed = 0  # rows or pages that were not in memory: valid once it has ended

    def __init__(self, named: Named = str, then: Callable[[], None] | None = None) -> None:
        self._named, self._then = named, then
        self._parts: list[GatherPart] = []

    def add(self, part: GatherPart) -> None:
        """Add a part, already begun, that gathers some columns. Raises: OutsideError: it was refused."""
        self._parts.append(part)
        if part.refused >= 0:
            raise OutsideError(part.refused)

    def take(self, seconds: float) -> bool:
        """Help copying, then wait. Returns: True if it has ended.

        Blocks: as `engine.Job.take`.
        Raises: OutsideError: as `Gatherer.begin`; CorruptSegmentError: a file has changed since it was
            checked, or cannot be read; OSError: this process has too many files open, or no right to read
            it; RuntimeError: this process was forked from the one that copies.
        """
        for part in self._parts:
            if not part.take(seconds):
                return False
            if part.refused >= 0:
                raise OutsideError(part.refused)
        self.missed = sum([part.missed for part in self._parts])
        self._end()
        for part in self._parts:
            if (failure := part.failure) is not None:
                name = self._named(failure.index)
                error = OSError(failure.error, os.strerror(failure.error), name)
                if failure.error and unfit(error) is None:
                    raise explained(error)
                why = os.strerror(failure.error) if failure.error else "its file was truncated"
                raise unreadable(name, why)
        return True

    def go_on(self) -> None:
        """Begin second parts whose first part has ended."""
        for part in self._parts:
            part.go_on()

    def wait(self) -> Gather:
        """Wait for its end. Returns: itself. Blocks, raises: as `take`; Ctrl-C ends it."""
        try:
            while not self.take(_STEP_SECONDS):
                pass
        except BaseException:
            abandon(self)
            raise
        return self

    def cancel(self, seconds: float | None = None) -> bool:
        """End it. Returns: False: the kernel holds a thread, so memory and files must stay. Idempotent.

        Blocks, raises: as `engine.Job.cancel`. Where that leaves a thread behind, `then` is not called.
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
        if self._then is not None:
            self._then()
            self._then = None  # last: called again if Ctrl-C comes before

    @until_exit
    def __del__(self) -> None:
        if getattr(self, "_then", None) is not None:  # else it has ended, or was never made
            try:
                self.cancel()
            except BaseException:  # noqa: BLE001  # nobody would get it, and its parts end by themselves
                pass

    def values(self) -> dict[str, ColumnData]:
        """Return variable-length columns of an ended gather. Raises: CorruptSegmentError: not UTF-8."""
        return {part.name: part.column() for part in self._parts if isinstance(part, ValuesGather)}


class ValuesGather:
    """A column of variable length that is being gathered: its values are first found, then copied."""

    _copy: engine.Job | engine.Read | None = None
    _is_over = False

    def __init__(
        self, found: engine.Found, kind: VariableType, name: str, *, is_cold: bool, drops: bool = False
    ) -> None:
        self.found, self._kind, self.name = found, kind, name
        self._is_cold, self._drops = is_cold, drops

    @property
    def refused(self) -> int:
        """Index of an id that is out of range, or -1."""
        return self.found.refused

    def go_on(self) -> None:
        """Begin to copy the values, if they are found."""
        found = self.found
        if self._copy is not None:
            self._copy.go_on()
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
            raise OutsideError(self.refused)
        if self.found.failure is not None:  # which `Gather` reports
            self._is_over = True
            return
        require_sound(self.found, self.name)
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

    def column(self) -> ColumnData:
        """Return the column. It has ended."""
        kind, ends = self._kind, self.found.offsets
        if not isinstance(kind, Ragged):
            return to_column(kind, Values(self._data, ends))
        items = self._data.view(kind.numpy_dtype).reshape(-1, *kind.inner_shape)
        return Values(items, ends // kind.item_bytes)


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
    """Work that can be ended, as `Gather.cancel` ends."""

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
