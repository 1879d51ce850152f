"""Supervisor: has worker processes make batches, and replaces those that die.

It owns the processes, the shared ring that they write into, and one thread that sends requests,
takes in answers, and starts processes: when the first request comes, and again when one has died.
The processes live as long as the loader, over all epochs.

Guarantees: requests are begun in the order they were made, each with its slot, which nobody ever waits
for; a request whose worker died is made again, by another one, unless three workers died of it in a
row: then it fails, and says how they died; what a transform raises is raised in its place, with the
worker's traceback as its cause. Three processes in a row that cannot even start fail every request,
unless another one works. A slot is used again only when whoever wrote into it has said so or is
known to be dead. Workers end when the supervisor is closed (killed, where one does not end within a
second), and when the main process dies, in whatever way; Ctrl-C is not for them. Nothing of them has
a name: neither memory nor sockets nor locks.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import selectors
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import WorkerError
from arrowcache.reading.workers.channel import Message
from arrowcache.reading.workers.launch import WorkerProcess
from arrowcache.reading.workers.packing import Described, Pattern
from arrowcache.reading.workers.parcel import unpack_error
from arrowcache.reading.workers.request import Finished, Request
from arrowcache.reading.workers.shared import STAGES_OF_WORKERS, SharedRing, Slot, file_of

_log = logging.getLogger("arrowcache")

DEPTH = 2  # requests that a worker has at a time: one at work, one ready
MOST_DEATHS = 3  # in a row: of one request, or of processes that never got ready
_BACKOFF_SECONDS, _MOST_BACKOFF_SECONDS = 0.1, 5.0  # doubled with each death in a row
_GRACE_SECONDS = 1.0  # for a worker to end by itself
_JOIN_SECONDS = 5.0
_DROP_SECONDS = 1.0  # for workers to let go of what they lease
_LOOK_SECONDS = 10.0
_MANY_BATCHES = 8  # and two for each one in flight: more than prefetching and one in hand need


@dataclass(slots=True, eq=False)
class _Worker:
    """A process, and what it is to answer, in this order."""

    process: WorkerProcess
    number: int
    asked: deque[Request] = field(default_factory=deque)
    is_ready: bool = False
    knows: int = 0  # version of the pattern
    trouble: str = ""  # why it was ended here


class Supervisor:
    """The thread, and all that it works on.

    Whoever works on it holds `_mutex`: the thread, but for its waiting, and who makes requests, which
    so go to a worker without waking the thread. Others leave errands: they may be finalizers.
    """

    def __init__(self, size: int, plan: bytes, batch_size: int, usual_slots: int) -> None:
        self._size, self._batch_size, self._usual_slots = size, batch_size, usual_slots
        self._pid = os.getpid()
        with ExitStack() as owned:
            self.ring = SharedRing()
            owned.callback(self.ring.close)
            self._plan = file_of(plan)
            owned.callback(os.close, self._plan)
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            owned.callback(os.close, self._bell)
            self._selector = owned.enter_context(selectors.DefaultSelector())
            self._selector.register(self._bell, selectors.EVENT_READ, self._unring)
            self._owned = owned.pop_all()  # here, or nothing was
        self._mutex = threading.Lock()
        self._maker = 0  # the thread that holds it to make a request
        self._errands: deque[Callable[[], None]] = deque()
        self._workers: list[_Worker] = []
        self._todo: deque[Request] = deque()  # in the order of their serials
        self._pattern: Pattern | None = None  # until the first batch is made, one request is out at a time
        self._numbers = 0  # of epochs
        self._serials = 0
        self._epoch, self._manifest = 0, -1  # the one that workers are told of
        self._deaths = 0  # in a row, while nothing was made
        self._failed_starts = 0  # in a row
        self._start_at = 0.0  # no process is started before
        self._starting_since: float | None = None  # somebody waits, and no worker is ready; by perf_counter
        self._start_seconds = 0.0  # that this took, until it was told of
        self._drops: deque[tuple[threading.Event, set[int]]] = deque()  # and pids that have not answered
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="arrowcache-crew", daemon=True)
        _inherited.add(self)

    def start(self) -> None:
        self._thread.start()

    # called from any thread

    def begin(self, manifest: int) -> int:
        with self._mutex:
            self._numbers += 1
            if self._failure is None:
                self._tell_of_epoch(self._numbers, manifest)
            else:
                os.close(manifest)
            return self._numbers

    def make(self, epoch: int, step: int, ids: NDArray[np.int64], oldest: int) -> Future[Finished]:
        future: Future[Finished] = Future()
        if self._failure is not None:
            future.set_exception(self._failure)
            return future
        try:
            block = self.ring.take(ids.nbytes)
        except MemoryError as error:
            future.set_exception(error)
            return future
        self.ring.array(block, np.int64, ids.shape)[:] = ids
        with self._mutex:
            self._serials += 1
            request = Request(self._serials, epoch, step, len(ids), oldest, block, future)
            if self._failure is not None:
                self._fail(request, self._failure)
                return future
            self._todo.append(request)
            if self._starting_since is None and not any(worker.is_ready for worker in self._workers):
                self._starting_since = time.perf_counter()
            self._maker = threading.get_ident()
            self._dispatch()
            is_short = len(self._workers) < self._size
            self._maker = 0
        if is_short:
            self._ring_bell()
        return future

    def end(self, epoch: int) -> None:
        self.ring.ended = max(self.ring.ended, epoch)

    def drop(self) -> None:
        if self._is_stopping or threading.get_ident() in (self._thread.ident, self._maker):
            return
        done = threading.Event()
        self._leave(functools.partial(self._ask_to_drop, done))
        done.wait(_DROP_SECONDS)

    @property
    def is_hoarded(self) -> bool:
        of_batch = 1 + (self._pattern.arrays if self._pattern is not None else 1)
        return self.ring.in_use > (_MANY_BATCHES + 2 * self._usual_slots) * of_batch

    def in_progress(self) -> list[tuple[str, float]]:
        """What workers are at: the stage, and since when, by `time.perf_counter`."""
        progress = [self.ring.progress(number) for number in range(self._size)]
        stages = [(STAGES_OF_WORKERS[word % 4], word // 4 / 1e9) for word in progress if word]
        since = self._starting_since
        return stages if since is None else [*stages, ("start", since)]

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in list(self._workers) if not worker.process.has_ended]

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        self._is_stopping = True
        self._leave(_nothing)
        if threading.get_ident() not in (self._thread.ident, self._maker):  # the garbage collector's, perhaps
            self._thread.join(_JOIN_SECONDS)

    def forget_in_child(self) -> None:
        """A forked child has neither the thread nor the processes, and must keep no socket open."""
        for worker in self._workers:
            worker.process.forget()
        self._workers = []
        self._errands = deque()

    def _leave(self, errand: Callable[[], None]) -> None:
        self._errands.append(errand)
        self._ring_bell()

    def _ring_bell(self) -> None:
        with suppress(OSError):  # closed, or full: it rings already
            os.eventfd_write(self._bell, 1)

    # called in the thread, or with the mutex

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as workers do, until they ignore it
        try:
            while not self._is_stopping:
                self._turn()
        except BaseException as error:  # noqa: BLE001  # whoever waits for a batch gets it
            self._failure = error
        finally:
            with self._mutex:
                self._shut_down()

    def _turn(self) -> None:
        with self._mutex:
            while self._errands:
                self._errands.popleft()()
            self._start_missing()
            self._dispatch()
            wait_seconds = _LOOK_SECONDS
            if len(self._workers) < self._size and (self._todo or self._workers):
                wait_seconds = max(0.0, self._start_at - time.monotonic())
        ready = self._selector.select(wait_seconds)
        with self._mutex:
            for key, _ in ready:
                key.data()

    def _unring(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _tell_of_epoch(self, number: int, manifest: int) -> None:
        if self._manifest >= 0:
            os.close(self._manifest)
        self._epoch, self._manifest = number, manifest
        for worker in list(self._workers):
            self._send(worker, {"do": "begin", "epoch": number}, [manifest])

    def _ask_to_drop(self, done: threading.Event) -> None:
        waiting = set()
        for worker in list(self._workers):
            if self._send(worker, {"do": "drop"}):
                waiting.add(worker.process.pid)
        self._drops.append((done, waiting))
        self._settle_drops()

    def _settle_drops(self) -> None:
        living = {worker.process.pid for worker in self._workers}
        for done, waiting in self._drops:
            waiting &= living
            if not waiting:
                done.set()
        self._drops = deque(entry for entry in self._drops if entry[1])

    # processes

    def _start_missing(self) -> None:
        while self._todo or self._workers:  # else nobody wants them
            if len(self._workers) == self._size or time.monotonic() < self._start_at:
                return
            try:
                self._workers.append(self._start_one())
            except OSError as error:
                self._note_death(f"could not be started: {_named(error)}", has_worked=False)

    def _start_one(self) -> _Worker:
        number = min(set(range(self._size)) - {worker.number for worker in self._workers})
        self.ring.set_progress(number, 0)
        worker = _Worker(WorkerProcess(self.ring.fd, self._plan, number), number)
        self._selector.register(
            worker.process.watch, selectors.EVENT_READ, functools.partial(self._bury, worker)
        )
        self._selector.register(
            worker.process.channel, selectors.EVENT_READ, functools.partial(self._take_in, worker)
        )
        if self._manifest >= 0:
            self._send(worker, {"do": "begin", "epoch": self._epoch}, [self._manifest])
        return worker

    def _bury(self, worker: _Worker) -> None:
        """A worker has ended, or is ended here: what it was asked is asked again."""
        if worker not in self._workers:
            return
        self._workers = [other for other in self._workers if other is not worker]
        worker.process.end()
        while self._read_one(worker):  # what it said before
            pass
        self._selector.unregister(worker.process.watch)
        self._selector.unregister(worker.process.channel)
        worker.process.close()
        self.ring.set_progress(worker.number, 0)
        self._settle_drops()
        how = worker.trouble or worker.process.how_it_ended()
        if self._failure is not None:
            return
        if worker.asked and worker.is_ready:
            first = worker.asked[0]
            first.deaths += 1
            if first.deaths >= MOST_DEATHS:
                worker.asked.popleft()
                self._fail(
                    first,
                    WorkerError(
                        f"step {first.step} of the epoch was given up: {first.deaths} worker processes "
                        f"in a row were lost while they made it; the last one {how}; lower workers or "
                        "batch_size, or pass workers=0 to see what the transform does in this process"
                    ),
                )
        for request in reversed(worker.asked):
            self._give_back_slots(request)
            self._todo.appendleft(request)
        self._todo = deque(sorted(self._todo, key=lambda request: request.serial))
        self._note_death(how, has_worked=worker.is_ready)

    def _note_death(self, how: str, *, has_worked: bool) -> None:
        self._deaths += 1
        self._failed_starts = 0 if has_worked else self._failed_starts + 1
        if self._failed_starts >= MOST_DEATHS and not any(worker.is_ready for worker in self._workers):
            self._give_up(
                WorkerError(
                    f"worker processes cannot start: {self._failed_starts} in a row were lost before they "
                    f"were ready; the last one {how}; see what it wrote to stderr, or pass "
                    "worker_type='thread' to do without"
                )
            )
            return
        backoff = _BACKOFF_SECONDS * 2 ** (self._deaths - 1) if self._deaths > 1 else 0.0
        self._start_at = time.monotonic() + min(backoff, _MOST_BACKOFF_SECONDS)
        _log.debug("a worker process was lost: %s", how)

    def _give_up(self, error: BaseException) -> None:
        """Fail what was asked by now; the next request tries anew."""
        while self._todo:
            self._fail(self._todo.popleft(), error)
        for worker in self._workers:
            for request in worker.asked:  # it may still write into their slots
                self._reject(request, error)
        self._deaths = self._failed_starts = 0
        self._start_at = time.monotonic() + _BACKOFF_SECONDS
        self._end_start()

    def _end_start(self) -> None:
        since, self._starting_since = self._starting_since, None
        if since is not None:
            self._start_seconds += time.perf_counter() - since

    # requests

    def _dispatch(self) -> None:
        while self._todo:
            ready = [w for w in self._workers if w.is_ready and len(w.asked) < DEPTH]
            if not ready or (self._pattern is None and any(w.asked for w in self._workers)):
                return
            request = self._todo.popleft()
            if request.future.done() or request.epoch <= self.ring.ended:
                self._skip(request)
                continue
            worker = min(ready, key=lambda w: len(w.asked))
            slot: dict[str, list[tuple[int, int]]] | None = None
            if self._pattern is not None:
                try:
                    slot_now = Slot(self.ring, self._pattern.sizes(request.rows))
                    self.ring.keep((DEPTH * self._size + 6) * slot_now.nbytes)
                    request.slots.append(slot_now)
                except MemoryError as error:
                    self._fail(request, error)
                    continue
                slot = request.slots[-1].places()
            message: Message = {
                "do": "make",
                "id": request.serial,
                "epoch": request.epoch,
                "ids": (request.ids.offset, request.rows),
                "released": request.oldest,
                "slot": slot,
            }
            if self._pattern is not None and worker.knows != self._pattern.version:
                worker.knows = self._pattern.version
                message["pattern"] = self._pattern.message()
            worker.asked.append(request)
            self._send(worker, message)

    def _take_in(self, worker: _Worker) -> None:
        """A worker has something to say, or is dying."""
        if worker in self._workers and not self._read_one(worker):
            self._bury(worker)

    def _read_one(self, worker: _Worker) -> bool:
        """One message of a worker; whether there was one."""
        try:
            received = worker.process.channel.receive()
        except BlockingIOError:
            return False
        except WorkerError as error:  # it may have been about anything
            self._lose(worker, error)
            return False
        if received is None:
            return False
        self._answered(worker, received[0])
        return True

    def _answered(self, worker: _Worker, message: Message) -> None:
        say = message["say"]
        if say == "ready":
            worker.is_ready, self._failed_starts = True, 0
            self._end_start()
        elif say == "dropped":
            if self._drops:
                for _, waiting in self._drops:
                    if worker.process.pid in waiting:
                        waiting.discard(worker.process.pid)
                        break
                self._settle_drops()
        elif say == "failed" and message["id"] is None:
            self._give_up(unpack_error(message["error"]))
        elif say == "needs":
            self._grant(worker, message)
        else:
            request = worker.asked.popleft()
            assert request.serial == message["id"]
            if say == "made":
                self._deaths = 0
                try:
                    self._deliver(request, message)
                except BaseException as error:
                    self._fail(request, error)  # nobody else knows of it any more
                    raise
                return
            if message["kept"]:
                self._abandon_slots(request)
            if say == "failed":
                self._fail(request, unpack_error(message["error"]))
            else:
                self._skip(request)

    def _grant(self, worker: _Worker, message: Message) -> None:
        """A worker needs another slot for what it made."""
        request = worker.asked[0]
        columns = [Described.from_message(text) for text in message["columns"]]
        if message["kept"]:
            self._abandon_slots(request)
        try:
            if request.future.cancelled():
                raise _Unwanted
            if self._pattern is None:
                self._pattern = Pattern(columns, request.rows, self._batch_size)
                self.ring.keep(self._usual_slots * self._pattern.nbytes())
            self._pattern.check(columns, request.rows)
            self._pattern.note(columns, request.rows)
            request.slots.append(Slot(self.ring, self._pattern.sizes_for(columns, request.rows)))
        except BaseException as error:  # noqa: BLE001  # whoever waits for the batch gets it
            self._reject(request, error)
            self._send(worker, {"do": "forget"})
            return
        self._send(worker, {"do": "put", "slot": request.slots[-1].places()})

    def _deliver(self, request: Request, message: Message) -> None:
        columns = [Described.from_message(text) for text in message["columns"]]
        slot = request.slots.pop()
        self._give_back(request)
        message["seconds"]["start"], self._start_seconds = self._start_seconds, 0.0
        if not request.future.done() and request.future.set_running_or_notify_cancel():
            request.future.set_result(Finished(message, columns, slot))
        else:
            slot.close()

    def _skip(self, request: Request) -> None:
        self._give_back(request)
        request.future.cancel()

    def _fail(self, request: Request, error: BaseException) -> None:
        self._reject(request, error)
        self._give_back(request)

    def _reject(self, request: Request, error: BaseException) -> None:
        if not request.future.done() and request.future.set_running_or_notify_cancel():
            request.future.set_exception(error)

    def _give_back(self, request: Request) -> None:
        self._give_back_slots(request)
        self.ring.give(request.ids)

    def _give_back_slots(self, request: Request) -> None:
        for slot in request.slots:
            slot.close()
        request.slots.clear()

    def _abandon_slots(self, request: Request) -> None:
        for slot in request.slots:
            slot.abandon()
        request.slots.clear()

    def _send(self, worker: _Worker, message: Message, files: Sequence[int] = ()) -> bool:
        """Whether it was sent; if not, the worker has ended, or is ended here."""
        try:
            worker.process.channel.send(message, files)
        except (BrokenPipeError, ConnectionResetError):  # it has died: its watch tells
            return False
        except BlockingIOError:
            worker.trouble = "was killed here, since it had read none of hundreds of messages"
            worker.process.kill()
            return False
        except OSError as error:
            self._lose(worker, WorkerError(f"a worker process could not be told what to do: {_named(error)}"))
            return False
        return True

    def _lose(self, worker: _Worker, error: WorkerError) -> None:
        """A worker can no longer be told, or understood: what it was asked fails, and it ends."""
        for request in worker.asked:
            self._reject(request, error)
        worker.trouble = f"was killed here: {error}"
        worker.process.kill()

    def _shut_down(self) -> None:
        self._failure = self._failure or ValueError("the loader was closed")
        self._end_start()
        for worker in self._workers:
            self._selector.unregister(worker.process.channel)
            worker.process.channel.close()
        deadline = time.monotonic() + _GRACE_SECONDS
        for worker in self._workers:
            if not worker.process.wait(deadline - time.monotonic()):
                worker.process.kill()
        for worker in self._workers:
            worker.process.end()
            worker.process.close()
        while self._errands:  # a request that came meanwhile
            self._errands.popleft()()
        for request in [*(request for worker in self._workers for request in worker.asked), *self._todo]:
            self._reject(request, self._failure)
        self._workers = []
        self._settle_drops()
        self._todo.clear()
        if self._manifest >= 0:
            os.close(self._manifest)
        self._owned.close()


class _Unwanted(Exception):
    """Nobody waits for the batch any more."""


def _named(error: OSError) -> str:
    """What failed, and what to do."""
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS):
        return f"{error}: raise the limit of open files (ulimit -n), or keep fewer open"
    return str(error)


def _nothing() -> None:
    pass


_inherited: weakref.WeakSet[Supervisor] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for supervisor in list(_inherited):
        supervisor.forget_in_child()
    _inherited.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
