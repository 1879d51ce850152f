"""SamplerPool of a cluster: samplers anywhere, each training node's cache on its own disk.

`RayEngine` runs its tasks: they are drawn anywhere, and published on the nodes that train.

For each task it has Ray draw a segment in any worker, and then hands the reference to one node's actor
(`share="split"`: the one with the fewest segments waiting) or to all of them (`"replicate"`). Guarantees:
- content: task k's segment is what a local pool publishes for it, however often Ray draws it again;
- no task is published by two nodes of a split, except after a node died while it published: its copy
  is gone with its disk, and a living node publishes the task;
- bounded: at most `workers` tasks are being drawn, and all segments drawn or on their way take
  at most `in_flight_bytes` of the object stores (but one segment a node). For a full cache the node's
  segments wait, then nothing more is drawn for it, and at last nothing at all;
- numbers: each is taken in the cache of the first living node, in the order of ids, and recorded in
  those of all others before it is drawn: whichever nodes are left, a later pool goes on behind it. Two
  pools of a name and seed at the same time share the numbers as long as that first node lives;
- divided samples, as of `Items`: that first node lists the tasks that were begun and are not published. A
  later pool collects what any node lists, less what any node has published, and draws it. What a lost node
  had listed or published is lost with it.

When the driver dies, Ray ends its actors and tasks. If the user shuts Ray down before the pool, the engine
raises an error. A call that waits within Ray just then, or a reference that is dropped, may never return or
end the process. So the engine waits for futures, which Ray resolves, and keeps references until it is
dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from arrowcache.arguments import face, instead
from arrowcache.arrow.segment import Form
from arrowcache.errors import SamplerError, SchemaError, log
from arrowcache.limits import Limits
from arrowcache.ray.nodes import (
    GROUPS,
    NODE,
    NodeCaches,
    NodeIngest,
    OpenedPool,
    alive_nodes,
    draw_segment,
)
from arrowcache.sampling.dispatcher import PoolOptions, failed
from arrowcache.sampling.pool import Pool, PoolStats
from arrowcache.sampling.reads import Sampler
from arrowcache.sampling.task import Done, Task, fitted
from arrowcache.units import format_bytes, format_count, parse_bytes

_INSTEAD = instead(
    "executor", say="Ray runs its tasks; arrowcache.SamplerPool takes an executor of this host"
) | instead("every_rank", say="one pool fills the caches of all nodes: make it in the driver")
_SHARES = ("split", "replicate")

_log = logging.getLogger("arrowcache")

START_SECONDS = 120.0  # for the first actor of a node: a worker process, and its imports
ANSWER_SECONDS = 60.0  # for a node to answer
_STORE_SHARE = 0.5  # of the smallest object store, for segments in flight
_AHEAD = 2  # segments a node, beside those being drawn: one being published, one on its way
_LOOK_SECONDS = 0.1  # between two looks whether Ray still runs
_FORCE_SECONDS = 1.0  # of `Limits.stop_seconds`, for tasks that have to be killed
_LOST = (RayActorError, ActorUnschedulableError)


@dataclass(slots=True)
class NodeState:
    """A node with a cache, and the counts of segments published there."""

    actor: Any
    alive: bool = True
    at_work: int = 0  # segments handed to it that are not published
    segments: int = 0
    rows: int = 0
    nbytes: int = 0
    waiting_seconds: float = 0.0


@dataclass(slots=True)
class _DrawnSegment:
    """A segment in the object stores, and the nodes that must still publish it."""

    task: Task
    done: Done
    file: Any  # its reference
    left: set[str] = field(default_factory=set)  # nodes


class RayEngine:
    """The `Engine` of a cluster. The constructor starts an actor on each node and opens its cache.

    Args:
        options: options of the pool. `retries` is also the number of times that Ray repeats a task whose
            worker or node was lost, and starts an actor anew.
        fit: the options for segments of another form than `caches` would have, as caches that were there
            already may ask for.
        replicate: every node gets every segment. False: each segment goes to one node.
        in_flight_bytes: see the module. None means half of the smallest object store of a node.
        ray_options: Ray's options of a drawing task, such as `num_cpus`, `resources`, `runtime_env`.
    Raises: ValueError, SchemaError, CacheFormatError: caches that cannot be opened, or that differ.
        TimeoutError: an actor did not start.
    """

    def __init__(
        self,
        caches: NodeCaches,
        options: PoolOptions,
        fit: Callable[[Form], PoolOptions],
        *,
        replicate: bool,
        in_flight_bytes: int | None,
        ray_options: Mapping[str, Any],
    ) -> None:
        self._pool, self._replicate = options.pool, replicate
        self._drawing: dict[Future[Done], tuple[Task, Any, Any]] = {}  # -> task, its reference, its file's
        self._publishing: dict[Future[Done], tuple[_DrawnSegment, str]] = {}  # -> segment, node
        self._asked: Future[Any] | None = None  # the request to the node that was asked last
        self._outcomes: list[tuple[Task, Done]] = []  # results that `collect` has not returned yet
        self._least: int | None = None  # the next task's number; None: no node was asked yet
        self._open: set[int] = set()  # of divided samples, tasks that this pool has and did not publish
        self._published: set[int] = set()  # tasks whose end the keeper was not told of yet
        self._keeper = ""  # the node that was asked for open tasks last
        self._job = ray.get_runtime_context().get_job_id()
        self._ended = False
        retried = {"scheduling_strategy": "SPREAD", "max_retries": options.retries}
        self._draw: Any = ray.remote(draw_segment).options(**(retried | {**ray_options, "num_returns": 2}))
        self.nodes = {node: NodeState(_actor(caches, node, options.retries)) for node in caches.node_ids()}
        try:
            if not self.nodes:
                raise SamplerError("no node of the cluster is alive: start one, or wait for it")
            self._form = _opened(caches, self.nodes)
            self.options = options if self._form == caches.form else fit(self._form)
            self._found = self._begun()
            self._sampler: Any = ray.put(self.options.sampler)  # once, and from there to each node that draws
        except BaseException:
            self.end()
            raise
        bound = in_flight_bytes or int(_smallest_store_bytes() * _STORE_SHARE)
        ahead = options.workers + _AHEAD * len(self.nodes)
        self._most = max(len(self.nodes), min(ahead, bound // self._form.segment_bytes))

    def _is_connected(self) -> bool:
        """True if Ray still runs. If it does not, almost any request would start it anew."""
        return ray.is_initialized() and ray.get_runtime_context().get_job_id() == self._job

    def _require_ray(self, ended: BaseException | None = None) -> None:
        """Raises: SamplerError: Ray was shut down."""
        if not self._is_connected():
            raise SamplerError(
                "Ray was shut down: stop the pool before; a new one goes on at the next task"
            ) from ended

    @contextmanager
    def _asking_ray(self) -> Iterator[None]:
        """Wraps each call of Ray. Raises: SamplerError: Ray was shut down, before or meanwhile."""
        self._require_ray()
        try:
            yield
        except (Exception, SystemExit) as error:  # any error that a call meets then
            self._require_ray(error)
            raise

    def _ask(self, node: str, method: str, *arguments: Any) -> Future[Any]:
        """Send a request to a node's actor. Raises: SamplerError: Ray was shut down."""
        with self._asking_ray():
            answer: Future[Any] = getattr(self.nodes[node].actor, method).remote(*arguments).future()
        return answer

    def _wait(self, answers: Collection[Future[Any]], timeout_seconds: float) -> set[Future[Any]]:
        """Return the answers that have come.

        Blocks: until one has, at most this long.
        Raises: SamplerError: Ray was shut down, before or meanwhile.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            self._require_ray()
            left = max(0.0, deadline - time.monotonic())
            ready, _ = wait(answers, min(left, _LOOK_SECONDS), FIRST_COMPLETED)
            if ready or left <= _LOOK_SECONDS:
                return ready

    def idle(self) -> int:
        published_soon = {drawn.task.number for drawn, _ in self._publishing.values()}
        in_flight = len(self._drawing) + len(published_soon)
        return max(0, min(self.options.workers - len(self._drawing), self._most - in_flight))

    def take(self, count: int) -> list[Task]:
        if self.options.division:
            numbers = self._open_tasks(count)
        else:
            numbers = [*self._numbers(count)]
        return [self.options.task(number) for number in numbers]

    def _begun(self) -> dict[str, OpenedPool]:
        """Return what each node knows of this pool. Raises: ValueError: samples were divided otherwise."""
        asked = {
            name: node.actor.begin.remote(self._pool, self.options.division)
            for name, node in self.nodes.items()
        }
        return {name: _answered(name, answer) for name, answer in asked.items()}

    def _open_tasks(self, count: int) -> list[int]:
        """Take tasks of divided samples: open ones that nobody draws, then new ones."""
        if self._least is None:
            self._least = max(found.next_task for found in self._found.values())
            self._published.update(*(found.published for found in self._found.values()))
        taken: list[int] | None = None
        while taken is None:
            keeper = self._living()[0]
            others = [node for node in self._living() if node != keeper]
            elsewhere = set().union(*(self._found[node].open_tasks for node in others)) - self._published
            if keeper != self._keeper:  # the first time, or the one before was lost
                elsewhere |= self._open
            known = [*self._open], [*elsewhere], [*self._published]
            taken = self._answer(
                keeper, "take_open", self._pool, count, self.options.tasks, self._least, *known
            )
        self._keeper, self._published = keeper, set()
        self._open.update(taken)
        self._least = max([self._least, *(number + 1 for number in taken)])
        for node in others:
            self._take(node, 0, self._least)
            if moved := self._found[node].open_tasks:
                self._answer(node, "end_tasks", self._pool, [*moved])
                self._found[node] = self._found[node]._replace(open_tasks=set())
        return taken

    def _numbers(self, count: int) -> range:
        if self._least is None:  # a node that was in a pool without the first node may be ahead of it
            self._least = max(self._take(node, 0, 0) or 0 for node in self._living())
        first = None
        while first is None:
            keeper = self._living()[0]
            first = self._take(keeper, count, self._least)
        self._least = first + count
        for node in self._living():
            if node != keeper:
                self._take(node, 0, self._least)
        return range(first, self._least)

    def _take(self, node: str, count: int, least: int) -> int | None:
        """Take numbers on a node. Returns: the first, or None if the node was lost."""
        first: int | None = self._answer(node, "take", self._pool, count, least)
        return first

    def _answer(self, node: str, method: str, *arguments: Any) -> Any:
        """Return the answer of a node's actor, or None if the node was lost."""
        self._asked = self._ask(node, method, *arguments)
        if not self._wait([self._asked], ANSWER_SECONDS):
            raise SamplerError(
                f"the cache of node {node} did not answer in {ANSWER_SECONDS:.0f} s: look at the node with "
                "`ray status`"
            )
        try:
            return self._asked.result()
        except _LOST:
            self._lose(node)
            return None

    def begin(self, task: Task) -> None:
        with self._asking_ray():
            report, file = self._draw.remote(task, self._form, self._sampler)
            self._drawing[report.future()] = task, report, file

    def collect(self, timeout_seconds: float) -> list[tuple[Task, Done]]:
        answers = [*self._drawing, *self._publishing]
        if answers and not self._outcomes:
            for answer in self._wait(answers, timeout_seconds):
                if answer in self._drawing:
                    self._hand_over(answer)
                elif answer in self._publishing:  # else its node was lost
                    self._finish(answer)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _hand_over(self, answer: Future[Done]) -> None:
        """Publish a segment that was drawn; a failed task has ended."""
        task, _, file = self._drawing.pop(answer)
        try:
            done = answer.result()
        except RayError as error:
            self._outcomes.append(failed(task, error))
            return
        if done.error:
            self._outcomes.append((task, done))
        elif not done.rows:  # a divided one without a sample
            self._end_task(task, done)
        else:
            self._publish(_DrawnSegment(task, replace(done, waiting_seconds=0.0), file))

    def _publish(self, drawn: _DrawnSegment) -> None:
        """Hand a segment to the nodes that need it.

        Raises: SamplerError: no node is left.
        """
        chosen = self._living()
        if not self._replicate:
            chosen = [min(chosen, key=lambda node: (self.nodes[node].at_work, self.nodes[node].segments))]
        task = drawn.task
        for node in chosen:
            drawn.left.add(node)
            self.nodes[node].at_work += 1
            answer = self._ask(node, "publish", task.task_name, task.number, drawn.done.rows, drawn.file)
            self._publishing[answer] = drawn, node

    def _finish(self, answer: Future[Done]) -> None:
        """Handle the end of a node's publish: published, failed or lost."""
        drawn, node = self._publishing[answer]
        try:
            done = answer.result()
        except _LOST:
            self._lose(node)
            return
        except RayError as error:  # raised there; or the segment was lost, and could not be drawn again
            for other, (each, name) in list(self._publishing.items()):
                if each is drawn:
                    del self._publishing[other]  # of a replica: it may publish; the next try drops that
                    self.nodes[name].at_work -= 1
            self._outcomes.append(failed(drawn.task, error))
            return
        del self._publishing[answer]
        self._count(node, done)
        drawn.done = replace(drawn.done, waiting_seconds=drawn.done.waiting_seconds + done.waiting_seconds)
        drawn.left.discard(node)
        if not drawn.left:
            self._end_task(drawn.task, drawn.done)

    def _end_task(self, task: Task, done: Done) -> None:
        if self.options.division:
            self._open.discard(task.number)
            self._published.add(task.number)
        self._outcomes.append((task, done))

    def _count(self, node: str, done: Done) -> None:
        each = self.nodes[node]
        each.at_work -= 1
        each.segments += done.rows > 0
        each.rows += done.rows
        each.nbytes += done.nbytes
        each.waiting_seconds += done.waiting_seconds

    def _lose(self, node: str) -> None:
        """Handle the loss of a node and its cache: other nodes get its unpublished segments, if needed.

        Raises: SamplerError: no node is left.
        """
        if not self.nodes[node].alive:
            return
        self.nodes[node].alive = False
        with self._asking_ray():
            ray.kill(self.nodes[node].actor)  # a node that was only cut off would publish segments of others
        self._living()  # raises if there is none
        log(f"node {node} was lost with its cache: the others go on")
        for answer, (drawn, name) in list(self._publishing.items()):
            if name == node:
                del self._publishing[answer]
                drawn.left.discard(node)
                if not self._replicate:
                    self._publish(drawn)
                elif not drawn.left:
                    self._outcomes.append((drawn.task, drawn.done))

    def _living(self) -> list[str]:
        """Return the living nodes. Raises: SamplerError: there are none."""
        if living := [name for name, node in self.nodes.items() if node.alive]:
            return living
        raise SamplerError(
            f"no node with a cache is left of {len(self.nodes)}: a new pool goes on with those that live"
        )

    def at_work(self) -> tuple[int, int]:
        return 0, 0  # what is drawn on other nodes is not seen before it arrives

    def end(self) -> list[Done]:
        if self._ended or not self._is_connected():
            return []
        self._ended, deadline = True, time.monotonic() + Limits.current.stop_seconds
        results = []
        try:
            for _, report, _ in self._drawing.values():
                ray.cancel(report)
            living = [node.actor for node in self.nodes.values() if node.alive]
            stopped = [actor.stop.remote().future() for actor in living]
            left = deadline - time.monotonic()
            wait([*stopped, *self._publishing, *self._drawing], max(0.0, left - _FORCE_SECONDS))
            results = self._published_meanwhile()
            ended = self._published | {done.number for done in results}
            if self._keeper and self.nodes[self._keeper].alive:  # else the next pool finds their segments
                wait([self._ask(self._keeper, "end_tasks", self._pool, [*ended])], _FORCE_SECONDS)
            for _, report, _ in self._drawing.values():  # a sampler that ignores Ctrl-C, such as one in C
                ray.cancel(report, force=True)
            wait(self._drawing, max(0.0, deadline - time.monotonic()))
            for actor in living:
                ray.kill(actor)
        except (RayError, RuntimeError, SystemExit) as error:  # the cluster is gone, and everything with it
            _log.debug("a pool's cluster ended before it: %s", error)
        return results

    def _published_meanwhile(self) -> list[Done]:
        results: dict[int, Done] = {}
        for answer in [each for each in self._publishing if each.done()]:
            drawn, node = self._publishing.pop(answer)
            try:
                done = answer.result()
            except RayError:  # lost in the end
                continue
            self._count(node, done)
            if done.rows:
                of_task = drawn.done
                results[drawn.task.number] = replace(
                    done,
                    drawn=of_task.drawn,
                    skipped=of_task.skipped,
                    fault=of_task.fault,
                    counts=of_task.counts,
                )
        return [*results.values()]


