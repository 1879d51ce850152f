"""Gallery: rows of one column as pictures, in the order they came, or asked for, or by another column."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache import display
from arrowcache.arrow.schema import Binary, FieldType, Ragged, Schema, String, Tensor, Timestamp
from arrowcache.display import printable, shorten
from arrowcache.explore.drawing import Line, Words, label
from arrowcache.explore.pictures import Picture, picture, plain
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.values import Values
from arrowcache.storage.recovery import HasStore, store_of
from arrowcache.storage.row_ids import RowId, row_ids
from arrowcache.units import format_count, parse_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_PICTURES = 1000
_MOST_VALUES = 1000  # different ones that a column to group by may have
_ROWS_A_LOOK = 1 << 20  # of the column to group by, at a time
_COLUMNS = 8  # of a figure
_TILE_INCHES, _MARGIN_INCHES, _CAPTION_INCHES, _NAME_INCHES = 1.2, 0.05, 0.14, 0.3
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

    def figure(self) -> Figure:
        """The same as a matplotlib figure, for `figure.savefig("gallery.png")`."""
        from matplotlib.figure import Figure  # 0.3 s that a notebook does not need

        columns = min(_COLUMNS, max(len(group.tiles) for group in self.groups))
        lines = [-(-len(group.tiles) // columns) for group in self.groups]
        width = columns * _TILE_INCHES
        height = sum(lines) * (_TILE_INCHES + _CAPTION_INCHES) + len(lines) * _NAME_INCHES
        figure = Figure(figsize=(width, height))
        top = height
        for group in self.groups:
            top -= _NAME_INCHES
            figure.text(0.05 / width, (top + 0.08) / height, label(self._name(group)), fontsize=9)
            for at, tile in enumerate(group.tiles):
                if at % columns == 0:
                    top -= _TILE_INCHES + _CAPTION_INCHES
                left, side = at % columns * _TILE_INCHES + _MARGIN_INCHES, _TILE_INCHES - 2 * _MARGIN_INCHES
                box = (left / width, (top + _MARGIN_INCHES) / height, side / width, side / height)
                _draw(figure.add_axes(box), tile)
        return figure


def gallery(
    cache: HasStore | str | os.PathLike[str],
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
        by: a column of one value a row: the pictures are divided among its values.
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
    _require_drawable(schema, column)
    n, values = parse_count(n, "n", most=_MOST_PICTURES), parse_count(values, "values")
    rng = np.random.default_rng(parse_count(seed, "seed", least=0, most=None))
    asked = None if rows is None else _asked(rows, by)
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
            ids = rng.choice(len(snapshot), min(n, len(snapshot)), replace=False, shuffle=False)
            chosen = [("", len(snapshot), sorted(ids.tolist()))]
        else:
            chosen = _choose_by(snapshot, schema, by, n, values, rng)
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


def _require_drawable(schema: Schema, column: str) -> None:
    schema.select([column])
    if not _is_single(schema[column]):
        return
    drawable = [name for name, kind in schema.items() if not _is_single(kind)]
    others = f"it can show {', '.join(drawable)}" if drawable else "and no column of this cache has more"
    raise ValueError(f"column {column!r} has one number a row, of which a gallery has no pictures: {others}")


def _is_single(kind: FieldType) -> bool:
    return isinstance(kind, Timestamp) or (isinstance(kind, Tensor) and kind.shape == ())


def _choose_by(
    snapshot: Snapshot, schema: Schema, by: str, n: int, values: int, rng: np.random.Generator
) -> list[tuple[str, int, list[int]]]:
    """The most frequent values of a column, how many rows have them, and some of those."""
    schema.select([by])
    if isinstance(schema[by], Ragged | Binary) or not (
        _is_single(schema[by]) or isinstance(schema[by], String)
    ):
        one = [name for name, kind in schema.items() if _is_single(kind) or isinstance(kind, String)]
        others = f": take one of {', '.join(one)}" if one else ""
        raise ValueError(f"by={by!r} is a column of arrays, not of one value a row{others}")
    counts: Counter[Hashable] = Counter()
    kept: dict[Hashable, _Kept] = {}
    for first in range(0, len(snapshot), _ROWS_A_LOOK):
        ids = np.arange(first, min(first + _ROWS_A_LOOK, len(snapshot)))
        found, which = _values(snapshot, by, schema[by], ids)
        lots = rng.random(len(ids))
        order = np.lexsort((lots, which))
        ends = np.cumsum(np.bincount(which, minlength=len(found))).tolist()
        for value, start, stop in zip(found, [0, *ends], ends, strict=False):
            counts[value] += stop - start
            drawn = order[start : min(stop, start + n)]
            kept[value] = kept.get(value, _Kept.none()).merged(_Kept(lots[drawn], ids[drawn]), n)
        if len(counts) > _MOST_VALUES:
            raise ValueError(f"by={by!r} has over {_MOST_VALUES} different values: group by one of few")
    ranked = sorted(counts, key=lambda value: (-counts[value], str(value)))[: min(values, n)]
    share = max(1, n // len(ranked))
    return [(str(value), counts[value], sorted(kept[value].ids[:share].tolist())) for value in ranked]


class _Kept(NamedTuple):
    """Rows of one value, those of the lowest lots so far: a fair draw, however many there are."""

    lots: NDArray[np.float64]
    ids: NDArray[np.int64]

    @classmethod
    def none(cls) -> _Kept:
        return cls(np.empty(0), np.empty(0, np.int64))

    def merged(self, other: _Kept, n: int) -> _Kept:
        lots, ids = (np.concatenate(pair) for pair in zip(self, other, strict=True))
        first = np.argsort(lots)[:n]
        return _Kept(lots[first], ids[first])


def _values(
    snapshot: Snapshot, name: str, kind: FieldType, ids: NDArray[np.int64]
) -> tuple[list[Hashable], NDArray[np.int64]]:
    """The different values of some rows, and which of them each row has."""
    values = snapshot.gather(ids, [name])[name]
    if isinstance(values, list):
        found = sorted(set(values))
        at = {value: number for number, value in enumerate(found)}
        return found, np.fromiter(map(at.__getitem__, values), np.int64, len(values))
    numbers = np.asarray(values)
    if not isinstance(kind, Timestamp):
        numbers = plain(numbers, getattr(kind, "dtype", ""))
    different, which = np.unique(numbers, return_inverse=True)
    return [_name(value) for value in different.tolist()], which


def _name(value: Any) -> Hashable:
    """What stands for a value in the next look, too: one NaN equals no other."""
    if value is None:
        return "NaT"
    return "NaN" if value != value else value


def _tile(snapshot: Snapshot, kind: FieldType, column: str, row_id: int, size: int) -> Tile:
    ids = np.array([row_id])
    values = snapshot.gather(ids, [column])[column]
    value = values.data if isinstance(values, Values) else values[0]
    where = snapshot.locate(ids)
    return Tile(int(where["_seq"][0]), int(where["_row"][0]), picture(value, kind, size))


def _draw(axes: Axes, tile: Tile) -> None:
    drawing: Any = tile.picture.drawing
    if isinstance(drawing, Words):
        axes.text(0.5, 0.5, label(shorten(drawing.text, 24)), ha="center", va="center", fontsize=7)
    elif isinstance(drawing, Line):
        for outline in drawing.outlines(1000, 300):
            if len(outline) > 1 and (outline[0] == outline[-1]).all():
                axes.fill(*outline.T, color=display.BLUE, linewidth=0.5)
            else:
                axes.plot(
                    *outline.T, color=display.BLUE, linewidth=0.8, marker="." if len(outline) == 1 else ""
                )
        axes.set(xlim=(0, 1000), ylim=(300, 0))
    else:
        axes.imshow(drawing.rgba(), interpolation="nearest" if drawing.is_map else "antialiased")
    axes.axis("off")
    axes.set_title(tile.caption, fontsize=6, pad=2)
