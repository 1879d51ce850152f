"""Row functions: what a user's function or expression says of all rows of a snapshot: a mask, or weights.

A Python function gets the columns of one segment at a time. It is called again for each epoch and segment,
since it may look at what changes elsewhere; its results are not kept. The columns that it read are, up to a
sixteenth of the memory, or of what limits leave of it, those that came first. A `pyarrow.compute` expression
reads no state: its result for a segment is kept while the segment is there, 1 byte a row, or 8 of weights.
With annotations it is kept until there are newer ones.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from arrowcache import linux
from arrowcache.arrow.dtype import dtype_of
from arrowcache.arrow.expression import REPLACE_IT, evaluated, reason_of, shown, type_of
from arrowcache.arrow.schema import RESERVED_NAMES, Binary, FieldType, Schema, String, Tensor, Timestamp
from arrowcache.cgroup import memory_bytes
from arrowcache.lifetimes import cached_property
from arrowcache.limits import Limits
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.values import ColumnData, Values, column_bytes
from arrowcache.storage.annotations import Annotations
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.note_lines import Rows
from arrowcache.storage.notes import VALUES
from arrowcache.storage.row_ids import RowId
from arrowcache.units import did_you_mean

if TYPE_CHECKING:
    from pyarrow.compute import Expression

_SEQ, _ROW, _AGE = RESERVED_NAMES
_IDS = {_SEQ: pa.int64(), _ROW: pa.int64(), _AGE: pa.float64()}
_ITEM_BYTES = 64  # of a text or bytes in a list, beside its characters
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')  # in the words of an expression

T = TypeVar("T")


class RowFunction(Generic[T]):
    """One function or expression of one loader. One thread at a time asks.

    Args:
        checked: makes what is given back of a result for a segment, or raises.
    """

    #: True if it reads annotations; of a function that was not called yet None.
    reads_notes: bool | None = None

    def __init__(self, annotations: Annotations, checked: Callable[[Any, SegmentInfo], T]) -> None:
        self._annotations, self._checked = annotations, checked
        self._found: dict[int, T] = {}  # by segment

    def of(self, snapshot: Snapshot) -> list[T]:
        """Return its result for each segment of a snapshot, oldest first.

        Blocks: while the columns that it asks for are read. Raises: whatever it raises.
        """
        try:
            for _ in self.ahead(snapshot):
                pass
            return [self._found[seq] for seq in snapshot.seqs.tolist()]
        finally:
            self.forget()

    def ahead(self, snapshot: Snapshot) -> Iterator[None]:
        """Ask for the results that the next `of` gives back, a part of the work a `next`."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop what was asked for ahead."""
        raise NotImplementedError


class PythonFunction(RowFunction[T]):
    """A Python function of the columns of one segment.

    Args:
        expected: names of annotations that are only to come.
        shown: the argument that the function is, for messages.
    """

    def __init__(
        self,
        annotations: Annotations,
        function: Callable[[Mapping[str, Any]], object],
        checked: Callable[[Any, SegmentInfo], T],
        expected: Sequence[str] = (),
        shown: str = "",
    ) -> None:
        super().__init__(annotations, checked)
        self._function, self._expected, self._shown = function, expected, shown
        self._read = _ReadColumns()

    def ahead(self, snapshot: Snapshot) -> Iterator[None]:
        """Ask for the results that the next `of` gives back, one segment a `next`."""
        values = SnapshotValues(self._annotations, snapshot, self._expected)
        self._read.keep(snapshot.seqs.tolist())
        for index, segment in enumerate(snapshot.segments):
            if segment.seq not in self._found:
                columns = RowColumns(snapshot, index, values, self._read)
                try:
                    result = self._function(columns)
                except StopIteration as error:
                    raise RuntimeError(
                        f"the function of {self._shown} raised StopIteration, which would end the epoch"
                    ) from error
                self._found[segment.seq] = self._checked(result, segment)
                self.reads_notes = bool(self.reads_notes) or columns.reads_notes
                yield

    def forget(self) -> None:
        self._found = {}


