from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
from helpers import DEADLINE_SECONDS, wait_until

from arrowcache.errors import LoaderTimeoutError
from arrowcache.reading.pipeline import BARRIER, Job, Made, Pipeline, Stream


def made(number: int) -> Made:
    return Made({"number": number}, 1, 1, 1, 0.0, None)


def job(batches: list[Made]) -> Job:
    return Job(0, [], lambda: iter([[batches.pop(0) for _ in range(len(batches))]]))


def stream_of(
    produce: Callable[[], Iterator[list[Made]]], let_go: Callable[[], None] = lambda: None
) -> Stream:
    return Stream(lambda: map(job, produce()), let_go)


def counting(numbers: range, group: int = 1) -> Stream:
    def produce():
        for first in numbers[::group]:
            yield [made(number) for number in range(first, min(first + group, numbers.stop))]

    return stream_of(produce)


def numbers(pipeline: Pipeline, stream: Stream) -> list[int]:
    found = []
    while (batch := pipeline.next(stream, DEADLINE_SECONDS)) is not None:
        found.append(batch.batch["number"])
    return found


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


@pytest.fixture(params=[0, 1, 3], ids=lambda workers: f"workers={workers}")
def pipeline(request):
    pipeline = Pipeline(prefetch=3, workers=request.param)
    pipeline.start()
    yield pipeline
    pipeline.close()


@pytest.fixture
def alone():
    """One thread begins jobs and runs them."""
    pipeline = Pipeline(prefetch=3)
    pipeline.start()
    yield pipeline
    pipeline.close()


@pytest.fixture
def crew():
    """With three threads."""
    pipeline = Pipeline(prefetch=1, workers=3)
    pipeline.start()
    yield pipeline
    pipeline.close()


@pytest.mark.parametrize("group", [1, 2, 7, 100])
def test_batches_arrive_in_step_order_then_none(pipeline, group):
    for _ in range(3):
        stream = counting(range(50), group)
        pipeline.begin(stream)
        assert numbers(pipeline, stream) == list(range(50))
        assert pipeline.next(stream, 1) is None
        pipeline.end(stream)


def test_the_producer_works_ahead_until_prefetch_batches_are_ready(alone):
    started: list[int] = []

    def produce():
        for number in range(20):
            started.append(number)
            yield [made(number)]

    stream = stream_of(produce)
    alone.begin(stream)
    wait_until(lambda: len(stream.ready) == 3, "three ready batches")
    for taken in range(1, 18):
        assert alone.next(stream, DEADLINE_SECONDS).batch["number"] == taken - 1
        wait_until(lambda: len(stream.ready) == 3, "a batch in place of the one taken")
        assert len(started) == taken + 3


def test_nothing_is_made_before_the_epoch_began_nor_after_it_ended(alone):
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

    stream = stream_of(produce)
    assert started == []
    alone.begin(stream)
    assert in_call.wait(DEADLINE_SECONDS)
    alone.end(stream)
    go_on.set()
    after = counting(range(3))
    alone.begin(after)  # one thread makes both: it is done with the first now
    assert numbers(alone, after) == [0, 1, 2]
    assert started == [0, 1]
    assert not stream.ready


def test_an_error_arrives_after_the_batches_before_it_with_its_own_traceback(pipeline):
    def produce():
        yield [made(0), made(1)]
        raise LookupError("nothing there")

    stream = stream_of(produce)
    pipeline.begin(stream)
    assert [pipeline.next(stream, DEADLINE_SECONDS).batch["number"] for _ in range(2)] == [0, 1]
    with pytest.raises(LookupError, match="nothing there") as caught:
        pipeline.next(stream, DEADLINE_SECONDS)
    assert "produce" in [entry.name for entry in caught.traceback]
    pipeline.end(stream)
    after = counting(range(3))
    pipeline.begin(after)
    assert numbers(pipeline, after) == [0, 1, 2]


def test_even_an_error_that_is_no_exception_arrives_and_the_thread_goes_on(pipeline):
    def produce():
        yield [made(0)]
        raise SystemExit(3)

    stream = stream_of(produce)
    pipeline.begin(stream)
    with pytest.raises(SystemExit):
        numbers(pipeline, stream)
    after = counting(range(3))
    pipeline.begin(after)
    assert numbers(pipeline, after) == [0, 1, 2]


def test_a_wait_for_a_batch_has_a_deadline(pipeline):
    go_on = threading.Event()

    def produce():
        assert go_on.wait(DEADLINE_SECONDS)
        yield [made(0)]

    stream = stream_of(produce)
    pipeline.begin(stream)
    with pytest.raises(LoaderTimeoutError, match=r"no batch came in 0\.05 s"):
        pipeline.next(stream, 0.05)
    go_on.set()
    assert numbers(pipeline, stream) == [0]


