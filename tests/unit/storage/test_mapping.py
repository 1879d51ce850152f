"""Memory maps: address ranges and whole files."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import signal
import sys

import pytest
from helpers import in_child, wait_until

from arrowcache import linux
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
    with pytest.raises(ValueError, match="0 bytes"):
        FileMapping(empty)
    with pytest.raises(ValueError, match="9000 bytes"):
        FileMapping(file, limit=2 * PAGE)
    with pytest.raises(OSError):
        FileMapping(link)
    assert os.listdir("/proc/self/fd") == before


def test_unmapping_much_lets_go_of_the_gil(monkeypatch):
    """Of a finished epoch's segments it takes long; all other threads stood still meanwhile."""
    area, called = AddressRange(16 << 20), []
    real = linux.map_memory

    def map_memory(address, nbytes, *arguments, keep_gil):
        called.extend([nbytes] if not keep_gil else [])
        return real(address, nbytes, *arguments, keep_gil=keep_gil)

    monkeypatch.setattr(linux, "map_memory", map_memory)
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
    with pytest.raises(OSError, match=r"vm\.max_map_count"):
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


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [False, True])
def test_ctrl_c_at_any_step_of_mapping_a_file_leaves_it_unmapped(file, sparse):
    """It would be mapped until the process ends, and its bytes on the disk be taken, though it is deleted."""
    came = False

    def interrupt_at(number):
        left = number

        def trace(frame, event, _):
            nonlocal came, left
            function = frame.f_code
            if function.co_filename not in (mapping.__file__, linux.__file__):
                return None
            if function.co_name not in ("__init__", "_mmap", "map_memory"):
                return None
            if event in ("line", "return") and not came:
                if left == 0:
                    came = True
                    raise KeyboardInterrupt
                left -= 1
            return trace

        return trace

    mapped_before = mapping.live_mappings()
    for number in itertools.count():
        came, told = False, []
        sys.settrace(interrupt_at(number))
        try:
            FileMapping(file, lambda: told.append(str(file) in maps()), sparse=sparse)  # noqa: B023
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        gc.collect()
        assert str(file) not in maps(), number
        assert True not in told
        assert mapping.live_mappings() == mapped_before
        if not came:
            break
    assert number > 10


def test_a_large_file_starts_at_a_huge_page_and_takes_one_mapping(tmp_path):
    (tmp_path / "large").write_bytes(bytes(mapping.HUGE_PAGE + 1))
    before = len(maps().splitlines())
    files = [FileMapping(tmp_path / "large") for _ in range(20)]
    assert {file.address % mapping.HUGE_PAGE for file in files} == {0}
    assert len(maps().splitlines()) <= before + 25


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


def test_a_file_of_another_user_is_mapped_all_the_same(tmp_path, monkeypatch):
    """Linux refuses to leave out the time of a reading of it."""
    path, asked = read_long_ago(tmp_path / "file"), []

    def open_quickly(name, flags):
        asked.append(flags)
        if flags & os.O_NOATIME:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return os.open(name, flags)

    monkeypatch.setattr(linux, "open_quickly", open_quickly)
    assert bytes(FileMapping(path).buffer()) == bytes(PAGE)
    assert len(asked) == 2


# what comes from the disk


def test_populating_says_whether_the_pages_are_in_memory(file):
    area = AddressRange(16 * PAGE)
    nbytes = map_into(area, file, 4 * PAGE)
    assert mapping.populate(area.address + 4 * PAGE, nbytes)
    assert not mapping.populate(area.address + 8 * PAGE, PAGE), "no file is mapped there"
    area.close()
