"""Snapshots and the mapped segments under them, against a plain Arrow reader of the same files."""

from __future__ import annotations

import datetime as dt
import errno
import gc
import itertools
import os
import sys
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from helpers import (
    DEADLINE_SECONDS,
    append_rows,
    flip_byte,
    in_child,
    limit,
    limited,
    make_cache,
    mapped_seqs,
    overfill,
    publish,
    replace_file,
    segment_files,
    seqs,
    wait_until,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from markup import seen
from processes import Child
from slow_pages import SlowPages, require_slow_pages

import arrowcache as ac
from arrowcache.arrow.schema import DTYPES
from arrowcache.native import engine, maps
from arrowcache.storage import mapping

FIXED = {
    "plain": ac.Schema({"id": ac.Tensor("int64"), "image": ac.Tensor("float32", (16, 16))}),
    "odd": ac.Schema(
        {
            "a": ac.Tensor("float32", (1001,)),
            "b": ac.Tensor("float32", (501,)),
            "c": ac.Tensor("float32", (2001,)),
        }
    ),
    "bytes": ac.Schema({"a": ac.Tensor("uint8"), "b": ac.Tensor("bool"), "c": ac.Tensor("int8", (3,))}),
    "one_kib": ac.Schema({"x": ac.Tensor("float32", (256,)), "at": ac.Timestamp()}),
    "every": ac.Schema(
        {f"{dtype}{i}": ac.Tensor(dtype, shape) for dtype in DTYPES for i, shape in enumerate([(), (3,)])}
    ),
    "page": ac.Schema({"x": ac.Tensor("int16", (2048,))}),
    "pair": ac.Schema({"a": ac.Tensor("float32", (768,)), "b": ac.Tensor("float32", (768,))}),
}
VARIABLE = {
    "text": ac.Schema({"t": ac.String(), "raw": ac.Binary()}),
    "ragged": ac.Schema(
        {
            "x": ac.Tensor("int16", (5,)),
            "r": ac.Ragged("float32"),
            "inner": ac.Ragged("int16", (2, 3)),
            "z": ac.Ragged("complex64", (2,)),
            "flag": ac.Ragged("bool"),
            "t": ac.String(),
        }
    ),
}
SCHEMAS = FIXED | VARIABLE
FULL_ROWS = 10


def random_rows(schema, count, rng):
    """`count` random samples, column by column."""
    columns = {}
    for name, kind in schema.items():
        if isinstance(kind, ac.String):
            columns[name] = ["ü" * int(n) + str(n) for n in rng.integers(0, 9, count)]
        elif isinstance(kind, ac.Binary):
            columns[name] = [rng.bytes(int(n)) for n in rng.integers(0, 30, count)]
        elif isinstance(kind, ac.Ragged):
            columns[name] = [
                random_array(kind.numpy_dtype, (int(n), *kind.inner_shape), rng)
                for n in rng.integers(0, 7, count)
            ]
        else:
            columns[name] = random_array(kind.numpy_dtype, (count, *kind.shape), rng)
    return columns


def random_array(dtype, shape, rng):
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.frombuffer(rng.bytes(nbytes), np.uint8)
    return (raw & 1 if dtype.kind == "b" else raw).view(dtype).reshape(shape)


def build(path, schema, parts, seed=0):
    """A cache whose segments have the given numbers of rows, at most FULL_ROWS."""
    cache = ac.Cache.create(path, schema, capacity="64MiB", segment_bytes="512KiB", segment_rows=FULL_ROWS)
    rng = np.random.default_rng(seed)
    for count in parts:
        with cache.writer() as writer:
            writer.extend(random_rows(schema, count, rng))
    return cache


def plain_rows(cache):
    """Every row by a plain Arrow reader: name -> list of bytes (or str), one a row, oldest first."""
    rows = {name: [] for name in cache.schema}
    for path in segment_files(cache):
        with pa.OSFile(str(path)) as file:
            batch = pa.ipc.open_file(file).get_batch(0)
        for name, kind in cache.schema.items():
            column = batch.column(name)
            if isinstance(kind, ac.String | ac.Binary):
                rows[name] += column.to_pylist()
            elif pa.types.is_list(column.type):
                values = column.values.to_numpy(zero_copy_only=False)
                ends = column.offsets.to_pylist()
                rows[name] += [values[a:b].tobytes() for a, b in itertools.pairwise(ends)]
            else:
                stored = column.to_numpy(zero_copy_only=False)
                rows[name] += [stored[i : i + 1].tobytes() for i in range(len(stored))]
    return rows


def assert_same(cache, expected, ids, got, names=None):
    """Gathered columns hold just the expected rows, in shape, dtype and content."""
    assert list(got) == list(names or cache.schema)
    for name in got:
        kind, column = cache.schema[name], got[name]
        wanted = [expected[name][i] for i in ids]
        if isinstance(kind, ac.String | ac.Binary):
            assert column == wanted
        elif isinstance(kind, ac.Ragged):
            assert isinstance(column, ac.Values)
            assert column.offsets.dtype == np.int64
            assert column.offsets[0] == 0
            assert column.data.dtype == kind.numpy_dtype
            assert column.data.shape == (column.offsets[-1], *kind.inner_shape)
            rows = [column.data[a:b].tobytes() for a, b in itertools.pairwise(column.offsets)]
            assert rows == wanted
        else:
            assert column.shape == (len(ids), *kind.shape)
            assert column.dtype == kind.numpy_dtype
            assert column.flags.c_contiguous
            assert column.flags.writeable
            assert [row.tobytes() for row in column] == wanted


def memory_of(cache, segment):
    """(address, bytes) of a mapped segment's file."""
    name = f"/{segment.name}"
    (line,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(name)]
    return int(line.split("-")[0], 16), segment.nbytes


LAYOUTS = {
    "full": [20],
    "short_last": [20, 3],
    "only_short": [4],
    "mixed": [3, 20, 7, 1, 30, 9],
    "single": [1],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", SCHEMAS)
def test_gathered_rows_are_what_a_plain_reader_reads(tmp_path, kind, layout):
    """Few rows here and now, many by the engine's threads."""
    cache = build(tmp_path / "cache", SCHEMAS[kind], LAYOUTS[layout])
    expected = plain_rows(cache)
    rng = np.random.default_rng(1)
    with cache.snapshot() as snapshot:
        count = len(snapshot)
        assert count == sum(LAYOUTS[layout])
        for ids in (
            rng.permutation(count),
            rng.integers(0, count, 50),
            rng.integers(0, count, 700),
            np.arange(count),
            np.arange(count)[::-1],
            np.array([count - 1]),
            np.zeros(3, np.int64),
            np.empty(0, np.int64),
        ):
            assert_same(cache, expected, ids, snapshot.gather(ids))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("most", [0, 1, 3])
def test_without_mappings_the_rows_are_the_same(tmp_path, monkeypatch, kind, most):
    before = maps.count()
    limit(monkeypatch, mapped_segments=before + most)
    cache = build(tmp_path / "cache", SCHEMAS[kind], [3, 20, 7, 1, 30, 9])
    expected = plain_rows(cache)
    with cache.snapshot() as snapshot:
        for _ in range(3):
            ids = np.random.default_rng(2).integers(0, len(snapshot), 60)
            assert_same(cache, expected, ids, snapshot.gather(ids))
        out = {n: np.empty((60, *k.shape), k.numpy_dtype) for n, k in cache.schema.fixed.items()}
        got = snapshot.gather(ids, out=out)
        assert all(got[name] is out[name] for name in out)
        assert_same(cache, expected, ids, got)
        assert maps.count() - before <= most
    assert maps.count() == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCHEMAS)
def test_what_may_be_on_the_disk_is_not_waited_for_through_its_mapping(tmp_path, kind):
    """A thread that waits for a page may have the GIL; one that reads a file has not."""
    require_slow_pages()
    cache = build(tmp_path / "cache", SCHEMAS[kind], LAYOUTS["mixed"])

    def gather(path):
        cache, pages = ac.Cache.open(path), SlowPages()
        with cache.snapshot() as snapshot:
            snapshot.map_all()
            for segment in snapshot.segments:
                pages.replace(*memory_of(cache, segment))
            ids = np.random.default_rng(0).permutation(len(snapshot))
            got = [snapshot.gather(some) for some in (ids[:5], ids)]
        return ids, got, pages.brought

    with Child(gather, str(cache.path)) as child:
        ids, got, brought = child.result()
    assert brought == 0
    for some, columns in zip((ids[:5], ids), got, strict=True):
        assert_same(cache, plain_rows(cache), some, columns)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_schema_and_any_parts_read_back(tmp_path_factory, data):
    kinds = st.one_of(
        st.builds(ac.Tensor, st.sampled_from(DTYPES), st.lists(st.integers(1, 40), max_size=2).map(tuple)),
        st.builds(ac.Ragged, st.sampled_from(DTYPES), st.lists(st.integers(1, 4), max_size=2).map(tuple)),
        st.sampled_from([ac.String(), ac.Binary(), ac.Timestamp()]),
    )
    schema = ac.Schema(data.draw(st.dictionaries(st.text("abc", min_size=1), kinds, min_size=1, max_size=4)))
    parts = data.draw(st.lists(st.integers(1, 25), min_size=1, max_size=5))
    cache = build(tmp_path_factory.mktemp("cache"), schema, parts, data.draw(st.integers(0, 99)))
    expected = plain_rows(cache)
    names = data.draw(st.lists(st.sampled_from(list(schema)), unique=True, min_size=1))
    with cache.snapshot() as snapshot:
        ids = data.draw(st.lists(st.integers(0, sum(parts) - 1), max_size=40))
        assert_same(cache, expected, ids, snapshot.gather(ids, columns=names), names)


def test_a_gathered_array_is_a_copy_that_outlives_the_snapshot(tmp_path):
    cache = build(tmp_path / "cache", SCHEMAS["ragged"], [20])
    expected = plain_rows(cache)
    with cache.snapshot() as snapshot:
        got = snapshot.gather(range(20))
        one = snapshot.gather([7])
        for column in (got["x"], got["r"].data, one["r"].data):
            column[...] = 0
        assert_same(cache, expected, range(20), snapshot.gather(range(20)))
        got = snapshot.gather(range(20))
    cache.evict("1GB")
    gc.collect()
    assert_same(cache, expected, range(20), got)


def test_a_variable_length_column_takes_no_out(tmp_path):
    cache = build(tmp_path / "cache", SCHEMAS["text"], [20])
    with cache.snapshot() as snapshot, pytest.raises(ValueError, match="'t'"):
        snapshot.gather([0], out={"t": np.zeros(1)})


@pytest.mark.parametrize("rows", [5, 500], ids=["here and now", "by the engine's threads"])
@pytest.mark.parametrize(
    ("first", "second"), [(0, 0), (0, 1), (1, 0), (0, 4), (2, 1)], ids=lambda row: f"from row {row}"
)
def test_out_arrays_that_overlap_are_refused_and_those_that_adjoin_are_filled(tmp_path, first, second, rows):
    """They had rows of one column, or of both, and nothing told."""
    schema = ac.Schema({name: ac.Tensor("float32", (16,)) for name in ("a", "b", "c")})
    cache = build(tmp_path / "cache", schema, [20])
    expected, ids = plain_rows(cache), np.arange(rows) % 20
    buffer = np.zeros((3 * rows, 16), np.float32)
    with cache.snapshot() as snapshot:
        out = {"a": buffer[first : first + rows], "b": buffer[second : second + rows], "c": buffer[-rows:]}
        with pytest.raises(ValueError, match=r"out\['[ab]'\] and out\['[ab]'\] overlap.* array of its own"):
            snapshot.gather(ids, out=out)
        assert not buffer.any()
        out = {"a": buffer[rows : 2 * rows], "b": buffer[:rows], "c": buffer[2 * rows :]}
        assert_same(cache, expected, ids, snapshot.gather(ids, out=out))
        assert snapshot.gather([], out=dict.fromkeys("abc", buffer[:0])).keys() == set("abc")


@pytest.mark.parametrize(
    "ids", [[20], [-1], [0, 1, 99], np.array([2**63], np.uint64), np.array([2**64 - 1], np.uint64)]
)
def test_a_row_outside_the_snapshot_is_an_index_error_and_nothing_is_written(tmp_path, ids):
    cache = build(tmp_path / "cache", SCHEMAS["plain"], [20])
    with cache.snapshot() as snapshot:
        out = {"id": np.full(len(ids), -7, np.int64)}
        with pytest.raises(IndexError, match=r"outside \[0, 20\)"):
            snapshot.gather(ids, columns=["id"], out=out)
        assert out["id"].tolist() == [-7] * len(ids)


def test_row_ids_come_in_any_integer_form(tmp_path):
    cache = build(tmp_path / "cache", SCHEMAS["plain"], [20])
    expected = plain_rows(cache)
    base = np.arange(20)
    with cache.snapshot() as snapshot:
        for ids in (
            range(3),
            (2, 0),
            base[::-3],
            base.astype(np.uint8),
            base.astype(">i4"),
            base.astype(np.uint64),
            [],
        ):
            assert_same(cache, expected, [int(i) for i in ids], snapshot.gather(ids))


def test_an_empty_snapshot_has_no_rows(tmp_path):
    cache = make_cache(tmp_path / "cache")
    with cache.snapshot() as snapshot:
        assert (len(snapshot), snapshot.segments, snapshot.nbytes) == (0, (), 0)
        assert snapshot.gather([])["image"].shape == (0, 16, 16)
        with pytest.raises(IndexError):
            snapshot.gather([0])
        assert snapshot.table().num_rows == 0
        assert snapshot.table().column_names == ["id", "image"]
        assert snapshot.table(columns=["image"]).column_names == ["image"]
    assert cache.dataset().count_rows() == 0


def test_a_snapshot_shows_what_it_reads_and_leases(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 4)
    with cache.snapshot() as snapshot:
        assert repr(snapshot) == "<Snapshot: 64 rows in 4 segments>"
        snapshot.release_oldest(1)
        text, shown = str(snapshot), seen(snapshot._repr_html_())
    for words in ("64 rows in 4 segments", "seq 0 to 3, published", "3 segments, ", "by this process"):
        assert words in text
        assert words in shown.text
    assert len(text.splitlines()) == 5
    assert shown.tags.count("rect") == 4
    assert str(snapshot) == "Snapshot closed"
    assert "closed" in seen(snapshot._repr_html_()).text


def test_a_snapshot_of_nothing_shows_itself(tmp_path):
    with make_cache(tmp_path / "cache").snapshot() as snapshot:
        assert "0 rows in 0 segments" in str(snapshot)
        assert "0 rows in 0 segments" in seen(snapshot._repr_html_()).text


def test_a_closed_snapshot_refuses_and_leases_nothing(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 3)
    snapshot = cache.snapshot()
    snapshot.gather([0])
    assert cache.stats().leased_bytes > 0
    assert len(mapped_seqs(cache)) == 1
    snapshot.close()
    snapshot.close()
    assert cache.stats().leased_bytes == 0
    assert len(mapped_seqs(cache)) == 0
    for use in (lambda: snapshot.gather([0]), snapshot.table, snapshot.map_all):
        with pytest.raises(ValueError, match="closed"):
            use()
    assert "closed" in repr(snapshot)


def test_segments_are_unmapped_before_they_are_unleased(tmp_path, monkeypatch):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 3)
    leased_at_unmap = []
    real = maps.unmap

    def unmap(files):
        leased_at_unmap.append(cache.stats().leased_bytes > 0)
        real(files)

    with cache.snapshot() as snapshot:
        snapshot.map_all()
        monkeypatch.setattr(maps, "unmap", unmap)
    assert leased_at_unmap == [True], "all in one go, still leased"


