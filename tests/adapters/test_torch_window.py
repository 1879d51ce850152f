"""Shuffle on the device: the host's "window", bit for bit, whatever epoch, device and consumer do."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from every_type import every_type
from helpers import (
    EVERY_TYPE,
    append_rows,
    in_child,
    make_cache,
    publish,
    wait_until,
    with_less,
)
from interruptions import Interruption, files
from quick import first_is_quick

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from fake_device import ORDERS, FakeDevice

import arrowcache as ac
import arrowcache.torch.device
from arrowcache.reading import window as runs
from arrowcache.torch import Loader, deferred, plan, window
from arrowcache.torch import loader as torch_loader
from arrowcache.torch.backend import backend_of

TRACED = ("torch/window.py", "reading/window.py")
WINDOW = 40 << 10  # bytes: some 38 rows
UNEVEN = [16, 16, 5, 16, 1, 16, 16, 9, 16, 16, 16, 3, 16]


@pytest.fixture
def fake(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A device, to which images go by themselves, five rows at a time."""
    monkeypatch.setattr(plan, "SMALL_BYTES", 5000)
    monkeypatch.setattr(runs, "_RUN_BYTES", 5 * 1032)
    return fake


@pytest.fixture
def uneven(tmp_path: Path) -> ac.Cache:
    """Segments of other sizes, one after another."""
    cache = make_cache(tmp_path / "uneven")
    first = 0
    for rows in UNEVEN:
        append_rows(cache, range(first, first + rows))
        first += rows
    return cache


def ours(cache: ac.Cache, size: int = 8, device: str = "cpu", **options: Any) -> Loader:
    return Loader(cache, size, device=device, **{"shuffle": "window", "window_bytes": WINDOW} | options)


def theirs(cache: ac.Cache, size: int = 8, **options: Any) -> Loader:
    return Loader(cache, size, **{"shuffle": "window", "window_bytes": WINDOW} | options)


def same(mine: dict[str, Any], host: dict[str, Any]) -> None:
    """Columns, their order, types and bits."""
    assert list(mine) == list(host)
    for name, expected in host.items():
        found = mine[name]
        if not isinstance(expected, torch.Tensor):
            assert found == expected
        elif expected.is_nested:
            assert found.layout == expected.layout
            assert bits(found.values()) == bits(expected.values())
            assert torch.equal(found.offsets(), expected.offsets())
        elif name == "_age_seconds":
            assert found.shape == expected.shape
        else:
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert bits(found) == bits(expected)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_epochs(mine: Loader, host: Loader, epochs: int = 1) -> None:
    for _ in range(epochs):
        count = 0
        for found, expected in zip(mine, host, strict=True):
            same(found, expected)
            assert mine.state_dict() == host.state_dict()
            count += 1
        assert count


def begin(loader: Loader, steps: int) -> None:
    """Take so many batches of an epoch."""
    for _, _ in zip(range(steps), loader, strict=False):
        pass


def is_shuffled_there(loader: Loader) -> bool:
    return "_ring" in vars(loader)


# The host's order


@pytest.mark.parametrize("window_bytes", first_is_quick([WINDOW, 1, 20 << 10, "1GB"]))
@pytest.mark.parametrize("size", first_is_quick([8, 1, 17, 64]))
@pytest.mark.parametrize("drop_last", [True, False])
def test_epochs_are_those_of_the_host(cache, size, window_bytes, drop_last):
    options = {"window_bytes": window_bytes, "drop_last": drop_last, "seed": 5}
    with ours(cache, size, **options) as mine, theirs(cache, size, **options) as host:
        same_epochs(mine, host, 3)
        assert mine.stats().batches == host.stats().batches == mine.device_stats().batches
        assert (mine.stats().rows, mine.stats().bytes) == (host.stats().rows, host.stats().bytes)
        assert mine.stats().epochs == 3
        assert is_shuffled_there(mine)


