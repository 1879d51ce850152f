"""Sequences: makes batches of the sequences into which bundles.py puts documents.

The tokens of a batch are copied by one job of the engine, straight from the files, piece by piece. What tells
documents apart is computed beside. All ranks see the same bundles, and take their parts of each step: so they
have equally many steps, each token is in one batch of one rank, and nobody asks the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Ragged
from arrowcache.limits import Limits
from arrowcache.reading.assembly import Assembly, Batch, BatchRows, Gathered, Memory, mean_published
from arrowcache.reading.bundles import Bundle, Bundles
from arrowcache.reading.epoch import Epoch
from arrowcache.reading.gather import Parts
from arrowcache.reading.options import LoaderOptions
from arrowcache.reading.order import EpochOrder, Shard
from arrowcache.reading.packing import CU_SEQLENS, DOCUMENT_IDS, LOSS_MASK, POSITION_IDS, Within
from arrowcache.reading.portion import Portion, ReadyBatch
from arrowcache.reading.shuffle import starts_of
from arrowcache.reading.slots import Slot
from arrowcache.reading.stats import Meter
from arrowcache.storage.store import Store
from arrowcache.units import format_count

_LENGTHS_AT_ONCE = 1 << 20  # rows


class Mark(NamedTuple):
    """A step of one rank.

    Args:
        sequences: number of its sequences; the rest of its batch is padding.
        documents: number of documents that are over with it, in the order's step numbers.
        within: how far the epoch is then, in the bundle that follows these documents.
    """

    sequences: int
    documents: int
    within: Within | None


class Taken(NamedTuple):
    """Steps of one rank, with the pieces of their sequences, one behind another.

    `ids`, `places`, `counts` (pieces,): the row, where the piece begins in its file, in bytes, and its
    tokens. `pieces` (sequences,): the number of pieces of each sequence.
    """

    marks: list[Mark]
    ids: NDArray[np.int64]
    places: NDArray[np.int64]
    counts: NDArray[np.int64]
    pieces: NDArray[np.int64]


class SequenceAssembly(Assembly):
    """Makes portions of epochs. `arrowcache.torch.packed` says what a batch has."""

    def __init__(self, store: Store, options: LoaderOptions, meter: Meter, memory: Memory) -> None:
        super().__init__(store, options, meter, memory)
        assert options.packing is not None
        self._packing = packing = options.packing
        kind = store.settings.schema[packing.column]
        assert isinstance(kind, Ragged)
        self.item_bytes, shape = kind.item_bytes, (packing.length,)
        self._columns = {
            packing.column: (shape, kind.numpy_dtype),
            POSITION_IDS: (shape, np.dtype(np.int64)),
            DOCUMENT_IDS: (shape, np.dtype(np.int32)),
            LOSS_MASK: (shape, np.dtype(np.bool_)),
        }
        self._batch_size = packing.batch_size
        tokens = packing.batch_size * packing.length
        self._batch_bytes = tokens * sum(dtype.itemsize for _, dtype in self._columns.values())
        self._most_batches = max(1, Limits.current.portion_tokens // tokens)
        self._places = np.arange(tokens * self._most_batches)
        self._lend_rows(packing.batch_size * self._most_batches, memory)

    def portions(self, epoch: Epoch, *, awaited: bool) -> Iterator[Portion]:
        """Yield an epoch's batches, some at a time; each `next` begins them.

        Args:
            awaited: True if somebody waits for the first.
        Raises: ValueError: all documents of a whole epoch are empty.
        """
        epoch.snapshot.temperature = self.temperature
        line = _Line(epoch, Bundles(epoch, self._packing, self.item_bytes))
        step_sequences = self._batch_size * epoch.shard.world_size
        if (left := self._sequences_left(epoch)) is not None:
            epoch.steps = -(-left // step_sequences)
        steps, size = 0, 1 if awaited else self._most_batches
        while line.fill(size * step_sequences):
            taken = line.take(size, self._batch_size, self.item_bytes)
            published = mean_published(epoch, taken.ids) if len(taken.ids) else 0.0
            rows = BatchRows(epoch, taken.ids, published)
            yield _GatheredSequences(self, rows, taken, self.slots.lend(len(taken.marks) * self._batch_size))
            steps, size = steps + len(taken.marks), min(2 * size, self._most_batches)
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
        if not self._packing.split or not isinstance(epoch.order, EpochOrder) or plan.epoch_rows is not None:
            return None
        delivered = 0
        if plan.within is not None:
            delivered = plan.within.before + plan.within.sequences
        elif plan.position:
            return None
        if not (selected := epoch.order.selected).are_all:
            lengths = np.concatenate(
                [
                    snapshot.lengths(first, min(first + _LENGTHS_AT_ONCE, len(snapshot)), column)
                    for first in range(0, len(snapshot), _LENGTHS_AT_ONCE)
                ]
            )
            tokens = int(lengths[selected.ids(np.arange(selected.size))].sum())
            return -(-tokens // self._packing.length) - delivered
        stops = np.cumsum(snapshot.segment_rows)
        _, first_places = snapshot.find(stops - snapshot.segment_rows, column)
        nbytes, last_places = snapshot.find(stops - 1, column)
        tokens = int((last_places + nbytes - first_places).sum()) // self.item_bytes
        return -(-tokens // self._packing.length) - delivered

    def lay_out(self, arrays: Batch, taken: Taken) -> Iterator[Batch]:
        """Yield the batches of a slot in which the tokens of all pieces lie one behind another.

        Args:
            arrays: the columns of the slot, (sequences, length) each.
        """
        length, size, sequences = self._packing.length, self._batch_size, len(taken.marks) * self._batch_size
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


class _Line:
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

    def take(self, steps: int, size: int, item_bytes: int) -> Taken:
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
        marks = [self._advance(count, len(share)) for count, share in zip(counts, shares, strict=True)]
        return Taken(marks, *columns)

    def _parts(self, chosen: range, item_bytes: int) -> Iterator[tuple[NDArray[np.int64], ...]]:
        """Yield ids, places, counts and pieces, as of `Taken`, of some of the next sequences, by bundle."""
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

    def _advance(self, count: int, sequences: int) -> Mark:
        """Pass over the sequences of a step."""
        self._sequences -= count
        self._first += count
        while self._waiting and self._first >= self._waiting[0].pieces.sequences:
            self._first -= self._waiting.popleft().pieces.sequences
        over, within = self._documents, None
        if self._waiting:
            over, within = self._waiting[0].documents, self._waiting[0].after(self._first)
        before, self._over = self._over, over
        return Mark(sequences, over - before, within)


class _GatheredSequences(Gathered):
    """Batches whose tokens are being copied into a slot."""

    def __init__(self, assembly: SequenceAssembly, rows: BatchRows, taken: Taken, slot: Slot) -> None:
        arrays = slot.arrays()
        offsets = starts_of(taken.counts * assembly.item_bytes)
        memory = arrays[assembly.names[0]].reshape(-1).view(np.uint8)[: offsets[-1]]
        gather = rows.epoch.snapshot.begin_parts(Parts(taken.ids, taken.places, offsets), memory)
        super().__init__(assembly, rows, len(taken.marks), (), tuple(arrays), slot, gather)
        self._sequences, self._taken = assembly, taken

    def made(self) -> Iterable[ReadyBatch]:
        batches = self._sequences.lay_out(self.columns(), self._taken)
        return [self._ready(mark, batch) for mark, batch in zip(self._taken.marks, batches, strict=True)]

    def _ready(self, mark: Mark, batch: Batch) -> ReadyBatch:
        nbytes = sum([array.nbytes for array in batch.values()])
        rows = self._rows
        return ReadyBatch(
            batch, mark.sequences, nbytes, nbytes, rows.published, rows.epoch, mark.documents, mark.within
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
    for number, (stop, count) in reversed(
        [*enumerate(zip(np.cumsum(used).tolist(), used.tolist(), strict=True))]
    ):
        begin = (
            number * length
        )  # at or behind where it lies: nothing that is still to be moved is overwritten
        if begin != stop - count:
            tokens[begin : begin + count] = tokens[stop - count : stop]
        tokens[begin + count : begin + length] = 0
