"""ParquetRows: every row equally likely, equal to what is stored, and errors that name file and column."""

from __future__ import annotations

import datetime as dt
import gzip
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from drawing import require_pure, take
from helpers import limit
from quick import first_is_quick

import arrowcache as ac
from arrowcache.arrow.foreign import plain
from arrowcache.errors import SamplerError, SchemaError
from arrowcache.sampling.sources import ParquetRows

ROWS = 100


def table(first: int = 0, rows: int = ROWS) -> pa.Table:
    """Rows whose every column is a function of their id."""
    ids = np.arange(first, first + rows)
    vectors = ids[:, None] * np.float32(0.5) + np.arange(3, dtype=np.float32)
    return pa.table(
        {
            "id": ids,
            "vector": pa.FixedSizeListArray.from_arrays(vectors.astype(np.float32).ravel(), 3),
            "pixels": pa.array((ids[:, None] + np.arange(4)).astype(np.uint8).tolist(), pa.list_(pa.uint8())),
            "ragged": pa.array([list(range(i % 4)) for i in ids], pa.list_(pa.int16())),
            "flag": ids % 2 == 0,
            "text": [f"n{i}" for i in ids],
            "data": [bytes([i % 256]) * 2 for i in ids],
            "when": pa.array([dt.datetime(2020, 1, 1) + dt.timedelta(hours=int(i)) for i in ids]),  # noqa: DTZ001
        }
    )


def check(sample) -> int:
    """That each column is what was stored; returns the id."""
    number = int(sample["id"])
    (expected,) = table(number, 1).to_pylist()
    for name, value in sample.items():
        stored = expected[name]
        if name == "when":
            assert value == np.datetime64(stored, "us")
        else:
            assert np.array_equal(value, np.asarray(stored) if isinstance(stored, list) else stored), name
    return number


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three files of two to five row groups, one of them of another size than the others."""
    path = tmp_path / "data"
    (path / "sub").mkdir(parents=True)
    pq.write_table(table(0), path / "a.parquet", row_group_size=20)
    pq.write_table(table(100, 30), path / "sub" / "b.parquet", row_group_size=20)
    pq.write_table(table(130, 70), path / "sub" / "c.parquet", row_group_size=50)
    (path / "_SUCCESS").write_text("")
    (path / "sub" / "_metadata.parquet").write_text("no Parquet")
    (path / ".hidden.parquet").write_text("no Parquet")
    return path


def test_the_schema_follows_from_the_files(folder):
    assert ParquetRows(folder).schema == ac.Schema(
        {
            "id": ac.Tensor("int64"), "vector": ac.Tensor("float32", (3,)), "pixels": ac.Ragged("uint8"),
            "ragged": ac.Ragged("int16"), "flag": ac.Tensor("bool"), "text": ac.String(),
            "data": ac.Binary(), "when": ac.Timestamp(),
        }
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rows_per_group", first_is_quick([None, 4, 1000]))
def test_every_row_comes_and_is_what_was_stored(folder, rows_per_group):
    with ParquetRows(folder, rows_per_group=rows_per_group) as source:
        seen = [check(sample) for sample in take(source, 2000)]
    assert set(seen) == set(range(200))


def test_what_a_user_says_of_a_list_makes_it_a_tensor(folder):
    source = ParquetRows(folder, schema={"pixels": ac.Tensor("uint8", (2, 2)), "id": ac.Tensor("float64")})
    assert list(source.schema) == ["pixels", "id"]
    for sample in take(source, 50):
        assert sample["pixels"].tolist() == (sample["id"] + np.array([[0, 1], [2, 3]])).tolist()


@pytest.mark.parametrize("rows_per_group", [None, 30])
def test_segments_smaller_than_a_row_group_have_no_more_of_small_ones(tmp_path, rows_per_group):
    """The share of the small one is within six standard deviations of its rows', which come by tens."""
    pq.write_table(pa.table({"id": range(110)}), tmp_path / "a.parquet", row_group_size=100)
    source, tasks = ParquetRows(tmp_path, rows_per_group=rows_per_group), 500
    small = sum(int(s["id"]) >= 100 for seed in range(tasks) for s in take(source, 20, seed))
    assert abs(small - tasks * 20 * 10 / 110) < 6 * np.sqrt(tasks * 12)


