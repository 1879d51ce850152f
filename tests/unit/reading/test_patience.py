"""How a loader waits for rows: at no cost to others, while samplers draw, and what it says in the end."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, nullcontext
from functools import partial

import pytest
from helpers import DEADLINE_SECONDS, append_rows, full, make_cache, publish, wait_until
from helpers import sample as row
from quick import one_in

import arrowcache as ac
from arrowcache import Loader, SamplerPool
from arrowcache.storage.counters import SamplerPage
from arrowcache.storage.locks import LockFile

QUICK = {"progress": False, "workers": 1}
SECONDS = 0.5  # a timeout


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "cache")


@pytest.fixture
def page(cache):
    """What a sampler of the cache shows."""
    page = SamplerPage.open(cache.path, "default.0", 0)
    yield page
    page.close()


def too_late(cache, batch_size: int = 16, **options) -> str:
    """What a loader says that gets no rows in time."""
    with (
        Loader(cache, batch_size, timeout=SECONDS, **options) as loader,
        pytest.raises(ac.LoaderTimeoutError) as caught,
    ):
        iter(loader)
    return str(caught.value)


# as long as samplers draw


@pytest.mark.slow
def test_a_loader_does_not_give_up_while_a_sampler_draws_however_long_its_segment_takes(cache, tmp_path):
    gate, began = tmp_path / "gate", tmp_path / "began"

    def sampler(rng):
        for number in range(15):
            yield row(number)
        began.touch()
        while not gate.exists():  # a row each tenth of the timeout, of which none is published
            time.sleep(SECONDS / 10)
            yield row(0)

    # 1,000 rows a segment: it is never full before the gate opens
    cache = make_cache(tmp_path / "slow", segment_rows=1000, segment_bytes="2MiB", capacity="16MiB")
    with (
        ThreadPoolExecutor(1) as executor,
        SamplerPool(cache, full(sampler), executor=executor, **QUICK) as pool,
        Loader(cache, 16, timeout=SECONDS) as loader,
    ):
        failed: list[BaseException] = []
        waits = threading.Thread(target=lambda: _attempt(lambda: iter(loader), failed))
        waits.start()
        wait_until(began.exists, "the sampler to draw")
        started = time.monotonic()
        wait_until(lambda: time.monotonic() - started > 4 * SECONDS, "four timeouts to pass")
        assert waits.is_alive(), failed
        publish(cache, 1)
        waits.join(DEADLINE_SECONDS)
        assert not failed
        gate.touch()
        pool.stop()


def _attempt(action, failed) -> None:
    try:
        action()
    except BaseException as error:  # told in the test's thread
        failed.append(error)


def test_it_gives_up_once_no_sampler_has_drawn_for_so_long_and_says_what_was_drawn(cache, page):
    page.begin(0, 512)
    page.count(310, 512)
    text = too_late(cache, 64)
    assert (
        f"waited {SECONDS:g} s for 64 rows in {cache.path}, which has 0: samplers have drawn 310 of 512"
        in text
    )
    assert "rows of their first segment, the last " in text
    assert "raise timeout above what the source takes for a row" in text
    assert "batch_size" not in text, "a smaller batch would not have helped"


@pytest.mark.slow
def test_what_several_samplers_have_drawn_is_told_together(cache, page):
    other = SamplerPage.open(cache.path, "default.0", 0)
    page.begin(0, 4)
    other.begin(1, 8)
    assert "samplers have drawn 0 of 12 rows of their first segments, none so far: " in too_late(cache)
    publish(cache, 1)
    other.count(3, 8)
    text = too_late(cache, 32)
    assert "32 rows in" in text
    assert "which has 16: samplers have drawn 3 of 12 rows of their next segments, the last" in text
    assert text.endswith("lower wait_rows or batch_size")
    other.close()


def test_samplers_that_wait_for_room_are_told_apart_from_slow_ones(cache, page):
    page.begin(0, 16)
    page.count(16, 16)
    page.wait()
    text = too_late(cache)
    assert "samplers have drawn 16 of 16 rows" in text
    assert "wait for room" in text
    assert "raise timeout" not in text


@pytest.mark.slow
def test_without_any_sampler_it_says_so(cache):
    text = too_late(cache)
    assert text.endswith("which has 0: is a sampler running? None is seen on this machine: start one")
    with closing(cache.store.usage.show_writing()):
        assert "somebody writes to it, but no sampler is seen at work on this machine" in too_late(cache)


def test_a_sampler_between_two_tasks_counts_by_its_last_row_but_is_not_told_of(cache, page):
    page.begin(0, 16)
    page.count(16, 16)
    page.end()
    started = time.monotonic()
    assert "is a sampler running" in too_late(cache)
    assert time.monotonic() - started >= SECONDS


class Publishing:
    """Publishes a segment each tenth of a timeout, and has a sampler draw, until it is left."""

    def __init__(self, cache, page) -> None:
        self._cache, self._page, self._ends = cache, page, threading.Event()
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        while not self._ends.wait(SECONDS / 10):
            self._page.begin(0, 16)
            self._page.count(1, 16)
            publish(self._cache, 1)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_) -> None:
        self._ends.set()
        self._thread.join(DEADLINE_SECONDS)


def test_samplers_whose_segments_a_where_refuses_are_not_waited_for_for_ever(cache, page):
    with Publishing(cache, page):
        text = too_late(cache, where=lambda _: False)
    assert f"for {SECONDS:g} s segments were published in {cache.path}, and `where` refuses all " in text
    assert "look at what `where` accepts" in text


def test_a_full_cache_that_evicts_as_much_as_comes_is_not_waited_for_for_ever(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="256KiB")
    with closing(SamplerPage.open(cache.path, "default.0", 0)) as page, Publishing(cache, page):
        text = too_late(cache, wait_rows=230)  # which the capacity would hold, without what a file adds
    assert "where 230 are waited for: it is full, with a capacity of 256.0 KiB, and evicts" in text
    assert text.endswith("lower wait_rows or batch_size, or raise the capacity")


def test_rows_that_grow_are_waited_for_however_long_it_takes(cache, page):
    with Publishing(cache, page), Loader(cache, 16, wait_rows=600, timeout=SECONDS) as loader:
        assert next(iter(loader))


def test_more_rows_than_the_capacity_may_hold_are_refused_before_any_wait(cache):
    options = {"batch_size": 1000, "rank": 1, "world_size": 2, "run_id": "job"}
    fact = "one step of 2,000 rows takes .* lower batch_size, pass drop_last=False, or"
    with pytest.raises(ValueError, match=fact):
        Loader(cache, **options)
    another = ac.Cache.open(cache.path)  # which resizes it, as another process would
    another.resize("16MiB")
    Loader(cache, **options).close()


def test_a_batch_of_what_is_there_may_be_larger_than_the_cache(cache):
    publish(cache, 1)
    with Loader(cache, 5000, drop_last=False) as loader:
        assert [len(batch["id"]) for batch in loader] == [16]


# at no cost to others


class Opened:
    """How often this process, or one thread of it, opened cache.lock."""

    def __init__(self, monkeypatch, thread=None) -> None:
        self.count = 0
        before = LockFile.__init__

        def counted(file, path, *arguments):
            is_it = thread in (None, threading.current_thread())
            self.count += is_it and path.name == "cache.lock"
            before(file, path, *arguments)

        monkeypatch.setattr(LockFile, "__init__", counted)


@pytest.mark.slow
@pytest.mark.parametrize("segments", [0, 3])
def test_a_loader_that_waits_takes_no_lock_of_the_cache(cache, monkeypatch, segments):
    publish(cache, segments)
    looks = threading.Event()
    with Loader(
        cache, 16, wait_rows=1000, timeout=3 * SECONDS, where=lambda _: looks.set() or True
    ) as loader:
        opened = Opened(monkeypatch)
        with pytest.raises(ac.LoaderTimeoutError):
            iter(loader)
        assert opened.count == 0


@pytest.mark.slow
def test_a_loader_whose_where_refuses_the_newest_segments_takes_no_lock_again_and_again(cache, monkeypatch):
    publish(cache, 8)
    asked: list[int] = []

    def where(segment):
        asked.append(segment.seq)
        return segment.seq < 4

    failed: list[BaseException] = []
    with Loader(cache, 16, where=where, wait_rows=1000, timeout=None) as loader:
        opened = Opened(monkeypatch)
        waits = threading.Thread(target=lambda: _attempt(lambda: iter(loader), failed))
        waits.start()
        wait_until(lambda: asked.count(7) >= 3, "it to look several times")
        assert opened.count == 0
        publish(cache, 1)
        wait_until(lambda: 8 in asked, "it to look at what is new")
        loader.close()
        waits.join(DEADLINE_SECONDS)
    assert [type(error) for error in failed] == [ValueError], "it was closed while it waited"


@pytest.mark.slow
def test_a_rank_that_waits_takes_no_lock_of_the_cache_while_somebody_publishes(cache, monkeypatch):
    options = {"rank": 0, "world_size": 2, "run_id": "job", "wait_rows": 1000, "timeout": None}
    with Loader(cache, 16, **options) as loader:
        failed: list[BaseException] = []
        waits = threading.Thread(target=lambda: _attempt(lambda: iter(loader), failed))
        opened = Opened(monkeypatch, waits)
        waits.start()
        for _ in range(20):
            publish(cache, 1)
            time.sleep(SECONDS / 10)  # so that it looks in between
        loader.close()
        waits.join(DEADLINE_SECONDS)
        assert not waits.is_alive()
        assert [type(error) for error in failed] == [ValueError], "it was closed while it waited"
        assert opened.count == 0


def test_rows_that_come_at_last_are_seen_whenever_they_come(cache):
    for least in range(5):
        epochs: list[object] = []
        with Loader(cache, 16, where=partial(_is_from, least), timeout=None) as loader:
            thread = threading.Thread(target=lambda: epochs.append(iter(loader)))  # noqa: B023  # joined here
            thread.start()
            publish(cache, 1)
            thread.join(DEADLINE_SECONDS)
            assert len(epochs) == 1


def _is_from(least, segment) -> bool:
    return segment.seq >= least


# too few rows for ever


@pytest.mark.slow
def test_a_finite_cache_of_fewer_rows_than_a_batch_says_at_once_how_to_read_it(cache):
    publish(cache, 1)
    with Loader(cache, 64) as loader:  # whose timeout is a minute
        started = time.monotonic()
        with pytest.raises(ac.LoaderTimeoutError) as caught:
            iter(loader)
        assert time.monotonic() - started < 30, "half of the timeout at most"
    text = str(caught.value)
    assert "has 16 rows, one step takes 64, and nobody writes to it" in text
    assert "pass drop_last=False" in text
    assert "lower batch_size to 16" in text
    assert "wait_rows=64" in text
    with Loader(cache, 64, drop_last=False) as loader:
        assert [len(batch["id"]) for batch in loader] == [16]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:segment .* quarantined:RuntimeWarning")
def test_a_cache_whose_only_segment_is_damaged_says_that_it_is_in_quarantine(cache):
    publish(cache, 1)
    (segment,) = cache.store.segments()
    os.truncate(cache.store.path_of(segment), 100)
    says = "is empty but for 1 damaged segment in quarantine, and nobody writes to it: first start"
    with Loader(cache, 16) as loader, pytest.raises(ac.LoaderTimeoutError, match=says):
        iter(loader)


@pytest.mark.slow
def test_of_several_ranks_one_step_is_that_of_all_and_the_whole_timeout_is_waited(cache):
    """Another rank may be about to start the samplers."""
    publish(cache, 2)
    too_few = pytest.raises(
        ac.LoaderTimeoutError,
        match=r"waited 2\.5 s: .*32 rows, one step of 4 ranks takes 64.*batch_size to 8;",
    )
    with Loader(cache, 16, rank=0, world_size=4, run_id="job", timeout=2.5) as loader, too_few:
        iter(loader)


@pytest.mark.parametrize(
    ("rows", "says"), one_in(2, [(0, "is empty, and nobody"), (1, "has 1 row, one step of 2 ranks")])
)
@pytest.mark.parametrize("is_late", [False, True])
def test_ranks_that_all_wait_where_nobody_writes_are_told_before_the_timeout(cache, rows, says, is_late):
    """None of them is about to start samplers."""
    append_rows(cache, range(rows))
    options = {"world_size": 2, "run_id": "job", "timeout": DEADLINE_SECONDS}
    with (
        Loader(cache, 4, rank=0, **options) as first,
        Loader(cache, 4, rank=1, **options) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        waits = [pool.submit(iter, first)]
        if is_late:
            assert not wait(waits, 2.5).done, "it waits longer than a loader that is alone would"
        waits.append(pool.submit(iter, second))
        for each in waits:
            with pytest.raises(ac.LoaderTimeoutError, match=says) as caught:
                each.result()
            assert "waited" not in str(caught.value)


def test_a_rank_waits_for_the_samplers_that_another_rank_starts_late(cache):
    publish(cache, 1)
    epochs: list[object] = []
    options = {"rank": 1, "world_size": 2, "run_id": "job", "timeout": DEADLINE_SECONDS}
    with Loader(cache, 16, **options) as loader:
        thread = threading.Thread(target=lambda: _attempt(lambda: epochs.append(iter(loader)), epochs))
        thread.start()
        thread.join(2.5)  # longer than a loader that is alone would
        publish(cache, 1)
        thread.join(DEADLINE_SECONDS)
        assert [isinstance(each, BaseException) for each in epochs] == [False], epochs


def test_no_smaller_batch_is_advised_where_none_would_help(cache):
    append_rows(cache, range(1))
    options = {"rank": 0, "world_size": 2, "run_id": "job", "timeout": 2.5}
    with (
        Loader(cache, 16, **options) as loader,
        pytest.raises(ac.LoaderTimeoutError, match="has 1 row, one step of 2 ranks takes 32") as caught,
    ):
        iter(loader)
    assert "drop_last=False" in str(caught.value)
    assert "batch_size" not in str(caught.value)


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_where_that_refuses_every_row_of_a_finite_cache_is_told_at_once(cache, drop_last):
    publish(cache, 2)
    with (
        Loader(cache, 16, where=lambda _: False, drop_last=drop_last, timeout=None) as loader,
        pytest.raises(ac.LoaderTimeoutError, match=r"`where` refuses all 32 rows of .*, and nobody writes"),
    ):
        iter(loader)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["a writer", "a sampler", "nothing there yet", "wait_rows", "a pace"])
def test_a_cache_that_may_get_more_rows_is_waited_for(cache, page, why):
    options = {"wait_rows": 64} if why in ("wait_rows", "nothing there yet") else {}
    if why != "nothing there yet":
        publish(cache, 1)
    if why == "a sampler":
        page.begin(0, 16)
    if why == "a pace":
        cache.set_pace(ac.Pace(min_rows=64))
    sign = closing(cache.store.usage.show_writing()) if why == "a writer" else nullcontext()
    late = pytest.raises(ac.LoaderTimeoutError, match=r"waited 2\.5 s for")
    with sign, Loader(cache, 64, timeout=2.5, **options) as loader, late:
        iter(loader)
