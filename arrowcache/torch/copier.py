"""Copier: takes batches to one device and back into the consumer's hands, over memory that it reuses.

It owns one copy stream for its life, a few slots (a pinned host buffer, registered once, and an event
each), and for each leaf of a batch its own device buffers: keeping every label keeps no image.

What it guarantees, whatever the timing of host and device:

1. A buffer is written only after everything that was given to the consumer's stream while the last
   tensor over it lived: the copy stream waits for a mark that is recorded there once the tensor is
   known to be dead. It is asked when the consumer wants its next batch, in its thread.
2. A tensor is handed over only after its stream was told to wait for the copy (`ready`).
3. A host buffer, or a source that is read where it is, stays untouched until its copy is over.
4. Nobody waits for a buffer: where all are lent, one more is allocated, and counted.

Tensors are made over a buffer through DLPack, which gives each hand-over a storage of its own; torch
keeps the Python object of a storage for as long as any tensor, view or array over it lives, wherever
(autograd, another thread). A weak reference to it tells of the end by one append to a deque: no line of
Python runs in a finalizer, and which stream is current there does not matter.

Device memory belongs to the consumer's stream, as that of `tensor.to(device)` would: a batch that
outlives the copier is freed like any other tensor. Nothing here calls `record_stream`, except for
batches kept beyond `close` whose consumer had changed streams.

`send` and `rest` run in one thread, all others in the consumer's.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # documented there

from arrowcache.torch.backend import Backend, Event, Stream
from arrowcache.torch.structure import replace_leaves

_ALIGNMENT = 256  # of a leaf in a slot's host buffer
_GROWTH = 1.25  # a batch larger than all before makes room for somewhat larger ones


@dataclass(slots=True, eq=False)
class _Mark:
    """A point in the consumer's work, which the next copies into some buffers wait for."""

    event: Event
    uses: int = 0


@dataclass(slots=True, eq=False)
class _Buffer:
    memory: torch.Tensor
    stream: Stream  # whose memory it is
    marks: list[_Mark] = field(default_factory=list)


class _Loan(weakref.ref[object]):
    """A buffer in the consumer's hands, for as long as the storage over it lives."""

    __slots__ = ("buffer", "column", "stream")
    buffer: _Buffer
    column: _Column
    stream: Stream  # the one that waited for the copy
    __eq__, __hash__ = object.__eq__, object.__hash__


@dataclass(slots=True, eq=False)
class _Column:
    """The buffers of one leaf."""

    free: deque[_Buffer] = field(default_factory=deque)
    lent: set[_Loan] = field(default_factory=set)
    largest_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Slot:
    """The host's side of one batch on its way."""

    ready: Event
    host: torch.Tensor | None = None
    sources: list[torch.Tensor] = field(default_factory=list)  # read where they are
    is_used: bool = False


@dataclass(slots=True, eq=False)
class _Piece:
    """One leaf on its way; without a buffer it has no bytes."""

    column: _Column
    buffer: _Buffer | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """The leaf's tensor over a buffer's bytes."""
        flat = memory[: self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.strides)


@dataclass(slots=True, eq=False)
class Sent:
    """A batch on its way: `pieces` has one entry a leaf, None where `receive` moves it."""

    batch: Any
    slot: _Slot | None  # None: it is done with
    pieces: list[_Piece | None]
    nbytes: int


