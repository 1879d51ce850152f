"""Backend: the few device calls that copying batches needs.

All use of streams, events and memory is here, so that device_copier.py is the same code on every
accelerator, on the CPU, and on a device in software in the tests. A backend decides nothing:
device_copier.py decides the order of waits.

`Backend` documents each call, and is the CPU. `Accelerator` is any device with streams, through
`torch.get_device_module` (CUDA, ROCm, XPU).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from arrowcache.reading.slots import page_aligned
from arrowcache.torch.pinned_memory import PinnedMemory
from arrowcache.torch.tensors import move, pinned

#: A stream or an event of a backend: opaque, compared and hashed as a whole.
Stream = Any
Event = Any
#: Tensors that are written, and what into each.
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]

_PORTABLE = 1  # cudaHostRegisterPortable: for every context


class Backend:
    """A device. Calls return at once, without waiting for it, unless they say so.

    This one is the CPU: it runs all in one order, and never waits.
    """

    device = torch.device("cpu")

    def is_capturing(self) -> bool:
        """True if this thread captures a graph, which forbids all other calls."""
        return False

    def stream(self) -> Stream:
        return None

    def current_stream(self, device: torch.device | None = None) -> Stream:  # noqa: ARG002
        """Return the calling thread's stream, on this device or on another of its kind."""
        return None

    def event(self) -> Event:
        """Return a new event, which nothing waits for yet; not None."""
        return True

    def record(self, event: Event, stream: Stream) -> None:
        """Let the event mark the work given to the stream so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let later work of the stream begin after the event."""

    def query(self, event: Event) -> bool:  # noqa: ARG002
        """True if a recorded event is over."""
        return True

    def pause(self, seconds: float) -> None:
        """Sleep for this time in this thread. Ctrl-C ends it."""
        time.sleep(seconds)

    def memory(self, nbytes: int, stream: Stream) -> torch.Tensor:  # noqa: ARG002
        """Return (nbytes,) uint8 on the device, owned by a stream, whose later work may reuse it once freed.

        Raises: torch.OutOfMemoryError.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def retain(self, memory: torch.Tensor, stream: Stream) -> None:
        """Let memory that is freed later be reused after the present work of another stream."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return (nbytes,) uint8 on the host, at a page, for `can_read` if the device agrees. Any thread."""
        return torch.from_numpy(page_aligned(nbytes))

    def pinned_memory(self, nbytes: int) -> torch.Tensor:
        """Return (nbytes,) uint8 on the host, which the device can read directly."""
        return self.host_memory(nbytes)

    def can_read(self, source: torch.Tensor) -> bool:  # noqa: ARG002
        """True if a copy may read a dense host tensor where it is."""
        return True

    def holds(self, leaf: Any) -> bool:  # noqa: ARG002
        """True if a leaf is already a tensor on a device of this kind."""
        return False

    def pinned(self, leaf: Any) -> Any:
        """Pin a leaf with a `to` of its own, so that `moved` need not wait; itself, if this is impossible."""
        return leaf

    def moved(self, leaf: Any) -> Any:
        """Return a `pinned` or held leaf on the device, by its own `to` and in the current stream's order."""
        return move(leaf, self.device, waits=True)

    def copy(self, pairs: Pairs, stream: Stream) -> None:  # noqa: ARG002
        """Copy tensors (second) to the device (first) in the stream's order.

        Sources are on the device, or on the host where it `can_read` them.
        """
        for into, source in pairs:
            into.copy_(source)


