"""Executors: tasks on an executor of this host, numbered by the cache itself; and how a pool numbers them.

`ExecutorEngine` owns the task numbers that it took, a lock on one byte of the pool's file that tells tasks
that the pool lives, the sign that somebody writes, and the executor if it made it. Of a user's executor it
needs `submit` and futures, and relies on their results only: Dask calls a running task cancelled, answers a
call like one before it from memory, and replaces lost workers; processes of concurrent.futures and loky are
lost with one of theirs.

Numbers are given under cache.lock, each once, in one write to the pool's file: a pool that begins again goes
on at the next one; where the executor refused a task, at that one. For most samplers a task that was stopped
is no loss: the next one draws anew. If samples are divided among tasks, as those of Items are, its samples
are in no other task. So the pool's file lists each task that is begun and not published, from the write on
that gives its number. Publishing takes it off the list, under the same cache.lock that makes its segment
appear, so rows that were evicted since are not drawn again. The pool that has a task locks a byte of the
file, and the kernel drops that lock in whatever way the pool ends. So a task on the list is to be drawn if
nobody locks its byte and no segment is of it. A process that dies between the two steps of publishing leaves
a task on the list; it is drawn twice if its segment is evicted before the next pool of that name looks.

Another division of the samples, as of a dataset of another length, would be drawn in part only: the division
is recorded, and pools of another one are refused.
"""

from __future__ import annotations

import secrets
import socket
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from arrowcache.errors import ArrowCacheError, SamplerError
from arrowcache.limits import Limits
from arrowcache.os_errors import explaining
from arrowcache.sampling.dispatcher import PoolOptions, failed
from arrowcache.sampling.task import Done, Task, run
from arrowcache.storage.counters import seen_samplers, shown_pool
from arrowcache.storage.layout import alive_byte
from arrowcache.storage.locks import LockFile
from arrowcache.storage.store import Store

if TYPE_CHECKING:
    from arrowcache.sampling.workers import Workers


from collections.abc import Iterable

from arrowcache.storage.layout import shown, task_byte, tasks_listed

_TOKEN_BITS = 60


class ExecutorEngine:
    """The `Engine` of one host.

    Args:
        executor: the user's. None means processes of its own.
    """

    def __init__(self, store: Store, options: PoolOptions, executor: Executor | None) -> None:
        self._store, self._options, self._pool = store, options, options.pool
        self._to_be_sent = options.workers  # tasks sent with the sampler unasked: one for each worker
        self._foreign = executor
        self._running: dict[Future[Done], Task] = {}
        self._own = _own(options.workers) if executor is None else None
        self._executor: Executor = self._own or executor  # type: ignore[assignment]
        with explaining(store.folder.path):  # what may fail comes before the sign
            self._watch, self._token = self._lock_token()
            self._writes = store.show_writing()  # a sign to loaders, until `end` or this process dies
        self._open_tasks = OpenTasks(store, self._pool, self._watch) if options.division else None

    def _lock_token(self) -> tuple[LockFile, int]:
        """Lock the byte that tells this pool's tasks that it lives: no other pool's, dead or alive."""
        folder = self._store.folder
        with self._store.locked():
            require_division(self._store, self._pool, self._options.division)
            take_numbers(self._store, self._pool, 0)
            token = secrets.randbits(_TOKEN_BITS)
            watch = LockFile(folder.pools / self._pool)
            watch.try_range(alive_byte(token), 1, exclusive=True)
        return watch, token

    def idle(self) -> int:
        return self._options.workers - len(self._running) if self._own is None else self._own.idle()

    def take(self, count: int) -> list[Task]:
        """Take one task: it is soon begun, as an ending pool leaves a gap for a number that is not."""
        folder = self._store.folder
        with self._store.locked():
            if self._open_tasks is not None:
                number = self._open_tasks.take(self._options.tasks)
                numbers = range(0) if number is None else range(number, number + 1)
            elif refused := folder.returned_tasks(self._pool):
                folder.end_task(self._pool, refused[0])
                numbers = range(refused[0], refused[0] + 1)
            else:
                first = folder.take_tasks(self._pool, 1)
                numbers = range(first, first + 1)
        if self._store.settings.durable:
            folder.sync_tasks(self._pool)  # before the task begins: no task is done twice
        return [self._options.task(number, str(folder.path), self._token) for number in numbers[:count]]

    def begin(self, task: Task) -> None:
        if self._to_be_sent:
            self._to_be_sent -= 1
            self._submit(task, replace(task, sampler=self._options.sampler))
        else:
            self._submit(task, task)

    def _submit(self, task: Task, sent: Task) -> None:
        try:
            self._running[self._executor.submit(run, sent)] = task
        except Exception as error:  # each executor has its own error for being shut down
            self._give_back(task)
            if isinstance(error, BrokenExecutor):
                raise self._broken(error) from error
            if self._foreign is None:
                raise
            raise SamplerError(
                f"{self._executor!r} takes no more tasks: {error}. Keep it until the pool was stopped; a new "
                "pool goes on at the next task"
            ) from error

    def _give_back(self, task: Task) -> None:
        """Let the next pool have a task that was never begun; one of divided samples is on its list."""
        if self._open_tasks is None:
            with suppress(ArrowCacheError, OSError), self._store.locked():  # why it was not begun is told
                self._store.folder.return_tasks(self._pool, [task.number])

    def collect(self, timeout_seconds: float) -> list[tuple[Task, Done]]:
        wishes = [] if self._own is None else [self._own.next_wish()]
        wait([*self._running, *wishes], timeout_seconds, FIRST_COMPLETED)
        done = [future for future in self._running if future.done()]
        ended: list[tuple[Task, Done]] = []
        lacking: list[Task] = []
        for future in done:
            task = self._running[future]
            try:
                result = future.result()
            except BrokenExecutor as error:
                raise self._broken(error) from error
            except BaseException as error:  # noqa: BLE001  # an executor may raise anything
                ended.append(failed(task, error))
            else:
                if result.lacks_sampler:  # of a worker that began later, or was restarted
                    lacking.append(task)
                else:
                    ended.append(failed(task, _elsewhere(task)) if result.stopped else (task, result))
        for future in done:  # none of them if the executor broke: `end` counts them then
            del self._running[future]
        for task in lacking:
            self._submit(task, replace(task, sampler=self._options.sampler))
        return ended

    def _broken(self, error: BrokenExecutor) -> SamplerError:
        return SamplerError(
            f"{self._executor!r} lost a worker, and takes no more tasks: {error} Make a new executor, and "
            "a pool with it, which goes on at the next task; or pass executor=None, whose workers are "
            "replaced"
        )

    def at_work(self) -> tuple[int, int]:
        own = shown_pool(self._pool), self._token
        seen = [each for each in seen_samplers(self._store.folder.path) if (each.pool, each.token) == own]
        return sum(each.rows for each in seen), sum(each.reads.at_work for each in seen)

    def end(self) -> list[Done]:
        self._watch.close()  # tells the tasks at work to close their generators and end
        if self._foreign is None:
            self._executor.shutdown()
        else:
            _, at_work = wait(self._running, timeout=Limits.current.task_end_seconds)
            for future in at_work:
                future.cancel()  # not before: Dask forgets cancelled tasks, which go on
            wait(at_work, timeout=Limits.current.task_cancel_seconds)
        ended, self._running = [*self._running], {}
        results = [f.result() for f in ended if f.done() and not f.cancelled() and f.exception() is None]
        self._writes.close()
        return [done for done in results if done.drawn]


