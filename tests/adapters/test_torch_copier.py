"""The copier against a fake device: whatever the timing, no read sees anything but its batch."""

from __future__ import annotations

import gc
from collections import deque

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from fake_device import FakeDevice
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from arrowcache.torch.copier import Copier

ORDERS = ("none", "copy", "compute", "all", "random")


def make_batch(number: int, rows: int = 4) -> dict[str, torch.Tensor]:
    return {
        "image": torch.full((rows, 8), float(number)),
        "label": torch.full((rows,), number, dtype=torch.int64),
    }


def train(device: FakeDevice, copier: Copier, numbers: range, *, depth: int = 2, pinned: bool = False):
    """A training loop that drops each batch when it has the next; the loop variable keeps it until then."""
    sent: deque = deque()
    todo = iter(numbers)
    batch = None
    copier.buffers.begin()
    for number in numbers:
        while len(sent) < depth and (following := next(todo, None)) is not None:
            source = make_batch(following)
            if pinned:
                for tensor in source.values():
                    device.pin(tensor)
            sent.append(copier.send(source))
            del source
        copier.buffers.collect()
        batch = copier.receive(sent.popleft())
        for name, tensor in make_batch(number).items():
            device.read(batch[name], tensor)
    del batch


@pytest.mark.slow
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_every_read_sees_its_batch_whatever_the_timing(order, depth, pinned):
    device = FakeDevice(order)
    copier = Copier(device, depth)
    for _ in range(3):
        train(device, copier, range(20), depth=depth, pinned=pinned)
    device.finish()
    copier.close()
    device.finish()
    assert device.errors == []
    assert device.memory_bytes == 0


@pytest.mark.parametrize(
    ("deaf", "order", "pinned"),
    [
        ("copy waits", "copy", False),  # a buffer is overwritten while it may be read
        ("compute waits", "compute", False),  # a batch is read before its copy
        ("synchronize", "none", False),  # a slot is filled again before it was copied
        ("synchronize", "none", True),  # a source is let go before it was copied
        ("record", "copy", False),
    ],
)
def test_the_fake_finds_what_is_left_out(deaf, order, pinned):
    device = FakeDevice(order, deaf=(deaf,))
    copier = Copier(device, 2)
    train(device, copier, range(20), pinned=pinned)
    device.finish()
    assert device.errors


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_one_stream_and_so_many_events_and_buffers_and_then_no_more(order):
    device = FakeDevice(order)
    copier = Copier(device, 2)
    train(device, copier, range(20))
    before, memory_bytes = list(device.calls), device.memory_bytes
    assert before.count("memory") == copier.buffers.allocations <= 2 * 4
    assert before.count("host_memory") == 2
    for _ in range(50):
        train(device, copier, range(20))
    assert device.calls == before
    assert device.memory_bytes == memory_bytes == copier.buffers.nbytes
    assert len(device.streams) == 2


def test_pinned_sources_are_copied_from_where_they_are():
    device = FakeDevice()
    copier = Copier(device, 2)
    train(device, copier, range(20), pinned=True)
    assert "host_memory" not in device.calls
    assert copier.host_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_kept_tensors_keep_their_memory_and_no_other(order):
    device = FakeDevice(order)
    copier = Copier(device, 1)
    copier.buffers.begin()
    labels = []
    for number in range(30):
        sent = copier.send(make_batch(number))
        copier.buffers.collect()
        labels.append(copier.receive(sent)["label"][1:3])
    device.finish()
    assert all(label.tolist() == [number] * 2 for number, label in enumerate(labels))
    assert copier.buffers.allocations <= 30 + 3  # images are reused
    kept = labels[::10]
    labels.clear()
    gc.collect()
    copier.buffers.collect()
    assert copier.buffers.nbytes <= 4 * 128 + 6 * 32
    copier.close()
    device.finish()
    assert [label.tolist() for label in kept] == [[0, 0], [10, 10], [20, 20]]
    assert device.memory_bytes == 3 * 32
    kept.clear()
    gc.collect()
    assert device.memory_bytes == 0


@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_kept_beyond_close_is_freed_after_the_stream_that_used_it(order):
    device = FakeDevice(order)
    copier = Copier(device, 1)
    copier.buffers.begin()
    other = device.compute_stream()
    sent = copier.send(make_batch(7))
    copier.buffers.collect()
    with device.on(other):
        batch = copier.receive(sent)
        copier.close()
        for name, tensor in make_batch(7).items():
            device.read(batch[name], tensor)
        del batch
    while device.step(device.default):  # the owner's stream first
        pass
    device.finish()
    assert device.errors == []
    assert device.memory_bytes == 0


