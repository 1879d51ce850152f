"""Samples that cannot be had: a pool that skips leaves them out, and counts them; too many end it."""

from __future__ import annotations

import io
import itertools
import struct
import urllib.error
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers import DEADLINE_SECONDS, full, make_cache, read_ids, segment_files, wait_until
from helpers import sample as row
from pool_tasks import expected, tasks
from quick import first_is_quick

import arrowcache as ac
from arrowcache.explore import observe
from arrowcache.sampling.retries import is_fault, may_pass
from arrowcache.sampling.sources import Items, Map, Mix


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "cache")


@pytest.fixture
def threads():
    with ThreadPoolExecutor(2) as executor:
        yield executor


def refused(code: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("https://store/key", code, "refused", Message(), None)


def cut_image() -> None:
    """Raise what Pillow does at a file that was cut short."""
    from PIL import Image

    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(whole, "JPEG")
    Image.open(io.BytesIO(whole.getvalue()[:-999])).load()


def throw(error: Exception) -> None:
    raise error


def is_bad(key: int) -> bool:
    return key % 37 == 0


def having(fault: Any, *, is_read: bool = True):
    """A sampler like `draws()`, some of whose samples cannot be had."""

    def read(key: int) -> Any:
        return fault() if is_bad(key) else row(key)

    def sampler(rng):
        while True:
            key = int(rng.integers(1 << 20))
            yield partial(read, key) if is_read else read(key)

    return sampler


def skipping(cache: ac.Cache, sampler: Any, **options: Any) -> ac.SamplerPool:
    given = {"workers": 2, "progress": False, "on_error": "skip", "retries": 0}
    return ac.SamplerPool(cache, sampler, **given | options)


FAULTS = {
    "not found": lambda: throw(FileNotFoundError("gone")),
    "not found by HTTP": lambda: throw(refused(404)),
    "a wrong text": lambda: b"\xff".decode(),
    "no zlib stream": lambda: zlib.decompress(b"no"),
    "too few bytes": lambda: struct.unpack("<q", b"no"),
    "an image that was cut short": cut_image,
    "no image": lambda: __import__("PIL.Image").Image.open(io.BytesIO(b"no")),
    "a key that is not there": lambda: {}["label"],
    "None": lambda: None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sample_that_cannot_be_had_is_left_out_and_counted(cache, threads, fault):
    if "image" in fault:
        pytest.importorskip("PIL", reason="Pillow is not installed")
    with skipping(cache, having(FAULTS[fault]), executor=threads, segments=14) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        stats = pool.stats()
    found, drawn = tasks(cache), {number: expected(number, rows=100) for number in range(14)}
    assert {n: [*itertools.filterfalse(is_bad, drawn[n])][: len(found[n])] for n in drawn} == found
    left_out = {n: [*map(is_bad, drawn[n])][: drawn[n].index(found[n][-1])].count(True) for n in drawn}
    assert 0 < sum(left_out.values()) == stats.skipped
    assert f"left out           {stats.skipped} samples" in str(stats)
    said = {}
    for path in segment_files(cache):
        with pa.memory_map(str(path)) as file:
            metadata = pa.ipc.open_file(file).metadata or {}
        said[int(path.stem.rpartition(".")[2])] = int(metadata.get(b"arrowcache.skipped", 0))
    assert said == left_out
    assert cache.verify() == []


@pytest.mark.parametrize("kind", first_is_quick(["threads", "its own"]))
def test_which_rows_a_task_has_does_not_depend_on_reads(tmp_path, threads, kind):
    found = []
    for reads in (1, 5):
        cache = make_cache(tmp_path / f"cache{reads}")
        options = {"executor": threads if kind == "threads" else None, "segments": 14, "reads": reads}
        with skipping(cache, having(FAULTS["not found"]), **options) as pool:
            pool.wait(timeout=DEADLINE_SECONDS)
            found.append((tasks(cache), pool.stats().skipped))
    assert found[0] == found[1]
    assert found[0][1] > 0


def test_none_in_place_of_a_sample_is_left_out_too(cache, threads):
    with skipping(cache, having(lambda: None, is_read=False), executor=threads, segments=14) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        assert pool.stats().skipped > 0
    assert not any(map(is_bad, itertools.chain.from_iterable(tasks(cache).values())))


def test_a_sample_larger_than_a_segment_is_left_out(tmp_path, threads):
    schema = ac.Schema({"text": ac.String()})
    cache = ac.Cache.create(tmp_path / "cache", schema, capacity="1MiB", segment_bytes="64KiB")

    def sampler(rng):
        yield {"text": "x" * 50_000}
        yield {"text": "x" * (1 << 18)}
        yield {"text": "x" * 10_000}

    with skipping(cache, full(sampler), executor=threads, segments=2) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        assert (pool.stats().rows, pool.stats().skipped) == (4, 2)


@pytest.mark.parametrize("kind", ["read", "sample", "map"])
def test_without_skip_the_first_one_fails_its_task(cache, threads, kind):
    sampler = having(FAULTS["None"], is_read=kind == "read")
    if kind == "map":
        samples = having(lambda: row(-1), is_read=False)
        sampler = Map(samples, lambda sample: throw(KeyError("label")), schema=cache.schema)
    options = {"executor": threads, "segments": 14, "on_error": "raise"}
    with skipping(cache, sampler, **options) as pool, pytest.raises(ac.SamplerError, match=r"None|label"):
        pool.wait(timeout=DEADLINE_SECONDS)


NEVER = {
    "a refusal": lambda: throw(PermissionError("no")),
    "a refusal by HTTP": lambda: throw(refused(403)),
    "a refusal of S3": lambda: throw(OSError("AWS Error ACCESS_DENIED during GetObject")),
    "a sample that does not fit": lambda: {"id": "seven"},
    "no memory": lambda: throw(MemoryError()),
    "a module that is nowhere": lambda: throw(ImportError("nowhere")),
    "no mapping": lambda: 7,
    "another callable": lambda: dict,
}


@pytest.mark.parametrize("error", NEVER)
def test_what_is_not_of_one_sample_fails_its_task(cache, threads, error):
    with skipping(cache, full(having(NEVER[error])), executor=threads, segments=30) as pool:
        with pytest.raises(ac.SamplerError):
            pool.wait(timeout=DEADLINE_SECONDS)
        assert (pool.stats().skipped, pool.stats().failures > 0) == (0, True)


def test_what_may_pass_fails_the_task_and_is_tried_again(cache, threads):
    failed = []

    def passing() -> Any:
        failed.append(0)
        return row(37) if len(failed) > 7 else throw(ConnectionResetError("reset"))

    sampler = full(having(passing))
    with skipping(cache, sampler, executor=threads, workers=1, segments=8, retries=9) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        assert (pool.stats().skipped, pool.stats().segments, pool.stats().failures) == (0, 8, 0)
        assert pool.stats().retries > 0


def test_a_generator_that_raises_fails_its_task(cache, threads):
    sampler = having(FAULTS["not found"], is_read=False)
    with skipping(cache, sampler, executor=threads, segments=30) as pool:
        with pytest.raises(ac.SamplerError, match="gone"):
            pool.wait(timeout=DEADLINE_SECONDS)
        assert pool.stats().skipped == 0


@pytest.mark.parametrize("segments", [1, 100])
def test_a_pool_of_which_more_than_one_in_a_hundred_are_left_out_ends(tmp_path, threads, segments):
    rows = 5000 if segments == 1 else 16
    cache = make_cache(
        tmp_path / "cache", ac.Schema({"id": ac.Tensor("int64")}), segment_rows=rows, segment_bytes="1MiB"
    )

    def read(key: int) -> Any:
        return {"id": key} if key % 50 else throw(FileNotFoundError(f"no {key}"))

    def sampler(rng):
        while True:
            yield partial(read, int(rng.integers(1 << 20)))

    with skipping(cache, full(sampler), executor=threads, segments=segments) as pool:
        with pytest.raises(ac.SamplerError, match=r"\d\d of 1\d\d\d samples cannot .*last: .*no \d+"):
            pool.wait(timeout=DEADLINE_SECONDS)
        assert pool.stats().rows < 1200, "it was not long until then"


def test_a_pool_of_fewer_samples_ends_only_if_the_first_hundred_are_left_out(cache, threads):
    def read(key: int) -> Any:
        return row(key) if key >= 99 else throw(FileNotFoundError(f"no {key}"))

    def late(rng):
        yield from (partial(read, key) for key in range(1 << 30))

    with skipping(cache, full(late), executor=threads, workers=1, segments=3) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        assert (pool.stats().rows, pool.stats().skipped) == (48, 3 * 99)
    nothing = Map(late, lambda _: None, schema=cache.schema)
    says = r"100 of 100 samples cannot be had.*last"
    with skipping(cache, nothing, executor=threads) as pool, pytest.raises(ac.SamplerError, match=says):
        pool.wait(rows=1, timeout=DEADLINE_SECONDS)


def test_a_sampler_of_one_sample_a_call_may_leave_out_several_in_a_row(cache, threads):
    def sampler(rng):
        yield partial(lambda key: row(key) if key % 8 == 0 else None, int(rng.integers(1 << 20)))

    with skipping(cache, sampler, executor=threads, segments=8, reads=1) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        assert pool.stats().segments == 8


class Numbers:
    """A dataset, some of whose items cannot be had."""

    def __init__(self, bad: set[int], fault: Any) -> None:
        self.bad, self.fault = bad, fault

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return self.fault() if index in self.bad else row(index)


@pytest.mark.parametrize("fault", first_is_quick(["not found", "None"]))
@pytest.mark.parametrize("around", [lambda items: items, lambda items: Map(items, dict)])
def test_of_items_each_other_one_comes_once_and_the_next_pool_finds_nothing_to_do(
    cache, threads, fault, around
):
    bad = {0, 1, 50, 51, 99}
    items = around(Items(Numbers(bad, FAULTS[fault]), passes=2, segment_items=1))
    for rows, skipped in ((190, 10), (0, 0)):  # a task of which none is left is done
        with skipping(cache, items, executor=threads) as pool:
            pool.wait(timeout=DEADLINE_SECONDS)
            assert (pool.stats().rows, pool.stats().skipped) == (rows, skipped)
    found = Counter(itertools.chain.from_iterable(map(read_ids, segment_files(cache))))
    assert found == Counter({number: 2 for number in range(100) if number not in bad})


@pytest.mark.parametrize("fault", FAULTS)
def test_columns_are_those_of_the_first_sample_that_can_be_had(fault):
    if "image" in fault:
        pytest.importorskip("PIL", reason="Pillow is not installed")

    def odd(rng):
        for key in range(3):
            yield partial(FAULTS[fault] if key < 2 else partial(row, key))

    def cut(sample):
        return FAULTS[fault]() if sample["id"] < 2 else sample

    items = Items(Numbers({0, 1}, FAULTS[fault]))
    made = Map(lambda rng: map(row, range(3)), cut)
    assert items.schema == Map(odd, dict).schema == Mix([(odd, 1), (odd, 1)]).schema == made.schema
    for source in (
        lambda: Items(Numbers({*range(100)}, FAULTS[fault])),
        lambda: Map(lambda rng: itertools.repeat(FAULTS[fault]), dict),
    ):
        with pytest.raises(Exception) as caught:  # the fault itself
            source()
        assert is_fault(caught.value)


def test_a_map_goes_on_after_a_sample_that_its_function_cannot_change(cache, threads):
    def changed(sample):
        return sample if int(sample["id"]) % 37 else throw(ValueError("odd"))

    for is_read in (False, True):
        source = Map(having(lambda: row(0), is_read=is_read), changed, schema=cache.schema)
        with skipping(cache, source, executor=threads, segments=14, name=f"read{is_read}") as pool:
            pool.wait(timeout=DEADLINE_SECONDS)
            assert pool.stats().skipped > 0
    assert tasks(cache, "readTrue.0") == tasks(cache, "readFalse.0")


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_what_a_mix_leaves_out_are_generators_and_reads_are_the_pools(cache, threads, on_error):
    def odd(sample):
        return sample if int(sample["id"]) % 37 else None

    def source(is_read: bool) -> Map:
        return Map(having(lambda: row(0), is_read=is_read), odd, schema=cache.schema)

    some = Map(source(False), lambda sample: {**sample, "id": -1}, schema=cache.schema)
    mix = Mix([(source(True), 1), (some, 1)], on_error=on_error)
    with skipping(cache, full(mix), executor=threads, segments=10) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        assert pool.stats().skipped > 0
    assert sum(numbers.count(-1) for numbers in tasks(cache).values()) > 0


def test_a_pool_at_work_shows_it(cache, threads, tmp_path):
    gate = tmp_path / "gate"

    def sampler(rng):
        yield None
        yield row(1)
        wait_until(gate.exists, "the gate")
        while True:
            yield row(2)

    with skipping(cache, full(sampler), executor=threads, workers=1, segments=1) as pool:
        wait_until(lambda: [s.skipped for s in observe(cache).samplers if s.rows] == [1], "it to be seen")
        gate.touch()
        pool.wait(timeout=DEADLINE_SECONDS)


def test_an_unknown_policy_is_refused(cache):
    with pytest.raises(ValueError, match="on_error='ignore' is unknown: use 'raise' or 'skip'"):
        skipping(cache, having(dict), on_error="ignore")


@pytest.mark.parametrize("error", [EOFError("cut off"), zlib.error("incomplete")])
def test_a_stream_that_is_cut_off_may_pass_and_one_that_does_not_decode_may_not(error):
    assert may_pass(error) is isinstance(error, EOFError)
