"""What a loader tells of itself: counts, what to speed up, ages, and memory."""

from __future__ import annotations

import dataclasses
import mmap
import os
import resource
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from helpers import DEADLINE_SECONDS, face, limit, make_cache, publish, segment_files, wait_until
from markup import seen

import arrowcache as ac
from arrowcache import Loader
from arrowcache.native import engine, maps
from arrowcache.reading.assembly import ReadyBatch
from arrowcache.reading.gather import ReadMode
from arrowcache.reading.stats import STAGES, LoaderStats, Meter, resident_bytes

ROW_BYTES = 8 + 1024
KIB, MIB = 1 << 10, 1 << 20
NOTHING: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(LoaderStats)}
NOTHING["shuffle"] = "rows"


class Clock:
    """Injected in place of the modules `time` and `resource`: what passes, and what a thread did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.cpu = 1000.0
        self.disk_faults = self.disk_blocks = 0
        limit(monkeypatch, clock=lambda: self.wall, wall_clock=lambda: self.wall)
        monkeypatch.setattr(resource, "getrusage", self.usage)

    def usage(self, who: int) -> SimpleNamespace:
        assert who == resource.RUSAGE_THREAD, "of this thread alone"
        return SimpleNamespace(
            ru_utime=self.cpu / 4, ru_stime=self.cpu * 3 / 4, ru_majflt=self.disk_faults,
            ru_inblock=self.disk_blocks,
        )  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def made(rows: int = 10, nbytes: int = 1000, copied: int = 600, published: float = 990.0) -> ReadyBatch:
    return ReadyBatch({}, rows, nbytes, copied, published, None)


def wait(meter: Meter, clock: Clock, seconds: float) -> None:
    with meter.waiting():
        clock.wall += seconds


def run(meter: Meter, clock: Clock, seconds: float) -> None:
    meter.begin_run("an epoch")
    clock.wall += seconds
    meter.end_run("an epoch")


# the meter


def test_a_stage_counts_what_passes_in_it_even_if_it_fails(clock):
    meter = Meter()

    def work() -> None:
        with meter.stage("transform"):
            clock.wall += 2
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            work()
    meter.leave({"samplers": 0.5})
    assert {stage: s for stage, s in meter.seconds.items() if s} == {"samplers": 0.5, "transform": 4.0}


@pytest.mark.parametrize(
    ("disk_faults", "disk_blocks", "store", "gather"),
    [(0, 0, 0.0, 5.0), (1, 0, 3.0, 2.0), (0, 8, 3.0, 2.0)],
    ids=["in memory", "from disk", "from disk, asked for before"],
)
def test_reading_counts_as_store_what_it_waited_for_the_disk_and_as_gather_the_rest(
    clock, disk_faults, disk_blocks, store, gather
):
    meter = Meter()
    with meter.reading(ReadMode()):
        clock.wall += 5
        clock.cpu += 2
        clock.disk_faults += disk_faults
        clock.disk_blocks += disk_blocks
    assert (meter.seconds["store"], meter.seconds["gather"]) == (store, gather)


def test_a_clock_of_the_thread_that_is_coarser_than_the_wall_makes_no_time_negative(clock):
    meter = Meter()
    with meter.reading(ReadMode()):
        clock.wall += 1
        clock.cpu += 2
        clock.disk_faults += 1
    assert (meter.seconds["store"], meter.seconds["gather"]) == (0.0, 1.0)


def test_deliveries_add_up_and_ages_are_weighted_by_rows(clock):
    meter = Meter()
    meter.begin_epoch()
    run(meter, clock, 2.0)
    meter.deliver(made(rows=30, published=clock.wall - 10.0))
    wait(meter, clock, 0.25)
    meter.deliver(made(rows=10, published=clock.wall - 50.0, copied=0))
    meter.begin_run("a second one")
    clock.wall += 1.0
    stats = meter.stats(77, 5)
    assert (stats.epochs, stats.batches, stats.rows, stats.bytes, stats.copied_bytes) == (1, 2, 40, 2000, 600)
    assert (stats.seconds, stats.stall_seconds, stats.stalls) == (3.0, 0.25, 1)
    assert stats.age_seconds == (30 * 10 + 10 * 50) / 40
    meter.end_run("a second one")
    meter.end_run("a second one")
    clock.wall += 1.0
    assert meter.stats(77, 5).seconds == 3.0, "counted once, and no longer"
    assert (stats.slot_bytes, stats.slot_growths) == (77, 5)


def test_handing_a_batch_over_is_no_stall(clock):
    meter = Meter()
    for waited in (1e-6, 1e-4, 0.01, 1.0, 0.5):
        wait(meter, clock, waited)
    stats = meter.stats(0, 0)
    assert stats.stalls == 3
    assert stats.stall_seconds == pytest.approx(1.510101)


@pytest.mark.parametrize("seconds", [1.2e-7, 1e-6, 3e-6, 1.1e-4, 0.02, 0.7, 30.0, 60.0])
def test_percentiles_of_waits_are_known_to_an_eighth(seconds, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    limit(monkeypatch, clock=lambda: clock.now)
    meter = Meter()
    assert meter.stats(0, 0).wait_p99_seconds == 0.0
    for number in range(100):
        with meter.waiting():
            clock.now += seconds if number % 10 == 0 else 0.0
        meter.deliver(ReadyBatch({}, 16, 1000, 0, 0.0, None))
    stats = meter.stats(0, 0)
    assert stats.wait_p50_seconds <= 1e-6 / 8
    assert stats.wait_p95_seconds == stats.wait_p99_seconds == pytest.approx(seconds, rel=0.13, abs=1.3e-7)
    assert stats.wait_p99_seconds >= seconds * 0.999


def test_a_batch_that_was_there_is_no_wait(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    limit(monkeypatch, clock=lambda: clock.now)
    meter = Meter()
    with meter.waiting():
        clock.now += 5
    for _ in range(199):
        meter.deliver(ReadyBatch({}, 16, 1000, 0, 0.0, None))
    stats = meter.stats(0, 0)
    assert (stats.wait_p50_seconds, stats.wait_p95_seconds, stats.wait_p99_seconds) == (0.0, 0.0, 0.0)
    with meter.waiting():
        clock.now += 5
    assert 5 <= meter.stats(0, 0).wait_p99_seconds < 6


def test_threads_lose_nothing_of_what_they_add():
    meter = Meter()

    def add() -> None:
        for _ in range(5000):
            meter.leave({"gather": 1.0})
            meter.deliver(made())

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.seconds["gather"] == 20_000
    assert (meter.batches, meter.rows) == (20_000, 200_000)


@pytest.mark.parametrize("stage", STAGES)
def test_the_bottleneck_is_where_the_loaders_threads_spent_most_if_the_consumer_waited(clock, stage):
    meter = Meter()
    meter.leave(dict.fromkeys(STAGES, 1.0))
    meter.leave({stage: 0.1})
    run(meter, clock, 9.0)
    wait(meter, clock, 1.0)
    meter.deliver(made())
    assert meter.stats(0, 0).bottleneck == stage


def test_the_consumer_is_the_bottleneck_while_it_hardly_ever_waits(clock):
    meter = Meter()
    meter.leave({"transform": 100.0})
    run(meter, clock, 10.0)
    wait(meter, clock, 0.49)
    meter.deliver(made())
    assert meter.stats(0, 0).bottleneck == "consumer"
    wait(meter, clock, 0.02)
    assert meter.stats(0, 0).bottleneck == "transform"


def test_before_a_batch_is_delivered_or_waited_for_nothing_is_the_bottleneck(clock):
    meter = Meter()
    meter.leave({"store": 100.0})
    run(meter, clock, 50.0)
    assert meter.stats(0, 0).bottleneck == "none"
    wait(meter, clock, 1.0)
    assert meter.stats(0, 0).bottleneck == "none", "it came to other things for long"
    wait(meter, clock, 10.0)
    assert meter.stats(0, 0).bottleneck == "store"


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_in_progress_counts_up_to_now_and_then_once(clock, stage):
    meter = Meter()
    meter.leave({other: 5.0 for other in STAGES if other != stage})
    meter.begin_run("one")
    with meter.waiting():
        with meter.reading(ReadMode()) if stage == "gather" else meter.stage(stage):
            clock.wall += 4.0
            assert meter.stats(0, 0).bottleneck != stage
            clock.wall += 3.0
            stats = meter.stats(0, 0)
            assert stats.bottleneck == stage
            assert getattr(stats, f"{stage}_seconds") == 7.0
            assert (stats.seconds, stats.stall_seconds, stats.stalls, stats.batches) == (7.0, 7.0, 1, 0)
        clock.wall += 1.0
    stats = meter.stats(0, 0)
    assert getattr(stats, f"{stage}_seconds") == 7.0
    assert (stats.seconds, stats.stall_seconds, stats.stalls) == (8.0, 8.0, 1)


def test_all_threads_that_are_busy_with_a_stage_count(clock):
    meter, go_on, busy = Meter(), threading.Event(), threading.Barrier(4)

    def work() -> None:
        with meter.stage("transform"):
            busy.wait(DEADLINE_SECONDS)
            assert go_on.wait(DEADLINE_SECONDS)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    busy.wait(DEADLINE_SECONDS)
    clock.wall += 2.0
    assert meter.stats(0, 0).transform_seconds == 6.0
    go_on.set()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    clock.wall += 2.0
    assert meter.stats(0, 0).transform_seconds == 6.0


def test_a_forked_child_does_not_count_what_the_parents_threads_had_in_progress(clock):
    meter = Meter()
    meter.begin_run("one")
    with meter.waiting(), meter.stage("transform"):
        clock.wall += 3.0
        meter.forget_in_child()
        clock.wall += 4.0
        stats = meter.stats(0, 0)
    assert (stats.seconds, stats.stall_seconds, stats.transform_seconds) == (0.0, 0.0, 0.0)


# what to do


@pytest.mark.parametrize(
    ("bottleneck", "words"),
    [
        ("none", "no batch"),
        ("consumer", "training step"),
        ("samplers", "sampler workers"),
        ("store", "shuffle='window'"),
        ("gather", "fewer columns"),
        ("transform", "workers=2"),
        ("start", "worker processes"),
    ],
)
def test_every_bottleneck_has_an_advice_which_its_text_shows(bottleneck, words):
    stats = LoaderStats(**NOTHING | {"bottleneck": bottleneck})
    assert words in stats.advice
    assert f"{bottleneck}: {stats.advice}" in str(stats)


def test_views_are_not_blamed_on_copying():
    numbers = NOTHING | {"bottleneck": "gather", "bytes": MIB}
    assert "larger batch_size" in LoaderStats(**numbers).advice
    assert "copying is" not in LoaderStats(**numbers).advice
    assert "copying is" in LoaderStats(**numbers | {"copied_bytes": 1}).advice


def test_nobody_is_advised_to_do_what_was_done():
    numbers = NOTHING | {"bottleneck": "transform"}
    assert "workers=2" in LoaderStats(**numbers).advice
    assert "more than 3 workers" in LoaderStats(**numbers | {"workers": 3}).advice
    disk = numbers | {"bottleneck": "store"}
    assert "shuffle='window'" in LoaderStats(**disk | {"shuffle": "rows"}).advice
    for shuffle in ("window", None):
        assert "shuffle" not in LoaderStats(**disk | {"shuffle": shuffle}).advice


def test_who_chooses_the_rows_of_epochs_is_named_where_that_takes_longest():
    start = NOTHING | {"bottleneck": "start", "start_seconds": 2.0, "epochs": 9}
    assert "take them from loader.repeat()" in LoaderStats(**start).advice
    assert "repeat()" not in LoaderStats(**start | {"repeats": True}).advice
    for name, words in (
        ("weights", "a larger epoch_rows"),
        ("rows", "a pyarrow.compute expression"),
        ("batch_tokens", "longer epochs"),
        ("an expression in rows", "longer epochs"),
        ("where", "a quicker where"),
    ):
        chosen = start | {"choosing_seconds": 1.5, "chosen_by": (name,)}
        advice = LoaderStats(**chosen | {"repeats": True}).advice
        assert f"choosing the rows of epochs by {name} is the limit" in advice
        assert words in advice
        assert "repeat()" not in advice
        assert "loader.repeat()" in LoaderStats(**chosen).advice
        assert words not in LoaderStats(**chosen | {"choosing_seconds": 0.5}).advice


def test_an_expression_is_not_advised_to_be_one(cache):
    with Loader(cache, 16, rows=pc.field("id") >= 0) as loader:
        (name,) = loader.stats().chosen_by
    chosen = {"bottleneck": "start", "start_seconds": 2.0, "choosing_seconds": 1.5, "chosen_by": (name,)}
    assert "pyarrow.compute" not in LoaderStats(**NOTHING | chosen).advice


def test_the_stages_of_a_loader_without_workers_are_parts_of_its_stall(tmp_path):
    """Also what `iter` does for the first batches, such as to draw their rows among many."""
    schema = ac.Schema({"id": ac.Tensor("int64")})
    with ac.Cache.create(tmp_path / "many", schema, capacity="64MiB", segment_bytes="8MiB") as cache:
        with cache.writer() as writer:
            writer.extend(id=np.arange(500_000))
        with Loader(cache, 16, rows=pc.field("id") >= 7, epoch_rows=32) as loader:
            for _ in range(20):
                iter(loader)
            stats = loader.stats()
    assert sum(getattr(stats, f"{stage}_seconds") for stage in STAGES) <= stats.stall_seconds


@pytest.mark.parametrize("endless", [True, False])
@pytest.mark.parametrize("argument", ["rows", "weights", "ranks", "where"])
def test_what_an_epoch_waits_for_as_it_begins_is_named(cache, argument, endless):
    """Of each second of stall most is a stage's: here nearly all passes where rows are chosen."""
    name = "rows" if argument == "ranks" else argument
    options = {"batch_size": 16, name: lambda columns: time.sleep(0.02) or columns["id"] >= 0}
    if argument == "where":
        options["where"] = lambda segment: time.sleep(0.02) or segment.rows > 0
    if argument == "ranks":
        options |= {"rank": 0, "world_size": 2, "run_id": "job"}
        other = Loader(cache, **options | {"rank": 1})
        thread = threading.Thread(target=lambda: iter(other))
        thread.start()
    with Loader(cache, **options) as loader:
        batches = loader.repeat() if endless else (batch for _ in range(3) for batch in loader)
        for _, _ in zip(range(9 if argument == "ranks" else 25), batches, strict=False):
            pass
        stats = loader.stats()
    if argument == "ranks":
        thread.join(DEADLINE_SECONDS)
        other.close()
    named = sum(getattr(stats, f"{stage}_seconds") for stage in STAGES)
    assert named > stats.stall_seconds / 2
    assert stats.choosing_seconds > stats.start_seconds / 2
    assert stats.bottleneck == "start"
    assert stats.repeats is endless
    assert "choosing the rows of epochs by" in stats.advice