@contextmanager
def gathering(snapshot, row, monkeypatch):
    """Another thread gathers a row: it has begun in the block, and ends after it. Gives what it gets."""
    inside, go_on, got = threading.Event(), threading.Event(), {}

    def slow(*job):
        inside.set()
        assert go_on.wait(DEADLINE_SECONDS)
        return real(*job)

    real = engine.quick.engine_submit
    with monkeypatch.context() as patch:
        patch.setattr(engine.quick, "engine_submit", slow)
        thread = threading.Thread(target=lambda: got.update(snapshot.gather([row])))
        thread.start()
        assert inside.wait(DEADLINE_SECONDS)
    try:
        yield got
    finally:
        go_on.set()
        thread.join(DEADLINE_SECONDS)


def test_closing_lets_a_gather_in_another_thread_end_first_and_a_writer_waits_for_it(tmp_path, monkeypatch):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 3)
    snapshot = cache.snapshot()
    with gathering(snapshot, 47, monkeypatch) as got:
        snapshot.close()
        assert cache.stats().leased_bytes > 0, "still read"
        with pytest.raises(ValueError, match="closed"):
            snapshot.gather([0])
        writing = threading.Thread(target=append_rows, args=(cache, range(48, 48 + 16 * 150)))
        writing.start()
        wait_until(lambda: cache.stats().waiting_writers or not writing.is_alive(), "the writer to wait")
        assert seqs(cache)[0] == 0
    writing.join(DEADLINE_SECONDS)
    assert got["id"].tolist() == [47]
    assert seqs(cache)[-1] == 152
    assert (cache.stats().leased_bytes, mapped_seqs(cache)) == (0, [])


