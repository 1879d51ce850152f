"""ReadThrough: the items of a dataset through its cache, in one process.

It owns the process' places, claims and slots; what is made leaves through its outbox. Guarantees:
- an item that is there is gathered; one that is missing is made by who asks. Of several processes that miss
  one, the first claims and publishes it, and the others wait for that, some times what a call takes, before
  they make it, too; threads of one process that miss one do not wait for each other;
- a cache that is full, read-only or gone stops no training: items are made, and a warning says why, but for a
  full cache, which is no error;
- a second after the last request no lease is held.
Must never: keep an item from its user because it could not be stored; take the dataset's errors for its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import CorruptSegmentError, warn
from arrowcache.limits import Limits
from arrowcache.read_through.begun import Begun
from arrowcache.read_through.outbox import FAILURES, Outbox
from arrowcache.read_through.places import Places
from arrowcache.read_through.trouble import Trouble
from arrowcache.reading.slots import Slots
from arrowcache.reading.values import ColumnData
from arrowcache.storage.claims import Claims
from arrowcache.storage.layout import CLAIMS_LOCK
from arrowcache.storage.store import Store

_STEP_SECONDS = 0.005  # between two looks of one that waits
_MOMENT_SECONDS = 0.05
_LEAST_WAIT_SECONDS = 1.0  # for an item that another process has claimed
_SETTLE_SECONDS = 0.25
_MOST_WAITS = 3  # times the seconds that a call of the dataset takes
_USUAL_ITEMS = 64  # of a request
_ATTEMPTS = 4  # to gather, each time without segments that turned out damaged


class Found(NamedTuple):
    """Items that are there: their positions (m,) among those asked for, and their columns, of m rows."""

    positions: NDArray[np.int64]
    columns: dict[str, ColumnData]


_NOTHING = Found(np.empty(0, np.int64), {})


class ReadThrough:
    """Finds and publishes the items of one dataset. Safe to use from several threads; dead in a forked child.

    Args:
        store: the dataset's cache.
        names: columns of an item.
        trouble: learns what fails.
        counts: (n, 3) int64, of other processes, too: items read, made and left out. A row is taken by
            chance; two processes that share one may lose a count.
    Raises: OSError: its lock files cannot be opened.
    """

    def __init__(
        self,
        store: Store,
        names: Sequence[str],
        trouble: Trouble,
        counts: NDArray[np.int64] | None = None,
    ) -> None:
        assert store.settings.dataset is not None
        length = store.settings.dataset.length
        self._all_counts = np.zeros((1, 3), np.int64) if counts is None else counts
        self._counts = self._all_counts[random.SystemRandom().randrange(len(self._all_counts))]
        self._store, self._names, self._trouble = store, tuple(names), trouble
        self._places = Places(store, length)
        self._claims = Claims(store.folder.path / CLAIMS_LOCK, store.folder.rights().file_mode, length)
        fixed = store.settings.schema.fixed
        columns = {name: (fixed[name].shape, fixed[name].numpy_dtype) for name in names if name in fixed}
        self._slots = Slots(columns, _USUAL_ITEMS)
        self._make_seconds = self._call_seconds = 0.0  # mean of late: of an item, of the calls that make some
        self.temperature = self._places.temperature  # tells whether items are in memory
        self._outbox = outbox = Outbox(store, self._places, self._claims, trouble)
        self._lock = outbox.lock
        self.put, self.publish = outbox.put, outbox.publish
        self.rest, self.close, self.close_soon = outbox.rest, outbox.close, outbox.close_soon

    def find(self, indices: NDArray[np.int64]) -> Found:
        """Gather the items that are there, of indices (n,).

        Blocks: while rows come from the disk. Raises nothing: a warning tells what is unreadable.
        """
        with self._lock:
            self._outbox.stir()
            for _ in range(_ATTEMPTS):
                try:
                    found = self._gathered(indices)
                    self._counts[0] += len(found.positions)
                    return found
                except CorruptSegmentError as error:
                    warn(f"items of a damaged segment are made again: {error}")
                    self._places.release()
                    self._store.look_anew()
                except FAILURES as error:
                    warn(f"the cache cannot be read, so items are made: {error}")
                    break
            return _NOTHING

    def has(self, indices: NDArray[np.int64]) -> bool:
        """True if all items (n,) are there. Raises nothing: what cannot be read is not there."""
        with self._lock:
            self._outbox.stir()
            try:
                return bool((self._rows_of(indices) >= 0).all())
            except FAILURES:
                return False

    def begin(self, indices: NDArray[np.int64], slots: Slots) -> Begun | None:
        """Begin to gather items (n,) into a slot of `slots`, which has a column for each of fixed width.

        Returns: None: some are missing, or cannot be read. Raises nothing: `find` says why.
        """
        with self._lock:
            self._outbox.stir()
            try:
                rows, snapshot = self._rows_of(indices), self._places.snapshot
                if snapshot is None or (rows < 0).any():
                    return None
                slot, temperature = slots.lend(len(rows)), snapshot.temperature
                gather = snapshot.begin_gather(rows, self._names, slot)
                published = snapshot.published(rows)
            except FAILURES:
                return None
            self._counts[0] += len(rows)
            return Begun(gather, slot, self._names, temperature, len(rows), published)

    def _rows_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        rows = self._places.rows_of(indices)
        if self._places.snapshot is None or (rows < 0).any():
            self._outbox.take_in()
            rows = self._places.rows_of(indices)
        return rows

    def _gathered(self, indices: NDArray[np.int64]) -> Found:
        rows = self._rows_of(indices)
        positions, snapshot = np.flatnonzero(rows >= 0), self._places.snapshot
        if not len(positions) or snapshot is None:
            return _NOTHING
        out = self._slots.lend(len(positions)).arrays()
        return Found(positions, snapshot.gather(rows[positions], self._names, out))

    def claim(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Claim missing items (n,), to make them and `put` them.

        Returns: a mask (n,); False: somebody else has claimed it or published it, or nothing is stored now.
        """
        with self._lock:
            is_claimed, is_missing = np.zeros((2, len(indices)), np.bool_)
            if not self.stores:
                return is_claimed
            try:
                with self._outbox.storing():
                    for at, index in enumerate(indices.tolist()):
                        is_claimed[at] = self._claims.claim(index)
                    self._outbox.take_in()  # who held it before may have published it
                    is_missing = self._places.rows_of(indices) < 0
                    self._claims.release(indices[is_claimed & ~is_missing].tolist())
            except BaseException:  # Ctrl-C
                self._claims.release(indices[is_claimed].tolist())
                raise
            return is_claimed & is_missing

    @property
    def stores(self) -> bool:
        """False while the cache is full, or cannot be written to."""
        return self._outbox.stores

    def await_claimed(self, indices: NDArray[np.int64]) -> Found:
        """Wait until those who claimed items publish them, and gather them, of indices (n,).

        Blocks: for a second, or some times what a call of the dataset takes; until that is known, a minute.
        """
        patience = max(_LEAST_WAIT_SECONDS, _MOST_WAITS * self._call_seconds)
        waits = indices.tolist()
        if not self._claims.held.isdisjoint(waits):
            self.publish()
        self._wait_while(
            lambda: any(map(self._claims.is_held_elsewhere, waits)),
            patience if self._call_seconds else Limits.current.publish_seconds,
        )
        return self.find(indices)

    def _wait_while(self, are_held: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with suppress(OSError), self._claims.waiting():
            while are_held() and time.monotonic() < deadline:
                time.sleep(_STEP_SECONDS)

    @property
    def made_in_a_moment(self) -> int:
        """Number of items to claim at a time: others wait for those that are claimed."""
        return max(1, int(_MOMENT_SECONDS / max(self._make_seconds, 1e-6)))

    @property
    def counts(self) -> tuple[int, int, int]:
        """The items that all processes have read from the cache, made, and left out."""
        hits, made, left_out = self._all_counts.sum(0).tolist()
        return hits, made, left_out

    def count(self, made: int, seconds: float, left_out: int = 0) -> None:
        """Note that a call made items, and could not make others, in so many seconds."""
        with self._lock:
            self._counts[1:] += made, left_out
            if made:
                self._call_seconds = _mean(self._call_seconds, seconds)
                self._make_seconds = _mean(self._make_seconds, seconds / made)

    def unclaim(self, indices: Sequence[int]) -> None:
        """End claims of items that could not be made."""
        with self._lock, suppress(OSError):
            self._claims.release(indices)

    # what there is

    @property
    def cached(self) -> int:
        """The number of items that are published. 0 with a warning where the cache cannot be read."""
        with self._lock:
            try:
                self._outbox.take_in()
            except FAILURES as error:
                self._trouble.note(error)
                return 0
            return self._places.count

    def settle(self) -> None:
        """Have this and other processes publish what they made. Blocks: a moment at most, if they do."""
        self.publish()
        self._wait_while(self._claims.some_are_held_elsewhere, _SETTLE_SECONDS)

    @property
    def missing(self) -> NDArray[np.int64]:
        """Indices (n,) of items that are not published, ascending."""
        with self._lock:
            self._outbox.take_in()
            return self._places.missing


def _mean(before: float, new: float) -> float:
    return (7 * before + new) / 8 if before else new
