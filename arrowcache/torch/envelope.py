"""Envelope: what a transform made, on its way out of a DataLoader's worker.

torch puts tensors into files of /dev/shm, in the thread that sends: where there is no room for them, or
what was made cannot be pickled, that thread prints a traceback, and the consumer waits for ever. Here
tensors travel in memory without a name, as a worker of ours sends them, and what cannot be sent becomes
an exception, which torch raises in the consumer. So does an exception of a class that cannot be sent.
"""

from __future__ import annotations

import io
import os
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.multiprocessing import get_sharing_strategy
from torch.multiprocessing.reductions import reduce_storage

from arrowcache import linux
from arrowcache.errors import WorkerError


def seal(content: object) -> bytes | ExceptionWrapper:
    """What `open_sealed` has in another process; or, where that cannot be, why."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(content)
    except Exception:  # noqa: BLE001  # a transform may return anything
        return failure("while a DataLoader's worker sent what a transform had made")
    return file.getvalue()


def open_sealed(sealed: bytes | ExceptionWrapper) -> Any:
    """The content, or the exception as torch takes it."""
    return ForkingPickler.loads(sealed) if isinstance(sealed, bytes) else sealed


def failure(where: str) -> ExceptionWrapper:
    """The exception that is being handled, as a value, which torch raises in the consumer."""
    wrapper = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]
    if not _can_be_sent(wrapper.exc_type):
        wrapper.exc_type = WorkerError  # the text has it all
    return wrapper


def sendable(error: Exception) -> Exception:
    """An exception for torch to send: itself, or one with its text, where its class cannot be pickled."""
    if _can_be_sent(type(error)):
        return error
    return WorkerError(f"{type(error).__qualname__}: {error}")


def _can_be_sent(kind: object) -> bool:
    try:
        ForkingPickler.dumps(kind)
    except Exception:  # noqa: BLE001  # a metaclass may raise anything
        return False
    return True


class _Pickler(ForkingPickler):
    """torch's, but for where the memory of tensors comes from."""

    def reducer_override(self, thing: Any) -> Any:
        if (
            type(thing) is not torch.UntypedStorage
            or get_sharing_strategy() != "file_descriptor"  # type: ignore[no-untyped-call]
            or thing.device.type != "cpu"
            or not thing.nbytes()
            or thing.is_shared()
        ):
            return NotImplemented
        return reduce_storage(_shared(thing))  # type: ignore[no-untyped-call]


def _shared(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy in memory that another process can map."""
    fd = linux.anonymous_file()
    try:
        os.posix_fallocate(fd, 0, storage.nbytes())  # an error, where a page that cannot be had is SIGBUS
        make = torch.UntypedStorage._new_shared_fd_cpu  # type: ignore[attr-defined]  # torch's own use it
        copy: torch.UntypedStorage = make(fd, storage.nbytes())
    finally:
        os.close(fd)  # it has its own
    copy.copy_(storage)
    return copy
