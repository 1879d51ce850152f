"""`cached` of a stream: a pass gives each item once, those that are stored first, then the stream's."""

from __future__ import annotations

import copy
import os
import random
import shutil
import time
import warnings
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from datasets_of_items import KINDS, Items, same
from helpers import flip_byte, limit, segment_files, wait_until
from processes import Child, preload
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import arrowcache as ac
from arrowcache.torch import CachedDataset, CachedStream, Loader, cached

_POSITION_BITS = 40

preload("arrowcache.torch")  # each process that is killed would import torch by itself


class Stream(IterableDataset):
    """Items 0 to length - 1 of a shard; `asked` counts how often each is made, by the shard's number."""

    def __init__(self, length, shard=0, asked=None, size=4):
        self.length, self.number, self.size = length, shard, size
        self.asked = Counter() if asked is None else asked

    def items(self, first=0):
        assert get_worker_info() is None, "the stream would divide itself once more"
        for at in range(first, self.length):
            self.asked[self.number, at] += 1
            yield {"x": torch.full((self.size,), float(at)), "y": 1000 * self.number + at}

    def __iter__(self):
        return self.items()

    def __call__(self):
        return copy.copy(self)


class Skipping(Stream):
    """It may also begin behind the first items."""

    def skip(self, count):
        self.asked["skip"] += 1
        return self.items(count)


class Stateful(Stream):
    """It may also begin with a state."""

    at = 0

    def __iter__(self):
        for item in self.items(self.at):
            self.at += 1
            yield item

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.asked["load"] += 1
        self.at = state["at"]


def shards(lengths, asked=None, kind=Stream, **options):
    return [kind(length, shard, asked, **options) for shard, length in enumerate(lengths)]


def numbers(items) -> list[int]:
    """The numbers of items that are what they should be."""
    found = []
    for item in items:
        assert torch.equal(item["x"], torch.full_like(item["x"], float(item["y"] % 1000)))
        found.append(item["y"])
    return found


def wanted(lengths, start=0) -> list[int]:
    return [1000 * shard + at for shard, length in enumerate(lengths) for at in range(start, length)]


def stored(train) -> dict[int, list[int]]:
    """The positions in the cache, by shard, in the order of its rows."""
    found: dict[int, list[int]] = {}
    with train.cache.snapshot() as snapshot:
        indices = snapshot.gather(range(len(snapshot)), ["_index"])["_index"] if len(snapshot) else []
        for index in map(int, indices):
            found.setdefault(index >> _POSITION_BITS, []).append(index & (1 << _POSITION_BITS) - 1)
    return found


def assert_prefixes(train) -> dict[int, int]:
    """None lost, none twice. Returns: the number of items of each shard."""
    found = stored(train)
    for positions in found.values():
        assert sorted(positions) == list(range(len(positions)))
    assert train.cache.verify() == []
    return {shard: len(positions) for shard, positions in found.items()}


# passes


def test_the_first_pass_stores_what_it_gives_and_the_next_asks_the_stream_no_more(path):
    stream = Stream(100)
    with cached(stream, path, capacity="16MiB") as train:
        assert isinstance(train, CachedStream)
        assert isinstance(train, IterableDataset)
        for _ in range(3):
            assert numbers(train) == wanted([100])
        assert train.cached == 100
        assert stream.asked == Counter({(0, at): 2 if at == 0 else 1 for at in range(100)}), "but the first"
        stats = train.stats()
        assert (stats.shards, stats.whole, stats.streamed, stats.hits) == (1, 1, 100, 200)
        assert "1 of 1 shard stored to the end" in str(train)
    again = Stream(100)
    with cached(again, path, capacity="16MiB") as train:
        assert numbers(train) == wanted([100])
        assert again.asked == {(0, 0): 1}, "the first, which shows the columns"


@pytest.mark.parametrize("items", [*KINDS.values()], ids=[*KINDS])
def test_items_are_what_they_were(path, items):
    with cached(lambda: iter(items), path, capacity="16MiB") as train:
        for _ in range(2):
            assert all(map(same, train, items))
        assert train.stats().hits == len(items)


