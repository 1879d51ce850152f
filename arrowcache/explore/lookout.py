"""Lookout: whoever looks at one cache again and again, whatever becomes of the cache meanwhile."""

from __future__ import annotations

import os

from arrowcache.cache import Cache
from arrowcache.errors import ArrowCacheError, sentence_of
from arrowcache.explore.history import History
from arrowcache.explore.observation import observe
from arrowcache.storage.locks import file_identity
from arrowcache.storage.recovery import HasStore, store_of

_LOCK_TIMEOUT_SECONDS = 2.0


class Lookout:
    """Looks at the cache at a path, and remembers.

    Args:
        cache: a Cache, or the path of one.
        lock_timeout: seconds that a look waits for cache.lock.
    Raises: FileNotFoundError, CacheFormatError: no such cache, at first.
    """

    def __init__(
        self, cache: HasStore | str | os.PathLike[str], lock_timeout: float = _LOCK_TIMEOUT_SECONDS
    ) -> None:
        self.path = store_of(cache).folder.path
        self.history = History()
        self._lock_timeout = lock_timeout
        self._cache: Cache | None = None  # one of its own, which nobody closes
        self._identity: tuple[int, int] | None = None

    def look(self) -> str | None:
        """Add an observation to the history.

        Returns: why it could not, in a sentence: the cache is gone, or its lock is held. The next look
            begins anew, so that it finds whatever is there by then.
        """
        try:
            identity = file_identity(os.stat(self.path))
            if self._cache is None or identity != self._identity:
                self._cache, self._identity = Cache.open(self.path), identity
            observation = observe(self._cache, self.history.last, lock_timeout=self._lock_timeout)
        except (ArrowCacheError, OSError) as error:
            self._cache = None
            return sentence_of(error)
        self.history.add(observation)
        return None
