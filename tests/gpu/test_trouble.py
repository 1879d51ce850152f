"""Trouble: a device that is busy, full or broken, and an interpreter that ends."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from gpu.trials import BATCH_ROWS, Saw, Target, Trial, alike, cache_of_numbers

from arrowcache.torch import DevicePrefetcher, Loader

ROOT = Path(__file__).parents[2]
BUSY_SECONDS, TIMEOUT_SECONDS = 5.0, 1.0
BUSY_FROM, BUSY_BATCHES = 5, 18
FULL_ROWS, FULL_BATCHES = 1024, 8  # 16 MiB a batch, which torch's allocator takes from the device one by one
FAILING_CALLS = 20
EXITS, EXITS_WITHOUT_GPU, EXITS_AT_ONCE, EXIT_SECONDS = 24, 2, 8, 60.0


def test_a_busy_device_is_no_stall_and_no_timeout(target: Target, saw: Saw) -> None:
    """A device that is busy for longer than the loader's timeout is no slow loader."""
    with target.trial() as trial, cache_of_numbers() as cache:
        options = {"seed": 1, "timeout": TIMEOUT_SECONDS}
        with Loader(cache, BATCH_ROWS, **options) as plain:
            rows = [trial.prepared(batch["y"].clone()) for batch in _first(plain, BUSY_BATCHES)]
        with Loader(cache, BATCH_ROWS, device=trial.device, **options) as ours:
            slowest = 0.0
            batches = ours.repeat()
            for number, expected in enumerate(rows):
                if number == BUSY_FROM:
                    trial.block(BUSY_SECONDS)
                    stalled = ours.stats().stall_seconds
                started = time.perf_counter()
                batch = next(batches)
                slowest = max(slowest, time.perf_counter() - started)
                trial.read(batch["y"], expected)
                trial.read(batch["x"], expected)
            stalled = ours.stats().stall_seconds - stalled
            waited = trial.waited(ours.device_stats().device_seconds)
            del batch, batches
            trial.finish()
    said = (
        f"busy for {BUSY_SECONDS:.0f} s with a timeout of {TIMEOUT_SECONDS:.0f}: stall {stalled:.3f} s, "
        f"waited for the device {waited:.2f} s, the longest `next` {slowest:.2f} s"
    )
    if stalled > TIMEOUT_SECONDS / 2 or waited < BUSY_SECONDS / 2:
        raise AssertionError(said)
    saw(said)


def _first(loader: Loader, count: int) -> list[dict[str, torch.Tensor]]:
    return list(itertools.islice(loader.repeat(), count))


