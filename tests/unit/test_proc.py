"""What /proc tells of a process: its command, as a person would name it, its start, and what it has open."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import make_cache, sample, wait_until

import arrowcache as ac
from arrowcache.proc import OpenFile, command, open_files, started

SPAWN = ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(5, 7)"]
LOKY = "loky.backend.popen_loky_posix"


@pytest.fixture
def proc(monkeypatch):
    """Processes by pid, each a command and its parent, in place of those of this machine."""
    found = {1: (["/sbin/init"], 0)}
    bytes_of, text_of = Path.read_bytes, Path.read_text

    def read_bytes(path):
        if not path.is_relative_to("/proc"):  # in a thread of an earlier test
            return bytes_of(path)
        if int(path.parent.name) not in found:
            raise FileNotFoundError(path)
        return b"".join(word.encode() + b"\0" for word in found[int(path.parent.name)][0])

    def read_text(path, **options):
        if not path.is_relative_to("/proc"):
            return text_of(path, **options)
        if path.parent.name == "proc":
            return "cpu 1 2 3\nbtime 1000000\nprocesses 7\n"
        read_bytes(path)
        words, parent = found[int(path.parent.name)]
        return f"7 (a (title) of) S {parent} {' '.join(map(str, range(5, 22)))} {' '.join(words[:1])} 0 0\n"

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr(Path, "read_text", read_text)
    return found


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            ["/opt/somewhere/bin/python", "/a/train.py"],
            "python /a/train.py",
        ),  # the arguments stay as they are
        (["python", "", "-m", "x"], "python -m x"),
        (["../bin/python"], "../bin/python"),
        (["/a title: with / in it"], "/a title: with / in it"),  # what a process calls itself, as Ray's do
        (["x" * 80], "x" * 80),
        (["x" * 81], f"{'x' * 77}..."),
        ([], "unknown"),
    ],
)
def test_a_command_is_shown_by_the_name_of_its_program_and_is_no_longer_than_a_line(proc, words, shown):
    proc[7] = words, 1
    assert command(7) == shown
    assert command(8) == "unknown"


@pytest.mark.parametrize(
    ("words", "role"),
    [
        (["-m", LOKY, "--process-name", "LokyProcess-1:1", "--pipe", "21"], "sampler"),
        (["-m", f"joblib.externals.{LOKY}", "--process-name", "LokyProcess-1:1"], "worker"),
        (["-I", *SPAWN[1:], "--mp"], "worker"),
        (["-c", "from multiprocessing.forkserver import main"], "worker"),
        (["-c", "from arrowcache.reading.workers.worker import main; main()", "[]"], "loader worker"),
        (["-c", "if begun := begin(): from arrowcache.sampling.workers import main"], "sampler"),
        (["-c", "from arrowcache.reading import workers; arrowcache.tensorflow.intake"], "import worker"),
        (["-W", "error", "-X", "dev", "-Im", LOKY, "-m", LOKY], "sampler"),
        (["-c", LOKY], ""),
        (["-m", "multiprocessing.spawn"], ""),
        (["train.py", "-m", LOKY], ""),
        (["-m", "train", LOKY], ""),
        (["-m"], ""),
        (["train.py"], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_a_helper_is_told_by_its_command(proc, words, role):
    proc[7], proc[3] = (["python", *words], 3), (["python", "train.py"], 1)
    shown = command(7)
    assert shown == (f"{role} of python train.py (pid 3)" if role else " ".join(["python", *words])[:80])


@pytest.mark.parametrize("helpers", range(1, 6))
def test_a_helper_of_helpers_is_called_by_whom_all_help(proc, helpers):
    proc[2] = ["python", "train.py"], 1
    for pid in range(3, 3 + helpers):
        proc[pid] = SPAWN, pid - 1
    whose = "python train.py (pid 2)" if helpers <= 4 else f"{' '.join(SPAWN)[:59]}... (pid 3)"
    assert command(2 + helpers) == f"worker of {whose}"


@pytest.mark.parametrize("parent", [0, 1, 9])
def test_a_helper_whose_owner_is_gone_says_so(proc, parent):
    proc[7] = SPAWN, parent
    assert command(7) == "worker of a process that has ended"


def test_a_start_is_so_many_ticks_after_the_boot(proc, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_CLK_TCK": 100}[name])
    proc[7] = ["250"], 1
    assert started(7) == 1_000_002.5
    assert started(8) is None
    proc[7] = ["no number"], 1
    assert started(7) is None


def test_what_may_not_be_looked_at_or_was_closed_meanwhile_is_passed_over(monkeypatch):
    links = {"/proc/4/fd": {"0": "/a", "1": None, "2": "/b"}, "/proc/5/fd": None, "/proc/6/fd": {"3": "pipe"}}

    def listdir(path, original=os.listdir):
        if path == "/proc":
            return ["4", "cpuinfo", "5", "self", "6"]
        if path not in links:  # in a thread of an earlier test
            return original(path)
        if links[path] is None:
            raise PermissionError(path)
        return list(links[path])

    def readlink(path, original=os.readlink):
        folder, _, fd = str(path).rpartition("/")
        if folder not in links:
            return original(path)
        if links[folder][fd] is None:
            raise FileNotFoundError(path)
        return links[folder][fd]

    monkeypatch.setattr(os, "listdir", listdir)
    monkeypatch.setattr(os, "readlink", readlink)
    assert [*open_files()] == [OpenFile(4, "0", "/a"), OpenFile(4, "2", "/b"), OpenFile(6, "3", "pipe")]


def test_the_samplers_of_a_pool_are_named(tmp_path):
    folder = tmp_path / "pids"
    folder.mkdir()

    def sampler(rng):
        (folder / str(os.getpid())).touch()
        while True:
            yield sample(1)

    with ac.SamplerPool(make_cache(tmp_path / "cache"), sampler, workers=1, progress=False):
        wait_until(lambda: os.listdir(folder), "a sampler")
        found = command(int(os.listdir(folder)[0]))
    assert found.startswith("sampler of ")
    assert found.endswith(f" (pid {os.getpid()})")


def test_a_process_has_started_after_its_parent_and_before_now():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        own, its = started(os.getpid()), started(child.pid)
        child.communicate(b"\n")
    assert own is not None
    assert its is not None
    assert own <= its <= time.time() + 1, "/proc tells whole seconds of the boot"
    assert started(child.pid) is None
    assert command(child.pid) == "unknown"
