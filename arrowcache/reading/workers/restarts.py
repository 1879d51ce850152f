"""Restarts: when a worker process that was lost may be replaced, and when that is in vain. Pure.

Time is passed in, in seconds of any clock. The first loss is made good at once; with each further one
in a row, while nothing was made, the pause doubles.
"""

from __future__ import annotations

MOST_LOSSES = 3  # in a row: of processes that never got ready, or of those that were at one request
_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.1, 5.0


class Restarts:
    """Losses in a row."""

    def __init__(self) -> None:
        self._losses = 0
        self.failed_starts = 0
        self.not_before = 0.0  # no process is started sooner

    def lost(self, now: float, *, was_ready: bool, others_are_ready: bool) -> bool:
        """A process was lost, or none could be had. Returns: whether to give up."""
        self._losses += 1
        self.failed_starts = 0 if was_ready else self.failed_starts + 1
        if self.failed_starts >= MOST_LOSSES and not others_are_ready:
            return True
        pause = _PAUSE_SECONDS * 2 ** min(self._losses - 1, 10) if self._losses > 1 else 0.0
        self.not_before = max(self.not_before, now + min(pause, _MOST_PAUSE_SECONDS))
        return False

    def started(self) -> None:
        """A process is ready."""
        self.failed_starts = 0

    def made(self) -> None:
        """A batch was made."""
        self._losses = 0

    def begin_anew(self, now: float) -> None:
        """Whoever waited was told."""
        self._losses = self.failed_starts = 0
        self.not_before = now + _PAUSE_SECONDS
