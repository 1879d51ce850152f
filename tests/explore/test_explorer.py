"""The explorer without a browser: what it answers, follows, shows of a row, and whom its server answers."""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import gc
import http.client
import io
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import wave

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from helpers import EVERY_TYPE, wait_until
from quick import some_of

pytest.importorskip("mosaic_widget", reason="the extra 'explore' is not installed")

import duckdb

import arrowcache as ac
from arrowcache import explore
from arrowcache.explore import serving
from arrowcache.explore.pictures import large, slice_html
from arrowcache.explore.serving import Server

SCHEMA = ac.Schema({"x": ac.Tensor("float32"), "label": ac.Tensor("int64"), "kind": ac.String()})


def fill(cache, start, stop):
    """Rows of SCHEMA: x counts up, labels are 0 to 4, kinds two."""
    with cache.writer() as writer:
        for number in range(start, stop):
            writer.append(x=number, label=number % 5, kind="ab"[number % 2])


@pytest.fixture
def numbers(tmp_path):
    """Four segments of 25 rows."""
    with made_of_numbers(tmp_path / "numbers") as cache:
        yield cache


def made_of_numbers(path):
    cache = ac.Cache.create(path, SCHEMA, "4MiB", "64KiB", 25)
    fill(cache, 0, 100)
    return cache


class Page:
    """What a browser would be: it sends, and has the state that it is sent."""

    def __init__(self, widget):
        self.server = Server(widget, "a <title>")
        self.server.socket.close()
        self.state, self.custom = {}, []
        self.send({"method": "request_state"})

    def send(self, data):
        self.changed = set()
        answer = self.server.answer(data)
        (size,) = struct.unpack(">I", answer[:4])
        for message in json.loads(answer[4 : 4 + size]):
            if message["data"]["method"] == "update":
                self.state |= message["data"]["state"]
                self.changed |= {*message["data"]["state"]}
            elif message["data"]["method"] == "custom":
                self.custom.append(message["data"]["content"])

    def ask(self, do, **more):
        self.send({"method": "custom", "content": {"do": do, **more}})
        return self.state["board"]


@pytest.fixture
def shown(numbers):
    widget = explore.open(numbers)
    yield widget
    widget.close()


@pytest.fixture(scope="module")
def shown_to_all(tmp_path_factory):
    """The same, for tests whose requests are refused: they change nothing of it."""
    with made_of_numbers(tmp_path_factory.mktemp("shown") / "numbers") as cache:
        widget = explore.open(cache)
        yield widget
        widget.close()


# what is brushed


def test_each_scalar_column_has_a_chart_of_its_kind(shown):
    marks = {plot["name"]: plot["plot"][0]["mark"] for plot in shown.spec["hconcat"]}
    assert marks == {"x": "rectY", "label": "barX", "kind": "barX"}


def test_text_of_many_values_and_complex_numbers_have_no_chart(tmp_path):
    schema = ac.Schema({"text": ac.String(), "z": ac.Tensor("complex64"), "$a": ac.Tensor("int8")})
    with ac.Cache.create(tmp_path / "texts", schema, "4MiB", "64KiB") as cache:
        with cache.writer() as writer:
            for number in range(100):
                writer.append(**{"text": str(number), "z": 1j, "$a": 1})
        widget = explore.open(cache)
        assert widget.spec["hconcat"] == [{"vspace": 0}]
        assert len(widget.ids) == 100
        widget.close()


@pytest.mark.parametrize("kind", [ac.Tensor("uint8", (4, 4)), ac.Ragged("int32"), ac.Binary(), ac.String()])
def test_without_a_chart_it_shows_and_follows_rows_all_the_same(tmp_path, kind):
    values = [str(n) for n in range(50)] if isinstance(kind, ac.String) else [np.ones((4, 4), "u1")] * 50
    if isinstance(kind, ac.Ragged | ac.Binary):
        values = [value[0].astype("i4") if isinstance(kind, ac.Ragged) else b"a" for value in values]
    with ac.Cache.create(tmp_path / "few", ac.Schema({"one": kind}), "4MiB", "64KiB", 25) as cache:
        with cache.writer() as writer:
            writer.extend(one=values)
        with contextlib.closing(explore.open(cache)) as widget:
            with cache.writer() as writer:
                writer.extend(one=values)
            board = Page(widget).ask("refresh")
            assert (board["total"], board["error"]) == (100, "")
            assert explore.sql(cache, "select count(*) n from cache")["n"].tolist() == [100]


@pytest.mark.parametrize("kind", [ac.Tensor("uint8", (4, 4)), ac.Timestamp()])
def test_an_empty_cache_of_any_column_opens(tmp_path, kind):
    cache = ac.Cache.create(tmp_path / "none", ac.Schema({"one": kind}), "4MiB", "64KiB")
    with cache, contextlib.closing(explore.open(cache)) as widget:
        assert widget.ids.shape == (0, 2)