@pytest.mark.slow
@pytest.mark.parametrize("rows_per_group", [None, 1, 30])
def test_every_row_is_equally_likely_whatever_the_size_of_its_row_group(folder, rows_per_group):
    """Drawn often enough that each count is within six standard deviations, or the seed is to blame."""
    draws = 6000
    ids = [int(s["id"]) for s in take(ParquetRows(folder, ["id"], rows_per_group=rows_per_group), draws)]
    mean = draws / 200
    counts = np.bincount(ids, minlength=200)
    assert np.abs(counts - mean).max() < 6 * np.sqrt(mean)


def test_a_row_group_is_yielded_in_pieces_of_every_row_once(tmp_path, monkeypatch):
    limit(monkeypatch, parquet_bytes=7 * 16)
    pq.write_table(pa.table({"x": np.arange(50), "t": [f"n{i}" for i in range(50)]}), tmp_path / "a.parquet")
    pieces = ParquetRows(tmp_path)(np.random.default_rng(0))
    drawn: list[int] = []
    while len(drawn) < 50:
        piece = next(pieces)
        assert 0 < len(piece["x"]) < 50
        assert piece["t"] == [f"n{i}" for i in piece["x"]]
        drawn += piece["x"].tolist()
    assert sorted(drawn) == list(range(50))


@pytest.mark.slow
def test_a_filter_leaves_only_rows_for_which_it_is_true_each_equally_likely(folder):
    few = pc.bit_wise_and(pc.field("id"), 7) == 1
    condition = (pc.field("text") != "n9") & (few | (pc.field("id") > 150))
    kept = {i for i in range(200) if i != 9 and (i % 8 == 1 or i > 150)}
    for rows_per_group in (None, 5):
        source = ParquetRows(folder, ["id"], condition, rows_per_group=rows_per_group)
        ids = [int(s["id"]) for s in take(source, 3000)]
        assert set(ids) == kept
        counts = np.bincount(ids, minlength=200)[sorted(kept)]
        assert np.abs(counts - 3000 / len(kept)).max() < 6 * np.sqrt(3000 / len(kept))


def test_row_groups_that_statistics_rule_out_are_never_read(folder):
    source = ParquetRows(folder, ["flag"], pc.field("id") >= 180)
    assert " 20 rows" in repr(source)
    with pytest.raises(ValueError, match="no row group that may have rows"):
        ParquetRows(folder, filter=pc.field("id") > 1000)


def test_a_filter_that_keeps_nothing_of_what_statistics_promise_is_an_error(tmp_path):
    pq.write_table(pa.table({"x": [0, 2]}), tmp_path / "a.parquet")
    with pytest.raises(SamplerError, match="keeps no row"):
        next(ParquetRows(tmp_path, filter=pc.field("x") == 1)(np.random.default_rng(0)))


@pytest.mark.slow
def test_a_task_is_a_function_of_the_source_the_seed_and_its_number(folder):
    require_pure(ParquetRows(folder, rows_per_group=7))
    require_pure(ParquetRows(folder, ["id", "text"], pc.bit_wise_and(pc.field("id"), 3) == 0))


def test_files_given_one_by_one_are_the_same_dataset(folder):
    files = [folder / "a.parquet", folder / "sub" / "b.parquet", (folder / "sub" / "c.parquet").as_uri()]
    some, all_of_them = ParquetRows(files), ParquetRows(folder.as_uri())
    assert [s["text"] for s in take(some, 50)] == [s["text"] for s in take(all_of_them, 50)]


