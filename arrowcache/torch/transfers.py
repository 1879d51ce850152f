"""Transfers: batches on their way to devices. Their consumer drives them: nothing here has a thread.

`Iteration.next` takes batches of a source, begins their copies on a copy stream, and lends the oldest. A
`Lane` is one device: its copy stream and its memory. Who owns what there:

- A *place* is device memory for one large leaf of a batch, or for all its small ones. It has one event a
  stream that read it, `done`.
- A *slot* is the host's side of one batch: pinned memory for what is staged, and the tensors that are read
  where they are. It has one event, `copied`: the copies out of it are over, and the batch is there.
- A *flight* is one batch between its source and its consumer.

A place is flying, lent or free; a slot is flying, being read or free. That is read off them each time, and
`Iteration.has_ended` lets all its flights end at once: an interrupt at any line leaves nothing to be mended.

Invariants, which tests/stateful/test_device_machine.py holds against a device in software:

1. A batch is lent after the consumer's stream was told to wait for `copied`.
2. A place is written after all that its readers' streams were given while somebody could see it. Where it is
   freed, the stream whose memory it is waits for its copies and its readers. What a source made on the device
   is freed after what the stream was given that it was handed to.
3. Pinned memory and sources do not change, and are not given back to the system, before their copy is over.
4. An event belongs to one place, slot or flight and is recorded on one stream, for ever. Nobody waits for
   one that was never recorded.
5. The processor waits for a device only with nothing in flight. That is device time, no stall, and has no
   timeout. Only the source's time is stall.
6. A tensor dies without a line of ours: weak references without a callback are polled. torch keeps a
   storage's Python object as long as any tensor, view, array or node of autograd over it lives.
7. Where objects die, and while a CUDA graph is captured, no device is called.
8. The caller's current device and stream do not change, and no other device is woken.
9. After any failure the next iteration is right, with depth + 2 places a leaf, and what is kept.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # documented there

from arrowcache.torch import registered
from arrowcache.torch.backend import Backend, Event, Stream
from arrowcache.torch.structure import Build, split, take_apart
from arrowcache.torch.tensors import is_dense, source_of, strides_of_copy

SMALL_BYTES = 1 << 20  # leaves below share a place and a copy
_ALIGNMENT = 256  # of a leaf in memory that it shares
_GROWTH = 1.25  # a leaf larger than all before makes room for somewhat larger ones
_KEPT_CALLS = 32  # what is lent for longer is its consumer's
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 50e-6, 1e-3


class Source(Protocol):
    """Where batches come from."""

    def next(self) -> Any:
        """The next batch. Blocks: until it is there. Raises: StopIteration: there is none."""

    def is_ready(self) -> bool:
        """Whether `next` would not wait, as far as can be known."""

    def close(self) -> None:
        """Nothing more is asked of it. Idempotent."""


@dataclass(slots=True)
class Counts:
    """What iterations have handed over, and what they waited for."""

    batches: int = 0
    nbytes: int = 0
    stall_seconds: float = 0.0
    device_seconds: float = 0.0


class Piece(NamedTuple):
    """Where a leaf lies in memory."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Memory:
    """Memory, and the tensors over its pieces. They are made anew only where batches change."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole, self.nbytes = whole, whole.nbytes
        self._pieces: Sequence[Piece] | None = None
        self._tensors: list[torch.Tensor] = []

    def tensors(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """A tensor over each piece."""
        if pieces is not self._pieces:
            self._pieces = None
            self._tensors = [
                self.whole[piece.start : piece.start + piece.nbytes]
                .view(piece.dtype)
                .as_strided(piece.shape, piece.strides)
                for piece in pieces
            ]
            self._pieces = pieces
        return self._tensors


class Column(NamedTuple):
    """Leaves of a batch that share a place, by their numbers, and one copy: that of the first piece."""

    number: int
    leaves: tuple[int, ...]
    pieces: tuple[Piece, ...]  # all together, if there are several, then each
    staged_at: int | None  # the piece of `Plan.staging` that is copied; None: the source itself

    @property
    def nbytes(self) -> int:
        return self.pieces[0].nbytes


class Plan(NamedTuple):
    """Where the leaves of a batch go."""

    columns: tuple[Column, ...]
    empty: tuple[tuple[int, Piece], ...]
    staged: tuple[tuple[int, int], ...]  # which go to pinned memory first, and to which piece
    staging: tuple[Piece, ...]  # of that; small leaves lie there as in their place
    staging_bytes: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Part:
    """One device's part of a batch, taken apart. It has a slot once its copies were begun."""

    build: Build
    sources: Sequence[Any]  # of its leaves until then: tensors on the host, or None
    others: dict[int, Any]  # leaves that are moved when they are handed over
    arrivals: list[Event]  # of those that are on a device
    slot: Slot | None = None
    plan: Plan | None = None
    places: Sequence[Place] = ()


