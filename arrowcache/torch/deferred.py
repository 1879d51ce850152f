"""Deferred: ends lanes that nobody uses any more, each once its device is done with it.

Where objects die, and while a CUDA graph is captured, no device is called: what ends then is let go by the
next `next` of any prefetcher. In a forked child it stays for ever, with all else of its parent's devices.
"""

from __future__ import annotations

from contextlib import suppress

from arrowcache.torch import registered
from arrowcache.torch.lane import Lane, Turn

_deferred: dict[int, Lane] = {}
_inherited: list[object] = []
_turn = Turn()


def defer(lane: Lane) -> None:
    """Have `tidy` close a lane. Calls no device."""
    _deferred[id(lane)] = lane


def keep(*things: object) -> None:
    """In a forked child: have what is on its parent's devices stay for ever. Nobody here may free it."""
    _inherited.append(things)


def let_go(lane: Lane, seconds: float) -> None:
    """Close a lane, or have `tidy` do it. Blocks, Raises: as `Lane.close`."""
    defer(lane)
    if lane.origin.is_here and not lane.backend.is_capturing() and lane.close(seconds):
        _deferred.pop(id(lane), None)


def tidy() -> None:
    """Let go of what was deferred, and of registered memory that has died. Blocks: not."""
    if _turn.take():
        try:
            registered.tidy()
            for lane in [*_deferred.values()]:
                with suppress(Exception):  # a device that failed: its memory stays
                    let_go(lane, 0.0)
        finally:
            _turn.leave()
