"""Filling: which rows go into the device's ring before each step, so that the step finds its window there.

Rows go there in the order of their line (order.py): oldest segment first, pass after pass. The row with
number `n` in the line lies at place `n % ring_rows`, over the row `ring_rows` before it. Pure: no
clock.

A step needs all rows up to the end of its window at once; that end moves by half a window at a time. So more
rows than needed go there before each step, while there is room: twice as many as the step takes. The next
half of the window is there in time, and no step but the first waits for that many.
"""

from __future__ import annotations

from arrowcache.reading.order import EvenOrder

_SHARE = 2  # per row of the steps: 1.5 would be too few for the first half of a window


class Filling:
    """Fills a ring for one epoch."""

    def __init__(self, order: EvenOrder, pass_rows: int, ring_rows: int, run_rows: int) -> None:
        self._order, self._pass_rows = order, pass_rows
        self._ring_rows, self._run_rows = ring_rows, run_rows
        self._end = order.span_in_line(order.steps - 1).stop if order.steps else 0
        self._filled = 0  # all rows of the line before this were copied, or are not needed
        self._due = 0

    def before(self, step: int) -> list[range] | None:
        """Return runs of the line to be copied into the ring before a step, at successive places.

        Call it for the steps in order; steps that need no ring may be left out.
        Returns: the runs, or None if the ring is too small for this step.
        """
        span = self._order.span_in_line(step)
        if len(span) > self._ring_rows:
            return None
        room = max(span.stop, min(span.start + self._ring_rows, self._end))
        self._filled = max(self._filled, span.start)
        self._due = max(span.stop, min(self._due + _SHARE * self._order.step_rows, room))
        runs = []
        while self._filled < self._due:
            first = self._filled
            ends = [(first // rows + 1) * rows for rows in (self._pass_rows, self._ring_rows)]
            self._filled = min(first + self._run_rows, room, *ends)
            runs.append(range(first, self._filled))
        return runs
