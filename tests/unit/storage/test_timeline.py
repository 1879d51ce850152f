"""Segments side by side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markup import seen

from arrowcache.storage import timeline
from arrowcache.storage.layout import SegmentInfo

NOW = 1_000_000.0


def segments(count, task="default.0", rows=16):
    """One every second; the newest is one second old."""
    return [
        SegmentInfo(seq, rows, f"{task}.{seq}" if task else "", 1024, 4096, NOW - (count - seq))
        for seq in range(count)
    ]


@pytest.mark.parametrize(
    ("task", "sampler"),
    [
        ("", "writer"),
        ("default.0.17", "default.0"),
        ("a.b.c.3.17", "a.b.c.3"),
        ("mine", "mine"),
        ("tfrecord.0123456789abcdef.3.17", "tfrecord.01234567"),
        ("tfrecord.3.17", "tfrecord.3"),
        ("tfrecord.0123456789abcdef-0-16", "tfrecord"),
        ("parquet.0123456789abcdef-16-4e.fedcba9876543210-0-12", "parquet"),
    ],
)
def test_a_task_tells_the_sampler(task, sampler):
    assert timeline.sampler_of(task) == sampler


@pytest.mark.slow
@given(st.integers(0, 1000), st.integers(1, 120))
def test_cells_hold_every_segment_once_in_order_and_are_no_more_than_fit(count, most):
    listed = segments(count)
    cells = timeline.cells(listed, most)
    assert len(cells) == min(count, most)
    assert [seq for cell in cells for seq in range(cell.first.seq, cell.last.seq + 1)] == list(range(count))
    assert sum(cell.segments for cell in cells) == count
    assert sum(cell.rows for cell in cells) == 16 * count
    assert sum(cell.nbytes for cell in cells) == 1024 * count
    assert all(cell.segments - cells[0].segments in (-1, 0, 1) for cell in cells)


def test_rows_of_a_cell_are_told_by_sampler():
    listed = [*segments(3), *segments(2, task="", rows=5)]
    (cell,) = timeline.cells(listed, 1)
    assert cell.rows_of == {"default.0": 48, "writer": 10}


def test_of_many_samplers_those_without_a_color_are_one():
    listed = [segment for n in range(9) for segment in segments(9 - n, task=f"p{n}.0")]
    samplers = timeline.samplers_of(timeline.cells(listed))
    assert samplers == [*((f"p{n}.0", 16 * (9 - n)) for n in range(6)), ("3 others", 16 * (3 + 2 + 1))]
    shown = seen(timeline.as_html(listed, NOW))
    assert "3 others" in shown.text
    assert "·" in timeline.as_text(listed)


def test_the_text_says_who_published_what_and_where():
    assert timeline.as_text(segments(3)) == "by default.0"
    both = [*segments(3), *segments(1, task="")]
    assert timeline.as_text(both) == "by A default.0 (75 %), B writer (25 %)\nAAAB"


def test_the_span_gives_numbers_and_ages():
    assert timeline.span(segments(3), NOW) == "seq 0 to 2, published 3.0 s to 1.0 s ago"
    assert timeline.span(segments(1), NOW) == "seq 0, published 1.0 s ago"
    assert timeline.span(segments(1), NOW - 100) == "seq 0, published 0 s ago"  # a clock that was set back


def test_sixteen_thousand_segments_are_a_hundred_cells():
    shown = seen(timeline.as_html(segments(16_000), NOW))
    assert shown.tags.count("rect") == timeline.MOST_CELLS
    assert shown.tags.count("title") == timeline.MOST_CELLS
    assert "160 segments, 0 to 159: 2,560 rows, 160.0 KiB, 4.4 h old, by default.0 100 %" in shown.text


def test_a_cell_is_as_high_as_its_rows_and_says_its_task():
    shown = seen(timeline.as_html([*segments(1, rows=16), *segments(1, task="", rows=4)], NOW))
    assert [float(height) for height in shown.values("height")] == [40.0, 10.0]
    assert "segment 0: 16 rows, 1.0 KiB, 1.0 s old, task default.0.0" in shown.text
    assert "task of a writer" in shown.text


def test_no_segments_are_no_cells():
    assert seen(timeline.as_html([], NOW)).tags.count("rect") == 0