def test_who_waits_for_a_batch_calls_now_and_then_without_the_lock():
    calls = threading.Semaphore(0)
    go_on = threading.Event()

    def while_waiting() -> None:
        assert not pipeline._changed._is_owned(), "who waits for the lock may hold what this needs"
        calls.release()

    def produce():
        assert go_on.wait(DEADLINE_SECONDS)
        yield [made(7)]

    pipeline = Pipeline(prefetch=1, while_waiting=while_waiting)
    pipeline.start()
    stream = stream_of(produce)
    pipeline.begin(stream)
    found = []
    consumer = threading.Thread(target=lambda: found.append(pipeline.next(stream, None)))
    consumer.start()
    for _ in range(2):
        assert calls.acquire(timeout=DEADLINE_SECONDS)
    go_on.set()
    consumer.join(DEADLINE_SECONDS)
    assert [batch.batch["number"] for batch in found] == [7]
    pipeline.end(stream)
    pipeline.close()


def test_a_consumer_that_waits_is_woken_when_its_epoch_is_ended_elsewhere(pipeline):
    go_on, results = threading.Event(), []

    def produce():
        assert go_on.wait(DEADLINE_SECONDS)
        yield [made(0)]

    stream = stream_of(produce)
    pipeline.begin(stream)
    consumer = threading.Thread(target=lambda: results.append(pipeline.next(stream, None)))
    consumer.start()
    pipeline.end(stream)
    consumer.join(DEADLINE_SECONDS)
    assert results == [None]
    go_on.set()


def test_what_a_stream_reads_is_let_go_once_when_it_ends(pipeline):
    let_go = []
    stream = stream_of(lambda: iter([[made(0)]]), lambda: let_go.append(1))
    pipeline.begin(stream)
    assert numbers(pipeline, stream) == [0]
    assert let_go == [], "a consumer that is not told ends nothing"
    pipeline.end(stream)
    pipeline.end(stream)
    assert let_go == [1]
    assert not pipeline.unless_ended(stream, lambda: let_go.append(2))
    assert let_go == [1]


@pytest.mark.parametrize("workers", [0, 2])
def test_close_joins_the_thread_in_the_middle_of_an_epoch(workers):
    pipeline = Pipeline(prefetch=1, workers=workers)
    pipeline.start()
    busy = counting(range(1000))
    pipeline.begin(busy)
    assert pipeline.next(busy, DEADLINE_SECONDS).batch["number"] == 0
    pipeline.close()
    pipeline.close()
    assert not pipeline._thread.is_alive()
    wait_until(
        lambda: not [t for t in threading.enumerate() if "arrowcache-worker" in t.name], "the crew to end"
    )


def test_close_from_the_pipelines_own_thread_does_not_wait_for_itself():
    pipeline = Pipeline(prefetch=1)
    pipeline.start()

    def produce():
        pipeline.close()
        yield [made(0)]

    stream = stream_of(produce)
    pipeline.begin(stream)
    pipeline._thread.join(DEADLINE_SECONDS)
    assert not pipeline._thread.is_alive()
    assert stream.error is None


@pytest.mark.slow
def test_the_threads_keep_no_batch_and_no_stream_that_is_over(pipeline):
    class Batch(dict):
        pass

    alive = []

    def jobs():
        for number in range(4):
            result = []

            def make(number=number, result=result):
                result.append(Made(Batch(number=number), 1, 1, 1, 0.0, None))
                alive.append(weakref.ref(result[0].batch))

            yield Job(number, [make], lambda result=result: iter([[result.pop()]]))
            del result, make

    stream = Stream(jobs)
    pipeline.begin(stream)
    assert numbers(pipeline, stream) == [0, 1, 2, 3]
    wait_until(lambda: not any(ref() for ref in alive), "the batches to die")
    ended = weakref.ref(stream.jobs)
    pipeline.end(stream)
    del stream, jobs
    wait_until(lambda: gc.collect() >= 0 and ended() is None, "the stream to die")


# several threads


def test_jobs_run_side_by_side_and_arrive_in_step_order(crew):
    together = threading.Barrier(3)
    order = []

    def jobs():
        for step in range(9):
            result = []

            def make(step=step, result=result):
                together.wait(DEADLINE_SECONDS)  # ends only if three run at a time
                order.append(step)
                result.append(made(step))

            yield Job(step, [make], lambda result=result: iter([result]))

    stream = Stream(jobs)
    crew.begin(stream)
    assert numbers(crew, stream) == list(range(9))
    assert sorted(order) == list(range(9))


def test_the_parts_of_one_job_run_side_by_side_before_it_is_finished(crew):
    together, ran = threading.Barrier(3), []

    def part():
        together.wait(DEADLINE_SECONDS)
        ran.append(threading.current_thread().name)

    stream = Stream(lambda: iter([Job(0, [part] * 3, lambda: iter([[made(len(ran))]]))]))
    crew.begin(stream)
    assert numbers(crew, stream) == [3]
    assert len(set(ran)) == 3