class Copier:
    """Takes batches to one device.

    Args:
        backend: the device.
        depth: batches that are sent and not yet received, at most.
    """

    def __init__(self, backend: Backend, depth: int) -> None:
        self._backend = backend
        self._stream = backend.stream()
        self._idle = deque(_Slot(backend.event()) for _ in range(depth))
        self._most_spare = depth + 2  # on their way, in use, being let go
        self._columns: list[_Column] = []
        self._returned: deque[_Loan] = deque()
        self._spare_marks: list[_Mark] = []
        self._owner: Stream = None
        self._lock = threading.Lock()
        self.device_bytes = self.allocations = self.host_bytes = 0

    def begin(self) -> None:
        """The calling thread's current stream is the consumer's from now on."""
        self._owner = self._backend.current_stream()

    def send(self, batch: Any) -> Sent:
        """Start a batch's copy.

        Blocks: until the slot's last copy is over, and while what is not pinned is copied into it.
        """
        slot = self._idle.popleft()
        pieces: list[_Piece | None] = []
        try:
            self._wait_for(slot)
            leaves: list[Any] = []
            replace_leaves(batch, lambda leaf: leaves.append(leaf) or leaf)  # type: ignore[func-returns-value]
            sources = [self._source(leaf) for leaf in leaves]
            readable = [source is None or self._is_readable(source) for source in sources]
            self._make_room(slot, sources, readable)
            start = nbytes = 0
            for number, (source, is_readable) in enumerate(zip(sources, readable, strict=True)):
                if source is None:
                    pieces.append(None)
                    continue
                piece = self._piece(number, source)
                pieces.append(piece)
                nbytes += piece.nbytes
                if piece.buffer is None:
                    continue
                if is_readable:
                    slot.sources.append(source)
                else:
                    assert slot.host is not None
                    staged = piece.over(slot.host[start:])
                    staged.copy_(source)
                    source, start = staged, _aligned(start + piece.nbytes)
                slot.is_used = True
                self._backend.copy(piece.over(piece.buffer.memory), source, self._stream)
        except BaseException:
            self._take_back(pieces)
            self._idle.append(slot)
            raise
        finally:
            self._backend.record(slot.ready, self._stream)
        return Sent(batch, slot, pieces, nbytes)

    def collect(self) -> None:
        """Have buffers used again whose tensors have died: after what the consumer was given until now."""
        marks: dict[Stream, _Mark] = {}
        now = self._backend.current_stream()
        while self._returned:
            loan = self._returned.popleft()
            buffer = loan.buffer
            for stream in {loan.stream, now}:
                if stream not in marks:
                    marks[stream] = self._mark(stream)
                buffer.marks.append(marks[stream])
            with self._lock:
                for mark in buffer.marks:
                    mark.uses += 1
                loan.column.lent.discard(loan)
                if len(loan.column.free) < self._most_spare:
                    loan.column.free.append(buffer)
                    continue
            self._discard(buffer)

    def receive(self, sent: Sent) -> Any:
        """The batch on the device, for the calling thread's current stream, which waits for the copy."""
        stream = self._backend.current_stream()
        slot, pieces, made = sent.slot, sent.pieces, 0
        assert slot is not None
        self._backend.wait(stream, slot.ready)

        def hand_over(leaf: Any) -> Any:
            nonlocal made
            piece, made = pieces[made], made + 1
            if piece is None:
                return leaf.to(self._backend.device) if hasattr(leaf, "to") else leaf
            return self._lend(piece, stream)

        try:
            return replace_leaves(sent.batch, hand_over, self._backend.device)
        finally:
            self.drop(sent)

    def drop(self, sent: Sent) -> None:
        """Take back what of a batch was not handed over, and its slot. Idempotent."""
        slot, sent.slot, sent.batch = sent.slot, None, None
        if slot is not None:
            self._take_back(sent.pieces)
            self._idle.append(slot)

    def rest(self) -> None:
        """Let go of sources. Blocks: until their copies are over."""
        for slot in list(self._idle):
            self._wait_for(slot)

    def close(self) -> None:
        """Let go of all memory but what the consumer keeps. Blocks: as `rest`."""
        self.rest()
        self.collect()
        for column in self._columns:
            while column.free:
                self._discard(column.free.popleft())
            for loan in column.lent:
                if loan.stream != loan.buffer.stream:
                    self._backend.retain(loan.buffer.memory, loan.stream)
            column.lent.clear()
        for slot in self._idle:
            slot.host = None
        self.device_bytes = self.host_bytes = 0

    def _source(self, leaf: Any) -> torch.Tensor | None:
        """A leaf as a plain host tensor; None: it has to be moved by its own `to`, or stays as it is."""
        if isinstance(leaf, np.ndarray):
            return _tensor_of(leaf)
        if (
            type(leaf) is not torch.Tensor  # a subclass has more to it than its bytes
            or leaf.device.type != "cpu"
            or leaf.layout != torch.strided
            or leaf.requires_grad
            or leaf.is_nested
            or leaf.is_quantized
        ):
            return None
        return leaf

    def _is_readable(self, source: torch.Tensor) -> bool:
        return (
            _is_dense(source)
            and not source.is_conj()
            and not source.is_neg()
            and self._backend.can_read(source)
        )

    def _make_room(self, slot: _Slot, sources: list[torch.Tensor | None], readable: list[bool]) -> None:
        """Have the slot's host buffer hold what is to be staged."""
        needed = sum(
            _aligned(source.nbytes)
            for source, is_readable in zip(sources, readable, strict=True)
            if source is not None and not is_readable
        )
        had = 0 if slot.host is None else slot.host.nbytes
        if needed > had:
            slot.host = None
            slot.host = self._backend.host_memory(needed if not had else int(needed * _GROWTH))
            self.host_bytes += slot.host.nbytes - had

    def _piece(self, number: int, source: torch.Tensor) -> _Piece:
        """Where a leaf goes to; the copy stream waits until that may be written."""
        while len(self._columns) <= number:
            self._columns.append(_Column())
        column, nbytes = self._columns[number], source.numel() * source.element_size()
        strides = source.stride() if _is_dense(source) else _contiguous_strides(source.shape)
        buffer = self._take(column, nbytes) if nbytes else None
        return _Piece(column, buffer, source.dtype, tuple(source.shape), strides, nbytes)

    def _take(self, column: _Column, nbytes: int) -> _Buffer:
        while True:
            with self._lock:
                buffer = column.free.popleft() if column.free else None
            if buffer is None:
                break
            if buffer.memory.nbytes >= nbytes:
                for mark in buffer.marks:
                    self._backend.wait(self._stream, mark.event)
                self._release_marks(buffer)
                return buffer
            self._discard(buffer)
        if nbytes > column.largest_bytes:
            column.largest_bytes = nbytes if not column.largest_bytes else int(nbytes * _GROWTH)
        memory = self._backend.memory(column.largest_bytes, self._owner)
        with self._lock:
            self.device_bytes += memory.nbytes
            self.allocations += 1
        fresh = self._mark(self._owner)  # its stream may still work on what was there before
        self._backend.wait(self._stream, fresh.event)
        with self._lock:
            self._spare_marks.append(fresh)
        return _Buffer(memory, self._owner)

    def _lend(self, piece: _Piece, stream: Stream) -> torch.Tensor:
        buffer = piece.buffer
        if buffer is None:
            return torch.empty_strided(
                piece.shape, piece.strides, dtype=piece.dtype, device=self._backend.device
            )
        whole = from_dlpack(to_dlpack(buffer.memory))
        loan = _Loan(whole.untyped_storage(), self._returned.append)
        loan.buffer, loan.column, loan.stream = buffer, piece.column, stream
        piece.buffer = None  # lent from here on: whatever comes, it is not taken back
        with self._lock:
            piece.column.lent.add(loan)
        return piece.over(whole)

    def _take_back(self, pieces: list[_Piece | None]) -> None:
        """Have buffers used again that nobody saw: the copy stream alone has worked on them."""
        with self._lock:
            for piece in pieces:
                if piece is not None and piece.buffer is not None:
                    piece.column.free.append(piece.buffer)
                    piece.buffer = None

    def _mark(self, stream: Stream) -> _Mark:
        with self._lock:
            mark = self._spare_marks.pop() if self._spare_marks else _Mark(self._backend.event())
        self._backend.record(mark.event, stream)
        return mark

    def _release_marks(self, buffer: _Buffer) -> None:
        with self._lock:
            for mark in buffer.marks:
                mark.uses -= 1
                if not mark.uses:
                    self._spare_marks.append(mark)
            buffer.marks.clear()

    def _discard(self, buffer: _Buffer) -> None:
        """Free a buffer; its stream goes on after everything that works on it."""
        copied = self._mark(self._stream)
        for mark in (copied, *buffer.marks):
            self._backend.wait(buffer.stream, mark.event)
        self._release_marks(buffer)
        with self._lock:
            self._spare_marks.append(copied)
            self.device_bytes -= buffer.memory.nbytes

    def _wait_for(self, slot: _Slot) -> None:
        if slot.is_used:
            self._backend.synchronize(slot.ready)
            slot.sources.clear()
            slot.is_used = False


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """An array's numbers as a tensor, over the same memory if possible; None: torch has no such dtype."""
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):
        return None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one run of memory, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
