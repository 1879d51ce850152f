"""Does the copy to the device hide behind the training step, and at what rate does it go?

Question: seconds a step over max(copy alone, compute alone), at batches of 1, 32 and 256 MB, of
`DevicePrefetcher` from ordinary and from pinned memory, against `.to(device)`, against `.to(device,
non_blocking=True)` from pinned memory, and against torch's DataLoader with pin_memory: without workers,
where it pins in the consumer's thread, and with one, where a thread of its own does and /dev/shm has room
for the batches. Host-to-device GB/s over a bare pinned copy. Whether `torch.cuda.memory_reserved` is flat
over 50 epochs. Whether a profiler sees copies under the compute. Values are checked on the device. The
loader end to end, over a bare copy of as many bytes and over a loader without a device; its CPU seconds a
GB. What a batch of 2 and of 40 leaves of 256 bytes costs Python, in microseconds of this process. The last
two everywhere: without a GPU to the CPU, whose copies are as short as can be.
Method: compute is matrix products that take about as long as the copy of that batch; STEPS a turn, so many
that its first copy, which nothing can hide, is under a hundredth of it; the device synchronized at its
ends; cases take turns; medians. Sources yield ready batches, so that only the way to the device is
measured: nil is to be gained where a step is a few microseconds of launches.
Run: `python -m benchmarks device`, which measures nothing else where there is no CUDA device, and says so.
`--trace FILE` writes the profiler's trace. Results: benchmarks/RESULTS.md. `make device-proof` proves that
the way is right.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from arrowcache.torch import DevicePrefetcher, Loader
from arrowcache.units import format_bytes
from benchmarks.harness import Options, Round, Way, filled_cache, interleaved, machine, scratch, timed

MEGABYTES = (1, 32, 256)
STEPS = {1: 1000, 32: 200, 256: 120}
REPEATS = 7
EPOCHS = 50
DISTINCT = 4  # batches, used in turn
ROW_BYTES, BATCH_BYTES, CACHE_BYTES = (
    (1 << 10, 1 << 16, 1 << 20),
    4 << 20,
    {"cuda": 256 << 20, "cpu": 16 << 20},
)

Compute = Callable[[torch.Tensor], None]
Span = tuple[float, float]


class Ready(torch.utils.data.IterableDataset[torch.Tensor]):
    """Batches that are made already, one after another."""

    def __init__(self, batches: list[torch.Tensor], steps: int) -> None:
        self._batches, self._steps = batches, steps

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in range(self._steps):
            yield self._batches[step % len(self._batches)]


def run(batches: Iterable[torch.Tensor], compute: Compute) -> None:
    for batch in batches:
        compute(batch)
    torch.cuda.synchronize()


def moved(batches: Iterable[torch.Tensor], *, non_blocking: bool) -> Iterator[torch.Tensor]:
    for batch in batches:
        yield batch.to("cuda", non_blocking=non_blocking)


def seconds_a_product(matrix: torch.Tensor, out: torch.Tensor) -> float:
    def products(count: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            torch.mm(matrix, matrix, out=out)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    products(50)
    return statistics.median(products(50) for _ in range(5)) / 50


def compute_for(seconds: float) -> Compute:
    """Work of about so long, after a pass over the batch."""
    for side in (2048, 1024, 512, 256):
        matrix = torch.randn(side, side, device="cuda") / side**0.5
        out = torch.empty_like(matrix)
        one = seconds_a_product(matrix, out)
        if 4 * one < seconds:
            break
    count = max(1, round(seconds / one))

    def compute(batch: torch.Tensor) -> None:
        batch.sum()
        for _ in range(count):
            torch.mm(matrix, matrix, out=out)

    return compute


def measure(megabytes: int, steps: int, repeats: int = REPEATS, *, peers: bool = True) -> dict[str, float]:
    """Seconds a step of each case, and of copy and compute alone. peers: also of torch's own ways."""
    size = megabytes * 1_000_000 // 4
    plain = [torch.rand(size) for _ in range(DISTINCT)]
    pinned = [batch.pin_memory() for batch in plain]
    target = torch.empty(size, device="cuda")

    def bare_copy() -> None:
        for step in range(steps):
            target.copy_(pinned[step % DISTINCT], non_blocking=True)
        torch.cuda.synchronize()

    def nothing(batch: torch.Tensor) -> None:
        pass

    bare_copy()
    compute = compute_for(interleaved({"copy": bare_copy}, 5)["copy"] / steps)
    ours, ours_pinned = (
        DevicePrefetcher(Ready(plain, steps), "cuda"),
        DevicePrefetcher(Ready(pinned, steps), "cuda"),
    )
    cases = {
        "copy alone": bare_copy,
        "compute alone": lambda: run((target for _ in range(steps)), compute),
        "prefetcher": lambda: run(ours, compute),
        "prefetcher, pinned": lambda: run(ours_pinned, compute),
        "prefetcher, pinned, no compute": lambda: run(ours_pinned, nothing),
        "prefetcher, no compute": lambda: run(ours, nothing),
    }
    torchs: Any = torch.utils.data.DataLoader(Ready(plain, steps), batch_size=None, pin_memory=True)
    with_worker: Any = torch.utils.data.DataLoader(
        Ready(plain, steps), batch_size=None, pin_memory=True, num_workers=1, persistent_workers=True
    )
    torchs_own = {
        ".to(device)": lambda: run(moved(Ready(plain, steps), non_blocking=False), compute),
        ".to(non_blocking), pinned": lambda: run(moved(Ready(pinned, steps), non_blocking=True), compute),
        "DataLoader(pin_memory)": lambda: run(moved(torchs, non_blocking=True), compute),
        "DataLoader(pin_memory, 1 worker)": lambda: run(moved(with_worker, non_blocking=True), compute),
    }
    if shutil.disk_usage("/dev/shm").free < 2 * DISTINCT * megabytes * 1_000_000:
        del torchs_own["DataLoader(pin_memory, 1 worker)"]
    cases |= torchs_own if peers else {}
    for case in cases.values():
        case()
    found = {name: seconds / steps for name, seconds in interleaved(cases, repeats).items()}
    for number, batch in enumerate(ours):
        assert torch.equal(batch.cpu(), plain[number % DISTINCT]), "values differ on the device"
    ours.close()
    ours_pinned.close()
    return found


