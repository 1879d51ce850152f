"""Epoch counter: epoch numbers that all processes of a DataLoader agree on.

An IterableDataset is copied to each worker, and the main process does not see an epoch begin:
workers that live for one epoch would all begin with number 0, for ever. So the count is in memory
that a dataset shares with its copies. All workers of one pass give the same token; the first to come
takes the next number, the others get the same. The caller must hold cache.lock.

The table has the next number, the number of passes, the known headroom, and an entry for each
of the last passes: token, number, and words with a bit for each worker that took the number.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from arrowcache.reading.supply import Supply

_PASSES = 64  # distinguished at once
_BITS, _WORDS = 62, 16  # bits of a word in use, and words of an entry
MOST_WORKERS = _BITS * _WORDS
_MASK = (1 << 63) - 1
_HEAD = 4  # numbers before the entries


class Turn(NamedTuple):
    """The asking worker, in a pass of a DataLoader iterator."""

    worker: int
    workers: int
    base_seed: int  # the same in all workers of an iterator
    passes: int  # earlier passes of this process; all workers of an iterator count the same

    @property
    def token(self) -> int:
        return (self.base_seed * 1_000_003 + self.passes) & _MASK


class EpochCounter:
    """The next epoch's number, and the numbers of the last passes."""

    def __init__(self, table: torch.Tensor | None = None) -> None:
        if table is None:
            table = torch.zeros(_HEAD + _PASSES * (2 + _WORDS), dtype=torch.int64)
        self.table = table if table.is_shared() else table.share_memory_()  # type: ignore[no-untyped-call]

    def recall(self, supply: Supply) -> None:
        """Tell a supply of the headroom known to all: workers may live for one epoch only. Needs no lock."""
        if known := int(self.table[2]):
            supply.known = known - 1
        supply.warns = supply.warns and not self.table[3]

    def remember(self, supply: Supply, *, warned: bool) -> None:
        """Record an epoch's snapshot, and its loader's warning, for all. Needs no lock."""
        if supply.known < math.inf:
            self.table[2] = int(supply.known) + 1
        if warned:
            self.table[3] = 1

    def set(self, number: int) -> None:
        self.table[0] = number

    def raise_to(self, number: int) -> None:
        """Let the next pass have this number, unless its number is higher."""
        self.table[0] = max(int(self.table[0]), number)

    def take(self, turn: Turn) -> int:
        """Return the number of a pass.

        Raises: ValueError: more than MOST_WORKERS workers.
        """
        if turn.workers > MOST_WORKERS:
            raise ValueError(
                f"a CacheIterableDataset takes at most {MOST_WORKERS} workers, not {turn.workers}: "
                "lower num_workers"
            )
        entries = self.table[_HEAD:].view(_PASSES, 2 + _WORDS)
        word, bit = 2 + turn.worker // _BITS, 1 << turn.worker % _BITS
        if turn.workers > 1:
            for at, entry in enumerate(entries.tolist()):
                if entry[0] == turn.token and any(entry[2:]) and not entry[word] & bit:
                    entries[at, word] |= bit
                    return int(entry[1])
        number = int(self.table[0])
        self.table[0] = number + 1
        entries[entries[:, 0] == turn.token, 2:] = 0  # the same seed was set again: another pass
        taken = entries[int(self.table[1]) % _PASSES]
        self.table[1] += 1
        taken[:2], taken[2:] = torch.tensor([turn.token, number]), 0
        taken[word] = bit
        return number