class StoredFunction(RowFunction[T]):
    """A function of stored columns and annotations alone, so that its results can be kept.

    Args:
        names: of the columns and annotations.
        function: gives the results for rows, which can be sliced, of their columns by name: arrays, or lists.
        shown: the argument that the function is, for messages.
    """

    def __init__(
        self,
        annotations: Annotations,
        schema: Schema,
        names: Sequence[str],
        function: Callable[[dict[str, Any]], Any],
        checked: Callable[[Any, SegmentInfo], T],
        shown: str = "",
    ) -> None:
        super().__init__(annotations, checked)
        self._shown = shown
        self._function, self._columns = function, [name for name in names if name in schema]
        self._ids = [name for name in names if name not in schema and name in _IDS]
        self._values = [name for name in names if name not in schema and name not in _IDS]
        self.reads_notes = bool(self._values)
        self._version: object = None  # of the annotations

    def ahead(self, snapshot: Snapshot) -> Iterator[None]:
        """Find the results that are not known, of some hundred thousand rows a `next`.

        Raises: ValueError: Arrow cannot evaluate the expression for a row, which the message names.
        """
        values = SnapshotValues(self._annotations, snapshot, self._values)
        version = values.version if self._values else None
        if version != self._version:
            self._found, self._version = {}, version
        self._found = {seq: self._found[seq] for seq in snapshot.seqs.tolist() if seq in self._found}
        for run in unknown_runs(snapshot, self._found, Limits.current.expression_rows):
            first, last = snapshot.rows_before(run.start), snapshot.rows_before(run.stop)
            ids = np.arange(first, last)
            columns: dict[str, Any] = _read_in_order(snapshot, first, last, self._columns)
            located = snapshot.locate(ids) if self._ids else {}
            columns |= {name: located[name] for name in self._ids}
            columns |= {name: values.of(name)[first:last] for name in self._values}
            try:
                results = self._function(columns)
            except pa.ArrowException as error:
                place, why = self._failing(columns, last - first, reason_of(error))
                where = snapshot.locate(ids[[place]])
                row = RowId(int(where[_SEQ][0]), int(where[_ROW][0]))
                raise ValueError(
                    f"{self._shown} cannot be evaluated for row {row}: {why}; {REPLACE_IT}, or give a Python "
                    "function of columns"
                ) from None
            for index in run:
                start, stop = snapshot.rows_before(index) - first, snapshot.rows_before(index + 1) - first
                segment = snapshot.segments[index]
                self._found[segment.seq] = self._checked(results[start:stop], segment)
            yield

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
            self._found = {}


def unknown_runs(snapshot: Snapshot, known: Mapping[int, object], most_rows: int) -> Iterator[range]:
    """Yield runs of segments that are not known, to be read at once: of about so many rows at most."""
    first = 0
    for index, seq in enumerate(snapshot.seqs.tolist()):
        is_known = seq in known
        if is_known or snapshot.rows_before(index) - snapshot.rows_before(first) >= most_rows:
            if index > first:
                yield range(first, index)
            first = index + is_known
    if first < len(snapshot.segments):
        yield range(first, len(snapshot.segments))


class SnapshotValues:
    """The annotations of a snapshot's rows, those of this process included. Read when they are asked for.

    Args:
        expected: names that are only to come: no row has a value yet.
    """

    def __init__(self, annotations: Annotations, snapshot: Snapshot, expected: Sequence[str] = ()) -> None:
        self._annotations, self._rows = annotations, Rows.of_counts(snapshot.seqs, snapshot.segment_rows)
        self._expected = expected
        self._known: dict[str, NDArray[np.float64]] = {}

    @cached_property
    def version(self) -> object:
        """A value that changes with each annotation."""
        self._annotations.flush_or_warn()
        return self._annotations.notes.version(VALUES)

    @cached_property
    def names(self) -> list[str]:
        assert self.version is not None
        return sorted({*self._annotations.notes.names(), *self._expected})

    def of(self, name: str) -> NDArray[np.float64]:
        """The values of a name: (rows,), NaN where none is."""
        if name not in self._known:
            self._known[name] = self._annotations.notes.values(self._rows, name)
        return self._known[name]


