"""The engine against a plain reader: every row of any width, or the index of one that is refused."""

from __future__ import annotations

import mmap
import os
import runpy
import shutil
import signal
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import in_child, limit, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from interruptions import Interruption, interruptions
from plain_rows import Array, Files, begun, begun_read, checked, columns_of, ended, threads
from quick import in_part
from slow_pages import SlowPages, require_slow_pages

from arrowcache.limits import Limits
from arrowcache.native import engine, library
from arrowcache.native.engine import (
    Job,
    SegmentRows,
    copy_values,
    fetch_rows,
    find_values,
    thread_count,
)
from arrowcache.native.engine import threads as of_process

SMALL = 4  # rows: their copy is late
CHUNK_BYTES, HELPED_CHUNKS = 256 << 10, Limits.current.held_gil_chunks


@pytest.fixture
def no_threads():
    """Nothing is done but by who takes it."""
    with threads(0):
        yield


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
WIDTHS = st.lists(st.sampled_from([1, 2, 3, 4, 8, 16, 63, 64, 65, 700, 5000]), min_size=1, max_size=5)
READS = pytest.mark.parametrize("reads", [False, True], ids=["copied", "read"])


@given(
    lengths=LENGTHS, widths=WIDTHS, element_bytes=st.sampled_from([1, 2, 4, 8, 12]),
    seed=st.integers(0, 2**32), count=st.integers(0, 3), reads=st.booleans(), drops=st.booleans(),
    data=st.data(),
)  # fmt: skip
@settings(max_examples=in_part(150))
def test_any_rows_of_any_segments_come(lengths, widths, element_bytes, seed, count, reads, drops, data):
    files = Files(lengths, widths, element_bytes, seed)
    ids = data.draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=200))
    numbers = st.integers(0, len(lengths) - 1)
    unmapped = data.draw(st.sets(numbers))
    table = files.table(unmapped=unmapped, without_path=data.draw(st.sets(numbers)) - unmapped)
    files.drop(data.draw(st.sets(numbers, max_size=2)))
    with threads(count):
        checked(files, np.array(ids, np.int64), table, reads=reads, drops=drops)


@READS
@pytest.mark.parametrize(
    ("lengths", "widths", "count"),
    [
        ([64] * 40 + [10], [3, 1000], 4000),
        ([1, 2, 3, 5000, 1, 1], [17], 20_000),
        ([3], [(256 << 10) + 1, 5, (600 << 10)], 9),
        ([3, 2], [1 << 20, (128 << 10) + 1, 3 << 20], 5),
        ([5] * 4, [1], 300_000),
        ([4] * 30, [4] * 300, 500),
    ],
    ids=["alike", "uneven", "larger than a chunk", "MiB", "tiny", "300 columns"],
)
@pytest.mark.parametrize("is_mapped", [False, True], ids=["not mapped", "mapped"])
def test_large_jobs_are_done_by_all_threads_together(lengths, widths, count, reads, is_mapped):
    files = Files(lengths, widths)
    table = files.table(unmapped=() if is_mapped else range(len(lengths)))
    if reads or not is_mapped:
        count = min(count, 20_000)  # a file is opened for each row, here
    checked(files, np.random.default_rng(1).integers(0, sum(lengths), count), table, reads=reads)


@pytest.mark.parametrize("count", [3, 50_000])
@pytest.mark.parametrize("wrong", [-1, 96, 2**62, -(2**63)])
@pytest.mark.parametrize("lengths", [[32] * 3, [1, 90, 5]])
def test_a_number_out_of_range_is_named_and_nothing_is_copied(lengths, wrong, count):
    files = Files(lengths, [8])
    ids = np.zeros(count, np.int64)
    ids[count - 2] = wrong
    arrays, rows = files.outputs(count), files.table()
    for job in (
        begun(rows, ids, arrays),
        begun_read(rows, ids, arrays),
        find_values(rows, ids, 1, 1),
        find_values(rows, ids, 1, 1, on_disk=True),
    ):
        is_late = count == 3 and type(job) is Job
        assert job.refused == (-1 if is_late else count - 2), "what is small is checked when it is taken"
        assert job.take(0)
        assert job.cancel()
        assert job.refused == count - 2
    assert rows.segments_of(ids) == count - 2
    assert not arrays[0].any()


