"""Frames of the arrow backend: Arrow files in memory, read here by pyarrow in place of tensorflow-io."""

from __future__ import annotations

import os

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import pyarrow as pa

import arrowcache as ac
from arrowcache.reading.slots import Slots
from arrowcache.tensorflow.arrow_backend import Frames, PaddedBuffers
from arrowcache.tensorflow.columns import columns_of

SCHEMA = ac.Schema({"x": ac.Tensor("float32", (3, 5)), "name": ac.String(), "y": ac.Tensor("int64")})
ROWS = 4  # of a batch


@pytest.fixture
def rooms():
    return PaddedBuffers()


@pytest.fixture
def frames(rooms):
    return Frames(columns_of(SCHEMA, [*SCHEMA], ROWS, with_ids=False), [*SCHEMA.fixed], rooms)


@pytest.fixture
def slots(rooms):
    columns = {name: (kind.shape, kind.numpy_dtype) for name, kind in SCHEMA.fixed.items()}
    return Slots(columns, 2 * ROWS, allocate=rooms.allocate)


def gathered(slots, first, rows=2 * ROWS):
    """Batches of one slot, as a loader makes them."""
    whole, ids = slots.lend(rows).arrays(), np.arange(first, first + rows)
    whole["y"][:] = ids
    whole["x"][:] = ids[:, None, None]
    batches = [
        {name: array[start : start + ROWS] for name, array in whole.items()} for start in range(0, rows, ROWS)
    ]
    for batch in batches:
        batch["name"] = [str(number) for number in batch["y"]]
    return batches


def read(frame):
    """The columns of each file of a frame, a list a batch."""
    files = [pa.foreign_buffer(int(at), int(size)) for at, size in zip(*frame, strict=True)]
    return [pa.ipc.open_file(file).read_all().columns for file in files]


def ids(frame):
    return [number for batch in read(frame)[1][0].to_pylist() for number in batch]


def test_batches_gathered_side_by_side_become_files_where_they_lie(frames, slots):
    batches = gathered(slots, 100)
    first = {name: batches[0][name].ctypes.data for name in ("x", "y")}
    (x,), (y,), (text, ends) = read(frames.write(batches))
    assert [len(batch) for batch in x.to_pylist()] == [ROWS * 15] * 2
    assert y.to_pylist() == [list(range(100, 104)), list(range(104, 108))]
    assert np.array_equal(x.chunk(0).values.to_numpy().view(np.float32), np.repeat(np.arange(100.0, 108), 15))
    assert text.to_pylist() == ["100101102103", "104105106107"]
    assert ends.to_pylist() == [[0, 3, 6, 9, 12]] * 2
    for name, column in (("x", x), ("y", y)):
        assert column.chunk(0).values.buffers()[1].address == first[name]


def test_a_last_batch_of_fewer_rows_fits(frames, slots):
    assert ids(frames.write(gathered(slots, 0, ROWS + 1))) == list(range(ROWS + 1))
    assert ids(frames.write(gathered(slots, 0, ROWS + 3))) == list(range(ROWS + 3))


def test_what_lies_elsewhere_is_copied_and_its_surroundings_stay(frames, slots):
    memory = np.full(1000, 7, np.int64)
    batches = gathered(slots, 50)
    for number, batch in enumerate(batches):
        values = memory[500 + 100 * number :][:ROWS]
        values[:] = batch["y"]
        batch["y"] = values
    before = memory.copy()
    assert ids(frames.write(batches)) == list(range(50, 58))
    assert np.array_equal(memory, before)


def test_a_batch_without_the_one_before_it_is_copied(frames, slots):
    """Its headers would lie in the batch before it."""
    first, second = gathered(slots, 0)
    assert ids(frames.write([second])) == list(range(4, 8))
    assert first["y"].tolist() == list(range(4))


def test_a_room_that_died_is_none(rooms):
    values = rooms.allocate(8)
    start = values.ctypes.data
    assert rooms.around(start) is not None
    del values
    assert rooms.around(start) is None


def test_a_frame_stays_while_the_next_is_made(frames, slots):
    older = frames.write(gathered(slots, 0))
    for first in range(10, 100, 10):
        newer = frames.write(gathered(slots, first))
        assert ids(older) == list(range(first - 10, first - 2))
        assert [*read(older)[2][0].to_pylist()] == [
            "".join(map(str, range(start, start + 4))) for start in (first - 10, first - 6)
        ]
        older = newer


def test_an_epochs_frames_are_batches_that_lie_side_by_side(frames, slots):
    batches = [*gathered(slots, 0), *gathered(slots, 10), *gathered(slots, 20, 1)]
    assert [ids(frame) for frame in frames.of_epoch(iter(batches))] == [
        list(range(8)),
        list(range(10, 18)),
        [20],
    ]


def test_batches_before_an_error_are_delivered_first(frames, slots):
    def failing():
        yield from gathered(slots, 0)
        raise OSError("gone")

    epoch = frames.of_epoch(failing())
    assert ids(next(epoch)) == list(range(8))
    with pytest.raises(OSError, match="gone"):
        next(epoch)


def test_frames_give_back_what_was_gathered_for_those_before(frames, slots):
    for first in range(0, 50, 10):
        frames.write(gathered(slots, first))
    growths = slots.growths
    for first in range(50, 500, 10):
        frames.write(gathered(slots, first))
    assert slots.growths == growths


def test_batches_without_a_column_of_fixed_width_are_a_frame_each(rooms):
    schema = ac.Schema({"name": ac.String()})
    frames = Frames(columns_of(schema, ["name"], 2, with_ids=False), [], rooms)
    found = [read(frame)[0][0].to_pylist() for frame in frames.of_epoch([{"name": ["a", "b"]}] * 3)]
    assert found == [["ab"]] * 3
