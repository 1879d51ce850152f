"""How the next epoch of `repeat()` begins where there are many segments: in slices, one a step."""

from __future__ import annotations

import itertools
import threading
from contextlib import closing, suppress

import pytest
from helpers import (
    DEADLINE_SECONDS,
    flip_byte,
    ids_of,
    make_cache,
    mapped_seqs,
    publish,
    segment_files,
    wait_until,
)

from arrowcache import Loader
from arrowcache.native import maps
from arrowcache.reading import stream
from arrowcache.reading.epoch import Epoch
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.folder import Folder
from arrowcache.storage.store import Store

STEPS = 20  # of an epoch of ten segments


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Ten segments are many."""
    monkeypatch.setattr(stream, "_MANY_SEGMENTS", 10)
    cache = make_cache(tmp_path / "cache")
    publish(cache, 10)
    return cache


def test_no_step_does_more_than_a_slice(cache, monkeypatch):
    done: list[str] = []

    def note(owner, name):
        real = getattr(owner, name)

        def noted(*args, **options):
            done.append(name)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    options = {"columns": ["id"], "transform": dict, "worker_type": "thread"}  # a portion a batch
    with Loader(cache, 8, prefetch=8, **options) as loader, closing(loader.repeat()) as epochs:
        next(epochs)
        for owner, name in (
            (Folder, "names_in_segments"), (Store, "_list"), (Store, "lease"), (Snapshot, "__init__"),
            (Snapshot, "map_all"), (Epoch, "count"),
        ):  # fmt: skip
            note(owner, name)
        steps = []
        for _ in range(2 * STEPS):
            next(epochs)
            steps.append([*done])
            done.clear()
    assert [name for step in steps for name in step].count("lease") == 2
    once = [step for step in steps if step]
    seam = [
        ["names_in_segments"], ["_list"], ["lease", "_list", "names_in_segments"], ["__init__"], ["map_all"],
        ["map_all", "count"],
    ]  # fmt: skip
    assert once == 2 * seam


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


@pytest.mark.parametrize("where", [(Snapshot, "map_all"), (Store, "lease")])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_error_in_a_slice_leaves_nothing_leased(cache, monkeypatch, where, error):
    owner, name = where
    real = getattr(owner, name)

    def fails(*args, **options):
        real(*args, **options)
        raise error

    with Loader(cache, 8, prefetch=8, columns=["id"]) as loader:
        epochs = loader.repeat()
        next(epochs)
        monkeypatch.setattr(owner, name, fails)
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


@pytest.mark.parametrize("where", [(Store, "lease"), (Snapshot, "__init__"), (Snapshot, "map_all")])
@pytest.mark.parametrize("begins_anew", [False, True])
def test_whoever_ends_it_during_a_slice_nothing_stays_leased(cache, monkeypatch, where, begins_anew):
    owner, name = where
    real, came, anew = getattr(owner, name), False, []

    def end():
        if begins_anew:
            anew.append(loader.repeat())
            next(anew[0])
        else:
            loader.close()

    def ends(*args, **options):
        nonlocal came
        result = real(*args, **options)
        if not came:
            came = True
            thread = threading.Thread(target=end)
            thread.start()
            thread.join(DEADLINE_SECONDS)
            assert not thread.is_alive()
        return result

    with Loader(cache, 8, prefetch=8, columns=["id"]) as loader, closing(loader.repeat()) as epochs:
        next(epochs)
        monkeypatch.setattr(owner, name, ends)
        with suppress(RuntimeError):  # a newer epoch began
            ids_of(itertools.islice(epochs, 2 * STEPS))
        assert came
        if begins_anew:
            assert len(ids_of(itertools.islice(anew[0], 2 * STEPS - 1))) == 2 * 160 - 8
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
