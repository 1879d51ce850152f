"""DeviceCopier: one device, with its copy stream, and the memory for batches. It has no thread.

A `CopyPlan` says where the leaves of a batch lie in pinned memory and on the device. A *column* shares memory
and a copy: all small leaves of a batch, or one large one. It has the same layout in pinned memory and on the
device, so that one copy of bytes is enough. Leaves of a column are aligned. Batches of the same shapes share
a plan, and memory keeps the tensors over it: they are made once.

Owners:

- A *place* is device memory for one column of a batch. It is flying, lent or free.
- A *staging* is the host's side of the copies of a batch: pinned memory, and the tensors that are read in
  place. It is free once its copies are over.
- A *flight* is a batch, or this device's part of one, between its source and its consumer. All flights of an
  iteration end at once with its `IterationEnd`: an interrupt at any line leaves nothing to repair.

Invariants, which tests/stateful/test_device_machine.py holds against a device in software:

1. A batch is lent after the consumer's stream was told to wait for its copies.
2. A place is written after all work that its readers' streams were given while the place could be seen. When
   it is freed, the stream that owns its memory waits for its copies and its readers. Memory that a source
   made on the device is freed after the work of the stream that the batch was lent to.
3. Pinned memory and sources do not change, and are not given back to the system, before their copy is over;
   nor is a leaf that moves by a `to` of its own.
4. An event is recorded on one stream, for ever, and before any wait for it. A staging's is recorded anew when
   its batch was lent. Those of readers are recorded once, when their place is found free: where the device
   lags behind, a later copy waits for no later work, and runs beside it.
5. The processor waits for a device only with nothing in flight. That is device time, no stall, and has no
   timeout. Only the source's time counts as stall.
6. The death of a tensor runs no code of this library: weak references without a callback are polled. torch
   keeps a storage's Python object as long as any tensor, view, array or node of autograd over it lives.
7. Where objects die, and while a CUDA graph is captured, no device is called. A copier that nobody uses any
   more is deferred: the next `next` of any prefetcher closes it, once its device is done with it. In a forked
   child it stays for ever, with all else of its parent's devices.
8. The caller's current device and stream do not change, and no other device wakes up.
9. After any failure the next iteration is right, with depth + 2 places a column, and the kept ones.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._C import _from_dlpack  # torch.utils.dlpack calls it for a capsule; alone it takes half as long
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # documented there

from arrowcache.lifetimes import Origin, call_all
from arrowcache.limits import Limits
from arrowcache.torch import pinned_memory
from arrowcache.torch.backend import Backend, Event, Stream
from arrowcache.torch.structure import Build, take_apart
from arrowcache.torch.tensors import is_dense, source_of, strides_of_copy

#: Host tensors, by their numbers in the batch.
Leaves = Mapping[int, torch.Tensor]
_LeafKind = tuple[torch.dtype, torch.Size, tuple[int, ...]]

_ALIGNMENT = 256


class Piece(NamedTuple):
    """The place of a leaf in its column."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]


class PlannedColumn(NamedTuple):
    """Leaves of a batch that are copied together: one large leaf, or all small ones."""

    number: int  # in the batch: 0 has the small ones
    leaves: tuple[int, ...]
    pieces: tuple[Piece, ...]
    nbytes: int
    is_staged: bool  # True: it goes through pinned memory; False: the device reads it in place


class CopyPlan(NamedTuple):
    """The columns of a batch, and the copies that bring it."""

    columns: tuple[PlannedColumn, ...]
    readable: list[int]  # large leaves that the device reads in place
    nbytes: int


