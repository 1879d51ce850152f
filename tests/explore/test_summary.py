from __future__ import annotations

import math

import numpy as np
import pytest
from every_type import ROWS, every_type
from helpers import EVERY_TYPE, flip_byte, limit, make_cache, publish, segment_files, seqs

import arrowcache as ac
from arrowcache import explore
from arrowcache.explore.columns import bfloat16_values

pd = pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
describe = explore.describe


def made(path, **columns):
    """A cache of a few segments with these columns: (type, values)."""
    schema = {name: kind for name, (kind, _) in columns.items()}
    cache = ac.Cache.create(path, schema, capacity="8MiB", segment_bytes="1MiB", segment_rows=50)
    with cache.writer() as writer:
        writer.extend({name: values for name, (_, values) in columns.items()})
    return cache


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, k in EVERY_TYPE.items() if isinstance(k, ac.Tensor | ac.Ragged)])
def test_numbers_of_every_type_are_summed_up(varied, name):
    kind, values = EVERY_TYPE[name], every_type()[name]
    flat = np.concatenate([np.ravel(value) for value in values])
    if kind.dtype == "bfloat16":
        flat = bfloat16_values(flat)
    flat = np.abs(flat) if flat.dtype.kind == "c" else flat
    flat = flat.astype(np.uint8) if flat.dtype == bool else flat
    flat = flat.astype(np.float64) if flat.dtype.kind == "f" else flat
    row = describe(varied, [name]).loc[name]
    assert row["count"] == len(flat)
    assert row["nan"] == pytest.approx(np.isnan(flat).mean())
    assert row["min"] == pytest.approx(np.nanmin(flat))
    assert row["max"] == pytest.approx(np.nanmax(flat))
    places = np.repeat(np.arange(ROWS), [np.size(value) for value in values])
    for which, extreme in (("min_row", np.nanmin(flat)), ("max_row", np.nanmax(flat))):
        place = places[np.flatnonzero(flat == extreme)[0]]
        assert row[which] == f"{place // 7}:{place % 7}"  # segments of seven rows
    with np.errstate(all="ignore"):
        assert row["mean"] == pytest.approx(np.nanmean(flat.astype(float)), rel=1e-6, nan_ok=True)
        assert row["std"] == pytest.approx(np.nanstd(flat.astype(float)), rel=1e-5, nan_ok=True)
    assert row["histogram"].counts.sum() == np.isfinite(flat).sum()
    if isinstance(kind, ac.Ragged):
        sizes = [len(value) for value in values]
        assert (row["shortest"], row["longest"]) == (min(sizes), max(sizes))
        assert row["mean_length"] == pytest.approx(np.mean(sizes))
    else:
        assert row["shortest"] is pd.NA
    is_counted = isinstance(kind, ac.Tensor) and not kind.shape and flat.dtype.kind in "biu"
    if is_counted:
        assert row["distinct"] == len(np.unique(flat))
    else:
        assert row["distinct"] is pd.NA


def test_there_is_one_row_a_column_in_order(varied):
    frame = describe(varied)
    assert list(frame.index) == list(EVERY_TYPE)
    assert frame.loc["tensor_int8", "type"] == "int8[3, 5]"
    assert list(describe(varied.path, ["name", "id"]).index) == ["name", "id"]


def test_text_is_counted_and_measured(varied):
    frame = describe(varied, ["name", "data"])
    name, data = frame.loc["name"], frame.loc["data"]
    assert (name["count"], name["distinct"], name["shortest"], name["longest"]) == (
        ROWS,
        5,
        8,
        8,
    )  # characters
    assert (data["distinct"], data["shortest"], data["longest"]) == (4, 0, 6)
    assert data["histogram"].counts.sum() == ROWS
    assert name["min"] is None
    assert math.isnan(data["mean"])


def test_moments_are_moments(varied):
    row = describe(varied, ["when"]).loc["when"]
    when = pd.Series(every_type()["when"]).dt.tz_localize("UTC")
    assert (row["min"], row["max"]) == (when.min(), when.max())
    assert abs(row["mean"] - when.mean()) <= pd.Timedelta("1us")
    assert row["std"] == pytest.approx(when.std(ddof=0), abs=pd.Timedelta("1us"))
    assert row["histogram"].edges.dtype == "datetime64[us]"
    assert row["histogram"].edges[0] <= every_type()["when"][0]


