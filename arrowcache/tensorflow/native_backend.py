"""The native backend: elements that Python makes, as a tf.data dataset that ends when the interpreter does.

TensorFlow asks for elements in threads of its own, ahead of the consumer. A thread that is in Python when
the interpreter ends is stopped there for good, and the destructor of its iterator waits for it: the process
hangs. So before that, while threads still run, the loaders are closed, so that every call returns, and
nothing is asked for afterwards. TensorFlow itself refuses later calls.

`native_dataset` hands batches over as the arrays they were gathered into. `from_generator` takes NumPy
arrays by reference where they begin at a multiple of 64 bytes, as those of a batch do if its bytes are such
a multiple, and copies them otherwise. TensorFlow keeps an array until its tensor has died, and releases it
at its next call of Python. So an array is never a view of the cache's files, which would stay leased.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from numpy.typing import NDArray

from arrowcache.lifetimes import Origin, at_exit
from arrowcache.reading.loader import Loader
from arrowcache.tensorflow.columns import TensorColumn

_MAX_SECONDS = 4.0  # for a call that ignores the closing of its loader, such as a slow `where`
_QUIET_SECONDS = 0.05  # TensorFlow asks once or twice more when it has come to an end


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


def source(loader: Loader, epoch: Callable[[], Iterator[Any]], signature: Any) -> Any:
    """Return a dataset; each of its iterations is a new `epoch()`."""
    _loaders.add(loader)
    return tf.data.Dataset.from_generator(lambda: _Elements(epoch()), output_signature=signature)


class _Elements(Iterator[Any]):
    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements = elements
        _iterators.add(self)

    def __next__(self) -> Any:
        with _calls:
            try:
                return next(self._elements)
            except SystemExit:  # the interpreter's exit cut it short, which TensorFlow would log
                raise StopIteration from None


class _Calls:
    """The calls in progress, of all threads; a context manager around each."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # taken by `with`: Ctrl-C can leave a condition's own locked
        self._changed = threading.Condition(self._lock)
        self._count = 0
        self._closed = False

    def __enter__(self) -> None:
        """Count a call. Raises: StopIteration: the interpreter exits."""
        with self._lock:
            self._changed.notify_all()
            if self._closed:
                raise StopIteration
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def wait(self) -> None:
        """Blocks: until no call is in progress, and no living iterator tries one; some seconds at most."""
        with self._lock:
            if self._changed.wait_for(lambda: self._count == 0, _MAX_SECONDS):
                while _iterators and self._changed.wait(_QUIET_SECONDS):
                    pass


def end_here() -> None:
    if not _origin.is_here:
        return  # a fork: its threads, and the holders of the locks, stayed behind
    _calls.close()
    for loader in [*_loaders]:
        loader.close()
    _calls.wait()


_loaders: weakref.WeakSet[Loader] = weakref.WeakSet()
_iterators: weakref.WeakSet[_Elements] = weakref.WeakSet()
_calls = _Calls()
_origin = Origin()
at_exit(end_here)
