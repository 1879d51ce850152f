"""Weather: what befalls the storm's processes: SIGKILL, SIGSTOP for a while, and being told to leave.

A signal goes to a process alone, or to one of its own workers. Whoever holds cache.lock is looked for,
since chance alone hardly ever hits it.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from storm.cast import Actor, Cast
from storm.report import KILLS, STOPS

MAX_STOPPED_SECONDS = 2.5
MIN_KILLS, MIN_STOPS = 6, 3
_LOOKS = 300  # at who holds cache.lock: some 30 ms


class Weather:
    """Blows, one after another; `counts` says how many of which.

    Args:
        cast: whom they befall.
        lock: the cache's cache.lock.
    """

    def __init__(self, cast: Cast, lock: Path, chance: random.Random) -> None:
        self._cast, self._lock, self._chance = cast, lock, chance
        self.counts: Counter[str] = Counter()
        self._stopped: dict[int, float] = {}  # by pid, until when
        self._blows: dict[Callable[[], str], int] = {
            self._kill: 5, self._kill_worker: 4, self._kill_lock_holder: 2,
            self._stop: 3, self._stop_worker: 1, self._stop_lock_holder: 3, self._dismiss: 2,
        }  # fmt: skip

    def blow(self) -> None:
        """One of them, at random."""
        self.clear_up()
        (blow,) = self._chance.choices(list(self._blows), list(self._blows.values()))
        self.counts[blow() or "misses"] += 1

    def has_been_bad(self) -> bool:
        """Whether enough befell them for the storm to show anything."""
        kills, stops = (sum(self.counts[name] for name in names) for names in (KILLS, STOPS))
        return kills >= MIN_KILLS and stops >= MIN_STOPS

    def clear_up(self, *, all_at_once: bool = False) -> None:
        """Continue who was stopped for long enough."""
        for pid, until in list(self._stopped.items()):
            if all_at_once or time.monotonic() > until:
                del self._stopped[pid]
                _send(pid, signal.SIGCONT)

    def is_stopped(self, actor: Actor) -> bool:
        return actor.child.pid in self._stopped

    def _any(self, *, elders: bool) -> Actor:
        return self._chance.choice([a for a in self._cast.actors if elders or not a.post.is_elder])

    def _a_worker(self) -> int:
        return self._chance.choice(
            [pid for actor in self._cast.actors for pid in self._workers(actor)] or [0]
        )

    def _workers(self, actor: Actor) -> list[int]:
        """Those that may be killed or stopped.

        Not the DataLoader's of an elder: where one dies torch raises in the main thread, wherever that is,
        and in the middle of its own tidying up it leaves pipes behind.
        """
        return [] if actor.post.is_elder and actor.post.kind == "dataloader" else actor.workers()

    def _kill(self) -> str:
        self._cast.kill(self._any(elders=False))
        return "kills"

    def _kill_worker(self) -> str:
        pid = self._a_worker()
        return "kills of workers" if pid and _send(pid, signal.SIGKILL) else ""

    def _kill_lock_holder(self) -> str:
        holder = self._holder()
        if holder in (worker for actor in self._cast.actors for worker in self._workers(actor)):
            return "kills with cache.lock" if _send(holder, signal.SIGKILL) else ""
        for actor in self._cast.actors:
            if actor.child.pid == holder and not actor.post.is_elder:
                self._cast.kill(actor)
                return "kills with cache.lock"
        return ""

    def _stop(self) -> str:
        return "stops" if self._stop_for_a_while(self._any(elders=True).child.pid) else ""

    def _stop_worker(self) -> str:
        pid = self._a_worker()
        return "stops of workers" if pid and self._stop_for_a_while(pid) else ""

    def _stop_lock_holder(self) -> str:
        pid = self._holder()
        if not pid or not self._stop_for_a_while(pid):
            return ""
        return "stops with cache.lock" if lock_holder(self._lock) == pid else "stops"

    def _stop_for_a_while(self, pid: int) -> bool:
        self._stopped[pid] = time.monotonic() + self._chance.uniform(0.02, MAX_STOPPED_SECONDS)
        return _send(pid, signal.SIGSTOP)

    def _dismiss(self) -> str:
        self._any(elders=False).post.leave.touch()
        return "departures"

    def _holder(self) -> int:
        """Whoever of the storm's holds cache.lock now, and is not just watching; 0: nobody was seen."""
        for _ in range(_LOOKS):
            pid = lock_holder(self._lock)
            if pid and pid != os.getpid() and pid not in self._stopped:
                return pid
        return 0


def lock_holder(lock: Path) -> int:
    """The process that holds a file's flock, by /proc/locks; 0: none."""
    status = os.stat(lock)
    device = status.st_dev
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}:{status.st_ino}"
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "FLOCK" and words[5] == wanted:
            return int(words[4])
    return 0


def _send(pid: int, number: signal.Signals) -> bool:
    """Signal a process of this session, and no other that has got its number since."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if os.getsid(pid) != os.getsid(0):
            return False
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True
