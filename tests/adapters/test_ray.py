"""arrowcache.ray on a cluster of several nodes on this machine, each with a folder of its own.

Guaranteed: each node's cache holds what a local pool would have published for the same tasks; no task is on
two nodes of a split; none is lost or repeated, whoever dies or starts again; a full cache slows
samplers down.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="ray is not installed")

import ray
from helpers import (
    DEADLINE_SECONDS,
    ROW,
    columns_of,
    file_bytes,
    full,
    limit,
    make_cache,
    publish,
    ramp_rows,
    segment_files,
    wait_until,
)
from helpers import sample as row
from pool_tasks import draws, expected, fails_at, sampled, tasks
from processes import Script
from ray._private import services
from ray.cluster_utils import Cluster

import arrowcache as ac
from arrowcache.ray import NodeCaches, SamplerPool
from arrowcache.ray.nodes import NodeIngest
from arrowcache.sampling.sources import Items

OPTIONS: dict[str, Any] = {"progress": False, "workers": 3}
PATHS = (Path(ac.__file__).parents[1], Path(__file__).parents[1])  # for the workers' imports
STORE_BYTES = 80 << 20
RAY_LOG_LINE = re.compile(r"\[[\d: ,-]+ [DIWEC] \d+ \d+\] \w+\.(cc|h):\d+: ")
LONG_SECONDS = 2 * DEADLINE_SECONDS  # a busy machine starts a worker process in 20 s

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:subprocess .* is still running:ResourceWarning",  # Ray's servers, ended by pid
        "ignore:unclosed file .*(raylet|gcs|monitor|log).*:ResourceWarning",  # and their logs
        "ignore::DeprecationWarning:ray.data.context",  # where Ray sets its own settings
    ),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without processors, and two nodes that sample and train."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join(map(str, PATHS)))
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        environment.setenv("RAY_worker_niceness", "0")  # else 15: they come after all else on a busy machine
        # Ray gives its servers 30 s to start, which is not enough on a busy machine.
        environment.setattr("ray._private.services.get_node", patient(services.get_node))
        for name in ("agent_register_timeout_ms", "worker_register_timeout_seconds"):
            environment.setenv(f"RAY_{name}", "300000" if name.endswith("ms") else "300")
        # Two servers that nobody asks anything, and that take a busy machine a minute to start.
        environment.setattr("ray._private.node.Node.start_api_server", lambda *_, **__: None)
        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "no_monitor": True}
        cluster = Cluster()
        try:
            cluster.add_node(**head)
            for _ in range(2):
                cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
            ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Ask again, for minutes, where Ray knows nothing yet of a node that starts."""

    def ask(*arguments: Any) -> Any:
        deadline = time.monotonic() + 180
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    return ask


@pytest.fixture
def caches(cluster, tmp_path):
    return caches_on(cluster, tmp_path)


def caches_on(cluster: Cluster, folder: Path, **options: Any) -> NodeCaches:
    options = {"nodes": [node.node_id for node in cluster.worker_nodes]} | options
    options = {"capacity": "1MiB", "segment_bytes": "32KiB", "segment_rows": 16} | options
    return NodeCaches(folder / "{node}", ROW, **options)


def opened(caches: NodeCaches) -> list[ac.Cache]:
    return [ac.Cache.open(caches.path_on(node)) for node in caches.node_ids()]


def split(caches: NodeCaches, pool: str = "default.0") -> dict[int, list[int]]:
    """The tasks of all nodes; none on two of them."""
    found: dict[int, list[int]] = {}
    for cache in opened(caches):
        assert cache.verify() == []
        each = tasks(cache, pool)
        assert not found.keys() & each.keys()
        found |= each
    return found


# what is published where


def test_each_node_gets_a_share_of_what_a_local_pool_would_publish(caches):
    with SamplerPool(caches, draws(), seed=5, segments=12, **OPTIONS) as pool:
        pool.wait(timeout=LONG_SECONDS)
        stats, nodes = pool.stats(), pool.node_stats()
    assert split(caches, "default.5") == {number: expected(number, 5) for number in range(12)}
    assert (stats.segments, stats.rows, stats.failures) == (12, sum(map(ramp_rows, range(12))), 0)
    assert sum(each.segments for each in nodes.values()) == 12
    assert min(each.segments for each in nodes.values()) > 0
    assert sum(each.bytes for each in nodes.values()) == stats.bytes


