"""Sampler: samples of TFRecord files that stay where they are, for a SamplerPool.

It is a source like those of arrowcache.sampling.sources, and is here because TensorFlow does the framing, the
checksums and the examples.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from arrowcache.arrow.schema import FieldType, Schema
from arrowcache.sampling.sources.source import Choice, Source, shuffled
from arrowcache.tensorflow.records import samples
from arrowcache.tensorflow.tfrecord import find_files, require_compression
from arrowcache.units import format_count, parse_count


class TFRecordFiles(Source):
    """Draws files in proportion to their bytes, and yields the samples of each from its beginning.

    Samples come in order, except for a small shuffle: so the segments of many tasks begin with the first
    samples of some file. Files of about a segment's samples are drawn evenly; of much larger ones, the ends
    are never reached. So a pool's first segments are full ones, too. `from_tfrecords` reads each record once.

    Args:
        files: a path, a glob pattern, or several of them, in any store of tf.io.gfile.
        schema: schema of the records, as for `from_tfrecords`.
        compression: compression of the files: "GZIP", "ZLIB" or None.
        shuffle: number of samples held; a random one of them is yielded for each that is read.
    Raises: FileNotFoundError, IsADirectoryError, ValueError. From a task: SchemaError: a record does
        not fit. SamplerError: a damaged file. Both name the file and the record.
    """

    ramp = False

    def __init__(
        self,
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        schema: Schema | Mapping[str, FieldType],
        *,
        compression: str | None = None,
        shuffle: int = 64,
    ) -> None:
        require_compression(compression)
        self.schema = Schema(schema)
        self._compression = compression
        self._shuffle = parse_count(shuffle, "shuffle", least=0)
        self._files = sorted(find_files(files))
        self._choice = Choice([float(max(1, tf.io.gfile.stat(path).length)) for path in self._files])

    def __repr__(self) -> str:
        return f"TFRecordFiles({self._files[0]!r} and {format_count(len(self._files) - 1, 'other file')})"

    def __call__(self, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
        while True:
            path = self._files[self._choice.draw(rng)]
            read = samples(path, self.schema, self._compression, lambda _: None)
            yield from shuffled(read, self._shuffle, rng)
