"""Distribution: count, extremes, mean, variance and histogram of numbers that come in pieces. Pure.

One pass, in pieces that stay in the processor's cache, and in bounded memory. Two distributions merge into
that of both, in any order.

Mean and variance are merged pairwise: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm
for Computing Sample Variances", Stanford STAN-CS-79-773 (1979). Within a piece they are taken about a guess
of its mean, so nothing cancels and float32 will do, of whose sums no more than 128 numbers are in float32.

The histogram's range need not be known before: its cells are [k * w, (k + 1) * w) with w a power of two, and
where a number lies outside, w doubles, which makes two cells one. So each count is exact, and the cells of
two distributions fit onto each other.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing import Self

_PIECE = 1 << 18  # numbers
_BLOCK = 128  # numbers that are summed in their own precision
_CELLS = 128  # two fit into 16 bits, so that one step counts two
_PAIRS_FROM = 1 << 14  # numbers, from which on it pays
_DIGITS = 50  # cells are never so narrow that float64 cannot number them
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """Counts between edges: counts[i] numbers are in [edges[i], edges[i + 1]). Prints as bars.

    `edges` are float64, or datetime64[us] for timestamps; one more than there are counts.
    """

    counts: NDArray[np.int64]
    edges: NDArray[Any]

    def __str__(self) -> str:
        highest = max(1, int(self.counts.max(initial=0)))
        heights = -(-self.counts * (len(_BARS) - 1) // highest)  # what is there at all is seen
        return "".join(_BARS[height] for height in heights.tolist())

    __repr__ = __str__


class _Memory(threading.local):
    """What each thread computes in: allocating it for each piece takes as long as the computing."""

    def __init__(self) -> None:
        self.floats = np.empty(_PIECE, np.float64)
        self.cells = np.empty(_PIECE, np.uint8)
        self.pairs = np.empty(_PIECE // 2, np.int64)


_memory = _Memory()


class Distribution:
    """Of the real numbers that were added. Not thread-safe.

    `count` is of all, `nans` of those that are not a number, `low` and `high` are None of none; integers'
    are exact.
    """

    def __init__(self) -> None:
        self.count = self.nans = 0
        self.low: float | int | None = None
        self.high: float | int | None = None
        self._infinite = {-math.inf: 0, math.inf: 0}
        self._finite = 0
        self._mean = self._squares = 0.0  # of the finite ones; squares of differences from the mean
        self._cells = _Cells()

    @property
    def mean(self) -> float:
        """Of all that are a number; NaN of none."""
        above, below = self._infinite[math.inf], self._infinite[-math.inf]
        if above or below:
            return math.nan if above and below else math.inf if above else -math.inf
        return self._mean if self._finite else math.nan

    @property
    def std(self) -> float:
        """The population's standard deviation, of all numbers; NaN of none, or if one is infinite."""
        if not self._finite or any(self._infinite.values()):
            return math.nan
        return math.sqrt(max(0.0, self._squares) / self._finite)

    def histogram(self, bins: int) -> Histogram:
        """The finite numbers in at most `bins` bins of equal width, 1 to 64; integers' is an integer."""
        return self._cells.histogram(bins)

    def add(self, numbers: NDArray[Any]) -> None:
        """Take in numbers: 1-D, real, of any dtype but bool; datetimes as their integers, NaT as NaN."""
        if numbers.dtype.kind == "M":
            absent = np.isnat(numbers)
            self.count += int(absent.sum())
            self.nans += int(absent.sum())
            numbers = numbers[~absent].view(np.int64)
        is_short = (numbers.dtype.kind == "f" and numbers.itemsize <= 4) or numbers.itemsize <= 2
        dtype = np.dtype(np.float32 if is_short else np.float64)
        scratch = _memory.floats.view(dtype)
        with np.errstate(all="ignore"):  # NaN, infinity and overflow are data here
            for start in range(0, len(numbers), _PIECE):
                piece = numbers[start : start + _PIECE]
                self._add_piece(piece.astype(dtype) if piece.dtype == np.float16 else piece, scratch)

    def merge(self, other: Distribution) -> Self:
        """Take in another distribution, which is not changed."""
        self.count += other.count
        self.nans += other.nans
        for sign, count in other._infinite.items():
            self._infinite[sign] += count
        self._extend(other.low, other.high)
        if other._finite:
            self._merge_moments(other._finite, other._mean, other._squares)
            self._cells.merge(other._cells)
        return self

    def _add_piece(self, numbers: NDArray[Any], scratch: NDArray[Any]) -> None:
        self.count += len(numbers)
        low, high = numbers.min(), numbers.max()  # NaN if there is one
        if numbers.dtype.kind == "f" and not (np.isfinite(low) and np.isfinite(high)):
            self.nans += int(np.count_nonzero(np.isnan(numbers)))
            for sign in self._infinite:
                if found := int(np.count_nonzero(numbers == sign)):
                    self._infinite[sign] += found
                    self._extend(sign, sign)
            numbers = numbers[np.isfinite(numbers)]
            if not len(numbers):
                return
            low, high = numbers.min(), numbers.max()
        self._extend(low.item(), high.item())
        scratch = scratch[: len(numbers)]
        self._merge_moments(len(numbers), *_moments(numbers, float(low), float(high), scratch))
        self._cells.count(numbers, float(low), float(high), scratch)

    def _extend(self, low: float | None, high: float | None) -> None:
        if low is not None and (self.low is None or low < self.low):
            self.low = low
        if high is not None and (self.high is None or high > self.high):
            self.high = high

    def _merge_moments(self, count: int, mean: float, squares: float) -> None:
        total = self._finite + count
        difference = mean - self._mean
        self._squares += squares + difference * difference * (self._finite / total * count)
        self._mean += difference * (count / total)
        self._finite = total


