"""Window: shuffles the rows of an epoch on the device.

reading/window.py gives an epoch as runs of rows in the order of their files, and steps, the places
of rows. `DevicePrefetcher` copies both, like any batch: in large copies, on its copy stream, some
ahead, into memory of its own. Here a run is copied into the ring, and a step's rows are selected from it,
into memory of the step's own: so batches are safe to keep, and the order is the host's, bit for bit.

The ring belongs to its consumer's stream: only work of this stream reads or writes it, in order. So no event
a step is needed, and nothing waits, except where the consumer changes to another stream, which goes on after
the one before. The price is that each row is copied once more, at the speed of the device's memory.

Invariants, beside those of lane.py, which tests/adapters/test_torch_window.py holds against a device in
software:

1. A stream reads or writes the ring after all work there that the stream before it was given.
2. The ring's memory is reused after all work there that any stream was given. No device is called where it
   dies.
3. A step is selected only if all runs before it came, in order. Otherwise its epoch ends with an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, NoReturn

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # documented there

from arrowcache.lifetimes import Origin, until_exit
from arrowcache.reading.assembly import Batch
from arrowcache.reading.portion import ReadyBatch
from arrowcache.reading.stream import BatchStream
from arrowcache.reading.window import Run, Step
from arrowcache.torch.backend import Backend, Event, Stream
from arrowcache.torch.deferred import keep
from arrowcache.torch.delivery import Delivery
from arrowcache.torch.iteration import Iteration
from arrowcache.torch.lane import ThreadLock
from arrowcache.units import format_bytes

_WORDS = (torch.int64, torch.int32, torch.int16)  # widest first: a row is selected in whole words


class _RingColumn(NamedTuple):
    """A column of the ring. `words` are (rows, words of a row) over `memory`."""

    memory: torch.Tensor
    words: torch.Tensor
    row_bytes: int
    dtype: torch.dtype
    row_shape: tuple[int, ...]


class Ring:
    """Rows on a device, in a ring. One thread at a time calls it."""

    def __init__(self, backend: Backend, rows: int) -> None:
        self._backend, self.rows = backend, rows
        self._columns: dict[str, _RingColumn] = {}
        self._stream: Stream = None  # the stream of its last use
        self._events: dict[Stream, Event] = {}
        self._retained: set[Stream] = set()
        self._origin = Origin()
        self._is_dropped = False
        self.batches = 0  # selected ones, and those that came complete

    @property
    def nbytes(self) -> int:
        """Bytes of the ring on the device."""
        return sum(column.memory.nbytes for column in [*self._columns.values()])

    @property
    def allocations(self) -> int:
        """The number of columns of the ring that were allocated."""
        return len(self._columns)

    def put(self, run: Run) -> None:
        """Copy a run on the device to its place.

        Raises: OutOfMemoryError: the device has no memory for the ring.
        """
        here = self._here()
        with torch.inference_mode(mode=False):
            if not self._columns:
                self._columns = self._allocated(run.columns, here)
            pairs = []
            for name, rows in run.columns.items():
                column, start = self._columns[name], run.place * self._columns[name].row_bytes
                flat = rows.reshape(-1).view(torch.uint8)
                pairs.append((column.memory[start : start + flat.nbytes], flat))
            self._backend.copy(pairs, here)

    def select(self, places: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the rows at places, (n,) int64 on the device: (n, *shape) a column, for the current stream.

        Raises: OutOfMemoryError: the device has no memory for the result.
        """
        here, count, columns = self._here(), len(places), self._columns
        pairs, found = [], {}
        with torch.inference_mode(mode=False):
            for name, (_, words, row_bytes, dtype, row_shape) in columns.items():
                memory = self._backend.memory(count * row_bytes, here)
                pairs.append((memory.view(words.dtype).view(count, -1), words))
                # no view, as one of `memory` would be
                found[name] = from_dlpack(to_dlpack(memory.view(dtype).view(count, *row_shape)))
            self._backend.select(pairs, places, here)
        return found

    def drop(self) -> None:
        """Release its memory, for ever. Calls no device. Idempotent."""
        self._is_dropped = True
        if not self._origin.is_here:
            keep(self._columns, self._events)
        self._columns = {}

    @until_exit
    def __del__(self) -> None:
        self.drop()

    def _here(self) -> Stream:
        """Return the current stream, which goes on after the stream of the ring's last use."""
        if self._is_dropped:  # by another thread, which ended the epoch
            raise StopIteration
        here, before = self._backend.current_stream(), self._stream
        if before is not None and before != here:
            if before not in self._events:
                self._events[before] = self._backend.event()
            self._backend.record(self._events[before], before)
            self._backend.wait(here, self._events[before])
            if here not in self._retained:
                for column in self._columns.values():
                    self._backend.retain(column.memory, here)
                self._retained.add(here)
        self._stream = here
        return here

    def _allocated(self, columns: Mapping[str, torch.Tensor], here: Stream) -> dict[str, _RingColumn]:
        found: dict[str, _RingColumn] = {}
        memory = words = None
        try:
            for name, rows in columns.items():
                row_bytes, row_shape = _row_bytes(rows), tuple(rows.shape[1:])
                memory = self._backend.memory(self.rows * row_bytes, here)
                word = next((word for word in _WORDS if row_bytes % word.itemsize == 0), torch.uint8)
                words = memory.view(word).view(self.rows, row_bytes // word.itemsize)
                found[name] = _RingColumn(memory, words, row_bytes, rows.dtype, row_shape)
        except torch.OutOfMemoryError as error:
            memory = words = None  # or the traceback would keep them
            found.clear()
            free, needed = self._backend.free_bytes(), self.rows * sum(map(_row_bytes, columns.values()))
            raise torch.OutOfMemoryError(
                f"two windows of {self.rows // 2} rows each take {format_bytes(needed)} of "
                f"{self._backend.device}, where {'less' if free is None else format_bytes(free)} is free: "
                "give a smaller window_bytes, or none, for the host to shuffle"
            ) from error
        self._retained = {here}
        return found


class WindowDelivery(Delivery):
    """A source of runs and steps. A step counts as delivered by `count`, once it is selected."""

    _receipt: ReadyBatch | None = None  # of the last lent step

    def __init__(
        self, stream: BatchStream, timeout_seconds: float | None, finish: Callable[[Batch], Batch]
    ) -> None:
        super().__init__(stream, timeout_seconds, partial(_finished, finish))

    def deliver(self, receipt: ReadyBatch | None) -> None:
        self._receipt = receipt
        if receipt is None:
            super().deliver(None)

    def count(self) -> None:
        """Count the last lent step as delivered. Raises: as `Delivery.deliver`."""
        super().deliver(self._receipt)


class WindowEpoch(Iterator[Batch]):
    """The batches of an epoch whose rows are shuffled on the device. Dropping it ends the epoch.

    Nobody else uses its ring before it has ended.
    """

    def __init__(self, delivery: WindowDelivery, found: Iteration, ring: Ring, names: Sequence[str]) -> None:
        self._delivery, self._found, self._ring, self._names = delivery, found, ring, names
        self._number = 0  # of the next run or step
        self._lock = ThreadLock()

    def __next__(self) -> Batch:
        """The next batch, on the device.

        Blocks, Raises: as `Iteration.next`.
        """
        if not self._lock.take():
            raise RuntimeError("another thread is in `next` of this epoch: one at a time takes batches")
        try:
            while True:
                found = next(self._found)
                try:
                    batch = self._come(found)
                    if batch is not None:
                        self._delivery.count()
                        return batch
                except BaseException as error:
                    self._delivery.close(type(error))
                    self._found.close()
                    raise
        finally:
            self._lock.leave()

    def close(self) -> None:
        self._found.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an epoch on a device cannot be pickled or copied")

    def _come(self, found: Run | Step) -> Batch | None:
        if found.number != self._number:
            raise RuntimeError("this epoch was interrupted, and its rows are lost: iterate anew")
        batch = None
        if isinstance(found, Run):
            self._ring.put(found)
        else:
            batch = found.others
            if found.places is not None:
                columns = found.others | self._ring.select(found.places)
                batch = {name: columns.pop(name) for name in self._names} | columns
            self._ring.batches += 1
        self._number += 1
        return batch


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.itemsize * math.prod(rows.shape[1:])


def _finished(finish: Callable[[Batch], Batch], found: Run | Step) -> Run | Step:
    if isinstance(found, Run):
        return found._replace(columns=finish(found.columns))
    places = None if found.places is None else torch.from_numpy(found.places)
    return found._replace(places=places, others=finish(found.others))