def test_a_relative_path_means_the_same_in_another_process(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    source = ParquetRows("data", ["id"])
    monkeypatch.chdir("/")
    assert len(take(source, 5)) == 5


@pytest.mark.slow
def test_a_pool_publishes_rows_of_a_dataset(folder, tmp_path):
    source = ParquetRows(folder)
    with ac.Cache.create(tmp_path / "cache", source.schema, "64MiB", "1MiB", segment_rows=70) as cache:
        with ac.SamplerPool(cache, source, workers=1, segments=2) as pool:
            pool.wait()
        with cache.snapshot() as snapshot:
            rows = snapshot.gather(np.arange(len(snapshot)))
        assert len(rows["id"]) == 140
        assert rows["text"] == [f"n{i}" for i in rows["id"]]
        assert (rows["vector"][:, 1] == rows["id"] * np.float32(0.5) + 1).all()


def test_whole_row_groups_fill_full_segments_from_the_start_and_some_rows_of_each_small_ones(folder):
    assert not ParquetRows(folder).ramp
    assert ParquetRows(folder, rows_per_group=7).ramp


# -- bad input ---------------------------------------------------------------------------------------


def test_what_is_not_there_is_an_error_that_names_it(folder):
    with pytest.raises(FileNotFoundError, match="no/such"):
        ParquetRows(folder / "no" / "such")
    (folder / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no file that ends in \.parquet.*empty"):
        ParquetRows(folder / "empty")
    with pytest.raises(SchemaError, match="no field 'texd': did you mean 'text'"):
        ParquetRows(folder, ["texd"])
    with pytest.raises(ValueError, match="at least one"):
        ParquetRows([])
    with pytest.raises(ValueError, match="gopher://host/x is no URI"):
        ParquetRows("gopher://user:secret@host/x?key=secret")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"columns": "id"}, TypeError), ({"columns": []}, TypeError), ({"filter": "id > 3"}, TypeError),
        ({"rows_per_group": 0}, ValueError), ({"rows_per_group": 1.5}, TypeError),
        ({"retries": -1}, ValueError),
        ({"filesystem": "s3"}, TypeError), ({"fill": {"no": 1}}, ValueError),
        ({"filter": pc.field("no") > 3}, SchemaError), ({"schema": {"text": ac.Binary()}}, SchemaError),
    ],
)  # fmt: skip
def test_arguments_that_cannot_work_fail_at_once(folder, arguments, error):
    with pytest.raises(error):
        ParquetRows(folder, **arguments)


def test_a_schema_that_drifts_is_an_error_that_names_file_and_field(folder):
    drifted = table(200, 10).set_column(0, "id", pa.array(range(10), pa.int32()))
    pq.write_table(drifted, folder / "d.parquet")
    with pytest.raises(SchemaError, match=r"d\.parquet: field 'id' is .*int32.*int64.*a\.parquet"):
        ParquetRows(folder)
    assert ParquetRows(folder, ["text"]).schema == ac.Schema({"text": ac.String()})
    converted = ParquetRows(folder, schema={"id": ac.Tensor("int64")})
    assert set(range(10)) <= {int(sample["id"]) for sample in take(converted, 1000)}
    pq.write_table(table(200, 10).drop(["text"]), folder / "d.parquet")
    with pytest.raises(SchemaError, match=r"d\.parquet: no field 'text'"):
        ParquetRows(folder)


def test_a_column_that_nothing_holds_is_an_error_that_names_file_and_field(tmp_path):
    pq.write_table(pa.table({"a": [1], "map": [{"x": 1}]}), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match=r"a\.parquet: field 'map' is struct"):
        ParquetRows(tmp_path)
    assert list(ParquetRows(tmp_path, ["a"]).schema) == ["a"]