def test_no_moment_is_no_bar(tmp_path):
    with ac.Cache.create(tmp_path / "when", ac.Schema({"when": ac.Timestamp()}), "4MiB", "64KiB") as cache:
        moments = np.array(["2024-01-01", "NaT", "2024-01-02", "0001-01-01"], "datetime64[us]")
        with cache.writer() as writer:
            writer.extend(when=moments)
        with contextlib.closing(explore.open(cache)) as widget:
            bounds = widget.con.execute('select min("when"), count("when") from cache').fetchone()
        assert bounds == (dt.datetime(1, 1, 1), 3)  # noqa: DTZ001  # as DuckDB has them
        found = explore.sql(cache, 'select "when" from cache')
        assert found["when"].isna().tolist() == [False, True, False, False]
        assert explore.sql(cache, 'select count("when") n from cache')["n"].tolist() == [3]


def test_what_is_brushed_is_counted_listed_and_named(numbers, shown):
    page = Page(shown)
    assert (page.state["board"]["count"], page.state["board"]["total"]) == (100, 100)
    assert len(shown.ids) == 100
    assert shown.sql == "select * from cache"
    board = page.ask("page", where='("x" between 40 and 59.5) and ("label" in (3))', at=0)
    assert (board["count"], board["total"], board["is_brushed"]) == (4, 100, True)
    assert shown.ids.tolist() == board["ids"] == [[1, 18], [1, 23], [2, 3], [2, 8]]
    assert shown.ids.dtype == np.int64
    frame = explore.sql(numbers, shown.sql)
    assert frame["x"].tolist() == explore.rows(numbers, shown.ids)["x"].tolist() == [43, 48, 53, 58]
    board = page.ask("page", where="", at=96)
    assert [row for _, row in board["ids"]] == [21, 22, 23, 24]
    assert numbers.stats().leased_bytes == 0


def test_what_is_no_finite_number_leaves_a_chart_its_bounds(tmp_path):
    schema = ac.Schema({"x": ac.Tensor("float16"), "big": ac.Tensor("uint64")})
    with ac.Cache.create(tmp_path / "odd", schema, "4MiB", "64KiB") as cache:
        with cache.writer() as writer:
            for x in (1.0, np.nan, np.inf, -np.inf, 2.0):
                writer.append(x=np.float16(x), big=2**63)
        widget = explore.open(cache)
        bounds = widget.con.execute("select min(x), max(x), count(*), max(big) from cache").fetchall()
        assert bounds == [(1.0, 2.0, 5, float(2**63))]
        widget.close()


def test_its_sql_finds_its_rows_also_of_numbers_that_a_browser_does_not_have(tmp_path):
    schema = ac.Schema({"hash": ac.Tensor("int64"), "name": ac.String()})
    with ac.Cache.create(tmp_path / "hashes", schema, "4MiB", "64KiB") as cache:
        with cache.writer() as writer:
            writer.extend(hash=2**60 + 1 + np.arange(30) % 3 * 1_000_003, name=['"hash"'] * 30)
        with contextlib.closing(explore.open(cache)) as widget:
            page = Page(widget)
            page.ask("page", where=f"""("hash" IN ({2**60})) and ("name" IN ('"hash"'))""")
            assert len(widget.ids) == 10
            found = explore.sql(cache, widget.sql)
            assert found[["_seq", "_row"]].to_numpy().tolist() == widget.ids.tolist()


@pytest.mark.filterwarnings("error")
def test_what_cannot_be_opened_leaves_no_second_error(numbers):
    with pytest.raises(TypeError):
        explore.open(5)
    numbers.close()
    with pytest.raises(ValueError, match="closed"):
        explore.open(numbers)
    gc.collect()


def test_a_predicate_that_fails_is_told(shown):
    page = Page(shown)
    assert "nothing" in page.ask("page", where="nothing = 1", at=0)["error"]
    assert page.ask("page", where="", at=0)["error"] == ""


# a cache that changes


def test_it_follows_what_is_published_and_evicted(numbers, shown):
    page = Page(shown)
    before = page.state["board"]
    board = page.ask("refresh")
    assert board["looks"] > before["looks"]  # the browser may ask again
    assert board["version"] == before["version"]
    fill(numbers, 100, 150)
    board = page.ask("refresh")
    assert (board["total"], board["version"]) == (150, before["version"] + 1)
    numbers.evict(1)
    board = page.ask("refresh")
    assert (board["total"], board["version"]) == (125, before["version"] + 2)
    assert shown.ids[0].tolist() == [1, 0]
    assert len(shown.ids) == 125
    assert numbers.stats().leased_bytes == 0


def test_what_mosaic_counted_ahead_goes_with_the_rows_it_counted(numbers, shown):
    page = Page(shown)
    ahead = "create schema if not exists mosaic; create table mosaic.cube as select count(*) as n from cache"
    page.send({"method": "custom", "content": {"type": "exec", "sql": ahead, "uuid": "1"}})
    assert page.custom == [{"type": "exec", "uuid": "1"}]
    fill(numbers, 100, 110)
    page.ask("refresh")
    page.send({"method": "custom", "content": {"type": "arrow", "sql": "from mosaic.cube", "uuid": "2"}})
    assert "does not exist" in page.custom[-1]["error"]


