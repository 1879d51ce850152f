"""What batches on their way to a device must not do again: defects of the thread that took them there before.

Each stands for a defect of the prefetcher of 0.1.0, by what its user saw. Those of its waits are found by
tests/stateful/test_device_machine.py.
"""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
from begun import own_threads
from helpers import DEADLINE_SECONDS, in_child, limit, make_cache, publish
from interruptions import Interruption, files

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from fake_device import FakeDevice, Stream

import arrowcache as ac
import arrowcache.torch.device
from arrowcache.linux import PAGE_BYTES
from arrowcache.reading.slots import SharedMemory
from arrowcache.torch import DevicePrefetcher, Loader, device_copier, pinned_memory, tensors

MIB = 1 << 20


@pytest.fixture
def clock(fake, monkeypatch):
    """Time passes only where a processor waits for the fake device."""
    limit(monkeypatch, clock=lambda: fake.clock, wall_clock=lambda: fake.clock)
    return fake


def batches(count: int):
    return [{"x": torch.full((300,), float(number)), "id": torch.tensor(number)} for number in range(count)]


# A busy device was taken for a slow loader.


def test_a_device_that_is_busy_for_a_minute_is_no_stall(clock):
    clock.is_stuck, clock.on_pause = True, lambda: free(clock, 60.0)
    with DevicePrefetcher(batches(20), "fake") as prefetcher:
        assert [int(batch["x"].shape[0]) for batch in prefetcher] == [300] * 20
        stats = prefetcher.stats()
    assert stats.stall_seconds == 0.0
    assert stats.device_seconds > 59.0


def free(fake: FakeDevice, after_seconds: float) -> None:
    fake.is_stuck = fake.clock < after_seconds


def test_a_loader_has_no_timeout_while_the_device_is_busy(tmp_path, clock):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 10)
    clock.is_stuck, clock.on_pause = True, lambda: free(clock, 60.0)
    with Loader(cache, 16, shuffle=None, device="fake", timeout=30.0) as loader:
        for step, batch in enumerate(loader):
            clock.read(batch["id"], torch.arange(16 * step, 16 * step + 16))
        assert loader.stats().stall_seconds == 0.0
        assert loader.stats().stalls == 0
        assert loader.stats().bottleneck == "consumer"
        assert loader.device_stats().device_seconds > 59.0


def test_the_processor_waits_for_the_device_only_with_nothing_in_flight(fake):
    fake.order = "none"
    taken = given = 0

    def source():
        nonlocal given
        for batch in batches(50):
            given += 1
            yield batch

    def on_pause() -> None:
        assert given - 1 == taken, "something was in flight"  # the one that was fetched has no slot yet

    fake.on_pause = on_pause
    with DevicePrefetcher(source(), "fake") as prefetcher:
        for _ in prefetcher:
            taken += 1
        fake.on_pause = lambda: None
    assert taken == 50
    assert fake.clock > 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_copies_run_beside_the_work_of_a_device_that_lags_behind(fake, depth):
    """A step there ends when the processor has nothing else to do; copies take no time. Seen on a GPU."""
    copied, ahead = 0, []

    def copies_run() -> None:
        nonlocal copied
        (stream,) = (each for each in fake.streams if each is not fake.default)
        while stream.todo:
            is_copy = stream.todo[0][0] == "do" if isinstance(stream.todo[0], tuple) else False
            if not fake.step(stream):
                return
            copied += is_copy

    def a_step_ends() -> None:
        is_step = False
        while fake.default.todo and not is_step:
            copies_run()
            operation = fake.default.todo[0]
            if not fake.step(fake.default):
                return
            is_step = isinstance(operation, tuple) and operation[0] == "do"
        if is_step:
            ahead.append(copied - len(ahead) - 1)

    with DevicePrefetcher([torch.full((MIB,), float(number)) for number in range(20)], "fake", depth) as them:
        for number, batch in enumerate(them):
            fake.read(batch, torch.full((MIB,), float(number)))
        fake.finish()  # from now on all memory is there
        fake.is_stuck, fake.on_pause = True, a_step_ends
        for number, batch in enumerate(them):
            fake.read(batch, torch.full((MIB,), float(number)))
        del batch
        while len(ahead) < 20:
            a_step_ends()
        fake.is_stuck, fake.on_pause = False, lambda: None
    assert fake.errors == []
    assert min(ahead[:-1]) >= 1, "the next batch was not on its way while one was used"


