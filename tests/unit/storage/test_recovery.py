"""Making and opening a cache, whatever happened before."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from types import SimpleNamespace

import pytest
import xxhash
from helpers import ROW, disk_bytes, flip_byte, make_cache, publish, published_ids, segment_files, seqs

import arrowcache as ac
from arrowcache import linux
from arrowcache.storage import recovery
from arrowcache.storage.folder import Folder
from arrowcache.storage.layout import MAX_SEQ, LockRecord
from arrowcache.storage.locks import LockFile
from arrowcache.storage.recovery import store_of
from arrowcache.storage.store import Store


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


def tree(path):
    """Every file below a folder with its content."""
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.fixture
def restart(monkeypatch):
    """Let the machine have restarted: another boot id from now on."""

    def now(boot_id="another-boot"):
        monkeypatch.setattr(linux, "boot_id", lambda: boot_id)

    return now


def test_opening_sweeps_debris_and_leaves_living_parts(path):
    cache = make_cache(path)
    living = cache.store.folder.new_part()
    for number in range(3):
        (path / "incoming" / f"{number:032x}.part").write_bytes(bytes(5000))
    (path / "incoming" / f"{9:032x}.wait").touch()
    ac.Cache.open(path)
    assert os.listdir(path / "incoming") == [living.path.name]
    living.discard()


def test_a_lost_counter_never_reuses_a_number(path):
    cache = make_cache(path)
    publish(cache, 3)
    cache.store.folder.isolate(segment_files(cache)[-1].name, "test")
    for lost in (b"", bytes(52)):
        (path / "cache.lock").write_bytes(lost)
        before = max(seqs(cache))
        publish(ac.Cache.open(path), 1)
        assert seqs(cache)[:2] == [0, 1]
        assert max(seqs(cache)) > max(before, 2)
        assert ac.Cache.open(path).verify() == []


def test_numbers_of_segments_that_a_power_cut_made_forget_are_never_given_out_again(path, restart):
    """A saved state names segments by their numbers: another one of that number would be other rows."""
    cache = make_cache(path)
    before = (path / "cache.lock").read_bytes()
    publish(cache, 5)
    cache.evict("1MiB")
    (path / "cache.lock").write_bytes(before)
    restart()
    publish(ac.Cache.open(path), 1)
    assert seqs(cache)[0] >= 5


def test_a_number_leaps_once_a_restart_and_never_past_the_last(path, restart):
    cache = make_cache(path)
    publish(cache, 2)
    restart()
    first = ac.Cache.open(path).stats().next_seq
    assert first == ac.Cache.open(path).stats().next_seq > 2
    cache.store.folder.write_record(LockRecord(MAX_SEQ - 1))
    assert ac.Cache.open(path).stats().next_seq == MAX_SEQ


def test_after_a_restart_a_cache_shows_as_many_evictions_as_there_were(path, restart):
    """It showed a million: the numbers leap then."""
    publish(make_cache(path), 3)
    restart()
    cache = ac.Cache.open(path)
    publish(cache, 1)
    assert "0 segments so far" in str(cache)
    cache.evict(sum(segment.allocated_bytes for segment in cache.store.segments()[:3]))
    assert seqs(cache)[0] >= 1_000_000
    assert "3 segments so far" in str(cache)
    assert "3 segments so far" in cache._repr_html_()
    assert cache.stats().evicted_segments == 3


@pytest.mark.slow
def test_what_a_power_cut_brought_back_leaves_again_where_it_does_not_fit(path, restart):
    cache = make_cache(path)
    publish(cache, 1)
    kept = {}
    while seqs(cache)[0] < 20:
        publish(cache, 1)
        kept[segment_files(cache)[-1].name] = segment_files(cache)[-1].read_bytes()
    newest = max(seqs(cache))
    for name, data in kept.items():
        (path / "segments" / name).write_bytes(data)
    assert disk_bytes(path) > 1024 * 1024
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ac.Cache.open(path)
        assert disk_bytes(path) > 1024 * 1024, "only a restart of the machine brings back what had left"
        restart()
        assert ac.Cache.open(path).verify() == []
    assert disk_bytes(path) <= 1024 * 1024
    assert seqs(cache)[-1] == newest


def test_a_counter_ahead_of_the_names_is_kept(path):
    cache = make_cache(path)
    publish(cache, 2)
    cache.evict("1MiB")
    assert ac.Cache.open(path).stats().next_seq == 2
    publish(cache, 1)
    assert seqs(cache) == [2]


def test_after_a_restart_older_segments_are_checked_before_their_first_use(path, restart):
    cache = make_cache(path)
    publish(cache, 3)
    flip_byte(segment_files(cache)[1], 3000)
    with cache.snapshot() as snapshot:  # the same boot: structure only
        assert len(snapshot.gather(range(len(snapshot)))["id"]) == 48
    restart()
    again = ac.Cache.open(path)
    with again.snapshot() as snapshot:
        with pytest.warns(RuntimeWarning, match="quarantined"), pytest.raises(ac.CorruptSegmentError):
            snapshot.gather([16])
        assert snapshot.gather([0, 47])["id"].tolist() == [0, 47]
    assert seqs(again) == [0, 2]
    publish(again, 1)
    flip_byte(segment_files(again)[-1], 3000)
    with again.snapshot() as snapshot:  # published since the restart: not suspect
        assert len(snapshot.gather([40])["id"]) == 1
    with pytest.warns(RuntimeWarning, match="quarantined"):
        assert len(again.verify()) == 1


def test_a_second_opening_after_a_restart_still_suspects_the_older_segments(path, restart):
    cache = make_cache(path)
    publish(cache, 3)
    restart()
    first, second = ac.Cache.open(path), ac.Cache.open(path)
    suspect = first.store.suspect_below()
    assert max(seqs(first)) < suspect == second.store.suspect_below()
    publish(second, 1)
    assert ac.Cache.open(path).store.suspect_below() == suspect <= max(seqs(first))
    restart("yet another")
    assert ac.Cache.open(path).store.suspect_below() > max(seqs(first))


@pytest.mark.parametrize("durable", [True, False])
def test_a_new_cache_suspects_nothing_and_a_durable_one_not_after_a_restart_either(path, restart, durable):
    cache = make_cache(path, durable=durable)
    publish(cache, 2)
    assert cache.store.suspect_below() == 0
    restart()
    assert (ac.Cache.open(path).store.suspect_below() == 0) == durable


def test_check_bytes_suspects_everything(path):
    publish(make_cache(path), 2)
    cache = ac.Cache.open(path, check="bytes")
    flip_byte(segment_files(cache)[0], 3000)
    with (
        cache.snapshot() as snapshot,
        pytest.warns(RuntimeWarning, match="quarantined"),
        pytest.raises(ac.CorruptSegmentError, match="xxh3"),
    ):
        snapshot.gather([0])


@pytest.mark.parametrize(
    "foreign", ["data.csv", "segments/photo.jpg", "incoming/movie.part", "pools/x", "ranks/y"]
)
def test_a_folder_of_something_else_is_refused_and_nothing_in_it_is_touched(path, foreign):
    file = path / foreign
    file.parent.mkdir(parents=True)
    file.write_bytes(b"precious")
    path.chmod(0o755)
    before = tree(path)
    with pytest.raises(ac.CacheFormatError, match="other files"):
        make_cache(path)
    with pytest.raises(ac.CacheFormatError, match="not a cache"):
        ac.Cache.open(path)
    assert tree(path) == before
    assert path.stat().st_mode & 0o777 == 0o755
    assert sorted(p.name for p in path.iterdir()) == [foreign.split("/")[0]]


def test_a_cache_that_lost_its_settings_is_refused_with_its_segments_untouched(path):
    publish(make_cache(path), 2)
    (path / "cache.json").unlink()
    before = tree(path)
    with pytest.raises(ac.CacheFormatError, match="segments/"):
        make_cache(path)
    assert tree(path) == before


def test_a_creation_that_was_killed_half_way_is_finished_by_the_next(path):
    path.mkdir()
    for name in ("segments", "incoming"):
        (path / name).mkdir()
    (path / "cache.lock").touch()
    (path / "incoming" / f"{1:032x}.part").write_bytes(b"{")
    cache = make_cache(path)
    publish(cache, 1)
    assert cache.verify() == []
    assert os.listdir(path / "incoming") == []


def test_a_newer_version_is_refused_and_nothing_is_touched(path):
    publish(make_cache(path), 2)
    settings = path / "cache.json"
    settings.write_text(settings.read_text().replace('"version": 4', '"version": 5'))
    (path / "incoming" / f"{1:032x}.part").touch()
    before = tree(path)
    for attempt in (lambda: ac.Cache.open(path), lambda: make_cache(path, exist_ok=True)):
        with pytest.raises(ac.CacheFormatError, match=r"version 5, and .*reads 4"):
            attempt()
    assert tree(path) == before


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(FileExistsError, match="not a folder"):
        make_cache(file)
    with pytest.raises(ac.CacheFormatError, match="not a cache"):
        ac.Cache.open(file)
    assert file.read_text() == "precious"


def test_a_dangling_link_is_refused(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        make_cache(link)


def test_a_file_system_without_working_locks_is_refused_with_the_reason(path, monkeypatch):
    publish(make_cache(path), 1)
    monkeypatch.setattr(LockFile, "try_range", lambda self, start, length, exclusive: True)
    with pytest.raises(ac.CacheFormatError, match=r"no working locks.*granted.*local disk"):
        ac.Cache.open(path)

    def refused(self, start, length, exclusive):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(LockFile, "try_range", refused)
    with pytest.raises(ac.CacheFormatError, match=r"no working locks.*No locks available"):
        ac.Cache.open(path)


def test_a_cache_is_taken_as_object_or_as_path(path, monkeypatch):
    cache = make_cache(path)
    publish(cache, 1)
    assert store_of(cache) is cache.store
    assert store_of(path).settings == store_of(str(path)).settings
    monkeypatch.chdir(path.parent)
    assert store_of("cache").folder.path == path


def test_a_cache_moved_to_another_place_is_as_it_was(path, tmp_path):
    publish(make_cache(path), 2)
    moved = tmp_path / "moved"
    shutil.move(path, moved)
    cache = ac.Cache.open(moved)
    assert published_ids(cache) == list(range(32))
    assert cache.verify() == []
    assert cache.schema == ROW


def test_a_warning_of_the_disk_that_is_an_error_leaves_nothing_behind(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="disk"):
            make_cache(path, capacity=10**18)
    assert not path.exists()


def test_a_copy_of_a_cache_that_lost_its_empty_folders_and_locks_opens(tmp_path):
    publish(make_cache(tmp_path / "cache"), 2)
    for name in ("incoming", "quarantine", "ranks", "pools"):
        (tmp_path / "cache" / name).rmdir()
    for name in ("cache.lock", "lease.lock"):
        (tmp_path / "cache" / name).unlink()
    cache = ac.Cache.open(tmp_path / "cache")
    publish(cache, 1, first=32)
    assert seqs(cache)[:2] == [0, 1]
    assert len(seqs(cache)) == 3
    assert cache.verify() == []


@pytest.mark.parametrize("text", ['{"a": 1}', '{"format": "arrowcache", "version": 2}'])
@pytest.mark.parametrize("exist_ok", [False, True])
def test_create_touches_nothing_where_cache_json_is_not_ours(tmp_path, text, exist_ok):
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    (folder / "cache.json").write_text(text)
    with pytest.raises(ac.CacheFormatError, match="folder"):
        ac.Cache.create(folder, ROW, "10MiB", segment_bytes="32KiB", exist_ok=exist_ok)
    assert os.listdir(folder) == ["cache.json"]
    assert folder.stat().st_mode & 0o777 == 0o755


def state(path):
    """All that writing, linking or removing would change."""
    return {
        str(p): (p.lstat().st_ino, p.lstat().st_mtime_ns, p.lstat().st_ctime_ns, p.lstat().st_mode)
        for p in (path, *path.rglob("*"))
    }


def _evicts_never(path):
    record = json.loads((path / "cache.json").read_text())
    del record["checksum"]
    record["evict"] = "never"
    checksum = xxhash.xxh3_64_hexdigest(json.dumps(record).encode())
    (path / "cache.json").write_text(json.dumps(record | {"checksum": checksum}))


@pytest.mark.parametrize("exist_ok", [None, True, False])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_evicts_never, "cache.json has 'evict'"),
        (lambda path: (path / "labels").mkdir(), "has labels,"),
        (lambda path: (path / "index.json").touch(), "has index.json,"),
    ],
)
def test_a_cache_of_a_newer_format_is_refused_and_nothing_in_it_is_touched(
    path, change, what, exist_ok, restart
):
    publish(make_cache(path), 2)
    change(path)
    (path / "incoming" / f"{7:032x}.part").write_bytes(b"debris, to this release")
    (path / "pools").rmdir()
    before = state(path)
    restart()
    with pytest.raises(ac.CacheFormatError, match=f"{what}.*newer one.*Nothing was touched") as caught:
        ac.Cache.open(path) if exist_ok is None else make_cache(path, exist_ok=exist_ok)
    assert "remove" not in str(caught.value)
    assert state(path) == before


def test_a_process_that_has_the_cache_open_touches_nothing_once_its_format_is_newer(path):
    cache = make_cache(path)
    publish(cache, 2)
    _evicts_never(path)
    before = state(path)
    for use in (cache.snapshot, cache.stats, lambda: cache.resize("2MiB"), lambda: cache.set_pace(None)):
        with pytest.raises(ac.CacheFormatError, match="newer"):
            use()
    assert state(path) == before


def test_what_somebody_keeps_in_a_cache_of_his_own_locks_nobody_out(path):
    publish(make_cache(path), 2)
    (path / "cache.json.bak").write_bytes((path / "cache.json").read_bytes())
    (path / ".nfs0001").write_bytes(b"x")
    (path / "lost+found").mkdir()
    (path / ".ipynb_checkpoints").mkdir()
    cache = ac.Cache.open(path)
    assert cache.verify() == []
    assert cache.stats().rows == 32
    assert {".nfs0001", "lost+found", "cache.json.bak", ".ipynb_checkpoints"} < set(os.listdir(path))


def test_the_settings_of_a_new_cache_of_the_same_schema_and_sizes_mend_damaged_ones(path, tmp_path):
    """As the message says."""
    publish(make_cache(path), 2)
    (path / "cache.json").write_text(
        (path / "cache.json").read_text().replace("headroom", "headraum", 1)[:-9]
    )
    with pytest.raises(ac.CacheFormatError, match="of a new cache of the same schema and sizes"):
        ac.Cache.open(path)
    make_cache(tmp_path / "new")
    shutil.copy(tmp_path / "new" / "cache.json", path / "cache.json")
    cache = ac.Cache.open(path)
    assert published_ids(cache) == list(range(32))
    assert cache.verify() == []


def test_a_lack_of_descriptors_is_not_called_a_lack_of_locks(tmp_path, monkeypatch):
    make_cache(tmp_path / "cache")
    opened = os.open

    def no_descriptors(path, *arguments):
        if os.path.basename(path) == "lease.lock":
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, *arguments)

    monkeypatch.setattr(os, "open", no_descriptors)
    with pytest.raises(OSError, match="Too many open files"):
        ac.Cache.open(tmp_path / "cache")


def test_a_cache_that_was_moved_while_in_use_says_so(tmp_path):
    cache = make_cache(tmp_path / "cache")
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="moved or removed"):
        cache.stats()


FOLDERS = ["", "segments", "incoming", "quarantine", "ranks", "pools"]


@pytest.mark.parametrize("lacks", [os.R_OK, os.W_OK, os.X_OK], ids=["read", "write", "enter"])
@pytest.mark.parametrize("name", [*FOLDERS, "cache.lock", "lease.lock", "usage"])
def test_who_may_use_a_part_only_is_refused_by_what_he_may_not(path, monkeypatch, name, lacks):
    make_cache(path)
    monkeypatch.setattr(os, "access", lambda file, right, **_: not (file == path / name and right & lacks))
    if name in FOLDERS or lacks != os.X_OK:
        with pytest.raises(PermissionError) as caught:
            ac.Cache.open(path)
        assert caught.value.filename == str(path / name)
    else:
        ac.Cache.open(path)
    status = SimpleNamespace(f_flag=os.ST_RDONLY)
    store = Store(Folder(path), Folder(path).read_settings())
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    recovery.require_access(store)  # a disk that nobody may write to is an error of its own


@pytest.mark.parametrize(("user", "is_refused"), [(0, False), ("owner", False), ("another", True)])
def test_a_sticky_folder_is_its_owners(path, monkeypatch, user, is_refused):
    store = make_cache(path).store
    (path / "pools").chmod(0o1770)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: {"owner": owner, "another": owner + 1}.get(user, 0))
    if is_refused:
        with pytest.raises(PermissionError, match="sticky") as caught:
            recovery.require_access(store)
        assert caught.value.filename == str(path / "pools")
    else:
        recovery.require_access(store)


@pytest.mark.parametrize("use", ["nothing", "a segment", "a writer", "a file", "a file above", "elsewhere"])
def test_a_cache_that_was_made_in_vain_goes_with_all_that_was_made_for_it(tmp_path, use):
    path = tmp_path / "a" / "b" / "cache"
    made = recovery.new_folders(path)
    assert made == [path, path.parent, path.parent.parent]
    cache = make_cache(path)
    store, writer = cache.store, None
    if use == "a segment":
        publish(cache, 1)
    elif use == "a writer":
        writer = cache.writer()
    elif use == "a file":
        (path / "notes").touch()
    elif use == "a file above":
        (tmp_path / "a" / "notes").touch()
    elif use == "elsewhere":
        path.rename(tmp_path / "elsewhere")
    is_gone = use in ("nothing", "a file above", "elsewhere")
    assert recovery.remove_unused(store, made) == is_gone
    assert path.exists() != is_gone
    assert (tmp_path / "a").exists() == (use != "nothing")
    if writer is not None:
        writer.close()
