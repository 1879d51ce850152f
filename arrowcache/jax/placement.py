"""Placement: where the columns of a batch are put, and which of them become JAX arrays.

`jax.device_put` does it. On the CPU it copies nothing where memory is aligned to 64 bytes, as slots are: the
JAX array is the slot, and keeps it. (`jnp.asarray` always copies.) To another device it begins a copy, and
keeps the slot until that is over.

Must never change a number: without `jax_enable_x64` JAX would cut an int64 to 32 bits and say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from arrowcache.arrow.convert import require_unmasked
from arrowcache.arrow.dtype import bits_of
from arrowcache.arrow.schema import Schema, Tensor
from arrowcache.reading.columns import Values


class Placement:
    """Puts columns on one device, or by one sharding. None of both means JAX's default device.

    Raises: ValueError: both are given. TypeError: not a device, or not a sharding.
    """

    def __init__(self, device: Any, sharding: Any) -> None:
        if device is not None and sharding is not None:
            raise ValueError("device and sharding exclude each other: a sharding names its devices")
        if device is not None and not isinstance(device, jax.Device):
            raise TypeError(f"device must be a jax.Device, such as jax.devices()[0], not {device!r}")
        if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
            raise TypeError(f"sharding must be a jax.sharding.Sharding, not {sharding!r}")
        self._target, self._sharding = device if sharding is None else sharding, sharding

    @property
    def is_shared(self) -> bool:
        """True if devices of other processes have a part of each batch, too."""
        return self._sharding is not None and not self._sharding.is_fully_addressable

    def require_fit(self, schema: Schema, names: tuple[str, ...], rows: int) -> None:
        """Require that a batch of so many rows, of all processes, can be divided.

        Raises: ValueError: names the column that cannot.
        """
        if self._sharding is None:
            return
        for name in names:
            if name not in schema.fixed or not isinstance(kind := schema[name], Tensor):
                continue
            shape = (rows, *kind.shape)
            try:
                self._sharding.shard_shape(shape)
            except (ValueError, IndexError) as error:
                raise ValueError(
                    f"the sharding does not divide column {name!r}, whose batches are {shape} ({error}): "
                    "give a batch_size that the devices divide, and drop_last=True, and shard axis 0 only, "
                    "which all columns have"
                ) from None

    def put(self, batch: Mapping[str, Any], schema: Schema, world_size: int) -> dict[str, Any]:
        """Return the batch with its numbers as JAX arrays, also those in nested dicts, lists and tuples.

        Text, bytes, times and `Values` stay as they are.

        Args:
            world_size: number of processes; each has as many rows of the global arrays.
        Blocks: not for copies to devices.
        Raises: ValueError: an integer that JAX would cut.
        """
        leaves, tree = jax.tree_util.tree_flatten_with_path(dict(batch), is_leaf=_is_values)
        numbers = {
            at: _exact(".".join(map(_key, path)), leaf, schema)
            for at, (path, leaf) in enumerate(leaves)
            if _is_numbers(leaf)
        }
        if self.is_shared:
            placed = {at: self._part_of_all(column, world_size) for at, column in numbers.items()}
        else:
            placed = jax.device_put(numbers, self._target)
        made = jax.tree_util.tree_unflatten(
            tree, [placed.get(at, leaf) for at, (_, leaf) in enumerate(leaves)]
        )
        return {name: made[name] for name in batch}  # JAX sorts the keys

    def _part_of_all(self, column: Any, world_size: int) -> Any:
        shape = (column.shape[0] * world_size, *column.shape[1:])
        return jax.make_array_from_process_local_data(self._sharding, column, shape)


def _is_values(value: object) -> bool:
    return isinstance(value, Values)


def _key(entry: Any) -> str:
    """Return the key, the position or the name of a part, of what JAX calls an entry of its path."""
    return str(next(getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name)))


def _is_numbers(column: object) -> bool:
    """True for arrays that JAX has: not of text, times or objects."""
    if isinstance(column, jax.Array):  # of a transform
        return True
    return isinstance(column, np.ndarray) and (
        column.dtype.kind in "biufc" or bits_of(column.dtype.name) is not None
    )


def _exact(name: str, column: Any, schema: Schema) -> Any:
    """Return a column with the dtype of its schema, over the same memory.

    Raises: ValueError: it has integers that JAX cannot hold as it is set up. TypeError: it is masked.
    """
    require_unmasked(column, f"column {name!r} is", 0)
    kind = schema.get(name)
    if isinstance(kind, Tensor) and bits_of(kind.dtype) and column.dtype == kind.numpy_dtype:
        return column.view(getattr(jax.numpy, kind.dtype))
    narrow = jax.dtypes.canonicalize_dtype(column.dtype)
    if column.dtype.kind in "iu" and narrow != column.dtype and column.size:
        limits, least, most = np.iinfo(narrow), int(column.min()), int(column.max())
        if least < limits.min or most > limits.max:
            raise ValueError(
                f"column {name!r} has {most if most > limits.max else least}, and JAX makes {narrow} of "
                f"{column.dtype} and would cut it: jax.config.update('jax_enable_x64', True) before the "
                "first array, or leave the column out with `columns`"
            )
    return column
