"""Draw: weights of rows, and a tree over them, by which rows are drawn. The face of draw.h."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from arrowcache.native.library import address_of, declare, library

FAN, LEVELS = 16, 16  # DRAW_FAN and DRAW_LEVELS of the header
_LINE = 64  # bytes


class _TableStruct(ctypes.Structure):
    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("level_count", ctypes.c_int64),
        ("levels", ctypes.c_void_p * LEVELS),
    )


class Table:
    """Weights to draw by: memory is half a byte a row, beside them. Several threads may draw.

    Blocks: while it adds them, a second for 10^9.

    Args:
        weights: (rows,) float32, contiguous. They do not change any more.

    Attributes:
        bad: the first row whose weight is below 0, infinite or NaN, by which nothing can be drawn; else -1.
        total: the sum of the weights.
        address: of the C structure, which lives as long as the table.
    """

    def __init__(self, weights: NDArray[np.float32]) -> None:
        counts = [-(-len(weights) // FAN)]
        while counts[0] > FAN:
            counts.insert(0, -(-counts[0] // FAN))
        self._levels = [_level(count) for count in counts]
        self._weights = weights
        self._made = _TableStruct(address_of(weights), len(weights), len(counts))
        for number, level in enumerate(self._levels):
            self._made.levels[number] = address_of(level)
        self.address = ctypes.addressof(self._made)
        self.bad: int = library.draw_fill(self.address)
        self.total: float = self._levels[-1][counts[-1] - 1] if len(weights) else 0.0


def _level(ends: int) -> NDArray[np.float64]:
    """Memory for the ends of a level, in whole lines of the processor's cache."""
    memory = np.empty(-(-ends // FAN) * FAN + _LINE // 8, np.float64)
    skipped = -address_of(memory) % _LINE // 8
    return memory[skipped : len(memory) - _LINE // 8 + skipped]


declare("draw_fill", ctypes.c_int64, ctypes.c_void_p)
