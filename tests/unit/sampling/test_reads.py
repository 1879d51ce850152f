"""Reads: many at a time, in the order of yielding, and the same rows however they go."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from begun import own_threads
from drawing import fill
from helpers import in_child, limit, wait_until

import arrowcache as ac
from arrowcache.arrow.builder import SegmentBuilder
from arrowcache.arrow.segment import Form
from arrowcache.errors import SamplerError, SchemaError
from arrowcache.sampling.reads import Threads, at_once, held_bytes
from arrowcache.sampling.retries import Retries, may_pass
from arrowcache.sampling.samples import Samples, Stream
from arrowcache.sampling.sources import Map, Mix
from arrowcache.sampling.task import Task

SCHEMA = ac.Schema({"id": ac.Tensor("int64"), "x": ac.Tensor("float32", (256,))})
ROWS = 40


def row(key: int) -> dict[str, Any]:
    return {"id": key, "x": np.full(256, key, np.float32)}


def task(number: int = 0, reads: int = 4) -> Task:
    return Task("", b"", "default.0", 0, number, token=0, ramp=False, reads=reads)


def builder(rows: int = ROWS) -> SegmentBuilder:
    return SegmentBuilder(Form(SCHEMA, rows, 1 << 20))


class Store:
    """Reads of rows, of which it counts those at work."""

    def __init__(self) -> None:
        self.lock, self.at_work, self.most, self.begun = threading.Lock(), 0, 0, 0
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[int] = set()

    def read(self, key: int, seconds: float = 0.0) -> dict[str, Any]:
        with self.lock:
            self.begun += 1
            self.at_work += 1
            self.most = max(self.most, self.at_work)
            self.threads.add(threading.get_ident())
        try:
            time.sleep(seconds)
            self.gate.wait(60)
            return row(key)
        finally:
            with self.lock:
                self.at_work -= 1


def ids_of(sampler: Any, reads: int = 4, rows: int = ROWS, threads: Threads | None = None) -> list[int]:
    into = builder(rows)
    fill(sampler, task(reads=reads), into, threads=threads)
    found: list[int] = pa.ipc.open_file(b"".join(into.encode().pieces)).read_all()["id"].to_pylist()
    return found


def counting(read: Callable[..., Any], of: int = 1 << 30, seconds: float = 0.0):
    def sampler(rng):
        for key in range(of):
            yield partial(read, key, seconds)

    return sampler


@pytest.mark.parametrize("reads", [1, 3, 64])
def test_a_task_has_the_same_rows_whatever_reads_is_and_however_they_go(reads):
    chance = random.Random(reads)

    class Source:
        schema = SCHEMA

        def __init__(self, is_read: bool) -> None:
            self.is_read, self.failed = is_read, set()

        def one(self, key: int) -> dict[str, Any]:
            time.sleep(chance.choice([0, 0, 0.003]))
            if chance.random() < 0.2 and key not in self.failed:
                self.failed.add(key)
                raise ConnectionResetError("reset")
            return row(key)

        def many(self, key: int, count: int) -> ac.Rows:
            time.sleep(chance.choice([0, 0.005]))
            return ac.Rows(id=np.arange(key, key + count), x=np.full((count, 256), key, np.float32))

        def __call__(self, rng):
            for _ in range(int(rng.integers(3, 9))):  # it is called again
                key, kind = int(rng.integers(1 << 30)), rng.integers(3)
                count = int(rng.integers(4))
                if kind == 0:
                    yield row(key)
                elif kind == 1:
                    yield partial(self.one, key) if self.is_read else row(key)
                else:
                    yield partial(self.many, key, count) if self.is_read else self.many(key, count)

    threads = Threads(reads, Retries(3, 0.0))
    for number in range(4):
        into = builder()
        fill(Source(True), task(number), into, threads=threads)
        as_ever = builder()
        fill(Source(False), task(number), as_ever)
        assert b"".join(into.encode().pieces) == b"".join(as_ever.encode().pieces)
    assert held_bytes() == 0


@pytest.mark.parametrize("reads", [1, 4, 16])
def test_as_many_reads_run_at_a_time_as_are_asked_for_and_never_more(reads):
    store = Store()
    store.gate.clear()
    with ThreadPoolExecutor(1) as executor:
        ids = executor.submit(ids_of, counting(store.read), reads)
        wait_until(lambda: store.at_work == reads, "the reads")
        store.gate.set()
        assert ids.result(60) == list(range(ROWS))
    assert store.most == reads
    assert store.begun == ROWS, "none is read that has no room"


def test_reads_of_many_calls_run_at_a_time_too():
    store = Store()
    store.gate.clear()

    def one_a_call(rng):
        yield partial(store.read, int(rng.integers(1 << 30)))

    with ThreadPoolExecutor(1) as executor:
        ids = executor.submit(ids_of, one_a_call, 8)
        wait_until(lambda: store.at_work == 8, "the reads")
        store.gate.set()
        assert len(set(ids.result(60))) == ROWS


@pytest.mark.parametrize("items", [[], [1], [1, 2, 3]])
def test_the_main_thread_makes_no_call_of_a_store_which_ctrl_c_could_not_end(items):
    here = threading.current_thread()
    seen = at_once(lambda item: (item, threading.current_thread() is here), items)
    assert seen == [(item, False) for item in items]


def test_a_thread_that_reads_makes_a_single_call_itself():
    with ThreadPoolExecutor(1) as pool:
        (seen,) = pool.submit(at_once, lambda _: threading.get_ident(), [1]).result()
        assert seen == pool.submit(threading.get_ident).result()


def test_a_sampler_without_reads_starts_no_thread():
    assert ids_of(lambda rng: map(row, range(ROWS))) == list(range(ROWS))
    assert not own_threads()


def test_the_sampler_is_called_and_closed_in_the_tasks_thread_and_reads_are_elsewhere():
    store, seen = Store(), []

    def sampler(rng):
        try:
            seen.append(threading.get_ident())
            yield from counting(store.read)(rng)
        finally:
            seen.append(threading.get_ident())

    ids_of(sampler)
    assert seen == [threading.get_ident()] * 2
    assert threading.get_ident() not in store.threads


def test_the_first_error_in_the_order_of_yielding_ends_the_task():
    def read(key, seconds):
        if key in (7, 11):
            time.sleep(0.05 if key == 7 else 0)
            raise ZeroDivisionError(f"read {key}")
        return row(key)

    with pytest.raises(ZeroDivisionError, match="read 7"):
        ids_of(counting(read), 8)
    assert ids_of(counting(read), 8, rows=7) == list(range(7)), "errors behind the last row are nobody's"
    assert held_bytes() == 0


def test_an_error_of_the_sampler_comes_behind_the_samples_before_it():
    store = Store()

    def sampler(rng):
        for key in range(5):
            yield partial(store.read, key)
        raise OSError("the list of keys ends")

    with pytest.raises(OSError, match="list of keys"):
        ids_of(sampler)
    assert ids_of(sampler, rows=5) == list(range(5))


def test_a_sample_that_does_not_fit_is_named_though_the_sampler_has_gone_on():
    class Named:
        drawn = ""

        def __call__(self, rng):
            for key in range(ROWS):
                self.drawn = f"key {key}"
                yield partial(dict, id="seven" if key == 7 else key, x=np.zeros(256, np.float32))

    with pytest.raises(SchemaError, match=r"^key 7: field 'id'"):
        ids_of(Named())


def test_reads_that_were_given_up_do_not_run_and_those_at_work_count():
    store, threads = Store(), Threads(3, Retries(0))
    store.gate.clear()
    samples = Samples(Stream(counting(store.read), np.random.default_rng(0), threads, 1 << 20), threads)
    samples.begin(ROWS)
    wait_until(lambda: store.at_work == 3, "the reads")
    samples.close()
    assert held_bytes() == 0
    with ThreadPoolExecutor(1) as executor:
        ids = executor.submit(ids_of, counting(store.read), 3, 3, threads)
        time.sleep(0.2)
        assert store.begun == 3, "their threads are still at work"
        store.gate.set()
        assert ids.result(60) == [0, 1, 2]
    assert store.begun == 6
    assert store.most == 3


def test_threads_end_once_there_is_nothing_to_read(monkeypatch):
    limit(monkeypatch, idle_read_seconds=0.05)
    threads = Threads(4)
    for _ in range(3):
        assert ids_of(counting(Store().read, seconds=0.001), threads=threads) == list(range(ROWS))
        wait_until(lambda: not own_threads(), "the threads' end")
    assert not threads.are_reading


def test_what_waits_to_be_taken_is_bounded_by_bytes():
    store, threads = Store(), Threads(2, Retries(0))
    form = Form(SCHEMA, 1 << 20, 64 << 10)  # 62 rows

    def taken(samples: Samples) -> None:
        assert samples.take(1 << 20, lambda: None) is not None

    samples = Samples(
        Stream(counting(store.read), np.random.default_rng(0), threads, form.segment_bytes), threads
    )
    taken(samples)
    wait_until(lambda: not threads.are_reading, "the reads")
    for _ in range(20):
        taken(samples)
        wait_until(lambda: not threads.are_reading, "the reads")
    assert store.begun - 21 <= (64 << 10) // 1032 + 4
    samples.close()


@pytest.mark.parametrize("is_read", [True, False])
def test_what_waits_behind_a_slow_read_is_bounded_by_its_bytes_though_small_ones_came_before(is_read):
    store, threads, before = Store(), Threads(4, Retries(0)), held_bytes()
    store.gate.clear()
    made = []

    def large(key: int) -> dict[str, Any]:
        made.append(key)
        return {"id": key, "x": bytes(100_000)}

    def sampler(rng):
        yield partial(dict, id=1, x=b"small")
        yield partial(store.read, 0)
        for key in range(1000):
            yield partial(large, key) if is_read else large(key)

    class Enough(Exception):
        pass

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks > 20:
            raise Enough

    samples = Samples(Stream(sampler, np.random.default_rng(0), threads, 1_000_000), threads)
    looks = 0
    try:
        assert samples.take(1 << 20, look) == {"id": 1, "x": b"small"}
        wait_until(lambda: store.at_work == 1 or not threads.are_reading, "the first reads")
        with pytest.raises(Enough):
            samples.take(1 << 20, look)
        wait_until(lambda: threads.at_work <= 1, "the large ones")
        assert 8 <= len(made) <= 10 + 2 * 4 + 1
        assert held_bytes() - before >= 100_000 * len(made)
    finally:
        store.gate.set()
        samples.close()
    wait_until(lambda: not threads.are_reading, "the reads")
    assert held_bytes() == before


def test_a_forked_child_holds_no_bytes_of_its_parents_reads():
    store, threads, before = Store(), Threads(2, Retries(0)), held_bytes()
    threads.mean_of(()).learn(1, 1 << 20)
    store.gate.clear()
    samples = Samples(Stream(counting(store.read), np.random.default_rng(0), threads, 1 << 30), threads)
    samples.has_more()
    samples.begin(8)

    def body() -> None:
        assert held_bytes() == 0

    try:
        assert held_bytes() > before
        with in_child(body):
            pass
    finally:
        store.gate.set()
        samples.close()


LATE = {}


def late(function):
    LATE[function.__name__] = function
    return function


def module_read(key: int) -> dict[str, Any]:
    return row(key)


@late
def a_lambda(rng):
    for key in range(ROWS):
        yield lambda: module_read(key)  # noqa: B023


@late
def a_function(rng):
    for key in range(ROWS):

        def read():
            return module_read(key)  # noqa: B023

        yield read


@late
def one_within(rng):
    def keys():
        for key in range(ROWS):
            yield lambda: module_read(key)  # noqa: B023

    yield from keys()


@late
def one_in_a_partial(rng):
    for key in range(ROWS):
        yield partial(lambda scale: module_read(key * scale), 1)  # noqa: B023


@late
def one_behind_a_default(rng):
    for key in range(ROWS):
        yield lambda scale=1: module_read(key * scale)  # noqa: B023


@late
def one_of_another_generator(rng):
    for read in a_lambda(rng):  # noqa: UP028
        yield read


@late
def one_of_an_iterator(rng):
    return islice(a_lambda(rng), ROWS)


@late
def one_with_a_decorator(rng):
    def made(function):
        @wraps(function)
        def again():
            return function()

        return again

    for key in range(ROWS):
        yield made(lambda: module_read(key))  # noqa: B023


@late
def one_as_an_argument(rng):
    for key in range(ROWS):
        yield partial(lambda read: read(), lambda: module_read(key))  # noqa: B023


@late
def one_in_an_object(rng):
    class Again:
        def __init__(self, function):
            self.function = function

        def __call__(self):
            return self.function()

    for key in range(ROWS):
        yield Again(lambda: module_read(key))  # noqa: B023


@late
def a_variable_of_a_function_around_it(rng):
    key = 0

    def keys():
        nonlocal key
        for key in range(ROWS):
            yield lambda: module_read(key)  # noqa: B023

    return keys()


@pytest.mark.parametrize("sampler", LATE.values(), ids=LATE)
def test_a_function_that_would_see_the_samplers_variables_later_is_refused(sampler):
    with pytest.raises(SamplerError, match=r"yield partial\(read, key\)") as caught:
        ids_of(sampler, rows=5 * ROWS)
    assert getattr(caught.value, "is_permanent", False), "and is not tried again"


@pytest.mark.parametrize(
    "read",
    [
        lambda rng: partial(module_read, rng),
        lambda rng: partial(module_read, key=rng),
        lambda rng: partial(rng.integers, 5),
        lambda rng: rng.random,
        lambda rng: partial(partial(module_read, rng), 3),
        lambda rng: lambda own=rng: module_read(int(own.integers(9))),
        lambda rng: lambda: module_read(int(rng.integers(9))),
        lambda rng: partial(module_read, rng.bit_generator),
        lambda rng: partial(lambda own: module_read(int(own[0].integers(9))), (rng,)),
        lambda rng: Drawing(rng),
        lambda rng: Drawing(rng).read,
    ],
)
def test_a_read_that_draws_from_rng_is_refused(read):
    def sampler(rng):
        yield read(rng)

    with pytest.raises(SamplerError, match="draws from rng"):
        ids_of(sampler)


class Drawing:
    def __init__(self, rng):
        self.rng = rng

    def __call__(self):
        return module_read(int(self.rng.integers(9)))

    def read(self):
        return self()


def test_what_keeps_its_values_is_taken():
    client = Store()

    class Reader:
        def __init__(self, key):
            self.key = key

        def __call__(self):
            return module_read(self.key)

    def made(key):
        return lambda: module_read(key)

    opened = None

    def opening(key):
        nonlocal opened
        opened = opened or Store()
        return opened.read(key)

    class Sampler:
        def __call__(self, rng):
            self.rng = rng
            for key in range(7, ROWS):
                rng.random()
                yield partial(self.read, key)

        def read(self, key):
            return module_read(key)

    def sampler(rng):
        (child,) = rng.spawn(1)
        yield partial(module_read, 0)
        yield lambda key=1: client.read(key)
        yield Reader(2)
        yield made(3)
        yield Reader(4).__call__
        yield partial(lambda key, own: module_read(key + 0 * int(own.integers(9))), 5, own=child)
        yield partial(opening, 6)
        yield from Sampler()(rng)

    assert ids_of(sampler) == list(range(ROWS))


@pytest.mark.parametrize("result", [None, 7, [row(1)], lambda: row(1), partial(row, 1)])
def test_a_read_that_returns_no_sample_is_an_error(result):
    with pytest.raises(SamplerError, match="must return a mapping"):
        ids_of(lambda rng: [partial(lambda found: found, result)])


class Numbers:
    """An array's numbers, of a class that tells its bytes in a way of its own."""

    def __init__(self, nbytes: Any) -> None:
        self._nbytes = nbytes

    @property
    def nbytes(self) -> Any:
        if isinstance(self._nbytes, Exception):
            raise self._nbytes
        return self._nbytes

    def __array__(self, *_: object, **__: object) -> Any:
        return row(3)["x"]