class ColumnMemory:
    """Memory for any column that fits."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole, self.nbytes = whole, whole.nbytes
        self._last: tuple[PlannedColumn | None, list[torch.Tensor]] = None, []

    def tensors(self, column: PlannedColumn) -> list[torch.Tensor]:
        """Return the bytes of a column, and each of its leaves: views."""
        if self._last[0] is not column:
            pieces = [
                self.whole[start : start + nbytes].view(dtype).as_strided(shape, strides)
                for start, nbytes, dtype, shape, strides in column.pieces
            ]
            self._last = column, [self.whole[: column.nbytes], *pieces]
        return self._last[1]


class Planner:
    """Plans batches for one device.

    Args:
        can_read: True for a host tensor that the device reads in place.
    """

    def __init__(self, can_read: Callable[[torch.Tensor], bool]) -> None:
        self._can_read = can_read
        nothing = CopyPlan((), [], 0)
        self._last: tuple[dict[int, _LeafKind], list[int], CopyPlan] = {}, [], nothing  # its large leaves

    def plan(self, leaves: Leaves) -> CopyPlan:
        kinds = {number: (leaf.dtype, leaf.shape, leaf.stride()) for number, leaf in leaves.items()}
        known, large, plan = self._last
        if is_new := known != kinds:
            small = Limits.current.small_leaf_bytes
            large = [number for number, leaf in leaves.items() if leaf.nbytes >= small]
        readable = [number for number in large if self._reads(leaves[number])]
        if is_new or plan.readable != readable:
            plan = _planned(leaves, large, readable)
            self._last = kinds, large, plan
        return plan

    def _reads(self, leaf: torch.Tensor) -> bool:
        return is_dense(leaf) and not (leaf.is_conj() or leaf.is_neg()) and self._can_read(leaf)


def _planned(leaves: Leaves, large: list[int], readable: list[int]) -> CopyPlan:
    columns = [
        _column(place, {number: leaves[number]}, is_staged=number not in readable)
        for place, number in enumerate(large, 1)
    ]
    if small := {number: leaf for number, leaf in leaves.items() if number not in large}:
        columns.append(_column(0, small, is_staged=True))
    return CopyPlan(tuple(columns), readable, sum(leaf.nbytes for leaf in leaves.values()))


def _column(number: int, leaves: Leaves, *, is_staged: bool) -> PlannedColumn:
    pieces, end = [], 0
    for leaf in leaves.values():
        pieces.append(Piece(end, leaf.nbytes, leaf.dtype, leaf.shape, strides_of_copy(leaf)))
        end += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
    return PlannedColumn(number, tuple(leaves), tuple(pieces), end, is_staged)


_GROWTH = 1.25  # a column larger than all before leaves room for further growth
_KEPT_CALLS = 32  # a batch that is lent for longer belongs to its consumer
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 50e-6, 1e-3


class IterationEnd:
    """True once an iteration has ended, as its places see it."""

    has_ended = False


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A batch, or one device's part of it, taken apart. It has a plan once its copies have begun."""

    build: Build
    sources: Leaves  # leaves on the host, until then
    others: dict[int, Any]  # leaves that are moved when the batch is lent
    arrivals: list[Event]  # of leaves already on a device
    plan: CopyPlan | None = None
    places: Sequence[DevicePlace] = ()
    copied: Event = None


@dataclass(slots=True, eq=False)
class DevicePlace:
    """Device memory."""

    memory: ColumnMemory
    stream: Stream  # the owner of the memory
    users: dict[Stream, Event]  # after whose work on it the next copy into it begins
    iteration_end: IterationEnd | None = None  # of the flight in it
    loans: list[weakref.ref[object]] = field(default_factory=list)  # of the storages over it
    reader: Stream = None  # the stream it was lent to
    since: int = 0  # the number of the call that lent or freed it

    @property
    def is_free(self) -> bool:
        return not self.loans and (self.iteration_end is None or self.iteration_end.has_ended)


@dataclass(slots=True, eq=False)
class Staging:
    """The host's side of copies."""

    stream: Stream  # of the copies
    memory: dict[int, ColumnMemory] = field(default_factory=dict)  # pinned, by the number of a column
    sources: list[Any] = field(default_factory=list)  # of copies that may not be over
    copied: Event = None  # after the copies; None: a call failed before it, or there were none


