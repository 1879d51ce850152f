"""NoteLines: notes on rows as lines, and as the bytes of a file. Pure.

A line says one thing about some rows of one segment: that they are excluded or not, that they have a tag or
not, or a value of a name for each. Its rows are a bitmap, or their positions where these take less: at most
about a bit for each row of a segment. A value takes 4 bytes where all of its line are float32's, else 8.
In `Said` each row is by itself; there, of two things on one matter the later one counts.

A file is an Arrow IPC file of one row, each of whose columns is a list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import compress, pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from arrowcache.errors import CacheFormatError
from arrowcache.limits import Limits
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.row_ids import find

INCLUDED, EXCLUDED, UNTAGGED, TAGGED, VALUE = range(5)  # what a line says; a newer format may say more
_WHATS = 5
_FIELDS = {
    "seq": "<i8",
    "what": "i1",
    "text": "<i4",
    "rows": "<u4",
    "bit_bytes": "<u4",  # of the bitmap; 0: rows are positions
    "width": "i1",  # bytes of a value; 0: it has none
}
_ARRAYS = {"positions": "<u4", "bits": "u1", "singles": "<f4", "doubles": "<f8"}
_LINE = np.dtype([*_FIELDS.items()])
_SCHEMA = pa.schema(
    [(name, pa.large_list(pa.from_numpy_dtype(np.dtype(kind)))) for name, kind in (_FIELDS | _ARRAYS).items()]
)
_TEXTS = b"texts"  # of the schema's metadata
_LEAST_SAVED = 256  # bytes, by a bitmap: positions are faster
_DAMAGED = (pa.ArrowInvalid, ArithmeticError, LookupError, TypeError, ValueError)


class Rows(NamedTuple):
    """Rows of some segments, numbered from 0 on, oldest segment first.

    Args:
        seqs: (n,) int64, ascending.
        starts: (n + 1,) int64: the first row of each, and the number of all.
    """

    seqs: NDArray[np.int64]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, segments: Sequence[SegmentInfo]) -> Rows:
        """All rows of segments, oldest first."""
        seqs, rows = ([getattr(each, name) for each in segments] for name in ("seq", "rows"))
        return cls.of_counts(np.array(seqs, np.int64), np.array(rows, np.int64))

    @classmethod
    def of_counts(cls, seqs: NDArray[np.int64], rows: NDArray[np.int64]) -> Rows:
        """All rows of segments of these numbers, and so many rows."""
        return cls(seqs, np.append(0, np.cumsum(rows)))

    @property
    def size(self) -> int:
        return int(self.starts[-1])

    def numbers(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The numbers of those of rows (n, 2) that are here, and a mask (n,) of these."""
        indices, is_there = find(ids, self.seqs, np.diff(self.starts))
        return self.starts[indices[is_there]] + ids[is_there, 1], is_there


class Said(NamedTuple):
    """Things said, in order, each of one row.

    Args:
        numbers: (n,) int64, of the rows.
        codes: (n,) int32: what is said, and the place of its text.
        values: (n,) float64; (0,) of what has no values.
    """

    numbers: NDArray[np.int64]
    codes: NDArray[np.int32]
    values: NDArray[np.float64]

    @classmethod
    def of(cls, numbers: NDArray[np.int64], what: int, text: ArrayLike = 0, values: ArrayLike = ()) -> Said:
        """One thing, of rows (n,)."""
        codes = np.asarray(np.multiply(text, _WHATS) + what, np.int32)
        return cls(numbers, np.broadcast_to(codes, len(numbers)), np.asarray(values, np.float64))

    def says(self, what: int) -> NDArray[np.bool_]:
        """A mask, (n,), of rows of which this is said."""
        found: NDArray[np.bool_] = self.codes % _WHATS == what
        return found

    def take(self, at: slice | NDArray[np.int64]) -> Said:
        """Some of them."""
        return Said(self.numbers[at], self.codes[at], self.values[at] if len(self.values) else self.values)

    @property
    def texts(self) -> NDArray[np.int32]:
        """The places of the texts: (n,)."""
        return self.codes // _WHATS


