"""RowValues: what is kept from one epoch to the next is what a new reading of all notes finds."""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np
import pytest
from helpers import make_cache, publish
from quick import one_in

from arrowcache.storage.note_lines import NoteLines, Rows
from arrowcache.storage.notes import VALUES, Notes
from arrowcache.storage.row_values import RowValues


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
    Notes(cache.store).annotate({drawn.choice(["loss", "loss", "other"]): (some, value)})


def evict_all(cache):
    """Notes go, too, and their numbers begin anew."""
    cache.evict(cache.stats().published_bytes)
    publish(cache, 2)


@pytest.mark.parametrize("seed", one_in(3, range(25)))
def test_values_are_those_of_a_new_reading(cache, seed):
    drawn = random.Random(seed)
    publish(cache, 3)
    kept = RowValues(Notes(cache.store), "loss")
    for _ in range(80):
        match drawn.choice(["annotate"] * 5 + ["publish", "evict", "merge", "all", "look", "look", "look"]):
            case "annotate":
                annotate(cache, drawn)
            case "publish":
                publish(cache, drawn.randint(1, 2))
            case "evict" if cache.stats().segments > 2:
                cache.evict(1)
            case "merge":
                Notes(cache.store).merge(VALUES)
            case "all" if drawn.random() < 0.3:
                evict_all(cache)
            case "look":
                segments = cache.store.segments()
                if drawn.random() < 0.3:
                    segments = [each for each in segments if drawn.random() < 0.7]
                rows = Rows.of(segments)
                wanted = Notes(cache.store).values(rows, "loss").astype(np.float32)
                np.testing.assert_array_equal(kept.of(rows), wanted)


class Watched(NoteLines):
    """Says on how many rows notes are looked at."""

    looked_at: ClassVar[list[int]] = []

    def since(self, seq):
        found = super().since(seq)
        self.looked_at.append(int(found.lines["rows"].sum()))
        return found


class WatchedNotes(Notes):
    def parts(self, kind):
        return {name: Watched(*lines) for name, lines in super().parts(kind).items()}


def test_a_merged_file_and_segments_that_come_cause_no_second_reading(cache):
    publish(cache, 4)
    notes, ids = WatchedNotes(cache.store), np.array([(seq, row) for seq in range(4) for row in range(16)])
    kept = RowValues(notes, "loss")

    def looked_at():
        del Watched.looked_at[:]
        values = kept.of(Rows.of(cache.store.segments()))
        return Watched.looked_at, np.isnan(values).sum()

    notes.annotate({"loss": (ids, np.arange(64.0))})
    notes.annotate({"loss": (ids[:60], np.arange(60.0))})
    assert looked_at() == ([64, 60], 0)
    notes.annotate({"loss": (ids[:1], np.zeros(1))})
    notes.annotate({"loss": (ids[:50], np.zeros(50))})
    assert looked_at() == ([1, 50], 0)
    notes.merge(VALUES)
    publish(cache, 1)
    assert len(notes.version(VALUES)) == 1
    assert looked_at() == ([], 16)


class FailingNotes(Notes):
    fails = False

    def parts(self, kind):
        if self.fails:
            raise KeyboardInterrupt
        return super().parts(kind)


def test_after_ctrl_c_in_a_reading_the_next_one_is_right(cache):
    publish(cache, 2)
    notes = FailingNotes(cache.store)
    kept = RowValues(notes, "loss")
    kept.of(Rows.of(cache.store.segments()))
    publish(cache, 1)
    notes.annotate({"loss": (np.array([(2, row) for row in range(16)]), np.arange(16.0))})
    assert kept.of(Rows.of(cache.store.segments()[:2])).size == 32  # all files are taken in
    notes.fails = True
    with pytest.raises(KeyboardInterrupt):
        kept.of(Rows.of(cache.store.segments()))
    notes.fails = False
    assert kept.of(Rows.of(cache.store.segments()))[32:].tolist() == [*range(16)]