@pytest.mark.parametrize(
    ("shuffle", "row_bytes", "words"),
    [
        ("rows", 64 * KIB, "shuffle='window' reads it in order, shuffle='rows' at random"),
        ("rows", 100, "each row of 100 B costs a page of"),
        ("blocks", 64 * KIB, "shuffle='window' reads it in order, shuffle='blocks' in short runs"),
        ("window", 100, "it is read in order already"),
        (None, 100, "it is read in order already"),
    ],
)
def test_where_the_disk_is_the_limit_the_advice_says_what_another_shuffle_gives(shuffle, row_bytes, words):
    numbers = NOTHING | {"bottleneck": "store"}
    stats = LoaderStats(**numbers | {"shuffle": shuffle, "rows": 10, "bytes": 10 * row_bytes})
    assert stats.advice.startswith("the disk is the limit: ")
    assert words in stats.advice
    assert "or more memory" in stats.advice
    costs_a_page = shuffle == "rows" and row_bytes < mmap.PAGESIZE
    assert ("costs a page" in stats.advice) == costs_a_page


def test_a_loaders_stats_say_how_it_was_made(tmp_path):
    cache = make_cache(tmp_path / "cache")
    with Loader(cache, 4, shuffle="window", workers=2, worker_type="thread") as loader:
        assert (loader.stats().workers, loader.stats().shuffle) == (2, "window")