def test_a_null_is_an_error_that_names_file_and_column_unless_it_is_filled(tmp_path):
    pq.write_table(pa.table({"x": [1.0, None], "y": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match=r"a\.parquet: field 'x' lacks 1 value, "):
        take(ParquetRows(tmp_path), 1)
    filled = take(ParquetRows(tmp_path, fill={"x": -1.0, "y": ""}), 20)
    assert {(float(s["x"]), s["y"]) for s in filled} == {(1.0, "a"), (-1.0, "")}
    assert {s["y"] for s in take(ParquetRows(tmp_path, filter=pc.field("x").is_valid()), 5)} == {"a"}


@pytest.mark.parametrize("value", [0.5, "none", None, 2**70])
def test_a_fill_that_the_column_cannot_hold_is_an_error_that_names_file_and_column(tmp_path, value):
    pq.write_table(pa.table({"x": [1, None]}), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match=r"a\.parquet: field 'x' .*cannot be filled with"):
        ParquetRows(tmp_path, fill={"x": value})
    assert {int(s["x"]) for s in take(ParquetRows(tmp_path, fill={"x": 7.0}), 9)} == {1, 7}


VIEWS = {
    "text": (pa.array(["a", "b"]).cast(pa.string_view()), ac.String(), ["a", "b"]),
    "data": (pa.array([b"a", b"b"]).cast(pa.binary_view()), ac.Binary(), [b"a", b"b"]),
    "large_text": (pa.array(["a", "b"], pa.large_utf8()), ac.String(), ["a", "b"]),
    "coded": (pa.array(["a", "b"]).dictionary_encode(), ac.String(), ["a", "b"]),
    "uuid": (pa.array([b"a" * 16, b"b" * 16], pa.uuid()), ac.Binary(), [b"a" * 16, b"b" * 16]),
    "json": (pa.array(["1", "{}"], pa.json_()), ac.String(), ["1", "{}"]),
    "list_view": (pa.array([[1], [2, 3]], pa.list_view(pa.int64())), ac.Ragged("int64"), [[1], [2, 3]]),
    "large_list_view": (
        pa.array([[[1, 2]], []], pa.large_list_view(pa.list_(pa.int8(), 2))),
        ac.Ragged("int8", (2,)),
        [[[1, 2]], []],
    ),
}


@pytest.mark.parametrize("rows_per_group", [None, 1])
@pytest.mark.parametrize("condition", [None, pc.field("id") >= 0, pc.field("other") == "x"])
@pytest.mark.parametrize("name", VIEWS)
def test_columns_of_views_and_extensions_are_what_they_stand_for(tmp_path, name, condition, rows_per_group):
    column, kind, values = VIEWS[name]
    others = {"id": [0, 1], "other": pa.array(["x", "x"]).cast(pa.string_view())}
    try:
        pq.write_table(pa.table({name: column, **others}), tmp_path / "x.parquet")
    except pa.ArrowNotImplementedError as error:
        pytest.skip(f"this pyarrow does not write it: {error}")
    if pq.read_schema(tmp_path / "x.parquet").field(name).type != column.type:
        pytest.skip("this pyarrow does not write it")
    with ParquetRows(tmp_path, [name, "id"], condition, rows_per_group=rows_per_group) as source:
        assert source.schema[name] == kind
        for sample in take(source, 20):
            found, expected = sample[name], values[int(sample["id"])]
            assert found.tolist() == expected if isinstance(found, np.ndarray) else found == expected


@pytest.mark.parametrize("kind", [pa.list_view, pa.large_list_view])
def test_list_views_in_any_order_are_lists(kind):
    views = pa.array([[1], None, [2, 3], []], kind(pa.int64()))
    for column in (views, views[1:], views[2:3], views[:0], views.take(pa.array([2, 0, 1]))):
        plain(column).validate(full=True)
        assert plain(column).to_pylist() == column.to_pylist()
    swapped = pa.ListViewArray.from_arrays([2, 0, 0], [1, 2, 0], pa.array([1, 2, 3]))
    assert plain(swapped).to_pylist() == [[3], [1, 2], []]


def test_a_column_of_views_is_filled_and_filtered(tmp_path):
    text = pa.array(["a", None, "c"]).cast(pa.string_view())
    pq.write_table(pa.table({"text": text, "id": [0, 1, 2]}), tmp_path / "x.parquet")
    filled = take(ParquetRows(tmp_path, fill={"text": "none"}), 20)
    assert {(int(s["id"]), s["text"]) for s in filled} == {(0, "a"), (1, "none"), (2, "c")}
    assert {int(s["id"]) for s in take(ParquetRows(tmp_path, ["id"], pc.field("text") == "c"), 20)} == {2}


DAYS = pa.array([1, 2], pa.duration("s"))
REFUSED = [
    pa.array([1, 2], pa.decimal128(5, 2)), pa.array([1, 2], pa.decimal256(50, 2)), pa.nulls(2), DAYS,
    pa.array([1, 2], pa.time32("s")), pa.array([{"a": 1}] * 2), pa.array([["a"], ["b"]]),
    pa.array([["a"], ["b"]], pa.list_(pa.string(), 1)), pa.array([[], []]),
    pa.array([["a"], ["b"]], pa.list_view(pa.string_view())),
    pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
]  # fmt: skip


@pytest.mark.parametrize("column", REFUSED, ids=lambda column: str(column.type)[:20])
def test_what_no_column_can_hold_is_refused_when_the_source_is_made(tmp_path, column):
    try:
        pq.write_table(pa.table({"x": column}), tmp_path / "x.parquet")
    except pa.ArrowNotImplementedError as error:
        pytest.skip(f"this pyarrow does not write it: {error}")
    with pytest.raises(SchemaError, match=r"x\.parquet: field 'x' is .*, which no column can hold: cast it"):
        ParquetRows(tmp_path)
    with pytest.raises(SchemaError, match=r"x\.parquet: field 'x' is .*, and its column float64\[3\]"):
        ParquetRows(tmp_path, schema={"x": ac.Tensor("float64", (3,))})


def test_lists_of_another_size_than_the_schema_has_are_refused_when_the_source_is_made(tmp_path):
    pairs = pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))
    pq.write_table(pa.table({"x": pairs}), tmp_path / "x.parquet")
    assert ParquetRows(tmp_path, schema={"x": ac.Tensor("int64", (2, 1))}).schema["x"].shape == (2, 1)
    with pytest.raises(SchemaError, match=r"field 'x' is fixed_size_list.*\[2\], and its column int64\[3\]"):
        ParquetRows(tmp_path, schema={"x": ac.Tensor("int64", (3,))})


