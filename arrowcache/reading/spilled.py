"""Spilled: rows of segments for which no mapping is left, read through one of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.native.rows import Rows
from arrowcache.reading.mapped import MappedSegments
from arrowcache.reading.placement import Placement
from arrowcache.reading.values import Column, interleave
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.store import Store


def gather_spilled(
    mapped: MappedSegments,
    store: Store,
    segments: Sequence[SegmentInfo],
    starts: NDArray[np.int64],
    ids: NDArray[np.int64],
    names: Sequence[str],
    arrays: Mapping[str, NDArray[Any]],
) -> dict[str, Column]:
    """`Snapshot.gather_into`, of any of its segments."""
    indices = starts.searchsorted(ids, side="right") - 1
    parts: list[tuple[NDArray[np.intp], dict[str, Column]]] = []
    for index in np.unique(indices).tolist():
        places = np.flatnonzero(indices == index)
        some = {name: np.empty((len(places), *a.shape[1:]), a.dtype) for name, a in arrays.items()}
        with mapped.alone(segments[index], store) as found:
            rows = Rows(np.array([0, segments[index].rows]))
            rows.put(0, *found.words)
            one, rest = Placement(store.settings.schema, rows), ids[places] - starts[index]
            parts.append((places, one.gather(rest, names, some, ask_ahead=False)))
        for name, array in arrays.items():
            array[places] = some[name]
    return {
        name: arrays[name] if name in arrays else interleave(len(ids), [(at, p[name]) for at, p in parts])
        for name in names
    }
