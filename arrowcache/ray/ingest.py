"""Ingest: the actor of a node. Only it writes to the node's cache the segments that samplers drew elsewhere.

It publishes one segment at a time, straight from Ray's object store: the bytes are written once, to the
segment's file, after their structure was checked. Another thread answers requests while it waits for
room.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray

from arrowcache.arrow.segment import EncodedSegment, Form, read_structure
from arrowcache.lifetimes import cached_property
from arrowcache.linux import boot_id
from arrowcache.ray.caches import NodeCaches
from arrowcache.sampling.executors import claim
from arrowcache.sampling.task import Done
from arrowcache.storage.layout import tasks_listed
from arrowcache.storage.locks import LockFile
from arrowcache.storage.open_tasks import OpenTasks, require_division
from arrowcache.storage.store import Cancelled, RoomPolicy, Store

GROUPS = {"publishing": 1, "asking": 2}
"""Ray's concurrency groups: a segment that waits for room keeps no question waiting."""


class OpenedCache(NamedTuple):
    """A node's cache, once it is open.

    `identity` is the same for two nodes that share one folder.
    """

    form: Form
    identity: tuple[str, int, int]


class OpenedPool(NamedTuple):
    """A node's knowledge of a pool: its next task, those begun and not published, those published."""

    next_task: int
    open_tasks: set[int]
    published: set[int]


class NodeIngest:
    """Publishes on a node segments that were drawn anywhere. Made by Ray, on that node.

    Ray makes it anew if its process was killed: its whole state is in the cache.
    """

    def __init__(self, caches: NodeCaches, node: str) -> None:
        self._caches, self._node = caches, node
        self._opening = threading.Lock()
        self._stopping = threading.Event()
        self._open_tasks: OpenTasks | None = None  # of the pool whose actor this is
        self._writes = ExitStack()  # shows that somebody writes to this node's cache

    @cached_property
    def _made(self) -> Store:
        store = self._caches.make(self._node).store
        if not self._stopping.is_set():
            self._writes = store.usage.show_writing()
        return store

    @property
    def _store(self) -> Store:
        with self._opening:  # threads of both groups may come first
            return self._made

    @ray.method(concurrency_group="asking")
    def open(self) -> OpenedCache:
        """Make or open the cache. Raises: as `Cache.create`."""
        settings = self._store.settings
        status = os.stat(self._store.folder.path)
        return OpenedCache(settings.form, (boot_id(), status.st_dev, status.st_ino))

    @ray.method(concurrency_group="asking")
    def begin(self, pool: str, division: str) -> OpenedPool:
        """Return what is known of a pool. Raises: ValueError: it divided its samples otherwise."""
        with self._store.locked():
            require_division(self._store, pool, division)
            first = claim(self._store, pool, 0)
            listed = {*self._store.folder.returned_tasks(pool)}
            return OpenedPool(first, listed, tasks_listed(pool, self._store.segments()))

    @ray.method(concurrency_group="asking")
    def claim_open(
        self,
        pool: str,
        count: int,
        tasks: int | None,
        least: int,
        own: list[int],
        adopted: list[int],
        ended: list[int],
    ) -> list[int]:
        """Claim up to `count` tasks of divided samples; see `OpenTasks.claim`.

        Args:
            least: new numbers are not below it.
            own: tasks that the pool has; this actor may have been made anew since it claimed them.
            adopted: open tasks that were listed on other nodes.
            ended: tasks that were published, here or there.
        """
        folder = self._store.folder
        claimed: list[int] = []
        with self._store.locked():
            claim(self._store, pool, 0, least)
            if adopted:
                folder.return_tasks(pool, adopted)
            self._end_tasks(pool, ended)
            if self._open_tasks is None:
                self._open_tasks = OpenTasks(self._store, pool, LockFile(folder.pools / pool))
            for number in own:
                self._open_tasks.hold(number)
            while len(claimed) < count and (task := self._open_tasks.claim(tasks)) is not None:
                claimed.append(task)
        if self._store.settings.durable:
            folder.sync_tasks(pool)
        return claimed

    @ray.method(concurrency_group="asking")
    def end_tasks(self, pool: str, numbers: list[int]) -> None:
        """Note that tasks are published, or listed on another node."""
        with self._store.locked():
            self._end_tasks(pool, numbers)

    def _end_tasks(self, pool: str, numbers: list[int]) -> None:
        for number in numbers:
            self._store.folder.end_task(pool, number)

    @ray.method(concurrency_group="asking")
    def claim(self, pool: str, count: int, least: int = 0) -> int:
        """Claim a pool's next `count` numbers here, not below `least`; returns the first."""
        with self._store.locked():
            first = claim(self._store, pool, count, least)
        if self._store.settings.durable:
            self._store.folder.sync_tasks(pool)
        return first

    @ray.method(concurrency_group="publishing")
    def publish(self, task_name: str, number: int, rows: int, file: NDArray[np.uint8]) -> Done:
        """Publish a drawn segment, given as its file's bytes: a view of Ray's object store.

        Blocks: while there is no room, until `stop`.
        Raises: CorruptSegmentError: the bytes are not a segment of this cache. CacheFullError, OSError.
        """
        if self._stopping.is_set():
            return Done(number, stopped=True)
        read_structure(pa.py_buffer(file), self._store.settings.schema, rows)
        segment = EncodedSegment((file.data,), rows, file.nbytes)
        policy = RoomPolicy("wait", is_cancelled=self._stopping.is_set, in_background=True)
        try:
            published = self._store.publish(segment, task_name, policy)
        except Cancelled:
            return Done(number, stopped=True)
        return Done(number, rows, file.nbytes, published.waiting_seconds)

    @ray.method(concurrency_group="asking")
    def stop(self) -> None:
        """Publish nothing more: neither segments that wait for room, nor later ones."""
        self._stopping.set()
        with self._opening:
            self._writes.close()
