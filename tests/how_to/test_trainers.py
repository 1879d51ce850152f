"""The pages of trainers: checkpoints in them go on to the batch, with the real trainers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from .test_pages import blocks, run

pytestmark = pytest.mark.slow


def script(folder: Path, page: str, before: str, then: str) -> str:
    """Run the blocks of a page between others; the words that `tell` printed."""
    before, then = (textwrap.dedent(code).replace('"/data/', f'"{folder}/') for code in (before, then))
    printed = run(folder, page, then, f"import arrowcache as ac\n{before}\n")
    return " ".join(line.removeprefix("told ") for line in printed.splitlines() if line.startswith("told "))


DOCUMENTS = """
    import numpy as np

    schema = {"tokens": ac.Ragged("int32")}
    cache = ac.Cache.create("/data/documents", schema, capacity="64MB", segment_rows=64)
    with cache.writer() as writer:
        for number in range(320):
            writer.append(tokens=np.full(5 + number % 60, number % 250, np.int32))

    def tell(*words):
        print("told", *words)
"""
IMAGES = """
    import numpy as np

    schema = {"image": ac.Tensor("float32", (3, 8, 8)), "label": ac.Tensor("int64")}
    cache = ac.Cache.create("/data/images", schema, capacity="64MB", segment_rows=64)
    writer = cache.writer()

    def images(first, stop):
        for number in range(first, stop):
            writer.append(image=np.full((3, 8, 8), number / 1000, np.float32), label=number % 10)
        writer.flush()

    images(0, 640)

    def tell(*words):
        print("told", *words)
"""
# What a run had, until it was killed after `dies` batches, and what its model became.
KILLED = """
    import copy, logging, warnings

    logging.disable(logging.WARNING)

    class Killed(BaseException):
        pass

    def spy(inputs, seen, dies, at=lambda count: None):
        def wrapped(batch):
            if len(seen) == dies:
                raise Killed
            at(len(seen))
            seen.append(batch)
            return inputs(batch)

        return wrapped

    def same(one, other):
        return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
