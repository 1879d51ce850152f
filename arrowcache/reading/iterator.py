"""Iterator: the consumer's end of an epoch: it takes batches and is told how the epoch ends.

An epoch ends in silence by exhaustion, by `close()`, or when its iterator is dropped. It ends with an error
in its consumer when a newer epoch begins or a state is loaded: else the consumer would take the part for the
whole. It also ends by an error in place of a batch. Any thread may end it, also while its consumer waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

from arrowcache.reading.assembly import Batch
from arrowcache.reading.epoch import Epoch, Epochs
from arrowcache.reading.pipeline import Made, Pipeline, Stream
from arrowcache.reading.stats import Meter


class Batches(Protocol):
    """An iterator of batches; dropping or closing it ends the epoch."""

    def __iter__(self) -> Batches: ...

    def __next__(self) -> Batch: ...

    def close(self) -> None:
        """End the epoch: its batches are dropped, its snapshot is let go. Idempotent."""


class EpochIterator:
    """The batches of one epoch, or of all that follow. Nothing that makes batches refers to it.

    Args:
        stream, pipeline: where batches come from.
        epochs: told which one is delivered.
        first: the one that it begins with.
        meter, run: told what was delivered, the waiting, and when the run ends.
        timeout_seconds: how long a step waits; None: for ever.
        finish: the last touch of each batch, by the loader, which so lives as long as this.
    """

    def __init__(
        self,
        stream: Stream,
        pipeline: Pipeline,
        epochs: Epochs,
        first: Epoch,
        meter: Meter,
        run: object,
        timeout_seconds: float | None,
        finish: Callable[[Batch], Batch],
    ) -> None:
        self._stream, self._pipeline = stream, pipeline
        self._epochs, self._first = epochs, first
        self._meter, self._run = meter, run
        self._timeout_seconds, self._finish = timeout_seconds, finish
        self._because: str | None = None  # it was cut short, which its consumer must know
        self._was_asked = False
        self._is_closed = False
        self.has_stopped = False

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Blocks: until it is made, at most the loader's timeout.
        Raises: LoaderTimeoutError; what a transform raised; RuntimeError: a newer epoch began, or a
            state was loaded, also while this waits.
        """
        try:
            with self.waiting():
                made = self.take(self._timeout_seconds)
        except BaseException:
            self.fail()
            raise
        try:
            batch = {} if made is None else self._finish(made.batch)
        except BaseException:
            self.close()
            raise
        self.deliver(made)  # now nothing comes between it and its consumer
        return batch

    def waiting(self) -> AbstractContextManager[None]:
        """The consumer, who asks for a batch, waits inside."""
        self._was_asked = True
        return self._meter.waiting()

    def take(self, timeout_seconds: float | None) -> Made | None:
        """The next batch, which is not delivered yet, on any thread; None: there is none.

        Blocks, Raises: as `next`, for so long; the epoch goes on.
        """
        return None if self._stream.ended else self._pipeline.next(self._stream, timeout_seconds)

    def is_ready(self) -> bool:
        """Whether `take` would return at once. Begins what comes next; waits for nothing."""
        return self._stream.ended or self._pipeline.is_ready(self._stream)

    def deliver(self, made: Made | None) -> None:
        """Count a batch that the consumer gets now; None: it has come to the end.

        Raises: StopIteration: the end, also of what was taken since it ended. RuntimeError: as `next`.
        """
        if made is None or self._stream.ended or not self._is_in(made.epoch):
            if self._because is not None:
                raise RuntimeError(f"this epoch ended when {self._because}: iterate anew")
            self.has_stopped = True
            self.close()
            raise StopIteration
        made.epoch.deliver()
        self._meter.deliver(made)

    def fail(self) -> None:
        """The consumer gets an error in place of a batch, and no more."""
        self.close()
        self._epochs.came_to_error()

    def _is_in(self, epoch: Epoch) -> bool:
        """Have the loader's progress be in the epoch of a batch; False if another one took its place."""
        if epoch is self._epochs.progress:
            return True
        return self._pipeline.unless_ended(self._stream, partial(self._epochs.came_to, epoch))

    def close(self) -> None:
        """End the epoch: its batches are dropped, its snapshot is let go. Idempotent."""
        self.end()

    def end(self, because: str | None = None) -> None:
        """`close`, and if there is a reason, its consumer gets that in place of a StopIteration."""
        if not self._stream.ended:
            self._because = because
            if not self._was_asked:
                self._epochs.take_back(self._first)
        self._meter.end_run(self._run)
        self._pipeline.end(self._stream)  # once more, where Ctrl-C cut the first time short
        self._is_closed = True

    def __del__(self) -> None:
        # The garbage collector may be in a thread that has a lock: one that is closed asks for none.
        if not getattr(self, "_is_closed", True):  # nor one that Ctrl-C cut off before it was made
            self.close()
