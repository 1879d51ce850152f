"""A loader of a cached dataset: the batches of a stock DataLoader, each item once an epoch."""

from __future__ import annotations

import gc
import io
import itertools
import os
import re
import shutil
import signal
import sys
import threading
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from begun import own_children, own_threads
from datasets_of_items import KINDS, Items, Large, Numbers, check, made, pairs, same, there
from helpers import flip_byte, in_child, limit, segment_files, wait_until
from interruptions import Interruption, files, interruptions, library
from nested import Scan
from processes import METHODS, Script
from quick import SEED, one_in, some_of
from torch.utils.data import DataLoader, get_worker_info

import arrowcache as ac
from arrowcache.storage.counters import LOADER_LINK
from arrowcache.torch import CachedLoader, Loader, cached, packed

LENGTH = 95


@pytest.fixture
def train(path):
    """Of 95 items, all in the cache."""
    with full(path) as train:
        yield train


@pytest.fixture(scope="module")
def full_train(tmp_path_factory):
    """The same, for tests that only read it."""
    with full(tmp_path_factory.mktemp("full") / "cache") as train:
        yield train


@contextmanager
def full(path):
    with cached(Numbers(LENGTH), path, capacity="64MiB") as train:
        train.__getitems__([*range(LENGTH)])
        train.drain()
        yield train


def numbers(batches):
    return [check(batch) for batch in batches]


def collate_list(items):
    return [int(item) for item in items]


def flat(batches):
    return [*itertools.chain.from_iterable(numbers(batches))]


# batches


def collates(items):
    try:
        torch.utils.data.default_collate(items)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_that_of_a_dataloader_whether_its_items_are_made_or_read(path, kind):
    items = KINDS[kind]
    with cached(Items(*items), path, capacity="16MiB") as train:
        loader = Loader(train, 3, shuffle=False, workers=0)
        batches = [batch for _ in range(2) for batch in loader]
        assert train.stats().made == 2, "the first was made by `cached`"
        loader.close()
        stock = next(iter(DataLoader(train, 3))) if collates(items) else None
    assert len(batches) == 2
    assert same(*batches)
    if stock is not None:
        assert same(batches[0], stock)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.full((5, 6, 3), n).permute(2, 0, 1),
        lambda n: torch.full((3, 4), n, dtype=torch.bfloat16).t(),
        lambda n: np.full((3, 4), n, order="F"),
    ],
    ids=["an image", "transposed", "an array"],
)
def test_a_batch_lies_in_memory_as_that_of_a_dataloader_in_each_epoch(path, make):
    with cached(Items(*map(make, range(4))), path, capacity="16MiB") as train:
        (stock,) = DataLoader(Items(*map(make, range(4))), 4)
        with Loader(train, 4, shuffle=False, workers=0) as loader:
            (first,) = loader
            assert train.cached == 4
            train.drain()
            (second,) = loader
    assert stock.is_contiguous()
    for batch in (first, second):
        assert torch.equal(batch, stock)
        assert batch.stride() == stock.stride()


def test_a_batch_that_nobody_keeps_gives_its_memory_back_without_the_garbage_collector(path):
    items = [{"x": torch.full((64,), float(n)), "more": (n,)} for n in range(64)]
    with cached(Items(*items), path, capacity="16MiB") as train:
        train.fill(workers=0, progress=False)
        with Loader(train, 1, workers=0, prefetch=0) as loader:
            gc.collect()
            gc.disable()
            try:
                assert sum(1 for _ in loader) == 64
            finally:
                gc.enable()
            assert loader.stats().slot_growths <= 8, "four batches at a time, of two columns"


def test_the_first_batches_of_large_items_take_no_more_memory_than_later_ones(path, monkeypatch):
    limit(monkeypatch, ahead_bytes=1 << 20)
    items = [torch.full((16384,), float(n)) for n in range(64)]
    with cached(Items(*items), path, capacity="16MiB") as train:
        train.fill(workers=0, progress=False)
    with cached(Items(*items), path, capacity="16MiB") as train, Loader(train, 1, workers=0) as loader:
        next(iter(loader))
        assert train.reader_here().read_mode.is_cold, "so 16 batches are begun ahead, each of 64 KiB"
        assert loader.stats().slot_bytes <= 20 * (64 << 10)


def test_what_a_dataloader_refuses_comes_as_a_loader_gives_it(path):
    Image = pytest.importorskip("PIL.Image")
    items = pairs(
        lambda n: {
            "scan": Scan(torch.tensor([n]), n),
            "number": complex(n, 1),
            "image": Image.fromarray(np.full((2, 3, 3), n, np.uint8)),
            "tokens": torch.arange(n),
        }
    )
    with cached(Items(*items), path, capacity="16MiB", schema={"tokens": ac.Ragged("int64")}) as train:
        loader = Loader(train, 3, shuffle=False, workers=0)
        for batch in itertools.chain(loader, loader):
            assert same(batch["scan"], Scan(torch.tensor([[0], [1], [2]]), torch.tensor([0, 1, 2])))
            assert same(batch["number"], torch.tensor([1j, 1 + 1j, 2 + 1j], dtype=torch.complex128))
            assert batch["image"].shape == (3, 2, 3, 3)
            assert batch["image"][:, 0, 0, 0].tolist() == [0, 1, 2]
            assert [row.tolist() for row in batch["tokens"].unbind()] == [[], [0], [0, 1]]
        loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_and_a_collate_function_do_what_they_do_in_a_dataloader(path, workers):
    def transform(item):
        return item["y"], get_worker_info() is not None

    with cached(Numbers(20), path, capacity="16MiB", transform=transform) as train:
        with Loader(train, 8, shuffle=False, workers=workers) as loader:
            for _ in range(2):
                batches = [*loader]
                assert [y.tolist() for y, _ in batches] == [[*range(8)], [*range(8, 16)], [*range(16, 20)]]
                assert all(flag.tolist() == [workers > 0] * len(flag) for _, flag in batches)
        with Loader(train, 8, workers=workers, collate_fn=lambda items: {y for y, _ in items}) as loader:
            assert sorted(itertools.chain.from_iterable(loader)) == [*range(20)]


