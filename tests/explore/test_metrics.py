"""Metrics: OpenMetrics text of a cache, its loaders and samplers, as Prometheus' own parser reads it."""

from __future__ import annotations

import itertools
import time

import pytest
from helpers import append_rows, make_cache, sample, wait_until

import arrowcache as ac

parser = pytest.importorskip(
    "prometheus_client.openmetrics.parser", reason="prometheus_client is not installed"
)


def families(cache):
    found = parser.text_string_to_metric_families(ac.metrics(cache))
    return {family.name.removeprefix("arrowcache_"): family for family in found}


def value(found, name, **labels):
    (only,) = [each for each in found[name].samples if labels.items() <= each.labels.items()]
    return only.value


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / 'a "cache" \\n')


def test_a_cache_that_nobody_uses_is_its_counts(cache):
    append_rows(cache, range(40))
    cache.evict(nbytes=1)
    found, stats = families(cache), cache.stats()
    assert value(found, "rows") == stats.rows == 24
    assert (value(found, "inserted_rows"), value(found, "evicted_rows")) == (40, 16)
    assert value(found, "capacity_bytes") == stats.capacity_bytes
    assert found["capacity_bytes"].unit == "bytes"
    assert found["rows"].samples[0].labels == {"cache": str(cache.path)}
    assert not [name for name in found if name.startswith(("loader", "sampler"))]


def test_a_loader_is_its_counts_and_a_histogram_of_its_waits(cache):
    append_rows(cache, range(64))
    with ac.Loader(cache, 16, prefetch=0) as loader:
        for _ in itertools.islice(loader.repeat(), 12):
            pass
        found, stats = families(cache.path), loader.stats()
    assert (value(found, "loader_batches"), value(found, "loader_rows")) == (12, 192)
    assert value(found, "loader_bottleneck") == 1
    stages = {each.labels["stage"] for each in found["loader_stage_seconds"].samples}
    assert stages == {"samplers", "pace", "store", "gather", "transform", "start"}
    waits = [each.value for each in found["loader_wait_seconds"].samples if "le" in each.labels]
    assert waits == sorted(waits)
    assert waits[-1] >= 1, "the first batch was waited for"
    assert 0 <= stats.wait_p50_seconds <= stats.wait_p95_seconds <= stats.wait_p99_seconds


def one_row_and_no_more(rng):
    yield sample(0)
    time.sleep(60)


def test_a_sampler_at_work_is_its_rows_and_reads(cache):
    found = {}

    def is_at_work():
        found.update(families(cache))
        return "sampler_unpublished_rows" in found

    with ac.SamplerPool(cache, one_row_and_no_more, workers=1):
        wait_until(is_at_work, "a sampler at work")
    assert value(found, "sampler_waits") == 0
    assert found["sampler_reads"].samples[0].labels["pool"].startswith("default")


def test_a_cache_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        ac.metrics(tmp_path / "none")
