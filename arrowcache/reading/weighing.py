"""Weighing: decides how often an epoch draws each row: `weights=` of a loader, frozen as an epoch begins.

Of annotations a row without one weighs as much as the heaviest other: what is new is seen soon, as in
"Prioritized Experience Replay" (Schaul, Quan, Antonoglou and Silver, ICLR 2016).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from arrowcache.arrow.convert import require_unmasked
from arrowcache.arrow.expression import shown
from arrowcache.arrow.schema import Schema, Tensor
from arrowcache.errors import CacheFullError, warn
from arrowcache.reading.row_functions import (
    PythonFunction,
    RowFunction,
    StoredFunction,
    is_expression,
    require_expression,
    table_function,
)
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.weights import Weights
from arrowcache.reading.weights_file import missing_bytes
from arrowcache.storage.annotations import Annotations
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.note_lines import Rows
from arrowcache.storage.row_ids import RowId
from arrowcache.storage.row_values import RowValues
from arrowcache.storage.store import Store
from arrowcache.units import did_you_mean, require_text


class Weighing:
    """The weights that one loader gives to rows.

    Args:
        weights, expect: as of `Loader`; weights are not None.
    Raises: ValueError: a name that is neither a column nor an annotation of any row, while rows have other
        annotations, or it is like a column's; or an expression that does not fit.
    Warns: RuntimeWarning: a name that is like no column's, and no row has an annotation yet. It is an error
        of `of` once rows have only others.
    """

    def __init__(self, store: Store, weights: Any, expect: Sequence[str] = ()) -> None:
        self._store, self._annotations = store, Annotations.of(store)
        self._reads_notes: bool | None = None  # of a function that was not called yet
        self._values: RowValues | None = None
        self._unknown = ""  # the name, while no row has an annotation of it, nor is one expected
        self.function: RowFunction[NDArray[np.float64]] | None = None
        schema = store.settings.schema
        if is_expression(weights):
            used, kind = require_expression(weights, "weights", schema, self._annotations.names(expect))
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
                raise ValueError(
                    f"weights={shown(weights)} gives {kind}, not a number for each row: cast "
                    "it, such as (pyarrow.compute.field('label') == 3).cast('float32')"
                )
            function = table_function(weights, schema)
            self.function = StoredFunction(
                self._annotations, schema, used, function, _nulls_as_nan, f"weights={shown(weights)}"
            )
        elif callable(weights):
            self.function = PythonFunction(self._annotations, weights, _floats, expect, "weights=")
        elif weights in schema:
            self.function = StoredFunction(self._annotations, schema, [weights], itemgetter(weights), _floats)
        else:
            self._values = RowValues(self._annotations.notes, weights)
            self._reads_notes = True
            self._unknown = "" if weights in expect else weights
            if not self._is_known():
                warn(
                    f"no row has an annotation yet, and there are the columns {', '.join(schema)}: "
                    f"weights={weights!r} draws all rows alike until cache.annotate(ids, {weights}=...), and "
                    "is an error of the next epoch once rows have only other annotations; pass "
                    f"expect={weights!r} if they are to come"
                )
        if self.function is not None:
            self._reads_notes = self.function.reads_notes
        #: Missing values weigh as much as the heaviest; those of a function or column are an error.
        self._may_lack = self._values is not None or is_expression(weights)
        if store.settings.dataset is not None:  # whose items have no notes
            self._reads_notes = False

    def _is_known(self) -> bool:
        """True if some row has or had an annotation of this name, or one is expected.

        Raises: ValueError: rows have others alone, or it is like a column's. Annotations that leave later do
            not matter.
        """
        if self._unknown:
            names, name = self._annotations.names(), self._unknown
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

    def reserve(self, rows: int, where: Callable[[SegmentInfo], bool] | None, *, of_ranks: bool) -> None:
        """Have room for a file of weights of so many rows; if they are of annotations, also for these.

        An epoch calls it before it leases all that might leave. What cannot be had is left to who needs it.
        Blocks: for cache.lock, and while annotations are written.
        Raises: at first, what a function raises of one of the segments that pass `where`.
        """
        if self._reads_notes is None and self.function is not None:
            first = next((each for each in self._store.segments() if where is None or where(each)), None)
            if first is not None:
                with Snapshot.take(self._store, lambda segment: segment.seq == first.seq) as snapshot:
                    snapshot.map_all()
                    for _ in self.function.ahead(snapshot):  # `of` is asked for all of them next
                        pass
                    self._reads_notes = self.function.reads_notes
        if self._reads_notes:
            self._annotations.flush_or_warn()
        with self._store.locked(), suppress(CacheFullError):
            nbytes = missing_bytes(self._store, rows, of_ranks=of_ranks)
            self._store.require_room(nbytes)
            if self._reads_notes:
                self._store.require_room(nbytes + self._annotations.notes.missing_bytes(rows))

    def of(self, snapshot: Snapshot) -> Weights:
        """Return the weights of the selected rows of a snapshot, all of whose segments are mapped.

        Blocks: while columns of new segments, and annotations, are read.
        Raises: ValueError: a weight below 0, infinite or, but of annotations, NaN; all are 0. TypeError: a
            function's result is no array of numbers. Whatever it raises.
        """
        found: NDArray[np.floating[Any]]
        if self._values is None:
            assert self.function is not None
            found = np.concatenate(self.function.of(snapshot))
        else:
            self._is_known()
            self._annotations.flush_or_warn()
            found = self._values.of(Rows.of_counts(snapshot.seqs, snapshot.segment_rows))
        selected = snapshot.selected
        found = found.copy() if selected.are_all else found[selected.ids(np.arange(selected.size))]
        weights = Weights(_scaled(found))
        if self._may_lack and (bad := weights.table.bad) >= 0 and np.isnan(found[bad]):
            heaviest = np.fmax.reduce(found, initial=0)
            found[np.isnan(found)] = heaviest if 0 < heaviest < np.inf else 1
            weights = Weights(_scaled(found))
        if (bad := weights.table.bad) >= 0:
            where = snapshot.locate(selected.ids(np.array([bad])))
            row = RowId(int(where["_seq"][0]), int(where["_row"][0]))
            raise ValueError(
                f"row {row} has the weight {found[bad]}: a weight is a finite number, at least 0"
            )
        if not weights.table.total:
            raise ValueError(f"all {len(found)} rows have the weight 0: give some more, to be drawn")
        return weights


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


def _floats(result: object, segment: SegmentInfo) -> NDArray[np.float64]:
    require_unmasked(result, f"weights= gave for segment {segment.seq}", 0)
    found = np.asarray(result)
    if found.dtype.kind not in "biuf" or found.shape != (segment.rows,):
        raise TypeError(
            f"weights= gave {type(result).__name__} of dtype {found.dtype} and shape {found.shape} for the "
            f"{segment.rows} rows of segment {segment.seq}: return a number for each row"
        )
    return found.astype(np.float64)


def _nulls_as_nan(found: pa.Array, segment: SegmentInfo) -> NDArray[np.float64]:
    """Weights of an expression, NaN where one is null."""
    values: NDArray[np.float64] = found.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if len(bad := np.flatnonzero(np.isnan(values) & found.is_valid().to_numpy(zero_copy_only=False))):
        row = RowId(segment.seq, int(bad[0]))
        raise ValueError(f"row {row} has the weight nan: a weight is a finite number, at least 0")
    return values