@READS
def test_a_row_of_a_segment_that_is_not_known_is_refused(reads):
    files = Files([10, 10, 10], [8])
    rows, arrays, begin = files.table(unknown=(1,)), files.outputs(3), begun_read if reads else begun
    assert ended(begin(rows, np.array([0, 29, 15]), arrays)).refused == 2
    assert ended(find_values(rows, np.array([0, 29, 15]), 1, 1, on_disk=reads)).refused == 2
    assert not arrays[0].any()
    assert ended(begin(rows, np.array([0, 29, 9]), arrays)).refused == -1


@READS
def test_a_row_of_a_segment_that_is_neither_mapped_nor_has_a_path_is_refused(reads):
    files = Files([10, 10], [8])
    rows, arrays, begin = files.table(unmapped=(1,), without_path=(1,)), files.outputs(2), begun
    if reads:
        begin = begun_read
    assert ended(begin(rows, np.array([0, 15]), arrays)).refused == 1
    assert not arrays[0].any()


def test_rows_that_are_released_after_they_were_asked_for_are_refused(no_threads):
    """They were not read, and nobody said so."""
    files, ids = big()
    files.drop(range(8))
    job = begun_read(rows := files.table(), ids, files.outputs(len(ids)))
    assert Job.take(job, 60)
    rows.release(int(ids.max()) + 1)
    assert ended(job).refused == 0


@READS
def test_columns_are_made_once_for_many_jobs(reads):
    files, begin = Files([10, 20], [8, 700, 3]), engine.read_rows if reads else engine.copy_rows
    columns = engine.CopiedColumns([(number, width, 0) for number, width in enumerate(files.widths)])
    for ids in np.arange(30), np.array([3, 29, 3]):
        arrays = files.outputs(len(ids))
        moved = columns.at(array.ctypes.data for array in arrays)
        assert ended(begin(files.table(), ids, moved, arrays)).failure is None
        for number, array in enumerate(arrays):
            assert np.array_equal(array, files.column(number, ids))
    assert columns.row_bytes == 711


@READS
def test_rows_that_were_released_are_refused(reads):
    files, begin = Files([10, 10, 10], [8]), begun_read if reads else begun
    rows = files.table()
    rows.release(10)
    assert ended(begin(rows, np.array([10, 9]), files.outputs(2))).refused == 1
    rows.release(20)
    assert ended(begin(rows, np.array([20, 19]), files.outputs(2))).refused == 1
    assert ended(begin(rows, np.array([20, 29]), files.outputs(2))).refused == -1


def test_rows_that_are_released_before_their_copy_is_taken_are_refused_if_it_is_late():
    files = Files([10, 10, 10], [8])
    rows, arrays = files.table(), files.outputs(SMALL)
    copy = begun(rows, np.array([25, 12, 3, 28]), arrays)
    rows.release(10)
    assert copy.refused == -1
    assert copy.take(0)
    assert copy.refused == 2
    assert not arrays[0].any()


def test_no_rows_are_copied_from_no_segments():
    nothing = np.zeros(0, np.int64)
    rows = SegmentRows(np.zeros(1, np.int64))
    out = np.zeros((1, 8), np.uint8)
    for begin in (begun, begun_read):
        assert ended(begin(rows, nothing, [out[:0]])).refused == -1
        assert ended(begin(rows, np.array([0]), [out])).refused == 0
    assert ended(find_values(rows, nothing, 0, 1)).offsets.tolist() == [0]
    assert ended(fetch_rows(rows, 0, 10, columns_of([out]))).refused == -1
    assert rows.segments_of(np.array([0])) == 0


@READS
def test_rows_of_no_columns_are_no_bytes(reads):
    files, begin = Files([10], [8]), begun_read if reads else begun
    assert ended(begin(files.table(), np.arange(10), [])).refused == -1


@pytest.mark.parametrize(
    "lengths", [[7] * 5 + [2], [1, 900, 3, 3, 50], [1] * 1000 + [100_000], [0, 0], [0, 3, 0]]
)
def test_the_segment_of_each_row_is_known(lengths):
    starts = np.concatenate(([0], np.cumsum(lengths)))
    ids = np.arange(starts[-1])
    assert np.array_equal(SegmentRows(starts).segments_of(ids), np.repeat(np.arange(len(lengths)), lengths))