def test_moments_that_are_none_are_a_share(tmp_path):
    when = np.array(["2026-01-01", "NaT", "NaT", "2026-01-03"], "datetime64[us]")
    row = describe(made(tmp_path / "c", when=(ac.Timestamp(), when))).loc["when"]
    assert (row["count"], row["nan"], row["max"]) == (4, 0.5, pd.Timestamp("2026-01-03", tz="UTC"))
    row = describe(made(tmp_path / "d", when=(ac.Timestamp(), when[1:3]))).loc["when"]
    assert row["min"] is pd.NaT
    assert row["mean"] is pd.NaT


def test_an_empty_cache_has_no_extremes(tmp_path):
    with ac.Cache.create(tmp_path / "e", EVERY_TYPE, capacity="4MiB", segment_bytes="256KiB") as cache:
        frame = describe(cache)
    assert frame["count"].eq(0).all()
    assert frame.loc["scalar_int8", "min"] is None
    assert math.isnan(frame.loc["scalar_int8", "mean"])
    assert frame.loc["when", "min"] is pd.NaT
    assert repr(frame)


def test_large_columns_are_divided_among_threads(tmp_path, monkeypatch):
    limit(monkeypatch, summed_numbers=7)
    x = np.random.default_rng(0).integers(-1000, 1000, (170, 3)).astype(np.float32)
    z = x.astype(np.complex64) * (1 + 1j)
    frame = describe(
        made(tmp_path / "c", x=(ac.Tensor("float32", (3,)), x), z=(ac.Tensor("complex64", (3,)), z))
    )
    assert frame.loc["x", "mean"] == pytest.approx(x.mean(dtype=np.float64))
    assert frame.loc["x", "std"] == pytest.approx(x.std(dtype=np.float64))
    assert frame.loc["z", "std"] == pytest.approx(np.abs(z).std(dtype=np.float64))
    histogram = frame.loc["x", "histogram"]
    assert histogram.counts.tolist() == np.diff(np.searchsorted(np.sort(x.ravel()), histogram.edges)).tolist()


def test_distinct_values_are_counted_up_to_a_bound(tmp_path, monkeypatch):
    cache = made(tmp_path / "c", n=(ac.Tensor("int16"), np.arange(120, dtype=np.int16) % 60),
                 s=(ac.String(), [f"{number % 61}" for number in range(120)]))  # fmt: skip
    assert describe(cache)["distinct"].tolist() == [60, 61]
    limit(monkeypatch, distinct_values=60)
    assert describe(cache)["distinct"].tolist() == [60, pd.NA]


def test_bins_are_chosen(tmp_path):
    cache = made(tmp_path / "c", x=(ac.Tensor("float64"), np.linspace(0, 1, 150)))
    for bins in (1, 7, 64):
        assert bins / 2 < len(describe(cache, bins=bins).loc["x", "histogram"].counts) <= bins
    with pytest.raises(ValueError, match="bins=65"):
        describe(cache, bins=65)
    with pytest.raises(ValueError, match="bins=0"):
        describe(cache, bins=0)


def test_samplers_find_room_while_a_cache_is_described(tmp_path, monkeypatch):
    cache = make_cache(tmp_path / "cache", capacity="768KiB")
    publish(cache, segments=26)
    passed = []

    def einsum(*arguments, original=np.einsum):  # once a segment, as it is summed up
        if passed:
            publish(cache, segments=1)  # on_full="raise": it finds room, or fails
        passed.append(1)
        return original(*arguments)

    monkeypatch.setattr(np, "einsum", einsum)
    assert describe(cache, ["id"]).loc["id", "count"] == 16 * len(passed)
    assert len(passed) >= 14
    assert seqs(cache)[0] > 6
    assert cache.stats().leased_bytes == 0


def test_a_damaged_segment_is_named(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, segments=2)
    flip_byte(segment_files(cache)[1], 0)
    with (
        pytest.warns(RuntimeWarning, match="quarantined"),
        pytest.raises(ac.CorruptSegmentError, match=f"segment {1:020d}-") as raised,
    ):
        describe(cache)
    assert "\n" not in str(raised.value)
    assert describe(cache).loc["id", "count"] == 16


def test_an_unknown_column_has_near_names(varied):
    with pytest.raises(ValueError, match="did you mean 'name'"):
        describe(varied, ["nmae"])
