"""Two users and one cache: a group shares all of it, or it is refused as a whole."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy.random  # noqa: F401  # here: the others may not read where Python is, if that is in root's home
import pyarrow.dataset  # noqa: F401  # likewise
import pytest
from helpers import append_rows, held_rank_files, ids_of, in_child, make_cache, publish, sample, seqs

import arrowcache as ac
from arrowcache import linux
from arrowcache.storage.recovery import store_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two users")

ONE, TWO, STRANGER, GROUP = 60001, 60002, 60003, 60009
CHMOD = r"chgrp -R GROUP and chmod -R g\+rwX"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder below which all may do as the modes there say; pytest's own is root's alone."""
    with tempfile.TemporaryDirectory(prefix="arrowcache-test-") as name:
        os.chmod(name, 0o777)
        yield Path(name)


def as_user(user: int, body: Callable[[], None], *groups: int, umask: int = 0o022) -> None:
    """Run a function in a child that is somebody else, whose own group nobody shares."""

    def become() -> None:
        _become(user, groups, umask)
        body()

    with in_child(become):
        pass


def _become(user: int, groups: tuple[int, ...], umask: int = 0o022) -> None:
    os.setgroups(groups)
    os.setgid(user)
    os.setuid(user)
    os.umask(umask)


def made_for_the_group(path: Path, mode: int) -> None:
    path.mkdir()
    os.chown(path, ONE, GROUP)
    path.chmod(mode)


def modes_and_groups(path: Path) -> set[tuple[bool, int, int]]:
    """(is a folder, mode, group) of all below a cache's folder."""
    return {(p.is_dir(), stat.S_IMODE(p.stat().st_mode), p.stat().st_gid) for p in path.rglob("*")}


def state(path: Path) -> dict[str, tuple[int, ...]]:
    """All that writing, linking or removing would change."""
    stats = {str(p): p.lstat() for p in (path, *path.rglob("*"))}
    return {p: (s.st_ino, s.st_mtime_ns, s.st_ctime_ns, s.st_mode) for p, s in stats.items()}


def use_all(path: Path) -> None:
    """Everything that a user may do to a cache."""
    with ac.Cache.open(path) as cache:
        if cache.stats().evicted_segments:
            cache.evict("256KiB")  # more than the headroom
        before = cache.stats()
        with ac.Loader(cache, 16) as loader:
            trained = ids_of(loader)
        assert len(trained) == before.rows
        with cache.snapshot() as snapshot:
            assert sorted(snapshot.gather(range(len(snapshot)))["id"].tolist()) == sorted(trained)
        while cache.stats().evicted_segments < before.evicted_segments + 3:
            publish(cache, 5)
        cache.set_pace(ac.Pace(min_rows=2 + (cache.pace.min_rows if cache.pace else 0)))
        cache.resize(cache.stats().capacity_bytes + 4096)
        with cache.store.locked():
            cache.store.folder.take_tasks("pool.0", 1)
            cache.store.folder.isolate(cache.store.segments()[0].name, "a test")
        assert cache.stats().quarantined >= 1
        assert cache.verify() == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", [0o2770, 0o770, 0o2775])
def test_a_group_shares_a_cache_that_is_made_in_its_folder(place, mode):
    """A second user trained on the readable half, and found the rest corrupt."""
    path = place / "cache"
    made_for_the_group(path, mode)

    def make() -> None:
        publish(make_cache(path), 2)
        use_all(path)

    as_user(ONE, make, GROUP, umask=0o077)
    as_user(TWO, lambda: use_all(path), GROUP, umask=0o077)
    as_user(ONE, lambda: use_all(path), GROUP)
    as_user(TWO, lambda: use_all(path), GROUP)
    assert stat.S_IMODE(path.stat().st_mode) == mode & ~0o007
    folders = 0o770 | mode & stat.S_ISGID
    assert modes_and_groups(path) == {(True, folders, GROUP), (False, 0o660, GROUP)}
    assert {p.stat().st_uid for p in path.rglob("*")} == {ONE, TWO}
    assert store_of(path).folder.take_tasks("pool.0", 0) == 4


def test_an_existing_cache_is_shared_as_the_message_says_while_its_owner_has_it_open(place):
    path = place / "cache"

    def share() -> None:
        with ac.Cache.open(path) as cache:
            publish(cache, 1)
            subprocess.run(["chgrp", "-R", str(GROUP), path], check=True)
            subprocess.run(["chmod", "-R", "g+rwX", path], check=True)
            publish(cache, 1)

    as_user(ONE, lambda: publish(make_cache(path), 1))
    as_user(TWO, lambda: refused(path, CHMOD), GROUP)
    as_user(ONE, share, GROUP)
    as_user(TWO, lambda: use_all(path), GROUP)
    as_user(ONE, lambda: use_all(path), GROUP)
    assert modes_and_groups(path) == {(True, 0o770, GROUP), (False, 0o660, GROUP)}


