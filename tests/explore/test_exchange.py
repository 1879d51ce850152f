from __future__ import annotations

import datetime as dt

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from every_type import every_type
from helpers import (
    EVERY_TYPE,
    flip_byte,
    ids_of,
    limit,
    make_cache,
    publish,
    published_ids,
    segment_files,
    seqs,
)

import arrowcache as ac
from arrowcache import explore
from arrowcache.arrow.foreign import kind_of
from arrowcache.explore.exchange import export_parquet, import_parquet
from arrowcache.sampling.sources import ParquetRows

SIZES = {"capacity": "8MiB", "segment_bytes": "1MiB"}


@pytest.fixture
def cache(tmp_path):
    with make_cache(tmp_path / "cache") as cache:
        publish(cache, segments=3)
        yield cache


def all_rows(cache):
    with cache.snapshot() as snapshot:
        return snapshot.gather(np.arange(len(snapshot)))


def assert_same(found, wanted):
    if isinstance(wanted, ac.Values):
        np.testing.assert_array_equal(found.offsets, wanted.offsets)
        found, wanted = found.data, wanted.data
    if isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
    else:
        assert found == wanted


def test_every_type_comes_back_as_it_was(varied, tmp_path):
    files = export_parquet(varied, tmp_path / "out")
    assert [path.name for path in files] == [f"{seq:020d}.parquet" for seq in range(3)]
    assert import_parquet(tmp_path / "out", tmp_path / "back", **SIZES) == 21
    back = ac.Cache.open(tmp_path / "back")
    assert back.schema == varied.schema
    before, after = all_rows(varied), all_rows(back)
    for name in EVERY_TYPE:
        assert_same(after[name], before[name])


def test_anybody_reads_what_was_exported(varied, tmp_path):
    names = ["tensor_int16", "boxes", "name", "when", "scalar_bool"]
    table = pq.read_table(export_parquet(varied.path, tmp_path / "out", names)[0])
    wanted = every_type(21)
    assert table.schema.names == names
    assert table.schema.field("tensor_int16").type.list_size == 15
    assert table["tensor_int16"].to_pylist() == wanted["tensor_int16"][:7].reshape(7, 15).tolist()
    np.testing.assert_array_equal(table["boxes"][0].as_py(), wanted["boxes"][0])
    assert table["name"].to_pylist() == wanted["name"][:7]
    assert table["when"][0].as_py() == dt.datetime(2026, 1, 1, 0, 0, 0, 1, dt.timezone.utc)
    assert table["scalar_bool"].to_pylist() == wanted["scalar_bool"][:7].tolist()
    assert kind_of(table.schema.field("tensor_int16")) == ac.Tensor("int16", (3, 5))


def test_pandas_and_duckdb_read_what_was_exported(cache, tmp_path):
    pd = pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
    duckdb = pytest.importorskip("duckdb", reason="the extra 'explore' is not installed")
    files = export_parquet(cache, tmp_path / "out")
    assert pd.read_parquet(files)["id"].tolist() == list(range(48))
    with duckdb.connect() as connection:
        found = connection.sql(f"select sum(id), min(image[2]) from '{tmp_path}/out/*.parquet'").fetchall()
    assert found == [(sum(range(48)), 1.0)]


def test_large_segments_are_divided_into_row_groups(cache, tmp_path, monkeypatch):
    limit(monkeypatch, exported_bytes=4096)
    path = export_parquet(cache, tmp_path / "out")[0]
    with pq.ParquetFile(path) as file:
        assert file.num_row_groups > 4
    assert import_parquet(path, tmp_path / "back", **SIZES) == 16


def test_the_oldest_segments_are_exported_too_and_released_as_they_are_done(tmp_path, monkeypatch):
    cache = make_cache(tmp_path / "cache", capacity="512KiB")
    publish(cache, segments=14)

    def write(table, path, original=pq.write_table, **options):
        original(table, path, **options)
        if path.name[:20] != f"{0:020d}":
            publish(cache, segments=1)  # on_full="raise"

    monkeypatch.setattr(pq, "write_table", write)
    assert len(export_parquet(cache, tmp_path / "out")) == 14
    assert seqs(cache)[0] > 6
    assert cache.stats().leased_bytes == 0


