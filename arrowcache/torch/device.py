"""DevicePrefetcher: takes the next batches to a device while this one trains.

`DevicePrefetcher` is the face for users; an `Iteration` is one pass over a source. Each step takes the
ready batches of the source, begins their copies, and lends the oldest; device_copier.py copies them. The
consumer's own calls of `next` drive both: there is no thread.

Guarantees: kept batches are not overwritten. Streams, slots and device memory live as long as the
prefetcher, over all its iterations. It never synchronizes the device. An iteration ends by exhaustion,
`break`, an exception, a newer one, `close` or the interpreter's exit. An ended iteration holds no batch,
and has closed its source.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from arrowcache.arguments import face
from arrowcache.lifetimes import Closable, at_exit, call_all, until_exit
from arrowcache.limits import Limits
from arrowcache.reading.assembly import ReadyBatch
from arrowcache.reading.batch_source import NEWER, BatchSource, EpochIterator
from arrowcache.torch.backend import Backend, backend_of
from arrowcache.torch.device_copier import (
    DeviceCopier,
    InFlightBatch,
    IterationEnd,
    ThreadLock,
    close_copier,
    defer,
    keep,
    tidy,
)
from arrowcache.torch.structure import split
from arrowcache.units import parse_count

Device = str | int | torch.device

CLOSE_SECONDS = 5.0  # longest wait of `close` for a device
_MAX_DEPTH = 1024
_CLOSED = "the prefetcher is closed: make a new one"
_CLOSING = "the prefetcher was closed"
_FORKED = "this prefetcher", "make a new one here"
_FORKED_EPOCH = "this epoch", "iterate anew here"

_open: weakref.WeakSet[DevicePrefetcher] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class PrefetcherStats:
    """Counts of a prefetcher since it was made.

    `batches` and `bytes` count lent batches; all devices' parts of a step are one batch.
    `stall_seconds` is the time that the consumer waited for the source, `device_seconds` the time that it
    waited for earlier copies of a device. `device_bytes` is the reused memory for batches on the
    devices, `device_allocations` the number of its allocations: `depth + 2` times at first
    for each leaf of 1 MiB and more, and for the smaller ones together, then no more, unless batches are kept,
    or grow.
    `pinned_bytes` is host memory for copies of small leaves, or of leaves not pinned already.
    """

    batches: int
    bytes: int
    stall_seconds: float
    device_bytes: int
    device_allocations: int
    pinned_bytes: int
    device_seconds: float = 0.0


class DevicePrefetcher(Closable):
    """Batches of any iterable, on a device: each `for` iterates over it anew.

    Args:
        iterable: batches: a loader of this library, a torch DataLoader, a list, a generator. `next` takes
            batches of it, ahead, in the consumer's thread.
        device: such as "cuda", "cuda:1", 0, "xpu" or "cpu"; without an index, the current one of its kind.
        depth: batches on the device, or on their way, beside the one in use; at least 1. Device memory
            is that of depth + 2 batches, pinned memory that of depth + 1 batches.
        devices: several in place of one: each batch is split along dimension 0 into nearly equal parts,
            and a list of one part a device is yielded.

    A batch may be a tensor, a NumPy array, or any nesting of dicts and other mappings, lists, tuples,
    NamedTuples, dataclasses and TensorDicts of them, and comes back in the same form. Tensors and
    arrays of numbers become tensors of the same dtype, shape and order in memory, over reused
    memory that is not overwritten while a view of it lives: they are safe to keep, and kept batches
    make the memory grow. Each is a tensor of its own, and no view; leaves under 1 MiB lie side by side in
    memory that is released when the last of them is. Jagged nested tensors stay such. Tensors of another kind
    (sparse, quantized, of numbers of less than a byte, of a subclass, of autograd) and other objects with a
    `to` method are moved by that method, when their batch is handed over. All other objects pass unchanged.

    Tensors are ready for the stream that is current when they are handed over. So are tensors that a source
    made on the device, if they were ready for the stream that was current then. Work on another stream must
    wait for the current one, and the current one for that work before the batch is released:
    `Tensor.record_stream` has no effect on them. They cannot be resized in place. While a CUDA graph is
    captured, `next` raises RuntimeError, and nothing else calls the device. On the CPU batches are copied,
    too, so that they are safe to keep, whatever the source does. Elsewhere pinned tensors are copied from
    where they are, while the source goes on: it must not write into them again.

    Only one iteration is in progress, in one thread at a time: a newer one ends it with a RuntimeError in its
    consumer.
    Raises: ValueError, TypeError: a device that does not exist, a depth that does not fit.
    """

    @face("DevicePrefetcher")
    def __init__(
        self,
        iterable: Iterable[Any],
        device: Device | None = None,
        depth: int = 2,
        devices: Sequence[Device] | None = None,
    ) -> None:
        if (device is None) == (devices is None):
            raise ValueError("give one of device= and devices=, such as device='cuda'")
        if devices is not None and (isinstance(devices, str) or not isinstance(devices, Sequence)):
            raise TypeError(f"devices={devices!r} must be a list such as ['cuda:0', 'cuda:1']")
        wanted = [device] if devices is None else list(devices)
        if not wanted:
            raise ValueError("devices=[] names none: give a list such as ['cuda:0', 'cuda:1']")
        if not isinstance(iterable, Iterable) and not hasattr(iterable, "__getitem__"):
            raise TypeError(f"a {type(iterable).__name__} is no iterable of batches")
        self._depth = parse_count(depth, "depth", most=_MAX_DEPTH)
        self._is_split = devices is not None
        self._setup(iterable, [backend_of(each) for each in wanted])

    def _setup(self, iterable: Iterable[Any], backends: Sequence[Backend]) -> None:
        self._iterable = iterable
        self._copiers = [DeviceCopier(backend, self._depth) for backend in backends]
        self._iteration: Callable[[], Iteration | None] = lambda: None  # a weak reference
        self._counts = DeliveryCounts()
        self._lock = ThreadLock()
        self._closed = False
        _open.add(self)

    def __iter__(self) -> Iteration:
        """Iterate over the source anew. An iteration still in progress ends.

        Raises: whatever `iter` of the source raises; ValueError: the prefetcher is closed.
        """
        self._begin()
        iterator = iter(self._iterable)
        source = Iterated(iterator, is_ours=iterator is not self._iterable)
        return self.over(source, None, as_it_is, _FORKED)

    def over(
        self,
        source: BatchSource,
        timeout_seconds: float | None,
        finish: Callable[[Any], Any],
        forked: tuple[str, str] = _FORKED_EPOCH,
    ) -> Iteration:
        """Iterate over an epoch of a loader, in the same memory. Raises: as `iter`.

        Args:
            finish: makes tensors of a batch; a method of the loader, which so lives as long as the iteration.
            forked: what a forked child cannot use, and what to do there.
        """
        self._begin()
        iteration = Iteration(
            source,
            timeout_seconds,
            finish,
            self._copiers,
            partial(self._alone, forked),
            self._depth,
            self._counts,
            is_split=self._is_split,
        )
        self._iteration = weakref.ref(iteration)
        return iteration

    def __len__(self) -> int:
        """Return the length of the iterable. Raises: TypeError: it has none."""
        return len(self._iterable)  # type: ignore[arg-type]

    @property
    def devices(self) -> list[torch.device]:
        """The devices of the batches."""
        return [copier.backend.device for copier in self._copiers]

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return (nbytes,) on the host, for the package's own use.

        Arrays over it go to the (first) device without another copy.
        """
        return self._copiers[0].backend.host_memory(nbytes).numpy()

    def stats(self) -> PrefetcherStats:
        """Return counts of lent batches, and of the memory for them."""
        return PrefetcherStats(
            batches=self._counts.batches,
            bytes=sum(copier.lent_bytes for copier in self._copiers),
            stall_seconds=self._counts.stall_seconds,
            device_bytes=sum(copier.device_bytes for copier in self._copiers),
            device_allocations=sum(copier.allocations for copier in self._copiers),
            pinned_bytes=sum(copier.pinned_bytes for copier in self._copiers),
            device_seconds=self._counts.device_seconds,
        )

    def close(self) -> None:
        """End the iteration, and release all memory but that of kept batches. Idempotent.

        Memory that a device still reads, or all of it while a graph is captured, is released by the next call
        of any prefetcher. A thread in `next` does this at its end.
        Blocks: until devices are done with copies, at most 5 s for each.
        Raises: the last error of the source's `close`, or of a device; all else was released.
        """
        self._closed = True
        _open.discard(self)
        iteration = self._iteration()
        calls: list[Callable[[], None]] = [] if iteration is None else [partial(iteration.close, _CLOSING)]
        if self.is_inherited() or not self._lock.take():
            call_all(calls)
            return
        try:
            call_all([*calls, *(partial(close_copier, copier, CLOSE_SECONDS) for copier in self._copiers)])
        finally:
            self._lock.leave()

    def is_inherited(self) -> bool:
        """True if this process was forked from the one that made the copiers."""
        return not self._copiers[0].origin.is_here

    def _alone(self, forked: tuple[str, str], step: Callable[[], Any]) -> Any:
        """Call a step that takes a batch, while no other thread takes one.

        Args:
            forked: what a forked child cannot use, and what to do there.
        """
        self._copiers[0].origin.require(*forked)
        if not self._lock.take():
            raise RuntimeError("another thread is in `next` of this prefetcher: one at a time takes batches")
        try:
            if any([copier.backend.is_capturing() for copier in self._copiers]):  # noqa: C419  # quicker
                raise RuntimeError(
                    "a graph is being captured, and no batch can come meanwhile: take it before, and copy it "
                    "into the graph's static input"
                )
            tidy()
            return step()
        finally:
            self._lock.leave()
            if self._closed:  # closed by another thread, which could not release it
                self.close()

    def _begin(self) -> None:
        if self._closed:
            raise ValueError(_CLOSED)
        self._copiers[0].origin.require(*_FORKED)
        if (iteration := self._iteration()) is not None:
            iteration.close(NEWER)

    @until_exit
    def __del__(self) -> None:
        for copier in getattr(self, "_copiers", ()):
            if not copier.is_quiet():
                defer(copier)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a DevicePrefetcher cannot be pickled or copied: its device memory is of this process; make one "
            "where the batches are used, over a loader that can"
        )

    def __repr__(self) -> str:
        where = ", ".join(str(device) for device in self.devices)
        return f"<DevicePrefetcher to {where}: depth={self._depth}>"


