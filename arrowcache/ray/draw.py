"""Draw: draws one segment in a worker of any node. It is the same that a local pool draws for that task.

The result is the bytes of the segment's file, in one buffer, which Ray puts into its object
store; nothing is published here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.builder import SegmentBuilder
from arrowcache.arrow.segment import Form
from arrowcache.sampling.reads import Sampler, Threads
from arrowcache.sampling.task import Done, Task, draw, failure, sampler_of, samples_of


class _WorkerState(NamedTuple):
    """State that a worker keeps between tasks."""

    key: tuple[bytes, Form]
    sampler: Sampler
    builder: SegmentBuilder
    threads: Threads


_state: _WorkerState | None = None  # one a process: Ray runs tasks one after another in it


def draw_segment(task: Task, form: Form, sampler: bytes) -> tuple[Done, NDArray[np.uint8] | None]:
    """Draw task k's segment.

    Args:
        sampler: the pickled sampler; Ray has it once a node.
    Returns: the result, and the file's bytes, or None if the task failed, as `Done.error` tells, or has none.
    Raises: KeyboardInterrupt: it was cancelled; the sampler's generator was closed by it.
    """
    try:
        return _draw(task, form, sampler)
    except Exception as error:  # noqa: BLE001  # a sampler may raise anything
        return failure(task, error), None


def _draw(task: Task, form: Form, sampler: bytes) -> tuple[Done, NDArray[np.uint8] | None]:
    global _state
    key = (task.digest, form)
    if _state is None or _state.key != key:
        _state = _WorkerState(key, sampler_of(sampler), SegmentBuilder(form), Threads(task.reads))
    samples = samples_of(_state.sampler, task, _state.threads, form)
    drawn = draw(samples, task, _state.builder, _pass, _pass)
    if not _state.builder.rows:
        return drawn.done(0, 0), None
    encoded = _state.builder.encode(drawn.skipped)
    file: NDArray[np.uint8] = np.empty(encoded.nbytes, np.uint8)
    start = 0
    for piece in encoded.pieces:
        file[start : start + piece.nbytes] = np.frombuffer(piece, np.uint8)
        start += piece.nbytes
    return drawn.done(encoded.rows, file.nbytes), file


def _pass() -> None:
    """Ray ends a task by KeyboardInterrupt."""
