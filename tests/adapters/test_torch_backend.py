"""Accelerator: what its calls do to the thread that makes them, on a module in torch.cuda's place."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

from arrowcache.torch.backend import Accelerator


class Module:
    """The current device and stream of one thread, which begins on device 0, as torch.cuda keeps them.

    `awake` are the devices whose context was made.
    """

    def __init__(self) -> None:
        self.current = 0
        self.streams: dict[int, str] = {}
        self.awake: set[int] = set()

    @contextmanager
    def device(self, device):
        before = self.current
        self._go_to(device.index)
        yield
        self.current = before  # awake or not: `_maybe_exchange_device`

    @contextmanager
    def stream(self, stream):
        before, there = self.current, self.streams.get(stream[0], "default")
        self._set_stream(stream)
        yield
        if before != stream[0]:
            self._set_stream((stream[0], there))
        self._set_stream((before, self.streams.get(before, "default") if before != stream[0] else there))

    def _set_stream(self, stream):
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


@pytest.mark.parametrize("call", ["memory", "host_memory", "copy"])
def test_a_device_wakes_up_no_other(module, monkeypatch, call):
    accelerator = Accelerator(torch.device("cuda", 1))
    found = []

    def empty(*size, **options):
        found.append((module.current, module.streams.get(1, "default")))

    class Target:
        copy_ = empty

    if call == "copy":
        accelerator.copy(Target(), torch.zeros(3), (1, "copies"))
    else:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", empty)
            if call == "memory":
                accelerator.memory(3, (1, "copies"))
            else:
                accelerator.host_memory(3)
    assert found == [(1, "default" if call == "host_memory" else "copies")]
    assert module.awake == {1}
    assert (module.current, module.streams.get(1, "default")) == (0, "default")