@pytest.mark.parametrize("wrap", [lambda array: array, lambda array: {"y": [array]}], ids=["array", "inside"])
def test_a_masked_array_of_a_transform_is_refused(path, wrap):
    """The batch had what lies behind the mask."""

    def transform(item):
        return wrap(np.ma.array([item["y"], 1], mask=[True, False]))

    with (
        cached(Numbers(8), path, capacity="16MiB", transform=transform) as train,
        Loader(train, 8, workers=0) as loader,
        pytest.raises(TypeError, match=r"an item has a masked array, whose mask .*\.filled\(0\)"),
    ):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 3], ids=["here", "3"])  # more than a small machine's processors
def test_each_item_comes_once_an_epoch_in_an_order_of_its_own_and_is_made_once(path, log, workers):
    with cached(Numbers(LENGTH, log), path, capacity="64MiB") as train:
        loader = Loader(train, 10, workers=workers)
        assert len(loader) == loader.steps == 10
        epochs = [flat(loader) for _ in range(3)]
        assert train.cached == LENGTH
        assert not own_children(), "nothing is missing, so no worker is there any more"
        loader.close()
    assert all(sorted(epoch) == [*range(LENGTH)] for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert made(log) == Counter(range(LENGTH))


def test_repeat_gives_one_epoch_after_another_and_a_state_tells_which(train):
    with Loader(train, 10, seed=5) as loader, Loader(train, 10, seed=5) as other:
        epochs = [flat(other) for _ in range(3)]
        some = [*itertools.islice(loader.repeat(), 13)]
        assert flat(some) == epochs[0] + epochs[1][:30]
        other.load_state_dict(loader.state_dict())
        batches = other.repeat()
        assert flat(itertools.islice(batches, 17)) == epochs[1][30:] + epochs[2]


@pytest.mark.parametrize("taken", [3, 10, 13])
@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda loader: loader.load_state_dict(loader.state_dict()), "a state was loaded"),
        (lambda loader: next(iter(loader)), "a newer one began"),
        (lambda loader: loader.close(), "the loader was closed"),
    ],
)
def test_endless_batches_that_are_cut_short_raise_each_time(full_train, taken, device, act, says):
    loader = Loader(full_train, 10, workers=0, device=device)
    batches = loader.repeat()
    assert len([*itertools.islice(batches, taken)]) == taken
    act(loader)
    if says == "the loader was closed" and taken == len(loader):
        assert [*batches] == [], "nothing is cut short between two epochs"
        return
    for _ in range(3):
        with pytest.raises(RuntimeError, match=says):
            next(batches)
    loader.close()


def test_endless_batches_that_their_consumer_closes_end_in_silence(train):
    with Loader(train, 10, workers=0) as loader:
        for taken in (0, 3, 10):
            batches = loader.repeat()
            assert len([*itertools.islice(batches, taken)]) == taken
            batches.close()
            assert [*batches] == []
        assert sorted(flat(loader)) == [*range(LENGTH)]


def test_an_error_in_place_of_an_endless_batch_comes_once(path):
    def transform(item):
        raise ValueError("this item is bad")

    with cached(Numbers(8), path, capacity="16MiB", transform=transform) as train:
        batches = Loader(train, 4, workers=0).repeat()
        with pytest.raises(ValueError, match="is bad"):
            next(batches)
        assert [*batches] == []


@pytest.mark.parametrize("stored", [True, False])
def test_threads_share_endless_batches_each_of_which_goes_to_one_of_them(path, stored):
    with cached(Numbers(LENGTH), path, capacity="64MiB") as train:
        if stored:
            train.__getitems__([*range(LENGTH)])
        with Loader(train, 5, workers=0) as loader:
            batches, got, failed = loader.repeat(), [], []

            def take():
                try:
                    got.extend(check(batch) for batch in itertools.islice(batches, 19))
                except BaseException as error:
                    failed.append(error)
                    raise

            threads = [threading.Thread(target=take) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert not failed
    assert Counter(itertools.chain(*got)) == dict.fromkeys(range(LENGTH), 4)


def test_a_forked_child_is_told_that_endless_batches_are_of_its_parent(train):
    with Loader(train, 10, workers=0) as loader:
        batches = loader.repeat()
        next(batches)

        def child():
            with pytest.raises(ValueError, match="iterate anew here"):
                next(batches)

        with in_child(child):
            assert len([*itertools.islice(batches, 12)]) == 12


def test_each_endless_epoch_asks_for_its_rank_and_nothing_else_changes_it(path, monkeypatch):
    loader = Loader(cached([*range(8)], path, capacity="1MB"), 2, workers=0, shuffle=False)
    endless = loader.repeat()
    first = [next(endless).tolist() for _ in range(2)]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    later = [next(endless).tolist() for _ in range(4)]
    assert len(loader) == 2
    assert first + later == [[0, 1], [2, 3], [4, 5], [6, 7], [2, 3], [6, 7]]


@pytest.mark.slow
def test_an_epoch_gets_no_batch_of_one_that_another_thread_began_meanwhile(path):
    train, held = cached([*range(40)], path, capacity="1MB"), threading.Event()
    with Loader(train, 4, workers=2, collate_fn=collate_list) as loader:
        assert len([*loader]) == 10
        turn_over, waits, others = train.turn_over, [held], []
        train.turn_over = lambda: (waits.pop().wait(60) if waits else None, turn_over())
        other = threading.Thread(target=lambda: others.append(iter(loader)))
        other.start()
        wait_until(lambda: not waits, "the other thread to begin its epoch")
        mine = iter(loader)
        batches = [next(mine)]
        held.set()
        other.join()
        batches += mine
        assert sorted(item for batch in batches for item in batch) == [*range(40)]


def test_the_order_is_that_of_seed_and_epoch_wherever_items_lie(path, tmp_path, train):
    with cached(Numbers(LENGTH), tmp_path / "other", capacity="64MiB") as other:
        other.__getitems__([*range(50, LENGTH)])
        one, two = Loader(train, 10, seed=3), Loader(other, 10, seed=3, workers=0)
        assert [flat(one), flat(one)] == [flat(two), flat(two)]
        assert flat(Loader(train, 10, seed=4)) != flat(Loader(train, 10, seed=3))
        assert flat(Loader(train, 10, shuffle=None)) == flat(DataLoader(train, 10))


def test_the_last_batch_is_short_or_left_out(train):
    assert list(map(len, numbers(Loader(train, 30)))) == [30, 30, 30, 5]
    loader = Loader(train, 30, drop_last=True)
    assert list(map(len, numbers(loader))) == [30] * 3
    assert len(loader) == 3


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 8), (True, 7)])
def test_ranks_share_an_epoch_in_equally_many_steps(train, drop_last, steps):
    loaders = [Loader(train, 6, drop_last=drop_last, rank=rank, world_size=2) for rank in range(2)]
    for _ in range(2):
        one, two = map(flat, loaders)
        assert len(one) == len(two) == 6 * steps
        assert len({*one, *two}) == min(LENGTH, 12 * steps)
        assert [len(loader) for loader in loaders] == [steps] * 2


