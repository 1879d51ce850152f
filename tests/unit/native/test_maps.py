"""Mappings of whole files, made by C."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest
from helpers import in_child, limited, open_files, wait_until

from arrowcache.native import maps

PAGE, HUGE_PAGE = 4096, 2 << 20
LIMIT, ANY_NUMBER = 4 * HUGE_PAGE, 2**62


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 3000)
    return path


def opened(path: Path, most: int = ANY_NUMBER) -> maps.File:
    (file,) = maps.files(os.fspath(path.parent), [path.name])
    file.open(LIMIT, most)
    return file


def closed(path: Path) -> maps.File:
    """Mapped, and not open any more."""
    file = opened(path)
    file.close()
    return file


def flags_of(address: int) -> list[str]:
    """What the kernel says of the mapping that begins there."""
    here, flags = False, []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].count("-") == 1 and not line.split()[0].endswith(":"):
            here = int(line.split("-")[0], 16) == address
        elif here and line.startswith("VmFlags:"):
            flags = line.split()[1:]
    return flags


def test_a_file_is_mapped_without_a_descriptor_until_it_is_unmapped(path):
    before, files = maps.count(), open_files()
    file = opened(path)
    assert os.pread(file.fd, 3, 3) == b"abc"
    file.close()
    file.close()
    assert file.fd == -1
    wait_until(lambda: open_files() <= files, "descriptors to end")
    assert ctypes.string_at(file.address, file.nbytes) == path.read_bytes()
    assert maps.count() == before + 1
    assert file.path == os.fsencode(path)
    assert (file.nbytes, file.device, file.inode) == (9000, path.stat().st_dev, path.stat().st_ino)
    maps.unmap([file])
    assert (file.address, maps.count()) == (0, before)
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_what_is_unmapped_twice_is_unmapped_once(path):
    """The addresses are anybody's by then."""
    file = closed(path)
    address = file.address
    maps.unmap([file])
    other = closed(path)
    assert other.address == address, "the test needs it where the first one was"
    maps.unmap([file, file])
    assert ctypes.string_at(other.address, 3) == b"abc"
    maps.unmap([other])


@pytest.mark.parametrize("nbytes", [HUGE_PAGE - 1, HUGE_PAGE, 2 * HUGE_PAGE + 1])
def test_a_file_that_has_a_huge_page_begins_at_one_and_takes_one_mapping(tmp_path, nbytes):
    (tmp_path / "large").write_bytes(bytes(nbytes - 1) + b"z")
    before = len(Path("/proc/self/maps").read_text().splitlines())
    files = [closed(tmp_path / "large") for _ in range(20)]
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= before + 25
    assert nbytes < HUGE_PAGE or {file.address % HUGE_PAGE for file in files} == {0}
    assert {ctypes.string_at(file.address + nbytes - 1, 1) for file in files} == {b"z"}
    maps.unmap(files)
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= before + 5


@pytest.mark.parametrize("nbytes", [PAGE, HUGE_PAGE])
def test_no_child_inherits_a_mapping_and_a_touch_reads_one_page(tmp_path, nbytes):
    (tmp_path / "file").write_bytes(bytes(nbytes))
    before, file = maps.count(), closed(tmp_path / "file")
    assert {"dc", "rr"} <= set(flags_of(file.address)), "MADV_DONTFORK, MADV_RANDOM"

    def child():
        assert str(tmp_path / "file") not in Path("/proc/self/maps").read_text()
        assert maps.count() == 0

    with in_child(child):
        pass
    assert maps.count() == before + 1
    maps.unmap([file])


def test_what_is_no_file_of_a_fit_length_is_refused(path, tmp_path):
    for name in ("empty", "long"):
        (tmp_path / name).touch()
    os.truncate(tmp_path / "long", LIMIT + 1)
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before, count = open_files(), maps.count()
    for name, nbytes in (("empty", 0), ("long", LIMIT + 1)):
        with pytest.raises(ValueError, match=f"{name} has {nbytes} bytes, a segment has 1 to {LIMIT}"):
            opened(tmp_path / name)
    for name, code in (
        ("missing", errno.ENOENT),
        ("link", errno.ELOOP),
        ("folder", errno.EISDIR),
        ("pipe", errno.ESPIPE),
    ):
        with pytest.raises(OSError, match=name) as caught:
            opened(tmp_path / name)
        assert caught.value.errno == code
    wait_until(lambda: open_files() <= before, "descriptors to end")
    assert maps.count() == count


def test_no_more_are_mapped_than_may_be_but_those_that_are_wanted_all_the_same(path):
    before = maps.count()
    files = [opened(path, before + 2) for _ in range(3)]
    assert [bool(file.address) for file in files] == [True, True, False]
    assert [os.pread(file.fd, 3, 0) for file in files] == [b"abc"] * 3
    files[2].map()
    files[2].map()
    assert maps.count() == before + 3
    assert ctypes.string_at(files[2].address, 3) == b"abc"
    for file in files:
        file.close()
    maps.unmap(files)
    assert maps.count() == before


def test_mapping_a_file_does_not_change_when_it_was_last_read(path, tmp_path):
    (tmp_path / "other").write_bytes(bytes(PAGE))
    for each in (path, tmp_path / "other"):
        os.utime(each, (1, 2))
    (tmp_path / "other").read_bytes()
    if (tmp_path / "other").stat().st_atime == 1:
        pytest.skip("this file system does not say when a file was last read")
    file = closed(path)
    assert ctypes.string_at(file.address, 3) == b"abc"
    assert path.stat().st_atime == 1
    maps.unmap([file])


