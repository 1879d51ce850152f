"""Randomness: the global generators of torch, Python and NumPy, which belong to the user.

Who makes items has them draw from states apart, each time other ones, and gives the user's back: so the same
numbers follow whether items are made or read. The states apart depend on the user's, so that a seed tells
what is drawn. Nothing is known of generators of devices, nor of a NumPy's that is no MT19937.

Threads that make items at once share the states apart, and the last one gives the user's back. What another
thread draws meanwhile comes from them, too: it is as random, and no number comes twice.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from arrowcache.lifetimes import forgets_in_child

_MANY = 2**31


class RandomStates(NamedTuple):
    """States of the global generators. `numpy` of None: a user set one that cannot be seeded."""

    torch: torch.Tensor
    python: tuple[Any, ...]
    numpy: dict[str, Any] | None


def random_states() -> RandomStates:
    """Return the states that the global generators are in."""
    of_numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002  # a user's
    is_known = of_numpy["bit_generator"] == "MT19937"
    return RandomStates(torch.get_rng_state(), random.getstate(), of_numpy if is_known else None)


def set_random_states(states: RandomStates) -> None:
    """Have the global generators go on from these states."""
    torch.set_rng_state(states.torch)
    random.setstate(states.python)
    if states.numpy is not None:
        np.random.set_state(states.numpy)  # noqa: NPY002


def _seed_by_themselves(number: int, with_numpy: bool) -> None:
    """Seed each global generator with the sum of what it draws next and a number: torch's takes 32 bits."""
    number %= _MANY
    torch.default_generator.manual_seed(int(torch.randint(_MANY, (), device="cpu")) + number)
    random.seed(random.randrange(_MANY) + number)
    if with_numpy:
        np.random.seed(np.random.randint(_MANY) + number)  # noqa: NPY002


class _Apart:
    """The user's states, while threads of this process make items."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a handler may make items
        self._threads = 0
        self._of_user: RandomStates | None = None
        self._numbers = itertools.count()
        forgets_in_child(self)

    def begin(self) -> None:
        with self._lock:
            if self._of_user is None:
                states = random_states()
                self._of_user = states
                _seed_by_themselves(next(self._numbers), states.numpy is not None)
            self._threads += 1

    def end(self) -> None:
        with self._lock:
            self._threads = max(0, self._threads - 1)  # in a forked child it was 0
            if not self._threads and self._of_user is not None:
                set_random_states(self._of_user)
                self._of_user = None

    def forget_in_child(self) -> None:
        """Give the states back, as who makes items is in the parent, but for Python's: it seeds that anew."""
        states, self._of_user = self._of_user, None
        self._lock, self._threads = threading.RLock(), 0
        if states is not None:
            set_random_states(states._replace(python=random.getstate()))


_apart = _Apart()


@contextmanager
def drawing_apart() -> Iterator[None]:
    """Have the global generators draw from other states than the user's. Any thread may."""
    try:
        _apart.begin()
        yield
    finally:
        _apart.end()


def seeds_of_workers(*whose: int) -> torch.Generator:
    """Return the generator that a DataLoader draws the seeds of its workers from.

    It depends on the number last given to `torch.manual_seed`, and draws nothing from torch's own generator,
    which is the user's: a seeded script has the same random numbers whether items are stored or made.

    Args:
        whose: tells these workers from others of this process, and of other ranks.
    """
    seed = np.random.SeedSequence([torch.initial_seed(), *whose]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(seed[0]) >> 1)
