"""Loader: epochs over a cache, as batches of NumPy arrays.

`iter` takes the snapshot, so the epoch has all rows published before it. `next` begins batches ahead,
which native threads copy, and hands out the oldest: no Python thread takes part in that. One epoch is
delivered at a time. This module is the face, and has the rules of every loader: how an epoch begins and ends,
its state, its counts, forks and the interpreter's exit. A loader has an `EpochSource`, which begins epochs,
and an `Assembly`, which makes their batches: here those of a cache, in torch/loader.py also those of a
dataset. stream.py is the loop; epoch.py begins epochs; plan.py and order.py say which rows a batch has;
assembly.py makes batches, in memory of slots.py; columns.py says what each column of a batch is; gather.py
reads rows.

A face for a framework overrides `_finish`, which converts a batch in the consumer's thread, and names itself
by `_face` and `_as_dataset`; one with a device also `_memory` and `_hand_out`; one that finds its rank by
itself `_rank_info`.
"""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from arrowcache.arguments import OF_DATALOADER, instead
from arrowcache.errors import WHERE, called
from arrowcache.lifetimes import Closable, Origin, at_exit, call_all, until_exit
from arrowcache.reading.assembly import MEMORY, Assembly, Batch, Memory, RowAssembly
from arrowcache.reading.batch_source import CLOSED, LOADED, NEWER, Batches, EpochIterator
from arrowcache.reading.columns import Columns
from arrowcache.reading.epoch import EpochProgress, Epochs, EpochSource
from arrowcache.reading.once import OnceEpochs, UnusedRows
from arrowcache.reading.options import LoaderArguments, LoaderOptions, RankInfo, takes
from arrowcache.reading.packing import Packing
from arrowcache.reading.stats import LoaderStats, Meter
from arrowcache.reading.stream import BatchStream, IdleSnapshots
from arrowcache.storage.counters import LoaderPage
from arrowcache.storage.locks import once_unlocked
from arrowcache.storage.recovery import HasStore, store_of
from arrowcache.storage.row_ids import row_ids
from arrowcache.units import format_count

if TYPE_CHECKING:
    from typing import Unpack

    import numpy as np
    from numpy.typing import NDArray

_CLOSED = "the loader is closed: make a new one"
_ON_A_DEVICE = (
    "its batches are NumPy's: arrowcache.torch.Loader(cache, device='cuda') copies them to a device"
)
_INSTEAD = OF_DATALOADER | instead("device", "devices", "pin_memory", "pin_memory_device", say=_ON_A_DEVICE)