@pytest.mark.parametrize(
    "ends", [(5, 3), (-1, 4), (0, 10_000)], ids=["falling", "negative", "beyond the file"]
)
@READS
@pytest.mark.parametrize("count", [3, 20_000])
def test_offsets_that_leave_their_file_are_found(ends, reads, count):
    files = Files([4, 4], [1])
    with files.paths[1].open("r+b") as file:
        file.seek(files.layouts[1][1] + 2 * 4)
        file.write(np.array(ends, np.int32).tobytes())
    ids = np.resize([0, 3, 2], count)
    ids[count // 2] = 6
    found = ended(find_values(files.table(), ids, 1, 1, on_disk=reads))
    assert found.refused == -1
    assert found.damaged == count // 2
    assert (np.diff(found.offsets) >= 0).all(), "they can be allocated and copied, whatever they say"
    out = np.zeros(int(found.offsets[-1]), np.uint8)
    ended(engine.read_values(found, out) if reads else copy_values(found, out))
    wanted = (b"" if row == 6 else files.values[row] for row in ids.tolist())
    assert out.tobytes() == b"".join(wanted)


# What is small.


def test_what_is_small_is_copied_when_it_is_taken():
    files = Files([50], [100])
    arrays, ids = files.outputs(SMALL), np.arange(SMALL)
    copy = begun(files.table(), ids, arrays)
    assert not copy.has_ended()
    assert not arrays[0].any(), "nobody else copies it"
    assert copy.take(0)
    assert copy.has_ended()
    assert np.array_equal(arrays[0], files.column(0, ids))


def test_what_is_late_may_be_cancelled_or_dropped_before():
    files = Files([50], [100])
    arrays = files.outputs(SMALL)
    copy, kept = begun(files.table(), np.arange(SMALL), arrays), weakref.ref(files)
    assert copy.cancel()
    assert copy.has_ended()
    assert copy.take(0)
    copy = begun(files.table(), np.arange(SMALL), arrays)
    del copy
    assert not arrays[0].any()
    del files
    assert kept() is None


def test_values_that_are_late_are_found_at_once():
    files = Files([50], [])
    found = find_values(files.table(), np.arange(50), 0, 1)
    assert found.has_ended()
    assert found.offsets[-1] == sum(map(len, files.values))


def test_values_that_are_late_and_not_known_are_refused_at_once():
    files = Files([10, 10], [])
    found = find_values(files.table(unknown=(1,)), np.array([1, 11]), 0, 1)
    assert found.refused == 1
    assert found.damaged < 0


class Recorded:
    """A library, and which of its functions were called."""

    def __init__(self, library: Any, calls: list[str]) -> None:
        self._library, self._calls = library, calls

    def __getattr__(self, name: str) -> Any:
        self._calls.append(name)
        return getattr(self._library, name)


@pytest.fixture
def held(monkeypatch) -> list[str]:
    """The functions that kept the GIL."""
    calls: list[str] = []
    monkeypatch.setattr(engine, "quick", Recorded(engine.quick, calls))
    return calls


@pytest.fixture
def released(monkeypatch) -> list[str]:
    """Those that did not."""
    calls: list[str] = []
    monkeypatch.setattr(engine, "library", Recorded(engine.library, calls))
    return calls


def test_what_is_small_keeps_the_gil(held, released):
    files = Files([50], [100])
    ended(begun(files.table(), np.arange(SMALL), files.outputs(SMALL)))
    assert held == ["engine_copy"]
    assert released == []


@pytest.mark.parametrize("count", [SMALL, 50])
@pytest.mark.parametrize("reads", [False, True], ids=["not mapped", "read"])
def test_what_is_read_from_files_is_not_read_with_the_gil(no_threads, reads, count):
    """A copy of what is not mapped is a read."""
    files = Files([50], [20_000])
    (out,), ids = arrays, _ = files.outputs(count), np.arange(count)
    job = begun_read(files.table(), ids, arrays) if reads else begun(files.table(unmapped=(0,)), ids, arrays)
    assert not job.take(0), "this keeps the GIL"
    assert not out.any()
    ended(job)
    assert np.array_equal(out, files.column(0, ids))


# In the middle.


def chunks_of(count: int, *, reads: bool = False) -> tuple[Files, Array, Any]:
    """A job of so many chunks, of a row each."""
    files = Files([count], [CHUNK_BYTES])
    (out,) = arrays = files.outputs(count)
    return files, out, (begun_read if reads else begun)(files.table(), np.arange(count), arrays)


def test_who_takes_a_copy_does_a_part_of_it_without_a_wait(no_threads):
    count = 2 * HELPED_CHUNKS + 1
    files, out, copy = chunks_of(count)
    for number in (1, 2):
        assert not copy.take(0)
        assert not copy.has_ended()
        done = number * HELPED_CHUNKS
        assert np.array_equal(out[:done], files.fixed[0][0][:done])
        assert not out[done:].any()
    assert copy.take(0)
    assert copy.has_ended()
    assert np.array_equal(out, files.fixed[0][0])


@READS
def test_what_is_cancelled_in_the_middle_writes_no_more(no_threads, reads):
    count = 2 * HELPED_CHUNKS
    files, out, job = chunks_of(count, reads=reads)
    assert not job.take(1e-9), "as much as that needs a chunk at least"
    before = out.copy()
    assert before.any()
    assert not before.all(1).all()
    assert job.cancel()
    assert job.cancel()
    assert job.take(1)
    assert np.array_equal(out, before)
    checked(files, np.arange(count), reads=reads)


def test_a_copy_that_is_cancelled_while_threads_are_at_it_writes_no_more():
    for _ in range(20):
        _, out, copy = chunks_of(64)
        wait_until(lambda out=out: out[:, 0].any(), "a thread to begin it")
        assert copy.cancel()
        before = out.copy()
        assert copy.take(1)
        assert np.array_equal(out, before)


@pytest.mark.parametrize("begins", ["asks", "reads"])
def test_memory_may_go_once_asks_and_reads_were_cancelled(begins):
    """Where an engine writes to it later, a sanitizer sees that."""
    files, rng = Files([64], [CHUNK_BYTES]), np.random.default_rng(0)
    rows, ids = files.table(unmapped=(0,)), np.arange(64)
    for _ in range(20):
        files.drop((0,))
        job = begun_read(rows, ids, arrays := files.outputs(64), drops=bool(rng.integers(2)))
        if begins == "reads":
            wait_until(lambda job=job: Job.has_ended(job), "all to be asked for")
            job.advance()
            wait_until(arrays[0][:, 0].any, "a thread to begin")
        else:
            time.sleep(rng.random() / 1000)  # before, while and after they are asked for
        assert job.cancel()
        before = arrays[0].copy()
        assert job.take(1)
        assert np.array_equal(arrays[0], before)
        del job, arrays


def copied_values(table: Any, ids: Array, *, on_disk: bool) -> None:
    found = ended(find_values(table, ids, 1, 1, on_disk=on_disk))
    out = np.zeros(int(found.offsets[-1]), np.uint8)
    ended(engine.read_values(found, out) if on_disk else engine.copy_values(found, out))


@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning")  # it came in a destructor
@pytest.mark.parametrize("what", ["copy", "read", "fetch", "values copied", "values read"])
def test_ctrl_c_at_any_step_leaves_nothing_that_touches_memory(what):
    """From the disk, too, where threads are at it."""
    files = Files([16], [CHUNK_BYTES], values=(100_000, 200_000))
    table, ids = files.table(unmapped=() if what.endswith(("copy", "copied")) else (0,)), np.arange(16)

    def work(arrays: list[Array]) -> None:
        if what == "copy":
            ended(begun(table, ids, arrays))
        elif what == "read":
            ended(begun_read(table, ids, arrays))
        elif what == "fetch":
            ended(fetch_rows(table, 0, 16, columns_of(arrays)))
        else:
            copied_values(table, ids, on_disk=what == "values read")

    for interrupt in interruptions(3, finalizers=True):
        files.drop((0,))
        arrays = files.outputs(16)
        with interrupt:
            work(arrays)
        before = arrays[0].copy()
        assert of_process.stop()
        assert np.array_equal(arrays[0], before), interrupt.where
    if what in ("copy", "read"):
        assert np.array_equal(arrays[0], files.fixed[0][0])


class Owner:
    """Of memory."""


@pytest.mark.parametrize("what", ["copy", "read", "fetch"])
def test_what_a_job_touches_outlives_one_that_is_dropped_as_ctrl_c_comes(what, monkeypatch):
    """Also where it comes as the job's finalizer begins; the next job lets go of it then."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's keeps what was dropped
    files, ids, lost = Files([16], [CHUNK_BYTES]), np.arange(16), 0
    table = files.table(unmapped=() if what == "copy" else (0,))
    for interrupt in interruptions(3, finalizers=True):
        files.drop((0,))
        owner, arrays = Owner(), files.outputs(16)
        keep, alive = (owner, arrays), weakref.ref(owner)
        with interrupt:
            if what == "copy":
                engine.copy_rows(table, ids, columns_of(arrays), keep)
            elif what == "read":
                engine.read_rows(table, ids, columns_of(arrays), keep)
            else:
                fetch_rows(table, 0, 16, columns_of(arrays), keep)
        del owner, keep
        before = arrays[0].copy()
        time.sleep(0.002)
        assert np.array_equal(arrays[0], before) or alive() is not None, interrupt.where
        lost += alive() is not None
        checked(files, ids, table, reads=what != "copy")
        assert alive() is None, interrupt.where
    assert lost, "it came as a finalizer began"


def test_a_copy_ends_by_others():
    files, out, copy = chunks_of(64)
    wait_until(copy.has_ended, "the threads to copy it all")
    assert np.array_equal(out, files.fixed[0][0])
    assert copy.refused == -1


@READS
def test_a_job_keeps_what_it_touches_until_it_has_ended(no_threads, reads):
    files, out, job = chunks_of(8, reads=reads)
    kept = weakref.ref(files)
    del files
    assert kept() is not None
    del job
    assert kept() is None
    assert not out.any(), "it was cancelled"


class Replaced:
    """A library with another function of some name."""

    def __init__(self, library: Any, **functions: Any) -> None:
        self._library = library
        self.__dict__ |= functions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


def pressed(*_: Any) -> int:
    raise KeyboardInterrupt


@READS
def test_ctrl_c_in_the_middle_of_a_wait_cancels(no_threads, monkeypatch, reads):
    _, out, job = chunks_of(2 * HELPED_CHUNKS, reads=reads)
    monkeypatch.setattr(engine, "library", Replaced(engine.library, engine_take=pressed))
    with pytest.raises(KeyboardInterrupt):
        ended(job)
    before = out.copy()
    assert job.take(1)
    assert np.array_equal(out, before)


def test_several_jobs_are_on_their_way_at_a_time_and_end_in_any_order():
    files, rng = Files([50] * 20, [4096, 3]), np.random.default_rng(0)
    rows, jobs = files.table(unmapped=range(0, 20, 3)), []
    for number, count in enumerate(rng.integers(1, 300, 40).tolist()):
        ids = rng.integers(0, 1000, count)
        arrays = files.outputs(count)
        jobs.append(((begun_read if number % 2 else begun)(rows, ids, arrays), ids, arrays))
    for number in rng.permutation(len(jobs)).tolist():
        job, ids, arrays = jobs[number]
        if number % 5 == 0:
            assert job.cancel()
            continue
        ended(job)
        assert all(np.array_equal(array, files.column(n, ids)) for n, array in enumerate(arrays))


@READS
def test_found_values_that_were_taken_twice_are_what_they_were(reads):
    files = Files([300], [])
    found = ended(find_values(files.table(), np.arange(300), 0, 1, on_disk=reads))
    before = found.offsets.copy()
    assert found.take(0)
    assert found.has_ended()
    ended(found)
    assert np.array_equal(found.offsets, before)


@READS
def test_values_that_were_found_twice_after_ctrl_c_are_what_they_were(no_threads, monkeypatch, reads):
    """It comes between the end of the job and the note of it."""
    files, real = Files([20_000], []), engine.library
    found = find_values(files.table(), np.arange(20_000), 0, 1, on_disk=reads)

    def engine_take(*arguments: Any) -> int:
        real.engine_take(*arguments)
        raise KeyboardInterrupt

    limit(monkeypatch, held_gil_chunks=0)  # else it is done before it lets go of the GIL
    monkeypatch.setattr(engine, "library", Replaced(real, engine_take=engine_take))
    with pytest.raises(KeyboardInterrupt):
        found.take(1)
    monkeypatch.undo()
    ended(found)
    assert np.diff(found.offsets).tolist() == list(map(len, files.values))


def test_many_threads_copy_and_read_at_the_same_time():
    files = [Files([50] * 20, [4096, 3]) for _ in range(2)]
    rng = np.random.default_rng(0)

    def bring(count: int) -> None:
        checked(files[count % 2], rng.integers(0, 1000, count), reads=bool(count // 2 % 2))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(bring, rng.integers(1, 600, 200).tolist()))


def big() -> tuple[Files, Array]:
    return Files([64] * 8, [64 << 10]), np.arange(512)


def native_threads() -> int:
    return len(os.listdir("/proc/self/task")) - threading.active_count()


@pytest.mark.slow
@READS
def test_a_fork_in_the_middle_leaves_parent_and_child_working(reads):
    files, ids = big()
    checked(files, ids, reads=reads)
    stop = threading.Event()

    def keep_on() -> None:
        while not stop.is_set():
            files.drop((0, 1))
            checked(files, ids, reads=reads)

    other = threading.Thread(target=keep_on)
    other.start()
    try:
        for _ in range(20):
            with in_child(lambda: checked(files, ids, reads=reads)):
                pass
    finally:
        stop.set()
        other.join()
    checked(files, ids, reads=reads)


@READS
def test_a_job_that_a_forked_child_inherits_raises_there(reads):
    files = Files([64] * 8, [64 << 10])
    for count in (SMALL, 512):
        arrays, ids = files.outputs(count), np.arange(count)
        with threads(0):  # so that it has not ended before the fork
            job = (begun_read if reads else begun)(files.table(), ids, arrays)
            found = find_values(files.table(), ids, 1, 1)
            ended(found)

            def body(job: Any = job, found: engine.Found = found, ids: Any = ids) -> None:
                assert found.take(0), "what has ended has ended"
                with pytest.raises(RuntimeError, match="ask again"):
                    job.take(1)
                assert job.cancel()
                assert job.take(0)
                checked(files, ids, reads=reads)

            with in_child(body):
                pass
            ended(job)
        assert np.array_equal(arrays[0], files.column(0, ids)), "the parent went on"


def test_a_child_that_a_signal_handler_forks_in_the_middle_of_a_copy_raises(monkeypatch):
    files, ids = big()
    real, children = engine.library, []

    def engine_take(*arguments: Any) -> int:
        if not children:  # as a signal handler would
            children.append(os.fork())
            return 1
        return int(real.engine_take(*arguments))

    monkeypatch.setattr(engine, "library", Replaced(real, engine_take=engine_take))
    monkeypatch.setattr(engine, "quick", Replaced(engine.quick, engine_help=lambda *_: 1))  # never all of it
    status = 1
    try:
        arrays = files.outputs(len(ids))
        ended(begun(files.table(), ids, arrays))
    except RuntimeError as error:
        status = 0 if "ask again" in str(error) else 2
    if children and not children[0]:
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    assert status == 1, "the parent went on"
    assert np.array_equal(arrays[0], files.column(0, ids))


def test_threads_end_before_a_fork_and_start_again():
    files, ids = big()
    checked(files, ids)
    assert native_threads() >= 1
    before = native_threads()
    assert of_process.stop()
    wait_until(lambda: native_threads() < before, "the kernel to have forgotten them")
    checked(files, ids)
    assert 1 <= native_threads() <= before  # another test's thread may have ended meanwhile


def test_what_is_small_needs_no_threads():
    files = Files([50], [100])
    assert of_process.stop()
    checked(files, np.arange(SMALL))
    assert not of_process.are_started


@READS
def test_without_threads_the_caller_does_all_by_itself(no_threads, reads):
    files, ids = big()
    before = native_threads()
    checked(files, ids, reads=reads)
    assert native_threads() <= before  # another test's thread may have ended meanwhile


@pytest.mark.parametrize(
    ("processors", "ranks", "threads"), [(1, 1, 1), (2, 1, 1), (8, 1, 2), (64, 1, 4), (64, 8, 2), (2, 8, 1)]
)
def test_threads_are_few_and_shared_among_ranks(monkeypatch, processors, ranks, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert thread_count() == threads


@pytest.mark.parametrize("reads", [False, True], ids=["copies", "reads"])
def test_a_second_ctrl_c_does_not_leave_a_job_behind(monkeypatch, reads, no_threads):
    """Else what is unmapped then would still be read."""
    files, ids = big()
    real, cancelled = engine.library, []

    def engine_cancel(*arguments: Any) -> int:
        cancelled.append(arguments)
        if len(cancelled) == 1:
            raise KeyboardInterrupt
        assert not real.engine_cancel(*arguments)
        assert not real.engine_help(*arguments[:2], 0)
        return 0

    changed = Replaced(real, engine_take=pressed, engine_cancel=engine_cancel)
    monkeypatch.setattr(engine, "library", changed)
    with pytest.raises(KeyboardInterrupt):
        ended((begun_read if reads else begun)(files.table(), ids, files.outputs(len(ids))))
    assert len(cancelled) == 2


def test_ctrl_c_between_its_two_jobs_does_not_keep_a_read_from_its_end(no_threads):
    files, ids = big()
    files.drop(range(8))
    job = begun_read(files.table(), ids, files.outputs(len(ids)))
    assert Job.take(job, 60)
    job.advance()
    with Interruption(2, finalizers=True) as interruption:  # Read.cancel, Job.cancel, what that calls
        job.cancel()
    assert interruption.where
    assert job.has_ended()


# What the kernel holds.


@pytest.fixture
def pages():
    """Pages that come when they are let go."""
    require_slow_pages()
    made = SlowPages(are_held=True)
    yield made
    made.let_go()


def slow(pages: SlowPages, nbytes: int) -> Array:
    """Memory of such pages."""
    memory = mmap.mmap(-1, nbytes)
    array = np.frombuffer(memory, np.uint8)
    pages.replace(array.ctypes.data, nbytes)
    return array


def held_copy(pages: SlowPages, files: Files | None = None) -> Job:
    """A thread copies to memory whose pages don't come."""
    files = files or Files([1], [CHUNK_BYTES])
    copy = begun(files.table(), np.zeros(1, np.int64), [slow(pages, CHUNK_BYTES)[None]])
    assert pages.touched.wait(60)
    return copy


def held_read(pages: SlowPages, files: Files | None = None) -> engine.Read:
    """One reads to such memory."""
    files = files or Files([1], [CHUNK_BYTES])
    files.drop((0,))
    read = begun_read(files.table(), np.zeros(1, np.int64), [slow(pages, CHUNK_BYTES)[None]])
    while not pages.touched.is_set():
        read.take(0)
    return read


@pytest.mark.parametrize("held", [held_copy, held_read])
def test_what_the_kernel_holds_is_left_behind_with_all_that_it_touches(held, pages, monkeypatch):
    limit(monkeypatch, stuck_seconds=0.01)
    files = Files([1], [CHUNK_BYTES])
    with threads(1):
        job = held(pages, files)
        with pytest.warns(ResourceWarning, match="is left behind"):
            assert not job.cancel()
        assert not job.cancel(), "it was left behind before"
        assert not job.take(0)
        kept = weakref.ref(files)
        del job, files
        assert kept() is not None
        pages.let_go()
    del pages
    assert kept() is not None, "for ever"


def press_in_a_cancel(number: int, released: list[str]) -> None:
    """Ctrl-C for the main thread, once it sleeps in `engine_cancel`."""
    wait_until_it_waits(number, released, "engine_cancel")
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.mark.no_cover
@pytest.mark.parametrize("held", [held_copy, held_read])
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "is left behind"])
def test_ctrl_c_while_a_job_is_waited_for_comes_once_that_is_over(held, ends, pages, monkeypatch, released):
    """It was lost: whoever pressed it waited, and went on as if nothing had been."""
    limit(monkeypatch, stuck_seconds=60.0 if ends else 0.5)
    with threads(1), ThreadPoolExecutor(1) as pool:
        job = held(pages)
        released.clear()
        pressed = pool.submit(press_in_a_cancel, threading.get_native_id(), released)
        if ends:
            pressed.add_done_callback(lambda _: pages.let_go())
        with pytest.raises(KeyboardInterrupt) as caught, warnings.catch_warnings(record=True):
            job.cancel()
        pressed.result(60)
        assert job.cancel() == job.has_ended() == ends, "it is over"
        frames = weakref.ref(job)
        del caught
        pages.let_go()
        if ends:
            del job
            assert frames() is None, "nothing of the interrupt keeps it"