def test_a_writer_of_this_process_does_not_wait_for_a_lease_that_only_a_view_keeps(tmp_path, monkeypatch):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 2)
    snapshot = cache.snapshot()
    view = snapshot.table()
    with gathering(snapshot, 0, monkeypatch):
        snapshot.close()
    with pytest.raises(ac.CacheFullError, match="this very process"):
        overfill(cache, "wait")
    del view
    publish(cache, 100)


def test_a_table_shows_every_row_without_a_copy_and_outlives_the_snapshot(tmp_path):
    cache = build(tmp_path / "cache", SCHEMAS["ragged"], [20, 5])
    expected = plain_rows(cache)
    with cache.snapshot() as snapshot:
        before = pa.total_allocated_bytes()
        table = snapshot.table()
        assert pa.total_allocated_bytes() - before < 1000
    assert table.column_names == list(cache.schema)
    assert table.num_rows == 25
    tensors = np.concatenate([chunk.to_numpy_ndarray() for chunk in table["x"].chunks])
    assert [row.tobytes() for row in tensors] == expected["x"]
    assert table["t"].to_pylist() == expected["t"]
    assert cache.evict("1GB") == 0, "the table leases what it shows"
    part = table.slice(22, 1).select(["t"])
    del table, tensors
    gc.collect()
    assert part["t"].to_pylist() == [expected["t"][22]]
    assert cache.stats().leased_bytes > 0
    del part
    gc.collect()
    assert cache.stats().leased_bytes == 0
    assert cache.evict("1GB") > 0