@pytest.mark.parametrize("size", first_is_quick([8, 3, 40]))
@pytest.mark.parametrize("window_bytes", first_is_quick([WINDOW, 10 << 10, 80 << 10]))
@pytest.mark.parametrize("epoch_rows", [None, 48, 333])
def test_segments_may_have_any_sizes_and_an_epoch_fewer_rows_than_there_are_or_more(
    uneven, size, window_bytes, epoch_rows
):
    for drop_last in (True, False):
        options = {"window_bytes": window_bytes, "epoch_rows": epoch_rows, "drop_last": drop_last}
        with ours(uneven, size, **options) as mine, theirs(uneven, size, **options) as host:
            same_epochs(mine, host, 2)


@pytest.mark.parametrize("drop_last", [True, False])
def test_each_rank_takes_its_part(uneven, drop_last):
    with ExitStack() as stack:
        for rank in range(3):
            options = {"rank": rank, "world_size": 3, "drop_last": drop_last}
            mine = stack.enter_context(ours(uneven, 7, run_id="device", **options))
            host = stack.enter_context(theirs(uneven, 7, run_id="host", **options))
            same_epochs(mine, host, 2)


def test_all_kinds_of_columns(tmp_path):
    cache = make_cache(
        tmp_path / "cache", EVERY_TYPE, capacity="8MiB", segment_bytes="128KiB", segment_rows=4
    )
    with cache.writer() as writer:
        writer.extend(**every_type())
    for columns in (None, ["when", "name", "id"], ["boxes", "tensor_bool"], ["name"]):
        options = {"columns": columns, "with_ids": True, "window_bytes": "20KiB", "drop_last": False}
        with ours(cache, 4, **options) as mine, theirs(cache, 4, **options) as host:
            same_epochs(mine, host, 2)
            assert is_shuffled_there(mine) == (columns != ["name"])


def test_repeat_is_that_of_the_host_while_rows_come_and_go(cache):
    with ours(cache) as mine, theirs(cache) as host:
        batches, expected = mine.repeat(), host.repeat()
        for step in range(90):
            same(next(batches), next(expected))
            if step % 20 == 19:
                assert mine.state_dict() == host.state_dict()
        assert mine.stats().epochs == host.stats().epochs == 5


# Resume


@pytest.mark.parametrize("steps", first_is_quick([7, 0, 1, 13, 19, 20]))
def test_a_saved_epoch_goes_on_as_the_hosts_does(cache, steps):
    with ours(cache) as mine:
        begin(mine, steps)
        state = mine.state_dict()
    for size, window_bytes in ((8, WINDOW), (5, WINDOW), (8, 5 << 10), (8, "1GB")):
        options = {"window_bytes": window_bytes}
        with ours(cache, size, **options) as mine, theirs(cache, size, **options) as host:
            mine.load_state_dict(state)
            host.load_state_dict(state)
            same_epochs(mine, host, 2)


@pytest.mark.parametrize("gone", first_is_quick([2, 5]))
@pytest.mark.parametrize("epoch_rows", [None, 333])
def test_rows_that_have_left_are_passed_over_as_on_the_host(uneven, gone, epoch_rows):
    with theirs(uneven, epoch_rows=epoch_rows) as host:
        begin(host, 3)
        state = host.state_dict()
    wait_until(lambda: uneven.stats().leased_bytes == 0, "the lease to end")
    for _ in range(gone):
        assert uneven.evict(1) > 0
    for drop_last in (True, False):
        options = {"epoch_rows": epoch_rows, "drop_last": drop_last}
        with ours(uneven, **options) as mine, theirs(uneven, **options) as host:
            mine.load_state_dict(state)
            host.load_state_dict(state)
            with pytest.warns(RuntimeWarning, match="rows of epoch 0"):
                same_epochs(mine, host)
            same_epochs(mine, host)


@pytest.mark.parametrize("shuffle", ["rows", "blocks", None])
def test_an_epoch_that_was_begun_in_another_order_ends_in_it(cache, shuffle):
    with Loader(cache, 8, shuffle=shuffle) as begun:
        begin(begun, 3)
        state = begun.state_dict()
    with ours(cache) as mine, theirs(cache) as host:
        mine.load_state_dict(state)
        host.load_state_dict(state)
        same_epochs(mine, host, 2)


# What is kept of the loader


