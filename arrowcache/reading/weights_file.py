"""Weights as a file, by which an epoch goes on from a state, or ranks share it.

A state names the file in `notes/`, by the digest of its content. It is written when somebody needs it: when a
state of an epoch under way is asked for, or a rank begins one for others. The last few are kept: as many as
an eighth of the capacity has room for, and one at least. An epoch has the room made before it leases all that
might leave.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from arrowcache.errors import MissingSegmentsError
from arrowcache.reading.weights import Weights
from arrowcache.storage.layout import WEIGHTS_NAME
from arrowcache.storage.note_lines import arrow_file
from arrowcache.storage.store import Store

_KEPT = 4
_MORE_BYTES = 4096  # of a file than its weights


def missing_bytes(store: Store, rows: int) -> int:
    """The bytes that files of weights of so many rows may take beyond those that are there.

    0 if one is above an eighth of the capacity: it is left to `write_weights`.
    """
    nbytes = 4 * rows + _MORE_BYTES
    return max(0, min(_KEPT, store.settings.notes_bytes // nbytes) * nbytes - store.folder.weights_bytes())


def write_weights(store: Store, weights: Weights) -> None:
    """Write the file of weights, if it is not there; under cache.lock.

    Raises: CacheFullError: what is leased leaves no room.
    """
    name = _name(weights.name)
    if not store.folder.touch_weights(name):
        data = arrow_file(pa.schema([("weight", pa.float32())]), [weights.of_rows])
        kept = min(_KEPT, store.settings.notes_bytes // data.size)
        store.folder.drop_weights(max(1, kept) - 1)
        store.require_room(data.size)
        store.folder.link_weights(name, data)


def read_weights(store: Store, name: str) -> Weights:
    """Read the weights that a state names.

    Raises: MissingSegmentsError: the file has left, or is damaged. ValueError: no such name.
    """
    if not isinstance(name, str) or not WEIGHTS_NAME.fullmatch(_name(name)):
        raise ValueError(f"the state is damaged: weights of the name {name!r}")
    try:
        with pa.ipc.open_file(store.folder.read_weights(_name(name))) as file:
            batch = file.get_batch(0)
        weights = Weights(np.frombuffer(batch.column(0).buffers()[1], np.float32, len(batch)))
        if weights.name == name:
            return weights
        why = "are damaged"
    except FileNotFoundError:
        why = f"have left the cache, which keeps the last {_KEPT}"
    except pa.ArrowInvalid as error:
        why = f"are damaged ({error})"
    raise MissingSegmentsError(
        f"the weights of the epoch that the state is of {why}: begin the next epoch, with "
        "state | {'epoch': state['epoch'] + 1, 'position': 0, 'segments': [], 'weights': None}"
    )


def _name(digest: str) -> str:
    return f"{digest}.weights.arrow"