@pytest.mark.proof(is_alone=True)
def test_a_full_device_is_told_and_healed(target: Target, saw: Saw) -> None:
    """With room for two batches all comes; with none an error, and all comes once there is room again."""
    batches = alike(FULL_BATCHES, FULL_ROWS)
    nbytes = batches[0]["x"].nbytes
    with target.trial() as trial:
        with DevicePrefetcher(batches, trial.device) as prefetcher, trial.limit(2 * nbytes + nbytes // 2):
            _all_come(trial, prefetcher)
            had = prefetcher.stats().device_bytes
        if had > 2 * nbytes:
            raise AssertionError(f"{had} bytes were had where {2 * nbytes} were allowed: the limit was none")
        with DevicePrefetcher(batches, trial.device) as prefetcher:
            with trial.limit(nbytes // 2):
                try:
                    _all_come(trial, prefetcher)
                except torch.OutOfMemoryError:
                    pass
                else:
                    raise AssertionError("there was no room for a batch, and all came: the limit was none")
            _all_come(trial, prefetcher)
    saw(f"batches of {nbytes >> 20} MiB: room for two: all came; none: OutOfMemoryError; again: all came")


def _all_come(trial: Trial, prefetcher: DevicePrefetcher) -> None:
    number, batch = -1, None
    for number, batch in enumerate(prefetcher):
        trial.sleep(1e-3)
        trial.read(batch["x"][:1], number)  # a read of all of it takes memory, too
        trial.read(batch["x"][-1:], number)
    if number != FULL_BATCHES - 1:
        raise AssertionError(f"the iteration ended after batch {number} of {FULL_BATCHES - 1}")
    del batch
    trial.finish()


_ASSERT = """
import torch
from arrowcache.torch import DevicePrefetcher

table, beyond = torch.zeros(4, device="cuda"), torch.full((1,), 99, device="cuda")
prefetcher = DevicePrefetcher([torch.full((1 << 20,), float(number)) for number in range(8)] * 50, "cuda")
batches = iter(prefetcher)
kept = [next(batches) for _ in range(3)]
table[beyond]  # the device's own assertion fails
try:
    for _ in range(300):
        next(batches)
except RuntimeError as error:
    print(f"next raised {type(error).__name__}")
for _ in range(2):
    try:
        prefetcher.close()
    except RuntimeError as error:
        print(f"close raised {type(error).__name__}")
print("it went on")
"""


@pytest.mark.proof(seconds=70)
def test_a_device_that_fails_is_told_and_left(target: Target, saw: Saw) -> None:
    """A failed assertion on the device ends in an error and an end; on the fake, a call that fails heals."""
    if not target.is_gpu:
        saw(_failing_calls(target))
        return
    done = subprocess.run(
        [sys.executable, "-c", _ASSERT], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    said = "; ".join(done.stdout.splitlines())
    if done.returncode or "next raised" not in said or "it went on" not in said:
        raise AssertionError(f"exit code {done.returncode}; {said}\n{done.stderr[-600:]}")
    saw(f"{said}; exit code 0")


def _failing_calls(target: Target) -> str:
    failed = 0
    for calls in range(FAILING_CALLS):
        with target.trial() as trial, DevicePrefetcher(alike(4), trial.device) as prefetcher:
            trial.fake.fails_in = calls  # type: ignore[attr-defined]  # it is the fake
            try:
                _read_all(trial, prefetcher)
            except RuntimeError:
                failed += 1
            trial.fake.fails_in = None  # type: ignore[attr-defined]  # it is the fake
            _read_all(trial, prefetcher)
            trial.finish()
    if not failed:
        raise AssertionError("no call of the fake failed")
    return f"each of {failed} calls failed once: an error, and the next iteration was right"


def _read_all(trial: Trial, prefetcher: DevicePrefetcher) -> None:
    for number, batch in enumerate(prefetcher):
        trial.read(batch["x"], number)


BEGIN = """
import sys
import tempfile
import threading
import torch
import arrowcache as ac
from arrowcache.torch import DevicePrefetcher, Loader

device = sys.argv[1]
prefetcher = DevicePrefetcher([torch.full((1 << 20,), float(number)) for number in range(4)] * 100, device)
batches = iter(prefetcher)
kept = [next(batches) for _ in range(3)]
if device == "cuda":
    torch.cuda._sleep(1 << 29)  # a quarter of a second
next(batches)
"""
ENDS = {  # of a script amid an iteration; its exit code
    "it ends": ("", 0),
    "a loader is under way": (
        """
folder = tempfile.TemporaryDirectory()
schema = ac.Schema({"x": ac.Tensor("float32", (8192,))})
cache = ac.Cache.create(folder.name + "/cache", schema, "256MiB", "4MiB")
with cache.writer() as writer:
    writer.extend(x=torch.ones(512, 8192).numpy())
loaded = iter(Loader(cache, 64, device=device))
kept += [next(loaded) for _ in range(3)]
""",
        0,
    ),
    "sys.exit": ("sys.exit(3)", 3),
    "nobody catches an error": ("1 / 0", 1),
    "a daemon thread holds batches": (
        "threading.Thread(target=lambda held: threading.Event().wait(), args=(kept,), daemon=True).start()",
        0,
    ),
    "it was let go before": ("del batches, prefetcher", 0),
}
_BAD_WORDS = ("Exception ignored", "terminate called", "Fatal Python", "CUDA error", "Segmentation")


@pytest.mark.proof(seconds=90)
def test_interpreters_end_with_copies_under_way(target: Target, saw: Saw) -> None:
    """Interpreters that end with copies under way do so in time, and with their own exit code."""
    count = EXITS if target.is_gpu else EXITS_WITHOUT_GPU
    wanted = list(itertools.islice(itertools.cycle(ENDS), count))
    with ThreadPoolExecutor(min(EXITS_AT_ONCE, os.cpu_count() or 1)) as pool:
        trouble = [each for each in pool.map(lambda how: _end(how, target.device), wanted) if each]
    if trouble:
        raise AssertionError(f"{len(trouble)} of {count}: {'; '.join(trouble[:3])}")
    saw(f"{count} interpreters: {', '.join(dict.fromkeys(wanted))}")


def _end(how: str, device: str) -> str | None:
    """Returns: what went wrong."""
    script, code = ENDS[how]
    command = [sys.executable, "-c", BEGIN + script, device]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=EXIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{how}: it did not end in {EXIT_SECONDS:.0f} s"
    if done.returncode != code or any(word in done.stderr for word in _BAD_WORDS):
        return f"{how}: exit code {done.returncode}, not {code}: {done.stderr[-600:]}"
    return None
