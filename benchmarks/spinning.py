"""A thread that spins: pure Python that takes a batch whenever one is due, as a busy training loop does.

Nothing but the standard library is imported here: peers run it where arrowcache is not installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def spin(take: Callable[[], object], rate: float, nbytes: int, seconds: float) -> tuple[float, float]:
    """Run pure Python for some seconds, taking `nbytes` whenever they are due at `rate` bytes a second.

    Returns: loops a second, and the GB/s that were delivered.
    """
    period, loops, taken = nbytes / rate, 0, 0
    started = now = time.perf_counter()
    while now - started < seconds:
        for _ in range(200):
            loops += 1
        now = time.perf_counter()
        if now - started >= taken * period:
            take()
            taken += 1
    passed = time.perf_counter() - started
    return loops / passed, taken * nbytes / passed / 1e9
