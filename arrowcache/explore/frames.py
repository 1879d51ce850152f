"""Frames: rows of a cache as DataFrames of pandas and Polars. All are copies: nothing stays leased.

In a notebook the tensors, bytes and text of a frame are pictures.
"""

from __future__ import annotations

import html
import itertools
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from arrowcache.arrow.schema import Binary, FieldType, Ragged, String, Tensor, Timestamp
from arrowcache.display import shorten
from arrowcache.errors import ArrowCacheError, sentence_of
from arrowcache.explore.columns import AnyCache, NotedRows, bfloat16_values, has_axes, select_with_notes
from arrowcache.reading.columns import ColumnData, Values
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.recovery import store_of
from arrowcache.storage.row_ids import ID_COLUMNS, row_ids
from arrowcache.storage.store import Store
from arrowcache.units import format_count, parse_count

if TYPE_CHECKING:
    import polars as pl


_MAX_TEXT = 200
_SIZE = 96  # pixels a side of a picture in a cell


class RowsFrame(pd.DataFrame):  # type: ignore[misc]  # pandas ships no type information
    """A DataFrame that shows tensors, bytes and text small in a notebook; else it is like any other."""

    _metadata = ["kinds"]  # noqa: RUF012  # pandas' own way to have an attribute passed on
    kinds: Mapping[str, FieldType]

    @property
    def _constructor(self) -> Callable[..., RowsFrame]:
        return RowsFrame

    def to_parquet(self, path: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As pandas does it. Tensors are nested lists, of a fixed size where all have one shape.

        `import_parquet` and `ParquetRows` have them back as tensors. A complex number is a list of two.
        `export_parquet(cache, folder, rows=frame)` writes the rows of a large result from the cache.
        """
        plain, types = pd.DataFrame(self), dict[str, pa.DataType]()
        for name in [name for name in self.columns if plain[name].dtype.kind in "Oc"]:
            values = [_in_pairs(value) for value in plain[name].to_numpy()]
            if (found := _list_type(values)) is not None:
                types[name] = found
                plain[name] = pd.Series([_as_lists(value) for value in values], plain.index, object)
        if types and "schema" not in kwargs:
            if kwargs.get("index") is None and not self.index.equals(pd.RangeIndex(len(self))):
                kwargs["index"] = True  # a schema of ours would lose it
            others = pa.Schema.from_pandas(plain.drop(columns=list(types)), kwargs.get("index"))
            fields = {field.name: field for field in others} | {
                name: pa.field(name, types[name]) for name in types
            }
            order = [*map(str, plain.columns), *(name for name in others.names if name not in plain.columns)]
            kwargs["schema"] = pa.schema([fields[name] for name in order])
        return plain.to_parquet(path, *args, **kwargs)

    def _repr_html_(self) -> str | None:
        kinds = getattr(self, "kinds", {})
        if not pd.get_option("display.notebook_repr_html"):
            return None
        shown = self.head(pd.get_option("display.max_rows") or len(self))
        labels = {"index": _escaped, "columns": _escaped}
        shown = shown.rename(**labels).rename_axis(**labels)
        formatters = [_formatter(kinds.get(name)) for name in self.columns]
        text: str = pd.DataFrame(shown).to_html(escape=False, formatters=formatters, border=0)
        if len(shown) < len(self):
            text += f"<p>{len(shown)} of {format_count(len(self), 'row')}</p>"
        return text


def _escaped(label: Any) -> str | None:
    return None if label is None else html.escape(str(label))


def _formatter(kind: FieldType | None) -> Callable[[Any], str]:
    """How the values of a column show in HTML; None: of one that the cache does not have, such as a renamed.

    What has axes, bytes and text are pictures, which are small however large the value is. What cannot be
    drawn, such as what a user has put there, says so: a table is never half a table.
    """

    def cell(value: Any) -> str:
        if not isinstance(value, np.ndarray | bytes | bytearray | str) and (
            value is None or not has_axes(kind)
        ):
            return html.escape(shorten(str(value), _MAX_TEXT))
        from arrowcache.explore.pictures import picture  # matplotlib's colours, for those who look

        try:
            return picture(value, kind, _SIZE)._repr_html_()
        except (ArrowCacheError, TypeError, ValueError) as error:
            return html.escape(shorten(f"cannot be drawn: {sentence_of(error)}", _MAX_TEXT))

    return cell


def _in_pairs(value: Any) -> Any:
    """Complex numbers as pairs; anything else as it is."""
    if isinstance(value, np.ndarray | np.complexfloating) and value.dtype.kind == "c":
        return np.stack([value.real, value.imag], axis=-1)
    return value


def _list_type(values: Sequence[Any]) -> pa.DataType | None:
    """The Arrow type of some arrays; None: they are none, or none that one type holds."""
    arrays = [value for value in values if value is not None]
    if not arrays or not all(type(value) is np.ndarray and value.ndim for value in arrays):
        return None
    first = max(arrays, key=lambda value: value.size > 0)  # an empty list of SQL has lost its dtype
    if first.dtype.kind not in "biuf" or any(value.size and value.dtype != first.dtype for value in arrays):
        return None
    shapes = {value.shape for value in arrays}
    inner = {shape[1:] for shape in shapes}
    if len(inner) > 1:
        return None
    found = pa.from_numpy_dtype(first.dtype)
    sizes = first.shape if len(shapes) == 1 else (0, *first.shape[1:])
    for size in reversed(sizes):
        found = pa.list_(found, size or -1)  # Parquet has no lists of a fixed size of 0
    return found


def _as_lists(value: Any) -> Any:
    """An array as lists of arrays of one axis, which Arrow takes."""
    return [_as_lists(part) for part in value] if isinstance(value, np.ndarray) and value.ndim > 1 else value


_ID_KINDS = dict.fromkeys(ID_COLUMNS, Tensor("int64"))
_Kinds = Mapping[str, FieldType | None]  # None: lists of texts


def head(cache: AnyCache, n: int = 5, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """The oldest rows, as `to_pandas` gives them, always with `_seq`, `_row` and what was noted of them.

    Args:
        n: at most so many.
        columns: which, between the ids and the notes; None for all.
    Raises: as `to_pandas`.
    """
    n = parse_count(n, "n", least=0)
    with Snapshot.take(store := store_of(cache)) as snapshot:
        ids = np.arange(min(n, len(snapshot)))
        return frame_of(snapshot, store, ids, _with_ids(store, snapshot, columns))


def sample(cache: AnyCache, n: int = 5, seed: int = 0, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Rows drawn at random from all, none of them twice, with the columns that `head` has.

    Args:
        n: at most so many, in the order in which they were drawn.
        seed: the same draws the same rows, of the same segments.
        columns: as of `head`.
    Raises: as `to_pandas`.
    """
    n, seed = parse_count(n, "n", least=0), parse_count(seed, "seed", least=0, most=None)
    with Snapshot.take(store := store_of(cache)) as snapshot:
        rng = np.random.default_rng(seed)
        ids = rng.choice(len(snapshot), size=min(n, len(snapshot)), replace=False)
        return frame_of(snapshot, store, ids.astype(np.int64), _with_ids(store, snapshot, columns))


def rows(
    cache: AnyCache, ids: object, columns: Sequence[str] | None = None, missing: str = "raise"
) -> pd.DataFrame:
    """The rows of these ids, as `to_pandas` gives them, in the order asked for; a row may be asked for twice.

    Args:
        ids: `ac.RowId` or texts such as "83:26", one or several; integers (n, 2); or what has the columns
            `_seq` and `_row`: a DataFrame, also a part of one, an Arrow table, a batch of a loader with ids.
        columns: as of `to_pandas`.
        missing: of rows that were evicted since, "raise" or "skip", which leaves them out.
    Blocks: while rows are copied, and leased.
    Raises: MissingSegmentsError: rows have left the cache; says how old the oldest are that are there.
        IndexError: a row that never was. ValueError, TypeError: what names no row. Else as `to_pandas`.
    """
    wanted = row_ids(ids)
    with Snapshot.take(store := store_of(cache)) as snapshot:
        places = snapshot.positions(wanted, missing)
        return frame_of(snapshot, store, places, columns)


def to_pandas(
    cache: AnyCache, columns: Sequence[str] | None = None, limit: int | None = None
) -> pd.DataFrame:
    """Rows as a pandas DataFrame, oldest first: one row a sample, copied into memory.

    Its first columns, `_seq` and `_row`, are each row's id: the number of its segment, and its place therein.
    `rows`, `gallery` and all that takes ids take the frame, or any part of it that has both. Its last columns
    are what was noted of the rows, if anything was: `_excluded`, `_reason` (missing where it is not), `_tags`
    (lists of texts), and annotations by their names, NaN where none is.

    Numbers, bool and text have pandas' own dtypes, timestamps datetime64[us, UTC]. A tensor is an object:
    an ndarray of its shape; one of a ragged column has as many entries as it has. bfloat16, and
    float16 that is no tensor, are float32.

    Args:
        columns: which, in this order; None for all, with `_seq` and `_row`, which can be named, too.
        limit: at most so many rows; None for all, which must fit into memory.
    Blocks: while rows are copied, and leased.
    Raises: ValueError: an unknown column. CorruptSegmentError: a damaged segment, which was quarantined.
        FileNotFoundError: no cache, or none any more.
    """
    return _frame(*_oldest(cache, columns, limit))


def to_polars(
    cache: AnyCache, columns: Sequence[str] | None = None, limit: int | None = None
) -> pl.DataFrame:
    """Rows as a Polars DataFrame, oldest first, copied into memory.

    A tensor column is an Array of the tensor's shape, a ragged one a List; timestamps are Datetime in UTC,
    bfloat16 is Float32, and complex numbers are pairs.

    Args, blocks, raises: as `to_pandas`; and ImportError: Polars, which no extra brings, is not installed.
    """
    try:
        import polars as pl  # 181 MB, for those who have it
    except ModuleNotFoundError as error:
        raise ImportError(
            "arrowcache.explore.to_polars needs polars, which is not installed: pip install polars"
        ) from error
    # Its handler of Ctrl-C has waits go on: https://github.com/pola-rs/polars/issues/21739
    signal.siginterrupt(signal.SIGINT, True)
    kinds, values = _oldest(cache, columns, limit)
    return pl.DataFrame({name: _polars(kind, values[name]) for name, kind in kinds.items()})


def frame_of(
    snapshot: Snapshot, store: Store, places: NDArray[np.int64], columns: Sequence[str] | None = None
) -> RowsFrame:
    """Rows of a snapshot by their places, as `to_pandas` gives them."""
    return _frame(*_gathered(snapshot, store, places, columns))


def _oldest(
    cache: AnyCache, columns: Sequence[str] | None, limit: int | None
) -> tuple[_Kinds, Mapping[str, ColumnData]]:
    limit = None if limit is None else parse_count(limit, "limit", least=0)
    with Snapshot.take(store := store_of(cache)) as snapshot:
        ids = np.arange(len(snapshot) if limit is None else min(limit, len(snapshot)))
        return _gathered(snapshot, store, ids, columns)


def _gathered(
    snapshot: Snapshot, store: Store, ids: NDArray[np.int64], columns: Sequence[str] | None
) -> tuple[_Kinds, Mapping[str, ColumnData]]:
    """The chosen columns, `_seq`, `_row` and notes among them: their types, and their values of some rows."""
    schema, noted = store.settings.schema, NotedRows(store, snapshot, ids)
    chosen = select_with_notes(
        schema, noted, (*ID_COLUMNS, *schema, *noted.names) if columns is None else columns
    )
    names = [name for name in chosen if name in schema]
    kinds = _ID_KINDS | noted.kinds | dict(schema)
    gathered = snapshot.gather(ids, names)
    values = {**snapshot.locate(ids), **{name: _as_numbers(kinds[name], gathered[name]) for name in names}}
    values |= {name: noted.column(name)[ids] for name in noted.kinds if name in chosen}
    return {name: kinds[name] for name in chosen}, values


def _with_ids(store: Store, snapshot: Snapshot, columns: Sequence[str] | None) -> Sequence[str] | None:
    """These columns between the ids and the notes of rows."""
    if columns is None or isinstance(columns, str) or not hasattr(columns, "__iter__"):
        return columns
    own, noted = [name for name in columns if name not in ID_COLUMNS], NotedRows(store, snapshot).names
    return [*ID_COLUMNS, *own, *(name for name in noted if name not in own)]


def _as_numbers(kind: FieldType | None, values: ColumnData) -> ColumnData:
    """The values, of bfloat16 as float32."""
    if not isinstance(kind, Tensor | Ragged) or kind.dtype != "bfloat16":
        return values
    if isinstance(values, Values):
        return Values(bfloat16_values(values.data), values.offsets)
    return bfloat16_values(np.asarray(values))


def _frame(kinds: _Kinds, values: Mapping[str, ColumnData]) -> RowsFrame:
    series = {name: _series(kind, values[name]) for name, kind in kinds.items()}
    frame = RowsFrame(
        series, index=pd.RangeIndex(len(values[ID_COLUMNS[0]])), columns=list(kinds), copy=False
    )
    frame.kinds = {name: kind for name, kind in kinds.items() if kind is not None}
    return frame


def _series(kind: FieldType | None, values: ColumnData) -> Any:
    """What pandas makes one column of."""
    if kind is None:
        return values
    if isinstance(kind, Timestamp):
        return pd.Series(values).dt.tz_localize("UTC")
    if isinstance(values, Values):
        parts = (values.data[a:b] for a, b in itertools.pairwise(values.offsets.tolist()))
        return np.fromiter(parts, object)
    if isinstance(kind, Tensor):
        assert isinstance(values, np.ndarray)
        if kind.shape:
            return np.fromiter(values, object)
        return values.astype(np.float32) if values.dtype == np.float16 else values  # pandas has no halves
    if isinstance(values, list) and not values:
        return pd.Series(values, dtype="str" if kind.arrow_type == pa.utf8() else "object")
    return values


def _polars(kind: FieldType | None, values: ColumnData) -> pl.Series:
    """What Polars makes one column of."""
    import polars as pl

    if kind is None or isinstance(kind, String | Binary):
        text = pl.Binary if isinstance(kind, Binary) else pl.String
        return pl.Series(list(values), dtype=text if kind is not None else pl.List(text))
    data = np.ascontiguousarray(values.data if isinstance(values, Values) else values)
    if data.dtype.kind == "c":
        data = data.view(data.real.dtype).reshape(*data.shape, 2)
    series = pl.Series(data)
    if isinstance(values, Values):
        lists = pa.LargeListArray.from_arrays(pa.array(values.offsets), series.to_arrow())
        return pl.Series(lists)
    return series.dt.replace_time_zone("UTC") if isinstance(kind, Timestamp) else series
