"""Explorer: charts of a cache's scalar columns that filter one another, and the rows behind what is brushed.

mosaic-widget draws the charts and sends SQL for what they count. It runs whatever SQL the browser sends, on a
copy of the scalars and notes with the rows' ids, in a database that reaches no file and whose configuration
is locked. The copy is made anew as notes change, for at most a twentieth of the time.
The browser asks for everything, for new rows each few seconds as well. There is no thread here, but a kernel
handles messages in a thread and runs cells in another: each call holds the explorer's lock while it uses the
connection, which refuses two at once. Nothing is leased but while rows are copied.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import mosaic_widget
import numpy as np
import pyarrow as pa
import traitlets
from numpy.typing import NDArray

from arrowcache import explore
from arrowcache.arrow.schema import Binary, FieldType, Schema, String, Tensor, Timestamp
from arrowcache.cache import Cache
from arrowcache.display import Markup, element, join
from arrowcache.errors import ArrowCacheError, sentence_of
from arrowcache.explore.columns import REASON, TAGS, NotedRows, has_axes
from arrowcache.explore.frames import RowsFrame, rows
from arrowcache.explore.pictures import large, picture, slice_html
from arrowcache.explore.query import FILES, TABLE, column_in_sql, connect, create_view
from arrowcache.os_errors import explaining
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.notes_log import MARKS, VALUES, NotesLog
from arrowcache.storage.recovery import store_of
from arrowcache.storage.row_ids import ID_COLUMNS, RowId, row_ids
from arrowcache.units import format_count

_PAGE_ROWS, _PAGE_PICTURES = 8, 24
_GROUPS, _GROUP_ROWS = 4, 8  # of rows side by side
_PICTURE_SIZE = 96
_MAX_POINTS = 2000  # of a map, each an element of the page
_SHARE = 20  # the copy is made anew as notes change for 1 / _SHARE of the time
_WAYS = {"desc": "highest first", "asc": "lowest first"}
_POINT = (*ID_COLUMNS, "x", "y")
MAP, _X, _Y = "map", '"_map_x"', '"_map_y"'
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
    while the charts are in sight; so do tags, exclusions and annotations, which have charts, too. `ids` and
    `sql` are what is brushed, for the next cell: `Loader(cache, 64, rows=explorer.ids)`.

    Rows are in the order of any chart's column, such as a loss, as a table or as pictures, all together or
    side by side by their value in a column. "Rows like this" beside a tensor are the nearest of 100,000 rows.
    A map has a point for each of 2,000 rows, and brushes like a chart. "Export to Parquet" writes what is
    brushed and not excluded into a new folder, and nothing else is answered meanwhile.

    Args:
        cache: a Cache, or the path of one.
    Blocks: while the scalars are copied into memory: 8 bytes a row, and what they take. Nothing is leased
        afterwards.
    Raises: FileNotFoundError, CacheFormatError: no such cache. CorruptSegmentError: a damaged segment, which
        was quarantined: call it again.
    """
    return Explorer(Cache.open(cache) if isinstance(cache, str | os.PathLike) else cache)


