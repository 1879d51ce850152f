"""Batch maker: makes batches in a worker process: gathers rows, transforms them, puts the result in slots.

It owns the worker's own lease and mappings of the snapshot that the main process made, and the
unpickled transform. Rows are gathered straight into slots. A column that a transform returns, changed in
place or not, is not copied.

Guarantees: it leases before it reads, and releases an epoch that ended before the lease; a process that its
transform forks answers nothing. It never imports a framework by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import WorkerError
from arrowcache.lifetimes import Origin
from arrowcache.pickling import unpickled
from arrowcache.process import Message
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import Meter
from arrowcache.reading.temperature import Temperature
from arrowcache.reading.values import column_bytes
from arrowcache.reading.view import Viewer
from arrowcache.reading.workers import packing
from arrowcache.reading.workers.segment_list import unpack_segments
from arrowcache.reading.workers.worker_slots import WorkerSlots
from arrowcache.storage.folder import Folder
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.lease import Lease
from arrowcache.storage.store import Store

Batch = dict[str, Any]


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
        schema = self._store.settings.schema
        self._names: list[str] = settings["names"]
        self._with_ids: bool = settings["with_ids"]
        self._transform = _unpacked(transform) if transform else None
        self._viewer = Viewer(schema, self._names) if settings["views"] and self._transform else None
        self._columns = {
            name: (schema.fixed[name].shape, schema.fixed[name].numpy_dtype)
            for name in self._names
            if name in schema.fixed
        }
        self._meter, self._temperature = Meter(), Temperature()
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
            with self._meter.reading(self._temperature):
                batch, nbytes = self._gather(snapshot, ids)
            result: object = batch
            if self._transform is not None:
                self._slots.tell("transform")
                with self._meter.stage("transform"):
                    result = self._transformed(batch)
        finally:
            self._slots.tell("")
        del batch
        columns = packing.pack(result)
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
        span = self._store.folder.lease_lock, segments[0].seq, segments[-1].seq
        try:
            lease = Lease(*span)  # nobody evicts segments that the main process leases
        except OSError:  # except those that it has released already
            with self._store.locked():
                lease = Lease(*span)
        if self._slots.is_over(epoch):  # else the main process held its lease while this one was taken
            lease.close()
            return
        before, self._snapshot = self._snapshot, Snapshot(self._store, segments, lease)
        self._epoch, self._snapshot.temperature = epoch, self._temperature
        if before is not None:
            before.close()  # last: segments of both snapshots stay mapped
        self._is_mapped = False

    def _gather(self, snapshot: Snapshot, ids: NDArray[np.int64]) -> tuple[Batch, int]:
        view = None
        if self._viewer is not None and self._viewer.names and (np.diff(ids) == 1).all():
            view = snapshot.view(int(ids[0]), len(ids), self._viewer)
        if view is None:
            lent = {
                name: self._slots.lend(name, dtype, (len(ids), *shape))
                for name, (shape, dtype) in self._columns.items()
            }
            columns = snapshot.gather_into(ids, self._names, lent)
        else:
            others = [name for name in self._names if name not in view]
            columns = view | (snapshot.gather_into(ids, others, {}) if others else {})
        batch: Batch = {name: columns[name] for name in self._names}
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
