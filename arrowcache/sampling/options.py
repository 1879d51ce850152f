"""Options: the arguments that all kinds of pools share, checked, as one value."""

from __future__ import annotations

import hashlib
from dataclasses import InitVar, dataclass, field
from functools import partial

from arrowcache.arrow.segment import Form
from arrowcache.pickling import pickled
from arrowcache.sampling.reads import Sampler
from arrowcache.sampling.task import Task
from arrowcache.storage.layout import TASK_NAME
from arrowcache.units import parse_count

_MOST_SEED_BITS = 128
MOST_READS = 1024  # threads of a worker


_SAYS = {  # attributes of samplers
    "ramp": "False has it fill full segments from the start",
    "hedge": "True has reads that take unusually long begun again, while they are at work",
}
ON_ERROR = ("raise", "skip")


def require_policy(on_error: object) -> None:
    """Raise ValueError: it is no way to go on after an error."""
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error={on_error!r} is unknown: use {' or '.join(map(repr, ON_ERROR))}")


def fitted(sample: Sampler, form: Form) -> Sampler:
    """Return a sampler for segments of a form: a source that is divided among tasks asks for that."""
    fit = getattr(sample, "fitted", None)
    return sample if fit is None else fit(form)


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The arguments of `SamplerPool`. `sampler` is pickled; `ramp`, `chunk_rows`: as its attributes.

    Raises: ValueError, TypeError: an argument does not fit, or the sampler cannot be pickled.
    """

    sample: InitVar[Sampler]
    workers: int
    seed: int
    name: str
    segments: int | None
    retries: int
    progress: bool | None
    reads: int
    on_error: str
    sampler: bytes = field(init=False)
    ramp: bool = field(init=False)
    chunk_rows: int = field(init=False)
    digest: bytes = field(init=False)  # tells pickled samplers apart
    tasks: int | None = field(init=False)  # numbers from this one on have nothing to draw
    division: str = field(init=False)  # of the samples among tasks; empty: each task draws from all

    def __post_init__(self, sample: Sampler) -> None:
        if not callable(sample):
            raise TypeError(f"sample must be a function of a random generator, not {sample!r}")
        keep = partial(object.__setattr__, self)
        keep("workers", parse_count(self.workers, "workers"))
        keep("reads", parse_count(self.reads, "reads", most=MOST_READS))
        keep("seed", parse_count(self.seed, "seed", least=0, most=None))
        if self.seed.bit_length() > _MOST_SEED_BITS:
            raise ValueError(
                f"seed={self.seed} must be below 2**{_MOST_SEED_BITS}: segments carry it in their names"
            )
        if not isinstance(self.name, str) or not TASK_NAME.fullmatch(self.name):
            raise ValueError(f"name={self.name!r} must be letters, digits, '_', '.' or '-', at most 100")
        keep("tasks", getattr(sample, "tasks", None))
        keep("division", getattr(sample, "division", ""))
        if self.segments is not None:
            keep("segments", parse_count(self.segments, "segments"))
        elif self.tasks is not None:
            keep("segments", self.tasks)
        keep("retries", parse_count(self.retries, "retries", least=0))
        require_policy(self.on_error)
        keep("ramp", getattr(sample, "ramp", True))
        keep("chunk_rows", parse_count(getattr(sample, "chunk_rows", 1), "the sampler's chunk_rows"))
        for name, says in _SAYS.items():
            if not isinstance(given := getattr(sample, name, True), bool):
                raise TypeError(f"the sampler's {name} must be True or False, not {given!r}: {says}")
        keep("sampler", pickled(sample, "the sampler {!r}"))
        keep("digest", hashlib.blake2b(self.sampler, digest_size=16).digest())

    @property
    def pool(self) -> str:
        """The name of the pool's file in pools/."""
        return f"{self.name}.{self.seed}"

    def task(self, number: int, cache: str = "", token: int = 0) -> Task:
        """Return task `number`, without the sampler. `cache`, `token`: as of `Task`."""
        return Task(
            cache,
            b"",
            self.pool,
            self.seed,
            number,
            token,
            ramp=self.ramp,
            chunk_rows=self.chunk_rows,
            digest=self.digest,
            reads=self.reads,
            skips=self.on_error == "skip",
        )