def test_nothing_is_overwritten(cache, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match="give a new or an empty one"):
        export_parquet(cache, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    with pytest.raises(FileExistsError, match="a file, and no folder"):
        export_parquet(cache, tmp_path / "out" / "mine")
    assert (tmp_path / "out" / "mine").read_text() == "mine"


@pytest.mark.parametrize("inside", [".", "segments", "new/deeper"])
def test_nothing_is_exported_into_the_cache(cache, inside):
    before = sorted(cache.path.rglob("*"))
    with pytest.raises(ValueError, match="the cache's own folder"):
        export_parquet(cache, cache.path / inside)
    assert sorted(cache.path.rglob("*")) == before


def test_a_file_is_whole_or_not_there(cache, tmp_path, monkeypatch):
    written = []

    def write_table(table, where, original=pq.write_table, **options):
        original(table, where, **options)
        written.append(where)
        if len(written) == 2:
            where.write_bytes(where.read_bytes()[:100])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", write_table)
    with pytest.raises(OSError, match="No space left"):
        export_parquet(cache, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"{0:020d}.parquet"]


def test_an_empty_cache_exports_no_file(tmp_path):
    assert export_parquet(make_cache(tmp_path / "cache"), tmp_path / "out") == []


def test_an_unknown_column_makes_no_folder(cache, tmp_path):
    with pytest.raises(ValueError, match="did you mean 'image'"):
        export_parquet(cache, tmp_path / "out", ["imag"])
    assert not (tmp_path / "out").exists()


# rows

ROWS = [
    ("included", [0, *range(2, 48)]), ("all", range(48)), ("hard", [2, 19]), ("1:3", [19]),
    ([(0, 1), (0, 2)], [2]),
    (np.array([[0, 0], [2, 5]]), [0, 37]), (lambda columns: columns["id"] % 16 == 1, [17, 33]),
    ({"_seq": [2, 2, 0], "_row": [7, 7, 0]}, [0, 39]),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "ids"), ROWS)
def test_the_rows_that_are_exported_are_those_that_a_loader_would_read(cache, tmp_path, rows, ids):
    cache.exclude([(0, 1)], reason="bad")
    cache.tag([(0, 1), (0, 2), (1, 3)], "hard")
    files = export_parquet(cache, tmp_path / "out", rows=rows)
    table = pa.concat_tables([pq.read_table(file) for file in files])
    assert table["id"].to_pylist() == [*ids]
    assert all(pq.read_metadata(file).num_rows for file in files)
    assert "_excluded" not in table.column_names or rows == "all"
    with ac.Loader(cache, 1, shuffle=None, rows=rows) as loader:
        assert [int(batch["id"][0]) for batch in loader] == [*ids]


def test_all_rows_are_exported_with_their_marks_which_are_no_columns_of_another_cache(cache, tmp_path):
    assert pq.read_table(export_parquet(cache, tmp_path / "plain", rows="all")[0]).column_names == [
        "id",
        "image",
    ]
    cache.exclude([(0, 1), (2, 0)], reason="bad")
    cache.tag([(1, 3)], "hard")
    cache.annotate([(0, 2)], loss=[0.5])
    files = export_parquet(cache, tmp_path / "out", rows="all")
    table = pa.concat_tables([pq.read_table(file) for file in files])
    assert table.column_names == ["id", "image", "_excluded", "_reason", "_tags", "loss"]
    assert table.filter(table["_excluded"])["id"].to_pylist() == [1, 32]
    assert [reason for reason in table["_reason"].to_pylist() if reason] == ["bad", "bad"]
    assert table["_tags"].to_pylist()[19] == ["hard"]
    assert [value for value in table["loss"].to_pylist() if value is not None] == [0.5]
    import_parquet(files, tmp_path / "back", **SIZES)
    assert ac.Cache.open(tmp_path / "back").schema == cache.schema


