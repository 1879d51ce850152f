"""Mix and Map: samples of several sources by weight, and through a function."""

from __future__ import annotations

import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from drawing import digest, require_pure, take

import arrowcache as ac
from arrowcache.errors import SamplerError, SchemaError
from arrowcache.sampling.sources import Map, Mix, ParquetRows


class Numbers:
    """A sampler that is no source: `kind`, and a random number; it may fail, and ends now and then."""

    def __init__(self, kind: int, fails_after: int | None = None, per_call: int = 5) -> None:
        self.kind, self.fails_after, self.per_call = kind, fails_after, per_call

    def __repr__(self) -> str:
        return f"Numbers({self.kind})"

    def __call__(self, rng):
        for count in range(self.per_call):
            if count == self.fails_after:
                raise OSError(f"store {self.kind} is gone")
            yield {"kind": self.kind, "x": rng.random()}


def test_what_is_made_of_a_source_that_asks_for_full_segments_asks_for_them_too():
    whole = Numbers(1)
    whole.ramp = False
    assert Mix({Numbers(0): 1, Numbers(2): 1}).ramp
    assert not Mix({Numbers(0): 1, whole: 1}).ramp
    assert Map(Numbers(0), dict).ramp
    assert not Map(whole, dict).ramp
    assert not Mix({Map(Mix({whole: 1}), dict): 1}).ramp
    chunks = Numbers(1)
    chunks.chunk_rows = 12
    assert (Map(chunks, dict).ramp, Map(chunks, dict).chunk_rows) == (True, 12)
    assert not Mix({Numbers(0): 1, chunks: 1}).ramp, "shares are no multiples"


def kinds(source, count: int = 2000) -> np.ndarray:
    return np.array([int(sample["kind"]) for sample in take(source, count)])


# -- Mix ---------------------------------------------------------------------------------------------


def test_each_source_is_drawn_as_often_as_its_weight_says():
    counts = np.bincount(kinds(Mix({Numbers(0): 1, Numbers(1): 2.5, Numbers(2): 0.5}), 8000), minlength=3)
    assert np.abs(counts - [2000, 5000, 1000]).max() < 6 * np.sqrt(2000)


def test_pairs_do_as_well_as_a_mapping_and_one_source_may_be_alone():
    assert set(kinds(Mix([(Numbers(3), 0.1)]), 20)) == {3}


@pytest.mark.slow
def test_rows_that_a_source_yields_at_once_are_mixed_one_by_one(tmp_path):
    for number in range(2):
        table = pa.table({"kind": [number] * 100, "x": np.arange(100.0)})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    parts = [ParquetRows(tmp_path / f"{number}.parquet") for number in range(2)]
    with Mix({parts[0]: 1, parts[1]: 1}) as mix:
        assert mix.schema == parts[0].schema
        found = kinds(mix, 400)
        assert 120 < found.sum() < 280
        assert 100 < np.count_nonzero(np.diff(found)) < 300  # no long runs of either
        assert sorted(s["x"] for s in take(parts[0], 100)) == list(range(100))
    require_pure(mix)


def test_schemas_that_differ_are_an_error_naming_source_and_field():
    def other(rng):
        yield {"kind": 1, "x": "text"}

    def narrow(rng):
        yield {"kind": 1}

    with pytest.raises(SchemaError, match=r"sources\[1\].*other.* has field 'x' as String"):
        Mix({Numbers(0): 1, other: 1})
    with pytest.raises(SchemaError, match=r"sources\[1\].*narrow.* has field 'x' as None"):
        Mix({Numbers(0): 1, narrow: 1})


def test_a_source_that_fails_ends_the_task_unless_it_is_to_be_skipped(caplog):
    sources = {Numbers(0): 1, Numbers(1, fails_after=3): 1, Numbers(2): 1}
    with pytest.raises(OSError, match="store 1 is gone"):
        kinds(Mix(sources))
    with caplog.at_level(logging.WARNING, "arrowcache"):
        found = kinds(Mix(sources, on_error="skip"), 600)
    assert np.bincount(found)[1] == 3
    assert min(np.bincount(found)[[0, 2]]) > 200
    (record,) = caplog.records
    assert "Numbers(1), failed and is left out of this task: store 1 is gone" in record.getMessage()


def test_a_skipped_source_is_tried_again_in_the_next_task():
    mix = Mix({Numbers(0): 1, Numbers(1, fails_after=3): 1}, on_error="skip")
    assert [np.bincount(kinds(mix, 100))[1] for _ in range(2)] == [3, 3]


def test_when_all_sources_have_failed_the_task_does():
    mix = Mix({Numbers(n, fails_after=2): 1 for n in range(3)}, on_error="skip")
    with pytest.raises(SamplerError, match="all 3 sources failed, the last with: store"):
        kinds(mix)


def test_what_the_consumer_raises_into_a_mix_is_no_source_that_failed():
    samples = Mix({Numbers(0): 1}, on_error="skip")(np.random.default_rng(0))
    next(samples)
    with pytest.raises(RuntimeError, match="of the consumer"):
        samples.throw(RuntimeError("of the consumer"))


# -- Map ---------------------------------------------------------------------------------------------


def double(sample):
    return {"twice": np.float32(2 * sample["x"])}


def test_each_sample_goes_through_the_function_and_the_schema_follows():
    source = Map(Numbers(4), double)
    assert source.schema == ac.Schema({"twice": ac.Tensor("float32")})
    plain = take(Numbers(4), 5)
    assert [s["twice"] for s in take(source, 5)] == [np.float32(2 * s["x"]) for s in plain]


@pytest.mark.slow
def test_a_function_of_two_gets_the_generator_of_the_task():
    def noisy(sample, rng):
        return {**sample, "noise": rng.normal()}

    source = Map(Numbers(4), noisy)
    assert list(source.schema) == ["kind", "x", "noise"]
    require_pure(source)
    assert digest(source, 0, 0) != digest(Map(Numbers(5), noisy), 0, 0)


def test_a_default_of_a_second_parameter_is_left_alone():
    source = Map(Numbers(4), lambda sample, factor=3: {"y": sample["kind"] * factor})
    assert take(source, 1) == [{"y": 12}]


def test_rows_that_a_source_yields_at_once_are_mapped_one_by_one(tmp_path):
    pq.write_table(pa.table({"a": np.arange(50), "t": [f"n{i}" for i in range(50)]}), tmp_path / "x.parquet")
    with Map(ParquetRows(tmp_path), lambda s: {"a": int(s["a"]), "n": len(s["t"])}) as source:
        for sample in take(source, 60):
            assert sample["n"] == len(f"n{sample['a']}")


def test_a_ragged_field_is_declared():
    source = Map(Numbers(1), lambda s: {"r": np.arange(3)}, schema={"r": ac.Ragged("int64")})
    assert source.schema == ac.Schema({"r": ac.Ragged("int64")})
    digest(source, 0, 0)


@pytest.mark.slow
def test_maps_and_mixes_nest():
    both = Mix({Map(Numbers(0), double): 1, Map(Mix({Numbers(1): 1, Numbers(2): 2}), double): 3})
    require_pure(both)
