"""Worker processes short of what the kernel gives: descriptors, buffers, memory; and what the error says."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import subprocess
import threading
import weakref
from contextlib import nullcontext, suppress

import pytest
from helpers import DEADLINE_SECONDS, ids_of, limit, wait_until, worker_pids, worker_processes_run
from processes import Script
from quick import first_is_quick

import arrowcache as ac
from arrowcache.process import Channel


def loader_of(cache, workers=2, transform=dict, **options):
    return ac.Loader(cache, 16, workers=workers, transform=transform, timeout=DEADLINE_SECONDS, **options)


def refuse(monkeypatch, code, do, when):
    """Sending messages of one kind fails where that says so, through any socket that is made from now on."""

    class Socket(socket.socket):
        def send(self, data, flags=0):
            if f'"do": "{do}"'.encode() in data and when():
                raise OSError(code, os.strerror(code))
            return super().send(data, flags)

    monkeypatch.setattr(socket, "socket", Socket)


@pytest.mark.slow
@pytest.mark.parametrize("do", ["make", "begin"])
@pytest.mark.parametrize("code", first_is_quick([errno.EMFILE, errno.ENOBUFS, errno.ETOOMANYREFS]))
def test_a_message_that_cannot_be_sent_is_an_error_that_says_why(cache, monkeypatch, do, code):
    """It hung: whatever failed was taken for a worker that had died."""
    fails = [True]
    refuse(monkeypatch, code, do, lambda: bool(fails))
    hint = "ulimit -n" if code != errno.ENOBUFS else ""
    with loader_of(cache) as loader:
        with pytest.raises(ac.WorkerError, match=f"{os.strerror(code)}.*{hint}"):
            next(iter(loader))
        fails.clear()
        assert sorted(ids_of(loader)) == list(range(320))


@pytest.mark.slow
def test_one_message_that_cannot_be_sent_is_an_error_in_its_place(cache, monkeypatch):
    left: list[int] = []  # of the messages to come, down to the one that fails
    refuse(monkeypatch, errno.ENOBUFS, "make", lambda: bool(left) and left.pop() == 0)
    with loader_of(cache, shuffle=None, transform=dict) as loader:
        expected = [batch["id"].tolist() for batch in loader]
        left += range(9)
        made = []
        with pytest.raises(ac.WorkerError, match="No buffer space"):
            made += [batch["id"].tolist() for batch in loader]
        assert made == expected[: len(made)]
        assert sorted(ids_of(loader)) == list(range(320))


def test_files_that_were_cut_off_are_an_error_that_says_so(monkeypatch):
    """It was an IndexError, in the process that was out of descriptors."""
    import resource

    ours, theirs = Channel.pair()
    other = Channel(theirs)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    other.send({"text": "x" * 40_000})
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        with pytest.raises(ac.WorkerError, match="raise the limit of open files"):
            ours.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    ours.close()
    other.close()


def test_a_message_that_is_too_large_for_the_socket_goes_as_a_file():
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ours, other = Channel(here), Channel(there)
    ours.send({"text": "x" * 20_000})
    assert other.receive() == {"text": "x" * 20_000}
    ours.close()
    other.close()


@pytest.mark.slow
def test_a_transform_that_opens_files_until_none_is_left_is_told_so(cache):
    def transform(batch):
        kept = transform.__dict__.setdefault("kept", [])
        while True:
            kept.append(os.open(os.devnull, os.O_RDONLY))

    with loader_of(cache, transform=transform) as loader, pytest.raises(OSError, match="Too many open files"):
        next(iter(loader))


@pytest.mark.slow
def test_a_worker_without_a_descriptor_left_for_the_next_epoch_dies_of_no_index_error(cache, capfd):
    def transform(batch):
        import resource

        kept = transform.__dict__.setdefault("kept", [])
        if not kept:
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
            try:
                while True:
                    kept.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                pass
        return batch

    with loader_of(cache, workers=1, transform=transform) as loader:
        for _ in range(3):
            with suppress(ac.WorkerError, OSError):  # or a new process makes the batch
                next(iter(loader))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("transform", [dict, None], ids=["with a transform", "batches came without them"])
@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("raise SystemExit(5)", r"cannot start: .*exit code 5"),
        ("import os; os.kill(os.getpid(), 9)", r"cannot start: .*signal 9 \(SIGKILL\).*out-of-memory"),
        ("import os; os.kill(os.getpid(), 11)", r"cannot start: .*signal 11 \(SIGSEGV\)"),
    ],
    ids=["fails", "killed", "crashes"],
)
def test_workers_that_cannot_start_are_an_error_that_says_why(cache, monkeypatch, start, words, transform):
    worker_processes_run(monkeypatch, start, instead=True)
    with (
        loader_of(cache, transform=transform) as loader,
        pytest.raises(ac.WorkerError, match=words) as caught,
    ):
        list(loader.repeat())
    assert ("out-of-memory" in str(caught.value)) == ("SIGKILL" in words)


@pytest.mark.slow
def test_workers_that_cannot_start_are_not_started_again_until_somebody_asks(cache, tmp_path, monkeypatch):
    """Those that were still starting when the error was told had the others replaced, without end."""
    first, others_fail = tmp_path / "first", tmp_path / "others fail"
    failing = f"""if True:
        import json, os, sys, time
        sys.path[:] = json.loads(sys.argv[1])
        from arrowcache.process import begin
        from arrowcache.reading.workers import worker

        def fails():
            try:
                first = os.open({str(first)!r}, os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                first = None
            while first is None and not os.path.exists({str(others_fail)!r}):
                time.sleep(0.01)
            raise MemoryError("nothing left")

        channel, memory = begin()
        channel.receive = fails
        worker.main(channel, memory)
    """
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    worker_processes_run(monkeypatch, failing, instead=True)
    with loader_of(cache, workers=4) as loader:
        with pytest.raises(MemoryError, match="nothing left"):
            next(iter(loader))
        has_ended = lambda: [process.returncode is not None for process in started]  # noqa: E731
        wait_until(lambda: any(has_ended()), "the first one to be gone")
        others_fail.touch()
        wait_until(lambda: all(has_ended()), "the others to be gone")
        assert len(started) == 4
        monkeypatch.undo()
        for _ in started:
            with suppress(MemoryError):  # one that died late may still tell of it
                assert sorted(ids_of(loader)) == list(range(320))
                break
        else:
            pytest.fail("the new workers cannot start, either")


@pytest.mark.slow
def test_the_start_of_workers_is_blamed_on_nothing_else(cache, tmp_path, monkeypatch):
    go_on = tmp_path / "go on"
    waiting = f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n"
    worker_processes_run(monkeypatch, waiting)
    with loader_of(cache) as loader:
        epoch, made = iter(loader), []
        consumer = threading.Thread(target=lambda: made.append(next(epoch)))
        consumer.start()
        wait_until(lambda: loader.stats().start_seconds > 1, "the start to be counted while it lasts")
        wait_until(lambda: loader.stats().bottleneck == "start", "it to be more than all that came before")
        go_on.touch()
        consumer.join()
        list(epoch)
        once = loader.stats().start_seconds
        assert once > 1
        assert sorted(ids_of(loader)) == list(range(320))
        assert loader.stats().start_seconds < 2 * once, "a process starts once, an epoch in no time"


@pytest.mark.slow
@pytest.mark.parametrize("spare", first_is_quick([0, 3, 5, 7, 9, 11, 13, 30]))
def test_a_loader_that_finds_few_descriptors_fails_or_works_and_leaves_none(cache, spare):
    code = """
        import resource, sys
        import arrowcache as ac
        from helpers import DEADLINE_SECONDS, open_files, wait_until

        spare = int(sys.argv[2])
        held = ac.Cache.open(sys.argv[1])
        with ac.Loader(held, 16) as plain:
            list(plain)
        del plain
        before = open_files()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 1 + spare, hard))
        try:
            with ac.Loader(held, 16, workers=2, transform=dict, timeout=DEADLINE_SECONDS) as loader:
                print(len(list(loader)), flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        loader = None
        wait_until(lambda: open_files() <= before, "its threads to be gone with all that they had")
        with ac.Loader(held, 16, workers=2) as loader:
            print(len(list(loader)), flush=True)
    """
    with Script(code, cache.path, spare) as script:
        outcome = script.line()
        assert outcome == "20" or "open files" in outcome, outcome
        assert "TimeoutError" not in outcome
        assert script.line() == "20"
        assert script.end() == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_closed_loader_had_is_gone_with_its_last_reference(cache, workers, fails):
    """It took the garbage collector to find it: a loader's memory stayed until that came by."""

    def transform(batch):
        return 1 / 0 if fails else batch

    gc.collect()
    gc.disable()
    try:
        said = pytest.raises(ZeroDivisionError) if fails else nullcontext()
        with loader_of(cache, workers, transform=transform) as loader, said:
            assert len(list(loader)) == 20
        had = weakref.ref(transform)
        del loader, transform, said
        wait_until(lambda: had() is None, "what made its batches to be gone")
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_transform_may_fork_and_have_both_come_back(cache):
    """The second one answered, too, and took requests that were for the first."""

    def transform(batch):
        import time

        pid = os.fork()
        if pid:
            assert os.waitpid(pid, 0)[1] == 0
        else:
            time.sleep(0.01)
        return batch

    with loader_of(cache, workers=1, shuffle=None, transform=transform) as loader:
        for _ in range(2):
            assert ids_of(loader) == list(range(320))


@pytest.mark.slow
def test_a_worker_is_replaced_though_a_process_that_it_forked_lives_on(cache, tmp_path):
    """That one has the worker's connection open, too: its end does not tell."""
    forked = tmp_path / "forked"

    def transform(batch):
        import signal
        import time

        if not forked.exists():
            pid = os.fork()
            if not pid:
                time.sleep(3600)
            forked.write_text(str(pid))
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    try:
        with loader_of(cache, workers=1, shuffle=None, transform=transform) as loader:
            assert ids_of(loader) == list(range(320))
    finally:
        os.kill(int(forked.read_text()), signal.SIGKILL)


def test_workers_that_are_starting_are_ended_at_once(cache, tmp_path, monkeypatch):
    started = tmp_path / "started"
    blocked = (
        "import time  # arrowcache.reading.workers.worker\n"
        f"open({str(started)!r}, 'w').close(); time.sleep(3600)"
    )
    worker_processes_run(monkeypatch, blocked, instead=True)
    limit(monkeypatch, worker_end_seconds=3600.0)
    with loader_of(cache) as loader:
        epoch = iter(loader)
        wait_until(started.exists, "a worker to start")
    with pytest.raises(RuntimeError, match="was closed"):
        next(epoch)
    assert worker_pids() == []


@pytest.mark.slow
def test_a_transform_that_closes_the_workers_connection_is_not_told_of_memory(cache):
    def transform(batch):
        import time

        os.closerange(3, 200)
        time.sleep(3600)

    with loader_of(cache, transform=transform) as loader:
        with pytest.raises(ac.WorkerError, match="closed its connection") as caught:
            next(iter(loader))
        assert "out-of-memory" not in str(caught.value)


@pytest.mark.slow
def test_a_transform_that_writes_into_the_workers_connection_ends_no_loader(cache, tmp_path):
    """It ended the thread that has the workers, and so every epoch to come."""
    written = tmp_path / "written"

    def transform(batch):
        import stat

        if not written.exists():
            written.touch()
            for fd in map(int, os.listdir("/proc/self/fd")):
                with suppress(OSError):
                    if stat.S_ISSOCK(os.fstat(fd).st_mode):
                        os.write(fd, b"Ithis is no message")
        return batch

    with loader_of(cache, transform=transform) as loader:
        with pytest.raises(ac.WorkerError, match="is no message"):
            list(loader)
        assert sorted(ids_of(loader)) == list(range(320))
