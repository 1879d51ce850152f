"""What /proc tells of a process: its command, as a person would name it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import make_cache, sample, wait_until

import arrowcache as ac
from arrowcache.storage import proc
from arrowcache.storage.proc import command

WAIT = "import sys; print(flush=True); sys.stdin.read()"


def command_of(name: str, *arguments: str) -> str:
    """What is said of a process that began as this."""
    said = [name, "-I", "-c", WAIT, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(said, executable=sys.executable, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = command(child.pid)
        child.communicate()
    return found


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/opt/somewhere/far/down/bin/python", "python"),  # where it lies tells nobody what it does
        ("python", "python"),
        ("../bin/python", "../bin/python"),
        ("/a title: with / in it", "/a title: with / in it"),  # what a process calls itself, as Ray's do
    ],
)
def test_a_command_begins_with_the_name_of_its_program(name, shown):
    assert command_of(name, "train").startswith(f"{shown} -I -c import sys; ")


LOKY = "loky.backend.popen_loky_posix"


@pytest.mark.parametrize(
    ("words", "role"),
    [
        (["-m", LOKY, "--process-name", "LokyProcess-1:1", "--pipe", "21"], "sampler"),
        (["-m", f"joblib.externals.{LOKY}", "--process-name", "LokyProcess-1:1"], "worker"),
        (["-I", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(5, 7)", "--mp"], "worker"),
        (["-c", "from arrowcache.reading.workers.worker import main; main()", "[]"], "loader worker"),
        (["-c", "if begun := begin(): from arrowcache.sampling.workers import main"], "sampler"),
        (["-c", "from arrowcache.reading.workers import x; arrowcache.tensorflow.intake"], "import worker"),
        (["-W", "error", "-X", "dev", "-Im", LOKY, "-m", LOKY], "sampler"),
        (["train.py", "-m", LOKY], ""),
        (["-m", "train", LOKY], ""),
        (["train.py"], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_a_helper_is_told_by_its_command(words, role):
    assert proc._role(["python", *words]) == role


def test_a_helper_is_called_by_whose_it_is(tmp_path):
    helper = [sys.executable, "-c", f"# multiprocessing.spawn\n{WAIT}"]
    script = tmp_path / ("x" * 60 + ".py")
    script.write_text(
        "import subprocess, sys\n"
        f"one = subprocess.Popen({helper!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "one.stdout.readline(); print(one.pid, flush=True); sys.stdin.read(); one.communicate()\n"
    )
    words, pipe = ["python", script.name], subprocess.PIPE
    with subprocess.Popen(
        words, executable=sys.executable, stdin=pipe, stdout=pipe, cwd=tmp_path
    ) as owner:  # fmt: skip
        assert owner.stdout is not None
        found = command(int(owner.stdout.readline()))
        owner.communicate()
    assert found.startswith("worker of python xxxx")
    assert found.endswith(f"x... (pid {owner.pid})")
    assert len(found) == 80


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


def test_a_process_that_is_gone_is_unknown():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    assert command(child.pid) == "unknown"


def test_a_process_has_started_after_its_parent_and_before_now():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        own, its = proc.started(os.getpid()), proc.started(child.pid)
        child.communicate(b"\n")
    assert own is not None
    assert its is not None
    assert own <= its <= time.time() + 1, "/proc tells whole seconds of the boot"
    assert proc.started(child.pid) is None


def test_a_long_command_is_shortened_at_its_end():
    said = command_of(sys.executable, "x" * 200)
    assert len(said) == 80
    assert said.startswith(Path(sys.executable).name)
    assert said.endswith("xxx...")
