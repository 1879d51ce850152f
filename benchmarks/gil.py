"""The benchmark of the GIL: the share of its processor that a training loop keeps while batches come.

Run: `python -m benchmarks gil`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from multiprocessing.synchronize import Event
from typing import TYPE_CHECKING, Any

import numpy as np

import arrowcache as ac
from benchmarks.harness import (
    GIB,
    MIDDLE,
    Figures,
    Options,
    Round,
    filled,
    mapped_files,
    random_blocks,
    scratch,
)
from benchmarks.usage import spin

if TYPE_CHECKING:
    from typing import Self

TURN_SECONDS = 0.5
SHARE_SECONDS, SHARE_TURNS = 1.0, 9
RATES = 0.6e9, 2e9  # bytes a second


def gil(options: Options) -> Iterator[Round | Figures]:
    """What does a busy training thread keep of its speed while the loader delivers?

    Question: a pure-Python loop in the main thread that takes a batch from a Loader at a fixed rate (0.6
    and 2 GB/s), against the same loop while *another process* copies as much from the same files: the
    difference is the time for which the loader holds the GIL; memory traffic and the machine's noise are in
    both.
    Method: half a second a turn; the other process is there all the time, and rests in the loader's turns.
    Also printed: the rate that was really delivered, and `shares`, which are steadier than rates.
    """
    from arrowcache.torch import Loader

    row_bytes, batch_rows = MIDDLE
    batch_bytes = row_bytes * batch_rows
    for rate in RATES:
        with (
            filled(options, row_bytes) as cache,
            Loader(cache, batch_rows, epoch_rows=10**9) as batches,
            Copying(str(cache.path), rate, batch_bytes) as copying,
        ):
            stream = batches.repeat()
            for _ in range(options.of(GIB) // batch_bytes):
                next(stream)
            delivered = []

            def beside_loader(
                rate: float = rate, stream: Any = stream, delivered: list[float] = delivered
            ) -> float:
                loops, gigabytes = spin(lambda: next(stream), rate, batch_bytes, TURN_SECONDS)
                delivered.append(gigabytes)
                return 1 / loops

            ways = {"beside the loader": beside_loader, "beside a process that copies": copying.spin_beside}
            over, key = ["beside a process that copies"], "{title}: what the loop kept"
            yield Round(f"at {rate / 1e9:g} GB/s", ways, over, 1, "loops", turns=31, warm=0, key=key)
            yield Figures(f"at {rate / 1e9:g} GB/s, delivered", {"GB/s": statistics.median(delivered)})
            yield from shares(options, cache, stream, rate)
            stream.close()


def shares(options: Options, cache: ac.Cache, stream: Iterator[Any], rate: float) -> Iterator[Figures]:
    """The loop's processor seconds over the clock, with batches taken at a rate by a thread beside it.

    Also by the loop itself, without those inside of `next`. The control is a thread that sleeps as often.
    Peers have two threads or processes, as their documents say; one that is not installed is named.

    Args:
        stream: of a Loader of the cache.
    """
    row_bytes, batch_rows = MIDDLE
    blocks = random_blocks(mapped_files(cache), row_bytes * batch_rows, options.of(GIB))
    period = row_bytes * batch_rows / rate

    takes: dict[str, Callable[[], object]] = {
        "a thread that sleeps": lambda: None,
        "arrowcache.torch.Loader": partial(next, stream),
    }
    peers = {
        "DataLoader, 2 workers": of_torch(blocks),
        "SPDL, 2 threads": of_spdl(blocks),
        "litdata, 2 workers": of_litdata(options, len(blocks) * batch_rows, row_bytes, batch_rows),
    }
    for name, batches in peers.items():
        try:
            next(batches)
        except ImportError as error:
            print(f"{name}: left out, {error}")
        else:
            takes[name] = partial(next, batches)
    found: dict[str, list[float]] = {}
    for take in takes.values():
        for _ in range(64):
            take()
    for _ in range(options.turns(SHARE_TURNS)):
        for name, take in takes.items():
            found.setdefault(f"{name}, beside", []).append(share_beside(take, period))
            found.setdefault(f"{name}, in the loop", []).append(share_within(take, period))
    for batches in peers.values():
        batches.close()
    title = f"at {rate / 1e9:g} GB/s, the loop's own processor seconds over the clock"
    yield Figures(title, {way: statistics.median(values) for way, values in found.items()})


def of_torch(blocks: list[np.ndarray[Any, Any]]) -> Generator[Any]:
    """Batches of np.memmap: a copy of a block each, as a DataLoader's batch_sampler has them made."""
    from torch.utils.data import DataLoader, Dataset

    class Batches(Dataset[Any]):
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, number: int) -> Any:
            return np.array(blocks[number % len(blocks)])

    # litdata sets another context for the whole process
    yield from DataLoader(Batches(), batch_size=None, num_workers=2, multiprocessing_context="fork")


