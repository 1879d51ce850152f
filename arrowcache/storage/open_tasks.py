"""OpenTasks: the tasks of a pool that are begun and not published, where each has its own samples.

Of most samplers a task that was stopped is no loss: the next one draws anew. Where samples are divided among
tasks, as those of Items are, its samples are in no other task, so the pool's file lists it from its beginning
on, in the write that claims its number. Publishing takes it off the list, under the same cache.lock that
makes its segment appear, so what was evicted since is not drawn again. Who has a task locks a byte of the
file, and the kernel drops that lock in whatever way the pool ends. So a task on the list is to be drawn if
nobody locks its byte and no segment is of it. Only who dies between the two steps of publishing leaves a
task on the list; it is drawn twice if its segment is evicted before the next pool of that name looks.

Another division of the samples, as of a dataset of another length, would be drawn in part only: the division
is recorded, and pools of another one are refused.
"""

from __future__ import annotations

from collections.abc import Iterable

from arrowcache.storage.layout import shown, task_byte, tasks_listed
from arrowcache.storage.locks import LockFile
from arrowcache.storage.store import Store


class OpenTasks:
    """The open tasks of a pool in one cache, and those of them that this pool has. All under cache.lock.

    Args:
        locks: the pool's file, open; closing it lets other pools have the tasks.
    """

    def __init__(self, store: Store, pool: str, locks: LockFile) -> None:
        self._store, self._pool, self._locks = store, pool, locks
        self._own: set[int] = set()  # also those that were given up: the next pool tries them again

    def claim(self, tasks: int | None) -> int | None:
        """Claim the lowest task that nobody has, else the next number. None: there is none below `tasks`.

        Raises: CacheFormatError: too many are open, or the file is damaged.
        """
        folder = self._store.folder
        listed = folder.returned_tasks(self._pool)
        self._let_go(self._own.difference(listed))
        left = [number for number in listed if number not in self._own]
        published = tasks_listed(self._pool, self._store.segments()) if left else set()
        for number in left:
            if number in published:  # who published it died just then
                folder.end_task(self._pool, number)
            elif (tasks is None or number < tasks) and self.hold(number):
                return number
        number = folder.claim_tasks(self._pool, 0)
        if tasks is not None and number >= tasks:
            return None
        folder.claim_tasks(self._pool, 1, returned=True)
        self.hold(number)
        return number

    def hold(self, number: int) -> bool:
        """Take a task, unless another pool has it. Idempotent."""
        if not self._locks.try_range(task_byte(number), 1, exclusive=True):
            return False
        self._own.add(number)
        return True

    def _let_go(self, numbers: Iterable[int]) -> None:
        """Unlock tasks that are published."""
        for number in numbers:
            self._locks.unlock_range(task_byte(number), 1)
            self._own.discard(number)


def require_division(store: Store, pool: str, division: str) -> None:
    """Record how a new pool's samples are divided among its tasks; under cache.lock.

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
