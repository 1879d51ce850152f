"""Items: each item once a pass, however many workers and pools there are."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import make_cache

import arrowcache as ac
from arrowcache.sampling.sources import Items, Map, Mix


class Numbers:
    """A map-style dataset: {"x": (100,) of the number, "id": the number}. An item takes `pause` seconds."""

    def __init__(self, length, pause=0.0):
        self.length, self.pause = length, pause

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.pause)
        return {"x": np.full(100, index, np.float32), "id": index}


class IterableDataset:
    """Has torch's name, and a length, but no items by index."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter(range(3))


class Texts(Numbers):
    def __getitem__(self, index):
        return {"text": "a" * (index % 50), "id": index}


def cache_of(source, path, **options):
    return make_cache(path, source.schema, **{"capacity": "64MiB", "segment_bytes": "64KiB"} | options)


def ids(cache):
    with cache.snapshot() as snapshot:
        rows = snapshot.gather(range(len(snapshot)))
        if "x" in rows:
            assert np.array_equal(rows["x"][:, 0], rows["id"])
        return rows["id"].tolist()


@pytest.mark.parametrize("length", [1, 7, 158, 159, 1000])
@pytest.mark.parametrize("dataset", [Numbers, Texts])
def test_each_item_comes_once_a_pass_and_the_pool_ends(tmp_path, length, dataset):
    source = Items(dataset(length))
    cache = cache_of(source, tmp_path / "cache")
    with ThreadPoolExecutor(3) as executor:
        with ac.SamplerPool(cache, source, workers=3, executor=executor) as pool:
            pool.wait(timeout=60)
        assert Counter(ids(cache)) == Counter(range(length))
        with ac.SamplerPool(cache, source, workers=3, executor=executor) as pool:
            pool.wait(timeout=60)
            assert pool.stats().rows == 0, "a pool that is started again has nothing to draw"
    assert len(ids(cache)) == length


def test_each_pass_has_another_order(tmp_path):
    source = Items(Numbers(500), passes=3)
    cache = cache_of(source, tmp_path / "cache")
    with (
        ThreadPoolExecutor(1) as executor,
        ac.SamplerPool(cache, source, workers=1, executor=executor) as pool,
    ):
        pool.wait(timeout=60)
    drawn = ids(cache)
    passes = [drawn[start : start + 500] for start in (0, 500, 1000)]
    assert all(sorted(each) == list(range(500)) for each in passes)
    assert len({*map(tuple, passes)}) == 3
    assert list(range(500)) not in passes


def test_without_an_end_it_goes_on(tmp_path):
    source = Items(Numbers(50), passes=None)
    cache = cache_of(source, tmp_path / "cache")
    with (
        ThreadPoolExecutor(1) as executor,
        ac.SamplerPool(cache, source, workers=1, executor=executor) as pool,
    ):
        pool.wait(rows=230, timeout=60)
    counts = Counter(ids(cache))
    assert {*counts} == {*range(50)}
    assert max(counts.values()) - min(counts.values()) <= 1, "segments are in the order of the tasks"


def stopped(pool):
    pool.stop()


def left(pool):
    """The end of the `with` block."""


@pytest.mark.parametrize("ended", [stopped, left])
def test_a_pool_that_was_stopped_goes_on_and_each_item_comes_once(tmp_path, ended):
    source = Items(Numbers(600, pause=0.004))
    cache = cache_of(source, tmp_path / "cache")
    with ThreadPoolExecutor(2) as executor:
        for _ in range(3):
            with ac.SamplerPool(cache, source, workers=2, executor=executor) as pool:
                pool.wait(rows=60, timeout=60)
                ended(pool)
        assert len(ids(cache)) < 600
        with ac.SamplerPool(cache, source, workers=2, executor=executor) as pool:
            pool.wait(timeout=60)
    assert Counter(ids(cache)) == Counter(range(600))


def test_tasks_whose_segments_were_evicted_are_not_drawn_again(tmp_path):
    source = Items(Numbers(1000))
    cache = cache_of(source, tmp_path / "cache")
    with ThreadPoolExecutor(2) as executor:
        with ac.SamplerPool(cache, source, workers=2, executor=executor) as pool:
            pool.wait(rows=300, timeout=60)
        drawn = ids(cache)
        cache.evict("1GiB")
        with ac.SamplerPool(cache, source, workers=2, executor=executor) as pool:
            pool.wait(timeout=60)
    assert Counter(drawn + ids(cache)) == Counter(range(1000))