@pytest.mark.no_cover
def test_ctrl_c_while_a_job_that_is_dropped_is_waited_for_is_lost(pages, monkeypatch, released):
    """A finalizer has nobody to tell of it."""
    with threads(1), ThreadPoolExecutor(1) as pool:
        job = held_copy(pages)
        released.clear()
        pressed = pool.submit(press_in_a_cancel, threading.get_native_id(), released)
        pressed.add_done_callback(lambda _: pages.let_go())
        del job
        pressed.result(60)


@pytest.mark.parametrize("warns", [True, False], ids=["warns", "warnings are errors"])
def test_what_was_left_behind_may_end(pages, monkeypatch, warns):
    limit(monkeypatch, stuck_seconds=0.01)
    with threads(1):
        job = held_copy(pages)
        with pytest.warns(ResourceWarning) if warns else nullcontext():
            assert not job.cancel()
        pages.let_go()
        wait_until(job.has_ended, "the kernel to let go of it")
        assert job.cancel()


def wait_until_it_waits(number: int, released: list[str], function: str = "engine_take") -> None:
    """Until a thread sleeps in the engine."""
    task = Path(f"/proc/self/task/{number}/stat")
    wait_until(lambda: function in released, "it to wait")
    wait_until(lambda: task.read_text().rpartition(")")[2].split()[0] == "S", "it to sleep")