def test_leases_end_as_the_window_moves_on(cache):
    leased = []
    with ours(cache) as mine, theirs(cache) as host:
        for loader in (mine, host):
            leased.append([cache.stats().leased_bytes for _ in loader])
            wait_until(lambda: cache.stats().leased_bytes == 0, "the lease to end")
    assert leased[0] == leased[1]
    assert leased[0][-1] < leased[0][0]


def test_headroom_is_left_to_writers(cache):
    publish(cache, 60)
    with cache.writer() as writer:
        writer.append(id=0, image=torch.zeros(16, 16))
        with ours(cache) as mine:
            seen = sum(len(batch["id"]) for batch in mine)
            assert mine.stats().left_out_rows > 0
            assert seen // 8 == (cache.stats().rows - mine.stats().left_out_rows) // 8


@pytest.mark.parametrize(
    "options",
    [
        {"window_bytes": None},
        {"transform": dict},
        {"workers": 1, "worker_type": "thread", "transform": dict},
        {"device": None},
        {"shuffle": "rows", "window_bytes": None},
    ],
    ids=str,
)
def test_where_it_cannot_be_the_host_shuffles(cache, options):
    with Loader(
        cache, 8, **{"shuffle": "window", "window_bytes": WINDOW, "device": "cpu"} | options
    ) as loader:
        assert not is_shuffled_there(loader)
        assert sum(len(batch["id"]) for batch in loader) == 160


def test_no_thread_is_started(cache):
    with theirs(cache) as host:
        list(host)
        usual = {thread.name for thread in threading.enumerate()}
        with ours(cache) as mine:
            list(mine)
            assert {thread.name for thread in threading.enumerate()} == usual


def test_a_forked_child_begins_anew(cache):
    mine = ours(cache)
    epoch = iter(mine)
    next(epoch)
    state = mine.state_dict()

    def child() -> None:
        with theirs(cache) as host:
            host.load_state_dict(state)
            mine.load_state_dict(state)
            same_epochs(mine, host)

    with in_child(child):
        pass
    assert len(list(epoch)) == 19
    mine.close()


def test_a_forked_child_frees_nothing_of_its_parents_devices(cache, fake):
    mine, side = ours(cache, 8, "fake"), fake.compute_stream()
    epoch = iter(mine)
    for stream in (fake.default, side):
        with fake.on(stream):
            next(epoch)

    def child() -> None:
        nonlocal mine, epoch
        before = len(fake.calls), len(fake.events), fake.memory_bytes
        mine.close()
        del epoch, mine
        gc.collect()
        assert (len(fake.calls), len(fake.events), fake.memory_bytes) == before

    with in_child(child):
        pass
    mine.close()


# The device


def test_memory_is_two_windows_and_flat(cache, fake):
    with ours(cache, 8, "fake") as mine:
        seen = []
        for _ in range(6):
            for _ in mine:
                fake.finish()
                seen.append((mine.device_stats().device_bytes, mine.device_stats().device_allocations))
        assert len(set(seen[60:])) == 1, seen
        assert 0.9 * 2 * WINDOW < seen[-1][0] <= 3 * WINDOW, "two, and what is on its way there"


def test_two_windows_that_do_not_fit_are_refused_with_the_numbers(cache, fake):
    fake.most_bytes = 70 << 10
    with ours(cache, 8, "fake") as mine:
        words = (
            r"two windows of 39 rows each take 7\d\.\d KiB of cpu, where \d+\.\d KiB is free: give a smaller"
        )
        with pytest.raises(torch.OutOfMemoryError, match=words):
            next(iter(mine))
        fake.most_bytes = 1 << 30
        with theirs(cache) as host:
            mine.load_state_dict(host.state_dict())
            same_read(fake, mine, host)


def same_read(fake: FakeDevice, mine: Iterator[Any], host: Iterator[Any]) -> None:
    for found, expected in zip(mine, host, strict=True):
        read(fake, found, expected)


