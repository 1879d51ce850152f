"""Memory maps of whole files."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
from pathlib import Path

import pytest
from helpers import open_files, wait_until

from arrowcache.reading.slots import address_of_map
from arrowcache.storage import mapping
from arrowcache.storage.mapping import FileMapping

PAGE, HUGE_PAGE = 4096, 2 << 20


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 3000)
    return path


def maps():
    with open("/proc/self/maps") as lines:
        return lines.read()


def flags_of(mapped: FileMapping) -> list[str]:
    """The kernel's flags of a mapping. "rr": a touch reads its page alone, not what is around it."""
    shown = Path("/proc/self/smaps").read_text().split(f"\n{mapped.address:x}-")[1].split("VmFlags: ")[1]
    return shown.partition("\n")[0].split()


def test_a_file_that_does_not_fit_or_is_empty_is_refused(file, tmp_path):
    before = open_files()
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(FileNotFoundError):
        FileMapping(tmp_path / "missing")
    link = tmp_path / "link"
    link.symlink_to(file)
    with pytest.raises(OSError, match="symbolic"):
        FileMapping(link)
    with pytest.raises(ValueError, match="0 bytes"):
        FileMapping(empty)
    with pytest.raises(ValueError, match="9000 bytes"):
        FileMapping(file, limit=2 * PAGE)
    with pytest.raises(OSError, match="Input/output error"):
        FileMapping(file, least=9001)
    wait_until(lambda: open_files() <= before, "its descriptors to end")


def test_a_mapped_file_is_unmapped_before_it_is_said_so(file):
    told = []
    buffer = FileMapping(file, on_unmap=lambda: told.append(str(file) in maps())).buffer()
    part = buffer.slice(5)
    del buffer
    gc.collect()
    assert told == []
    assert part[:1].to_pybytes() == b"c"
    del part
    gc.collect()
    assert told == [False]


def test_ctrl_c_while_a_mapping_dies_is_raised_a_moment_after_it(file):
    """A finalizer cannot raise: Python would print the KeyboardInterrupt, and go on."""
    told = []

    def on_unmap():
        told.append(str(file) in maps())
        if len(told) == 1:
            raise KeyboardInterrupt

    def drop_and_wait(kept):
        kept.clear()
        wait_until(lambda: False, "the interrupt")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        kept = [FileMapping(file, on_unmap=on_unmap).buffer()]
        with pytest.raises(KeyboardInterrupt):
            drop_and_wait(kept)
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == [False, False]


def test_a_large_file_starts_at_a_huge_page_and_takes_one_mapping(tmp_path):
    (tmp_path / "large").write_bytes(bytes(HUGE_PAGE + 1))
    before = len(maps().splitlines())
    files = [FileMapping(tmp_path / "large") for _ in range(20)]
    assert {file.address % HUGE_PAGE for file in files} == {0}
    assert len(maps().splitlines()) <= before + 25


@pytest.mark.parametrize("nbytes", [PAGE, HUGE_PAGE + 1])
def test_what_is_written_stays_in_its_mapping_and_has_no_memory_reserved(tmp_path, nbytes):
    path = tmp_path / "file"
    path.write_bytes(bytes(nbytes))
    one, other = FileMapping(path, writable=True), FileMapping(path)
    ctypes.memset(one.address, 7, 1)
    assert other.buffer()[:1].to_pybytes() == path.read_bytes()[:1] == b"\0"
    flags = flags_of(one)
    assert {"wr", "nr", "dc"} <= {*flags}, "writable, not reserved, not in a forked child"
    assert "ac" not in flags, "it would count among what the machine has promised"


def read_long_ago(path):
    """The file, and the time of its last reading, which is before that of its last change."""
    path.write_bytes(bytes(PAGE))
    os.utime(path, (1, 2))
    return path


def test_mapping_a_file_does_not_change_when_it_was_last_read(tmp_path):
    """A change of its inode, which waits for the journal of a busy disk, and the reader with it."""
    read_long_ago(tmp_path / "other").read_bytes()
    if (tmp_path / "other").stat().st_atime == 1:
        pytest.skip("this file system does not say when a file was last read")
    path = read_long_ago(tmp_path / "file")
    assert bytes(FileMapping(path).buffer()) == bytes(PAGE)
    assert path.stat().st_atime == 1


# what comes from the disk


def test_populating_says_whether_the_pages_are_in_memory(file):
    mapped = FileMapping(file)
    assert mapping.populate(mapped.address, mapped.nbytes)
    nothing = mmap.mmap(-1, PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0)
    assert not mapping.populate(address_of_map(nothing), PAGE), "there is nothing to be read"


def test_a_sparse_mapping_alone_reads_single_pages_until_it_is_told_otherwise(file):
    mapped, sparse = FileMapping(file), FileMapping(file, sparse=True)
    assert "rr" not in flags_of(mapped)
    assert "rr" in flags_of(sparse)
    mapping.will_read_on(sparse.address + 1, sparse.nbytes - 1)
    assert "rr" not in flags_of(sparse)
    mapping.will_read_pages(sparse.address, sparse.nbytes)
    assert "rr" in flags_of(sparse)