@pytest.mark.parametrize(
    "nbytes", [float("nan"), float("inf"), lambda: 80, "80", None, -1, RuntimeError("a closed file's")]
)
def test_a_sample_that_cannot_tell_its_bytes_is_a_sample_too(nbytes):
    assert ids_of(lambda rng: [partial(dict, id=key, x=Numbers(nbytes)) for key in range(ROWS)]) == [
        *range(ROWS)
    ]
    assert held_bytes() == 0


def test_a_sample_that_holds_itself_is_an_error():
    assert np.ma, "once it is imported, values are searched for masks"
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SchemaError, match="x"):
        ids_of(lambda rng: [partial(dict, id=0, x=endless)])


def test_a_mapping_that_can_be_called_is_a_sample():
    class Both(dict):
        def __call__(self):
            raise AssertionError("it is a sample")

    assert ids_of(lambda rng: [Both(row(key)) for key in range(ROWS)]) == list(range(ROWS))


def with_status(kind: type[Exception], **attributes: Any) -> Exception:
    error = kind("failed")
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError("reset"), True),
        (TimeoutError("slow"), True),
        (EOFError("cut off"), True),
        (with_status(Exception, status_code=503), True),
        (with_status(Exception, status=429), True),
        (with_status(OSError, code=404), False),
        (with_status(Exception, response={"ResponseMetadata": {"HTTPStatusCode": 500}}), True),
        (with_status(Exception, response={"ResponseMetadata": {"HTTPStatusCode": 403}}), False),
        (with_status(OSError, response=with_status(Exception, status_code=404)), False),
        (FileNotFoundError("gone"), False),
        (PermissionError("no"), False),
        (KeyError("x"), False),
        (ValueError("does not decode"), False),
        (MemoryError(), False),
        (SchemaError("x"), False),
    ],
)
def test_a_read_is_tried_again_if_its_error_may_pass(error, passes):
    assert may_pass(error) is passes
    calls, delays = [], []

    def read():
        calls.append(0)
        if len(calls) < 3:
            raise error
        return row(1)

    threads = Threads(1, Retries(2, sleep=delays.append))
    if passes:
        assert ids_of(lambda rng: [read], rows=1, threads=threads) == [1]
        assert len(delays) == 2
    else:
        with pytest.raises(type(error)):
            ids_of(lambda rng: [read], rows=1, threads=threads)
        assert calls == [0]


