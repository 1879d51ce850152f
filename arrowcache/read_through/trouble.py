"""Trouble: why nothing is stored for a while, after the cache could not be used."""

from __future__ import annotations

import time

from arrowcache.errors import warn
from arrowcache.limits import Limits
from arrowcache.os_errors import explained


class Trouble:
    """The last failure of a cache, until it is time to try again."""

    def __init__(self) -> None:
        self._why, self._until = "", 0.0

    def note(self, error: BaseException) -> None:
        """Store nothing for half a minute. Warns, once in that time."""
        if isinstance(error, OSError):
            error = explained(error)
        is_new = not self.why
        self._why, self._until = str(error), time.monotonic() + Limits.current.trouble_seconds
        if is_new:
            warn(f"items are made, and not stored: {error}")

    @property
    def why(self) -> str:
        """The reason why nothing is stored now. Empty: there is none."""
        return self._why if time.monotonic() < self._until else ""
