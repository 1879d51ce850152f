"""Leases: shared locks that end with their last share."""

from __future__ import annotations

import errno
import gc
import os
import socket

import pytest
from helpers import open_files

from arrowcache import linux
from arrowcache.storage.lease import Lease, own_leases
from arrowcache.storage.locks import LockFile


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "lease.lock"
    file.touch()
    return file


def free(path, seq):
    """Whether an evictor could take the segment: asked through a description of its own."""
    file = LockFile(path)
    try:
        return file.try_range(seq, 1, exclusive=True)
    finally:
        file.close()


def leased(path, last=20):
    return [seq for seq in range(last) if not free(path, seq)]


def test_a_lease_covers_its_segments_until_it_is_closed(path):
    lease = Lease(path, 3, 6)
    assert leased(path) == [3, 4, 5, 6]
    assert [seq for seq in range(20) if lease.covers(seq)] == [3, 4, 5, 6]
    lease.close()
    assert leased(path) == []
    assert not lease.covers(4)


def test_leases_of_one_process_are_independent(path):
    first, second = Lease(path, 0, 5), Lease(path, 3, 9)
    first.close()
    assert leased(path) == list(range(3, 10))
    second.close()
    assert leased(path) == []


def test_a_shared_segment_stays_leased_when_the_owner_is_done(path):
    lease = Lease(path, 1, 5)
    end, end_again, end_newer = lease.share(3), lease.share(3), lease.share(4)
    lease.is_ending = True
    assert not lease.stays(3)
    lease.close()
    lease.close()
    assert [lease.stays(seq) for seq in (2, 3, 5)] == [False, True, True]
    assert leased(path) == [3, 4, 5]
    end()
    assert leased(path) == [3, 4, 5]
    end_again()
    assert leased(path) == [4, 5], "what is older than all that is needed is free"
    end_newer()
    assert leased(path) == []


def test_the_oldest_need_decides_whoever_ends_first(path):
    lease = Lease(path, 0, 9)
    ends = {seq: lease.share(seq) for seq in (7, 2, 5)}
    lease.narrow(4, 9)
    assert leased(path) == list(range(2, 10))
    ends[5]()
    assert leased(path) == list(range(2, 10))
    ends[2]()
    assert leased(path) == list(range(4, 10)), "the owner's own"
    lease.close()
    assert leased(path) == [7, 8, 9]
    lease.share(8)
    ends[7]()
    assert leased(path) == [8, 9]


def while_it_unlocks(monkeypatch, do):
    """Do something as the garbage collector does: in the thread that is about to unlock."""
    set_lock = linux.set_lock

    def collecting(*arguments):
        monkeypatch.undo()
        do()
        set_lock(*arguments)

    monkeypatch.setattr(linux, "set_lock", collecting)


def test_a_share_may_end_while_the_same_thread_is_at_work_on_the_lease(path, monkeypatch):
    lease, found = Lease(path, 0, 3), []
    ends = [lease.share(seq) for seq in range(3)]
    lease.close()
    while_it_unlocks(monkeypatch, lambda: (ends[1](), found.append(leased(path))))
    ends[0]()
    assert found == [[0, 1, 2, 3]]
    assert leased(path) == [2, 3]
    ends[2]()
    assert leased(path) == []


def test_narrowing_may_come_while_the_same_thread_is_at_work_on_the_lease(path, monkeypatch):
    lease, found = Lease(path, 0, 5), []
    while_it_unlocks(monkeypatch, lambda: (lease.narrow(2, 4), found.append(leased(path))))
    lease.narrow(1, 5)
    assert found == [[0, 1, 2, 3, 4, 5]]
    assert leased(path) == [2, 3, 4]
    lease.close()


def test_narrowing_gives_up_both_ends_and_nothing_else(path):
    lease = Lease(path, 2, 9)
    lease.narrow(4, 7)
    assert leased(path) == [4, 5, 6, 7]
    lease.narrow(0, 20)
    assert leased(path) == [4, 5, 6, 7], "what was given up cannot be had back"
    lease.narrow(4, 5)
    assert leased(path) == [4, 5]
    assert lease.covers(5)
    assert not lease.covers(6)
    lease.close()
    lease.narrow(4, 4)  # of a closed lease: nothing


def test_what_the_kernel_has_no_memory_to_unlock_stays_leased_until_it_has(path, monkeypatch):
    def refused(*lock):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    lease = Lease(path, 2, 9)
    with monkeypatch.context() as patch:
        patch.setattr(linux, "set_lock", refused)
        lease.narrow(4, 7)
        lease.give_up(5)
    assert leased(path) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert lease.covers(9)
    lease.narrow(4, 7)
    assert leased(path) == [4, 5, 6, 7]
    lease.close()


def test_one_damaged_segment_is_given_up_alone(path):
    lease = Lease(path, 2, 5)
    lease.give_up(3)
    lease.give_up(17)
    assert leased(path) == [2, 4, 5]
    lease.close()


def test_a_segment_being_evicted_cannot_be_leased(path):
    evictor = LockFile(path)
    assert evictor.try_range(4, 1, exclusive=True)
    with pytest.raises(OSError, match="2 to 6") as refused:  # which keeps what it passed
        Lease(path, 2, 6)
    evictor.close()
    assert leased(path) == [], "the refused lease left nothing behind"
    del refused


def test_a_lease_for_which_no_descriptor_is_left_keeps_none(path, monkeypatch):
    def none_left():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socketpair", none_left)
    files = open_files()
    with pytest.raises(OSError, match="open files") as kept:  # and what it passed
        Lease(path, 2, 6)
    assert open_files() == files
    del kept


def test_a_forgotten_lease_ends_with_the_object(path):
    lease = Lease(path, 2, 6)
    assert leased(path)
    del lease
    gc.collect()
    assert leased(path) == []


def test_own_leases_are_found_by_file_and_segment(path, tmp_path):
    other = tmp_path / "other.lock"
    other.touch()
    lease, elsewhere = Lease(path, 2, 6), Lease(other, 2, 6)
    assert own_leases(path, 4) == [lease]
    assert own_leases(path, 7) == []
    lease.close()
    assert own_leases(path, 4) == []
    elsewhere.close()


def test_own_leases_are_found_by_whatever_path_the_file_was_opened(path, tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    lease = Lease(link / path.name, 2, 6)
    relative = Lease(type(path)(path.name), 2, 6)
    assert set(own_leases(path, 4)) == {lease, relative}
    lease.close()
    relative.close()
