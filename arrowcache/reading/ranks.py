"""Ranks: the agreement of the ranks of one job on one node to read the same snapshot in an epoch.

Without a framework and without a collective: through one file an epoch in the cache's `ranks/`.
The first rank to link it proposes its own snapshot; every later rank finds it, and reads just
those segments. This module owns the file and a lease on its segments; the loader owns the snapshot.

    begin     is there a file? Under cache.lock: does some rank hold it? Then join it: check the
              terms, lease its segments, hold it, add a line for this process.
              Else take a snapshot, holding nothing meanwhile; look again; link a file that is
              whole, held and joined before anybody can see it.
    joined    a file keeps its segments leased until all local ranks have joined it, even where
              the epoch of this rank ended before. After that only the loaders' own leases count.
    over      the epoch ended here and all have joined: let go of the file. The last one to let
              go unlinks it. A file that nobody holds is debris: never read, swept by the next
              proposal and by whoever seeks room.

Guarantees:
- ranks that join one file read the same rows, in the same order, or an error says why not;
- holding is a kernel lock: a rank that is killed leaves nothing that a person must clean;
- no rank waits for another here, and one that waits for rows holds nothing of that epoch, but shows that it
  waits: once all ranks of this node do, none of them is about to start samplers;
- where a user's function chooses the rows, one rank asks it: `snapshot` returns None to others meanwhile;
- a path is never made of the text of a file or a user: a run's name goes through `ranks_name`;
- ending an epoch is safe in any thread, finalizers and forked children included. A child is
  never its parent: it holds nothing, and a beginning there is one more process that joins.

A rank that begins an epoch only after all others closed their loaders finds no file, and reads the
segments published by then.

Of a frozen cache nothing is agreed on: its ranks, on any number of nodes, read all that is there, in an order
that their arguments decide.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress

from arrowcache.errors import ArrowCacheError, CacheFormatError, CorruptSegmentError, warn
from arrowcache.lifetimes import Mutex, forgets_in_child, until_exit
from arrowcache.limits import Limits
from arrowcache.os_errors import explaining
from arrowcache.reading.options import RankInfo
from arrowcache.reading.row_weights import Weights, read_weights, write_weights
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.folder import RanksFile
from arrowcache.storage.layout import RanksRecord, SegmentInfo, Term, joiner_line, joiners, ranks_name
from arrowcache.storage.lease import Lease
from arrowcache.storage.store import Store
from arrowcache.units import format_count

_UNLINK_SECONDS = 0.1  # longest wait for cache.lock; others sweep, too
_EVERY_EPOCH = range(2**63)

#: The next loader's number, for each cache, run and rank of this process.
_numbers: dict[tuple[object, str, int], Iterator[int]] = {}


class SharedPlan:
    """One loader's part in the shared plan of the ranks of its run. Thread-safe.

    Args:
        rank_info: this rank of the run. Loaders count from 0 for each cache, run and rank of a
            process; those of the same number agree, so all ranks make their loaders in one order.
    """

    _closed = True  # not made yet

    def __init__(self, store: Store, rank_info: RankInfo) -> None:
        self._store = store
        self._rank_info = rank_info
        with explaining(store.folder.path):
            key = (store.identity, rank_info.run, rank_info.rank)
        self._number = next(_numbers.setdefault(key, itertools.count()))
        self._begun: list[range] = []  # runs of epochs that followed one another; a loaded state begins one
        self._has_warned = False
        self.others_take = False  # of the last `snapshot`
        self._hold_nothing()
        self._closed = False
        forgets_in_child(self)

    def _hold_nothing(self) -> None:
        self._held: set[_Held] = set()
        self._left: list[str] = []  # files that this rank no longer holds
        self._mutex = Mutex("the end of an epoch")

    def forget_in_child(self) -> None:
        """Drop all: the kernel's locks stay with the parent."""
        self._hold_nothing()

    def snapshot(
        self,
        epoch: int,
        terms: Mapping[str, Term],
        take: Callable[[], Snapshot | None],
        *,
        ahead: bool = False,
        alone: bool = False,
    ) -> Snapshot | None:
        """Begin an epoch: return the snapshot that this node's ranks agreed on, open and all mapped.

        Args:
            epoch: its number. An epoch that is begun again, as after a loaded state, is agreed on anew.
            terms: values that must be the same on all ranks; world_size is added.
            take: called without any lock, if nobody has begun the epoch: returns a snapshot, all
                mapped, or None while there are too few rows. It should not wait itself:
                by the next call another rank may have begun.
            ahead: True if the rank has not come to this epoch yet, and perhaps never will: ranks work
                ahead by different amounts. It counts as begun when `begin_delivery` is called.
            alone: True if only one rank at a time is to call `take`, which takes long.
        Returns: the result of `take`, or a snapshot of the segments that another rank took. None if
            `take` returned None, or if another rank calls it now: then `others_take` is True. The caller
            closes it, and then calls `release`.
        Blocks: for cache.lock, and while another rank's segments are mapped; never for a rank.
        Raises: ValueError: the terms differ, or the segments are gone. CorruptSegmentError: one of
            them cannot be read here; the other ranks count on its rows. CacheFormatError: the file
            was altered. LockTimeoutError, CacheFullError, OSError, and errors of `take`.
        """
        self.release_joined()
        self._warn_of_absent_ranks()
        name = ranks_name(self._rank_info.run, self._number, epoch, self._times_begun(epoch))
        record = {**terms, "world_size": self._rank_info.world_size}
        self.others_take = False
        with ExitStack() as taking, ExitStack() as undo:
            mine, theirs = None, self._joined(name, epoch, record)
            if theirs is None and alone:
                self.others_take = not taking.enter_context(self._store.usage.alone(name))
                if self.others_take:
                    return None
                theirs = self._joined(name, epoch, record)  # another rank took one just now
            if theirs is None:
                mine = take()
                if mine is None:
                    return None
                undo.callback(mine.close)  # after theirs is mapped: segments in both stay mapped
                with self._store.locked():
                    theirs = self._join(name, epoch, record)
                    if theirs is None:
                        self._propose(name, epoch, record, mine)
                        undo.pop_all()
            if theirs is not None:
                self._map(theirs, epoch)
        if not ahead:
            self.begin_delivery(epoch)
        return mine if theirs is None else theirs

    def show_waiting(self) -> ExitStack:
        """Show that this rank waits for rows, until it is closed or dropped, or this process dies."""
        return self._store.usage.show_rank(self._waits, self._rank_info.rank)

    def all_wait(self) -> bool:
        """True if all ranks of this node, which are numbered one after another, wait for rows now."""
        rank, count = self._rank_info.rank, self._rank_info.local_world_size
        first = rank - rank % count
        return self._store.usage.all_shown(self._waits, range(first, first + count))

    @property
    def _waits(self) -> str:
        return f"waits {self._number} {self._rank_info.run}"

    def begin_delivery(self, epoch: int) -> None:
        """Record that this rank has begun an epoch: beginning it once more is agreed on anew."""
        if self._begun and self._begun[-1].stop == epoch:
            self._begun[-1] = range(self._begun[-1].start, epoch + 1)
        else:
            self._begun.append(range(epoch, epoch + 1))

    def _times_begun(self, epoch: int) -> int:
        return sum(epoch in run for run in self._begun)

    def release(self, epoch: int) -> None:
        """Release the file of an epoch that ended here, at once or when all local ranks have joined."""
        self._release_joined((epoch,))
        self._unlink()

    def release_joined(self) -> bool:
        """Release the segments of epochs that all local ranks have begun by now.

        Reads a small file for each epoch that not all have begun yet, otherwise nothing. Call it wherever
        a loader gives up segments of its own, and now and then while it is idle.
        Returns: True if an epoch is still held.
        """
        self._release_joined(())
        self._unlink()
        return bool(self._held)

    def close(self) -> None:
        """Release everything, whoever has joined. Idempotent."""
        self._closed = True
        self._release_joined(_EVERY_EPOCH)
        self._unlink()

    @until_exit
    def __del__(self) -> None:
        if not self._closed:
            self.close()

    def __repr__(self) -> str:
        return f"<SharedPlan: loader {self._number} of {self._rank_info}>"

    # beginning

    def _joined(self, name: str, epoch: int, terms: Mapping[str, Term]) -> Snapshot | None:
        """Join the epoch's file, if there is one. A rank that waits for rows takes no lock."""
        if not os.path.lexists(self._store.folder.ranks / name):
            return None
        with self._store.locked():
            return self._join(name, epoch, terms)

    def _join(self, name: str, epoch: int, terms: Mapping[str, Term]) -> Snapshot | None:
        """Join the epoch's file, if some rank holds one; under cache.lock."""
        with ExitStack() as undo:
            file = self._store.folder.open_ranks_file(name)
            if file is None:
                return None
            undo.callback(file.close)
            if not file.is_held():
                return None
            record = self._checked(name, file.read(), epoch, terms)
            segments = self._segments_of(record, epoch)
            keeper, lease = self._lease(segments), self._lease(segments)
            for each in (keeper, lease):
                if each is not None:
                    undo.callback(each.close)
            file.hold()
            file.append(joiner_line(self._rank_info.rank, os.getpid()))
            snapshot = Snapshot(
                self._store,
                segments,
                lease,
                next_seq=record.next_seq,
                left_out_rows=record.left_out_rows,
                bitmaps=record.bitmaps,
                weights=self._weights_of(record, epoch),
            )
            undo.pop_all()
        self._hold(_Held(name, epoch, file, keeper))
        return snapshot

    def _weights_of(self, record: RanksRecord, epoch: int) -> Weights | None:
        if not record.weights:
            return None
        whose, way = (
            f"of the ranks' epoch {epoch}",
            "end it on all ranks, the next one has weights of its own",
        )
        return read_weights(self._store, record.weights, whose, way)

    def _propose(self, name: str, epoch: int, terms: Mapping[str, Term], mine: Snapshot) -> None:
        """Link the epoch's file, in place of debris; under cache.lock, with the segments leased."""
        folder, segments = self._store.folder, mine.segments
        seqs = [segment.seq for segment in segments]
        weights = "" if mine.weights is None else mine.weights.name
        data = RanksRecord(terms, seqs, mine.next_seq, mine.left_out_rows, mine.bitmaps, weights).pack()
        data += joiner_line(self._rank_info.rank, os.getpid())
        folder.sweep()
        if mine.weights is not None:
            write_weights(self._store, mine.weights, of_ranks=True)
        self._store.require_room(len(data))
        keeper = self._lease(segments)
        with ExitStack() as undo:
            if keeper is not None:
                undo.callback(keeper.close)
            file = folder.link_ranks_file(name, data)
            undo.pop_all()
        self._hold(_Held(name, epoch, file, keeper))

    def _lease(self, segments: Sequence[SegmentInfo]) -> Lease | None:
        return self._store.lease_on(segments) if segments else None

    def _hold(self, held: _Held) -> None:
        reference = weakref.ref(self)

        def release_joined() -> None:
            # A writer of this process needs room, and has cache.lock: it sweeps the file.
            if (shared_plan := reference()) is not None:
                shared_plan._release_joined(())

        if held.lease is not None:
            held.lease.on_contention = release_joined
        self._held.add(held)
        self._release_joined(())  # the last rank to join needs no lease; nor does a closed one

    def _checked(self, name: str, data: bytes, epoch: int, terms: Mapping[str, Term]) -> RanksRecord:
        """Check the content of a file that some rank holds against this rank's terms, and return it.

        Raises: ValueError: the terms differ. CacheFormatError: the content is not valid. Whoever holds
            the file goes on with its first content: a second file would part the ranks.
        """
        try:
            record = RanksRecord.unpack(data)
        except CacheFormatError as error:
            raise CacheFormatError(
                f"{self._store.folder.ranks / name} was altered while ranks use it, {error}: restart the job"
            ) from None
        differences = [
            f"{key} is {terms.get(key)!r} here and {record.terms.get(key)!r} there"
            for key in dict.fromkeys([*terms, *record.terms])
            if terms.get(key) != record.terms.get(key)
        ]
        if differences:
            raise ValueError(
                f"rank {self._rank_info.rank} does not fit the ranks of run {self._rank_info.run!r} that "
                f"began epoch {epoch} before it: {', '.join(differences)}; give all ranks the same, "
                "or each job a run_id of its own"
            )
        return record

    def _segments_of(self, record: RanksRecord, epoch: int) -> list[SegmentInfo]:
        listed = {segment.seq: segment for segment in self._store.segments()}
        segments = [listed[seq] for seq in record.seqs if seq in listed]
        if len(segments) < len(record.seqs):
            raise ValueError(
                f"rank {self._rank_info.rank} comes too late to epoch {epoch}: "
                f"{len(record.seqs) - len(segments):,} of its {format_count(len(record.seqs), 'segment')} "
                "have left, since "
                f"{format_count(self._rank_info.local_world_size, 'process', 'processes')} had joined; set "
                "LOCAL_WORLD_SIZE to the number of ranks on this node, and give each job a run_id of its own "
                f"(it is {self._rank_info.run!r})"
            )
        return segments

    def _map(self, snapshot: Snapshot, epoch: int) -> None:
        """Map all of another rank's segments: the same rows, or none."""
        before = snapshot.segments
        try:
            snapshot.map_all()
            if damaged := sorted({s.name for s in before} - {s.name for s in snapshot.segments}):
                are = "is" if len(damaged) == 1 else "are"
                raise CorruptSegmentError(
                    f"{len(damaged)} of {format_count(len(before), 'segment')} that the ranks agreed on "
                    f"{are} damaged ({', '.join(damaged[:3])}): end this epoch on all ranks, the next one "
                    "goes without them"
                )
        except BaseException:
            snapshot.close()
            self.release(epoch)
            raise

    # ending

    def _release_joined(self, ended: Container[int]) -> None:
        """End epochs, and release all that is not needed any more; waits for nothing.

        The garbage collector may call this at any point of any thread.
        """
        self._mutex.tell(ended, self._handle)

    def _handle(self, ended: Container[int]) -> None:
        for held in self._held.copy():
            held.has_ended |= held.epoch in ended
            if self._closed or held.is_joined_by(self._rank_info.local_world_size):
                held.unlease()
                if self._closed or held.has_ended:
                    held.close()
                    self._held.discard(held)
                    self._left.append(held.name)

    def _unlink(self) -> None:
        """Unlink files that nobody holds now, if cache.lock is free soon; others are swept later."""
        left, self._left = self._left, []
        if left:
            with (
                suppress(OSError, ArrowCacheError),
                self._store.locked(_UNLINK_SECONDS),
            ):  # on failure it is debris
                for name in left:
                    self._store.folder.drop_ranks_file(name)

    def _warn_of_absent_ranks(self) -> None:
        waiting = [held for held in self._held.copy() if held.has_ended]
        if len(waiting) >= Limits.current.unjoined_epochs and not self._has_warned:
            self._has_warned = True
            joined = min(held.joined for held in waiting)
            warn(
                f"{format_count(len(waiting), 'epoch')} ended on rank {self._rank_info.rank} that only "
                f"{joined} of {self._rank_info.local_world_size} ranks on this node have begun; their "
                "segments stay leased until then: set LOCAL_WORLD_SIZE if fewer ranks read on this node"
            )


class _Held:
    """One epoch's file, and the lease on its segments, as long as this rank needs them."""

    def __init__(self, name: str, epoch: int, file: RanksFile, lease: Lease | None) -> None:
        self.name = name
        self.epoch = epoch
        self.has_ended = False
        self.joined = 0
        self.lease = lease
        self._file = file

    def is_joined_by(self, count: int) -> bool:
        if self.joined < count:
            with suppress(OSError):  # asked again later
                self.joined = len(joiners(self._file.read()))
        return self.joined >= count

    def unlease(self) -> None:
        if self.lease is not None:
            self.lease.close()
            self.lease = None

    def close(self) -> None:
        self.unlease()
        self._file.close()
