"""What readers of one cache share in a process, however each of them opened it."""

from __future__ import annotations

import errno
import gc
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    flip_byte,
    limit,
    make_cache,
    mapped_seqs,
    publish,
    replace_file,
    segment_files,
    seqs,
)
from hypothesis import given
from hypothesis import strategies as st
from page_cache import drop_from_memory, resident_bytes

import arrowcache as ac
from arrowcache.native import maps
from arrowcache.reading.mapped import SegmentArrays
from arrowcache.storage.layout import SegmentInfo

ROWS = 96  # six segments


def mapped_files() -> list[str]:
    """The segments' files that this process has mapped, once for each mapping that begins a file."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return [fields[5] for fields in lines if "/segments/" in fields[-1] and int(fields[2], 16) == 0]


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


def test_bytes_that_were_checked_are_not_read_again_while_they_are_mapped(cache, checked):
    with ExitStack() as rest:
        for _ in range(2):
            rest.enter_context(ac.Cache.open(cache.path, check="bytes").snapshot()).map_all()
        assert checked == list(range(6))
    with ac.Cache.open(cache.path, check="bytes").snapshot() as snapshot:
        snapshot.map_all()
    assert checked == [*range(6), *range(6)], "a new mapping is checked anew"


@pytest.mark.parametrize("kind", ["fixed", "text"])
def test_a_segment_for_which_no_mapping_is_left_is_known_to_the_engine_and_not_mapped(
    tmp_path, monkeypatch, kind
):
    """Also one whose layout is nowhere but in its file: it is mapped while that is read."""
    schema = ac.Schema({"id": ac.Tensor("int64"), **({"text": ac.String()} if kind == "text" else {})})
    cache = make_cache(tmp_path / "cache", schema)
    for first in range(0, 64, 16):
        with cache.writer() as writer:
            for number in range(first, first + 16):
                writer.append(id=number, **({"text": str(number)} if kind == "text" else {}))
    before = maps.count()
    limit(monkeypatch, mapped_segments=before + 2)
    with cache.snapshot() as snapshot:
        assert snapshot.map_all() == 64
        assert maps.count() == before + 2
        assert mapped_seqs(cache) == [0, 1]
        got = snapshot.gather(range(63, -1, -1))
        assert got["id"].tolist() == list(range(63, -1, -1))
        assert kind == "fixed" or got["text"] == [str(number) for number in range(63, -1, -1)]
        assert len(os.listdir("/proc/self/fd")) < 100
        with cache.snapshot() as other:
            limit(monkeypatch, mapped_segments=before + 4)
            assert other.map_all() == 64
            assert mapped_seqs(cache) == [0, 1, 2, 3], "there are mappings again"
            assert snapshot.gather([0, 63])["id"].tolist() == [0, 63]
    assert maps.count() == before
    assert cache.stats().leased_bytes == 0


def test_who_was_told_of_a_segment_without_a_mapping_reads_it_still_when_another_maps_it(cache, monkeypatch):
    before = maps.count()
    limit(monkeypatch, mapped_segments=before + 2)
    with cache.snapshot() as snapshot:
        assert snapshot.map_all() == 96
        limit(monkeypatch, mapped_segments=before + 12)
        with cache.snapshot() as other:
            assert other.map_all() == 96
            assert len(mapped_files()) == 6
            gc.collect()
            kept = [b"x" * size for size in range(40, 2000) for _ in range(20)]  # where something was freed
            assert snapshot.gather(range(96))["id"].tolist() == list(range(96))
            del kept


def test_only_what_a_batch_needs_is_mapped_for_it(cache):
    with cache.snapshot() as snapshot:
        snapshot.gather([17, 90, 18])
        assert mapped_seqs(cache) == [1, 5]
        snapshot.gather([0, 90])
        assert mapped_seqs(cache) == [0, 1, 5]


def test_who_has_mapped_a_file_goes_on_with_it_when_another_takes_its_path(cache):
    first, second = segment_files(cache)[:2]
    with cache.snapshot() as before:
        assert before.gather([3])["id"].tolist() == [3]
        inode = first.stat().st_ino
        replace_file(first, second.read_bytes())
        assert first.stat().st_ino != inode
        assert before.gather([3])["id"].tolist() == [3]
        with cache.snapshot() as sharing:
            assert sharing.gather([3])["id"].tolist() == [3]
    with cache.snapshot() as after:
        assert after.gather([3])["id"].tolist() == [19], "the second one's"


def test_a_file_that_takes_a_path_is_checked_before_it_is_read(cache):
    """Its neighbour's layout is known, and it has as many bytes."""
    victim = segment_files(cache)[4]
    with cache.snapshot() as snapshot:
        snapshot.gather(range(64))
        data = bytearray(victim.read_bytes())
        data[-1] ^= 1
        replace_file(victim, bytes(data))
        with pytest.warns(RuntimeWarning, match="quarantined"), pytest.raises(ac.CorruptSegmentError):
            snapshot.gather([70])
        assert mapped_seqs(cache) == [0, 1, 2, 3]
    assert seqs(cache) == [0, 1, 2, 3, 5]


