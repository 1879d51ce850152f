"""Tally: what a process of the storm has done so far, in a file that outlives it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

FIELDS = (
    "written_rows", "delivered_rows", "epochs",
    "held_rows",  # read again, after they were kept
    "pressed_rows",  # of these, while a writer waited for room: only a lease kept their segments
    "restarts",  # of what lost its own workers too often
    "longest_ms",  # of a step, of a look at the cache, of a write
)  # fmt: skip


class Tally:
    """Counts of one process."""

    def __init__(self, path: Path) -> None:
        self._counts = np.zeros(len(FIELDS), np.int64)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._last = time.monotonic()
        self.add()

    def add(self, **counts: int) -> None:
        """Count, and save: whatever kills the process, it did this much."""
        now = time.monotonic()
        longest = FIELDS.index("longest_ms")
        self._counts[longest] = max(self._counts[longest], int(1e3 * (now - self._last)))
        self._last = now
        for name, count in counts.items():
            self._counts[FIELDS.index(name)] += count
        os.pwrite(self._fd, self._counts.tobytes(), 0)


def read(path: Path) -> dict[str, int]:
    """The counts in a file."""
    data = path.read_bytes() if path.exists() else b""
    counts = np.frombuffer(data, np.int64) if data else np.zeros(len(FIELDS), np.int64)
    return dict(zip(FIELDS, counts.tolist(), strict=True))


def total(folder: Path) -> dict[str, int]:
    """The counts of all files in a folder."""
    tallies = [read(path) for path in folder.iterdir()]
    sums = {name: sum(tally[name] for tally in tallies) for name in FIELDS}
    sums["longest_ms"] = max((tally["longest_ms"] for tally in tallies), default=0)
    return sums
