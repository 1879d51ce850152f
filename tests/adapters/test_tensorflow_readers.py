"""The contract of readers, kept by `arrowcache.tensorflow.dataset` with each backend."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import tensorflow as tf
from reader_contract import Contract, Face
from tensorflow_backends import arrow

import arrowcache as ac
from arrowcache.tensorflow import dataset

if TYPE_CHECKING:
    from typing import Self


class Reader:
    """Nothing but its end closes a dataset; one without prefetching ends where it is told to."""

    def __init__(self, cache: ac.Cache, size: int, backend: str, **options: Any) -> None:
        assert options.pop("transform", None) is None
        options["drop_remainder"] = options.pop("drop_last", True)
        self._dataset = dataset(cache, size, backend=backend, prefetch=0, **options)

    def __iter__(self) -> Any:
        return iter(self._dataset)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self._dataset


@pytest.fixture(params=["native", arrow])
def face(request: pytest.FixtureRequest) -> Face:
    def make(cache: ac.Cache, size: int, **options: Any) -> Reader:
        return Reader(cache, size, request.param, **options)

    return Face(make, frozenset({"ids", "ranks", "one epoch"}), tf.errors.OpError)


class TestReaders(Contract):
    """Each backend."""
