"""Headroom: what the epochs of one loader leave to writers, and the one warning about it.

Where a cache is nearly full and somebody writes, an epoch leaves out the oldest rows, so that writers go on
while it runs (Store.lease decides). Each epoch's figure is in the loader's stats; the first that is not 0 is
said in a warning. It ends nothing: where a filter makes errors of warnings it is logged, since a cache is
full only hours after a training began.
"""

from __future__ import annotations

import logging
import math

from arrowcache.errors import warn
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.layout import Settings
from arrowcache.units import format_bytes

_log = logging.getLogger("arrowcache")


class Headroom:
    """One loader's part in it.

    Args:
        warns: False: another rank on this node does.
    """

    def __init__(self, *, warns: bool = True) -> None:
        #: Segments of this number and higher ones came after this loader's last snapshot; inf: it took none.
        self.known: float = math.inf
        self.warns = warns

    def took(self, snapshot: Snapshot) -> None:
        """An epoch has this snapshot: the next one goes by what is published after it."""
        self.known = snapshot.next_seq

    def warn(self, snapshot: Snapshot, settings: Settings) -> None:
        """An epoch of this snapshot begins: warn, the first time that it leaves rows out."""
        if not snapshot.left_out_rows or not self.warns:
            return
        self.warns = False
        rows = len(snapshot) + snapshot.left_out_rows
        message = (
            f"an epoch leaves out the oldest {snapshot.left_out_rows} of {rows} rows: the cache is nearly "
            "full, and somebody writes to it, so samplers may replace them while the epoch runs. For every "
            "row stop the pool or close the writer first. To leave out fewer, create the cache with more "
            f"capacity, a smaller headroom than {settings.headroom:g}, or smaller segments: two of "
            f"{format_bytes(settings.segment_bytes)} are the least. With headroom=0 samplers wait while an "
            "epoch runs, least with shuffle='window'. stats().left_out_rows tells of each epoch; this is "
            "said once"
        )
        try:
            warn(message)
        except RuntimeWarning:
            _log.warning(message)
