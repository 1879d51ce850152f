"""tensorflow-io's backend: batches go into TensorFlow as Arrow files in memory, which its C++ code reads.

A frame has a few batches as such files: one a column of fixed width, and one for all others. A row of a
file is a batch, whose values are a list, or a text. Python makes a frame and names the addresses of its
files; then no Python runs until all of the frame has been read. So beside a busy thread the GIL is asked
for once a frame, not once a batch.

Batches that were gathered side by side (`PaddedBuffers`) become a file in place. An Arrow file of one
record batch is its headers, its values and its footer, one after another, and there is room before and
behind the values. All other columns are written by pyarrow into memory that is used again.

While one frame is read, the next is made: `prefetch` takes one frame and asks for no more, and `flat_map`
takes the next only when it has read one to its end. The last frame is no exception, since another frame
marks the end of an epoch. So memory is written again only when nothing reads it. Another iteration of the
dataset has frames of its own, and they stay until TensorFlow drops it: even after an error TensorFlow
delivers earlier batches.

Guarantees: a frame stays as it is while the next one is made, and `Frames` live.
Must never: write into memory of a batch that is not in the frame.

tensorflow-io 0.37.1 is the last release, and its library loads only into TensorFlow 2.16. TensorFlow logs
that its dataset has no `InputDatasets`, which only optimizations and options ask for; only
TF_CPP_MIN_LOG_LEVEL=3, before TensorFlow is imported, would silence that.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.data.ops import dataset_ops

from arrowcache.linux import PAGE_BYTES
from arrowcache.reading.assembly import Batch
from arrowcache.reading.loader import Loader
from arrowcache.reading.slots import page_aligned
from arrowcache.tensorflow.columns import TensorColumn, TensorPart
from arrowcache.tensorflow.native_backend import source

_AHEAD = 1  # frames that may be made while one is read
_HEAD_BYTES = 16 * PAGE_BYTES  # headers, and 4 bytes a batch
_TAIL_BYTES = PAGE_BYTES
_ALIGNMENT = 64  # of a file
_HEADER_BYTES = 4096  # and as many for each column: more than Arrow's headers take
_MAX_FORMS = 256
_MAX_ELEMENTS = (1 << 31) - 1  # of a batch's column: Arrow's offsets of lists and texts are int32
_WIRE = {1: tf.uint8, 2: tf.uint16, 4: tf.int32, 8: tf.int64}  # by bytes of an element; the op reads them


class PaddedBuffers:
    """Memory for batches side by side, with room on both sides. Thread-safe."""

    def __init__(self) -> None:
        self._starts: dict[int, weakref.ref[NDArray[np.uint8]]] = {}

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """(nbytes,) uint8 that start at a page."""
        room = page_aligned(_HEAD_BYTES + nbytes + _TAIL_BYTES)
        values = room[_HEAD_BYTES : _HEAD_BYTES + nbytes]
        for start, found in [*self._starts.items()]:
            if found() is None:
                self._starts.pop(start, None)
        self._starts[values.ctypes.data] = weakref.ref(values)
        return values

    def around(self, start: int) -> NDArray[np.uint8] | None:
        """Return the room around values at an address, or None if no values begin there."""
        found = self._starts.get(start)
        values = None if found is None else found()
        if values is None:
            return None
        whole: NDArray[np.uint8] = values.base  # type: ignore[assignment]
        before = start - whole.ctypes.data
        return whole[before - _HEAD_BYTES : before + values.nbytes + _TAIL_BYTES]


Places = tuple[NDArray[np.uint64], NDArray[np.int64]]
"""The addresses and bytes of a frame's files, (files,) each."""


class _HeadAndTail(NamedTuple):
    """The bytes before and behind the values of a file of one column."""

    head: NDArray[np.uint8]
    tail: NDArray[np.uint8]