def test_record_batches_are_the_rows_of_the_table_each_mapped_in_its_turn(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, segments=3)
    before = mapping.live_mappings()
    with cache.snapshot() as snapshot:
        wanted = snapshot.table(["image"]).to_batches()
        batches = snapshot.record_batches(["image"])
        for number, one in enumerate(wanted):
            found = next(batches)
            assert found.schema.names == ["image"]
            assert found.equals(one)
            assert mapping.live_mappings() - before == 3 + 1, number
            del found
        assert next(batches, None) is None
        first = next(snapshot.record_batches())
        snapshot.release_oldest(2)
        cache.evict("1GB")
        assert seqs(cache) == [0, 1, 2]  # what lives is leased
        assert first.column("id").to_pylist() == list(range(16))
        waiting = snapshot.record_batches()
    with pytest.raises(ValueError, match="the snapshot is closed"):
        next(waiting)
    with pytest.raises(ValueError, match="the snapshot is closed"):
        snapshot.record_batches()
    with pytest.raises(ValueError, match="did you mean 'image'"):
        snapshot.record_batches(["imag"])


def test_a_tables_mapping_is_gone_when_its_last_view_is(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 2)
    with cache.snapshot() as snapshot:
        view = snapshot.table()["image"].chunk(1).to_numpy_ndarray()[3]
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = {line.split()[-1] for line in maps if str(cache.path) in line}
    assert mapped == {str(segment_files(cache)[1])}
    assert view[0, 0] == 19
    del view
    gc.collect()
    with open("/proc/self/maps") as maps:
        assert str(cache.path) not in maps.read()


