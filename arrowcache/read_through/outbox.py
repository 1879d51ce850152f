"""Outbox: items on their way into a dataset's cache, in one process.

It owns the segment in progress, the full one before it, and the thread that writes, and that ends the
reader's lease. Guarantees:
- what was put is published when a segment is full, after a minute, as soon as another process waits for it,
  a second after the last request, and at the end of the process; many small segments are merged (merging.py),
  and the parts of merged ones removed, by each process that asks for items or has none to publish any more;
- small segments that others left are merged by who only asks for items: no more comes of a complete cache;
- the thread writes a full segment while the next one fills: only who has filled two waits for the disk;
- what cannot be stored is given up together with all claims: others may make and store it;
- Ctrl-C at any point loses nothing that is unpublished, and publishes no segment twice.
Must never: write, or wait for who writes, while it holds the lock, nor the reverse: a signal handler that
closes may hold it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from arrowcache.arrow.builder import LARGER_SEGMENTS_OF_ITEMS, RowTooLargeError, SegmentBuilder
from arrowcache.errors import ArrowCacheError, CacheFullError, WorkerError, warn
from arrowcache.lifetimes import Origin, at_exit, at_worker_exit, call_all
from arrowcache.limits import Limits
from arrowcache.os_errors import start
from arrowcache.read_through.merging import is_worth_it, merge
from arrowcache.read_through.places import INDEX, Places
from arrowcache.read_through.trouble import Trouble
from arrowcache.storage.claims import Claims
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.parts import superseded
from arrowcache.storage.store import RoomPolicy, Store

#: How a cache fails.
FAILURES = (ArrowCacheError, OSError, MemoryError)
IDLE_SECONDS = 1.0
_TICK_SECONDS = 0.05  # between two looks for processes that wait
_JOIN_SECONDS = 10.0  # for the thread: it publishes, or merges, one segment
_END = object()


class Outbox:
    """Publishes items of one dataset, soon. Safe to use from several threads; dead in a forked child.

    Args:
        store: the dataset's cache.
        places, claims: those of this process. `lock` guards them, too.
        trouble: learns what fails.
    """

    def __init__(self, store: Store, places: Places, claims: Claims, trouble: Trouble) -> None:
        self._origin = Origin()
        self._store, self._places, self._claims, self._trouble = store, places, claims, trouble
        self._filling: SegmentBuilder | None = None  # the segment in progress
        self._full: SegmentBuilder | None = None  # the one before, until it is published
        self._writing = threading.RLock()  # of who writes a segment; never held together with `lock`
        self.lock = threading.RLock()
        self._oldest = self._latest = time.monotonic()  # of what is unpublished; of all requests
        self._may_be_full = True  # there was no room when something was last published, or none is known of
        self._may_merge = False  # a part was published since the last look
        self._look_for_parts_at = 0.0  # the time of the next look for parts that still have to leave or merge
        self._looked_at: tuple[SegmentInfo, ...] = ()  # by that look
        self._wake: SimpleQueue[object] = SimpleQueue()  # whole wherever Ctrl-C comes
        self._thread: threading.Thread | None = None  # while there is a lease, or something unpublished
        self._must_end = False  # the thread, though others may ask for items
        self._is_closed = False
        _at_work.add(self)
        _close_at_worker_exit()

    @property
    def stores(self) -> bool:
        """False while the cache is full, or cannot be written to."""
        if self._is_closed or self._trouble.why:
            return False
        try:
            self._may_be_full = self._may_be_full and not self._store.has_room()
            return not self._may_be_full
        except FAILURES:
            return False

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Give up what is unpublished if the block fails to store: others may make and store it."""
        try:
            yield
        except FAILURES as error:
            with self.lock:
                self._filling = self._full = None
                with suppress(OSError):
                    self._claims.release(self._claims.held)
                self._may_be_full = isinstance(error, CacheFullError) and self._disk_has_room()
                if not self._may_be_full:
                    self._trouble.note(error)  # last: its warning may be an error

    def _disk_has_room(self) -> bool:
        with suppress(OSError):
            return self._store.folder.free_bytes() >= self._store.settings.segment_bytes
        return False

    # what is put

    def put(self, index: int, row: Mapping[str, Any]) -> None:
        """Publish a claimed item, with others, soon.

        Blocks: while two segments are full, until one of them is written.
        Raises: SchemaError: it does not fit the columns. What the conversion of its values raises.
        """
        while not self._take(index, row):
            self._write_full()

    def _take(self, index: int, row: Mapping[str, Any]) -> bool:
        """Take in an item. Returns: False: the segment is full, and the one before is not written yet."""
        with self.lock:
            self.stir()
            with self.storing():
                if self._filling is None:
                    self._filling = SegmentBuilder(self._store.settings.form, LARGER_SEGMENTS_OF_ITEMS)
            builder = self._filling
            if builder is None or self._is_closed:
                return True
            try:
                rows = builder.convert({**row, INDEX: np.array(index)}, many=False)
            except RowTooLargeError as error:
                with suppress(OSError):
                    self._claims.release([index])
                warn(f"item {index} is not stored, but made each time: {error}")
                return True
            with self.storing():
                if not builder.take(rows, 0):
                    return self._hand_over() and self._take(index, row)
                if builder.rows == 1:
                    self._oldest = time.monotonic()
                    self._wake.put(None)  # from now on somebody may wait for it
                if builder.is_full:
                    self._hand_over()
            return True

    def _hand_over(self) -> bool:
        """Have the segment in progress published. Returns: False: another one is to be, first."""
        if self._full is not None:
            return False
        self._full, self._filling = self._filling, None
        self._wake.put(None)
        return True

    @property
    def _is_empty(self) -> bool:
        return not any(builder is not None and builder.rows for builder in (self._filling, self._full))

    # what is published

    def publish(self) -> None:
        """Publish what was put by now. Raises nothing: what fails is a warning."""
        self._write_full()
        with self.lock:
            if not self._is_empty:
                self._hand_over()  # unless others filled it meanwhile, and did that
        self._write_full()

    def _write_full(self) -> None:
        """Publish the full segment, if there is one. Blocks: also while somebody else is at it."""
        with self.storing():
            with self._writing:
                full = self._full
                if full is not None and full.rows:  # else it is published by now
                    self._store.publish(full.encode(), policy=RoomPolicy("raise"), on_visible=full.clear)
            with self.lock:
                if full is None:
                    return
                if self._full is full:  # else a failure elsewhere gave it up, and this is the next one
                    self._full = None
                self._may_merge, self._may_be_full = True, False
                self.take_in()

    def take_in(self) -> None:
        """Take in the segments that came and went, and end the claims of items that came, under the lock.

        Raises: as `Places.refresh`.
        """
        self._have_thread()  # which ends the lease
        if self._places.refresh() and (held := self._claims.held):
            claimed = np.fromiter(held, np.int64, len(held))
            self._claims.release(claimed[self._places.rows_of(claimed) >= 0].tolist())

    def _merge(self) -> None:
        """Merge small segments once, if there are many. Raises nothing; waits for no other process."""
        self._may_merge, self._look_for_parts_at = False, time.monotonic() + Limits.current.parts_seconds
        with suppress(*FAILURES):  # nothing is lost, and the next one tries again
            self._may_merge = merge(self._store, self.let_go)

    # how it comes to rest

    def let_go(self) -> None:
        """End the lease, until the next request."""
        with self.lock:
            self._places.release()

    def rest(self) -> None:
        """Publish what was put, end the lease and the thread, until the next request: before a fork."""
        self.publish()
        with self.lock:
            if self._is_empty:
                with suppress(OSError):
                    self._claims.release(self._claims.held)  # of what Ctrl-C left
            self._latest, self._must_end = -IDLE_SECONDS, True
            self._sleep()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._wake.put(None)
            thread.join(_JOIN_SECONDS)
        self._merge()

    def close(self) -> None:
        """Publish what was put, and end, with all claims. Idempotent; does nothing in a forked child."""
        if self._origin.is_here:
            with self.lock:
                self._is_closed = self._must_end = True
            self.rest()
            with self.lock:
                self._claims.close()

    def close_soon(self) -> None:
        """Have the thread `close` it, soon. Waits for no lock."""
        self._wake.put(_END)

    def _sleep(self) -> None:
        """Hold no lease and no memory until the next request."""
        if self._is_empty:
            self._filling = self._full = None
        self._places.release()

    # the thread

    def stir(self) -> None:
        """Note a request, under the lock: a second after the last one the thread ends the lease."""
        self._latest = time.monotonic()
        self._have_thread()

    def _have_thread(self) -> None:
        if self._thread is not None or self._is_closed:
            return
        self._must_end = False
        thread = threading.Thread(target=self._keep, name="arrowcache-publish", daemon=True)
        try:
            with suppress(WorkerError):  # as Python ends: who fills two segments, and `close`, do its work
                start(thread)
        finally:  # Ctrl-C may come once it has started
            self._thread = None if thread.ident is None else thread

    def _keep(self) -> None:
        """The thread: it keeps this object while there is something to do."""
        seconds: float | None = _TICK_SECONDS
        try:
            while seconds is not None:
                with suppress(Empty):
                    if self._wake.get(timeout=seconds) is _END:
                        self.close()
                seconds = self._look()
                if self._may_merge or self._parts_are_left(is_last=seconds is None):
                    self._merge()
            while self._may_merge and not self._must_end:  # nobody may come who asks for an item
                self._merge()
        except BaseException:  # such as a warning that is an error
            self._thread = None  # the next request starts another one
            raise

    def _parts_are_left(self, *, is_last: bool) -> bool:
        """True if merged parts have yet to leave, as they were leased so far, or segments to be merged.

        Looks now and then, for the latter among segments that it has not seen yet.
        """
        if not is_last and time.monotonic() < self._look_for_parts_at:
            return False
        self._look_for_parts_at = time.monotonic() + Limits.current.parts_seconds
        with suppress(*FAILURES):
            listed, before = tuple(self._store.segments()), self._looked_at
            self._looked_at = listed
            return bool(superseded(listed)) or (listed != before and is_worth_it(self._store))
        return False

    def _look(self) -> float | None:
        """Publish what is due, end an idle lease. Returns: seconds to the next look; None: the last one."""
        with self.lock:
            now = time.monotonic()
            is_due = now - self._oldest >= Limits.current.publish_seconds
            is_due |= now - self._latest >= IDLE_SECONDS
            is_due |= self._must_end
            with suppress(OSError):
                is_due = is_due or (not self._is_empty and self._claims.somebody_waits())
        if is_due:
            self.publish()
        else:
            self._write_full()
        with self.lock:
            if not self._is_empty:
                return _TICK_SECONDS
            idle_in = self._latest + IDLE_SECONDS - time.monotonic()
            if idle_in > 0 and not self._must_end:
                return max(idle_in, _TICK_SECONDS)
            self._sleep()
            self._thread = None
            return None


_at_work: weakref.WeakSet[Outbox] = weakref.WeakSet()
_registered: Origin | None = None


def close_all() -> None:
    """Close those of this process, each whatever another one raises."""
    call_all([outbox.close for outbox in [*_at_work]])


def _close_at_worker_exit() -> None:
    global _registered
    if _registered is None or not _registered.is_here:
        at_worker_exit(close_all)
        _registered = Origin()


at_exit(close_all)