@pytest.mark.slow
def test_what_does_not_fit_into_the_capacity_is_made_in_its_place(path, log):
    with cached(Large(100, log), path, capacity="8MiB") as train, Loader(train, 8, workers=2) as loader:
        for _ in range(3):
            seen = []
            for batch in loader:
                assert torch.equal(batch["x"], batch["y"].float()[:, None, None].expand(-1, 32, 1024))
                seen += batch["y"].tolist()
            assert sorted(seen) == [*range(100)]
        assert 50 <= train.cached < 64
        assert loader.stats().rows == 300


def test_a_share_turns_over_between_its_epochs(path):
    with cached(Large(100), path, capacity="8MiB", replace=0.25) as train:
        loader = Loader(train, 8, workers=0)
        found = []
        for _ in range(2):
            for _ in loader:
                pass
            found.append({*there(train)})
        assert 3 <= len(found[1] - found[0]) <= 18
        loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_is_kept_is_never_overwritten(path, workers):
    with cached(Numbers(60), path, capacity="16MiB") as train, Loader(train, 4, workers=workers) as loader:
        kept = [batch for _ in range(4) for batch in loader]
        assert all(map(check, kept))
        kept[20]["x"].fill_(-1)
        assert all(map(check, kept[:20] + kept[21:]))


# an epoch that ends


def stops(loader, count):
    """The items of the first batches of an epoch that is left."""
    return flat(itertools.islice(loader, count))


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_resumed_epoch_has_the_rest_whatever_the_batch_size_and_the_ranks(train, count, shuffle):
    loader = Loader(train, 10, seed=1, shuffle=shuffle)
    flat(loader)
    first = stops(loader, count)
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    again = Loader(train, 7, seed=9)
    again.load_state_dict(state)
    assert first + flat(again) == flat_of_epoch(train, 1, seed=1, shuffle=shuffle)
    assert again.state_dict()["epoch"] == 2


def flat_of_epoch(train, number, **options):
    loader = Loader(train, 10, **options)
    return [flat(loader) for _ in range(number + 1)][-1]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_rest_that_is_less_than_a_batch_is_an_empty_epoch_and_whole(train, device):
    loader = Loader(train, 10, drop_last=True, device=device)
    state = loader.state_dict() | {"position": 90}
    loader.load_state_dict(state)
    assert [*loader] == []
    assert len([*loader]) == 9
    loader.load_state_dict(state)
    assert len([*itertools.islice(loader.repeat(), 12)]) == 12
    loader.load_state_dict(state)
    epoch = iter(loader)
    loader.close()
    assert [*epoch] == []


def test_a_state_of_another_dataset_is_refused(train, path, tmp_path):
    with cached(Numbers(7), tmp_path / "other", capacity="16MiB") as other:
        state = Loader(other, 10).state_dict()
    with pytest.raises(ValueError, match="the state is of 7 rows, and the dataset has 95 items"):
        Loader(train, 10).load_state_dict(state)
    with pytest.raises(ValueError, match="not a state"):
        Loader(train, 10).load_state_dict({})


def test_a_newer_epoch_ends_the_one_before_with_an_error(train):
    loader = Loader(train, 10)
    older = iter(loader)
    next(older)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="a newer one began"):
        next(older)


