"""Iterator: a consumer's handle of a stream of batches, and what it is told at the end. For all loaders.

An iterator keeps its loader alive. Dropping it, as `break` does, or closing it ends the stream silently. An
epoch that others cut short raises in its consumer: a StopIteration would show a part of it as the whole. So
does a StopIteration of the user's own functions. An error in place of a batch comes once, then a
StopIteration, as from a generator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from arrowcache.lifetimes import exit_has_begun, until_exit
from arrowcache.reading.assembly import Batch
from arrowcache.reading.portion import ReadyBatch

#: Why an epoch was cut short.
NEWER: Final = "a newer one began"
LOADED: Final = "a state was loaded"
CLOSED: Final = "the loader was closed"

STOPPED: Final = "a function such as the transform raised StopIteration, which would end the epoch"


def cut_short(because: str, what: str = "epoch") -> BaseException:
    """Return the error of a consumer whose epoch ended before its last batch, by another one's act.

    As the interpreter exits it is SystemExit: the consumer is a daemon thread, which ends without a
    traceback.
    """
    if exit_has_begun():
        return SystemExit(f"this {what} ended when the interpreter did")
    if because in (NEWER, LOADED):
        return RuntimeError(f"this {what} ended when {because}: iterate anew")
    return RuntimeError(
        f"this {what} ended when {because}, before its last batch: leave the loop first, or close after it"
    )


class Stream(Protocol):
    """A source of the batches of an epoch, or of all that follow: see `stream.BatchStream`."""

    def require_own(self) -> None: ...
    def waiting(self) -> AbstractContextManager[None]: ...
    def take(self, timeout_seconds: float | None) -> ReadyBatch | None: ...
    def is_ready(self) -> bool: ...
    def deliver(self, made: ReadyBatch | None) -> None: ...
    def fail(self) -> None: ...
    def drop(self) -> None: ...
    def close(self, because: str | None = None) -> None: ...


def next_of(stream: Stream, timeout_seconds: float | None) -> ReadyBatch | None:
    """Return a stream's next batch, which is not delivered yet, or None at its end. Counts as a wait.

    Raises: as `BatchStream.take`. RuntimeError: a function of the user raised StopIteration.
    """
    try:
        with stream.waiting():
            return stream.take(timeout_seconds)
    except StopIteration as error:
        raise RuntimeError(STOPPED) from error


class Batches(Iterator[Batch], Protocol):
    """An iterator of batches; dropping or closing it ends the epoch."""

    def close(self) -> None:
        """End the epoch: drop its batches, release its snapshot. Idempotent."""


class EpochIterator(Iterator[Batch]):
    """The batches of one epoch, or of all that follow. Nothing that makes batches refers to it.

    Threads that share it take turns: each batch goes to one of them.

    Args:
        finish: converts each batch; a method of the loader, which so lives as long as this.
    """

    def __init__(self, stream: Stream, timeout_seconds: float | None, finish: Callable[[Any], Any]) -> None:
        self._stream, self._timeout_seconds, self._finish = stream, timeout_seconds, finish
        self._turn = threading.RLock()

    def __next__(self) -> Batch:
        """The next batch.

        Blocks: until the batch is made, at most the loader's timeout.
        Raises: LoaderTimeoutError; the error of a transform; RuntimeError: a newer epoch began, a state was
            loaded, or the loader was closed, also while this waits.
        """
        self._stream.require_own()  # first: in a forked child the turn may be taken for ever
        with self._turn:
            return self._next(self._stream)

    def _next(self, stream: Stream) -> Batch:
        try:
            made = next_of(stream, self._timeout_seconds)
        except BaseException:
            stream.fail()
            raise
        try:
            batch = {} if made is None else self._finish(made.batch)
        except BaseException:
            stream.close()
            raise
        stream.deliver(made)  # now nothing comes between it and its consumer
        return batch

    def close(self) -> None:
        self._stream.close()

    @until_exit
    def __del__(self) -> None:
        if (stream := getattr(self, "_stream", None)) is not None:  # missing if Ctrl-C came before it was set
            stream.drop()
