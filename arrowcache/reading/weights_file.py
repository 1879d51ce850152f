"""Weights as a file, by which an epoch goes on from a state, or ranks share it.

A state, or a file of ranks, names the file in `notes/`, by the digest of its content. It is written when
somebody needs it: when a state of an epoch under way is asked for, or a rank begins one for others. Those of
ranks stay as long as their file in `ranks/` is held. Of states those of the last few are kept: as many as an
eighth of the capacity has room for, fewer where what is leased leaves none, and one at least. An epoch has
room for one made before it leases all that might leave.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from arrowcache.errors import CacheFormatError, CacheFullError, MissingSegmentsError
from arrowcache.reading.packing import Packing
from arrowcache.reading.plan import Plan
from arrowcache.reading.weights import Weights
from arrowcache.storage.layout import WEIGHTS_NAME, RanksRecord
from arrowcache.storage.note_lines import arrow_file
from arrowcache.storage.store import Store

_KEPT = 4
_MORE_BYTES = 4096  # of a file than its weights
_looked_at: weakref.WeakSet[Weights] = weakref.WeakSet()  # whose file was found, or made, to be sound
_NEXT_EPOCH = (
    "those of the last few states are kept; begin the next epoch, with "
    "state | {'epoch': state['epoch'] + 1, 'position': 0, 'segments': [], 'weights': None}"
)


def state_of(store: Store, plan: Plan) -> dict[str, Any]:
    """Return a plan as a state that any process resumes: the file of its weights is written.

    Blocks: for cache.lock and the disk, if it has weights.
    Raises: CacheFullError: as of `write_weights`.
    """
    if plan.weights is not None:
        with store.locked():
            write_weights(store, plan.weights)
    return plan.to_state()


def plan_of(
    store: Store, state: dict[str, Any], *, has_buckets: bool = False, packing: Packing | None = None
) -> Plan:
    """Return the plan of a state, with the weights that it names.

    Raises: as `Plan.from_state` and `read_weights`.
    """
    name = state.get("weights") if isinstance(state, dict) and state.get("segments") else None
    weights = read_weights(store, name) if name else None
    full_rows = store.settings.full_rows
    return Plan.from_state(state, full_rows, has_buckets=has_buckets, packing=packing, weights=weights)


def missing_bytes(store: Store, rows: int, *, of_ranks: bool) -> int:
    """The bytes that a file of weights of so many rows, and one of ranks, take beyond those that are there.

    0 if one is above an eighth of the capacity: it is left to `write_weights`.
    """
    nbytes = 4 * rows + _MORE_BYTES
    if nbytes > store.settings.notes_bytes:
        return 0
    return max(0, (1 + of_ranks) * nbytes - store.folder.weights_bytes())


def write_weights(store: Store, weights: Weights, *, of_ranks: bool = False) -> None:
    """Write the file of weights, if it is not there or, at first, if it is damaged; under cache.lock.

    Blocks: for the disk. The content of a file is looked at once for each of these objects.
    Args:
        of_ranks: for ranks who join the epoch, by a file in `ranks/` that is linked next; else for a state.
    Raises: CacheFullError: what is leased leaves no room.
    """
    name = _name(weights.name)
    if weights not in _looked_at:
        with suppress(MissingSegmentsError):
            read_weights(store, weights.name)
            _looked_at.add(weights)
    if weights not in _looked_at or not store.folder.touch_weights(name, of_ranks=of_ranks):
        data = arrow_file(pa.schema([("weight", pa.float32())]), [weights.of_rows])
        kept = max(1, min(_KEPT, store.settings.notes_bytes // data.size))
        names_of_ranks = _names_of_ranks(store)
        for others in reversed(range(kept + of_ranks)):
            store.folder.drop_weights(others, names_of_ranks)
            try:
                store.require_room(data.size)
                break
            except CacheFullError:
                if not others:
                    raise
        store.folder.link_weights(name, data, of_ranks=of_ranks)
        _looked_at.add(weights)


def _names_of_ranks(store: Store) -> set[str]:
    """The files by which ranks may still join an epoch."""
    names = set()
    for data in store.folder.held_ranks():
        with suppress(CacheFormatError):  # nobody can join it
            names.add(_name(RanksRecord.unpack(data).weights))
    return names


def read_weights(
    store: Store, name: str, whose: str = "of the state's epoch", way: str = _NEXT_EPOCH
) -> Weights:
    """Read the weights that a state names.

    Args:
        whose, way: words of the error where another names them.
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
        why = "have left the cache"
    except (pa.ArrowException, OSError, ValueError, LookupError) as error:  # of what Arrow meets there
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        why = f"are damaged ({error})"
    raise MissingSegmentsError(f"the weights {whose} {why}: {way}")


def _name(digest: str) -> str:
    return f"{digest}.weights.arrow"
