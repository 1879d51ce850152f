"""Accelerator: what its calls do to the thread that makes them, on a module in torch.cuda's place."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

from arrowcache.linux import PAGE_BYTES
from arrowcache.reading.slots import SharedMemory
from arrowcache.torch.backend import Accelerator
from arrowcache.torch.pinned_memory import tidy


class Module:
    """The current device and stream of one thread, which begins on device 0, as torch.cuda keeps them.

    `awake` are the devices whose context was made; `registered` is what cudaHostRegister was told, and where.
    """

    refuses = False

    def __init__(self) -> None:
        self.current = 0
        self.registered: dict[int, tuple[int, int]] = {}
        self.streams: dict[int, str] = {}
        self.awake: set[int] = set()

    def cudart(self):
        return self

    def cudaHostRegister(self, address, nbytes, flags):
        assert flags == 1
        if any(
            first < address + nbytes and address < first + had for first, (had, _) in self.registered.items()
        ):
            return 712  # some of it is registered already
        if not self.refuses:
            self.registered[address] = nbytes, self.current
        return 2 * self.refuses

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0

    @contextmanager
    def device(self, index):
        before = self.current
        self._go_to(index)
        yield
        self.current = before  # awake or not: `_maybe_exchange_device`

    @contextmanager
    def stream(self, stream):
        before, there = self.current, self.streams.get(stream[0], "default")
        self.set_stream(stream)
        yield
        if before != stream[0]:
            self.set_stream((stream[0], there))
        self.set_stream((before, self.streams.get(before, "default") if before != stream[0] else there))

    def current_stream(self, index):
        return index, self.streams.get(index, "default")

    def set_stream(self, stream):
        index, name = stream
        if index != self.current:
            self._go_to(index)
        self.streams[index] = name

    def _go_to(self, index):
        self.current = index
        self.awake.add(index)


@pytest.fixture
def module(monkeypatch):
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


@pytest.mark.parametrize("call", ["memory", "pinned_memory", "copy"])
def test_a_device_wakes_up_no_other(module, monkeypatch, call):
    accelerator = Accelerator(torch.device("cuda", 1))
    module.refuses = True  # to register memory: torch's own is taken then
    found = []

    def empty(*size, **options):
        found.append((module.current, module.streams.get(1, "default")))

    class Target:
        copy_ = empty

    if call == "copy":
        accelerator.copy([(Target(), torch.zeros(3))], (1, "copies"))
    else:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", empty)
            patched.setattr(torch, "zeros", lambda *_, **__: None)  # clears the error of cudaHostRegister
            if call == "memory":
                accelerator.memory(3, (1, "copies"))
            else:
                accelerator.pinned_memory(3)
    assert found == [(1, "default" if call == "pinned_memory" else "copies")]
    assert module.awake == {1}
    assert (module.current, module.streams.get(1, "default")) == (0, "default")


def test_an_event_is_asked_on_its_device(module):
    class Event:
        def query(self):
            module.awake.add(module.current)
            return True

    assert Accelerator(torch.device("cuda", 1)).query(Event())
    assert module.awake == {1}
    assert module.current == 0


def test_pinned_memory_is_our_own_and_unregistered_before_it_ends(module):
    accelerator = Accelerator(torch.device("cuda", 1))
    memory = accelerator.pinned_memory(100_000)
    (start,) = module.registered
    nbytes, device = module.registered[start]
    assert (memory.data_ptr(), memory.nbytes, device) == (start, 100_000, 1)
    assert 100_000 <= nbytes < 110_000
    assert accelerator.can_read(memory[50:])
    del memory
    gc.collect()
    assert module.registered, "no device is called where memory dies"
    tidy()
    assert module.registered == {}
    assert module.awake == {1}


def test_memory_of_slots_is_registered_when_it_is_first_copied_from(module):
    accelerator = Accelerator(torch.device("cuda", 1))
    memory = accelerator.host_memory(100_000)
    assert module.registered == {}
    assert accelerator.can_read(memory[1000:2000])
    assert list(module.registered) == [memory.data_ptr()]


def test_memory_that_an_earlier_prefetcher_registered_is_no_refusal(module, monkeypatch):
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)  # clears the error of cudaHostRegister
    first, second = Accelerator(torch.device("cuda", 1)), Accelerator(torch.device("cuda", 0))
    memory, size = SharedMemory.create(), 10 * PAGE_BYTES
    memory.parts[PAGE_BYTES] = size  # of a worker
    slot = torch.from_numpy(np.frombuffer(memory, np.uint8, 2 * size, PAGE_BYTES))
    assert first.can_read(slot[:size])
    assert second.can_read(slot[:size])
    assert len(module.registered) == 1
    second.pinned_memory(100)
    assert len(module.registered) == 2, "nothing was refused"
    memory.parts[PAGE_BYTES] = 2 * size
    assert not second.can_read(slot), "the first one may still read from the part, so it stays as it is"
    del memory, slot
    gc.collect()
    tidy()
    assert module.registered == {}


def test_what_only_begins_in_pinned_memory_is_not_read_where_it_is(module, monkeypatch):
    accelerator = Accelerator(torch.device("cuda", 1))
    memory = torch.arange(100, dtype=torch.int32)
    end = memory.data_ptr() + 200
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() < end)
    assert accelerator.can_read(memory[:50])
    assert accelerator.can_read(memory[10:50].view(5, 8).t())
    assert not accelerator.can_read(memory[:51])
