"""Iterator: what a consumer holds of an epoch: it takes batches and is told how the epoch ends.

An epoch ends by exhaustion, `close()`, or being dropped: silently; by a newer one or a loaded state:
with an error in its consumer, which would take the part for the whole; by an error in place of a
batch. Any thread may end it, also while its consumer waits; what a step makes of that is decided in
one place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from arrowcache.reading.assembly import Batch
from arrowcache.reading.epoch import Epoch, Epochs
from arrowcache.reading.pipeline import Pipeline, Stream
from arrowcache.reading.stats import Meter


class EpochIterator:
    """The batches of one epoch, or of all that follow. Nothing that makes batches refers to it.

    Args:
        stream, pipeline: where batches come from.
        epochs: told which one is delivered.
        meter, run: told what was delivered, the waiting, and when the run ends.
        timeout_seconds: how long a step waits; None: for ever.
        finish: the last touch of each batch, by the loader, which so lives as long as this.
    """

    def __init__(
        self,
        stream: Stream,
        pipeline: Pipeline,
        epochs: Epochs,
        meter: Meter,
        run: object,
        timeout_seconds: float | None,
        finish: Callable[[Batch], Batch],
    ) -> None:
        self._stream, self._pipeline = stream, pipeline
        self._epochs, self._meter, self._run = epochs, meter, run
        self._timeout_seconds, self._finish = timeout_seconds, finish
        self._because: str | None = None  # it was cut short, which its consumer must know
        self.has_stopped = False

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Blocks: until it is made, at most the loader's timeout.
        Raises: LoaderTimeoutError; what a transform raised; RuntimeError: a newer epoch began, or a
            state was loaded, also while this waits.
        """
        made = None
        if not self._stream.ended:
            try:
                with self._meter.waiting():
                    made = self._pipeline.next(self._stream, self._timeout_seconds)
            except BaseException:
                self.close()
                self._epochs.came_to_error()
                raise
        if made is None or not self._is_in(made.epoch):
            if self._because is not None:
                raise RuntimeError(f"this epoch ended when {self._because}: iterate anew")
            self.has_stopped = True
            self.close()
            raise StopIteration
        try:
            batch = self._finish(made.batch)
        except BaseException:
            self.close()
            raise
        made.epoch.delivered += 1  # now nothing comes between it and its consumer
        self._meter.deliver(made)
        return batch

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
        self._meter.end_run(self._run)
        self._pipeline.end(self._stream)  # once more, where Ctrl-C cut the first time short

    def __del__(self) -> None:
        self.close()
