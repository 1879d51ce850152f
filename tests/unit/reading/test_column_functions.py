"""`Loader(columns={"image": decode})`: a function makes a column of the batch, before the transform."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from helpers import make_cache

import arrowcache as ac
from arrowcache import Binary, Loader, Ragged, Schema, String, Tensor

ROWS = 12
SCHEMA = Schema({"id": Tensor("int64"), "image": Binary(), "box": Ragged("int16"), "name": String()})
SIZE = (2, 3)


@pytest.fixture
def cache(tmp_path):
    cache = make_cache(tmp_path / "cache", SCHEMA, segment_rows=4)
    with cache.writer() as writer:
        for n in range(ROWS):
            encoded = np.full(SIZE, n, np.uint8).tobytes()
            writer.append(id=n, image=encoded, box=np.arange(n, dtype=np.int16), name=f"row {n}")
    return cache


def decode(rows):
    """Encoded images, one after another."""
    return np.stack([np.frombuffer(row, np.uint8).reshape(SIZE) for row in rows])


def longest(boxes):
    return np.diff(boxes.offsets)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"workers": 2, "worker_type": "thread"},
        {"workers": 1},
        {"shuffle": None},
        {"shuffle": "blocks", "drop_last": False},
    ],
    ids=["one thread", "threads", "a process", "views", "blocks"],
)
def test_a_function_makes_the_column_of_each_batch(cache, options):
    functions = {"id": None, "image": decode, "box": longest}
    with Loader(cache, 5, columns=functions, **options) as loader:
        batches = list(loader)
    assert len(batches) == (3 if "drop_last" in options else 2)
    for batch in batches:
        ids = batch["id"]
        assert list(batch) == ["id", "image", "box"], "those of the dict, in its order"
        assert batch["image"].shape == (len(ids), *SIZE)
        assert (batch["image"] == ids[:, None, None]).all()
        assert batch["box"].tolist() == ids.tolist()


def test_it_runs_before_the_transform_and_in_its_thread(cache):
    seen = []

    def function(ids):
        seen.append(threading.current_thread())
        return ids * 2.5

    def transform(batch):
        seen.append(threading.current_thread())
        return {"half": batch["id"] / 5, "seq": batch["_seq"]}

    with Loader(
        cache, 4, columns={"id": function}, transform=transform, shuffle=None, with_ids=True
    ) as loader:
        batches = list(loader)
        stats = loader.stats()
    assert np.concatenate([batch["half"] for batch in batches]).tolist() == [n / 2 for n in range(ROWS)]
    assert len(set(seen)) == 1
    assert seen[0] is not threading.current_thread()
    assert stats.rows == ROWS


def test_a_function_may_change_what_it_gets_and_nothing_else_changes(cache):
    def function(ids):
        ids += 100
        return ids

    for shuffle in (None, "rows"):
        with Loader(cache, 4, columns={"id": function}, shuffle=shuffle) as loader:
            for _ in range(2):
                assert sorted(i for batch in loader for i in batch["id"]) == list(range(100, 100 + ROWS))


def test_a_dict_without_functions_names_columns_and_needs_no_thread(cache):
    before = threading.active_count()
    with Loader(cache, 4, columns={"name": None, "id": None}) as loader:
        iterator = iter(loader)
        assert list(next(iterator)) == ["name", "id"]
        names = [thread.name for thread in threading.enumerate()]
        iterator.close()
    assert not any(name.startswith("arrowcache-worker") for name in names), before
    with Loader(cache, 4, columns=Schema({"id": Tensor("int64")})) as loader:
        assert list(next(iter(loader))) == ["id"]


@pytest.mark.parametrize("workers", [0, 1], ids=["thread", "process"])
@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (len, TypeError, "function of column 'image' returned int, not an array.* ndarray of 4 rows"),
        (list, TypeError, "returned list, not an array"),
        (
            lambda rows: np.zeros(len(rows) + 1),
            ValueError,
            r"array of shape \(5,\), and the batch has 4 rows",
        ),
        (lambda _: np.zeros(()), ValueError, r"shape \(\)"),
        (lambda rows: np.stack(rows[:0]), ValueError, "need at least one array"),
        (
            lambda rows: np.ma.array(np.zeros(len(rows)), mask=True),
            TypeError,
            r"the function of column 'image' returned a masked array, whose mask .*\.filled\(0\)",
        ),
    ],
    ids=["number", "list", "rows", "scalar", "raises", "masked"],
)
def test_what_is_no_column_is_an_error_in_place_of_the_batch(cache, function, error, message, workers):
    options = {"columns": {"image": function}, "workers": workers}
    with Loader(cache, 4, **options) as loader, pytest.raises(error, match=message):
        next(iter(loader))


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"id": 3}, TypeError, r"columns\['id'\] must be a function or None, not 3"),
        ({"imag": decode}, ValueError, "unknown column 'imag': did you mean 'image'"),
        ({}, ValueError, "columns is empty"),
    ],
    ids=["no function", "no column", "nothing"],
)
def test_what_is_no_function_of_a_column_is_refused_at_once(cache, columns, error, message):
    with pytest.raises(error, match=message):
        Loader(cache, 4, columns=columns)


@pytest.mark.parametrize("workers", [0, 1], ids=["thread", "process"])
def test_a_stop_iteration_of_a_function_does_not_end_the_epoch_in_silence(cache, workers):
    def function(_):
        raise StopIteration

    with (
        Loader(cache, 4, columns={"id": function}, workers=workers) as loader,
        pytest.raises(RuntimeError, match="the function of column 'id' raised StopIteration"),
    ):
        list(loader)


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="errors have notes from Python 3.11 on")
@pytest.mark.parametrize("workers", [0, 1], ids=["thread", "process"])
def test_an_error_of_a_function_has_a_note_with_its_column(cache, workers):
    functions = {"id": None, "image": lambda rows: np.stack(rows[:0])}
    with (
        Loader(cache, 4, columns=functions, workers=workers) as loader,
        pytest.raises(ValueError, match="at least one array") as caught,
    ):
        list(loader)
    assert caught.value.__notes__ == ["It was raised by the function of column 'image'."]


def test_what_cannot_be_pickled_is_refused_for_processes(cache):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be pickled"):
        Loader(cache, 4, columns={"id": lambda ids: ids * lock.locked()}, workers=1)


def test_elsewhere_functions_are_refused(cache):
    functions = {"image": decode}
    with cache.snapshot() as snapshot, pytest.raises(TypeError, match=r"a list of names here.*\['image'\]"):
        snapshot.gather([0], functions)
    with cache.snapshot() as snapshot, pytest.raises(TypeError, match=r"a list of names here.*\['id'\]"):
        snapshot.gather([0], {"id": 3})
    with cache.snapshot() as snapshot:
        assert list(snapshot.gather([0], SCHEMA)) == [*SCHEMA]
        assert list(snapshot.gather([0], {"name": None, "id": None})) == ["name", "id"]


def test_tensors_of_what_it_returns(cache, torch):
    from arrowcache.torch import Loader as TorchLoader

    with TorchLoader(cache, 4, columns={"id": None, "image": decode, "box": longest}) as loader:
        for batch in loader:
            assert batch["image"].dtype == torch.uint8
            assert torch.equal(batch["image"][:, 0, 0].long(), batch["id"])
            assert torch.equal(batch["box"].long(), batch["id"])


def test_a_path_will_do(cache):
    with ac.Loader(cache.path, 4, columns={"id": np.negative}) as loader:
        assert sorted(i for batch in loader for i in batch["id"].tolist()) == list(range(1 - ROWS, 1))