def test_a_table_view_cannot_change_the_cache(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 1)
    with cache.snapshot() as snapshot:
        view = snapshot.table()["image"].chunk(0).to_numpy_ndarray()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    assert cache.verify() == []


def test_rows_are_located_by_segment_row_and_age(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 4)
    cache.evict(1)
    with cache.snapshot() as snapshot:
        found = snapshot.locate(np.array([0, 17, 47]))
    assert found["_seq"].tolist() == [1, 2, 3]
    assert found["_row"].tolist() == [0, 1, 15]
    assert found["_seq"].dtype == found["_row"].dtype == np.int64
    published = [path.stat().st_mtime for path in segment_files(cache)]
    now = dt.datetime.now(dt.timezone.utc).timestamp()
    assert np.allclose(now - found["_age_seconds"], published, atol=10)
    assert found["_age_seconds"].dtype == np.float64


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_damaged_segment_is_quarantined_and_the_rest_is_read(tmp_path, number):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 3)
    victim = segment_files(cache)[number]
    replace_file(victim, victim.read_bytes()[:-1])
    with cache.snapshot() as snapshot:
        out = {"id": np.full(48, -1, np.int64)}
        with (
            pytest.warns(RuntimeWarning, match="quarantined"),
            pytest.raises(ac.CorruptSegmentError, match=victim.name),
        ):
            snapshot.gather(range(48), columns=["id"], out=out)
        rest = [row for row in range(48) if row // 16 != number]
        assert snapshot.gather(rest)["id"].tolist() == rest
        with pytest.raises(ac.CorruptSegmentError), pytest.warns(RuntimeWarning):
            snapshot.gather([16 * number])
    assert number not in seqs(cache)
    assert (cache.path / "quarantine" / victim.name).exists()
    assert cache.stats().leased_bytes == 0


def test_mapping_all_leaves_damaged_segments_out(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 4)
    for number in (0, 2):
        replace_file(segment_files(cache)[number], b"ARROW1 but no more")
    with cache.snapshot() as snapshot:
        with pytest.warns(RuntimeWarning, match="quarantined"):
            assert snapshot.map_all() == 32
        assert [segment.seq for segment in snapshot.segments] == [1, 3]
        assert snapshot.gather(range(32))["id"].tolist() == [*range(16, 32), *range(48, 64)]
        assert len(snapshot) == 32
    assert seqs(cache) == [1, 3]
    assert len(mapped_seqs(cache)) == 0


def test_one_that_a_writer_closes_while_it_meets_a_damaged_segment_maps_and_leases_nothing(
    tmp_path, monkeypatch
):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 4)
    replace_file(segment_files(cache)[1], b"ARROW1 but no more")
    snapshot = cache.snapshot()
    real = maps.File.open

    def close_and_open(*arguments):
        snapshot.close()  # as the writer's thread, through on_contention
        real(*arguments)

    monkeypatch.setattr(maps.File, "open", close_and_open)
    with pytest.warns(RuntimeWarning, match="quarantined"):
        snapshot.map_all()
    assert (mapped_seqs(cache), cache.stats().leased_bytes) == ([], 0)
    with cache.snapshot() as after:
        after.map_all()
    assert mapped_seqs(cache) == [], "what it had reserved is reserved no more"


