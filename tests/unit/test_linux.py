"""The kernel's calls: the same by Python's name and by number, and an error where there is neither."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import subprocess
import sys

import pytest
from page_cache import counts_pages, drop_from_memory

from arrowcache import linux
from arrowcache.reading.slots import address_of_map

NAMES = ("memfd_create", "pidfd_open")
FD = "/proc/self/fd"


@pytest.fixture(params=["by name", "by number"])
def way(request, monkeypatch):
    if request.param == "by number":
        if os.uname().machine not in ("x86_64", "aarch64", "riscv64"):
            pytest.skip(f"the numbers of {os.uname().machine} are not known")
        for name in NAMES:
            monkeypatch.delattr(os, name, raising=False)


@pytest.fixture
def opened():
    """Descriptors that are closed at the end."""
    fds: list[int] = []
    yield fds
    for fd in fds:
        os.close(fd)


def is_readable(fd: int, seconds: float = 0) -> bool:
    return bool(select.select([fd], [], [], seconds)[0])


def test_a_memory_file_is_empty_has_a_name_in_proc_only_and_is_inherited_by_nobody(way, opened):
    opened.append(fd := linux.memory_file("some-name"))
    assert os.readlink(f"{FD}/{fd}") == "/memfd:some-name (deleted)"
    assert os.fstat(fd).st_size == 0
    assert not os.get_inheritable(fd)
    assert os.pwrite(fd, b"abc", 4096) == 3
    assert os.pread(fd, 9, 4096) == b"abc"


def test_the_file_of_a_process_is_readable_once_it_has_ended(way, opened):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        opened.append(fd := linux.process_file(process.pid))
        assert not os.get_inheritable(fd)
        assert not is_readable(fd)
        process.kill()
        assert is_readable(fd, 60)


def test_a_process_that_is_not_there_has_no_file(way):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with pytest.raises(ProcessLookupError):
        linux.process_file(process.pid)


def test_the_error_of_a_call_by_number_is_that_of_the_call_by_name(monkeypatch):
    """A limit of descriptors is the one that users meet."""
    script = (
        "import os, resource\n"
        "from arrowcache import linux\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) - 1, 4096))\n"
        "for name in (None, 'memfd_create', 'pidfd_open'):\n"
        "    name and delattr(os, name)\n"
        "    for call, argument in (linux.memory_file, 'x'), (linux.process_file, 1):\n"
        "        try:\n"
        "            print(call(argument))\n"
        "        except OSError as error:\n"
        "            print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[Errno {errno.EMFILE}] {os.strerror(errno.EMFILE)}\n" * 6


@pytest.mark.parametrize("bits", [32, 64])
def test_a_call_whose_number_is_not_known_is_not_implemented(monkeypatch, bits):
    """On another processor, or of a 32-bit process, the number may be that of another call."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    if bits == 32:
        monkeypatch.setattr(sys, "maxsize", (1 << 31) - 1)
    else:
        monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "host", "6.1", "#1", "sparc64")))
    with pytest.raises(OSError, match="not implemented") as raised:
        linux.memory_file("x")
    assert raised.value.errno == errno.ENOSYS


def test_locks_of_two_descriptions_conflict_and_say_where(tmp_path, opened):
    path = tmp_path / "file"
    path.write_bytes(b"")
    one, other = (os.open(path, os.O_RDWR) for _ in range(2))
    opened += [one, other]
    linux.set_lock(one, linux.SHARED, 10, 5)
    linux.set_lock(other, linux.SHARED, 12, 1)
    assert linux.conflicting_lock(other, 0, 100) == (10, 5)
    assert linux.conflicting_lock(other, 0, 10) is None
    with pytest.raises(BlockingIOError):
        linux.set_lock(other, linux.EXCLUSIVE, 14, 1)
    linux.set_lock(one, linux.UNLOCKED, 0, 0)
    linux.set_lock(other, linux.EXCLUSIVE, 14, 1)
    assert linux.conflicting_lock(one, 0, 100) == (12, 1)