@pytest.mark.parametrize("order", first_is_quick(ORDERS))
def test_every_read_sees_its_rows_whatever_is_kept_and_on_whatever_stream(uneven, fake, order):
    fake.order = order
    streams = [fake.default, fake.compute_stream(), fake.compute_stream()]
    chance = random.Random(7)
    kept: list[tuple[Any, Any, Any]] = []
    with ours(uneven, 8, "fake", drop_last=False) as mine, theirs(uneven, 8, drop_last=False) as host:
        for _ in range(4):
            batches, expected = iter(mine), iter(host)
            while True:
                stream = chance.choice(streams)
                with fake.on(stream):
                    found = next(batches, None)
                    if found is None:
                        break
                    want = next(expected)
                    read(fake, found, want)
                    kept.append((found, want, stream))
                for _ in range(chance.randrange(3)):
                    found, want, stream = kept.pop(chance.randrange(len(kept)))
                    with fake.on(stream):
                        read(fake, found, want)
                    if not kept:
                        break
                if chance.random() < 0.3:
                    fake.step(chance.choice(fake.streams))
        del found, want
        kept.clear()


def read(fake: FakeDevice, found: dict[str, Any], want: dict[str, Any]) -> None:
    for name, tensor in want.items():
        fake.read(found[name], tensor)


def test_tensors_are_none_of_anothers(cache):
    with ours(cache) as mine:
        for batch in mine:
            for tensor in batch.values():
                tensor.detach_()  # which no view lets be done
                assert tensor.untyped_storage().nbytes() == tensor.nbytes
            batch["image"].requires_grad_()


def test_batches_made_in_inference_mode_can_be_used_outside(cache):
    with ours(cache) as mine, theirs(cache) as host:
        batches = iter(mine)
        with torch.inference_mode():
            first = next(batches)
        assert not first["image"].is_inference()
        first["image"].add_(1)
        next(expected := iter(host))
        for found, want in zip(batches, expected, strict=True):
            same(found, want)


def test_what_is_on_its_way_is_dropped_where_a_newer_epoch_begins(cache, fake):
    with ours(cache, 8, "fake") as mine, theirs(cache, 8) as host:
        for steps in (3, 0, 11, 1):
            begin(mine, steps)
            begin(host, steps)
        same_read(fake, mine, host)


def test_two_threads_are_not_in_it_at_once(cache, fake):
    errors = []

    def also() -> None:
        try:
            next(batches)
        except RuntimeError as error:
            errors.append(str(error))

    def select(*arguments: Any) -> None:
        if not errors:
            thread = threading.Thread(target=also)
            thread.start()
            thread.join()
        chosen(*arguments)

    chosen = fake.select
    fake.select = select
    with ours(cache, 8, "fake") as mine, theirs(cache, 8) as host:
        batches = iter(mine)
        same_read(fake, batches, host)
    assert "another thread" in errors[0]


def test_an_epoch_goes_on_after_a_batch_was_refused_while_a_graph_is_captured(cache, fake):
    with ours(cache, 8, "fake") as mine, theirs(cache, 8) as host:
        batches, expected = iter(mine), iter(host)
        read(fake, next(batches), next(expected))
        before = len(fake.calls)
        with fake.capture(), pytest.raises(RuntimeError, match="captured"):
            next(batches)
        assert len(fake.calls) == before
        same_read(fake, batches, expected)


def test_where_a_loader_dies_while_a_graph_is_captured_no_device_is_called(cache, fake):
    mine = ours(cache, 8, "fake")
    side = fake.compute_stream()
    batches = iter(mine)
    next(batches)
    with fake.on(side):
        next(batches)
    before = len(fake.calls)
    with fake.capture():
        mine.close()
        del mine, batches
        gc.collect()
        assert len(fake.calls) == before
    deferred.tidy()
    fake.finish()
    gc.collect()


# Failures


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError])
def test_any_call_may_fail_and_the_next_epoch_is_right(cache, fake, kind):
    count = 0
    with ours(cache, 8, "fake", epoch_rows=40) as mine, theirs(cache, 8, epoch_rows=40) as host:
        for calls in [*range(60), *range(60, 300, 7)]:
            mine.load_state_dict(host.state_dict())
            fake.fails_in, fake.failure = calls, lambda: kind("of the fake")
            try:
                list(mine)
            except kind:
                count += 1
            fake.fails_in = None
            mine.load_state_dict(host.state_dict())
            same_read(fake, mine, host)
    assert count > 40


