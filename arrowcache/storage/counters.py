"""Counters: loaders and samplers show their counts to other processes of the same user.

Each loader, and each sampler process or thread for each cache that it draws for, has one page of memory
without a name: a memfd, which goes when its process does, so a kill leaves nothing. A reader finds pages
among the descriptors in /proc/<pid>/fd, under the memfd's name. A page is not to be trusted more than any
process of the same user is.

    byte 0      head: magic, version, pid, device and inode of the cache's folder. Then, of a loader: workers,
                shuffle; of a sampler: the token of its pool, and the pool's "<name>.<seed>"
    byte 128    record: what changes, written in one call of C, which no other thread and no signal handler
                of the process come between. Readers read until two times agree
    byte 1024   path of the cache's folder

The record of a loader has epochs, batches, rows, bytes, stalls; then three numbers for each of TIMED: seconds
that it took until it last ended, how many threads are at it, since when they are on average. So it goes on
rising for a reader, in whatever the loader's process is stuck. Then how many waits of its consumer took less
than 1 us, less than 2 us and no less than 1, and so on for each of WAITS. The counts are written with each
batch, all of it some ten times a second.

The record of a sampler has task, rows drawn for it, rows of its segment, when the last row was drawn, its
state, how many samples it has left out, of all its tasks, and its reads: see ReadCounts. Of a sampler on
another machine, as of Ray, nothing is seen.

Times are by CLOCK_MONOTONIC, the same for all processes.

Guarantees: writing never fails, takes about a microsecond, and does nothing once a page is closed. If no
memory or descriptor is left, a page is closed from the start. A reader never waits for the process that it
reads of. A forked child shares its parent's page: it closes it at once, and makes its own.
"""

from __future__ import annotations

import mmap
import os
import resource
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from arrowcache import linux
from arrowcache.lifetimes import forgets_in_child
from arrowcache.proc import OpenFile, open_files
from arrowcache.storage.locks import file_identity
from arrowcache.units import format_count, format_seconds

if TYPE_CHECKING:
    from typing import Self

TIMED = ("seconds", "stall", "samplers", "pace", "store", "gather", "transform", "start")
WAITS = tuple(1e-6 * 2**n for n in range(27))  # seconds, up to 67: what is longer counts beside
_PAGE_BYTES = 4096  # on machines of larger pages, too
_RECORD_AT, _PATH_AT = 128, 1024
_HEAD = struct.Struct("<16sqqQQ")
_COUNTS = struct.Struct("<5q")
_SPARE_DESCRIPTORS = 32  # a process that is nearly out of them needs them itself
_MAX_READS = 100  # of one page, until two agree
_MAX_SECONDS = 1e12
_MAX_COUNT = 2**62
_MIN_JUDGED_SECONDS = 1.0  # of drawing, before there is advice
_MAX_BUSY = 0.7  # of the time, for a worker that does not need more of its processor
_MAX_FETCHED = 2.0  # bytes for each that is published
_MIN_KNOWN = 0.25  # of the time, by a sampler that does not wait: processors may be others', too
_MAX_RETRIED = 0.1  # of the reads, by a store that can answer as many as it is asked for


_LINK = "/memfd:{} (deleted)"  # of a memfd's descriptor in /proc
_LOADER, _SAMPLER = "arrowcache-loader", "arrowcache-sampler"
LOADER_LINK, SAMPLER_LINK = map(_LINK.format, (_LOADER, _SAMPLER))


