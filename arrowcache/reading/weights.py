"""Weights: rows drawn with replacement, each as often as its weight says. Pure: no clock.

The weights of an epoch are frozen when it begins. A draw is a function of (weights, seed, epoch, position),
so any part of the epoch can be computed without the draws before it, as of other orders (shuffle.py). The C
code of native/draw.h says which function.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from arrowcache.lifetimes import cached_property
from arrowcache.native.draw import Table
from arrowcache.native.order import Drawn
from arrowcache.reading.shuffle import RowOrder, key_of

_WEIGHTS = 3  # keeps draws apart from shuffles


class Weights:
    """The weights of the selected rows of a snapshot, (rows,) float32, at least one above 0. Immutable."""

    def __init__(self, of_rows: NDArray[np.float32]) -> None:
        self.of_rows = of_rows

    @cached_property
    def name(self) -> str:
        """A name that no other weights have."""
        return xxhash.xxh3_64_hexdigest(self.of_rows.data)

    @cached_property
    def table(self) -> Table:
        """The tree over them, by which rows are drawn. Blocks: as `Table`."""
        return Table(self.of_rows)

    def probabilities(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """The probability (n,) of rows (n,) to be what one draw gives."""
        return self.of_rows[numbers].astype(np.float64) / self.table.total


class Draws(RowOrder):
    """A pass of so many draws: at each place a row.

    Args:
        segments: number of segments with the rows.
        draws: number of draws.
    """

    def __init__(self, weights: Weights, segments: int, draws: int, seed: int, key: tuple[int, ...]) -> None:
        super().__init__(segments, draws, drawn=Drawn(weights.table, int(key_of(seed, (*key, _WEIGHTS)))))
