"""CUDA, pretended: code written for torch's CUDA runs on the CPU, and batches go through the fake device.

It shows that such code is Python that runs, and no more: nothing here is asynchronous, and what torch's
graphs, sanitizer, profiler and compiler do is left out.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fake_device import FakeDevice, Stream
from torch.overrides import TorchFunctionMode

import arrowcache.torch.device
from benchmarks import device

TOTAL_BYTES = 1 << 34
LONG_SLEEP_SECONDS = 0.1
_LONG_CYCLES = 1_000_000_000


class SanitizerError(Exception):
    pass


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    synchronize = record

    def elapsed_time(self, other: object) -> float:
        return 1.0


class _OnTheCpu(TorchFunctionMode):
    """What asks for "cuda" gets the CPU; what a capture is given is noted, too, for its replays."""

    def __init__(self, cuda: _Cuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(
        self, function: Callable[..., Any], kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = (
            tuple("cpu" if isinstance(each, str) and each == "cuda" else each for each in args)
            if args
            else args
        )
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0].clone()
        if function is torch.Tensor.item and self._cuda.forbids_synchronization:
            raise RuntimeError("called a synchronizing CUDA operation")
        if function is torch.Tensor.add_ and self._cuda.is_sanitized:
            raise SanitizerError("a race")
        if (graph := self._cuda.capturing) is not None and function is torch.Tensor.add_:
            graph.calls.append((function, args, kwargs))
        return function(*args, **kwargs)


class _Graph:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any]] = []

    def replay(self) -> None:
        for function, args, kwargs in self.calls:
            function(*args, **kwargs)


class _Profile:
    def __init__(self, copies: list[tuple[float, float]]) -> None:
        self.copies = copies

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("{}")


def spans_of(profile: _Profile) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    return profile.copies, profile.copies


class _Cuda:
    """What stands in for `torch.cuda`'s functions."""

    def __init__(self) -> None:
        self.device = FakeDevice("all")
        self.capturing: _Graph | None = None
        self.forbids_synchronization = self.is_sanitized = False
        self._until = 0.0

    def new_stream(self) -> Stream:
        found = self.device.compute_stream()
        found.wait_stream = lambda other: None  # all runs at once
        return found

    @contextmanager
    def capture(self, graph: _Graph, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode in ("global", "thread_local")
        self.capturing = graph
        with self.device.capture():
            yield
        self.capturing = None

    def set_fraction(self, fraction: float) -> None:
        self.device.most_bytes = 1 << 40 if fraction == 1 else int(fraction * TOTAL_BYTES)

    def set_sync_debug_mode(self, mode: str) -> None:
        self.forbids_synchronization = mode == "error"

    def set_sanitizer(self, is_on: bool) -> None:
        self.is_sanitized = is_on

    def sleep(self, cycles: int) -> None:
        """A long one has the device be stuck, while processors really pause."""
        if cycles < _LONG_CYCLES:
            return
        self._until = max(self._until, time.monotonic()) + LONG_SLEEP_SECONDS
        self.device.is_stuck, self.device.on_pause = True, self._pause

    def _pause(self) -> None:
        time.sleep(1e-3)
        self.device.is_stuck = time.monotonic() < self._until

    def profiled(self, run: Callable[[], None]) -> _Profile:
        before = self.device.copies
        run()
        return _Profile([(float(number), number + 0.5) for number in range(self.device.copies - before)])


@contextmanager
def pretended_cuda() -> Iterator[FakeDevice]:
    """Have torch.cuda stand for the fake, which runs at once what it is given."""
    cuda = _Cuda()
    cuda.device.default.wait_stream = lambda other: None
    sanitizer = types.ModuleType("torch.cuda._sanitizer")
    sanitizer.CUDASanitizerErrors = SanitizerError
    sanitizer.enable_cuda_sanitizer = lambda: cuda.set_sanitizer(True)
    sanitizer.cuda_sanitizer = types.SimpleNamespace(disable=lambda: cuda.set_sanitizer(False))
    properties = types.SimpleNamespace(total_memory=TOTAL_BYTES)
    find_spec = importlib.util.find_spec
    of_cuda = {
        "Stream": cuda.new_stream,
        "Event": _Event,
        "CUDAGraph": _Graph,
        "graph": cuda.capture,
        "stream": cuda.device.on,
        "current_stream": cuda.device.current_stream,
        "current_device": lambda: 0,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "memory_reserved": lambda: cuda.device.memory_bytes,
        "get_device_properties": lambda index: properties,
        "set_per_process_memory_fraction": cuda.set_fraction,
        "set_sync_debug_mode": cuda.set_sync_debug_mode,
        "make_graphed_callables": lambda model, sample: model,
        "_sleep": cuda.sleep,
        "_sanitizer": sanitizer,
    }
    had = sys.modules.pop("torch.cuda._sanitizer", None)
    sys.modules["torch.cuda._sanitizer"] = sanitizer
    with (
        mock.patch.multiple(torch.cuda, create=True, **of_cuda),
        mock.patch.object(torch, "compile", lambda model, mode: model),
        mock.patch.object(importlib.util, "find_spec", lambda name: name == "triton" or find_spec(name)),
        mock.patch.object(arrowcache.torch.device, "backend_of", return_value=cuda.device),
        mock.patch.multiple(device, profiled=cuda.profiled, spans_of=spans_of),
        mock.patch.object(device, "compute_for", return_value=lambda batch: None),
        _OnTheCpu(cuda),
    ):
        yield cuda.device
    del sys.modules["torch.cuda._sanitizer"]
    if had is not None:
        sys.modules["torch.cuda._sanitizer"] = had
