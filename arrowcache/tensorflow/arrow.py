"""Arrow: batches go into TensorFlow as Arrow files in memory, which tensorflow-io's C++ code reads.

A frame is such a file: an Arrow IPC file of a few record batches, each of them one row: a batch, in which
every part of a column is a list, or a text. Python makes a frame and names its address; from there on no
Python runs until all of the frame has been read. So beside a busy thread the GIL is asked for once a
frame, not once a batch.

A frame is read to its end before the next one is asked for (`flat_map`), and its memory is used again
then. It is never given back while the dataset lives: a reader that is late finds other
samples there at worst, and none can be, since TensorFlow ends an iterator's readers before its source.

tensorflow-io 0.37.1 is the last release, and its library loads only into TensorFlow 2.16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.data.ops import dataset_ops

from arrowcache.reading.assembly import Batch
from arrowcache.reading.loader import Loader
from arrowcache.reading.output import page_aligned
from arrowcache.reading.values import column_bytes
from arrowcache.tensorflow.columns import Column, Part

_FRAME_BYTES = 32 << 20
_HEADER_BYTES = 4096  # and as many for each column: more than Arrow's headers take
_WIRE = {1: tf.uint8, 2: tf.uint16, 4: tf.int32, 8: tf.int64}  # by bytes of an element; the op reads them


def find_reader() -> Callable[..., Any]:
    """tensorflow-io's op.

    Raises: ImportError: it is missing, or was built for another TensorFlow.
    """
    together = "tensorflow-io 0.37.1 and TensorFlow 2.16 go together: install these, or pass backend='native'"
    try:
        from tensorflow_io.python.ops import core_ops  # here: it takes a while, and may be missing

        read: Callable[..., Any] = core_ops.io_arrow_zero_copy_dataset
    except ModuleNotFoundError:
        raise ImportError(
            f"backend='arrow' needs tensorflow-io, which is not installed; {together}"
        ) from None
    except Exception as error:  # noqa: BLE001  # what a library of another version raises is anybody's guess
        text = f"tensorflow-io does not load into TensorFlow {tf.__version__} ({type(error).__name__})"
        raise ImportError(f"{text}; {together}") from None
    return read


def arrow_dataset(loader: Loader, columns: Sequence[Column], read: Callable[..., Any]) -> Any:
    """A dataset of dicts, each iteration of which is an epoch of a loader.

    Args:
        loader: yields what `columns` say.
        read: tensorflow-io's op.
    """
    wires = [wire for column in columns for part in column.parts for wire in _wires_of(part)]
    frames = Frames(columns)

    def epoch() -> Iterator[tuple[np.uint64, np.int64]]:
        batches, size = iter(loader), 1  # the first batch of an epoch alone, for its latency
        while group := list(itertools.islice(batches, size)):
            most = max(1, _FRAME_BYTES // max(1, sum(map(column_bytes, group[0].values()))))
            yield frames.write(group)
            size = min(2 * size, most)

    def rows_of(address: Any, nbytes: Any) -> Any:
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
        return dataset_ops._VariantDataset(variant, spec)  # what tensorflow-io's own datasets are

    def assemble(*lists: Any) -> dict[str, Any]:
        rest = iter(lists)
        return {
            column.name: column.assemble([_from_wire(part, rest) for part in column.parts])
            for column in columns
        }

    places = tf.data.Dataset.from_generator(
        epoch, output_signature=(tf.TensorSpec((), tf.uint64), tf.TensorSpec((), tf.int64))
    )
    return places.flat_map(rows_of).map(assemble)


class Frames:
    """Writes batches as frames, one after another into the same memory."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self._memory = page_aligned(1)

    def write(self, group: list[Batch]) -> tuple[np.uint64, np.int64]:
        """Write a frame of some batches, and drop them.

        Returns: its address and bytes; valid until the next call.
        """
        rows = [self._row_of(batch) for batch in group]
        group.clear()
        table = pa.Table.from_batches(rows)
        needed = table.nbytes + len(rows) * (1 + table.num_columns) * _HEADER_BYTES
        if self._memory.nbytes < needed:
            self._memory = page_aligned(needed)
        sink = pa.FixedSizeBufferWriter(pa.py_buffer(self._memory))
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)  # in one call, so that the GIL is asked for once
        return np.uint64(self._memory.ctypes.data), np.int64(sink.tell())

    def _row_of(self, batch: Batch) -> pa.RecordBatch:
        lists = [array for column in self._columns for array in _lists_of(column, batch[column.name])]
        return pa.RecordBatch.from_arrays(lists, [str(number) for number in range(len(lists))])


def _wires_of(part: Part) -> list[Part]:
    """What the op is to read of a part: elements of a size that it and Arrow have, in one dimension."""
    if part.dtype == tf.string:
        return [Part(tf.string, ()), Part(tf.int64, (None,))]
    return [Part(_WIRE[min(part.dtype.size, 8)], (None,))]


def _lists_of(column: Column, values: Any) -> list[pa.Array]:
    """A batch's column as Arrow arrays of one row, over the same memory."""
    if isinstance(values, list):
        (items,) = column.disassemble(values)
        ends = np.cumsum([0, *map(len, items)])
        return [pa.array([b"".join(items)], pa.binary()).view(pa.utf8()), _list_of(ends)]
    return [_list_of(array) for array in column.disassemble(values)]


def _list_of(array: NDArray[Any]) -> pa.Array:
    wire = np.dtype(_WIRE[min(array.dtype.itemsize, 8)].as_numpy_dtype)
    flat = array.reshape(-1).view(wire)
    return pa.ListArray.from_arrays(np.array([0, len(flat)], np.int32), pa.array(flat))


def _from_wire(part: Part, lists: Iterator[Any]) -> Any:
    """A part's tensor, of the lists that carried it."""
    if part.dtype == tf.string:
        text, ends = next(lists), next(lists)
        items = tf.strings.substr(text, ends[:-1], ends[1:] - ends[:-1], unit="BYTE")
        return tf.ensure_shape(items, part.shape)
    flat = next(lists)
    if part.dtype == tf.bool:
        flat = tf.cast(flat, tf.bool)  # a bitcast to bool does not exist
    elif part.dtype.size > 8:
        flat = tf.bitcast(tf.reshape(flat, (-1, part.dtype.size // 8)), part.dtype)
    elif part.dtype != flat.dtype:
        flat = tf.bitcast(flat, part.dtype)
    return tf.reshape(flat, [-1 if size is None else size for size in part.shape])
