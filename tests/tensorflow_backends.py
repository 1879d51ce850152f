"""What the tests of TensorFlow share: the backends that are installed, and a small cache of known rows."""

from __future__ import annotations

import gc
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers import wait_until

import arrowcache as ac
from arrowcache.tensorflow.arrow_backend import find_reader

try:
    find_reader()
    NO_READER = ""
except ImportError as error:
    if find_spec("tensorflow_io") and tf.__version__.startswith("2.16."):
        raise  # they go together: where both are, nothing may be skipped
    NO_READER = str(error)

arrow = pytest.param("arrow", marks=pytest.mark.skipif(bool(NO_READER), reason=NO_READER))
every_backend = pytest.mark.parametrize("backend", ["native", arrow])

SCHEMA = ac.Schema({"id": ac.Tensor("int64"), "x": ac.Tensor("float32", (16,))})


def make_cache(path: Path, rows: int) -> ac.Cache:
    """A cache of rows 0, 1, ... in segments of 16; 1 MiB holds some 3000."""
    cache = ac.Cache.create(path, SCHEMA, "1MiB", "16KiB", 16)
    publish(cache, 0, rows)
    return cache


def publish(cache, start, stop):
    ids = np.arange(start, stop)
    with cache.writer() as writer:
        writer.extend(id=ids, x=np.repeat(ids[:, None], 16, 1).astype(np.float32))


def ids_of(batches):
    return [number for batch in batches for number in batch["id"].numpy().tolist()]


def wait_until_unleased(cache):
    gc.collect()
    wait_until(lambda: cache.stats().leased_bytes == 0, "the lease is released")
