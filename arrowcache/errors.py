"""Errors: the exception tree, with one class for each thing that a handler would do.

    ArrowCacheError
    ├── SchemaError           fix the sample or the schema
    ├── CacheFullError        make room: raise capacity or headroom, wait, release leases
    ├── CacheFormatError      another folder, or a newer arrowcache
    ├── CacheFrozenError      write elsewhere, or thaw the cache; or freeze it once nobody writes
    ├── CorruptSegmentError   go on without that segment: it is quarantined
    ├── SamplerError          fix the sampler: its traceback is in the message
    ├── MissingSegmentsError  resume with missing="skip", or begin anew (also a LookupError)
    ├── WorkerError           find out what kills worker processes: the message says how they died
    ├── LoaderTimeoutError    start samplers, or wait longer (also a TimeoutError)
    └── LockTimeoutError      a process holds cache.lock; the message names it (also a TimeoutError)

Every message states the fact, the numbers and the way out. Plain wrong arguments are
`ValueError` or `TypeError`, a row out of range is `IndexError`. Each takes one positional
message, so it survives pickling through a worker process.
"""

import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_log = logging.getLogger("arrowcache")

T = TypeVar("T")

WHERE = "the function of where="


class ArrowCacheError(Exception):
    """Base of every error that arrowcache raises on its own account."""


class SchemaError(ArrowCacheError):
    """A sample or a cache does not fit the schema."""


class CacheFullError(ArrowCacheError):
    """A segment found no room within the capacity."""


class CacheFormatError(ArrowCacheError):
    """A folder is not a cache, or has a format that this version does not know."""


class CacheFrozenError(ArrowCacheError):
    """A frozen cache does not change, or one that is being changed cannot be frozen."""


class CorruptSegmentError(ArrowCacheError):
    """A segment's file differs from the published one."""


class SamplerError(ArrowCacheError):
    """A sampler failed, more often than allowed, or a file to be imported is damaged."""


class MissingSegmentsError(ArrowCacheError, LookupError):
    """Rows of a saved epoch, or rows that were asked for by their ids, have left the cache since."""


class WorkerError(ArrowCacheError):
    """Worker processes cannot start, died at a batch, or failed with an error that cannot be sent."""


class LoaderTimeoutError(ArrowCacheError, TimeoutError):
    """A loader waited too long for rows or for a batch."""


class LockTimeoutError(ArrowCacheError, TimeoutError):
    """Another process held the cache's lock for too long."""


def sentence_of(error: BaseException) -> str:
    """Return the message of an error for a person who needs no traceback: one line."""
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())


def called(whose: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call a user's function. From Python 3.11 on a note says whose an error is: "the function of where=".

    Raises: as it does. RuntimeError: it raised StopIteration, which would end who iterates over batches.
    """
    try:
        return function(*arguments)
    except StopIteration as error:
        raise RuntimeError(f"{whose} raised StopIteration, which would end the epoch") from error
    except Exception as error:
        if hasattr(error, "add_note"):
            error.add_note(f"It was raised by {whose}.")
        raise


def warn(message: str) -> None:
    """Give a RuntimeWarning that names the user's line, however deep the call is.

    Raises: RuntimeWarning: a filter turns it into an error.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("arrowcache."):
        level, frame = level + 1, frame.f_back
    with suppress(ValueError, OSError):  # nobody reads stderr: it is closed, or a broken pipe
        warnings.warn(message, RuntimeWarning, stacklevel=level)


def log(message: str) -> None:
    """Log a warning, from where one that a filter turns into an error would end what is under way."""
    with suppress(ValueError, OSError):  # as above
        _log.warning("%s", message, stacklevel=2)