@pytest.mark.parametrize("columns", [["id"], ["image", "_row"], ["id", "_excluded"], ["_tags"]])
def test_an_excluded_row_keeps_its_mark_whatever_columns_are_named(cache, tmp_path, columns):
    (plain,) = {tuple(pq.read_table(file).column_names) for file in export_parquet(
        cache, tmp_path / "plain", columns, rows="all"
    )}  # fmt: skip
    assert plain == tuple(columns), "no row is excluded"
    cache.exclude([(0, 1), (2, 0)])
    files = export_parquet(cache, tmp_path / "out", columns, rows="all")
    table = pa.concat_tables([pq.read_table(file) for file in files])
    assert table.column_names == [*columns, *{"_excluded"}.difference(columns)]
    assert np.flatnonzero(table["_excluded"].to_numpy()).tolist() == [1, 32]
    assert pq.read_table(export_parquet(cache, tmp_path / "rest", columns)[0]).column_names == columns


def test_ids_and_notes_can_be_named_as_columns(cache, tmp_path):
    cache.tag([(1, 3)], "hard")
    (file,) = export_parquet(cache, tmp_path / "out", ["_row", "id", "_seq", "_tags"], rows="hard")
    assert pq.read_table(file).to_pydict() == {"_row": [3], "id": [19], "_seq": [1], "_tags": [["hard"]]}
    assert len(export_parquet(cache, tmp_path / "ids", ["_seq", "_row"])) == 3
    for columns in (["_seq", "_seq"], ["_seq", "imag"], []):
        with pytest.raises(ValueError, match=r"twice|did you mean|empty"):
            export_parquet(cache, tmp_path / "none", columns)


