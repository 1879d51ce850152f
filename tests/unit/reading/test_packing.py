"""Packing: each token is in one piece, in its order, and little of a sequence is padding."""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import arrowcache as ac
from arrowcache.reading.packing import Packing, Pieces, Within, best_fit, cut

LENGTHS = st.lists(st.integers(0, 40), max_size=60).map(lambda some: np.array(some, np.int64))


def sequences(pieces: Pieces) -> list[list[tuple[int, int]]]:
    """The tokens of each sequence, as (document, place in it)."""
    found = []
    for first, last in zip(pieces.firsts[:-1], pieces.firsts[1:], strict=True):
        tokens = []
        for document, start, count in zip(*[each[first:last].tolist() for each in pieces[:3]], strict=True):
            assert count > 0
            tokens += [(document, start + place) for place in range(count)]
        found.append(tokens)
    return found


def tokens_of(lengths: np.ndarray) -> list[tuple[int, int]]:
    return [(number, place) for number, count in enumerate(lengths.tolist()) for place in range(count)]


def bins_one_by_one(sizes: list[int], room: int) -> list[int]:
    """What best-fit decreasing leaves free in each bin, each document in its turn."""
    free: list[int] = []
    for size in sorted(sizes, reverse=True):
        place = bisect_left(free, size)
        insort(free, (free.pop(place) if place < len(free) else room) - size)
    return free


@given(LENGTHS, st.integers(1, 50), st.data())
def test_cut_documents_are_the_joined_tokens_one_sequence_after_another(lengths, length, data):
    joined = tokens_of(lengths)
    skip = data.draw(st.integers(0, len(joined)))
    pieces, count = cut(lengths, length, skip)
    made = sequences(pieces)
    assert [*chain(*made)] == joined[skip:]
    assert count == len(joined) - skip
    assert all(len(each) == length for each in made[:-1])


@given(LENGTHS, st.integers(1, 50), st.integers(0, 5))
def test_no_more_sequences_are_cut_than_asked_for_and_all_of_them_are_whole(lengths, length, most):
    joined = tokens_of(lengths)
    pieces, count = cut(lengths, length, 0, most)
    made = sequences(pieces)
    assert len(made) == min(most, len(joined) // length)
    assert [*chain(*made)] == joined[: len(made) * length]
    assert count == len(made) * length


@given(LENGTHS, st.integers(1, 50))
@example(np.full(60, 1), 7)
@example(np.array([20, 20, 20]), 40)
def test_by_best_fit_documents_stay_whole_or_are_cut_into_whole_sequences_and_a_rest(lengths, length):
    made = sequences(best_fit(lengths, length))
    assert sorted([*chain(*made)]) == tokens_of(lengths)
    assert all(len(each) <= length for each in made)
    for each in made:
        assert each == sorted(each)  # documents, and their tokens, in their order
        for document, place in each:
            begin = place - place % length
            assert {(document, at) for at in range(begin, min(begin + length, lengths[document]))} <= {*each}
    wholes = int((lengths // length).sum())
    free = sorted(length - len(each) for each in made)
    rests = [rest for rest in (lengths % length).tolist() if rest]
    assert free == sorted([0] * wholes + bins_one_by_one(rests, length))


@pytest.mark.parametrize("length", [512, 2048, 8192])
def test_less_than_one_percent_is_padding_where_documents_have_lengths_as_texts_have(length):
    lengths = np.random.default_rng(length).lognormal(5.8, 1.2, 6000).astype(np.int64) + 1
    assert lengths.max() > 2 * length or length > 2048
    pieces = best_fit(lengths, length)
    assert 1 - lengths.sum() / (pieces.sequences * length) < 0.01


@given(LENGTHS, st.integers(1, 50), st.data())
def test_sequences_are_reordered_and_lose_the_pieces_of_documents_that_are_gone(lengths, length, data):
    pieces = best_fit(lengths, length)
    order = data.draw(st.permutations(range(pieces.sequences)))
    shuffled = pieces.reordered(np.array(order, np.int64))
    before = sequences(pieces)
    assert sequences(shuffled) == [before[number] for number in order]
    gone = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    rest, kept = shuffled.without(np.array(gone, np.bool_))
    left = [[token for token in before[number] if not gone[token[0]]] for number in order]
    assert sequences(rest) == [each for each in left if each]
    assert kept.tolist() == [number for number, each in enumerate(left) if each]


def test_a_bundle_has_some_hundred_sequences_however_short_its_documents_are():
    packing = Packing("tokens", 2048, 4, split=False)
    for mean, most_documents in ((2_000_000, 3), (700, 8000), (3, 1 << 17)):
        tokens = np.cumsum(np.full(1 << 18, mean))
        count = packing.bundle(tokens)
        assert tokens[count - 1] >= 128 * 2048
        assert count <= most_documents
    assert packing.bundle(np.cumsum([5, 5])) > 2
    assert Packing("tokens", 1 << 20, 1, split=True).bundle(np.cumsum(np.full(1000, 1 << 20))) == 256


def test_a_place_within_a_bundle_is_plain_and_comes_back():
    place = Within(16, True, 3, 7, 2, np.array([5, 0, 9]))
    back = Within.from_state(json.loads(json.dumps(place.to_state())))
    assert back.to_state() == place.to_state()
    assert back.lengths.dtype == np.int64


@pytest.mark.parametrize(
    "change",
    [
        {"version": 9},
        {"lengths": [1, -1]},
        {"lengths": [1.0]},
        {"lengths": [True]},
        {"lengths": [2**63]},
        {"lengths": [2**62] * 3},
        {"lengths": 5},
        {"skip": -1},
        {"sequences": "2"},
        {"length": 0},
    ],
    ids=str,
)
def test_a_damaged_place_is_refused(change):
    state = Within(16, True, 3, 7, 2, np.array([5, 0, 9])).to_state() | change
    with pytest.raises((KeyError, TypeError, ValueError, OverflowError)):
        Within.from_state(state)


def test_what_is_packed_is_one_column_of_documents():
    schema = ac.Schema({"tokens": ac.Ragged("int32"), "points": ac.Ragged("int32", (3,))})
    assert Packing.of(schema, "tokens", np.int64(8), 2, split=False) == Packing("tokens", 8, 2, split=False)
    with pytest.raises(ValueError, match=r"points.*documents are rows of numbers of any length"):
        Packing.of(schema, "points", 8, 2, split=False)
