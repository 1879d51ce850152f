"""Weighing: decides how often an epoch draws each row: `weights=` of a loader, frozen as an epoch begins.

Of annotations a row without one weighs as much as the heaviest other: what is new is seen soon, as in
"Prioritized Experience Replay" (Schaul, Quan, Antonoglou and Silver, ICLR 2016).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Schema, Tensor
from arrowcache.errors import CacheFullError
from arrowcache.reading.segment_function import SegmentFunction
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.weights import Weights
from arrowcache.reading.weights_file import missing_bytes
from arrowcache.storage.annotations import Annotations
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.note_lines import Rows
from arrowcache.storage.row_ids import RowId
from arrowcache.storage.row_values import RowValues
from arrowcache.storage.store import Store
from arrowcache.units import require_text


class Weighing:
    """The weights that one loader gives to rows.

    Args:
        weights: as of `Loader`, not None.
    """

    def __init__(self, store: Store, weights: str | Callable[[Mapping[str, Any]], object]) -> None:
        self._store, self._annotations = store, Annotations.of(store)
        self._reads_notes: bool | None = None  # of a function that was not called yet
        self._values: RowValues | None = None
        if callable(weights):
            self._function = SegmentFunction(self._annotations, weights, _floats)
        elif weights in store.settings.schema:
            self._function = SegmentFunction(self._annotations, lambda columns: columns[weights], _floats)
            self._reads_notes = False
        else:
            self._values = RowValues(self._annotations.notes, weights)
            self._reads_notes = True
        if store.settings.dataset is not None:  # whose items have no notes
            self._reads_notes = False

    def reserve(self, rows: int, where: Callable[[SegmentInfo], bool] | None, *, of_ranks: bool) -> None:
        """Have room for a file of weights of so many rows; if they are of annotations, also for these.

        An epoch calls it before it leases all that might leave. What cannot be had is left to who needs it.
        Blocks: for cache.lock, and while annotations are written.
        Raises: at first, what a function raises of one of the segments that pass `where`.
        """
        if self._reads_notes is None:
            first = next((each for each in self._store.segments() if where is None or where(each)), None)
            if first is not None:
                with Snapshot.take(self._store, lambda segment: segment.seq == first.seq) as snapshot:
                    snapshot.map_all()
                    self._function.of(snapshot)
                    self._reads_notes = self._function.changes
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
            found = np.concatenate(self._function.of(snapshot))
        else:
            self._annotations.flush_or_warn()
            found = self._values.of(Rows.of_counts(snapshot.seqs, snapshot.segment_rows))
        selected = snapshot.selected
        found = found.copy() if selected.are_all else found[selected.ids(np.arange(selected.size))]
        weights = Weights(_scaled(found))
        if self._values is not None and (bad := weights.table.bad) >= 0 and np.isnan(found[bad]):
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
    if weights is None or callable(weights):
        return weights
    if not isinstance(weights, str):
        raise TypeError(
            f"weights must be None, the name of an annotation or column, or a function, not {weights!r}"
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
    found = np.asarray(result)
    if found.dtype.kind not in "biuf" or found.shape != (segment.rows,):
        raise TypeError(
            f"weights= gave {type(result).__name__} of dtype {found.dtype} and shape {found.shape} for the "
            f"{segment.rows} rows of segment {segment.seq}: return a number for each row"
        )
    return found.astype(np.float64)
