"""Stats: the counts of a loader: what was delivered, where the time went, and advice.

`Meter` holds the counters that the consumer and workers add to; `LoaderStats` is the frozen answer to the
user. Adding is a few additions under a lock that is never held for longer, so counting is always on. The
kernel is asked for memory only when the user asks. A stage is noted when it begins, one entry a thread, and
counts up to the moment of the question: a transform that hangs is seen while it hangs. Counts are shown on
the loader's page, for other processes: each batch at once; seconds when something is counted, at most ten
times a second, and now and then while the consumer waits.
"""

from __future__ import annotations

import math
import resource
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from arrowcache.display import Bar, Card, Facts, Part, Shown
from arrowcache.lifetimes import forgets_in_child
from arrowcache.limits import Limits
from arrowcache.linux import PAGE_BYTES
from arrowcache.reading.shuffle import Shuffle
from arrowcache.storage.counters import WAITS
from arrowcache.units import format_bytes, format_count, format_seconds, format_share

if TYPE_CHECKING:
    from arrowcache.reading.assembly import ReadyBatch
    from arrowcache.reading.gather import ReadMode
    from arrowcache.storage.counters import LoaderPage

STAGES = ("samplers", "pace", "store", "gather", "transform", "start")
_NO_STALL = 0.05  # a smaller share of the time is not worth a word
_SHOW_SECONDS = 0.1
_HAND_OVER_SECONDS = 1e-3  # a shorter wait is no stall: so long may handing a batch over take
_STEPS = 8  # of equal width, into which an octave of waits is divided
_PLACES = _STEPS * (len(WAITS) + 1)

_CHOICE_ADVICE = {
    "where": "a quicker where, or longer epochs, since it is asked of each segment as one begins",
    "an expression in rows": "longer epochs, since each looks up which rows it accepted",
    "rows": "a pyarrow.compute expression in place of a function in rows=, whose answer is remembered",
    "weights": "a larger epoch_rows, since weights are fixed for each epoch",
    "batch_tokens": "longer epochs, since batch_tokens reads the lengths of new rows as one begins",
}
_ADVICE = {
    "none": "no batch was delivered yet, or waited for",
    "consumer": "the training step is the limit: the loader waits for it",
    "start": "beginning is the limit: worker processes start once a loader, segments are listed and mapped "
    "once an epoch: keep the loader for all epochs",
    "pace": "the cache's pace holds training back: add sampler workers, or set another with cache.set_pace()",
    "samplers": "too few rows are published: add sampler workers, or lower wait_rows or batch_size",
}


