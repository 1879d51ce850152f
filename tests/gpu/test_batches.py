"""Batches on a device: a consumer reads its own batch, in order, and a batch that it keeps stays."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from gpu.trials import BATCH_ROWS, Numbers, Saw, Stream, Target, Trial, alike, cache_of_numbers, doubled

import arrowcache as ac
from arrowcache.torch import DevicePrefetcher, Loader

STORM_SECONDS, STORM_STEPS = 20.0, 120
SANITIZED_STEPS = (
    60  # no batch is kept for so long that torch's allocator orders its memory: that is not seen
)
LOADER_SECONDS = 15.0
_LONGEST_SLEEP_SECONDS = 2e-3
_MAX_KEPT = 12
SHUFFLES = ("rows", "window", "blocks", None)
FLAT_EPOCHS, FLAT_BATCHES = 50, 10
SMALL_LEAVES, COPIED_BATCHES = 40, 20


class Consumer:
    """One that does whatever it may: all it takes is read at once and again later, on any stream."""

    def __init__(self, trial: Trial, prefetcher: DevicePrefetcher, source: Numbers) -> None:
        self._trial, self._prefetcher, self._source = trial, prefetcher, source
        self._batches = iter(prefetcher)
        self._kept: list[list[tuple[torch.Tensor, int, Stream]]] = []
        self.reads = self.taken = 0

    def step(self) -> None:
        """One thing, at random."""
        chance = self._trial.chance
        actions = [
            self._take,
            self._take,
            self._take,
            self._release,
            self._release,
            self._use_one,
            self._view,
        ]
        actions += [self._use_elsewhere, self._keep_one_leaf, self._let_go_in_a_thread]
        action = chance.choice(actions)
        if chance.random() < 0.02:
            action = chance.choice([self._begin_anew, self._kept.clear])
        if action == self._take or self._kept or action == self._begin_anew:
            action()
        while len(self._kept) > _MAX_KEPT:
            self._kept.pop(0)

    def _take(self) -> None:
        stream = self._trial.chance.choice(self._trial.streams)
        with self._trial.on(stream):
            batch = next(self._batches)
            number, names = self._source.given.popleft()
            if sorted(batch) != sorted(names):
                raise AssertionError(f"batch {number} has {sorted(batch)}, not {sorted(names)}")
            self._trial.sleep(self._trial.chance.random() * _LONGEST_SLEEP_SECONDS)
            for tensor in batch.values():
                self._read(tensor, number)
        self._kept.append([(tensor, number, stream) for tensor in batch.values()])
        self.taken += 1

    def use_all(self) -> None:
        """Read all that is kept."""
        for batch in self._kept:
            self._use(batch)

    def _use_one(self) -> None:
        self._use(self._trial.chance.choice(self._kept))

    def _use(self, batch: list[tuple[torch.Tensor, int, Stream]]) -> None:
        for tensor, number, stream in batch:
            with self._trial.on(stream):
                self._read(tensor, number)

    def _use_elsewhere(self) -> None:
        """On another stream, which the batch's own waits for before it may be let go."""
        other = self._trial.chance.choice(self._trial.streams)
        for tensor, number, stream in self._trial.chance.choice(self._kept):
            self._trial.order(stream, other)
            with self._trial.on(other):
                self._trial.sleep(1e-4)
                self._read(tensor, number)
            self._trial.order(other, stream)

    def _view(self) -> None:
        batch = self._trial.chance.choice(self._kept)
        tensor, number, stream = batch[0]
        if len(tensor) > 1:
            batch[0] = tensor[1:].detach(), number, stream

    def _keep_one_leaf(self) -> None:
        batch = self._trial.chance.choice(self._kept)
        del batch[self._trial.chance.randrange(len(batch))]
        if not batch:
            self._kept.remove(batch)

    def _release(self) -> None:
        self._kept.pop(self._trial.chance.choice([0, -1]))

    def _let_go_in_a_thread(self) -> None:
        thread = threading.Thread(target=self._kept.clear)
        thread.start()
        thread.join()

    def _begin_anew(self) -> None:
        self._batches = iter(self._prefetcher)

    def _read(self, tensor: torch.Tensor, number: int) -> None:
        self._trial.read(tensor, number)
        self.reads += 1


def storm_of(trial: Trial, steps: int = STORM_STEPS) -> tuple[int, int]:
    """One storm. Returns: batches, reads. Raises: AssertionError: a read was wrong."""
    source = Numbers(trial)
    with DevicePrefetcher(source, trial.device, trial.chance.choice([1, 2, 2, 3])) as prefetcher:
        consumer = Consumer(trial, prefetcher, source)
        for _ in range(steps):
            consumer.step()
    consumer.use_all()  # what is kept outlives the prefetcher
    trial.finish()
    return consumer.taken, consumer.reads