"""


def test_huggingfaces_trainer_goes_on_to_the_token(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    then = """
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = dict(vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
        config = LlamaConfig(**shape, num_attention_heads=2, attn_implementation="sdpa")
        plain = of_documents

        def run(folder, dies=None):
            global of_documents
            torch.manual_seed(0)
            model, seen = LlamaForCausalLM(config), []
            of_documents = spy(plain, seen, dies)
            options = {"gradient_accumulation_steps": 2, "save_steps": 5, "max_steps": 30}
            try:
                train_on_documents(model, folder, length=64, batch_size=4, **options)
            except Killed:
                pass
            return model, [batch["tokens"].tolist() for batch in seen]

        with torch.no_grad():  # documents do not see each other
            model = LlamaForCausalLM(config).eval()
            one, other = torch.arange(1, 6), torch.arange(9, 16)
            places = torch.cat([torch.arange(5), torch.arange(7)])[None].repeat(2, 1)
            tokens = torch.cat([one, other])[None].repeat(2, 1)
            both = model(tokens, position_ids=places, use_cache=False).logits
            tell(torch.allclose(both[1, 5:], model(other[None]).logits[0], atol=1e-5))

        whole, batches = run("/data/whole")
        killed, head = run("/data/cut", dies=53)  # in the second epoch; the checkpoint is of the 50th batch
        resumed, rest = run("/data/cut")
        tell(head == batches[:53], rest == batches[50:], len(rest), same(whole, resumed), same(whole, killed))

        killed, head = run("/data/evicted", dies=53)
        documents = cache.stats().rows
        cache.evict(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _, rest = run("/data/evicted")
        tell(len(rest), [str(each.message) for each in caught if "left the cache" in str(each.message)] != [])
    """
    printed = script(tmp_path, "huggingface-trainer.md", DOCUMENTS + KILLED, then)
    assert printed == "True True True 10 True False 10 True"


def test_huggingfaces_trainer_has_the_rows_of_a_cache_that_grows(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    then = """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(3 * 8 * 8, 10)

            def forward(self, pixel_values, labels):
                logits = self.layer(pixel_values.flatten(1))
                return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

        plain = of_images

        def run(dies, at):
            global of_images
            seen = []
            of_images = spy(plain, seen, dies, at)
            try:
                train_on_images(Net(), "/data/run", save_steps=5, max_steps=50)
            except Killed:
                pass
            return [(batch["image"][:, 0, 0, 0] * 1000).round().long().tolist() for batch in seen]

        head = run(17, lambda batch: images(640, 1280) if batch == 0 else None)
        images(1280, 1920)
        rest = run(None, lambda batch: None)
        first, second, third = head[:10], head[10:15] + rest[:15], rest[15:]
        tell(head[15:] == rest[:2], len(rest))
        for rows, count in ((first, 640), (second, 1280)):
            tell(sorted(sum(rows, [])) == [*range(count)])
        rows = {*sum(third, [])}
        tell(len(rows) == 20 * 64, max(rows) >= 1280)
    """
    printed = script(tmp_path, "huggingface-trainer.md", IMAGES + KILLED, then)
    assert printed == "True 35 True True True True"


RANK = """
    import json, os

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3 * 8 * 8, 10)

        def forward(self, pixel_values, labels):
            logits = self.layer(pixel_values.flatten(1))
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    plain, seen, dies = of_images, [], int(sys.argv[1])

    def of_images(batch):
        if len(seen) == dies:
            raise SystemExit(0)
        seen.append((batch["image"][:, 0, 0, 0] * 1000).round().long().tolist())
        return plain(batch)

    try:
        train_on_images(Net(), "/data/run", save_steps=2, max_steps=10, use_cpu=True)
    finally:
        Path(f"/data/seen-{dies}-{os.environ['RANK']}").write_text(json.dumps(seen))
"""


def test_two_ranks_of_huggingfaces_trainer_go_on_to_the_batch(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    script(tmp_path, "huggingface-trainer.md", IMAGES, "")  # makes the cache
    ranked = "import sys\n" + blocks("huggingface-trainer.md") + textwrap.dedent(RANK)
    (tmp_path / "rank.py").write_text(ranked.replace("/data/", f"{tmp_path}/"))
    seen = {}
    for dies in (3, 99):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        subprocess.run([*launch, tmp_path / "rank.py", str(dies)], env=environment, timeout=240, check=True)
        seen[dies] = [json.loads((tmp_path / f"seen-{dies}-{rank}").read_text()) for rank in range(2)]
    assert [head[2:] for head in seen[3]] == [rest[:1] for rest in seen[99]]
    batches = [batch for head, rest in zip(*seen.values(), strict=True) for batch in head[:2] + rest[:3]]
    assert sorted(row for batch in batches for row in batch) == list(range(640))


# The rows of each batch, and a model of one weight that all of them change.
ROWS = """
    import warnings

    import torch

    warnings.simplefilter("ignore")

    path = "/data/images"

    def rows_of(batch):
        return (batch["image"][:, 0, 0, 0] * 1000).round().long().tolist()

    class Killed(BaseException):
        pass
"""


@pytest.mark.parametrize("dies", [13, 20, 23])
def test_lightning_goes_on_to_the_batch(tmp_path: Path, dies: int) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    then = f"""
        import logging
        from lightning.pytorch.callbacks import ModelCheckpoint
        from lightning.pytorch.plugins.environments import LightningEnvironment

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        class Module(lightning.LightningModule):
            def __init__(self, dies=None):
                super().__init__()
                self.layer, self.dies, self.seen = torch.nn.Linear(1, 1), dies, []

            def training_step(self, batch):
                if len(self.seen) == self.dies:
                    raise Killed
                self.seen.append(rows_of(batch))
                return self.layer(batch["image"][:, 0, 0, :1]).mean()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 1e-3)

        def run(dies=None, checkpoint=None, **save):
            module = Module(dies)
            callbacks = [ModelCheckpoint("/data/saved", "{{step}}", save_top_k=-1, **save)]
            plugins = [LightningEnvironment()]
            quiet = {{"logger": False, "enable_progress_bar": False, "enable_model_summary": False}}
            options = {{"accelerator": "cpu", "max_epochs": 3, "callbacks": callbacks, "plugins": plugins}}
            try:
                fit(module, path, checkpoint, **options, **quiet)
            except Killed:
                pass
            return module.seen

        if __name__ == "__main__":
            whole = run()
            cut = run({dies}, every_n_train_steps=10, save_on_train_epoch_end=False)
            at = {dies} // 10 * 10
            rest = run(None, f"/data/saved/step={{at}}.ckpt")
            tell(cut == whole[:{dies}], rest == whole[at:], len(whole))
            again = run(None, every_n_epochs=1, save_on_train_epoch_end=True)
            rest = run(None, "/data/saved/step=20-v1.ckpt")
            images(640, 1280)
            tell(rest == whole[20:], len(run()))
    """
    printed = script(tmp_path, "lightning-and-accelerate.md", IMAGES + ROWS, then)
    assert printed == "True True 30 True 60"


def test_accelerate_goes_on_to_the_batch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    then = """
        class Model(torch.nn.Module):
            def __init__(self, dies=None):
                super().__init__()
                self.layer, self.dies, self.seen = torch.nn.Linear(1, 1), dies, []

            def forward(self, batch):
                if len(self.seen) == self.dies:
                    raise Killed
                self.seen.append(rows_of(batch))
                return self.layer(batch["image"][:, 0, 0, :1]).mean()

        def run(folder, dies=None, resume=False, epochs=3):
            model = Model(dies)
            try:
                train(model, path, epochs, folder, resume, save_steps=4)
            except Killed:
                pass
            return model.seen

        if __name__ == "__main__":
            whole = run("/data/whole")
            cut = run("/data/cut", 17)  # within the second epoch
            rest = run("/data/cut", None, resume=True)
            tell(cut == whole[:17], rest == whole[14:], len(whole))
            tell(len(run("/data/whole", resume=True)))
            tell(run("/data/whole", resume=True, epochs=4)[0] not in (whole[0], whole[10], whole[20]))
    """
    printed = script(tmp_path, "lightning-and-accelerate.md", IMAGES + ROWS, then)
    assert printed == "True True 30 0 True"


# What torchtitan 0.3 has; its package wants `datasets` below 4.8, which no other test does.
TORCHTITAN = """
    import sys
    from abc import ABC, abstractmethod
    from dataclasses import dataclass, replace
    from types import ModuleType

    from torch.distributed.checkpoint.stateful import Stateful

    try:
        import torchtitan.components.dataloader
    except ImportError:
        class BaseDataLoader(Stateful, ABC):
            @dataclass(kw_only=True, slots=True)
            class Config:
                dataset: str = ""
                dataset_path: str | None = None

                def build(self, **options):
                    return self._owner(config=replace(self), **options)

            def __init_subclass__(cls):
                cls.Config._owner = cls

            @abstractmethod
            def __iter__(self): ...

        for name in ("torchtitan", "torchtitan.components", "torchtitan.components.dataloader"):
            sys.modules[name] = ModuleType(name)
        sys.modules[name].BaseDataLoader = BaseDataLoader
