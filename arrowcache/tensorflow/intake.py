"""Intake: worker processes that bring TFRecord files into a cache, each its share of them.

Each worker reads its files one after another and fills one segment after another, so only its last
one is short. What it is at stands in memory that its main process sees, also after its death.
Guarantees: each record is published once at most, and all of them if `run` returns; no worker outlives
`run`, nor the main process, in whatever way either ends. A worker never publishes a part-filled segment
before its share is done, and never answers Ctrl-C, which is for the main process.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from arrowcache.arrow.builder import SegmentBuilder
from arrowcache.errors import ArrowCacheError, CacheFullError, WorkerError
from arrowcache.reading.workers.channel import Channel
from arrowcache.reading.workers.launch import WorkerProcess
from arrowcache.reading.workers.memory import array_over, bytes_of, file_of, map_all
from arrowcache.reading.workers.parcel import pack_error, unpack_error
from arrowcache.storage.lease import own_leases
from arrowcache.storage.recovery import open_store
from arrowcache.storage.store import Cancelled, RoomPolicy, Store
from arrowcache.tensorflow.records import place, samples

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); words = list(map(int, sys.argv[2:]))\n"
    "from arrowcache.reading.workers.worker import tie_to\n"
    "if tie_to(words[3]):\n"  # before TensorFlow, which takes its time
    "    from arrowcache.tensorflow.intake import main\n"
    "    main(*words[:3])\n"
)
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1"}  # TensorFlow would take all memory of a GPU
_FILE, _RECORD, _ROWS, _WAITS = range(4)  # what a worker is at; rows it took; whether it waits for room
_NOT_BEGUN = -1
_LOOK_SECONDS = 0.25


class Intake:
    """Files on their way into a cache.

    Args:
        shares: the files of each worker.
        compression: of all of them.
        say: told how many rows were taken, a few times a second.
    """

    def __init__(
        self,
        store: Store,
        shares: Sequence[Sequence[str]],
        compression: str | None,
        say: Callable[[int], Any],
    ) -> None:
        self._store, self._say = store, say
        self._shares = shares
        self._compression = compression
        self._task = f"tfrecord.{uuid.uuid4().hex}"
        self._marks: list[NDArray[np.int64]] = []
        self._processes: list[WorkerProcess] = []

    def run(self) -> int:
        """Bring it all in.

        Returns: how many rows.
        Raises: what a worker raised; WorkerError: one died. They say how many rows were published.
            CacheFullError also: this very process leases what would have to be evicted.
        """
        try:
            with self._store.usage.writing():
                for number in range(len(self._shares)):
                    self._launch(number)
                self._watch()
        except (ArrowCacheError, ValueError) as error:
            self._end()
            raise self._with_count(error) from error.__cause__
        finally:
            self._end()
        return self._rows

    @property
    def _rows(self) -> int:
        return sum(int(marks[_ROWS]) for marks in self._marks)

    def _launch(self, number: int) -> None:
        plan = {
            "cache": str(self._store.folder.path),
            "files": list(self._shares[number]),
            "compression": self._compression,
            "task": f"{self._task}.{number}",
        }
        marks = np.array([0, _NOT_BEGUN, 0, False], np.int64)
        with _file(json.dumps(plan).encode()) as plan_file, _file(marks.tobytes()) as memory:
            self._marks.append(_marks_in(memory))
            with _without_interrupts():
                process = WorkerProcess(memory, plan_file, number, start=_START, environment=_ENVIRONMENT)
                self._processes.append(process)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for number, process in enumerate(self._processes):
                selector.register(process.channel, selectors.EVENT_READ, number)
            while selector.get_map():
                for key, _ in selector.select(_LOOK_SECONDS):
                    self._hear(key.data)
                    selector.unregister(key.fileobj)
                self._end_rings()
                self._say(self._rows)

    def _hear(self, number: int) -> None:
        """A worker is done, or has failed, or died."""
        received = self._processes[number].channel.receive()
        if received is None:
            process = self._processes[number]
            process.end()
            raise WorkerError(
                f"{self._place(number)}: process {process.pid}, which read it, {process.how_it_ended()}; "
                "look at that record, or use fewer workers if the memory was short"
            )
        if error := received[0]["error"]:
            raise unpack_error(error)

    def _place(self, number: int) -> str:
        path = self._shares[number][int(self._marks[number][_FILE])]
        record = int(self._marks[number][_RECORD])
        return f"{path}, before its first record" if record == _NOT_BEGUN else place(path, record)

    def _end_rings(self) -> None:
        """Nobody else would: workers wait for what this process leases, and it waits for them."""
        store = self._store
        if not any(marks[_WAITS] for marks in self._marks):
            return
        store.evict(0)  # readers of this process that are between two epochs let go
        listed = store.segments()
        if listed and any(
            lease.stays(listed[0].seq) for lease in own_leases(store.folder.lease_lock, listed[0].seq)
        ):
            raise CacheFullError(
                "there is no room, and this very process reads the oldest segments, so waiting would not "
                "end: close its snapshots or end its epoch, raise capacity, or raise headroom"
            )

    def _with_count(self, error: ArrowCacheError | ValueError) -> Exception:
        """The error, and what has become of the import; once all workers have ended."""
        ours = [segment for segment in self._store.segments() if segment.task.startswith(self._task)]
        if not ours:
            return type(error)(f"{error}. Nothing was published before")
        rows = sum(segment.rows for segment in ours)
        return type(error)(
            f"{error}. {rows} rows were published before and stay in the cache: begin again with a new one, "
            "or these come twice"
        )

    def _end(self) -> None:
        """Kill what still runs. Idempotent."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.kill()
        for process in processes:
            process.end()
            process.close()


