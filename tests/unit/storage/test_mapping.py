"""Memory maps: address ranges and whole files."""

from __future__ import annotations

import gc
import os
import signal

import pytest
from helpers import in_child, wait_until

from arrowcache.storage import mapping
from arrowcache.storage.mapping import AddressRange, FileMapping, open_file

PAGE = 4096


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 3000)
    return path


def map_into(area, path, offset):
    fd, nbytes = open_file(path, 4 * PAGE)
    area.map_file(fd, offset, nbytes)
    os.close(fd)
    return nbytes


def maps():
    with open("/proc/self/maps") as lines:
        return lines.read()


def test_a_file_is_mapped_where_it_is_wanted_and_unmapped_again(file):
    area = AddressRange(16 * PAGE)
    assert map_into(area, file, 4 * PAGE) == 9000
    assert area.buffer(4 * PAGE, 9000).to_pybytes() == file.read_bytes()
    assert str(file) in maps()
    area.unmap(4 * PAGE, 9000)
    assert str(file) not in maps()
    assert map_into(area, file, 4 * PAGE) == 9000
    area.close()
    assert str(file) not in maps()


def test_a_range_without_files_takes_no_memory_and_no_overcommit():
    area = AddressRange(1 << 42)
    area.close()


def test_a_file_that_does_not_fit_or_is_empty_is_refused(file, tmp_path):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match="9000 bytes"):
        open_file(file, 2 * PAGE)
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(ValueError, match="0 bytes"):
        open_file(empty, 2 * PAGE)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "missing", 2 * PAGE)
    link = tmp_path / "link"
    link.symlink_to(file)
    with pytest.raises(OSError, match="symbolic"):
        open_file(link, 4 * PAGE)
    with pytest.raises(OSError):
        FileMapping(empty)
    with pytest.raises(OSError):
        FileMapping(link)
    assert os.listdir("/proc/self/fd") == before


def test_unmapping_much_lets_go_of_the_gil(monkeypatch):
    """Of a finished epoch's segments it takes long; all other threads stood still meanwhile."""
    area, called = AddressRange(16 << 20), []
    without_gil = mapping._libc.mmap
    monkeypatch.setattr(mapping._libc, "mmap", lambda *call: called.append(call[1]) or without_gil(*call))
    area.unmap(0, PAGE)
    area.unmap(0, 16 << 20)
    assert called == [16 << 20]


def test_a_range_lives_as_long_as_a_buffer_over_it(file):
    area = AddressRange(16 * PAGE)
    map_into(area, file, 0)
    part = area.buffer(0, 9000).slice(3, 6)
    del area
    gc.collect()
    assert part.to_pybytes() == b"abcabc"
    del part
    gc.collect()
    assert str(file) not in maps()


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


def test_a_forked_child_has_no_mapping_and_ends_nothing(file):
    told = []
    buffer = FileMapping(file, on_unmap=lambda: told.append(1)).buffer()
    area = AddressRange(16 * PAGE)
    map_into(area, file, 0)

    def child():
        nonlocal buffer, area
        assert str(file) not in maps()
        del buffer, area
        gc.collect()
        assert told == []

    with in_child(child):
        pass
    assert area.buffer(0, 3).to_pybytes() == b"abc"
    assert buffer[:3].to_pybytes() == b"abc"


def test_an_impossible_range_is_an_os_error():
    with pytest.raises(OSError, match="mmap"):
        AddressRange(1 << 62)


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
