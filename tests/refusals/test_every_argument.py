"""Every argument of every face changes what can be seen, or is refused by its name.

The arguments are those of the signatures. One that has no proof here fails the first test.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import io
import itertools
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, redirect_stderr, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import pytest
from drawing import write_tar
from helpers import flip_byte, segment_files, wait_until

import arrowcache as ac
from arrowcache.units import format_count

TESTS = Path(__file__).parents[1]
ROWS, SEGMENT_ROWS = 160, 16
SCHEMA = {
    "id": ac.Tensor("int64"),
    "size": ac.Tensor("int64"),
    "other_size": ac.Tensor("int64"),
    "heavy": ac.Tensor("float64"),
    "x": ac.Tensor("float32", (16,)),
    "tokens": ac.Ragged("int32"),
    "more": ac.Ragged("int32"),
}
FIXED = ["id", "size", "heavy", "x"]
RANKED = {"rank": 0, "world_size": 2, "run_id": "job"}
Proof = Callable[["Face", ac.Cache], None]
CHANGES: set[Proof] = set()  # proofs that change the cache which they get


def changes(proof: Proof) -> Proof:
    """It gets a cache of its own: all others share one."""
    CHANGES.add(proof)
    return proof


class Face(NamedTuple):
    """A face: where it is, what it is given unless said, and what can be seen of it."""

    where: str
    given: Callable[[ac.Cache], dict[str, Any]]
    see: Callable[[Any], Any] = lambda made: made
    needs: tuple[str, ...] = ()

    def imported(self) -> Any:
        module, _, name = self.where.partition(":")
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))

    def called(self, given: dict[str, Any]) -> Any:
        """Make it; a method has its object first, and then what it takes by position alone."""
        made, named = self.imported(), dict(given)
        parameters = inspect.signature(made).parameters.values()
        alone = [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY]
        first = [named.pop(name) for name in dict.fromkeys(("self", *alone)) if name in given]
        return made(*first, **named)

    def seen(self, held: ac.Cache, see: Callable[[Any], Any] | None = None, **options: Any) -> Any:
        """What is seen with some arguments; of an error its class and text."""
        try:
            return (see or self.see)(self.called({**self.given(held), **options}))
        except (Exception, pytest.fail.Exception) as error:
            return type(error).__name__, re.sub(r"0x\w+", "", str(error))


def differs(
    one: dict[str, Any],
    other: dict[str, Any],
    see: Callable[[Any], Any] | None = None,
    refused: str | None = None,
) -> Proof:
    """It shows which of two it is, where neither is an error.

    Args:
        refused: what the error of the other one says, which is no error of anything else.
    """

    def proof(face: Face, cache: ac.Cache) -> None:
        first, second = (face.seen(cache, see, **each) for each in (one, other))
        assert not isinstance(first, tuple), first
        if refused is None:
            assert not isinstance(second, tuple), second
            assert repr(first) != repr(second)
        else:
            assert isinstance(second, tuple), "it has no effect"
            assert re.search(refused, second[1]), second

    return proof


def says(words: str, **options: Any) -> Proof:
    """It is the argument that makes an error, whose text follows it."""

    def proof(face: Face, cache: ac.Cache) -> None:
        seen = face.seen(cache, **options)
        assert isinstance(seen, tuple), "it has no effect"
        assert re.search(words, seen[1]), seen

    return proof


def proved_in(test: str) -> Proof:
    """By a test elsewhere, which takes more than these may.

    It is there, runs, asserts, and gives the argument to a call: "file::test::argument". A number is one by
    position of a call of this face. One that is among the parameters of the test is a key of a dict there.
    """

    def proof(face: Face, cache: ac.Cache) -> None:
        file, name, argument = test.split("::")
        tree = ast.parse((TESTS / file).read_text())
        (body,) = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name]
        assert not re.search(r"\b(skip|skipif|xfail)\b", "".join(map(ast.unparse, body.decorator_list))), test
        nodes = [*ast.walk(body)]
        calls = [each for each in nodes if isinstance(each, ast.Call)]
        called = [ast.unparse(each.func).rpartition(".")[2] for each in calls]
        assert "raises" in called or any(isinstance(each, ast.Assert) for each in nodes), (
            f"{test} asserts nothing"
        )
        if argument.isdigit():
            own = face.where.rpartition(":")[2].rpartition(".")[2]
            assert any(
                len(each.args) > int(argument) for each, of in zip(calls, called, strict=True) if of == own
            )
            return
        keys = [key for each in nodes if isinstance(each, ast.Dict) for key in each.keys]
        given = {keyword.arg for each in calls for keyword in each.keywords}
        assert argument in given | {key.value for key in keys if isinstance(key, ast.Constant)}, test

    return proof


# what is seen of batches


def plain(values: Any) -> Any:
    if hasattr(values, "values") and hasattr(values, "offsets"):
        return np.asarray(values.values() if callable(values.values) else values.values).tolist()
    if isinstance(values, ac.Values):
        return values.data.tolist()
    return np.asarray(values).tolist()


def batches(source: Any) -> list[dict[str, Any]]:
    """All of an epoch, as lists."""
    try:
        return [{name: plain(values) for name, values in batch.items()} for batch in source]
    finally:
        close = getattr(source, "close", lambda: None)
        close()


def pids(source: Any) -> bool:
    """True if all batches come from this process."""
    return {pid for batch in batches(source) for pid in np.ravel(batch["pid"]).tolist()} == {os.getpid()}


def with_pid(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "pid": np.full(len(batch["id"]), os.getpid())}


class Counting:
    """A transform that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        return batch


def proves_prefetch(face: Face, cache: ac.Cache) -> None:
    """As many batches are begun ahead, and no more, beside one that JAX has on its way to a device."""
    most = 2 if "jax" in face.needs else 1
    for ahead in (0, 1, 5):
        counting = Counting()
        with face.called({**face.given(cache), "transform": counting, "prefetch": ahead}) as loader:
            epoch = iter(loader)
            next(epoch)
            wait_until(lambda: counting.calls >= ahead, "batches ahead")  # noqa: B023  # it is called here
            assert counting.calls <= ahead + most


@changes
def proves_pace(face: Face, cache: ac.Cache) -> None:
    """A pace holds only for those who keep it."""
    cache.set_pace(ac.Pace(max_reuse=1))
    options = {"timeout": 0.3}
    assert not isinstance(face.seen(cache, **options), tuple)
    assert isinstance(face.seen(cache, **options), tuple)
    assert not isinstance(face.seen(cache, paced=False, **options), tuple)


@changes
def proves_run_id(face: Face, cache: ac.Cache) -> None:
    seen = face.seen(cache, rank=0, world_size=2)
    assert isinstance(seen, tuple)
    assert "run_id" in seen[1]
    assert not isinstance(face.seen(cache, **RANKED, timeout=0.3), tuple)


def proves_expect(face: Face, cache: ac.Cache) -> None:
    """A tag that no row has is an error at once, or is waited for."""
    unknown = face.seen(cache, rows="later", timeout=0.3)
    assert unknown[0] == "ValueError", unknown
    awaited = face.seen(cache, rows="later", expect="later", timeout=0.3)
    assert awaited[0] in ("LoaderTimeoutError", "UnknownError"), awaited  # TensorFlow's own


@changes
def proves_once(face: Face, cache: ac.Cache) -> None:
    """A name has each row once."""
    assert len(face.seen(cache, once="learner")) > 1
    assert face.seen(cache, once="learner") == []


