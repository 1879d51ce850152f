"""The one place where files appear and vanish."""

from __future__ import annotations

import errno
import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import DEADLINE_SECONDS, disk_bytes, open_files
from quick import first_is_quick

import arrowcache as ac
from arrowcache.storage.folder import Folder, Rights
from arrowcache.storage.layout import LockRecord, ranks_name, segment_name
from arrowcache.storage.locks import LockFile
from arrowcache.storage.settings import PART_SLACK_BYTES, Settings

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


def test_a_part_that_is_discarded_has_no_bytes_any_more_when_its_name_goes(folder, monkeypatch):
    """It had, until it was closed: meanwhile another writer filled the disk beyond the capacity."""
    part, unlink, bytes_then = folder.new_part(), Path.unlink, []

    def noting(path, **options):
        bytes_then.append(os.stat(path).st_blocks * 512)
        unlink(path, **options)

    part.reserve(50_000)
    part.allocate(50_000)
    monkeypatch.setattr(Path, "unlink", noting)
    part.discard()
    assert bytes_then == [0]
    assert os.listdir(folder.incoming) == []


def test_a_part_that_became_a_segment_keeps_its_bytes_when_it_is_discarded(folder):
    part, name = folder.new_part(), segment_name(3, 1, "")
    part.write([memoryview(b"content")])
    folder.link(part, name)
    part.discard()
    part.discard()
    assert (folder.segments / name).read_bytes() == b"content"


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
    part.allocate(1 << 20)
    assert part.path.stat().st_size == 1 << 20
    assert disk_bytes(folder.path) >= before + (1 << 20)
    assert folder.incoming_bytes() >= (1 << 20) + PART_SLACK_BYTES
    part.discard()
    part.discard()
    assert os.listdir(folder.incoming) == []
    assert folder.incoming_bytes() == 0


def test_a_part_holds_exactly_what_was_written_however_many_pieces(folder):
    part = folder.new_part()
    pieces = [bytes([i % 256]) * (i % 7) for i in range(2000)]
    part.allocate(sum(map(len, pieces)))
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


def test_what_is_removed_without_the_lock_counts_until_the_disk_has_it_back(folder):
    class Watched(Folder):
        def remove(self, retired):
            super().remove(retired)
            counted.append(self.incoming_bytes())

    counted = []
    retired = folder.retire(put(folder, segment_name(0, 1, ""), bytes(8192)))
    Watched(folder.path).remove_unlocked(retired)
    assert counted == [8192]
    assert folder.incoming_bytes() == 0


def test_a_change_of_the_counts_leaves_no_file_open(folder):
    folder.complete()
    before = open_files()
    folder.change_usage(8, 4, lambda old: bytes(reversed(b"abcd")))
    folder.change_usage(8, 4, lambda old: old[::-1])
    assert folder.read_usage(8, 4) == b"abcd"
    assert open_files() == before


def test_sweeping_takes_unlocked_parts_and_signs_and_nothing_else(folder):
    living, sign = folder.new_part(), folder.new_wait()
    dead = folder.new_part()
    dead.file.close()
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
    signs[1].file.close()
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
    folder.take_tasks("pool.0", 3)
    agreed = folder.link_ranks_file(ranks_name("job", 0, 0), bytes(50_000))
    part = folder.new_part()
    part.allocate(40_000)
    segments = sum(folder.segment_info(name).allocated_bytes for name in folder.segment_names())
    counted = segments + folder.incoming_bytes() + folder.other_bytes(["foreign", "gone meanwhile"])
    assert counted == disk_bytes(folder.path) + PART_SLACK_BYTES
    part.discard()
    agreed.close()


def test_task_numbers_are_taken_once_each_and_by_pool(folder):
    assert folder.take_tasks("a.0", 3) == 0
    assert folder.take_tasks("a.0", 2) == 3
    assert folder.take_tasks("b.0", 1) == 0
    assert folder.take_tasks("a.0", 1) == 5


def test_a_part_that_somebody_locks_at_once_is_refused(folder, monkeypatch):
    monkeypatch.setattr(LockFile, "try_exclusive", lambda self: False)
    with pytest.raises(OSError, match="locked") as caught:
        folder.new_part()
    assert caught.value.errno == errno.EAGAIN


