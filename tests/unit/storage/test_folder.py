"""The one place where files appear and vanish."""

from __future__ import annotations

import errno
import os
import stat

import pytest
from helpers import disk_bytes

import arrowcache as ac
from arrowcache.storage.folder import PART_SLACK_BYTES, Folder
from arrowcache.storage.layout import LockRecord, Settings, ranks_name, segment_name
from arrowcache.storage.locks import LockFile

SETTINGS = Settings(ac.Schema({"x": ac.Tensor("int64")}), 10_000_000, 1_000_000, 50, 0.1, durable=False)


@pytest.fixture
def folder(tmp_path):
    made = Folder(tmp_path / "cache")
    made.create()
    made.write_settings(SETTINGS)
    return made


def put(folder, name, data=b"data"):
    (folder.segments / name).write_bytes(data)
    return name


def test_a_new_folder_is_private_and_making_it_again_changes_nothing(folder):
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    before = sorted(p.name for p in folder.path.iterdir())
    folder.write_record(LockRecord(5, 3, "boot"))
    folder.create()
    assert sorted(p.name for p in folder.path.iterdir()) == before
    assert folder.read_record() == LockRecord(5, 3, "boot")


def test_settings_are_replaced_without_leaving_a_part(folder):
    folder.write_settings(SETTINGS.with_capacity(77))
    assert folder.read_settings().capacity_bytes == 77
    assert os.listdir(folder.incoming) == []


def test_settings_that_did_not_change_are_not_parsed_again(folder):
    known = folder.read_settings()
    assert folder.read_settings(known) is known
    folder.write_settings(SETTINGS.with_capacity(77))
    assert folder.read_settings(known).capacity_bytes == 77


