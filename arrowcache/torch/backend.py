"""Backend: the few calls to a device that a prefetcher makes, behind one protocol.

Everything about streams, events and memory is here and nowhere else, so that the prefetcher is the
same code on every accelerator, on the CPU, and on a recording fake in the tests. A backend decides
nothing: it owns no memory, and when to wait for what is the copier's business.

`Accelerator` is any device with streams, through `torch.get_device_module` (CUDA, ROCm, XPU);
`Host` is the CPU, where every call is done when it returns.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from arrowcache.reading.memory import page_aligned

#: A stream or an event of a backend: opaque, compared and hashed as a whole.
Stream = Any
Event = Any


class Backend(Protocol):
    """A device. Calls return at once, without waiting for it, unless they say so."""

    device: torch.device

    def stream(self) -> Stream:
        """A new stream."""

    def current_stream(self) -> Stream:
        """The one that the calling thread's work goes to."""

    def event(self) -> Event:
        """A new event, at which nothing waits yet."""

    def record(self, event: Event, stream: Stream) -> None:
        """The event is what the stream has been given so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What the stream is given from now on begins after the event, as it was recorded last."""

    def synchronize(self, event: Event) -> None:
        """Block this thread until the event, as it was recorded last, is over. Releases the GIL."""

    def memory(self, nbytes: int, stream: Stream) -> torch.Tensor:
        """(nbytes,) uint8 on the device, which is a stream's: once freed, its next work may have it."""

    def retain(self, memory: torch.Tensor, stream: Stream) -> None:
        """Memory that is freed from now on is used anew after what another stream was given by then."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 on the host, from which the device reads by itself (pinned)."""

    def can_read(self, source: torch.Tensor) -> bool:
        """Whether a copy may read a host tensor where it is."""

    def copy(self, into: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Copy a host tensor, which `can_read`, to the device in the stream's order."""


class Accelerator:
    """A device with streams of its own.

    A thread's current device is number 0 until it says otherwise, and to go back to that wakes it up:
    half a gigabyte of a device that may be another rank's. So `stream`, which goes back whatever it
    takes, is only entered inside `device`, which leaves a sleeping device alone.

    Args:
        device: with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)

    def stream(self) -> Stream:
        return self._module.Stream(self.device)

    def current_stream(self) -> Stream:
        return self._module.current_stream(self.device)

    def event(self) -> Event:
        if self.device.type == "cuda":
            return self._module.Event(blocking=True)  # who waits for one sleeps, and does not spin
        return self._module.Event()

    def record(self, event: Event, stream: Stream) -> None:
        event.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def memory(self, nbytes: int, stream: Stream) -> torch.Tensor:
        with self._module.device(self.device), self._module.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def retain(self, memory: torch.Tensor, stream: Stream) -> None:
        memory.record_stream(stream)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        with self._module.device(self.device):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def can_read(self, source: torch.Tensor) -> bool:
        return source.is_pinned()

    def copy(self, into: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        with self._module.device(self.device), self._module.stream(stream):
            into.copy_(source, non_blocking=True)


class Host:
    """The CPU: one order of things, and nothing to wait for."""

    device = torch.device("cpu")

    def stream(self) -> Stream:
        return None

    current_stream = event = stream

    def record(self, event: Event, stream: Stream) -> None:
        pass

    def wait(self, stream: Stream, event: Event) -> None:
        pass

    def synchronize(self, event: Event) -> None:
        pass

    def memory(self, nbytes: int, stream: Stream) -> torch.Tensor:  # noqa: ARG002
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def retain(self, memory: torch.Tensor, stream: Stream) -> None:
        pass

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.from_numpy(page_aligned(nbytes))

    def can_read(self, source: torch.Tensor) -> bool:  # noqa: ARG002
        return True

    def copy(self, into: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:  # noqa: ARG002
        into.copy_(source)


def backend_of(device: str | int | torch.device | None) -> Backend:
    """The backend of a device; without an index, of the current one of its kind.

    Raises: ValueError: there is no such device here.
    """
    try:
        found = torch.device(device)  # type: ignore[arg-type]  # None is a TypeError of its own
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device={device!r} is no device: use one such as {_devices()}") from error
    if found.type == "cpu":
        return Host()
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


def _devices() -> str:
    """What there is, as a text for messages."""
    found = ["'cpu'"]
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        if module.is_available():
            found += [f"'{kind}:{index}'" for index in range(module.device_count())]
    return ", ".join(found)
