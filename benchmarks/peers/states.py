"""Stopping and going on, for loaders that have torch's `state_dict` and `load_state_dict`."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np


def resume(
    loader: Any, labels: Callable[[Any], Any], state: bytes | None, batches: int | None
) -> tuple[list[int], bytes]:
    """Take some batches of an epoch (None: all that are left), from its beginning or where a state says.

    Returns: the labels of their rows, and the state after them.
    """
    if state is not None:
        loader.load_state_dict(pickle.loads(state))
    rows: list[int] = []
    epoch = iter(loader)
    for batch in itertools.islice(epoch, batches):
        rows.extend(np.asarray(labels(batch)).reshape(-1).tolist())
    return rows, pickle.dumps(loader.state_dict())
