"""Slots: nothing that is kept is overwritten, and what is let go is used again."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import DEADLINE_SECONDS, in_child, open_files, wait_until
from hypothesis import given
from hypothesis import strategies as st

from arrowcache.linux import PAGE_BYTES
from arrowcache.reading.slots import SharedBuffers, SharedMemory, Slots, page_aligned

COLUMNS = {"image": ((64,), np.dtype("float32")), "label": ((), np.dtype("int64"))}
IMAGE_BYTES, LABEL_BYTES = 4 * 64 * 4, 4 * 8
BATCH_BYTES = IMAGE_BYTES + LABEL_BYTES


def make(columns=COLUMNS, **options):
    """Slots for batches of 4."""
    return Slots(columns, 4, **options)


def fill(slots, value, rows=4):
    """A batch, every element `value`; its slot is dropped."""
    batch = slots.lend(rows).arrays()
    for array in batch.values():
        array[...] = value
    return batch


def test_batches_have_the_columns_shapes_and_dtypes():
    batch = fill(make(), 3)
    assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == {
        "image": ((4, 64), "float32"),
        "label": ((4,), "int64"),
    }
    assert all(array.flags.c_contiguous and array.flags.writeable for array in batch.values())
    assert (batch["image"] == 3).all()


def test_a_batch_has_only_its_rows():
    slots = make()
    for rows in (4, 2, 1, 0, 4):
        batch = fill(slots, 1, rows)
        assert batch["image"].shape == (rows, 64)
        assert batch["label"].shape == (rows,)


def test_a_slots_addresses_are_those_of_its_arrays():
    slot = make().lend(3)
    first, second = slot.arrays(), slot.arrays()
    assert list(slot.addresses) == list(COLUMNS)
    assert slot.addresses == {name: array.ctypes.data for name, array in first.items()}
    first["label"][1] = 7
    assert second["label"][1] == 7, "new arrays over the same memory"
    assert first["label"] is not second["label"]


def test_more_rows_than_a_batch_has_find_memory_too():
    slots = make()
    fill(slots, 0)
    many = fill(slots, 5, rows=400)
    assert (many["image"] == 5).all()
    assert slots.allocated_bytes == 100 * BATCH_BYTES, "what was too small is given up"
    del many
    few = slots.lend(4)
    assert slots.allocated_bytes == 100 * BATCH_BYTES, "what is large enough is not"
    del few


def test_what_is_let_go_is_used_again():
    slots = make()
    for number in range(100):
        fill(slots, number)
    assert slots.growths == len(COLUMNS)
    assert slots.allocated_bytes == BATCH_BYTES


def test_what_came_back_last_is_lent_first():
    slots = make()
    lent = [slots.lend(4) for _ in range(3)]
    places = [slot.addresses["image"] for slot in lent]
    for number in (1, 0, 2):
        lent[number] = None
    assert slots.lend(4).addresses["image"] == places[2]
    held = [slots.lend(4) for _ in range(3)]
    assert [slot.addresses["image"] for slot in held] == [places[2], places[0], places[1]]


def test_a_consumer_that_keeps_everything_makes_the_slots_grow_and_letting_go_shrinks_them():
    slots = make()
    kept = [fill(slots, number) for number in range(40)]
    assert slots.allocated_bytes == 40 * BATCH_BYTES
    kept.clear()
    fill(slots, 0)
    assert slots.allocated_bytes <= 4 * BATCH_BYTES


def test_as_many_batches_as_an_epoch_has_at_a_time_come_back_to_the_next_without_new_memory():
    slots = make(in_flight=4)

    def epoch():
        kept = deque(maxlen=8)  # being filled, ready, and in hand
        for _ in range(20):
            kept.append(fill(slots, 0))

    epoch()
    growths = slots.growths
    for _ in range(5):
        epoch()
    assert slots.growths == growths


def test_keeping_every_label_keeps_no_image():
    slots = make()
    labels = [fill(slots, number)["label"] for number in range(60)]
    assert [label[0] for label in labels] == list(range(60))
    assert slots.allocated_bytes <= 60 * LABEL_BYTES + 3 * IMAGE_BYTES


def torch_tensor(array):
    return pytest.importorskip("torch", reason="PyTorch is not installed").from_numpy(array)


@pytest.mark.parametrize(
    "makers",
    [
        [
            lambda a: a[2:3],
            lambda a: a.reshape(-1).view(np.uint8),
            lambda a: memoryview(a),
            lambda a: np.frombuffer(a.data, np.float32),
        ],
        [lambda a: torch_tensor(a)[1], lambda a: np.asarray(torch_tensor(a).view(-1))],
    ],
    ids=["NumPy", "PyTorch"],
)
def test_any_view_keeps_the_memory_whatever_it_was_made_through(makers):
    slots = make()
    kept = [maker(fill(slots, 7)["image"]) for maker in makers]
    for number in range(30):
        fill(slots, 100 + number)
    for view in kept:
        raw = np.asarray(view).reshape(-1)
        assert (raw.view(np.float32) == 7).all()


def test_a_batch_in_a_reference_cycle_comes_back_with_the_garbage_collector():
    slots = make()
    gc.disable()  # else it comes by in between, and fewer are lent at a time
    try:
        for number in range(30):
            batch = fill(slots, number)
            cycle = {"batch": batch}
            cycle["self"] = cycle
        del batch, cycle
    finally:
        gc.enable()
    gc.collect()
    fill(slots, 0)
    assert slots.allocated_bytes <= 4 * BATCH_BYTES


def test_the_garbage_collector_may_give_slots_back_while_one_is_lent():
    """Else a thread would wait for a lock that it has itself."""

    def allocate(nbytes):
        gc.collect(0)
        return np.empty(nbytes, np.uint8)

    slots = make(allocate=allocate)
    kept = []
    gc.disable()  # the youngest, which costs little, are all that there are
    try:
        for number in range(20):
            batch = fill(slots, number)
            cycle = {"batch": batch}
            cycle["self"] = cycle
            del batch, cycle
            kept.append(slots.lend(4))  # more than there were: some are allocated
    finally:
        gc.enable()
    assert len({slot.addresses["image"] for slot in kept}) == 20


def test_batches_may_be_let_go_in_other_threads():
    slots = make()
    kept = [fill(slots, number) for number in range(40)]
    halves = [kept[::2], kept[1::2]]
    del kept

    def drop(half):
        while half:
            half.pop()

    threads = [threading.Thread(target=drop, args=(half,)) for half in halves]
    for thread in threads:
        thread.start()
    for number in range(40):
        fill(slots, number)
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    fill(slots, 0)
    assert slots.allocated_bytes <= 4 * BATCH_BYTES


def test_several_threads_never_have_the_same_memory():
    slots = make()
    together = threading.Barrier(4)

    def work(thread):
        kept, rng = deque(maxlen=5), np.random.default_rng(thread)
        together.wait(DEADLINE_SECONDS)
        for number in range(300):
            value = thread * 1000 + number
            kept.append((value, fill(slots, value, int(rng.integers(0, 6)))))
            for wanted, batch in kept:
                assert (batch["image"] == wanted).all()
                assert (batch["label"] == wanted).all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 30)), max_size=80))
def test_memory_is_that_which_was_allocated_and_no_two_that_live_share_it(steps):
    allocated = []

    def allocate(nbytes):
        allocated.append(nbytes)
        return np.empty(nbytes, np.uint8)

    slots, kept = make(allocate=allocate), []
    for is_dropped, rows, which in steps:
        if is_dropped and kept:
            kept.pop(which % len(kept))
            continue
        kept.append(slots.lend(rows))
        ranges = sorted(
            (slot.addresses["label"], slot.addresses["label"] + array.nbytes)
            for slot in kept
            if (array := slot.arrays()["label"]).nbytes
        )
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert slots.growths == len(allocated)
        assert sum(array.nbytes for slot in kept for array in slot.arrays().values()) <= slots.allocated_bytes
        assert slots.allocated_bytes <= sum(allocated)


def test_where_no_memory_is_left_nothing_is_lost():
    def allocate(nbytes):
        if refuses and nbytes == LABEL_BYTES:
            raise MemoryError
        return np.empty(nbytes, np.uint8)

    refuses = True
    slots = make(allocate=allocate)
    for _ in range(3):
        with pytest.raises(MemoryError):
            slots.lend(4)
    assert slots.allocated_bytes == IMAGE_BYTES, "the image's was given back each time"
    refuses = False
    fill(slots, 1)
    assert slots.allocated_bytes == BATCH_BYTES


def test_a_column_of_no_width_is_lent_as_any_other():
    slots = make({"nothing": ((0, 3), np.dtype("float32")), "label": ((), np.dtype("int64"))})
    for rows in (4, 2, 0, 9):
        batch = fill(slots, 2, rows)
        assert batch["nothing"].shape == (rows, 0, 3)
        assert (batch["label"] == 2).all()


def test_slots_without_columns_are_harmless():
    slots = make({})
    slot = slots.lend(4)
    assert (slot.arrays(), slot.addresses) == ({}, {})
    assert slots.allocated_bytes == 0


def test_a_batch_that_dies_runs_no_python_in_which_ctrl_c_would_be_lost():
    slots = make()
    batch = fill(slots, 1)
    called = []
    sys.setprofile(lambda _, event, __: event == "call" and called.append(event))
    try:
        batch.clear()
    finally:
        sys.setprofile(None)
    assert called == []
    assert np.all(fill(slots, 2)["label"] == 2)
    assert slots.growths == len(COLUMNS), "its memory came back"


# allocators, and files that several processes map


@pytest.fixture
def memory():
    return SharedMemory.create()


@pytest.fixture
def buffers(memory):
    return SharedBuffers(memory)


def bytes_on_disk(memory):
    return os.fstat(memory.fd).st_blocks * 512


def test_plain_memory_starts_at_a_page():
    for nbytes in (1, 4096, 100_000):
        memory = page_aligned(nbytes)
        assert memory.nbytes == nbytes
        assert memory.ctypes.data % PAGE_BYTES == 0


def test_both_mappings_see_the_same_memory_at_the_same_offset(memory, buffers):
    other = SharedMemory(os.dup(memory.fd))
    mine = buffers.allocate(100)
    mine[:] = np.arange(100)
    theirs = np.frombuffer(other, np.uint8, 100, buffers.offset(mine.ctypes.data))
    assert theirs.tolist() == list(range(100))
    theirs[3] = 77
    assert mine[3] == 77
    memory.words[0] = 7
    assert other.words[0] == 7


def test_memory_is_there_before_it_is_written_and_gone_once_it_is_freed(memory, buffers):
    nothing = bytes_on_disk(memory)
    large = buffers.allocate(100 * PAGE_BYTES)
    assert bytes_on_disk(memory) >= nothing + 100 * PAGE_BYTES
    buffers.free(large)
    assert bytes_on_disk(memory) == nothing


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5 * PAGE_BYTES)), max_size=40))
def test_no_two_that_live_share_a_byte_and_none_moves(steps):
    memory = SharedMemory.create()
    buffers, live = SharedBuffers(memory), []
    for number, (is_freed, size) in enumerate(steps):
        if is_freed and live:
            array, value = live.pop(size % len(live))
            assert (array == value).all()
            buffers.free(array)
        else:
            array = buffers.allocate(size)
            assert array.nbytes == size
            array[:] = number
            live.append((array, number))
    assert all((array == value).all() for array, value in live)


def test_places_are_used_again(memory, buffers):
    places = set()
    for _ in range(20):
        array = buffers.allocate(3 * PAGE_BYTES)
        places.add(buffers.offset(array.ctypes.data))
        buffers.free(array)
    assert len(places) == 1


def test_where_no_memory_is_left_the_error_says_what_to_do_and_nothing_is_lost(memory, buffers, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    kept, before = buffers.allocate(PAGE_BYTES), bytes_on_disk(memory)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        for _ in range(3):
            with pytest.raises(MemoryError, match=r"memory beside 4.0 KiB .*No space.*or smaller batches"):
                buffers.allocate(100)
    assert bytes_on_disk(memory) == before
    buffers.allocate(100)[:] = 1
    assert not kept.any()


def test_arrays_outlive_the_memory_and_its_descriptors_end_with_the_last():
    gc.collect()
    before = open_files()
    memory = SharedMemory.create()
    array = SharedBuffers(memory).allocate(100)
    del memory
    array[:] = 5
    assert open_files() - before
    assert (array == 5).all()
    del array
    gc.collect()
    wait_until(lambda: open_files() <= before, "its descriptors to end")


def test_what_a_forked_child_writes_stays_there(memory, buffers):
    array = buffers.allocate(100)
    array[:] = 1

    def child():
        assert (array == 1).all()
        array[:] = 9
        memory.words[0] = 9

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on fork beside threads
        with in_child(child):
            pass
    assert (array == 1).all()
    assert memory.words[0] == 0