def test_what_is_no_cache_is_told_from_what_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="create"):
        Folder(tmp_path / "missing").read_settings()
    with pytest.raises(ac.CacheFormatError, match="not a cache"):
        Folder(tmp_path).read_settings()
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ac.CacheFormatError, match="not a cache"):
        Folder(file).read_settings()
    (tmp_path / "cache.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ac.CacheFormatError, match="not a cache"):
        Folder(tmp_path).read_settings()


def test_a_part_takes_its_blocks_at_once_and_gives_them_back(folder):
    before = disk_bytes(folder.path)
    part = folder.new_part()
    part.reserve(1 << 20)
    assert disk_bytes(folder.path) >= before + (1 << 20)
    assert folder.incoming_bytes() >= (1 << 20) + PART_SLACK_BYTES
    part.discard()
    part.discard()
    assert os.listdir(folder.incoming) == []
    assert folder.incoming_bytes() == 0


def test_a_part_holds_exactly_what_was_written_however_many_pieces(folder):
    part = folder.new_part()
    pieces = [bytes([i % 256]) * (i % 7) for i in range(2000)]
    part.reserve(sum(map(len, pieces)))
    part.write([memoryview(piece) for piece in pieces])
    part.sync()
    assert part.path.read_bytes() == b"".join(pieces)
    part.discard()


def test_a_write_that_stops_short_goes_on_where_it_stopped(folder, monkeypatch):
    real = os.writev
    calls = []

    def short(fd, buffers):
        calls.append(len(buffers))
        first = memoryview(buffers[0]).cast("B")
        return real(fd, [first[: max(1, len(first) // 2)]])

    monkeypatch.setattr(os, "writev", short)
    part = folder.new_part()
    part.write([memoryview(b"abcdefgh"), memoryview(b"ij"), memoryview(b"klm")])
    assert part.path.read_bytes() == b"abcdefghijklm"
    assert len(calls) > 3
    part.discard()


def test_a_link_never_replaces_a_segment(folder):
    name = put(folder, segment_name(0, 1, ""), b"first")
    part = folder.new_part()
    part.write([memoryview(b"second")])
    with pytest.raises(FileExistsError):
        folder.link(part, name)
    folder.link(part, segment_name(1, 1, ""))
    part.discard()
    assert (folder.segments / name).read_bytes() == b"first"
    assert (folder.segments / segment_name(1, 1, "")).read_bytes() == b"second"


def test_only_segments_are_listed_and_oldest_first(folder):
    names = [put(folder, segment_name(seq, 1, "")) for seq in (12, 3, 100)]
    put(folder, "foreign.arrow")
    put(folder, ".hidden")
    assert folder.segment_names() == [names[1], names[0], names[2]]


def test_a_segments_info_comes_from_its_name_and_file(folder):
    name = put(folder, segment_name(3, 7, "pool.5"), bytes(5000))
    info = folder.segment_info(name)
    status = os.stat(folder.segments / name)
    assert (info.seq, info.rows, info.task) == (3, 7, "pool.5")
    assert (info.nbytes, info.allocated_bytes) == (5000, status.st_blocks * 512)
    assert info.published == status.st_mtime


def test_what_is_no_plain_file_is_no_segment(folder):
    assert folder.segment_info(segment_name(1, 1, "")) is None
    (folder.segments / segment_name(2, 1, "")).symlink_to("/etc/hostname")
    (folder.segments / segment_name(3, 1, "")).mkdir()
    assert folder.segment_info(segment_name(2, 1, "")) is None
    assert folder.segment_info(segment_name(3, 1, "")) is None


def test_a_retired_segment_is_debris_until_it_is_removed(folder):
    name = put(folder, segment_name(0, 1, ""), bytes(4096))
    retired = folder.retire(name)
    assert folder.segment_names() == []
    assert folder.incoming_bytes() >= 4096
    folder.remove(retired)
    folder.remove(retired)
    assert folder.incoming_bytes() == 0


def test_sweeping_takes_unlocked_parts_and_signs_and_nothing_else(folder):
    living, sign = folder.new_part(), folder.new_wait()
    dead = folder.new_part()
    dead._file.close()
    retired = folder.retire(put(folder, segment_name(0, 1, "")))
    foreign = folder.incoming / "notes.txt"
    foreign.touch()
    assert folder.sweep() == 2
    left = {path.name for path in folder.incoming.iterdir()}
    assert left == {living.path.name, sign.path.name, foreign.name}
    assert retired.name not in left
    living.discard()
    sign.discard()


def test_sweeping_leaves_foreign_files_that_merely_end_like_a_part(folder):
    foreign = folder.incoming / "movie.part"
    foreign.touch()
    assert folder.sweep() == 0
    assert foreign.exists()


def test_sweeping_takes_files_in_ranks_that_nobody_holds_and_nothing_else(folder):
    held = folder.link_ranks_file(ranks_name("job", 0, 0), b"held")
    left = folder.link_ranks_file(ranks_name("job", 0, 1), b"left")
    left.close()
    foreign = folder.ranks / "notes.txt"
    foreign.touch()
    assert folder.sweep() == 1
    assert sorted(os.listdir(folder.ranks)) == sorted([ranks_name("job", 0, 0), "notes.txt"])
    held.close()
    assert folder.sweep() == 1
    assert os.listdir(folder.ranks) == ["notes.txt"]


def test_a_file_in_ranks_is_whole_and_held_when_it_appears(folder, monkeypatch):
    seen = []
    link = os.link

    def look(source, target):
        link(source, target)
        seen.append((folder.open_ranks_file(target.name).is_held(), target.read_bytes()))

    monkeypatch.setattr(os, "link", look)
    file = folder.link_ranks_file(ranks_name("job", 0, 0), b"data")
    assert seen == [(True, b"data")]
    assert os.listdir(folder.incoming) == []
    file.append(b" and more")
    assert file.read() == b"data and more"
    file.close()
    file.close()
    assert not folder.open_ranks_file(ranks_name("job", 0, 0)).is_held()


def test_a_file_in_ranks_is_never_replaced(folder):
    name = ranks_name("job", 0, 0)
    first = folder.link_ranks_file(name, b"first")
    with pytest.raises(FileExistsError):
        folder.link_ranks_file(name, b"second")
    assert (folder.ranks / name).read_bytes() == b"first"
    assert os.listdir(folder.incoming) == []
    folder.drop_ranks_file(name)
    assert (folder.ranks / name).exists(), "it is held"
    first.close()
    folder.drop_ranks_file(name)
    folder.drop_ranks_file(name)
    assert os.listdir(folder.ranks) == []
    assert folder.open_ranks_file(name) is None


def test_a_file_in_ranks_that_somebody_sweeps_cannot_be_held(folder):
    name = ranks_name("job", 0, 0)
    folder.link_ranks_file(name, b"").close()
    sweeper = LockFile(folder.ranks / name)
    assert sweeper.try_range(0, 1, exclusive=True)
    file = folder.open_ranks_file(name)
    with pytest.raises(OSError, match="was not held"):
        file.hold()
    file.close()
    sweeper.close()


def test_waiting_writers_are_counted_while_they_live(folder):
    signs = [folder.new_wait() for _ in range(3)]
    assert folder.locked_incoming(".wait") == 3
    signs[0].discard()
    signs[1]._file.close()
    assert folder.locked_incoming(".wait") == 1
    signs[2].discard()


def test_a_quarantined_segment_lies_beside_its_reason_until_it_is_dropped(folder):
    name = put(folder, segment_name(4, 1, ""), b"bad")
    folder.isolate(name, "because")
    assert folder.segment_names() == []
    assert folder.quarantined_names() == [name]
    assert (folder.quarantine / f"{name}.reason").read_text() == "because\n"
    assert (folder.quarantine / name).read_bytes() == b"bad"
    folder.drop_quarantined(name)
    folder.drop_quarantined(name)
    assert os.listdir(folder.quarantine) == []


def test_what_everything_costs_together_is_what_the_tree_takes(folder):
    put(folder, segment_name(0, 1, ""), bytes(10_000))
    put(folder, "foreign", bytes(20_000))
    folder.isolate(put(folder, segment_name(1, 1, ""), bytes(30_000)), "reason")
    folder.claim_tasks("pool.0", 3)
    agreed = folder.link_ranks_file(ranks_name("job", 0, 0), bytes(50_000))
    part = folder.new_part()
    part.reserve(40_000)
    segments = sum(folder.segment_info(name).allocated_bytes for name in folder.segment_names())
    counted = segments + folder.incoming_bytes() + folder.other_bytes(["foreign", "gone meanwhile"])
    assert counted == disk_bytes(folder.path) + PART_SLACK_BYTES
    part.discard()
    agreed.close()


def test_task_numbers_are_claimed_once_each_and_by_pool(folder):
    assert folder.claim_tasks("a.0", 3) == 0
    assert folder.claim_tasks("a.0", 2) == 3
    assert folder.claim_tasks("b.0", 1) == 0
    assert folder.claim_tasks("a.0", 1) == 5


def test_a_part_that_somebody_locks_at_once_is_refused(folder, monkeypatch):
    monkeypatch.setattr(LockFile, "try_exclusive", lambda self: False)
    with pytest.raises(OSError, match="locked") as caught:
        folder.new_part()
    assert caught.value.errno == errno.EAGAIN
