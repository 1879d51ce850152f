"""What the fake device shows, on a real one: skipped where there is none."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import make_cache, publish

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

import arrowcache
from arrowcache.torch import DevicePrefetcher, Loader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

BASE = torch.arange(256, dtype=torch.float32).reshape(16, 16)
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


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_read_sees_its_batch(depth, pinned):
    deviations, values = [], []
    with DevicePrefetcher(source(60, pinned=pinned), "cuda", depth) as prefetcher:
        for batch in prefetcher:
            deviations.append(busy(batch["x"]))
            values.append((batch["x"].amin(), batch["y"].amax()))
            assert batch["x"].device.type == batch["y"].device.type == "cuda"
        assert prefetcher.stats().device_allocations == 2 * (depth + 2)
        large = 0 if pinned else ROWS * WIDTH * 4
        assert prefetcher.stats().pinned_bytes <= (depth + 1) * (large + ROWS * 8)
    assert torch.stack(deviations).abs().max().item() == 0
    for number, (x, y) in enumerate(values):
        assert (x.item(), y.item()) == (number, number)


def test_what_is_kept_is_never_overwritten():
    with DevicePrefetcher(source(30), "cuda") as prefetcher:
        kept = [batch["x"][5] for batch in prefetcher]
    del prefetcher
    gc.collect()
    for _ in range(10):
        torch.full((ROWS, WIDTH), -1.0, device="cuda")
    for number, row in enumerate(kept):
        assert (row == number).all()


def test_memory_is_flat_over_fifty_epochs():
    batches = list(source(6))
    reserved, allocated = [], []
    with DevicePrefetcher(batches, "cuda") as prefetcher:
        for _ in range(50):
            for batch in prefetcher:
                batch["x"].sum()
            reserved.append(torch.cuda.memory_reserved())
            allocated.append(torch.cuda.memory_allocated())
    assert len(set(reserved[2:])) == 1
    assert len(set(allocated[2:])) == 1


def test_all_memory_comes_back():
    gc.collect()
    before = torch.cuda.memory_allocated()
    with DevicePrefetcher(source(10), "cuda") as prefetcher:
        for _ in prefetcher:
            pass
        del _
        assert torch.cuda.memory_allocated() > before
    assert torch.cuda.memory_allocated() == before


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


def test_a_consumer_on_a_stream_of_its_own():
    stream, found = torch.cuda.Stream(), []
    with torch.cuda.stream(stream), DevicePrefetcher(source(40), "cuda") as prefetcher:
        for batch in prefetcher:
            busy(batch["x"])
            found.append(batch["x"].amax())
    stream.synchronize()
    assert [value.item() for value in found] == list(range(40))


def test_backward_on_autograds_own_threads():
    weight = torch.zeros(WIDTH, device="cuda", requires_grad=True)
    with DevicePrefetcher(source(20), "cuda") as prefetcher:
        for batch in prefetcher:
            (batch["x"] * weight).sum().backward()
    assert (weight.grad == ROWS * sum(range(20))).all()


def test_a_device_that_does_not_exist():
    with pytest.raises(ValueError, match="'cuda:0'"):
        DevicePrefetcher([], f"cuda:{torch.cuda.device_count()}")


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


def test_a_loader_on_the_device(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 10)
    with Loader(cache, 16, device="cuda") as loader:
        for _ in range(5):
            seen = []
            for batch in loader:
                expected = BASE.cuda() + batch["id"].float()[:, None, None]
                assert torch.equal(batch["image"], expected)
                seen += batch["id"].tolist()
            assert sorted(seen) == list(range(160))
