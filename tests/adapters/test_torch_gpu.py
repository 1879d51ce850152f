"""What the proof in tests/gpu leaves out."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

import arrowcache
from arrowcache.torch import DevicePrefetcher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

ROWS, WIDTH = 256, 4096


def source(count: int, *, pinned: bool = False):
    for number in range(count):
        batch = {
            "x": torch.full((ROWS, WIDTH), float(number)),
            "y": torch.full((ROWS,), number),
            "text": [str(number)],
        }
        if pinned:
            batch["x"], batch["y"] = batch["x"].pin_memory(), batch["y"].pin_memory()
        yield batch


def busy(tensor: torch.Tensor) -> torch.Tensor:
    """Enqueue some milliseconds of work, so that the host runs far ahead of the device."""
    matrix = torch.ones(2048, 2048, device=tensor.device)
    for _ in range(5):
        matrix = matrix @ matrix * 1e-4
    return (tensor - tensor.amin()).abs().sum() + 0 * matrix.sum()


def test_all_memory_comes_back():
    gc.collect()
    before = torch.cuda.memory_allocated()
    with DevicePrefetcher(source(10), "cuda") as prefetcher:
        for _ in prefetcher:
            pass
        del _
        assert torch.cuda.memory_allocated() > before
    assert torch.cuda.memory_allocated() == before


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # there is one cycle
def test_copies_run_beside_the_compute():
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with DevicePrefetcher(list(source(20, pinned=True)), "cuda") as prefetcher:
        for batch in prefetcher:
            busy(batch["x"])
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            for batch in prefetcher:
                busy(batch["x"])
            torch.cuda.synchronize()
    spans = [
        ("HtoD" in event.name, event.time_range)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    copies = [span for is_copy, span in spans if is_copy]
    kernels = [span for is_copy, span in spans if not is_copy]
    assert len(copies) >= 20
    assert any(copy.start < kernel.end and kernel.start < copy.end for copy in copies for kernel in kernels)


def test_devices_each_get_their_part():
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    with DevicePrefetcher(source(10), devices=devices) as prefetcher:
        for number, parts in enumerate(prefetcher):
            assert [part["x"].device for part in parts] == devices
            assert sum(len(part["x"]) for part in parts) == ROWS
            assert all((part["x"] == number).all() for part in parts)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices here")
def test_no_other_device_wakes_up():
    script = """
import torch
from arrowcache.torch import DevicePrefetcher

last = torch.cuda.device_count() - 1
batches = [torch.ones(1000), torch.ones(1000).numpy()]
with DevicePrefetcher(batches * 5, f"cuda:{last}") as prefetcher:
    for batch in prefetcher:
        assert batch.sum().item() == 1000
assert torch._C._cuda_hasPrimaryContext(last)
assert not any(torch._C._cuda_hasPrimaryContext(index) for index in range(last))
"""
    root = Path(arrowcache.__file__).parents[1]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root, timeout=120)
