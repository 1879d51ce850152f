"""Supervisor: has worker processes make batches, and replaces those that die.

It owns the processes, the shared ring that they write into, and one thread (loop.py) that sends
requests, takes in answers, and starts processes: when the first request comes, and again when one has
died. The processes live as long as the loader, over all epochs. Requests wait on the desk (desk.py);
what a process was asked is in member.py, and when a lost one is replaced in restarts.py.

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

import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from contextlib import ExitStack, suppress

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import WorkerError
from arrowcache.reading.future import Future
from arrowcache.reading.workers.channel import Message
from arrowcache.reading.workers.desk import Desk
from arrowcache.reading.workers.loop import Loop
from arrowcache.reading.workers.member import Member
from arrowcache.reading.workers.memory import file_of
from arrowcache.reading.workers.packing import Described
from arrowcache.reading.workers.parcel import unpack_error
from arrowcache.reading.workers.request import Finished, Request
from arrowcache.reading.workers.restarts import MOST_LOSSES, Restarts
from arrowcache.reading.workers.shared import STAGES_OF_WORKERS, SharedRing
from arrowcache.shortage import explained

_log = logging.getLogger("arrowcache")

DEPTH = 2  # requests that a worker has at a time: one at work, one ready
_GRACE_SECONDS = 1.0  # for a worker to end by itself
_DROP_SECONDS = 1.0  # for workers to let go of what they lease
_LOOK_SECONDS = 10.0


class Supervisor:
    """All that the loop works on.

    Who makes requests holds the loop meanwhile, so that they go to a worker without waking its thread.
    Others leave errands: they may be finalizers.

    Args:
        size: how many processes.
        plan: what they are to do.
        batch_size: rows of a batch.
        usual_slots: that are in use at a time.
    Raises: OSError: no descriptor can be had.
    """

    def __init__(self, size: int, plan: bytes, batch_size: int, usual_slots: int) -> None:
        self._size = size
        self._pid = os.getpid()
        with ExitStack() as owned:
            self.ring = SharedRing()
            owned.callback(self.ring.close)
            self._plan = file_of(plan)
            owned.callback(os.close, self._plan)
            self._loop = Loop("arrowcache-crew", self._turn, self._shut_down)
            owned.callback(self._loop.close)
            self._owned = owned.pop_all()  # here, or nothing was
        self._desk = Desk(self.ring, batch_size, DEPTH * size, usual_slots)
        self._members: list[Member] = []
        self._restarts = Restarts()
        self._numbers = 0  # of epochs
        self._epoch, self._manifest = 0, -1  # the one that workers are told of
        self._starting_since: float | None = None  # somebody waits, and no worker is ready; by perf_counter
        self._start_seconds = 0.0  # that this took, until it was told of
        self._drops: deque[tuple[threading.Event, set[int]]] = deque()  # and pids that have not answered
        self._failure: BaseException | None = None
        _inherited.add(self)

    def start(self) -> None:
        try:
            self._loop.start()
        except WorkerError:
            _inherited.discard(self)
            self._close_files()
            raise

    # called from any thread; see crew.py

    def begin(self, manifest: int) -> int:
        with self._loop.held():
            self._numbers += 1
            if self._failure is not None:
                os.close(manifest)
                return self._numbers
            if self._manifest >= 0:
                os.close(self._manifest)
            self._epoch, self._manifest = self._numbers, manifest
            for member in self._members:
                self._tell_of_epoch(member)
            return self._numbers

    def make(self, epoch: int, step: int, ids: NDArray[np.int64], oldest: int) -> Future[Finished]:
        try:
            if self._failure is not None:
                raise self._failure
            request = Request.of(self.ring, epoch, step, ids, oldest)
        except BaseException as error:  # noqa: BLE001  # it comes where the batch would have
            refused: Future[Finished] = Future()
            refused.set_exception(error)
            return refused
        with self._loop.held():
            if self._failure is not None:
                request.fail(self._failure)
                return request.future
            self._desk.add(request)
            if self._starting_since is None and not any(member.is_ready for member in self._members):
                self._starting_since = time.perf_counter()
            self._dispatch()
            is_short = len(self._members) < self._size
        if is_short:
            self._loop.wake()
        return request.future

    def end(self, epoch: int) -> None:
        self.ring.ended = max(self.ring.ended, epoch)

    def drop(self) -> None:
        if self._loop.is_stopping or self._loop.is_here:
            return
        done = threading.Event()
        self._loop.leave(functools.partial(self._ask_to_drop, done))
        done.wait(_DROP_SECONDS)

    @property
    def is_hoarded(self) -> bool:
        return self._desk.is_hoarded

    def in_progress(self) -> list[tuple[str, float]]:
        progress = [self.ring.progress(number) for number in range(self._size)]
        stages = [(STAGES_OF_WORKERS[word % 4], word // 4 / 1e9) for word in progress if word]
        since = self._starting_since
        return stages if since is None else [*stages, ("start", since)]

    def pids(self) -> list[int]:
        return [member.pid for member in list(self._members) if not member.process.has_ended]

    def close(self) -> None:
        if self._pid == os.getpid():
            self._loop.stop()

    def forget_in_child(self) -> None:
        """A forked child has neither the thread nor the processes, and must keep nothing of them open."""
        for member in self._members:
            member.process.forget()
        self._members = []
        self._close_files()

    # called in the thread, or while the loop is held

    def _turn(self) -> float:
        self._start_missing()
        self._dispatch()
        if len(self._members) < self._size and self._is_wanted:
            return max(0.0, self._restarts.not_before - time.monotonic())
        return _LOOK_SECONDS

    def _tell_of_epoch(self, member: Member) -> None:
        member.tell({"do": "begin", "epoch": self._epoch}, [self._manifest])

    def _ask_to_drop(self, done: threading.Event) -> None:
        self._drops.append((done, {member.pid for member in self._members if member.tell({"do": "drop"})}))
        self._settle_drops()

    def _settle_drops(self) -> None:
        living = {member.pid for member in self._members}
        for done, waiting in self._drops:
            waiting &= living
            if not waiting:
                done.set()
        self._drops = deque(entry for entry in self._drops if entry[1])

    # processes

    @property
    def _is_wanted(self) -> bool:
        """Whether somebody waits for processes, or one is at work: those that start may all fail."""
        return bool(self._desk) or any(member.is_ready for member in self._members)

    def _start_missing(self) -> None:
        while self._is_wanted:
            if len(self._members) == self._size or time.monotonic() < self._restarts.not_before:
                return
            try:
                self._start_one()
            except OSError as error:
                self._note_loss(f"could not be started: {explained(error)}", was_ready=False)

    def _start_one(self) -> None:
        number = min(set(range(self._size)) - {member.number for member in self._members})
        self.ring.set_progress(number, 0)
        member = Member(self.ring.fd, self._plan, number)
        self._members.append(member)
        for what, action in ((member.process.watch, self._bury), (member.process.channel, self._take_in)):
            self._loop.watch(what, functools.partial(action, member))
        if self._manifest >= 0:
            self._tell_of_epoch(member)

    def _bury(self, member: Member) -> None:
        """A worker has ended, or is ended here: what it was asked is asked again."""
        if member not in self._members:
            return
        self._members = [other for other in self._members if other is not member]
        member.process.end()
        with suppress(EOFError):
            while self._read_one(member):  # what it said before
                pass
        for what in (member.process.watch, member.process.channel):
            self._loop.unwatch(what)
        member.process.close()
        self.ring.set_progress(member.number, 0)
        self._settle_drops()
        how = member.how_it_ended()
        for request in member.asked:
            if member.process.has_ended:
                request.free_slots()
            else:  # it hangs in the kernel
                request.abandon_slots()
            self._desk.add_again(request)
        if member.asked and member.is_ready:
            first = member.asked[0]
            first.deaths += 1
            if first.deaths >= MOST_LOSSES:
                first.reject(
                    WorkerError(
                        f"step {first.step} of the epoch was given up: {first.deaths} worker processes "
                        f"in a row were lost while they made it; the last one {how}; see what it wrote to "
                        "stderr, lower workers or batch_size, or pass workers=0 to see the transform at work"
                    )
                )
        self._note_loss(how, was_ready=member.is_ready)

    def _note_loss(self, how: str, *, was_ready: bool) -> None:
        others_are_ready = any(member.is_ready for member in self._members)
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
        """Fail what was asked by now; the next request tries anew."""
        self._desk.reject_all(error)
        for member in self._members:
            for request in member.asked:  # it may still write into their slots
                request.reject(error)
        self._restarts.begin_anew(time.monotonic())
        self._end_start()

    def _end_start(self) -> None:
        since, self._starting_since = self._starting_since, None
        if since is not None:
            self._start_seconds += time.perf_counter() - since

    # requests

    def _dispatch(self) -> None:
        while self._desk:
            free = [member for member in self._members if member.is_ready and len(member.asked) < DEPTH]
            is_first = self._desk.pattern is None  # what batches are like the first of them tells
            if not free or (is_first and any(member.asked for member in self._members)):
                return
            request = self._desk.next()
            if request is not None:
                min(free, key=lambda member: len(member.asked)).ask(request, self._desk.pattern)

    def _take_in(self, member: Member) -> None:
        """A worker has something to say, or is dying."""
        if member in self._members:
            try:
                self._read_one(member)
            except EOFError:
                self._bury(member)

    def _read_one(self, member: Member) -> bool:
        """One message of a worker; whether there was one."""
        message = member.hear()
        if message is not None:
            self._answered(member, message)
        return message is not None

    def _answered(self, member: Member, message: Message) -> None:
        say = message["say"]
        if say == "ready":
            member.is_ready = True
            self._restarts.started()
            self._end_start()
        elif say == "dropped":
            for _, waiting in self._drops:
                if member.pid in waiting:
                    waiting.discard(member.pid)
                    break
            self._settle_drops()
        elif say == "lost":
            self._give_up(unpack_error(message["error"]))
        elif say == "needs":
            self._grant(member, message)
        else:
            request = member.asked.popleft()
            assert request.serial == message["id"]
            if message.get("kept"):
                request.abandon_slots()
            if say == "made":
                self._restarts.made()
                self._deliver(request, message)
            elif say == "failed":
                request.fail(unpack_error(message["error"]))
            else:
                request.skip()

    def _grant(self, member: Member, message: Message) -> None:
        """A worker needs another slot for what it made."""
        request = member.asked[0]
        if message["kept"]:
            request.abandon_slots()
        if not request.future.done():
            try:
                self._desk.grant(request, [Described.from_message(text) for text in message["columns"]])
            except BaseException as error:  # noqa: BLE001  # whoever waits for the batch gets it
                request.reject(error)
        if request.future.done():
            member.tell({"do": "forget"})
        else:
            member.tell({"do": "put", "slot": request.slots[-1].places()})

    def _deliver(self, request: Request, message: Message) -> None:
        message["seconds"]["start"], self._start_seconds = self._start_seconds, 0.0
        try:
            request.deliver(message)
        except BaseException as error:
            request.fail(error)  # nobody else knows of it any more
            raise

    def _shut_down(self, failure: BaseException | None) -> None:
        self._failure = failure or ValueError("the loader was closed")
        self._end_start()
        for member in self._members:
            self._loop.unwatch(member.process.channel)
            member.process.channel.close()
        deadline = time.monotonic() + _GRACE_SECONDS
        for member in self._members:
            if not (member.is_ready and member.process.wait(deadline - time.monotonic())):
                member.process.kill()
        for member in self._members:
            member.process.end()
            member.process.close()
        members, self._members = self._members, []
        self._loop.do_errands()
        for request in (request for member in members for request in member.asked):
            request.reject(self._failure)
        self._desk.reject_all(self._failure)
        self._settle_drops()
        self._close_files()

    def _close_files(self) -> None:
        if self._manifest >= 0:
            os.close(self._manifest)
            self._manifest = -1
        self._owned.close()


_inherited: weakref.WeakSet[Supervisor] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for supervisor in list(_inherited):
        supervisor.forget_in_child()
    _inherited.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