def test_each_item_of_a_dataset_is_drawn_once_a_pass_and_published_on_one_node(caches):
    items = Items([row(number) for number in range(150)], passes=2)
    for rows in (300, 0):  # a pool that is started again has nothing to draw
        with SamplerPool(caches, items, **OPTIONS) as pool:
            pool.wait(timeout=LONG_SECONDS)
            assert pool.stats().rows == rows
    drawn = split(caches)
    orders = [
        [each for number in numbers.tolist() for each in drawn[number]]
        for numbers in np.array_split(sorted(drawn), 2)
    ]
    assert [sorted(order) for order in orders] == [list(range(150))] * 2
    assert orders[0] != orders[1]


def test_items_of_tasks_that_a_pool_had_begun_are_drawn_by_the_next_one_on_any_node(
    cluster, caches, tmp_path
):
    script = Script(DRAWS_ITEMS, tmp_path, cluster.address, " ".join(caches.node_ids()), new_interpreter=True)
    with script:
        assert script.line() == "ready"
        script.kill()

    class Rows:  # here, so that it is pickled by value
        def __len__(self):
            return 300

        def __getitem__(self, index):
            return row(index)

    drawn_rows = []
    for nodes in (caches.node_ids()[1:], None):
        some = caches_on(cluster, tmp_path, **({"nodes": nodes} if nodes else {}))
        with SamplerPool(some, Items(Rows()), segments=4 if nodes else None, **OPTIONS) as pool:
            pool.wait(rows=None if nodes is None else 1, timeout=LONG_SECONDS)
        drawn_rows.append(pool.stats().rows)
    assert min(drawn_rows) > 0
    drawn = split(caches)
    assert sorted(number for ids in drawn.values() for number in ids) == list(range(300))
    with pytest.raises(ValueError, match="is now to draw from 299 items"):
        SamplerPool(caches, Items([row(number) for number in range(299)]), **OPTIONS)


def test_items_that_cannot_be_had_are_left_out_and_tasks_without_any_are_done(caches):
    class Rows:  # here, so that it is pickled by value
        def __len__(self):
            return 60

        def __getitem__(self, index):
            return row(index) if index not in (7, 30, 59) else None

    for rows, skipped in ((57, 3), (0, 0)):
        with SamplerPool(caches, Items(Rows(), segment_items=1), on_error="skip", **OPTIONS) as pool:
            pool.wait(timeout=LONG_SECONDS)
            assert (pool.stats().rows, pool.stats().skipped) == (rows, skipped)
    drawn = sorted(number for ids in split(caches).values() for number in ids)
    assert drawn == sorted({*range(60)} - {7, 30, 59})


def test_a_pool_says_what_reads_on_other_nodes_took(caches):
    def sampler(rng):
        while True:
            yield partial(row, int(rng.integers(1000)))

    with SamplerPool(caches, sampler, **OPTIONS, segments=4) as pool:
        pool.wait(timeout=LONG_SECONDS)
        stats = pool.stats()
    assert stats.usual_read_seconds > 0
    assert stats.fetched_bytes > 0
    assert "99 % in" in str(stats)


def test_items_are_divided_by_the_caches_that_are_there(cluster, tmp_path):
    caches = caches_on(cluster, tmp_path, segment_bytes=None, segment_rows=None)
    for node in caches.node_ids():
        make_cache(caches.path_on(node), segment_bytes="16KiB", segment_rows=8)
    items = Items([row(number) for number in range(150)])
    with SamplerPool(caches, items, **OPTIONS) as pool:
        pool.wait(timeout=LONG_SECONDS)
    assert sorted(number for ids in split(caches).values() for number in ids) == list(range(150))


def test_all_nodes_get_the_same_bytes(caches, tmp_path):
    with SamplerPool(caches, draws(), share="replicate", segments=5, **OPTIONS) as pool:
        pool.wait(timeout=LONG_SECONDS)
        assert pool.stats().segments == 5
        assert [each.segments for each in pool.node_stats().values()] == [5, 5]
    local = make_cache(tmp_path / "local")
    sampled(local, segments=5)

    def files(cache):
        return {path.stem.split("-", 2)[2]: path.read_bytes() for path in segment_files(cache)}

    one, two = opened(caches)
    assert files(one) == files(two) == files(local)


