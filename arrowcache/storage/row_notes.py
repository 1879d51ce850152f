"""RowNotes: notes on rows as values: statements, lines, and the bytes of a note file. Pure.

A row has marks (it is excluded, it has tags) and values by name, such as a loss. `RowStatements` have one
statement for each row. `NoteLines` have the same statements grouped by segment: a line makes one statement
about some rows of one segment. The rows are a bitmap, or positions where these take fewer bytes: about a bit
for each row of a segment at most. A value takes 4 bytes where float32 holds all values of its line, else 8.
`LatestValues` keeps the newest value of each row from one epoch to the next.

A rule excludes the rows for which an expression is true, those to come, too. It is a line of its own, of no
row, in a file of its own.

Guarantees: of two statements about one row and one topic the later one counts. A topic is the exclusion, one
tag, or one name of values. `NoteLines.unpack` refuses bytes that do not fit together.
Must never: read or write a file; `notes_log.py` does.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, DTypeLike, NDArray

from arrowcache.arrow.expression import unpacked
from arrowcache.errors import CacheFormatError
from arrowcache.limits import Limits
from arrowcache.storage.layout import MAX_SEQ, NoteFile
from arrowcache.storage.row_ids import NumberedRows, is_row_id
from arrowcache.units import require_text

if TYPE_CHECKING:
    from pyarrow.compute import Expression

INCLUDED, EXCLUDED, UNTAGGED, TAGGED, VALUE, RULE = range(6)  # predicates; a newer format may have more
_PREDICATES = 6
RESERVED_TAGS = ("included", "all")  # `Loader(rows=)` means something else by them
_FIELDS = {
    "seq": "<i8",
    "what": "i1",  # the predicate
    "text": "<i4",
    "rows": "<u4",
    "bit_bytes": "<u4",  # of the bitmap; 0: rows are positions
    "width": "i1",  # bytes of a value; 0: the line has none
}
_ARRAYS = {"positions": "<u4", "bits": "u1", "singles": "<f4", "doubles": "<f8"}
_LINE = np.dtype([*_FIELDS.items()])
_SCHEMA = pa.schema(
    [(name, pa.large_list(pa.from_numpy_dtype(np.dtype(kind)))) for name, kind in (_FIELDS | _ARRAYS).items()]
)
_TEXTS = b"texts"  # of the schema's metadata
_MIN_SAVED = 256  # bytes that a bitmap must save: positions are faster
_DAMAGED = (pa.ArrowInvalid, ArithmeticError, LookupError, TypeError, ValueError)


class RowStatements(NamedTuple):
    """Statements in the order in which they were made, each about one row.

    Args:
        rows: (n,) int64: the number of each row, as of `NumberedRows`.
        codes: (n,) int32: the predicate, and the place of its text.
        values: (n,) float64; (0,) of a predicate without values.
    """

    rows: NDArray[np.int64]
    codes: NDArray[np.int32]
    values: NDArray[np.float64]

    @classmethod
    def of(
        cls, rows: NDArray[np.int64], predicate: int, text: ArrayLike = 0, values: ArrayLike = ()
    ) -> RowStatements:
        """The same predicate for all rows (n,)."""
        codes = np.asarray(np.multiply(text, _PREDICATES) + predicate, np.int32)
        return cls(rows, np.broadcast_to(codes, len(rows)), np.asarray(values, np.float64))

    @property
    def predicates(self) -> NDArray[np.int32]:
        """(n,)."""
        return self.codes % _PREDICATES

    @property
    def texts(self) -> NDArray[np.int32]:
        """The places of the texts: (n,)."""
        return self.codes // _PREDICATES

    def take(self, at: slice | NDArray[np.int64]) -> RowStatements:
        """Some of them."""
        values = self.values[at] if len(self.values) else self.values
        return RowStatements(self.rows[at], self.codes[at], values)


class Rule(NamedTuple):
    """A standing exclusion.

    Args:
        content: the expression, as of `arrow.expression.packed`.
        annotations: the names that it reads which are no column's.
    """

    content: bytes
    reason: str = ""
    annotations: tuple[str, ...] = ()

    @property
    def where(self) -> Expression:
        return unpacked(self.content)

    def lines(self) -> NoteLines:
        """The lines of its file."""
        text = json.dumps([base64.b64encode(self.content).decode(), self.reason, self.annotations])
        line = np.zeros(1, _LINE)
        line["seq"], line["what"] = MAX_SEQ, RULE
        return NO_LINES._replace(lines=line, texts=(text,))

    @classmethod
    def parse(cls, text: str) -> Rule:
        """The rule of a text. Raises: one of `_DAMAGED`: it is no rule's."""
        content, reason, annotations = json.loads(text)
        return cls(base64.b64decode(content, validate=True), str(reason), tuple(map(str, annotations)))