def test_of_an_empty_cache_it_waits_for_rows(tmp_path):
    with ac.Cache.create(tmp_path / "empty", SCHEMA, "4MiB", "64KiB") as cache:
        widget = explore.open(cache)
        page = Page(widget)
        assert (page.state["board"]["total"], widget.ids.shape) == (0, (0, 2))
        fill(cache, 0, 10)
        assert page.ask("refresh")["total"] == 10
        widget.close()


def test_a_cache_that_vanishes_and_comes_back_is_told(numbers, shown, tmp_path):
    page = Page(shown)
    numbers.path.rename(tmp_path / "elsewhere")
    assert str(numbers.path) in page.ask("refresh")["error"]
    (tmp_path / "elsewhere").rename(numbers.path)
    assert page.ask("refresh")["error"] == ""


def test_what_was_copied_is_shown_after_a_look_at_rows_that_failed(numbers, shown):
    page, where = Page(shown), "x >= (select least from later)"
    fill(numbers, 100, 150)
    assert "later" in page.ask("refresh", where=where)["error"]
    make = {"type": "exec", "sql": "create table later as select 0 as least", "uuid": "1"}
    page.send({"method": "custom", "content": make})
    board = page.ask("refresh", where=where)
    assert (board["count"], board["error"]) == (150, "")


def test_another_cache_in_its_place_is_shown_afresh(numbers, shown):
    page = Page(shown)
    before = page.state["board"]["version"]
    shutil.rmtree(numbers.path)
    with ac.Cache.create(numbers.path, ac.Schema({"y": ac.Tensor("float32")}), "4MiB", "64KiB") as other:
        with other.writer() as writer:
            writer.extend(y=np.arange(50, dtype="f4"))
        board = page.ask("refresh")
        assert (board["total"], board["error"], board["version"] > before) == (50, "", True)
        assert [plot["name"] for plot in shown.spec["hconcat"]] == ["y"]
        assert explore.sql(other, shown.sql)["y"].tolist() == [*range(50)]
        page.ask("exclude", one=[0, 7])
        assert explore.rows(other, "0:7")["_excluded"].tolist() == [True]


def test_charts_fit_what_comes_and_else_stay(tmp_path):
    schema = ac.Schema({"n": ac.Tensor("int64"), "text": ac.String(), "label": ac.Tensor("int64")})

    def extend(numbers):
        with cache.writer() as writer:
            writer.extend(n=numbers, text=[*map(str, numbers)], label=numbers % 4)

    cache = ac.Cache.create(tmp_path / "young", schema, "4MiB", "64KiB", 25)
    with cache, contextlib.closing(explore.open(cache)) as widget:
        page, spec = Page(widget), widget.spec
        marks = {}
        for first, stop in ((0, 8), (8, 16), (16, 100)):
            extend(np.arange(first, stop))
            page.ask("refresh")
            marks[stop] = {plot["name"]: plot["plot"][0]["mark"] for plot in widget.spec["hconcat"]}
            assert (widget.spec is spec) == (stop == 16)  # brushes stay, too
            spec = widget.spec
        assert marks[8] == marks[16] == dict.fromkeys(schema, "barX")
        assert marks[100] == {"n": "rectY", "label": "barX"}
        while cache.stats().rows > 20:
            cache.evict(1)
        page.ask("refresh")
        assert widget.spec is spec


def test_a_row_that_is_evicted_before_it_is_opened_is_told(numbers, shown):
    page = Page(shown)
    numbers.evict(1)
    assert "0:3 has left the cache" in page.ask("open", one=[0, 3])["error"]


# what is shown of the rows


def follow(page, has_followed):
    """Ask for what is new, as a browser does, until it is there."""
    wait_until(lambda: has_followed(page.ask("refresh", where="")), "the copy to be made anew")


def names_of(widget):
    return [plot["name"] for plot in widget.spec["hconcat"]]


@pytest.fixture
def vectors(tmp_path):
    """Four segments of 25 rows, each a point of a circle; every tenth is at its opposite."""
    schema = ac.Schema({"n": ac.Tensor("int32"), "point": ac.Tensor("float32", (2,))})
    with ac.Cache.create(tmp_path / "vectors", schema, "4MiB", "64KiB", 25) as cache:
        angles = np.arange(100) / 100 + np.pi * (np.arange(100) % 10 == 0)
        with cache.writer() as writer:
            writer.extend(
                n=np.arange(100, dtype="i4"), point=np.stack([np.cos(angles), np.sin(angles)], 1).astype("f4")
            )
        yield cache