def make_odd(path, kind, target):
    """Something that is no plain file: a link, a pipe, a socket or a folder."""
    if kind == "link":
        path.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        parent = os.open(path.parent, os.O_PATH)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{parent}/{path.name}")  # the path of a socket is short
        os.close(parent)
    else:
        path.mkdir()


ODD = ["link", "pipe", "socket", "folder"]


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["cache.json", "cache.lock", "lease.lock"])
def test_a_caches_own_file_that_is_no_plain_one_is_refused_without_a_wait(folder, target, name, kind):
    (folder.path / name).unlink()
    make_odd(folder.path / name, kind, target)
    said = "cache.json" if name == "cache.json" else f"{name} is a {kind}"
    with pytest.raises(ac.CacheFormatError, match=said):
        ac.Cache.open(folder.path)


@pytest.mark.parametrize("kind", ["link", "file"])
@pytest.mark.parametrize("name", ["segments", "incoming", "quarantine", "ranks", "pools"])
def test_a_folder_that_leads_elsewhere_is_refused_and_nothing_there_is_touched(folder, tmp_path, name, kind):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    debris = elsewhere / f"{'0' * 32}.part"
    debris.touch()
    (folder.path / name).rmdir()
    if kind == "link":
        (folder.path / name).symlink_to(elsewhere)
    else:
        (folder.path / name).touch()
    with pytest.raises(ac.CacheFormatError, match=name):
        ac.Cache.open(folder.path)
    assert debris.exists()


@pytest.mark.parametrize("kind", ODD)
def test_what_merely_has_the_name_of_debris_or_of_a_segment_keeps_nobody_from_working(folder, target, kind):
    odd = [
        folder.incoming / f"{'0' * 32}.part",
        folder.incoming / f"{'0' * 32}.wait",
        folder.ranks / ranks_name("run", 0, 0),
        folder.segments / segment_name(0, 16, ""),
        folder.quarantine / segment_name(1, 16, ""),
    ]
    for path in odd:
        make_odd(path, kind, target)
    assert folder.sweep() == 0
    assert folder.quarantined_names() == []
    with ac.Cache.open(folder.path) as cache:
        assert (cache.stats().segments, cache.stats().waiting_writers) == (0, 0)
        with cache.writer(on_full="raise") as writer:
            writer.append(x=1)
        assert [segment.rows for segment in cache.store.segments()] == [1]
        assert [problem.name for problem in cache.verify()] == [f"segments/{odd[3].name}"]
    assert all(os.path.lexists(path) for path in odd), "only what this library made is ever deleted"


def test_a_link_is_never_written_through(folder, target):
    (folder.pools / "pool.0").symlink_to(target)
    with pytest.raises(OSError, match="symbolic"):
        folder.take_tasks("pool.0", 1)
    name = put(folder, segment_name(3, 1, ""))
    (folder.quarantine / f"{name}.reason").symlink_to(target)
    folder.isolate(name, "why")
    assert (folder.quarantine / f"{name}.reason").read_text() == "why\n"
    folder.cache_lock.unlink()
    folder.cache_lock.symlink_to(target)
    with pytest.raises(OSError, match="symbolic"):
        folder.write_record(LockRecord(1))
    with pytest.raises(OSError, match="symbolic"):
        LockFile(folder.cache_lock)


def test_tasks_to_be_drawn_again_are_listed_lowest_first_and_once(folder):
    assert folder.returned_tasks("pool.0") == []
    assert folder.take_tasks("pool.0", 10) == 0
    assert folder.returned_tasks("pool.0") == []
    folder.return_tasks("pool.0", [7, 2])
    folder.return_tasks("pool.0", [4, 2])
    assert folder.returned_tasks("pool.0") == [2, 4, 7]
    for number in (2, 4, 7):
        folder.end_task("pool.0", number)
    assert (folder.pools / "pool.0").read_bytes() == (10).to_bytes(8, "little")


