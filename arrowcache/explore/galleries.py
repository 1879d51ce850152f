"""Gallery: rows of one column as pictures, in the order they came, or asked for, or by another column."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from arrowcache import display
from arrowcache.arrow.schema import Binary, FieldType, Schema, String
from arrowcache.display import printable, shorten
from arrowcache.explore.noted import annotated
from arrowcache.explore.numbers import has_axes, require_column
from arrowcache.explore.pictures import Picture, picture
from arrowcache.explore.walk import AnyCache
from arrowcache.limits import Limits
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.values import Values
from arrowcache.storage.recovery import store_of
from arrowcache.storage.row_ids import RowId, row_ids
from arrowcache.units import format_count, parse_count

_MOST_PICTURES = 1000
_MOST_NAME = 40  # characters of a value


@dataclass(frozen=True, slots=True)
class Tile:
    """One row's picture; `row` counts within its segment."""

    seq: int
    row: int
    picture: Picture

    @property
    def caption(self) -> str:
        return str(RowId(self.seq, self.row))


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one value of the column grouped by, or all; some of them have pictures.

    `value` is empty where nothing is grouped by, but says how many rows that were asked for have left.
    """

    value: str
    rows: int
    tiles: tuple[Tile, ...]


class Gallery:
    """Pictures of rows, as a notebook shows them. It keeps the pictures; nothing is leased by it.

    `groups` are one for each value, most rows first, or one of all.
    """

    def __init__(self, title: str, by: str | None, groups: Sequence[Group], size: int) -> None:
        self.title = title
        self.by = by
        self.groups = tuple(groups)
        self._size = size

    def __repr__(self) -> str:
        tiles = sum(len(group.tiles) for group in self.groups)
        return f"<Gallery of {format_count(tiles, 'picture')}: {printable(self.title)}>"

    def _repr_html_(self) -> str:
        return display.Card("Gallery", self.title, [*map(self._shown, self.groups)]).as_html()

    def _shown(self, group: Group) -> display.Markup:
        tiles = [
            display.element(
                "div",
                display.Markup(tile.picture._repr_html_()),
                display.element("div", tile.caption, style="font-size: 0.75em; opacity: 0.7"),
                style=f"min-width: {self._size}px; max-width: {2 * self._size}px; text-align: center; "
                "overflow-wrap: anywhere; line-height: 1.3",
            )
            for tile in group.tiles
        ]
        style = "display: flex; flex-wrap: wrap; gap: 0.6em; align-items: end; margin: 0.3em 0 0.7em"
        return display.join([display.note(self._name(group)), display.element("div", *tiles, style=style)])

    def _name(self, group: Group) -> str:
        rows = format_count(group.rows, "row")
        if self.by is None:
            return f"{rows}; {group.value}" if group.value else rows
        return f"{self.by} = {shorten(group.value, _MOST_NAME)}: {rows}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as an HTML file that needs nothing else."""
        Path(path).write_text(display.page(self.title, display.Markup(self._repr_html_())), encoding="utf-8")


