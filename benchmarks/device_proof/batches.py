"""Batches: sources and caches whose rows say what they must hold."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import arrowcache as ac
from benchmarks.device_proof.target import Trial

WIDTH = 4096  # of x: 16 KiB a row
CACHE_ROWS, CACHE_WIDTH, BATCH_ROWS = 240, 8192, 48  # 32 KiB a row, 1.5 MiB a batch


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
