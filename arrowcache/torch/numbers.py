"""Epoch numbers that all processes of a DataLoader count alike.

An IterableDataset is copied to each worker, and the main process never learns that an epoch begins:
workers that live for one epoch would all begin with number 0, for ever. So the count lies in memory
that a dataset shares with its copies. All workers of one pass give the same token; the first to come
takes the next number, the others get the same. Whoever calls must hold cache.lock.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_PASSES = 64  # that are told apart at once
_MASK = (1 << 63) - 1
_MOST_WORKERS = 62


class Turn(NamedTuple):
    """Which worker of how many asks, in which pass of which DataLoader iterator."""

    worker: int
    workers: int
    base_seed: int  # the same in all workers of an iterator
    passes: int  # of this process before, which all workers of an iterator count alike

    @property
    def token(self) -> int:
        return (self.base_seed * 1_000_003 + self.passes) & _MASK


class EpochNumbers:
    """The next epoch's number, and the numbers of the last passes.

    Args:
        table: of another process, or None for a new one.
    """

    def __init__(self, table: torch.Tensor | None = None) -> None:
        if table is None:
            table = torch.zeros(2 + 3 * _PASSES, dtype=torch.int64)
        self.table = table if table.is_shared() else table.share_memory_()  # type: ignore[no-untyped-call]

    def set(self, number: int) -> None:
        """Have the next pass be of this number."""
        self.table[0] = number

    def raise_to(self, number: int) -> None:
        """Have the next pass be of this number, unless it is of a higher one."""
        self.table[0] = max(int(self.table[0]), number)

    def take(self, turn: Turn) -> int:
        """The number of a pass."""
        table, bit = self.table, 1 << (turn.worker % _MOST_WORKERS)
        if turn.workers > 1:
            for at in range(2, len(table), 3):
                token, number, seen = table[at : at + 3].tolist()
                if token == turn.token and seen and not seen & bit:
                    table[at + 2] = seen | bit
                    return int(number)
        number = int(table[0])
        table[0] = number + 1
        at = 2 + 3 * (int(table[1]) % _PASSES)
        table[1] += 1
        for old in range(2, len(table), 3):
            if int(table[old]) == turn.token:
                table[old + 2] = 0  # the same seed was set again: another pass
        table[at : at + 3] = torch.tensor([turn.token, number, bit])
        return number
