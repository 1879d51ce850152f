"""Order: which row is at which place of a shuffled pass, computed when asked for. The face of order.h."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.native.draw import Table
from arrowcache.native.library import address_of, declare, library, quick

KEYS = 32  # ORDER_KEYS of the header
_HELD_GIL_ROWS = 8192  # found in 0.1 ms; beside a busy thread the GIL takes 5 ms to come back


class _StageStruct(ctypes.Structure):
    _fields_ = (("edges", ctypes.c_void_p), ("blocks", ctypes.c_int64), ("keys", ctypes.c_void_p))


class _PassStruct(ctypes.Structure):
    _fields_ = (
        ("stages", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("stage_count", "run_rows", "steps")),
        *((name, ctypes.c_void_p) for name in ("starts", "shifts", "draws")),
        ("draw_key", ctypes.c_uint64),
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

    table: Table
    key: int


class Pass:
    """All rows in some order: returns the rows at any places. Several threads may ask at once.

    Args:
        rows: number of rows, or of draws, at most 2**62.
        stages: shuffles of the places, one after another. Without any, row i is at place i.
        runs: if given, the stages shuffle whole runs, rows // runs.run_rows places.
        drawn: if given, the rows are drawn, without stages or runs.
    """

    def __init__(
        self, rows: int, *stages: Stage, runs: Runs | None = None, drawn: Drawn | None = None
    ) -> None:
        self.rows = rows
        table = (_StageStruct * len(stages))(
            *[
                _StageStruct(address_of(stage.edges), len(stage.edges) - 1, address_of(stage.keys))
                for stage in stages
            ]
        )
        made = _PassStruct(ctypes.addressof(table), len(stages))
        if runs is not None:
            made.run_rows, made.steps = runs.run_rows, len(runs.starts)
            made.starts, made.shifts = address_of(runs.starts), address_of(runs.shifts)
        if drawn is not None:
            made.draws, made.draw_key = drawn.table.address, drawn.key
        self._keep = made, table, stages, runs, drawn
        self._at = ctypes.addressof(made)

    def __call__(self, first: int, count: int, times: int = 1, apart: int = 0) -> NDArray[np.int64]:
        """Return the rows at `count` places from `first` on, then from `first + apart` on, and so on.

        Returns: (times * count,).
        Raises: IndexError: a place outside the pass.
        """
        stop = first + (times - 1) * apart + count
        if first < 0 or count < 0 or times < 1 or apart < 0 or stop > self.rows:
            raise IndexError(f"places {first} to {stop} of {self.rows} rows")
        total = times * count
        rows: Any = (ctypes.c_int64 * total)()  # its address costs less than that of an array
        one = quick if total <= _HELD_GIL_ROWS else library
        one.order_rows(self._at, first, count, times, apart, rows)
        return np.frombuffer(rows, np.int64)


declare("order_rows", None, ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p)
