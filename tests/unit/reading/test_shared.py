"""Shared memory: blocks, who uses them, and when their memory is given back."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrowcache.reading.workers.channel import Channel
from arrowcache.reading.workers.manifest import pack_segments, unpack_segments
from arrowcache.reading.workers.memory import array_over, bytes_of, file_of, map_all
from arrowcache.reading.workers.shared import SharedRing, Slot
from arrowcache.storage.layout import SegmentInfo

PAGE = 4096


@pytest.fixture
def ring():
    ring = SharedRing()
    yield ring
    ring.close()


def blocks_on_disk(ring):
    return os.fstat(ring.fd).st_blocks * 512


def filled(ring, value, count=PAGE):
    """An array of its own block."""
    block = ring.take(count)
    ring.array(block, np.uint8, (count,))[:] = value
    array = ring.hand_out(block, 0, np.dtype(np.uint8), (count,))
    ring.give(block)
    return array


def test_both_mappings_see_the_same_memory(ring):
    other = map_all(ring.fd)
    block = ring.take(100)
    ring.array(block, np.int32, (25,))[:] = np.arange(25)
    assert array_over(other, block.offset, np.int32, (25,)).tolist() == list(range(25))
    array_over(other, block.offset, np.int32, (25,))[3] = -1
    assert ring.array(block, np.int32, (25,))[3] == -1
    ring.ended = 7
    assert array_over(other, 0, np.int64, (1,))[0] == 7
    ring.give(block)


def test_no_block_is_used_twice_while_a_view_of_it_lives(ring):
    ring.keep(1 << 20)
    kept = [filled(ring, number)[10:20] for number in range(20)]
    del kept[::2]
    kept += [filled(ring, 100 + number) for number in range(20)]
    for view, number in zip(kept, [*range(1, 20, 2), *range(100, 120)], strict=True):
        assert (view == number).all()
    ring.take(1)
    assert ring.in_use == 31
    assert ring.growths == 31


def test_memory_that_nobody_uses_is_given_back_but_for_what_is_to_be_kept(ring):
    ring.keep(8 * PAGE)
    kept = [filled(ring, 1) for _ in range(100)]
    assert blocks_on_disk(ring) >= ring.allocated_bytes == 100 * PAGE
    del kept
    gc.collect()
    ring.give(ring.take(1))
    filled(ring, 2)
    assert ring.allocated_bytes <= 9 * PAGE
    assert blocks_on_disk(ring) <= 10 * PAGE
    growths = ring.growths
    for _ in range(8):
        filled(ring, 3)
    assert ring.growths == growths


def test_a_block_has_all_its_memory_before_it_is_written(ring):
    block = ring.take(100 * PAGE)
    assert blocks_on_disk(ring) >= 100 * PAGE
    ring.give(block)


def test_columns_are_freed_separately_and_arrays_outlive_the_ring(ring):
    slot = Slot(ring, {"label": [PAGE], "image": [64 * PAGE], "none": [0]})
    assert [nbytes for ((_, nbytes),) in slot.places().values()] == [PAGE, 64 * PAGE, 0]
    label = slot.array("label", 0, "<i8", [PAGE // 8], slice(None))
    image = slot.array("image", 0, "|u1", [64, PAGE], slice(8, 16))
    assert slot.array("none", 0, "<f4", [0, 3], slice(None)).shape == (0, 3)
    assert slot.array("label", 0, "<i8", [], slice(None)).shape == ()
    assert image.shape == (8, PAGE)
    label[:] = 5
    image[:] = 6
    slot.close()
    del image
    ring.give(ring.take(1))
    ring.give(ring.take(1))
    assert ring.allocated_bytes < 64 * PAGE
    ring.close()
    assert (label == 5).all()


def test_a_closed_ring_keeps_no_memory_but_what_is_lent(ring):
    ring.keep(1 << 30)
    kept = [filled(ring, number) for number in range(20)]
    del kept[1:]
    file = os.dup(ring.fd)
    ring.close()
    assert os.fstat(file).st_blocks * 512 <= 2 * PAGE
    assert (kept[0] == 0).all()
    os.close(file)


def test_what_is_abandoned_is_never_used_again(ring):
    ring.keep(1 << 20)
    slot = Slot(ring, {"x": [PAGE]})
    ((offset, _),) = slot.places()["x"]
    slot.abandon()
    del slot
    assert all(ring.take(PAGE).offset != offset for _ in range(10))


def test_a_slot_that_finds_no_memory_gives_back_what_it_had(ring, monkeypatch):
    reserve = os.posix_fallocate

    def refuse(fd, offset, nbytes):
        if nbytes > PAGE:
            raise OSError(28, "No space left on device")
        reserve(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(MemoryError, match="No space left"):
        Slot(ring, {"small": [PAGE], "large": [2 * PAGE]})
    ring.take(1)
    assert ring.in_use == 1


def test_messages_keep_their_boundaries_and_files_however_long_they_are():
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    with pytest.raises(BlockingIOError):
        ours.receive()
    fd = file_of(b"content")
    for length in (0, 10, 40_000, 3_000_000):
        other.send({"text": "x" * length}, [fd])
    for length in (0, 10, 40_000, 3_000_000):
        message, files = ours.receive()
        assert message == {"text": "x" * length}
        assert [bytes_of(file) for file in files] == [b"content"]
        assert not any(os.get_inheritable(file) for file in files)
        for file in files:
            os.close(file)
    os.close(fd)
    other.close()
    assert ours.receive() is None
    with pytest.raises(OSError, match="Broken pipe"):
        ours.send({})
    ours.close()


def test_an_end_that_never_reads_blocks_nobody():
    ours, theirs = Channel.pair()

    def send_many():
        for _ in range(100_000):
            ours.send({"do": "drop"})

    with theirs, pytest.raises(BlockingIOError):
        send_many()
    ours.close()


@given(
    st.lists(
        st.builds(
            SegmentInfo,
            seq=st.integers(0, 2**62),
            rows=st.integers(1, 2**31),
            task=st.sampled_from(["", "default.0.7", "a-b.3.99"]),
            nbytes=st.integers(1, 2**40),
            allocated_bytes=st.integers(1, 2**40),
            published=st.floats(0, 2e9),
        ),
        max_size=5,
        unique_by=lambda segment: segment.seq,
    )
)
def test_a_manifest_is_its_segments_and_makes_no_known_one_anew(segments):
    known = {segment.seq: segment for segment in segments[:2]}
    unpacked = unpack_segments(pack_segments(segments), known)
    assert unpacked == segments
    assert all(unpacked[number] is known[segment.seq] for number, segment in enumerate(segments[:2]))
