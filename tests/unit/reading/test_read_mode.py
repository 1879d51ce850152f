"""ReadMode: when rows are asked of the disk, when they are copied, and that it does not go to and fro."""

from __future__ import annotations

import random

import pytest

from arrowcache.reading.gather import ReadMode


def told(read_mode: ReadMode, jobs: int, rows: int = 64, missed: int = 0) -> int:
    """How often it changed while so many jobs were told."""
    changes = 0
    for _ in range(jobs):
        before = read_mode.is_cold
        read_mode.note(rows, missed)
        changes += read_mode.is_cold is not before
    return changes


def warm() -> ReadMode:
    read_mode = ReadMode()
    told(read_mode, 4)
    return read_mode


def test_it_begins_cold():
    assert ReadMode().is_cold


def test_it_is_warm_once_256_rows_in_a_row_were_found():
    read_mode = ReadMode()
    told(read_mode, 3)
    assert read_mode.is_cold
    told(read_mode, 1)
    assert not read_mode.is_cold


def test_a_row_that_was_missed_begins_the_count_anew():
    read_mode = ReadMode()
    told(read_mode, 3)
    told(read_mode, 1, missed=1)
    told(read_mode, 3)
    assert read_mode.is_cold


def test_one_miss_now_and_then_does_not_turn_it_cold():
    read_mode = warm()
    for _ in range(100):
        told(read_mode, 1, missed=1)
        told(read_mode, 4)
    assert not read_mode.is_cold


@pytest.mark.parametrize("missed", [65, 1024])
def test_a_job_that_missed_more_than_64_turns_it_cold_at_once(missed):
    read_mode = warm()
    told(read_mode, 1, missed=missed)
    assert read_mode.is_cold


def test_a_few_bad_pages_do_not_turn_it_cold():
    read_mode = warm()
    told(read_mode, 1, missed=40)
    assert not read_mode.is_cold


def test_it_does_not_stay_cold_for_one_row_in_two_thousand():
    read_mode = warm()
    for _ in range(8):  # warm times that were short
        told(read_mode, 1, missed=100)
        while read_mode.is_cold:
            told(read_mode, 1)
    told(read_mode, 1, missed=100)
    for _ in range(10):
        told(read_mode, 1, missed=1)
        told(read_mode, 32)
    assert not read_mode.is_cold


def test_warmth_of_short_life_takes_twice_as_long_to_come_back():
    read_mode = warm()
    needed = []
    for _ in range(10):
        told(read_mode, 1, missed=65)
        jobs = 0
        while read_mode.is_cold:
            told(read_mode, 1)
            jobs += 1
        needed.append(64 * jobs)
    assert needed == [512, 1024, 2048, 4096, 8192, *[16384] * 5]


def test_warmth_of_long_life_is_forgiven():
    read_mode = warm()
    told(read_mode, 1, missed=65)
    told(read_mode, 8)
    told(read_mode, 16 * 8)
    told(read_mode, 1, missed=65)
    told(read_mode, 4)
    assert not read_mode.is_cold


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.005, 0.05, 0.5])
def test_whatever_share_is_missing_it_does_not_go_back_and_forth(share):
    """10 changes at first, then at most one in some thousand rows."""
    draw, read_mode = random.Random(0), ReadMode()
    changes = sum(
        told(read_mode, 1, missed=sum(draw.random() < share for _ in range(64))) for _ in range(5000)
    )
    assert changes <= 10 + 5000 * 64 / 8192