class NoteLines(NamedTuple):
    """Lines, oldest segment first. There is one statement about each row and topic.

    Args:
        lines: (n,) records: `seq` of the segment; `what`, the predicate; `text`, the place among `texts` of
            the tag, of the reason, or of the name of the values; `rows`, how many; and how these are kept.
        texts: each once.
        arrays: the content of all lines, one after the other: rows as positions, uint32, or as bits, uint8,
            the first row's the highest; a value for each row, as float32, or as float64.
    """

    lines: NDArray[np.void]
    texts: tuple[str, ...]
    arrays: tuple[NDArray[Any], ...]

    @classmethod
    def of(cls, rows: NumberedRows, texts: Sequence[str], statements: RowStatements) -> NoteLines:
        """Lines with the last statement about each row and topic."""
        if (statements.rows[1:] < statements.rows[:-1]).any():
            statements = statements.take(_order(statements, rows.size))
        ends = statements.rows[Limits.current.noted_rows :: Limits.current.noted_rows]
        starts = rows.starts[np.unique(rows.starts.searchsorted(ends))]
        cuts = [0, *statements.rows.searchsorted(starts).tolist(), len(statements.rows)]
        parts = [cls._of(rows, texts, statements.take(slice(*cut))) for cut in pairwise(cuts)]
        return cls._concatenated(parts)

    @classmethod
    def _of(cls, rows: NumberedRows, texts: Sequence[str], statements: RowStatements) -> NoteLines:
        topics = np.where(statements.predicates < UNTAGGED, 0, 1 + statements.texts).astype(np.int64)
        topics = topics * rows.size + statements.rows
        last = topics.argsort(kind="stable")
        last = last[np.roll(_is_first(topics[last]), -1)]
        segments = rows.starts.searchsorted(statements.rows[last], side="right") - 1
        keys = segments * (1 + int(statements.codes.max(initial=0))) + statements.codes[last]
        order = keys.argsort(kind="stable")
        last, segments = last[order], segments[order]
        firsts = np.flatnonzero(_is_first(keys[order]))
        counts = np.diff(firsts, append=len(last))
        row = statements.rows[last] - rows.starts[segments]

        lines = np.zeros(len(firsts), _LINE)
        lines["seq"], lines["rows"] = rows.seqs[segments[firsts]], counts
        lines["text"], lines["what"] = np.divmod(statements.codes[last[firsts]], _PREDICATES)
        bit_bytes = row[firsts + counts - 1] // 8 + 1
        lines["bit_bytes"] = bit_bytes = np.where(bit_bytes + _MIN_SAVED < 4 * counts, bit_bytes, 0)
        line = np.repeat(np.arange(len(lines)), counts)
        is_bit = (bit_bytes > 0)[line]
        bits = np.zeros(8 * int(bit_bytes.sum()), np.bool_)
        bits[8 * _before(bit_bytes)[line[is_bit]] + row[is_bit]] = True
        values = statements.values[last] if len(statements.values) else statements.values
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
        """Read the bytes of a file. Raises: CacheFormatError: another release wrote it, or something else."""
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
            unpacked = cls(lines, texts, tuple(arrays[len(_FIELDS) :]))
            is_known = batch.schema.equals(_SCHEMA) and unpacked._is_sound()
            is_known = is_known and all(rule.where is not None for rule in unpacked.rules)  # or it raises
        except _DAMAGED:
            is_known = False
        if not is_known:
            raise CacheFormatError(
                f"{path} has notes that this arrowcache does not know: use the release that wrote it"
            )
        return unpacked

    def _is_sound(self) -> bool:
        """True if its parts fit together, so that nothing below fails."""
        lines, (_, bits, *values) = self.lines, self.arrays
        in_bits = int(lines["rows"][lines["bit_bytes"] > 0].sum())
        return (
            bool((lines["what"] >= 0).all() and (lines["what"] < _PREDICATES).all())
            and bool((lines["text"] >= 0).all() and (lines["text"] < len(self.texts)).all())
            and bool((np.diff(lines["seq"]) >= 0).all() and (np.isin(lines["width"], (0, 4, 8))).all())
            and sum(map(len, values)) in (0, int(lines["rows"].sum()))
            and all(len(array) == int(sizes.sum()) for array, sizes in self._sized_arrays())
            and int.from_bytes(bits.tobytes(), "big").bit_count() == in_bits
        )

    def pack(self) -> bytes:
        """The bytes of a file: an Arrow IPC file of one row, each of whose columns is a list."""
        schema = _SCHEMA.with_metadata({_TEXTS: json.dumps(self.texts)})
        return bytes(arrow_file(schema, [*(self.lines[name] for name in _FIELDS), *self.arrays]))

    def merged(self, later: NoteLines, rows: NumberedRows) -> NoteLines:
        """Merge these lines with later ones: the statements that still count about rows that are there."""
        texts = tuple(dict.fromkeys((*self.texts, *later.texts)))
        both = [each._with_texts(texts) for each in (self, later)]
        parts = []
        for piece in _pieces(*both):
            arrays = zip(*(lines._statements(rows) for lines in piece), strict=True)
            parts.append(NoteLines._of(rows, texts, RowStatements(*map(np.concatenate, arrays))))
        merged = NoteLines._concatenated(parts)
        is_used = np.bincount(merged.lines["text"], minlength=len(texts)) > 0
        return merged._with_texts(tuple(compress(texts, is_used)))

    @classmethod
    def _concatenated(cls, parts: Sequence[NoteLines]) -> NoteLines:
        """Lines of parts with the same texts, each on later segments than the one before."""
        arrays = zip(*(each.arrays for each in parts), strict=True)
        lines = np.concatenate([each.lines for each in parts])
        return cls(lines, parts[0].texts, tuple(map(np.concatenate, arrays)))

    @property
    def newest(self) -> int:
        """The newest segment that it has a note on."""
        return int(self.lines["seq"].max(initial=0))

    def since(self, seq: int) -> NoteLines:
        """The lines on a segment and on later ones."""
        _, later = self._split(np.array([seq]))
        return later

    def statements(
        self, rows: NumberedRows, *predicates: int, text: str | None = None
    ) -> Iterator[RowStatements]:
        """Yield the statements with one of these predicates about rows that are there, some at a time.

        Args:
            text: only those with this text.
        """
        chosen = np.isin(self.lines["what"], predicates)
        if text is not None:
            chosen &= self.lines["text"] == (self.texts.index(text) if text in self.texts else -1)
        lines = self
        if not chosen.all():
            arrays = tuple(array[np.repeat(chosen, sizes)] for array, sizes in self._sized_arrays())
            lines = NoteLines(self.lines[chosen], self.texts, arrays)
        return (part._statements(rows) for (part,) in _pieces(lines))

    def texts_of(self, *predicates: int) -> set[str]:
        """The texts of the lines with one of these predicates."""
        codes = self.lines["text"][np.isin(self.lines["what"], predicates)]
        return {self.texts[code] for code in np.unique(codes).tolist()}

    @property
    def rules(self) -> list[Rule]:
        return [Rule.parse(text) for text in self.texts_of(RULE)]

    def _statements(self, rows: NumberedRows) -> RowStatements:
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
        row_numbers = rows.starts[segments][line] + row
        codes = (lines["text"] * _PREDICATES + lines["what"])[line]
        return RowStatements(row_numbers[is_there], codes[is_there], values[is_there[: len(values)]])

    def _sized_arrays(self) -> list[tuple[NDArray[Any], NDArray[np.int64]]]:
        """The arrays, and how many elements of each a line has: (n,)."""
        rows, is_bit, width = self.lines["rows"], self.lines["bit_bytes"] > 0, self.lines["width"]
        sizes = np.where(is_bit, 0, rows), self.lines["bit_bytes"], rows * (width == 4), rows * (width == 8)
        return [(array, size.astype(np.int64)) for array, size in zip(self.arrays, sizes, strict=True)]

    def _split(self, seqs: NDArray[np.int64]) -> Iterator[NoteLines]:
        """The lines before each of the segments (n,) and behind the last, in n + 1 parts."""
        at = self.lines["seq"].searchsorted(seqs)
        arrays = (np.split(array, np.append(0, sizes.cumsum())[at]) for array, sizes in self._sized_arrays())
        parts = zip(np.split(self.lines, at), *arrays, strict=True)
        return (NoteLines(lines, self.texts, tuple(arrays)) for lines, *arrays in parts)

    def _with_texts(self, texts: tuple[str, ...]) -> NoteLines:
        """The same lines with other texts, which include those that the lines have."""
        places = {text: place for place, text in enumerate(texts)}
        lines = self.lines.copy()
        lines["text"] = np.array([places.get(text, -1) for text in self.texts], np.int32)[lines["text"]]
        return self._replace(lines=lines, texts=texts)


