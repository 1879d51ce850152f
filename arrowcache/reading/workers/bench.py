"""Bench: the shared memory as a worker sees it: slots that others gave it, and a few words.

It owns the worker's mapping of the shared file. Arrays over a slot are lent to whoever gathers and
transforms; it knows when their last view has died, and so whether a slot may be handed over. It copies
a batch into its slot where it does not lie there already, and never asks for a slot: the maker does.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.workers.memory import array_over
from arrowcache.reading.workers.packing import Described, Packed
from arrowcache.reading.workers.shared import STAGES_OF_WORKERS

Places = Mapping[str, Sequence[tuple[int, int]]]  # name -> (offset, bytes) of each array


class Bench:
    """What one worker works on.

    Args:
        memory: the shared file, mapped.
        number: which of the workers this is.
    """

    def __init__(self, memory: mmap.mmap, number: int) -> None:
        self._memory = memory
        self._everything = array_over(memory, 0, np.uint8, (len(memory),))
        self._ended = array_over(memory, 0, np.int64, (1,))
        self._progress = array_over(memory, 8 + 8 * number, np.int64, (1,))
        self._lent: list[weakref.ref[Any]] = []  # owners of arrays over a slot

    def is_over(self, epoch: int) -> bool:
        """Whether nothing is wanted of an epoch any more."""
        return epoch <= int(self._ended[0])

    def tell(self, stage: str) -> None:
        """What this worker is at from now on: one of STAGES_OF_WORKERS."""
        self._progress[0] = time.perf_counter_ns() * 4 + STAGES_OF_WORKERS.index(stage) if stage else 0

    def ids(self, offset: int, rows: int) -> NDArray[np.int64]:
        """A copy of the row ids of a request."""
        return array_over(self._memory, offset, np.int64, (rows,)).copy()

    def lend(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """An array over a slot, of which we learn when its last view has died."""
        nbytes = dtype.itemsize * math.prod(shape)
        owner: Any = (ctypes.c_char * nbytes).from_buffer(self._memory, offset)
        self._lent.append(weakref.ref(owner))
        return np.frombuffer(owner, dtype).reshape(shape)

    def has_lent(self) -> bool:
        """Whether an array lent since the last call is still alive; it is not asked about again."""
        lent, self._lent = self._lent, []
        return any(owner() is not None for owner in lent)

    def place(self, columns: Sequence[Packed], places: Places) -> None:
        """Have each array lie where it belongs; whatever lies there or elsewhere in the slot now."""
        todo = []
        for column in columns:
            for array, (offset, _) in zip(column.arrays, places[column.name], strict=True):
                target = array_over(self._memory, offset, array.dtype, array.shape)
                if not _is_same(array, target):
                    is_ours = np.may_share_memory(array, self._everything)
                    todo.append((target, array.copy() if is_ours else array))  # another column may lie there
        for target, array in todo:
            np.copyto(target, array)

    def move(self, described: Sequence[Described], places: Places, wanted: Places) -> None:
        """A finished batch to another slot."""
        for column in described:
            arrays = zip(column.arrays, places[column.name], wanted[column.name], strict=True)
            for (dtype, shape), (before, _), (after, _) in arrays:
                source = array_over(self._memory, before, dtype, shape)
                np.copyto(array_over(self._memory, after, dtype, shape), source)


def has_room(columns: Sequence[Described], places: Places, pattern: Mapping[str, tuple[str, Any]]) -> bool:
    """Whether a batch is what the slot was made for; if not, the main process decides."""
    if len(columns) != len(places):
        return False
    for column in columns:
        expected = pattern.get(column.name)
        if expected is None or expected[0] != column.kind:
            return False
        for (dtype, shape), (its_dtype, its_row), (_, most), nbytes in zip(
            column.arrays, expected[1], places[column.name], column.nbytes(), strict=True
        ):
            if dtype != its_dtype or (shape[1:] if shape else None) != its_row or nbytes > most:
                return False
    return True


def _is_same(array: NDArray[Any], target: NDArray[Any]) -> bool:
    start = array.__array_interface__["data"][0] == target.__array_interface__["data"][0]
    return start and array.flags.c_contiguous
