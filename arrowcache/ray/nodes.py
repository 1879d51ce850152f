"""Nodes: the caches of a cluster's training nodes, and the work that a pool does on its nodes.

`NodeCaches` are the caches' places and settings: a value, sent to its users. `draw_segment` draws one segment
in a worker of any node: the same that a local pool draws for that task. Its result is the bytes of the
segment's file, in one buffer, which Ray puts into its object store. `NodeIngest` is the actor of a training
node. Only it writes to the node's cache the segments that were drawn elsewhere: one at a time, straight from
Ray's object store. The bytes are written once, to the segment's file, after their structure was checked.
Another thread answers requests while it waits for room.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from inspect import Parameter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray

from arrowcache.arguments import face
from arrowcache.arrow.builder import SegmentBuilder
from arrowcache.arrow.schema import FieldType, Schema
from arrowcache.arrow.segment import EncodedSegment, Form, read_structure
from arrowcache.cache import Cache
from arrowcache.lifetimes import cached_property
from arrowcache.linux import boot_id
from arrowcache.sampling.executors import OpenTasks, require_division, take_numbers
from arrowcache.sampling.reads import Sampler, Threads
from arrowcache.sampling.task import Done, Task, draw, failure, sampler_of, samples_of
from arrowcache.storage.layout import tasks_listed
from arrowcache.storage.locks import LockFile
from arrowcache.storage.settings import OPTIONS, settings_of
from arrowcache.storage.store import Cancelled, RoomPolicy, Store

NODE = "{node}"


_OPTIONS = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Any) for name in OPTIONS]

GROUPS = {"publishing": 1, "asking": 2}
"""Ray's concurrency groups: a segment that waits for room keeps no question waiting."""


@face("NodeCaches", passed=_OPTIONS)
class NodeCaches:
    """The caches of a cluster: their places, and the arguments of `Cache.create` for them.

    The other arguments are those of `Cache.create`. A cache that is there already is opened as by
    `exist_ok=True`: another capacity resizes it, and any other setting than its own is an error.

    Args:
        path: the folder on each node's own disk. `{node}` in it becomes the node's id, needed for a cluster
            on one machine; a function of that id returns the path itself.
        nodes: ids of the nodes that get one, from `ray.nodes()`. None means all that are alive when a pool
            starts. Those with a GPU: `[n["NodeID"] for n in ray.nodes() if n["Alive"] and "GPU" in
            n["Resources"]]`.
    Raises: ValueError, TypeError: not nodes, or not a path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Callable[[str], str | os.PathLike[str]],
        schema: Schema | Mapping[str, FieldType],
        capacity: int | str,
        segment_bytes: int | str | None = None,
        segment_rows: int | None = None,
        *,
        nodes: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        if not callable(path) and not isinstance(path, str | os.PathLike):
            raise TypeError(f"path must be a path, or a function of a node's id, not {path!r}")
        if nodes is not None and (isinstance(nodes, str) or not nodes):
            raise ValueError(f"nodes={nodes!r} must be ids of nodes, at least one, or None for all")
        self.path, self.schema, self.nodes = path, schema, nodes
        sizes = {"capacity": capacity, "segment_bytes": segment_bytes, "segment_rows": segment_rows}
        self._settings: dict[str, Any] = {**sizes, **options}

    @property
    def form(self) -> Form:
        """The form of the segments of new caches. Raises: as `Cache.create`."""
        return settings_of(Schema(self.schema), **self._settings).form

    def path_on(self, node: str) -> Path:
        """Return the path of a node's cache on that node."""
        if callable(self.path):
            return Path(self.path(node)).absolute()
        return Path(os.fspath(self.path).replace(NODE, node)).absolute()

    def node_ids(self) -> list[str]:
        """Return the nodes that have a cache, in the same order in every driver.

        Raises: ValueError: one of `nodes` is not in the cluster, or not alive; there are none.
        """
        alive = sorted(node["NodeID"] for node in alive_nodes())
        if self.nodes is None:
            return alive
        if missing := [node for node in self.nodes if node not in alive]:
            raise ValueError(
                f"nodes {', '.join(map(str, missing))} are not alive in this cluster, which has "
                f"{', '.join(alive)}: give NodeID of ray.nodes()"
            )
        return sorted(set(self.nodes))

    def local(self) -> Cache:
        """Open the cache of the current node, as in the training function of Ray Train.

        Raises: FileNotFoundError: there is none; a pool makes the caches when it starts.
        """
        return Cache.open(self.path_on(ray.get_runtime_context().get_node_id()))

    def make(self, node: str) -> Cache:
        """Make the cache of the current node, or open an existing one.

        Raises: as `Cache.create`.
        """
        return Cache.create(self.path_on(node), self.schema, **self._settings, exist_ok=True)


