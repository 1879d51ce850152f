"""The exception tree, and that errors survive the way through a worker."""

from __future__ import annotations

import pickle

import pytest

import arrowcache as ac

OURS = [
    ac.SchemaError,
    ac.CacheFullError,
    ac.CacheFormatError,
    ac.CorruptSegmentError,
    ac.SamplerError,
    ac.LoaderTimeoutError,
    ac.LockTimeoutError,
]


@pytest.mark.parametrize("kind", [ac.ArrowCacheError, *OURS])
def test_an_error_survives_pickling_with_its_message(kind):
    error = pickle.loads(pickle.dumps(kind("fact, numbers, way out")))
    assert type(error) is kind
    assert str(error) == "fact, numbers, way out"


@pytest.mark.parametrize("kind", OURS)
def test_every_error_is_caught_by_the_base_and_by_no_sibling(kind):
    assert issubclass(kind, ac.ArrowCacheError)
    assert not any(issubclass(kind, other) for other in OURS if other is not kind)


def test_only_the_timeouts_are_timeout_errors():
    assert [k.__name__ for k in OURS if issubclass(k, TimeoutError)] == [
        "LoaderTimeoutError",
        "LockTimeoutError",
    ]


def test_a_schema_error_is_no_value_error():
    assert not issubclass(ac.SchemaError, ValueError)
