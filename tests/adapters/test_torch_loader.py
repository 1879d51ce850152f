from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict

import numpy as np
import pytest
from every_type import every_type
from helpers import EVERY_TYPE, ids_of, make_cache, publish, sample
from processes import Script

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from torch.utils.data import DataLoader

import arrowcache as ac
from arrowcache.torch import DevicePrefetcher, Loader, dataloader

BASE = torch.arange(256, dtype=torch.float32).reshape(16, 16)


def check(batch) -> None:
    assert torch.equal(batch["image"], BASE + batch["id"].float()[:, None, None])


def ids(batches) -> list[int]:
    found = []
    for batch in batches:
        check(batch)
        found += batch["id"].tolist()
    return found


class Spy(Loader):
    """Remembers the arrays of the slots that its tensors were made of."""

    def _finish(self, batch):
        self.arrays = dict(batch)
        return super()._finish(batch)


def test_each_kind_of_column_arrives_as_documented(tmp_path):
    """Tensors over the memory of slots, jagged nested tensors, microseconds since 1970, lists."""
    options = {"capacity": "16MiB", "segment_bytes": "1MiB"}
    cache, written = make_cache(tmp_path / "cache", EVERY_TYPE, **options), every_type(20)
    written["id"] = np.arange(20)
    with cache.writer() as writer:
        writer.extend(written)
    with Spy(cache, 8) as loader:
        for batch in loader:
            for name, kind in EVERY_TYPE.items():
                column = batch[name]
                if isinstance(kind, ac.String | ac.Binary):
                    assert type(column) is list
                    continue
                dtype = getattr(torch, getattr(kind, "dtype", "int64"))
                assert (column.dtype, column.device.type, len(column)) == (dtype, "cpu", 8), name
                if isinstance(kind, ac.Ragged):
                    assert (column.is_nested, column.layout) == (True, torch.jagged)
                else:
                    assert column.shape == (8, *kind.shape)
                    assert column.is_contiguous()
                    assert column.data_ptr() == loader.arrays[name].ctypes.data
            times = [written["when"][number] for number in batch["id"].tolist()]
            assert batch["when"].tolist() == np.array(times, "M8[us]").astype(np.int64).tolist()


def test_tensors_share_their_memory_with_the_slots(cache):
    with Spy(cache, 16) as loader:
        for batch in loader:
            for name, tensor in batch.items():
                array = loader.arrays[name]
                assert tensor.data_ptr() == array.ctypes.data
                array[...] = 7
                assert bool((tensor == 7).all())
                tensor.fill_(9)
                assert (array == 9).all()
    assert cache.verify() == []


def test_a_batch_of_nothing_but_empty_ragged_values(tmp_path):
    cache = make_cache(tmp_path / "cache", {"points": ac.Ragged("float32", (2,))})
    with cache.writer() as writer:
        for _ in range(8):
            writer.append(points=np.zeros((0, 2), np.float32))
    with Loader(cache, 8) as loader:
        (batch,) = loader
        assert [tuple(points.shape) for points in batch["points"].unbind()] == [(0, 2)] * 8


def test_a_transform_gets_arrays_and_may_return_arrays_or_tensors(cache):
    def transform(batch):
        assert isinstance(batch["image"], np.ndarray)
        return {
            "array": batch["id"] * 2,
            "tensor": torch.from_numpy(batch["id"]) * 3,
            "text": [str(i) for i in batch["id"]],
            "image": batch["image"].mean(axis=0),
        }

    with Loader(cache, 16, shuffle=None, transform=transform) as loader:
        batch = next(iter(loader))
        assert batch["array"].tolist() == list(range(0, 32, 2))
        assert batch["tensor"].tolist() == list(range(0, 48, 3))
        assert batch["text"] == [str(i) for i in range(16)]
        assert torch.equal(batch["image"], BASE + 7.5)


def test_a_transform_may_change_the_dtype_of_a_column(tmp_path):
    cache = make_cache(tmp_path / "cache", {"x": ac.Tensor("bfloat16", (2,)), "at": ac.Timestamp()})
    with cache.writer() as writer:
        writer.append(x=torch.ones(2, dtype=torch.bfloat16), at=np.datetime64(7, "us"))

    def transform(batch):
        return {"x": batch["x"].astype(np.float32), "at": batch["at"].view(np.int64) / 2}

    with Loader(cache, 1, transform=transform) as loader:
        (batch,) = loader
    assert batch["x"].dtype == torch.float32
    assert batch["at"].tolist() == [3.5]


def test_tensors_of_autograd_keep_their_batch(cache):
    weight = torch.zeros(16, 16, requires_grad=True)
    with Loader(cache, 16, shuffle=None, prefetch=1) as loader:
        losses = [(batch["image"] * weight).sum() for batch in loader]
        for _ in range(5):
            list(loader)
        torch.stack(losses).sum().backward()
    assert torch.equal(weight.grad, (BASE * 160 + sum(range(160))))


