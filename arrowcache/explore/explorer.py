"""Explorer: charts of a cache's scalar columns that filter one another, and the rows behind what is brushed.

mosaic-widget draws the charts and sends SQL for what they count. It runs whatever SQL the browser sends, on a
copy of the scalars with the rows' ids, in a database that reaches no file and whose configuration is locked.
The browser asks for everything, for new rows each few seconds as well. There is no thread here, but a kernel
handles messages in a thread and runs cells in another: each call holds the explorer's lock while it uses the
connection, which refuses two at once. Nothing is leased but while rows are copied.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import duckdb
import mosaic_widget
import numpy as np
import traitlets
from numpy.typing import NDArray

from arrowcache.arrow.schema import FieldType, String, Tensor, Timestamp
from arrowcache.cache import Cache
from arrowcache.errors import ArrowCacheError, sentence_of
from arrowcache.explore.frames import RowsFrame, rows
from arrowcache.explore.pictures import large, slice_html
from arrowcache.explore.query import FILES, TABLE, column_in_sql, connect, create_view
from arrowcache.os_errors import explaining
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.recovery import store_of
from arrowcache.storage.row_ids import ID_COLUMNS, row_ids
from arrowcache.units import format_count

_PAGE_ROWS = 8
_RATES = ("sample_rate", "sampling_rate", "rate")  # columns that tell at which rate a signal is heard
_MAX_BARS = 24  # different values that a column with a bar for each may have
_MAX_COUNTED = 100_000  # rows in which the different texts are counted, to see whether they are few
_MAX_CUBES = 64  # tables that mosaic has made for the next moves of a brush
_CUBES = "mosaic"  # their schema, which mosaic makes
_NEW = "_new"
_QUOTED = r"""'(?:[^']|'')*'|"(?:[^"]|"")*\""""  # texts and names in SQL
_MAX_EXACT = 2**53  # of the whole numbers of JavaScript


def open(cache: Cache | str | os.PathLike[str]) -> Explorer:  # noqa: A001  # explore.open, as one says it
    """Explore a cache in a notebook: brush charts, look at the rows behind the brushes, tag or exclude them.

    Each column of one number, one moment or few different texts has a chart, and each brush filters the
    others. A click on a row shows it large. What is published or evicted meanwhile follows within seconds,
    while the charts are in sight. `ids` and `sql` are what is brushed, for the next cell:
    `Loader(cache, 64, rows=explorer.ids)`.

    Args:
        cache: a Cache, or the path of one.
    Blocks: while the scalars are copied into memory: 8 bytes a row, and what they take. Nothing is leased
        afterwards.
    Raises: FileNotFoundError, CacheFormatError: no such cache. CorruptSegmentError: a damaged segment, which
        was quarantined: call it again.
    """
    return Explorer(Cache.open(cache) if isinstance(cache, str | os.PathLike) else cache)


