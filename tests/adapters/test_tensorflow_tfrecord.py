"""`to_tfrecords`, `example_parser`, `from_tfrecords`: each value and record, or an error that says where."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from helpers import DTYPES, EVERY_TYPE, wait_until
from processes import Script, session_processes

import arrowcache as ac
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.store import Cancelled
from arrowcache.tensorflow import dataset, example_parser, from_tfrecords, to_tfrecords
from arrowcache.tensorflow.intake import MARKS, import_files
from arrowcache.tensorflow.records import fingerprint_of
from arrowcache.tensorflow.tfrecord import find_files, shares_of

SMALL = ac.Schema({"id": ac.Tensor("int64"), "x": ac.Tensor("float32", (2, 3)), "text": ac.String()})


def bits(rng, dtype, shape):
    """Any bits, so that extremes and NaN are among them; bfloat16 as bits, as a cache reads it."""
    kind = ac.Tensor(dtype).numpy_dtype
    raw = rng.bytes(int(np.prod(shape)) * kind.itemsize)
    array = np.frombuffer(raw, np.uint8) & 1 if dtype == "bool" else np.frombuffer(raw, kind)
    return array.astype(kind, copy=False).reshape(shape)


def sample(number):
    rng = np.random.default_rng(number)
    row = {"id": number, "name": "ä\0" * (number % 4) + str(number), "data": rng.bytes(number % 7)}
    row["when"] = np.datetime64(-5 + number, "us")
    row["boxes"] = bits(rng, "float32", (number % 3, 4))
    for dtype in DTYPES:
        row[f"scalar_{dtype}"] = bits(rng, dtype, ())[()]
        row[f"tensor_{dtype}"] = bits(rng, dtype, (3, 5))
        row[f"ragged_{dtype}"] = bits(rng, dtype, (number % 4,))
    return row


@pytest.fixture
def full(tmp_path):
    """All types, in several segments."""
    with ac.Cache.create(tmp_path / "full", EVERY_TYPE, "64MiB", "48KiB") as cache:
        with cache.writer() as writer:
            for number in range(40):
                writer.append(sample(number))
        yield cache


@pytest.fixture
def cache(tmp_path):
    """Empty, of SMALL, in segments of 16."""
    with ac.Cache.create(tmp_path / "cache", SMALL, "1MiB", "16KiB", 16) as cache:
        yield cache


def create(path, schema, **options):
    options = {"capacity": "64MiB", "segment_bytes": "48KiB"} | options
    return ac.Cache.create(path, schema, **options)


def rows_of(cache):
    with cache.snapshot() as snapshot:
        return snapshot.gather(np.arange(len(snapshot)))


def same_bits(one, other):
    for got, expected in zip(one, other, strict=True):
        got, expected = np.asarray(got), np.asarray(expected)
        assert (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def feature(value):
    """What others write: text and bytes, integers, floats; arrays as lists of them."""
    if isinstance(value, str | bytes):
        value = value.encode() if isinstance(value, str) else value
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
    array = np.asarray(value).reshape(-1)
    if array.dtype.kind == "f":
        return tf.train.Feature(float_list=tf.train.FloatList(value=array))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=array))


def example(**fields):
    features = {
        name: value if isinstance(value, tf.train.Feature) else feature(value)
        for name, value in fields.items()
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def small(number, **fields):
    return example(**({"id": number, "x": np.full(6, number, np.float32), "text": f"row {number}"} | fields))


def write(path, records, compression=None):
    with tf.io.TFRecordWriter(str(path), options=compression) as writer:
        for record in records:
            writer.write(record)
    return path


def bring(cache, *files, compression=None):
    """What a worker does, in this process; returns what it was at."""
    marks = np.zeros(MARKS, np.int64)
    plan = {"cache": str(cache.path), "files": list(map(str, files)), "compression": compression, "again": ""}
    import_files(plan, marks, lambda: False)
    return marks[:4]


def no_child_lives():
    """None of this process' workers; and none is left unwaited for."""
    tasks = f"/proc/{os.getpid()}/task"
    children = [
        pid for task in os.listdir(tasks) for pid in Path(tasks, task, "children").read_text().split()
    ]
    commands = [Path("/proc", pid, "cmdline").read_text() for pid in children]
    return not [command for command in commands if "intake" in command or not command]


