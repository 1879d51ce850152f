"""Worker pool: has worker processes make the batches of an epoch, and replaces processes that die.

`RemoteAssembly` cuts an epoch into groups, in step order, as assembly.py does; each is one request to its
pool. With a transform a group is one batch, so that transforms run side by side. Without one, if all columns
have a fixed width, a group has many batches, which a worker gathers at once. A process takes longer to import
NumPy and Arrow than many an epoch takes: so batches without a transform are made in this process until the
first worker is ready.

`WorkerPool` has a thread for each process of its group: the thread starts the process, takes in its answers,
and starts another one when it has died. They live as long as the loader, over all epochs. Whoever makes a
request sends it to a worker that is free; else the next answer's thread does. A `WorkerHandle` is one process
seen from here: the memory shared with it, its open requests in their order, and the slots in use here: the
next request names those that have come back.

Guarantees
- Order: requests are begun in the order in which they were made. A request that is made again comes before
  all later ones. A cancelled request is not begun.
- Death: a request whose worker died is made again, by another worker. If three workers in a row died of it,
  it fails, and says how they died. If three processes in a row cannot even start, every request fails, unless
  another process works.
- Errors: an exception of a transform is raised in place of its batch, with the worker's traceback as its
  cause. A message that cannot be sent or understood ends its process, with a reason.
- End: workers end when the pool is closed (killed, where one does not end within a second), and when the main
  process dies, in whatever way. They ignore Ctrl-C. Neither their memory nor their sockets have a name.
"""

from __future__ import annotations

import bisect
import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import WorkerError
from arrowcache.lifetimes import Mutex, finalizer, forgets_in_child
from arrowcache.limits import Limits
from arrowcache.os_errors import explained
from arrowcache.pickling import pickled, unpack_error
from arrowcache.process import LEAVE_ALONE, Message, WorkerGroup, one_thread
from arrowcache.reading.assembly import (
    MEMORY,
    BatchGroup,
    Memory,
    ReadyBatch,
    RemoteBatches,
    RowAssembly,
    mean_published,
)
from arrowcache.reading.epoch import Epoch
from arrowcache.reading.options import LoaderOptions
from arrowcache.reading.slots import Loan, SharedMemory, array_over, lent
from arrowcache.reading.stats import Meter
from arrowcache.reading.worker_threads import Future
from arrowcache.reading.workers.messages import (
    ENDED,
    PROGRESS,
    STAGES_OF_WORKERS,
    pack_segments,
    unpack_column,
)
from arrowcache.storage.store import Store

_MAIN = "arrowcache.reading.workers.worker"


class Finished(NamedTuple):
    """The answer to a request: its batches lie in slots, which return with the last array over them.

    `seconds` are those of each stage in the worker; `nbytes` are the bytes that it gathered.
    """

    columns: list[tuple[str, str, list[NDArray[Any]]]]
    nbytes: int
    seconds: dict[str, float]

    @property
    def arrays(self) -> int:
        """The number of arrays of the batch."""
        return sum(len(arrays) for _, _, arrays in self.columns)

    def batch(self, rows: slice | None = None) -> dict[str, Any]:
        """The batch, or some rows of it, if it is several batches."""
        return {
            name: unpack_column(kind, arrays if rows is None else [array[rows] for array in arrays])
            for name, kind, arrays in self.columns
        }


class Request(Future[Finished]):
    """Rows to be made into batches. A request ends once: delivered, failed or skipped.

    `serial` is its place in the order of all requests. Segments of the epoch before `oldest` may be released.
    `deaths` are deaths of workers that were making it.
    """

    def __init__(self, epoch: int, step: int, ids: NDArray[np.int64], oldest: int, serial: int) -> None:
        super().__init__()
        self.epoch, self.step, self.ids, self.oldest, self.serial = epoch, step, ids, oldest, serial
        self.deaths = 0

    def deliver(self, finished: Finished) -> None:
        """End it with a batch, unless it has ended."""
        if self.begin():
            self.set_result(finished)

    def fail(self, error: BaseException) -> None:
        """End it with an error, even if a worker is still making it."""
        if self.begin():
            self.set_exception(error)


