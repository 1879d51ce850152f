"""Resume: a saved epoch goes on with the rows that were not delivered, whatever has changed since."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from helpers import (
    append_rows,
    flip_byte,
    ids_of,
    make_cache,
    publish,
    published_ids,
    segment_files,
    wait_until,
)

import arrowcache as ac
from arrowcache import Loader
from arrowcache.reading.plan import Plan

SHUFFLES = ["rows", "window", "blocks", None]
ROWS = 57  # three segments of 16 and one of 9


def loader_of(cache: ac.Cache, size: int = 7, shuffle: str | None = "rows", **options: Any) -> Loader:
    """A Loader of ids, seed 3, whose window is about half of the cache."""
    if shuffle == "window":
        options["window_bytes"] = sum(path.stat().st_size for path in segment_files(cache)) // 2
    options = {"seed": 3, "columns": ["id"], "worker_type": "thread"} | options
    return Loader(cache, size, shuffle=shuffle, **options)


def stop_after(steps: int, loader: Loader) -> tuple[list[int], dict[str, Any]]:
    """The ids of so many steps of a new epoch, and the state then."""
    epoch = iter(loader)
    delivered = ids_of(next(epoch) for _ in range(steps))
    return delivered, loader.state_dict()


def evict_segments(cache: ac.Cache, count: int) -> None:
    """Evict the oldest ones, one by one, once nobody leases them."""
    wait_until(lambda: cache.stats().leased_bytes == 0, "the leases to end")
    for _ in range(count):
        assert cache.evict(1) > 0


# at every step


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_another_seed_and_shuffle_of_the_loader_change_nothing_of_the_saved_epoch(cache, shuffle):
    with loader_of(cache, shuffle=shuffle) as loader:
        whole = ids_of(loader)
    with loader_of(cache, shuffle=shuffle) as loader:
        delivered, state = stop_after(3, loader)
    for other in SHUFFLES:
        with loader_of(cache, shuffle=other, seed=99, epoch_rows=20) as resumed:
            resumed.load_state_dict(state)
            assert delivered + ids_of(resumed) == whole
            assert len(ids_of(resumed)) == 14, "the next epoch is the loader's own"


def test_a_resumed_epoch_can_be_saved_and_resumed_again(cache):
    with loader_of(cache, drop_last=False) as loader:
        whole = ids_of(loader)
    found, state, sizes = [], None, [7, 3, 5, 1, 4, 16]
    for size in sizes:
        with loader_of(cache, size, drop_last=False) as loader:
            if state is not None:
                loader.load_state_dict(state)
            delivered, state = stop_after(1, loader)
            found += delivered
    with loader_of(cache, 10, drop_last=False) as loader:
        loader.load_state_dict(state)
        assert found + ids_of(loader) == whole


# when a state is taken


def test_before_the_first_epoch_a_state_is_that_of_the_first(cache):
    with loader_of(cache) as loader, loader_of(cache) as resumed:
        state = loader.state_dict()
        assert (state["epoch"], state["position"], state["segments"]) == (0, 0, [])
        resumed.load_state_dict(state)
        assert ids_of(resumed) == ids_of(loader)
        assert ids_of(resumed) == ids_of(loader)


def test_after_a_break_a_state_is_of_the_epoch_that_was_left(cache):
    with loader_of(cache) as loader, loader_of(cache) as resumed:
        whole = ids_of(resumed)
        delivered = []
        for batch in loader:
            delivered += batch["id"].tolist()
            if len(delivered) == 21:
                break
        resumed.load_state_dict(loader.state_dict())
        assert delivered + ids_of(resumed) == whole
        assert len(ids_of(loader)) == 56, "the for after a break is an epoch of its own"
        assert loader.state_dict()["epoch"] == 2


def test_after_the_end_a_state_is_of_the_next_epoch(cache):
    with loader_of(cache) as loader, loader_of(cache) as resumed:
        ids_of(loader)
        state = loader.state_dict()
        assert (state["epoch"], state["segments"]) == (1, [])
        publish(cache, 1, first=100)
        resumed.load_state_dict(state)
        next_epoch = ids_of(resumed)
        assert next_epoch == ids_of(loader)
        assert set(range(100, 116)) & set(next_epoch), "it takes a snapshot of its own"


def test_in_the_loop_at_the_last_batch_nothing_remains_and_the_next_for_is_the_next_epoch(cache):
    with loader_of(cache) as loader, loader_of(cache) as resumed:
        for _ in loader:
            state = loader.state_dict()
        assert (state["epoch"], state["position"]) == (0, 56)
        resumed.load_state_dict(state)
        assert ids_of(resumed) == []
        assert resumed.state_dict()["epoch"] == 1
        assert ids_of(resumed) == ids_of(loader)


def test_a_state_of_repeat_goes_on_with_repeat_over_the_seam(cache):
    with loader_of(cache, 16) as loader:  # three steps an epoch
        endless = loader.repeat()
        batches, states = [], []
        for _ in range(9):
            states.append(loader.state_dict())
            batches.append(next(endless)["id"].tolist())
        endless.close()
    assert [state["epoch"] for state in states[1:]] == [0, 0, 0, 1, 1, 1, 2, 2]
    for step, state in enumerate(states):
        with loader_of(cache, 16) as resumed:
            resumed.load_state_dict(state)
            endless = resumed.repeat()
            assert [next(endless)["id"].tolist() for _ in range(9 - step)] == batches[step:]
            endless.close()


def test_a_loaded_state_is_what_state_dict_returns_until_the_next_for(cache):
    with loader_of(cache) as loader:
        _, first = stop_after(2, loader)
        _, second = stop_after(5, loader)
    with loader_of(cache) as resumed:
        for state in (first, second, first):
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            assert resumed.steps is None


@pytest.mark.parametrize("device", [None, "cpu"])
def test_an_iterator_that_is_dropped_before_its_first_batch_began_no_epoch(cache, torch, device):
    from arrowcache.torch import Loader as TorchLoader

    with TorchLoader(cache, 7, seed=3, device=device) as loader:
        rows = ids_of(loader)
        iter(loader).close()
        batches = iter(loader)
        before = ids_of(next(batches) for _ in range(3))
        state = loader.state_dict()
    with TorchLoader(cache, 7, seed=3, device=device) as loader:
        loader.load_state_dict(state)
        iter(loader)  # as Lightning does, to see whether it is iterable
        append_rows(cache, range(ROWS, 2 * ROWS))
        after = ids_of(loader)
        assert loader.stats().epochs == 1
        assert len(set(before + after)) == len(before + after) == len(rows)
        iter(loader)
        assert len(ids_of(loader)) == 2 * ROWS // 7 * 7
        assert loader.state_dict()["epoch"] == 3


# over a cache that has changed


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("gone", [1, 3])
def test_rows_of_evicted_segments_are_passed_over_with_a_warning_that_counts_them(cache, shuffle, gone):
    with loader_of(cache, shuffle=shuffle, drop_last=False) as loader:
        whole = ids_of(loader)
        loader.load_state_dict(loader.state_dict() | {"epoch": 0})
        delivered, state = stop_after(2, loader)
    evict_segments(cache, gone)
    publish(cache, 1, first=100)
    lost = [number for number in whole[14:] if number < 16 * gone]
    for workers in (0, 3):
        with loader_of(cache, 5, shuffle=shuffle, drop_last=False, workers=workers) as resumed:
            resumed.load_state_dict(state)
            words = rf"^{len(lost)} rows of epoch 0 .*: {gone} of its 4 segments"
            with pytest.warns(RuntimeWarning, match=words) as warned:
                epoch = iter(resumed)
            assert len(warned) == 1
            rest = ids_of(epoch)
            assert rest == [number for number in whole[14:] if number not in lost]
            assert not set(rest) & set(delivered)
            assert set(ids_of(resumed)) == {*range(16 * gone, ROWS), *range(100, 116)}


def test_the_warning_of_missing_rows_names_the_line_that_iterates(cache):
    with loader_of(cache) as loader:
        _, state = stop_after(2, loader)
    evict_segments(cache, 1)
    with loader_of(cache) as resumed:
        for begin in (resumed.__iter__, resumed.repeat):
            resumed.load_state_dict(state)
            with pytest.warns(RuntimeWarning, match="left the cache") as warned:
                begin().close()
            assert warned[0].filename == __file__


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_missing_segments_raise_when_the_state_is_loaded_if_told(cache, shuffle):
    with loader_of(cache, shuffle=shuffle) as loader:
        _, state = stop_after(0, loader)
    evict_segments(cache, 2)
    with loader_of(cache, shuffle=shuffle) as resumed:
        words = "32 rows of epoch 0 .* 2 of its 4 segments .* pass missing='skip'"
        with pytest.raises(ac.MissingSegmentsError, match=words) as caught:
            resumed.load_state_dict(state, missing="raise")
        assert isinstance(caught.value, ac.ArrowCacheError)
        assert isinstance(caught.value, LookupError)
        resumed.load_state_dict(state)
        with pytest.warns(RuntimeWarning, match="32 rows"):
            epoch = iter(resumed)
        assert len(ids_of(epoch)) == 21


def test_a_state_that_is_refused_changes_nothing_of_the_next_epoch(cache):
    with loader_of(cache) as loader:
        _, state = stop_after(0, loader)
    evict_segments(cache, 2)
    with loader_of(cache, drop_last=False) as resumed:
        epoch = iter(resumed)
        delivered = ids_of([next(epoch)])
        with pytest.raises(ac.MissingSegmentsError):
            resumed.load_state_dict(state | {"epoch": 5}, missing="raise")
        assert sorted(delivered + ids_of(epoch)) == list(range(32, ROWS))
        assert resumed.state_dict()["epoch"] == 1
        assert sorted(ids_of(resumed)) == list(range(32, ROWS))


def test_segments_that_leave_between_load_and_for_raise_in_the_for_if_told(cache):
    with loader_of(cache) as loader:
        _, state = stop_after(0, loader)
    with loader_of(cache) as resumed:
        resumed.load_state_dict(state, missing="raise")
        evict_segments(cache, 1)
        for _ in range(2):
            with pytest.raises(ac.MissingSegmentsError, match="16 rows"):
                iter(resumed)
            assert cache.stats().leased_bytes == 0


@pytest.mark.parametrize("shuffle", [None, "window"])
def test_segments_that_were_delivered_whole_may_leave_without_a_word(cache, shuffle):
    with loader_of(cache, shuffle=shuffle, drop_last=False) as loader:
        whole = ids_of(loader)
        loader.load_state_dict(loader.state_dict() | {"epoch": 0})
        delivered, state = stop_after(7, loader)
    gone = min(set(whole) - set(delivered)) // 16
    assert gone > 0, "no segment was delivered whole: the test shows nothing"
    evict_segments(cache, gone)
    for missing in ("skip", "raise"):
        with loader_of(cache, shuffle=shuffle, drop_last=False) as resumed:
            resumed.load_state_dict(state, missing=missing)  # a warning would fail the test
            assert delivered + ids_of(resumed) == whole


def test_a_segment_damaged_since_is_quarantined_and_its_rows_are_missing(cache):
    with loader_of(cache) as loader:
        delivered, state = stop_after(3, loader)
    flip_byte(segment_files(cache)[1], 0)
    lost = set(range(16, 32)) - set(delivered)
    with Loader(cache.path, 7, columns=["id"], drop_last=False) as resumed:
        resumed.load_state_dict(state)
        with pytest.warns(RuntimeWarning) as warned:
            epoch = iter(resumed)
        assert any("quarantined" in str(w.message) for w in warned)
        assert any(f"{len(lost)} rows of epoch 0" in str(w.message) for w in warned)
        assert sorted(delivered + ids_of(epoch)) == sorted(set(range(ROWS)) - lost)
    assert cache.stats().leased_bytes == 0


@pytest.mark.parametrize("endless", [False, True])
def test_an_epoch_whose_segments_are_all_gone_is_empty_and_the_next_one_is_not(cache, endless):
    with loader_of(cache, 16) as loader:
        _, state = stop_after(1, loader)
    evict_segments(cache, 4)
    publish(cache, 3, first=100)
    with loader_of(cache, 16) as resumed:
        resumed.load_state_dict(state)
        with pytest.warns(RuntimeWarning, match="41 rows .* 4 of its 4 segments"):
            epoch = resumed.repeat() if endless else iter(resumed)
        if endless:
            assert sorted(ids_of(next(epoch) for _ in range(3))) == list(range(100, 148))
            assert resumed.state_dict()["epoch"] == 1
            epoch.close()
        else:
            assert ids_of(epoch) == []
            assert sorted(ids_of(resumed)) == list(range(100, 148))


def test_the_rest_of_an_epoch_includes_the_headroom_and_what_where_leaves_out(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="512KiB")
    publish(cache, 30)  # nearly full: beside a writer an epoch leaves the oldest segments alone
    everything = published_ids(cache)
    with Loader(cache, 8, drop_last=False) as loader:
        delivered, state = stop_after(2, loader)
        with cache.writer():
            assert set(ids_of(loader)) < set(everything)
    with Loader(cache, 8, drop_last=False, where=lambda segment: False) as resumed, cache.writer():
        resumed.load_state_dict(state)
        assert sorted(delivered + ids_of(resumed)) == everything


# wrong arguments


def test_a_state_says_nothing_but_plain_values(cache):
    with loader_of(cache, shuffle="window") as loader:
        _, state = stop_after(1, loader)
    assert {type(value) for value in state.values()} <= {int, str, list, type(None)}
    assert {type(entry) for run in state["segments"] for entry in run} == {int}
    assert Plan.from_state(state).to_state() == state
    assert len(json.dumps(state)) < 500
    assert os.fspath(cache.path) not in json.dumps(state)