class _Look(NamedTuple):
    """What one page shows, as it says with all that it asks.

    Args:
        where: what is brushed, as a predicate.
        at: the first row of the page.
        order: a quoted column and "asc" or "desc". Empty: oldest first.
        view: the column of which pictures are shown. Empty: a table.
        beside: a quoted column whose values have their rows side by side.
        near: `_seq`, `_row` and a column: only the rows that are like this one, nearest first.
    """

    where: str = ""
    at: int = 0
    order: str = ""
    view: str = ""
    beside: str = ""
    near: tuple[int, int, str] | None = None


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
        self._look = _Look()
        self._near: tuple[object, NDArray[np.int64], list[str]] = None, np.empty((0, 2), np.int64), []
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
        self._notes = NotesLog.of(self._store)
        self._noted: object = None  # the notes that are in the copy
        self._copied_at = self._copy_seconds = 0.0
        self._map: pa.Table | None = None
        self._map_column = ""
        self._many: set[str] = set()  # columns of which no bar stands for one value
        #: By the quoted name of a column: how `explore.sql` has it, where that is another value; its name.
        self._in_sql, self._names = dict[str, str](), dict[str, str]()
        self._bars: set[str] = set()  # quoted names of columns with a bar for each value
        self._has_table, self._seqs = False, set[int]()  # the segments whose rows are in the copy

    @property
    def sql(self) -> str:
        """What is brushed, as a query that `explore.sql(cache, ...)` takes, too."""
        if _X in self._look.where:
            return f"select * from {TABLE} where {_one_of(self.ids)}"  # which has no map
        brushed = re.sub(_QUOTED, lambda it: self._in_sql.get(it[0], it[0]), self._brushed)
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
        predicates = [self._look.where] if self._look.where else []
        if self._look.near:
            predicates.append(_one_of(self._near_ids()[0]))
        return f"{TABLE} where {' and '.join(predicates)}" if predicates else TABLE

    @property
    def _ids(self) -> str:
        return f"select _seq, _row from {self._brushed} order by {self._order}_seq, _row"

    @property
    def _order(self) -> str:
        if self._look.near:
            places = [seq << 32 | row for seq, row in self._near_ids()[0].tolist()]
            return f"list_position({places}, (_seq::bigint << 32) + _row), "
        return f"{self._look.order} nulls last, " if self._look.order else ""

    def _near_ids(self) -> tuple[NDArray[np.int64], list[str]]:
        """The rows that are like one, itself first, and how far they are."""
        near = self._look.near
        assert near is not None
        if self._near[0] != near:
            seq, row, column = near
            found = explore.similar(self._cache, column, (seq, row), _PAGE_PICTURES - 1)
            distances = [f"{distance:.4g}" for distance in found["distance"]]
            self._near = near, np.concatenate([[(seq, row)], row_ids(found)]), ["0", *distances]
        return self._near[1:]

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
        self, do: str, one: list[int] | None = None, text: str = "", where: str | None = None, **more: Any
    ) -> None:
        """Do what is asked.

        Args:
            one: a row's id; None: all that are brushed.
            text: a reason, a tag, a folder or a column.
            where: what is brushed where it is asked, as a predicate: each page has brushes of its own.
            more: with `where` what else the page shows, as of `_Look`; of "slice" its number, `at`.
        """
        before = self._look
        if where is not None:
            self._look = _Look(where, **more)
        match do:
            case "page":
                self._show()
            case "refresh":
                is_new = self._follow() or self.board["version"] != self._version  # where it failed
                if is_new or before != self._look:
                    self._show(says=self.board.get("says", ""))
                else:
                    self._tell(error="")
            case "open":
                self._row = row = rows(self._cache, row_ids([one]))
                kinds = row.kinds
                rates = [row.at[0, name] for name in _RATES if _is_number(kinds.get(name))]
                names = row.columns[len(ID_COLUMNS) :]
                shown = [large(name, row.at[0, name], kinds.get(name), *rates[:1]) for name in names]
                shown = [{**one, "is_vector": _is_vector(kinds.get(one["name"]))} for one in shown]
                self.detail = {"id": one, "columns": shown, "answer": next(self._answers)}
            case "slice" if self._row is not None:
                html = slice_html(self._row.at[0, text], more["at"], self._row.kinds.get(text))
                self.slice = {"column": text, "html": html, "answer": next(self._answers)}
            case "exclude" | "tag":
                ids = self.ids if one is None else row_ids([one])
                count = getattr(self._cache, do)(ids, text)
                says = f"tagged {text!r}" if do == "tag" else "excluded: cache.include(ids) takes it back"
                left = (
                    f"; {format_count(gone, 'row')} had left the cache" if (gone := len(ids) - count) else ""
                )
                self._copied_at = -math.inf  # so that the next look has it
                self._show(says=f"{format_count(count, 'row')} {says}{left}")
            case "export":
                folder = _new_folder(self._cache.path.name, text)
                files = explore.export_parquet(self._cache, folder, rows=self.ids)
                self._show(says=f"{format_count(len(files), 'file')} in {folder}, without excluded rows")
            case "map":
                found = explore.map_of(self._cache, text, max_rows=_MAX_POINTS) if text else None
                self._map = (
                    found if found is None else pa.table({key: found[key].to_numpy() for key in _POINT})
                )
                self._map_column = text
                self._put_map()
                self._version += 1
                self.spec = self._spec()
                self._show()

    def _tell(self, **changed: object) -> None:
        self.board = {**self.board, "looks": self.board.get("looks", 0) + 1, **changed}

    def _show(self, says: str = "") -> None:
        total, count = self._one(f"select (select count(*) from {TABLE}), count(*) from {self._brushed}")
        look = self._look
        if look.at >= count:
            self._look = look = look._replace(at=0)
        board = {"version": self._version, "total": total, "count": count, "first": look.at}
        size = _PAGE_PICTURES if look.view else _PAGE_ROWS
        board |= {"step": count if look.beside else size, "is_brushed": self._brushed != TABLE}
        parts = self._parts(size)
        shown = [rows(self._cache, ids, missing="skip") for _, ids in parts]
        html = [self._html(name, frame) for (name, _), frame in zip(parts, shown, strict=True)]
        ids = [one for frame in shown for one in row_ids(frame).tolist()]
        board |= {"ids": ids, "choices": self._choices(), "map": self._map_column}
        board["asked"] = repr(self.sql.replace("*", "_seq, _row", 1))  # as Python says it
        self._tell(**board, table=join(html), sql=self.sql, says=says, error="")

    def _parts(self, size: int) -> list[tuple[str, NDArray[np.int64]]]:
        """The name and the rows of each value that is side by side, most rows first; else those of a page."""
        look = self._look
        if not look.beside:
            page = f"{self._ids} limit {size} offset {int(look.at)}"
            return [("", row_ids(self.con.execute(page).fetchnumpy()))]
        counted = f"select {look.beside}, count(*) as n from {self._brushed} group by 1 order by n desc, 1"
        parts = []
        for value, count in self.con.execute(f"{counted} limit {_GROUPS}").fetchall():
            own = f"(select * from {self._brushed}) where {look.beside} is not distinct from ?"
            page = f"select _seq, _row from {own} order by {self._order}_seq, _row limit {_GROUP_ROWS}"
            ids = row_ids(self.con.execute(page, [value]).fetchnumpy())
            parts.append((f"{value if value != '' else 'none'}: {format_count(count, 'row')}", ids))
        return parts

    def _html(self, name: str, frame: RowsFrame) -> Markup:
        """Some rows as a table, or as pictures with the value by which they are in order."""
        view = self._look.view
        title = element("b", name) if name else ""
        if not view:
            return element("div", title, Markup(frame._repr_html_() or ""))
        column = self._look.order.rpartition(" ")[0]
        _, ids, distances = self._near if self._look.near else (None, np.empty((0, 2)), [])
        said = dict(zip(map(tuple, ids.tolist()), distances, strict=True))
        tiles = []
        for at, one in enumerate(map(tuple, row_ids(frame).tolist())):
            value = said.get(one, frame.at[at, self._names[column]] if column in self._names else "")
            shown = Markup(picture(frame.at[at, view], frame.kinds.get(view), _PICTURE_SIZE)._repr_html_())
            caption = f"{value:.4g}" if isinstance(value, float) else str(value)
            tiles.append(element("figure", shown, element("div", f"{RowId(*one)} {caption}")))
        return element("div", title, element("div", *tiles, **{"class": "tiles"}))

    def _choices(self) -> dict[str, list[tuple[str, str]]]:
        """What may be chosen of a page: names, and what they stand for in `_Look`."""
        names = [(name, column) for column, name in self._names.items()]
        order = [
            (f"{name}, {says}", f"{column} {way}") for name, column in names for way, says in _WAYS.items()
        ]
        kinds = self._store.settings.schema.items()
        pictures = [name for name, kind in kinds if has_axes(kind) or isinstance(kind, Binary)]
        views = [(f"pictures of {name}", name) for name in pictures]
        bars = [(name, column) for name, column in names if column in self._bars]
        maps = [(f"map of {name}", name) for name, kind in kinds if _is_vector(kind)]
        return {
            "order": [("oldest first", ""), *order],
            "view": [("a table", ""), *views],
            "beside": [("all together", ""), *((f"side by side: {name}", column) for name, column in bars)],
            "map": [("no map", ""), *maps],
        }

    def _one(self, query: str) -> tuple[Any, ...]:
        """The first row of a result, which is fetched wholly: the connection does nothing else before."""
        row: tuple[Any, ...] = self.con.execute(query).fetchall()[0]
        return row

    # -- the copy ----------------------------------------------------------------------------------

    def _follow(self) -> bool:
        """Copy what was published since, drop what was evicted; returns whether the charts are to follow."""
        self._find_anew()
        self._notes.flush_or_warn()
        noted = self._notes.names(), self._notes.files(MARKS), self._notes.files(VALUES)
        may_copy = time.monotonic() > self._copied_at + _SHARE * self._copy_seconds
        is_noted = noted != self._noted and (self._is_new or may_copy)
        was_empty = not self._seqs
        if is_noted:
            self._noted, self._has_table, self._seqs = noted, False, set()
        seen: set[int] = set()

        def is_new(segment: SegmentInfo) -> bool:
            seen.add(segment.seq)
            return segment.seq not in self._seqs

        before, begun = len(self._many), time.monotonic()
        with Snapshot.take(self._store, where=is_new) as snapshot:
            if not self._has_table or len(snapshot):
                self._copy(snapshot)
        if is_noted:
            self._copied_at, self._copy_seconds = time.monotonic(), time.monotonic() - begun
        gone, new = self._seqs - seen, seen - self._seqs
        if gone:
            self.con.execute(f"delete from {TABLE} where _seq in ({', '.join(map(str, gone))})")
        self._seqs = seen
        (cubes,) = self._one(f"select count(*) from duckdb_tables() where schema_name = '{_CUBES}'")
        if not self._is_new and not is_noted and not gone and not new and cubes <= _MAX_CUBES:
            return False
        self._put_map()
        self.con.execute(f"drop schema if exists {_CUBES} cascade")  # they count what was there before
        self._version += 1
        spec = self._spec()
        must = self._is_new or (was_empty and seen) or len(self._many) > before
        if must or (not self._look.where and _names_of(spec) != _names_of(self.spec)):
            self.spec = spec  # else brushes stay
        self._is_new = False
        return True

    def _find_anew(self) -> None:
        """Begin anew, where another cache is in the place of the one that was shown."""
        with explaining(self._store.folder.path):
            identity = self._store.identity
        if identity != self._identity:
            self._begin(Cache.open(self._store.folder.path))

    def _copy(self, snapshot: Snapshot) -> None:
        own, noted = self._store.settings.schema, NotedRows(self._store, snapshot)
        if not self._has_table:
            kinds = {name: noted.kinds[name] or String() for name in noted.names if name != REASON}
            self._schema = Schema({**own, **kinds})
            self._columns = [name for name, kind in self._schema.items() if _is_scalar(kind)]
        names = [name for name in self._schema if name not in own]
        notes = {name: noted.tag_texts() if name == TAGS else noted.arrow(name) for name in names}
        create_view(self.con, snapshot, own, [name for name in self._columns if name in own], _NEW, notes)
        try:
            if not self._has_table:
                self._columns = [name for name in self._columns if self._is_chartable(name)]
            ids = ("_seq::uinteger as _seq", "_row::uinteger as _row")
            copied = f"select {', '.join([*ids, *map(self._copied, self._columns)])} from {_NEW}"
            if not self._has_table:
                self.con.execute(f"create or replace table main.{TABLE} as {copied} limit 0")
            self.con.execute(f"insert into main.{TABLE} by name {copied}")
            self._has_table = True
        finally:
            self.con.execute(f"drop view {_NEW}")
            self.con.unregister(FILES)

    def _put_map(self) -> None:
        """Put the places of a map into the copy, and its rows into a table of their own."""
        if self._map is None:
            return
        self.con.register(FILES, self._map)
        try:
            for axis in (_X, _Y):
                self.con.execute(f"alter table main.{TABLE} add column if not exists {axis} float")
            self.con.execute(f"update {TABLE} set {_X} = null where {_X} is not null")  # another map's
            self.con.execute(
                f"update {TABLE} set {_X} = p.x, {_Y} = p.y from {FILES} as p "
                f"where {TABLE}._seq = p._seq and {TABLE}._row = p._row"
            )
            self.con.execute(f"create or replace table main.{MAP} as from {TABLE} where {_X} is not null")
        finally:
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
        rounded = [column for column, x in zip(columns, most, strict=True) if (x or 0) > _MAX_EXACT]
        self._in_sql = {column: f"{column}::double" for column in rounded}
        if TAGS in self._schema and TAGS not in self._store.settings.schema:
            self._in_sql[f'"{TAGS}"'] = f"""array_to_string("{TAGS}", ', ')"""
        self._names, self._bars = dict(zip(columns, self._columns, strict=True)), set[str]()
        charts: list[dict[str, Any]] = []
        for (column, kind), size in zip(pairs, sizes, strict=True):
            bars = size if column not in self._many else None
            if bars is not None or not isinstance(kind, String):
                name = column[1:-1].replace('""', '"')
                charts.append(_chart(f"brush{len(charts)}", name, kind, bars))
                self._bars.update([column] if bars is not None else ())
        if self._map is not None:
            charts.append(_map_chart(f"brush{len(charts)}", f"map of {self._map_column}"))
        brushes = [f"brush{number}" for number in range(len(charts))]
        together = {"select": "crossfilter", "include": [f"${own}" for own in brushes]}
        params = {**{own: {"select": "intersect"} for own in brushes}, "brush": together}
        return {"params": params, "hconcat": charts or [{"vspace": 0}]}


