"""Summary: what each column of a cache holds, in numbers. One pass, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from arrowcache.arrow.notation import type_name
from arrowcache.arrow.schema import Binary, FieldType, Ragged, String, Tensor, Timestamp
from arrowcache.explore.distribution import Distribution, Histogram, distribution
from arrowcache.explore.noted import select
from arrowcache.explore.numbers import floats, lengths, numbers, real
from arrowcache.explore.walk import AnyCache, keeps_nothing, walk
from arrowcache.limits import Limits
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.recovery import store_of
from arrowcache.storage.row_ids import RowId
from arrowcache.units import parse_count

_DTYPES = {"count": "int64"}
_DTYPES |= dict.fromkeys(("distinct", "shortest", "longest"), "Int64")
_DTYPES |= dict.fromkeys(("min", "max", "min_row", "max_row", "histogram"), "object")  # each as it is
_MOST_BINS = 64
_MOST_THREADS = 4
_ROWS_A_LOOK = 1 << 16


@keeps_nothing
def describe(
    cache: AnyCache, columns: Sequence[str] | None = None, bins: int = 20, progress: bool | None = None
) -> pd.DataFrame:
    """What each column holds: one row a column.

    Of a tensor or ragged column the numbers are all its elements, of all rows; bool counts as 0 and 1, a
    complex number as its magnitude.

        type        as in the schema
        count       how many values, NaN and NaT included
        nan         the share of them that is NaN or NaT
        min, max    of the others, infinity included; exact integers
        min_row, max_row   ids of the oldest rows that have them, as texts "seq:row" for `rows` and `gallery`
        mean, std   of the others; the population's standard deviation
        distinct    different values of text, bytes, integers and bool; NA beyond 10,000, and where none are
                    counted: floats, tensors
        shortest, mean_length, longest   of rows of text (characters), bytes and ragged columns (entries)
        histogram   a Histogram: `counts` of the finite values between `edges`, which prints as bars; of text
                    and bytes that of the lengths

    Args:
        columns: which; None for all. Of the others nothing is read.
        bins: at most so many in a histogram, 1 to 64.
        progress: show a bar; None: in a terminal or a notebook.
    Blocks: while the columns are read, in some threads. Segments are released as they are passed, so
        samplers go on; some three of them are mapped at a time, and memory beside that is some MB.
    Raises: ValueError: an unknown column. CorruptSegmentError: a damaged segment, which was quarantined.
        FileNotFoundError: no cache, or none any more.
    """
    store = store_of(cache)
    schema = store.settings.schema
    names = select(store, columns)
    bins = parse_count(bins, "bins", most=_MOST_BINS)
    with Snapshot.take(store) as snapshot:
        found = summarize(snapshot, {name: schema[name] for name in names}, "describing", progress)
    rows = [summary.row(bins) for summary in found.values()]
    index = pd.Index(names, name="column")
    has_moments = any(isinstance(schema[name], Timestamp) for name in names)
    dtypes = _DTYPES | dict.fromkeys(("mean", "std"), "object" if has_moments else "float64")
    return pd.DataFrame(
        {
            figure: pd.Series([row[figure] for row in rows], index, dtype=dtypes.get(figure))
            for figure in rows[0]
        }
    )


def summarize(
    snapshot: Snapshot, kinds: Mapping[str, FieldType], what: str, progress: bool | None, draws: int = 0
) -> dict[str, Summary]:
    """What a snapshot's columns hold, with some `draws` of the numbers of each. Blocks, raises: as `walk`."""
    found = {name: Summary(kind) for name, kind in kinds.items()}
    rng, rows = np.random.default_rng(0), len(snapshot)
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))  # a few: others are at work on this machine
    with ThreadPoolExecutor(threads, "arrowcache-describe") as pool:
        for segment, batch in walk(snapshot, tuple(kinds), what, progress):
            for name, summary in found.items():
                summary.add(batch.column(name), pool, segment.seq)
                if draws:
                    summary.draw(batch.column(name), rng, -(-draws * segment.rows // rows))
            del batch
    return found


def distribution_of(column: pa.Array, kind: FieldType, pool: ThreadPoolExecutor) -> Distribution:
    """The distribution of all numbers of a segment's column, found by a pool's threads.

    Of text and bytes it is their lengths', of timestamps that of microseconds since 1970.
    """
    values = numbers(column, kind)
    size = Limits.current.summed_numbers
    pieces = [values[start : start + size] for start in range(0, len(values), size)]
    found = Distribution()
    for part in (pool.map if len(pieces) > 1 else map)(lambda piece: distribution(real(piece, kind)), pieces):
        found.merge(part)
    return found


def _row_of(at: int, count: int, column: pa.Array, kind: FieldType) -> int:
    """The row of a segment that has number `at` of all its `count` numbers."""
    if isinstance(kind, Ragged):
        ends = np.cumsum(lengths(column, kind))
        return int(ends.searchsorted(at * int(ends[-1]) // count, side="right"))
    return at * len(column) // count


class Summary:
    """What was seen of one column: its `values`, of text and bytes the lengths; `drawn` are some of them."""

    def __init__(self, kind: FieldType) -> None:
        self._kind = kind
        self.values = Distribution()
        self.drawn: list[NDArray[np.float64]] = []
        self._low_id: RowId | None = None  # of the first row with the least value
        self._high_id: RowId | None = None
        self._lengths = Distribution() if isinstance(kind, Ragged) else None
        is_countable = isinstance(kind, String | Binary) or (
            isinstance(kind, Tensor) and not kind.shape and kind.dtype.startswith(("bool", "int", "uint"))
        )
        self._distinct: set[Any] | None = set() if is_countable else None

    def add(self, column: pa.Array, pool: ThreadPoolExecutor, seq: int) -> None:
        before, found = self.values, distribution_of(column, self._kind, pool)
        if not isinstance(self._kind, String | Binary):
            if found.low is not None and (before.low is None or found.low < before.low):
                self._low_id = RowId(seq, _row_of(found.low_at, found.count, column, self._kind))
            if found.high is not None and (before.high is None or found.high > before.high):
                self._high_id = RowId(seq, _row_of(found.high_at, found.count, column, self._kind))
        self.values.merge(found)
        if self._lengths is not None:
            assert isinstance(self._kind, Ragged)
            self._lengths.merge(distribution(lengths(column, self._kind)))
        for start in range(0, len(column), _ROWS_A_LOOK):
            if self._distinct is not None:
                self._distinct.update(self._marks(pc.unique(column.slice(start, _ROWS_A_LOOK))))
                if len(self._distinct) > Limits.current.distinct_values:
                    self._distinct = None

    def draw(self, column: pa.Array, rng: np.random.Generator, count: int) -> None:
        """Keep at most `count` of a segment's numbers, as `floats`."""
        values = numbers(column, self._kind)
        if len(values) > count:
            values = values[np.sort(rng.integers(0, len(values), count))]
        self.drawn.append(floats(values, self._kind))

    def _marks(self, values: pa.Array) -> Iterator[Any]:
        """What tells values apart and is small."""
        if isinstance(self._kind, Tensor):
            yield from values.to_pylist()
        else:
            for value in values.cast(pa.binary()):
                yield xxhash.xxh3_128_digest(value.as_buffer())

    def row(self, bins: int) -> dict[str, Any]:
        values = self.values
        is_text = isinstance(self._kind, String | Binary)
        sizes = values if is_text else self._lengths
        row: dict[str, Any] = {
            "type": type_name(self._kind),
            "count": values.count,
            "nan": values.nans / values.count if values.count else np.nan,
            "min": None if is_text else values.low,
            "max": None if is_text else values.high,
            "min_row": None if self._low_id is None else str(self._low_id),
            "max_row": None if self._high_id is None else str(self._high_id),
            "mean": np.nan if is_text else values.mean,
            "std": np.nan if is_text else values.std,
            "distinct": None if self._distinct is None else len(self._distinct),
            "shortest": None if sizes is None else sizes.low,
            "mean_length": np.nan if sizes is None else sizes.mean,
            "longest": None if sizes is None else sizes.high,
            "histogram": values.histogram(bins),
        }
        if isinstance(self._kind, Tensor) and self._kind.dtype == "bool":
            row |= {end: None if row[end] is None else bool(row[end]) for end in ("min", "max")}
        if isinstance(self._kind, Timestamp):
            row |= _as_times(row)
        return row


def _as_times(row: dict[str, Any]) -> dict[str, Any]:
    """Microseconds since 1970 as moments and durations of pandas."""
    is_none = row["min"] is None
    times: dict[str, Any] = {
        figure: pd.NaT if is_none else pd.Timestamp(round(row[figure]), unit="us", tz="UTC")
        for figure in ("min", "max", "mean")
    }
    times["std"] = pd.NaT if is_none else pd.Timedelta(np.timedelta64(round(row["std"]), "us"))
    found: Histogram = row["histogram"]
    times["histogram"] = Histogram(found.counts, found.edges.astype(np.int64).view("datetime64[us]"))
    return times
