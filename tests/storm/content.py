"""Content: what the storm's rows hold, a function of their id, and the checks of what is delivered.

A plain writer numbers its rows, one after another: `writer << 32 | number`. A sampler of a pool draws
its ids: so many bits that none comes twice, unless a task was published twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import arrowcache as ac
from arrowcache.reading.columns import Values

WORDS = 1024
ROW_BYTES = 8 + 4 * WORDS  # without what is ragged
SCHEMA = ac.Schema(
    {"id": ac.Tensor("int64"), "words": ac.Tensor("int32", (32, 32)), "tail": ac.Ragged("int32")}
)
SEGMENT_ROWS = 64
_DRAWN = 1 << 61  # ids of pools begin here
_LADDER = np.arange(WORDS, dtype=np.uint32) * np.uint32(0x9E3779B1)

Batch = dict[str, Any]


def _seeds(ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    low, high = ids & 0xFFFFFFFF, ids >> 32
    return ((low * 0x85EBCA77 + high * 0xC2B2AE3D) & 0xFFFFFFFF).astype(np.uint32)


def words_of(ids: NDArray[np.int64]) -> NDArray[np.int32]:
    """(rows, 32, 32): another value in each place."""
    return (_seeds(ids)[:, None] + _LADDER).view(np.int32).reshape(len(ids), 32, 32)


def tails_of(ids: NDArray[np.int64]) -> Values:
    """Ragged: 0 to 6 numbers a row."""
    counts = ids % 7
    offsets = np.concatenate(([0], np.cumsum(counts)))
    places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    return Values((np.repeat(_seeds(ids), counts) + places.astype(np.uint32)).view(np.int32), offsets)


def rows_of(ids: NDArray[np.int64]) -> Batch:
    """Samples, as `Writer.extend` takes them."""
    data, offsets = tails_of(ids)
    return {"id": ids, "words": words_of(ids), "tail": np.split(data, offsets[1:-1])}


def draws(rng: np.random.Generator) -> Any:
    """The sampler of pools."""
    while True:
        rows = rows_of(rng.integers(_DRAWN, 2 * _DRAWN, 16))
        for number in range(16):
            yield {name: values[number] for name, values in rows.items()}


def as_arrays(batch: Mapping[str, Any]) -> Batch:
    """A batch of any kind of loader, over the same memory."""
    return {name: _as_array(values) for name, values in batch.items()}


def _as_array(values: Any) -> Any:
    if isinstance(values, np.ndarray | Values):
        return values
    if values.is_nested:
        return Values(values.values().numpy(), values.offsets().numpy())
    return values.numpy()


def check(batch: Mapping[str, Any]) -> int:
    """Make sure that every row is what was written; returns how many there are."""
    arrays = as_arrays(batch)
    ids, tail = arrays["id"], arrays["tail"]
    assert np.array_equal(arrays["words"], words_of(ids)), "a row that was never written"
    expected = tails_of(ids)
    assert np.array_equal(tail.offsets - tail.offsets[0], expected.offsets), "ragged rows of another length"
    data = tail.data[tail.offsets[0] : tail.offsets[-1]]
    assert np.array_equal(data, expected.data), "a ragged row that was never written"
    return len(ids)


class Pass:
    """The rows of one epoch: each is checked as it comes, all of them when it is over."""

    def __init__(self) -> None:
        self._ids: list[NDArray[np.int64]] = []
        self._places: list[NDArray[np.int64]] = []

    def add(self, batch: Mapping[str, Any]) -> int:
        """Check a batch; returns its rows."""
        rows = check(batch)
        arrays = as_arrays(batch)
        self._ids.append(arrays["id"].copy())
        if "_seq" in arrays:
            self._places.append(arrays["_seq"] << 32 | arrays["_row"])
        return rows

    def end(self, *, is_whole: bool) -> None:
        """Make sure that no row came twice and, of a whole epoch, that none is missing between two."""
        ids = np.sort(np.concatenate([*self._ids, np.empty(0, np.int64)]))
        assert len(np.unique(ids)) == len(ids), "a row came twice, or a task was published twice"
        if self._places:
            places = np.concatenate(self._places)
            assert len(np.unique(places)) == len(places), "a place came twice"
        if is_whole:
            written = ids[ids < _DRAWN]
            gaps = np.diff(written)[np.diff(written >> 32) == 0]
            assert (gaps == 1).all(), "rows between two that were delivered are missing"
