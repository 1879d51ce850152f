"""LazyBatch and SentBatch: what a DataLoader's worker sends in place of a batch, and how it travels.

    main process                     worker                                      main process
    EpochBatchSampler  -- DrawnRows -->   CacheDataset.__getitems__ -- ... -->   the batch

`DrawnRows` name a snapshot and the rows of one batch. A worker without a transform answers with a
`LazyBatch`: unpickling it, in the process that receives it, is the gather. A worker with a transform answers
with its result, as a `SentBatch` (a dict) or a `SentResult` (anything else), whose arrival tells that the
batch was delivered. Without workers a batch is made at once.

torch puts the tensors of a result into files of /dev/shm, in the thread that sends. If they have no room
there, or the result cannot be pickled, that thread prints a traceback, and the consumer waits for ever. Here
tensors travel in memory without a name, as in this library's workers. A result that cannot be sent becomes an
exception, which torch raises in the consumer. So does an exception of a class that cannot be sent.

Guarantees:
- without a transform no sample's bytes pass a pipe;
- torch's default_collate and default_convert leave each of the three unchanged. For a user's collate function
  a `SentBatch` is a dict, and a `LazyBatch` is like one: it gathers when it is looked into, and is sent as
  tensors then;
- unpickling never raises an Exception, which would kill torch's pin-memory thread, but returns its
  ExceptionWrapper.
"""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.multiprocessing import get_sharing_strategy
from torch.multiprocessing.reductions import reduce_storage
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from arrowcache import linux
from arrowcache.errors import WorkerError
from arrowcache.storage.store import Store
from arrowcache.torch import snapshots
from arrowcache.torch.snapshots import Arrival, DrawnRows
from arrowcache.torch.tensors import to_tensor

RECEIVING = "while a batch was received"


class LazyBatch:
    """A batch that is still to be gathered; pickled here, it is unpickled as the batch.

    It can be read like a dict, but is no Mapping: default_convert would read it.

    Args:
        store: the cache's store in this process; not pickled.
    """

    def __init__(self, rows: DrawnRows, columns: tuple[str, ...], store: Store) -> None:
        self._rows, self._columns, self._store = rows, columns, store
        self._batch: dict[str, Any] | None = None

    def make(self) -> dict[str, Any]:
        """Gather, once: name -> tensor, as `arrowcache.torch.Loader` yields them."""
        if self._batch is None:
            try:
                schema = self._store.settings.schema
                batch = self._rows.read(self._columns, self._store)
                self._batch = {name: to_tensor(values, schema[name]) for name, values in batch.items()}
            finally:
                snapshots.delivered(*self._rows.arrival)
        return self._batch

    def __getitem__(self, name: str | int) -> Any:
        if name == 0:
            return self  # default_collate looks at its first element
        return self.make()[name]  # type: ignore[index]  # another number is a KeyError

    def __len__(self) -> int:
        return len(self._columns)

    def __iter__(self) -> Iterator[str]:
        return iter(self.make())

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def keys(self) -> KeysView[str]:
        return self.make().keys()

    def values(self) -> ValuesView[Any]:
        return self.make().values()

    def items(self) -> ItemsView[str, Any]:
        return self.make().items()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self._batch is not None:
            return SentBatch(self._batch, self._rows.arrival).__reduce__()
        return _gathered, (self._rows, self._columns)


class SentBatch(dict[str, Any]):
    """A batch; unpickled as a plain dict.

    Args:
        arrival: of its rows. None means that nobody is told of it.
    """

    def __init__(self, batch: dict[str, Any], arrival: Arrival | None = None) -> None:
        super().__init__(batch)
        self._arrival = arrival

    def __missing__(self, name: object) -> SentBatch:
        if name == 0:
            return self  # default_collate looks at its first element
        raise KeyError(name)

    def __copy__(self) -> dict[str, Any]:
        return dict(self) if get_worker_info() is None else SentBatch(self, self._arrival)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _received, (self._arrival, pack(dict(self)))