def counted(read, *, is_read: bool):
    def sampler(rng):
        while True:
            key = int(rng.integers(1 << 30))
            yield partial(read, key) if is_read else read(key)

    return sampler


def two_of(key: int) -> ac.Rows:
    return ac.Rows(id=[key, key + 1], x=np.full((2, 256), key, np.float32))


@pytest.mark.parametrize("read", [row, two_of])
def test_map_and_mix_of_reads_are_those_of_samples(read):
    def changed(sample, rng):
        return sample | {"id": int(sample["id"]) + int(rng.integers(1 << 20))}

    def ids(is_read: bool) -> list[int]:
        own = counted(read, is_read=is_read)
        both = Mix([(Map(own, changed, schema=SCHEMA), 1), (counted(row, is_read=is_read), 2)])
        return ids_of(both, 8)

    if read is row:  # for what a read returns many at a time a map has one generator
        assert ids(True) == ids(False)
    assert ids(True) == ids(True)
    assert ids_of(Map(counted(read, is_read=True), lambda sample: sample), 8) == ids_of(
        counted(read, is_read=False)
    )


@pytest.mark.parametrize("around", [lambda own: Map(own, dict, schema=SCHEMA), lambda own: Mix([(own, 1)])])
def test_a_function_that_binds_late_is_refused_within_a_source_too(around):
    with pytest.raises(SamplerError, match="the sampler has gone on by then"):
        ids_of(around(a_lambda))


