"""Panel: a loader's counters where other processes of the same user see them.

One page of memory without a name, a memfd, which goes when its process does: a kill leaves nothing. Who
looks finds it among the descriptors in /proc/<pid>/fd, under its link's name; what it says of itself is
not to be trusted more than any process of the same user is.

    byte 0      identity: magic, version, pid, device and inode of the cache's folder, workers, shuffle
    byte 128    epochs, batches, rows, bytes, stalls; then three numbers for each of TIMED: seconds that it
                took until it last ended, how many threads are at it, since when they are on average. So it
                goes on rising for who reads it, in whatever its process is stuck. The clock is
                CLOCK_MONOTONIC, the same for all processes
    byte 1024   path of the cache's folder

The counts are written with each batch, all of it some ten times a second, in one call of C, which no other
thread and no signal handler of the process come between. Readers read until two times agree. A forked child
shares the page: it closes it at once, and its loaders make their own.
"""

from __future__ import annotations

import mmap
import os
import resource
import struct
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from arrowcache import linux

PANEL_NAME = "arrowcache-loader"
PANEL_LINK = f"/memfd:{PANEL_NAME} (deleted)"
TIMED = ("seconds", "stall", "samplers", "pace", "store", "gather", "transform", "start")
_BYTES = 4096
_MAGIC, _VERSION = b"arrowcache panel", 1
_IDENTITY = struct.Struct("<16sqqQQq16s")
_COUNTS = struct.Struct("<5q")
_RECORD = struct.Struct("<5q" + "dqd" * len(TIMED))
_RECORD_AT, _PATH_AT = 128, 1024
_SPARE_DESCRIPTORS = 32  # a loader that is nearly out of them needs them itself
_MOST_SECONDS = 1e12
_TRIES = 100

Counts = tuple[int, int, int, int, int]
"""Epochs, batches, rows, bytes, stalls."""


class Panel:
    """What one loader shows. Made by `open`; writing never fails, and does nothing once it is closed."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page: mmap.mmap | None = page  # its last reference unmaps it and closes the descriptor
        _panels.add(self)

    @classmethod
    def open(cls, folder: Path, workers: int, shuffle: str | None) -> Panel | None:
        """A panel of a loader of the cache in a folder; None: there is no memory or descriptor for one."""
        try:
            status = os.stat(folder)
            fd = linux.memory_file(PANEL_NAME)
            try:
                if fd + _SPARE_DESCRIPTORS >= resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
                    return None
                os.posix_fallocate(fd, 0, _BYTES)
                page = mmap.mmap(fd, _BYTES)  # which has a descriptor of its own
            finally:
                os.close(fd)
        except OSError:
            return None
        page[_PATH_AT:_BYTES] = os.fsencode(folder)[: _BYTES - _PATH_AT].ljust(_BYTES - _PATH_AT, b"\0")
        identity = os.getpid(), status.st_dev, status.st_ino, workers, (shuffle or "").encode()
        _IDENTITY.pack_into(page, 0, _MAGIC, _VERSION, *identity)
        return cls(page)

    @property
    def is_open(self) -> bool:
        return self._page is not None

    def count(self, counts: Counts) -> None:
        """Show the counts, and leave the times as they were: for each batch, in a microsecond."""
        if (page := self._page) is not None:
            _COUNTS.pack_into(page, _RECORD_AT, *counts)

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
            _RECORD.pack_into(page, _RECORD_AT, *counts, *numbers)

    def close(self) -> None:
        """Show nothing any more. Idempotent."""
        self._page = None


_panels: weakref.WeakSet[Panel] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for panel in list(_panels):
        panel.close()
    _panels.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


@dataclass(frozen=True, slots=True)
class Readout:
    """What a panel showed at one moment: of which cache, whose, and the counters up to that moment.

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


def read_panel(path: str | os.PathLike[str]) -> Readout | None:
    """Read a panel by its file, such as /proc/<pid>/fd/<n>; None: it is gone, or is none of ours.

    Blocks: never; whatever is there is read, but not waited for.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        page = os.pread(fd, _BYTES, 0)
        for _ in range(_TRIES):  # after which each number is one that was there, if not at the same time
            before, page = page, os.pread(fd, _BYTES, 0)
            if before == page:
                break
    except OSError:
        return None
    finally:
        os.close(fd)
    return parse_panel(page, time.perf_counter())


def parse_panel(page: bytes, now: float) -> Readout | None:
    """What a page says at a moment of the monotonic clock; None: it is none of ours."""
    if len(page) != _BYTES:
        return None
    magic, version, pid, device, inode, workers, shuffle = _IDENTITY.unpack_from(page)
    if magic != _MAGIC or version != _VERSION:
        return None
    epochs, batches, rows, nbytes, stalls, *times = _RECORD.unpack_from(page, _RECORD_AT)
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
        path=os.fsdecode(page[_PATH_AT:].rstrip(b"\0")),
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
