"""ExecutorEngine: tasks on an executor of this host, numbered by the cache itself.

It owns the claimed task numbers, a lock on one byte of the pool's file that tells tasks that the pool lives,
the sign that somebody writes, and the executor if it made it. Of a user's executor it needs `submit` and
futures, and relies on their results only: Dask calls a running task cancelled, answers a call like one before
it from memory, and replaces lost workers; processes of concurrent.futures and loky are lost with one of
theirs.
"""

from __future__ import annotations

import secrets
import socket
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import replace
from typing import TYPE_CHECKING

from arrowcache.errors import SamplerError
from arrowcache.limits import Limits
from arrowcache.os_errors import explaining
from arrowcache.sampling.dispatcher import failed
from arrowcache.sampling.options import PoolOptions
from arrowcache.sampling.task import Done, Task, run
from arrowcache.storage.layout import alive_byte, tasks_listed
from arrowcache.storage.locks import LockFile
from arrowcache.storage.open_tasks import OpenTasks, require_division
from arrowcache.storage.progress import seen_samplers, shown_pool
from arrowcache.storage.store import Store

if TYPE_CHECKING:
    from arrowcache.sampling.workers import Workers

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
            self._writes = store.usage.show_writing()  # a sign to loaders, until `end` or this process dies
        self._open_tasks = OpenTasks(store, self._pool, self._watch) if options.division else None
        self._claimed = range(0) if options.division else range(self._token, self._token + 1)

    def _lock_token(self) -> tuple[LockFile, int]:
        """Lock the byte that tells this pool's tasks that it lives: no other pool's, dead or alive.

        It is the first task's number, or any number where earlier tasks may be drawn again.
        """
        folder = self._store.folder
        with self._store.locked():
            require_division(self._store, self._pool, self._options.division)
            if self._options.division:
                claim(self._store, self._pool, 0)
                token = secrets.randbits(_TOKEN_BITS)
            else:
                token = claim(self._store, self._pool, 1)
            watch = LockFile(folder.pools / self._pool)
            watch.try_range(alive_byte(token), 1, exclusive=True)
        return watch, token

    def idle(self) -> int:
        return self._options.workers - len(self._running) if self._own is None else self._own.idle()

    def claim(self, count: int) -> list[Task]:
        """Claim one task: it is soon begun, as an ending pool leaves a gap for a number that is not."""
        folder = self._store.folder
        with self._store.locked():
            if self._open_tasks is not None:
                number = self._open_tasks.claim(self._options.tasks)
                numbers = range(0) if number is None else range(number, number + 1)
            elif self._claimed:
                numbers, self._claimed = self._claimed, range(0)
            else:
                first = folder.claim_tasks(self._pool, 1)
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
        except BrokenExecutor as error:
            raise self._broken(error) from error
        except Exception as error:  # each executor has its own error for being shut down
            if self._foreign is None:
                raise
            raise SamplerError(
                f"{self._executor!r} takes no more tasks: {error}. Keep it until the pool was stopped; a new "
                "pool goes on at the next task"
            ) from error

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


def claim(store: Store, pool: str, count: int, least: int = 0) -> int:
    """Claim a pool's first numbers in a cache; under cache.lock. Returns the first of `count`.

    Args:
        least: lower bound of the numbers; published numbers are another one, as a power cut may have lost
            the number.
    """
    if not store.folder.has_pool(pool):
        store.require_room(1)  # for its file
    published = max(tasks_listed(pool, store.segments()), default=-1)
    return store.folder.claim_tasks(pool, count, max(least, published + 1))


def _elsewhere(task: Task) -> SamplerError:
    """Return the error of a task that ended as if its pool had: it saw nobody hold this pool's lock."""
    return SamplerError(
        f"a worker found {task.cache} without this pool: the executor's workers must run on this host, "
        f"{socket.gethostname()}, and have the same folder there; for other nodes there is arrowcache.ray"
    )


def _own(workers: int) -> Workers:
    from arrowcache.sampling.workers import Workers  # imports much that others do not need

    return Workers(workers)
