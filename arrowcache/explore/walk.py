"""Walk: a cache's segments one after another, oldest first, in bounded memory.

What is passed is released, so that samplers go on; the segment ahead is being read meanwhile. Nor does an
error keep anything: a notebook has the last one until the next, with all its frames.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import pyarrow as pa

from arrowcache.progress import progress_bar
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.mapping import will_need
from arrowcache.storage.recovery import HasStore

AnyCache = HasStore | str | os.PathLike[str]
P = ParamSpec("P")
R = TypeVar("R")


def walk(
    snapshot: Snapshot, columns: Sequence[str], what: str, progress: bool | None
) -> Iterator[tuple[SegmentInfo, pa.RecordBatch]]:
    """Read a snapshot's segments, each as a record batch over the mapped file, without a copy.

    Each is released once the next is asked for and nothing refers to its record batch any more.

    Args:
        what: is done, for the bar.
        progress: show a bar; None: in a terminal or a notebook.
    Raises: CorruptSegmentError: a damaged segment, which was quarantined.
    """
    batches = snapshot.record_batches(columns)
    with progress_bar(
        progress, has_widget=True, desc=what, total=snapshot.nbytes, unit="B", unit_scale=True
    ) as bar:
        ahead = _announced(next(batches, None))
        for count, segment in enumerate(snapshot.segments, start=1):
            batch, ahead = ahead, _announced(next(batches, None))
            yield segment, batch
            del batch
            snapshot.release_oldest(count)
            bar.update(segment.nbytes)


def _announced(batch: pa.RecordBatch | None) -> pa.RecordBatch | None:
    """Have the disk begin to read the columns."""
    for column in batch.columns if batch is not None else ():
        for buffer in buffers_of(column):
            will_need(buffer.address, buffer.size)
    return batch


def buffers_of(column: pa.Array) -> list[pa.Buffer]:
    """Where a column of a snapshot's record batch lies."""
    stored = column.storage if isinstance(column, pa.ExtensionArray) else column
    return [buffer for buffer in stored.buffers() if buffer is not None and buffer.size]


def keeps_nothing(function: Callable[P, R]) -> Callable[P, R]:
    """Have what a function raises, Ctrl-C too, refer to none of its values, which hold mappings and leases.

    Lines and messages of the traceback stay; so do the values of an error that was being handled before.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        before = sys.exc_info()[1]
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            seen: BaseException | None = error
            while seen is not None and seen is not before:
                traceback.clear_frames(seen.__traceback__)
                seen = seen.__context__
            raise

    return called
