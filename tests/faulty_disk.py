"""A disk that fails, or never answers, for scripts of tests: a few calls of C, put before the C library's.

The test compiles them, and starts a `Script` `within` what `faulty_disk` gives; the script has a `Disk`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

KINDS = ("open", "read", "advise")
"""Opening a file; reading it by calls; what the disk is told: `readahead` and `posix_fadvise`."""


def faulty_disk(folder: Path) -> list[str]:
    """The beginning of a command that has a `Disk`; skips where no C compiler is."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("no C compiler is there")
    made = folder / "libfaultydisk.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", source, "-o", made], check=True)
    return ["env", f"LD_PRELOAD={made}"]


class Disk:
    """The faults of this process' disk: none at first. Children that it starts have none of them."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ.pop("LD_PRELOAD"))

    @contextmanager
    def fails(self, name: str, error: int, *kinds: str) -> Iterator[None]:
        """Calls of these kinds fail, of files with this name in their path."""
        with self._set("disk_error", name, error, kinds):
            yield

    @contextmanager
    def is_held(self, name: str, *kinds: str) -> Iterator[None]:
        """They don't come back; whoever asks for what is in memory alone is told that it is not."""
        with self._set("disk_is_held", name, 1, kinds):
            yield

    def calls(self, kind: str) -> int:
        """How many came since the last fault began."""
        return int(self._words("disk_calls")[KINDS.index(kind)])

    @contextmanager
    def _set(self, what: str, name: str, value: int, kinds: tuple[str, ...]) -> Iterator[None]:
        words = self._words(what)
        for number, kind in enumerate(KINDS):
            self._words("disk_calls")[number] = 0
            words[number] = value if kind in kinds else 0
        text = (ctypes.c_char * 256).in_dll(self._library, "disk_name")
        text.value = os.fsencode(name)
        try:
            yield
        finally:
            for number in range(len(KINDS)):
                words[number] = 0
            text.value = b""

    def _words(self, name: str) -> ctypes.Array[ctypes.c_int]:
        return (ctypes.c_int * len(KINDS)).in_dll(self._library, name)