@contextmanager
def _file(data: bytes) -> Iterator[int]:
    fd = file_of(data)
    try:
        yield fd
    finally:
        os.close(fd)


def _marks_in(memory: int) -> NDArray[np.int64]:
    return array_over(map_all(memory), 0, np.int64, (4,))


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Keep Ctrl-C until a process is started and known, and from the process until it ignores it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# in a worker


def main(end: int, memory: int, plan: int) -> None:
    """Take a share in, and say what came of it.

    Args:
        end, memory, plan: descriptors of our socket, of what we are at, and of what to do.
    """
    tf.get_logger().setLevel("ERROR")
    with closing(socket.socket(fileno=end)) as link:
        channel = Channel(link)
        try:
            take_in(json.loads(bytes_of(plan)), _marks_in(memory), lambda: _has_hung_up(link))
        except Cancelled:
            return
        except BaseException as error:  # noqa: BLE001  # the main process raises it
            channel.send({"error": pack_error(error)})
        else:
            channel.send({"error": ""})


def take_in(plan: dict[str, Any], marks: NDArray[np.int64], is_cancelled: Callable[[], bool]) -> None:
    """Read files into a cache, and keep `marks` at what it is at.

    Raises: what `samples` and `Store.publish` do, ValueError: a row larger than a segment;
        Cancelled: nobody waits for it.
    """
    store = open_store(Path(plan["cache"]), check="structure")
    settings = store.settings
    builder = SegmentBuilder(settings.schema, settings.full_rows, settings.segment_bytes)
    published = 0

    def wait() -> bool:  # asked while there is no room
        marks[_WAITS] = True
        return is_cancelled()

    def publish() -> None:
        nonlocal published
        if is_cancelled():
            raise Cancelled
        store.publish(builder.encode(), f"{plan['task']}.{published}", RoomPolicy("wait", is_cancelled=wait))
        marks[_WAITS] = False
        builder.clear()
        published += 1

    for index, path in enumerate(plan["files"]):
        marks[[_FILE, _RECORD]] = index, _NOT_BEGUN

        def at(number: int) -> None:
            marks[_RECORD] = number

        for sample in samples(path, settings.schema, plan["compression"], at):
            try:
                rows = builder.convert(sample, many=False)
            except ValueError as error:
                _fail(path, int(marks[_RECORD]), error)
            if not builder.take(rows, 0):
                publish()
                builder.take(rows, 0)
            marks[_ROWS] += 1
            if builder.is_full:
                publish()
    if builder.rows:
        publish()


def _fail(path: str, number: int, error: ValueError) -> NoReturn:
    raise ValueError(f"{place(path, number)}: {error}") from None


def _has_hung_up(link: socket.socket) -> bool:
    """Whether the main process is gone, or has given us up."""
    poll = select.poll()
    poll.register(link, 0)
    return bool(poll.poll(0))