def test_items_come_as_the_stream_makes_them(path):
    made = []

    def make():
        for at in range(5):
            made.append(at)
            yield at

    with cached(make, path, capacity="16MiB") as train:
        made.clear()
        items = iter(train)
        for at in range(5):
            assert next(items) == at
            assert made[-1] == at


def test_what_a_user_does_to_an_item_is_not_stored(path):
    with cached(Stream(20), path, capacity="16MiB") as train:
        for item in train:
            item["x"].fill_(-1)
        assert numbers(train) == wanted([20])


def test_a_cut_pass_goes_on_behind_what_is_stored(path):
    asked = Counter()
    lengths = [30, 0, 20]
    with cached(None, path, capacity="16MiB", shards=shards(lengths, asked)) as train:
        for cut in (0, 7, 7, 29, 30, 31, 45):
            assert numbers(islice(train, cut)) == wanted(lengths)[:cut]
            assert_prefixes(train)
        assert numbers(train) == wanted(lengths)
        assert train.stats().whole == 3, "one without items, too"
        asked.clear()
        assert numbers(train) == wanted(lengths)
        assert not asked
        assert assert_prefixes(train) == {0: 30, 2: 20}


def test_a_pass_in_another_process_goes_on_behind_what_is_stored(path):
    for cut in (5, 12, 40):
        asked = Counter()
        with cached(None, path, capacity="16MiB", shards=shards([20, 20], asked, Skipping)) as train:
            assert numbers(islice(train, cut)) == wanted([20, 20])[:cut]
    assert asked[0, 5] == 0
    assert asked[0, 10] == 0
    with cached(None, path, capacity="16MiB", shards=shards([20, 20])) as train:
        assert numbers(train) == wanted([20, 20])
        assert train.stats().whole == 2


@pytest.mark.parametrize("kind", [Stream, Skipping, Stateful])
def test_data_of_twice_the_capacity_come_once_a_pass(path, monkeypatch, kind):
    limit(monkeypatch, state_seconds=0)
    asked = Counter()
    with cached(None, path, capacity="1MiB", shards=shards([250, 250], asked, kind, size=1024)) as train:
        for _ in range(3):
            assert numbers(train) == wanted([250, 250])
            found = assert_prefixes(train)
            assert 50 < sum(found.values()) < 250
        assert train.stats().is_full
        assert train.cached == sum(found.values())
        asked.clear()
        assert numbers(train) == wanted([250, 250])
        begins = found.get(0, 0) - 1
        assert asked[0, begins] == 1, "the last stored one is compared"
        assert asked[0, begins - 1] == (1 if kind is Stream else 0), "others are iterated over, or left out"
        assert (asked["skip"] > 0) is (kind is Skipping)
        assert (asked["load"] > 0) is (kind is Stateful)


def test_a_state_that_leaves_items_out_is_not_trusted(path, monkeypatch):
    class Buffering(Stateful):
        def state_dict(self):
            return {"at": self.at + 3}  # as Hugging Face's shuffle buffers

    limit(monkeypatch, state_seconds=0)
    with cached(Buffering(250, size=1024), path, capacity="512KiB") as train:
        for _ in range(3):
            assert numbers(train) == wanted([250])


@pytest.mark.parametrize("way", ["shuffled", "shorter", "of another form"])
def test_a_stream_that_does_not_repeat_is_refused(path, way):
    class Another(Stream):
        passes = 0

        def __iter__(self):
            self.passes += 1
            items = [*self.items()]
            if self.passes < 3:
                return iter(items)
            if way == "shuffled":
                return reversed(items)
            if way == "shorter":
                return iter(items[:5])
            return iter([1.5] * 20)

    with cached(Another(20), path, capacity="16MiB") as train:
        list(islice(train, 10))
        with pytest.raises(
            ac.CacheFormatError, match=r"item 9 of shard 0 .* does not repeat: shuffle behind"
        ):
            list(train)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stream_whose_epoch_is_set_is_refused(path, workers):
    class Epochs(Stream):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([*self.items()][:: -1 if self.epoch % 2 else 1])

    stream = Epochs(20)
    with cached(stream, path, capacity="16MiB") as train:
        for epoch in range(2):
            stream.set_epoch(0)
            assert numbers(DataLoader(train, None, num_workers=workers)) == wanted([20])
            stream.set_epoch(epoch + 1)
            with pytest.raises(ValueError, match=r"epoch is \d, and was 0 .* shuffle behind cached\(\)"):
                list(DataLoader(train, None, num_workers=workers))
            with pytest.raises(ValueError, match="Leave out set_epoch"):
                train.fill(workers, progress=False)