@pytest.fixture
def now_late(monkeypatch):
    """Called, it has what is at work be late. Before, nothing is, however busy the machine."""
    limit(monkeypatch, late_read_seconds=1e9)
    return lambda: limit(monkeypatch, late_read_seconds=0.0)


class Late:
    """A sampler whose reads are begun again where they are late; the calls of each key are counted."""

    schema, hedge = SCHEMA, True

    def __init__(self, one: Callable[[int, int], Any]) -> None:
        self.one, self.calls, self.lock = one, Counter[int](), threading.Lock()

    def read(self, key: int) -> dict[str, Any]:
        with self.lock:
            self.calls[key] += 1
            call = self.calls[key]
        self.one(key, call)
        return row(key)

    def __call__(self, rng):
        for key in range(1 << 30):
            yield partial(self.read, key)


@pytest.mark.parametrize("around", [lambda own: own, lambda own: Map(own, dict), lambda own: Mix([(own, 1)])])
def test_a_late_read_is_begun_again_and_the_first_success_is_taken(around, now_late):
    gate, threads = threading.Event(), Threads(4, Retries(0))

    def wait(key: int, call: int) -> None:
        if (key, call) == (20, 1):
            now_late()
            gate.wait(60)

    sampler = Late(wait)
    assert ids_of(around(sampler), rows=ROWS, threads=threads) == list(range(ROWS))
    assert sampler.calls[20] == 2
    assert threads.are_reading, "the first one is at work, in one of the four threads"
    assert ids_of(around(sampler), rows=10, threads=threads) == list(range(10))
    gate.set()
    wait_until(lambda: not threads.are_reading, "the first one")
    assert held_bytes() == 0