class _Page:
    """A page of this process. `name` is the memfd's; `magic`, `version` are in the head, then `identity`."""

    name: ClassVar[str]
    magic: ClassVar[bytes]
    version: ClassVar[int]
    identity: ClassVar[struct.Struct]
    record: ClassVar[struct.Struct]

    def __init__(self, page: mmap.mmap | None) -> None:
        self._page = page  # its last reference unmaps it and closes the descriptor
        forgets_in_child(self)

    @classmethod
    def _create(cls, folder: Path, *identity: Any) -> Self:
        """A page about the cache in a folder; closed from the start if no memory or descriptor is left."""
        try:
            cache = file_identity(os.stat(folder))
            fd = linux.memory_file(cls.name)
            try:
                if fd + _SPARE_DESCRIPTORS >= resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
                    return cls(None)
                os.posix_fallocate(fd, 0, _PAGE_BYTES)
                page = mmap.mmap(fd, _PAGE_BYTES)  # which has a descriptor of its own
            finally:
                os.close(fd)
        except OSError:
            return cls(None)
        path_bytes = _PAGE_BYTES - _PATH_AT
        page[_PATH_AT:_PAGE_BYTES] = os.fsencode(folder)[:path_bytes].ljust(path_bytes, b"\0")
        cls.identity.pack_into(page, _HEAD.size, *identity)
        _HEAD.pack_into(page, 0, cls.magic, cls.version, os.getpid(), *cache)
        return cls(page)

    @property
    def is_open(self) -> bool:
        return self._page is not None

    def close(self) -> None:
        """Show nothing any more. Idempotent."""
        self._page = None

    def forget_in_child(self) -> None:
        self.close()


class _SeenPage(NamedTuple):
    """A page of some process; `key` tells it from others."""

    key: int
    pid: int
    identity: tuple[Any, ...]
    record: tuple[Any, ...]


def _seen_pages(kind: type[_Page], folder: Path, files: Iterable[OpenFile] | None) -> list[_SeenPage]:
    """The pages of a kind about the cache in a folder, by process."""
    cache = file_identity(os.stat(folder))
    seen: dict[int, _SeenPage] = {}
    for file in open_files() if files is None else files:
        if file.link != _LINK.format(kind.name):
            continue
        path = f"/proc/{file.pid}/fd/{file.fd}"
        page = _read_page(path)
        if page is None or len(page) != _PAGE_BYTES:
            continue
        magic, version, pid, *about = _HEAD.unpack_from(page)
        if (magic, version, *about) != (kind.magic, kind.version, *cache):
            continue
        try:
            key = os.stat(path).st_ino
        except OSError:  # closed meanwhile
            continue
        if key not in seen or file.pid == pid:  # a process forked by C shares its parent's
            identity = kind.identity.unpack_from(page, _HEAD.size)
            seen[key] = _SeenPage(key, file.pid, identity, kind.record.unpack_from(page, _RECORD_AT))
    return sorted(seen.values(), key=lambda page: (page.pid, page.key))