# out


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_every_type_comes_back_as_it_was_written(full, tmp_path, compression):
    files = to_tfrecords(full, tmp_path / "out", compression=compression)
    with full.snapshot() as snapshot:
        assert [path.name for path in files] == [f"{s.seq:020d}.tfrecord" for s in snapshot.segments]
    assert len(files) > 3
    assert sorted(os.listdir(tmp_path / "out")) == sorted(path.name for path in files)
    with create(tmp_path / "back", EVERY_TYPE) as back:
        bring(back, *files, compression=compression)
        got, expected = rows_of(back), rows_of(full)
    assert got["id"].tolist() == list(range(40))
    for name, column in expected.items():
        if isinstance(column, list):
            assert got[name] == column
        else:
            same_bits(got[name] if isinstance(column, tuple) else [got[name]],
                      column if isinstance(column, tuple) else [column])  # fmt: skip


def test_the_parser_gives_what_dataset_gives_for_a_row(full, tmp_path):
    files = to_tfrecords(full, tmp_path / "out")
    records = tf.data.TFRecordDataset(list(map(str, files))).map(example_parser(EVERY_TYPE))
    spec = dataset(full, 1, shuffle=None).element_spec
    for name, tensor in records.element_spec.items():
        assert tensor.dtype == spec[name].dtype
        if isinstance(spec[name], tf.RaggedTensorSpec):
            assert tensor.shape.as_list() == spec[name].shape.as_list()[1:]
        else:
            assert tensor.shape == spec[name].shape[1:]
    count = 0
    for record, batch in zip(records, dataset(full, 1, shuffle=None), strict=True):
        assert list(record) == list(batch)
        same_bits([tensor.numpy() for tensor in record.values()], [row[0].numpy() for row in batch.values()])
        count += 1
    assert count == 40


def test_the_chosen_columns_are_written_and_parsed(full, tmp_path):
    files = to_tfrecords(full, tmp_path / "out", columns=["id", "name"])
    records = tf.data.TFRecordDataset([str(files[0])])
    assert set(tf.train.Example.FromString(next(iter(records)).numpy()).features.feature) == {"id", "name"}
    first = next(iter(records.map(example_parser(dict(EVERY_TYPE), ["name"]))))
    assert {name: tensor.numpy() for name, tensor in first.items()} == {"name": b"0"}
    for choose in (
        lambda c: to_tfrecords(full, tmp_path / "no", columns=c),
        lambda c: example_parser(EVERY_TYPE, c),
    ):
        with pytest.raises(ValueError, match="unknown column 'nam'"):
            choose(["nam"])
    assert not (tmp_path / "no").exists()


ROWS = [
    ("included", [0, 2, *range(4, 40)]), ("all", range(40)), ("hard", [0, 39]), ("0:2", [2]),
    ([(0, 1), (0, 0)], [0]), (np.array([[0, 2], [0, 3]]), [2]),
    (lambda columns: columns["id"] > 37, [38, 39]), ({"_seq": [0], "_row": [0]}, [0]),
    (pc.field("id") < 4, [0, 2]),
]  # fmt: skip


def records_of(*files):
    """The features of each record."""
    records = tf.data.TFRecordDataset([str(file) for file in files])
    return [tf.train.Example.FromString(record.numpy()).features.feature for record in records]


@pytest.mark.parametrize(("rows", "ids"), ROWS)
def test_the_rows_that_are_written_are_those_that_a_loader_would_read(cache, tmp_path, rows, ids):
    with cache.writer() as writer:
        writer.extend(id=range(40), x=np.zeros((40, 2, 3), np.float32), text=["a"] * 40)
    cache.exclude([(0, 1), (0, 3)], reason="bad")
    cache.tag([(0, 0), (0, 1), (2, 7)], "hard")
    files = to_tfrecords(cache, tmp_path / "out", rows=rows)
    assert [features["id"].int64_list.value[0] for features in records_of(*files)] == [*ids]
    assert all(file.stat().st_size for file in files)
    with ac.Loader(cache, 1, shuffle=None, rows=rows) as loader:
        assert [int(batch["id"][0]) for batch in loader] == [*ids]


