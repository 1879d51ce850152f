"""Samplers of pools whose tasks' content is known, and what of them is published."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from helpers import DEADLINE_SECONDS, ramp_rows, read_ids, segment_files
from helpers import sample as row

import arrowcache as ac

QUICK: dict[str, Any] = {"progress": False, "workers": 2}


def draws() -> Callable[..., Any]:
    """A sampler of endless random ids. Made here, so that it is pickled by value."""

    def sampler(rng):
        while True:
            yield row(int(rng.integers(1 << 20)))

    return sampler


def expected(number: int, seed: int = 0, rows: int | None = None) -> list[int]:
    """The first ids of a task of `draws()`, by the documented formula; as many as it publishes."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number,)))
    return [int(rng.integers(1 << 20)) for _ in range(ramp_rows(number) if rows is None else rows)]


def tasks(cache: ac.Cache, pool: str = "default.0") -> dict[int, list[int]]:
    """Published task numbers and their ids, by names and a plain Arrow reader; no task twice."""
    found: dict[int, list[int]] = {}
    for path in segment_files(cache):
        name, _, number = path.stem.split("-", 2)[2].rpartition(".")
        if name == pool:
            assert int(number) not in found
            found[int(number)] = read_ids(path)
    return found


def sampled(cache: ac.Cache, sampler: Any = None, **options: Any) -> ac.PoolStats:
    """All tasks of a pool, to their end."""
    with ac.SamplerPool(cache, sampler or draws(), **QUICK | options) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        return pool.stats()


def gated(folder: Path, gate: Path) -> Callable[..., Any]:
    """Like `draws()`, but tasks note their process and wait for the gate after their first sample."""

    def sampler(rng):
        yield row(int(rng.integers(1 << 20)))
        Path(folder, str(os.getpid())).touch()
        while not os.path.exists(gate):
            time.sleep(0.01)
        while True:
            yield row(int(rng.integers(1 << 20)))

    return sampler


def fails_at(number: int) -> Callable[..., Any]:
    """Like `draws()`, but this task fails."""
    unlucky = expected(number)[0]

    class Peculiar(Exception):
        """It cannot be unpickled, as many exceptions in the wild."""

        def __init__(self, code, text):
            super().__init__(f"{text} {code}")

    def read_remote_scan(rng):
        while True:
            found = int(rng.integers(1 << 20))
            if found == unlucky:
                raise Peculiar(17, "no such scan")
            yield row(found)

    return read_remote_scan