def test_unmapping_much_lets_go_of_the_gil(tmp_path, monkeypatch):
    """Of a finished epoch's segments it takes long; all other threads stood still meanwhile."""
    (tmp_path / "file").write_bytes(bytes(HUGE_PAGE))
    files, let_go = [closed(tmp_path / "file") for _ in range(5)], maps.library

    class Counted:
        calls = 0

        def maps_unmap(self, words, count):
            Counted.calls += 1
            return let_go.maps_unmap(words, count)

    monkeypatch.setattr(maps, "library", Counted())
    maps.unmap(files[:1])
    assert Counted.calls == 0
    maps.unmap(files[1:])
    assert Counted.calls == 1
    assert not any(file.address for file in files)


KIND_BYTES = bytes(range(256)) * 400  # more than are read at once
PARTS = ((0, 1), (1, 7), (9, 40_000), (60_000, 0), (70_000, 5), (80_000, 22_400))


def kind_of(data: bytes) -> maps.FileKind:
    return maps.FileKind(len(data), [(start, data[start : start + length]) for start, length in PARTS])


def test_files_that_are_alike_are_mapped_and_no_others(tmp_path):
    places = [0, 1, 7, 8, 9, 32_767, 32_768, 40_008, 40_009, 60_000, 70_000, 70_004, 70_005, 80_000, 102_399]
    names = [str(place) for place in places]
    tmp_path = tmp_path / "ä"
    tmp_path.mkdir()
    for place, name in zip(places, names, strict=True):
        data = bytearray(KIND_BYTES)
        data[place] ^= 1
        (tmp_path / name).write_bytes(data)
    for name, data in (
        ("same", KIND_BYTES),
        ("short", KIND_BYTES[:-1]),
        ("long", KIND_BYTES + b"x"),
        ("no", b""),
    ):
        (tmp_path / name).write_bytes(data)
        names.append(name)
    (tmp_path / "link").symlink_to(tmp_path / "same")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    names += ["link", "folder", "pipe", "missing", "same"]
    before, count = open_files(), maps.count()
    files = maps.files(os.fspath(tmp_path), names)
    alike = maps.open_alike(files, kind_of(KIND_BYTES), ANY_NUMBER)
    free = {place for place in places if not any(a <= place < a + n for a, n in PARTS)}
    expected = [place in free for place in places] + [True, False, False, False] + [False] * 4 + [True]
    assert [bool(each) for each in alike] == expected == [bool(file.address) for file in files]
    wait_until(lambda: open_files() <= before, "descriptors to end")
    assert maps.count() - count == sum(expected)
    assert {file.fd for file in files} == {-1}
    assert ctypes.string_at(files[-1].address, files[-1].nbytes) == KIND_BYTES
    maps.unmap(list(files))
    assert maps.count() == count


def test_files_that_are_alike_are_told_where_no_mapping_is_left(tmp_path):
    (tmp_path / "file").write_bytes(KIND_BYTES)
    before, files = maps.count(), maps.files(os.fspath(tmp_path), ["file"] * 3)
    assert maps.open_alike(files, kind_of(KIND_BYTES), before + 2).tolist() == [True] * 3
    assert [bool(file.address) for file in files] == [True, True, False]
    maps.unmap(list(files))
    assert maps.count() == before


def test_one_that_is_open_is_compared_as_well(tmp_path):
    (tmp_path / "file").write_bytes(KIND_BYTES)
    file = opened(tmp_path / "file")
    assert kind_of(KIND_BYTES).has(file)
    assert not kind_of(KIND_BYTES[::-1]).has(file)
    os.truncate(tmp_path / "file", 90_000)
    assert not kind_of(KIND_BYTES).has(file), "it became shorter meanwhile"
    file.close()
    assert not kind_of(KIND_BYTES).has(file), "it cannot be read"
    maps.unmap([file])


def test_there_is_room_without_end_where_addresses_are_not_limited():
    assert maps.room() == maps.room(3) == 2**63 - 1


@pytest.mark.parametrize("more", [-HUGE_PAGE, 0, PAGE, 5 * HUGE_PAGE, 20 * HUGE_PAGE])
def test_where_addresses_are_limited_files_have_half_of_what_the_rest_leaves(tmp_path, more):
    path = tmp_path / "file"
    path.write_bytes(b"x" * HUGE_PAGE)

    def child() -> None:
        spare = [bytes(200) for _ in range(20_000)]
        del spare[::2]  # memory for Python's own objects, which it need not map
        with limited(more):
            files, before = [], maps.room()
            assert before <= max(0, more) // 2
            for _ in range(12):
                (file,) = maps.files(os.fspath(tmp_path), [path.name])
                file.open(LIMIT, ANY_NUMBER)
                file.close()
                files.append(file)
            assert [bool(file.address) for file in files] == [n < before // HUGE_PAGE for n in range(12)]
            assert maps.room(3) >= maps.room()
            maps.unmap(files)
            assert abs(maps.room() - before) < HUGE_PAGE // 2  # Python may have got some memory
        assert maps.room() == 2**63 - 1

    with in_child(child):
        pass