@pytest.mark.parametrize("there", [True, False], ids=["there", "made"])
@pytest.mark.parametrize("options", [{}, {"workers": 0}, {"device": "cpu"}, {"collate_fn": len}])
def test_an_epoch_whose_dataset_was_closed_is_an_error_or_whole(path, there, options):
    with cached(Numbers(LENGTH), path, capacity="64MiB") as train:
        if there:
            train.fill(workers=0, progress=False)
        loader = Loader(train, 5, **options)
        epoch = iter(loader)
        count = 1
        next(epoch)
        train.close()
        try:
            count += len([*epoch])
        except ValueError as error:
            assert "the dataset is closed" in str(error)  # noqa: PT017  # or none
        else:
            assert count == len(loader)
        loader.close()


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}], ids=["here", "device"])
@pytest.mark.parametrize("where", ["item", "transform", "collate_fn"])
def test_a_close_by_another_thread_within_a_batch_is_told_to_the_consumer(path, where, options):
    """The consumer found the queue of its batches empty, an IndexError."""
    calls = itertools.count()

    def close(value):
        if next(calls) == 12:
            closing.start()
            closing.join(1.0)  # it may wait for this batch
        return value

    class Closes(Numbers):
        def __getitem__(self, index):
            return close(super().__getitem__(index)) if where == "item" else super().__getitem__(index)

    if where == "collate_fn":
        options = {"collate_fn": close, **options}
    transform = {"transform": close} if where == "transform" else {}
    with cached(Closes(LENGTH), path, capacity="64MiB", **transform) as train:
        loader = Loader(train, 5, workers=0, **options)
        closing = threading.Thread(target=loader.close)
        with pytest.raises(RuntimeError, match="the loader was closed, before its last batch"):
            list(loader)
        closing.join()


@pytest.mark.parametrize(
    ("batch_size", "ranks", "step"),
    [(LENGTH + 1, {}, LENGTH + 1), (LENGTH // 2 + 1, {"rank": 1, "world_size": 2}, 2 * (LENGTH // 2 + 1))],
)
def test_an_epoch_without_a_batch_is_an_error(train, batch_size, ranks, step):
    says = f"no epoch has a batch: the dataset's {LENGTH} items are fewer than one step of {step}"
    with Loader(train, batch_size, drop_last=True, **ranks) as loader:
        assert len(loader) == 0
        with pytest.raises(ValueError, match=says):
            iter(loader)
        with pytest.raises(ValueError, match=says):  # it looked for one for ever
            next(loader.repeat())
    with Loader(train, batch_size, **ranks) as loader:
        assert len(list(loader)) == len(loader) == 1


def signal_all(processes, number):
    for process in processes:
        os.kill(process.pid, number)


ENDED = {
    "closed": lambda loader: loader.close(),
    "newer": iter,
    "loaded": lambda loader: loader.load_state_dict(loader.state_dict()),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"device": "cpu"}], ids=["here", "device"])
@pytest.mark.parametrize("how", ENDED)
def test_who_waits_for_workers_is_told_of_an_end_by_another_thread(path, how, options):
    """It waited for ever: a worker of torch's that is told to end drops the requests that it has."""
    told = []

    def consume():
        try:
            for _ in batches:
                begun.release()
        except RuntimeError as error:
            told.append(str(error))

    with cached(Numbers(LENGTH), path, capacity="64MiB") as train:
        loader = Loader(train, 1, workers=2, shuffle=None, prefetch=2, **options)
        batches, begun = iter(loader), threading.Semaphore(0)
        consumer = threading.Thread(target=consume)
        consumer.start()
        begun.acquire()
        makers = own_children()
        signal_all(makers, signal.SIGSTOP)
        consumer.join(0.5)  # it comes to wait
        going_on = threading.Timer(0.5, signal_all, (makers, signal.SIGCONT))
        going_on.start()
        ENDED[how](loader)
        going_on.join()
        consumer.join(60)
        assert not consumer.is_alive()
        assert len(told) == 1
        assert re.match("this epoch ended when (the loader was closed|a newer|a state was)", told[0])
        loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", ["item", "transform", "collate_fn"])
def test_a_stop_iteration_of_a_function_is_an_error_and_no_end(path, where, workers):
    def stop(value):
        raise StopIteration("the stream is over")

    class Stops(Numbers):
        def __getitem__(self, index):
            return stop(index) if where == "item" and index > 20 else super().__getitem__(index)

    transform = {"transform": stop} if where == "transform" else {}
    collate = {"collate_fn": stop} if where == "collate_fn" else {}
    with cached(Stops(LENGTH), path, capacity="64MiB", **transform) as train:
        with pytest.raises(RuntimeError, match=r"StopIteration|the stream is over"):
            list(Loader(train, 5, workers=workers, **collate))
        with pytest.raises(RuntimeError, match=r"StopIteration|the stream is over"):
            list(Loader(train, 5, workers=workers, device="cpu", **collate))


@pytest.mark.parametrize("forks", [False, True], ids=["here", "in a child"])
def test_a_loader_that_is_collected_amid_a_read_leaves_the_read_alone(path, forks):
    """It drained its dataset, and the read found its snapshot closed, 10 s later."""

    def body() -> None:
        assert train[3]["y"] == 3
        with Interruption(0, files("snapshot.py", functions=("gather",)), error=forgotten.clear) as at:
            assert train[4]["y"] == 4
        assert at.where

    with cached(Numbers(20), path, capacity="16MiB") as train:
        train.fill(workers=0, progress=False)
        forgotten = [Loader(train, 5, workers=0)]
        if forks:
            with in_child(body):
                pass
        else:
            body()


def test_a_child_that_closes_a_loader_leaves_the_parent_its_workers(path):
    def is_made_by_worker(items):
        return get_worker_info() is not None

    with (
        cached(Numbers(40), path, capacity="16MiB") as train,
        Loader(train, 5, workers=2, collate_fn=is_made_by_worker) as loader,
    ):
        batches = iter(loader)
        assert next(batches)
        with in_child(loader.close):
            pass
        assert [*batches] == [True] * 7


def test_an_epoch_nobody_asked_is_begun_again(train):
    loader = Loader(train, 10)
    iter(loader)
    assert flat(loader) == flat_of_epoch(train, 0)