def _one_of(ids: NDArray[np.int64]) -> str:
    """The predicate that a row is one of these (n, 2)."""
    listed = ", ".join(f"({seq}, {row})" for seq, row in ids.tolist())
    return f"(_seq, _row) in ({listed})" if listed else "false"


def _names_of(spec: dict[str, Any]) -> list[str]:
    return [chart.get("name", "") for chart in spec["hconcat"]]


def _new_folder(name: str, text: str) -> Path:
    """The folder of this name, or, where it is empty, a new one in the working directory."""
    if text:
        return Path(text).expanduser().absolute()
    numbered = (Path.cwd() / f"{name}-rows-{number}" for number in itertools.count(1))
    return next(folder for folder in numbered if not folder.exists())


def _is_vector(kind: FieldType | None) -> bool:
    return isinstance(kind, Tensor) and bool(kind.shape)


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


def _map_chart(own: str, name: str) -> dict[str, Any]:
    """A map in mosaic's words: all its rows in grey, over them those that the brushes of others leave."""
    dots = {"mark": "dot", "x": _X[1:-1], "y": _Y[1:-1], "r": 2}
    margins = dict.fromkeys(("marginLeft", "marginRight", "marginTop", "marginBottom"), 8)
    plot = [
        {**dots, "data": {"from": MAP}, "fill": "#8c8c8c", "fillOpacity": 0.35},
        {**dots, "data": {"from": MAP, "filterBy": "$brush"}, "fill": "#2f7fc1"},
        {"select": "intervalXY", "as": f"${own}"},
    ]
    return {"plot": plot, "width": 280, "height": 280, "name": name, "xAxis": None, "yAxis": None, **margins}


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
