"""Ctrl-C at each step of an epoch: the loader goes on afterwards, and nothing waits for ever."""

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from helpers import CtrlC, make_cache, publish, segment_files, wait_until
from page_cache import drop_from_memory

import arrowcache as ac


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning")  # it came in a destructor
@pytest.mark.parametrize(
    ("options", "every", "is_cold"),
    [
        ({}, 1, False),
        ({"workers": 2, "worker_type": "thread", "transform": dict}, 3, False),
        ({}, 3, True),
        ({"shuffle": "window"}, 3, True),
    ],
)
def test_ctrl_c_at_any_step_of_an_epoch_leaves_a_loader_that_gives_the_next_one(
    tmp_path, options, every, is_cold
):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 6)
    rows = cache.stats().rows
    for number in itertools.count(0, every):
        if is_cold:
            drop_from_memory(*segment_files(cache))
        loader, came, interrupt = ac.Loader(cache, 8, timeout=5, **options), [], CtrlC(number)
        try:
            with interrupt:
                for _ in loader:
                    pass
        except KeyboardInterrupt:
            pass
        if not interrupt.where:
            loader.close()
            break

        def run(loader: ac.Loader = loader, came: list[int] = came) -> None:
            with loader:
                came.append(sum(len(batch["id"]) for batch in loader))

        after = threading.Thread(target=run, daemon=True)
        after.start()
        after.join(20)
        assert came == [rows], interrupt.where
        del loader, run, after
        wait_until(lambda: not cache.stats().leased_bytes, f"the end of leases, after {interrupt.where}")
    assert number > 300


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning")
def test_an_epoch_that_ctrl_c_did_not_let_begin_is_not_leased_and_does_not_count(tmp_path):
    cache = make_cache(tmp_path / "cache", pace=ac.Pace(max_reuse=1))
    publish(cache, 6)
    for number in itertools.count():
        loader, interrupt = ac.Loader(cache, 8, timeout=5), CtrlC(number)
        try:
            with interrupt:
                epoch = iter(loader)
        except KeyboardInterrupt:
            pass
        else:
            epoch.close()
        loader.close()
        stats = cache.stats()
        assert (stats.leased_bytes, stats.served_rows, stats.most_times_served) == (0, 0, 0), interrupt.where
        if not interrupt.where:
            break
    assert number > 300


def test_closing_a_loader_ends_an_epoch_whose_iterator_was_dropped_as_ctrl_c_came(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's keeps what was dropped
    cache = make_cache(tmp_path / "cache")
    publish(cache, 6)
    for number in itertools.count():
        loader, interrupt = ac.Loader(cache, 8, timeout=5), CtrlC(number)
        iterators = [iter(loader)]
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            iterators.clear()
        loader.close()
        assert cache.stats().leased_bytes == 0, interrupt.where
        if not interrupt.where:
            break
    assert number > 20


class Handler(CtrlC):
    """A signal handler that runs there, and returns."""

    def __init__(self, number: int, handle: Callable[[], None]) -> None:
        super().__init__(number)
        self._handle = handle

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        try:
            return super()._trace(frame, event, argument)
        except KeyboardInterrupt:
            self._handle()


@pytest.mark.slow
def test_a_signal_handler_may_close_a_loader_at_any_step_of_an_epochs_beginning(tmp_path):
    """It was an AttributeError, or a thread was left."""
    cache = make_cache(tmp_path / "cache")
    publish(cache, 2)
    before = {thread.name for thread in threading.enumerate()}
    errors: set[str] = set()
    for number in itertools.count():
        loader = ac.Loader(cache, 8)
        handler = Handler(number, loader.close)
        with contextlib.suppress(StopIteration):
            try:
                with handler:
                    next(iter(loader))
            except ValueError as error:
                errors.add(str(error))
        if not handler.where:
            loader.close()
            break
        assert cache.stats().leased_bytes == 0, handler.where
        assert {thread.name for thread in threading.enumerate()} == before, handler.where
    assert number > 100
    assert errors == {"the loader is closed: make a new one"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_worker_processes_let_go_is_nothing_else(tmp_path):
    """A RuntimeError, where it came as the wait for them let go of a lock."""
    cache = make_cache(tmp_path / "cache")
    publish(cache, 6)
    with ac.Loader(cache, 8, workers=1, transform=dict) as loader:
        assert sum(len(batch["id"]) for batch in loader) == 96
        for number in itertools.count():
            interrupt = CtrlC(number, returns=True)
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                loader._assembly.drop()
            if not interrupt.where:
                break
        assert number > 5
        assert sum(len(batch["id"]) for batch in loader) == 96
