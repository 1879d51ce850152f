"""What observations tell one after another: rates."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from arrowcache.explore.observation import History, Observation, SeenLoader
from arrowcache.reading.stats import STAGES
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.overview import CacheStats

KIB = 1024


def segments(first: int, last: int, nbytes: int = KIB) -> tuple[SegmentInfo, ...]:
    return tuple(SegmentInfo(seq, 16, "", nbytes, nbytes, 0.0) for seq in range(first, last + 1))


def loader(seconds: float, stall: float, nbytes: int, batches: int = 1, key: int = 1, **stages) -> SeenLoader:
    return SeenLoader(
        key, 7, "train", 0, "rows", 1, batches, batches * 16, nbytes, seconds, stall, int(stall > 0), False,
        "none", 0.0, dict.fromkeys(STAGES, 0.0) | stages,
    )  # fmt: skip


def seen(clock: float, first: int, last: int, **parts) -> Observation:
    listed = segments(first, last)
    stats = CacheStats(
        100 * KIB, len(listed) * KIB + 5, len(listed) * KIB, 0, 0, len(listed), 16 * len(listed),
        first if listed else None, last + 1, 0, 0, inserted_rows=16 * (last + 1), evicted_rows=16 * first,
    )  # fmt: skip
    whole = Observation(1e9 + clock, clock, Path("/cache"), (1, 2), stats, listed, (), (), ())
    return dataclasses.replace(whole, **parts)


def test_rates_are_of_what_came_and_went_between_two_observations():
    history = History()
    first = history.add(seen(10.0, 0, 9))
    assert (first.seconds, first.published_bytes_per_second, first.evicted_bytes_per_second) == (0, 0, 0)
    moment = history.add(seen(12.0, 4, 15))
    assert (moment.seconds, moment.published_bytes, moment.evicted_bytes) == (2.0, 6 * KIB, 4 * KIB)
    assert moment.published_bytes_per_second == 3 * KIB
    assert moment.evicted_bytes_per_second == 2 * KIB
    assert (moment.stats.published_bytes, moment.stats.capacity_bytes) == (12 * KIB, 100 * KIB)
    assert list(history) == [first, moment]


def test_it_may_go_on_while_it_is_read():
    history = History()
    history.add(seen(0.0, 0, 3))
    assert [history.add(seen(1.0, 0, 3)).seconds for _ in history] == [1.0]
    assert len(history) == 2


def test_what_came_and_went_between_two_observations_counts_with_the_others_mean():
    history = History()
    history.add(seen(0.0, 0, 3))
    moment = history.add(seen(1.0, 20, 23))
    assert (moment.published_bytes, moment.evicted_bytes) == (20 * KIB, 20 * KIB)


def test_an_empty_cache_has_no_rates():
    history = History()
    history.add(seen(0.0, 0, -1))
    moment = history.add(seen(1.0, 0, -1))
    assert (moment.published_bytes, moment.evicted_bytes, moment.loaders) == (0, 0, ())


def test_another_cache_in_the_same_place_begins_it_anew():
    history = History()
    history.add(seen(0.0, 50, 59))
    history.add(seen(1.0, 50, 60))
    assert history.add(seen(2.0, 0, 3)).seconds == 0
    assert len(history) == 1
    history.add(seen(3.0, 0, 4))
    assert history.add(seen(4.0, 0, 5, cache=(1, 99))).seconds == 0
    assert len(history) == 1


def test_no_more_moments_are_kept_than_its_limit():
    history = History(limit=3)
    for clock in range(10):
        history.add(seen(float(clock), 0, 3))
    assert [moment.time for moment in history] == [1e9 + 7, 1e9 + 8, 1e9 + 9]


def test_a_loaders_rates_are_of_the_time_between():
    history = History()
    history.add(seen(0.0, 0, 3, loaders=(loader(10.0, 1.0, 1000, batches=10),)))
    two = loader(12.0, 2.5, 5000, batches=30, gather=1.0, store=0.2), loader(1.0, 0.0, 600, key=2)
    moment = history.add(seen(2.0, 0, 3, loaders=two))
    first, second = moment.loaders
    assert (first.bytes_per_second, first.stall_share) == (2000, 0.75)
    assert first.bottleneck == "gather"
    assert (second.bytes_per_second, second.stall_share, second.bottleneck) == (300, 0, "consumer")
    assert moment.delivered_bytes_per_second == 2300
    moment = history.add(seen(4.0, 0, 3, loaders=two[:1]))
    assert [rate.bottleneck for rate in moment.loaders] == ["none"], "it is outside an epoch"
    assert moment.loaders[0].bytes_per_second == 0


def test_a_step_that_takes_longer_than_a_look_is_the_consumers():
    history = History()
    history.add(seen(0.0, 0, 3, loaders=(loader(10.0, 1.0, 1000),)))
    (rate,) = history.add(seen(1.0, 0, 3, loaders=(loader(11.0, 1.0, 1000),))).loaders
    assert (rate.bottleneck, rate.stall_share) == ("consumer", 0)


def test_no_share_is_more_than_all():
    history = History()
    history.add(seen(0.0, 0, 3, loaders=(loader(1.0, 1.0, 10),)))
    (rate,) = history.add(seen(1.0, 0, 3, loaders=(loader(4.0, 4.0, 10),))).loaders
    assert rate.stall_share == 1
    (rate,) = history.add(seen(2.0, 0, 3, loaders=(loader(4.5, 3.9, 10),))).loaders
    assert rate.stall_share == 0
