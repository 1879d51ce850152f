from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from drawing import fill
from helpers import DEADLINE_SECONDS, KIB, ROW, in_child, make_cache, published_ids
from helpers import sample as row
from pool_tasks import expected

import arrowcache as ac
from arrowcache.arrow.builder import SegmentBuilder
from arrowcache.arrow.segment import Form
from arrowcache.errors import SamplerError
from arrowcache.pickling import pickled
from arrowcache.sampling.samples import single
from arrowcache.sampling.task import Size, Task, run, size_of
from arrowcache.storage.locks import LockFile

TURNED = ac.Schema({name: ROW[name] for name in reversed([*ROW])})


def task(
    number: int = 0, seed: int = 0, sampler: bytes = b"", cache: str = "", *, ramp: bool = False
) -> Task:
    return Task(cache, sampler, f"default.{seed}", seed, number, token=0, ramp=ramp)


def builder() -> SegmentBuilder:
    return SegmentBuilder(Form(ROW, 16, 32 * 1024))


def sampler_of(per_call: int | None, calls: list[str] | None = None):
    """Draws ids, `per_call` a call; notes when it is called and closed."""

    def sampler(rng):
        if calls is not None:
            calls.append("called")
        try:
            count = 0
            while per_call is None or count < per_call:
                yield row(int(rng.integers(1 << 20)))
                count += 1
        finally:
            if calls is not None:
                calls.append("closed")

    return sampler


def ids_in(into: SegmentBuilder) -> list[int]:
    ids: list[int] = pa.ipc.open_file(b"".join(into.encode().pieces)).read_all()["id"].to_pylist()
    return ids


def drawn(sampler, number: int = 0, seed: int = 0) -> list[int]:
    into = builder()
    fill(sampler, task(number, seed), into)
    assert into.is_full
    return ids_in(into)


class Slow(bytes):
    """The digest of a sampler, which a thread waits at while it looks for the sampler."""

    looked, goes_on = threading.Event(), threading.Event()

    def __hash__(self) -> int:
        self.looked.set()
        assert self.goes_on.wait(DEADLINE_SECONDS)
        return super().__hash__()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_child_that_is_forked_while_a_thread_looks_for_its_sampler_looks_for_its_own():
    def in_thread() -> None:
        run(dataclasses.replace(task(), digest=Slow(b"slow")))

    def body() -> None:
        assert run(dataclasses.replace(task(), digest=b"other")).lacks_sampler

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(in_thread)
        try:
            assert Slow.looked.wait(DEADLINE_SECONDS)
            with in_child(body):
                pass
        finally:
            Slow.goes_on.set()
        looking.result()


# small segments at first


def test_each_early_task_fills_at_most_half_of_the_next_and_the_eleventh_a_full_segment():
    sizes = [size_of(number, 4096, 64 << 20) for number in range(12)]
    assert [size.rows for size in sizes] == [4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 4096]
    assert [size.nbytes for size in sizes] == [(64 << 20) >> max(0, 10 - number) for number in range(12)]
    assert size_of(2**60, 4096, 64 << 20) == Size(4096, 64 << 20)


def test_a_segment_of_few_rows_or_bytes_has_at_least_one():
    assert [size_of(number, 5, 3).rows for number in range(12)] == [1] * 9 + [2, 5, 5]
    assert [size_of(number, 5, 3).nbytes for number in range(12)] == [1] * 10 + [3, 3]


def test_a_sampler_that_asks_for_full_segments_gets_them_from_the_start():
    assert size_of(0, 4096, 64 << 20, ramp=False) == Size(4096, 64 << 20)