@dataclass(frozen=True, slots=True)
class LoaderStats(Shown):
    """Counts of a loader since it was made, with the stages in progress now.

    `bytes` counts delivered batches, and `copied_bytes` the copied part of them (zero-copy views
    are not copied). `seconds` is the time inside epochs, from their `iter` on. `stall_seconds` is the part
    of it that the consumer waited for rows or for a batch, in `stalls` steps.

    `bottleneck` names the stage to speed up: "consumer" (the training step: the loader waits for it),
    "samplers" (too few rows), "pace" (the cache's: see `Pace`), "store" (rows that came from the disk),
    "gather" (memory; of views, mapping them), "transform" (and what makes a dataset's items), "start" (of an
    epoch: listing, leasing and mapping its segments; of worker processes, once a loader); "none" before a
    batch was delivered or waited for. `advice` puts it in words; for "store" it compares how other shuffles
    read the disk. The seconds behind the bottleneck are the time that the consumer (in `next`) and all
    workers spent on each stage. The start of worker processes counts while no worker is ready.

    `age_seconds` is the mean time since the publication of delivered rows (of some 64 of every
    4,096 rows). `slot_bytes` is the memory for batches, `slot_growths` the number of buffers added to it: it
    goes on growing while the consumer keeps batches. `private_bytes` and `file_bytes` are the whole process'
    resident memory: its own, and pages of mapped files, which the kernel takes back when it needs them.
    `workers` and `shuffle` are the loader's.

    `left_out_rows` is how many of the oldest rows the epoch that began last leaves to samplers: 0, but
    where the cache is nearly full and somebody writes to it (see `headroom` of `Cache.create`); also 0 for
    the rest of a resumed epoch. `held_up_seconds` is how long samplers waited for room that this loader
    leased: waits that lasted to the end of an epoch, or still last. `advice` mentions long ones.
    `unselected_rows` is how many rows of its segments the epoch that began last does not read, since they are
    excluded, or not those of `rows`. `choosing_seconds` is the part of `start_seconds` in which the rows of
    epochs were chosen: by `where`, `rows`, `weights` and the lengths of `batch_tokens`, of which `chosen_by`
    names those in use. `repeats` is True if batches come from `repeat()`. `left_out_items` is how many items
    of a dataset could not be made, in all epochs, with on_error="skip". `unread_rows` is how many rows left
    the cache, since a loader with `once` was made, before its name had them: also those that `rows` refuses,
    and with a `where` only those that it saw. Such a loader counts no epochs.
    `wait_p50_seconds`, `wait_p95_seconds` and `wait_p99_seconds`: half of all calls of `iter` and `next`, and
    so many in a hundred, waited no longer than that, to an eighth; 0 where the batch was there.
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
    pace_seconds: float
    store_seconds: float
    gather_seconds: float
    transform_seconds: float
    start_seconds: float
    age_seconds: float
    slot_bytes: int
    slot_growths: int
    private_bytes: int
    file_bytes: int
    workers: int
    shuffle: str | None
    left_out_rows: int = 0
    unselected_rows: int = 0
    held_up_seconds: float = 0.0
    choosing_seconds: float = 0.0
    chosen_by: tuple[str, ...] = ()
    repeats: bool = False
    left_out_items: int = 0
    unread_rows: int = 0
    wait_p50_seconds: float = 0.0
    wait_p95_seconds: float = 0.0
    wait_p99_seconds: float = 0.0

    @property
    def advice(self) -> str:
        """Advice on how to be faster, and how to delay samplers less."""
        if not self.held_up_seconds or self.held_up_seconds < _NO_STALL * self.seconds:
            return self._own_advice()
        in_order = (
            "" if Shuffle(self.shuffle).is_in_order else "shuffle='window', which gives up what was read, "
        )
        return (
            f"{self._own_advice()}; but samplers waited {format_seconds(self.held_up_seconds)} for room "
            f"that this loader's lease takes: {in_order}more headroom, or more capacity"
        )

    def _own_advice(self) -> str:
        match self.bottleneck:
            case "store":
                return f"the disk is the limit: {self._of_the_disk()}fewer columns, or more memory"
            case "gather" if self.bytes and not self.copied_bytes:
                return "mapping and reading small views is the limit, nothing is copied: a larger batch_size"
            case "gather":
                return "copying is the limit: fewer columns, or a faster memory"
            case "start":
                return self._of_the_start()
            case "transform":
                more = f"more than {format_count(self.workers, 'worker')}" if self.workers else "workers=2"
                what = "the transform, or the making of a dataset's items,"
                return f"{what} is the limit: {more}, or have it do less, and let go of the GIL"
        return _ADVICE[self.bottleneck]

    def _of_the_start(self) -> str:
        if self.chosen_by and self.choosing_seconds > self.start_seconds / 2:
            ways = [_CHOICE_ADVICE[name] for name in self.chosen_by]
            if self.epochs > 1 and not self.repeats:
                ways.append("taking epochs from loader.repeat()")
            return (
                f"choosing the rows of epochs by {' and '.join(self.chosen_by)} is the limit, "
                f"{format_seconds(self.choosing_seconds)} of it: {', or '.join(ways)}"
            )
        if self.repeats:
            return f"{_ADVICE['start']}, and have longer epochs, such as by epoch_rows"
        return f"{_ADVICE['start']}, and take them from loader.repeat()"

    def _of_the_disk(self) -> str:
        if Shuffle(self.shuffle).is_in_order:
            return "it is read in order already; a faster disk, "
        if Shuffle(self.shuffle).has_runs:
            return (
                "shuffle='window' reads it in order, shuffle='blocks' in short runs of batch_size rows; or a "
                "larger batch_size, "
            )
        small = ""
        if self.rows and self.bytes < self.rows * PAGE_BYTES:
            small = (
                f", where each row of {format_bytes(self.bytes / self.rows)} costs a page of "
                f"{format_bytes(PAGE_BYTES)}"
            )
        return f"shuffle='window' reads it in order, shuffle='rows' at random{small}; or a faster disk, "

    def _card(self) -> Card:
        rate = ""
        if self.seconds:
            rate = f": {format_bytes(self.bytes / self.seconds)}/s, {self.rows / self.seconds:,.0f} rows/s"
        delivered = (
            f"{format_count(self.batches, 'batch', 'batches')}, {format_count(self.rows, 'row')}, "
            f"{format_bytes(self.bytes)} in {format_count(self.epochs, 'epoch')}, {self.seconds:.1f} s{rate}"
        )
        share = format_share(self.stall_seconds, self.seconds)
        stalled = f"the consumer stalled {share} of the time, in {format_count(self.stalls, 'step')}"
        busy = max(0.0, self.seconds - self.stall_seconds)
        stages = [(stage, getattr(self, f"{stage}_seconds")) for stage in STAGES]
        spent: list[Part] = []
        if any(seconds for _, seconds in stages):
            spent = ["the waiting consumer, and workers, spent their time on", Bar(stages, format_seconds)]
        return Card(
            "LoaderStats",
            "",
            [
                f"{delivered}; {stalled}",
                Bar([("busy with batches", busy), ("stalled", self.stall_seconds)], format_seconds),
                *spent,
                Facts([("bottleneck", f"{self.bottleneck}: {self.advice}"), *self._facts()]),
            ],
        )

    def _facts(self) -> Iterator[tuple[str, str]]:
        waits = self.wait_p50_seconds, self.wait_p95_seconds, self.wait_p99_seconds
        if waits[-1]:
            shown = ", ".join(map(format_seconds, waits))
            yield "waits", f"{shown} at most, for 50, 95 and 99 of 100 batches"
        if self.rows:
            yield "age", f"{format_seconds(self.age_seconds)} since rows were published, on average"
        slots = (
            f"{format_bytes(self.slot_bytes)} for batches, grown {format_count(self.slot_growths, 'time')}"
        )
        private, mapped = format_bytes(self.private_bytes), format_bytes(self.file_bytes)
        yield "memory", f"{slots}; of the process {private} private, {mapped} of mapped files"
        if self.left_out_rows:
            rows = format_count(self.left_out_rows, "row")
            yield "left out", f"the oldest {rows} of the last epoch, to samplers"
        if self.left_out_items:
            yield "skipped", f"{format_count(self.left_out_items, 'item')} that could not be made"
        if self.unread_rows:
            yield "unread", f"{format_count(self.unread_rows, 'row')} left the cache before they were chosen"
        if self.unselected_rows:
            yield "not selected", f"{format_count(self.unselected_rows, 'row')} of the last epoch's segments"
        if self.held_up_seconds:
            yield "held up", f"samplers, for {format_seconds(self.held_up_seconds)}, by its lease"


class Meter:
    """Counters of one loader; any thread adds. The stats show the arguments as they are."""

    def __init__(
        self, workers: int = 0, shuffle: str | None = "rows", chosen_by: tuple[str, ...] = ()
    ) -> None:
        self.workers, self.shuffle, self.chosen_by = workers, shuffle, chosen_by
        self.choosing_seconds, self.repeats = 0.0, False
        self._lock = threading.RLock()  # a signal handler may ask, or close, while its thread is counting
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.epochs = self.batches = self.rows = self.nbytes = self.copied_bytes = self.stalls = 0
        self.epoch_seconds = self.stall_seconds = self.held_up_seconds = 0.0
        self.left_out_rows = self.unselected_rows = self.left_out_items = self.unread_rows = 0
        self._age_row_seconds = 0.0
        # Stages in progress, with their start, by thread: an entry that an interrupt left is soon replaced.
        self._stages: dict[int, tuple[str, float]] = {}
        self._waits: dict[int, float] = {}
        self.waited = [0] * _PLACES  # how many were of each length: see `_place_of`
        self.octaves = [0] * (len(WAITS) + 1)  # sums of them
        self._runs: dict[object, float] = {}
        # The next update of the page. During a wait each change is shown, until a batch is delivered.
        self._page: LoaderPage | None = None
        self._elsewhere: Callable[[], Iterable[tuple[str, float]]] = tuple
        self._due, self._shows_a_wait = math.inf, False
        forgets_in_child(self)

    def show_on(
        self, page: LoaderPage | None, elsewhere: Callable[[], Iterable[tuple[str, float]]] = tuple
    ) -> None:
        """Show the counts on a page from now on, or on none. Closes the page before it.

        Args:
            elsewhere: returns the stages in progress in other processes, as `stats` takes them.
        """
        with self._lock:
            before, self._page, self._elsewhere = self._page, page, elsewhere
            self._due, self._shows_a_wait = math.inf, False
        if before is not None:
            before.close()
        self.show()

    def show(self) -> None:
        """Write the counts to the loader's page, if it has one that is open."""
        page = self._page
        if page is None or not page.is_open:  # such as in a forked child
            return
        elsewhere = [*self._elsewhere()]
        with self._lock:
            counts = self.epochs, self.batches, self.rows, self.nbytes, self.stalls
            page.show(counts, self._times(elsewhere), self.octaves)
            self._due = Limits.current.clock() + _SHOW_SECONDS
            self._shows_a_wait = self._shows_a_wait or bool(self._waits)

    def _times(self, elsewhere: Iterable[tuple[str, float]]) -> dict[str, tuple[float, list[float]]]:
        """Return the seconds and the starts in progress of each stage, of the stall and of epochs."""
        at_it = [*self._stages.values(), *elsewhere]
        times = {
            name: (took, [since for stage, since in at_it if stage == name])
            for name, took in self.seconds.items()
        }
        times["seconds"] = self.epoch_seconds, [*self._runs.values()]
        times["stall"] = self.stall_seconds, [*self._waits.values()]
        return times

    def _wait_of(self, share: float) -> float:
        """Return the wait that so large a share of all calls did not exceed."""
        calls = max(self.batches + self.epochs, sum(self.waited))
        left = calls - math.ceil(share * calls)  # that may be longer
        for place in reversed(range(len(self.waited))):
            left -= self.waited[place]
            if left < 0:
                return _end_of(place)
        return 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time inside the `with` block for one of STAGES."""
        started = self.enter(name)
        try:
            yield
        finally:
            self.leave({name: Limits.current.clock() - started})

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """Count the time inside, within "start", as that of choosing an epoch's rows."""
        started = Limits.current.clock()
        try:
            yield
        finally:
            with self._lock:
                self.choosing_seconds += Limits.current.clock() - started

    def enter(self, name: str) -> float:
        """Begin a stage of this thread. Returns its start."""
        started = Limits.current.clock()
        with self._lock:
            self._stages[threading.get_ident()] = name, started
        if started > self._due or self._shows_a_wait:
            self.show()
        return started

    def leave(self, seconds: Mapping[str, float]) -> None:
        """Add seconds to stages, and end this thread's stage, if it has one."""
        with self._lock:
            self._stages.pop(threading.get_ident(), None)
            for name, more in seconds.items():
                self.seconds[name] += more

    @contextmanager
    def reading(self, read_mode: ReadMode) -> Iterator[None]:
        """Add the time inside to "gather", but the part that waited for the disk to "store".

        Args:
            read_mode: tells whether rows were missed in memory; the kernel counts pages of mapped files.
        """
        missed, before = read_mode.missed, resource.getrusage(resource.RUSAGE_THREAD)
        started = self.enter("gather")
        try:
            yield
        finally:
            wall_seconds = Limits.current.clock() - started
            now = resource.getrusage(resource.RUSAGE_THREAD)
            cpu_seconds = now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime
            had_faults = (now.ru_majflt, now.ru_inblock) > (before.ru_majflt, before.ru_inblock)
            was_on_disk = had_faults or read_mode.missed > missed
            on_disk = max(0.0, wall_seconds - cpu_seconds) if was_on_disk else 0.0
            self.leave({"store": on_disk, "gather": wall_seconds - on_disk})

    def waiting(self) -> Waiting:
        """Count the time inside as a wait of the consumer, for an `iter` or a step, even one that fails."""
        return Waiting(self)

    def deliver(self, made: ReadyBatch) -> None:
        """Count a batch that the consumer gets."""
        with self._lock:
            self.batches += 1
            self.rows += made.rows
            self.nbytes += made.nbytes
            self.copied_bytes += made.copied
            self._age_row_seconds += (Limits.current.wall_clock() - made.published) * made.rows
            if self._page is not None:
                self._page.count((self.epochs, self.batches, self.rows, self.nbytes, self.stalls))
        if self._shows_a_wait:
            self._shows_a_wait = False
            self.show()

    def begin_epoch(self, left_out_rows: int = 0, unselected_rows: int = 0) -> None:
        """Count an epoch, and the rows that its snapshot leaves out."""
        with self._lock:
            self.epochs += 1
            self.left_out_rows, self.unselected_rows = left_out_rows, unselected_rows

    def hold_up(self, seconds: float) -> None:
        """Add seconds for which writers waited for the lease of an epoch."""
        with self._lock:
            self.held_up_seconds += seconds

    def miss(self, rows: int) -> None:
        """Count rows that left the cache before a loader with `once` had them."""
        with self._lock:
            self.unread_rows += rows

    def leave_out(self, items: int) -> None:
        """Count items that could not be made, and are left out."""
        with self._lock:
            self.left_out_items += items

    def take_back_epoch(self) -> None:
        """Count an epoch as not begun, after all."""
        with self._lock:
            self.epochs -= 1

    def begin_run(self, run: object) -> None:
        """Count the time from now on as inside an epoch, or several; `run` tells it from others."""
        with self._lock:
            self._runs[run] = Limits.current.clock()
            self._due = 0.0 if self._page is not None else math.inf  # the wait that begins now may be long

    def end_run(self, run: object) -> None:
        """Count the time since `begin_run`. Idempotent."""
        with self._lock:
            if (started := self._runs.pop(run, None)) is not None:
                self.epoch_seconds += Limits.current.clock() - started
        self.show()

    def forget_in_child(self) -> None:
        """Drop the stages of other threads, and the lock: they stayed with the parent."""
        self._lock = threading.RLock()
        self._stages, self._waits, self._runs = {}, {}, {}
        self._page, self._due, self._shows_a_wait = None, math.inf, False

    def stats(
        self, slot_bytes: int, slot_growths: int, elsewhere: Iterable[tuple[str, float]] = ()
    ) -> LoaderStats:
        """Return the counts now, with stages in progress, here and in other processes (`elsewhere`)."""
        private_bytes, file_bytes = resident_bytes()
        with self._lock:
            now = Limits.current.clock()
            # A read in progress counts as "gather"; its end tells "store" from it.
            stages = {
                name: took + sum(now - began for began in since)
                for name, (took, since) in self._times(elsewhere).items()
            }
            seconds, stall_seconds = stages.pop("seconds"), stages.pop("stall")
            stalls = self.stalls + sum(now - began > _HAND_OVER_SECONDS for began in self._waits.values())
            return LoaderStats(
                epochs=self.epochs,
                batches=self.batches,
                rows=self.rows,
                bytes=self.nbytes,
                seconds=seconds,
                stall_seconds=stall_seconds,
                bottleneck=bottleneck_of(self.batches, stalls, seconds, stall_seconds, stages),
                stalls=stalls,
                copied_bytes=self.copied_bytes,
                **{f"{name}_seconds": took for name, took in stages.items()},
                age_seconds=self._age_row_seconds / self.rows if self.rows else 0.0,
                slot_bytes=slot_bytes,
                slot_growths=slot_growths,
                private_bytes=private_bytes,
                file_bytes=file_bytes,
                workers=self.workers,
                shuffle=self.shuffle,
                left_out_rows=self.left_out_rows,
                unselected_rows=self.unselected_rows,
                held_up_seconds=self.held_up_seconds,
                choosing_seconds=self.choosing_seconds,
                chosen_by=self.chosen_by,
                repeats=self.repeats,
                left_out_items=self.left_out_items,
                unread_rows=self.unread_rows,
                wait_p50_seconds=self._wait_of(0.5),
                wait_p95_seconds=self._wait_of(0.95),
                wait_p99_seconds=self._wait_of(0.99),
            )


