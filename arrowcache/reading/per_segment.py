"""Per segment: one value for each segment of a loader's snapshots: a mask, weights or lengths of its rows.

`PerSegmentCache` makes the values of new segments when a snapshot has some. Its kinds differ in how they make
them, and in how long a value holds:

    PythonFunction  a user's function of the columns of one segment. It may look at what changes elsewhere, so
                    it is called again for each epoch and segment. The columns that it read are kept.
    StoredFunction  a `pyarrow.compute` expression, or a column. It reads no state, so a value holds while its
                    segment is there; with annotations, until there are newer ones.
    Lengths         of one column. They hold while their segment is there.

Memory: 1 byte a row of a mask, 8 of weights, 4 of lengths. Columns that functions read take up to a sixteenth
of the memory, or of what limits leave of it; those that were read first stay.
"""

from __future__ import annotations

import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from arrowcache import linux
from arrowcache.arrow.expression import (
    REPLACE_IT,
    otherwise,
    reason_of,
    require_expression,
    shown,
    table_function,
)
from arrowcache.arrow.schema import RESERVED_NAMES
from arrowcache.errors import called
from arrowcache.lifetimes import cached_property
from arrowcache.limits import Limits
from arrowcache.proc import memory_bytes
from arrowcache.reading.columns import ColumnData, Values, column_bytes
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.notes_log import VALUES, NotesLog
from arrowcache.storage.row_ids import NumberedRows, RowId
from arrowcache.storage.store import Store
from arrowcache.units import did_you_mean

if TYPE_CHECKING:
    from pyarrow.compute import Expression

    from arrowcache.reading.snapshot import Snapshot

_SEQ, _ROW, _AGE = RESERVED_NAMES
_ITEM_BYTES = 64  # of a text or bytes in a list, beside its characters
_LENGTHS_AT_ONCE = 1 << 20
_MAX_LENGTH = (1 << 31) - 1  # what is longer is longer than any budget

T = TypeVar("T")


class PerSegmentCache(ABC, Generic[T]):
    """The values of one loader's segments, by their numbers. One thread at a time asks.

    It keeps those of the segments of the last snapshot.
    """

    #: True if values are made of annotations. None: that is known once a value was made.
    reads_notes: bool | None = False
    #: True if the same rows have the same values at any time, in any process, while annotations stay.
    is_repeatable = True

    def __init__(self) -> None:
        self._known: dict[int, T] = {}

    def of(self, snapshot: Snapshot) -> list[T]:
        """Return the value of each segment of a snapshot, oldest first. All segments are mapped.

        Blocks: while columns of new segments are read. Raises: as the function that makes the values.
        """
        try:
            for _ in self.ahead(snapshot):
                pass
            return [self._known[seq] for seq in snapshot.seqs.tolist()]
        finally:
            self.forget()

    @abstractmethod
    def ahead(self, snapshot: Snapshot) -> Iterator[None]:
        """Make the values that the next `of` returns, a part of the work a `next`."""

    def forget(self) -> None:
        """Drop values that hold for one epoch alone."""

    def _fill(
        self, snapshot: Snapshot, make: Callable[[range], Iterable[T]], rows_at_once: int
    ) -> Iterator[None]:
        """Make the values that are not known, of about so many rows a `next`.

        Args:
            make: gives the value of each segment of a run of the snapshot's segments.
        """
        seqs = snapshot.seqs.tolist()
        self._known = {seq: self._known[seq] for seq in seqs if seq in self._known}
        for run in _unknown_runs(snapshot, self._known, rows_at_once):
            for seq, value in zip(seqs[run.start : run.stop], make(run), strict=True):
                self._known[seq] = value
            yield


