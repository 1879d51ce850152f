"""Lease: a reader's claim on segments it may still read. A leased segment is never evicted.

One lease is one open file description of lease.lock with one shared lock on bytes
[first, last], one byte a segment. It covers what lies between, too: eviction is strictly
oldest-first, so a hole would free nothing, and scattered locks make the kernel quadratic.
Taken under cache.lock, by whoever listed the folder; released in order or by `close()`, and by
the kernel when the process dies.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from arrowcache.storage.locks import LockFile, file_identity

_leases: dict[int, weakref.ref[Lease]] = {}  # by id; single operations, which no thread can tear


class Lease:
    """A shared lock on segments first..last (sequence numbers, both included).

    Whatever maps a leased file has a share of the lease: it ends when every share is closed.

    Args:
        path: lease.lock.
    Raises: OSError: the kernel refused, which under cache.lock no other lease causes.
    """

    #: Called when a writer of this very process finds this lease in its way; it may close the
    #: lease, if nobody reads through it any more.
    on_contention: Callable[[], None] | None = None

    def __init__(self, path: Path, first: int, last: int) -> None:
        self._file = LockFile(path)
        self._first, self._last = first, last
        self._pid = os.getpid()
        self._shares = 1
        self._given_up: set[int] = set()
        self._lock = threading.Lock()
        if not self._file.try_range(first, last - first + 1, exclusive=False):
            self._file.close()
            raise OSError(f"segments {first} to {last} are being evicted: cache.lock was not held")
        _leases[id(self)] = weakref.ref(self)

    def covers(self, seq: int) -> bool:
        return self._file.fd >= 0 and self._first <= seq <= self._last and seq not in self._given_up

    def narrow(self, first: int, last: int) -> None:
        """Give up everything outside first..last; what was given up cannot be had back."""
        if self._file.fd < 0:
            return
        if first > self._first:
            self._file.unlock_range(self._first, first - self._first)
            self._first = first
        if last < self._last:
            self._file.unlock_range(last + 1, self._last - last)
            self._last = last

    def give_up(self, seq: int) -> None:
        """Unlock one segment in the middle, because it turned out unreadable."""
        if self.covers(seq):
            self._file.unlock_range(seq, 1)
            self._given_up.add(seq)

    def share(self) -> Lease:
        """One share more: `close` once more."""
        with self._lock:
            self._shares += 1
        return self

    def close(self) -> None:
        """Close one share; whatever was mapped under it must be unmapped before."""
        with self._lock:
            self._shares -= 1
            if self._shares:
                return
        self._file.close()
        _leases.pop(id(self), None)


def own_leases(path: Path, seq: int) -> list[Lease]:
    """Leases of this process on one segment."""
    pid, identity = os.getpid(), file_identity(os.stat(path))
    return [
        lease
        for lease in [reference() for reference in list(_leases.values())]
        if lease is not None and lease._pid == pid and lease._file.identity == identity and lease.covers(seq)
    ]