def test_excluded_rows_are_left_out_unless_all_are_written_with_their_marks(cache, tmp_path):
    from_tfrecords(write(tmp_path / "in", [small(number) for number in range(40)]), SMALL, cache, workers=1)
    unmarked = records_of(*to_tfrecords(cache, tmp_path / "a", rows="all"))
    assert {name for features in unmarked for name in features} == {*SMALL}, "no row is excluded"
    cache.exclude((0, 1))
    cache.exclude(where=pc.field("id") == 39)
    assert [*map(len, [*map(records_of, to_tfrecords(cache, tmp_path / "b"))])] == [15, 16, 7]
    records = records_of(*to_tfrecords(cache, tmp_path / "c", columns=["id"], rows="all"))
    marks = {each["id"].int64_list.value[0]: each["_excluded"].int64_list.value[0] for each in records}
    assert marks == {number: number in (1, 39) for number in range(40)}
    with ac.Cache.create(tmp_path / "back", SMALL, "1MiB") as back:
        assert from_tfrecords(to_tfrecords(cache, tmp_path / "d", rows="all"), SMALL, back) == 40


def test_rows_that_choose_nothing_are_an_error_and_make_no_folder(full, tmp_path):
    with pytest.raises(ValueError, match="rows= chooses none of the 40 rows"):
        to_tfrecords(full, tmp_path / "out", rows=lambda columns: columns["id"] < 0)
    with pytest.raises(TypeError, match="rows must be"):
        to_tfrecords(full, tmp_path / "out", rows=7)
    full.exclude([(each.seq, row) for each in full.store.segments() for row in range(each.rows)])
    with pytest.raises(ValueError, match="all 40 rows are excluded: rows='all' exports them"):
        to_tfrecords(full, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(full, tmp_path):
    first = to_tfrecords(full, tmp_path / "out")[0]
    before = first.read_bytes()
    with pytest.raises(FileExistsError, match="new or an empty one"):
        to_tfrecords(full, tmp_path / "out")
    assert first.read_bytes() == before
    with pytest.raises(ValueError, match="compression='gzip' is unknown"):
        to_tfrecords(full, tmp_path / "other", compression="gzip")


def test_a_file_that_fails_leaves_nothing_behind_and_no_lease(full, tmp_path, monkeypatch):
    real, written = tf.io.TFRecordWriter.write, []

    def failing(self, record):
        written.append(record)
        if len(written) == 30:
            raise KeyboardInterrupt
        real(self, record)

    monkeypatch.setattr(tf.io.TFRecordWriter, "write", failing)
    with pytest.raises(KeyboardInterrupt):
        to_tfrecords(full, tmp_path / "out")
    monkeypatch.undo()
    names = sorted(os.listdir(tmp_path / "out"))
    assert names
    assert all(name.endswith(".tfrecord") for name in names)
    assert len(list(tf.data.TFRecordDataset([str(tmp_path / "out" / name) for name in names]))) < 30
    assert full.stats().leased_bytes == 0


def test_all_of_a_full_cache_is_written_and_leases_end_file_by_file(cache, tmp_path, monkeypatch):
    with cache.writer() as writer:
        for number in range(3000):
            writer.append(id=number, x=np.zeros((2, 3), np.float32), text=" " * 400)
    rows, leased = cache.stats().rows, []
    real = tf.io.TFRecordWriter.write

    def write_and_look(self, record):
        leased.append(cache.stats().leased_bytes)
        real(self, record)

    monkeypatch.setattr(tf.io.TFRecordWriter, "write", write_and_look)
    assert rows < 3000, "it evicts"
    files = to_tfrecords(cache, tmp_path / "out")
    parse = example_parser(SMALL, ["id"])
    ids = [int(row["id"]) for row in tf.data.TFRecordDataset(list(map(str, files))).map(parse)]
    assert ids == list(range(3000 - rows, 3000))
    assert leased == sorted(leased, reverse=True)
    assert leased[0] > 10 * leased[-1] > 0


def test_an_empty_cache_makes_no_file(cache, tmp_path):
    assert to_tfrecords(str(cache.path), tmp_path / "a" / "out") == []
    assert os.listdir(tmp_path / "a" / "out") == []


# in: what others wrote

FOREIGN = [
    (
        ac.Tensor("float32", (2, 2)),
        np.array([1, 2, 3, 4], np.float32),
        np.array([[1, 2], [3, 4]], np.float32),
    ),
    (ac.Tensor("float64", (2,)), np.array([1.5, np.nan], np.float32), np.array([1.5, np.nan])),
    (ac.Tensor("float16"), np.float32(0.25), np.float16(0.25)),
    (ac.Tensor("bfloat16"), np.float32(1.0), np.uint16(0x3F80)),
    (ac.Tensor("bfloat16", (2,)), [1, -2], np.array([0x3F80, 0xC000], np.uint16)),
    (ac.Tensor("complex64"), np.float32(2), np.complex64(2)),
    (ac.Tensor("uint8", (3,)), [0, 7, 255], np.array([0, 7, 255], np.uint8)),
    (ac.Tensor("bool", (2,)), [0, 1], np.array([False, True])),
    (ac.Tensor("uint64"), 2**63 - 1, np.uint64(2**63 - 1)),
    (ac.Tensor("float32"), 2**24, np.float32(2**24)),
    (ac.Tensor("int16", (2,)), b"\x01\x00\xff\xff", np.array([1, -1], np.int16)),
    (ac.Ragged("int32", (2,)), [1, 2, 3, 4], np.array([[1, 2], [3, 4]], np.int32)),
    (ac.Ragged("float32"), feature(np.zeros(0, np.float32)), np.zeros(0, np.float32)),
    (ac.Ragged("float32", (2,)), tf.train.Feature(), np.zeros((0, 2), np.float32)),
    (ac.Ragged("int32"), feature(np.zeros(0, np.float32)), np.zeros(0, np.int32)),
    (ac.Ragged("bool"), tf.train.Feature(bytes_list=tf.train.BytesList()), np.zeros(0, np.bool_)),
    (ac.Ragged("uint8"), b"abc", np.frombuffer(b"abc", np.uint8)),
    (ac.Timestamp(), 17, np.datetime64(17, "us")),
    (ac.String(), "ä", "ä"),
    (ac.Binary(), b"\xff\x00", b"\xff\x00"),
]


def test_what_others_wrote_is_converted_exactly(tmp_path):
    schema = ac.Schema({f"f{n}": kind for n, (kind, _, _) in enumerate(FOREIGN)})
    record = example(**{f"f{n}": value for n, (_, value, _) in enumerate(FOREIGN)}, more="left out")
    with create(tmp_path / "cache", schema) as cache:
        bring(cache, write(tmp_path / "a", [record, record]))
        rows = rows_of(cache)
    for n, (kind, _, expected) in enumerate(FOREIGN):
        got = rows[f"f{n}"]
        if isinstance(kind, ac.Ragged):
            assert got.offsets.tolist() == [0, len(expected), 2 * len(expected)]
            got = [got.data[: len(expected)], got.data[len(expected) :]]
        if isinstance(kind, ac.String | ac.Binary):
            assert got == [expected] * 2
        else:
            same_bits(list(got), [expected] * 2)


TWO_TEXTS = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"a", b"b"]))


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (ac.Tensor("int64"), np.float32(1.5), "got a float_list, and floats do not become integers"),
        (ac.Tensor("int64"), np.float32(1), "got a float_list"),
        (ac.Timestamp(), np.float32(1), "got a float_list"),
        (ac.Tensor("uint8"), 256, "expected uint8, and array.256. is not exactly that"),
        (ac.Tensor("uint64"), -1, "expected uint64"),
        (ac.Tensor("bool"), 2, "expected bool"),
        (ac.Tensor("float32"), 2**24 + 1, "expected float32"),
        (ac.Tensor("float64"), 2**53 + 1, "expected float64"),
        (ac.Tensor("float16"), np.float32(0.1), "expected float16"),
        (ac.Tensor("bfloat16"), np.float32(0.1), "expected bfloat16"),
        (ac.Tensor("float32", (2, 2)), np.zeros(3, np.float32), "so 4 values, got 3"),
        (ac.Tensor("float32"), np.zeros(0, np.float32), "so 1 value, got 0"),
        (ac.Tensor("float32", (2, 2)), b"1" * 15, "so 16 bytes, got 15.*such as JPEG, is a Binary"),
        (ac.Tensor("bool", (2,)), b"\x01\x02", "bytes other than 0 and 1"),
        (ac.Tensor("uint8"), TWO_TEXTS, "one bytes value, got 2 in a bytes_list"),
        (ac.Ragged("int32", (2,)), [1, 2, 3], "a multiple of 2 values, got 3"),
        (ac.Ragged("int32", (2,)), b"1" * 12, "a multiple of 8 bytes, got 12"),
        (ac.Timestamp(), b"1234", "so 8 bytes, got 4"),
        (ac.Timestamp(), [1, 2], "so 1 value, got 2"),
        (ac.String(), b"\xff", "not UTF-8.*declare it Binary"),
        (ac.String(), 1, "one bytes value, got 1 in a int64_list"),
        (ac.Binary(), TWO_TEXTS, "one bytes value, got 2"),
        (ac.Binary(), tf.train.Feature(), "its feature is empty"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_field_file_and_record(tmp_path, kind, value, words):
    with create(tmp_path / "cache", {"f": kind}) as cache:
        path = write(tmp_path / "a", [example(f=value)])
        with pytest.raises(ac.SchemaError, match=rf"{path}, record 0: field 'f': .*{words}"):
            bring(cache, path)
        assert cache.stats().segments == 0


def test_a_missing_feature_and_what_is_no_example_are_errors(cache, tmp_path):
    path = write(tmp_path / "a", [small(0), example(id=1, text="x")])
    with pytest.raises(
        ac.SchemaError, match=rf"{path}, record 1: field 'x': .* no such feature, .*'id', 'text'"
    ):
        bring(cache, path)
    path = write(tmp_path / "b", [small(0), small(1), b"\xff\xff"])
    with pytest.raises(ac.SchemaError, match=rf"{path}, record 2: these 2 bytes are no tf.train.Example"):
        bring(cache, path)


def test_a_row_larger_than_a_segment_is_an_error(cache, tmp_path):
    path = write(tmp_path / "a", [small(0), small(1, text="x" * 20_000)])
    with pytest.raises(
        ValueError, match=rf"{path}, record 1: a row needs a segment of .*larger segment_bytes"
    ):
        bring(cache, path)


# in: damaged files


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_a_file_that_was_cut_off_anywhere_is_an_error(cache, tmp_path, compression):
    """TensorFlow takes one that ends in a record's length, or between compressed blocks, for complete."""
    data = write(tmp_path / "a", map(small, range(3)), compression).read_bytes()
    first = struct.unpack("<Q", data[:8])[0] + 16 if compression is None else 0
    part = tmp_path / "part"
    whole = {first * n for n in range(4)} if first else {len(data)}
    cuts = range(len(data)) if first == 0 else [*range(15), *range(first - 1, first + 15), len(data) - 1]
    for cut in cuts:
        if cut in whole:
            continue
        part.write_bytes(data[:cut])
        record = min(2, cut // first) if first else r"\d"
        with pytest.raises(
            ac.SamplerError, match=rf"{part}, record {record}: cannot be read .*get the file anew"
        ):
            bring(cache, part, compression=compression)
    assert cache.stats().segments == 0


def test_a_wrong_checksum_is_an_error(cache, tmp_path):
    path = write(tmp_path / "a", map(small, range(5)))
    data = bytearray(path.read_bytes())
    size = struct.unpack("<Q", data[:8])[0] + 16
    data[3 * size + 40] ^= 1
    path.write_bytes(data)
    with pytest.raises(ac.SamplerError, match=f"{path}, record 3: .*corrupted record"):
        bring(cache, path)


@pytest.mark.parametrize(("written", "said"), [(None, "GZIP"), ("GZIP", None), (None, "ZLIB")])
def test_another_compression_is_an_error_that_says_so(cache, tmp_path, written, said):
    path = write(tmp_path / "a", map(small, range(5)), written)
    with pytest.raises(
        ac.SamplerError, match=f"record 0: cannot be read with compression={said!r}.*or say which"
    ):
        bring(cache, path, compression=said)


@pytest.mark.parametrize(
    ("magic", "says"),
    [
        (b"\x1f\x8b\x08", "it is compressed by gzip"), (b"PK\3\4", "it is a zip archive"),
        (b"PAR1", "it is a Parquet file"), (b"<!DOCTYPE html>", "it is a page of HTML"),
    ],
)  # fmt: skip
def test_another_file_is_said_to_be_that(cache, tmp_path, magic, says):
    (tmp_path / "a").write_bytes(magic + bytes(99))
    with pytest.raises(ac.SamplerError, match=f"cannot be read with compression=None: {says}"):
        bring(cache, tmp_path / "a")


@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_empty_and_joined_files_are_complete(cache, tmp_path, compression):
    one = write(tmp_path / "a", map(small, range(3)), compression).read_bytes()
    empty = write(tmp_path / "empty", [], compression)
    (tmp_path / "joined").write_bytes(one + one)
    marks = bring(cache, empty, tmp_path / "joined", empty, compression=compression)
    assert marks.tolist() == [2, 0, 6, 0]
    assert rows_of(cache)["id"].tolist() == [0, 1, 2] * 2


def test_segments_are_full_across_files_also_of_rows_that_differ_in_length(cache, tmp_path):
    files = [write(tmp_path / str(n), [small(3 * n + i) for i in range(3)]) for n in range(11)]
    bring(cache, *files)
    assert [s.rows for s in cache.store.segments()] == [16, 16, 1]
    with create(tmp_path / "long", SMALL, segment_bytes="16KiB") as long:
        bring(long, write(tmp_path / "l", [small(n, text="x" * (n % 3 * 1000)) for n in range(60)]))
        with create(tmp_path / "written", SMALL, segment_bytes="16KiB") as written:
            with written.writer() as writer:
                for n in range(60):
                    writer.append(id=n, x=np.full((2, 3), n, np.float32), text="x" * (n % 3 * 1000))
            assert [s.rows for s in long.store.segments()] == [s.rows for s in written.store.segments()]


def test_a_worker_that_was_given_up_publishes_nothing(cache, tmp_path):
    path = write(tmp_path / "a", map(small, range(40)))
    plan = {"cache": str(cache.path), "files": [str(path)], "compression": None, "again": ""}
    with pytest.raises(Cancelled):
        import_files(plan, np.zeros(MARKS, np.int64), lambda: True)
    assert cache.stats().segments == 0


# in: again


def test_records_that_are_in_already_do_not_come_twice(cache, tmp_path):
    one, other = (
        write(tmp_path / "a", map(small, range(30))),
        write(tmp_path / "b", map(small, range(30, 60))),
    )
    (tmp_path / "copy").write_bytes(one.read_bytes())
    assert from_tfrecords([one, tmp_path / "copy"], SMALL, cache) == 30
    with pytest.raises(FileExistsError, match=r"all 30 rows of 1 file already: nothing was imported; again"):
        from_tfrecords(tmp_path / "copy", SMALL, cache)
    assert from_tfrecords([one, other], SMALL, cache) == 30
    with pytest.raises(FileExistsError, match="all 60 rows of 2 files already"):
        from_tfrecords([one, other], SMALL, cache)
    assert sorted(rows_of(cache)["id"].tolist()) == list(range(60))
    assert from_tfrecords(other, SMALL, cache, again=True) == 30
    assert cache.stats().rows == 90
    assert cache.verify() == []


def test_what_was_evicted_comes_again_and_an_import_that_was_cut_short_goes_on(cache, tmp_path):
    path = write(tmp_path / "a", map(small, range(100)))
    assert from_tfrecords(path, SMALL, cache) == 100
    files = sorted((cache.path / "segments").iterdir())
    for name in (files[0], files[3], files[-1]):  # evicted, quarantined, never published
        name.unlink()
    assert from_tfrecords(path, SMALL, cache) == 36
    assert sorted(rows_of(cache)["id"].tolist()) == list(range(100))
    with pytest.raises(FileExistsError, match="all 100 rows"):
        from_tfrecords(path, SMALL, cache)


def test_a_file_in_a_remote_store_is_known_by_a_part_of_it(tmp_path):
    path = write(tmp_path / "a", [small(n, text="x" * 1000) for n in range(4000)])
    assert path.stat().st_size > 4 << 20
    remote = fingerprint_of(f"file://{path}")
    assert remote == fingerprint_of(f"file://{path}")
    assert remote != fingerprint_of(str(path))
    write(tmp_path / "b", [small(n, text="y" * 1000) for n in range(4000)])
    assert fingerprint_of(f"file://{tmp_path / 'b'}") != remote
    assert fingerprint_of(f"file://{write(tmp_path / 'empty', [])}") != remote


# in: with processes


def test_each_record_of_several_files_comes_once_whatever_names_them(cache, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for n in range(7):
        write(folder / f"{n}.tfrecord", [small(100 * n + i) for i in range(10 * n)])
    given = [str(folder / "*.tfrecord"), folder / "3.tfrecord", os.path.relpath(folder / "4.tfrecord")]
    assert from_tfrecords(given, dict(SMALL), str(cache.path), progress=False) == 210
    rows = rows_of(cache)
    expected = [100 * n + i for n in range(7) for i in range(10 * n)]
    assert sorted(rows["id"].tolist()) == expected
    np.testing.assert_array_equal(rows["x"], np.repeat(rows["id"], 6).reshape(-1, 2, 3))
    assert rows["text"] == [f"row {number}" for number in rows["id"]]
    assert sum(s.rows < 16 for s in cache.store.segments()) <= 2, "only the last of each worker"
    assert cache.verify() == []
    assert no_child_lives()


def test_a_file_is_found_once_and_where_the_kernel_finds_it(tmp_path):
    """`..` after a link is not the folder before it."""
    for folder in ("a/b", "c"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "c" / "link").symlink_to(tmp_path / "a" / "b")
    (tmp_path / "all").symlink_to(tmp_path / "a")
    right, wrong = write(tmp_path / "a" / "f", []), write(tmp_path / "c" / "f", [])
    through = f"{tmp_path}/c/link/../f"
    assert os.path.samefile(find_files(through)[0], right)
    assert find_files([right, through, tmp_path / "all" / "f", wrong]) == [str(right), str(wrong)]
    assert find_files(f"file://{right}") == [f"file://{right}"]


def test_files_are_shared_out_by_their_bytes_and_keep_their_order(tmp_path):
    sizes = [10, 2000, 30, 1000, 990, 0, 0]
    files = [str(tmp_path / f"{number}") for number in range(len(sizes))]
    for path, size in zip(files, sizes, strict=True):
        Path(path).write_bytes(bytes(size))
    shares = shares_of(files, 2)
    assert sorted(path for share in shares for path in share) == files
    assert all(share == sorted(share) for share in shares)
    loads = [sum(os.path.getsize(path) for path in share) for share in shares]
    assert max(loads) - min(loads) <= 40
    assert sorted(map(len, shares_of(files[5:], 2))) == [1, 1], "empty ones, too"
    assert shares_of(files[:2], 5) == [[files[1]], [files[0]]]


def test_an_error_says_how_many_rows_were_published_before(cache, tmp_path):
    good = write(tmp_path / "a", map(small, range(160)))
    bad = write(tmp_path / "b", [small(n, **({"x": b""} if n == 40 else {})) for n in range(50)])
    words = (
        rf"{bad}, record 40: field 'x': .*got 0.* none of its rows is in the cache; 160 rows were imported "
        r"of other files: repair it or leave it out, and import again; what is in the cache does not come twi"
    )
    with pytest.raises(ac.SchemaError, match=words) as caught:
        from_tfrecords([good, bad], SMALL, cache, workers=1)
    assert "in examples" not in str(caught.value)
    assert rows_of(cache)["id"].tolist() == list(range(160))
    assert no_child_lives()
    write(bad, [small(1000 + n) for n in range(50)])
    assert from_tfrecords([good, bad], SMALL, cache, workers=1) == 50
    assert rows_of(cache)["id"].tolist() == [*range(160), *range(1000, 1050)]
    assert cache.verify() == []


@pytest.fixture
def no_room(cache):
    """A full cache, leased by this process but for the headroom, as a training leases it."""
    with cache.writer() as writer:
        for number in range(1500):
            writer.append(id=number, x=np.zeros((2, 3), np.float32), text=" " * 400)
    with Snapshot.take(cache.store, yields_since=0) as snapshot:
        yield snapshot


def long_file(path):
    """A file of rows that no other has."""
    return write(path, [small(number, text=path.name * 400) for number in range(1000)])


IMPORT = """
import json, sys
import arrowcache as ac
from arrowcache.tensorflow import from_tfrecords
cache = ac.Cache.open(sys.argv[1])
print("begun", flush=True)
from_tfrecords(json.loads(sys.argv[2]), cache.schema, cache, progress=False)
"""


def test_a_killed_worker_is_an_error_that_says_where_it_was(cache, no_room, tmp_path):
    first, files = cache.stats().next_seq, [str(long_file(tmp_path / name)) for name in "ab"]
    with Script(IMPORT, cache.path, json.dumps(files), new_interpreter=True) as script:
        assert script.line() == "begun"
        wait_until(lambda: cache.stats().waiting_writers == 2, "both workers wait for room")
        (pid, *_) = (line.split()[0] for line in script.processes() if "tensorflow.intake" in line)
        os.kill(int(pid), signal.SIGKILL)
        code, errors = script.end()
        assert script.processes() == []
    assert code == 1
    said = errors.splitlines()[-1]
    rows = sum(segment.rows for segment in cache.store.segments() if segment.seq >= first)
    assert re.search(
        rf"WorkerError: {tmp_path}/[ab], record [1-9]\d*: process {pid}, which .*SIGKILL", said
    ), said
    assert rows > 0, "what was not leased made room"
    assert f" {rows} rows were imported: import the same files again to go on with the others" in said


def test_waiting_for_the_room_that_this_very_process_holds_is_an_error(cache, no_room, tmp_path):
    with pytest.raises(
        ac.CacheFullError, match=r"this very process reads.*rows were imported: import the same files again"
    ):
        from_tfrecords(long_file(tmp_path / "a"), SMALL, cache)
    assert no_child_lives()


@pytest.mark.parametrize("end", ["ctrl-c", "kill"])
def test_no_process_outlives_the_main_one(cache, no_room, tmp_path, end):
    files = [str(long_file(tmp_path / "a")), str(long_file(tmp_path / "b"))]
    with Script(IMPORT, cache.path, json.dumps(files), new_interpreter=True) as script:
        assert script.line() == "begun"
        wait_until(lambda: cache.stats().waiting_writers == 2, "both workers wait for room")
        if end == "kill":
            script.kill()
            wait_until(lambda: session_processes(script.pid) == [], "the workers have ended")
        else:
            script.signal_group(signal.SIGINT)
            code, errors = script.end()
            assert code == -signal.SIGINT
            assert errors.rstrip().endswith("KeyboardInterrupt"), errors
            assert errors.count("Traceback") == 1, errors
            assert script.processes() == []
    assert cache.verify() == []


@pytest.mark.parametrize(
    ("files", "options", "error", "words"),
    [
        ("missing.tfrecord", {}, FileNotFoundError, "missing.tfrecord"),
        (["a", "*.none"], {}, FileNotFoundError, r"\*.none"),
        (".", {}, IsADirectoryError, r"\*.tfrecord"),
        ([], {}, ValueError, "files is empty"),
        ("a", {"workers": 0}, ValueError, "workers=0"),
        ("a", {"compression": "LZ4"}, ValueError, "compression='LZ4'"),
        ("a", {"schema": {"id": ac.Tensor("int32")}}, ac.SchemaError, "another schema"),
    ],
)
def test_a_wrong_argument_fails_before_a_process_starts(
    cache, tmp_path, monkeypatch, files, options, error, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    write(tmp_path / "a", [small(0)])
    arguments = {"files": files, "schema": SMALL, "cache": cache} | options
    with pytest.raises(error, match=words):
        from_tfrecords(**arguments)
