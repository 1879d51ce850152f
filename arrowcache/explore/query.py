"""Query: SQL over a cache's mapped files, by DuckDB.

DuckDB reads the mapped Arrow columns in place, and of those only which the query names: a group-by over
labels touches no page of the images beside them. What Arrow stores in another type than it stands for is
put right by a view, where it costs nothing unless it is asked for.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa

from arrowcache.arrow.schema import RESERVED_NAMES, FieldType, Ragged, Schema, Tensor, Timestamp
from arrowcache.explore.columns import (
    AnyCache,
    NotedRows,
    buffers_of,
    elements,
    has_axes,
    keeps_nothing,
    nested,
)
from arrowcache.explore.frames import RowsFrame
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.mapping import will_need, will_read_on
from arrowcache.storage.recovery import store_of
from arrowcache.storage.row_ids import ID_COLUMNS
from arrowcache.units import require_text

TABLE = "cache"
FILES = "_cache_files"
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",  # no file is read or written, no extension loaded
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",  # a table is never a variable of the caller's
}
_HALVES = """
create temp macro _bfloat16(bits) as (bits::uinteger << 16)::bit::float;
create temp macro _float16(bits) as _bfloat16((bits & 32768) | 16256) * case
    when (bits & 31744) < 31744 then ((bits & 32767)::uinteger << 13)::bit::float * pow(2, 112)::float
    when (bits & 1023) = 0 then 'inf'::float else 'nan'::float
end;
"""
_OF_ELEMENTS = {
    "t_mean": "list_avg({0})",
    "t_min": "list_min({0})",
    "t_max": "list_max({0})",
    "t_std": "list_stddev_pop({0})",
    "t_norm": "sqrt(list_inner_product({0}::double[], {0}::double[]))",
}
_MEANT = {"avg": "t_mean", "mean": "t_mean", "min": "t_min", "max": "t_max"}
_MEANT |= dict.fromkeys(("std", "stddev", "stddev_pop", "stddev_samp"), "t_std")
_FOR_NUMBERS = {*_MEANT, "sum", "median", "mode", "abs", "sqrt", *_OF_ELEMENTS}
_MAX_NAMED = 20
_SMALL_BYTES = 4 << 20
_INTERRUPT_SECONDS = 0.05
R = TypeVar("R")


@keeps_nothing
def sql(cache: AnyCache, query: str) -> pd.DataFrame:
    """Ask DuckDB, in its SQL, about a cache's rows; the table is named `cache`.

    Scalars, text and bytes are columns of DuckDB's types, timestamps without a time zone (UTC), NaT as NULL;
    float16 and bfloat16 are FLOAT. A tensor is an ARRAY of its shape, nested: `image[1][2]`; a ragged column
    is a LIST; a complex number is an ARRAY of two. SQL does not tell "label" from "Label": where a cache has
    both, the second is "Label_1". The query sees no file, no variable and no network.

    What was noted of rows are columns, too: `_excluded`, `_reason` (NULL where it is not), `_tags` (a list:
    `list_contains(_tags, 'hard')`), and annotations by their names, NULL where none is:
    `select * from cache order by loss desc limit 50`.

    Each row also has its id, `_seq` and `_row`, as in `to_pandas`: `select *` begins with them, and
    `rows`, `gallery` and all that takes ids take a result that has both. Not named, they cost nothing.

    Of the elements of a tensor, or of a row of a ragged column, these are one number:

        select avg(t_mean(image)) from cache                    the mean of all pixels
        select _seq, _row from cache where t_min(image) < 0     the images with a negative one
        select _seq, _row, image from cache order by t_max(image) desc limit 5
        select _seq, _row from cache where t_std(image) = 0     the population's: images all of one color
        select label, max(t_norm(signal)) from cache group by label      the square root of the sum of squares

    bool counts as 0 and 1. NaN is the largest number, and of others the mean is NaN; of no element all are
    NULL, but the norm, 0. Of complex elements only the norm is one; the others are refused.

    Returns: the result, in memory; a nested array as an ndarray of its shape, a picture in a notebook.
    Blocks: while it runs; Ctrl-C ends it. Until then every segment is leased: of a full cache samplers wait
        so long. Pages of columns that the query does not name are not read, but for the few that say where
        each column lies.
    Raises: ValueError: the query fails; says why, in a sentence, with the names that come near.
        CorruptSegmentError: a damaged segment, which was quarantined.
    """
    require_text(query, "the query")
    store = store_of(cache)
    schema = store.settings.schema
    names = _told_apart(schema)
    with connect() as connection:
        asked = _Asked(connection, query)
        asked.require_numbers(dict(zip(names, schema.values(), strict=True)))
        with Snapshot.take(store) as snapshot:
            noted = NotedRows(store, snapshot)
            shown = [
                name for name in noted.kinds if (asked.names_all and name in noted.names) or asked.names(name)
            ]
            notes = {name: noted.arrow(name) for name in shown}
            batches = create_view(connection, snapshot, schema, list(schema), notes=notes)
        for name in schema:
            if asked.names_all or asked.names(name):  # of the others it would read page by page, and be right
                for batch in batches:
                    announce(batch.column(name))
        view = connection.table(TABLE)
        types = dict(
            zip(view.columns[len(ID_COLUMNS) :], map(str, view.types[len(ID_COLUMNS) :]), strict=True)
        )
        if any(map(asked.names, _OF_ELEMENTS)):
            connection.execute(_macros(types, schema))
        try:
            result = interruptible(connection, lambda: connection.sql(query))
            if result is None:
                raise ValueError(f"the query has no result: ask for one, as in select * from {TABLE} limit 5")
            shapes = {
                name: tuple(int(size) for size in reversed(re.findall(r"\d+", match[1])))
                for name, kind in zip(result.columns, result.types, strict=True)
                if (match := re.search(r"((?:\[\d+\])+)\[\d*\]$", str(kind)))
            }
            found = dict(zip(result.columns, map(str, result.types), strict=True))
            frame = RowsFrame(interruptible(connection, result.df))
        except duckdb.Error as error:
            raise ValueError(_sentence(str(error), [*ID_COLUMNS, *names, *noted.kinds])) from None
    for name, shape in shapes.items():
        if list(frame.columns).count(name) == 1:
            frame[name] = pd.Series([_stacked(value, shape) for value in frame[name]], dtype=object)
    frame.kinds = {
        name: kind
        for name, kind in zip(names, schema.values(), strict=True)
        if found.get(name) == types[name] and not _is_complex(kind)  # which is pairs here
    }
    return frame


def connect() -> duckdb.DuckDBPyConnection:
    """A database in memory that reaches no file, no network and no variable."""
    connection = duckdb.connect(config=_CONFIG)
    connection.execute(_HALVES)
    return connection


def interruptible(connection: duckdb.DuckDBPyConnection, work: Callable[[], R]) -> R:
    """What DuckDB's work gives. Ctrl-C ends it: the main thread hears of that only where it does no work.

    Other threads never hear of it: they work themselves, as does the main thread where none can be started,
    at the interpreter's end. Executors take no work from the main thread's end on.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    working = Future[R]()

    def run() -> None:
        if working.set_running_or_notify_cancel():
            try:
                working.set_result(work())
            except BaseException as error:  # noqa: BLE001  # whoever waits for it gets it
                working.set_exception(error)

    try:
        try:
            threading.Thread(target=run, name="arrowcache-query", daemon=True).start()
        except RuntimeError:
            run()
        return working.result()
    finally:
        while not (working.done() or working.cancel()):  # DuckDB may not have begun
            with suppress(KeyboardInterrupt):  # another: what works must not lose its connection
                connection.interrupt()
                wait([working], _INTERRUPT_SECONDS)