def test_rows_that_choose_nothing_are_an_error_and_make_no_folder(cache, tmp_path):
    cache.tag([(1, 3)], "hard")
    cache.exclude([(1, 3)])
    for rows, says in (
        ("hrad", "did you mean 'hard'"),
        (lambda columns: columns["id"] < 0, "none of the 48 rows"),
        ("1:3", "none of the 48 rows"),
    ):
        with pytest.raises(ValueError, match=says):
            export_parquet(cache, tmp_path / "out", rows=rows)
    with pytest.raises(TypeError, match="rows must be 'included', 'all', a tag"):
        export_parquet(cache, tmp_path / "out", rows=7)
    cache.exclude([(seq, row) for seq in range(3) for row in range(16)])
    with pytest.raises(ValueError, match="all 48 rows are excluded: rows='all' exports them"):
        export_parquet(cache, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_rows_of_a_query_are_exported(cache, tmp_path):
    pytest.importorskip("duckdb", reason="the extra 'explore' is not installed")
    cache.exclude([(0, 1)])
    found = explore.sql(cache, "select _seq, _row from cache where id % 16 = 1 and not _excluded")
    files = export_parquet(cache, tmp_path / "out", rows=found)
    assert [pq.read_table(file)["id"].to_pylist() for file in files] == [[17], [33]]
    with pytest.raises(ValueError, match="no column _seq and no _row"):
        export_parquet(cache, tmp_path / "none", rows=explore.sql(cache, "select id from cache"))


@pytest.mark.parametrize("made_by", ["to_pandas", "sql", "sample", "a part"])
def test_tensors_of_a_frame_are_written_as_parquet_and_come_back(varied, tmp_path, made_by):
    pd = pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
    pytest.importorskip("duckdb", reason="the extra 'explore' is not installed")
    frame = {
        "to_pandas": lambda: explore.to_pandas(varied),
        "sql": lambda: explore.sql(varied, "select * from cache"),
        "sample": lambda: explore.sample(varied, 9), "a part": lambda: explore.to_pandas(varied).iloc[3:9:2],
    }[made_by]()  # fmt: skip
    frame.to_parquet(tmp_path / "x.parquet")
    back = pd.read_parquet(tmp_path / "x.parquet")
    assert [*back.columns] == [*frame.columns]
    assert back.index.equals(frame.index)
    table = pq.read_table(tmp_path / "x.parquet")
    for name, kind in varied.schema.items():
        if isinstance(kind, ac.Tensor) and kind.shape and not kind.dtype.startswith("complex"):
            assert table.schema.field(name).type.list_size == kind.shape[0]
            for found, wanted in zip(table[name].to_pylist(), frame[name], strict=True):
                np.testing.assert_array_equal(np.array(found, wanted.dtype), wanted)
    source = ParquetRows(tmp_path / "x.parquet", ["tensor_int16", "boxes"])
    assert {**source.schema} == {name: varied.schema[name] for name in source.schema}


# files of others

FLAT = pa.array(np.arange(12, dtype=np.float32))
FOREIGN = [
    (pa.array([1, 2, 3], pa.int16()), ac.Tensor("int16"), [1, 2, 3]),
    (pa.array([True, False, True]), ac.Tensor("bool"), [True, False, True]),
    (pa.array([0.5, 1.5, 2.5], pa.float16()), ac.Tensor("float16"), [0.5, 1.5, 2.5]),
    (pa.array(["a", "ö", ""]), ac.String(), ["a", "ö", ""]),
    (pa.array(["a", "b", "c"], pa.large_string()), ac.String(), ["a", "b", "c"]),
    (pa.array(["a", "b", "a"]).dictionary_encode(), ac.String(), ["a", "b", "a"]),
    (pa.array([b"a", b"", b"c"], pa.large_binary()), ac.Binary(), [b"a", b"", b"c"]),
    (pa.array([b"ab", b"cd", b"ef"], pa.binary(2)), ac.Binary(), [b"ab", b"cd", b"ef"]),
    (pa.array([1, 2, 3], pa.timestamp("s")), ac.Timestamp(), np.arange(1, 4) * 10**6),
    (pa.array([1000, 2000, 3000], pa.timestamp("ns")), ac.Timestamp(), [1, 2, 3]),
    (pa.array([1, 2, 3], pa.timestamp("us", "Europe/Berlin")), ac.Timestamp(), [1, 2, 3]),
    (pa.array([0, 1, 2], pa.date32()), ac.Timestamp(), np.arange(3) * 86_400 * 10**6),
    (pa.FixedSizeListArray.from_arrays(FLAT, 4), ac.Tensor("float32", (4,)), np.arange(12).reshape(3, 4)),
    (
        pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(FLAT, 2), 2),
        ac.Tensor("float32", (2, 2)),
        np.arange(12).reshape(3, 2, 2),
    ),
    (
        pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(3, 2, 2)),
        ac.Tensor("float64", (2, 2)),
        np.arange(12).reshape(3, 2, 2),
    ),
    (pa.array([[1], [], [2, 3]], pa.list_(pa.int8())), ac.Ragged("int8"), ([1, 2, 3], [0, 1, 1, 3])),
    (
        pa.ListArray.from_arrays([0, 1, 1, 3], pa.FixedSizeListArray.from_arrays(FLAT[:6], 2)),
        ac.Ragged("float32", (2,)),
        ([[0, 1], [2, 3], [4, 5]], [0, 1, 1, 3]),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("column", "kind", "values"), FOREIGN, ids=[str(c.type)[:30] for c, _, _ in FOREIGN])
def test_files_of_others_are_imported(tmp_path, column, kind, values):
    pq.write_table(pa.table({"x": column}), tmp_path / "f.parquet")
    assert import_parquet(tmp_path / "f.parquet", tmp_path / "c", **SIZES) == 3
    cache = ac.Cache.open(tmp_path / "c")
    assert cache.schema["x"] == kind
    found = all_rows(cache)["x"]
    if isinstance(found, ac.Values):
        assert found.data.tolist() == values[0]
        assert found.offsets.tolist() == values[1]
    elif isinstance(kind, ac.Timestamp):
        assert found.view(np.int64).tolist() == list(values)
    else:
        assert list(found) == list(values) if isinstance(found, list) else np.array_equal(found, values)


def table(**columns):
    return pa.table({"id": pa.array([1, 2, 3]), **columns})


