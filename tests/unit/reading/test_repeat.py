"""repeat(): epochs one after another, told by what was delivered, and without a trace after its end."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
from begun import own_threads
from helpers import DEADLINE_SECONDS, ids_of, publish, wait_until

import arrowcache as ac
from arrowcache import Loader

ROWS = 57  # three segments of 16 and one of 9
SHUFFLES = ["rows", "window", "blocks", None]


def loader_of(cache: ac.Cache, size: int = 7, make: type[Loader] = Loader, **options: Any) -> Loader:
    return make(cache, size, **({"columns": ["id"], "worker_type": "thread"} | options))


def take_epoch(endless: Any, loader: Loader) -> list[int]:
    """The ids of one epoch, from its first batch on."""
    found = ids_of([next(endless)])
    assert loader.steps is not None
    return found + ids_of(next(endless) for _ in range(loader.steps - 1))


class Switch:
    """A `where` that accepts everything, or nothing."""

    def __init__(self) -> None:
        self.on = True

    def __call__(self, segment: ac.SegmentInfo) -> bool:
        return self.on


class Seen:
    """A transform that notes the ids of each batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.batches.append(batch["id"].tolist())
        return batch


# what it yields


@pytest.mark.parametrize("workers", [0, 3])
def test_it_yields_what_one_for_after_another_would(cache, workers):
    with loader_of(cache, workers=workers) as loader, loader_of(cache) as other:
        endless = loader.repeat()
        assert [take_epoch(endless, loader) for _ in range(4)] == [ids_of(other) for _ in range(4)]


def test_the_next_epoch_sees_what_was_published_meanwhile(cache):
    with loader_of(cache, prefetch=1, drop_last=False) as loader:
        endless = loader.repeat()
        publish(cache, 2, first=100)  # most of the epoch is still to be made
        assert sorted(take_epoch(endless, loader)) == list(range(ROWS))
        assert sorted(take_epoch(endless, loader)) == [*range(ROWS), *range(100, 132)]


def test_a_transform_sees_every_batch_once_and_in_order(cache):
    seen = Seen()
    with loader_of(cache, 16, transform=seen) as loader:
        endless = loader.repeat()
        found = ids_of(next(endless) for _ in range(20))
        endless.close()
    assert [number for batch in seen.batches for number in batch][: len(found)] == found


# what is told of it


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_stats_and_state_follow_what_was_delivered_not_what_was_made(cache, workers):
    seen = Seen()
    with loader_of(cache, 16, transform=seen, prefetch=12, workers=workers) as loader:
        endless = loader.repeat()
        publish(cache, 1, first=100)
        wait_until(lambda: len(seen.batches) >= 3, "an epoch of three steps to be made")
        assert (loader.steps, loader.stats().epochs, loader.state_dict()["epoch"]) == (3, 1, 0)
        for step in range(1, 4):
            next(endless)
            wait_until(lambda: len(seen.batches) > 3, "the next one to be begun")
            state = loader.state_dict()
            assert (loader.steps, loader.stats().epochs, loader.stats().batches) == (3, 1, step)
            assert (state["epoch"], state["position"]) == (0, 16 * step)
        next(endless)
        state = loader.state_dict()
        assert (loader.stats().epochs, loader.stats().batches) == (2, 4)
        assert (state["epoch"], state["position"]) == (1, 16)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_epoch_after_it_is_the_one_after_that_which_was_delivered(cache, workers):
    with loader_of(cache, 16) as plain:
        epochs = [ids_of(plain) for _ in range(4)]
    seen = Seen()
    with loader_of(cache, 16, transform=seen, prefetch=12, workers=workers) as loader:
        endless = loader.repeat()
        wait_until(lambda: len(seen.batches) >= 3, "an epoch to be made")
        next(endless)
        wait_until(lambda: len(seen.batches) > 3, "the next one to be begun")
        endless.close()
        assert ids_of(loader) == epochs[1], "those that nobody saw were never begun"
        endless = loader.repeat()
        assert take_epoch(endless, loader) == epochs[2]
        assert take_epoch(endless, loader) == epochs[3]


def test_a_state_loaded_while_the_next_epoch_begins_is_not_lost(cache):
    in_begin, go_on, ended = threading.Event(), threading.Event(), []

    def where(segment):
        if threading.current_thread() is not threading.main_thread():
            in_begin.set()
            assert go_on.wait(DEADLINE_SECONDS)
        return True

    with loader_of(cache, 16, where=where) as loader:
        epoch = iter(loader)
        first = ids_of([next(epoch)])
        state = loader.state_dict()
        rest = ids_of(epoch)
        whole = first + rest
        endless = loader.repeat()

        def consume():
            with pytest.raises(RuntimeError, match="a state was loaded") as error:
                list(endless)
            ended.append(error)

        consumer = threading.Thread(target=consume)
        consumer.start()
        assert in_begin.wait(DEADLINE_SECONDS)
        loader.load_state_dict(state)
        go_on.set()
        consumer.join()
        assert ended
        assert loader.state_dict() == state
        assert first + ids_of(loader) == whole
        assert loader.state_dict()["epoch"] == 1


