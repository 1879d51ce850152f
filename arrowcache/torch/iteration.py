"""Iteration: one pass over a source of batches: the thread that sends them, and the queue to the consumer.

Guarantees: batches and exceptions arrive in the order of the source, an exception with its own
traceback, where its batch would have been; at most `depth` batches are on the device and not yet
handed over; whichever side ends, what was not handed over is taken back, and the thread ends.

`run` and what it calls are the thread's, `close`, `join` and `end` anyone's, all else the consumer's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from arrowcache.reading.stream import too_late
from arrowcache.torch.copier import Copier, Sent
from arrowcache.torch.structure import split

JOIN_SECONDS = 5.0
_GRACE_SECONDS = 0.5  # for a source that itself waits so long, and then says better what for


@dataclass(slots=True, eq=False)
class Iteration:
    """What the thread and the consumer of one iteration share."""

    source: Iterator[Any] | None
    copiers: list[Copier]
    depth: int
    interrupt: Callable[[], None] | None
    is_ours: bool = field(kw_only=True)
    is_split: bool = field(kw_only=True)
    changed: threading.Condition = field(default_factory=threading.Condition)  # reentrant: see `end`
    ready: deque[list[Sent]] = field(default_factory=deque)
    on_device: int = 0  # sent, or being sent, and not yet handed over
    taken: list[Sent] | None = None  # being handed over
    error: BaseException | None = None
    exhausted: bool = False
    ended: bool = False
    because: str | None = None
    finished: bool = False
    closes: bool = False  # the thread closes the copiers at its end
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.run, name="arrowcache-device", daemon=True)

    def collect(self) -> None:
        """Before the consumer gets more: what it was given until now is what it was given it for."""
        for copier in self.copiers:
            copier.buffers.collect()

    def next(self, timeout_seconds: float | None) -> list[Sent]:
        """The next batch on its way.

        Raises: StopIteration: there is none. LoaderTimeoutError. What the source raised; RuntimeError: the
            iteration was ended by a newer one.
        """
        with self.changed:
            patience = None if timeout_seconds is None else timeout_seconds + _GRACE_SECONDS
            if not self.changed.wait_for(lambda: self.ready or self.exhausted or self.ended, patience):
                assert timeout_seconds is not None
                raise too_late(timeout_seconds)
            if self.because is not None:
                raise RuntimeError(f"this iteration ended when {self.because}: iterate anew")
            if self.ready and not self.ended:
                self.taken = self.ready.popleft()
                return self.taken
            error, self.error = self.error, None
        try:
            raise StopIteration if error is None else error
        finally:
            del error  # its traceback has this frame

    def receive(self, sent: list[Sent]) -> Any:
        """A batch on its way, handed over; there is room for another then."""
        parts = [copier.receive(part) for copier, part in zip(self.copiers, sent, strict=True)]
        with self.changed:
            self.taken = None
            self.on_device -= 1
            self.changed.notify_all()
        return parts if self.is_split else parts[0]

    def give_up(self) -> None:
        """The consumer's step failed, or was interrupted: the thread takes back what it had."""
        with self.changed:
            if self.taken is not None:
                self.ready.appendleft(self.taken)
                self.taken = None
        self.end()

    def end(self, because: str | None = None) -> None:
        """Have the thread stop. Takes no lock but its own: the garbage collector may call it anywhere."""
        with self.changed:
            if self.ended:
                return
            self.ended, self.because = True, because
            self.changed.notify_all()
        if self.interrupt is not None:
            self.interrupt()

    def close(self, seconds: float) -> bool:
        """End; whether all has come to its end in time, else the thread closes the copiers itself."""
        self.end()
        self.join(seconds)
        with self.changed:
            self.closes = not self.finished
            return self.finished

    def join(self, seconds: float | None) -> None:
        """Wait for the thread."""
        if threading.current_thread() is not self.thread:  # it may drop the last reference itself
            self.thread.join(seconds)

    def run(self) -> None:
        """The thread: from source to device until either side ends."""
        try:
            while self.has_room():
                batch = next(self.source)  # type: ignore[arg-type]
                self.send(batch)
                del batch
        except StopIteration:
            pass
        except BaseException as error:  # noqa: BLE001  # whatever it is, the consumer gets it
            self.error = error
        with self.changed:
            self.exhausted = True
            self.changed.notify_all()
        try:
            self.let_go()
        except BaseException as error:  # noqa: BLE001  # of the source's close, or of the device
            self.error = self.error or error
        with self.changed:
            if self.ended:  # nobody will ask, and its traceback knows this thread's batches
                self.error = None
            self.finished = True
            if not self.closes:
                return
        for copier in self.copiers:
            copier.close()

    def has_room(self) -> bool:
        """Wait for room for a batch; False: nobody wants one."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended or self.on_device < self.depth)
            return not self.ended

    def send(self, batch: Any) -> None:
        parts = split(batch, len(self.copiers)) if self.is_split else [batch]
        sent: list[Sent] = []
        try:
            for copier, part in zip(self.copiers, parts, strict=True):
                sent.append(copier.send(part))
        except BaseException:
            for copier, done in zip(self.copiers, sent, strict=False):
                copier.drop(done)
            raise
        with self.changed:
            self.on_device += 1
            self.ready.append(sent)
            self.changed.notify_all()

    def let_go(self) -> None:
        """Let go of the source; once the consumer has all, or wants no more, take back what is left."""
        source, self.source = self.source, None
        try:
            if self.is_ours and callable(close := getattr(source, "close", None)):
                close()
        finally:
            source = close = None
            for copier in self.copiers:
                copier.rest()
            with self.changed:
                self.changed.wait_for(lambda: self.ended or not self.on_device)
                self.changed.wait_for(lambda: self.taken is None, JOIN_SECONDS)
                left = list(self.ready)
                self.ready.clear()
            for sent in left:
                for copier, part in zip(self.copiers, sent, strict=True):
                    copier.drop(part)
            for copier in self.copiers:
                copier.rest()