@changes
def proves_acknowledge(face: Face, cache: ac.Cache) -> None:
    """What is not done comes again."""
    assert len(face.seen(cache, once="learner", acknowledge=True)) > 1
    assert len(face.seen(cache, once="learner")) > 1


def other_cache(cache: ac.Cache) -> ac.Cache:
    path = cache.path.parent / "other"
    with suppress(FileExistsError):
        fill(path, first=1000)
    return ac.Cache.open(path)


def proves_cache(face: Face, cache: ac.Cache) -> None:
    assert repr(face.seen(cache)) != repr(face.seen(other_cache(cache)))


OF_EPOCHS: dict[str, Proof] = {
    "cache": proves_cache,
    "batch_size": differs({}, {"batch_size": 8}),
    "shuffle": differs({}, {"shuffle": None}),
    "seed": differs({}, {"seed": 1}),
    "drop_last": differs({"batch_size": 48}, {"batch_size": 48, "drop_last": False}),
    "where": differs({}, {"where": lambda segment: segment.seq < 3}),
    "rows": differs({}, {"rows": [(0, row) for row in range(16)]}),
    "expect": proves_expect,
    "rank": differs(RANKED | {"timeout": 0.3}, RANKED | {"rank": 1, "run_id": "job2", "timeout": 0.3}),
    "world_size": differs({}, RANKED | {"timeout": 0.3}),
    "run_id": proves_run_id,
    "epoch_rows": differs({}, {"epoch_rows": 32}),
    "wait_rows": differs(
        {"wait_rows": 160, "timeout": 0.3}, {"wait_rows": 161, "timeout": 0.3}, refused=r"0\.3 s for 161 rows"
    ),
    "timeout": says(r"0\.37 s", wait_rows=161, timeout=0.37),
    "window_bytes": differs(
        {"shuffle": "window", "window_bytes": "4KiB"}, {"shuffle": "window", "window_bytes": "64KiB"}
    ),
    "paced": proves_pace,
    "weights": differs({}, {"weights": "heavy"}),
}
OF_BATCHES: dict[str, Proof] = {
    "columns": differs({}, {"columns": ["id"]}),
    "transform": differs({}, {"transform": lambda batch: {"id": -batch["id"]}}),
}
OF_LOADERS: dict[str, Proof] = {
    **OF_EPOCHS,
    **OF_BATCHES,
    "workers": differs({"transform": with_pid}, {"transform": with_pid, "workers": 1}, pids),
    "worker_type": differs(
        {"transform": with_pid, "workers": 1},
        {"transform": with_pid, "workers": 1, "worker_type": "thread"},
        pids,
    ),
    "prefetch": proves_prefetch,
    "with_ids": differs({}, {"with_ids": True}),
    "once": proves_once,
    "acknowledge": proves_acknowledge,
    "batch_tokens": differs(
        {"batch_size": None, "batch_tokens": 40, "length_of": "size"},
        {"batch_size": None, "batch_tokens": 80, "length_of": "size"},
    ),
    "length_of": differs(
        {"batch_size": None, "batch_tokens": 40, "length_of": "size"},
        {"batch_size": None, "batch_tokens": 40, "length_of": "other_size"},
    ),
}  # fmt: skip


def of_cache(cache: ac.Cache) -> dict[str, Any]:
    return {"cache": cache, "batch_size": 16}


def of_columns(cache: ac.Cache) -> dict[str, Any]:
    return {"cache": cache, "batch_size": 16, "columns": FIXED}


def path_of(face: Any) -> str:
    """The cache that it shows."""
    found = re.search(r" of (.*?): ", repr(face))
    assert found is not None
    return found[1]


def through_dataloader(sampler: Any) -> Any:
    from torch.utils.data import DataLoader

    from arrowcache.torch import CacheDataset

    return batches(DataLoader(CacheDataset(path_of(sampler), FIXED), batch_sampler=sampler))


def of_dataset(dataset: Any) -> Any:
    from torch.utils.data import DataLoader

    from arrowcache.torch import EpochBatchSampler

    return batches(DataLoader(dataset, batch_sampler=EpochBatchSampler(path_of(dataset), 16)))


def of_tensorflow(dataset: Any) -> Any:
    return [{name: plain(values) for name, values in batch.items()} for batch in dataset.as_numpy_iterator()]


# a dataset's cache


class Items:
    """A dataset whose items say in which process they were made."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"n": np.int64(index), "pid": np.int64(os.getpid()), "t": np.arange(2 + index % 2)[:2]}


class Failing(Items):
    """A dataset whose first item cannot be made."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 0:
            raise OSError("it is gone")
        return super().__getitem__(index)


def proves_on_error(face: Face, cache: ac.Cache) -> None:
    def closed(train: Any) -> None:
        train.close()

    assert face.seen(cache, closed, dataset=Failing()) == ("OSError", "it is gone")
    assert face.seen(cache, closed, dataset=Failing(), on_error="skip") is None


COUNT = itertools.count()


def of_items(cache: ac.Cache) -> dict[str, Any]:
    folder = cache.path.parent / f"items{next(COUNT)}"
    return {"dataset": Items(), "path": folder, "capacity": "16MiB"}


def of_train(cache: ac.Cache) -> dict[str, Any]:
    from arrowcache.torch import cached

    return {"train": cached(**of_items(cache)), "batch_size": 4, "workers": 0}


def items(train: Any) -> Any:
    try:
        return [
            {name: np.asarray(value).tolist() for name, value in train[i].items() if name != "pid"}
            for i in range(3)
        ]
    finally:
        train.close()


def numbers(loader: Any) -> Any:
    return [batch["n"] for batch in batches(loader)]


def proves_version(face: Face, cache: ac.Cache) -> None:
    given = face.given(cache)
    face.imported()(**given).close()
    seen = face.seen(cache, path=given["path"], version="2")
    assert seen[0] == "CacheFormatError"


def proves_making(face: Face, cache: ac.Cache) -> None:
    """Items are made in worker processes, or here."""
    for workers in (0, 1):
        given = face.given(cache) | {"workers": workers}
        pids = {pid for batch in batches(face.imported()(**given)) for pid in batch["pid"]}
        assert (pids == {os.getpid()}) == (workers == 0)
        given["train"].close()


def proves_items_ahead(face: Face, cache: ac.Cache) -> None:
    """More memory is in use for batches that were begun by the time the first is there."""
    found = []
    for ahead in (1, 3):
        given = face.given(cache)
        given["train"].fill(workers=0, progress=False)
        with face.called({**given, "prefetch": ahead, "batch_size": 2}) as loader:
            epoch = iter(loader)
            next(epoch)
            found.append(loader.stats().slot_bytes)
        given["train"].close()
    assert found[0] < found[1]


def ahead_of_documents(loader: Any) -> Any:
    epoch = iter(loader)
    next(epoch)
    try:
        return [loader.stats().slot_bytes]
    finally:
        loader.close()


# samplers, prefetchers, caches


def draws(rng: Any) -> Iterator[dict[str, Any]]:
    while True:
        yield row(int(rng.integers(1 << 20)))


draws.ramp = False  # type: ignore[attr-defined]


def fails(rng: Any) -> Iterator[dict[str, Any]]:
    raise OSError("a store that is away")
    yield {}


