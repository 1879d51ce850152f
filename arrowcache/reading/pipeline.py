"""Pipeline: one background thread that makes batches ahead of their consumer.

It owns the thread, the queue between the two, and a parked snapshot. The thread lives as long
as the loader, over all epochs. Guarantees: batches arrive in step order; no batch is made
before its epoch was begun, and none after it was ended; an exception of the producer arrives
where its batch would have; every wait has a deadline or an end.

Between two epochs the finished snapshot stays parked for a moment, so that its mappings are
still warm when the next epoch begins; it is dropped when a writer of this process needs the
room, or after a second, so that an idle loader leases nothing.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from arrowcache.errors import LoaderTimeoutError
from arrowcache.reading.snapshot import Snapshot

Batch = dict[str, Any]


class Made(NamedTuple):
    """A batch ready for delivery, and what it took to make."""

    batch: Batch
    rows: int
    nbytes: int


_PARKED_SECONDS = 1.0
_JOIN_SECONDS = 5.0
_WAKE, _STOP = object(), object()


@dataclass(slots=True, eq=False)
class Epoch:
    """One pass being made: `produce` yields lists of batches, in step order."""

    snapshot: Snapshot
    produce: Callable[[], Iterator[list[Made]]]
    ready: deque[Made] = field(default_factory=deque)
    wanted: int = 1  # the producer works while fewer batches are ready
    error: BaseException | None = None
    exhausted: bool = False
    ended: bool = False


class Pipeline:
    """The thread and its queue.

    Args:
        prefetch: the producer works while fewer than so many batches are ready, not counting what it
            makes at once: a large group takes it longer.
    """

    def __init__(self, prefetch: int) -> None:
        self._prefetch = prefetch
        self._changed = threading.Condition()  # reentrant: the garbage collector may end an epoch anywhere
        self._epochs: queue.SimpleQueue[Epoch | object] = queue.SimpleQueue()
        self._parked: Snapshot | None = None
        self._parked_lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="arrowcache-loader", daemon=True)
        self._thread.start()

    def begin(self, epoch: Epoch) -> None:
        """Start making an epoch's batches."""
        self._epochs.put(epoch)

    def next(self, epoch: Epoch, timeout_seconds: float | None) -> Made | None:
        """The next batch; None at the end of the epoch.

        Raises: LoaderTimeoutError: none came in time. Whatever the producer raised. ValueError: this
            process was forked from the one that makes them.
        """
        if self.is_inherited():
            raise ValueError("this epoch belongs to the process that forked this one: iterate anew here")
        with self._changed:
            if not epoch.ready and not self._changed.wait_for(
                lambda: epoch.ready or epoch.exhausted or epoch.ended, timeout_seconds
            ):
                raise LoaderTimeoutError(
                    f"no batch came in {timeout_seconds:g} s: a slow transform or disk? "
                    "raise timeout, or look at loader.stats().bottleneck"
                )
            if epoch.ready:
                made = epoch.ready.popleft()
                if len(epoch.ready) == epoch.wanted - 1:
                    self._changed.notify_all()
                return made
            if epoch.error is not None:
                raise epoch.error
            return None

    def end(self, epoch: Epoch) -> None:
        """Stop making an epoch's batches, drop those that nobody took, park its snapshot."""
        if self.is_inherited():
            epoch.ended = True
            return
        with self._changed:
            if epoch.ended:
                return
            epoch.ended = True
            epoch.ready.clear()
            self._changed.notify_all()
        with self._parked_lock:
            previous, self._parked = self._parked, epoch.snapshot
        epoch.snapshot.on_contention(self.drop_parked)
        if previous is not None:
            previous.close()
        self._epochs.put(_WAKE)

    def drop_parked(self) -> None:
        """Let go of the last epoch's snapshot, if it is still there."""
        with self._parked_lock:
            parked, self._parked = self._parked, None
        if parked is not None:
            parked.close()

    def close(self) -> None:
        """End the thread, waiting for its current call at most 5 s. Idempotent."""
        if self._closed or self.is_inherited():
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._epochs.put(_STOP)
        if threading.current_thread() is not self._thread:  # it may drop the last reference itself
            self._thread.join(_JOIN_SECONDS)
        self.drop_parked()

    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that has the thread; locks may be held for ever."""
        return self._pid != os.getpid()

    def _run(self) -> None:
        while True:
            try:
                epoch = self._epochs.get(timeout=_PARKED_SECONDS if self._parked else None)
            except queue.Empty:
                self.drop_parked()
                continue
            if epoch is _STOP:
                return
            if not isinstance(epoch, Epoch):
                continue  # woken, to watch over a parked snapshot
            try:
                self._produce(epoch)
            except BaseException as error:  # noqa: BLE001  # whatever it is, the consumer gets it
                epoch.error = error
            with self._changed:
                epoch.exhausted = True
                self._changed.notify_all()
            del epoch

    def _is_over(self, epoch: Epoch) -> bool:
        return epoch.ended or self._closed

    def _produce(self, epoch: Epoch) -> None:
        for batches in epoch.produce():
            with self._changed:
                if self._is_over(epoch):
                    return
                epoch.ready.extend(batches)
                epoch.wanted = self._prefetch + len(batches) - 1
                self._changed.notify_all()
                del batches
                self._changed.wait_for(lambda: self._is_over(epoch) or len(epoch.ready) < epoch.wanted)
                if self._is_over(epoch):
                    return


class Clock:
    """Seconds spent in named stages; one thread adds, any thread reads."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
