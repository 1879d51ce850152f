"""Groups of worker processes: the same promises of each group, and of each face that has one.

A worker that was killed is named, with its signal. A close is within its time, though a worker hangs. Workers
die with their parent. What TensorFlow's import and torch's workers promise is in tests/adapters.
"""

from __future__ import annotations

import os
import re
import signal
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import DEADLINE_SECONDS, limit, open_files, sample, wait_until
from processes import Script, session_processes

import arrowcache as ac
from arrowcache.errors import WorkerError
from arrowcache.process import WorkerGroup

WORKER = """
    import os, signal, time
    from contextlib import suppress

    def main(channel, *descriptors):
        channel.send({"fds": len(descriptors), "at": os.environ.get("AT", "")})
        while (said := channel.receive()) is not None:
            if said["do"] == "hang up":
                channel.close()
            if said["do"] in ("hang up", "hang"):
                time.sleep(3600)
            if said["do"] == "exit":
                os._exit(said["code"])
            if said["do"] == "die":
                os.kill(os.getpid(), said["signal"])
        with suppress(OSError):
            channel.send({"last": True})
"""


def is_alive(pid):
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def module(tmp_path, monkeypatch):
    name = f"work_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(WORKER))
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.fixture
def group(module):
    before = open_files()
    group = WorkerGroup(module, {"AT": "work"})
    yield group
    group.close()
    wait_until(lambda: open_files() <= before, "its descriptors to end")


@pytest.mark.parametrize(
    ("message", "how"),
    [
        ({"do": "exit", "code": 3}, "ended with exit code 3"),
        ({"do": "die", "signal": signal.SIGSEGV}, "was killed by signal 11 (SIGSEGV)"),
        ({"do": "die", "signal": signal.SIGKILL}, "was killed by signal 9 (SIGKILL), as the kernel's out-"),
        ({"do": "hang up"}, "was ended here: it closed its connection"),
    ],
)
def test_an_end_is_told_in_words(group, message, how):
    process = group.start()
    assert process.hear() == {"fds": 0, "at": "work"}
    process.channel.send(message)
    assert process.hear() is None
    assert group.end(process, 0.3 if "hang" in message["do"] else DEADLINE_SECONDS).startswith(how)
    assert group.end(process).startswith(how), "again"
    assert not is_alive(process.pid)


def test_another_process_takes_the_place_of_one_that_died(group):
    first = group.start()
    group.end(first)
    second = group.start()
    assert second.hear() == {"fds": 0, "at": "work"}
    assert second.pid != first.pid


@pytest.mark.parametrize("supervised", [False, True])
@pytest.mark.parametrize("what", ["hang", "stopped", "hang up"])
def test_close_ends_what_hangs(group, monkeypatch, supervised, what):
    limit(monkeypatch, join_seconds=DEADLINE_SECONDS)
    begun: list[Any] = []

    def work() -> None:
        process = group.start()
        assert process.hear() is not None
        process.channel.send({"do": what})
        if what == "stopped":
            os.kill(process.pid, signal.SIGSTOP)
        begun.append(process)
        if supervised:
            process.hear()
            group.end(process, DEADLINE_SECONDS if what == "hang up" else 0.1)

    if supervised:
        group.supervise(work, 2)
        group.supervise(work, 2)
    else:
        work()
        work()
    wait_until(lambda: len(begun) == 2, "both at work")
    group.close(0.1, hears=True)
    assert not any(is_alive(process.pid) for process in begun)


def test_a_close_that_hears_has_all_that_a_process_says_last(group):
    heard: list[Any] = []

    def work() -> None:
        process = group.start()
        heard.append(process.hear())
        heard.append(process.hear())
        group.end(process, DEADLINE_SECONDS)

    group.supervise(work, 1)
    wait_until(lambda: len(heard) == 1, "it at work")
    group.close(DEADLINE_SECONDS, hears=True)
    assert heard[1:] == [{"last": True}]