def test_what_is_stored_in_the_middle_of_a_pass_is_looked_at(path):
    with cached(Stream(20), path, capacity="16MiB") as train:
        items = iter(train)
        for _ in range(5):
            next(items)
        assert train.cached == 5
        assert assert_prefixes(train) == {0: 5}
        assert numbers(items) == wanted([20], 5)
        assert train.stats().whole == 1
        assert assert_prefixes(train) == {0: 20}


def test_two_passes_at_once(path):
    with cached(Stream(50), path, capacity="16MiB") as train:
        pairs = [*zip(numbers(train), train, strict=True)]
        assert [one for one, _ in pairs] == [other["y"] for _, other in pairs] == wanted([50])
        assert numbers(iter(train)) == wanted([50])
        one, other = iter(train), iter(train)
        assert [item["y"] for pair in zip(one, other, strict=True) for item in pair][::2] == wanted([50])
        assert assert_prefixes(train) == {0: 50}


def test_a_damaged_segment_is_streamed_again_and_its_gap_closed(path):
    stream = Stream(600, size=256)
    with cached(stream, path, capacity="2MiB") as train:
        assert numbers(train) == wanted([600])
        first, *others = segment_files(train.cache)
    assert others
    flip_byte(first, first.stat().st_size // 2)
    asked = Counter()
    with cached(Stream(600, asked=asked, size=256), path, capacity="2MiB") as train:
        with pytest.warns(RuntimeWarning, match="quarantined"):
            assert len(train.cache.verify()) == 1
        assert train.stats().whole == 0
        assert train.cached < 600
        with pytest.raises(ValueError, match="of 1 shard of the stream 1 are not stored to the end"):
            Loader(train, 8)
        assert numbers(train) == wanted([600])
        assert train.stats().whole == 1
        assert assert_prefixes(train) == {0: 600}
        asked.clear()
        assert numbers(train) == wanted([600])
        assert not asked


def test_a_folder_that_cannot_be_used_stops_no_pass(path):
    with cached(Stream(20), path, capacity="16MiB") as train:
        shutil.rmtree(path)
        path.touch()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert numbers(train) == wanted([20])
            assert train.stats().trouble


def test_an_error_of_the_stream_is_its_own_and_the_items_before_stay(path):
    class Failing(Stream):
        def __iter__(self):
            yield from islice(self.items(), 7)
            raise OSError("the store is away")

    with cached(Failing(20), path, capacity="16MiB") as train:
        for _ in range(2):
            with pytest.raises(OSError, match="the store is away"):
                list(train)
            assert train.cached == 7
        assert train.stats().streamed == 7 + 1 - 1


def test_an_item_that_does_not_fit_is_named(path):
    with (
        cached(lambda: iter([{"x": 1}, {"x": 2.5}]), path, capacity="16MiB") as train,
        pytest.raises(
            ac.SchemaError, match="item 1 of shard 0: 'x' is a float, and in the first item an int"
        ),
    ):
        list(train)


# arguments


def test_columns_transform_schema_and_version_are_as_of_a_dataset(path):
    def make():
        return iter([{"a": np.arange(n), "b": n, "c": str(n)} for n in (2, 3, 4)])

    options = {"columns": ["a", "b"], "schema": {"a": ac.Ragged("int64")}, "version": "1"}
    with cached(make, path, capacity="16MiB", transform=lambda item: len(item["a"]), **options) as train:
        for _ in range(2):
            assert [*train] == [2, 3, 4]
    with cached(make, path, capacity="16MiB", **options) as train:
        assert [[*item] for item in train] == [["a", "b"]] * 3
        assert [item["b"] for item in train] == [2, 3, 4]
    with pytest.raises(
        ac.CacheFormatError, match="holds 1 shard of version '1', and this stream has 1 shard"
    ):
        cached(make, path, capacity="16MiB", **options | {"version": "2"})
    with pytest.raises(ac.CacheFormatError, match=r"and this stream has 2 shards of version '1'"):
        cached(None, path, capacity="16MiB", shards=[make, make], **options)
    with pytest.raises(ac.CacheFormatError, match=r"holds 1 shard .*, and this dataset has 3 items"):
        cached(Items(*make()), path, capacity="16MiB", **options)


class Both(IterableDataset):
    """An IterableDataset that has items by number, too, as those of LitData and MosaicML have."""

    def __len__(self):
        return 5

    def __iter__(self):
        raise AssertionError("items by number are looked for first")

    def __getitem__(self, index):
        return index


class Lengthy(IterableDataset):
    """A stream that has a length, which does not make it a map-style dataset."""

    def __len__(self):
        return 5

    def __iter__(self):
        return iter(range(5))


def test_map_style_methods_are_looked_for_first(path, tmp_path):
    with cached(Both(), path, capacity="16MiB") as train:
        assert isinstance(train, CachedDataset)
        assert train[3] == 3
    with cached(Lengthy(), tmp_path / "other", capacity="16MiB") as train:
        assert isinstance(train, CachedStream)
        assert [*train] == [*range(5)]


@pytest.mark.parametrize(
    ("dataset", "options", "error", "says"),
    [
        (iter([1]), {}, TypeError, r"can be iterated over once: give the function that makes it"),
        ((n for n in range(3)), {}, TypeError, r"a generator can be iterated over once"),
        (lambda: iter([]), {}, ValueError, "the stream is empty"),
        (lambda: iter([1]), {"replace": 0.1}, ValueError, "replace= is of a map-style dataset"),
        (lambda: iter([1]), {"on_error": "skip"}, ValueError, "on_error= is of a map-style dataset"),
        (lambda: iter([1]), {"shards": [list]}, TypeError, "a stream or its shards, not both"),
        (None, {"shards": []}, TypeError, "is no list of functions"),
        (None, {"shards": [[1, 2]]}, TypeError, "is no list of functions"),
        (lambda: iter([1]), {"rank": 1}, ValueError, "pass world_size, too"),
        (Items(1), {"rank": 0, "world_size": 1}, ValueError, "rank= is of a stream"),
        (None, {}, TypeError, "a map-style Dataset has a length.* a stream is an iterable or a function"),
        (lambda: 5, {}, TypeError, "gives no iterable of its items: 'int' object is not iterable"),
    ],
)
def test_what_does_not_fit_is_refused(path, dataset, options, error, says):
    with pytest.raises(error, match=says):
        cached(dataset, path, capacity="16MiB", **options)
    assert not path.exists()


def test_it_has_no_length_and_says_where_other_things_are(path):
    with cached(Stream(5), path, capacity="16MiB") as train:
        with pytest.raises(TypeError):
            len(train)
        assert train
        with pytest.raises(AttributeError, match=r"and the stream inside has: use train\.stream\.asked"):
            _ = train.asked
        with pytest.raises(TypeError, match="is cached already"):
            cached(train, path, capacity="16MiB")
        assert train.path == path
    with pytest.raises(ValueError, match="the stream is closed"):
        iter(train)


# ranks and workers


@pytest.mark.parametrize(("count", "ranks"), [(5, 2), (1, 3)])
def test_each_shard_is_of_one_rank(path, count, ranks):
    lengths, found = [10] * count, []
    for rank in range(ranks):
        asked = Counter()
        parts = shards(lengths, asked)
        train = cached(None, path, capacity="16MiB", shards=parts, rank=rank, world_size=ranks)
        with train, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            own = numbers(train)
        assert {shard for shard, at in asked if at} == {*range(rank, count, ranks)}
        found += own
    assert sorted(found) == wanted(lengths)


def test_fewer_shards_than_ranks_is_a_warning(path):
    with (
        cached(None, path, capacity="16MiB", shards=shards([5]), rank=1, world_size=3) as train,
        pytest.warns(RuntimeWarning, match="1 shard, and there are 3 ranks: 2 of them have no items"),
    ):
        assert [*train] == []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_each_shard_is_of_one_worker(path, method):
    lengths = [20, 15, 0, 10, 5]
    with cached(
        None, path, capacity="16MiB", shards=shards(lengths), transform=lambda item: item["y"]
    ) as train:
        options = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": True}
        loader = DataLoader(train, 4, **options)
        for _ in range(2):
            assert sorted(int(each) for batch in loader for each in batch) == wanted(lengths)
        del loader
        wait_until(lambda: train.stats().whole == 5, "all are stored")
        assert train.stats().streamed == 50
        assert assert_prefixes(train) == {0: 20, 1: 15, 3: 10, 4: 5}


def iterating(path, cut, ready, go) -> list[int]:
    with cached(Stream(60), path, capacity="16MiB") as train:
        items = iter(train)
        found = numbers(islice(items, cut))
        ready.touch()
        wait_until(go.exists, "a sign")
        return found + numbers(items)


@pytest.mark.slow
def test_a_shard_that_another_process_stores_is_streamed_and_not_stored(path, tmp_path):
    ready, go = tmp_path / "ready", tmp_path / "go"
    with Child(iterating, path, 10, ready, go) as child:
        wait_until(ready.exists, "ready")
        with cached(Stream(60), path, capacity="16MiB") as train:
            wait_until(lambda: train.cached == 10, "it is published")  # a second after its last request
            for _ in range(2):
                assert numbers(train) == wanted([60])
                assert assert_prefixes(train) == {0: 10}
            go.touch()
            assert child.result() == wanted([60])
            assert numbers(train) == wanted([60])
            assert assert_prefixes(train) == {0: 60}
            assert train.stats().whole == 1


# its state


def test_its_state_is_the_pass_and_what_was_delivered(path):
    lengths = [10, 20, 5]
    with cached(None, path, capacity="16MiB", shards=shards(lengths)) as train:
        assert train.state_dict() == {"pass": 0, "delivered": [0, 0, 0]}
        assert len(numbers(islice(train, 13))) == 13
        state = train.state_dict()
        assert state == {"pass": 0, "delivered": [10, 3, 0]}
        train.load_state_dict(state)
        assert train.state_dict() == state
        assert numbers(train) == wanted(lengths)[13:]
        assert train.state_dict() == {"pass": 1, "delivered": [0, 0, 0]}
        assert numbers(train) == wanted(lengths)
    for wrong in ({}, {"pass": 0, "delivered": [1, -1, 0]}, {"pass": "a", "delivered": [0, 0, 0]}):
        with pytest.raises(ValueError, match="not a state of a cached stream"):
            train.load_state_dict(wrong)
    with pytest.raises(ValueError, match="the state is of 2 shards, and the stream has 3"):
        train.load_state_dict({"pass": 0, "delivered": [0, 0]})


def test_a_state_is_resumed_behind_the_capacity_and_in_an_empty_cache(path, tmp_path):
    with cached(Stream(250, size=1024), path, capacity="512KiB") as train:
        assert len(numbers(islice(train, 200))) == 200
        state = train.state_dict()
        assert train.cached < 200
    for where in (path, tmp_path / "empty"):
        with cached(Stream(250, size=1024), where, capacity="512KiB") as train:
            train.load_state_dict(state)
            assert numbers(train) == wanted([250], 200)
            assert_prefixes(train)
            assert numbers(train) == wanted([250])
    with cached(Stream(100, size=1024), tmp_path / "shorter", capacity="1MiB") as train:
        for whole in (0, 1):
            train.load_state_dict(state)
            with pytest.raises(ValueError, match="behind item 199 of shard 0, which has 100 items: it is a"):
                list(train)
            assert numbers(train) == wanted([100])
            assert train.stats().whole == 1, whole


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("workers", "cut"), [(2, 5), (2, 9), (2, 1), (0, 3), (1, 4)])
def test_a_stateful_dataloader_goes_on_where_it_was(path, stateful, workers, cut):
    lengths = [10, 20, 5, 12]

    def loader(train):
        return stateful(train, 4, num_workers=workers, collate_fn=numbers)

    with cached(None, path, capacity="16MiB", shards=shards(lengths)) as train:
        first = loader(train)
        seen = [number for batch in islice(first, cut) for number in batch]
        state = first.state_dict()
        del first
    with cached(None, path, capacity="16MiB", shards=shards(lengths)) as train:
        again = loader(train)
        again.load_state_dict(state)
        seen += [number for batch in again for number in batch]
        assert sorted(seen) == wanted(lengths)
        assert sorted(number for batch in again for number in batch) == wanted(lengths)
        del again


