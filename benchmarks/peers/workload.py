"""What every peer is given to store and asked to deliver, and what an adapter of a peer is.

Nothing but NumPy and the standard library is imported here: adapters run in environments of their own,
in which arrowcache and its dependencies are not installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_CHUNK_BYTES = 16 << 20

#: Rows `x` (rows, row_bytes // 4) of float32, and `y` (rows,) of int64: the number of each.
Samples = tuple[NDArray[np.float32], NDArray[np.int64]]
#: The same as what a peer delivers: ndarrays, or tensors of the CPU that NumPy can view.
Batch = tuple[Any, Any]


@dataclass(frozen=True)
class Workload:
    """A data set of incompressible rows, and the batches that are asked of it.

    Row i is random but for its first and its last number, which are i: so a row that is torn, or
    delivered under another's label, is noticed.
    """

    row_bytes: int
    rows: int
    batch_rows: int

    @property
    def columns(self) -> int:
        """Numbers of a row."""
        return self.row_bytes // 4

    @property
    def nbytes(self) -> int:
        return self.row_bytes * self.rows

    def chunks(self) -> Iterator[Samples]:
        """All rows in order, some 16 MiB at a time."""
        chunk = max(1, _CHUNK_BYTES // self.row_bytes)
        for start in range(0, self.rows, chunk):
            y = np.arange(start, min(start + chunk, self.rows))
            x = np.random.default_rng(start).random((len(y), self.columns), np.float32)
            x[:, 0] = x[:, -1] = y
            yield x, y

    def samples(self) -> Iterator[Samples]:
        """All rows in order, one at a time: `x` (columns,), `y` ()."""
        for x, y in self.chunks():
            yield from zip(x, y, strict=True)

    def digests(self) -> NDArray[np.uint32]:
        """What `digest` gives of each row, in order."""
        return np.concatenate([digest(x) for x, _ in self.chunks()])

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def digest(x: NDArray[np.float32]) -> NDArray[np.uint32]:
    """A number of each row (rows,) that changes if a number within it does."""
    return np.bitwise_xor.reduce(np.ascontiguousarray(x).view(np.uint32), axis=1)


class Adapter(Protocol):
    """A module of `benchmarks.peers.adapters`: one peer, used as its documentation says.

    It imports the peer inside its functions, so that importing it costs nothing.
    """

    @staticmethod
    def write(folder: Path, workload: Workload) -> None:
        """Write the data set in the peer's own format into an empty folder."""

    @staticmethod
    def loader(
        folder: Path, workload: Workload, *, workers: int, shuffled: bool
    ) -> AbstractContextManager[Iterable[Batch]]:
        """Open what was written. Each `iter` of what this gives is an epoch: all rows once, but for an
        incomplete last batch (of each worker), in another order each time if `shuffled`.

        Args:
            workers: processes (or threads, where the peer has those instead) beside the consumer's
                thread; 0: as few as the peer can do with.
        """

    # One whose state can be saved in mid-epoch has, too:
    #
    # def resume(folder: Path, workload: Workload, *, workers: int, state: bytes | None, batches: int | None)
    #     -> tuple[list[int], bytes]
    #
    # It takes some batches of a shuffled epoch (None: all that are left) with so many workers, from the
    # beginning or where a state says, and returns the labels of their rows and the state after them.