class NoteLines(NamedTuple):
    """Lines, oldest segment first. Of one row there is one thing on each matter.

    Args:
        lines: (n,) records: `seq`, the segment; `what` is said; `text`, the place among `texts` of the tag,
            the reason, or the name of the values; the number of its `rows`; and how these are kept.
        texts: each once.
        arrays: what the lines have, one after the other: rows as positions, uint32, or as bits, uint8, the
            first row's the highest; values, by row, as float32, or as float64.
    """

    lines: NDArray[np.void]
    texts: tuple[str, ...]
    arrays: tuple[NDArray[Any], ...]

    @classmethod
    def of(cls, rows: Rows, texts: Sequence[str], said: Said) -> NoteLines:
        """Lines that say the last thing said on each matter of each row."""
        if (said.numbers[1:] < said.numbers[:-1]).any():
            said = said.take(_order(said, rows.size))
        ends = said.numbers[Limits.current.noted_rows :: Limits.current.noted_rows]
        starts = rows.starts[np.unique(rows.starts.searchsorted(ends))]
        cuts = [0, *said.numbers.searchsorted(starts).tolist(), len(said.numbers)]
        return cls._together([cls._of(rows, texts, said.take(slice(*cut))) for cut in pairwise(cuts)])

    @classmethod
    def _of(cls, rows: Rows, texts: Sequence[str], said: Said) -> NoteLines:
        matters = np.where(said.codes % _WHATS < UNTAGGED, 0, 1 + said.texts).astype(np.int64)
        matters = matters * rows.size + said.numbers
        last = matters.argsort(kind="stable")
        last = last[np.roll(_is_first(matters[last]), -1)]
        segments = rows.starts.searchsorted(said.numbers[last], side="right") - 1
        sayings = segments * (1 + int(said.codes.max(initial=0))) + said.codes[last]
        order = sayings.argsort(kind="stable")
        last, segments = last[order], segments[order]
        firsts = np.flatnonzero(_is_first(sayings[order]))
        counts = np.diff(firsts, append=len(last))
        row = said.numbers[last] - rows.starts[segments]

        lines = np.zeros(len(firsts), _LINE)
        lines["seq"], lines["rows"] = rows.seqs[segments[firsts]], counts
        lines["text"], lines["what"] = np.divmod(said.codes[last[firsts]], _WHATS)
        bit_bytes = row[firsts + counts - 1] // 8 + 1
        lines["bit_bytes"] = bit_bytes = np.where(bit_bytes + _LEAST_SAVED < 4 * counts, bit_bytes, 0)
        line = np.repeat(np.arange(len(lines)), counts)
        is_bit = (bit_bytes > 0)[line]
        bits = np.zeros(8 * int(bit_bytes.sum()), np.bool_)
        bits[8 * _before(bit_bytes)[line[is_bit]] + row[is_bit]] = True
        values = said.values[last] if len(said.values) else said.values
        with np.errstate(over="ignore"):
            singles = values.astype(np.float32)
        if len(values):
            is_less = (singles != values) & ~np.isnan(values)
            lines["width"] = np.where(np.logical_or.reduceat(is_less, firsts), 8, 4)
        is_single = (lines["width"] == 4)[line][: len(values)]
        positions = row[~is_bit].astype(np.uint32)
        arrays = positions, np.packbits(bits), singles[is_single], values[~is_single]
        return cls(lines, tuple(texts), arrays)

    @classmethod
    def unpack(cls, data: bytes, path: str) -> NoteLines:
        """Read a file. Raises: CacheFormatError: another release wrote it, or something else."""
        try:
            with pa.ipc.open_file(data) as file:
                batch = file.get_batch(0)
            texts = tuple(json.loads(batch.schema.metadata[_TEXTS]))
            lists = [column.values for column in batch.columns]
            kinds = (_FIELDS | _ARRAYS).values()
            arrays = [
                np.frombuffer(each.buffers()[1], kind, len(each)) if len(each) else np.empty(0, kind)
                for each, kind in zip(lists, kinds, strict=True)
            ]
            lines = np.empty(len(arrays[0]), _LINE)
            for name, array in zip(_FIELDS, arrays, strict=False):
                lines[name] = array
            found = cls(lines, texts, tuple(arrays[len(_FIELDS) :]))
            is_known = batch.schema.equals(_SCHEMA) and found._is_sound()
        except _DAMAGED:
            is_known = False
        if not is_known:
            raise CacheFormatError(
                f"{path} has notes that this arrowcache does not know: use the release that wrote it"
            )
        return found

    def _is_sound(self) -> bool:
        """True if its parts fit together, so that nothing below fails."""
        lines, (_, bits, *values) = self.lines, self.arrays
        in_bits = int(lines["rows"][lines["bit_bytes"] > 0].sum())
        return (
            bool((lines["what"] >= 0).all() and (lines["what"] < _WHATS).all())
            and bool((lines["text"] >= 0).all() and (lines["text"] < len(self.texts)).all())
            and bool((np.diff(lines["seq"]) >= 0).all() and (np.isin(lines["width"], (0, 4, 8))).all())
            and sum(map(len, values)) in (0, int(lines["rows"].sum()))
            and all(len(array) == int(sizes.sum()) for array, sizes in self._arrays())
            and int.from_bytes(bits.tobytes(), "big").bit_count() == in_bits
        )

    def pack(self) -> bytes:
        """The bytes of a file."""
        schema = _SCHEMA.with_metadata({_TEXTS: json.dumps(self.texts)})
        return bytes(arrow_file(schema, [*(self.lines[name] for name in _FIELDS), *self.arrays]))

    def joined(self, later: NoteLines, rows: Rows) -> NoteLines:
        """These lines, and then others: what still counts of rows that are there."""
        texts = tuple(dict.fromkeys((*self.texts, *later.texts)))
        both = [each._recoded(texts) for each in (self, later)]
        parts = []
        for piece in _pieces(*both):
            said = zip(*(notes._said(rows) for notes in piece), strict=True)
            parts.append(NoteLines._of(rows, texts, Said(*map(np.concatenate, said))))
        joined = NoteLines._together(parts)
        is_used = np.bincount(joined.lines["text"], minlength=len(texts)) > 0
        return joined._recoded(tuple(compress(texts, is_used)))

    @classmethod
    def _together(cls, parts: Sequence[NoteLines]) -> NoteLines:
        """Lines on some segments, then those on later ones, with the same texts."""
        arrays = zip(*(each.arrays for each in parts), strict=True)
        lines = np.concatenate([each.lines for each in parts])
        return cls(lines, parts[0].texts, tuple(map(np.concatenate, arrays)))

    @property
    def newest(self) -> int:
        """The newest segment that it has a note on."""
        return int(self.lines["seq"].max(initial=0))

    def since(self, seq: int) -> NoteLines:
        """Its lines on a segment and later ones."""
        _, later = self._split(np.array([seq]))
        return later

    def of_rows(self, rows: Rows, *whats: int, text: str | None = None) -> Iterator[Said]:
        """Read what its lines say of rows that are there, some at a time.

        Args:
            whats: what they say; with any text, or this one.
        """
        which = np.isin(self.lines["what"], whats)
        if text is not None:
            which &= self.lines["text"] == (self.texts.index(text) if text in self.texts else -1)
        found = self
        if not which.all():
            arrays = tuple(array[np.repeat(which, sizes)] for array, sizes in self._arrays())
            found = NoteLines(self.lines[which], self.texts, arrays)
        return (part._said(rows) for (part,) in _pieces(found))

    def texts_of(self, *whats: int) -> set[str]:
        """The texts of the lines that say one of these things."""
        codes = self.lines["text"][np.isin(self.lines["what"], whats)]
        return {self.texts[code] for code in np.unique(codes).tolist()}

    def _said(self, rows: Rows) -> Said:
        lines, (positions, bits, singles, doubles) = self.lines, self.arrays
        line = np.repeat(np.arange(len(lines)), lines["rows"])
        row = np.empty(len(line), np.int64)
        is_bit = (lines["bit_bytes"] > 0)[line]
        row[~is_bit] = positions
        row[is_bit] = np.flatnonzero(np.unpackbits(bits)) - 8 * _before(lines["bit_bytes"])[line[is_bit]]
        values = np.empty(len(singles) + len(doubles))
        is_single = (lines["width"] == 4)[line][: len(values)]
        values[is_single], values[~is_single] = singles, doubles
        segments = rows.seqs.searchsorted(lines["seq"])
        sizes = np.append(np.diff(rows.starts), 0)[segments]
        sizes[np.append(rows.seqs, -1)[segments] != lines["seq"]] = 0
        is_there = row < sizes[line]
        numbers = rows.starts[segments][line] + row
        codes = (lines["text"] * _WHATS + lines["what"])[line]
        return Said(numbers[is_there], codes[is_there], values[is_there[: len(values)]])

    def _arrays(self) -> list[tuple[NDArray[Any], NDArray[np.int64]]]:
        """The arrays, and how many numbers of each a line has: (n,)."""
        rows, is_bit, width = self.lines["rows"], self.lines["bit_bytes"] > 0, self.lines["width"]
        sizes = np.where(is_bit, 0, rows), self.lines["bit_bytes"], rows * (width == 4), rows * (width == 8)
        return [(array, size.astype(np.int64)) for array, size in zip(self.arrays, sizes, strict=True)]

    def _split(self, seqs: NDArray[np.int64]) -> Iterator[NoteLines]:
        """Its lines up to segments (n,), in n + 1 parts."""
        at = self.lines["seq"].searchsorted(seqs)
        arrays = (np.split(array, np.append(0, sizes.cumsum())[at]) for array, sizes in self._arrays())
        parts = zip(np.split(self.lines, at), *arrays, strict=True)
        return (NoteLines(lines, self.texts, tuple(arrays)) for lines, *arrays in parts)

    def _recoded(self, texts: tuple[str, ...]) -> NoteLines:
        """The same lines with other texts, among which are those that they have."""
        places = {text: place for place, text in enumerate(texts)}
        lines = self.lines.copy()
        lines["text"] = np.array([places.get(text, -1) for text in self.texts], np.int32)[lines["text"]]
        return self._replace(lines=lines, texts=texts)


