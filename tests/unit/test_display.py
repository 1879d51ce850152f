"""How values show themselves: text in columns, pieces of HTML, and cards in both forms."""

from __future__ import annotations

import unicodedata
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markup import seen

from arrowcache import display
from arrowcache.display import Bar, Card, Cell, Curves, Facts, Table, Timeline, bars, printable, shorten

EVIL = "</td><script>alert('x')</script>\"&\n"


def cell(seq, *samplers, rows=16, age=1.0):
    """A segment, or neighbours, of these samplers, each of so many rows and 1 KiB."""
    last = seq + len(samplers) - 1
    rows_of = Counter(dict.fromkeys(samplers, rows))
    return Cell((seq, age), (last, age), len(samplers), 1024, rows_of, f"{samplers[0]}.{seq}")


PIECES = [
    lambda text: display.element("b", text),
    lambda text: display.element("b", title=text, data_x=text),
    lambda text: display.empty_element("img", alt=text),
    lambda text: display.note(text),
    lambda text: display.page(text, display.escape(text)),
    lambda text: Card(text, text, [text]).as_html(),
    lambda text: Table([text], [[text]], text, [text]).as_html(),
    lambda text: Facts([(text, text)]).as_html(),
    lambda text: Table([text], [[text]]).as_html(),
    lambda text: Bar([(text, 1.0)], str, 2.0, text).as_html(),
    lambda text: Curves([(text, text, [0, 1])]).as_html(),
    lambda text: Timeline([cell(0, text), cell(1, "b")]).as_html(),
]


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize(
    "text", [EVIL, "\udcff", "\x00\x1b[31m", "\u202eabc", "<b>", "'\"><img src=x onerror=y>"]
)
def test_any_text_shows_as_itself_and_is_no_markup(piece, text):
    shown, plain = seen(piece(text)), seen(piece("plain"))
    assert shown.tags == plain.tags
    assert [name for name, _ in shown.attributes] == [name for name, _ in plain.attributes]


@pytest.mark.parametrize(
    "part",
    [
        EVIL,
        Facts([(EVIL, EVIL)]),
        Table([EVIL], [[EVIL]], EVIL),
        Bar([(EVIL, 1)], str),
        Timeline([cell(0, EVIL)]),
    ],
)
def test_any_text_moves_nothing_in_a_terminal(part):
    lines = Card("title", EVIL, [part]).as_text().splitlines()
    assert lines[0] == rf"title {EVIL[:-1]}\n"
    assert all(map(str.isprintable, lines))


@given(st.text())
def test_a_browser_reads_what_was_written_with_escapes_for_what_cannot_be_seen(text):
    assert seen(display.element("b", text)).text.strip() == printable(text).strip()
    assert display.element("b", title=text).isprintable()


def test_markup_is_not_escaped_twice():
    inner = display.element("i", "a & b")
    assert display.element("b", inner, " <") == "<b><i>a &amp; b</i> &lt;</b>"
    assert inner in Card("", "", [inner]).as_html()


def test_an_attribute_of_none_is_left_out():
    assert display.element("a", "x", title=None, stroke_width=2) == '<a stroke-width="2">x</a>'


def test_a_page_is_a_document_of_its_own():
    page = display.page("a title", display.note("hello"))
    assert page.startswith("<!DOCTYPE html>")
    assert 'charset="utf-8"' in page
    assert "hello" in seen(page).text


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


# a card and its parts


def test_a_card_says_what_it_is_where_it_is_one_of_several():
    assert Card("Cache", "/here", ["a line"]).as_text() == "Cache /here\na line"
    assert Card("CacheStats", "", ["a line"]).as_text() == "a line"
    assert "CacheStats" in seen(Card("CacheStats", "").as_html()).text


def test_facts_are_aligned():
    assert Facts([("a", 1), ("longer", "b")]).as_text() == "a       1\nlonger  b"


def test_columns_of_a_table_are_aligned():
    table = Table(["name", "bytes"], [["a", "1"], ["longer", "1000"]], "a total", ["bytes"])
    assert table.as_text().splitlines() == [
        "name    bytes",
        "a           1",
        "longer   1000",
        "a total",
    ]
    shown = seen(table.as_html())
    assert (shown.tags.count("th"), shown.tags.count("td")) == (2, 4)
    aligned = [style.partition(":")[2][:6] for style in shown.values("style") if "text-align" in style]
    assert aligned == [" left;", " right"] * 3
    assert "a total" in shown.text


def test_wide_and_combining_characters_do_not_move_the_next_column():
    lines = Facts([("name", "x"), ("漢字", "1"), ("e\u0301", "2"), ("a\nb", "3")]).as_text().splitlines()
    columns = [
        sum(2 if unicodedata.east_asian_width(c) == "W" else not unicodedata.combining(c) for c in line)
        for line in lines
    ]
    assert columns == [7, 7, 7, 7]


def widths(bar: Bar) -> list[str]:
    styles = seen(bar.as_html()).values("style")
    return [style.split(";")[0] for style in styles if style.startswith("width: ")]


