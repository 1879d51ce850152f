"""Options: the arguments that all kinds of pools share, checked, as one value."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from arrowcache.pickling import pickled
from arrowcache.sampling.task import Sampler, Task
from arrowcache.storage.layout import TASK_NAME
from arrowcache.units import parse_count

_MOST_SEED_BITS = 128


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The arguments of `SamplerPool`. `sampler` is pickled; `ramp`: early tasks fill small segments."""

    sampler: bytes
    workers: int
    seed: int
    name: str
    segments: int | None
    retries: int
    progress: bool | None
    ramp: bool
    digest: bytes  # tells pickled samplers apart

    @classmethod
    def of(
        cls,
        sample: Sampler,
        workers: int,
        seed: int,
        name: str,
        segments: int | None,
        retries: int,
        progress: bool | None,
    ) -> PoolOptions:
        """Check the arguments.

        Raises: ValueError, TypeError: an argument does not fit, or the sampler cannot be pickled.
        """
        if not callable(sample):
            raise TypeError(f"sample must be a function of a random generator, not {sample!r}")
        workers = parse_count(workers, "workers")
        seed = parse_count(seed, "seed", least=0, most=None)
        if seed.bit_length() > _MOST_SEED_BITS:
            raise ValueError(
                f"seed={seed} must be below 2**{_MOST_SEED_BITS}: segments carry it in their names"
            )
        if not isinstance(name, str) or not TASK_NAME.fullmatch(name):
            raise ValueError(f"name={name!r} must be letters, digits, '_', '.' or '-', at most 100")
        segments = None if segments is None else parse_count(segments, "segments")
        retries = parse_count(retries, "retries", least=0)
        ramp = getattr(sample, "ramp", True)
        if not isinstance(ramp, bool):
            raise TypeError(
                f"the sampler's ramp must be True or False, not {ramp!r}: False has it fill full segments "
                "from the start"
            )
        packed = pickled(sample, "the sampler {!r}")
        digest = hashlib.blake2b(packed, digest_size=16).digest()
        return cls(packed, workers, seed, name, segments, retries, progress, ramp, digest)

    @property
    def pool(self) -> str:
        """The name of the pool's file in pools/."""
        return f"{self.name}.{self.seed}"

    def task(self, number: int, cache: str = "", token: int = 0) -> Task:
        """Return task `number`, without the sampler. `cache`, `token`: as of `Task`."""
        return Task(cache, b"", self.pool, self.seed, number, token, ramp=self.ramp, digest=self.digest)
