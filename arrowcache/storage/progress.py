"""Progress: rows that samplers have drawn and not published, on pages (page.py) as counters are.

Each sampler process, or thread, has one page (page.py) for each cache that it draws for.

    head        token of its pool, "<name>.<seed>" of the pool
    record      task, rows drawn for it, rows of its segment, when the last row was drawn by
                CLOCK_MONOTONIC, the same for all processes, what it does: see State, how many samples
                it has left out, of all its tasks, and what its reads do: see SeenReads

What was drawn on another machine, as by Ray, is not seen.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from enum import IntEnum
from pathlib import Path

from arrowcache.storage.locks import file_identity
from arrowcache.storage.page import HEAD, RECORD_AT, Page, PageKind, seen_pages
from arrowcache.storage.proc import OpenFile
from arrowcache.units import format_count, format_seconds

PROGRESS = PageKind("arrowcache-sampler", b"arrowcache drawn", 1)
_IDENTITY = struct.Struct("<q64s")
_RECORD = struct.Struct("<3qdqqqddqqd4d")
_MOST_ROWS = 2**62
_LEAST_JUDGED_SECONDS = 1.0  # of drawing, before there is advice
_MOST_BUSY = 0.7  # of the time, for a worker that does not need more of its processor
_MOST_FETCHED = 2.0  # bytes for each that is published


def shown_pool(pool: str) -> str:
    """Return the part of a pool's name, which is ASCII, that a page has room for."""
    return pool[:64]


class State(IntEnum):
    IDLE = 0  # it has published its segment, or discarded it
    DRAWS = 1
    WAITS = 2  # for room, or for training as the cache's pace says


@dataclass(frozen=True, slots=True)
class SeenReads:
    """The reads of a sampler: those at work; and of all its tasks, what they took and brought.

    `usual_seconds` is the median of a read, `slow_seconds` the 99th percentile; both 0 if there was none.
    `retries` are further attempts after an error, `hedges` reads that were begun once more as they took long.
    `fetched` bytes for each that it published; 0 if it is not known. It drew tasks that are done for
    `drawing_seconds`, in which it waited for reads for `reading_seconds`, and had a processor, also in reads,
    for `cpu_seconds`; beside these it waited for room for `waiting_seconds`.
    """

    at_work: int = 0
    usual_seconds: float = 0.0
    slow_seconds: float = 0.0
    retries: int = 0
    hedges: int = 0
    fetched: float = 0.0
    drawing_seconds: float = 0.0
    reading_seconds: float = 0.0
    cpu_seconds: float = 0.0
    waiting_seconds: float = 0.0

    @property
    def advice(self) -> str:
        """Advice on how to draw faster. Empty: there is none, or the sampler waits for room."""
        if self.drawing_seconds < max(_LEAST_JUDGED_SECONDS, self.waiting_seconds):
            return ""
        found = []
        if self.cpu_seconds > _MOST_BUSY * self.drawing_seconds:
            found.append("the processor is the limit: more workers, as far as there are processors")
        elif self.reading_seconds > self.drawing_seconds / 2:
            found.append("the store is the limit: more `reads`")
        if self.fetched > _MOST_FETCHED:
            fetched = f"{self.fetched:.1f} bytes are fetched for each that is published"
            found.append(f"small windows, {fetched}: `windows_per_chunk`, or more `rows_per_group`")
        return "; ".join(found)

    @property
    def text(self) -> str:
        """These in words. Empty if there was none."""
        if not self.usual_seconds:
            return f"{self.at_work:,} at work" if self.at_work else ""
        parts = [
            f"{self.at_work:,} of {format_seconds(self.usual_seconds)}",
            f"99 % in {format_seconds(self.slow_seconds)}",
            *([format_count(self.retries, "retry", "retries")] if self.retries else []),
            *([format_count(self.hedges, "hedge")] if self.hedges else []),
            *([f"{self.fetched:.1f} bytes fetched for one"] if self.fetched else []),
        ]
        return ", ".join(parts)


NO_READS = SeenReads()


class Progress(Page):
    """The page of one sampler. Made by `open`; writing never fails, and takes about a microsecond."""

    _task = _rows = _full = _skipped = 0
    _state = State.IDLE
    _last = 0.0  # no row was drawn yet
    _reads: tuple[float, ...] = astuple(NO_READS)

    @classmethod
    def open(cls, folder: Path, pool: str, token: int) -> Progress | None:
        """The page of a sampler of the cache in a folder, or None if no memory or descriptor is left."""
        return cls.create(PROGRESS, folder, _IDENTITY.pack(token, shown_pool(pool).encode()))

    def begin(self, task: int, full_rows: int) -> None:
        """Show that a task begins whose segment will have about `full_rows`."""
        self._task, self._rows, self._full = task, 0, full_rows
        self._show(State.DRAWS)

    def count(self, rows: int, full_rows: int) -> None:
        """Show the rows drawn for the task, the last one now, and the rows that its segment will have."""
        self._rows, self._full, self._last = rows, full_rows, time.monotonic()
        self._show(State.DRAWS)

    def skip(self) -> None:
        """Show that one sample more was left out."""
        self._skipped += 1
        self._show(State.DRAWS)

    def show_reads(self, reads: SeenReads) -> None:
        """Show what its reads do."""
        self._reads = astuple(reads)
        self._show(self._state)

    def wait(self) -> None:
        """Show that the segment is full, and waits for room."""
        self._show(State.WAITS)

    def end(self) -> None:
        """Show that the task has ended."""
        self._rows = self._full = 0
        self._show(State.IDLE)

    def _show(self, state: State) -> None:
        self._state = state
        if (page := self._page) is not None:
            shown = self._task, self._rows, self._full, self._last, state, self._skipped, *self._reads
            _RECORD.pack_into(page, RECORD_AT, *shown)


@dataclass(frozen=True, slots=True)
class SeenSampler:
    """A sampler at one moment: the task it is at, and how far it is.

    `rows` are drawn for the task and not published, of about `full_rows`; both are 0 between two tasks.
    `last_row` is when it drew its last row, in any task, by `time.monotonic`; None if it drew none. `skipped`
    samples of all its tasks were left out.
    """

    pid: int
    pool: str
    token: int
    task: int
    rows: int
    full_rows: int
    last_row: float | None
    state: State
    skipped: int = 0
    reads: SeenReads = NO_READS


def seen_samplers(folder: Path, files: Iterable[OpenFile] | None = None) -> list[SeenSampler]:
    """The samplers of a cache, of this user and machine, by process.

    Args:
        files: files that processes have open. None means that they are looked up, in some milliseconds.
    Raises: OSError: the folder is gone.
    """
    pages = seen_pages(PROGRESS, file_identity(os.stat(folder)), files)
    found = (_parsed(page.pid, page.data) for page in pages)
    return [sampler for sampler in found if sampler is not None]


def _parsed(pid: int, data: bytes) -> SeenSampler | None:
    """Read the content of a page. None if no sampler ever shows this."""
    token, pool = _IDENTITY.unpack_from(data, HEAD.size)
    task, rows, full_rows, last, state, skipped, *shown = _RECORD.unpack_from(data, RECORD_AT)
    reads = SeenReads(*shown)
    counts = rows, full_rows, skipped, *shown
    known = state in iter(State) and task >= 0 and all(0 <= count < _MOST_ROWS for count in counts)
    if not known or not 0 <= last < _MOST_ROWS:
        return None
    name = pool.rstrip(b"\0").decode(errors="replace")
    return SeenSampler(pid, name, token, task, rows, full_rows, last or None, State(state), skipped, reads)
