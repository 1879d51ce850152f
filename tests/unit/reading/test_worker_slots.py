"""Worker slots: what lies in one is handed over as it is, and nothing that somebody has is written again."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrowcache.reading.slots import SharedMemory
from arrowcache.reading.workers.messages import pack_batch
from arrowcache.reading.workers.worker import WorkerSlots

FLOAT = np.dtype(np.float32)


class Main:
    """Both sides of one worker's memory."""

    def __init__(self) -> None:
        self.memory = SharedMemory.create()
        self.slots = WorkerSlots(self.memory, 2)

    def make(self, transform, value, returned=(), shape=(8, 4)):
        """Offsets and copies of a batch's arrays, by column."""
        self.slots.begin(returned)
        batch = {"x": self.slots.lend("x", FLOAT, shape), "y": self.slots.lend("y", FLOAT, shape)}
        for number, array in enumerate(batch.values()):
            array[...] = value + number
        result = transform(batch)
        del batch, array
        columns = pack_batch(result)
        del result
        placed = self.slots.place(columns)
        del columns
        return {name: arrays for name, _, arrays in self.slots.hand_over(placed)}

    def read(self, place):
        dtype, shape, offset = place
        return np.ndarray(shape, dtype, self.memory, offset) if offset else np.empty(shape, dtype)


@pytest.fixture
def main():
    return Main()


def offsets(made):
    return [offset for arrays in made.values() for _, _, offset in arrays if offset]


def test_what_lies_in_a_slot_is_handed_over_without_a_copy(main):
    seen = []

    def transform(batch):
        seen.extend(array.ctypes.data for array in batch.values())
        return {"x": batch["x"], "first": batch["y"][:3]}

    made = main.make(transform, 5)
    start = main.memory.words.ctypes.data
    assert [start + offset for offset in offsets(made)] == seen
    assert (main.read(made["x"][0]) == 5).all()
    assert main.read(made["first"][0]).shape == (3, 4)


def test_each_column_has_memory_of_its_own(main):
    def transform(batch):
        x = batch["x"]
        return {"a": x, "b": x, "c": x[::-1], "d": x[2:], "e": x.T, "f": x.view(np.int32), "n": 3, "z": x[:0]}

    made = main.make(transform, 1)
    assert len(set(offsets(made))) == 7
    assert made["z"] == [("<f4", [0, 4], 0)]
    for name in "abcde":
        assert (main.read(made[name][0]) == 1).all()
    assert main.read(made["n"][0])[()] == 3


def test_nothing_that_the_main_process_has_is_written_until_it_returns_it(main):
    kept = [(value, main.make(dict, value)) for value in range(30)]
    for value, made in kept:
        assert (main.read(made["x"][0]) == value).all()
        assert (main.read(made["y"][0]) == value + 1).all()
    allocated, growths = main.slots.memory
    assert growths == 60
    made = main.make(dict, 99, returned=[offset for _, each in kept for offset in offsets(each)])
    assert (main.read(made["x"][0]) == 99).all()
    assert main.slots.memory[0] < allocated // 2, "what is too much was given back"
    for _ in range(10):
        made = main.make(dict, 1, returned=offsets(made))
    assert main.slots.memory[1] == growths, "the rest is used again"


def test_what_a_transform_keeps_is_its_own_and_returns_once_it_lets_go(main):
    kept = []

    def transform(batch):
        kept.append(batch["x"][1:2])
        return batch

    made: dict = {}
    for value in range(20):
        made = main.make(transform, value, returned=offsets(made))
        main.read(made["x"][0])[...] = -1  # as a consumer may
    assert [view[0, 0] for view in kept] == list(range(20))
    growths = main.slots.memory[1]
    kept.clear()
    for value in range(10):
        made = main.make(dict, value, returned=offsets(made))
    assert main.slots.memory[1] == growths


def test_a_batch_that_failed_gives_its_memory_back(main):
    def fail(batch):
        raise KeyError("no")

    for _ in range(20):
        with pytest.raises(KeyError):
            main.make(fail, 1)
    assert main.slots.memory[1] <= 4


def test_a_batch_for_which_memory_ran_out_midway_gives_all_of_it_back(main, monkeypatch):
    kept, reserve = [], os.posix_fallocate

    def transform(batch):
        kept.append(batch["y"])  # of which the consumer needs a copy
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        return batch

    def refuse(*_):
        raise OSError(28, "No space left on device")

    for _ in range(20):
        with pytest.raises(MemoryError, match="No space left"):
            main.make(transform, 1)
        monkeypatch.setattr(os, "posix_fallocate", reserve)
        kept.clear()
    assert main.slots.memory[1] <= 4


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 3)), max_size=30))
def test_results_of_any_size_arrive_whatever_is_kept(steps):
    main, kept = Main(), []
    for number, (size, dropped) in enumerate(steps):
        returned = [offset for _ in range(min(dropped, len(kept))) for offset in offsets(kept.pop(0)[1])]
        made = main.make(lambda batch, n=size, v=number: {"r": np.full(n, v)}, number, returned)
        kept.append((number, made))
        assert all((main.read(each["r"][0]) == value).all() for value, each in kept)


def test_the_main_process_sees_what_a_worker_is_at_and_tells_it_what_has_ended(main):
    main.slots.tell("transform")
    assert int(main.memory.words[1]) % 4 == 2
    main.slots.tell("")
    assert main.memory.words[1] == 0
    assert not main.slots.is_over(1)
    main.memory.words[0] = 4
    assert main.slots.is_over(4)
    assert not main.slots.is_over(5)
