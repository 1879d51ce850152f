"""Arrow: batches go into TensorFlow as Arrow files in memory, which tensorflow-io's C++ code reads.

Python makes a frame of a few batches (frames.py) and names the addresses of its files. After that no
Python runs until all of the frame has been read. So beside a busy thread the GIL is asked for once a
frame, not once a batch.

While one frame is read, the next is made: `prefetch` takes one frame and asks for no more, and
`flat_map` takes the next only when it has read one to its end. The last frame is no exception, since
another frame marks the end of an epoch. So memory is written again only when nothing reads it. Another
iteration of the dataset has frames of its own, and they stay until TensorFlow drops it: even after an error
TensorFlow delivers earlier batches.

tensorflow-io 0.37.1 is the last release, and its library loads only into TensorFlow 2.16.
TensorFlow logs that its dataset has no `InputDatasets`, which only optimizations and options ask for;
only TF_CPP_MIN_LOG_LEVEL=3, before TensorFlow is imported, would silence that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from arrowcache.reading.loader import Loader
from arrowcache.tensorflow.columns import TensorColumn, TensorPart
from arrowcache.tensorflow.frames import AHEAD, Frames, Places, Rooms, assemble_columns, wires_of
from arrowcache.tensorflow.source import source


def find_reader() -> Callable[..., Any]:
    """Return tensorflow-io's op.

    Raises: ImportError: tensorflow-io is missing, or was built for another TensorFlow.
    """
    together = "tensorflow-io 0.37.1 and TensorFlow 2.16 go together: install these, or pass backend='native'"
    try:
        from tensorflow_io.python.ops import core_ops  # slow, and may be missing

        read: Callable[..., Any] = core_ops.io_arrow_zero_copy_dataset
    except ModuleNotFoundError as error:
        missing = "tensorflow-io" if (error.name or "").startswith("tensorflow_io") else f"also {error.name}"
        raise ImportError(f"backend='arrow' needs {missing}, which is not installed; {together}") from None
    except Exception as error:  # noqa: BLE001  # what a library of another version raises is anybody's guess
        text = f"tensorflow-io does not load into TensorFlow {tf.__version__} ({type(error).__name__})"
        raise ImportError(f"{text}; {together}") from None
    return read


def arrow_dataset(
    loader: Loader,
    columns: Sequence[TensorColumn],
    fixed: Sequence[str],
    rooms: Rooms,
    read: Callable[..., Any],
) -> Any:
    """Return a dataset of dicts; each of its iterations is an epoch of a loader."""
    files, assemble = wires_of(columns, fixed), partial(assemble_columns, columns, fixed)
    end = np.full(len(files), _NOTHING.address, np.uint64), np.full(len(files), _NOTHING.size, np.int64)

    def epoch() -> _EpochFrames:
        return _EpochFrames(Frames(columns, fixed, rooms), loader, end)

    def rows_of(addresses: Any, sizes: Any) -> Any:
        read_files = [_rows_of(read, wires, addresses[n], sizes[n]) for n, wires in enumerate(files)]
        return tf.data.Dataset.zip(tuple(read_files))

    signature = tf.TensorSpec((len(files),), tf.uint64), tf.TensorSpec((len(files),), tf.int64)
    frames = source(loader, epoch, signature).prefetch(AHEAD)
    return frames.flat_map(rows_of).map(assemble)


class _EpochFrames(Iterator[Places]):
    """The frames of an epoch, and one that marks its end: an iterator, which owns the frames.

    The last frame's files are empty, and asked for when all of the frame before it has been read.
    """

    def __init__(self, frames: Frames, loader: Loader, end: Places) -> None:
        self._frames = frames
        self._places = itertools.chain(frames.of_epoch(loader), [end])

    def __next__(self) -> Places:
        return next(self._places)


def _file_of_nothing() -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pa.ipc.new_file(sink, pa.schema([])).close()
    return sink.getvalue()


_NOTHING = _file_of_nothing()  # never freed: TensorFlow has only its address


def _rows_of(read: Callable[..., Any], wires: Sequence[TensorPart], address: Any, nbytes: Any) -> Any:
    types, shapes = [wire.dtype for wire in wires], [tf.TensorShape(wire.shape) for wire in wires]
    variant = read(
        address,
        nbytes,
        columns=list(range(len(wires))),
        batch_size=0,
        batch_mode="keep_remainder",
        output_types=types,
        output_shapes=shapes,
    )
    spec = tuple(tf.TensorSpec(shape, dtype) for dtype, shape in zip(types, shapes, strict=True))
    return dataset_ops._VariantDataset(variant, spec)  # the class of tensorflow-io's own datasets