# how it ends


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["close", "break", "del", "loader"])
def test_its_end_leaves_no_lease_and_a_closed_or_dropped_loader_no_thread(cache, how, workers):
    loader = loader_of(cache, workers=workers)
    endless = loader.repeat()
    for step, _ in enumerate(endless):
        if step == 20:
            break
    assert cache.stats().leased_bytes > 0
    if how == "close":
        endless.close()
        endless.close()
        assert next(endless, None) is None
    elif how == "loader":
        loader.close()
        assert cache.stats().leased_bytes == 0
        with pytest.raises(RuntimeError, match="was closed"):
            next(endless)
    del endless
    gc.collect()
    wait_until(lambda: cache.stats().leased_bytes == 0, "the leases to end")
    if how == "del":
        del loader
        gc.collect()
    else:
        if how != "loader":
            assert len(ids_of(loader)) == 56
        loader.close()
    wait_until(lambda: not own_threads("arrowcache"), f"the threads to end: {own_threads()}")


@pytest.mark.parametrize("workers", [0, 3])
def test_an_exception_of_a_transform_arrives_in_its_place_in_a_later_epoch(cache, workers):
    failing = threading.Event()

    def transform(batch):
        if failing.is_set() and 30 in batch["id"]:
            raise KeyError("the image 30")
        return batch

    with loader_of(cache, 8, shuffle=None, transform=transform, workers=workers, prefetch=1) as loader:
        endless = loader.repeat()
        assert take_epoch(endless, loader) == list(range(56))
        next(endless)
        take_epoch(endless, loader)  # whatever was made ahead is gone now
        failing.set()
        delivered = []
        with pytest.raises(KeyError, match="the image 30"):
            delivered.extend(batch["id"].tolist() for batch in endless)
        assert delivered[-1] == list(range(16, 24))
        assert next(endless, None) is None
        failing.clear()
        assert take_epoch(loader.repeat(), loader) == list(range(56))


# too few rows


@pytest.mark.parametrize("workers", [0, 2])
def test_with_too_few_rows_it_waits_without_a_lease_and_goes_on_when_they_come(cache, workers):
    where = Switch()
    with loader_of(cache, 8, where=where, workers=workers, prefetch=1, wait_rows=32) as loader:
        endless = loader.repeat()
        where.on = False
        assert len(take_epoch(endless, loader)) == 56
        found: list[int] = []
        consumer = threading.Thread(target=lambda: found.extend(ids_of([next(endless)])))
        consumer.start()
        wait_until(lambda: cache.stats().leased_bytes == 0, "the finished epoch to be let go")
        while cache.evict(1):
            pass
        assert cache.stats().segments == 0, "nothing was leased"
        where.on = True
        publish(cache, 2, first=200)
        consumer.join(DEADLINE_SECONDS)
        assert set(found) < set(range(200, 232))
        assert loader.state_dict()["epoch"] == 1
        rest = ids_of(next(endless) for _ in range(3))
        assert sorted(found + rest) == list(range(200, 232))


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_that_never_come_raise_in_the_step_that_needs_them_and_no_earlier(cache, workers):
    where = Switch()
    with loader_of(cache, 8, where=where, workers=workers, prefetch=1, timeout=0.3) as loader:
        endless = loader.repeat()
        where.on = False
        delivered = []
        with pytest.raises(ac.LoaderTimeoutError, match="is a sampler running"):
            delivered.extend(len(batch["id"]) for batch in endless)
        assert delivered == [8] * 7
        assert loader.stats().bottleneck == "samplers"
        assert next(endless, None) is None
        assert cache.stats().leased_bytes == 0
        where.on = True
        assert len(take_epoch(loader.repeat(), loader)) == 56


@pytest.mark.parametrize("workers", [0, 2])
def test_close_while_it_waits_for_rows_ends_it_and_wakes_the_consumer(cache, workers):
    where = Switch()
    loader = loader_of(cache, 8, where=where, workers=workers, prefetch=1, timeout=None)
    endless = loader.repeat()
    where.on = False
    assert len(take_epoch(endless, loader)) == 56
    results: list[Any] = []
    consumer = threading.Thread(target=lambda: results.append(next(endless, "the end")))
    consumer.start()
    wait_until(lambda: cache.stats().leased_bytes == 0, "it to wait for rows")
    loader.close()
    consumer.join(DEADLINE_SECONDS)
    assert results == ["the end"]
    wait_until(lambda: not own_threads("arrowcache"), "all threads to end")
