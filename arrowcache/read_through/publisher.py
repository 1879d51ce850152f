"""Publisher: publishes the items that one process has made for a dataset's cache, and merges small segments.

It owns the process' claims, the segment in progress, the full one before it, and the thread that writes both.
The thread also ends the lease of the item index. Guarantees:
- what was put is published when a segment is full, after a minute, as soon as another process waits for it,
  a second after the last request, and at the end of the process;
- the thread writes a full segment while the next one fills: only a caller that has filled two waits for the
  disk;
- what cannot be stored is given up together with all claims: others may make and store it;
- Ctrl-C at any point loses nothing that is unpublished, and publishes no segment twice.
Must never: hold `lock` while it writes a segment or waits for a thread that does, nor take it then. A signal
handler that closes may run while either is held.

A claim is of an item. It is advisory: any process may still make the item, and the claim decides which one
publishes it.

Many small segments become few full ones, while others read and write the cache. Parts that follow one another
are read, and published once more as one segment. It comes onto the disk before they leave, and its name says
which they are. New snapshots read the merged segment. Parts are deleted when no older snapshot leases them:
each process that asks for items tries that again while there are parts, and so does one that needs room. A
process that only reads merges, too: small segments stay behind when their writer is killed. One process at a
time merges. Guarantees:
- a process that is killed at any step, or a loss of power, loses no item;
- the capacity holds, so parts are merged where there is room for both copies;
- a merged segment is merged again only after its parts have left.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.builder import LARGER_SEGMENTS_OF_ITEMS, RowTooLargeError, SegmentBuilder
from arrowcache.arrow.schema import Ragged, Schema
from arrowcache.arrow.segment import Column, VariableColumn
from arrowcache.errors import ArrowCacheError, CacheFullError, CorruptSegmentError, WorkerError, warn
from arrowcache.lifetimes import Origin, at_exit, at_worker_exit, call_all
from arrowcache.limits import Limits
from arrowcache.os_errors import explained, start
from arrowcache.read_through.item_index import INDEX, ItemIndex
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.claims import MERGING, Claims, NoClaims, the_only_one
from arrowcache.storage.eviction import choose_parts, superseded
from arrowcache.storage.layout import CLAIMS_LOCK, SegmentInfo, merge_task
from arrowcache.storage.store import RoomPolicy, Store

#: How a cache fails.
FAILURES = (ArrowCacheError, OSError, MemoryError)
IDLE_SECONDS = 1.0
_TICK_SECONDS = 0.05  # between two looks for processes that wait
_STEP_SECONDS = 0.005  # between two looks of a process that waits
_FLUSH_SECONDS = 0.25
_JOIN_SECONDS = 10.0  # for the thread: it publishes, or merges, one segment
_END = object()


class FailureBackoff:
    """The last failure of a cache. Nothing is stored until it is time to try again."""

    def __init__(self) -> None:
        self._why, self._until = "", 0.0

    def note(self, error: BaseException) -> None:
        """Store nothing for half a minute. Warns, once in that time."""
        if isinstance(error, OSError):
            error = explained(error)
        is_new = not self.why
        self._why, self._until = str(error), time.monotonic() + Limits.current.backoff_seconds
        if is_new:
            warn(f"items are made, and not stored: {error}")

    @property
    def why(self) -> str:
        """The failure because of which nothing is stored now. Empty: there is none."""
        return self._why if time.monotonic() < self._until else ""


class Publisher:
    """Publishes items of one dataset, soon. Safe to use from several threads; dead in a forked child.

    Args:
        store: the dataset's cache.
        index: of this process. `lock` guards it, too.
        backoff: learns what fails.
    Raises: OSError: claims.lock cannot be opened.
    """

    def __init__(self, store: Store, index: ItemIndex, backoff: FailureBackoff) -> None:
        assert store.settings.dataset is not None
        self._origin = Origin()
        self._store, self._index, self._backoff = store, index, backoff
        self._claims = self._open_claims(store.folder.path / CLAIMS_LOCK, store.folder.rights().file_mode)
        self._filling: SegmentBuilder | None = None  # the segment in progress
        self._full: SegmentBuilder | None = None  # the one before, until it is published
        self._writing = threading.RLock()  # held while a segment is written; never together with `lock`
        self.lock = threading.RLock()
        self._inside = threading.Condition(self.lock)  # tells whether this thread holds it
        self._oldest = self._latest = time.monotonic()  # of unpublished items; of all requests
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
    def can_store(self) -> bool:
        """False while the cache is full, or frozen, or cannot be written to."""
        if self._is_closed or self._backoff.why or self._store.is_frozen:
            return False
        try:
            self._may_be_full = self._may_be_full and not self._store.has_room()
            return not self._may_be_full
        except FAILURES:
            return False

    @contextmanager
    def _storing(self) -> Iterator[None]:
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
                    self._backoff.note(error)  # last: its warning may be an error

    def _disk_has_room(self) -> bool:
        with suppress(OSError):
            return self._store.folder.free_bytes() >= self._store.settings.segment_bytes
        return False

    # claims

    def claim(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Claim missing items (n,), to make them and `put` them.

        Returns: a mask (n,); False: somebody else has claimed it or published it, or nothing is stored now.
        """
        with self.lock:
            is_claimed, is_missing = np.zeros((2, len(indices)), np.bool_)
            if not self.can_store:
                return is_claimed
            try:
                with self._storing():
                    for at, index in enumerate(indices.tolist()):
                        is_claimed[at] = self._claims.claim(index)
                    self.refresh()  # the process that had the claim before may have published the item
                    is_missing = self._index.rows_of(indices) < 0
                    self._claims.release(indices[is_claimed & ~is_missing].tolist())
            except BaseException:  # Ctrl-C
                self._claims.release(indices[is_claimed].tolist())
                raise
            return is_claimed & is_missing

    def release_claims(self, indices: Iterable[int]) -> None:
        """End claims of items that could not be made."""
        with self.lock, suppress(OSError):
            self._claims.release(indices)

    def wait_for_others(self, indices: NDArray[np.int64], seconds: float) -> None:
        """Wait until the processes that claimed items (n,) have published them, or given them up.

        Blocks: so long at most.
        """
        waits = indices.tolist()
        if not self._claims.held.isdisjoint(waits):
            self.publish()
        self._wait_while(lambda: any(map(self._claims.is_held_elsewhere, waits)), seconds)

    def flush(self) -> None:
        """Publish what this process made, and wait a moment for other processes that have claims to do so."""
        self.publish()
        self._wait_while(self._claims.some_are_held_elsewhere, _FLUSH_SECONDS)

    def _wait_while(self, are_held: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with suppress(OSError), self._claims.waiting():
            while are_held() and time.monotonic() < deadline:
                time.sleep(_STEP_SECONDS)

    def _open_claims(self, path: Path, mode: int) -> Claims:
        assert self._store.settings.dataset is not None
        return (
            NoClaims() if self._store.is_frozen else Claims(path, mode, self._store.settings.dataset.length)
        )

    def _claim_of(self, index: int) -> int:
        """Return the number of an item's claim."""
        return index

    def _may_take(self, index: int) -> bool:  # noqa: ARG002  # of a stream some may not
        """True if an item may be taken in, now that this process has its claim."""
        return True

    def _took(self, index: int) -> None:
        """Note that an item was taken in."""

    def _release_published(self) -> None:
        """End claims of items that are published."""
        if held := self._claims.held:
            claimed = np.fromiter(held, np.int64, len(held))
            self._claims.release(claimed[self._index.rows_of(claimed) >= 0].tolist())

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
            self.touch()
            if not self._may_take(index):
                return True
            if self._filling is None:
                with self._storing():
                    self._filling = SegmentBuilder(self._store.settings.form, LARGER_SEGMENTS_OF_ITEMS)
            builder = self._filling
            if builder is None or self._is_closed:
                return True
            try:
                rows = builder.convert({**row, INDEX: np.array(index)}, many=False)
            except RowTooLargeError as error:
                with suppress(OSError):
                    self._claims.release([self._claim_of(index)])
                warn(f"item {index} is not stored, but made each time: {error}")
                return True
            with self._storing():
                if not builder.take(rows, 0):
                    return self._hand_over() and self._take(index, row)
                self._took(index)
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
        with self._storing():
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
                self.refresh()

    def refresh(self) -> None:
        """Update the index by the segments that came and went; end claims of items that came. Under the lock.

        Raises: as `ItemIndex.refresh`.
        """
        self._have_thread()  # which ends the lease
        if self._index.refresh():
            self._release_published()

    def _merge(self) -> None:
        """Merge small segments once, if there are many. Raises nothing; waits for no other process."""
        self._may_merge, self._look_for_parts_at = False, time.monotonic() + Limits.current.parts_seconds
        with suppress(*FAILURES):  # nothing is lost, and the next one tries again
            self._may_merge = merge(self._store, self.release)

    # how it ends

    def release(self) -> None:
        """End the lease, until the next request."""
        with self.lock:
            self._index.release()

    def drain(self) -> None:
        """Publish what was put, end the lease and the thread, until the next request: before a fork.

        Where a finalizer or a signal handler calls this amid a request, the thread does it soon.
        Blocks: while that is written, and while small segments are merged.
        """
        if self._is_inside():
            self._latest, self._must_end = -IDLE_SECONDS, True
            self._wake.put(None)
            return
        self.publish()
        with self.lock:
            if self._is_empty:
                with suppress(OSError):
                    self._claims.release(self._claims.left)
            self._latest, self._must_end = -IDLE_SECONDS, True
            self._sleep()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._wake.put(None)
            thread.join(_JOIN_SECONDS)
        self._merge()

    def _is_inside(self) -> bool:
        try:
            self._inside.notify()
        except RuntimeError:  # the lock is another thread's, or nobody's
            return False
        return True

    def close(self) -> None:
        """Publish what was put, and end, with all claims. Idempotent; does nothing in a forked child."""
        if self._origin.is_here:
            with self.lock:
                self._is_closed = self._must_end = True
            self.drain()
            with self.lock:
                self._claims.close()

    def close_soon(self) -> None:
        """Have the thread `close` it, soon. Waits for no lock."""
        self._wake.put(_END)

    def _sleep(self) -> None:
        """Hold no lease and no memory until the next request."""
        if self._is_empty:
            self._filling = self._full = None
        self._index.release()

    # the thread

    def touch(self) -> None:
        """Note a request, under the lock: a second after the last one the thread ends the lease."""
        self._latest = time.monotonic()
        self._have_thread()

    def _have_thread(self) -> None:
        if self._thread is not None or self._is_closed:
            return
        self._must_end = False
        thread = threading.Thread(target=self._run, name="arrowcache-publish", daemon=True)
        try:
            with suppress(WorkerError):  # as Python ends: `put` and `close` write without it
                start(thread)
        finally:  # Ctrl-C may come once it has started
            self._thread = None if thread.ident is None else thread

    def _run(self) -> None:
        """The thread: it keeps this object alive while there is something to do."""
        seconds: float | None = _TICK_SECONDS
        try:
            while seconds is not None:
                with suppress(Empty):
                    if self._wake.get(timeout=seconds) is _END:
                        self.close()
                seconds = self._look()
                if self._may_merge or self._parts_are_left(is_last=seconds is None):
                    self._merge()
            while self._may_merge and not self._must_end:  # nobody may ask for an item any more
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
        if self._store.is_frozen:
            return False
        with suppress(*FAILURES):
            listed, before = tuple(self._store.segments()), self._looked_at
            self._looked_at = listed
            return bool(superseded(listed)) or (listed != before and is_merge_worth_it(self._store))
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


_at_work: weakref.WeakSet[Publisher] = weakref.WeakSet()
_registered: Origin | None = None


def close_all() -> None:
    """Close all publishers of this process, each whatever another one raises."""
    call_all([publisher.close for publisher in [*_at_work]])


def _close_at_worker_exit() -> None:
    global _registered
    if _registered is None or not _registered.is_here:
        at_worker_exit(close_all)
        _registered = Origin()


at_exit(close_all)


# merging


def merge(store: Store, release: Callable[[], None]) -> bool:
    """Merge small segments into one, if that is worth it now, and remove parts that nobody leases.

    Does nothing while another process or thread merges.

    Args:
        release: ends this process' own lease.
    Blocks: while one segment is copied; not for other processes.
    Returns: True: one was merged, and more may be worth it.
    Raises: OSError, LockTimeoutError: the folder or its disk fails; nothing is lost.
    """
    if store.is_frozen or not (superseded(store.segments()) or is_merge_worth_it(store)):
        return False
    with the_only_one(store.folder, MERGING) as is_alone:
        if not is_alone:
            return False
        _remove_parts(store, release)
        parts = _parts_now(store)
        if len(parts) < 2 or not _merge_parts(store, parts):
            return False
        _remove_parts(store, release)
        return True


def is_merge_worth_it(store: Store) -> bool:
    """True if there are small segments that are worth a merge now. Raises: OSError: the folder fails."""
    return bool(_parts_now(store))


def _remove_parts(store: Store, release: Callable[[], None]) -> None:
    """Remove parts that were merged and are not leased by others."""
    if superseded(store.segments()) and store.take_back(superseded)[1]:
        release()
        store.take_back(superseded)


def _parts_now(store: Store) -> list[SegmentInfo]:
    listed, settings = store.segments(), store.settings
    room = settings.capacity_bytes - store.allocated_bytes(listed)
    return choose_parts(listed, settings.segment_bytes, settings.form.full_rows, room)


def _merge_parts(store: Store, parts: Sequence[SegmentInfo]) -> bool:
    """Publish parts as one segment. Returns: False: it cannot be, now."""
    seqs = {part.seq for part in parts}
    try:
        with Snapshot.take(store, lambda segment: segment.seq in seqs) as snapshot:
            if len(snapshot.segments) < len(parts):
                return False
            encoded = store.settings.form.encode(_columns(snapshot, store.settings.schema))
            store.publish(encoded, merge_task(parts), RoomPolicy("raise"), syncs=True)
    except (CacheFullError, CorruptSegmentError):  # the latter is quarantined by now
        return False
    return True


def _columns(snapshot: Snapshot, schema: Schema) -> dict[str, Column]:
    """Return all rows of a snapshot, oldest first, as columns of a segment: copies."""
    fixed = snapshot.gather(np.arange(len(snapshot)), [*schema.fixed])
    columns: dict[str, Column] = {name: np.asarray(values) for name, values in fixed.items()}
    for name, kind in schema.variable.items():
        values = snapshot.table([name]).column(0).combine_chunks()
        if isinstance(kind, Ragged):
            offsets, data = values.offsets.to_numpy(), values.values.buffers()[1]
        else:
            offsets, data = np.frombuffer(values.buffers()[1], np.int32), values.buffers()[2]
        offsets = np.array(offsets[: len(snapshot) + 1], np.int32)
        columns[name] = VariableColumn(offsets, bytearray(b"" if data is None else memoryview(data)))
    return columns
