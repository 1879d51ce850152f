"""Loader: epochs over a cache, as batches of NumPy arrays.

`iter` takes the snapshot, so whatever was published before it is in the epoch; a background
thread gathers batches into the ring ahead of the consumer. One epoch is in progress at a time.
This module decides what an epoch is; order.py which rows, ring.py where to, pipeline.py when.
"""

from __future__ import annotations

import operator
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from arrowcache.errors import LoaderTimeoutError
from arrowcache.reading.order import EpochOrder
from arrowcache.reading.pipeline import Batch, Clock, Epoch, Made, Pipeline
from arrowcache.reading.placement import Values
from arrowcache.reading.ring import GroupSize, Ring
from arrowcache.reading.snapshot import Column, Snapshot
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.recovery import HasStore, store_of
from arrowcache.units import parse_seconds

if TYPE_CHECKING:
    from typing import Self

SHUFFLES = ("rows", None)
_POLL_SECONDS = 0.02
_NO_STALL = 0.05  # a smaller share of the time is not worth a word


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """A loader since it was made.

    `bytes` are what was gathered for delivered batches; `seconds` the time inside epochs, from
    their `iter` on; `stall_seconds` the part of it that the consumer waited, for rows or for a
    batch. `bottleneck` is what to speed up: "consumer" (the training step: the loader waits for
    it), "samplers" (too few rows), "gather" (memory or disk) or "transform"; "none" before the
    first batch.
    """

    epochs: int
    batches: int
    rows: int
    bytes: int
    seconds: float
    stall_seconds: float
    bottleneck: str


