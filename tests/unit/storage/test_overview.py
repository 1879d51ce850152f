"""A cache at one moment: what is counted, rates, words."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markup import seen

from arrowcache.display import Bar, Card
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.overview import CacheStats, Looks, ingest_rate, overview, timeline

MIB = 1 << 20
NOW = 1_000_000.0
STATS = CacheStats(
    capacity_bytes=100 * MIB, allocated_bytes=50 * MIB, published_bytes=40 * MIB, incoming_bytes=6 * MIB,
    leased_bytes=10 * MIB, segments=10, rows=160, oldest_seq=7, next_seq=17, quarantined=0, waiting_writers=0,
    evicted_segments=7,
)  # fmt: skip


def segments(count, apart=1.0, newest=1.0):
    """Of 16 rows and 4 KiB, so many seconds apart; the newest is so many seconds old."""
    return [
        SegmentInfo(7 + i, 16, f"p.0.{i}", 1000, 4096, NOW - newest - apart * (count - 1 - i))
        for i in range(count)
    ]


@given(*[st.integers(0, 100)] * 4)
def test_the_parts_of_the_capacity_add_up(unleased, leased, incoming, other):
    published = unleased + leased
    stats = replace(
        STATS, capacity_bytes=400, published_bytes=published, leased_bytes=leased, incoming_bytes=incoming,
        allocated_bytes=published + incoming + other,
    )  # fmt: skip
    (bar,) = (part for part in stats.parts() if isinstance(part, Bar))
    assert [amount for _, amount in bar.parts] == [unleased, leased, incoming, other]
    assert (bar.whole, bar.rest) == (400, "free")


def test_the_ingest_rate_is_that_of_the_last_minute():
    rate = ingest_rate(segments(100), NOW)
    assert rate == (59 / 60, 16 * 59 / 60, 4096 * 59 / 60, "last minute")


def test_a_young_cache_begins_with_its_oldest_segment_which_does_not_count():
    assert ingest_rate(segments(11, newest=0.0), NOW) == (1.0, 16.0, 4096.0, "last 10 s")


def test_a_slow_cache_is_looked_at_for_longer():
    rate = ingest_rate(segments(100, apart=600.0, newest=300.0), NOW)
    assert rate is not None
    assert (rate.segments, rate.when) == (6 / 3600, "last hour")
    rate = ingest_rate(segments(100, apart=7200.0, newest=4000.0), NOW)
    assert rate is not None
    assert (rate.segments, rate.when) == (12 / 86400, "last day")


@pytest.mark.parametrize(
    "listed", [[], segments(1), segments(5, newest=1e6), segments(3, apart=0.0, newest=0.0)]
)
def test_too_few_segments_tell_no_rate(listed):
    assert ingest_rate(listed, NOW) is None


def test_a_clock_that_was_set_back_makes_no_rate_below_nothing():
    rate = ingest_rate(segments(5, newest=-100.0), NOW)
    assert rate is None or rate.segments >= 0


def test_the_first_look_tells_no_rate_and_the_next_one_does():
    looks = Looks()
    assert looks.add(100.0, 3) is None
    assert looks.add(100.5, 4) is None  # too soon after it
    assert looks.add(104.0, 11) == (4.0, 8)


def test_a_rate_is_of_the_time_since_the_look_before():
    looks = Looks()
    looks.add(100.0, 3)
    assert looks.add(104.0, 11) == (4.0, 8)
    assert looks.add(104.5, 12) == (4.5, 9), "one that follows at once is no other look"
    assert looks.add(105.0, 13) == (1.0, 2)
    assert looks.add(5000.0, 3000) == (4895.0, 2987)


@given(st.integers(1, 300))
def test_cells_hold_every_segment_once_in_order_and_are_no_more_than_fit(count):
    (shown,) = timeline(segments(count), NOW)
    assert len(shown.cells) == min(count, 100)
    ends = [(cell.first[0], cell.last[0]) for cell in shown.cells]
    assert [seq for first, last in ends for seq in range(first, last + 1)] == list(range(7, 7 + count))
    assert all(
        last - first + 1 == cell.segments for (first, last), cell in zip(ends, shown.cells, strict=True)
    )
    assert all(cell.segments - shown.cells[0].segments in (-1, 0, 1) for cell in shown.cells)


def test_no_segments_have_no_timeline():
    assert timeline([], NOW) == []


def test_sixteen_thousand_segments_are_a_hundred_cells():
    (shown,) = timeline(segments(16_000), NOW)
    picture = seen(shown.as_html())
    assert picture.tags.count("rect") == picture.tags.count("title") == 100
    assert "160 segments, 7 to 166: 2,560 rows, 156.2 KiB, 4.4 h old, by p.0 100 %" in picture.text


def card(listed=(), *, stats=STATS, evicted_before=None, seconds=30.0):
    """A cache as it shows itself, half a minute after another look."""
    looks = Looks()
    if evicted_before is not None:
        looks.add(time.monotonic() - seconds, evicted_before)
    return Card("Cache", "here", overview(stats, listed, looks, NOW))


def test_the_text_is_a_few_lines():
    text = card(segments(11, newest=0.0), evicted_before=1, seconds=3.0).as_text()
    assert text.splitlines() == [
        "Cache here",
        "10 segments, 160 rows, 50.0 MiB of 100.0 MiB (50 %), 256.0 KiB a row on the disk",
        (
            "[████████████▓▓▓▓▒▒░░                    ] █ published 30.0 MiB, ▓ leased 10.0 MiB, "
            "▒ incoming 6.0 MiB, ░ quarantine and bookkeeping 4.0 MiB, free 50.0 MiB"
        ),
        ("0 rows published, 0 rows served, what is here 0.0 times (at most 0); 0 rows evicted"),
        "seq 7 to 17, published 10 s to 0 s ago",
        "by p.0 100 %",
        "ingest    4.0 KiB/s, 16 rows/s, 1 segments/s (last 10 s)",
        "eviction  7 segments so far; about 8.0 MiB/s, 32 rows/s, 2 segments/s (last 3.0 s)",
    ]


def test_a_notebook_shows_the_same_words():
    shown_card = card(segments(11, newest=0.0), evicted_before=1)
    shown = seen(shown_card.as_html())
    for line in shown_card.as_text().splitlines()[3:]:
        for word in line.removeprefix("by ").split("  "):
            assert word.strip() in shown.text
    assert shown.tags.count("rect") == 11
    assert "leased 10.0 MiB" in shown.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stats": replace(STATS, evicted_segments=0)}, "eviction  0 segments so far"),
        ({}, "eviction  7 segments so far; the next look tells the rate"),
        ({"evicted_before": 7, "seconds": 5.0}, "7 segments so far; none in the last 5.0 s"),
        ({"listed": []}, "ingest    nothing to tell it by"),
        ({"listed": segments(1, newest=90.0)}, "ingest    no rate yet, the newest segment came 1.5 min ago"),
        ({"stats": replace(STATS, evicted_rows=8, unread_rows=2)}, "8 rows evicted, 25 % of them unread"),
        ({"stats": replace(STATS, quarantined=2)}, "on the disk, 2 segments in quarantine"),
        ({"stats": replace(STATS, waiting_writers=1)}, "on the disk, 1 writer waiting for room"),
        ({"stats": replace(STATS, waiting_writers=2, paced="why")}, "on the disk, 2 writers waiting as why"),
    ],
)  # fmt: skip
def test_what_is_not_known_or_not_well_is_said(changes, words):
    assert words in card(**changes).as_text()


def test_the_share_of_evicted_rows_that_nobody_read():
    assert replace(STATS, evicted_rows=8, unread_rows=2).unread_share == 0.25
    assert STATS.unread_share == 0.0


def test_statistics_print_their_bar():
    assert str(STATS).splitlines()[1].startswith("[████████████▓▓▓▓▒▒░░ ")
    assert "\n" not in repr(STATS)
    assert "free 50.0 MiB" in seen(STATS._repr_html_()).text


def test_a_number_that_leapt_is_no_count_of_evictions():
    """After a restart of the machine a cache seemed to have lost a million segments."""
    leapt = replace(STATS, oldest_seq=1_000_007, next_seq=1_000_017)
    assert "7 segments so far" in card().as_text()
    assert "7 segments so far; none in the last" in card(stats=leapt, evicted_before=7).as_text()
    emptied = replace(leapt, oldest_seq=None, segments=0, rows=0)
    assert "7 segments so far" in card(stats=emptied).as_text()
