"""The contract of readers, kept by all of NumPy's and torch's."""

from __future__ import annotations

from typing import Any

import pytest
from datasets_of_items import Items
from quick import first_is_quick
from reader_contract import Contract, Face, Unclosed, WholeEpochs

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from torch.utils.data import DataLoader

import arrowcache as ac
import arrowcache.torch as at

OF_LOADERS = frozenset(
    {"transform", "ids", "ranks", "writing", "one epoch", "close", "state", "fork", "tokens", "repeat"}
)
OF_DATALOADERS = frozenset({"transform", "ranks", "writing"})


def loader_face(kind: Any, **fixed: Any) -> Face:
    return Face(lambda cache, size, **options: kind(cache, size, **fixed, **options), OF_LOADERS)


class Stock(Unclosed):
    """A stock DataLoader, whose state is that of what it draws from."""

    def __init__(self, loader: DataLoader[Any], source: Any) -> None:
        super().__init__(loader)
        self._source = source

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._source.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state)


class Prefetched(Stock):
    """Batches of a loader, moved to a device by a prefetcher of their own."""

    def __init__(self, cache: ac.Cache, size: int, **options: Any) -> None:
        loader = at.Loader(cache, size, **options)
        super().__init__(at.DevicePrefetcher(loader, "cpu"), loader)

    def __exit__(self, *_: object) -> None:
        self._source.close()


def stock(workers: int, context: str | None = None, has: frozenset[str] = OF_DATALOADERS) -> Face:
    def make(cache: ac.Cache, size: int, **options: Any) -> Stock:
        loader = at.dataloader(cache, size, workers, multiprocessing_context=context, **options)
        return Stock(loader, None)

    return Face(make, has)


def iterable(workers: int, context: str | None = None, *, persistent: bool = False) -> Face:
    def make(cache: ac.Cache, size: int, **options: Any) -> Stock:
        dataset = at.CacheIterableDataset(cache, size, **options)
        loader = DataLoader(
            dataset, batch_size=None, num_workers=workers, multiprocessing_context=context,
            persistent_workers=persistent,
        )  # fmt: skip
        return Stock(loader, dataset)

    return Face(
        make, OF_DATALOADERS - {"ranks"} | ({"state", "epochs beside another"} if not workers else set())
    )


FACES = {
    "numpy": loader_face(ac.Loader),
    "torch": loader_face(at.Loader),
    "device": loader_face(at.Loader, device="cpu"),
    "dataloader": stock(0, has=OF_DATALOADERS | {"epochs beside another"}),
    "iterable": iterable(0),
    "numpy, threads": loader_face(ac.Loader, workers=2, worker_type="thread"),
    "torch, threads": loader_face(at.Loader, workers=2, worker_type="thread"),
    "device, threads": loader_face(at.Loader, workers=2, worker_type="thread", device="cpu"),
    "numpy, processes": loader_face(ac.Loader, workers=2),
    "torch, processes": loader_face(at.Loader, workers=2),
    "prefetcher": Face(Prefetched, OF_LOADERS - {"one epoch", "close", "fork", "state", "repeat"}),
    "dataloader, forked": stock(2, "fork"),
    "iterable, forked": iterable(2, "fork"),
    "iterable, persistent": iterable(2, "fork", persistent=True),
}


WHOLE = ("numpy", "torch", "device", "dataloader", "torch, processes", "dataloader, forked")
"""Each commit's CI has the whole contract of these, and of the others the tests below."""
OF_ALL = (
    "test_an_epoch_is_whole_where_nothing_else_holds_its_reader",
    "test_an_epoch_that_is_cut_short_raises_in_its_consumer",
    "test_epochs_are_those_of_the_plain_loader_and_grow_with_the_cache",
    "test_what_is_dropped_in_mid_epoch_leaves_nothing",
    "test_the_error_of_a_transform_comes_in_its_place_and_the_next_epoch_is_whole",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.cls is TestReaders and "face" in metafunc.fixturenames:
        marks = [pytest.mark.slow, pytest.mark.nightly]
        is_of_all = metafunc.function.__name__ in OF_ALL
        first, *others = FACES
        faces = [pytest.param(name, marks=marks[: 1 if is_of_all or name in WHOLE else 2]) for name in others]
        metafunc.parametrize("face", [first, *faces], indirect=True)


class TestReaders(Contract):
    """Each of FACES."""

    @pytest.fixture
    def face(self, request: pytest.FixtureRequest) -> Face:
        return FACES[request.param]


ENDS = frozenset({"one epoch", "close", "state", "repeat"})


def items_face(has: frozenset[str] = ENDS, *, there: bool = True, **fixed: Any) -> Face:
    """A loader of a cached dataset, whose items are there or made."""

    def make(cache: ac.Cache, size: int, transform: Any = None, **options: Any) -> at.CachedLoader:
        items = Items(*({"id": number} for number in range(160)))
        path = cache.path.with_name("items")
        train = at.cached(items, path, capacity="16MiB", transform=transform)
        if there:
            train.fill(workers=0, progress=False)
        return at.Loader(train, size, **fixed, **options)

    return Face(make, has)


def collate(items: list[dict[str, int]]) -> dict[str, torch.Tensor]:
    return {"id": torch.tensor([item["id"] for item in items])}


SEQUENCE = ac.Schema({"id": ac.Ragged("int64")})


def packed(cache: ac.Cache, size: int, **options: Any) -> at.PackedLoader:
    """Sequences of one token: the id of its document."""
    path = cache.path.with_name("documents")
    documents = ac.Cache.create(path, SEQUENCE, capacity="16MiB", segment_bytes="1MiB", exist_ok=True)
    if not documents.stats().rows:
        with documents.writer() as writer:
            writer.extend(id=[[number] for number in range(160)])
    return at.packed(documents, "id", 1, batch_size=size, **options)


class Moved(Unclosed):
    """The iterations of a prefetcher, each of which ends the one before."""

    def __init__(self, cache: ac.Cache, size: int) -> None:
        super().__init__(at.DevicePrefetcher([*at.Loader(cache, size)], "cpu"))

    def close(self) -> None:
        self._batches.close()


OTHERS = {
    "items": items_face(ENDS | {"transform"}, workers=0),
    "items that are made": items_face(ENDS | {"transform"}, there=False, workers=0),
    "items, collated": items_face(workers=0, collate_fn=collate),
    "items on a device": items_face(ENDS | {"transform"}, workers=0, device="cpu"),
    "items by workers": items_face(ENDS | {"transform"}, there=False, workers=2),
    "items by workers, collated": items_face(workers=2, collate_fn=collate),
    "items by workers on a device": items_face(there=False, workers=2, device="cpu"),
    "packed": Face(packed, ENDS),
    "packed on a device": Face(lambda *some, **more: packed(*some, device="cpu", **more), ENDS),
    "a list, moved": Face(Moved, frozenset({"one epoch", "close"})),
}


class TestOtherReaders(WholeEpochs):
    """Each of OTHERS."""

    @pytest.fixture(params=first_is_quick(OTHERS))
    def face(self, request: pytest.FixtureRequest) -> Face:
        return OTHERS[request.param]