def _unknown_runs(snapshot: Snapshot, known: Mapping[int, object], rows_at_once: int) -> Iterator[range]:
    """Yield runs of segments that are not known, of about so many rows at most."""
    first = 0
    for index, seq in enumerate(snapshot.seqs.tolist()):
        is_known = seq in known
        if is_known or snapshot.rows_before(index) - snapshot.rows_before(first) >= rows_at_once:
            if index > first:
                yield range(first, index)
            first = index + is_known
    if first < len(snapshot.segments):
        yield range(first, len(snapshot.segments))


def _span(snapshot: Snapshot, run: range) -> tuple[int, int]:
    """The first row of a run of segments, and the one behind its last."""
    return snapshot.rows_before(run.start), snapshot.rows_before(run.stop)


def _spans_within(snapshot: Snapshot, run: range) -> Iterator[slice]:
    """The rows of each segment of a run, among the rows of the run."""
    first = snapshot.rows_before(run.start)
    starts = [snapshot.rows_before(index) - first for index in range(run.start, run.stop + 1)]
    return (slice(*span) for span in pairwise(starts))


def row_at(snapshot: Snapshot, number: int) -> RowId:
    """Return the id of a row of a snapshot, by its number there."""
    found = snapshot.locate(np.array([number]))
    return RowId(int(found[_SEQ][0]), int(found[_ROW][0]))


# lengths


class Lengths(PerSegmentCache[NDArray[np.int32]]):
    """The length of each row, as one column tells it.

    Of a ragged column the offsets are read, which are 4 bytes a row, else the column itself.

    Args:
        max_tokens: the most that a row may have. None: any number.
    """

    def __init__(self, column: str, max_tokens: int | None = None) -> None:
        super().__init__()
        self._column, self._max_tokens = column, max_tokens

    def of_selected(self, snapshot: Snapshot) -> NDArray[np.int32]:
        """Return the lengths of a snapshot's selected rows: (n,).

        Blocks: while those of new segments come from the disk.
        Raises: ValueError: a row has more than `max_tokens`, or less than none. As `Snapshot.gather`.
        """
        found = np.concatenate([np.empty(0, np.int32), *self.of(snapshot)])
        lengths = snapshot.selected.values_of(found)
        self._require_fit(snapshot, lengths)
        return lengths

    def ahead(self, snapshot: Snapshot) -> Iterator[None]:
        def lengths_of(run: range) -> Iterator[NDArray[np.int32]]:
            read = snapshot.lengths(*_span(snapshot, run), self._column)
            lengths = read.clip(-_MAX_LENGTH, _MAX_LENGTH).astype(np.int32)
            return (lengths[span] for span in _spans_within(snapshot, run))

        return self._fill(snapshot, lengths_of, _LENGTHS_AT_ONCE)

    def _require_fit(self, snapshot: Snapshot, lengths: NDArray[np.int32]) -> None:
        tokens = self._max_tokens
        if lengths.min(initial=0) < 0:
            row = self._named(snapshot, lengths.argmin())
            raise ValueError(f"{row} has length {lengths.min()} in {self._column!r}: a length is at least 0")
        if tokens is not None and lengths.max(initial=0) > tokens:
            row = self._named(snapshot, lengths.argmax())
            raise ValueError(
                f"{row} has length {lengths.max()} in {self._column!r}, more than batch_tokens={tokens}: "
                "raise batch_tokens, have samplers cut such rows, or leave the row out with cache.exclude()"
            )

    def _named(self, snapshot: Snapshot, number: np.intp) -> str:
        row = row_at(snapshot, int(snapshot.selected.ids(np.array([number]))[0]))
        return f"row {row.row} of segment {row.seq}"


# functions and expressions


