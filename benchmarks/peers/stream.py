"""What samplers publish in the rolling case, and the trainer that reads it: the same for every peer.

Row i of the data is a row of a pool of random numbers, but for three of them: the first and the last are i,
the second is the time at which it was drawn. So every process can tell whether a row is the one that its
label says, whole, and how old it is. Samplers draw ids at random from a data set larger than the cache.

Nothing but NumPy and the standard library is imported here: see `workload`.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.workload import Samples, Workload

POOL_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20  # a sampler yields so much at once
BEHIND_SECONDS = 0.5  # so much delay a sampler makes up for, the rest is lost
LATE_STEPS = 10  # of waking up too late, but not of waiting for data, the trainer makes up for so much
HAND_OVER_SECONDS = 1e-3  # a shorter wait is no stall: so long may handing a batch over take
LOOK_SECONDS = 0.5  # how often the trainer asks a peer for the peer's own account of stalls

# What the processes tell the driver: places in an array of float64 that they share.
STOP, FAILED, DELIVERED, WRONG, TORN, WAITED, STALLED, STALLS, STALL_WORST, OWN_STALL = range(10)
AGE_SUM, AGE_ROWS, AGE_WORST, PUBLISHED = range(10, 14)  # PUBLISHED is the first of one place a sampler
MAX_SAMPLERS = 8
COUNTERS = PUBLISHED + MAX_SAMPLERS


@dataclass(frozen=True)
class Plan(Workload):
    """One run of the rolling case.

    Args:
        rows: of the data set, which the cache has room for a quarter of.
        capacity_bytes: what the peer may keep.
        in_rate: bytes a second that all samplers together publish.
        out_rate: bytes a second that the trainer consumes; 0: as fast as it can.
        shuffle: "rows" or "window"; peers have a shuffle of their own.
        segment_bytes: of a segment or shard.
        headroom: of an arrowcache.
        prefetch: batches that a loader may have ready, where it has such a setting.
        origin: on the monotonic clock, which all processes of a machine share; ages count from it.
    """

    capacity_bytes: int
    in_rate: float
    out_rate: float
    shuffle: str
    samplers: int
    segment_bytes: int
    headroom: float
    prefetch: int
    origin: float

    @property
    def batch_bytes(self) -> int:
        return self.row_bytes * self.batch_rows

    @property
    def block_rows(self) -> int:
        return max(1, BLOCK_BYTES // self.row_bytes)

    def chunks(self) -> Iterator[Samples]:
        """The data set in order, a block at a time. Its rows have no age."""
        pool = pool_of(self)
        for start in range(0, self.rows, self.block_rows):
            ids = np.arange(start, min(start + self.block_rows, self.rows))
            x = np.empty((len(ids), self.columns), np.float32)
            fill(x, ids, pool, 0.0)
            yield x, ids


@dataclass(frozen=True)
class Running:
    """A peer whose samplers publish.

    Args:
        handle: what `reader` needs, picklable by multiprocessing.
        published_bytes: of rows, since the start.
        waited_seconds: what samplers waited for room or for the peer, all together; None: not known.
        used_bytes: what now counts against `limit_bytes`.
        dropped: rows that made room for others, and those of them that were never read; None: not known.
        facts: of the peer's own, for the result.
    """

    handle: Any
    published_bytes: Callable[[], float]
    waited_seconds: Callable[[], float] | None
    used_bytes: Callable[[], int]
    limit_bytes: int
    dropped: Callable[[], tuple[int, int]] | None = None
    facts: Callable[[], dict[str, Any]] = dict


def adapter_of(name: str) -> Any:
    from benchmarks.peers.rolling_adapters import ADAPTERS  # each of which needs what is here

    return ADAPTERS[name]


def pool_of(plan: Plan) -> NDArray[np.float32]:
    """The random rows that all others are made from: (rows, columns)."""
    rows = max(1, POOL_BYTES // plan.row_bytes)
    return np.random.default_rng(0).random((rows, plan.columns), np.float32)


def fill(x: NDArray[np.float32], ids: NDArray[np.int64], pool: NDArray[np.float32], drawn: float) -> None:
    """Write the rows of these ids into x (len(ids), columns), drawn at this time after the origin."""
    np.take(pool, ids % len(pool), axis=0, out=x, mode="clip")
    x[:, 0] = x[:, -1] = ids
    x[:, 1] = drawn


class Source:
    """What one sampler draws from: rows at its share of the rate, a block at a time. Pickles as its plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._pool: NDArray[np.float32] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"plan": self.plan, "_pool": None}

    def blocks(self, rng: np.random.Generator) -> Iterator[Samples]:
        """Endlessly; each block is overwritten by the next one."""
        plan = self.plan
        if self._pool is None:
            self._pool = pool_of(plan)
            self._due = time.monotonic()
        x = np.empty((plan.block_rows, plan.columns), np.float32)
        seconds = x.nbytes / (plan.in_rate / plan.samplers)
        while True:
            now = time.monotonic()
            self._due = max(self._due, now - BEHIND_SECONDS) + seconds
            if self._due > now:
                time.sleep(self._due - now)
            ids = rng.integers(0, plan.rows, plan.block_rows)
            fill(x, ids, self._pool, time.monotonic() - plan.origin)
            yield x, ids


