"""Counters: a loader's counts and times, on a page (page.py) that other processes of the same user read.

    head        workers, shuffle
    record      epochs, batches, rows, bytes, stalls; then three numbers for each of TIMED: seconds that it
                took until it last ended, how many threads are at it, since when they are on average. So it
                goes on rising for who reads it, in whatever its process is stuck. The clock is
                CLOCK_MONOTONIC, the same for all processes

The counts are written with each batch, all of it some ten times a second.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from arrowcache.storage.page import HEAD, RECORD_AT, SHOWN_BYTES, Page, PageKind, path_of

COUNTERS = PageKind("arrowcache-loader", b"arrowcache panel", 1)
COUNTERS_LINK = COUNTERS.link
TIMED = ("seconds", "stall", "samplers", "pace", "store", "gather", "transform", "start")
_IDENTITY = struct.Struct("<Q16s")
_COUNTS = struct.Struct("<5q")
_RECORD = struct.Struct("<5q" + "dqd" * len(TIMED))
_MOST_SECONDS = 1e12

Counts = tuple[int, int, int, int, int]
"""Epochs, batches, rows, bytes, stalls."""


class CounterPage(Page):
    """The page of one loader. Made by `open`; writing never fails, and does nothing once it is closed."""

    @classmethod
    def open(cls, folder: Path, workers: int, shuffle: str | None) -> CounterPage | None:
        """The page of a loader of the cache in a folder, or None if no memory or descriptor is left."""
        return cls.create(COUNTERS, folder, _IDENTITY.pack(workers, (shuffle or "").encode()))

    def count(self, counts: Counts) -> None:
        """Show the counts, and leave the times as they were: for each batch, in a microsecond."""
        if (page := self._page) is not None:
            _COUNTS.pack_into(page, RECORD_AT, *counts)

    def show(self, counts: Counts, times: Mapping[str, tuple[float, Sequence[float]]]) -> None:
        """Show counts and times.

        Args:
            times: of each of TIMED, the seconds that it took, and since when each thread is at it now.
        """
        if (page := self._page) is not None:
            numbers: list[float] = []
            for name in TIMED:
                seconds, since = times[name]
                numbers += [seconds, len(since), sum(since) / max(1, len(since))]
            _RECORD.pack_into(page, RECORD_AT, *counts, *numbers)


@dataclass(frozen=True, slots=True)
class Readout:
    """A page as it was at one moment: its cache, its process, and the counters up to then.

    `cache` is (device, inode) of its folder; `waits` is how many threads of the consumer wait now; `took`
    are the seconds of each of TIMED.
    """

    pid: int
    cache: tuple[int, int]
    path: str
    workers: int
    shuffle: str | None
    epochs: int
    batches: int
    rows: int
    bytes: int
    stalls: int
    waits: int
    took: Mapping[str, float]


def parse_counters(page: bytes, now: float) -> Readout | None:
    """Read the content of a page, with times up to `now` of the monotonic clock. None if it is not ours."""
    if len(page) != SHOWN_BYTES:
        return None
    magic, version, pid, device, inode = HEAD.unpack_from(page)
    if (magic, version) != (COUNTERS.magic, COUNTERS.version):
        return None
    workers, shuffle = _IDENTITY.unpack_from(page, HEAD.size)
    epochs, batches, rows, nbytes, stalls, *times = _RECORD.unpack_from(page, RECORD_AT)
    took, at_it = {}, {}
    for number, name in enumerate(TIMED):
        seconds, count, since = times[3 * number : 3 * number + 3]
        took[name] = seconds + count * max(0.0, now - since)
        at_it[name] = count
        if not 0 <= took[name] < _MOST_SECONDS:
            return None
    return Readout(
        pid=pid,
        cache=(device, inode),
        path=path_of(page),
        workers=workers,
        shuffle=shuffle.rstrip(b"\0").decode(errors="replace") or None,
        epochs=epochs,
        batches=batches,
        rows=rows,
        bytes=nbytes,
        stalls=stalls,
        waits=at_it["stall"],
        took=took,
    )
