"""Descriptors: small values that cross the processes of a DataLoader in place of samples.

    main process                     worker                              main process
    EpochBatchSampler  -- DrawnRows -->   CacheDataset.__getitems__ -- ... -->   the batch

`DrawnRows` name a snapshot and the rows of one batch. A worker without a transform answers with a
`Descriptor`: unpickling it, in the process that receives it, is the gather. A worker with one
answers with its result (transport.py), which reports on its arrival that the batch was delivered.
Without workers a batch is made at once.

Guarantees: no sample's bytes pass a pipe; unpickling never raises an Exception, which would kill
torch's pin-memory thread, but returns its ExceptionWrapper, which torch raises in the consumer;
torch's default_collate and default_convert leave it unchanged; for a user's collate function it is like
a dict: it gathers when it is looked into, and is sent as tensors then.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any

from torch.utils.data._utils.collate import default_collate_fn_map

from arrowcache.storage.store import Store
from arrowcache.torch import snapshots
from arrowcache.torch.snapshots import DrawnRows
from arrowcache.torch.tensors import to_tensor
from arrowcache.torch.transport import SentBatch, collate, failure


class Descriptor:
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


def _gathered(rows: DrawnRows, columns: tuple[str, ...]) -> Any:
    try:
        return Descriptor(rows, columns, rows.store()).make()
    except Exception:  # noqa: BLE001
        return failure("while a batch was gathered from its descriptor")


default_collate_fn_map[Descriptor] = collate