NO_LINES = NoteLines(np.empty(0, _LINE), (), tuple(np.empty(0, kind) for kind in _ARRAYS.values()))


class LatestValues:
    """The latest value of one name of each row, kept from one call to the next. One thread at a time asks.

    Values of segments that stay are kept, and only newer files are read for them. Only for segments that
    come all files are read.
    """

    def __init__(self, name: str, dtype: DTypeLike = np.float64) -> None:
        self._name, self._dtype = name, np.dtype(dtype)
        #: The rows of the last call, their values, and the files that these are of.
        self._known: tuple[NumberedRows, NDArray[np.floating[Any]], frozenset[NoteFile]] = (
            NumberedRows.of([]),
            np.empty(0, self._dtype),
            frozenset(),
        )
        #: Rows (n,) that the last call gave other values than the one before it. None: any may have.
        self.changed: list[NDArray[np.int64]] | None = None

    def of(self, rows: NumberedRows, files: Mapping[NoteFile, NoteLines]) -> NDArray[np.floating[Any]]:
        """The value of each row, (rows,), NaN for none. The next call writes to this array.

        Args:
            files: all files of values, in order.
        """
        values, first_new = self._kept(rows)
        changed: list[NDArray[np.int64]] = []
        _, before, known_files = self._known
        firsts, lasts = ({getattr(file, name) for file in known_files} for name in ("first", "last"))
        for file, lines in files.items():
            is_known = file.first in firsts and file.last in lasts  # or was merged of known ones
            since = first_new if is_known else 0
            if file.newest >= since:
                for statements in lines.since(since).statements(rows, VALUE, text=self._name):
                    with np.errstate(over="ignore"):
                        values[statements.rows] = statements.values
                    changed.append(statements.rows)
        self.changed = changed if values is before else None
        self._known = rows, values, frozenset(files)  # at once: Ctrl-C leaves what was known before
        return values

    def _kept(self, rows: NumberedRows) -> tuple[NDArray[np.floating[Any]], int]:
        """The values of rows whose segments stay, NaN for others, and the oldest segment that is new."""
        old, known, _ = self._known
        if np.array_equal(rows.seqs, old.seqs):
            return known, MAX_SEQ + 1
        values = np.full(rows.size, np.nan, self._dtype)
        stays = np.isin(rows.seqs, old.seqs)
        for at, before in zip(np.flatnonzero(stays), old.seqs.searchsorted(rows.seqs[stays]), strict=True):
            values[rows.starts[at] : rows.starts[at + 1]] = known[old.starts[before] : old.starts[before + 1]]
        return values, int(rows.seqs[~stays].min(initial=MAX_SEQ + 1))


