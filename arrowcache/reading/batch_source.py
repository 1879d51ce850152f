"""Batch source: where the batches of every loader come from, its consumer's iterator, and how both end.

`BatchSource` owns the rules of taking, delivering and ending. `BatchStream` is that of all loaders; iterators
wrap one. A batch counts once it is delivered: one that was taken ahead, such as for a device, was not if the
epoch ends before.

An iterator keeps its loader alive. Dropping it, as `break` does, or closing it ends the source silently. An
epoch that others cut short raises in its consumer: a StopIteration would show a part of it as the whole. So
does a StopIteration of the user's own functions. An error in place of a batch comes once, then a
StopIteration, as from a generator.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from arrowcache.lifetimes import Origin, exit_has_begun, until_exit
from arrowcache.reading.assembly import Batch, ReadyBatch

if TYPE_CHECKING:
    from arrowcache.reading.stats import Meter

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


class BatchSource(ABC):
    """The batches of an epoch, or of all that follow. One thread at a time takes them; any may end it.

    A subclass makes batches in `_take` and `_look`. Only the thread that is inside touches what is under way:
    the consumer, else the thread that ends the source. So whoever ends it, all is abandoned, once.

    Batches that were made together wait in `ready`. While nothing else is due, `next` is a pop, and no wait.
    """

    _what = "epoch"  # to its consumer

    def __init__(self, meter: Meter | None) -> None:
        self.was_asked = False  # for a batch
        self.has_stopped = False  # its consumer knows
        self.has_ended = False
        self._is_closed = False  # all that it had is released
        self._was_interrupted = False  # by Ctrl-C: nothing under way is waited for
        self._counted_by = meter  # None: nothing is counted
        self._waiting = nullcontext() if meter is None else meter.waiting()
        self.origin = Origin()
        self._lock = threading.RLock()  # reentrant: the garbage collector may end a source anywhere
        self.inside = 0  # the thread that makes batches, or abandons them
        self._because: str | None = None  # why it was cut short: the error that its consumer gets
        self.ready: deque[ReadyBatch] = deque()
        self.at_once = 0  # of the ready ones: as many go before anything else is due

    def require_own(self) -> None:
        """Raises: ValueError: this process was forked from the one that makes the batches."""
        self.origin.require("this epoch", "iterate anew here")

    def next(self, timeout_seconds: float | None) -> ReadyBatch | None:
        """Return the next batch, not delivered yet, or None at the end. A wait for it is counted.

        Raises: LoaderTimeoutError: none came in time. Any error of its making. RuntimeError: a function of
            the user raised StopIteration. As `require_own`.
        """
        if self.at_once:
            self.at_once -= 1
            try:
                return self.ready.popleft()
            except IndexError:
                pass  # another thread has ended it
        self.was_asked = True
        try:
            with self._waiting:
                self.require_own()
                if not self._enter():
                    return None
                try:
                    return self._take(timeout_seconds)
                except KeyboardInterrupt:
                    self._was_interrupted = True
                    raise
                finally:
                    self._leave()
        except StopIteration as error:
            raise RuntimeError(STOPPED) from error

    def is_ready(self) -> bool:
        """True if `next` would return at once, as far as is known. Waits for nothing, not even rows."""
        if self.at_once or not self.origin.is_here or not self._enter():
            return True
        try:
            return self._look()
        except KeyboardInterrupt:
            self._was_interrupted = True
            raise
        finally:
            self._leave()

    def deliver(self, made: ReadyBatch | None) -> None:
        """Count a batch that the consumer gets now, or, with None, the end.

        Raises: StopIteration: it has ended, also after `next`. RuntimeError: it was cut short.
        """
        if made is None or self.has_ended:
            if self._because is not None and not self._is_whole():
                raise cut_short(self._because, self._what)
            self.has_stopped = True
            self.close()
            raise StopIteration
        self._count(made)
        if self._counted_by is not None:
            self._counted_by.deliver(made)

    def close(self, because: str | None = None, error: type[BaseException] | None = None) -> None:
        """End it: drop its batches, release what it owns. Idempotent; completes an interrupted close.

        Args:
            because: its consumer gets this reason in place of a StopIteration. None: it closed this itself.
            error: the error that its consumer gets in place of a batch. GeneratorExit: the consumer is gone,
                so nobody is told of the end.
        """
        if error is GeneratorExit:
            # The garbage collector may call this in a thread that holds a lock: closing twice takes none.
            if self._is_closed:
                return
            self.has_stopped = True
        elif error is not None and self.inside == threading.get_ident():  # Ctrl-C came as it left
            self.inside = 0
        if not self.has_ended:
            self._because = because
        if self._counted_by is not None:
            self._counted_by.end_run(self)
        if not self.origin.is_here:  # locks may be held for ever in a forked child
            self.has_ended = self._is_closed = True
            return
        is_mine = False
        try:
            with self._lock:
                self.has_ended = True
                is_mine = not self.inside
                if is_mine:
                    self.inside = threading.get_ident()
            if is_mine:  # else the thread inside abandons them as it leaves
                self._abandon()
        finally:
            if is_mine:
                self.inside = 0
        self._release()
        self._is_closed = True

    def _enter(self) -> bool:
        """Make this thread the one inside. Returns: False: it has ended."""
        with self._lock:
            if self.has_ended:
                return False
            self.inside = threading.get_ident()
            return True

    def _leave(self) -> None:
        with self._lock:
            is_over = self.has_ended
            if not is_over:
                self.inside = 0
        if is_over:
            self._abandon()
            self.inside = 0

    @abstractmethod
    def _take(self, timeout_seconds: float | None) -> ReadyBatch | None:
        """Return the next batch, or None at the end."""

    @abstractmethod
    def _look(self) -> bool:
        """Begin what may begin. Returns: True if `_take` would return at once."""

    @abstractmethod
    def _count(self, made: ReadyBatch) -> None:
        """Count a batch as delivered."""

    @abstractmethod
    def _is_whole(self) -> bool:
        """True if all batches were delivered: then nobody cut it short."""

    @abstractmethod
    def _abandon(self) -> None:
        """Drop all batches, made or under way: no other thread is inside. Idempotent."""

    @abstractmethod
    def _release(self) -> None:
        """Release what the source owns beside its batches. Idempotent. Another thread may be inside."""


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

    def __init__(
        self, source: BatchSource, timeout_seconds: float | None, finish: Callable[[Any], Any]
    ) -> None:
        self._source, self._timeout_seconds, self._finish = source, timeout_seconds, finish
        self._turn = threading.RLock()
        self._ahead: deque[ReadyBatch] = deque()  # without their columns; taken by whoever wraps this

    def __next__(self) -> Batch:
        """The next batch.

        Blocks: until the batch is made, at most the loader's timeout.
        Raises: LoaderTimeoutError; the error of a transform; RuntimeError: a newer epoch began, a state was
            loaded, or the loader was closed, also while this waits.
        """
        if not self._source.origin.is_here:  # first: in a forked child the turn may be taken for ever
            self._source.require_own()
        with self._turn:
            try:
                made, batch = self.take()
            except BaseException as error:
                self.close(type(error))
                raise
            if self._ahead:
                self.deliver(0)
            self._source.deliver(made)  # raises at the end; nothing comes between it and its consumer
            return batch

    def take(self) -> tuple[ReadyBatch | None, Batch]:
        """Return the next batch, not delivered yet, or None at the end; and what its consumer gets.

        Blocks, Raises: as `next`. Whoever takes closes this behind an error: batches that were taken before
        may still be delivered.
        """
        made = self._source.next(self._timeout_seconds)
        return made, {} if made is None else self._finish(made.batch)

    def is_ready(self) -> bool:
        """True if `take` would return at once, as far as is known."""
        return self._source.is_ready()

    def take_ahead(self) -> ReadyBatch | None:
        """`take` a batch that `deliver` counts, or what is delivered after it, if it is dropped."""
        made, batch = self.take()
        if made is None:
            return None
        self._ahead.append(made._replace(batch={}))
        return made._replace(batch=batch)

    def deliver(self, ahead: int) -> None:
        """Count what was taken ahead as handed out, but the last `ahead` batches. Raises: as of a source."""
        while len(self._ahead) > ahead:
            self._source.deliver(self._ahead.popleft())

    def end(self) -> NoReturn:
        """Raise the StopIteration of the end, or the error that says why it was cut short."""
        self.deliver(0)
        self._source.deliver(None)
        raise StopIteration

    def close(self, error: type[BaseException] | None = None) -> None:
        """End the epoch. `error`: it came in place of a batch."""
        self._source.close(error=error)

    @until_exit
    def __del__(self) -> None:
        if (source := getattr(self, "_source", None)) is not None:  # missing if Ctrl-C came before it was set
            source.close(error=GeneratorExit)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an iterator over a Loader cannot be pickled or copied: its batches are under way here; pass on "
            "the Loader, or its state_dict()"
        )
