"""Damaged and hostile files are never a crash and never wrong rows: see campaign.py for tens of thousands."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from fuzz import campaign, kinds, mutation
from fuzz.campaign import OTHER_KINDS, SEGMENT_KINDS, all_cases, run
from helpers import columns_of, file_bytes
from quick import in_part


@pytest.mark.slow
@pytest.mark.smoke
def test_damaged_segments_settings_names_and_states_are_refused_or_read_as_written(tmp_path):
    count = in_part(200, 3)
    cases = all_cases(count, (*SEGMENT_KINDS, *OTHER_KINDS), ("fixed", "mixed"))
    report = run(cases, seed=0, workers=2, found=tmp_path / "found")
    assert report.defects == []
    assert report.cases == count
    refused, equal = (
        sum(n for k, n in report.outcomes.items() if k.endswith(w)) for w in ("refused", "equal")
    )
    assert refused > count / 2, "cases that damage nothing find nothing"
    assert equal > count / 10, "cases that are all refused at the first look find nothing"


def test_the_lists_of_kinds_and_subjects_are_whole():
    assert set(SEGMENT_KINDS) == set(mutation.KINDS)
    assert set(OTHER_KINDS) == set(kinds.OTHER_KINDS)
    assert campaign.SUBJECTS == kinds.SUBJECTS


def test_a_victims_header_fields_and_buffers_are_found():
    schema = kinds.SCHEMAS["mixed"]
    victim = mutation.Victim(schema, *(file_bytes(schema, columns_of(schema, 8, seed)) for seed in (1, 2)))
    assert len(victim.fields) > 2 * len(victim.spans)
    assert len(victim.offsets) == 5  # image, z, boxes, name, data
    assert not victim.alters_values(mutation.KINDS["one_byte"](victim, 0, None))
    assert len(victim.structure) + sum(size for _, size in victim.spans) == len(victim.data)


def test_the_exhaustive_cases_come_to_every_byte_of_the_structure_and_to_every_length():
    cases = campaign.exhaustive_cases(("text",))
    with tempfile.TemporaryDirectory() as folder, closing(kinds.Subject(Path(folder), "text")) as subject:
        victim = subject.victim
    changed, same, lengths = set[int](), 0, set[int]()
    for kind, _, number in cases:
        data = mutation.KINDS[kind](victim, number, random.Random(number))
        if kind == "length":
            lengths.add(len(data))
        else:
            assert len(data) == len(victim.data)
            places = {i for i, (a, b) in enumerate(zip(data, victim.data, strict=True)) if a != b}
            changed |= places
            same += not places
    assert lengths >= set(range(len(victim.data)))
    assert max(lengths) > len(victim.data)
    assert changed <= set(victim.structure)
    assert len(changed) + same == len(victim.structure)
    assert same < len(victim.structure) / 5, "only where a byte is zero already is zero no change"


@pytest.mark.slow
def test_a_case_that_does_harm_is_told_and_the_others_go_on(tmp_path):
    cases = [(kind, "text", i) for i, harm in enumerate(kinds.HARMS) for kind in (harm, "length")]
    report = run(cases, seed=0, workers=1, found=tmp_path / "found", case_seconds=10)
    assert report.cases == len(cases)
    crashes = [crash.split("\n")[0] for crash in report.crashes]
    assert crashes == [
        f"('segfault', 'text', 0): exit code {-signal.SIGSEGV}",
        f"('abort', 'text', 1): exit code {-signal.SIGABRT}",
    ]
    assert [hang.split(":")[0] for hang in report.hangs] == ["('hang', 'text', 2)"]
    assert [wrong.split(",")[0] for wrong in report.wrong] == [
        f"['{harm}'"
        for harm in ("wrong", "outside", "upwards", "mapped", "eval", "import", "unpickle", "memory")
    ], report.wrong
    assert sorted(os.listdir(tmp_path / "found")) == ["abort-text-1", "hang-text-2", "segfault-text-0"]