@pytest.mark.parametrize("part", ["header", "offsets", "footer"])
def test_a_damaged_segment_among_many_of_a_known_layout_is_found(tmp_path, part):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 6)
    victim = segment_files(cache)[4]
    data = victim.read_bytes()
    offsets = np.arange(0, 17 * 256, 256, dtype=np.int32).tobytes()
    flip_byte(victim, {"header": 3, "offsets": data.index(offsets) + 9, "footer": -8}[part])
    with cache.snapshot() as snapshot:
        with pytest.warns(RuntimeWarning, match=victim.name):
            assert snapshot.map_all() == 80
        assert snapshot.gather(range(80))["id"].tolist() == [*range(64), *range(80, 96)]


def test_segments_of_a_known_layout_are_not_parsed_again(tmp_path, checked):
    cache = build(tmp_path / "cache", SCHEMAS["every"], [FULL_ROWS] * 6)
    expected = plain_rows(cache)
    with cache.snapshot() as snapshot:
        snapshot.map_all()
        assert checked == [0, 1]
        assert_same(cache, expected, range(60), snapshot.gather(range(60)))
    with ac.Cache.open(cache.path, check="bytes").snapshot() as snapshot:
        snapshot.map_all()
    assert checked == [0, 1, *range(6)], "bytes to be checked are read in any case"


