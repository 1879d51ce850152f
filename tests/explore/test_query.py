from __future__ import annotations

import shutil

import numpy as np
import pytest
from every_type import every_type
from helpers import EVERY_TYPE, make_cache, publish, segment_files, seqs, wait_until
from page_cache import drop_from_memory, resident_bytes

import arrowcache as ac
from arrowcache import explore
from arrowcache.explore.numbers import bfloat16_values

pytest.importorskip("duckdb", reason="the extra 'explore' is not installed")
sql = explore.sql


@pytest.fixture
def cache(tmp_path):
    with make_cache(tmp_path / "cache") as cache:
        publish(cache, segments=4)
        yield cache


def test_a_query_counts_and_groups(cache):
    frame = sql(
        cache, "select id % 3 as rest, count(*) as n, max(id) as most from cache group by 1 order by 1"
    )
    assert frame.to_dict("list") == {"rest": [0, 1, 2], "n": [22, 21, 21], "most": [63, 61, 62]}


def test_rows_come_in_their_order_without_one_being_asked_for(cache):
    assert sql(cache.path, "select id from cache")["id"].tolist() == list(range(64))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_TYPE)
def test_a_query_gets_every_type(varied, name):
    frame = sql(varied, f'select "{name}" from cache')
    kind = EVERY_TYPE[name]
    for value, wanted in zip(frame[name].to_list(), every_type()[name], strict=True):
        if isinstance(kind, ac.Timestamp):
            assert value.to_datetime64() == wanted
        elif isinstance(kind, ac.Tensor | ac.Ragged):
            if kind.dtype == "bfloat16":
                wanted = bfloat16_values(np.asarray(wanted))
            if wanted.dtype.kind == "c":
                wanted = np.stack([wanted.real, wanted.imag], axis=-1)
            np.testing.assert_array_equal(value, wanted)
            assert np.shape(value) == np.shape(wanted)
            assert np.asarray(frame[name].iloc[0]).dtype.kind == wanted.dtype.kind
        else:
            assert bytes(value) == wanted if isinstance(wanted, bytes) else value == wanted


def test_tensors_are_indexed_by_their_shape(cache):
    frame = sql(cache, "select image[2][3] as pixel, image[16][16] as last from cache where id = 5")
    assert frame["pixel"].tolist() == [1 * 16 + 2 + 5]
    assert frame["last"].tolist() == [255 + 5]


def test_halves_are_numbers_also_at_their_ends(tmp_path):
    bits = np.arange(1 << 16, dtype=np.uint16)
    schema = {"half": ac.Tensor("float16"), "brain": ac.Tensor("bfloat16")}
    with ac.Cache.create(tmp_path / "c", schema, capacity="8MiB", segment_bytes="1MiB") as cache:
        with cache.writer() as writer:
            writer.extend(half=bits.view(np.float16), brain=bits)
        frame = sql(cache, "select * from cache")
    np.testing.assert_array_equal(frame["half"].to_numpy(), bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(frame["brain"].to_numpy(), bfloat16_values(bits))


def test_an_empty_cache_has_its_table(tmp_path):
    with ac.Cache.create(tmp_path / "c", EVERY_TYPE, capacity="4MiB", segment_bytes="256KiB") as cache:
        assert sql(cache, "select count(*) as n from cache")["n"].tolist() == [0]
        assert list(sql(cache, "select * from cache").columns) == list(EVERY_TYPE)


def test_odd_names_are_quoted(tmp_path):
    schema = {'a "b"': ac.Tensor("bool"), "select": ac.Tensor("float16", (2,))}
    with ac.Cache.create(tmp_path / "c", schema, capacity="4MiB", segment_bytes="256KiB") as cache:
        with cache.writer() as writer:
            writer.append({'a "b"': True, "select": np.zeros(2, np.float16)})
        frame = sql(cache, 'select "a ""b""" as one, "select" as other from cache')
    assert frame["one"].tolist() == [True]
    assert frame["other"][0].tolist() == [0, 0]


def test_names_that_differ_in_case_are_columns_of_their_own(tmp_path):
    schema = dict.fromkeys(("id", "ID", "id_1"), ac.Tensor("int64"))
    with ac.Cache.create(tmp_path / "c", schema, capacity="4MiB", segment_bytes="256KiB") as cache:
        with cache.writer() as writer:
            writer.append({"id": 1, "ID": 2, "id_1": 3})
        assert sql(cache, "select * from cache").iloc[0].to_dict() == {"id": 1, "ID_2": 2, "id_1": 3}
        assert sql(cache, "select id_2 as it from cache")["it"].tolist() == [2]
        with pytest.raises(ValueError, match="did you mean ID_2"):
            sql(cache, "select ID_3 from cache")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("select imag from cache", "did you mean image?"),
        ("select * from cach", "did you mean cache?"),
        ("select id +* 3 from cache", "+*"),
        ("select image + 'a' from cache", "No function matches"),
        ("select id / from cache", "syntax error"),
        ("select nowhere(id) from cache", "nowhere"),
        ("select cast('a' as int)", "Could not convert"),
        ("", "no result"),
        ("   -- nothing", "no result"),
    ],
)
def test_a_wrong_query_is_one_sentence(cache, query, says):
    with pytest.raises(ValueError) as raised:
        sql(cache, query)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("query", ["select id", "drop table cache"])
