"""Claims: the items of a dataset that a process makes, or has made and not yet published.

claims.lock has a number of 4 bytes for each item: that of the process that will publish it, or 0. A process
holds the lock byte of its own number, and the kernel drops that when it dies: its claims then count no more.
A claim costs the same however many there are. With a lock byte for each item it would not: the kernel walks
all locks of a file.

Four lock bytes past the numbers act as flags. One is held by processes that wait for claimed items: a process
that has some publishes them at once. One is held by processes that have claims. The last two are held by the
process that merges segments, and by the one that evicts some between two epochs.

Two processes may both get an item that they claim within the same microseconds, and both make it then.
A claim is advisory: any process may still make the item. The claim only decides which one publishes it.

Of a stream the claims are of shards, a lock byte each, and no two processes have one. claims.lock has 8 bytes
for each shard instead: 1 + the number of its items, once that is known, or 0.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from arrowcache.storage.folder import Folder
from arrowcache.storage.layout import CLAIMS_LOCK
from arrowcache.storage.locks import LockFile, holder_names

_SOMEBODY_WAITS = 2**62
_SOMEBODY_HOLDS = _SOMEBODY_WAITS + 1

#: What one process does at a time, of all that share a cache.
MERGING, TURNING_OVER = _SOMEBODY_WAITS + 2, _SOMEBODY_WAITS + 3

_IN_THE_WAY = {
    _SOMEBODY_HOLDS: "has items to be published",
    MERGING: "merges segments",
    TURNING_OVER: "replaces items",
}
_SHARDS = 2**61  # where the lock bytes of shards begin
_NUMBER_BYTES = 4
_LENGTH_BYTES = 8  # of a shard's number of items
_MAX_NUMBER = 2**31 - 1
_NOBODY = bytes(_NUMBER_BYTES)


@contextmanager
def the_only_one(folder: Folder, what: int) -> Iterator[bool]:
    """Be the only one meanwhile who does this. Yields: False: somebody else does, also in this process.

    Args:
        what: MERGING or TURNING_OVER.
    Raises: OSError: claims.lock of this cache's folder cannot be made or opened.
    """
    path, mode = folder.path / CLAIMS_LOCK, folder.rights().file_mode
    with LockFile(path, os.O_RDWR | os.O_CREAT, mode) as file:
        yield file.try_range(what, 1, exclusive=True)


def in_the_way(folder: Folder) -> Iterator[str]:
    """Say who makes, merges or evicts items, which a freeze does not allow. Raises: OSError: as its lock."""
    path = folder.path / CLAIMS_LOCK
    if path.exists():
        with LockFile(path) as file:
            for byte, does in _IN_THE_WAY.items():
                if file.conflict(byte, 1) is not None:
                    yield f"{holder_names(path, byte)} {does}"
            if (shard := file.conflict(_SHARDS, _SOMEBODY_WAITS - _SHARDS)) is not None:
                yield f"{holder_names(path, shard.start)} stores a shard of a stream"


class Claims:
    """The claims of one process.

    Args:
        path: claims.lock; made if it is not there.
        mode: mode of a new file.
        length: items of the dataset.
    Raises: OSError: it cannot be made or opened, or the disk has no room for it.
    """

    def __init__(self, path: Path, mode: int, length: int) -> None:
        self._file = LockFile(path, os.O_RDWR | os.O_CREAT, mode)
        self._held: set[int] = set()
        self._counting, self._waiters = threading.Lock(), 0  # threads of this process that wait
        try:
            if os.fstat(self._file.fd).st_size < length * _NUMBER_BYTES:
                os.posix_fallocate(self._file.fd, 0, length * _NUMBER_BYTES)  # so that it grows no more
            self._mine = self._own_number()
        except BaseException:
            self._file.close()
            raise

    def _own_number(self) -> bytes:
        """Return a number that no living process has, nor, as good as surely, a dead one had."""
        while True:
            number = random.SystemRandom().randint(1, _MAX_NUMBER)
            if self._file.try_range(number, 1, exclusive=True):
                return number.to_bytes(_NUMBER_BYTES, "little")

    def claim(self, index: int) -> bool:
        """Claim an item. Returns: False: it is claimed already, here or elsewhere."""
        if index in self._held or self.is_held_elsewhere(index):
            return False
        if not self._held:
            self._file.try_range(_SOMEBODY_HOLDS, 1, exclusive=False)
        self._write(index, self._mine)
        if self._read(index) != self._mine:
            return False
        self._held.add(index)
        return True

    def release(self, indices: Iterable[int]) -> None:
        """End claims: the items are published, or never will be."""
        ended = self._held.intersection(indices)
        for index in ended:
            self._write(index, _NOBODY)
        self._held -= ended
        if ended and not self._held:
            self._file.unlock_range(_SOMEBODY_HOLDS, 1)

    @property
    def held(self) -> frozenset[int]:
        """The items that this process has claimed."""
        return frozenset(self._held)

    @property
    def left(self) -> frozenset[int]:
        """The claims that nobody ends who publishes, such as those that Ctrl-C left."""
        return self.held

    def is_held_elsewhere(self, index: int) -> bool:
        """True if another process has claimed an item."""
        owner = self._read(index)
        if owner in (_NOBODY, self._mine, b""):
            return False
        return self._file.conflict(int.from_bytes(owner, "little"), 1) is not None

    def some_are_held_elsewhere(self) -> bool:
        """True if another process has claimed any item."""
        return self._file.conflict(_SOMEBODY_HOLDS, 1) is not None

    def somebody_waits(self) -> bool:
        """True if another process waits for claimed items."""
        return self._file.conflict(_SOMEBODY_WAITS, 1) is not None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Show meanwhile that this process waits for claimed items. Several threads may."""
        with self._counting:
            self._waiters += 1
            self._file.try_range(_SOMEBODY_WAITS, 1, exclusive=False)  # shared: all who wait have it
        try:
            yield
        finally:
            with self._counting:
                self._waiters -= 1
                if not self._waiters:
                    self._file.unlock_range(_SOMEBODY_WAITS, 1)

    def close(self) -> None:
        """End all claims. Idempotent."""
        self._held.clear()
        self._file.close()

    def _read(self, index: int) -> bytes:
        return os.pread(self._file.fd, _NUMBER_BYTES, index * _NUMBER_BYTES)

    def _write(self, index: int, number: bytes) -> None:
        os.pwrite(self._file.fd, number, index * _NUMBER_BYTES)


