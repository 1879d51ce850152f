"""Mix and Map: samples of several sources by weight, and through a function."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from drawing import digest, fill, require_pure, take
from helpers import wait_until

import arrowcache as ac
from arrowcache.arrow.builder import SegmentBuilder
from arrowcache.arrow.segment import Form
from arrowcache.errors import SamplerError, SchemaError
from arrowcache.sampling.mixture import streams_of
from arrowcache.sampling.reads import Threads, held_bytes
from arrowcache.sampling.retries import Retries
from arrowcache.sampling.samples import Samples
from arrowcache.sampling.sources import Map, Mix, ParquetRows
from arrowcache.sampling.task import Task


class Numbers:
    """A sampler that is no source: `kind`, and a random number; it may fail, and ends now and then."""

    def __init__(self, kind: int, fails_after: int | None = None, per_call: int = 5) -> None:
        self.kind, self.fails_after, self.per_call = kind, fails_after, per_call

    def __repr__(self) -> str:
        return f"Numbers({self.kind})"

    def __call__(self, rng):
        for count in range(self.per_call):
            if count == self.fails_after:
                raise OSError(f"store {self.kind} is gone")
            yield {"kind": self.kind, "x": rng.random()}


def test_what_is_made_of_a_source_that_asks_for_full_segments_asks_for_them_too():
    whole = Numbers(1)
    whole.ramp = False
    assert Mix({Numbers(0): 1, Numbers(2): 1}).ramp
    assert not Mix({Numbers(0): 1, whole: 1}).ramp
    assert Map(Numbers(0), dict).ramp
    assert not Map(whole, dict).ramp
    assert not Mix({Map(Mix({whole: 1}), dict): 1}).ramp
    chunks = Numbers(1)
    chunks.chunk_rows = 12
    assert (Map(chunks, dict).ramp, Map(chunks, dict).chunk_rows) == (True, 12)
    assert not Mix({Numbers(0): 1, chunks: 1}).ramp, "shares are no multiples"


def kinds(source, count: int = 2000) -> np.ndarray:
    return np.array([int(sample["kind"]) for sample in take(source, count)])


# -- Mix ---------------------------------------------------------------------------------------------


def test_each_source_is_drawn_as_often_as_its_weight_says():
    counts = np.bincount(kinds(Mix({Numbers(0): 1, Numbers(1): 2.5, Numbers(2): 0.5}), 8000), minlength=3)
    assert np.abs(counts - [2000, 5000, 1000]).max() < 6 * np.sqrt(2000)


def test_pairs_do_as_well_as_a_mapping_and_one_source_may_be_alone():
    assert set(kinds(Mix([(Numbers(3), 0.1)]), 20)) == {3}


@pytest.mark.slow
def test_rows_that_a_source_yields_at_once_are_mixed_one_by_one(tmp_path):
    for number in range(2):
        table = pa.table({"kind": [number] * 100, "x": np.arange(100.0)})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    parts = [ParquetRows(tmp_path / f"{number}.parquet") for number in range(2)]
    with Mix({parts[0]: 1, parts[1]: 1}) as mix:
        assert mix.schema == parts[0].schema
        found = kinds(mix, 400)
        assert 120 < found.sum() < 280
        assert 100 < np.count_nonzero(np.diff(found)) < 300  # no long runs of either
        assert sorted(s["x"] for s in take(parts[0], 100)) == list(range(100))
    require_pure(mix)


def test_schemas_that_differ_are_an_error_naming_source_and_field():
    def other(rng):
        yield {"kind": 1, "x": "text"}

    def narrow(rng):
        yield {"kind": 1}

    with pytest.raises(SchemaError, match=r"sources\[1\].*other.* has field 'x' as String"):
        Mix({Numbers(0): 1, other: 1})
    with pytest.raises(SchemaError, match=r"sources\[1\].*narrow.* has field 'x' as None"):
        Mix({Numbers(0): 1, narrow: 1})


def test_a_source_that_fails_ends_the_task_unless_it_is_to_be_skipped(caplog):
    sources = {Numbers(0): 1, Numbers(1, fails_after=3): 1, Numbers(2): 1}
    with pytest.raises(OSError, match="store 1 is gone"):
        kinds(Mix(sources))
    with caplog.at_level(logging.WARNING, "arrowcache"):
        found = kinds(Mix(sources, on_error="skip"), 600)
    assert np.bincount(found)[1] == 3
    assert min(np.bincount(found)[[0, 2]]) > 200
    (record,) = caplog.records
    assert "Numbers(1), failed and is left out of this task: store 1 is gone" in record.getMessage()


def test_a_skipped_source_is_tried_again_in_the_next_task():
    mix = Mix({Numbers(0): 1, Numbers(1, fails_after=3): 1}, on_error="skip")
    assert [np.bincount(kinds(mix, 100))[1] for _ in range(2)] == [3, 3]


def test_when_all_sources_have_failed_the_task_does():
    mix = Mix({Numbers(n, fails_after=2): 1 for n in range(3)}, on_error="skip")
    with pytest.raises(SamplerError, match="all 3 sources failed, the last with: store"):
        kinds(mix)


def test_what_the_consumer_raises_into_a_mix_is_no_source_that_failed():
    samples = Mix({Numbers(0): 1}, on_error="skip")(np.random.default_rng(0))
    next(samples)
    with pytest.raises(RuntimeError, match="of the consumer"):
        samples.throw(RuntimeError("of the consumer"))


def nothing(kind: int, number: int) -> None:
    """Before a read nothing happens."""


class Planned:
    """A source that plans reads of ten rows. Where a filter keeps fewer, it does not know how many."""

    schema = ac.Schema({"kind": ac.Tensor("int64"), "x": ac.Tensor("float64")})

    def __init__(self, kind: int, before: Callable[[int, int], object] = nothing, keeps: int = 10) -> None:
        self.kind, self.before, self.keeps = kind, before, keeps
        self.rows_read = 0

    def __repr__(self) -> str:
        return f"Planned({self.kind})"

    def __call__(self, rng):
        raise AssertionError("a pool asks for its plan")

    def plan_reads(self, rng, rows):
        for number in itertools.count():
            if self.keeps == 10 and number * 10 >= rows:
                return
            count = min(10, rows - number * 10) if self.keeps == 10 else 10
            yield partial(self.read, number, int(rng.integers(1 << 30)), count)

    def read(self, number: int, key: int, count: int) -> ac.Rows:
        self.before(self.kind, number)
        self.rows_read += count
        kept = np.arange(count)[np.random.default_rng(key).permutation(count) < self.keeps]
        return ac.Rows(kind=np.full(len(kept), self.kind), x=key + kept * 0.5)


def with_text(source) -> Map:
    schema = ac.Schema({**Planned.schema, "text": ac.String()})
    return Map(source, lambda sample: {**sample, "text": "x" * (int(sample["x"]) % 50)}, schema=schema)


def of_reads(kind: int, before: Callable[[int, int], object]):
    """A user's own generator, of reads."""
    source = Planned(kind, before)

    def sampler(rng):
        for number in range(30):
            yield partial(source.read, number, int(rng.integers(1 << 30)), int(rng.integers(4)))

    sampler.schema = source.schema
    return sampler