def gallery(
    cache: AnyCache,
    column: str,
    n: int = 24,
    by: str | None = None,
    seed: int = 0,
    values: int = 12,
    size: int = 96,
    rows: object = None,
) -> Gallery:
    """Draw random rows of a column, or these.

    Args:
        cache: a Cache, or the path of one.
        column: which; of tensors, ragged or not, text or bytes.
        n: how many pictures at most, of random rows.
        by: a column of one value a row, or an annotation: the pictures are divided among its values.
        seed: of the choice of rows.
        values: how many of the values of `by` are shown at most, those with the most rows.
        size: pixels of a picture's longer side.
        rows: draw these, in this order: ids as of `rows`, such as a DataFrame of a query. Those that have
            left the cache are counted in the gallery, without a picture.
    Blocks: while the rows are read, one by one, and all of `by`. The rows are leased no longer.
    Raises: ValueError: an unknown column, one without pictures, one with too many values to group by, no
        row is there, both `rows` and `by`, more than 1,000 `rows`. MissingSegmentsError: all of these left
        the cache. FileNotFoundError: no cache. CorruptSegmentError: a damaged segment, which was
        quarantined: call it again.
    """
    store = store_of(cache)
    schema = store.settings.schema
    require_column(schema, column, _has_pictures, "a gallery has pictures of more than one number a row")
    n, values = parse_count(n, "n", most=_MOST_PICTURES), parse_count(values, "values")
    seed = parse_count(seed, "seed", least=0, most=None)
    asked = None if rows is None else _asked(rows, by)
    by_value = [] if by is None else _choose_by(cache, annotated(store), by, n, values, seed)
    with Snapshot.take(store) as snapshot:
        if not len(snapshot):
            raise ValueError(f"{store.folder.path} has no rows yet: start its samplers, then look again")
        if asked is not None:
            places = snapshot.positions(asked, "skip").tolist()
            if not places:
                snapshot.positions(asked)  # says what is known of them
            left = len(asked) - len(places)
            chosen = [(f"{format_count(left, 'row')} left the cache" if left else "", len(places), places)]
        elif by is None:
            rng = np.random.default_rng(seed)
            ids = rng.choice(len(snapshot), min(n, len(snapshot)), replace=False, shuffle=False)
            chosen = [("", len(snapshot), sorted(ids.tolist()))]
        else:
            chosen = [
                (value, count, sorted(snapshot.positions(drawn, "skip").tolist()))
                for value, count, drawn in by_value
            ]
        groups = [
            Group(value, count, tuple(_tile(snapshot, schema[column], column, i, size) for i in drawn))
            for value, count, drawn in chosen
        ]
    grouped = "" if by is None else f" by {by}"
    return Gallery(f"{column}{grouped} of {store.folder.path}", by, groups, size)


def _asked(rows: object, by: str | None) -> NDArray[np.int64]:
    asked = row_ids(rows)
    if by is not None:
        raise ValueError("rows= are shown in their order, and by= groups random ones: give one of the two")
    if not 0 < len(asked) <= _MOST_PICTURES:
        count = format_count(len(asked), "row")
        raise ValueError(f"rows= names {count}: a gallery shows 1 to {_MOST_PICTURES:,}")
    return asked


def _has_pictures(kind: FieldType) -> bool:
    return has_axes(kind) or isinstance(kind, String | Binary)


def _is_one(kind: FieldType) -> bool:
    return isinstance(kind, String) or not _has_pictures(kind)


def _choose_by(
    cache: AnyCache, schema: Schema, by: str, n: int, values: int, seed: int
) -> list[tuple[str, int, NDArray[np.int64]]]:
    """The most frequent values of a column, how many rows have them, and the ids of some of those."""
    from arrowcache.explore import sql  # DuckDB, for those who group; says where it is not there
    from arrowcache.explore.query import TABLE, column_in_sql

    require_column(schema, by, _is_one, "a gallery is grouped by one value a row")
    column, most = column_in_sql(schema, by), Limits.current.grouping_values
    found = sql(
        cache,
        f"select {column} as value, count(*) as rows, "
        f"arg_min(_seq || ':' || _row, hash(_seq, _row, '{seed}'), {n}) as drawn from {TABLE} "
        f"group by {column} order by rows desc, value limit {most + 1}",
    )
    if len(found) > most:
        raise ValueError(f"by={by!r} has over {most} different values: group by one of few")
    share = max(1, n // max(1, min(values, n, len(found))))
    ranked = found.head(min(values, n)).itertuples(index=False, name=None)
    return [
        ("NaN" if value != value and value is not pd.NaT else str(value), rows, row_ids(drawn[:share]))
        for value, rows, drawn in ranked
    ]


def _tile(snapshot: Snapshot, kind: FieldType, column: str, row_id: int, size: int) -> Tile:
    ids = np.array([row_id])
    values = snapshot.gather(ids, [column])[column]
    value = values.data if isinstance(values, Values) else values[0]
    where = snapshot.locate(ids)
    return Tile(int(where["_seq"][0]), int(where["_row"][0]), picture(value, kind, size))
