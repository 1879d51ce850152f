"""Figures: what the way to the device costs, over the parts it is made of. They are told, never judged."""

from __future__ import annotations

import gzip
import itertools
import shutil
import statistics
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import arrowcache as ac
from arrowcache.torch import Loader
from arrowcache.units import format_bytes
from benchmarks import device
from benchmarks.device_proof.check import CannotRun
from benchmarks.device_proof.target import Target
from benchmarks.measure import cpu_seconds, filled_cache, interleaved

STEPS = {1: 400, 32: 60, 256: 16}  # by megabytes a batch
ROW_BYTES, SHUFFLES = (1 << 10, 1 << 16, 1 << 20), ("rows", "window")
BATCH_BYTES = 4 << 20
CACHE_BYTES, CACHE_WITHOUT_GPU = 256 << 20, 16 << 20
REPEATS = 3


def step(target: Target, megabytes: int) -> str:
    """Seconds a step over the longer of copy and compute; the rate of the way over a bare pinned copy."""
    del target
    found = device.measure(megabytes, steps=STEPS[megabytes], repeats=REPEATS, peers=False)
    copy, compute = found["copy alone"], found["compute alone"]
    least = max(copy, compute)
    ratios = [
        f"{name} {found[name] / least:.3f}" for name in ("prefetcher", "prefetcher, pinned") if name in found
    ]
    rates = [
        f"{name} {megabytes / 1000 / found[case]:.1f} GB/s, {copy / found[case]:.2f} of it"
        for name, case in (
            ("from ordinary memory", "prefetcher, no compute"),
            ("from pinned", "prefetcher, pinned, no compute"),
        )
    ]
    return (
        f"step over max(copy {1000 * copy:.3f} ms, compute {1000 * compute:.3f} ms): {', '.join(ratios)}\n"
        f"a bare pinned copy {megabytes / 1000 / copy:.1f} GB/s; {'; '.join(rates)}"
    )


def hidden(target: Target, trace: Path | None = None) -> str:
    """The share of the copies' time during which a kernel ran, as torch's profiler saw it."""
    del target
    profile = device.under_compute()
    copies, kernels = device.spans_of(profile)
    if not copies:
        raise CannotRun("torch's profiler saw no copy: CUPTI may not be allowed here")
    where = "not kept" if trace is None else _kept(profile, trace)
    total = sum(end - start for start, end in copies)
    return (
        f"{device.share_under(copies, kernels):.3f} of {total / 1000:.1f} ms of {len(copies)} copies of 32 MB"
        f", beside {len(kernels)} kernels; trace: {where}"
    )


def _kept(profile: Any, trace: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(trace, "wb") as file:
            shutil.copyfileobj(source, file)
    return str(trace)


def rates(target: Target) -> str:
    """The loader end to end, beside the loader alone and a bare copy of as many bytes; CPU seconds a GB."""
    nbytes = CACHE_BYTES if target.is_gpu else CACHE_WITHOUT_GPU
    said = []
    for row_bytes in ROW_BYTES:
        with (
            tempfile.TemporaryDirectory(prefix="device-proof-") as folder,
            filled_cache(Path(folder) / "cache", row_bytes, nbytes) as cache,
        ):
            said += [_rate(target, cache, row_bytes, nbytes, shuffle) for shuffle in SHUFFLES]
    return "\n".join(said)


def _rate(target: Target, cache: ac.Cache, row_bytes: int, cache_bytes: int, shuffle: str) -> str:
    """A turn is as many bytes as the cache has, of epochs that follow without a seam."""
    batch_rows = max(8, BATCH_BYTES // row_bytes)
    count = cache_bytes // (batch_rows * row_bytes)
    used: list[float] = []
    with (
        Loader(cache, batch_rows, device=target.device, shuffle=shuffle) as ours,
        Loader(cache, batch_rows, shuffle=shuffle) as host,
    ):
        to_device, on_host = ours.repeat(), host.repeat()

        def loader() -> None:
            before = cpu_seconds()
            for batch in itertools.islice(to_device, count):
                if target.is_gpu:
                    batch["x"].sum()
            _synchronize(target)
            used.append(cpu_seconds() - before)

        cases: dict[str, Callable[[], object]] = {
            "copy": _bare_copy(target, batch_rows * row_bytes, count),
            "loader": loader,
            "host": lambda: deque(itertools.islice(on_host, count), 0),  # which drops them
        }
        for case in cases.values():
            case()
        used.clear()
        found = interleaved(cases, REPEATS)
    nbytes = count * batch_rows * row_bytes
    rate = {name: nbytes / seconds / 1e9 for name, seconds in found.items()}
    return (
        f"rows of {format_bytes(row_bytes)}, {shuffle!r}, {batch_rows} a batch: {rate['loader']:.2f} GB/s, "
        f"{rate['loader'] / rate['host']:.2f} of the loader without a device, "
        f"{rate['loader'] / rate['copy']:.2f} of a bare copy ({rate['copy']:.1f}); "
        f"{statistics.median(used) / (nbytes / 1e9):.3f} CPU seconds a GB"
    )


def _bare_copy(target: Target, batch_bytes: int, count: int) -> Callable[[], None]:
    host = torch.ones(batch_bytes, dtype=torch.uint8)
    host = host.pin_memory() if target.is_gpu else host
    into = torch.empty(batch_bytes, dtype=torch.uint8, device=target.device)

    def copy() -> None:
        for _ in range(count):
            into.copy_(host, non_blocking=True)
        _synchronize(target)

    return copy


def _synchronize(target: Target) -> None:
    if target.is_gpu:
        torch.cuda.synchronize()


def python(target: Target) -> str:
    """Microseconds of Python a batch of few and of many small leaves, as `benchmarks.device` has them."""
    found = {leaves: device.python_microseconds(leaves, target.device) for leaves in (2, 40)}
    return "; ".join(
        f"{leaves} leaves {median:.0f} us a batch, at least {least:.0f}"
        for leaves, (median, least) in found.items()
    )
