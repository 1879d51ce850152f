"""Columns: a kind of column says how its stored bytes become a batch's array, whichever way rows are read."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import make_cache

from arrowcache import Binary, Ragged, Schema, String, Tensor, Timestamp
from arrowcache.errors import CorruptSegmentError
from arrowcache.reading.columns import Columns, FixedColumn, Values, VariableColumn, column_bytes, rows_of
from arrowcache.reading.slots import GivenArrays, Slots

SCHEMA = Schema(
    {
        "text": String(),
        "x": Tensor("float32", (2,)),
        "when": Timestamp(),
        "boxes": Ragged("int16", (2,)),
        "data": Binary(),
    }
)
ROWS = 6


class Numbers(VariableColumn):
    """A kind of column as one might add it: text such as "3,4", which a batch has as two numbers."""

    memory = ((2,), np.dtype(np.int32))

    def finish(self, data, ends, out):
        for row, (start, stop) in enumerate(itertools.pairwise(ends)):
            try:
                out[row] = [int(number) for number in data[start:stop].tobytes().split(b",")]
            except ValueError:
                raise CorruptSegmentError("not two numbers") from None
        return out


def numbers_of(schema, name="text"):
    """The columns of a schema, with one text as numbers."""
    known = Columns.of(schema, [*schema])
    kinds = [Numbers(name, known[name].buffer, String()) if each == name else known[each] for each in schema]
    return Columns(kinds)


@pytest.fixture
def cache(tmp_path):
    cache = make_cache(tmp_path / "cache", Schema({"x": Tensor("int64"), "text": String()}), segment_rows=2)
    with cache.writer() as writer:
        for n in range(ROWS):
            writer.append(x=n, text=f"{n},{-n}")
    return cache


@pytest.mark.parametrize("is_cold", [True, False], ids=["cold", "warm"])
def test_a_kind_of_column_that_decodes_fills_the_slot(cache, is_cold):
    columns, ids = numbers_of(cache.schema), np.array([4, 0, 5, 4])
    assert columns.row_bytes == 8 + 2 * 4
    with cache.snapshot() as snapshot:
        snapshot.read_mode.is_cold = is_cold
        slot = Slots(columns.memory, 4).lend(4)
        batch = snapshot.read(ids, columns, slot).result()
        again = snapshot.gather_into(ids, columns, Slots(columns.memory, 4).lend(4))
    for found in (batch, again):
        assert list(found) == ["x", "text"]
        assert found["x"].tolist() == [4, 0, 5, 4]
        assert found["text"].tolist() == [[4, -4], [0, 0], [5, -5], [4, -4]]
    assert batch["text"].ctypes.data == slot.addresses["text"]


def test_an_error_of_a_kind_of_column_arrives_and_the_snapshot_can_be_closed(cache):
    with cache.writer() as writer:
        writer.append(x=6, text="six")
    columns = numbers_of(cache.schema)
    with cache.snapshot() as snapshot:
        read = snapshot.read(np.array([0, 6]), columns, Slots(columns.memory, 2).lend(2))
        with pytest.raises(CorruptSegmentError, match="not two numbers"):
            read.result()
    assert cache.stats().leased_bytes == 0


def test_what_a_slot_has_and_what_can_be_a_view():
    columns = Columns.of(SCHEMA, ["boxes", "when", "text", "x"])
    assert columns.names == ("boxes", "when", "text", "x")
    assert columns.memory == {"when": ((), np.dtype("M8[us]")), "x": ((2,), np.dtype(np.float32))}
    assert columns.row_bytes == 8 + 8
    assert columns.viewed.names == ("boxes", "when", "x")
    assert columns.copied.names == ("text",)
    assert not columns.are_fixed
    assert Columns.of(SCHEMA, ["x", "when"]).are_fixed


def test_buffers_are_numbered_as_they_lie_in_a_segment():
    columns = Columns.of(SCHEMA, [*SCHEMA])
    assert {name: columns[name].buffer for name in SCHEMA} == {
        "x": 0, "when": 1, "text": 2, "boxes": 4, "data": 6
    }  # fmt: skip
    assert isinstance(columns["when"], FixedColumn)


def test_each_kind_is_finished_as_its_own():
    data, ends = np.frombuffer("é1234567".encode()[:8], np.uint8), np.array([0, 2, 2, 6])
    columns = Columns.of(SCHEMA, [*SCHEMA])
    finished = {column.name: column.finish(data[:6], ends, None) for column in columns.variable[::2]}
    assert finished == {"text": ["é", "", "1234"], "data": ["é".encode(), b"", b"1234"]}
    ends = np.array([0, 4, 8])
    boxes = columns["boxes"].finish(data.copy(), ends, None)
    assert (boxes.data.shape, boxes.data.dtype, boxes.offsets.tolist()) == ((2, 2), np.int16, [0, 1, 2])


@pytest.mark.parametrize(
    ("column", "some", "nbytes"),
    [
        (np.arange(5, dtype=np.int16), [2, 3], 10),
        (["a", "bc", "def", "", "g"], ["def", ""], 7),
        (Values(np.arange(6), np.array([0, 1, 1, 4, 6])), Values(np.arange(1, 6), [0, 3, 5]), 48),
    ],
    ids=["array", "list", "values"],
)
def test_rows_and_bytes_of_a_column(column, some, nbytes):
    assert column_bytes(column) == nbytes
    found = rows_of(column, slice(2, 4))
    if isinstance(column, Values):
        assert (found.data.tolist(), found.offsets.tolist()) == (some.data.tolist(), some.offsets)
    else:
        assert list(found) == some


def test_a_callers_arrays_take_the_place_of_a_slot(cache):
    columns, x = Columns.of(cache.schema, ["x"]), np.zeros(2, np.int64)
    with cache.snapshot() as snapshot:
        read = snapshot.read(np.array([3, 1]), columns, GivenArrays({"x": x}))
        assert read.result()["x"] is x
    assert x.tolist() == [3, 1]
