"""Ranks: which rank of which job this process is, as it was told or as torch.distributed knows."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed

from arrowcache.reading.membership import Membership, membership
from arrowcache.reading.options import EpochOptions


class Ranks(NamedTuple):
    """What a user said: `rank` and `world_size` (both None: ask torch.distributed), and `run_id`."""

    rank: int | None
    world_size: int | None
    run_id: str | None

    @property
    def are_given(self) -> bool:
        """Whether the user said which rank this is; else it is not known before the first epoch."""
        return self.rank is not None or self.world_size is not None

    def now(self) -> Ranks:
        """With those of torch.distributed, if none were given and it is initialized by now."""
        distributed = torch.distributed
        if not self.are_given and distributed.is_available() and distributed.is_initialized():
            return self._replace(rank=distributed.get_rank(), world_size=distributed.get_world_size())
        return self

    def membership(self, options: EpochOptions) -> Membership | None:
        """What this process is in its job, for epochs of such options; None: it is alone.

        Raises: ValueError, TypeError: what does not fit.
        """
        found = membership(*self)
        options.require_step(found)
        return found
