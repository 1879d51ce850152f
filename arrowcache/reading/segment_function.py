"""SegmentFunction: a user's function of a segment's columns, called once for each segment.

Its result is kept as long as the segment is in the loader's snapshots; where it read annotations, only until
there are newer ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from arrowcache.reading.row_columns import RowColumns, SnapshotValues
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.annotations import Annotations
from arrowcache.storage.layout import SegmentInfo

T = TypeVar("T")


class SegmentFunction(Generic[T]):
    """One function of one loader.

    Args:
        checked: makes what is kept of a result, or raises.
    """

    def __init__(
        self,
        annotations: Annotations,
        function: Callable[[Mapping[str, Any]], object],
        checked: Callable[[object, SegmentInfo], T],
    ) -> None:
        self._annotations, self._function, self._checked = annotations, function, checked
        self._known: dict[int, tuple[T, object]] = {}  # by segment, and of which annotations

    @property
    def changes(self) -> bool:
        """True if a result of the last snapshot is of annotations or ages, and so not for ever."""
        return any(version is not None for _, version in self._known.values())

    def of(self, snapshot: Snapshot) -> list[T]:
        """Return its result for each segment of a snapshot, oldest first.

        Blocks: while the columns that it asks for are read. Raises: whatever it raises.
        """
        values, known = SnapshotValues(self._annotations, snapshot), {}
        for index, segment in enumerate(snapshot.segments):
            found = self._known.get(segment.seq)
            if found is None or (found[1] is not None and found[1] != values.version):
                columns = RowColumns(snapshot, index, values)
                result = self._checked(self._function(columns), segment)
                found = result, columns.version
            known[segment.seq] = found
        self._known = known
        return [result for result, _ in known.values()]