STRUCT = pa.array([{"a": 1}] * 3)
TURNED = pa.ExtensionArray.from_storage(
    pa.fixed_shape_tensor(pa.float32(), (2, 2), permutation=[1, 0]),
    pa.FixedSizeListArray.from_arrays(FLAT, 4),
)
WRONG = [
    (table(x=pa.array([1, None, 3])), None, "field 'x' lacks 1 value, "),
    (table(x=pa.array([[1], [None], []], pa.list_(pa.int8()))), None, "field 'x' lacks values within"),
    (table(x=TURNED), None, "field 'x' is extension<arrow.fixed_shape_tensor"),
    (table(x=STRUCT), None, "field 'x' is struct<a: int64>"),
    (table(x=pa.array([[[1]], [], []], pa.list_(pa.list_(pa.int8())))), None, "field 'x' is list<"),
    (table(x=pa.nulls(3)), None, "field 'x' is null"),
    (table(x=pa.array([1, 2, 3], pa.decimal128(5, 1))), None, "field 'x' is decimal"),
    (table(x=pa.array([1, 2, 3], pa.timestamp("ns"))), None, "field 'x': Casting from timestamp[ns]"),
    (table(x=pa.array([0.5, 1, 2])), ac.Tensor("int32"), "field 'x': expected int32"),
    (table(x=pa.array([300, 1, 2])), ac.Tensor("int8"), "field 'x': expected int8"),
    (table(x=pa.array(["a", "b", "c"])), ac.Tensor("int8"), "field 'x' is string, and its column int8"),
    (table(x=pa.array([1, 2, 3])), ac.String(), "field 'x'"),
    (table(x=pa.array([1, 2, 3])), ac.Ragged("int64"), "field 'x' is int64, and its column ragged int64"),
    (table(x=pa.array([[1, 2], [3], [4]])), ac.Tensor("int64", (2,)), "with lists of 1 to 2 values, and its"),
    (table(x=pa.FixedSizeListArray.from_arrays(FLAT, 4)), ac.Tensor("float32", (3,)), "field 'x' is fixed"),
    (table(), ac.Tensor("int8"), "no field 'x': it has id"),
    (table(xx=pa.array([1, 2, 3])), ac.Tensor("int8"), "no field 'x': did you mean 'xx'? it has id, xx"),
    (pa.table([[1], [2], [3]], ["id", "x", "x"]), ac.Tensor("int8"), "more than one field 'x': it has id, x"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "kind", "says"), WRONG, ids=[says for _, _, says in WRONG])
def test_what_no_column_can_hold_is_named(tmp_path, wrong, kind, says):
    pq.write_table(wrong, tmp_path / "f.parquet", version="2.6")
    schema = None if kind is None else {"id": ac.Tensor("int64"), "x": kind}
    with pytest.raises(ac.SchemaError) as raised:
        import_parquet(tmp_path / "f.parquet", tmp_path / "c", schema=schema, **SIZES)
    assert f"{tmp_path / 'f.parquet'}: " in str(raised.value)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_numbers_are_converted_where_that_is_exact(tmp_path):
    pq.write_table(table(x=pa.array([1, 2, 3]), y=pa.array([[1, 2]] * 3)), tmp_path / "f.parquet")
    schema = {"x": ac.Tensor("bfloat16"), "y": ac.Tensor("float32", (2,))}
    import_parquet(tmp_path / "f.parquet", tmp_path / "c", schema=schema, **SIZES)
    rows = all_rows(ac.Cache.open(tmp_path / "c"))
    assert rows["x"].tolist() == [0x3F80, 0x4000, 0x4040]
    assert rows["y"].tolist() == [[1, 2]] * 3