def create_view(
    connection: duckdb.DuckDBPyConnection,
    snapshot: Snapshot,
    schema: Schema,
    columns: Sequence[str],
    view: str = TABLE,
    notes: Mapping[str, pa.Array] | None = None,
) -> list[pa.RecordBatch]:
    """Make a view of a snapshot's rows: `_seq`, `_row`, and these columns in types that DuckDB knows.

    Returns: what it reads. Its segments stay leased until the connection knows neither the view nor `FILES`.
    """
    batches = list(snapshot.record_batches(columns))
    names = [name for name, own in zip(_told_apart(schema), schema, strict=True) if own in columns]
    read = pa.Table.from_batches(batches) if batches else snapshot.table(columns)
    noted = _told_apart({**dict.fromkeys(_told_apart(schema)), **(notes or {})})[len(schema) :]
    table = _ids(snapshot)  # first: a table has the length of its first column
    values = [*_readable(read, schema, names).columns, *(notes or {}).values()]
    for name, column in zip([*names, *noted], values, strict=True):
        table = table.append_column(name, column)
    connection.register(FILES, table)
    shown = ["", *(_column(name, schema[own]) for name, own in zip(names, read.column_names, strict=True))]
    shown += map(_quoted, noted)
    ids = '"_seq", "_row"::bigint as "_row"'
    connection.execute(f'create temp view {view} as select {ids}{", ".join(shown)} from "{FILES}"')
    return batches


