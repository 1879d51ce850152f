"""Cache: the public face over the store, snapshots and writers. It decides nothing by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from arrowcache.arguments import face, instead
from arrowcache.arrow.expression import packed, shown
from arrowcache.arrow.schema import FieldType, Schema
from arrowcache.display import Card, Shown, printable
from arrowcache.errors import WHERE, ArrowCacheError, called
from arrowcache.lifetimes import Closable
from arrowcache.limits import Limits
from arrowcache.os_errors import explaining, importing
from arrowcache.reading.row_filter import ExcludedRows, require_rule, rule_of
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage import recovery, verification
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.notes_log import MARKS, NotesLog
from arrowcache.storage.overview import CacheStats, Looks, overview
from arrowcache.storage.pace import Pace
from arrowcache.storage.recovery import create_store, open_store
from arrowcache.storage.row_ids import NumberedRows, on_host, row_ids
from arrowcache.storage.settings import require_pace, settings_of
from arrowcache.storage.store import Store
from arrowcache.storage.verification import Problem
from arrowcache.storage.writer import Writer
from arrowcache.units import format_bytes, format_count, parse_bytes, require_function, require_text

if TYPE_CHECKING:
    import pyarrow.dataset
    from pyarrow.compute import Expression

_INSTEAD = instead("check", say="give it to Cache.open, as each process opens the cache for itself")


class Cache(Shown, Closable):
    """A rolling cache: a local folder of segments with a byte budget that drops its oldest.

    Made by `Cache.create` or `Cache.open`. Safe to use from several threads and processes;
    pickles as its path. Sizes are bytes as int, or text with kB MB GB TB or KiB MiB GiB TiB.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._closed = False
        self._looks = Looks()
        self._log: NotesLog | None = None  # once notes were taken

    @classmethod
    @face("Cache.create", _INSTEAD)
    def create(
        cls,
        path: str | os.PathLike[str],
        schema: Schema | Mapping[str, FieldType],
        capacity: int | str,
        segment_bytes: int | str | None = None,
        segment_rows: int | None = None,
        headroom: float | None = None,
        durable: bool | None = None,
        exist_ok: bool = False,
        pace: Pace | None = None,
    ) -> Cache:
        """Make a cache in a new or empty folder.

        The folder is this user's alone (mode 0700). An existing folder of a group (mode 2770 or
        770) keeps its mode: the group's members share the cache.

        Args:
            path: the folder, on a local disk.
            schema: fields of a sample.
            capacity: the budget in bytes for everything under the folder. A RuntimeWarning tells if the
                disk holds less.
            segment_bytes: upper bound on a segment's file. None means 64 MiB or a sixteenth of the capacity,
                the lesser, but at least one row, or `segment_rows`, and at most a quarter of the capacity. It
                stays when the cache is resized.
            segment_rows: rows of a full segment. None means as many as segment_bytes allows.
            headroom: share of the capacity, in [0, 1), that a loader's epoch leaves to writers if the cache
                is nearly full and somebody writes, so that samplers go on while the epoch runs: it leaves out
                the oldest rows. At least two segments. 0 leaves none: samplers wait for the epoch's end. None
                means 0.1.
            durable: sync each segment before it is published, and its name before publishing
                returns. A power cut then loses no published segment, and nothing needs to be
                checked after one. Each publish waits for the disk: a writer has some third (segments of
                1 MiB) to half (64 MiB) of its speed. Otherwise a power cut may lose or damage the
                segments of the last seconds; damaged ones are found, and quarantined, before a
                row of them is read. None means False.
            exist_ok: open an existing cache; another capacity resizes it, another pace is set. Its other
                settings stay: they can be left out, or said as they are.
            pace: limits on how far training and sampling run ahead of each other, see `set_pace`. None means
                no limit.
        Raises: ValueError: sizes that do not fit together; exist_ok and another setting than the cache's that
            is there. FileExistsError: a cache exists. CacheFormatError: the folder is not a cache.
            SchemaError: exist_ok and another schema.
        """
        schema = Schema(schema)
        options: dict[str, Any] = {"headroom": headroom, "durable": durable}
        settings = settings_of(schema, capacity, segment_bytes, segment_rows, **options)
        require_pace(pace, settings)
        given = {**options, "full_rows": segment_rows}
        if segment_rows is None or schema.variable:  # rows of a fixed size say how many bytes segments have
            given["segment_bytes"] = segment_bytes
        said = [name for name, value in given.items() if value is not None]
        cache = cls(create_store(Path(path).absolute(), settings, exist_ok=exist_ok, said=said))
        if pace is not None and pace != cache.pace:
            cache.set_pace(pace)
        return cache

    @classmethod
    @face("Cache.open", instead("capacity", say="an open cache has one; cache.resize(capacity) changes it"))
    def open(cls, path: str | os.PathLike[str], check: str = "structure") -> Cache:
        """Open a cache.

        Args:
            path: its folder.
            check: checks of a segment when it is first mapped: "structure", or "bytes" too.
        Raises: FileNotFoundError: no folder. CacheFormatError: not a cache, a newer format, or an incomplete
            copy of a frozen cache: nothing was touched. PermissionError: this user may not read and write all
            of it, or not read a frozen one.
        """
        return cls(open_store(Path(path).absolute(), check=check))

    @property
    def path(self) -> Path:
        return self._store.folder.path

    @property
    def schema(self) -> Schema:
        return self._store.settings.schema

    @property
    def store(self) -> Store:
        """The store of this cache, for the package's own use. Raises: ValueError: closed."""
        if self._closed:
            raise ValueError("the cache is closed: open it again with Cache.open")
        return self._store

    @face("Cache.writer")
    def writer(
        self, on_full: str = "wait", timeout: float | None = None, max_delay: float | None = None
    ) -> Writer:
        """Return a writer of samples; use it in a `with` block, or close it.

        While it is open, epochs that begin leave the cache's headroom to writers.

        Args:
            on_full: "wait" for room (a warning after 30 s names the reason), or "raise".
            timeout: longest wait in seconds. None means no limit.
            max_delay: seconds after which a part-filled segment is published.
        """
        return Writer(self.store, on_full=on_full, timeout=timeout, max_delay=max_delay)

    @face("Cache.snapshot")
    def snapshot(self, where: Callable[[SegmentInfo], bool] | None = None) -> Snapshot:
        """Lease all rows that are published now; use it in a `with` block, or close it.

        Until then none of its segments is evicted: of a full cache writers wait, or raise, by their
        `on_full`.

        Args:
            where: SegmentInfo(seq, rows, task, nbytes, ...) -> True for segments to read. None means all.
        Raises: TypeError: `where` is not a function.
        """
        require_function(where, "where")
        return Snapshot.take(self.store, where if where is None else partial(called, WHERE, where))

    def stats(self) -> CacheStats:
        """Return counts of the present content, and of its use by all processes."""
        return self.store.stats()

    def verify(self, repair: bool = True) -> list[Problem]:
        """Check every segment's structure and bytes, names, tasks and the capacity.

        Blocks: reads the whole cache; no other process waits for it.
        Returns: the problems, empty if there are none. Damaged segments are quarantined if `repair`.
        Raises: CacheFrozenError: `repair`, of a frozen cache.
        """
        return verification.verify(self.store, repair=repair)

    def exclude(self, ids: object = None, reason: str = "", *, where: Expression | None = None) -> int:
        """Have all that trains leave out some rows, from the next epoch on.

        A Loader in all its forms, dataloader, TensorFlow and Ray go without them; who only looks sees them
        still. `stats().unselected_rows` of a Loader counts them, and `unselected_rows` of a dataloader's
        `batch_sampler`. An epoch that is under way does not change. An exclusion lasts as long as its
        row, and is on the disk when this returns.

        With `where` in place of ids it is a rule, which holds for rows to come, too, in every process, until
        `include(where=...)` ends it. A Loader evaluates it once for each segment. Of a rule and of what was
        said of a row by its id the later counts: rows that are included afterwards are its exceptions. A rule
        that holds already, with the same reason, stays as it is: a script may say it at each start.

        Args:
            ids: the rows: an (n, 2) array of `_seq` and `_row`; a DataFrame, table, query's result or batch
                with these columns; or a RowId or text such as "83:26", or several.
            reason: a note for people, who find it as `_reason` in DataFrames and SQL.
            where: a `pyarrow.compute` expression, as of `Loader(rows=)`, over scalar columns, `_seq`, `_row`
                and annotations that rows have. A null is no; of annotations the latest value counts.
        Returns: the number of these rows that are still in the cache. Others are passed over.
        Blocks: for cache.lock and the disk; with `where` while the columns that it reads are read.
        Raises: ValueError, TypeError: not ids, or a cache of a dataset; both ids and `where`, or neither; an
            expression that reads what there is not, or cannot be evaluated for a row: nothing is excluded.
            IndexError: a row that never was. CacheFullError: there is no room for the note.
        """
        require_text(reason, "reason")
        notes = self._notes
        if not _is_rule(ids, where):
            return notes.exclude(row_ids(ids), reason)
        rule = rule_of(self.store, where, reason)
        self.store.require_thawed()
        with self.snapshot() as snapshot:
            snapshot.map_all()
            count = int(ExcludedRows(self.store).holds(snapshot, rule).sum())
        notes.add_rule(rule)
        return count

    def include(self, ids: object = None, *, where: Expression | None = None) -> int:
        """Take back the exclusion of some rows, or end a rule.

        Rows that were excluded by their ids stay so where a rule ends.

        Args:
            ids: as of `exclude`.
            where: the expression of a rule.
        Returns: the number of these rows that are still in the cache; of rules that end, 1.
        Blocks: for cache.lock and the disk.
        Raises: as `exclude`; ValueError: there is no such rule.
        """
        notes = self._notes
        if not _is_rule(ids, where):
            return notes.include(row_ids(ids))
        require_rule(where)
        if not notes.end_rule(packed(where)):
            held = ", ".join(shown(each) for each, _ in self.rules()) or "none"
            raise ValueError(
                f"no rule excludes rows where {shown(where)}: cache.rules() has {held}; give one as it is "
                "there, such as cache.include(where=cache.rules()[0][0])"
            )
        return 1

    def rules(self) -> list[tuple[Expression, str]]:
        """Return the rules of `exclude(where=...)` that hold, oldest first: the expression and the reason.

        Raises: ValueError: a cache of a dataset. CacheFormatError: damaged notes.
        """
        return [(rule.where, rule.reason) for rule in self._notes.rules()]

    def tag(self, ids: object, tag: str) -> int:
        """Give rows a tag, for `Loader(rows=tag)` and queries. A row may have several.

        Args:
            ids: as of `exclude`.
            tag: a text, such as "hard". Any will do, since one that no row has yet is a new tag.
        Returns, Blocks, Raises: as `exclude`.
        """
        return self._notes.tag(row_ids(ids), tag)

    def untag(self, ids: object, tag: str) -> int:
        """Take a tag off rows, those that have it: none need to, so that it may be called twice.

        Args, Returns, Blocks: as `tag`. Raises: as `tag`; ValueError: a tag that no row has or had.
        """
        return self._notes.untag(row_ids(ids), tag)

    def annotate(self, ids: object, /, **values: ArrayLike) -> None:
        """Note values of rows, such as losses, for queries and `Loader(weights=)`. The latest one counts.

        Quick enough for each step of a training loop: a thread writes the values each second. So do a query,
        an epoch that weighs rows, `close`, and the end of the process; a killed process or a power cut loses
        the last ones.

        All together they take up to an eighth of the capacity, as files of 4 or 8 bytes a value; one of each
        row fits where a row has some 40 bytes or more. Beyond it the oldest leave, and the rows have none;
        the first time gives a RuntimeWarning, and there is a line in the log, at most one a minute. A Loader
        by annotations, or by a function, has their room made before it leases the segments.

        Args:
            ids: as of `exclude`; batches of `Loader(with_ids=True)` have them. Rows that have left the cache
                are passed over.
            values: by name: a number for each row, (n,), of any dtype that float64 holds, or one for all; it
                is read back as float64, and takes 4 bytes where float32 holds it, too, else 8. NaN: it has
                none. A masked array is refused. A name is no column's, and does not begin with "_". One that
                no row has is new.
        Blocks: no, unless a million rows wait to be written. Where they cannot be, the oldest are lost.
        Raises: ValueError, TypeError: not ids, a name or a number of values that does not fit, or a cache of
            a dataset. IndexError: a row that never was.
        """
        notes, found = self._notes, row_ids(ids)
        if not values:
            raise ValueError("annotate rows by a value: cache.annotate(ids, loss=losses)")
        taken = {name: _values(name, given, len(found), self.schema) for name, given in values.items()}
        notes.annotate(found, taken)

    @property
    def _notes(self) -> NotesLog:
        """The notes of this cache. Raises: ValueError: it has none."""
        if self.store.settings.dataset is not None:
            raise ValueError(
                "the cache of a dataset has no notes on rows: items move as segments are merged. Leave items "
                "out by a torch.utils.data.Subset of the dataset"
            )
        if self._log is None:
            self._log = NotesLog.of(self.store)
        return self._log

    def dataset(self) -> pyarrow.dataset.Dataset:
        """Return a pyarrow dataset of every row, over the mapped files, which stay leased while it lives.

        Rows that are excluded are among them, without a mark: `arrowcache.explore.export_parquet` leaves
        them out or marks them, and `sql` has them as `_excluded`.
        """
        with importing():
            import pyarrow.dataset  # takes 20 ms, and few need it

        with self.snapshot() as snapshot:
            return pyarrow.dataset.dataset(snapshot.table())

    def evict(self, nbytes: int | str) -> int:
        """Evict the oldest segments until `nbytes` are freed, or up to the first leased one.

        Returns: the bytes freed.
        """
        return sum(segment.allocated_bytes for segment in self.store.evict(parse_bytes(nbytes, "nbytes")))

    def resize(self, capacity: int | str) -> None:
        """Change the capacity for all processes; the oldest segments are evicted if they no longer fit.

        Warns: RuntimeWarning: the new capacity is more than the disk holds.
        Raises: ValueError: under four segments, or under the size of the pace's min_rows. CacheFullError:
            leased segments do not fit. Nothing is changed then.
        """
        self.store.resize(parse_bytes(capacity, "capacity"))

    def freeze(self) -> None:
        """Have nothing of this cache change any more, so that it can be read anywhere. Idempotent.

        A cache that is finished can then be read on a read-only or a network file system, as a copy, by other
        users with the right to read it (`chmod -R a+rX`), and by any number of machines at once: readers take
        no lock, and write nothing there. Segments and notes are frozen: a writer, a pool, `evict`, `resize`,
        `set_pace`, `exclude`, `include`, `tag`, `untag`, `annotate`, an import and `verify(repair=True)`
        raise CacheFrozenError, until `thaw`. Headroom and pace do not apply, and no epoch waits for rows.

        The order of an epoch depends on the cache, a loader's arguments, its seed, epoch and rank, and on
        nothing else. So ranks on any number of nodes need no `run_id`: nothing is agreed on, and nothing
        checks that all give the same arguments. A damaged segment raises CorruptSegmentError, and stays. A
        loader's state fits each copy; with a Python function as `rows` or `weights` there is no state, since
        it cannot be repeated elsewhere.

        Blocks: until all of the cache is on the disk. Segments that a restart of the machine may have damaged
            are checked first, and quarantined if they are.
        Raises: CacheFrozenError: somebody writes, merges, annotates, or reads an epoch by weights or one that
            ranks have agreed on: it names who. LockTimeoutError, OSError: as of a publish.
        """
        if self.store.settings.dataset is None and not self.store.is_frozen:
            self._notes.flush()
        with explaining(self.path):
            recovery.freeze(self.store)

    def thaw(self) -> None:
        """Have a frozen cache change again, for users of this machine. Idempotent.

        Readers of the frozen cache hold no lease: their rows may be evicted under them. They compare at the
        begin of each epoch, and end with a CacheFormatError: it is to be opened anew. Copies stay frozen.

        Warns: RuntimeWarning: of that. As an error it leaves the cache frozen.
        Raises: PermissionError, OSError: this user may not change it, or the file system is read-only.
        """
        recovery.thaw(self.store)

    @property
    def pace(self) -> Pace | None:
        """The limits on how far training and sampling run ahead of each other. None means no limit."""
        with explaining(self.path):
            self.store.refresh_settings()
        return self.store.settings.pace

    def set_pace(self, pace: Pace | None) -> None:
        """Set the pace of all processes' loaders, samplers and writers, now. None removes it.

        Raises: TypeError: not a Pace. ValueError: the cache cannot hold its min_rows.
            LockTimeoutError, OSError: as of a publish.
        """
        with explaining(self.path):
            self.store.refresh_settings()
        require_pace(pace, self.store.settings)
        self.store.set_pace(pace)

    def close(self) -> None:
        """Refuse further use through this object; open snapshots go on. Idempotent.

        Raises: LockTimeoutError, CacheFullError, OSError: annotations cannot be written; try it again.
        """
        if self._log is not None:
            self._log.flush()
        self._closed = True

    def __reduce__(self) -> tuple[Callable[..., Cache], tuple[str, str]]:
        return Cache.open, (str(self.path), self._store.check)

    def __repr__(self) -> str:
        capacity = format_bytes(self._store.settings.capacity_bytes)
        return (
            f"<Cache {printable(self.path)}: {format_count(len(self.schema), 'column')}, capacity {capacity}>"
        )

    def _card(self) -> Card:
        """The present content, or why it is unknown. Never raises, and waits at most some seconds."""
        try:
            store = self.store
            store.segments()  # new files are looked at without cache.lock
            stats, segments, _ = store.survey(Limits.current.display_seconds)
            shown = [
                *overview(stats, segments, self._looks),
                *marked_rows(store, segments),
                self.schema.table,
            ]
            return Card("Cache", str(self.path), shown)
        except FileNotFoundError:
            why = "its folder was moved or removed while in use"
        except (OSError, ArrowCacheError, ValueError) as error:
            why = str(error)
        return Card("Cache", f"{self.path}: {why}")


