"""Row filter: which rows of a snapshot an epoch reads: `rows=` of a loader, less what is excluded.

`RowFilter` chooses them as an epoch begins, as a bitmap for each segment of which some rows are left out: by
the segment's number, so a state can hold it, and it fits whatever else is in a snapshot. `Selected` numbers
the chosen rows 0, 1, 2, ..., oldest segment first, as orders number rows, and turns these numbers into row
ids. It takes 4 bytes for each chosen row of such segments, and looks at no file and no clock.

Excluded rows are left out whatever else is asked for, unless all rows are. `ExcludedRows` tells which are, by
their ids or by a rule: an expression, evaluated once for each segment.
Must never: change the rows of an epoch that has begun.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from arrowcache.arrow.convert import require_unmasked
from arrowcache.arrow.expression import (
    WHERE_EXCLUDED,
    is_expression,
    mentions,
    packed,
    shown,
)
from arrowcache.arrow.schema import RESERVED_NAMES
from arrowcache.lifetimes import cached_property
from arrowcache.reading.per_segment import PerSegmentCache, PythonFunction, ReadColumns, StoredFunction
from arrowcache.reading.shuffle import starts_of
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.notes_log import MARKS, VALUES, NotesLog
from arrowcache.storage.row_ids import NumberedRows, is_row_id, row_ids
from arrowcache.storage.row_notes import RESERVED_TAGS, Rule, require_tag
from arrowcache.storage.store import Store
from arrowcache.units import did_you_mean, format_count, require_text

if TYPE_CHECKING:
    from arrowcache.reading.snapshot import Snapshot

INCLUDED, ALL_ROWS = RESERVED_TAGS
_WORD = re.compile(r"[^\W\d]\w*")
_A_BOOL = "a bool for each row: compare it, such as pyarrow.compute.field('label') != 3"

Mask = NDArray[np.bool_]
V = TypeVar("V", bound=np.generic)
Bitmaps = Mapping[int, bytes]
"""By the number of a segment: one bit a row, the first row's highest, 1 if it is selected."""

ALL: Bitmaps = {}


def bitmap(mask: NDArray[np.bool_]) -> bytes:
    """Return the bitmap of a segment's mask, (rows,)."""
    return np.packbits(mask).tobytes()


def mask_of(bits: bytes, rows: int) -> NDArray[np.bool_]:
    """The inverse of `bitmap`: the mask of so many rows, (rows,)."""
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=rows).view(np.bool_)


