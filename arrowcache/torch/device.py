"""DevicePrefetcher: the next batches go to a device while this one trains.

A thread of its own takes batches from any iterable and starts their copies on a copy stream
(copier.py); the consumer is handed tensors on the device. What waits for what is decided there;
this module owns the thread, the queue and their end.

Guarantees: batches and exceptions arrive in the order of the source, an exception with its own
traceback, where its batch would have been; at most `depth` batches are on the device and not yet
handed over; nothing that is kept is overwritten. Streams, slots and device memory live as long as
the prefetcher, over all its iterations. It never synchronizes the device, calls no `record_stream`
and leaves nothing running: an iteration ends by exhaustion, `break`, an exception, a newer one,
`close` or the interpreter's exit, and every wait for the thread then has a bound, except where the
next iteration must not begin beside a source that is still busy.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from arrowcache.reading.pipeline import too_late
from arrowcache.torch.backend import Backend, backend_of
from arrowcache.torch.copier import Copier, Sent
from arrowcache.torch.structure import split
from arrowcache.units import parse_count

if TYPE_CHECKING:
    from typing import Self

Device = str | int | torch.device

_JOIN_SECONDS = 5.0
_GRACE_SECONDS = 0.5  # for a source that itself waits so long, and then says better what for
_MOST_DEPTH = 1024
_CLOSED = "the prefetcher is closed: make a new one"
_FORKED = "this prefetcher belongs to the process that forked this one: make a new one here"

_open: weakref.WeakSet[DevicePrefetcher] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class PrefetcherStats:
    """A prefetcher since it was made.

    `batches` and `bytes` are what was handed over, with all devices' parts of a step as one batch;
    `stall_seconds` the time that the consumer waited for it. `device_bytes` is the memory for batches
    on the devices that is reused, `device_allocations` how often a buffer was added to it: for each
    leaf of a batch some `depth + 2`, then no more, unless batches are kept, or grow. `pinned_bytes`
    is host memory for copying what was not pinned already.
    """

    batches: int
    bytes: int
    stall_seconds: float
    device_bytes: int
    device_allocations: int
    pinned_bytes: int


class DevicePrefetcher:
    """Batches of any iterable, on a device: each `for` iterates over it anew.

    Args:
        iterable: of batches: a loader of this library, a torch DataLoader, a list, a generator. It is
            iterated in a background thread; `iter` of it is called in the consumer's.
        device: such as "cuda", "cuda:1", 0, "xpu" or "cpu"; without an index, the current one of its kind.
        depth: batches on the device, or on their way, beside the one in use; at least 1. Device memory
            is that of depth + 2 batches, pinned memory that of depth batches.
        devices: several in place of one: each batch is split along dimension 0 into nearly equal parts,
            and a list of one part a device is yielded.

    A batch may be a tensor, a NumPy array, or any nesting of dicts and other mappings, lists, tuples,
    NamedTuples, dataclasses and TensorDicts of them, and comes back in the same form. Tensors and
    arrays of numbers become tensors of the same dtype, shape and order in memory, over reused
    memory that nothing overwrites while a view of it lives: they are safe to keep, and what is kept
    makes the memory grow. Jagged nested tensors stay such. Tensors of another kind (sparse, of a
    subclass, on another device, of autograd) and other objects with a `to` method are moved by
    that, when they are handed over. Whatever else there is passes unchanged.

    Tensors are ready for the stream that is current when they are handed over; work on another one
    has to wait for that, and that for it before the batch is let go: `Tensor.record_stream` has no
    effect on them. They cannot be resized in place.
    On the CPU batches are copied, too, so that they are safe to keep, whatever the source does.

    Only one iteration is in progress: a newer one ends it with a RuntimeError in its consumer.
    Raises: ValueError, TypeError: a device that does not exist, a depth that does not fit.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        device: Device | None = None,
        depth: int = 2,
        devices: Sequence[Device] | None = None,
    ) -> None:
        if (device is None) == (devices is None):
            raise ValueError("give one of device= and devices=, such as device='cuda'")
        if devices is not None and (isinstance(devices, str) or not devices):
            raise ValueError(f"devices={devices!r} must be a list such as ['cuda:0', 'cuda:1']")
        if not isinstance(iterable, Iterable) and not hasattr(iterable, "__getitem__"):
            raise TypeError(f"a {type(iterable).__name__} is no iterable of batches")
        self._depth = parse_count(depth, "depth", most=_MOST_DEPTH)
        self._is_split = devices is not None
        wanted = [device] if devices is None else list(devices)
        self._setup(iterable, [backend_of(each) for each in wanted if each is not None])

    def _setup(self, iterable: Iterable[Any], backends: Sequence[Backend]) -> None:
        self._iterable = iterable
        self._backends = backends
        self._copiers = [Copier(backend, self._depth) for backend in backends]
        self._iteration: _Iteration | None = None
        self._counts = _Counts()
        self._pid = os.getpid()
        self._closed = False
        _open.add(self)

    def __iter__(self) -> PrefetchIterator:
        """Iterate over the source anew. An iteration still in progress ends.

        Blocks: until a source that is busy with the batch of an earlier iteration has made it.
        Raises: whatever `iter` of the source raises; ValueError: the prefetcher is closed.
        """
        self._end_iteration("a newer one began")
        source = iter(self._iterable)
        return self.over(source, is_ours=source is not self._iterable)

    def over(
        self, source: Iterator[Any], interrupt: Callable[[], None] | None = None, *, is_ours: bool = True
    ) -> PrefetchIterator:
        """The batches of an iterator, over the same slots.

        Args:
            interrupt: makes a `next` of the source that is in progress return or raise; called from any
                thread when the iteration ends.
            is_ours: the source is closed at the end, if it can be.
        """
        self._end_iteration("a newer one began")
        for copier in self._copiers:
            copier.collect()
            copier.begin()
        iteration = _Iteration(
            source, self._copiers, self._depth, interrupt, is_ours=is_ours, is_split=self._is_split
        )
        iteration.thread.start()
        self._iteration = iteration
        if self._closed:  # by another thread meanwhile, which did not see it
            iteration.end()
        return PrefetchIterator(self, iteration, self._counts)

    def __len__(self) -> int:
        """That of the iterable. Raises: TypeError: it has none."""
        return len(self._iterable)  # type: ignore[arg-type]

    @property
    def devices(self) -> list[torch.device]:
        """Where batches go."""
        return [backend.device for backend in self._backends]

    def stats(self) -> PrefetcherStats:
        """What was handed over so far, and the memory in use for it."""
        return PrefetcherStats(
            batches=self._counts.batches,
            bytes=self._counts.nbytes,
            stall_seconds=self._counts.stall_seconds,
            device_bytes=sum(copier.device_bytes for copier in self._copiers),
            device_allocations=sum(copier.allocations for copier in self._copiers),
            pinned_bytes=sum(copier.host_bytes for copier in self._copiers),
        )

    def close(self) -> None:
        """End the iteration and its thread, and let go of all memory but what is kept. Idempotent.

        Blocks: at most 5 s for a source that is busy; its thread then ends when that returns.
        """
        self._close(_JOIN_SECONDS)

    def _close(self, seconds: float) -> None:
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        iteration, self._iteration = self._iteration, None
        if self.is_inherited():
            return
        if iteration is None or iteration.close(seconds):
            for copier in self._copiers:
                copier.close()

    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that has the thread."""
        return self._pid != os.getpid()

    def _end_iteration(self, because: str) -> None:
        if self._closed:
            raise ValueError(_CLOSED)
        if self.is_inherited():
            raise ValueError(_FORKED)
        if self._iteration is not None:
            self._iteration.end(because)
            self._iteration.join(None)
            self._iteration = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self._close(0.0)

    def __repr__(self) -> str:
        where = ", ".join(str(device) for device in self.devices)
        return f"<DevicePrefetcher to {where}: depth={self._depth}>"


class PrefetchIterator:
    """The batches of one iteration, in the consumer's hands. Dropping it ends the iteration.

    Nothing that makes batches refers to it.
    """

    def __init__(self, prefetcher: DevicePrefetcher, iteration: _Iteration, counts: _Counts) -> None:
        self._prefetcher = prefetcher  # which lives as long as this
        self._iteration, self._counts = iteration, counts
        self._pid = os.getpid()

    def __iter__(self) -> PrefetchIterator:
        return self

    def __next__(self) -> Any:
        """The next batch, on the device; a list with one part a device, if there are several.

        Blocks: until the source has made it and its copy was started; not for the copy itself.
        Raises: whatever the source raised; RuntimeError: a newer iteration began.
        """
        return self.take(None)

    def take(self, timeout_seconds: float | None) -> Any:
        """As `next`. Raises: LoaderTimeoutError: none came in time; the iteration has ended then."""
        if self._pid != os.getpid():
            raise ValueError(_FORKED)
        iteration = self._iteration
        iteration.collect()
        started = time.perf_counter()
        try:
            sent = iteration.next(timeout_seconds)
            self._counts.stall_seconds += time.perf_counter() - started
            batch = iteration.receive(sent)
        except BaseException:
            iteration.give_up()
            raise
        self._counts.batches += 1
        self._counts.nbytes += sum(part.nbytes for part in sent)
        return batch

    def close(self) -> None:
        """End the iteration: what was not handed over is dropped. Does not wait. Idempotent."""
        if self._pid == os.getpid():
            self._iteration.end()

    def __del__(self) -> None:
        self.close()


@dataclass(slots=True)
class _Counts:
    batches: int = 0
    nbytes: int = 0
    stall_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Iteration:
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
            copier.collect()

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
                self.changed.wait_for(lambda: self.taken is None, _JOIN_SECONDS)
                left = list(self.ready)
                self.ready.clear()
            for sent in left:
                for copier, part in zip(self.copiers, sent, strict=True):
                    copier.drop(part)
            for copier in self.copiers:
                copier.rest()


def _close_all() -> None:
    for prefetcher in list(_open):
        prefetcher.close()


atexit.register(_close_all)
