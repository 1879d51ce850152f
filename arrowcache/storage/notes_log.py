"""NotesLog: reads, appends and merges the note files of a cache, which say what is known of its rows.

A call appends one small file to `notes/`, whole or not at all, with the next number, under cache.lock; files
never change. Of two statements on one topic the one in the file of the higher number counts. The last two
files are merged into one, which has the numbers of both, if their sizes are similar: so there are few. A
process that dies between linking the merged file and unlinking its parts leaves parts within the numbers of
another file. Nobody reads these, and the next merge removes them.

A rule is a mark, too: a file of its own, in its place among the others, with which it is not merged. So rows
that are included behind it are its exceptions. It ends as its file leaves.

There are two kinds of files. Marks (exclusions and tags) are on the disk before the call returns, and leave
only with their segment. Values (annotations) wait in memory: a thread writes them each second, and ends when
none come. A killed process loses those of its last second, a power cut may lose more. Values may take an
eighth of the capacity; beyond it, or where other notes need their room, the oldest are dropped. A file leaves
with the newest segment that it has a note on.

Guarantees: notes count in the capacity. A reader takes no lock, and sees the notes of a call wholly or not at
all. Notes on rows that are gone are not seen. `annotate` waits for no disk and no lock of another process,
unless a million rows wait already. Values that cannot be written are kept and tried again, up to a million
rows: then the oldest are lost.
Must never: change a segment, or an epoch that is under way.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress

import numpy as np
import xxhash
from numpy.typing import NDArray

from arrowcache.errors import (
    ArrowCacheError,
    CacheFormatError,
    CacheFullError,
    WorkerError,
    log,
    sentence_of,
    warn,
)
from arrowcache.lifetimes import at_exit, at_worker_exit, call_all, forgets_in_child, unforked
from arrowcache.os_errors import explaining, start
from arrowcache.storage.layout import MAX_NOTE_BYTES, NOTES, NoteFile
from arrowcache.storage.row_ids import NumberedRows
from arrowcache.storage.row_notes import (
    EXCLUDED,
    INCLUDED,
    NO_LINES,
    TAGGED,
    UNTAGGED,
    VALUE,
    LatestValues,
    NoteLines,
    RowStatements,
    Rule,
    require_tag,
)
from arrowcache.storage.store import Store
from arrowcache.units import did_you_mean, format_bytes, format_count

MARKS, VALUES = "marks", "values"
_MAX_MERGED_BYTES = 32 << 20  # of a file that is merged: cache.lock is held meanwhile
_VALUE_BYTES = 4  # of one value, at least
_ROW_BYTES = 12  # of a value and its row, and to merge files of them
_LOG_SECONDS = 60.0  # between two lines in the log
_WRITE_SECONDS = 1.0  # between two writes of values
_MAX_WAITING_ROWS = 1 << 20
_ATTEMPTS = 100  # to read files that others merge meanwhile

Holds = Callable[[Rule], NDArray[np.bool_]]
"""Tells for which rows a rule holds: (rows,)."""
_Values = Mapping[str, NDArray[np.float64]]  # by name: one for each row
_Waiting = tuple[NDArray[np.int64], _Values]  # rows (n, 2) and their values


class NotesLog:
    """The notes of one cache. Safe to use from several threads and processes.

    `NotesLog.of` gives the log that all users of a cache in this process share; so they share the values that
    wait, the thread that writes them, and what is read of the files.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[NoteFile, NoteLines] = {}  # content of files; replaced as a whole
        self._last_listed: tuple[object, list[NoteFile]] = None, []  # and when a name came or left last
        self._loss: str | None = None  # the first loss of values; "" once it was warned of
        self._logged = -math.inf  # the last time that a loss was logged
        self.forget_in_child()
        forgets_in_child(self)

    def forget_in_child(self) -> None:
        """Begin anew: values that wait are the parent's to write."""
        self._waiting: list[_Waiting] = []
        self._waiting_rows = 0
        #: All rows at the last look, and the number of the next segment.
        self._seen: tuple[NumberedRows, int] | None = None
        self._adding, self._writing = threading.RLock(), threading.RLock()  # the second is taken first
        self._thread: threading.Thread | None = None
        self._ends_with_worker = False
        self._sign = ExitStack()  # shows that values wait, while some do

    @classmethod
    def of(cls, store: Store) -> NotesLog:
        """The log of a cache, shared by its users in this process. Raises: OSError: its folder is gone."""
        with explaining(store.folder.path):
            identity = store.folder.path, *store.identity
        with unforked:  # and no other thread comes in between
            shared = _living.get(identity)
            if shared is None:
                shared = _living[identity] = cls(store)
            return shared

    # marks

    def exclude(self, ids: NDArray[np.int64], reason: str) -> int:
        """Have all that trains leave out rows (n, 2). Returns: the number of those still there."""
        return self._mark(ids, EXCLUDED, reason)

    def include(self, ids: NDArray[np.int64]) -> int:
        """Take back the exclusion of rows (n, 2). Returns: the number of those still there."""
        return self._mark(ids, INCLUDED, "")

    def tag(self, ids: NDArray[np.int64], tag: str) -> int:
        """Give rows (n, 2) a tag. Returns: the number of those still there."""
        return self._mark(ids, TAGGED, require_tag(tag))

    def untag(self, ids: NDArray[np.int64], tag: str) -> int:
        """Take a tag off rows (n, 2). Returns: the number of those still there.

        Raises: ValueError: no row has or had it, and some of these are there.
        """
        return self._mark(ids, UNTAGGED, require_tag(tag))

    def _mark(self, ids: NDArray[np.int64], predicate: int, text: str) -> int:
        with self._store.locked():
            rows = NumberedRows.of(self._store.segments())
            next_seq = self._store.folder.read_record().next_seq
        numbers, _ = rows.numbers(ids, next_seq)
        if len(numbers):
            if predicate == UNTAGGED and text not in (tags := self.tags()):
                raise ValueError(f"{_no_tag(text, tags)}; it can be taken off no row")
            lines = NoteLines.of(rows, [text], RowStatements.of(numbers, predicate))
            self._append(MARKS, lines, lines.pack())
            self.merge(MARKS)
            self._warn_of_loss()
        return len(numbers)

    def add_rule(self, rule: Rule) -> None:
        """Have a rule hold from now on, in place of one with the same expression.

        One that holds already, with the same reason, stays as it is, with its exceptions.
        """
        if rule in self.rules():
            return
        lines = rule.lines()
        self._append(MARKS, lines, lines.pack())
        with self._store.locked():
            for file in self._files_of(rule.content)[:-1]:
                self._store.folder.drop_note(file)
        self.merge(MARKS)

    def end_rule(self, content: bytes) -> bool:
        """End the rule with an expression. Returns: False: there is none."""
        with self._store.locked():
            files = self._files_of(content)
            for file in files:
                self._store.folder.drop_note(file, syncs=True)
        self.merge(MARKS)  # of what it lay between
        return bool(files)

    def rules(self) -> list[Rule]:
        """The rules that hold, oldest first."""
        return [rule for notes in self.read(MARKS).values() for rule in notes.rules]

    def _files_of(self, content: bytes) -> list[NoteFile]:
        """The files of rules with an expression, oldest first; under cache.lock."""
        files = [file for file in self.files(MARKS) if file.is_rule]
        return [file for file in files if any(rule.content == content for rule in self._lines(file).rules)]

    # values

    def annotate(self, ids: NDArray[np.int64], values: _Values) -> None:
        """Take a value of each name for each row (n, 2), to be written within a second.

        Blocks: for cache.lock and the disk, if a million rows wait already.
        Warns: RuntimeWarning, once: older values were dropped for want of room, or could not be written.
        Raises: ValueError: they are more than there may be. IndexError: a row that never was.
            CacheFrozenError: the cache is frozen.
        """
        self._store.require_thawed()
        with suppress(ArrowCacheError, OSError):  # then it is passed over as the values are written
            self._require_known(ids)
        count = len(ids) * len(values)
        if count > self.max_values:
            self._store.refresh_settings()  # another process may have raised the capacity
        if count > self.max_values:
            raise ValueError(
                f"{format_count(count, 'value')} are more than an eighth of the cache's capacity holds, "
                f"{self.max_values}: annotate fewer rows, or raise the capacity"
            )
        self._warn_of_loss()
        if not self._ends_with_worker:
            self._ends_with_worker = True
            at_worker_exit(self._flush_at_exit)
        with self._adding:
            if not self._waiting:
                self._sign = self._store.show_writing(of_notes=True)
            self._waiting.append((ids, values))
            self._waiting_rows += len(ids)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="arrowcache-annotate", daemon=True)
                try:
                    start(self._thread)
                except WorkerError:  # it is tried again
                    self._thread = None
        if self._waiting_rows > _MAX_WAITING_ROWS:
            try:
                self._write_waiting()
            except (ArrowCacheError, OSError) as error:  # which ends no training
                self._drop_oldest_waiting(sentence_of(error))

    @property
    def max_values(self) -> int:
        """The number of values that there may be."""
        return self._max_bytes // _VALUE_BYTES

    def _require_known(self, ids: NDArray[np.int64]) -> None:
        """Look for rows (n, 2) among the segments of the last look, and anew if one is of none of them."""
        for is_new in (False, True):
            if is_new or self._seen is None:
                rows = NumberedRows.of(self._store.segments())
                self._seen = rows, self._store.folder.read_record().next_seq
            rows, next_seq = self._seen
            try:
                rows.numbers(ids, next_seq)
            except IndexError:
                if is_new:
                    raise
            else:
                return

    def flush(self) -> None:
        """Write the values that wait.

        Blocks: for cache.lock and the disk.
        Warns: RuntimeWarning, once: as `annotate`.
        Raises: LockTimeoutError, CacheFullError, OSError: they cannot be written, and wait on.
        """
        self._write_waiting()
        self._warn_of_loss()

    def flush_or_warn(self, outcome: str = "wait") -> None:
        """As `flush`, for a caller that goes on with older values.

        Args:
            outcome: what values that cannot be written do, for the warning.
        """
        try:
            self.flush()
        except (ArrowCacheError, OSError) as error:
            rows = format_count(self._waiting_rows, "row")
            warn(f"annotations of {rows} {outcome}: {sentence_of(error)}")

    def _flush_at_exit(self) -> None:
        self.flush_or_warn("are lost")

    def _write_waiting(self) -> None:
        with self._writing:
            with self._adding:
                waiting = self._waiting.copy()
            if waiting:
                names = dict.fromkeys(name for _, values in waiting for name in values)
                self.write_values({name: _of_name(name, waiting) for name in names})
            with self._adding:
                del self._waiting[: len(waiting)]
                self._waiting_rows -= sum(len(ids) for ids, _ in waiting)
                if not self._waiting:
                    self._sign.close()

    def _drop_oldest_waiting(self, why: str) -> None:
        with self._writing, self._adding:
            before = self._waiting_rows
            while self._waiting_rows > _MAX_WAITING_ROWS // 2:
                ids, _ = self._waiting.pop(0)
                self._waiting_rows -= len(ids)
        rows = format_count(before, "row")
        lost = before - self._waiting_rows
        self._note_loss(
            f"of {rows} whose annotations wait to be written, the oldest {lost:,} are lost: {why}"
        )

    def _run(self) -> None:
        try:
            while True:
                time.sleep(_WRITE_SECONDS)
                with suppress(ArrowCacheError, OSError):  # tried again; `flush` raises it, the exit tells it
                    self._write_waiting()
                self.merge(VALUES)
                with self._adding:
                    if not self._waiting:
                        self._thread = None
                        return
        except BaseException:  # such as MemoryError: the next value starts a thread anew
            with self._adding:
                self._thread = None
            raise

    def write_values(self, values: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]) -> None:
        """Write values of rows, by name: rows (n, 2), values (n,). Those of rows that left are passed over.

        If they are more than values may take, the last ones are written. Call `merge` now and then.
        """
        rows = NumberedRows.of(self._store.segments())
        while True:
            parts = []
            for place, (ids, value) in enumerate(values.values()):
                numbers, is_there = rows.numbers(ids)
                parts.append(RowStatements.of(numbers, VALUE, place, value[is_there]))
            statements = RowStatements(*map(np.concatenate, zip(*parts, strict=True)))
            lines = NoteLines.of(rows, [*values], statements)
            data = lines.pack()
            if len(data) <= min(self._max_bytes, MAX_NOTE_BYTES):
                break
            self._note_dropped(len(data) // 2)
            values = {name: (ids[len(ids) // 2 :], v[len(ids) // 2 :]) for name, (ids, v) in values.items()}
        if len(lines.lines):
            self._append(VALUES, lines, data)

    def _warn_of_loss(self) -> None:
        """Warn, once, of values that were lost. This is only logged, not warned, if warnings are errors."""
        if self._loss:
            message, self._loss = self._loss, ""
            with suppress(RuntimeWarning):
                warn(message)

    def _note_dropped(self, nbytes: int) -> None:
        self._note_loss(
            f"the oldest annotations of {self._store.folder.path} leave, {format_bytes(nbytes)} now: all may "
            f"take {format_bytes(self._max_bytes)}, an eighth of the capacity, where exclusions, tags and "
            "leased segments leave them as much. Rows without a value weigh as much as the heaviest. Raise "
            "the capacity with cache.resize(), or annotate fewer rows, or by fewer names"
        )

    def _note_loss(self, message: str) -> None:
        """Log that values were lost, at most once a minute; `_warn_of_loss` warns of the first loss."""
        if (now := time.monotonic()) - self._logged > _LOG_SECONDS:
            self._logged = now
            log(message)
        if self._loss is None:
            self._loss = message

    # files

    @property
    def _max_bytes(self) -> int:
        """The most bytes that notes of a kind take."""
        return self._store.settings.notes_bytes

    def _append(self, kind: str, lines: NoteLines, data: bytes) -> None:
        """Write lines as the newest file of a kind."""
        with self._store.locked():
            last = max((file.last for file in self._store.folder.note_files()), default=0)
            number = max(last + 1, time.time_ns())  # no number is given twice, also where the last file left
            self._link(NoteFile(number, number, lines.newest, _digest(data), kind), data, lines)

    def merge(self, kind: str) -> None:
        """Merge files of similar size. Never fails: it is done another time."""
        with suppress(ArrowCacheError, OSError):
            while self._merge(kind):
                pass

    def _merge(self, kind: str) -> bool:
        """Merge the newest file of a kind with the one before it, if that is not much larger.

        Returns: True if it has. cache.lock is taken only to put the merged file in their place.
        """
        folder, files = self._store.folder, self._listed(kind)
        older, newer = map(folder.note_bytes, files[-2:]) if len(files) > 1 else (1, 0)
        if older > min(2 * newer, _MAX_MERGED_BYTES, self._max_bytes):
            return False
        if any(file.is_rule for file in files[-2:]):
            return False
        rows = NumberedRows.of(self._store.segments())
        lines = self._lines(files[-2]).merged(self._lines(files[-1]), rows)
        data = lines.pack()
        file = NoteFile(files[-2].first, files[-1].last, lines.newest, _digest(data), kind)
        with self._store.locked():
            is_last = self._listed(kind)[-2:] == files[-2:]
            if is_last:
                self._link(file, data, lines)
        return is_last

    def _link(self, file: NoteFile, data: bytes, lines: NoteLines) -> None:
        """Make a file appear, in place of those with the same numbers; under cache.lock."""
        folder = self._store.folder
        self._make_room(file, len(data))
        folder.sweep()
        self._require_room(file, len(data))
        folder.link_note(file, data, syncs=file.kind == MARKS)
        self._known = {**self._known, file: lines}
        for other in folder.note_files():
            if other.kind == file.kind and other.is_within(file):
                folder.drop_note(other)

    def _make_room(self, new: NoteFile, more: int) -> None:
        """Drop the oldest values that leave no room for a file of more bytes, which may replace some.

        Raises: CacheFullError: marks would take too much.
        """
        folder, share, kind = self._store.folder, self._max_bytes, new.kind
        files = (file for file in folder.note_files() if not (file.kind == kind and file.is_within(new)))
        nbytes = {file: folder.note_bytes(file) for file in files}
        marks = sum(size for file, size in nbytes.items() if file.kind == MARKS)
        if kind == MARKS and (marks + more > share or more > MAX_NOTE_BYTES):
            raise CacheFullError(
                f"exclusions and tags take {format_bytes(marks)}, and these {format_bytes(more)} more, which "
                "is above an eighth of the capacity: choose so many rows by Loader(rows=a function), or "
                "raise the capacity"
            )
        values = [file for file in nbytes if file.kind == VALUES]
        left = share - more if kind == VALUES else share
        if kind == MARKS:  # rather values than segments
            allocated = self._store.allocated_bytes(self._store.segments())
            others = allocated - sum(nbytes[file] for file in values)
            left = min(left, self._store.settings.capacity_bytes - more - others)
        dropped = 0
        for file in reversed(values):
            left -= nbytes[file]
            if left < 0:
                folder.drop_note(file)
                dropped += nbytes[file]
        if dropped:
            self._note_dropped(dropped)

    def _require_room(self, new: NoteFile, more: int) -> None:
        """Evict as much as a file of more bytes needs. Where all is leased, rather the oldest values leave.

        Raises: CacheFullError: there are none, or it is a merged file, which is made another time.
        """
        folder = self._store.folder
        while True:
            try:
                return self._store.require_room(more)
            except CacheFullError:
                oldest = next((file for file in folder.note_files() if file.kind == VALUES), None)
                if oldest is None or new.first < new.last:
                    raise
                nbytes = folder.note_bytes(oldest)
                folder.drop_note(oldest)
                self._note_dropped(nbytes)

    def missing_bytes(self, rows: int) -> int:
        """The bytes that values of so many rows may take beyond those that are there; under cache.lock."""
        folder = self._store.folder
        there = sum(folder.note_bytes(file) for file in folder.note_files() if file.kind == VALUES)
        return max(0, min(self._max_bytes, _ROW_BYTES * rows) - there)

    def files(self, kind: str) -> tuple[NoteFile, ...]:
        """The files of a kind, in order. They differ after each note. Empty before the first."""
        files = self._listed(kind)
        while files != (again := self._listed(kind)):  # one may miss a new file and what it is made of
            files = again
        return tuple(files)

    def read(self, kind: str) -> dict[NoteFile, NoteLines]:
        """All notes of a kind, by file, in order. Raises: CacheFormatError: marks are damaged."""
        for left in reversed(range(_ATTEMPTS)):
            try:
                known = {file: self._lines(file) for file in self.files(kind)}
                break
            except FileNotFoundError:  # it was merged into another one meanwhile
                if not left:
                    raise
        others = {file: lines for file, lines in self._known.items() if file.kind != kind}
        self._known = others | known
        return known

    def _listed(self, kind: str) -> list[NoteFile]:
        """The files of a kind, in order, without those whose numbers another one has, too."""
        files: list[NoteFile] = []
        for file in self._all_files():
            if file.kind == kind and not (files and file.last <= files[-1].last):
                files.append(file)
        return files

    def _all_files(self) -> list[NoteFile]:
        """All files, as of `Folder.note_files`. They are listed anew if a name may have come or left."""
        folder, (known, files) = self._store.folder, self._last_listed
        changed = folder.changed_ns(NOTES)
        if changed is None or changed != known:
            files = folder.note_files()
            self._last_listed = changed, files
        return files

    def _lines(self, file: NoteFile) -> NoteLines:
        """The content of a file. Raises: FileNotFoundError: it was merged. CacheFormatError: damage."""
        if (known := self._known.get(file)) is not None:
            return known
        folder, lines = self._store.folder, NO_LINES
        path = folder.notes / file.name
        data = folder.read_note(file)
        if file.fits(data):
            lines = NoteLines.unpack(data, str(path))
        elif file.kind == MARKS or self._store.is_frozen:
            what = "which rows are excluded and tagged" if file.kind == MARKS else "values of rows"
            way = "to go on without its notes, call cache.verify()"
            way = "copy it again" if self._store.is_frozen else way
            raise CacheFormatError(f"{path} is damaged, which says {what}: {way}")
        else:  # values are not synced
            warn(f"{path} is damaged: its annotations are lost")
        self._known = {**self._known, file: lines}
        return lines

    # what is said of rows

    def excluded(self, rows: NumberedRows, holds: Holds | None = None) -> NDArray[np.bool_]:
        """Tell which rows are excluded: (rows,). Without `holds` by their ids alone."""
        return self._marked(rows, INCLUDED, EXCLUDED, holds=holds)

    def tagged(self, rows: NumberedRows, tag: str) -> NDArray[np.bool_]:
        """Tell which rows have a tag: (rows,)."""
        return self._marked(rows, UNTAGGED, TAGGED, tag)

    def values(self, rows: NumberedRows, name: str) -> NDArray[np.float64]:
        """The latest value of this name of each row: (rows,); NaN where none is."""
        return LatestValues(name).of(rows, self.read(VALUES)).astype(np.float64, copy=False)

    def reasons(self, rows: NumberedRows, holds: Holds | None = None) -> NDArray[np.object_]:
        """The reason of each excluded row, and None of the others: (rows,)."""
        none = np.array(None)
        reasons = np.full(rows.size, none)
        for notes in self.read(MARKS).values():
            if holds is not None:
                for rule in notes.rules:
                    reasons[holds(rule)] = rule.reason
            texts = np.array(notes.texts, object)
            for some in notes.statements(rows, INCLUDED, EXCLUDED):
                reasons[some.rows] = np.where(some.predicates == EXCLUDED, texts[some.texts], none)
        return reasons

    def _marked(
        self, rows: NumberedRows, off: int, on: int, text: str | None = None, holds: Holds | None = None
    ) -> NDArray[np.bool_]:
        marked = np.zeros(rows.size, np.bool_)
        for notes in self.read(MARKS).values():
            if holds is not None:
                for rule in notes.rules:
                    marked |= holds(rule)
            for some in notes.statements(rows, off, on, text=text):
                marked[some.rows] = some.predicates == on
        return marked

    def tags(self) -> list[str]:
        """All tags that rows have or had, in order."""
        return self._texts(MARKS, UNTAGGED, TAGGED)

    def names(self, expected: Iterable[str] = ()) -> list[str]:
        """The names of all values, those that wait and those expected included, in order."""
        with self._adding:
            waiting = {name for _, values in self._waiting for name in values}
        return sorted({*self._texts(VALUES, VALUE), *waiting, *expected})

    def _texts(self, kind: str, *predicates: int) -> list[str]:
        return sorted({text for notes in self.read(kind).values() for text in notes.texts_of(*predicates)})

    def require_known_tag(self, tag: str, expected: Collection[str] = ()) -> None:
        """Check that some row has or had a tag, or that it is to come. Raises: ValueError: neither."""
        if tag in expected or tag in (tags := self.tags()):
            return
        raise ValueError(
            f"{_no_tag(tag, tags)}; cache.tag(ids, {tag!r}) gives it to rows, and a Loader takes one that is "
            f"only to come by expect={tag!r}"
        )


def _of_name(name: str, waiting: Sequence[_Waiting]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    some = [(ids, values[name]) for ids, values in waiting if name in values]
    return np.concatenate([ids for ids, _ in some]), np.concatenate([values for _, values in some])


def _digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _no_tag(tag: str, tags: Collection[str]) -> str:
    there = f"there are {', '.join(map(repr, tags))}" if tags else "there is none yet"
    return f"no row has the tag {tag!r}: {did_you_mean(tag, tags)}{there}"


def _flush_all() -> None:
    call_all([each._flush_at_exit for each in [*_living.values()]])


_living: weakref.WeakValueDictionary[object, NotesLog] = weakref.WeakValueDictionary()
at_exit(_flush_all)