def _actor(caches: NodeCaches, node: str, retries: int) -> Any:
    """Start a node's actor. It needs no processor: most of the time it waits."""
    options: dict[str, Any] = {
        "num_cpus": 0,
        "concurrency_groups": GROUPS,
        "max_restarts": retries,
        "max_task_retries": retries,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    return ray.remote(**options)(NodeIngest).remote(caches, node)


def _opened(caches: NodeCaches, nodes: Mapping[str, NodeState]) -> Form:
    """Make or open all caches. Returns: the form of a segment, which must be the same in each."""
    answers = {name: node.actor.open.remote() for name, node in nodes.items()}
    opened = {name: _answered(name, answer) for name, answer in answers.items()}
    forms: dict[str, Form] = {}
    folders: dict[object, str] = {}
    for name, (forms[name], identity) in opened.items():
        if (other := folders.setdefault(identity, name)) != name:
            raise ValueError(
                f"nodes {other} and {name} have one folder, {caches.path_on(name)}: give a path on each "
                f"node's own disk, or one with {NODE} in it"
            )
    first, form = next(iter(forms.items()))
    for name, each in forms.items():
        if each != form:
            raise SchemaError(
                f"the caches of nodes {first} and {name} have segments of {_described(form)} and of "
                f"{_described(each)}: remove one of them, or give another path"
            )
    return form


def _answered(name: str, answer: Any) -> Any:
    """Return the answer of a node's actor that starts. Raises: what is raised there, TimeoutError."""
    try:
        return ray.get(answer, timeout=START_SECONDS)
    except GetTimeoutError:
        raise TimeoutError(
            f"node {name} did not open its cache in {START_SECONDS:.0f} s: look at it with "
            "`ray status`, or leave it out of nodes"
        ) from None
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except RayError as error:
        raise SamplerError(f"node {name} cannot have a cache: {error}") from None


def _described(form: Form) -> str:
    return f"{format_count(form.full_rows, 'row')} in {format_bytes(form.segment_bytes)}"


def _smallest_store_bytes() -> int:
    """Return the least memory that any node has for objects."""
    return min(int(node["Resources"].get("object_store_memory", 0)) for node in alive_nodes())


class SamplerPool(Pool):
    """Samplers at work all over a Ray cluster, from construction until `stop()`. A context manager.

    Needs `ray.init()` before. The caches are made, or opened, on their nodes; a full one slows the samplers
    down. Task k's segment is the one that `arrowcache.SamplerPool` publishes for (sample, seed, k), and no
    task is repeated by a later pool of the same name and seed as long as one of the nodes lives on. Of
    `Items` and `ParquetRows(passes=1)` a later pool draws what was left undone, as `arrowcache.SamplerPool`
    does; with share="replicate" a driver that is killed may leave a task on some nodes only.
    A worker or node that is lost while it draws costs nothing: Ray has the task drawn elsewhere. A training
    node that is lost takes its cache with it, and the others go on. `stop()` has Ray raise KeyboardInterrupt
    in the samplers, so that their generators end; one that waits within a call for 4 s more is killed. The
    other arguments are those of `arrowcache.SamplerPool`.

    Args:
        caches: the caches of the cluster's nodes.
        sample: `sample(rng) -> iterable of samples`, as for `arrowcache.SamplerPool`.
        share: "split": every node gets different samples, in the order of requests; "replicate": all nodes
            get the same, at the pace of the slowest.
        workers: number of tasks drawn at a time, in the whole cluster, limited by its processors.
        retries: as for `arrowcache.SamplerPool`, and the number of times that Ray repeats a lost task.
        in_flight: bytes that drawn segments may take in Ray's object stores, all together, until they are
            published; each node may always have one segment. None means half of the smallest object store.
        options: Ray's options of a drawing task, such as {"num_cpus": 2} or a `runtime_env`; one processor
            each, spread over the cluster, unless said otherwise.
    Blocks: until all caches are open: some seconds, while workers start.
    Raises: ValueError, TypeError, SchemaError, CacheFormatError: an argument does not fit. RuntimeError: Ray
        is not running.
    """

    @face("SamplerPool of a cluster", _INSTEAD)
    def __init__(
        self,
        caches: NodeCaches,
        sample: Sampler,
        *,
        share: str = "split",
        workers: int = 4,
        seed: int = 0,
        name: str = "default",
        segments: int | None = None,
        retries: int = 3,
        in_flight: int | str | None = None,
        options: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        reads: int = 16,
        on_error: str = "raise",
    ) -> None:
        if not isinstance(caches, NodeCaches):
            raise TypeError(f"caches must be arrowcache.ray.NodeCaches, not {caches!r}")
        if share not in _SHARES:
            raise ValueError(f"share={share!r} is unknown: use {' or '.join(map(repr, _SHARES))}")

        def fit(form: Form) -> PoolOptions:
            return PoolOptions(
                fitted(sample, form), workers, seed, name, segments, retries, progress, reads, on_error
            )

        drawn = fit(caches.form)
        in_flight_bytes = None if in_flight is None else parse_bytes(in_flight, "in_flight")
        if not ray.is_initialized():
            raise RuntimeError("Ray is not running: call ray.init() first, in a cluster with its address")
        self._engine = RayEngine(
            caches,
            drawn,
            fit,
            replicate=share == "replicate",
            in_flight_bytes=in_flight_bytes,
            ray_options=options or {},
        )
        super().__init__(self._engine, self._engine.options)

    def stats(self) -> PoolStats:
        """Return counts of published segments, and their cost; a segment on several nodes counts once."""
        return super().stats()

    def node_stats(self) -> dict[str, PoolStats]:
        """Return counts of published segments on each node, by its id, also on nodes that were lost since.

        Retries, failures and samples left out are of tasks, which belong to no node: 0.
        """
        seconds = time.monotonic() - self._started
        return {
            name: PoolStats(node.segments, node.rows, node.nbytes, seconds, node.waiting_seconds, 0, 0)
            for name, node in self._engine.nodes.items()
        }
