from __future__ import annotations

import math

import numpy as np
import pytest
import xxhash
from helpers import limit, make_cache, publish, seqs

import arrowcache as ac
from arrowcache import explore

pd = pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
duplicates, drift = explore.duplicates, explore.drift

WIDE = ac.Schema(
    {
        "wide": ac.Tensor("float32", (2048,)),
        "n": ac.Tensor("int8"),
        "z": ac.Tensor("complex64"),
        "when": ac.Timestamp(),
        "name": ac.String(),
        "data": ac.Binary(),
        "points": ac.Ragged("int16", (2,)),
    }
)


def row(number: int) -> dict:
    return {
        "wide": np.full(2048, number % 100, np.float32),
        "n": number % 100,
        "z": np.complex64(number % 100),
        "when": np.datetime64(number % 100, "us"),
        "name": "x" * (number % 3),
        "data": b"y" * (number % 4),
        "points": np.full((number % 5, 2), number % 100, np.int16),
    }


def rows_of(path, rows, schema=WIDE, segment_rows=10):
    cache = ac.Cache.create(path, schema, capacity="16MiB", segment_bytes="512KiB", segment_rows=segment_rows)
    with cache.writer() as writer:
        for one in rows:
            writer.append(one)
    return cache


@pytest.mark.parametrize("columns", [None, *([name] for name in WIDE), ["n", "name"], ["points", "wide"]])
def test_rows_that_are_the_same_are_found_wherever_they_are(tmp_path, columns):
    numbers = [*range(15), 3, 7, *range(20, 30), 107, 3, 14]
    cache = rows_of(tmp_path / "c", [row(number) for number in numbers])
    names = columns or list(WIDE)
    first: dict[object, int] = {}
    wanted = []
    for place, number in enumerate(numbers):
        value = repr([row(number)[name] for name in names])
        if value in first:
            at = first[value]
            wanted.append((place // 10, place % 10, at // 10, at % 10))
        first.setdefault(value, place)
    found = duplicates(cache, columns)
    assert list(found.columns) == ["_seq", "_row", "first_seq", "first_row"]
    assert list(found.itertuples(index=False, name=None)) == wanted
    assert (found.dtypes == np.int64).all()


def test_values_do_not_run_into_their_neighbours(tmp_path):
    schema = ac.Schema({"a": ac.String(), "b": ac.String()})
    rows = [{"a": "ab", "b": "c"}, {"a": "a", "b": "bc"}, {"a": "abc", "b": ""}, {"a": "ab", "b": "c"}]
    found = duplicates(rows_of(tmp_path / "c", rows, schema))
    assert found["_row"].tolist() == [3]
    assert found["first_row"].tolist() == [0]


@pytest.mark.parametrize("missing", ["name", "data", "points"])
def test_a_column_without_any_data_is_the_same_in_all_rows(tmp_path, missing):
    empty = {"name": "", "data": b"", "points": np.zeros((0, 2), np.int16)}[missing]
    cache = rows_of(tmp_path / "c", [{"v": empty}] * 3, ac.Schema({"v": WIDE[missing]}))
    assert duplicates(cache)["_row"].tolist() == [1, 2]


def test_an_empty_cache_has_no_duplicates(tmp_path):
    found = duplicates(rows_of(tmp_path / "c", []))
    assert len(found) == 0
    assert list(found.columns) == ["_seq", "_row", "first_seq", "first_row"]


def test_looking_for_duplicates_lets_samplers_go_on(tmp_path, monkeypatch):
    cache = make_cache(tmp_path / "cache", capacity="768KiB")
    publish(cache, segments=26)
    hashed = []

    def xxh3_128(row, original=xxhash.xxh3_128):
        hashed.append(1)
        if len(hashed) > 16 and len(hashed) % 16 == 1:  # the first of a segment
            publish(cache, segments=1)  # on_full="raise"
        return original(row)

    monkeypatch.setattr(xxhash, "xxh3_128", xxh3_128)
    duplicates(cache, ["id"])
    assert len(hashed) == 26 * 16
    assert seqs(cache)[0] > 6
    assert cache.stats().leased_bytes == 0


def drifting(path, segments=8, rows=50):
    """`level` rises with the segment, `noise` does not, `nan` gains what is not a number."""
    schema = ac.Schema({
        "noise": ac.Tensor("float32", (4,)), "level": ac.Tensor("float64"), "nan": ac.Tensor("float32"),
        "few": ac.Tensor("int32"), "flag": ac.Tensor("bool"), "many": ac.Ragged("bfloat16"),
        "name": ac.String(),
    })  # fmt: skip
    rng = np.random.default_rng(0)
    cache = ac.Cache.create(path, schema, capacity="16MiB", segment_bytes="512KiB", segment_rows=rows)
    with cache.writer() as writer:
        for number in range(segments):
            nan = rng.standard_normal(rows).astype(np.float32)
            nan[: number * 2] = np.nan
            writer.extend(
                noise=rng.standard_normal((rows, 4)).astype(np.float32),
                level=rng.standard_normal(rows) + number,
                nan=nan,
                few=np.full(rows, 7, np.int32),
                flag=rng.integers(0, 8, rows) < number,
                many=[rng.integers(0x3F80, 0x4000, 3, np.uint16) for _ in range(rows)],
                name=["a"] * rows,
            )
    return cache


def test_the_strongest_drift_comes_first(tmp_path):
    frame = drift(drifting(tmp_path / "c"))
    assert set(frame.index) == {"noise", "level", "nan", "few", "flag", "many"}
    assert list(frame.index)[:2] == ["level", "flag"]
    assert frame["ks"].is_monotonic_decreasing
    assert frame.loc["level", "ks"] > 0.9
    assert frame.loc["noise", "ks"] < 0.2
    assert frame.loc["few", "ks"] == 0
    assert frame.loc["level", "newest_mean"] - frame.loc["level", "first_mean"] == pytest.approx(6, abs=0.5)
    assert frame.loc["few", "first_mean"] == 7
    assert frame.loc["nan", "first_nan"] == 0.02
    assert frame.loc["nan", "newest_nan"] == 0.26
    assert 1 <= frame.loc["many", "first_mean"] <= 2
    assert repr(frame) == repr(drift(drifting(tmp_path / "d")))


def test_a_share_is_of_the_segments(tmp_path):
    cache = drifting(tmp_path / "c")
    one = drift(cache, ["level"], share=0.01).loc["level"]
    half = drift(cache, ["level"], share=0.5).loc["level"]
    assert one["newest_mean"] - one["first_mean"] == pytest.approx(7, abs=0.7)
    assert half["newest_mean"] - half["first_mean"] == pytest.approx(4, abs=0.5)


def test_a_drift_reads_neither_more_nor_leases_longer(tmp_path, monkeypatch):
    cache = drifting(tmp_path / "c")
    left = []

    def einsum(*arguments, original=np.einsum):  # once a segment, as it is summed up
        cache.evict("1GB")
        left.append(seqs(cache))
        return original(*arguments)

    monkeypatch.setattr(np, "einsum", einsum)
    drift(cache, ["level"])
    assert left == [[*range(8)], [*range(1, 8)], [6, 7], [7]]
    assert cache.stats().leased_bytes == 0


def test_few_of_many_values_are_drawn(tmp_path, monkeypatch):
    cache = drifting(tmp_path / "c")
    exact = drift(cache).loc["noise"]
    limit(monkeypatch, compared_values=60)
    drawn = drift(cache).loc["noise"]
    assert drawn["first_mean"] == exact["first_mean"]
    assert drawn["ks"] != exact["ks"]
    assert drawn["ks"] == pytest.approx(exact["ks"], abs=0.4)


def test_the_statistic_is_that_of_the_definition(tmp_path):
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 9, 64) / 2.0, rng.integers(3, 12, 64) / 2.0
    schema = ac.Schema({"x": ac.Tensor("float32")})
    cache = rows_of(tmp_path / "c", [{"x": x} for x in (*one, *other)], schema, 64)
    by_hand = max(abs((one <= x).mean() - (other <= x).mean()) for x in (*one, *other))
    assert drift(cache).loc["x", "ks"] == pytest.approx(by_hand)


def test_nothing_to_compare_is_not_a_number(tmp_path):
    cache = rows_of(tmp_path / "c", [{"x": math.nan}] * 2, ac.Schema({"x": ac.Tensor("float32")}), 1)
    assert math.isnan(drift(cache).loc["x", "ks"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"columns": ["name"]}, "'name' holds no numbers"),
        ({"columns": ["levle"]}, "did you mean 'level'"),
        ({"columns": []}, "empty"),
        ({"share": 0}, "0 < share <= 0.5"),
        ({"share": 0.6}, "0 < share <= 0.5"),
        ({"share": "half"}, "0 < share <= 0.5"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(tmp_path, options, says):
    with pytest.raises(ValueError) as raised:
        drift(drifting(tmp_path / "c", segments=2), **options)
    assert says in str(raised.value)


def test_too_few_segments_are_too_few(tmp_path):
    with pytest.raises(ValueError, match="1 segment can be read"):
        drift(drifting(tmp_path / "c", segments=1))
    with pytest.raises(ValueError, match="no column holds numbers"):
        drift(rows_of(tmp_path / "d", [{"s": "a"}], ac.Schema({"s": ac.String()})))
