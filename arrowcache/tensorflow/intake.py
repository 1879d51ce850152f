"""Intake: worker processes that import TFRecord files into a cache, each its share of the files.

Each worker reads its files one after another and fills one segment after another, so only its last
one is short. Its progress is in memory that its main process sees, also after its death.
Guarantees: each record is published once at most, and all of them if `run` returns; a bad file
leaves none of its rows; no worker outlives `run`. A worker never publishes a part-filled segment
before its share is done.
"""

from __future__ import annotations

import select
import selectors
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from arrowcache.errors import ArrowCacheError, CacheFullError, SamplerError, SchemaError, WorkerError
from arrowcache.pickling import pack_error, unpack_error
from arrowcache.process import Channel, WorkerGroup, WorkerProcess, one_thread
from arrowcache.reading.slots import SharedMemory
from arrowcache.storage.ingest import Imported, Ingest
from arrowcache.storage.lease import own_leases
from arrowcache.storage.recovery import open_store
from arrowcache.storage.store import Cancelled, RoomPolicy, Store
from arrowcache.tensorflow.records import fingerprint_of, place, samples
from arrowcache.units import format_count

_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1"}  # TensorFlow would take all memory of a GPU
# A worker's file and record; rows it read; 1 while it waits for room; rows, segments and bytes it
# published; rows of its files that were in the cache before, and those that had left and came again.
_FILE, _RECORD, _ROWS, _WAITS, _PUBLISHED, _SEGMENTS, _BYTES, _THERE, _RETURNED = range(MARKS := 9)
_FAULTS = (SchemaError, SamplerError, ValueError)  # of a file
_NOT_BEGUN = -1
_LOOK_SECONDS = 0.25
_ENDING_SECONDS = 5.0  # for a worker that has hung up without a word


class Intake:
    """An import of files into a cache.

    Args:
        again: 8 hex digits, to import records again that are in the cache.
        say: called with the number of rows read, a few times a second.
    """

    def __init__(
        self,
        store: Store,
        shares: Sequence[Sequence[str]],
        compression: str | None,
        again: str,
        say: Callable[[int], Any],
    ) -> None:
        self._store, self._say = store, say
        self._shares = shares
        self._compression, self._again = compression, again
        self._marks: list[NDArray[np.int64]] = []
        self._group = WorkerGroup(__name__, one_thread() | _ENVIRONMENT)

    def run(self) -> None:
        """Import all files.

        Raises: an error of a worker; WorkerError: a worker died. They say how many rows were imported.
            CacheFullError also: this process leases segments that would have to be evicted.
        """
        try:
            with self._store.show_writing():
                self._watch([self._launch(number) for number in range(len(self._shares))])
        except (ArrowCacheError, ValueError) as error:
            self._group.close()
            raise self._with_count(error) from error.__cause__
        finally:
            self._group.close()

    @property
    def imported(self) -> Imported:
        return Imported(self._sum(_PUBLISHED), self._sum(_SEGMENTS), self._sum(_BYTES))

    @property
    def rows_there(self) -> int:
        """Number of rows that the cache had before."""
        return self._sum(_THERE)

    @property
    def rows_returned(self) -> int:
        """Number of imported rows that the cache had once, and had evicted."""
        return self._sum(_RETURNED)

    def _sum(self, mark: int) -> int:
        return sum(int(marks[mark]) for marks in self._marks)

    def _launch(self, number: int) -> WorkerProcess:
        plan = {
            "cache": str(self._store.folder.path),
            "files": list(self._shares[number]),
            "compression": self._compression,
            "again": self._again,
        }
        memory = SharedMemory.create(len(self._shares))
        memory.words[_RECORD] = _NOT_BEGUN
        self._marks.append(memory.words[:MARKS])
        process = self._group.start(memory.fd)
        process.send(plan)
        return process

    def _watch(self, processes: Sequence[WorkerProcess]) -> None:
        with selectors.DefaultSelector() as selector:
            for number, process in enumerate(processes):
                selector.register(process.channel, selectors.EVENT_READ, (number, process))
            while selector.get_map():
                for key, _ in selector.select(_LOOK_SECONDS):
                    self._hear(*key.data)
                    selector.unregister(key.fileobj)
                self._refuse_deadlock()
                self._say(self._sum(_ROWS))

    def _hear(self, number: int, process: WorkerProcess) -> None:
        """Handle a worker's end: done, failed or died."""
        received = process.hear()
        if received is None:
            how = self._group.end(process, _ENDING_SECONDS)
            raise WorkerError(
                f"{self._place(number)}: process {process.pid}, which read it, {how}; "
                "look at that record, or use fewer workers if the memory was short"
            )
        if error := received["error"]:
            raise unpack_error(error)

    def _place(self, number: int) -> str:
        path = self._shares[number][int(self._marks[number][_FILE])]
        record = int(self._marks[number][_RECORD])
        return f"{path}, before its first record" if record == _NOT_BEGUN else place(path, record)

    def _refuse_deadlock(self) -> None:
        """Raise a deadlock: workers wait for leases of this process, which waits for the workers."""
        store = self._store
        if not any(marks[_WAITS] for marks in self._marks):
            return
        store.evict(0)  # readers of this process release leases between epochs
        listed = store.segments()
        if listed and any(
            lease.stays(listed[0].seq) for lease in own_leases(store.folder.lease_lock, listed[0].seq)
        ):
            raise CacheFullError(
                "there is no room, and this very process reads the oldest segments, so waiting would not "
                "end: close its snapshots or end its epoch, raise capacity, or raise headroom"
            )

    def _with_count(self, error: ArrowCacheError | ValueError) -> Exception:
        """Return the error with the number of imported rows, once all workers have ended."""
        rows = self.imported.rows
        went = f"{format_count(rows, 'row')} {'was' if rows == 1 else 'were'} imported" if rows else ""
        again = "import the same files again to go on with the others"
        if isinstance(error, _FAULTS):
            went = f"{went} of other files" if rows else "nothing was imported"
            again = "repair it or leave it out, and import again"
        return type(error)(
            f"{error}; {went or 'nothing was imported'}: {again}"
            + ("; what is in the cache does not come twice" if rows else "")
        )