def _moments(numbers: NDArray[Any], low: float, high: float, scratch: NDArray[Any]) -> tuple[float, float]:
    """Mean, and squares of differences from it, of finite numbers; `scratch` is as long."""
    about = numbers[:: -(-len(numbers) // 1024)].mean(dtype=np.float64)
    is_whole = numbers.dtype.kind in "iu"  # then differences are exact
    guess = float(scratch.dtype.type(np.round(about) if is_whole else about))
    reach = max(high - guess, guess - low)
    if scratch.dtype == np.float32 and reach and not 1e-15 < reach < 1e15:  # a square would not do
        scratch = np.empty(len(numbers), np.float64)
    off = np.subtract(numbers, guess, out=scratch, dtype=scratch.dtype, casting="unsafe")
    whole = len(off) // _BLOCK * _BLOCK
    blocks, rest = off[:whole].reshape(-1, _BLOCK), off[whole:].astype(np.float64)
    total = float(blocks.sum(axis=1).sum(dtype=np.float64)) + float(rest.sum())
    squares = float(np.einsum("ij,ij->i", blocks, blocks).sum(dtype=np.float64)) + float((rest * rest).sum())
    mean = total / len(off)
    if not math.isfinite(squares):
        return guess + mean, math.inf
    return guess + mean, max(0.0, squares - total * mean)


class _Cells:
    """Counts of finite numbers in cells whose width doubles as their range grows."""

    def __init__(self) -> None:
        self._counts = np.zeros(_CELLS, np.int64)
        self._exponent = 0  # a cell is 2**exponent wide
        self._first = 0  # the first one starts at first * width
        self._low, self._high = math.inf, -math.inf  # of what is counted; empty at first

    def count(self, numbers: NDArray[Any], low: float, high: float, scratch: NDArray[Any]) -> None:
        """Count finite numbers from `low` to `high`; `scratch` is as long."""
        narrowest = _narrowest(low, high)
        self._reach(low, high, max(0, narrowest) if numbers.dtype.kind in "iu" else narrowest)
        if scratch.dtype == np.float32 and not (abs(self._first) < 2**23 and abs(self._exponent) < 120):
            scratch = np.empty(len(numbers), np.float64)
        scale = math.ldexp(1.0, -self._exponent)
        places = np.multiply(numbers, scale, out=scratch, dtype=scratch.dtype, casting="unsafe")  # is exact
        np.floor(places, out=places)
        np.subtract(places, self._first, out=places)
        cells = _memory.cells[: len(places)]
        np.copyto(cells, places, casting="unsafe")
        if len(cells) < _PAIRS_FROM:
            self._counts += np.bincount(cells, minlength=_CELLS)
            return
        if len(cells) % 2:
            self._counts[cells[-1]] += 1
        pairs = _memory.pairs[: len(cells) // 2]
        np.copyto(pairs, cells[: 2 * len(pairs)].view("<u2"))
        table = np.bincount(pairs, minlength=_CELLS << 8).reshape(_CELLS, 256)[:, :_CELLS]
        self._counts += table.sum(axis=0) + table.sum(axis=1)

    def merge(self, other: _Cells) -> None:
        self._reach(other._low, other._high, other._exponent)
        self._take(other._counts, other._first, self._exponent - other._exponent)

    def histogram(self, bins: int) -> Histogram:
        if self._low > self._high:
            return Histogram(np.zeros(0, np.int64), np.zeros(1))
        there = np.flatnonzero(self._counts)
        start, used = self._first + int(there[0]), int(there[-1] - there[0]) + 1
        together = -(-used // bins)
        count = -(-used // together)
        counts = np.zeros(count * together, np.int64)
        counts[:used] = self._counts[there[0] : there[-1] + 1]
        edges = [math.ldexp(float(start + i * together), self._exponent) for i in range(count + 1)]
        return Histogram(counts.reshape(count, together).sum(axis=1), np.array(edges))

    def _reach(self, low: float, high: float, narrowest: int) -> None:
        """Let the cells hold numbers from `low` to `high` too, and be no narrower than 2**narrowest."""
        low, high = min(low, self._low), max(high, self._high)
        is_empty = self._low > self._high
        exponent = narrowest if is_empty else max(narrowest, self._exponent)
        while _last(high, exponent) - _place(low, exponent) >= _CELLS:
            exponent += 1
        before, first, doubled = self._counts, self._first, exponent - self._exponent
        is_inside = not is_empty and not doubled and first <= _place(low, exponent)
        if not (is_inside and _last(high, exponent) < first + _CELLS):
            self._counts = np.zeros(_CELLS, np.int64)
            self._exponent, self._first = exponent, _place(low, exponent)
            if not is_empty:
                self._take(before, first, doubled)
        self._low, self._high = low, high

    def _take(self, counts: NDArray[np.int64], first: int, doubled: int) -> None:
        """Add counts of cells that were 2**doubled times narrower."""
        for place in np.flatnonzero(counts).tolist():
            self._counts[((first + place) >> doubled) - self._first] += counts[place]


def _place(number: float, exponent: int) -> int:
    """Which cell of width 2**exponent a number is in; exact, as scaling by a power of two is."""
    return math.floor(math.ldexp(number, -exponent))


def _last(number: float, exponent: int) -> int:
    """The last cell that numbers up to this are counted in: a tiny negative one, scaled, may be zero."""
    return 0 if -(2.0**-100) < math.ldexp(number, -exponent) < 0 else _place(number, exponent)


def _narrowest(low: float, high: float) -> int:
    """The exponent of the narrowest cells that numbers up to these can be told apart by."""
    largest = max(abs(low), abs(high))
    span = high - low
    fit = math.frexp(span)[1] - _CELLS.bit_length() if 0 < span < math.inf else -1000
    return max(-1000, math.frexp(largest)[1] - _DIGITS, fit) if largest else 0
