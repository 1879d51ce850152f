"""`cached`: a Dataset of the same items, each made once, whoever asks."""

from __future__ import annotations

import ast
import copy
import datetime as dt
import io
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import textwrap
import threading
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from begun import own_children
from datasets_of_items import KINDS, Items, Large, Numbers, check, large, made, pairs, same, there
from helpers import DEADLINE_SECONDS, flip_byte, in_child, limit, segment_files, wait_until
from processes import Child, Script, private_mounts, small_disk
from quick import first_is_quick, one_in
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
)

import arrowcache as ac
from arrowcache.storage.claims import Claims
from arrowcache.storage.layout import CLAIMS_LOCK
from arrowcache.torch import CachedDataset, Loader, cached


def epoch(train, **options) -> None:
    options = {"batch_size": 10, "shuffle": True} | options
    loader = DataLoader(train, **options)
    assert sorted(chain.from_iterable(map(check, loader))) == list(range(len(train)))


# items


class Name(str):
    """A text of a class of its own."""


FOREIGN = {"a foreign byte order": pairs(lambda n: np.arange(n, n + 3, dtype=">f4"))}  # which torch refuses


@pytest.mark.parametrize("items", [*KINDS.values(), *FOREIGN.values()], ids=[*KINDS, *FOREIGN])
def test_items_are_what_they_were(path, items):
    with cached(Items(*items), path, capacity="16MiB") as train:
        assert len(train) == 3
        for _ in range(2):
            assert all(map(same, [train[index] for index in range(3)], items))
        assert train.cached == 3
    with cached(Items(*items), path, capacity="16MiB") as train:
        assert all(map(same, train.__getitems__([2, 0, 1, 0]), [items[number] for number in (2, 0, 1, 0)]))
        assert train.stats().made == 0


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "CMYK", "I", "F", "I;16", "HSV", "YCbCr"])
def test_images_are_images_again(path, mode):
    Image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 255, (2, 5, 7, 3), np.uint8)
    images = [Image.fromarray(each) for each in pixels]
    images = [
        each.convert("L").convert(mode) if mode in ("I", "F", "I;16") else each.convert(mode)
        for each in images
    ]
    with cached(Items(*images), path, capacity="16MiB") as train:
        for _ in range(2):
            for index, image in enumerate(images):
                assert (train[index].mode, train[index].size) == (mode, (7, 5))
                assert train[index].tobytes() == image.tobytes()


def test_values_of_different_lengths_are_ragged(path):
    items = [{"tokens": torch.arange(n), "boxes": np.ones((n, 4), np.float32)} for n in (3, 0, 5)]
    schema = {"tokens": ac.Ragged("int64"), "boxes": ac.Ragged("float32", (4,))}
    with cached(Items(*items), path, capacity="16MiB", schema=schema) as train:
        for _ in range(2):
            assert all(map(same, train.__getitems__([0, 1, 2]), items))
        assert train.cache.schema["boxes"] == schema["boxes"]


@pytest.mark.parametrize(
    ("items", "says"),
    [
        (
            [torch.zeros(3), torch.zeros(4)],
            r"item 1: field 'value': expected shape \(3,\), got \(4,\); where lengths differ, pass .*Ragged",
        ),
        ([[[1, 2], [3, 4]], [[1], [2, 3]]], "item 1: field 'value': .*; give all items one shape"),
        ([np.ones((4, 4)), np.ones((4, 6))], r"item 1: .*\(4, 4\), got \(4, 6\); give all items one shape"),
        ([{"x": 1}, {"y": 1}], "item 1: the item has y, and in the first item it has x"),
        ([{"x": 1}, {"x": 1.0}], "item 1: 'x' is a float, and in the first item an int"),
        ([torch.ones(2), np.ones(2)], "item 1: 'value' is a ndarray .* a Tensor of torch.float32"),
        ([[0.5, 1.5], [1, 2]], "item 1: 'value' is a list of int, and in the first item a list of float"),
        ([{"x": 1}, {"x": None}], "item 1: 'x' is None, .* leave it out"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stored", [True, False])
def test_an_item_that_does_not_fit_is_named(path, items, says, stored):
    with cached(Items(*items), path, capacity="16MiB") as train, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if not stored:
            shutil.rmtree(path)
        for _ in range(2):
            with pytest.raises(ac.SchemaError, match=says):
                train[1]
        assert same(train[0], items[0])


@pytest.mark.parametrize("stored", [True, False])
def test_an_item_that_lacks_a_column_is_named(path, stored):
    with (
        cached(Items({"y": 1}, {"x": 2}), path, capacity="16MiB", columns=["y"]) as train,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)
        if not stored:
            shutil.rmtree(path)
        with pytest.raises(ac.SchemaError, match=r"item 1: it lacks one of columns \['y'\]"):
            train[1]


def test_an_image_of_another_size_is_refused_with_a_way_out(path):
    Image = pytest.importorskip("PIL.Image")
    images = [Image.new("RGB", (4, 4)), Image.new("RGB", (6, 4)), Image.new("RGB", (4, 6))]
    with cached(Items(*images), path, capacity="16MiB") as train:
        with pytest.raises(ac.SchemaError, match=r"item 1: .*\(4, 4, 3\), got \(4, 6, 3\); .* by a resize"):
            train[1]
        with pytest.raises(ac.SchemaError, match=r"item 2: .*'value': Ragged\('uint8', \(4, 3\)\)"):
            train[2]


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ({"x": None}, "item 0: 'x' is None"),
        (object(), "item 0: field 'value': expected numbers"),
        ({"_index": 1}, "'_index'"),
        (
            torch.nn.Parameter(torch.zeros(2)),
            "item 0: 'value' is a Parameter .*, which is more than a column keeps: give tensor.detach",
        ),
        (
            {"x": torch.zeros(2, requires_grad=True)},
            r"'x' is a Tensor .* with a gradient.*: give tensor\.detach",
        ),
        (torch.max(torch.ones(2, 2), 0), r"is a torch\.return_types\.max, .*: give tuple\(value\)"),
        (dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc), "a datetime with a time zone, .*tzinfo=None"),
        ([1, 2.5], "'value' is a list of float and int, .*: give numbers of one class"),
        (Name("a"), r"'value' is a Name, .*: give str\(value\)"),
    ],
)
def test_a_first_item_that_no_columns_hold_is_refused(path, item, says):
    with pytest.raises(ac.SchemaError, match=says):
        cached(Items(item), path, capacity="16MiB")
    assert not path.exists()


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (torch.zeros(2), ac.Tensor("float64", (2,))),
        (np.zeros(2, np.float32), ac.Ragged("float64")),
        ([1, 2], ac.Tensor("float64", (2,))),
        (1, ac.Tensor("bfloat16")),
    ],
)
def test_a_schema_of_another_dtype_is_refused(path, item, kind):
    with pytest.raises(ac.SchemaError, match=f"item 0: 'value' is .*would come back .*{kind.dtype}"):
        cached(Items(item), path, capacity="16MiB", schema={"value": kind})


