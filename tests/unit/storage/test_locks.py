"""Kernel locks: each LockFile is a description of its own."""

from __future__ import annotations

import errno
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers import in_child, open_files

from arrowcache import linux
from arrowcache.proc import OpenFile
from arrowcache.storage import locks
from arrowcache.storage.locks import LockFile, flock_holders, range_holders


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "lock"
    file.touch()
    return file


@pytest.fixture
def pair(path):
    first, second = LockFile(path), LockFile(path)
    yield first, second
    first.close()
    second.close()


def test_two_lock_files_exclude_each_other_until_one_is_closed(pair):
    first, second = pair
    assert first.try_exclusive()
    assert not second.try_exclusive()
    first.close()
    assert second.try_exclusive()


def test_shared_ranges_overlap_and_exclusive_ones_do_not(pair):
    first, second = pair
    assert first.try_range(10, 5, exclusive=False)
    assert second.try_range(12, 5, exclusive=False)
    assert not second.try_range(9, 2, exclusive=True)
    assert second.try_range(0, 10, exclusive=True)
    assert not first.try_range(9, 1, exclusive=False)


def test_unlocking_a_part_frees_just_that_part(pair):
    first, second = pair
    assert first.try_range(10, 10, exclusive=False)
    first.unlock_range(13, 2)
    assert second.try_range(13, 2, exclusive=True)
    assert not second.try_range(12, 1, exclusive=True)
    assert not second.try_range(15, 1, exclusive=True)


def test_a_conflict_is_the_locked_part_of_the_range_asked_for(pair):
    first, second = pair
    assert second.conflict(0, 100) is None
    assert first.try_range(10, 10, exclusive=False)
    assert second.conflict(0, 100) == range(10, 20)
    assert second.conflict(15, 100) == range(15, 20)
    assert second.conflict(0, 12) == range(10, 12)
    assert second.conflict(20, 50) is None
    assert first.conflict(0, 100) is None, "one's own locks are no conflict"


def test_a_lock_to_the_end_of_the_file_is_cut_to_the_range_asked_for(pair):
    first, second = pair
    assert first.try_range(10, 0, exclusive=False)  # length 0: up to the end
    assert second.conflict(0, 100) == range(10, 100)


def test_a_missing_file_is_a_plain_error_and_leaves_nothing_to_finalize(tmp_path):
    with pytest.raises(FileNotFoundError):
        LockFile(tmp_path / "missing")