def test_rows_keep_their_order_across_files(tmp_path):
    for name, start in (("b", 100), ("a", 200), ("c", 0)):
        pq.write_table(
            pa.table({"id": np.arange(start, start + 50)}), tmp_path / f"{name}.parquet", row_group_size=7
        )
    import_parquet(tmp_path, tmp_path / "c", **SIZES)
    assert published_ids(ac.Cache.open(tmp_path / "c")) == [*range(200, 250), *range(100, 150), *range(50)]
    import_parquet([tmp_path / "c.parquet", str(tmp_path / "b.parquet")], tmp_path / "d", **SIZES)
    assert published_ids(ac.Cache.open(tmp_path / "d")) == [*range(50), *range(100, 150)]


def test_an_existing_cache_is_written_into(cache, tmp_path):
    files = export_parquet(cache, tmp_path / "out")
    assert import_parquet(files[1:], cache) == 32
    assert import_parquet(files[0], cache.path, capacity="1MiB", schema=dict(cache.schema)) == 16
    assert published_ids(cache) == [*range(48), *range(16, 48), *range(16)]
    assert cache.stats().capacity_bytes == 1024 * 1024


def test_an_import_into_a_cache_that_is_there_refuses_sizes_that_it_has_not(cache, tmp_path):
    (file, *_) = export_parquet(cache, tmp_path / "out")
    sizes = {"capacity": "1MiB", "segment_bytes": "64KiB"}
    assert import_parquet(file, tmp_path / "new", **sizes) == 16
    for given, says in (
        ({"capacity": "2MiB"}, "resize it first"),
        ({"segment_bytes": "32KiB"}, "another path"),
    ):
        for there in (tmp_path / "new", ac.Cache.open(tmp_path / "new")):
            (name,) = given
            with pytest.raises(
                ValueError, match=f"is there already, with {name}=.*: leave {name} out, or .*{says}"
            ):
                import_parquet(file, there, again=True, **sizes | given)
    assert import_parquet(file, tmp_path / "new", again=True, **sizes) == 16
    ac.Cache.open(tmp_path / "new").resize("2MiB")
    assert import_parquet(file, tmp_path / "new", again=True, segment_bytes="64KiB") == 16


def test_a_small_cache_keeps_the_newest_rows(cache, tmp_path):
    publish(cache, segments=12)
    files = export_parquet(cache, tmp_path / "out")
    small = make_cache(tmp_path / "small", capacity="256KiB")
    assert import_parquet(files, small) == 240
    kept = published_ids(small)
    assert 0 < len(kept) < 240
    assert kept == list(range(240))[-len(kept) :]
    assert small.verify() == []


def test_a_loader_reads_what_was_imported(cache, tmp_path):
    export_parquet(cache, tmp_path / "out")
    import_parquet(tmp_path / "out", tmp_path / "back", **SIZES)
    with ac.Loader(tmp_path / "back", batch_size=16, shuffle=None) as loader:
        assert ids_of(loader) == list(range(48))


def test_what_the_files_say_of_their_fields_is_checked_before_a_row_is_imported(cache, tmp_path):
    good = export_parquet(cache, tmp_path / "out")[0]
    pq.write_table(pa.table({"id": [1]}), tmp_path / "bad.parquet")
    before = published_ids(cache)
    with pytest.raises(ac.SchemaError, match=r"bad\.parquet: no field 'image'"):
        import_parquet([good, tmp_path / "bad.parquet"], cache)
    assert published_ids(cache) == before


def test_rows_before_a_bad_one_stay_and_are_counted(tmp_path):
    for name, values in (("a", [1, 2, 3]), ("b", [4, None])):
        pq.write_table(pa.table({"id": pa.array(values, pa.int64())}), tmp_path / f"{name}.parquet")
    with pytest.raises(
        ac.SchemaError,
        match=r"b\.parquet: field 'id' lacks 1 .*; 3 of 5 rows were imported, and none of this",
    ):
        import_parquet(tmp_path, tmp_path / "c", **SIZES)
    assert published_ids(ac.Cache.open(tmp_path / "c")) == [1, 2, 3]