def test_an_image_with_a_palette_is_refused(path):
    Image = pytest.importorskip("PIL.Image")
    with pytest.raises(ac.SchemaError, match=r"mode 'P'.*convert\('RGB'\)"):
        cached(Items(Image.new("P", (4, 4))), path, capacity="16MiB")


def test_columns_are_all_that_is_stored_and_given(path):
    items = pairs(lambda n: {"x": n, "y": str(n), "z": None})
    with cached(Items(*items), path, capacity="16MiB", columns=["y", "x"]) as train:
        for _ in range(2):
            assert train[2] == {"y": "2", "x": 2}
        assert set(train.cache.schema) == {"y", "x", "_index"}


@pytest.mark.parametrize(
    ("items", "kind"),
    [
        ([np.zeros((0, 4), np.float32), np.ones((3, 4), np.float32)], ac.Ragged("float32", (4,))),
        ([torch.zeros(0, dtype=torch.int64), torch.arange(3)], ac.Ragged("int64")),
        ([[], [1.5], []], ac.Ragged("float64")),
    ],
)
def test_a_first_item_that_is_empty_shows_that_lengths_differ(path, items, kind):
    with cached(Items(*items), path, capacity="16MiB") as train:
        for _ in range(2):
            assert all(map(same, train.__getitems__([*range(len(items))]), items))
        assert train.cached == len(items)
        assert train.cache.schema["value"] == kind


@pytest.mark.parametrize("item", [{"x": torch.zeros(100), "y": 0}, "a", np.zeros((64, 1024))])
def test_the_capacity_that_an_error_asks_for_is_enough(path, item):
    with pytest.raises(ValueError, match="a capacity of 1000 B is too little for items of") as caught:
        cached(Items(item, item), path, capacity=1000)
    asked = str(caught.value).split("raise capacity to ")[1]
    assert "segment_bytes" not in str(caught.value)
    with cached(Items(item, item), path, capacity=asked) as train:
        assert train.fill(0, progress=False) == 2


def test_a_smaller_capacity_is_refused_in_the_words_of_its_arguments(path):
    cached(Numbers(5), path, capacity="64MiB").close()
    with pytest.raises(ValueError, match=r"raise capacity to .* MiB, or give a new folder"):
        cached(Numbers(5), path, capacity="1MiB")


def test_a_first_list_that_is_empty_has_the_numbers_that_schema_says(path):
    with cached(Items([], [1]), path / "a", capacity="16MiB", schema={"value": ac.Ragged("int64")}) as train:
        train.fill(0, progress=False)
        assert train[1] == [1]
    with (
        cached(Items([], [1]), path / "b", capacity="16MiB") as train,
        pytest.raises(ac.SchemaError, match="where the first one is empty, pass schema="),
    ):
        train[1]


def test_a_transform_is_called_at_each_access_and_never_stored(path):
    calls = []
    with cached(Numbers(5), path, capacity="16MiB", transform=lambda item: calls.append(item["y"])) as train:
        assert [train[3] for _ in range(3)] == [None] * 3
    assert calls == [3, 3, 3]
    with cached(Numbers(5), path, capacity="16MiB") as train:
        assert train[3]["y"] == 3


def test_writing_to_an_item_changes_no_other(path):
    with cached(Numbers(5), path, capacity="16MiB") as train:
        for index in range(5):
            train[index]
        one, other, again = train.__getitems__([1, 2, 1])
        one["x"].fill_(9)
        assert other["x"][0, 0] == 2
        assert again["x"][0, 0] == train[1]["x"][0, 0] == 1


def test_an_item_that_is_read_can_be_used_as_one_that_was_made(path):
    weight = torch.ones(3, requires_grad=True)
    with cached(Items(*torch.ones(4, 3).unbind()), path, capacity="16MiB") as train:
        train.fill(0, progress=False)
        one, other = train.__getitems__([1, 2])
        loss = (weight * one).sum()
        other.add_(1)  # autograd has kept the one, and none other
        loss.backward()
        train[3].mul_(weight)


@pytest.mark.parametrize("schema", [{}, {"x": ac.Ragged("float32", (1024,)), "a": ac.Ragged("float64")}])
def test_an_item_that_is_kept_keeps_no_other(path, schema):
    items = pairs(lambda n: {"x": large(n), "a": np.full(1000, float(n))})
    with cached(Items(*items), path, capacity="16MiB", schema=schema) as train:
        train.fill(0, progress=False)
        kept = train.__getitems__([0, 1, 2])[1]
        assert kept["x"].untyped_storage().nbytes() == kept["x"].nbytes
        assert kept["a"].base is None


def test_an_item_that_is_kept_is_never_overwritten(path):
    with cached(Numbers(50), path, capacity="16MiB") as train:
        kept = [train[index] for _ in range(2) for index in range(50)]
        assert [item["x"][0, 0] for item in kept] == [*range(50)] * 2


SEVERAL = {
    "list": [3, 1, 3],
    "list of numpy": [np.int64(3), np.int32(1), 3],
    "array": np.array([3, 1, 3]),
    "small array": np.array([3, 1, 3], np.uint8),
    "tensor": torch.tensor([3, 1, 3]),
    "range": range(3, 0, -1),
    "slice": slice(1, 4),
    "slice backwards": slice(None, None, -2),
    "negative": [-1, 0, -20],
    "one": [7],
}


@pytest.mark.parametrize(
    "transform", [None, lambda item: (item["x"] + 1, item["y"])], ids=["", "transformed"]
)
@pytest.mark.parametrize("several", SEVERAL)
def test_several_indices_are_a_batch(path, several, transform):
    index = SEVERAL[several]
    with cached(Numbers(20), path, capacity="16MiB", transform=transform) as train:
        numbers = [*range(20)]
        wanted = numbers[index] if isinstance(index, slice) else [numbers[int(each)] for each in index]
        items = [train[each] for each in wanted]
        for _ in range(2):
            assert same(train[index], torch.utils.data.default_collate(items))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_of_batches_of_indices_has_batches(path, workers):
    """As that of a TensorDataset, whose items they are."""
    inside = TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10))
    with cached(inside, path, capacity="16MiB") as train:
        epochs = [
            [
                *DataLoader(
                    dataset, batch_size=None, num_workers=workers,
                    sampler=BatchSampler(SequentialSampler(dataset), 4, drop_last=False),
                )
            ]
            for dataset in (train, train, inside)
        ]  # fmt: skip
    assert len(epochs[0]) == 3
    assert same(epochs[0], epochs[2])
    assert same(epochs[1], epochs[2])


