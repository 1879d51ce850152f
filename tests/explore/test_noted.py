"""Notes on rows as columns of DataFrames and SQL."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from helpers import make_cache, publish

import arrowcache as ac

pytest.importorskip("duckdb", reason="the extra explore is not installed")
from arrowcache import explore

SCHEMA = ac.Schema({"label": ac.Tensor("int64"), "_tags": ac.Tensor("float32")})


@pytest.fixture
def cache(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 4)
    return cache


def test_without_notes_there_are_no_columns_of_them_but_for_who_names_one(cache):
    assert list(explore.head(cache, 2)) == ["_seq", "_row", "id", "image"]
    assert list(explore.sql(cache, "select * from cache limit 1")) == ["_seq", "_row", "id", "image"]
    found = explore.sql(cache, "select count(*) as n from cache where _excluded or len(_tags) > 0")
    assert found["n"].tolist() == [0]
    assert explore.to_pandas(cache, ["_excluded"])["_excluded"].sum() == 0
    found = explore.sql(cache, "pivot (select * exclude image from cache) on (id < 3) using count(*)")
    assert list(found) == ["_seq", "_row", "false", "true"]
    said = explore.sql(cache, "summarize select _excluded from cache")
    assert said["column_name"].tolist() == ["_excluded"]


def test_who_looks_sees_every_row_with_its_notes(cache):
    cache.exclude(["0:3"], reason="blurred")
    cache.exclude(["1:5"])
    cache.tag(["0:1", "0:3"], "hard")
    cache.tag("0:3", "odd")
    cache.annotate([(0, row) for row in range(16)], loss=np.arange(16))
    frame = explore.head(cache, 40)
    assert list(frame) == ["_seq", "_row", "id", "image", "_excluded", "_reason", "_tags", "loss"]
    assert frame.index[frame["_excluded"]].tolist() == [3, 21]
    assert frame["_reason"].dropna().to_dict() == {3: "blurred", 21: ""}
    assert frame["_tags"].tolist()[:4] == [[], ["hard"], [], ["hard", "odd"]]
    assert frame["loss"].tolist()[:16] == [*range(16)]
    assert frame["loss"].isna().sum() == 24
    assert explore.rows(cache, "0:3")["_tags"].tolist() == [["hard", "odd"]]
    assert list(explore.to_pandas(cache, ["loss", "_row"], limit=1)) == ["loss", "_row"]
    worst = explore.sql(cache, "select * from cache order by loss desc nulls last limit 3")
    assert worst["_row"].tolist() == [15, 14, 13]
    cache.tag(worst, "worst")
    found = explore.sql(cache, "select _seq, _row from cache where list_contains(_tags, 'worst')")
    assert found["_row"].tolist() == [13, 14, 15]
    counts = explore.sql(cache, "select count(*) as n, sum(loss) as s from cache where not _excluded")
    assert counts.iloc[0].tolist() == [62, 117]
    found = explore.sql(cache, "select _reason, count(*) as n from cache group by all order by all")
    assert found["n"].tolist() == [1, 1, 62]
    assert found["_reason"].tolist()[:2] == ["", "blurred"]
    assert explore.to_pandas(cache, ["_reason"]).dropna()["_reason"].tolist() == ["blurred", ""]
    cache.include("0:3")
    assert explore.rows(cache, ["0:3", "1:5"])["_reason"].isna().tolist() == [True, False]
    with pytest.raises(ValueError, match="loss"):
        explore.sql(cache, "select lose from cache")


@pytest.mark.parametrize("query", ["table cache", "select * from (from cache)", "(table cache)"])
def test_what_names_all_columns_has_the_notes(cache, query):
    cache.exclude("0:3")
    cache.annotate("0:1", loss=1.0)
    assert {"_excluded", "_reason", "_tags", "loss"} < set(explore.sql(cache, query))
    for word in ("summarize", "describe"):
        said = set(explore.sql(cache, f"{word} {query}")["column_name"])
        assert {"_excluded", "_reason", "_tags", "loss"} < said


def test_a_note_with_a_quote_in_its_name_can_be_asked_for(cache):
    cache.annotate("0:1", **{'a"b': 1.5})
    assert explore.sql(cache, 'select sum("a""b") as all from cache')["all"].tolist() == [1.5]


def test_a_column_of_the_cache_comes_before_a_note_of_its_name(tmp_path):
    cache = make_cache(tmp_path / "cache", SCHEMA)
    with cache.writer() as writer:
        writer.append({"label": 3, "_tags": 0.5})
    cache.tag("0:0", "hard")
    cache.annotate("0:0", Label=7)
    assert explore.head(cache).drop(columns="_reason").iloc[0].tolist() == [0, 0, 3, 0.5, False, 7.0]
    found = explore.sql(cache, "select * from cache")
    assert list(found) == ["_seq", "_row", "label", "_tags", "_excluded", "_reason", "Label_1"]
    assert found["Label_1"].tolist() == [7.0]


def test_rows_are_grouped_and_colored_by_an_annotation(cache):
    cache.annotate([(0, row) for row in range(16)], Id=np.arange(16) % 2)
    made = explore.gallery(cache, "image", by="Id")  # beside a column "id"
    assert {group.value: group.rows for group in made.groups} == {"NaN": 48, "0.0": 8, "1.0": 8}
    frame = explore.map_of(cache, "image", by="Id")
    assert frame["Id"].tolist()[:17] == pytest.approx([0, 1] * 8 + [np.nan], nan_ok=True)
    with pytest.raises(ValueError, match="a gallery is grouped by one value a row: id, Id can be"):
        explore.gallery(cache, "image", by="image")


def test_what_is_of_columns_alone_says_who_has_annotations(cache):
    for others in ("", "; sql and to_pandas have loss as well"):
        for look in (lambda: explore.describe(cache, ["loss"]), lambda: explore.plot_values(cache, "loss")):
            with pytest.raises(ValueError, match=f"'loss': the cache has id, image{others}$"):
                look()
        cache.annotate("0:1", loss=1.0)


def test_notes_are_columns_of_polars(cache):
    pytest.importorskip("polars", reason="polars is not installed")
    cache.tag("0:1", "hard")
    cache.exclude("0:0", reason="dark")
    assert explore.to_polars(cache, limit=2)["_tags"].to_list() == [[], ["hard"]]
    assert explore.to_polars(cache, limit=2)["_reason"].to_list() == ["dark", None]


def test_a_relation_of_duckdb_names_rows(cache):
    duckdb = pytest.importorskip("duckdb", reason="the extra explore is not installed")
    frame = explore.head(cache, 20)[["_seq", "_row", "id"]]  # noqa: F841 - DuckDB finds it by its name
    assert cache.exclude(duckdb.sql("select * from frame where id % 8 = 3")) == 3
    assert explore.sql(cache, "select id from cache where _excluded")["id"].tolist() == [3, 11, 19]
    with pytest.raises(ValueError, match="no column _seq"):
        cache.exclude(duckdb.sql("select _row from frame"))


def test_rows_of_a_rule_are_shown_and_exported_as_excluded(cache, tmp_path):
    cache.annotate("0:4", loss=9)
    cache.exclude(where=pc.field("id") < 3, reason="dark")
    cache.exclude(where=pc.field("loss") > 8)
    cache.exclude("0:9", reason="blurred")
    frame = explore.to_pandas(cache)
    assert frame.index[frame["_excluded"]].tolist() == [0, 1, 2, 4, 9]
    assert frame["_reason"][[0, 4, 9]].tolist() == ["dark", "", "blurred"]
    assert explore.head(cache, 4)["_reason"].tolist()[:3] == ["dark"] * 3
    assert explore.rows(cache, ["0:9", "0:1", "0:5"])["_excluded"].tolist() == [True, True, False]
    found = explore.sql(cache, "select id, _reason from cache where _excluded order by id")
    assert found["id"].tolist() == [0, 1, 2, 4, 9]
    files = explore.export_parquet(cache, tmp_path / "out")
    exported = pq.read_table(files)["id"].to_pylist()
    assert exported[:6] == [3, 5, 6, 7, 8, 10]
    files = explore.export_parquet(cache, tmp_path / "all", columns=["id"], rows="all")
    assert pq.read_table(files)["_excluded"].to_pylist()[:6] == [True, True, True, False, True, False]