def test_rows_come_in_the_order_of_a_column(numbers, shown):
    page = Page(shown)
    choices = dict(page.state["board"]["choices"]["order"])
    assert [*choices][:3] == ["oldest first", "x, highest first", "x, lowest first"]
    board = page.ask("page", where='("label" IN (3))', order=choices["x, highest first"])
    assert board["ids"] == [[row // 25, row % 25] for row in range(98, 58, -5)]
    board = page.ask("page", where='("label" IN (3))', at=8, order=choices["x, highest first"])
    assert board["ids"][0] == [2, 8]
    assert page.ask("page", where="", order=choices["kind, lowest first"])["ids"][1] == [0, 2]


def test_annotations_tags_and_exclusions_become_charts_and_follow(numbers, shown):
    page = Page(shown)
    assert names_of(shown) == ["x", "label", "kind"]
    numbers.annotate([(0, row) for row in range(25)], loss=np.arange(25) % 7)
    numbers.tag([(0, 3), (1, 3)], "hard")
    numbers.tag([(0, 3), (2, 4)], "easy")
    numbers.exclude(where=pc.field("label") == 2, reason="bad")
    follow(page, lambda _: len(names_of(shown)) > 3)
    assert names_of(shown) == ["x", "label", "kind", "_excluded", "_tags", "loss"]
    choices = dict(page.state["board"]["choices"]["order"])
    board = page.ask("page", where="", order=choices["loss, highest first"])
    assert board["ids"][:4] == [[0, 6], [0, 13], [0, 20], [0, 5]]
    assert page.ask("page", where="", at=24, order=choices["loss, lowest first"])["ids"][1] == [1, 0]
    for where, count in (
        ("\"_tags\" IN ('hard')", 1),
        ("\"_tags\" IN ('easy, hard')", 1),
        ('"_excluded"', 20),
    ):
        board = page.ask("page", where=f"({where})")
        assert (board["count"], board["error"]) == (count, "")
        found = explore.sql(numbers, shown.sql)
        assert found[["_seq", "_row"]].to_numpy().tolist() == shown.ids.tolist()
    numbers.annotate((3, 3), loss=99)
    follow(page, lambda _: shown.con.execute("select max(loss) from cache").fetchall()[0] == (99,))
    assert page.ask("page", where="", order=choices["loss, highest first"])["ids"][0] == [3, 3]


def test_a_brush_stays_as_the_first_mark_comes(numbers, shown):
    page, where = Page(shown), '("label" IN (3))'
    page.ask("page", where=where)
    spec = shown.spec
    page.ask("tag", where=where, text="hard")
    board = page.ask("refresh", where=where)
    assert (board["count"], shown.spec is spec) == (20, True)
    assert "side by side: _tags" in dict(board["choices"]["beside"])
    numbers.exclude("0:0")
    follow(page, lambda _: "_tags" in names_of(shown))


def test_rows_of_few_values_stand_side_by_side(numbers, shown):
    numbers.tag([(0, row) for row in range(10)], "hard")
    page = Page(shown)
    follow(page, lambda _: "_tags" in names_of(shown))
    board = page.ask("page", where="", beside='"_tags"', order='"x" desc')
    assert board["ids"] == [*([3, row] for row in range(24, 16, -1)), *([0, row] for row in range(9, 1, -1))]
    assert "<b>none: 90 rows</b>" in board["table"]
    assert "<b>hard: 10 rows</b>" in board["table"]
    board = page.ask("page", where="x < 5", beside='"kind"')
    assert board["ids"] == [[0, 0], [0, 2], [0, 4], [0, 1], [0, 3]]


def test_pictures_have_the_value_that_orders_them(vectors):
    with contextlib.closing(explore.open(vectors)) as widget:
        page = Page(widget)
        board = page.ask("page", where="", view="point", order='"n" desc')
        assert (len(board["ids"]), board["table"].count("<figure>")) == (24, 24)
        assert ">3:24 99<" in board["table"]


def test_rows_like_one_are_what_is_brushed(vectors, tmp_path):
    with contextlib.closing(explore.open(vectors)) as widget:
        page = Page(widget)
        board = page.ask("page", where="", near=[1, 25 - 1, "point"], view="point")
        assert board["ids"][:2] == [[1, 24], [1, 23]]
        assert (board["count"], board["is_brushed"]) == (24, True)
        assert sorted(widget.ids.tolist()) == sorted(board["ids"])
        assert len(explore.sql(vectors, widget.sql)) == 24
        assert "24 rows tagged" in page.ask("tag", where="", near=[1, 24, "point"], text="near")["says"]
        both = page.ask("page", where="(n < 49)", near=[1, 24, "point"])
        assert {tuple(one) for one in both["ids"]} < {*map(tuple, board["ids"])}
        vectors.evict(1)
        assert "0:3 has left the cache" in page.ask("page", where="", near=[0, 3, "point"])["error"]


def test_a_map_is_a_chart_that_is_brushed(vectors):
    with contextlib.closing(explore.open(vectors)) as widget:
        page = Page(widget)
        page.ask("map", where="", text="point")
        assert names_of(widget) == ["n", "map of point"]
        opposite = widget.con.execute("select avg(_map_x) from map where n % 10 = 0").fetchall()[0][0] < 0
        board = page.ask("page", where=f'("_map_x" {"<" if opposite else ">"} 0)')
        assert [25 * seq + row for seq, row in widget.ids.tolist()] == [*range(0, 100, 10)]
        assert sorted(explore.sql(vectors, widget.sql)["n"]) == [*range(0, 100, 10)]
        with vectors.writer() as writer:
            writer.append(n=100, point=np.zeros(2, np.float32))
        assert page.ask("refresh", where=board["sql"].partition("where ")[2])["total"] == 101
        assert widget.con.execute("select count(*) from map").fetchall()[0] == (100,)
        vectors.evict(1)
        page.ask("refresh", where="")
        assert widget.con.execute("select count(*) from map").fetchall()[0] == (75,)
        page.ask("map", where="", text="")
        assert names_of(widget) == ["n"]


def test_what_is_brushed_is_exported_without_excluded_rows(numbers, shown, tmp_path, monkeypatch):
    page = Page(shown)
    numbers.exclude("0:3")
    board = page.ask("export", where="(x < 8)", text=str(tmp_path / "out"))
    assert board["says"] == f"1 file in {tmp_path / 'out'}, without excluded rows"
    assert pq.read_table(tmp_path / "out")["x"].to_pylist() == [0, 1, 2, 4, 5, 6, 7]
    assert "holds files already" in page.ask("export", where="", text=str(tmp_path / "out"))["error"]
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        says = page.ask("export", where="(x < 8)")["says"]
        assert f"{tmp_path / f'numbers-rows-{number}'}, " in says


# acting on rows


def test_exclusion_and_tags_are_the_caches(numbers):
    widget = explore.open(numbers)
    page = Page(widget)
    page.ask("page", where="x < 2", at=0)
    assert "2 rows excluded" in page.ask("exclude", text="blurred")["says"]
    assert "1 row tagged 'hard'" in page.ask("tag", one=[2, 7], text="hard")["says"]
    excluded = explore.sql(numbers, "select _seq, _row from cache where _excluded")
    assert excluded.to_numpy().tolist() == [[0, 0], [0, 1]]
    assert explore.rows(numbers, "2:7")["_tags"].tolist() == [["hard"]]
    with ac.Loader(numbers, 1) as loader:
        assert loader.steps is None
        assert len([*loader]) == numbers.stats().rows - 2
    widget.close()


def test_what_a_page_excludes_is_what_it_shows_though_another_asked_since(numbers, shown):
    page = Page(shown)
    of_label = {"where": '("label" IN (0))', "at": 0}
    page.ask("page", **of_label)
    other = {"method": "custom", "content": {"do": "page", "where": '("x" > 90)', "at": 8}}
    page.server.answer(other)
    assert page.ask("refresh", **of_label)["count"] == 20
    page.server.answer(other)
    board = page.ask("exclude", text="", **of_label)
    assert board["says"].startswith("20 rows excluded")
    assert board["count"] == 20
    assert set(explore.sql(numbers, "select label from cache where _excluded")["label"]) == {0}


def test_what_was_done_is_seen_at_once_and_stays_said(numbers, shown):
    page = Page(shown)
    assert "_excluded" in page.ask("exclude", one=[0, 1], text="blurred")["table"]
    fill(numbers, 100, 125)
    board = page.ask("refresh")
    assert (board["total"], board["says"][:14]) == (125, "1 row excluded")
    assert page.ask("page", where="", at=8)["says"] == ""


def test_a_row_that_left_is_not_said_to_be_excluded(numbers, shown):
    page = Page(shown)
    numbers.evict(1)
    assert "0 rows excluded" in page.ask("exclude", one=[0, 1], text="")["says"]
    says = page.ask("tag", where="_seq < 2", text="hard")["says"]
    assert says == "25 rows tagged 'hard'; 25 rows had left the cache"


def test_a_page_behind_the_last_row_is_the_first(shown):
    board = Page(shown).ask("page", where="x < 5", at=16)
    assert (board["first"], len(board["ids"])) == (0, 5)


def test_once_a_row_has_a_mark_each_row_can_be_opened_and_has_its_marks(numbers, shown):
    page = Page(shown)
    numbers.exclude("0:1", reason="blurred")
    numbers.tag("0:2", "hard")
    numbers.tag("0:2", "<far>")
    seen = {}
    for row in (1, 2, 3):
        assert page.ask("open", one=[0, row])["error"] == ""
        seen[row] = {column["name"]: column["html"] for column in page.state["detail"]["columns"]}
        assert list(seen[row]) == [*SCHEMA, "_excluded", "_reason", "_tags"]
    assert [seen[row]["_reason"] for row in seen] == ["<pre>blurred</pre>", "<pre></pre>", "<pre></pre>"]
    assert [seen[row]["_tags"] for row in (1, 2)] == ["<pre></pre>", "<pre>&lt;far&gt;, hard</pre>"]


# whatever the browser sends


@pytest.mark.parametrize(
    "query",
    [
        "select * from read_text('{file}')",
        "select * from '{file}'",
        "attach '{file}' as other",
        "copy cache to '{file}.csv'",
        "set enable_external_access = true",
        "set lock_configuration = false",
        "install httpfs",
        "load '{file}'",
        "select * from schema",
    ],
)
@pytest.mark.parametrize("kind", ["arrow", "exec"])
def test_its_sql_reaches_no_file_and_no_variable(shown_to_all, tmp_path, query, kind):
    file = tmp_path / "secret.csv"
    file.write_text("a,b\n1,2\n")
    page = Page(shown_to_all)
    content = {"type": kind, "sql": query.format(file=file), "uuid": "1"}
    page.send({"method": "custom", "content": content})
    (answer,) = page.custom
    assert set(answer) == {"error", "uuid"}
    assert [path.name for path in tmp_path.glob("secret*")] == ["secret.csv"]


# one row, large


@pytest.mark.filterwarnings("error")
def test_a_row_of_every_type_can_be_opened(varied):
    widget = explore.open(varied)
    page = Page(widget)
    for one in some_of(widget.ids.tolist(), 7):
        assert page.ask("open", one=one)["error"] == ""
        assert [column["name"] for column in page.state["detail"]["columns"]] == list(EVERY_TYPE)
    widget.close()


def test_a_row_and_a_slice_are_sent_as_often_as_they_are_asked_for(tmp_path):
    schema = ac.Schema({"volume": ac.Tensor("float32", (6, 8, 9))})
    with ac.Cache.create(tmp_path / "volumes", schema, "4MiB", "64KiB") as cache:
        with cache.writer() as writer:
            writer.extend(volume=np.random.default_rng(0).random((2, 6, 8, 9), np.float32))
        with contextlib.closing(explore.open(cache)) as widget:
            page = Page(widget)
            for _ in range(2):  # the page closed it, or was loaded anew
                page.ask("open", one=[0, 1])
                assert "detail" in page.changed
                page.ask("slice", text="volume", at=0)
                assert "slice" in page.changed


def test_text_is_shown_in_full_and_never_as_markup():
    text = "<script>" + "long " * 1000
    assert f"&lt;script&gt;{'long ' * 1000}" in large("text", text, ac.String())["html"]


def test_a_volume_has_slices_in_colors_that_they_share():
    volume = np.linspace(0, 1, 5 * 8 * 9).reshape(5, 8, 9)
    shown = large("volume", volume, None)
    assert shown["slices"] == 5
    assert shown["html"] == slice_html(volume, 2) != slice_html(volume, 1)
    doubled = np.concatenate([volume, volume + 1])
    assert slice_html(doubled, 2) != slice_html(volume, 2)
    title = f"float64 (8, 9), {volume[2].min():.6g} to {volume[2].max():.6g}"
    assert title in shown["html"]  # not of the colors in which it is drawn
    assert large("images", np.zeros((5, 8, 9, 3), np.uint8), None)["slices"] == 5
    assert large("image", np.zeros((3, 8, 9), np.uint8), None)["slices"] == 0


@pytest.mark.parametrize("frames", [1, 2, 3, 4])
def test_frames_of_a_ragged_row_are_slices_however_many_they_are(tmp_path, frames):
    values = np.random.default_rng(0).random((frames, 8, 9), np.float32)
    assert large("images", values[..., None], ac.Ragged("float32", (8, 9, 1)))["slices"] == frames
    assert large("image", values[..., :3], ac.Ragged("float32", (8, 3)))["slices"] == 0
    with ac.Cache.create(tmp_path / "c", {"frames": ac.Ragged("float32", (8, 9))}, "4MiB", "64KiB") as cache:
        with cache.writer() as writer:
            writer.append(frames=values)
        with contextlib.closing(explore.open(cache)) as widget:
            page = Page(widget)
            page.ask("open", one=[0, 0])
            assert page.state["detail"]["columns"][0]["slices"] == frames
            page.ask("slice", text="frames", at=0)
            assert page.state["slice"]["html"] == slice_html(values, 0, ac.Ragged("float32", (8, 9)))


def test_sound_can_be_played():
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(bytes(1000))
    assert "data:audio/wav" in large("sound", file.getvalue(), ac.Binary())["html"]
    heard = large("signal", np.sin(np.arange(8000)), ac.Tensor("float64", (8000,)))
    assert "<audio" in heard["html"]
    assert "16,000 a second" in heard["html"]
    assert "16,000" not in large("signal", np.sin(np.arange(8000)), None, 8000)["html"]
    assert "<audio" not in large("short", np.sin(np.arange(80)), None)["html"]


def test_a_rate_that_is_text_hides_no_row(tmp_path):
    schema = ac.Schema({"rate": ac.String(), "sound": ac.Tensor("float32", (5000,))})
    with ac.Cache.create(tmp_path / "sounds", schema, "4MiB", "64KiB") as cache:
        with cache.writer() as writer:
            writer.append(rate="16k", sound=np.sin(np.arange(5000)).astype("f4"))
        with contextlib.closing(explore.open(cache)) as widget:
            page = Page(widget)
            assert page.ask("open", one=[0, 0])["error"] == ""
            assert "16,000 a second" in page.state["detail"]["columns"][1]["html"]


def test_a_ragged_row_is_drawn_and_written(varied):
    shown = large("ragged", np.array([1.5, 2.5]), ac.Ragged("float64"))["html"]
    assert "<img" in shown
    assert "[1.5 2.5]" in shown


# the server


def test_it_is_closed_in_the_middle_of_another_threads_query(numbers):
    shown, ended = explore.open(numbers), []

    def count() -> None:
        try:
            shown.con.execute(
                "select sum(a.range * b.range) from range(1000000) a, range(1000000) b"
            ).fetchall()
        except duckdb.Error:
            ended.append(True)

    thread = threading.Thread(target=count)
    thread.start()
    begun = time.process_time()
    wait_until(lambda: time.process_time() > begun + 0.3, "the query to be at work")
    shown.close()
    thread.join(60)
    assert ended == [True]


def test_cells_and_messages_in_threads_of_their_own_wait_for_each_other(numbers):
    """As in kernels that handle messages in a thread: DuckDB refuses two calls at once."""
    counted = "select count(*) as n from range(300000) a, range(20) b"
    asked = {"method": "custom", "content": {"type": "arrow", "sql": counted, "uuid": "1"}}
    with contextlib.closing(explore.open(numbers)) as shown:
        page = Page(shown)
        errors = []

        def ask():
            for _ in range(10):
                page.send(asked)
                errors.append(page.ask("page", where="label = 1")["error"])

        asking = threading.Thread(target=ask)
        asking.start()
        while asking.is_alive():
            assert len(shown.ids) in (20, 100)
        assert page.custom == 10 * [{"type": "arrow", "uuid": "1"}]
        assert errors == 10 * [""]


@pytest.fixture
def served(shown):
    with Server(shown, "a <title>") as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def answer(server, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, response, content


def entered(server):
    status, response, content = answer(server, "GET", server.url.removeprefix(f"http://{server.host}"))
    assert status == 200
    assert b"a &lt;title&gt;" in content
    cookie = response.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    return cookie.partition(";")[0]


def test_the_address_opens_once_and_the_page_goes_on_by_a_cookie(served):
    assert answer(served, "GET", "/")[0] == 403
    assert answer(served, "GET", "/?token=")[0] == 403
    assert answer(served, "GET", "/explorer.js")[0] == 403
    cookie = entered(served)
    assert answer(served, "GET", served.url.removeprefix(f"http://{served.host}"))[0] == 403
    for path in ("/", "/page.js", "/explorer.js", "/explorer.css"):
        assert answer(served, "GET", path, Cookie=cookie)[0] == 200
    assert answer(served, "GET", "/etc/passwd", Cookie=cookie)[0] == 404
    assert served.server_address[0] == "127.0.0.1"


def test_other_pages_and_other_hosts_are_refused(served):
    ask = json.dumps({"method": "request_state"})
    own = f"http://{served.host}"
    cookie = entered(served)
    assert b"board" in answer(served, "POST", "/", ask, Cookie=cookie, Origin=own)[2]
    assert answer(served, "POST", "/", ask, Cookie=cookie)[0] == 403
    assert answer(served, "POST", "/", ask, Origin=own)[0] == 403
    for origin in ("null", "http://example.org", f"http://localhost:{served.server_port}"):
        assert answer(served, "POST", "/", ask, Cookie=cookie, Origin=origin)[0] == 403
        assert answer(served, "GET", "/", Cookie=cookie, Origin=origin)[0] == 403
    assert answer(served, "POST", "/", ask, Cookie=cookie, Origin=own, Host="example.org")[0] == 403
    assert answer(served, "GET", "/", Cookie=cookie, Host=f"example.org:{served.server_port}")[0] == 403


@pytest.mark.parametrize("other", ['prefs={"theme":"dark"}', "version=2", "theme=é"])
def test_cookies_of_other_servers_on_this_machine_do_no_harm(served, other):
    cookie = entered(served)
    for both in (f"{other}; {cookie}", f"{cookie};{other}"):
        assert answer(served, "GET", "/page.js", Cookie=both)[0] == 200
    assert answer(served, "GET", "/page.js", Cookie=f"{other}; {cookie}a")[0] == 403


def test_a_length_that_is_no_number_is_refused(served, capsys):
    cookie, own = entered(served), f"http://{served.host}"
    assert answer(served, "POST", "/", Cookie=cookie, Origin=own, Content_Length="abc")[0] == 403
    assert capsys.readouterr().err == ""


def test_a_page_may_load_only_what_is_its_own(served):
    cookie = entered(served)
    policy = answer(served, "GET", "/", Cookie=cookie)[1].headers["Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert (rules["default-src"], rules["frame-ancestors"]) == ("'self'", "'none'")
    assert "script-src" not in rules


@pytest.mark.slow
def test_the_command_prints_an_address_and_ends_at_ctrl_c(numbers):
    command = [sys.executable, "-m", "arrowcache", "explore", str(numbers.path), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().strip()
        host, _, path = url.removeprefix("http://").partition("/")
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.request("GET", f"/{path}")
        assert connection.getresponse().status == 200
        niceness = os.getpriority(os.PRIO_PROCESS, process.pid)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        connection.close()  # a browser has it open until then
    assert (process.returncode, errors) == (0, "")
    assert niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)  # trainers go first


#: As one in a terminal: whoever starts it waits for its end. It says what it was given and what it got.
BROWSER = """#!{python}
import json, os, pathlib, sys, urllib.request
got = urllib.request.urlopen(sys.argv[1], timeout=60).read().decode()
seen = {{"given": sys.argv[1:], "got": got, "niceness": os.nice(0)}}
pathlib.Path("{seen}.part").write_text(json.dumps(seen))
os.rename("{seen}.part", "{seen}")
"""


def start_explore(cache, folder, browser):
    """The command with a browser of its own, in an empty folder, where its temporary files are, too."""
    work = folder / "tmp"
    work.mkdir()
    ours = os.environ | {"BROWSER": str(browser), "TMPDIR": str(work)}
    command = [sys.executable, "-m", "arrowcache", "explore", str(cache.path)]
    return subprocess.Popen(
        command, env=ours, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_the_command_answers_a_browser_in_the_terminal(numbers, tmp_path):
    browser, seen = tmp_path / "browser", tmp_path / "seen"
    browser.write_text(BROWSER.format(python=sys.executable, seen=seen))
    browser.chmod(0o755)
    with start_explore(numbers, tmp_path, browser) as process:
        try:
            wait_until(seen.exists, "the browser to have its page")
            process.send_signal(signal.SIGINT)
            said, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert errors == ""
    found = json.loads(seen.read_text())
    assert "page.js" in found["got"]
    assert found["niceness"] == os.nice(0)
    (url,) = found["given"]  # everybody's to read
    assert said.strip().startswith(f"{url}?token=")
    assert "token" not in url


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGINT])
def test_the_command_leaves_no_file_however_it_ends(numbers, tmp_path, ended_by):
    with start_explore(numbers, tmp_path, "true") as process:
        try:
            url = process.stdout.readline().strip()
            _, _, token = url.partition("/?token=")
            files = set((tmp_path / "tmp").rglob("*"))
            process.send_signal(ended_by)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert token
    assert not any(token in file.read_text(errors="ignore") for file in files if file.is_file())
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_browser_that_was_started_here_comes_once_without_the_token(shown):
    with Server(shown, "a <title>", opens=True) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert answer(server, "GET", "/", Host="example.org")[0] == 403
            assert answer(server, "GET", "/", Origin="http://example.org")[0] == 403
            status, response, _ = answer(server, "GET", "/")
            assert status == 200
            cookie = response.headers["Set-Cookie"].partition(";")[0]
            assert answer(server, "GET", "/page.js", Cookie=cookie)[0] == 200
            status, _, says = answer(server, "GET", "/")
            assert (status, b"the one that the terminal shows" in says) == (403, True)
            entered(server)  # by the token, for another browser
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("owner", ["another", "unknown"])
def test_a_browser_of_another_user_does_not_come_without_the_token(shown, monkeypatch, owner):
    if owner == "another":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:

        def unlisted(path, *arguments, original=open, **options):
            if str(path).startswith("/proc/net/tcp"):
                raise PermissionError(path)
            return original(path, *arguments, **options)

        monkeypatch.setattr("builtins.open", unlisted)
    with Server(shown, "a <title>", opens=True) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert answer(server, "GET", "/")[0] == 403
            monkeypatch.undo()
            assert answer(server, "GET", "/")[0] == 200  # which the other has not used up
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("family", "address"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "127.0.0.9"), (socket.AF_INET6, "::ffff:127.0.0.1")],
)
def test_the_kernel_says_whose_a_connection_is(family, address):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(family) as client:
        client.bind((address, 0))
        client.connect((f"{'::ffff:' * (family == socket.AF_INET6)}127.0.0.1", server.getsockname()[1]))
        accepted, peer = server.accept()
        with accepted:
            own = accepted.getsockname()
            assert serving.owner_of_connection(peer, own) == os.getuid()
            assert serving.owner_of_connection(("127.0.0.77", peer[1]), own) is None
            assert serving.owner_of_connection(peer, ("127.0.0.1", own[1] ^ 1)) is None
            client.close()
            wait_until(lambda: serving.owner_of_connection(peer, own) is None, "the end of the connection")


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_another_user_of_this_machine_does_not_come_without_the_token(shown):
    with Server(shown, "a <title>", opens=True) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            libc = ctypes.CDLL(None)
            libc.setfsuid(65534)  # of this thread alone: its sockets are that user's
            try:
                assert answer(server, "GET", "/")[0] == 403
            finally:
                libc.setfsuid(0)
            assert answer(server, "GET", "/")[0] == 200
        finally:
            server.shutdown()
            thread.join()


def test_the_command_refuses_what_is_no_cache(call, tmp_path):
    code, _, errors = call("explore", tmp_path / "nothing", "--no-browser")
    assert code == 2
    assert "nothing" in errors


# an older Python


@pytest.mark.parametrize(
    ("needed", "module", "name"), [("mosaic_widget", "explorer", "open"), ("duckdb", "query", "sql")]
)
def test_a_python_that_is_too_old_is_told(cache, call, monkeypatch, needed, module, name):
    for imported in (needed, f"arrowcache.explore.{module}"):
        monkeypatch.delitem(sys.modules, imported, raising=False)
    for own in (module, name):  # by the dict: asking for an attribute would import it
        monkeypatch.delitem(vars(explore), own, raising=False)
    monkeypatch.setitem(sys.modules, needed, None)
    with pytest.raises(ImportError, match=rf"needs {needed}.*: pip install"):
        getattr(explore, name)
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    says = f"needs {needed}, which is not installed: it needs Python 3.11 or newer"
    with pytest.raises(ImportError, match=says):
        getattr(explore, name)
    if name == "sql":
        with pytest.raises(ImportError, match=says):
            explore.gallery(cache, "image", by="id")
        code, _, errors = call("sql", cache.path, "from cache")
        assert (code, says in errors) == (2, True)