def _pieces(*notes: NoteLines) -> Iterator[tuple[NoteLines, ...]]:
    """The lines of each, a part of the segments after the other."""
    seqs, rows = (np.concatenate([each.lines[name] for each in notes]) for name in ("seq", "rows"))
    order = seqs.argsort(kind="stable")
    piece = rows[order].cumsum() // Limits.current.noted_rows
    starts = np.unique(seqs[order][1:][np.diff(piece) > 0])
    return zip(*(each._split(starts) for each in notes), strict=True)


def _order(said: Said, size: int) -> NDArray[np.int64]:
    """The stable order of things by row: (n,). Of many alike it is of each row's last, and takes no sort."""
    numbers, codes = said.numbers, said.codes
    if len(numbers) < size // 16 or (codes != codes[0]).any():
        return numbers.argsort(kind="stable")
    last = np.full(size, -1)
    last[numbers] = np.arange(len(numbers))
    return last[last >= 0]


def _before(sizes: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Of parts of these sizes, where each begins: (n,)."""
    return np.append(0, sizes.cumsum(dtype=np.int64))[:-1]


def _is_first(keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask, (n,), of the first of each of sorted keys, (n,)."""
    return np.append(True, keys[1:] != keys[:-1])[: len(keys)]


def arrow_file(schema: pa.Schema, columns: Sequence[NDArray[Any]]) -> pa.Buffer:
    """An Arrow IPC file of one record batch of numbers, or of one row that has lists of numbers.

    pyarrow's own way from NumPy would load pandas.
    """
    arrays = [_array(kind, column) for kind, column in zip(schema.types, columns, strict=True)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return sink.getvalue()


def _array(kind: pa.DataType, numbers: NDArray[Any]) -> pa.Array:
    if pa.types.is_large_list(kind):
        offsets = pa.py_buffer(np.array([0, len(numbers)]))
        return pa.Array.from_buffers(kind, 1, [None, offsets], children=[_array(kind.value_type, numbers)])
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))])


NO_LINES = NoteLines(np.empty(0, _LINE), (), tuple(np.empty(0, kind) for kind in _ARRAYS.values()))