def test_a_pool_started_again_on_whichever_nodes_repeats_no_task(cluster, caches, tmp_path):
    one = caches_on(cluster, tmp_path, nodes=caches.node_ids()[1:])
    for each, segments in ((caches, 4), (one, 3)):
        with SamplerPool(each, draws(), segments=segments, **OPTIONS) as pool:
            pool.wait(timeout=LONG_SECONDS)
    with SamplerPool(caches, draws(), **OPTIONS) as pool:  # stopped in mid-run
        pool.wait(segments=4, timeout=LONG_SECONDS)
    published = split(caches)
    assert len(published) == 7 + pool.stats().segments
    assert published == {number: expected(number) for number in published}
    sampled(opened(one)[0], segments=2)
    assert min(split(caches).keys() - published.keys()) > max(published)


def test_every_node_that_is_alive_has_a_cache_if_none_is_named(caches, cluster, tmp_path):
    everywhere = caches_on(cluster, tmp_path, nodes=None)
    assert len(everywhere.node_ids()) == 3
    assert set(everywhere.node_ids()) > set(caches.node_ids())
    assert everywhere.path_on("abc") == tmp_path / "abc"
    by_function = NodeCaches(lambda node: tmp_path / node[:3], ROW, "1MiB")
    assert by_function.path_on("abcdef") == tmp_path / "abc"


def test_stop_closes_the_generators_of_samplers_anywhere(caches, tmp_path, monkeypatch):
    limit(monkeypatch, task_cancel_seconds=LONG_SECONDS)  # on a busy machine the second is late
    begun, closing, closed = (tmp_path / name for name in ("begun", "closing", "closed"))
    for folder in (begun, closing, closed):
        folder.mkdir()
    may_close = tmp_path / "may close"

    def slow(rng):
        first = int(rng.integers(1 << 20))
        try:
            yield row(first)
            Path(begun, str(first)).touch()
            while True:
                time.sleep(0.3)
                yield row(1)
        finally:
            Path(closing, str(first)).touch()
            while not may_close.exists():
                time.sleep(0.01)
            Path(closed, str(first)).touch()

    def let_close():
        wait_until(lambda: {*os.listdir(closing)} >= {*os.listdir(begun)}, "all to be at their end")
        may_close.touch()

    pool = SamplerPool(caches, full(slow), **OPTIONS)
    wait_until(lambda: len(os.listdir(begun)) >= 2, "two samplers at work")
    thread = threading.Thread(target=let_close)
    thread.start()
    pool.stop()
    thread.join()
    assert os.listdir(begun)
    assert sorted(os.listdir(closed)) == sorted(os.listdir(begun))
    assert pool.stats().segments == 0


@pytest.mark.parametrize("sampler", [lambda rng: None, lambda rng: [{"id": 1.5}]], ids=["none", "schema"])
def test_what_cannot_pass_ends_a_pool_at_its_first_try(caches, sampler):
    pool = SamplerPool(caches, sampler, retries=50, **OPTIONS)
    with pytest.raises(ac.SamplerError, match="given up after 0 retries"):
        pool.wait(segments=1, timeout=LONG_SECONDS)
    pool.stop()


# waiting


@pytest.mark.parametrize(
    ("in_flight", "most"), [(None, 3 + 2 * 2), ("40KiB", 2)], ids=["workers and two a node", "of 18 KiB each"]
)
def test_full_caches_hold_the_samplers_up_until_there_is_room(caches, tmp_path, in_flight, most):
    begun = tmp_path / "begun"
    begun.mkdir()

    def sampler(rng):
        first = int(rng.integers(1 << 20))
        Path(begun, str(first)).touch()
        yield row(first)
        while True:
            yield row(int(rng.integers(1 << 20)))

    for node in caches.node_ids():
        publish(caches.make(node), 30)
    one, two = opened(caches)
    held = [one.snapshot(), two.snapshot()]
    try:
        with SamplerPool(caches, full(sampler), in_flight=in_flight, **OPTIONS) as pool:
            wait_until(
                lambda: [cache.stats().waiting_writers for cache in (one, two)] == [1, 1], "both to be full"
            )
            before = pool.stats().segments
            wait_until(lambda: len(os.listdir(begun)) >= before + 2, "the samplers")
            assert len(os.listdir(begun)) <= before + most
            held.pop().close()
            pool.wait(segments=before + 10, timeout=LONG_SECONDS)  # into the one that has room
            assert one.stats().waiting_writers == 1
            assert pool.stats().waiting_seconds > 0
    finally:
        for each in held:
            each.close()
    assert one.verify() == two.verify() == []
    assert one.stats().waiting_writers == 0


# what fails