class Loader(Closable):
    """Batches of a cache's rows: `dict[str, ndarray]`; each `for` is an epoch over a new snapshot.

    Args:
        cache: a Cache, or the path of one.
        batch_size: rows of a batch; below 2**31, and few enough to fit into memory. None means 64, or as many
            as `batch_tokens` allows.
        shuffle: "rows" (the whole snapshot, uniformly; from the disk row by row); "window" (within a window
            that slides from the oldest segment to the newest; it reads the disk in order, and lets samplers
            replace the segments that it has passed); "blocks" (runs of batch_size contiguous rows, in random
            order); None (oldest first). Batches of "blocks" and None are zero-copy views where they are one
            run of rows.
        seed: selects the order, together with the epoch's number and the segments.
        columns: names of the columns. None means all. Or a dict of names, with a function each, or None for
            a column as it is stored: {"image": decode, "label": None}. A function gets the batch's column,
            (batch_size, *shape), a list of str or bytes, or `Values`, which it may change. It returns an
            ndarray with the same first axis, of any further shape and dtype, which takes the column's place.
            It is called where the transform is, and before it, and counts as one: in a worker thread or
            process. Its errors are raised in place of the batch.
        drop_last: leave out an incomplete last batch. Otherwise it is short, or padded with the epoch's
            first rows if there are several ranks.
        transform: function called with each batch, ahead, in a worker thread or process. The loader yields
            its result.
        workers: number of threads or processes that run the transform, at most 256. 0 means one thread,
            whatever worker_type says, so that code may choose the number alone.
        worker_type: "process" (for transforms that hold the GIL; they must be picklable by cloudpickle, and
            return a dict of ndarrays, numbers, `Values`, lists of str or lists of bytes) or "thread" (for
            transforms that release it).
        prefetch: number of batches begun ahead, beside those in workers; at most 65536. 0 means none: each is
            begun as it is asked for. None means two to eight, as many as the processor's cache holds; while
            rows come from the disk, as many as have 256 rows, but at most 64 MiB; with worker processes four.
        where: SegmentInfo -> bool, True for segments to read.
        rows: rows to read of these. "included": all but excluded ones (`Cache.exclude`); "all"; a tag
            (`Cache.tag`); row ids in any form that `Cache.exclude` takes; a Python function of a segment's
            columns that gives its mask, (rows,) bool, such as lambda columns: columns["label"] != 3; or a
            `pyarrow.compute` expression, such as field("label") != 3. A function is called for each segment
            of each epoch, by one of a node's ranks; the columns that it read stay in memory, up to a
            sixteenth of it. The answer of an expression is remembered, 1 byte a row; of one that reads
            annotations (`Cache.annotate`) until these change. An expression reads columns of one number,
            text or time a row, `_seq`, `_row`, `_age_seconds` and annotations; float16 and bfloat16 are
            float32 there. A missing annotation is null, and null is no. A row that it cannot take, such as
            one that it divides by zero, is a ValueError of the epoch, which names it. Tags and exclusions are
            looked up in each epoch. Excluded rows are left out of each but "all". An epoch keeps the rows
            that it began with, also where it is resumed. This takes 4 bytes of memory a row, of segments that
            are read in part. A masked array is refused: fill it, by .filled(False).
        with_ids: add `_seq`, `_row` (int64) and `_age_seconds` (float64) of each row.
        rank: rank of this process. None means a single process. Each step has batch_size rows a rank,
            disjoint, and all ranks have equally many steps.
        world_size: number of ranks. None with `rank`.
        run_id: name of the job whose ranks agree on snapshots: any text, the same on all of them, since a
            rank with another name cannot be told from another job. None means TORCHELASTIC_RUN_ID, or
            MASTER_ADDR and MASTER_PORT. Of a frozen cache (`Cache.freeze`) ranks agree on nothing, and need
            none: that all have the same arguments is not checked.
        epoch_rows: rows of an epoch, of all ranks together, independent of the snapshot's size. Fewer are
            drawn without replacement, more are reshuffled passes. With `batch_tokens` they do not fix the
            number of steps.
        wait_rows: number of rows that must be published before an epoch begins; one full step always must.
        timeout: seconds that a step waits for its batch, and an epoch for rows. An epoch counts from the last
            row that a sampler of the cache drew, if that is later. It also gives up when published segments
            have brought no new rows for `timeout` seconds, because `where` refuses them or the cache is full.
            It gives up after a second where there are too few rows for a step, or none, nobody writes, and
            no other rank might begin to; but `wait_rows` above the rows that are there, and above 1, is
            waited for. None means no limit, except in this last case.
        window_bytes: size of the window of shuffle="window". None means a quarter of the memory or of the
            capacity, the lesser; of a frozen cache, where no machine differs, 2 GiB in place of the first.
        paced: keep the cache's pace, and count the rows served. False does neither, such as for validation.
        batch_tokens: size of a padded batch, in place of batch_size: the rows times the length of the longest
            is at most this. Nothing is padded here. Rows of similar length come together, other ones in each
            epoch; shuffle is "rows" or None (oldest first, in parts of about a hundred batches). Ranks share
            the rows of the last batches, and `drop_last` is about a last step of fewer rows than ranks. The
            lengths are read when an epoch begins, of new segments alone; this takes 4 bytes of memory and
            some 0.1 us a row. A longer row is then a ValueError that names it.
        length_of: name of the column that tells the length of each row, for `batch_tokens`: the number of
            items of a ragged column, or the value of an integer one of shape (). It need not be among
            `columns`. An empty row counts as 1.
        weights: draw rows with replacement, each as often as its weight says: the name of an annotation
            (`Cache.annotate`; a row without one weighs as much as the heaviest) or of a column of one number
            a row, or a function or an expression as of `rows` that gives (rows,) numbers, where a null of an
            expression is a missing one. A name that is neither is an error, unless `expect` has it. In a
            cache without any annotation one that is like no column's is a warning at first, and an error of
            the next epoch once rows have only other annotations. Weights are fixed when an epoch begins, so
            `epoch_rows` is the interval at which new ones take hold. Of a full cache the oldest rows leave
            for them: 4 bytes a row, and up to an eighth of the capacity for annotations. None means each row
            once.
        expect: names of tags and annotations that are only to come, for `rows` and `weights`: without it a
            name that no row has or had is an error, of `weights` as said there. A name that neither asks for
            is an error, too. A loader then waits for rows that get such a tag, and an annotation is missing
            from all rows until there is one.
        once: a name, such as "learner", that has each row once. There are no epochs: each `next` chooses the
            oldest batch_size rows then that `rows` accepts, and that the name has not had, by this loader or
            an earlier one; they come oldest first. Nothing is begun ahead, and nothing is leased between two
            batches, so rows may leave the cache unread: `stats().unread_rows` counts them. A `next` waits for
            rows while somebody writes, or nobody ever did, at most `timeout`; else the iterator ends, and
            rows that are too few for a batch stay. With drop_last=False they come as the last one. A batch is
            used as the next one is asked for, or the loader is closed while no exception is handled; a
            process that dies before that has it again. After an error iterate anew. A name has one loader at
            a time. Ranks have names of their own, and a `where`. There is no state to save: the
            cache keeps which rows a name has had, in some ten bytes a batch, so an older checkpoint goes on
            with those that are left. It goes without epoch_rows, weights, batch_tokens, workers, prefetch and
            wait_rows.
        acknowledge: with `once`, a batch is used as `done(batch)` is called. Batches have ids then, as of
            `with_ids`. Rows that are not done come again once the name has a new loader.

    Batches are (batch_size, *shape) arrays over reused memory that is not overwritten while any
    array over it lives, or views of mapped files, written to in private; text and bytes come as lists,
    ragged columns as `Values(data, offsets)`.
    Raises: ValueError, TypeError: an argument that does not fit. FileNotFoundError,
        CacheFormatError: no such cache.
    """

    _may_yield_views = True  # over the cache's files; loaders of a framework may forbid it
    _is_dropped = False  # by the garbage collector, or the interpreter's exit
    _packing: Packing | None = None  # sequences that a loader of a framework makes of documents
    _face = "a Loader"  # what it is to its user
    _as_dataset = (
        "If it has to be a torch.utils.data.DataLoader, take arrowcache.torch.dataloader(cache, batch_size, "
        "num_workers=...)"
    )

    @takes("Loader", LoaderArguments, _INSTEAD)
    def __init__(
        self,
        cache: HasStore | str | os.PathLike[str],
        batch_size: int | None = None,
        **arguments: Unpack[LoaderArguments],
    ) -> None:
        self._store, may_view = store_of(cache), self._may_yield_views
        self._options = options = LoaderOptions(
            self._store.settings, batch_size, may_view=may_view, packing=self._packing, **arguments
        )
        self._meter = Meter(options.workers, options.shuffle, options.chosen_by)
        epochs: EpochSource[Any]
        if options.once is None:
            epochs = Epochs(self._store, options, self._meter)
            epochs.join(self._rank_info(begins=False))
        else:
            epochs = OnceEpochs(self._store, options, self._meter)
        self._open(self._store.folder.path, epochs, self._new_assembly(), options.timeout)

    def _open(
        self,
        path: Path,
        epochs: EpochSource[Any],
        assembly: Assembly,
        timeout_seconds: float | None,
    ) -> None:
        """Have these parts; loaders of other sources than a cache call this in their constructor.

        Args:
            path: folder of the cache, where other processes find the counts of this loader.
            epochs: begins the epochs, and counts them.
            assembly: makes their batches.
            timeout_seconds: longest wait for a batch. None means no limit.
        """
        self._path, self._epochs, self._assembly, self._meter = path, epochs, assembly, epochs.meter
        self._timeout_seconds = timeout_seconds
        self._origin = Origin()
        self._idle_snapshots: IdleSnapshots | None = None  # while it is in use
        self._stream: BatchStream | None = None  # of the iterator that began last
        self._closed = False
        _living.add(self)

    def __iter__(self) -> Batches:
        """Begin the next epoch: take the snapshot, at once. An epoch still in progress ends.

        If its iterator is dropped before the first `next`, the epoch was never begun: the next `iter` begins
        it.
        Blocks: until `wait_rows` rows are published.
        Raises: LoaderTimeoutError: too few rows came in time. MissingSegmentsError: see `load_state_dict`.
        """
        return self._begin(endless=False)

    def repeat(self) -> Batches:
        """Batches without end, for step-based training: epochs follow one another without a seam.

        The next snapshot is taken when the last batch of an epoch has been begun. Functions and expressions
        of `rows` and `weights` choose its rows before that, a part in each of the last 64 steps, or of the
        second half of a shorter epoch; but with ranks a function is called when the first of them begins it,
        and annotations are read then. `steps`, `stats` and
        `state_dict` tell of the epoch that is being delivered.
        Blocks, Raises: as `iter`; later epochs that find too few rows raise in the step that needs them.
        """
        return self._begin(endless=True)

    @property
    def steps(self) -> int | None:
        """Batches of the epoch in progress, or of the last one; None before the first."""
        progress = self._epochs.progress
        return None if progress is None else progress.order.steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this loader: the delivered rows of the epoch, without batches on their way.

        Returns: plain ints, strings and lists, a few hundred bytes, and some 15 more for each segment whose
            number of rows differs from the one before it; with `batch_tokens` also a bit for each row of some
            hundred batches, as text; and where an epoch does not read all rows, of each segment that it reads
            in part, a bit for each row, as text. It is the same on all ranks, and loadable with
            `torch.load(weights_only=True)`. After a `break` it is the state of the epoch that was left; after
            the end of an epoch, of the next one. Of a frozen cache it has the digest of its content.
        Raises: ValueError: of a frozen cache, a Python function, or `_age_seconds`, chooses or weighs rows:
            that cannot be repeated elsewhere.
        """
        progress = self._epochs.progress
        is_begun = progress is not None and not self._is_over(progress)
        plan = progress.remaining() if progress is not None and is_begun else self._epochs.planned
        return self._epochs.to_state(plan)

    def load_state_dict(self, state: dict[str, Any], missing: str = "skip") -> None:
        """Let the next `for` finish the epoch of a saved state, then go on with the one after it.

        The rest of the epoch has the rows that were not delivered, each once, in the order of the state
        (its seed and shuffle), whatever this loader's batch_size, workers and ranks. With `batch_tokens` they
        are in the same batches, if the budget is the same and no row is missing; a state of batches by
        `batch_size` cannot go on by `batch_tokens`, nor the reverse, except between two epochs.

        Args:
            state: what `state_dict` returned, of a loader of this cache; of a frozen one, or any copy of it.
            missing: treatment of rows whose segments have left the cache since: "skip" them, with a warning,
                or "raise".
        Raises: ValueError: not a valid state. MissingSegmentsError: missing="raise", and rows are missing;
            nothing has changed then.
        """
        if self._closed:
            raise ValueError(_CLOSED)
        plan = self._epochs.to_resume(state, missing)
        self._end_current(LOADED)
        self._epochs.resume(plan, missing)

    def probabilities(self, ids: object) -> NDArray[np.float64]:
        """Return the probability of rows to be one draw of the epoch in progress, or of the last one.

        A loss that is divided by it has the mean that equal weights would give (importance sampling).

        Args:
            ids: the rows, as of `Cache.exclude`; batches of `with_ids=True` have them.
        Returns: (n,), 0 for rows that are not in the epoch.
        Raises: ValueError: no `weights`, or no epoch has begun. TypeError, ValueError: not ids.
        """
        progress: EpochProgress | None = self._epochs.progress
        if progress is None or progress.plan.weights is None:
            raise ValueError("probabilities are those of Loader(weights=...), of an epoch that has begun")
        return progress.plan.probabilities(row_ids(ids))

    def set_rows(self, rows: object) -> None:
        """Let a loader with `once` choose other rows, from the next `next` on.

        That looks anew at the rows that the name has not had, oldest first, until its batch is full: at some
        0.05 us for each that does not match, and 0.5 where its columns are read for the first time. Numbers
        stay in memory for that, up to a sixteenth of it.

        Args:
            rows: as of `Loader`, such as `pyarrow.compute.field("version") >= 7`.
        Raises: ValueError: the loader has no `once`, whose batches are chosen one by one. ValueError,
            TypeError: as of `Loader`. The rows stay then.
        """
        self._of_once("set_rows").set_rows(rows)

    def done(self, batch: object) -> None:
        """Take the rows of a batch for used, of a loader with `once` and `acknowledge=True`.

        Args:
            batch: a batch of this loader, or some of its rows in any form that `Cache.exclude` takes. Rows
                that are done already, or have left the cache, are passed over.
        Blocks: for cache.lock, now and then; for the disk, if the cache is durable.
        Raises: ValueError: rows that this loader did not hand out; it has no `acknowledge`, or is closed.
            CacheFullError: the cache has no room to note it.
        """
        rows = self._of_once("done")
        if not self._options.acknowledge:
            raise ValueError(
                "done() belongs to acknowledge=True: without it a batch is used as the next one is asked for"
            )
        rows.done(row_ids(batch))

    def _of_once(self, method: str) -> UnusedRows:
        if not isinstance(self._epochs, OnceEpochs):
            raise ValueError(f"{method}() belongs to Loader(once='a name'): give once=")
        return self._epochs.rows

    def assert_zero_copy(self) -> None:
        """Require that batches are views, now and later: nothing is copied.

        Afterwards a batch that cannot be a view raises ValueError in its step.
        Raises: ValueError: says which option needs a copy, and what to change; or the loader is closed.
        """
        if self._closed:
            raise ValueError(_CLOSED)
        options = self._options
        size, where = options.most_rows, options.where
        if options.budget is not None:
            raise ValueError("batch_tokens gathers rows of similar length, which copies them: use batch_size")
        if not options.shuffling.has_runs:
            raise ValueError(
                f"shuffle={options.shuffle!r} gathers rows from everywhere, which copies them: "
                "use shuffle='blocks' or None"
            )
        if copied := [*Columns.of(self._store.settings.schema, options.names).copied.names]:
            raise ValueError(f"columns {copied} become Python objects, which are copies: leave them out")
        with self._store.looking():
            listed = self._store.segments()
        if where is not None:
            listed = [segment for segment in listed if called(WHERE, where, segment)]
        odd = [segment for segment in listed if segment.rows % size]
        if odd:
            raise ValueError(
                f"{len(odd):,} of {format_count(len(listed), 'segment')}, such as {odd[0].name} of "
                f"{format_count(odd[0].rows, 'row')}, cannot be cut into whole batches of "
                f"{format_count(size, 'row')}: choose batch_size to divide the segments' rows, or create the "
                "cache with such a segment_rows; leave short segments out with `where`"
            )
        self._assembly.require_views()

    def stats(self) -> LoaderStats:
        """Return counts of delivered batches, of waits for them, and of samplers' waits for this loader."""
        self._epochs.note_held_up()
        slot_bytes, slot_growths = self._assembly.slot_stats()
        return self._meter.stats(slot_bytes, slot_growths, self._assembly.in_progress())

    def close(self) -> None:
        """End the epoch, and the threads and processes of workers; lease nothing afterwards. Idempotent.

        The next `next` of an epoch whose last batch was not delivered raises RuntimeError.
        Blocks: at most some seconds, for a running transform.
        """
        if not (self._closed or self._is_dropped or sys.exc_info()[0]):
            self._epochs.settle()
        self._closed = True
        self._end_current(CLOSED)
        if (idle_snapshots := self._idle_snapshots) is not None:  # another thread may close it, too
            self._assembly.close()
            idle_snapshots.close()
            self._idle_snapshots = None
        self._epochs.close()
        self._meter.show_on(None)

    def __len__(self) -> int:
        """Raises: TypeError: a loader has no length. The message also helps users of a DataLoader."""
        raise self._no_dataset()

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: object) -> NoReturn:
        """Raises: TypeError: a loader has no rows by number."""
        raise self._no_dataset()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self._face} cannot be pickled or copied: its threads and its leases are of this process. Pass "
            f"on the cache or its path, and make one where its batches are used. {self._as_dataset}"
        )

    @until_exit
    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self._is_dropped = True
            once_unlocked(self.close)  # close waits for threads that may want the cache's lock

    def __repr__(self) -> str:
        options = self._options
        name = "batch_size" if options.budget is None else "batch_tokens"
        order = f"shuffle={options.shuffle!r}, epoch {self._epochs.next_number}"
        if options.once is not None:
            order = f"once={options.once!r}"
        return f"<{type(self).__name__} of {self._store.folder.path}: {name}={options.most_rows}, {order}>"

    def _no_dataset(self) -> TypeError:
        return TypeError(
            f"{self._face} is no dataset: it has no length and no items, since the rows of a rolling cache "
            "are others in each epoch. It makes batches itself: iterate it, `for batch in loader`, and ask "
            f"`loader.steps` for the steps of the epoch in progress. {self._as_dataset}"
        )

    def _memory(self) -> Memory:
        """Return what slots are made of; loaders for a framework have memory of their own."""
        return MEMORY

    def _new_assembly(self) -> Assembly:
        """Return what makes batches."""
        memory = self._memory()
        if not self._options.workers or self._options.worker_type != "process":
            return RowAssembly(self._store, self._options, self._meter, memory)
        from arrowcache.reading.workers import pool  # imports much that other loaders do not need

        return pool.RemoteAssembly(self._store, self._options, self._meter, memory)

    def _finish(self, batch: Batch) -> Batch:
        """Convert a batch in the consumer's thread; loaders for a framework override this."""
        return batch

    def _hand_out(self, stream: BatchStream) -> Batches:
        """Return the consumer's iterator; loaders for a device have their own."""
        return EpochIterator(stream, self._timeout_seconds, self._finish)

    def _rank_info(self, *, begins: bool) -> RankInfo | None:  # noqa: ARG002
        """Return the rank known now; loaders for a framework may find another as an epoch begins."""
        return self._options.rank_info

    def _begin(self, *, endless: bool) -> Batches:
        if self._closed:
            raise ValueError(_CLOSED)
        if not self._origin.is_here:  # threads stayed in the process that forked this one
            self._origin, self._stream, self._idle_snapshots = Origin(), None, None
            self._assembly.after_fork()
            self._epochs.after_fork()
        self._end_current(NEWER)
        self._epochs.join(self._rank_info(begins=True))
        try:
            idle_snapshots = self._idle_snapshots
            if idle_snapshots is None:
                page = LoaderPage.open(self._path, self._meter.workers, self._meter.shuffle)
                self._meter.show_on(page, self._assembly.in_progress)
                idle_snapshots = self._idle_snapshots = IdleSnapshots(
                    self._epochs.release_joined, self._assembly.drop
                )
            if self._epochs.parks:
                idle_snapshots.begin()
            self._assembly.prepare()
            endless = endless or self._epochs.begins_when_asked
            stream = BatchStream(self._epochs, self._assembly, idle_snapshots, self._meter, endless=endless)
            try:
                if not stream.begin(lambda: self._closed) or self._closed:
                    raise ValueError(_CLOSED)
                self._stream = stream
                return self._hand_out(stream)
            except BaseException:
                stream.close()
                raise
        finally:
            if self._closed:  # closed meanwhile, by another thread or a signal handler
                self.close()

    def _is_over(self, epoch: EpochProgress) -> bool:
        """True if an epoch was delivered to its end, and its consumer knows."""
        return epoch.is_delivered and (self._stream is None or self._stream.has_stopped)

    def _end_current(self, because: str) -> None:
        if self._stream is not None:
            self._stream.close(because)


def close_all() -> None:
    """Close all loaders of this process, as it exits."""
    here = [loader for loader in _living if loader._origin.is_here]
    for loader in here:
        loader._is_dropped = True
    call_all([loader.close for loader in here])


_living: weakref.WeakSet[Loader] = weakref.WeakSet()
at_exit(close_all)