def together(folder: str, count: int) -> Any:
    """A sampler whose tasks end once so many of them are at work at a time."""

    def sampler(rng: Any) -> Iterator[dict[str, Any]]:
        Path(folder, str(os.getpid())).touch()
        wait_until(lambda: len(os.listdir(folder)) >= count, "other workers")
        while True:
            yield row(os.getpid())

    sampler.ramp = False  # type: ignore[attr-defined]
    return sampler


def pid_of(rng: Any) -> Iterator[dict[str, Any]]:
    while True:
        yield row(os.getpid())


pid_of.ramp = False  # type: ignore[attr-defined]


def drawn(pool: Any) -> Any:
    """The rows and tasks of a pool of some segments, once it has ended by itself."""
    with pool:
        pool.wait(timeout=60)
    with ac.Cache.open(OPENED[-1]).snapshot() as snapshot:
        found = snapshot.gather(range(len(snapshot)), ["id"])["id"].tolist()
        return found, [segment.task for segment in snapshot.segments]


def drawn_list(pool: Any) -> Any:
    return [*drawn(pool)]


OPENED: list[Path] = []
AT_END = ExitStack()  # of each test


def of_pool(cache: ac.Cache) -> dict[str, Any]:
    path = cache.path.parent / f"pool{next(COUNT)}"
    made = ac.Cache.create(path, SCHEMA, "8MiB", "64KiB", SEGMENT_ROWS)
    OPENED.append(path)
    return {
        "cache": made, "sample": draws, "workers": 1, "segments": 1, "progress": False,
        "executor": AT_END.enter_context(ThreadPoolExecutor(1)),
    }  # fmt: skip


def proves_executor(face: Face, cache: ac.Cache) -> None:
    found, _ = face.seen(cache, drawn, sample=pid_of)
    assert set(found) == {os.getpid()}
    found, _ = face.seen(cache, drawn, sample=pid_of, executor=None)
    assert set(found) != {os.getpid()}


def proves_pool_workers(face: Face, cache: ac.Cache) -> None:
    for workers in (1, 2):
        folder = cache.path.parent / f"together{next(COUNT)}"
        folder.mkdir()
        sample = together(os.fspath(folder), workers)
        seen = face.seen(cache, drawn, sample=sample, workers=workers, segments=2, executor=None)
        assert len({*seen[0]}) == workers, seen


def proves_retries(face: Face, cache: ac.Cache) -> None:
    for retries in (0, 1):
        seen = face.seen(cache, drawn, sample=fails, retries=retries)
        assert seen[0] == "SamplerError"
        assert f"after {format_count(retries, 'retry', 'retries')}" in seen[1]


def proves_bar(face: Face, cache: ac.Cache) -> None:
    for progress in (False, True):
        shown = io.StringIO()
        with redirect_stderr(shown):
            face.seen(cache, drawn, progress=progress)
        assert bool(shown.getvalue()) == progress


def proves_every_rank(face: Face, cache: ac.Cache) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "1")
        assert face.seen(cache, drawn)[0] == "ValueError"
        assert face.seen(cache, drawn, every_rank=True)[0] != "ValueError"


def of_new(cache: ac.Cache) -> dict[str, Any]:
    return {"path": cache.path.parent / f"new{next(COUNT)}", "schema": SCHEMA, "capacity": "8MiB"}


def see_settings(made: Any) -> Any:
    found = made.store.settings
    sizes = [found.capacity_bytes, found.segment_bytes, found.full_rows, found.headroom]
    return [found.schema, *sizes, found.durable, made.pace, made.path]


def same_path(face: Face, cache: ac.Cache) -> None:
    given = face.given(cache)
    face.imported()(**given)
    assert face.seen(cache, **given)[0] == "FileExistsError"
    assert not isinstance(face.seen(cache, see_settings, **given, exist_ok=True), tuple)


def new_setting(**options: Any) -> Proof:
    def proof(face: Face, cache: ac.Cache) -> None:
        given = face.given(cache) | {"path": cache.path.parent / f"new{next(COUNT)}"}
        one, other = see_settings(face.imported()(**given)), None
        given["path"] = cache.path.parent / f"new{next(COUNT)}"
        other = see_settings(face.imported()(**(given | options)))
        assert one[:-1] != other[:-1]

    return proof


@changes
def proves_check(face: Face, cache: ac.Cache) -> None:
    flip_byte(segment_files(cache)[0], 3000)
    with ac.Cache.open(cache.path).snapshot() as snapshot:
        snapshot.gather([0])
    with (
        pytest.warns(RuntimeWarning, match="quarantined"),
        face.imported()(cache.path, check="bytes").snapshot() as snapshot,
        pytest.raises(ac.CorruptSegmentError),
    ):
        snapshot.gather([0])


def overfilled(cache: ac.Cache, **options: Any) -> tuple[str, str]:
    """What a writer says to whom it leaves no room."""
    with cache.snapshot():
        writer = cache.writer(**options)
        try:
            for number in range(100_000):
                writer.append(**row(number))
        except ac.ArrowCacheError as error:
            return type(error).__name__, str(error)
        finally:
            writer.abort()
    return "", ""


@changes
def proves_on_full(face: Face, cache: ac.Cache) -> None:
    assert overfilled(cache, on_full="raise")[1] != overfilled(cache, on_full="wait", timeout=0.2)[1]


@changes
def proves_max_delay(face: Face, cache: ac.Cache) -> None:
    before = cache.stats().rows
    with cache.writer(max_delay=0.05) as writer:
        writer.append(**row(1))
        wait_until(lambda: cache.stats().rows > before, "the row")


def memory_of(prefetcher: Any) -> Any:
    with prefetcher:
        epoch = iter(prefetcher)
        next(epoch)
        return [prefetcher.stats().device_bytes]


def large_tensors() -> list[Any]:
    import torch

    return [torch.zeros(1 << 20, dtype=torch.uint8)] * 3


def of_tensors(cache: ac.Cache) -> dict[str, Any]:
    import torch

    return {"iterable": [torch.arange(4), torch.arange(4, 8)], "device": "cpu"}