def test_every_read_sees_its_batch(target: Target, saw: Saw) -> None:
    found = [storm_of(trial) for trial in target.trials(STORM_SECONDS)]
    batches, reads = (sum(counts) for counts in zip(*found, strict=True))
    saw(f"{batches} batches, {reads} reads on 3 streams, {len(found)} storms: none was wrong")


def test_every_order_of_a_loader_arrives_bit_for_bit(target: Target, saw: Saw) -> None:
    """Beside a loader without a device, whose batches say what is to be read."""
    epochs = itertools.cycle([(shuffle, transform) for transform in (None, doubled) for shuffle in SHUFFLES])
    reads, trials = 0, 0
    with cache_of_numbers() as cache:
        for trial in target.trials(LOADER_SECONDS):
            for shuffle, transform in itertools.islice(epochs, 2):
                reads += _loader_of(trial, cache, shuffle, transform)
            trials += 1
    saw(f"{reads} batches of {trials} trials, in the host's order for {', '.join(map(str, SHUFFLES))}")


def _loader_of(trial: Trial, cache: ac.Cache, shuffle: str | None, transform: Any) -> int:
    options: dict[str, Any] = {"shuffle": shuffle, "seed": trial.chance.randrange(99), "drop_last": False}
    ours = Loader(cache, 40, device=trial.device, transform=transform, **options)
    with ours, Loader(cache, 40, **options) as plain:
        count = 0
        for _ in range(2):
            for batch, expected in zip(ours, plain, strict=True):
                rows = expected["y"].clone()
                trial.sleep(trial.chance.random() * _LONGEST_SLEEP_SECONDS)
                trial.read(batch["y"], rows)
                trial.read(batch["x"], rows if transform is None else 2 * rows)
                count += 1
        del batch
    trial.finish()
    return count


def test_slots_of_a_loader_are_read_where_they_are(target: Target, saw: Saw) -> None:
    """Slots of the loader, which the device reads by itself."""
    saw(_read_in_place(target, 1, {}))


def test_slots_of_worker_processes_are_read_where_they_are(target: Target, saw: Saw) -> None:
    """The same of worker processes."""
    saw(_read_in_place(target, 2, {"workers": 1, "transform": doubled}))


def _read_in_place(target: Target, factor: int, options: dict[str, Any]) -> str:
    """factor: that a transform multiplies `x` by."""
    with target.trial() as trial, cache_of_numbers() as cache:
        ours = Loader(cache, BATCH_ROWS, device=trial.device, **options)
        with ours, Loader(cache, BATCH_ROWS) as plain:
            for _ in range(3):
                for batch, expected in zip(ours, plain, strict=True):
                    rows = expected["y"].clone()
                    trial.sleep(1e-3)
                    trial.read(batch["x"], factor * rows)
                    trial.read(batch["y"], rows)
            large = batch["x"].nbytes
            del batch
            trial.finish()
            stats = ours.device_stats()
    said = f"{stats.batches} batches; {stats.pinned_bytes} bytes of pinned memory beside the slots"
    if stats.pinned_bytes >= large:
        raise AssertionError(f"{said}: the device did not read from these")
    return said


def test_batches_that_only_autograd_keeps_are_kept(target: Target, saw: Saw) -> None:
    """Batches that only a graph of autograd still refers to, with gradients of several summed."""
    rows, rounds, together = 80, 6, 4
    batches = alike(rounds * together, rows)
    weight = torch.zeros(batches[0]["x"].shape[1], device=target.device, requires_grad=True)
    with DevicePrefetcher(batches, target.device) as prefetcher:
        taken = enumerate(prefetcher)
        for _ in range(rounds):
            losses = [
                number * (batch["x"] * weight).sum()  # the order of batches tells
                for number, batch in itertools.islice(taken, together)
            ]
            for loss in reversed(losses):
                loss.backward()
    expected = rows * sum(number**2 for number in range(rounds * together))
    found = weight.grad
    if found is None or not bool((found == expected).all()):
        raise AssertionError(f"the gradient is {found}, not {expected} everywhere")
    saw(f"the gradient of {rounds} rounds of {together} batches is {expected} everywhere")


