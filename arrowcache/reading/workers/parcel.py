"""Parcel: what is pickled: the user's transform on its way to workers, what it raised on its way back.

Never a sample. Transforms go by value where they must (lambdas, closures, what a notebook or script
defines), so a worker needs nothing of the main program but its importable modules.
"""

from __future__ import annotations

import base64
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle

from arrowcache.errors import WorkerError
from arrowcache.pickling import pickled, unpickled


class WorkerTraceback(Exception):
    """Where in a worker process an exception was raised: the cause of what the main process raises."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def pack_transform(transform: Callable[..., Any]) -> bytes:
    """A transform for other processes.

    Raises: TypeError: it cannot be pickled.
    """
    return pickled(transform, "the transform {!r}", "pass worker_type='thread'")


def unpack_transform(packed: bytes) -> Callable[..., Any]:
    """The inverse, in a worker.

    Raises: WorkerError: what it needs cannot be imported there.
    """
    try:
        transform: Callable[..., Any] = unpickled(packed)
    except Exception as error:
        raise WorkerError(
            f"the transform cannot be loaded in a worker process ({type(error).__name__}: {error}): define "
            "it in a module that can be imported there, or in the main script, or pass worker_type='thread'"
        ) from error
    return transform


def pack_error(error: BaseException) -> str:
    """An exception with its traceback, for a message; as text alone where it cannot be pickled."""
    text = "".join(traceback.format_exception(error))
    try:
        packed = cloudpickle.dumps(error)
        if type(pickle.loads(packed)) is not type(error):
            packed = None
    except Exception:  # noqa: BLE001  # an exception may be anything, and hold anything
        packed = None
    return base64.b64encode(pickle.dumps((text, packed))).decode()


def unpack_error(packed: str) -> BaseException:
    """What to raise in the main process: the exception itself, its worker's traceback as its cause."""
    text, inner = pickle.loads(base64.b64decode(packed))
    error: BaseException | None = None
    if inner is not None:
        try:
            error = pickle.loads(inner)
        except Exception:  # noqa: BLE001  # its class may exist in the worker alone
            error = None
    if not isinstance(error, BaseException):
        return WorkerError(f"a worker process failed with what cannot be pickled:\n{text}")
    if isinstance(error, StopIteration) or not isinstance(error, Exception):  # as if all was well
        error = RuntimeError(f"a transform raised {error!r}")
    error.__cause__ = WorkerTraceback(text)
    return error