@pytest.mark.parametrize("chunk_rows", [3, 64, 100, 4096, 10**9])
def test_small_segments_have_a_multiple_of_the_rows_that_are_read_at_once(chunk_rows):
    sizes = [size_of(number, 4096, 64 << 20, chunk_rows=chunk_rows) for number in range(10)]
    for number, (rows, nbytes) in enumerate(sizes):
        assert (4096 >> 10 - number) <= rows <= 4096
        assert rows % chunk_rows == 0 or rows == 4096
        assert rows < (4096 >> 10 - number) + chunk_rows
        assert nbytes >= rows * (64 << 20) // 4096, "rows of one size end it"
    assert size_of(10, 4096, 64 << 20, chunk_rows=chunk_rows) == Size(4096, 64 << 20)


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_a_small_segment_has_the_first_samples_of_its_task(chunk):
    def sampler(rng):
        while True:
            yield rows_of([int(rng.integers(1 << 20)) for _ in range(chunk)])

    into = builder()
    for number in [10, 0, 7, 8, 9, 11]:  # one builder for all, as a worker has it
        fill(sampler, task(number, ramp=True), into)
        assert ids_in(into) == expected(number, 0)


@pytest.mark.slow
def test_a_small_segment_of_texts_ends_by_its_bytes_but_not_before_its_first_row():
    schema = ac.Schema({"text": ac.String()})
    into = SegmentBuilder(Form(schema, 1 << 14, 1 << 20))

    def rows(number: int, text: str) -> int:
        fill(lambda rng: itertools.repeat({"text": text}), task(number, ramp=True), into)
        return into.rows

    row_bytes = 100 + 4  # with its offset
    assert [rows(number, "x" * 100) for number in (0, 3, 8)] == [
        (1 << 20 >> halvings) // row_bytes for halvings in (10, 7, 2)
    ]
    assert 10_000 < rows(10, "x" * 100) < (1 << 20) // row_bytes, "what the file needs beside its rows"
    assert rows(0, "x" * 100_000) == 1
    assert rows(0, "") == 16, "by its rows: 1 << 14 >> 10"


@pytest.mark.parametrize("per_call", [None, 1, 5, 16, 100])
def test_samples_are_a_function_of_seed_and_number_however_often_the_sampler_is_called(per_call):
    for seed, number in [(0, 0), (0, 1), (7, 0), (7, 2**40)]:
        assert drawn(sampler_of(per_call), number, seed) == expected(number, seed, 16)


def test_the_sampler_is_closed_once_the_segment_is_full():
    calls: list[str] = []
    drawn(sampler_of(None, calls))
    assert calls == ["called", "closed"]
    calls.clear()
    drawn(sampler_of(10, calls))
    assert calls == ["called", "closed"] * 2


def test_a_sampler_may_return_a_list_or_any_iterable():
    assert drawn(lambda rng: [row(5)] * 3) == [5] * 16
    assert drawn(lambda rng: map(row, range(3))) == ([0, 1, 2] * 6)[:16]


def rows_of(ids) -> ac.Rows:
    """Many samples at once."""
    singles = [row(number) for number in ids]
    return ac.Rows(id=[one["id"] for one in singles], image=np.stack([one["image"] for one in singles]))


@pytest.mark.parametrize("chunk", [1, 3, 5, 16, 40])
def test_rows_yielded_at_once_are_the_rows_yielded_one_by_one(chunk):
    def sampler(rng):
        while True:
            yield rows_of([int(rng.integers(1 << 20)) for _ in range(chunk)])

    assert drawn(sampler, 3, 7) == expected(3, 7, 16)


def test_the_beginning_of_rows_that_no_longer_fit_fills_the_segment():
    schema = ac.Schema({"id": ac.Tensor("int64"), "text": ac.String()})
    into = SegmentBuilder(Form(schema, 64, 4096))
    many = ac.Rows(id=np.arange(10), text=["x" * 300] * 10)
    fill(lambda rng: iter([many] * 3), task(), into)
    assert ids_in(into) == (list(range(10)) * 2)[: into.rows]
    assert 1 <= into.rows < 14


