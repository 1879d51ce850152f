"""Library: the compiled C of this folder, loaded twice: `library` releases the GIL, `quick` keeps it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

VERSION = 4  # ENGINE_VERSION of the matching headers
PATH = Path(__file__).with_name("libengine.so")


def address_of(array: NDArray[Any]) -> int:
    """Return the address of an array. Whoever uses it keeps the array alive."""
    try:  # the other way takes four times as long
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except (TypeError, ValueError):  # empty, strided, of times, or read-only
        return int(array.__array_interface__["data"][0])


def declare(name: str, result: type | None, *arguments: type) -> None:
    """Set the argument types and the result type of a function.

    Raises: ImportError: the library has no such function.
    """
    for each in (library, quick):
        function = getattr(each, name, None)
        if function is None:
            raise ImportError(
                f"arrowcache's engine has no {name}: install arrowcache again, which compiles it"
            )
        function.restype, function.argtypes = result, arguments


def _load(kind: type[ctypes.CDLL]) -> Any:
    try:
        return kind(os.fspath(PATH))
    except OSError as error:
        raise ImportError(
            f"arrowcache's engine cannot be loaded ({error}): install arrowcache with pip, which compiles it"
        ) from None


library, quick = _load(ctypes.CDLL), _load(ctypes.PyDLL)
declare("engine_version", ctypes.c_int64)
if library.engine_version() != VERSION:
    raise ImportError(
        f"arrowcache's engine is of version {library.engine_version()}, and {VERSION} is needed: install "
        "arrowcache again, which compiles it"
    )