def memory() -> tuple[int, int]:
    """`memory_reserved` after the second epoch, and the most after any later one."""
    batches = [torch.rand(8_000_000) for _ in range(DISTINCT)]
    reserved = []
    with DevicePrefetcher(batches, "cuda") as prefetcher:
        for _ in range(EPOCHS):
            for batch in prefetcher:
                batch.sum()
            reserved.append(torch.cuda.memory_reserved())
    return reserved[1], max(reserved[1:])


def profiled(run: Callable[[], None]) -> Any:
    """torch's profile of a call, and of all that it gave the device."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return profile


def spans_of(profile: Any) -> tuple[list[Span], list[Span]]:
    """The host-to-device copies and the kernels: (start, end) in microseconds. No copies: none were seen."""
    copies, kernels = [], []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            span = (event.time_range.start, event.time_range.end)
            if "HtoD" in event.name:
                copies.append(span)
            elif not event.name.startswith(("Memcpy", "Memset")):
                kernels.append(span)
    return copies, kernels


def share_under(spans: Iterable[Span], others: Iterable[Span]) -> float:
    """The share of spans' time that lies under at least one of the others."""
    united: list[list[float]] = []
    for start, end in sorted(others):
        if united and start <= united[-1][1]:
            united[-1][1] = max(united[-1][1], end)
        else:
            united.append([start, end])
    total = under = 0.0
    for start, end in spans:
        total += end - start
        under += sum(max(0.0, min(end, last) - max(start, first)) for first, last in united)
    return under / total if total else 0.0


def under_compute() -> Any:
    """The profile of 40 steps of 32 MB from pinned memory, with a compute of some milliseconds."""
    batches = [torch.rand(8_000_000).pin_memory() for _ in range(DISTINCT)]
    compute = compute_for(0.003)
    with DevicePrefetcher(Ready(batches, 40), "cuda") as prefetcher:
        run(prefetcher, compute)
        return profiled(lambda: run(prefetcher, compute))


