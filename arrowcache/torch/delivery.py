"""Delivery: an epoch of a loader as the source of an iteration over devices.

Batches are taken of the epoch ahead, as far as they are ready. They count as delivered when the consumer gets
them. Batches on their way when an epoch ends are dropped, and were never delivered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from arrowcache.reading.iterator import Stream, next_of
from arrowcache.reading.portion import ReadyBatch


class Delivery:
    """A source of batches: see `iteration.BatchSource`. It ends its epoch when the iteration ends.

    Args:
        stream: makes the batches of one epoch, or of all that follow.
        finish: makes tensors of a batch; a method of the loader, which so lives as long as this.
    """

    def __init__(self, stream: Stream, timeout_seconds: float | None, finish: Callable[[Any], Any]) -> None:
        self._stream, self._timeout_seconds, self._finish = stream, timeout_seconds, finish

    def next(self) -> tuple[Any, ReadyBatch]:
        """Raises: LoaderTimeoutError. The error of a transform."""
        made: Any = next_of(self._stream, self._timeout_seconds)
        if made is None:
            raise StopIteration
        return self._finish(made.batch), made._replace(batch={})

    def is_ready(self) -> bool:
        return self._stream.is_ready()

    def deliver(self, receipt: ReadyBatch | None) -> None:
        self._stream.deliver(receipt)

    def close(self, error: type[BaseException] | None, because: str | None = None) -> None:
        if error is None:
            self._stream.close(because)
        elif error is GeneratorExit:
            self._stream.drop()
        else:
            self._stream.fail()
