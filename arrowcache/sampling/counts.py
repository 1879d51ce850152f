"""Counts: what reads took and brought, of a worker, and of a pool, added up by name.

    reads, retries, hedges  numbers of reads that gave something, of further attempts, of those begun again
    fetched_bytes           of the store, as far as it can be told, else of what reads returned
    reading_seconds         that tasks waited for a read
    drawing_seconds         of tasks, but for those that they waited for room
    waiting_seconds         for room
    cpu_seconds             of tasks and reads, in their own threads
    drawn_bytes             of segments
    took N                  reads that took about that long: see `seconds_of`

A task's result carries what was counted since the last one; a thread notes in `tally` what its read does.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping

_STEPS = 8  # in which a time doubles: they tell it to 5 %
_LEAST_SECONDS = 1e-5
_TOOK = "took "


class _Tally(threading.local):
    fetched_bytes = retries = 0


tally = _Tally()


class Counts:
    """The counts of a worker. Any thread adds."""

    def __init__(self) -> None:
        self._lock, self._numbers, self._told = threading.Lock(), Counter[str](), Counter[str]()

    def add(self, took_seconds: float | None = None, **numbers: float) -> None:
        if took_seconds is not None:
            step = round(_STEPS * math.log2(max(1.0, took_seconds / _LEAST_SECONDS)))
            numbers |= {f"{_TOOK}{step}": 1, "reads": 1}
        with self._lock:
            self._numbers.update(numbers)

    def taken(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        with self._lock:
            more = self._numbers - self._told
            self._told = self._numbers.copy()
        return dict(more)

    def copy(self) -> tuple[Counter[str], Counter[str]]:
        """Return all numbers, and those that `taken` has returned."""
        with self._lock:
            return self._numbers.copy(), self._told


def seconds_of(numbers: Mapping[str, float], share: float) -> float:
    """Return the time within which this share of the reads ended, to some 5 %. 0 if there were none."""
    left = share * numbers.get("reads", 0)
    steps = sorted(int(name[len(_TOOK) :]) for name in numbers if name.startswith(_TOOK))
    for step in steps:
        left -= numbers[f"{_TOOK}{step}"]
        if left <= 0:
            return float(_LEAST_SECONDS * 2 ** (step / _STEPS))
    return 0.0