class RowColumns(Mapping[str, Any]):
    """Columns of one segment's rows, by name: as a batch has them with ids; annotations by their name.

    A column is read when it is asked for. It is a copy, which the function may change. An annotation is NaN
    where none is.

    Args:
        index: of the segment in the snapshot.
        read: columns that were read before.
    """

    def __init__(self, snapshot: Snapshot, index: int, values: SnapshotValues, read: _ReadColumns) -> None:
        self._snapshot, self._values, self._read = snapshot, values, read
        self._seq = snapshot.segments[index].seq
        self._ids = np.arange(snapshot.rows_before(index), snapshot.rows_before(index + 1))
        self._known: dict[str, Any] = {}
        self.reads_notes = False

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            self._known[name] = self._column(name)
        return self._known[name]

    def _column(self, name: str) -> Any:
        if name in _IDS:
            return self._snapshot.locate(self._ids)[name]
        if name in self._snapshot.columns:
            found = self._read.get(self._seq, name)
            if found is None:
                first, last = int(self._ids[0]), int(self._ids[-1]) + 1
                found = _read_in_order(self._snapshot, first, last, [name])[name]
                if not self._read.put(self._seq, name, found):
                    return found
            return _copied(found)
        names = self._names()
        if name in self._values.names:
            return self._values.of(name)[self._ids[0] : self._ids[-1] + 1].copy()
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
        return [*self._snapshot.columns, *_IDS, *self._values.names]