class Loader:
    """Batches of a cache's rows: `dict[str, ndarray]`; each `for` is an epoch over a new snapshot.

    Args:
        cache: a Cache, or the path of one.
        batch_size: rows of a batch.
        shuffle: "rows" (the whole snapshot, uniformly) or None (oldest first).
        seed: with the epoch's number it decides the order, for given segments.
        columns: which; None for all.
        drop_last: leave out an incomplete last batch; else it is short.
        transform: called with each batch, in the background thread; what it returns is yielded.
        prefetch: batches kept ready, at least.
        where: SegmentInfo -> bool, which segments to read.
        with_ids: add `_seq`, `_row` (int64) and `_age_seconds` (float64) of each row.
        epoch_rows: rows of an epoch, whatever the snapshot holds: fewer are drawn without
            replacement, more are reshuffled passes.
        wait_rows: an epoch waits until so many rows, and one full batch, are published.
        timeout: seconds that an epoch waits for rows, and a step for its batch; None: for ever.

    Batches are (batch_size, *shape) arrays over reused memory that nothing overwrites while any
    array over it lives; text and bytes come as lists, ragged columns as `Values(data, offsets)`.
    Raises: ValueError, TypeError: an argument that does not fit. FileNotFoundError,
        CacheFormatError: no such cache.
    """

    def __init__(
        self,
        cache: HasStore | str | os.PathLike[str],
        batch_size: int = 64,
        *,
        shuffle: str | None = "rows",
        seed: int = 0,
        columns: Sequence[str] | None = None,
        drop_last: bool = True,
        transform: Callable[[Batch], Batch] | None = None,
        prefetch: int = 4,
        where: Callable[[SegmentInfo], bool] | None = None,
        with_ids: bool = False,
        epoch_rows: int | None = None,
        wait_rows: int = 1,
        timeout: float | None = 60.0,
    ) -> None:
        self._store = store_of(cache)
        self._batch_size = _positive(batch_size, "batch_size")
        if shuffle not in SHUFFLES:
            raise ValueError(f"shuffle={shuffle!r} is unknown: use one of {SHUFFLES}")
        self._shuffle = shuffle
        self._seed = _positive(seed, "seed", least=0)
        self._names = self._store.settings.schema.select(columns)
        if not self._names:
            raise ValueError("columns is empty: name at least one, or None for all")
        for name, function in (("transform", transform), ("where", where)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function or None, not {function!r}")
        self._drop_last = drop_last
        self._transform = transform
        self._prefetch = _positive(prefetch, "prefetch")
        self._where = where
        self._with_ids = with_ids
        self._epoch_rows = None if epoch_rows is None else _positive(epoch_rows, "epoch_rows")
        self._wait_rows = _positive(wait_rows, "wait_rows")
        self._timeout = parse_seconds(timeout, "timeout")
        if self._timeout == 0:
            raise ValueError("timeout=0 leaves no time for any batch: give seconds > 0, or None")
        if self._epoch_rows is not None and drop_last and self._epoch_rows < self._batch_size:
            raise ValueError(
                f"epoch_rows={epoch_rows} is less than one batch of {batch_size}: "
                "raise it, or pass drop_last=False"
            )
        fixed = self._store.settings.schema.fixed
        self._fixed = {n: (fixed[n].shape, fixed[n].numpy_dtype) for n in self._names if n in fixed}
        self._variable = tuple(name for name in self._names if name not in fixed)
        self._ring = Ring(self._fixed, self._batch_size)
        self._pipeline: Pipeline | None = None
        self._current: weakref.ref[EpochIterator] | None = None  # a dropped one has ended
        self._steps: int | None = None
        self._next_epoch = 0
        self._closed = False
        self._clock = Clock()
        self._batches = self._rows = self._bytes = 0
        self._seconds = self._stall_seconds = 0.0

    def __iter__(self) -> EpochIterator:
        """Begin the next epoch: take the snapshot, at once. An epoch still in progress ends.

        Blocks: until `wait_rows` rows are published.
        Raises: LoaderTimeoutError: they were not in time.
        """
        if self._closed:
            raise ValueError("the loader is closed: make a new one")
        if self._pipeline is not None and self._pipeline.is_inherited():
            self._pipeline = self._current = None  # its thread stayed in the process that forked this one
        self._end_current()
        pipeline = self._start()
        snapshot = self._wait_for_rows()
        order = EpochOrder(
            [segment.rows for segment in snapshot.segments],
            self._batch_size,
            shuffle=self._shuffle,
            seed=self._seed,
            epoch=self._next_epoch,
            epoch_rows=self._epoch_rows,
            drop_last=self._drop_last,
        )
        self._next_epoch += 1
        epoch = Epoch(snapshot, lambda: self._produce(snapshot, order))
        self._steps = order.steps
        iterator = EpochIterator(self, pipeline, epoch, order)
        self._current = weakref.ref(iterator)
        pipeline.begin(epoch)
        return iterator

    @property
    def steps(self) -> int | None:
        """Batches of the epoch in progress, or of the last one; None before the first."""
        return self._steps

    def stats(self) -> LoaderStats:
        """What was delivered so far, and what held it up."""
        iterator = self._iterator()
        running = iterator.running_seconds() if iterator is not None else 0.0
        return LoaderStats(
            epochs=self._next_epoch,
            batches=self._batches,
            rows=self._rows,
            bytes=self._bytes,
            seconds=self._seconds + running,
            stall_seconds=self._stall_seconds,
            bottleneck=self._bottleneck(self._seconds + running),
        )

    def close(self) -> None:
        """End the epoch and the background thread; leases nothing afterwards. Idempotent."""
        self._closed = True
        self._end_current()
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {self._store.folder.path}: batch_size={self._batch_size}, "
            f"shuffle={self._shuffle!r}, epoch {self._next_epoch}>"
        )

    def _finish(self, batch: Batch) -> Batch:
        """The last touch, in the consumer's thread; loaders for a framework convert here."""
        return batch

    def _start(self) -> Pipeline:
        if self._pipeline is None:
            self._pipeline = Pipeline(self._prefetch)
        return self._pipeline

    def _iterator(self) -> EpochIterator | None:
        return None if self._current is None else self._current()

    def _end_current(self) -> None:
        iterator = self._iterator()
        if iterator is not None:
            iterator.close()

    def _wait_for_rows(self) -> Snapshot:
        """Take a snapshot of enough rows; leases nothing while there are too few."""
        started, needed = time.perf_counter(), self._wait_rows
        if self._drop_last:
            needed = max(needed, self._batch_size)
        deadline = None if self._timeout is None else started + self._timeout
        assert self._pipeline is not None
        try:
            while True:
                snapshot = Snapshot.take(self._store, self._where)
                enough = False
                try:
                    rows = len(snapshot)
                    if rows >= needed:
                        rows = snapshot.map_all()
                    self._pipeline.drop_parked()  # after the new one: what both read stays mapped
                    enough = rows >= needed
                finally:  # Ctrl-C while it maps, too, leaves nothing leased
                    if not enough:
                        snapshot.close()
                if enough:
                    return snapshot
                if deadline is not None and time.perf_counter() > deadline:
                    raise LoaderTimeoutError(
                        f"waited {self._timeout:g} s for {needed} rows in {self._store.folder.path}, "
                        f"which has {rows}{' that `where` accepts' if self._where else ''}: "
                        "is a sampler running? lower wait_rows or batch_size, or raise timeout"
                    )
                time.sleep(_POLL_SECONDS)
        finally:
            waited = time.perf_counter() - started
            self._clock.add("samplers", waited)
            self._seconds += waited
            self._stall_seconds += waited

    def _produce(self, snapshot: Snapshot, order: EpochOrder) -> Iterator[list[Made]]:
        """Make an epoch's batches: the first alone, for its latency, then in groups."""
        ring, step = self._ring, 0
        group = GroupSize(ring.usual_group, ring.largest_group)
        while step < order.steps:
            size = 1 if ring.is_hoarded else group.now  # what is kept keeps its whole group
            last = min(step + size, order.steps)
            wall, cpu = time.perf_counter(), time.thread_time()
            made = self._make(snapshot, order, step, last)
            group.note(time.perf_counter() - wall, time.thread_time() - cpu)
            if self._transform is None:
                yield made
            else:
                yield from self._transformed(self._transform, made)
            del made  # or this frame would keep the group's memory
            step = last

    def _make(self, snapshot: Snapshot, order: EpochOrder, first: int, last: int) -> list[Made]:
        started = time.perf_counter()
        ids = order.batches(first, last)
        group = self._ring.take(len(ids))
        snapshot.gather_into(ids, tuple(self._fixed), group.arrays())
        made = []
        for number in range(last - first):
            arrays = group.hand_out(number)
            chosen = ids[number * self._batch_size : (number + 1) * self._batch_size]
            nbytes = sum(array.nbytes for array in arrays.values())
            batch: Batch = arrays
            if self._variable:
                values = snapshot.gather_into(chosen, self._variable, {})
                nbytes += sum(map(_nbytes, values.values()))
                batch = {name: arrays[name] if name in arrays else values[name] for name in self._names}
            if self._with_ids:
                batch |= snapshot.locate(chosen)
            made.append(Made(batch, len(chosen), nbytes))
        group.close()
        self._clock.add("gather", time.perf_counter() - started)
        return made

    def _transformed(self, transform: Callable[[Batch], Batch], made: list[Made]) -> Iterator[list[Made]]:
        """One batch at a time: a transform that is slow or fails holds up no batch before its own."""
        made.reverse()
        while made:
            started = time.perf_counter()
            plain = made.pop()
            ready = [plain._replace(batch=transform(plain.batch))]
            del plain
            self._clock.add("transform", time.perf_counter() - started)
            yield ready

    def _count(self, made: Made, stalled: float) -> None:
        self._batches += 1
        self._rows += made.rows
        self._bytes += made.nbytes
        self._stall_seconds += stalled

    def _bottleneck(self, seconds: float) -> str:
        if not self._batches:
            return "none"
        waited = dict(self._clock.seconds)
        if self._stall_seconds < _NO_STALL * seconds:
            return "consumer"
        return max(waited, key=lambda stage: waited[stage])


