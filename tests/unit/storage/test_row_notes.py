"""Notes as values: lines beside a model of dicts, their bytes, and values kept from epoch to epoch."""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np
import pytest
from helpers import limit, make_cache, publish
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import in_part, one_in

from arrowcache.storage.notes_log import VALUES, NotesLog
from arrowcache.storage.row_ids import NumberedRows
from arrowcache.storage.row_notes import (
    EXCLUDED,
    INCLUDED,
    NO_LINES,
    TAGGED,
    UNTAGGED,
    VALUE,
    LatestValues,
    NoteLines,
    RowStatements,
)

SIZES = {3: 5, 4: 3000, 7: 1, 9: 700}  # rows of each segment
ROWS = NumberedRows.of_counts(np.array([*SIZES]), np.array([*SIZES.values()]))
MARKS, TEXTS = (INCLUDED, EXCLUDED, UNTAGGED, TAGGED), ("", "a", "b")


def topic(predicate, text):
    return "excluded" if predicate in (INCLUDED, EXCLUDED) else text


def shown(notes, rows, *predicates):
    """What notes say, by topic and row."""
    found = {}
    for some in notes.statements(rows, *predicates):
        values = some.values if len(some.values) else some.rows
        for row, predicate, text, value in zip(some.rows, some.predicates, some.texts, values, strict=True):
            place = topic(predicate, notes.texts[text]), int(row)
            assert place not in found
            found[place] = float(value) if predicate == VALUE else (int(predicate), notes.texts[text])
    return found


@st.composite
def calls(draw, predicates):
    """Some rows, with the same statement: runs, each second row, or any."""
    first = draw(st.integers(0, ROWS.size - 1))
    numbers = draw(
        st.lists(st.integers(0, ROWS.size - 1), max_size=30).map(np.array)
        | st.tuples(st.integers(first, ROWS.size), st.integers(1, 40)).map(lambda to: np.arange(first, *to))
    )
    return numbers.astype(np.int64), draw(st.sampled_from(predicates)), draw(st.integers(0, 2))


def statements_of(some, rng, is_exact):
    """Statements, and the model's. Values that float32 holds, or not."""
    parts, model = [], {}
    for numbers, predicate, text in some:
        values = ()
        if predicate == VALUE:
            values = rng.integers(0, 99, len(numbers)) if is_exact else rng.random(len(numbers))
        parts.append(RowStatements.of(numbers, predicate, text, values))
        for at, number in enumerate(numbers.tolist()):
            found = float(values[at]) if predicate == VALUE else (predicate, TEXTS[text])
            model[topic(predicate, TEXTS[text]), number] = found
    return RowStatements(*map(np.concatenate, zip(*parts, strict=True))), model


@settings(max_examples=in_part(150, 6), deadline=None)
@given(st.data(), st.sampled_from([MARKS, (VALUE,)]), st.integers(0, 99), st.sampled_from([1 << 20, 50]))
def test_lines_say_what_a_dict_does(data, predicates, seed, at_once):
    rng, model, notes = np.random.default_rng(seed), {}, NO_LINES
    with pytest.MonkeyPatch.context() as patch:
        limit(patch, noted_rows=at_once)
        for _ in range(data.draw(st.integers(1, 3))):
            some = data.draw(st.lists(calls(predicates), min_size=1, max_size=4))
            statements, more = statements_of(some, rng, is_exact=data.draw(st.booleans()))
            later = NoteLines.of(ROWS, TEXTS, statements)
            assert shown(later, ROWS, *predicates) == more
            model |= more
            notes = NoteLines.unpack(notes.merged(later, ROWS).pack(), "here")
        assert shown(notes, ROWS, *predicates) == model
        assert {*notes.texts} == {text for predicate in predicates for text in notes.texts_of(predicate)}
        for predicate in predicates:
            for text in TEXTS:
                found = [row for part in notes.statements(ROWS, predicate, text=text) for row in part.rows]
                assert len(found) == sum(
                    of == topic(predicate, text) and (predicate == VALUE or said == (predicate, text))
                    for (of, _), said in model.items()
                )
        left = NumberedRows.of_counts(ROWS.seqs[2:], np.diff(ROWS.starts)[2:])  # the others have left
        gone = int(ROWS.starts[2])
        model = {(of, number - gone): said for (of, number), said in model.items() if number >= gone}
        assert shown(notes, left, *predicates) == model
        assert shown(notes.merged(NO_LINES, left), left, *predicates) == model


@pytest.mark.parametrize("every", [1, 2, 3, 20, 40, 1000])
def test_marks_take_a_bit_a_row_at_most_and_values_their_own_bytes_more(every):
    size = 100_000
    rows = NumberedRows.of_counts(np.arange(4), np.full(4, size))
    numbers = np.arange(0, rows.size, every)
    least = min(rows.size / 8, 4 * len(numbers))
    marks = NoteLines.of(rows, ["why"], RowStatements.of(numbers, EXCLUDED))
    assert len(marks.pack()) < least + 4 * 256 + 4096
    for values, width in ((np.float32(numbers) / 3, 4), (np.float64(numbers) / 3, 8)):
        notes = NoteLines.of(rows, ["loss"], RowStatements.of(numbers, VALUE, 0, values))
        assert len(notes.pack()) < least + width * len(numbers) + 4 * 256 + 4096
        (found,) = notes.statements(rows, VALUE)
        assert np.array_equal(found.values, values)


