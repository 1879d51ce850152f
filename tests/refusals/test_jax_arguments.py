"""Arguments that JAX's loader refuses: those of every loader, and its own."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jax", reason="JAX is not installed: make test-jax")

import jax
from jax.sharding import NamedSharding, PartitionSpec

import arrowcache as ac
import arrowcache.jax as aj

from .test_arguments import LOADERS, Refusal, left, named

jax.config.update("jax_platforms", "cpu")  # a GPU has benchmarks.jax_device
jax.config.update("jax_num_cpu_devices", 8)  # before the first array


def loader(held: Any, **options: Any) -> aj.Loader:
    """`sharding` may be the axes by which eight devices divide a batch."""
    if isinstance(axes := options.get("sharding"), tuple):
        mesh = jax.make_mesh((8,), ("data",))
        options["sharding"] = NamedSharding(mesh, PartitionSpec(*axes))
    return aj.Loader(**{"cache": held, "batch_size": 16, **options})


OWN: list[Refusal] = [
    ({"device": "cpu"}, TypeError, "device must be a jax.Device"),
    ({"sharding": "data"}, TypeError, "sharding must be a jax.sharding.Sharding"),
    ({"device": 0, "sharding": 0}, ValueError, "exclude each other"),
    ({"batch_size": 20, "sharding": ("data",)}, ValueError, r"does not divide column 'id'.* \(20,\)"),
    ({"drop_last": False, "sharding": ("data",)}, ValueError, "drop_last=True"),
    ({"sharding": (None, "data")}, ValueError, r"column 'id', whose batches are \(16,\).*axis 0 only"),
]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [*LOADERS, *OWN],
    ids=[named(("Loader", *refusal)) for refusal in [*LOADERS, *OWN]],
)
def test_what_does_not_fit_is_refused_and_nothing_is_left(unchanged: ac.Cache, options, error, words):
    before = left(unchanged)
    with pytest.raises(error, match=words):
        loader(unchanged, **options)
    assert left(unchanged) == before
