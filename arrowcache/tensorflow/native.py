"""Native: batches go into TensorFlow as the arrays they were gathered into; any TensorFlow will do.

`from_generator` hands NumPy arrays over by reference where they begin at a multiple of 64 bytes, as
those of a batch do if its bytes are such a multiple, and copies them otherwise. TensorFlow keeps an
array until its tensor has died, and releases it at its next call of Python. So an array is never a view
of the cache's files, which would stay leased.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from numpy.typing import NDArray

from arrowcache.reading.loader import Loader
from arrowcache.tensorflow.columns import TensorColumn
from arrowcache.tensorflow.source import source


def native_dataset(loader: Loader, columns: Sequence[TensorColumn]) -> Any:
    """Return a dataset of dicts; each of its iterations is an epoch of a loader."""

    def epoch() -> Iterator[tuple[NDArray[Any], ...]]:
        for batch in loader:
            parts = tuple(part for column in columns for part in column.disassemble(batch[column.name]))
            del batch
            yield parts

    def assemble(*parts: Any) -> dict[str, Any]:
        rest = iter(parts)
        return {column.name: column.assemble([next(rest) for _ in column.parts]) for column in columns}

    signature = tuple(tf.TensorSpec(part.shape, part.dtype) for column in columns for part in column.parts)
    return source(loader, epoch, signature).map(assemble)
