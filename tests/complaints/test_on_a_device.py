"""Complaints about the way to a GPU: the GIL, memory that grows or is overwritten. Rows 18 and 19.

What a fake device can show runs everywhere; the rest is marked `gpu`.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from helpers import limit, make_cache, publish

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from fake_device import FakeDevice

import arrowcache as ac
import arrowcache.torch.device
from arrowcache.torch import Loader

BASE = torch.arange(256, dtype=torch.float32).reshape(16, 16)
ROWS = 2048
EPOCHS = 50


@pytest.fixture
def cache(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="64MiB", segment_bytes="4MiB", segment_rows=ROWS)
    publish(cache, 4, rows=ROWS)
    return cache


def calls_of_an_epoch(cache: ac.Cache, batch_size: int) -> float:
    """Python's calls a batch, in the thread that asks and in those that the loader starts."""
    counts: Counter[str] = Counter()

    def count(_frame: Any, event: str, _argument: Any) -> None:
        counts[event] += 1

    with ac.Loader(cache, batch_size, columns=["id"], prefetch=2) as loader:
        threading.setprofile(count)
        sys.setprofile(count)
        try:
            batches = sum(1 for _ in loader)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    assert batches == 4 * ROWS // batch_size
    return (counts["call"] + counts["c_call"]) / batches


def test_complaint_18_a_batch_costs_python_the_same_however_many_rows_it_has(cache):
    calls_of_an_epoch(cache, 16)  # what a process does once
    small, large = calls_of_an_epoch(cache, 16), calls_of_an_epoch(cache, 512)
    assert 0 < small < 60
    assert large < 10 * small  # with 32 times the rows; what an epoch costs once is shared by 16 batches


@pytest.mark.slow
def test_complaint_18_the_gil_is_free_while_a_batch_is_gathered(cache):
    """Python would not switch threads by itself: another one runs only where the gather lets go."""
    rows = np.tile(np.random.default_rng(0).permutation(4 * ROWS), 8)
    out = {"image": np.empty((len(rows), 16, 16), np.float32)}
    most, turns, inside = 0, [0], threading.Event()
    with cache.snapshot() as snapshot:

        def gather() -> None:
            nonlocal most
            for _ in range(20):
                turns[0] = 0
                inside.set()
                snapshot.gather(rows, columns=["image"], out=out)
                inside.clear()
                most = max(most, turns[0])

        gather()  # everything is mapped now
        most = 0
        thread = threading.Thread(target=gather)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)
        try:
            thread.start()
            while thread.is_alive():
                turns[0] += inside.is_set()
                thread.join(0.0001)  # lets go, and goes on when nobody has the GIL
        finally:
            sys.setswitchinterval(interval)
    assert most > 10


@pytest.fixture
def fake(monkeypatch):
    device = FakeDevice("random")
    monkeypatch.setattr(arrowcache.torch.device, "backend_of", lambda name: device)
    return device


@pytest.mark.slow
def test_complaint_18_pinned_memory_is_made_once_and_batches_are_gathered_into_it(cache, fake, monkeypatch):
    limit(monkeypatch, small_leaf_bytes=4096)  # images go by themselves
    batches = 0
    with Loader(cache, 64, device="fake") as loader, Loader(cache, 64) as plain:
        for _ in range(5):
            for batch, expected in zip(loader, plain, strict=True):
                fake.read(batch["image"], expected["image"])
                batches += 1
        fake.finish()
        assert loader.device_stats().pinned_bytes <= 3 * 512, "images were copied into it, and not gathered"
    assert fake.errors == []
    assert fake.calls.count("host_memory") < batches / 20, "it was pinned anew"


@pytest.mark.slow
def test_complaint_19_device_memory_is_flat_and_no_read_sees_another_batch(cache, fake):
    memory = []
    with Loader(cache, 256, device="fake") as loader, Loader(cache, 256) as plain:
        for _ in range(EPOCHS):
            for batch, expected in zip(loader, plain, strict=True):
                fake.read(batch["image"], expected["image"])
            memory.append((fake.memory_bytes, fake.calls.count("memory"), len(fake.events)))
        assert len(fake.streams) == 2, "the consumer's, and one for the copies"
        fake.finish()
    assert fake.errors == []
    assert memory[2:] == memory[2:3] * (EPOCHS - 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_complaint_19_reserved_memory_is_flat_over_fifty_epochs_on_a_gpu(cache):
    reserved, wrong = [], torch.zeros((), device="cuda")
    base = BASE.cuda()
    with Loader(cache, 256, device="cuda") as loader:
        for _ in range(EPOCHS):
            for batch in loader:
                wrong += (batch["image"] != base + batch["id"][:, None, None]).sum()
            reserved.append(torch.cuda.memory_reserved())
    assert wrong.item() == 0
    assert len(set(reserved[2:])) == 1


@pytest.mark.parametrize("face", [ac.Loader, Loader])
def test_complaint_18_batches_that_were_made_together_are_handed_out_in_few_calls(cache, face):
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    with face(cache, 16, columns=["id"]) as loader:
        batches = loader.repeat()
        for _ in range(100):
            next(batches)
        sys.setprofile(count)
        try:
            for _ in range(512):
                next(batches)
        finally:
            sys.setprofile(None)
    assert 0 < calls < 20 * 512  # 40 where each step looks for more to begin
