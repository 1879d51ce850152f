"""A gather: columns of any width of some rows, in one or two copies of the engine's; and however it ends."""

from __future__ import annotations

import ctypes
import itertools
import weakref

import numpy as np
import pytest
from helpers import DEADLINE_SECONDS, limit
from hypothesis import given
from hypothesis import strategies as st
from plain_rows import threads

from arrowcache import Binary, Ragged, Schema, String, Tensor
from arrowcache.errors import CorruptSegmentError
from arrowcache.native import engine
from arrowcache.native.engine import SegmentRows, copy_rows, read_rows
from arrowcache.reading.columns import Columns
from arrowcache.reading.gather import PendingRead, PendingValues, ReadMode, RowOutOfRangeError, lengths
from arrowcache.reading.slots import GivenArrays

TEXTS = ["", "a", "été", "longer than the others, by far", "ß", "five", "six" * 50, "7"]
WIDTH = 3
BIG_ROWS, BIG_WIDTH = 64, 64 << 10


class Segment:
    """One segment in memory: a column of fixed width, then texts; or another variable-length column."""

    def __init__(self, *, is_cold=False, values=None, item_bytes=1, width=WIDTH, rows=None):
        self.values = [text.encode() for text in TEXTS] if values is None else values
        self.rows = len(self.values) if rows is None else rows
        self.fixed = np.random.default_rng(0).integers(0, 256, (self.rows, width), np.uint8)
        ends = np.cumsum([0, *(len(value) // item_bytes for value in self.values)]).astype(np.int32)
        parts = [self.fixed.tobytes(), ends.tobytes(), b"".join(self.values)]
        self.file = np.frombuffer(b"".join(parts), np.uint8).copy()
        places = itertools.accumulate(map(len, parts[:2]), initial=0)
        self.layout = np.array(list(places), np.int64)
        self.ends = self.file[self.layout[1] : self.layout[2]].view(np.uint8)
        self.is_cold = is_cold
        self.table = SegmentRows(np.array([0, self.rows]))
        told = [self.file.ctypes.data, self.file.nbytes, self.layout.ctypes.data, 0, 0, 0, 0]
        self.table.put([0], [told])

    def set_offset(self, number, value):
        self.ends[4 * number : 4 * number + 4] = np.array([value], np.int32).view(np.uint8)


def fixed_of(segment, ids, width=WIDTH):
    """A copy of the fixed column, and where it goes."""
    out = np.zeros((len(ids), width), np.uint8)
    begin = read_rows if segment.is_cold else copy_rows
    return begin(segment.table, np.asarray(ids), [(0, width, out.ctypes.data)], (segment, out)), out


def texts_of(segment, ids, kind=String(), name="text"):  # noqa: B008
    column = Columns.of(Schema({"fixed": Tensor("uint8", (WIDTH,)), name: kind}), [name])[name]
    found = engine.find_values(
        segment.table, np.asarray(ids), 1, column.element_bytes, segment, on_disk=segment.is_cold
    )
    return PendingValues(found, column, is_cold=segment.is_cold)


class Reader:
    """A read of no snapshot."""

    drops = False

    def __init__(self, then=lambda: None):
        self.read_mode, self.end = ReadMode(), then

    def doubt(self, row):
        return str(row)


def gather_of(*parts, then=lambda: None):
    columns = Columns(part.column for part in parts if isinstance(part, PendingValues))
    gather = PendingRead(Reader(then), np.arange(8), GivenArrays({}), columns)
    for part in parts:
        gather.add(part)
    return gather


@pytest.fixture
def no_threads():
    """Nothing is copied but by who takes it."""
    with threads(0):
        yield


@pytest.fixture(params=[True, False], ids=["cold", "warm"])
def segment(request):
    return Segment(is_cold=request.param)


@given(st.lists(st.integers(0, len(TEXTS) - 1), max_size=40), st.booleans())
def test_all_columns_of_any_rows_are_gathered(ids, is_cold):
    segment, ids = Segment(is_cold=is_cold), np.array(ids, np.int64)
    copy, out = fixed_of(segment, ids)
    gather = gather_of(copy, texts_of(segment, ids))
    assert gather.result() == {"text": [TEXTS[number] for number in ids]}
    assert np.array_equal(out, segment.fixed[ids])
    assert gather.missed == 0


@pytest.mark.parametrize("is_cold", [False, True])
def test_each_type_of_variable_length_is_shown_as_its_own(is_cold):
    values = [bytes(range(8 * count)) for count in (2, 0, 5, 1)]
    segment, ids = Segment(is_cold=is_cold, values=values, item_bytes=4), [3, 0, 1, 2, 2]
    ragged, binary = Ragged("float32", (2,)), Segment(is_cold=is_cold, values=values)
    gather = gather_of(texts_of(segment, ids, ragged, "boxes"), texts_of(binary, ids, Binary(), "data"))
    found = gather.result()
    assert found["data"] == [values[number] for number in ids]
    boxes = found["boxes"]
    assert boxes.data.shape == (13, 2)
    assert boxes.data.tobytes() == b"".join(values[number] for number in ids)
    assert boxes.offsets.tolist() == [0, 1, 3, 3, 8, 13]


def test_a_gather_of_nothing_has_ended():
    gather = gather_of()
    assert gather.take(0)
    assert gather.result() == {}
    assert gather.missed == 0
    gather.cancel()


@pytest.fixture
def copies(monkeypatch):
    """Jobs that copy the values of a column, once they have begun."""
    begun: set[int] = set()

    def noted(call):
        def begin(*job):
            kind = ctypes.c_int64.from_address(job[-1]).value
            begun.update([job[-1]] if kind == engine.VALUES else [])
            return call(*job)

        return begin

    monkeypatch.setattr(engine.quick, "engine_submit", noted(engine.quick.engine_submit))
    monkeypatch.setattr(engine.quick, "engine_copy", noted(engine.quick.engine_copy))
    return begun


def test_values_that_were_found_are_read_without_a_take(copies):
    """Else nobody would begin to read them before somebody waits for them."""
    gather = texts_of(Segment(is_cold=True), range(8))
    gather.found.take(DEADLINE_SECONDS)
    gather.advance()
    assert len(copies) == 1
    gather.advance()
    assert len(copies) == 1, "once"
    assert gather.take(DEADLINE_SECONDS)
    assert gather.finish(None) == TEXTS


def test_what_was_not_found_yet_is_not_copied(no_threads, copies):
    values = texts_of(Segment(is_cold=True), range(8))
    gather = gather_of(values)
    gather.advance()
    assert not copies
    assert not gather.take(0)
    assert gather.result() == {"text": TEXTS}


@pytest.mark.parametrize("wrong", [-1, len(TEXTS)])
def test_a_row_out_of_range_is_named(wrong, segment):
    ids = [0, 1, wrong]
    with pytest.raises(RowOutOfRangeError) as caught:
        gather_of(fixed_of(segment, ids)[0]).take(DEADLINE_SECONDS)
    assert caught.value.index == 2
    with pytest.raises(RowOutOfRangeError) as caught:
        gather_of(texts_of(segment, ids)).take(DEADLINE_SECONDS)
    assert caught.value.index == 2


def test_rows_that_were_released_meanwhile_are_refused_when_they_are_taken():
    segment, out = Segment(is_cold=False), np.zeros((1, WIDTH), np.uint8)
    rows = segment.table
    gather = gather_of(copy_rows(rows, np.array([0]), [(0, WIDTH, out.ctypes.data)], out))
    rows.release(1)
    for _ in range(2):
        with pytest.raises(RowOutOfRangeError):
            gather.take(0)
    assert not out.any()


@pytest.mark.parametrize(
    ("number", "value"), [(3, -1), (3, 10_000), (2, 100)], ids=["negative", "beyond", "falling"]
)
def test_offsets_that_were_altered_are_found_and_nothing_is_copied(number, value, segment, copies):
    segment.set_offset(number, value)
    values = texts_of(segment, range(8))
    values.found.take(DEADLINE_SECONDS)
    values.advance()  # it says nothing: whoever takes it is told
    gather = gather_of(values)
    for _ in range(2):
        with pytest.raises(CorruptSegmentError, match="offsets of column 'text' point out of their file"):
            gather.take(0)
    gather.cancel()
    assert not copies


def test_items_are_counted_without_being_read():
    values = [b"abcdefgh", b"", b"abcd"]
    segment = Segment(values=values, item_bytes=2)
    schema = Schema({"fixed": Tensor("uint8", (WIDTH,)), "pairs": Ragged("uint16", (2,))})
    rows, column = segment.table, Columns.of(schema, ["pairs"])["pairs"]
    assert lengths(rows, np.arange(3), column, Reader()).tolist() == [2, 0, 1]
    assert lengths(rows, np.arange(1, 3), column, Reader()).tolist() == [0, 1]
    segment.set_offset(2, 1)
    with pytest.raises(CorruptSegmentError, match="offsets of column 'pairs' point out of their file"):
        lengths(rows, np.arange(3), column, Reader())


def test_a_text_that_is_none_is_found():
    gather = gather_of(texts_of(Segment(values=[b"good", b"\xff\xfe"]), [0, 1]))
    with pytest.raises(CorruptSegmentError, match="a text is not valid UTF-8"):
        gather.result()


def test_its_end_is_told_once():
    ended = []
    for end in (PendingRead.wait, lambda gather: gather.take(0), PendingRead.cancel):
        gather = gather_of(fixed_of(Segment(), [1])[0], then=lambda: ended.append(1))
        end(gather)
        assert ended == [1]
        gather.cancel()
        del gather
        assert ended == [1]
        ended.clear()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_its_end_is_told_where_it_is_dropped(is_damaged):
    ended, segment = [], Segment()
    if is_damaged:
        segment.set_offset(3, -1)
    parts = fixed_of(segment, [1])[0], texts_of(segment, range(8))
    gather = gather_of(*parts, then=lambda: ended.append(1))
    if is_damaged:
        with pytest.raises(CorruptSegmentError):
            gather.take(0)
        assert ended == [], "whoever has it cancels it"
    del gather
    assert ended == [1]


def test_wait_ends_it_also_where_it_fails():
    ended, segment = [], Segment()
    segment.set_offset(3, -1)
    gather = gather_of(texts_of(segment, range(8)), then=lambda: ended.append(1))
    with pytest.raises(CorruptSegmentError):
        gather.wait()
    assert ended == [1]


def big(is_cold):
    """4 MiB of a fixed column, on their way."""
    segment = Segment(is_cold=is_cold, values=[], width=BIG_WIDTH, rows=BIG_ROWS)
    return segment, *fixed_of(segment, range(BIG_ROWS), BIG_WIDTH)


@pytest.mark.parametrize("is_cold", [False, True])
def test_a_gather_that_is_cancelled_in_the_middle_touches_nothing_any_more(no_threads, monkeypatch, is_cold):
    limit(monkeypatch, held_gil_chunks=4)  # of sixteen
    segment, copy, out = big(is_cold)
    ended = []
    gather = gather_of(copy, then=lambda: ended.append(out.copy()))
    assert not gather.take(0)
    gather.cancel()
    gather.cancel()
    assert len(ended) == 1
    assert not np.array_equal(out, segment.fixed)
    assert np.array_equal(out, ended[0])
    segment.file[:] = 0  # as if it were unmapped
    assert np.array_equal(out, ended[0])


def test_memory_is_kept_until_it_has_ended_and_no_longer(no_threads):
    segment, copy, out = big(is_cold=True)
    gather, kept = gather_of(copy), weakref.ref(segment)
    del segment, copy
    assert not gather.take(0)
    assert kept() is not None
    gather.cancel()
    del gather
    assert kept() is None
    assert not out.any()


@pytest.mark.parametrize("is_taken", [False, True], ids=["not found", "found"])
def test_after_it_was_cancelled_no_values_are_copied(no_threads, copies, is_taken):
    """Their addresses may be of what is unmapped by then, or be none at all."""
    values = texts_of(Segment(is_cold=True), range(8))
    if is_taken:
        values.found.take(DEADLINE_SECONDS)
    gather = gather_of(values)
    gather.cancel()
    gather.advance()
    assert not copies