def test_a_freed_range_of_a_file_reads_as_zeros(opened):
    opened.append(fd := linux.memory_file("x"))
    os.write(fd, b"x" * 4 * mmap.PAGESIZE)
    linux.free_range(fd, mmap.PAGESIZE, 2 * mmap.PAGESIZE)
    assert os.fstat(fd).st_blocks * 512 == 2 * mmap.PAGESIZE
    assert os.pread(fd, 4, mmap.PAGESIZE - 2) == b"xx\0\0"
    with pytest.raises(OSError, match="Bad file descriptor"):
        linux.free_range(-1, 0, 1)


@pytest.mark.parametrize("keep_gil", [False, True])
def test_memory_is_mapped_over_and_advised(opened, keep_gil):
    opened.append(fd := linux.memory_file("mapped"))
    os.write(fd, b"y" * mmap.PAGESIZE)
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    address, flags = address_of_map(memory), mmap.MAP_PRIVATE | linux.MAP_FIXED
    assert linux.map_memory(address, mmap.PAGESIZE, mmap.PROT_READ, flags, fd) == address
    assert "memfd:mapped" in read_maps()
    assert memory[:1] == b"y"
    assert linux.advise(address, mmap.PAGESIZE, linux.MADV_POPULATE_READ, keep_gil=keep_gil) in (
        0,
        errno.EINVAL,
    )
    memory.close()
    assert "memfd:mapped" not in read_maps()
    assert linux.advise(address, mmap.PAGESIZE, mmap.MADV_WILLNEED, keep_gil=keep_gil) == errno.ENOMEM
    with pytest.raises(OSError, match="Bad file descriptor"):
        linux.map_memory(0, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_PRIVATE, 1 << 20)


def test_mapped_pages_are_made_writable():
    memory = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    linux.make_writable(address_of_map(memory), mmap.PAGESIZE)
    ctypes.memset(address_of_map(memory), 7, 1)
    assert memory[:1] == b"\x07"
    with pytest.raises(OSError, match="Cannot allocate memory"):
        linux.make_writable(0, mmap.PAGESIZE)


@counts_pages
def test_pages_are_in_memory_or_not(tmp_path, opened):
    path = tmp_path / "file"
    path.write_bytes(b"z" * 64 * mmap.PAGESIZE)
    opened.append(fd := os.open(path, os.O_RDONLY))
    memory = mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
    address = address_of_map(memory)
    assert linux.are_in_memory(address, 63 * mmap.PAGESIZE + 1)
    memory.close()
    assert linux.are_in_memory(address, mmap.PAGESIZE), "the kernel does not tell of what is not mapped"
    drop_from_memory(path)
    memory = mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
    address = address_of_map(memory)
    assert not linux.are_in_memory(address, 1)
    os.pread(fd, 1, 0)
    linux.advise(address, 1, linux.MADV_POPULATE_READ)
    assert linux.are_in_memory(address, 1)


def read_maps() -> str:
    with open("/proc/self/maps") as maps:
        return maps.read()


def test_a_copy_of_a_descriptor_is_beyond_a_number(opened):
    opened.append(fd := linux.memory_file("copied"))
    opened.append(copy := linux.copy_beyond(fd, fd + 7))
    assert copy > fd + 7
    assert os.path.sameopenfile(fd, copy)
    assert not os.get_inheritable(copy)


def test_a_child_dies_with_its_parent(tmp_path):
    child = "from arrowcache import linux; linux.die_with_parent(); print('ready', flush=True); input()"
    parent = (
        "import subprocess, sys\n"
        f"command, pipe = [sys.executable, '-c', {child!r}], subprocess.PIPE\n"
        "child = subprocess.Popen(command, stdin=pipe, stdout=pipe)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        watch = linux.process_file(int(process.stdout.readline()))
        process.kill()
        assert is_readable(watch, 60)
        os.close(watch)


def test_the_boot_is_known_by_a_line_of_the_kernels():
    with open("/proc/sys/kernel/random/boot_id") as file:
        assert f"{linux.boot_id()}\n" == file.read()
