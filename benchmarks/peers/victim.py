"""What `faults.py` does harm to: a program in the peer's own environment that writes, reads or resumes.

It tells where it is in lines on its standard output: `HALF` of the rows are with the writer, the reader is
in `MID` epoch, and what an epoch had (`ROWS`, JSON). Started by `python -c`, so that its classes can be
pickled.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.case import adapter_of
from benchmarks.peers.workload import Samples, Workload

START = "from benchmarks.peers.victim import main; main()"
_MID_BATCH = 3
_PACE_SECONDS = 0.02  # a batch, or a piece that is written: time to be harmed in
_PIECE_BYTES = 1 << 20


class Slow(Workload):
    """The same rows in small pieces, which take their time."""

    def chunks(self) -> Iterator[Samples]:
        piece, given = max(1, _PIECE_BYTES // self.row_bytes), 0
        for x, y in super().chunks():
            for start in range(0, len(y), piece):
                given += len(y[start : start + piece])
                if given - piece < self.rows // 2 <= given:
                    _say("HALF")
                yield x[start : start + piece], y[start : start + piece]
                time.sleep(_PACE_SECONDS)


def _say(word: str, **values: Any) -> None:
    print(f"\n{word} {json.dumps(values)}", flush=True)


def _torn(x: NDArray[np.float32], y: NDArray[np.int64]) -> int:
    """How many rows are not what was written: another's, or with a hole."""
    whole = (x[:, 0] == y) & (x[:, -1] == y) & ((x[:, 1:-1] == 0).mean(axis=1) < 0.01)
    return int((~whole).sum())


def write(name: str, folder: Path, workload: Workload, *, slowly: bool) -> None:
    kind = Slow if slowly else Workload
    adapter_of(name).write(folder, kind(**workload.to_json()))


def read(name: str, folder: Path, workload: Workload, *, workers: int) -> None:
    """Read an epoch; rows that were delivered are told even where an error ends it."""
    seen, torn = [np.empty(0, np.int64)], 0
    with adapter_of(name).loader(folder, workload, workers=workers, shuffled=True) as epochs:
        try:
            for number, batch in enumerate(epochs):
                x, y = np.asarray(batch[0]), np.asarray(batch[1]).reshape(-1)
                torn += _torn(x, y)
                seen.append(y.copy())
                if number == _MID_BATCH:
                    _say("MID")
                time.sleep(_PACE_SECONDS)
        finally:
            rows = np.concatenate(seen)
            _say("ROWS", delivered=len(rows), different=len(np.unique(rows)), torn=torn)


def resume(
    name: str,
    folder: Path,
    workload: Workload,
    *,
    workers: int,
    batches: int | None,
    state: str | None,
    after: str,
) -> None:
    """Read some batches from the beginning, or from the state in a file; the state after them is another."""
    adapter = adapter_of(name)
    rows, then = adapter.resume(  # type: ignore[attr-defined]
        folder,
        workload,
        workers=workers,
        state=None if state is None else Path(state).read_bytes(),
        batches=batches,
    )
    Path(after).write_bytes(then)
    _say("ROWS", rows=[int(row) for row in rows])


def main() -> None:
    action, name, folder, text = sys.argv[1:]
    request = json.loads(text)
    workload = Workload(**request.pop("workload"))
    {"write": write, "read": read, "resume": resume}[action](name, Path(folder), workload, **request)