MIXES: dict[str, Callable[[Any], Any]] = {
    "planned": lambda before: Mix([(Planned(0, before), 3), (Planned(1, before), 1)]),
    "skips": lambda before: Mix([(Planned(0, before), 3), (Planned(1, before), 1)], on_error="skip"),
    "beside one's own": lambda before: Mix(
        [(Planned(0, before), 2), (Numbers(1), 1), (Planned(1, before), 1)]
    ),
    "beside reads": lambda before: Mix([(Planned(0, before), 3), (of_reads(1, before), 1)]),
    "a filter": lambda before: Mix([(Planned(0, before), 3), (Planned(1, before, keeps=2), 1)]),
    "text": lambda before: Mix([(with_text(Planned(n, before)), 3 - 2 * n) for n in range(2)]),
    "mapped": lambda before: with_text(Mix([(Planned(0, before), 3), (Planned(1, before), 1)])),
    "nested": lambda before: Mix(
        [
            (Mix([(Planned(0, before), 1)]), 3),
            (Map(Mix({Numbers(1): 1, Planned(1, before): 1}), dict, schema=Planned.schema), 1),
        ]
    ),
}


def segment(source, reads: int = 8, rows: int = 200, nbytes: int = 1 << 22, **of_task) -> dict[str, list]:
    """The rows of a task."""
    builder, threads = SegmentBuilder(Form(source.schema, rows, nbytes)), Threads(reads, Retries(20, 0.0))
    task = Task("", b"", "default.0", 0, token=0, ramp=False, reads=reads, **({"number": 3} | of_task))
    fill(source, task, builder, threads=threads)
    wait_until(lambda: not threads.are_reading, "the reads that it does not need")
    assert held_bytes() == 0
    return pa.ipc.open_file(b"".join(builder.encode().pieces)).read_all().to_pydict()