def test_a_failing_task_is_told_with_its_traceback_while_the_others_go_on(caches):
    pool = SamplerPool(caches, fails_at(2), segments=5, retries=1, in_flight="40KiB", **OPTIONS)
    with pytest.raises(ac.SamplerError, match=r"in read_remote_scan(.|\n)*Peculiar: no such scan"):
        pool.wait(timeout=LONG_SECONDS)
    pool.stop()
    assert (pool.stats().segments, pool.stats().retries, pool.stats().failures) == (4, 1, 1)
    assert split(caches) == {number: expected(number) for number in (0, 1, 3, 4)}


def test_a_node_that_is_lost_in_mid_run_costs_its_cache_and_no_task(cluster, tmp_path, caplog):
    third = cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    caches = caches_on(cluster, tmp_path)
    node = third.node_id
    with SamplerPool(caches, draws(), segments=40, **OPTIONS) as pool:
        wait_until(lambda: pool.node_stats()[node].segments, "the third node to publish")
        cluster.remove_node(third)
        pool.wait(timeout=LONG_SECONDS)
        assert pool.stats().segments == 40
    gone = tasks(ac.Cache.open(caches.path_on(node)))
    living = split(caches_on(cluster, tmp_path))
    assert node not in caches_on(cluster, tmp_path).node_ids()
    assert living | gone == {number: expected(number) for number in range(40)}
    with pytest.raises(ValueError, match="not alive"):
        SamplerPool(caches, draws(), **OPTIONS)
    with SamplerPool(caches_on(cluster, tmp_path), draws(), segments=2, **OPTIONS) as pool:
        pool.wait(timeout=LONG_SECONDS)
    assert split(caches_on(cluster, tmp_path)).keys() - living.keys() == {40, 41}


SCRIPT = """
    import os, sys, time
    from pathlib import Path
    import ray
    import arrowcache as ac
    from arrowcache.ray import NodeCaches, SamplerPool
    from helpers import ROW, sample

    folder, address, nodes = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split()

    def sampler(rng):
        Path(folder, "pids", str(os.getpid())).touch()
        while True:
            yield sample(int(rng.integers(1 << 20)))

    def path(node):  # asked in the node's actor, and here
        Path(folder, "actors", str(os.getpid())).touch()
        return folder / node

    if __name__ == "__main__":
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        caches = NodeCaches(path, ROW, "1MiB", "32KiB", 16, nodes=nodes)
        pool = SamplerPool(caches, sampler, workers=2, progress=False)
        pool.wait(segments=3, timeout=60)
        print("ready", flush=True)
        if sys.argv[4] == "die":
            while True:
                time.sleep(0.1)
        if input() == "stopped":  # it publishes until it asks a node that does not answer
            published, looks = 0, 0
            while looks < 100:
                time.sleep(0.01)
                now = pool.stats().segments
                published, looks = now, looks + 1 if now == published else 0
            print("waits", flush=True)
            input()
        ray.shutdown()
        try:
            pool.wait(segments=1 << 20, timeout=20)
        except ac.SamplerError as error:
            print(error, flush=True)
        pool.stop()
        print(ray.is_initialized(), flush=True)
"""


DRAWS_ITEMS = """
    import sys, time
    from pathlib import Path
    import ray
    from arrowcache.ray import NodeCaches, SamplerPool
    from arrowcache.sampling.sources import Items
    from helpers import ROW, sample

    class Rows:
        def __len__(self):
            return 300

        def __getitem__(self, index):
            time.sleep(0.02)
            return sample(index)

    if __name__ == "__main__":
        ray.init(address=sys.argv[2], logging_level="ERROR", log_to_driver=False)
        caches = NodeCaches(sys.argv[1] + "/{node}", ROW, "1MiB", "32KiB", 16, nodes=sys.argv[3].split())
        pool = SamplerPool(caches, Items(Rows()), workers=3, progress=False)
        pool.wait(rows=50, timeout=60)
        print("ready", flush=True)
        time.sleep(600)
"""


def ready(mode: str, cluster: Cluster, caches: NodeCaches, folder: Path) -> Script:
    """A driver whose pool is at work."""
    for name in ("pids", "actors"):
        (folder / name).mkdir()
    script = Script(SCRIPT, folder, cluster.address, " ".join(caches.node_ids()), mode, new_interpreter=True)
    assert script.line() == "ready"
    return script