def test_the_parts_of_a_bar_are_as_long_as_their_share():
    bar = Bar([("a", 1), ("none", 0), ("b", 2)], str, 4)
    assert widths(bar) == ["width: 25.000%", "width: 50.000%"]
    assert seen(bar.as_html()).text.split() == ["a", "1", "b", "2"]
    assert bar.as_text() == f"[{'█' * 10}{'▒' * 20}{' ' * 10}] █ a 1, ▒ b 2"


def test_the_rest_of_a_bar_has_a_name_where_it_is_asked_for():
    assert Bar([("a", 1)], str, 4, "free").as_text() == f"[{'█' * 10}{' ' * 30}] █ a 1, free 3"
    assert Bar([("a", 4)], str, 4, "free").as_text() == f"[{'█' * 40}] █ a 4"


def test_a_bar_never_is_longer_than_it_may_nor_divides_by_nothing():
    assert widths(Bar([("a", 3), ("b", 3)], str, 2)) == ["width: 50.000%"] * 2
    assert Bar([("a", 0)], str).as_text() == f"[{' ' * 40}] "
    assert widths(Bar([("a", 0)], str)) == []


@given(st.lists(st.floats(0, 100), max_size=5))
def test_a_bar_of_a_terminal_ends_where_the_amounts_do(amounts):
    bar = Bar([("x", amount) for amount in amounts], str, 500.0)
    drawn = bar.as_text()[1 : bar.as_text().index("]")]
    assert len(drawn) == 40
    assert len(drawn.rstrip()) == round(40 * sum(amount / 500.0 for amount in amounts))


# a timeline


def test_bars_show_the_highest_in_full_and_whatever_is_there():
    assert bars([0, 1, 4, 8]) == "▁▂▅█"
    assert bars([0, 0.3, 1e-300]) == "▁█▂"
    assert bars([0, 0]) == "▁▁"
    assert bars([]) == ""


def test_curves_are_bars_in_a_terminal_and_the_newest_amount():
    curves = Curves([("in", "8 B/s", [0, 1, 4, 8]), ("out", "0 B/s", [0, 0]), ("more", "?", [])])
    assert curves.as_text().splitlines() == ["in    ▁▂▅█  8 B/s", "out   ▁▁    0 B/s", "more        ?"]
    assert len(Curves([("", "", range(1000))]).as_text().strip()) == 40


@pytest.mark.parametrize(
    ("amounts", "points"), [([0, 2, 4], "0,100.0 1,50.0 2,0.0"), ([0.0], "0,100.0"), ([], "")]
)
def test_a_curve_of_a_notebook_is_as_high_as_its_amounts(amounts, points):
    drawn = Curves([("in", "4 B/s", amounts)]).as_html()
    assert f'<polyline points="{points}"' in drawn
    assert "in <b>4 B/s</b>" in drawn


@pytest.mark.parametrize("unit", [1.0, 0.1, 1 / 3, 7.9e-300, 6.1e300])
def test_the_largest_amount_of_a_curve_touches_its_top_exactly(unit):
    for factor in range(1, 300):
        drawn = Curves([("in", "", [0.0, unit * factor])]).as_html()
        assert '<polyline points="0,100.0 1,0.0"' in drawn


def test_of_many_samplers_those_without_a_color_are_one():
    timeline = Timeline([cell(n, *(f"p{p}.0" for p in range(9 - n))) for n in range(9)])
    assert timeline.samplers()[-2:] == [("p5.0", "9 %"), ("3 others", "13 %")]
    assert "3 others 13 %" in seen(timeline.as_html()).text
    assert "3 others 13 %" in timeline.as_text()


def test_names_that_begin_alike_and_are_shortened_do_not_hide_each_other():
    timeline = Timeline([cell(0, "x" * 50 + "a"), cell(1, "x" * 50 + "b")])
    assert len(timeline.samplers()) == 2
    assert seen(timeline.as_html()).tags.count("rect") == 2


def test_the_text_gives_numbers_and_ages_and_says_who_published_what():
    timeline = Timeline([cell(0, "default.0", age=3.0), cell(1, "default.0", rows=32), cell(2, "writer")])
    assert timeline.as_text() == ("seq 0 to 2, published 3.0 s to 1.0 s ago\nby default.0 75 %, writer 25 %")
    assert Timeline([cell(0, "writer")]).span() == "seq 0, published 1.0 s ago"
    ahead = cell(0, "writer", age=-99.0)
    assert Timeline([ahead]).span() == "seq 0, published 0 s ago", "a clock that was set back"


def test_a_cell_is_as_high_as_its_rows_and_says_its_task():
    of_a_writer = cell(1, "writer", rows=4)._replace(task="")
    shown = seen(Timeline([cell(0, "default.0"), of_a_writer]).as_html())
    assert [float(height) for height in shown.values("height")] == [40.0, 10.0]
    assert "segment 0: 16 rows, 1.0 KiB, 1.0 s old, task default.0.0" in shown.text
    assert "task of a writer" in shown.text