def of_spdl(blocks: list[np.ndarray[Any, Any]]) -> Generator[Any]:
    """The same copies, by the threads of a pipeline."""
    from spdl.pipeline import PipelineBuilder

    builder = PipelineBuilder().add_source(itertools.cycle(blocks))
    pipeline = builder.pipe(np.array, concurrency=2).add_sink(3).build(num_threads=2)
    with pipeline.auto_stop():
        yield from pipeline


def of_litdata(options: Options, rows: int, row_bytes: int, batch_rows: int) -> Generator[Any]:
    """Shuffled batches of as many rows, out of chunks of 64 MB in a local folder."""
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    with scratch(options.folder) as folder:
        samples = partial(random_rows, rows, row_bytes)
        chunks = str(folder / "chunks")
        optimize(samples, [0], chunks, chunk_bytes="64MB", num_workers=1, verbose=False)
        dataset = StreamingDataset(chunks, shuffle=True)
        loader = StreamingDataLoader(dataset, batch_size=batch_rows, num_workers=2)
        while True:
            yield from loader


def random_rows(rows: int, row_bytes: int, _: int) -> Iterator[Any]:
    import torch

    for _ in range(rows):
        yield torch.randint(256, (row_bytes,), dtype=torch.uint8)


def share_beside(take: Callable[[], object], period: float) -> float:
    """The share that a loop keeps of its processor; a thread takes a batch each `period` seconds."""
    is_over = threading.Event()

    def consume() -> None:
        begun, number = time.perf_counter(), 0
        while not is_over.is_set():
            take()
            number += 1
            time.sleep(max(0.0, begun + number * period - time.perf_counter()))

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        began, cpu = time.perf_counter(), time.thread_time()
        while time.perf_counter() - began < SHARE_SECONDS:
            sum(range(200))
        return (time.thread_time() - cpu) / (time.perf_counter() - began)
    finally:
        is_over.set()
        thread.join()


def share_within(take: Callable[[], object], period: float) -> float:
    """The share that a loop keeps of its processor; it takes a batch each `period` seconds itself."""
    began, cpu, inside, taken = time.perf_counter(), time.thread_time(), 0.0, 0
    while (now := time.perf_counter()) - began < SHARE_SECONDS:
        sum(range(200))
        if now - began >= taken * period:
            before = time.thread_time()
            take()
            inside += time.thread_time() - before
            taken += 1
    return (time.thread_time() - cpu - inside) / (time.perf_counter() - began)


class Copying:
    """Another process, which copies blocks of the same files at a rate while it may; a context manager."""

    def __init__(self, folder: str, rate: float, batch_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._rate, self._batch_bytes = rate, batch_bytes
        self._is_ready, self._may_copy, self._is_over = context.Event(), context.Event(), context.Event()
        arguments = folder, rate, batch_bytes, self._is_ready, self._may_copy, self._is_over
        self._process = context.Process(target=copy_at_rate, args=arguments)

    def spin_beside(self) -> float:
        """Seconds of a loop that takes nothing, while the process copies."""
        self._may_copy.set()
        try:
            return 1 / spin(lambda: None, self._rate, self._batch_bytes, TURN_SECONDS)[0]
        finally:
            self._may_copy.clear()

    def __enter__(self) -> Self:
        self._process.start()
        while not self._is_ready.wait(1.0):
            assert self._process.is_alive(), "the process that copies has failed"
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._may_copy.set()
        self._process.join()


def copy_at_rate(
    folder: str, rate: float, batch_bytes: int, is_ready: Event, may_copy: Event, is_over: Event
) -> None:
    with ac.Cache.open(folder) as cache:
        blocks = random_blocks(mapped_files(cache), batch_bytes, GIB // 2)
    slot = np.empty(batch_bytes, np.uint8)
    for block in blocks:
        np.copyto(slot, block)
    is_ready.set()
    while not is_over.is_set():
        may_copy.wait()
        begun, number = time.perf_counter(), 0
        while may_copy.is_set() and not is_over.is_set():
            np.copyto(slot, blocks[number % len(blocks)])
            number += 1
            time.sleep(max(0.0, begun + number * batch_bytes / rate - time.perf_counter()))