def test_nothing_is_left_after_close(path, log):
    with cached(Numbers(400, log, pause=0.02), path, capacity="16MiB") as train:
        loader = Loader(train, 100, workers=2)
        next(iter(loader))
        assert own_children()
        loader.close()
        loader.close()
        assert sum(made(log).values()) < 400, "a worker ends after an item, not after its batches"
        assert not own_children()
        wait_until(lambda: not own_threads(), "the last thread to end")
        with pytest.raises(ValueError, match="the loader is closed"):
            iter(loader)
        assert train.cached > 50, "what was made is published"
        assert train[3]["y"] == 3


def test_an_epoch_that_is_left_is_not_made_to_its_end(path, log):
    with cached(Numbers(200, log, pause=0.01), path, capacity="16MiB") as train:
        with Loader(train, 20, workers=2) as loader:
            next(iter(loader))
            assert len(flat(loader)) == 200
        assert train.cached == 200
    assert made(log) == Counter(range(200))


def test_an_error_of_the_dataset_is_the_users_and_ends_the_epoch(path):
    flag = path.parent / "no network"
    flag.touch()

    class Fails(Numbers):
        def __getitem__(self, index):
            if index == 33 and flag.exists():
                raise LookupError("no network")
            return super().__getitem__(index)

    with cached(Fails(50), path, capacity="16MiB") as train:
        for workers in (0, 2):
            with Loader(train, 10, shuffle=False, workers=workers) as loader:
                batches = iter(loader)
                assert [check(next(batches)) for _ in range(3)] == [[*range(n, n + 10)] for n in (0, 10, 20)]
                with pytest.raises(LookupError, match="no network") as caught:
                    next(batches)
                if hasattr(caught.value, "add_note"):  # Python 3.11
                    assert "item 33 of the dataset" in "".join(traceback.format_exception(caught.value))
                with pytest.raises(StopIteration):
                    next(batches)
                if workers:
                    flag.unlink()
                    assert flat(loader) == [*range(50)]


@pytest.mark.parametrize("where", ["dataset", "collate_fn", "transform"])
def test_an_epoch_that_failed_leaves_no_workers_and_what_they_made(path, where):
    """They lived on with the error's traceback, and the garbage collector waited 5 s for each of them."""
    flag = path.parent / "no network"
    flag.touch()

    def fails(numbers):
        if 33 in numbers and flag.exists():
            raise LookupError("no network")

    class Fails(Numbers):
        def __getitem__(self, index):
            if where == "dataset":
                fails([index])
            return super().__getitem__(index)

    def collate(items):
        fails([item["y"] for item in items])
        return torch.utils.data.default_collate(items)

    def transform(item):
        fails([item["y"]])
        return item

    options = {"collate_fn": collate} if where == "collate_fn" else {}
    changed = {"transform": transform} if where == "transform" else {}
    with cached(Fails(50), path, capacity="16MiB", **changed) as train:
        loader = Loader(train, 10, shuffle=False, workers=2, **options)
        with pytest.raises(LookupError, match="no network") as caught:
            flat(loader)
        assert caught.value.__traceback__ is not None, "it is held"
        wait_until(lambda: not own_children(), "the workers to end")
        assert train.cached >= 30, "what was made is published"
        flag.unlink()
        assert flat(loader) == [*range(50)], "others are started"
        loader.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_is_named_and_replaced(path, tmp_path, number):
    flag = tmp_path / "killed"

    class Dies(Numbers):
        def __getitem__(self, index):
            if index == 33 and not flag.exists():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                flag.write_text(str(os.getpid()))
                os.kill(os.getpid(), number)
            return super().__getitem__(index)

    with cached(Dies(50), path, capacity="16MiB") as train, Loader(train, 10, workers=2) as loader:
        with pytest.warns(RuntimeWarning, match="others make its items") as told:
            assert sorted(flat(loader)) == [*range(50)]
        words = rf"process {flag.read_text()} was killed by signal {number} \({number.name}\)"
        assert re.match(words, str(told[0].message))
        assert train.cached >= 30, "what the worker had not yet published is lost"


@pytest.mark.slow
def test_a_batch_that_kills_its_workers_is_an_error(path):
    class Kills(Numbers):
        def __getitem__(self, index):
            if index == 33:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    with (
        cached(Kills(50), path, capacity="16MiB") as train,
        Loader(train, 10, workers=1) as loader,
        pytest.warns(RuntimeWarning, match="others make its items"),
        pytest.raises(ac.WorkerError, match=r"^process \d+ .*SIGKILL.*, as did 3 before it at this batch"),
    ):
        flat(loader)


INTERRUPTED = """
    import sys
    from arrowcache.torch import Loader, cached
    from datasets_of_items import Numbers, check

    train = cached(Numbers(300, None, 0.01), sys.argv[1], capacity="16MiB")
    loader = Loader(train, 10, workers=2)
    seen = []
    try:
        for batch in loader:
            seen += check(batch)
            print("at work", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    assert sorted([number for batch in loader for number in check(batch)]) == list(range(300))
    print("all", flush=True)
    loader.close()
    train.close()
"""


@pytest.mark.slow
def test_ctrl_c_ends_an_epoch_and_the_next_one_has_all(path):
    with Script(INTERRUPTED, path) as script:
        assert script.line() == "at work"
        script.signal_group(signal.SIGINT)
        while (said := script.line()) == "at work":
            pass
        assert said == "interrupted"
        assert script.line() == "all"
        assert script.end() == (0, "")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning")  # it came in a destructor
