"""Lightning: plain `Trainer.fit` with our loaders, in one process and in two by strategy="ddp"."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
from begun import own_threads
from helpers import ids_of, make_cache, publish, wait_until

pytest.importorskip("lightning", reason="Lightning is not installed")

import lightning
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from arrowcache.torch import CacheDataset, EpochBatchSampler, Loader, dataloader

# The warnings are Lightning's, not ours: it calls what torch has deprecated, and has advice on workers.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]

ROWS = 64
STEPS = ROWS // 4
SECONDS = 120.0


@pytest.fixture
def cache(tmp_path):
    """Four segments of 16 rows, ids 0 to 63."""
    cache = make_cache(tmp_path / "cache")
    publish(cache, 4)
    return cache


class Module(lightning.LightningModule):
    """Remembers the ids of each training epoch."""

    def __init__(self, at_step=None):
        super().__init__()
        self.model = torch.nn.Linear(256, 1)
        self.at_step = at_step
        self.seen, self.threads = [], []

    def on_train_epoch_start(self):
        self.seen.append([])

    def training_step(self, batch, index):
        if self.at_step is not None:
            self.at_step(self.trainer)
        self.seen[-1] += batch["id"].tolist()
        self.threads += own_threads("arrowcache")
        return self.model(batch["image"].flatten(1)).square().mean()

    def predict_step(self, batch):
        return batch["id"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-9)


class Validated(Module):
    """Remembers the ids of each run of validation, too."""

    def on_fit_start(self):
        self.validated = []

    def on_validation_epoch_start(self):
        self.validated.append([])

    def validation_step(self, batch, index):
        self.validated[-1] += batch["id"].tolist()


class Grow(lightning.Callback):
    """One more segment after each epoch."""

    def __init__(self, cache):
        self.cache = cache

    def on_train_epoch_end(self, trainer, module):
        publish(self.cache, 1)


class SaveAndStop(lightning.Callback):
    """A checkpoint after so many steps, and the end of training."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@pytest.fixture
def make_trainer(tmp_path):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def make(**options):
        return lightning.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=tmp_path,
            plugins=[LightningEnvironment()],  # else it asks mpi4py, which needs an MPI
            **options,
        )

    return make