def test_ctrl_c_ends_a_wait_for_a_device_that_is_stuck(fake):
    def on_pause() -> None:
        raise KeyboardInterrupt

    with DevicePrefetcher(batches(50), "fake", depth=1) as prefetcher:
        fake.is_stuck, fake.on_pause = True, on_pause
        with pytest.raises(KeyboardInterrupt):
            list(prefetcher)
        fake.is_stuck, fake.on_pause = False, lambda: None
        for number, batch in enumerate(prefetcher):
            fake.read(batch["x"], torch.full((300,), float(number)))


# A source ran on another thread, whose current device was 0.


def test_the_source_runs_in_the_thread_that_takes_batches(fake):
    threads = set()

    def source():
        for batch in batches(10):
            threads.add(threading.get_ident())
            yield batch

    with DevicePrefetcher(source(), "fake") as prefetcher:
        for _ in prefetcher:
            assert not own_threads()
    assert threads == fake.threads == {threading.get_ident()}


# Calls of another thread broke the capture of a graph.


def run_all_but(fake: FakeDevice, late: Stream) -> None:
    while any([fake.step(stream) for stream in fake.streams if stream is not late]):  # noqa: C419  # each a step
        pass


@pytest.mark.slow
def test_ctrl_c_at_any_line_frees_no_memory_for_copies_that_do_not_wait_for_its_reader(fakes):
    number, is_over = 0, False
    while not is_over:
        source = (torch.full((9,), each) for each in range(20))  # the next iteration goes on with it
        prefetcher = DevicePrefetcher(source, str(number), depth=1)
        fake = fakes[str(number)]
        fake.order, side = "none", fake.compute_stream()
        iterator = iter(prefetcher)
        kept = [next(iterator)]  # all memory is the default stream's
        run_all_but(fake, side)  # else the processor would wait for copies, and all streams run meanwhile
        with fake.on(side):
            kept += [next(iterator)]
            fake.read(kept[1], torch.ones(9, dtype=torch.int64))
        kept.clear()
        run_all_but(fake, side)
        with Interruption(number, files("torch/device_copier.py"), ("line",)) as interruption:
            next(iterator)
        is_over = not interruption.where
        number += not is_over
        iterator = iter(prefetcher)
        for _ in range(3):
            next(iterator)
            run_all_but(fake, side)
        fake.finish()
        assert fake.errors == [], f"after Ctrl-C at line {number - 1}"
        prefetcher.close()
    assert number > 50


def test_closing_while_a_graph_is_captured_lets_go_later(fake):
    prefetcher = DevicePrefetcher(batches(10), "fake")
    next(iter(prefetcher))
    before = len(fake.calls)
    with fake.capture():
        prefetcher.close()
    assert len(fake.calls) == before
    with DevicePrefetcher(batches(1), "fake") as other:
        list(other)
    fake.finish()
    assert fake.memory_bytes == 0


# Pinned memory was far larger than batches.


def test_pinned_memory_is_as_large_as_batches(fake):
    four = [{"x": torch.zeros(MIB, dtype=torch.int32)}] * 8
    with DevicePrefetcher(four, "fake", depth=2) as prefetcher:
        for _ in range(3):
            for _ in prefetcher:
                pass
        assert prefetcher.stats().pinned_bytes == sum(fake.registered_ranges.values()) == 3 * 4 * MIB