def _ids(snapshot: Snapshot) -> pa.Table:
    """`_seq`, a run of one number a segment, and `_row`, which counts by one array that all share."""
    rows = snapshot.segment_rows
    ends, seqs = pa.array(np.cumsum(rows), pa.int64()), pa.array(snapshot.seqs, pa.int64())
    count = pa.array(np.arange(rows.max(initial=0), dtype=np.int32))
    counts = pa.chunked_array([count.slice(0, size) for size in rows.tolist()], pa.int32())
    return pa.table([pa.RunEndEncodedArray.from_arrays(ends, seqs), counts], names=list(ID_COLUMNS))


def _macros(types: Mapping[str, str], schema: Schema) -> str:
    """The macros of elements, for each type of number that a column has and as many axes, and for doubles."""
    kinds = zip(types.values(), schema.values(), strict=False)  # notes are behind them
    shown = [kind for kind, logical in kinds if isinstance(logical, Tensor | Ragged)]
    deepest = max((kind.count("[") for kind in shown), default=1)
    bases = sorted({"DOUBLE", *(kind.partition("[")[0] for kind in shown)})
    made = []
    for name, of_list in _OF_ELEMENTS.items():
        overloads = []
        for base in bases:
            for depth in range(deepest + 1):
                flat = "x" if depth else "[x]"
                for _ in range(depth - 1):
                    flat = f"flatten({flat})"
                if base == "BOOLEAN":
                    flat += "::utinyint[]"
                overloads.append(f"(x {base}{'[]' * depth}) as {of_list.format(flat)}")
        made.append(f"create temp macro {name}{', '.join(overloads)};")
    return "".join(made)