class Explorer(mosaic_widget.MosaicWidget):  # type: ignore[misc]  # mosaic-widget ships no type information
    """The widget that `open` makes. Its memory is given back by `close()`, or the end of the kernel."""

    _esm = "const mosaic = () => {{\n{}\n}};\n{}".format(
        re.sub(
            r"export\s*\{\s*\w+ as default\s*\};?\s*$",
            "return { astToDOM, parseSpec, coordinator };",
            str(mosaic_widget.MosaicWidget._esm),
        ),
        Path(__file__).with_name("explorer.js").read_text(encoding="utf-8"),
    )
    board = traitlets.Dict().tag(sync=True)  # what is shown beside the charts
    detail = traitlets.Dict().tag(sync=True)  # one row, large
    slice = traitlets.Dict().tag(sync=True)  # one slice of one of its columns

    con: Any = None  # until there is one

    def __init__(self, cache: Cache) -> None:
        self._lock = threading.RLock()  # of the connection, and of what is brushed
        self._begin(cache)
        self._version = 0  # of the copy
        self._predicate, self._first = "", 0
        self._row: RowsFrame | None = None  # the one that is shown large
        self._answers = itertools.count()  # what is asked for again is sent again
        connection = connect()
        connection.execute("set preserve_insertion_order = false; set lock_configuration = true")
        super().__init__(con=connection)
        self._follow()
        self._show()

    def _begin(self, cache: Cache) -> None:
        """Take a cache of which nothing is copied yet."""
        self._cache, self._store = cache, store_of(cache)
        self._identity, self._is_new = self._store.identity, True
        self._schema = self._store.settings.schema
        self._columns = [name for name, kind in self._schema.items() if _is_scalar(kind)]
        self._many: set[str] = set()  # columns of which no bar stands for one value
        self._rounded: list[str] = []  # those of numbers that JavaScript does not have, quoted
        self._seqs: set[int] = set()  # the segments whose rows are in the copy

    @property
    def sql(self) -> str:
        """What is brushed, as a query that `explore.sql(cache, ...)` takes, too."""
        brushed = re.sub(
            _QUOTED, lambda it: f"{it[0]}::double" if it[0] in self._rounded else it[0], self._brushed
        )
        return f"select * from {brushed}"

    @property
    def ids(self) -> NDArray[np.int64]:
        """The rows that are brushed, all where none is: (n, 2), `_seq` and `_row` of each.

        Blocks: while another thread's query is at work.
        """
        with self._lock:
            return row_ids(self.con.execute(self._ids).fetchnumpy())

    @property
    def _brushed(self) -> str:
        return f"{TABLE} where {self._predicate}" if self._predicate else TABLE

    @property
    def _ids(self) -> str:
        return f"select _seq, _row from {self._brushed} order by _seq, _row"

    def close(self) -> None:
        """Take the widget out of the notebook, and give its memory back. Blocks: while a query is ended."""
        super().close()
        if self.con is not None:
            while not self._is_closed():
                time.sleep(0.01)

    def _is_closed(self) -> bool:
        """Close the connection, if no other thread's query is at work, which is ended."""
        with contextlib.suppress(duckdb.ConnectionException):  # it is closed already
            self.con.interrupt()
        try:
            self.con.close()
        except duckdb.ResourceInUseException:
            return False
        return True

    # -- what the browser asks for -----------------------------------------------------------------

    def _handle_custom_msg(self, content: dict[str, Any], buffers: list[Any]) -> None:
        with self._lock:
            if "do" not in content:
                super()._handle_custom_msg(content, buffers)
                return
            try:
                self._do(**content)
            except (ArrowCacheError, OSError, ValueError, IndexError, duckdb.Error) as error:
                self._tell(error=sentence_of(error))

    def _do(
        self, do: str, one: list[int] | None = None, text: str = "", where: str | None = None, at: int = 0
    ) -> None:
        """Do what is asked.

        Args:
            one: a row's id; None: all that are brushed.
            text: a reason, a tag or a column.
            where: what is brushed where it is asked, as a predicate: each page has brushes of its own.
            at: the first row of a page, or a slice.
        """
        before = self._predicate, self._first
        if where is not None:
            self._predicate, self._first = where, at
        match do:
            case "page":
                self._show()
            case "refresh":
                is_new = self._follow() or self.board["version"] != self._version  # where it failed
                if is_new or before != (self._predicate, self._first):
                    self._show(says=self.board.get("says", ""))
                else:
                    self._tell(error="")
            case "open":
                self._row = row = rows(self._cache, row_ids([one]))
                kinds = row.kinds
                rates = [row.at[0, name] for name in _RATES if _is_number(kinds.get(name))]
                names = row.columns[len(ID_COLUMNS) :]
                shown = [large(name, row.at[0, name], kinds.get(name), *rates[:1]) for name in names]
                self.detail = {"id": one, "columns": shown, "answer": next(self._answers)}
            case "slice" if self._row is not None:
                html = slice_html(self._row.at[0, text], at, self._row.kinds.get(text))
                self.slice = {"column": text, "html": html, "answer": next(self._answers)}
            case "exclude" | "tag":
                ids = self.ids if one is None else row_ids([one])
                count = getattr(self._cache, do)(ids, text)
                says = f"tagged {text!r}" if do == "tag" else "excluded: cache.include(ids) takes it back"
                left = (
                    f"; {format_count(gone, 'row')} had left the cache" if (gone := len(ids) - count) else ""
                )
                self._show(says=f"{format_count(count, 'row')} {says}{left}")

    def _tell(self, **changed: object) -> None:
        self.board = {**self.board, "looks": self.board.get("looks", 0) + 1, **changed}

    def _show(self, says: str = "") -> None:
        total, count = self._one(f"select (select count(*) from {TABLE}), count(*) from {self._brushed}")
        if self._first >= count:
            self._first = 0
        page = f"{self._ids} limit {_PAGE_ROWS} offset {int(self._first)}"
        frame = rows(self._cache, self.con.execute(page).fetchnumpy(), missing="skip")
        board = {"version": self._version, "total": total, "count": count, "first": self._first}
        board |= {"step": _PAGE_ROWS, "is_brushed": bool(self._predicate), "ids": row_ids(frame).tolist()}
        board["asked"] = repr(self.sql.replace("*", "_seq, _row", 1))  # as Python says it
        self._tell(**board, table=frame._repr_html_() or "", sql=self.sql, says=says, error="")

    def _one(self, query: str) -> tuple[Any, ...]:
        """The first row of a result, which is fetched wholly: the connection does nothing else before."""
        row: tuple[Any, ...] = self.con.execute(query).fetchall()[0]
        return row

    # -- the copy ----------------------------------------------------------------------------------

    def _follow(self) -> bool:
        """Copy what was published since, drop what was evicted; returns whether the charts are to follow."""
        self._find_anew()
        seen: set[int] = set()

        def is_new(segment: SegmentInfo) -> bool:
            seen.add(segment.seq)
            return segment.seq not in self._seqs

        with Snapshot.take(self._store, where=is_new) as snapshot:
            if self._is_new or len(snapshot):
                self._copy(snapshot)
        gone, new = self._seqs - seen, seen - self._seqs
        if gone:
            self.con.execute(f"delete from {TABLE} where _seq in ({', '.join(map(str, gone))})")
        was_empty, self._seqs = not self._seqs, seen
        (cubes,) = self._one(f"select count(*) from duckdb_tables() where schema_name = '{_CUBES}'")
        if not self._is_new and not gone and not new and cubes <= _MAX_CUBES:
            return False
        self.con.execute(f"drop schema if exists {_CUBES} cascade")  # they count what was there before
        self._version += 1
        before = len(self._many)
        spec = self._spec()
        if self._is_new or (was_empty and seen) or len(self._many) > before:  # else brushes stay
            self.spec = spec
        self._is_new = False
        return True

    def _find_anew(self) -> None:
        """Begin anew, where another cache is in the place of the one that was shown."""
        with explaining(self._store.folder.path):
            identity = self._store.identity
        if identity != self._identity:
            self._begin(Cache.open(self._store.folder.path))
            self.con.execute(f"drop table if exists main.{TABLE}")

    def _copy(self, snapshot: Snapshot) -> None:
        create_view(self.con, snapshot, self._schema, self._columns, _NEW)
        try:
            if self._is_new:
                self._columns = [name for name in self._columns if self._is_chartable(name)]
            ids = ("_seq::uinteger as _seq", "_row::uinteger as _row")
            copied = f"select {', '.join([*ids, *map(self._copied, self._columns)])} from {_NEW}"
            self.con.execute(f"create table if not exists main.{TABLE} as {copied} limit 0")
            self.con.execute(f"insert into main.{TABLE} {copied}")
        finally:
            self.con.execute(f"drop view {_NEW}")
            self.con.unregister(FILES)

    def _copied(self, name: str) -> str:
        """A column as it is copied: with finite bounds, and in numbers that JavaScript has."""
        column, kind = column_in_sql(self._schema, name), self._schema[name]
        if _is_float(kind):
            return f"case when isfinite({column}) then {column} end as {column}"
        if _is_long(kind):
            return f"{column}::double as {column}"
        return column

    def _is_chartable(self, name: str) -> bool:
        column = column_in_sql(self._schema, name)
        if not isinstance(self._schema[name], String):
            return not column.startswith('"$')  # which mosaic takes for a parameter
        some = f"(select {column} as x from {_NEW} limit {_MAX_COUNTED})"
        return bool(self._one(f"select count(distinct x) from {some}")[0] <= _MAX_BARS)

    def _spec(self) -> dict[str, Any]:
        """The charts that fit the copy. A column that had many values once has no bar for each again."""
        columns = [column_in_sql(self._schema, name) for name in self._columns]
        kinds = [self._schema[name] for name in self._columns]
        pairs = [*zip(columns, kinds, strict=True)]
        counts = [f"approx_count_distinct({column})" if _has_bars(kind) else "1e9" for column, kind in pairs]
        largest = [f"max(abs({column}))" if _is_long(kind) else "0" for column, kind in pairs]
        found = self._one(f"select {', '.join([*counts, *largest, 'count(*)'])} from {TABLE}")
        sizes, most = found[: len(columns)], found[len(columns) : -1]
        self._many.update(column for column, size in zip(columns, sizes, strict=True) if size > _MAX_BARS)
        self._rounded = [column for column, x in zip(columns, most, strict=True) if (x or 0) > _MAX_EXACT]
        charts: list[dict[str, Any]] = []
        for (column, kind), size in zip(pairs, sizes, strict=True):
            bars = size if column not in self._many else None
            if bars is not None or not isinstance(kind, String):
                name = column[1:-1].replace('""', '"')
                charts.append(_chart(f"brush{len(charts)}", name, kind, bars))
        brushes = [f"brush{number}" for number in range(len(charts))]
        together = {"select": "crossfilter", "include": [f"${own}" for own in brushes]}
        params = {**{own: {"select": "intersect"} for own in brushes}, "brush": together}
        return {"params": params, "hconcat": charts or [{"vspace": 0}]}