def test_damaged_and_missing_files_are_named(cache, tmp_path):
    path = export_parquet(cache, tmp_path / "out")[0]
    (tmp_path / "text.parquet").write_text("no Parquet at all")
    with pytest.raises(ac.SamplerError, match=r"text\.parquet: cannot be read as Parquet"):
        import_parquet(tmp_path / "text.parquet", cache)
    for position in range(4, 200):
        flip_byte(path, position)
    with pytest.raises(ac.SamplerError, match=r"0\.parquet: cannot be read as Parquet") as raised:
        import_parquet(path, cache)
    assert "\n" not in str(raised.value)
    with pytest.raises(FileNotFoundError, match="no such file"):
        import_parquet(tmp_path / "nowhere.parquet", cache)
    with pytest.raises(FileNotFoundError, match=r"no \*\.parquet"):
        import_parquet(tmp_path / "cache" / "segments", cache)
    with pytest.raises(ValueError, match="files is empty"):
        import_parquet([], cache)
    with pytest.raises(FileNotFoundError):
        import_parquet(tmp_path / "text.parquet", tmp_path / "no cache")
    assert not (tmp_path / "no cache").exists()


def test_another_schema_than_the_caches_is_refused(cache, tmp_path):
    path = export_parquet(cache, tmp_path / "out")[0]
    with pytest.raises(ac.SchemaError, match="has another schema"):
        import_parquet(path, cache, schema={"id": ac.Tensor("int64")})


def test_a_row_larger_than_a_segment_names_its_file(tmp_path):
    pq.write_table(pa.table({"s": ["a", "b" * 2_000_000]}), tmp_path / "f.parquet")
    with pytest.raises(ValueError, match=r"f\.parquet: a row needs a segment"):
        import_parquet(tmp_path / "f.parquet", tmp_path / "c", **SIZES)


def test_a_damaged_segment_is_not_exported(cache, tmp_path):
    flip_byte(segment_files(cache)[1], 0)
    with pytest.warns(RuntimeWarning, match="quarantined"), pytest.raises(ac.CorruptSegmentError):
        export_parquet(cache, tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) <= 1


def test_bars_are_shown_if_asked_for(cache, tmp_path, capsys):
    export_parquet(cache, tmp_path / "out", progress=True)
    assert "exporting: 100%" in capsys.readouterr().err
    assert import_parquet(tmp_path / "out", tmp_path / "back", progress=True, **SIZES) == 48
    assert "importing: 48 rows" in capsys.readouterr().err


def test_a_frame_with_ids_and_marks_is_imported_without_them(tmp_path):
    pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
    with make_cache(tmp_path / "a", ac.Schema({"x": ac.Tensor("int64")})) as cache:
        with cache.writer() as writer:
            writer.extend(x=np.arange(5))
        cache.exclude(["0:1"])
        cache.tag(["0:2"], "hard")
        cache.annotate(["0:3"], loss=0.5)
        frame = explore.to_pandas(cache)
    assert {"_seq", "_row", "_excluded", "_tags", "loss"} < set(frame)
    frame.fillna({"loss": 0.0}).to_parquet(tmp_path / "a.parquet")
    assert import_parquet(tmp_path / "a.parquet", tmp_path / "b", capacity="1MiB", segment_bytes="16KiB") == 5
    assert list(explore.to_pandas(tmp_path / "b")) == ["_seq", "_row", "x", "loss"]


def test_own_columns_with_the_names_of_marks_come_back(tmp_path):
    pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
    names = ("_excluded", "_reason", "_tags")
    with make_cache(tmp_path / "a", ac.Schema(dict.fromkeys(names, ac.String()))) as cache:
        with cache.writer() as writer:
            writer.extend({name: list("abcde") for name in names})
        export_parquet(cache, tmp_path / "out")
    assert import_parquet(tmp_path / "out", tmp_path / "b", **SIZES) == 5
    with ac.Cache.open(tmp_path / "b") as back:
        assert dict(back.schema) == dict(cache.schema)
        assert all(explore.to_pandas(back)[name].tolist() == list("abcde") for name in names)


@pytest.mark.parametrize("files", [5, None])
def test_what_is_no_file_to_import_is_a_sentence(cache, files):
    with pytest.raises(TypeError, match=f"files must be a path, or several, not {files}"):
        import_parquet(files, cache)