class DeviceCopier:
    """One device. One thread at a time calls it."""

    def __init__(self, backend: Backend, depth: int) -> None:
        self.backend = backend
        self._depth = depth
        self._stream = backend.stream()
        self._planner = Planner(backend.can_read)
        self._columns: dict[int, list[DevicePlace]] = {}
        self._room: dict[int, int] = {}  # bytes for a column, by its number
        self._stagings: deque[Staging] = deque()  # used in turn: copies end in the order in which they began
        self._moving: list[Staging] = []  # of leaves with a `to` of their own: each is used once
        self._here: Stream = None
        self._streams: set[Stream] = set()  # streams that may have read a batch
        self._call = 0
        self.allocations = self.lent_bytes = 0
        self.origin = Origin()

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory, lent places included."""
        return sum(place.memory.nbytes for places in [*self._columns.values()] for place in places)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory for copies."""
        return sum(memory.nbytes for staging in self._stagings for memory in [*staging.memory.values()])

    def is_quiet(self) -> bool:
        """True if it may die as it is. Calls no device."""
        is_read = not any(staging.sources for staging in [*self._stagings, *self._moving])
        return self.origin.is_here and is_read and len(self._streams) <= 1

    def collect(self) -> None:
        """Look for dead tensors, at the beginning of each call."""
        self._call += 1
        self._here = self.backend.current_stream()
        self._streams.add(self._here)
        for staging in self._stagings:
            if not self._is_read(staging):  # nor are those behind it
                break
        self._moving = [staging for staging in self._moving if not self._is_read(staging)]
        dead = []
        for places in self._columns.values():
            for place in [place for place in places if place.loans]:
                if all(loan() is None for loan in place.loans):
                    dead.append((places, place))
                elif self._call - place.since > _KEPT_CALLS:
                    self._give_away(places, place)
        streams = {stream for _, place in dead for stream in (place.reader, self._here)}
        done = {stream: self._recorded(None, stream) for stream in streams}
        for places, place in dead:
            self._reclaim(places, place, {stream: done[stream] for stream in (place.reader, self._here)})

    def take(self, batch: Any) -> InFlightBatch:
        """Take a batch apart. Raises: TypeError: a leaf would lose its values."""
        leaves: list[Any] = []
        build = take_apart(batch, leaves)
        sources: dict[int, torch.Tensor] = {}
        others: dict[int, Any] = {}
        arrivals: dict[Stream, Event] = {}
        holds = self.backend.holds
        for number, leaf in enumerate(leaves):
            if holds(leaf):
                others[number] = leaf
                stream = self.backend.current_stream(leaf.device)
                if stream not in arrivals:
                    arrivals[stream] = self._recorded(None, stream)
            elif (source := source_of(leaf)) is not None:
                sources[number] = source
            else:
                others[number] = self.backend.pinned(leaf)
        return InFlightBatch(build, sources, others, [*arrivals.values()])

    def send(self, flight: InFlightBatch, iteration_end: IterationEnd) -> bool:
        """Begin the copies of a flight. Returns: False: no staging is free.

        Raises: OutOfMemoryError: the device has no memory. Nothing has begun.
        """
        if torch.is_inference_mode_enabled():  # tensors made there can't be written to outside
            with torch.inference_mode(mode=False):
                return self.send(flight, iteration_end)
        staging = self._free_staging()
        if staging is None:
            return False
        plan = self._planner.plan(flight.sources)
        places, pairs = [], []
        for column in plan.columns:
            place = self._place(column)
            into = place.memory.tensors(column)
            if column.is_staged:
                staged = self._staged(staging, column)
                torch._foreach_copy_(staged[1:], [flight.sources[number] for number in column.leaves])
                pairs.append((into[0], staged[0]))
            else:
                pairs.append((into[1], flight.sources[column.leaves[0]]))
            places.append(place)
        for place in places:
            place.iteration_end = iteration_end
        for event in {event for place in places for event in place.users.values()}:
            self.backend.wait(self._stream, event)
        if pairs:
            copied, staging.copied = staging.copied, None
            staging.sources = [source for _, source in pairs]
            self.backend.copy(pairs, self._stream)
            staging.copied = flight.copied = self._recorded(copied, self._stream)
            self._stagings.rotate(-1)
            self._is_read(staging)  # on the CPU it is at once
        flight.plan, flight.places, flight.sources = plan, places, {}
        return True

    def lend(self, flight: InFlightBatch) -> Any:
        """Return a batch on the device, for the calling thread's current stream, which waits for the copy."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False):
                return self.lend(flight)
        here = self.backend.current_stream()
        self._streams.add(here)
        assert flight.plan is not None
        if flight.places:
            self.backend.wait(here, flight.copied)
        for event in flight.arrivals:
            self.backend.wait(here, event)
        leaves = self._moved(flight.others, here) if flight.others else {}
        for column, place in zip(flight.plan.columns, flight.places, strict=True):
            lent = [_from_dlpack(to_dlpack(tensor)) for tensor in place.memory.tensors(column)[1:]]
            place.reader, place.since = here, self._call
            place.loans = [weakref.ref(tensor.untyped_storage()) for tensor in lent]
            place.iteration_end = None
            leaves.update(zip(column.leaves, lent, strict=True))
        self.lent_bytes += flight.plan.nbytes
        return flight.build(leaves)

    def wait(self) -> None:
        """Wait until a staging is free. Blocks: as long as the device takes; Ctrl-C ends it."""
        seconds = _FIRST_PAUSE_SECONDS
        while self._free_staging() is None:
            self.backend.pause(seconds)
            seconds = min(2 * seconds, _LONGEST_PAUSE_SECONDS)

    def close(self, seconds: float) -> bool:
        """Release all memory but the consumer's. Returns: False: the device still reads some.

        Blocks: until the device reads none, at most so long.
        Raises: the error of the last call to the device that failed; all others were made.
        """
        deadline = Limits.current.clock() + seconds
        free: list[Callable[[], None]] = [
            partial(self._give_away if place.loans else self._give_up, places, place)
            for places in self._columns.values()
            for place in places
        ]
        for stagings in (self._stagings, self._moving):
            free += [partial(self._end, stagings, staging, deadline) for staging in stagings]
        call_all(free)
        return not (self._stagings or self._moving)

    def _recorded(self, event: Event, stream: Stream) -> Event:
        """Record an event, or a new one, after all work given to a stream so far."""
        if event is None:
            event = self.backend.event()
        self.backend.record(event, stream)
        return event

    # Slots

    def _moved(self, leaves: dict[int, Any], here: Stream) -> dict[int, Any]:
        """Return leaves on the device, by a `to` of their own, which may return before it has read them."""
        moving, moved = Staging(here), {}
        self._moving.append(moving)
        for number, leaf in leaves.items():
            if self.backend.holds(leaf):
                self.backend.retain(leaf, here)  # its memory belongs to the stream on which it was made
            else:
                moving.sources.append(leaf)
            moved[number] = self.backend.moved(leaf)
        if moving.sources:
            moving.copied = self._recorded(None, here)
        return moved

    def _free_staging(self) -> Staging | None:
        if len(self._stagings) <= self._depth:
            self._stagings.appendleft(Staging(self._stream))
        return self._stagings[0] if self._is_read(self._stagings[0]) else None

    def _is_read(self, staging: Staging) -> bool:
        """True if the copies out of a staging are over. Then its sources are released."""
        if staging.sources:
            if staging.copied is None:
                staging.copied = self._recorded(None, staging.stream)
            if not self.backend.query(staging.copied):
                return False
            staging.sources = []
        return True

    def _staged(self, staging: Staging, column: PlannedColumn) -> list[torch.Tensor]:
        """Return tensors over a staging's pinned memory for a column."""
        memory = staging.memory.get(column.number)
        if memory is None or memory.nbytes < column.nbytes:
            memory = staging.memory[column.number] = ColumnMemory(
                self.backend.pinned_memory(self._room_for(column))
            )
        return memory.tensors(column)

    def _end(self, stagings: MutableSequence[Staging], staging: Staging, deadline: float) -> None:
        while not self._is_read(staging) and Limits.current.clock() < deadline:
            self.backend.pause(_LONGEST_PAUSE_SECONDS)
        if not staging.sources:
            stagings.remove(staging)

    # Places

    def _place(self, column: PlannedColumn) -> DevicePlace:
        """Return a free place for a column: the one that has been free for longest, or a new one."""
        places = self._columns.setdefault(column.number, [])
        free = [place for place in places if place.is_free]
        fitting = [place for place in free if place.memory.nbytes >= column.nbytes]
        if fitting:
            return min(fitting, key=lambda place: place.since)
        for place in free:
            self._give_up(places, place)
        is_first, room = not places, self._room_for(column)
        place = self._allocate(places, room)
        if is_first:  # now, or memory would grow when the device first is ahead
            with suppress(torch.OutOfMemoryError):  # it works with fewer
                for _ in range(self._depth + 1):
                    self._allocate(places, room)
        return place

    def _room_for(self, column: PlannedColumn) -> int:
        room = self._room.get(column.number, 0)
        if column.nbytes > room:
            self._room[column.number] = int(column.nbytes * _GROWTH) if room else column.nbytes
        return self._room.get(column.number, 0)  # empty leaves take none

    def _allocate(self, places: list[DevicePlace], nbytes: int) -> DevicePlace:
        memory = ColumnMemory(self.backend.memory(nbytes, self._here))
        done = self._recorded(None, self._here)  # it may still work on what was there before
        places.append(DevicePlace(memory, self._here, {self._here: done}))
        self.allocations += 1
        return places[-1]

    def _reclaim(self, places: list[DevicePlace], place: DevicePlace, users: dict[Stream, Event]) -> None:
        """Let a place be reused, whose tensors have died, after the work of its users until now."""
        place.users, place.since = users, self._call
        place.loans = []  # last: an interrupted call is repeated
        if sum(not each.loans for each in places) > self._depth + 2:
            self._give_up(places, place)

    def _give_up(self, places: list[DevicePlace], place: DevicePlace) -> None:
        """Free a place that is not lent; its stream goes on after its copies and users."""
        for event in (self._recorded(None, self._stream), *place.users.values()):
            self.backend.wait(place.stream, event)
        places.remove(place)

    def _give_away(self, places: list[DevicePlace], place: DevicePlace) -> None:
        """Leave a place to the tensors over it: its memory is freed with them."""
        if place.reader != place.stream:
            self.backend.retain(place.memory.whole, place.reader)
        places.remove(place)


