"""The main job: train on a cache that grows while it is trained on. `python -m arrowcache.demo`.

    Parquet folder  -->  2 sampler processes  -->  rolling cache  -->  Loader  -->  small conv net
    (the far store)      (distorted digits)        (evicts)            (an epoch is a snapshot)

The data are real: the 1,797 handwritten digits that scikit-learn ships. Four fifths of them are
written as a Parquet dataset that stands for a store too large and too far away to copy; samplers
read single row groups of it, as they would from S3, and distort what they read. The rest is held
out: it never enters the store, and accuracy is measured on distorted copies of it.

The exit code is 0 only if the network learned, the snapshots grew, segments were evicted and
`cache.verify()` found no problem; otherwise it prints what failed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from numpy.typing import NDArray

import arrowcache as ac
from arrowcache.units import format_count

try:
    import torch
    from sklearn.datasets import load_digits
    from torch import Tensor, nn

    from arrowcache.torch import Loader
except ModuleNotFoundError as error:
    raise ImportError(
        f"the demo needs {error.name}, which is not installed: pip install 'arrowcache[demo]'"
    ) from error

SIZE = 64  # a sample's image is (SIZE, SIZE) float32: 16 KiB
DIGIT = 8  # a stored digit is (DIGIT, DIGIT) uint8, 0 to 16
STORE_FILES = 6
ROW_GROUP_ROWS = 16
COPIES = 4  # distorted copies of each row that was read
BATCH_SIZE = 64

SCHEMA = ac.Schema({"image": ac.Tensor("float32", (SIZE, SIZE)), "label": ac.Tensor("int64")})


# -- the far store ---------------------------------------------------------------------------------


def write_store(folder: Path, digits: NDArray[np.uint8], labels: NDArray[np.int64]) -> str:
    """Write digits as a Parquet dataset of several files with many row groups; return its URI."""
    folder.mkdir()
    parts = np.array_split(np.arange(len(digits)), STORE_FILES)
    for number, rows in enumerate(parts):
        table = pa.table({"pixels": list(digits[rows].reshape(len(rows), -1)), "label": labels[rows]})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=ROW_GROUP_ROWS)
    return folder.absolute().as_uri()


# -- drawing samples -------------------------------------------------------------------------------


def distort(digits: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.float32]:
    """Render each digit with a random rotation, scale, shift, contrast and noise of its own.

    Args:
        digits: (n, DIGIT, DIGIT), 0 to 16.
    Returns: (n, SIZE, SIZE), ink about 1, paper about 0.
    """
    n = len(digits)
    angle = rng.uniform(-0.5, 0.5, n).astype(np.float32)
    scale = rng.uniform(0.6 * SIZE / DIGIT, 1.1 * SIZE / DIGIT, n).astype(np.float32)
    shift = rng.uniform(-0.12 * SIZE, 0.12 * SIZE, (2, n)).astype(np.float32)
    # Where does each pixel of the image come from? (n, SIZE, SIZE) rows and columns of the digit.
    offset = np.arange(SIZE, dtype=np.float32) - (SIZE - 1) / 2
    y = offset[:, None] - shift[0, :, None, None]
    x = offset[None, :] - shift[1, :, None, None]
    cos, sin = (np.cos(angle) / scale)[:, None, None], (np.sin(angle) / scale)[:, None, None]
    # A frame of two empty pixels around the digit stands for all paper outside it.
    padded = np.pad(digits / np.float32(16), ((0, 0), (2, 2), (2, 2)))
    centre, limit = (DIGIT - 1) / 2 + 2, DIGIT + 2
    row = np.clip(cos * y - sin * x + centre, 0, limit)
    column = np.clip(sin * y + cos * x + centre, 0, limit)
    # Bilinear: the four neighbours, weighted by how near they are.
    top, left = row.astype(np.int32), column.astype(np.int32)
    down, right = row - top.astype(np.float32), column - left.astype(np.float32)
    width = DIGIT + 4
    flat, corner = padded.ravel(), (np.arange(n)[:, None, None] * width + top) * width + left
    image: NDArray[np.float32]
    image = (flat[corner] * (1 - right) + flat[corner + 1] * right) * (1 - down)
    image += (flat[corner + width] * (1 - right) + flat[corner + width + 1] * right) * down
    image *= rng.uniform(0.5, 1.2, (n, 1, 1)).astype(np.float32)
    image += np.float32(0.25) * rng.standard_normal(image.shape, dtype=np.float32)
    return image


class DistortedDigits:
    """A sampler: random row groups of the store, each digit distorted a few times.

    It is pickled as its URI; each sampler process opens the store once, at its first task.
    """

    def __init__(self, store: str) -> None:
        self.store = store
        self.row_groups: list[pads.ParquetFileFragment] = []

    def open(self) -> list[pads.ParquetFileFragment]:
        """List the row groups; only the footers of the files are read."""
        fragments = pads.dataset(self.store, format="parquet").get_fragments()
        return [group for fragment in fragments for group in fragment.split_by_row_group()]

    def __call__(self, rng: np.random.Generator) -> Iterator[dict[str, NDArray[np.generic]]]:
        self.row_groups = self.row_groups or self.open()
        while True:
            table = self.row_groups[rng.integers(len(self.row_groups))].to_table()
            rows = rng.permutation(np.repeat(np.arange(len(table)), COPIES))
            digits = np.stack(list(table["pixels"].to_numpy())).reshape(-1, DIGIT, DIGIT)
            labels = table["label"].to_numpy()
            for image, label in zip(distort(digits[rows], rng), labels[rows], strict=True):
                yield {"image": image, "label": label}


# -- training --------------------------------------------------------------------------------------


class Classifier:
    """A small convolutional network and its optimizer; it does not know of the cache."""

    def __init__(self) -> None:
        def block(channels_in: int, channels_out: int) -> nn.Module:
            convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
            norm = nn.BatchNorm2d(channels_out)
            return nn.Sequential(convolution, norm, nn.ReLU(), nn.MaxPool2d(2))

        self.network = nn.Sequential(
            nn.Unflatten(1, (1, SIZE)), nn.AvgPool2d(4),
            block(1, 16), block(16, 32), block(32, 64),
            nn.Flatten(), nn.Linear(64 * (SIZE // 32) ** 2, 10),
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=3e-3)

    def learn(self, images: Tensor, labels: Tensor) -> None:
        self.network.train()
        loss = nn.functional.cross_entropy(self.network(images), labels)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        self.optimizer.step()

    @torch.inference_mode()
    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        self.network.eval()
        hits = self.network(images).argmax(1) == labels
        return float(hits.float().mean())


HEADER = "epoch      s  segments    rows  evicted  sampler MB/s  loader MB/s  stall %  accuracy %"


@dataclass(frozen=True, slots=True)
class EpochLine:
    """The results of one epoch: one line of the table."""

    number: int
    seconds: float
    segments: int  # in the snapshot
    rows: int  # in the snapshot
    evicted: int  # segments, since the start
    sampler_mb_s: float
    loader_mb_s: float
    stall_percent: float
    accuracy_percent: float  # on held-out digits

    def __str__(self) -> str:
        return (
            f"{self.number:5d} {self.seconds:6.1f} {self.segments:9d} {self.rows:7d}"
            f" {self.evicted:8d} {self.sampler_mb_s:13.1f} {self.loader_mb_s:12.1f}"
            f" {self.stall_percent:8.1f} {self.accuracy_percent:11.1f}"
        )


def train(
    classifier: Classifier,
    cache: ac.Cache,
    pool: ac.SamplerPool,
    loader: Loader,
    held_out: tuple[Tensor, Tensor],
) -> Iterator[EpochLine]:
    """Train without end, an epoch a snapshot, and yield the results of each epoch."""
    for number in itertools.count():
        start, drawn, loaded = time.perf_counter(), pool.stats(), loader.stats()
        segments: set[int] = set()
        for batch in loader:
            classifier.learn(batch["image"], batch["label"])
            segments.update(batch["_seq"].tolist())
        seconds = time.perf_counter() - start
        drawn_now, loaded_now, on_disk = pool.stats(), loader.stats(), cache.stats()
        yield EpochLine(
            number=number,
            seconds=seconds,
            segments=len(segments),
            rows=loaded_now.rows - loaded.rows,
            evicted=on_disk.evicted_segments,
            sampler_mb_s=(drawn_now.bytes - drawn.bytes) / seconds / 1e6,
            loader_mb_s=(loaded_now.bytes - loaded.bytes) / seconds / 1e6,
            stall_percent=100 * (loaded_now.stall_seconds - loaded.stall_seconds) / seconds,
            accuracy_percent=100 * classifier.accuracy(*held_out),
        )


# -- the job ---------------------------------------------------------------------------------------


def failures(epochs: Sequence[EpochLine], problems: Sequence[object]) -> list[str]:
    """Return the promises of this job that failed, as sentences."""
    first, last = epochs[0], epochs[-1]
    failed = [f"cache.verify() found: {problem}" for problem in problems]
    if last.accuracy_percent < max(80, first.accuracy_percent + 20):
        failed.append(
            f"the network did not learn: accuracy went from {first.accuracy_percent:.1f} "
            f"to {last.accuracy_percent:.1f} %, not up by 20 points to 80 % or more"
        )
    if last.rows < 2 * first.rows:
        failed.append(
            f"the snapshots did not double: {first.rows} rows in the first epoch, {last.rows} in the last"
        )
    if last.evicted == 0:
        failed.append(f"no segment was evicted in {format_count(len(epochs), 'epoch')}")
    return failed


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m arrowcache.demo",
        description="Train on handwritten digits from a cache that grows while it is trained on.",
    )
    parser.add_argument("--epochs", type=int, default=8, help="passes (default: %(default)s)")
    parser.add_argument("--capacity", default="256MiB", help="of the cache (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="sampler processes (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="no epoch starts later (%(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job, print its table; return 0 only if all its promises held."""
    options = parse_arguments(arguments)
    # A kill ends the job like Ctrl-C: through the `with` blocks, leaving no process or file.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    torch.manual_seed(0)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - options.workers))

    digits, labels = load_digits(return_X_y=True)
    digits, labels = digits.reshape(-1, DIGIT, DIGIT).astype(np.uint8), labels.astype(np.int64)
    held_out = np.arange(len(digits)) % 5 == 4
    images = distort(np.repeat(digits[held_out], 3, axis=0), np.random.default_rng(2026))
    test_set = torch.from_numpy(images), torch.from_numpy(np.repeat(labels[held_out], 3))
    classifier = Classifier()

    epochs: list[EpochLine] = []
    with tempfile.TemporaryDirectory(prefix="arrowcache-demo-") as folder:
        store = write_store(Path(folder, "store"), digits[~held_out], labels[~held_out])
        print(
            f"{len(digits) - held_out.sum()} digits in the store; {options.workers} sampler "
            f"processes draw distorted copies into a cache of {options.capacity}\n\n{HEADER}"
        )
        deadline = time.perf_counter() + options.seconds
        with (
            ac.Cache.create(
                Path(folder, "cache"),
                SCHEMA,
                capacity=options.capacity,
                segment_bytes="2MiB",
                headroom=0.25,  # room for the samplers during one epoch
            ) as cache,
            ac.SamplerPool(cache, DistortedDigits(store), workers=options.workers, progress=False) as pool,
            Loader(cache, BATCH_SIZE, drop_last=False, with_ids=True, wait_rows=256) as loader,
        ):
            for epoch in train(classifier, cache, pool, loader, test_set):
                epochs.append(epoch)
                print(epoch, flush=True)
                if len(epochs) >= options.epochs or time.perf_counter() > deadline:
                    break
            pool.stop()  # verify a cache that does not change any more
            failed = failures(epochs, cache.verify())
    print()
    for failure in failed:
        print(f"FAILED: {failure}")
    if not failed:
        first, last = epochs[0], epochs[-1]
        print(
            f"accuracy went from {first.accuracy_percent:.0f} to {last.accuracy_percent:.0f} %, "
            f"rows from {first.rows} to {last.rows}, {format_count(last.evicted, 'segment')} went, "
            f"and verify() found nothing wrong"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
