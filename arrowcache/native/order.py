"""Order: which row is at which place of a pass, computed when asked for. The face of order.h and draw.h.

A pass is shuffled by stages, or drawn by weights, down a tree of their sums.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.native.library import address_of, declare, library, quick
from arrowcache.units import format_count

KEYS = 32  # ORDER_KEYS of the header
_HELD_GIL_ROWS = 8192  # found in 0.1 ms; beside a busy thread the GIL takes 5 ms to come back

FAN, LEVELS = 16, 16  # DRAW_FAN and DRAW_LEVELS of the header
_LINE = 64  # bytes


class WeightSums:
    """Weights to draw by, and the tree of their sums: memory is half a byte a row, beside them.

    Several threads may draw, while nobody changes them.

    Blocks: while it adds them, a second for 10^9.

    Args:
        weights: (rows,) float32, contiguous. The table has them from now on.
        source: as of `fill`, called first. None means that `weights` has its values already.

    Attributes:
        weights: (rows,) float32.
        bad: the first row whose weight is below 0, infinite or NaN, by which nothing can be drawn; else -1.
        address: of the C structure, which lives as long as the table.
    """

    def __init__(
        self,
        weights: NDArray[np.float32],
        source: NDArray[np.float32] | None = None,
        missing: float = math.nan,
    ) -> None:
        counts = [-(-len(weights) // FAN)]
        while counts[0] > FAN:
            counts.insert(0, -(-counts[0] // FAN))
        self._levels = [_level(count) for count in counts]
        self.weights = weights
        places = [*map(address_of, self._levels), *[0] * (LEVELS - len(counts))]
        self._words = np.array([address_of(weights), len(weights), len(counts), *places], np.int64)
        self.address = address_of(self._words)
        self.bad = -1
        self.fill(weights if source is None else source, missing)

    @property
    def total(self) -> float:
        """The sum of the weights."""
        return float(self._levels[0][FAN - 1]) if len(self.weights) else 0.0

    def fill(self, source: NDArray[np.float32], missing: float = math.nan) -> None:
        """Take a copy of weights (rows,). Blocks: as it was made.

        Args:
            source: contiguous.
            missing: the weight of a row that has NaN there.
        """
        self.bad = library.draw_fill(self.address, address_of(source), missing)

    def change(self, rows: NDArray[np.int64], source: NDArray[np.float32], missing: float = math.nan) -> None:
        """Take a copy of weights (n,) of rows (n,), which ascend. The tree is as one that is made of all.

        A row takes 0.1 to 0.3 us.
        """
        at = self.address, address_of(source), missing, address_of(rows), len(rows)
        self.bad = library.draw_change(*at)


def _level(ends: int) -> NDArray[np.float64]:
    """Memory for the nodes of a level, in whole lines of the processor's cache."""
    memory = np.zeros(-(-ends // FAN) * FAN + _LINE // 8, np.float64)
    skipped = -address_of(memory) % _LINE // 8
    return memory[skipped : len(memory) - _LINE // 8 + skipped]


declare("draw_fill", ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float)
declare(
    "draw_change", ctypes.c_int64, *[ctypes.c_void_p] * 2, ctypes.c_float, ctypes.c_void_p, ctypes.c_int64
)


class Stage(NamedTuple):
    """Blocks of places, each shuffled by itself.

    Args:
        edges: (n + 1,) int64, ascending from 0: the begin of each block, and the end of the last one.
        keys: (KEYS,) uint64 that select the shuffle.
    """

    edges: NDArray[np.int64]
    keys: NDArray[np.uint64]


class Runs(NamedTuple):
    """Runs of places that stages shuffle in place of single ones, and the rows of the runs.

    Args:
        run_rows: rows of each run.
        starts: (n,) int64, ascending from 0: places.
        shifts: (n,) int64: from each start on, the row is the place plus this.
    """

    run_rows: int
    starts: NDArray[np.int64]
    shifts: NDArray[np.int64]


class Drawn(NamedTuple):
    """Rows that are drawn with replacement, in place of an order.

    Args:
        table: the weights; one is above 0.
        key: selects the draws.
    """

    table: WeightSums
    key: int


class Pass:
    """All rows in some order: returns the rows at any places. Several threads may ask at once.

    Args:
        rows: number of rows, or of draws, at most 2**62.
        stages: shuffles of the places, one after another. Without any, row i is at place i.
        runs: if given, the stages, at least one, shuffle whole runs, rows // runs.run_rows places.
        drawn: if given, the rows are drawn, without stages or runs.
    Raises: ValueError: runs without a stage.
    """

    def __init__(
        self, rows: int, *stages: Stage, runs: Runs | None = None, drawn: Drawn | None = None
    ) -> None:
        self.rows = rows
        table = array("q")  # of `order_stage`
        for edges, keys in stages:
            table.extend((address_of(edges), len(edges) - 1, address_of(keys)))
        of_runs, of_draws = (0,) * 4, (0,) * 2
        if runs is not None:
            if not stages:  # the last one's edges say which place is in the short run at the end
                raise ValueError("runs are what stages shuffle: give a stage, if only one of one block")
            of_runs = runs.run_rows, len(runs.starts), address_of(runs.starts), address_of(runs.shifts)
        if drawn is not None:
            of_draws = drawn.table.address, drawn.key
        words = array("Q", (table.buffer_info()[0], len(stages), *of_runs, *of_draws))  # of `order_pass`
        self._keep = words, table, stages, runs, drawn
        self._at = words.buffer_info()[0]

    def __call__(self, first: int, count: int, times: int = 1, apart: int = 0) -> NDArray[np.int64]:
        """Return the rows at `count` places from `first` on, then from `first + apart` on, and so on.

        Returns: (times * count,).
        Raises: IndexError: a place outside the pass.
        """
        stop = first + (times - 1) * apart + count
        if first < 0 or count < 0 or times < 1 or apart < 0 or stop > self.rows:
            raise IndexError(f"places {first} to {stop} of {format_count(self.rows, 'row')}")
        total = times * count
        rows: Any = (ctypes.c_int64 * total)()  # its address costs less than that of an array
        one = quick if total <= _HELD_GIL_ROWS else library
        one.order_rows(self._at, first, count, times, apart, rows)
        return np.frombuffer(rows, np.int64)


declare("order_rows", None, ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p)