def publish(name: str, handle: Any, plan: Plan, index: int, counters: Any) -> None:
    """The main function of a sampler's process, for peers that bring none: put blocks until told to stop.

    The adapter has `writer(handle, plan)`, a context manager that gives a function of a block.
    """
    rng = np.random.default_rng(np.random.SeedSequence(0, spawn_key=(index,)))
    with adapter_of(name).writer(handle, plan) as put:
        for x, y in Source(plan).blocks(rng):
            if counters[STOP]:
                return
            put(x, y)
            counters[PUBLISHED + index] += x.nbytes


@contextmanager
def publishing(name: str, handle: Any, plan: Plan, counters: Any) -> Iterator[Callable[[], float]]:
    """Run the samplers' processes, for peers that bring none; what it gives tells the bytes so far."""
    context = multiprocessing.get_context("spawn")
    samplers = [
        context.Process(target=publish, args=(name, handle, plan, index, counters))
        for index in range(plan.samplers)
    ]
    for sampler in samplers:
        sampler.start()
    try:
        yield lambda: sum(counters[PUBLISHED : PUBLISHED + plan.samplers])
    finally:
        counters[STOP] = 1
        for sampler in samplers:
            sampler.join(10)
            if sampler.is_alive():
                sampler.kill()


def train(name: str, handle: Any, plan: Plan, counters: Any) -> None:
    """The main function of the trainer's process: take batches, copy, check, work, until told to stop.

    Time that it waited for data is not made up for. Rows are checked after the copy: what training would see.
    """
    pool, rng = pool_of(plan), np.random.default_rng(0)
    slot = np.zeros((plan.batch_rows, plan.columns), np.float32)
    step_seconds = plan.batch_bytes / plan.out_rate if plan.out_rate else 0.0
    looked = until = 0.0
    # The driver starts this process by spawn, and what a peer starts in it would be spawned, too.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    try:
        with adapter_of(name).reader(handle, plan) as reading:
            while not counters[STOP]:
                asked = time.monotonic()
                x, y = next(reading.batches)
                came = time.monotonic()
                kept = slot[: len(x)]
                np.copyto(kept, np.asarray(x))
                _check(kept, np.asarray(y).reshape(-1), pool, rng, came - plan.origin, counters)
                counters[WAITED] += came - asked
                until = max(until, came - LATE_STEPS * step_seconds) + step_seconds
                if came - asked > HAND_OVER_SECONDS:
                    counters[STALLED] += came - asked
                    counters[STALLS] += 1
                    counters[STALL_WORST] = max(counters[STALL_WORST], came - asked)
                    until = came + step_seconds
                if came - looked > LOOK_SECONDS:
                    counters[OWN_STALL], looked = reading.stall_seconds(), came
                counters[DELIVERED] += kept.nbytes
                del x, y
                time.sleep(max(0.0, until - time.monotonic()))
    except BaseException:
        counters[FAILED] = 1
        raise


def _check(
    x: NDArray[np.float32],
    y: NDArray[np.int64],
    pool: NDArray[np.float32],
    rng: np.random.Generator,
    now: float,
    counters: Any,
) -> None:
    """Count rows that are not their label's, a row of each batch that is torn inside, and ages."""
    counters[WRONG] += int(np.count_nonzero((x[:, 0] != y) | (x[:, -1] != y)))
    row = int(rng.integers(len(x)))
    counters[TORN] += not np.array_equal(x[row, 2:-1], pool[int(y[row]) % len(pool), 2:-1])
    drawn = x[:, 1]
    if drawn[0]:
        counters[AGE_SUM] += float(len(x) * now - drawn.sum(dtype=np.float64))
        counters[AGE_ROWS] += len(x)
        counters[AGE_WORST] = max(counters[AGE_WORST], now - float(drawn.min()))
