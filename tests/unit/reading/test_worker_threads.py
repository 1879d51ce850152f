"""Worker threads: functions run in order and side by side; whoever waits gets what they gave or raised."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
from helpers import DEADLINE_SECONDS, limit, wait_until

from arrowcache.errors import WorkerError
from arrowcache.limits import Limits
from arrowcache.reading.worker_threads import CancelledError, WorkerThreads


class Kept:
    pass


@pytest.fixture(params=[1, 3], ids=lambda size: f"size={size}")
def threads(request):
    threads = WorkerThreads(request.param)
    yield threads
    threads.close()


@pytest.fixture
def alone():
    """One thread."""
    threads = WorkerThreads(1)
    yield threads
    threads.close()


@pytest.fixture
def three():
    threads = WorkerThreads(3)
    yield threads
    threads.close()


def blocked(threads, count=1):
    """Have each thread be busy. Returns: what lets them go on, and their futures."""
    started, go_on = threading.Semaphore(0), threading.Event()

    def wait():
        started.release()
        assert go_on.wait(DEADLINE_SECONDS)

    futures = [threads.submit(wait) for _ in range(count)]
    for _ in range(count):
        assert started.acquire(timeout=DEADLINE_SECONDS)
    return go_on, futures


def test_what_a_function_gives_comes_through_its_future(threads):
    futures = [threads.submit(lambda number=number: number * number) for number in range(50)]
    assert [future.result(DEADLINE_SECONDS) for future in futures] == [n * n for n in range(50)]


def test_functions_begin_in_the_order_in_which_they_are_given(alone):
    began = []
    go_on, _ = blocked(alone)
    futures = [alone.submit(lambda number=number: began.append(number)) for number in range(20)]
    assert began == []
    go_on.set()
    futures[-1].result(DEADLINE_SECONDS)
    assert began == list(range(20))


def test_functions_run_side_by_side(three):
    together, names = threading.Barrier(3), []

    def meet():
        together.wait(DEADLINE_SECONDS)  # ends only if three run at a time
        names.append(threading.current_thread().name)

    for future in [three.submit(meet) for _ in range(9)]:
        future.result(DEADLINE_SECONDS)
    assert set(names) == {f"arrowcache-worker-{number}" for number in range(3)}


def test_there_is_no_thread_before_the_first_function(new_threads):
    threads = WorkerThreads(2)
    assert not new_threads()
    for _ in range(5):
        threads.submit(lambda: None).result(DEADLINE_SECONDS)
    assert len(new_threads()) == 2
    threads.close()


@pytest.mark.parametrize("kind", [LookupError, SystemExit, KeyboardInterrupt])
def test_what_a_function_raises_comes_through_its_future_and_its_thread_goes_on(threads, kind):
    def fail():
        raise kind("nothing there")

    future = threads.submit(fail)
    with pytest.raises(kind, match="nothing there") as caught:
        future.result(DEADLINE_SECONDS)
    assert "fail" in [entry.name for entry in caught.traceback]
    futures = [threads.submit(lambda number=number: number) for number in range(6)]
    assert [future.result(DEADLINE_SECONDS) for future in futures] == list(range(6))


def test_cancelled_work_is_not_begun(alone):
    began = []
    go_on, (busy,) = blocked(alone)
    futures = [alone.submit(lambda number=number: began.append(number)) for number in range(4)]
    assert futures[0].cancel()
    assert futures[2].cancel()
    assert not busy.cancel(), "what runs is not cancelled"
    go_on.set()
    futures[3].result(DEADLINE_SECONDS)
    assert began == [1, 3]
    with pytest.raises(CancelledError):
        futures[2].result(DEADLINE_SECONDS)


def test_an_idle_thread_keeps_nothing_of_what_it_ran(alone):
    alive = []

    def make():
        alive.append(weakref.ref(kept := Kept()))
        return kept

    def fail():
        alive.append(weakref.ref(kept := Kept()))
        raise LookupError(kept)

    gc.disable()
    try:
        future = alone.submit(make)
        future.wait(DEADLINE_SECONDS)
        assert alive[0]() is not None, "its future has it"
        del future
        future = alone.submit(fail)
        assert future.wait(DEADLINE_SECONDS)
        del future
        wait_until(lambda: not any(ref() for ref in alive), "what was made to die")
    finally:
        gc.enable()


@pytest.fixture
def new_threads():
    """The living threads that were started since the test began."""
    before = set(threading.enumerate())
    return lambda: [thread for thread in threading.enumerate() if thread not in before]


def test_close_waits_for_the_current_functions_and_ends_the_threads(new_threads, three):
    go_on, futures = blocked(three, 3)
    threads = new_threads()
    assert len(threads) == 3
    closing = threading.Thread(target=three.close)
    closing.start()
    go_on.set()
    closing.join(DEADLINE_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert all(future.done() for future in futures)
    three.close()


def test_close_waits_no_longer_than_it_may(new_threads, alone, monkeypatch):
    go_on, (busy,) = blocked(alone)
    (thread,) = new_threads()
    limit(monkeypatch, join_seconds=0.0)
    alone.close()
    assert not busy.done()
    assert thread.is_alive()
    go_on.set()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive(), "it ends after its current function"


def test_close_from_its_own_thread_does_not_wait_for_itself(new_threads, alone):
    alone.submit(alone.close).result(Limits.current.join_seconds / 2)
    wait_until(lambda: not new_threads(), "it to end")


def test_close_before_the_first_function_is_harmless():
    threads = WorkerThreads(2)
    threads.close()
    threads.close()


def test_its_threads_do_not_keep_the_interpreter_from_its_end(three):
    assert three.submit(lambda: threading.current_thread().daemon).result(DEADLINE_SECONDS)


def test_its_threads_do_not_take_the_processor_of_who_wakes_them(threads):
    futures = [threads.submit(lambda: os.sched_getscheduler(0)) for _ in range(5)]
    assert {future.result(DEADLINE_SECONDS) for future in futures} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_where_threads_may_not_be_patient_they_work_as_ever(alone, monkeypatch):
    def refuse(*_: object) -> None:
        refused.append(threading.current_thread().name)
        raise PermissionError(1, "a sandbox forbids it")

    refused: list[str] = []
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert alone.submit(lambda: 7).result(DEADLINE_SECONDS) == 7
    assert refused == ["arrowcache-worker-0"]


def test_a_thread_that_cannot_be_started_is_tried_again_by_the_next(new_threads, monkeypatch):
    started = []

    def refuse(self: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", refuse)
    threads, ran = WorkerThreads(3), []
    for _ in range(2):
        with pytest.raises(WorkerError, match="no thread can be started: this process has"):
            threads.submit(lambda: ran.append(1))
    monkeypatch.setattr(threading.Thread, "start", start)
    assert threads.submit(lambda: 7).result(DEADLINE_SECONDS) == 7
    assert len(new_threads()) == 3
    assert ran == [], "what was refused is not run later"
    threads.close()
    assert not new_threads()


def test_close_cancels_the_functions_that_no_thread_has_begun(alone):
    """It does not wait for them, also where a handler closes what would cancel them otherwise."""
    go_on, (busy,) = blocked(alone)
    waiting = [alone.submit(lambda: None) for _ in range(3)]

    def let_end():
        wait_until(waiting[-1].done, "it to be cancelled")
        go_on.set()

    letting = threading.Thread(target=let_end)
    letting.start()
    alone.close()
    letting.join()
    assert busy.result(DEADLINE_SECONDS) is None
    for future in waiting:
        with pytest.raises(CancelledError):
            future.result(DEADLINE_SECONDS)
