"""Pickling: takes a user's functions to other processes, and brings their errors back.

Never a sample. Functions go by value if the other process could not import them: lambdas, closures, and
definitions of the main script or a notebook, with their globals at that time. This includes the script
in a process that multiprocessing started, as `torch.multiprocessing.spawn` starts ranks: the script has
another name there.
"""

from __future__ import annotations

import base64
import io
import pickle
import sys
import traceback
from typing import Any

import cloudpickle

from arrowcache.errors import WorkerError

CANNOT_UNPICKLE = (AttributeError, ImportError, TypeError, pickle.UnpicklingError)
"""Errors of `unpickled`: of functions that do not fit the process, beside errors of their own."""

_SCRIPTS = ("__main__", "__mp_main__")  # the latter in processes that multiprocessing started


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Notes the script's classes that it meets."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.classes: list[type] = []

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, type) and thing.__module__ in _SCRIPTS:
            self.classes.append(thing)
        return super().reducer_override(thing)


def pickled(functions: object, what: str, instead: str = "") -> bytes:
    """Pickle a user's functions, for `unpickled`.

    Args:
        what: their name in messages, a `str.format` template for them: "the transform {!r}".
        instead: advice other than to open resources later, such as "pass workers=0".
    Raises: TypeError: they cannot be pickled.
    """
    try:
        return _dumped(functions)
    except Exception as error:
        way_out = "open files and connections in its first call, not before"
        if instead:
            way_out += f", or {instead}"
        raise TypeError(f"{what.format(functions)} cannot be pickled ({error}): {way_out}") from error


def _dumped(functions: object) -> bytes:
    script = sys.modules.get("__mp_main__")
    if script is not None and script.__name__ == "__mp_main__":  # set there only
        cloudpickle.register_pickle_by_value(script)
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump((functions, pickler.classes))  # in this order: the list is filled meanwhile
    return file.getvalue()


def unpickled(data: bytes) -> Any:
    """Unpickle functions in another process, where the script's classes become these ones.

    Otherwise an object of such a class could not be sent back by its class' name: it would be another class.
    Raises: any Exception of unpickling.
    """
    functions, classes = cloudpickle.loads(data)
    for each in classes:
        script, name = sys.modules.get(each.__module__), each.__qualname__
        if script is not None and name.isidentifier() and isinstance(getattr(script, name, each), type):
            setattr(script, name, each)
    return functions


class WorkerTraceback(Exception):
    """The traceback of a worker process: the cause of the error that the main process raises."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def pack_error(error: BaseException) -> str:
    """Pack an exception with its traceback for a message; as text alone if it cannot be pickled."""
    text = "".join(traceback.format_exception(error))
    try:
        packed = cloudpickle.dumps(error)
        if type(pickle.loads(packed)) is not type(error):
            packed = None
    except Exception:  # noqa: BLE001  # an exception may be anything, and hold anything
        packed = None
    return base64.b64encode(pickle.dumps((text, packed))).decode()


def unpack_error(packed: str) -> BaseException:
    """Return the exception to raise in the main process, with its worker's traceback as its cause."""
    text, inner = pickle.loads(base64.b64decode(packed))
    error: BaseException | None = None
    if inner is not None:
        try:
            error = pickle.loads(inner)
        except Exception:  # noqa: BLE001  # its class may exist in the worker alone
            error = None
    if not isinstance(error, BaseException):
        return WorkerError(f"a worker process failed with what cannot be pickled:\n{text}")
    if isinstance(error, StopIteration) or not isinstance(error, Exception):  # would look like a normal end
        error = RuntimeError(f"a transform raised {error!r}")
    error.__cause__ = WorkerTraceback(text)
    return error
