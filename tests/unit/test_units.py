"""Sizes and counts, as people write them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrowcache.units import (
    MAX_COUNTED,
    format_bytes,
    format_count,
    format_enough,
    format_seconds,
    format_share,
    parse_bytes,
    parse_count,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1, 1),
        (4096, 4096),
        ("17 B", 17),
        ("1kB", 10**3),
        ("2MB", 2 * 10**6),
        ("200GB", 200 * 10**9),
        ("3TB", 3 * 10**12),
        ("1KiB", 2**10),
        ("64MiB", 2**26),
        ("1 GiB", 2**30),
        ("1.5KiB", 1536),
        ("  2TiB ", 2**41),
        ("0.5kB", 500),
    ],
)
def test_a_size_is_parsed(text, nbytes):
    assert parse_bytes(text, "capacity") == nbytes


@pytest.mark.parametrize(
    "text", ["", "64", "MiB", "64 mib", "1e3B", "-1kB", "1,5kB", "64MiBs", "∞GB", "0x10B", "1 2B", ".5kB"]
)
def test_other_text_is_refused_by_the_arguments_name(text):
    with pytest.raises(ValueError, match="segment_bytes"):
        parse_bytes(text, "segment_bytes")


@pytest.mark.parametrize("size", [0, -1, "0B", "0.0GB"])
def test_a_size_that_is_not_positive_is_refused(size):
    with pytest.raises(ValueError, match="positive"):
        parse_bytes(size, "capacity")


@pytest.mark.parametrize("size", [1.5, None, True, b"1kB", [1]])
def test_another_type_is_a_type_error(size):
    with pytest.raises(TypeError, match="capacity"):
        parse_bytes(size, "capacity")


@given(st.integers(1, 2**60))
def test_whole_numbers_of_bytes_are_exact(n):
    assert parse_bytes(n, "n") == parse_bytes(f"{n}B", "n") == n
    assert parse_bytes(f"{n}KiB", "n") == 1024 * n


@given(st.integers(1, 2**60))
def test_a_size_that_is_enough_is_at_least_that_and_a_tenth_more_at_most(n):
    said = parse_bytes(format_enough(n), "n")
    assert n <= said <= n + max(1, n // 10)


@pytest.mark.parametrize("value", [1, 7, np.uint8(7), np.int64(7), MAX_COUNTED])
def test_a_count_of_any_type_of_int_becomes_a_plain_one(value):
    count = parse_count(value, "workers")
    assert count == value
    assert type(count) is int


@pytest.mark.parametrize(
    ("value", "bounds", "words"),
    [
        (0, {}, "workers=0 must be an int of at least 1"),
        (-1, {"least": 0}, "workers=-1 must be an int of at least 0"),
        (True, {}, "workers=True must be an int"),
        (False, {"least": 0}, "workers=False must be an int"),
        (MAX_COUNTED + 1, {}, f"workers={MAX_COUNTED + 1} must be an int of at most {MAX_COUNTED}"),
        (9, {"most": 8}, "workers=9 must be an int of at most 8"),
    ],
)
def test_a_count_outside_its_bounds_is_refused_with_them(value, bounds, words):
    with pytest.raises(ValueError, match=words):
        parse_count(value, "workers", **bounds)


@pytest.mark.parametrize("value", [1.0, "1", None, [1], np.float64(1), np.bool_(1)])
def test_what_is_no_int_is_no_count(value):
    with pytest.raises(TypeError, match="workers must be an int, not"):
        parse_count(value, "workers")


def test_a_count_without_a_bound_may_be_any():
    assert parse_count(2**200, "seed", least=0, most=None) == 2**200


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**26, "64.0 MiB"), (2**30, "1.0 GiB"),
     (3 * 2**40, "3.0 TiB"), (5000 * 2**40, "5000.0 TiB"), (-2048, "-2.0 KiB")],
)  # fmt: skip
def test_a_size_is_printed_with_a_binary_unit(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (-3, "0 s"), (0.0004, "400 us"), (4e-7, "0 s"), (0.0314, "31 ms"), (0.9994, "999 ms"),
     (1, "1.0 s"), (59, "59 s"), (125, "2.1 min"), (3599, "60 min"), (7200, "2.0 h"),
     (48 * 3600, "2.0 d"), (5e8, "5,787.0 d")],
)  # fmt: skip
def test_a_time_is_printed_with_the_unit_that_fits(seconds, text):
    assert format_seconds(seconds) == text


def test_a_count_is_printed_with_its_noun():
    assert format_count(0, "row") == "0 rows"
    assert format_count(1, "row") == "1 row"
    assert format_count(92000, "row") == "92,000 rows"
    assert format_count(1, "batch", "batches") == "1 batch"
    assert format_count(2, "batch", "batches") == "2 batches"


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 0, "0 %"), (0, 5, "0 %"), (1, 1000, "<1 %"), (1, 3, "33 %"), (999, 1000, ">99 %"), (5, 5, "100 %")],
)
def test_a_share_is_never_nothing_nor_all_unless_it_is(part, whole, text):
    assert format_share(part, whole) == text
