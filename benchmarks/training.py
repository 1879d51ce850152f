"""Does a GPU train as fast from a cache as on a batch that it has already?

Question: images a second of training steps whose batches come from `arrowcache.torch.Loader(device="cuda")`,
over steps on a batch that lies on the device; and of torch's DataLoader over a memory-mapped file of the same
images: in this process, and by WORKERS processes with pinned memory.
Method: images of 3 x 224 x 224 uint8 in memory, shuffled, batches of 256; a small residual network in
bfloat16, forward, backward and SGD, of two widths, so that a step takes some multiples of a batch's copy.
torch's Dataset gathers a whole batch at once, which is its fast way. The device is synchronized at a turn's
ends; STEPS a turn, of epochs that follow without a seam where a loader can; cases take turns; medians.
Processor seconds are those of all threads of this process; those of workers are not counted.
Run: `python -m benchmarks training` where there is a CUDA device. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import arrowcache as ac
from arrowcache.torch import Loader
from benchmarks.harness import Cases, Figures, Options, Round, Way, scratch, written

IMAGES, SHAPE, CLASSES = 4096, (3, 224, 224), 1000
BATCH_ROWS, STEPS, REPEATS, WORKERS = 256, 40, 3, 8
WIDTHS = (16, 160)

Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """Two convolutions with a residual, and half the resolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.within = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.down = nn.Conv2d(width, width, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(x + self.within(x)))  # type: ignore[no-any-return]


def step_of(width: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A training step of uint8 images and labels."""
    layers = [nn.Conv2d(3, width, 4, stride=4), *(Block(width) for _ in range(3))]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))
    model = model.to("cuda", memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            x = images.to(memory_format=torch.channels_last).to(torch.bfloat16) / 255
            loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class Mapped(torch.utils.data.Dataset[Batch]):
    """Batches, by lists of indices, of a file that each process maps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, indices: list[int]) -> Batch:
        images = np.load(self._folder / "images.npy", mmap_mode="r")[indices]
        return torch.from_numpy(images), torch.from_numpy(np.load(self._folder / "labels.npy")[indices])


def filled(folder: Path) -> ac.Cache:
    """A cache of the images that lie in images.npy and labels.npy, too."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (IMAGES, *SHAPE), np.uint8)
    labels = rng.integers(0, CLASSES, IMAGES)
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)
    schema = ac.Schema({"image": ac.Tensor("uint8", SHAPE), "label": ac.Tensor("int64")})
    chunks = (slice(start, start + BATCH_ROWS) for start in range(0, IMAGES, BATCH_ROWS))
    parts = ({"image": images[rows], "label": labels[rows]} for rows in chunks)
    return written(folder / "cache", schema, parts, "4GiB")


def of_torch(folder: Path, workers: int) -> Iterator[Batch]:
    """Epoch after epoch of torch's DataLoader, on the device."""
    dataset: Any = Mapped(folder)
    sampler = torch.utils.data.BatchSampler(
        torch.utils.data.RandomSampler(range(IMAGES)), BATCH_ROWS, drop_last=True
    )
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, sampler=sampler, num_workers=workers, pin_memory=True,
        persistent_workers=workers > 0,
    )  # fmt: skip
    while True:
        for images, labels in loader:
            yield images.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True)


def measure(folder: Path, loader: Loader, width: int) -> Cases:
    step = step_of(width)
    resident = next((batch["image"].clone(), batch["label"].clone()) for batch in loader)
    sources: dict[str, Iterator[Batch]] = {
        "on the device already": itertools.repeat(resident),
        "arrowcache": ((batch["image"], batch["label"]) for batch in loader.repeat()),
        "DataLoader": of_torch(folder, 0),
        f"DataLoader, {WORKERS} workers": of_torch(folder, WORKERS),
    }

    def run(name: str) -> None:
        for images, labels in itertools.islice(sources[name], STEPS):
            step(images, labels)
        torch.cuda.synchronize()

    ways: dict[str, Way] = {name: partial(run, name) for name in sources}
    title, over = f"width {width}: steps of {BATCH_ROWS} images", ["on the device already"]
    told = yield Round(title, ways, over, BATCH_ROWS * STEPS, "images", turns=REPEATS)
    asked = np.median(told["ways"][over[0]]["rates"]) * resident[0].nbytes / BATCH_ROWS / 1e9
    yield Figures(f"width {width}: such a step asks for", {"GB/s": asked})


def training(options: Options) -> Cases:
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here: nothing was measured.")
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}")
    with (
        scratch(options.folder) as folder,
        filled(folder) as cache,
        Loader(cache, BATCH_ROWS, device="cuda") as loader,
    ):
        for width in WIDTHS:
            yield from measure(folder, loader, width)