class Frames:
    """Makes frames of batches."""

    def __init__(self, columns: Sequence[TensorColumn], fixed: Sequence[str], rooms: PaddedBuffers) -> None:
        self._fixed, self._others = _divided(columns, fixed)
        self._rooms = rooms
        self._memories = deque(page_aligned(1) for _ in range(1 + _AHEAD))
        self._held: deque[list[Batch]] = deque(maxlen=1 + _AHEAD)

    def of_epoch(self, batches: Iterable[Batch]) -> Iterator[Places]:
        """Yield an epoch's batches as frames: addresses and bytes of the files of each.

        Blocks: until the batch after a frame exists too, since only then is the frame known to be whole.
        """
        for some in self._side_by_side(batches):
            yield self.write(some)

    def _side_by_side(self, batches: Iterable[Batch]) -> Iterator[list[Batch]]:
        some: list[Batch] = []
        try:
            for batch in batches:
                if some and not self._adjoin(some[-1], batch):
                    yield some
                    some = []
                some.append(batch)
                del batch
        except Exception:  # earlier batches are delivered first
            if some:
                yield some
            raise
        if some:
            yield some

    def _adjoin(self, one: Batch, other: Batch) -> bool:
        pairs = [(one[column.name], other[column.name]) for column in self._fixed]
        return bool(pairs) and all(b.ctypes.data == a.ctypes.data + a.nbytes for a, b in pairs)

    def write(self, some: list[Batch]) -> Places:
        """Make a frame of batches that all lie side by side.

        Returns: its files' addresses and bytes, (files,) each.
        """
        files: list[tuple[int, int] | pa.Table] = []
        for column in self._fixed:
            arrays = [_flat(*column.disassemble(batch[column.name])) for batch in some]
            files.append(self._in_place(arrays) or pa.Table.from_batches(map(_row_of, map(_lists, arrays))))
        if self._others:
            rows = [
                [lists for column in self._others for lists in _lists_of(column, batch[column.name])]
                for batch in some
            ]
            files.append(pa.Table.from_batches(map(_row_of, rows)))
        self._held.append(some)
        places = self._written(files, len(some))
        return np.array([at for at, _ in places], np.uint64), np.array([size for _, size in places], np.int64)

    def _in_place(self, arrays: list[NDArray[Any]]) -> tuple[int, int] | None:
        """Make a file of arrays in place, or return None if that is impossible."""
        start, nbytes = arrays[0].ctypes.data, sum(array.nbytes for array in arrays)
        room = self._rooms.around(start)
        form = _form(arrays[0].dtype, len(arrays), len(arrays[0]), len(arrays[-1]))
        if room is None or form is None:
            return None
        end = _HEAD_BYTES + nbytes
        room[_HEAD_BYTES - len(form.head) : _HEAD_BYTES] = form.head
        room[end : end + len(form.tail)] = form.tail
        return start - len(form.head), len(form.head) + nbytes + len(form.tail)

    def _written(self, files: list[tuple[int, int] | pa.Table], batches: int) -> list[tuple[int, int]]:
        tables = [file for file in files if isinstance(file, pa.Table)]
        headers = batches * sum(1 + table.num_columns for table in tables) * _HEADER_BYTES
        needed = sum(table.nbytes for table in tables) + headers
        memory = self._memories[0]
        if memory.nbytes < needed:
            memory = self._memories[0] = page_aligned(needed)
        self._memories.rotate()
        places, rest = [], memory
        for file in files:
            if isinstance(file, pa.Table):
                sink = pa.FixedSizeBufferWriter(pa.py_buffer(rest))
                with pa.ipc.new_file(sink, file.schema) as writer:
                    writer.write_table(file)  # in one call: it takes the GIL once
                places.append((rest.ctypes.data, sink.tell()))
                rest = rest[-(-sink.tell() // _ALIGNMENT) * _ALIGNMENT :]
            else:
                places.append(file)
        return places


@lru_cache(_MAX_FORMS)
def _form(dtype: np.dtype[Any], batches: int, elements: int, last: int) -> _HeadAndTail | None:
    """Return the form of a file of batches with `elements` each, the last with `last`, or None: no room."""
    ends = elements * np.arange(batches + 1)
    ends[-1] += last - elements
    if not 0 < ends[-1] <= _MAX_ELEMENTS:
        return None
    values = np.empty(ends[-1], dtype)
    rows = _row_of([pa.ListArray.from_arrays(ends.astype(np.int32), pa.array(values))])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_batch(rows)
    file = sink.getvalue()
    (found,) = pa.ipc.open_file(file).get_batch(0).columns
    start = found.values.buffers()[1].address - file.address
    content = np.frombuffer(file, np.uint8)
    form = _HeadAndTail(content[:start].copy(), content[start + values.nbytes :].copy())
    return form if len(form.head) <= _HEAD_BYTES and len(form.tail) <= _TAIL_BYTES else None


def _divided(
    columns: Sequence[TensorColumn], fixed: Sequence[str]
) -> tuple[list[TensorColumn], list[TensorColumn]]:
    return [c for c in columns if c.name in fixed], [c for c in columns if c.name not in fixed]


def wires_of(columns: Sequence[TensorColumn], fixed: Sequence[str]) -> list[list[TensorPart]]:
    """Return the parts to be read of each file of a frame."""
    alone, others = _divided(columns, fixed)
    files = [[column] for column in alone]
    if others:
        files.append(others)
    return [[wire for column in file for wire in _wires_of(column)] for file in files]


def assemble_columns(
    columns: Sequence[TensorColumn], fixed: Sequence[str], *files: Sequence[Any]
) -> dict[str, Any]:
    """Make a batch of the results of reading each file of a frame; in a graph."""
    alone, others = _divided(columns, fixed)
    rest = iter([lists for file in files for lists in file])
    found = {
        column.name: column.assemble([_from_wire(part, rest) for part in column.parts])
        for column in (*alone, *others)
    }
    return {column.name: found[column.name] for column in columns}


def _wires_of(column: TensorColumn) -> list[TensorPart]:
    """Return the parts of a column for the op: flat elements, of a size that both the op and Arrow have."""
    wires: list[TensorPart] = []
    for part in column.parts:
        if part.dtype == tf.string:
            wires += [TensorPart(tf.string, ()), TensorPart(tf.int64, (None,))]
        else:
            wires.append(TensorPart(_WIRE[min(part.dtype.size, 8)], (None,)))
    return wires


def _row_of(lists: Sequence[pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*lists], [str(number) for number in range(len(lists))])


def _lists_of(column: TensorColumn, values: Any) -> list[pa.Array]:
    """Return a batch's column as Arrow arrays of one row, over the same memory."""
    if isinstance(values, list):
        (items,) = column.disassemble(values)
        ends = np.cumsum([0, *map(len, items)])
        _require_room(ends[-1])
        return [pa.array([b"".join(items)], pa.binary()).view(pa.utf8()), *_lists(_flat(ends))]
    return [lists for array in column.disassemble(values) for lists in _lists(_flat(array))]


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as it is sent: elements of a wire's dtype, in one dimension."""
    wire = np.dtype(_WIRE[min(array.dtype.itemsize, 8)].as_numpy_dtype)
    flat: NDArray[Any] = array.reshape(-1).view(wire)
    _require_room(len(flat))
    return flat


def _lists(flat: NDArray[Any]) -> list[pa.Array]:
    return [pa.ListArray.from_arrays(np.array([0, len(flat)], np.int32), pa.array(flat))]


def _require_room(elements: int) -> None:
    if elements > _MAX_ELEMENTS:
        raise ValueError(
            f"backend='arrow' carries at most {_MAX_ELEMENTS} elements of a column in a batch, "
            f"not {elements}: lower batch_size, or pass backend='native'"
        )


def _from_wire(part: TensorPart, lists: Iterator[Any]) -> Any:
    if part.dtype == tf.string:
        text, ends = next(lists), next(lists)
        items = tf.strings.substr(text, ends[:-1], ends[1:] - ends[:-1], unit="BYTE")
        return tf.ensure_shape(items, part.shape)
    flat = next(lists)
    if part.dtype == tf.bool:
        flat = tf.cast(flat, tf.bool)  # TensorFlow has no bitcast to bool
    elif part.dtype.size > 8:
        flat = tf.bitcast(tf.reshape(flat, (-1, part.dtype.size // 8)), part.dtype)
    elif part.dtype != flat.dtype:
        flat = tf.bitcast(flat, part.dtype)
    return tf.reshape(flat, [-1 if size is None else size for size in part.shape])


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
    rooms: PaddedBuffers,
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
    frames = source(loader, epoch, signature).prefetch(_AHEAD)
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