def test_a_release_that_knows_no_tasks_to_be_drawn_again_goes_on_with_the_next_number(folder):
    """It reads and writes the first eight bytes of the file: so does `take_tasks` today, as in 0.1.0."""
    folder.take_tasks("pool.0", 10)
    before = (folder.pools / "pool.0").read_bytes()
    assert before == (10).to_bytes(8, "little"), "what a pool that returned nothing leaves is as it was"
    folder.return_tasks("pool.0", [2, 7])
    assert folder.take_tasks("pool.0", 5) == 10
    assert folder.returned_tasks("pool.0") == [2, 7]
    assert folder.take_tasks("pool.0", 1) == 15


def test_tasks_to_be_drawn_again_never_take_more_than_eight_blocks(folder):
    folder.take_tasks("pool.0", 8000)
    folder.return_tasks("pool.0", range(5000))
    assert (folder.pools / "pool.0").stat().st_size == 8 * 4096
    folder.end_task("pool.0", 0)
    folder.take_tasks("pool.0", 1, returned=True)
    with pytest.raises(
        ac.CacheFormatError, match=r"4095 tasks of pool pool\.0 were begun and never published"
    ):
        folder.take_tasks("pool.0", 1, returned=True)
    assert folder.returned_tasks("pool.0") == [*range(1, 4095), 8000]
    assert folder.take_tasks("pool.0", 1) == 8001


def test_a_task_may_be_among_those_to_be_drawn_again_from_its_start_until_it_ends(folder):
    folder.end_task("pool.0", 0)
    assert folder.take_tasks("pool.0", 3, returned=True) == 0
    assert folder.take_tasks("pool.0", 1) == 3
    assert folder.take_tasks("pool.0", 1, returned=True) == 4
    for ended, left in [(3, [0, 1, 2, 4]), (1, [0, 2, 4]), (4, [0, 2]), (0, [2]), (2, [])]:
        folder.end_task("pool.0", ended)
        assert folder.returned_tasks("pool.0") == left
    assert (folder.pools / "pool.0").read_bytes() == (5).to_bytes(8, "little")


def test_who_dies_while_a_task_is_left_out_leaves_out_no_other(folder, monkeypatch):
    folder.take_tasks("pool.0", 4, returned=True)

    def refused(*_):
        raise OSError(errno.EIO, "stopped")

    monkeypatch.setattr(os, "ftruncate", refused)
    with pytest.raises(OSError, match="stopped"):
        folder.end_task("pool.0", 2)
    assert folder.returned_tasks("pool.0") == [0, 1, 3]


@pytest.mark.parametrize("numbers", [(0, 0), (0, 0, 0), (5, 7), (5, 4, 4, 3), (5, 2, 4), (5, 2**63)])
def test_numbers_that_nobody_returned_are_not_drawn_again(folder, numbers):
    """As a power cut leaves them: zeros, or some of them."""
    data = b"".join(number.to_bytes(8, "little") for number in numbers)
    (folder.pools / "pool.0").write_bytes(data)
    assert folder.returned_tasks("pool.0") == []
    (folder.pools / "pool.0").write_bytes(data[:-3])
    assert set(folder.returned_tasks("pool.0")) <= {*numbers[1:-1]}


STRANGE = [
    b"..arrow", b"...", b"a\nb", b"\n", b"\xff\xfe.arrow", b"x" * 255, b"-rf", b"$(id)", b"%s", b"\x1b[31m",
    f"{7:020d}-16-.arrow\n".encode(), f"{7:020d}-16-..%2f..%2fx.arrow".encode(),
    f"{7:020d}-16-{'x' * 201}.arrow".encode(), f"{7:020d}-16-\xe9.arrow".encode("latin-1"),
    f"{'0' * 32}.part\n".encode(), f"{'0' * 32}.wait\n".encode(), f"{'A' * 32}.part".encode(),
    f"run-{'0' * 16}-0-0\n".encode(), f"run-{'0' * 16}-0-0.reason".encode(), "\u0661-1-.arrow".encode(),
]  # fmt: skip


