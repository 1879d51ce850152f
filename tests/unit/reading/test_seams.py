"""How the next epoch of `repeat()` begins where there are many segments: in slices, one a step."""

from __future__ import annotations

import itertools
import threading
from contextlib import closing, suppress
from types import SimpleNamespace

import pytest
from helpers import (
    DEADLINE_SECONDS,
    flip_byte,
    ids_of,
    limit,
    make_cache,
    mapped_seqs,
    publish,
    segment_files,
    wait_until,
)

import arrowcache as ac
from arrowcache import Loader
from arrowcache.native import maps
from arrowcache.storage.folder import Folder
from arrowcache.storage.locks import LockFile

STEPS = 20  # of an epoch of ten segments


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Ten segments are many."""
    limit(monkeypatch, slow_segments=10)
    cache = make_cache(tmp_path / "cache")
    publish(cache, 10)
    return cache


@pytest.fixture
def seams(monkeypatch):
    """What is done of all that takes long, as it ends; `then` may be put in, to be called with its name."""
    calls = SimpleNamespace(done=[], then=lambda name: None)

    def noted(name, real):
        def call(*arguments, **options):
            result = real(*arguments, **options)
            if name != "locked" or arguments[0].path.name == "cache.lock":
                calls.done.append(name)
                calls.then(name)
            return result

        return call

    monkeypatch.setattr(Folder, "names_in_segments", noted("listed", Folder.names_in_segments))
    monkeypatch.setattr(Folder, "segment_info", noted("looked at", Folder.segment_info))
    monkeypatch.setattr(LockFile, "close", noted("locked", LockFile.close))
    monkeypatch.setattr(LockFile, "try_range", noted("leased", LockFile.try_range))
    monkeypatch.setattr(maps, "open_alike", noted("mapped", maps.open_alike))
    monkeypatch.setattr(Folder, "change_usage", noted("counted", Folder.change_usage))
    return calls


def test_no_step_does_more_than_a_slice(cache, seams):
    options = {"columns": ["id"], "transform": dict, "worker_type": "thread"}  # a group a batch
    with Loader(cache, 8, prefetch=8, **options) as loader, closing(loader.repeat()) as epochs:
        next(epochs)
        for epoch in range(2):
            publish(ac.Cache.open(cache.path), 2)
            steps = []
            for _ in range(STEPS + 4 * epoch):
                seams.done.clear()
                next(epochs)
                steps.append([*dict.fromkeys(seams.done)])
            assert [step for step in steps if step] == [
                ["listed"], ["looked at"], ["listed", "leased", "locked"], ["mapped"], ["counted", "locked"]
            ]  # fmt: skip


def take_epoch(epochs, loader):
    """The ids of one epoch, from its first batch on."""
    found = ids_of([next(epochs)])
    return found + ids_of(itertools.islice(epochs, loader.steps - 1))


@pytest.mark.parametrize("prefetch", [None, 1, 2, 30])
@pytest.mark.parametrize("batch_rows", [8, 1, 160])
def test_every_row_comes_once_an_epoch_and_new_ones_from_some_epoch_on(cache, prefetch, batch_rows):
    with (
        Loader(cache, batch_rows, prefetch=prefetch, columns=["id"]) as loader,
        closing(loader.repeat()) as epochs,
    ):
        for _ in range(3):
            assert sorted(take_epoch(epochs, loader)) == list(range(160))
        publish(cache, 10, first=160)
        rows = [sorted(take_epoch(epochs, loader)) for _ in range(10)]
        lengths = [*map(len, rows)]
        assert lengths[-1] == 320
        assert lengths == sorted(lengths)
        assert all(ids == list(range(len(ids))) for ids in rows)
    assert cache.stats().leased_bytes == 0


def test_whatever_step_it_is_closed_at_nothing_stays_leased_or_mapped(cache):
    count = maps.count()
    for steps in range(1, STEPS + 8):
        with Loader(cache, 8, prefetch=8, columns=["id"]) as loader, closing(loader.repeat()) as epochs:
            for _ in range(steps):
                next(epochs)
        assert (cache.stats().leased_bytes, mapped_seqs(cache), maps.count()) == (0, [], count), steps


@pytest.mark.parametrize("where", ["leased", "mapped"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_error_in_a_slice_leaves_nothing_leased(cache, monkeypatch, seams, where, error):
    def fails(name):
        if name == where:
            raise error

    with Loader(cache, 8, prefetch=8, columns=["id"]) as loader:
        epochs = loader.repeat()
        next(epochs)
        publish(cache, 2)
        seams.then = fails
        with pytest.raises(error):
            ids_of(itertools.islice(epochs, 2 * STEPS))
        monkeypatch.undo()
        epochs.close()
    assert (cache.stats().leased_bytes, mapped_seqs(cache)) == (0, [])


def test_a_look_that_fails_takes_no_batch_from_the_epoch_that_runs(cache, monkeypatch):
    def fails(self):
        raise OSError

    found: list[int] = []
    with Loader(cache, 8, prefetch=1, columns=["id"]) as loader, closing(loader.repeat()) as epochs:
        found += ids_of([next(epochs)])
        monkeypatch.setattr(Folder, "names_in_segments", fails)
        with pytest.raises(OSError):
            found.extend(row for batch in epochs for row in batch["id"].tolist())
        monkeypatch.undo()
    assert sorted(found) == list(range(160))


@pytest.mark.parametrize(("where", "begins_anew"), [("locked", False), ("locked", True), ("mapped", False)])
def test_whoever_ends_it_during_a_slice_nothing_stays_leased(cache, seams, where, begins_anew):
    came, anew = [], []

    def end():
        if begins_anew:
            anew.append(loader.repeat())
        else:
            loader.close()

    def ends(name):
        if name == where and not came:
            came.append(name)
            thread = threading.Thread(target=end)
            thread.start()
            thread.join(DEADLINE_SECONDS)
            assert not thread.is_alive()

    with Loader(cache, 8, prefetch=8, columns=["id"]) as loader, closing(loader.repeat()) as epochs:
        next(epochs)
        publish(cache, 1)
        seams.then = ends
        with suppress(RuntimeError):  # a newer epoch began
            ids_of(itertools.islice(epochs, 2 * STEPS))
        assert came
        if begins_anew:
            assert sorted(take_epoch(anew[0], loader)) == list(range(176))
            anew[0].close()
    assert (cache.stats().leased_bytes, mapped_seqs(cache)) == (0, [])


def test_what_only_an_epoch_that_ended_had_is_let_go_while_the_next_one_runs(cache):
    with Loader(cache, 8, prefetch=8, columns=["id"], where=lambda s: s.seq != left_out) as loader:
        left_out = -1
        epochs = loader.repeat()
        next(epochs)
        left_out = 0
        for _ in range(STEPS):
            next(epochs)
        wait_until(lambda: mapped_seqs(cache) == list(range(1, 10)), "the first segment to be let go of")
        assert cache.evict(1) > 0
        epochs.close()
    assert (cache.stats().leased_bytes, mapped_seqs(cache)) == (0, [])


def test_a_new_segment_that_is_damaged_is_left_out(cache):
    with Loader(cache, 8, prefetch=8, columns=["id"]) as loader, closing(loader.repeat()) as epochs:
        next(epochs)
        publish(cache, 1, first=160)
        flip_byte(segment_files(cache)[-1], -1)
        with pytest.warns(RuntimeWarning, match="quarantined"):
            ids_of(itertools.islice(epochs, STEPS - 1))
        assert sorted(take_epoch(epochs, loader)) == list(range(160))
