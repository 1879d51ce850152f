"""The engine and the disk: what is asked for, read, fetched and dropped, and files that have changed."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from helpers import in_child, open_files, wait_until
from page_cache import counts_pages, drop_from_memory, resident_bytes
from plain_rows import Array, Files, Table, begun, begun_read, checked, columns_of, ended, entry, threads

from arrowcache.native import engine
from arrowcache.native.engine import Failure, copy_values, fetch_rows, fetch_values, find_values, read_values
from arrowcache.reading.slots import address_of_map

PAGE = 4096
KIB64 = 64 << 10
MAPPED = pytest.mark.parametrize("is_mapped", [False, True], ids=["not mapped", "mapped"])


def pages_of(count: int, row_bytes: int = KIB64) -> Files:
    """One segment whose rows are whole pages."""
    return Files([count], [row_bytes], begin_at=PAGE)


def bring(path: Path, start: int, nbytes: int) -> None:
    """Have these bytes in memory, and none around them."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert len(os.pread(file.fileno(), nbytes, start)) == nbytes


def found_and_read(files: Files, ids: Array, table: Table, *, drops: bool = False) -> int:
    """Read values of some rows. Returns: how many pieces of them were missed."""
    found = ended(find_values(table, ids, len(files.widths), files.element_bytes, on_disk=True))
    out = np.zeros(int(found.offsets[-1]), np.uint8)
    read = ended(read_values(found, out, drops=drops))
    assert read.failure is None
    assert out.tobytes() == b"".join(files.values[row] for row in ids.tolist())
    return read.missed


# What is in memory.


@MAPPED
@counts_pages
def test_what_is_missed_is_what_is_not_in_memory(is_mapped):
    files = pages_of(64)
    (path,), table = files.paths, files.table(unmapped=() if is_mapped else (0,))
    arrays = files.outputs(64)

    drop_from_memory(path)
    for row in range(0, 64, 4):
        bring(path, row * KIB64, KIB64)
    assert ended(begun_read(table, np.arange(64), arrays)).missed == 48
    assert np.array_equal(arrays[0], files.fixed[0][0])
    assert ended(begun_read(table, np.arange(64), arrays)).missed == 0


@pytest.mark.parametrize(
    ("lengths", "count"), [((0, 9), 20_000), ((0, 3000), 2000), ((100_000, 700_000), 12)]
)
@MAPPED
@counts_pages
def test_values_that_are_in_memory_are_not_missed(lengths, count, is_mapped):
    """Whatever the chunks are that they lie in."""
    files = Files([count], [], values=lengths)
    table = files.table(unmapped=() if is_mapped else (0,))
    assert checked(files, np.arange(count), table, reads=True) == 0


@counts_pages
def test_values_that_are_not_in_memory_are_missed_by_pieces():
    piece = engine.PIECE_BYTES
    files = Files([3], [], values=(3 * piece, 3 * piece + 1), begin_at=PAGE)
    (path,), table = files.paths, files.table(unmapped=(0,))
    drop_from_memory(path)
    bring(path, 0, PAGE)
    bring(path, PAGE + 4 * piece, piece)
    assert found_and_read(files, np.array([2, 0, 1]), table) == 8
    assert found_and_read(files, np.array([2, 0, 1]), table) == 0


@counts_pages
def test_offsets_that_are_not_in_memory_are_missed():
    files = Files([20_000], [], values=(1, 2))
    drop_from_memory(*files.paths)
    for is_in_memory in (False, True):
        found = ended(find_values(files.table(unmapped=(0,)), np.arange(20_000), 0, 1, on_disk=True))
        assert bool(found.missed) is not is_in_memory


@counts_pages
def test_a_copy_knows_whether_it_waited_for_the_disk():
    files, ids = Files([500], [5000], begin_at=PAGE), np.arange(500)
    drop_from_memory(*files.paths)
    table = files.table()
    assert ended(begun(table, ids, files.outputs(500))).missed
    assert not ended(begun(table, ids, files.outputs(500))).missed
    files = Files([500], [], values=(5000, 5001))
    found = ended(find_values(files.table(), ids, 0, 1))
    out = np.zeros(int(found.offsets[-1]), np.uint8)
    files.drop((0,))
    assert ended(copy_values(found, out)).missed
    assert not ended(copy_values(found, out)).missed