# in a worker


def main(channel: Channel, memory: int) -> None:
    """Import a share, and send the result."""
    tf.get_logger().setLevel("ERROR")
    with closing(channel):
        try:
            plan = channel.receive()
            if plan is not None:
                import_files(plan, SharedMemory(memory).words[:MARKS], lambda: _has_hung_up(channel))
        except Cancelled:
            return
        except BaseException as error:  # noqa: BLE001  # the main process raises it
            channel.send({"error": pack_error(error)})
        else:
            channel.send({"error": ""})


def import_files(plan: dict[str, Any], marks: NDArray[np.int64], is_cancelled: Callable[[], bool]) -> None:
    """Read files into a cache, and keep `marks` up to date.

    Raises: errors of `samples` and `Store.publish`; ValueError: a row larger than a segment;
        Cancelled: the main process has gone.
    """
    store = open_store(Path(plan["cache"]), check="structure")

    def wait() -> bool:  # called while there is no room
        marks[_WAITS] = True
        return is_cancelled()

    def require_wanted() -> None:
        if is_cancelled():
            raise Cancelled

    policy = RoomPolicy("wait", is_cancelled=wait)
    ingest = Ingest(
        store.settings, lambda: store, "tfrecord", again=plan["again"], policy=policy, before=require_wanted
    )
    with ingest:
        ingest.open()
        share = _Share(ingest, plan, marks)
        for index in range(len(plan["files"])):
            share.bring(index)
        ingest.publish()
        share.mark()


class _Share:
    def __init__(self, ingest: Ingest, plan: dict[str, Any], marks: NDArray[np.int64]) -> None:
        self._ingest, self._marks = ingest, marks
        self._files: list[str] = plan["files"]
        self._compression: str | None = plan["compression"]
        self._schema = ingest.open().settings.schema

    def bring(self, index: int) -> None:
        """Import the missing records of a file.

        Raises: errors of `samples`; ValueError: a row larger than a segment. None of the file's rows is left
            then.
        """
        path, marks = self._files[index], self._marks
        marks[[_FILE, _RECORD]] = index, _NOT_BEGUN
        digest = fingerprint_of(path)
        try:
            self._read(path, digest, counts=True)
        except _FAULTS as error:
            leased = self._ingest.give_up(digest)
            for before in self._files[:index]:
                self._read(before, fingerprint_of(before), counts=False)  # shared a segment with this file
            self._ingest.publish()
            self.mark()
            rows = sum(segment.rows for segment in leased)
            stay = f"{format_count(rows, 'row')} of its segments stay, since a reader leases them"
            text = stay if leased else "none of its rows is in the cache"
            raise next(kind for kind in _FAULTS if isinstance(error, kind))(f"{error}; {text}") from None

    def _read(self, path: str, digest: str, *, counts: bool) -> None:
        ingest, marks = self._ingest, self._marks
        missing = ingest.missing(digest)
        if counts:
            marks[_THERE] += ingest.rows_of(digest)
            marks[_RETURNED] += sum(stop - first for first, stop in missing if stop is not None)
        following, record = _NOT_BEGUN, 0

        def at(number: int) -> None:
            nonlocal record
            record = number
            if counts:
                marks[_RECORD] = number

        for sample in samples(path, self._schema, self._compression, at, missing) if missing else ():
            if record != following:
                ingest.begin(digest, record)
            try:
                ingest.take(sample, many=False)
            except ValueError as error:
                _fail(path, record, error)
            following = record + 1
            marks[_ROWS] += counts
            self.mark()
        if missing and missing[-1][1] is None and following != _NOT_BEGUN:
            ingest.end()

    def mark(self) -> None:
        published = self._ingest.published
        self._marks[[_WAITS, _PUBLISHED, _SEGMENTS, _BYTES]] = (
            False, published.rows, published.segments, published.nbytes,
        )  # fmt: skip


def _fail(path: str, number: int, error: ValueError) -> NoReturn:
    raise ValueError(f"{place(path, number)}: {error}") from None


def _has_hung_up(channel: Channel) -> bool:
    """True if the main process has ended, or has closed its end."""
    poll = select.poll()
    poll.register(channel, 0)
    return bool(poll.poll(0))
