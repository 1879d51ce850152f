"""Stats: what a loader delivered, what that took, and what to do about it.

`Meter` is what the loader's threads add to; `LoaderStats` is the frozen answer to the user. Adding
is a few additions under a lock that nobody holds for longer, so it is always on; what must ask the
kernel (memory) is asked when the user asks.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from arrowcache.units import format_bytes

if TYPE_CHECKING:
    from typing import Self

    from arrowcache.reading.pipeline import Made

STAGES = ("samplers", "store", "gather", "transform")
_NO_STALL = 0.05  # a smaller share of the time is not worth a word

_ADVICE = {
    "none": "no batch was delivered yet",
    "consumer": "the training step is the limit: the loader waits for it",
    "samplers": "too few rows are published: add sampler workers, or lower wait_rows or batch_size",
    "store": "the disk is the limit: use shuffle='window' or 'blocks', a faster disk, or more memory",
    "gather": "copying is the limit: pass workers=2, worker_type='thread', or fewer columns",
    "transform": "the transform is the limit: pass workers=N, or make it do less",
}


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """A loader since it was made.

    `bytes` are those of delivered batches, `copied_bytes` what of them was copied (zero-copy views
    are not); `seconds` the time inside epochs, from their `iter` on; `stall_seconds` the part of it
    that the consumer waited, in `stalls` steps, for rows or for a batch.

    `bottleneck` is what to speed up: "consumer" (the training step: the loader waits for it),
    "samplers" (too few rows), "store" (the disk, and cache.lock), "gather" (memory) or "transform";
    "none" before the first batch. `advice` says it in words. The seconds behind it are those that
    the loader's threads, all together, spent on each.

    `age_seconds` is how old delivered rows were on average, since they were published (of at most
    64 rows of each batch). `ring_bytes` is the memory for batches, `ring_growths` how often a
    buffer was added to it: it goes on growing while the consumer keeps batches. `private_bytes` and
    `file_bytes` are the whole process' resident memory: its own, and pages of mapped files, which
    the kernel takes back when it needs them.
    """

    epochs: int
    batches: int
    rows: int
    bytes: int
    seconds: float
    stall_seconds: float
    bottleneck: str
    stalls: int
    copied_bytes: int
    samplers_seconds: float
    store_seconds: float
    gather_seconds: float
    transform_seconds: float
    age_seconds: float
    ring_bytes: int
    ring_growths: int
    private_bytes: int
    file_bytes: int

    @property
    def advice(self) -> str:
        """What to do to be faster."""
        return _ADVICE[self.bottleneck]

    def __str__(self) -> str:
        rate = format_bytes(int(self.bytes / self.seconds)) if self.seconds else "0 B"
        return (
            f"{self.batches} batches, {self.rows} rows, {format_bytes(self.bytes)} in {self.seconds:.1f} s "
            f"({rate}/s), stalled {self.stall_seconds:.1f} s in {self.stalls} steps; "
            f"bottleneck {self.bottleneck}: {self.advice}"
        )


class Meter:
    """Counters of one loader; any thread adds."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may ask, or close, while its thread is counting
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.epochs = self.batches = self.rows = self.nbytes = self.copied_bytes = self.stalls = 0
        self.epoch_seconds = self.stall_seconds = 0.0
        self._age_row_seconds = 0.0

    def add(self, stage: str, seconds: float) -> None:
        """A thread of the loader was busy with, or waited for, one of STAGES."""
        with self._lock:
            self.seconds[stage] += seconds

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time that passes inside."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def reading(self) -> Reading:
        """Add the time that passes inside to "gather", or, as far as the disk was waited for, to "store"."""
        return Reading(self)

    def deliver(self, made: Made, waited: float) -> None:
        """A batch went to the consumer, which waited for it."""
        with self._lock:
            self.batches += 1
            self.rows += made.rows
            self.nbytes += made.nbytes
            self.copied_bytes += made.copied
            self._age_row_seconds += (time.time() - made.published) * made.rows
            self._stall(waited)

    def begin_epoch(self) -> None:
        with self._lock:
            self.epochs += 1

    def wait_for_epoch(self, seconds: float) -> None:
        """The consumer waited for an `iter`."""
        with self._lock:
            self.epoch_seconds += seconds
            self._stall(seconds)

    def wait_in_vain(self, seconds: float) -> None:
        """The consumer waited in a step that gave no batch; the time is counted with the epoch's."""
        with self._lock:
            self._stall(seconds)

    def end_epoch(self, seconds: float) -> None:
        """The consumer iterated for so long."""
        with self._lock:
            self.epoch_seconds += seconds

    def stats(self, running_seconds: float, ring_bytes: int, ring_growths: int) -> LoaderStats:
        """What was counted, at this moment."""
        private_bytes, file_bytes = resident_bytes()
        with self._lock:
            seconds = self.epoch_seconds + running_seconds
            return LoaderStats(
                epochs=self.epochs,
                batches=self.batches,
                rows=self.rows,
                bytes=self.nbytes,
                seconds=seconds,
                stall_seconds=self.stall_seconds,
                bottleneck=self._bottleneck(seconds),
                stalls=self.stalls,
                copied_bytes=self.copied_bytes,
                samplers_seconds=self.seconds["samplers"],
                store_seconds=self.seconds["store"],
                gather_seconds=self.seconds["gather"],
                transform_seconds=self.seconds["transform"],
                age_seconds=self._age_row_seconds / self.rows if self.rows else 0.0,
                ring_bytes=ring_bytes,
                ring_growths=ring_growths,
                private_bytes=private_bytes,
                file_bytes=file_bytes,
            )

    def _stall(self, waited: float) -> None:
        self.stall_seconds += waited
        self.stalls += waited > 1e-3  # less is how long handing a batch over takes

    def _bottleneck(self, seconds: float) -> str:
        if not self.batches:
            return "none"
        if self.stall_seconds < _NO_STALL * seconds:
            return "consumer"
        return max(self.seconds, key=lambda stage: self.seconds[stage])


class Reading:
    """What reading rows took one thread: a context manager.

    `was_on_disk`: pages had to be read. `has_waited`: for the GIL or the disk it had to wait, for longer
    than it worked. A thread that others keep from its CPU is not waiting: that is no reason to do more
    at a time.
    """

    has_waited = was_on_disk = False

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __enter__(self) -> Self:
        self._before = resource.getrusage(resource.RUSAGE_THREAD)
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        wall_seconds = time.perf_counter() - self._started
        before, now = self._before, resource.getrusage(resource.RUSAGE_THREAD)
        cpu_seconds = now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime
        waits, preemptions = now.ru_nvcsw - before.ru_nvcsw, now.ru_nivcsw - before.ru_nivcsw
        self.has_waited = wall_seconds > 1.5 * cpu_seconds and waits > preemptions
        self.was_on_disk = now.ru_majflt > before.ru_majflt
        on_disk = max(0.0, wall_seconds - cpu_seconds) if self.was_on_disk else 0.0
        if on_disk:
            self._meter.add("store", on_disk)
        self._meter.add("gather", wall_seconds - on_disk)


def resident_bytes() -> tuple[int, int]:
    """This process' resident memory: private, and of files and shared memory."""
    kib = {"RssAnon": 0, "RssFile": 0, "RssShmem": 0}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in kib:
            kib[name] = int(value.split()[0])
    return kib["RssAnon"] * 1024, (kib["RssFile"] + kib["RssShmem"]) * 1024