def test_rows_and_single_samples_mix_and_no_rows_at_all_are_passed_over():
    nothing = ac.Rows(id=[], image=np.empty((0, 16, 16), np.float32))
    assert drawn(lambda rng: [nothing, row(1), rows_of([2, 3]), nothing]) == ([1, 2, 3] * 6)[:16]


def test_rows_split_into_samples_and_what_yields_them_is_closed():
    closed = []

    def sampler():
        try:
            yield rows_of([1, 2])
            yield row(3)
        finally:
            closed.append(True)

    samples = single(sampler(), np.random.default_rng(0))
    assert next(samples)["id"] == 1
    assert np.array_equal(next(samples)["image"], row(2)["image"])
    assert next(samples)["id"] == 3
    assert not closed
    samples.close()
    assert closed


def test_a_sampler_may_sometimes_yield_nothing():
    calls = []

    def sampler(rng):
        calls.append(1)
        if len(calls) % 3 == 0:
            yield row(len(calls))

    assert drawn(sampler) == [3 * i for i in range(1, 17)]


def test_a_sampler_that_yields_nothing_is_an_error():
    with pytest.raises(SamplerError, match="yielded nothing in 3 calls"):
        fill(lambda rng: [], task(), builder())
    nothing = ac.Rows(id=[], image=np.empty((0, 16, 16), np.float32))
    with pytest.raises(SamplerError, match="yielded nothing in 3 calls"):
        fill(lambda rng: [nothing], task(), builder())
    with pytest.raises(SamplerError, match="Rows without a row 10000 times in a row"):
        fill(lambda rng: itertools.repeat(nothing), task(), builder())


def test_drawing_ends_when_the_pool_has():
    left = iter(range(5))
    calls: list[str] = []
    with pytest.raises(StopIteration):
        fill(sampler_of(None, calls), task(), builder(), lambda: next(left) and None)
    assert calls == ["called", "closed"]


def lock_of_pool(cache) -> LockFile:
    """A lock like the one by which a pool shows its tasks that it lives."""
    cache.store.folder.take_tasks("default.0", 1)
    lock = LockFile(cache.path / "pools" / "default.0")
    assert lock.try_range(0, 1, exclusive=True)
    return lock


def done_by(sampler, cache: ac.Cache, number: int = 0):
    """How a task of a cache ends."""
    return run(task(number, sampler=pickled(sampler, "a sampler"), cache=str(cache.path)))


@pytest.fixture
def pool_of(tmp_path):
    """A cache, and the lock of its pool."""
    cache = make_cache(tmp_path / "cache")
    lock = lock_of_pool(cache)
    yield cache, lock
    lock.close()


def test_a_task_publishes_its_segment_once_however_often_it_runs(pool_of):
    cache, _ = pool_of
    first, again = (done_by(sampler_of(None), cache, 3) for _ in range(2))
    assert published_ids(cache) == expected(3, 0, 16)
    # A worker may die between publishing and saying so: the second run counts as done, too.
    assert first.rows == again.rows == 16
    assert first.nbytes == again.nbytes > 0
    assert not first.error
    assert not again.error


def test_a_task_of_a_pool_that_ended_publishes_nothing(pool_of):
    cache, lock = pool_of
    lock.close()
    done = done_by(sampler_of(None), cache, 3)
    assert done.stopped
    assert done.rows == 0
    assert published_ids(cache) == []


