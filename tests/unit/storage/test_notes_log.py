"""Notes on rows: which count, how they are kept, and what becomes of them."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from begun import own_threads
from helpers import in_child, make_cache, publish, sample, wait_until
from quick import in_part, one_in

import arrowcache as ac
from arrowcache.storage.folder import Folder
from arrowcache.storage.layout import NoteFile
from arrowcache.storage.notes_log import MARKS, VALUES, NotesLog
from arrowcache.storage.row_ids import NumberedRows
from arrowcache.storage.row_notes import (
    EXCLUDED,
    RULE,
    VALUE,
    NoteLines,
    RowStatements,
    arrow_file,
)

SEGMENTS, ROWS = 4, 16
ALL = [(seq, row) for seq in range(SEGMENTS) for row in range(ROWS)]


@pytest.fixture
def cache(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, SEGMENTS)
    return cache


def notes_of(cache):
    """As another process reads them."""
    return NotesLog(cache.store), NumberedRows.of(cache.store.segments())


def excluded(cache):
    notes, rows = notes_of(cache)
    return {ALL[number] for number in np.flatnonzero(notes.excluded(rows))}


def tagged(cache, tag):
    notes, rows = notes_of(cache)
    return {ALL[number] for number in np.flatnonzero(notes.tagged(rows, tag))}


def values(cache, name):
    cache.close()
    notes, rows = notes_of(ac.Cache.open(cache.path))
    found = notes.values(rows, name)
    return {row: value for row, value in zip(ALL, found.tolist(), strict=True) if value == value}


def note_names(cache):
    return sorted(os.listdir(cache.path / "notes"))


def annotate_one(path):
    ac.Cache.open(path).annotate("0:0", loss=1)


def tag_until_full(cache, rows):
    for number in range(300):
        cache.tag(rows, f"tag {number}" * 100)


def put_note(cache, data, kind=MARKS):
    (cache.path / "notes").mkdir(exist_ok=True)
    name = NoteFile(7, 7, 0, xxhash.xxh3_64_hexdigest(data), kind).name
    (cache.path / "notes" / name).write_bytes(data)
    return name


def nbytes_of(cache):
    return sum(os.stat(cache.path / "notes" / name).st_size for name in note_names(cache))


# what counts


@pytest.mark.parametrize("seed", one_in(2, range(4)))
def test_the_latest_note_on_each_matter_counts(cache, seed):
    """Beside a model of dicts, in files that are merged again and again."""
    rng = random.Random(seed)
    model = {"excluded": set(), "hard": {ALL[0]}, "odd": {ALL[0]}}
    losses, norms = {}, {}
    for tag in ("hard", "odd"):  # a tag that no row had cannot be taken off
        cache.tag(ALL[:1], tag)
    other = ac.Cache.open(cache.path)
    for _ in range(60):
        rows = rng.choices(ALL, k=rng.choice([1, 1, 3, 40]))
        here = rng.choice([cache, other])
        match rng.randrange(6):
            case 0:
                assert here.exclude(rows, reason=str(rng.random())) == len(rows)
                model["excluded"] |= {*rows}
            case 1:
                here.include(rows)
                model["excluded"] -= {*rows}
            case 2:
                tag = rng.choice(["hard", "odd"])
                here.tag(rows, tag)
                model[tag] |= {*rows}
            case 3:
                tag = rng.choice(["hard", "odd"])
                here.untag(rows, tag)
                model[tag] -= {*rows}
            case 4:
                given = [rng.random() for _ in rows]
                cache.annotate(rows, loss=given)
                losses |= dict(zip(rows, given, strict=True))
            case _:
                given = [rng.random() for _ in rows]
                cache.annotate(rows, loss=given, norm=np.float32(2))
                losses |= dict(zip(rows, given, strict=True))
                norms |= dict.fromkeys(rows, 2.0)
    assert excluded(cache) == model["excluded"]
    assert (tagged(cache, "hard"), tagged(cache, "odd")) == (model["hard"], model["odd"])
    assert values(cache, "loss") == losses
    assert values(other, "norm") == norms
    assert len(note_names(other)) < 20
    assert ac.Cache.open(cache.path).verify() == []


def test_the_latest_note_counts_though_the_clock_was_set_back(cache, monkeypatch):
    notes, ids = NotesLog(cache.store), np.array([(0, 0)])
    notes.write_values({"loss": (ids, np.array([1.0]))})
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    notes.write_values({"loss": (ids, np.array([2.0]))})
    assert values(cache, "loss") == {(0, 0): 2.0}


def test_names_tags_and_reasons_are_told(cache):
    notes, rows = notes_of(cache)
    assert (notes.tags(), notes.names(), notes.files(MARKS), notes.files(VALUES)) == ([], [], (), ())
    cache.exclude("1:2", reason="blurred")
    cache.exclude("1:3")
    cache.exclude("0:0", reason="no more")
    cache.include("0:0")
    cache.tag("0:1", "hard")
    cache.untag("0:1", "hard")
    cache.annotate("0:1", loss=3, norm=np.nan)
    cache.close()
    assert (notes.tags(), notes.names()) == (["hard"], ["loss", "norm"])
    reasons = {ALL[at]: reason for at, reason in enumerate(notes.reasons(rows)) if reason is not None}
    assert reasons == {(1, 2): "blurred", (1, 3): ""}
    assert np.isnan(notes.values(rows, "norm")).all()


def test_a_value_that_is_nan_takes_back_one(cache):
    cache.annotate([(0, 0), (0, 1)], loss=[1, 2])
    cache.annotate((0, 0), loss=float("nan"))
    assert values(cache, "loss") == {(0, 1): 2.0}


def test_rows_that_left_are_passed_over_and_rows_that_never_were_refused(cache):
    cache.exclude([(0, 1), (1, 1)])
    cache.evict(1)
    assert cache.exclude([(0, 0), (0, 1), (1, 0)]) == 1
    assert cache.exclude([(0, 0)]) == 0
    notes, rows = notes_of(cache)
    assert np.flatnonzero(notes.excluded(rows)).tolist() == [0, 1]  # of segment 1
    for ids, why in [((1, 16), "has 16 rows, from 0 on"), ((4, 0), "the next one gets 4")]:
        with pytest.raises(IndexError, match=f"never was in the cache.*{why}"):
            cache.tag(ids, "hard")


@pytest.mark.parametrize("where", ["own", "another's"])
def test_a_value_of_a_row_that_never_was_is_refused_and_of_one_that_left_passed_over(cache, where):
    noting = cache if where == "own" else ac.Cache.open(cache.path)
    noting.annotate(ALL, loss=1)
    for ids, why in [((1, 16), "has 16 rows, from 0 on"), ((4, 0), "the next one gets 4")]:
        with pytest.raises(IndexError, match=f"never was in the cache.*{why}"):
            noting.annotate([(0, 0), ids], loss=[2, 2])
    cache.evict(1)
    publish(cache, 1)
    noting.annotate([(0, 0), (4, 0), (1, 0)], loss=[3, 4, 5])
    with pytest.raises(IndexError, match="the next one gets 5"):
        noting.annotate((5, 0), loss=[2])
    noting.close()
    notes, rows = notes_of(ac.Cache.open(cache.path))
    expected = np.r_[5.0, np.ones(47), 4.0, np.full(15, np.nan)]  # of segments 1 to 4
    assert np.array_equal(notes.values(rows, "loss"), expected, equal_nan=True)


def test_a_tag_that_no_row_had_is_taken_off_none(cache):
    with pytest.raises(ValueError, match="no row has the tag 'hard': there is none yet"):
        cache.untag((0, 0), "hard")
    cache.tag((0, 0), "hard")
    for tag in ("hrad", "Hard"):
        with pytest.raises(
            ValueError, match=f"no row has the tag '{tag}': did you mean 'hard'.*there are 'hard'"
        ):
            cache.untag([(0, 0), (0, 1)], tag)
    assert [cache.untag([(0, 0), (0, 1)], "hard") for _ in range(2)] == [2, 2], "it may be called twice"
    cache.evict(1)
    assert cache.untag((0, 0), "other") == 0, "of rows that left nothing is said"


def test_notes_on_rows_that_left_are_dropped_as_files_are_merged(cache):
    for number in range(40):
        cache.tag(ALL, f"tag {number}")
    cache.tag("3:0", "last")
    before = nbytes_of(cache)
    for _ in range(3):
        cache.evict(1)
    cache.tag([(3, row) for row in range(16)], "other")
    for number in range(80):
        cache.tag([(3, row) for row in range(16)], f"other {number}")
    notes, rows = notes_of(cache)
    assert notes.tagged(rows, "tag 39").all()
    assert notes.tagged(rows, "last").sum() == 1
    publish(cache, 1)
    cache.evict(1)
    cache.tag("4:0", "new")
    assert nbytes_of(cache) < before / 5


# wrong arguments


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda cache: cache.exclude((0, 0), reason=3), TypeError, "reason must be a text, not 3"),
        (lambda cache: cache.exclude(7), TypeError, "ids=7: name rows by"),
        (lambda cache: cache.tag((0, 0), 3), TypeError, "a tag must be a text, not 3"),
        (lambda cache: cache.tag((0, 0), ""), ValueError, "cannot be a tag"),
        (lambda cache: cache.tag((0, 0), "all"), ValueError, "'all' cannot be a tag"),
        (lambda cache: cache.untag((0, 0), "included"), ValueError, "'included' cannot be a tag"),
        (lambda cache: cache.tag((0, 0), "3:4"), ValueError, "'3:4' cannot be a tag"),
        (lambda cache: cache.annotate((0, 0)), ValueError, r"cache.annotate\(ids, loss=losses\)"),
        (lambda cache: cache.annotate((0, 0), image=1), ValueError, "the name 'image': take one that is no"),
        (lambda cache: cache.annotate((0, 0), _seq=1), ValueError, "the name '_seq': take one that is no"),
        (lambda cache: cache.annotate((0, 0), **{"": 1}), ValueError, "the name '': take one that is no"),
        (lambda cache: cache.annotate((0, 0), **{"\udcff": 1}), ValueError, "which UTF-8 cannot hold"),
        (
            lambda cache: cache.exclude((0, 0), "caf\udce9"),
            ValueError,
            "reason is .* UTF-8 cannot hold: take",
        ),
        (lambda cache: cache.tag((0, 0), "caf\udce9"), ValueError, "a tag is .* which UTF-8 cannot hold"),
        (lambda cache: cache.annotate((0, 0), loss=[1, 2]), ValueError, r"shape \(2,\) .* goes with 1 id:"),
        (lambda cache: cache.annotate((0, 0), loss="high"), ValueError, "give a number for each, or one"),
        (
            lambda cache: cache.annotate([(0, 0), (0, 1)], loss=np.ma.array([1, 2], mask=[0, 1])),
            TypeError,
            "loss came as a masked array",
        ),
        (lambda cache: cache.annotate([(0, 0)], loss=[np.ma.masked]), TypeError, "loss came as a masked"),
        (lambda cache: cache.annotate((0, 0), loss=[[1]]), ValueError, r"shape \(1, 1\)"),
    ],
)
def test_what_is_no_note_is_refused_and_nothing_is_written(cache, call, error, words):
    with pytest.raises(error, match=words):
        call(cache)
    assert not (cache.path / "notes").exists()


def test_a_closed_cache_takes_no_note(cache):
    cache.close()
    for call in (lambda: cache.exclude((0, 0)), lambda: cache.annotate((0, 0), loss=1)):
        with pytest.raises(ValueError, match="the cache is closed"):
            call()


# files


def test_no_note_no_folder_and_then_older_releases_refuse_the_cache(cache):
    assert not (cache.path / "notes").exists()
    cache.exclude("0:0")
    assert os.stat(cache.path / "notes").st_mode & 0o777 == 0o700
    (name,) = note_names(cache)
    assert NoteFile.parse(name).name == name
    assert NoteFile.parse(f"{name}.bak") is None


def test_files_that_a_merge_has_left_are_not_read_and_go_with_the_next(cache):
    cache.exclude("0:0")
    (first,) = note_names(cache)
    data = (cache.path / "notes" / first).read_bytes()
    cache.include("0:0")
    (cache.path / "notes" / first).write_bytes(data)
    assert excluded(cache) == set()
    cache.exclude("0:1")
    assert excluded(cache) == {(0, 1)}
    assert first not in note_names(cache)


def test_who_reads_while_others_write_and_merge_sees_each_call_wholly(cache):
    is_over = threading.Event()

    def write() -> None:
        for turn in range(in_part(150, 5)):
            [cache.exclude, cache.include][turn % 2](ALL)
        is_over.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not is_over.is_set():
        seen.add(len(excluded(cache)))
    writer.join()
    assert seen <= {0, len(ALL)}
    assert excluded(cache) == set()


def test_a_damaged_file_of_marks_is_an_error_and_one_of_values_is_left_out(cache):
    cache.annotate("0:0", loss=1)
    cache.close()
    cache = ac.Cache.open(cache.path)
    (name,) = note_names(cache)
    (cache.path / "notes" / name).write_bytes(b"\0" * 1000)
    notes, rows = notes_of(cache)
    with pytest.warns(RuntimeWarning, match=f"{name} is damaged: its annotations are lost"):
        assert np.isnan(notes.values(rows, "loss")).all()
    cache.exclude("0:0")
    (name,) = (name for name in note_names(cache) if ".marks." in name)
    (cache.path / "notes" / name).write_bytes(b"\0" * 1000)
    with pytest.raises(ac.CacheFormatError, match=f"{name} is damaged.*call cache.verify"):
        excluded(cache)


def test_verify_finds_damaged_files_and_puts_them_aside(cache):
    cache.exclude("0:0")
    cache.annotate("0:0", loss=1)
    cache.close()
    cache = ac.Cache.open(cache.path)
    for name in note_names(cache):
        (cache.path / "notes" / name).write_bytes(b"damaged")
    assert [problem.reason for problem in cache.verify(repair=False)] == [
        "it is damaged: which rows are excluded and tagged are lost",
        "it is damaged: annotations are lost",
    ]
    assert len(cache.verify()) == 2
    assert cache.verify() == []
    assert excluded(cache) == set()
    cache.exclude("0:1")
    assert excluded(cache) == {(0, 1)}
    cache.evict(1)
    assert note_names(cache) == []


def test_marks_are_synced_and_values_are_not(cache, monkeypatch):
    synced: list[str] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    cache.exclude("0:0")
    monkeypatch.setattr(os, "fsync", noted)
    cache.tag("0:0", "hard")
    assert any(path.endswith(".part") for path in synced)
    assert str(cache.path / "notes") in synced
    synced.clear()
    cache.annotate("0:0", loss=1)
    cache.close()
    assert synced == []


def test_notes_of_a_newer_release_are_refused(cache):
    notes = NoteLines.of(notes_of(cache)[1], ["what is this"], RowStatements.of(np.array([3]), EXCLUDED))
    notes.lines["what"] = RULE + 1
    cache.exclude("0:0")
    put_note(cache, notes.pack())
    with pytest.raises(ac.CacheFormatError, match="does not know: use the release that wrote it"):
        excluded(cache)


@pytest.mark.parametrize("kind", [MARKS, VALUES])
@pytest.mark.parametrize("damage", ["no Arrow", "a row a line", "a row too few", "a text too few"])
def test_a_file_that_somebody_else_wrote_is_an_error_that_names_it(cache, kind, damage):
    """As one of a development version, where each line had one row."""
    notes = NoteLines.of(notes_of(cache)[1], ["loss"], RowStatements.of(np.arange(9), VALUE, 0, np.arange(9)))
    data = {
        "no Arrow": b"mine",
        "a row a line": arrow_file(pa.schema([("seq", pa.int64())]), [np.zeros(1, np.int64)]),
        "a row too few": notes._replace(arrays=(notes.arrays[0][1:], *notes.arrays[1:])).pack(),
        "a text too few": notes._replace(texts=()).pack(),
    }[damage]
    name = put_note(cache, bytes(data), kind)
    notes, rows = notes_of(cache)
    with pytest.raises(ac.CacheFormatError, match=f"{name} has notes that this arrowcache does not know"):
        _ = notes.excluded(rows) if kind == MARKS else notes.values(rows, "loss")


def test_names_of_somebody_else_are_left_alone(cache):
    cache.exclude("0:0")
    (cache.path / "notes" / "README").write_text("mine")
    cache.include("0:0")
    assert excluded(cache) == set()
    assert (cache.path / "notes" / "README").read_text() == "mine"


# room


def test_notes_count_in_the_capacity(cache):
    before = cache.stats().allocated_bytes
    cache.exclude(ALL)
    assert cache.stats().allocated_bytes > before


def test_on_a_full_cache_the_oldest_segments_make_room_for_notes(tmp_path):
    cache = make_cache(tmp_path / "cache", headroom=0)
    publish(cache, 60)
    newest = cache.stats().next_seq - 1
    rows = [(newest, row) for row in range(16)]
    for number in range(in_part(100, 6)):
        cache.tag(rows, f"tag {number}")
        assert cache.stats().allocated_bytes <= cache.stats().capacity_bytes
    publish(cache, 60)
    with cache.snapshot(), pytest.raises(ac.CacheFullError, match=r"a file of .* needs .* to be freed"):
        tag_until_full(cache, (cache.stats().next_seq - 1, 0))
    assert cache.verify() == []


def test_marks_that_would_take_too_much_are_refused_and_evict_nothing(cache):
    before = cache.stats()
    with pytest.raises(ac.CacheFullError, match=r"above an eighth of the capacity: .*rows=a function"):
        tag_until_full(cache, ALL)
    assert cache.stats().segments == before.segments


def test_marks_are_merged_though_they_and_what_they_become_would_take_too_much(cache):
    share = cache.store.settings.notes_bytes
    for row, letter in enumerate("xy"):
        cache.exclude((0, row), reason=letter * (share // 5))  # a file has it twice
    assert len(note_names(cache)) == 1
    assert nbytes_of(cache) > share / 2


@pytest.mark.parametrize("look", [ac.Cache.snapshot, nullcontext])
def test_values_leave_before_segments_do_for_an_exclusion(tmp_path, look):
    cache = make_cache(tmp_path / "cache", capacity="2MiB", headroom=0)
    publish(cache, 120)
    newest = cache.stats().next_seq - 1
    rows = np.array([(newest, row) for row in range(16)])
    written, number = NotesLog(cache.store), 0
    while (stats := cache.stats()).capacity_bytes - stats.allocated_bytes > 32 << 10:
        written.write_values({f"value_{number}_{each}": (rows, rows[:, 1] / 3) for each in range(100)})
        number += 1
    with look(cache):
        cache.exclude((newest, 0), reason="x" * (20 << 10))  # a file has it twice
        assert cache.stats().oldest_seq == stats.oldest_seq
    assert "value_0_0" not in written.names()
    assert cache.verify() == []


def test_on_a_full_cache_that_is_leased_new_values_take_the_place_of_the_oldest(tmp_path):
    cache = make_cache(tmp_path / "cache", headroom=0)
    publish(cache, 60)
    newest = cache.stats().next_seq - 1
    rows = np.array([(newest, row) for row in range(16)])
    cache.evict("64KiB")
    written = NotesLog(cache.store)
    with cache.snapshot():
        for turn in range(60):
            written.write_values({f"value_{turn}_{number}": (rows, rows[:, 1] / 3) for number in range(50)})
            assert cache.stats().allocated_bytes <= cache.stats().capacity_bytes
    notes, there = notes_of(cache)
    assert np.isfinite(notes.values(there, "value_59_49")).sum() == 16
    assert "value_0_0" not in notes.names()
    assert nbytes_of(cache) < cache.store.settings.notes_bytes
    with pytest.warns(RuntimeWarning, match="where exclusions, tags and leased segments leave them as much"):
        written.flush()


def test_a_file_leaves_with_the_newest_segment_that_it_has_a_note_on(cache):
    cache.exclude([(0, 0), (1, 1)])
    cache.annotate((1, 1), loss=1)
    cache.close()
    cache = ac.Cache.open(cache.path)
    cache.evict(1)
    assert len(note_names(cache)) == 2
    cache.evict(1)
    assert note_names(cache) == []


def test_values_take_an_eighth_and_the_oldest_leave(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 2)
    cache.exclude("0:0")
    ids = np.array([(seq, row) for seq in range(2) for row in range(16)])
    for turn in range(12):
        names = [f"value_{turn}_{number}" for number in range(100 if turn < 4 else 30)]
        written = NotesLog(cache.store)
        written.write_values(dict.fromkeys(names, (ids, np.zeros(32))))
        written.merge(VALUES)
    notes, rows = notes_of(cache)
    assert "value_0_0" not in notes.names()
    assert np.isfinite(notes.values(rows, "value_11_29")).all()
    assert notes.excluded(rows)[0]
    assert nbytes_of(cache) <= cache.stats().capacity_bytes / 8 + 4096
    with pytest.raises(ValueError, match="38,400 values are more than an eighth of the cache's capacity"):
        cache.annotate(ids, **{f"value_{number}": 1 for number in range(1200)})


def test_that_values_left_is_told_once_with_the_way_out(tmp_path, caplog):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 2)
    rows = np.array([(seq, row) for seq in range(2) for row in range(16)])

    def fill(turn):
        cache.annotate(rows, **{f"value_{turn}_{number}": rows[:, 1] / 3 for number in range(200)})

    with pytest.warns(RuntimeWarning) as told:  # noqa: PT031 - at which of these calls is no matter
        for turn in range(6):
            fill(turn)
            NotesLog.of(cache.store).flush()
        cache.close()
    (warning,) = told
    assert "annotations of" in str(warning.message)
    assert "all may take 128.0 KiB, an eighth of the capacity" in str(warning.message)
    assert "cache.resize()" in str(warning.message)
    assert warning.filename == __file__
    assert len(caplog.messages) == 1, "one a minute"
    notes, _ = notes_of(ac.Cache.open(cache.path))
    assert "value_5_199" in notes.names()
    assert "value_0_0" not in notes.names()


def test_more_values_in_one_call_than_fit_keep_the_last_rows(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 40)
    rows = np.array([(seq, row) for seq in range(40) for row in range(16)])
    cache.annotate(rows, **{f"value_{number}": rows[:, 1] / 3 for number in range(20)})
    with pytest.warns(RuntimeWarning, match="the oldest annotations of"):
        cache.close()
    cache = ac.Cache.open(cache.path)
    notes, there = notes_of(cache)
    found = np.isfinite(notes.values(there, "value_7"))
    assert found[-1]
    assert not found[0]
    assert nbytes_of(cache) <= cache.store.settings.capacity_bytes / 8


def test_a_value_of_each_row_that_float32_holds_is_annotated_in_one_call(tmp_path):
    cache = ac.Cache.create(tmp_path / "cache", {"x": ac.Tensor("float32", (12,))}, "8MiB", "256KiB")
    with cache.writer() as writer:
        writer.extend(x=np.zeros((155_000, 12), np.float32))
    segments = cache.store.segments()
    ids = np.array([(each.seq, row) for each in segments for row in range(each.rows)])
    assert 4 * len(ids) < cache.store.settings.notes_bytes < 8 * len(ids)
    cache.annotate(ids, loss=np.ones(len(ids), np.float32))
    cache.close()
    notes, rows = notes_of(ac.Cache.open(cache.path))
    assert np.isfinite(notes.values(rows, "loss")).all()


def test_half_of_many_small_rows_are_excluded_in_a_bit_a_row(tmp_path):
    """As lines of 25 bytes they would take nearly the whole cache."""
    kinds = {"x": ac.Tensor("float32", (3,))}
    cache = ac.Cache.create(tmp_path / "cache", kinds, "5MB", segment_bytes="64KiB")
    with cache.writer() as writer:
        writer.extend(x=np.zeros((250_000, 3), np.float32))
    with cache.snapshot() as snapshot:
        ids = snapshot.locate(np.random.default_rng(0).permutation(len(snapshot))[::2])
    for _ in range(2):
        assert cache.exclude(ids) == 125_000
    assert nbytes_of(cache) < 250_000 / 8 + 64 * 128
    with ac.Loader(cache, 64) as loader:
        next(iter(loader))
        assert loader.stats().unselected_rows == 125_000
    cache.include(ids)
    assert not NotesLog(cache.store).excluded(NumberedRows.of(cache.store.segments())).any()
    assert cache.verify() == []


# who dies


def test_an_exclusion_outlives_its_process_at_once_and_values_its_orderly_end(cache):
    end = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    for last, losses in ((end, 0), ("", 1)):
        lines = [
            "import sys, arrowcache as ac",
            "cache = ac.Cache.open(sys.argv[1])",
            "cache.exclude('1:1'); cache.tag('1:2', 'hard'); cache.annotate('1:3', loss=4)",
            last,
        ]
        subprocess.run([sys.executable, "-c", "\n".join(lines), cache.path], check=False, timeout=60)
        assert (excluded(cache), tagged(cache, "hard")) == ({(1, 1)}, {(1, 2)})
        notes, rows = notes_of(cache)
        assert np.isfinite(notes.values(rows, "loss")).sum() == losses
    assert cache.verify() == []


def test_a_forked_child_writes_only_values_of_its_own(cache):
    cache.annotate("0:0", loss=1)

    def child() -> None:
        cache.annotate("0:1", loss=2)
        cache.close()
        notes, rows = notes_of(ac.Cache.open(cache.path))
        assert np.flatnonzero(np.isfinite(notes.values(rows, "loss"))).tolist() == [1]

    with in_child(child):
        pass
    assert values(cache, "loss") == {(0, 0): 1.0, (0, 1): 2.0}


def test_a_dataset_s_cache_has_no_notes(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from arrowcache.torch import cached

    items = torch.utils.data.TensorDataset(torch.zeros(3, 2))
    with cached(items, tmp_path / "items", capacity="10MB") as train:
        for call in (train.cache.exclude, lambda ids: train.cache.annotate(ids, loss=1)):
            with pytest.raises(ValueError, match=r"has no notes on rows.*Subset of the dataset"):
                call((0, 0))


def test_more_values_than_there_may_be_are_refused_at_once_and_annotating_goes_on(cache):
    most = NotesLog(cache.store).max_values
    with pytest.raises(ValueError, match=f"{most + 1:,} values are more than"):
        cache.annotate(np.zeros((most + 1, 2), int), loss=1)
    for _ in range(3):  # more in a second than there may be: the last ones count
        cache.annotate(np.zeros((most // 2, 2), int), loss=1)
    cache.annotate("0:1", loss=2)
    assert values(cache, "loss") == {(0, 0): 1.0, (0, 1): 2.0}


def test_a_million_values_are_written_by_who_brings_them(tmp_path):
    cache = make_cache(tmp_path / "large", capacity="500MB", segment_bytes="1MiB")
    publish(cache, 1)
    cache.annotate(np.zeros((1 << 20, 2), int), loss=1)
    assert not (cache.path / "notes").exists()
    cache.annotate("0:1", loss=2)
    assert len(note_names(cache)) == 1


def test_of_a_million_rows_that_cannot_be_written_the_oldest_are_lost_and_no_training_ends(
    tmp_path, monkeypatch
):
    cache = make_cache(tmp_path / "large", capacity="64MiB", segment_bytes="1MiB")
    publish(cache, SEGMENTS)

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "link_note", fails)
        cache.annotate("0:0", old=1)
        for number in range(11):
            cache.annotate(np.zeros((100_000, 2), int), loss=number)
        with pytest.warns(RuntimeWarning, match=r"wait to be written, the oldest [\d,]+ are lost: no room"):
            cache.annotate("0:1", loss=11)
    assert values(cache, "loss") == {(0, 0): 10.0, (0, 1): 11.0}
    assert values(ac.Cache.open(cache.path), "old") == {}


def test_a_row_that_no_segment_can_have_is_no_other_row(cache):
    with pytest.raises(IndexError, match=r"row 0:4294967301 .* never was in the cache"):
        cache.annotate([(0, 3), (0, 2**32 + 5)], loss=1)
    assert values(cache, "loss") == {}
    cache = ac.Cache.open(cache.path)
    NotesLog(cache.store).write_values({"loss": (np.array([(0, 2**32 + 5), (0, 3)]), np.ones(2))})
    assert values(cache, "loss") == {(0, 3): 1.0}


def test_losses_of_any_framework_and_dtype_are_taken(cache):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for row, loss in enumerate(
        [
            torch.tensor([1.5], dtype=torch.bfloat16, requires_grad=True),
            torch.tensor([1.5], dtype=torch.float16),
            torch.tensor(1.5, dtype=torch.float64),
            np.float16(1.5),
            [1.5],
        ]
    ):
        cache.annotate((0, row), loss=loss)
    cache.annotate({"_seq": torch.tensor([0]), "_row": torch.tensor([5])}, loss=torch.tensor([True]))
    assert values(cache, "loss") == {**dict.fromkeys([(0, row) for row in range(5)], 1.5), (0, 5): 1.0}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_values_are_written_at_the_end_of_a_worker_process(cache, method):
    process = multiprocessing.get_context(method).Process(target=annotate_one, args=(str(cache.path),))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert values(cache, "loss") == {(0, 0): 1.0}


def test_a_cache_that_was_moved_and_opened_anew_is_written_to_where_it_is(cache):
    cache.annotate("0:0", loss=1)
    cache.close()
    moved = cache.path.rename(cache.path.with_name("moved"))
    again = ac.Cache.open(moved)
    again.annotate("0:1", loss=2)
    assert values(again, "loss") == {(0, 0): 1.0, (0, 1): 2.0}


def test_a_cache_that_is_made_again_at_its_path_has_notes_of_its_own(cache, tmp_path):
    """Also where a file has the inode of the one before, as of ext4."""
    assert cache.exclude("0:1") == 1
    kept = tmp_path / "kept"
    os.link(cache.store.folder.lease_lock, kept)
    shutil.rmtree(cache.path)
    again = make_cache(cache.path, {"y": ac.Tensor("int64")})
    with again.writer() as writer:
        writer.extend(y=np.arange(16))
    os.replace(kept, again.store.folder.lease_lock)
    os.utime(again.store.folder.lease_lock)
    assert again.exclude("0:1") == 1


def test_annotating_makes_one_thread_which_ends(cache):
    for _ in range(3):
        cache.annotate("0:0", loss=1)
    (thread,) = own_threads("arrowcache-annotate")
    thread.join(60)
    assert not thread.is_alive()
    assert values(cache, "loss") == {(0, 0): 1.0}


def test_values_that_cannot_be_written_are_kept_and_written_later(cache, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "link_note", fails)
        cache.annotate("0:0", loss=1)
        with pytest.raises(OSError, match="no room"):
            cache.close()
    assert values(cache, "loss") == {(0, 0): 1.0}


@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnhandledThreadExceptionWarning")
def test_after_any_error_the_next_value_is_written_with_those_before(cache, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "link_note", fails)
        cache.annotate("0:0", loss=1)
        (thread,) = own_threads("arrowcache-annotate")
        thread.join(60)
    cache.annotate("0:1", loss=2)
    wait_until(lambda: NotesLog(cache.store).names() == ["loss"], "the file")
    assert values(cache, "loss") == {(0, 0): 1.0, (0, 1): 2.0}


def test_a_capacity_that_another_process_raised_counts(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="512KiB")
    publish(cache, 2)
    with pytest.raises(ac.CacheFullError, match="raise the capacity"):
        cache.exclude("0:1", "x" * 70_000)
    most = NotesLog(cache.store).max_values
    ids = np.zeros((most + 1, 2), np.int64)
    with pytest.raises(ValueError, match="raise the capacity"):
        cache.annotate(ids, loss=np.ones(len(ids)))
    with ac.Cache.open(cache.path) as other:
        other.resize("64MiB")
    cache.annotate(ids, loss=np.ones(len(ids)))
    cache.exclude("0:1", "x" * 70_000)
    assert excluded(cache) == {(0, 1)}


def test_values_of_every_row_that_are_written_again_and_again_stay(tmp_path):
    schema = ac.Schema({"x": ac.Tensor("float32", (11,))})
    cache = ac.Cache.create(tmp_path / "cache", schema, "8MiB", "1MiB")
    with cache.writer() as writer:
        writer.extend(x=np.zeros((100_000, 11), np.float32))
    rows, rng = NumberedRows.of(cache.store.segments()), np.random.default_rng(0)
    ids = np.array([(each.seq, row) for each in cache.store.segments() for row in range(each.rows)])
    notes = NotesLog(cache.store)
    for order in (np.arange(len(ids)), rng.integers(0, len(ids), 2 * len(ids))):
        for first in range(0, len(order), 8192):
            some = order[first : first + 8192]
            notes.write_values({"loss": (ids[some], rng.random(len(some), np.float32))})
            notes.merge(VALUES)
    assert not np.isnan(notes.values(rows, "loss")).any()


def test_what_a_sample_says_stays_as_it_is(cache):
    cache.exclude(ALL)
    cache.annotate(ALL, loss=1)
    with cache.snapshot() as snapshot:
        found = snapshot.gather(np.arange(64))
    assert np.array_equal(found["image"], np.stack([sample(number)["image"] for number in range(64)]))


def test_notes_of_another_process_are_seen_where_none_came_for_long(cache):
    here, there = NotesLog(cache.store), NotesLog(ac.Cache.open(cache.path).store)
    for number in range(3):
        there.annotate(np.array([(0, number)]), {"loss": np.ones(1)})
        there.flush()
        assert here.names() == ["loss"]
        os.utime(cache.path / "notes", (10 + number, 10 + number))
        rows = NumberedRows.of(cache.store.segments())
        for _ in range(2):
            assert np.flatnonzero(here.values(rows, "loss") == 1).tolist() == [*range(number + 1)]
    there.flush()
