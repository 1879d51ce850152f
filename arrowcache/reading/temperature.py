"""Temperature: decides how rows are read: copied from mapped memory, or asked of the disk and read.

Warm is faster for rows that are in memory: they are copied from their mapping. Cold is faster for other
rows: they are read from their files, many at a time. Only the kernel knows which rows are in memory, so each
job counts the rows or pages that it missed there, and the next jobs go by that count. It begins cold, since
asking costs little. It looks at no file and no clock.

Both ways are bearable while less than one in 256 rows is missed: each miss is weighed against 256 rows that
were found. The temperature turns cold when a balance of 64 misses is left: a bad page or two are no reason.
It turns warm when a balance of enough rows is left: 256 at first, and twice as many after each warm time that
was short. So the temperature does not go back and forth where a part of the rows is always missing, nor stay
cold for a few.
"""

from __future__ import annotations

from arrowcache.limits import Limits

_ROWS_A_MISS = 256
_MOST_MISSES = 64  # pages, while warm: the disk reads them in some 10 ms
_LEAST_FOUND_ROWS, _MOST_FOUND_ROWS = 256, 1 << 14
_LONG_LIFE = 16  # times the rows that it took to get warm
_MOST_WARM = 8  # under way


def batches_ahead(rows: int, nbytes: int) -> int:
    """Return the number of batches of this size to be asked of the disk at a time."""
    return max(2, min(-(-Limits.current.ahead_rows // rows), Limits.current.ahead_bytes // nbytes))


class Temperature:
    """The temperature of the rows that one reader asks for.

    `is_cold`: the next rows are to be asked of the disk. `missed`: rows or pages that were not in memory.
    """

    def __init__(self) -> None:
        self.is_cold = True
        self.missed = 0
        self._needed_rows = _LEAST_FOUND_ROWS
        self._rows = 0  # rows since it turned warm
        self._balance = 0  # while cold: rows found beyond the limit; while warm: rows found short of it

    def batches_ahead(self, rows: int, nbytes: int) -> int:
        """Return the number of batches of this size to have under way: at least two."""
        if self.is_cold:
            return batches_ahead(rows, nbytes)
        return max(2, min(_MOST_WARM, Limits.current.warm_bytes // nbytes))

    def note(self, rows: int, missed: int) -> None:
        """Count rows that were read as `is_cold` says, and the rows or pages that were missed."""
        self.missed += missed
        found = rows - missed * _ROWS_A_MISS
        if self.is_cold:
            self._balance = max(0, self._balance + found)
            if self._balance >= self._needed_rows:
                self.is_cold, self._rows, self._balance = False, 0, 0
            return
        self._rows += rows
        self._balance = max(0, self._balance - found)
        if self._balance >= _MOST_MISSES * _ROWS_A_MISS:
            if self._rows >= _LONG_LIFE * self._needed_rows:
                self._needed_rows = _LEAST_FOUND_ROWS
            else:
                self._needed_rows = min(2 * self._needed_rows, _MOST_FOUND_ROWS)
            self.is_cold, self._balance = True, 0
