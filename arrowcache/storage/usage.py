"""Usage: what came and went, and how often each segment was served.

It owns the content of the file `usage` (see layout.py). Written with cache.lock held, by single calls, and
never synced: a process that is killed leaves what it had counted; a power cut may take some of it. What
cannot be written, as on a full disk, is not counted: no publish and no epoch fails for a statistic. The
disk gets the counts of evicted segments back, a page at a time.

Some bytes far behind the counts are signs, share-locked until who shows one ends or dies: one by each loader
that waits, so that samplers know; one by each writer that is open and each pool with tasks left, so that
loaders know; and for who freezes the cache, one by each process with annotations to be written, and one by
each epoch that draws by weights. Of those behind them each is of one epoch, and locked by the rank that
chooses its rows; or of one rank, and share-locked by it while it waits.

Of a frozen cache nothing is counted or shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from arrowcache.storage.folder import Folder
from arrowcache.storage.layout import USAGE_COUNTS, USAGE_SEQS, SegmentInfo, UsageRecord
from arrowcache.storage.locks import LockFile, holder_names

_COUNT = np.dtype("<u4")
_MAX_COUNT = 2**32 - 1
_LOADER_WAITS, _SOMEBODY_WRITES = 2**62, 2**62 + 1  # the bytes that are signs
_SOMEBODY_NOTES, _SOMEBODY_WEIGHS = 2**62 - 1, 2**62 - 2
_IN_THE_WAY = {  # of a freeze
    _SOMEBODY_WRITES: "writes, or has a writer or a pool open",
    _SOMEBODY_NOTES: "has annotations to be written",
    _SOMEBODY_WEIGHS: "reads an epoch by weights",
}
_EPOCHS = 2**62 + 2  # the bytes from here on are of epochs, and of ranks that wait
_PAGE_COUNTS = 4096 // _COUNT.itemsize


class Usage:
    """The counts of one cache. What changes them is called with cache.lock held."""

    def __init__(self, folder: Folder, *, is_frozen: bool = False) -> None:
        self._folder, self._is_frozen = folder, is_frozen

    def record(self) -> UsageRecord:
        """The totals; all zero where they cannot be read."""
        with suppress(OSError):
            return UsageRecord.unpack(self._folder.read_usage(0, UsageRecord.nbytes))
        return UsageRecord()

    def served(self, seqs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count the epochs that read each segment: 0 where that cannot be read. seqs, (n,), ascend."""
        counts = np.zeros(len(seqs), np.int64)
        with suppress(OSError):
            for run in _runs(seqs):
                count = run.stop - run.start
                data = self._folder.read_usage(_place(seqs[run.start]), count * _COUNT.itemsize)
                counts[run] = _counts(data, count)
        return counts

    def add_inserted(self, seq: int, rows: int) -> None:
        """Count a published segment. No epoch has read it, whatever count a power cut left for it."""
        with suppress(OSError):
            self._folder.change_usage(_place(seq), _COUNT.itemsize, lambda _: bytes(_COUNT.itemsize))
        self._add(inserted_rows=rows)

    def add_served(self, rows: int) -> None:
        """Count the rows that an epoch serves. Negative if it ended before it served them."""
        self._add(served_rows=rows)

    def count_epoch(self, seqs: NDArray[np.int64], passes: int) -> None:
        """Count the passes of an epoch over these segments. Negative if it ended before it served a row."""

        def change(data: bytes, count: int) -> bytes:
            return np.clip(_counts(data, count) + passes, 0, _MAX_COUNT).astype(_COUNT).tobytes()

        with suppress(OSError):
            for run in _runs(seqs):
                count = run.stop - run.start
                self._folder.change_usage(
                    _place(seqs[run.start]), count * _COUNT.itemsize, partial(change, count=count)
                )

    def add_evicted(self, victims: Sequence[SegmentInfo]) -> None:
        """Count segments that were evicted, in order of seq."""
        if not victims:
            return
        seqs = np.array([victim.seq for victim in victims], np.int64)
        rows = np.array([victim.rows for victim in victims], np.int64)
        unread = self.served(seqs) == 0
        self._add(
            evicted_segments=len(victims), evicted_rows=int(rows.sum()), unread_rows=int(rows[unread].sum())
        )
        before, last = (max(0, int(seq)) % USAGE_SEQS // _PAGE_COUNTS for seq in (seqs[0] - 1, seqs[-1]))
        if last > before:
            with suppress(OSError):
                self._folder.free_usage(USAGE_COUNTS, last * 4096)

    def take_back(self, rows: int) -> None:
        """Count rows as not published: they are gone."""
        if rows:
            self._add(inserted_rows=-rows)

    def begin_pace(self) -> None:
        """Begin the counts of a pace: it was set, or segments were removed by hand."""
        self._change(
            lambda record: replace(
                record, paced_inserted_rows=record.inserted_rows, paced_served_rows=record.served_rows
            )
        )

    def show_waiting(self) -> ExitStack:
        """Show that a loader waits, as `show_writing`: no sampler waits for training meanwhile."""
        return self._show(_LOADER_WAITS)

    def a_loader_waits(self) -> bool:
        """True if a loader waits, as `show_waiting` shows. Raises: OSError: it cannot be told."""
        return self._is_shown(_LOADER_WAITS)

    def show_writing(self) -> ExitStack:
        """Show that somebody writes, until the sign is closed or dropped, or this process dies.

        A context manager. A forked child does not prolong it. Shows nothing if no descriptor is left.
        """
        return self._show(_SOMEBODY_WRITES)

    def somebody_writes(self) -> bool:
        """True if a writer is open, or a sampler pool has tasks left, in this process or another.

        True also where it cannot be told: no writer is to stand still for that, and no epoch fails.
        """
        try:
            return self._is_shown(_SOMEBODY_WRITES)
        except OSError:
            return True

    def show_noting(self) -> ExitStack:
        """Show that annotations wait to be written, as `show_writing`."""
        return self._show(_SOMEBODY_NOTES)

    def show_weighing(self) -> ExitStack:
        """Show that an epoch draws by weights, as `show_writing`."""
        return self._show(_SOMEBODY_WEIGHS)

    def in_the_way(self) -> Iterator[str]:
        """Say who does what a freeze does not allow. Raises: OSError: it cannot be told."""
        for sign, does in _IN_THE_WAY.items():
            if self._is_shown(sign):
                yield f"{holder_names(self._folder.usage, sign)} {does}"

    @contextmanager
    def alone(self, name: str) -> Iterator[bool]:
        """Be the only one meanwhile who chooses the rows of the epoch of this name, in any process.

        Yields: False: another is at it. True also where it cannot be told.
        """
        with ExitStack() as held:
            is_alone = True
            with suppress(OSError):
                file = held.enter_context(LockFile(self._folder.usage))
                is_alone = file.try_range(_sign_of(name), 1, exclusive=True)
            yield is_alone

    def show_rank(self, name: str, rank: int) -> ExitStack:
        """Show that one of several ranks with a name in common waits, as `show_writing`."""
        return self._show(_sign_of(name) + rank)

    def all_shown(self, name: str, ranks: range) -> bool:
        """True if each of these ranks waits, as `show_rank` shows. False where it cannot be told."""
        with suppress(OSError):
            return all(self._is_shown(_sign_of(name) + rank) for rank in ranks)
        return False

    def _show(self, sign: int) -> ExitStack:
        shown = ExitStack()
        if not self._is_frozen:
            with suppress(OSError):
                shown.enter_context(LockFile(self._folder.usage)).try_range(sign, 1, exclusive=False)
        return shown

    def _is_shown(self, sign: int) -> bool:
        if self._is_frozen:
            return False
        with LockFile(self._folder.usage) as file:
            return file.conflict(sign, 1) is not None

    def _add(self, **more: int) -> None:
        self._change(
            lambda record: replace(
                record, **{name: max(0, getattr(record, name) + count) for name, count in more.items()}
            )
        )

    def _change(self, change: Callable[[UsageRecord], UsageRecord]) -> None:
        with suppress(OSError):
            self._folder.change_usage(
                0, UsageRecord.nbytes, lambda data: change(UsageRecord.unpack(data)).pack()
            )


def _counts(data: bytes, count: int) -> NDArray[np.int64]:
    """Return so many counts. Those behind the end of the file are 0."""
    return np.frombuffer(data.ljust(count * _COUNT.itemsize, b"\0"), _COUNT).astype(np.int64)


def _sign_of(name: str) -> int:
    """The first of the bytes that are signs of a name."""
    return _EPOCHS + (xxh3_64_intdigest(name.encode()) >> 3)


def _place(seq: int | np.int64) -> int:
    return USAGE_COUNTS + int(seq) % USAGE_SEQS * _COUNT.itemsize


def _runs(seqs: NDArray[np.int64]) -> list[slice]:
    """Slices of ascending numbers without a gap. None crosses the end of the file's places."""
    breaks = np.flatnonzero((np.diff(seqs) != 1) | (seqs[1:] % USAGE_SEQS == 0)) + 1
    ends = [0, *breaks.tolist(), len(seqs)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends) if stop > start]
