"""Complaints about processes: killed, stale, forked, hanging. Rows 1, 6, 11, 12 and 13."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers import disk_bytes, ids_of, make_cache, names_in_dev_shm, publish, wait_until, worker_pids
from helpers import sample as row
from processes import Child, Script
from quick import one_in

import arrowcache as ac

JOB = """
    import os, sys, time, warnings
    import arrowcache as ac
    from helpers import sample

    warnings.filterwarnings("ignore", "an epoch leaves out")  # the cache is full, and samplers publish

    def draws(rng):
        while True:
            yield sample(int(rng.integers(1 << 20)))

    def same(batch):
        return batch

    if __name__ == "__main__":
        cache = ac.Cache.open(sys.argv[1])
        with ac.SamplerPool(cache, draws, workers=2, progress=False) as pool:
            pool.wait(segments=3, timeout=60)
            with ac.Loader(cache, 8, workers=2, transform=same) as loader, cache.snapshot() as snapshot:
                epoch = iter(loader)
                next(epoch)
                print("ready", flush=True)
                if sys.argv[2] == "once":
                    assert sum(1 for batch in epoch) > 0
                else:
                    while True:
                        for batch in loader:
                            pass
"""
KINDS = {  # whom to kill: what its command has in it; the job itself has none of the others
    "the job": "",
    "a sampler": "arrowcache.sampling.workers",
    "a worker": "arrowcache.reading.workers.worker",
}


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.parametrize("whom", ["all at once", *KINDS])
def test_complaint_01_what_is_killed_leaves_nothing_stale_and_the_job_starts_again(tmp_path, whom):
    cache = make_cache(tmp_path / "cache")
    with Script(JOB, cache.path, "on and on") as script:
        assert script.line() == "ready"
        running = [line.split(" ", 1) for line in script.processes()]
        pids = [int(pid) for pid, _ in running]
        if whom == "all at once":
            script.signal_group(signal.SIGKILL)
        elif whom == "the job":
            script.kill()
        else:
            victims = [int(pid) for pid, command in running if KINDS[whom] in command]
            assert victims, running
            for victim in victims:
                with suppress(ProcessLookupError):  # its pool ends the others with the first one
                    os.kill(victim, signal.SIGKILL)
            script.kill()
        wait_until(lambda: not script.processes(), "every process of the job to end")
        wait_until(lambda: not names_in_dev_shm(pids), "named memory to go")
    assert cache.stats().leased_bytes == 0
    assert cache.stats().waiting_writers == 0
    with Script(JOB, cache.path, "once") as script:
        assert script.line() == "ready"
        assert script.end() == (0, "")
    assert cache.verify() == []
    assert os.listdir(cache.path / "incoming") == []


def hold_part(path: Path, ready: Path) -> None:
    store = ac.Cache.open(path).store
    with store.locked():  # as a writer does: another child that opens the cache sweeps
        part = store.folder.new_part()
    part.allocate(16 * 1024)
    ready.touch()
    threading.Event().wait()


@pytest.mark.slow
def test_complaint_06_half_written_files_count_while_their_writer_lives_and_go_after_its_death(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 100)
    before = cache.stats().segments
    children = [Child(hold_part, cache.path, tmp_path / f"ready{number}") for number in range(4)]
    try:
        for number in range(4):
            wait_until((tmp_path / f"ready{number}").exists, "a part to be written")
        publish(cache, 100)  # evicts, so it sweeps
        assert len(os.listdir(cache.path / "incoming")) == 4, "a living writer's part was swept"
        assert disk_bytes(cache.path) <= cache.stats().capacity_bytes
        assert cache.stats().segments < before, "parts took no room from segments"
    finally:
        for child in children:
            child.kill()
    assert len(os.listdir(cache.path / "incoming")) == 4
    ac.Cache.open(cache.path)
    assert os.listdir(cache.path / "incoming") == []


FORKS = """
    import faulthandler, os, signal, sys, threading
    faulthandler.register(signal.SIGALRM, chain=True)  # where it hangs, then its end
    signal.alarm(90)
    import arrowcache as ac
    from helpers import append_rows, ids_of

    cache = ac.Cache.open(sys.argv[1])
    loaders = {how: ac.Loader(cache, 16, workers=workers, worker_type=how, transform=dict)
               for how, workers in (("thread", 2), ("process", 1))}
    stop = threading.Event()

    def read():
        while not stop.is_set():
            for batch in cache_loader:
                pass

    def write():
        while not stop.is_set():
            if cache.stats().segments < 1000:
                append_rows(cache, range(16))

    cache_loader = ac.Loader(cache, 8)
    threads = [threading.Thread(target=work) for work in (read, write)]
    for thread in threads:
        thread.start()
    epochs = [iter(loader) for loader in loaders.values()]
    for epoch in epochs:
        next(epoch)
    for number in range(12):
        next(epochs[number % 2])
        pid = os.fork()
        if pid == 0:  # the threads are gone, at whatever they were
            signal.alarm(30)
            code = 1
            try:
                loader = list(loaders.values())[number % 2] if number < 4 else ac.Loader(cache, 16)
                assert len(ids_of(loader)) >= 16
                append_rows(cache, range(16))
                assert cache.stats().segments > 0
                with ac.Cache.open(sys.argv[1]) as mine, mine.snapshot() as snapshot:
                    assert len(snapshot.gather([0])["id"]) == 1
                loader.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, f"child {number}"
    stop.set()
    for thread in threads:
        thread.join()
    for loader in (cache_loader, *loaders.values()):
        loader.close()
    assert cache.stats().leased_bytes == 0, "a child kept its parent's lease"
    assert cache.verify() == []
    print("well", flush=True)