def bottleneck_of(
    batches: int, stalls: int, seconds: float, stall_seconds: float, stages: Mapping[str, float]
) -> str:
    """Return the bottleneck, as `LoaderStats` names it; `stages` are the seconds of each of STAGES."""
    if not batches and not stalls:
        return "none"
    if stall_seconds < _NO_STALL * seconds:
        return "consumer" if batches else "none"
    return max(stages, key=lambda name: stages[name])


def _place_of(seconds: float) -> int:
    """Return the place of a wait among the counts: each octave of WAITS has _STEPS places of equal width.

    As HdrHistogram's buckets (hdrhistogram.org): so a length is known to an eighth, at any scale.
    """
    part, octave = math.frexp(seconds * 1e6)  # seconds are part * 2**octave us, and part is in [1/2, 1)
    if octave <= 0:
        return int(seconds * 1e6 * _STEPS)  # below a microsecond
    place = _STEPS * octave + int((2 * part - 1) * _STEPS)
    return place if place < _PLACES else _PLACES - 1


def _end_of(place: int) -> float:
    """Return the longest wait, in seconds, that `_place_of` puts at a place."""
    octave, step = divmod(place, _STEPS)
    if not octave:
        return (step + 1) / _STEPS * 1e-6
    return float(2 ** (octave - 1) * (1 + (step + 1) / _STEPS) * 1e-6)


class Waiting:
    """A wait of the consumer: a reusable context manager."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        meter, started = self._meter, Limits.current.clock()
        with meter._lock:
            meter._waits[threading.get_ident()] = started
        if started > meter._due:
            meter.show()

    def __exit__(self, *_: object) -> None:
        meter, now = self._meter, Limits.current.clock()
        with meter._lock:
            seconds = now - meter._waits.pop(threading.get_ident(), now)
            meter.stall_seconds += seconds
            meter.stalls += seconds > _HAND_OVER_SECONDS
            place = _place_of(seconds)
            meter.waited[place] += 1
            meter.octaves[place // _STEPS] += 1
        if meter._shows_a_wait:
            meter.show()


def resident_bytes() -> tuple[int, int]:
    """This process' resident memory: private, and of files and shared memory."""
    _, pages, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (pages - shared) * PAGE_BYTES, shared * PAGE_BYTES