def test_samplers_and_actors_end_with_a_driver_that_is_killed(cluster, caches, tmp_path):
    with ready("die", cluster, caches, tmp_path) as script:
        script.kill()
    samplers = [int(pid) for pid in os.listdir(tmp_path / "pids")]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in samplers), "the samplers' end")
    with SamplerPool(caches, draws(), segments=2, **OPTIONS) as pool:
        pool.wait(timeout=LONG_SECONDS)
    published = split(caches)
    assert published == {number: expected(number) for number in published}


def without_ray_log(text: str) -> str:
    """What Python wrote to stderr. After `ray.shutdown()` Ray may find a server gone, and say so."""
    return "".join(line for line in text.splitlines(keepends=True) if not RAY_LOG_LINE.match(line))


def test_what_python_says_is_no_line_of_ray_s_log():
    log = "[2026-11-22 20:08:59,579 E 9734 9824] task_manager.cc:1545: Failed to push error to driver\n"
    assert without_ray_log(f"Exception ignored in: x\n{log}ValueError: y\n{log}") == (
        "Exception ignored in: x\nValueError: y\n"
    )


@pytest.mark.parametrize("nodes", ["that work", "that do not answer"])
def test_a_pool_whose_ray_is_shut_down_says_so_and_starts_no_other(cluster, caches, tmp_path, nodes):
    with ready("shut down", cluster, caches, tmp_path) as script:
        if nodes == "that do not answer":
            actors = {int(pid) for pid in os.listdir(tmp_path / "actors")} - {script.pid}
            assert len(actors) == 2
            for pid in actors:
                os.kill(pid, signal.SIGSTOP)
            script.say("stopped")
            assert script.line() == "waits"
        script.say("")
        assert "Ray was shut down: stop the pool before" in script.line()
        assert script.line() == "False"
        code, errors = script.end()
        assert code == 0
        assert without_ray_log(errors) == ""


# arguments


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sample": 5}, TypeError, "sample"),
        ({"workers": 0}, ValueError, "workers"),
        ({"share": "halves"}, ValueError, "share='halves' is unknown: use 'split' or 'replicate'"),
        ({"caches": "/a/path"}, TypeError, "NodeCaches"),
        ({"in_flight": "many"}, ValueError, "in_flight"),
        ({"reads": 0}, ValueError, "reads=0"),
        ({"on_error": "ignore"}, ValueError, "on_error='ignore' is unknown"),
        ({"name": "a/b"}, ValueError, "name='a/b'"),
        ({"options": {"num_cpu": 1}}, ValueError, "num_cpu"),
    ],
)
def test_a_wrong_argument_fails_in_the_constructor(caches, options, error, words):
    with pytest.raises(error, match=words):
        SamplerPool(**{"caches": caches, "sample": draws(), "progress": False, **options})


def test_caches_that_cannot_be_had_are_errors_of_the_constructor(cluster, caches, tmp_path):
    with pytest.raises(TypeError, match="path must be"):
        NodeCaches(7, ROW, "1MiB")
    with pytest.raises(ValueError, match="nodes="):
        NodeCaches("x", ROW, "1MiB", nodes=[])
    with pytest.raises(ValueError, match="not alive in this cluster"):
        SamplerPool(caches_on(cluster, tmp_path, nodes=["ab" * 28]), draws(), **OPTIONS)
    with pytest.raises(ValueError, match=r"have one folder, .* or one with \{node\} in it"):
        SamplerPool(
            NodeCaches(tmp_path / "one", ROW, "1MiB", "32KiB", nodes=caches.nodes), draws(), **OPTIONS
        )
    one, two = caches.node_ids()
    make_cache(caches.path_on(one), segment_rows=8)
    left_out = {"segment_rows": None, "segment_bytes": None}
    with pytest.raises(ValueError, match="is there already, with segment_rows=8, and not 16: leave"):
        SamplerPool(caches, draws(), **OPTIONS)
    with pytest.raises(ac.SchemaError, match=r"segments of 8 rows in .* and of \d+ rows in"):
        SamplerPool(caches_on(cluster, tmp_path, **left_out), draws(), **OPTIONS)
    (tmp_path / "full" / two).mkdir(parents=True)
    (tmp_path / "full" / two / "mine.txt").touch()
    with pytest.raises(ac.CacheFormatError, match=r"mine\.txt"):
        SamplerPool(caches_on(cluster, tmp_path / "full"), draws(), **OPTIONS)