@pytest.mark.parametrize("around", [lambda own: own, lambda own: Mix([(own, 1)])])
def test_a_function_of_what_was_read_is_called_once_for_each_sample(around, now_late):
    function_runs, reads_again, lock = threading.Event(), threading.Event(), threading.Lock()
    calls: Counter[int] = Counter()

    def wait(key: int, call: int) -> None:
        if (key, call) == (20, 1):
            now_late()
            assert function_runs.wait(60), "the other run has read, and calls the function"
        elif (key, call) == (20, 2):
            reads_again.set()

    def changed(sample: dict[str, Any]) -> dict[str, Any]:
        key = int(sample["id"])
        with lock:
            calls[key] += 1
        if key == 20:
            assert reads_again.is_set()
            function_runs.set()
            wait_until(lambda: threads.at_work == 1, "the first run, which ends without the function")
        return sample

    sampler, threads = Late(wait), Threads(4, Retries(0))
    mapped = Map(around(sampler), changed, schema=SCHEMA)
    assert ids_of(mapped, rows=ROWS, threads=threads) == list(range(ROWS))
    assert sampler.calls[20] == 2
    assert set(calls.values()) == {1}
    wait_until(lambda: held_bytes() == 0, "the losers")


@pytest.mark.parametrize("reads", [1, 8, 64])
def test_rows_are_the_same_whatever_is_begun_again_at_most_a_tenth(reads, now_late):
    chance, again, ended = random.Random(0), threading.Event(), Counter[int]()

    def wait(key: int, call: int) -> None:
        if key == 100 and call == 1:
            wait_until(lambda: len(ended) == 100, "the reads before it")
            now_late()
            assert reads == 1 or again.wait(60), "it is begun again"
        elif key == 100:
            again.set()
        else:
            time.sleep(chance.choice([0.0] * 9 + [0.02]))
        if key < 100:
            ended[key] += 1

    sampler = Late(wait)
    for _ in range(3):
        assert ids_of(sampler, reads, rows=200) == list(range(200))
    begun_again = sampler.calls.total() - 600
    assert (begun_again > 0) == (reads > 1)
    assert begun_again <= sampler.calls.total() / 10
    wait_until(lambda: held_bytes() == 0, "the losers")


