"""Lifetimes: forks, finalizers, the exit and Ctrl-C, each as its users find it."""

import gc
import itertools
import os
import select
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from helpers import DEADLINE_SECONDS, in_child

from arrowcache import lifetimes
from arrowcache.lifetimes import Mutex, Origin, at_fork, cached_property, call_all, forgets_in_child, shielded
from arrowcache.native import maps


class Told:
    """What is told in a child."""

    def __init__(self, fails: bool = False) -> None:
        self.times, self._fails = 0, fails

    def forget_in_child(self) -> None:
        self.times += 1
        if self._fails:
            raise LookupError("told")


# fork


class Asked:
    """Each answer is another number."""

    def __init__(self) -> None:
        self.answers = itertools.count()

    @cached_property
    def answer(self) -> int:
        """The number."""
        return next(self.answers)


def test_a_cached_property_is_computed_once_an_object():
    one, other = Asked(), Asked()
    assert (one.answer, one.answer, next(one.answers)) == (0, 0, 1)
    assert other.answer == 0
    assert Asked.answer.__doc__ == "The number."


def test_a_child_is_not_where_its_parents_things_were_made():
    origin = Origin()

    def child() -> None:
        assert not origin.is_here
        own = Origin()
        own.require("the thing", "make another")
        with pytest.raises(
            ValueError, match=r"^the thing belongs to the process that forked .*: make another$"
        ):
            origin.require("the thing", "make another")
        with in_child(lambda: require_elsewhere(own)):
            pass

    with in_child(child):
        pass
    assert origin.is_here


def require_elsewhere(origin: Origin) -> None:
    assert not origin.is_here


def test_each_child_tells_what_lives_though_one_of_them_fails():
    things = [Told(), Told(fails=True), Told()]
    for thing in things:
        forgets_in_child(thing)
    gone = Told()
    forgets_in_child(gone)
    del gone
    gc.collect()

    def child() -> None:
        assert [thing.times for thing in things] == [1, 1, 1]
        with in_child(grandchild):
            pass

    def grandchild() -> None:
        assert [thing.times for thing in things] == [2, 2, 2]

    with in_child(child):
        pass
    assert [thing.times for thing in things] == [0, 0, 0]


def test_functions_are_called_before_a_fork_and_in_the_child():
    called = []

    def child() -> None:  # what is registered here is here only
        at_fork(lambda: called.append("before"), lambda: called.append("in child"))
        with in_child(grandchild):
            pass
        assert called == ["before"]

    def grandchild() -> None:
        assert called == ["before", "in child"]

    with in_child(child):
        pass
    assert called == []


def test_a_fork_waits_for_who_keeps_it_waiting_and_its_child_does_not():
    is_held, forked = threading.Event(), []

    def hold() -> None:
        with lifetimes.unforked:
            is_held.set()
            select.select([], [], [], 0.2)
            forked.append("not yet")

    def child() -> None:
        assert forked == ["not yet"]
        with lifetimes.unforked:  # the parent's thread has let go of it, and nobody else
            pass

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(DEADLINE_SECONDS)
    with in_child(child):
        thread.join()