def _read_page(path: str) -> bytes | None:
    """The content of a page by its file. None if it cannot be read. Blocks: never, whatever is there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        page = os.pread(fd, _PAGE_BYTES, 0)
        for _ in range(_MAX_READS):  # then each number is one that was there, if not at the same time
            before, page = page, os.pread(fd, _PAGE_BYTES, 0)
            if before == page:
                break
    except OSError:
        return None
    finally:
        os.close(fd)
    return page


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")


# loaders


class LoaderPage(_Page):
    """The page of one loader. Made by `open`."""

    name, magic, version = _LOADER, b"arrowcache panel", 2
    identity = struct.Struct("<Q16s")
    record = struct.Struct("<5q" + "dqd" * len(TIMED) + "q" * (len(WAITS) + 1))

    @classmethod
    def open(cls, folder: Path, workers: int, shuffle: str | None) -> LoaderPage:
        """The page of a loader of the cache in a folder."""
        return cls._create(folder, workers, (shuffle or "").encode())

    def count(self, counts: tuple[int, int, int, int, int]) -> None:
        """Show the counts, and leave the times as they were: for each batch, in a microsecond."""
        if (page := self._page) is not None:
            _COUNTS.pack_into(page, _RECORD_AT, *counts)

    def show(
        self,
        counts: tuple[int, int, int, int, int],
        times: Mapping[str, tuple[float, Sequence[float]]],
        waits: Sequence[int],
    ) -> None:
        """Show counts, times and waits.

        Args:
            counts: epochs, batches, rows, bytes, stalls.
            times: of each of TIMED, the seconds that it took, and since when each thread is at it now.
            waits: how many were shorter than each of WAITS, and no shorter than the one before; longer ones.
        """
        if (page := self._page) is not None:
            numbers: list[float] = []
            for name in TIMED:
                seconds, since = times[name]
                numbers += [seconds, len(since), sum(since) / max(1, len(since))]
            self.record.pack_into(page, _RECORD_AT, *counts, *numbers, *waits)


@dataclass(frozen=True, slots=True)
class LoaderCounts:
    """The counts of a loader at one moment. `key` tells it from others.

    `waits` is how many threads of the consumer wait now; `took` has the seconds of each of TIMED up to now;
    `waited` is how many waits were shorter than each of WAITS and no shorter than the one before; and others.
    """

    key: int
    pid: int
    workers: int
    shuffle: str | None
    epochs: int
    batches: int
    rows: int
    bytes: int
    stalls: int
    waits: int
    took: Mapping[str, float]
    waited: tuple[int, ...]


def seen_loaders(
    folder: Path, files: Iterable[OpenFile] | None = None, now: float | None = None
) -> list[LoaderCounts]:
    """The loaders of a cache, of this user and machine, by process.

    Args:
        files: files that processes have open. None means that they are looked up, in some milliseconds.
        now: the end of times that still rise, by `time.perf_counter`.
    Raises: OSError: the folder is gone.
    """
    now = time.perf_counter() if now is None else now
    found = (_loader_counts(page, now) for page in _seen_pages(LoaderPage, folder, files))
    return [loader for loader in found if loader is not None]


def _loader_counts(page: _SeenPage, now: float) -> LoaderCounts | None:
    """None if no loader ever shows this."""
    workers, shuffle = page.identity
    epochs, batches, rows, nbytes, stalls, *others = page.record
    times, waited = others[: 3 * len(TIMED)], others[3 * len(TIMED) :]
    took, threads = {}, {}
    for number, name in enumerate(TIMED):
        seconds, count, since = times[3 * number : 3 * number + 3]
        took[name] = seconds + count * max(0.0, now - since)
        threads[name] = count
        if not 0 <= took[name] < _MAX_SECONDS:
            return None
    if min(waited) < 0:
        return None
    return LoaderCounts(
        key=page.key,
        pid=page.pid,
        workers=workers,
        shuffle=_text(shuffle) or None,
        epochs=epochs,
        batches=batches,
        rows=rows,
        bytes=nbytes,
        stalls=stalls,
        waits=threads["stall"],
        took=took,
        waited=tuple(waited),
    )


# samplers


class SamplerState(IntEnum):
    IDLE = 0  # it has published its segment, or discarded it
    DRAWS = 1
    WAITS = 2  # for room, or for training as the cache's pace says


@dataclass(frozen=True, slots=True)
class ReadCounts:
    """The reads of a sampler: those at work; and of all its tasks, what they took and brought.

    `usual_seconds` is the median of a read, `slow_seconds` the 99th percentile; both 0 if there was none.
    `retries` are further attempts after an error, `hedges` reads that were begun once more as they took long.
    `fetched` bytes for each that it published; 0 if it is not known. It drew tasks that are done for
    `drawing_seconds`, in which it waited for reads for `reading_seconds`, and had a processor, also in reads,
    for `cpu_seconds`; beside these it waited for room for `waiting_seconds`. `done` reads gave something.
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
    done: int = 0

    @property
    def advice(self) -> str:
        """Advice on how to draw faster. Empty: there is none, or the sampler waits for room."""
        if self.drawing_seconds < max(_MIN_JUDGED_SECONDS, self.waiting_seconds):
            return ""
        found = []
        if self.retries > _MAX_RETRIED * self.done:
            many = f"{format_count(self.retries, 'retry', 'retries')} of {format_count(self.done, 'read')}"
            found.append(f"the store does not answer many reads, {many}: fewer `reads`, or fewer workers")
        elif self.cpu_seconds > _MAX_BUSY * self.drawing_seconds:
            found.append("the processor is the limit: more workers, as far as there are processors")
        elif self.reading_seconds > self.drawing_seconds / 2:
            found.append("the store is the limit: more `reads`, or of HDF5, read one at a time, more workers")
        elif self.reading_seconds + self.cpu_seconds < _MIN_KNOWN * self.drawing_seconds:
            found.append("the sampler itself waits: if it reads, `yield partial(read, key)`; or more workers")
        if self.fetched > _MAX_FETCHED:
            fetched = f"{self.fetched:.1f} bytes are fetched for each that is published"
            found.append(f"{fetched}: if windows are small, `windows_per_chunk`, or more `rows_per_group`")
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