@MAPPED
@counts_pages
def test_what_came_from_the_disk_is_dropped_and_what_was_in_memory_stays(is_mapped):
    files = pages_of(64)
    (path,), table = files.paths, files.table(unmapped=() if is_mapped else (0,))
    drop_from_memory(path)
    for row in range(0, 64, 4):
        bring(path, row * KIB64, KIB64)
    before = resident_bytes(path)
    ended(begun_read(table, np.arange(64), files.outputs(64), drops=True))
    assert resident_bytes(path) == before == 16 * KIB64
    ended(begun_read(table, np.arange(64), files.outputs(64)))
    assert resident_bytes(path) >= 64 * KIB64


@counts_pages
def test_values_that_came_from_the_disk_are_dropped_piece_by_piece():
    piece = engine.PIECE_BYTES
    files = Files([2], [], values=(8 * piece, 8 * piece + 1), begin_at=PAGE)
    (path,), table = files.paths, files.table(unmapped=(0,))
    drop_from_memory(path)
    bring(path, 0, PAGE)
    for number in (0, 5, 12):
        bring(path, PAGE + number * piece, piece)
    before = resident_bytes(path)
    assert found_and_read(files, np.array([1, 0]), table, drops=True) == 13
    assert resident_bytes(path) == before == PAGE + 3 * piece


@counts_pages
def test_the_page_in_which_the_next_row_begins_stays():
    """It was dropped, and read once more by who reads in order."""
    files = Files([8], [2 * PAGE + 1000], begin_at=PAGE)
    (path,), table = files.paths, files.table(unmapped=(0,))
    drop_from_memory(path)
    for row in range(4):
        ended(begun_read(table, np.array([row]), files.outputs(1), drops=True))
        assert resident_bytes(path) == PAGE


@pytest.mark.parametrize("unmapped", [(), (0,)], ids=["mapped", "not mapped"])
def test_a_file_system_that_does_not_tell_what_is_in_memory_is_read_all_the_same(unmapped):
    """tmpfs refuses RWF_NOWAIT; what is mapped there is looked up, and all of that is in memory."""
    files = Files([50] * 3, [5000, 3], folder=Path("/dev/shm"))
    with files.paths[0].open("rb") as file, pytest.raises(OSError, match="not supported"):
        os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
    ids = np.random.default_rng(0).integers(0, 150, 500)
    missed = checked(files, ids, files.table(unmapped=unmapped), reads=True, drops=True)
    assert bool(missed) is bool(unmapped)
    checked(files, ids, files.table(unmapped=unmapped))


@counts_pages
def test_a_mapped_file_without_a_path_is_copied_from_its_map():
    files = pages_of(8)
    table = files.table(without_path=(0,))
    assert checked(files, np.arange(8), table, reads=True, drops=True) == 0
    files = pages_of(64)
    table = files.table(without_path=(0,))
    drop_from_memory(*files.paths)
    arrays = files.outputs(64)
    assert ended(begun_read(table, np.arange(64), arrays)).missed == 64
    assert np.array_equal(arrays[0], files.fixed[0][0])


# What comes ahead.


@MAPPED
@counts_pages
def test_rows_are_fetched(is_mapped):
    files = Files([30, 40, 30], [5000, 200_000], values=(500, 1000))
    table = files.table(unmapped=() if is_mapped else range(3))
    drop_from_memory(*files.paths)
    assert ended(fetch_rows(table, 10, 90, columns_of(files.outputs(1)))).refused == -1
    assert ended(fetch_values(table, 10, 90, 2, 1)).refused == -1
    wanted = sum(map(len, files.values[10:90])) + 80 * 205_000
    wait_until(lambda: sum(map(resident_bytes, files.paths)) >= wanted, "them to be there")
    whole = sum(path.stat().st_size for path in files.paths)
    assert sum(map(resident_bytes, files.paths)) < whole - 15 * 205_000, "no others came"
    wait_until(lambda: found_and_read(files, np.arange(10, 90), table) == 0, "values to be there")