"""


IDLE = """
    import os, pickle, sys, threading
    from pathlib import Path

    def held():
        files = [Path("/proc/self/fdinfo", fd) for fd in os.listdir("/proc/self/fd")]
        return sum(file.read_text().count("lock:") for file in files if file.exists())

    import arrowcache as ac
    assert threading.active_count() == 1 and held() == 0, "at import"
    cache = ac.Cache.open(sys.argv[1])
    idle = [ac.Loader(cache, 16, workers=2, worker_type=how) for how in ("process", "thread")]
    assert threading.active_count() == 1 and held() == 0, "before there is anything to do"
    there = pickle.loads(pickle.dumps(cache))
    assert threading.active_count() == 1 and held() == 0, "at pickle time"
    assert there.stats().segments == 20
    print("well", flush=True)
"""


@pytest.mark.slow
def test_complaint_11_importing_opening_and_pickling_start_no_thread_and_hold_no_lock(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 20)
    with Script(IDLE, cache.path, new_interpreter=True) as script:
        assert script.line() == "well"
        assert script.end() == (0, "")


@pytest.mark.slow
def test_complaint_11_a_fork_among_threads_at_work_does_not_deadlock(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="64MiB")
    publish(cache, 20)
    with Script(FORKS, cache.path) as script:
        assert script.line() == "well"
        assert script.end() == (0, "")


EXIT = """
    import itertools, os, sys
    import arrowcache as ac
    from helpers import sample

    def same(batch):
        return batch

    def draws(rng):
        while True:
            yield sample(int(rng.integers(1 << 20)))

    def loader_of(kind):
        if kind == "torch":
            from arrowcache.torch import Loader, dataloader

            kept.extend([Loader(cache, 2), dataloader(cache, 2, 0)])
            kept.extend([iter(each) for each in kept[-2:]])
            kept.extend([next(each) for each in kept[-2:]])
            return dataloader(cache, 2, 2, transform=same)
        options = {"threads": {"workers": 2, "worker_type": "thread"}, "processes": {"workers": 2}}
        return ac.Loader(cache, 2, transform=same, **options.get(kind, {}))

    if __name__ == "__main__":
        path, kind, how = sys.argv[1:]
        kept = []
        cache = ac.Cache.open(path)
        if kind == "pool":
            pool = ac.SamplerPool(cache, draws, workers=2, progress=False)
            pool.wait(segments=2, timeout=60)
        if how == "del":
            names = ("cache", "loader", "epoch", "batch", "view", "table")
            for turn in range(6 if kind in ("plain", "threads") else 2):  # processes start slowly
                for order in (names[turn:] + names[:turn], (names[turn:] + names[:turn])[::-1]):
                    cache = ac.Cache.open(path)
                    loader = loader_of(kind)
                    epoch = iter(loader)
                    batch = next(epoch)
                    view = next(iter(ac.Loader(cache, 2, shuffle=None)))
                    table = cache.dataset().to_table()
                    for name in order:
                        del globals()[name]
            cache = ac.Cache.open(path)
        loader = loader_of(kind)
        epoch = iter(loader)
        batch = next(epoch)
        plain = ac.Loader(cache, 2, shuffle=None)
        views = [next(iter(plain)) for _ in range(3)]
        table = cache.dataset().to_table()
        print("ready", flush=True)
        if how == "raise":
            raise LookupError("mine")
        if how == "exit":
            sys.exit(3)
        if how == "break":
            for batch in loader:
                break
        while how == "interrupt":
            for batch in loader:
                pass
