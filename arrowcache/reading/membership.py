"""Membership: the rank and job of a loader, from its arguments and the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from arrowcache.units import as_int, parse_count

_MOST_RANKS = 1 << 20  # a step of all of them is counted in 64 bits
_NO_ELASTIC_RUN = "none"  # torchrun's TORCHELASTIC_RUN_ID without --rdzv-id


@dataclass(frozen=True, slots=True)
class Membership:
    """The rank of a loader in its run. `local_world_size` ranks read on this node."""

    rank: int
    world_size: int
    run: str
    local_world_size: int


def membership(rank: int | None, world_size: int | None, run_id: str | None) -> Membership | None:
    """Return the rank and run of a loader, from its arguments and the environment.

    The run is `run_id`, else TORCHELASTIC_RUN_ID (not torchrun's "none"), else
    MASTER_ADDR:MASTER_PORT; the local ranks are LOCAL_WORLD_SIZE, else all.

    Returns: None for a loader without others to agree with: no rank, or a world of one.
    Raises: ValueError, TypeError: an argument does not fit, or is missing.
    """
    require_name(run_id)
    if rank is None and world_size is None:
        if run_id is not None:
            raise ValueError(f"run_id={run_id!r} is given without a rank: pass rank and world_size, too")
        return None
    if rank is None or world_size is None:
        missing = "rank" if rank is None else "world_size"
        raise ValueError(f"rank={rank!r} and world_size={world_size!r} go together: pass {missing}, too")
    rank, world_size = _integer(rank, "rank"), _integer(world_size, "world_size")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} of world_size={world_size}: ranks count from 0 to world_size - 1")
    parse_count(world_size, "world_size", most=_MOST_RANKS)
    if world_size == 1:
        return None
    return Membership(rank, world_size, _run(run_id), _local_world_size(world_size))


def require_name(run_id: str | None) -> None:
    """Raises: TypeError: not a text."""
    if run_id is not None and not isinstance(run_id, str):
        raise TypeError(f"run_id must be a str, not {run_id!r}")


def _integer(value: int, name: str) -> int:
    if not isinstance(value, bool):
        try:
            return as_int(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an int or None, not {value!r}")


def _run(run_id: str | None) -> str:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    elastic = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is not None:
        run: str | None = run_id
    elif elastic and elastic != _NO_ELASTIC_RUN:
        run = elastic
    else:
        run = f"{address}:{port}" if address and port else None
    if not run:
        missing = "neither TORCHELASTIC_RUN_ID nor MASTER_ADDR and MASTER_PORT give one"
        raise ValueError(
            f"the ranks of one job need a name in common, and {'run_id is empty' if run == '' else missing}: "
            "pass run_id=, the same text on all ranks and another one for each job"
        )
    return run


def _local_world_size(world_size: int) -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", str(world_size))
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError(f"LOCAL_WORLD_SIZE={text!r} must be the number of ranks on this node, or unset")
    return min(int(text), world_size)  # more processes than ranks: some of them read the same rows