class EpochIterator:
    """The batches of one epoch. Ends by exhaustion, `close()`, a newer epoch, or being dropped."""

    def __init__(self, loader: Loader, pipeline: Pipeline, epoch: Epoch, order: EpochOrder) -> None:
        self.order = order
        self.delivered = 0
        self._loader = loader
        self._pipeline = pipeline
        self._epoch = epoch
        self._started = time.perf_counter()

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Blocks: until it is made, at most the loader's timeout.
        Raises: LoaderTimeoutError; what a transform raised; RuntimeError: a newer epoch began.
        """
        if self._epoch.ended:
            if self.delivered < self.order.steps and self._loader._iterator() is not self:
                raise RuntimeError("this epoch ended when a newer one began: iterate that one")
            raise StopIteration
        started = time.perf_counter()
        try:
            made = self._pipeline.next(self._epoch, self._loader._timeout)
        except BaseException:
            self.close()
            raise
        if made is None:
            self.close()
            raise StopIteration
        self.delivered += 1
        self._loader._count(made, time.perf_counter() - started)
        return self._loader._finish(made.batch)

    def running_seconds(self) -> float:
        """Since the epoch began; 0 once it ended and was counted."""
        return 0.0 if self._epoch.ended else time.perf_counter() - self._started

    def close(self) -> None:
        """End the epoch: its batches are dropped, its snapshot is let go. Idempotent."""
        if not self._epoch.ended:
            self._loader._seconds += self.running_seconds()
            self._pipeline.end(self._epoch)

    def __del__(self) -> None:
        self.close()


def _nbytes(values: Column) -> int:
    """Bytes of gathered variable-length values."""
    if isinstance(values, Values):
        return values.data.nbytes
    return sum(map(len, values))


def _positive(value: int, name: str, least: int = 1) -> int:
    """Check a count.

    Raises: TypeError: not an int. ValueError: below `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {value!r}") from None
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{name}={value!r} must be an int of at least {least}")
    return number
