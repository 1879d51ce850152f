"""Weights: rows drawn with replacement, each as often as its weight says. Pure: no clock.

The weights of an epoch are frozen when it begins. A draw is a function of (weights, seed, epoch, position),
so any part of the epoch can be computed without the draws before it, as of other orders (shuffle.py). A
position gives a number in [0, 1) by SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014); the row is where the sum of the weights up to it passes that share of the whole.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from arrowcache.lifetimes import cached_property
from arrowcache.reading.shuffle import RowOrder, key_of

_WEIGHTS = 3  # keeps draws apart from shuffles
_BLOCK = 256  # rows, a power of 2
_GOLDEN, _FIRST, _SECOND = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Weights:
    """The weights of the selected rows of a snapshot, (rows,) float32, at least one above 0. Immutable."""

    def __init__(self, of_rows: NDArray[np.float32]) -> None:
        self.of_rows = of_rows

    @cached_property
    def name(self) -> str:
        """A name that no other weights have."""
        return xxhash.xxh3_64_hexdigest(self.of_rows.data)

    @cached_property
    def _sums(self) -> NDArray[np.float64]:
        """The sum of the weights up to each row; infinity behind the last, to the end of its block."""
        rows = len(self.of_rows)
        sums = np.full(-(-rows // _BLOCK) * _BLOCK, np.inf)
        np.cumsum(self.of_rows, dtype=np.float64, out=sums[:rows])
        return sums

    @cached_property
    def _block_ends(self) -> NDArray[np.float64]:
        """The sum up to the last row of each block: small enough for the processor's cache."""
        return self._sums[_BLOCK - 1 :: _BLOCK].copy()

    @property
    def _total(self) -> np.float64:
        total: np.float64 = self._sums[len(self.of_rows) - 1]
        return total

    def probabilities(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """The probability (n,) of rows (n,) to be what one draw gives."""
        return self.of_rows[numbers].astype(np.float64) / self._total

    def at(self, shares: NDArray[np.float64]) -> NDArray[np.int64]:
        """The rows (n,) at shares (n,), in [0, 1), of the sum of all weights."""
        sought: NDArray[np.float64] = np.minimum(shares * self._total, np.nextafter(self._total, 0))
        rows = self._block_ends.searchsorted(sought, side="right") * _BLOCK
        step = _BLOCK // 2
        while step:  # the search goes on in all blocks at once: their memory is awaited together
            rows += step * (self._sums[rows + (step - 1)] <= sought)
            step //= 2
        return rows.astype(np.int64)


class Draws(RowOrder):
    """A pass of so many draws: at each place a row.

    Args:
        segments: number of segments with the rows.
        draws: number of draws.
    """

    def __init__(self, weights: Weights, segments: int, draws: int, seed: int, key: tuple[int, ...]) -> None:
        super().__init__(segments, draws)
        self._weights, self._key = weights, key_of(seed, (*key, _WEIGHTS))

    def __call__(self, first: int, count: int, times: int = 1, apart: int = 0) -> NDArray[np.int64]:
        places = super().__call__(first, count, times, apart)
        return self._weights.at(_shares(places.astype(np.uint64), self._key))


def _shares(places: NDArray[np.uint64], key: np.uint64) -> NDArray[np.float64]:
    """Numbers in [0, 1), uniform, one for each place."""
    state = (places + np.uint64(1)) * _GOLDEN + key
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
