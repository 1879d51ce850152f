"""Pieces of HTML."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markup import seen

from arrowcache import html
from arrowcache.text import printable

EVIL = "</td><script>alert('x')</script>\"&\n"
PIECES = [
    lambda text: html.element("b", text),
    lambda text: html.element("b", title=text, data_x=text),
    lambda text: html.empty_element("img", alt=text),
    lambda text: html.card(text, text, text),
    lambda text: html.note(text),
    lambda text: html.table([text], [[text]], [text]),
    lambda text: html.facts([(text, text)]),
    lambda text: html.bar([(text, 1.0, text, "red")], 2.0),
    lambda text: html.legend([(text, "red")]),
    lambda text: html.page(text, html.escape(text)),
]


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize(
    "text", [EVIL, "\udcff", "\x00\x1b[31m", "\u202eabc", "<b>", "'\"><img src=x onerror=y>"]
)
def test_any_text_shows_as_itself_and_is_no_markup(piece, text):
    shown, plain = seen(piece(text)), seen(piece("plain"))
    assert shown.tags == plain.tags
    assert [name for name, _ in shown.attributes] == [name for name, _ in plain.attributes]


@given(st.text())
def test_a_browser_reads_what_was_written_with_escapes_for_what_cannot_be_seen(text):
    assert seen(html.element("b", text)).text.strip() == printable(text).strip()
    assert html.element("b", title=text).isprintable()


def test_markup_is_not_escaped_twice():
    inner = html.element("i", "a & b")
    assert html.element("b", inner, " <") == "<b><i>a &amp; b</i> &lt;</b>"
    assert html.join([inner, "<"], between="<") == "<i>a &amp; b</i>&lt;&lt;"


def test_an_attribute_of_none_is_left_out():
    assert html.element("a", "x", title=None, stroke_width=2) == '<a stroke-width="2">x</a>'


def test_a_table_has_a_cell_for_each_value_and_aligns_those_named():
    shown = seen(html.table(["name", "bytes"], [["a", 1], ["b", 2]], right=["bytes"]))
    assert (shown.tags.count("th"), shown.tags.count("td")) == (2, 4)
    assert [style.startswith("text-align: right") for style in shown.values("style")[1:]] == [False, True] * 3


def test_the_parts_of_a_bar_are_as_long_as_their_share():
    shown = seen(html.bar([("a", 1, "1 B", "red"), ("none", 0, "0 B", "blue"), ("b", 2, "2 B", "green")], 4))
    widths = [style.split(";")[0] for style in shown.values("style") if style.startswith("width: ")]
    assert widths == ["width: 25.000%", "width: 50.000%"]
    assert "a 1 B" in shown.text
    assert "none" not in shown.text


def test_a_bar_never_is_longer_than_it_may_nor_divides_by_nothing():
    shown = seen(html.bar([("a", 3, "", "red"), ("b", 3, "", "blue")], 2))
    assert sum("width: 50.000%" in style for style in shown.values("style")) == 2
    assert "width" not in seen(html.bar([("a", 0, "", "red")], 0)).text


def test_a_page_is_a_document_of_its_own():
    page = html.page("a title", html.note("hello"))
    assert page.startswith("<!DOCTYPE html>")
    assert 'charset="utf-8"' in page
    assert "hello" in seen(page).text