@pytest.mark.parametrize("where", ["segments", "incoming", "quarantine", "ranks", "pools"])
def test_strange_names_are_passed_over_never_followed_and_never_deleted(folder, target, where):
    strange = [os.fsencode(folder.path / where) + b"/" + name for name in STRANGE]
    for number, path in enumerate(strange):
        if number % 3 == 0:
            os.symlink(target, path)
        elif number % 3 == 1:
            os.mkdir(path)
        else:
            with open(path, "wb") as file:
                file.write(b"precious")
    with ac.Cache.open(folder.path) as cache:
        with cache.writer(on_full="raise") as writer:
            writer.append(x=1)
        with cache.snapshot() as snapshot:
            assert snapshot.gather([0])["x"].tolist() == [1]
        problems = cache.verify()
        assert len(problems) == (len(STRANGE) if where == "segments" else 0)
        for problem in problems:
            assert str(problem).isprintable(), "a name in a message is one line, and can be printed"
        cache.stats()
        cache.resize("11MB")
        assert cache.evict("1MB") > 0
    assert all(os.path.lexists(path) for path in strange)


def test_a_folder_of_strange_names_is_refused_in_words_that_can_be_printed(tmp_path):
    for name in STRANGE:
        (tmp_path / os.fsdecode(name)).touch()
    with pytest.raises(ac.CacheFormatError, match="other files") as caught:
        ac.Cache.create(tmp_path, {"x": ac.Tensor("int64")}, "10MB", segment_bytes="1MB")
    assert str(caught.value).isprintable()
    assert len(os.listdir(tmp_path)) == len(STRANGE)


@pytest.mark.slow
@pytest.mark.parametrize("name", first_is_quick([b"caf\xe9", b"a\nb", b"%s {x} 'y'", b"x" * 250]))
def test_a_cache_works_under_any_name(tmp_path, name):
    path = tmp_path / os.fsdecode(name)
    cache = ac.Cache.create(path, {"x": ac.Tensor("int64")}, "10MB", segment_bytes="1MB")
    with cache.writer() as writer:
        writer.extend(x=range(100))
    with ac.Loader(path, 10, transform=dict, workers=1) as loader:
        assert sum(len(batch["x"]) for batch in loader) == 100
    with cache.snapshot() as snapshot:
        assert len(snapshot.table()) == 100
    with ThreadPoolExecutor(1) as executor:
        options = {"workers": 1, "executor": executor, "segments": 1, "progress": False}
        with ac.SamplerPool(cache, lambda rng: [{"x": 1}] * 100, **options) as pool:
            pool.wait(timeout=DEADLINE_SECONDS)
    assert cache.verify() == []


@pytest.mark.parametrize("umask", [0, 0o277, 0o777])
def test_whatever_the_umask_folders_are_0700_and_files_0600(tmp_path, umask):
    before = os.umask(umask)
    try:
        cache = ac.Cache.create(tmp_path / "cache", {"x": ac.Tensor("int64")}, "10MB", segment_bytes="1MB")
        with cache.writer() as writer:
            writer.append(x=1)
        folder = cache.store.folder
        with cache.store.locked():
            folder.take_tasks("pool.0", 1)
            folder.isolate(folder.segment_names()[0], "why")
            held = folder.link_ranks_file(ranks_name("run", 0, 0), b"data")
        sign = folder.new_wait()
        with cache.writer() as writer:
            writer.append(x=2)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (cache.path, *cache.path.rglob("*"))}
    held.close()
    sign.discard()
    assert len(modes) == 6 + 4 + 6  # folders; settings, locks, counts; what was just made
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("name", ["cache.json", "cache.lock", "lease.lock", "pools/pool.0"])
def test_a_file_of_any_length_takes_no_memory(folder, name):
    with open(folder.path / name, "ab") as file:
        file.truncate(1 << 42)  # without blocks
    if name == "cache.json":
        with pytest.raises(ac.CacheFormatError, match="damaged"):
            ac.Cache.open(folder.path)
        return
    with ac.Cache.open(folder.path) as cache, cache.writer() as writer:
        writer.append(x=1)
    assert folder.take_tasks("pool.0", 1) == 0


