"""Distribution: count, extremes, mean, variance and histogram of numbers that come in pieces. Pure.

One pass, in pieces that stay in the processor's cache, and in bounded memory. Two distributions merge into
that of both, in any order: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
Sample Variances", Stanford STAN-CS-79-773 (1979).

The histogram's range need not be known before: its cells are [k * w, (k + 1) * w) with w a power of two, and
where a number lies outside, w doubles, which makes two cells one. So each count is exact, and the cells of
two distributions fit onto each other.
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
    """Of the real numbers that were added. Not thread-safe.

    `count` is of all, `nans` of those that are not a number, `low` and `high` are None of none; integers'
    are exact. The first of all that is the lowest is number `low_at`, and the highest `high_at`.
    """

    def __init__(self) -> None:
        self.count = self.nans = 0
        self.low: float | int | None = None
        self.high: float | int | None = None
        self.low_at = self.high_at = 0
        self._infinite = Counter[float]()  # of each sign
        self._finite = 0
        self._mean = self._squares = 0.0  # of the finite ones; squares of differences from the mean
        self._cells = Counter[int]()  # cell -> finite numbers in [cell, cell + 1) * 2**exponent
        self._exponent = -1000
        self._ends = math.inf, -math.inf  # the lowest and highest finite one

    @property
    def mean(self) -> float:
        """Of all that are a number; NaN of none."""
        if self._infinite:
            return sum(self._infinite)
        return self._mean if self._finite else math.nan

    @property
    def std(self) -> float:
        """The population's standard deviation, of all numbers; NaN of none, or if one is infinite."""
        if not self._finite or self._infinite:
            return math.nan
        return math.sqrt(max(0.0, self._squares) / self._finite)

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

    def add(self, numbers: NDArray[Any]) -> None:
        """Take in numbers: 1-D, real, of any dtype but bool; datetimes as their integers, NaT as NaN."""
        with np.errstate(all="ignore"):  # NaN, infinity and overflow are data here
            scratch = np.empty((2, min(_PIECE, len(numbers))))  # once: allocating takes as long as computing
            for start in range(0, len(numbers), _PIECE):
                self._add_piece(numbers[start : start + _PIECE], scratch)

    def merge(self, other: Distribution) -> Self:
        """Take in another distribution, of numbers that come after; it is not changed."""
        if other.low is not None and (self.low is None or other.low < self.low):
            self.low, self.low_at = other.low, self.count + other.low_at
        if other.high is not None and (self.high is None or other.high > self.high):
            self.high, self.high_at = other.high, self.count + other.high_at
        self.count += other.count
        self.nans += other.nans
        self._infinite.update(other._infinite)
        if other._finite:
            self._merge_moments(other._finite, other._mean, other._squares)
            self._reach(*other._ends, other._exponent)
            for cell, count in other._cells.items():
                self._cells[cell >> (self._exponent - other._exponent)] += count
        return self

    def _add_piece(self, piece: NDArray[Any], scratch: NDArray[np.float64]) -> None:
        numbers, before, is_whole = piece, self.count, piece.dtype.kind in "iuM"
        self.count += len(piece)
        low, high = numbers.min(), numbers.max()  # NaN, or NaT, if there is one
        if low != low:
            numbers = numbers[numbers == numbers]
            self.nans += len(piece) - len(numbers)
            if not len(numbers):
                return
            low, high = numbers.min(), numbers.max()
        if piece.dtype.kind == "M":
            piece, numbers, low, high = (some.view(np.int64) for some in (piece, numbers, low, high))
        if self.low is None or low < self.low:
            self.low, self.low_at = low.item(), before + int((piece == low).argmax())
        if self.high is None or high > self.high:
            self.high, self.high_at = high.item(), before + int((piece == high).argmax())
        if not is_whole and not (np.isfinite(low) and np.isfinite(high)):
            self._infinite.update(numbers[np.isinf(numbers)].tolist())
            numbers = numbers[np.isfinite(numbers)]
            if not len(numbers):
                return
            low, high = numbers.min(), numbers.max()
        values, off = scratch[:, : len(numbers)]
        np.copyto(values, numbers)
        mean = float(values.mean())
        mean = mean if math.isfinite(mean) else float((values / len(values)).sum())
        np.subtract(values, mean, out=off)
        self._merge_moments(len(values), mean, float(np.einsum("i,i", off, off)))
        self._reach(float(low), float(high), 0 if is_whole else -1000)
        np.multiply(values, math.ldexp(1.0, -self._exponent), out=values)  # is exact
        first = math.floor(math.ldexp(float(low), -self._exponent))
        cells = off.view(np.int64)
        np.copyto(cells, np.subtract(np.floor(values, out=values), first, out=values), casting="unsafe")
        counts = np.bincount(cells)
        for cell in np.flatnonzero(counts).tolist():
            self._cells[first + cell] += int(counts[cell])

    def _merge_moments(self, count: int, mean: float, squares: float) -> None:
        total = self._finite + count
        difference = mean - self._mean
        self._squares += squares + difference * difference * (self._finite / total * count)
        self._mean += difference * (count / total)
        self._finite = total

    def _reach(self, low: float, high: float, narrowest: int) -> None:
        """Let the cells hold numbers from `low` to `high` too, and be no narrower than 2**narrowest."""
        low, high = self._ends = min(low, self._ends[0]), max(high, self._ends[1])
        largest = max(abs(low), abs(high))
        exponent = max(narrowest, self._exponent, math.frexp(largest)[1] - _DIGITS if largest else 0)
        while math.floor(math.ldexp(high, -exponent)) - math.floor(math.ldexp(low, -exponent)) >= _CELLS:
            exponent += 1
        if exponent > self._exponent:
            cells = Counter[int]()
            for cell, count in self._cells.items():
                cells[cell >> (exponent - self._exponent)] += count
            self._cells, self._exponent = cells, exponent
