"""Complaints about files: evicted, deleted, rewritten, half written, too many. Rows 2 to 5, 7 and 8."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    append_rows,
    ids_of,
    make_cache,
    publish,
    published_ids,
    read_ids,
    replace_file,
    sample,
    segment_files,
    wait_until,
)
from processes import Child, Script, small_disk

import arrowcache as ac


def press(path: Path, refused: Path, stop: Path) -> None:
    """A writer that evicts whatever it may, for as long as it is let; shows when it is refused."""
    cache, number = ac.Cache.open(path), 10_000
    while not stop.exists():
        try:
            publish(cache, 1, first=number)
            number += 16
        except ac.CacheFullError:
            refused.touch()
        cache.evict(1)


def test_complaint_02_nothing_is_evicted_under_a_reader(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 20)
    refused, stop = tmp_path / "refused", tmp_path / "stop"
    with cache.snapshot() as snapshot, ac.Loader(cache, 16, shuffle="rows") as loader:
        epoch = iter(loader)
        with Child(press, cache.path, refused, stop) as child:
            wait_until(refused.exists, "a writer to press until there is no room")
            files = segment_files(cache)
            for _ in range(20):
                rows = snapshot.gather(np.arange(320))
                assert rows["id"].tolist() == list(range(320))
                assert all((image == sample(i)["image"]).all() for i, image in enumerate(rows["image"]))
            assert sorted(ids_of(epoch)) == list(range(320))
            assert segment_files(cache)[:20] == files[:20]
            snapshot.close()
            loader.close()
            wait_until(lambda: not files[0].exists(), "it to go once nobody reads it")
            stop.touch()
            child.result()


@pytest.mark.slow
def test_complaint_03_only_what_this_library_published_is_deleted(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "only copy.arrow").write_bytes(b"precious")
    with pytest.raises(ac.CacheFormatError, match="only copy"):
        make_cache(mine)
    assert os.listdir(mine) == ["only copy.arrow"]

    cache = make_cache(tmp_path / "cache")
    publish(cache, 20)
    precious = [
        cache.path / "notes.txt",
        *(cache.path / folder / "only copy.arrow" for folder in ("segments", "incoming", "quarantine")),
        *(cache.path / folder / "copy.part" for folder in ("incoming", "ranks", "pools")),
        cache.path / "segments" / "00000000000000000001-16-.arrow.bak",
    ]
    for path in precious:
        path.write_bytes(b"precious")
    link = cache.path / "segments" / "00000000000000000000-16-other.arrow"
    link.symlink_to(mine / "only copy.arrow")
    publish(cache, 100)
    cache.evict("1GB")
    cache.verify()
    cache.resize("700 KiB")
    ac.Cache.open(cache.path).verify()
    assert segment_files(cache) == sorted(p for p in [*precious, link] if p.parent.name == "segments")
    assert all(path.read_bytes() == b"precious" for path in [*precious, mine / "only copy.arrow"])


@pytest.mark.slow
def test_complaint_04_a_budget_too_small_is_refused_and_no_wait_is_without_an_end(tmp_path):
    with pytest.raises(ValueError, match="capacity"):
        make_cache(tmp_path / "cache", capacity=100 * 1024, segment_bytes=32 * 1024)
    with pytest.raises(ValueError, match="segment_bytes"):
        make_cache(tmp_path / "cache", segment_bytes=1024, segment_rows=None)
    cache = make_cache(tmp_path / "cache")
    with ac.Loader(cache, 16, timeout=0.1) as loader, pytest.raises(ac.LoaderTimeoutError, match="rows"):
        next(iter(loader))
    publish(cache, 100)

    def hold(path: Path, ready: Path) -> None:
        with ac.Cache.open(path).snapshot():
            ready.touch()
            time.sleep(3600)

    def overfill(options: dict[str, float]) -> None:
        writer = cache.writer(**options)
        try:
            for number in range(16 * 100):
                writer.append(sample(number))
        finally:
            writer.abort()

    with Child(hold, cache.path, tmp_path / "ready") as child:
        wait_until((tmp_path / "ready").exists, "the lease")
        with pytest.raises(ac.CacheFullError, match=rf"waited .* leased.* by pid {child.pid} "):
            overfill({"timeout": 0.3})
    with cache.snapshot(), pytest.raises(ac.CacheFullError, match="this very process reads them"):
        overfill({})


FULL_DISK = """
    import os, sys
    import numpy as np
    import pytest
    import arrowcache as ac
    from helpers import ids_of, make_cache, publish, sample
    from pathlib import Path

    disk = Path(sys.argv[1])
    with pytest.warns(RuntimeWarning, match="the capacity is 64.0 MiB, and the disk has 1"):
        cache = make_cache(disk / "cache", capacity="64MiB")
    publish(cache, 10)
    with cache.snapshot() as snapshot, ac.Loader(cache, 16) as loader:
        first = ids_of(loader)
        epoch = iter(loader)
        next(epoch)
        writer = cache.writer("raise")
        try:
            for number in range(160, 16000):
                writer.append(sample(number))
        except ac.CacheFullError as error:
            assert "the disk is full" in str(error), error
        else:
            raise AssertionError("the disk was never full: this shows nothing")
        assert sorted(snapshot.gather(np.arange(160))["id"].tolist()) == list(range(160))
        assert len(ids_of(epoch)) == 144
    assert os.listdir(cache.path / "incoming") == []
    for number in range(number, number + 1600):  # what was refused first, then on and on
        writer.append(sample(number))
    writer.close()
    assert cache.stats().oldest_seq > 10, "nothing was evicted to go on"
    cache.evict("300kB")
    (disk / "foreign").write_bytes(bytes(200_000))  # somebody else takes what was free
    publish(cache, 50, first=0)
    assert cache.verify() == []
    print("well", flush=True)