@pytest.mark.parametrize("kind", MIXES)
def test_a_mix_has_the_same_rows_whatever_reads_is_and_however_they_go(kind):
    chance = random.Random(0)

    def before(kind: int, number: int) -> None:
        time.sleep(chance.choice([0, 0, 0.002]))
        if chance.random() < 0.2:
            raise ConnectionResetError("reset")

    expected = segment(MIXES[kind](nothing), 1)
    assert set(expected["kind"]) == {0, 1}
    for reads in (1, 8, 64):
        assert segment(MIXES[kind](before), reads) == expected


@pytest.mark.parametrize("kind", MIXES)
def test_a_mix_has_reads_of_all_its_sources_at_work_at_a_time(kind):
    gate, lock, kinds = threading.Event(), threading.Lock(), []

    def before(kind: int, number: int) -> None:
        with lock:
            kinds.append(kind)
            if len(kinds) == 8:
                gate.set()
        assert gate.wait(10), "eight are at work"

    source = MIXES[kind](before)
    assert len(segment(source)["x"]) == 200
    assert set(kinds[:8]) == {0, 1}


def test_a_mix_reads_none_that_has_no_room():
    one, two = Planned(0), Planned(1)
    found = segment(Mix([(one, 3), (two, 1)]), 64)["kind"]
    assert [one.rows_read, two.rows_read] == np.bincount(found).tolist()


def share_of(source, tasks: int, **options) -> float:
    """The share of rows of the first source."""
    kinds = [kind for number in range(tasks) for kind in segment(source, number=number, **options)["kind"]]
    return 1 - float(np.mean(kinds))


@pytest.mark.parametrize("kind", MIXES)
def test_the_weights_of_a_mix_are_those_of_rows(kind):
    share = 0.5 if kind == "beside one's own" else 0.75
    assert abs(share_of(MIXES[kind](nothing), 1, rows=4000) - share) < 0.04


@pytest.mark.parametrize("nbytes", [2200, 4000])
def test_where_a_segment_is_full_before_its_rows_no_source_is_cut_off(nbytes):
    """Of some ten and fifty rows."""
    share = share_of(MIXES["text"](nothing), 40, rows=400, nbytes=nbytes)
    assert abs(share - 0.75) < 0.06


def test_what_is_left_out_is_replaced_from_all_sources():
    def before(kind: int, number: int) -> None:
        if kind == 1 and number % 2:
            raise FileNotFoundError("gone")

    share = share_of(MIXES["planned"](before), 20, rows=400, skips=True)
    assert abs(share - 0.75) < 0.04


@pytest.mark.parametrize("reads", [1, 8, 64])
def test_a_source_whose_read_fails_is_left_out_from_there_on(reads, caplog):
    def before(kind: int, number: int) -> None:
        if kind == 1 and number == 3:
            raise PermissionError("no")

    with caplog.at_level(logging.WARNING, "arrowcache"):
        found = segment(MIXES["skips"](before), reads)
    assert np.bincount(found["kind"]).tolist() == [170, 30]
    assert found == segment(MIXES["skips"](before), 2)
    assert "Planned(1), failed and is left out of this task: no" in caplog.records[0].getMessage()
    with pytest.raises(PermissionError):
        segment(MIXES["planned"](before), reads)


