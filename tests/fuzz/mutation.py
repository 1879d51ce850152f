"""Mutation: a sound segment's file to a damaged or hostile one. Pure: bytes and a seed in, bytes out.

A kind of mutation is a function of (victim, number, chance); `number` walks positions one after another
where the kind is exhaustive, `chance` decides the rest. Nothing here uses what is tested but for its
files: where a field lies in a header is found by searching for its value.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

import arrowcache as ac

_INT32 = (0, 1, -1, 2, 7, 8, 64, 2**31 - 1, -(2**31), 2**16, 2**24)
_INT64 = (0, 1, -1, 3, 8, -8, 64, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63), 2**40)
_BYTES = (lambda b: b ^ 0xFF, lambda b: (b + 1) % 256, lambda b: b ^ 1, lambda b: b ^ 0x80, lambda b: 0)


@dataclass(frozen=True)
class Victim:
    """A sound segment's file, and another one of the same cache whose parts may be mixed in."""

    schema: ac.Schema
    data: bytes
    other: bytes

    @cached_property
    def batch(self) -> pa.RecordBatch:
        return pa.ipc.open_file(pa.py_buffer(self.data)).get_batch(0)

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """(start, bytes) of each column buffer that is not empty: of data, not of structure."""
        file = pa.py_buffer(self.data)
        batch = pa.ipc.open_file(file).get_batch(0)
        buffers = [buffer for column in batch.columns for buffer in column.buffers()]
        return sorted((b.address - file.address, b.size) for b in buffers if b is not None and b.size)

    @cached_property
    def body(self) -> range:
        return range(self.spans[0][0], self.spans[-1][0] + self.spans[-1][1])

    @cached_property
    def structure(self) -> list[int]:
        """Every position of header and footer, padding included."""
        inside = {at for start, size in self.spans for at in range(start, start + size)}
        return [at for at in range(len(self.data)) if at not in inside]

    @cached_property
    def fields(self) -> list[int]:
        """Where int64 fields of the headers are that say where buffers lie and how long they are.

        The Buffer structs (offset, length) and FieldNode structs (length, nulls) of the record batch are
        16 bytes each, one after another; the footer's Block has (offset, lengths).
        """
        header = self.data[: self.body.start]
        first = self.spans[0][0]
        places: list[int] = []
        for start, size in self.spans:
            at = header.rfind(struct.pack("<qq", start - first, size))
            places += [at, at + 8] if at >= 0 else []
        rows = struct.pack("<qq", self.batch.num_rows, 0)
        at = header.find(rows)
        while at >= 0:
            places += [at, at + 8]
            at = header.find(rows, at + 8)
        footer = self.data.rfind(struct.pack("<q", len(self.data[first : self.body.stop]) + 7 & ~7))
        places += [footer - 16, footer - 8, footer] if footer > self.body.stop else []
        return sorted({place for place in places if place >= 0})

    @cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """(start, count) of each buffer of int32 offsets."""
        file = pa.py_buffer(self.data)
        return [
            (column.buffers()[1].address - file.address, len(column) + 1)
            for column in pa.ipc.open_file(file).get_batch(0).columns
            if column.type.num_fields or pa.types.is_string(column.type) or pa.types.is_binary(column.type)
        ]

    def alters_values(self, data: bytes) -> bool:
        """Whether any byte of a column differs, or may lie elsewhere; else only structure was touched."""
        if len(data) != len(self.data):
            return True
        return any(data[at : at + size] != self.data[at : at + size] for at, size in self.spans)


Mutate = Callable[[Victim, int, random.Random], bytes]
KINDS: dict[str, Mutate] = {}


def _kind(function: Mutate) -> Mutate:
    KINDS[function.__name__] = function
    return function


