"""Mutex: a signal handler that interrupts its holder gets an error, where it would wait for ever."""

import signal
import threading

import numpy as np
import pytest

from arrowcache.reading import mapped
from arrowcache.reading.mutex import Mutex


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
        with pytest.raises(RuntimeError, match="a signal handler has interrupted the work"), mutex.held():
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

    check = mapped.check_file

    def interrupted(*arguments: object, **options: object) -> object:
        signal.raise_signal(signal.SIGUSR1)
        return check(*arguments, **options)

    monkeypatch.setattr(mapped, "check_file", interrupted)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with snapshot:
            rows = snapshot.gather(np.arange(len(snapshot)))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told
    assert all(len(column) for column in rows.values())