class ItsOwnIterator(IterableDataset):
    """It goes on where it was, whoever iterates over it."""

    def __init__(self):
        self.rest = ({"x": number} for number in range(10))

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.rest)


class TheSameGenerator(ItsOwnIterator):
    def __iter__(self):
        return self.rest


class BeginsAnew(ItsOwnIterator):
    """It is its own iterator, too."""

    def __iter__(self):
        self.__init__()
        return self


def test_a_stream_that_can_be_iterated_over_once_is_refused(path, tmp_path):
    rest = iter([{"x": number} for number in range(10)])
    for number, stream in enumerate([lambda: rest, ItsOwnIterator(), TheSameGenerator()]):
        train = cached(stream, tmp_path / str(number), capacity="16MiB")
        with pytest.raises(ac.CacheFormatError, match="does not begin anew: give a function that makes it"):
            next(iter(train))
        assert train.cached == 0
    train = cached(BeginsAnew(), path, capacity="16MiB")
    for _ in range(2):
        assert [item["x"] for item in train] == [*range(10)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_loaded_state_is_refused_in_a_plain_dataloaders_workers(path, method):
    train = cached(None, path, capacity="16MiB", shards=shards([10] * 4))
    train.load_state_dict({"pass": 0, "delivered": [5, 0, 0, 0]})
    with pytest.raises(RuntimeError, match="StatefulDataLoader, and its state_dict"):
        list(DataLoader(train, batch_size=None, num_workers=2, multiprocessing_context=method))
    assert numbers(train) == [*range(5, 10), *wanted([0, 10, 10, 10])]


def test_there_is_a_state_after_a_fill(path):
    train = cached(None, path, capacity="16MiB", shards=shards([10] * 4))
    train.fill(workers=0)
    assert train.state_dict() == {"pass": 0, "delivered": [0] * 4}


def test_a_forked_child_of_a_process_that_has_a_cache_makes_one(path, tmp_path):
    train = cached(Stream(10), path, capacity="16MiB")
    assert len(numbers(train)) == 10

    def in_child():
        return numbers(cached(Stream(10), tmp_path / "other", capacity="16MiB"))

    with Child(in_child, method="fork") as child:
        assert child.result() == [*range(10)]


@pytest.mark.slow
def test_the_state_of_a_plain_dataloaders_workers_is_refused(path):
    with cached(None, path, capacity="16MiB", shards=shards([5, 5])) as train:
        assert len([*DataLoader(train, 4, num_workers=2)]) == 4
        with pytest.raises(RuntimeError, match="use torchdata's StatefulDataLoader"):
            train.state_dict()


# once it is whole


def test_a_loader_shuffles_it_once_it_is_whole_and_says_so_before(path):
    lengths = [10, 0, 20, 5]
    with cached(None, path, capacity="16MiB", shards=shards(lengths)) as train:
        with pytest.raises(ValueError, match=r"of 4 shards of the stream 4 are not stored.* train\.fill\(\)"):
            Loader(train, 8)
        list(islice(train, 15))
        with pytest.raises(ValueError, match="of 4 shards of the stream 2 are not stored"):
            Loader(train, 8)
        list(train)
        with Loader(train, 8, workers=0) as loader:
            assert len(loader) == 5
            for _ in range(2):
                found = [number for batch in loader for number in batch["y"].tolist()]
                assert found != wanted(lengths)
                assert sorted(found) == wanted(lengths)
        with Loader(train, 8, shuffle=False, rank=1, world_size=2, workers=0) as loader:
            assert sum(len(batch["y"]) for batch in loader) == 24
    with cached(None, path, capacity="16MiB", shards=shards(lengths)) as train:  # it may be another process
        with Loader(train, 8, workers=0, collate_fn=numbers) as loader:
            assert sorted(number for batch in loader for number in batch) == wanted(lengths)
        assert train.stats().streamed == 0


def test_a_loader_of_a_stream_whose_segment_was_damaged_says_what_to_do(path):
    with cached(Stream(600, size=256), path, capacity="2MiB") as train:
        list(train)
        loader = Loader(train, 8, workers=0)
        flip_byte(segment_files(train.cache)[0], segment_files(train.cache)[0].stat().st_size // 2)
        with pytest.warns(RuntimeWarning, match="quarantined"):
            assert len(train.cache.verify()) == 1
        with pytest.raises(ac.CorruptSegmentError, match="iterate once over the stream, train, which stores"):
            list(loader)
        loader.close()


def test_fill_streams_what_is_missing(path):
    asked = Counter()
    with cached(None, path, capacity="16MiB", shards=shards([10, 20], asked)) as train:
        list(islice(train, 5))
        assert train.fill(0, progress=False) == 30
        assert asked[0, 8] == 1
        asked.clear()
        assert train.fill(0, progress=False) == 30
        assert numbers(train) == wanted([10, 20])
        assert not asked
        assert train.state_dict()["pass"] == 2, "it is no pass"


def test_fill_ends_where_the_cache_is_full(path):
    asked = Counter()
    with cached(Stream(4000, asked=asked, size=1024), path, capacity="512KiB") as train:
        assert 20 < train.fill(0, progress=False) < 130
        assert asked[0, 3000] == 0
        assert train.stats().is_full


@pytest.mark.slow
def test_workers_fill_it(path):
    lengths = [30, 20, 10]
    with cached(None, path, capacity="16MiB", shards=shards(lengths)) as train:
        assert train.fill(2, progress=False) == 60
        assert train.stats().whole == 3
        assert sorted(numbers(train)) == wanted(lengths)


# kills

KILLED = [150, 0, 90, 120]
KILLS = int(os.environ.get("STREAM_KILLS", "20"))


def forever(path, ready) -> None:
    with cached(None, path, capacity="1MiB", shards=shards(KILLED, size=64)) as train:
        while True:
            for item in train:
                ready.touch()
                time.sleep(1e-4)  # for a slow stream
                assert item["x"][0] == item["y"] % 1000


@pytest.mark.slow
def test_no_kill_loses_an_item_or_stores_one_twice(path, tmp_path):
    """Each shard is a prefix, and the next pass gives each item once."""
    drawn, before = random.Random(0), Counter()
    for number in range(KILLS):
        ready = tmp_path / f"ready{number}"
        with Child(forever, path, ready) as child:
            wait_until(ready.exists, "ready")
            time.sleep(drawn.uniform(0, 0.06))  # it strikes at any moment
            child.kill()
        with cached(None, path, capacity="1MiB", shards=shards(KILLED, size=64)) as train:
            found = Counter(assert_prefixes(train))
            assert all(found[shard] >= count for shard, count in before.items()), "none is lost"
            before = found
            if number % 5 == 4:
                assert numbers(train) == wanted(KILLED)
                assert Counter(assert_prefixes(train)) == {0: 150, 2: 90, 3: 120}
                train.close()
                shutil.rmtree(path)
                before = Counter()
