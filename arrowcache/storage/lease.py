"""Lease: keeps the segments that a reader may still read. A leased segment is never evicted.

One lease is one open file description of lease.lock with one shared lock on bytes
[first, last], one byte a segment. It covers what lies between, too: eviction is strictly
oldest-first, so a hole would free nothing, and scattered locks make the kernel quadratic. Only parts that
were merged into another segment are let go (`give_up`): they leave wherever they are in the order.
Taken under cache.lock, by whoever listed the folder; released oldest first or by `close()`, and
by the kernel when the process dies.

The owner gives up its oldest segments as it moves on (`narrow`). What maps a single segment for
longer has a share of that segment (`share`): the lock always reaches from the oldest segment
that anybody still needs to the newest. Both may come from the garbage collector, at any point
of any thread, so giving something up never waits for a lock.
"""

from __future__ import annotations

import heapq
import os
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from arrowcache.lifetimes import Mutex
from arrowcache.storage.locks import LockFile, file_identity

_leases: dict[int, weakref.ref[Lease]] = {}  # by id; single operations, which no thread can tear


class Lease:
    """A shared lock on segments first..last (sequence numbers, both included).

    Raises: OSError: the kernel refused, which under cache.lock no other lease causes.
    """

    #: Called when a writer of this very process finds this lease in its way; it may close the
    #: lease, if nobody reads through it any more.
    on_contention: Callable[[], None] | None = None

    #: The owner will close it as soon as what still reads through it is done: waiting for that helps.
    is_ending = False

    def __init__(self, path: Path, first: int, last: int) -> None:
        self.lock = LockFile(path)
        self._first, self._last = first, last  # what the kernel has locked
        self._owned_from: int | None = first  # what the owner needs; None: it is done
        self._shares: Counter[int] = Counter()  # by seq, for as long as it is in `_shared`
        self._shared: list[int] = []  # heap of seqs that had shares: the oldest is looked up
        self._given_up: set[int] = set()
        self._mutex = Mutex("the narrowing of a lease")
        try:
            self.lock.outlast_mappings()  # mapped implies leased, for a process that is killed, too
        except BaseException:
            self.lock.close()
            raise
        if not self.lock.try_range(first, last - first + 1, exclusive=False):
            self.lock.close()
            raise OSError(f"segments {first} to {last} are being evicted: cache.lock was not held")
        _leases[id(self)] = weakref.ref(self)

    def covers(self, seq: int) -> bool:
        """True if it keeps a segment leased for its owner."""
        return self.lock.fd >= 0 and self._first <= seq <= self._last and seq not in self._given_up

    def stays(self, seq: int) -> bool:
        """True if it covers a segment and is not about to be closed."""
        return not self.is_ending and self.covers(seq)  # in this order: it may be closed meanwhile

    def narrow(self, first: int, last: int) -> None:
        """End the owner's need of segments outside first..last. It cannot have them back."""
        self._end((first, last))

    def give_up(self, seq: int) -> None:
        """Unlock one segment in the middle: it turned out unreadable, or another one has its rows."""
        if self.covers(seq) and self._unlock(seq, 1):
            self._given_up.add(seq)

    def share(self, seq: int) -> Callable[[], None]:
        """Keep a segment that this lease covers leased, whatever the owner does.

        Returns: a function that ends the share. Call it when the segment is unmapped. Idempotent.
        """
        with self._mutex.held():
            if seq not in self._shares:
                heapq.heappush(self._shared, seq)
            self._shares[seq] += 1
        self._mutex.drain(self._handle)
        return partial(self._end, [seq])

    def close(self) -> None:
        """End the owner's need of all segments, after it unmapped them. Shares go on. Idempotent."""
        self._end(None)
        self.on_contention = None  # it may know the owner: a cycle
        self.is_ending = False  # last: what is leased still is shared

    def _end(self, whose: list[int] | tuple[int, int] | None) -> None:
        """End a share, [seq]; or the owner's need of segments, outside (first, last) or None for all."""
        self._mutex.tell(whose, self._handle)

    def _handle(self, whose: list[int] | tuple[int, int] | None) -> None:
        if whose is None:
            self._owned_from = None
        elif isinstance(whose, tuple):
            self._narrow(*whose)
        elif whose:  # not yet taken in: Ctrl-C may have it told twice
            self._shares[whose[0]] -= 1
            whose.clear()
        self._unlock_oldest()

    def _narrow(self, first: int, last: int) -> None:
        if self._owned_from is not None:
            self._owned_from = max(self._owned_from, first)
        may_narrow = last < self._last and self.lock.fd >= 0 and not any(self._shares.values())
        if may_narrow and self._unlock(last + 1, self._last - last):
            self._last = last

    def _unlock_oldest(self) -> None:
        """Unlock what lies before the oldest segment that is still needed; while `_mutex` is held."""
        while self._shared and not self._shares[self._shared[0]]:
            del self._shares[heapq.heappop(self._shared)]
        needed = [self._owned_from] if self._owned_from is not None else []
        oldest = min(needed + self._shared[:1], default=None)
        if oldest is None:
            self.lock.close()
            _leases.pop(id(self), None)
        elif oldest > self._first and self.lock.fd >= 0 and self._unlock(self._first, oldest - self._first):
            self._first = oldest

    def _unlock(self, first: int, count: int) -> bool:
        """Unlock segments. Returns: False: the kernel had no memory to split a lock, and they stay leased."""
        try:
            self.lock.unlock_range(first, count)
        except OSError:
            return False
        return True


class FrozenLease(Lease):
    """The lease on segments of a frozen cache, which nobody evicts: it has no lock, and touches no file."""

    def __init__(self, path: Path, first: int, last: int) -> None:
        pass

    def covers(self, seq: int) -> bool:  # noqa: ARG002
        return False

    def narrow(self, first: int, last: int) -> None:
        pass

    def share(self, seq: int) -> Callable[[], None]:  # noqa: ARG002
        return lambda: None

    def close(self) -> None:
        pass


def own_leases(path: Path, seq: int) -> list[Lease]:
    """Return the open leases of this process, by the file at `path`, that cover a segment."""
    identity = file_identity(os.stat(path))
    return [
        lease
        for lease in [reference() for reference in list(_leases.values())]
        if lease is not None and lease.lock.identity == identity and lease.covers(seq)
    ]