class WorkerHandle:
    """A worker process.

    Args:
        group: starts it.
        workers: number of those that share the memory for batches.
    Raises: as `WorkerGroup.start`.
    """

    def __init__(self, group: WorkerGroup, workers: int) -> None:
        self._memory = SharedMemory.create(workers)
        self._words = self._memory.words
        self.process = group.start(self._memory.fd)
        self.asked: deque[Request] = deque()
        self.drops: deque[Future[None]] = deque()  # futures of `drop`, in order
        self.is_ready = False
        self.allocated_bytes = self.growths = 0
        self._lent: set[Loan] = set()
        self._returned: deque[Loan] = deque()  # the end of an array touches this alone

    def ask(self, request: Request) -> None:
        """Send a request to the worker, and the slots that it may use again."""
        returned = []
        with suppress(IndexError):
            while True:
                loan = self._returned.popleft()
                self._lent.discard(loan)
                returned.append(loan.buffer)
        message = {
            "do": "make",
            "id": request.serial,
            "epoch": request.epoch,
            "released": request.oldest,
            "returned": returned,
        }
        self.asked.append(request)
        self.tell(message, request.ids.tobytes())

    def drop(self) -> Future[None]:
        """Let the worker release epochs that have ended. Returns: a future that ends then, or at its end."""
        done: Future[None] = Future()
        self.drops.append(done)
        self.tell({"do": "drop"})
        return done

    def finished(self, answer: Message) -> Finished:
        """Return the batches of an answer. The worker does not touch them while arrays over them live."""
        self.allocated_bytes, self.growths = answer["memory"]
        columns = [
            (name, kind, [self._array(*place) for place in places])
            for name, kind, places in answer["columns"]
        ]
        return Finished(columns, answer["nbytes"], answer["seconds"])

    def tell(self, message: Message, data: bytes = b"") -> None:
        """Send a message. If that fails, the process has ended, or is ended here."""
        try:
            self.process.send(message, data)
        except BlockingIOError:  # it has stopped, or is at one batch for very long
            self.process.kill("it had read none of hundreds of messages")
        except OSError as error:
            self._lose(WorkerError(f"a worker process could not be told what to do: {explained(error)}"))

    def hear(self) -> Message | None:
        """Return its next message, or None if it has ended, or is to be ended.

        Blocks: until a message or the end.
        """
        try:
            received = self.process.hear()
            if received is not None and "say" not in received:
                raise ValueError("a dict that says nothing")
        except WorkerError as error:  # its request is unknown
            self._lose(error)
            return None
        except ValueError as error:
            self._lose(WorkerError(f"a worker process said what is no message ({error}): {LEAVE_ALONE}"))
            return None
        return received

    def end_epoch(self, epoch: int) -> None:
        """Stop it from making batches for an epoch, and for all before it; the worker sees this at once."""
        self._words[ENDED] = epoch

    @property
    def stage(self) -> tuple[str, float] | None:
        """Return its stage and since when, by `time.perf_counter`, or None."""
        word = int(self._words[PROGRESS])
        return (STAGES_OF_WORKERS[word % 4], word // 4 / 1e9) if word else None

    @property
    def arrays_in_use(self) -> int:
        """Return the number of living arrays over its slots in this process."""
        return len(self._lent) - len(self._returned)

    def _array(self, dtype: str, shape: list[int], offset: int) -> NDArray[Any]:
        kind = np.dtype(dtype)
        if not offset:
            return np.empty(shape, kind)
        nbytes = kind.itemsize * math.prod(shape)
        self._memory.parts[offset] = max(nbytes, self._memory.parts.get(offset, 0))
        owner, loan = lent(self._memory, offset, nbytes, offset, self._returned.append)
        self._lent.add(loan)
        return array_over(owner, kind, shape)

    def _lose(self, error: WorkerError) -> None:
        for request in list(self.asked):  # others may add requests meanwhile
            request.fail(error)
        self.process.kill(str(error))


_log = logging.getLogger("arrowcache")

DEPTH = 2  # requests of a worker at a time: one in progress, one ready
MAX_LOSSES = 3  # in a row: of processes that never got ready, or that worked at one request
_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.1, 5.0


class Restarts:
    """Decides when a process that was lost is replaced, and when to give up. Pure: time is passed in.

    The first process is replaced at once. With each further loss, while no batch was made, the pause doubles.
    """

    def __init__(self, not_before: float = 0.0) -> None:
        self._losses = 0
        self.failed_starts = 0
        self.not_before = not_before  # no process is started sooner

    def lost(self, now: float, *, was_ready: bool, others_are_ready: bool) -> bool:
        """Note that a process was lost, or could not be started. Returns: True: give up."""
        self._losses += 1
        self.failed_starts = 0 if was_ready else self.failed_starts + 1
        if self.failed_starts >= MAX_LOSSES and not others_are_ready:
            return True
        pause = _PAUSE_SECONDS * 2 ** min(self._losses - 1, 10) if self._losses > 1 else 0.0
        self.not_before = max(self.not_before, now + min(pause, _MAX_PAUSE_SECONDS))
        return False

    def started(self) -> None:
        """Note that a process is ready. Failed starts are counted anew."""
        self.failed_starts = 0

    def made(self) -> None:
        """Note that a batch was made. The next lost process is replaced at once."""
        self._losses = 0


class WorkerPool:
    """Worker processes. Thread-safe.

    `end` and `close` may be called by finalizers, at any point of any thread: they wait for no lock.
    """

    def __init__(self, size: int, settings: Message, transform: bytes) -> None:
        self._size, self._settings, self._transform = size, settings, transform
        self._mutex = Mutex("the sharing of requests")
        self._group = WorkerGroup(_MAIN, one_thread())
        self._workers: list[WorkerHandle] = []
        self._waiting: list[Request] = []  # in order of their serial
        self._serials = 0
        self._restarts = Restarts()
        self._is_wanted = True  # also before the first request; False once processes fail
        self._epochs = self._ended = 0  # numbers of the last epoch that began, and that ended
        self._segments = b""  # packed segments of the last epoch that began
        self._starting_since: float | None = None  # by perf_counter, while a wait has no ready worker
        self._start_seconds = 0.0  # time of that state, until `take_start_seconds`
        self._arrays = 1  # arrays of a batch
        self._growths = 0  # of workers that died
        forgets_in_child(self)

    def start(self) -> None:
        """Start the processes that are missing; returns at once.

        Raises: WorkerError: a thread cannot be started. ValueError: the pool is closed.
        """
        if self._group.is_closed:
            raise ValueError("the loader is closed: make a new one")
        with self._mutex.held():
            self._group.supervise(self._run, self._size)

    def begin(self, segments: bytes) -> int:
        """Begin an epoch over packed segments, which the caller leases until `end`. Returns: its number."""
        with self._mutex.held():
            self._epochs += 1
            self._segments = segments
            for worker in self._workers:
                self._tell_of_epoch(worker)
            return self._epochs

    def make(self, epoch: int, step: int, ids: NDArray[np.int64], oldest: int) -> Request:
        """Request the batches of some rows, from a step on; requests are begun in this order.

        Args:
            oldest: segments of the epoch before this one may be released.
        Returns: a future, which may be cancelled at any time: the request is then not begun, or its answer
            is dropped.
        """
        with self._mutex.held():
            self._serials += 1
            request = Request(epoch, step, ids, oldest, self._serials)
            self._waiting.append(request)
            if not self._any_ready() and self._starting_since is None:
                self._starting_since = time.perf_counter()
            self._dispatch()
            if self._group.is_closed:
                self._fail_all(ValueError("the loader was closed"))
            else:  # some threads are missing after a failure that was reported
                try:
                    self._group.supervise(self._run, self._size)
                except WorkerError as error:
                    self._give_up(error)
        return request

    def end(self, epoch: int) -> None:
        """Stop making batches for an epoch, and for all before it."""
        self._ended = max(self._ended, epoch)
        for worker in list(self._workers):
            worker.end_epoch(self._ended)

    def drop(self) -> None:
        """Let workers release their leases on epochs that have ended.

        Blocks: until the ready workers have, at most a second: one may be in a transform.
        """
        if self._group.is_closed or self._mutex.is_here or self._group.is_here:
            return
        deadline = time.monotonic() + Limits.current.worker_drop_seconds
        with self._mutex.held():
            drops = [(worker.is_ready, worker.drop()) for worker in self._workers]
        for is_awaited, done in drops:  # the others lease nothing, or began just now
            if is_awaited:
                done.wait(deadline - time.monotonic())

    def is_hoarded(self, usual_batches: int) -> bool:
        """True if the consumer keeps many more batches than this."""
        return sum(worker.arrays_in_use for worker in list(self._workers)) > usual_batches * self._arrays

    @property
    def is_starting(self) -> bool:
        """True while no process is ready, and none has proved to fail."""
        return self._is_wanted and not self._any_ready()

    @property
    def memory(self) -> tuple[int, int]:
        """Return the bytes of shared memory for batches, and how often some was added."""
        workers = list(self._workers)
        growths = self._growths + sum(worker.growths for worker in workers)
        return sum(worker.allocated_bytes for worker in workers), growths

    def take_start_seconds(self) -> float:
        """Return the seconds without a ready process since the last call, without a start in progress."""
        taken, self._start_seconds = self._start_seconds, 0.0
        return taken

    def in_progress(self) -> list[tuple[str, float]]:
        """Return the stages of workers and their starts, by `time.perf_counter`."""
        stages = [stage for worker in list(self._workers) if (stage := worker.stage) is not None]
        since = self._starting_since
        return stages if since is None else [*stages, ("start", since)]

    def close(self) -> None:
        """End the processes. Idempotent.

        Blocks: about as long as they take to end, at most some seconds.
        """
        self._group.close(Limits.current.worker_end_seconds, waits=not self._mutex.is_here)

    def forget_in_child(self) -> None:
        """Forget the processes in a forked child: they are the parent's."""
        self._workers = []

    def _any_ready(self) -> bool:
        return any(worker.is_ready for worker in list(self._workers))

    # threads: each has one process after another

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._is_needed():
                try:
                    worker = WorkerHandle(self._group, self._size)
                except OSError as error:
                    with self._mutex.held():
                        self._note_loss(f"could not be started: {explained(error)}", was_ready=False)
                else:
                    self._serve(worker)
        except BaseException as error:  # noqa: BLE001  # whoever waits is told
            failure = error
        if self._group.is_closed:
            failure = ValueError("the loader was closed")
        if failure is not None:
            with self._mutex.held():
                self._group.leave()
                self._fail_all(failure)

    def _is_needed(self) -> bool:
        """Wait until another process may be started. Returns: False: none is needed; this thread has left."""
        while not self._group.is_closed:
            with self._mutex.held():
                if not (self._is_wanted or self._waiting or self._any_ready()):
                    self._group.leave()
                    return False
                pause = self._restarts.not_before - time.monotonic()
            if pause <= 0:
                return True
            self._group.pause(pause)
        return False

    def _serve(self, worker: WorkerHandle) -> None:
        try:
            with self._mutex.held():
                self._workers.append(worker)
                worker.end_epoch(self._ended)
                worker.tell({"do": "work", **self._settings}, self._transform)
                if self._segments:
                    self._tell_of_epoch(worker)
            while not self._group.is_closed and (message := worker.hear()) is not None:
                with self._mutex.held():
                    self._answered(worker, message)
                    self._dispatch()
        finally:
            with self._mutex.held():  # first: nobody may send it anything more
                self._workers = [other for other in self._workers if other is not worker]
            may_end = worker.is_ready or not self._group.is_closed
            how = self._group.end(worker.process, Limits.current.worker_end_seconds if may_end else 0.0)
            with self._mutex.held():
                self._bury(worker, f"(pid {worker.process.pid}) {how}")

    # called while it is held

    def _tell_of_epoch(self, worker: WorkerHandle) -> None:
        worker.tell({"do": "begin", "epoch": self._epochs}, self._segments)

    def _bury(self, worker: WorkerHandle, how: str) -> None:
        """Repeat the requests of a worker that has ended."""
        self._growths += worker.growths
        for done in worker.drops:
            done.set_result(None)
        for request in worker.asked:
            bisect.insort(self._waiting, request, key=lambda other: other.serial)
        if self._group.is_closed:
            return
        if worker.asked and worker.is_ready:
            first = worker.asked[0]
            first.deaths += 1
            if first.deaths >= MAX_LOSSES:
                first.fail(
                    WorkerError(
                        f"step {first.step} of the epoch was given up: {first.deaths} worker processes "
                        f"in a row were lost while they made it; the last one {how}; see what it wrote to "
                        "stderr, lower workers or batch_size, or pass workers=0 to see the transform at work"
                    )
                )
        self._note_loss(how, was_ready=worker.is_ready)
        self._dispatch()

    def _note_loss(self, how: str, *, was_ready: bool) -> None:
        if self._restarts.lost(time.monotonic(), was_ready=was_ready, others_are_ready=self._any_ready()):
            self._give_up(
                WorkerError(
                    f"worker processes cannot start: {self._restarts.failed_starts} in a row were lost "
                    f"before they were ready; the last one {how}; see what it wrote to stderr, or pass "
                    "worker_type='thread' to do without"
                )
            )
        _log.debug("a worker process %s", how)

    def _give_up(self, error: BaseException) -> None:
        """Fail all pending requests; the next one tries anew."""
        self._fail_all(error)
        self._is_wanted = False
        self._restarts = Restarts(time.monotonic() + _PAUSE_SECONDS)

    def _end_start(self) -> None:
        since, self._starting_since = self._starting_since, None
        if since is not None:
            self._start_seconds += time.perf_counter() - since

    def _dispatch(self) -> None:
        while self._waiting:
            free = [worker for worker in self._workers if worker.is_ready and len(worker.asked) < DEPTH]
            if not free:
                return
            request = self._waiting.pop(0)
            if request.done() or request.epoch <= self._ended:
                request.cancel()
            else:
                min(free, key=lambda worker: len(worker.asked)).ask(request)

    def _answered(self, worker: WorkerHandle, message: Message) -> None:
        say = message["say"]
        if say == "ready":
            worker.is_ready = True
            self._restarts.started()
            self._end_start()
        elif say == "dropped":
            worker.drops.popleft().set_result(None)
        elif say == "lost":
            self._give_up(unpack_error(message["error"]))
        else:
            request = worker.asked[0]
            assert request.serial == message["id"]
            if say == "made":
                self._restarts.made()
                finished = worker.finished(message)
                self._arrays = finished.arrays
                request.deliver(finished)
            elif say == "failed":
                request.fail(unpack_error(message["error"]))
            else:
                request.cancel()
            worker.asked.popleft()  # last: after a failure above the request is still known

    def _fail_all(self, error: BaseException) -> None:
        waiting, self._waiting = self._waiting, []
        for request in (*waiting, *(request for worker in self._workers for request in worker.asked)):
            request.fail(error)
        self._end_start()


# assembly

_PREFETCHED = 4
_MANY_BATCHES = 8  # plus two for each usual batch; prefetching and the batch in hand need fewer
_GROUP_BYTES = 32 << 20  # each group is a few hand-overs between three threads of this process


class RemoteAssembly(RowAssembly):
    """Makes groups of epochs for worker processes, whose pool it owns.

    Its base class makes the groups until a process is ready, unless there is a transform.

    The pool starts as soon as an epoch is wanted. It ends when this is closed or dropped, or when the
    interpreter ends.

    Args: as RowAssembly's. If `memory` is not the usual, batches lie in memory that a device may register.
    Raises: TypeError: the transform cannot be pickled.
    """

    _pool: WorkerPool
    _makes_here = True

    def __init__(self, store: Store, options: LoaderOptions, meter: Meter, memory: Memory = MEMORY) -> None:
        here = replace(
            options, settings=store.settings, workers=0, prefetch=None, transform=None, may_view=False
        )
        super().__init__(store, here, meter)
        columns, transform = self.columns, options.transform
        prefetch = _PREFETCHED if options.prefetch is None else options.prefetch
        in_flight = DEPTH * options.workers
        self._usual = in_flight + prefetch + 3  # slots in use at a time
        self._settings = {
            "cache": os.path.abspath(store.folder.path),
            "names": list(columns.names),
            "in_flight": -(-self._usual // options.workers),
            "with_ids": options.with_ids,
            "views": options.views,
            "keeps": memory is not MEMORY,
        }
        packed = b""
        if transform is not None:
            packed = pickled(transform, "the transform {!r}", "pass worker_type='thread'")
        are_together = transform is None and columns.are_fixed and options.budget is None
        batch_bytes = max(1, columns.row_bytes * self._batch_size)
        self._request_batches = max(1, _GROUP_BYTES // batch_bytes) if are_together else 1
        self._wanted = prefetch + in_flight * self._request_batches
        self._new_pool = partial(WorkerPool, options.workers, self._settings, packed)
        self._has_transform = transform is not None
        self._begin_anew()

    def prepare(self) -> None:
        """Start the processes, as an epoch is wanted soon; returns at once.

        Raises: WorkerError: no thread can be started.
        """
        self._pool.start()

    def wanted(self) -> int:
        return super().wanted() if self._makes_here else self._wanted

    def groups(self, epoch: Epoch, *, awaited: bool) -> Iterator[BatchGroup]:
        pool = self._pool
        pool.start()
        number = pool.begin(pack_segments(epoch.snapshot.segments))
        epoch.on_end = partial(pool.end, number)
        step = 0
        if self._makes_here:
            here = super().groups(epoch, awaited=awaited)
            while pool.is_starting and (group := next(here, None)) is not None:
                yield group
                step += group.batches
            if not pool.is_starting:
                self._makes_here = False
                self.slots = self._new_slots()  # frees the memory of the old ones
        size = 1 if awaited and not step else self._request_batches
        while step < epoch.order.steps:
            is_hoarded = pool.is_hoarded(_MANY_BATCHES + 2 * self._usual)
            last = min(step + (1 if is_hoarded else size), epoch.order.steps)
            yield self._group(pool, epoch, number, step, epoch.order.batches(step, last), last - step)
            step, size = last, min(2 * size, self._request_batches)

    def drop(self) -> None:
        self._pool.drop()

    def close(self) -> None:
        """End the processes. Idempotent. Blocks: at most some seconds."""
        self._pool.close()

    def after_fork(self) -> None:
        super().after_fork()
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Have a pool of which no process is started."""
        self._makes_here = not self._has_transform  # until a process is ready
        self._pool = self._new_pool()
        finalizer(self, WorkerPool.close, self._pool)

    def require_views(self) -> None:
        """Raises: ValueError: workers copy every batch."""
        raise ValueError(
            "worker processes copy every batch into shared memory: pass worker_type='thread' or workers=0"
        )

    def slot_stats(self) -> tuple[int, int]:
        (nbytes, growths), (shared, more) = super().slot_stats(), self._pool.memory
        return nbytes + shared, growths + more

    def in_progress(self) -> list[tuple[str, float]]:
        return self._pool.in_progress()

    def _group(
        self, pool: WorkerPool, epoch: Epoch, number: int, step: int, ids: NDArray[np.int64], batches: int
    ) -> BatchGroup:
        oldest = epoch.order.segments_span(epoch.delivered).start
        published = mean_published(epoch, ids)

        made = pool.make(number, step, ids, oldest)
        return RemoteBatches(epoch, batches, made, partial(self._finish, epoch, len(ids), batches, published))

    def _finish(
        self, epoch: Epoch, rows: int, batches: int, published: float, finished: Finished
    ) -> Iterator[ReadyBatch]:
        self.meter.leave({"start": self._pool.take_start_seconds()})
        self.meter.leave(finished.seconds)
        for number in range(batches):
            of_batch = slice(number * self._batch_size, min(rows, (number + 1) * self._batch_size))
            count = of_batch.stop - of_batch.start
            nbytes = finished.nbytes * count // rows
            batch = finished.batch(of_batch if batches > 1 else None)
            yield ReadyBatch(batch, count, nbytes, nbytes, published, epoch)
            del batch
