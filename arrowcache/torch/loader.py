"""Loader for PyTorch: the batches of `arrowcache.Loader` as tensors over the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from arrowcache.arrow.schema import FieldType, Ragged, Tensor, Timestamp
from arrowcache.reading.assembly import Batch
from arrowcache.reading.loader import Loader as NumpyLoader
from arrowcache.reading.values import Values


class Loader(NumpyLoader):
    """Batches as `dict[str, torch.Tensor]`: each `for` is an epoch over a new snapshot.

    Arguments, epochs, waiting and errors are those of `arrowcache.Loader`; `transform` is called
    with NumPy arrays, in the background thread. Tensors are on the CPU, (batch_size, *shape), and
    share memory with the ring's buffers: keeping one is safe, nothing overwrites it while it or
    a view of it lives.

    Text and bytes come as lists; a ragged column as a nested tensor of jagged layout;
    timestamps as int64 microseconds since 1970; bfloat16 as torch.bfloat16.
    """

    def _finish(self, batch: Batch) -> Batch:
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"the transform returned {type(batch).__name__}, not a dict of columns: return one, or use "
                "arrowcache.Loader, which passes on whatever it is"
            )
        schema, tensors = self._store.settings.schema, {}
        for name, values in batch.items():
            try:
                tensors[name] = to_tensor(values, schema.get(name))
            except TypeError as error:  # such as an array of Python objects
                raise TypeError(f"column {name!r} cannot become a tensor: {error}") from None
        return tensors


def to_tensor(values: Any, kind: FieldType | None) -> Any:
    """A column of a batch as a tensor over the same memory; lists and tensors pass as they are.

    What a tensor cannot be over, such as a reversed or a read-only array, is copied.

    Args:
        values: what a NumPy loader yields, or what a transform made of it.
        kind: the column's type; None: a column that a transform added.
    """
    if isinstance(values, Values):
        data = _dense(values.data, kind)
        return torch.nested.nested_tensor_from_jagged(data, torch.from_numpy(values.offsets))
    return _dense(values, kind) if isinstance(values, np.ndarray) else values


def _dense(array: np.ndarray[Any, Any], kind: FieldType | None) -> torch.Tensor:
    if isinstance(kind, Timestamp) and array.dtype.kind == "M":
        array = array.view(np.int64)
    if not array.flags.writeable or min(array.strides, default=0) < 0:
        array = array.copy()
    tensor = torch.from_numpy(array)
    if isinstance(kind, Tensor | Ragged) and kind.dtype == "bfloat16" and array.dtype == np.uint16:
        return tensor.view(torch.bfloat16)
    return tensor
