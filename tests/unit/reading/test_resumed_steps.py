"""The steps of a planned epoch of which segments are gone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from arrowcache.reading.order import EpochOrder, ResumedSteps, Shard
from arrowcache.reading.plan import SHUFFLES, Plan
from arrowcache.storage.layout import SegmentInfo


@given(
    rows=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    gone=st.sets(st.integers(0, 11)),
    batch_size=st.integers(1, 40),
    world=st.integers(1, 4),
    shuffle=st.sampled_from(SHUFFLES),
    drop_last=st.booleans(),
    workers=st.integers(1, 3),
)
def test_every_row_that_is_there_comes_once_and_ranks_have_equally_many_steps(
    rows, gone, batch_size, world, shuffle, drop_last, workers
):
    seqs = np.arange(len(rows), dtype=np.int64) * 2 + 5
    plan = Plan(3, 1, shuffle, None, 40, batch_size, seqs, np.array(rows, np.int64))
    kept = [index for index in range(len(rows)) if index not in gone]
    present = [SegmentInfo(int(seqs[i]), rows[i], "", 1, 1, 0.0) for i in kept]
    starts = np.cumsum([0, *rows])
    planned = [number for index in kept for number in range(starts[index], starts[index + 1])]
    first_of = np.cumsum([0, *(rows[index] for index in kept)])  # in the numbering of what is there

    ranks = [ResumedSteps(plan, present, batch_size, Shard(rank, world), drop_last) for rank in range(world)]
    whole = EpochOrder(plan, batch_size * world, Shard(), drop_last)
    padded = world > 1 and not drop_last and len(kept) == len(rows)
    for step in range(whole.steps):
        there = set(whole.batches(step, step + 1).tolist()) & set(planned)
        parts = [rank.batches(step, step + 1) for rank in ranks]
        found = [planned[number] for part in parts for number in part.tolist()]
        assert len({len(part) > 0 for part in parts}) == 1, "a step is left out by all or by none"
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        if found and not (padded and step == whole.steps - 1):
            assert sorted(found) == sorted(there)
        elif not found:
            assert len(there) < world
        assert ranks[0].segments_span(step).start <= min(
            (int(first_of.searchsorted(n, side="right")) - 1 for part in parts for n in part.tolist()),
            default=len(kept),
        )
    if world == 1:
        lost = sum(ranks[0].lost_rows(range(whole.steps)[worker::workers]) for worker in range(workers))
        assert lost == len(whole.batches(0, whole.steps)) - sum(
            len(ranks[0].batches(step, step + 1)) for step in range(whole.steps)
        )


def test_lost_rows_are_counted_in_an_epoch_of_any_length():
    rows = np.full(10, 3000)
    plan = Plan(3, 1, "rows", None, 40, 7, np.arange(10), rows)
    present = [SegmentInfo(seq, 3000, "", 1, 1, 0.0) for seq in range(10) if seq != 4]
    steps = range(EpochOrder(plan, 7, Shard(), True).steps)
    planned = EpochOrder(plan, 7, Shard(), True).batches(0, len(steps))
    of_the_gone = (planned >= 12_000) & (planned < 15_000)
    assert ResumedSteps(plan, present, 7, Shard(), True).lost_rows(steps) == of_the_gone.sum() > 2900
