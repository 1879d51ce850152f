"""The ring: nothing that is kept is overwritten, and what is let go is used again."""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrowcache.reading.ring import USUAL_GROUP_BYTES, GroupSize, Ring

COLUMNS = {"image": ((64,), np.dtype("float32")), "label": ((), np.dtype("int64"))}


def make(group_bytes=1, columns=COLUMNS):
    """A ring for batches of 4 whose largest group has about so many bytes."""
    return Ring(columns, 4, group_bytes=group_bytes)


def fill(ring, value, rows=None):
    """One group, every element `value`; returns its batches."""
    rows = ring.largest_group * 4 if rows is None else rows
    group = ring.take(rows)
    for array in group.arrays().values():
        array[...] = value
    batches = [group.hand_out(number) for number in range(-(-rows // 4))]
    group.close()
    return batches


def test_batches_have_the_columns_shapes_and_dtypes():
    (batch,) = fill(make(), 3)
    assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == {
        "image": ((4, 64), "float32"),
        "label": ((4,), "int64"),
    }
    assert all(array.flags.c_contiguous and array.flags.writeable for array in batch.values())
    assert (batch["image"] == 3).all()


def test_a_short_last_batch_has_only_its_rows():
    ring = make(group_bytes=1 << 20)
    batches = fill(ring, 1, rows=10)
    assert [len(batch["label"]) for batch in batches] == [4, 4, 2]


def test_nothing_that_is_kept_is_overwritten():
    ring = make(group_bytes=3 * 4 * (64 * 4 + 8))
    assert ring.largest_group == 3
    kept = {}
    for number in range(50):
        batches = fill(ring, number)
        kept[number] = batches[number % 3]
        views = kept[number]["image"][1:, ::2]
        kept[number] = {"image": views, "label": kept[number]["label"]}
        del batches, views
    for number, batch in kept.items():
        assert (batch["image"] == number).all()
        assert (batch["label"] == number).all()


def test_what_is_let_go_is_used_again():
    ring = make()
    for number in range(100):
        fill(ring, number)
    assert ring.allocated_bytes <= 4 * (4 * (64 * 4 + 8))


def test_a_consumer_that_keeps_everything_makes_the_ring_grow_and_letting_go_shrinks_it():
    ring = make()
    one = 4 * (64 * 4 + 8)
    kept = [fill(ring, number) for number in range(40)]
    assert ring.allocated_bytes == 40 * one
    kept.clear()
    fill(ring, 0)
    fill(ring, 0)
    assert ring.allocated_bytes <= 5 * one


def test_as_many_batches_as_an_epoch_has_at_a_time_come_back_to_the_next_without_new_memory():
    ring = Ring(COLUMNS, 4, in_flight=4, group_bytes=1)

    def epoch():
        kept = deque(maxlen=8)  # being filled, ready, and in hand
        for _ in range(20):
            kept.append(fill(ring, 0))

    epoch()
    growths = ring.growths
    for _ in range(5):
        epoch()
    assert ring.growths == growths


def test_keeping_every_label_keeps_no_image():
    ring = make()
    labels = [fill(ring, number)[0]["label"] for number in range(60)]
    assert [label[0] for label in labels] == list(range(60))
    assert ring.allocated_bytes <= 60 * 4 * 8 + 5 * 4 * 64 * 4


def test_any_view_keeps_the_memory_whatever_it_was_made_through():
    import torch

    ring = make()
    makers = [
        lambda a: a[2:3],
        lambda a: a.reshape(-1).view(np.uint8),
        lambda a: memoryview(a),
        lambda a: torch.from_numpy(a)[1],
        lambda a: np.asarray(torch.from_numpy(a).view(-1)),
        lambda a: np.frombuffer(a.data, np.float32),
    ]
    kept = [maker(fill(ring, 7)[0]["image"]) for maker in makers]
    for number in range(30):
        fill(ring, 100 + number)
    for view in kept:
        raw = np.asarray(view).reshape(-1)
        assert (raw.view(np.float32) == 7).all()


def test_a_batch_in_a_reference_cycle_comes_back_with_the_garbage_collector():
    ring = make()
    one = 4 * (64 * 4 + 8)
    for number in range(30):
        batch = fill(ring, number)[0]
        cycle = {"batch": batch}
        cycle["self"] = cycle
    del batch, cycle
    gc.collect()
    fill(ring, 0)
    assert ring.allocated_bytes <= 5 * one


def test_batches_may_be_let_go_in_other_threads():
    ring = make()
    kept = [fill(ring, number)[0] for number in range(40)]
    halves = [kept[::2], kept[1::2]]
    del kept

    def drop(half):
        while half:
            half.pop()

    threads = [threading.Thread(target=drop, args=(half,)) for half in halves]
    for thread in threads:
        thread.start()
    for number in range(40):
        fill(ring, number)
    for thread in threads:
        thread.join(20)
    fill(ring, 0)
    fill(ring, 0)
    assert ring.allocated_bytes <= 5 * 4 * (64 * 4 + 8)


@pytest.mark.parametrize(("group_bytes", "group"), [(1, 1), (1056, 1), (2 * 1056, 2), (10 * 1056 + 5, 10)])
def test_a_group_holds_as_many_batches_as_its_bytes_allow_but_one_at_least(group_bytes, group):
    assert make(group_bytes).largest_group == group
    assert make(group_bytes).batches_of(USUAL_GROUP_BYTES) == group, (
        "of usual size, as far as the largest allows"
    )


def test_groups_are_usually_smaller_than_they_may_be():
    ring = Ring({"image": ((1 << 18,), np.dtype("float32"))}, 4)
    assert (ring.batches_of(USUAL_GROUP_BYTES), ring.largest_group) == (2, 16)


@given(
    usual=st.integers(1, 50),
    more=st.integers(0, 50),
    waits=st.lists(st.booleans(), max_size=60),
)
def test_a_group_stays_between_one_batch_and_the_largest(usual, more, waits):
    group = GroupSize(usual, usual + more)
    for waited in waits:
        before = group.now
        group.note(has_waited=waited)
        assert 1 <= group.now <= usual + more
        assert group.now <= 2 * before


def test_a_group_grows_to_the_usual_size_then_while_its_thread_waits_and_shrinks_when_it_no_longer_does():
    group, sizes = GroupSize(8, 32), []
    for waited in [False] * 5 + [True] * 5 + [False] * 16:
        group.note(has_waited=waited)
        sizes.append(group.now)
    assert sizes[:5] == [2, 4, 8, 8, 8]
    assert sizes[5:10] == [8, 16, 16, 32, 32]
    assert sizes[-1] == 8


def test_one_wait_alone_does_not_make_groups_larger():
    group = GroupSize(4, 32)
    for waited in [False, False, True, False, True, False, True]:
        group.note(has_waited=waited)
    assert group.now == 4


def test_a_ring_without_columns_is_harmless():
    ring = make(columns={})
    group = ring.take(4)
    assert group.arrays() == {}
    assert group.hand_out(0) == {}
    group.close()
    assert ring.allocated_bytes == 0


def test_a_consumer_that_keeps_a_row_of_each_group_makes_groups_small():
    ring = Ring({"x": ((256,), np.dtype(np.float32))}, batch_size=4)
    kept = []
    for _ in range(20):
        rows = 4 if ring.is_hoarded else 4 * ring.batches_of(USUAL_GROUP_BYTES)
        group = ring.take(rows)
        group.arrays()["x"][:] = 1
        kept.append(group.hand_out(0)["x"][0])
        group.close()
    assert ring.is_hoarded
    before = ring.allocated_bytes
    group = ring.take(4)
    assert ring.allocated_bytes - before == 4 * 1024
    kept.clear()
    group.close()
    ring.take(4).close()
    assert not ring.is_hoarded
    assert ring.allocated_bytes <= 4 * ring.largest_group * 4 * 1024


def test_a_batch_that_dies_runs_no_python_in_which_ctrl_c_would_be_lost():
    ring = make()
    (batch,) = fill(ring, 1)
    called = []
    sys.setprofile(lambda _, event, __: event == "call" and called.append(event))
    try:
        batch.clear()
    finally:
        sys.setprofile(None)
    assert called == []
    assert np.all(fill(ring, 2)[0]["label"] == 2)
    assert ring.growths == len(COLUMNS), "its memory came back"