class Flight:
    """One batch on its way."""

    is_lent = False

    def __init__(self, course: Course, parts: Sequence[Part]) -> None:
        self._course, self.parts = course, parts

    @property
    def is_flying(self) -> bool:
        return not (self.is_lent or self._course.has_ended)


class Course:
    """Whether an iteration has ended: what its flights know of it."""

    has_ended = False


@dataclass(slots=True, eq=False)
class Place:
    """Device memory. `waits` are what the next copy into it waits for."""

    memory: Memory
    stream: Stream  # whose memory it is
    done: dict[Stream, Event] = field(default_factory=dict)
    waits: list[Event] = field(default_factory=list)
    flight: Flight | None = None
    loans: tuple[weakref.ref[object], ...] = ()  # of the storages over it
    reader: Stream = None  # that it was lent to
    since: int = 0  # the call at which it was lent, or became free
    is_ordered: bool = True  # no other stream has read it since its last copy

    @property
    def is_free(self) -> bool:
        return not self.loans and (self.flight is None or not self.flight.is_flying)


@dataclass(slots=True, eq=False)
class Slot:
    """The host's side of a batch."""

    copied: Event
    memory: Memory | None = None
    sources: list[torch.Tensor] = field(default_factory=list)  # read where they are
    flight: Flight | None = None
    is_busy: bool = False  # copies out of it were begun, and are not known to be over
    is_recorded: bool = False  # `copied` comes after all of them

    @property
    def is_flying(self) -> bool:
        return self.flight is not None and self.flight.is_flying


