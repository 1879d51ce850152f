"""Summary: what each column of a cache holds, in numbers. One pass, in bounded memory.

A `Distribution` is count, extremes, mean, variance and histogram of numbers that come in pieces, to stay in
the processor's cache. Two distributions merge into that of both, in any order: Chan, Golub and LeVeque,
"Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", Stanford STAN-CS-79-773 (1979).

The histogram's range need not be known before: its cells are [k * w, (k + 1) * w) with w a power of two, and
where they become too many, w doubles, which makes two cells one. So each count is exact, and the cells of two
distributions fit onto each other.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from arrowcache.arrow.schema import Binary, FieldType, Ragged, String, Tensor, Timestamp, type_name
from arrowcache.display import bars
from arrowcache.explore.columns import (
    AnyCache,
    draw,
    keeps_nothing,
    lengths,
    numbers,
    real,
    select,
    walk,
)
from arrowcache.limits import Limits
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.recovery import store_of
from arrowcache.storage.row_ids import RowId
from arrowcache.units import parse_count

if TYPE_CHECKING:
    from typing import Self


_PIECE = 1 << 18  # numbers
_CELLS = 128
_DIGITS = 50  # cells are never so narrow that float64 cannot number them


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """Counts between edges: counts[i] numbers are in [edges[i], edges[i + 1]). Prints as bars.

    `edges` are float64, or datetime64[us] for timestamps; one more than there are counts.
    """

    counts: NDArray[np.int64]
    edges: NDArray[Any]

    def __str__(self) -> str:
        return bars(self.counts.tolist())

    __repr__ = __str__


class Distribution:
    """Count, extremes, mean, deviation and histogram of numbers. Empty at first; `merge` adds others.

    `count` counts all numbers, `nans` those that are NaN. `low` and `high` are exact, and None of no number.
    `low_at` is the place of the first lowest number among all, and `high_at` that of the first highest.
    Not thread-safe.
    """

    def __init__(self) -> None:
        self.count = self.nans = 0
        self.low: float | int | None = None
        self.high: float | int | None = None
        self.low_at = self.high_at = 0
        self._infinite = 0.0  # the sum of those that are
        self._mean = self._squares = 0.0  # of the finite ones; squares of differences from the mean
        self._cells = Counter[int]()  # cell -> finite numbers in [cell, cell + 1) * 2**exponent
        self._exponent = -1000

    @property
    def nan_share(self) -> float:
        """The share that is NaN, 0 to 1; NaN of none."""
        return self.nans / self.count if self.count else math.nan

    @property
    def mean(self) -> float:
        """Of all that are a number; NaN of none."""
        return self._infinite or (self._mean if self._cells else math.nan)

    @property
    def std(self) -> float:
        """The population's standard deviation, of all numbers; NaN of none, or if one is infinite."""
        if not self._cells or self._infinite:
            return math.nan
        return math.sqrt(max(0.0, self._squares) / self._cells.total())

    def histogram(self, bins: int) -> Histogram:
        """The finite numbers in at most `bins` bins of equal width, 1 to 64; integers' is an integer."""
        if not self._cells:
            return Histogram(np.zeros(0, np.int64), np.zeros(1))
        first, used = min(self._cells), max(self._cells) - min(self._cells) + 1
        together = -(-used // bins)
        counts = np.zeros(-(-used // together), np.int64)
        for cell, count in self._cells.items():
            counts[(cell - first) // together] += count
        edges = [math.ldexp(float(first + i * together), self._exponent) for i in range(len(counts) + 1)]
        return Histogram(counts, np.array(edges))

    def merge(self, other: Distribution) -> Self:
        """Take in another distribution, of numbers that come after; it is not changed."""
        if other.low is not None and (self.low is None or other.low < self.low):
            self.low, self.low_at = other.low, self.count + other.low_at
        if other.high is not None and (self.high is None or other.high > self.high):
            self.high, self.high_at = other.high, self.count + other.high_at
        self.count += other.count
        self.nans += other.nans
        self._infinite += other._infinite
        if other._cells:
            before, more = self._cells.total(), other._cells.total()
            difference, share = other._mean - self._mean, more / (before + more)
            self._squares += other._squares + difference * difference * (before * share)
            self._mean += difference * share
            exponent = max(self._exponent, other._exponent)
            cells = _wider(self._cells, exponent - self._exponent)
            cells.update(_wider(other._cells, exponent - other._exponent))
            while max(cells) - min(cells) >= _CELLS:
                cells, exponent = _wider(cells, 1), exponent + 1
            self._cells, self._exponent = cells, exponent
        return self


def _wider(cells: Counter[int], doublings: int) -> Counter[int]:
    if not doublings:
        return cells
    found = Counter[int]()
    for cell, count in cells.items():
        found[cell >> doublings] += count
    return found


@np.errstate(all="ignore")  # NaN, infinity and overflow are data here
def distribution(numbers: NDArray[Any]) -> Distribution:
    """Return the distribution of a 1-D array of real numbers, not bool. NaT counts as NaN."""
    found = Distribution()
    scratch = np.empty((2, min(_PIECE, len(numbers))))  # once: allocating takes longer than computing
    for start in range(0, len(numbers), _PIECE):
        found.merge(_distribution(numbers[start : start + _PIECE], scratch))
    return found


def _distribution(piece: NDArray[Any], scratch: NDArray[np.float64]) -> Distribution:
    found, numbers, kept = Distribution(), piece, np.arange(0)
    found.count = len(piece)
    if (first := piece[piece.argmin()]) != first:  # NaN, or NaT, if there is one
        kept = np.flatnonzero(piece == piece)
        numbers, found.nans = piece[kept], len(piece) - len(kept)
    if not len(numbers):
        return found
    numbers = numbers.view(np.int64) if numbers.dtype.kind == "M" else numbers
    places = [int(numbers.argmin()), int(numbers.argmax())]
    low, high = numbers[places]
    found.low, found.high = low.item(), high.item()
    found.low_at, found.high_at = kept[places].tolist() if found.nans else places
    if not (np.isfinite(low) and np.isfinite(high)):
        found._infinite = float(numbers[np.isinf(numbers)].sum())
        numbers = numbers[np.isfinite(numbers)]
        if not len(numbers):
            return found
        low, high = numbers.min(), numbers.max()
    values, off = scratch[:, : len(numbers)]
    np.copyto(values, numbers)
    mean = float(values.mean())
    found._mean = mean if math.isfinite(mean) else float((values / len(values)).sum())
    np.subtract(values, found._mean, out=off)
    found._squares = float(np.einsum("i,i", off, off))
    largest = max(abs(float(low)), abs(float(high)))
    exponent = math.frexp(largest)[1] - _DIGITS if largest else 0
    exponent = max(exponent, -1000 if numbers.dtype.kind == "f" else 0)
    while math.floor(math.ldexp(high, -exponent)) - math.floor(math.ldexp(low, -exponent)) >= _CELLS:
        exponent += 1
    first = math.floor(math.ldexp(low, -exponent))
    np.floor(np.multiply(values, math.ldexp(1.0, -exponent), out=values), out=values)  # the product is exact
    cells = off.view(np.int64)
    np.copyto(cells, np.subtract(values, first, out=values), casting="unsafe")
    counts = np.bincount(cells)
    found._cells = Counter({first + cell: int(counts[cell]) for cell in np.flatnonzero(counts).tolist()})
    found._exponent = exponent
    return found


_DTYPES = {"count": "int64"}
_DTYPES |= dict.fromkeys(("distinct", "shortest", "longest"), "Int64")
_DTYPES |= dict.fromkeys(("min", "max", "min_row", "max_row", "histogram"), "object")  # each as it is
_MAX_BINS = 64
_MAX_THREADS = 4
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
    bins = parse_count(bins, "bins", most=_MAX_BINS)
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
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))  # a few: others are at work on this machine
    with ThreadPoolExecutor(threads, "arrowcache-describe") as pool:
        for segment, batch in walk(snapshot, tuple(kinds), what, progress):
            for name, summary in found.items():
                summary.add(batch.column(name), pool, segment.seq)
                if draws:
                    summary.drawn.append(
                        draw(batch.column(name), kinds[name], rng, -(-draws * segment.rows // rows))
                    )
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
        self._low_id: str | None = None  # of the first row with the least value
        self._high_id: str | None = None
        self._lengths = Distribution() if isinstance(kind, Ragged) else None
        is_countable = isinstance(kind, String | Binary) or (
            isinstance(kind, Tensor) and not kind.shape and kind.dtype.startswith(("bool", "int", "uint"))
        )
        self._distinct: set[Any] | None = set() if is_countable else None

    def add(self, column: pa.Array, pool: ThreadPoolExecutor, seq: int) -> None:
        before, found = self.values, distribution_of(column, self._kind, pool)
        if not isinstance(self._kind, String | Binary) and found.low is not None and found.high is not None:
            if before.low is None or found.low < before.low:
                self._low_id = str(RowId(seq, _row_of(found.low_at, found.count, column, self._kind)))
            if before.high is None or found.high > before.high:
                self._high_id = str(RowId(seq, _row_of(found.high_at, found.count, column, self._kind)))
        self.values.merge(found)
        if self._lengths is not None:
            assert isinstance(self._kind, Ragged)
            self._lengths.merge(distribution(lengths(column, self._kind)))
        for start in range(0, len(column), _ROWS_A_LOOK):
            if self._distinct is not None:
                self._distinct.update(self._marks(pc.unique(column.slice(start, _ROWS_A_LOOK))))
                if len(self._distinct) > Limits.current.distinct_values:
                    self._distinct = None

    def _marks(self, values: pa.Array) -> Iterator[Any]:
        """What tells values apart and is small."""
        if isinstance(self._kind, Tensor):
            yield from values.to_pylist()
        else:
            for value in values.cast(pa.binary()):
                yield xxhash.xxh3_128_digest(value.as_buffer())

    def row(self, bins: int) -> dict[str, Any]:
        nothing = Distribution()
        is_text = isinstance(self._kind, String | Binary)
        values, sizes = (nothing, self.values) if is_text else (self.values, self._lengths or nothing)
        row: dict[str, Any] = {
            "type": type_name(self._kind),
            "count": self.values.count,
            "nan": self.values.nan_share,
            "min": values.low,
            "max": values.high,
            "min_row": self._low_id,
            "max_row": self._high_id,
            "mean": values.mean,
            "std": values.std,
            "distinct": None if self._distinct is None else len(self._distinct),
            "shortest": sizes.low,
            "mean_length": sizes.mean,
            "longest": sizes.high,
            "histogram": self.values.histogram(bins),
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