@pytest.mark.parametrize(
    ("before", "after", "rights"),
    [
        (0o755, 0o700, (0o600, 0o700)),
        (0o777, 0o700, (0o600, 0o700)),  # as a umask of 0 makes it: on nobody's purpose
        (0o770, 0o770, (0o660, 0o770)),
        (0o2775, 0o2770, (0o660, 0o2770)),
        (0o2750, 0o700, (0o600, 0o700)),
    ],
)
def test_a_folder_that_was_made_for_a_group_stays_the_groups_and_any_other_is_private(
    tmp_path, before, after, rights
):
    tmp_path.chmod(before)
    folder = Folder(tmp_path)
    folder.create()
    group = os.getgid() if rights[0] == 0o660 else None
    assert stat.S_IMODE(tmp_path.stat().st_mode) == after
    assert folder.rights() == (*rights, group)
    assert stat.S_IMODE(folder.segments.stat().st_mode) == rights[1]
    assert stat.S_IMODE(folder.usage.stat().st_mode) == rights[0]


def test_a_folder_of_another_users_group_keeps_its_mode(tmp_path, monkeypatch):
    tmp_path.chmod(0o2775)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    Folder(tmp_path).create()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o2775


def test_a_new_file_gets_the_caches_group_unless_it_has_it(folder, monkeypatch):
    given = []
    monkeypatch.setattr(os, "chown", lambda target, *ids: given.append(ids))
    folder.path.chmod(0o770)
    folder.new_part().discard()
    assert given == []
    monkeypatch.setattr(Folder, "rights", lambda self: Rights(0o660, 0o770, os.getgid() + 1))
    folder.new_part().discard()
    folder.take_tasks("pool.0", 1)
    folder.ranks.rmdir()
    folder.complete()
    assert given == [(-1, os.getgid() + 1)] * 3
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    (folder.pools / "pool.0").chmod(0o600)
    folder.take_tasks("pool.0", 1)
    assert len(given) == 3, "it is another user's, who made it"
    assert stat.S_IMODE((folder.pools / "pool.0").stat().st_mode) == 0o600


def test_only_of_what_may_be_another_users_is_asked_whether_it_may_be_read(folder, monkeypatch):
    name = put(folder, segment_name(0, 1, ""))
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert folder.segment_info(name).rows == 1
    (folder.segments / name).chmod(0o044)
    with pytest.raises(PermissionError):
        folder.segment_info(name)
    (folder.segments / name).chmod(0o600)
    for more in (1, -1):
        monkeypatch.setattr(os, "geteuid", lambda more=more: os.getuid() + more)
        with pytest.raises(PermissionError):
            folder.segment_info(name)
    monkeypatch.setattr(os, "access", lambda *_, **__: True)
    assert folder.segment_info(name).rows == 1


@pytest.mark.parametrize(
    ("do", "synced"),
    [
        (lambda folder: folder.write_settings(SETTINGS), ["part", "cache"]),
        (lambda folder: folder.sync_record(), ["cache.lock"]),
        (lambda folder: folder.sync_segments(), ["segments"]),
        (lambda folder: folder.sync_isolated(), ["quarantine", "segments"]),  # never in neither
        (lambda folder: folder.sync_tasks("pool.0"), ["pool.0", "pools"]),
        (lambda folder: Folder(folder.path / "a" / "b" / "c").create(), ["b", "a", "cache"]),
    ],
    ids=["settings", "record", "segments", "isolated", "tasks", "folders"],
)
def test_what_is_to_outlast_a_power_cut_is_synced_in_its_order(folder, monkeypatch, do, synced):
    folder.take_tasks("pool.0", 1)
    found = []
    monkeypatch.setattr(os, "fsync", lambda fd: found.append(os.readlink(f"/proc/self/fd/{fd}")))
    do(folder)
    assert [
        os.path.basename(path).rpartition(".part")[1][1:] or os.path.basename(path) for path in found
    ] == synced


def test_incoming_files_count_by_what_they_take_or_have_reserved_and_what_is_unlinked_once(folder):
    one, other, third, gone = (f"{number:032x}" for number in range(4))
    (folder.incoming / f"{one}.part").write_bytes(bytes(8192))
    for name, nbytes in [(f"{other}.part", 10_001), (f"{third}.wait", 0), (f"{gone}.freed", 4096)]:
        (folder.incoming / name).touch()
        os.truncate(folder.incoming / name, nbytes)
    (folder.incoming / f"{gone}.gone").write_bytes(bytes(12_288))
    assert folder.incoming_bytes() == 8192 + 10_001 + 12_288 + 2 * PART_SLACK_BYTES