@pytest.mark.parametrize("length", [0, 1000])
def test_a_table_of_a_damaged_segment_is_an_error_and_leaves_no_lease(tmp_path, length):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 3)
    replace_file(segment_files(cache)[1], bytes(length))
    with (
        cache.snapshot() as snapshot,
        pytest.warns(RuntimeWarning, match="quarantined"),
        pytest.raises(ac.CorruptSegmentError, match=f"{1:020d}"),
    ):
        snapshot.table()
    gc.collect()
    assert cache.stats().leased_bytes == 0
    assert seqs(cache) == [0, 2]
    assert cache.stats().quarantined == 1


def test_altered_text_is_a_damaged_segment_and_not_a_decoding_error(tmp_path):
    cache = make_cache(tmp_path / "cache", ac.Schema({"text": ac.String()}))
    with cache.writer() as writer:
        writer.append(text="plain")
    file = segment_files(cache)[0]
    replace_file(file, file.read_bytes().replace(b"plain", b"pl\xffin"))
    with cache.snapshot() as snapshot, pytest.raises(ac.CorruptSegmentError, match="UTF-8"):
        snapshot.gather([0])


@pytest.mark.parametrize("read", ["rows without a mapping", "a table"])
def test_a_suspect_segment_is_checked_before_it_is_read(tmp_path, monkeypatch, read):
    publish(make_cache(tmp_path / "cache"), 3)
    cache = ac.Cache.open(tmp_path / "cache", check="bytes")
    flip_byte(segment_files(cache)[2], 3000)
    if read == "rows without a mapping":
        limit(monkeypatch, mapped_segments=maps.count() + 1)
    with (
        cache.snapshot() as snapshot,
        pytest.warns(RuntimeWarning, match="quarantined"),
        pytest.raises(ac.CorruptSegmentError),
    ):
        snapshot.table() if read == "a table" else snapshot.gather([0, 20, 40])


def test_a_damaged_segment_without_a_mapping_is_a_typed_error_too(tmp_path, monkeypatch):
    limit(monkeypatch, mapped_segments=maps.count() + 1)
    cache = make_cache(tmp_path / "cache")
    publish(cache, 3)
    victim = segment_files(cache)[2]
    replace_file(victim, victim.read_bytes()[:-1])
    with cache.snapshot() as snapshot:
        with (
            pytest.warns(RuntimeWarning, match="quarantined"),
            pytest.raises(ac.CorruptSegmentError, match=victim.name),
        ):
            snapshot.gather([0, 20, 40])
        assert snapshot.gather([0, 20])["id"].tolist() == [0, 20]
    assert seqs(cache) == [0, 1]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM])