def test_times_and_text_that_do_not_fit_say_what_to_do(tmp_path):
    pq.write_table(pa.table({"x": pa.array([1001, 2000], pa.timestamp("ns"))}), tmp_path / "x.parquet")
    with pytest.raises(SchemaError, match=r"field 'x': .*would lose data.*: round the times"):
        take(ParquetRows(tmp_path), 1)
    broken = pa.Array.from_buffers(pa.utf8(), 1, pa.array([b"\xff"]).buffers())
    pq.write_table(pa.table({"x": broken}), tmp_path / "x.parquet")
    with pytest.raises(SchemaError, match=r"field 'x' has text that is not UTF-8: make it binary"):
        take(ParquetRows(tmp_path), 1)


@pytest.mark.parametrize(
    "condition",
    [
        pc.field("text") > 3, pc.field("id"), pc.field("id") + 1,
        pc.match_substring_regex(pc.field("text"), "n("),
    ],
)  # fmt: skip
def test_a_filter_that_does_not_fit_is_no_damaged_file(folder, condition):
    with pytest.raises(SchemaError, match=r"a\.parquet: the filter .* does not fit: "):
        ParquetRows(folder, filter=condition)


def test_a_filter_that_fails_for_a_row_is_no_damaged_file(tmp_path):
    pq.write_table(pa.table({"x": [3, 0]}), tmp_path / "a.parquet")
    divisor = pc.field("x")
    with pytest.raises(
        SchemaError, match=r"a\.parquet: the filter .* some row of row group 0: divide by zero; r"
    ):
        take(ParquetRows(tmp_path, filter=pc.scalar(6) / divisor > 1), 1)
    replaced = pc.if_else(divisor == 0, 1, divisor)
    assert {int(s["x"]) for s in take(ParquetRows(tmp_path, filter=pc.scalar(6) / replaced > 1), 9)} == {0, 3}


