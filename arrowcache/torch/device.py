"""DevicePrefetcher: takes the next batches to a device while this one trains.

This module is the face for users. iteration.py takes batches of the source and lends them, and
lane.py copies them to a device. The consumer's own calls of `next` drive both: there is no thread.

Guarantees: kept batches are not overwritten. Streams, slots and device memory live as long as the
prefetcher, over all its iterations. It never synchronizes the device. An iteration ends by exhaustion,
`break`, an exception, a newer one, `close` or the interpreter's exit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from arrowcache.arguments import face
from arrowcache.lifetimes import Closable, Origin, at_exit, call_all, until_exit
from arrowcache.reading.iterator import NEWER, cut_short
from arrowcache.torch.backend import Backend, backend_of
from arrowcache.torch.deferred import defer, let_go, tidy
from arrowcache.torch.iteration import BatchSource, DeliveryCounts, Iteration
from arrowcache.torch.lane import Lane, ThreadLock
from arrowcache.units import parse_count

Device = str | int | torch.device

CLOSE_SECONDS = 5.0  # longest wait of `close` for a device
_MOST_DEPTH = 1024
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
        self._depth = parse_count(depth, "depth", most=_MOST_DEPTH)
        self._is_split = devices is not None
        self._setup(iterable, [backend_of(each) for each in wanted])

    def _setup(self, iterable: Iterable[Any], backends: Sequence[Backend]) -> None:
        self._iterable = iterable
        self._lanes = [Lane(backend, self._depth) for backend in backends]
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
        return self._over(_Iterator(iterator, is_ours=iterator is not self._iterable), _FORKED)

    def over(self, source: BatchSource) -> Iteration:
        """Iterate over an epoch of a loader, in the same memory. Raises: as `iter`."""
        return self._over(source, _FORKED_EPOCH)

    def _over(self, source: BatchSource, forked: tuple[str, str]) -> Iteration:
        self._begin()
        alone = partial(self._alone, forked)
        iteration = Iteration(source, self._lanes, alone, self._depth, self._counts, is_split=self._is_split)
        self._iteration = weakref.ref(iteration)
        return iteration

    def __len__(self) -> int:
        """Return the length of the iterable. Raises: TypeError: it has none."""
        return len(self._iterable)  # type: ignore[arg-type]

    @property
    def devices(self) -> list[torch.device]:
        """The devices of the batches."""
        return [lane.backend.device for lane in self._lanes]

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return (nbytes,) on the host, for the package's own use.

        Arrays over it go to the (first) device without another copy.
        """
        return self._lanes[0].backend.host_memory(nbytes).numpy()

    def stats(self) -> PrefetcherStats:
        """Return counts of lent batches, and of the memory for them."""
        return PrefetcherStats(
            batches=self._counts.batches,
            bytes=sum(lane.lent_bytes for lane in self._lanes),
            stall_seconds=self._counts.stall_seconds,
            device_bytes=sum(lane.device_bytes for lane in self._lanes),
            device_allocations=sum(lane.allocations for lane in self._lanes),
            pinned_bytes=sum(lane.pinned_bytes for lane in self._lanes),
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
            call_all([*calls, *(partial(let_go, lane, CLOSE_SECONDS) for lane in self._lanes)])
        finally:
            self._lock.leave()

    def is_inherited(self) -> bool:
        """True if this process was forked from the one that made the lanes."""
        return not self._lanes[0].origin.is_here

    def _alone(self, forked: tuple[str, str], step: Callable[[], Any]) -> Any:
        """Call a step that takes a batch, while no other thread takes one.

        Args:
            forked: what a forked child cannot use, and what to do there.
        """
        self._lanes[0].origin.require(*forked)
        if not self._lock.take():
            raise RuntimeError("another thread is in `next` of this prefetcher: one at a time takes batches")
        try:
            if any([lane.backend.is_capturing() for lane in self._lanes]):  # noqa: C419  # quicker
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
        self._lanes[0].origin.require(*_FORKED)
        if (iteration := self._iteration()) is not None:
            iteration.close(NEWER)

    @until_exit
    def __del__(self) -> None:
        for lane in getattr(self, "_lanes", ()):
            if not lane.is_quiet():
                defer(lane)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a DevicePrefetcher cannot be pickled or copied: its device memory is of this process; make one "
            "where the batches are used, over a loader that can"
        )

    def __repr__(self) -> str:
        where = ", ".join(str(device) for device in self.devices)
        return f"<DevicePrefetcher to {where}: depth={self._depth}>"


class _Iterator:
    """An iterator as a source. `is_ours`: it is closed at the end, if possible."""

    def __init__(self, iterator: Iterator[Any], *, is_ours: bool) -> None:
        self._iterator, self._is_ours = iterator, is_ours
        self._is_over, self._ahead = False, 0  # all batches were taken; those that are not delivered
        self._because: str | None = None
        self._origin = Origin()

    def next(self) -> tuple[Any, bool]:
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._is_over = True
            raise
        self._ahead += 1
        return batch, True

    def is_ready(self) -> bool:
        return True  # it cannot be asked

    def deliver(self, receipt: bool | None) -> None:
        if receipt:
            self._ahead -= 1
        elif self._because is not None and not (self._is_over and not self._ahead):
            raise cut_short(self._because, "iteration")

    def close(self, error: type[BaseException] | None, because: str | None = None) -> None:  # noqa: ARG002
        self._because = self._because or because
        iterator, self._iterator = self._iterator, iter(())
        if self._is_ours and self._origin.is_here and callable(end := getattr(iterator, "close", None)):
            end()


def _close_all() -> None:
    for prefetcher in list(_open):
        with suppress(Exception):  # such as a failed device
            prefetcher.close()


at_exit(_close_all)
