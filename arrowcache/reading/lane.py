"""Lanes: where in a range of addresses a column goes, so that its rows are items of one array.

That holds for all segments whose column starts at the same remainder by its row's width. Files
are mapped at whole pages, and columns start anywhere in a page, so a file is moved by some pages
within its cell; where columns are page-aligned a fitting page exists (a Chinese remainder), as
it does for rows that have little in common with a page. Rows too odd to leave room for it go
without.

The arena's cells have the fitting distance for one column only, the widest. Another wide column
whose rows do not divide that distance may have a `Lane`: its pages are mapped a second time, at
addresses of its own. A copy in one pass instead of two is worth a mapping, as long as mappings
are not scarce.
"""

from __future__ import annotations

import math

import numpy as np

from arrowcache.storage.mapping import HUGE_PAGE, PAGE_BYTES, AddressRange

_LEAST_WIDTH = 512  # a second pass over smaller rows costs less than a mapping


class Phase:
    """The remainder by its row's width at which a column starts: that of the first full segment.

    Args:
        width: bytes of a row.
        room: by how many bytes a file may be moved.
    """

    def __init__(self, width: int, room: int) -> None:
        self._width, self._room = width, room
        self._remainder: int | None = None
        self._is_of_a_full_one = False

    def shift(self, at: int, *, is_full: bool) -> int:
        """By how many bytes to move a file whose column would start at `at`."""
        remainder = at % self._width
        if self._remainder is None or (is_full and not self._is_of_a_full_one):
            self._remainder, self._is_of_a_full_one = remainder, is_full
        return page_shift((self._remainder - remainder) % self._width, self._width, self._room)


class Lane:
    """The pages of one column of many segments, in cells of their own. Not thread-safe.

    Args:
        column: its physical number.
        width: bytes of a row.
        rows: of a full segment; a longer one finds no place.
        cells: how many.
    Raises: OSError: no address space.
    """

    def __init__(self, column: int, width: int, rows: int, cells: int) -> None:
        self.column = column
        self.width = width
        self._most_bytes = _lane_bytes(width, rows)
        self._stride = choose_stride(width, self._most_bytes)
        self.range = AddressRange(cells * self._stride)
        self.at = np.full(cells, -1, np.int64)  # by cell: where its column starts; -1: not here
        self._phase = Phase(width, self._stride - self._most_bytes)

    @staticmethod
    def is_worth_it(width: int, rows: int, stride: int) -> bool:
        """Whether a column of so wide rows is no array in cells of distance `stride`, but would be here."""
        fits = math.lcm(PAGE_BYTES, width) <= _lane_bytes(width, rows)
        return width >= _LEAST_WIDTH and stride % width != 0 and fits

    def fill(self, cell: int, fd: int, start: int, rows: int, *, is_full: bool) -> None:
        """Map the column, which starts at byte `start` of a file, into a cell.

        Raises: OSError: it cannot be mapped.
        """
        in_page = start % PAGE_BYTES
        nbytes = in_page + rows * self.width
        if nbytes <= self._most_bytes:
            place = cell * self._stride
            place += self._phase.shift(place + in_page, is_full=is_full)
            self.range.map_file(fd, place, nbytes, start - in_page)
            self.at[cell] = place + in_page

    def empty(self, first: int, count: int) -> int:
        """Unmap neighbouring cells; returns how many were mapped."""
        mapped = self.mapped(slice(first, first + count))
        if mapped:
            self.range.unmap(first * self._stride, count * self._stride)
            self.at[first : first + count] = -1
        return mapped

    def mapped(self, cells: slice = slice(None)) -> int:
        """How many cells are mapped. Works while the interpreter ends, too, as `sum` does not."""
        return int(np.count_nonzero(self.at[cells] >= 0))


def _lane_bytes(width: int, rows: int) -> int:
    """The most that a column takes, which may begin anywhere in a page."""
    return (-(-width * rows // PAGE_BYTES) + 1) * PAGE_BYTES


def choose_stride(width: int, nbytes: int) -> int:
    """Bytes from one cell to the next, for files of at most `nbytes` with rows of `width`.

    Whole rows and whole huge pages, with room for the largest `page_shift`, as far as that at most
    doubles the addresses.
    """
    size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    room = math.lcm(PAGE_BYTES, width)
    size += room if room <= size else 0
    for multiple in (math.lcm(HUGE_PAGE, width), math.lcm(PAGE_BYTES, width), HUGE_PAGE):
        if multiple <= size:
            return -(-size // multiple) * multiple
    return size


def page_shift(missing: int, width: int, room: int) -> int:
    """The smallest number of bytes, in whole pages, that leaves the remainder `missing` by `width`.

    Returns: at most `room`; 0 where no such page exists.
    """
    common = math.gcd(PAGE_BYTES, width)
    if not missing or missing % common:  # not written by this version: its column is not aligned
        return 0
    pages = missing // common * pow(PAGE_BYTES // common, -1, width // common) % (width // common)
    return pages * PAGE_BYTES if pages * PAGE_BYTES <= room else 0