@pytest.mark.parametrize(
    ("first", "last"),
    [(-(2**63), 2**63 - 1), (0, 2**62), (-5, 3), (50, 20), (30, 30), (100, 200), (2**62, 2**63 - 1)],
)
def test_what_is_out_of_range_is_not_fetched(first, last):
    files = Files([30, 40, 30], [5000], values=(500, 1000))
    table = files.table(unmapped=(0,), unknown=(1,), without_path=(2,))
    table.release(5)
    drop_from_memory(*files.paths)
    for job in (
        fetch_rows(table, first, last, columns_of(files.outputs(1))),
        fetch_values(table, first, last, 1, 1),
    ):
        assert ended(job).refused == -1
        assert job.failure is None
    if max(first, 5) < min(last, 30):
        wait_until(lambda: resident_bytes(files.paths[0]) >= 25 * 5000, "what is in range to be there")
    else:
        assert not any(map(resident_bytes, files.paths[:2]))


@pytest.mark.parametrize("ends", [(0, -1), (-1, 10), (0, 2**31 - 1), (5, 3)])
def test_values_whose_offsets_leave_their_file_are_not_fetched(ends):
    """Else the disk would be asked for petabytes, 128 KiB at a time."""
    files = Files([4], [], 1 << 10)
    with files.paths[0].open("r+b") as file:
        for row, end in ((0, ends[0]), (4, ends[1])):
            file.seek(files.layouts[0][0] + row * 4)
            file.write(np.array(end, np.int32).tobytes())
    assert ended(fetch_values(files.table(), 0, 4, 0, 1 << 30)).refused == -1


def test_rows_of_files_that_are_missing_are_not_fetched():
    files = Files([4], [8])
    table = files.table(unmapped=(0,))
    files.paths[0].unlink()
    assert ended(fetch_rows(table, 0, 4, columns_of(files.outputs(1)))).failure is None
    assert ended(fetch_values(table, 0, 4, 1, 1)).failure is None


def test_values_of_a_file_that_has_gone_are_not_fetched_by_its_map():
    """Whoever touches that waits for the disk; here it would end the process."""
    files = Files([4], [8], values=(500, 1000))
    table, name = Table(files.starts), np.frombuffer(os.fsencode(files.paths[0]) + b"\0", np.uint8)
    nbytes = files.paths[0].stat().st_size
    nothing = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0)
    address = address_of_map(nothing)
    table.put([0], [entry(address, nbytes, files.layouts[0].ctypes.data, name.ctypes.data)])

    def body() -> None:
        assert ended(fetch_rows(table, 0, 4, columns_of(files.outputs(1)))).failure is None
        assert ended(fetch_values(table, 0, 4, 1, 1)).failure is None

    with in_child(body):
        pass


# Files that have changed.


def truncate(path: Path, nbytes: int) -> None:
    os.truncate(path, nbytes)


@MAPPED
@pytest.mark.parametrize("count", [0, 1, 3])
def test_rows_after_the_end_of_a_file_that_was_truncated_fail(is_mapped, count):
    files = Files([8, 64], [KIB64], begin_at=PAGE)
    table, ids = files.table(unmapped=() if is_mapped else (0, 1)), np.array([0, 9, 40, 70, 41, 3])
    truncate(files.paths[1], 33 * KIB64 - 1)
    with threads(count):
        arrays = files.outputs(len(ids))
        read = ended(begun_read(table, ids, arrays))
        assert read.refused == -1
        assert read.failure.error == 0
        assert read.failure.index in ((2,) if count < 2 else (2, 3, 4))
        good = [0, 1, 5]
        assert np.array_equal(arrays[0][good], files.column(0, ids[good]))


@MAPPED
def test_values_after_the_end_of_a_file_that_was_truncated_fail(is_mapped):
    files = Files([1000], [], values=(500, 1000))
    table = files.table(unmapped=() if is_mapped else (0,))
    found = ended(find_values(table, np.arange(1000), 0, 1, on_disk=True))
    truncate(files.paths[0], int(found.source[500]) + 1)
    out = np.zeros(int(found.offsets[-1]), np.uint8)
    with threads(1):
        assert ended(read_values(found, out)).failure == Failure(500, 0)
    assert out[: found.offsets[500]].tobytes() == b"".join(files.values[:500])
    truncate(files.paths[0], int(files.layouts[0][0]) + 4 * 300 + 2)
    with threads(1):
        found = ended(find_values(table, np.arange(1000), 0, 1, on_disk=True))
    assert found.failure == Failure(299, 0)
    assert found.damaged == -1, "nothing is known of these offsets"
    assert (np.diff(found.offsets) >= 0).all()


