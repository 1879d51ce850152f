"""The disk that forgets: it forgets what may be lost, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from crash.disk import FATES, PAGE, Disk, chance, lay_out

DATA = b"d" * (2 * PAGE + 100)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "folder").mkdir()
    return tmp_path / "disk"


def write(path: Path, data: bytes = DATA, *, synced: bool = False) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, data, 0)
    if synced:
        os.fsync(fd)
    os.close(fd)


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def left(disk: Disk, cut: int | None = None) -> list[dict[str, bytes | None]]:
    """Everything different that may be there."""
    trees = []
    for fate in [*FATES.values(), *map(chance, range(200))]:
        tree = disk.after_a_cut(disk.now if cut is None else cut, fate)
        files = {name: data for name, (_, data) in tree.items()}
        if files not in trees:
            trees.append(files)
    return trees


def test_of_a_file_that_was_not_synced_any_page_may_be_missing(root):
    with Disk(root).recording() as disk:
        write(root / "a")
        sync_folder(root)
    found = [tree["a"] for tree in left(disk)]
    zeros = bytes(PAGE)
    for possible in (b"", DATA, bytes(len(DATA)), DATA[:PAGE] + zeros + DATA[2 * PAGE :]):
        assert possible in found
    assert {len(data) for data in found} == {0, len(DATA)}


def test_a_synced_file_has_its_bytes_and_maybe_no_name(root):
    with Disk(root).recording() as disk:
        write(root / "a", synced=True)
    assert {"folder": None, "a": DATA} in left(disk)
    assert {"folder": None} in left(disk)
    assert len(left(disk)) == 2


def test_what_is_synced_in_full_is_there(root):
    with Disk(root).recording() as disk:
        write(root / "a", synced=True)
        sync_folder(root)
        write(root / "b")
    for tree in left(disk):
        assert tree["a"] == DATA


def test_of_a_rename_either_end_may_be_lost(root):
    with Disk(root).recording() as disk:
        write(root / "a", synced=True)
        sync_folder(root)
        os.rename(root / "a", root / "folder" / "b")
    ends = {frozenset(set(tree) - {"folder"}) for tree in left(disk)}
    assert ends == {frozenset(names) for names in ((), ("a",), ("folder/b",), ("a", "folder/b"))}
    with disk.recording():
        sync_folder(root / "folder")
        sync_folder(root)
    assert left(disk) == [{"folder": None, "folder/b": DATA}]


def test_a_link_shares_its_files_bytes_and_an_unlinked_name_may_come_back(root, tmp_path):
    with Disk(root).recording() as disk:
        write(root / "a", synced=True)
        os.link(root / "a", root / "b")
        sync_folder(root)
        os.unlink(root / "a")
    assert {"a", "b"} <= set(max(left(disk), key=len))
    lay_out(disk.after_a_cut(disk.now, FATES["nothing unsynced"]), tmp_path / "left")
    assert (tmp_path / "left" / "a").samefile(tmp_path / "left" / "b")


def test_what_lies_in_a_folder_is_lost_with_its_name(root):
    with Disk(root).recording() as disk:
        os.mkdir(root / "new")
        write(root / "new" / "a", synced=True)
        sync_folder(root / "new")
        assert {"folder": None} in left(disk)
        sync_folder(root)
    assert left(disk) == [{"folder": None, "new": None, "new/a": DATA}]


def test_an_earlier_cut_knows_nothing_of_what_came_later(root):
    with Disk(root).recording() as disk:
        write(root / "a", synced=True)
        sync_folder(root)
        before = disk.now
        write(root / "a", b"other")
        os.unlink(root / "a")
    assert left(disk, before) == [{"folder": None, "a": DATA}]
    assert len(left(disk)) > 2


def test_a_page_is_old_or_new_and_never_half(root):
    with Disk(root).recording() as disk:
        write(root / "a", b"old!", synced=True)
        sync_folder(root)
        write(root / "a", b"new!")
    assert sorted(tree["a"] for tree in left(disk)) == [b"new!", b"old!"]
