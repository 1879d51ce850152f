"""Tables and bars for terminals."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrowcache.text import bar, printable, shorten, stacked, table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain ü 漢", "plain ü 漢"),
        ("a\nb\tc", r"a\nb\tc"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\udcff", r"\udcff"),
        ("\u202eabc", r"\u202eabc"),
        (7, "7"),
    ],
)
def test_what_would_move_the_rest_is_escaped(value, text):
    assert printable(value) == text


@given(st.text(), st.integers(1, 20))
def test_a_shortened_text_says_so_and_is_short(text, most):
    short = shorten(text, most)
    assert len(short) <= most
    assert short == text or (short[-1] == "…" and text.startswith(short[:-1]))


def test_columns_of_a_table_are_aligned():
    assert table(["name", "bytes"], [["a", "1"], ["longer", "1000"]], right=["bytes"]).splitlines() == [
        "name    bytes",
        "a           1",
        "longer   1000",
    ]


def test_wide_and_combining_characters_do_not_move_the_next_column():
    lines = table(["name", "x"], [["漢字", "1"], ["e\u0301", "2"], ["a\nb", "3"]]).splitlines()
    columns = [
        sum(2 if unicodedata.east_asian_width(c) == "W" else not unicodedata.combining(c) for c in line)
        for line in lines
    ]
    assert columns == [7, 7, 7, 7]


@given(st.floats(-1, 2), st.integers(1, 50))
def test_a_bar_is_as_wide_as_asked_whatever_its_share(share, width):
    drawn = bar(share, width)
    assert len(drawn) == width
    assert drawn.count("█") == min(max(round(8 * width * share), 0), 8 * width) // 8


def test_a_bar_shows_eighths():
    assert bar(0.5, 4) == "██  "
    assert bar(0.5 + 1 / 32, 4) == "██▏ "


@given(st.lists(st.floats(0, 100), max_size=5), st.integers(1, 60))
def test_a_stacked_bar_is_as_wide_as_asked_and_ends_where_the_amounts_do(amounts, width):
    whole = 500.0
    drawn = stacked([(amount, "abcde"[at]) for at, amount in enumerate(amounts)], whole, width)
    assert len(drawn) == width
    assert len(drawn.rstrip()) == round(width * sum(amounts) / whole)
