"""The engine against a plain reader: every row of any width, or the index of one that is refused."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import in_child, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from page_cache import drop_from_memory, resident_bytes

from arrowcache.native import engine
from arrowcache.native.engine import Column, Copy, ask_for_rows, copy_rows, copy_values, find_values
from arrowcache.native.rows import Rows
from arrowcache.storage.mapping import FileMapping

SMALL = 4  # rows: their copy is late where they are in memory
CHUNK_BYTES, HELPED_CHUNKS = 256 << 10, engine._HELD_GIL_CHUNKS
BEGUN_CHUNKS = 12  # of `engine_job`


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

    def table(
        self,
        *,
        first: int = 0,
        without: tuple[int, ...] = (),
        warm: bool | Sequence[bool | None] = False,
    ) -> Rows:
        """Args: warm: whether each segment is in memory, or all are; None: that is not known."""
        each = [warm] * len(self.files) if isinstance(warm, bool) else list(warm)
        self.warm = np.array([bool(is_warm) for is_warm in each], np.bool_)
        rows = Rows(self.starts)
        for index, (file, layout, is_warm) in enumerate(zip(self.files, self.layouts, each, strict=True)):
            known = self.warm.ctypes.data + index if is_warm is not None else 0
            base = 0 if index in without else file.ctypes.data
            rows.put(index, base, len(file), layout.ctypes.data, 0, 0, 0, known)
        rows.release(first)
        return kept(rows, self, self.warm)

    def column(self, number: int, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.concatenate(self.fixed[number])[ids]

    def outputs(self, count: int) -> list[np.ndarray[Any, Any]]:
        return [np.zeros((count, width), np.uint8) for width in self.widths]


def kept(rows: Rows, *memory: object) -> Rows:
    """As a snapshot keeps what its rows tell of."""
    rows.memory = memory  # type: ignore[attr-defined]
    return rows


def columns_of(arrays: Sequence[np.ndarray[Any, Any]]) -> list[Column]:
    return [Column(number, array.shape[1], array.ctypes.data) for number, array in enumerate(arrays)]


def begun(rows: Rows, ids: np.ndarray[Any, Any], arrays: Sequence[np.ndarray[Any, Any]]) -> Copy:
    return copy_rows(rows, ids, columns_of(arrays), arrays)


def checked(files: Files, ids: np.ndarray[Any, Any], *, warm: bool | Sequence[bool | None]) -> None:
    """Copy all columns of these rows, and compare them."""
    rows, arrays = files.table(warm=warm), files.outputs(len(ids))
    ask_for_rows(rows, ids, columns_of(arrays))
    copy, found = begun(rows, ids, arrays), find_values(rows, ids, len(files.widths), files.element_bytes)
    each = [warm] * len(files.files) if isinstance(warm, bool) else warm
    segments = np.searchsorted(files.starts, ids, side="right") - 1
    assert copy.is_warm == found.is_warm == all(each[segment] for segment in segments.tolist())
    assert copy.wait().refused == -1
    for number, array in enumerate(arrays):
        assert np.array_equal(array, files.column(number, ids))
    assert found.wait().refused == -1
    assert found.damaged == -1
    wanted = [files.values[row] for row in ids.tolist()]
    assert np.diff(found.offsets).tolist() == [len(value) for value in wanted]
    out = np.zeros(int(found.offsets[-1]), np.uint8)
    values = copy_values(found, out)
    assert values.is_warm == found.is_warm
    assert values.wait().refused == -1
    assert out.tobytes() == b"".join(wanted)
    for each_copy in (copy, found, values):
        assert each_copy.take(0)
        assert each_copy.has_ended()
        each_copy.cancel()
        assert not each_copy.was_on_disk


@pytest.fixture
def no_threads():
    """Nothing is copied but by who takes it."""
    most = engine._engine.most_threads
    assert engine._engine.stop()
    engine.limit_threads(0)
    yield
    engine.limit_threads(most)
    assert engine._engine.stop()


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
WIDTHS = st.lists(st.sampled_from([1, 2, 3, 4, 8, 16, 63, 64, 65, 700, 5000]), min_size=1, max_size=5)


@given(LENGTHS, WIDTHS, st.sampled_from([1, 2, 4, 8, 12]), st.integers(0, 2**32), st.data())
@settings(max_examples=150)
def test_any_rows_of_any_segments_are_copied(lengths, widths, element_bytes, seed, data):
    files = Files(lengths, widths, element_bytes, seed)
    ids = data.draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=200))
    known = st.lists(st.sampled_from([None, False, True]), min_size=len(lengths), max_size=len(lengths))
    warm = data.draw(st.one_of(st.just([True] * len(lengths)), known))
    checked(files, np.array(ids, np.int64), warm=warm)


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
    checked(files, np.random.default_rng(1).integers(0, sum(lengths), count), warm=is_warm)


@pytest.mark.parametrize("count", [3, 50_000])
@pytest.mark.parametrize("wrong", [-1, 96, 2**62, -(2**63)])
@pytest.mark.parametrize("lengths", [[32] * 3, [1, 90, 5]])
def test_a_number_out_of_range_is_named_at_once_and_nothing_is_copied(lengths, wrong, count):
    files = Files(lengths, [8])
    ids = np.zeros(count, np.int64)
    ids[count - 2] = wrong
    arrays = files.outputs(count)
    for is_warm in (False, True):
        rows = files.table(warm=is_warm)
        ask_for_rows(rows, ids, columns_of(arrays))
        for copy in (begun(rows, ids, arrays), find_values(rows, ids, 1, 1)):
            assert copy.refused == count - 2
            assert not copy.is_warm
            assert copy.has_ended()
            assert copy.take(0)
            assert copy.wait() is copy
            assert copy.refused == count - 2
        assert rows.segments_of(ids) == count - 2
    assert not arrays[0].any()


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_row_of_a_segment_that_is_not_mapped_is_refused(is_warm):
    files = Files([10, 10, 10], [8])
    rows = files.table(without=(1,), warm=is_warm)
    arrays = files.outputs(3)
    copy = begun(rows, np.array([0, 29, 15]), arrays)
    assert copy.refused == (-1 if is_warm else 2), "what is small and in memory is checked when it is taken"
    assert copy.wait().refused == 2
    assert find_values(rows, np.array([0, 29, 15]), 1, 1).wait().refused == 2
    assert not arrays[0].any()
    assert begun(rows, np.array([0, 29, 9]), arrays).wait().refused == -1
    ask_for_rows(rows, np.array([15]), columns_of(files.outputs(1)))


@pytest.mark.parametrize("is_warm", [False, True])
def test_rows_that_were_released_are_refused(is_warm):
    files = Files([10, 10, 10], [8])
    rows = files.table(first=10, warm=is_warm)
    assert begun(rows, np.array([10, 9]), files.outputs(2)).wait().refused == 1
    rows.release(20)
    assert begun(rows, np.array([20, 19]), files.outputs(2)).wait().refused == 1
    assert begun(rows, np.array([20, 29]), files.outputs(2)).wait().refused == -1


def test_rows_that_are_released_before_their_copy_is_taken_are_refused_if_it_is_late():
    files = Files([10, 10, 10], [8])
    rows, arrays = files.table(warm=True), files.outputs(SMALL)
    copy = begun(rows, np.array([25, 12, 3, 28]), arrays)
    rows.release(10)
    assert copy.refused == -1
    assert copy.take(0)
    assert copy.refused == 2
    assert not arrays[0].any()


def test_no_rows_are_copied_from_no_segments():
    nothing = np.zeros(0, np.int64)
    rows = Rows(np.zeros(1, np.int64))
    out = np.zeros((1, 8), np.uint8)
    assert begun(rows, nothing, [out[:0]]).wait().refused == -1
    assert begun(rows, np.array([0]), [out]).refused == 0
    assert find_values(rows, nothing, 0, 1).wait().offsets.tolist() == [0]
    assert rows.segments_of(np.array([0])) == 0


@pytest.mark.parametrize("lengths", [[7] * 5 + [2], [1, 900, 3, 3, 50], [1] * 1000 + [100_000]])
def test_the_segment_of_each_row_is_known(lengths):
    starts = np.concatenate(([0], np.cumsum(lengths)))
    rows = Rows(starts)
    ids = np.arange(starts[-1])
    assert np.array_equal(rows.segments_of(ids), np.repeat(np.arange(len(lengths)), lengths))


def rows_of_a_file(path: Path, count: int, width: int) -> Rows:
    file, layout = FileMapping(path, sparse=True), np.zeros(1, np.int64)
    rows = Rows(np.array([0, count]))
    rows.put(0, file.address, file.nbytes, layout.ctypes.data, 0, 0, 0)
    return kept(rows, file, layout)


def test_rows_are_asked_of_the_disk_all_at_once(tmp_path):
    path, count, width = tmp_path / "file", 1500, 5000
    path.write_bytes(bytes(2 * count * width))
    drop_from_memory(path)
    rows = rows_of_a_file(path, 2 * count, width)
    before = resident_bytes(path)
    ask_for_rows(rows, np.arange(0, 2 * count, 2), [Column(0, width, 0)])
    wait_until(lambda: resident_bytes(path) >= count * width, "them to be read")
    assert before < count * width


def test_a_copy_knows_whether_it_waited_for_the_disk(tmp_path):
    path, count, width = tmp_path / "file", 500, 5000
    path.write_bytes(bytes(range(250)) * 20 * count)
    drop_from_memory(path)
    rows, out = rows_of_a_file(path, count, width), np.zeros((count, width), np.uint8)
    assert begun(rows, np.arange(count), [out]).wait().was_on_disk
    assert out.tobytes() == path.read_bytes()
    assert not begun(rows, np.arange(count), [out]).wait().was_on_disk, "it is in memory now"


def test_what_is_in_memory_by_nature_is_on_no_disk():
    path, count, width = Path(f"/dev/shm/arrowcache-test-{os.getpid()}"), 500, 5000
    try:
        path.write_bytes(bytes(count * width))
        rows, out = rows_of_a_file(path, count, width), np.ones((count, width), np.uint8)
        assert not begun(rows, np.arange(count), [out]).wait().was_on_disk
        assert not out.any()
    finally:
        path.unlink(missing_ok=True)


def test_values_that_are_on_the_disk_are_known(tmp_path):
    path, count, item_bytes = tmp_path / "file", 300, 5000
    ends, layout = np.arange(0, (count + 1) * item_bytes, item_bytes, dtype=np.int32), np.array([0, 4096])
    path.write_bytes(ends.tobytes().ljust(4096, b"-") + bytes(range(250)) * 20 * count)
    drop_from_memory(path)
    file = FileMapping(path, sparse=True)
    rows = Rows(np.array([0, count]))
    rows.put(0, file.address, file.nbytes, layout.ctypes.data, 0, 0, 0)
    found = find_values(kept(rows, file, layout), np.arange(count), 0, 1).wait()
    assert found.was_on_disk
    out = np.zeros(int(found.offsets[-1]), np.uint8)
    assert copy_values(found, out).wait().was_on_disk
    assert out.tobytes() == path.read_bytes()[4096:]


@pytest.mark.parametrize(
    "ends", [(5, 3), (-1, 4), (0, 10_000)], ids=["falling", "negative", "beyond the file"]
)
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("count", [3, 20_000])
def test_offsets_that_leave_their_file_are_found(ends, is_warm, count):
    files = Files([4, 4], [1])
    place = files.layouts[1][1] + 2 * 4
    files.files[1][place : place + 8].view(np.int32)[:] = ends
    ids = np.resize([0, 3, 2], count)
    ids[count // 2] = 6
    found = find_values(files.table(warm=is_warm), ids, 1, 1).wait()
    assert found.refused == -1
    assert found.damaged == count // 2
    assert (np.diff(found.offsets) >= 0).all(), "they can be allocated and copied, whatever they say"
    out = np.zeros(int(found.offsets[-1]), np.uint8)
    copy_values(found, out).wait()
    wanted = (b"" if row == 6 else files.values[row] for row in ids.tolist())
    assert out.tobytes() == b"".join(wanted)


# What is in memory, or small.


def test_what_is_small_and_in_memory_is_copied_when_it_is_taken():
    files = Files([50], [100])
    arrays, ids = files.outputs(SMALL), np.arange(SMALL)
    copy = begun(files.table(warm=True), ids, arrays)
    assert copy.is_warm
    assert not copy.has_ended()
    assert not arrays[0].any(), "nobody else copies it"
    assert copy.take(0)
    assert copy.has_ended()
    assert np.array_equal(arrays[0], files.column(0, ids))


def test_what_is_late_may_be_cancelled_or_dropped_before():
    files = Files([50], [100])
    for end in (Copy.cancel, lambda _: None):
        arrays = files.outputs(SMALL)
        copy, kept = begun(files.table(warm=True), np.arange(SMALL), arrays), weakref.ref(files)
        end(copy)
        del copy
        assert not arrays[0].any()
    del files
    assert kept() is None


def test_what_is_late_and_was_cancelled_is_not_copied_any_more():
    files = Files([50], [100])
    arrays = files.outputs(SMALL)
    copy = begun(files.table(warm=True), np.arange(SMALL), arrays)
    copy.cancel()
    assert copy.has_ended()
    assert copy.take(0)
    assert not arrays[0].any()


def test_values_that_are_late_are_found_at_once():
    files = Files([50], [])
    found = find_values(files.table(warm=True), np.arange(50), 0, 1)
    assert found.has_ended()
    assert found.offsets[-1] == sum(map(len, files.values))


def test_values_that_are_late_and_not_mapped_are_refused_at_once():
    files = Files([10, 10], [])
    found = find_values(files.table(without=(1,), warm=True), np.array([1, 11]), 0, 1)
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
    monkeypatch.setattr(engine, "_quick", Recorded(engine._quick, calls))
    return calls


@pytest.fixture
def released(monkeypatch) -> list[str]:
    """Those that did not."""
    calls: list[str] = []
    monkeypatch.setattr(engine, "_library", Recorded(engine._library, calls))
    return calls


def test_what_is_small_and_in_memory_keeps_the_gil(held, released):
    files = Files([50], [100])
    begun(files.table(warm=True), np.arange(SMALL), files.outputs(SMALL)).wait()
    assert held == ["engine_is_warm", "engine_copy"]
    assert released == []


def test_what_may_be_on_the_disk_is_not_copied_with_the_gil(no_threads, held):
    files = Files([50], [100])
    for warm in (False, [None]):
        arrays = files.outputs(SMALL)
        copy = begun(files.table(warm=warm), np.arange(SMALL), arrays)
        assert not copy.take(0)
        assert not copy.has_ended()
        assert not arrays[0].any()
        assert "engine_copy" not in held
        copy.wait()
        assert np.array_equal(arrays[0], files.column(0, np.arange(SMALL)))


def test_it_is_known_once_a_segment_is_in_memory_and_when_it_is_no_longer():
    files = Files([10, 10], [8])
    rows, arrays = files.table(warm=[False, True]), files.outputs(2)
    assert not begun(rows, np.array([3, 15]), arrays).wait().is_warm
    assert begun(rows, np.array([13, 15]), arrays).wait().is_warm
    files.warm[:] = True, False
    assert begun(rows, np.array([3, 5]), arrays).wait().is_warm
    assert not begun(rows, np.array([3, 15]), arrays).wait().is_warm


# In the middle.


def chunks_of(count: int, *, is_warm: bool) -> tuple[Files, np.ndarray[Any, Any], Copy]:
    """A copy of so many chunks, of a row each."""
    files = Files([count], [CHUNK_BYTES])
    (out,) = arrays = files.outputs(count)
    return files, out, begun(files.table(warm=is_warm), np.arange(count), arrays)


def test_who_takes_what_is_in_memory_copies_a_part_of_it_without_a_wait(no_threads):
    count = 2 * HELPED_CHUNKS + 1
    files, out, copy = chunks_of(count, is_warm=True)
    for number in (1, 2):
        assert not copy.take(0)
        assert not copy.has_ended()
        done = number * HELPED_CHUNKS
        assert np.array_equal(out[:done], files.fixed[0][0][:done])
        assert not out[done:].any()
    assert copy.take(0)
    assert copy.has_ended()
    assert np.array_equal(out, files.fixed[0][0])


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_copy_that_is_cancelled_in_the_middle_writes_no_more(no_threads, is_warm):
    count = 2 * HELPED_CHUNKS
    files, out, copy = chunks_of(count, is_warm=is_warm)
    assert not copy.take(1e-9), "as much as that needs a chunk at least"
    before = out.copy()
    assert before.any()
    assert not before.all(1).all()
    copy.cancel()
    copy.cancel()
    assert copy.has_ended()
    assert copy.take(1)
    assert np.array_equal(out, before)
    checked(files, np.arange(count), warm=is_warm)


def test_a_copy_that_is_cancelled_while_threads_are_at_it_writes_no_more():
    for _ in range(20):
        _, out, copy = chunks_of(64, is_warm=False)
        wait_until(lambda copy=copy: copy._job[BEGUN_CHUNKS], "a thread to begin it")
        copy.cancel()
        before = out.copy()
        assert copy.take(1)
        assert np.array_equal(out, before)


def test_a_copy_ends_by_others():
    files, out, copy = chunks_of(64, is_warm=False)
    wait_until(copy.has_ended, "the threads to copy it all")
    assert np.array_equal(out, files.fixed[0][0])
    assert copy.refused == -1


def test_a_copy_keeps_what_it_touches_until_it_has_ended(no_threads):
    files, out, copy = chunks_of(8, is_warm=False)
    kept = weakref.ref(files)
    del files
    assert kept() is not None
    del copy
    assert kept() is None
    assert not out.any(), "it was cancelled"


@pytest.mark.parametrize("is_warm", [False, True])
def test_ctrl_c_in_the_middle_of_a_wait_cancels(no_threads, monkeypatch, is_warm):
    _, out, copy = chunks_of(2 * HELPED_CHUNKS, is_warm=is_warm)

    class Library:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def engine_take(self, *_: Any) -> int:
            raise KeyboardInterrupt

    real = engine._library
    monkeypatch.setattr(engine, "_library", Library())
    with pytest.raises(KeyboardInterrupt):
        copy.wait()
    assert copy.has_ended()
    before = out.copy()
    assert copy.take(1)
    assert np.array_equal(out, before)


def test_several_copies_are_on_their_way_at_a_time_and_end_in_any_order():
    files, rng = Files([50] * 20, [4096, 3]), np.random.default_rng(0)
    rows, copies = files.table(), []
    for count in rng.integers(1, 300, 40).tolist():
        ids = rng.integers(0, 1000, count)
        arrays = files.outputs(count)
        copies.append((begun(rows, ids, arrays), ids, arrays))
    for number in rng.permutation(len(copies)).tolist():
        copy, ids, arrays = copies[number]
        if number % 4 == 0:
            copy.cancel()
            continue
        copy.wait()
        assert all(np.array_equal(array, files.column(n, ids)) for n, array in enumerate(arrays))


def test_found_values_that_were_taken_twice_are_what_they_were():
    files = Files([300], [])
    found = find_values(files.table(), np.arange(300), 0, 1).wait()
    before = found.offsets.copy()
    assert found.take(0)
    assert found.has_ended()
    found.wait()
    assert np.array_equal(found.offsets, before)


def test_values_that_were_found_twice_after_ctrl_c_are_what_they_were(no_threads, monkeypatch):
    """It comes between the end of the copy and the note of it."""
    files = Files([300], [])
    found = find_values(files.table(), np.arange(300), 0, 1)

    class Library:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def engine_take(self, *arguments: Any) -> int:
            real.engine_take(*arguments)
            raise KeyboardInterrupt

    real = engine._library
    monkeypatch.setattr(engine, "_library", Library())
    with pytest.raises(KeyboardInterrupt):
        found.take(1)
    monkeypatch.undo()
    found.wait()
    assert np.diff(found.offsets).tolist() == list(map(len, files.values))


def test_many_threads_copy_at_the_same_time():
    files = [Files([50] * 20, [4096, 3]) for _ in range(2)]  # that are not in memory, and that are
    rng = np.random.default_rng(0)

    def copy(count: int) -> None:
        checked(files[count % 2], rng.integers(0, 1000, count), warm=bool(count % 2))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(copy, rng.integers(1, 600, 200).tolist()))


def big() -> tuple[Files, np.ndarray[Any, Any]]:
    return Files([64] * 8, [64 << 10]), np.arange(512)


def native_threads() -> int:
    return len(os.listdir("/proc/self/task")) - threading.active_count()


@pytest.mark.slow
def test_a_fork_in_the_middle_leaves_parent_and_child_working():
    files, ids = big()
    checked(files, ids, warm=True)
    stop = threading.Event()

    def keep_copying() -> None:
        while not stop.is_set():
            checked(files, ids, warm=True)

    other = threading.Thread(target=keep_copying)
    other.start()
    try:
        for _ in range(20):
            pid = os.fork()
            if not pid:
                status = 1
                try:
                    checked(files, ids, warm=True)
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        stop.set()
        other.join()
    checked(files, ids, warm=True)


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_copy_that_a_forked_child_inherits_raises_there(is_warm):
    files = Files([64] * 8, [64 << 10])
    for count in (SMALL, 512):
        arrays, ids = files.outputs(count), np.arange(count)
        copy = begun(files.table(warm=is_warm), ids, arrays)
        found = find_values(files.table(), ids, 1, 1)
        found.wait()

        def body(copy: Copy = copy, found: engine.Found = found, ids: Any = ids) -> None:
            assert found.take(0), "what has ended has ended"
            if not copy.has_ended():
                with pytest.raises(RuntimeError, match="ask again"):
                    copy.take(1)
            copy.cancel()
            assert copy.take(0)
            checked(files, ids, warm=is_warm)

        with in_child(body):
            pass
        copy.wait()
        assert np.array_equal(arrays[0], files.column(0, ids)), "the parent went on"


def test_a_child_that_a_signal_handler_forks_in_the_middle_of_a_copy_raises(monkeypatch):
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
        arrays = files.outputs(len(ids))
        begun(files.table(), ids, arrays).wait()
    except RuntimeError as error:
        status = 0 if "ask again" in str(error) else 2
    if children and not children[0]:
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    assert status == 1, "the parent went on"
    assert np.array_equal(arrays[0], files.column(0, ids))


def test_threads_end_before_a_fork_and_start_again():
    files, ids = big()
    checked(files, ids, warm=True)
    assert native_threads() >= 1
    before = native_threads()
    assert engine._engine.stop()
    wait_until(lambda: native_threads() < before, "the kernel to have forgotten them")
    checked(files, ids, warm=True)
    assert native_threads() == before


def test_what_is_small_and_in_memory_needs_no_threads():
    files = Files([50], [100])
    assert engine._engine.stop()
    checked(files, np.arange(SMALL), warm=True)
    assert not engine._engine._has_threads


@pytest.mark.parametrize("is_warm", [False, True])
def test_without_threads_the_caller_copies_by_itself(no_threads, is_warm):
    files, ids = big()
    before = native_threads()
    checked(files, ids, warm=is_warm)
    assert native_threads() == before


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
from arrowcache.native.engine import Column, copy_rows
from arrowcache.native.rows import Rows
files = [np.ones(64 << 20, np.uint8) for _ in range(4)]
layout = np.zeros(1, np.int64)
rows = Rows(np.arange(5) * 1024)
for index, file in enumerate(files):
    rows.put(index, file.ctypes.data, 64 << 20, layout.ctypes.data, 0, 0, 0)
ids = np.random.default_rng(0).integers(0, 4096, 4096)
out = np.zeros((4096, 64 << 10), np.uint8)
def copy():
    assert copy_rows(rows, ids, [Column(0, 64 << 10, out.ctypes.data)], out).wait().refused == -1
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
            assert not real.engine_help(handle, address, 0)

    monkeypatch.setattr(engine, "_library", Library())
    with pytest.raises(KeyboardInterrupt):
        begun(files.table(), ids, files.outputs(len(ids))).wait()
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
    with pytest.raises(ImportError, match="is of version 3, and 0 is needed: install arrowcache again"):
        engine._load(engine.LIBRARY, engine.ctypes.CDLL)


def test_a_missing_library_says_how_to_get_it(tmp_path):
    with pytest.raises(ImportError, match=r"engine cannot be loaded .*: install arrowcache with pip"):
        engine._load(tmp_path / "libengine.so", engine.ctypes.CDLL)