class SentResult:
    """A transform's result that is no dict; it is unpickled unwrapped."""

    def __init__(self, result: object, arrival: Arrival | None = None) -> None:
        self.result, self._arrival = result, arrival

    def __getitem__(self, index: int) -> SentResult:
        if index == 0:
            return self
        raise TypeError(
            "a collate_fn of your own gets batches that are dicts, and this transform returned none: "
            "have it return a dict, or do that function's work"
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _received, (self._arrival, pack(self.result))


def wrapped(result: Any, arrival: Arrival | None = None) -> SentBatch | SentResult:
    """Return a result of a worker in its wrapper, by its type."""
    return SentBatch(result, arrival) if type(result) is dict else SentResult(result, arrival)


def _received(arrival: Arrival | None, packed: bytes | ExceptionWrapper) -> Any:
    try:
        if arrival is not None:
            snapshots.delivered(*arrival)
        return unpack(packed)
    except Exception:  # noqa: BLE001
        return failure(RECEIVING)


def _gathered(rows: DrawnRows, columns: tuple[str, ...]) -> Any:
    try:
        return LazyBatch(rows, columns, rows.store()).make()
    except Exception:  # noqa: BLE001
        return failure("while a batch was gathered")


def _collate(batch: Any, *, collate_fn_map: object = None) -> Any:  # noqa: ARG001
    """Collate for torch's default_collate. In a worker pickling does the rest; else the consumer has it."""
    if get_worker_info() is not None:
        return batch
    return batch.result if isinstance(batch, SentResult) else dict(batch)


for _kind in (LazyBatch, SentBatch, SentResult):
    default_collate_fn_map[_kind] = _collate


def pack(content: object) -> bytes | ExceptionWrapper:
    """Pack content for `unpack` in another process, or return the exception that prevents it."""
    _hush()
    file = io.BytesIO()
    try:
        _TensorPickler(file).dump(content)
    except Exception:  # noqa: BLE001  # a transform may return anything
        return failure("while a DataLoader's worker sent what a transform had made")
    return file.getvalue()


def unpack(packed: bytes | ExceptionWrapper) -> Any:
    return ForkingPickler.loads(packed) if isinstance(packed, bytes) else packed


def failure(where: str) -> ExceptionWrapper:
    """Return the current exception as a value, which torch raises in the consumer."""
    wrapper = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]
    if not _can_be_sent(wrapper.exc_type):
        wrapper.exc_type = WorkerError  # the text has all of it
    return wrapper


def _can_be_sent(kind: object) -> bool:
    try:
        ForkingPickler.dumps(kind)
    except Exception:  # noqa: BLE001  # a metaclass may raise anything
        return False
    return True


class _TensorPickler(ForkingPickler):
    """torch's pickler, with other memory for tensors."""

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


def shared_numbers(*shape: int) -> torch.Tensor:
    """Return zeros, int64, that this process shares with those that it starts with them.

    Raises: OSError: no memory or descriptor is left.
    """
    zeros = _new_shared(8 * math.prod(shape))  # which are not copied there: threads of torch hang in a fork
    return torch.empty(0, dtype=torch.int64).set_(zeros).view(shape)


def _hush() -> None:
    """Have no traceback printed where a receiver hangs up as it takes memory from this process. Idempotent.

    Ctrl-C or a kill may come between any two of its steps. The thread of multiprocessing that hands over the
    memory goes on, but shows the broken connection as an error.
    """
    before = sys.excepthook
    if getattr(before, "is_hushed", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        at = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
        if at != resource_sharer.__name__ or not isinstance(error, EOFError | ConnectionError):
            before(kind, error, trace)

    hook.is_hushed = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _shared(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy in memory that another process can map."""
    copy = _new_shared(storage.nbytes())
    copy.copy_(storage)
    return copy


def _new_shared(nbytes: int) -> torch.UntypedStorage:
    """Return zeros in memory that another process can map."""
    fd = linux.anonymous_file()
    try:
        os.posix_fallocate(fd, 0, nbytes)  # raises, where an unavailable page would be a SIGBUS
        make = torch.UntypedStorage._new_shared_fd_cpu  # type: ignore[attr-defined]  # torch's own use it
        made: torch.UntypedStorage = make(fd, nbytes)
        return made
    finally:
        os.close(fd)  # the mapping has its own
