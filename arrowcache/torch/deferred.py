"""Deferred: ends lanes that nobody uses any more, each once its device is done with it.

Where objects die, and while a CUDA graph is captured, no device is called: a lane that ends then is released
by the next `next` of any prefetcher. In a forked child it stays for ever, with all else of its parent's
devices.
"""

from __future__ import annotations

from contextlib import suppress

from arrowcache.torch import registered
from arrowcache.torch.lane import Lane, ThreadLock

_deferred: dict[int, Lane] = {}
_inherited: list[object] = []
_lock = ThreadLock()


def defer(lane: Lane) -> None:
    """Let `tidy` close a lane. Calls no device."""
    _deferred[id(lane)] = lane


def keep(*things: object) -> None:
    """Keep objects of a parent's devices for ever, in a forked child, which must not free them."""
    _inherited.append(things)


def let_go(lane: Lane, seconds: float) -> None:
    """Close a lane, or leave it to `tidy`. Blocks, Raises: as `Lane.close`."""
    defer(lane)
    if lane.origin.is_here and not lane.backend.is_capturing() and lane.close(seconds):
        _deferred.pop(id(lane), None)


def tidy() -> None:
    """Release deferred lanes, and registered memory that has died. Never blocks."""
    if _lock.take():
        try:
            registered.tidy()
            for lane in [*_deferred.values()]:
                with suppress(Exception):  # a device that failed: its memory stays
                    let_go(lane, 0.0)
        finally:
            _lock.leave()