class StoredFunction(PerSegmentCache[T]):
    """A function of stored columns, ids and annotations alone, so that its values can be kept.

    Args:
        names: of what it reads.
        function: gives the results for rows, which can be sliced, of their columns by name: arrays, or lists.
        checked: makes the value of a segment from the results for its rows, or raises.
        text, argument: what the argument that the function is says, and its name, for messages.
        read: has the columns that it reads, from then on. None: they are read, and dropped.
    """

    def __init__(
        self,
        store: Store,
        names: Sequence[str],
        function: Callable[[dict[str, Any]], Any],
        checked: Callable[[Any, SegmentInfo], T],
        text: str = "",
        argument: str = "",
        read: ReadColumns | None = None,
    ) -> None:
        super().__init__()
        self._notes, schema = NotesLog.of(store), store.settings.schema
        self._function, self._checked, self._text, self._argument = function, checked, text, argument
        self.names, self._read = names, read
        self._columns = [name for name in names if name in schema]
        self._ids = [name for name in names if name not in schema and name in RESERVED_NAMES]
        self._noted = [name for name in names if name not in schema and name not in RESERVED_NAMES]
        self.reads_notes, self.is_repeatable = bool(self._noted), _AGE not in self._ids
        self._version: object = None  # of the annotations

    @classmethod
    def of_expression(
        cls,
        store: Store,
        expression: Expression,
        argument: str,
        expect: Sequence[str],
        checked: Callable[[Any, SegmentInfo], T],
        *,
        fits: Callable[[pa.DataType], bool],
        wanted: str,
        read: ReadColumns | None = None,
    ) -> StoredFunction[T]:
        """Return the function that an expression is.

        Args:
            argument: "rows", "weights" or "where".
            expect: names of annotations that are only to come.
            fits: tells whether the result may be of a type.
            wanted: the end of the message if it may not: the result that is wanted, and the way to it.
            read: as of the class.
        Raises: ValueError: as `require_expression`; or its result is of another type.
        """
        schema, notes = store.settings.schema, NotesLog.of(store)
        used, kind = require_expression(expression, argument, schema, notes.names(expect))
        text = f"{argument}={shown(expression)}"
        if not fits(kind):
            raise ValueError(f"{text} gives {kind}, not {wanted}")
        return cls(store, used, table_function(expression, schema), checked, text, argument, read)

    def ahead(self, snapshot: Snapshot) -> Iterator[None]:
        """Make the values that are not known, of some hundred thousand rows a `next`.

        Raises: ValueError: Arrow cannot evaluate the expression for a row, which the message names.
        """
        annotated = AnnotatedRows(self._notes, snapshot, self._noted)
        version = annotated.version if self._noted else None
        if version != self._version:
            self._known, self._version = {}, version

        def evaluate(run: range) -> Iterator[T]:
            first, last = _span(snapshot, run)
            columns: dict[str, Any] = (
                _read_in_order(snapshot, first, last, self._columns)
                if self._read is None
                else self._read.of(snapshot, run, self._columns)
            )
            results = self._results(snapshot, np.arange(first, last), columns, annotated)
            for index, span in zip(run, _spans_within(snapshot, run), strict=True):
                yield self._checked(results[span], snapshot.segments[index])

        return self._fill(snapshot, evaluate, Limits.current.expression_rows)

    def reads(self, segments: Iterable[SegmentInfo]) -> bool:
        """True if columns of some of these segments are yet to be read."""
        read = self._read
        return read is None or any(read.get(s.seq, name) is None for s in segments for name in self._columns)

    def at(self, snapshot: Snapshot, ids: NDArray[np.int64]) -> Any:
        """Return the results for rows (n,) of a snapshot, unchecked. Nothing is kept. Raises: as `ahead`."""
        columns = snapshot.gather(ids, self._columns) if self._columns else {}
        return self._results(snapshot, ids, columns, AnnotatedRows(self._notes, snapshot, self._noted))

    def _results(
        self, snapshot: Snapshot, ids: NDArray[np.int64], columns: dict[str, Any], annotated: AnnotatedRows
    ) -> Any:
        located = snapshot.locate(ids) if self._ids else {}
        columns |= {name: located[name] for name in self._ids}
        columns |= {name: annotated.values(name)[ids] for name in self._noted}
        try:
            return self._function(columns)
        except pa.ArrowException as error:
            place, why = self._failing(columns, len(ids), reason_of(error))
            raise ValueError(
                f"{self._text} cannot be evaluated for row {row_at(snapshot, int(ids[place]))}: {why}; "
                f"{REPLACE_IT}, or {otherwise(self._argument)}"
            ) from None

    def _failing(self, columns: dict[str, Any], rows: int, why: str) -> tuple[int, str]:
        """Return the first of some rows for which the function fails, as it does for all, and why."""
        first, last = 0, rows - 1
        while first < last:
            middle = (first + last) // 2
            try:
                self._function({name: values[first : middle + 1] for name, values in columns.items()})
                first = middle + 1
            except pa.ArrowException as error:
                last, why = middle, reason_of(error)
        return first, why

    def forget(self) -> None:
        if _AGE in self._ids:
            self._known = {}