@pytest.mark.parametrize("reads", [1, 8])
def test_a_read_that_ones_own_sampler_yields_fails_the_task_in_a_mix_too(reads):
    def fail():
        raise PermissionError("no")

    def own(rng):
        yield {"kind": 1, "x": 0.5}
        yield fail
        while True:
            yield {"kind": 1, "x": 0.5}

    inner = Mix({own: 1}, on_error="skip")
    for mix in (Mix({own: 1, Numbers(0): 1}, on_error="skip"), Mix({inner: 1, Numbers(0): 1})):
        with pytest.raises(PermissionError):
            segment(mix, reads)


def test_a_function_around_a_mix_that_fails_is_none_of_its_sources():
    def odd(sample):
        return sample if int(sample["kind"]) == 0 else 1 / 0

    mix = MIXES["skips"](nothing)
    around = Map(mix, odd, schema=mix.schema)
    with pytest.raises(ZeroDivisionError):
        segment(around)
    with pytest.raises(ZeroDivisionError):
        take(Map(Mix({Numbers(1): 1}, on_error="skip"), odd, schema=mix.schema), 1)
    kinds = segment(Mix({around: 1, Numbers(5): 1}, on_error="skip"))["kind"]
    assert set(kinds[-100:]) == {5}, "of the other mix it is one"


def test_what_waits_of_all_sources_of_a_mix_is_bounded_by_bytes():
    gate, begun = threading.Event(), []

    def before(kind: int, number: int) -> None:
        begun.append(kind)
        assert kind or number or gate.wait(10)

    class Enough(Exception):
        pass

    def look() -> None:
        looks.append(0)
        if len(looks) > 5:
            raise Enough

    mix = Mix([(Planned(0, before), 1), (Planned(1, before), 1)])
    threads, looks, rng = Threads(2, Retries(0)), [], np.random.default_rng(0)
    samples = Samples(streams_of(mix, rng, threads, 20 * 160, 100_000), threads)
    try:
        with pytest.raises(Enough):
            deque(iter(partial(samples.take, 100_000, look), None), 0)
        wait_until(lambda: threads.at_work == 1, "those that may begin")
        assert 15 < len(begun) < 30, "each has ten rows of 16 bytes"
    finally:
        gate.set()
        samples.close()
    wait_until(lambda: not threads.are_reading, "the first")
    assert held_bytes() == 0


# -- Map ---------------------------------------------------------------------------------------------


def double(sample):
    return {"twice": np.float32(2 * sample["x"])}


def test_each_sample_goes_through_the_function_and_the_schema_follows():
    source = Map(Numbers(4), double)
    assert source.schema == ac.Schema({"twice": ac.Tensor("float32")})
    plain = take(Numbers(4), 5)
    assert [s["twice"] for s in take(source, 5)] == [np.float32(2 * s["x"]) for s in plain]


@pytest.mark.slow
def test_a_function_of_two_gets_the_generator_of_the_task():
    def noisy(sample, rng):
        return {**sample, "noise": rng.normal()}

    source = Map(Numbers(4), noisy)
    assert list(source.schema) == ["kind", "x", "noise"]
    require_pure(source)
    assert digest(source, 0, 0) != digest(Map(Numbers(5), noisy), 0, 0)


def test_a_default_of_a_second_parameter_is_left_alone():
    source = Map(Numbers(4), lambda sample, factor=3: {"y": sample["kind"] * factor})
    assert take(source, 1) == [{"y": 12}]


def test_rows_that_a_source_yields_at_once_are_mapped_one_by_one(tmp_path):
    pq.write_table(pa.table({"a": np.arange(50), "t": [f"n{i}" for i in range(50)]}), tmp_path / "x.parquet")
    with Map(ParquetRows(tmp_path), lambda s: {"a": int(s["a"]), "n": len(s["t"])}) as source:
        for sample in take(source, 60):
            assert sample["n"] == len(f"n{sample['a']}")


def test_a_ragged_field_is_declared():
    source = Map(Numbers(1), lambda s: {"r": np.arange(3)}, schema={"r": ac.Ragged("int64")})
    assert source.schema == ac.Schema({"r": ac.Ragged("int64")})
    digest(source, 0, 0)


@pytest.mark.slow
def test_maps_and_mixes_nest():
    both = Mix({Map(Numbers(0), double): 1, Map(Mix({Numbers(1): 1, Numbers(2): 2}), double): 3})
    require_pure(both)