def test_without_the_attribute_no_read_is_begun_again(monkeypatch):
    limit(monkeypatch, late_read_seconds=0.0)
    gate, looks = threading.Event(), []
    sampler = Late(lambda key, call: key == 20 and gate.wait(60))
    sampler.hedge = False

    def look() -> None:
        looks.append(sampler.calls.total())
        if looks[-5:] == [ROWS] * 5:
            gate.set()

    into = builder()
    fill(sampler, task(), into, look)
    assert set(sampler.calls.values()) == {1}


@pytest.mark.parametrize("retries", [None, 0, 1], ids=["one fails", "both fail", "tried again"])
def test_an_error_counts_only_if_both_fail(now_late, retries):
    begun, failed = threading.Event(), threading.Event()

    def first_fails(key: int, call: int) -> None:
        if key == 20 and call == 1:
            now_late()
            begun.wait(60)
            failed.set()
            raise ZeroDivisionError("the first")
        if key == 20:
            begun.set()
            failed.wait(60)

    both = threading.Barrier(2)

    def both_fail(key: int, call: int) -> None:
        if key == 20 and call <= 2:
            now_late()
            both.wait(60)
            raise OSError(f"call {call}")

    sampler = Late(first_fails if retries is None else both_fail)
    if retries == 0:
        with pytest.raises(OSError, match=r"call [12]"):
            ids_of(sampler)
    else:
        threads = Threads(4, Retries(retries or 0, 0.0))
        assert ids_of(sampler, threads=threads) == list(range(ROWS))
        assert sampler.calls[20] in ((2,) if retries is None else (3, 4)), "each is tried again"
    wait_until(lambda: held_bytes() == 0, "the losers")


def test_what_is_begun_again_for_a_task_that_ends_ends_alone(now_late):
    gate, threads = threading.Event(), Threads(4, Retries(0))

    def wait(key: int, call: int) -> None:
        if key == 20:
            now_late()
            gate.wait(60)

    sampler = Late(wait)

    def look() -> None:
        if sampler.calls[20] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill(sampler, task(), builder(), look, threads)
    gate.set()
    wait_until(lambda: not threads.are_reading, "the reads")
    assert sampler.calls[20] == 2
    assert held_bytes() == 0
