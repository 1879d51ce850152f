"""Temperature: whether rows are copied from mapped memory, or asked of the disk and read.

Rows that are in memory are copied faster from their mapping; rows that are not are read faster from their
files, many at a time. What is in memory the kernel alone knows, so each job tells what it missed, and the
next ones go by that. It begins cold: asking costs little. Pure.

It turns cold when more than one in some hundred rows was missed, and warm once enough rows in a row were
found. Each time that warmth was of short life, it takes twice as many: where a part of the rows is always
missing, it does not go back and forth.
"""

from __future__ import annotations

_TOLERATED_SHARE = 1 / 256  # of rows that may be missed while it is warm
_LEAST_FOUND_ROWS, _MOST_FOUND_ROWS = 256, 1 << 14
_LONG_LIFE = 16  # times the rows that it took to get warm


class Temperature:
    """Of the rows that one reader asks for.

    `is_cold` says how the next ones are best had; `missed` counts what was not in memory.
    """

    def __init__(self) -> None:
        self.is_cold = True
        self.missed = 0
        self._needed_rows = _LEAST_FOUND_ROWS
        self._rows = 0  # found since it turned cold or missed some; had since it turned warm
        self._debt = 0.0  # what was missed while it is warm, less what is tolerated

    def note(self, rows: int, missed: int) -> None:
        """Rows were had, in the way of `is_cold`; so many of them, or of their pages, were missed."""
        self.missed += missed
        if self.is_cold:
            self._rows = 0 if missed else self._rows + rows
            if self._rows >= self._needed_rows:
                self.is_cold, self._rows, self._debt = False, 0, 0.0
            return
        self._rows += rows
        self._debt = max(0.0, self._debt + missed - rows * _TOLERATED_SHARE)
        if self._debt > 1:
            if self._rows >= _LONG_LIFE * self._needed_rows:
                self._needed_rows = _LEAST_FOUND_ROWS
            else:
                self._needed_rows = min(2 * self._needed_rows, _MOST_FOUND_ROWS)
            self.is_cold, self._rows = True, 0