class ThreadLock:
    """A lock for one thread at a time. If Ctrl-C leaves it taken, its thread can take it again."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def take(self) -> bool:
        """Returns: False: another thread has it."""
        me = threading.get_ident()
        return self._taken.setdefault("by", me) == me

    def leave(self) -> None:
        """Let others have it."""
        self._taken.pop("by", None)


# copiers that nobody uses any more

_deferred: dict[int, DeviceCopier] = {}
_inherited: list[object] = []
_tidying = ThreadLock()


def defer(copier: DeviceCopier) -> None:
    """Let `tidy` close a copier. Calls no device."""
    _deferred[id(copier)] = copier


def keep(*things: object) -> None:
    """Keep objects of a parent's devices for ever, in a forked child, which must not free them."""
    _inherited.append(things)


def close_copier(copier: DeviceCopier, seconds: float) -> None:
    """Close a copier, or leave it to `tidy`. Blocks, Raises: as `DeviceCopier.close`."""
    defer(copier)
    if copier.origin.is_here and not copier.backend.is_capturing() and copier.close(seconds):
        _deferred.pop(id(copier), None)


def tidy() -> None:
    """Release deferred copiers, and registered memory that has died. Never blocks."""
    if _tidying.take():
        try:
            pinned_memory.tidy()
            for copier in [*_deferred.values()]:
                with suppress(Exception):  # a device that failed: its memory stays
                    close_copier(copier, 0.0)
        finally:
            _tidying.leave()
