"""Pinned memory: host memory of this library that a device reads directly.

It is registered in place, where a device's own pinned memory would be rounded up to a power of two: slots,
also those of worker processes, when the first batch in them goes to the device.

A part of a slot is read in place only if all of the slot is registered. A slot that has grown is noticed
before a copy out of it begins, and registered anew.

Guarantee: memory is never given back to the system while it is registered. It is kept here. When its last
array dies no device may be called, since a CUDA graph may be captured, and Ctrl-C may cut a finalizer
short. `tidy` frees memory that nobody else knows any more.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch

from arrowcache.lifetimes import Origin
from arrowcache.reading.slots import address_of_map, in_pages, mapped_memory, shared_part, size_class


class PinningDevice(Protocol):
    """A device that reads registered memory."""

    def register(self, address: int, nbytes: int) -> bool:
        """Register bytes. Returns: False: the device refuses."""

    def unregister(self, address: int) -> None:
        """Unregister an address, if it is registered."""


class _PinnedPart(NamedTuple):
    """Registered bytes, such as of a slot, which may have grown since."""

    start: int
    nbytes: int
    sizes: Mapping[int, int]  # bytes of slots, by offset
    offset: int

    def is_whole(self) -> bool:
        """True if all of the slot is registered."""
        return self.sizes.get(self.offset, 0) <= self.nbytes


class PinnedMemory:
    """The registered memory of one device. One thread at a time calls it, except `allocate`."""

    def __init__(self, device: PinningDevice) -> None:
        self._device = device
        self._parts: dict[int, _PinnedPart] = {}  # by address
        self._unseen: dict[weakref.ref[mmap.mmap], int] = {}  # memory that may not be registered yet
        self._is_refused = False  # once refused, always refused
        self.origin = Origin()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in [*self._parts.values()])

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return (nbytes,) uint8 that start at a page. Calls no device."""
        memory = mapped_memory(nbytes)
        self._forget_dead()  # or it would gather
        self._unseen[weakref.ref(memory)] = address_of_map(memory)
        return torch.from_numpy(np.frombuffer(memory, np.uint8, nbytes))

    def reads(self, source: torch.Tensor) -> bool:
        """True if the device reads a tensor directly, as far as it lies in memory of this library.

        PinningDevice this memory now, if it was not yet.
        """
        address, nbytes = source.data_ptr(), source.nbytes
        part = self._parts.get(address) or self._around(address)
        if part is not None and part.is_whole():
            return address + nbytes <= part.start + part.nbytes
        if (own := self._own(address, nbytes)) is not None:
            return self._register(own, address_of_map(own), len(own))
        found = shared_part(address, nbytes)
        if found is None:
            return False
        memory, start, size = found
        if (other := self._that_registered(memory, start)) is not None:  # whichever device registered it
            return other._parts[start].is_whole()
        if start in self._parts:  # it grew: no copy out of it is in flight, as its worker had it
            self._unregister(start)
            size = min(int(size * 1.25), size_class(size))
        return self._register(memory, start, in_pages(size))

    def release(self, memory: mmap.mmap) -> None:
        """Unregister memory, which then may end."""
        address = address_of_map(memory)
        for start in [start for start in self._parts if 0 <= start - address < len(memory)]:
            self._unregister(start)

    def _around(self, address: int) -> _PinnedPart | None:
        """Return the part that an address lies in, or None; parts are few."""
        for part in self._parts.values():
            if part.start <= address < part.start + part.nbytes:
                return part
        return None

    def _own(self, address: int, nbytes: int) -> mmap.mmap | None:
        """Return the memory of `allocate` that some bytes lie in, once."""
        for known, start in [*self._unseen.items()]:
            memory = known()
            if memory is not None and start <= address and address + nbytes <= start + len(memory):
                self._unseen.pop(known, None)
                return memory
        return None

    def _forget_dead(self) -> None:
        for known in [*self._unseen]:
            if known() is None:
                self._unseen.pop(known, None)

    def _that_registered(self, memory: mmap.mmap, start: int) -> PinnedMemory | None:
        """Return another owner that registered a part, and may still read it: an earlier prefetcher's."""
        others = () if (kept := _kept.get(id(memory))) is None else kept.by
        return next(
            (it for it in others if it is not self and it.origin.is_here and start in it._parts), None
        )

    def _register(self, memory: mmap.mmap, start: int, nbytes: int) -> bool:
        if self._is_refused:
            return False
        kept = _kept.setdefault(id(memory), _KeptMemory(memory))  # first: an interrupted call keeps too much
        if self not in kept.by:
            kept.by.append(self)
        self._parts[start] = _PinnedPart(
            start, nbytes, getattr(memory, "parts", {}), start - address_of_map(memory)
        )
        if not self._device.register(start, nbytes):
            del self._parts[start]
            self._is_refused = True
        return not self._is_refused

    def _unregister(self, start: int) -> None:
        self._device.unregister(start)
        del self._parts[start]


class _KeptMemory:
    """Memory with registered parts, and its registrars: several, for example one a prefetcher."""

    __slots__ = ("by", "memory")

    def __init__(self, memory: object) -> None:
        self.by: list[PinnedMemory] = []
        self.memory = memory

    def references(self) -> int:
        return sys.getrefcount(self.memory)


_kept: dict[int, _KeptMemory] = {}
_lost: list[_KeptMemory] = []  # of failed devices: it stays for ever
_ALONE = _KeptMemory(object()).references()  # the count when nobody else knows it


def tidy() -> None:
    """Give back memory that has died; in a forked child none of its parent's. One thread at a time."""
    for number, kept in [*_kept.items()]:
        if any(not each.origin.is_here for each in kept.by) or kept.references() > _ALONE:
            continue
        try:
            for each in kept.by:
                each.release(kept.memory)  # type: ignore[arg-type]  # it is
        except Exception:  # noqa: BLE001  # whatever the device raises
            _lost.append(kept)
        del _kept[number]
