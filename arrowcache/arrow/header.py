"""Header: reads the headers of an Arrow IPC file before Arrow acts on them, and alters them.

Arrow decompresses a record batch as soon as it is asked for, into as much memory as the body claims
to need: a small file can ask for more than the machine has. So whether it would is read here first,
by the format's own definition (format/File.fbs, Message.fbs, and flatbuffers' binary form). Arrow
checks what it reads again; no more of it is believed here than an answer to that.

Arrow's writer puts one buffer right after another. The format allows gaps, since headers say where each
begins: `spread` makes some in a file that Arrow wrote.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress

_TRAILER_BYTES = 10  # the footer's length, and the magic
_CONTINUATION = 0xFFFFFFFF
_MOST_PADDING_BYTES = 64  # some count what follows a buffer to it
_DICTIONARIES, _BATCHES = 2, 3  # fields of Footer
_HEADER, _BODY_BYTES = 2, 3  # of Message
_BUFFERS, _COMPRESSION = 2, 3  # of RecordBatch
_BLOCK = "<qi4xq"  # where a batch's message begins, its bytes, those of the body
_BUFFER = "<qq"  # where a buffer begins in the body, its bytes


def footer_start(file: memoryview) -> int:
    """Return the byte of a file at which its footer begins.

    Raises: ValueError: the footer would lie outside the file.
    """
    start = len(file) - _TRAILER_BYTES - _read("<i", file, len(file) - _TRAILER_BYTES)
    if not 0 <= start < len(file) - _TRAILER_BYTES:
        raise ValueError(f"its footer would begin at byte {start} of {len(file)}")
    return start


def require_plain(file: memoryview) -> None:
    """Make sure that reading the first record batch decompresses nothing, and reads no dictionary.

    Raises: ValueError: what is there, or headers that lead out of the file.
    """
    at = footer_start(file)
    footer = at + _read("<I", file, at)
    dictionaries, batches = _vector(file, footer, _DICTIONARIES), _vector(file, footer, _BATCHES)
    if dictionaries and _read("<I", file, dictionaries):
        raise ValueError("it has dictionaries, which no segment has")
    if not batches or not _read("<I", file, batches):
        return
    message = _read("<q", file, batches + 4)
    if _read("<I", file, message) != _CONTINUATION:
        raise ValueError("its record batch does not begin as one")
    message += 8
    message += _read("<I", file, message)
    batch = _field(file, message, _HEADER)
    if not batch:
        raise ValueError("its record batch has no header")
    if _field(file, batch + _read("<I", file, batch), _COMPRESSION):
        raise ValueError("its record batch is compressed")


def structure_spans(file: memoryview, rows: int) -> Iterator[tuple[int, int]]:
    """The headers and offsets of a file: all that is read to check its structure.

    A span is asked for before it is read: where the disk does not give it, stop here. Where headers lead
    nowhere these end, and reading them says so.

    Args:
        rows: that the file is to have.
    Yields: (start, bytes), within the file.
    """
    nbytes = len(file)
    yield 0, min(8, nbytes)
    yield max(0, nbytes - _TRAILER_BYTES), min(_TRAILER_BYTES, nbytes)
    with suppress(ValueError):
        at = footer_start(file)
        yield at, nbytes - at
        batches = _vector(file, at + _read("<I", file, at), _BATCHES)
        if not batches or not _read("<I", file, batches):
            return
        message, message_bytes = _read("<q", file, batches + 4), _read("<i", file, batches + 12)
        if not 0 < message_bytes <= nbytes - message < nbytes:
            return
        yield message, message_bytes
        batch = _field(file, message + 8 + _read("<I", file, message + 8), _HEADER)
        buffers = _vector(file, batch + _read("<I", file, batch), _BUFFERS)
        offsets_bytes, entry_bytes = 4 * (rows + 1), struct.calcsize(_BUFFER)
        for entry in range(_read("<I", file, buffers)):
            place = buffers + 4 + entry * entry_bytes
            start, size = message + message_bytes + _read("<q", file, place), _read("<q", file, place + 8)
            if 0 <= start <= nbytes - size and 0 <= size - offsets_bytes < _MOST_PADDING_BYTES:
                yield start, size


def spread(pieces: Sequence[memoryview], alignments: Sequence[int]) -> list[memoryview]:
    """Put gaps of zeros between the buffers of a file's only record batch.

    Args:
        pieces: the file as Arrow wrote it, in pieces of bytes. The result refers to them.
        alignments: of each buffer, in bytes, validity bitmaps included. Multiples of 8. An empty buffer stays
            behind the one before it.
    """
    nbytes = sum(piece.nbytes for piece in pieces)
    trailer = b"".join(_cut(pieces, nbytes - _TRAILER_BYTES)[1])
    front, rest = _cut(pieces, nbytes - _TRAILER_BYTES - _read("<i", memoryview(trailer), 0))
    footer = bytearray(b"".join(rest))
    block = _vector(memoryview(footer), _read("<I", memoryview(footer), 0), _BATCHES) + 4
    message, message_bytes, body_bytes = struct.unpack_from(_BLOCK, footer, block)
    body_start = message + message_bytes
    before, rest = _cut(front, body_start)
    head = bytearray(b"".join(before))
    table = message + 8 + _read("<I", memoryview(head), message + 8)
    batch = _field(memoryview(head), table, _HEADER)
    buffers = _vector(memoryview(head), batch + _read("<I", memoryview(head), batch), _BUFFERS) + 4
    if _read("<I", memoryview(head), buffers - 4) != len(alignments):
        raise AssertionError("Arrow writes other buffers than a segment has")
    body: list[memoryview] = []
    done = added = 0
    for number, alignment in enumerate(alignments):
        entry = buffers + number * struct.calcsize(_BUFFER)
        start, size = struct.unpack_from(_BUFFER, head, entry)
        gap = -(body_start + start + added) % alignment if size else 0
        if gap:
            part, rest = _cut(rest, start - done)
            body += [*part, memoryview(bytes(gap))]
            done, added = start, added + gap
        struct.pack_into(_BUFFER, head, entry, start + added, size)
    struct.pack_into("<q", head, _field(memoryview(head), table, _BODY_BYTES), body_bytes + added)
    struct.pack_into(_BLOCK, footer, block, message, message_bytes, body_bytes + added)
    return [memoryview(head), *body, *rest, memoryview(footer)]


def _cut(pieces: Sequence[memoryview], at: int) -> tuple[list[memoryview], list[memoryview]]:
    """The bytes before a position, and those from it on."""
    before, after = [], []
    for piece in pieces:
        size = min(at, piece.nbytes)
        before.append(piece[:size])
        after.append(piece[size:])
        at -= size
    return [piece for piece in before if piece.nbytes], [piece for piece in after if piece.nbytes]


def _vector(file: memoryview, table: int, number: int) -> int:
    """The position of the count of a table's vector, or 0 if it has none."""
    at = _field(file, table, number)
    return at + _read("<I", file, at) if at else 0


def _field(file: memoryview, table: int, number: int) -> int:
    """The position of a table's field, or 0 if it is missing."""
    fields = table - _read("<i", file, table)
    slot = 4 + 2 * number
    if slot + 2 > _read("<H", file, fields):
        return 0
    offset = _read("<H", file, fields + slot)
    return table + offset if offset else 0


def _read(kind: str, file: memoryview, at: int) -> int:
    if not 0 <= at <= len(file) - struct.calcsize(kind):
        raise ValueError(f"its headers lead to byte {at} of {len(file)}")
    return int(struct.unpack_from(kind, file, at)[0])