def test_a_lock_file_that_cannot_have_its_mode_is_closed(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError("fchmod")

    monkeypatch.setattr(os, "fchmod", refused)
    files, mask = open_files(), os.umask(0o777)
    try:
        with pytest.raises(PermissionError, match="fchmod") as kept:  # and what it passed
            LockFile(tmp_path / "new", os.O_RDWR | os.O_CREAT)
    finally:
        os.umask(mask)
    assert open_files() == files
    del kept


def test_a_lock_file_is_closed_when_a_program_is_started(path):
    file = LockFile(path)
    try:
        assert not os.get_inheritable(file.fd)
    finally:
        file.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("call", ["open", "socketpair"])
def test_a_fork_while_another_thread_opens_a_lock_inherits_nothing_of_it(path, monkeypatch, call):
    """It did, closed it never, and where the parent was killed held its lease for as long as it lived."""
    opened, forked = threading.Event(), threading.Event()
    original = os.open if call == "open" else socket.socketpair
    before = open_files()

    def slow(*arguments: Any) -> Any:
        result = original(*arguments)
        opened.set()
        forked.wait(0.3)  # the system call is over, and the interpreter not yet back
        return result

    def lock() -> None:
        files.append(LockFile(path))
        files[0].outlast_mappings()

    files: list[LockFile] = []
    thread = threading.Thread(target=lock)
    if call == "open":
        monkeypatch.setattr(os, "open", slow)
    else:
        monkeypatch.setattr(socket, "socketpair", slow)
    thread.start()
    opened.wait()

    def child():
        assert open_files() <= before

    with in_child(child):
        forked.set()
    thread.join()
    files[0].close()


def test_the_holder_of_a_flock_is_named(path, pair):
    first, _ = pair
    assert flock_holders(path) == []
    assert first.try_exclusive()
    (holder,) = flock_holders(path)
    assert holder.pid == os.getpid()
    assert str(holder).startswith(f"pid {os.getpid()} (")
    assert "pytest" in holder.command or "python" in holder.command


def test_the_holders_of_ranges_are_named_with_their_ranges(path, pair):
    first, second = pair
    assert first.try_range(3, 4, exclusive=False)
    assert second.try_range(5, 0, exclusive=False)
    found = sorted((holder.pid, holder.locked.start, holder.locked.stop) for holder in range_holders(path))
    assert found == [(os.getpid(), 3, 7), (os.getpid(), 5, 2**63 - 1)]


def test_closing_drops_the_locks_also_where_a_child_shares_the_description(pair):
    first, second = pair
    assert first.try_exclusive()
    assert first.try_range(0, 5, exclusive=True)
    shared = os.dup(first.fd)  # as a fork shares it
    for _ in range(2):
        first.close()
        assert (first.fd, first.is_closed) == (-1, True)
    assert second.try_exclusive()
    assert second.try_range(0, 5, exclusive=True)
    os.close(shared)


@pytest.mark.parametrize("call", ["unlock_file", "set_lock"])
def test_what_cannot_be_unlocked_is_closed(pair, monkeypatch, call):
    first, second = pair
    assert first.try_exclusive()
    assert first.try_range(0, 5, exclusive=True)
    with monkeypatch.context() as patch:
        patch.setattr(linux, call, refuse(errno.ENOLCK))
        first.close()
    assert first.is_closed
    assert second.try_exclusive()
    assert second.try_range(0, 5, exclusive=True)


def refuse(code):
    def refused(*_):
        raise OSError(code, os.strerror(code))

    return refused


@pytest.mark.parametrize(
    ("call", "lock"),
    [("lock_file", LockFile.try_exclusive), ("set_lock", lambda file: file.try_range(0, 1, exclusive=True))],
)
def test_only_a_lock_of_somebody_else_is_no_error(path, monkeypatch, call, lock):
    with LockFile(path) as file:
        for code in (errno.EAGAIN, errno.EACCES):
            monkeypatch.setattr(linux, call, refuse(code))
            assert not lock(file)
        monkeypatch.setattr(linux, call, refuse(errno.ENOLCK))
        with pytest.raises(OSError, match="locks"):
            lock(file)
        monkeypatch.undo()


def test_a_new_file_has_its_mode_whatever_the_umask_and_one_that_was_there_keeps_its_own(tmp_path, path):
    mask = os.umask(0o777)
    try:
        LockFile(tmp_path / "new", os.O_RDWR | os.O_CREAT, 0o640).close()
    finally:
        os.umask(mask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
    path.chmod(0o604)
    LockFile(path, mode=0o660).close()
    assert path.stat().st_mode & 0o777 == 0o604


def test_a_link_is_not_followed(tmp_path, path):
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic"):
        LockFile(tmp_path / "link")


def test_only_who_holds_a_flock_of_the_file_is_named(path, monkeypatch):
    status = path.stat()
    own = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    lines = [
        f"1: FLOCK  ADVISORY  WRITE {2**30} {own} 0 EOF",
        f"1: -> FLOCK  ADVISORY  WRITE 5 {own} 0 EOF",  # waits
        f"2: OFDLCK ADVISORY  READ  -1 {own} 0 EOF",
        f"3: FLOCK  ADVISORY  WRITE 6 {own}1 0 EOF",
        "4: FLOCK",
        f"5: FLOCK  ADVISORY  READ {2**30 + 1} {own}",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda _: "\n".join(lines))
        found = flock_holders(path)
    assert [(str(holder), holder.locked) for holder in found] == [
        (f"pid {2**30 + n} (unknown)", range(0)) for n in range(2)
    ]


def test_only_who_shares_locks_on_the_file_is_named(path, tmp_path, monkeypatch):
    status = path.stat()
    own = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    lines = [
        "pos:	0",
        f"lock:	1: OFDLCK ADVISORY  READ  -1 {own} 3 6",
        f"lock:	2: OFDLCK ADVISORY  WRITE -1 {own} 7 7",
        f"lock:	3: FLOCK  ADVISORY  READ  -1 {own} 0 EOF",
        f"lock:	4: OFDLCK ADVISORY  READ  -1 {own}1 1 1",
        f"lock:	5: OFDLCK ADVISORY  READ  -1 {own} 9 EOF",
    ]
    files = [
        OpenFile(2**30, "7", f"/elsewhere/{path.name}"), OpenFile(2**30, "8", "/elsewhere/other"),
        OpenFile(2**31, "9", str(path)),
    ]  # fmt: skip
    asked = []

    def read_text(file):
        asked.append(str(file))
        if str(2**31) in str(file):
            raise FileNotFoundError(file)
        return "\n".join(lines)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", read_text)
        found = range_holders(path, files)
    assert [(holder.pid, holder.locked) for holder in found] == [
        (2**30, range(3, 7)), (2**30, range(9, 2**63 - 1))
    ]  # fmt: skip
    assert asked == [f"/proc/{2**30}/fdinfo/7", f"/proc/{2**31}/fdinfo/9"]
    assert range_holders(tmp_path / "missing", files) == flock_holders(tmp_path / "missing") == []


def test_locks_that_outlast_mappings_go_with_the_socket_on_their_way_through_which_they_are(pair):
    first, second = pair
    assert first.try_range(0, 5, exclusive=False)
    before = open_files()
    first.outlast_mappings()
    ((keeper, _),) = open_files() - before
    os.close(first.fd)  # as the kernel closes them, one after another
    first.fd = -1
    assert second.conflict(0, 9) == range(5)
    os.close(keeper)
    assert second.conflict(0, 9) is None


def test_what_the_collector_defers_as_a_thread_defers_its_first_is_called(monkeypatch):
    called, made = [], locks.deque

    def collected():  # at the point where a thread's first list is made
        monkeypatch.setattr(locks, "deque", made)
        locks.once_unlocked(lambda: called.append("of the collector"))
        return made()

    def defer():
        locks.once_unlocked(lambda: called.append("its own"))

    monkeypatch.setattr(locks, "deque", collected)
    thread = threading.Thread(target=defer)
    thread.start()
    thread.join()
    assert called == ["of the collector", "its own"]
