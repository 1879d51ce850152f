"""ReadThrough: the items of a dataset through its cache, in one process: each is found there, or made.

It owns the process' item index and slots, and the publisher of what is made. Guarantees:
- an item that is in the cache is gathered; one that is missing is made by the process that asks. Of several
  processes that miss one, the first claims and publishes it. The others wait for that, some times as long as
  a call of the dataset takes, then make it, too. Threads of one process do not wait for each other;
- a cache that is full, read-only or gone stops no training: items are made, and a warning says why. A full
  cache is no error, and gives no warning;
- a second after the last request no lease is held.
Must never: keep an item from its user because it could not be stored; take the dataset's errors for its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import CorruptSegmentError, warn
from arrowcache.limits import Limits
from arrowcache.read_through.item_index import ItemIndex
from arrowcache.read_through.publisher import FAILURES, FailureBackoff, Publisher
from arrowcache.reading.columns import ColumnData, Columns
from arrowcache.reading.gather import PendingRead
from arrowcache.reading.slots import Slots
from arrowcache.storage.store import Store

_CLAIMED_SECONDS = 0.05  # that it takes to make the items which are claimed together
_MIN_WAIT_SECONDS = 1.0  # for an item that another process has claimed
_MAX_WAIT_CALLS = 3  # times the seconds that a call of the dataset takes
_USUAL_ITEMS = 64  # of a request
_ATTEMPTS = 4  # to gather, each time without segments that turned out damaged


class ItemColumns(NamedTuple):
    """Items of the cache: their positions (m,) among those asked for, and their columns, of m rows."""

    positions: NDArray[np.int64]
    columns: dict[str, ColumnData]


_NO_ITEMS = ItemColumns(np.empty(0, np.int64), {})


class LeftOut(NamedTuple):
    """In place of an item that could not be made, and is to be left out."""

    number: int
    error: Exception


Put = Callable[[int, Mapping[str, Any]], None]
"""Has an item published, by its index and its row: `Publisher.put`."""

Make = Callable[[list[int], Put | None], Generator[Any, None, None]]
"""Makes items: yields those of some indices, in order, or a `LeftOut`, after it has `put` each. None: it puts
none."""


class ReadThrough:
    """Finds, makes and publishes items of one dataset. Any thread may use it; it is dead in a forked child.

    `publisher` publishes what this process makes. Its user drains and closes it.

    Args:
        store: the dataset's cache.
        names: columns of an item.
        backoff: learns what fails.
        counts: (n, 3) int64, of other processes, too: items read, made and left out. A row is taken by
            chance; two processes that share one may lose a count.
    Raises: OSError: its lock files cannot be opened.
    """

    def __init__(
        self,
        store: Store,
        names: Sequence[str],
        backoff: FailureBackoff,
        counts: NDArray[np.int64] | None = None,
    ) -> None:
        assert store.settings.dataset is not None
        all_counts = np.zeros((1, 3), np.int64) if counts is None else counts
        self._counts = all_counts[random.SystemRandom().randrange(len(all_counts))]
        self._store, self._names, self._backoff = store, tuple(names), backoff
        self._index = self._new_index()
        self.publisher = self._new_publisher()
        self._lock = self.publisher.lock
        self._slots = Slots(Columns.of(store.settings.schema, names).memory, _USUAL_ITEMS)
        self._make_seconds = self._call_seconds = 0.0  # recent means: of an item, of a call that makes some
        self.read_mode = self._index.read_mode  # tells whether items are in memory

    def _new_index(self) -> ItemIndex:
        assert self._store.settings.dataset is not None
        return ItemIndex(self._store, self._store.settings.dataset.length)

    def _new_publisher(self) -> Publisher:
        return Publisher(self._store, self._index, self._backoff)

    # items that are there

    def find(self, indices: NDArray[np.int64]) -> ItemColumns:
        """Gather the items that are in the cache, of indices (n,).

        Blocks: while rows come from the disk.
        Raises: CorruptSegmentError: of a frozen cache. Else nothing: a warning tells what is unreadable.
        """
        with self._lock:
            self.publisher.touch()
            for _ in range(_ATTEMPTS):
                try:
                    gathered = self._gather(indices)
                    self._counts[0] += len(gathered.positions)
                    return gathered
                except CorruptSegmentError as error:
                    if self._store.is_frozen:
                        raise
                    warn(f"items of a damaged segment are made again: {error}")
                    self._index.release()
                    self._store.look_anew()
                except FAILURES as error:
                    warn(f"the cache cannot be read, so items are made: {error}")
                    break
            return _NO_ITEMS

    def has(self, indices: NDArray[np.int64]) -> bool:
        """True if all items (n,) are in the cache. Raises nothing: what cannot be read is not there."""
        with self._lock:
            self.publisher.touch()
            try:
                return bool((self._rows_of(indices) >= 0).all())
            except FAILURES:
                return False

    def begin(self, indices: NDArray[np.int64], slots: Slots) -> PendingRead | None:
        """Begin to gather items (n,) into a slot of `slots`, which has a column for each of fixed width.

        Returns: None: some are missing, or cannot be read. Raises nothing: `find` says why.
        """
        with self._lock:
            self.publisher.touch()
            try:
                rows, snapshot = self._rows_of(indices), self._index.snapshot
                if snapshot is None or (rows < 0).any():
                    return None
                read = snapshot.read(rows, snapshot.columns_of(self._names), slots.lend(len(rows)))
                read.published = snapshot.published(rows)
            except FAILURES:
                return None
            self._counts[0] += len(rows)
            return read

    def _rows_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        rows = self._index.rows_of(indices)
        if self._index.snapshot is None or (rows < 0).any():
            self.publisher.refresh()
            rows = self._index.rows_of(indices)
        return rows

    def _gather(self, indices: NDArray[np.int64]) -> ItemColumns:
        rows = self._rows_of(indices)
        positions, snapshot = np.flatnonzero(rows >= 0), self._index.snapshot
        if not len(positions) or snapshot is None:
            return _NO_ITEMS
        out = self._slots.lend(len(positions)).arrays()
        return ItemColumns(positions, snapshot.gather(rows[positions], self._names, out))

    def _is_fresh(self) -> bool:
        """Learn of what was published. False, with a warning: the cache cannot be read."""
        try:
            self.publisher.refresh()
        except FAILURES as error:
            self._backoff.note(error)
            return False
        return True

    @property
    def cached(self) -> int:
        """The number of items that are published. 0 with a warning where the cache cannot be read."""
        with self._lock:
            return self._index.count if self._is_fresh() else 0

    @property
    def missing(self) -> NDArray[np.int64]:
        """Indices (n,) of items that are not published, ascending."""
        with self._lock:
            self.publisher.refresh()
            return self._index.missing

    # items that are missing

    def items(
        self,
        indices: NDArray[np.int64],
        items_of: Callable[[dict[str, ColumnData]], Iterable[Any]],
        make: Make,
        at_once: int | None = 1,
    ) -> list[Any]:
        """Return items (n,): those in the cache, and the others made; a process that claims one publishes it.

        Args:
            items_of: returns the items of columns.
            at_once: number of items to claim and make together, at least. None: all that are missing.
        Blocks: while rows come from the disk, items are made here, or other processes make them.
        Raises: what `make` raises.
        """
        items: list[Any] = [None] * len(indices)

        def find(places: NDArray[np.int64]) -> NDArray[np.int64]:
            """Fill places (m,) with items of the cache. Returns: the places that stay empty."""
            positions, columns = self.find(indices[places])
            if not len(positions):
                return places
            _fill(items, places[positions], items_of(columns))
            return np.delete(places, positions)

        missing = find(np.arange(len(indices)))
        if not len(missing):
            return items
        others = missing[:0]  # that another process makes
        if at_once is None:
            at_once = len(missing)
        else:  # others wait for what is claimed, so that is no more than is made in a moment
            at_once = max(at_once, int(_CLAIMED_SECONDS / max(self._make_seconds, 1e-6)))
        for start in range(0, len(missing), at_once):
            some = missing[start : start + at_once]
            is_claimed = self.publisher.claim(indices[some])
            _fill(items, some[is_claimed], self._make(make, indices[some[is_claimed]].tolist()))
            others = np.concatenate((others, some[~is_claimed]))
        if len(others) and self.publisher.can_store:
            self._wait_for_others(indices[others])
            others = find(others)
        _fill(items, others, self._make(make, indices[others].tolist(), is_claimed=False))
        return items

    def _wait_for_others(self, indices: NDArray[np.int64]) -> None:
        """Wait for processes that claimed items: some times as long as a call of the dataset takes."""
        seconds = max(_MIN_WAIT_SECONDS, _MAX_WAIT_CALLS * self._call_seconds)
        is_known = self._call_seconds > 0
        self.publisher.wait_for_others(indices, seconds if is_known else Limits.current.publish_seconds)

    def _make(self, make: Make, indices: list[int], *, is_claimed: bool = True) -> list[Any]:
        """Make items. Those that are claimed are published, or their claims end."""
        if not indices:
            return []
        started = time.monotonic()
        items: list[Any] = []
        try:
            with closing(make(indices, self.publisher.put if is_claimed else None)) as making:
                items.extend(making)
            return items
        finally:
            left_out = [each.number for each in items if isinstance(each, LeftOut)]
            self._count(len(items) - len(left_out), time.monotonic() - started, len(left_out))
            if is_claimed:
                self.publisher.release_claims(indices[len(items) :] + left_out)

    def _count(self, made: int, seconds: float, left_out: int) -> None:
        """Note that a call made items, and could not make others, in so many seconds."""
        with self._lock:
            self._counts[1:] += made, left_out
            if made:
                self._call_seconds = _mean(self._call_seconds, seconds)
                self._make_seconds = _mean(self._make_seconds, seconds / made)


def _fill(items: list[Any], places: NDArray[np.int64], new: Iterable[Any]) -> None:
    for at, item in zip(places.tolist(), new, strict=True):
        items[at] = item


def _mean(before: float, new: float) -> float:
    return (7 * before + new) / 8 if before else new
