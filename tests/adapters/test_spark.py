"""README's recipe for Spark, on a Spark of this machine: its executors write to a cache themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers import make_cache

import arrowcache as ac
from arrowcache.sampling.sources import ParquetRows

pytest.importorskip("pyspark", reason="pyspark is not installed: make test-spark")
if shutil.which("java") is None:
    pytest.skip("Spark needs Java, on Debian default-jre-headless", allow_module_level=True)

SCHEMA = ac.Schema({"x": ac.Tensor("float32", (3,)), "y": ac.Tensor("int64")})
ROWS = 400
JOB = """
    import os, sys
    from pyspark import TaskContext
    from pyspark.sql import SparkSession
    import arrowcache as ac

    folder, rows = sys.argv[1], int(sys.argv[2])
    builder = SparkSession.builder.master("local[2,2]").config("spark.ui.enabled", "false")  # each task twice
    builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    values = [([float(i), i / 2, -i / 4], i) for i in range(rows)]
    frame = spark.createDataFrame(values, "x array<float>, y bigint").repartition(4)

    def publish(rows):
        with ac.Cache.open(f"{folder}/cache").writer() as writer:
            for row in rows:
                writer.append(x=row.x, y=row.y)  # lists and numbers that fit the schema

    def publish_and_fail_once(rows):
        with ac.Cache.open(f"{folder}/failing").writer() as writer:
            for number, row in enumerate(rows):
                if number == 40 and TaskContext.get().attemptNumber() == 0:
                    raise LookupError("of all rows, this one")
                writer.append(x=row.x, y=row.y)

    frame.select("x", "y").foreachPartition(publish)
    frame.coalesce(1).select("x", "y").foreachPartition(publish_and_fail_once)
    frame.write.parquet(f"{folder}/parquet")
    spark.stop()
"""


@pytest.fixture(scope="module")
def spark(tmp_path_factory) -> Path:
    """What a Spark job left: two caches, and Parquet files."""
    folder = tmp_path_factory.mktemp("spark")
    for name in ("cache", "failing"):
        make_cache(folder / name, SCHEMA).close()
    job = folder / "job.py"
    job.write_text(textwrap.dedent(JOB))
    done = subprocess.run(
        [sys.executable, job, folder, str(ROWS)],
        env=os.environ | {"PYSPARK_PYTHON": sys.executable},  # else executors take the `python3` of the PATH
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def rows_of(cache: ac.Cache) -> Counter[int]:
    with ac.Loader(cache, 64, drop_last=False) as loader:
        batches = list(loader)
    y = np.concatenate([batch["y"] for batch in batches])
    x = np.concatenate([batch["x"] for batch in batches])
    assert np.array_equal(x, np.stack([y, y / 2, -y / 4], axis=1).astype(np.float32))
    return Counter(y.tolist())


def test_executors_publish_each_row_once(spark):
    cache = ac.Cache.open(spark / "cache")
    assert rows_of(cache) == Counter(range(ROWS))
    assert cache.verify() == []
    assert cache.stats().leased_bytes == 0


def test_a_task_that_spark_repeats_publishes_again_what_it_had_published(spark):
    cache = ac.Cache.open(spark / "failing")
    times = rows_of(cache)
    assert sorted(times) == list(range(ROWS))
    assert Counter(times.values()) == {1: ROWS - 40, 2: 40}, "a writer that fails publishes what it has"
    assert cache.verify() == []


def test_what_spark_wrote_as_parquet_is_sampled(spark, tmp_path):
    source = ParquetRows(f"{spark}/parquet", ["x", "y"], schema=SCHEMA)
    with (
        ac.Cache.create(tmp_path / "cache", source.schema, "1MiB", "32KiB", segment_rows=64) as cache,
        ac.SamplerPool(cache, source, workers=1, segments=4) as pool,
    ):
        pool.wait(timeout=120)
        assert set(rows_of(cache)) <= set(range(ROWS))
