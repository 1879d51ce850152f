"""The public face: create, open, and what does not fit together."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
from helpers import (
    KIB,
    ROW,
    limit,
    make_cache,
    publish,
    published_ids,
    sample,
    segment_files,
    seqs,
    wait_until,
)
from markup import seen

import arrowcache as ac
from arrowcache.storage.locks import LockFile


def test_a_cache_is_created_private_and_opened_as_it_was(tmp_path):
    path = tmp_path / "deep" / "cache"
    cache = ac.Cache.create(
        str(path), ROW, capacity="2MB", segment_bytes="100kB", segment_rows=50, headroom=0.25, durable=True
    )
    assert cache.path == path
    assert cache.schema == ROW
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    again = ac.Cache.open(path)
    assert again.store.settings == cache.store.settings
    settings = again.store.settings
    assert (settings.capacity_bytes, settings.full_rows) == (2_000_000, 50)
    assert (settings.headroom, settings.durable) == (0.25, True)
    assert settings.segment_bytes <= 100_000


def test_relative_paths_are_kept_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_cache(Path("cache"))
    cache = ac.Cache.open("cache")
    monkeypatch.chdir("/")
    publish(cache, 1)
    assert cache.path == tmp_path / "cache"
    assert pickle.loads(pickle.dumps(cache)).stats().segments == 1


def test_creating_over_a_cache_needs_to_be_asked_for(tmp_path):
    publish(make_cache(tmp_path / "cache"), 2)
    with pytest.raises(FileExistsError, match="exist_ok=True"):
        make_cache(tmp_path / "cache")
    cache = make_cache(tmp_path / "cache", exist_ok=True)
    assert seqs(cache) == [0, 1]


def test_creating_again_with_another_capacity_resizes(tmp_path):
    first = make_cache(tmp_path / "cache")
    publish(first, 40)
    words = r"opened with a capacity of 512.0 KiB, and had 1.0 MiB: the oldest \d+ rows left"
    with pytest.warns(RuntimeWarning, match=words):
        make_cache(tmp_path / "cache", exist_ok=True, capacity="512KiB")
    assert first.stats().capacity_bytes == 512 * KIB
    assert len(seqs(first)) < 30
    make_cache(tmp_path / "cache", exist_ok=True, capacity="256MiB")  # nothing leaves


def test_creating_again_with_another_schema_is_a_schema_error_and_changes_nothing(tmp_path):
    first = make_cache(tmp_path / "cache")
    publish(first, 2)
    with pytest.raises(ac.SchemaError, match="another schema"):
        make_cache(tmp_path / "cache", ac.Schema({"x": ac.String()}), exist_ok=True, capacity="512KiB")
    assert first.stats().capacity_bytes == 1024 * KIB
    assert published_ids(first) == list(range(32))


WORDS = ac.Schema({"word": ac.String()})
SAID = [
    {}, {"segment_bytes": "64KiB"}, {"segment_rows": 7}, {"headroom": 0.25}, {"durable": True},
    {"headroom": 0},
    {"segment_bytes": "64KiB", "segment_rows": 7, "headroom": 0.25, "durable": True},
]  # fmt: skip


@pytest.mark.parametrize("schema", [ROW, WORDS], ids=["fixed", "variable"])
@pytest.mark.parametrize("said", SAID)
def test_creating_again_with_the_same_arguments_goes_on_also_after_a_resize(tmp_path, schema, said):
    for capacity in ("1MiB", "2MiB", "1MiB"):
        cache = ac.Cache.create(tmp_path / "cache", schema, "1MiB", exist_ok=True, **said)
        settings = cache.store.settings
        assert settings.capacity_bytes == 1 << 20
        ac.Cache.create(tmp_path / "cache", schema, "1MiB", exist_ok=True)
        cache.resize(capacity)
        assert ac.Cache.open(tmp_path / "cache").store.settings == settings.with_capacity(
            1 << 20 if capacity == "1MiB" else 2 << 20
        )


@pytest.mark.parametrize("schema", [ROW, WORDS], ids=["fixed", "variable"])
@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"segment_bytes": "32KiB"}, r"segment_bytes=\d+ \(.*\), and not 32768"),
        ({"segment_rows": 7}, "segment_rows=6, and not 7"),
        ({"headroom": 0.1}, r"headroom=0\.25, and not 0\.1"),
        ({"headroom": 0}, r"headroom=0\.25, and not 0\.0"),
        ({"durable": False}, "durable=True, and not False"),
    ],
)
def test_creating_again_with_another_setting_is_refused_and_changes_nothing(tmp_path, schema, said, says):
    first = {"segment_bytes": "64KiB", "segment_rows": 6, "headroom": 0.25, "durable": True}
    cache = ac.Cache.create(tmp_path / "cache", schema, "1MiB", **first)
    before = (tmp_path / "cache/cache.json").read_bytes()
    with pytest.raises(
        ValueError, match=f"is there already, with {says}: leave .* out, or give another path"
    ):
        ac.Cache.create(tmp_path / "cache", schema, "2MiB", exist_ok=True, pace=ac.Pace(max_reuse=2), **said)
    assert (tmp_path / "cache/cache.json").read_bytes() == before
    assert cache.pace is None


@pytest.mark.parametrize("rows", [1, 16, 100])
def test_the_capacity_that_the_message_names_is_accepted_and_suffices(tmp_path, rows):
    with pytest.raises(ValueError, match="raise capacity to") as caught:
        make_cache(tmp_path / "cache", capacity=1, segment_rows=rows, segment_bytes="1MiB")
    number, unit = str(caught.value).split("raise capacity to ")[1].split(",")[0].split()
    capacity = int((float(number) + 0.1) * {"KiB": 1024, "MiB": 1024**2}[unit])
    cache = make_cache(tmp_path / "cache", capacity=capacity, segment_rows=rows, segment_bytes="1MiB")
    with cache.writer(on_full="raise") as writer:
        for number in range(6 * rows):
            writer.append(sample(number))
    assert seqs(cache)[-1] == 5
    assert cache.verify() == []


def test_a_capacity_of_exactly_four_segments_holds_two_at_least(tmp_path):
    schema = ac.Schema({"raw": ac.Binary()})
    cache = ac.Cache.create(tmp_path / "cache", schema, capacity="4MiB", segment_bytes="1MiB", segment_rows=1)
    with cache.writer(on_full="raise") as writer:
        for _ in range(12):
            writer.append(raw=bytes(1024 * KIB - 4 * KIB))
    assert len(seqs(cache)) >= 2


def test_making_a_cache_that_is_there_never_makes_it_smaller_than_its_segments_need(tmp_path):
    sizes = {"capacity": "8MiB", "segment_bytes": "1MiB", "segment_rows": 900}
    publish(make_cache(tmp_path / "cache", **sizes), 3, rows=900)
    with pytest.raises(ValueError, match="under 4 segments"):
        ac.Cache.create(tmp_path / "cache", ROW, capacity="1MB", exist_ok=True)
    cache = ac.Cache.open(tmp_path / "cache")
    assert len(seqs(cache)) == 3
    assert cache.stats().capacity_bytes == 8 << 20


def test_no_capacity_is_too_small_for_the_rows_that_a_pace_waits_for(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="8MiB", segment_bytes="64KiB")
    publish(cache, 3)
    cache.set_pace(ac.Pace(min_rows=6000))
    with pytest.raises(ValueError, match="lower min_rows, or raise the capacity"):
        cache.resize("5MiB")
    assert len(seqs(cache)) == 3
    assert cache.stats().capacity_bytes == 8 << 20


def test_a_closed_cache_refuses_but_what_was_open_goes_on(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 1)
    snapshot, writer = cache.snapshot(), cache.writer()
    with cache as same:
        assert same is cache
    cache.close()
    for use in (
        cache.stats,
        cache.verify,
        cache.snapshot,
        cache.writer,
        cache.dataset,
        lambda: cache.evict(1),
    ):
        with pytest.raises(ValueError, match="closed"):
            use()
    with pytest.raises(ValueError, match="closed"):
        cache.resize("2MiB")
    assert snapshot.gather([0])["id"].tolist() == [0]
    writer.append(sample(99))
    writer.close()
    snapshot.close()
    assert published_ids(cache) == [*range(16), 99]


def test_a_cache_pickles_as_its_path_and_check(tmp_path):
    make_cache(tmp_path / "cache")
    cache = ac.Cache.open(tmp_path / "cache", check="bytes")
    again = pickle.loads(pickle.dumps(cache))
    assert again.path == cache.path
    assert again.store.check_bytes
    assert len(pickle.dumps(cache)) < 300


def test_a_dataset_scans_all_rows_and_leases_them_while_it_lives(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 3)
    dataset = cache.dataset()
    assert dataset.count_rows() == 48
    assert dataset.to_table(columns=["id"], filter=pc.field("id") > 40)["id"].to_pylist() == list(
        range(41, 48)
    )
    assert cache.evict("1GB") == 0
    del dataset
    gc.collect()
    # pyarrow's threads let go of the last batch a moment after their answer
    wait_until(lambda: cache.evict("1GB") > 0, "the dataset's lease to end")


def test_a_cache_says_what_it_is(tmp_path):
    cache = make_cache(tmp_path / "cache")
    assert repr(cache) == f"<Cache {cache.path}: 2 columns, capacity 1.0 MiB>"
    odd = make_cache(cache.path.parent / "\x1b[31modd")
    assert repr(odd).isprintable()


def test_a_cache_shows_what_it_holds(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 3)
    with cache.snapshot():
        text, shown = str(cache), seen(cache._repr_html_())
    for words in (f"Cache {cache.path}", "3 segments, 48 rows", "seq 0 to 2", "by writer", "leased", "image"):
        assert words in text
    for words in (str(cache.path), "3 segments, 48 rows", "seq 0 to 2", "writer 100 %", "leased", "(16, 16)"):
        assert words in shown.text
    assert shown.tags.count("rect") == 3
    assert len(text.splitlines()) < 15
    assert cache.stats().leased_bytes == 0


def test_a_cache_shows_how_many_rows_are_excluded_or_tagged(tmp_path):
    with make_cache(tmp_path / "cache") as cache:
        publish(cache, 2)
        assert "excluded" not in str(cache)
        cache.exclude(["0:1", "1:2"])
        cache.tag(["1:2"], "hard\n")
        cache.tag(["0:0"], "easy")
        cache.untag(["0:0"], "easy")
        for shown in (str(cache), cache._repr_html_()):
            assert "2 rows excluded" in shown
            assert "1 row tagged hard\\n" in shown
            assert "easy" not in shown
        cache.evict("2MiB")
        assert "excluded" not in str(cache)


def test_an_empty_cache_shows_itself(tmp_path):
    cache = make_cache(tmp_path / "cache")
    assert "0 segments, 0 rows" in str(cache)
    assert "0 segments, 0 rows" in seen(cache._repr_html_()).text


def test_two_looks_at_a_cache_tell_how_fast_it_evicts(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    cache = make_cache(tmp_path / "cache")
    publish(cache, 10)
    assert "eviction  0 segments so far" in str(cache)
    cache.evict(4 * cache.stats().published_bytes // 10)
    clock[0] += 2
    assert "eviction  4 segments so far; about " in str(cache)
    assert "32 rows/s, 2 segments/s (last 2.0 s)" in seen(cache._repr_html_()).text
    clock[0] += 100
    again = ac.Cache.open(cache.path)
    assert "eviction  4 segments so far; the next look tells the rate" in str(again)


def lock_it(cache):
    file = LockFile(cache.store.folder.cache_lock)
    assert file.try_exclusive()
    return file


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda cache: cache.close(), "the cache is closed: open it again with Cache.open"),
        (lambda cache: shutil.rmtree(cache.path), "its folder was moved or removed while in use"),
        (
            lambda cache: cache.path.rename(cache.path.with_name("elsewhere")),
            "its folder was moved or removed",
        ),
        (
            lambda cache: shutil.rmtree(cache.path / "segments"),
            "its folder was moved or removed while in use",
        ),
        (lambda cache: (cache.path / "cache.json").write_text("{}"), "cache.json is damaged"),
        (lambda cache: (cache.path / "cache.json").unlink(), "it has no cache.json"),
        (lock_it, "was held for over 0 s by pid"),
    ],
)
def test_a_cache_that_cannot_be_looked_at_says_why_in_a_sentence(tmp_path, monkeypatch, harm, words):
    limit(monkeypatch, display_seconds=0)
    cache = make_cache(tmp_path / "cache")
    publish(cache, 1)
    undo = harm(cache)
    text, shown = str(cache), seen(cache._repr_html_())
    assert words in text
    assert words in shown.text
    assert "\n" not in text
    assert repr(cache).startswith("<Cache ")
    if isinstance(undo, LockFile):
        undo.close()


def test_a_path_of_any_bytes_is_shown(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff<b>\x1b[31m\n")
    cache = make_cache(path)
    str(cache).encode()
    assert "b" in seen(cache._repr_html_()).tags
    assert seen(cache._repr_html_()).tags == seen(make_cache(tmp_path / "plain")._repr_html_()).tags
    assert "Cache " in str(cache).splitlines()[0]
    assert r"\udcff<b>\x1b[31m\n" in seen(cache._repr_html_()).text


def test_segments_that_leave_while_a_cache_is_looked_at_are_not_missed(tmp_path, monkeypatch):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 5)
    lstat, oldest = os.lstat, segment_files(cache)[0]

    def late(path, **options):
        if path == str(oldest):
            oldest.unlink(missing_ok=True)
        return lstat(path, **options)

    monkeypatch.setattr(os, "lstat", late)
    fresh = ac.Cache(cache.store)
    cache.store.look_anew()
    assert "4 segments, 64 rows" in str(fresh)


def test_statistics_are_values(tmp_path):
    stats = make_cache(tmp_path / "cache").stats()
    assert pickle.loads(pickle.dumps(stats)) == stats
    with pytest.raises(AttributeError):
        stats.rows = 3  # type: ignore[misc]


def test_a_folder_that_another_creates_between_two_looks_at_it_is_a_folder(tmp_path, monkeypatch):
    path, lexists = tmp_path / "cache", os.path.lexists

    def late(asked):
        if asked == path and not lexists(path):
            monkeypatch.setattr(os.path, "lexists", lexists)
            make_cache(path)
        return lexists(asked)

    monkeypatch.setattr(os.path, "lexists", late)
    assert make_cache(path, exist_ok=True).stats().segments == 0


def test_of_several_that_create_at_once_all_get_the_same_cache(tmp_path):
    barrier = threading.Barrier(6)
    made, failures = [], []

    def work(number):
        try:
            barrier.wait(20)
            cache = make_cache(tmp_path / "cache", exist_ok=True)
            publish(cache, 1, first=1000 * number)
            made.append(cache)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert seqs(made[0]) == list(range(6))
    assert made[0].verify() == []


@pytest.mark.slow
def test_a_fresh_process_reads_what_this_one_wrote(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 2)
    script = (
        "import sys, arrowcache as ac\n"
        "with ac.Cache.open(sys.argv[1]) as cache, cache.snapshot() as snapshot:\n"
        "    rows = snapshot.gather([31, 0, 5])\n"
        "    print(rows['id'].tolist(), rows['image'][:, 0, 0].tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(cache.path)],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(ac.__file__).parents[1])},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("[31, 0, 5] [31.0, 0.0, 5.0]\n", "")


@pytest.mark.filterwarnings("ignore:the capacity is")  # beyond this disk
def test_a_segment_above_two_gigabytes_is_possible_only_where_offsets_allow(tmp_path):
    wide = ac.Schema({"x": ac.Tensor("float32", (1 << 20,))})
    cache = ac.Cache.create(tmp_path / "cache", wide, capacity="100GiB", segment_bytes="16GiB")
    assert cache.store.settings.full_rows * (1 << 20) < 2**31
    scalar = ac.Schema({"x": ac.Tensor("int8")})
    cache = ac.Cache.create(tmp_path / "other", scalar, capacity="100GiB", segment_bytes="16GiB")
    assert cache.store.settings.full_rows < 2**31


def test_what_was_written_as_any_type_is_read_as_it_was(tmp_path):
    import datetime as dt

    moment = dt.datetime(2024, 2, 29, 12, 30, 15, 123456)  # noqa: DTZ001  # naive is UTC
    row = {
        "signal": np.arange(6, dtype=np.float32).reshape(2, 3),
        "flag": True,
        "z": 1 - 2j,
        "name": "naïve 🙂",
        "raw": b"\0\1",
        "at": moment,
        "label": 3,
    }
    schema = {**ac.Schema.infer(row), "half": ac.Tensor("bfloat16", (2,))}
    bits = np.array([0x3FC0, 0xBE80], np.uint16)  # 1.5 and -0.25
    cache = ac.Cache.create(tmp_path / "cache", schema, capacity="1MiB", segment_bytes="16KiB")
    with cache.writer() as writer:
        writer.append({**row, "half": bits})
    with cache.snapshot() as snapshot:
        got = snapshot.gather([0])
        table = snapshot.table()
    assert got["signal"].tolist() == [row["signal"].tolist()]
    assert (got["flag"].dtype, got["flag"].tolist()) == (np.bool_, [True])
    assert got["z"].tolist() == [1 - 2j]
    assert got["half"].tolist() == [bits.tolist()]
    assert (got["name"], got["raw"]) == ([row["name"]], [row["raw"]])
    assert got["at"].tolist() == [moment]
    assert got["label"].tolist() == [3]
    assert table["at"].to_pylist() == [moment]
    assert table["name"].to_pylist() == [row["name"]]


def test_a_capacity_beyond_the_disk_is_warned_of_with_the_numbers(tmp_path):
    """It was accepted in silence, and the disk ran full."""
    path = tmp_path / "new" / "cache"
    schema = {"x": ac.Tensor("int64")}
    with pytest.warns(RuntimeWarning, match="the capacity is 90.9 TiB, and the disk has .*free") as caught:
        cache = ac.Cache.create(path, schema, "100TB", "1MiB")
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ac.Cache.open(path).close()  # it was said
        cache.resize("8MB")
        with pytest.raises(RuntimeWarning, match=r"capacity is 181\.9 TiB"):
            cache.resize("200TB")
        assert cache.stats().capacity_bytes == 8 * 10**6
        with pytest.raises(RuntimeWarning, match="Lower the capacity, or free space"):
            ac.Cache.create(tmp_path / "other", schema, "100TB", "1MiB")
        assert not (tmp_path / "other").exists()
    with pytest.warns(RuntimeWarning, match="181.9 TiB") as caught:
        cache.resize("200TB")
    assert [warning.filename for warning in caught] == [__file__]
    assert cache.stats().capacity_bytes == 200 * 10**12
    cache.close()
