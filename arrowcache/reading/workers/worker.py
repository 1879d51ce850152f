"""Worker: what runs in a worker process: one request after another, until its main process ends.

It owns its own lease and mappings of the snapshot that the main process made, and the unpickled
transform. A request names rows and a slot; the worker gathers the rows, runs the transform on the whole
batch and has the result lie in the slot. Where a column goes as it came, the rows are gathered
straight into the slot, and a transform that returns it, changed in place or not, copies nothing.

    begin    there is an epoch: lease and map what its manifest (a file) lists
    make     rows of that epoch, into a slot; answered by made, failed, skipped, or needs
    put      the slot that was needed: for the first batch, and for what outgrew its slot
    forget   nobody wants the batch any more for which a slot was needed
    drop     let go of an epoch that has ended; answered by dropped

Guarantees: it leases before it reads, and lets go of an epoch that ended before it leased; what a
transform keeps of a batch is never overwritten, nor seen by the consumer (its slot is abandoned, and
from then on rows are gathered elsewhere); it ignores Ctrl-C, which is for the main process; it dies
when that dies, in whatever way. It must never import a framework by itself, nor answer with sample bytes.

Numeric libraries get one thread each, unless the environment says otherwise: workers run side by side.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import math
import mmap
import os
import signal
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import WorkerError
from arrowcache.reading.assembly import Batch
from arrowcache.reading.ring import Ring
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import Meter
from arrowcache.reading.view import Viewer
from arrowcache.reading.workers import packing
from arrowcache.reading.workers.channel import Channel, Message
from arrowcache.reading.workers.manifest import unpack_segments
from arrowcache.reading.workers.packing import Described, Packed
from arrowcache.reading.workers.parcel import pack_error, unpack_transform
from arrowcache.reading.workers.shared import STAGES_OF_WORKERS, array_over, bytes_of, map_all
from arrowcache.storage.folder import Folder
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.lease import Lease
from arrowcache.storage.store import Store

_PR_SET_PDEATHSIG = 1

Places = Mapping[str, Sequence[tuple[int, int]]]  # name -> (offset, bytes) of each array


class _CheckedStore(Store):
    """Segments whose bytes the main process has verified, where that is due, before it sent them."""

    def suspect_below(self) -> int:
        return 0


def main(end: int, memory: int, plan: int, parent: int, number: int) -> None:
    """Work until the other end of the socket is closed.

    Args:
        end, memory, plan: descriptors of our socket, of the shared file, and of what to do.
        parent: the main process.
        number: which of the workers this is.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked to be told
        return
    with suppress(OSError, RuntimeError, ValueError):  # no stderr
        faulthandler.enable()
    sys.argv = sys.argv[:1]
    channel = Channel(socket.socket(fileno=end))
    for fd in (end, memory, plan):
        os.set_inheritable(fd, False)
    try:
        settings, _, transform = bytes_of(plan).partition(b"\n")
        maker = Maker(map_all(memory), json.loads(settings), transform, number)
    except BaseException as error:  # noqa: BLE001  # the main process raises it
        with suppress(BrokenPipeError, ConnectionResetError):  # the main process has gone
            channel.send({"say": "failed", "id": None, "error": pack_error(error)})
        channel.close()
        return
    finally:
        os.close(memory)
        os.close(plan)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # the main process has gone
            channel.send({"say": "ready"})
            try:
                _Session(channel, maker).serve()
            except WorkerError as error:  # whatever it was that could not be read
                channel.send({"say": "failed", "id": None, "error": pack_error(error)})
    finally:
        maker.close()
        channel.close()


class _Session:
    """Messages, one after another; those that come while a slot is awaited are kept for later."""

    def __init__(self, channel: Channel, maker: Maker) -> None:
        self._channel, self._maker = channel, maker
        self._later: deque[tuple[Message, list[int]]] = deque()

    def serve(self) -> None:
        while (received := self._next()) is not None:
            message, files = received
            if message["do"] == "begin":
                self._maker.announce(message["epoch"], files[0])
            elif message["do"] == "drop":
                self._maker.drop()
                self._channel.send({"say": "dropped"})
            else:
                self._make(message)

    def _next(self) -> tuple[Message, list[int]] | None:
        return self._later.popleft() if self._later else self._channel.receive()

    def _make(self, request: Message) -> None:
        try:
            answer = self._maker.make(request, self._slot_for)
        except BaseException as error:  # noqa: BLE001  # a transform may raise anything
            kept = self._maker.lose(error)
            failed = {"say": "failed", "id": request["id"], "kept": kept, "error": pack_error(error)}
            self._channel.send(failed)
        else:
            self._channel.send(answer)

    def _slot_for(self, need: Message) -> Places | None:
        """Ask for another slot; None: the batch is not wanted any more."""
        self._channel.send(need)
        while (received := self._channel.receive()) is not None:
            if received[0]["do"] == "put":
                places: Places = received[0]["slot"]
                return places
            if received[0]["do"] == "forget":
                return None
            self._later.append(received)
        raise ConnectionResetError("the main process has gone")