@pytest.mark.filterwarnings("ignore:a snapshot was not closed", "ignore:a writer with")
@pytest.mark.parametrize("there", [True, False])
def test_after_ctrl_c_at_any_step_all_goes_on(path, monkeypatch, there):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's keeps what was dropped
    for number, interruption in enumerate(
        interruptions(100, library, every=15 if there else 140, finalizers=True)
    ):
        folder = path.with_name("there" if there else str(number))
        with cached(Numbers(40), folder, capacity="64MiB") as train:
            if there:
                train.__getitems__([*range(40)])
            loader = Loader(train, 10, workers=0)
            with interruption:
                flat(loader)
            assert sorted(flat(loader)) == [*range(40)], interruption.where
            loader.close()
            cache = train.cache
            wait_until(lambda cache=cache: not cache.stats().leased_bytes, "the leases to end")
            assert sorted(flat(Loader(train, 10, workers=0))) == [*range(40)]
            assert train.cached == 40, "no claim is kept"
            assert cache.verify() == []


STARTED = """
    import multiprocessing, sys
    from arrowcache.torch import Loader, cached
    from datasets_of_items import Numbers

    if __name__ == "__main__":
        multiprocessing.set_start_method(sys.argv[2])
        train = cached(Numbers(40), sys.argv[1], capacity="16MiB", transform=lambda item: item["y"])
        with Loader(train, 10, workers=2, collate_fn=lambda items: items) as loader:
            for _ in range(2):
                assert sorted(number for batch in loader for number in batch) == list(range(40))
        print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", one_in(3, METHODS, seed=SEED + 1))
def test_workers_may_be_started_in_any_way(path, method):
    with Script(STARTED, path, method, new_interpreter=True) as script:
        assert script.line() == "done"
        assert script.end() == (0, "")


AS_PYTHON_3_14_DOES = """
    import multiprocessing, sys
    from multiprocessing.context import _default_context  # as Python 3.14 sets it
    _default_context._default_context = multiprocessing.get_context("forkserver")
    from arrowcache.torch import Loader, cached

    class Numbers:  # of this script alone: nothing else can import it
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return index

    with Loader(cached(Numbers(), sys.argv[1], capacity="16MiB"), 10, workers=2) as loader:
        assert sorted(number for batch in loader for number in batch.tolist()) == list(range(40))
    print("done")
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_has_workers_where_python_forks_no_more_by_itself(path):
    with Script(AS_PYTHON_3_14_DOES, path, new_interpreter=True) as script:
        assert script.line() == "done"
        assert script.end() == (0, "")


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_forked_child_iterates_anew(train, device):
    loader = Loader(train, 10, device=device)
    batches = iter(loader)
    next(batches)

    def child():
        with pytest.raises(ValueError, match=r"^this epoch belongs to .*: iterate anew here$"):
            next(batches)
        assert sorted(flat(loader)) == [*range(LENGTH)]

    with in_child(child):
        pass
    assert len(flat(batches)) == LENGTH - 10


@pytest.mark.parametrize("how", ["dropped", "iterated"])
def test_a_forked_child_leaves_the_workers_to_its_parent(path, how):
    """Torch told them to end, and printed an AssertionError."""
    fails = path.with_name("fails")
    fails.touch()

    def item(value):
        if value["y"] == 7 and fails.exists():
            raise LookupError("no network")
        return value

    with cached(Numbers(LENGTH), path, capacity="64MiB", transform=item) as train:
        held = [Loader(train, 5, workers=2)]
        with pytest.raises(LookupError, match="no network"):
            flat(held[0])
        fails.unlink()
        held.append(iter(held[0]))
        got = check(next(held[1]))

        def child():
            ignored = []
            sys.unraisablehook = ignored.append
            if how == "iterated":
                assert sorted(flat(held[0])) == [*range(LENGTH)]
            held.clear()
            gc.collect()
            assert not ignored

        with in_child(child):
            pass
        workers = own_children()
        assert sorted(got + flat(held[1])) == [*range(LENGTH)]
        assert sorted(flat(held[0])) == [*range(LENGTH)]
        assert {*own_children()} >= {*workers}, "the same ones"
        held[0].close()


@pytest.mark.filterwarnings(r"ignore:process \d+ was killed:RuntimeWarning")
def test_workers_that_died_between_epochs_are_replaced(path):
    with cached(Numbers(LENGTH), path, capacity="64MiB", transform=dict) as train, Loader(train, 5) as loader:
        assert len(flat(loader)) == LENGTH
        workers = own_children()
        signal_all(workers, signal.SIGKILL)
        for worker in workers:
            worker.join()
        assert sorted(flat(loader)) == [*range(LENGTH)]


# trouble


def test_a_damaged_segment_is_made_again(path, log):
    with cached(Numbers(30, log), path, capacity="16MiB") as train:
        train.__getitems__([*range(30)])
    with cached(Numbers(30, log), path, capacity="16MiB") as train, Loader(train, 10, workers=0) as loader:
        flip_byte(segment_files(ac.Cache.open(path))[-1], 4)  # of all but the first item
        with pytest.warns(RuntimeWarning, match="quarantined|made again"):
            assert sorted(flat(loader)) == [*range(30)]
        assert train.cached == 30


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cache_that_is_gone_leaves_a_slow_loader(path, workers):
    with (
        cached(Numbers(30), path, capacity="16MiB", replace=0.1) as train,
        Loader(train, 10, workers=workers) as loader,
        warnings.catch_warnings(),
    ):
        shutil.rmtree(path)
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(2):
            assert sorted(flat(loader)) == [*range(30)]


