"""Rows used once, through each face: nothing is taken ahead of the consumer, on a device either."""

from __future__ import annotations

import itertools

import pyarrow.compute as pc
import pytest
from helpers import DEADLINE_SECONDS, append_rows, face, ids_of, make_cache

import arrowcache as ac

FACES = {
    "torch.Loader": {},
    "torch.Loader on a device": {"device": "cpu"},
    "jax.Loader": {},
    "jax.Loader on a device": {"device": "cpu"},
}


@pytest.fixture
def cache(tmp_path):
    cache = make_cache(tmp_path / "cache")
    append_rows(cache, range(80))
    return cache


def expect_nothing_was_ahead(cache, loader, batches) -> None:
    found = []
    for number, batch in enumerate(itertools.islice(batches, 3)):
        found += ids_of([batch])
        loader.set_rows(pc.field("id") >= 8 * (number + 2))
    assert found == [0, 1, 2, 3, 16, 17, 18, 19, 24, 25, 26, 27]
    loader.close()
    with ac.Loader(cache, 4, once="learner", timeout=DEADLINE_SECONDS) as loader:
        assert ids_of(itertools.islice(loader, 1)) == [*range(4, 8)]


@pytest.mark.parametrize("name", FACES)
def test_each_batch_is_chosen_as_it_is_asked_for(cache, name):
    make = face(name.split()[0])
    if name.startswith("jax") and FACES[name]:
        import jax

        options = {"device": jax.devices("cpu")[0]}
    else:
        options = FACES[name]
    loader = make(cache, 4, once="learner", timeout=DEADLINE_SECONDS, **options)
    expect_nothing_was_ahead(cache, loader, loader)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("name", ["Loader", "torch.Loader"])
def test_a_prefetcher_takes_none_ahead(cache, name, depth):
    prefetcher = face("torch.DevicePrefetcher")
    loader = face(name)(cache, 4, once="learner", timeout=DEADLINE_SECONDS)
    expect_nothing_was_ahead(cache, loader, prefetcher(loader, "cpu", depth=depth))


@pytest.mark.parametrize("name", ["torch.Loader", "jax.Loader"])
def test_a_batch_of_tensors_can_be_acknowledged(cache, name):
    with face(name)(cache, 4, once="learner", acknowledge=True, timeout=DEADLINE_SECONDS) as loader:
        first, second = itertools.islice(loader, 2)
        loader.done(second)
        del first
    with ac.Loader(cache, 8, once="learner", timeout=DEADLINE_SECONDS) as loader:
        assert ids_of(itertools.islice(loader, 1)) == [0, 1, 2, 3, *range(8, 12)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("torch.dataloader", {}),
        ("torch.EpochBatchSampler", {}),
        ("torch.CacheDataset", {"batch_size": ...}),
        ("torch.packed", {"column": "id", "length": 8}),
        ("tensorflow.dataset", {}),
    ],
)
def test_what_makes_epochs_names_the_loader_that_has_each_row_once(cache, name, options):
    given = {"batch_size": 4} | options
    given = {key: value for key, value in given.items() if value is not ...}
    with pytest.raises(TypeError, match=r"'once': arrowcache.Loader\(cache, once=...\), or that of torch"):
        face(name)(cache, once="learner", **given)