def test_a_cache_that_is_there_has_the_settings_that_are_said_or_is_refused(tmp_path):
    def made(**options: Any) -> ac.Cache:
        return NodeCaches(tmp_path / "{node}", ROW, **{"capacity": "1MiB", **options}).make("one")

    made(segment_rows=8, durable=True).close()
    for options in ({"segment_rows": 16}, {"headroom": 0.5}, {"durable": False}):
        (name,) = options
        with pytest.raises(ValueError, match=f"is there already, with {name}=.*: leave {name} out"):
            made(**options)
    with made(segment_rows=8, capacity="2MiB") as cache:
        assert cache.stats().capacity_bytes == 2 << 20


def test_what_arrives_is_checked_before_it_is_published(caches):
    node = caches.node_ids()[0]
    ingest = NodeIngest(caches, node)  # here, as Ray does it there
    good = np.frombuffer(file_bytes(ROW, columns_of(ROW, 16)), np.uint8)
    other = ac.Schema({"id": ac.Tensor("int32")})
    for bad in (good[:-1], good[100:], np.frombuffer(file_bytes(other, columns_of(other, 16)), np.uint8)):
        with pytest.raises(ac.CorruptSegmentError):
            ingest.publish("default.0.0", 0, 16, bad)
    with pytest.raises(ac.CorruptSegmentError, match="holds 16 rows"):
        ingest.publish("default.0.0", 0, 15, good)
    cache = ac.Cache.open(caches.path_on(node))
    assert segment_files(cache) == []
    assert ingest.publish("default.0.0", 0, 16, good).rows == 16
    assert ingest.publish("default.0.0", 0, 16, good).rows == 16, "as told by a publish whose answer was lost"
    ingest.stop()
    assert ingest.publish("default.0.1", 1, 16, good).stopped
    assert len(segment_files(cache)) == 1
    assert segment_files(cache)[0].read_bytes() == good.tobytes()


# where it is used


def test_in_a_running_event_loop_a_killed_worker_costs_no_task(caches, tmp_path):
    sign = tmp_path / "sign"

    def sampler(rng):
        yield row(int(rng.integers(1 << 20)))
        try:
            sign.touch(exist_ok=False)
        except FileExistsError:
            while True:
                yield row(int(rng.integers(1 << 20)))
        os.kill(os.getpid(), signal.SIGKILL)

    async def work():
        with SamplerPool(caches, sampler, segments=4, **OPTIONS) as pool:
            await asyncio.to_thread(pool.wait, timeout=LONG_SECONDS)
            assert pool.stats().retries == 0, "Ray did it"

    asyncio.run(work())
    assert split(caches) == {number: expected(number) for number in range(4)}


def test_ray_trains_workers_load_from_their_nodes_cache(caches, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    train = pytest.importorskip("ray.train", reason="ray[train] is not installed")
    from ray.train.torch import TorchTrainer

    def train_loop(config):
        from arrowcache.torch import Loader

        context, seen = ray.train.get_context(), []
        assert context.get_world_size() == 2
        # Not the local rank: Ray Train tells nodes apart by their addresses, and these two have one.
        ranks = {"rank": 0, "world_size": 1}
        with (
            config["caches"].local() as cache,
            Loader(cache, 8, epoch_rows=48, timeout=60, **ranks) as loader,
        ):
            for epoch, batch in ((epoch, batch) for epoch in range(2) for batch in loader):
                seen.append((epoch, batch["id"].tolist()))
        node = ray.get_runtime_context().get_node_id()
        Path(config["folder"], f"{node}-{context.get_world_rank()}").write_text(repr(seen))

    with SamplerPool(caches, full(draws()), segments=8, **OPTIONS) as pool:
        pool.wait(timeout=LONG_SECONDS)
    assert min(len(tasks(cache)) for cache in opened(caches)) >= 3, "48 rows on each"
    (tmp_path / "seen").mkdir()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"caches": caches, "folder": str(tmp_path / "seen")},
        scaling_config=train.ScalingConfig(num_workers=2, use_gpu=False, placement_strategy="STRICT_SPREAD"),
        run_config=train.RunConfig(storage_path=str(tmp_path / "runs"), name="run"),
    )
    trainer.fit()
    for cache in opened(caches):
        (path,) = (tmp_path / "seen").glob(f"{cache.path.name}-*")
        there = {number for ids in tasks(cache).values() for number in ids}
        seen = __import__("ast").literal_eval(path.read_text())
        assert len(seen) == 2 * 6
        assert {number for _, ids in seen for number in ids} <= there
