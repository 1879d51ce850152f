"""The data set that every peer stores and delivers.

Nothing but NumPy and the standard library is imported here: adapters run in environments of their own,
in which arrowcache and its dependencies are not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

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
