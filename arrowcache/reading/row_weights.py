"""Row weights: how often an epoch draws each row: `weights=` of a loader.

`Weighting` makes the weights as an epoch begins, which are fixed then. It keeps the sums by which rows are
drawn: where few annotations are new, sums are changed and not made anew, with the same result. Of annotations
a row without one weighs as much as the heaviest other: new rows are seen soon, as in "Prioritized Experience
Replay" (Schaul, Quan, Antonoglou and Silver, ICLR 2016).

A draw is a function of (weights, seed, epoch, position), so any part of the epoch can be computed without the
draws before it, as of other orders (shuffle.py). The C code of native/draw.h says which function.

A state, or the file by which ranks share an epoch, names its weights by the digest of their content: they are
a file in `notes/`. It is written when it is needed: as the state of an epoch under way is asked for, or a
rank begins an epoch for others. Files of ranks stay as long as their file in `ranks/` is held. Of states
those of the last few stay: as many as an eighth of the capacity has room for, fewer where leased segments
leave none, and at least one. An epoch has room for one made before it leases all segments that might leave.
Of a frozen cache there is no file: a loader with the same weights= makes them again.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from arrowcache.arrow.convert import require_unmasked
from arrowcache.arrow.expression import is_expression
from arrowcache.arrow.schema import Schema, Tensor
from arrowcache.errors import CacheFormatError, CacheFrozenError, CacheFullError, MissingSegmentsError, warn
from arrowcache.lifetimes import cached_property
from arrowcache.native.order import Drawn, WeightSums
from arrowcache.os_errors import explaining
from arrowcache.reading.per_segment import PerSegmentCache, PythonFunction, StoredFunction, row_at
from arrowcache.reading.row_filter import ALL, Selected
from arrowcache.reading.shuffle import RowOrder, key_of
from arrowcache.storage.layout import FOLDERS, NOTES, WEIGHTS_NAME, RanksRecord, SegmentInfo
from arrowcache.storage.notes_log import VALUES, NotesLog
from arrowcache.storage.row_ids import NumberedRows, RowId
from arrowcache.storage.row_notes import LatestValues, arrow_file
from arrowcache.storage.store import Store
from arrowcache.units import did_you_mean, format_count, require_text

if TYPE_CHECKING:
    from arrowcache.reading.snapshot import Snapshot

_WEIGHTS = 3  # keeps draws apart from shuffles
_MAX_KEPT = 4  # files of states
_MORE_BYTES = 4096  # of a file than its weights
_MIN_ROWS_A_CHANGE = 64  # of a table for each row that is changed: with fewer it is filled as fast
_NO_SEQS = np.empty(0, np.int64)
_A_NUMBER = "a number for each row: cast it, such as (pyarrow.compute.field('label') == 3).cast('float32')"
_NEXT_EPOCH = (
    "those of the last few states are kept; begin the next epoch, with "
    "state | {'epoch': state['epoch'] + 1, 'position': 0, 'segments': [], 'weights': None}"
)


# draws


class Weights:
    """The weights of the selected rows of a snapshot, at least one above 0. They do not change.

    Args:
        of_rows: (rows,) float32.
        table: has them already.
    """

    def __init__(self, of_rows: NDArray[np.float32], table: WeightSums | None = None) -> None:
        self.of_rows, self._table = of_rows, table

    @cached_property
    def name(self) -> str:
        """A name that no other weights have."""
        return xxhash.xxh3_64_hexdigest(self.of_rows.data)

    @cached_property
    def table(self) -> WeightSums:
        """The tree over them, by which rows are drawn. Blocks: as `WeightSums`."""
        return WeightSums(self.of_rows) if self._table is None else self._table

    def probabilities(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """The probability (n,) of rows (n,) to be what one draw gives."""
        return self.of_rows[numbers].astype(np.float64) / self.table.total


class Draws(RowOrder):
    """A pass of so many draws: at each place a row.

    Args:
        segments: number of segments with the rows.
        draws: number of draws.
    """

    def __init__(self, weights: Weights, segments: int, draws: int, seed: int, key: tuple[int, ...]) -> None:
        super().__init__(segments, draws, drawn=Drawn(weights.table, int(key_of(seed, (*key, _WEIGHTS)))))
        self._weights = weights  # while they live, nobody changes their table


# the rule


class Weighting:
    """The weights that one loader gives to rows.

    Args:
        weights, expect: as of `Loader`; weights are not None.
    Raises: ValueError: a name that is neither a column nor an annotation of any row, while rows have other
        annotations, or it is like a column's; or an expression that does not fit.
    Warns: RuntimeWarning: a name that is like no column's, and no row has an annotation yet. It is an error
        of `of` once rows have only others.
    """

    def __init__(self, store: Store, weights: Any, expect: Sequence[str] = ()) -> None:
        self._store, self._notes, schema = store, NotesLog.of(store), store.settings.schema
        #: None: annotations of one name weigh.
        self.function: PerSegmentCache[NDArray[np.float64]] | None = None
        self._values: LatestValues | None = None
        self._tables = _Tables()
        self._reserved: object = None  # for what there was room, and when names came or left last
        self._unknown = ""  # the name, while no row has an annotation of it, nor is one expected
        #: Missing values weigh as much as the heaviest; those of a function or column are an error.
        self._may_lack = False
        if is_expression(weights):
            self.function = StoredFunction.of_expression(
                store, weights, "weights", expect, _nulls_as_nan, fits=_is_number, wanted=_A_NUMBER
            )
            self._may_lack = True
        elif callable(weights):
            self.function = PythonFunction(store, weights, "weights", _floats, expect)
        elif weights in schema:
            self.function = StoredFunction(store, [weights], itemgetter(weights), _floats)
        else:
            self._values, self._may_lack = LatestValues(weights, np.float32), True
            self._unknown = "" if weights in expect else weights
            if not self._is_known():
                warn(
                    f"no row has an annotation yet, and there are the columns {', '.join(schema)}: "
                    f"weights={weights!r} draws all rows alike until cache.annotate(ids, {weights}=...), and "
                    "is an error of the next epoch once rows have only other annotations; pass "
                    f"expect={weights!r} if they are to come"
                )

    @property
    def reads_notes(self) -> bool | None:
        """True if it reads annotations. None: that is known once a function was asked."""
        if self._store.settings.dataset is not None:  # whose items have no notes
            return False
        return True if self.function is None else self.function.reads_notes

    def _is_known(self) -> bool:
        """True if some row has or had an annotation of this name, or one is expected.

        Raises: ValueError: rows have others alone, or it is like a column's. Annotations that leave later do
            not matter.
        """
        if self._unknown:
            names, name = self._notes.names(), self._unknown
            columns = self._store.settings.schema
            meant = did_you_mean(name, [*names, *columns])
            if name not in names and (names or meant):
                noted = (
                    f"are the annotations {', '.join(names)}, and"
                    if names
                    else "is no annotation, and there are"
                )
                raise ValueError(
                    f"weights={name!r} is neither an annotation of any row nor a column: {meant}"
                    f"there {noted} the columns {', '.join(columns)}; pass expect={name!r} if rows are to "
                    "get it"
                )
            if names:
                self._unknown = ""
        return not self._unknown

    def reserve(self, rows: int, *, of_ranks: bool) -> None:
        """Have room for a file of weights of so many rows; if they are of annotations, also for these.

        An epoch calls it before it leases all that might leave. A lack of room is an error only of whoever
        needs it.
        Blocks: for cache.lock, and while annotations are written.
        """
        if self.reads_notes:
            self._notes.flush_or_warn()
        with explaining(self._store.folder.path):
            changed = self._store.folder.changed_ns(".", *FOLDERS, NOTES)
        wanted = changed, rows, of_ranks, self.reads_notes
        if changed is not None and self._reserved == wanted:
            return  # the room that there was is there
        with suppress(CacheFrozenError), self._store.locked(), suppress(CacheFullError):
            nbytes = _missing_bytes(self._store, rows, of_ranks=of_ranks)
            if self.reads_notes:
                with suppress(CacheFullError):
                    self._store.require_room(nbytes + self._notes.missing_bytes(rows))
                    self._reserved = wanted
                    return
            self._store.require_room(nbytes)
            if not self.reads_notes:  # else leases that end make more room
                self._reserved = wanted

    def of(self, snapshot: Snapshot) -> Weights:
        """Return the weights of the selected rows of a snapshot, all of whose segments are mapped.

        Blocks: while columns of new segments, and annotations, are read.
        Raises: ValueError: a weight below 0, infinite or, but of annotations, NaN; all are 0. TypeError: a
            function's result is no array of numbers. Whatever it raises.
        """
        tables, self._tables = self._tables, _Tables()  # what fails, and Ctrl-C, leaves none half changed
        tables.see(snapshot)
        weights: Weights | None = None
        found: NDArray[np.floating[Any]] = np.empty(0)
        if self.function is not None:
            parts = self.function.of(snapshot)
            if isinstance(self.function, StoredFunction):  # a Python function makes new ones
                weights = tables.of_parts(parts)
            if weights is None:
                found = np.concatenate(parts)
        else:
            assert self._values is not None
            self._is_known()
            self._notes.flush_or_warn()
            rows = NumberedRows.of_counts(snapshot.seqs, snapshot.segment_rows)
            found = self._values.of(rows, self._notes.read(VALUES))
            changes = self._values.changed
            weights = None if changes is None else tables.changed(found, changes)
        selected = snapshot.selected
        if weights is None:
            weights = tables.filled(_scaled(selected.values_of(found)), may_lack=self._may_lack)
        if (bad := weights.table.bad) >= 0:
            number = int(selected.ids(np.array([bad]))[0])
            raise ValueError(
                f"row {row_at(snapshot, number)} has the weight {found[number]}: a weight is a finite "
                "number, at least 0"
            )
        if not weights.table.total:
            raise ValueError(
                f"{format_count(len(weights.of_rows), 'row')}, and none weighs more than 0: give some more, "
                "to be drawn"
            )
        self._tables = tables
        return weights


class _Table:
    """A table of weights that epochs have in turn."""

    def __init__(self, sums: WeightSums) -> None:
        self.sums = sums
        #: The rows of the snapshot that have another weight by now. None: any may have.
        self.behind: list[NDArray[np.int64]] | None = []
        self._user: Callable[[], Weights | None] = lambda: None

    def fall_behind(self, rows: Sequence[NDArray[np.int64]] | None, most: int) -> None:
        """Note that rows have another weight by now. None, or more than the most: any may have."""
        self.behind = None if rows is None or self.behind is None else [*self.behind, *rows]
        if self.behind is not None and sum(map(len, self.behind)) > most:
            self.behind = None

    @property
    def is_free(self) -> bool:
        """True if it may be changed: nobody has weights of it any more."""
        return self._user() is None

    def lent(self) -> Weights:
        """Its weights, up to date. They stay as they are while they live."""
        self.behind = []
        weights = self._user()
        if weights is None:
            weights = Weights(self.sums.weights, self.sums)
            self._user = weakref.ref(weights)
        return weights


class _Tables:
    """The tables of a loader's epochs, the last one's at the end.

    An epoch has the weights of the one before it, if nothing has changed; else a table that no epoch has any
    more, where only those rows are changed that have other weights now. Memory: 4.5 bytes a row for each
    epoch of other weights whose batches are not all delivered, and once more.
    """

    def __init__(self) -> None:
        self._tables: list[_Table] = []
        self._selected, self._seqs, self._bitmaps = Selected(_NO_SEQS, _NO_SEQS), _NO_SEQS, ALL
        self._parts: Sequence[object] = ()
        self._missing = math.nan  # the weight of rows without a value. NaN: each has one
        self._heaviest: tuple[int, float] = -1, 0.0  # a row that has the largest value, -1 for none

    def see(self, snapshot: Snapshot) -> None:
        """Look whether the rows are those of the last snapshot. If not, all weights are other ones."""
        if not np.array_equal(snapshot.seqs, self._seqs) or snapshot.bitmaps != self._bitmaps:
            self._selected, self._seqs, self._bitmaps = snapshot.selected, snapshot.seqs, snapshot.bitmaps
            self._tables, self._parts = [], ()

    def of_parts(self, parts: Sequence[object]) -> Weights | None:
        """The last weights, if they were made of these objects, which do not change; else None."""
        are_same = bool(self._tables) and len(parts) == len(self._parts) and all(map(is_, parts, self._parts))
        self._parts = parts
        return self._tables[-1].lent() if are_same else None

    def changed(
        self, found: NDArray[np.floating[Any]], changes: Sequence[NDArray[np.int64]]
    ) -> Weights | None:
        """The weights, if they are the last ones but for a few rows; else None.

        Args:
            found: (rows,) of all rows of the snapshot. NaN means that a row has none.
            changes: the rows whose value has changed since the last call.
        """
        if not self._tables:
            return None
        if not changes:
            return self._tables[-1].lent()
        most = self._selected.size // _MIN_ROWS_A_CHANGE
        is_small = sum(map(len, changes)) <= most and not self._changes_missing(found, changes)
        for each in self._tables:
            each.fall_behind(changes if is_small else None, most)
        table = self._free()
        if table is None or table.behind is None:
            return None
        rows, numbers = self._chosen(table.behind)
        table.sums.change(numbers, found[rows].astype(np.float32, copy=False), self._missing)
        return self._lent(table)

    def filled(self, found: NDArray[np.float32], *, may_lack: bool) -> Weights:
        """The weights of the selected rows.

        Args:
            found: (rows,) of the selected rows.
            may_lack: a row that has NaN there weighs as much as the heaviest.
        """
        self._missing = math.nan
        table = self._fill(self._free(), found)
        if may_lack and (bad := table.sums.bad) >= 0 and np.isnan(found[bad]):
            heaviest = float(np.fmax.reduce(found, initial=0))
            self._heaviest = int((found == heaviest).argmax()) if heaviest else -1, heaviest
            self._missing = heaviest if 0 < heaviest < np.inf else 1.0
            table = self._fill(table, found)
        return self._lent(table)

    def _fill(self, table: _Table | None, found: NDArray[np.float32]) -> _Table:
        if table is None:
            return _Table(WeightSums(np.empty(len(found), np.float32), found, self._missing))
        table.sums.fill(found, self._missing)
        return table

    def _chosen(self, some: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows that are selected, and their numbers among the selected rows; both ascend."""
        rows = np.sort(np.concatenate(some))
        numbers, is_selected = self._selected.numbers(rows)
        return rows[is_selected], numbers

    def _changes_missing(
        self, found: NDArray[np.floating[Any]], changes: Sequence[NDArray[np.int64]]
    ) -> bool:
        """True if new values of some rows may change the weight of rows without one."""
        rows, numbers = self._chosen(changes)
        new = found[rows]
        if np.isnan(self._missing):
            return bool(np.isnan(new).any())
        row, heaviest = self._heaviest
        return bool((new > heaviest).any() or (new[numbers == row] != heaviest).any())

    def _free(self) -> _Table | None:
        free = (each for each in self._tables if each.is_free)
        return max(free, key=lambda each: each.behind is not None, default=None)

    def _lent(self, table: _Table) -> Weights:
        others = [each for each in self._tables if each is not table]
        free = [each for each in others if each.is_free][-1:]
        self._tables = [*free, *(each for each in others if not each.is_free), table]
        return table.lent()


