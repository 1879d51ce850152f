"""Distribution: count, extremes, mean, variance and histogram of numbers that come in pieces. Pure.

One pass, in pieces that stay in the processor's cache, and in bounded memory. Two distributions merge into
that of both, in any order: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
Sample Variances", Stanford STAN-CS-79-773 (1979).

The histogram's range need not be known before: its cells are [k * w, (k + 1) * w) with w a power of two, and
where they become too many, w doubles, which makes two cells one. So each count is exact, and the cells of two
distributions fit onto each other.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.display import bars

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
    """Of none at first, then of those that were merged. Not thread-safe.

    `count` is of all, `nans` of those that are not a number, `low` and `high` are None of none; integers'
    are exact. The first of all that is the lowest is number `low_at`, and the highest `high_at`.
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
    """Of numbers: 1-D, real, of any dtype but bool; datetimes as their integers, NaT as NaN."""
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
