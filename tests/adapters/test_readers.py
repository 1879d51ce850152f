"""The contract of readers, kept by all of NumPy's and torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from datasets_of_items import Items
from reader_contract import Contract, Face, Unclosed, WholeEpochs, same

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from torch.utils.data import DataLoader

import arrowcache as ac
import arrowcache.torch as at

OF_LOADERS = frozenset(
    {"transform", "ids", "ranks", "writing", "one epoch", "close", "state", "fork", "tokens", "repeat"}
)
HERE = OF_LOADERS | {"interrupt"}  # no other process, nor a thread in Python, makes their batches
OF_DATALOADERS = frozenset({"transform", "ranks", "writing", "state", "length"})


def loader_face(kind: Any, **fixed: Any) -> Face:
    has = OF_LOADERS if "workers" in fixed else HERE
    return Face(lambda cache, size, **options: kind(cache, size, **fixed, **options), has)


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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state)

    def __exit__(self, *_: object) -> None:
        self._source.close()


def stock(workers: int, context: str | None = None, has: frozenset[str] = OF_DATALOADERS) -> Face:
    def make(cache: ac.Cache, size: int, **options: Any) -> Stock:
        loader = at.dataloader(cache, size, workers, multiprocessing_context=context, **options)
        return Stock(loader, loader)

    return Face(make, has)


FACES = {
    "numpy": loader_face(ac.Loader),
    "torch": loader_face(at.Loader),
    "device": loader_face(at.Loader, device="cpu"),
    "dataloader": stock(0, has=OF_DATALOADERS | {"epochs beside another"}),
    "numpy, threads": loader_face(ac.Loader, workers=2, worker_type="thread"),
    "torch, threads": loader_face(at.Loader, workers=2, worker_type="thread"),
    "device, threads": loader_face(at.Loader, workers=2, worker_type="thread", device="cpu"),
    "numpy, processes": loader_face(ac.Loader, workers=2),
    "torch, processes": loader_face(at.Loader, workers=2),
    "prefetcher": Face(Prefetched, OF_LOADERS - {"one epoch", "close", "fork", "repeat"}),
    "dataloader, forked": stock(2, "fork"),
}


ENDS = frozenset({"one epoch", "close", "state", "repeat", "fork"})
ENDS_HERE = ENDS | {"interrupt"}


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
    "items": items_face(ENDS_HERE | {"transform"}, workers=0),
    "items that are made": items_face(ENDS_HERE | {"transform"}, there=False, workers=0),
    "items, collated": items_face(ENDS_HERE, workers=0, collate_fn=collate),
    "items on a device": items_face(ENDS_HERE | {"transform"}, workers=0, device="cpu"),
    "items by workers": items_face(ENDS | {"transform"}, there=False, workers=2),
    "items by workers, collated": items_face(workers=2, collate_fn=collate),
    "items by workers on a device": items_face(there=False, workers=2, device="cpu"),
    "packed": Face(packed, ENDS_HERE),
    "packed on a device": Face(lambda *some, **more: packed(*some, device="cpu", **more), ENDS_HERE),
    "a list, moved": Face(Moved, frozenset({"one epoch", "close"})),
}


WHOLE = (
    "numpy", "torch", "device", "dataloader", "torch, processes", "dataloader, forked",
    "items", "items that are made", "items on a device", "items by workers", "packed", "a list, moved",
)  # fmt: skip
"""Each commit's CI has the whole contract of these, and of the others what is in BRIEF."""
CUT_SHORT = Contract.test_an_epoch_that_is_cut_short_raises_in_its_consumer
BRIEF: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "nothing holds it": (Contract.test_an_epoch_is_whole_where_nothing_else_holds_its_reader, ("collected",)),
    "a newer epoch": (CUT_SHORT, ("a newer one began", 1)),
    "closed": (CUT_SHORT, ("was closed", 5)),
    "its epochs": (
        Contract.test_epochs_are_those_of_the_plain_loader_and_grow_with_the_cache,
        ("window", same),
    ),
    "a break": (Contract.test_after_a_break_the_next_epoch_is_whole, ()),
    "a state": (Contract.test_a_state_goes_on_where_it_was_taken, (7,)),
}
IN_BRIEF = {
    **{(name, what): face for name, face in FACES.items() if name not in WHOLE for what in BRIEF},
    **{(name, what): face for name, face in OTHERS.items() if name not in WHOLE for what in [*BRIEF][:3]},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.cls in (TestReaders, TestOtherReaders) and "face" in metafunc.fixturenames:
        marks = [pytest.mark.slow, pytest.mark.nightly]
        first, *others = FACES if metafunc.cls is TestReaders else OTHERS
        faces = [pytest.param(name, marks=marks[: 1 if name in WHOLE else 2]) for name in others]
        metafunc.parametrize("face", [first, *faces], indirect=True)


class TestReaders(Contract):
    """Each of FACES."""

    @pytest.fixture
    def face(self, request: pytest.FixtureRequest) -> Face:
        return FACES[request.param]


class TestOtherReaders(WholeEpochs):
    """Each of OTHERS."""

    @pytest.fixture
    def face(self, request: pytest.FixtureRequest) -> Face:
        return OTHERS[request.param]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "what"), IN_BRIEF)
def test_a_reader_in_brief(name, what, cache):
    test, arguments = BRIEF[what]
    test(Contract(), IN_BRIEF[name, what], cache, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FACES if name not in WHOLE])
def test_a_reader_in_brief_after_an_error(name, cache, tmp_path):
    test = Contract.test_the_error_of_a_transform_comes_in_its_place_and_the_next_epoch_is_whole
    test(Contract(), FACES[name], cache, tmp_path)


def test_endless_batches_through_a_prefetcher_count_as_they_are_handed_out(cache):
    with at.Loader(cache, 8, shuffle=None) as loader:
        endless = loader.repeat()
        prefetcher = at.DevicePrefetcher(endless, "cpu")
        batches = iter(prefetcher)
        head = [next(batches)["id"] for _ in range(5)]
        assert torch.cat(head).tolist() == list(range(40))
        assert (loader.state_dict()["position"], loader.stats().batches) == (40, 5)
        batches.close()  # the iterator is the caller's: it goes on behind what was taken ahead
        assert loader.state_dict()["position"] == 40
        first = next(iter(prefetcher))["id"].tolist()[0]
        assert 40 <= first < 160
        assert loader.state_dict()["position"] == first + 8


@pytest.mark.parametrize("repeats", [False, True], ids=["epoch", "repeat"])
def test_an_error_behind_batches_that_a_prefetcher_took_comes_in_its_place(cache, repeats):
    def fail(batch):
        if 24 in batch["id"]:
            raise LookupError("row 24")
        return batch

    with at.Loader(cache, 8, shuffle=None, transform=fail) as loader:
        source = loader.repeat() if repeats else loader
        prefetcher = at.DevicePrefetcher(source, "cpu")
        batches = iter(prefetcher)
        assert torch.cat([next(batches)["id"] for _ in range(3)]).tolist() == list(range(24))
        with pytest.raises(LookupError):
            next(batches)
        assert loader.state_dict()["position"] == 24
        assert list(batches) == []
        assert list(source if repeats else []) == []  # as behind any error


def test_an_epoch_that_is_cut_short_raises_in_the_prefetcher_that_took_it(cache):
    with at.Loader(cache, 8, shuffle=None) as loader:
        for endless in (False, True):
            batches = iter(at.DevicePrefetcher(loader.repeat() if endless else loader, "cpu"))
            next(batches)
            iter(loader)
            with pytest.raises(RuntimeError, match="a newer one began"):
                list(batches)