def test_a_name_that_is_right_is_not_suggested(cache, query):
    with pytest.raises(ValueError, match="the query failed") as raised:
        sql(cache, query)
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    "query",
    [
        "copy cache to '{path}/out.csv'",
        "attach '{path}/out.db'",
        "select * from read_text('{path}/secret.csv')",
        "select * from '{path}/secret.csv'",
        "install httpfs",
        "set enable_external_access = true",
        'from "table"',  # a variable of the function that asks
    ],
)
def test_a_query_sees_and_makes_no_file_and_no_variable(cache, tmp_path, query):
    (tmp_path / "secret.csv").write_text("word\nsesame\n")
    with pytest.raises(ValueError, match="the query failed"):
        sql(cache, query.format(path=tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "secret.csv"]


def test_a_query_is_text(cache):
    with pytest.raises(TypeError, match="SQL as text"):
        sql(cache, None)


def test_the_result_keeps_no_segment(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="384KiB")
    publish(cache, segments=3)
    kept = sql(cache, "select * from cache")
    wait_until(lambda: cache.stats().leased_bytes == 0, "Arrow's threads to let go")
    publish(cache, segments=16)  # on_full="raise"
    assert seqs(cache)[0] > 2
    assert [image[0, 0] for image in kept["image"]] == kept["id"].tolist()
    assert len(kept)


def test_a_failed_query_keeps_no_segment(cache):
    with pytest.raises(ValueError, match="Could not convert") as kept:
        sql(cache, "select cast(cast(id as text) || 'a' as int) from cache")
    wait_until(lambda: cache.stats().leased_bytes == 0, "Arrow's threads to let go")
    assert kept.value.__traceback__ is not None  # a notebook keeps it, too, until the next error


def test_a_cache_that_vanishes_is_one_sentence(cache):
    shutil.rmtree(cache.path)
    with pytest.raises(FileNotFoundError, match="moved or removed while in use"):
        sql(cache, "select 1")


def test_a_group_by_reads_the_pages_of_its_column_only(tmp_path):
    schema = ac.Schema({"image": ac.Tensor("float32", (128, 128)), "label": ac.Tensor("int64")})
    cache = ac.Cache.create(
        tmp_path / "c", schema, capacity="128MiB", segment_bytes="16MiB", segment_rows=240
    )
    with cache.writer() as writer:
        writer.extend(image=np.ones((480, 128, 128), np.float32), label=np.arange(480) % 3)
    files = segment_files(cache)
    drop_from_memory(*files)
    frame = sql(cache, "select label, count(*) as n from cache group by 1 order by 1")
    assert frame["n"].tolist() == [160, 160, 160]
    few = sum(map(resident_bytes, files))
    sql(cache, "select sum(image[1][1] + image[128][128]) from cache")
    many = sum(map(resident_bytes, files))
    total = sum(path.stat().st_size for path in files)
    assert few < total / 100
    assert many > total / 2  # so it can be told
