"""Arguments that torch's faces refuse: those of every loader, and their own."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import arrowcache as ac
import arrowcache.torch as at

from .test_arguments import LOADERS, RANKED, RUN_ALONE, Refusal, left, named


def dataloader(held: Any, **options: Any) -> DataLoader[dict[str, Any]]:
    return at.dataloader(**{"cache": held, "batch_size": 16, "num_workers": 0, **options})


def loader(held: Any, **options: Any) -> at.Loader:
    return at.Loader(**{"cache": held, "batch_size": 16, **options})


def stock(held: Any, **options: Any) -> None:
    own = BatchSampler(RandomSampler(range(160)), 4, drop_last=True)
    made = {"ours": at.EpochBatchSampler(held, 4), "own": own}
    next(iter(DataLoader(at.CacheDataset(held), **{k: made.get(str(v), v) for k, v in options.items()})))


DOCUMENTS = {
    "tokens": ac.Ragged("int32"),
    "points": ac.Ragged("int32", (3,)),
    "position_ids": ac.Ragged("int32"),
    "text": ac.String(),
    "label": ac.Tensor("int64"),
}


def packed(_: Any, **options: Any) -> at.PackedLoader:
    """Of a cache of its own, which has documents."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ac.Cache.create(f"{folder}/documents", ac.Schema(DOCUMENTS), "8MiB", "1MiB") as cache,
    ):
        given = {"source": cache, "column": "tokens", "length": 2048, "batch_size": 4}
        return at.packed(**{**given, **options})


def cached(held: Any, **options: Any) -> None:
    given = {"dataset": [{"x": 1}], "path": held.path.parent / "items", "capacity": "16MiB"}
    at.cached(**given | options).close()


def of_loaders(face: Callable[..., Any]) -> list[Refusal]:
    """Those whose arguments a face has, when it is made."""
    names = inspect.signature(face).parameters
    return [each for each in LOADERS if each is not RUN_ALONE and each[0].keys() <= names.keys()]