def test_a_notebook_shows_stall_stages_and_advice():
    stats = LoaderStats(**NOTHING | {
        "epochs": 1, "batches": 3, "rows": 192, "bytes": 6 * MIB, "seconds": 2.0, "stall_seconds": 0.5,
        "stalls": 2, "bottleneck": "gather", "gather_seconds": 3.0, "store_seconds": 1.0, "age_seconds": 90.0,
        "slot_bytes": MIB, "private_bytes": 2 * MIB, "file_bytes": 3 * MIB,
    })  # fmt: skip
    shown = seen(stats._repr_html_())
    for words in (
        "3 batches, 192 rows, 6.0 MiB in 1 epoch, 2.0 s: 3.0 MiB/s, 96 rows/s",
        "stalled 25 % of the time, in 2 steps",
        "stalled 500 ms", "busy with batches 1.5 s", "gather 3.0 s", "store 1.0 s", stats.advice,
        "1.5 min since",
        "1.0 MiB for batches", "2.0 MiB private", "3.0 MiB of mapped files",
    ):  # fmt: skip
        assert words in shown.text
    assert "transform" not in shown.text
    widths = [style.split(";")[0] for style in shown.values("style") if style.startswith("width: ")]
    assert widths == ["width: 75.000%", "width: 25.000%", "width: 25.000%", "width: 75.000%"]
    _, stalled, _, spent, bottleneck, age, memory = str(stats).splitlines()
    assert stalled == f"[{'█' * 30}{'▓' * 10}] █ busy with batches 1.5 s, ▓ stalled 500 ms"
    assert spent == f"[{'▒' * 10}{'░' * 30}] ▒ store 1.0 s, ░ gather 3.0 s"
    assert bottleneck == f"bottleneck  gather: {stats.advice}"
    assert age.startswith("age         1.5 min")
    assert memory.startswith("memory      1.0 MiB for batches")


