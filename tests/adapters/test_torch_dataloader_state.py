"""The state of `dataloader(...)`: it counts what the loop got, and goes on there, in it or in a Loader."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
from helpers import ids_of, make_cache, publish, wait_until
from quick import first_is_quick

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from torch.utils.data import DataLoader

import arrowcache as ac
from arrowcache.torch import CacheDataLoader, CacheDataset, DevicePrefetcher, Loader, dataloader

WAYS: dict[str, dict[str, Any]] = {
    "here": {"num_workers": 0},
    "by workers": {"num_workers": 2, "prefetch_factor": 3},
    "by workers of one epoch": {"num_workers": 2, "persistent_workers": False},
    "by workers that transform": {"num_workers": 2, "transform": lambda batch: batch},
}
FIRST, SECOND = range(160), range(192)


@pytest.fixture(params=first_is_quick([*WAYS]))
def way(request) -> dict[str, Any]:
    return WAYS[request.param]


def stop_after(steps: int, loader: CacheDataLoader) -> tuple[list[int], dict[str, Any]]:
    """The ids of so many steps of a new epoch, and the state in the loop then."""
    epoch = iter(loader)
    return ids_of(itertools.islice(epoch, steps)), loader.state_dict()


@pytest.mark.parametrize("taken", first_is_quick([3, 1, 9, 13]))
def test_a_state_counts_the_batches_that_the_loop_got(cache, way, tmp_path, taken):
    with Loader(cache, 16, seed=3) as own:
        orders = [ids_of(own) for _ in range(3)]
    loader = dataloader(cache, 16, seed=3, **way)
    seen = []
    for _ in range(2):
        for batch in loader:
            seen += batch["id"].tolist()
            if len(seen) == 16 * taken:
                torch.save(loader.state_dict(), tmp_path / "state")
    seen = seen[: 16 * taken]
    again = dataloader(cache, 16, seed=3, **way)
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    rows = [ids_of(again) for _ in range(2)]
    assert seen + rows[0] + rows[1] == [*itertools.chain(*orders)][: len(seen) + len(rows[0]) + 160]
    assert len(rows[0]) == 160 - 16 * (taken % 10)


@pytest.mark.parametrize("size", [5, 16])
def test_a_state_goes_on_in_a_loader_and_one_of_a_loader_here(cache, way, size):
    with Loader(cache, 16, seed=3, drop_last=False) as own:
        whole = ids_of(own)
    head, state = stop_after(4, dataloader(cache, 16, seed=3, **way))
    with Loader(cache, size, seed=9, drop_last=False) as loader:
        loader.load_state_dict(state)
        assert head + ids_of(loader) == whole
        loader.load_state_dict(state)
        more = ids_of(itertools.islice(loader, 2))
        state = loader.state_dict()
    loader = dataloader(cache, 7, seed=9, drop_last=False, **way)
    loader.load_state_dict(state)
    assert head + more + ids_of(loader) == whole


def test_with_the_last_batch_a_state_is_of_the_next_epoch(cache, way):
    """A trainer that knows the length asks for no batch behind it."""
    loader = dataloader(cache, 16, seed=3, **way)
    _, state = stop_after(len(loader), loader)
    assert (state["epoch"], state["segments"]) == (1, [])
    publish(cache, 2)
    again = dataloader(cache, 16, seed=3, **way)
    again.load_state_dict(state)
    assert sorted(ids_of(again)) == [*SECOND]
    assert again.state_dict()["epoch"] == 2


def test_before_the_first_batch_nothing_has_begun(cache, way):
    loader = dataloader(cache, 16, seed=3, **way)
    whole = ids_of(dataloader(cache, 16, 0, seed=3))
    for _ in range(3):
        iter(loader)  # as trainers do, to see whether they can
    assert loader.state_dict()["segments"] == []
    assert cache.stats().leased_bytes == 0
    assert ids_of(loader) == whole
    assert loader.batch_sampler.epoch == 1


def test_after_a_break_a_state_is_of_the_epoch_that_was_left_until_the_next_has_begun(cache, way):
    loader = dataloader(cache, 16, **way)
    head = ids_of(itertools.islice(loader, 4))
    gc.collect()
    epoch = iter(loader)
    state = loader.state_dict()
    next(epoch)
    assert loader.state_dict()["epoch"] == 1
    again = dataloader(cache, 16, **way)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert sorted(head + ids_of(again)) == [*FIRST]


def test_the_length_of_a_resumed_epoch_is_that_of_the_whole_as_trainers_count(cache, way):
    _, state = stop_after(4, dataloader(cache, 16, **way))
    publish(cache, 2)
    loader = dataloader(cache, 16, **way)
    loader.load_state_dict(state)
    lengths = [len(loader), *(len(loader) for _ in itertools.islice(loader, 3))]
    assert lengths == [10] * 4
    assert len(ids_of(loader)) == len(SECOND)


@pytest.mark.parametrize("act", ["a newer one began", "a state was loaded"])
def test_workers_that_live_on_make_the_batches_of_one_epoch_at_a_time(cache, act):
    loader = dataloader(cache, 16, 2)
    epoch = iter(loader)
    head = ids_of([next(epoch)])
    if act == "a newer one began":
        next(iter(loader))
    else:
        state = loader.state_dict()
        loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match=f"this .* ended when {act}: iterate anew"):
        next(epoch)
    if act == "a state was loaded":
        assert sorted(head + ids_of(loader)) == [*FIRST]


def test_rows_of_segments_that_left_are_passed_over_with_a_warning_and_new_ones_are_the_next_epochs(
    cache, way
):
    head, state = stop_after(4, dataloader(cache, 16, seed=3, **way))
    gc.collect()
    wait_until(lambda: cache.stats().leased_bytes == 0, "the leases to end")
    cache.evict(1)
    publish(cache, 2)
    lost = {*range(16)} - {*head}
    loader = dataloader(cache, 4, seed=3, drop_last=False, **way)
    with pytest.raises(ac.MissingSegmentsError, match=f"{len(lost)} rows of epoch 0"):
        loader.load_state_dict(state, missing="raise")
    assert loader.state_dict()["segments"] == [], "nothing has changed"
    loader.load_state_dict(state)
    with pytest.warns(RuntimeWarning, match=f"{len(lost)} rows of epoch 0 .* 1 of its 10 segments"):
        rest = ids_of(loader)
    assert sorted(head + rest) == sorted({*FIRST} - lost)
    assert sorted(ids_of(loader)) == [*range(16, 192)]


def test_a_prefetcher_counts_the_batches_that_it_hands_out(cache, way):
    loader = dataloader(cache, 16, **way)
    with DevicePrefetcher(loader, "cpu", depth=3) as prefetcher:
        for taken, batch in enumerate(prefetcher, 1):
            state = loader.state_dict()
            assert state["position"] == (16 * taken if taken < 10 else 0)
            assert len(batch["id"]) == 16
        assert (state["epoch"], loader.state_dict()) == (1, state)


def test_the_state_of_an_epoch_that_an_error_ended_leaves_out_what_was_not_delivered(cache, way):
    def transform(batch):
        if 100 in batch["id"]:
            raise LookupError("of all rows, 100")
        return batch

    loader = dataloader(cache, 16, shuffle=None, **{**way, "transform": transform})
    seen: list[int] = []
    with pytest.raises(LookupError, match="of all rows, 100"):
        seen.extend(number for batch in loader for number in batch["id"].tolist())
    again = dataloader(cache, 16, 0)
    again.load_state_dict(loader.state_dict())
    assert seen + ids_of(again) == [*FIRST]


# no state


def test_batches_that_come_in_any_order_have_no_state_within_an_epoch(cache):
    loader = dataloader(cache, 16, 2, in_order=False)
    assert loader.state_dict()["position"] == 0
    epoch = iter(loader)
    next(epoch)
    with pytest.raises(ValueError, match="with in_order=False batches come in any order"):
        loader.state_dict()
    assert [*itertools.islice(epoch, 9)]
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize(
    ("state", "missing", "words"),
    [
        (None, "skip", "not a state of an arrowcache Loader"),
        ({}, "skip", "not a state of an arrowcache Loader"),
        ({"_num_yielded": 3, "_iterator_finished": False}, "skip", "not a state of an arrowcache Loader"),
        ({"version": 3}, "skip", "has version 3"),
        ({"position": 1000}, "skip", "position=1000 of an epoch of 160 rows"),
        ({"segments": [[0, 1, 1 << 20]]}, "skip", "of another cache"),
        ({}, "warn", "missing='warn' must be 'skip' or 'raise'"),
    ],
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(cache, state, missing, words):
    loader = dataloader(cache, 16, 0)
    epoch = iter(loader)
    head = ids_of([next(epoch)])
    own = loader.state_dict()
    if state or missing == "warn":
        state = state if "_num_yielded" in state else own | state
    with pytest.raises(ValueError, match=words):
        loader.load_state_dict(state, missing)
    assert loader.state_dict() == own
    assert sorted(head + ids_of(epoch)) == [*FIRST]


def test_a_state_of_a_frozen_cache_is_refused_elsewhere(cache, tmp_path):
    frozen = make_cache(tmp_path / "frozen")
    publish(frozen, 2)
    frozen.freeze()
    _, state = stop_after(2, dataloader(frozen, 4, 0))
    with pytest.raises(ValueError, match="of a frozen cache whose content has the digest"):
        dataloader(cache, 4, 0).load_state_dict(state)
    again = dataloader(frozen, 4, 0)
    again.load_state_dict(state)
    assert len(ids_of(again)) == 24


def test_a_dataloader_whose_sampler_another_one_reads_has_no_state(cache):
    loader = dataloader(cache, 16, 0)
    other = DataLoader(CacheDataset(cache), batch_sampler=loader.batch_sampler)
    assert len(ids_of(itertools.islice(other, 3))) == 48
    words = r"another DataLoader reads the batch_sampler of this one.*leave this one out of prepare\(\)"
    with pytest.raises(ValueError, match=words):
        loader.state_dict()
    head, state = stop_after(2, loader)
    assert (state["epoch"], state["position"]) == (1, len(head))
    next(iter(other))
    with pytest.raises(ValueError, match=words):
        loader.state_dict()


def test_a_resumed_epoch_stays_where_a_script_says_its_number(cache, way):
    head, state = stop_after(4, dataloader(cache, 16, seed=3, **way))
    again = dataloader(cache, 16, seed=3, **way)
    again.load_state_dict(state)
    again.batch_sampler.set_epoch(0)  # as of a loop over epochs from the saved one on
    assert sorted(head + ids_of(again)) == [*FIRST]
    again.load_state_dict(state)
    again.batch_sampler.set_epoch(1)
    assert sorted(ids_of(again)) == [*FIRST]


def test_a_state_can_be_taken_while_the_first_batch_is_made(cache):
    states = []

    def tell(batch):
        states.append(loader.state_dict())
        return batch

    loader = dataloader(cache, 16, 0, seed=3, transform=tell)
    assert sorted(ids_of(loader)) == [*FIRST]
    ids_of(itertools.islice(loader, 1))
    assert [(state["epoch"], state["position"]) for state in states[:3]] == [(0, 0), (0, 16), (0, 32)]
    assert (states[10]["epoch"], states[10]["position"]) == (1, 0)
