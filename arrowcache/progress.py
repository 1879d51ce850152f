"""Progress: a bar on stderr, which may be gone, full or without a descriptor: that ends no work.

Nobody else writes to stderr while it works.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from arrowcache.os_errors import importing


class _Stderr:
    """The standard error stream; what it does not take is left out: its reader is gone, or the disk full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(AttributeError, OSError, ValueError):  # it may have `write` alone
            self._stream.flush()


@contextmanager
def flushable_stderr() -> Iterator[None]:
    """Let a fork by multiprocessing flush stderr, though what was written to it before cannot be.

    Where its disk is full, or its reader is gone, Python keeps such text, and raises at each flush.
    """
    stream = sys.stderr
    try:
        if stream is not None:
            stream.flush()
    except OSError:
        sys.stderr = _Stderr(stream)
    except (AttributeError, ValueError):  # multiprocessing passes over these
        pass
    try:
        yield
    finally:
        sys.stderr = stream


def progress_bar(progress: bool | None, *, has_widget: bool = False, **options: object) -> Any:
    """Return a bar of tqdm's, with its options. There is none in a process without stderr.

    Args:
        progress: show it. None shows it if stderr is a terminal, or in a notebook if it has a widget.
        has_widget: it is a widget in a notebook; this imports asyncio, too.
    """
    with importing():  # 20 ms that `import arrowcache` need not take
        if has_widget:
            from tqdm.auto import tqdm
        else:
            from tqdm import tqdm

    stream = sys.stderr
    try:
        is_there = stream is not None and not getattr(stream, "closed", False)
    except ValueError:  # it was detached
        is_there = False
    if not is_there:
        return tqdm(**options, disable=True)
    return tqdm(**options, file=_Stderr(stream), disable=None if progress is None else not progress)
