"""Worker: a worker process of a loader: one message after another, until its main process ends.

    work     settings and transform; the first message
    begin    there is an epoch: lease the segments of its list
    make     make batches of rows of that epoch, in slots of its own; answered by made, failed or skipped
    drop     let go of an epoch that has ended; answered by dropped

It says `ready` once it has begun, and `lost` where it cannot begin or go on. `BatchMaker` owns the worker's
own lease and mappings of the snapshot that the main process made, and the unpickled transform. Rows are
gathered straight into slots. A column that a transform returns, changed in place or not, is not copied.

Guarantees, beside those of process.py: it never answers with sample bytes; it leases before it reads, and
releases an epoch that ended before the lease; a process that its transform forks answers nothing. It never
imports a framework by itself.

Numeric libraries get one thread each, unless the environment says otherwise, and the engine has no thread
beside this one: workers run side by side. Keep imports few: the first batch of a worker waits for them.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import WorkerError
from arrowcache.lifetimes import Origin
from arrowcache.native.engine import threads
from arrowcache.pickling import pack_error, unpickled
from arrowcache.process import Channel, Message
from arrowcache.reading.columns import Columns, column_bytes
from arrowcache.reading.gather import ReadMode
from arrowcache.reading.slots import GivenArrays, SharedBuffers, SharedMemory, Slots, array_over
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import Meter
from arrowcache.reading.workers.messages import (
    ENDED,
    PROGRESS,
    STAGES_OF_WORKERS,
    Packed,
    Place,
    Placed,
    pack_batch,
    unpack_segments,
)
from arrowcache.storage.folder import Folder
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.store import Store

Batch = dict[str, Any]


class _Lent(NamedTuple):
    """Memory of the batch in progress: the owner here, and its part for the transform."""

    owner: Any
    borrower: Callable[[], object]  # None once nobody has an array over it


class WorkerSlots:
    """The slots of one worker, in the memory that it shares with the main process.

    Batches are gathered into slots. An array that lies in a slot is handed over as it is: the main process is
    told its offset, and says when it needs it no more. Every other array is copied into another slot.

    Guarantee: an array of a batch that a transform keeps is never overwritten, nor seen by the consumer. The
    transform's arrays have owners of their own, whose death tells. Where one lives on, the consumer gets a
    copy, and the memory comes back when the transform has let go.

    Args:
        in_flight: usual number of batches of this worker in the main process.
        keeps: as of SharedBuffers.
    """

    def __init__(self, memory: SharedMemory, in_flight: int, *, keeps: bool = False) -> None:
        self._words = memory.words
        self._buffers = SharedBuffers(memory, keeps=keeps)
        self._slots = Slots({}, 1, in_flight, self._buffers.allocate, self._buffers.free)
        self._lent: dict[int, _Lent] = {}  # by address
        self._handed_over: dict[int, Any] = {}  # owners, by offset

    def is_over(self, epoch: int) -> bool:
        """True if the main process has ended an epoch."""
        return epoch <= int(self._words[ENDED])

    def tell(self, stage: str) -> None:
        """Show that this worker is at one of STAGES_OF_WORKERS from now on, or at none ("")."""
        self._words[PROGRESS] = time.perf_counter_ns() * 4 + STAGES_OF_WORKERS.index(stage) if stage else 0

    def begin(self, returned: Iterable[int]) -> None:
        """Begin a batch.

        Args:
            returned: offsets of arrays that the main process needs no more.
        """
        self._lent.clear()
        for offset in returned:
            del self._handed_over[offset]

    def lend(self, name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> NDArray[Any]:
        """Lend an array of a column of the batch, in shared memory."""
        nbytes = dtype.itemsize * math.prod(shape)
        owner, address = self._slots.lend_bytes(name, nbytes)
        borrower = (ctypes.c_char * nbytes).from_buffer(owner)
        self._lent[address] = _Lent(owner, weakref.ref(borrower))
        return array_over(borrower, dtype, shape)

    def place(self, columns: Sequence[Packed]) -> list[Placed]:
        """Put each array of a batch into a slot of its own, by a copy where needed. Returns the addresses."""
        taken: set[int] = set()
        return [
            (name, kind, [self._place((name, i), array, taken) for i, array in enumerate(arrays)])
            for name, kind, arrays in columns
        ]

    def hand_over(self, placed: Sequence[Placed]) -> list[Placed]:
        """Hand the arrays of `place` over to the main process. Returns their offsets.

        By then nobody but the transform may have arrays over this memory.
        """
        owners: dict[int, Any] = {}
        handed_over = [
            (name, kind, [self._hand_over((name, i), array, owners) for i, array in enumerate(arrays)])
            for name, kind, arrays in placed
        ]
        self._handed_over |= owners  # all, or none if there was no memory for a copy
        self._lent.clear()
        return handed_over

    @property
    def memory(self) -> tuple[int, int]:
        """Return the allocated bytes, and the number of allocations."""
        return self._slots.allocated_bytes, self._slots.growths

    def _place(self, kind: tuple[str, int], array: NDArray[Any], taken: set[int]) -> Place:
        address = 0
        if array.nbytes:
            address = array.__array_interface__["data"][0]
            if address not in self._lent or address in taken or not array.flags.c_contiguous:
                address = self._copy(kind, array)
            taken.add(address)
        return array.dtype.str, list(array.shape), address

    def _hand_over(self, kind: tuple[str, int], place: Place, owners: dict[int, Any]) -> Place:
        dtype, shape, address = place
        if not address:
            return dtype, shape, 0
        lent = self._lent[address]
        if lent.borrower() is not None:  # the transform keeps it
            address = self._copy(kind, array_over(lent.owner, dtype, shape))
        offset = self._buffers.offset(address)
        owners[offset] = self._lent[address].owner
        return dtype, shape, offset

    def _copy(self, kind: tuple[str, int], array: NDArray[Any]) -> int:
        owner, address = self._slots.lend_bytes(kind, array.nbytes)
        np.copyto(array_over(owner, array.dtype, array.shape), array)
        self._lent[address] = _Lent(owner, _nobody)
        return address


def _nobody() -> None:
    pass


class _CheckedStore(Store):
    """A store without byte checks: the main process has made them before it named the segments."""

    def suspect_below(self) -> int:
        return 0


class BatchMaker:
    """Makes batches.

    Args:
        transform: packed transform; empty means none.
    """

    def __init__(self, slots: WorkerSlots, settings: Mapping[str, Any], transform: bytes) -> None:
        self._slots = slots
        self._origin = Origin()
        folder = Folder(Path(settings["cache"]))
        self._store = _CheckedStore(folder, folder.read_settings())
        self._columns = Columns.of(self._store.settings.schema, settings["names"])
        self._with_ids: bool = settings["with_ids"]
        self._transform = _unpacked(transform) if transform else None
        has_views = settings["views"] and self._transform and self._columns.viewed.names
        self._makes_views = bool(has_views)
        self._meter, self._read_mode = Meter(), ReadMode()
        self._failure: Exception | None = None  # an error of `begin`, for the first `make`
        self._snapshot: Snapshot | None = None
        self._epoch = 0
        self._known: dict[int, SegmentInfo] = {}
        self._is_mapped = True

    def begin(self, epoch: int, segments: bytes) -> None:
        """Begin an epoch: lease its segments, unless it has ended meanwhile.

        An error is raised by the first `make`.
        """
        self._failure = None
        before = self._snapshot
        try:
            self._begin(epoch, segments)
        except Exception as error:  # noqa: BLE001  # such as a lock that somebody holds for too long
            self._failure, self._snapshot = error, None
            if before is not None:
                before.close()

    def map_ahead(self) -> None:
        """Map all segments of the epoch, unless that was done: it then needs the folder no more."""
        if not self._is_mapped and self._snapshot is not None:
            self._is_mapped = True
            with suppress(MemoryError):  # each batch reports it
                self._snapshot.map_ahead()

    def drop(self) -> None:
        """Close the snapshot, if its epoch has ended."""
        if self._snapshot is not None and self._slots.is_over(self._epoch):
            self._snapshot.close()
            self._snapshot = None

    def close(self) -> None:
        """Close the snapshot, if there is one."""
        if self._snapshot is not None:
            self._snapshot.close()

    def make(self, request: Message) -> Message:
        """Make one batch: gather its rows, transform them, and place the result in a slot.

        Args:
            request: as `WorkerHandle.ask` sends it. Its "data" are row ids, int64.
        Returns: the answer: "made", with the places of the columns, or "skipped" if the epoch is over.
        Raises: the error of `begin`, of a read or of the transform.
        """
        number, ids = request["id"], np.frombuffer(request["data"], np.int64)
        self._slots.begin(request["returned"])
        snapshot = None if self._slots.is_over(request["epoch"]) else self._snapshot
        if snapshot is None and self._failure is not None:
            raise self._failure
        if snapshot is None:
            return {"say": "skipped", "id": number}
        snapshot.release_oldest(request["released"])
        seconds = dict(self._meter.seconds)
        try:
            self._slots.tell("gather")
            with self._meter.reading(self._read_mode):
                batch, nbytes = self._gather(snapshot, ids)
            result: object = batch
            if self._transform is not None:
                self._slots.tell("transform")
                with self._meter.stage("transform"):
                    result = self._transformed(batch)
        finally:
            self._slots.tell("")
        del batch
        columns = pack_batch(result)
        del result
        placed = self._slots.place(columns)
        del columns
        return {
            "say": "made",
            "id": number,
            "columns": self._slots.hand_over(placed),
            "memory": self._slots.memory,
            "nbytes": nbytes,
            "seconds": {stage: now - seconds[stage] for stage, now in self._meter.seconds.items()},
        }

    def _transformed(self, batch: Batch) -> object:
        assert self._transform is not None
        try:
            return self._transform(batch)
        finally:
            if not self._origin.is_here:  # forked by the transform: only one of the two may answer
                os._exit(0)

    def _begin(self, epoch: int, packed: bytes) -> None:
        segments = unpack_segments(packed, self._known)
        self._known = {segment.seq: segment for segment in segments}
        if self._slots.is_over(epoch) or not segments:
            return
        try:
            lease = self._store.lease_on(segments)  # nobody evicts segments that the main process leases
        except OSError:  # except those that it has released already
            with self._store.looking():
                lease = self._store.lease_on(segments)
        if self._slots.is_over(epoch):  # else the main process held its lease while this one was taken
            lease.close()
            return
        before, self._snapshot = self._snapshot, Snapshot(self._store, segments, lease)
        self._epoch, self._snapshot.read_mode = epoch, self._read_mode
        if before is not None:
            before.close()  # last: segments of both snapshots stay mapped
        self._is_mapped = False

    def _gather(self, snapshot: Snapshot, ids: NDArray[np.int64]) -> tuple[Batch, int]:
        columns, view = self._columns, None
        if self._makes_views and (np.diff(ids) == 1).all():
            view = snapshot.view(int(ids[0]), len(ids), columns)
        wanted = columns if view is None else columns.copied
        lent = {
            name: self._slots.lend(name, dtype, (len(ids), *shape))
            for name, (shape, dtype) in wanted.memory.items()
        }
        gathered = snapshot.gather_into(ids, wanted, GivenArrays(lent)) if wanted.names else {}
        batch: Batch = {
            name: view[name] if view is not None and name in view else gathered[name]
            for name in columns.names
        }
        nbytes = sum(map(column_bytes, batch.values()))
        if self._with_ids:
            batch |= snapshot.locate(ids)
        return batch, nbytes


def _unpacked(transform: bytes) -> Callable[[Batch], object]:
    """Unpickle a transform. Raises: WorkerError: a module that it needs cannot be imported here."""
    try:
        function: Callable[[Batch], object] = unpickled(transform)
    except Exception as error:
        raise WorkerError(
            f"the transform cannot be loaded in a worker process ({type(error).__name__}: {error}): define "
            "it in a module that can be imported there, or in the main script, or pass worker_type='thread'"
        ) from error
    return function


def main(channel: Channel, memory: int) -> None:
    """Work until the other end of the channel is closed."""
    threads.most = 0
    with closing(channel), suppress(BrokenPipeError, ConnectionResetError):  # the main process has gone
        try:
            _work(channel, memory)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:  # noqa: BLE001  # the main process raises it
            channel.send({"say": "lost", "error": pack_error(error)})


def _work(channel: Channel, memory: int) -> None:
    settings = channel.receive()
    if settings is None:
        return
    slots = WorkerSlots(SharedMemory(memory), settings["in_flight"], keeps=settings["keeps"])
    maker = BatchMaker(slots, settings, settings.get("data", b""))
    try:
        channel.send({"say": "ready"})
        _serve(channel, maker)
    finally:
        maker.close()


def _serve(channel: Channel, maker: BatchMaker) -> None:
    coming = select.poll()
    coming.register(channel, select.POLLIN)
    while True:
        if not coming.poll(0):
            maker.map_ahead()
        message = channel.receive()
        if message is None:
            return
        if message["do"] == "begin":
            maker.begin(message["epoch"], message["data"])
        elif message["do"] == "drop":
            maker.drop()
            channel.send({"say": "dropped"})
        else:
            channel.send(_made(maker, message))
            maker.map_ahead()


def _made(maker: BatchMaker, request: Message) -> Message:
    try:
        return maker.make(request)
    except BaseException as error:  # noqa: BLE001  # a transform may raise anything
        return {"say": "failed", "id": request["id"], "error": pack_error(error)}