def test_a_process_that_is_short_of_files_or_memory_condemns_no_segment(tmp_path, monkeypatch, code):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 3)

    def fail(*args):
        raise OSError(code, os.strerror(code))

    with cache.snapshot() as snapshot:
        with monkeypatch.context() as patch:
            patch.setattr(maps.File, "open", fail)
            with pytest.raises(OSError, match=os.strerror(code)):
                snapshot.gather([0])
        assert snapshot.gather(range(48))["id"].tolist() == list(range(48))
    assert seqs(cache) == [0, 1, 2]


@pytest.mark.parametrize("kind", ["plain", "ragged"])
def test_where_no_addresses_are_left_what_needs_none_goes_on(tmp_path, kind):
    cache = build(tmp_path / "cache", SCHEMAS[kind], [FULL_ROWS] * 6)

    def child():
        with cache.snapshot() as snapshot, cache.snapshot() as rest:
            expected = snapshot.gather(range(30))
            with limited(0):
                assert snapshot.gather([0, 29])["x" if kind == "ragged" else "id"].shape[0] == 2
                if kind == "plain":  # its layout is known: it is read, and needs no mapping
                    assert rest.gather([30])["id"].shape[0] == 1
                else:
                    with pytest.raises(OSError, match="ulimit -v"):
                        rest.gather([30])
            again = rest.gather(range(60))
            for name in set(expected) & set(SCHEMAS[kind].fixed):
                assert again[name][:30].tobytes() == expected[name].tobytes()
        assert cache.verify() == []

    with in_child(child):
        pass


def test_a_forgotten_snapshot_warns_and_leases_nothing(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 1)
    forgotten = [cache.snapshot()]
    with pytest.warns(ResourceWarning, match="not closed"):
        forgotten.clear()
    assert cache.stats().leased_bytes == 0


@pytest.mark.slow
def test_threads_that_map_the_same_segments_read_the_right_rows(tmp_path):
    """Threads change over between any two instructions; afterwards one thread checks all again."""
    schema = ac.Schema({"x": ac.Tensor("int64")})
    cache = make_cache(tmp_path / "cache", schema, capacity="20MiB", segment_bytes="16KiB", segment_rows=10)
    with cache.writer() as writer:
        writer.extend(x=np.arange(2000))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for repeat in range(10):
            with cache.snapshot() as snapshot:
                barrier, wrong = threading.Barrier(4), []

                def gather(seed, snapshot=snapshot, barrier=barrier, wrong=wrong):
                    rng = np.random.default_rng(seed)
                    barrier.wait()
                    for _ in range(12):
                        ids = rng.integers(0, len(snapshot), 30)
                        if not np.array_equal(snapshot.gather(ids)["x"], ids):
                            wrong.append(ids)

                threads = [threading.Thread(target=gather, args=(4 * repeat + i,)) for i in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert not wrong
                everything = np.arange(len(snapshot))
                np.testing.assert_array_equal(snapshot.gather(everything)["x"], everything)
    finally:
        sys.setswitchinterval(interval)


def test_a_snapshot_that_the_garbage_collector_frees_while_another_maps_does_not_deadlock(tmp_path):
    schema = ac.Schema({"x": ac.Tensor("int64")})
    cache = make_cache(tmp_path / "cache", schema, capacity="20MiB", segment_bytes="16KiB", segment_rows=10)
    with cache.writer() as writer:
        writer.extend(x=np.arange(1000))
    thresholds = gc.get_threshold()
    gc.set_threshold(5)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            for _ in range(30):
                lost = cache.snapshot()
                lost.gather([0])
                cycle = [lost]
                cycle.append(cycle)
                del lost, cycle
                with cache.snapshot() as snapshot:
                    everything = np.arange(len(snapshot))
                    np.testing.assert_array_equal(snapshot.gather(everything)["x"], everything)
            gc.collect()
    finally:
        gc.set_threshold(*thresholds)
    assert cache.stats().leased_bytes == 0
