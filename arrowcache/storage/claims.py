"""Claims: which items of a dataset somebody makes, or has made and not yet published.

One lock byte an item in claims.lock, held by the process that will publish it; the kernel drops the claims of
a process that dies. One byte far behind them says that somebody waits for claimed items: who has some
publishes them at once. The next one is held by who merges segments.
Must never: keep anybody from making an item. A claim decides who publishes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from arrowcache.storage.locks import LockFile

_SOMEBODY_WAITS = 2**62  # the byte of this sign: no item has this index
_MERGES = _SOMEBODY_WAITS + 1


@contextmanager
def only_merger(path: Path, mode: int) -> Iterator[bool]:
    """Be the only one who merges segments, meanwhile. Yields: False: somebody else is, also in this process.

    Args, Raises: as of `Claims`.
    """
    with LockFile(path, os.O_RDWR | os.O_CREAT, mode) as file:
        yield file.try_range(_MERGES, 1, exclusive=True)


class Claims:
    """The claims of one process.

    Args:
        path: claims.lock; made if it is not there.
        mode: mode of a new file.
    Raises: OSError: it cannot be made or opened.
    """

    def __init__(self, path: Path, mode: int) -> None:
        self._file = LockFile(path, os.O_RDWR | os.O_CREAT, mode)
        self._sign = LockFile(path)  # another description: locks of one do not conflict with each other
        self._held: set[int] = set()

    def claim(self, index: int) -> bool:
        """Claim an item. Returns: False: it is claimed already, here or elsewhere."""
        if index in self._held or not self._file.try_range(index, 1, exclusive=True):
            return False
        self._held.add(index)
        return True

    def release(self, indices: Iterable[int]) -> None:
        """End claims: the items are published, or never will be."""
        for index in self._held.intersection(indices):
            self._file.unlock_range(index, 1)
            self._held.discard(index)

    @property
    def held(self) -> frozenset[int]:
        """The items that this process has claimed."""
        return frozenset(self._held)

    def is_held_elsewhere(self, index: int) -> bool:
        """True if another process has claimed an item."""
        return self._file.conflict(index, 1) is not None

    def some_are_held_elsewhere(self) -> bool:
        """True if another process has claimed any item."""
        return self._file.conflict(0, _SOMEBODY_WAITS) is not None

    def somebody_waits(self) -> bool:
        """True if another process waits for claimed items."""
        return self._sign.conflict(_SOMEBODY_WAITS, 1) is not None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Show meanwhile that this process waits for claimed items."""
        self._sign.try_range(_SOMEBODY_WAITS, 1, exclusive=False)  # shared: all who wait have it
        try:
            yield
        finally:
            self._sign.unlock_range(_SOMEBODY_WAITS, 1)

    def close(self) -> None:
        """End all claims. Idempotent."""
        self._held.clear()
        self._file.close()
        self._sign.close()