class NoClaims(Claims):
    """Those of a process that reads a frozen cache: there are none, and nobody else has some."""

    def __init__(self) -> None:
        self._held: set[int] = set()

    def claim(self, index: int) -> bool:  # noqa: ARG002
        return False

    def is_held_elsewhere(self, index: int) -> bool:  # noqa: ARG002
        return False

    def some_are_held_elsewhere(self) -> bool:
        return False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        pass


class ShardClaims(Claims):
    """The shards of a stream that this process stores, and how many items the shards have.

    A shard's number of items is its end record: it is written once all of them are published. It is not
    synced. One that a power cut took is written again by the next process that comes to the shard's end.

    Args:
        path, mode: as of `Claims`.
        shards: their number.
    Raises: OSError: as `Claims`.
    """

    def __init__(self, path: Path, mode: int, shards: int) -> None:
        super().__init__(path, mode, shards * (_LENGTH_BYTES // _NUMBER_BYTES))
        self._shards = shards

    def claim(self, index: int) -> bool:
        """Claim a shard. Returns: False: it is claimed already, here or elsewhere."""
        if index in self._held or not self._file.try_range(_SHARDS + index, 1, exclusive=True):
            return False
        self._held.add(index)
        return True

    def release(self, indices: Iterable[int]) -> None:
        """End claims of shards."""
        for shard in self._held.intersection(indices):
            self._held.discard(shard)
            self._file.unlock_range(_SHARDS + shard, 1)

    @property
    def left(self) -> frozenset[int]:
        """None: who iterates over a shard ends its claim."""
        return frozenset()

    def some_are_held_elsewhere(self) -> bool:
        """False: nobody waits for who stores a shard."""
        return False

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of items of each shard (shards,), or -1 where it is not known."""
        return _lengths(os.pread(self._file.fd, self._shards * _LENGTH_BYTES, 0), self._shards)

    def length(self, shard: int) -> int:
        """Return the number of items of a shard, or -1: it is not known."""
        data = os.pread(self._file.fd, _LENGTH_BYTES, shard * _LENGTH_BYTES)
        return int.from_bytes(data, "little") - 1

    def set_length(self, shard: int, length: int) -> None:
        """Note the number of items of a shard, all of which are published."""
        os.pwrite(self._file.fd, (length + 1).to_bytes(_LENGTH_BYTES, "little"), shard * _LENGTH_BYTES)


class NoShardClaims(NoClaims):
    """Those of a process that reads the frozen cache of a stream. Args: as of `ShardClaims`."""

    def __init__(self, path: Path, shards: int) -> None:
        super().__init__()
        data = path.read_bytes() if path.exists() else b""  # which a copy may have left out
        self._lengths = _lengths(data, shards)

    def lengths(self) -> NDArray[np.int64]:
        return self._lengths

    def length(self, shard: int) -> int:
        return int(self._lengths[shard])

    def set_length(self, shard: int, length: int) -> None:
        pass


def _lengths(data: bytes, shards: int) -> NDArray[np.int64]:
    nbytes = shards * _LENGTH_BYTES
    return np.frombuffer(data[:nbytes].ljust(nbytes, b"\0"), "<i8").astype(np.int64) - 1
