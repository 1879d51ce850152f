"""Segment: one Arrow IPC file holding exactly one record batch. Pure: bytes in, bytes out.

`encode` turns columns into the pieces of a file (no copy of the data: the pieces are Arrow's
headers and the caller's own buffers), so its exact size is known before any of it is written.
`read_structure` is the inverse: it checks a mapped file and says where each buffer lies.
`check_bytes` compares the xxh3 of each buffer with the one in the footer.

What a reader may rely on after `read_structure`: magic, footer and schema are ours; there is
one uncompressed record batch of the stated rows and no null; the buffers lie within the file one
after another up to the footer, as their rows need, so that none is elsewhere or shared; offsets of
tensors are uniform, those of variable-length columns rise.

Arrangement. A disk is read in pages of 4 KiB, so a row should meet as few of them as it can. The values of a
column of fixed width begin at a multiple of the largest power of two that divides both a row and a page, at a
cache line at least, after a gap of zeros. Those of rows of 8 bytes or fewer, and all other buffers, follow at
once. That saves, where rows are read one by one, half of the bytes read at 4 KiB, a third at 8 KiB, 6 percent
at 64 KiB, 0.4 percent at 1 MiB. Arrow, DuckDB, Polars and tensorflow-io read files with gaps as any other.

Headers. Arrow decompresses a record batch as soon as it is asked for, into as much memory as the body says
to need: a small file can ask for more than the machine has. So whether it would is read here first,
by the format's own definition (format/File.fbs, Message.fbs, and flatbuffers' binary form). Arrow
checks what it reads again; no more of it is believed here than an answer to that. Arrow's writer puts one
buffer right after another. The format allows gaps, since headers say where each begins: `spread` makes some
in a file that Arrow wrote.
"""

from __future__ import annotations

import io
import itertools
import math
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from arrowcache.arrow.dtype import dtype_of
from arrowcache.arrow.schema import Binary, FieldType, FixedType, Ragged, Schema, String, Tensor, VariableType
from arrowcache.errors import CorruptSegmentError
from arrowcache.limits import Limits
from arrowcache.units import format_count

CHECKSUM_KEY = b"arrowcache.xxh3"
SKIPPED_KEY = b"arrowcache.skipped"
_MAGIC = b"ARROW1"
_OFFSETS_A_PIECE = 1 << 16
_END_OF_BATCHES_BYTES = 8  # what Arrow writes between the last record batch and the footer
_AS_IT_IS = pa.ipc.IpcReadOptions(ensure_native_endian=False)  # another byte order is another schema


class VariableColumn(NamedTuple):
    """The rows of a variable-length column: element offsets (rows + 1,), int32, and the data."""

    offsets: NDArray[np.int32]
    data: bytearray | memoryview


Column = NDArray[Any] | VariableColumn


@dataclass(frozen=True, slots=True)
class EncodedSegment:
    """A segment's file in pieces, ready for one scatter write."""

    pieces: tuple[memoryview, ...]
    rows: int
    nbytes: int


class Form(NamedTuple):
    """The form of a segment's file. How its bytes come about from this is known here alone.

    `full_rows` is the rows of a full segment, `segment_bytes` an upper bound on its file.
    """

    schema: Schema
    full_rows: int
    segment_bytes: int

    def encode(self, columns: Mapping[str, Column], skipped: int = 0) -> EncodedSegment:
        """Return a segment file of columns in this form. `skipped`, raises: as of `encode`."""
        return encode(self.schema, columns, skipped=skipped)


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of the buffers of one segment's columns: byte offsets from the file's start.

    `fixed` has the values of each fixed-width column, `variable` (offsets, values) of each
    variable-length one, both in the schema's physical order; `buffers` has them all, one after another.
    """

    rows: int
    fixed: tuple[int, ...]
    variable: tuple[tuple[int, int], ...]
    buffers: array[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        places = array("q", [*self.fixed, *itertools.chain.from_iterable(self.variable)])
        object.__setattr__(self, "buffers", places)


class _Pieces(io.RawIOBase):
    """A file that keeps what is written by reference: Arrow hands the column buffers over uncopied."""

    def __init__(self) -> None:
        self.pieces: list[memoryview] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = memoryview(data)
        self.pieces.append(piece)
        return piece.nbytes


def encode(schema: Schema, columns: Mapping[str, Column], *, skipped: int = 0) -> EncodedSegment:
    """Lay the rows of one segment out as an Arrow IPC file.

    Args:
        columns: name -> (rows, *shape), C-contiguous, of the type's numpy_dtype; or VariableColumn.
        skipped: number of samples that were left out as it was drawn, which its metadata says, if any were.
    Returns: pieces that refer to the given memory: write them before changing it.
    """
    arrays, checksums = [], []
    for name, kind in [*schema.fixed.items(), *schema.variable.items()]:
        buffers = _buffers(kind, columns[name])
        checksums += [xxhash.xxh3_64_hexdigest(buffer) for buffer in buffers]
        arrays.append(_array(kind, _rows(columns[name]), [pa.py_buffer(b) for b in buffers]))
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema.arrow)
    footer = {CHECKSUM_KEY: " ".join(checksums).encode()}
    if skipped:
        footer[SKIPPED_KEY] = str(skipped).encode()
    pieces = spread(_write(batch, footer), buffer_alignments(schema))
    return EncodedSegment(tuple(pieces), batch.num_rows, sum(piece.nbytes for piece in pieces))


def encoded_bytes_bound(schema: Schema, rows: int) -> int:
    """An upper bound on the file of a segment, without the values of variable-length columns."""
    return _bytes_of_no_row(schema) + rows * row_bytes(schema)


def row_bytes(schema: Schema) -> int:
    """Bytes that one row adds to a segment, offsets included, variable-length data not."""
    fixed = sum(kind.row_bytes + 4 * kind.is_list for kind in schema.fixed.values())
    return fixed + 4 * len(schema.variable)


def element_bytes(kind: VariableType) -> int:
    """Bytes of what a variable-length column's offsets count."""
    return kind.item_bytes // kind.elements if isinstance(kind, Ragged) else 1