def test_what_default_collate_refuses_is_a_batch_as_of_a_loader(path):
    at = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc).replace(tzinfo=None)
    items = [{"at": at, "words": [*range(n)]} for n in (1, 2, 3)]
    with cached(Items(*items), path, capacity="16MiB", schema={"words": ac.Ragged("int64")}) as train:
        batch = train[1:]
        assert [row.tolist() for row in batch["words"].unbind()] == [[0, 1], [0, 1, 2]]
        assert batch["at"].dtype == torch.int64


@pytest.mark.parametrize(
    ("index", "error", "says"),
    [
        ([], IndexError, "at least one"),
        (slice(5, 5), IndexError, "at least one"),
        (np.array([True, False]), TypeError, "nonzero"),
        (torch.tensor([True, False]), TypeError, "nonzero"),
        ([True, False], TypeError, "of a mask give"),
        ([1, np.True_], TypeError, "of a mask give"),
        (np.array([1.0]), TypeError, "float64"),
        (np.zeros((2, 2), int), TypeError, "integer"),
        ([1, 20], IndexError, "item 20"),
        ([1, "2"], TypeError, "integer"),
        ((1, 2), TypeError, "integer"),
    ],
)
def test_what_are_no_indices_is_refused(path, index, error, says):
    with cached(Numbers(20), path, capacity="16MiB") as train, pytest.raises(error, match=says):
        train[index]


def test_an_attribute_of_the_dataset_inside_is_named(path):
    class Folder(Numbers):
        classes = ("cat", "dog")
        class_to_idx: ClassVar = {"cat": 0, "dog": 1}
        _own = 1

        @property
        def targets(self):
            return [0, 1]

        def select(self, indices):
            return Subset(self, indices)

    with cached(Folder(3), path, capacity="16MiB") as train:
        for name in ("classes", "class_to_idx", "targets", "select"):
            with pytest.raises(AttributeError, match=f"has no attribute '{name}'.* use train.dataset.{name}"):
                getattr(train, name)
            assert not hasattr(train, name)
        for name in ("clases", "_own", "__next__", "state_dict"):
            with pytest.raises(AttributeError, match=f"has no attribute '{name}'$"):
                getattr(train, name)
        assert train.dataset.classes == ("cat", "dog")
        for other in (copy.copy(train), copy.deepcopy(Subset(train, [1])).dataset):
            assert other[1]["y"] == 1
            other.close()
        assert not hasattr(CachedDataset.__new__(CachedDataset), "__setstate__"), "asked while it is copied"


