"""The engine against a plain reader: every row of any width, or the index of one that is refused."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from helpers import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from page_cache import drop_from_memory, resident_bytes

from arrowcache.native import engine
from arrowcache.native.engine import Column, Rows, ask_for_rows, copy_rows, copy_values, find_values
from arrowcache.storage.mapping import FileMapping


class Files:
    """Segments in memory: fixed columns of some widths, then a variable one; each anywhere in its file."""

    def __init__(self, rows: list[int], widths: list[int], element_bytes: int = 1, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.widths, self.element_bytes = widths, element_bytes
        self.fixed: list[list[np.ndarray[Any, Any]]] = [[] for _ in widths]
        self.values: list[bytes] = []
        self.files, self.layouts = [], []
        for count in rows:
            self._add(count)
        self.starts = np.concatenate(([0], np.cumsum(rows))).astype(np.int64)
        self.bases = np.array([file.ctypes.data for file in self.files], np.int64)

    def _add(self, rows: int) -> None:
        parts, layout, position = [], [], 0
        for number, width in enumerate(self.widths):
            column = self.rng.integers(0, 256, (rows, width), np.uint8)
            self.fixed[number].append(column)
            position = self._place(parts, layout, position, column.tobytes())
        lengths = self.rng.integers(0, 40, rows)
        ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        data = self.rng.bytes(int(ends[-1]) * self.element_bytes)
        width = self.element_bytes
        self.values += [data[a * width : b * width] for a, b in itertools.pairwise(ends)]
        position = self._place(parts, layout, position, ends.tobytes())
        self._place(parts, layout, position, data)
        self.files.append(np.frombuffer(b"".join(parts), np.uint8).copy())
        self.layouts.append(np.array(layout, np.int64))

    def _place(self, parts: list[bytes], layout: list[int], position: int, data: bytes) -> int:
        gap = int(self.rng.integers(0, 9))
        parts += [bytes(gap), data]
        layout.append(position + gap)
        return position + gap + len(data)

    def table(self, *, first: int = 0, without: tuple[int, ...] = ()) -> Rows:
        bases = self.bases.copy()
        bases[list(without)] = 0
        nbytes = np.array([len(file) for file in self.files], np.int64)
        layouts = np.array([layout.ctypes.data for layout in self.layouts], np.int64)
        return Rows(bases, nbytes, layouts, self.starts, first=first, keep=self)

    def column(self, number: int, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.concatenate(self.fixed[number])[ids]

    def outputs(self, count: int) -> list[Column]:
        return [Column(n, width, np.zeros((count, width), np.uint8)) for n, width in enumerate(self.widths)]


def checked(files: Files, ids: np.ndarray[Any, Any], *, is_warm: bool) -> None:
    """Copy all columns of these rows, and compare them."""
    rows, columns = files.table(), files.outputs(len(ids))
    ask_for_rows(rows, ids, columns)
    assert copy_rows(rows, ids, columns, is_warm=is_warm) == -1
    for number, column in enumerate(columns):
        assert np.array_equal(column.out, files.column(number, ids))
    found = find_values(rows, ids, len(files.widths), files.element_bytes, is_warm=is_warm)
    assert not isinstance(found, int)
    assert found.damaged == -1
    wanted = [files.values[row] for row in ids.tolist()]
    assert np.diff(found.offsets).tolist() == [len(value) for value in wanted]
    out = np.zeros(int(found.offsets[-1]), np.uint8)
    copy_values(found, out, is_warm=is_warm)
    assert out.tobytes() == b"".join(wanted)


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
WIDTHS = st.lists(st.sampled_from([1, 2, 3, 4, 8, 16, 63, 64, 65, 700, 5000]), min_size=1, max_size=5)


@given(LENGTHS, WIDTHS, st.sampled_from([1, 2, 4, 8, 12]), st.integers(0, 2**32), st.booleans(), st.data())
@settings(max_examples=150)
def test_any_rows_of_any_segments_are_copied(lengths, widths, element_bytes, seed, is_warm, data):
    files = Files(lengths, widths, element_bytes, seed)
    ids = data.draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=200))
    checked(files, np.array(ids, np.int64), is_warm=is_warm)


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize(
    ("lengths", "widths", "count"),
    [
        ([64] * 40 + [10], [3, 1000], 4000),
        ([1, 2, 3, 5000, 1, 1], [17], 20_000),
        ([3], [(256 << 10) + 1, 5, (600 << 10)], 9),
        ([5] * 4, [1], 300_000),
        ([4] * 30, [4] * 300, 500),
    ],
    ids=["alike", "uneven", "larger than a chunk", "tiny", "300 columns"],
)
def test_large_jobs_are_copied_by_all_threads_together(lengths, widths, count, is_warm):
    files = Files(lengths, widths)
    checked(files, np.random.default_rng(1).integers(0, sum(lengths), count), is_warm=is_warm)


@pytest.mark.parametrize("count", [3, 50_000])
@pytest.mark.parametrize("wrong", [-1, 96, 2**62, -(2**63)])
@pytest.mark.parametrize("lengths", [[32] * 3, [1, 90, 5]])
def test_a_number_out_of_range_is_named_and_nothing_is_copied(lengths, wrong, count):
    files = Files(lengths, [8])
    ids = np.zeros(count, np.int64)
    ids[count - 2] = wrong
    columns = files.outputs(count)
    rows = files.table()
    ask_for_rows(rows, ids, columns)
    for is_warm in (False, True):
        assert copy_rows(rows, ids, columns, is_warm=is_warm) == count - 2
        assert find_values(rows, ids, 1, 1, is_warm=is_warm) == count - 2
    assert rows.segments_of(ids) == count - 2
    assert not columns[0].out.any()


def test_a_row_of_a_segment_that_is_not_mapped_is_refused():
    files = Files([10, 10, 10], [8])
    rows = files.table(without=(1,))
    assert copy_rows(rows, np.array([0, 29, 15]), files.outputs(3), is_warm=True) == 2
    assert copy_rows(rows, np.array([0, 29, 9]), files.outputs(3), is_warm=True) == -1
    ask_for_rows(rows, np.array([15]), files.outputs(1))


def test_rows_that_were_released_are_refused():
    files = Files([10, 10, 10], [8])
    rows = files.table(first=10)
    assert copy_rows(rows, np.array([10, 9]), files.outputs(2), is_warm=True) == 1
    rows.release(20)
    assert copy_rows(rows, np.array([20, 19]), files.outputs(2), is_warm=True) == 1
    assert copy_rows(rows, np.array([20, 29]), files.outputs(2), is_warm=True) == -1


def test_no_rows_are_copied_from_no_segments():
    nothing = np.zeros(0, np.int64)
    rows = Rows(nothing, nothing, nothing, np.zeros(1, np.int64))
    out = np.zeros((1, 8), np.uint8)
    assert copy_rows(rows, nothing, [Column(0, 8, out[:0])], is_warm=False) == -1
    assert copy_rows(rows, np.array([0]), [Column(0, 8, out)], is_warm=False) == 0
    assert rows.segments_of(np.array([0])) == 0


@pytest.mark.parametrize("lengths", [[7] * 5 + [2], [1, 900, 3, 3, 50], [1] * 1000 + [100_000]])
def test_the_segment_of_each_row_is_known(lengths):
    starts = np.concatenate(([0], np.cumsum(lengths)))
    some = np.ones(len(lengths), np.int64)
    rows = Rows(some, some, some, starts)
    ids = np.arange(starts[-1])
    assert np.array_equal(rows.segments_of(ids), np.repeat(np.arange(len(lengths)), lengths))


def test_rows_are_asked_of_the_disk_all_at_once(tmp_path):
    path, count, width = tmp_path / "file", 1500, 5000
    path.write_bytes(bytes(2 * count * width))
    drop_from_memory(path)
    file, layout = FileMapping(path, sparse=True), np.zeros(1, np.int64)
    some = (np.array([value]) for value in (file.address, file.nbytes, layout.ctypes.data))
    rows = Rows(*some, np.array([0, 2 * count]), keep=layout)
    before = resident_bytes(path)
    ask_for_rows(rows, np.arange(0, 2 * count, 2), [Column(0, width, np.zeros((count, width), np.uint8))])
    wait_until(lambda: resident_bytes(path) >= count * width, "them to be read")
    assert before < count * width


@pytest.mark.parametrize(
    "ends", [(5, 3), (-1, 4), (0, 10_000)], ids=["falling", "negative", "beyond the file"]
)
def test_offsets_that_leave_their_file_are_found(ends):
    files = Files([4, 4], [1])
    place = files.layouts[1][1] + 2 * 4
    files.files[1][place : place + 8].view(np.int32)[:] = ends
    found = find_values(files.table(), np.array([0, 6, 1]), 1, 1, is_warm=False)
    assert not isinstance(found, int)
    assert found.damaged == 1


def test_many_threads_copy_at_the_same_time():
    files = Files([50] * 20, [4096, 3])
    rng = np.random.default_rng(0)

    def copy(count: int) -> None:
        checked(files, rng.integers(0, 1000, count), is_warm=bool(count % 2))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(copy, rng.integers(1, 600, 200).tolist()))


def big() -> tuple[Files, np.ndarray[Any, Any]]:
    return Files([64] * 8, [64 << 10]), np.arange(512)


def native_threads() -> int:
    return len(os.listdir("/proc/self/task")) - threading.active_count()


@pytest.mark.slow
def test_a_fork_in_the_middle_leaves_parent_and_child_working():
    files, ids = big()
    checked(files, ids, is_warm=True)
    stop = threading.Event()

    def keep_copying() -> None:
        while not stop.is_set():
            checked(files, ids, is_warm=True)

    other = threading.Thread(target=keep_copying)
    other.start()
    try:
        for _ in range(20):
            pid = os.fork()
            if not pid:
                status = 1
                try:
                    checked(files, ids, is_warm=True)
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        stop.set()
        other.join()
    checked(files, ids, is_warm=True)


def test_a_copy_that_a_forked_child_inherits_raises_there(monkeypatch):
    files, ids = big()
    take, children = engine._library.engine_take, []

    class Library:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def engine_take(self, *arguments: Any) -> int:
            if not children:  # as a signal handler would
                children.append(os.fork())
                return 1
            return take(*arguments)

    real = engine._library
    monkeypatch.setattr(engine, "_library", Library())
    status = 1
    try:
        checked(files, ids, is_warm=True)
    except RuntimeError as error:
        status = 0 if "ask again" in str(error) else 2
    if children and not children[0]:
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    assert status == 1, "the parent went on"


def test_threads_end_before_a_fork_and_start_again():
    files, ids = big()
    checked(files, ids, is_warm=True)
    assert native_threads() >= 1
    before = native_threads()
    assert engine._engine.stop()
    wait_until(lambda: native_threads() < before, "the kernel to have forgotten them")
    checked(files, ids, is_warm=True)
    assert native_threads() == before


def test_without_threads_the_caller_copies_by_itself():
    files, ids = big()
    assert engine._engine.stop()
    most, before = engine._engine.most_threads, native_threads()
    engine.limit_threads(0)
    try:
        checked(files, ids, is_warm=True)
        assert native_threads() == before
    finally:
        engine.limit_threads(most)
        assert engine._engine.stop()


@pytest.mark.parametrize(
    ("processors", "ranks", "threads"), [(1, 1, 1), (2, 1, 1), (8, 1, 2), (64, 1, 4), (64, 8, 2), (2, 8, 1)]
)
def test_threads_are_few_and_shared_among_ranks(monkeypatch, processors, ranks, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert engine._thread_count() == threads


def run(script: str) -> str:
    beginning = f"import sys; sys.path[:0] = {sys.path!r}\n"
    command = [sys.executable, "-c", beginning + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


BIG = """
import os, signal, sys, threading, time
import numpy as np
from arrowcache.native.engine import Column, Rows, copy_rows
files = [np.ones(64 << 20, np.uint8) for _ in range(4)]
layout = np.zeros(1, np.int64)
rows = Rows(np.array([f.ctypes.data for f in files]), np.full(4, 64 << 20), np.full(4, layout.ctypes.data),
            np.arange(5) * 1024)