class Iterated(BatchSource):
    """An iterator as a source. `is_ours`: it is closed at the end, if possible.

    A loader's own iterator counts a batch when this one does, and learns of the end and of errors behind
    those that were taken before: else its state would be of batches that nobody has.
    """

    _what = "iteration"

    def __init__(self, iterator: Iterator[Any], *, is_ours: bool) -> None:
        super().__init__(None)
        self._iterator, self._is_ours = iterator, is_ours
        self._epoch = iterator if isinstance(iterator, EpochIterator) else None
        self._error: type[BaseException] | None = None  # came in place of a batch
        self._is_over, self._ahead = False, 0  # all batches were taken; those that are not delivered

    def deliver(self, made: ReadyBatch | None) -> None:
        if made is None and self._epoch is not None and not self.has_ended:
            self._epoch.end()
        super().deliver(made)

    def _take(self, timeout_seconds: float | None) -> ReadyBatch | None:  # noqa: ARG002  # it cannot be told
        try:
            made = self._next() if self._epoch is None else self._epoch.take_ahead()
        except BaseException as error:
            self._error = type(error)
            raise
        if made is None:
            self._is_over = True
        else:
            self._ahead += 1
        return made

    def _next(self) -> ReadyBatch | None:
        try:
            return ReadyBatch(next(self._iterator), 0, 0, 0, 0.0, None)
        except StopIteration:
            return None

    def _look(self) -> bool:
        return True if self._epoch is None else self._epoch.is_ready()  # others cannot be asked

    def _count(self, made: ReadyBatch) -> None:  # noqa: ARG002
        self._ahead -= 1
        if self._epoch is not None:
            self._epoch.deliver(self._ahead)

    def _is_whole(self) -> bool:
        return self._is_over and not self._ahead

    def _abandon(self) -> None:
        """Nothing is under way."""

    def _release(self) -> None:
        iterator, self._iterator = self._iterator, iter(())
        epoch, self._epoch = self._epoch, None
        if epoch is not None and (self._is_ours or self._error is not None):
            epoch.close(self._error)
        elif self._is_ours and callable(end := getattr(iterator, "close", None)):
            end()


