"""Ctrl-C ends each wait of a reader: nothing else could end these. `-s` shows how soon it came.

Waits on a disk that the kernel cannot leave are in tests/unit/reading/test_held.py, too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from faulty_disk import faulty_disk
from helpers import make_cache
from processes import Script
from quick import first_is_quick

import arrowcache as ac

WAITS = """
    import fcntl, os, signal, sys, threading, time
    from pathlib import Path
    import arrowcache as ac
    from helpers import mapped_seqs, segment_files, wait_for_sleep, wait_until

    path, what = sys.argv[1:]
    cache, of_loader = ac.Cache.open(path), ac.Loader
    let_go, ends = threading.Event(), []

    def is_held(batch):
        let_go.wait()
        return batch

    def sleeps(batch):
        import time
        time.sleep(3600)

    def begun(where=None, **options):
        return of_loader(cache, 8, timeout=None, where=where, **options)

    def nothing(segment):
        return False

    def paced(loader, **pace):
        cache.set_pace(ac.Pace(**pace))
        return loader

    def lock():
        fd = os.open(Path(path) / "cache.lock", os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        ends.append(lambda: os.close(fd))

    def drop():
        for file in segment_files(cache):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def stuck(*kinds):
        from faulty_disk import Disk
        drop()
        held = Disk().is_held("/segments/", *kinds)
        held.__enter__()
        ends.append(lambda: held.__exit__(None, None, None))

    def steps(*kinds, **options):
        loader = begun(prefetch=8, **options)  # before they are found to be in memory
        epoch = iter(loader)
        next(epoch)
        if kinds:
            stuck(*kinds)
        return lambda: list(epoch)

    def gather(*kinds):
        snapshot = cache.snapshot()
        snapshot.map_all()
        stuck(*kinds)
        ends.append(snapshot.close)
        return lambda: snapshot.gather(range(96))

    def locked():
        loader = begun()
        iter(loader).close()
        lock()
        return lambda: iter(loader)

    def of(loader, first=iter):
        return lambda: first(loader)

    def first_step(loader):
        return next(iter(loader))

    WAITS = {
        "rows": lambda: of(begun(nothing, wait_rows=500)),
        "rows of all ranks": lambda: of(begun(rank=0, world_size=2, run_id="a", wait_rows=500)),
        "pace": lambda: of(paced(begun(), min_rows=500)),
        "pace of the next epoch": lambda: of(paced(begun(), max_reuse=1), lambda l: list(l.repeat())),
        "cache.lock": locked,
        "a transform": lambda: of(begun(transform=is_held), first_step),
        "threads": lambda: of(begun(transform=is_held, workers=2, worker_type="thread"), first_step),
        "processes": lambda: of(begun(transform=sleeps, workers=2), first_step),
        "a gather, read": lambda: gather("read"),
        "a gather, asked": lambda: gather("advise"),
        "a gather, opened": lambda: gather("open"),
        "a step": lambda: steps("read"),
        "a step, asked": lambda: steps("advise"),
        "a step, opened": lambda: steps("open"),
        "a step in a window": lambda: steps("read", shuffle="window"),
        "a step of blocks": lambda: steps("read", "advise", shuffle="blocks"),
        "a step in order": lambda: steps("read", "advise", shuffle=None),
        "a step of a thread": lambda: steps("read", transform=dict),
        "a batch taken": lambda: steps("read", columns=["id", "image"]),
    }

    def press():
        wait_for_sleep()
        ends.insert(0, time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    pressed, wait = False, WAITS[what]()
    threading.Thread(target=press).start()
    try:
        wait()
    except KeyboardInterrupt:
        print(f"{time.monotonic() - ends[0]:.4f} s", flush=True)
        pressed = True
    assert pressed
    let_go.set()
    for end in ends[1:]:
        end()
    del wait
    wait_until(lambda: not cache.stats().leased_bytes, "leases to end")
    print("well", flush=True)
"""
OF_PROCESSES = [
    "rows", "rows of all ranks", "pace", "pace of the next epoch", "cache.lock", "a transform", "threads",
    "processes",
]  # fmt: skip
OF_A_DISK = [
    "a gather, read", "a gather, asked", "a gather, opened", "a step", "a step, asked", "a step, opened",
    "a step in a window", "a step of blocks", "a step in order", "a step of a thread", "a batch taken",
]  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path) -> ac.Cache:
    """Six segments of 16 rows."""
    schema = ac.Schema(
        {"id": ac.Tensor("int64"), "image": ac.Tensor("float32", (64, 64)), "name": ac.String()}
    )
    cache = make_cache(tmp_path / "cache", schema, capacity="16MiB", segment_bytes="1MiB")
    with cache.writer() as writer:
        for number in range(96):
            writer.append(id=number, image=np.zeros((64, 64), np.float32), name=str(number) * 500)
    return cache


@pytest.mark.parametrize("what", first_is_quick(OF_PROCESSES + OF_A_DISK))
def test_ctrl_c_ends_a_wait_for(cache, tmp_path, what):
    within = faulty_disk(tmp_path) if what in OF_A_DISK else []
    with Script(WAITS, cache.path, what, within=within) as script:
        seconds = script.line()
        assert script.line() == "well"
        assert script.end() == (0, "")
    print(what, seconds)
