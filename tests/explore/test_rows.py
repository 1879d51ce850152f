"""Rows by their ids: the same two columns wherever rows are, and rows, pictures and errors for ids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
from helpers import make_cache, publish, sample, seqs
from markup import seen

import arrowcache as ac
from arrowcache import explore
from arrowcache.errors import MissingSegmentsError

pytest.importorskip("pandas", reason="the extra 'explore' is not installed")

IDS = ["_seq", "_row"]
with_polars = pytest.mark.skipif(not find_spec("polars"), reason="polars is not installed")


@pytest.fixture
def cache(tmp_path) -> Iterator[ac.Cache]:
    """Row i is row i % 16 of segment i // 16."""
    with make_cache(tmp_path / "cache") as cache:
        publish(cache, segments=4)
        yield cache


@pytest.fixture
def rolled(tmp_path) -> Iterator[ac.Cache]:
    """A cache whose first segments were evicted."""
    with make_cache(tmp_path / "rolled", capacity="256KiB") as cache:
        publish(cache, segments=20)
        assert seqs(cache)[0] > 1
        yield cache


def same(frame) -> bool:
    return frame["id"].tolist() == (16 * frame["_seq"] + frame["_row"]).tolist() and len(frame) > 0


@pytest.mark.parametrize(
    "look",
    [
        lambda cache: explore.head(cache, 40),
        lambda cache: explore.sample(cache, 40),
        explore.to_pandas,
        pytest.param(lambda cache: explore.to_polars(cache).to_pandas(), marks=with_polars),
        lambda cache: explore.sql(cache, "select * from cache order by image[1][1] desc"),
        lambda cache: explore.rows(cache, ["3:2", "0:1"]),
    ],
)
def test_a_frame_begins_with_the_id_of_each_row(cache, look):
    frame = look(cache)
    assert list(frame.columns) == [*IDS, "id", "image"]
    assert frame.dtypes[IDS].tolist() == [np.dtype(np.int64)] * 2
    assert same(frame)


@pytest.mark.parametrize("look", [explore.to_pandas, pytest.param(explore.to_polars, marks=with_polars)])
def test_ids_are_columns_that_are_chosen_like_others(cache, look):
    assert list(look(cache, ["id"]).columns) == ["id"]
    assert list(look(cache, ["_row", "id", "_seq"], 2).columns) == ["_row", "id", "_seq"]
    assert list(look(cache, iter(["_seq"]), 20)["_seq"]) == [0] * 16 + [1] * 4
    with pytest.raises(ValueError, match="unknown column '_age_seconds'"):
        look(cache, ["_seq", "_age_seconds"])


def test_rows_come_in_the_order_asked_for_and_as_often(cache):
    frame = explore.rows(cache, ["3:15", ac.RowId(0, 0), (3, 15)])
    assert frame["id"].tolist() == [63, 0, 63]
    assert list(frame.index) == [0, 1, 2]
    np.testing.assert_array_equal(frame["image"][1], sample(0)["image"])
    assert explore.rows(cache.path, "2:3", ["id"]).to_dict("list") == {"id": [35]}
    assert explore.rows(cache, []).shape == (0, 4)


def test_a_frame_of_polars_gives_ids(cache):
    pytest.importorskip("polars", reason="polars is not installed")
    assert explore.rows(cache, explore.to_polars(cache, IDS)[-3:])["id"].tolist() == [61, 62, 63]


def test_what_one_looks_at_gives_ids(cache):
    chosen = explore.sql(cache, "select id, _row, _seq from cache where id % 20 = 7")
    assert explore.rows(cache, chosen.tail(2))["id"].tolist() == [27, 47]
    described = explore.describe(cache, ["id", "image"])
    assert described.loc["id", ["min_row", "max_row"]].tolist() == ["0:0", "3:15"]
    assert explore.rows(cache, described["max_row"])["id"].tolist()[0] == 63
    with ac.Loader(cache, batch_size=8, with_ids=True) as loader:
        batch = next(iter(loader))
    assert explore.rows(cache, batch)["id"].tolist() == batch["id"].tolist()
    append_twice(cache, 5)
    repeated = explore.duplicates(cache)
    assert repeated.iloc[0].tolist() == [4, 0, 0, 5]
    assert explore.rows(cache, repeated[["first_seq", "first_row"]].to_numpy())["id"].tolist() == [5]
    assert same(explore.rows(cache, repeated).assign(_seq=0, _row=5))


