"""Frames: rows of a cache as DataFrames of pandas and Polars. All are copies: nothing stays leased."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from arrowcache.arrow.schema import FieldType, Ragged, Schema, Tensor, Timestamp
from arrowcache.display import shorten
from arrowcache.errors import ArrowCacheError, sentence_of
from arrowcache.explore.numbers import bfloat16_values
from arrowcache.explore.walk import AnyCache
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.values import ColumnData, Values
from arrowcache.storage.recovery import store_of
from arrowcache.units import parse_count

_MOST_TEXT = 200


class Rows(pd.DataFrame):  # type: ignore[misc]  # pandas ships no type information
    """A DataFrame that shows tensors, bytes and text small in a notebook; else it is like any other."""

    _metadata = ["kinds"]  # noqa: RUF012  # pandas' own way to have an attribute passed on
    kinds: Mapping[str, FieldType]

    @property
    def _constructor(self) -> Callable[..., Rows]:
        return Rows

    def _repr_html_(self) -> str | None:
        kinds = getattr(self, "kinds", {})
        if not pd.get_option("display.notebook_repr_html"):
            return None
        names = [html.escape(str(name)) for name in self.columns]
        shown = self.head(pd.get_option("display.max_rows") or len(self)).set_axis(names, axis=1)
        formatters = [_formatter(kinds.get(name)) for name in self.columns]
        text: str = pd.DataFrame(shown).to_html(escape=False, formatters=formatters, border=0)
        if len(shown) < len(self):
            text += f"<p>{len(shown)} of {len(self)} rows</p>"
        return text


def head(cache: AnyCache, n: int = 5) -> pd.DataFrame:
    """The oldest rows, as `to_pandas` gives them.

    Args:
        n: at most so many.
    Raises: as `to_pandas`.
    """
    return to_pandas(cache, limit=n)


def sample(cache: AnyCache, n: int = 5, seed: int = 0) -> pd.DataFrame:
    """Rows drawn at random from all, none of them twice, as `to_pandas` gives them.

    Args:
        n: at most so many, in the order in which they were drawn.
        seed: the same draws the same rows, of the same segments.
    Raises: as `to_pandas`.
    """
    n, seed = parse_count(n, "n", least=0), parse_count(seed, "seed", least=0, most=None)
    store = store_of(cache)
    schema = store.settings.schema
    with Snapshot.take(store) as snapshot:
        rng = np.random.default_rng(seed)
        ids = rng.choice(len(snapshot), size=min(n, len(snapshot)), replace=False)
        values = snapshot.gather(ids.astype(np.int64))
    return _frame(schema, values, len(ids))


def to_pandas(
    cache: AnyCache, columns: Sequence[str] | None = None, limit: int | None = None
) -> pd.DataFrame:
    """Rows as a pandas DataFrame, oldest first: one row a sample, copied into memory.

    Numbers, bool and text have pandas' own dtypes, timestamps datetime64[us, UTC]. A tensor is an object:
    an ndarray of its shape; one of a ragged column has as many entries as it has. bfloat16, and
    float16 that is no tensor, are float32.

    Args:
        columns: which; None for all.
        limit: at most so many rows; None for all, which must fit into memory.
    Blocks: while rows are copied, and leased.
    Raises: ValueError: an unknown column. CorruptSegmentError: a damaged segment, which was quarantined.
        FileNotFoundError: no cache, or none any more.
    """
    schema, names, values, rows = _oldest(cache, columns, limit)
    return _frame(Schema({name: schema[name] for name in names}), values, rows)


def to_polars(
    cache: AnyCache, columns: Sequence[str] | None = None, limit: int | None = None
) -> pl.DataFrame:
    """Rows as a Polars DataFrame, oldest first, copied into memory.

    A tensor column is an Array of the tensor's shape, a ragged one a List; timestamps are Datetime in UTC,
    bfloat16 is Float32, and complex numbers are pairs.

    Args, blocks, raises: as `to_pandas`.
    """
    schema, names, values, _ = _oldest(cache, columns, limit)
    arrays = [_plain(schema[name], values[name]) for name in names]
    frame = pl.from_arrow(pa.Table.from_arrays(arrays, names=list(names)))
    assert isinstance(frame, pl.DataFrame)
    return frame


def _oldest(
    cache: AnyCache, columns: Sequence[str] | None, limit: int | None
) -> tuple[Schema, tuple[str, ...], dict[str, ColumnData], int]:
    store = store_of(cache)
    schema = store.settings.schema
    names = schema.select(columns, least=1)
    limit = None if limit is None else parse_count(limit, "limit", least=0)
    with Snapshot.take(store) as snapshot:
        rows = len(snapshot) if limit is None else min(limit, len(snapshot))
        return schema, names, snapshot.gather(np.arange(rows), names), rows


def _frame(schema: Schema, values: Mapping[str, ColumnData], rows: int) -> Rows:
    series = {name: _series(kind, values[name]) for name, kind in schema.items()}
    frame = Rows(series, index=pd.RangeIndex(rows), columns=list(schema), copy=False)
    frame.kinds = dict(schema)
    return frame


def _series(kind: FieldType, values: ColumnData) -> Any:
    """What pandas makes one column of."""
    if isinstance(kind, Timestamp):
        return pd.Series(values).dt.tz_localize("UTC")
    if isinstance(kind, Ragged | Tensor) and kind.dtype == "bfloat16":
        values = _map(bfloat16_values, values)
    if isinstance(values, Values):
        return _objects([values.data[a:b] for a, b in itertools.pairwise(values.offsets.tolist())])
    if isinstance(kind, Tensor):
        assert isinstance(values, np.ndarray)
        if kind.shape:
            return _objects(list(values))
        return values.astype(np.float32) if values.dtype == np.float16 else values  # pandas has no halves
    if isinstance(values, list) and not values:
        return pd.Series(values, dtype="str" if kind.arrow_type == pa.utf8() else "object")
    return values


def _objects(items: list[Any]) -> NDArray[np.object_]:
    """One object an item: NumPy would make one array of arrays of one shape."""
    objects = np.empty(len(items), object)
    for place, item in enumerate(items):
        objects[place] = item
    return objects


def _plain(kind: FieldType, values: ColumnData) -> pa.Array:
    """A gathered column as Arrow array of plain types: nested lists, no extension."""
    if isinstance(kind, Timestamp):
        return pa.array(values, pa.timestamp("us", "UTC"))
    if not isinstance(kind, Ragged | Tensor):
        return pa.array(values, kind.arrow_type)
    if kind.dtype == "bfloat16":
        values = _map(bfloat16_values, values)
    data = values.data if isinstance(values, Values) else values
    assert isinstance(data, np.ndarray)
    shape = kind.shape if isinstance(kind, Tensor) else kind.inner_shape
    if data.dtype.kind == "c":
        data, shape = data.view(data.real.dtype), (*shape, 2)
    array = pa.array(np.ascontiguousarray(data).reshape(-1))
    for size in reversed(shape):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    if not isinstance(values, Values):
        return array
    return pa.LargeListArray.from_arrays(pa.array(values.offsets), array)


def _map(function: Callable[[NDArray[Any]], NDArray[Any]], values: ColumnData) -> ColumnData:
    if isinstance(values, Values):
        return Values(function(values.data), values.offsets)
    return function(np.asarray(values))


def _formatter(kind: FieldType | None) -> Callable[[Any], str]:
    """How the values of a column show in HTML; None: of one that the cache does not have, such as a renamed.

    What has axes, bytes and text are pictures, which are small however large the value is. What cannot be
    drawn, such as what a user has put there, says so: a table is never half a table.
    """

    def cell(value: Any) -> str:
        if not isinstance(value, np.ndarray | bytes | str) and (value is None or not _has_axes(kind)):
            return html.escape(shorten(str(value), _MOST_TEXT))
        from arrowcache.explore.pictures import picture_html  # matplotlib's colours, for those who look

        try:
            return picture_html(value, kind)
        except (ArrowCacheError, TypeError, ValueError) as error:
            return html.escape(shorten(f"cannot be drawn: {sentence_of(error)}", _MOST_TEXT))

    return cell


def _has_axes(kind: FieldType | None) -> bool:
    return isinstance(kind, Ragged) or (isinstance(kind, Tensor) and bool(kind.shape))
