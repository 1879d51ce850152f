"""Header: what an Arrow IPC file's own headers say, read before Arrow acts on them.

Arrow decompresses a record batch as soon as it is asked for, into as much memory as the body claims
to need: a small file can ask for more than the machine has. So whether it would is read here first,
by the format's own definition (format/File.fbs, Message.fbs, and flatbuffers' binary form). Arrow
checks what it reads again; no more of it is believed here than an answer to that.
"""

from __future__ import annotations

import struct

_TRAILER_BYTES = 10  # the footer's length, and the magic
_CONTINUATION = 0xFFFFFFFF
_DICTIONARIES, _BATCHES = 2, 3  # fields of Footer
_HEADER = 2  # of Message
_COMPRESSION = 3  # of RecordBatch


def footer_start(file: memoryview) -> int:
    """At which byte of a file its footer begins.

    Raises: ValueError: a footer that is not in the file.
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


def _vector(file: memoryview, table: int, number: int) -> int:
    """Where the count of a table's vector is; 0: it has none."""
    at = _field(file, table, number)
    return at + _read("<I", file, at) if at else 0


def _field(file: memoryview, table: int, number: int) -> int:
    """Where a field of a table is; 0: it is not there."""
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