@pytest.mark.parametrize("order", ORDERS)
def test_larger_batches_make_room_and_smaller_ones_use_it(order):
    device = FakeDevice(order)
    copier = Copier(device, 2)
    copier.buffers.begin()
    sizes = [4, 4, 2, 4, 9, 4, 9, 8, 10, 9, 1, 10, 10, 10, 10]
    batch = None
    for number, rows in enumerate(sizes):
        sent = copier.send(make_batch(number, rows))
        copier.buffers.collect()
        batch = copier.receive(sent)
        for name, tensor in make_batch(number, rows).items():
            assert batch[name].shape == tensor.shape
            device.read(batch[name], tensor)
    del batch
    train(device, copier, range(3))  # two at a time
    allocations = copier.buffers.allocations
    for _ in range(20):
        train(device, copier, range(3))
    assert copier.buffers.allocations == allocations
    device.finish()
    copier.close()
    device.finish()
    assert device.errors == []
    assert device.memory_bytes == 0


def test_a_batch_that_nobody_received_gives_all_back():
    device = FakeDevice()
    copier = Copier(device, 2)
    copier.buffers.begin()
    for _ in range(10):
        sent = [copier.send(make_batch(number)) for number in range(2)]
        for one in sent:
            copier.drop(one)
            copier.drop(one)
    assert copier.buffers.allocations == 2 * 4
    train(device, copier, range(5))
    device.finish()
    assert device.errors == []


def test_a_batch_that_fails_on_its_way_gives_all_back():
    device = FakeDevice()
    copier = Copier(device, 1)
    copier.buffers.begin()

    class Broken(FakeDevice):
        def copy(self, into, source, stream):
            if source.dtype == torch.int64:
                raise MemoryError("no")
            super().copy(into, source, stream)

    device.__class__ = Broken
    for _ in range(5):
        with pytest.raises(MemoryError):
            copier.send(make_batch(3))
    device.__class__ = FakeDevice
    assert copier.buffers.allocations == 2 * 3
    train(device, copier, range(5), depth=1)
    device.finish()
    assert device.errors == []


class CopierMachine(RuleBasedStateMachine):
    """Any sequence of sends, hand-overs, reads, kept views, dropped ones, and streams that run."""

    def __init__(self) -> None:
        super().__init__()
        self.device = FakeDevice()
        self.computes = [self.device.default, self.device.compute_stream()]
        self.copier = Copier(self.device, 2)
        self.copier.buffers.begin()
        self.sent: deque = deque()
        self.kept: list[tuple[torch.Tensor, torch.Tensor, object]] = []
        self.number = 0

    @precondition(lambda self: len(self.sent) < 2)
    @rule(rows=st.sampled_from([4, 4, 4, 2, 7]), pinned=st.booleans())
    def send(self, rows, pinned):
        self.number += 1
        source = make_batch(self.number, rows)
        if pinned:
            for tensor in source.values():
                self.device.pin(tensor)
        self.sent.append((self.copier.send(source), self.number, rows))

    @precondition(lambda self: self.sent)
    @rule(stream=st.integers(0, 1))
    def receive(self, stream):
        with self.device.on(self.computes[stream]):
            self.copier.buffers.collect()
            sent, number, rows = self.sent.popleft()
            batch = self.copier.receive(sent)
            for name, tensor in make_batch(number, rows).items():
                self.kept.append((batch[name], tensor, self.computes[stream]))

    @precondition(lambda self: self.sent)
    @rule()
    def give_up(self):
        self.copier.drop(self.sent.popleft()[0])

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def use(self, data):
        tensor, expected, stream = data.draw(st.sampled_from(self.kept))
        with self.device.on(stream):
            self.device.read(tensor, expected)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def let_go(self, data):
        del self.kept[data.draw(st.integers(0, len(self.kept) - 1))]

    @precondition(lambda self: self.kept)
    @rule()
    def let_all_go(self):
        self.kept.clear()

    @rule(number=st.integers(0, 2), steps=st.integers(1, 9))
    def run_a_stream(self, number, steps):
        for _ in range(steps):
            self.device.step(self.device.streams[number])

    @rule(stream=st.integers(0, 1))
    def begin_anew(self, stream):
        with self.device.on(self.computes[stream]):
            self.copier.buffers.collect()
            self.copier.buffers.begin()

    @invariant()
    def nothing_was_read_that_should_not_be(self):
        assert self.device.errors == []
        assert self.copier.buffers.nbytes == self.device.memory_bytes

    def teardown(self):
        while self.sent:
            self.copier.drop(self.sent.popleft()[0])
        for tensor, expected, stream in self.kept:
            with self.device.on(stream):
                self.device.read(tensor, expected)
        tensor = None
        self.copier.close()
        self.kept.clear()
        gc.collect()
        self.device.finish()
        assert self.device.errors == []
        assert self.device.memory_bytes == 0


CopierMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestCopierMachine = CopierMachine.TestCase
