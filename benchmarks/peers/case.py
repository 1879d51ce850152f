"""One case, in a fresh process of the peer's own environment: see `benchmarks.fresh`.

`write` stores the data set; `measure` delivers it and returns lists with a figure a run. A run is as many
whole epochs as take half a second; beside each, the same consumer takes a quarter of its bytes, at least 256
MiB, from elsewhere in memory. The epoch before the first run is not counted: in it every row is looked at.
Cold cases have no such epoch, and one run. Of every epoch the bytes are counted.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.adapters import ADAPTERS, Adapter
from benchmarks.peers.registry import PEERS, Peer
from benchmarks.peers.workload import Batch, Workload, digest
from benchmarks.usage import spin, tree_cpu_seconds

RUNS = 5
RUN_SECONDS = 0.5  # at least
SOURCE_BYTES = 128 << 20  # of memcpy, far more than the processor's caches hold
MAX_SECONDS = 20.0  # of all runs: a slow peer has fewer
SPIN_RATE, SPIN_SECONDS, SPIN_TURNS = 0.2e9, 1.0, 3

Consumer = Callable[[NDArray[np.float32]], None]


@dataclass(frozen=True)
class Case:
    """What is measured of a peer.

    Args:
        consumer: "copy" (into one preallocated slot) or "read" (every byte, once).
        is_cold: the files are not in the page cache.
        spins: measure, too, what a spinning Python thread keeps.
    """

    workload: Workload
    workers: int = 0
    shuffled: bool = True
    consumer: str = "copy"
    is_cold: bool = False
    spins: bool = False

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Case:
        return Case(**{**fields, "workload": Workload(**fields["workload"])})


def peer_of(name: str) -> Peer:
    return next(peer for peer in PEERS if peer.name == name)


def adapter_of(name: str) -> type[Adapter]:
    return ADAPTERS[peer_of(name).module]


def consumer_of(kind: str, workload: Workload) -> Consumer:
    if kind == "copy":
        slot = np.zeros((workload.batch_rows, workload.columns), np.float32)
        return lambda x: np.copyto(slot[: len(x)], x)
    return lambda x: cast(None, np.bitwise_xor.reduce(x.reshape(-1).view(np.uint64)))


def check(epoch: Iterable[Batch], workload: Workload, *, shuffled: bool, once: bool = True) -> None:
    """Make sure that an epoch is what was asked: whole batches, each row once and intact, in random order.

    Intact are all bytes of it, by a digest.

    Rows of incomplete batches may be missing, but not more than one in ten. Not `once`: rows are drawn with
    replacement, so that 63 % of them are expected, and half must be there.
    """
    seen, digests = [], workload.digests()
    for x, y in epoch:
        x, y = np.asarray(x), np.asarray(y).reshape(-1)
        if x.shape != (workload.batch_rows, workload.columns) or x.dtype != np.float32:
            raise AssertionError(f"a batch of {x.shape} {x.dtype} is not what was asked")
        if not ((y >= 0) & (y < workload.rows)).all():
            raise AssertionError(f"a label that no row has: {y.min()} to {y.max()}, of {workload.rows} rows")
        if not ((x[:, 0] == y).all() and (x[:, -1] == y).all() and (digest(x) == digests[y]).all()):
            raise AssertionError("a row is not what was written under its label")
        seen.append(y.copy())
    ids = np.concatenate(seen)
    different = len(np.unique(ids))
    if (once and different != len(ids)) or different < 0.5 * workload.rows or len(ids) < 0.9 * workload.rows:
        raise AssertionError(f"{len(ids)} rows, {different} of them different, of {workload.rows}")
    in_order = float((np.diff(ids) == 1).mean())
    if shuffled and in_order > 0.5:
        raise AssertionError(f"not shuffled: {in_order:.0%} of the rows follow the one before")


def memcpy_seconds(source: NDArray[np.float32], workload: Workload, consumer: Consumer, nbytes: int) -> float:
    """Seconds in which the same consumer takes so many bytes that lie ready in memory."""
    batch_bytes = workload.batch_rows * workload.row_bytes
    starts = np.random.default_rng(1).permutation(len(source) // workload.batch_rows) * workload.batch_rows
    started = time.perf_counter()
    for start in itertools.islice(itertools.cycle(starts.tolist()), nbytes // batch_bytes):
        consumer(source[start : start + workload.batch_rows])
    return time.perf_counter() - started


def spinning(epochs: Iterable[Batch], workload: Workload) -> dict[str, list[float]]:
    """What a Python loop keeps of its speed while it takes batches at SPIN_RATE, and what it is given."""
    stream = itertools.chain.from_iterable(itertools.repeat(epochs))
    next(stream)
    batch_bytes = workload.batch_rows * workload.row_bytes
    kept, given = [], []
    for _ in range(SPIN_TURNS):
        beside, gigabytes = spin(lambda: next(stream), SPIN_RATE, batch_bytes, SPIN_SECONDS)
        # Its batches are ready, and nobody takes any.
        alone, _ = spin(lambda: None, SPIN_RATE, batch_bytes, SPIN_SECONDS)
        kept.append(beside / alone)
        given.append(gigabytes)
    return {"spin_kept": kept, "spin_gbps": given}


def write(name: str, folder: str, workload: dict[str, int]) -> None:
    adapter_of(name)(Path(folder), Workload(**workload)).write()


def measure(name: str, folder: str, fields: dict[str, Any]) -> dict[str, Any]:
    # What a peer leaves behind when its parent dies is this process' to wait for: its time counts.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    case = Case.from_json(fields)
    workload, consume = case.workload, consumer_of(case.consumer, case.workload)
    source = np.random.default_rng(0).random(
        (max(1, SOURCE_BYTES // workload.row_bytes), workload.columns), np.float32
    )
    figures: dict[str, list[float]] = {
        "gbps": [], "memcpy_gbps": [], "cpu_per_gb": [], "first_batch": []
    }  # fmt: skip
    with adapter_of(name)(Path(folder), workload, case.workers, shuffled=case.shuffled) as epochs:
        if not case.is_cold:
            started = time.perf_counter()
            epoch = iter(epochs)
            first = next(epoch)
            figures["start"] = [time.perf_counter() - started]
            once = peer_of(name).has_epochs
            check(itertools.chain([first], epoch), workload, shuffled=case.shuffled, once=once)
            del first, epoch
        begun = time.perf_counter()
        for _ in range(1 if case.is_cold else RUNS):
            used, started, nbytes, waits = tree_cpu_seconds(), time.perf_counter(), 0, []
            while not nbytes or (not case.is_cold and time.perf_counter() - started < RUN_SECONDS):
                asked, first = time.perf_counter(), nbytes
                for x, _ in epochs:
                    if nbytes == first:
                        waits.append(time.perf_counter() - asked)
                    x = np.asarray(x)
                    consume(x)
                    nbytes += x.nbytes
                if nbytes - first < 0.9 * workload.nbytes:
                    raise AssertionError(f"an epoch of {nbytes - first} bytes, of {workload.nbytes}")
            seconds = time.perf_counter() - started
            figures["gbps"].append(nbytes / seconds / 1e9)
            figures["cpu_per_gb"].append((tree_cpu_seconds() - used) / (nbytes / 1e9))
            copied = max(nbytes // 4, 1 << 28)
            figures["memcpy_gbps"].append(copied / memcpy_seconds(source, workload, consume, copied) / 1e9)
            figures["first_batch"].append(statistics.median(waits))
            if time.perf_counter() - begun > MAX_SECONDS:
                break
        if case.spins:
            figures |= spinning(epochs, workload)
    return {"version": version(peer_of(name).distribution), "own_bytes": source.nbytes, **figures}
