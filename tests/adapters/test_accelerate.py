"""Hugging Face Accelerate: real training with our loaders, in one process and in two over gloo."""

from __future__ import annotations

import os

import pytest
from helpers import ids_of, make_cache, publish
from processes import Child

pytest.importorskip("accelerate", reason="Accelerate is not installed")

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, InitProcessGroupKwargs
from torch.utils.data import DataLoader

import arrowcache as ac
from arrowcache.torch import CacheDataset, DevicePrefetcher, EpochBatchSampler, Loader, dataloader

SECONDS = 90.0
ROWS = 64


@pytest.fixture(autouse=True)
def fresh_state():
    """Accelerate's state is one a process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture
def cache(tmp_path):
    """Four segments of 16 rows, ids 0 to 63."""
    cache = make_cache(tmp_path / "cache")
    publish(cache, 4)
    return cache


def train(accelerator, batches, model, optimizer):
    """One epoch; the ids it saw."""
    seen = []
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(model(batch["image"].flatten(1)).square().mean())
        optimizer.step()
        seen += batch["id"].tolist()
    return seen


def prepared(accelerator, *more):
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 1)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9), *more)


def test_a_loader_trains_with_a_prepared_model_while_the_cache_grows(cache):
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with Loader(cache, 4, device=accelerator.device) as loader:
        for epoch in range(3):
            ids = train(accelerator, loader, model, optimizer)
            assert sorted(ids) == list(range(ROWS + 16 * epoch))
            publish(cache, 1)
    assert not all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert cache.stats().leased_bytes == 0


def test_prepare_leaves_a_loader_as_it_is(cache):
    with Loader(cache, 4) as loader:
        *_, same = prepared(Accelerator(cpu=True), loader)
        assert same is loader


@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_one_process_a_dataloader_may_be_prepared(cache, num_workers):
    accelerator = Accelerator(cpu=True)
    model, optimizer, batches = prepared(accelerator, dataloader(cache, 4, num_workers=num_workers))
    assert sorted(train(accelerator, batches, model, optimizer)) == list(range(ROWS))
    publish(cache, 1)
    assert sorted(train(accelerator, batches, model, optimizer)) == list(range(ROWS + 16))
    del batches
    accelerator.free_memory()
    assert cache.stats().leased_bytes == 0


def test_save_state_keeps_a_registered_loader_to_the_batch(cache, tmp_path):
    accelerator = Accelerator(cpu=True)
    with Loader(cache, 4) as loader:
        accelerator.register_for_checkpointing(loader)
        batches = iter(loader)
        seen = ids_of(next(batches) for _ in range(5))
        accelerator.save_state(tmp_path / "state")
    accelerator = Accelerator(cpu=True)
    with Loader(cache, 4) as loader:
        accelerator.register_for_checkpointing(loader)
        accelerator.load_state(tmp_path / "state")
        assert sorted(seen + ids_of(loader)) == list(range(ROWS))
        assert sorted(ids_of(loader)) == list(range(ROWS))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("saved", [5, 16, 21, 32])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_save_state_keeps_the_place_of_a_dataloader(cache, tmp_path, workers, saved, is_prepared):
    """Registered, or prepared with torchdata's, whose epochs behind the resumed one are numbered from 1."""
    if is_prepared:
        pytest.importorskip("torchdata", reason="torchdata is not installed")
    with Loader(cache, 4, seed=3) as own:
        orders = [ids_of(own) for _ in range(4)]

    def make():
        how = DataLoaderConfiguration(use_stateful_dataloader=is_prepared)
        accelerator = Accelerator(cpu=True, dataloader_config=how)
        batches = dataloader(cache, 4, workers, seed=3)
        if is_prepared:
            return accelerator, accelerator.prepare(batches)
        accelerator.register_for_checkpointing(batches)
        return accelerator, batches

    accelerator, batches = make()
    steps = 0
    for _ in range(saved // 17 + 1):
        for _ in batches:
            steps += 1
            if steps == saved:
                accelerator.save_state(tmp_path / "state")
                break
    fresh = (AcceleratorState, GradientState, PartialState)
    for state in fresh:
        state._reset_state()
    accelerator, batches = make()
    accelerator.load_state(tmp_path / "state")
    epoch, done = divmod(saved, 16)
    assert ids_of(batches) == orders[epoch][4 * done :]
    assert ids_of(batches) == orders[1 if is_prepared else epoch + 1]


def test_the_state_of_a_dataloader_whose_batches_a_prepared_one_takes_is_refused(cache, tmp_path):
    accelerator = Accelerator(cpu=True)
    batches = dataloader(cache, 4, 0)
    accelerator.register_for_checkpointing(batches)
    next(iter(accelerator.prepare(batches)))
    with pytest.raises(ValueError, match="use_stateful_dataloader=True"):
        accelerator.save_state(tmp_path / "state")


@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"even_batches": False}])
def test_a_shard_of_our_sampler_is_refused_before_it_drops_batches(cache, options):
    shard = BatchSamplerShard(EpochBatchSampler(cache, 4), 2, 0, **options)
    with pytest.raises(ValueError, match=r"leave the DataLoader out of prepare\(\)"):
        next(iter(shard))


def as_rank(folder, rank):
    """Of one of two ranks: the ids of each epoch by each way to read, and what prepare() does."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        os.environ[name] = str(value)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}  # the run's name
    torch.set_num_threads(1)
    cache = ac.Cache.open(folder / "cache")
    early = Loader(cache, 4)  # made before torch.distributed is initialized
    meeting = f"file://{folder}/rendezvous"  # a free port may be another's by then
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs("gloo", meeting)])
    assert accelerator.num_processes == 2
    model, optimizer = prepared(accelerator)
    late = Loader(cache, 4, device=accelerator.device)
    stock = dataloader(cache, 4, num_workers=0)
    with early, late:
        seen = []
        for batches in (early, late, stock, DevicePrefetcher(stock, accelerator.device)):
            seen.append([])
            for _ in range(2):
                seen[-1].append(train(accelerator, batches, model, optimizer))
                accelerator.wait_for_everyone()  # nobody reads: the cache grows
                if accelerator.is_main_process:
                    publish(cache, 1)
                accelerator.wait_for_everyone()
        refused = []
        own = DataLoader(CacheDataset(cache), batch_sampler=EpochBatchSampler(cache, 4))
        for batches in (stock, own):
            try:
                ids_of(accelerator.prepare(batches))
            except ValueError as error:
                refused.append(str(error))
        accelerator.wait_for_everyone()
    cache.close()
    torch.distributed.destroy_process_group()
    return seen, refused


@pytest.mark.slow
def test_two_processes_read_disjoint_rows_and_a_dataloader_prepared_there_is_refused(cache, tmp_path):
    children = [Child(as_rank, tmp_path, rank) for rank in range(2)]
    try:
        (one, refused), (other, refused_there) = [child.result(SECONDS) for child in children]
    finally:
        for child in children:
            child.kill()
    rows = ROWS
    for ways in zip(one, other, strict=True):
        for mine, theirs in zip(*ways, strict=True):
            assert len(mine) == len(theirs) == rows // 2
            assert sorted(mine + theirs) == list(range(rows))
            rows += 16
    assert len(refused) == len(refused_there) == 2
    assert all("leave the DataLoader out of prepare()" in text for text in refused + refused_there)
    assert cache.stats().leased_bytes == 0
    assert cache.verify() == []