ids = np.random.default_rng(0).integers(0, 4096, 4096)
out = np.zeros((4096, 64 << 10), np.uint8)
def copy():
    assert copy_rows(rows, ids, [Column(0, 64 << 10, out)], is_warm=False) == -1
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_long_copy_within_milliseconds_and_the_next_one_is_whole():
    script = (
        BIG
        + """
copy()  # its memory is there
main = threading.get_ident()
for delay in (0.001, 0.005, 0.01, 0.02) * 5:
    out[:] = 0
    pressed = []
    def press():
        time.sleep(delay)
        pressed.append(time.perf_counter())
        signal.pthread_kill(main, signal.SIGINT)
    thread = threading.Thread(target=press)
    try:
        thread.start()
        while True:
            copy()
    except KeyboardInterrupt:
        print(time.perf_counter() - pressed[0])
    thread.join()
    copy()
    assert (out == 1).all()
"""
    )
    waits = list(map(float, run(script).split()))
    assert len(waits) == 20


def test_a_second_ctrl_c_does_not_leave_a_copy_behind(monkeypatch):
    """Else what is unmapped then would still be read."""
    files, ids = big()
    real, cancelled = engine._library, []

    class Library:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def engine_take(self, *arguments: Any) -> int:
            raise KeyboardInterrupt

        def engine_cancel(self, handle: int, address: int) -> None:
            cancelled.append(address)
            if len(cancelled) == 1:
                raise KeyboardInterrupt
            real.engine_cancel(handle, address)
            assert engine._Job.from_address(address).left == 0

    monkeypatch.setattr(engine, "_library", Library())
    with pytest.raises(KeyboardInterrupt):
        copy_rows(files.table(), ids, files.outputs(len(ids)), is_warm=True)
    assert len(cancelled) == 2


@pytest.mark.slow
def test_the_interpreter_ends_in_the_middle_of_copies():
    script = (
        BIG
        + """
for _ in range(3):
    threading.Thread(target=lambda: [copy() for _ in range(1000)], daemon=True).start()
time.sleep(0.02)
"""
    )
    for _ in range(10):
        run(script)


@pytest.mark.slow
def test_where_the_system_refuses_threads_the_caller_copies_by_itself():
    if os.geteuid():
        pytest.skip("only root can become somebody who may have no more threads")
    script = (
        BIG
        + """
import resource
os.setgid(65534); os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
before = len(os.listdir("/proc/self/task"))
copy()
assert (out == 1).all()
assert len(os.listdir("/proc/self/task")) == before
"""
    )
    run(script)


def test_a_library_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(engine, "VERSION", 0)
    with pytest.raises(ImportError, match="is of version 2, and 0 is needed: install arrowcache again"):
        engine._load(engine.LIBRARY, engine.ctypes.CDLL)


def test_a_missing_library_says_how_to_get_it(tmp_path):
    with pytest.raises(ImportError, match=r"engine cannot be loaded .*: install arrowcache with pip"):
        engine._load(tmp_path / "libengine.so", engine.ctypes.CDLL)