@pytest.mark.no_cover
def test_ctrl_c_ends_a_wait_for_a_read_at_once(pages, released):
    main, number = threading.get_ident(), threading.get_native_id()

    def press() -> None:
        wait_until_it_waits(number, released)
        signal.pthread_kill(main, signal.SIGINT)

    with threads(1), ThreadPoolExecutor(1) as pool:
        job = held_read(pages)
        released.clear()
        pool.submit(press)
        with pytest.raises(KeyboardInterrupt):
            job.take(100_000)
        pages.let_go()
        assert job.cancel()


def test_a_waiter_reads_by_itself_once_there_are_no_threads_any_more(pages, monkeypatch, released):
    """A fork stops them in the middle of its wait."""
    files, ids = Files([1], [100]), np.zeros(1, np.int64)
    with threads(1):
        limit(monkeypatch, stuck_seconds=0.01)
        held = held_copy(pages)
        read = begun_read(files.table(), ids, arrays := files.outputs(1))
        with ThreadPoolExecutor(1) as pool:
            number = pool.submit(threading.get_native_id).result()
            released.clear()
            taken = pool.submit(read.take, 100_000)
            wait_until_it_waits(number, released)
            assert not of_process.stop(), "one thread is held"
            assert taken.result(60)
        assert np.array_equal(arrays[0], files.column(0, ids))
        pages.let_go()
        ended(held)


