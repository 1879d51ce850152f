"""`cached` under what people train with: Hugging Face, folders of images, Lightning, StatefulDataLoader."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import arrowcache as ac
from arrowcache.torch import cached

pytestmark = pytest.mark.slow

ROWS = 60


class Images(Dataset):
    """A folder of images, a class a subfolder, as torchvision's ImageFolder reads it."""

    def __init__(self, root, transform=None):
        from PIL import Image

        self.open, self.transform = Image.open, transform
        self.classes = sorted(path.name for path in root.iterdir())
        self.samples = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((root / name).iterdir())
        ]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        with self.open(path) as image:
            image = image.convert("RGB")
        return (image if self.transform is None else self.transform(image)), label


@pytest.fixture
def folder(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(10):
            pixels = rng.integers(0, 255, (16, 12, 3), np.uint8)
            image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    return tmp_path / "images"


def to_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


@pytest.mark.parametrize("where", ["within", "after"])
def test_a_folder_of_images(folder, tmp_path, where):
    plain = Images(folder, to_tensor)
    inside = Images(folder, to_tensor if where == "within" else None)
    transform = None if where == "within" else lambda item: (to_tensor(item[0]), item[1])
    with cached(inside, tmp_path / "cache", capacity="64MiB", transform=transform) as train:
        for _ in range(2):
            loaders = DataLoader(train, 7, num_workers=2), DataLoader(plain, 7)
            for (images, labels), (wanted, right) in zip(*loaders, strict=True):
                assert torch.equal(images, wanted)
                assert torch.equal(labels, right)
        assert train.cached == 20
        assert train.dataset.classes == ["cat", "dog"]


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_a_dataset_of_hugging_face(tmp_path, form):
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    columns = {
        "x": np.random.default_rng(0).random((ROWS, 4), np.float32).tolist(),
        "label": list(range(ROWS)),
        "text": [f"n{number}" for number in range(ROWS)],
        "tokens": [list(range(number % 5)) for number in range(ROWS)],
    }
    inside = datasets.Dataset.from_dict(columns).with_format(form)
    schema = {"tokens": ac.Ragged("int64"), "x": ac.Tensor("float32" if form else "float64", (4,))}
    with cached(inside, tmp_path / "cache", capacity="64MiB", schema=schema) as train:
        for _ in range(2):
            for index in range(ROWS):
                item, wanted = train[index], inside[index]
                assert list(item) == list(wanted)
                assert item["text"] == wanted["text"] == f"n{index}"
                for name in ("x", "label", "tokens"):
                    assert type(item[name]) is type(wanted[name]), name
                    assert np.array_equal(np.asarray(item[name]), np.asarray(wanted[name])), name
        stats = train.stats()
        assert stats.made == ROWS - 1, "but the first, which showed the columns"


class Numbers(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"x": torch.full((256,), float(index)), "id": index}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_dataloader_goes_on_where_it_was(tmp_path):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    with cached(Numbers(), tmp_path / "cache", capacity="64MiB") as train:

        def loader():
            return torchdata.StatefulDataLoader(train, 10, shuffle=True, num_workers=2)

        first = loader()
        epoch, seen = iter(first), []
        for _ in range(2):
            seen += next(epoch)["id"].tolist()
        state = first.state_dict()
        del epoch, first
        again = loader()
        again.load_state_dict(state)
        for batch in again:
            assert torch.equal(batch["x"][:, 0], batch["id"].float())
            seen += batch["id"].tolist()
        assert Counter(seen) == Counter(range(ROWS))


@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated")
@pytest.mark.filterwarnings("ignore:GPU available but not used")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_datamodule_of_lightning(tmp_path):
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Data(lightning.LightningDataModule):
        def setup(self, stage):
            self.train = cached(Numbers(), tmp_path / "cache", capacity="64MiB")

        def train_dataloader(self):
            return DataLoader(self.train, 10, shuffle=True)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.seen = torch.nn.Linear(256, 1), []

        def training_step(self, batch, _):
            self.seen.append(batch["id"].tolist())
            return self.model(batch["x"]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-9)

    module, data = Module(), Data()
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1,
        plugins=[LightningEnvironment()],  # else it asks mpi4py, which needs an MPI
    )  # fmt: skip
    trainer.fit(module, data)
    assert Counter(number for batch in module.seen for number in batch) == Counter([*range(ROWS)] * 3)
    assert data.train.stats().made == ROWS - 1
    assert data.train.cached == ROWS
    data.train.close()


def test_transformers_own_come_back(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import tokenizers
    from transformers.modeling_outputs import BaseModelOutput

    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    texts = [fast(text, return_tensors="pt") for text in ("a b", "b b", "b a")]
    with cached(texts, tmp_path / "texts", capacity="16MiB") as train:
        train.fill(0, progress=False)
        for item, again in zip(texts, [train[index] for index in range(3)], strict=True):
            assert type(again) is transformers.BatchEncoding
            assert torch.equal(again["input_ids"], item["input_ids"])
            assert (again.tokens(), again.word_ids(), again.n_sequences) == (
                item.tokens(), item.word_ids(), item.n_sequences
            )  # fmt: skip
    outputs = [BaseModelOutput(torch.ones(2) * n, (torch.ones(1) * n,)) for n in range(2)]
    with cached(outputs, tmp_path / "outputs", capacity="16MiB") as train:
        train.fill(0, progress=False)
        for item, again in zip(outputs, [train[index] for index in range(2)], strict=True):
            assert type(again) is BaseModelOutput
            assert list(again) == list(item) == ["last_hidden_state", "hidden_states"]
            assert torch.equal(again.last_hidden_state, item.last_hidden_state)
            assert torch.equal(again["hidden_states"][0], item.hidden_states[0])
            assert again.last_hidden_state is again["last_hidden_state"]
            assert again.attentions is None