def test_statistics_of_nothing_are_shown(tmp_path):
    stats = Meter().stats(0, 0)
    assert "0 batches" in seen(stats._repr_html_()).text
    with Loader(make_cache(tmp_path / "cache"), 4) as loader:
        assert "no batch was delivered" in seen(loader.stats()._repr_html_()).text


def test_stats_are_frozen_and_begin_with_the_fields_of_the_design():
    names = [field.name for field in dataclasses.fields(LoaderStats)]
    assert names[:7] == ["epochs", "batches", "rows", "bytes", "seconds", "stall_seconds", "bottleneck"]
    stats = Meter().stats(0, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.rows = 1
    assert str(stats).startswith("0 batches, 0 rows, 0 B in 0 epochs, 0.0 s; ")


# of a loader


@pytest.mark.slow
def test_a_loader_that_waits_for_rows_blames_the_samplers(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 1)
    looks: list[float] = []
    delivered = []
    began = time.monotonic()
    with Loader(cache, 16, wait_rows=32, where=lambda _: looks.append(time.monotonic()) or True) as loader:
        thread = threading.Thread(target=lambda: delivered.extend(loader))
        thread.start()
        wait_until(lambda: len(looks) > 2, "the loader to look again")
        while looks[-1] - looks[0] < 2 + 3 * (looks[0] - began):  # longer than all else takes
            time.sleep(0.01)
        publish(cache, 1)
        thread.join(DEADLINE_SECONDS)
        stats = loader.stats()
    assert len(delivered) == 2
    assert stats.samplers_seconds > 0
    assert stats.bottleneck == "samplers"
    assert stats.stalls >= 1
    assert stats.stall_seconds >= stats.samplers_seconds


@pytest.mark.parametrize("stage", ["transform", "gather", "start"])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_hangs_before_the_first_batch_is_the_bottleneck_while_it_does(
    cache, monkeypatch, stage, workers
):
    go_on, batches, opening = threading.Event(), [], maps.File.open

    def hang(*args: Any) -> Any:
        assert go_on.wait(DEADLINE_SECONDS)
        return args[0]

    if stage == "gather":
        help_ = engine.quick.engine_help
        monkeypatch.setattr(engine.quick, "engine_help", lambda *job: not go_on.is_set() or help_(*job))
        monkeypatch.setattr(engine.library, "engine_take", lambda *job: bool(hang(1)))
    elif stage == "start":
        monkeypatch.setattr(maps.File, "open", lambda *file: opening(hang(file[0]), *file[1:]))
    transform = hang if stage == "transform" else None
    options = {"shuffle": "window", "workers": workers, "worker_type": "thread"}
    with Loader(cache, 16, transform=transform, **options) as loader:
        consumer = threading.Thread(target=lambda: batches.extend(loader))
        consumer.start()
        wait_until(lambda: loader.stats().bottleneck == stage, "what hangs to be blamed")
        stats = loader.stats()
        assert stats.batches == 0
        assert 0 < stats.stall_seconds <= stats.seconds
        go_on.set()
        consumer.join(DEADLINE_SECONDS)
    assert len(batches) == 10


def test_where_no_row_came_from_the_disk_the_beginning_of_an_epoch_is_no_disks(cache):
    with Loader(cache, 16) as loader:
        for _ in loader:
            pass
        stats = loader.stats()
    assert stats.store_seconds == 0
    assert stats.start_seconds > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_whose_consumer_is_busy_blames_the_consumer(cache, workers, clock):
    with Loader(cache, 16, workers=workers, worker_type="thread", prefetch=10) as loader:
        for _ in loader:
            clock.wall += 10.0  # of training
        stats = loader.stats()
    assert stats.batches == 10
    assert stats.bottleneck == "consumer"


@pytest.mark.parametrize("name", ["Loader", "torch.Loader"])
@pytest.mark.parametrize("shuffle", ["rows", "window", "blocks", None])
def test_ages_count_from_publication_to_delivery(tmp_path, name, shuffle):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 4)
    now = time.time()
    for number, path in enumerate(segment_files(cache)):
        os.utime(path, (now, now - 1000.0 * (number + 1)))
    cache = ac.Cache.open(cache.path)  # which has not seen their times yet
    with face(name)(cache, 8, shuffle=shuffle, with_ids=True) as loader:
        batches = list(loader)
        stats = loader.stats()
    ages = np.concatenate([np.asarray(batch["_age_seconds"]) for batch in batches])
    places = np.concatenate([np.asarray(batch["_seq"]) for batch in batches])
    assert np.all(ages - 1000.0 * (places + 1) >= -1)
    assert np.all(ages - 1000.0 * (places + 1) < 3 * DEADLINE_SECONDS)
    assert 2500 - 1 <= stats.age_seconds < 2500 + 3 * DEADLINE_SECONDS


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("shuffle", "copied"), [("rows", 1), ("window", 1), ("blocks", 0), (None, 0)])
def test_what_was_copied_is_counted_and_views_are_not(cache, shuffle, copied, workers):
    with Loader(cache, 16, shuffle=shuffle, workers=workers, worker_type="thread") as loader:
        epochs = 2
        for _ in range(epochs):
            for batch in loader:
                assert len(batch["id"]) == 16
        stats = loader.stats()
        if not copied:  # every run of blocks that is joined from ends of segments is copied
            assert stats.copied_bytes <= stats.bytes // 2
    assert stats.bytes == epochs * 160 * ROW_BYTES
    assert stats.copied_bytes == (stats.bytes if copied else 0)