NO_READS = ReadCounts()


class SamplerPage(_Page):
    """The page of one sampler. Made by `open`."""

    name, magic, version = _SAMPLER, b"arrowcache drawn", 1
    identity = struct.Struct("<q64s")
    record = struct.Struct("<3qdqqqddqqd4dq")
    _task = _rows = _full = _skipped = 0
    _state = SamplerState.IDLE
    _last = 0.0  # no row was drawn yet
    _reads: tuple[float, ...] = astuple(NO_READS)

    @classmethod
    def open(cls, folder: Path, pool: str, token: int) -> SamplerPage:
        """The page of a sampler of the cache in a folder."""
        return cls._create(folder, token, shown_pool(pool).encode())

    def begin(self, task: int, full_rows: int) -> None:
        """Show that a task begins whose segment will have about `full_rows`."""
        self._task, self._rows, self._full = task, 0, full_rows
        self._show(SamplerState.DRAWS)

    def count(self, rows: int, full_rows: int) -> None:
        """Show the rows drawn for the task, the last one now, and the rows that its segment will have."""
        self._rows, self._full, self._last = rows, full_rows, time.monotonic()
        self._show(SamplerState.DRAWS)

    def skip(self) -> None:
        """Show that one sample more was left out."""
        self._skipped += 1
        self._show(SamplerState.DRAWS)

    def show_reads(self, reads: ReadCounts) -> None:
        """Show what its reads do."""
        self._reads = astuple(reads)
        self._show(self._state)

    def wait(self) -> None:
        """Show that the segment is full, and waits for room."""
        self._show(SamplerState.WAITS)

    def end(self) -> None:
        """Show that the task has ended."""
        self._rows = self._full = 0
        self._show(SamplerState.IDLE)

    def _show(self, state: SamplerState) -> None:
        self._state = state
        if (page := self._page) is not None:
            shown = self._task, self._rows, self._full, self._last, state, self._skipped, *self._reads
            self.record.pack_into(page, _RECORD_AT, *shown)


@dataclass(frozen=True, slots=True)
class SamplerCounts:
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
    state: SamplerState
    skipped: int = 0
    reads: ReadCounts = NO_READS


def seen_samplers(folder: Path, files: Iterable[OpenFile] | None = None) -> list[SamplerCounts]:
    """The samplers of a cache, of this user and machine, by process. Args, raises: as `seen_loaders`."""
    found = map(_sampler_counts, _seen_pages(SamplerPage, folder, files))
    return [sampler for sampler in found if sampler is not None]


def _sampler_counts(page: _SeenPage) -> SamplerCounts | None:
    """None if no sampler ever shows this."""
    token, pool = page.identity
    task, rows, full_rows, last, state, skipped, *reads = page.record
    counts = rows, full_rows, skipped, last, *reads
    if state not in iter(SamplerState) or task < 0 or not all(0 <= count < _MAX_COUNT for count in counts):
        return None
    return SamplerCounts(
        pid=page.pid,
        pool=_text(pool),
        token=token,
        task=task,
        rows=rows,
        full_rows=full_rows,
        last_row=last or None,
        state=SamplerState(state),
        skipped=skipped,
        reads=ReadCounts(*reads),
    )


def shown_pool(pool: str) -> str:
    """Return the part of a pool's name, which is ASCII, that a page has room for."""
    return pool[:64]
