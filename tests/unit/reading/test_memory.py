"""Memory: allocators, and files that several processes map."""

from __future__ import annotations

import gc
import os
import warnings

import numpy as np
import pytest
from helpers import in_child, open_files, wait_until
from hypothesis import given
from hypothesis import strategies as st

from arrowcache.linux import PAGE_BYTES
from arrowcache.reading.memory import SharedBuffers, SharedMemory, page_aligned


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
