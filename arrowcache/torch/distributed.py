"""Which rank this process is, as far as torch.distributed knows."""

from __future__ import annotations

import torch.distributed


def rank_of_process(rank: int | None, world_size: int | None) -> tuple[int | None, int | None]:
    """The rank and world size given, else those of torch.distributed, if it is initialized by now."""
    if rank is None and world_size is None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
    return rank, world_size