# the rest


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"shuffle": "window"}, ValueError, r"shuffle='window' of a dataset must be True \('rows'\)"),
        ({"shuffle": 3}, ValueError, "shuffle=3"),
        ({"seed": -1}, ValueError, "seed"),
        ({"drop_last": 1}, TypeError, "drop_last must be True or False"),
        ({"workers": -1}, ValueError, "workers"),
        ({"workers": 257}, ValueError, "workers"),
        ({"prefetch": -1}, ValueError, "prefetch"),
        ({"collate_fn": 3}, TypeError, "collate_fn"),
        ({"rank": 0}, ValueError, "rank=0 and world_size=None go together: pass world_size, too"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank=2 of world_size=2: ranks count from 0"),
        ({"rank": 0.0, "world_size": 2}, TypeError, "rank must be an int or None, not 0.0"),
        ({"rank": 0, "world_size": 2**21}, ValueError, "world_size=2097152 must be an int of at most"),
        ({"device": "cuda:99"}, ValueError, "'cpu'"),
        ({"shufle": True}, TypeError, "no argument 'shufle': did you mean shuffle="),
        (
            {"columns": ["x"]},
            TypeError,
            r"Loader of a dataset has no argument .columns.: give columns= to cached\(\)",
        ),
        ({"transform": len}, TypeError, r"give transform= to cached\(\)"),
        ({"on_error": "skip"}, TypeError, r"give on_error= to cached\(\)"),
        ({"version": "2"}, TypeError, r"give version= to cached\(\)"),
        ({"replace": 0.1}, TypeError, r"give replace= to cached\(\)"),
        ({"schema": {}}, TypeError, r"give schema= to cached\(\)"),
        ({"capacity": "1MB"}, TypeError, r"give capacity= to cached\(\)"),
        ({"replacement": True}, TypeError, r"give DataLoader\(train, sampler="),
        ({"epoch_rows": 3}, TypeError, "an epoch is each item once"),
        ({"where": len}, TypeError, "Subset"),
        ({"weights": [1]}, TypeError, "sampler="),
    ],
)
def test_a_wrong_argument_is_refused(full_train, options, error, says):
    with pytest.raises(error, match=says):
        Loader(full_train, **options)
    assert full_train.cached == LENGTH


def test_nothing_but_a_cached_dataset_will_do(train):
    with pytest.raises(TypeError, match="of a CachedDataset, not of a Cache"):
        CachedLoader(train.cache)


@pytest.mark.parametrize("workers", [0, 2])
def test_on_a_device_batches_are_the_same(path, workers):
    with (
        cached(Numbers(LENGTH), path, capacity="64MiB") as train,
        Loader(train, 10, workers=workers, device="cpu") as loader,
    ):
        for _ in range(2):
            kept = [*loader]
            assert sorted(flat(kept)) == [*range(LENGTH)]
        assert loader.device_stats().batches == 20


def test_a_loader_of_a_cached_dataset_is_a_cached_loader(train):
    loader = Loader(train, 10)
    assert type(loader) is CachedLoader
    assert isinstance(loader, Loader)
    assert isinstance(loader, ac.Loader)
    assert type(Loader(cache=train)) is CachedLoader
    assert type(Loader(train.cache, 10)) is Loader
    assert "CachedLoader" in repr(loader)
    assert loader.stats().batches == 0
    flat(loader)
    assert loader.stats().epochs == 1


def test_a_loader_of_a_dataset_says_what_it_cannot_do(train):
    class Own(Loader):
        pass

    with pytest.raises(TypeError, match="an Own is of a cache: derive it from CachedLoader"):
        Own(train)
    with pytest.raises(
        TypeError, match=r"Numbers object.*read a dataset through arrowcache\.torch\.cached\("
    ):
        Loader(Numbers(LENGTH), 10)
    with Loader(train, 10) as loader:
        with pytest.raises(ValueError, match="puts items together, which copies"):
            loader.assert_zero_copy()
        with pytest.raises(ValueError, match=r"of Loader\(weights=...\)"):
            loader.probabilities([(0, 0)])
        with pytest.raises(TypeError, match="expected a Cache or the path of one, got <CachedLoader"):
            packed(loader, "x", 8, batch_size=2)
        with pytest.raises(ValueError, match="missing='later' must be"):
            loader.load_state_dict(loader.state_dict(), missing="later")


def counter_pages():
    """The files of the pages that this process has open."""
    opened = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return {
        os.stat(path).st_ino for path in opened if os.path.lexists(path) and os.readlink(path) == LOADER_LINK
    }


def test_other_processes_see_its_counts(train):
    from arrowcache.explore import observe

    loader = Loader(train, 10)
    flat(loader)
    (seen,) = observe(train.path).loaders
    assert seen.rows == LENGTH
    pages = counter_pages()
    flat(loader)
    assert counter_pages() == pages != set(), "the same page"
    (seen,) = observe(train.path).loaders
    assert seen.rows == 2 * LENGTH

    def child():
        flat(loader)
        assert sorted(seen.rows for seen in observe(train.path).loaders) == [LENGTH * 2, LENGTH * 3]
        loader.close()

    with in_child(child):
        pass
    loader.close()
    assert not observe(train.path).loaders


def test_batches_whose_items_are_there_cost_no_call_of_the_dataset(path, log):
    with cached(Numbers(LENGTH, log), path, capacity="64MiB") as train:
        flat(Loader(train, 10, workers=0))
        log.unlink()
        assert sorted(flat(Loader(train, 10))) == [*range(LENGTH)]
        assert train.stats().made == LENGTH - 1
    assert not log.exists()


# items that cannot be made


class Spoilt(Numbers):
    """Some items are None, others raise."""

    def __init__(self, length, none=(), raises=(), error=OSError, log=None):
        super().__init__(length, log)
        self.none, self.raises, self.error = {*none}, {*raises}, error

    def __getitem__(self, index):
        item = super().__getitem__(index)
        if index in self.raises:
            raise self.error(f"item {index} cannot be read")
        return None if index in self.none else item


class SpoiltMany(Spoilt):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


BAD = {0, 3, 17, 18, 40}


def spoilt(path, kind=Spoilt, none=(0, 17), raises=(3, 18, 40), error=OSError, **options):
    return cached(kind(60, none, raises, error), path, capacity="16MiB", on_error="skip", **options)


