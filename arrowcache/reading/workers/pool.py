"""Worker pool: shares requests out among worker processes, and replaces processes that die.

It owns the processes, and a thread for each: that starts it, takes in its answers, and starts another one
when it has died. They live as long as the loader, over all epochs. Whoever makes a request sends it to a
worker that is free; else the next answer's thread does. handle.py has the requests and the memory of each
process.

Guarantees
- Order: requests are begun in the order in which they were made. A request that is made again comes before
  all later ones. A cancelled request is not begun.
- Death: a request whose worker died is made again, by another worker. If three workers in a row died of it,
  it fails, and says how they died. If three processes in a row cannot even start, every request fails, unless
  another process works.
- Errors: an exception of a transform is raised in place of its batch, with the worker's traceback as its
  cause.
- End: workers end when the pool is closed (killed, where one does not end within a second), and when the main
  process dies, in whatever way. They ignore Ctrl-C. Neither their memory nor their sockets have a name.
"""

from __future__ import annotations

import bisect
import logging
import threading
import time

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import WorkerError
from arrowcache.lifetimes import Mutex, forgets_in_child
from arrowcache.limits import Limits
from arrowcache.os_errors import explained, start
from arrowcache.pickling import unpack_error
from arrowcache.process import Message
from arrowcache.reading.future import Future
from arrowcache.reading.workers.handle import Request, WorkerHandle

_log = logging.getLogger("arrowcache")

DEPTH = 2  # requests of a worker at a time: one in progress, one ready
MOST_LOSSES = 3  # in a row: of processes that never got ready, or that worked at one request
_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.1, 5.0


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
        if self.failed_starts >= MOST_LOSSES and not others_are_ready:
            return True
        pause = _PAUSE_SECONDS * 2 ** min(self._losses - 1, 10) if self._losses > 1 else 0.0
        self.not_before = max(self.not_before, now + min(pause, _MOST_PAUSE_SECONDS))
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
        self._closed: Future[None] = Future()
        self._threads: list[threading.Thread] = []
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
        if self._closed.done():
            raise ValueError("the loader is closed: make a new one")
        with self._mutex.held():
            self._start_threads()

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
            if self._closed.done():
                self._fail_all(ValueError("the loader was closed"))
            elif len(self._threads) < self._size:  # some are missing after a failure that was reported
                try:
                    self._start_threads()
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
        if self._closed.done() or self._is_here:
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
        self._closed.set_result(None)
        for worker in list(self._workers):
            worker.process.channel.hang_up()
        deadline = time.monotonic() + Limits.current.join_seconds
        for thread in list(self._threads):
            if not self._is_here and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def forget_in_child(self) -> None:
        """Close in a forked child: it has neither the threads nor the processes."""
        self._closed.set_result(None)
        self._workers, self._threads = [], []

    @property
    def _is_here(self) -> bool:
        """True if this thread holds the pool or is one of its own: a finalizer must not wait for it then."""
        here = threading.get_ident()
        return self._mutex.is_here or any(thread.ident == here for thread in self._threads.copy())

    def _any_ready(self) -> bool:
        return any(worker.is_ready for worker in list(self._workers))

    # threads: each has one process after another

    def _start_threads(self) -> None:
        """Start missing threads, with the mutex held. Threads that failed to start are started next time."""
        while len(self._threads) < self._size:
            self._threads.append(threading.Thread(target=self._run, name="arrowcache-process", daemon=True))
        for thread in self._threads:
            if thread.ident is None:
                start(thread)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._is_needed():
                try:
                    worker = WorkerHandle(self._size)
                except OSError as error:
                    with self._mutex.held():
                        self._note_loss(f"could not be started: {explained(error)}", was_ready=False)
                else:
                    self._serve(worker)
        except BaseException as error:  # noqa: BLE001  # whoever waits is told
            failure = error
        if failure is not None or self._closed.done():
            with self._mutex.held():
                self._leave()
                self._fail_all(failure or ValueError("the loader was closed"))

    def _is_needed(self) -> bool:
        """Wait until another process may be started. Returns: False: none is needed; this thread has left."""
        while not self._closed.done():
            with self._mutex.held():
                if not (self._is_wanted or self._waiting or self._any_ready()):
                    self._leave()
                    return False
                pause = self._restarts.not_before - time.monotonic()
            if pause <= 0:
                return True
            self._closed.wait(pause)
        return False

    def _serve(self, worker: WorkerHandle) -> None:
        try:
            with self._mutex.held():
                self._workers.append(worker)
                worker.end_epoch(self._ended)
                worker.tell({"do": "work", **self._settings}, self._transform)
                if self._segments:
                    self._tell_of_epoch(worker)
            while not self._closed.done() and (message := worker.hear()) is not None:
                with self._mutex.held():
                    self._answered(worker, message)
                    self._dispatch()
        finally:
            with self._mutex.held():  # first: nobody may send it anything more
                self._workers = [other for other in self._workers if other is not worker]
            may_end = worker.is_ready or not self._closed.done()
            worker.end(Limits.current.worker_end_seconds if may_end else 0.0)
            with self._mutex.held():
                self._bury(worker)

    # called while it is held

    def _leave(self) -> None:
        self._threads = [thread for thread in self._threads if thread is not threading.current_thread()]

    def _tell_of_epoch(self, worker: WorkerHandle) -> None:
        worker.tell({"do": "begin", "epoch": self._epochs}, self._segments)

    def _bury(self, worker: WorkerHandle) -> None:
        """Repeat the requests of a worker that has ended."""
        self._growths += worker.growths
        for done in worker.drops:
            done.set_result(None)
        for request in worker.asked:
            bisect.insort(self._waiting, request, key=lambda other: other.serial)
        if self._closed.done():
            return
        how = worker.how_it_ended()
        if worker.asked and worker.is_ready:
            first = worker.asked[0]
            first.deaths += 1
            if first.deaths >= MOST_LOSSES:
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
        _log.debug("a worker process was lost: %s", how)

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
