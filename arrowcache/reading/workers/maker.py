"""Maker: makes batches in a worker process: gathers, transforms, and has the result lie in a slot.

It owns the worker's own lease and mappings of the snapshot that the main process made, and the
unpickled transform. Where a column goes as it came, the rows are gathered straight into the slot, and
a transform that returns it, changed in place or not, copies nothing.

Guarantees: it leases before it reads, and lets go of an epoch that ended before it leased; what a
transform keeps of a batch is never overwritten, nor seen by the consumer (its slot is abandoned, and
from then on rows are gathered elsewhere). It never imports a framework by itself.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.ma  # else it is looked for with the first batch, when no file may be left to open
from numpy.typing import NDArray

from arrowcache.reading.assembly import Batch
from arrowcache.reading.slots import Slots
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import Meter
from arrowcache.reading.values import column_bytes
from arrowcache.reading.view import Viewer
from arrowcache.reading.workers import packing
from arrowcache.reading.workers.bench import Bench, Places, has_room
from arrowcache.reading.workers.channel import Message
from arrowcache.reading.workers.manifest import unpack_segments
from arrowcache.reading.workers.memory import bytes_of
from arrowcache.reading.workers.packing import Described
from arrowcache.reading.workers.parcel import unpack_transform
from arrowcache.storage.folder import Folder
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.lease import Lease
from arrowcache.storage.store import Store


class _CheckedStore(Store):
    """Segments whose bytes the main process has verified, where that is due, before it sent them."""

    def suspect_below(self) -> int:
        return 0


class Maker:
    """Makes batches.

    Args:
        bench: what it works on.
        settings: what the main process' RemoteAssembly wrote.
        transform: packed; empty: none.
    """

    def __init__(self, bench: Bench, settings: Mapping[str, Any], transform: bytes) -> None:
        self._bench = bench
        self._pid = os.getpid()
        folder = Folder(Path(settings["cache"]))
        self._store = _CheckedStore(folder, folder.read_settings())
        schema = self._store.settings.schema
        self._names: list[str] = settings["names"]
        self._fixed = [name for name in self._names if name in schema.fixed]
        self._with_ids: bool = settings["with_ids"]
        self._transform: Callable[[Batch], object] | None = unpack_transform(transform) if transform else None
        self._viewer = Viewer(schema, self._names) if settings["views"] and self._transform else None
        self._columns = {n: (schema.fixed[n].shape, schema.fixed[n].numpy_dtype) for n in self._fixed}
        self._scratch = Slots(self._columns, settings["batch_size"])
        self._meter = Meter()
        self._failure: Exception | None = None  # to begin the epoch
        self._snapshot: Snapshot | None = None
        self._epoch = 0
        self._known: dict[int, SegmentInfo] = {}
        self._pattern: dict[str, tuple[str, Any]] = {}  # by name: kind, (dtype, row shape) of each array
        self._transform_keeps = False  # views of its batches

    def announce(self, epoch: int, manifest: int) -> None:
        """There is an epoch: lease it, unless it has ended meanwhile. Closes the manifest.

        What fails is raised by the first `make`.
        """
        self._failure = None
        before = self._snapshot
        try:
            self._begin(epoch, bytes_of(manifest))
        except Exception as error:  # noqa: BLE001  # such as a lock that somebody holds for too long
            self._failure, self._snapshot = error, None
            if before is not None:
                before.close()
        finally:
            os.close(manifest)

    def drop(self) -> None:
        """Let go of an epoch that has ended."""
        if self._snapshot is not None and self._bench.is_over(self._epoch):
            self._snapshot.close()
            self._snapshot = None

    def close(self) -> None:
        """Let go of everything."""
        if self._snapshot is not None:
            self._snapshot.close()

    def make(self, request: Message, slot_for: Callable[[Message], Places | None]) -> Message:
        """Make what a request asks for. Returns: the answer."""
        number = request["id"]
        if "pattern" in request:
            self._pattern = {name: (kind, form) for name, kind, form in request["pattern"]}
        snapshot = None if self._bench.is_over(request["epoch"]) else self._snapshot
        if snapshot is None and self._failure is not None:
            raise self._failure
        if snapshot is None:
            return {"say": "skipped", "id": number, "kept": False}
        snapshot.release_oldest(request["released"])
        seconds = dict(self._meter.seconds)
        ids = self._bench.ids(*request["ids"])
        places: Places = request["slot"] or {}
        try:
            self._bench.tell("gather")
            with self._meter.reading() as reading:
                batch, nbytes = self._gather(snapshot, ids, places)
            result: object = batch
            if self._transform is not None:
                self._bench.tell("transform")
                with self._meter.stage("transform"):
                    result = self._transformed(batch)
        finally:
            self._bench.tell("")
        del batch
        columns = packing.pack(result)
        del result
        described = [Described.of(column) for column in columns]
        needs = {"say": "needs", "id": number, "columns": described, "kept": False}
        if not has_room(described, places, self._pattern):
            wanted = slot_for(needs)
            if wanted is None:
                del columns
                return {"say": "skipped", "id": number, "kept": self._bench.has_lent()}
            places = wanted
        self._bench.place(columns, places)
        del columns
        if self._bench.has_lent():
            self._transform_keeps = True
            wanted = slot_for(needs | {"kept": True})
            if wanted is None:
                return {"say": "skipped", "id": number, "kept": False}  # its slots are abandoned already
            self._bench.move(described, places, wanted)
        return {
            "say": "made",
            "id": number,
            "columns": described,
            "nbytes": nbytes,
            "seconds": {stage: now - seconds[stage] for stage, now in self._meter.seconds.items()},
            "cold": reading.was_on_disk,
        }

    def _transformed(self, batch: Batch) -> object:
        assert self._transform is not None
        try:
            return self._transform(batch)
        finally:
            if os.getpid() != self._pid:  # forked by the transform, which had both come back
                os._exit(0)

    def lose(self, error: BaseException) -> bool:
        """A batch failed: whether something goes on using its slot."""
        frames = error.__traceback__
        while frames is not None:  # what it holds is told as text, and must not keep the slot
            with suppress(RuntimeError):
                frames.tb_frame.clear()
            frames = frames.tb_next
        return self._bench.has_lent()

    def _begin(self, epoch: int, manifest: bytes) -> None:
        segments = unpack_segments(manifest, self._known)
        self._known = {segment.seq: segment for segment in segments}
        if self._bench.is_over(epoch) or not segments:
            return
        span = self._store.folder.lease_lock, segments[0].seq, segments[-1].seq
        try:
            lease = Lease(*span)  # nobody evicts what the main process leases
        except OSError:  # but perhaps what it has passed already
            with self._store.locked():
                lease = Lease(*span)
        if self._bench.is_over(epoch):  # else the main process held its lease while we took ours
            lease.close()
            return
        before, self._snapshot = self._snapshot, Snapshot(self._store, segments, lease)
        self._epoch = epoch
        if before is not None:
            before.close()  # after the new one has claimed what both read: that stays mapped
        with suppress(MemoryError):  # each batch says so
            self._snapshot.map_ahead()  # whatever becomes of the folder, this epoch goes on

    def _gather(self, snapshot: Snapshot, ids: NDArray[np.int64], places: Places) -> tuple[Batch, int]:
        """The rows, and how many bytes they have."""
        columns: dict[str, Any] = {}
        view = None
        if self._viewer is not None and self._viewer.names and (np.diff(ids) == 1).all():
            view = snapshot.view(int(ids[0]), len(ids), self._viewer)
        if view is not None:
            columns = dict(view)
        else:
            columns = self._gather_fixed(snapshot, ids, places)
        others = [name for name in self._names if name not in columns]
        if others:
            columns |= snapshot.gather_into(ids, others, {})
        batch: Batch = {name: columns[name] for name in self._names}
        nbytes = sum(map(column_bytes, batch.values()))
        if self._with_ids:
            batch |= snapshot.locate(ids)
        return batch, nbytes

    def _gather_fixed(self, snapshot: Snapshot, ids: NDArray[np.int64], places: Places) -> dict[str, Any]:
        """Fixed-width columns: in the slot where they may be found there unchanged, else elsewhere."""
        arrays: dict[str, NDArray[Any]] = {}
        for name, (row_shape, dtype) in self._columns.items():
            place = places.get(name, ())
            nbytes = len(ids) * dtype.itemsize * math.prod(row_shape)
            if len(place) == 1 and place[0][1] >= nbytes > 0 and not self._transform_keeps:
                arrays[name] = self._bench.lend(place[0][0], dtype, (len(ids), *row_shape))
        if len(arrays) < len(self._columns):
            elsewhere = self._scratch.lend(len(ids)).arrays()
            arrays = {name: arrays[name] if name in arrays else elsewhere[name] for name in self._columns}
        snapshot.gather_into(ids, self._fixed, arrays)
        return arrays