def append_twice(cache: ac.Cache, number: int) -> None:
    with cache.writer() as writer:
        writer.append(**sample(number))


def test_a_row_that_was_evicted_says_so_with_what_is_known(rolled):
    oldest = seqs(rolled)[0]
    with pytest.raises(MissingSegmentsError) as raised:
        explore.rows(rolled, "1:3")
    text = str(raised.value)
    assert text.startswith(f"row 1:3 has left the cache: the oldest segment there now is number {oldest}, ")
    assert re.search(r"published \S+ \w+ ago; what came before it was evicted", text)
    some = [(oldest, 0), "1:3", "0:0", (oldest, 0)]
    with pytest.raises(MissingSegmentsError) as raised:
        explore.rows(rolled, some)
    text = str(raised.value)
    assert "2 of 4 rows left the cache, such as 1:3 (ids[1])" in text
    assert "missing='skip' for the 2 rows still there" in text
    assert "\n" not in text
    frame = explore.rows(rolled, some, missing="skip")
    assert frame[IDS].to_numpy().tolist() == [[oldest, 0]] * 2
    assert same(frame)


def test_a_row_whose_segment_was_removed_says_so(cache):
    for path in (cache.path / "segments").glob("*1-16-*"):
        path.unlink()
    with pytest.raises(MissingSegmentsError, match="number 1 was removed since"):
        explore.rows(cache, "1:3")
    for path in (cache.path / "segments").iterdir():
        path.unlink()
    with pytest.raises(MissingSegmentsError, match="no segment is there now"):
        explore.rows(cache, "1:3")


@pytest.mark.parametrize(
    ("ask", "error", "says"),
    [
        (lambda cache: explore.rows(cache, "3:16"), IndexError, "3:16 (ids[0]) never was in the cache: its"),
        (lambda cache: explore.rows(cache, ["3:1", "4:0"], missing="skip"), IndexError, "next one gets 4"),
        (lambda cache: explore.rows(cache, "3"), ValueError, "'3' is no row id"),
        (lambda cache: explore.rows(cache, "3:1", missing="no"), ValueError, "missing='no'"),
        (lambda cache: explore.rows(cache, "3:1", ["imag"]), ValueError, "did you mean 'image'?"),
        (lambda cache: explore.rows(cache, explore.to_pandas(cache, ["id"])), ValueError, "no column _seq"),
        (lambda cache: explore.gallery(cache, "image", rows="3:1", by="id"), ValueError, "rows="),
        (lambda cache: explore.gallery(cache, "image", rows=[]), ValueError, "shows 1 to 1,000"),
        (lambda cache: explore.gallery(cache, "image", rows=["3:1"] * 1001), ValueError, "names 1,001 rows"),
        (lambda cache: explore.gallery(cache, "image", rows=["4:1"]), IndexError, "never was"),
    ],
)
def test_wrong_ids_say_what_is_wrong(cache, ask, error, says):
    with pytest.raises(error) as raised:
        ask(cache)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_gallery_shows_the_rows_asked_for_in_their_order(cache):
    best = explore.sql(cache, "select _seq, _row from cache order by t_max(image) desc limit 30")
    made = explore.gallery(cache, "image", rows=best)
    shown = [tile.caption for tile in made.groups[0].tiles]
    assert shown == [f"{seq}:{row}" for seq, row in best.to_numpy()]
    assert shown[0] == "3:15"
    assert "30 rows" in seen(made._repr_html_()).text
    assert explore.rows(cache, shown[:2])["id"].tolist() == [63, 62]


def test_a_gallery_counts_the_rows_that_left(rolled):
    newest = ac.RowId(seqs(rolled)[-1], 2)
    made = explore.gallery(rolled, "image", rows=["0:0", newest, "1:1"])
    assert [tile.caption for tile in made.groups[0].tiles] == [str(newest)]
    assert "1 row; 2 rows left the cache" in seen(made._repr_html_()).text
    with pytest.raises(MissingSegmentsError, match="the oldest segment there now"):
        explore.gallery(rolled, "image", rows=["0:0"])
