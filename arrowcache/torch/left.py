"""Left: lanes that nobody uses any more, which must not die before their device is done with them.

Where objects die, and while a CUDA graph is captured, no device is called: what is left then is let go by the
next `next` of any prefetcher. In a forked child it stays for ever, for its devices are the parent's.
"""

from __future__ import annotations

import os
from contextlib import suppress

from arrowcache.torch import registered
from arrowcache.torch.lane import Lane, Turn

_left: dict[int, Lane] = {}
_turn = Turn()


def leave(lane: Lane) -> None:
    """Have `tidy` close a lane. Calls no device."""
    _left[id(lane)] = lane


def let_go(lane: Lane, seconds: float) -> None:
    """Close a lane, or have `tidy` do it. Blocks, Raises: as `Lane.close`."""
    leave(lane)
    if lane.pid == os.getpid() and not lane.backend.is_capturing() and lane.close(seconds):
        _left.pop(id(lane), None)


def tidy() -> None:
    """Let go of what was left, and of registered memory that has died. Blocks: not."""
    if _turn.take():
        try:
            registered.tidy()
            for lane in [*_left.values()]:
                with suppress(Exception):  # a device that failed: its memory stays
                    let_go(lane, 0.0)
        finally:
            _turn.leave()