def test_values_beyond_float32_and_none_are_kept_as_they_are():
    rows = NumberedRows.of_counts(np.arange(1), np.array([9]))
    values = np.array([1e300, np.nan, np.inf, -np.inf, -0.0, 2**53 + 1, 1e-300, 0.1, 16777217])
    lines = NoteLines.of(rows, ["loss"], RowStatements.of(np.arange(9), VALUE, 0, values))
    (found,) = lines.statements(rows, VALUE)
    assert np.array_equal(found.values, values, equal_nan=True)
    assert np.signbit(found.values[4])


# the latest values


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "cache")


def annotate(cache, drawn):
    """Values of some rows, of one call; some are taken back."""
    segments = cache.store.segments()
    ids = [(each.seq, row) for each in segments for row in range(each.rows)]
    some = np.array(drawn.sample(ids, drawn.randint(1, min(40, len(ids)))))
    if drawn.random() < 0.3:
        some = some[some[:, 0] == some[0, 0]]
    value = np.array([drawn.choice([np.nan, drawn.random()]) for _ in some])
    NotesLog(cache.store).write_values({drawn.choice(["loss", "loss", "other"]): (some, value)})


def evict_all(cache):
    """Notes go, too, and their numbers begin anew."""
    cache.evict(cache.stats().published_bytes)
    publish(cache, 2)


@pytest.mark.parametrize("seed", one_in(3, range(25)))
def test_values_are_those_of_a_new_reading(cache, seed):
    drawn = random.Random(seed)
    publish(cache, 3)
    kept = LatestValues("loss", np.float32)
    for _ in range(80):
        match drawn.choice(["annotate"] * 5 + ["publish", "evict", "merge", "all", "look", "look", "look"]):
            case "annotate":
                annotate(cache, drawn)
            case "publish":
                publish(cache, drawn.randint(1, 2))
            case "evict" if cache.stats().segments > 2:
                cache.evict(1)
            case "merge":
                NotesLog(cache.store).merge(VALUES)
            case "all" if drawn.random() < 0.3:
                evict_all(cache)
            case "look":
                segments = cache.store.segments()
                if drawn.random() < 0.3:
                    segments = [each for each in segments if drawn.random() < 0.7]
                rows, files = NumberedRows.of(segments), NotesLog(cache.store).read(VALUES)
                wanted = np.full(rows.size, np.nan, np.float32)
                for lines in files.values():
                    for some in lines.statements(rows, VALUE, text="loss"):
                        wanted[some.rows] = some.values
                found = kept.of(rows, files)
                assert found.dtype == np.float32
                np.testing.assert_array_equal(found, wanted)


class Watched(NoteLines):
    """Tells how many rows notes are read of."""

    read: ClassVar[list[int]] = []

    def since(self, seq):
        found = super().since(seq)
        self.read.append(int(found.lines["rows"].sum()))
        return found


class Interrupted(NoteLines):
    def since(self, seq):
        raise KeyboardInterrupt


def files_of(notes, lines_type=NoteLines):
    return {file: lines_type(*lines) for file, lines in notes.read(VALUES).items()}


def test_a_merged_file_and_segments_that_come_cause_no_second_reading(cache):
    publish(cache, 4)
    notes, ids = NotesLog(cache.store), np.array([(seq, row) for seq in range(4) for row in range(16)])
    kept = LatestValues("loss")

    def rows_read():
        del Watched.read[:]
        values = kept.of(NumberedRows.of(cache.store.segments()), files_of(notes, Watched))
        return Watched.read, np.isnan(values).sum()

    notes.write_values({"loss": (ids, np.arange(64.0))})
    notes.write_values({"loss": (ids[:60], np.arange(60.0))})
    assert rows_read() == ([64, 60], 0)
    notes.write_values({"loss": (ids[:1], np.zeros(1))})
    notes.write_values({"loss": (ids[:50], np.zeros(50))})
    assert rows_read() == ([1, 50], 0)
    notes.merge(VALUES)
    publish(cache, 1)
    assert len(notes.files(VALUES)) == 1
    assert rows_read() == ([], 16)


def test_after_ctrl_c_in_a_reading_the_next_one_is_right(cache):
    publish(cache, 2)
    notes, kept = NotesLog(cache.store), LatestValues("loss")
    kept.of(NumberedRows.of(cache.store.segments()), files_of(notes))
    publish(cache, 1)
    notes.write_values({"loss": (np.array([(2, row) for row in range(16)]), np.arange(16.0))})
    segments = cache.store.segments()
    assert kept.of(NumberedRows.of(segments[:2]), files_of(notes)).size == 32  # all files are taken in
    with pytest.raises(KeyboardInterrupt):
        kept.of(NumberedRows.of(segments), files_of(notes, Interrupted))
    assert kept.of(NumberedRows.of(segments), files_of(notes))[32:].tolist() == [*range(16)]