class _ReadColumns:
    """Columns of segments that a function has read, as long as they fit into a share of the memory."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, tuple[ColumnData, int]]] = {}  # by segment and name, with its bytes
        self._most_bytes, self._nbytes = int(memory_bytes() * Limits.current.function_memory), 0

    def get(self, seq: int, name: str) -> ColumnData | None:
        found = self._known.get(seq, {}).get(name)
        return None if found is None else found[0]

    def put(self, seq: int, name: str, values: ColumnData) -> bool:
        """Keep a column. Returns: False: there is no room."""
        nbytes = column_bytes(values)
        if isinstance(values, list):
            nbytes += _ITEM_BYTES * len(values)
        if isinstance(values, Values):
            nbytes += values.offsets.nbytes
        if self._nbytes + nbytes > min(self._most_bytes, self._limited_bytes()):
            return False
        self._nbytes += nbytes
        self._known.setdefault(seq, {})[name] = values, nbytes
        return True

    def _limited_bytes(self) -> int:
        """The share of what limits of addresses and data leave to it, with what it has."""
        left = [linux.left_bytes(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
        most = [max(0, each + self._nbytes) for each in left if each is not None]
        return int(min(most) * Limits.current.function_memory) if most else self._most_bytes

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


# expressions


def is_expression(value: object) -> bool:
    """True for an expression of pyarrow.compute. Who made one has imported it."""
    module = sys.modules.get("pyarrow._compute")
    return module is not None and isinstance(value, module.Expression)


def require_expression(
    expression: Expression, what: str, schema: Schema, annotations: Sequence[str]
) -> tuple[list[str], pa.DataType]:
    """Check an expression, by the types that its columns have.

    Args:
        what: "rows" or "weights".
        annotations: the names that there are, or are to come.
    Returns: the names that it reads, at least one, and the type of its result.
    Raises: ValueError: it reads what there is not, or no scalar; it calls `random`, a function of the user,
        or one of several rows; or Arrow cannot evaluate it. The message says why.
    """
    text = _TEXT.sub('""', str(expression))
    for name in _refused_functions():
        if re.search(rf"(?<![\w.]){re.escape(name)}\(", text):
            raise ValueError(
                f"{what}={shown(expression)} calls {name}: an expression may call pyarrow's own functions "
                "of one row, and not random, since its answer is remembered; give a Python function instead"
            )
    if "FieldPath(" in text:
        raise ValueError(
            f"{what}={shown(expression)} reads a column by its number: write pyarrow.compute.field(name)"
        )
    fields = {name: kind for name in schema if (kind := _arrow_type(schema[name])) is not None}
    types = {name: pa.float64() for name in annotations} | _IDS | fields
    result = _type_of(expression, what, types, schema)
    candidates = [name for name in types if name in str(expression)]
    names = []
    for name in candidates:
        try:
            others = [(other, types[other]) for other in candidates if other != name]
            evaluated(expression, pa.schema(others).empty_table())
        except pa.ArrowException:
            names.append(name)
    return names or [_ROW], result


def table_function(expression: Expression, schema: Schema) -> Callable[[dict[str, Any]], pa.Array]:
    """Return the function of columns that an expression is: it gives one value a row, perhaps null.

    An annotation that is missing is null.
    """

    def function(columns: dict[str, Any]) -> pa.Array:
        arrays = {name: _as_arrow(values, schema.get(name)) for name, values in columns.items()}
        found = evaluated(expression, pa.table(arrays)).combine_chunks()
        return found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)

    return function


def _type_of(expression: Expression, what: str, types: dict[str, pa.DataType], schema: Schema) -> pa.DataType:
    try:
        return type_of(expression, pa.schema([*types.items()]))
    except pa.ArrowException as error:
        missing = re.match(r"No match for FieldRef\.Name\((.*)\) in ", str(error), re.DOTALL)
        if missing is None:
            raise ValueError(f"{what}={shown(expression)} cannot be evaluated: {reason_of(error)}") from None
    name = missing[1].split(") in ")[0]
    if (kind := schema.get(name)) is not None:
        raise ValueError(
            f"{what}={shown(expression)} reads {name!r}, which is {kind}: an expression reads columns of "
            "one number, text or time a row, and Arrow has no complex numbers; give a Python function of "
            f"columns, which finds it as columns[{name!r}]"
        )
    raise ValueError(
        f"{what}={shown(expression)} reads {name!r}, neither a column nor an annotation of any row: "
        f"{did_you_mean(name, types)}there are {', '.join(types)}; pass expect={name!r} if rows are to get it"
    )


def _refused_functions() -> list[str]:
    """The functions that an expression may not call: of several rows, of the user's, and `random`."""
    import pyarrow.compute as pc

    registry = pc.function_registry()  # `random` is of no row, so pyarrow.compute has another under its name
    own = {getattr(each, "__arrow_compute_function__", {}).get("name") for each in vars(pc).values()}
    return [
        name
        for name in registry.list_functions()
        if name != "cast" and (name not in own or registry.get_function(name).kind != "scalar")
    ]


def _arrow_type(kind: FieldType) -> pa.DataType | None:
    """The type of a column in an expression, or None: it has none. Small floats are float32, exactly."""
    match kind:
        case Timestamp() | String() | Binary():
            return kind.arrow_type
        case Tensor(dtype, ()) if dtype_of(dtype).kind != "c":
            if dtype_of(dtype).kind == "f" and kind.numpy_dtype.itemsize < np.dtype("f4").itemsize:
                return pa.float32()
            return pa.bool_() if dtype == "bool" else pa.from_numpy_dtype(kind.numpy_dtype)
    return None


def _as_arrow(values: Any, kind: FieldType | None) -> pa.Array:
    if kind is None:  # ids have no NaN
        return pa.array(values, from_pandas=True)
    if isinstance(kind, Tensor) and (bits := dtype_of(kind.dtype).bits) is not None:
        values = bits.to_float(values)
    arrow_type = _arrow_type(kind)
    if arrow_type == pa.float32():
        values = values.astype(np.float32, copy=False)
    return pa.array(values, arrow_type)
