"""ReadThrough: the items of a dataset through its cache, in one process.

It owns the process' places, claims and writer, and the thread that publishes. Guarantees:
- an item that is there is gathered; one that is missing is made by who asks. Of several processes that miss
  one, the first claims and publishes it, and the others wait for that, some times what a call takes, before
  they make it, too; threads of one process that miss one do not wait for each other;
- what was made is published when a segment is full, after a minute, as soon as another process waits for it,
  a second after the last request, and at the end of the process; many small segments are merged (merging.py);
- the thread writes a full segment while the next one fills: only who has filled two waits for the disk;
- a cache that is full, read-only or gone stops no training: items are made, and a warning says why, but for a
  full cache, which is no error;
- a second after the last request no lease is held.
Must never: keep an item from its user because it could not be stored; take the dataset's errors for its own.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.builder import LARGER_SEGMENTS_OF_ITEMS, ConvertedRows, SegmentBuilder
from arrowcache.errors import ArrowCacheError, CacheFullError, CorruptSegmentError, SchemaError, warn
from arrowcache.lifetimes import Origin, at_exit, at_worker_exit
from arrowcache.os_errors import start
from arrowcache.read_through.begun import Begun
from arrowcache.read_through.merging import merge
from arrowcache.read_through.places import INDEX, Places
from arrowcache.read_through.trouble import Trouble
from arrowcache.reading.slots import Slots
from arrowcache.reading.temperature import Temperature
from arrowcache.reading.values import ColumnData
from arrowcache.storage.claims import Claims
from arrowcache.storage.layout import CLAIMS_LOCK
from arrowcache.storage.store import RoomPolicy, Store

_MAX_DELAY_SECONDS = 60.0
IDLE_SECONDS = 1.0
_TICK_SECONDS = 0.05  # between two looks for processes that wait
_STEP_SECONDS = 0.005  # between two looks of one that waits
_MOMENT_SECONDS = 0.05
_LEAST_WAIT_SECONDS = 1.0  # for an item that another process has claimed
_SETTLE_SECONDS = 0.25
_MOST_WAITS = 3  # times the seconds that a call of the dataset takes
_JOIN_SECONDS = 10.0  # for the thread: it publishes, or merges, one segment
_USUAL_ITEMS = 64  # of a request
_ATTEMPTS = 4  # to gather, each time without segments that turned out damaged

_FAILURES = (ArrowCacheError, OSError, MemoryError)


class Found(NamedTuple):
    """Items that are there: their positions (m,) among those asked for, and their columns, of m rows."""

    positions: NDArray[np.int64]
    columns: dict[str, ColumnData]


_END = object()
_NOTHING = Found(np.empty(0, np.int64), {})


class ReadThrough:
    """Finds and publishes the items of one dataset. Safe to use from several threads; dead in a forked child.

    Args:
        store: the dataset's cache.
        names: columns of an item.
        trouble: learns what fails.
    Raises: OSError: its lock files cannot be opened.
    """

    def __init__(self, store: Store, names: Sequence[str], trouble: Trouble) -> None:
        assert store.settings.dataset is not None
        length = store.settings.dataset.length
        self.origin = Origin()
        self.hits = self.made = 0
        self._store, self._names, self._trouble = store, tuple(names), trouble
        self._places = Places(store, length)
        self._claims = Claims(store.folder.path / CLAIMS_LOCK, store.folder.rights().file_mode, length)
        fixed = store.settings.schema.fixed
        columns = {name: (fixed[name].shape, fixed[name].numpy_dtype) for name in names if name in fixed}
        self._slots = Slots(columns, _USUAL_ITEMS)
        self._builder: SegmentBuilder | None = None  # of the segment in progress
        self._full: SegmentBuilder | None = None  # of the one before, until it is published
        self._spare: SegmentBuilder | None = None
        self._publishing = threading.RLock()  # of who writes a segment; never asked for inside the other one
        self._lock = threading.RLock()
        self._oldest = self._latest = time.monotonic()  # of what is unpublished; of all requests
        self._make_seconds = self._call_seconds = 0.0  # mean of late: of an item, of the calls that make some
        self._may_be_full = True  # there was no room when something was last published, or none is known of
        self._may_merge = False  # a part was published since the last look
        self._wake: SimpleQueue[object] = SimpleQueue()  # whole wherever Ctrl-C comes
        self._keeper: threading.Thread | None = None  # while there is a lease, or something unpublished
        self._must_end = False  # the thread, though others may ask for items
        self._is_closed = False
        _at_work.add(self)
        _close_at_worker_exit()

    @property
    def temperature(self) -> Temperature:
        """Tells whether items are in memory."""
        return self._places.temperature

    def find(self, indices: NDArray[np.int64]) -> Found:
        """Gather the items that are there, of indices (n,).

        Blocks: while rows come from the disk. Raises nothing: a warning tells what is unreadable.
        """
        with self._lock:
            self._latest = time.monotonic()
            for _ in range(_ATTEMPTS):
                try:
                    found = self._gathered(indices)
                    self.hits += len(found.positions)
                    return found
                except CorruptSegmentError as error:
                    warn(f"items of a damaged segment are made again: {error}")
                    self._places.release()
                    self._store.look_anew()
                except _FAILURES as error:
                    warn(f"the cache cannot be read, so items are made: {error}")
                    break
            return _NOTHING

    def has(self, indices: NDArray[np.int64]) -> bool:
        """True if all items (n,) are there. Raises nothing: what cannot be read is not there."""
        with self._lock:
            self._latest = time.monotonic()
            try:
                return bool((self._rows_of(indices) >= 0).all())
            except _FAILURES:
                return False

    def begin(self, indices: NDArray[np.int64], slots: Slots) -> Begun | None:
        """Begin to gather items (n,) into a slot of `slots`, which has a column for each of fixed width.

        Returns: None: some are missing, or cannot be read. Raises nothing: `find` says why.
        """
        with self._lock:
            self._latest = time.monotonic()
            try:
                rows, snapshot = self._rows_of(indices), self._places.snapshot
                if snapshot is None or (rows < 0).any():
                    return None
                slot, temperature = slots.lend(len(rows)), snapshot.temperature
                gather = snapshot.begin_gather(rows, self._names, slot)
                published = snapshot.published(rows)
            except _FAILURES:
                return None
            self.hits += len(rows)
            return Begun(gather, slot, self._names, temperature, len(rows), published)

    def _rows_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        rows = self._places.rows_of(indices)
        if self._places.snapshot is None or (rows < 0).any():
            self._refresh()
            rows = self._places.rows_of(indices)
        return rows

    def _gathered(self, indices: NDArray[np.int64]) -> Found:
        rows = self._rows_of(indices)
        positions, snapshot = np.flatnonzero(rows >= 0), self._places.snapshot
        if not len(positions) or snapshot is None:
            return _NOTHING
        out = self._slots.lend(len(positions)).arrays()
        return Found(positions, snapshot.gather(rows[positions], self._names, out))

    def _refresh(self) -> None:
        self._start_keeper()  # which ends the lease
        if self._places.refresh() and (held := self._claims.held):
            claimed = np.fromiter(held, np.int64, len(held))
            self._claims.release(claimed[self._places.rows_of(claimed) >= 0].tolist())

    def claim(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Claim missing items (n,), to make them and `put` them.

        Returns: a mask (n,); False: somebody else has claimed it or published it, or nothing is stored now.
        """
        with self._lock:
            is_claimed, is_missing = np.zeros((2, len(indices)), np.bool_)
            if not self.stores:
                return is_claimed
            try:
                with self._storing():
                    for at, index in enumerate(indices.tolist()):
                        is_claimed[at] = self._claims.claim(index)
                    self._refresh()  # who held it before may have published it
                    is_missing = self._places.rows_of(indices) < 0
                    self._claims.release(indices[is_claimed & ~is_missing].tolist())
            except BaseException:  # Ctrl-C
                self._claims.release(indices[is_claimed].tolist())
                raise
            return is_claimed & is_missing

    @property
    def stores(self) -> bool:
        """False while the cache is full, or cannot be written to."""
        if self._is_closed or self._trouble.why:
            return False
        try:
            self._may_be_full = self._may_be_full and not self._store.has_room()
            return not self._may_be_full
        except _FAILURES:
            return False

    def await_claimed(self, indices: NDArray[np.int64]) -> Found:
        """Wait until those who claimed items publish them, and gather them, of indices (n,).

        Blocks: for a second, or some times what a call of the dataset takes; until that is known, a minute.
        """
        patience = max(_LEAST_WAIT_SECONDS, _MOST_WAITS * self._call_seconds)
        deadline = time.monotonic() + (patience if self._call_seconds else _MAX_DELAY_SECONDS)
        if not self._claims.held.isdisjoint(indices.tolist()):
            self.publish()
        with self._claims.waiting():
            waits = indices.tolist()
            while (waits := [*filter(self._claims.is_held_elsewhere, waits)]) and time.monotonic() < deadline:
                time.sleep(_STEP_SECONDS)
        return self.find(indices)

    @property
    def made_in_a_moment(self) -> int:
        """Number of items to claim at a time: others wait for those that are claimed."""
        return max(1, int(_MOMENT_SECONDS / max(self._make_seconds, 1e-6)))

    def count(self, made: int, seconds: float) -> None:
        """Note that a call made items, in so many seconds."""
        with self._lock:
            self.made += made
            if made:
                self._call_seconds = _mean(self._call_seconds, seconds)
                self._make_seconds = _mean(self._make_seconds, seconds / made)

    def put(self, index: int, row: Mapping[str, Any]) -> None:
        """Publish a claimed item, with others, soon.

        Blocks: while two segments are full, until one of them is written.
        Raises: SchemaError: it does not fit the columns. What the conversion of its values raises.
        """
        with self._lock:
            self._latest = time.monotonic()
            if self._builder is None:
                with self._storing():
                    self._builder = self._new_builder()
            if self._builder is None or self._is_closed:
                return
            try:
                rows = self._builder.convert({**row, INDEX: np.array(index)}, many=False)
            except SchemaError:
                raise
            except ValueError as error:  # larger than a segment
                self._claims.release([index])
                warn(f"item {index} is not stored, but made each time: {error}")
                return
        while not self._take(rows):
            self._write_full()

    def _take(self, rows: ConvertedRows) -> bool:
        """Take in a row. Returns: False: the segment is full, and the one before is not written yet."""
        with self._lock, self._storing():
            if self._is_closed:
                return True
            self._latest = time.monotonic()
            builder = self._builder or self._new_builder()  # none: the thread has come to rest meanwhile
            self._builder = builder
            if not builder.take(rows, 0):
                if self._full is not None:
                    return False
                builder = self._hand_over(builder)
                builder.take(rows, 0)
            if builder.rows == 1:
                self._oldest = time.monotonic()
                self._start_keeper()  # it may have ended, as the item took long to make
                self._wake.put(None)  # from now on somebody may wait for it
            if builder.is_full and self._full is None:
                self._hand_over(builder)
        return True

    def _hand_over(self, builder: SegmentBuilder) -> SegmentBuilder:
        """Have this segment published, where no other is to be. Returns: the builder of the next one."""
        following = self._spare or self._new_builder()
        self._full, self._builder, self._spare = builder, following, None
        self._wake.put(None)
        return following

    def _new_builder(self) -> SegmentBuilder:
        return SegmentBuilder(self._store.settings.form, LARGER_SEGMENTS_OF_ITEMS)

    def unclaim(self, indices: Sequence[int]) -> None:
        """End claims of items that could not be made."""
        with self._lock:
            self._claims.release(indices)

    def publish(self) -> None:
        """Publish what was made, now. Raises nothing: what fails is a warning."""
        with self._publishing:
            is_handed_over = False
            while not is_handed_over:
                self._write_full()
                with self._lock, self._storing():
                    if not self._has_unpublished:
                        return
                    if self._builder is not None and self._full is None:  # else others filled one meanwhile
                        self._hand_over(self._builder)
                        is_handed_over = True
            self._write_full()

    def _write_full(self) -> None:
        """Publish the full segment, if there is one. Blocks: also while somebody else is at it."""
        with self._publishing:
            full = self._full
            if full is None:
                return
            with self._storing():
                if full.rows:  # else Ctrl-C came when it was published
                    self._store.publish(full.encode(), policy=RoomPolicy("raise"), on_visible=full.clear)
                with self._lock:
                    if self._full is full:  # else a failure elsewhere gave it up, and this is the next one
                        self._full, self._spare = None, full
                    self._may_merge, self._may_be_full = True, False
                    self._refresh()  # ends the claims

    @contextmanager
    def _storing(self) -> Iterator[None]:
        """Discard what is unpublished if the block fails to store: others may make and store it."""
        try:
            yield
        except _FAILURES as error:
            with self._lock:
                self._builder = self._full = self._spare = None
                with suppress(OSError):
                    self._claims.release(self._claims.held)
                self._may_be_full = isinstance(error, CacheFullError) and self._disk_has_room()
                if not self._may_be_full:
                    self._trouble.note(error)  # last: its warning may be an error

    def _disk_has_room(self) -> bool:
        try:
            return self._store.folder.free_bytes() >= self._store.settings.segment_bytes
        except OSError:
            return False

    # what there is

    @property
    def cached(self) -> int:
        """The number of items that are published. 0 with a warning where the cache cannot be read."""
        with self._lock:
            try:
                self._refresh()
            except _FAILURES as error:
                self._trouble.note(error)
                return 0
            return self._places.count

    def settle(self) -> None:
        """Have this and other processes publish what they made. Blocks: a moment at most, if they do."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        self.publish()
        with self._claims.waiting():
            while self._claims.some_are_held_elsewhere() and time.monotonic() < deadline:
                time.sleep(_STEP_SECONDS)

    @property
    def missing(self) -> NDArray[np.int64]:
        """Indices (n,) of items that are not published, ascending."""
        with self._lock:
            self._refresh()
            return self._places.missing

    def rest(self) -> None:
        """Publish what was made, end the lease and the thread, until the next request: before a fork."""
        self.publish()
        with self._lock:
            if not self._has_unpublished:
                with suppress(OSError):
                    self._claims.release(self._claims.held)  # of what Ctrl-C left
            self._latest = -IDLE_SECONDS
            keeper = self._sleep()
            self._must_end = keeper is not None
        self._join(keeper)
        self._merge()

    def _merge(self) -> None:
        """Merge small segments once, if there are many. Raises nothing; waits for no other process."""
        self._may_merge = False
        with suppress(*_FAILURES):  # nothing is lost, and the next one tries again
            self._may_merge = merge(self._store, self.let_go)

    def let_go(self) -> None:
        """End the lease, until the next request."""
        with self._lock:
            self._places.release()

    def close(self) -> None:
        """Publish what was made, and end. Idempotent; does nothing in a forked child."""
        if not self.origin.is_here:
            return
        self._is_closed = True
        self.publish()
        with self._lock:
            self._claims.close()
            keeper = self._sleep()
        if keeper is not threading.current_thread():
            self._join(keeper)
        self._merge()

    def close_soon(self) -> None:
        """Have the thread `close` it, soon. Waits for no lock."""
        self._wake.put(_END)

    # the thread that publishes, and ends the lease

    def _start_keeper(self) -> None:
        if self._keeper is None and not self._is_closed:
            keeper = threading.Thread(target=self._keep, name="arrowcache-publish", daemon=True)
            start(keeper)
            self._keeper = keeper

    def _sleep(self) -> threading.Thread | None:
        """Hold no lease and no memory until the next request. Returns: the thread, which ends now."""
        if not self._has_unpublished:
            self._builder = self._full = self._spare = None
        self._places.release()
        return self._keeper

    def _join(self, keeper: threading.Thread | None) -> None:
        if keeper is not None:
            self._wake.put(None)
            keeper.join(_JOIN_SECONDS)

    def _keep(self) -> None:
        """The thread: it keeps this object while there is something to do."""
        seconds: float | None = _TICK_SECONDS
        try:
            while seconds is not None:
                with suppress(Empty):
                    if self._wake.get(timeout=seconds) is _END:
                        self.close()
                seconds = self._look()
                if seconds is not None and self._may_merge:
                    self._merge()
        except BaseException:  # such as a warning that is an error
            self._keeper = None  # the next request starts another one
            raise

    def _look(self) -> float | None:
        """Publish what is due, end an idle lease. Returns: seconds to the next look; None: the last one."""
        with self._lock:
            now = time.monotonic()
            is_old = now - self._oldest >= _MAX_DELAY_SECONDS or now - self._latest >= IDLE_SECONDS
            is_old |= self._must_end
            some_wait = self._has_unpublished and self._claims.somebody_waits()
        if is_old or some_wait:
            self.publish()
        else:
            self._write_full()
        with self._lock:
            if self._has_unpublished and not self._is_closed:
                return _TICK_SECONDS
            idle_in = self._latest + IDLE_SECONDS - time.monotonic()
            if idle_in > 0 and not self._is_closed and not self._must_end:
                return max(idle_in, _TICK_SECONDS)
            self._sleep()
            self._keeper, self._must_end = None, False
            return None

    @property
    def _has_unpublished(self) -> bool:
        return any(builder is not None and builder.rows for builder in (self._builder, self._full))


def _mean(before: float, new: float) -> float:
    return (7 * before + new) / 8 if before else new


_at_work: weakref.WeakSet[ReadThrough] = weakref.WeakSet()
_registered: Origin | None = None


def _close_all() -> None:
    for reader in [*_at_work]:
        reader.close()


def _close_at_worker_exit() -> None:
    global _registered
    if _registered is None or not _registered.is_here:
        at_worker_exit(_close_all)
        _registered = Origin()


at_exit(_close_all)