def max_rows(schema: Schema, segment_bytes: int) -> int:
    """Rows without variable-length data that fit into a segment. 0 if not even one does."""
    rows = (segment_bytes - _bytes_of_no_row(schema)) // row_bytes(schema)
    widest = max((kind.elements for kind in schema.fixed.values() if kind.is_list), default=1)
    return max(0, min(rows, Limits.current.list_elements // widest))


def read_structure(file: pa.Buffer, schema: Schema, rows: int) -> Layout:
    """Check the structure of a segment's file (see the module's promise).

    Args:
        file: the whole file, mapped; nothing of it is kept.
    Raises: CorruptSegmentError: what is wrong.
    """
    _, batch = _open(file, schema)
    if batch.num_rows != rows:
        raise CorruptSegmentError(f"holds {format_count(batch.num_rows, 'row')}, its name says {rows}")
    fixed, variable = [], []
    columns = []
    for number, (name, kind) in enumerate([*schema.fixed.items(), *schema.variable.items()]):
        spans = _spans(file, name, kind, batch.column(number))
        columns.append(spans)
        if isinstance(kind, VariableType):
            variable.append((spans[0][0], spans[1][0]))
            continue
        if kind.is_list and not _are_uniform(file, spans[0][0], rows, kind.elements):
            raise CorruptSegmentError(f"column {name!r} has offsets that are not uniform")
        fixed.append(spans[-1][0])
    stop = footer_start(memoryview(file)) - _END_OF_BATCHES_BYTES
    if not is_arranged(schema, columns, stop):
        raise CorruptSegmentError("has buffers that do not follow one another up to its footer")
    return Layout(rows, tuple(fixed), tuple(variable))


def check_bytes(file: pa.Buffer, schema: Schema) -> None:
    """Compare every column buffer with its checksum; reads the whole file.

    Raises: CorruptSegmentError: the column whose bytes changed.
    """
    reader, batch = _open(file, schema)
    stored = (reader.metadata or {}).get(CHECKSUM_KEY, b"").decode("ascii", "replace").split()
    actual = [
        (name, xxhash.xxh3_64_hexdigest(file.slice(start, size)))
        for number, (name, kind) in enumerate([*schema.fixed.items(), *schema.variable.items()])
        for start, size in _spans(file, name, kind, batch.column(number))
    ]
    if len(stored) != len(actual):
        raise CorruptSegmentError(
            f"footer has {format_count(len(stored), 'checksum')} for {format_count(len(actual), 'buffer')}"
        )
    for expected, (name, found) in zip(stored, actual, strict=True):
        if expected != found:
            raise CorruptSegmentError(
                f"bytes of column {name!r} changed: xxh3 {found}, not {expected[:16]!a}"
            )


def rewrite(file: pa.Buffer, schema: Schema) -> tuple[list[memoryview], bytes]:
    """Write the record batch of a checked file again: the pieces, by reference, and the checksums' text.

    A file that `encode` laid out, with the same Arrow, comes out bit by bit as it is.
    """
    reader, batch = _open(file, schema)
    footer = dict(reader.metadata or {})
    return spread(_write(batch, footer), buffer_alignments(schema)), footer.get(CHECKSUM_KEY, b"")


def open_batch(file: pa.Buffer, schema: Schema) -> pa.RecordBatch:
    """The record batch of a file whose structure was checked: views, which keep `file` alive."""
    return _open(file, schema)[1]


def _write(batch: pa.RecordBatch, footer: dict[bytes, bytes]) -> list[memoryview]:
    """The pieces of a file without gaps."""
    sink = _Pieces()
    with pa.ipc.new_file(sink, batch.schema, metadata=footer) as file:
        file.write_batch(batch)
    return [piece for piece in sink.pieces if piece.nbytes]


def _open(file: pa.Buffer, schema: Schema) -> tuple[pa.RecordBatchFileReader, pa.RecordBatch]:
    if file.size < 2 * len(_MAGIC) or file[:6].to_pybytes() != _MAGIC:
        raise CorruptSegmentError(f"not an Arrow IPC file ({file.size} bytes)")
    try:
        require_plain(memoryview(file))
    except ValueError as error:
        raise CorruptSegmentError(str(error)) from None
    try:
        reader = pa.ipc.open_file(file, options=_AS_IT_IS)
        if not reader.schema.equals(schema.arrow, check_metadata=True):
            raise CorruptSegmentError("has another schema than the cache")
        if reader.num_record_batches != 1:
            raise CorruptSegmentError(f"holds {reader.num_record_batches} record batches, not one")
        batch = reader.get_batch(0)
        batch.validate()  # lengths above all: pyarrow's own len() fails on a negative one
        return reader, batch
    except (pa.ArrowException, OSError) as error:
        raise CorruptSegmentError(f"Arrow cannot read it: {error}") from None


def _buffers(kind: FixedType | VariableType, column: Column) -> list[memoryview]:
    """The buffers of one column that hold data, in Arrow's order."""
    if isinstance(column, VariableColumn):
        return [column.offsets.data.cast("B"), memoryview(column.data).cast("B")]
    values = column.reshape(-1).view(np.uint8).data
    if isinstance(kind, Tensor) and kind.is_list:
        stop = len(column) * kind.elements
        offsets = np.arange(0, stop + 1, kind.elements, dtype=np.int32)
        return [offsets.data.cast("B"), values]
    return [values]


def _rows(column: Column) -> int:
    return len(column.offsets) - 1 if isinstance(column, VariableColumn) else len(column)


def _array(kind: FixedType | VariableType, rows: int, buffers: list[pa.Buffer]) -> pa.Array:
    arrow_type = kind.arrow_type
    if not pa.types.is_list(arrow_type):
        return pa.Array.from_buffers(arrow_type, rows, [None, *buffers], null_count=0)
    values = pa.Array.from_buffers(
        arrow_type.value_type,
        buffers[1].size * 8 // arrow_type.value_type.bit_width,
        [None, buffers[1]],
        null_count=0,
    )
    return pa.Array.from_buffers(arrow_type, rows, [None, buffers[0]], 0, children=[values])


def _spans(file: pa.Buffer, name: str, kind: FixedType | VariableType, array: pa.Array) -> list[Span]:
    """(start, bytes) in the file of each data buffer of a column, as its rows need; checked to lie in it."""
    rows, buffers = len(array), array.buffers()
    is_list = isinstance(kind, Ragged) if isinstance(kind, VariableType) else kind.is_list
    children = array.values if is_list else None
    if children is None:
        validity, present = buffers[:1], buffers[1:]
    else:
        validity, present = buffers[::2], buffers[1::2]
    nulls = array.null_count or (children is not None and children.null_count)
    if nulls or array.offset or any(b is not None for b in validity) or any(b is None for b in present):
        raise CorruptSegmentError(f"column {name!r} has nulls or buffers that no segment has")

    def checked(buffer: pa.Buffer, size: int) -> Span:
        if size == 0:  # Arrow may place an empty buffer anywhere
            return 0, 0
        start = buffer.address - file.address
        if start < 0 or start + size > file.size or buffer.size < size:
            raise CorruptSegmentError(f"column {name!r} has a buffer outside the file or too short")
        if start % 8:
            raise CorruptSegmentError(f"column {name!r} has a buffer that is not aligned")
        return start, size

    spans = [checked(present[0], 4 * (rows + 1))] if len(present) == 2 else []
    if isinstance(kind, VariableType):
        elements = _rising_end(file, spans[0][0], rows, kind, name)
        size = elements * element_bytes(kind)
    else:
        size = rows * kind.row_bytes
        elements = rows * kind.elements
    spans.append(checked(present[-1], size))
    if children is not None and len(children) != elements:
        raise CorruptSegmentError(
            f"column {name!r} has {format_count(len(children), 'element')}, not what its rows need"
        )
    return spans


def _rising_end(file: pa.Buffer, start: int, rows: int, kind: VariableType, name: str) -> int:
    """The last of a variable-length column's offsets, which were checked."""
    offsets = np.frombuffer(file, np.int32, rows + 1, start)
    unit = kind.elements if isinstance(kind, Ragged) else 1
    if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any() or (unit > 1 and (offsets % unit).any()):
        raise CorruptSegmentError(f"column {name!r} has offsets that do not rise")
    return int(offsets[-1])


def _are_uniform(file: pa.Buffer, start: int, rows: int, elements: int) -> bool:
    """True if a column's offsets are 0, elements, 2 * elements, ... Works in pieces: they may be many."""
    offsets = np.frombuffer(file, np.int32, rows + 1, start)
    for first in range(0, rows + 1, _OFFSETS_A_PIECE):
        piece = offsets[first : first + _OFFSETS_A_PIECE]
        expected = np.arange(first * elements, (first + len(piece)) * elements, elements, dtype=np.int64)
        if not (piece == expected).all():
            return False
    return True


def _bytes_of_no_row(schema: Schema) -> int:
    """Header, footer, padding and the last offset of each column; the file of a segment of no rows."""
    columns: dict[str, Column] = {
        name: np.empty((0, *kind.shape), kind.numpy_dtype) for name, kind in schema.fixed.items()
    }
    for name in schema.variable:
        columns[name] = VariableColumn(np.zeros(1, np.int32), bytearray())
    buffers = 2 * len(schema)
    gaps = sum(alignment - 8 for alignment in alignments_of(schema))  # each begins at a multiple of 8
    return encode(schema, columns).nbytes + CACHE_LINE_BYTES * buffers + gaps


FILE_PAGE_BYTES = 4096  # on machines of larger pages, too
CACHE_LINE_BYTES = 64  # and more than any Arrow writer pads a buffer
_WORD_BYTES = 8  # Arrow's own alignment

Span = tuple[int, int]
"""The begin of a buffer in the file, and its bytes."""


def alignments_of(schema: Schema) -> list[int]:
    """Return the alignment in bytes of each column's values, in physical order."""
    return [*map(_alignment, schema.fixed.values())] + [_WORD_BYTES] * len(schema.variable)


def buffer_alignments(schema: Schema) -> list[int]:
    """Return the alignment in bytes of each of Arrow's buffers, validity and offsets included."""
    alignments = []
    kinds = [*schema.fixed.values(), *schema.variable.values()]
    for kind, alignment in zip(kinds, alignments_of(schema), strict=True):
        if isinstance(kind, String | Binary):
            before = 2  # validity, offsets
        elif isinstance(kind, Ragged) or kind.is_list:
            before = 3  # and the validity of what the lists hold
        else:
            before = 1
        alignments += [_WORD_BYTES] * before + [alignment]
    return alignments


def is_arranged(schema: Schema, columns: Sequence[Sequence[Span]], stop: int) -> bool:
    """True if buffers follow one another up to `stop`, with the gaps that alignments need and no others.

    Args:
        columns: the buffers of each column, its values last, in physical order. Empty buffers are ignored.
    """
    end = None
    for spans, alignment in zip(columns, alignments_of(schema), strict=True):
        for number, (start, size) in enumerate(spans):
            unit = alignment if number == len(spans) - 1 else _WORD_BYTES
            if size:
                if start % unit or (end is not None and start != end + -end % unit):
                    return False
                end = start + size + -size % _WORD_BYTES
    return end is None or end == stop


def _alignment(kind: FixedType) -> int:
    width = kind.row_bytes
    return max(CACHE_LINE_BYTES, math.gcd(FILE_PAGE_BYTES, width)) if width > _WORD_BYTES else _WORD_BYTES


_TRAILER_BYTES = 10  # the footer's length, and the magic
_CONTINUATION = 0xFFFFFFFF
_MAX_PADDING_BYTES = 64  # some count what follows a buffer to it
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
            if 0 <= start <= nbytes - size and 0 <= size - offsets_bytes < _MAX_PADDING_BYTES:
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


def labelled(batch: pa.RecordBatch, schema: Schema) -> pa.RecordBatch:
    """The columns of a segment in the schema's own order, tensors as `arrow.fixed_shape_tensor`.

    Numbers stay as they are stored; complex ones are pairs in a trailing axis.
    """
    columns = [_labelled_column(batch.column(name), kind) for name, kind in schema.items()]
    fields = [
        pa.field(name, column.type, nullable=False) for name, column in zip(schema, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _labelled_column(column: pa.Array, kind: FieldType) -> pa.Array:
    if not (isinstance(kind, Tensor) and kind.is_list):
        return column
    pair = (2,) if dtype_of(kind.dtype).kind == "c" else ()
    storage = pa.FixedSizeListArray.from_arrays(column.values, kind.elements)
    tensor_type = pa.fixed_shape_tensor(column.type.value_type, (*kind.shape, *pair))
    return pa.ExtensionArray.from_storage(tensor_type, storage)