def python_microseconds(leaves: int, where: str = "cpu") -> tuple[float, float]:
    """Of a batch, on its way to a device: the median of some turns, and the least."""
    batches = [{f"column {number}": torch.zeros(4, 16) for number in range(leaves)}] * 400
    found = []
    with DevicePrefetcher(batches, where) as prefetcher:
        for _ in range(12):
            started = time.process_time()
            for _ in prefetcher:
                pass
            found.append((time.process_time() - started) / len(batches) * 1e6)
    return statistics.median(found[2:]), min(found[2:])


def show_rates(where: str, cache_bytes: int) -> None:
    """The loader end to end, in epochs that follow without a seam; a turn is as many bytes as the cache
    has."""
    for row_bytes in ROW_BYTES:
        batch_rows = max(8, BATCH_BYTES // row_bytes)
        count, batch_bytes = cache_bytes // (batch_rows * row_bytes), batch_rows * row_bytes
        with scratch() as folder, filled_cache(folder / "cache", row_bytes, cache_bytes) as cache:
            for shuffle in ("rows", "window"):
                with (
                    Loader(cache, batch_rows, device=where, shuffle=shuffle) as ours,
                    Loader(cache, batch_rows, shuffle=shuffle) as host,
                ):
                    ways = rates(where, ours, host, count, batch_bytes)
                    title = f"rows of {format_bytes(row_bytes)}, {shuffle!r}, {batch_rows} a batch"
                    over = ["a bare copy", "without a device"]
                    timed(Round(title, ways, over, count * batch_bytes / 1e9, turns=3), Options())


def rates(where: str, ours: Loader, host: Loader, count: int, batch_bytes: int) -> dict[str, Way]:
    """The ways by which so many batches are brought."""
    source = torch.ones(batch_bytes, dtype=torch.uint8)
    source = source.pin_memory() if where == "cuda" else source
    target = torch.empty(batch_bytes, dtype=torch.uint8, device=where)
    to_device, on_host = ours.repeat(), host.repeat()

    def synchronize() -> None:
        if where == "cuda":
            torch.cuda.synchronize()

    def copy() -> None:
        for _ in range(count):
            target.copy_(source, non_blocking=True)
        synchronize()

    def load() -> None:
        for batch in itertools.islice(to_device, count):
            if where == "cuda":
                batch["x"].sum()
        synchronize()

    def load_on_host() -> None:
        for batch in itertools.islice(on_host, count):
            del batch

    return {"a bare copy": copy, "loader": load, "without a device": load_on_host}


def show_python(where: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for leaves in (2, 40):
        median, least = python_microseconds(leaves, where)
        print(f"{leaves} leaves: {median:.0f} microseconds of Python a batch, at least {least:.0f}")
    torch.set_num_threads(threads)


def main() -> None:
    parser = argparse.ArgumentParser(description="The way to the device, over its parts alone.")
    parser.add_argument("--trace", help="where to write the profiler's trace")
    trace = parser.parse_args().trace
    print(machine())
    print(f"PyTorch {torch.__version__}")
    where = "cuda" if torch.cuda.is_available() else "cpu"
    show_python(where)
    show_rates(where, CACHE_BYTES[where])
    if where == "cpu":
        print("There is no CUDA device here: nothing else was measured.")
        return
    print(torch.cuda.get_device_name())
    for megabytes in MEGABYTES:
        found = measure(megabytes, STEPS[megabytes])
        copy, least = found["copy alone"], max(found["copy alone"], found["compute alone"])
        print(f"\n{megabytes} MB a batch: step over max(copy, compute), which is {1000 * least:.3f} ms")
        for name, seconds in found.items():
            if "no compute" in name:
                rate = megabytes / 1000 / seconds
                print(f"{name:32} {rate:8.1f} GB/s, {copy / seconds:.2f} of a bare copy")
            else:
                print(f"{name:32} {1000 * seconds:8.3f} ms {seconds / least:8.2f}")
    first, most = memory()
    print(f"\nmemory_reserved over {EPOCHS} epochs: {first / 1e6:.1f} MB, at most {most / 1e6:.1f} MB")
    profile = under_compute()
    print(f"share of copying time under kernels: {share_under(*spans_of(profile)):.2f}")
    if trace:
        profile.export_chrome_trace(trace)


if __name__ == "__main__":
    main()
