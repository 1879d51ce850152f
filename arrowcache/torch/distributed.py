"""Distributed: the rank and job of this process, from its options or from torch.distributed."""

from __future__ import annotations

import torch.distributed

from arrowcache.reading.membership import Membership, membership
from arrowcache.reading.options import LoaderOptions


def membership_now(options: LoaderOptions, *, begins: bool = True) -> Membership | None:
    """Return the membership of the options, else of torch.distributed, if it is initialized by now.

    Args:
        begins: an epoch begins. False: torch.distributed may still be initialized, as Lightning does in
            `fit`, so a run_id may have no rank yet.
    Raises: ValueError, TypeError: an argument does not fit, or is missing.
    """
    distributed, is_given = torch.distributed, options.rank is not None or options.world_size is not None
    if not is_given and distributed.is_available() and distributed.is_initialized():
        return membership(distributed.get_rank(), distributed.get_world_size(), options.run_id)
    return options.membership if begins or is_given else None