def exhaustive(victim: Victim) -> dict[str, int]:
    """How many numbers a kind needs to come to everything it has; for the kinds that walk."""
    return {"one_byte": len(victim.structure), "length": -(-len(victim.data) * 50 // 49) + 1}


def _spread(number: int, count: int) -> int:
    """Each of 0..count-1 once in any `count` numbers; few of them are anywhere, not all at the beginning."""
    step = round(count * 0.618)
    while math.gcd(step, count) > 1:
        step += 1
    return number * step % count


def _set(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


@_kind
def one_byte(victim: Victim, number: int, chance: random.Random) -> bytes:
    """Every byte position of header and footer, one after another, then again in another way."""
    at = victim.structure[_spread(number, len(victim.structure))]
    change = _BYTES[(number + number // len(victim.structure)) % len(_BYTES)]
    return _set(victim.data, at, bytes([change(victim.data[at])]))


@_kind
def length(victim: Victim, number: int, chance: random.Random) -> bytes:
    """Cut at every length, one after another; one in 50 is made longer."""
    data = victim.data
    if number % 50 != 49:
        return data[: _spread(number // 50 * 49 + number % 50, len(data))]
    return data + chance.choice([bytes(chance.randrange(1, 5000)), b"ARROW1", data, data[-200:]])


@_kind
def word(victim: Victim, number: int, chance: random.Random) -> bytes:
    """Huge, negative and small numbers at every aligned place of header and footer."""
    data = victim.data
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        width, values = chance.choice([("<i", _INT32), ("<q", _INT64), ("<h", (0, 4, 8, -1, 32767, 12))])
        size = struct.calcsize(width)
        at = chance.choice(victim.structure) // size * size
        if at + size <= len(data):
            old = struct.unpack_from(width, data, at)[0]
            near = [v for v in (old + 1, old - 1, old + 8, old - 8, 2 * old) if abs(v) < 256**size // 2]
            data = _set(data, at, struct.pack(width, chance.choice([*values, *near])))
    return data


@_kind
def field(victim: Victim, number: int, chance: random.Random) -> bytes:
    """Where buffers lie, how long they are, how many rows and nulls: other numbers, and each other's."""
    data, known = victim.data, [struct.unpack_from("<q", victim.data, at)[0] for at in victim.fields]
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        index = chance.randrange(len(known))
        old = known[index]
        new = chance.choice(
            [chance.choice(_INT64), chance.choice(known), len(data), len(data) - 8, old + 8, old - 8,
             old + 64, old - 64, old + 1, old - 1, 2 * old, old // 2, old + 4]
        )  # fmt: skip
        data = _set(data, victim.fields[index], struct.pack("<q", max(-(2**63), min(new, 2**63 - 1))))
    return data


@_kind
def overlap(victim: Victim, number: int, chance: random.Random) -> bytes:
    """One buffer in the place of another, two exchanged, one moved by a little."""
    places = [at for at in victim.fields if at < victim.body.start]
    pairs = [at for at in places if at + 8 in places]
    one, two = chance.choice(pairs), chance.choice(pairs)
    first, second = victim.data[one : one + 16], victim.data[two : two + 16]
    way = chance.randrange(3)
    if way == 0:
        return _set(victim.data, one, second[:8])
    if way == 1:
        return _set(_set(victim.data, one, second), two, first)
    moved = struct.unpack("<q", first[:8])[0] + chance.choice([-64, -16, -8, -4, 4, 8, 16, 64])
    return _set(victim.data, one, struct.pack("<q", moved))


@_kind
def offset(victim: Victim, number: int, chance: random.Random) -> bytes:
    """Offsets of lists and texts that fall, are negative, or reach beyond; also just other ones."""
    data = victim.data
    for _ in range(chance.choice([1, 1, 2, 5])):
        start, count = chance.choice(victim.offsets)
        at = start + 4 * chance.randrange(count)
        old = struct.unpack_from("<i", data, at)[0]
        new = chance.choice([*_INT32, old + 1, old - 1, old + 2, -old, len(data), 2 * old, 10**6])
        data = _set(data, at, struct.pack("<i", max(-(2**31), min(new, 2**31 - 1))))
    if chance.random() < 0.2:  # all of them
        start, count = chance.choice(victim.offsets)
        new_ones = [chance.choice([0, chance.randrange(-9, 99)]) for _ in range(count)]
        data = _set(data, start, struct.pack(f"<{count}i", *chance.choice([new_ones, sorted(new_ones)])))
    return data


@_kind
def values(victim: Victim, number: int, chance: random.Random) -> bytes:
    """Bytes of the columns, text that is no UTF-8 among them."""
    data = bytearray(victim.data)
    for _ in range(chance.choice([1, 2, 8, 64])):
        start, size = chance.choice(victim.spans)
        data[start + chance.randrange(size)] = chance.choice([0xFF, 0xC0, 0x80, 0, chance.randrange(256)])
    return bytes(data)


@_kind
def noise(victim: Victim, number: int, chance: random.Random) -> bytes:
    """Stretches of zeros or noise, inserted, removed, doubled, or of another file."""
    data = bytearray(victim.data)
    for _ in range(chance.choice([1, 1, 2, 6])):
        start = chance.randrange(len(data) + 1)
        size = min(chance.choice([1, 4, 8, 64, 512, 4096]), len(data) - start)
        stretch = chance.choice([bytes(size), chance.randbytes(size), victim.other[start : start + size]])
        way = chance.randrange(5)
        if way == 0:
            del data[start : start + size]
        elif way == 1:
            data[start:start] = stretch
        elif way == 2:
            data[start:start] = data[start : start + size]
        else:
            data[start : start + len(stretch)] = stretch
    return bytes(data)


@_kind
def footers(victim: Victim, number: int, chance: random.Random) -> bytes:
    """The footer of another file, the header of another file, both, with its length or the right one."""
    mine, theirs = victim.data, chance.choice([victim.other, *foreign_files(victim, chance)])
    if len(theirs) < 20:
        return theirs

    def split(data: bytes) -> tuple[bytes, bytes]:
        size = struct.unpack_from("<i", data, len(data) - 10)[0] + 10
        return data[:-size], data[-size:]

    (body, footer), (their_body, their_footer) = split(mine), split(theirs)
    start = victim.body.start
    return chance.choice(
        [
            body + their_footer,
            their_body + footer,
            their_body[:start] + body[start:] + footer,
            body + footer + their_footer,
            body[:start] + their_body[start:] + footer,
            body + their_footer[:-10] + footer[-10:],
        ]
    )


@_kind
def foreign(victim: Victim, number: int, chance: random.Random) -> bytes:
    """Files of another writer: another schema, compressed, nulls, several record batches, nested deeply."""
    files = list(foreign_files(victim, chance))
    data = files[number % len(files)]
    if chance.random() < 0.5 and data:
        at = chance.randrange(len(data))
        data = _set(data, at, bytes([chance.choice(_BYTES)(data[at])]))
    return data


def foreign_files(victim: Victim, chance: random.Random) -> Iterator[bytes]:
    batch, schema = victim.batch, victim.batch.schema
    metadata = pa.ipc.open_file(pa.py_buffer(victim.data)).metadata
    for codec in ("lz4", "zstd"):
        yield _file([batch], schema, metadata, compression=codec)
    yield _file([], schema, metadata)
    yield _file([batch, batch], schema, metadata)
    yield _file([batch.slice(0, batch.num_rows // 2), batch.slice(batch.num_rows // 2)], schema, metadata)
    yield _file([batch.slice(1), batch.slice(0, 1)], schema, metadata)
    yield _file([batch], schema, None)
    yield _file([batch], schema, {**(metadata or {}), b"more": b"x" * 5000})
    yield _file([batch.slice(0, 0)], schema, metadata)
    yield _stream(batch)
    bare = pa.schema([f.remove_metadata() for f in schema])
    yield _file([_with(batch, bare)], bare, metadata)
    nullable = pa.schema([f.with_nullable(True) for f in schema])
    yield _file([_with(batch, nullable)], nullable, metadata)
    order = chance.sample(range(len(schema)), len(schema))
    turned = pa.schema([schema[i] for i in order])
    yield _file(
        [pa.RecordBatch.from_arrays([batch.column(i) for i in order], schema=turned)], turned, metadata
    )
    nulls = [
        pa.array([None] * batch.num_rows, f.type) if chance.random() < 0.5 else batch.column(i)
        for i, f in enumerate(schema)
    ]
    yield _file([pa.RecordBatch.from_arrays(nulls, schema=schema)], schema, metadata)
    text = pa.array([str(i % 2) for i in range(batch.num_rows)]).dictionary_encode()
    worded = pa.schema([*schema, pa.field("d", text.type)])
    yield _file([pa.RecordBatch.from_arrays([*batch.columns, text], schema=worded)], worded, metadata)
    deep: pa.DataType = pa.int8()
    for _ in range(chance.choice([5, 60, 63, 120, 400])):
        deep = chance.choice([pa.list_, lambda t: pa.struct([("a", t)]), lambda t: pa.map_(pa.int8(), t)])(
            deep
        )
    nested = pa.schema([pa.field("x", deep)])
    try:
        yield _file(
            [pa.RecordBatch.from_arrays([pa.array([None] * batch.num_rows, deep)], schema=nested)],
            nested,
            None,
        )
    except pa.ArrowException:  # deeper than it writes
        pass
    views = pa.schema([pa.field("v", pa.string_view())])
    yield _file(
        [pa.RecordBatch.from_arrays([pa.array(["a" * 40] * batch.num_rows, pa.string_view())], schema=views)],
        views,
        None,
    )


def _with(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def _file(
    batches: list[pa.RecordBatch], schema: pa.Schema, metadata: object, compression: str | None = None
) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(sink, schema, options=options, metadata=metadata) as file:
        for batch in batches:
            file.write_batch(batch)
    return bytes(sink.getvalue())


def _stream(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())
