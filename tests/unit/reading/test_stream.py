"""A stream: batches in step order, begun ahead by their consumer, however groups, epochs and it end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import DEADLINE_SECONDS, held_by_another_thread, wait_until
from hypothesis import given
from hypothesis import strategies as st

from arrowcache.reading.assembly import BatchGroup, ReadyBatch, RemoteBatches
from arrowcache.reading.epoch import WorkAhead
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import Meter
from arrowcache.reading.stream import BatchStream
from arrowcache.reading.worker_threads import Future, WorkerThreads


class Batch(dict):
    """One that can be referred to weakly."""


class Kept:
    pass


class Epoch:
    """Notes what becomes of it."""

    snapshot, order, is_large = SimpleNamespace(seqs=()), SimpleNamespace(steps=0), False

    def __init__(self, number: int = 0, let_go: Callable[[], object] = lambda: None) -> None:
        self.number, self.calls, self.is_delivered = number, [], False
        self._release = let_go

    def deliver(self) -> None:
        self.calls.append("deliver")

    def end(self, leave_to: Callable[[Any], None] = Snapshot.close, *, may_deliver: bool = False) -> None:
        if not {"let_go", "parked"} & {*self.calls}:
            self._release()
            self.calls.append("parked" if leave_to.__name__ == "park" else "let_go")
        if not may_deliver and "end" not in self.calls:
            self.calls.append("end")


class Epochs:
    """Begins one epoch after another: `first`, then what `after` gives."""

    begins_when_asked = False

    def __init__(self, first: Epoch, after: Callable[[Any, Any], Any]) -> None:
        self.first, self.progress, self.after = first, first, after
        self.taken_back, self.came = [], []

    def ahead_of(self, epoch: Epoch) -> WorkAhead:
        return iter(()), iter(()), 0

    def drop_ahead(self) -> None:
        """Nothing was taken ahead."""

    def begin(self, wait: Any) -> Epoch | None:
        return None if wait.is_cancelled() else self.first

    def begin_after(self, previous: Epoch, wait: Any = None) -> Epoch | None:
        return self.after(previous, wait)

    def begin_delivery(self, epoch: Epoch) -> None:
        self.came.append(epoch.number)
        self.progress = epoch

    def take_back(self, epoch: Epoch) -> None:
        self.taken_back.append(epoch.number)

    def skip_failed(self) -> None:
        self.came.append("error")


class Assembly:
    def __init__(self, groups: Callable[[Any], Iterator[BatchGroup]], wanted: Callable[[], int]) -> None:
        self._groups, self.wanted = groups, wanted

    def groups(self, epoch: Epoch, *, awaited: bool) -> Iterator[BatchGroup]:
        assert awaited == (epoch.number == 0)
        return self._groups(epoch)


class IdleSnapshots:
    def park(self, snapshot: Any) -> None:
        raise AssertionError

    def drop(self, ended: Any = None) -> None:
        """Nothing is parked."""


def made(number: int, epoch: Any = None) -> ReadyBatch:
    return ReadyBatch(Batch(number=number), 1, 1, 1, 0.0, epoch)


class Manual(BatchGroup):
    """Under way until a test says that it is not; notes all that is done to it."""

    is_in_parts = True

    def __init__(
        self,
        step: int = 0,
        batches: int = 1,
        *,
        epoch: Any = None,
        is_done: bool = True,
        looks: int | None = None,
    ) -> None:
        super().__init__(epoch, batches)
        self.step = step
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

    def advance(self) -> None:
        self.calls.append("advance")

    def made(self) -> Iterator[ReadyBatch]:
        return iter([made(self.step + number, self.epoch) for number in range(self.batches)])

    def cancel(self, seconds: float | None = None) -> bool:
        self.calls.append("withdraw" if seconds == 0 else "cancel")
        self.cancelled += seconds != 0
        return seconds != 0


class Stream(BatchStream):
    """A stream whose test knows what it was made of."""

    def __init__(self, epochs: Epochs, assembly: Assembly, *, endless: bool) -> None:
        self.epochs, self.assembly, self.meter = epochs, assembly, Meter()
        super().__init__(epochs, assembly, IdleSnapshots(), self.meter, endless=endless)


def stream_of(
    groups: Callable[[], Iterator[BatchGroup]],
    wanted: int | Callable[[], int] = 3,
    *,
    let_go: Callable[[], object] = lambda: None,
) -> Stream:
    """A stream of one epoch, which has begun."""
    how_many = wanted if callable(wanted) else lambda: wanted
    epochs = Epochs(Epoch(0, let_go), lambda *_: None)
    stream = Stream(epochs, Assembly(lambda _: groups(), how_many), endless=False)
    assert stream.begin(lambda: False)
    return stream


def endless_of(
    steps: int, after: Callable[[Any, Any], Any], wanted: int = 3, group: Callable[..., BatchGroup] = Manual
) -> Stream:
    """A stream of epochs of so many steps, of which the next one is as `after` says."""

    def groups(epoch: Any) -> Iterator[BatchGroup]:
        for step in range(steps):
            yield group(10 * epoch.number + step, epoch=epoch)

    stream = Stream(Epochs(Epoch(), after), Assembly(groups, lambda: wanted), endless=True)
    assert stream.begin(lambda: False)
    return stream


def of(*groups: BatchGroup | Callable[[], BatchGroup]) -> Callable[[], Iterator[BatchGroup]]:
    """Gives these groups, of which some are begun when they are asked for."""

    def begin() -> Iterator[BatchGroup]:
        for each in groups:
            yield each if isinstance(each, BatchGroup) else each()

    return begin


def counting(count: int, batches: int = 1) -> Callable[[], Iterator[BatchGroup]]:
    return lambda: (Manual(first, min(batches, count - first)) for first in range(0, count, batches))


def taken(stream: BatchStream) -> int:
    batch = stream.next(DEADLINE_SECONDS)
    assert batch is not None
    return batch.batch["number"]


def numbers(stream: BatchStream) -> list[int]:
    found = []
    while (batch := stream.next(DEADLINE_SECONDS)) is not None:
        found.append(batch.batch["number"])
    return found


def in_another_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()


@pytest.fixture(params=[1, 3], ids=lambda wanted: f"wanted={wanted}")
def wanted(request):
    return request.param


@pytest.fixture
def threads():
    threads = WorkerThreads(3)
    yield threads
    threads.close()


# order


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([None, 1, 2, 5])), max_size=20), st.integers(1, 9)
)
def test_any_jobs_give_all_their_batches_in_order(plan, wanted):
    """A group is done at once, or at some look."""
    count = 0

    def groups() -> Iterator[BatchGroup]:
        nonlocal count
        for batches, looks in plan:
            count += batches
            yield Manual(count - batches, batches, looks=looks)

    stream = stream_of(groups, wanted)
    assert numbers(stream) == list(range(count))
    assert (stream.under_way, len(stream.begun)) == (0, 0)


# how far ahead


def noted(begun: list[int], count: int, batches: int = 1) -> Callable[[], Iterator[BatchGroup]]:
    def groups() -> Iterator[BatchGroup]:
        for step in range(0, count, batches):
            begun.append(step)
            yield Manual(step, batches)

    return groups


def test_jobs_are_begun_until_enough_batches_are_under_way_or_ready():
    begun: list[int] = []
    stream = stream_of(noted(begun, 20))
    assert begun == [0, 1, 2]
    for number in range(20):
        assert taken(stream) == number
        assert begun == list(range(min(20, number + 3)))


def test_a_job_of_many_batches_counts_as_so_many():
    begun: list[int] = []
    stream = stream_of(noted(begun, 20, 2))
    assert begun == [0, 2]
    assert taken(stream) == 0
    assert begun == [0, 2]
    assert taken(stream) == 1
    assert begun == [0, 2], "as many as are wanted were under way when it was asked"
    assert taken(stream) == 2
    assert begun == [0, 2, 4]
    stream.close()


def test_how_many_are_wanted_may_change():
    wanted, begun = 1, []
    stream = stream_of(noted(begun, 20), lambda: wanted)
    taken(stream)
    assert len(begun) == 1
    wanted = 5
    taken(stream)
    assert len(begun) == 6
    wanted = 1
    for _ in range(4):
        taken(stream)
    assert len(begun) == 6
    stream.close()


def test_a_job_that_was_asked_for_while_the_stream_ended_is_cancelled():
    late = Manual(1)

    def groups() -> Iterator[BatchGroup]:
        yield Manual(0)
        in_another_thread(stream.close)
        yield late

    stream = stream_of(groups, 1)
    assert taken(stream) == 0
    assert stream.next(0) is None
    assert late.cancelled == 1
    assert not stream.begun


def test_what_is_under_way_goes_on_at_each_step():
    pending = [Manual(step) for step in range(3)]
    stream = stream_of(of(*pending))
    taken(stream)
    before = pending[2].calls.count("advance")
    assert before
    assert "take" not in pending[2].calls
    taken(stream)
    assert pending[2].calls.count("advance") > before
    stream.close()


# one epoch after another


def test_the_next_epoch_begins_when_the_last_batch_of_one_is_under_way():
    begun = []

    def after(previous: Epoch, wait: Any) -> Epoch:
        begun.append(previous.number)
        assert wait is None
        return Epoch(previous.number + 1)

    stream = endless_of(4, after)
    assert begun == []
    assert [taken(stream) for _ in range(2)] == [0, 1]
    assert begun == []
    assert [taken(stream) for _ in range(6)] == [2, 3, 10, 11, 12, 13]
    assert begun == [0, 1]
    stream.close()


def test_an_epoch_that_has_to_wait_waits_until_all_is_delivered_and_lets_go_of_what_was_before_it():
    asked = []

    def after(previous: Epoch, wait: Any) -> Epoch | None:
        asked.append(wait is not None)
        if wait is None:
            return None
        wait.before()
        assert previous.calls == ["let_go"], "nothing is leased in a wait"
        assert not stream.begun
        assert not stream.ready
        return Epoch(previous.number + 1)

    stream = endless_of(2, after, 5)
    assert [taken(stream) for _ in range(2)] == [0, 1]
    assert asked == [False], "once, and then all is delivered first"
    assert taken(stream) == 10
    assert asked == [False, True, False]
    stream.close()


def test_an_epoch_that_began_as_the_stream_ended_is_ended():
    late = Epoch(1)

    def after(previous: Epoch, wait: Any) -> Epoch | None:
        in_another_thread(stream.close)
        return late

    stream = endless_of(4, after)
    assert [taken(stream) for _ in range(2)] == [0, 1]
    assert stream.next(None) is None
    assert late.calls == ["let_go", "end"]


def test_an_epoch_is_let_go_when_all_of_it_is_made_and_the_next_one_has_begun():
    epochs = [Epoch(number) for number in range(9)]
    pending = {}

    def group(step: int, epoch: Any) -> BatchGroup:
        pending[step] = Manual(step, epoch=epoch)
        return pending[step]

    stream = endless_of(2, lambda previous, _: epochs[previous.number + 1], 4, group)
    first = stream.epochs.first
    assert first.calls == []
    assert [taken(stream), taken(stream)] == [0, 1]
    assert first.calls == ["let_go"], "its last batch is made"
    assert epochs[1].calls == []
    stream.close()
    assert first.calls == ["let_go", "end"]


@pytest.mark.parametrize("steps", [1, 3])
def test_at_most_eight_epochs_are_begun_ahead_that_nobody_got(steps):
    begun = []

    def after(previous: Epoch, _: Any) -> Epoch:
        begun.append(previous.number + 1)
        return Epoch(previous.number + 1)

    stream = endless_of(steps, after, 1000)
    assert len(begun) == 8
    stream.close()


# what a consumer is told


def test_an_end_is_told_and_why():
    stream = stream_of(counting(2))
    stream.close("a newer one began")
    stream.close("another reason")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a newer one began: iterate anew"):
            stream.deliver(stream.next(None))
    assert not stream.has_stopped
    stream = stream_of(counting(1))
    one = stream.next(None)
    stream.close()
    with pytest.raises(StopIteration):
        stream.deliver(one)
    assert stream.has_stopped
    assert ("deliver" in stream.epochs.first.calls, stream.meter.batches) == (False, 0), (
        "its consumer got none"
    )


def test_an_epoch_of_which_nobody_asked_for_a_batch_is_taken_back():
    stream = stream_of(counting(2))
    stream.close()
    assert stream.epochs.taken_back == [0]
    assert "let_go" in stream.epochs.first.calls, "and not parked"
    stream = stream_of(counting(2))
    assert stream.next(None) is not None
    stream.close(error=GeneratorExit)
    assert stream.epochs.taken_back == []
    assert stream.epochs.first.calls == ["parked", "end"]
    assert stream.has_stopped


# errors


class FailingError(Exception):
    pass


def fail(kind: type[BaseException]) -> Any:
    raise kind("nothing there")


class FailingTake(Manual):
    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self._kind = kind

    def take(self, seconds: float) -> bool:
        return fail(self._kind)


class FailingMade(Manual):
    """Its second batch is an error."""

    def __init__(self, step: int, kind: type[BaseException]) -> None:
        super().__init__(step, 2)
        self._kind = kind

    def made(self) -> Iterator[ReadyBatch]:
        yield made(self.step)
        fail(self._kind)


def failing(
    kind: type[BaseException], where: str, *after: Callable[[], BatchGroup]
) -> Callable[[], Iterator[BatchGroup]]:
    """Three batches, then an error."""

    def groups() -> Iterator[BatchGroup]:
        yield Manual(0)
        yield Manual(1) if where == "made" else Manual(1, 2)
        if where == "groups":
            fail(kind)
        elif where == "take":
            yield FailingTake(kind)
        elif where == "made":
            yield FailingMade(2, kind)
        elif where == "future":
            (future := Future()).set_exception(kind("nothing there"))
            yield RemoteBatches(None, 1, future, lambda one: (one,))
        for each in after:
            yield each()

    return groups


PLACES = pytest.mark.parametrize("where", ["groups", "take", "made", "future"])


@PLACES
@pytest.mark.parametrize("wanted", [1, 3, 9])
@pytest.mark.parametrize("kind", [FailingError, SystemExit])
def test_an_error_arrives_after_the_batches_before_it(where, wanted, kind):
    stream = stream_of(failing(kind, where, lambda: Manual(9)), wanted)
    assert [taken(stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(kind, match="nothing there") as caught:
        stream.next(DEADLINE_SECONDS)
    if where != "future":
        assert "fail" in [entry.name for entry in caught.traceback], "with its own traceback"
    assert stream.next(0) is None
    stream.close(error=RuntimeError)
    assert stream.epochs.came == ["error"]
    assert "let_go" in stream.epochs.first.calls, "and not parked"


def test_nothing_is_delivered_after_an_error_and_what_was_begun_is_cancelled():
    pending = Manual(4)
    stream = stream_of(failing(FailingError, "future", lambda: pending))
    with pytest.raises(FailingError):
        numbers(stream)
    assert pending.cancelled == 1
    assert stream.next(0) is None


@pytest.mark.parametrize("where", ["groups", "made", "future"])
def test_an_error_and_its_frames_are_let_go_with_the_stream(where):
    kept = Kept()
    gc.collect()
    gc.disable()
    try:
        stream = stream_of(failing(FailingError, where))
        with pytest.raises(FailingError) as caught:
            numbers(stream)
        caught.value.kept, alive = kept, weakref.ref(kept)
        stream.close()
        del caught, kept, stream
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("keeps", [False, True])
def test_an_error_of_what_was_let_go_meanwhile_is_not_shown_and_keeps_nothing(keeps):
    """The consumer is told that its epoch has ended, and why, by who ended it."""
    alive = []

    def groups() -> Iterator[BatchGroup]:
        yield Manual(0)
        in_another_thread(stream.close)
        alive.append(weakref.ref(kept := Kept()))
        raise FailingError(kept if keeps else None)

    stream = stream_of(groups, 1)
    gc.disable()
    try:
        assert taken(stream) == 0
        assert stream.next(DEADLINE_SECONDS) is None
        assert alive[0]() is None
    finally:
        gc.enable()


# waiting


def test_who_waits_for_a_batch_shows_that_now_and_then_without_the_lock():
    calls = []

    def while_waiting() -> None:
        with held_by_another_thread(stream):  # who waits for its lock may hold what this needs
            pass
        calls.append(1)
        if len(calls) == 3:
            pending.is_done.set()

    pending = Manual(is_done=False)
    stream = stream_of(of(pending), 1)
    stream.meter.show = while_waiting
    assert numbers(stream) == [0]
    assert len(calls) == 3


def test_a_stream_that_ends_while_its_consumer_waits_is_not_touched_by_who_ends_it():
    in_take, go_on, touched = threading.Event(), threading.Event(), []

    class Slow(Manual):
        def take(self, seconds: float) -> bool:
            in_take.set()
            assert go_on.wait(DEADLINE_SECONDS)
            return False

        def cancel(self, seconds: float | None = None) -> bool:
            touched.append(threading.current_thread())
            return True

    stream = stream_of(of(Slow()), 1)
    consumer = threading.Thread(target=lambda: stream.next(None))
    consumer.start()
    assert in_take.wait(DEADLINE_SECONDS)
    stream.close()
    assert touched == []
    go_on.set()
    consumer.join(DEADLINE_SECONDS)
    assert touched == [consumer, consumer]


@pytest.mark.parametrize("at", ["take", "advance", "made", "is_ready"])
def test_a_handler_that_ends_its_threads_stream_leaves_the_batches_to_the_loop_that_it_interrupts(at):
    """As a handler does that closes the loader: a batch that is being begun would be cancelled."""
    ended: list[int] = []

    class Interrupted(Manual):
        def _interrupt(self, where: str) -> None:
            if where == at and not ended:
                stream.close()
                ended.append(self.cancels)

        cancels = 0

        def take(self, seconds: float) -> bool:
            self._interrupt("is_ready" if at == "is_ready" else "take")
            return super().take(seconds)

        def advance(self) -> None:
            self._interrupt("advance")

        def made(self) -> Iterator[ReadyBatch]:
            self._interrupt("made")
            return super().made()

        def cancel(self, seconds: float | None = None) -> bool:
            self.cancels += 1
            return super().cancel(seconds)

    first, second = Interrupted(0), Manual(1, is_done=False)
    stream = stream_of(of(first, second), 2)
    if at == "is_ready":
        assert stream.is_ready()
    assert (stream.next(None) is None) == (at != "made")
    assert ended == [0]
    assert (second.cancelled, stream.inside, [*stream.begun]) == (1, 0, [])


def test_who_asks_whether_a_batch_is_ready_begins_jobs_and_waits_for_none():
    first, second = Manual(0, is_done=False), Manual(1)
    stream = stream_of(of(first, second), 1)
    assert not stream.is_ready()
    first.is_done.set()
    assert stream.is_ready()
    assert taken(stream) == 0
    assert stream.is_ready()
    assert taken(stream) == 1
    assert stream.is_ready(), "its end"
    assert stream.next(None) is None
    stream.close()
    assert stream.is_ready()


def test_who_asks_whether_a_batch_is_ready_does_not_wait_for_the_next_epoch():
    def after(previous: Epoch, wait: Any) -> Epoch | None:
        return None if wait is None else Epoch(previous.number + 1)

    stream = endless_of(1, after)
    assert taken(stream) == 0
    assert not stream.is_ready()
    assert taken(stream) == 10
    stream.close()


# the end


def test_what_was_begun_is_cancelled_before_anything_is_let_go():
    pending, order = [Manual(step) for step in range(3)], []
    stream = stream_of(of(*pending), let_go=lambda: order.append([each.cancelled for each in pending]))
    assert [each.cancelled for each in pending] == [0, 0, 0]
    stream.close()
    stream.close()
    assert order == [[1, 1, 1]]
    assert [each.cancelled for each in pending] == [1, 1, 1]


@pytest.mark.parametrize("which", ["withdraw", "cancel"])
def test_an_end_that_was_interrupted_between_two_jobs_is_finished_by_the_next(which):
    class Interrupted(Manual):
        def cancel(self, seconds: float | None = None) -> bool:
            super().cancel(seconds)
            if self.calls[-1] == which and self.calls.count(which) == 1:
                raise KeyboardInterrupt
            return True

    pending, let_go = [Interrupted(0), Manual(1), Manual(2)], []
    stream = stream_of(of(*pending), let_go=lambda: let_go.append(1))
    with pytest.raises(KeyboardInterrupt):
        stream.close()
    assert let_go == [], "what is let go may be read still"
    for _ in range(2):
        stream.close()
    assert all(each.cancelled for each in pending)
    assert let_go == [1]
    assert stream.next(0) is None


# what is kept


@pytest.mark.parametrize("is_finished", [False, True])
def test_nothing_keeps_a_batch_that_was_delivered_nor_a_stream_that_is_over(wanted, threads, is_finished):
    alive: list[weakref.ref[Any]] = []

    def groups() -> Iterator[BatchGroup]:
        for step in range(4):

            def make(step: int = step) -> ReadyBatch:
                one = made(step)
                alive.append(weakref.ref(one.batch))
                return one

            yield RemoteBatches(None, 1, threads.submit(make), lambda one: (one,))
            del make

    gc.collect()
    gc.disable()
    try:
        stream = stream_of(groups, wanted)
        for _ in range(4 if is_finished else 2):
            taken(stream)
        if is_finished:
            assert stream.next(0) is None
        epoch, ended = weakref.ref(stream.epochs.first), weakref.ref(stream)
        stream.close()
        stream.epochs.first = stream.epochs.progress = None
        wait_until(lambda: not any(ref() for ref in alive), "the batches to die")
        assert epoch() is None
        del stream
        assert ended() is None
    finally:
        gc.enable()


def test_what_was_under_way_is_let_go_at_the_end():
    pending = [Manual(step) for step in range(3)]
    alive = [weakref.ref(each) for each in pending]
    stream = stream_of(of(*[pending.pop] * 3))
    assert pending == []
    gc.disable()
    try:
        stream.close()
        assert not any(ref() for ref in alive)
    finally:
        gc.enable()


def test_who_was_interrupted_does_not_wait_for_what_is_under_way_and_others_do():
    class Recorded(Manual):
        def cancel(self, seconds: float | None = None) -> bool:
            order.append((self.step, seconds))
            return seconds != 0

        def take(self, seconds: float) -> bool:
            if is_pressed:
                raise KeyboardInterrupt
            return super().take(seconds)

    for is_pressed in (True, False):
        order: list[tuple[int, float | None]] = []
        pending = [Recorded(0), Recorded(1, is_done=False)]
        stream = stream_of(of(*pending))
        if is_pressed:
            with pytest.raises(KeyboardInterrupt):
                stream.next(None)
        else:
            assert taken(stream) == 0
        stream.close()
        first = 0 if is_pressed else 1
        left = range(first, 2)
        assert order[: len(left)] == [(step, 0) for step in left], "all are withdrawn, then waited for"
        assert [step for step, _ in order[len(left) :]] == [*left]
        assert all((seconds is not None) == is_pressed for _, seconds in order[len(left) :])
