"""A device in software, whose streams run late, early or at random: what is unordered goes wrong.

Every copy and every read that a test enqueues is run when the fake decides, in the order of its stream
and of the events that it waits for, and by no other. So memory that is written while somebody may
still read it, or read before its copy, shows as a wrong value in `errors`, as on a real device, only
more reliably. Memory is filled with garbage by its stream when it is allocated and once it is freed,
as if others had used it before and did so again.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

GARBAGE = 0xA5


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
    """A backend. `order`: which streams run as soon as they can ("copy", "compute", "all", "none", or
    "random"); the others run when somebody waits for them.

    `deaf` names calls that do nothing: what the prefetcher must not leave out.
    """

    def __init__(self, order: str = "none", seed: int = 0, deaf: tuple[str, ...] = ()) -> None:
        self.device = torch.device("cpu")
        self.order, self.deaf = order, deaf
        self.errors: list[str] = []
        self.calls: list[str] = []
        self.default = Stream("compute 0")
        self.streams = [self.default]
        self.pinned: list[tuple[int, int]] = []  # ranges that are pinned already
        self._copy_streams: list[Stream] = []
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._local = threading.local()
        self._keep: list[np.ndarray] = []  # memory is never really freed
        self._retained: dict[int, list[Stream]] = {}
        self.memory_bytes = 0

    # What the prefetcher calls.

    def stream(self) -> Stream:
        found = Stream(f"copy {len(self._copy_streams)}")
        self._copy_streams.append(found)
        self.streams.append(found)
        return found

    def current_stream(self) -> Stream:
        return getattr(self._local, "stream", self.default)

    def event(self) -> Event:
        self.calls.append("event")
        return Event()

    def record(self, event: Event, stream: Stream) -> None:
        if "record" in self.deaf:
            return
        with self._lock:
            event.recording = Recording(stream)
            self._enqueue(stream, event.recording)

    def wait(self, stream: Stream, event: Event) -> None:
        kind = "copy waits" if stream in self._copy_streams else "compute waits"
        if kind in self.deaf or event.recording is None:
            return
        self._enqueue(stream, ("wait", event.recording))

    def synchronize(self, event: Event) -> None:
        if "synchronize" in self.deaf or event.recording is None:
            return
        with self._lock:
            self._run_until(event.recording)

    def memory(self, nbytes: int, stream: Stream) -> torch.Tensor:
        raw = np.zeros(nbytes, np.uint8)
        tensor = torch.from_numpy(raw[:])
        with self._lock:
            self._keep.append(raw)
            self.memory_bytes += nbytes
            self._enqueue(stream, ("do", lambda: raw.fill(GARBAGE)))
        self.calls.append("memory")
        weakref.finalize(tensor.untyped_storage(), self._freed, raw, stream)
        return tensor

    def retain(self, memory: torch.Tensor, stream: Stream) -> None:
        self._retained.setdefault(memory.data_ptr(), []).append(stream)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        self.calls.append("host_memory")
        memory = torch.full((nbytes,), GARBAGE, dtype=torch.uint8)
        self.pin(memory)
        weakref.finalize(memory.untyped_storage(), self.pinned.remove, self.pinned[-1])
        return memory

    def can_read(self, source: torch.Tensor) -> bool:
        start = source.data_ptr()
        return any(first <= start < last for first, last in self.pinned)

    def copy(self, into: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        assert self.can_read(source), "the source is not pinned"
        assert into.dtype == source.dtype
        assert into.stride() == source.stride()
        assert into.shape == source.shape
        storage, nbytes = weakref.ref(source.untyped_storage()), source.nbytes
        target, start = into.data_ptr(), source.data_ptr()

        def run() -> None:
            if storage() is None:
                self.errors.append("a source was freed before its copy")
            else:
                ctypes.memmove(target, start, nbytes)

        self._enqueue(stream, ("do", run))

    # What a test calls.

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        return tensor

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def compute_stream(self) -> Stream:
        found = Stream(f"compute {len(self.streams)}")
        self.streams.append(found)
        return found

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
            while any(self.step(stream) for stream in self.streams):
                pass
            assert not any(stream.todo for stream in self.streams), "the streams wait for each other"

    def _enqueue(self, stream: Stream, operation: Recording | tuple[str, object]) -> None:
        with self._lock:
            stream.todo.append(operation)
            self._run_what_is_early()

    def _run_what_is_early(self) -> None:
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
        while any(self.step(stream) for stream in early):
            pass

    def _run_until(self, recording: Recording) -> None:
        while not recording.is_over:
            if not self.step(recording.stream):
                blocked = recording.stream.todo[0]
                assert isinstance(blocked, tuple)
                assert blocked[0] == "wait"
                self._run_until(blocked[1])

    def _freed(self, raw: np.ndarray, stream: Stream) -> None:
        """Its stream has the memory from now on, and writes to it."""
        with self._lock:
            for other in self._retained.pop(raw.ctypes.data, []):
                recording = Recording(other)
                other.todo.append(recording)
                stream.todo.append(("wait", recording))
            stream.todo.append(("do", lambda: raw.fill(GARBAGE)))
            self.memory_bytes -= raw.nbytes