class _Asked:
    """What a query names, as DuckDB parses it.

    Where that does not tell, as of `pivot`, it is as of `select *`, and whatever is a word of its text.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, query: str) -> None:
        self._query, self._parts = query.encode(), list[dict[str, Any]]()
        found = connection.execute("select json_serialize_sql($1, skip_default := true)", [query]).fetchall()
        try:
            is_unknown = json.loads(found[0][0], object_hook=self._take)["error"]
        except RecursionError:  # of hundreds of operators, each in the one before
            is_unknown = True
        self.names_all = is_unknown or any(part.get("class") == "STAR" for part in self._parts)
        self._words = {word.lower() for part in self._parts for word in _texts(part)}
        if is_unknown:
            self._words |= set(re.findall(r"\w+", query.lower()))

    def _take(self, part: dict[str, Any]) -> dict[str, Any]:
        self._parts.append(part)
        return part

    def names(self, name: str) -> bool:
        """Whether it seems to name this one, or one like it that has a number."""
        return any(word.startswith(name.lower()) for word in self._words)

    def require_numbers(self, kinds: Mapping[str, FieldType]) -> None:
        """Refuse what is asked of tensors as if they were one number, which DuckDB would compare as lists.

        Raises: ValueError: names the function, the column, and what was meant.
        """
        given = {
            _folded(word)
            for part in self._parts
            for word in _texts(part, "alias", "aliases", "column_name_alias")
            if _folded(word) != _column_of(part, _FOR_NUMBERS - {*_OF_ELEMENTS})  # max(image) as image
        }
        columns = {_folded(name): (name, kind) for name, kind in kinds.items() if _folded(name) not in given}
        for part in self._parts:
            if (asked := _column_of(part, _FOR_NUMBERS)) in columns:
                named = part["arguments"][0]["expression"]
                start: int = named.get("query_location", 0)
                column = self._query[start : start + named["query_location_length"]].decode()
                _require_number(part["function_name"].lower(), column, *columns[asked])


def _column_of(part: Mapping[str, Any], functions: Collection[str]) -> bytes | None:
    """The column, folded, of which a part of a parsed query asks one of these functions."""
    match part:
        case {
            "function_name": function,
            "arguments": [{"expression": {"class": "COLUMN_REF", "column_names": [*_, last]}}],
        } if function.lower() in functions:
            return _folded(last)
    return None


def _texts(part: Mapping[str, Any], *keys: str) -> Iterator[str]:
    """The texts in a part of a parsed query, under these keys, or all."""
    for key in keys or part:
        value = part.get(key)
        yield from (word for word in (value if isinstance(value, list) else [value]) if isinstance(word, str))


def _require_number(function: str, column: str, name: str, kind: FieldType) -> None:
    if not has_axes(kind) and not _is_complex(kind):
        return
    if function not in _OF_ELEMENTS:
        meant = _MEANT.get(function)
        ways = f"{meant}({column})" if meant else f"{', '.join(_OF_ELEMENTS)} of it"
        raise ValueError(
            f"{function}({column}) is of one number a row, and {name!r} has many a row: "
            f"of its elements there {'is' if meant else 'are'} {ways}, such as in "
            f"select avg({meant or 't_mean'}({column})) from {TABLE}"
        )
    if _is_complex(kind) and function != "t_norm":
        raise ValueError(
            f"{function}({column}) would mix real and imaginary parts, since {name!r} is complex: "
            f"t_norm({column}) is its norm, and {column}[...][1] the real part of an element"
        )


def _is_complex(kind: FieldType | None) -> bool:
    return isinstance(kind, Tensor | Ragged) and kind.dtype.startswith("complex")


def announce(column: pa.Array) -> None:
    """Have the disk begin to read a small column, and read on where a large one is touched."""
    for buffer in buffers_of(column):
        (will_need if buffer.size < _SMALL_BYTES else will_read_on)(buffer.address, buffer.size)


def _told_apart(schema: Iterable[str]) -> list[str]:
    """The columns' names in SQL, where "a" is "A": the second of such is A_1, or the next that is free.

    The names that ids have come first.
    """
    seen = {_folded(name) for name in RESERVED_NAMES}
    taken = seen | {_folded(name) for name in schema}
    names = []
    for name in schema:
        if _folded(name) in seen:
            numbered = (f"{name}_{at}" for at in itertools.count(1))
            name = next(other for other in numbered if _folded(other) not in taken)
            taken.add(_folded(name))
        seen.add(_folded(name))
        names.append(name)
    return names


def column_in_sql(schema: Schema, name: str) -> str:
    """A column as a query names it, quoted."""
    return _quoted(_told_apart(schema)[list(schema).index(name)])


def _folded(name: str) -> bytes:
    """DuckDB compares names by the case of ASCII letters only."""
    return name.encode().lower()


def _readable(table: pa.Table, schema: Schema, names: Sequence[str]) -> pa.Table:
    """The same buffers in types that DuckDB knows: float16 as its bits, tensors as nested lists."""
    columns = [
        pa.chunked_array([_nested(chunk, schema[name]) for chunk in column.chunks])
        for name, column in zip(table.column_names, table.columns, strict=True)
    ]
    return pa.Table.from_arrays(columns, names=list(names))


def _nested(array: pa.Array, kind: FieldType) -> pa.Array:
    if not isinstance(kind, Tensor | Ragged):
        return array
    values = elements(array, kind)
    if values.type == pa.float16():
        values = values.view(pa.uint16())
    return nested(values, array, kind, (*_shape(kind), *[2] * _is_complex(kind)))


def _shape(kind: Tensor | Ragged) -> tuple[int, ...]:
    return kind.shape if isinstance(kind, Tensor) else kind.inner_shape


def _column(name: str, kind: FieldType) -> str:
    """How the view says one column: as it is, or converted from what it is stored as."""
    quoted = _quoted(name)
    if isinstance(kind, Timestamp):  # NaT is less than all
        return f"case when {quoted} >= '-infinity'::timestamp then {quoted} end as {quoted}"
    if not isinstance(kind, Tensor | Ragged):
        return quoted
    shape = _shape(kind)
    sizes = "".join(f"[{size}]" for size in reversed(shape)) + "[]" * isinstance(kind, Ragged)
    if kind.dtype == "bool":
        return f"{quoted}::boolean{sizes} as {quoted}"
    if kind.dtype not in ("float16", "bfloat16"):
        return quoted
    depth = len(shape) + isinstance(kind, Ragged)
    value = f"_{kind.dtype}(x{depth})"
    for level in range(depth, 0, -1):
        value = f"[{value} for x{level} in x{level - 1}]"
    value = value.replace("x0", quoted)
    return f"{value}::float{sizes} as {quoted}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _stacked(value: Any, shape: tuple[int, ...]) -> Any:
    """A nested array, of which pandas gets an array of arrays, as one of (len(value), *shape)."""
    if not isinstance(value, np.ndarray) or not shape or any(part is None for part in value):
        return value
    parts = [_stacked(part, shape[1:]) for part in value]
    return np.stack(parts) if parts else np.empty((0, *shape))


def _sentence(message: str, columns: Sequence[str]) -> str:
    """What DuckDB says in many lines, in one, with the names that may have been meant."""
    lines = message.partition("\n\n")[0].split("\n")
    what = re.sub(r"^[A-Z]\w+( \w+)? Error: ", "", lines[0]).rstrip("!. ")
    hint = (
        f"; {lines[1]}" if lines[1:] and lines[1].startswith(("Did you mean", "Candidate bindings")) else ""
    )
    if re.search(r"'[^']+\([^']*\]", what):  # a function of a nested type
        hint += f"; of the elements of a tensor there are {', '.join(_OF_ELEMENTS)}"
    shown = [*columns[:_MAX_NAMED], *["..."] * (len(columns) > _MAX_NAMED)]
    return f"the query failed: {what}{hint} (the table {TABLE} has the columns {', '.join(shown)})"
