from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
from helpers import DEADLINE_SECONDS, wait_until

from arrowcache.errors import LoaderTimeoutError
from arrowcache.reading.pipeline import Clock, Epoch, Made, Pipeline


class FakeSnapshot:
    """Stands in for what an epoch reads: knows whether it was let go."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.let_go: Callable[[], None] | None = None

    def on_contention(self, let_go: Callable[[], None]) -> None:
        self.let_go = let_go

    def close(self) -> None:
        self.closed.set()


def made(number: int) -> Made:
    return Made({"number": number}, 1, 1)


def epoch_of(produce: Callable[[], Iterator[list[Made]]]) -> Epoch:
    return Epoch(FakeSnapshot(), produce)


def counting(numbers: range, group: int = 1) -> Epoch:
    def produce():
        for first in numbers[::group]:
            yield [made(number) for number in range(first, min(first + group, numbers.stop))]

    return epoch_of(produce)


def numbers(pipeline: Pipeline, epoch: Epoch) -> list[int]:
    found = []
    while (batch := pipeline.next(epoch, DEADLINE_SECONDS)) is not None:
        found.append(batch.batch["number"])
    return found


@pytest.fixture
def pipeline():
    pipeline = Pipeline(prefetch=3)
    yield pipeline
    pipeline.close()


@pytest.mark.parametrize("group", [1, 2, 7, 100])
def test_batches_arrive_in_step_order_then_none(pipeline, group):
    for _ in range(3):
        epoch = counting(range(50), group)
        pipeline.begin(epoch)
        assert numbers(pipeline, epoch) == list(range(50))
        assert pipeline.next(epoch, 1) is None
        pipeline.end(epoch)


def test_the_producer_works_ahead_until_prefetch_batches_are_ready(pipeline):
    started: list[int] = []

    def produce():
        for number in range(20):
            started.append(number)
            yield [made(number)]

    epoch = epoch_of(produce)
    pipeline.begin(epoch)
    wait_until(lambda: len(epoch.ready) == 3, "three ready batches")
    for taken in range(1, 18):
        assert pipeline.next(epoch, DEADLINE_SECONDS).batch["number"] == taken - 1
        wait_until(lambda: len(epoch.ready) == 3, "a batch in place of the one taken")
        assert len(started) == taken + 3


def test_nothing_is_made_before_the_epoch_began_nor_after_it_ended(pipeline):
    started: list[int] = []
    in_call, go_on = threading.Event(), threading.Event()

    def produce():
        started.append(0)
        yield [made(0)]
        started.append(1)
        in_call.set()
        assert go_on.wait(DEADLINE_SECONDS)
        yield [made(1)]
        started.append(2)

    epoch = epoch_of(produce)
    assert started == []
    pipeline.begin(epoch)
    assert in_call.wait(DEADLINE_SECONDS)
    pipeline.end(epoch)
    go_on.set()
    after = counting(range(3))
    pipeline.begin(after)  # one thread makes both: it is done with the first now
    assert numbers(pipeline, after) == [0, 1, 2]
    assert started == [0, 1]
    assert not epoch.ready


def test_an_error_arrives_after_the_batches_before_it_with_its_own_traceback(pipeline):
    def produce():
        yield [made(0), made(1)]
        raise LookupError("nothing there")

    epoch = epoch_of(produce)
    pipeline.begin(epoch)
    assert [pipeline.next(epoch, DEADLINE_SECONDS).batch["number"] for _ in range(2)] == [0, 1]
    with pytest.raises(LookupError, match="nothing there") as caught:
        pipeline.next(epoch, DEADLINE_SECONDS)
    assert "produce" in [entry.name for entry in caught.traceback]
    pipeline.end(epoch)
    after = counting(range(3))
    pipeline.begin(after)
    assert numbers(pipeline, after) == [0, 1, 2]


def test_even_an_error_that_is_no_exception_arrives_and_the_thread_goes_on(pipeline):
    def produce():
        yield [made(0)]
        raise SystemExit(3)

    epoch = epoch_of(produce)
    pipeline.begin(epoch)
    with pytest.raises(SystemExit):
        numbers(pipeline, epoch)
    after = counting(range(3))
    pipeline.begin(after)
    assert numbers(pipeline, after) == [0, 1, 2]


def test_a_wait_for_a_batch_has_a_deadline(pipeline):
    go_on = threading.Event()

    def produce():
        assert go_on.wait(DEADLINE_SECONDS)
        yield [made(0)]

    epoch = epoch_of(produce)
    pipeline.begin(epoch)
    with pytest.raises(LoaderTimeoutError, match=r"no batch came in 0\.05 s"):
        pipeline.next(epoch, 0.05)
    go_on.set()
    assert numbers(pipeline, epoch) == [0]


def test_a_consumer_that_waits_is_woken_when_its_epoch_is_ended_elsewhere(pipeline):
    go_on, results = threading.Event(), []

    def produce():
        assert go_on.wait(DEADLINE_SECONDS)
        yield [made(0)]

    epoch = epoch_of(produce)
    pipeline.begin(epoch)
    consumer = threading.Thread(target=lambda: results.append(pipeline.next(epoch, None)))
    consumer.start()
    pipeline.end(epoch)
    consumer.join(DEADLINE_SECONDS)
    assert results == [None]
    go_on.set()


def test_the_snapshot_of_an_ended_epoch_is_let_go_after_a_moment(pipeline):
    epoch = counting(range(3))
    pipeline.begin(epoch)
    assert numbers(pipeline, epoch) == [0, 1, 2]
    pipeline.end(epoch)
    pipeline.end(epoch)  # idempotent
    assert epoch.snapshot.closed.wait(DEADLINE_SECONDS)


def test_the_snapshot_of_an_ended_epoch_is_let_go_at_once_when_it_is_in_the_way(pipeline):
    epoch = counting(range(3))
    pipeline.begin(epoch)
    pipeline.end(epoch)
    assert epoch.snapshot.let_go is not None
    epoch.snapshot.let_go()
    assert epoch.snapshot.closed.is_set()


def test_the_next_epoch_that_ends_takes_the_place_of_the_one_before(pipeline):
    first, second = counting(range(3)), counting(range(3))
    for epoch in (first, second):
        pipeline.begin(epoch)
        pipeline.end(epoch)
    assert first.snapshot.closed.is_set()
    pipeline.drop_parked()
    assert second.snapshot.closed.is_set()
    pipeline.drop_parked()


def test_close_joins_the_thread_in_the_middle_of_an_epoch_and_lets_go():
    pipeline = Pipeline(prefetch=1)
    idle, busy = counting(range(3)), counting(range(1000))
    pipeline.begin(idle)
    pipeline.end(idle)
    pipeline.begin(busy)
    assert pipeline.next(busy, DEADLINE_SECONDS).batch["number"] == 0
    pipeline.close()
    pipeline.close()
    assert not pipeline._thread.is_alive()
    assert idle.snapshot.closed.is_set()


def test_close_from_the_pipelines_own_thread_does_not_wait_for_itself():
    pipeline = Pipeline(prefetch=1)

    def produce():
        pipeline.close()
        yield [made(0)]

    epoch = epoch_of(produce)
    pipeline.begin(epoch)
    pipeline._thread.join(DEADLINE_SECONDS)
    assert not pipeline._thread.is_alive()
    assert epoch.error is None


def test_the_thread_keeps_no_batch_and_no_epoch_that_is_over(pipeline):
    class Batch(dict):
        pass

    batches = [Batch(number=number) for number in range(4)]
    alive = [weakref.ref(batch) for batch in batches]

    def produce():
        while batches:
            yield [Made(batches.pop(0), 1, 1)]

    epoch = epoch_of(produce)
    pipeline.begin(epoch)
    assert numbers(pipeline, epoch) == [0, 1, 2, 3]
    wait_until(lambda: not any(ref() for ref in alive), "the batches to die")
    ended = weakref.ref(epoch.snapshot)
    pipeline.end(epoch)
    pipeline.drop_parked()
    del epoch
    wait_until(lambda: ended() is None, "the epoch to die")


def test_a_clock_adds_up_the_seconds_of_each_stage():
    clock = Clock()
    for stage, seconds in (("gather", 0.5), ("gather", 0.25), ("transform", 2.0)):
        clock.add(stage, seconds)
    assert clock.seconds == {"gather": 0.75, "transform": 2.0}
