"""Columns: a cache's segments one after another, numbers of their columns, and notes on rows as columns.

Guarantees: a walk releases each segment that it has passed, so that samplers go on, and reads the next one
ahead, in bounded memory. Numbers are views of the mapped file, as far as they can be. An error keeps no
segment: a notebook holds the last error until the next, with all its frames.

The notes are `_excluded`, `_reason`, `_tags`, and annotations by their names. Every row is shown, with its
notes. A column of notes is made when it is asked for.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from arrowcache.arrow.schema import Binary, FieldType, Ragged, Schema, String, Tensor, Timestamp
from arrowcache.progress import progress_bar
from arrowcache.reading.row_filter import ExcludedRows
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.mapping import will_need
from arrowcache.storage.notes_log import MARKS, NotesLog
from arrowcache.storage.recovery import HasStore
from arrowcache.storage.row_ids import ID_COLUMNS, NumberedRows
from arrowcache.storage.store import Store

AnyCache = HasStore | str | os.PathLike[str]
P = ParamSpec("P")
R = TypeVar("R")


def walk(
    snapshot: Snapshot, columns: Sequence[str], what: str, progress: bool | None
) -> Iterator[tuple[SegmentInfo, pa.RecordBatch]]:
    """Read a snapshot's segments, each as a record batch over the mapped file, without a copy.

    Each is released once the next is asked for and nothing refers to its record batch any more.

    Args:
        what: is done, for the bar.
        progress: show a bar; None: in a terminal or a notebook.
    Raises: CorruptSegmentError: a damaged segment, which was quarantined.
    """
    batches = snapshot.record_batches(columns)
    with progress_bar(
        progress, has_widget=True, desc=what, total=snapshot.nbytes, unit="B", unit_scale=True
    ) as bar:
        ahead = _announced(next(batches, None))
        for count, segment in enumerate(snapshot.segments, start=1):
            batch, ahead = ahead, _announced(next(batches, None))
            yield segment, batch
            del batch
            snapshot.release_oldest(count)
            bar.update(segment.nbytes)


def _announced(batch: pa.RecordBatch | None) -> pa.RecordBatch | None:
    """Have the disk begin to read the columns."""
    for column in batch.columns if batch is not None else ():
        for buffer in buffers_of(column):
            will_need(buffer.address, buffer.size)
    return batch


def buffers_of(column: pa.Array) -> list[pa.Buffer]:
    """Where a column of a snapshot's record batch lies."""
    stored = column.storage if isinstance(column, pa.ExtensionArray) else column
    return [buffer for buffer in stored.buffers() if buffer is not None and buffer.size]


def keeps_nothing(function: Callable[P, R]) -> Callable[P, R]:
    """Have what a function raises, Ctrl-C too, refer to none of its values, which hold mappings and leases.

    Lines and messages of the traceback stay; so do the values of an error that was being handled before.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        before = sys.exc_info()[1]
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            seen: BaseException | None = error
            while seen is not None and seen is not before:
                traceback.clear_frames(seen.__traceback__)
                seen = seen.__context__
            raise

    return called


def require_column(schema: Schema, name: str, fits: Callable[[FieldType], bool], wanted: str) -> FieldType:
    """The type of a column that `fits`.

    Args:
        wanted: says what for, and of what kind.
    Raises: ValueError: another column; names those that fit, too.
    """
    schema.select([name])
    if not fits(schema[name]):
        others = ", ".join(other for other, kind in schema.items() if fits(kind))
        raise ValueError(f"column {name!r} is {schema[name]!r}, and {wanted}: {others or 'no column'} can be")
    return schema[name]


def has_axes(kind: FieldType | None) -> bool:
    """Whether a row has many numbers, or none."""
    return isinstance(kind, Ragged) or (isinstance(kind, Tensor) and bool(kind.shape))


def elements(column: pa.Array, kind: Tensor | Ragged) -> pa.Array:
    """All elements of a segment's column, one row after another, as they are stored: a view."""
    stored = column.storage if isinstance(column, pa.ExtensionArray) else column
    return stored.values if isinstance(kind, Ragged) or kind.is_list else stored


def nested(values: pa.Array, column: pa.Array, kind: Tensor | Ragged, sizes: Sequence[int]) -> pa.Array:
    """Elements as the rows that they are of: lists of these sizes, those of a ragged column in lists."""
    for size in reversed(sizes):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    if isinstance(kind, Tensor):
        return values
    offsets = column.offsets
    if kind.elements > 1:
        offsets = pc.divide(offsets, pa.scalar(kind.elements, pa.int32()))
    return pa.ListArray.from_arrays(offsets, values)


def numbers(column: pa.Array, kind: FieldType) -> NDArray[Any]:
    """The same as an array of the type's numpy_dtype. Of text its lengths in characters, of bytes theirs."""
    if isinstance(kind, String | Binary):
        measure = pc.utf8_length if isinstance(kind, String) else pc.binary_length
        return np.asarray(measure(column).to_numpy())
    if isinstance(kind, Timestamp):
        return np.asarray(column.to_numpy(zero_copy_only=True))
    values = elements(column, kind).to_numpy(zero_copy_only=True)
    return np.asarray(values).view(kind.numpy_dtype)


def lengths(column: pa.Array, kind: Ragged) -> NDArray[np.int64]:
    """How many entries each row of a ragged column has."""
    stored = column.offsets.to_numpy(zero_copy_only=True)
    found: NDArray[np.int64] = np.diff(stored).astype(np.int64) // kind.elements
    return found


