"""Crew: a loader's worker processes, as the rest of reading sees them.

It starts the supervisor, whose processes live as long as the loader, over all epochs, with the first
request, and ends it: when it is closed or dropped, or the interpreter ends. In a forked child a crew
starts anew.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import WorkerError
from arrowcache.reading.future import Future
from arrowcache.reading.workers.manifest import pack_segments
from arrowcache.reading.workers.memory import file_of
from arrowcache.reading.workers.request import Finished
from arrowcache.reading.workers.supervisor import DEPTH, Supervisor
from arrowcache.shortage import explaining
from arrowcache.storage.layout import SegmentInfo


class Crew:
    """Worker processes. Thread-safe; they start with the first request.

    Args:
        size: how many.
        settings: plain values for them; see worker.py.
        transform: packed; empty: none.
        batch_size: rows of a batch.
        prefetch: batches that are kept ready.
    """

    def __init__(
        self, size: int, settings: Mapping[str, Any], transform: bytes, batch_size: int, prefetch: int
    ) -> None:
        self.in_flight = DEPTH * size
        self._size, self._batch_size = size, batch_size
        self._plan = json.dumps(settings).encode() + b"\n" + transform
        self._usual = self.in_flight + prefetch + 3  # slots that are in use at a time
        self._lock = threading.Lock()  # of the start
        self._pid = os.getpid()
        self._supervisor: Supervisor | None = None
        self._end: Callable[[], object] = _nothing
        self._closed = False

    def begin(self, segments: Sequence[SegmentInfo]) -> int:
        """There is an epoch over these segments, which the caller leases until `end`; returns its number."""
        return self._started().begin(file_of(pack_segments(segments)))

    def make(self, epoch: int, step: int, ids: NDArray[np.int64], oldest: int) -> Future[Finished]:
        """Ask for the batches of some rows, which begin at a step; requests are begun in this order.

        Args:
            oldest: segments of the epoch before this one may be let go.
        Returns: a future, which may be cancelled at any time: the request is then not begun, or in vain.
        """
        return self._started().make(epoch, step, ids, oldest)

    def end(self, epoch: int) -> None:
        """Make nothing more for an epoch, or for one before it."""
        if self._supervisor is not None and self._pid == os.getpid():
            self._supervisor.end(epoch)

    def drop(self) -> None:
        """Have workers let go of what they lease of epochs that have ended.

        Blocks: until they have, at most a second: one may be in a transform.
        """
        if self._supervisor is not None and self._pid == os.getpid():
            self._supervisor.drop()

    @property
    def is_hoarded(self) -> bool:
        """Whether the consumer keeps so much that groups should be small."""
        return self._supervisor is not None and self._supervisor.is_hoarded

    @property
    def allocated_bytes(self) -> int:
        """Shared memory for batches."""
        return 0 if self._supervisor is None else self._supervisor.ring.allocated_bytes

    @property
    def growths(self) -> int:
        """How often memory was added."""
        return 0 if self._supervisor is None else self._supervisor.ring.growths

    def in_progress(self) -> list[tuple[str, float]]:
        """What workers are at: the stage, and since when, by `time.perf_counter`."""
        return [] if self._supervisor is None else self._supervisor.in_progress()

    @property
    def pids(self) -> list[int]:
        """The living processes."""
        return [] if self._supervisor is None else self._supervisor.pids()

    def close(self) -> None:
        """End the processes. Idempotent.

        Blocks: about as long as they take to end, at most some seconds.
        """
        self._closed = True
        self._end()

    def _started(self) -> Supervisor:
        if self._pid != os.getpid():  # forked: the lock may be held for ever
            self._pid, self._lock, self._supervisor = os.getpid(), threading.Lock(), None
        with self._lock:
            if self._closed:
                raise ValueError("the loader is closed: make a new one")
            if self._supervisor is None:
                with explaining():
                    self._supervisor = Supervisor(self._size, self._plan, self._batch_size, self._usual)
                self._end = end = weakref.finalize(self, Supervisor.close, self._supervisor)
                try:
                    self._supervisor.start()
                except WorkerError:  # another call tries anew
                    end.detach()
                    self._supervisor, self._end = None, _nothing
                    raise
            return self._supervisor


def _nothing() -> None:
    pass
