"""Copier: takes batches to one device and into the consumer's hands.

It owns one copy stream for its life, and a few slots: a pinned host buffer, registered once, and an
event each. Device memory is that of buffers.py.

What it guarantees, whatever the timing of host and device:

1. A tensor is handed over only after its stream was told to wait for the copy (`ready`).
2. A host buffer, or a source that is read where it is, stays untouched until its copy is over.
3. Device memory is written only when nobody can see it any more (buffers.py).

`send` and `rest` run in one thread, all others in the consumer's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from arrowcache.torch.backend import Backend, Event, Stream
from arrowcache.torch.buffers import GROWTH, Buffer, Buffers
from arrowcache.torch.structure import replace_leaves
from arrowcache.torch.tensors import is_dense, source_of, strides_of_copy

_ALIGNMENT = 256  # of a leaf in a slot's host buffer


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

    buffer: Buffer | None
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
    """A batch on its way.

    `pieces` has one entry for each object that is a leaf, None where `receive` moves it; `numbers` says
    which of them each leaf is: what occurs twice in a batch does so on the device, too.
    """

    batch: Any
    slot: _Slot | None  # None: it is done with
    numbers: list[int]
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
        self.buffers = Buffers(backend, self._stream, depth + 2)  # on their way, in use, being let go
        self.host_bytes = 0

    def send(self, batch: Any) -> Sent:
        """Start a batch's copy.

        Blocks: until the slot's last copy is over, and while what is not pinned is copied into it.
        Raises: TypeError: a leaf that would lose what it is, as `source_of` says.
        """
        slot = self._idle.popleft()
        pieces: list[_Piece | None] = []
        try:
            self._wait_for(slot)
            found: dict[int, tuple[int, Any]] = {}  # by id: number and leaf
            numbers: list[int] = []

            def note(leaf: Any) -> Any:
                numbers.append(found.setdefault(id(leaf), (len(found), leaf))[0])
                return leaf

            replace_leaves(batch, note)
            sources = [source_of(leaf) for _, leaf in found.values()]
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
        return Sent(batch, slot, numbers, pieces, nbytes)

    def receive(self, sent: Sent) -> Any:
        """The batch on the device, for the calling thread's current stream, which waits for the copy."""
        stream = self._backend.current_stream()
        assert sent.slot is not None
        self._backend.wait(stream, sent.slot.ready)
        numbers, pieces = iter(sent.numbers), sent.pieces
        handed: dict[int, Any] = {}

        def hand_over(leaf: Any) -> Any:
            number = next(numbers)
            if number not in handed:
                handed[number] = self._hand_over(leaf, pieces[number], stream)
            return handed[number]

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
        self.buffers.close()
        for slot in self._idle:
            slot.host = None
        self.host_bytes = 0

    def _is_readable(self, source: torch.Tensor) -> bool:
        return (
            is_dense(source)
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
            slot.host = self._backend.host_memory(needed if not had else int(needed * GROWTH))
            self.host_bytes += slot.host.nbytes - had

    def _piece(self, number: int, source: torch.Tensor) -> _Piece:
        """Where a leaf goes to."""
        nbytes = source.nbytes
        buffer = self.buffers.take(number, nbytes) if nbytes else None
        return _Piece(buffer, source.dtype, tuple(source.shape), strides_of_copy(source), nbytes)

    def _hand_over(self, leaf: Any, piece: _Piece | None, stream: Stream) -> Any:
        device = self._backend.device
        if piece is None:
            return leaf.to(device) if hasattr(leaf, "to") else leaf
        if piece.buffer is None:
            return torch.empty_strided(piece.shape, piece.strides, dtype=piece.dtype, device=device)
        return piece.over(self.buffers.lend(piece.buffer, stream))

    def _take_back(self, pieces: list[_Piece | None]) -> None:
        buffers = [piece.buffer for piece in pieces if piece is not None]
        pieces.clear()
        self.buffers.give_back(buffer for buffer in buffers if buffer is not None)

    def _wait_for(self, slot: _Slot) -> None:
        if slot.is_used:
            self._backend.synchronize(slot.ready)
            slot.sources.clear()
            slot.is_used = False


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
