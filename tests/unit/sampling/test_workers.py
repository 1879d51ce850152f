from __future__ import annotations

import signal
from typing import Any

import pytest
from helpers import DEADLINE_SECONDS

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