def _elsewhere(task: Task) -> SamplerError:
    """Return the error of a task that ended as if its pool had: it saw nobody hold this pool's lock."""
    return SamplerError(
        f"a worker found {task.cache} without this pool: the executor's workers must run on this host, "
        f"{socket.gethostname()}, and have the same folder there; for other nodes there is arrowcache.ray"
    )


def _own(workers: int) -> Workers:
    from arrowcache.sampling.workers import Workers  # imports much that others do not need

    return Workers(workers)


def take_numbers(store: Store, pool: str, count: int, least: int = 0) -> int:
    """Take the next numbers of a pool. Returns the first of `count`.

    Args:
        least: lower bound of the numbers; published numbers are another one, as a power cut may have lost
            the number.
    """
    if not store.folder.has_pool(pool):
        store.require_room(1)  # for its file
    published = max(tasks_listed(pool, store.segments()), default=-1)
    return store.folder.take_tasks(pool, count, max(least, published + 1))


class OpenTasks:
    """The open tasks of a pool in one cache, and those of them that this pool has.

    Args:
        locks: the pool's file, open; closing it lets other pools have the tasks.
    """

    def __init__(self, store: Store, pool: str, locks: LockFile) -> None:
        self._store, self._pool, self._locks = store, pool, locks
        self._own: set[int] = set()  # also those that were given up: the next pool tries them again

    def take(self, tasks: int | None) -> int | None:
        """Take the lowest task that nobody has, else the next number. None: there is none below `tasks`.

        Raises: CacheFormatError: too many are open, or the file is damaged.
        """
        folder = self._store.folder
        listed = folder.returned_tasks(self._pool)
        self._release(self._own.difference(listed))
        left = [number for number in listed if number not in self._own]
        published = tasks_listed(self._pool, self._store.segments()) if left else set()
        for number in left:
            if number in published:  # who published it died just then
                folder.end_task(self._pool, number)
            elif (tasks is None or number < tasks) and self.hold(number):
                return number
        number = folder.take_tasks(self._pool, 0)
        if tasks is not None and number >= tasks:
            return None
        folder.take_tasks(self._pool, 1, returned=True)
        self.hold(number)
        return number

    def hold(self, number: int) -> bool:
        """Take a task, unless another pool has it. Idempotent."""
        if not self._locks.try_range(task_byte(number), 1, exclusive=True):
            return False
        self._own.add(number)
        return True

    def _release(self, numbers: Iterable[int]) -> None:
        """Unlock tasks that are published."""
        for number in numbers:
            self._locks.unlock_range(task_byte(number), 1)
            self._own.discard(number)


def require_division(store: Store, pool: str, division: str) -> None:
    """Record how a new pool's samples are divided among its tasks.

    Args:
        division: empty where each task draws from all.
    Raises: ValueError: earlier tasks of this pool were of another division.
    """
    folder = store.folder
    recorded = folder.read_division(pool)
    if recorded == division:
        return
    if recorded or folder.has_pool(pool):
        others, these = (
            shown(each) or "a sampler whose tasks draw from all there is" for each in (recorded, division)
        )
        raise ValueError(
            f"pool {pool} of this cache drew from {others}, and is now to draw from {these}: some samples "
            "would come twice, or never. Pass another name= to SamplerPool, or another seed="
        )
    store.require_room(1)  # for the file
    folder.write_division(pool, division, durable=store.settings.durable)