def test_what_the_disk_is_asked_for_comes_before_what_is_copied(pages):
    """So that it works while the rest is copied."""
    files, ids, later = Files([50], [5000]), np.arange(50), SlowPages(are_held=True)
    table = files.table()
    with threads(1):
        held = held_copy(pages)
        big = Files([1], [CHUNK_BYTES])
        copy = begun(big.table(), np.zeros(1, np.int64), [slow(later, CHUNK_BYTES)[None]])
        read = begun_read(table, ids, arrays := files.outputs(50))
        asking = [
            read,
            find_values(table, ids, 1, 1, on_disk=True),
            fetch_rows(table, 0, 50, columns_of(arrays)),
        ]
        pages.let_go()
        assert later.touched.wait(60)
        assert all(map(Job.has_ended, asking))
        later.let_go()
        wait_until(copy.has_ended, "the copy")
        wait_until(held.has_ended, "the first one")
        ended(read)


# The library.


def loaded_from(folder: Path, version: int) -> None:
    text = Path(library.__file__).read_text()
    source = text.replace(f"VERSION = {library.VERSION}", f"VERSION = {version}")
    (folder / "library.py").write_text(source)
    runpy.run_path(os.fspath(folder / "library.py"))


def test_a_library_of_another_version_is_refused(tmp_path):
    shutil.copy(library.PATH, tmp_path)
    loaded_from(tmp_path, library.VERSION)
    with pytest.raises(ImportError, match=f"is of version {library.VERSION}, and 0 is needed: install"):
        loaded_from(tmp_path, 0)


def test_a_missing_library_says_how_to_get_it(tmp_path):
    with pytest.raises(ImportError, match=r"engine cannot be loaded .*: install arrowcache with pip"):
        loaded_from(tmp_path, library.VERSION)


def test_a_library_without_a_function_is_refused():
    with pytest.raises(ImportError, match="has no engine_of_another_time: install arrowcache again"):
        library.declare("engine_of_another_time", None)
