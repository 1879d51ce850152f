"""Bundles: the documents of an epoch, some thousands at a time, packed into sequences. No token is read.

An epoch's order is one of documents, rows of a ragged column. A bundle is as many as fill some hundred
sequences: their lengths are looked up, which takes a few bytes of each from the files, and packing.py says
which of their tokens go into which sequence. The sequences of a bundle are shuffled among themselves, since
those of a long document, or of best fit, come in a row.

Guarantees: each token of the rest of an epoch is in one sequence of one bundle; the sequences are a function
of the documents' lengths, their order, seed and epoch, and a place within a bundle (`Within`) is enough to go
on there, also where documents have left the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.epoch import Epoch
from arrowcache.reading.fetching import Fetching
from arrowcache.reading.order import EvenOrder
from arrowcache.reading.packing import Packing, Pieces, Within
from arrowcache.reading.shuffle import Permutation

_DOCUMENTS_AT_ONCE = 4096  # whose lengths are looked up
_SEQUENCES = 0  # part of a key, beside those of an epoch's passes


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """The sequences of some documents, in the order in which they are delivered.

    `documents` of the order come before it. `passed` (sequences,): how many of the bundle's are over once
    each is. `ids` and `places` (of each document): its row, and the bytes before its tokens in its file.
    """

    documents: int
    pieces: Pieces
    passed: NDArray[np.int64]
    ids: NDArray[np.int64]
    places: NDArray[np.int64]
    within: Within

    def after(self, sequences: int) -> Within:
        """Return how far an epoch is once so many of the sequences here are delivered."""
        return replace(self.within, sequences=int(self.passed[sequences - 1])) if sequences else self.within


class Bundles(Iterator[Bundle]):
    """The bundles of the rest of an epoch that have sequences."""

    def __init__(self, epoch: Epoch, packing: Packing, item_bytes: int) -> None:
        assert isinstance(epoch.order, EvenOrder)
        self._epoch, self._order, self._packing, self._item_bytes = epoch, epoch.order, packing, item_bytes
        self._fetching = Fetching(epoch, (packing.column,))
        self._fetched: object = None  # kept until the next documents are asked for
        #: Rows, lengths, and places in their files, of the next documents.
        self._ids, self._lengths, self._places = (np.empty(0, np.int64) for _ in range(3))
        self._first = 0  # documents of the order before these
        self._skip = 0  # tokens of the next documents that are in sequences
        self._before = 0  # sequences of earlier bundles of the epoch
        self._resumed = epoch.plan.within

    def __next__(self) -> Bundle:
        while self._first < self._order.steps or self._resumed is not None:
            resumed, self._resumed = self._resumed, None
            bundle = self._planned() if resumed is None else self._made(resumed)
            if bundle.pieces.sequences:
                return bundle
        raise StopIteration

    def _planned(self) -> Bundle:
        """Look at as many documents as a bundle needs."""
        order, packing = self._order, self._packing
        left = order.steps - self._first
        while (count := packing.bundle(np.cumsum(self._lengths) - self._skip)) > len(self._ids) < left:
            self._look(min(len(self._ids) + _DOCUMENTS_AT_ONCE, left))
        count = min(count, len(self._ids))
        first = order.position_after(self._first)
        positions = order.positions(self._first, self._first + count) - first
        size = self._epoch.plan.stream_rows - first if count == left else int(positions[-1]) + 1
        lengths = self._lengths[:count]
        if size > count:
            lengths = np.zeros(size, np.int64)
            lengths[positions] = self._lengths[:count]
        within = Within(packing.length, packing.split, self._skip, self._before, 0, lengths)
        return self._bundle(within, positions)

    def _made(self, within: Within) -> Bundle:
        """Look at the documents of a bundle that was begun, of which some may have left the cache."""
        order, first = self._order, self._epoch.plan.position
        positions = order.positions(0, min(len(within.lengths), order.steps)) - first
        positions = positions[: positions.searchsorted(len(within.lengths))]
        self._look(len(positions))
        if (self._lengths != within.lengths[positions]).any():
            raise ValueError(
                "the state is damaged, or of another cache: its documents have other lengths here"
            )
        return self._bundle(within, positions)

    def _look(self, count: int) -> None:
        """Find the lengths of the next documents, up to so many."""
        snapshot, column = self._epoch.snapshot, self._packing.column
        found = [(self._ids, self._lengths, self._places)]
        for first in range(len(self._ids), count, _DOCUMENTS_AT_ONCE):
            step = self._first + first
            ids = self._order.batches(step, self._first + min(first + _DOCUMENTS_AT_ONCE, count))
            self._fetched = self._fetching.before(step, ids)
            nbytes, places = snapshot.find(ids, column)
            found.append((ids, nbytes // self._item_bytes, places))
        self._ids, self._lengths, self._places = map(np.concatenate, zip(*found, strict=True))

    def _bundle(self, within: Within, positions: NDArray[np.int64]) -> Bundle:
        """Pack a bundle, and go on behind it.

        Args:
            positions: (documents that are present,) among the bundle's.
        """
        plan, lengths, count = self._epoch.plan, within.lengths, len(positions)
        first = self._order.position_after(self._first)
        is_end = first + len(lengths) == plan.stream_rows
        pieces, tokens = self._packing.pack(lengths, within.skip, is_end=is_end)
        sequences = pieces.sequences
        shuffled = np.arange(sequences)
        whole = sequences - (
            self._packing.split and tokens % self._packing.length > 0
        )  # one with padding is last
        shuffled[:whole] = Permutation(whole, plan.seed, (plan.epoch, _SEQUENCES, first))(0, whole)
        pieces, passed = pieces.reordered(shuffled), np.arange(1, sequences + 1)
        if count < len(lengths):
            is_gone, index = np.ones(len(lengths), np.bool_), np.zeros(len(lengths), np.int64)
            is_gone[positions], index[positions] = False, np.arange(count)
            pieces, kept = pieces.without(is_gone)
            pieces, passed = pieces._replace(documents=index[pieces.documents]), passed[kept]
        if within.sequences:
            left = np.arange(passed.searchsorted(within.sequences, side="right"), len(passed))
            pieces, passed = pieces.reordered(left), passed[left]
        ids, places = self._ids[:count], self._places[:count]
        bundle = Bundle(self._first, pieces, passed, ids, places, within)
        self._before = within.before + sequences
        self._go_behind(within, positions, tokens)
        return bundle

    def _go_behind(self, within: Within, positions: NDArray[np.int64], tokens: int) -> None:
        over, self._skip = len(positions), 0
        if self._packing.split:
            ends, used = np.cumsum(within.lengths), within.skip + tokens
            next_one = int(ends.searchsorted(used, side="right"))  # the document that the next token is of
            over = int(positions.searchsorted(next_one))
            if over < len(positions) and positions[over] == next_one:
                self._skip = used - int(ends[next_one] - within.lengths[next_one])
        self._first += over
        self._ids, self._lengths, self._places = (
            array[over:] for array in (self._ids, self._lengths, self._places)
        )
