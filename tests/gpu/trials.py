"""Trials: tries on a GPU or the fake, with reads that are checked; sources of rows that say what they hold.

A trial reads on the device, in the order of its streams, what a batch should hold by then; `finish` waits for
all of that and tells what was wrong. On a GPU a read is a few kernels behind a sleep, so that a copy which
does not wait for it comes first; on the fake it is a step of a stream in software.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import numpy as np
import pytest
import torch

import arrowcache as ac
import arrowcache.torch.device
from benchmarks import device

WIDTH = 4096  # of x: 16 KiB a row
CACHE_ROWS, CACHE_WIDTH, BATCH_ROWS = 240, 8192, 48  # 32 KiB a row, 1.5 MiB a batch
_SLEEP_CYCLES = 50_000_000
_LONGEST_SLEEP_SECONDS = 0.1  # displays end longer kernels

Stream = Any
#: What a tensor's rows hold: a number, or one a row; or a tensor of its shape: all of it.
Expected = int | torch.Tensor
Replay = Callable[[torch.Tensor, int], None]
#: Takes what a test saw, which the proof tells.
Saw = Callable[[str], None]


class Trial(Protocol):
    """One try. The streams of the consumer are `streams`; the first is current at its begin."""

    device: str  # for DevicePrefetcher and Loader
    chance: random.Random
    streams: list[Stream]

    def on(self, stream: Stream) -> Any:
        """A context in which a stream is current."""

    def order(self, first: Stream, then: Stream) -> None:
        """What `then` is given from now on begins after what `first` was given."""

    def sleep(self, seconds: float) -> None:
        """The current stream is busy for so long."""

    def block(self, seconds: float) -> None:
        """The device is busy for so long."""

    def waited(self, device_seconds: float) -> float:
        """How long a processor waited for it; `device_seconds`: that a prefetcher says."""

    def read(self, tensor: torch.Tensor, expected: Expected) -> None:
        """What the current stream reads in a tensor by then must be expected."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same in pinned memory."""

    def made(self, rows: int, number: int) -> torch.Tensor:
        """(rows,) int64 on the device, which the current stream fills with a number."""

    def prepared(self, rows: torch.Tensor) -> torch.Tensor:
        """Expected rows that a read need not bring to the device first."""

    def capture(self, mode: str, like: torch.Tensor) -> Any:
        """A context that captures a graph. Gives: a function that replays it over a tensor like that.

        `replay(tensor, number)`: its result is read, for a tensor that holds the number.
        """

    def limit(self, nbytes: int) -> Any:
        """A context in which the device has so much memory beside what is in use."""

    def reserved(self) -> int:
        """Bytes of the device that are taken from it."""

    def copies(self, run: Callable[[], None]) -> int:
        """How many copies to the device a call makes."""

    def finish(self) -> None:
        """Wait for everything. Raises: AssertionError: a read was wrong."""


class Target(Protocol):
    """A GPU or the fake."""

    is_gpu: bool
    device: str  # on which torch computes

    def trial(self, *, is_fast: bool = False) -> AbstractContextManager[Trial]:
        """A try. is_fast: the fake does at once what it can; else as little as it must."""

    def trials(self, seconds: float) -> Iterator[Trial]:
        """Tries, each with a seed of its own: on a GPU for so long, on the fake one for each order of it."""


def expected_rows(expected: Expected, like: torch.Tensor) -> torch.Tensor:
    """(rows, 1, ...) on the CPU, a number of no dimensions, or all: what a tensor is compared with."""
    if isinstance(expected, int):
        return torch.tensor(expected)
    if expected.shape == like.shape:
        return expected
    return expected.reshape(-1, *[1] * (like.dim() - 1))


class Gpu:
    """The current CUDA device.

    Args:
        kind: of its trials, GpuTrial or like it.
    """

    is_gpu = True
    device = "cuda"

    def __init__(self, kind: Callable[..., Trial] | None = None) -> None:
        self._kind = kind or GpuTrial
        self._cycles: float | None = None
        self._streams: list[Stream] | None = None

    def trials(self, seconds: float) -> Iterator[Trial]:
        until, seed = time.monotonic() + seconds, 0
        while seed < 2 or time.monotonic() < until:
            with self.trial(seed) as trial:
                yield trial
            seed += 1

    @contextmanager
    def trial(self, seed: int = 0, *, is_fast: bool = False) -> Iterator[Trial]:  # of the fake
        if self._streams is None:
            self._streams = [torch.cuda.Stream(), torch.cuda.Stream()]
            self._cycles = _cycles_per_second()
        yield self._kind(seed, self._streams, self._cycles)


