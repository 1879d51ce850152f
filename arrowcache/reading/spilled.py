"""Spilled: rows of segments for which no mapping is left, read through one of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from arrowcache.native import maps
from arrowcache.native.rows import Rows
from arrowcache.reading.gather import Gather
from arrowcache.reading.placement import Placement
from arrowcache.reading.slots import Slot
from arrowcache.reading.values import Column, interleave
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.mapping import explained_at_open
from arrowcache.storage.store import Store
from arrowcache.storage.verification import check_file, unfit


class Spilled:
    """What `Placement` is, of a snapshot of which some segments are not mapped."""

    def __init__(self, store: Store, segments: Sequence[SegmentInfo], starts: NDArray[np.int64]) -> None:
        self._store, self._segments, self._starts = store, segments, starts

    def begin(
        self,
        ids: NDArray[np.int64],
        names: Sequence[str],
        out: object,  # noqa: ARG002  # it is the slot's
        slot: Slot,
        *,
        ask_ahead: bool,
    ) -> Gather:
        """`Placement.begin`; it has ended when this returns."""
        arrays = slot.arrays()
        whole = self.gather(ids, names, arrays, ask_ahead=ask_ahead)
        return Gather(None, {}, {name: column for name, column in whole.items() if name not in arrays})

    def gather(
        self,
        ids: NDArray[np.int64],
        names: Sequence[str],
        arrays: Mapping[str, NDArray[Any]],
        *,
        ask_ahead: bool,  # noqa: ARG002
    ) -> dict[str, Column]:
        """`Placement.gather`."""
        indices = self._starts.searchsorted(ids, side="right") - 1
        parts: list[tuple[NDArray[np.intp], dict[str, Column]]] = []
        for index in np.unique(indices).tolist():
            places = np.flatnonzero(indices == index)
            some = {name: np.empty((len(places), *a.shape[1:]), a.dtype) for name, a in arrays.items()}
            rest = ids[places] - self._starts[index]
            parts.append((places, _gather_one(self._segments[index], self._store, rest, names, some)))
            for name, array in arrays.items():
                array[places] = some[name]
        return {
            name: arrays[name]
            if name in arrays
            else interleave(len(ids), [(at, part[name]) for at, part in parts])
            for name in names
        }


def _gather_one(
    segment: SegmentInfo,
    store: Store,
    ids: NDArray[np.int64],
    names: Sequence[str],
    arrays: Mapping[str, NDArray[Any]],
) -> dict[str, Column]:
    file = maps.file(os.fsencode(store.path_of(segment)))
    try:
        file.open(store.settings.segment_bytes, 0)
        file.map()
        layout = check_file(pa.foreign_buffer(file.address, file.nbytes), store, segment, check_bytes=False)
        rows = Rows(np.array([0, segment.rows]))
        rows.put(0, file.address, file.nbytes, layout.buffers.buffer_info()[0], 0, 0, 0)
        return Placement(store.settings.schema, rows).gather(ids, names, arrays, ask_ahead=False)
    except (OSError, ValueError) as error:
        shown = explained_at_open(error)
        raise unfit(shown) or shown from None
    finally:
        file.close()
        maps.unmap([file])
