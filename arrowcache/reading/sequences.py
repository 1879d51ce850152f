"""Sequences: makes batches of sequences of one length out of an epoch of documents, rows of a ragged column.

A bundle is as many documents as fill some hundred sequences: their lengths are looked up, which takes a few
bytes of each from the files, and packing.py says which of their tokens go into which sequence. The sequences
of a bundle are shuffled among themselves, since those of a long document, or of best fit, come in a row.

The tokens of a batch are copied by one job of the engine, straight from the files, piece by piece. The
columns that tell documents apart are computed meanwhile.

Guarantees: each token of the rest of an epoch is in one sequence of one bundle. The sequences are a function
of the documents' lengths, their order, seed and epoch. A place within a bundle (`Within`) is enough to go on
there, also where documents have left the cache. All ranks see the same bundles, and take their parts of each
step: so they have equally many steps, each token is in one batch of one rank, and no rank asks another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Ragged
from arrowcache.limits import Limits
from arrowcache.reading.assembly import (
    Batch,
    BatchGroup,
    BatchRows,
    Gathered,
    Memory,
    ReadAhead,
    ReadyBatch,
    RowAssembly,
    mean_published,
)
from arrowcache.reading.epoch import Epoch
from arrowcache.reading.gather import Parts
from arrowcache.reading.options import LoaderOptions
from arrowcache.reading.order import EvenOrder, Shard
from arrowcache.reading.packing import (
    CU_SEQLENS,
    DOCUMENT_IDS,
    LOSS_MASK,
    POSITION_IDS,
    Packing,
    Pieces,
    Within,
)
from arrowcache.reading.per_segment import Lengths
from arrowcache.reading.shuffle import Permutation, starts_of
from arrowcache.reading.slots import Slot
from arrowcache.reading.stats import Meter
from arrowcache.storage.store import Store
from arrowcache.units import format_count

_DOCUMENTS_AT_ONCE = 4096  # whose lengths are looked up
_SEQUENCES = 0  # part of a key, beside those of an epoch's passes


# bundles


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
        self._read_ahead = ReadAhead(epoch, (packing.column,))
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
            self._fetched = self._read_ahead.before(step, ids)
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
        is_last_padded = self._packing.split and tokens % self._packing.length > 0
        whole = sequences - is_last_padded
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


# batches


class StepEnd(NamedTuple):
    """A step of one rank.

    Args:
        sequences: number of its sequences; the rest of its batch is padding.
        documents: number of documents that are over with it, in the order's step numbers.
        within: how far the epoch is then, in the bundle that follows these documents.
    """

    sequences: int
    documents: int
    within: Within | None


class StepPieces(NamedTuple):
    """Steps of one rank, with the pieces of their sequences, one behind another.

    `ids`, `places`, `counts` (pieces,): the row, where the piece begins in its file, in bytes, and its
    tokens. `pieces` (sequences,): the number of pieces of each sequence.
    """

    ends: list[StepEnd]
    ids: NDArray[np.int64]
    places: NDArray[np.int64]
    counts: NDArray[np.int64]
    pieces: NDArray[np.int64]


class SequenceAssembly(RowAssembly):
    """Makes groups of epochs. `arrowcache.torch.packed` says what a batch has."""

    def __init__(self, store: Store, options: LoaderOptions, meter: Meter, memory: Memory) -> None:
        super().__init__(store, options, meter, memory)
        assert options.packing is not None
        self._packing = packing = options.packing
        self._lengths = Lengths(packing.column)
        kind = store.settings.schema[packing.column]
        assert isinstance(kind, Ragged)
        self.item_bytes, shape = kind.item_bytes, (packing.length,)
        self._memory = {
            packing.column: (shape, kind.numpy_dtype),
            POSITION_IDS: (shape, np.dtype(np.int64)),
            DOCUMENT_IDS: (shape, np.dtype(np.int32)),
            LOSS_MASK: (shape, np.dtype(np.bool_)),
        }
        self._batch_size = packing.batch_size
        tokens = packing.batch_size * packing.length
        self._batch_bytes = tokens * sum(dtype.itemsize for _, dtype in self._memory.values())
        self._most_batches = max(1, Limits.current.group_tokens // tokens)
        self._places = np.arange(tokens * self._most_batches)
        rows = packing.batch_size * self._most_batches
        self._lend_slots(self._memory, rows, self.wanted(), memory.allocate)

    def groups(self, epoch: Epoch, *, awaited: bool) -> Iterator[BatchGroup]:
        """Yield an epoch's batches, some at a time; each `next` begins them.

        Args:
            awaited: True if somebody waits for the first.
        Raises: ValueError: all documents of a whole epoch are empty.
        """
        epoch.snapshot.read_mode = self.read_mode
        queue = _SequenceQueue(epoch, Bundles(epoch, self._packing, self.item_bytes))
        step_sequences = self._batch_size * epoch.shard.world_size
        if (left := self._sequences_left(epoch)) is not None:
            epoch.steps = -(-left // step_sequences)
        steps, size = 0, 1 if awaited else self._most_batches
        while queue.fill(size * step_sequences):
            taken = queue.take(size, self._batch_size, self.item_bytes)
            published = mean_published(epoch, taken.ids) if len(taken.ids) else 0.0
            rows = BatchRows(epoch, taken.ids, published)
            yield _GatheredSequences(self, rows, taken, self.slots.lend(len(taken.ends) * self._batch_size))
            steps, size = steps + len(taken.ends), min(2 * size, self._most_batches)
        epoch.steps = steps
        if not steps:  # all documents are empty
            documents, plan = epoch.order.steps, epoch.plan
            if not plan.position and plan.within is None:
                raise ValueError(
                    f"no epoch has a batch: {format_count(documents, 'document')} in column "
                    f"{self._packing.column!r}, all empty"
                )
            epoch.deliver(documents)

    def _sequences_left(self, epoch: Epoch) -> int | None:
        """Return the sequences of the rest of an epoch, where the number of tokens is known as it begins."""
        plan, snapshot, column = epoch.plan, epoch.snapshot, self._packing.column
        assert isinstance(epoch.order, EvenOrder)
        if not self._packing.split or not epoch.order.is_whole or plan.epoch_rows is not None:
            return None
        delivered = 0
        if plan.within is not None:
            delivered = plan.within.before + plan.within.sequences
        elif plan.position:
            return None
        if not epoch.order.selected.are_all:
            tokens = int(self._lengths.of_selected(snapshot).sum(dtype=np.int64))
            return -(-tokens // self._packing.length) - delivered
        stops = np.cumsum(snapshot.segment_rows)
        _, first_places = snapshot.find(stops - snapshot.segment_rows, column)
        nbytes, last_places = snapshot.find(stops - 1, column)
        tokens = int((last_places + nbytes - first_places).sum()) // self.item_bytes
        return -(-tokens // self._packing.length) - delivered

    def lay_out(self, arrays: Batch, taken: StepPieces) -> Iterator[Batch]:
        """Yield the batches of a slot in which the tokens of all pieces lie one behind another.

        Args:
            arrays: the columns of the slot, (sequences, length) each.
        """
        length, size, sequences = self._packing.length, self._batch_size, len(taken.ends) * self._batch_size
        pieces, used = np.zeros((2, sequences), np.int64)  # of each sequence: pieces, tokens
        pieces[: len(taken.pieces)] = taken.pieces
        used[: len(taken.pieces)] = np.diff(starts_of(taken.counts)[starts_of(taken.pieces)])
        counts, numbers = taken.counts, np.arange(len(taken.ids)) - np.repeat(starts_of(pieces)[:-1], pieces)
        short = np.flatnonzero(used < length)
        if len(short):
            _move_apart(arrays[self._packing.column].reshape(-1), used, length)
            behind, padding = np.cumsum(pieces)[short], (length - used)[short]
            counts, numbers = np.insert(counts, behind, padding), np.insert(numbers, behind, -1)
        starts = starts_of(counts)
        documents = arrays[DOCUMENT_IDS].reshape(-1)
        documents[:] = np.repeat(numbers.astype(np.int32), counts)
        np.greater_equal(documents, 0, out=arrays[LOSS_MASK].reshape(-1))
        places = self._places[: sequences * length]
        np.subtract(places, np.repeat(starts[:-1], counts), out=arrays[POSITION_IDS].reshape(-1))
        edges = starts.searchsorted(np.arange(0, sequences + 1, size) * length).tolist()
        for first, (start, stop) in zip(range(0, sequences, size), pairwise(edges), strict=True):
            batch = {name: array[first : first + size] for name, array in arrays.items()}
            batch[CU_SEQLENS] = (starts[start : stop + 1] - starts[start]).astype(np.int32)
            yield batch


class _SequenceQueue:
    """The sequences of an epoch, in the order of its steps."""

    def __init__(self, epoch: Epoch, bundles: Iterator[Bundle]) -> None:
        self._bundles, self._documents, self._shard = bundles, epoch.order.steps, epoch.shard
        self._waiting: deque[Bundle] = deque()  # those with sequences that are in no step yet
        self._first = 0  # sequences of the oldest of them that are in steps
        self._sequences = 0  # that are in no step yet
        self._over = 0  # documents that are over with those steps

    def fill(self, sequences: int) -> bool:
        """Have more sequences than these, or all that are left. Returns: False: there are none."""
        while self._sequences <= sequences and (bundle := next(self._bundles, None)) is not None:
            self._waiting.append(bundle)
            self._sequences += bundle.pieces.sequences
        return self._sequences > 0

    def take(self, steps: int, size: int, item_bytes: int) -> StepPieces:
        """Return this rank's part of the next steps, or of fewer if fewer are left.

        Args:
            size: sequences of a step, of one rank.
        """
        step_sequences, left = size * self._shard.world_size, self._sequences
        firsts = range(0, min(left, steps * step_sequences), step_sequences)
        counts = [min(step_sequences, left - first) for first in firsts]
        shares = [_share(count, size, self._shard) for count in counts]
        chosen = [range(first + s.start, first + s.stop) for first, s in zip(firsts, shares, strict=True)]
        if self._shard.world_size == 1:  # all in one
            chosen = [range(chosen[0].start, chosen[-1].stop)]
        parts = [
            (np.empty(0, np.int64),) * 4,
            *(part for some in chosen for part in self._parts(some, item_bytes)),
        ]
        columns = map(np.concatenate, zip(*parts, strict=True))
        ends = [self._advance(count, len(share)) for count, share in zip(counts, shares, strict=True)]
        return StepPieces(ends, *columns)

    def _parts(self, chosen: range, item_bytes: int) -> Iterator[tuple[NDArray[np.int64], ...]]:
        """Yield ids, places, counts and pieces of some of the next sequences, by bundle: see `StepPieces`."""
        before = -self._first
        for bundle in self._waiting:
            pieces, sequences = bundle.pieces, bundle.pieces.sequences
            first, last = (min(max(0, at - before), sequences) for at in (chosen.start, chosen.stop))
            if first < last:
                firsts = pieces.firsts[first : last + 1]
                part = slice(firsts[0], firsts[-1])
                documents = pieces.documents[part]
                places = bundle.places[documents] + pieces.starts[part] * item_bytes
                yield bundle.ids[documents], places, pieces.counts[part], firsts[1:] - firsts[:-1]
            before += sequences

    def _advance(self, count: int, sequences: int) -> StepEnd:
        """Pass over the sequences of a step."""
        self._sequences -= count
        self._first += count
        while self._waiting and self._first >= self._waiting[0].pieces.sequences:
            self._first -= self._waiting.popleft().pieces.sequences
        over, within = self._documents, None
        if self._waiting:
            over, within = self._waiting[0].documents, self._waiting[0].after(self._first)
        before, self._over = self._over, over
        return StepEnd(sequences, over - before, within)


class _GatheredSequences(Gathered):
    """Batches whose tokens are being copied into a slot."""

    def __init__(self, assembly: SequenceAssembly, rows: BatchRows, taken: StepPieces, slot: Slot) -> None:
        arrays = slot.arrays()
        offsets = starts_of(taken.counts * assembly.item_bytes)
        memory = arrays[assembly.columns.names[0]].reshape(-1).view(np.uint8)[: offsets[-1]]
        read = rows.epoch.snapshot.read_parts(Parts(taken.ids, taken.places, offsets), memory, slot)
        super().__init__(assembly, rows, len(taken.ends), (), read)
        self._sequences, self._taken = assembly, taken

    def made(self) -> Iterable[ReadyBatch]:
        batches = self._sequences.lay_out(self._read.result(), self._taken)
        return [self._ready(end, batch) for end, batch in zip(self._taken.ends, batches, strict=True)]

    def _ready(self, end: StepEnd, batch: Batch) -> ReadyBatch:
        nbytes = sum([array.nbytes for array in batch.values()])
        rows = self._rows
        return ReadyBatch(
            batch, end.sequences, nbytes, nbytes, rows.published, rows.epoch, end.documents, end.within
        )


def _share(count: int, size: int, shard: Shard) -> range:
    """Return a rank's part of a step of so many sequences: `size`, or an even part of those that are left."""
    if count == size * shard.world_size:
        return range(shard.rank * size, (shard.rank + 1) * size)
    first, last = (count * rank // shard.world_size for rank in (shard.rank, shard.rank + 1))
    return range(first, last)


def _move_apart(tokens: NDArray[np.generic], used: NDArray[np.int64], length: int) -> None:
    """Move sequences that lie one behind another to places of their own, and set the rest to 0.

    Args:
        tokens: (sequences * length,).
        used: (sequences,) tokens of each.
    """
    ends = zip(np.cumsum(used).tolist(), used.tolist(), strict=True)
    for number, (stop, count) in reversed([*enumerate(ends)]):
        begin = number * length  # at or behind where it lies: what is still to be moved is not overwritten
        if begin != stop - count:
            tokens[begin : begin + count] = tokens[stop - count : stop]
        tokens[begin + count : begin + length] = 0