class GpuTrial:
    """A try on a GPU: see Trial."""

    device = "cuda"

    def __init__(self, seed: int, streams: list[Stream], cycles: float) -> None:
        self.chance = random.Random(seed)
        self.streams = [torch.cuda.current_stream(), *streams]
        self._seed, self._cycles = seed, cycles
        self._reads: list[tuple[Expected, torch.Tensor]] = []

    def on(self, stream: Stream) -> Any:
        return torch.cuda.stream(stream)

    def order(self, first: Stream, then: Stream) -> None:
        then.wait_stream(first)

    def sleep(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles))

    def block(self, seconds: float) -> None:
        for _ in range(round(seconds / _LONGEST_SLEEP_SECONDS)):
            self.sleep(_LONGEST_SLEEP_SECONDS)

    def waited(self, device_seconds: float) -> float:
        return device_seconds

    def read(self, tensor: torch.Tensor, expected: Expected) -> None:
        if isinstance(expected, int):
            wrong = tensor != expected
        else:
            rows = expected_rows(expected, tensor)
            wrong = tensor != (rows if rows.is_cuda else rows.pin_memory().to("cuda", non_blocking=True))
        found = torch.stack([wrong.sum(), tensor.amin().long(), tensor.amax().long()])
        self._reads.append((expected, found))

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def made(self, rows: int, number: int) -> torch.Tensor:
        return torch.full((rows,), number, device="cuda")

    def prepared(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.cuda()

    @contextmanager
    def capture(self, mode: str, like: torch.Tensor) -> Iterator[Replay]:
        graph, static = torch.cuda.CUDAGraph(), torch.zeros_like(like)

        def replay(tensor: torch.Tensor, number: int) -> None:
            static.copy_(tensor)
            graph.replay()
            self.read(static, number + 1)

        with torch.cuda.graph(graph, capture_error_mode=mode):
            static.add_(1)
            yield replay

    @contextmanager
    def limit(self, nbytes: int) -> Iterator[None]:
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / whole)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved()

    def copies(self, run: Callable[[], None]) -> int:
        copies, _ = device.spans_of(device.profiled(run))
        if not copies:
            pytest.skip("torch's profiler saw no copy: CUPTI may not be allowed here")
        return len(copies)

    def finish(self) -> None:
        torch.cuda.synchronize()
        reads, self._reads = self._reads, []
        wrong = []
        for number, (expected, found) in enumerate(reads):
            count, low, high = found.tolist()
            if count:
                wanted = expected if isinstance(expected, int) else f"{expected[0]}..{expected[-1]}"
                wrong.append(f"read {number} wanted {wanted} and found {count} others, {low}..{high}")
        if wrong:
            raise AssertionError(
                f"seed {self._seed}: {len(wrong)} of {len(reads)} reads: {'; '.join(wrong[:3])}"
            )


class Fake:
    """The device in software.

    Args:
        leave_out: names of calls that it does not hear, as of FakeDevice, as if they were left out.
        fake: makes the device in place of FakeDevice, from the same arguments.
        kind: of its trials, FakeTrial or like it.
    """

    is_gpu = False
    device = "cpu"

    def __init__(
        self,
        leave_out: Sequence[str] = (),
        fake: Callable[..., Any] | None = None,
        kind: Callable[..., Trial] | None = None,
    ) -> None:
        self._leave_out, self._fake, self._kind = tuple(leave_out), fake, kind or FakeTrial

    def trials(self, seconds: float) -> Iterator[Trial]:  # as many as there are orders
        import fake_device

        for seed, order in enumerate(fake_device.ORDERS):
            with self.trial(seed, order) as trial:
                yield trial

    @contextmanager
    def trial(self, seed: int = 0, order: str | None = None, *, is_fast: bool = False) -> Iterator[Trial]:
        import fake_device

        order = order or ("all" if is_fast else "none")
        fake = (self._fake or fake_device.FakeDevice)(order, seed, self._leave_out)
        with mock.patch.object(arrowcache.torch.device, "backend_of", return_value=fake):
            yield self._kind(seed, fake)