@pytest.mark.parametrize("kind", [Spoilt, SpoiltMany])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_item_that_raises_stop_iteration_is_left_out_and_ends_nothing(path, kind, workers):
    with spoilt(path, kind, error=StopIteration) as train:
        with Loader(train, 8, workers=workers) as loader:
            assert sorted(flat(loader)) == sorted({*range(60)} - BAD)
        with pytest.raises(RuntimeError, match="item 3 of the dataset raised StopIteration"):
            train[3]
    with pytest.raises(RuntimeError, match="item 0 of the dataset raised StopIteration"):
        cached(kind(60, raises=[0], error=StopIteration), path.with_name("other"), capacity="16MiB")


@pytest.mark.parametrize("kind", [Spoilt, SpoiltMany])
@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 2}, {"device": "cpu"}, {"collate_fn": list}])
def test_items_that_cannot_be_made_are_left_out_and_counted(path, kind, options):
    with spoilt(path, kind) as train, Loader(train, 8, seed=1, **options) as loader:
        for epoch in (1, 2):
            batches = [*loader]
            if "collate_fn" in options:
                batches = [torch.utils.data.default_collate(batch) for batch in batches]
            assert sorted(flat(batches)) == sorted({*range(60)} - BAD)
            assert loader.stats().left_out_items == train.stats().left_out == 5 * epoch
            assert loader.stats().rows == 55 * epoch
        assert "left out 10 items" in repr(loader)
        assert "left out 10 times" in repr(train)
        assert "10 times an item could not be made" in str(train)
        assert train.cached == 55
        for index in BAD:
            with pytest.raises((OSError, ac.SchemaError), match=f"item {index} "):
                train[index]
        with pytest.raises((OSError, ac.SchemaError)):
            train[[1, 17]]
        with pytest.raises((OSError, ac.SchemaError)):
            list(DataLoader(train, 8))


def test_fill_leaves_them_out(path):
    for workers in (0, 2):
        with spoilt(path.with_name(str(workers))) as train:
            assert train.fill(workers, progress=False) == 55
            assert train.stats().left_out == 5


def test_by_default_they_are_errors(path):
    for kind, error in ((Spoilt(9, none=[4]), ac.SchemaError), (Spoilt(9, raises=[4]), OSError)):
        with (
            cached(kind, path, capacity="16MiB") as train,
            pytest.raises(error, match="item 4"),
            Loader(train, 3, workers=0) as loader,
        ):
            list(loader)
        shutil.rmtree(path)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 4])
def test_batches_of_nothing_are_left_out_and_a_state_passes_them(path, size, workers):
    bad = {*range(8), *range(20, 28), *range(52, 60)}
    with spoilt(path, none=bad, raises=()) as train:
        with Loader(train, size, shuffle=False, workers=workers) as loader:
            wanted = flat(loader)
            assert wanted == sorted({*range(60)} - bad)
            assert loader.state_dict()["epoch"] == 1
        for taken in some_of(range(0, 36 // size, 3)):
            with (
                Loader(train, size, shuffle=False, workers=workers) as loader,
                Loader(train, 5, workers=0) as resumed,
            ):
                epoch = iter(loader)
                before = flat(itertools.islice(epoch, taken))
                resumed.load_state_dict(loader.state_dict())
                assert before + flat(resumed) == wanted


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_have_equally_many_steps_whatever_is_left_out(path, workers):
    bad = {*range(16), *range(24, 28), *range(52, 60)}
    with spoilt(path, none=bad, raises=()) as train:
        loaders = [
            Loader(train, 2, shuffle=False, workers=workers, rank=rank, world_size=2) for rank in (0, 1)
        ]
        steps = [numbers(loader) for loader in loaders]
        assert [*map(len, steps)] == [15, 15]
        assert all(batch for rank in steps for batch in rank)
        assert {*itertools.chain(*itertools.chain(*steps))} == {*range(60)} - bad
        for loader in loaders:
            loader.close()


@pytest.mark.parametrize("options", [{}, {"workers": 0}, {"rank": 0, "world_size": 2, "workers": 0}])
def test_an_epoch_of_nothing_is_an_error(path, options):
    flag = path.with_name("network")
    flag.touch()

    class Offline(Numbers):
        def __getitem__(self, index):
            if index and not flag.exists():
                raise ConnectionError("no network")
            return super().__getitem__(index)

    with cached(Offline(60), path, capacity="16MiB", on_error="skip") as train:
        train.cache.evict("1MB")
        flag.unlink()
        with Loader(train, 1, shuffle=False, drop_last=True, **options) as loader:
            state = loader.state_dict()
            state["position"] = 2
            loader.load_state_dict(state)
            with pytest.raises(RuntimeError, match="none of the epoch's items could be made; item"):
                list(loader)
    none = Spoilt(9, raises=range(9), error=ConnectionError)
    with pytest.raises(ConnectionError, match="item 0"):
        cached(none, path.with_name("all"), capacity="16MiB", on_error="skip")


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_no_fault_of_an_item_is_never_skipped(path, workers):
    for number, (kind, error) in enumerate(
        [
            (Spoilt(9, raises=[4], error=MemoryError), MemoryError),
            (Spoilt(9, raises=[4], error=ac.SchemaError), ac.SchemaError),
            (Items(*({"x": torch.zeros(2 if n == 4 else 1)} for n in range(9))), ac.SchemaError),
        ]
    ):
        with (
            cached(kind, path.with_name(str(number)), capacity="16MiB", on_error="skip") as train,
            pytest.raises(error),
            Loader(train, 3, workers=workers) as loader,
        ):
            list(loader)


def test_an_unknown_policy_is_refused(path):
    for on_error in ("ignore", None, True):
        with pytest.raises(ValueError, match="use 'raise' or 'skip'"):
            cached(Numbers(3), path, capacity="16MiB", on_error=on_error)