def marked_rows(store: Store, segments: Sequence[SegmentInfo]) -> list[str]:
    """Count the rows of segments that are excluded by ids, and those of each tag, in words; none of no row.

    A rule is shown as it is: to count its rows takes a look at all.
    """
    notes = NotesLog.of(store)
    if not notes.files(MARKS):
        return []
    rows = NumberedRows.of(segments)
    marks = {"excluded": notes.excluded(rows)}
    marks |= {f"tagged {printable(tag)}": notes.tagged(rows, tag) for tag in notes.tags()}
    counts = [f"{format_count(int(has.sum()), 'row')} {mark}" for mark, has in marks.items() if has.any()]
    rules = [(shown(rule.where), f": {printable(rule.reason)}" * bool(rule.reason)) for rule in notes.rules()]
    return counts + [f"excluded where {where}{reason}" for where, reason in rules]


def _is_rule(ids: object, where: object) -> bool:
    """True if rows are said by a rule, not by ids. Raises: TypeError: by both, or neither."""
    if (ids is None) == (where is None):
        raise TypeError("say which rows: give either ids or where=, a pyarrow.compute expression")
    return ids is None


def _values(name: str, given: ArrayLike, rows: int, schema: Schema) -> NDArray[np.float64]:
    if not require_text(name, "the name of a value") or name in schema or name.startswith("_"):
        raise ValueError(
            f"a value cannot have the name {name!r}: take one that is no column's and does not begin with '_'"
        )
    array = on_host(given, name)
    if array.dtype.kind not in "biuf" or array.ndim > 1 or (array.ndim and len(array) != rows):
        raise ValueError(
            f"{name} has shape {array.shape} and dtype {array.dtype}, and goes with "
            f"{format_count(rows, 'id')}: give a number for each, or one for all"
        )
    values = np.empty(rows, np.float64)
    values[:] = array
    return values