class FakeTrial:
    """A try on the fake: see Trial."""

    device = "fake"

    def __init__(self, seed: int, fake: Any) -> None:
        self.chance = random.Random(seed)
        self.streams = [fake.default, fake.compute_stream(), fake.compute_stream()]
        self.fake = fake

    def on(self, stream: Stream) -> Any:
        return self.fake.on(stream)

    def order(self, first: Stream, then: Stream) -> None:
        event = self.fake.event()
        self.fake.record(event, first)
        self.fake.wait(then, event)

    def sleep(self, seconds: float) -> None:
        """Its streams are as slow as they can be anyway."""

    def block(self, seconds: float) -> None:
        fake, until = self.fake, self.fake.clock + seconds
        fake.is_stuck = True

        def go_on() -> None:
            fake.is_stuck = fake.clock < until

        fake.on_pause = go_on

    def waited(self, device_seconds: float) -> float:  # its clock is not ours
        return self.fake.clock  # type: ignore[no-any-return]

    def read(self, tensor: torch.Tensor, expected: Expected) -> None:
        rows = expected_rows(expected, tensor).to(tensor.dtype)
        self.fake.read(tensor, rows.expand(tensor.shape))

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.fake.pin(tensor.clone())  # type: ignore[no-any-return]

    def made(self, rows: int, number: int) -> torch.Tensor:
        return self.fake.made(torch.full((rows,), number))  # type: ignore[no-any-return]

    def prepared(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    @contextmanager
    def capture(self, mode: str, like: torch.Tensor) -> Iterator[Replay]:  # the fake's is global
        with self.fake.capture():
            yield self.read

    @contextmanager
    def limit(self, nbytes: int) -> Iterator[None]:
        had = self.fake.most_bytes
        self.fake.most_bytes = self.fake.memory_bytes + nbytes
        try:
            yield
        finally:
            self.fake.most_bytes = had

    def reserved(self) -> int:
        return self.fake.memory_bytes  # type: ignore[no-any-return]

    def copies(self, run: Callable[[], None]) -> int:
        counted: list[int] = []
        copy = self.fake.copy

        def count(pairs: Sequence[Any], stream: Stream) -> None:
            counted.append(len(pairs))
            copy(pairs, stream)

        self.fake.copy = count
        try:
            run()
        finally:
            self.fake.copy = copy
        return sum(counted)

    def finish(self) -> None:
        self.fake.finish()
        if self.fake.errors:
            raise AssertionError(
                f"order {self.fake.order}: {len(self.fake.errors)}: {'; '.join(self.fake.errors[:3])}"
            )


def _cycles_per_second() -> float:
    """Of `torch.cuda._sleep`, once clocks are up."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):
        start.record()
        torch.cuda._sleep(_SLEEP_CYCLES)
        end.record()
        end.synchronize()
    return 1000 * _SLEEP_CYCLES / start.elapsed_time(end)


class Numbers:
    """Endless batches: all leaves of the n-th hold n.

    `x` is large, `y` and `z` are small; now and then `x` is in pinned memory, or there is a leaf `made` on
    the device. All else lies in memory that the next batch of as many rows is written to. `given` has the
    number of each batch, and which leaves it has.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._number = 0
        self._memory: dict[int, dict[str, torch.Tensor]] = {}
        self.given: deque[tuple[int, list[str]]] = deque()

    def __iter__(self) -> Numbers:
        self.given.clear()
        return self

    def __next__(self) -> dict[str, Any]:
        self._number += 1
        chance = self._trial.chance
        rows = chance.choice([64, 64, 64, 80, 96])
        if rows not in self._memory:
            self._memory[rows] = {
                "x": torch.empty(rows, WIDTH),
                "y": torch.empty(rows, dtype=torch.int64),
                "z": torch.empty(rows, 3, dtype=torch.int32),
            }
        batch = {name: leaf.fill_(self._number) for name, leaf in self._memory[rows].items()}
        if chance.random() < 0.25:
            batch["x"] = self._trial.pin(batch["x"])
        if chance.random() < 0.25:
            self._trial.sleep(1e-3)
            batch["made"] = self._trial.made(rows, self._number)
        self.given.append((self._number, list(batch)))
        return batch


def alike(count: int, rows: int = 80, small: int = 0) -> list[dict[str, torch.Tensor]]:
    """Batches whose x, (rows, WIDTH) float32, holds their number; and so many small leaves."""
    return [
        {"x": torch.full((rows, WIDTH), float(number))}
        | {f"y{leaf}": torch.full((rows,), number) for leaf in range(small)}
        for number in range(count)
    ]


@contextmanager
def cache_of_numbers(rows: int = CACHE_ROWS, segment_bytes: str = "4MiB") -> Iterator[ac.Cache]:
    """A cache whose rows hold their number, in both columns."""
    schema = ac.Schema({"x": ac.Tensor("float32", (CACHE_WIDTH,)), "y": ac.Tensor("int64")})
    with tempfile.TemporaryDirectory(prefix="device-proof-") as folder:
        cache = ac.Cache.create(Path(folder) / "cache", schema, "1GiB", segment_bytes=segment_bytes)
        with cache, cache.writer() as writer:
            for start in range(0, rows, BATCH_ROWS):
                y = np.arange(start, start + BATCH_ROWS)
                writer.extend(x=np.repeat(y[:, None], CACHE_WIDTH, 1).astype(np.float32), y=y)
            writer.close()
            yield cache


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """A transform: what it makes lies in memory of its own."""
    return {"x": 2 * batch["x"], "y": batch["y"]}