def moved(prefetcher: Any) -> Any:
    with prefetcher:
        return [
            [part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist()
            for batch in prefetcher
        ]


def of_packed(cache: ac.Cache) -> dict[str, Any]:
    return {"source": cache, "column": "tokens", "length": 16, "batch_size": 2}


OF_PACKED = {
    **{name: proof for name, proof in OF_EPOCHS.items() if name not in ("cache", "drop_last", "weights")},
    "source": proves_cache,
    "column": differs({}, {"column": "more"}),
    "length": differs({}, {"length": 32}),
    "batch_size": differs({}, {"batch_size": 3}),
    "split": differs({}, {"split": False}),
    "prefetch": differs({"prefetch": 1}, {"prefetch": 9}, ahead_of_documents),
    "device": differs({}, {"device": "cpu"}, lambda made: [made.device_stats() is None]),
}


def filled(cache: ac.Cache) -> Any:
    from arrowcache.torch import cached

    return cached(**of_items(cache))


def of_filled(cache: ac.Cache) -> dict[str, Any]:
    return {"self": filled(cache), "workers": 0, "progress": False}


def proves_filling(face: Face, cache: ac.Cache) -> None:
    """Items are made in worker processes, or here."""
    for workers in (0, 1):
        train = filled(cache)
        face.imported()(train, workers, False)
        made = {int(train[index]["pid"]) for index in range(1, len(train))}
        assert (made == {os.getpid()}) == (workers == 0)
        train.close()


def proves_filling_bar(face: Face, cache: ac.Cache) -> None:
    for progress in (False, True):
        shown = io.StringIO()
        with redirect_stderr(shown):
            train = filled(cache)
            face.imported()(train, 0, progress)
            train.close()
        assert bool(shown.getvalue()) == progress


def new_node_setting(**options: Any) -> Proof:
    def proof(face: Face, cache: ac.Cache) -> None:
        one, other = (
            see_settings(face.imported()(**{**face.given(cache), **some}).make("node"))
            for some in ({}, options)
        )
        assert one[:-1] != other[:-1]

    return proof


STREAMS = "adapters/test_torch_cached_stream.py"
RAY = "adapters/test_ray.py"
READS = "multiprocess/test_reads.py::test_a_pool_publishes_the_same_tasks_by_reads"
SKIPPED = "unit/sampling/test_skipped.py::test_without_skip_the_first_one_fails_its_task"
LEFT_OUT = "test_items_that_cannot_be_had_are_left_out_and_tasks_without_any_are_done"
SHARE = "test_each_node_gets_a_share_of_what_a_local_pool_would_publish"
FAILING = "test_a_failing_task_is_told_with_its_traceback_while_the_others_go_on"
WRONG = "test_a_wrong_argument_fails_in_the_constructor"
OF_TENSORFLOW = {*OF_EPOCHS, "columns", "with_ids", "batch_tokens", "length_of"} - {"drop_last"}
FACES: dict[str, tuple[Face, dict[str, Proof]]] = {
    "Loader": (Face("arrowcache:Loader", of_cache, batches), OF_LOADERS),
    "torch.Loader": (
        Face("arrowcache.torch:Loader", of_columns, batches, ("torch",)),
        {**OF_LOADERS, "device": differs({}, {"device": "cpu"}, lambda made: [made.device_stats() is None])},
    ),
    "jax.Loader": (
        Face("arrowcache.jax:Loader", of_columns, batches, ("jax",)),
        {
            **OF_LOADERS,
            "device": says("jax.Device", device="cpu"),
            "sharding": says("jax.sharding.Sharding", sharding="data"),
        },
    ),
    "tensorflow.dataset": (
        Face("arrowcache.tensorflow:dataset", of_columns, of_tensorflow, ("tensorflow",)),
        {
            **{name: proof for name, proof in OF_LOADERS.items() if name in OF_TENSORFLOW},
            "drop_remainder": differs({"batch_size": 48}, {"batch_size": 48, "drop_remainder": False}),
            "backend": says("use one of", backend="io"),
            "prefetch": says("prefetch", prefetch=-1),
        },
    ),
    "EpochBatchSampler": (
        Face("arrowcache.torch:EpochBatchSampler", of_cache, through_dataloader, ("torch",)),
        OF_EPOCHS,
    ),
    "CacheDataset": (
        Face(
            "arrowcache.torch:CacheDataset",
            lambda cache: {"cache": cache, "columns": FIXED},
            of_dataset,
            ("torch",),
        ),
        {"cache": proves_cache, **OF_BATCHES},
    ),
    "dataloader": (
        Face(
            "arrowcache.torch:dataloader",
            lambda cache: of_columns(cache) | {"num_workers": 0},
            batches,
            ("torch",),
        ),
        {
            **OF_EPOCHS,
            **OF_BATCHES,
            "num_workers": differs({"transform": with_pid}, {"transform": with_pid, "num_workers": 1}, pids),
        },
    ),
    "packed": (Face("arrowcache.torch:packed", of_packed, batches, ("torch",)), OF_PACKED),
    "Loader of a dataset": (
        Face("arrowcache.torch:CachedLoader", of_train, numbers, ("torch",)),
        {
            "train": says("CachedDataset", train=[1]),
            "batch_size": differs({}, {"batch_size": 3}),
            "shuffle": differs({}, {"shuffle": False}),
            "seed": differs({}, {"seed": 1}),
            "drop_last": differs({"batch_size": 5}, {"batch_size": 5, "drop_last": True}),
            "workers": proves_making,
            "reads": proved_in(
                "adapters/test_torch_cached_reads.py::"
                "test_a_loaders_workers_make_so_many_at_a_time_in_their_order::reads"
            ),
            "prefetch": proves_items_ahead,
            "collate_fn": differs({}, {"collate_fn": lambda items: {"n": [-item["n"] for item in items]}}),
            "device": differs({}, {"device": "cpu"}, lambda made: [made.device_stats() is None]),
            "rank": differs({"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 2}),
            "world_size": differs({}, {"rank": 0, "world_size": 2}),
        },
    ),
    "cached": (
        Face("arrowcache.torch:cached", of_items, items, ("torch",)),
        {
            "dataset": differs({}, {"dataset": [{"n": np.int64(7)}] * 3}),
            "path": says("Is a directory|Not a directory|not a cache", path="/dev/null/x"),
            "capacity": differs({}, {"capacity": "8MiB"}, lambda train: [train.stats().capacity_bytes]),
            "version": proves_version,
            "columns": differs({}, {"columns": ["n"]}),
            "transform": differs({}, {"transform": lambda item: {"n": -item["n"]}}),
            "schema": differs(
                {}, {"schema": {"t": ac.Ragged("int64")}}, lambda train: [train.cache.schema["t"]]
            ),
            "on_error": proves_on_error,
            "replace": proved_in(
                "adapters/test_torch_cached.py::test_a_share_turns_over_between_epochs::replace"
            ),
            "shards": proved_in(f"{STREAMS}::test_its_state_is_the_pass_and_what_was_delivered::shards"),
            "rank": proved_in(f"{STREAMS}::test_each_shard_is_of_one_rank::rank"),
            "world_size": proved_in(f"{STREAMS}::test_each_shard_is_of_one_rank::world_size"),
        },
    ),
    "DevicePrefetcher": (
        Face("arrowcache.torch:DevicePrefetcher", of_tensors, moved, ("torch",)),
        {
            "iterable": differs({}, {"iterable": []}),
            "device": says("'cpu'", device="cuda:99"),
            "depth": lambda face, cache: differs(
                {"iterable": large_tensors(), "depth": 1},
                {"iterable": large_tensors(), "depth": 4},
                memory_of,
            )(face, cache),
            "devices": differs({}, {"device": None, "devices": ["cpu", "cpu"]}),
        },
    ),
    "SamplerPool": (
        Face("arrowcache:SamplerPool", of_pool, drawn),
        {
            "cache": says("Cache", cache=7),
            "sample": differs({}, {"sample": pid_of}, drawn_list),
            "workers": proves_pool_workers,
            "seed": differs({}, {"seed": 1}, drawn_list),
            "name": differs({}, {"name": "mine"}, drawn_list),
            "executor": proves_executor,
            "segments": differs({}, {"segments": 2}, drawn_list),
            "retries": proves_retries,
            "progress": proves_bar,
            "every_rank": proves_every_rank,
            "reads": proved_in(f"{READS}::reads"),
            "on_error": proved_in(f"{SKIPPED}::on_error"),
        },
    ),
    "Cache.create": (
        Face("arrowcache:Cache.create", of_new, see_settings),
        {
            "path": differs({}, {}),
            "schema": new_setting(schema={"x": ac.Tensor("int64")}),
            "capacity": new_setting(capacity="9MiB"),
            "segment_bytes": new_setting(segment_bytes="1MiB"),
            "segment_rows": new_setting(segment_rows=7),
            "headroom": new_setting(headroom=0.5),
            "durable": new_setting(durable=True),
            "exist_ok": same_path,
            "pace": new_setting(pace=ac.Pace(max_reuse=3)),
        },
    ),
    "Cache.open": (
        Face("arrowcache:Cache.open", lambda cache: {"path": cache.path}, see_settings),
        {"path": proves_cache, "check": proves_check},
    ),
    "Cache.writer": (
        Face("arrowcache:Cache.writer", lambda cache: {"self": cache}),
        {
            "on_full": proves_on_full,
            "timeout": proved_in(
                "unit/storage/test_writer.py::test_a_wait_for_room_ends_at_its_timeout::timeout"
            ),
            "max_delay": proves_max_delay,
        },
    ),
    "Cache.snapshot": (
        Face(
            "arrowcache:Cache.snapshot", lambda cache: {"self": cache}, lambda made: [len(made), made.close()]
        ),
        {"where": differs({}, {"where": lambda segment: segment.seq < 3})},
    ),
    "fill": (
        Face("arrowcache.torch:CachedDataset.fill", of_filled, lambda made: [made], ("torch",)),
        {
            "workers": proves_filling,
            "progress": proves_filling_bar,
            "reads": proved_in(
                "adapters/test_torch_cached_reads.py::"
                "test_fill_has_so_many_made_at_a_time_and_each_once::reads"
            ),
        },
    ),
    "ray.NodeCaches": (
        Face("arrowcache.ray:NodeCaches", of_new, lambda made: see_settings(made.make("node")), ("ray",)),
        {
            "path": says("path must be", path=7),
            "schema": new_node_setting(schema={"x": ac.Tensor("int64")}),
            "capacity": new_node_setting(capacity="9MiB"),
            "segment_bytes": new_node_setting(segment_bytes="1MiB"),
            "segment_rows": new_node_setting(segment_rows=7),
            "headroom": new_node_setting(headroom=0.5),
            "durable": new_node_setting(durable=True),
            "nodes": proved_in(f"{RAY}::test_a_pool_started_again_on_whichever_nodes_repeats_no_task::nodes"),
        },
    ),
    "ray.SamplerPool": (
        Face("arrowcache.ray:SamplerPool", lambda cache: {}, needs=("ray",)),
        {
            "caches": proved_in(f"{RAY}::{SHARE}::0"),
            "sample": proved_in(f"{RAY}::{SHARE}::1"),
            "seed": proved_in(f"{RAY}::{SHARE}::seed"),
            "share": proved_in(f"{RAY}::test_all_nodes_get_the_same_bytes::share"),
            "segments": proved_in(f"{RAY}::test_all_nodes_get_the_same_bytes::segments"),
            "retries": proved_in(f"{RAY}::{FAILING}::retries"),
            "in_flight": proved_in(f"{RAY}::{FAILING}::in_flight"),
            "workers": proved_in(f"{RAY}::{WRONG}::workers"),
            "name": proved_in(f"{RAY}::{WRONG}::name"),
            "options": proved_in(f"{RAY}::{WRONG}::options"),
            "progress": proved_in(f"{RAY}::{WRONG}::progress"),
            "reads": proved_in(f"{RAY}::{WRONG}::reads"),
            "on_error": proved_in(f"{RAY}::{LEFT_OUT}::on_error"),
        },
    ),
}


# what is called without a face's own refusals: Python's are enough there


def exported(files: Any) -> Any:
    """The columns and rows of Parquet files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    return [os.path.dirname(files[0]), [pa.concat_tables(map(pq.read_table, files)).to_pydict()]]


def only_rows(files: Any) -> Any:
    return exported(files)[1]


def of_export(cache: ac.Cache) -> dict[str, Any]:
    return {"cache": cache, "folder": cache.path.parent / f"out{next(COUNT)}", "progress": False}


def files_of(cache: ac.Cache) -> list[Path]:
    from arrowcache.explore import export_parquet

    return export_parquet(**of_export(cache), columns=["id", "size"])


def of_import(cache: ac.Cache) -> dict[str, Any]:
    path = cache.path.parent / f"in{next(COUNT)}"
    OPENED.append(path)
    return {"files": files_of(cache)[:2], "cache": path, "capacity": "8MiB", "progress": False}


def imported(rows: int) -> Any:
    made = ac.Cache.open(OPENED[-1])
    return [rows, see_settings(made)[:-1]]


def proves_again(face: Face, cache: ac.Cache) -> None:
    given = face.given(cache)
    first = face.called(given)
    with pytest.raises(FileExistsError, match="already"):
        face.called(given)
    assert face.called({**given, "again": True}) == first
    assert ac.Cache.open(OPENED[-1]).stats().rows == 2 * first


def proves_progress(face: Face, cache: ac.Cache) -> None:
    for progress in (False, True):
        shown = io.StringIO()
        with redirect_stderr(shown):
            face.called({**face.given(cache), "progress": progress})
        assert bool(shown.getvalue()) == progress


def proves_export_into(face: Face, cache: ac.Cache) -> None:
    for _ in range(2):
        given = face.given(cache)
        files = face.called(given)
        assert {Path(file).parent for file in files} == {given["folder"]}


@changes
def proves_rows_of_export(face: Face, cache: ac.Cache) -> None:
    cache.exclude((0, 1))
    cache.tag([(0, 0), (1, 3)], "hard")
    seen = [face.seen(cache, only, **options) for only, options in EXPORTED[face.where]]
    assert not any(isinstance(each, tuple) for each in seen), seen
    assert len({repr(each) for each in seen}) == len(seen)


def records(files: Any) -> Any:
    import tensorflow as tf

    examples = [
        tf.train.Example.FromString(each.numpy()) for each in tf.data.TFRecordDataset([*map(str, files)])
    ]
    return [
        {name: str(each.features.feature[name]) for name in sorted(each.features.feature)}
        for each in examples
    ]


def of_records(cache: ac.Cache) -> dict[str, Any]:
    return {"cache": cache, "folder": cache.path.parent / f"records{next(COUNT)}"}


def of_record_import(cache: ac.Cache) -> dict[str, Any]:
    from arrowcache.tensorflow import to_tfrecords

    path, kinds = cache.path.parent / f"taken{next(COUNT)}", {"id": ac.Tensor("int64")}
    OPENED.append(path)
    files = to_tfrecords(**of_records(cache), columns=["id"])
    ac.Cache.create(path, kinds, "8MiB", exist_ok=True)
    return {"files": files[:2], "schema": kinds, "cache": path, "workers": 1, "progress": False}


ROWS_OF_EXPORT = [{}, {"rows": "all"}, {"rows": "hard"}, {"rows": [(0, 1), (0, 2)]}]
EXPORTED = {
    "arrowcache.explore:export_parquet": [(only_rows, options) for options in ROWS_OF_EXPORT],
    "arrowcache.tensorflow:to_tfrecords": [(records, options) for options in ROWS_OF_EXPORT],
}


def notes(cache: ac.Cache) -> Any:
    """What is noted of rows."""
    from arrowcache.explore import to_pandas

    values = [name for name in to_pandas(cache) if name[0] != "_" and name not in SCHEMA]
    frame = to_pandas(cache, ["_seq", "_row", "_excluded", "_reason", "_tags", *values])
    return frame.astype(str).to_dict("list")


def proves_note(one: dict[str, Any], other: dict[str, Any]) -> Proof:
    """Two calls of a method of a cache note other things."""

    def proof(face: Face, cache: ac.Cache) -> None:
        found = []
        for options in (one, other):
            held = fill(cache.path.parent / f"noted{next(COUNT)}")
            held.exclude([(0, 1), (0, 3)])
            for tag in ("hard", "easy"):
                held.tag([(0, 1), (0, 3)], tag)
            face.called({**face.given(held), **options})
            found.append(notes(held))
        assert found[0] != found[1]

    return proof


def of_gather(cache: ac.Cache) -> dict[str, Any]:
    return {**of_views(cache), "row_ids": [0, 3]}


def of_views(cache: ac.Cache) -> dict[str, Any]:
    return {"self": AT_END.enter_context(cache.snapshot())}


def arrays(found: Any) -> Any:
    return [{name: plain(values) for name, values in each.items()} for each in found]


def proves_out(face: Face, cache: ac.Cache) -> None:
    given, out = face.given(cache), {"id": np.full(2, -1)}
    found = face.called({**given, "columns": ["id"], "out": out})
    assert found["id"] is out["id"]
    assert out["id"].tolist() == [0, 3]


def of_state(cache: ac.Cache) -> dict[str, Any]:
    """A loader of a cache whose oldest rows have left since the state was saved."""
    held = fill(cache.path.parent / f"resumed{next(COUNT)}")
    with ac.Loader(held, 16, shuffle=None) as loader:
        epoch = iter(loader)
        next(epoch)
        state = loader.state_dict()
    held.evict(1)
    held.evict(1)
    return {"self": ac.Loader(held, 16, shuffle=None), "state": state}


def proves_missing(face: Face, cache: ac.Cache) -> None:
    for missing in ("skip", "raise"):
        given = face.given(cache)
        with given["self"] as loader:
            if missing == "raise":
                with pytest.raises(ac.MissingSegmentsError):
                    [face.called({**given, "missing": missing}), *loader]
            else:
                face.called({**given, "missing": missing})
                with pytest.warns(RuntimeWarning, match="left the cache"):
                    found = [*loader]
                assert found


def proves_state(face: Face, cache: ac.Cache) -> None:
    held = fill(cache.path.parent / f"whole{next(COUNT)}")
    for taken in (2, 5):
        with ac.Loader(held, 16) as loader, ac.Loader(held, 16) as other:
            epoch = iter(loader)
            for _ in range(taken):
                next(epoch)
            face.called({"self": other, "state": loader.state_dict()})
            assert len([*other]) == ROWS // 16 - taken


def draws_of(source: Any) -> Any:
    """The first samples of a source."""
    with source if hasattr(source, "__exit__") else nullcontext():
        samples = itertools.islice(source(np.random.default_rng(0)), 12)
        return [{name: np.asarray(value).tolist() for name, value in each.items()} for each in samples]


def of_parquet(cache: ac.Cache) -> dict[str, Any]:
    return {"uri": [str(file) for file in files_of(cache)[:3]]}


def of_windows(cache: ac.Cache) -> dict[str, Any]:
    path = cache.path.parent / f"array{next(COUNT)}"
    np.save(f"{path}.npy", np.arange(60.0).reshape(20, 3))
    np.save(f"{path}b.npy", np.arange(100, 160.0).reshape(20, 3))
    return {"arrays": [f"{path}.npy", f"{path}b.npy"], "window": (4,)}


def of_shards(cache: ac.Cache) -> dict[str, Any]:
    """Two shards of samples of two files, .txt and .npy."""
    folder = cache.path.parent / f"shards{next(COUNT)}"
    folder.mkdir()
    for shard in range(2):
        files = {}
        for number in range(8 * shard, 8 * shard + 8):
            array = io.BytesIO()
            np.save(array, np.arange(3) + number)
            files |= {f"{number:03}.txt": str(number).encode(), f"{number:03}.npy": array.getvalue()}
        write_tar(folder / f"{shard}.tar", files)
    return {"uris": [os.fspath(folder / "0.tar")]}


def proves_uris(face: Face, cache: ac.Cache) -> None:
    uris = face.given(cache)["uris"]
    differs({"uris": uris}, {"uris": uris[0].replace("0.tar", "1.tar")})(face, cache)


def proves_decode(face: Face, cache: ac.Cache) -> None:
    number = {"fields": ["txt"], "decode": lambda field, data: np.int64(int(data) + 1)}
    differs({"fields": ["txt"]}, number)(face, cache)


def proves_items(face: Face, cache: ac.Cache) -> None:
    differs({}, {"dataset": face.given(cache)["dataset"][:5]})(face, cache)


def proves_filesystem(name: str) -> Proof:
    """Names are those of this file system, and of no other."""

    def proof(face: Face, cache: ac.Cache) -> None:
        from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

        given = face.given(cache)
        paths = [given[name]] if isinstance(given[name], str) else given[name]
        given[name] = [os.path.relpath(path, cache.path.parent) for path in paths]
        files = SubTreeFileSystem(os.fspath(cache.path.parent), LocalFileSystem())
        assert draws_of(face.called({**given, "filesystem": files}))
        with pytest.raises((OSError, ValueError)):
            draws_of(face.called(given))

    return proof


def one_of(rng: Any) -> Iterator[dict[str, Any]]:
    while True:
        yield {"n": 1}


def other_of(rng: Any) -> Iterator[dict[str, Any]]:
    while True:
        yield {"n": 2}


SOURCES = "unit/sampling/sources"
SKIPPED = "test_a_source_that_fails_ends_the_task_unless_it_is_to_be_skipped"
TOO_LARGE = "test_items_that_do_not_fit_a_segment_are_an_error_that_says_what_to_do"
S3 = "adapters/test_sources_s3.py"
PLAIN: dict[str, tuple[Face, dict[str, Proof]]] = {
    "export_parquet": (
        Face("arrowcache.explore:export_parquet", of_export, only_rows, ("pandas",)),
        {
            "cache": proves_cache,
            "folder": proves_export_into,
            "columns": differs({}, {"columns": ["id", "_row"]}),
            "progress": proves_progress,
            "rows": proves_rows_of_export,
        },
    ),
    "import_parquet": (
        Face("arrowcache.explore:import_parquet", of_import, imported, ("pandas",)),
        {
            "files": lambda face, cache: differs({}, {"files": files_of(cache)[:3]})(face, cache),
            "cache": says("Cache", cache=7),
            "capacity": differs({}, {"capacity": "9MiB"}),
            "schema": differs({}, {"schema": {"id": ac.Tensor("int64")}}),
            "segment_bytes": differs({}, {"segment_bytes": "1MiB"}),
            "again": proves_again,
            "progress": proves_progress,
        },
    ),
    "to_tfrecords": (
        Face("arrowcache.tensorflow:to_tfrecords", of_records, records, ("tensorflow",)),
        {
            "cache": proves_cache,
            "folder": proves_export_into,
            "columns": differs({}, {"columns": ["id"]}),
            "compression": differs({}, {"compression": "GZIP"}, lambda files: [files[0].stat().st_size]),
            "rows": proves_rows_of_export,
        },
    ),
    "from_tfrecords": (
        Face("arrowcache.tensorflow:from_tfrecords", of_record_import, imported, ("tensorflow",)),
        {
            "files": says("no such file", files="/nowhere/*.tfrecord"),
            "schema": says("another schema", schema={"id": ac.Tensor("int32")}),
            "cache": says("Cache", cache=7),
            "workers": says("workers", workers=0),
            "compression": says("compress", compression="GZIP"),
            "again": proves_again,
            "progress": proves_progress,
        },
    ),
    "Cache.exclude": (
        Face("arrowcache:Cache.exclude", lambda cache: {"self": cache, "ids": (0, 0)}, needs=("pandas",)),
        {
            "ids": proves_note({}, {"ids": (0, 2)}),
            "reason": proves_note({}, {"reason": "blurred"}),
            "where": proves_note({}, {"ids": None, "where": pc.field("id") >= 0}),
        },
    ),
    "Cache.include": (
        Face("arrowcache:Cache.include", lambda cache: {"self": cache, "ids": (0, 1)}, needs=("pandas",)),
        {"ids": proves_note({}, {"ids": (0, 3)}), "where": says("give either ids or where=", where=7)},
    ),
    "Cache.tag": (
        Face("arrowcache:Cache.tag", lambda c: {"self": c, "ids": (0, 0), "tag": "new"}, needs=("pandas",)),
        {"ids": proves_note({}, {"ids": (0, 2)}), "tag": proves_note({}, {"tag": "hard"})},
    ),
    "Cache.untag": (
        Face(
            "arrowcache:Cache.untag", lambda c: {"self": c, "ids": (0, 1), "tag": "easy"}, needs=("pandas",)
        ),
        {"ids": proves_note({}, {"ids": (0, 3)}), "tag": proves_note({}, {"tag": "hard"})},
    ),
    "Cache.annotate": (
        Face(
            "arrowcache:Cache.annotate", lambda c: {"self": c, "ids": (0, 0), "loss": 0.5}, needs=("pandas",)
        ),
        {"ids": proves_note({}, {"ids": (0, 2)})},
    ),
    "Snapshot.gather": (
        Face("arrowcache:Snapshot.gather", of_gather, lambda found: arrays([found])),
        {
            "row_ids": differs({}, {"row_ids": [0, 4]}),
            "columns": differs({}, {"columns": ["size"]}),
            "out": proves_out,
        },
    ),
    "Snapshot.views": (
        Face("arrowcache:Snapshot.views", of_views, arrays),
        {"batch_rows": differs({}, {"batch_rows": 8}), "columns": differs({}, {"columns": ["size"]})},
    ),
    "Loader.load_state_dict": (
        Face("arrowcache:Loader.load_state_dict", of_state),
        {"state": proves_state, "missing": proves_missing},
    ),
    "ParquetRows": (
        Face("arrowcache.sampling.sources:ParquetRows", of_parquet, draws_of, ("pandas",)),
        {
            "uri": lambda face, cache: differs({}, {"uri": str(files_of(cache)[5])})(face, cache),
            "columns": differs({}, {"columns": ["size"]}),
            "filter": lambda face, cache: differs({}, {"filter": pc.field("id") > 40})(face, cache),
            "rows_per_group": differs({}, {"rows_per_group": 3}),
            "passes": differs({}, {"passes": 1}),
            "schema": differs(
                {}, {"schema": {"id": ac.Tensor("float64")}}, lambda source: [source.schema["id"]]
            ),
            "fill": says("fill", fill={"nowhere": 1}),
            "filesystem": proves_filesystem("uri"),
            "retries": proved_in(f"{S3}::test_what_passes_is_tried_again_and_changes_nothing::retries"),
        },
    ),
    "ArrayWindows": (
        Face("arrowcache.sampling.sources:ArrayWindows", of_windows, draws_of),
        {
            "arrays": lambda face, cache: differs({}, {"arrays": of_windows(cache)["arrays"][1]})(
                face, cache
            ),
            "window": differs({}, {"window": (5,)}),
            "weights": differs({}, {"weights": [1, 1e-9]}),
            "decode": proved_in(
                f"{SOURCES}/test_windows.py::test_packed_numbers_are_what_cf_says_they_stand_for::decode"
            ),
            "windows_per_chunk": proved_in(
                f"{SOURCES}/test_plans.py::test_windows_of_a_chunk_are_different::windows_per_chunk"
            ),
            "where": differs({}, {"where": {0: slice(0, 8)}}),
            "with_position": differs({}, {"with_position": True}),
            "filesystem": proves_filesystem("arrays"),
            "retries": proved_in(
                f"{S3}::test_windows_of_every_format_are_tried_again_and_end_with_the_stores_error::retries"
            ),
        },
    ),
    "WebDatasetShards": (
        Face("arrowcache.sampling.sources:WebDatasetShards", of_shards, draws_of),
        {
            "uris": proves_uris,
            "decode": proves_decode,
            "fields": differs({}, {"fields": ["npy"]}),
            "shuffle": differs({}, {"shuffle": 0}),
            "schema": differs(
                {"fields": ["npy"]},
                {"schema": {"npy": ac.Ragged("int64")}},
                lambda source: [source.schema["npy"]],
            ),
            "filesystem": proves_filesystem("uris"),
            "retries": proved_in(
                f"{SOURCES}/test_shards.py::test_a_read_that_fails_is_tried_again_and_changes_nothing::retries"
            ),
        },
    ),
    "Items": (
        Face(
            "arrowcache.sampling.sources:Items",
            lambda cache: {"dataset": [{"n": n, "text": [n, n]} for n in range(9)]},
            draws_of,
        ),
        {
            "dataset": proves_items,
            "passes": proved_in(f"{SOURCES}/test_items.py::test_without_an_end_it_goes_on::passes"),
            "columns": differs({}, {"columns": ["n"]}),
            "schema": differs(
                {}, {"schema": {"n": ac.Tensor("float64")}}, lambda source: [source.schema["n"]]
            ),
            "segment_items": proved_in(f"{SOURCES}/test_items.py::{TOO_LARGE}::segment_items"),
        },
    ),
    "Mix": (
        Face("arrowcache.sampling.sources:Mix", lambda cache: {"sources": [(one_of, 1.0)]}, draws_of),
        {
            "sources": differs({}, {"sources": [(other_of, 1.0)]}),
            "on_error": proved_in(f"{SOURCES}/test_mix_and_map.py::{SKIPPED}::on_error"),
        },
    ),
    "Map": (
        Face(
            "arrowcache.sampling.sources:Map",
            lambda cache: {
                "source": one_of,
                "function": lambda sample: sample,
                "schema": {"n": ac.Tensor("int64")},
            },
            draws_of,
        ),
        {
            "source": differs({}, {"source": other_of}),
            "function": differs({}, {"function": lambda sample: {"n": -sample["n"]}}),
            "schema": differs({}, {"schema": {"n": ac.Tensor("int32")}}, lambda source: [source.schema["n"]]),
        },
    ),
}
ALL = FACES | PLAIN
CASES = [(name, argument) for name, (_, proofs) in ALL.items() for argument in proofs]


def row(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "size": 1 + number % 7,
        "other_size": 1 + number % 3,
        "heavy": float(number % 10 == 0),
        "x": np.full(16, number, np.float32),
        "tokens": np.full(5 + number % 9, number, np.int32),
        "more": np.full(3 + number % 4, number, np.int32),
    }


def fill(path: Path, first: int = 0) -> ac.Cache:
    made = ac.Cache.create(path, SCHEMA, "1MiB", "32KiB", SEGMENT_ROWS)
    with made.writer() as writer:
        for number in range(first, first + ROWS):
            writer.append(**row(number))
    return made


@pytest.fixture(scope="module")
def of_all(tmp_path_factory: pytest.TempPathFactory) -> ac.Cache:
    """What `held` gives; nothing else asks for it."""
    return fill(tmp_path_factory.mktemp("held") / "cache")


def files_within(cache: ac.Cache) -> list[tuple[Path, int, int]]:
    """Those that a reader leaves as they are: all but the folder's own and what counts readers."""
    return [
        (path, path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(cache.path.rglob("*"))
        if path.is_file() and (path.parent != cache.path or path.name == "cache.json")
    ]


@pytest.fixture
def held(
    of_all: ac.Cache, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[ac.Cache]:
    """A cache that tests share, and leave as they find it; that of a proof that changes it is its own."""
    for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "argument" in given and is_changed_by(**given):
        yield fill(request.getfixturevalue("tmp_path") / "cache")
    else:
        before = files_within(of_all)
        yield of_all
        assert files_within(of_all) == before, "it changes the cache: mark the proof with @changes"
    AT_END.close()


def is_changed_by(name: str, argument: str) -> bool:
    """True of proofs that say so, and where ranks agree on an epoch of a run."""
    return ALL[name][1][argument] in CHANGES or argument in RANKED


def face_of(name: str) -> Face:
    face, _ = ALL[name]
    for needed in face.needs:
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    return face


def arguments_of(face: Face) -> list[str]:
    parameters = inspect.signature(face.imported()).parameters.values()
    variable = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    return [each.name for each in parameters if each.kind not in variable and each.name != "self"]


@pytest.mark.parametrize("name", ALL)
def test_each_argument_of_a_face_has_a_proof_and_nothing_else_has(name):
    assert {*arguments_of(face_of(name))} == {*ALL[name][1]}


@pytest.mark.filterwarnings("ignore:.*rows are left out|.*pin_memory:UserWarning")
@pytest.mark.parametrize(("name", "argument"), CASES)
def test_each_argument_changes_what_can_be_seen(held, name, argument):
    ALL[name][1][argument](face_of(name), held)


OTHERS = [
    "num_workers", "batch_sampler", "sampler", "pin_memory", "pin_memory_device", "collate_fn",
    "worker_init_fn",
    "persistent_workers", "prefetch_factor", "generator", "multiprocessing_context", "in_order", "dataset",
    "drop_remainder", "drop_last", "num_parallel_calls", "deterministic", "shuffle_buffer", "buffer_size",
    "num_epochs", "num_replicas", "num_shards", "worker_count", "workers", "worker_type", "prefetch",
    "transform",
    "columns", "with_ids", "weights", "batch_tokens", "length_of", "device", "paced", "settings", "packing",
    "may_view", "names", "budget", "xyz",
]  # fmt: skip
"""Names of other libraries, of other faces, and of what is inside: what one does not take it refuses."""


@pytest.mark.parametrize("name", FACES)
def test_any_other_argument_is_refused_in_words_of_this_face(held, name):
    face = face_of(name)
    known, given = arguments_of(face), face.given(held)
    own = {*known} | (dataloaders_own() if name == "dataloader" else set())
    for other in OTHERS:
        if other in own:
            continue
        with pytest.raises(TypeError) as refused:
            face.called({**given, other: None})
        said = str(refused.value)
        assert f"has no argument {other!r}: " in said
        assert "Options" not in said
        if other in ("num_workers", "workers"):
            assert "workers" in said.replace(repr(other), "") or not {"workers", "num_workers"} & own
        for word in re.findall(r"use (\w+)=", said):
            assert word in own, f"{said}: it has no {word}"


def dataloaders_own() -> set[str]:
    """What a DataLoader takes, and `dataloader` passes on."""
    if importlib.util.find_spec("torch") is None:
        return set()
    from torch.utils.data import DataLoader

    ours = {"dataset", "sampler", "batch_sampler", "collate_fn", "generator"}
    return {*inspect.signature(DataLoader).parameters} - ours


@pytest.mark.parametrize("name", FACES)
def test_a_misspelt_argument_is_told_the_near_one(held, name):
    face = face_of(name)
    known, given = arguments_of(face), face.given(held)
    for argument in known:
        misspelt = argument[:-2] + argument[-1] + argument[-2] if len(argument) > 4 else argument + "s"
        if misspelt in known or argument[-1] == argument[-2]:
            continue
        with pytest.raises(TypeError, match=rf"has no argument '{misspelt}'.*\b{argument}\b"):
            face.called({**given, misspelt: None})


@pytest.mark.parametrize("name", FACES)
def test_too_many_by_position_are_refused_by_name(held, name):
    face = face_of(name)
    with pytest.raises(TypeError, match=r" by position, and \d+ were given") as refused:
        face.imported()(*([held] * 30))
    assert "Options" not in str(refused.value)


@pytest.mark.parametrize(
    ("where", "says_of_itself", "way"),
    [
        ("arrowcache:Loader", "a Loader is no dataset", "dataloader"),
        ("arrowcache.torch:Loader", "a Loader is no dataset", "dataloader"),
        ("arrowcache.jax:Loader", "a Loader of arrowcache.jax is no dataset", "iterate it"),
        ("arrowcache.torch:packed", r"packed\(...\) is no dataset", "IterableDataset"),
    ],
)
def test_each_face_speaks_of_itself_where_it_is_taken_for_a_dataset(held, where, says_of_itself, way):
    needs = where.split(":")[0].split(".")[1:]
    if needs and importlib.util.find_spec(needs[0]) is None:
        pytest.skip(f"{needs[0]} is not installed")
    given = of_packed(held) if where.endswith("packed") else of_cache(held)
    with Face(where, of_cache).imported()(**given) as loader:
        for use in (len, lambda loader: loader[0]):
            with pytest.raises(TypeError, match=rf"{says_of_itself}.*{way}"):
                use(loader)


def test_a_dataloader_over_packed_is_told_a_way_that_works(held):
    torch_data = pytest.importorskip("torch.utils.data")
    from arrowcache.torch import packed

    class Batches(torch_data.IterableDataset):  # type: ignore[misc, name-defined]
        """As the error says."""

        def __iter__(self) -> Any:
            return iter(loader)

    with packed(**of_packed(held)) as loader:
        for options in ({"shuffle": True}, {"batch_size": None}, {"batch_size": 4}):
            with pytest.raises(TypeError, match=r"packed\(...\) is no dataset.*IterableDataset"):
                next(iter(torch_data.DataLoader(loader, **options)))
        through = [plain(batch["tokens"]) for batch in torch_data.DataLoader(Batches(), batch_size=None)]
    with packed(**of_packed(held)) as loader:
        assert through == [plain(batch["tokens"]) for batch in loader]


@pytest.mark.parametrize(
    "option", [{"weights": "heavy"}, {"with_ids": True}, {"transform": lambda batch: batch}]
)
def test_packed_refuses_a_loader_whose_options_it_would_drop(held, option):
    pytest.importorskip("torch")
    from arrowcache.torch import packed

    with (
        ac.Loader(held, 16, **option) as loader,
        pytest.raises(ValueError, match="the Loader has"),
    ):
        packed(loader, "tokens", 16, batch_size=2)