def alive_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # it has no types
    return [node for node in nodes if node["Alive"]]


class _WorkerState(NamedTuple):
    """State that a worker keeps between tasks."""

    key: tuple[bytes, Form]
    sampler: Sampler
    builder: SegmentBuilder
    threads: Threads


_state: _WorkerState | None = None  # one a process: Ray runs tasks one after another in it


def draw_segment(task: Task, form: Form, sampler: bytes) -> tuple[Done, NDArray[np.uint8] | None]:
    """Draw task k's segment.

    Args:
        sampler: the pickled sampler; Ray has it once a node.
    Returns: the result, and the file's bytes, or None if the task failed, as `Done.error` tells, or has none.
    Raises: KeyboardInterrupt: it was cancelled; the sampler's generator was closed by it.
    """
    try:
        return _draw(task, form, sampler)
    except Exception as error:  # noqa: BLE001  # a sampler may raise anything
        return failure(task, error), None


def _draw(task: Task, form: Form, sampler: bytes) -> tuple[Done, NDArray[np.uint8] | None]:
    global _state
    key = (task.digest, form)
    if _state is None or _state.key != key:
        _state = _WorkerState(key, sampler_of(sampler), SegmentBuilder(form), Threads(task.reads))
    samples = samples_of(_state.sampler, task, _state.threads, form)
    drawn = draw(samples, task, _state.builder, _pass, _pass)
    if not _state.builder.rows:
        return drawn.done(0, 0), None
    encoded = _state.builder.encode(drawn.skipped)
    file: NDArray[np.uint8] = np.empty(encoded.nbytes, np.uint8)
    start = 0
    for piece in encoded.pieces:
        file[start : start + piece.nbytes] = np.frombuffer(piece, np.uint8)
        start += piece.nbytes
    return drawn.done(encoded.rows, file.nbytes), file


def _pass() -> None:
    """Ray ends a task by KeyboardInterrupt."""


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
            self._writes = store.show_writing()
        return store

    @property
    def _store(self) -> Store:
        with self._opening:  # threads of both groups may come first
            return self._made

    @ray.method(concurrency_group="asking")
    def open(self) -> tuple[Form, tuple[str, int, int]]:
        """Make or open the cache.

        Returns: the form of its segments, and its identity: the same for two nodes that share one folder.
        Raises: as `Cache.create`.
        """
        settings = self._store.settings
        status = os.stat(self._store.folder.path)
        return settings.form, (boot_id(), status.st_dev, status.st_ino)

    @ray.method(concurrency_group="asking")
    def begin(self, pool: str, division: str) -> OpenedPool:
        """Return what is known of a pool. Raises: ValueError: it divided its samples otherwise."""
        with self._store.locked():
            require_division(self._store, pool, division)
            first = take_numbers(self._store, pool, 0)
            listed = {*self._store.folder.returned_tasks(pool)}
            return OpenedPool(first, listed, tasks_listed(pool, self._store.segments()))

    @ray.method(concurrency_group="asking")
    def take_open(
        self,
        pool: str,
        count: int,
        tasks: int | None,
        least: int,
        own: list[int],
        adopted: list[int],
        ended: list[int],
    ) -> list[int]:
        """Take up to `count` tasks of divided samples; see `OpenTasks.take`.

        Args:
            least: new numbers are not below it.
            own: tasks that the pool has; this actor may have been made anew since it took them.
            adopted: open tasks that were listed on other nodes.
            ended: tasks that were published, here or there.
        """
        folder = self._store.folder
        taken: list[int] = []
        with self._store.locked():
            take_numbers(self._store, pool, 0, least)
            if adopted:
                folder.return_tasks(pool, adopted)
            self._end_tasks(pool, ended)
            if self._open_tasks is None:
                self._open_tasks = OpenTasks(self._store, pool, LockFile(folder.pools / pool))
            for number in own:
                self._open_tasks.hold(number)
            while len(taken) < count and (task := self._open_tasks.take(tasks)) is not None:
                taken.append(task)
        if self._store.settings.durable:
            folder.sync_tasks(pool)
        return taken

    @ray.method(concurrency_group="asking")
    def end_tasks(self, pool: str, numbers: list[int]) -> None:
        """Note that tasks are published, or listed on another node."""
        with self._store.locked():
            self._end_tasks(pool, numbers)

    def _end_tasks(self, pool: str, numbers: list[int]) -> None:
        for number in numbers:
            self._store.folder.end_task(pool, number)

    @ray.method(concurrency_group="asking")
    def take(self, pool: str, count: int, least: int = 0) -> int:
        """Take a pool's next `count` numbers here, not below `least`; returns the first."""
        with self._store.locked():
            first = take_numbers(self._store, pool, count, least)
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
