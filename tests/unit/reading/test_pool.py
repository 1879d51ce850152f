"""When a lost worker process is replaced, and what does not wait for one that starts."""

from __future__ import annotations

import sys
import threading
from itertools import pairwise

from helpers import DEADLINE_SECONDS, limit

from arrowcache import Loader
from arrowcache.reading.workers.pool import MAX_LOSSES, Restarts


def lose(restarts, now, was_ready=True, others_are_ready=False):
    return restarts.lost(now, was_ready=was_ready, others_are_ready=others_are_ready)


def test_the_first_loss_is_made_good_at_once_and_each_further_one_after_twice_the_pause():
    restarts, pauses = Restarts(), []
    for _ in range(40):
        assert not lose(restarts, 0.0)
        pauses.append(restarts.not_before)
    assert pauses[0] == 0.0
    assert all(later == min(2 * sooner, pauses[-1]) for sooner, later in pairwise(pauses[1:]))
    assert pauses[-1] == 5.0
    restarts.made()
    assert not lose(restarts, 200.0)
    assert restarts.not_before == 200.0


def test_it_gives_up_after_a_few_that_never_got_ready_unless_others_did():
    restarts = Restarts()
    assert [lose(restarts, 0.0, was_ready=False) for _ in range(MAX_LOSSES)] == [False, False, True]
    restarts = Restarts()
    assert [lose(restarts, 0.0, was_ready=False, others_are_ready=True) for _ in range(9)] == [False] * 9
    restarts.started()
    assert not lose(restarts, 0.0, was_ready=False)


def test_a_loss_after_it_gave_up_does_not_end_the_pause():
    restarts = Restarts(7.1)
    assert not lose(restarts, 7.0, was_ready=False)
    assert restarts.not_before == 7.1


def test_an_epoch_that_begins_does_not_wait_for_processes_that_start(cache, tmp_path, monkeypatch):
    """They have leased nothing yet that they could let go."""
    never_ready = tmp_path / "python"
    never_ready.write_text("#!/bin/sh\nexec sleep 3600\n")
    never_ready.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(never_ready))
    limit(monkeypatch, worker_drop_seconds=100 * DEADLINE_SECONDS)
    epochs: list[int] = []

    def read(loader):
        epochs.extend(sum(len(batch["id"]) for batch in loader) for _ in range(2))

    with Loader(cache, 16, workers=2) as loader:
        reader = threading.Thread(target=read, args=(loader,), daemon=True)
        reader.start()
        reader.join(DEADLINE_SECONDS)
        assert epochs == [160, 160]
