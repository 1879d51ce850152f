"""Ahead: a consumer's iterator whose next batch is on its way to the device while this one is used.

Each step hands out a batch that was put on the device a step ago, and puts the one behind it there, if that
is made by then. It has no thread. A batch counts as delivered when the consumer gets it: a state that is
taken meanwhile has the batch ahead still to come.
"""

from __future__ import annotations

from arrowcache.reading.assembly import Batch
from arrowcache.reading.iterator import EpochIterator, Stream, next_of
from arrowcache.reading.portion import ReadyBatch
from arrowcache.reading.stream import BatchStream


class AheadIterator(EpochIterator):
    """As `EpochIterator`, one batch ahead. `finish` puts a batch on the device, and does not wait for it."""

    _taken: ReadyBatch | None = None  # the batch ahead
    _placed: Batch | None = None  # on its device; None if that failed, so that its step tries again

    def _next(self, stream: Stream) -> Batch:
        taken, placed = self._taken, self._placed
        self.forget()
        try:
            if taken is None:
                taken = next_of(stream, self._timeout_seconds)
        except BaseException:
            stream.fail()
            raise
        try:
            if taken is not None:
                placed = self._finish(taken.batch) if placed is None else placed
                self._look_ahead(stream)
        except BaseException:
            stream.close()
            raise
        stream.deliver(taken)  # now nothing comes between it and its consumer
        return {} if placed is None else placed

    def _look_ahead(self, stream: Stream) -> None:
        """Take the batch behind, if it is made, and put it on the device; an error waits for its step."""
        assert isinstance(stream, BatchStream)
        if not stream.is_ready() or not stream.ready:  # none, the end, or an error
            return
        taken = stream.take(self._timeout_seconds)
        if taken is None:  # it has ended meanwhile
            return
        try:
            placed = self._finish(taken.batch)
        except Exception:  # noqa: BLE001  # such as no memory on the device
            self._taken = taken
        else:
            self._taken, self._placed = taken._replace(batch={}), placed

    def forget(self) -> None:
        """Let go of the batch ahead, as when the loader is closed."""
        self._taken = self._placed = None