def as_it_is(batch: Any) -> Any:
    return batch


def _close_all() -> None:
    for prefetcher in list(_open):
        with suppress(Exception):  # such as a failed device
            prefetcher.close()


at_exit(_close_all)


@dataclass(slots=True)
class DeliveryCounts:
    """Counts of an iteration: batches that were lent, seconds of stall and of waits for a device."""

    batches: int = 0
    stall_seconds: float = 0.0
    device_seconds: float = 0.0


class Iteration(Iterator[Any]):
    """The consumer's iterator over the batches of one pass.

    Args:
        finish: makes tensors of a batch; a method of the loader, which so lives as long as this.
        alone: calls a function while only this thread uses the copiers, or raises an error that says why not.
            It keeps their owner alive.
        is_split: True if each device gets a part of each batch; a list of the parts is lent.
    """

    def __init__(
        self,
        source: BatchSource,
        timeout_seconds: float | None,
        finish: Callable[[Any], Any],
        copiers: Sequence[DeviceCopier],
        alone: Callable[[Callable[[], Any]], Any],
        depth: int,
        counts: DeliveryCounts,
        *,
        is_split: bool,
    ) -> None:
        self._iteration_end = IterationEnd()
        self._calls = 0
        # With copies to begin, and receipt.
        self._fetched: tuple[list[InFlightBatch], ReadyBatch] | None = None
        self._flights: deque[tuple[list[InFlightBatch], ReadyBatch]] = deque()
        self._error: Exception | None = None  # of the source, or its end: raised after earlier batches
        self._is_inside = False  # a thread is in `__next__`
        self._because: str | None = None
        self._copiers, self._alone, self._depth, self._counts = copiers, alone, depth, counts
        self._is_split = is_split
        self._timeout_seconds, self._finish = timeout_seconds, finish
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
        if not self._iteration_end.has_ended:
            self._because = because
        self._iteration_end.has_ended = True
        if not self._is_inside:  # else that thread cleans up
            self._release(None)

    @until_exit
    def __del__(self) -> None:
        if hasattr(self, "_source"):
            self._iteration_end.has_ended = True
            self._release(GeneratorExit)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an iteration over a DevicePrefetcher cannot be pickled or copied")

    def _step(self) -> Any:
        failed: type[BaseException] | None = None
        try:
            self._is_inside = True
            return self._next()
        except BaseException as error:
            if not self._iteration_end.has_ended:
                self._iteration_end.has_ended, failed = True, type(error)
            raise
        finally:
            self._is_inside = False
            if self._iteration_end.has_ended:
                with suppress(Exception):  # the source's error; its consumer has one already, or the end
                    self._release(failed)

    def _next(self) -> Any:
        if self._iteration_end.has_ended:
            self._stop()
        self._calls += 1
        for copier in self._copiers:
            copier.collect()
        self._fill(1 + min(self._calls - 1, self._depth))
        # Another thread's end: flights may be overwritten.
        if self._iteration_end.has_ended or not self._flights:
            self._stop()
        flights, receipt = self._flights[0]
        batch = [copier.lend(flight) for copier, flight in zip(self._copiers, flights, strict=True)]
        self._flights.popleft()
        self._counts.batches += 1
        try:
            self._source.deliver(receipt)
        except BaseException:
            self._iteration_end.has_ended = True
            raise
        return batch if self._is_split else batch[0]

    def _stop(self) -> NoReturn:
        error, self._error = self._error, None
        try:
            if error is not None and not isinstance(error, StopIteration):
                raise error
        finally:
            del error  # its traceback has this frame
        self._iteration_end.has_ended = True
        if self._because is not None:
            self._source.close(self._because)
        self._source.deliver(None)
        raise StopIteration

    def _release(self, error: type[BaseException] | None) -> None:
        if not self._copiers[0].origin.is_here:
            keep(self._fetched, [*self._flights])
        self._fetched = self._error = None
        self._flights.clear()
        self._source.close(self._because, error)

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
                made = self._source.next(self._timeout_seconds)
            finally:
                self._counts.stall_seconds += Limits.current.clock() - started
            if made is None:
                self._error = StopIteration()
                return
            batch, receipt = self._finish(made.batch), made._replace(batch=None)
            del made
            parts = split(batch, len(self._copiers)) if self._is_split else [batch]
            flights = [copier.take(part) for copier, part in zip(self._copiers, parts, strict=True)]
            self._fetched = flights, receipt
        except Exception as error:  # noqa: BLE001  # such as a leaf that would lose its values
            self._error = error

    def _send(self, flights: Sequence[InFlightBatch]) -> bool:
        """Begin the copies to each device. Returns: False: not now, but others are in flight."""
        for copier, flight in zip(self._copiers, flights, strict=True):
            try:
                while flight.plan is None and not copier.send(flight, self._iteration_end):
                    if self._flights:
                        return False
                    self._wait_for(copier)
            except torch.OutOfMemoryError:
                if not self._flights:
                    raise
                return False
        return True

    def _wait_for(self, copier: DeviceCopier) -> None:
        started = Limits.current.clock()
        try:
            copier.wait()
        finally:
            self._counts.device_seconds += Limits.current.clock() - started
