"""Roles: what the storm's processes do, each until the file `stop` or its own `leave` appears.

Whatever they find wrong is an AssertionError, and ends them; what they did is in their tally.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import random
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
from storm.content import Batch, Pass, check, draws, rows_of
from storm.readers import KINDS, WAIT_SECONDS, Reader, is_by_its_workers
from storm.tally import Tally
from storm.usage import Usage

import arrowcache as ac

WRITER, POOL = "writer", "pool"
_MAX_HELD = 6  # batches
_POOLS = 2  # numberings of tasks that pools share


@dataclass(frozen=True)
class Post:
    """Where a process works, and as what.

    An elder works from the beginning to the end, is not killed itself, and compares what it holds.
    """

    kind: str
    number: int  # no other process has it
    cache: Path
    folder: Path  # of the storm's own files
    seed: int
    is_elder: bool = False

    @property
    def tally(self) -> Path:
        return self.folder / "tallies" / f"{self.number:05d}"

    @property
    def leave(self) -> Path:
        return self.folder / f"leave-{self.number}"

    @property
    def warm(self) -> Path:
        """Made by an elder that has read its first epochs."""
        return self.folder / f"warm-{self.number}"

    @property
    def begin(self) -> Path:
        """Made when all elders are warm."""
        return self.folder / "begin"

    def is_over(self) -> bool:
        return (self.folder / "stop").exists() or self.leave.exists()


def work(post: Post) -> list[str]:
    """Returns: of an elder, what it holds more of in the end than after its first epoch."""
    multiprocessing.set_start_method("fork", force=True)  # as in a user's script, and not as a `Child` has it
    warnings.filterwarnings("ignore", "a writer has been waiting")  # for who was stopped
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where it hangs
    tally = Tally(post.tally)
    chance = random.Random(f"{post.seed} {post.number}")
    if post.kind == WRITER:
        write(post, tally)
    elif post.kind == POOL:
        sample(post, tally, chance)
    else:
        return _Reading(post, tally, chance).run()
    return []


def write(post: Post, tally: Tally) -> None:
    number = post.number << 32
    with ac.Cache.open(post.cache).writer(timeout=WAIT_SECONDS) as writer:
        while not post.is_over():
            writer.extend(rows_of(np.arange(number, number + 16)))
            number += 16
            tally.add(written_rows=16)


class Numbering(TypedDict):
    """What decides which tasks a pool does, and what each of them draws: arguments of `SamplerPool`."""

    name: str
    seed: int


def numbering_of(number: int) -> Numbering:
    """Of a post. Another name alone would be new numbers for the same rows: task k is of a seed, and k."""
    return Numbering(name=f"pool{number % _POOLS}", seed=number % _POOLS)


def sample(post: Post, tally: Tally, chance: random.Random) -> None:
    cache = ac.Cache.open(post.cache)
    numbering = numbering_of(post.number)
    while not post.is_over():
        published = rows = 0
        try:
            with ac.SamplerPool(cache, draws, workers=2, progress=False, **numbering) as pool:
                while not post.is_over():
                    with suppress(TimeoutError):
                        pool.wait(segments=published + 1, timeout=0.5)
                    stats = pool.stats()
                    tally.add(written_rows=stats.rows - rows)
                    published, rows = stats.segments, stats.rows
                    if chance.random() < 0.01:
                        break
        except ac.SamplerError as error:  # its workers were killed more often than it tries again
            if "was killed by signal 9" not in str(error):
                raise
            tally.add(restarts=1)


class _Reading:
    """One reader's life: epochs, what it holds of them, and what it held before and after."""

    def __init__(self, post: Post, tally: Tally, chance: random.Random) -> None:
        self._post, self._tally, self._chance = post, tally, chance
        self._cache = ac.Cache.open(post.cache)
        self._held: deque[Batch] = deque()

    def run(self) -> list[str]:
        if not self._post.is_elder:
            self._read()
            return []
        self._read(epochs=4)
        before = self._usage()
        self._post.warm.touch()
        while not (
            self._post.begin.exists() or self._post.is_over()
        ):  # it would only keep others from coming so far
            time.sleep(0.02)
        self._read()
        return self._usage().growth_since(before)

    def _usage(self) -> Usage:
        self._held.clear()
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "QueueFeederThread":  # of a DataLoader that ended; it ends by itself
                thread.join(WAIT_SECONDS)
        return Usage.of()

    def _read(self, epochs: int | None = None) -> None:
        """Read so many epochs, or until it is over, and let go of everything."""
        make = KINDS[self._post.kind]
        done = 0
        while (done < epochs) if epochs else not self._post.is_over():
            try:
                with closing(make(self._cache, self._chance)) as reader:
                    while (done < epochs) if epochs else not self._post.is_over():
                        self._read_one(reader)
                        done += 1
            except Exception as error:  # torch raises in the main thread, wherever that is
                if not is_by_its_workers(error):
                    raise
                self._tally.add(restarts=1)
        self._held.clear()

    def _read_one(self, reader: Reader) -> None:
        everything, is_whole = Pass(), True
        leaves = self._chance.random() < 0.05
        batches: Iterator[Batch] = reader.epoch()
        for batch in batches:
            self._tally.add(delivered_rows=everything.add(batch))
            if self._chance.random() < 0.05:
                self._held.append(batch)
            if leaves and self._chance.random() < 0.1:
                is_whole = False
                break
        del batches
        everything.end(is_whole=is_whole and self._post.kind != "ranks")
        self._tally.add(epochs=1)
        self._read_held()

    def _read_held(self) -> None:
        """Read again what was kept; let go of the oldest, of all where somebody waits for them."""
        rows = sum(map(check, self._held))
        is_pressed = self._cache.stats().waiting_writers > 0
        self._tally.add(held_rows=rows, pressed_rows=rows * is_pressed)
        if is_pressed and self._chance.random() < 0.5:
            self._held.clear()
        while len(self._held) > _MAX_HELD:
            self._held.popleft()
