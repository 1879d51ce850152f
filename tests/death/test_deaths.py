"""Whatever dies first, while rows are on their way: the memory that they go to outlives them.

DEATHS says how often each way is tried; those of benchmarks/RESULTS.md are 30 of each, 480 in all.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from helpers import make_cache, publish, segment_files, wait_until
from page_cache import drop_from_memory
from processes import Script

import arrowcache as ac
from arrowcache.reading.gather import abandon
from arrowcache.reading.slots import Slots

DEATHS = int(os.environ.get("DEATHS", "5"))
WAYS = ["end", "exit", "error", "break", "collected", "interrupt", "signal", "no more"]

# A parent that has imported everything forks one child a death; each ends through the interpreter's own exit.
DEATH = """
    import gc, itertools, os, signal, sys
    import arrowcache as ac
    import arrowcache.reading.loader

    path, ways, deaths, is_cold = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), sys.argv[4] == "cold"
    SHUFFLES = ["rows", "window", "blocks", None] if is_cold else ["rows"]
    segments = os.path.join(path, "segments")

    def drop():
        for name in os.listdir(segments):
            with open(os.path.join(segments, name), "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read_on(loader):
        while True:
            for _ in loader:
                pass

    def interrupt(number, frame):  # nowhere else: a later one would come into what ends with the first
        while frame is not None and frame.f_code is not read_on.__code__:
            frame = frame.f_back
        if frame is not None:
            raise KeyboardInterrupt

    class Kept:
        def __del__(self):  # an object that dies after most others have
            kept = self.batches

    def die(way, number):
        kept = Kept()
        options = {"shuffle": SHUFFLES[number % len(SHUFFLES)], "seed": number}
        loader = ac.Loader(path, 8, prefetch=None if is_cold else 4, **options)
        batches = iter(loader)
        kept.batches = [next(batches) for _ in range(number % 5)]
        for batch in kept.batches:
            assert (batch["image"][:, [0, -1]] == batch["id"][:, None]).all()
        loader.kept = batches.kept = kept
        if way == "end":
            globals().update(loader=loader, batches=batches, kept=kept)
        elif way == "exit":
            globals().update(batches=batches)
            sys.exit(0)
        elif way == "error":
            try:
                raise ValueError(batches)
            except ValueError as error:
                error.me = error, loader
        elif way == "break":
            for _ in batches:
                break
            loader.close()
        elif way == "collected":
            loader.me, batches.me = loader, (batches, loader)
            del loader, batches, kept
            gc.collect()
        elif way == "interrupt":
            signal.signal(signal.SIGALRM, interrupt)
            try:  # more than once: what comes into a finalizer is lost
                signal.setitimer(signal.ITIMER_REAL, 0.0005 * (number % 9) + 0.0001, 0.05)
                read_on(loader)
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
        elif way == "signal":
            signal.signal(signal.SIGALRM, lambda *_: loader.close())
            signal.setitimer(signal.ITIMER_REAL, 0.0005 * (number % 9) + 0.0001)
            try:
                while True:
                    for batch in loader:
                        kept.batches.append(batch)
            except ValueError as error:
                assert "closed" in str(error), error
        elif way == "no more":
            os._exit(0)

    for way, number in itertools.product(ways, range(deaths)):
        if is_cold:
            drop()
        pid = os.fork()
        if not pid:
            signal.alarm(60)
            die(way, number)
            break
        _, status = os.waitpid(pid, 0)
        assert status == 0, (way, number, status)
    else:
        print("all are dead")
"""


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["warm", "cold"])
def test_a_process_may_die_in_any_way_while_rows_are_on_their_way(tmp_path, rows):
    """Copied from memory; or asked of the disk and read, or fetched ahead."""
    schema = ac.Schema({"id": ac.Tensor("int64"), "image": ac.Tensor("uint8", (65536,)), "text": ac.String()})
    cache = make_cache(tmp_path / "cache", schema, capacity="64MiB", segment_bytes="4MiB", segment_rows=32)
    with cache.writer() as writer:
        for number in range(256):
            writer.append(id=number, image=np.full(65536, number, np.uint8), text=str(number) * 1000)
    if rows == "cold":
        drop_from_memory(*segment_files(cache))
    with Script(DEATH, cache.path, ",".join(WAYS), DEATHS, rows, new_interpreter=True) as script:
        assert script.line() == "all are dead"
        assert script.end()[0] == 0
    assert cache.stats().leased_bytes == 0
    assert cache.verify() == []


@pytest.mark.parametrize("is_cold", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["warm", "cold"])
def test_snapshots_that_come_and_go_leave_no_thread_mapping_or_descriptor(tmp_path, is_cold):
    """Cold ones end while rows are asked for, read and fetched."""
    cache = make_cache(tmp_path / "cache")
    publish(cache, 4)

    def now() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text().count(str(cache.path))
        return len(os.listdir("/proc/self/task")), maps, len(os.listdir("/proc/self/fd"))

    def is_nothing_left() -> bool:  # of others something may end meanwhile
        return all(count <= first for count, first in zip(now(), before, strict=True))

    def come_and_go(number: int = 0) -> None:
        if is_cold:
            drop_from_memory(*segment_files(cache))
        with cache.snapshot() as snapshot:
            if is_cold:
                snapshot.map_all()
                fetch = snapshot.fetch(0, 64, ["id", "image"])
                slot = Slots({"image": ((16, 16), np.dtype("float32"))}, 64).lend(64)
                gather = snapshot.read(np.arange(64), snapshot.columns_of(["image"]), slot)
                gather.take(number % 3 * 1e-4)
                abandon(gather) if number % 2 else gather.cancel()
                del fetch
            snapshot.gather([1, 33])

    come_and_go()
    before = now()
    for number in range(100 if is_cold else 200):
        come_and_go(number)
    wait_until(is_nothing_left, "all to be let go")  # a thread that cancels for another, too


TRUNCATED = """
    import faulthandler, os, pathlib, sys, time
    import numpy as np
    from plain_rows import Files
    from arrowcache.native import engine

    faulthandler.enable()
    files = Files([4], [1 << 20], folder=pathlib.Path(sys.argv[1]))
    rows, out = files.table(), np.zeros((4, 1 << 20), np.uint8)
    os.truncate(files.paths[0], 4096)
    columns = [(0, 1 << 20, out.ctypes.data)]
    job = engine.copy_rows(rows, np.arange(4), columns)
    while not job.has_ended():
        time.sleep(0.01)
"""


def test_a_fault_in_a_native_thread_is_told_by_faulthandler(tmp_path):
    with Script(TRUNCATED, tmp_path) as script:
        code, said = script.end()
    assert code == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in said