def refused(path: Path, why: str = CHMOD) -> None:
    with pytest.raises(PermissionError, match=why):
        ac.Cache.open(path)


@pytest.fixture
def shared(place) -> Path:
    """A cache of the group, with 20 segments of user ONE."""
    path = place / "cache"
    made_for_the_group(path, 0o2770)
    as_user(ONE, lambda: publish(make_cache(path), 20), GROUP)
    return path


@pytest.mark.slow
def test_the_second_user_cleans_up_after_the_first_and_after_a_restart_of_the_machine(
    shared, place, monkeypatch
):
    def die_while_writing() -> None:
        cache = ac.Cache.open(shared)
        part, _ = cache.store.folder.new_part(), cache.store.folder.new_wait()
        part.reserve(5000)
        with cache.store.locked():
            cache.store.folder.link_ranks_file(f"run-{0:016x}-0-0", b"what they agreed on")
        os._exit(0)

    def recover() -> None:
        monkeypatch.setattr(linux, "boot_id", lambda: "another boot")
        with ac.Cache.open(shared) as cache:
            assert os.listdir(shared / "incoming") == []
            assert held_rank_files(cache) == []
            assert cache.store.suspect_below() > 10**6
            with ac.Loader(cache, 16) as loader:
                assert sorted(ids_of(loader)) == list(range(320))
            publish(cache, 1)
            assert cache.verify() == []

    as_user(ONE, die_while_writing, GROUP)
    assert len(os.listdir(shared / "incoming")) == 2
    as_user(TWO, recover, GROUP)
    as_user(ONE, lambda: use_all(shared), GROUP)


