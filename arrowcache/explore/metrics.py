"""Metrics: a cache, its loaders and its samplers at one moment, as OpenMetrics text for Prometheus.

The text is that of OpenMetrics 1.0 (openmetrics.io): each family with its type, its unit and a sentence, then
a line for each value, and `# EOF`. It has the numbers of `observe`: loaders and samplers of this user on this
machine, each labelled with its process. Counters of a loader begin anew with the loader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from arrowcache.explore.columns import AnyCache
from arrowcache.explore.observation import Observation, SamplerAtWork, SeenLoader, observe
from arrowcache.storage.counters import WAITS

_UNITS = ("bytes", "seconds")


class _Family(NamedTuple):
    """A metric: the values of one name, each with its labels."""

    name: str
    kind: str  # gauge, counter or histogram
    means: str
    values: Sequence[tuple[str, Mapping[str, object], float]]  # suffix of the name, labels, value

    def lines(self) -> Iterator[str]:
        name = f"arrowcache_{self.name}"
        yield f"# TYPE {name} {self.kind}"
        if unit := next((unit for unit in _UNITS if name.endswith(f"_{unit}")), ""):
            yield f"# UNIT {name} {unit}"
        yield f"# HELP {name} {self.means}."
        for suffix, labels, value in self.values:
            inside = ",".join(f'{label}="{_escaped(str(text))}"' for label, text in labels.items())
            yield f"{name}{suffix}{{{inside}}} {value!r}"


def metrics(cache: AnyCache) -> str:
    """Return what is known of a cache and of those who use it, as OpenMetrics text.

    Of the cache: bytes, rows and segments that it holds, and that came, were served and left. Of each loader
    (not of dataloader(), whose workers are torch's), by process: batches, rows and bytes, the seconds of each
    stage, the stalls, and a histogram of the waits of `iter` and `next` that did not find a batch ready. Of
    each sampler at work: its rows and its reads.

    Blocks: as `explore.observe`: for cache.lock, and some milliseconds.
    Raises: FileNotFoundError: no such cache. LockTimeoutError: names the holder.
    """
    seen = observe(cache)
    families = (*_of_cache(seen), *_of_loaders(seen.loaders, str(seen.path)), *_of_samplers(seen))
    return "".join(f"{line}\n" for family in families if family.values for line in family.lines()) + "# EOF\n"


def _of_cache(seen: Observation) -> Iterator[_Family]:
    stats, labels = seen.stats, {"cache": seen.path}

    def family(kind: str, name: str, value: float, means: str) -> _Family:
        return _Family(name, kind, means, [("_total" if kind == "counter" else "", labels, value)])

    yield family("gauge", "capacity_bytes", stats.capacity_bytes, "The bytes that the folder may take")
    yield family("gauge", "allocated_bytes", stats.allocated_bytes, "The bytes that the folder takes")
    yield family("gauge", "published_bytes", stats.published_bytes, "The bytes of published segments")
    yield family("gauge", "incoming_bytes", stats.incoming_bytes, "The bytes of half-written segments")
    yield family("gauge", "leased_bytes", stats.leased_bytes, "The bytes that somebody leases")
    yield family("gauge", "segments", stats.segments, "Published segments")
    yield family("gauge", "rows", stats.rows, "Published rows")
    yield family("gauge", "quarantined_segments", stats.quarantined, "Segments that failed a check")
    yield family("gauge", "waiting_writers", stats.waiting_writers, "Writers that wait for room or training")
    yield family("gauge", "leases", len(seen.leases), "Leases, of any process")
    yield family(
        "gauge", "times_served", stats.times_served, "Epochs that read a row that is here, on average"
    )
    yield family("counter", "inserted_rows", stats.inserted_rows, "Rows that were published")
    yield family("gauge", "served_rows", stats.served_rows, "Rows of epochs, less those that a break left")
    yield family("counter", "evicted_rows", stats.evicted_rows, "Rows that left")
    yield family("counter", "evicted_segments", stats.evicted_segments, "Segments that left")
    yield family("counter", "unread_rows", stats.unread_rows, "Rows that left before any epoch read them")
    if stats.items:
        yield family("gauge", "items", stats.items, "Items of the dataset")
        yield family(
            "gauge", "cached_items", stats.cached_items, "Items of the dataset that are in the cache"
        )


def _of_loaders(loaders: Sequence[SeenLoader], path: str) -> Iterator[_Family]:
    def labels(loader: SeenLoader, **more: object) -> dict[str, object]:
        return {"cache": path, "pid": loader.pid, "loader": loader.key, **more}

    def counter(name: str, means: str) -> _Family:
        values = [("_total", labels(loader), getattr(loader, name)) for loader in loaders]
        return _Family(f"loader_{name}", "counter", means, values)

    yield counter("epochs", "Epochs that began")
    yield counter("batches", "Batches that were delivered")
    yield counter("rows", "Rows that were delivered")
    yield counter("bytes", "Bytes that were delivered")
    yield counter("seconds", "Time inside epochs")
    yield counter("stall_seconds", "Time that the consumer waited")
    yield counter("stalls", "Waits of the consumer of over a millisecond")
    stages = [
        ("_total", labels(loader, stage=stage), seconds)
        for loader in loaders
        for stage, seconds in loader.stage_seconds.items()
    ]
    yield _Family("loader_stage_seconds", "counter", "Time of consumer and workers, by stage", stages)
    limits = [("", labels(loader, bottleneck=loader.bottleneck), 1) for loader in loaders]
    yield _Family(
        "loader_bottleneck", "gauge", "The stage that limits it is the label, the value is 1", limits
    )
    waits = [each for loader in loaders for each in _histogram(loader, labels(loader))]
    yield _Family("loader_wait_seconds", "histogram", "Waits of iter and next for a batch", waits)


def _histogram(
    loader: SeenLoader, labels: Mapping[str, object]
) -> Iterator[tuple[str, Mapping[str, object], float]]:
    for end, count in zip((*map(repr, WAITS), "+Inf"), accumulate(loader.waited), strict=True):
        yield "_bucket", {**labels, "le": end}, count
    yield "_count", labels, sum(loader.waited)
    yield "_sum", labels, loader.stall_seconds


def _of_samplers(seen: Observation) -> Iterator[_Family]:
    def gauge(name: str, means: str, value_of: str) -> _Family:
        return _Family(
            f"sampler_{name}", "gauge", means, [("", labels(s), value(s, value_of)) for s in seen.samplers]
        )

    def counter(name: str, means: str, value_of: str) -> _Family:
        values = [("_total", labels(s), value(s, value_of)) for s in seen.samplers]
        return _Family(f"sampler_{name}", "counter", means, values)

    def labels(sampler: SamplerAtWork) -> dict[str, object]:
        return {"cache": seen.path, "pid": sampler.pid, "pool": sampler.pool}

    def value(sampler: SamplerAtWork, name: str) -> float:
        return float(getattr(sampler if hasattr(sampler, name) else sampler.reads, name))

    yield gauge("unpublished_rows", "Rows that are drawn and not yet published", "rows")
    yield gauge("waits", "1 while it waits for room or for training", "is_waiting")
    yield gauge("reads", "Reads at work", "at_work")
    yield gauge("read_usual_seconds", "The median time of a read", "usual_seconds")
    yield gauge("read_slow_seconds", "The 99th percentile of the time of a read", "slow_seconds")
    yield counter("done_reads", "Reads that gave something", "done")
    yield counter("retries", "Further attempts after an error", "retries")
    yield counter("hedges", "Reads that were begun once more", "hedges")
    yield counter("skipped_samples", "Samples that were left out", "skipped")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
