"""Notes as lines: beside a model of dicts, and what they take."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import limit
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import in_part

from arrowcache.storage.note_lines import (
    EXCLUDED,
    INCLUDED,
    NO_LINES,
    TAGGED,
    UNTAGGED,
    VALUE,
    NoteLines,
    Rows,
    Said,
)

SIZES = {3: 5, 4: 3000, 7: 1, 9: 700}  # rows of each segment
ROWS = Rows.of_counts(np.array([*SIZES]), np.array([*SIZES.values()]))
MARKS, TEXTS = (INCLUDED, EXCLUDED, UNTAGGED, TAGGED), ("", "a", "b")


def matter(what, text):
    return "excluded" if what in (INCLUDED, EXCLUDED) else text


def shown(notes, rows, *whats):
    """What notes say, by matter and row."""
    found = {}
    for said in notes.of_rows(rows, *whats):
        values = said.values if len(said.values) else said.numbers
        for number, code, value in zip(said.numbers, said.codes, values, strict=True):
            text, what = notes.texts[code // 5], code % 5
            place = matter(what, text), int(number)
            assert place not in found
            found[place] = float(value) if what == VALUE else (int(what), text)
    return found


@st.composite
def calls(draw, whats):
    """Some rows, of which the same is said: runs, each second row, or any."""
    first = draw(st.integers(0, ROWS.size - 1))
    numbers = draw(
        st.lists(st.integers(0, ROWS.size - 1), max_size=30).map(np.array)
        | st.tuples(st.integers(first, ROWS.size), st.integers(1, 40)).map(lambda to: np.arange(first, *to))
    )
    return numbers.astype(np.int64), draw(st.sampled_from(whats)), draw(st.integers(0, 2))


def said_of(some, rng, is_exact):
    """Things said, and the model's. Values that float32 holds, or not."""
    said, model = [], {}
    for numbers, what, text in some:
        values = ()
        if what == VALUE:
            values = rng.integers(0, 99, len(numbers)) if is_exact else rng.random(len(numbers))
        said.append(Said.of(numbers, what, text, values))
        for at, number in enumerate(numbers.tolist()):
            found = float(values[at]) if what == VALUE else (what, TEXTS[text])
            model[matter(what, TEXTS[text]), number] = found
    return Said(*map(np.concatenate, zip(*said, strict=True))), model


@settings(max_examples=in_part(150, 6), deadline=None)
@given(st.data(), st.sampled_from([MARKS, (VALUE,)]), st.integers(0, 99), st.sampled_from([1 << 20, 50]))
def test_lines_say_what_a_dict_does(data, whats, seed, at_once):
    rng, model, notes = np.random.default_rng(seed), {}, NO_LINES
    with pytest.MonkeyPatch.context() as patch:
        limit(patch, noted_rows=at_once)
        for _ in range(data.draw(st.integers(1, 3))):
            some = data.draw(st.lists(calls(whats), min_size=1, max_size=4))
            said, more = said_of(some, rng, is_exact=data.draw(st.booleans()))
            later = NoteLines.of(ROWS, TEXTS, said)
            assert shown(later, ROWS, *whats) == more
            model |= more
            notes = NoteLines.unpack(notes.joined(later, ROWS).pack(), "here")
        assert shown(notes, ROWS, *whats) == model
        assert {*notes.texts} == {text for what in whats for text in notes.texts_of(what)}
        for what in whats:
            for text in TEXTS:
                found = [number for part in notes.of_rows(ROWS, what, text=text) for number in part.numbers]
                assert len(found) == sum(
                    of == matter(what, text) and (what == VALUE or said == (what, text))
                    for (of, _), said in model.items()
                )
        left = Rows.of_counts(ROWS.seqs[2:], np.diff(ROWS.starts)[2:])  # the others have left
        gone = int(ROWS.starts[2])
        model = {(of, number - gone): said for (of, number), said in model.items() if number >= gone}
        assert shown(notes, left, *whats) == model
        assert shown(notes.joined(NO_LINES, left), left, *whats) == model


@pytest.mark.parametrize("every", [1, 2, 3, 20, 40, 1000])
def test_marks_take_a_bit_a_row_at_most_and_values_their_own_bytes_more(every):
    size = 100_000
    rows = Rows.of_counts(np.arange(4), np.full(4, size))
    numbers = np.arange(0, rows.size, every)
    least = min(rows.size / 8, 4 * len(numbers))
    marks = NoteLines.of(rows, ["why"], Said.of(numbers, EXCLUDED))
    assert len(marks.pack()) < least + 4 * 256 + 4096
    for values, width in ((np.float32(numbers) / 3, 4), (np.float64(numbers) / 3, 8)):
        notes = NoteLines.of(rows, ["loss"], Said.of(numbers, VALUE, 0, values))
        assert len(notes.pack()) < least + width * len(numbers) + 4 * 256 + 4096
        (said,) = notes.of_rows(rows, VALUE)
        assert np.array_equal(said.values, values)


def test_values_beyond_float32_and_none_are_kept_as_they_are():
    rows = Rows.of_counts(np.arange(1), np.array([9]))
    values = np.array([1e300, np.nan, np.inf, -np.inf, -0.0, 2**53 + 1, 1e-300, 0.1, 16777217])
    (said,) = NoteLines.of(rows, ["loss"], Said.of(np.arange(9), VALUE, 0, values)).of_rows(rows, VALUE)
    assert np.array_equal(said.values, values, equal_nan=True)
    assert np.signbit(said.values[4])
