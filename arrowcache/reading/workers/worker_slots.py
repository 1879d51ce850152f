"""Worker slots: the shared memory of one worker: its slots, and those that the main process holds.

Batches are gathered into slots. An array that lies in a slot is handed over as it is: the main process is
told its offset, and says when it needs it no more. Every other array is copied into another slot.

Guarantee: an array of a batch that a transform keeps is never overwritten, nor seen by the consumer. The
transform's arrays have owners of their own, whose death tells. Where one lives on, the consumer gets a copy,
and the memory comes back when the transform has let go.
"""

from __future__ import annotations

import ctypes
import math
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.memory import SharedBuffers, SharedMemory
from arrowcache.reading.slots import Slots, array_over
from arrowcache.reading.workers.packing import Packed

STAGES_OF_WORKERS = ("", "gather", "transform")
ENDED, PROGRESS = 0, 1  # words of the memory: the last epoch that ended; the worker's stage and its start

Place = tuple[str, list[int], int]
"""Of an array: dtype, shape, and where it lies: an address here, an offset elsewhere; 0: it has no bytes."""
Placed = tuple[str, str, list[Place]]
"""A column: name, kind, its arrays."""


class _Lent(NamedTuple):
    """Memory of the batch in progress: the owner here, and its part for the transform."""

    owner: Any
    borrower: Callable[[], object]  # None once nobody has an array over it


class WorkerSlots:
    """The slots of one worker.

    Args:
        in_flight: usual number of batches of this worker in the main process.
        keeps: as of SharedBuffers.
    """

    def __init__(self, memory: SharedMemory, in_flight: int, *, keeps: bool = False) -> None:
        self._words = memory.words
        self._buffers = SharedBuffers(memory, keeps=keeps)
        self._slots = Slots({}, 1, in_flight, self._buffers.allocate, self._buffers.free)
        self._lent: dict[int, _Lent] = {}  # by address
        self._handed_over: dict[int, Any] = {}  # owners, by offset

    def is_over(self, epoch: int) -> bool:
        """True if the main process has ended an epoch."""
        return epoch <= int(self._words[ENDED])

    def tell(self, stage: str) -> None:
        """Show that this worker is at one of STAGES_OF_WORKERS from now on, or at none ("")."""
        self._words[PROGRESS] = time.perf_counter_ns() * 4 + STAGES_OF_WORKERS.index(stage) if stage else 0

    def begin(self, returned: Iterable[int]) -> None:
        """Begin a batch.

        Args:
            returned: offsets of arrays that the main process needs no more.
        """
        self._lent.clear()
        for offset in returned:
            del self._handed_over[offset]

    def lend(self, name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> NDArray[Any]:
        """Lend an array of a column of the batch, in shared memory."""
        nbytes = dtype.itemsize * math.prod(shape)
        owner, address = self._slots.lend_bytes(name, nbytes)
        borrower = (ctypes.c_char * nbytes).from_buffer(owner)
        self._lent[address] = _Lent(owner, weakref.ref(borrower))
        return array_over(borrower, dtype, shape)

    def place(self, columns: Sequence[Packed]) -> list[Placed]:
        """Put each array of a batch into a slot of its own, by a copy where needed. Returns the addresses."""
        taken: set[int] = set()
        return [
            (name, kind, [self._place((name, i), array, taken) for i, array in enumerate(arrays)])
            for name, kind, arrays in columns
        ]

    def hand_over(self, placed: Sequence[Placed]) -> list[Placed]:
        """Hand the arrays of `place` over to the main process. Returns their offsets.

        By then nobody but the transform may have arrays over this memory.
        """
        owners: dict[int, Any] = {}
        handed_over = [
            (name, kind, [self._hand_over((name, i), array, owners) for i, array in enumerate(arrays)])
            for name, kind, arrays in placed
        ]
        self._handed_over |= owners  # all, or none if there was no memory for a copy
        self._lent.clear()
        return handed_over

    @property
    def memory(self) -> tuple[int, int]:
        """Return the allocated bytes, and the number of allocations."""
        return self._slots.allocated_bytes, self._slots.growths

    def _place(self, kind: tuple[str, int], array: NDArray[Any], taken: set[int]) -> Place:
        address = 0
        if array.nbytes:
            address = array.__array_interface__["data"][0]
            if address not in self._lent or address in taken or not array.flags.c_contiguous:
                address = self._copy(kind, array)
            taken.add(address)
        return array.dtype.str, list(array.shape), address

    def _hand_over(self, kind: tuple[str, int], place: Place, owners: dict[int, Any]) -> Place:
        dtype, shape, address = place
        if not address:
            return dtype, shape, 0
        lent = self._lent[address]
        if lent.borrower() is not None:  # the transform keeps it
            address = self._copy(kind, array_over(lent.owner, dtype, shape))
        offset = self._buffers.offset(address)
        owners[offset] = self._lent[address].owner
        return dtype, shape, offset

    def _copy(self, kind: tuple[str, int], array: NDArray[Any]) -> int:
        owner, address = self._slots.lend_bytes(kind, array.nbytes)
        np.copyto(array_over(owner, array.dtype, array.shape), array)
        self._lent[address] = _Lent(owner, _nobody)
        return address


def _nobody() -> None:
    pass
