"""Plan: where the leaves of a batch lie in pinned memory and on the device.

A *column* shares memory and a copy: all small leaves of a batch, or one large one. It has the same layout in
pinned memory and on the device, so that one copy of bytes is enough. Leaves of a column are aligned.

Batches of the same shapes share a plan, and memory keeps the tensors over it: they are made once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from arrowcache.limits import Limits
from arrowcache.torch.tensors import is_dense, strides_of_copy

#: Host tensors, by their numbers in the batch.
Leaves = Mapping[int, torch.Tensor]
_LeafKind = tuple[torch.dtype, torch.Size, tuple[int, ...]]

_ALIGNMENT = 256


class Piece(NamedTuple):
    """The place of a leaf in its column."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]


class PlannedColumn(NamedTuple):
    """Leaves of a batch that are copied together: one large leaf, or all small ones."""

    number: int  # in the batch: 0 has the small ones
    leaves: tuple[int, ...]
    pieces: tuple[Piece, ...]
    nbytes: int
    is_staged: bool  # True: it goes through pinned memory; False: the device reads it in place


class CopyPlan(NamedTuple):
    """The columns of a batch, and the copies that bring it."""

    columns: tuple[PlannedColumn, ...]
    readable: list[int]  # large leaves that the device reads in place
    nbytes: int


class ColumnMemory:
    """Memory for any column that fits."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole, self.nbytes = whole, whole.nbytes
        self._last: tuple[PlannedColumn | None, list[torch.Tensor]] = None, []

    def tensors(self, column: PlannedColumn) -> list[torch.Tensor]:
        """Return the bytes of a column, and each of its leaves: views."""
        if self._last[0] is not column:
            pieces = [
                self.whole[start : start + nbytes].view(dtype).as_strided(shape, strides)
                for start, nbytes, dtype, shape, strides in column.pieces
            ]
            self._last = column, [self.whole[: column.nbytes], *pieces]
        return self._last[1]


class Planner:
    """Plans batches for one device.

    Args:
        can_read: True for a host tensor that the device reads in place.
    """

    def __init__(self, can_read: Callable[[torch.Tensor], bool]) -> None:
        self._can_read = can_read
        nothing = CopyPlan((), [], 0)
        self._last: tuple[dict[int, _LeafKind], list[int], CopyPlan] = {}, [], nothing  # its large leaves

    def plan(self, leaves: Leaves) -> CopyPlan:
        kinds = {number: (leaf.dtype, leaf.shape, leaf.stride()) for number, leaf in leaves.items()}
        known, large, plan = self._last
        if is_new := known != kinds:
            small = Limits.current.small_leaf_bytes
            large = [number for number, leaf in leaves.items() if leaf.nbytes >= small]
        readable = [number for number in large if self._reads(leaves[number])]
        if is_new or plan.readable != readable:
            plan = _planned(leaves, large, readable)
            self._last = kinds, large, plan
        return plan

    def _reads(self, leaf: torch.Tensor) -> bool:
        return is_dense(leaf) and not (leaf.is_conj() or leaf.is_neg()) and self._can_read(leaf)


def _planned(leaves: Leaves, large: list[int], readable: list[int]) -> CopyPlan:
    columns = [
        _column(place, {number: leaves[number]}, is_staged=number not in readable)
        for place, number in enumerate(large, 1)
    ]
    if small := {number: leaf for number, leaf in leaves.items() if number not in large}:
        columns.append(_column(0, small, is_staged=True))
    return CopyPlan(tuple(columns), readable, sum(leaf.nbytes for leaf in leaves.values()))


def _column(number: int, leaves: Leaves, *, is_staged: bool) -> PlannedColumn:
    pieces, end = [], 0
    for leaf in leaves.values():
        pieces.append(Piece(end, leaf.nbytes, leaf.dtype, leaf.shape, strides_of_copy(leaf)))
        end += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
    return PlannedColumn(number, tuple(leaves), tuple(pieces), end, is_staged)
