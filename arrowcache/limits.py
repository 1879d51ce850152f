"""Limits: the clocks, waits, sizes and counts that a test sets, as one value.

Each is read where it acts, as `Limits.current.join_seconds`, when it acts. So `Limits.current = Limits(...)`
holds for all that this process does from then on, and for its forked children: nobody passes it on. Users
have no use for them: what they may choose is an argument.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest waits, and how much of anything is taken at a time."""

    current: ClassVar[Limits]

    # clocks of what is counted and shown
    clock: Callable[[], float] = time.perf_counter
    wall_clock: Callable[[], float] = time.time

    # the engine
    inline_bytes: int = 64 << 10  # fewer bytes are not worth waking a thread
    held_gil_chunks: int = 16  # 4 MiB, copied in 0.4 ms; beside a busy thread the GIL takes 5 ms to come back
    stuck_seconds: float = 5.0  # for native threads that the kernel holds, as on a dead disk

    # segments
    list_elements: int = 2**31 - 1  # Arrow's list offsets are int32
    templates: int = 8  # that are kept
    template_bytes: int = 512 << 10  # of a larger one the offsets are most, and to be read anyway
    mapped_segments: int | None = None  # None: half of the mappings that the kernel allows this process
    mapped_views: int | None = None  # None: a quarter of them; the process' own threads need some

    # the cache's folder
    lock_warning_seconds: float = 30.0  # of waiting for room
    number_leap: int = 1_000_000  # more segments than anybody publishes before the kernel writes the counter
    display_seconds: float = 2.0  # longest wait of a display for cache.lock
    noted_rows: int = 1 << 20  # rows whose things said are in memory
    used_bytes: int = 1 << 20  # that say which rows a name has had, beyond what they would be anew, twice

    # what ends: threads and processes
    join_seconds: float = 5.0  # for a thread
    idle_read_seconds: float = 5.0  # for a thread without a read, before it ends
    late_read_seconds: float = 0.05  # before a read is begun again, at least
    worker_end_seconds: float = 1.0  # for a worker of a loader to end by itself
    worker_drop_seconds: float = 1.0  # for workers of a loader to let go of what they lease
    task_end_seconds: float = 1.0  # for a pool's tasks in a user's executor to end by themselves
    task_cancel_seconds: float = 4.0  # for those that are cancelled then

    # epochs
    idle_seconds: float = 1.0  # that an ended epoch's segments stay mapped
    grace_seconds: float = 1.0  # for a writer between two segments, a sampler or a rank that is starting
    joined_look_seconds: float = 0.25  # between two looks whether the other ranks have joined
    unjoined_epochs: int = 8  # that ended here, and that not all local ranks have begun, until a warning
    slow_segments: int = 1000  # so many are listed, leased and mapped in some 2 ms
    warm_bytes: int = 8 << 20  # of batches under way: more slots leave the processor's cache
    ahead_rows: int = 256  # asked of the disk at a time: enough for it to choose their order
    ahead_bytes: int = 64 << 20  # the same, where rows are large
    function_memory: float = 1 / 16  # of the memory, for columns that functions read
    expression_rows: int = 1 << 18  # that an expression looks at

    # documents packed into sequences: these decide which documents are together, but for the last
    bundle_tokens: int = 4 << 20  # of a bundle: in larger ones padding falls, and time rises
    bundle_sequences: int = 256  # of a bundle at least
    short_documents: int = 1 << 16  # of a bundle whose documents are short
    short_sequences: int = 128  # of a bundle whose documents are short
    group_tokens: int = 1 << 16  # of small batches, made together: a job and a slot cost as much

    # items of a dataset
    publish_seconds: float = 60.0  # that an item waits for a full segment
    parts_seconds: float = 2.0  # between two looks for small segments to merge, and merged ones to remove
    backoff_seconds: float = 30.0  # that nothing is stored after a failure
    state_seconds: float = 1.0  # between two states that are noted of a stream
    left_segments: int = 64  # that left, beyond as many as are there, until the others are renumbered

    # frameworks and sources
    small_leaf_bytes: int = 1 << 20  # smaller leaves of a batch share a copy to the device
    frame_bytes: int = 32 << 20  # of TensorFlow's arrow backend: TensorFlow takes a millisecond a frame
    parquet_bytes: int = 256 << 10  # drawn at a time: copied twice before it has left the processor's cache

    # explore
    compared_values: int = 200_000  # of a column, from the oldest and from the newest segments each
    hashed_numbers: int = 1 << 21  # at a time
    summed_numbers: int = 1 << 21  # that a thread is given at a time
    distinct_values: int = 10_000  # counted by a summary
    grouping_values: int = 1000  # different ones that a column to group by may have
    exported_bytes: int = 16 << 20  # of a row group
    imported_rows: int = 1 << 16  # at a time
    neighbour_rows: int = 16384  # at a time
    map_numbers: int = 256  # of a row of a map
    plotted_segments: int = 400  # more are no wider than a pixel
    plotted_values: int = 4096  # of each

    @property
    def stop_seconds(self) -> float:
        """For a pool's tasks to end, in any way."""
        return self.task_end_seconds + self.task_cancel_seconds


Limits.current = Limits()