def test_a_job_that_fails_lets_those_before_it_arrive_and_none_after_it(crew):
    slow = threading.Event()

    def jobs():
        for step in range(6):

            def make(step=step):
                if step == 1:
                    assert slow.wait(DEADLINE_SECONDS)
                if step == 2:
                    slow.set()
                    raise LookupError("step 2")

            yield Job(step, [make], lambda step=step: iter([[made(step)]]))

    stream = Stream(jobs)
    crew.begin(stream)
    assert [crew.next(stream, DEADLINE_SECONDS).batch["number"] for _ in range(2)] == [0, 1]
    with pytest.raises(LookupError, match="step 2"):
        crew.next(stream, DEADLINE_SECONDS)
    crew.end(stream)
    after = counting(range(3))
    crew.begin(after)
    assert numbers(crew, after) == [0, 1, 2]


def test_a_stream_ends_at_once_although_a_job_of_it_does_not(crew):
    go_on = threading.Event()
    endless = Stream(lambda: iter([Job(0, [lambda: go_on.wait(DEADLINE_SECONDS)], lambda: iter([]))]))
    crew.begin(endless)
    crew.end(endless)
    after = counting(range(3))
    crew.begin(after)
    assert numbers(crew, after) == [0, 1, 2]
    assert not go_on.is_set()
    go_on.set()


def test_a_barrier_has_every_job_before_it_finished(crew):
    finished, seen = [], []

    def jobs():
        for step in range(5):

            def finish(step=step):
                finished.append(step)
                yield [made(step)]

            yield Job(step, [lambda: None], finish)
        yield BARRIER
        seen.extend(finished)

    stream = Stream(jobs)
    crew.begin(stream)
    assert numbers(crew, stream) == list(range(5))
    assert seen == list(range(5))


def test_jobs_that_were_not_begun_when_the_stream_ended_never_are(crew):
    began, go_on = [], threading.Event()

    def jobs():
        for step in range(100):

            def make(step=step):
                began.append(step)
                assert go_on.wait(DEADLINE_SECONDS)

            yield Job(step, [make], lambda: iter([]))

    stream = Stream(jobs)
    crew.begin(stream)
    wait_until(lambda: len(began) == 3, "each thread to be busy")
    crew.end(stream)
    after = counting(range(2))
    crew.begin(after)
    assert numbers(crew, after) == [0, 1]
    go_on.set()
    crew.close()
    assert len(began) == 3


def test_an_end_that_was_interrupted_is_finished_by_the_next(alone):
    calls = []

    def let_go():
        calls.append(len(calls))
        if len(calls) == 1:
            raise KeyboardInterrupt

    stream = stream_of(lambda: iter([[made(0)]]), let_go)
    alone.begin(stream)
    with pytest.raises(KeyboardInterrupt):
        alone.end(stream)
    for _ in range(2):
        alone.end(stream)
    assert calls == [0, 1]


def test_what_fails_after_its_stream_has_ended_keeps_nothing(alone):
    inside, go_on, local = threading.Event(), threading.Event(), []

    def fail():
        kept = Kept()
        local.append(weakref.ref(kept))
        inside.set()
        assert go_on.wait(DEADLINE_SECONDS)
        raise LookupError(kept)

    stream = Stream(lambda: iter([Job(0, [fail], lambda: iter(()))]))
    alone.begin(stream)
    assert inside.wait(DEADLINE_SECONDS)
    alone.end(stream)
    gc.disable()
    try:
        go_on.set()
        wait_until(lambda: local[0]() is None, "the failure's frame to be let go")
    finally:
        gc.enable()


class Kept:
    pass


@pytest.mark.parametrize("workers", [0, 2])
def test_its_threads_do_not_take_the_processor_of_who_wakes_them(workers):
    def produce():
        found.append(os.sched_getscheduler(0))

    found: list[int] = []
    pipeline = Pipeline(prefetch=3, workers=workers)
    pipeline.start()
    stream = Stream(lambda: iter([Job(0, [produce], lambda: iter([[made(0)]]))]))
    pipeline.begin(stream)
    assert numbers(pipeline, stream) == [0]
    pipeline.close()
    assert found == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_where_threads_may_not_be_patient_they_work_as_ever(monkeypatch):
    def refuse(*_: object) -> None:
        refused.append(threading.current_thread().name)
        raise PermissionError(1, "a sandbox forbids it")

    refused: list[str] = []
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    pipeline = Pipeline(prefetch=3)
    pipeline.start()
    stream = counting(range(5))
    pipeline.begin(stream)
    assert numbers(pipeline, stream) == list(range(5))
    pipeline.close()
    assert refused == ["arrowcache-loader"]
