"""Sequences: makes batches of the sequences into which bundles.py puts documents.

The tokens of a batch are copied by one job of the engine, straight from the files, piece by piece. What tells
documents apart is computed beside. All ranks see the same bundles, and take their parts of each step: so they
have equally many steps, each token is in one batch of one rank, and nobody asks the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Ragged
from arrowcache.reading.assembly import Assembly, Batch, BatchRows, Gathered, Memory, mean_published
from arrowcache.reading.bundles import Bundle, Bundles
from arrowcache.reading.epoch import Epoch
from arrowcache.reading.gather import Parts
from arrowcache.reading.options import LoaderOptions
from arrowcache.reading.order import EpochOrder, Shard
from arrowcache.reading.packing import CU_SEQLENS, DOCUMENT_IDS, LOSS_MASK, POSITION_IDS, Within, starts_of
from arrowcache.reading.portion import Portion, ReadyBatch
from arrowcache.reading.stats import Meter
from arrowcache.storage.store import Store


class SequencePieces(NamedTuple):
    """The pieces of some sequences: a document's row, the place in its file, and the tokens of each piece (n,).

    `firsts` (sequences + 1,): the first piece of each sequence, then the number of pieces.
    """

    ids: NDArray[np.int64]
    places: NDArray[np.int64]
    counts: NDArray[np.int64]
    firsts: NDArray[np.int64]


class SequenceAssembly(Assembly):
    """Makes portions of epochs: a step each. See `arrowcache.torch.packed` for what a batch has."""

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
        self.batch_sequences = packing.batch_size
        tokens = packing.batch_size * packing.length
        self._batch_bytes = tokens * sum(dtype.itemsize for _, dtype in self._columns.values())
        self._places = np.arange(tokens)  # in a batch
        self._lend_rows(packing.batch_size, memory)

    def portions(self, epoch: Epoch, *, awaited: bool) -> Iterator[Portion]:  # noqa: ARG002 - one batch each
        """Yield an epoch's batches; each `next` begins one."""
        epoch.snapshot.temperature = self.temperature
        shard, size = epoch.shard, self._packing.batch_size
        step_sequences = size * shard.world_size
        bundles, line = Bundles(epoch, self._packing, self.item_bytes), _Line()
        if (left := self._sequences_left(epoch)) is not None:
            epoch.steps = -(-left // step_sequences)
        steps = documents = 0
        while True:
            while line.sequences <= step_sequences and (bundle := next(bundles, None)) is not None:
                line.append(bundle)  # one sequence more tells that there is another step
            if not line.sequences:
                break
            count = min(step_sequences, line.sequences)
            mine = _share(count, size, shard)
            pieces = line.pieces(mine, self.item_bytes)
            over, within = line.advance(count, epoch.order.steps)
            yield self._begin_sequences(epoch, pieces, over - documents, within)
            steps, documents = steps + 1, over
        epoch.steps = steps
        if not steps:  # all documents are empty
            epoch.deliver(epoch.order.steps)

    def _begin_sequences(
        self, epoch: Epoch, pieces: SequencePieces, documents: int, within: Within | None
    ) -> Portion:
        published = mean_published(epoch, pieces.ids) if len(pieces.ids) else 0.0
        rows = BatchRows(epoch, pieces.ids, published)
        return _GatheredSequences(self, rows, pieces, documents, within)

    def _sequences_left(self, epoch: Epoch) -> int | None:
        """Return the sequences of the rest of an epoch, if ends of segments tell how many tokens there are."""
        plan, snapshot, column = epoch.plan, epoch.snapshot, self._packing.column
        if not self._packing.split or not isinstance(epoch.order, EpochOrder) or plan.epoch_rows is not None:
            return None
        delivered = 0
        if plan.within is not None:
            delivered = plan.within.before + plan.within.sequences
        elif plan.position:
            return None
        stops = np.cumsum(snapshot.segment_rows)
        _, first_places = snapshot.find(stops - snapshot.segment_rows, column)
        nbytes, last_places = snapshot.find(stops - 1, column)
        tokens = int((last_places + nbytes - first_places).sum()) // self.item_bytes
        return -(-tokens // self._packing.length) - delivered

    def lay_out(self, arrays: Batch, pieces: SequencePieces) -> Batch:
        """Complete a batch, in whose memory the tokens of its pieces lie one behind another.

        Args:
            arrays: the columns of a slot, (batch_size, length) each.
        """
        length, size, count = self._packing.length, self._packing.batch_size, len(pieces.firsts) - 1
        in_sequence = np.zeros(size, np.int64)  # pieces
        in_sequence[:count] = np.diff(pieces.firsts)
        used = np.zeros(size, np.int64)  # tokens
        used[:count] = np.diff(starts_of(pieces.counts)[pieces.firsts])
        counts = pieces.counts
        numbers = np.arange(len(counts)) - np.repeat(pieces.firsts[:-1], in_sequence[:count])
        short = np.flatnonzero(used < length)
        if len(short):
            _move_apart(arrays[self._packing.column].reshape(-1), used, length)
            behind = np.cumsum(in_sequence)[short]
            counts, numbers = (
                np.insert(counts, behind, (length - used)[short]),
                np.insert(numbers, behind, -1),
            )
        starts = starts_of(counts)
        documents = arrays[DOCUMENT_IDS].reshape(-1)
        documents[:] = np.repeat(numbers.astype(np.int32), counts)
        np.greater_equal(documents, 0, out=arrays[LOSS_MASK].reshape(-1))
        np.subtract(self._places, np.repeat(starts[:-1], counts), out=arrays[POSITION_IDS].reshape(-1))
        return arrays | {CU_SEQLENS: starts.astype(np.int32)}


class _Line:
    """Sequences of bundles that are in no step yet."""

    def __init__(self) -> None:
        self._bundles: deque[Bundle] = deque()
        self._first = 0  # sequences of the oldest bundle that are in steps
        self.sequences = 0

    def append(self, bundle: Bundle) -> None:
        self._bundles.append(bundle)
        self.sequences += bundle.pieces.sequences

    def pieces(self, chosen: range, item_bytes: int) -> SequencePieces:
        """Return the pieces of some of the next sequences."""
        some: list[tuple[NDArray[np.int64], ...]] = [(np.empty(0, np.int64),) * 4]
        before = -self._first
        for bundle in self._bundles:
            pieces = bundle.pieces
            first, last = (min(max(0, at - before), pieces.sequences) for at in (chosen.start, chosen.stop))
            if first < last:
                part = slice(pieces.firsts[first], pieces.firsts[last])
                documents = pieces.documents[part]
                places = bundle.places[documents] + pieces.starts[part] * item_bytes
                of_each = np.diff(pieces.firsts[first : last + 1])
                some.append((bundle.ids[documents], places, pieces.counts[part], of_each))
            before += pieces.sequences
        ids, places, counts, of_each = map(np.concatenate, zip(*some, strict=True))
        return SequencePieces(ids, places, counts, starts_of(of_each))

    def advance(self, count: int, documents: int) -> tuple[int, Within | None]:
        """Pass over sequences.

        Args:
            documents: of all bundles together.
        Returns: the documents before the bundle that the next sequence is of, and the place within it.
        """
        self.sequences -= count
        self._first += count
        while self._bundles and self._first >= self._bundles[0].pieces.sequences:
            self._first -= self._bundles.popleft().pieces.sequences
        if not self._bundles:
            return documents, None
        return self._bundles[0].documents, self._bundles[0].after(self._first)


class _GatheredSequences(Gathered):
    """A batch whose tokens are being copied into a slot."""

    def __init__(
        self,
        assembly: SequenceAssembly,
        rows: BatchRows,
        pieces: SequencePieces,
        documents: int,
        within: Within | None,
    ) -> None:
        slot, column = assembly.slots.lend(assembly.batch_sequences), assembly.names[0]
        arrays = slot.arrays()
        offsets = starts_of(pieces.counts * assembly.item_bytes)
        memory = arrays[column].reshape(-1).view(np.uint8)[: offsets[-1]]
        gather = rows.epoch.snapshot.begin_parts(Parts(pieces.ids, pieces.places, offsets), memory)
        super().__init__(assembly, rows, 1, (), tuple(arrays), slot, gather)
        self._sequences, self._pieces, self._documents, self._within = assembly, pieces, documents, within

    def made(self) -> Iterable[ReadyBatch]:
        batch = self._sequences.lay_out(self.columns(), self._pieces)
        nbytes = sum(array.nbytes for array in batch.values())
        epoch, count = self.epoch, len(self._pieces.firsts) - 1
        published = self._rows.published
        return [ReadyBatch(batch, count, nbytes, nbytes, published, epoch, self._documents, self._within)]


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
