"""Which segments leave, are left alone by a snapshot, or are merged: pure decisions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from arrowcache.storage.eviction import choose_parts, choose_victims, skip_for_headroom, superseded
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.settings import room_of_one

segment_lists = st.lists(st.integers(1, 100), max_size=30).map(
    lambda sizes: [SegmentInfo(seq, 1, "", size, size, 0.0) for seq, size in enumerate(sizes)]
)
leased_seqs = st.sets(st.integers(0, 29))


@given(segment_lists, leased_seqs, st.integers(-10, 2000))
def test_victims_are_the_oldest_up_to_the_first_leased_and_no_more_than_needed(segments, leased, excess):
    asked = []

    def is_leased(segment):
        asked.append(segment.seq)
        return segment.seq in leased

    victims = choose_victims(segments, is_leased, excess)
    assert victims == segments[: len(victims)], "strictly oldest first"
    assert not any(victim.seq in leased for victim in victims)
    freed = sum(victim.allocated_bytes for victim in victims)
    if freed < excess:
        assert len(victims) == len(segments) or segments[len(victims)].seq in leased, "everything possible"
    if victims:
        assert freed - victims[-1].allocated_bytes < excess, "the last one was needed"
    assert asked == sorted(asked)
    assert sum(seq in leased for seq in asked) <= 1, "nobody is asked beyond the first leased segment"


@given(segment_lists, st.integers(-500, 0))
def test_nothing_goes_when_nothing_is_needed(segments, excess):
    assert choose_victims(segments, lambda _: False, excess) == []


@given(segment_lists, st.integers(-1000, 4000), st.integers(0, 3000))
def test_a_snapshot_skips_as_few_of_the_oldest_as_make_the_headroom(segments, free, headroom):
    skipped = skip_for_headroom(segments, free, headroom)
    made = free + sum(segment.allocated_bytes for segment in segments[:skipped])
    if not segments:
        assert skipped == 0
        return
    assert 0 <= skipped < len(segments), "the newest is always read"
    if skipped < len(segments) - 1:
        assert made >= headroom
    if skipped:
        assert made - segments[skipped - 1].allocated_bytes < headroom, "the last skip was needed"


# merging


def info(seq, nbytes, task="", rows=1):
    return SegmentInfo(seq, rows, task, nbytes, nbytes, 0.0)


def test_small_segments_are_chosen_that_fill_one_or_are_eight():
    def chosen(*sizes, room=10**9, rows=10**6):
        segments = [info(seq, nbytes) for seq, nbytes in enumerate(sizes)]
        return [each.seq for each in choose_parts(segments, 1000, rows, room)]

    assert chosen(*[10] * 7) == []
    assert chosen(*[10] * 8) == [*range(8)]
    assert chosen(400, 400, 400) == [0, 1], "they fill one"
    assert chosen(400, 400) == [], "more may come"
    assert chosen(900, *[10] * 8) == [*range(1, 9)]
    assert chosen(*[10] * 5, 900, *[10] * 5) == [], "one after another, or their number would be many"
    assert chosen(*[10] * 8, 900, 10) == [*range(8)]
    assert chosen(*[10] * 20, rows=12) == [*range(12)]
    assert chosen(*[10] * 20, room=0) == []
    assert chosen(*[10] * 20, room=room_of_one(55)) == [*range(5)]


def test_what_was_merged_is_left_alone_until_its_parts_have_left():
    parts = [info(seq, 10) for seq in range(8)]
    merged = info(20, 100, "parts.0-7")
    younger = [info(seq, 10) for seq in range(21, 28)]
    assert superseded([*parts, merged, *younger]) == parts
    assert choose_parts([*parts, merged, *younger], 1000, 100, 10**9) == []
    assert choose_parts([merged, *younger], 1000, 100, 10**9) == [merged, *younger]
    assert superseded([*parts, info(20, 100, "default.0.7")]) == []
