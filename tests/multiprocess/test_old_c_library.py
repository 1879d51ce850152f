"""A Python built against an old C library: every way to load and to draw, without the names that it lacks."""

from __future__ import annotations

import subprocess

import pytest
from helpers import make_cache, open_files, publish, wait_until
from processes import Script

from arrowcache import linux
from arrowcache.process import WorkerProcess
from arrowcache.reading.slots import SharedMemory

CUT = """
import fcntl, mmap, os, signal
names = {
    os: ["memfd_create", "MFD_", "pidfd_open", "PIDFD_", "P_PIDFD", "copy_file_range", "getrandom", "GRND_",
         "RWF_", "preadv", "pwritev", "splice", "SPLICE_", "eventfd", "EFD_", "setns", "unshare", "CLONE_"],
    signal: ["pidfd_send_signal"],
    fcntl: ["F_OFD_", "F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_"],
    mmap: ["MAP_NORESERVE", "MADV_FREE", "MADV_WIPEONFORK", "MADV_KEEPONFORK"],
}
for module, starts in names.items():
    for name in [name for name in dir(module) if name.startswith(tuple(starts))]:
        delattr(module, name)
"""
"""What such Pythons lack, and some more; every process of the test begins with it."""

USE = """
import multiprocessing, os, sys
import numpy as np
import arrowcache as ac

path = sys.argv[1]
LACKED = ("memfd_create", "MFD_CLOEXEC", "pidfd_open", "eventfd", "getrandom")

def is_cut():
    return not any(hasattr(os, name) for name in LACKED)

def names_of_memory():
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(fd) for fd in fds if os.path.lexists(fd)]

def mark(batch):
    import os  # by value: this function travels to other processes
    batch["cut"] = np.full(len(batch["id"]), not hasattr(os, "pidfd_open"))
    batch["pid"] = np.full(len(batch["id"]), os.getpid())
    return batch

def check(batches, others=None):
    batches = list(batches)
    ids = [int(number) for batch in batches for number in batch["id"]]
    assert sorted(ids) == list(range(320)), ids
    if others is not None:
        assert all(bool(batch["cut"].all()) for batch in batches)
        assert others == all(int(batch["pid"][0]) != os.getpid() for batch in batches)

def draw(rng):
    assert is_cut_in_worker()
    while True:
        yield {"id": 0, "image": rng.random((16, 16), np.float32)}

def is_cut_in_worker():
    import os
    return not hasattr(os, "memfd_create") and not hasattr(os, "eventfd")

assert is_cut()
"""

NUMPY = """
for options, others in (
    ({}, None),
    ({"transform": mark}, False),
    ({"workers": 2, "worker_type": "thread", "transform": mark}, False),
    ({"workers": 2, "worker_type": "process", "transform": mark}, True),
    ({"workers": 2, "worker_type": "process"}, None),
):
    for shuffle in ("rows", "window"):
        with ac.Loader(path, 16, shuffle=shuffle, **options) as loader:
            check(loader, others)
            assert "/memfd:arrowcache-loader (deleted)" in names_of_memory()
"""

TORCH = """
import torch
from arrowcache.torch import CacheDataset, Loader, dataloader

for options, others in (
    ({}, None),
    ({"workers": 2, "worker_type": "thread", "transform": mark}, False),
    ({"workers": 2, "worker_type": "process"}, None),
):
    with Loader(path, 16, **options) as loader:
        check(loader, others)

def count(batch):
    import os
    return {**batch, "cut": torch.full((len(batch["id"]),), not hasattr(os, "pidfd_open"))}

check(dataloader(path, 16, num_workers=0))
check(dataloader(path, 16, num_workers=2))
check(dataloader(path, 16, num_workers=2, transform=count))
"""

POOL = """
with ac.Cache.open(path) as cache:
    with ac.SamplerPool(cache, draw, workers=2, segments=4, progress=False) as pool:
        pool.wait(timeout=60)
        assert pool.stats().segments == 4
"""


@pytest.fixture
def cut(tmp_path, monkeypatch):
    """Every new interpreter begins without the names."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(CUT)
    monkeypatch.syspath_prepend(tmp_path / "site")


@pytest.fixture
def path(tmp_path):
    with make_cache(tmp_path / "cache", capacity="4MiB") as cache:
        publish(cache, 20)
    return tmp_path / "cache"


@pytest.mark.slow
@pytest.mark.parametrize("way", [NUMPY, POOL], ids=["numpy", "pool"])
def test_loaders_and_samplers_work_without_names_that_old_c_libraries_lack(cut, path, way):
    with Script(USE + way, path, new_interpreter=True) as script:
        assert script.end(120) == (0, "")
        wait_until(lambda: script.processes() == [], "no process of it is left")


@pytest.mark.slow
def test_loaders_of_torch_work_without_names_that_old_c_libraries_lack(cut, path):
    pytest.importorskip("torch", reason="torch is not installed")
    with Script(USE + TORCH, path, new_interpreter=True) as script:
        assert script.end(240) == (0, "")
        wait_until(lambda: script.processes() == [], "no process of it is left")


@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files"), AttributeError("x"), KeyboardInterrupt()]
)
def test_a_worker_that_was_started_does_not_outlive_a_failed_launch(monkeypatch, error):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    def refuse(pid):
        raise error

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(linux, "process_file", refuse)
    memory = SharedMemory.create()
    before = open_files()
    with pytest.raises(type(error)):
        WorkerProcess("nothing", memory.fd)
    assert [process.returncode for process in started] == [-9]
    assert open_files() <= before


def test_a_kernel_that_gives_no_descriptor_of_a_process_is_named(path, monkeypatch):
    def refuse(pid):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(linux, "process_file", refuse)
    import arrowcache as ac

    with (
        ac.Loader(path, 16, workers=1, worker_type="process", transform=dict) as loader,
        pytest.raises(ac.WorkerError, match=r"pidfd_open.*older than Linux 5.3.*worker_type='thread'"),
    ):
        next(iter(loader))