def test_two_pools_at_once_share_the_items(tmp_path):
    source = Items(Numbers(1000, pause=0.0002))
    cache = cache_of(source, tmp_path / "cache")
    with (
        ThreadPoolExecutor(4) as executor,
        ac.SamplerPool(cache, source, workers=2, executor=executor) as one,
        ac.SamplerPool(cache, source, workers=2, executor=executor) as other,
    ):
        one.wait(timeout=60)
        other.wait(timeout=60)
    assert one.stats().rows + other.stats().rows == 1000
    assert Counter(ids(cache)) == Counter(range(1000))


def test_tasks_that_were_given_up_are_drawn_by_the_next_pool(tmp_path):
    class Broken(Numbers):
        def __getitem__(self, index):
            if index % 10 == 7 and self.length == 100:
                raise OSError(f"cannot read {index}")
            return super().__getitem__(index)

    says = r"(?s)cannot read (\d*7)"
    if hasattr(OSError, "add_note"):  # Python 3.11
        says += r".*item \1 of the dataset"
    source = Items(Broken(100))
    cache = cache_of(source, tmp_path / "cache", segment_rows=5)
    with ThreadPoolExecutor(1) as executor:
        with (
            ac.SamplerPool(cache, source, 1, executor=executor, retries=0) as pool,
            pytest.raises(ac.SamplerError, match=says),
        ):
            pool.wait(timeout=60)
        assert len(ids(cache)) < 100
        with ac.SamplerPool(cache, Items(Numbers(100)), 1, executor=executor) as pool:
            pool.wait(timeout=60)
    assert Counter(ids(cache)) == Counter(range(100))


def passing(rng):
    while True:
        yield {"x": rng.random(100, np.float32), "id": -1}


@pytest.mark.parametrize(
    ("first", "then", "says"),
    [
        (Items(Numbers(100)), Items(Numbers(300)), "100 items in .* draw from 300 items in"),
        (Items(Numbers(100)), Items(Numbers(100), segment_items=8), "at most 16 items.* at most 8 items"),
        (Items(Numbers(100)), passing, "now to draw from a sampler whose tasks draw from all"),
        (passing, Map(Items(Numbers(100)), dict), "drew from a sampler .* draw from 100 items"),
    ],
)
def test_a_pool_of_another_division_is_refused_and_another_name_is_the_way_out(tmp_path, first, then, says):
    cache = cache_of(Items(Numbers(1)), tmp_path / "cache")
    with ThreadPoolExecutor(2) as executor:
        with ac.SamplerPool(cache, first, 2, executor=executor, segments=2) as pool:
            pool.wait(timeout=60)
        with pytest.raises(ValueError, match=f"(?s){says}.* Pass another name="):
            ac.SamplerPool(cache, then, 2, executor=executor)
        assert not cache.store.usage.somebody_writes()
        with ac.SamplerPool(cache, then, 2, executor=executor, name="then") as pool:
            pool.wait(segments=2, timeout=60)
        with ac.SamplerPool(cache, first, 2, executor=executor, segments=2) as pool:
            pool.wait(timeout=60)


def test_more_passes_go_on_where_fewer_ended(tmp_path):
    cache = cache_of(Items(Numbers(100)), tmp_path / "cache")
    with ThreadPoolExecutor(2) as executor:
        for passes in (1, 1, 3):
            with ac.SamplerPool(cache, Items(Numbers(100), passes), 2, executor=executor) as pool:
                pool.wait(timeout=60)
    assert Counter(ids(cache)) == Counter([*range(100)] * 3)