class PythonFunction(PerSegmentCache[T]):
    """A Python function of the columns of one segment.

    Args:
        argument: "rows" or "weights".
        checked: makes the value of a segment from the function's result, or raises.
        expect: names of annotations that are only to come.
    """

    reads_notes: bool | None = None
    is_repeatable = False

    def __init__(
        self,
        store: Store,
        function: Callable[[Mapping[str, Any]], object],
        argument: str,
        checked: Callable[[Any, SegmentInfo], T],
        expect: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._notes, self._argument, self._expect = NotesLog.of(store), argument, expect
        self._function, self._checked = function, checked
        self._read = ReadColumns()

    def ahead(self, snapshot: Snapshot) -> Iterator[None]:
        """Make the values that the next `of` returns, one segment a `next`."""
        annotated = AnnotatedRows(self._notes, snapshot, self._expect)
        self._read.keep(snapshot.seqs.tolist())

        def ask(run: range) -> Iterator[T]:
            for index in run:
                columns = RowColumns(snapshot, index, annotated, self._read)
                result = called(f"the function of {self._argument}=", self._function, columns)
                yield self._checked(result, snapshot.segments[index])
                self.reads_notes = bool(self.reads_notes) or columns.reads_notes

        return self._fill(snapshot, ask, 1)

    def forget(self) -> None:
        self._known = {}


class AnnotatedRows:
    """The annotations of a snapshot's rows, those of this process included. Read when they are asked for.

    Args:
        expect: names that are only to come: no row has a value yet.
    """

    def __init__(self, notes: NotesLog, snapshot: Snapshot, expect: Sequence[str] = ()) -> None:
        self._notes, self._rows = notes, NumberedRows.of_counts(snapshot.seqs, snapshot.segment_rows)
        self._expect = expect
        self._known: dict[str, NDArray[np.float64]] = {}

    @cached_property
    def version(self) -> object:
        """A value that changes with each annotation."""
        self._notes.flush_or_warn()
        return self._notes.files(VALUES)

    @cached_property
    def names(self) -> list[str]:
        assert self.version is not None
        return self._notes.names(self._expect)

    def values(self, name: str) -> NDArray[np.float64]:
        """The values of a name: (rows,), NaN where none is."""
        if name not in self._known:
            self._known[name] = self._notes.values(self._rows, name)
        return self._known[name]


class RowColumns(Mapping[str, Any]):
    """Columns of one segment's rows, by name: as a batch has them with ids; annotations by their name.

    A column is read when it is asked for. It is a copy, which the function may change. An annotation is NaN
    where none is.

    Args:
        index: of the segment in the snapshot.
        read: columns that were read before.
    """

    def __init__(self, snapshot: Snapshot, index: int, annotated: AnnotatedRows, read: ReadColumns) -> None:
        self._snapshot, self._annotated, self._read = snapshot, annotated, read
        self._seq = snapshot.segments[index].seq
        self._first, self._last = _span(snapshot, range(index, index + 1))
        self._known: dict[str, Any] = {}
        self.reads_notes = False

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            self._known[name] = self._column(name)
        return self._known[name]

    def _column(self, name: str) -> Any:
        if name in RESERVED_NAMES:
            return self._snapshot.locate(np.arange(self._first, self._last))[name]
        if name in self._snapshot.columns:
            found = self._read.get(self._seq, name)
            if found is None:
                found = _read_in_order(self._snapshot, self._first, self._last, [name])[name]
                if not self._read.put(self._seq, name, found):
                    return found
            return _copied(found)
        names = self._names()
        if name in self._annotated.names:
            return self._annotated.values(name)[self._first : self._last].copy()
        raise KeyError(
            f"rows have no column {name!r}, and cache.annotate() noted no value of that name: "
            f"{did_you_mean(name, names)}there are {', '.join(names)}; pass expect={name!r} if it is to come"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> list[str]:
        self.reads_notes = True
        return [*self._snapshot.columns, *RESERVED_NAMES, *self._annotated.names]


class ReadColumns:
    """Columns of segments that functions have read, as long as they fit into a share of the memory."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, tuple[ColumnData, int]]] = {}  # by segment and name, with its bytes
        self._max_bytes, self._nbytes = int(memory_bytes() * Limits.current.function_memory), 0

    def get(self, seq: int, name: str) -> ColumnData | None:
        found = self._known.get(seq, {}).get(name)
        return None if found is None else found[0]

    def of(self, snapshot: Snapshot, run: range, names: Sequence[str]) -> dict[str, ColumnData]:
        """Return columns of a run of a snapshot's segments. Numbers that had to be read are kept."""
        seqs, columns = snapshot.seqs[run.start : run.stop].tolist(), dict[str, ColumnData]()
        for name in names:
            known = [self.get(seq, name) for seq in seqs]
            if all(isinstance(each, np.ndarray) for each in known):
                columns[name] = np.concatenate(known)  # type: ignore[arg-type]
        missing = [name for name in names if name not in columns]
        for name, values in _read_in_order(snapshot, *_span(snapshot, run), missing).items():
            columns[name] = values
            if isinstance(values, np.ndarray):
                for seq, span in zip(seqs, _spans_within(snapshot, run), strict=True):
                    if self.get(seq, name) is None:
                        self.put(seq, name, values[span].copy())
        return columns

    def put(self, seq: int, name: str, values: ColumnData) -> bool:
        """Keep a column. Returns: False: there is no room."""
        nbytes = column_bytes(values)
        if isinstance(values, list):
            nbytes += _ITEM_BYTES * len(values)
        if isinstance(values, Values):
            nbytes += values.offsets.nbytes
        if self._nbytes + nbytes > min(self._max_bytes, self._limited_bytes()):
            return False
        self._nbytes += nbytes
        self._known.setdefault(seq, {})[name] = values, nbytes
        return True

    def _limited_bytes(self) -> int:
        """The share of what limits of addresses and data leave to it, with what it has."""
        left = [linux.left_bytes(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
        allowed = [max(0, each + self._nbytes) for each in left if each is not None]
        return int(min(allowed) * Limits.current.function_memory) if allowed else self._max_bytes

    def keep(self, seqs: Sequence[int]) -> None:
        """Drop all but these segments."""
        for seq in self._known.keys() - {*seqs}:
            self._nbytes -= sum(nbytes for _, nbytes in self._known.pop(seq).values())


def _read_in_order(snapshot: Snapshot, first: int, last: int, names: Sequence[str]) -> dict[str, ColumnData]:
    """Return columns of rows first..last-1. The disk is asked for them at once, not page by page."""
    if not names:
        return {}
    snapshot.fetch(first, last, names).wait()
    return snapshot.gather(np.arange(first, last), names)


def _copied(values: ColumnData) -> ColumnData:
    return Values(values.data.copy(), values.offsets.copy()) if isinstance(values, Values) else values.copy()
