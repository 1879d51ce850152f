"""The contract of readers, kept by `arrowcache.tensorflow.dataset` with each backend."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import tensorflow as tf
from reader_contract import Contract, Face, Unclosed
from tensorflow_backends import arrow

import arrowcache as ac
from arrowcache.tensorflow import dataset


class Reader(Unclosed):
    """A dataset without prefetching, which ends where it is told to."""

    def __init__(self, cache: ac.Cache, size: int, backend: str, **options: Any) -> None:
        assert options.pop("transform", None) is None
        options["drop_remainder"] = options.pop("drop_last", True)
        super().__init__(dataset(cache, size, backend=backend, prefetch=0, **options))


@pytest.fixture(params=["native", arrow])
def face(request: pytest.FixtureRequest) -> Face:
    def make(cache: ac.Cache, size: int, **options: Any) -> Reader:
        return Reader(cache, size, request.param, **options)

    return Face(make, frozenset({"ids", "ranks", "one epoch", "tokens"}), tf.errors.OpError)


class TestReaders(Contract):
    """Each backend. Iterators are TensorFlow's, which some of its releases copy and others do not."""

    test_an_iterator_cannot_be_copied_and_none_of_its_batches_is_lost = None