@pytest.mark.parametrize("changed", [lambda source: source, lambda source: Map(source, dict)])
@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"x": np.zeros(99, np.float32)}, r"item 37: field 'x': expected shape \(100,\), got \(99,\)"),
        ({"z": 1}, "item 37: the item has x, id, z, and in the first item"),
    ],
)
def test_an_item_that_does_not_fit_is_named(tmp_path, odd, says, changed):
    class Odd(Numbers):
        def __getitem__(self, index):
            return super().__getitem__(index) | (odd if index == 37 else {})

    source = changed(Items(Odd(100)))
    cache = cache_of(source, tmp_path / "cache")
    with (
        ThreadPoolExecutor(1) as executor,
        ac.SamplerPool(cache, source, 1, executor=executor, retries=0) as pool,
        pytest.raises(ac.SamplerError, match=says),
    ):
        pool.wait(timeout=60)


@pytest.mark.slow
def test_processes_draw_them(tmp_path):
    source = Items(Numbers(700))
    cache = cache_of(source, tmp_path / "cache")
    with ac.SamplerPool(cache, source, workers=2) as pool:
        pool.wait(timeout=60)
    assert Counter(ids(cache)) == Counter(range(700))


def test_early_segments_are_small_and_later_ones_full(tmp_path):
    source = Items(Numbers(1000))
    cache = cache_of(source, tmp_path / "cache", segment_rows=100)
    with (
        ThreadPoolExecutor(1) as executor,
        ac.SamplerPool(cache, source, workers=1, executor=executor) as pool,
    ):
        pool.wait(timeout=60)
    rows = [segment.rows for segment in cache.store.segments()]
    assert rows[:10] == [1, 1, 1, 1, 1, 3, 6, 12, 25, 50]
    assert {*rows[10:-1]} == {100}
    assert sum(rows) == 1000


def test_a_function_of_each_item(tmp_path):
    source = Map(Items(Numbers(300)), lambda sample: {**sample, "x": sample["x"], "twice": 2 * sample["id"]})
    cache = cache_of(source, tmp_path / "cache")
    with (
        ThreadPoolExecutor(2) as executor,
        ac.SamplerPool(cache, source, workers=2, executor=executor) as pool,
    ):
        pool.wait(timeout=60)
    assert Counter(ids(cache)) == Counter(range(300))
    with cache.snapshot() as snapshot:
        rows = snapshot.gather(range(300))
    assert np.array_equal(rows["twice"], 2 * rows["id"])


def test_what_an_item_consists_of_is_its_columns():
    source = Items([(np.zeros(3), {"a": 1}), (np.ones(3), {"a": 2})], columns=[1])
    assert dict(source.schema) == {"0.a": ac.Tensor("int64")}
    ragged = Items([{"t": [1, 2]}, {"t": []}], schema={"t": ac.Ragged("int64")})
    assert dict(ragged.schema) == {"t": ac.Ragged("int64")}


def test_items_that_do_not_fit_a_segment_are_an_error_that_says_what_to_do(tmp_path):
    class Grows(Numbers):
        def __getitem__(self, index):
            return {"text": "a" * (10 if index == 0 else 5000), "id": index}

    source = Items(Grows(200))
    cache = cache_of(source, tmp_path / "cache")
    with (
        ThreadPoolExecutor(1) as executor,
        ac.SamplerPool(cache, source, 1, executor=executor, retries=0) as pool,
        pytest.raises(ac.SamplerError, match="fewer segment_rows; Items also takes fewer segment_items"),
    ):
        pool.wait(rows=200, timeout=60)
    fits = Items(Grows(200), segment_items=10)
    with ThreadPoolExecutor(1) as executor, ac.SamplerPool(cache, fits, 1, 0, "fits", executor) as pool:
        pool.wait(timeout=60)
        assert pool.stats().rows == 200


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((3,), TypeError, "a length and items by index; got 3"),
        (([],), ValueError, "empty"),
        ((IterableDataset(),), TypeError, "IterableDataset, whose items have no numbers: write a sampler"),
        (([1], 0), ValueError, "passes"),
        (([{"x": None}],), ac.SchemaError, "'x' is None"),
    ],
)
def test_what_is_no_dataset_is_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        Items(*arguments)


def test_by_itself_it_yields_each_item_and_it_is_never_mixed():
    source = Items(Numbers(50))
    drawn = [sample["id"] for sample in source(np.random.default_rng(0))]
    assert sorted(drawn) == list(range(50)) != drawn
    with pytest.raises(TypeError, match="is drawn once, and a mix draws without end"):
        Mix({source: 1.0})