def test_a_loader_pins_as_much_as_it_has_in_flight(tmp_path, fake):
    schema = {"x": ac.Tensor("uint8", (MIB // 16,)), "id": ac.Tensor("int64")}
    cache = make_cache(tmp_path / "cache", schema, capacity="256MiB", segment_bytes="16MiB", segment_rows=128)
    with cache.writer() as writer:
        for number in range(1024):
            writer.append(x=np.full(MIB // 16, number % 251, np.uint8), id=number)
    with Loader(cache, 64, device="fake") as loader, Loader(cache, 64) as plain:
        for _ in range(3):
            for batch, expected in zip(loader, plain, strict=True):
                fake.read(batch["id"], expected["id"])
        pinned = sum(fake.registered_ranges.values())
        assert loader.device_stats().pinned_bytes <= 3 * 512, "4 MiB are copied from where they are gathered"
    assert 8 * MIB <= pinned <= 32 * MIB


# Tensors were views; jagged ones lost what their kernels need; some were moved by a blocking copy.


@pytest.mark.parametrize("nbytes", [64, 2 * MIB])
def test_a_tensor_that_is_handed_over_is_none_of_anothers(nbytes):
    with DevicePrefetcher([[torch.zeros(nbytes), torch.ones(nbytes)]], "cpu") as prefetcher:
        (batch,) = prefetcher
    for tensor in batch:
        tensor.detach_()  # which no view lets be done
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.requires_grad_()


def test_batches_made_in_inference_mode_can_be_used_outside():
    with DevicePrefetcher(batches(6), "cpu") as prefetcher:
        iterator = iter(prefetcher)
        with torch.inference_mode():
            first = next(iterator)
        assert not first["x"].is_inference()
        first["x"].add_(1)
        assert [float(batch["x"][0]) for batch in iterator] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_jagged_tensors_know_their_shortest_and_longest_row(monkeypatch):
    rows = [torch.full((length, 2), float(length)) for length in (3, 0, 5, 2)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    made = []

    def spy(*arguments, **known):
        made.append(known)
        return original(*arguments, **known)

    original = torch.nested.nested_tensor_from_jagged
    monkeypatch.setattr(torch.nested, "nested_tensor_from_jagged", spy)
    with DevicePrefetcher([{"points": jagged}], "cpu") as prefetcher:
        (batch,) = prefetcher
    assert made == [{"min_seqlen": 0, "max_seqlen": 5}]
    assert [row.tolist() for row in batch["points"].unbind()] == [row.tolist() for row in rows]


class Movable:
    """As objects of other libraries are: pinned, then moved."""

    def __init__(self, history=()):
        self.history = tuple(history)

    def pin_memory(self):
        return Movable([*self.history, "pinned"])

    def to(self, device, non_blocking=False):
        return Movable([*self.history, f"moved, non_blocking={non_blocking}"])


class Pins(FakeDevice):
    """One that has objects pinned, as an accelerator does."""

    def pinned(self, leaf: object) -> object:
        return tensors.pinned(leaf)


def test_an_object_with_a_to_is_pinned_and_moved_without_a_wait(monkeypatch):
    monkeypatch.setattr(arrowcache.torch.device, "backend_of", lambda _: Pins())
    with DevicePrefetcher([[Movable()]], "fake") as prefetcher:
        ((found,),) = prefetcher
    assert found.history == ("pinned", "moved, non_blocking=True")


def test_one_device_that_fails_at_close_keeps_no_other_from_being_closed(fakes):
    prefetcher = DevicePrefetcher([{"x": torch.arange(4)}] * 10, devices=["a", "b", "c"])
    next(iter(prefetcher))
    fakes["b"].fails_in = 0
    fakes["b"].failure = lambda: RuntimeError("b is lost")
    with pytest.raises(RuntimeError, match="b is lost"):
        prefetcher.close()
    gc.collect()
    for name in ("a", "c"):
        fakes[name].finish()
        assert fakes[name].memory_bytes == 0
    prefetcher.close()


# Slots of worker processes


def test_a_device_copies_from_slots_of_worker_processes(tmp_path, fake, monkeypatch):
    limit(monkeypatch, small_leaf_bytes=4096)
    cache = make_cache(tmp_path / "cache")
    publish(cache, 20)
    with (
        Loader(cache, 16, device="fake", workers=2, transform=dict) as loader,
        Loader(cache, 16) as plain,
    ):
        for _ in range(6):
            for batch, expected in zip(loader, plain, strict=True):
                fake.read(batch["image"], expected["image"])
                fake.read(batch["id"], expected["id"])
            assert fake.unmapped() == []
        assert fake.registered_ranges
        assert fake.asked_if_pinned == 0, "nothing is asked of memory of our own"
        assert loader.device_stats().pinned_bytes <= 3 * 512, "images were copied once more"
    del batch, loader
    gc.collect()
    assert fake.unmapped() == [], "registered memory was given back to the system"
    with DevicePrefetcher([1], "fake") as prefetcher:
        list(prefetcher)
    assert len(fake.registered_ranges) <= 3


def test_memory_of_which_several_registered_parts_stays_until_all_are_let_go():
    devices, size = [FakeDevice(), FakeDevice()], 1 << 20
    memory = SharedMemory.create()
    slots = []
    for number, device in enumerate(devices):  # as of one worker, each of another prefetcher
        offset = PAGE_BYTES + number * size
        memory.parts[offset] = size
        slots.append(torch.from_numpy(np.frombuffer(memory, np.uint8, size, offset)))
        assert device.can_read(slots[-1])
    del memory
    slots.clear()
    gc.collect()
    pinned_memory.tidy()
    gc.collect()
    for device in devices:
        assert device.unmapped() == [], "registered memory was given back to the system"
        assert device.registered_ranges == {}


def test_a_slot_that_grew_is_registered_anew_before_its_first_part_is_read(fake):
    fake.order = "none"
    memory, size = SharedMemory.create(), 2 * MIB

    def grown(nbytes: int) -> torch.Tensor:
        """As its worker says it, which had the slot."""
        memory.parts[PAGE_BYTES] = nbytes
        return torch.from_numpy(np.frombuffer(memory, np.uint8, nbytes, PAGE_BYTES))

    def source():
        yield grown(size).fill_(1)
        fake.finish()
        yield from grown(2 * size).fill_(2).split(size)

    with DevicePrefetcher(source(), "fake") as prefetcher:
        for batch, expected in zip(prefetcher, (1, 2, 2), strict=True):
            fake.read(batch, torch.full((size,), expected, dtype=torch.uint8))
        assert prefetcher.stats().pinned_bytes == 0, "all of it is read where it is"
    assert fake.asked_if_pinned == 0


def test_a_slot_that_grew_is_not_read_by_another_device_until_all_of_it_is_registered():
    first, second = FakeDevice(), FakeDevice()
    memory = SharedMemory.create()
    memory.parts[PAGE_BYTES] = MIB
    slot = torch.from_numpy(np.frombuffer(memory, np.uint8, 2 * MIB, PAGE_BYTES))
    assert first.can_read(slot[:MIB])
    assert second.can_read(slot[:MIB])
    memory.parts[PAGE_BYTES] = 2 * MIB
    assert not second.can_read(slot[:10]), "the first one will register it anew"
    assert first.can_read(slot[:10])
    assert second.can_read(slot)


def test_memory_that_has_died_is_forgotten():
    fake = FakeDevice()

    def dead_references() -> int:
        return sum(type(each) is weakref.ref and each() is None for each in gc.get_objects())

    before = dead_references()
    memory = [fake.host_memory(PAGE_BYTES) for _ in range(50)]
    del memory
    fake.host_memory(PAGE_BYTES)
    assert dead_references() < before + 10


def test_where_a_device_refuses_to_register_batches_are_staged(tmp_path, fake, monkeypatch):
    limit(monkeypatch, small_leaf_bytes=4096)
    fake.refuses_to_register = True
    cache = make_cache(tmp_path / "cache")
    publish(cache, 10)
    with Loader(cache, 16, device="fake") as loader, Loader(cache, 16) as plain:
        for batch, expected in zip(loader, plain, strict=True):
            fake.read(batch["image"], expected["image"])
        assert loader.device_stats().pinned_bytes >= batch["image"].nbytes
    assert fake.calls.count("register") == 1, "it is not asked again"


# A source that is not ready


def test_what_flies_is_handed_over_before_a_source_that_is_not_ready_is_waited_for(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 2)
    go = threading.Event()

    def transform(batch):
        if len(seen) >= 1 or batch["id"].min() >= 16:
            assert go.wait(DEADLINE_SECONDS), "the first batch was kept back"
        return batch

    seen: list[int] = []
    with Loader(cache, 4, shuffle=None, device="cpu", transform=transform, prefetch=2) as loader:
        iterator = iter(loader)
        for _ in range(4):
            seen += next(iterator)["id"].tolist()
            if len(seen) == 4:
                break
        go.set()
        for batch in iterator:
            seen += batch["id"].tolist()
    assert sorted(seen) == list(range(32))


def test_a_stream_of_epochs_gives_what_it_has_before_it_waits_for_rows(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 1)
    with Loader(cache, 4, device="cpu", timeout=DEADLINE_SECONDS) as loader:
        seen = [batch["id"].tolist() for batch, _ in zip(loader.repeat(), range(11), strict=False)]
    assert len(seen) == 11


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("taken", [4, 11])
def test_a_forked_child_frees_nothing_of_its_parents_devices(fake, taken, closes):
    fake.order = "all"  # copies are over at once
    made = ({"x": torch.full((300,), number), "y": fake.made(torch.arange(4))} for number in range(10))
    prefetcher = DevicePrefetcher(made, "fake")
    iterator = iter(prefetcher)
    for _ in range(taken):
        next(iterator, None)

    def child() -> None:
        nonlocal iterator, prefetcher
        before = len(fake.calls), len(fake.events), fake.memory_bytes
        if closes:
            prefetcher.close()
        del iterator, prefetcher
        gc.collect()
        device_copier.tidy()
        assert (len(fake.calls), len(fake.events), fake.memory_bytes) == before

    with in_child(child):
        pass
    prefetcher.close()
