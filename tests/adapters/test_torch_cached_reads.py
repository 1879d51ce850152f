"""Items of a dataset, several made at a time in threads: the same ones and errors, in the same order."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter

import pytest
import torch
from datasets_of_items import Numbers, check, made
from helpers import DEADLINE_SECONDS, wait_until

import arrowcache as ac
from arrowcache.torch import Loader, cached

LENGTH = 61


class Together(Numbers):
    """Items that come once `count` of them are asked for at a time, in one process; of no more."""

    def __init__(self, log, count):
        super().__init__(LENGTH, log)
        self.count, self.lock, self.at_work, self.most = count, threading.Lock(), 0, 0
        self.are_together = threading.Event()

    def __getitem__(self, index):
        if index == 0:  # `cached` makes it
            return super().__getitem__(index)
        with self.lock:
            self.at_work += 1
            self.most = max(self.most, self.at_work)
        if self.most == self.count:
            self.are_together.set()
        assert self.are_together.wait(DEADLINE_SECONDS)
        time.sleep(0.001 * (index % 5))
        assert self.most == self.count
        item = super().__getitem__(index)
        with self.lock:
            self.at_work -= 1
        return item


class TogetherMany(Together):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def in_order(batches) -> list[int]:
    return [*itertools.chain.from_iterable(map(check, batches))]


@pytest.mark.parametrize("kind", [Together, TogetherMany])
@pytest.mark.parametrize(("workers", "reads"), [(0, 1), (0, 4), (2, 4)])
def test_fill_has_so_many_made_at_a_time_and_each_once(path, log, kind, workers, reads):
    inside = kind(log, 1)
    with cached(inside, path, capacity="16MiB") as train:
        inside.count = reads
        inside.are_together.clear()
        inside.most = 0
        assert train.fill(workers, progress=False, reads=reads) == LENGTH
        assert train.stats().made == LENGTH - 1
        assert in_order(Loader(train, 8, shuffle=False, workers=0)) == [*range(LENGTH)]
    assert made(log)[LENGTH - 1] == 1
    assert made(log).total() <= LENGTH + 3, "`cached` asks for two of them first, and compares"


@pytest.mark.parametrize("kind", [Together, TogetherMany])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loaders_workers_make_so_many_at_a_time_in_their_order(path, log, kind, workers):
    inside = kind(log, 1)
    with cached(inside, path, capacity="16MiB") as train:
        inside.count = 4
        inside.are_together.clear()
        inside.most = 0
        with Loader(train, 12, shuffle=False, workers=workers, reads=4) as loader:
            for _ in range(2):
                assert in_order(loader) == [*range(LENGTH)]
        assert train.stats().made == LENGTH - 1


class Failing(Numbers):
    """Two items fail, the later one at once; `hangs` do not end before `gate`."""

    def __init__(self, hangs=()):
        super().__init__(LENGTH)
        self.hangs, self.gate = set(hangs), threading.Event()

    def __getitem__(self, index):
        if index in self.hangs:
            self.gate.wait(DEADLINE_SECONDS)
        if index in (17, 20):
            time.sleep(0.1 * (index == 17))
            raise ZeroDivisionError(f"item {index} fails")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_error_in_order_is_raised_and_what_came_before_is_kept(path, workers):
    with cached(Failing(), path, capacity="16MiB") as train:
        with (
            Loader(train, LENGTH, shuffle=False, workers=workers, reads=16) as loader,
            pytest.raises(ZeroDivisionError, match="item 17 fails"),
        ):
            next(iter(loader))
        wait_until(lambda: train.cached == 17, "the items before it")
        with pytest.raises(ZeroDivisionError, match="item 17 fails"):
            train.fill(0, progress=False, reads=16)


def test_an_error_waits_for_none_that_hangs_behind_it(path):
    inside = Failing(hangs=range(25, 40))
    with cached(inside, path, capacity="16MiB") as train:
        try:
            with pytest.raises(ZeroDivisionError, match="item 17 fails"):
                train.fill(0, progress=False, reads=16)
            assert not inside.gate.is_set()
            assert train.cached == 17
            assert torch.equal(train[50]["x"], torch.full((4, 64), 50.0)), "claims of others were let go"
        finally:
            inside.gate.set()


@pytest.mark.parametrize("workers", [0, 1])
def test_items_that_cannot_be_made_are_left_out_each_by_itself(path, workers):
    with cached(Failing(), path, capacity="16MiB", on_error="skip") as train:
        assert train.fill(workers, progress=False, reads=16) == LENGTH - 2
        assert train.stats().left_out == 2
        with Loader(train, 8, shuffle=False, workers=workers, reads=16) as loader:
            assert in_order(loader) == [*range(17), 18, 19, *range(21, LENGTH)]
            assert loader.stats().left_out_items == 2


def test_an_item_that_does_not_fit_is_named(path):
    class Odd(Numbers):
        def __getitem__(self, index):
            item = super().__getitem__(index)
            return item | {"x": item["x"][:3]} if index == 33 else item

    with cached(Odd(LENGTH), path, capacity="16MiB") as train:
        with pytest.raises(ac.SchemaError, match="item 33: "):
            train.fill(0, progress=False, reads=16)
        assert train.cached == 33


class Short(Numbers):
    """A dataset whose `__getitems__` forgets one of several."""

    def __getitems__(self, indices):
        return [self[index] for index in indices if index != 40 or len(indices) == 1]


def test_many_that_are_fewer_than_were_asked_for_are_an_error_and_no_item_gets_the_place_of_another(path):
    with cached(Short(LENGTH), path, capacity="16MiB") as train:
        with pytest.raises(ac.SchemaError, match="give one for each"):
            train.fill(0, progress=False, reads=4)
        assert train.cached <= 40
    with cached(Numbers(LENGTH), path, capacity="16MiB") as train:
        assert in_order(Loader(train, 8, shuffle=False, workers=0)) == [*range(LENGTH)]


@pytest.mark.slow
def test_a_process_that_is_forked_from_one_that_had_threads_has_its_own(path, log):
    with cached(Numbers(LENGTH, log), path, capacity="16MiB") as train:
        with Loader(train, 8, shuffle=False, workers=0, reads=4) as loader:
            next(iter(loader))
        with Loader(train, 8, shuffle=False, workers=2, reads=4) as loader:
            assert in_order(loader) == [*range(LENGTH)]
    assert made(log) == Counter(range(LENGTH))


@pytest.mark.parametrize("reads", [0, 1.5, 10_000, None])
def test_a_wrong_number_is_refused(path, reads):
    with cached(Numbers(3), path, capacity="16MiB") as train:
        for use in (lambda: train.fill(0, False, reads), lambda: Loader(train, 2, reads=reads)):
            with pytest.raises((TypeError, ValueError), match="reads"):
                use()
