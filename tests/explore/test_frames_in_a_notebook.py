"""DataFrames of a cache as a notebook shows them: the HTML of a frame, read as a browser would."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import EVERY_TYPE
from markup import seen

import arrowcache as ac
from arrowcache import explore

pd = pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
Image = pytest.importorskip("PIL.Image", reason="the extra 'explore' is not installed")

SCHEMA = ac.Schema(
    {
        "id": ac.Tensor("int64"),
        "signal": ac.Tensor("float32", (50,)),
        "map": ac.Tensor("float32", (8, 9)),
        "image": ac.Tensor("uint8", (3, 6, 7)),
        "volume": ac.Tensor("float32", (5, 6, 7)),
        "events": ac.Ragged("float32"),
        "boxes": ac.Ragged("float32", (4,)),
        "halves": ac.Tensor("bfloat16", (9,)),
        "file": ac.Binary(),
        "data": ac.Binary(),
        "text": ac.String(),
        "blank": ac.Tensor("float32", (4, 4)),
        "nothing": ac.Ragged("int8"),
    }
)
ROWS = 3
LOOKS = (explore.head, explore.sample, explore.to_pandas)


def row(number: int) -> dict[str, object]:
    rng = np.random.default_rng(number)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (10, 11, 3), np.uint8)).save(file, "PNG")
    numbers = {
        name: rng.standard_normal(SCHEMA[name].shape, np.float32) for name in ("signal", "map", "volume")
    }
    return numbers | {
        "id": number,
        "image": rng.integers(0, 255, (3, 6, 7), np.uint8),
        "events": rng.standard_normal(5 + number, np.float32),
        "boxes": rng.standard_normal((3, 4), np.float32),
        "halves": np.arange(16000, 16009).astype(np.uint16),
        "file": file.getvalue(),
        "data": bytes(3000),
        "text": "<b>" * 2000,
        "blank": np.full((4, 4), np.nan, np.float32),
        "nothing": np.zeros(0, np.int8),
    }


@pytest.fixture
def cache(tmp_path) -> Iterator[ac.Cache]:
    with ac.Cache.create(tmp_path / "cache", SCHEMA, capacity="4MiB", segment_bytes="256KiB") as cache:
        with cache.writer() as writer:
            for number in range(ROWS):
                writer.append(row(number))
        yield cache


def cells(frame, column: str) -> list[str]:
    """The HTML of each cell of a column."""
    place = list(frame.columns).index(column) + 1
    rows = re.findall(r"<tr>(.*?)</tr>", frame._repr_html_().partition("<tbody>")[2], re.DOTALL)
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row, re.DOTALL)[place] for row in rows]


def image_in(cell: str):
    (source,) = seen(cell).values("src")
    return Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))


@pytest.mark.parametrize("look", LOOKS)
def test_each_kind_of_value_is_a_picture_of_its_own_kind(cache, look):
    frame = look(cache)
    whole = seen(frame._repr_html_())
    assert whole.tags.count("tr") == 1 + ROWS
    assert whole.tags.count("img") == 8 * ROWS, "signal, events, halves, map, image, volume, boxes, file"
    for name in ("signal", "events", "halves"):
        assert [image_in(cell).size for cell in cells(frame, name)] == [(192, 58)] * ROWS, name
    for name, size in (("map", (9, 8)), ("image", (7, 6)), ("boxes", (4, 3)), ("file", (11, 10))):
        assert [image_in(cell).size for cell in cells(frame, name)] == [size] * ROWS, name
    for cell in cells(frame, "volume"):
        width, height = image_in(cell).size
        assert width > 2 * height, "three slices, side by side"
    assert cells(frame, "id") == [str(number) for number in frame["id"]]


def test_an_image_in_a_frame_has_the_pixels_of_its_row(cache):
    frame = explore.sample(cache, seed=1)
    for number, cell in zip(frame["id"], cells(frame, "image"), strict=True):
        pixels = np.asarray(image_in(cell))
        np.testing.assert_array_equal(pixels, np.moveaxis(row(number)["image"], 0, 2))


def test_what_cannot_be_seen_says_so(cache):
    frame = explore.head(cache, 1)
    texts = {name: seen(cells(frame, name)[0]).text.strip() for name in ("blank", "nothing", "data", "text")}
    assert texts == {
        "blank": "no finite number",
        "nothing": "empty int8 (0,)",
        "data": "2.9 KiB of bytes",
        "text": ("<b>" * 20)[:59] + "…",
    }


def test_a_frame_of_every_type_is_whole_and_small(varied):
    markup = explore.to_pandas(varied)._repr_html_()
    drawn = seen(markup)
    assert drawn.tags.count("td") == len(["_seq", "_row", *EVERY_TYPE]) * len(
        explore.to_pandas(varied, ["id"])
    )
    assert "cannot be drawn" not in markup


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "None"),
        (np.nan, "NaN"),
        ("a <b> word", "a <b> word"),
        ({"a": [1] * 500}, "cannot be drawn: field 'value': expected numbers, got dict"),
        (np.array([None, "a"], object), "cannot be drawn: "),
        (object(), "cannot be drawn: field 'value': expected numbers, got object"),
    ],
)
def test_what_a_user_puts_into_a_frame_and_nobody_can_draw_is_one_sentence(cache, value, says):
    frame = explore.head(cache)
    frame["map"] = pd.Series([value] * ROWS, dtype=object)
    for cell in cells(frame, "map"):
        text = seen(cell).text.strip()
        assert text.startswith(says)
        assert len(text) <= 200
        assert "\n" not in text
    assert seen(frame._repr_html_()).tags.count("img") == 7 * ROWS, "the others are drawn all the same"


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame.rename(columns={"map": "a map"}),
        lambda frame: frame.sort_values("id", ascending=False),
        lambda frame: frame.set_index("id"),
        lambda frame: frame.reset_index(),
        lambda frame: frame.reindex(columns=["map", "no such column", *SCHEMA]).drop(columns="id"),
        lambda frame: frame.set_axis(pd.MultiIndex.from_product([["of"], frame.columns]), axis=1),
        lambda frame: frame.groupby("id").first(),
        lambda frame: pd.concat([frame.iloc[:1], frame.iloc[1:]]),
        lambda frame: frame.T,
    ],
)
def test_a_frame_that_was_changed_still_shows_its_pictures(cache, change):
    changed = seen(change(explore.head(cache))._repr_html_())
    assert changed.tags.count("img") >= 8 * ROWS
    assert "cannot be drawn" not in changed.text


def test_a_picture_in_a_frame_keeps_no_segment(cache):
    frame = explore.head(cache)
    assert cells(frame, "map")
    assert cache.stats().leased_bytes == 0