"""


def test_torchtitans_interface_goes_on_to_the_token(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    then = """
        import itertools, warnings
        import torch.distributed.checkpoint as dcp

        warnings.simplefilter("ignore")

        def build(**options):
            return config.build(
                tokenizer=None, seq_len=64, local_batch_size=4, snapshot_every_n_steps=5,
                **{"dp_rank": 0, "dp_world_size": 1} | options,
            )

        def plain(batches, count):
            return [(each["input"].tolist(), each["positions"].tolist(), labels.tolist())
                    for each, labels in itertools.islice(batches, count)]

        whole = plain(iter(build()), 60)  # more than an epoch
        loader = build()
        batches = iter(loader)
        head = plain(batches, 50)
        dcp.save({"dataloader": loader}, checkpoint_id="/data/saved", no_dist=True)
        plain(batches, 3)
        again = build()
        dcp.load({"dataloader": again}, checkpoint_id="/data/saved", no_dist=True)
        rest = plain(iter(again), 10)
        tell(head == whole[:50], rest == whole[50:])
        for inputs, positions, labels in whole[:3]:
            for row in range(4):
                for place in range(63):
                    if labels[row][place] != -100:
                        assert labels[row][place] == inputs[row][place + 1]
                    assert (positions[row][place + 1] == 0) == (labels[row][place] == -100)
        import os
        os.environ["TORCHELASTIC_RUN_ID"] = "job"
        ranks = [build(dp_rank=rank, dp_world_size=2) for rank in range(2)]
        for rank in ranks:
            dcp.load({"dataloader": rank}, checkpoint_id="/data/saved", no_dist=True)
        ranks = [iter(rank) for rank in ranks]
        one, other = (plain(batches, 5) for batches in ranks)
        rows = [sorted(row for batch in batches for row in batch[0]) for batches in (one + other, rest)]
        tell(rows[0] == rows[1], one != other)
    """
    printed = script(tmp_path, "torchtitan.md", TORCHTITAN + DOCUMENTS, then)
    assert printed == "True True True True"
