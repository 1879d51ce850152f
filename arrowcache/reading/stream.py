"""BatchStream: the loop that makes the batches of one epoch after another. Its consumer drives it.

`take` begins portions until enough batches are under way, and waits for the oldest; native threads, Python
threads or worker processes make them meanwhile. Nothing here has a thread. A stream owns the epochs
that are under way, and their snapshots, until all their batches are made or it ends. The next epoch begins
when the last batch of one is under way, so that there is no pause; if it reads many segments, this is done
in slices, one a step.

A stream ends silently by exhaustion, or when its iterator is closed or dropped. It ends with an error in
its consumer when a newer epoch begins, a state is loaded, or the loader is closed: else the consumer would
take a part of the epoch for all of it. It also ends by an error in place of a batch.

Guarantees: batches arrive in step order, whoever made them; no batch is made before its epoch was begun, or
begun after its epoch was ended; an exception arrives in place of its batch; every wait has a deadline
or an end; whoever ends the stream, all that it owns is released, once.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING

from arrowcache.errors import LoaderTimeoutError
from arrowcache.lifetimes import Origin
from arrowcache.limits import Limits
from arrowcache.reading.assembly import Assembly, Gathered
from arrowcache.reading.epoch import Epoch, Epochs
from arrowcache.reading.gather import abandon
from arrowcache.reading.iterator import CLOSED, cut_short
from arrowcache.reading.parking import Parking
from arrowcache.reading.patience import Wait
from arrowcache.reading.portion import Portion, ReadyBatch
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import Meter

if TYPE_CHECKING:
    from arrowcache.reading.workers.remote import RemoteAssembly

_MOST_AHEAD = 8  # epochs, where they are short
_AHEAD_STEPS = 64  # before the end of an epoch, at most half of it: functions choose the rows of the next one
_GRACE_SECONDS = 0.25  # extra time for a portion whose own wait gives a better error
_LOOK_SECONDS = 0.05  # between two looks for the end, and two figures of a wait


class BatchStream:
    """A stream of batches. Thread-safe: one thread at a time takes batches; any may end the stream meanwhile.

    Args:
        endless: begin the next epoch when the last batch of one is under way.
    """

    def __init__(
        self,
        epochs: Epochs,
        assembly: Assembly | RemoteAssembly,
        parking: Parking,
        meter: Meter,
        *,
        endless: bool,
    ) -> None:
        self._epochs, self._assembly, self._parking, self._meter = epochs, assembly, parking, meter
        self._endless, self._waiting = endless, meter.waiting()
        self._lock = threading.RLock()  # reentrant: the garbage collector may end a stream anywhere
        self._origin = Origin()
        self._making: list[Epoch] = []  # epochs with batches to make or under way; the newest is last
        self._undelivered: list[Epoch] = []  # epochs with batches that the consumer may not have got
        self._portions: Iterator[Portion] = iter(())  # of the newest epoch
        self._left = 0  # batches of the newest epoch in no portion yet
        # Slices of the preparation of the next epoch, and the number allowed before the last portions.
        self._slices: Iterator[None] = iter(())
        self._looks: Iterator[None] = iter(())
        self._ahead_steps = 0  # before the end of the newest epoch: from there on a slice is done each step
        meter.repeats = endless
        self.begun: deque[Portion] = deque()
        self.under_way = 0  # batches in the portions begun
        self.ready: deque[ReadyBatch] = deque()
        self.exhausted = False
        self._has_to_wait = False  # the next epoch, for rows
        self._may_wait = True  # for the next epoch; False while only asking whether it is ready
        self._error: BaseException | None = None  # raised after the batches before it
        self._has_failed = False  # an error was raised, or will be
        self.consumer = 0  # the thread that takes batches, or cancels them
        self._was_asked = self._was_interrupted = False
        self._because: str | None = None  # why it was cut short: the error that its consumer gets
        self._is_whole = False  # the last batch of an epoch was delivered, and none of the next one
        self.has_stopped = False  # its consumer knows
        self.ended = self._is_closed = False

    def begin(self, is_cancelled: Callable[[], bool]) -> bool:
        """Begin the first epoch and its first portions: the consumer will ask for their batches.

        Nobody else knows of the stream before this returns.
        Blocks, Raises: as `Epochs.begin`; close the stream then.
        Returns: False: the wait was cancelled.
        """
        self._meter.begin_run(self)
        with self._waiting:
            epoch = self._epochs.begin(Wait(is_cancelled, self._parking.drop))
            if epoch is None:
                return False
            self._making, self._undelivered = [epoch], [epoch]
            self._parking.drop()  # segments that both epochs read stay mapped
            self._make(epoch, awaited=True)
            self._begin_portions()
        return True

    def waiting(self) -> AbstractContextManager[None]:
        """Count the time inside as the consumer's wait for a batch."""
        self._was_asked = True
        return self._waiting

    def require_own(self) -> None:
        """Raises: ValueError: this process was forked from the one that makes the batches."""
        self._origin.require("this epoch", "iterate anew here")

    def take(self, timeout_seconds: float | None) -> ReadyBatch | None:
        """Return the next batch, not delivered yet, on any thread, or None at the end.

        Raises: LoaderTimeoutError: none came in time. Any error of its making. As `require_own`.
        """
        self.require_own()
        patience_seconds = math.inf if timeout_seconds is None else timeout_seconds + _GRACE_SECONDS
        started = time.monotonic()
        if not self._enter():
            return None
        try:
            while not self.ended:
                self._begin_portions()
                if not self.ready:
                    if not self.begun:
                        break
                    if not self._take_oldest(_LOOK_SECONDS):
                        if time.monotonic() - started >= patience_seconds:
                            raise too_late(timeout_seconds)
                        self._meter.show()
                if self.ready:
                    return self.ready.popleft()
        except KeyboardInterrupt:
            self._was_interrupted = True
            raise
        finally:
            self._leave()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return None
        finally:
            del error  # its traceback has this frame

    def is_ready(self) -> bool:
        """True if `take` would return at once. Begins more portions; waits for nothing, not even rows."""
        if not self._origin.is_here or not self._enter():
            return True
        self._may_wait = False
        try:
            self._begin_portions()
            while not self.ready and self.begun and self._take_oldest(0.0):
                pass
            return bool(self.ready) or self.ended or (self.exhausted and not self.begun)
        except KeyboardInterrupt:
            self._was_interrupted = True
            raise
        finally:
            self._may_wait = True
            self._leave()

    def _enter(self) -> bool:
        """Make this thread the consumer, which cancels all at the end. Returns: False: it has ended."""
        with self._lock:
            if self.ended:
                return False
            self.consumer = threading.get_ident()
            return True

    def _leave(self) -> None:
        with self._lock:
            is_over = self.ended
            if not is_over:
                self.consumer = 0
        if is_over:
            self._cancel()
            self.consumer = 0

    def deliver(self, made: ReadyBatch | None) -> None:
        """Count a batch that the consumer gets now, or, with None, the end.

        Raises: StopIteration: the stream has ended, also after `take`. RuntimeError: it was cut short.
        """
        if made is not None and made.epoch is not self._epochs.progress:
            self._come_to(made.epoch)
        if made is None or self.ended:
            # Of endless batches others come after a whole epoch, unless the loader was closed.
            is_whole = self._is_whole and (not self._endless or self._because is CLOSED)
            if self._because is not None and not is_whole:
                raise cut_short(self._because)
            self.has_stopped = True
            self.close()
            raise StopIteration
        made.epoch.deliver(made.steps, within=made.within)
        self._is_whole = made.epoch.is_delivered
        self._meter.deliver(made)

    def fail(self) -> None:
        """End the stream, as the consumer gets an error in place of a batch."""
        if self.consumer == threading.get_ident():  # Ctrl-C came as it left
            self.consumer = 0
        self.close()
        self._epochs.came_to_error()

    def drop(self) -> None:
        """End a stream whose consumer is gone, so nobody is told of its end."""
        # The garbage collector may call this in a thread that holds a lock, so closing takes no lock.
        if not self._is_closed:
            self.has_stopped = True
            self.close()

    def close(self, because: str | None = None) -> None:
        """End the stream: drop its batches, release its epochs. Idempotent; completes an interrupted close.

        Args:
            because: its consumer gets this reason in place of a StopIteration. None: it closed this itself.
        """
        if not self.ended:
            self._because = because
            if not self._was_asked:
                for epoch in self._undelivered:
                    self._epochs.take_back(epoch)
        self._meter.end_run(self)
        if not self._origin.is_here:  # locks may be held for ever in a forked child
            self.ended = self._is_closed = True
            return
        is_mine = False
        try:
            with self._lock:
                self.ended, self._error = True, None
                is_mine = not self.consumer
                if is_mine:
                    self.consumer = threading.get_ident()
            if is_mine:  # else the consumer cancels them, within _LOOK_SECONDS, or once its handler returns
                self._cancel()
        finally:
            if is_mine:
                self.consumer = 0
        self._let_go()
        self._is_closed = True

    # portions

    def _begin_portions(self) -> None:
        for begun in self.begun:
            if begun.is_in_parts:
                begun.go_on()
        wanted = self._assembly.wanted()
        if self._left + self.under_way + len(self.ready) <= self._ahead_steps:
            self._look_ahead(self._slices)
        while not self.exhausted and self.under_way + len(self.ready) < wanted:
            try:
                portion = self._next_portion()
                if portion is not None:
                    self.begun.append(portion)
                    self.under_way += portion.batches
                    self._left -= portion.batches
                    if self._left <= 2 * portion.batches:
                        self._look_ahead(self._looks)
                elif not self._begin_next_epoch():
                    return
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001  # it arrives after the batches before it
                self._fail(error)

    def _next_portion(self) -> Portion | None:
        """Begin the next portion: draw its rows, and of sequences find their documents."""
        started = self._meter.enter("gather")
        try:
            return next(self._portions, None)
        finally:
            self._meter.leave({"gather": time.perf_counter() - started})

    def _look_ahead(self, slices: Iterator[None]) -> None:
        """Do a part of what the next epoch needs."""
        with suppress(Exception), self._meter.stage("start"):  # the next epoch raises it as it begins
            next(slices, None)

    def _take_oldest(self, seconds: float) -> bool:
        """Wait for the batches of the oldest portion. Returns: False: they were not ready in time."""
        portion = self.begun[0]
        try:
            if not portion.take(seconds) or self.ended:
                return False
            self.begun.popleft()
            self.under_way -= portion.batches
            started = time.perf_counter()
            self.ready.extend(portion.made())
            if isinstance(portion, Gathered):  # others count as they make them
                self._meter.leave({"gather": time.perf_counter() - started})
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # it arrives after the batches before it
            self._cancel_begun()
            self._fail(error)
        finally:
            del portion
        if len(self._making) > 1:
            self._retire_made()
        return True

    def _fail(self, error: BaseException) -> None:
        self.exhausted = self._has_failed = True
        if not self.ended:  # else nobody asks why
            self._error = error

    def _cancel(self) -> None:
        """Cancel all batches, as the `consumer`: no other thread, nor a handler of this one, is at it."""
        self.ready.clear()
        self._cancel_begun()
        self._error, self._portions = None, iter(())
        self._slices = self._looks = iter(())
        self._epochs.supply.drop()

    def _cancel_begun(self) -> None:
        for begun in self.begun:
            begun.cancel(0)  # all of them first: no thread begins one while another is waited for
        while self.begun:
            portion = self.begun[0]
            abandon(portion) if self._was_interrupted else portion.cancel()
            self.begun.popleft()  # now: Ctrl-C loses none
        self.under_way = 0

    # epochs

    def _make(self, epoch: Epoch, *, awaited: bool) -> None:
        self._portions, self._left = self._assembly.portions(epoch, awaited=awaited), epoch.order.steps
        supply = self._epochs.supply
        chooses = bool(self._meter.chosen_by) and supply.has_functions
        if self._endless and (_is_large(epoch) or chooses):
            self._ahead_steps = min(_AHEAD_STEPS, epoch.order.steps // 2) if chooses else 0
            self._looks = supply.store.look_ahead()
            self._slices = itertools.chain(self._looks, supply.take_ahead(max(1, self._ahead_steps // 2)))

    def _begin_next_epoch(self) -> bool:
        """Begin the epoch after the newest one. Returns: False: there is none, or it is too early."""
        with self._lock:
            if self.ended or not self._endless:
                self.exhausted = True
                return False
            newest = self._making[-1]
        is_busy = bool(self.begun or self.ready)
        if is_busy and sum(not each.is_delivered for each in self._undelivered) > _MOST_AHEAD:
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
                self._epochs.supply.drop()
            self._has_to_wait = following is None
        if self._has_to_wait:
            if is_busy or not self._may_wait:
                return False  # first all batches are delivered
            wait = Wait(lambda: self.ended, partial(self._retire, newest, self._parking.drop))
            following = self._epochs.begin_after(newest, wait)
            self._has_to_wait = False
        if following is None:  # the stream has ended
            return False
        with self._lock:
            if not self.ended:
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

    def _come_to(self, epoch: Epoch) -> None:
        """Record that batches of this epoch are delivered now, unless another epoch took its place."""
        with self._lock:
            if not self.ended:
                self._epochs.came_to(epoch)

    def _retire_made(self) -> None:
        """Release epochs whose batches are all made; the next one has mapped the segments that both read."""
        under_way = [portion.epoch for portion in self.begun]
        for epoch in self._making[:-1]:
            if epoch not in under_way:
                self._retire(epoch, self._parking.leave if _is_large(epoch) else self._parking.drop)

    def _retire(self, epoch: Epoch, leave_to: Callable[[Snapshot], None]) -> None:
        """End an epoch whose batches are all made. Idempotent."""
        epoch.end(leave_to, may_deliver=True)
        with self._lock:
            self._making = [each for each in self._making if each is not epoch]

    def _let_go(self) -> None:
        # After a failure nothing is parked: the next epoch checks its segments anew.
        is_parked = self._was_asked and not self._has_failed
        making = self._making
        for epoch in making:
            if epoch is not making[-1]:
                self._retire(epoch, self._parking.drop)
            else:
                self._retire(epoch, self._parking.park if is_parked else Snapshot.close)
        for epoch in self._undelivered:
            epoch.end()
        self._undelivered = []


def _is_large(epoch: Epoch) -> bool:
    return len(epoch.snapshot.seqs) >= Limits.current.slow_segments


def too_late(timeout_seconds: float | None) -> LoaderTimeoutError:
    return LoaderTimeoutError(
        f"no batch came in {timeout_seconds:g} s: a slow transform or disk? "
        "raise timeout, or look at loader.stats().advice"
    )
