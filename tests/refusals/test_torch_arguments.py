"""Arguments that torch's faces refuse: those of every loader, and their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import arrowcache as ac
import arrowcache.torch as at

from .test_arguments import LOADERS, RUN_ALONE, TOKENS, Refusal, left, named


def dataloader(held: Any, **options: Any) -> DataLoader[dict[str, Any]]:
    return at.dataloader(**{"cache": held, "batch_size": 16, "num_workers": 0, **options})


def loader(held: Any, **options: Any) -> at.Loader:
    return at.Loader(**{"cache": held, "batch_size": 16, **options})


def iterable(held: Any, **options: Any) -> at.CacheIterableDataset:
    return at.CacheIterableDataset(**{"cache": held, "batch_size": 16, **options})


def stock(held: Any, **options: Any) -> None:
    own = BatchSampler(RandomSampler(range(160)), 4, drop_last=True)
    made = {"ours": at.EpochBatchSampler(held, 4), "own": own}
    next(iter(DataLoader(at.CacheDataset(held), **{k: made.get(str(v), v) for k, v in options.items()})))


def of_loaders(face: Callable[..., Any]) -> list[Refusal]:
    """Those whose arguments a face has, when it is made."""
    names = inspect.signature(face).parameters
    return [each for each in LOADERS if each is not RUN_ALONE and each[0].keys() <= names.keys()]


INSTEAD = (TypeError, "EpochBatchSampler")
BY_TOKENS: Refusal = (
    TOKENS,
    ValueError,
    "batch_size rows alone: for batch_tokens take arrowcache.torch.Loader",
)
FACES: dict[str, tuple[Callable[..., Any], list[Refusal]]] = {
    "Loader": (
        loader,
        [*of_loaders(at.Loader), ({"device": "cuda:99"}, ValueError, "'cpu'")],
    ),
    "iter(Loader)": (lambda held, **options: iter(loader(held, **options)), [RUN_ALONE]),
    "CacheIterableDataset": (iterable, [*of_loaders(at.CacheIterableDataset), BY_TOKENS]),
    "EpochBatchSampler": (lambda held, **options: at.EpochBatchSampler(held, **options), [BY_TOKENS]),
    "iter(CacheIterableDataset)": (lambda held, **options: iter(iterable(held, **options)), [RUN_ALONE]),
    "len(dataloader)": (lambda held, **options: len(dataloader(held, **options)), [RUN_ALONE]),
    "dataloader": (
        dataloader,
        [
            *of_loaders(at.dataloader),
            ({"num_workers": 1.5}, TypeError, "num_workers"),
            ({"num_workers": "2"}, TypeError, "num_workers"),
            ({"num_workers": True}, ValueError, "num_workers"),
            ({"num_workers": -1}, ValueError, "num_workers"),
            ({"collate_fn": list}, TypeError, r"collate_fn cannot be given.*pass transform="),
        ],
    ),
    "DataLoader": (
        stock,
        [
            ({"shuffle": True}, *INSTEAD),
            ({"batch_size": 4}, *INSTEAD),
            ({"sampler": range(5)}, *INSTEAD),
            ({"sampler": "ours"}, *INSTEAD),
            ({"batch_sampler": "own", "num_workers": 1}, *INSTEAD),
        ],
    ),
    "DevicePrefetcher": (
        lambda _, **options: at.DevicePrefetcher([], **options),
        [
            ({name: made}, ValueError, "'cpu'")
            for device in ("cuda:99", "xpu", "meta", "nonsense", "mps", "cpu:7", b"cpu", 2**70, object())
            for name, made in (("device", device), ("devices", ["cpu", device]))
        ],
    ),
}
CASES = [(face, *refusal) for face, (_, refusals) in FACES.items() for refusal in refusals]


@pytest.mark.parametrize(("face", "options", "error", "words"), CASES, ids=map(named, CASES))
def test_what_does_not_fit_is_refused_and_nothing_is_left(cache: ac.Cache, face, options, error, words):
    before = left(cache)
    with pytest.raises(error, match=words):
        FACES[face][0](cache, **options)
    assert left(cache) == before
