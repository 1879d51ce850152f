"""The pipeline: batches in step order, begun ahead by their consumer, however jobs and streams end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import DEADLINE_SECONDS, in_child, wait_until
from hypothesis import given
from hypothesis import strategies as st

from arrowcache.errors import LoaderTimeoutError
from arrowcache.reading.crew import Crew
from arrowcache.reading.future import Future
from arrowcache.reading.pipeline import LATER, Done, Elsewhere, Job, Made, Pipeline, Stream


class Batch(dict):
    """One that can be referred to weakly."""


class Kept:
    pass


def made(number: int) -> Made:
    return Made(Batch(number=number), 1, 1, 1, 0.0, None)


class Manual:
    """Under way until a test says that it is not; notes all that is done to it."""

    def __init__(self, *, is_done: bool = True, looks: int | None = None) -> None:
        self.is_done, self.calls, self.cancelled = threading.Event(), [], 0
        self._looks = looks  # it is done at the last of so many
        if is_done:
            self.is_done.set()

    def take(self, seconds: float) -> bool:
        self.calls.append("take")
        if self._looks is not None:
            self._looks -= 1
            return self._looks <= 0
        return self.is_done.wait(seconds)

    def go_on(self) -> None:
        self.calls.append("go_on")

    def cancel(self) -> None:
        self.cancelled += 1

    def withdraw(self) -> None:
        pass

    def abandon(self) -> None:
        self.cancelled += 1


def job(step: int, batches: int = 1, begin: Callable[[], Any] = Done) -> Job:
    return Job(step, batches, begin, lambda _: iter([made(step + number) for number in range(batches)]))


def counting(count: int, group: int = 1, begin: Callable[[], Any] = Done) -> Stream:
    def jobs() -> Iterator[Job]:
        for first in range(0, count, group):
            yield job(first, min(group, count - first), begin)

    return Stream(jobs)


def taken(pipeline: Pipeline, stream: Stream) -> int:
    batch = pipeline.next(stream, DEADLINE_SECONDS)
    assert batch is not None
    return batch.batch["number"]


def numbers(pipeline: Pipeline, stream: Stream) -> list[int]:
    found = []
    while (batch := pipeline.next(stream, DEADLINE_SECONDS)) is not None:
        found.append(batch.batch["number"])
    return found


def in_another_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()


@pytest.fixture(params=[1, 3], ids=lambda wanted: f"wanted={wanted}")
def pipeline(request):
    return Pipeline(lambda: request.param)


@pytest.fixture
def three():
    """Has three batches under way or ready."""
    return Pipeline(lambda: 3)


@pytest.fixture
def crew():
    crew = Crew(3)
    yield crew
    crew.close()


# order


@pytest.mark.parametrize("group", [1, 2, 7, 100])
def test_batches_arrive_in_step_order_then_none(pipeline, group):
    for _ in range(3):
        stream = counting(50, group)
        pipeline.begin(stream)
        assert numbers(pipeline, stream) == list(range(50))
        assert pipeline.next(stream, 1) is None
        pipeline.end(stream)


@given(
    st.lists(
        st.one_of(st.tuples(st.integers(0, 4), st.sampled_from([None, 1, 2, 5])), st.just(LATER)),
        max_size=20,
    ),
    st.integers(1, 9),
    st.booleans(),
)
def test_any_jobs_give_all_their_batches_in_order(plan, wanted, is_begun):
    """A job is done at once, or at some look."""
    count = 0

    def jobs() -> Iterator[Job]:
        nonlocal count
        for each in plan:
            if each is LATER:
                if stream.begun or stream.ready:
                    yield each
            else:
                batches, looks = each
                count += batches
                begin = Done if looks is None else lambda looks=looks: Manual(looks=looks)
                yield job(count - batches, batches, begin)

    stream, pipeline = Stream(jobs), Pipeline(lambda: wanted)
    if is_begun:
        pipeline.begin(stream)
    assert numbers(pipeline, stream) == list(range(count))
    assert (stream.under_way, len(stream.begun)) == (0, 0)


def test_jobs_of_a_crew_run_side_by_side_and_arrive_in_step_order(three, crew):
    together, order = threading.Barrier(3), []

    def make(step: int) -> Made:
        together.wait(DEADLINE_SECONDS)  # ends only if three run at a time
        order.append(step)
        return made(step)

    def jobs() -> Iterator[Job]:
        for step in range(9):
            begin = lambda step=step: Elsewhere(crew.submit(lambda: make(step)))  # noqa: E731
            yield Job(step, 1, begin, lambda done: iter([done.future.result()]))

    stream = Stream(jobs)
    three.begin(stream)
    assert numbers(three, stream) == list(range(9))
    assert sorted(order) == list(range(9))


def test_what_ended_first_waits_for_what_was_begun_before_it(three):
    first, second = Manual(is_done=False), Manual()
    stream = Stream(lambda: iter([job(0, 1, lambda: first), job(1, 1, lambda: second)]))
    with pytest.raises(LoaderTimeoutError):
        three.next(stream, 0)
    first.is_done.set()
    assert numbers(three, stream) == [0, 1]


# how far ahead


def test_jobs_are_begun_until_enough_batches_are_under_way_or_ready(three):
    begun: list[int] = []

    def jobs() -> Iterator[Job]:
        for step in range(20):
            yield job(step, 1, lambda step=step: begun.append(step) or Done())

    stream = Stream(jobs)
    three.begin(stream)
    assert begun == [0, 1, 2]
    for number in range(20):
        assert taken(three, stream) == number
        assert begun == list(range(min(20, number + 3)))


def test_a_job_of_many_batches_counts_as_so_many(three):
    begun: list[int] = []

    def jobs() -> Iterator[Job]:
        for step in range(0, 20, 2):
            yield job(step, 2, lambda step=step: begun.append(step) or Done())

    stream = Stream(jobs)
    three.begin(stream)
    assert begun == [0, 2]
    assert taken(three, stream) == 0
    assert begun == [0, 2]
    assert taken(three, stream) == 1
    assert begun == [0, 2], "as many as are wanted were under way when it was asked"
    assert taken(three, stream) == 2
    assert begun == [0, 2, 4]
    three.end(stream)


def test_how_many_are_wanted_may_change():
    wanted, begun = 1, []

    def jobs() -> Iterator[Job]:
        for step in range(20):
            yield job(step, 1, lambda step=step: begun.append(step) or Done())

    pipeline, stream = Pipeline(lambda: wanted), Stream(jobs)
    taken(pipeline, stream)
    assert len(begun) == 1
    wanted = 5
    taken(pipeline, stream)
    assert len(begun) == 6
    wanted = 1
    for _ in range(4):
        taken(pipeline, stream)
    assert len(begun) == 6
    pipeline.end(stream)


def test_nothing_is_made_before_the_epoch_began_nor_after_it_ended(three):
    asked: list[int] = []

    def jobs() -> Iterator[Job]:
        for step in range(9):
            asked.append(step)
            yield job(step)

    stream = Stream(jobs)
    assert asked == []
    three.begin(stream)
    three.end(stream)
    assert asked == [0, 1, 2]
    assert three.next(stream, 0) is None
    three.begin(stream)
    assert asked == [0, 1, 2]
    assert not stream.ready


def test_a_job_that_was_asked_for_while_the_stream_ended_is_not_begun(three):
    begun = []

    def jobs() -> Iterator[Job]:
        yield job(0)
        in_another_thread(lambda: three.end(stream))
        yield job(1, 1, lambda: begun.append(1) or Done())

    stream = Stream(jobs)
    three.begin(stream)
    assert three.next(stream, 0) is None
    assert begun == []
    assert not stream.begun


def test_what_is_under_way_goes_on_at_each_step(three):
    pending = [Manual() for _ in range(3)]
    stream = Stream(lambda: iter([job(step, 1, lambda step=step: pending[step]) for step in range(3)]))
    three.begin(stream)
    assert [each.calls for each in pending] == [[], [], []]
    taken(three, stream)
    before = pending[2].calls.count("go_on")
    assert before
    assert "take" not in pending[2].calls
    taken(three, stream)
    assert pending[2].calls.count("go_on") > before
    three.end(stream)


# later


def test_what_comes_later_is_asked_for_in_a_later_step():
    pending, asked = [Manual(is_done=False) for _ in range(2)], []

    def jobs() -> Iterator[Job]:
        yield job(0, 1, lambda: pending[0])
        yield job(1, 2, lambda: pending[1])
        while stream.begun or stream.ready:
            asked.append(len(stream.ready))
            yield LATER
        asked.append("all are delivered")
        yield job(3)

    pipeline, stream = Pipeline(lambda: 5), Stream(jobs)
    pipeline.begin(stream)
    for number, each in enumerate(pending):
        each.is_done.set()
        assert taken(pipeline, stream) == number
    assert taken(pipeline, stream) == 2
    assert set(asked) <= {0, 1, 2}
    assert numbers(pipeline, stream) == [3]
    assert asked[-1] == "all are delivered"


# errors


class FailingError(Exception):
    pass


def fail(kind: type[BaseException]) -> Any:
    raise kind("nothing there")


def result_of(done: Elsewhere) -> Iterator[Made]:
    future = done.future
    del done
    try:
        return iter([future.result()])
    finally:
        del future  # it has the error, whose traceback has this frame


class FailingTake(Manual):
    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self._kind = kind

    def take(self, seconds: float) -> bool:
        return fail(self._kind)


def failing(kind: type[BaseException], where: str, *after: Job) -> Stream:
    """Three batches, then an error."""

    def finish(_: Any) -> Iterator[Made]:
        yield made(2)
        fail(kind)

    def jobs() -> Iterator[Job]:
        yield job(0)
        yield job(1) if where == "finish" else job(1, 2)
        if where == "jobs":
            fail(kind)
        elif where == "begin":
            yield job(3, 1, lambda: fail(kind))
        elif where == "take":
            yield job(3, 1, lambda: FailingTake(kind))
        elif where == "finish":
            yield Job(2, 2, Done, finish)
        elif where == "future":
            (future := Future()).set_exception(kind("nothing there"))
            yield Job(3, 1, lambda: Elsewhere(future), result_of)
        yield from after

    return Stream(jobs)


PLACES = pytest.mark.parametrize("where", ["jobs", "begin", "take", "finish", "future"])


@PLACES
@pytest.mark.parametrize("wanted", [1, 3, 9])
def test_an_error_arrives_after_the_batches_before_it(where, wanted):
    begun, last = [], job(9, 1, lambda: begun.append(9) or Manual())
    pipeline = Pipeline(lambda: wanted)
    stream = failing(FailingError, where, last)
    pipeline.begin(stream)
    assert [taken(pipeline, stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(FailingError, match="nothing there") as caught:
        pipeline.next(stream, DEADLINE_SECONDS)
    if where != "future":
        assert "fail" in [entry.name for entry in caught.traceback], "with its own traceback"
    pipeline.end(stream)
    after = counting(3)
    pipeline.begin(after)
    assert numbers(pipeline, after) == [0, 1, 2]


@PLACES
def test_even_an_error_that_is_no_exception_arrives_and_the_pipeline_goes_on(where):
    pipeline = Pipeline(lambda: 1)
    stream = failing(SystemExit, where)
    with pytest.raises(SystemExit):
        numbers(pipeline, stream)
    pipeline.end(stream)
    assert numbers(pipeline, counting(3)) == [0, 1, 2]


def test_nothing_is_delivered_after_an_error_and_what_was_begun_is_cancelled(three):
    pending = Manual()
    stream = failing(FailingError, "future", job(4, 1, lambda: pending))
    with pytest.raises(FailingError):
        numbers(three, stream)
    assert pending.cancelled == 1
    assert three.next(stream, 0) is None


@pytest.mark.parametrize("where", ["jobs", "begin", "finish", "future"])
def test_an_error_and_its_frames_are_let_go_with_the_stream(where, three):
    stream, kept = failing(FailingError, where), Kept()
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(FailingError) as caught:
            numbers(three, stream)
        caught.value.kept, alive = kept, weakref.ref(kept)
        three.end(stream)
        del caught, kept, stream
        assert alive() is None
    finally:
        gc.enable()


def test_an_error_of_what_was_let_go_meanwhile_is_not_shown(three):
    """The consumer is told that its epoch has ended, and why, by who ended it."""

    def begin() -> Any:
        in_another_thread(lambda: three.end(stream))
        fail(FailingError)

    stream = Stream(lambda: iter([job(0, 1, begin)]))
    assert three.next(stream, DEADLINE_SECONDS) is None


def test_what_fails_after_its_stream_has_ended_keeps_nothing(three):
    alive = []

    def begin() -> Any:
        alive.append(weakref.ref(kept := Kept()))
        in_another_thread(lambda: three.end(stream))
        raise FailingError(kept)

    stream = Stream(lambda: iter([job(0, 1, begin)]))
    gc.disable()
    try:
        three.begin(stream)
        assert alive[0]() is None
    finally:
        gc.enable()


# waiting


def test_a_wait_for_a_batch_has_a_deadline(pipeline):
    pending = Manual(is_done=False)
    stream = counting(1, 1, lambda: pending)
    pipeline.begin(stream)
    with pytest.raises(LoaderTimeoutError, match=r"no batch came in 0\.05 s"):
        pipeline.next(stream, 0.05)
    pending.is_done.set()
    assert numbers(pipeline, stream) == [0]


def test_who_waits_for_a_batch_calls_now_and_then_without_the_lock():
    calls = []

    def while_waiting() -> None:
        is_free = []

        def try_it() -> None:
            if pipeline._lock.acquire(blocking=False):
                is_free.append(1)
                pipeline._lock.release()

        in_another_thread(try_it)
        assert is_free, "who waits for the lock may hold what this needs"
        calls.append(1)
        if len(calls) == 3:
            pending.is_done.set()

    pending = Manual(is_done=False)
    pipeline = Pipeline(lambda: 1, while_waiting)
    assert numbers(pipeline, counting(1, 1, lambda: pending)) == [0]
    assert len(calls) == 3


def test_what_a_wait_calls_may_fail():
    pending = Manual(is_done=False)
    pipeline = Pipeline(lambda: 1, lambda: fail(FailingError))
    stream = counting(1, 1, lambda: pending)
    with pytest.raises(FailingError):
        pipeline.next(stream, None)
    pipeline.end(stream)
    assert pending.cancelled == 1


def test_a_consumer_that_waits_is_told_when_its_epoch_is_ended_elsewhere(pipeline):
    pending, results = Manual(is_done=False), []
    stream = counting(1, 1, lambda: pending)
    consumer = threading.Thread(target=lambda: results.append(pipeline.next(stream, None)))
    consumer.start()
    wait_until(lambda: "take" in pending.calls, "it to wait")
    pipeline.end(stream)
    consumer.join(DEADLINE_SECONDS)
    assert results == [None]
    assert pending.cancelled == 1, "by its consumer, who was at it"
    assert not stream.begun


def test_a_stream_that_ends_while_its_consumer_waits_is_not_touched_by_who_ends_it():
    in_take, go_on, touched = threading.Event(), threading.Event(), []

    class Slow(Manual):
        def take(self, seconds: float) -> bool:
            in_take.set()
            assert go_on.wait(DEADLINE_SECONDS)
            return False

        def cancel(self) -> None:
            touched.append(threading.current_thread())

    pipeline, slow = Pipeline(lambda: 1), Slow()
    stream = counting(1, 1, lambda: slow)
    consumer = threading.Thread(target=lambda: pipeline.next(stream, None))
    consumer.start()
    assert in_take.wait(DEADLINE_SECONDS)
    pipeline.end(stream)
    assert touched == []
    go_on.set()
    consumer.join(DEADLINE_SECONDS)
    assert touched == [consumer]


def test_a_consumer_may_end_its_stream_while_it_waits():
    """As a handler of a signal does, which closes the loader."""
    looks: list[bool] = []

    class Looked(Manual):
        def take(self, seconds: float) -> bool:
            looks.append(self.cancelled > 0)
            return False

    pending = Looked()
    stream = counting(1, 1, lambda: pending)
    pipeline = Pipeline(lambda: 1, lambda: pipeline.end(stream))
    assert pipeline.next(stream, None) is None
    assert pending.cancelled == 1
    assert True not in looks, "what was cancelled is not taken"


# the end


def test_what_a_stream_reads_is_let_go_once_when_it_ends(pipeline):
    let_go = []
    stream = Stream(lambda: iter([job(0)]), lambda: let_go.append(1))
    pipeline.begin(stream)
    assert numbers(pipeline, stream) == [0]
    assert let_go == [], "a consumer that is not told ends nothing"
    assert pipeline.unless_ended(stream, lambda: let_go.append(0))
    assert let_go.pop() == 0
    pipeline.end(stream)
    pipeline.end(stream)
    assert let_go == [1]
    assert not pipeline.unless_ended(stream, lambda: let_go.append(2))
    assert let_go == [1]


def test_a_stream_may_be_ended_where_another_may_not_end(three):
    """As the garbage collector does, anywhere."""
    stream, other = counting(5), counting(5)
    three.begin(other)
    assert three.unless_ended(stream, lambda: three.end(other))
    assert three.next(other, 0) is None


def test_what_was_begun_is_cancelled_before_anything_is_let_go(three):
    pending, order = [Manual() for _ in range(3)], []
    stream = Stream(
        lambda: iter([job(step, 1, lambda step=step: pending[step]) for step in range(3)]),
        lambda: order.append([each.cancelled for each in pending]),
    )
    three.begin(stream)
    assert [each.cancelled for each in pending] == [0, 0, 0]
    three.end(stream)
    three.end(stream)
    assert order == [[1, 1, 1]]
    assert [each.cancelled for each in pending] == [1, 1, 1]


def test_a_stream_ends_at_once_although_a_job_of_it_does_not(three, crew):
    started, go_on = threading.Semaphore(0), threading.Event()
    futures = []

    def wait() -> None:
        started.release()
        assert go_on.wait(DEADLINE_SECONDS)

    def begin() -> Elsewhere:
        futures.append(crew.submit(wait))
        return Elsewhere(futures[-1])

    endless = counting(100, 1, begin)
    pipeline = Pipeline(lambda: 5)
    pipeline.begin(endless)
    for _ in range(3):
        assert started.acquire(timeout=DEADLINE_SECONDS)
    pipeline.end(endless)
    assert [future.done() for future in futures] == [False] * 3 + [True] * 2
    assert numbers(three, counting(3)) == [0, 1, 2]
    go_on.set()


def test_an_end_that_was_interrupted_is_finished_by_the_next(three):
    calls = []

    def let_go() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise KeyboardInterrupt

    stream = Stream(lambda: iter([job(0)]), let_go)
    three.begin(stream)
    with pytest.raises(KeyboardInterrupt):
        three.end(stream)
    for _ in range(2):
        three.end(stream)
    assert calls == [0, 1]


def test_an_end_that_was_interrupted_between_two_jobs_is_finished_by_the_next(three):
    class Interrupted(Manual):
        def cancel(self) -> None:
            super().cancel()
            if self.cancelled == 1:
                raise KeyboardInterrupt

    pending, let_go = [Interrupted(), Manual(), Manual()], []
    stream = Stream(
        lambda: iter([job(step, 1, lambda step=step: pending[step]) for step in range(3)]),
        lambda: let_go.append(1),
    )
    three.begin(stream)
    with pytest.raises(KeyboardInterrupt):
        three.end(stream)
    assert let_go == [], "what is let go may be read still"
    for _ in range(2):
        three.end(stream)
    assert all(each.cancelled for each in pending)
    assert let_go == [1]
    assert three.next(stream, 0) is None


@pytest.mark.parametrize("where", ["jobs", "begin", "take", "go_on", "finish"])
def test_ctrl_c_anywhere_leaves_a_stream_that_can_be_ended(where, three):
    class Pressed(Manual):
        def take(self, seconds: float) -> bool:
            return fail(KeyboardInterrupt) if where == "take" else super().take(seconds)

        def go_on(self) -> None:
            if where == "go_on":
                fail(KeyboardInterrupt)

    pending, let_go = [Pressed(), Pressed()], []

    def jobs() -> Iterator[Job]:
        finish = (lambda _: fail(KeyboardInterrupt)) if where == "finish" else (lambda _: iter([made(0)]))
        yield Job(0, 1, lambda: pending[0], finish)
        yield job(1, 1, lambda: pending[1])
        if where == "jobs":
            fail(KeyboardInterrupt)
        yield job(2, 1, lambda: fail(KeyboardInterrupt) if where == "begin" else Done())

    stream = Stream(jobs, lambda: let_go.append([each.cancelled for each in pending]))
    with pytest.raises(KeyboardInterrupt):
        numbers(three, stream)
    in_another_thread(lambda: three.end(stream))
    assert let_go == [[0 if where in ("finish", "go_on") else 1, 1]]
    assert not stream.begun


def test_who_was_interrupted_while_it_waited_may_wait_on(three):
    class Pressed(Manual):
        def take(self, seconds: float) -> bool:
            if not self.calls.count("take"):
                self.calls.append("take")
                raise KeyboardInterrupt
            return super().take(seconds)

    stream = counting(4, 2, Pressed)
    with pytest.raises(KeyboardInterrupt):
        three.next(stream, None)
    found = []
    while len(found) < 4:
        try:
            found.append(taken(three, stream))
        except KeyboardInterrupt:
            pass
    assert found == [0, 1, 2, 3]


def test_a_child_does_not_take_the_batches_of_who_forked_it(three):
    let_go = []
    stream = Stream(lambda: iter([job(0)]), lambda: let_go.append(1))
    three.begin(stream)

    def body() -> None:
        with pytest.raises(ValueError, match="belongs to the process that forked this one"):
            three.next(stream, 0)
        three.end(stream)
        assert stream.ended
        assert let_go == [], "it is the parent's"

    with in_child(body):
        pass
    assert numbers(three, stream) == [0]
    three.end(stream)
    assert let_go == [1]


# what is kept


@pytest.mark.parametrize("is_finished", [False, True])
def test_nothing_keeps_a_batch_that_was_delivered_nor_a_stream_that_is_over(pipeline, crew, is_finished):
    alive: list[weakref.ref[Any]] = []

    def jobs() -> Iterator[Job]:
        for step in range(4):

            def make(step: int = step) -> Made:
                one = made(step)
                alive.append(weakref.ref(one.batch))
                return one

            yield Job(
                step,
                1,
                lambda make=make: Elsewhere(crew.submit(make)),
                lambda done: iter((done.future.result(),)),
            )
            del make

    stream = Stream(jobs)
    gc.collect()
    gc.disable()
    try:
        pipeline.begin(stream)
        for _ in range(4 if is_finished else 2):
            taken(pipeline, stream)
        if is_finished:
            assert pipeline.next(stream, 0) is None
        ended = weakref.ref(stream.jobs)
        pipeline.end(stream)
        del jobs
        wait_until(lambda: not any(ref() for ref in alive), "the batches to die")
        assert ended() is None
    finally:
        gc.enable()


def test_what_was_under_way_is_let_go_at_the_end(three):
    pending = [Manual() for _ in range(3)]
    alive = [weakref.ref(each) for each in pending]
    stream = Stream(lambda: iter([job(step, 1, pending.pop) for step in range(3)]))
    three.begin(stream)
    assert pending == []
    gc.disable()
    try:
        three.end(stream)
        assert not any(ref() for ref in alive)
    finally:
        gc.enable()


def test_who_was_interrupted_does_not_wait_for_what_is_under_way_and_later_does(three):
    class Recorded(Manual):
        def cancel(self) -> None:
            self.calls.append("cancel")

        def withdraw(self) -> None:
            pass

        def abandon(self) -> None:
            self.calls.append("abandon")

        def take(self, seconds: float) -> bool:
            if is_pressed:
                raise KeyboardInterrupt
            return super().take(seconds)

    for goes_on, wanted in ((False, "abandon"), (True, "cancel")):
        pending, is_pressed = [Recorded(), Recorded()], True
        pending[1].is_done.clear()
        stream = Stream(lambda made=pending: iter([job(n, 1, lambda n=n: made[n]) for n in range(2)]))
        with pytest.raises(KeyboardInterrupt):
            three.next(stream, None)
        is_pressed = False
        if goes_on:
            assert taken(three, stream) == 0
        three.end(stream)
        assert pending[1].calls[-1] == wanted
