"""Distributed: the rank and job of this process, from its options or from torch.distributed."""

from __future__ import annotations

import torch.distributed

from arrowcache.reading.options import LoaderOptions, RankInfo


def rank_now() -> tuple[int, int] | None:
    """Return rank and world size of torch.distributed, if it is initialized by now."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def membership_now(options: LoaderOptions, *, begins: bool = True) -> RankInfo | None:
    """Return the rank info of the options, else of torch.distributed, if it is initialized by now.

    Args:
        begins: an epoch begins. False: torch.distributed may still be initialized, as Lightning does in
            `fit`, so a run_id may have no rank yet.
    Raises: ValueError, TypeError: an argument does not fit, or is missing.
    """
    is_given = options.rank is not None or options.world_size is not None
    if not is_given and (now := rank_now()) is not None:
        return options.rank_info_of(*now)
    return options.rank_info if begins or is_given else None
