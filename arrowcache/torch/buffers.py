"""Buffers: device memory for the leaves of batches, used again once nobody can see it any more.

Each leaf has buffers of its own: keeping every label keeps no image. A buffer is lent as a tensor made
over it through DLPack, which gives each hand-over a storage of its own; torch keeps the Python object
of a storage for as long as any tensor, view or array over it lives, wherever (autograd, another
thread). A weak reference to it tells of the end by one append to a deque: no line of Python runs in a
finalizer, and which stream is current there does not matter.

Guarantees: the copy stream writes a buffer only after everything that was given to the consumer's stream
while the last tensor over it lived: it waits for a mark, an event that is recorded there once the
tensor is known to be dead (`collect`). Nobody waits for a buffer: where all are lent, one more is
allocated, and counted. All that a leaf needs while nothing is kept are there from its first batch on,
or the memory would grow epochs later, when host and device first drift so far apart.

Memory belongs to the consumer's stream, as that of `tensor.to(device)` would: a batch that outlives
this is freed like any other tensor. Nothing here calls `record_stream`, except for what is kept
beyond `close` by a consumer that had changed streams.

`take` is called in one thread, all else in the consumer's; `give_back` in either.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # documented there

from arrowcache.torch.backend import Backend, Event, Stream

GROWTH = 1.25  # a batch larger than all before makes room for somewhat larger ones


@dataclass(slots=True, eq=False)
class _Mark:
    """A point in the consumer's work, which the next copies into some buffers wait for."""

    event: Event
    uses: int = 0


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory for one leaf of one batch."""

    memory: torch.Tensor
    stream: Stream  # whose memory it is
    column: _Column
    is_lent: bool = False
    marks: list[_Mark] = field(default_factory=list)


class _Loan(weakref.ref[object]):
    """A buffer in the consumer's hands, for as long as the storage over it lives."""

    __slots__ = ("buffer", "stream")
    buffer: Buffer
    stream: Stream  # the one that waited for the copy
    __eq__, __hash__ = object.__eq__, object.__hash__


@dataclass(slots=True, eq=False)
class _Column:
    """The buffers of one leaf."""

    free: deque[Buffer] = field(default_factory=deque)
    lent: set[_Loan] = field(default_factory=set)
    largest_bytes: int = 0


class Buffers:
    """Memory on one device.

    Args:
        backend: the device.
        copy_stream: the one that writes.
        spare: buffers of each leaf that are allocated at first, and kept while nobody uses them.
    """

    def __init__(self, backend: Backend, copy_stream: Stream, spare: int) -> None:
        self._backend = backend
        self._copy_stream = copy_stream
        self._most_spare = spare
        self._columns: list[_Column] = []
        self._returned: deque[_Loan] = deque()
        self._spare_marks: list[_Mark] = []
        self._owner: Stream = None
        self._lock = threading.Lock()
        self.nbytes = self.allocations = 0

    def begin(self) -> None:
        """The calling thread's current stream is the consumer's from now on."""
        self._owner = self._backend.current_stream()

    def take(self, leaf: int, nbytes: int) -> Buffer:
        """A buffer for a leaf, by its number; the copy stream waits until it may be written."""
        while len(self._columns) <= leaf:
            self._columns.append(_Column())
        column = self._columns[leaf]
        while True:
            with self._lock:
                buffer = column.free.popleft() if column.free else None
            if buffer is None:
                if not column.largest_bytes:
                    column.free.extend(self._allocate(column, nbytes) for _ in range(self._most_spare - 1))
                return self._allocate(column, nbytes)
            if buffer.memory.nbytes >= nbytes:
                for mark in buffer.marks:
                    self._backend.wait(self._copy_stream, mark.event)
                self._release_marks(buffer)
                return buffer
            self._discard(buffer)

    def lend(self, buffer: Buffer, stream: Stream) -> torch.Tensor:
        """All of a buffer, (nbytes,) uint8, to the consumer, whose stream has waited for the copy."""
        whole = from_dlpack(to_dlpack(buffer.memory))
        loan = _Loan(whole.untyped_storage(), self._returned.append)
        loan.buffer, loan.stream = buffer, stream
        buffer.is_lent = True  # whatever comes, it is not given back
        with self._lock:
            buffer.column.lent.add(loan)
        return whole

    def give_back(self, buffers: Iterable[Buffer]) -> None:
        """Have those used again that were not lent: the copy stream alone has worked on them."""
        with self._lock:
            for buffer in buffers:
                if not buffer.is_lent:
                    buffer.column.free.append(buffer)

    def collect(self) -> None:
        """Have buffers used again whose tensors have died: after what the consumer was given until now."""
        marks: dict[Stream, _Mark] = {}
        now = self._backend.current_stream()
        while self._returned:
            loan = self._returned.popleft()
            buffer, column = loan.buffer, loan.buffer.column
            for stream in {loan.stream, now}:
                if stream not in marks:
                    marks[stream] = self._mark(stream)
                buffer.marks.append(marks[stream])
            with self._lock:
                for mark in buffer.marks:
                    mark.uses += 1
                column.lent.discard(loan)
                buffer.is_lent = False
                if len(column.free) < self._most_spare:
                    column.free.append(buffer)
                    continue
            self._discard(buffer)

    def close(self) -> None:
        """Let go of all memory but what the consumer keeps."""
        self.collect()
        for column in self._columns:
            while column.free:
                self._discard(column.free.popleft())
            for loan in column.lent:
                if loan.stream != loan.buffer.stream:
                    self._backend.retain(loan.buffer.memory, loan.stream)
            column.lent.clear()
        self.nbytes = 0

    def _allocate(self, column: _Column, nbytes: int) -> Buffer:
        if nbytes > column.largest_bytes:
            column.largest_bytes = nbytes if not column.largest_bytes else int(nbytes * GROWTH)
        memory = self._backend.memory(column.largest_bytes, self._owner)
        with self._lock:
            self.nbytes += memory.nbytes
            self.allocations += 1
        fresh = self._mark(self._owner)  # its stream may still work on what was there before
        self._backend.wait(self._copy_stream, fresh.event)
        with self._lock:
            self._spare_marks.append(fresh)
        return Buffer(memory, self._owner, column)

    def _mark(self, stream: Stream) -> _Mark:
        with self._lock:
            mark = self._spare_marks.pop() if self._spare_marks else _Mark(self._backend.event())
        self._backend.record(mark.event, stream)
        return mark

    def _release_marks(self, buffer: Buffer) -> None:
        with self._lock:
            for mark in buffer.marks:
                mark.uses -= 1
                if not mark.uses:
                    self._spare_marks.append(mark)
            buffer.marks.clear()

    def _discard(self, buffer: Buffer) -> None:
        """Free a buffer; its stream goes on after everything that works on it."""
        copied = self._mark(self._copy_stream)
        for mark in (copied, *buffer.marks):
            self._backend.wait(buffer.stream, mark.event)
        self._release_marks(buffer)
        with self._lock:
            self._spare_marks.append(copied)
            self.nbytes -= buffer.memory.nbytes