def test_what_a_link_leads_to_costs_nothing(folder, tmp_path):
    (tmp_path / "large").write_bytes(bytes(1 << 20))
    (folder.quarantine / "link").symlink_to(tmp_path / "large")
    assert folder.other_bytes([]) == disk_bytes(folder.path)


def test_the_disk_is_asked_where_the_folder_will_be(tmp_path, monkeypatch):
    asked = []
    status = SimpleNamespace(f_bavail=7, f_bfree=9, f_frsize=512, f_bsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: asked.append(path) or status)
    assert Folder(tmp_path / "a" / "b").free_bytes() == 7 * 512
    assert asked == [tmp_path]


def test_the_longest_wait_began_when_the_oldest_sign_was_made_whose_writer_lives(folder):
    assert folder.waiting_since() is None
    signs = [folder.new_wait() for _ in range(3)]
    for sign, began in zip(signs, (50, 30, 40), strict=True):
        os.utime(sign.path, (began, began))
    signs[1].file.close()
    assert folder.waiting_since() == 40
    signs[2].begin_anew()
    assert folder.waiting_since() == 50
    for sign in signs:
        sign.discard()


@pytest.mark.parametrize("call", ["ftruncate", "unlink"])
def test_a_part_that_cannot_be_emptied_or_unlinked_is_let_go_of_all_the_same(folder, monkeypatch, call):
    def refused(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    part = folder.new_part()
    with monkeypatch.context() as patch:
        if call == "unlink":
            patch.setattr(Path, call, refused)
        else:
            patch.setattr(os, call, refused)
        part.discard()
    assert part.file.is_closed
    assert part.path.exists() == (call == "unlink")
    assert folder.sweep() == (call == "unlink")


def test_where_no_descriptor_is_left_what_goes_is_unlinked_at_once(folder, monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    retired = folder.retire(put(folder, segment_name(0, 1, "")))
    monkeypatch.setattr(os, "open", refused)
    folder.remove_unlocked(retired)
    assert not retired.exists()


def test_any_number_of_ranks_hold_a_file_by_its_first_byte(folder):
    files = [folder.link_ranks_file(ranks_name("job", 0, 0), b"")]
    files.append(folder.open_ranks_file(ranks_name("job", 0, 0)))
    files[1].hold()
    with LockFile(folder.ranks / ranks_name("job", 0, 0)) as other:
        assert other.conflict(0, 9) == range(1)
    for file in files:
        assert file.is_held() == (file is files[0])
        file.close()


def test_a_disk_that_fails_is_not_a_cache_that_is_none(folder, monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(OSError, match="Input/output"):
        folder.read_settings()


def test_a_pools_numbers_begin_at_the_least_that_is_asked_for_and_end_somewhere(folder):
    assert [folder.take_tasks("pool.0", 2, least) for least in (9, 3, 11, 20)] == [9, 11, 13, 20]
    (folder.pools / "pool.0").write_bytes((2**62).to_bytes(8, "little"))
    assert folder.take_tasks("pool.0", 1) == 2**62
    with pytest.raises(ac.CacheFormatError, match="damaged"):
        folder.take_tasks("pool.0", 1)


def test_a_reason_that_is_somebodys_folder_keeps_no_segment_in_quarantine(folder):
    name = put(folder, segment_name(4, 1, ""))
    folder.isolate(name, "because")
    reason = folder.quarantine / f"{name}.reason"
    reason.unlink()
    reason.mkdir()
    folder.drop_quarantined(name)
    assert os.listdir(folder.quarantine) == [reason.name]


def test_only_names_that_a_newer_release_may_have_are_refused_and_three_are_told(folder):
    for name in ("zeta", "alpha.lock", "Notes.md", "beta.json", "gamma", "lost+found"):
        (folder.path / name).touch()
    with pytest.raises(ac.CacheFormatError, match=r"has alpha\.lock, beta\.json, gamma, which"):
        folder.require_known()