def test_slots_are_added_while_the_consumer_keeps_batches_and_not_otherwise(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="2MiB")
    publish(cache, 40)
    with Loader(cache, 8, prefetch=1) as loader:
        for _ in range(5):
            for batch in loader:
                assert len(batch["id"]) == 8
        del batch
        before = loader.stats()
        for _ in range(5):
            for batch in loader:
                assert len(batch["id"]) == 8
        assert loader.stats().slot_growths == before.slot_growths
        assert loader.stats().slot_bytes == before.slot_bytes > 0
        kept = [list(loader) for _ in range(5)]
        after = loader.stats()
        assert after.slot_growths > before.slot_growths
        assert after.slot_bytes > before.slot_bytes
        assert after.slot_bytes >= sum(len(epoch) for epoch in kept) * 8 * ROW_BYTES


def test_memory_of_its_own_and_of_files_are_told_apart(tmp_path):
    private, files = resident_bytes()
    own = np.frombuffer(mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    own[:] = 1  # NumPy might have it of what this process has freed
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * MIB))
    assert resident_bytes()[0] - private > 48 * MIB
    assert resident_bytes()[1] - files < 16 * MIB
    mapped = np.memmap(path, np.uint8, "r")
    assert int(mapped.sum()) == 0
    assert resident_bytes()[1] - files > 48 * MIB
    assert own[-1] == 1
