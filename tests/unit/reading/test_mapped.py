"""What readers of one cache share in a process, however each of them opened it."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers import flip_byte, ids_of, in_child, make_cache, publish, segment_files

import arrowcache as ac


@pytest.fixture
def cache(tmp_path):
    """Six segments of 16 rows, ids 0 to 95."""
    cache = make_cache(tmp_path / "cache")
    publish(cache, 6)
    return cache


def mapped_files() -> list[str]:
    """The segments' files that this process has mapped, once for each mapping that begins a file."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return [fields[5] for fields in lines if "/segments/" in fields[-1] and int(fields[2], 16) == 0]


def test_loaders_that_were_given_one_path_map_each_segment_once(cache):
    with ac.Loader(cache.path, 16) as first, ac.Loader(str(cache.path), 16) as second:
        epochs = iter(first), iter(second)
        ids = [ids_of([next(epoch)]) for epoch in epochs]
        files = mapped_files()
        assert sorted(files) == sorted(set(files)) == list(map(str, segment_files(cache)))
        for epoch, begun in zip(epochs, ids, strict=True):
            assert sorted(begun + ids_of(epoch)) == list(range(96))
    assert mapped_files() == []
    assert cache.stats().leased_bytes == 0


def test_a_segment_stays_mapped_until_the_last_reader_of_its_cache_has_let_go(cache):
    with ExitStack() as rest:
        snapshots = [
            rest.enter_context(ac.Cache.open(path).snapshot()) for path in (cache.path, str(cache.path))
        ]
        for snapshot in snapshots:
            snapshot.map_all()
        assert len(mapped_files()) == 6
        snapshots[0].close()
        assert len(mapped_files()) == 6
        assert snapshots[1].gather([0, 95])["id"].tolist() == [0, 95]
    assert mapped_files() == []


def test_a_link_to_the_folder_is_the_same_cache(cache, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(cache.path)
    with ac.Cache.open(link).snapshot() as by_link, cache.snapshot() as by_path:
        assert by_link.map_all() == by_path.map_all() == 96
        assert len(mapped_files()) == 6


def test_a_cache_that_was_moved_is_read_where_it_is_now(cache, tmp_path):
    with cache.snapshot() as before:
        before.gather([0])  # maps the first segment, where the folder was
        os.rename(cache.path, tmp_path / "moved")
        with ac.Cache.open(tmp_path / "moved").snapshot() as after:
            assert after.gather(range(96))["id"].tolist() == list(range(96))
            assert len(mapped_files()) == 6


def test_a_cache_that_was_made_anew_at_the_same_path_is_another_one(cache):
    with cache.snapshot() as before:
        before.map_all()
        shutil.rmtree(cache.path)
        anew = make_cache(cache.path)
        publish(anew, 6, first=1000)
        for opened in (anew, ac.Cache.open(cache.path), cache):  # also by who had opened the one that is gone
            with opened.snapshot() as after:
                assert after.gather(range(96))["id"].tolist() == list(range(1000, 1096))
        assert before.gather(range(96))["id"].tolist() == list(range(96))


def test_a_cache_of_another_schema_may_follow_at_the_same_path(tmp_path):
    for shape in ((16,), (3, 5), ()):
        cache = ac.Cache.create(tmp_path / "cache", {"x": ac.Tensor("float32", shape)}, "1MiB", "64KiB")
        with cache.writer() as writer:
            for number in range(20):
                writer.append(x=[[number] * 5] * 3 if len(shape) == 2 else [number] * 16 if shape else number)
        with ac.Cache.open(cache.path).snapshot() as snapshot:
            rows = snapshot.gather(range(20))["x"]
            assert rows.shape == (20, *shape)
            assert rows.reshape(20, -1)[:, 0].tolist() == list(range(20))
        shutil.rmtree(cache.path)


def test_a_forked_child_shares_among_its_own_readers(cache):
    with ac.Loader(cache.path, 16) as first, ac.Loader(cache.path, 16) as second:
        next(iter(first)), next(iter(second))

        def child():
            assert mapped_files() == []
            with ac.Loader(cache.path, 16) as third, ac.Loader(cache.path, 16) as fourth:
                epochs = iter(third), iter(fourth)
                ids = [ids_of([next(epoch)]) for epoch in epochs]
                assert len(mapped_files()) == 6
                for epoch, begun in zip(epochs, ids, strict=True):
                    assert sorted(begun + ids_of(epoch)) == list(range(96))

        with in_child(child):
            pass
        assert len(mapped_files()) == 6


def test_bytes_are_checked_also_where_another_reader_has_the_segment_mapped(cache):
    flip_byte(segment_files(cache)[2], 3000)
    with cache.snapshot() as trusting:
        assert trusting.map_all() == 96
        checking = ac.Cache.open(cache.path, check="bytes")
        with checking.snapshot() as snapshot:
            with pytest.warns(RuntimeWarning, match="still leased by another reader"):
                assert snapshot.map_all() == 80
            assert snapshot.gather(range(80))["id"].tolist() == [*range(32), *range(48, 96)]
        assert trusting.gather([0, 95])["id"].tolist() == [0, 95]  # it is mapped still
    with pytest.warns(RuntimeWarning, match="quarantined"), checking.snapshot() as snapshot:
        assert snapshot.map_all() == 80


def test_bytes_that_were_checked_are_not_read_again_while_they_are_mapped(cache, monkeypatch):
    checked = []
    real = ac.reading.mapped.check_file

    def check_file(file, store, segment, **options):
        checked.append(segment.seq)
        return real(file, store, segment, **options)

    monkeypatch.setattr("arrowcache.reading.mapped.check_file", check_file)
    with ExitStack() as rest:
        for _ in range(2):
            rest.enter_context(ac.Cache.open(cache.path, check="bytes").snapshot()).map_all()
        assert checked == list(range(6))
    with ac.Cache.open(cache.path, check="bytes").snapshot() as snapshot:
        snapshot.map_all()
    assert checked == [*range(6), *range(6)], "a new mapping is checked anew"
