"""Portion: batches of an epoch that are begun together; and one batch once it is made, with its counts.

Whoever makes a portion begins it (assembly.py, workers/remote.py); stream.py waits for it, or ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from arrowcache.reading.future import Future

if TYPE_CHECKING:
    from arrowcache.reading.epoch import Epoch
    from arrowcache.reading.packing import Within


class ReadyBatch(NamedTuple):
    """A batch ready for delivery, with its counts.

    `batch` is a dict of columns, or the result of a transform. `published` is the mean time at which its
    rows were published, in seconds since 1970. `epoch` made it. `steps` of its
    order are over with it: one, but for sequences of sequences.py, which also say how far the epoch is
    `within` a bundle.
    """

    batch: Any
    rows: int
    nbytes: int
    copied: int
    published: float
    epoch: Any
    steps: int = 1
    within: Within | None = None


class Portion:
    """Batches that were begun. One thread at a time calls its methods.

    In this base class nothing is under way: `made` makes the batches.
    """

    is_in_parts = False  # it has a second part, which `go_on` begins

    def __init__(self, epoch: Epoch, batches: int) -> None:
        self.epoch, self.batches = epoch, batches

    def take(self, seconds: float) -> bool:  # noqa: ARG002
        """Wait for its end, at most this many seconds. Returns: True if it has ended."""
        return True

    def go_on(self) -> None:
        """Begin its second part, if the first has ended; returns at once."""

    def made(self) -> Iterable[ReadyBatch]:
        """Yield the batches, once it has ended. Raises: an error of their making, after earlier batches."""
        return ()

    def cancel(self, seconds: float | None = None) -> bool:  # noqa: ARG002
        """End it as `Gather.cancel`: it touches nothing any more. Idempotent. 0 seconds: begin no more."""
        return True


class Elsewhere(Portion):
    """Batches that a worker thread or process makes.

    Args:
        finish: makes the batches of the result.
        keep: object kept alive until then.
    """

    def __init__(
        self,
        epoch: Epoch,
        batches: int,
        future: Future[Any],
        finish: Callable[[Any], Iterable[ReadyBatch]],
        keep: object = None,
    ) -> None:
        super().__init__(epoch, batches)
        self.future, self._finish, self._keep = future, finish, keep

    def take(self, seconds: float) -> bool:
        return self.future.wait(seconds)

    def made(self) -> Iterable[ReadyBatch]:
        future, self.future = self.future, _NOTHING  # an error's traceback has this frame: a cycle
        try:
            return self._finish(future.result())
        finally:
            del future

    def cancel(self, seconds: float | None = None) -> bool:  # noqa: ARG002
        self.future.cancel()
        return True


_NOTHING: Future[Any] = Future()
_NOTHING.set_result(None)