"""


@pytest.mark.slow
@pytest.mark.smoke
def test_complaint_05_a_full_disk_evicts_or_is_a_typed_error_and_reading_goes_on(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    with Script(FULL_DISK, disk, within=small_disk(disk, "1m")) as script:
        assert script.line() == "well"
        assert script.end() == (0, "")


def read_everything(path: Path) -> list[int]:
    """In a process of its own, which a SIGBUS would end."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that segments are quarantined
        with ac.Cache.open(path) as cache, ac.Loader(cache, 4, drop_last=False) as loader:
            return sorted(ids_of(loader))


@pytest.mark.slow
def test_complaint_07_a_file_is_never_rewritten_and_a_short_one_never_mapped(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 20)
    before = {path.name: (path.stat().st_ino, path.read_bytes()) for path in segment_files(cache)}
    publish(cache, 5)
    cache.verify()
    ac.Cache.open(cache.path)
    assert read_everything(cache.path) == list(range(400))
    for path in segment_files(cache)[:20]:
        assert (path.stat().st_ino, path.read_bytes()) == before[path.name]

    lengths = np.linspace(0, len(before[path.name][1]) - 1, 20).astype(int).tolist()
    for path, length in zip(segment_files(cache), lengths, strict=False):
        replace_file(path, path.read_bytes()[:length])
    with Child(read_everything, cache.path) as child:
        assert child.result() == list(range(320, 400))
    assert len(segment_files(cache)) == 5

    used = {int(name[:20]) for name in before} | set(range(20, 25))
    cache.evict("1GB")
    cache = ac.Cache.open(cache.path)
    publish(cache, 3, first=0)
    assert not used & {int(path.name[:20]) for path in segment_files(cache)}, "a name came again"


def write_on(path: Path) -> None:
    cache = ac.Cache.open(path)
    while True:
        publish(cache, 1, first=0)


@pytest.mark.slow
def test_complaint_08_what_is_published_is_whole_even_if_its_writer_is_killed(tmp_path):
    cache = make_cache(tmp_path / "cache")
    whole = 0
    for kill in range(4):
        with Child(write_on, cache.path) as child:
            wait_until(lambda kill=kill: cache.stats().next_seq > 10 * (kill + 1), "it to write")
            for path in segment_files(cache):
                try:
                    assert read_ids(path) == list(range(16))  # a plain Arrow reader, while others write
                    whole += 1
                except FileNotFoundError:  # evicted meanwhile
                    pass
            child.kill()
        assert cache.verify() == []
    assert whole > 20
    assert set(published_ids(cache)) == set(range(16))

    append_rows(cache, range(16, 32))
    flipped, short = segment_files(cache)[-1], segment_files(cache)[-2]
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    replace_file(flipped, bytes(data))
    replace_file(short, short.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="quarantined"):
        problems = cache.verify()
    assert {problem.name for problem in problems} == {flipped.name, short.name}
    assert {short.name, flipped.name} <= set(os.listdir(cache.path / "quarantine"))
    assert set(published_ids(cache)) == set(range(16))