def test_a_task_that_cannot_ask_for_its_pool_says_why(pool_of, monkeypatch):
    cache, _ = pool_of

    def refuse(path, *arguments, **options):
        if os.fspath(path).endswith("pools/default.0"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return opened(path, *arguments, **options)

    opened = os.open
    monkeypatch.setattr(os, "open", refuse)
    done = done_by(sampler_of(None), cache)
    assert not done.stopped
    assert "Too many open files: this process may have" in done.error
    assert published_ids(cache) == []


def test_a_task_whose_pool_left_no_file_publishes_nothing(pool_of):
    cache, _ = pool_of
    (cache.path / "pools" / "default.0").unlink()
    assert done_by(sampler_of(None), cache).stopped
    assert published_ids(cache) == []


@pytest.mark.parametrize(
    "options",
    [{}, {"segment_rows": 8}, {"segment_rows": 100, "segment_bytes": 128 * KIB}, {"schema": TURNED}],
    ids=["alike", "of fewer rows", "of larger segments", "of another schema"],
)
def test_a_cache_that_took_the_place_of_another_gets_segments_of_its_own(pool_of, options):
    cache, lock = pool_of
    sampler = sampler_of(None)
    assert done_by(sampler, cache, 3).rows == 16
    lock.close()
    shutil.rmtree(cache.path)
    cache = make_cache(cache.path, **options)
    with closing(lock_of_pool(cache)):
        done = done_by(sampler, cache, 4)
    assert published_ids(cache) == expected(4, 0, options.get("segment_rows", 16))
    assert not done.error
    assert cache.verify() == []


def test_a_failed_task_leaves_nothing_to_the_next_one(pool_of):
    cache, _ = pool_of
    fails = [True]

    def sampler(rng):
        yield row(int(rng.integers(1 << 20)))
        if fails and fails.pop():
            raise OSError("connection reset")
        while True:
            yield row(int(rng.integers(1 << 20)))

    packed = pickled(sampler, "a sampler")
    assert "connection reset" in run(task(sampler=packed, cache=str(cache.path))).error
    assert run(task(sampler=packed, cache=str(cache.path))).rows == 16
    assert published_ids(cache) == expected(0, 0, 16)


def test_tasks_in_threads_of_one_process_do_not_mix_their_samples(pool_of):
    cache, _ = pool_of

    def sampler(rng):
        import time

        while True:
            time.sleep(0)  # let the other threads in
            yield row(int(rng.integers(1 << 20)))

    packed = pickled(sampler, "a sampler")
    tasks = [task(number, sampler=packed, cache=str(cache.path)) for number in range(30)]
    with ThreadPoolExecutor(4) as executor:
        assert all(done.rows == 16 for done in executor.map(run, tasks))
    assert sorted(published_ids(cache)) == sorted(i for n in range(30) for i in expected(n, 0, 16))


class Reads:
    """A sampler of reads. `at` is where it sets an attribute: at each call, at each sample, or once."""

    def __init__(self, at: str) -> None:
        self.at, self.file, self.size, self.numbers = at, None, np.zeros(3), [0]

    def __call__(self, rng):
        if self.at == "call":
            self.rng = rng
        if self.file is None:
            self.file = object()
        self.numbers[0] += 1
        while True:
            yield partial(row, int(rng.integers(1 << 20)))
            if self.at == "sample":
                self.size = self.size + 1
                self.drawn = str(self.size)
            if self.at == "name":
                self.drawn = f"a name {rng.integers(9)}"


class Holding:
    def __init__(self, *samplers: Any) -> None:
        self.samplers = samplers

    def __call__(self, rng):
        return self.samplers[-1](rng)


@pytest.mark.parametrize("held", ["", "held", "bound"])
@pytest.mark.parametrize(("at", "begins"), [("", True), ("name", True), ("call", False), ("sample", False)])
def test_the_next_task_begins_ahead_unless_this_one_has_set_attributes_of_its_sampler(
    pool_of, held, at, begins
):
    """One that is set once, as a connection is, only keeps the first task from it."""
    cache, _ = pool_of
    reads = Reads(at)
    one: Any = {"": reads, "held": Holding(reads), "bound": partial(Holding(reads).__call__)}[held]
    sampler, asked = pickled(one, "the sampler"), []

    def ask() -> None:
        asked[-1] = True

    for number in range(4):
        asked.append(False)
        of_pool = dataclasses.replace(task(number, sampler=sampler, cache=str(cache.path)), reads=4)
        assert run(of_pool, ask).rows == 16
    assert asked == [False, *[begins] * 3]