#: Of rows, where `packed` has sequences; and its seed may be None: that of the Loader it is given.
OF_ROWS = ({"epoch_rows": 15}, RANKED | {"epoch_rows": 31}, {"batch_size": 1024}, {"seed": None})
INSTEAD = (TypeError, "EpochBatchSampler")
BY_TOKENS: Refusal = (
    {"batch_tokens": 4096, "length_of": "id"},
    TypeError,
    "batch_size rows alone: for batch_tokens take arrowcache.torch.Loader",
)
FACES: dict[str, tuple[Callable[..., Any], list[Refusal]]] = {
    "Loader": (
        loader,
        [*of_loaders(at.Loader), ({"device": "cuda:99"}, ValueError, "'cpu'")],
    ),
    "iter(Loader)": (lambda held, **options: iter(loader(held, **options)), [RUN_ALONE]),
    "EpochBatchSampler": (lambda held, **options: at.EpochBatchSampler(held, **options), [BY_TOKENS]),
    "len(dataloader)": (lambda held, **options: len(dataloader(held, **options)), [RUN_ALONE]),
    "dataloader": (
        dataloader,
        [
            *of_loaders(at.dataloader),
            BY_TOKENS,
            ({"num_workers": 1.5}, TypeError, "num_workers"),
            ({"num_workers": "2"}, TypeError, "num_workers"),
            ({"num_workers": True}, ValueError, "num_workers"),
            ({"num_workers": -1}, ValueError, "num_workers"),
            ({"collate_fn": list}, TypeError, r"no argument 'collate_fn': .*pass transform="),
            ({"numworkers": 2}, TypeError, r"did you mean num_workers=\?"),
            ({"sampler": [1]}, TypeError, "rows=, where= and shuffle= choose"),
            ({"dataset": [1]}, TypeError, "leave it out"),
            ({"xyz": 1}, TypeError, r"(?s)^(?!.* shuffle, .* shuffle, )"),
        ],
    ),
    "packed": (
        packed,
        [
            *(each for each in of_loaders(at.packed) if each[0] not in OF_ROWS),
            ({"column": "token"}, ValueError, "unknown column 'token': did you mean 'tokens'"),
            ({"column": ["tokens"]}, TypeError, "column must be the name of one column"),
            ({"column": None}, TypeError, "column must be the name of one column"),
            ({"column": "points"}, ValueError, r"'points' is Ragged.*rows of numbers of any length"),
            ({"column": "text"}, ValueError, r"'text' is String\(\), and documents are"),
            ({"column": "label"}, ValueError, "'label' is Tensor"),
            (
                {"column": "position_ids"},
                ValueError,
                "'position_ids' has the name of what a batch has besides",
            ),
            ({"length": 0}, ValueError, "length=0 must be an int of at least 1"),
            ({"length": 20.5}, TypeError, "length must be an int"),
            ({"length": True}, ValueError, "length=True"),
            ({"length": 2**25}, ValueError, f"length={2**25} must be an int of at most {2**24}"),
            (
                {"length": 2**24, "batch_size": 128},
                ValueError,
                f"at most {2**31 - 1} tokens.*lower one of them",
            ),
            ({"split": "no"}, TypeError, "split must be True or False, not 'no'"),
            ({"shuffle": "blocks"}, ValueError, "shuffle='blocks' is unknown, or of no use to documents"),
            ({"window_bytes": "1MiB"}, ValueError, "window_bytes belongs to shuffle='window'"),
            ({"prefetch": -1}, ValueError, "prefetch=-1 must be an int of at least 0"),
            ({"device": "cuda:99"}, ValueError, "'cpu'"),
            (
                {"transform": dict},
                TypeError,
                r"packed\(\) has no argument 'transform': .*store what a transform makes",
            ),
            ({"columns": ["tokens"]}, TypeError, r"packed\(\) has no argument 'columns'"),
            *(
                ({name: None}, TypeError, f"no argument '{name}': native threads")
                for name in ("persistent_workers", "worker_init_fn", "multiprocessing_context")
            ),
            ({"drop_last": True}, TypeError, r"packed\(\) has no argument 'drop_last'"),
            ({"source": 5}, TypeError, "expected a Cache or the path of one, got 5$"),
        ],
    ),
    "iter(packed)": (lambda held, **options: iter(packed(held, **options)), [RUN_ALONE]),
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
    "CacheDataset": (
        lambda held, **options: at.CacheDataset(held, **options),
        [
            ({"generator": None}, TypeError, r"EpochBatchSampler.*seed= draws the order"),
            ({"drop_remainder": True}, TypeError, r"EpochBatchSampler\(cache, ...\) drop_last="),
        ],
    ),
    "cached": (
        cached,
        [
            *(
                ({"dataset": other}, TypeError, "a map-style Dataset has")
                for other in ({"a": 1}, {"train": [1], "test": [2]}, "abc", b"abc", 5)
            ),
            ({"dataset": iter([1])}, TypeError, "a list_iterator can be iterated over once"),
            ({"shards": [list]}, TypeError, "a stream or its shards"),
            ({"dataset": None, "shards": [1]}, TypeError, "no list of functions"),
            ({"rank": 0, "world_size": 1}, ValueError, "rank= is of a stream"),
            ({"dataset": lambda: iter([1]), "rank": 0}, ValueError, "pass world_size, too"),
            ({"dataset": []}, ValueError, "the dataset is empty"),
            ({"dataset": [{"_seq": 1}]}, ac.SchemaError, "item 0: field name '_seq' is reserved"),
            ({"dataset": [{"_index": 1}]}, ac.SchemaError, "item 0: an item has a value named '_index'"),
            ({"schema": {"x": None}}, TypeError, "field 'x': expected one of"),
            ({"schema": {"y": ac.String()}}, ValueError, "schema names 'y'"),
            ({"schema": "x"}, TypeError, "schema='x' must be a dict"),
            ({"columns": ["x", "x"]}, ValueError, "twice"),
            ({"version": 1}, TypeError, "version must be a text"),
            ({"transform": 1}, TypeError, "transform must be a function"),
            ({"replace": 1}, ValueError, "0 <= replace < 1"),
            ({"capacity": "lots"}, ValueError, "capacity='lots'"),
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
def test_what_does_not_fit_is_refused_and_nothing_is_left(unchanged: ac.Cache, face, options, error, words):
    before = left(unchanged)
    with pytest.raises(error, match=words):
        FACES[face][0](unchanged, **options)
    assert left(unchanged) == before
