"""An epoch owns its lease, its part in the ranks' shared plan and the cache's counts: it ends by `end`."""

from __future__ import annotations

import warnings

import pytest
from helpers import publish

from arrowcache.native import maps
from arrowcache.reading.epoch import Epochs
from arrowcache.reading.options import LoaderOptions, RankInfo
from arrowcache.reading.stats import Meter
from arrowcache.storage.folder import Folder

ROWS = 64


@pytest.fixture(params=[None, RankInfo(0, 2, "job", 1)], ids=["alone", "of two ranks"])
def epochs(cache, request):
    epochs = Epochs(cache.store, LoaderOptions(cache.store.settings, 8, timeout=1.0), Meter())
    epochs.join(request.param)
    yield epochs
    epochs.close()


def left(cache) -> tuple[int, int, int]:
    """Bytes that are leased, rows that count as served, files that ranks agreed by."""
    files = len(list(cache.store.folder.ranks.iterdir()))
    return cache.stats().leased_bytes, cache.store.usage.record().served_rows, files


@pytest.mark.parametrize("steps", [0, 3])
def test_an_epoch_lets_go_of_all_that_it_has_and_twice_is_once(cache, epochs, steps):
    epoch = epochs.begin()
    leased_bytes, served_rows, _ = left(cache)
    assert leased_bytes > 0
    assert served_rows == epoch.order.steps * 8
    for _ in range(steps):
        epoch.deliver()
    for _ in range(2):
        epoch.end()
        assert left(cache) == (0, steps * 8, 0)


def test_an_epoch_whose_batches_are_all_made_counts_what_is_delivered_until_its_end(cache, epochs):
    epoch = epochs.begin()
    calls: list[object] = []
    epoch.on_end = lambda: calls.append("no more")
    epoch.end(calls.append, may_deliver=True)
    epoch.end(calls.append, may_deliver=True)
    epoch.deliver()
    epoch.end()
    assert calls == ["no more", epoch.snapshot], "those who make batches end before it is unleased"
    kept = [epoch.snapshot]
    assert left(cache)[1:] == (8, 0)
    kept[0].close()
    assert left(cache)[0] == 0


@pytest.mark.parametrize("failing", ["mapping", "first count", "second count", "warning"])
def test_an_epoch_that_cannot_begin_leaves_nothing_and_is_the_next_one_still(
    cache, epochs, failing, monkeypatch
):
    publish(cache, 48)  # nearly full: beside a writer rows are left out, of which it warns at last
    with monkeypatch.context() as patch, cache.writer():
        if failing == "mapping":
            patch.setattr(maps.File, "open", lambda *_: 1 / 0)
        elif failing != "warning":  # of an epoch of each segment, then of the rows that are to be served
            changes = iter([False] if failing == "first count" else [True, False])
            change = Folder.change_usage
            patch.setattr(Folder, "change_usage", lambda *how: change(*how) if next(changes, True) else 1 / 0)
        else:
            patch.setattr(warnings, "warn", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            epochs.begin()
    assert left(cache) == (0, 0, 0)
    epoch = epochs.begin()
    assert epoch.plan.epoch == 0
    epoch.end()