class Lane:
    """One device. One thread at a time calls it."""

    def __init__(self, backend: Backend, depth: int) -> None:
        self.backend = backend
        self._depth = depth
        self._stream = backend.stream()
        self._columns: dict[int, list[Place]] = {}
        self._largest: dict[int, int] = {}
        self._slots: list[Slot] = []
        self._here: Stream = None
        self._call = 0
        self._plan: tuple[list[Any], Plan] | None = None  # of the last batch
        self.allocations = 0
        self.pid = os.getpid()

    @property
    def device_bytes(self) -> int:
        return sum(place.memory.nbytes for column in [*self._columns.values()] for place in column)

    @property
    def pinned_bytes(self) -> int:
        return sum(slot.memory.nbytes for slot in self._slots if slot.memory is not None)

    def collect(self) -> None:
        """At the beginning of each call: see what was let go since the last one."""
        self._call += 1
        self._here = self.backend.current_stream()
        for slot in self._slots:
            self._is_read(slot)
        for column in self._columns.values():
            for place in [place for place in column if place.loans]:
                if not any(loan() is not None for loan in place.loans):
                    self._reclaim(column, place)
                elif self._call - place.since > _KEPT_CALLS:
                    self._give_away(column, place)

    def send(self, part: Part, flight: Flight) -> bool:
        """Begin the copies of a part. Returns: False: no slot is free.

        Raises: OutOfMemoryError: the device has no memory. Nothing has begun.
        """
        slot = self._free_slot()
        if slot is None:
            return False
        with _making():
            plan = self._planned(part.sources)
            staged = self._stage(slot, plan, part.sources)
            places = [self._place(column) for column in plan.columns]
            pairs = [
                (
                    place.memory.tensors(column.pieces)[0],
                    part.sources[column.leaves[0]] if column.staged_at is None else staged[column.staged_at],
                )
                for column, place in zip(plan.columns, places, strict=True)
            ]
            for place in places:
                place.flight = flight
                for event in place.waits:
                    self.backend.wait(self._stream, event)
            if pairs:
                slot.flight = flight
                slot.sources = [source for _, source in pairs]
                slot.is_recorded, slot.is_busy = False, True
                self.backend.copy(pairs, self._stream)
                self.backend.record(slot.copied, self._stream)
                slot.is_recorded = True
                self._is_read(slot)  # on the processor it is
        part.slot, part.plan, part.places, part.sources = slot, plan, places, ()
        return True

    def lend(self, part: Part) -> Any:
        """A batch on the device, for the calling thread's current stream, which waits for the copy."""
        here, device = self.backend.current_stream(), self.backend.device
        assert part.slot is not None
        assert part.plan is not None
        if part.places:
            self.backend.wait(here, part.slot.copied)
        for event in part.arrivals:
            self.backend.wait(here, event)
        found = {}
        for number, leaf in part.others.items():
            if self.backend.holds(leaf):
                self.backend.retain(leaf, here)  # its memory is that of the stream on which it was made
            found[number] = self.backend.moved(leaf)
        with _making():
            for number, piece in part.plan.empty:
                found[number] = torch.empty_strided(
                    piece.shape, piece.strides, dtype=piece.dtype, device=device
                )
            for column, place in zip(part.plan.columns, part.places, strict=True):
                tensors = place.memory.tensors(column.pieces)[-len(column.leaves) :]
                lent = [from_dlpack(to_dlpack(tensor)) for tensor in tensors]
                place.reader, place.since, place.is_ordered = here, self._call, here == place.stream
                place.loans = tuple([weakref.ref(tensor.untyped_storage()) for tensor in lent])
                found.update(zip(column.leaves, lent, strict=True))
        return part.build(found, device)

    def wait(self) -> None:
        """Wait until a slot is free. Blocks: as long as the device takes; Ctrl-C ends it."""
        seconds = _FIRST_PAUSE_SECONDS
        while self._free_slot() is None:
            self.backend.pause(seconds)
            seconds = min(2 * seconds, _LONGEST_PAUSE_SECONDS)

    def close(self, seconds: float) -> bool:
        """Let go of all memory but what the consumer keeps. Returns: False: the device still reads some.

        Blocks: until it does not, at most so long.
        Raises: what the last call to the device that failed did; all others were made.
        """
        error: Exception | None = None
        self._here = self.backend.current_stream()
        deadline = time.monotonic() + seconds
        for column in self._columns.values():
            for place in column.copy():
                try:
                    (self._give_away if place.loans else self._give_up)(column, place)
                except Exception as failed:  # noqa: BLE001  # it is raised below
                    error = failed
        for slot in self._slots.copy():
            try:
                while not self._is_read(slot) and time.monotonic() < deadline:
                    self.backend.pause(_LONGEST_PAUSE_SECONDS)
            except Exception as failed:  # noqa: BLE001
                error = failed
            if not slot.is_busy:
                self._slots.remove(slot)
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback has this frame
        return not self._slots

    def is_quiet(self) -> bool:
        """Whether it may die as it is. Calls no device."""
        places = [place for column in self._columns.values() for place in column]
        return all(place.is_ordered for place in places) and not any(slot.is_busy for slot in self._slots)

    # Slots

    def _free_slot(self) -> Slot | None:
        for slot in self._slots:
            if not slot.is_flying and self._is_read(slot):
                return slot
        if len(self._slots) <= self._depth:
            self._slots.append(Slot(self.backend.event()))
            return self._slots[-1]
        return None

    def _is_read(self, slot: Slot) -> bool:
        """Whether the copies out of a slot are over. Then its sources are let go."""
        if slot.is_busy:
            if not slot.is_recorded:  # where a call failed in between
                self.backend.record(slot.copied, self._stream)
                slot.is_recorded = True
            if not self.backend.query(slot.copied):
                return False
            slot.sources = []
            slot.is_busy = False
        return True

    def _stage(self, slot: Slot, plan: Plan, sources: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Copy into pinned memory what the device does not read where it is. Returns: the pieces there."""
        if not plan.staged:
            return ()
        if slot.memory is None or slot.memory.nbytes < plan.staging_bytes:
            had, slot.memory = slot.memory is not None, None
            room = int(plan.staging_bytes * _GROWTH) if had else plan.staging_bytes
            slot.memory = Memory(self.backend.pinned_memory(room))
        pieces = slot.memory.tensors(plan.staging)
        for number, piece in plan.staged:
            pieces[piece].copy_(sources[number])
        return pieces

    # Places

    def _place(self, column: Column) -> Place:
        """A free place for a column: the one that has been free for longest, or a new one."""
        places = self._columns.setdefault(column.number, [])
        free = [place for place in places if place.is_free]
        fitting = [place for place in free if place.memory.nbytes >= column.nbytes]
        if fitting:
            return min(fitting, key=lambda place: place.since)
        for place in free:
            self._give_up(places, place)
        largest = self._largest.get(column.number, 0)
        if column.nbytes > largest:
            largest = int(column.nbytes * _GROWTH) if largest else column.nbytes
        place = self._allocate(places, largest)
        if column.number not in self._largest:  # now, or memory would grow when the device first is ahead
            self._largest[column.number] = largest
            try:
                for _ in range(self._depth + 1):
                    self._allocate(places, largest)
            except torch.OutOfMemoryError:
                pass  # it works with fewer
        self._largest[column.number] = largest
        return place

    def _allocate(self, places: list[Place], nbytes: int) -> Place:
        place = Place(Memory(self.backend.memory(nbytes, self._here)), self._here)
        self._mark(place, [self._here])  # which may still work on what was there before
        self.allocations += 1
        places.append(place)
        return place

    def _reclaim(self, places: list[Place], place: Place) -> None:
        """Have a place used again, whose tensors have died, after what its readers were given until now."""
        self._mark(place, [place.reader, self._here] if place.reader != self._here else [self._here])
        place.is_ordered = place.is_ordered and self._here == place.stream
        place.since = self._call
        place.loans = ()  # last: an interrupted call is made again
        if sum(each.is_free for each in places) > self._depth + 2:
            self._give_up(places, place)

    def _mark(self, place: Place, streams: list[Stream]) -> None:
        waits = []
        for stream in streams:
            if stream not in place.done:
                place.done[stream] = self.backend.event()
            self.backend.record(place.done[stream], stream)
            waits.append(place.done[stream])
        place.waits = waits

    def _give_up(self, places: list[Place], place: Place) -> None:
        """Free a place that is not lent; its stream goes on after its copies and readers."""
        copied = self.backend.event()
        self.backend.record(copied, self._stream)
        for event in (copied, *place.waits):
            self.backend.wait(place.stream, event)
        places.remove(place)

    def _give_away(self, places: list[Place], place: Place) -> None:
        """Leave a place to the tensors over it: its memory is freed with them."""
        if place.reader != place.stream:
            self.backend.retain(place.memory.whole, place.reader)
        places.remove(place)

    # Leaves

    def _planned(self, sources: Sequence[Any]) -> Plan:
        """The plan of a batch; the last one's, if the batches are alike."""
        alike = [
            None
            if source is None
            else (
                source.dtype,
                source.shape,
                source.stride(),
                source.nbytes >= SMALL_BYTES and self._can_read(source),
            )
            for source in sources
        ]
        if self._plan is None or self._plan[0] != alike:
            self._plan = alike, _plan_of(sources, [each is not None and each[3] for each in alike])
        return self._plan[1]

    def _can_read(self, source: torch.Tensor) -> bool:
        return (
            is_dense(source) and not (source.is_conj() or source.is_neg()) and self.backend.can_read(source)
        )


class Iteration:
    """One pass over a source.

    Args:
        lanes: of the devices. Nobody else uses them before this has ended.
        is_split: each device gets a part of each batch, and `next` gives a list.
    """

    def __init__(
        self, source: Source, lanes: Sequence[Lane], depth: int, counts: Counts, *, is_split: bool
    ) -> None:
        self._source: Source = source
        self._lanes, self._depth, self._counts = lanes, depth, counts
        self._is_split = is_split
        self._course = Course()
        self._calls = 0
        self._fetched: Flight | None = None  # whose copies are not all begun
        self._flights: deque[Flight] = deque()
        self._error: BaseException | None = None  # of the source: it comes after the batches before it
        self._is_over = False
        self._is_inside = False  # a thread is in `next`
        self._because: str | None = None

    def next(self) -> Any:
        """The next batch, on the device.

        Blocks: until the source has made it, and, if nothing is in flight, while the device has no slot.
        Raises: StopIteration. What the source raised. RuntimeError: a newer iteration ended this one.
            OutOfMemoryError. It has ended after any.
        """
        try:
            self._is_inside = True
            self._require_going()
            return self._next()
        except BaseException:
            self._course.has_ended = True
            raise
        finally:
            self._is_inside = False
            if self._course.has_ended:
                with suppress(Exception):  # the source's; its consumer has an error already, or its end
                    self._let_go()

    @property
    def has_ended(self) -> bool:
        """Whether no batch will come any more."""
        return self._course.has_ended

    def end(self, because: str | None = None) -> None:
        """End it; if there is a reason, its consumer gets an error. Idempotent.

        Calls no device: any thread may call it, and the garbage collector.
        Raises: what the source's `close` does.
        """
        if not self._course.has_ended:
            self._because = because
        self._course.has_ended = True
        if not self._is_inside:  # else that thread lets go
            self._let_go()

    def _next(self) -> Any:
        self._calls += 1
        for lane in self._lanes:
            lane.collect()
        self._fill(1 + min(self._calls - 1, self._depth))
        self._require_going()  # it is ended by another thread: what flew may have been overwritten
        if not self._flights:
            error, self._error = self._error, None
            try:
                raise StopIteration if error is None else error
            finally:
                del error  # its traceback has this frame
        flight = self._flights[0]
        batch = [lane.lend(part) for lane, part in zip(self._lanes, flight.parts, strict=True)]
        flight.is_lent = True
        self._flights.popleft()
        self._counts.batches += 1
        self._counts.nbytes += sum(part.plan.nbytes for part in flight.parts if part.plan is not None)
        flight.parts = ()
        return batch if self._is_split else batch[0]

    def _require_going(self) -> None:
        if self._course.has_ended:
            if self._because is not None:
                raise RuntimeError(f"this iteration ended when {self._because}: iterate anew")
            raise StopIteration

    def _let_go(self) -> None:
        self._fetched = self._error = None
        for flight in [*self._flights]:
            flight.parts = ()
        self._flights.clear()
        source, self._source = self._source, _NOTHING
        source.close()

    def _fill(self, target: int) -> None:
        """Have so many batches in flight, as far as the device and the source are ready."""
        while len(self._flights) < target:
            if self._fetched is None:
                if self._is_over or (self._flights and not self._source.is_ready()):
                    return
                self._fetch()
            elif self._send(self._fetched):
                self._flights.append(self._fetched)
                self._fetched = None
            else:
                return

    def _fetch(self) -> None:
        started = time.perf_counter()
        try:
            batch = self._source.next()
        except StopIteration:
            self._is_over = True
            return
        except Exception as error:  # noqa: BLE001  # it comes in place of its batch
            self._error, self._is_over = error, True
            return
        finally:
            self._counts.stall_seconds += time.perf_counter() - started
        try:
            parts = split(batch, len(self._lanes)) if self._is_split else [batch]
            taken = [_part_of(lane.backend, part) for lane, part in zip(self._lanes, parts, strict=True)]
            self._fetched = Flight(self._course, taken)
        except Exception as error:  # noqa: BLE001  # such as a leaf that would lose its values
            self._error, self._is_over = error, True

    def _send(self, flight: Flight) -> bool:
        """Begin the copies to each device. Returns: False: not now, but something flies."""
        for lane, part in zip(self._lanes, flight.parts, strict=True):
            try:
                while part.slot is None and not lane.send(part, flight):
                    if self._flights:
                        return False
                    self._wait_for(lane)
            except torch.OutOfMemoryError:
                if not self._flights:
                    raise
                return False
        return True

    def _wait_for(self, lane: Lane) -> None:
        started = time.perf_counter()
        try:
            lane.wait()
        finally:
            self._counts.device_seconds += time.perf_counter() - started


class Turn:
    """One thread at a time. Where Ctrl-C leaves it taken, its thread takes it again."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def take(self) -> bool:
        """Returns: False: another thread has it."""
        me = threading.get_ident()
        return self._taken.setdefault("by", me) == me

    def leave(self) -> None:
        self._taken.pop("by", None)


_left: dict[int, Lane] = {}  # that must not die yet
_turn = Turn()


def leave(lane: Lane) -> None:
    """Have `tidy` close a lane that nobody uses any more; in a forked child it stays for ever."""
    _left[id(lane)] = lane


def tidy() -> None:
    """Let go of what died at a moment when no device could be called. Blocks: not."""
    if _turn.take():
        try:
            registered.tidy()
            for number, lane in [*_left.items()]:
                try:
                    is_closed = lane.pid == os.getpid() and lane.close(0.0)
                except Exception:  # noqa: BLE001  # a device that failed: its memory stays
                    continue
                if is_closed:
                    _left.pop(number, None)
        finally:
            _turn.leave()


class _Nothing:
    def next(self) -> Any:
        raise StopIteration

    def is_ready(self) -> bool:
        return True

    def close(self) -> None:
        pass


_NOTHING = _Nothing()


def _making() -> Any:
    """What is made inside can be written to outside of inference mode, too."""
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()


def _part_of(backend: Backend, batch: Any) -> Part:
    leaves: list[Any] = []
    build = take_apart(batch, leaves)
    sources: list[Any] = []
    others: dict[int, Any] = {}
    arrivals: dict[Stream, Event] = {}
    for number, leaf in enumerate(leaves):
        source = None
        if backend.holds(leaf):
            others[number] = leaf
            stream = backend.current_stream(leaf.device)
            if stream not in arrivals:
                arrivals[stream] = backend.event()
                backend.record(arrivals[stream], stream)
        elif (source := source_of(leaf)) is None:
            others[number] = backend.pinned(leaf)
        sources.append(source)
    return Part(build, sources, others, [*arrivals.values()])


def _plan_of(sources: Sequence[Any], readable: Sequence[bool]) -> Plan:
    leaves = [(number, source) for number, source in enumerate(sources) if source is not None]
    columns: list[Column] = []
    staged: list[tuple[int, int]] = []
    staging: list[Piece] = []
    room = 0
    small = [(number, source) for number, source in leaves if 0 < source.nbytes < SMALL_BYTES]
    if small:
        pieces = []
        for _, source in small:
            pieces.append(_piece(source, room))
            room = _aligned(room + source.nbytes)
        staging = [Piece(0, room, torch.uint8, (room,), (1,)), *pieces]
        staged = [(number, place) for place, (number, _) in enumerate(small, 1)]
        columns.append(Column(0, tuple(number for number, _ in small), tuple(staging), 0))
    large = [(number, source) for number, source in leaves if source.nbytes >= SMALL_BYTES]
    for place, (number, source) in enumerate(large, 1):
        staged_at = None if readable[number] else len(staging)
        columns.append(Column(place, (number,), (_piece(source, 0),), staged_at))
        if staged_at is not None:
            staged.append((number, staged_at))
            staging.append(_piece(source, room))
            room = _aligned(room + source.nbytes)
    return Plan(
        columns=tuple(columns),
        empty=tuple((number, _piece(source, 0)) for number, source in leaves if not source.nbytes),
        staged=tuple(staged),
        staging=tuple(staging),
        staging_bytes=room,
        nbytes=sum(source.nbytes for _, source in leaves),
    )


def _piece(source: torch.Tensor, start: int) -> Piece:
    return Piece(start, source.nbytes, source.dtype, tuple(source.shape), strides_of_copy(source))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