AGAIN = {"reload_dataloaders_every_n_epochs": 1}  # a DataLoader is asked again for its length
WAYS = {
    "a loader": (lambda cache: Loader(cache, 4), {}),
    "a loader, on a device": (lambda cache: Loader(cache, 4, device="cpu"), {}),
    "a DataLoader": (lambda cache: nullcontext(dataloader(cache, 4, num_workers=0)), AGAIN),
    "its workers": (lambda cache: nullcontext(dataloader(cache, 4, num_workers=2)), AGAIN),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_epoch_has_each_row_of_a_larger_snapshot_once(cache, make_trainer, way):
    module, (make, options) = Module(), WAYS[way]
    with make(cache) as batches:
        make_trainer(max_epochs=3, callbacks=[Grow(cache)], **options).fit(module, batches)
        if isinstance(batches, Loader):
            assert batches.stats().epochs == 3, "the iterator that Lightning only tries out is none"
    assert isinstance(batches, DataLoader) or cache.stats().leased_bytes == 0
    assert [sorted(ids) for ids in module.seen] == [list(range(ROWS + 16 * epoch)) for epoch in range(3)]


def test_epochs_are_in_the_order_of_a_plain_loop_also_of_the_next_fit(cache, make_trainer):
    module = Module()
    with Loader(cache, 4) as loader, Loader(cache, 4) as plain:
        for epochs in (2, 1):
            make_trainer(max_epochs=epochs).fit(module, loader)
        assert module.seen == [ids_of(plain) for _ in range(3)]
        assert loader.state_dict()["epoch"] == 3


def test_repeat_trains_for_given_steps(cache, make_trainer):
    module = Module()
    with Loader(cache, 4) as loader:
        trainer = make_trainer(max_steps=40, limit_train_batches=10)  # an "epoch" of ten steps
        trainer.fit(module, loader.repeat())
    assert (trainer.global_step, trainer.current_epoch) == (40, 4)
    rows = [row for ids in module.seen for row in ids]
    assert sorted(rows[:ROWS]) == sorted(rows[ROWS : 2 * ROWS]) == list(range(ROWS))
    assert len(rows) == 40 * 4


def test_validation_is_an_epoch_of_its_own_loader_each_time(cache, make_trainer):
    module = Validated()
    options = {"where": lambda segment: segment.seq % 2 == 1, "shuffle": None}
    held_out = list(range(16, 32)) + list(range(48, 64))
    with (
        Loader(cache, 4, where=lambda segment: segment.seq % 2 == 0) as loader,
        Loader(cache, 4, **options) as validation,
    ):
        make_trainer(max_epochs=2, val_check_interval=4).fit(module, loader, validation)
        assert module.validated == [held_out] * 4
        assert not set(held_out) & {row for ids in module.seen for row in ids}
        predicted = make_trainer().predict(module, validation)
        assert torch.cat(predicted).tolist() == held_out


@pytest.mark.parametrize("option", ["limit_train_batches", "val_check_interval"])
def test_a_share_of_an_epoch_of_unknown_length_is_refused_by_lightning(cache, make_trainer, option):
    with Loader(cache, 4) as loader, pytest.raises(MisconfigurationException, match="or an int"):
        make_trainer(max_epochs=1, **{option: 0.5}).fit(Module(), loader)


def test_without_that_lightning_ends_each_epoch_at_the_length_of_the_first(cache, make_trainer):
    module = Module()
    own = DataLoader(CacheDataset(cache), batch_sampler=EpochBatchSampler(cache, 4))
    make_trainer(max_epochs=2, callbacks=[Grow(cache)]).fit(module, own)
    assert [len(set(ids)) for ids in module.seen] == [ROWS, ROWS], "the README says so"


def test_predict_with_a_dataloader_says_what_to_use(cache, make_trainer):
    with pytest.raises(TypeError, match=r"arrowcache\.torch\.Loader"):
        make_trainer().predict(Module(), dataloader(cache, 4, num_workers=0))


def resumed(cache, make_trainer, path, make, *, epochs=2, **options):
    """Ids of the first epoch before a checkpoint after 5 steps, and of all epochs after it."""
    before, after = Module(), Module()
    with make() as loader:
        make_trainer(max_epochs=epochs, callbacks=[SaveAndStop(5, path)], **options).fit(before, loader)
    assert len(before.seen[0]) == 5 * 4
    publish(cache, 1)  # what an epoch that began before does not see
    after.seen.append([])  # Lightning does not start the epoch once more
    with make() as loader:
        make_trainer(max_epochs=epochs, **options).fit(after, loader, ckpt_path=path)
    return before.seen[0], after.seen


def test_a_checkpoint_within_an_epoch_leaves_out_the_batch_that_lightning_took_ahead(
    cache, make_trainer, tmp_path
):
    before, (rest, following) = resumed(cache, make_trainer, tmp_path / "ckpt", lambda: Loader(cache, 4))
    assert len(set(before + rest)) == len(before + rest) == ROWS - 4
    assert sorted(following) == list(range(ROWS + 16))


def test_with_a_limit_in_steps_such_a_checkpoint_is_exact(cache, make_trainer, tmp_path):
    before, (rest, following) = resumed(
        cache, make_trainer, tmp_path / "ckpt", lambda: Loader(cache, 4), limit_train_batches=STEPS
    )
    assert sorted(before + rest) == list(range(ROWS))
    assert len(set(following)) == ROWS


class Data(lightning.LightningDataModule):
    """Keeps the loader's state in every checkpoint, as docs/how-to/lightning-and-accelerate.md advises."""

    def __init__(self, loader):
        super().__init__()
        self.loader = loader

    def train_dataloader(self):
        return self.loader

    def state_dict(self):
        return {"loader": self.loader.state_dict()}

    def load_state_dict(self, state):
        self.loader.load_state_dict(state["loader"])


@pytest.mark.parametrize(("save_at", "epoch"), [(STEPS, 1), (5, 0)])
def test_a_data_module_keeps_the_epoch_also_at_its_end(cache, make_trainer, tmp_path, save_at, epoch):
    path = tmp_path / "ckpt"
    with Loader(cache, 4, seed=3) as loader:
        orders = [ids_of(loader) for _ in range(2)]
    with Loader(cache, 4, seed=3) as loader:
        trainer = make_trainer(max_epochs=1, callbacks=[SaveAndStop(save_at, path)])
        trainer.fit(Module(), datamodule=Data(loader))
    after = Module()
    after.seen.append([])
    with Loader(cache, 4, seed=3) as loader:
        make_trainer(max_epochs=2).fit(after, datamodule=Data(loader), ckpt_path=path)
        rows = [row for ids in after.seen for row in ids]
        assert rows == (orders[1] if epoch else orders[0][6 * 4 :] + orders[1])


class SaveAtTheEnd(SaveAndStop):
    """Where Lightning itself saves one."""

    def on_train_batch_end(self, *_):
        pass

    def on_train_epoch_end(self, trainer, *_):
        super().on_train_batch_end(trainer)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("save", "options"),
    [
        (partial(SaveAndStop, 5), {}),
        (partial(SaveAndStop, STEPS), {}),
        (partial(SaveAndStop, STEPS + 5), AGAIN),
        (partial(SaveAtTheEnd, STEPS), AGAIN),
        (partial(SaveAtTheEnd, 2 * STEPS), {}),
    ],
    ids=["within an epoch", "at its last step", "within the second", "at an end", "at the second end"],
)
def test_a_data_module_keeps_the_place_of_a_dataloader_to_the_batch(
    cache, make_trainer, tmp_path, workers, save, options
):
    with Loader(cache, 4, seed=3) as loader:
        wanted = [ids_of(loader) for _ in range(3)]
    before, after = Module(), Module()
    for module, callbacks, path in (
        (before, [save(tmp_path / "ckpt")], None),
        (after, [], tmp_path / "ckpt"),
    ):
        data = Data(dataloader(cache, 4, workers, seed=3))
        module.seen.append([])
        trainer = make_trainer(max_epochs=3, callbacks=callbacks, **options)
        trainer.fit(module, datamodule=data, ckpt_path=path)
    rows = [row for ids in before.seen + after.seen for row in ids]
    assert rows == [row for ids in wanted for row in ids]
    assert trainer.global_step == 3 * STEPS