def interrupted(cache: ac.Cache, numbers: range) -> int:
    """Interrupt epochs, each at another line, and go on with what is left of each. Returns: how many did.

    Batches may be lost, as the one that Ctrl-C came in place of; those that come hold their rows.
    """
    went_on = 0
    with ours(cache, 8) as mine, theirs(cache, 8) as host:
        for number in numbers:
            expected = list(host)
            ids = [batch["id"].tolist() for batch in expected]
            batches, at = iter(mine), -1
            with Interruption(number, files(*TRACED), ("line",), blocks=True):
                for _ in batches:
                    pass
            try:
                for found in batches:
                    assert found["id"].tolist() in ids[at + 1 :]
                    at = ids.index(found["id"].tolist())
                    same(found, expected[at])
                    went_on += 1
            except RuntimeError as error:
                if "iterate anew" not in str(error):
                    raise
            mine.load_state_dict(host.state_dict())
    return went_on


@pytest.mark.slow
def test_an_epoch_goes_on_after_ctrl_c_with_the_right_rows_or_not_at_all(cache):
    assert interrupted(cache, range(0, 400, 3)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("order", ["none", "copy", "random"])
def test_the_epoch_after_ctrl_c_at_any_line_is_right(cache, fake, order):
    fake.order = order
    side = fake.compute_stream()
    with ours(cache, 8, "fake") as mine, theirs(cache, 8) as host:
        for number in range(0, 300, 3):
            batches, before = iter(mine), mine.state_dict()
            stream = side if number % 2 else fake.default
            with Interruption(number, files(*TRACED), ("line",)), fake.on(stream):
                list(batches)
            mine.load_state_dict(before)
            same_read(fake, mine, host)


# Each wait is needed


LEFT_OUT = {  # a part of torch/window.py, and what it is without a wait
    "a stream waits for the one before it": ("self._backend.wait(here, self._events[before])", "pass"),
    "a run that was lost": ("if found.number != self._number:", "if False:"),
    "memory is used anew after all streams": ("self._backend.retain(column.memory, here)", "pass"),
}


def test_each_call_that_waits_is_left_out_once():
    source = Path(window.__file__).read_text()
    for call in ("wait", "retain"):  # a new one belongs in LEFT_OUT
        assert source.count(f"_backend.{call}(") == 1


def a_consumer_on_two_streams(cache: ac.Cache, fake: FakeDevice) -> None:
    """Takes batches on one and the other in turn, of which one is late; lets go while there is much to do."""
    side = fake.compute_stream()
    small = 20 << 10  # what goes there at one step is used at the next
    mine = ours(cache, 8, "fake", window_bytes=small)
    batches = iter(mine)
    with theirs(cache, 8, window_bytes=small) as host:
        for step, (want, _) in enumerate(zip(host, range(16), strict=False)):
            with fake.on(side if step % 2 else fake.default):
                found = next(batches)
                read(fake, found, want)
                del found
            if step == 4:
                fake.finish()
            for _ in range(50 if 4 < step < 12 else 0):
                for stream in fake.streams:
                    if stream is not fake.default:
                        fake.step(stream)
    mine.close()
    for _ in range(500):
        fake.step(fake.default)
    fake.finish()


def test_a_consumer_on_two_streams_reads_its_rows(cache, fake):
    fake.order = "none"
    a_consumer_on_two_streams(cache, fake)


@pytest.mark.slow
@pytest.mark.parametrize("wait", LEFT_OUT)
def test_each_wait_that_is_left_out_is_found(cache, fake, wait, monkeypatch):
    text, less = LEFT_OUT[wait]
    left_out = with_less(window, text, less, monkeypatch)
    monkeypatch.setattr(torch_loader, "Ring", left_out.Ring)
    monkeypatch.setattr(torch_loader, "WindowEpoch", left_out.WindowEpoch)
    if "lost" in wait:
        monkeypatch.setattr(arrowcache.torch.device, "backend_of", backend_of)
        with pytest.raises(AssertionError):
            interrupted(cache, range(0, 400, 3))
        return
    fake.order = "none"
    a_consumer_on_two_streams(cache, fake)
    assert fake.errors
    fake.errors.clear()