def test_no_process_is_started_once_the_group_is_closed_nor_in_a_forked_child(group):
    process = group.start()
    pid = os.fork()
    if not pid:
        try:
            group.start()
        except WorkerError:
            group.close()  # leaves the parent's alone
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert process.hear() == {"fds": 0, "at": "work"}
    assert is_alive(process.pid)
    group.close()
    with pytest.raises(WorkerError, match="were ended"):
        group.start()


def test_a_pause_ends_with_the_group(group):
    waited = []

    def work() -> None:
        group.pause(3600)
        waited.append(group.is_closed)

    group.supervise(work, 3)
    wait_until(lambda: threading.active_count() > 3, "the threads")
    group.close(DEADLINE_SECONDS)
    group.close()
    assert waited == [True] * 3


# the faces


class Pool:
    """A pool of samplers, whose processes do something before a sample."""

    module = "arrowcache.sampling.workers"

    def __init__(self, path: Path, act: Any) -> None:
        def draws(rng):
            act()
            yield sample(0)

        self._pool = ac.SamplerPool(path, draws, workers=2, segments=2, retries=0, progress=False)

    def work(self) -> None:
        self._pool.wait(timeout=DEADLINE_SECONDS)

    def close(self) -> None:
        self._pool.stop()


class Loader:
    """A loader, whose processes do something at the third batch."""

    module = "arrowcache.reading.workers.worker"

    def __init__(self, path: Path, act: Any) -> None:
        def same(batch):
            if batch["id"][0] == 32:
                act()
            return batch

        self._loader = ac.Loader(path, 16, shuffle=None, workers=2, transform=same)
        self._epoch = iter(self._loader)

    def work(self) -> None:
        list(self._epoch)

    def close(self) -> None:
        self._loader.close()


FACES = pytest.mark.parametrize("face", [Pool, Loader])


@pytest.mark.slow
@FACES
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_worker_is_named_with_its_signal(cache, tmp_path, face, number):
    pids = tmp_path / "pids"
    pids.mkdir()

    def die():
        (pids / str(os.getpid())).touch()
        os.kill(os.getpid(), number)

    at_work = face(cache.path, die)
    words = rf"by signal {number} \({number.name}\)"
    with pytest.raises((ac.SamplerError, WorkerError), match=words) as told:
        at_work.work()
    at_work.close()
    said = re.search(r"(?:process|pid) (\d+)", str(told.value))
    assert said is not None, str(told.value)
    assert (pids / said[1]).exists()


@pytest.mark.slow
@FACES
@pytest.mark.parametrize("how", ["sleeps", "is stopped"])
def test_a_close_ends_a_worker_that_hangs(cache, tmp_path, face, how):
    pids = tmp_path / "pids"
    pids.mkdir()

    def hang():
        (pids / str(os.getpid())).touch()
        if how == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3600)

    at_work = face(cache.path, hang)
    wait_until(lambda: any(pids.iterdir()), "a worker to hang")
    at_work.close()
    assert not any(is_alive(int(pid.name)) for pid in pids.iterdir())
    assert cache.stats().leased_bytes == 0


ALIVE = """
    import sys, threading, time
    from pathlib import Path
    from test_worker_group import Loader, Pool

    def hang():
        time.sleep(3600)

    face = {"Pool": Pool, "Loader": Loader}[sys.argv[2]](Path(sys.argv[1]), hang)
    print("begun", flush=True)
    threading.Event().wait()
"""


@pytest.mark.slow
@FACES
def test_workers_die_with_their_parent(cache, face):
    code = f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n{textwrap.dedent(ALIVE)}"
    with Script(code, cache.path, face.__name__) as script:
        assert script.line() == "begun"
        wait_until(lambda: sum(face.module in line for line in script.processes()) == 2, "both workers")
        script.kill()
        wait_until(lambda: session_processes(script.pid) == [], "the workers to end")