def are_fit(bitmaps: Bitmaps, seqs: NDArray[np.int64], rows: NDArray[np.int64]) -> bool:
    """True if each bitmap is of one of these segments (n,), and has a bit for each of its rows, no more."""
    rows_of = dict(zip(seqs.tolist(), rows.tolist(), strict=True))
    return all(
        (count := rows_of.get(seq)) is not None
        and len(bits) == -(-count // 8)
        and not int.from_bytes(bits, "big") & ((1 << -count % 8) - 1)  # the bits behind the last row's
        for seq, bits in bitmaps.items()
    )


class Selected:
    """The selected rows of some segments, oldest first. Several threads may ask.

    Args:
        seqs: (n,) int64, numbers of the segments, ascending.
        rows: (n,) int64, rows of each.
    """

    def __init__(self, seqs: NDArray[np.int64], rows: NDArray[np.int64], bitmaps: Bitmaps = ALL) -> None:
        self._seqs, self._rows = seqs, rows
        self._bitmaps = bitmaps and {seq: bitmaps[seq] for seq in seqs.tolist() if seq in bitmaps}
        self.are_all = not self._bitmaps

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """The number of selected rows of each segment: (n,)."""
        if self.are_all:
            return self._rows
        counts = self._rows.copy()
        for index, seq in enumerate(self._seqs.tolist()):
            if (bits := self._bitmaps.get(seq)) is not None:
                counts[index] = int.from_bytes(bits, "big").bit_count()
        return counts

    @cached_property
    def size(self) -> int:
        """The number of selected rows."""
        return int(self.counts.sum())

    def ids(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row ids (n,) of selected rows (n,) in a snapshot of these segments."""
        if self.are_all:
            return numbers
        starts, is_part, places, left_out = self._table
        lines = numbers
        if len(starts) > 1:
            runs = starts.searchsorted(numbers, side="right") - 1
            lines = numbers * is_part[runs] + places[runs]
        ids: NDArray[np.int64] = numbers + left_out[lines]
        return ids

    def values_of(self, values: NDArray[V]) -> NDArray[V]:
        """Return the values of the selected rows, of those of all rows: the same array if all are."""
        return values if self.are_all else values[self.ids(np.arange(self.size))]

    def numbers(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The inverse of `ids`: numbers of the row ids (n,) that are selected, and a mask (n,) of these."""
        if self.are_all:
            return ids, np.ones(len(ids), np.bool_)
        numbers = self._all_ids.searchsorted(ids)
        is_selected = np.append(self._all_ids, -1)[numbers] == ids
        return numbers[is_selected].astype(np.int64), is_selected

    @cached_property
    def _all_ids(self) -> NDArray[np.int64]:
        return self.ids(np.arange(self.size))

    @cached_property
    def _table(self) -> tuple[NDArray[Any], ...]:
        """The numbers that `ids` looks up.

        A table has the number of rows left out before each selected one. It has one line for all rows of a
        segment that is whole. Runs of segments that are read in part are as one. Of each run and each whole
        segment: the number of its first selected row; 1 if it is read in part; its first line, of a run less
        that number.
        """
        firsts, before = starts_of(self.counts)[:-1].tolist(), starts_of(self._rows)[:-1].tolist()
        dtype = np.uint32 if self._rows.sum() < 1 << 32 else np.int64
        runs: list[tuple[int, int, int]] = []
        table, size = [np.empty(0, dtype)], 0
        for index, seq in enumerate(self._seqs.tolist()):
            bits, first = self._bitmaps.get(seq), firsts[index]
            if bits is None:
                runs.append((first, 0, size))
                left_out = np.zeros(1, np.int64)
            else:
                if not runs or not runs[-1][1]:
                    runs.append((first, 1, size - first))
                left_out = mask_of(bits, int(self._rows[index])).nonzero()[0]
                left_out -= np.arange(len(left_out))
            left_out += before[index] - first
            table.append(left_out.astype(dtype))
            size += len(left_out)
        starts, is_part, places = np.array(runs, np.int64).T
        return starts, is_part, places, np.concatenate(table)


# the rows that are excluded


class ExcludedRows:
    """The rows of snapshots that are excluded, all of whose segments are mapped. One thread at a time asks.

    Args:
        ids: (n,) rows of the one snapshot that is asked for: rules are evaluated for these alone, and nothing
            is remembered. None: all rows.
        read: as of `RowFilter`.
    """

    def __init__(
        self, store: Store, ids: NDArray[np.int64] | None = None, read: ReadColumns | None = None
    ) -> None:
        self._store, self._notes, self._ids, self._read = store, NotesLog.of(store), ids, read
        self._functions: dict[Rule, StoredFunction[Mask]] = {}

    def of(self, snapshot: Snapshot) -> Mask:
        """Tell which rows of a snapshot are excluded: (rows,).

        Blocks: while columns that a rule reads come from the disk.
        Raises: ValueError: a rule cannot be evaluated for a row. CacheFormatError: damaged notes.
        """
        if self._functions:
            self._functions = {rule: self._function(rule) for rule in self._notes.rules()}
        return self._notes.excluded(_rows_of(snapshot), partial(self.holds, snapshot))

    def reasons(self, snapshot: Snapshot) -> NDArray[np.object_]:
        """The reason of each excluded row, and None of the others: (rows,). Blocks, Raises: as `of`."""
        return self._notes.reasons(_rows_of(snapshot), partial(self.holds, snapshot))

    @property
    def reads_notes(self) -> bool:
        """True if a rule reads annotations."""
        return any(rule.annotations for rule in self._notes.rules())

    def reads(self, segments: Sequence[SegmentInfo]) -> bool:
        """True if columns of some of these segments are yet to be read, since a rule asks for them."""
        return any(self._function(rule).reads(segments) for rule in self._notes.rules())

    def holds(self, snapshot: Snapshot, rule: Rule) -> Mask:
        """Tell for which rows a rule holds: (rows,). Blocks, Raises: as `of`."""
        function = self._functions[rule] = self._function(rule)
        if self._ids is None:
            return np.concatenate([np.empty(0, np.bool_), *function.of(snapshot)])
        mask = np.zeros(len(snapshot), np.bool_)
        mask[self._ids] = _without_nulls(function.at(snapshot, self._ids))
        return mask

    def _function(self, rule: Rule) -> StoredFunction[Mask]:
        known = self._functions.get(rule)
        return known or _function_of(self._store, rule.where, WHERE_EXCLUDED, rule.annotations, self._read)


def require_rule(where: object) -> None:
    """Check the argument `where` of an exclusion. Raises: TypeError: it is no expression."""
    if not is_expression(where):
        raise TypeError(
            f"where must be an expression, such as pyarrow.compute.field('label') == 3, not {where!r}: the "
            "cache keeps a rule. Loader(rows=...) takes a function, and excludes nothing"
        )


def rule_of(store: Store, where: Any, reason: str) -> Rule:
    """The rule of an expression.

    Raises: TypeError, ValueError: as of `Loader(rows=)`; or it reads the age of rows.
    """
    require_rule(where)
    names = _function_of(store, where, WHERE_EXCLUDED, ()).names
    schema, (*_, age) = store.settings.schema, RESERVED_NAMES
    if age in names:
        raise ValueError(
            f"where={shown(where)}: the age of rows, {age!r}, is no part of a rule, which holds as long as "
            "they are there; give the expression to Loader(rows=...)"
        )
    annotations = [name for name in names if name not in schema and name not in RESERVED_NAMES]
    return Rule(packed(where), reason, tuple(annotations))


def _rows_of(snapshot: Snapshot) -> NumberedRows:
    return NumberedRows.of_counts(snapshot.seqs, snapshot.segment_rows)


# the choice


class RowFilter:
    """The choice of rows that one loader reads.

    Args:
        rows, expect: as of `Loader`, after `require_rows` and `require_expected`.
        read: keeps the columns that expressions read, for the next filter. None: they are not kept.
    Raises: ValueError: a tag that no row has, or an expression that does not fit.
    """

    def __init__(
        self, store: Store, rows: Any, expect: Sequence[str] = (), read: ReadColumns | None = None
    ) -> None:
        self._rows, self._notes = rows, NotesLog.of(store)
        self.excluded = ExcludedRows(store, read=read)
        #: False: it leaves out only what is excluded.
        self.chooses = not (isinstance(rows, str) and rows == INCLUDED)
        #: None: neither a function nor an expression is asked.
        self.function: PerSegmentCache[Mask] | None = None
        if isinstance(rows, str) and rows not in RESERVED_TAGS:
            self._notes.require_known_tag(rows, expect)
        elif is_expression(rows):
            self.function = _function_of(store, rows, "rows", expect, read)
        elif callable(rows):
            self.function = PythonFunction(store, rows, "rows", _checked, expect)

    def of(self, snapshot: Snapshot) -> Bitmaps:
        """Return the selection of a snapshot. Its segments are mapped; or not even leased, if not `reads`.

        Blocks: while the columns that a function asks for are read.
        Raises: TypeError, ValueError: a function's result is no mask. Whatever it raises. CacheFormatError:
            damaged notes.
        """
        if (isinstance(self._rows, str) and self._rows == ALL_ROWS) or not len(snapshot):
            return {}
        rows = _rows_of(snapshot)
        mask = self._asked_for(snapshot, rows)
        if self._notes.files(MARKS):
            excluded = self.excluded.of(snapshot)
            mask = ~excluded if mask is None else mask & ~excluded
        if mask is None:
            return {}
        parts = zip(rows.seqs.tolist(), np.split(mask, rows.starts[1:-1]), strict=True)
        return {seq: bitmap(part) for seq, part in parts if not part.all()}

    def reads(self, segments: Sequence[SegmentInfo]) -> bool:
        """False: for these segments `of` looks at no segment's file."""
        if isinstance(self._rows, str) and self._rows == ALL_ROWS:
            return False
        if isinstance(self.function, StoredFunction):
            reads = self.function.reads(segments)
        else:
            reads = not isinstance(self._rows, str)
        return reads or self.excluded.reads(segments)

    def version(self) -> object:
        """A value that stays as long as `of` chooses the same rows of a segment. None: it may always differ.

        Blocks: for cache.lock and the disk, where annotations are read, and some of this process wait.
        """
        function = self.function
        if function is not None and not function.is_repeatable:
            return None
        values = None
        if (function is not None and function.reads_notes) or self.excluded.reads_notes:
            self._notes.flush_or_warn()
            values = self._notes.files(VALUES)
        return self._notes.files(MARKS), values

    def _asked_for(self, snapshot: Snapshot, rows: NumberedRows) -> Mask | None:
        """The mask of a snapshot's rows, whatever is excluded. None: all."""
        if not self.chooses:
            return None
        if self.function is not None:
            return np.concatenate(self.function.of(snapshot))
        if isinstance(self._rows, str):
            return self._notes.tagged(rows, self._rows)
        mask = np.zeros(len(snapshot), np.bool_)
        mask[snapshot.positions(row_ids(self._rows), missing="skip")] = True
        return mask


def select_for_export(snapshot: Snapshot, store: Store, rows: object) -> None:
    """Have a snapshot's selection be the rows that an export writes, those of a Loader with these `rows`.

    Raises: ValueError: it chooses none of some rows. Others as of `RowFilter` and its `of`.
    """
    snapshot.bitmaps = RowFilter(store, rows).of(snapshot)
    if not len(snapshot) or snapshot.selected.size:
        return
    held = format_count(len(snapshot), "row")
    if isinstance(rows, str) and rows == INCLUDED:
        raise ValueError(f"all {held} are excluded: rows='all' exports them, with their marks")
    raise ValueError(f"rows={repr(rows) if isinstance(rows, str) else ''} chooses none of the {held}")


def chosen_of(snapshot: Snapshot, segment: SegmentInfo) -> Mask | None:
    """The mask of a segment's rows that a snapshot's selection has: (rows,). None: all."""
    bits = snapshot.bitmaps.get(segment.seq)
    return None if bits is None else mask_of(bits, segment.rows)


def require_rows(rows: object) -> object:
    """Return the argument `rows` of a loader; ids as (n, 2) int64.

    Raises: TypeError, ValueError: it says no rows.
    """
    if callable(rows) or is_expression(rows) or (isinstance(rows, str) and rows in RESERVED_TAGS):
        return rows
    if isinstance(rows, str) and not is_row_id(rows):
        return require_tag(rows)
    try:
        return row_ids(rows)
    except TypeError as error:
        raise TypeError(
            "rows must be 'included', 'all', a tag, row ids, a function of a segment's columns, or an "
            f"expression such as pyarrow.compute.field('label') != 3: {error}"
        ) from None


def require_expected(expect: object, rows: object, weights: object, is_once: bool = False) -> tuple[str, ...]:
    """Return the argument `expect` of a loader.

    Args:
        is_once: `set_rows` may ask for other names.
    Raises: TypeError, ValueError: no names, or one that nothing asks for. A function may ask for any.
    """
    names = (expect,) if isinstance(expect, str) else tuple(expect) if isinstance(expect, Sequence) else None
    if names is None:
        raise TypeError(f"expect must be names of tags and annotations that are to come, not {expect!r}")
    for name in names:
        require_text(name, "a name of expect")
    if is_once or callable(rows) or callable(weights):
        return names
    tags = () if isinstance(rows, str) and rows in RESERVED_TAGS else (rows,)
    asked = [each for each in (*tags, weights) if isinstance(each, str)]
    expressions = [each for each in (rows, weights) if is_expression(each)]
    for name in names:
        if name not in asked and not any(mentions(each, name) for each in expressions):
            words = [*asked, *(word for each in expressions for word in _WORD.findall(str(each)))]
            raise ValueError(
                f"expect={expect!r} says that {name!r} is to come, and neither rows= nor weights= asks for "
                f"it: {did_you_mean(name, words)}leave it out"
            )
    return names


def rows_term(rows: Any) -> str:
    """Return a text of the argument `rows` or `weights` that ranks compare. Functions are not told apart."""
    if isinstance(rows, str):
        return rows
    if is_expression(rows):
        return f"{shown(rows)} ({xxhash.xxh3_64_hexdigest(packed(rows))})"
    return xxhash.xxh3_64_hexdigest(rows.tobytes()) if isinstance(rows, np.ndarray) else "a function"


def _function_of(
    store: Store, expression: Any, argument: str, expect: Sequence[str], read: ReadColumns | None = None
) -> StoredFunction[Mask]:
    return StoredFunction.of_expression(
        store,
        expression,
        argument,
        expect,
        _without_nulls,
        fits=pa.types.is_boolean,
        wanted=_A_BOOL,
        read=read,
    )


def _without_nulls(found: pa.Array, segment: SegmentInfo | None = None) -> Mask:  # noqa: ARG001
    known = found.fill_null(False) if found.null_count else found
    mask: Mask = np.asarray(known.to_numpy(zero_copy_only=False))
    return mask


def _checked(result: object, segment: SegmentInfo) -> Mask:
    require_unmasked(result, f"rows= gave for segment {segment.seq}", False)
    mask = np.array(result)  # a copy: the function may use its array again
    if mask.dtype != np.bool_ or mask.shape != (segment.rows,):
        raise TypeError(
            f"rows= gave {type(result).__name__} of dtype {mask.dtype} and shape {mask.shape} for the "
            f"{format_count(segment.rows, 'row')} of segment {segment.seq}: return a bool for each row, such "
            "as lambda columns: columns['label'] != 3"
        )
    return mask