def _is_scalar(kind: FieldType) -> bool:
    return _is_number(kind) or isinstance(kind, String | Timestamp)


def _is_number(kind: FieldType | None) -> bool:
    return isinstance(kind, Tensor) and not kind.shape and not kind.dtype.startswith("complex")


def _has_bars(kind: FieldType) -> bool:
    """Whether a bar may stand for each value, where they are few."""
    return isinstance(kind, String) or (_is_number(kind) and not _is_float(kind))


def _is_long(kind: FieldType) -> bool:
    return isinstance(kind, Tensor) and kind.dtype in ("int64", "uint64")


def _is_float(kind: FieldType) -> bool:
    return isinstance(kind, Tensor) and "float" in kind.dtype


def _chart(own: str, name: str, kind: FieldType, bars: int | None) -> dict[str, Any]:
    """A chart in mosaic's words: all rows in grey, before them those that the brushes of others leave.

    Args:
        bars: how many, one for each value; None: a histogram.
    """
    axes: dict[str, Any]
    size: dict[str, Any]
    if bars is not None:
        mark, brush, axes = "barX", "toggleY", {"x": {"count": None}, "y": name}
        size = {"height": 45 + 18 * bars, "marginLeft": 90 if isinstance(kind, String) else 60}
    else:
        mark, brush, axes = "rectY", "intervalX", {"x": {"bin": name, "steps": 40}, "y": {"count": None}}
        size = {"height": 150, "marginLeft": 45}
    counts = "xTickFormat" if mark == "barX" else "yTickFormat"
    size |= {"width": 280, "marginTop": 8, "name": name, "xLabel": None, "yLabel": None, counts: "s"}
    drawn = {"mark": mark, **axes}
    return {
        "plot": [
            {**drawn, "data": {"from": TABLE}, "fill": "#8c8c8c", "fillOpacity": 0.35},
            {**drawn, "data": {"from": TABLE, "filterBy": "$brush"}, "fill": "#2f7fc1"},
            {"select": brush, "as": f"${own}"},
            *[{"select": "highlight", "by": f"${own}"}] * (mark == "barX"),
        ],
        **size,
    }
