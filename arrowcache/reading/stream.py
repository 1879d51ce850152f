"""BatchStream: the loop that makes the batches of one epoch after another. Its consumer drives it.

`take` begins groups until enough batches are under way, and waits for the oldest; native threads, Python
threads or worker processes make them meanwhile. Nothing here has a thread. A stream owns the epochs
that are under way, and their snapshots, until all their batches are made or it ends. The next epoch begins
when the last batch of one is under way, so that there is no pause; if it reads many segments, this is done
in slices, one a step.

A stream ends silently by exhaustion, or when its iterator is closed or dropped. It ends with an error in
its consumer when a newer epoch begins, a state is loaded, or the loader is closed: else the consumer would
take a part of the epoch for all of it. It also ends by an error in place of a batch.

`IdleSnapshots` keeps the snapshot of an epoch that ended for a second.

Guarantees: batches arrive in step order, whoever made them; no batch is made before its epoch was begun, or
begun after its epoch was ended; an exception arrives in place of its batch; every wait has a deadline
or an end; whoever ends the stream, all that it owns is released, once.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from arrowcache.errors import LoaderTimeoutError, WorkerError
from arrowcache.lifetimes import Origin, is_exiting
from arrowcache.limits import Limits
from arrowcache.os_errors import start
from arrowcache.reading.assembly import Assembly, BatchGroup, Gathered, ReadyBatch
from arrowcache.reading.available_rows import Wait
from arrowcache.reading.batch_source import CLOSED, BatchSource
from arrowcache.reading.epoch import EpochProgress, EpochSource
from arrowcache.reading.gather import abandon
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import Meter

_MAX_AHEAD = 8  # epochs, where they are short
_GRACE_SECONDS = 0.25  # extra time for a group whose own wait gives a better error
_LOOK_SECONDS = 0.05  # between two looks for the end, and two figures of a wait


_PARK, _STAY, _DROP, _END = "park", "stay", "drop", "end"  # messages to the thread of idle snapshots

_log = logging.getLogger("arrowcache")


class BatchStream(BatchSource):
    """The batches of the epochs of a cache, or of a dataset.

    Args:
        endless: begin the next epoch when the last batch of one is under way.
    """

    def __init__(
        self,
        epochs: EpochSource[Any],
        assembly: Assembly,
        idle_snapshots: IdleSnapshots,
        meter: Meter,
        *,
        endless: bool,
    ) -> None:
        super().__init__(meter)
        self._epochs, self._assembly = epochs, assembly
        self._idle_snapshots, self._meter = idle_snapshots, meter
        self._endless = endless
        self._making: list[EpochProgress] = []  # epochs with batches to make or under way; the newest is last
        self._undelivered: list[EpochProgress] = []  # epochs with batches that the consumer may not have got
        self._groups: Iterator[BatchGroup] = iter(())  # of the newest epoch
        self._left = 0  # batches of the newest epoch in no group yet
        # Slices of the preparation of the next epoch, and the number allowed before the last groups.
        self._slices: Iterator[None] = iter(())
        self._looks: Iterator[None] = iter(())
        self._ahead_steps = 0  # before the end of the newest epoch: from there on a slice is done each step
        meter.repeats = endless
        self.begun: deque[BatchGroup] = deque()
        self._wanted = 0  # batches under way or ready
        self.under_way = 0  # batches in the groups begun
        self.exhausted = False
        self._has_to_wait = False  # the next epoch, for rows
        self._may_wait = True  # for the next epoch; False while only asking whether it is ready
        self._error: BaseException | None = None  # raised after the batches before it
        self._has_failed = False  # an error was raised, or will be
        self._is_between = False  # the last batch of an epoch was delivered, and none of the next one

    def begin(self, is_cancelled: Callable[[], bool]) -> bool:
        """Begin the first epoch and its first groups: the consumer will ask for their batches.

        Nobody else knows of the stream before this returns.
        Blocks, Raises: as `Epochs.begin`; close the stream then.
        Returns: False: the wait was cancelled.
        """
        self._meter.begin_run(self)
        with self._waiting:
            epoch = self._epochs.begin(Wait(is_cancelled, self._idle_snapshots.drop))
            if epoch is None:
                return False
            self._making, self._undelivered = [epoch], [epoch]
            self._is_between = epoch.is_delivered  # nothing is left of a resumed one
            self._idle_snapshots.drop()  # segments that both epochs read stay mapped
            self._make(epoch, awaited=True)
            if not self._epochs.begins_when_asked:
                self._begin_groups()
        return True

    def close(self, because: str | None = None, error: type[BaseException] | None = None) -> None:
        if not self.has_ended and not self.was_asked:
            for epoch in self._undelivered:
                self._epochs.take_back(epoch)
        super().close(because, error)
        if error is not None and error is not GeneratorExit:
            self._epochs.skip_failed()

    def _take(self, timeout_seconds: float | None) -> ReadyBatch | None:
        patience_seconds = math.inf if timeout_seconds is None else timeout_seconds + _GRACE_SECONDS
        started = time.monotonic()
        while not self.has_ended:
            self._begin_groups()
            if not self.ready:
                if not self.begun:
                    break
                if not self._take_oldest(_LOOK_SECONDS):
                    if time.monotonic() - started >= patience_seconds:
                        raise too_late(timeout_seconds)
                    self._meter.show()
            if self.ready:
                made = self.ready.popleft()
                self.at_once = self._at_once()
                return made
        error, self._error = self._error, None
        try:
            if error is not None and not self.has_ended:
                raise error
            return None
        finally:
            del error  # its traceback has this frame

    def _look(self) -> bool:
        if self._epochs.begins_when_asked and not self.begun:
            return bool(self.ready) or self.has_ended
        self._may_wait = False
        try:
            self._begin_groups()
            while not self.ready and self.begun:
                if self.begun[0].is_made_by_consumer:
                    return True
                if not self._take_oldest(0.0):
                    break
            return bool(self.ready) or self.has_ended or (self.exhausted and not self.begun)
        finally:
            self._may_wait = True

    def _count(self, made: ReadyBatch) -> None:
        if made.epoch is not self._epochs.progress:
            self._begin_delivery(made.epoch)
        self._is_between = made.epoch.deliver(made.steps, within=made.within)

    def _is_whole(self) -> bool:
        # Of endless batches others come after a whole epoch, unless the loader was closed.
        return self._is_between and (not self._endless or self._because is CLOSED)

    # groups

    def _begin_groups(self) -> None:
        for begun in self.begun:
            if begun.is_in_parts:
                begun.advance()
        self._wanted = self._assembly.wanted()
        is_late = self._left + self.under_way + len(self.ready) <= self._ahead_steps
        if is_late and not self._look_ahead(self._slices):
            self._ahead_steps = 0  # all is done: ready batches need no look between them
        while not self.exhausted and self.under_way + len(self.ready) < self._wanted:
            try:
                group = self._next_group()
                if group is not None:
                    self.begun.append(group)
                    self.under_way += group.batches
                    self._left -= group.batches
                    if self._left <= 2 * group.batches:
                        self._look_ahead(self._looks)
                elif not self._begin_next_epoch():
                    return
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001  # it arrives after the batches before it
                self._fail(error)

    def _at_once(self) -> int:
        """Return how many ready batches may go before a group, or a slice of the next epoch, is due."""
        for begun in self.begun:
            if begun.is_in_parts:
                return 0
        ahead = self.under_way + len(self.ready)
        until_group = ahead if self.exhausted else ahead + 1 - self._wanted
        until_slice = self._left + ahead - self._ahead_steps
        return max(0, min(len(self.ready), until_group, until_slice))

    def _next_group(self) -> BatchGroup | None:
        """Begin the next group: draw its rows, and of sequences find their documents."""
        started = self._meter.enter("gather")
        try:
            return next(self._groups, None)
        finally:
            self._meter.leave({"gather": time.perf_counter() - started})

    def _look_ahead(self, slices: Iterator[None]) -> bool:
        """Do a part of what the next epoch needs. Returns: False: it was all done before, or failed."""
        with suppress(Exception), self._meter.stage("start"):  # the next epoch raises it as it begins
            return next(slices, self) is not self
        return False

    def _take_oldest(self, seconds: float) -> bool:
        """Wait for the batches of the oldest group. Returns: False: they were not ready in time."""
        group = self.begun[0]
        try:
            if not group.take(seconds) or self.has_ended:
                return False
            self.begun.popleft()
            self.under_way -= group.batches
            started = time.perf_counter()
            self.ready.extend(group.made())
            if isinstance(group, Gathered):  # others count as they make them
                self._meter.leave({"gather": time.perf_counter() - started})
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # it arrives after the batches before it
            self._cancel_begun()
            self._fail(error)
        finally:
            del group
        if len(self._making) > 1:
            self._retire_made()
        return True

    def _fail(self, error: BaseException) -> None:
        self.exhausted = self._has_failed = True
        if not self.has_ended:  # else nobody asks why
            self._error = error

    def _abandon(self) -> None:
        self.at_once = 0
        self.ready.clear()
        self._cancel_begun()
        self._error, self._groups = None, iter(())
        self._slices = self._looks = iter(())
        self._epochs.drop_ahead()

    def _cancel_begun(self) -> None:
        for begun in self.begun:
            begun.cancel(0)  # all of them first: no thread begins one while another is waited for
        while self.begun:
            group = self.begun[0]
            abandon(group) if self._was_interrupted else group.cancel()
            self.begun.popleft()  # now: Ctrl-C loses none
        self.under_way = 0

    # epochs

    def _make(self, epoch: EpochProgress, *, awaited: bool) -> None:
        self._groups, self._left = self._assembly.groups(epoch, awaited=awaited), epoch.order.steps
        if self._endless:
            self._looks, self._slices, self._ahead_steps = self._epochs.ahead_of(epoch)

    def _begin_next_epoch(self) -> bool:
        """Begin the epoch after the newest one. Returns: False: there is none, or it is too early."""
        with self._lock:
            if self.has_ended or not self._endless:
                self.exhausted = True
                return False
            newest = self._making[-1]
        is_busy = bool(self.begun or self.ready)
        if is_busy and sum(not each.is_delivered for each in self._undelivered) > _MAX_AHEAD:
            return False  # an epoch begun later sees more rows
        while True:
            with self._meter.stage("start"):
                is_done = next(self._slices, self) is self
            if is_done:
                break
            if is_busy:
                return False  # one slice a step
        following = None
        if not self._has_to_wait:
            try:
                following = self._epochs.begin_after(newest)
            finally:
                self._epochs.drop_ahead()
            self._has_to_wait = following is None
        if self._has_to_wait:
            if is_busy or not self._may_wait:
                return False  # first all batches are delivered
            wait = Wait(lambda: self.has_ended, partial(self._retire, newest, self._idle_snapshots.drop))
            following = self._epochs.begin_after(newest, wait)
            self._has_to_wait = False
        if following is None:  # the stream has ended
            return False
        with self._lock:
            if not self.has_ended:
                self._undelivered = [each for each in self._undelivered if not each.is_delivered]
                self._undelivered.append(following)
                self._making.append(following)
        if following not in self._making:
            following.end()
            return False
        with self._meter.stage("start"):
            self._retire_made()
            self._make(following, awaited=False)
        return True

    def _begin_delivery(self, epoch: EpochProgress) -> None:
        """Record that batches of this epoch are delivered now, unless another epoch took its place."""
        with self._lock:
            if not self.has_ended:
                self._epochs.begin_delivery(epoch)

    def _retire_made(self) -> None:
        """Release epochs whose batches are all made; the next one has mapped the segments that both read."""
        under_way = [group.epoch for group in self.begun]
        for epoch in self._making[:-1]:
            if epoch not in under_way:
                self._retire(
                    epoch, self._idle_snapshots.leave if epoch.is_large else self._idle_snapshots.drop
                )

    def _retire(self, epoch: EpochProgress, leave_to: Callable[[Snapshot], None]) -> None:
        """End an epoch whose batches are all made. Idempotent."""
        epoch.end(leave_to, may_deliver=True)
        with self._lock:
            self._making = [each for each in self._making if each is not epoch]

    def _release(self) -> None:
        # After a failure nothing is parked: the next epoch checks its segments anew.
        is_parked = self.was_asked and not self._has_failed
        making = self._making
        for epoch in making:
            if epoch is not making[-1]:
                self._retire(epoch, self._idle_snapshots.drop)
            else:
                self._retire(epoch, self._idle_snapshots.park if is_parked else Snapshot.close)
        for epoch in self._undelivered:
            epoch.end()
        self._undelivered = []


def too_late(timeout_seconds: float | None) -> LoaderTimeoutError:
    return LoaderTimeoutError(
        f"no batch came in {timeout_seconds:g} s: a slow transform or disk? "
        "raise timeout, or look at loader.stats().advice"
    )


class IdleSnapshots:
    """An ended epoch's segments stay mapped for a second, so that the next epoch finds them.

    It owns snapshots of epochs that ended. It releases them after a second, or sooner: when a writer of this
    process waits for them, when the next epoch has mapped its segments, or when the loader is closed. A
    thread waits for that second, and sleeps while an epoch runs. It closes snapshots of `leave` at once.
    Where ranks agreed on an epoch, it goes on looking until all have joined it. So a loader that nobody
    iterates leases nothing for longer than that second.

    Thread-safe; the garbage collector may call it anywhere.

    Args:
        release_joined: called after an epoch until it returns False, when nothing is left to release.
        also_drop: has others, such as worker processes, release epochs that ended.
    """

    def __init__(self, release_joined: Callable[[], bool], also_drop: Callable[[], None]) -> None:
        self._release_joined, self._also_drop = release_joined, also_drop
        self._lock = threading.RLock()
        self._parked: list[Snapshot] = []
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()  # safe to use in a finalizer
        self._thread = self._new_thread()
        self._is_one = threading.Lock()  # held by the thread that runs
        self._is_closed = False
        self._origin = Origin()

    def begin(self) -> None:
        """Keep parked snapshots until `drop`, as an epoch begins.

        If no thread can be started, nothing is parked afterwards.
        """
        if self._thread.ident is None:
            self._thread = self._new_thread()  # the last one may have been started before Ctrl-C
            try:
                start(self._thread)
            except WorkerError:
                _log.debug("nothing is parked", exc_info=True)
        self._said.put(_STAY)

    def park(self, snapshot: Snapshot) -> None:
        """Keep a snapshot for the next epoch, for a second after this one ended."""
        self._leave(snapshot, _PARK)

    def leave(self, snapshot: Snapshot) -> None:
        """Let the thread close a snapshot: unmapping evicted files takes the disk's time.

        The last one is closed here if the thread has not: there are never more than two.
        """
        self.drop()
        self._leave(snapshot, _DROP)

    def _leave(self, snapshot: Snapshot, said: str) -> None:
        if not self._origin.is_here or is_exiting():
            return
        snapshot.on_contention(self.drop)
        with self._lock:
            if snapshot not in self._parked:
                self._parked.append(snapshot)
            is_kept = self._thread.ident is not None and not self._is_closed
        self._said.put(said)
        if not is_kept:
            self.drop()

    def drop(self, ended: Snapshot | None = None) -> None:
        """Release every lease but the running epoch's, and close the snapshot of one that ended."""
        with self._lock:
            parked = self._parked.copy()
        for snapshot in parked if ended is None else [*parked, ended]:
            snapshot.close()
        with self._lock:  # after they are closed: Ctrl-C loses none
            self._parked = [snapshot for snapshot in self._parked if snapshot not in parked]
        self._also_drop()

    def close(self) -> None:
        """Release everything. Idempotent. Blocks: while its thread closes a snapshot, at most 5 s."""
        if not self._origin.is_here or is_exiting():  # no thread ends any more; the kernel releases all
            return
        with self._lock:
            self._is_closed = True
        try:
            self._said.put(_END)
            if self._thread.ident is not None and self._thread is not threading.current_thread():
                # a snapshot is leased until the thread has closed it
                self._thread.join(Limits.current.join_seconds)
        finally:
            self.drop()

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="arrowcache-parking", daemon=True)

    def _run(self) -> None:
        if not self._is_one.acquire(blocking=False):
            return
        seconds: float | None = None
        while True:
            try:
                said = self._said.get(timeout=seconds)
            except queue.Empty:
                seconds = self._release()
                continue
            if said is _END:
                return
            if said is _DROP:
                self._release()
            else:
                seconds = Limits.current.idle_seconds if said is _PARK else None

    def _release(self) -> float | None:
        """Release all after the second. Returns: seconds to the next look. None means none is due."""
        try:
            self.drop()
            return Limits.current.joined_look_seconds if self._release_joined() else None
        except Exception:  # noqa: BLE001  # it is let go by the next epoch, or the loader's end
            _log.debug("parking failed", exc_info=True)
            return None