"""
UNCLOSED = re.compile(  # Ctrl-C inside of the standard library's socketpair() and fromfd(): Python closes it
    r"Exception ignored in: <socket.socket .*>\n(Traceback .*\n( .*\n)*)?"
    r"ResourceWarning: unclosed <socket.socket .*>\n"
)
ENDING = ("plain", "threads", "processes", "torch", "pool")
CODES = {"end": 0, "break": 0, "del": 0, "exit": 3, "raise": 1, "interrupt": -signal.SIGINT}


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.parametrize(("how", "kind"), one_in(6, itertools.product(CODES, ENDING)))
def test_complaint_12_a_process_ends_within_5_s_however_it_ends(tmp_path, kind, how):
    """In the middle of epochs, with live views, nothing closed: no word but the exception's own.

    Seconds in which all of it sleeps: what it works, a busy machine may draw out.
    """
    if kind == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    cache = make_cache(tmp_path / "cache", capacity="64MiB")
    publish(cache, 20)
    with Script(EXIT, cache.path, kind, how, new_interpreter=True) as script:
        assert script.line() == "ready"
        if how == "interrupt":
            script.signal_group(signal.SIGINT)
        code, errors = script.end_awake(20 if kind == "torch" else 5)  # torch's own take what they take
        wait_until(lambda: not script.processes(), "its processes to end")
    assert cache.stats().leased_bytes == 0
    if how == "interrupt":
        errors = UNCLOSED.sub("", errors)
    if kind == "torch" and how == "interrupt" and code == 1:  # torch was the first to see its workers end
        assert "DataLoader worker" in errors
        return
    assert code == CODES[how], errors
    last = {"raise": "LookupError: mine", "interrupt": "KeyboardInterrupt"}.get(how)
    if last is None:
        assert errors == ""
    else:
        assert errors.count("Traceback (most recent call last):") == 1, errors
        assert errors.rstrip().splitlines()[-1] == last


@pytest.mark.slow
@pytest.mark.smoke
def test_complaint_13_dead_workers_are_replaced_and_what_they_had_is_made_again(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 20)
    with ac.Loader(cache, 8, workers=2, transform=dict, seed=3) as loader:
        expected = ids_of(ac.Loader(cache, 8, seed=3))
        epoch = iter(loader)
        made: list[Any] = []
        for number, batch in enumerate(epoch):
            made.append(batch)
            if number in (3, 12, 30):
                for pid in worker_pids():
                    os.kill(pid, signal.SIGKILL)
        assert ids_of(made) == expected, "a row was lost, doubled or out of its place"


@pytest.mark.slow
def test_complaint_13_what_fails_every_time_is_given_up_with_its_own_traceback(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 4)

    def deadly(batch):
        os.kill(os.getpid(), signal.SIGKILL)

    def broken(batch):
        raise LookupError("mine")

    def failing(rng):
        raise LookupError("mine")
        yield row(0)

    dead = r"3 worker processes .*SIGKILL"
    with (
        ac.Loader(cache, 8, workers=2, transform=deadly) as loader,
        pytest.raises(ac.WorkerError, match=dead),
    ):
        next(iter(loader))
    with ac.Loader(cache, 8, workers=2, transform=broken) as loader, pytest.raises(LookupError) as caught:
        next(iter(loader))
    assert "in broken" in str(caught.value.__cause__)
    gone = r"given up after 1 retry(?s:.*)in failing"
    with (
        ac.SamplerPool(cache, failing, workers=1, segments=1, retries=1, progress=False) as pool,
        pytest.raises(ac.SamplerError, match=gone),
    ):
        pool.wait(timeout=60)
