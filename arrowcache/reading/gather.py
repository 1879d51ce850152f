"""Gather: columns of some rows on their way out of mapped segments.

Fixed-width columns take one copy of the engine's, all together. A variable-length one takes two: where its
values are, then the values. Guarantees: nothing is touched any more once it has ended, in whatever way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Ragged, VariableType
from arrowcache.arrow.segment import element_bytes
from arrowcache.errors import CorruptSegmentError
from arrowcache.native import engine
from arrowcache.native.rows import Rows
from arrowcache.reading.output import aligned
from arrowcache.reading.values import Column, Values, to_column

_STEP_SECONDS = 0.05  # between two looks for Ctrl-C, in a long copy


class Gather:
    """Columns of some rows on their way. Whoever has it calls `take` until that is True, or `cancel`."""

    then: Callable[[], None] | None = None  # called once it has ended, in whatever way; idempotent

    def __init__(
        self,
        fixed: engine.Copy | None,
        values: Mapping[str, ValuesGather],
        gathered: Mapping[str, Column] | None = None,
    ) -> None:
        self._fixed, self._values, self._gathered = fixed, values, gathered or {}
        if fixed is not None:
            accepted(fixed)

    def take(self, seconds: float) -> bool:
        """Help, then wait. Returns: whether it has ended.

        Blocks: as `engine.Copy.take`.
        Raises: OutsideError: as `Placement.begin`; CorruptSegmentError: a file has changed since it was
            checked; RuntimeError: this process was forked from the one that copies.
        """
        if self._fixed is not None:
            if not self._fixed.take(seconds):
                return False
            accepted(self._fixed)
        for values in self._values.values():
            if not values.take(seconds):
                return False
        self._end()
        return True

    def go_on(self) -> None:
        """Begin what could not be begun before something else had ended."""
        for values in self._values.values():
            values.go_on()

    def wait(self) -> Gather:
        """Wait for its end. Returns: itself. Blocks, raises: as `take`; Ctrl-C ends it."""
        try:
            while not self.take(_STEP_SECONDS):
                pass
        finally:
            self.cancel()
        return self

    def cancel(self) -> None:
        """End it. Idempotent. Blocks: as `engine.Copy.cancel`."""
        if self._fixed is not None:
            self._fixed.cancel()
        for values in self._values.values():
            values.cancel()
        self._end()

    def _end(self) -> None:
        if self.then is not None:
            self.then()
            self.then = None  # last: where Ctrl-C comes in between, it is called again

    def __del__(self) -> None:
        if self.then is not None:
            self.cancel()

    def values(self) -> dict[str, Column]:
        """The columns of variable length, once it has ended. Raises: CorruptSegmentError: text is none."""
        return {**self._gathered, **{name: values.column() for name, values in self._values.items()}}

    @property
    def was_on_disk(self) -> bool:
        """Once it has ended: whether a thread had to wait for the disk."""
        fixed = self._fixed is not None and self._fixed.was_on_disk
        return fixed or any(values.was_on_disk for values in self._values.values())


class ValuesGather:
    """A column of variable length on its way: first where its values are, then the values."""

    _copy: engine.Copy | None = None
    _is_over = False

    def __init__(
        self, rows: Rows, ids: NDArray[np.int64], buffer: int, kind: VariableType, name: str
    ) -> None:
        self._kind, self._name = kind, name
        self._found = engine.find_values(rows, ids, buffer, element_bytes(kind))
        accepted(self._found)
        self.go_on()

    def go_on(self) -> None:
        found = self._found
        if (
            self._copy is None
            and not self._is_over
            and found.has_ended()
            and found.refused < 0
            and found.damaged < 0
        ):
            self._begin_copy()

    def take(self, seconds: float) -> bool:
        if self._copy is None and not self._is_over:
            if not self._found.take(seconds):
                return False
            self._begin_copy()
        return self._copy is None or self._copy.take(seconds)

    def _begin_copy(self) -> None:
        accepted(self._found)
        if self._found.damaged >= 0:
            raise CorruptSegmentError(
                f"the offsets of column {self._name!r} point out of their file, so its bytes were altered "
                "after it was opened: run cache.verify()"
            )
        self._data = aligned(int(self._found.offsets[-1]))
        self._copy = engine.copy_values(self._found, self._data)

    def cancel(self) -> None:
        self._is_over = True  # first: its offsets may be half found
        if self._copy is not None:
            self._copy.cancel()
        self._found.cancel()

    @property
    def was_on_disk(self) -> bool:
        return self._found.was_on_disk or (self._copy is not None and self._copy.was_on_disk)

    def column(self) -> Column:
        kind, ends = self._kind, self._found.offsets
        if not isinstance(kind, Ragged):
            return to_column(kind, Values(self._data, ends))
        items = self._data.view(kind.numpy_dtype).reshape(-1, *kind.inner_shape)
        return Values(items, ends // kind.item_bytes)


def accepted(copy: engine.Copy) -> engine.Copy:
    """A copy that was begun, or has ended. Raises: OutsideError: it was refused."""
    if copy.refused >= 0:
        raise OutsideError(copy.refused)
    return copy


class OutsideError(Exception):
    """A row is out of range: the index of its number among those that were given."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index