def test_what_cannot_be_unmapped_stays_leased_until_it_can(cache, monkeypatch):
    real, refuses = maps.unmap, True

    def unmap(files):
        real([*files][:2])
        if refuses and len(files) > 2:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        real(files)

    snapshot = cache.snapshot()
    snapshot.map_all()
    monkeypatch.setattr(maps, "unmap", unmap)
    snapshot.close()
    assert mapped_seqs(cache) == [2, 3, 4, 5]
    assert cache.evict("1GB") == 0, "what is mapped is leased"
    refuses = False
    cache.snapshot().close()  # whatever is done next
    assert mapped_seqs(cache) == []
    assert cache.stats().leased_bytes == 0


def test_a_new_snapshot_lets_go_of_what_could_not_be_unmapped_before_it(cache, monkeypatch):
    def refused(files):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch, cache.snapshot() as before:
        before.map_all()
        patch.setattr(maps, "unmap", refused)
        before.close()
        assert mapped_seqs(cache) == [0, 1, 2, 3, 4, 5]
    with cache.snapshot(lambda segment: segment.seq > 2):
        assert mapped_seqs(cache) == [3, 4, 5]
        assert cache.evict("1GB") > 0, "writers need not wait for a reader that has ended"
        assert seqs(cache) == [3, 4, 5]


def test_what_was_cut_short_is_let_go_when_its_cache_dies(tmp_path, monkeypatch):
    def interrupted(files):
        raise KeyboardInterrupt

    cache = make_cache(tmp_path / "another")
    publish(cache, 3)
    snapshot = cache.snapshot()
    snapshot.map_all()
    monkeypatch.setattr(maps, "unmap", interrupted)
    with pytest.raises(KeyboardInterrupt):
        snapshot.close()
    monkeypatch.undo()
    assert mapped_seqs(cache) == [0, 1, 2]
    del snapshot, cache
    gc.collect()
    assert mapped_files() == []


def test_to_map_a_segment_reads_its_headers_and_offsets_alone(tmp_path):
    """What the disk reads ahead round each is megabytes on some, for every new segment."""
    schema = ac.Schema({"id": ac.Tensor("int64"), "tokens": ac.Ragged("float32")})
    options = {"capacity": "64MiB", "segment_bytes": "16MiB", "segment_rows": 100}
    with make_cache(tmp_path / "cache", schema, **options) as cache:
        with cache.writer() as writer:
            for number in range(100):
                writer.append(id=number, tokens=np.zeros(32_000 + number, np.float32))
        (file,) = segment_files(cache)
        drop_from_memory(file)
        with cache.snapshot() as snapshot:
            snapshot.map_all()
            assert 0 < resident_bytes(file) <= 64 << 10


# facts of segments as arrays


def listed(numbers, salt=0):
    return [SegmentInfo(seq, 1 + (seq + salt) % 7, "", 100 + seq, 4096, seq / 8) for seq in sorted(numbers)]


def told(arrays):
    return [[*arrays.segments], *[column.tolist() for column in arrays[1:]]]


numbers = st.sets(st.integers(0, 12))


@given(numbers, numbers, st.booleans())
def test_what_was_known_before_makes_no_difference(before, after, is_other):
    """Also of segments of the same numbers that are others."""
    known = SegmentArrays.of(listed(before))
    segments = listed(after, salt=is_other)
    arrays = SegmentArrays.of(segments, known)
    assert told(arrays) == told(SegmentArrays.of(segments))
    assert [*zip(*told(arrays)[1:], strict=True)] == [
        (s.seq, s.rows, s.nbytes, s.published) for s in segments
    ]
    assert [column.dtype for column in arrays[1:]] == [np.int64] * 3 + [np.float64]


def test_segments_that_were_known_are_not_looked_at_again():
    segments = listed(range(100))
    known = SegmentArrays.of(segments)

    class Untouched:
        seq = 60

        def __getattr__(self, name):
            raise AssertionError(name)

    unseen = [Untouched() for _ in range(40)]
    mixed = SegmentArrays((*segments[:60], *unseen), *known[1:])
    arrays = SegmentArrays.of([*unseen, *listed([100])], mixed)
    assert arrays.seqs.tolist() == [*range(60, 101)]