def _scaled(found: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Weights as float32; others by a power of 2: the heaviest is about 1, and what counts is not 0."""
    if found.dtype == np.float32:
        return found
    heaviest = np.fmax.reduce(found, initial=0)
    with np.errstate(over="ignore", under="ignore"):  # what becomes infinite is named later
        scaled: NDArray[np.float64] = np.ldexp(found, -np.frexp(heaviest)[1])
        return scaled.astype(np.float32)


def require_weights(weights: object, schema: Schema) -> object:
    """Return the argument `weights` of a loader. Raises: TypeError, ValueError: it says no weights."""
    if weights is None or callable(weights) or is_expression(weights):
        return weights
    if not isinstance(weights, str):
        raise TypeError(
            "weights must be None, the name of an annotation or column, a function, or an expression, not "
            f"{weights!r}"
        )
    if not require_text(weights, "the name of weights"):
        raise ValueError("weights='' names nothing: give the name of an annotation or column, or a function")
    if weights[:1] == "_" and weights not in schema:
        raise ValueError(
            f"weights={weights!r} can be no annotation, whose name does not begin with '_': if it is a "
            f"column of batches with ids, give a function, such as lambda columns: columns[{weights!r}] + 1.0"
        )
    if weights in schema and not (isinstance(kind := schema[weights], Tensor) and kind.shape == ()):
        raise ValueError(f"weights={weights!r} is a column of {kind}: name one of a number a row")
    return weights


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _floats(result: object, segment: SegmentInfo) -> NDArray[np.float64]:
    require_unmasked(result, f"weights= gave for segment {segment.seq}", 0)
    found = np.asarray(result)
    if found.dtype.kind not in "biuf" or found.shape != (segment.rows,):
        raise TypeError(
            f"weights= gave {type(result).__name__} of dtype {found.dtype} and shape {found.shape} for the "
            f"{format_count(segment.rows, 'row')} of segment {segment.seq}: return a number for each row"
        )
    return found.astype(np.float64)


def _nulls_as_nan(found: pa.Array, segment: SegmentInfo) -> NDArray[np.float64]:
    """Weights of an expression, NaN where one is null."""
    values: NDArray[np.float64] = found.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if len(bad := np.flatnonzero(np.isnan(values) & found.is_valid().to_numpy(zero_copy_only=False))):
        row = RowId(segment.seq, int(bad[0]))
        raise ValueError(f"row {row} has the weight nan: a weight is a finite number, at least 0")
    return values


# files


def _missing_bytes(store: Store, rows: int, *, of_ranks: bool) -> int:
    """The bytes that a file of weights of so many rows, and one of ranks, take beyond those that are there.

    0 if one is above an eighth of the capacity: it is left to `write_weights`.
    """
    nbytes = 4 * rows + _MORE_BYTES
    if nbytes > store.settings.notes_bytes:
        return 0
    return max(0, (1 + of_ranks) * nbytes - store.folder.weights_bytes())


def write_weights(store: Store, weights: Weights, *, of_ranks: bool = False) -> None:
    """Write the file of weights, if it is not there or, at first, if it is damaged; under cache.lock.

    Blocks: for the disk. The content of a file is looked at once for each of these objects.
    Args:
        of_ranks: for ranks who join the epoch, by a file in `ranks/` that is linked next; else for a state.
    Raises: CacheFullError: what is leased leaves no room.
    """
    name = _name(weights.name)
    if weights not in _sound:
        with suppress(MissingSegmentsError):
            read_weights(store, weights.name)
            _sound.add(weights)
    if weights not in _sound or not store.folder.touch_weights(name, of_ranks=of_ranks):
        data = arrow_file(pa.schema([("weight", pa.float32())]), [weights.of_rows])
        kept = max(1, min(_MAX_KEPT, store.settings.notes_bytes // data.size))
        names_of_ranks = _names_of_ranks(store)
        for others in reversed(range(kept + of_ranks)):
            store.folder.drop_weights(others, names_of_ranks)
            try:
                store.require_room(data.size)
                break
            except CacheFullError:
                if not others:
                    raise
        store.folder.link_weights(name, data, of_ranks=of_ranks)
        _sound.add(weights)


def _names_of_ranks(store: Store) -> set[str]:
    """The files by which ranks may still join an epoch."""
    names = set()
    for data in store.folder.held_ranks():
        with suppress(CacheFormatError):  # nobody can join it
            names.add(_name(RanksRecord.unpack(data).weights))
    return names


def read_weights(
    store: Store, name: str, whose: str = "of the state's epoch", way: str = _NEXT_EPOCH
) -> Weights:
    """Read the weights that a state names.

    Args:
        whose, way: words of the error where another names them.
    Raises: MissingSegmentsError: the file has left, or is damaged. ValueError: no such name.
    """
    if not isinstance(name, str) or not WEIGHTS_NAME.fullmatch(_name(name)):
        raise ValueError(f"the state is damaged: weights of the name {name!r}")
    try:
        with pa.ipc.open_file(store.folder.read_weights(_name(name))) as file:
            batch = file.get_batch(0)
        weights = Weights(np.frombuffer(batch.column(0).buffers()[1], np.float32, len(batch)))
        if weights.name == name:
            return weights
        why = "are damaged"
    except FileNotFoundError:
        why = "have left the cache"
    except (pa.ArrowException, OSError, ValueError, LookupError) as error:  # of what Arrow meets there
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        why = f"are damaged ({error})"
    raise MissingSegmentsError(f"the weights {whose} {why}: {way}")


def _name(digest: str) -> str:
    return f"{digest}.weights.arrow"


_sound: weakref.WeakSet[Weights] = weakref.WeakSet()  # whose file was found, or made, to be sound