def test_ranks_of_two_users_agree_and_whoever_is_waited_for_is_unknown_to_the_other(shared):
    ready, begun = os.pipe()
    over, end = os.pipe()

    def first_rank() -> None:
        _become(ONE, (GROUP,))
        with ac.Loader(shared, 16, rank=0, world_size=2, run_id="run", shuffle=None) as loader:
            batches = iter(loader)
            first = ids_of([next(batches)])
            os.write(begun, b"x")
            os.read(over, 1)
            assert first + ids_of(batches) == [n for n in range(320) if n // 16 % 2 == 0]

    def second_rank() -> None:
        os.read(ready, 1)
        with ac.Loader(shared, 16, rank=1, world_size=2, run_id="run", shuffle=None) as loader:
            assert ids_of(loader) == [n for n in range(320) if n // 16 % 2]
        with ac.Cache.open(shared) as cache:
            assert len(held_rank_files(cache)) == 1
            writer = cache.writer(on_full="raise")
            with pytest.raises(ac.CacheFullError, match="the oldest of them by an unseen process"):
                append_all(writer)
            writer.abort()

    with in_child(first_rank):
        try:
            as_user(TWO, second_rank, GROUP)
        finally:
            os.write(end, b"x")
    for fd in (ready, begun, over, end):
        os.close(fd)


def append_all(writer) -> None:
    for number in range(1000):
        writer.append(sample(number))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.chmod(0o2750),
        lambda path: (path / "cache.lock").chmod(0o640),
        lambda path: (path / "lease.lock").chmod(0o600),
        lambda path: (path / "usage").chmod(0o600),
        lambda path: (path / "cache.json").chmod(0o600),
        lambda path: (path / "segments").chmod(0o2700),
        lambda path: (path / "incoming").chmod(0o2750),
        lambda path: sorted((path / "segments").iterdir())[7].chmod(0o600),  # as 0.1.0 publishes
    ],
    ids=["reader", "cache.lock", "lease.lock", "usage", "cache.json", "segments", "incoming", "a segment"],
)
def test_a_cache_that_a_user_can_use_only_in_part_is_refused_and_nothing_is_touched(shared, change):
    def refused_anew_and_open() -> None:
        os.read(ready, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            refused(shared)

    ready, begun = os.pipe()
    (shared / "incoming" / f"{7:032x}.part").write_bytes(b"debris")
    (shared / "ranks").rmdir()
    change(shared)
    before = state(shared)
    os.write(begun, b"x")
    as_user(TWO, refused_anew_and_open, GROUP)
    as_user(STRANGER, lambda: refused(shared))
    assert state(shared) == before
    for fd in (ready, begun):
        os.close(fd)


def test_who_has_a_cache_open_trains_on_no_part_of_it_once_he_may_not_read_all(shared):
    """A release that knows no groups publishes beside this one."""

    def goes_on() -> None:
        _become(TWO, (GROUP,))
        with ac.Cache.open(shared) as cache, ac.Loader(cache, 16) as loader:
            assert len(ids_of(loader)) == 320
            os.write(begun, b"x")
            os.read(over, 1)
            before = state(shared)
            with pytest.raises(PermissionError, match=CHMOD):
                ids_of(loader)
            for use in (cache.snapshot, cache.dataset, cache.stats, cache.verify):
                with pytest.raises(PermissionError, match=CHMOD):
                    use()
            with pytest.raises(PermissionError, match=CHMOD):
                append_rows(cache, range(16))
            assert "chgrp" in str(cache)
            assert state(shared)[str(shared / "segments")] == before[str(shared / "segments")]
        assert os.listdir(shared / "quarantine") == []

    ready, begun = os.pipe()
    over, end = os.pipe()
    with in_child(goes_on):
        os.read(ready, 1)
        as_user(ONE, lambda: publish(ac.Cache.open(shared), 1), GROUP)
        max((shared / "segments").iterdir()).chmod(0o600)
        os.write(end, b"x")
    for fd in (ready, begun, over, end):
        os.close(fd)
    assert seqs(ac.Cache.open(shared)) == list(range(21))


def test_a_sticky_folder_in_which_only_owners_evict_is_refused_to_the_others(shared):
    (shared / "segments").chmod(0o3770)
    as_user(TWO, lambda: refused(shared, r"sticky bit.*chmod -R -t"), GROUP)
    as_user(ONE, lambda: ac.Cache.open(shared).close(), GROUP)


def test_who_is_not_in_the_group_of_a_folder_without_setgid_publishes_nothing_there(place):
    """His files would be of his own group: half a cache to the others."""
    path = place / "cache"
    made_for_the_group(path, 0o770)
    as_user(ONE, lambda: make_cache(path).close(), GROUP)

    def fails() -> None:
        with ac.Cache.open(path) as cache:
            writer = cache.writer()
            writer.append(sample(0))
            with pytest.raises(PermissionError, match=CHMOD):
                writer.close()
            writer.abort()

    as_user(ONE, fails)
    assert os.listdir(path / "segments") == os.listdir(path / "incoming") == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", [0o755, 0o775, 0o700, 0o777, 0o750])
def test_a_folder_that_was_not_made_for_a_group_becomes_private(place, mode):
    """0775 is what a umask of 002 makes of any folder."""
    path = place / "cache"
    made_for_the_group(path, mode)
    as_user(ONE, lambda: publish(make_cache(path), 1), umask=0o002)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {mode for _, mode, _ in modes_and_groups(path)} == {0o700, 0o600}
    as_user(TWO, lambda: refused(path), GROUP)


def test_a_query_says_what_may_not_be_read_and_calls_nothing_corrupt(shared):
    pytest.importorskip("duckdb", reason="the extra 'explore' is not installed")
    from arrowcache import explore

    def count() -> None:
        assert explore.sql(shared, "select count(*) from cache").iloc[0, 0] == 320

    def refused_too() -> None:
        with pytest.raises(PermissionError, match=CHMOD):
            count()

    count()  # imports all that it needs
    as_user(TWO, count, GROUP)
    max((shared / "segments").iterdir()).chmod(0o600)
    as_user(TWO, refused_too, GROUP)


def test_a_frozen_cache_of_another_user_is_read_and_not_changed(place):
    path = place / "cache"

    def make() -> None:
        cache = make_cache(path)
        publish(cache, 4)
        cache.tag([(0, 1)], "hard")
        cache.freeze()

    def read() -> None:
        with ac.Cache.open(path) as cache:
            for arguments, rows in (({}, 64), ({"rows": "hard", "drop_last": False}, 1)):
                with ac.Loader(cache, 16, **arguments) as loader:
                    assert len(ids_of(loader)) == rows
            assert cache.stats().rows == 64
            assert cache.verify(repair=False) == []
            with pytest.raises(ac.CacheFrozenError, match="thaw"):
                cache.tag([(0, 2)], "hard")
            with pytest.raises(PermissionError, match=CHMOD):
                cache.thaw()

    def refuse() -> None:
        with pytest.raises(PermissionError):
            ac.Cache.open(path)

    as_user(ONE, make)
    as_user(STRANGER, refuse)
    subprocess.run(["chmod", "-R", "a+rX", path], check=True)
    before = state(path)
    as_user(STRANGER, read)
    assert state(path) == before