@pytest.mark.parametrize(
    "method",
    ["fork", *one_in(2, [pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver")])],
)
def test_workers_that_are_started_in_any_way_share_it_and_are_counted(path, log, method):
    workers = 2 if method == "fork" else 1  # which take seconds to start
    with cached(Numbers(20, log), path, capacity="16MiB", transform=lambda item: item) as train:
        for hits, count in ((1, 20), (21, 20)):
            epoch(train, batch_size=5, num_workers=workers, multiprocessing_context=method)
            stats = train.stats()
            assert (stats.hits, stats.made) == (hits, count - 1)
            assert f"{hits} items read from the cache, {count - 1} made" in str(train).replace(
                "1 item ", "1 items "
            )
        other = pickle.loads(pickle.dumps(train))
        assert (other.stats().hits, other.stats().made) == (0, 0), "a copy counts for itself"
        other.close()
    assert made(log) == Counter(range(20))


@pytest.mark.parametrize(
    ("index", "error"), [(5, IndexError), (-6, IndexError), ("a", TypeError), (1.5, TypeError)]
)
def test_what_is_no_index_is_refused(path, index, error):
    with cached(Numbers(5), path, capacity="16MiB") as train, pytest.raises(error):
        train[index]


def test_it_is_a_sequence(path):
    with cached(Numbers(5), path, capacity="16MiB") as train:
        assert train[-1]["y"] == 4
        assert train[np.int64(2)]["y"] == train[torch.tensor(2)]["y"] == 2
        assert [item["y"] for item in train] == [0, 1, 2, 3, 4]
        assert [item["y"] for item in Subset(train, [3, 1])] == [3, 1]
        assert len(ConcatDataset([train, train])) == 10
        assert train.dataset.length == 5


# each item is made once


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_item_is_made_once(path, log, workers, persistent):
    if persistent and not workers:
        pytest.skip("a DataLoader without workers has none that live on")
    with cached(Numbers(95, log), path, capacity="64MiB") as train:
        loader = DataLoader(
            train, 10, shuffle=True, num_workers=workers, persistent_workers=persistent
        )  # fmt: skip
        for _ in range(3):
            assert sorted(chain.from_iterable(map(check, loader))) == list(range(95))
        del loader
        assert train.cached == 95
    assert made(log) == Counter(range(95))


def rank(path, log, number, epochs):
    from torch.utils.data import DistributedSampler

    train = cached(Numbers(200, log, pause=0.001), path, capacity="64MiB")
    sampler = DistributedSampler(train, 2, number)
    seen = []
    for each in range(epochs):
        sampler.set_epoch(each)
        loader = DataLoader(
            train, 8, sampler=sampler, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
        )
        seen.append(sorted(chain.from_iterable(map(check, loader))))
    train.close()
    return seen


@pytest.mark.slow
def test_ranks_share_it(path, log):
    with Child(rank, path, log, 0, 3) as one, Child(rank, path, log, 1, 3) as other:
        first, second = one.result(), other.result()
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [[*range(200)]] * 3
    counts = made(log)
    assert set(counts) == {*range(200)}
    del counts[0]  # which shows each rank the columns
    assert sum(counts.values()) - 199 <= 2, "races"


class Many(Numbers):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def job(path, dataset, batch):
    with cached(dataset, path, capacity="16MiB") as train:
        for start in range(0, len(dataset), batch):
            train.__getitems__([*range(start, min(start + batch, len(dataset)))])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "length", "pause", "batch"),
    [(Numbers, 5, 1.2, 2), (Many, 90, 0.04, 30)],
    ids=["items", "batches"],
)
def test_what_takes_longer_than_a_second_is_made_once_by_two_jobs(path, log, kind, length, pause, batch):
    dataset = kind(length, log, pause)
    with Child(job, path, dataset, batch) as one, Child(job, path, dataset, batch) as other:
        one.result()
        other.result()
    counts = made(log)
    shown = 1 if kind is Numbers else 2  # to each job, for the columns and for what __getitems__ gives
    for index in range(shown):
        del counts[index]
    assert sum(counts.values()) <= length - shown + 1, "all at once by both at most once, at the beginning"


def test_an_item_stays_claimed_while_it_is_made(path):
    class Slow(Numbers):
        def __getitem__(self, index):
            if index == 3:
                wait_until(lambda: not cache.stats().leased_bytes, "the lease to end")
                others = Claims(path / CLAIMS_LOCK, 0o600, 5)
                assert others.is_held_elsewhere(3)
                others.close()
            return super().__getitem__(index)

    with cached(Slow(5), path, capacity="16MiB") as train:
        cache = ac.Cache.open(path)
        train[0]
        assert train[3]["y"] == 3
        wait_until(lambda: cache.stats().rows == 2, "the item to be published, a second later")


def test_who_claims_an_item_that_was_published_meanwhile_does_not_make_it(path):
    with (
        cached(Numbers(5), path, capacity="16MiB") as train,
        pickle.loads(pickle.dumps(train)) as other,
    ):
        wanted, reader = np.array([2, 3]), other.reader_here()
        assert not len(reader.find(wanted).positions)
        train[3]
        assert train.cached == 2
        assert reader.publisher.claim(wanted).tolist() == [True, False]
        other.drain()


def test_threads_that_begin_together_have_one_reader(path, monkeypatch):
    opened = os.open

    def slowly(*arguments, **options):
        time.sleep(0.02)  # in which others would begin theirs
        return opened(*arguments, **options)

    with cached(Numbers(20), path, capacity="16MiB") as train:
        again = pickle.loads(pickle.dumps(train))
    with again, ThreadPoolExecutor(4) as threads:
        monkeypatch.setattr(os, "open", slowly)
        assert len({*threads.map(lambda _: again.reader_here(), range(4))}) == 1


def test_what_was_made_is_published_after_a_minute_without_a_pause(path, monkeypatch):
    limit(monkeypatch, publish_seconds=0.2)
    numbers = chain.from_iterable(repeat(range(5)))
    with cached(Numbers(5), path, capacity="16MiB") as train:
        cache = ac.Cache.open(path)
        train.transformed(train[1])
        wait_until(lambda: train[next(numbers)] and cache.stats().rows == 5, "the minute's end")


def test_who_misses_an_item_that_another_process_holds_waits_for_it(path, log):
    with cached(Numbers(20, log), path, capacity="16MiB") as train:
        train.__getitems__([*range(1, 10)])
        there = ac.Cache.open(path)  # to ask the dataset would publish them
        assert len(segment_files(there)) == 1, "that of the first item: it is too early for the others"
        with in_child(lambda: check_all(train, range(10))):
            pass
    assert made(log) == Counter(range(10))


def check_all(train, indices):
    assert [item["y"] for item in train.__getitems__([*indices])] == [*indices]
    train.close()


def test_a_second_without_requests_publishes_and_ends_the_lease(path):
    with cached(Numbers(20), path, capacity="16MiB") as train:
        train.__getitems__([*range(5)])
        train.__getitems__([*range(5)])  # publishes, and reads
        train[7]
        cache = ac.Cache.open(path)
        wait_until(lambda: cache.stats().rows == 6, "the last item to be published")
        wait_until(lambda: not cache.stats().leased_bytes, "the lease to end")
        assert train[7]["y"] == 7


ENDS = {
    "without workers": """
    for index in range(200): train[index]
    """,
    "its end": """
    loader = DataLoader(Subset(train, range(200)), 8, num_workers=2, persistent_workers=True)
    for batch in loader: pass
    """,
    "an exit in mid-epoch": """
    batches = iter(DataLoader(train, 8, num_workers=2))
    for _ in range(20): next(batches)
    """,
    "one while its workers are at an item": """
    batches = iter(DataLoader(train, 8, num_workers=2))
    for _ in range(25): next(batches)
    """,
}
ENDED = """
    import sys, time
    from torch.utils.data import DataLoader, Subset
    from arrowcache.torch import cached
    from datasets_of_items import Numbers

    class Stuck(Numbers):
        def __getitem__(self, index):
            time.sleep(1000 * (index == 200))
            return super().__getitem__(index)

    train = cached(Stuck(208, pause=0.002), sys.argv[1], capacity="16MiB")
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", one_in(2, [pytest.param(code, id=name) for name, code in ENDS.items()]))
def test_workers_publish_what_they_made_as_their_script_ends(path, end):
    """multiprocessing ends them by SIGTERM."""
    with Script(textwrap.dedent(ENDED) + textwrap.dedent(end), path, new_interpreter=True) as script:
        assert script.end() == (0, "")
    with cached(Numbers(208), path, capacity="16MiB") as train:
        assert train.cached >= 150


def test_who_asks_for_its_cache_may_evict_and_resize_at_once(path):
    """The dataset itself leased all of it, for a second."""
    with cached(Large(40), path, capacity="16MiB") as train:
        train.__getitems__([*range(40)])
        assert train.cached == 40
        before = train.cache.stats().allocated_bytes
        assert train.cache.evict("1MiB") > 0
        train.__getitems__([*range(40)])
        train.cache.resize(before // 2)
        assert train.cached < 40
        with pytest.raises(TypeError, match=r"got <CachedDataset .*: pass its \.cache, which has the items"):
            ac.Loader(train)


def test_who_asks_for_its_cache_finds_all_items_that_were_made(path):
    """What was published later began a lease that kept `resize` from them."""
    with cached(Numbers(40), path, capacity="16MiB") as train:
        train.__getitems__([*range(40)])
        stats = train.cache.stats()
        assert (stats.rows, stats.leased_bytes) == (40, 0)


def test_an_error_of_the_dataset_is_the_users_and_the_item_is_made_again(path):
    class Fails(Numbers):
        fails = True

        def __getitem__(self, index):
            if index == 3 and self.fails:
                raise LookupError("no network")
            return super().__getitem__(index)

    with cached(Fails(6), path, capacity="16MiB") as train:
        with pytest.raises(LookupError, match="no network"):
            train.__getitems__([1, 3, 5])
        Fails.fails = False
        assert [item["y"] for item in train.__getitems__([1, 3, 5])] == [1, 3, 5]
        assert train.stats().made == 3, "1 before the error, then 3 and 5"
        assert train.cached == 4


def test_a_stop_iteration_of_the_dataset_is_an_error(path):
    class Stops(Numbers):
        def __getitem__(self, index):
            if index == 3:
                raise StopIteration("the stream is over")
            return super().__getitem__(index)

    with cached(Stops(5), path, capacity="16MiB") as train:
        with pytest.raises(RuntimeError, match="item 3 of the dataset raised StopIteration") as caught:
            train.__getitems__([1, 3])
        assert str(caught.value.__cause__) == "the stream is over"


@pytest.mark.parametrize("workers", first_is_quick([0, 2]))
def test_a_stop_iteration_of_a_function_is_an_error_of_a_dataloader_and_no_end(path, workers):
    def stop(item):
        if item["y"] == 3:
            raise StopIteration("the stream is over")
        return item

    class Stops(Numbers):
        def __getitems__(self, indices):
            return [stop(self[index]) for index in indices]

    with cached(Numbers(6), path, capacity="16MiB", transform=stop) as train:
        for batch_size in (2, None):
            with pytest.raises(RuntimeError, match="raised StopIteration"):
                list(DataLoader(train, batch_size, num_workers=workers))
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            list(train)
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            train[2:5]
    with cached(Stops(6), path.with_name("by list"), capacity="16MiB") as train:
        with pytest.raises(RuntimeError, match="__getitems__ of the dataset raised StopIteration"):
            list(DataLoader(train, 2, num_workers=workers))
        with pytest.raises(RuntimeError, match="__getitems__ of the dataset raised StopIteration"):
            train.fill(workers=workers)


def test_the_workers_of_a_fill_that_failed_end_while_its_error_is_kept(path):
    class Fails(Numbers):
        def __getitem__(self, index):
            if index == 3:
                raise LookupError("no network")
            return super().__getitem__(index)

    with cached(Fails(40), path, capacity="16MiB") as train:
        with pytest.raises(LookupError, match="no network") as caught:
            train.fill(workers=2, progress=False)
        wait_until(lambda: not own_children(), "the workers to end")
        assert caught.tb is not None


def test_the_workers_of_a_fill_that_ctrl_c_ends_finish_the_items_they_are_at_and_begin_no_others(path):
    """Each went on to the end of its batch of items; torch waited 5 s for it, then killed it."""
    goes_on, begun = multiprocessing.Semaphore(1), multiprocessing.Value("i", 0)

    class Gated(Numbers):
        def __getitem__(self, index):
            with begun:
                begun.value += 1
            assert goes_on.acquire(timeout=DEADLINE_SECONDS)
            return super().__getitem__(index)

    def is_ending() -> bool:
        frames = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident])
        return any(frame.f_code.co_name == "end_workers" for frame, _ in frames)

    def interrupt() -> None:
        wait_until(lambda: begun.value == 3, "both workers to be at an item")
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(is_ending, "the workers to be ended")
        for _ in range(40):
            goes_on.release()

    with cached(Gated(40), path, capacity="16MiB") as train, ThreadPoolExecutor(1) as pool:
        interrupting = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            train.fill(workers=2, progress=False)
        interrupting.result()
        assert not own_children()
        assert begun.value == 3
        assert train.cached == 3


@pytest.mark.parametrize("given", [[4], [], [4, 5, 5]], ids=["fewer", "none", "more"])
@pytest.mark.parametrize(("on_error", "reads"), [("raise", 1), ("skip", 1), ("raise", 2)])
def test_as_many_items_as_indices_are_given_or_an_error_says_so(path, given, on_error, reads):
    class Filters(Numbers):
        def __getitems__(self, indices):
            return [self[index] for index in indices if index < 4] + [self[4]] * (len(given) * (5 in indices))

    says = rf"gave {len(given)} items? for the indices \[(4, )?5\]: give one for each.* None for one"
    with cached(Filters(6), path, capacity="16MiB", on_error=on_error) as train:
        for work in (
            lambda: list(Loader(train, 2, shuffle=False, workers=0, reads=reads)),
            lambda: train.fill(workers=0, progress=False),
            lambda: train[4:6],
        ):
            with pytest.raises(ac.SchemaError, match="for the indices"):
                work()
        with pytest.raises(ac.SchemaError, match=says):
            train.__getitems__([4, 5])


def worked_in(path) -> None:
    with cached(Numbers(6), path, capacity="16MiB") as train:
        for work in (train.fill, lambda: list(Loader(train, 2, workers=2))):
            with pytest.raises(ValueError, match=r"a daemonic process.* pass workers=0"):
                work()
        assert train.fill(workers=0) == 6
        assert len(list(Loader(train, 2, workers=0))) == 3


def test_a_daemonic_process_is_told_to_have_no_workers(path):
    with Child(worked_in, path, daemon=True) as child:
        child.result()


@pytest.mark.filterwarnings("error")
def test_more_workers_than_processors_are_no_warning(path):
    with cached(Numbers(40), path, capacity="16MiB") as train:
        assert train.fill(workers=1 + (os.cpu_count() or 1), progress=False) == 40


def test_an_index_error_of_an_item_is_no_end_of_a_dataset(path):
    def look_up(item):
        return [0, 1, 2][int(item["y"])]

    with cached(Numbers(6), path, capacity="16MiB", transform=look_up) as train:
        found = []
        with pytest.raises(IndexError, match="list index out of range"):
            found.extend(train)
        assert found == [0, 1, 2]


def test_an_os_error_of_an_item_is_the_datasets_and_stops_no_storing(path):
    """Image.open is lazy: the error comes as the item is stored."""
    Image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(buffer, "PNG")
    whole = buffer.getvalue()

    class Lazy(Numbers):
        def __getitem__(self, index):
            return Image.open(io.BytesIO(whole[: len(whole) // 2] if index == 3 else whole))

    with cached(Lazy(6), path, capacity="16MiB") as train:
        for index in (1, 2, 4, 5):
            train[index]
            with pytest.raises(OSError, match="truncated"):
                train[3]
        assert train.cached == 5


def test_many_are_asked_for_at_once_where_the_dataset_can(path):
    class Asked(Many):
        asked: ClassVar[list[Any]] = []

        def __getitems__(self, indices):
            self.asked.append(indices)
            return super().__getitems__(indices)

    with cached(Asked(9), path, capacity="16MiB") as train:
        assert Asked.asked == [[1, 0]]  # once, to be compared with the first item
        Asked.asked.clear()
        for _ in range(2):
            assert [item["y"] for item in train.__getitems__([1, 2, 8])] == [1, 2, 8]
        assert Asked.asked == [[1, 2, 8]]


# larger than the capacity


def test_what_is_in_stays_in(path, log):
    with cached(Large(100, log), path, capacity="8MiB") as train:
        for _ in range(3):
            assert [item["x"][0, 0] for item in map(train.__getitem__, range(100))] == [*range(100)]
        stats = train.stats()
        assert stats.is_full
        assert 50 <= stats.cached < 64
        assert stats.hit_rate == stats.cached / 100
        assert "it is full" in str(train)
        assert train.cache.stats().evicted_rows == 0
        assert train.cache.stats().allocated_bytes <= 8 << 20
    again = sum(count - 1 for count in made(log).values())
    assert again <= 2 * (100 - stats.cached) + 8, "of what is not in, and the last part that found no room"


def test_who_looks_at_its_cache_reads_how_much_of_the_dataset_is_in(path, capsys):
    commands = pytest.importorskip("arrowcache.cli.commands", reason="the extra 'explore' is not installed")
    from arrowcache.explore.live_view import Board

    with cached(Numbers(1250), path, capacity="64MiB") as train:
        train.__getitems__([*range(1000)])
        says = f"cached {train.cached:,} of 1,250 items (80 %)"
        assert train.cached == 1000
        assert train.cache.stats().hit_rate == 0.8
        assert says in str(train.cache)
        board = Board(path)
        board.look()
        assert says in board.card().as_text()
        assert commands.run(["info", str(path)]) == 0
        assert says in capsys.readouterr().out


def test_more_room_is_used_at_once(path):
    with cached(Large(40), path, capacity="2MiB") as train:
        train.__getitems__([*range(40)])
        assert train.stats().is_full
        train.cache.resize("32MiB")
        for index in range(40):
            train[index]
        assert train.cached == 40
        assert not train.stats().is_full


def test_evict_and_resize_do_what_they_say(path):
    with cached(Large(20), path, capacity="32MiB") as train:
        train.__getitems__([*range(20)])
        assert train.cached == 20
        wait_until(lambda: not train.cache.stats().leased_bytes, "the lease to end")
        assert train.cache.evict("1MiB") >= 1 << 20
        assert train.cached < 20
        assert [item["y"] for item in train.__getitems__([*range(20)])] == [*range(20)]
        assert train.cached == 20
        train.drain()
        train.cache.resize("2.5MiB")
        assert 0 < train.cached < 20
        assert train.stats().is_full
        assert [item["y"] for item in train.__getitems__([*range(20)])] == [*range(20)]


@pytest.mark.parametrize("look", [str, lambda train: train.cached, lambda train: train.fill(0, False)])
def test_who_looks_leases_nothing_soon(path, look):
    with cached(Numbers(20), path, capacity="16MiB") as train:
        look(train)
        wait_until(lambda: not train.cache.stats().leased_bytes, "the lease to end")


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_a_share_turns_over_after_an_epoch_of_workers(path, persistent):
    with cached(Large(120), path, capacity="8MiB", replace=0.25) as train:
        loader = DataLoader(train, 8, num_workers=2, persistent_workers=persistent)
        for _ in range(2):
            for _batch in loader:
                pass
            assert train.turn_over() > 0
        del loader


def test_a_share_turns_over_between_epochs(path):
    with cached(Large(100), path, capacity="8MiB", replace=0.25) as train:
        assert train.turn_over() == 0, "it is not full"
        for index in range(100):
            train[index]
        before, cached_before = {*there(train)}, train.cached
        assert 12 <= train.turn_over() <= 18
        for index in reversed(range(100)):
            train[index]
        assert abs(train.cached - cached_before) <= 2
        assert 8 <= len({*there(train)} - before) <= 18
    with cached(Large(100), path, capacity="8MiB") as train:
        assert train.turn_over() == 0, "nothing is to be replaced"


def test_an_item_larger_than_a_segment_is_made_each_time(path):
    items = [{"text": "a" * length} for length in (10, 10, 3_000_000)]
    with cached(Items(*items), path, capacity="4MiB") as train:
        says = "item 2 is not stored, but made each time: a row needs .*: in a new folder, a larger capacity"
        with pytest.warns(RuntimeWarning, match=says):
            assert train[2] == items[2]
        assert train[1] == items[1]
        assert train.cached == 2


def test_fill_makes_what_is_missing(path, log, capsys):
    with cached(Numbers(50, log), path, capacity="16MiB") as train:
        train[7]
        assert train.fill(workers=2, progress=True) == 50
        assert train.fill(workers=0) == 50
        epoch(train)
    assert made(log) == Counter(range(50))
    assert "48/48" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [0, 2])
def test_fill_ends_where_no_more_fits(path, log, workers):
    with cached(Large(200, log), path, capacity="8MiB") as train:
        assert 40 <= train.fill(workers) < 64
    assert sum(made(log).values()) < 130


def states() -> tuple[bytes, bytes, object]:
    """Of the random generators that belong to the user."""
    of_numpy = pickle.dumps(np.random.get_state())  # noqa: NPY002  # as users have it
    return torch.get_rng_state().numpy().tobytes(), of_numpy, random.getstate()


class Drawn(Numbers):
    """With numbers from each global generator."""

    def __getitem__(self, index):
        return super().__getitem__(index) | {"drawn": drawn()}


def drawn():
    return [torch.rand(()).item(), random.random(), np.random.randn()]  # noqa: NPY002


@pytest.mark.parametrize("way", [0, 2, "epoch", "epoch of workers", "device", "one", "many", "turned over"])
def test_making_items_draws_from_no_generator_of_the_user(path, way):
    np.random.randn()  # of two numbers, one of which is kept for the next call  # noqa: NPY002
    before = states()
    with cached(Drawn(30), path, capacity="16MiB", replace=0.5) as train:
        if way in (0, 2):
            train.fill(way, progress=False)
        elif way == "one":
            train[3], train[-4]
        elif way == "many":
            train.__getitems__([4, 5, 6])
        elif way == "turned over":
            train.turn_over()
        else:
            options = {"device": "cpu"} if way == "device" else {}
            with Loader(train, 8, workers=2 if way == "epoch of workers" else 0, **options) as loader:
                for _ in range(2):
                    list(loader)
                    loader.load_state_dict(loader.state_dict())
        assert states() == before


SEEDED_HERE = """
    import sys, random
    import numpy as np, torch
    from arrowcache.torch import cached
    from datasets_of_items import Items

    class Drawn(Items):
        def __getitem__(self, index):
            return drawn()

    def drawn():
        return [torch.rand(()).item(), random.random(), np.random.randn()]

    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    with cached(Drawn(*range(12)), sys.argv[1], capacity="16MiB") as train:
        print([train[index] for index in range(9)] + train.__getitems__([9, 10, 11]) + [drawn()])
"""


def test_items_that_this_process_makes_have_random_numbers_that_a_seed_tells(tmp_path):
    lines = []
    for path in (tmp_path / "one", tmp_path / "other"):
        with Script(SEEDED_HERE, path) as script:
            lines.append(ast.literal_eval(script.line()))
            assert script.end() == (0, "")
    assert lines[0] == lines[1]
    assert [len({*column}) for column in zip(*lines[0], strict=True)] == [13] * 3


def test_threads_that_make_items_at_once_give_the_generators_back(path):
    inside = threading.Barrier(3, timeout=60)

    class Met(Drawn):
        def __getitem__(self, index):
            if index:
                inside.wait()
            return super().__getitem__(index)

    with cached(Met(4), path, capacity="16MiB") as train:
        before = states()
        with ThreadPoolExecutor(3) as threads:
            made = [item["drawn"] for item in threads.map(train.__getitem__, (1, 2, 3))]
        assert states() == before
    assert [len({*column}) for column in zip(*made, strict=True)] == [3] * 3


def test_a_process_that_is_forked_while_items_are_made_has_the_generators(path):
    class Forking(Drawn):
        def __getitem__(self, index):
            if index == 1:
                with in_child(look):
                    pass
            return super().__getitem__(index)

    def look():
        assert states()[:2] == before[:2]  # Python's is seeded anew after a fork
        last = states()
        train[2]
        assert states() == last

    with cached(Forking(3), path, capacity="16MiB") as train:
        before = states()
        train[1]
        assert states() == before


OTHER_GENERATOR = """
    import sys
    import numpy as np
    from arrowcache.torch import cached
    from datasets_of_items import Items

    class Drawn(Items):
        def __getitem__(self, index):
            return np.random.rand()

    np.random.set_bit_generator(np.random.PCG64(3))
    with cached(Drawn(1, 2, 3), sys.argv[1], capacity="16MiB") as train:
        print(len({train[index] for index in range(3)}))
"""


def test_items_may_be_drawn_from_another_generator_of_numpy(path):
    with Script(OTHER_GENERATOR, path) as script:
        assert script.line() == "3"
        assert script.end() == (0, "")


SEEDED = """
    import sys, random
    import numpy as np, torch
    from arrowcache.torch import Loader, cached
    from datasets_of_items import Numbers
    from torch.utils.data import get_worker_info

    def transform(item):
        drawn = [torch.randint(2**30, ()).item(), int(np.random.randint(2**30)), random.randrange(2**30)]
        return get_worker_info().id, drawn

    torch.manual_seed(int(sys.argv[2]))
    train = cached(Numbers(12), sys.argv[1], capacity="16MiB", transform=transform)
    for loader in Loader(train, 2, workers=2, collate_fn=list), Loader(train, 2, workers=2, collate_fn=list):
        with loader:
            print([item for _ in range(2) for batch in loader for item in batch])
    train.fill(2, progress=False)
    print(torch.rand(3).tolist())
"""


@pytest.mark.slow
def test_a_seeded_script_has_the_same_numbers_whether_items_are_stored_or_made(path):
    """Also in its workers, each of which has others, in each epoch and loader."""
    lines = []
    for run, seed in enumerate([3, 3, 4]):
        with Script(SEEDED, path, seed) as script:
            lines.append([ast.literal_eval(script.line()) for _ in range(3)])
            assert script.end() == (0, ""), run
    made, stored, other = lines
    assert made == stored
    drawn = [number for epochs in made[:2] + other[:2] for _, numbers in epochs for number in numbers]
    assert len(set(drawn)) == len(drawn) == 4 * 24 * 3
    assert {worker for worker, _ in made[0]} == {0, 1}


NO_GUARD = """
    import multiprocessing, sys
    multiprocessing.set_start_method("forkserver")  # the default from Python 3.14 on
    from arrowcache.torch import cached
    from datasets_of_items import Numbers

    print(cached(Numbers(10), sys.argv[1], capacity="16MiB").fill(workers=2, progress=False))
"""


@pytest.mark.slow
def test_fill_needs_no_main_guard(path):
    script = path.with_name("script.py")
    script.write_text(textwrap.dedent(NO_GUARD))
    code = "import runpy, sys; runpy.run_path(sys.argv[2], run_name='__main__')"
    with Script(code, path, script, new_interpreter=True) as ended:
        assert ended.line() == "10"
        assert ended.end() == (0, "")


# where it lies


def test_what_was_published_is_there_again(path, log):
    with cached(Numbers(30, log), path, capacity="16MiB") as train:
        epoch(train)
    log.unlink()
    with cached(Numbers(30, log), path, capacity="16MiB") as train:
        assert train.cached == 30
        epoch(train)
    assert made(log) == {0: 1}, "the first item shows the columns"


@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        (
            Numbers(30),
            {"version": "b"},
            "holds 30 items of version 'a', and this dataset has 30 items of version 'b'",
        ),
        (
            Numbers(31),
            {"version": "a"},
            "holds 30 items of version 'a', and this dataset has 31 items of version 'a'",
        ),
        (Items(*range(30)), {"version": "a"}, "holds items of other columns"),
    ],
)
def test_another_dataset_is_refused(path, dataset, options, says):
    cached(Numbers(30), path, capacity="16MiB", version="a").close()
    before = sorted((file, file.stat().st_mtime) for file in path.rglob("*"))
    with pytest.raises(ac.CacheFormatError, match=says):
        cached(dataset, path, capacity="32MiB", **options)
    assert sorted((file, file.stat().st_mtime) for file in path.rglob("*")) == before


def image(mode):
    return pytest.importorskip("PIL.Image").new("RGB", (4, 4), "red").convert(mode)


@pytest.mark.parametrize(
    ("first", "other", "says"),
    [
        (lambda: image("RGB"), lambda: image("HSV"), "holds items of value: RGB, .* has value: HSV"),
        (lambda: {"x": torch.ones(2)}, lambda: {"x": np.ones(2, "f4")}, "x: Tensor, .* has x: ndarray"),
    ],
)
def test_values_of_other_classes_in_the_same_columns_are_refused(path, first, other, says):
    cached(Items(first()), path, capacity="16MiB").close()
    with pytest.raises(ac.CacheFormatError, match=says):
        cached(Items(other()), path, capacity="16MiB")
    cached(Items(first()), path, capacity="16MiB").close()


def test_a_job_whose_folder_is_another_cache_now_neither_writes_nor_reads_there(path):
    old = cached(Numbers(30), path, capacity="16MiB", version="a")
    old.__getitems__([*range(10)])
    shutil.rmtree(path)
    items = [Numbers(30)[index] | {"y": 1000 + index} for index in range(30)]
    with cached(Items(*items), path, capacity="16MiB", version="b") as new:
        new.__getitems__([*range(5)])
        assert new.cached == 5
        with pytest.warns(RuntimeWarning, match=r"is another cache now, of 30 items of version 'b'"):
            assert [item["y"] for item in old.__getitems__([*range(30)])] == [*range(30)]
        old.close()
        assert new.cached == 5
        assert [item["y"] for item in new.__getitems__([*range(30)])] == [*range(1000, 1030)]


def test_a_rolling_cache_is_refused_and_a_datasets_cache_is_no_rolling_one(path, tmp_path):
    ac.Cache.create(tmp_path / "rolling", {"x": ac.String()}, "100MiB", "1MiB")
    with pytest.raises(ac.CacheFormatError, match="is a rolling cache"):
        cached(Numbers(3), tmp_path / "rolling", capacity="100MiB")
    cached(Numbers(3), path, capacity="100MiB").close()
    with pytest.raises(ac.SchemaError):
        ac.Cache.create(path, {"x": ac.String()}, "100MiB", "1MiB", exist_ok=True)


def test_another_capacity_resizes_it(path):
    cached(Numbers(3), path, capacity="16MiB").close()
    with cached(Numbers(3), path, capacity="32MiB") as train:
        assert train.stats().capacity_bytes == 32 << 20


def test_a_file_is_no_folder(path):
    path.write_text("")
    with pytest.raises(FileExistsError):
        cached(Numbers(3), path, capacity="16MiB")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("dataset", "options", "error", "says"),
    [
        (Stream(), {}, ValueError, "the stream is empty"),
        (3, {}, TypeError, "a length and items by index.*; got int"),
        (Numbers(0), {}, ValueError, "empty"),
        (Numbers(3), {"capacity": "1kB"}, ValueError, "capacity"),
        (Numbers(3), {"capacity": "many"}, ValueError, "capacity"),
        (Numbers(3), {"version": 3}, TypeError, "version must be a text"),
        (Numbers(3), {"replace": 1}, ValueError, "replace=1 is a share"),
        (Numbers(3), {"transform": 3}, TypeError, "transform"),
        (Numbers(3), {"columns": ["z"]}, ValueError, "columns names 'z'"),
        (Numbers(3), {"schema": {"z": ac.String()}}, ValueError, "schema names 'z'"),
        (Numbers(3), {"schema": {"y": ac.String()}}, ac.SchemaError, "field 'y': expected str"),
    ],
)
def test_a_wrong_argument_is_refused(path, dataset, options, error, says):
    with pytest.raises(error, match=says):
        cached(dataset, path, **{"capacity": "16MiB"} | options)
    assert not path.exists()


def test_a_cached_dataset_is_not_cached_again(path, tmp_path):
    with (
        cached(Numbers(3), path, capacity="16MiB") as train,
        pytest.raises(TypeError, match="cached already"),
    ):
        cached(train, tmp_path / "other", capacity="16MiB")


def test_a_closed_one_says_so(path):
    train = cached(Numbers(3), path, capacity="16MiB")
    train.close()
    train.close()
    with pytest.raises(ValueError, match=r"closed: make it again with arrowcache\.torch\.cached"):
        train[0]


def test_it_pickles_as_its_arguments(path):
    with cached(Numbers(5), path, capacity="16MiB", transform=lambda item: item["y"]) as train:
        train.__getitems__([*range(5)])
        with pickle.loads(pickle.dumps(train)) as again:
            assert isinstance(again, CachedDataset)
            assert again.__getitems__([*range(5)]) == [*range(5)]


# trouble


def test_a_damaged_segment_is_made_again(path, log):
    with cached(Numbers(30, log), path, capacity="16MiB") as train:
        train.__getitems__([*range(30)])
    flip_byte(segment_files(ac.Cache.open(path))[-1], 4)  # of all but the first item
    with pytest.warns(RuntimeWarning, match="quarantined"):
        train = cached(Numbers(30, log), path, capacity="16MiB")
    with train:
        epoch(train)
        assert train.cached == 30
    assert made(log) == Counter([*range(30)] * 2)


KILLED = """
    import sys, torch
    from torch.utils.data import DataLoader
    from arrowcache.torch import cached
    from datasets_of_items import Large

    train = cached(Large(400, None, 0.0005), sys.argv[1], capacity="64MiB")
    print("begun", flush=True)
    for _ in range(1000):
        print("an epoch", flush=True)
        for batch in DataLoader(train, 8, shuffle=True, num_workers=2):
            numbers = batch["y"]
            assert torch.equal(batch["x"], numbers.float()[:, None, None].expand(-1, 32, 1024))
"""


@pytest.mark.slow
def test_kills_in_mid_epoch_lose_and_spoil_nothing_that_was_published(path):
    before: set[int] = set()
    for seconds in (0.05, 0.35, 0.95, None):
        with Script(KILLED, path) as script:
            assert script.line() == "begun"
            assert script.line() == "an epoch"
            if seconds is None:
                assert script.line() == "an epoch"
            else:
                time.sleep(seconds)
            script.signal_group(signal.SIGKILL)
        with cached(Large(400), path, capacity="64MiB") as train:
            now = {*there(train)}
            assert before <= now
            before = now
            assert all(torch.equal(train[index]["x"], large(index)) for index in now)
            assert ac.Cache.open(path).verify() == []
    assert before == {*range(400)}, "an epoch's workers published what they made"


def test_a_forked_child_has_a_reader_of_its_own(path, log):
    with cached(Numbers(30, log), path, capacity="16MiB") as train:
        train.__getitems__([*range(10)])
        with in_child(lambda: check_all(train, range(20))):
            pass
        assert train.cached == 20
    assert made(log) == Counter(range(20))


SLOW = """
    import sys, warnings
    import torch
    from arrowcache.torch import cached

    class Large:
        def __len__(self): return 40
        def __getitem__(self, index): return torch.full((32, 1024), float(index))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train = cached(Large(), sys.argv[1], capacity="16MiB")
        for _ in range(2):
            for index in range(40):
                assert (train[index] == index).all()
        train.close()
    print(train.__class__.__name__, *{str(each.message).partition(":")[0] for each in caught}, sep="|")
"""


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
def test_a_read_only_disk_leaves_a_slow_dataset_and_a_warning(path, there):
    path.mkdir()
    if there:
        cached(Items(*map(large, range(40))), path, capacity="16MiB").close()
    mount = f'mount --bind "{path}" "{path}" && mount -o remount,bind,ro "{path}" && exec "$@"'
    with Script(SLOW, path, within=[*private_mounts(), "sh", "-c", mount, "sh"]) as script:
        assert script.line() == "CachedDataset|items are made, and not stored"
        assert script.end() == (0, "")


@pytest.mark.slow
def test_a_full_disk_leaves_a_slow_dataset_and_a_warning(path):
    path.mkdir()
    with Script(SLOW, path / "cache", within=small_disk(path, "2m")) as script:
        says = script.line().split("|")
        assert says[0] == "CachedDataset"
        assert "items are made, and not stored" in says
        assert script.end() == (0, "")


def test_a_folder_that_is_removed_leaves_a_slow_dataset_and_a_warning(path):
    with cached(Numbers(30), path, capacity="16MiB") as train:
        train.__getitems__([*range(20)])
        train.__getitems__([*range(20)])
        shutil.rmtree(path)
        with pytest.warns(RuntimeWarning, match="items are made"):
            assert [item["y"] for item in train.__getitems__([*range(30)])] == [*range(30)]
        assert "moved or removed" in train.stats().trouble
        assert "not stored now" in str(train)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert train.cached == 0
            train.close()


def test_a_cache_that_failed_is_tried_again_after_half_a_minute(path, monkeypatch):
    with cached(Numbers(5), path, capacity="16MiB") as train:
        path.rename(path.with_name("away"))
        limit(monkeypatch, backoff_seconds=1.5)
        with pytest.warns(RuntimeWarning, match="items are made"):
            train[1]
        path.with_name("away").rename(path)
        train[2]
        assert train.cached == 1, "it is not tried yet"
        wait_until(lambda: not train.stats().trouble, "the half minute's end")
        train[3]
        assert train.cached == 2