def test_a_checkpoint_of_lightnings_own_within_an_epoch_has_the_place_of_a_dataloader(
    cache, make_trainer, tmp_path
):
    def make():
        return nullcontext(dataloader(cache, 4, num_workers=2))

    before, (rest, following) = resumed(cache, make_trainer, tmp_path / "ckpt", make, **AGAIN)
    assert sorted(before + rest) == list(range(ROWS))
    assert sorted(following) == list(range(ROWS + 16))


def test_an_error_in_a_step_leaves_no_lease_and_no_thread(cache, make_trainer):
    def fail(trainer):
        if trainer.global_step == 3:
            raise KeyError("the step failed")

    module = Module(fail)
    with pytest.raises(KeyError, match="the step failed"), Loader(cache, 4) as loader:
        make_trainer(max_epochs=1).fit(module, loader)
    assert module.threads
    wait_until(lambda: not own_threads("arrowcache"), "the threads to end")
    assert cache.stats().leased_bytes == 0


JOB = '''
import json, logging, sys, threading
from pathlib import Path

import lightning
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment

import arrowcache as ac
from arrowcache.torch import Loader, dataloader
from helpers import publish
from test_lightning import Module

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Grow(lightning.Callback):
    """One more segment after each epoch, when all ranks have come to its end."""

    def on_train_epoch_end(self, trainer, module):
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            publish(cache, 1)
        trainer.strategy.barrier()


def fit(data, module, **options):
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, callbacks=[Grow()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, plugins=[LightningEnvironment()], **options,
    )
    trainer.fit(module, data)
    return trainer.global_rank, module.seen


def fail(trainer):
    if trainer.global_step == 3:
        raise KeyError("the step failed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    cache = ac.Cache.open(folder / "cache")
    found = {}
    with Loader(cache, 4) as loader:  # torch.distributed is initialized in `fit`
        if sys.argv[2] == "fail":
            fit(loader, Module(fail))
        rank, found["loader"] = fit(loader, Module())
    stock = dataloader(cache, 4, num_workers=0)
    try:
        fit(stock, Module())
    except TypeError as error:
        found["refused"] = str(error)
    options = {"use_distributed_sampler": False, "reload_dataloaders_every_n_epochs": 1}
    _, found["dataloader"] = fit(stock, Module(), **options)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
'''


def run_job(folder: Path, how: str) -> tuple[int, str]:
    script = folder / "job.py"
    script.write_text(JOB)
    paths = os.pathsep.join([str(Path(__file__).parent), *(path for path in sys.path if path)])
    process = subprocess.Popen(
        [sys.executable, script, folder, how],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return process.returncode, output


def test_two_ranks_read_disjoint_rows_of_a_growing_cache_and_end(cache, tmp_path):
    code, output = run_job(tmp_path, "train")
    assert code == 0, output
    one, other = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    rows = ROWS
    for way in ("loader", "dataloader"):
        for mine, theirs in zip(one[way], other[way], strict=True):
            assert len(mine) == len(theirs) == rows // 2
            assert sorted(mine + theirs) == list(range(rows))
            rows += 16
    assert "use_distributed_sampler=False" in one["refused"]
    assert "use_distributed_sampler=False" in other["refused"]
    assert cache.stats().leased_bytes == 0
    assert cache.verify() == []


def test_an_error_in_a_step_of_both_ranks_ends_the_job(cache, tmp_path):
    code, output = run_job(tmp_path, "fail")
    assert code != 0
    assert "the step failed" in output
    assert cache.stats().leased_bytes == 0
