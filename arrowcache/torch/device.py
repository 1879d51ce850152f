"""DevicePrefetcher: the next batches go to a device while this one trains.

A thread of its own takes batches from any iterable (iteration.py) and starts their copies on a copy
stream (copier.py), into memory that is used again (buffers.py); the consumer is handed tensors on
the device. This module is the face: what users say and get, and when an iteration ends.

Guarantees: nothing that is kept is overwritten. Streams, slots and device memory live as long as
the prefetcher, over all its iterations. It never synchronizes the device, calls no `record_stream`
and leaves nothing running: an iteration ends by exhaustion, `break`, an exception, a newer one,
`close` or the interpreter's exit, and every wait for the thread then has a bound, except where the
next iteration must not begin beside a source that is still busy.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from arrowcache.shortage import start
from arrowcache.torch.backend import Backend, backend_of
from arrowcache.torch.copier import Copier
from arrowcache.torch.iteration import JOIN_SECONDS, Iteration
from arrowcache.units import parse_count

if TYPE_CHECKING:
    from typing import Self

Device = str | int | torch.device

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
    leaf of a batch `depth + 2` at first, then no more, unless batches are kept, or grow. `pinned_bytes`
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
    effect on them. They cannot be resized in place. Capture a CUDA graph with
    `capture_error_mode="thread_local"` while an iteration is in progress: its thread waits for copies
    meanwhile, which the default forbids to all threads.
    On the CPU batches are copied, too, so that they are safe to keep, whatever the source does. Elsewhere
    pinned tensors are copied from where they are, while the source goes on: it must not write into them
    again.

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
        if devices is not None and (isinstance(devices, str) or not isinstance(devices, Sequence)):
            raise TypeError(f"devices={devices!r} must be a list such as ['cuda:0', 'cuda:1']")
        wanted = [device] if devices is None else list(devices)
        if not wanted:
            raise ValueError("devices=[] names none: give a list such as ['cuda:0', 'cuda:1']")
        if not isinstance(iterable, Iterable) and not hasattr(iterable, "__getitem__"):
            raise TypeError(f"a {type(iterable).__name__} is no iterable of batches")
        self._depth = parse_count(depth, "depth", most=_MOST_DEPTH)
        self._is_split = devices is not None
        self._setup(iterable, [backend_of(each) for each in wanted])

    def _setup(self, iterable: Iterable[Any], backends: Sequence[Backend]) -> None:
        self._iterable = iterable
        self._backends = backends
        self._copiers = [Copier(backend, self._depth) for backend in backends]
        self._iteration: Iteration | None = None
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
            copier.buffers.collect()
            copier.buffers.begin()
        iteration = Iteration(
            source, self._copiers, self._depth, interrupt, is_ours=is_ours, is_split=self._is_split
        )
        start(iteration.thread)
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

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """(nbytes,) on the host, pinned: arrays over it go to the (first) device without another copy."""
        return self._backends[0].host_memory(nbytes).numpy()

    def stats(self) -> PrefetcherStats:
        """What was handed over so far, and the memory in use for it."""
        return PrefetcherStats(
            batches=self._counts.batches,
            bytes=self._counts.nbytes,
            stall_seconds=self._counts.stall_seconds,
            device_bytes=sum(copier.buffers.nbytes for copier in self._copiers),
            device_allocations=sum(copier.buffers.allocations for copier in self._copiers),
            pinned_bytes=sum(copier.host_bytes for copier in self._copiers),
        )

    def close(self) -> None:
        """End the iteration and its thread, and let go of all memory but what is kept. Idempotent.

        Blocks: at most 5 s for a source that is busy; its thread then ends when that returns.
        """
        self._close(JOIN_SECONDS)

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

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a DevicePrefetcher cannot be pickled or copied: its thread and its device memory are of this "
            "process; make one where the batches are used, over a loader that can"
        )

    def __repr__(self) -> str:
        where = ", ".join(str(device) for device in self.devices)
        return f"<DevicePrefetcher to {where}: depth={self._depth}>"


class PrefetchIterator:
    """The batches of one iteration, in the consumer's hands. Dropping it ends the iteration.

    Nothing that makes batches refers to it.
    """

    def __init__(self, prefetcher: DevicePrefetcher, iteration: Iteration, counts: _Counts) -> None:
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

    def __reduce__(self) -> NoReturn:
        raise TypeError("an iteration over a DevicePrefetcher cannot be pickled or copied")

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


def _close_all() -> None:
    for prefetcher in list(_open):
        prefetcher.close()


atexit.register(_close_all)