def test_a_damaged_file_is_an_error_that_names_it(folder):
    damaged = folder / "sub" / "b.parquet"
    whole = damaged.read_bytes()
    damaged.write_bytes(b"no Parquet at all")
    with pytest.raises(SamplerError, match=r"b\.parquet: cannot be read as Parquet"):
        ParquetRows(folder)
    damaged.write_bytes(whole)
    source = ParquetRows(damaged, retries=0)
    damaged.write_bytes(bytes(len(whole)))
    with pytest.raises(SamplerError, match=r"b\.parquet: cannot be read as Parquet"):
        take(source, 1)
    damaged.unlink()
    with pytest.raises(FileNotFoundError, match=r"b\.parquet"):
        take(source, 1)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b"PAR1", mtime=0), "it is compressed by gzip: decompress it"),
        (b"PK\3\4" + bytes(99), "it is a zip archive: unpack it"),
        (b"\x89HDF\r\n\x1a\n", "it is an HDF5 file"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"), (b"<html>", "it is a page of HTML"),
        (b"ARROW1\0\0", "it is an Arrow IPC file"), (b"PAR1" + bytes(99), "get the file anew"),
    ],
)  # fmt: skip
def test_another_file_than_parquet_is_said_to_be_that(tmp_path, content, says):
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(SamplerError, match=rf"x\.parquet: cannot be read as Parquet: .*{says}"):
        ParquetRows(tmp_path)


def test_a_column_that_is_misspelt_or_named_twice_is_an_error(folder):
    for given in ({"columns": ["txt"]}, {"schema": {"txt": ac.String()}}, {"columns": ["id", "txt"]}):
        with pytest.raises(SchemaError, match="no field 'txt': did you mean 'text'"):
            ParquetRows(folder, **given)
    with pytest.raises(ValueError, match="names a column twice"):
        ParquetRows(folder, ["id", "id"])


def test_an_empty_dataset_is_an_error(tmp_path):
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet.*there is no rows"):
        ParquetRows(tmp_path)


@pytest.mark.parametrize("order", [1, -1])
def test_a_filter_that_keeps_no_row_of_many_row_groups_is_an_error_however_often_each_is_read(
    tmp_path, order
):
    pq.write_table(pa.table({"x": [0, 2]}), tmp_path / "x.parquet")
    source = ParquetRows(tmp_path, filter=pc.field("x") == 1)
    reads = list(islice(source.plan_reads(np.random.default_rng(0), 10), 1000))[::order]
    for read in [*reads[:100], *reads[:999]]:  # some twice, as hedges and what is tried again
        assert len(read()["x"]) == 0
    with pytest.raises(SamplerError, match=r"x\.parquet: one of 1,000 row groups in a row .*keeps no row"):
        reads[-1]()
    with pytest.raises(SamplerError, match=r"x\.parquet: one of 1,000 row groups in a row"):
        take(source, 1)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("passes", [None, 1])
@pytest.mark.parametrize(("rows", "group_rows"), [(4000, 200), (1000, 50), (1000, 100)])
def test_a_file_that_has_changed_is_an_error_that_names_it(tmp_path, rows, group_rows, passes, on_error):
    def write(rows: int, group_rows: int) -> None:
        pq.write_table(pa.table({"x": np.arange(rows)}), tmp_path / "x.parquet", row_group_size=group_rows)

    write(2000, 100)
    source = ParquetRows(tmp_path / "x.parquet", passes=passes)
    write(rows, group_rows)
    cache = ac.Cache.create(tmp_path / "cache", source.schema, capacity="10MB", segment_rows=300)
    given = {"progress": False, "on_error": on_error, "segments": None if passes else 99}
    with (
        ThreadPoolExecutor(1) as executor,
        ac.SamplerPool(cache, source, workers=1, executor=executor, **given) as pool,
        pytest.raises(ac.SamplerError, match=r"x\.parquet: has changed since ParquetRows was made"),
    ):
        pool.wait(timeout=60)