def require_tag(tag: str) -> str:
    """Return a tag. Raises: TypeError, ValueError: it is none, or means something else to `Loader(rows=)`."""
    if not require_text(tag, "a tag") or tag in RESERVED_TAGS or is_row_id(tag):
        raise ValueError(
            f"{tag!r} cannot be a tag, since rows={tag!r} says something else: take another text"
        )
    return tag


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


def _pieces(*notes: NoteLines) -> Iterator[tuple[NoteLines, ...]]:
    """The lines of each, cut at the same segments into pieces of limited size."""
    seqs, rows = (np.concatenate([each.lines[name] for each in notes]) for name in ("seq", "rows"))
    order = seqs.argsort(kind="stable")
    piece = rows[order].cumsum() // Limits.current.noted_rows
    starts = np.unique(seqs[order][1:][np.diff(piece) > 0])
    return zip(*(each._split(starts) for each in notes), strict=True)


def _order(statements: RowStatements, size: int) -> NDArray[np.int64]:
    """The stable order of statements by row: (n,).

    Of many with one code it has only the last about each row, and takes no sort.
    """
    rows, codes = statements.rows, statements.codes
    if len(rows) < size // 16 or (codes != codes[0]).any():
        return rows.argsort(kind="stable")
    last = np.full(size, -1)
    last[rows] = np.arange(len(rows))
    return last[last >= 0]


def _before(sizes: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """The start of each part, given the sizes of parts: (n,)."""
    return np.append(0, sizes.cumsum(dtype=np.int64))[:-1]


def _is_first(keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask, (n,), of the first of each of sorted keys, (n,)."""
    return np.append(True, keys[1:] != keys[:-1])[: len(keys)]