class Maker:
    """Makes batches.

    Args:
        memory: the shared file, mapped.
        settings: what the main process' RemoteAssembly wrote.
        transform: packed; empty: none.
        number: which of the workers this is.
    """

    def __init__(self, memory: mmap.mmap, settings: Mapping[str, Any], transform: bytes, number: int) -> None:
        self._memory = memory
        self._everything = array_over(memory, 0, np.uint8, (len(memory),))
        self._ended = array_over(memory, 0, np.int64, (1,))
        self._progress = array_over(memory, 8 + 8 * number, np.int64, (1,))
        folder = Folder(Path(settings["cache"]))
        self._store = _CheckedStore(folder, folder.read_settings())
        schema = self._store.settings.schema
        self._names: list[str] = settings["names"]
        self._fixed = [name for name in self._names if name in schema.fixed]
        self._with_ids: bool = settings["with_ids"]
        self._transform: Callable[[Batch], object] | None = unpack_transform(transform) if transform else None
        self._viewer = Viewer(schema, self._names) if settings["views"] and self._transform else None
        self._columns = {n: (schema.fixed[n].shape, schema.fixed[n].numpy_dtype) for n in self._fixed}
        self._scratch = Ring(self._columns, settings["batch_size"])
        self._meter = Meter()
        self._failure: Exception | None = None  # to begin the epoch
        self._snapshot: Snapshot | None = None
        self._epoch = 0
        self._known: dict[int, SegmentInfo] = {}
        self._pattern: dict[str, tuple[str, Any]] = {}  # by name: kind, (dtype, row shape) of each array
        self._transform_keeps = False  # views of its batches
        self._lent: list[weakref.ref[Any]] = []  # owners of arrays over the slot

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
        if self._snapshot is not None and self._is_over(self._epoch):
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
        snapshot = None if self._is_over(request["epoch"]) else self._snapshot
        if snapshot is None and self._failure is not None:
            raise self._failure
        if snapshot is None:
            return {"say": "skipped", "id": number, "kept": False}
        snapshot.release_oldest(request["released"])
        seconds = dict(self._meter.seconds)
        offset, rows = request["ids"]
        ids = array_over(self._memory, offset, np.int64, (rows,)).copy()
        places: Places = request["slot"] or {}
        try:
            self._tell("gather")
            with self._meter.reading() as reading:
                batch, nbytes = self._gather(snapshot, ids, places)
            result: object = batch
            if self._transform is not None:
                self._tell("transform")
                with self._meter.stage("transform"):
                    result = self._transform(batch)
        finally:
            self._progress[0] = 0
        del batch
        columns = packing.pack(result)
        del result
        described = [Described.of(column) for column in columns]
        needs = {"say": "needs", "id": number, "columns": described, "kept": False}
        if not _has_room(described, places, self._pattern):
            wanted = slot_for(needs)
            if wanted is None:
                del columns
                return {"say": "skipped", "id": number, "kept": self._has_lent()}
            places = wanted
        self._place(columns, places)
        del columns
        if self._has_lent():
            self._transform_keeps = True
            wanted = slot_for(needs | {"kept": True})
            if wanted is None:
                return {"say": "skipped", "id": number, "kept": False}  # its slots are abandoned already
            self._move(described, places, wanted)
        return {
            "say": "made",
            "id": number,
            "columns": described,
            "nbytes": nbytes,
            "seconds": {stage: now - seconds[stage] for stage, now in self._meter.seconds.items()},
            "cold": reading.was_on_disk,
        }

    def lose(self, error: BaseException) -> bool:
        """A batch failed: whether something goes on using its slot."""
        frames = error.__traceback__
        while frames is not None:  # what it holds is told as text, and must not keep the slot
            with suppress(RuntimeError):
                frames.tb_frame.clear()
            frames = frames.tb_next
        return self._has_lent()

    def _tell(self, stage: str) -> None:
        self._progress[0] = time.perf_counter_ns() * 4 + STAGES_OF_WORKERS.index(stage)

    def _is_over(self, epoch: int) -> bool:
        return epoch <= int(self._ended[0])

    def _begin(self, epoch: int, manifest: bytes) -> None:
        segments = unpack_segments(manifest, self._known)
        self._known = {segment.seq: segment for segment in segments}
        if self._is_over(epoch) or not segments:
            return
        span = self._store.folder.lease_lock, segments[0].seq, segments[-1].seq
        try:
            lease = Lease(*span)  # nobody evicts what the main process leases
        except OSError:  # but perhaps what it has passed already
            with self._store.locked():
                lease = Lease(*span)
        if self._is_over(epoch):  # else the main process held its lease while we took ours
            lease.close()
            return
        before, self._snapshot = self._snapshot, Snapshot(self._store, segments, lease)
        self._epoch = epoch
        if before is not None:
            before.close()  # after the new one has claimed what both read: that stays mapped

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
        nbytes = sum(map(_nbytes, batch.values()))
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
                arrays[name] = self._lend(place[0][0], dtype, (len(ids), *row_shape))
        if len(arrays) < len(self._columns):
            memory = self._scratch.take(len(ids))
            try:
                whole = memory.arrays()
                missing = [name for name in self._columns if name not in arrays]
                snapshot.gather_into(ids, missing, {name: whole[name] for name in missing})
                snapshot.gather_into(ids, list(arrays), arrays)
                del whole
                elsewhere = memory.hand_out(0)
                return {name: arrays[name] if name in arrays else elsewhere[name] for name in self._columns}
            finally:
                memory.close()
        snapshot.gather_into(ids, self._fixed, arrays)
        return arrays

    def _lend(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """An array over the slot, of which we learn when its last view has died."""
        nbytes = dtype.itemsize * math.prod(shape)
        owner: Any = (ctypes.c_char * nbytes).from_buffer(self._memory, offset)
        self._lent.append(weakref.ref(owner))
        return np.frombuffer(owner, dtype).reshape(shape)

    def _has_lent(self) -> bool:
        """Whether an array over the slot is still alive."""
        lent, self._lent = self._lent, []
        return any(owner() is not None for owner in lent)

    def _place(self, columns: list[Packed], places: Places) -> None:
        """Have each array lie where it belongs; whatever lies there or elsewhere in the slot now."""
        todo = []
        for column in columns:
            for array, (offset, _) in zip(column.arrays, places[column.name], strict=True):
                target = array_over(self._memory, offset, array.dtype, array.shape)
                if not _is_same(array, target):
                    is_ours = np.may_share_memory(array, self._everything)
                    todo.append((target, array.copy() if is_ours else array))  # another column may lie there
        for target, array in todo:
            np.copyto(target, array)

    def _move(self, described: list[Described], places: Places, wanted: Places) -> None:
        """A finished batch to another slot."""
        for column in described:
            arrays = zip(column.arrays, places[column.name], wanted[column.name], strict=True)
            for (dtype, shape), (before, _), (after, _) in arrays:
                source = array_over(self._memory, before, dtype, shape)
                np.copyto(array_over(self._memory, after, dtype, shape), source)


def _has_room(columns: list[Described], places: Places, pattern: Mapping[str, tuple[str, Any]]) -> bool:
    """Whether a batch is what the slot was made for; if not, the main process decides."""
    if len(columns) != len(places):
        return False
    for column in columns:
        expected = pattern.get(column.name)
        if expected is None or expected[0] != column.kind:
            return False
        for (dtype, shape), (its_dtype, its_row), (_, most), nbytes in zip(
            column.arrays, expected[1], places[column.name], column.nbytes(), strict=True
        ):
            if dtype != its_dtype or (shape[1:] if shape else None) != its_row or nbytes > most:
                return False
    return True


def _is_same(array: NDArray[Any], target: NDArray[Any]) -> bool:
    start = array.__array_interface__["data"][0] == target.__array_interface__["data"][0]
    return start and array.flags.c_contiguous


def _nbytes(values: Any) -> int:
    if isinstance(values, np.ndarray):
        return values.nbytes
    return int(values.data.nbytes) if hasattr(values, "offsets") else sum(map(len, values))
