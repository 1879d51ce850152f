"""Fetching: has the disk read ahead of an epoch that goes through its segments in order.

Rows are asked for in the order of their files, some megabytes before they are needed, and in large pieces: so
the disk reads in order, whatever the order of the rows within a window. Asking for rows that are in memory
costs little, so rows are always asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.epoch import Epoch
from arrowcache.reading.gather import Gather

FETCHED_BYTES = 8 << 20  # bytes asked for ahead of the reader
_FETCHED_SHARE = 1.25  # of the rows up to a portion's end, while the window's next segments are fetched


class Fetching:
    """Has the disk read ahead of an epoch in order, or of runs of rows."""

    def __init__(self, epoch: Epoch, names: Sequence[str]) -> None:
        self._epoch, self._names = epoch, names
        self._is_window = epoch.plan.shuffle == "window"
        self._fetched_rows = 0  # rows of a window that are fetched, or were passed
        self._ahead_steps = 0
        self._share = _FETCHED_SHARE * len(epoch.snapshot) / max(1, epoch.order.selected.size)
        if self._is_window and epoch.order.steps:
            rows_a_step = max(1, len(epoch.snapshot) // epoch.order.steps)
            ahead_rows = epoch.plan.window_rows // 2 + FETCHED_BYTES // epoch.snapshot.row_bytes
            self._ahead_steps = -(-ahead_rows // rows_a_step)
            self._fetched_rows = epoch.snapshot.rows_before(epoch.order.segments_span(0).start)

    def before(self, step: int, ids: NDArray[np.int64]) -> Sequence[Gather]:
        """Begin to read ahead as a portion of these rows begins; keep the result until the portion ends."""
        if self._is_window:
            return self._fetch_window(step, len(ids))
        if self._epoch.plan.shuffle == "rows" or not len(ids):
            return ()
        size = len(ids) if self._is_run(ids) else self._epoch.plan.block_rows
        runs = [ids[start : start + size] for start in range(0, len(ids), size)]
        fetch = self._epoch.snapshot.fetch
        return [fetch(int(run[0]), int(run[-1]) + 1, self._names) for run in runs if self._is_run(run)]

    def _is_run(self, ids: NDArray[np.int64]) -> bool:
        return bool(int(ids[-1]) - int(ids[0]) == len(ids) - 1)

    def _fetch_window(self, step: int, rows: int) -> Sequence[Gather]:
        """Ask for the first step's whole window, then ahead at an even rate, so that rows arrive in time."""
        order, snapshot = self._epoch.order, self._epoch.snapshot
        first = self._fetched_rows
        here = snapshot.rows_before(order.segments_span(step).stop)
        last_step = min(step + self._ahead_steps, order.steps - 1)
        stop = snapshot.rows_before(order.segments_span(last_step).stop)
        self._fetched_rows = max(first, min(stop, max(here, first + int(rows * self._share))))
        return [snapshot.fetch(first, self._fetched_rows, self._names)] if self._fetched_rows > first else ()
