"""NoteLines: notes on rows as columns, and as the bytes of a file. Pure.

A line says one thing about one row: that it is excluded or not, that it has a tag or not, or a value of a
name. Of two lines on one matter the later one counts. A file is an Arrow IPC file of one record batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from arrowcache.errors import CacheFormatError
from arrowcache.storage.layout import SegmentInfo

INCLUDED, EXCLUDED, UNTAGGED, TAGGED, VALUE = range(5)  # what a line says; a newer format may say more
_LINE = np.dtype([("seq", "<i8"), ("row", "<i4"), ("what", "i1"), ("text", "<i4"), ("value", "<f8")])
LINE_BYTES, MOST_ROW = _LINE.itemsize, (1 << 31) - 1
_SCHEMA = pa.schema(
    [
        ("seq", pa.int64()),
        ("row", pa.int32()),
        ("what", pa.int8()),
        ("text", pa.int32()),
        ("value", pa.float64()),
    ]
)
_TEXTS = b"texts"  # of the schema's metadata


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


class NoteLines(NamedTuple):
    """Lines, in order.

    Args:
        lines: (n,) records: `seq` and `row` of the row; `what` is said; `text`, the place among `texts` of
            the tag, the reason, or the name of the value; `value`.
        texts: each once.
    """

    lines: NDArray[np.void]
    texts: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        ids: NDArray[np.int64],
        what: int,
        texts: Sequence[str],
        text: ArrayLike = 0,
        value: ArrayLike = 0.0,
    ) -> NoteLines:
        """Lines about rows (n, 2) that say one thing."""
        lines = np.empty(len(ids), _LINE)
        lines["seq"], lines["row"] = ids.T
        lines["what"], lines["text"], lines["value"] = what, text, value
        return cls(lines, tuple(texts))

    @classmethod
    def unpack(cls, data: bytes, path: str) -> NoteLines:
        """Read a file. Raises: CacheFormatError: a newer release wrote it."""
        with pa.ipc.open_file(data) as file:
            batch = file.get_batch(0)
        lines = np.empty(len(batch), _LINE)
        if is_known := batch.schema.equals(_SCHEMA):
            for name, column in zip(_LINE.names or (), batch.columns, strict=True):
                lines[name] = np.frombuffer(column.buffers()[1], _LINE[name], len(batch))
        if not is_known or lines["what"].max(initial=0) > VALUE:
            raise CacheFormatError(
                f"{path} has notes that this arrowcache does not know: use the release that wrote it"
            )
        return cls(lines, tuple(json.loads(batch.schema.metadata[_TEXTS])))

    @property
    def nbytes(self) -> int:
        """Bytes that its file takes, about."""
        return self.lines.nbytes + sum(map(len, self.texts))

    def pack(self) -> bytes:
        """The bytes of a file."""
        schema = _SCHEMA.with_metadata({_TEXTS: json.dumps(self.texts)})
        return bytes(arrow_file(schema, [self.lines[name] for name in schema.names]))

    def joined(self, later: NoteLines) -> NoteLines:
        """These lines, and then others."""
        texts = {text: code for code, text in enumerate(dict.fromkeys((*self.texts, *later.texts)))}
        codes = np.array([texts[text] for text in later.texts], np.int32)
        lines = np.concatenate([self.lines, later.lines])
        lines["text"][len(self.lines) :] = codes[later.lines["text"]]
        return NoteLines(lines, tuple(texts))

    def latest(self, rows: Rows) -> NoteLines:
        """The lines that still count: the last one on each matter of each row that is there."""
        at, numbers = self.about(rows, np.ones(len(self.lines), np.bool_))
        lines = self.lines[at]
        matter = np.where(lines["what"] >= UNTAGGED, 1 + lines["text"], 0)
        _, last = np.unique((numbers * (1 + len(self.texts)) + matter)[::-1], return_index=True)
        lines = lines[np.sort(len(at) - 1 - last)]
        is_used = np.bincount(lines["text"], minlength=len(self.texts)) > 0
        lines["text"] = (np.cumsum(is_used) - 1)[lines["text"]]
        return NoteLines(lines, tuple(compress(self.texts, is_used)))

    @property
    def newest(self) -> int:
        """The newest segment that it has a note on."""
        return int(self.lines["seq"].max(initial=0))

    def about(self, rows: Rows, which: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find lines about rows.

        Args:
            which: (n,) True for lines that may be found.
        Returns: the places of the lines, ascending, and the numbers of their rows.
        """
        segments = rows.seqs.searchsorted(self.lines["seq"])
        numbers: NDArray[np.int64] = np.append(rows.starts, 0)[segments] + self.lines["row"]
        is_there = np.append(rows.seqs, -1)[segments] == self.lines["seq"]
        is_there &= numbers < np.append(rows.starts[1:], 0)[segments]
        at = np.flatnonzero(which & is_there)
        return at, numbers[at]

    def says(self, what: int, other: int, text: str | None = None) -> NDArray[np.bool_]:
        """The lines that say one of two things, with any text or this one: (n,)."""
        found: NDArray[np.bool_] = (self.lines["what"] == what) | (self.lines["what"] == other)
        if text is not None:
            found &= self.lines["text"] == (self.texts.index(text) if text in self.texts else -1)
        return found

    def texts_of(self, *whats: int) -> set[str]:
        """The texts of the lines that say one of these things."""
        codes = self.lines["text"][np.isin(self.lines["what"], whats)]
        return {self.texts[code] for code in np.unique(codes).tolist()}


def arrow_file(schema: pa.Schema, columns: Sequence[NDArray[Any]]) -> pa.Buffer:
    """An Arrow IPC file of one record batch of numbers. pyarrow's own way from NumPy would load pandas."""
    arrays = [
        pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(np.ascontiguousarray(column))])
        for kind, column in zip(schema.types, columns, strict=True)
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return sink.getvalue()


NO_LINES = NoteLines(np.empty(0, _LINE))
