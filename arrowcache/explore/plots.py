"""Plots: how a cache grows and is used, drawn with matplotlib. Each returns its Axes.

What happened is in `monitor(cache).history`; what is there now `observe` and `sql` give as numbers. Without
`ax` each plot has a figure of its own.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from numpy.typing import NDArray

from arrowcache.arrow.schema import FieldType, Ragged, Tensor, Timestamp
from arrowcache.display import printable
from arrowcache.explore.columns import AnyCache, draw, require_column, select
from arrowcache.explore.observation import History
from arrowcache.limits import Limits
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.recovery import store_of
from arrowcache.storage.store import Store
from arrowcache.units import parse_count

_MIB = 1 << 20
_MAX_COLORS = 20  # of plot_map: different values with a color each
_FARTHEST = 1e300  # what can be drawn: twice as far is a number, too


def plot_growth(cache: AnyCache, history: History | None = None, *, ax: Axes | None = None) -> Axes:
    """Bytes in the cache over time, and the capacity.

    What is there now tells when it was published. With a history: what the cache held, and the bytes that
    were evicted since it began.
    """
    survey = store_of(cache).survey()
    if history is not None and not isinstance(history, History):
        raise TypeError(f"expected a History, such as monitor(cache).history, got {history!r}")
    moments = () if history is None else history.moments  # the history may go on meanwhile
    ax = _axes(ax, "Growth and eviction", "MiB")
    if moments:
        when = _dates([moment.time for moment in moments])
        evicted = np.cumsum([moment.evicted_bytes for moment in moments]) / _MIB
        ax.plot(when, [moment.stats.published_bytes / _MIB for moment in moments], label="published segments")
        ax.plot(when, evicted, label="evicted since")
    else:
        sizes = np.array([segment.allocated_bytes for segment in survey.segments], float)
        when = _dates([segment.published for segment in survey.segments])
        ax.step(when, np.cumsum(sizes) / _MIB, where="post", label="segments in the cache")
    ax.axhline(survey.stats.capacity_bytes / _MIB, color="0.5", linestyle="--", label="capacity")
    ax.set_ylim(bottom=0)
    locator = AutoDateLocator()  # type: ignore[no-untyped-call]  # matplotlib has not typed its dates
    ax.xaxis.set_major_locator(locator)
    ax.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]  # as above
    ax.legend()
    return ax


def plot_values(cache: AnyCache, column: str, bins: int = 50, *, ax: Axes | None = None) -> Axes:
    """The distribution of a column's values, segment by segment: a heat map, oldest segment on the left.

    Of each segment up to 4096 values are read, drawn at random; of a cache of more than 400 segments, 400 of
    them, evenly spread. One segment is leased at a time; one that is evicted first is left out.
    What is not finite is left out.

    Raises: ValueError: no such column, or one without numbers; a cache without values of it.
    """
    bins = parse_count(bins, "bins")
    store = store_of(cache)
    wanted = "there are no numbers in it to be drawn"
    select(store, [column])
    kind = require_column(store.settings.schema, column, _has_numbers, wanted)
    listed = store.survey().segments
    count = min(len(listed), Limits.current.plotted_segments)
    chosen = [listed[i] for i in np.linspace(0, len(listed) - 1, count).round().astype(int)] if count else []
    values = {segment.seq: _values(store, segment, column, kind) for segment in chosen}
    values = {seq: some for seq, some in values.items() if len(some)}
    if not values:
        raise ValueError(f"column {column!r} has no finite values in {store.folder.path} to be drawn")
    sizes = [len(some) for some in values.values()]
    cells: Any = [np.arange(len(sizes) + 1) - 0.5, bins]
    places, shares = (np.repeat(each, sizes) for each in (np.arange(len(sizes)), 1 / np.array(sizes)))
    ax = _axes(ax, f"Values of {_label(column)} by segment", _label(column))
    *_, mesh = ax.hist2d(places, np.concatenate([*values.values()]), cells, weights=shares)
    seqs = list(values)
    ticks = np.unique(np.linspace(0, len(seqs) - 1, min(len(seqs), 8)).round().astype(int))
    ax.set_xticks(ticks, [str(seqs[tick]) for tick in ticks])
    ax.set_xlabel("segment")
    ax.figure.colorbar(mesh, ax=ax, label="share of the segment's values")
    return ax


def plot_map(places: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """The points of `map_of`, colored by its `by`."""
    if not isinstance(places, pd.DataFrame) or "explained" not in places.attrs:
        raise TypeError(f"expected what map_of(cache, column) gives, got {type(places).__name__}")
    by, shares = places.attrs["by"], (*places.attrs["explained"], 0.0)
    ax = _axes(ax, f"Rows by their {_label(places.attrs['column'])}", "")
    colors: dict[str, Any] = {}
    if by is not None:
        is_number = pd.api.types.is_float_dtype(places[by]) or places[by].nunique() > _MAX_COLORS
        colors = {"c": by, "colormap": "viridis" if is_number else "tab10"}
        places = places if is_number else places.astype({by: "category"})
    pd.DataFrame(places).plot.scatter("x", "y", ax=ax, s=8, alpha=0.7, linewidths=0, **colors)
    ax.set(xlabel=f"x: {shares[0]:.0%} of the variance", ylabel=f"y: {shares[1]:.0%}")
    return ax


def _has_numbers(kind: FieldType) -> bool:
    is_list = isinstance(kind, Tensor | Ragged) and not kind.dtype.startswith("complex")
    return is_list or isinstance(kind, Timestamp)


def _values(store: Store, segment: SegmentInfo, name: str, kind: FieldType) -> NDArray[np.float64]:
    """Some finite values of a segment, timestamps as seconds since 1970; none if it is gone."""
    found, rng = np.empty(0), np.random.default_rng(0)
    with Snapshot.take(store, lambda other: other.seq == segment.seq) as snapshot:
        for batch in snapshot.record_batches([name]):
            found = draw(batch.column(0), kind, rng, Limits.current.plotted_values)
            del batch
    found = found[np.isfinite(found)] / (1e6 if isinstance(kind, Timestamp) else 1)
    return np.clip(found, -_FARTHEST, _FARTHEST)


def _label(text: str) -> str:
    """Text in which matplotlib finds no formula, and no character that cannot be drawn."""
    return printable(text).replace("$", r"\$")


def _axes(ax: Axes | None, title: str, ylabel: str) -> Axes:
    if ax is None:
        ax = plt.subplots(layout="constrained")[1]
    ax.set_title(title)
    ax.set_ylabel(ylabel)
    return ax


def _dates(times: Sequence[float]) -> NDArray[np.datetime64]:
    """In the time zone of this machine, as a clock on its wall shows."""
    moments = pd.to_datetime(np.array(times, float), unit="s", utc=True)
    return np.asarray(moments.tz_convert(dt.datetime.now().astimezone().tzinfo).tz_localize(None))
