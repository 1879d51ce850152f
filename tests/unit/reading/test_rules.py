"""`cache.exclude(where=)`: a rule holds for rows to come, whoever reads them, until it is ended."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import xxhash
from helpers import DEADLINE_SECONDS, ids_of, make_cache, publish
from quick import one_in

import arrowcache as ac
from arrowcache import Loader
from arrowcache.reading.row_filter import ExcludedRows
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.layout import NoteFile

ID, LOSS = pc.field("id"), pc.field("loss")


@pytest.fixture
def cache(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 4)
    return cache


def append_ids(cache, ids):
    with cache.writer() as writer:
        writer.extend(id=ids, image=np.zeros((len(ids), 16, 16), np.float32))


def epoch(cache, **options):
    with Loader(cache, 1, shuffle=None, timeout=DEADLINE_SECONDS, **options) as loader:
        return ids_of(loader)


def test_a_rule_holds_for_rows_there_and_to_come_and_in_other_processes(cache):
    assert cache.exclude(where=ID < 8, reason="dark") == 8
    assert epoch(cache) == [*range(8, 64)]
    append_ids(cache, [3, 100, 7])
    assert epoch(cache) == [*range(8, 64), 100]
    assert epoch(cache, rows=ID < 10) == [8, 9]
    assert epoch(cache, rows="all") == [*range(64), 3, 100, 7]
    script = "import sys, arrowcache as ac; print(sum(1 for _ in ac.Loader(sys.argv[1], 1, timeout=1)))"
    command = [sys.executable, "-c", script, cache.path]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "57\n"
    again = ac.Cache.open(cache.path)
    assert [(str(where), reason) for where, reason in again.rules()] == [("(id < 8)", "dark")]
    assert again.verify() == []


def test_an_epoch_that_has_begun_does_not_change(cache):
    with Loader(cache, 16, shuffle=None) as loader:
        batches = iter(loader)
        first = ids_of([next(batches)])
        cache.exclude(where=ID >= 32)
        assert first + ids_of(batches) == [*range(64)]
        assert ids_of(loader) == [*range(32)]
        assert loader.stats().unselected_rows == 32


def test_a_rule_ends_in_every_process_and_leaves_what_was_said_by_ids(cache):
    cache.exclude([(0, 1), (1, 0)])
    other = ac.Cache.open(cache.path)
    cache.exclude(where=ID < 8)
    other.exclude((0, 2))
    assert epoch(other) == [*range(8, 16), *range(17, 64)]
    assert other.include(where=ID < 8) == 1
    assert epoch(cache) == [0, *range(3, 16), *range(17, 64)]
    assert cache.rules() == other.rules() == []


def test_rows_that_are_included_behind_a_rule_are_its_exceptions(cache):
    cache.include((0, 7))  # before it
    cache.exclude(where=ID < 8)
    cache.include([(0, 3), (0, 5)])
    assert epoch(cache)[:3] == [3, 5, 8]
    cache.exclude((0, 3))
    assert epoch(cache)[:2] == [5, 8]
    cache.exclude(where=ID < 8)  # once more, as a script does that is started again
    assert epoch(cache)[:2] == [5, 8]
    cache.exclude(where=ID < 8, reason="dark")  # another rule in its place
    assert epoch(cache)[0] == 8
    assert len(cache.rules()) == 1


def test_what_is_said_again_and_again_takes_no_more_files(cache):
    for number in range(30):
        cache.exclude((0, number % 16))
        cache.exclude(where=ID < 8)
        cache.exclude(where=ID > 60)
        if number % 3 == 2:
            cache.include(where=ID > 60)
    assert len([*(cache.path / "notes").iterdir()]) < 8
    assert epoch(cache) == [*range(16, 64)]


def test_a_rule_that_cannot_be_added_excludes_nothing(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 4)
    cache.exclude(where=ID > 100)
    (file,) = (cache.path / "notes").iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(data)
    del cache  # which knows it
    other = ac.Cache.open(tmp_path / "cache")
    with pytest.raises(ac.CacheFormatError, match="damaged"):
        other.exclude(where=ID < 9)
    assert len(other.verify()) == 1
    assert (other.rules(), epoch(other)) == ([], [*range(64)])


@pytest.mark.parametrize("seed", one_in(2, range(6)))
def test_of_rules_and_ids_the_latest_counts_however_files_are_merged(cache, seed):
    """Beside a list of all that was said."""
    rng, said = random.Random(seed), []
    other = ac.Cache.open(cache.path)
    for _ in range(60):
        here = rng.choice([cache, other])
        ids, below = rng.choices(range(64), k=rng.choice([1, 1, 3, 40])), rng.choice([8, 24, 40])
        match rng.randrange(6):
            case 0 | 1:
                here.exclude([divmod(each, 16) for each in ids])
                said.append((True, {*ids}, None))
            case 2 | 3:
                here.include([divmod(each, 16) for each in ids])
                said.append((False, {*ids}, None))
            case 4:
                here.exclude(where=below > ID)
                if all(one[2] != below for one in said):  # else it holds already
                    said.append((True, {*range(below)}, below))
            case _ if any(one[2] == below for one in said):
                here.include(where=below > ID)
                said = [one for one in said if one[2] != below]
    excluded = set()
    for is_excluded, rows, _ in said:
        excluded = excluded | rows if is_excluded else excluded - rows
    assert epoch(cache) == epoch(other) == sorted({*range(64)} - excluded)
    assert len([*(cache.path / "notes").iterdir()]) < 24


def test_a_rule_of_annotations_follows_them(cache):
    cache.annotate([(0, row) for row in range(16)], loss=range(16))
    assert cache.exclude(where=LOSS > 9) == 6
    with Loader(cache, 1, shuffle=None) as loader:
        assert ids_of(loader) == [*range(10), *range(16, 64)]
        cache.annotate([(0, 3), (0, 12)], loss=[99, 0])
        append_ids(cache, [64])
        assert ids_of(loader) == [0, 1, 2, *range(4, 10), 12, *range(16, 65)]
    cache.annotate([(4, 0)], loss=11)
    with Loader(cache, 4, once="learner", drop_last=False) as loader:
        batches = iter(loader)
        assert ids_of([next(batches)]) == [0, 1, 2, 4]
        cache.annotate([(0, 5), (0, 11)], loss=[99, 0])
        assert ids_of([next(batches)]) == [6, 7, 8, 9]
        cache.exclude(where=ID < 20)
        loader.set_rows(ID < 30)
        assert ids_of([next(batches)]) == [20, 21, 22, 23]


def test_a_rule_outlasts_the_annotations_that_it_reads(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 2)
    cache.annotate((0, 0), loss=1)
    cache.exclude(where=LOSS > 0)
    publish(cache, 2)
    cache.evict(1)  # and with the segment the only annotation
    assert epoch(cache)[0] == 16
    assert len(cache.rules()) == 1


def test_a_rule_outlasts_every_row(cache):
    cache.exclude(where=pc.bit_wise_and(ID, 1) == 1)
    cache.evict(cache.stats().published_bytes)
    assert cache.stats().rows == 0
    append_ids(cache, range(4))
    assert epoch(cache) == [0, 2]


def test_a_rule_is_evaluated_once_for_each_segment(cache):
    class Counted(Snapshot):
        def gather(self, row_ids, columns=None, out=None):
            read.append(len(row_ids))
            return super().gather(row_ids, columns, out)

    def count():
        with Counted.take(cache.store) as snapshot:
            return int(excluded.of(snapshot).sum())

    read, excluded = [], ExcludedRows(cache.store)
    cache.exclude(where=ID < 8)
    assert [count() for _ in range(3)] == [8, 8, 8]
    assert read == [64]
    publish(cache, 1)
    cache.exclude((3, 0))
    assert [count() for _ in range(3)] == [9, 9, 9]
    assert read == [64, 16]
    cache.include(where=ID < 8)
    assert count() == 1
    with Counted.take(cache.store) as snapshot:  # those of some rows
        cache.exclude(where=ID < 8)
        assert ExcludedRows(cache.store, np.array([3, 6])).of(snapshot)[[3, 6, 5]].tolist() == [1, 1, 0]
    assert read == [64, 16, 2]


def test_a_frozen_cache_keeps_its_rules_and_takes_no_other(cache, tmp_path):
    cache.exclude(where=ID < 8, reason="dark")
    cache.freeze()
    for change in (lambda: cache.exclude(where=ID < 9), lambda: cache.include(where=ID < 8)):
        with pytest.raises(ac.CacheFrozenError, match="frozen"):
            change()
    shutil.copytree(cache.path, tmp_path / "copy")
    copy = ac.Cache.open(tmp_path / "copy")
    assert epoch(copy) == [*range(8, 64)]
    assert len(copy.rules()) == 1
    with Loader(copy, 8) as loader:
        batches = iter(loader)
        begun, state = ids_of([next(batches)]), loader.state_dict()
    with Loader(cache, 8) as loader:
        loader.load_state_dict(state)
        assert sorted(begun + ids_of(loader)) == [*range(8, 64)]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda cache: cache.exclude(), TypeError, "give either ids or where="),
        (lambda cache: cache.include(), TypeError, "give either ids or where="),
        (lambda cache: cache.exclude((0, 0), where=ID > 3), TypeError, "give either ids or where="),
        (lambda cache: cache.exclude(where=lambda columns: columns["id"] > 3), TypeError, "takes a function"),
        (lambda cache: cache.include(where="id > 3"), TypeError, "where must be an expression"),
        (lambda cache: cache.exclude(where=ID > 3, reason=3), TypeError, "reason must be a text"),
        (
            lambda cache: cache.exclude(where=pc.field("ix") > 3),
            ValueError,
            "'ix', neither a column .* id; annotate",
        ),
        (lambda cache: cache.exclude(where=LOSS > 3), ValueError, "'loss', neither .* annotate a row first"),
        (lambda cache: cache.exclude(where=pc.field("image") > 3), ValueError, "by their ids"),
        (lambda cache: cache.exclude(where=ID + 1), ValueError, "gives int64, not a bool"),
        (
            lambda cache: cache.exclude(where=pc.field("_age_seconds") > 3),
            ValueError,
            "the age of rows, '_age_seconds', is no",
        ),
        (
            lambda cache: cache.exclude(where=pc.divide(pc.scalar(8), ID) > 3),
            ValueError,
            "row 0:0: divide by zero",
        ),
        (lambda cache: cache.include(where=ID > 3), ValueError, r"\(id > 3\): cache.rules\(\) has none"),
    ],
)
def test_what_is_no_rule_is_refused_at_once(cache, call, error, words):
    with pytest.raises(error, match=words):
        call(cache)
    assert not (cache.path / "notes").exists()
    assert cache.rules() == []


def test_a_rule_that_fails_for_a_row_to_come_names_row_and_way_out(cache):
    rule = pc.divide(pc.scalar(8), ID - 100) > 3
    cache.exclude(where=rule)
    append_ids(cache, [99, 100])
    with pytest.raises(ValueError, match=r"row 4:1: divide by zero.*cache.include\(where=...\) ends a rule"):
        epoch(cache)
    cache.include(where=rule)
    assert epoch(cache) == [*range(64), 99, 100]


def test_a_rule_that_names_another_is_told_those_there_are(cache):
    cache.exclude(where=ID < 8)
    with pytest.raises(ValueError, match=r"\(id < 9\): cache.rules\(\) has \(id < 8\)"):
        cache.include(where=ID < 9)


def test_who_refuses_all_rows_is_told(cache):
    cache.exclude(where=ID >= 0)
    with pytest.raises(ac.LoaderTimeoutError, match=r"cache.exclude\(\) refuses"):
        epoch(cache)


def test_what_is_no_expression_in_a_rules_file_is_an_error_that_names_it(cache):
    cache.exclude(where=ID < 8)
    (path,) = (cache.path / "notes").iterdir()
    data = path.read_bytes()
    text = pa.ipc.open_file(data).schema.metadata[b"texts"]
    damaged = data.replace(text, text.replace(b'["', b'["AAAA', 1)[: len(text)])
    file = NoteFile.parse(path.name)
    path.unlink()
    name = file.name.replace(file.digest, xxhash.xxh3_64_hexdigest(damaged))
    (cache.path / "notes" / name).write_bytes(damaged)
    with pytest.raises(ac.CacheFormatError, match=f"{name} has notes that this arrowcache does not know"):
        epoch(ac.Cache.open(cache.path))
