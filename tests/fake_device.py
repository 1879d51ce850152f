"""A device in software, whose streams run late, early or at random: what is unordered goes wrong.

Every copy and every read that a test enqueues is run when the fake decides, in the order of its stream
and of the events that it waits for, and by no other. So memory that is written while somebody may
still read it, or read before its copy, shows as a wrong value in `errors`, as on a real device, only
more reliably. Memory is filled with garbage by its stream when it is allocated and once it is freed,
as if others had used it before and did so again.

It refuses what a real one refuses: any call while a graph is captured, in whatever thread (the capture is
global); a wait for an event that nobody recorded; an event that is recorded on a second stream; memory
beyond `most_bytes`. Registered memory must stay mapped, and registered until it was read. A call can be
made to fail, and the device can be stuck: then nothing runs but by `step`, and `pause`, the only wait of a
processor, moves the clock.
"""

from __future__ import annotations

import ctypes
import random
import re
import threading
import weakref
from bisect import bisect, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from arrowcache.torch.pinned_memory import PinnedMemory
from arrowcache.torch.tensors import move

GARBAGE = 0xA5
ORDERS = ("none", "copy", "compute", "all", "random")


class Recording:
    """What an event was recorded as: over when its stream came there."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.is_over = stream, False


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.todo: deque[Recording | tuple[str, object]] = deque()

    def __repr__(self) -> str:
        return f"<stream {self.name}: {len(self.todo)} to do>"


class Event:
    recording: Recording | None = None


class FakeDevice:
    """A backend.

    Args:
        order: which streams run as soon as they can ("copy", "compute", "all", "none", or "random"); the
            others run when a processor pauses.
        deaf: names of calls that do nothing: what must not be left out.
        most_bytes: memory that it has.
    """

    def __init__(
        self, order: str = "none", seed: int = 0, deaf: tuple[str, ...] = (), most_bytes: int = 1 << 40
    ) -> None:
        self.device = torch.device("cpu")
        self.order, self.deaf, self.most_bytes = order, deaf, most_bytes
        self.errors: list[str] = []
        self.calls: list[str] = []
        self.copies = 0
        self.threads: set[int] = set()  # that called it
        self.default = Stream("compute 0")
        self.streams = [self.default]
        self.pinned_ranges: list[tuple[int, int]] = []  # that others have pinned
        self.registered_ranges: dict[int, int] = {}
        self._being_read: list[tuple[int, int]] = []  # where sources of copies begin and end
        self.refuses_to_register = False
        self.asked_if_pinned = 0
        self.is_stuck = False
        self.clock = 0.0  # seconds that processors paused
        self.on_pause: Callable[[], object] = lambda: None
        self.fails_in: int | None = None  # calls
        self.failure: Callable[[], BaseException] = lambda: RuntimeError("the device failed")
        self.memory_bytes = self.places = 0  # places: how often `memory` gave some that is in use
        self.events: weakref.WeakSet[Event] = weakref.WeakSet()
        self._registered = PinnedMemory(self)
        self._copy_streams: list[Stream] = []
        self._capturing: int | None = None  # thread
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._local = threading.local()
        self._keep: list[np.ndarray] = []  # memory is never really freed
        self._retained: dict[int, list[Stream]] = {}
        self._on_device: set[int] = set()
        self._own: list[tuple[int, int]] = []  # where its memory begins and ends
        self._used_by_others: set[int] = set()  # addresses of memory

    # What is called.

    def is_capturing(self) -> bool:
        return self._capturing == threading.get_ident()

    def stream(self) -> Stream:
        self._call("stream")
        found = Stream(f"copy {len(self._copy_streams)}")
        self._copy_streams.append(found)
        self.streams.append(found)
        return found

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return getattr(self._local, "stream", self.default)

    def event(self) -> Event:
        self._call("event")
        event = Event()
        self.events.add(event)
        return event

    def record(self, event: Event, stream: Stream) -> None:
        self._call("record")
        if "record" in self.deaf:
            return
        with self._lock:
            if event.recording is not None and event.recording.stream is not stream:
                self.errors.append(f"an event of {event.recording.stream} was recorded on {stream}")
            event.recording = Recording(stream)
            self._enqueue(stream, event.recording)

    def wait(self, stream: Stream, event: Event) -> None:
        self._call("wait")
        kind = "copy waits" if stream in self._copy_streams else "compute waits"
        if event.recording is None:
            self.errors.append("a wait for an event that nobody recorded")
        elif kind not in self.deaf:
            self._enqueue(stream, ("wait", event.recording))

    def query(self, event: Event) -> bool:
        self._call("query")
        if event.recording is None:
            self.errors.append("a query of an event that nobody recorded")
        return event.recording is None or event.recording.is_over or "query" in self.deaf

    def pause(self, seconds: float) -> None:
        """The processor waits: what is given to the device comes to its end, unless it is stuck."""
        self.clock += seconds
        self.on_pause()
        if not self.is_stuck:
            with self._lock:
                for stream in self.streams:
                    self.step(stream)

    def memory(self, nbytes: int, stream: Stream) -> torch.Tensor:
        self._call("memory")
        if self.memory_bytes + nbytes > self.most_bytes:
            raise torch.OutOfMemoryError("the fake has no memory")
        raw = np.zeros(nbytes, np.uint8)
        tensor = torch.from_numpy(raw[:])
        with self._lock:
            self._keep.append(raw)
            insort(self._own, (raw.ctypes.data, raw.ctypes.data + nbytes))
            self.memory_bytes += nbytes
            self.places += 1
            self._enqueue(stream, ("do", lambda: raw.fill(GARBAGE)))
        weakref.finalize(tensor.untyped_storage(), self._freed, raw, stream, places=1)
        return tensor

    def retain(self, memory: torch.Tensor, stream: Stream) -> None:
        self._call("retain")
        if "retain" not in self.deaf:
            self._retained.setdefault(memory.data_ptr(), []).append(stream)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        self.calls.append("host_memory")
        return self._registered.allocate(nbytes).fill_(GARBAGE)

    def pinned_memory(self, nbytes: int) -> torch.Tensor:
        memory = self.host_memory(nbytes)
        if self.can_read(memory):
            return memory
        return self.pin(memory)

    def can_read(self, source: torch.Tensor) -> bool:
        if self._registered.reads(source):
            return True
        self.asked_if_pinned += 1
        start = source.data_ptr()
        return any(first <= start < last for first, last in self.pinned_ranges)

    def register(self, address: int, nbytes: int) -> bool:
        self._call("register")
        if not self.refuses_to_register:
            self.registered_ranges[address] = nbytes
        return not self.refuses_to_register

    def unregister(self, address: int) -> None:
        self._call("unregister")
        end = address + self.registered_ranges.pop(address, 0)
        if any(start < end and address < last for start, last in self._being_read):
            self.errors.append("memory was unregistered before it was read")

    def holds(self, leaf: object) -> bool:
        is_plain = type(leaf) is torch.Tensor and leaf.layout == torch.strided
        return is_plain and leaf.data_ptr() in self._on_device

    def pinned(self, leaf: object) -> object:
        return leaf

    def moved(self, leaf: object) -> object:
        return move(leaf, self.device, waits=False)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: Stream) -> None:
        self._call("copy")
        self.copies += len(pairs)
        for into, source in pairs:
            self._copy(into, source, stream)

    # What a test calls.

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        self.pinned_ranges.append(pinned)
        weakref.finalize(tensor.untyped_storage(), self.pinned_ranges.remove, pinned)
        return tensor

    def set_stream(self, stream: Stream) -> None:
        """Have the calling thread's work go to a stream."""
        self._local.stream = stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """This thread captures a graph: in global mode, which forbids calls to all threads."""
        self._capturing = threading.get_ident()
        try:
            yield
        finally:
            self._capturing = None

    def compute_stream(self) -> Stream:
        found = Stream(f"compute {len(self.streams)}")
        self.streams.append(found)
        return found

    def made(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor that is on this device already: the current stream gives it its values."""
        raw, stream = values.numpy().copy(), self.current_stream()
        memory = np.zeros_like(raw)
        result = torch.from_numpy(memory[:])
        self._on_device.add(result.data_ptr())
        self._keep.append(memory)
        self.memory_bytes += memory.nbytes
        self._enqueue(stream, ("do", lambda: np.copyto(memory, raw)))
        weakref.finalize(result.untyped_storage(), self._freed, memory, stream)
        return result

    def read(self, tensor: torch.Tensor, expected: torch.Tensor) -> None:
        """Enqueue a read of what a tensor should hold by then. Keeps the tensor's memory from nobody."""
        start, want = tensor.data_ptr(), expected.contiguous().reshape(-1).view(torch.uint8).numpy().copy()
        assert tensor.is_contiguous()

        def run() -> None:
            found = np.frombuffer(ctypes.string_at(start, want.nbytes), np.uint8)
            if not np.array_equal(found, want):
                self.errors.append(f"read {found[:8]} and not {want[:8]}")

        self._enqueue(self.current_stream(), ("do", run))

    def step(self, stream: Stream) -> bool:
        """Run the stream's next operation, unless it has to wait."""
        with self._lock:
            if not stream.todo:
                return False
            operation = stream.todo[0]
            if isinstance(operation, tuple) and operation[0] == "wait" and not operation[1].is_over:
                return False
            stream.todo.popleft()
            if isinstance(operation, Recording):
                operation.is_over = True
            elif operation[0] == "do":
                operation[1]()
            return True

    def finish(self) -> None:
        """Run everything."""
        with self._lock:
            while any([self.step(stream) for stream in self.streams]):  # noqa: C419  # each a step
                pass
            assert not any(stream.todo for stream in self.streams), "the streams wait for each other"

    def unmapped(self) -> list[int]:
        """Addresses of registered memory that was given back to the system."""
        lines = re.findall(r"^(\w+)-(\w+) ", Path("/proc/self/maps").read_text(), re.MULTILINE)
        maps = [(int(start, 16), int(end, 16)) for start, end in lines]
        return [
            address
            for address, nbytes in self.registered_ranges.items()
            if not any(start <= address and address + nbytes <= end for start, end in maps)
        ]

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self.threads.add(threading.get_ident())
        if self._capturing is not None:
            self.errors.append(f"{name} while a graph is captured")
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                self.fails_in = None
                raise self.failure()

    def _copy(self, into: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        assert into.dtype == source.dtype
        assert into.stride() == source.stride()
        assert into.shape == source.shape
        storage, nbytes = weakref.ref(source.untyped_storage()), source.nbytes
        target, start, base = into.data_ptr(), source.data_ptr(), into.untyped_storage().data_ptr()
        is_own = self._has(start)  # which is there, whoever has it by then
        self._being_read.append((start, start + nbytes))

        def run() -> None:
            self._being_read.remove((start, start + nbytes))
            if base in self._used_by_others:
                self.errors.append("a copy into memory that was freed, and others use")
            if storage() is None and not is_own:
                self.errors.append("a source was freed before its copy")
            else:
                ctypes.memmove(target, start, nbytes)

        self._enqueue(stream, ("do", run))

    def _has(self, address: int) -> bool:
        """Whether it is in memory of this device."""
        after = bisect(self._own, (address, 1 << 64))
        return after > 0 and address < self._own[after - 1][1]

    def _enqueue(self, stream: Stream, operation: Recording | tuple[str, object]) -> None:
        with self._lock:
            stream.todo.append(operation)
            self._run_what_is_early()

    def _run_what_is_early(self) -> None:
        if self.is_stuck:
            return
        if self.order == "random":
            for _ in range(self._random.randrange(4)):
                self.step(self._random.choice(self.streams))
            return
        early = {
            "copy": self._copy_streams,
            "compute": [stream for stream in self.streams if stream not in self._copy_streams],
            "all": self.streams,
            "none": [],
        }[self.order]
        while any([self.step(stream) for stream in early]):  # noqa: C419
            pass

    def _freed(self, raw: np.ndarray, stream: Stream, places: int = 0) -> None:
        """Its stream has the memory from now on, and writes to it."""
        with self._lock:
            self.places -= places
            for other in self._retained.pop(raw.ctypes.data, []):
                recording = Recording(other)
                other.todo.append(recording)
                stream.todo.append(("wait", recording))
            stream.todo.append(("do", lambda: self._reuse(raw)))
            self.memory_bytes -= raw.nbytes

    def _reuse(self, raw: np.ndarray) -> None:
        raw.fill(GARBAGE)
        self._used_by_others.add(raw.ctypes.data)


class Movable:
    """A leaf that moves itself to a fake: its memory is read when the current stream comes there."""

    def __init__(self, device: FakeDevice, tensor: torch.Tensor) -> None:
        self._device, self._tensor = device, tensor

    def pin_memory(self) -> Movable:
        return self

    def to(self, _device: torch.device, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        moved = self._device.made(torch.zeros_like(self._tensor))
        self._device.copy([(moved, self._tensor)], self._device.current_stream())
        return moved
