"""Plan: where the leaves of a batch go.

A *column* is what shares memory and a copy: all small leaves of a batch, or one large one. It lies in pinned
memory as it does on the device, so that one copy of bytes takes it there. Leaves of a column are aligned.

Batches that are alike have one plan, and memory knows the tensors over it: they are made once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from arrowcache.torch.tensors import is_dense, strides_of_copy

SMALL_BYTES = 1 << 20  # leaves below share a column
_ALIGNMENT = 256


class Piece(NamedTuple):
    """Where a leaf lies in its column."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]


class Column(NamedTuple):
    """Leaves, by their numbers in the batch, and where they lie."""

    number: int  # in the batch: 0 has the small ones
    leaves: tuple[int, ...]
    pieces: tuple[Piece, ...]
    nbytes: int
    is_staged: bool  # it goes to pinned memory first; else the device reads it where it is


class Plan(NamedTuple):
    """The columns of a batch."""

    columns: tuple[Column, ...]
    readable: list[int]  # large leaves that the device reads where they are
    nbytes: int


class Memory:
    """Memory for a column, whichever lies there."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole, self.nbytes = whole, whole.nbytes
        self._last: tuple[Column | None, list[torch.Tensor]] = None, []

    def tensors(self, column: Column) -> list[torch.Tensor]:
        """The bytes of a column, and each of its leaves: views."""
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
        can_read: whether that reads a host tensor where it is.
    """

    def __init__(self, can_read: Callable[[torch.Tensor], bool]) -> None:
        self._can_read = can_read
        self._last: tuple[list[object], list[int], Plan] | None = None  # of what, its large leaves

    def plan(self, leaves: Sequence[torch.Tensor | None]) -> Plan:
        """The plan for some leaves; None: one that goes by itself."""
        of = [leaf is not None and (leaf.dtype, leaf.shape, leaf.stride()) for leaf in leaves]
        is_alike = self._last is not None and self._last[0] == of
        large = self._last[1] if is_alike else _large(leaves)
        readable = [number for number in large if self._reads(leaves[number])]
        if not is_alike or self._last[2].readable != readable:
            self._last = of, large, _planned(leaves, large, readable)
        return self._last[2]

    def _reads(self, leaf: torch.Tensor) -> bool:
        return is_dense(leaf) and not (leaf.is_conj() or leaf.is_neg()) and self._can_read(leaf)


def _large(leaves: Sequence[torch.Tensor | None]) -> list[int]:
    return [number for number, leaf in enumerate(leaves) if leaf is not None and leaf.nbytes >= SMALL_BYTES]


def _planned(leaves: Sequence[torch.Tensor | None], large: list[int], readable: list[int]) -> Plan:
    found = {number: leaf for number, leaf in enumerate(leaves) if leaf is not None}
    columns = [
        _column(place, {number: found.pop(number)}, is_staged=number not in readable)
        for place, number in enumerate(large, 1)
    ]
    if found:
        columns.append(_column(0, found, is_staged=True))
    nbytes = sum(piece.nbytes for column in columns for piece in column.pieces)
    return Plan(tuple(columns), readable, nbytes)


def _column(number: int, leaves: Mapping[int, torch.Tensor], *, is_staged: bool) -> Column:
    pieces, end = [], 0
    for leaf in leaves.values():
        pieces.append(Piece(end, leaf.nbytes, leaf.dtype, leaf.shape, strides_of_copy(leaf)))
        end += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
    return Column(number, tuple(leaves), tuple(pieces), end, is_staged)
