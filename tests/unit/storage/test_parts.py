"""Parts: which small segments are merged, and which leave."""

from __future__ import annotations

from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.parts import choose_parts, parts_of, superseded, task_of
from arrowcache.storage.sizing import room_of_one


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


def test_the_name_tells_the_parts():
    parts = [info(seq, 10) for seq in (3, 4, 9)]
    assert parts_of(info(20, 30, task_of(parts))) == range(3, 10)
    assert not parts_of(info(20, 30))
    assert not parts_of(info(20, 30, "parts.x-3"))
