"""Gather: columns of some rows on their way out of segments.

Fixed-width columns are one job of the engine, all together. A variable-length column takes two: one finds its
values, one copies them. Rows are copied from mapped memory, or asked of the disk and read. Guarantees: once a
gather has ended, in whatever way, it touches nothing; an error of reading names the segment.
"""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Ragged, Schema, VariableType
from arrowcache.arrow.segment import element_bytes
from arrowcache.errors import CorruptSegmentError
from arrowcache.native import engine
from arrowcache.native.rows import Rows
from arrowcache.reading.output import aligned
from arrowcache.reading.values import Column, Values, to_column

_STEP_SECONDS = 0.05  # between two looks for Ctrl-C, in a long copy
_MOMENT_SECONDS = 0.01  # what is begun in memory has ended by then

Named = Callable[[int], str]
"""Told that a row could not be read, by its index among those that were asked for: its segment's name."""


class OutsideError(Exception):
    """A row is out of range: the index of its number among those that were given."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class Gatherer:
    """Begins gathers of columns of a list of segments, whose rows are numbered one after another.

    Args:
        schema: the segments'.
        rows: where they are; their buffers are those of the fixed columns, then two of each variable one.

    Must never be asked for rows of a segment that its caller has not leased.
    """

    def __init__(self, schema: Schema, rows: Rows) -> None:
        self._schema, self._rows = schema, rows
        count = len(schema.fixed)
        self._widths = {name: kind.row_bytes for name, kind in schema.fixed.items()}
        self._buffer_of = {name: number for number, name in enumerate(schema.fixed)}
        self._buffer_of |= {name: count + 2 * number for number, name in enumerate(schema.variable)}

    def segments_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index of each row's segment (n,), of rows (n,).

        Raises: OutsideError: a row is out of range.
        """
        segments = self._rows.segments_of(ids)
        if isinstance(segments, int):
            raise OutsideError(segments)
        return segments

    def release(self, first: int) -> None:
        """Refuse rows before this one from now on."""
        self._rows.release(first)

    def copy(self, ids: NDArray[np.int64], out: Mapping[str, int]) -> int | None:
        """Copy columns of a few rows, here and now.

        Args: as of `begin`; the files stay mapped meanwhile.
        Returns: pages that were not in memory. None: nothing was done: they are many, or not all mapped.
        Raises: OutsideError: as `begin`.
        """
        columns = [self._column(name, address) for name, address in out.items() if self._widths[name]]
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
            ids: (n,) row numbers.
            names: of the columns.
            out: for each that has a fixed width, the address of (n, *shape) of its numpy_dtype, to be filled.
            keep: what keeps that memory, and the files mapped; for as long as anything may touch them.
            named: tells segments.
            then: called once it has ended, in whatever way, also where this raises; idempotent.
            is_cold: rows may be on the disk: have it read them side by side.
            drops: rows that are read from the disk leave the page cache again.
        Raises: OutsideError: a row is out of range, or its segment not known; nothing is written then. A
            small warm job raises this when it is taken: see `engine.Job`.
        """
        columns = [self._column(name, address) for name, address in out.items() if self._widths[name]]
        others = () if len(names) == len(out) else [name for name in names if name not in out]
        if not columns and not others:
            self.segments_of(ids)  # they are checked, whatever is asked of them
        gather = Gather(None, {}, named)
        gather.then = then
        try:
            if columns and is_cold:
                gather.add_fixed(engine.read_rows(self._rows, ids, columns, keep, drops=drops))
            elif columns:
                gather.add_fixed(engine.copy_rows(self._rows, ids, columns, keep))
            for name in others:
                buffer, kind = self._buffer_of[name], self._schema.variable[name]
                values = ValuesGather(self._rows, ids, buffer, kind, name, is_cold, drops, keep)
                gather.add_values(name, values)
        except BaseException:
            gather.abandon()
            raise
        return gather

    def fetch(self, first: int, last: int, names: Sequence[str], keep: object) -> Fetch:
        """Have the disk begin to read columns of rows first..last-1.

        Args:
            keep: kept until it has ended.
        """
        fixed = [self._column(n, 0) for n in names if n in self._schema.fixed and self._widths[n]]
        jobs = [engine.fetch_rows(self._rows, first, last, fixed, keep)] if fixed else []
        for name in names:
            if name not in self._schema.fixed:
                width = element_bytes(self._schema.variable[name])
                jobs.append(engine.fetch_values(self._rows, first, last, self._buffer_of[name], width, keep))
        return Fetch(jobs)

    def _column(self, name: str, address: int) -> engine.Column:
        return engine.Column(self._buffer_of[name], self._widths[name], address)


class Gather:
    """Columns of some rows on their way. Its owner calls `take` until that returns True, or `cancel`."""

    then: Callable[[], None] | None = None  # called once it has ended, in whatever way; idempotent

    def __init__(
        self,
        fixed: engine.Job | engine.Read | None,
        values: Mapping[str, ValuesGather],
        named: Named = str,
    ) -> None:
        self._fixed: engine.Job | engine.Read | None = None
        self._values, self._named = dict(values), named
        if fixed is not None:
            self.add_fixed(fixed)

    def add_fixed(self, fixed: engine.Job | engine.Read) -> None:
        """What brings the columns of fixed width. Raises: OutsideError: it was refused."""
        self._fixed = fixed
        accepted(fixed)

    def add_values(self, name: str, values: ValuesGather) -> None:
        """What brings a column of variable length: it is begun. Raises: OutsideError: it was refused."""
        self._values[name] = values
        values.begin()

    def take(self, seconds: float) -> bool:
        """Help, then wait. Returns: True: it has ended.

        Blocks: as `engine.Job.take`.
        Raises: OutsideError: as `Gatherer.begin`; CorruptSegmentError: a file has changed since it was
            checked, or cannot be read; RuntimeError: this process was forked from the one that copies.
        """
        if self._fixed is not None:
            if not self._fixed.take(seconds):
                return False
            accepted(self._fixed)
        for values in self._values.values():
            if not values.take(seconds):
                return False
        self._end()
        self._require_whole()
        return True

    def _require_whole(self) -> None:
        jobs = [*([] if self._fixed is None else [self._fixed]), *self._values.values()]
        for job in jobs:
            if (failure := job.failure) is not None:
                why = os.strerror(failure.error) if failure.error else "its file was truncated"
                raise CorruptSegmentError(
                    f"segment {self._named(failure.index)} can't be read any more ({why}): "
                    "run cache.verify(), and look at the disk"
                )

    def go_on(self) -> None:
        """Begin second parts whose first part has ended."""
        if self._fixed is not None:
            self._fixed.go_on()
        for values in self._values.values():
            values.go_on()

    def wait(self) -> Gather:
        """Wait for its end. Returns: itself. Blocks, raises: as `take`; Ctrl-C ends it."""
        try:
            while not self.take(_STEP_SECONDS):
                pass
        except BaseException:
            self.abandon()
            raise
        return self

    def cancel(self) -> None:
        """End it. Idempotent. Blocks: as `engine.Job.cancel`.

        Where the kernel holds a thread longer than that, its memory stays for ever and `then` is not called.
        """
        self._cancel(None)

    def abandon(self) -> None:
        """`cancel`, for one who cannot wait: what the disk holds for longer than a moment ends by itself.

        Nobody may ask anything of it afterwards. Blocks: for a moment.
        """
        if not self._cancel(_MOMENT_SECONDS):
            in_a_thread(self.cancel)

    def _cancel(self, seconds: float | None) -> bool:
        has_ended = self._fixed is None or self._fixed.cancel(seconds)
        for values in self._values.values():
            has_ended &= values.cancel(seconds)
        if has_ended:
            self._end()
        return has_ended

    def _end(self) -> None:
        if self.then is not None:
            self.then()
            self.then = None  # last: where Ctrl-C comes in between, it is called again

    def __del__(self) -> None:
        if self.then is not None:
            self.cancel()

    def values(self) -> dict[str, Column]:
        """Columns of variable length, once it has ended. Raises: CorruptSegmentError: text is not UTF-8."""
        return {name: values.column() for name, values in self._values.items()}

    @property
    def missed(self) -> int:
        """Rows or pages that were not in memory. Valid once it has ended."""
        missed = 0 if self._fixed is None else self._fixed.missed
        return missed + sum(values.missed for values in self._values.values())


class Fetch:
    """Rows that the disk was asked for: a hint, which ends where it is dropped."""

    def __init__(self, jobs: Sequence[engine.Job]) -> None:
        self._jobs = jobs

    def take(self, seconds: float) -> bool:
        """Wait until the disk is asked. Returns: whether it is. Blocks: so long for each column at most."""
        return all(job.take(seconds) for job in self._jobs)

    def abandon(self) -> None:
        """End it, as `Gather.abandon`."""
        held = [job for job in self._jobs if not job.cancel(_MOMENT_SECONDS)]
        self._jobs = ()
        if held:
            in_a_thread(lambda: [job.cancel() for job in held])


class ValuesGather:
    """A column of variable length on its way: first where its values are, then the values."""

    _copy: engine.Job | engine.Read | None = None
    _is_over = False

    def __init__(
        self,
        rows: Rows,
        ids: NDArray[np.int64],
        buffer: int,
        kind: VariableType,
        name: str,
        is_cold: bool,
        drops: bool,
        keep: object = None,
    ) -> None:
        self._kind, self._name = kind, name
        self._is_cold, self._drops = is_cold, drops
        self._found = engine.find_values(rows, ids, buffer, element_bytes(kind), keep, on_disk=is_cold)

    def begin(self) -> None:
        """Begin to bring values, if they are found. Raises: OutsideError: a row is out of range."""
        accepted(self._found)
        self.go_on()

    def go_on(self) -> None:
        found = self._found
        if self._copy is not None:
            self._copy.go_on()
        elif not self._is_over and found.has_ended() and found.refused < 0 and found.damaged < 0:
            self._begin_copy()

    def take(self, seconds: float) -> bool:
        if self._copy is None and not self._is_over:
            if not self._found.take(seconds):
                return False
            self._begin_copy()
        return self._copy is None or self._copy.take(seconds)

    def _begin_copy(self) -> None:
        accepted(self._found)
        if self._found.failure is not None:  # which `Gather` tells
            self._is_over = True
            return
        if self._found.damaged >= 0:
            raise CorruptSegmentError(
                f"the offsets of column {self._name!r} point out of their file, so its bytes were altered "
                "after it was opened: run cache.verify()"
            )
        self._data = aligned(int(self._found.offsets[-1]))
        if self._is_cold:
            self._copy = engine.read_values(self._found, self._data, drops=self._drops)
        else:
            self._copy = engine.copy_values(self._found, self._data)

    def cancel(self, seconds: float | None = None) -> bool:
        self._is_over = True  # first: its offsets may be half found
        return (self._copy is None or self._copy.cancel(seconds)) & self._found.cancel(seconds)

    @property
    def missed(self) -> int:
        return self._found.missed + (0 if self._copy is None else self._copy.missed)

    @property
    def failure(self) -> engine.Failure | None:
        return self._found.failure or (None if self._copy is None else self._copy.failure)

    def column(self) -> Column:
        kind, ends = self._kind, self._found.offsets
        if not isinstance(kind, Ragged):
            return to_column(kind, Values(self._data, ends))
        items = self._data.view(kind.numpy_dtype).reshape(-1, *kind.inner_shape)
        return Values(items, ends // kind.item_bytes)


def in_a_thread(function: Callable[[], object]) -> None:
    """Have a thread of its own call it; this one, where none can be started."""
    try:
        _thread.start_new_thread(function, ())
    except RuntimeError:
        function()


def accepted(job: engine.Job | engine.Read) -> None:
    """Raise if a job was refused. Raises: OutsideError: a row is out of range."""
    if job.refused >= 0:
        raise OutsideError(job.refused)