def test_what_it_yields_is_what_was_appended(tmp_path):
    cache = make_cache(tmp_path / "cache")
    with cache.writer() as writer:
        writer.append(id=torch.tensor(3), image=torch.from_numpy(sample(3)["image"]).requires_grad_())
    with Loader(cache, 1) as loader:
        (batch,) = loader
    assert torch.equal(batch["image"][0], BASE + 3)
    assert not batch["image"].requires_grad


def test_the_rank_of_torch_distributed_is_the_one_at_the_beginning_of_an_epoch(cache, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with Loader(cache, 8) as one, Loader(cache, 8) as other, Loader(cache, 8, rank=0, world_size=1) as alone:
        assert len(ids(one)) == len(ids(other)) == 160
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        rows = []
        for rank, loader in enumerate([one, other]):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            rows.append(iter(loader))
            publish(cache, 1)
        rows = [ids(batches) for batches in rows]
        assert len(rows[0]) == len(rows[1]) == 80
        assert sorted(rows[0] + rows[1]) == list(range(160))
        assert len(ids(alone)) == 192
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
        assert len(ids(other)) == 96, "it does not turn to the rows of others"
    assert cache.stats().leased_bytes == 0


def test_a_job_may_have_a_name_before_torch_distributed_has_a_rank(cache, tmp_path):
    """Lightning initializes it in `fit`, after the loader was made."""
    with Loader(cache, 8, run_id="job") as loader:
        with pytest.raises(ValueError, match="run_id='job' is given without a rank"):
            iter(loader)
        torch.distributed.init_process_group("gloo", f"file://{tmp_path}/all", rank=0, world_size=1)
        try:
            assert len(ids(loader)) == 160
        finally:
            torch.distributed.destroy_process_group()
    assert cache.stats().leased_bytes == 0


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda batch: None, "returned NoneType, not a dict"),
        (lambda batch: {"odd": np.array([object()])}, "column 'odd' cannot become a tensor"),
    ],
)
def test_a_transform_whose_batch_is_no_tensors_says_so_and_its_rows_are_not_delivered(
    cache, transform, message
):
    with Loader(cache, 8, transform=transform) as loader:
        before = loader.state_dict()["position"]
        with pytest.raises(TypeError, match=message):
            next(iter(loader))
        assert loader.state_dict()["position"] == before == 0
        assert loader.stats().batches == 0


def test_a_transform_may_reverse_or_give_what_cannot_be_written(cache):
    def transform(batch):
        fixed = batch["id"].copy()
        fixed.setflags(write=False)
        return {"id": batch["id"][::-1], "fixed": fixed, "image": batch["image"][:, ::-1]}

    with Loader(cache, 8, transform=transform) as loader, Loader(cache, 8) as plain:
        for batch, expected in zip(loader, plain, strict=True):
            assert torch.equal(batch["id"], expected["id"].flip(0))
            assert torch.equal(batch["fixed"], expected["id"])
            assert torch.equal(batch["image"], expected["image"].flip(1))


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_mask_is_not_lost_and_foreign_byte_order_is_read(cache, device):
    def masked(batch):
        return {"id": np.ma.MaskedArray(batch["id"], batch["id"] % 2 == 0)}

    with (
        Loader(cache, 16, transform=masked, device=device) as loader,
        pytest.raises(TypeError, match=r"column 'id'.* no mask: pass its filled\(value\)"),
    ):
        next(iter(loader))
    with pytest.raises(TypeError, match="no mask"):
        next(iter(dataloader(cache, 16, 0, transform=masked)))

    def foreign(batch):
        return {"id": batch["id"], "foreign": batch["id"].astype(">i8")}

    with Loader(cache, 16, transform=foreign, device=device) as loader:
        for batch in loader:
            assert torch.equal(batch["foreign"], batch["id"])


@pytest.mark.slow
def test_the_first_batch_imports_no_module(cache):
    """A consumer would wait for it: numpy.ma takes 10 ms."""
    code = """
        import sys
        from arrowcache.torch import Loader

        with Loader(sys.argv[1], 4) as loader:
            before = set(sys.modules)
            next(iter(loader))
            print(sorted(set(sys.modules) - before))
    """
    with Script(code, cache.path, new_interpreter=True) as script:
        assert script.line() == "[]"
        assert script.end() == (0, "")


# mistakes


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Loader, ac.Loader])
@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size": None}, {"batch_size": 4}, {"shuffle": True}, {"num_workers": 2}, {"sampler": [1, 2]},
     {"batch_sampler": [[1, 2]]}, {"num_workers": 1, "multiprocessing_context": "fork"}],
)  # fmt: skip
def test_a_loader_in_a_dataloader_is_an_error_that_says_what_to_write(cache, kind, options):
    with kind(cache, 16) as loader:
        with pytest.raises(TypeError, match=r"iterate it.*arrowcache\.torch\.dataloader\(cache, batch_size"):
            next(iter(DataLoader(loader, **options)))
        assert sorted(ids_of(loader)) == list(range(cache.stats().rows))  # it goes on by itself


