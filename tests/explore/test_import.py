"""Imports that fail, are interrupted, or are made twice: what is in the cache then, and what is said."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import limit, published_ids, segment_files

import arrowcache as ac
from arrowcache.explore.exchange import ParquetImport, import_parquet
from arrowcache.storage.layout import file_rows_of

SIZES = {"capacity": "1MiB", "segment_bytes": "16KiB"}
IDS = ac.Schema({"id": ac.Tensor("int64"), "pad": ac.Binary()})


def write(path, start, stop, *, bad=None, group=50):
    """A file of the ids from start to stop, of 1 KiB each; in row `bad` one is missing."""
    ids = [None if number == bad else number for number in range(start, stop)]
    pads = [np.random.default_rng(n).bytes(1000) for n in range(start, stop)]
    table = pa.table({"id": pa.array(ids, pa.int64()), "pad": pads})
    pq.write_table(table, path, row_group_size=group, compression="none")
    return path


def make(path, **options):
    return ac.Cache.create(path, IDS, **({"capacity": "1MiB", "segment_bytes": "16KiB"} | options))


def ids(cache):
    return published_ids(cache if isinstance(cache, ac.Cache) else ac.Cache.open(cache))


@pytest.fixture
def in_pieces(monkeypatch):
    """Files are read some rows at a time."""
    limit(monkeypatch, imported_rows=8)


def at_each_batch(monkeypatch, act):
    """Have something done whenever an import has read some rows of a file."""
    real = pq.ParquetFile.iter_batches

    def iter_batches(self, *arguments, **options):
        for batch in real(self, *arguments, **options):
            act()
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)


# twice


def test_a_file_that_is_in_already_is_refused(tmp_path):
    path = write(tmp_path / "a.parquet", 0, 100)
    assert import_parquet(path, tmp_path / "c", **SIZES) == 100
    before = segment_files(ac.Cache.open(tmp_path / "c"))
    for again in (path, [path, path], tmp_path):
        with pytest.raises(FileExistsError, match=r"has all .*00 rows of .* already: nothing was"):
            import_parquet(again, tmp_path / "c")
    assert segment_files(ac.Cache.open(tmp_path / "c")) == before


def test_a_copy_by_another_name_is_the_same_file(tmp_path):
    path = write(tmp_path / "a.parquet", 0, 100)
    (tmp_path / "b.parquet").write_bytes(path.read_bytes())
    assert import_parquet([path, tmp_path / "b.parquet"], tmp_path / "c", **SIZES) == 100
    with pytest.raises(FileExistsError):
        import_parquet(tmp_path / "b.parquet", tmp_path / "c")


def test_only_files_that_are_new_are_imported(tmp_path):
    for name, start in (("a", 0), ("b", 30), ("c", 60)):
        write(tmp_path / f"{name}.parquet", start, start + 30)
    import_parquet([tmp_path / "b.parquet"], tmp_path / "cache", **SIZES)
    assert import_parquet(tmp_path, tmp_path / "cache") == 60
    assert ids(tmp_path / "cache") == [*range(30, 60), *range(30), *range(60, 90)]


def test_again_imports_what_is_there_once_more_and_again(tmp_path):
    path = write(tmp_path / "a.parquet", 0, 20)
    import_parquet(path, tmp_path / "c", **SIZES)
    for _ in range(2):
        assert import_parquet([path, path], tmp_path / "c", again=True) == 20
    assert ids(tmp_path / "c") == [*range(20)] * 3
    with pytest.raises(FileExistsError):
        import_parquet(path, tmp_path / "c")
    assert ac.Cache.open(tmp_path / "c").verify() == []


def test_files_of_one_length_and_one_footer_are_both_imported(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        images = pa.FixedSizeListArray.from_arrays(pa.array(rng.permutation(256).astype(np.uint8)), 16)
        pq.write_table(
            pa.table({"x": images}), tmp_path / f"{name}.parquet", compression="none", use_dictionary=False
        )
    assert import_parquet(tmp_path, tmp_path / "c", **SIZES) == 32


def test_a_segment_says_which_rows_of_which_files_it_has(tmp_path):
    for name, start in (("a", 0), ("b", 20), ("c", 40)):
        write(tmp_path / f"{name}.parquet", start, start + 20)
    import_parquet(tmp_path, tmp_path / "c", **SIZES)
    found = [file_rows_of(s.task) for s in ac.Cache.open(tmp_path / "c").store.segments()]
    prints = list(dict.fromkeys(origin.fingerprint for origins in found for origin in origins))
    assert len(prints) == 3
    for number, digest in enumerate(prints):
        runs = [o for origins in found for o in origins if o.fingerprint == digest]
        assert [run.first for run in runs] == list(np.cumsum([0, *(run.rows for run in runs)])[:-1]), number
        assert sum(run.rows for run in runs) == 20
        assert [run.is_last for run in runs] == [False] * (len(runs) - 1) + [True]
    assert any(len(origins) > 1 for origins in found), "segments are full across files"


def test_many_small_files_are_packed_as_far_as_a_name_goes(tmp_path):
    for number in range(20):
        write(tmp_path / f"{number:02}.parquet", number, number + 1)
    import_parquet(tmp_path, tmp_path / "c", **SIZES)
    assert ids(tmp_path / "c") == list(range(20))
    assert [s.rows for s in ac.Cache.open(tmp_path / "c").store.segments()] == [8, 8, 4]
    with pytest.raises(FileExistsError):
        import_parquet(tmp_path / "13.parquet", tmp_path / "c")


def test_rows_that_were_evicted_come_again_and_no_others(tmp_path, in_pieces):
    path = write(tmp_path / "a.parquet", 0, 100)
    import_parquet(path, tmp_path / "c", **SIZES)
    cache = ac.Cache.open(tmp_path / "c")
    cache.evict("40KiB")
    left = ids(cache)
    task = ParquetImport([path], cache)
    task.run()
    assert task.imported.rows == task.rows_returned == 100 - len(left) > 0
    assert task.rows_there == len(left)
    assert sorted(ids(cache)) == list(range(100))
    assert ids(cache)[: len(left)] == left


# a bad file


@pytest.mark.parametrize("bad", [0, 5, 99])
def test_a_bad_first_file_leaves_no_cache(tmp_path, in_pieces, bad):
    path = write(tmp_path / "a.parquet", 0, 100, bad=bad)
    before = sorted(tmp_path.rglob("*"))
    words = r"a\.parquet: field 'id' lacks 1 .*; nothing was imported, no cache was made, .*: repair it"
    with pytest.raises(ac.SchemaError, match=words):
        import_parquet(path, tmp_path / "new" / "deep" / "c", **SIZES)
    assert sorted(tmp_path.rglob("*")) == before
    pq.write_table(pa.table({"id": np.arange(3.0)}), path)  # repaired, it has another schema
    assert import_parquet(path, tmp_path / "new" / "deep" / "c", **SIZES) == 3


def test_an_empty_folder_that_was_there_stays(tmp_path, in_pieces):
    path = write(tmp_path / "a.parquet", 0, 100, bad=99)
    (tmp_path / "c").mkdir()
    with pytest.raises(ac.SchemaError):
        import_parquet(path, tmp_path / "c", **SIZES)
    assert os.listdir(tmp_path / "c") == []


def test_a_bad_file_of_a_cache_that_was_there_leaves_none_of_its_rows(tmp_path, in_pieces):
    path = write(tmp_path / "a.parquet", 0, 100, bad=99)
    with make(tmp_path / "c") as cache:
        append(cache, range(1000, 1010))
        before = cache.stats()
        with pytest.raises(ac.SchemaError, match=r"nothing was imported, and none of this file stays: "):
            import_parquet(path, cache)
        assert ids(cache) == list(range(1000, 1010))
        assert cache.stats().inserted_rows == before.inserted_rows
        assert cache.stats().evicted_rows == before.evicted_rows
        assert import_parquet(write(path, 0, 100), cache) == 100
        assert ids(cache) == [*range(1000, 1010), *range(100)]
        assert cache.verify() == []


def append(cache, numbers):
    with cache.writer() as writer:
        for number in numbers:
            writer.append(id=number, pad=b"")


def test_of_several_files_those_before_a_bad_one_are_in_whole(tmp_path, in_pieces):
    for name, start, bad in (("a", 0, None), ("b", 30, None), ("c", 60, 85), ("d", 90, None)):
        write(tmp_path / f"{name}.parquet", start, start + 30, bad=bad)
    words = (
        r"c\.parquet: field 'id' lacks 1 .*; 60 of 120 rows were imported, and none of this file stays: "
        r"repair it or leave it out, and import again"
    )
    with pytest.raises(ac.SchemaError, match=words):
        import_parquet(tmp_path, tmp_path / "cache", **SIZES)
    assert sorted(ids(tmp_path / "cache")) == list(range(60)), "also those that shared a segment with it"
    write(tmp_path / "c.parquet", 60, 90)
    assert import_parquet(tmp_path, tmp_path / "cache", **SIZES) == 60
    assert sorted(ids(tmp_path / "cache")) == list(range(120))
    assert ac.Cache.open(tmp_path / "cache").verify() == []


def test_again_takes_back_only_what_it_imported_again(tmp_path, in_pieces):
    good, bad = write(tmp_path / "a.parquet", 0, 30), write(tmp_path / "b.parquet", 30, 60, bad=55)
    import_parquet(good, tmp_path / "c", **SIZES)
    with pytest.raises(ac.SchemaError, match="30 of 60 rows were imported, and none of this file"):
        import_parquet([good, bad], tmp_path / "c", again=True)
    assert sorted(ids(tmp_path / "c")) == sorted([*range(30)] * 2)


def test_damage_within_a_file_leaves_none_of_its_rows(tmp_path, in_pieces):
    path = write(tmp_path / "a.parquet", 0, 100)
    with pq.ParquetFile(path) as file:
        page = file.metadata.row_group(1).column(1).data_page_offset
    with open(path, "r+b") as data:
        data.seek(page)
        data.write(b"\xff" * 64)
    with pytest.raises(ac.SamplerError, match=r"a\.parquet: cannot be read as Parquet: .*; nothing was"):
        import_parquet(path, tmp_path / "c", **SIZES)
    assert not (tmp_path / "c").exists()


def test_segments_that_somebody_reads_stay_and_are_counted(tmp_path, in_pieces, monkeypatch):
    path = write(tmp_path / "a.parquet", 0, 100, bad=99)
    with make(tmp_path / "c") as cache:
        held = []

        def read():
            if not held and cache.store.segments():
                held.append(cache.snapshot())

        at_each_batch(monkeypatch, read)
        with pytest.raises(ac.SchemaError) as raised:
            import_parquet(path, cache)
        stay = ids(cache)
        assert f"but for {len(stay)} rows that a reader leases" in str(raised.value)
        assert stay == list(range(len(stay)))
        held[0].close()


def test_a_cache_that_others_use_by_now_stays(tmp_path, in_pieces, monkeypatch):
    path = write(tmp_path / "a.parquet", 0, 100, bad=99)
    writers = []

    def write_too():
        if not writers and (tmp_path / "c" / "cache.json").exists():
            writers.append(ac.Cache.open(tmp_path / "c").writer())
            writers[0].append(id=7, pad=b"")
            writers[0].close()

    at_each_batch(monkeypatch, write_too)
    with pytest.raises(ac.SchemaError, match="none of this file stays"):
        import_parquet(path, tmp_path / "c", **SIZES)
    assert ids(tmp_path / "c") == [7]


def test_nothing_is_made_where_the_first_file_cannot_be_imported(tmp_path):
    (tmp_path / "bad.parquet").write_text("no Parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "good.parquet")
    pq.write_table(pa.table({"y": [1]}), tmp_path / "other.parquet")
    for files, error in (
        (["bad.parquet"], ac.SamplerError),
        (["good.parquet", "other.parquet"], ac.SchemaError),
        (["good.parquet", "bad.parquet"], ac.SamplerError),
        (["good.parquet", "missing.parquet"], FileNotFoundError),
    ):
        with pytest.raises(error):
            import_parquet([tmp_path / name for name in files], tmp_path / "c", **SIZES)
        assert not (tmp_path / "c").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(ac.CacheFormatError, match="holds other files"):
        import_parquet(tmp_path / "good.parquet", tmp_path / "full", **SIZES)


# other ends


def test_a_broken_disk_says_how_many_rows_are_in_and_the_same_call_goes_on(tmp_path, in_pieces, monkeypatch):
    path = write(tmp_path / "a.parquet", 0, 100)
    segments = []

    def reserve(fd, *area, real=os.posix_fallocate):  # for each segment
        if len(segments) == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        segments.append(fd)
        real(fd, *area)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    with pytest.raises(OSError, match=r"Input/output error.*; \d\d of 100 rows were imported: import"):
        import_parquet(path, tmp_path / "c", **SIZES)
    monkeypatch.undo()
    there = ids(tmp_path / "c")
    assert there == list(range(len(there)))
    assert import_parquet(path, tmp_path / "c") == 100 - len(there)
    assert ids(tmp_path / "c") == list(range(100))


def test_a_disk_that_is_too_full_for_the_first_segment_leaves_no_cache(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", 0, 100)

    def reserve(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    with pytest.raises(ac.CacheFullError, match="nothing was imported, no cache was made"):
        import_parquet(path, tmp_path / "new" / "c", **SIZES)
    assert not (tmp_path / "new").exists()


def test_ctrl_c_before_the_first_segment_leaves_nothing(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", 0, 100)

    def interrupt():
        raise KeyboardInterrupt

    at_each_batch(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        import_parquet(path, tmp_path / "c", **SIZES)
    assert not (tmp_path / "c").exists()


KILLED = """
import sys, time
import pyarrow.parquet as pq
from arrowcache.explore.exchange import import_parquet
from arrowcache.limits import Limits
Limits.current = Limits(imported_rows=8)
real = pq.ParquetFile.iter_batches
def iter_batches(*arguments, **options):
    for count, batch in enumerate(real(*arguments, **options)):
        if count == 6:
            print("some are in", flush=True)
            time.sleep(600)
        yield batch
pq.ParquetFile.iter_batches = iter_batches
import_parquet(sys.argv[1], sys.argv[2], capacity="1MiB", segment_bytes="16KiB", progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_whatever_ends_an_import_the_same_call_goes_on(tmp_path, sign):
    path = write(tmp_path / "a.parquet", 0, 100)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path), str(tmp_path / "c")],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "some are in\n"
        process.send_signal(sign)
        assert process.wait(60) != 0
    there = ids(tmp_path / "c")
    assert 0 < len(there) < 100
    assert there == list(range(len(there)))
    assert import_parquet(path, tmp_path / "c", **SIZES) == 100 - len(there)
    assert ids(tmp_path / "c") == list(range(100))
    assert ac.Cache.open(tmp_path / "c").verify() == []


def test_an_import_shows_that_somebody_writes(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", 0, 100)
    with make(tmp_path / "c") as cache:
        seen = []
        at_each_batch(monkeypatch, lambda: seen.append(cache.store.usage.somebody_writes()))
        import_parquet(path, cache)
        assert seen
        assert all(seen)
        assert not cache.store.usage.somebody_writes()
