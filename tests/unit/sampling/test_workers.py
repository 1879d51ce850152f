from __future__ import annotations

import signal
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from helpers import DEADLINE_SECONDS, make_cache
from helpers import sample as row

import arrowcache as ac
from arrowcache.errors import WorkerError
from arrowcache.sampling.task import run
from arrowcache.sampling.workers import Workers


class Stuck:
    """A task that its worker never gets to the end of."""

    def __reduce__(self) -> tuple[Any, ...]:
        return signal.pause, ()


@pytest.mark.slow
def test_shutdown_fails_the_tasks_that_no_process_has_begun_too():
    workers = Workers(1)
    futures = [workers.submit(run, Stuck()) for _ in range(3)]
    workers.shutdown()
    assert [type(future.exception(DEADLINE_SECONDS)) for future in futures] == [WorkerError] * 3


def reads(rng):
    while True:
        yield partial(row, int(rng.integers(1 << 20)))


@pytest.mark.slow
def test_two_processes_may_ask_for_one_task_more_at_the_same_moment(tmp_path):
    workers, both = Workers(2), threading.Barrier(2)
    wish = workers.next_wish()

    def done() -> bool:
        """Answer two threads together, if they ask together."""
        if not Future.done(wish):
            with suppress(threading.BrokenBarrierError):
                both.wait(3)
                return False
        return Future.done(wish)

    wish.done = done  # type: ignore[method-assign]
    pool = ac.SamplerPool(
        make_cache(tmp_path / "cache"), reads, workers=2, segments=4, progress=False, executor=workers
    )
    with pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        assert pool.stats().retries == 0
    workers.shutdown()
    assert Future.done(wish)