@pytest.mark.filterwarnings("ignore:Got pickle error when attempting")  # torch's own
def test_a_loader_in_a_dataloader_of_spawned_workers_says_so_too(cache):
    with Loader(cache, 16) as loader, pytest.raises(TypeError, match=r"arrowcache\.torch\.dataloader\(cache"):
        iter(DataLoader(loader, num_workers=1, multiprocessing_context="spawn"))


def test_a_loader_has_neither_length_nor_items_and_is_true(cache):
    with Loader(cache, 16) as loader:
        for wrong in (lambda: len(loader), lambda: loader[0], lambda: len(DataLoader(loader))):
            with pytest.raises(TypeError, match=r"loader\.steps"):
                wrong()
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(loader)
        assert loader
        assert len(list(loader)) == loader.steps == cache.stats().rows // 16
        assert sorted(ids_of(DevicePrefetcher(loader, "cpu"))) == list(range(cache.stats().rows))


@pytest.mark.slow
def test_torch_imports_its_nested_tensors_as_a_loader_of_them_is_made(tmp_path):
    """It takes most of a second, which was the wait for the first batch."""
    schema = ac.Schema({"id": ac.Tensor("int64"), "tokens": ac.Ragged("int32")})
    with make_cache(tmp_path / "cache", schema) as cache, cache.writer() as writer:
        writer.append(id=0, tokens=[1, 2, 3])
    code = """
        import sys
        import torch
        from arrowcache.torch import Loader

        for columns in ["id"], ["tokens"]:
            Loader(sys.argv[1], 1, columns=columns).close()
            before = len(sys.modules)
            if columns == ["tokens"]:
                torch.nested.nested_tensor_from_jagged(torch.zeros(3), torch.tensor([0, 3]))
            print(len(sys.modules) - before, "torch.nested._internal.ops" in sys.modules)
    """
    with Script(code, cache.path, new_interpreter=True) as script:
        assert [script.line(), script.line()] == ["0 False", "0 True"]
        assert script.end()[0] == 0


class Columns(dict):
    """A mapping of a transform's own."""


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, Columns])
def test_what_a_transform_returns_has_the_same_types_at_each_face(tmp_path, kind):
    schema = {
        "id": ac.Tensor("int64"), "half": ac.Tensor("bfloat16"), "tokens": ac.Ragged("int32"),
        "at": ac.Timestamp(), "text": ac.String(),
    }  # fmt: skip
    with ac.Cache.create(tmp_path / "cache", ac.Schema(schema), "8MiB", "1MiB") as cache:
        with cache.writer() as writer:
            for n in range(8):
                at = np.datetime64("2026-01-01", "us") + n
                writer.append(id=n, half=1.5, tokens=np.arange(n, dtype=np.int32), at=at, text=f"row {n}")

        def transform(batch):
            return kind(batch, nested={"ids": [batch["id"]], "text": batch["text"]})

        options = {"transform": transform, "shuffle": None}
        readers = [Loader(cache, 4, **options), Loader(cache, 4, device="cpu", **options)]
        readers += [dataloader(cache, 4, workers, **options) for workers in (0, 1)]
        for reader in readers:
            batch = next(iter(reader))
            assert (type(batch), [*batch]) == (dict, [*schema, "nested"])
            assert batch["half"].dtype == torch.bfloat16
            assert batch["half"].tolist() == [1.5] * 4
            assert [len(row) for row in batch["tokens"].unbind()] == list(range(4))
            assert batch["at"].dtype == torch.int64
            assert batch["text"] == batch["nested"]["text"] == [f"row {n}" for n in range(4)]
            assert torch.equal(batch["nested"]["ids"][0], batch["id"])
        for reader in readers[:2]:
            reader.close()


@pytest.mark.parametrize(
    "odd", [[None] * 4, ["text"] * 4, np.zeros(4, "M8[ns]")], ids=["objects", "text", "time"]
)
def test_a_column_that_cannot_become_a_tensor_is_named_at_each_face(cache, odd):
    options = {"transform": lambda batch: {"odd": np.array(odd)}, "shuffle": None}
    readers = [Loader(cache, 4, **options), Loader(cache, 4, device="cpu", **options)]
    readers += [dataloader(cache, 4, 0, **options), dataloader(cache, 4, 1, **options)]
    for reader in readers:
        with pytest.raises(TypeError, match="column 'odd' cannot become a tensor"):
            next(iter(reader))
    for reader in readers[:2]:
        reader.close()