def real(values: NDArray[Any], kind: FieldType | None) -> NDArray[Any]:
    """Values that have an order: bfloat16's bits as numbers, complex ones' magnitudes, bool as 0 and 1."""
    if isinstance(kind, Tensor | Ragged) and kind.dtype == "bfloat16":
        return bfloat16_values(values)
    if values.dtype.kind == "c":
        return np.asarray(np.abs(values))
    return values.view(np.uint8) if values.dtype == bool else values


def floats(values: NDArray[Any], kind: FieldType | None = None) -> NDArray[np.float64]:
    """The same as float64, a copy: moments as microseconds since 1970, NaT as NaN."""
    if values.dtype.kind == "M":
        return np.where(np.isnat(values), np.nan, values.astype(np.int64).astype(np.float64))
    with np.errstate(invalid="ignore"):  # some bits are NaNs that warn
        return real(values, kind).astype(np.float64)


def draw(column: pa.Array, kind: FieldType, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """At most `count` of a segment's numbers, drawn at random, as `floats`."""
    values = numbers(column, kind)
    if len(values) > count:
        values = values[np.sort(rng.integers(0, len(values), count))]
    return floats(values, kind)


def bfloat16_values(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The numbers that bits of bfloat16 stand for: the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


NOTE_KEY = b"arrowcache.note"  # of a field of a file that was exported: no column of the cache
EXCLUDED, REASON, TAGS = "_excluded", "_reason", "_tags"
_MAX_JOINED = 62
_KINDS: dict[str, FieldType | None] = {EXCLUDED: Tensor("bool"), REASON: String(), TAGS: None}


class NotedRows:
    """The notes on the rows of one snapshot, those of this process' annotations included.

    Args:
        ids: (n,) the rows for which rules are evaluated, and tags listed. None: all.
    """

    def __init__(self, store: Store, snapshot: Snapshot, ids: NDArray[np.int64] | None = None) -> None:
        self._notes, self._excluded, self._snapshot = _notes(store), ExcludedRows(store, ids), snapshot
        self._rows = NumberedRows.of_counts(snapshot.seqs, snapshot.segment_rows)
        self._ids = ids
        kinds = _KINDS | dict.fromkeys(self._notes.names(), Tensor("float64"))
        #: Type of each column that can be asked for, where no column of the cache has its name. None: lists.
        self.kinds = {name: kind for name, kind in kinds.items() if name not in store.settings.schema}
        #: Those that say something.
        self.names = [name for name in self.kinds if name not in _KINDS or self._notes.files(MARKS)]

    def arrow(self, name: str) -> pa.Array:
        """One column of all rows, with nulls for what is not said."""
        kind = self.kinds[name]
        arrow_type = pa.list_(pa.utf8()) if kind is None else kind.arrow_type
        if name == EXCLUDED:
            arrow_type = pa.bool_()
        return pa.array(self.column(name), arrow_type, from_pandas=True)

    def column(self, name: str) -> NDArray[Any]:
        """One column of all rows, (rows,): bool; texts, or None; lists of texts; or float64, NaN for none."""
        if name == EXCLUDED:
            return self._excluded.of(self._snapshot)
        if name == REASON:
            return self._excluded.reasons(self._snapshot)
        if name != TAGS:
            return self._notes.values(self._rows, name)
        tags = np.empty(self._rows.size, object)
        listed = np.arange(len(tags)) if self._ids is None else np.unique(self._ids)
        for at in listed.tolist():
            tags[at] = []
        for tag in self._notes.tags():
            for at in listed[self._notes.tagged(self._rows, tag)[listed]].tolist():
                tags[at].append(tag)
        return tags

    def tag_texts(self) -> pa.Array:
        """The tags of each row as one text, such as "easy, hard", of the first 62 tags there are."""
        tags, codes = self._notes.tags()[:_MAX_JOINED], np.zeros(self._rows.size, np.int64)
        for place, tag in enumerate(tags):
            codes |= self._notes.tagged(self._rows, tag).astype(np.int64) << place
        found = pa.array(codes).dictionary_encode()
        texts = [
            ", ".join(tag for place, tag in enumerate(tags) if code >> place & 1)
            for code in found.dictionary.to_pylist()
        ]
        return pa.DictionaryArray.from_arrays(found.indices, pa.array(texts, pa.utf8())).dictionary_decode()


def select_with_notes(schema: Schema, noted: NotedRows, columns: object) -> tuple[str, ...]:
    """As `Schema.select`, of at least one column. Ids and notes can be named, too. None: the cache's own."""
    if columns is None or isinstance(columns, str) or not hasattr(columns, "__iter__"):
        return schema.select(columns)  # or raises
    chosen: tuple[str, ...] = tuple(columns)
    others = [name for name in chosen if name in (*ID_COLUMNS, *noted.kinds)]
    own = [name for name in chosen if name not in others]
    schema.select(own, least=not others)
    if len(set(others)) != len(others):
        raise ValueError(f"columns {chosen} names a column twice")
    return chosen


def annotated(store: Store) -> Schema:
    """A cache's columns, and behind them its annotations, as `sql` has them."""
    return Schema({**store.settings.schema, **dict.fromkeys(_notes(store).names(), Tensor("float64"))})


def select(store: Store, columns: object) -> tuple[str, ...]:
    """As `Schema.select`, of at least one column. Raises: ValueError: as there; names annotations, too."""
    try:
        return store.settings.schema.select(columns, least=1)
    except ValueError as error:
        names = ", ".join(_notes(store).names())
        others = f"; sql and to_pandas have {names} as well" if names else ""
        raise ValueError(f"{error}{others}") from None


def _notes(store: Store) -> NotesLog:
    notes = NotesLog.of(store)
    notes.flush_or_warn()
    return notes