def test_a_child_finds_a_mutex_free_that_a_thread_of_its_parent_has():
    mutex, is_held, is_over = Mutex("work"), threading.Event(), threading.Event()

    def hold() -> None:
        with mutex.held():
            is_held.set()
            is_over.wait(DEADLINE_SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(DEADLINE_SECONDS)

    def child() -> None:
        signal.alarm(20)
        with mutex.held():
            pass

    with in_child(child):
        pass
    is_over.set()
    thread.join()


# finalizers


def test_what_is_told_is_taken_in_at_once_in_its_order():
    mutex, taken = Mutex("work"), []
    mutex.tell(1, taken.append)
    mutex.tell(2, taken.append)
    assert taken == [1, 2]


def test_what_is_told_while_somebody_is_at_the_work_is_taken_in_by_them():
    mutex, taken = Mutex("work"), []
    with mutex.held():
        mutex.tell(1, taken.append)  # as a finalizer does, which waits for nobody
        assert taken == []
    mutex.drain(taken.append)
    assert taken == [1]

    def handle(what: int) -> None:
        taken.append(what)
        if what == 2:
            mutex.tell(3, handle)  # as the garbage collector comes in between
            assert taken == [1, 2]

    mutex.tell(2, handle)
    assert taken == [1, 2, 3]


def test_what_cannot_be_taken_in_now_comes_first_the_next_time():
    mutex, taken, is_possible = Mutex("work"), [], False

    def handle(what: int) -> bool:
        if is_possible:
            taken.append(what)
        return is_possible

    mutex.tell(1, handle)
    mutex.tell(2, handle)
    assert taken == []
    assert not mutex.is_held
    is_possible = True
    mutex.drain(handle)
    assert taken == [1, 2]


def test_what_ctrl_c_cuts_short_is_taken_in_again():
    mutex, taken = Mutex("work"), []

    def handle(what: int) -> None:
        taken.append(what)
        if len(taken) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mutex.tell(1, handle)
    mutex.tell(2, handle)
    assert taken == [1, 1, 2]


def test_all_calls_are_made_and_the_last_failure_is_raised():
    called = []

    def fail(number: int) -> None:
        called.append(number)
        raise LookupError(number)

    with pytest.raises(LookupError, match=r"^2$"):
        call_all([lambda: fail(1), lambda: fail(2), lambda: called.append(3)])
    assert called == [1, 2, 3]


def test_one_thread_at_a_time_is_at_the_work():
    mutex, at_work, both = Mutex("work"), threading.Event(), []

    def work() -> None:
        with mutex.held():
            both.append(at_work.is_set())

    with mutex.held():
        thread = threading.Thread(target=work)
        thread.start()
        assert mutex.is_held
        assert not both
        at_work.set()
    thread.join()
    assert both == [True]
    assert not mutex.is_held


def test_who_is_at_the_work_gets_an_error_and_goes_on():
    mutex = Mutex("the work")
    with mutex.held():
        with pytest.raises(RuntimeError, match=r"a signal handler has interrupted the work"), mutex.held():
            pass
        assert mutex.is_held
    with mutex.held():
        pass


@pytest.mark.timeout(60)
def test_a_handler_that_gathers_while_segments_are_mapped_is_told(cache, monkeypatch):
    snapshot, told = cache.snapshot(), []

    def handler(*_: object) -> None:
        with pytest.raises(RuntimeError, match="once the handler has returned") as raised:
            snapshot.gather([159])
        told.append(raised)

    opened = maps.File.open

    def interrupted(*arguments: object) -> object:
        signal.raise_signal(signal.SIGUSR1)
        return opened(*arguments)

    monkeypatch.setattr(maps.File, "open", interrupted)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with snapshot:
            rows = snapshot.gather(np.arange(len(snapshot)))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told
    assert all(len(column) for column in rows.values())


# exit


def test_at_exit_the_newest_ends_first_and_one_that_fails_keeps_no_other():
    script = (
        "import atexit; from arrowcache import lifetimes\n"
        "lifetimes.at_exit(lambda: print('oldest', lifetimes.is_exiting()))\n"
        "atexit.register(print, 'a library')\n"
        "lifetimes.at_exit(lambda: 1 / 0)\n"
        "lifetimes.at_exit(lambda: print('newest'))\n"
        "lifetimes.before_threads_are_joined(lambda: print('threads'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:-1] == ["threads", "newest", "oldest False", "a library"]
    assert done.stderr.count("ZeroDivisionError: ") == 1


@pytest.mark.parametrize("first", ["", "weakref.finalize(things[0], print, end='');"])
def test_what_lives_at_exit_is_finalized_before_all_of_at_exit_whoever_was_first(first):
    script = (
        f"import weakref; things = [type('Thing', (), {{}})() for _ in range(3)]; {first}\n"
        "from arrowcache import lifetimes\n"
        "lifetimes.at_exit(lambda: print('exit'))\n"
        "for number, thing in enumerate(things): lifetimes.finalizer(thing, print, number)\n"
        "thing = things.pop()\n"
        "del thing\n"
        "print('dead')\n"
    )
    said = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert said.split() == ["2", "dead", "1", "0", "exit"]


def test_what_dies_last_knows_that_the_interpreter_exits():
    script = (
        "from arrowcache import lifetimes\n"
        "class Last:\n"
        "    def __del__(self, call=lifetimes.is_exiting, say=print): say(call(), flush=True)\n"
        "last = Last()\n"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "True\n"


# Ctrl-C


@pytest.fixture
def python_raises_it():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.no_cover
def test_ctrl_c_is_raised_once_the_block_has_ended(python_raises_it):
    steps = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with shielded():
            os.kill(os.getpid(), signal.SIGINT)
            steps.append("after it came")
        steps.append("after the block")
    assert steps == ["after it came"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.no_cover
def test_ctrl_c_waits_though_another_thread_gets_the_signal(python_raises_it):
    """Python has it raised in the main thread, whichever thread the kernel gave it to."""
    is_over, steps = threading.Event(), []
    thread = threading.Thread(target=is_over.wait, args=(DEADLINE_SECONDS,))
    thread.start()

    def work() -> None:
        with shielded():
            signal.pthread_kill(thread.ident, signal.SIGINT)
            select.select([], [], [], 0.05)
            steps.append("after it came")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["after it came"]
    is_over.set()
    thread.join()


@pytest.mark.no_cover
def test_an_error_of_the_block_is_seen_beside_ctrl_c(python_raises_it):
    def work() -> None:
        with shielded():
            signal.raise_signal(signal.SIGINT)
            raise LookupError

    with pytest.raises(KeyboardInterrupt) as raised:
        work()
    assert isinstance(raised.value.__context__, LookupError)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_a_process_that_is_started_in_the_block_has_ctrl_c_blocked(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with shielded():
            shown = subprocess.check_output(["grep", "SigBlk", "/proc/self/status"], text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert int(shown.split()[1], 16) & 1 << signal.SIGINT - 1


def test_other_threads_may_be_shielded_too_and_then_have_what_they_had():
    masks = []

    def work() -> None:
        with shielded():
            masks.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        masks.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert masks == [True, False]