def test_reserved_memory_is_flat(target: Target, saw: Saw) -> None:
    """Reserved memory, after two epochs and after each later one."""
    batches, seen = alike(FLAT_BATCHES, small=3), []
    with target.trial() as trial, DevicePrefetcher(batches, trial.device) as prefetcher:
        for _ in range(FLAT_EPOCHS):
            for number, batch in enumerate(prefetcher):
                trial.read(batch["x"], number)
            del batch
            trial.finish()
            stats = prefetcher.stats()
            seen.append((trial.reserved(), stats.device_allocations, stats.device_bytes, stats.pinned_bytes))
    if len(set(seen[2:])) > 1:
        raise AssertionError(
            "reserved bytes, allocations, bytes for batches and pinned bytes were after an epoch: "
            f"{', '.join(map(str, dict.fromkeys(seen)))}"
        )
    reserved, allocations, device_bytes, pinned = seen[-1]
    saw(
        f"{FLAT_EPOCHS} epochs of {FLAT_BATCHES} batches of 1.3 MiB: {reserved / 2**20:.1f} MiB reserved, "
        f"{device_bytes / 2**20:.1f} for batches, {allocations} allocations; {pinned / 2**20:.1f} pinned"
    )


def test_small_leaves_share_a_copy(target: Target, saw: Saw) -> None:
    """One for all small leaves, and one for each large one."""
    batches = alike(COPIED_BATCHES, small=SMALL_LEAVES)
    with target.trial() as trial, DevicePrefetcher(batches, trial.device) as prefetcher:

        def run() -> None:
            for number, batch in enumerate(prefetcher):
                trial.read(batch["x"], number)

        run()
        trial.finish()
        found = trial.copies(run)
        trial.finish()
    if found != 2 * COPIED_BATCHES:
        raise AssertionError(
            f"{found} copies for {COPIED_BATCHES} batches of {SMALL_LEAVES} small leaves and a large one"
        )
    saw(f"2 copies a batch of {SMALL_LEAVES} small leaves and a large one")


def test_nothing_synchronizes_the_device(target: Target, saw: Saw) -> None:
    """Nothing waits for the device, on the way or in what is handed over."""
    with target.trial(is_fast=True) as trial, cache_of_numbers() as cache, _no_synchronization(target):
        taken = 0
        with DevicePrefetcher(_mixed(), trial.device) as prefetcher:
            for batch in prefetcher:
                if target.is_gpu:
                    batch["x"].sum()
                if getattr(batch["ragged"], "_maybe_max_seqlen", 0) is None:
                    raise AssertionError(
                        "a ragged column came without its longest row: a kernel would wait for it"
                    )
                taken += 1
        with Loader(cache, BATCH_ROWS, device=trial.device) as batches:
            for _ in range(3):
                taken += sum(1 for _ in batches)
        waited = trial.waited(prefetcher.stats().device_seconds)
        if not target.is_gpu and waited:
            raise AssertionError(
                f"the processor waited {waited} s for a device that was done with its copies"
            )
        del batch
    saw(f"{taken} batches, of tensors, arrays and ragged columns, of a prefetcher and of a loader")


def _mixed() -> Iterator[dict[str, Any]]:
    for number, batch in enumerate(alike(30, small=5)):
        values = torch.arange(40.0)
        offsets = torch.tensor([0, 3, 10, 10, 40])
        ragged = torch.nested.nested_tensor_from_jagged(values, offsets)
        yield batch | {"array": batch["x"].numpy(), "ragged": ragged, "text": str(number)}


@contextlib.contextmanager
def _no_synchronization(target: Target) -> Iterator[None]:
    if not target.is_gpu:
        yield
        return
    probe = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        try:
            probe.item()
        except RuntimeError:
            pass
        else:
            pytest.skip("torch's sync debug mode did not see a synchronization made on purpose")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.proof(seconds=70, is_alone=True)
def test_the_sanitizer_of_cuda_sees_no_race(gpu: Target, saw: Saw) -> None:
    """A storm under torch's CUDA sanitizer, which is shown a race after it."""
    import torch.cuda._sanitizer as sanitizer_of_torch

    sanitizer_of_torch.enable_cuda_sanitizer()
    batches = reads = 0
    for trial, _ in zip(gpu.trials(STORM_SECONDS), range(8), strict=False):
        more = storm_of(trial, SANITIZED_STEPS)
        batches, reads = batches + more[0], reads + more[1]
    raced = torch.zeros(1 << 20, device="cuda")
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            raced.add_(1)
    except sanitizer_of_torch.CUDASanitizerErrors:
        saw(f"{batches} batches, {reads} reads: no race; and it saw one that was made on purpose")
        return
    finally:
        sanitizer_of_torch.cuda_sanitizer.disable()
        torch.cuda.synchronize()
    pytest.skip(f"torch's sanitizer did not see a race made on purpose; {batches} batches passed it")
