"""`arrowcache.torch.Loader(device=...)`: the epochs of the loader, delivered by a prefetcher."""

from __future__ import annotations

import gc
import inspect
import threading
from contextlib import suppress

import pytest
from begun import own_threads
from helpers import ids_of, in_child, limit, wait_until
from quick import first_is_quick

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

import arrowcache as ac
from arrowcache.torch import Loader

BASE = torch.arange(256, dtype=torch.float32).reshape(16, 16)


@pytest.fixture
def fake(fake, monkeypatch):
    """A device, to which images go by themselves."""
    limit(monkeypatch, small_leaf_bytes=4096)
    return fake


def test_its_arguments_are_those_of_the_loader_and_a_device():
    ours = inspect.signature(Loader).parameters
    theirs = inspect.signature(ac.Loader).parameters
    assert list(ours) == [*theirs, "device"]
    assert {name: ours[name].default for name in theirs} == {
        name: parameter.default for name, parameter in theirs.items()
    }


@pytest.mark.parametrize("order", first_is_quick(["random", "none", "copy", "compute", "all"]))
@pytest.mark.parametrize("workers", first_is_quick([0, 2]))
def test_the_device_copies_from_slots_which_are_not_used_again_before(cache, fake, order, workers):
    fake.order = order
    options = {"workers": workers, "worker_type": "thread"}
    with Loader(cache, 16, device="fake", **options) as loader, Loader(cache, 16) as plain:
        for _ in range(20):
            for batch, expected in zip(loader, plain, strict=True):
                for name, tensor in expected.items():
                    fake.read(batch[name], tensor)
        assert loader.device_stats().device_allocations == 2 * 4
        assert loader.device_stats().pinned_bytes <= 3 * 256  # for ids, which are small
        assert fake.calls.count("host_memory") <= loader.stats().slot_growths + 3 < 20 * 10  # batches
        assert fake.asked_if_pinned == 0


def test_the_fake_finds_a_slot_that_is_used_again_too_early(cache, fake):
    fake.order, fake.deaf = "none", ("query",)
    with Loader(cache, 16, device="fake") as loader, Loader(cache, 16) as plain:
        for batch, expected in zip(loader, plain, strict=True):
            fake.read(batch["image"], expected["image"])
    fake.finish()
    assert fake.errors
    fake.errors.clear()


def test_a_window_of_a_given_size_is_shuffled_as_without_a_device(cache):
    options = {"shuffle": "window", "window_bytes": "20KiB"}
    with Loader(cache, 16, device="cpu", **options) as loader, Loader(cache, 16, **options) as plain:
        for _ in range(2):
            assert [ids_of([batch]) for batch in loader] == [ids_of([batch]) for batch in plain]


def test_what_was_made_elsewhere_is_staged(cache, fake):
    def transform(batch):
        return {"id": batch["id"], "half": batch["image"] / 2}

    with Loader(cache, 16, device="fake", transform=transform) as loader, Loader(cache, 16) as plain:
        for batch, expected in zip(loader, plain, strict=True):
            fake.read(batch["id"], expected["id"])
            fake.read(batch["half"], expected["image"] / 2)
        assert 0 < loader.device_stats().pinned_bytes <= 3 * (256 + batch["half"].nbytes)


def test_a_state_counts_what_the_consumer_got_and_nothing_that_is_on_its_way(cache):
    with Loader(cache, 16, device="cpu") as loader, Loader(cache, 16) as plain:
        assert loader.state_dict() == plain.state_dict()
        for number, (batch, _) in enumerate(zip(loader, plain, strict=True)):
            assert loader.state_dict() == plain.state_dict()
            assert loader.stats().batches == number + 1
            if number == 3:
                state, seen = loader.state_dict(), []
            elif number > 3:
                seen += batch["id"].tolist()
        assert loader.state_dict() == plain.state_dict()
        with Loader(cache, 16, device="cpu") as other:
            other.load_state_dict(state)
            assert ids_of(other) == seen
            assert other.state_dict() == loader.state_dict()


def test_an_iterator_dropped_after_its_last_batch_has_delivered_its_epoch(cache):
    with Loader(cache, 16, device="cpu") as loader, Loader(cache, 16) as plain:
        for each in (loader, plain):
            iterator = iter(each)
            for _ in range(10):
                next(iterator)
            assert each.state_dict()["epoch"] == 0
            del iterator
        assert loader.state_dict() == plain.state_dict()


def test_an_iterator_that_has_come_to_the_end_of_its_source_ends_as_it_is_dropped(cache):
    gc.collect()
    gc.disable()  # the end of the source is an error, and its traceback knows the iterator
    try:
        with Loader(cache, 16, device="cpu") as loader:
            iterator = iter(loader)
            for _ in range(10):
                next(iterator)
            del iterator
            assert loader.state_dict()["epoch"] == 1
    finally:
        gc.enable()


def test_repeat_goes_on_without_end(cache):
    with Loader(cache, 16, device="cpu") as loader:
        found = []
        for number, batch in enumerate(loader.repeat()):
            found += batch["id"].tolist()
            if number == 29:
                break
        assert loader.stats().epochs == 3
    assert sorted(found) == sorted([*range(160)] * 3)


def test_a_forked_child_iterates_anew(cache):
    with Loader(cache, 8, device="cpu", drop_last=False) as loader:
        batches = iter(loader)
        first = len(next(batches)["id"])

        def child():
            with pytest.raises(ValueError, match=r"^this epoch belongs to .*: iterate anew here$"):
                next(batches)
            assert sum(len(batch["id"]) for batch in loader) > first

        with in_child(child):
            pass
        assert sum(len(batch["id"]) for batch in batches) > 0


def test_a_state_that_is_loaded_ends_an_epoch_with_an_error(cache):
    with Loader(cache, 16, device="cpu") as loader:
        state = loader.state_dict()
        older = iter(loader)
        next(older)
        loader.load_state_dict(state)
        with pytest.raises(RuntimeError, match="a state was loaded"):
            next(older)


def test_a_batch_that_does_not_come_is_a_timeout(cache):
    go = threading.Event()

    def transform(batch):
        go.wait(60)
        return batch

    with Loader(cache, 16, device="cpu", transform=transform, timeout=0.05) as loader:
        with pytest.raises(ac.LoaderTimeoutError, match=r"no batch came in 0\.05 s"):
            next(iter(loader))
        go.set()

        def is_whole() -> bool:
            with suppress(ac.LoaderTimeoutError):  # a busy machine is no finding
                return len(ids_of(loader)) == 160
            return False

        wait_until(is_whole, "an epoch whose batches come")


def test_no_thread_is_started(cache):
    with Loader(cache, 16, device="cpu") as loader:
        list(loader)
        assert {thread.name for thread in own_threads()} <= {"arrowcache-parking"}, (
            "what any loader has after an epoch"
        )


def test_an_epoch_goes_on_after_a_batch_was_refused_while_a_graph_is_captured(cache, fake):
    with Loader(cache, 16, device="fake") as loader:
        epoch = iter(loader)
        seen = next(epoch)["id"].shape[0]
        with fake.capture(), pytest.raises(RuntimeError, match="captured"):
            next(epoch)
        assert seen + sum(batch["id"].shape[0] for batch in epoch) == 160
        assert loader.stats().epochs == 1
