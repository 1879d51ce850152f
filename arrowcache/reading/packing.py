"""Packing: sequences of one length out of documents of any lengths: lengths in, places out.

A sequence is made of pieces: parts of documents, one behind another. `cut` joins all documents and cuts them
where a sequence ends, so that none but the last has padding. `best_fit` keeps documents whole: each goes
where it leaves the least padding, and only one that is longer than a sequence is cut, into whole sequences
and a rest.

Best fit is best-fit decreasing (Johnson, "Near-optimal bin packing algorithms", MIT 1973), by the histogram
of the lengths, as Krell et al. pack BERT's sequences ("Efficient sequence packing without
cross-contamination", 2021): documents of one length, and sequences of one rest, are dealt with together, so
that the time goes with the number of different lengths. The least rest that suffices is found in a bit set.

Guarantees: each token is in one piece, in its order; the result depends on the arguments alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Ragged, Schema
from arrowcache.limits import Limits
from arrowcache.proc import memory_bytes
from arrowcache.reading.shuffle import starts_of
from arrowcache.units import MAX_COUNTED, format_bytes, parse_count

POSITION_IDS, DOCUMENT_IDS, LOSS_MASK, CU_SEQLENS = "position_ids", "document_ids", "loss_mask", "cu_seqlens"
_MADE = (POSITION_IDS, DOCUMENT_IDS, LOSS_MASK, CU_SEQLENS)
_MADE_BYTES = 8 + 4 + 1  # of a token: its position, document and mask
_MAX_LENGTH, _MAX_TOKENS = 1 << 24, (1 << 31) - 1  # of a batch: cu_seqlens counts them in int32
_PLAIN = ("length", "split", "skip", "before", "sequences")  # of a state
_VERSION = 1  # of what a state means: raised where the same documents give other sequences


@dataclass(frozen=True, slots=True)
class Packing:
    """The sequences that a loader makes of a column of documents, checked.

    Args:
        length: tokens of a sequence.
        batch_size: sequences of a batch.
        split: documents are cut where a sequence ends; False: whole, by best fit.
    """

    column: str
    length: int
    batch_size: int
    split: bool

    @classmethod
    def of(cls, schema: Schema, column: object, length: object, batch_size: object, split: object) -> Packing:
        """Check the arguments of `arrowcache.torch.packed`.

        Raises: ValueError, TypeError: one does not fit.
        """
        if not isinstance(column, str):
            raise TypeError(f"column must be the name of one column, not {column!r}")
        schema.select((column,))
        kind = schema[column]
        if not isinstance(kind, Ragged) or kind.inner_shape:
            raise ValueError(
                f"column {column!r} is {kind}, and documents are rows of numbers of any length: "
                "name a column such as Ragged('int32')"
            )
        if column in _MADE:
            raise ValueError(f"column {column!r} has the name of what a batch has besides: rename it")
        if not isinstance(split, bool):
            raise TypeError(f"split must be True or False, not {split!r}")
        tokens = parse_count(length, "length", most=_MAX_LENGTH)
        sequences = parse_count(batch_size, "batch_size", most=_MAX_TOKENS)
        nbytes = tokens * sequences * (kind.item_bytes + _MADE_BYTES)
        if tokens * sequences > _MAX_TOKENS or nbytes > memory_bytes():
            raise ValueError(
                f"batch_size={sequences} with length={tokens} takes {format_bytes(nbytes)}, and a "
                f"batch has at most {_MAX_TOKENS} tokens, and {format_bytes(memory_bytes())} of memory: "
                "lower one of them"
            )
        return cls(column, tokens, sequences, split)

    def terms(self) -> dict[str, int | bool | str]:
        """Return what decides the sequences of an epoch: ranks agree on it."""
        return {"packing": _VERSION, "column": self.column, "length": self.length, "split": self.split}

    @property
    def bundle_sequences(self) -> int:
        """The number of sequences that documents are looked for at a time."""
        return max(Limits.current.bundle_sequences, Limits.current.bundle_tokens // self.length)

    def bundle(self, tokens: NDArray[np.int64]) -> int:
        """Return the number of documents that are packed together.

        Args:
            tokens: (documents,) the tokens of all documents up to each.
        Returns: at least 1; more than there are means that they are too few.
        """
        enough = int(tokens.searchsorted(self.bundle_sequences * self.length)) + 1
        few = int(tokens.searchsorted(Limits.current.short_sequences * self.length)) + 1
        return min(enough, max(few, Limits.current.short_documents))

    def pack(self, lengths: NDArray[np.int64], skip: int, *, is_end: bool) -> tuple[Pieces, int]:
        """Pack a bundle.

        Args:
            lengths: (documents,) tokens of each.
            skip: tokens of the first documents that earlier bundles have.
            is_end: no document follows.
        Returns: the pieces of its sequences, and the number of tokens in them: with split=True the others are
            the next bundle's.
        """
        if not self.split:
            return best_fit(lengths, self.length), int(lengths.sum())
        most = None if is_end else self.bundle_sequences
        return cut(lengths, self.length, skip, most)


class Pieces(NamedTuple):
    """Pieces of documents, in the order of the sequences that they fill.

    `documents`, `starts`, `counts` (pieces,) int64: which document, its first token in the piece, and how
    many. `firsts` (sequences + 1,): the first piece of each sequence, then the number of pieces.
    """

    documents: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    firsts: NDArray[np.int64]

    @property
    def sequences(self) -> int:
        return len(self.firsts) - 1

    def reordered(self, order: NDArray[np.int64]) -> Pieces:
        """Return some of the sequences, in this order."""
        counts = np.diff(self.firsts)[order]
        firsts = starts_of(counts)
        return self._of(np.repeat(self.firsts[order] - firsts[:-1], counts) + np.arange(firsts[-1]), firsts)

    def without(self, is_gone: NDArray[np.bool_]) -> tuple[Pieces, NDArray[np.int64]]:
        """Return the pieces without those of some documents, and which sequences have any piece left."""
        is_kept = ~is_gone[self.documents]
        before = starts_of(is_kept)[self.firsts]
        kept = np.flatnonzero(np.diff(before))
        return self._of(np.flatnonzero(is_kept), np.append(before[kept], before[-1])), kept

    def _of(self, index: NDArray[np.int64], firsts: NDArray[np.int64]) -> Pieces:
        return Pieces(self.documents[index], self.starts[index], self.counts[index], firsts)


def cut(
    lengths: NDArray[np.int64], length: int, skip: int = 0, most: int | None = None
) -> tuple[Pieces, int]:
    """Join documents and cut them into sequences.

    Args:
        lengths: (documents,) tokens of each.
        length: tokens of a sequence.
        skip: tokens that are passed over at the begin.
        most: most sequences, all of them whole. None means all, of which the last may have fewer tokens.
    Returns: the pieces, and the number of tokens in them.
    """
    ends = np.cumsum(lengths) - skip
    tokens = max(0, int(ends[-1])) if len(ends) else 0
    sequences = -(-tokens // length) if most is None else min(most, tokens // length)
    tokens = min(tokens, sequences * length)
    bounds = np.concatenate((ends[(ends > 0) & (ends < tokens)], np.arange(sequences) * length))
    bounds = np.append(np.sort(bounds), tokens)
    first = bounds[:-1][np.diff(bounds) > 0]  # of each piece, among the joined tokens
    counts = np.diff(np.append(first, tokens))
    documents = ends.searchsorted(first, side="right")
    starts = first - (ends - lengths)[documents]
    firsts = np.append(first.searchsorted(np.arange(sequences) * length), len(first))
    return Pieces(documents, starts, counts, firsts), tokens


def best_fit(lengths: NDArray[np.int64], length: int) -> Pieces:
    """Pack whole documents into few sequences. Those of a document that is longer come first.

    Args:
        lengths: (documents,) tokens of each.
        length: tokens of a sequence.
    Returns: the pieces; within a sequence documents are in the order of their numbers.
    """
    wholes, rests = lengths // length, lengths % length
    of_whole = np.repeat(np.arange(len(lengths)), wholes)
    number = np.arange(len(of_whole))
    others = np.flatnonzero(rests)
    bins = _bins(rests[others], length) + len(number)
    documents, sequences = np.concatenate((of_whole, others)), np.concatenate((number, bins))
    starts = np.concatenate((number - (np.cumsum(wholes) - wholes)[of_whole], wholes[others])) * length
    counts = np.concatenate((np.full(len(number), length), rests[others]))
    order = np.lexsort((documents, sequences))
    last = int(sequences[order[-1]]) if len(order) else -1
    firsts = sequences[order].searchsorted(np.arange(last + 2))
    return Pieces(documents[order], starts[order], counts[order], firsts)


def _bins(sizes: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """Return a bin (n,) for each of some sizes in [1, room), by best-fit decreasing.

    Sizes of one value go into the bins of the least room that suffices, as many as fit, before others.
    """
    order = np.argsort(-sizes, kind="stable")
    falling = sizes[order]
    edges = np.flatnonzero(np.diff(falling, prepend=room, append=0))  # of runs of one size
    placed: list[int] = []  # bins, in the order of falling sizes
    bins_with: dict[int, list[int]] = {}  # by the room that is left, 0 excepted
    rooms = count = 0  # the bit of each room that some bin has; bins
    for size, left in zip(falling[edges[:-1]].tolist(), np.diff(edges).tolist(), strict=True):
        while left:
            fitting = rooms >> size
            if fitting:
                found = size + (fitting & -fitting).bit_length() - 1
                bins = bins_with[found]
            else:  # new bins
                found = room
                bins = bins_with[found] = [*range(count, count - -left // (room // size))]
                count += len(bins)
            each = min(found // size, left)
            some = bins[-(left // each) :]
            del bins[-len(some) :]
            if not bins:
                rooms &= ~(1 << found)
            placed += some * each
            left -= len(some) * each
            if rest := found - each * size:
                bins_with.setdefault(rest, []).extend(some)
                rooms |= 1 << rest
            if bins:
                rooms |= 1 << found
    result = np.empty(len(sizes), np.int64)
    result[order] = placed
    return result


@dataclass(frozen=True, slots=True, eq=False)
class Within:
    """A place of an epoch of sequences, within the bundle at its position.

    `lengths` are the tokens of the bundle's documents, from the epoch's position on; 0 for one that has left
    the cache. `skip` tokens are of earlier bundles, which had `before` sequences; `sequences` of this one
    were delivered.
    """

    length: int
    split: bool
    skip: int
    before: int
    sequences: int
    lengths: NDArray[np.int64]

    def to_state(self) -> dict[str, Any]:
        """Return plain ints, bools and lists."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        return {"version": _VERSION, **plain, "lengths": self.lengths.tolist()}

    @classmethod
    def from_state(cls, state: Any) -> Within:
        """The inverse of `to_state`.

        Raises: KeyError, TypeError, ValueError, OverflowError: it is damaged.
        """
        if state["version"] != _VERSION:
            raise ValueError(f"sequences of version {state['version']!r}, this arrowcache has {_VERSION}")
        if any(type(number) is not int for number in state["lengths"]):
            raise TypeError("lengths that are no ints")
        lengths = np.array(state["lengths"], np.int64)
        if (lengths < 0).any() or lengths.sum(dtype=np.float64) > MAX_COUNTED:
            raise ValueError("lengths that cannot be")
        return cls(
            parse_count(state["length"], "length"),
            bool(state["split"]),
            parse_count(state["skip"], "skip", least=0),
            parse_count(state["before"], "before", least=0),
            parse_count(state["sequences"], "sequences", least=0),
            lengths,
        )


def require_packing(packing: Packing | None, within: Within | None) -> None:
    """Raises: ValueError: a state with a place within a bundle does not fit a loader's sequences."""
    if within is None:
        return
    said = f"the state is of sequences of length={within.length}, split={within.split}"
    if packing is None:
        raise ValueError(f"{said}: load it into what arrowcache.torch.packed(...) returns")
    if (packing.length, packing.split) != (within.length, within.split):
        raise ValueError(
            f"{said}, and this loader makes those of length={packing.length}, split={packing.split}: give it "
            "the same until the epoch is over"
        )