def replaced(path: Path) -> None:
    """Another file is there, which has the same bytes."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.rename(path)


def linked(path: Path) -> None:
    """A symbolic link to it."""
    path.rename(other := path.with_name("other"))
    path.symlink_to(other)


CHANGES = [
    pytest.param(replaced, errno.ESTALE, id="replaced"),
    pytest.param(linked, errno.ELOOP, id="linked"),
    pytest.param(Path.unlink, errno.ENOENT, id="missing"),
]


@pytest.mark.parametrize(("change", "error"), CHANGES)
@counts_pages
def test_another_file_at_the_path_is_not_read(change, error):
    files = Files([50] * 3, [5000, 3])
    tables = [files.table(unmapped=unmapped) for unmapped in ((1,), ())]
    for path in files.paths:
        change(path)
    ids = np.arange(0, 150, 7)
    with threads(0):
        for found in (
            ended(begun_read(tables[0], ids, files.outputs(len(ids)))),
            ended(find_values(tables[0], ids, 2, 1, on_disk=True)),
        ):
            assert found.failure == Failure(8, error)
    assert checked(files, ids, tables[1], reads=True) == 0, "it is mapped"


def test_the_error_that_is_told_is_that_of_the_row_that_is_told():
    files = Files([4] * 3, [KIB64], begin_at=PAGE)
    table = files.table(unmapped=range(3))
    truncate(files.paths[1], 10)
    replaced(files.paths[2])
    with threads(0):
        for ids, failure in (([0, 5, 9], Failure(1, 0)), ([0, 9, 5], Failure(1, errno.ESTALE))):
            read = ended(begun_read(table, np.array(ids), files.outputs(3)))
            assert read.failure == failure


def test_no_descriptor_is_left_open():
    files = Files([50] * 4, [5000, 3])
    tables = [files.table(unmapped=(0, 1, 2, 3)), files.table()]
    ids = np.random.default_rng(0).integers(0, 200, 500)
    checked(files, ids)
    before = open_files()

    def bring_all() -> list[bool]:
        """Whether all was read, where files are not mapped and where they are."""
        are_whole = []
        for table in tables:
            files.drop((0, 1))
            ended(fetch_rows(table, 0, 200, columns_of(files.outputs(1))))
            assert begun_read(table, ids, files.outputs(500)).cancel()
            are_whole.append(ended(begun_read(table, ids, files.outputs(500), drops=True)).failure is None)
        return are_whole

    assert bring_all() == [True, True]
    replaced(files.paths[2])
    files.paths[3].unlink()
    assert bring_all() == [False, True]
    wait_until(lambda: len(open_files()) <= len(before), "descriptors to end")


AS_NOBODY = """
import os, numpy as np
from pathlib import Path
from plain_rows import Table, begun_read, checked, ended, Files
path = Path(sys.argv[1])
table = Table(np.array([0, 10]))
table.add(0, path, np.array([0, 0, 0]), is_mapped=False)
os.setgid(65534); os.setuid(65534)
for is_readable in (True, False):
    out = np.zeros((10, 1000), np.uint8)
    failure = ended(begun_read(table, np.arange(10), [out])).failure
    print(failure.error if failure else int((out == 7).all()) - 1)
    sys.stdout.flush()
    if is_readable:
        input()
"""


@pytest.mark.slow
def test_a_file_of_somebody_else_is_read_if_it_may_be():
    """O_NOATIME is for the owner alone."""
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        path = folder / "rows"
        path.write_bytes(bytes([7]) * 10_000)
        path.chmod(0o644)
        beginning = f"import sys; sys.path[:0] = {sys.path!r}\n"
        command = [sys.executable, "-c", beginning + AS_NOBODY, path]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "0\n", "it is whole"
            path.chmod(0)
            assert process.communicate("\n", 60)[0] == f"{errno.EACCES}\n"
        assert process.returncode == 0