class Accelerator(Backend):
    """A device with streams of its own.

    A thread's current device is number 0 at first, and going back to it wakes it up:
    half a gigabyte of a device that may be another rank's. So `stream`, which always goes back,
    is only entered inside `device`, which leaves a sleeping device alone.

    Args:
        device: with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index = device.index  # torch takes microseconds to find it in a device, several times a batch
        self._module: Any = torch.get_device_module(device)
        self._registered = PinnedMemory(self) if device.type == "cuda" else None

    def is_capturing(self) -> bool:
        ask = getattr(self._module, "is_current_stream_capturing", None)
        return ask is not None and bool(ask())

    def stream(self) -> Stream:
        return self._module.Stream(self.device)

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self._module.current_stream(self._index if device is None else device)

    def event(self) -> Event:
        return self._module.Event()

    def record(self, event: Event, stream: Stream) -> None:
        event.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def query(self, event: Event) -> bool:
        with self._module.device(self._index):  # torch asks for the thread's device, and may wake it up
            return bool(event.query())

    def memory(self, nbytes: int, stream: Stream) -> torch.Tensor:
        with self._module.device(self._index), self._module.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def retain(self, memory: torch.Tensor, stream: Stream) -> None:
        with suppress(NotImplementedError):  # not for a source's own kind, such as sparse tensors
            memory.record_stream(stream)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return self.pinned_memory(nbytes) if self._registered is None else self._registered.allocate(nbytes)

    def pinned_memory(self, nbytes: int) -> torch.Tensor:
        if self._registered is not None:
            memory = self._registered.allocate(nbytes)
            if self._registered.reads(memory):
                return memory
        with self._module.device(self._index):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def can_read(self, source: torch.Tensor) -> bool:
        if self._registered is not None and self._registered.reads(source):
            return True
        return source.is_pinned() and _last(source).is_pinned()  # CUDA pins all of it, or nothing

    def holds(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.device.type == self.device.type

    def pinned(self, leaf: Any) -> Any:
        with self._module.device(self._index):
            return pinned(leaf)

    def moved(self, leaf: Any) -> Any:
        return move(leaf, self.device, waits=False)

    def copy(self, pairs: Pairs, stream: Stream) -> None:
        with self._module.device(self._index):
            before = self.current_stream()
            try:  # torch's context of a stream takes longer than a copy
                self._module.set_stream(stream)
                for into, source in pairs:
                    into.copy_(source, non_blocking=True)
            finally:
                self._module.set_stream(before)

    def register(self, address: int, nbytes: int) -> bool:
        return self._succeeds(lambda: self._module.cudart().cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> None:
        self._succeeds(lambda: self._module.cudart().cudaHostUnregister(address))

    def _succeeds(self, call: Callable[[], Any]) -> bool:
        with self._module.device(self._index):
            if int(call()) == 0:
                return True
            with suppress(RuntimeError):  # the next kernel raises the error, which nobody else may meet
                torch.zeros(1, device=self.device)
            return False


def backend_of(device: str | int | torch.device | None) -> Backend:
    """Return the backend of a device; without an index, of the current one of its kind.

    Raises: ValueError: the device does not exist here.
    """
    try:
        found = torch.device(device)  # type: ignore[arg-type]  # None is a TypeError of its own
        if isinstance(device, bytes) or (found.type == "cpu" and found.index):
            raise ValueError("torch takes this, and means another one by it")
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device={device!r} is no device: use one such as {_devices()}") from error
    if found.type == "cpu":
        return Backend()
    try:
        module: Any = torch.get_device_module(found)
        count = module.device_count() if module.is_available() else 0
    except (RuntimeError, AttributeError):
        count, module = 0, None
    if not count or not hasattr(module, "Stream"):
        raise ValueError(
            f"device={str(found)!r} does not exist here: PyTorch {torch.__version__} has {_devices()}; "
            "use one of them, or install a PyTorch and a driver for it"
        )
    index = module.current_device() if found.index is None else found.index
    if index >= count:
        raise ValueError(
            f"device={str(found)!r} does not exist here, where there are {count} of its kind: "
            f"use one of {_devices()}"
        )
    return Accelerator(torch.device(found.type, index))


def _last(tensor: torch.Tensor) -> torch.Tensor:
    """Return the last element of a dense tensor in memory, (1,)."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + tensor.numel() - 1)


def _devices() -> str:
    found = ["'cpu'"]
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        if module.is_available():
            found += [f"'{kind}:{index}'" for index in range(module.device_count())]
    return ", ".join(found)
