"""Worker pool: shares requests out among worker processes, and replaces processes that die.

It owns the processes and one thread. The thread sends requests, takes in answers, and starts processes: at
once, and again when one has died. They live as long as the loader, over all epochs. handle.py has the
requests and the memory of each process.

Guarantees
- Order: requests are begun in the order in which they were made. One that is made again comes before all
  later ones. One that nobody wants any more is not begun.
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
import functools
import logging
import os
import selectors
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from arrowcache import linux
from arrowcache.errors import WorkerError
from arrowcache.pickling import unpack_error
from arrowcache.process import Message
from arrowcache.reading.future import Future
from arrowcache.reading.workers.handle import Finished, Request, WorkerHandle
from arrowcache.shortage import explained, start

_log = logging.getLogger("arrowcache")

DEPTH = 2  # requests that a worker has at a time: one at work, one ready
MOST_LOSSES = 3  # in a row: of processes that never got ready, or of those that were at one request
_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.1, 5.0
_GRACE_SECONDS = 1.0  # for a worker to end by itself
_DROP_SECONDS = 1.0  # for workers to let go of what they lease
_LOOK_SECONDS = 10.0
_JOIN_SECONDS = 5.0


class Restarts:
    """Decides when a process that was lost is replaced, and when to give up. Pure: time is passed in.

    The first process is replaced at once. With each further loss, while no batch was made, the pause doubles.
    """

    def __init__(self, not_before: float = 0.0) -> None:
        self._losses = 0
        self.failed_starts = 0
        self.not_before = not_before  # no process is started sooner

    def lost(self, now: float, *, was_ready: bool, others_are_ready: bool) -> bool:
        """A process was lost, or none could be had. Returns: whether to give up."""
        self._losses += 1
        self.failed_starts = 0 if was_ready else self.failed_starts + 1
        if self.failed_starts >= MOST_LOSSES and not others_are_ready:
            return True
        pause = _PAUSE_SECONDS * 2 ** min(self._losses - 1, 10) if self._losses > 1 else 0.0
        self.not_before = max(self.not_before, now + min(pause, _MOST_PAUSE_SECONDS))
        return False

    def started(self) -> None:
        """A process is ready."""
        self.failed_starts = 0

    def made(self) -> None:
        """A batch was made."""
        self._losses = 0


class Pool:
    """Worker processes. Thread-safe.

    The thread that makes a request holds the pool, and sends it to a worker without waking the pool's thread.
    `end` and `close` may be called by finalizers, at any point of any thread: they wait for no lock.

    Args:
        size: the number of processes.
        settings, transform: for the processes; see batch_maker.py.
    Raises: OSError: no descriptor can be had.
    """

    def __init__(self, size: int, settings: Message, transform: bytes) -> None:
        self._size, self._settings, self._transform = size, settings, transform
        self._pid = os.getpid()
        with ExitStack() as owned:
            self._bell = linux.event()
            owned.callback(os.close, self._bell)
            self._selector = selectors.DefaultSelector()
            owned.callback(self._selector.close)
            self._owned = owned.pop_all()  # here, or nothing was
        self._selector.register(self._bell, selectors.EVENT_READ, self._unring)
        self._mutex = threading.Lock()
        self._holder = 0  # the thread that holds it
        self._thread = threading.Thread(target=self._run, name="arrowcache-processes", daemon=True)
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._workers: list[WorkerHandle] = []
        self._waiting: list[Request] = []  # by serial
        self._serials = 0
        self._restarts = Restarts()
        self._is_wanted = True  # also before the first request, until processes prove to fail
        self._epochs = self._ended = 0  # the last one that began, that ended
        self._segments = b""  # packed: those of the last epoch that began
        self._starting_since: float | None = None  # somebody waits, and no worker is ready; by perf_counter
        self._start_seconds = 0.0  # that this took, until somebody takes them
        self._arrays = 1  # of a batch
        self._growths = 0  # of workers that died
        _inherited.add(self)

    def start(self) -> None:
        """Start the processes; returns at once. Raises: WorkerError: the thread cannot be started."""
        try:
            start(self._thread)
        except WorkerError:
            _inherited.discard(self)
            self._close_files()
            raise

    def begin(self, segments: bytes) -> int:
        """Begin an epoch over packed segments, which the caller leases until `end`. Returns: its number."""
        with self._held():
            self._epochs += 1
            self._segments = segments
            for worker in self._workers:
                self._tell_of_epoch(worker)
            return self._epochs

    def make(self, epoch: int, step: int, ids: NDArray[np.int64], oldest: int) -> Future[Finished]:
        """Ask for the batches of some rows, which begin at a step; requests are begun in this order.

        Args:
            oldest: segments of the epoch before this one may be let go.
        Returns: a future, which may be cancelled at any time: the request is then not begun, or its answer
            is dropped.
        """
        request = Request(epoch, step, ids, oldest)
        with self._held():
            if self._failure is not None:
                request.fail(self._failure)
                return request.future
            self._serials += 1
            request.serial = self._serials
            self._waiting.append(request)
            if self._starting_since is None and not any(worker.is_ready for worker in self._workers):
                self._starting_since = time.perf_counter()
            self._dispatch()
            is_short = len(self._workers) < self._size
        if is_short:
            self._wake()
        return request.future

    def end(self, epoch: int) -> None:
        """Make nothing more for an epoch, or for one before it."""
        self._ended = max(self._ended, epoch)
        for worker in list(self._workers):
            worker.end_epoch(self._ended)

    def drop(self) -> None:
        """Have workers let go of what they lease of epochs that have ended.

        Blocks: until those that are ready have, at most a second: one may be in a transform.
        """
        if self._is_stopping or self._is_here:
            return
        awaited: list[Future[None]] = []
        deadline = time.monotonic() + _DROP_SECONDS
        with self._held():
            for worker in self._workers:
                if worker.tell({"do": "drop"}):
                    done: Future[None] = Future()
                    worker.drops.append(done)
                    if worker.is_ready:  # others have leased nothing, or just now
                        awaited.append(done)
        for done in awaited:
            if not done.wait(deadline - time.monotonic()):
                return

    def is_hoarded(self, usual_batches: int) -> bool:
        """True if the consumer keeps many more batches than this."""
        return sum(worker.arrays_in_use for worker in list(self._workers)) > usual_batches * self._arrays

    @property
    def is_starting(self) -> bool:
        """True while no process is ready, and none has proved to fail."""
        return self._is_wanted and not any(worker.is_ready for worker in list(self._workers))

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes of shared memory for batches, and how often some was added."""
        workers = list(self._workers)
        growths = self._growths + sum(worker.growths for worker in workers)
        return sum(worker.allocated_bytes for worker in workers), growths

    def take_start_seconds(self) -> float:
        """The seconds that no process was ready, since the last call; not of a start that still lasts."""
        taken, self._start_seconds = self._start_seconds, 0.0
        return taken

    def in_progress(self) -> list[tuple[str, float]]:
        """The stages that workers are at, and since when, by `time.perf_counter`."""
        stages = [stage for worker in list(self._workers) if (stage := worker.stage) is not None]
        since = self._starting_since
        return stages if since is None else [*stages, ("start", since)]

    def close(self) -> None:
        """End the processes. Idempotent.

        Blocks: about as long as they take to end, at most some seconds.
        """
        if self._pid == os.getpid():
            self._is_stopping = True
            self._wake()
            if not self._is_here and self._thread.ident is not None:
                self._thread.join(_JOIN_SECONDS)

    def forget_in_child(self) -> None:
        """A forked child has neither the thread nor the processes, and must keep nothing of them open."""
        self._is_stopping = True
        for worker in self._workers:
            worker.process.forget()
        self._workers = []
        self._close_files()

    # who has it

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._mutex:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = 0

    @property
    def _is_here(self) -> bool:
        """True if this thread holds the pool, or is its own: a finalizer must not wait for it then."""
        return threading.get_ident() in (self._thread.ident, self._holder)

    def _wake(self) -> None:
        with suppress(OSError):  # closed, or full: it rings already
            linux.add_event(self._bell)

    def _unring(self) -> None:
        with suppress(BlockingIOError):
            linux.take_event(self._bell)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as its children do, until they ignore it
        failure: BaseException | None = None
        try:
            while not self._is_stopping:
                self._start_missing()
                with self._held():
                    self._dispatch()
                    pause = self._restarts.not_before - time.monotonic() if self._is_short else _LOOK_SECONDS
                ready = self._selector.select(max(0.0, pause))
                with self._held():
                    for key, _ in ready:
                        key.data()
        except BaseException as error:  # noqa: BLE001  # whoever waits is told
            failure = error
        finally:
            with self._held():
                self._shut_down(failure)

    # called while it is held

    def _tell_of_epoch(self, worker: WorkerHandle) -> None:
        worker.tell({"do": "begin", "epoch": self._epochs}, self._segments)

    # processes

    @property
    def _is_short(self) -> bool:
        """True if there are too few processes, and requests are waited for or others work."""
        return len(self._workers) < self._size and (
            self._is_wanted or bool(self._waiting) or any(worker.is_ready for worker in self._workers)
        )

    def _start_missing(self) -> None:
        """Called while it is not held: others do not wait for a process to start."""
        while not self._is_stopping:
            with self._held():
                if not self._is_short or time.monotonic() < self._restarts.not_before:
                    return
            try:
                worker = WorkerHandle(self._size)
            except OSError as error:
                with self._held():
                    self._note_loss(f"could not be started: {explained(error)}", was_ready=False)
            else:
                with self._held():
                    self._employ(worker)

    def _employ(self, worker: WorkerHandle) -> None:
        self._workers.append(worker)
        for what, action in ((worker.process.watch, self._bury), (worker.process.channel, self._take_in)):
            self._selector.register(what, selectors.EVENT_READ, functools.partial(action, worker))
        worker.end_epoch(self._ended)
        worker.tell({"do": "work", **self._settings}, self._transform)
        if self._segments:
            self._tell_of_epoch(worker)

    def _bury(self, worker: WorkerHandle) -> None:
        """A worker has ended, or is ended here: its requests are made again."""
        if worker not in self._workers:
            return
        self._workers = [other for other in self._workers if other is not worker]
        worker.process.end()
        with suppress(EOFError):
            while (message := worker.hear()) is not None:  # what it said before
                self._answered(worker, message)
        for what in (worker.process.watch, worker.process.channel):
            self._selector.unregister(what)
        worker.process.close()
        self._growths += worker.growths
        for done in worker.drops:
            done.set_result(None)
        how = worker.how_it_ended()
        for request in worker.asked:
            bisect.insort(self._waiting, request, key=lambda other: other.serial)
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

    def _note_loss(self, how: str, *, was_ready: bool) -> None:
        others_are_ready = any(worker.is_ready for worker in self._workers)
        if self._restarts.lost(time.monotonic(), was_ready=was_ready, others_are_ready=others_are_ready):
            self._give_up(
                WorkerError(
                    f"worker processes cannot start: {self._restarts.failed_starts} in a row were lost "
                    f"before they were ready; the last one {how}; see what it wrote to stderr, or pass "
                    "worker_type='thread' to do without"
                )
            )
        _log.debug("a worker process was lost: %s", how)

    def _give_up(self, error: BaseException) -> None:
        """Fail all requests that were made by now; the next one tries anew."""
        self._fail_all(error)
        self._is_wanted = False
        self._restarts = Restarts(time.monotonic() + _PAUSE_SECONDS)
        self._end_start()

    def _end_start(self) -> None:
        since, self._starting_since = self._starting_since, None
        if since is not None:
            self._start_seconds += time.perf_counter() - since

    # requests

    def _dispatch(self) -> None:
        while self._waiting:
            free = [worker for worker in self._workers if worker.is_ready and len(worker.asked) < DEPTH]
            if not free:
                return
            request = self._waiting.pop(0)
            if request.future.done() or request.epoch <= self._ended:
                request.future.cancel()
            else:
                min(free, key=lambda worker: len(worker.asked)).ask(request)

    def _take_in(self, worker: WorkerHandle) -> None:
        """A worker has something to say, or is dying."""
        if worker in self._workers:
            try:
                message = worker.hear()
            except EOFError:
                self._bury(worker)
            else:
                if message is not None:
                    self._answered(worker, message)

    def _answered(self, worker: WorkerHandle, message: Message) -> None:
        say = message["say"]
        if say == "ready":
            worker.is_ready = True
            self._restarts.started()
            self._end_start()
        elif say == "dropped":
            if worker.drops:  # else Ctrl-C came as it was asked
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
                request.future.cancel()
            worker.asked.popleft()  # last: whatever fails here, somebody knows of it

    def _fail_all(self, error: BaseException) -> None:
        waiting, self._waiting = self._waiting, []
        for request in (*waiting, *(request for worker in self._workers for request in worker.asked)):
            request.fail(error)

    def _shut_down(self, failure: BaseException | None) -> None:
        self._failure, self._is_stopping = failure or ValueError("the loader was closed"), True
        self._end_start()
        for worker in self._workers:
            self._selector.unregister(worker.process.channel)
            worker.process.channel.close()
        deadline = time.monotonic() + _GRACE_SECONDS
        for worker in self._workers:
            if not (worker.is_ready and worker.process.wait(deadline - time.monotonic())):
                worker.process.kill()
        for worker in self._workers:
            worker.process.end()
            worker.process.close()
            for done in worker.drops:
                done.set_result(None)
        self._fail_all(self._failure)
        self._workers = []
        self._close_files()

    def _close_files(self) -> None:
        self._owned.close()


_inherited: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for pool in list(_inherited):
        pool.forget_in_child()
    _inherited.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
