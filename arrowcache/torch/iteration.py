"""Iteration: one pass over a source, whose batches are lent on devices. Its consumer drives it.

Each step takes the ready batches of the source, begins their copies, and lends the oldest. An iteration ends
by exhaustion, an error, `close`, a newer one, or when its consumer drops it. An ended iteration holds no
batch, and has closed its source.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from arrowcache.lifetimes import until_exit
from arrowcache.limits import Limits
from arrowcache.torch.deferred import keep
from arrowcache.torch.lane import Course, Flight, Lane
from arrowcache.torch.structure import split


class BatchSource(Protocol):
    """A source of batches, which learns of their delivery."""

    def next(self) -> tuple[Any, Any]:
        """Return the next batch and its receipt. Blocks: until ready. Raises: StopIteration: none left."""

    def is_ready(self) -> bool:
        """True if `next` would not wait, as far as is known."""

    def deliver(self, receipt: Any) -> None:
        """Count the batch of a receipt as delivered, or, with None, the end.

        Raises: the consumer's error, such as that of a source that was cut short.
        """

    def close(self, error: type[BaseException] | None, because: str | None = None) -> None:
        """End the source. Idempotent.

        Args:
            error: the error that its consumer gets in place of a batch. GeneratorExit: the consumer is gone.
                None: the consumer saw the end, or somebody closed this.
            because: why it is cut short, which `deliver(None)` then raises. None: it is not.
        """


@dataclass(slots=True)
class DeliveryCounts:
    """Counts of an iteration: batches that were lent, seconds of stall and of waits for a device."""

    batches: int = 0
    stall_seconds: float = 0.0
    device_seconds: float = 0.0


class Iteration(Iterator[Any]):
    """The consumer's iterator over the batches of one pass.

    Args:
        alone: calls a function while only this thread uses the lanes, or raises an error that says why not.
            It keeps their owner alive.
        is_split: True if each device gets a part of each batch; a list of the parts is lent.
    """

    def __init__(
        self,
        source: BatchSource,
        lanes: Sequence[Lane],
        alone: Callable[[Callable[[], Any]], Any],
        depth: int,
        counts: DeliveryCounts,
        *,
        is_split: bool,
    ) -> None:
        self._course = Course()
        self._calls = 0
        self._fetched: tuple[list[Flight], Any] | None = None  # with copies to begin, and receipt
        self._flights: deque[tuple[list[Flight], Any]] = deque()
        self._error: Exception | None = None  # of the source, or its end: raised after earlier batches
        self._is_inside = False  # a thread is in `__next__`
        self._because: str | None = None
        self._lanes, self._alone, self._depth, self._counts = lanes, alone, depth, counts
        self._is_split = is_split
        self._source = source

    def __next__(self) -> Any:
        """Return the next batch, on the device; a list with one part a device, if there are several.

        Blocks: until the source has made the batch and its copy was begun; not for the copy itself. If no
            copy is in flight, and the device still works on earlier copies, until they are over.
        Raises: StopIteration. Errors of the source. OutOfMemoryError. RuntimeError: a newer iteration, or
            `close` of the prefetcher or its loader, ended this one. The iteration has ended after any of
            these. RuntimeError: a graph is captured, or another thread takes a batch: it can go on then.
        """
        return self._alone(self._step)

    def close(self, because: str | None = None) -> None:
        """End the iteration: drop batches that were not delivered. Does not wait. Idempotent.

        Calls no device: any thread may call it, and the garbage collector.

        Args:
            because: its consumer gets this reason in place of a StopIteration. None: it closed this itself.
        Raises: errors of the source's `close`.
        """
        if not self._course.has_ended:
            self._because = because
        self._course.has_ended = True
        if not self._is_inside:  # else that thread cleans up
            self._let_go(None)

    @until_exit
    def __del__(self) -> None:
        if hasattr(self, "_source"):
            self._course.has_ended = True
            self._let_go(GeneratorExit)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an iteration over a DevicePrefetcher cannot be pickled or copied")

    def _step(self) -> Any:
        failed: type[BaseException] | None = None
        try:
            self._is_inside = True
            return self._next()
        except BaseException as error:
            if not self._course.has_ended:
                self._course.has_ended, failed = True, type(error)
            raise
        finally:
            self._is_inside = False
            if self._course.has_ended:
                with suppress(Exception):  # the source's error; its consumer has one already, or the end
                    self._let_go(failed)

    def _next(self) -> Any:
        if self._course.has_ended:
            self._stop()
        self._calls += 1
        for lane in self._lanes:
            lane.collect()
        self._fill(1 + min(self._calls - 1, self._depth))
        if self._course.has_ended or not self._flights:  # another thread's end: flights may be overwritten
            self._stop()
        flights, receipt = self._flights[0]
        batch = [lane.lend(flight) for lane, flight in zip(self._lanes, flights, strict=True)]
        self._flights.popleft()
        self._counts.batches += 1
        try:
            self._source.deliver(receipt)
        except BaseException:
            self._course.has_ended = True
            raise
        return batch if self._is_split else batch[0]

    def _stop(self) -> NoReturn:
        error, self._error = self._error, None
        try:
            if error is not None and not isinstance(error, StopIteration):
                raise error
        finally:
            del error  # its traceback has this frame
        self._course.has_ended = True
        if self._because is not None:
            self._source.close(None, self._because)
        self._source.deliver(None)
        raise StopIteration

    def _let_go(self, error: type[BaseException] | None) -> None:
        if not self._lanes[0].origin.is_here:
            keep(self._fetched, [*self._flights])
        self._fetched = self._error = None
        self._flights.clear()
        self._source.close(error, self._because)

    def _fill(self, target: int) -> None:
        """Fill the flights up to `target`, as far as the device and the source are ready."""
        while len(self._flights) < target:
            if self._fetched is None:
                if self._error is not None or (self._flights and not self._source.is_ready()):
                    return
                self._fetch()
            elif self._send(self._fetched[0]):
                self._flights.append(self._fetched)
                self._fetched = None
            else:
                return

    def _fetch(self) -> None:
        started = Limits.current.clock()
        try:
            try:
                batch, receipt = self._source.next()
            finally:
                self._counts.stall_seconds += Limits.current.clock() - started
            parts = split(batch, len(self._lanes)) if self._is_split else [batch]
            flights = [lane.take(part) for lane, part in zip(self._lanes, parts, strict=True)]
            self._fetched = flights, receipt
        except StopIteration:
            self._error = StopIteration()  # the traceback of the other one has this frame
        except Exception as error:  # noqa: BLE001  # such as a leaf that would lose its values
            self._error = error

    def _send(self, flights: Sequence[Flight]) -> bool:
        """Begin the copies to each device. Returns: False: not now, but others are in flight."""
        for lane, flight in zip(self._lanes, flights, strict=True):
            try:
                while flight.plan is None and not lane.send(flight, self._course):
                    if self._flights:
                        return False
                    self._wait_for(lane)
            except torch.OutOfMemoryError:
                if not self._flights:
                    raise
                return False
        return True

    def _wait_for(self, lane: Lane) -> None:
        started = Limits.current.clock()
        try:
            lane.wait()
        finally:
            self._counts.device_seconds += Limits.current.clock() - started
